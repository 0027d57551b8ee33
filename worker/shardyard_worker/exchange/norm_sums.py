"""The verdicts that synchronous steps wait for, made of what all partitions have gathered (docs/ledger.md, rule B6).

Owns: what partitions have told of the newest step. Invariant: a verdict is a sum over all partitions in the order of
their numbers, so whoever makes it, of whichever answers, has the same bits. Pure. Must not know: servers, when a
verdict is sent, what it decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from shardyard.domain.ids import PartitionId
from shardyard.domain.pushes import GatheredPart, StepVerdict


class NormSums:
    """Of a job with so many partitions, under one partition map."""

    def __init__(self, partitions: int) -> None:
        self._partitions = tuple(PartitionId(number) for number in range(partitions))
        self._step = 0
        self._told: dict[PartitionId, float] = {}

    def hear(self, gathered: Iterable[GatheredPart]) -> None:
        """What is told of a step before the newest is not needed any more."""
        for partition, step, square_norm in gathered:
            if step > self._step:
                self._step = step
                self._told = {}
            if step == self._step:
                self._told[partition] = square_norm

    def lacking(self, step: int) -> tuple[PartitionId, ...]:
        """The partitions that have told nothing of that step."""
        if step != self._step:
            return self._partitions
        return tuple([partition for partition in self._partitions if partition not in self._told])

    def on(self, step: int) -> StepVerdict | None:
        """None where some partition has not told of it."""
        if self.lacking(step):
            return None
        total = 0.0
        for partition in self._partitions:
            total += self._told[partition]
        return StepVerdict(step, total)

    def norm(self, step: int) -> float | None:
        """The gradient's 2-norm over all partitions, where all have told of the step."""
        verdict = self.on(step)
        return None if verdict is None or verdict.square_norm is None else math.sqrt(verdict.square_norm)
