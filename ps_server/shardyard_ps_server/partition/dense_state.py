"""The dense state of one partition: blocks of variables in a flat payload, optimizer state beside them, and how an
update turns one version's bytes into the next one's.

Owns: optimizer state, update counts per block. Invariants: an update is elementwise, or one of a variable that is not
cut, and takes contributions in the order given, so the bits depend neither on how variables were cut nor on who hosts
them (promise 6); values are written out of place. Called by whoever has the partition's turn. Must not know: ledgers,
versions, threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardyard.codecs import decode
from shardyard.domain.consistency import StaleRule
from shardyard.domain.errors import MalformedPayload
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout, aligned_bytes
from shardyard.domain.limits import CODE_HEAD_BYTES_MAX
from shardyard.domain.optimizers import WHOLE_VARIABLES
from shardyard.domain.pushes import PushPart
from shardyard.domain.variables import DType, VariableKind
from shardyard_ps_server.partition.cuts import StateCut
from shardyard_ps_server.partition.staleness import Base
from shardyard_ps_server.rows.partition_tables import ExpiredIds, PushedTableRows
from shardyard_ps_server.values import kernels, optimizers
from shardyard_ps_server.values.kernels import Addresses, Array, Shares
from shardyard_ps_server.values.optimizers import LONE
from shardyard_ps_server.values.versions import Bytes, aligned_empty

Groups = tuple[tuple[float, ...], ...]

_ITEM_BYTES_MAX = max(dtype.item_bytes for dtype in DType)

SQUARES_EPS = 1e-7
"""What is added to the mean of squares, as in DC-ASGD-a."""
PIECE_BYTES = 128 * 1024
"""How much of a payload is summed at a time. The sum stays in a core's second cache; of smaller pieces, each begins
without prefetching (64 MiB of two contributions with SGD: 22 ms in pieces of 16 KiB, 12.5 in these)."""
STAGED_BYTES = 32 * 1024
STAGED_BYTES_MIN = 1024 * 1024
"""From here on the next values are made in pieces of STAGED_BYTES and written past the cache, which they would not stay
in."""


class Contribution(NamedTuple):
    """One push's part for one partition, in the partition's full layout.

    `payload` has shape (payload_bytes,), dtype uint8, contiguous, at a multiple of 8; `present[i]` says whether block i
    has a gradient (or value). `groups` None: a named empty push, without payload. `base`: what a gradient was computed
    on, where that is said. `overflow`: loss scaling has found that the gradient is beyond its format. `rows`: of
    tables, to be updated with `table_groups`. `gone`: what expires with it, where that was decided before.
    """

    weight: float
    groups: Groups | None
    payload: Bytes
    present: tuple[bool, ...]
    base: Base | None = None
    overflow: bool = False
    rows: Sequence[PushedTableRows] = ()
    table_groups: Groups = ()
    gone: Sequence[ExpiredIds] = ()


@dataclass(frozen=True)
class _Run:
    """DenseState next to each other that are updated alike, as one slice of the payload. `first` is the first block's
    index; `present[i]` whether member i of the update has them, None where all have all. `nothing` is an empty array of
    the blocks' dtype."""

    start: int
    stop: int
    first: int
    dtype: np.dtype[Any]
    is_parameter: bool
    group: int
    present: tuple[bool, ...] | None
    nothing: npt.NDArray[Any]

    def of(self, payload: Bytes) -> npt.NDArray[Any]:
        return payload[self.start : self.stop].view(self.dtype)


