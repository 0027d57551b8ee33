"""The dense state of one partition: blocks of variables in a flat payload, their optimizer state, and how an update
computes the next version's bytes.

Owns: optimizer state, update counts of blocks. Invariants: an update is elementwise, or of a variable that is not cut,
and takes contributions in the given order; so the bits depend neither on how variables are cut nor on which server has
them (promise 6). The next values are written into another buffer. Called by the thread that has the partition's turn.
Must not know: ledgers, versions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shardyard.domain.consistency import StaleRule
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.limits import MIB
from shardyard.domain.optimizers import WHOLE_VARIABLES
from shardyard.domain.variables import DType, VariableKind
from shardyard_ps_server.partition.contribution import Contribution, PayloadLayout
from shardyard_ps_server.values import kernels, optimizers, pieces
from shardyard_ps_server.values.optimizers import LONE, Optimizer
from shardyard_ps_server.values.pieces import Addresses, Array, Shares
from shardyard_ps_server.values.versions import Bytes, aligned_copy, aligned_empty

_ITEM_BYTES_MAX = max(dtype.item_bytes for dtype in DType)

SQUARES_EPS = 1e-7
"""Added to the mean of squares, as in DC-ASGD-a."""
PIECE_BYTES = 128 * 1024
"""Bytes of a payload that are summed at a time. The sum stays in a core's second cache. The processor begins each piece
without prefetching, so smaller pieces are slower (64 MiB of two contributions with SGD: 22 ms in pieces of 16 KiB, 12.5
ms in these)."""
CUT_PIECE_BYTES = MIB
"""An update waits at most for the copy of one piece of a cut."""
STAGED_BYTES = 32 * 1024
STAGED_BYTES_MIN = 1024 * 1024
"""From this size on, the next values are computed in pieces of STAGED_BYTES and written past the cache, which is too
small for them."""


@dataclass(frozen=True)
class _Run:
    """Adjacent blocks that are updated alike, as one slice of the payload. `first`: the first block's index. `having`:
    indices of the members of the update that have these blocks; None: all have all. `nothing`: an empty array of the
    blocks' dtype."""

    start: int
    stop: int
    first: int
    dtype: np.dtype[Any]
    is_parameter: bool
    group: int
    having: list[int] | None
    nothing: npt.NDArray[Any]

    def of(self, payload: Bytes) -> npt.NDArray[Any]:
        return payload[self.start : self.stop].view(self.dtype)


