"""The norm of a synchronous step's gradient, summed over all partitions (rule B6).

Owns: the partitions' reports of the newest step. Invariant: a verdict sums over all partitions in the order of their
numbers, so every worker computes the same bits, whatever answers it has. Pure. Must not know: streams, when a verdict
is sent, what it decides.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.pulls import NotReadyPart
from shardyard.domain.pushes import GatheredPart, StepVerdict


class NormSums:
    """The sums of a job with this many partitions, under one partition map."""

    def __init__(self, partitions: int) -> None:
        self._partitions = tuple(PartitionId(number) for number in range(partitions))
        self._step = 0
        self._squares: dict[PartitionId, float] = {}

    def add(self, gathered: Iterable[GatheredPart], owned: Collection[PartitionId]) -> None:
        """Takes what a server that owns these partitions reports of them. Reports of others, and of a step before the
        newest, are dropped."""
        for partition, step, square_norm in gathered:
            if partition not in owned:
                continue
            if step > self._step:
                self._step = step
                self._squares = {}
            if step == self._step:
                self._squares[partition] = square_norm

    def lacking(self, step: int) -> tuple[PartitionId, ...]:
        """The partitions that have not reported that step."""
        if step != self._step:
            return self._partitions
        return tuple([partition for partition in self._partitions if partition not in self._squares])

    def verdict(self, step: int) -> StepVerdict | None:
        """None until all partitions have reported the step."""
        if self.lacking(step):
            return None
        total = 0.0
        for partition in self._partitions:
            total += self._squares[partition]
        return StepVerdict(step, total)

    def norm(self, step: int) -> float | None:
        """The gradient's 2-norm over all partitions; None until all have reported the step."""
        verdict = self.verdict(step)
        return None if verdict is None or verdict.square_norm is None else math.sqrt(verdict.square_norm)

    def explain(
        self, missing: tuple[NotReadyPart, ...], owned: Mapping[Incarnation, Sequence[PartitionId]]
    ) -> tuple[NotReadyPart, ...]:
        """Names the partitions of other servers that a step waits for, since each server knows only its own. `missing`:
        as one pull reports it."""
        step = missing[0].want - 1 if missing else -1
        lacking = frozenset(self.lacking(step)) if step >= 0 else frozenset()
        if not lacking:
            return missing
        by_server = [(server, [number for number in parts if number in lacking]) for server, parts in owned.items()]
        named = [f"{', '.join(map(str, numbers[:8]))} (server {server})" for server, numbers in by_server if numbers]
        what = f"step {step}: the square norms of partitions {'; '.join(named)}"
        return tuple([each if each.partition in lacking else replace(each, waiting_for=what) for each in missing])
