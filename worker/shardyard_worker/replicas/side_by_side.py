"""The members of a group whose replicas are spread over several of them: neighbours have one replica together, and a
group has one or several such replicas side by side.

Owns: the collectives of the members of this replica, and of those that have the same variables in each replica. Must
not know: how gradients are computed, steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from shardyard.config.settings import JobSettings
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.replicas.buckets import buckets_of
from shardyard_worker.replicas.gradient_buckets import GradientBuckets


class SideBySide:
    """`collectives`: of all members. `size`: of a replica. `inside`: the collectives of the members of this replica.
    `beside`: of the members with these variables, by the number of their replica."""

    def __init__(self, collectives: Collectives, size: int) -> None:
        self.all = collectives
        self._first = collectives.place // size * size
        self.inside = collectives.among(range(self._first, self._first + size))
        with ExitStack() as undone:
            undone.callback(self.inside.leave)
            self.beside = collectives.among(range(collectives.place % size, collectives.size, size))
            undone.pop_all()
        self._sums: GradientBuckets | None = None

    @property
    def places(self) -> slice:
        """Of the members of this replica among all."""
        return slice(self._first, self._first + self.inside.size)

    def with_same_variables(self, of_all: Sequence[bool]) -> Sequence[bool]:
        """Of what is said of all members, that of those with these variables."""
        return of_all[self.inside.place :: self.inside.size]

    def begin_sums(self, settings: JobSettings, targets: Sequence[torch.Tensor]) -> None:
        """From now on gradients of these parameters are summed."""
        if self.beside.size > 1:
            self._sums = buckets_of(settings, targets, len(targets), self.beside.size)
            self._sums.overlaps = False
            self._sums.join(self.beside)

    def sum(self, own: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Adds up the gradients of all replicas. They are valid until the next sums. Raises GroupLost."""
        sums = self._sums
        if sums is None:
            return [*own]
        sums.clear()
        sums.facts.copy_(torch.tensor([float(each is not None) for each in own]))
        sums.add(own, 1.0)
        sums.send()
        sums.await_sums()
        there = sums.facts.tolist()
        return [each if found else None for each, found in zip(sums.mean(1.0), there, strict=True)]

    def leave(self) -> None:
        if self._sums is not None:
            self._sums.close()
        for each in {self.all, self.inside, self.beside}:
            each.leave()