class DenseState:
    """The blocks of one partition under one optimizer."""

    def __init__(self, layout: JobLayout, part: PartitionLayout) -> None:
        self._part = part
        self._groups = layout.optimizer.groups
        self._cut: StateCut | None = None
        self._variables = [layout.variables[block.variable] for block in part.blocks]
        self._optimizer = optimizers.make(layout.optimizer.kind)
        self._by_variable = layout.optimizer.kind in WHOLE_VARIABLES
        self._all = (True,) * len(part.blocks)
        self._none = (False,) * len(part.blocks)
        # updates of block i: those of all blocks, and its own beside them
        self._whole_count = 0
        self._counts = [0] * len(part.blocks)
        self._slots: dict[str, Bytes] = {}
        self._sums: dict[np.dtype[Any], Array] = {}
        staged = aligned_empty(STAGED_BYTES if part.payload_bytes >= STAGED_BYTES_MIN else 0)
        self._staged: dict[np.dtype[Any], Array] = {
            np.dtype(name): staged.view(name) for name in ("float32", "float64")
        }
        self._whole_runs: list[_Run] | None = None
        for index, spec in enumerate(self._variables):
            if spec.kind is VariableKind.PARAMETER:
                self._make_slots(index, layout.optimizer.groups[spec.group])
        self._state = [
            [self._slots[slot.name] for slot in self._optimizer.slots(settings) if slot.name in self._slots]
            for settings in layout.optimizer.groups
        ]

    def _make_slots(self, index: int, settings: Sequence[float]) -> None:
        for slot in self._optimizer.slots(settings):
            if slot.name not in self._slots:
                self._slots[slot.name] = aligned_empty(self._part.payload_bytes)
                self._slots[slot.name][:] = 0
            if slot.initial:
                start, stop = self._span(index)
                self._slots[slot.name][start:stop].view(self._variables[index].dtype.value)[:] = slot.initial

    def _span(self, index: int) -> tuple[int, int]:
        block = self._part.blocks[index]
        return block.position, block.position + _room(block, self._variables[index].dtype.item_bytes)

    # ---- checkpoints

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Updates of each block."""
        return np.array(self._counts, np.int64) + self._whole_count

    def cut(self) -> StateCut:
        """Optimizer state as it is now. Raises TooLarge."""
        self._cut = StateCut(self._slots)
        return self._cut

    @property
    def is_cut(self) -> bool:
        """Whether the state is being kept for a cut."""
        return self._cut is not None

    def keep_all(self) -> None:
        """All state is about to change."""
        cut = self._cut
        if cut is not None:
            cut.keep(0, self._part.payload_bytes)

    def end_cut(self, cut: StateCut) -> None:
        if self._cut is cut:
            self._cut = None

    def arrays(self, index: int, values: Bytes, state: Callable[[str], Bytes] | None = None) -> dict[str, Array]:
        """Block `index`: its elements in a payload, under "values", and in each array of optimizer state that it has,
        by the slot's name; `state` gives these where they are not the present ones."""
        start, _ = self._span(index)
        block, spec = self._part.blocks[index], self._variables[index]
        stop = start + block.length * spec.dtype.item_bytes
        found = {"values": values[start:stop].view(spec.dtype.value)}
        if spec.kind is VariableKind.PARAMETER:
            for slot in self._optimizer.slots(self._groups[spec.group]):
                whole = self._slots[slot.name] if state is None else state(slot.name)
                found[slot.name] = whole[start:stop].view(spec.dtype.value)
        return found

    def restore_counts(self, counts: Sequence[int]) -> None:
        self._whole_count, self._counts, self._whole_runs = 0, list(counts), None

    # ---- what comes in

    def expected_bytes(self, part: PushPart) -> int:
        """Length that the payload of this part must have. Raises MalformedPayload for a block that does not exist."""
        absent = part.absent_blocks
        if not absent:
            return self._part.payload_bytes if part.payload_bytes else 0
        count = len(self._part.blocks)
        if any(index >= count for index in absent) or any(a >= b for a, b in itertools.pairwise(absent)):
            raise MalformedPayload(
                f"absent blocks {list(absent[:8])} of partition {part.partition}, which has {count}; expected ascending"
            )
        if part.payload_bytes == 0:
            return 0
        spans = (self._span(index) for index in absent)
        return self._part.payload_bytes - sum(stop - start for start, stop in spans)

    def check_codes(self, part: PushPart) -> None:
        """Raises MalformedPayload unless there is one code for each present block, none longer than the block."""
        self.expected_bytes(PushPart(part.partition, 1, part.absent_blocks))
        absent = set(part.absent_blocks)
        present = [index for index in range(len(self._part.blocks)) if index not in absent]
        if len(part.code_bytes) != len(present):
            raise MalformedPayload(
                f"{len(part.code_bytes)} codes for the {len(present)} present blocks of partition {part.partition}"
            )
        for index, nbytes in zip(present, part.code_bytes, strict=True):
            length = self._part.blocks[index].length
            if nbytes > length * self._variables[index].dtype.item_bytes + CODE_HEAD_BYTES_MAX:
                raise MalformedPayload(f"a code of {nbytes} bytes in partition {part.partition} for {length} elements")

    def _decode(self, part: PushPart, payload: Bytes) -> tuple[Bytes, tuple[bool, ...]]:
        full = aligned_empty(self._part.payload_bytes)
        absent = set(part.absent_blocks)
        codes = iter(part.code_bytes)
        at = 0
        for index, block in enumerate(self._part.blocks):
            start, stop = self._span(index)
            if index in absent:
                full[start:stop] = 0
                continue
            nbytes = next(codes)
            dtype = self._variables[index].dtype
            end = start + block.length * dtype.item_bytes
            full[end:stop] = 0
            decode(payload[at : at + nbytes].data, full[start:end].view(dtype.value))
            at += nbytes
        return full, tuple(index not in absent for index in range(len(self._part.blocks)))

    def unpack(self, part: PushPart, payload: Bytes) -> tuple[Bytes, tuple[bool, ...]]:
        """A part's payload in the full layout, and which blocks are present. Copies only where some were left out,
        or all are coded. Raises TooLarge, MalformedPayload for a code that is none."""
        if part.payload_bytes == 0:
            return payload, self._none
        if part.code_bytes:
            return self._decode(part, payload)
        if not part.absent_blocks:
            return payload, self._all
        count = len(self._part.blocks)
        present = [True] * count
        for index in part.absent_blocks:
            present[index] = False
        if part.payload_bytes == self._part.payload_bytes:
            return payload, tuple(present)
        full = aligned_empty(self._part.payload_bytes)
        at = 0
        for index in range(count):
            start, stop = self._span(index)
            if present[index]:
                full[start:stop] = payload[at : at + stop - start]
                at += stop - start
            else:
                full[start:stop] = 0
        return full, tuple(present)

    # ---- updates

    def reserve_sums(self) -> None:
        """Asks for the memory that an update of several members needs, so that none is cut short. Raises TooLarge."""
        if not self._sums and self._part.payload_bytes:
            memory = aligned_empty(min(PIECE_BYTES, self._part.payload_bytes))
            self._sums = {np.dtype(name): memory.view(name) for name in ("float32", "float64")}

    def gather(
        self, members: Sequence[Contribution], shares: Sequence[float], old: Bytes, into: Bytes, limit: float
    ) -> Contribution:
        """The members as one: what `update` makes of it has the same bits as what it makes of them. `into`, apart from
        all else, becomes its payload. Elements of gradients beyond `limit`, unless that is 0, are brought to it."""
        if not members or not self._part.payload_bytes:
            return Contribution(1.0, members[0].groups if members else None, into[:0], self._none)
        sources = self._locate(members, old, into)
        weights = self._weights(members, shares)
        whole = _are_whole(members)
        for run in self._runs(None if whole else [member.present for member in members]):
            having = _indices(run.present)
            if run.present is not None and not having:
                continue
            if not run.is_parameter:
                self._set(run, members, sources, shares, into)
                continue
            task = (
                old,
                into,
                sources if run.present is None else sources[having],
                weights if run.present is None or weights is LONE else weights[having],
                run.nothing if weights is LONE else self._sums[run.dtype],
                run.nothing,
                run.start,
                run.stop,
            )
            kernels.gather(task, limit)
        presents = zip(*[member.present for member in members], strict=True)
        present = self._all if whole else tuple([any(having) for having in presents])
        return Contribution(1.0, members[0].groups, into, present)

    def square_norm(self, gradient: Contribution) -> float:
        """The sum of the squares of its elements, of parameters alone: block by block, whichever lie beside others."""
        total = 0.0
        for index, (block, spec) in enumerate(zip(self._part.blocks, self._variables, strict=True)):
            if gradient.present[index] and spec.kind is VariableKind.PARAMETER:
                end = block.position + block.length * spec.dtype.item_bytes
                total += kernels.square_norm(gradient.payload[block.position : end].view(spec.dtype.value))
        return total

    def _weights(self, members: Sequence[Contribution], shares: Sequence[float]) -> Shares:
        if len(members) == 1:
            return LONE
        self.reserve_sums()
        return np.array(shares, np.float64)

    def update(
        self,
        members: Sequence[Contribution],
        shares: Sequence[float],
        old: Bytes,
        new: Bytes,
        scale: float = 1.0,
        *,
        skips: bool = False,
    ) -> None:
        """Writes the next values into `new`: parameters stepped along the weighted mean of the members' gradients,
        summed in the order given; floating-point buffers set to the weighted mean, integer ones to the maximum.

        A block that no member has keeps its values. A gradient that some members lack counts as zero there, a buffer
        that they lack as no opinion. A single member's share is taken as 1; its gradient is multiplied by `scale`. NaN
        and infinity go through in silence. `skips`: parameters and their state and counts stay as they are; buffers are
        set.
        """
        if not self._part.payload_bytes:
            return
        if not members:
            new[:] = old
            return
        groups = members[0].groups
        assert groups is not None
        sources = self._locate(members, old, new)
        weights = self._weights(members, shares)
        if scale != 1.0:
            assert len(members) == 1, len(members)
            self.reserve_sums()
            weights = np.array([scale])
        whole = _are_whole(members)
        cut = self._cut  # which may end meanwhile
        for run in self._runs(None if whole else [member.present for member in members]):
            having = _indices(run.present)
            if (skips and run.is_parameter) or (run.present is not None and not having):
                new[run.start : run.stop] = old[run.start : run.stop]
            elif not run.is_parameter:
                self._set(run, members, sources, shares, new)
            else:
                task = (
                    old,
                    new,
                    sources if run.present is None else sources[having],
                    weights if run.present is None or weights is LONE else weights[having],
                    run.nothing if weights is LONE else self._sums[run.dtype],
                    run.nothing if run.stop - run.start < STAGED_BYTES_MIN else self._staged[run.dtype],
                    run.start,
                    self._end(run, new),
                )
                count = self._whole_count + self._counts[run.first] + 1
                if cut is not None:
                    cut.keep(run.start, run.stop)
                self._optimizer.update(groups[run.group], count, task, self._state[run.group])
        if whole and not skips:
            self._whole_count += 1
        else:
            self._count(members, skips=skips)

    def compensate(
        self,
        member: Contribution,
        rule: StaleRule,
        base: Bytes,
        now: Bytes,
        into: Bytes,
        squares: Bytes | None = None,
    ) -> None:
        """Writes a member's payload into `into`, as it is but for the gradients of parameters, each plus
        `rule.compensation` times its square times what the parameter has changed by from `base` to `now`: rounded after
        each operation, in the elements' dtype. DenseState that it does not have are not written. `squares`: with a
        decay, the running mean of squares, which the gradients enter."""
        if not self._part.payload_bytes or True not in member.present:
            return
        payloads = (member.payload, base)
        sources: Addresses = np.array([kernels.locate(now, into, each, _ITEM_BYTES_MAX) for each in payloads], np.int64)
        assert 0 not in sources, (len(member.payload), len(base), len(into))
        shares: Shares = np.array([rule.compensation], np.float64)
        for run in self._runs(None if _are_whole((member,)) else [member.present]):
            if run.present == (False,):
                continue
            task = (now, into, sources, shares, run.nothing, run.nothing, run.start, run.stop)
            if not run.is_parameter:
                into[run.start : run.stop] = member.payload[run.start : run.stop]
            elif squares is None:
                kernels.compensate(task)
            else:
                scalars = (rule.compensation, rule.decay, 1 - rule.decay, SQUARES_EPS)
                kernels.compensate_adaptively(task, squares, np.array(scalars, run.dtype))

    def _end(self, run: _Run, new: Bytes) -> int:
        """Where the elements of a run end: where each variable is updated by itself, filling is none of them."""
        if not self._by_variable:
            return run.stop
        end = run.start + self._part.blocks[run.first].length * run.dtype.itemsize
        new[end : run.stop] = 0
        return end

    def _locate(self, members: Sequence[Contribution], old: Bytes, new: Bytes) -> Addresses:
        """Where the members' payloads are, 0 for one that has no block."""
        sources = [
            kernels.locate(old, new, each.payload, _ITEM_BYTES_MAX) if True in each.present else 0 for each in members
        ]
        for member, source in zip(members, sources, strict=True):
            assert source != 0 or True not in member.present, (len(member.payload), len(new))
        return np.array(sources, np.int64)

    def _set(
        self, run: _Run, members: Sequence[Contribution], sources: Addresses, shares: Sequence[float], new: Bytes
    ) -> None:
        """Buffers."""
        having = list(range(len(members))) if run.present is None else _indices(run.present)
        into = run.of(new)
        into[:] = run.of(members[having[0]].payload)
        if len(having) == 1:
            return
        if run.dtype.kind == "f":
            total = sum(shares[index] for index in having)
            weights: Shares = np.array([shares[index] / total for index in having])
            kernels.mean((new, new, sources[having], weights, self._sums[run.dtype], run.nothing, run.start, run.stop))
            return
        for index in having[1:]:
            np.maximum(into, run.of(members[index].payload), out=into)

    def _count(self, members: Sequence[Contribution], *, skips: bool) -> None:
        for index, spec in enumerate(self._variables):
            is_set = not skips or spec.kind is VariableKind.BUFFER
            if is_set and any(member.present[index] for member in members):
                self._counts[index] += 1
            else:
                self._whole_runs = None

    def _runs(self, presents: Sequence[tuple[bool, ...]] | None) -> Sequence[_Run]:
        """The payload from begin to end, neighbours that are updated alike in one piece."""
        if presents is not None:
            return list(self._find_runs(presents))
        if self._whole_runs is None:
            self._whole_runs = list(self._find_runs(None))
        return self._whole_runs

    def _find_runs(self, presents: Sequence[tuple[bool, ...]] | None) -> Iterator[_Run]:
        pending: _Run | None = None
        for index, spec in enumerate(self._variables):
            start, stop = self._span(index)
            if start == stop:
                continue
            run = _Run(
                start,
                stop,
                index,
                np.dtype(spec.dtype.value),
                spec.kind is VariableKind.PARAMETER,
                spec.group,
                None if presents is None else tuple(present[index] for present in presents),
                np.empty(0, spec.dtype.value),
            )
            if pending is None:
                pending = run
            elif self._alike(pending, run):
                pending = replace(pending, stop=stop)
            else:
                yield pending
                pending = run
        if pending is not None:
            yield pending

    def _alike(self, left: _Run, right: _Run) -> bool:
        return (
            left.stop == right.start
            and not (self._by_variable and left.is_parameter)
            and (left.dtype, left.is_parameter, left.group, left.present)
            == (right.dtype, right.is_parameter, right.group, right.present)
            and self._counts[left.first] == self._counts[right.first]
        )


def _are_whole(members: Sequence[Contribution]) -> bool:
    for member in members:  # noqa: SIM110 (a generator takes twice as long)
        if False in member.present:
            return False
    return True


def _indices(present: tuple[bool, ...] | None) -> list[int]:
    """Of the members that have a run; none where all have all."""
    return [] if present is None else [index for index, each in enumerate(present) if each]


def _room(block: Block, item_bytes: int) -> int:
    return aligned_bytes(block.length * item_bytes)
