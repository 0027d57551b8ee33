"""A partition: blocks, versions and ledger, changed by one at a time, and the way of a push through them.

The way is gather, verdict, apply. In a synchronous job a push is recorded as its logical rank's contribution, and the
last one of a step takes the step; in an asynchronous job each push is a step of its own. Either way the verdict names
the members and their shares, and the blocks apply them into the next version.

Whoever changes the partition has its turn meanwhile, however long the arithmetic takes. What others see, version,
ledger and gate, changes under the lock, in one moment in which the turn's owner has all that it needs: so readers, and
checkpoints that copy, wait for nobody's arithmetic.

Invariants: work is counted once, by its name (rule A2); a push is applied whole or not at all, so memory is asked for
before anything changes; the generation is checked within the turn (rule A3), and who raises it takes the turn after;
first values are written only before the partition is opened. Must not know: other partitions, sockets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardyard.checkpoints.partition_file import PartitionState
from shardyard.ground.errors import CheckpointDamaged, InvalidRequest, NotFound, ShapeMismatch, TooLarge
from shardyard.ground.failpoints import failpoint
from shardyard.ground.optimizers import check_update
from shardyard.ground.types import (
    DoneDataShards,
    Incarnation,
    JobLayout,
    Missing,
    Outcome,
    PartitionId,
    PartResult,
    Place,
    PushName,
    PushPart,
    RankSource,
    SourceKey,
    Token,
    UpdateMode,
    Version,
    Watermark,
)
from shardyard_ps_server.blocks import Blocks, Contribution
from shardyard_ps_server.cuts import Cut
from shardyard_ps_server.gate import Gate, verdict
from shardyard_ps_server.ledger import Ledger
from shardyard_ps_server.versions import Bytes, Memory, Versions, aligned_empty, private_memory


class Partition:
    """One partition of a job. Safe for several threads.

    `check_current` is called within the turn before anything changes, and raises StaleGeneration where the partition
    has moved on meanwhile.
    """

    def __init__(
        self,
        layout: JobLayout,
        partition: PartitionId,
        mode: UpdateMode,
        logical_ranks: int,
        memory: Memory = private_memory,
    ) -> None:
        self._layout = layout.partitions[partition]
        self._optimizer = layout.optimizer
        self.id = partition
        self._blocks = Blocks(layout, self._layout)
        self._versions = Versions(self._layout.payload_bytes, memory)
        self._ledger = Ledger(partition)
        self._gate: Gate[Contribution] | None = Gate(partition, logical_ranks) if mode is UpdateMode.SYNC else None
        self._ranks = logical_ranks
        self._kept: list[Bytes] = []
        self._spare: list[Bytes] = []
        self._open = False
        # the version at which a checkpoint is to be cut, then that cut
        self._named: int | Cut | TooLarge | None = None
        self._turn = threading.Lock()
        self._changed = threading.Condition()

    @property
    def payload_bytes(self) -> int:
        return self._layout.payload_bytes

    def describe(self) -> tuple[Version, int]:
        """The newest version and the number of sources in the ledger."""
        with self._changed:
            return self._versions.newest, len(self._ledger)

    # ---- first values

    def set_values(self, payload: Bytes, check_current: Callable[[], None]) -> None:
        """Overwrites the first values. Raises InvalidRequest where the partition is open."""
        with self._turn:
            check_current()
            if self._open:
                raise InvalidRequest(f"first values for partition {self.id}, which is open")
            self._versions.values[:] = payload

    def open(self) -> None:
        """The first values are final from here on."""
        with self._turn:
            self._open = True

    # ---- checkpoints

    def cut(self) -> Cut:
        """What the partition is now; to be released. Raises TooLarge."""
        with self._turn, self._changed:
            return self._cut()

    def name_cut(self, number: int, *, between: bool = False) -> None:
        """A synchronous job's partition is to be cut when it has that version, before anything follows it;
        `unname_cut` must come. `between`: where a part of the next step was recorded already, that version has passed.
        Raises InvalidRequest (facts: newest, and gathering where it has passed so) where it has passed, or another cut
        is under way, TooLarge."""
        with self._turn, self._changed:
            newest = self._versions.newest.number
            if newest > number:
                raise InvalidRequest(
                    f"a checkpoint of step {number} of partition {self.id}, which is at step {newest}",
                    facts={"newest": str(newest)},
                )
            if self._named is not None:
                raise self._busy()
            if between and newest == number and self._gate is not None and not self._gate.is_empty:
                raise InvalidRequest(
                    f"a checkpoint of step {number} of partition {self.id}, which has a part of the next one",
                    facts={"newest": str(newest), "gathering": str(newest)},
                )
            self._named = self._cut() if newest == number else number

    def named_cut(self, until: float) -> Cut | None:
        """Waits until `until` (time.monotonic) for the cut that was named, which is to be released then. None where it
        does not come in time. Raises TooLarge."""
        with self._changed:
            while isinstance(self._named, int):
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None
            found, self._named = self._named, None
            if isinstance(found, TooLarge):
                raise found
            return found

    def unname_cut(self) -> None:
        """The cut that was named is not wanted any more."""
        with self._changed:
            found, self._named = self._named, None
        if isinstance(found, Cut):
            found.release()

    def _busy(self) -> InvalidRequest:
        return InvalidRequest(f"two checkpoints of partition {self.id} at a time", todo="wait for the first")

    def _cut(self) -> Cut:
        if self._blocks.is_cut:
            raise self._busy()
        version, values, state = self._versions.newest, self._versions.values, self._blocks.cut()
        marks = self._ledger.marks()
        if self._gate is not None:  # contributions to the next step are not part of this one
            step = self._gate.step
            marks = tuple([mark._replace(next=min(mark.next, step)) for mark in marks])
        self._versions.hold(values)

        def release() -> None:
            with self._changed:
                self._blocks.end_cut(state)
                self._versions.release(values)

        return Cut(self.id, version, marks, self._ledger.floor, self._blocks.counts, values, state, release)

    def arrays(self, index: int, cut: Cut) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a block at a cut that is complete: "values", and optimizer state by the slots' names."""
        return self._blocks.arrays(index, cut.values, cut.state.of)

    @property
    def blocks(self) -> int:
        return len(self._layout.blocks)

    def restore(self, state: PartitionState) -> None:
        """From here on the partition, open, is as it was at a cut; what came since never happened. Readers of what was
        there are not disturbed. Raises CheckpointDamaged where state is missing, TooLarge, having changed nothing."""
        with self._turn:
            new = self._blank()
            found = [self._blocks.arrays(block.index, new) for block in state.blocks]
            for block, into in zip(state.blocks, found, strict=True):
                if {"values", *block.slots} != into.keys():
                    with self._changed:
                        self._versions.give_back(new)
                    raise CheckpointDamaged(
                        f"block {block.index} of partition {self.id} with the state {sorted(block.slots)}; expected "
                        f"{sorted(into.keys() - {'values'})}"
                    )
            self._blocks.keep_all()
            new[:] = 0
            for block, into in zip(state.blocks, found, strict=True):
                for name, values in ("values", block.values), *block.slots.items():
                    into[name][:] = values
            self._blocks.restore_counts([block.count for block in state.blocks])
            with self._changed:
                self._versions.restore(state.version, new)
                self._ledger.restore(state.marks, state.floor)
                if self._gate is not None:
                    self._gate = Gate(self.id, self._ranks, step=state.version.number)
                    self._spare += self._kept
                    self._kept = []
                self._open = True
                self._changed.notify_all()

    def forget(
        self,
        done: Sequence[DoneDataShards],
        workers: Sequence[Incarnation],
        floor: Token,
        check_current: Callable[[], None],
    ) -> None:
        """Rule A7. Raises StaleGeneration: a partition that was restored since may not have it closed."""
        with self._turn, self._changed:
            check_current()
            self._ledger.forget(done, workers, floor)

    def pass_over(self, key: SourceKey, next_sequence: int, check_current: Callable[[], None]) -> None:
        """Rule A11. Raises StaleGeneration."""
        with self._turn, self._changed:
            check_current()
            self._ledger.pass_over(key, next_sequence)

    # ---- leases

    def check_open(self, key: SourceKey, token: Token) -> None:
        """Raises what `open_source` would refuse; changes nothing."""
        with self._changed:
            self._ledger.check_open(key, token)

    def open_source(self, key: SourceKey, token: Token) -> Watermark:
        with self._turn, self._changed:
            return Watermark(self.id, self._ledger.open(key, token), self._versions.newest)

    def watermark(self, key: SourceKey) -> Watermark:
        with self._changed:
            return Watermark(self.id, self._ledger.next(key), self._versions.newest)

    # ---- pushes

    def check_recorded(self, part: PushPart, nbytes: int, groups: Sequence[Sequence[float]] | None) -> None:
        """Raises InvalidRequest for a part of a push that no server of this job can have admitted: of a payload of
        another length, in full layout or with absent blocks left out, or with settings of another optimizer."""
        if groups is not None:
            check_update(self._optimizer, groups)
        if part.code_bytes and nbytes:
            self.check_codes(part)
        elif nbytes not in (self.expected_bytes(part), self.payload_bytes if nbytes else 0):
            raise ShapeMismatch(f"partition {self.id} with {nbytes} bytes; expected {self.expected_bytes(part)}")

    def expected_bytes(self, part: PushPart) -> int:
        return self._blocks.expected_bytes(part)

    def check_codes(self, part: PushPart) -> None:
        """Raises MalformedPayload unless the codes of a compressed part are as many, and as long, as they may be."""
        self._blocks.check_codes(part)

    def unpack(self, part: PushPart, payload: Bytes) -> tuple[Bytes, tuple[bool, ...]]:
        return self._blocks.unpack(part, payload)

    def check_push(self, name: PushName, contribution: Contribution) -> None:
        """Raises what `push` would refuse; changes nothing. A server asks all its partitions before any applies."""
        with self._changed:
            self._judge(name, contribution)

    def push(self, name: PushName, contribution: Contribution, check_current: Callable[[], None]) -> PartResult:
        """Counts the work once. Raises Refused errors, InvalidRequest, NotReady, RateMismatch and TooLarge, having
        changed nothing."""
        with self._turn:
            with self._changed:
                check_current()
                duplicate = self._judge(name, contribution)
            if duplicate:
                outcome = Outcome.DUPLICATE
            elif self._gate is None:
                outcome = self._count(name, contribution)
            else:
                outcome = self._record(self._gate, name, contribution)
            failpoint("push.after_partition")
            with self._changed:
                return PartResult(self.id, outcome, self._ledger.next(name.key), self._versions.newest)

    def _judge(self, name: PushName, contribution: Contribution) -> bool:
        duplicate = self._ledger.is_duplicate(name)
        if not duplicate and self._gate is not None:
            source = name.key.source
            if not isinstance(source, RankSource) or name.first != name.last:
                raise InvalidRequest(
                    f"{name} in a synchronous job", todo="name the push by its logical rank and one step"
                )
            self._gate.check(source.rank, name.first, contribution)
        return duplicate

    def _count(self, name: PushName, contribution: Contribution) -> Outcome:
        # an empty push makes no version
        makes = contribution.groups is not None and contribution.weight > 0
        new = self._next((contribution,), (1.0,)) if makes else None
        with self._changed:
            self._ledger.advance(name)
            if new is not None:
                self._publish(new)
        return Outcome.APPLIED

    def _record(self, gate: Gate[Contribution], name: PushName, contribution: Contribution) -> Outcome:
        source = name.key.source
        assert isinstance(source, RankSource)
        if not gate.completes(source.rank):
            kept = self._keep(contribution)
            with self._changed:
                gate.record(source.rank, kept)
                self._ledger.advance(name)
            return Outcome.RECORDED
        new = self._next(*verdict(gate.with_last(source.rank, contribution)))
        with self._changed:
            gate.next_step()
            self._ledger.advance(name)
            self._publish(new)
        self._spare += self._kept
        self._kept = []
        return Outcome.APPLIED

    def _keep(self, contribution: Contribution) -> Contribution:
        """The contribution with a payload of our own: that of a push is the sender's to write again when it has the
        answer."""
        if len(contribution.payload) == 0:
            return contribution
        copy = self._spare.pop() if self._spare else aligned_empty(self._layout.payload_bytes)
        np.copyto(copy, contribution.payload)
        self._kept.append(copy)
        return contribution._replace(payload=copy)

    def _next(self, members: Sequence[Contribution], shares: Sequence[float]) -> Bytes:
        """The next version's values. All that a step needs is asked for before anything changes. Raises TooLarge."""
        if self._ranks > 1:
            self._blocks.reserve_sums()
        new = self._blank()
        self._blocks.update(members, shares, self._versions.values, new)
        failpoint("push.before_publish")
        return new

    def _blank(self) -> Bytes:
        with self._changed:
            new = self._versions.idle()
        return self._versions.another() if new is None else new

    def _publish(self, new: Bytes) -> None:
        version = self._versions.publish(new)
        self._changed.notify_all()
        if self._gate is not None and version.number == self._named:
            try:
                self._named = self._cut()
            except TooLarge as error:  # the update counts all the same
                self._named = error

    # ---- pulls

    def hold(self, number: int, exactly: bool, until: float) -> tuple[Version, Bytes] | Missing:
        """Waits until `until` (time.monotonic) for that version, or with `exactly` False for that or a later one. The
        buffer is the caller's to read until it calls `release`. Raises NotFound where an exact version is gone."""
        with self._changed:
            while self._versions.newest.number < number:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return Missing(self.id, self._versions.newest, number, self._waits_for())
            newest = self._versions.newest
            wanted = number if exactly else newest.number
            buffer = self._versions.find(wanted)
            if buffer is None:
                raise NotFound(
                    f"version {wanted} of partition {self.id}, whose newest is {newest.number}",
                    why="a partition keeps its last two versions",
                    facts={"partition": str(self.id), "newest": str(newest.number)},
                )
            self._versions.hold(buffer)
            return Version(newest.life, wanted), buffer

    def place(self, buffer: Bytes) -> Place | None:
        """Where processes on this machine find a buffer that is held, if they can."""
        return self._versions.place(buffer)

    def release(self, buffer: Bytes) -> None:
        with self._changed:
            self._versions.release(buffer)

    def _waits_for(self) -> str:
        if self._gate is None:
            return "a push"
        ranks = ", ".join(str(rank) for rank in self._gate.missing()[:8])
        return f"logical rank {ranks} of step {self._gate.step}"
