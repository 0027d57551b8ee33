"""A partition: blocks, versions and ledger, changed by one at a time, and the way of a push through them.

The way is gather, verdict, apply. In a synchronous job a push is recorded as its logical rank's contribution, and the
last one of a step takes the step; in an asynchronous job each push is a step of its own. Either way the verdict names
the members and their shares, and the blocks apply them into the next version. Where the gradient is clipped by its
global norm, the last contribution makes the mean, whose square norm is told, and the verdict comes later: then the mean
is applied, scaled.

Whoever changes the partition has its turn meanwhile, however long the arithmetic takes. What others see, version,
ledger and gate, changes under the lock, in one moment in which the turn's owner has all that it needs: so readers, and
checkpoints that copy, wait for nobody's arithmetic. PushedTableRows are changed in place; in a synchronous job what
they were is set aside before, so that look-ups see them as one version has them, the newest or the one before. Where
they are updated as they come (hybrid), a contribution's rows are so in the moment in which it is recorded: what of them
has counted is in a lane of its own, since a partition that goes back to a cut has rows of contributions to the next
step, but not these.

Invariants: work is counted once, by its name (rule A2); a push is applied whole or not at all, so memory is asked for
before anything changes; the generation is checked within the turn (rule A3), and who raises it takes the turn after;
first values are written only before the partition is opened; a partition whose tables were torn, since memory was
refused in the middle of a push, takes and gives nothing any more. Must not know: other partitions, sockets.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardyard.checkpoints.partition_file import PartitionState
from shardyard.domain.consistency import StaleRule, UpdateMode
from shardyard.domain.errors import (
    CheckpointDamaged,
    Internal,
    InvalidRequest,
    NotFound,
    NotReady,
    ShapeMismatch,
    ShardyardError,
    TooLarge,
)
from shardyard.domain.failpoints import failpoint
from shardyard.domain.ids import Incarnation, PartitionId, Rank, Token, Version
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.limits import HELD_ROWS_BYTES_MAX, PULL_WAIT_MS_MAX
from shardyard.domain.optimizers import check_update
from shardyard.domain.pulls import NotReadyPart, ShmLocation
from shardyard.domain.push_names import ROW_LANE, DoneDataShards, PushName, RankSource, SourceKey, Watermark
from shardyard.domain.pushes import GatheredPart, Outcome, PartResult, PushPart, StepVerdict
from shardyard.domain.tables.row_ids import Ids
from shardyard.runtime.clock import Clock, SystemClock
from shardyard_ps_server.partition.cuts import Cut
from shardyard_ps_server.partition.dense_state import Contribution, DenseState, Groups
from shardyard_ps_server.partition.ledger import Ledger
from shardyard_ps_server.partition.staleness import Staleness, Tally
from shardyard_ps_server.partition.step_gate import StepGate, Verdict, scale_of, verdict
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows.lookups_in_flight import LookupsInFlight, TablePart
from shardyard_ps_server.rows.partition_tables import (
    ExpiredIds,
    Floats,
    PartitionTables,
    PushedTableRows,
    scaled,
    square_norm,
)
from shardyard_ps_server.rows.pin_rows import PinRows
from shardyard_ps_server.rows.pinned_rows import PinnedRows, formers, merged, put_back
from shardyard_ps_server.rows.previous_rows import PreviousRows
from shardyard_ps_server.rows.table_states import Since, Tables, cut_tables, read_tables
from shardyard_ps_server.tables.cuts import Chunk
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.tables.table import Table
from shardyard_ps_server.values.versions import Bytes, Memory, VersionPin, Versions, aligned_empty, private_memory

SYSTEM_CLOCK: Final = SystemClock()


class RowsToRead(NamedTuple):
    """PushedTableRows of one table: ids, shape (n,), ascending, and `out`, shape (n, dim), into which their values are
    put."""

    table: int
    ids: Ids
    out: Floats


class Partition:
    """One partition of a job. Safe for several threads.

    `check_current` is called within the turn before anything changes, and raises StaleGeneration where the partition
    has moved on meanwhile.
    """

    def __init__(
        self,
        layout: JobLayout,
        partition: PartitionId,
        rules: UpdateRules,
        memory: Memory = private_memory,
        *,
        clock: Clock = SYSTEM_CLOCK,
        budget: Budget | None = None,
        in_flight: LookupsInFlight | None = None,
    ) -> None:
        """`clock`: by which rows of tables age; `budget`: of all tables of the server; `in_flight`: rows of the job
        that do not expire for now."""
        self._layout = layout.partitions[partition]
        self._optimizer = layout.optimizer
        self.id = partition
        self._blocks = DenseState(layout, self._layout)
        self._rules = rules
        self._rows_at_once = rules.rows_at_once and bool(layout.tables)
        self._tables = PartitionTables(
            layout,
            clock,
            recorded=rules.logged,
            swept=rules.rows_have_versions,
            budget=budget,
            in_flight=None
            if in_flight is None
            else lambda table, ids: in_flight.without(TablePart(partition, table), ids),
        )
        self._former: PreviousRows | None = None
        """Of a synchronous job that updates rows with its steps, from when the first is taken: what it has changed."""
        self._readers = PinRows(HELD_ROWS_BYTES_MAX // len(layout.partitions))
        self.torn: Internal | None = None
        """Why nothing is taken or given any more, if so."""
        self._versions = Versions(self._layout.payload_bytes, memory)
        self._ledger = Ledger(partition)
        self._stale: Staleness | None = None
        if rules.stale is not None:
            row_kinds = [table.optimizer for table in layout.tables]
            kind = layout.optimizer.kind
            self._stale = Staleness(
                rules.stale, partition, kind, self._versions, logged=rules.logged, row_kinds=row_kinds
            )
        self._compensated: Bytes | None = None
        self._squares: Bytes | None = None
        self._gate: StepGate[Contribution] | None = self._gate_at(0) if rules.mode is UpdateMode.SYNC else None
        # of the step that waits for its verdict: all its contributions in one
        self._mean: Contribution | None = None
        self._kept: list[Bytes] = []
        self._spare: list[Bytes] = []
        self._open = False
        # the version at which a checkpoint is to be cut, then that cut
        self._named: int | Cut | ShardyardError | None = None
        self._since: Since = {}
        self._turn = threading.Lock()
        self._changed = threading.Condition()

    @property
    def payload_bytes(self) -> int:
        return self._layout.payload_bytes

    @property
    def tables(self) -> Mapping[str, Table]:
        return self._tables.by_name

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

    def set_rows(self, rows: Sequence[PushedTableRows], check_current: Callable[[], None]) -> None:
        """First values of rows, over those that are there. Raises InvalidRequest where the partition is open,
        TableFull."""
        with self._turn:
            check_current()
            if self._open:
                raise InvalidRequest(f"first rows for partition {self.id}, which is open")
            self._tables.load(rows)

    def look_up(self, asked: Sequence[RowsToRead], number: int | None = None, until: float = 0.0) -> None:
        """Puts the rows that are asked for into `out`, as they are at this moment; in a synchronous job all as one
        version has them. `number`: that version, for which it waits until `until` (time.monotonic) as `hold` does.
        Changes nothing. Raises NotReady where it does not come in time, NotFound (facts: newest) where it has passed,
        InvalidRequest where rows are updated as they come, which have no such versions."""
        self._check_whole()
        if self._gate is None or self._rows_at_once:
            if number is not None:
                raise InvalidRequest(
                    f"rows of version {number} of partition {self.id}, whose rows are updated as they come",
                    todo="look them up as they are",
                )
            self._read_rows(asked)
            return
        while True:
            with self._changed:
                wanted = self._version_of_rows(number, until)
            self._read_rows(asked)
            with self._changed:
                former, newest = self._former, self._versions.newest.number
            if former is None or former.number < wanted:
                return
            if former.number == wanted:
                for each in asked:
                    former.put_back(each.table, each.ids, each.out)
                return
            if number is not None:
                raise self._passed(number, newest)

    def look_up_held(self, asked: Sequence[RowsToRead], wanted: VersionPin) -> None:
        """As `look_up`, as of a version that a reader wants with its rows, and that has come. Raises NotReady where it
        has not, VersionPassed where it is not held any more, InvalidRequest where it was wanted without rows."""
        self._check_whole()
        held = self._held_rows(wanted)
        self._read_rows(asked)
        with self._changed:  # what has changed while it was read, or before, was set aside before
            parts = held.parts()
        fewer = merged(parts)
        for each in asked:
            put_back(fewer, each.table, each.ids, each.out)
        with self._changed:
            held.take(parts, fewer)

    def items_held(self, table: int, wanted: VersionPin) -> Iterator[tuple[Ids, Floats]]:
        """All rows of a table as of a version that a reader holds, in pieces, ids in no order. Those that have changed
        since come twice, with the same values; ids that had no row then and have, or had, one since, come with what
        they read as. Raises what `look_up_held` raises, and NotReady as `items`."""
        held = self._held_rows(wanted)
        for chunk in self.items(table):
            values = np.ascontiguousarray(chunk.values)
            ids = chunk.ids[: values.shape[0]]
            with self._changed:  # what has changed by now was set aside before
                parts = held.parts()
            put_back(parts, table, ids, values)
            yield ids, values
        with self._changed:
            parts = held.parts()
        yield from formers(parts, table)  # those that have gone since are nowhere else

    def _held_rows(self, wanted: VersionPin) -> PinnedRows:
        with self._changed:
            held = self._readers.find(wanted)
            if held is None:
                raise InvalidRequest(f"rows of a pin of partition {self.id} that has none", todo="pin it with its rows")
            if wanted.version is None:
                raise NotReady(f"version {wanted.number} of partition {self.id}, which is not there yet")
        return held

    def _read_rows(self, asked: Sequence[RowsToRead]) -> None:
        for each in asked:
            self._tables.look_up(each.table, each.ids, each.out)

    def _version_of_rows(self, number: int | None, until: float) -> int:
        if number is None:
            return self._versions.newest.number
        missing = self._await(number, until)
        if missing is not None:
            raise NotReady(
                f"rows of version {number} of partition {self.id}, which is at version {missing.have.number} and waits "
                f"for {missing.waiting_for}"
            )
        newest = self._versions.newest.number
        if number < (newest if self._former is None else self._former.number):
            raise self._passed(number, newest)
        return number

    def _passed(self, number: int, newest: int) -> NotFound:
        return NotFound(
            f"version {number} of partition {self.id}, whose newest is {newest}",
            why="a partition keeps its last two versions",
            facts={"partition": str(self.id), "newest": str(newest)},
        )

    def items(self, table: int) -> Iterator[Chunk]:
        """All rows of a table as they are between two updates. Raises NotReady while they are read for somebody
        else."""
        found = self._tables.items(table)
        with self._turn:
            self._check_whole()
            first = next(found, None)
        if first is not None:
            yield first
            yield from found

    def open(self) -> None:
        """The first values are final from here on."""
        with self._turn:
            self._open = True

    # ---- checkpoints

    def cut(self, since: Since | None = None) -> Cut:
        """What the partition is now; to be released. `since`: of each table the generation that a checkpoint has, so
        that what has changed after it is enough, where that is known. Raises TooLarge, TableError, and NotReady where
        somebody reads a whole table."""
        with self._turn, self._changed:
            return self._cut(since or {})

    def name_cut(self, number: int, *, between: bool = False, since: Since | None = None) -> None:
        """A synchronous job's partition is to be cut when it has that version, before anything follows it;
        `unname_cut` must come. `between`: where a part of the next step was recorded already, that version has passed.
        `since`: as for `cut`. Raises InvalidRequest (facts: newest, and gathering where it has passed so) where it has
        passed, or another cut is under way, and what `cut` raises."""
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
            self._since = since or {}
            self._named = self._cut(self._since) if newest == number else number

    def named_cut(self, until: float) -> Cut | None:
        """Waits until `until` (time.monotonic) for the cut that was named, which is to be released then. None where it
        does not come in time. Raises what `cut` raises."""
        with self._changed:
            while isinstance(self._named, int):
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return None
            found, self._named = self._named, None
            if isinstance(found, ShardyardError):
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

    def _cut(self, since: Since) -> Cut:
        if self._blocks.is_cut:
            raise self._busy()
        version, values, state = self._versions.newest, self._versions.values, self._blocks.cut()
        try:
            tables = cut_tables(self.tables, since)
        except ShardyardError:
            self._blocks.end_cut(state)
            raise
        marks = self._ledger.marks()
        if self._gate is not None:  # contributions to the next step are not part of this one, but rows are as they are
            step = self._gate.step
            marks = tuple(
                [mark if mark.key.lane == ROW_LANE else mark._replace(next=min(mark.next, step)) for mark in marks]
            )
        self._versions.hold(values)

        def release() -> None:
            with self._changed:
                self._blocks.end_cut(state)
                self._versions.release(values)

        return Cut(self.id, version, marks, self._ledger.floor, self._blocks.counts, values, state, release, tables)

    def arrays(self, index: int, cut: Cut) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a block at a cut that is complete: "values", and optimizer state by the slots' names."""
        return self._blocks.arrays(index, cut.values, cut.state.of)

    @property
    def blocks(self) -> int:
        return len(self._layout.blocks)

    def restore(self, state: PartitionState, tables: Tables | None = None) -> None:
        """From here on the partition, open, is as it was at a cut; what came since never happened. Readers of what was
        there are not disturbed. `tables`: those of the state, where they were read already. Raises CheckpointDamaged
        where state is missing, TooLarge, and what reading tables raises, having changed nothing."""
        if tables is None:
            tables = read_tables(state.tables, self._tables.budget)
        if tables.keys() != self._tables.names:
            raise CheckpointDamaged(
                f"partition {self.id} with the tables {sorted(tables)[:8]}; expected {sorted(self._tables.names)[:8]}"
            )
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
                self._tables.become(tables)
                self._former = None
                self._readers.lose("the partition has gone back to a checkpoint")
                self._readers.end_push()
                self.torn = None
                self._ledger.restore(state.marks, state.floor)
                if self._stale is not None:
                    self._stale.restored(state.version)
                    self._squares = None  # no checkpoint has it
                if self._gate is not None:
                    self._gate = self._gate_at(state.version.number)
                    self._mean = None
                    self._spare += self._kept
                    self._kept = []
                self._open = True
                self._changed.notify_all()

    def let_go_tables(self) -> None:
        """It is not this server's any more: the memory of rows is for others, until it is restored."""
        with self._turn, self._changed:
            self._tables.become({})
            self._former = None
            self._readers.lose("the partition has left this server")

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
            duplicate = self._judge(name, contribution)
            contribution = self._fresh(name, contribution)
            recorded = self._recorded_rows(contribution)
        if not duplicate:
            self._tables.check_room(contribution.rows, recorded)

    def is_close_to_full(self, contribution: Contribution) -> bool:
        """Whether what was recorded, and has not taken effect, may leave no room for its rows."""
        return self._tables.is_close(contribution.rows)

    def await_push(self, contribution: Contribution) -> Contribution:
        """With the time of its rows, and what expires, of a push that is about to be recorded, by one thread at a time.
        `end_push` must follow when it has taken effect, or never will."""
        if not contribution.rows:
            return contribution
        with self._changed:
            step = self._versions.newest.number + 1
        rows, gone = self._tables.await_push(contribution.rows, step)
        return contribution._replace(rows=rows, gone=gone)

    def end_push(self, contribution: Contribution) -> None:
        if contribution.rows:
            self._tables.end_push(contribution.rows, contribution.gone)

    def push(self, name: PushName, contribution: Contribution, check_current: Callable[[], None]) -> PartResult:
        """Counts the work once. Raises Refused errors, InvalidRequest, NotReady, RateMismatch and TooLarge, having
        changed nothing."""
        with self._turn:
            with self._changed:
                check_current()
                duplicate = self._judge(name, contribution)
                contribution = self._fresh(name, contribution)
                recorded = self._recorded_rows(contribution)
            if not duplicate:
                self._tables.check_room(contribution.rows, recorded)
            if duplicate:
                outcome = self._repeated(name)
            elif self._gate is None:
                outcome = self._count(name, contribution)
            else:
                outcome = self._record(self._gate, name, contribution)
            failpoint("push.after_partition")
            with self._changed:
                return PartResult(self.id, outcome, self._ledger.next(name.key), self._versions.newest)

    def _judge(self, name: PushName, contribution: Contribution) -> bool:
        self._check_whole()
        duplicate = self._ledger.is_duplicate(name)
        if not duplicate and self._stale is not None:
            self._stale.check(contribution.base, self._versions.newest)
        if not duplicate and self._gate is not None:
            source = name.key.source
            if not isinstance(source, RankSource) or name.first != name.last:
                raise InvalidRequest(
                    f"{name} in a synchronous job", todo="name the push by its logical rank and one step"
                )
            self._gate.check(source.rank, name.first, contribution)
        return duplicate

    def _fresh(self, name: PushName, contribution: Contribution) -> Contribution:
        """Without rows that have counted, which those of a rank may have where its contribution is computed again."""
        if self._gate is None or not contribution.rows or self._ledger.counts_rows(name):
            return contribution
        return contribution._replace(rows=(), table_groups=(), gone=())

    def _recorded_rows(self, contribution: Contribution) -> list[PushedTableRows]:
        """Those for which there must be room beside a contribution's, which are to be updated together."""
        if self._gate is None or not contribution.rows:
            return []
        return [rows for other in self._gate.recorded for rows in other.rows]

    def _repeated(self, name: PushName) -> Outcome:
        """Of work whose sequence is over: it was counted, or came late."""
        source = name.key.source
        if self._gate is None or not isinstance(source, RankSource):
            return Outcome.DUPLICATE
        return Outcome.DROPPED if self._gate.has_dropped(source.rank, name.last) else Outcome.DUPLICATE

    def _count(self, name: PushName, contribution: Contribution) -> Outcome:
        # an empty push makes no version
        makes = contribution.groups is not None and contribution.weight > 0
        stale = self._stale if makes and not contribution.overflow else None
        staleness, compensated = 0, True
        applied = contribution
        if stale is not None:
            applied, staleness, compensated = self._amend(stale, contribution)
        new = self._next(Verdict((applied,), (1.0,), contribution.overflow)) if makes else None
        self._push_rows(applied.rows, applied.table_groups, gone=applied.gone)
        with self._changed:
            self._ledger.advance(name)
            self._end_push()
            if new is not None:
                self._publish(new)
            if stale is not None:
                stale.count(contribution.base, staleness, compensated=compensated)
                stale.passed(contribution.base)
        return Outcome.APPLIED

    def _push_rows(
        self,
        rows: Sequence[PushedTableRows],
        groups: Groups,
        former: PreviousRows | None = None,
        gone: Sequence[ExpiredIds] = (),
    ) -> None:
        """In place. Without `former`, what they were, look-ups see them before the push is acknowledged, as nobody can
        tell. `gone`: what expires with them."""
        if former is not None:
            with self._changed:
                self._former = former
                self._readers.keep([former])
        if not rows and not gone:
            return
        if former is None:
            self._set_aside_for_readers([rows, gone], begins=True)
        step, done = self._versions.newest.number + 1, False
        try:
            failpoint("rows.before_update")
            self._tables.push(rows, groups, step, gone, None if self._readers.come_too_late else self._hold_expiring)
            done = True
        finally:
            if not done:
                self.torn = Internal(
                    f"rows of update {step} of partition {self.id} are applied in part",
                    why="memory was refused in the middle of them, and what is half done cannot be taken back",
                    todo="give the server more memory; its partitions come back without that push",
                )

    def _hold_expiring(self, gone: ExpiredIds) -> None:
        """Of an asynchronous job without a log: what is about to expire with the push under way."""
        self._set_aside_for_readers([[gone]], begins=False)

    def _set_aside_for_readers(
        self, changing: Sequence[Sequence[PushedTableRows | ExpiredIds]], *, begins: bool
    ) -> None:
        """Where rows change as they come: what a push is about to change, where a reader holds what it was. `begins`:
        nothing of the push has changed yet."""
        with self._changed:
            wanted, number = self._readers.want_former(begins=begins), self._versions.newest.number
        if not wanted:
            return
        try:
            formers = [self._tables.set_aside(rows, number) for rows in changing]
        except TooLarge:
            with self._changed:
                self._readers.give_up("the server has no memory for what changes")
            return
        with self._changed:
            self._readers.keep_under_way(formers)

    def _end_push(self) -> None:
        """The push that changed rows has counted; called with `changed` held."""
        if self._readers.end_push():
            self._changed.notify_all()

    def _check_whole(self) -> None:
        if self.torn is not None:
            raise self.torn.anew()

    def _amend(self, stale: Staleness, contribution: Contribution) -> tuple[Contribution, int, bool]:
        """A gradient as it is to be applied, its staleness, and whether nothing is left to compensate. Raises
        TooLarge."""
        base, groups, now = contribution.base, contribution.groups, self._versions.values
        assert groups is not None
        with self._changed:
            newest = self._versions.newest
            staleness = stale.staleness(base, newest)
            values = stale.find(base)
            if values is not None:
                self._versions.hold(values)
        try:
            applied = contribution._replace(
                groups=stale.groups(groups, staleness),
                table_groups=stale.row_groups(contribution.table_groups, staleness),
            )
            changed = values is not None and values is not now
            if changed or stale.rule.decay:
                compensated = self._compensate(stale.rule, contribution, now if values is None else values, now)
                if changed:
                    applied = applied._replace(payload=compensated)
            return applied, staleness, values is not None or base is None or base.version == newest
        finally:
            if values is not None:
                with self._changed:
                    self._versions.release(values)

    def _compensate(self, rule: StaleRule, contribution: Contribution, base: Bytes, now: Bytes) -> Bytes:
        """A gradient's payload, compensated. All that its update needs is asked for before the mean of squares takes it
        in. Raises TooLarge."""
        if not len(contribution.payload):
            return contribution.payload
        if self._compensated is None:
            self._compensated = aligned_empty(self._layout.payload_bytes)
        if rule.decay:
            if self._squares is None:
                self._squares = aligned_empty(self._layout.payload_bytes)
                self._squares[:] = 0
            room = self._blank()
            with self._changed:
                self._versions.give_back(room)
        self._blocks.compensate(contribution, rule, base, now, self._compensated, self._squares)
        return self._compensated

    def _record(self, gate: StepGate[Contribution], name: PushName, contribution: Contribution) -> Outcome:
        source = name.key.source
        assert isinstance(source, RankSource)
        early: Callable[[], object] = _nothing_more
        # what shall not count now may count when it is computed again
        counts_rows = self._rows_at_once and contribution.groups is not None and not contribution.overflow
        if self._rows_at_once:
            early = partial(
                self._push_rows, self._own_rows(contribution), contribution.table_groups, gone=contribution.gone
            )
            contribution = contribution._replace(rows=(), table_groups=(), gone=())

        def advance() -> None:
            self._ledger.advance(name)
            if counts_rows:
                self._ledger.advance_rows(name)
            self._end_push()

        if not gate.completes(source.rank):
            kept = self._keep(contribution)
            early()
            with self._changed:
                gate.record(source.rank, kept)
                advance()
            return Outcome.RECORDED
        return self._complete(gate, gate.with_last(source.rank, contribution), advance, early)

    def _own_rows(self, contribution: Contribution) -> tuple[PushedTableRows, ...]:
        """What one rank alone gives to rows that are updated as they come, whatever samples the others will have.
        Raises TooLarge."""
        mean = self._tables.mean([contribution.rows], [1.0], self._rules.clipping.value)
        times = {each.table: each.now_ms for each in contribution.rows}
        return scaled([each._replace(now_ms=times[each.table]) for each in mean], 1 / self._rules.logical_ranks)

    def _complete(
        self,
        gate: StepGate[Contribution],
        contributions: Sequence[Contribution],
        advance: Callable[[], object],
        early: Callable[[], object],
    ) -> Outcome:
        """All that counts in the step is there. `advance` is called in the moment in which that is seen, `early`
        before, when all memory that is needed is there."""
        taken = verdict(contributions)
        rows, groups = self._mean_rows(taken)
        if self._rules.clipping.norm and not taken.skips:  # a step that is skipped is so everywhere, whatever its norm
            mean, own = self._gather(taken.members, taken.shares)
            whole = self._blocks.square_norm(mean) + square_norm(rows)
            early()
            with self._changed:
                advance()
                gate.gather(whole)
                self._mean = mean._replace(rows=rows, table_groups=groups)
                self._changed.notify_all()
            self._spare += self._kept
            self._kept = [own]
            return Outcome.RECORDED
        self._take_step(gate, taken, rows, groups, advance, early)
        return Outcome.APPLIED

    def _take_step(
        self,
        gate: StepGate[Contribution],
        taken: Verdict[Contribution],
        rows: Sequence[PushedTableRows],
        groups: Groups,
        advance: Callable[[], object],
        early: Callable[[], object],
        scale: float = 1.0,
    ) -> None:
        """Makes the next version, of values and of rows. Raises TooLarge, having changed nothing."""
        gone = self._tables.sweep(rows, self._versions.newest.number + 1)
        former = self._set_aside(rows, gone)
        new = self._next(taken, scale)
        early()
        self._push_rows(rows, groups, former, gone)
        with self._changed:
            advance()
            gate.next_step()
            self._mean = None
            self._publish(new)
        self._spare += self._kept
        self._kept = []

    def _mean_rows(self, taken: Verdict[Contribution]) -> tuple[tuple[PushedTableRows, ...], Groups]:
        """What a step gives to rows, and the settings for it. Raises TooLarge."""
        if taken.skips:
            return (), ()
        groups = next((member.table_groups for member in taken.members if member.rows), ())
        rows = [member.rows for member in taken.members]
        return self._tables.mean(rows, taken.shares, self._rules.clipping.value), groups

    def _set_aside(self, rows: Sequence[PushedTableRows], gone: Sequence[ExpiredIds]) -> PreviousRows | None:
        """What a step is about to change. Raises TooLarge."""
        if not self._tables.names or self._rows_at_once:
            return None
        number = self._versions.newest.number
        changing: list[PushedTableRows | ExpiredIds] = [*rows, *self._tables.with_rows(gone)]
        try:
            return self._tables.set_aside(changing, number)
        except TooLarge:
            with self._changed:
                if not self._readers.nbytes:
                    raise
                self._readers.lose("the server needs the memory for a step")
        return self._tables.set_aside(changing, number)

    def _gather(self, members: Sequence[Contribution], shares: Sequence[float]) -> tuple[Contribution, Bytes]:
        """The mean, in memory of our own, and that memory. Raises TooLarge."""
        self._blocks.reserve_sums()
        own = self._spare.pop() if self._spare else aligned_empty(self._layout.payload_bytes)
        return self._blocks.gather(members, shares, self._versions.values, own, self._rules.clipping.value), own

    # ---- verdicts

    def awaits(self, verdict: StepVerdict) -> bool:
        """Whether the step is gathered that this is the verdict on; False where it was taken. Changes nothing. Raises
        InvalidRequest for a verdict that cannot be one."""
        with self._changed:
            return self._judges(verdict)

    def take_verdict(self, verdict: StepVerdict, check_current: Callable[[], None]) -> None:
        """Takes the step that waits for it; where that was taken, does nothing. Raises Refused errors, InvalidRequest
        and TooLarge, having changed nothing."""
        with self._turn:
            with self._changed:
                check_current()
                awaited = self._judges(verdict)
            gate, mean = self._gate, self._mean
            if awaited and gate is not None and gate.awaits_members:
                self._take_members(gate, verdict.members)
                return
            if not awaited or gate is None or mean is None:
                return
            assert verdict.square_norm is not None
            scale = scale_of(verdict.square_norm, self._rules.clipping.norm)
            taken = Verdict(() if mean.groups is None else (mean,), (1.0,))
            rows = scaled(mean.rows, scale)
            self._take_step(gate, taken, rows, mean.table_groups, _nothing_more, _nothing_more, scale)

    def _take_members(self, gate: StepGate[Contribution], members: Sequence[Rank]) -> None:
        present = gate.present(members)
        if present is not None:
            self._complete(gate, present, lambda: self._close(gate, members), _nothing_more)
            return
        with self._changed:
            self._close(gate, members)
            self._changed.notify_all()

    def _close(self, gate: StepGate[Contribution], members: Sequence[Rank]) -> None:
        """It is known who counts: the step is over for the other ranks, whether they have contributed or not."""
        step = gate.step
        for rank in gate.name_members(members):
            self._ledger.pass_over(SourceKey(RankSource(rank)), step + 1)

    def gathered(self, step: int) -> GatheredPart | None:
        """What other partitions' verdict on that step is made of, where it waits for its verdict or was taken last."""
        with self._changed:
            return None if self._gate is None else self._gate.gathered(step)

    def _judges(self, verdict: StepVerdict) -> bool:
        needed = self._rules.clipping.norm or (self._rules.backup_workers and verdict.members)
        if self._gate is None or not needed:
            raise InvalidRequest(f"a verdict on step {verdict.step} of partition {self.id}, whose steps need none")
        return self._gate.judges(verdict)

    def _keep(self, contribution: Contribution) -> Contribution:
        """The contribution with a payload of our own: that of a push is the sender's to write again when it has the
        answer."""
        if len(contribution.payload) == 0:
            return contribution
        copy = self._spare.pop() if self._spare else aligned_empty(self._layout.payload_bytes)
        np.copyto(copy, contribution.payload)
        self._kept.append(copy)
        return contribution._replace(payload=copy)

    def _next(self, taken: Verdict[Contribution], scale: float = 1.0) -> Bytes:
        """The next version's values. All that a step needs is asked for before anything changes. Raises TooLarge."""
        if self._rules.logical_ranks > 1 or scale != 1.0:
            self._blocks.reserve_sums()
        # with a norm it was done when that was told
        if self._rules.clipping.value and not self._rules.clipping.norm and taken.members and not taken.skips:
            mean, own = self._gather(taken.members, taken.shares)
            self._spare.append(own)  # nobody takes it in this turn
            taken = Verdict((mean,), (1.0,))
        new = self._blank()
        self._blocks.update(taken.members, taken.shares, self._versions.values, new, scale, skips=taken.skips)
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
                self._named = self._cut(self._since)
            except ShardyardError as error:  # the update counts all the same
                self._named = error

    # ---- pulls

    def hold(self, number: int, exactly: bool, until: float) -> tuple[Version, Bytes] | NotReadyPart:
        """Waits until `until` (time.monotonic) for that version, or with `exactly` False for that or a later one; not
        where that waits for a verdict, which the asker may be the one to bring. The buffer is the caller's to read
        until it calls `release`. Raises NotFound where an exact version is gone."""
        with self._changed:
            missing = self._await(number, until)
            if missing is not None:
                return missing
            newest = self._versions.newest
            wanted = number if exactly else newest.number
            buffer = self._versions.find(wanted)
            if buffer is None:
                raise self._passed(wanted, newest.number)
            self._versions.hold(buffer)
            return Version(newest.life, wanted), buffer

    def _await(self, number: int, until: float) -> NotReadyPart | None:
        """That version or a later one; what is missing where it does not come in time."""
        while self._versions.newest.number < number:
            left = until - time.monotonic()
            if left <= 0 or self._awaits_verdict_on(number - 1) or not self._changed.wait(left):
                return NotReadyPart(self.id, self._versions.newest, number, self._waits_for())
        return None

    def place(self, buffer: Bytes) -> ShmLocation | None:
        """Where processes on this machine find a buffer that is held, if they can."""
        return self._versions.place(buffer)

    def release(self, buffer: Bytes) -> None:
        with self._changed:
            self._versions.release(buffer)

    def keep(self, worker: Incarnation, version: Version, buffer: Bytes) -> None:
        """A worker was given that version, in a buffer that is held: what it pushes next may be computed on it."""
        if self._stale is not None:
            with self._changed:
                if version.life == self._versions.newest.life:  # else it was restored since
                    self._stale.keep(worker, version, buffer)

    def keep_no_more(self, worker: Incarnation | None = None) -> None:
        """It pushes nothing from now on; None: nobody does."""
        if self._stale is not None:
            with self._changed:
                self._stale.forget(worker)

    @property
    def tally(self) -> Tally | None:
        """Of a job with a rule for stale gradients."""
        if self._stale is None:
            return None
        with self._changed:
            return self._stale.tally

    def _gate_at(self, step: int) -> StepGate[Contribution]:
        return StepGate(self.id, self._rules.logical_ranks, step=step, backup_workers=self._rules.backup_workers)

    def _awaits_verdict_on(self, step: int) -> bool:
        return self._gate is not None and self._gate.awaits_verdict and self._gate.step == step

    # ---- readers that hold a version for long

    def want(self, number: int | None, *, rows: bool = False) -> VersionPin:
        """That version, None: the newest, stays as it is from when it is there; `unwant` must follow. The memory that
        updates need beside it is asked for now. `rows`: those of tables too, for `look_up_held`. Raises InvalidRequest
        (facts: newest) where it has passed, TooLarge, NotReady where rows are being changed that nobody has held."""
        while True:
            with self._changed:
                if rows:
                    self._await_push()
                if not self._versions.is_short_of_buffers:
                    wanted = self._versions.want(number)
                    newest = self._versions.newest.number
                    if wanted is not None and rows and not self._readers.hold(wanted, newest, self._former):
                        self._versions.unwant(wanted)
                        wanted = None
                    break
            buffer = self._versions.another()
            with self._changed:
                self._versions.give_back(buffer)
        if wanted is None:
            raise InvalidRequest(
                f"version {number} of partition {self.id}, whose newest is {newest}",
                why="a partition keeps its last two versions",
                todo="name a later one",
                facts={"newest": str(newest)},
            )
        return wanted

    def _await_push(self) -> None:
        """The push under way, if it changes rows that nobody has set aside, has counted."""
        until = time.monotonic() + PULL_WAIT_MS_MAX / 1000
        while self._readers.come_too_late:
            self._check_whole()
            left = until - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                raise NotReady(f"a version of partition {self.id}, which is taking a push")

    def unwant(self, wanted: VersionPin) -> None:
        """The second time does nothing."""
        with self._changed:
            self._versions.unwant(wanted)
            self._readers.let_go(wanted)

    def await_wanted(self, wanted: VersionPin, until: float) -> Version | NotReadyPart:
        """Waits until `until` (time.monotonic) for a version that is wanted. Raises NotFound where it will not come."""
        with self._changed:
            while wanted.version is None:
                left = until - time.monotonic()
                if wanted.lost:
                    raise NotFound(
                        f"version {wanted.number} of partition {self.id}, which has gone back",
                        todo="take a new snapshot",
                    )
                if left <= 0 or not self._changed.wait(left):
                    return NotReadyPart(self.id, self._versions.newest, wanted.number, self._waits_for())
            return wanted.version

    def hold_wanted(self, wanted: VersionPin) -> tuple[Version, Bytes]:
        """The buffer is the caller's to read until it calls `release`. Raises NotReady."""
        with self._changed:
            if wanted.version is None or wanted.buffer is None:
                raise NotReady(f"version {wanted.number} of partition {self.id}, which is not there yet")
            self._versions.hold(wanted.buffer)
            return wanted.version, wanted.buffer

    def _waits_for(self) -> str:
        if self._gate is None:
            return "a push"
        if self._gate.awaits_verdict or self._gate.awaits_members:
            return f"the verdict on step {self._gate.step}"
        ranks = ", ".join(str(rank) for rank in self._gate.missing()[:8])
        return f"logical rank {ranks} of step {self._gate.step}"


def _nothing_more() -> None:
    """Nothing else is to be done in that moment."""
