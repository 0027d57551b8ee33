"""The dense state of one partition: blocks of variables in a flat payload, optimizer state beside them, and how an
update turns one version's bytes into the next one's.

Owns: optimizer state, update counts per block. Invariants: an update is elementwise and takes contributions in the
order given, so the bits depend neither on how variables were cut nor on who hosts them (promise 6); values are written
out of place. Called under the partition's lock. Must not know: ledgers, versions, threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shardyard.ground.errors import MalformedPayload
from shardyard.ground.types import Block, JobLayout, PartitionLayout, PushPart, VariableKind, aligned_bytes
from shardyard_ps_server import optimizers
from shardyard_ps_server.versions import Bytes, aligned_empty

Groups = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Contribution:
    """One push's part for one partition, in the partition's full layout.

    `payload` has shape (payload_bytes,), dtype uint8; `present[i]` says whether block i has a gradient (or value).
    `groups` None: a named empty push, without payload.
    """

    weight: float
    groups: Groups | None
    payload: Bytes
    present: tuple[bool, ...]


@dataclass(frozen=True)
class _Run:
    """Blocks next to each other that are updated alike, as one slice of the payload. `first` is the first block's
    index; `present[i]` whether member i of the update has them."""

    start: int
    stop: int
    first: int
    dtype: np.dtype[Any]
    is_parameter: bool
    group: int
    present: tuple[bool, ...]

    def of(self, payload: Bytes) -> npt.NDArray[Any]:
        return payload[self.start : self.stop].view(self.dtype)


class Blocks:
    """The blocks of one partition under one optimizer."""

    def __init__(self, layout: JobLayout, part: PartitionLayout) -> None:
        self._part = part
        self._variables = [layout.variables[block.variable] for block in part.blocks]
        self._optimizer = optimizers.make(layout.optimizer.kind)
        self._counts = [0] * len(part.blocks)
        self._slots: dict[str, Bytes] = {}
        self._scratch: Bytes | None = None
        self._uniform: list[_Run] | None = None
        for index, spec in enumerate(self._variables):
            if spec.kind is VariableKind.PARAMETER:
                self._make_slots(index, layout.optimizer.groups[spec.group])

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

    # ---- what comes in

    def expected_bytes(self, part: PushPart) -> int:
        """Length that the payload of this part must have. Raises MalformedPayload for a block that does not exist."""
        absent = part.absent_blocks
        count = len(self._part.blocks)
        if any(index >= count for index in absent) or any(a >= b for a, b in itertools.pairwise(absent)):
            raise MalformedPayload(
                f"absent blocks {list(absent[:8])} of partition {part.partition}, which has {count}; expected ascending"
            )
        if part.payload_bytes == 0:
            return 0
        spans = (self._span(index) for index in absent)
        return self._part.payload_bytes - sum(stop - start for start, stop in spans)

    def unpack(self, part: PushPart, payload: Bytes) -> tuple[Bytes, tuple[bool, ...]]:
        """A part's payload in the full layout, and which blocks are present. Copies only where some are absent.
        Raises TooLarge."""
        count = len(self._part.blocks)
        if part.payload_bytes == 0:
            return payload, (False,) * count
        if not part.absent_blocks:
            return payload, (True,) * count
        present = [True] * count
        for index in part.absent_blocks:
            present[index] = False
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
        if self._scratch is None:
            self._scratch = aligned_empty(2 * self._part.payload_bytes)

    def update(self, members: Sequence[Contribution], shares: Sequence[float], old: Bytes, new: Bytes) -> None:
        """Writes the next values into `new`: parameters stepped along the weighted mean of the members' gradients,
        summed in the order given; floating-point buffers set to the weighted mean, integer ones to the maximum.

        A block that no member has keeps its values. A gradient that some members lack counts as zero there, a buffer
        that they lack as no opinion. A single member's share is taken as 1.
        """
        if not members:
            new[:] = old
            return
        groups = members[0].groups
        assert groups is not None
        for run in self._runs(members):
            into = run.of(new)
            having = [(m, s) for m, s, present in zip(members, shares, run.present, strict=True) if present]
            if not having:
                into[:] = run.of(old)
            elif run.is_parameter:
                gradient = self._sum(run, having) if len(members) > 1 else run.of(members[0].payload)
                settings = groups[run.group]
                state = [run.of(self._slots[slot.name]) for slot in self._optimizer.slots(settings)]
                count = self._counts[run.first] + 1
                self._optimizer.step(settings, count, run.of(old), gradient, into, state)
            elif len(having) == 1:
                into[:] = run.of(having[0][0].payload)
            elif run.dtype.kind == "f":
                total = sum(share for _, share in having)
                into[:] = self._sum(run, [(member, share / total) for member, share in having])
            else:
                into[:] = run.of(having[0][0].payload)
                for member, _ in having[1:]:
                    np.maximum(into, run.of(member.payload), out=into)
        self._count(members)

    def _sum(self, run: _Run, having: Sequence[tuple[Contribution, float]]) -> npt.NDArray[Any]:
        """The sum of share times value, in order, each product and each sum rounded to the blocks' dtype. NaN and
        infinity go through in silence, as in the kernels."""
        half = self._part.payload_bytes
        self.reserve_sums()
        assert self._scratch is not None
        mean, product = run.of(self._scratch[:half]), run.of(self._scratch[half:])
        first, share = having[0]
        with np.errstate(all="ignore"):
            np.multiply(run.of(first.payload), run.dtype.type(share), out=mean)
            for member, share in having[1:]:
                np.multiply(run.of(member.payload), run.dtype.type(share), out=product)
                np.add(mean, product, out=mean)
        return mean

    def _count(self, members: Sequence[Contribution]) -> None:
        for index in range(len(self._counts)):
            if any(member.present[index] for member in members):
                self._counts[index] += 1
            else:
                self._uniform = None

    def _runs(self, members: Sequence[Contribution]) -> Sequence[_Run]:
        """The payload from begin to end, neighbours that are updated alike in one piece."""
        if not all(all(member.present) for member in members):
            return list(self._find_runs([member.present for member in members]))
        if self._uniform is None or len(self._uniform) == 0 or len(self._uniform[0].present) != len(members):
            self._uniform = list(self._find_runs([member.present for member in members]))
        return self._uniform

    def _find_runs(self, presents: Sequence[tuple[bool, ...]]) -> Iterator[_Run]:
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
                tuple(present[index] for present in presents),
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
            and (left.dtype, left.is_parameter, left.group, left.present)
            == (right.dtype, right.is_parameter, right.group, right.present)
            and self._counts[left.first] == self._counts[right.first]
        )


def _room(block: Block, item_bytes: int) -> int:
    return aligned_bytes(block.length * item_bytes)
