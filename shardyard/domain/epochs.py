"""The order of an epoch's samples, and how an epoch is cut into the steps of logical ranks, or rounds of local steps.

The permutation of an epoch depends only on (seed, feed, epoch). A step has `accumulate` batches for each logical rank.
A round has several steps in local mode, and one step in other modes. The last round of an epoch has the rest. Within a
round, the samples of a rank are adjacent. If data shards were used before, the first steps take the rest of the current
epoch, cut in the same way. Invariant: workers and coordinator compute the same on every machine and in every release,
because names of pushes, audits and checkpoints refer to it. Must not know: datasets, leases, the worker of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def order(*, seed: int, feed: int, epoch: int, samples: int, shuffle: bool) -> Indices:
    """The permutation of [0, samples) for an epoch, int64, from PCG64 with the seed (seed, feed, epoch)."""
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, feed, epoch])))
    return generator.permutation(samples).astype(np.int64, copy=False)


class PlannedBatch(NamedTuple):
    """Samples [begin, end) of a rank's share. `due`: it is the last batch of a step."""

    begin: int
    end: int
    due: bool


@dataclass(frozen=True)
class EpochPlan:
    """`batch_size` samples a batch, `accumulate` batches a step and logical rank, `local_steps` steps a round."""

    samples: int
    batch_size: int
    ranks: int
    drop_last: bool
    accumulate: int = 1
    local_steps: int = 1

    @cached_property
    def samples_per_step(self) -> int:
        """Samples of a step, of all ranks together."""
        return self.ranks * self._share

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch; 0 if `drop_last` leaves none."""
        full, rest = divmod(self.samples, self.samples_per_step)
        return full if self.drop_last or not rest else full + 1

    @cached_property
    def samples_per_epoch(self) -> int:
        """Samples of an epoch that are used."""
        return min(self.samples, self.steps_per_epoch * self.samples_per_step)

    @cached_property
    def per_epoch(self) -> int:
        """Rounds of an epoch. A round has one step, unless steps are local."""
        return -(-self.steps_per_epoch // self.local_steps)

    def steps_in(self, index: int) -> int:
        """Steps of round `index` of an epoch."""
        return min(self.local_steps, self.steps_per_epoch - index * self.local_steps)

    def span(self, index: int, rank: int) -> tuple[int, int]:
        """The positions [begin, end) of the epoch's permutation that a rank has in round `index`. In the last round,
        the higher ranks may have none."""
        begin = index * self.local_steps * self.samples_per_step
        length = self.steps_in(index) * self._share
        first, last = begin + rank * length, begin + (rank + 1) * length
        return min(first, self.samples_per_epoch), min(last, self.samples_per_epoch)

    def samples_before(self, rounds: int) -> int:
        """Samples of the first `rounds` rounds, over all epochs."""
        epochs, rest = divmod(rounds, self.per_epoch)
        in_rest = min(rest * self.local_steps * self.samples_per_step, self.samples_per_epoch)
        return epochs * self.samples_per_epoch + in_rest

    def steps_before(self, rounds: int) -> int:
        """Steps of the first `rounds` rounds, over all epochs."""
        epochs, rest = divmod(rounds, self.per_epoch)
        return epochs * self.steps_per_epoch + rest * self.local_steps

    def batches(self, samples: int) -> Iterator[PlannedBatch]:
        """The batches of a rank's share of `samples` samples, step by step. A step has `accumulate` batches, even if it
        has fewer samples than the others, as long as each batch has one."""
        for first in range(0, samples, self._share):
            here = min(self._share, samples - first)
            # a full step has batches of full size; in other steps the sizes differ by one at most
            count = min(self.accumulate, here)
            size, longer = divmod(here, count)
            begin = first
            for number in range(count):
                end = begin + size + (number < longer)
                yield PlannedBatch(begin, end, due=number == count - 1)
                begin = end

    @property
    def batch_sizes(self) -> list[int]:
        """Of full steps, and then of the last step of an epoch."""
        shares = [end - begin for begin, end in (self.span(self.per_epoch - 1, rank) for rank in range(self.ranks))]
        last = {batch.end - batch.begin for share in shares for batch in self.batches(share)}
        return [self.batch_size, *sorted(last)]

    @cached_property
    def _share(self) -> int:
        """Samples of one rank in one step."""
        return self.batch_size * self.accumulate


@dataclass(frozen=True)
class StepPlan:
    """The steps, or rounds, of a data set from `first` on: `per_epoch` for each of `epochs`. If data shards were used
    before, `begun_epochs` epochs and the first `begun` samples of the next epoch are done already."""

    units: EpochPlan
    per_epoch: int
    epochs: int
    first: int
    begun_epochs: int = 0
    begun: int = 0

    @cached_property
    def end(self) -> int:
        """The step after the last one."""
        return self.first + self._left + self.per_epoch * (self.epochs - self._whole_from)

    def span(self, step: int, rank: int) -> tuple[int, int, int]:
        """The epoch of a step, and the positions [begin, end) of its permutation that a rank has."""
        taken = step - self.first
        if taken < self._left:
            begin, end = self._rest.span(taken, rank)
            return self.begun_epochs, self.begun + begin, self.begun + end
        epochs, index = divmod(taken - self._left, self.per_epoch)
        return self._whole_from + epochs, *self.units.span(index, rank)

    def place(self, step: int) -> tuple[int, int]:
        """What is done before a step: a number of epochs, and a number of samples at the beginning of the next epoch's
        permutation."""
        if step >= self.end:
            return self.epochs, 0
        epoch, begin, _ = self.span(max(step, self.first), 0)
        return epoch, begin

    def samples_before(self, step: int) -> int:
        """Samples that are done before a step, over all epochs."""
        units, taken = self.units, max(0, min(step, self.end) - self.first)
        by_batches = units.samples - (units.samples % units.batch_size if units.drop_last else 0)
        before = self.begun_epochs * by_batches + self.begun
        if taken < self._left:
            return before + self._rest.samples_before(taken)
        in_rest = self._rest.samples_per_epoch if self.begun else 0
        return before + in_rest + units.samples_before(taken - self._left)

    @cached_property
    def _whole_from(self) -> int:
        """The first epoch of which nothing was done before."""
        return self.begun_epochs + (1 if self.begun else 0)

    @cached_property
    def _rest(self) -> EpochPlan:
        return replace(self.units, samples=self.units.samples - self.begun)

    @cached_property
    def _left(self) -> int:
        """Steps in the rest of the epoch that was begun."""
        return self._rest.per_epoch if self.begun else 0