class StateCut:
    """Optimizer state as it was when the cut was made: arrays of shape (nbytes,), dtype uint8. Raises TooLarge.

    State changes in place. So an update copies what it is about to change (`keep`), and the checkpoint's thread copies
    the rest piece by piece (`keep_next`)."""

    def __init__(self, state: Mapping[str, Bytes]) -> None:
        self._state = state
        self._copies = {name: aligned_empty(len(values)) for name, values in state.items()}
        nbytes = max(map(len, state.values()), default=0)
        self._kept = [False] * -(-nbytes // CUT_PIECE_BYTES)
        self._next = 0
        self._copying = threading.Lock()

    @property
    def complete(self) -> bool:
        return self._next == len(self._kept)

    def keep(self, begin: int, end: int) -> None:
        """Copies bytes [begin, end), which are about to change."""
        if self.complete:
            return
        for piece in range(begin // CUT_PIECE_BYTES, -(-end // CUT_PIECE_BYTES)):
            self._keep(piece)

    def keep_next(self) -> None:
        """Copies the next piece that is not copied yet, if there is one."""
        while not self.complete and self._kept[self._next]:
            self._next += 1
        if not self.complete:
            self._keep(self._next)
            self._next += 1

    def of(self, name: str) -> Bytes:
        """Returns one of the arrays. All must be copied."""
        assert self.complete
        return self._copies[name]

    def _keep(self, piece: int) -> None:
        with self._copying:
            if self._kept[piece]:
                return
            at = slice(piece * CUT_PIECE_BYTES, (piece + 1) * CUT_PIECE_BYTES)
            for name, values in self._state.items():
                np.copyto(self._copies[name][at], values[at])
            self._kept[piece] = True


class StateArrays:
    """The optimizer's state of one partition: for each slot an array in the places of its payload."""

    def __init__(self, optimizer: Optimizer, groups: Sequence[Sequence[float]], payload: PayloadLayout) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._payload = payload
        self._was_given = False
        self.arrays: dict[str, Bytes] = {}
        """Shape (payload bytes,), dtype uint8, by the slots' names."""
        self._fill()

    def _fill(self) -> None:
        for index, spec in enumerate(self._payload.variables):
            if spec.kind is not VariableKind.PARAMETER:
                continue
            for slot in self._optimizer.slots(self._groups[spec.group]):
                if slot.name not in self.arrays:
                    self.arrays[slot.name] = aligned_empty(self._payload.nbytes)
                    self.arrays[slot.name][:] = 0
                if slot.initial:
                    start, stop = self._payload.spans[index]
                    self.arrays[slot.name][start:stop].view(spec.dtype.value)[:] = slot.initial

    def begin_anew(self) -> bool:
        """Takes back what `begin_with` has set. Returns whether there was anything."""
        was_given, self._was_given = self._was_given, False
        if was_given:
            for array in self.arrays.values():
                array[:] = 0
            self._fill()
        return was_given

    def check(self, counts: Sequence[int], names: Collection[str]) -> None:
        """Raises InvalidRequest unless these are its arrays, and there are so many blocks."""
        blocks = len(self._payload.blocks)
        if set(names) != self.arrays.keys() or len(counts) != blocks:
            raise InvalidRequest(
                f"an optimizer's state of {len(counts)} blocks with {sorted(names)}; expected {blocks} with"
                f" {sorted(self.arrays)}"
            )

    def begin_with(self, counts: Sequence[int], arrays: Mapping[str, Bytes]) -> None:
        """Sets all arrays. Raises what `check` raises."""
        self.check(counts, arrays)
        for name, array in arrays.items():
            self.arrays[name][:] = array
        self._was_given = True

    def copied(self) -> dict[str, Bytes]:
        """Raises TooLarge."""
        return {name: aligned_copy(array) for name, array in self.arrays.items()}


class DenseState:
    """The blocks of one partition under one optimizer."""

    def __init__(self, layout: JobLayout, payload: PayloadLayout) -> None:
        self._payload = payload
        self._groups = layout.optimizer.groups
        self._cut: StateCut | None = None
        self._variables = payload.variables
        self._optimizer = optimizers.make(layout.optimizer.kind)
        self._by_variable = layout.optimizer.kind in WHOLE_VARIABLES
        # updates of block i: those of all blocks, and its own beside them
        self._whole_count = 0
        self._counts = [0] * len(payload.blocks)
        self.slots = StateArrays(self._optimizer, self._groups, payload)
        self._sums: dict[np.dtype[Any], Array] = {}
        self._staged = _as_floats(aligned_empty(STAGED_BYTES if payload.nbytes >= STAGED_BYTES_MIN else 0))
        self._whole_runs: list[_Run] | None = None
        self._state = [
            [self.slots.arrays[slot.name] for slot in self._optimizer.slots(settings) if slot.name in self.slots.arrays]
            for settings in layout.optimizer.groups
        ]

    # ---- the state that the optimizer begins with

    def begin_anew(self) -> None:
        """The state is that of an optimizer that has taken no step, whatever was given before."""
        if self.slots.begin_anew():
            self.restore_counts([0] * len(self._counts))

    def begin_with(self, counts: Sequence[int], arrays: Mapping[str, Bytes]) -> None:
        """Sets the whole state. Raises what `StateArrays.check` raises."""
        self.slots.begin_with(counts, arrays)
        self.restore_counts(counts)

    # ---- checkpoints

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Updates of each block."""
        return np.array(self._counts, np.int64) + self._whole_count

    def cut(self) -> StateCut:
        """Cuts the optimizer state as it is now. Raises TooLarge."""
        self._cut = StateCut(self.slots.arrays)
        return self._cut

    @property
    def is_cut(self) -> bool:
        """Whether a cut is open. Then an update copies state before it changes it."""
        return self._cut is not None

    def keep_all(self) -> None:
        """Copies for an open cut, because all state is about to change."""
        cut = self._cut
        if cut is not None:
            cut.keep(0, self._payload.nbytes)

    def end_cut(self, cut: StateCut) -> None:
        if self._cut is cut:
            self._cut = None

    def arrays(self, index: int, values: Bytes, state: Callable[[str], Bytes] | None = None) -> dict[str, Array]:
        """Returns views of the elements of block `index`: "values" in the payload `values`, and its optimizer state by
        the slots' names. `state` gives a state array by name; None: the present ones."""
        start, stop = self._payload.elements(index)
        spec = self._variables[index]
        found = {"values": values[start:stop].view(spec.dtype.value)}
        if spec.kind is VariableKind.PARAMETER:
            for slot in self._optimizer.slots(self._groups[spec.group]):
                whole = self.slots.arrays[slot.name] if state is None else state(slot.name)
                found[slot.name] = whole[start:stop].view(spec.dtype.value)
        return found

    def restore_counts(self, counts: Sequence[int]) -> None:
        self._whole_count, self._counts, self._whole_runs = 0, list(counts), None

    # ---- updates

    def reserve_sums(self) -> None:
        """Allocates the memory that an update of several members needs, so that none fails midway. Raises TooLarge."""
        if not self._sums and self._payload.nbytes:
            self._sums = _as_floats(aligned_empty(min(PIECE_BYTES, self._payload.nbytes)))

    def gather(
        self, members: Sequence[Contribution], shares: Sequence[float], old: Bytes, into: Bytes, limit: float
    ) -> Contribution:
        """Returns the mean of the members as one contribution, with the payload `into`. `update` computes the same bits
        from it as from the members. Elements of gradients beyond `limit`, unless that is 0, are clipped to it."""
        if not members or not self._payload.nbytes:
            return Contribution(1.0, members[0].groups if members else None, into[:0], self._payload.none_present)
        sources = self._locate(members, old, into)
        weights = self._weights(members, shares)
        whole = _are_whole(members)
        for run in self._runs(None if whole else members):
            if run.having == []:
                continue
            if run.is_parameter:
                kernels.mean(self._task(run, old, into, sources, weights, run.nothing, run.stop), limit)
            else:
                self._set(run, members, sources, shares, into)
        presents = zip(*[member.present for member in members], strict=True)
        present = self._payload.all_present if whole else tuple([any(having) for having in presents])
        return Contribution(1.0, members[0].groups, into, present)

    def square_norm(self, gradient: Contribution) -> float:
        """Returns the sum of the squares of all elements of parameters. It is summed block by block, so it does not
        depend on which blocks are adjacent."""
        total = 0.0
        for index, spec in enumerate(self._variables):
            if gradient.present[index] and spec.kind is VariableKind.PARAMETER:
                start, stop = self._payload.elements(index)
                total += kernels.square_norm(gradient.payload[start:stop].view(spec.dtype.value))
        return total

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
        """Writes the next values into `new`: parameters take a step along the weighted mean of the members' gradients,
        summed in the given order; floating-point buffers get the weighted mean, integer ones the maximum.

        A block that no member has keeps its values. A gradient that a member lacks counts as zero; a buffer that a
        member lacks is ignored. A single member's share is 1, and its gradient is multiplied by `scale`. NaN and
        infinity are not looked for. `skips`: parameters, their state and their counts stay as they are; buffers are
        set.
        """
        if not self._payload.nbytes:
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
        cut = self._cut  # another thread may end it meanwhile
        for run in self._runs(None if whole else members):
            if (skips and run.is_parameter) or run.having == []:
                new[run.start : run.stop] = old[run.start : run.stop]
            elif not run.is_parameter:
                self._set(run, members, sources, shares, new)
            else:
                staged = run.nothing if run.stop - run.start < STAGED_BYTES_MIN else self._staged[run.dtype]
                task = self._task(run, old, new, sources, weights, staged, self._end(run, new))
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
        """Writes a member's payload into `into`, with the gradients of parameters compensated for their age: each
        element g becomes g + `rule.compensation` * g^2 * (now - base), rounded after each operation in the elements'
        dtype. Blocks that the member does not have are not written. `squares`: with a decay, the running mean of g^2;
        it takes these gradients in."""
        if not self._payload.nbytes or True not in member.present:
            return
        payloads = (member.payload, base)
        sources: Addresses = np.array([pieces.locate(now, into, each, _ITEM_BYTES_MAX) for each in payloads], np.int64)
        assert 0 not in sources, (len(member.payload), len(base), len(into))
        scalars = (rule.compensation, rule.decay, 1 - rule.decay, SQUARES_EPS)
        for run in self._runs(None if _are_whole((member,)) else (member,)):
            if run.having == []:
                continue
            if run.is_parameter:
                task = (now, into, sources, LONE, run.nothing, run.nothing, run.start, run.stop)
                kernels.compensate(task, squares, np.array(scalars, run.dtype))
            else:
                into[run.start : run.stop] = member.payload[run.start : run.stop]

    def _task(
        self, run: _Run, old: Bytes, into: Bytes, sources: Addresses, weights: Shares, staged: Array, stop: int
    ) -> pieces.Task:
        """Returns the arguments of a compiled loop for a run of parameters."""
        sums = run.nothing
        if weights is not LONE:
            sums = self._sums[run.dtype]
            weights = weights if run.having is None else weights[run.having]
        return old, into, sources if run.having is None else sources[run.having], weights, sums, staged, run.start, stop

    def _weights(self, members: Sequence[Contribution], shares: Sequence[float]) -> Shares:
        if len(members) == 1:
            return LONE
        self.reserve_sums()
        return np.array(shares, np.float64)

    def _end(self, run: _Run, new: Bytes) -> int:
        """Returns where the elements of a run end. If each variable is updated by itself, padding is not updated."""
        if not self._by_variable:
            return run.stop
        end = self._payload.elements(run.first)[1]
        new[end : run.stop] = 0
        return end

    def _locate(self, members: Sequence[Contribution], old: Bytes, new: Bytes) -> Addresses:
        """Returns the addresses of the members' payloads, 0 for a member without blocks."""
        sources: list[int] = []
        for member in members:
            source = pieces.locate(old, new, member.payload, _ITEM_BYTES_MAX) if True in member.present else 0
            assert source != 0 or True not in member.present, (len(member.payload), len(new))
            sources.append(source)
        return np.array(sources, np.int64)

    def _set(
        self, run: _Run, members: Sequence[Contribution], sources: Addresses, shares: Sequence[float], new: Bytes
    ) -> None:
        """Writes a run of buffers."""
        having = list(range(len(members))) if run.having is None else run.having
        into = run.of(new)
        into[:] = run.of(members[having[0]].payload)
        if len(having) == 1:
            return
        if run.dtype.kind == "f":
            total = sum(shares[index] for index in having)
            weights: Shares = np.array([shares[index] / total for index in having])
            task = (new, new, sources[having], weights, self._sums[run.dtype], run.nothing, run.start, run.stop)
            kernels.mean(task, 0.0)
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

    # ---- runs

    def _runs(self, members: Sequence[Contribution] | None) -> Sequence[_Run]:
        """Returns the whole payload as runs. `members`: None if all have all blocks."""
        if members is not None:
            return list(self._find_runs(members))
        if self._whole_runs is None:
            self._whole_runs = list(self._find_runs(None))
        return self._whole_runs

    def _find_runs(self, members: Sequence[Contribution] | None) -> Iterator[_Run]:
        pending: _Run | None = None
        for index, (spec, (start, stop)) in enumerate(zip(self._variables, self._payload.spans, strict=True)):
            if start == stop:
                continue
            run = _Run(
                start,
                stop,
                index,
                np.dtype(spec.dtype.value),
                spec.kind is VariableKind.PARAMETER,
                spec.group,
                None if members is None else [at for at, member in enumerate(members) if member.present[index]],
                np.empty(0, spec.dtype.value),
            )
            if pending is not None and self._alike(pending, run):
                pending = replace(pending, stop=stop)
                continue
            if pending is not None:
                yield pending
            pending = run
        if pending is not None:
            yield pending

    def _alike(self, left: _Run, right: _Run) -> bool:
        return (
            left.stop == right.start
            and not (self._by_variable and left.is_parameter)
            and (left.dtype, left.is_parameter, left.group, left.having)
            == (right.dtype, right.is_parameter, right.group, right.having)
            and self._counts[left.first] == self._counts[right.first]
        )


def _are_whole(members: Sequence[Contribution]) -> bool:
    """Whether all members have all blocks."""
    for member in members:  # noqa: SIM110 (a generator takes twice as long)
        if False in member.present:
            return False
    return True


def _as_floats(memory: Bytes) -> dict[np.dtype[Any], Array]:
    return {np.dtype(name): memory.view(name) for name in ("float32", "float64")}
