"""Which samples of an epoch are those of a logical rank's step, or round of local steps.

Owns: the cut of an epoch, and the order of steps over all epochs. An epoch is cut into steps, each of `accumulate`
batches for each logical rank; so many steps make a round (one, unless the mode is local), the last of an epoch has what
is left. Within a round each rank has adjacent samples. Of a data set that was begun by data shards the first steps have
the rest of the epoch at hand, cut in the same way. Invariant: the same on workers and coordinator, for ever: names of
work, audits and checkpoints are built on it; with one batch a step and one step a round a rank's samples are those of
one batch. Must not know: datasets, permutations, who computes what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple


class PlannedBatch(NamedTuple):
    """Samples [begin, end) of a rank's share. `due`: it is the last of a step."""

    begin: int
    end: int
    due: bool


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """`batch_size` samples a batch, `accumulate` batches a step and logical rank, `local_steps` steps a round."""

    samples: int
    batch_size: int
    ranks: int
    drop_last: bool
    accumulate: int = 1
    local_steps: int = 1

    @property
    def samples_per_step(self) -> int:
        """Of all ranks together."""
        return self.ranks * self._share

    @property
    def steps_per_epoch(self) -> int:
        """0 where `drop_last` leaves none."""
        full, rest = divmod(self.samples, self.samples_per_step)
        return full if self.drop_last or not rest else full + 1

    @property
    def samples_per_epoch(self) -> int:
        """Those that count."""
        return min(self.samples, self.steps_per_epoch * self.samples_per_step)

    @property
    def per_epoch(self) -> int:
        """Rounds of an epoch; of one step each unless steps are local."""
        return -(-self.steps_per_epoch // self.local_steps)

    def steps_in(self, index: int) -> int:
        """Steps of an epoch's round number `index`."""
        return min(self.local_steps, self.steps_per_epoch - index * self.local_steps)

    def span(self, index: int, rank: int) -> tuple[int, int]:
        """Positions [begin, end) of the epoch's permutation that a rank has of round `index`. The last one of an epoch
        may have none for the higher ranks."""
        begin = index * self.local_steps * self.samples_per_step
        length = self.steps_in(index) * self._share
        first, last = begin + rank * length, begin + (rank + 1) * length
        return min(first, self.samples_per_epoch), min(last, self.samples_per_epoch)

    def samples_before(self, rounds: int) -> int:
        """Samples of the first so many rounds, over all epochs."""
        epochs, rest = divmod(rounds, self.per_epoch)
        in_rest = min(rest * self.local_steps * self.samples_per_step, self.samples_per_epoch)
        return epochs * self.samples_per_epoch + in_rest

    def steps_before(self, rounds: int) -> int:
        """Steps of the first so many rounds, over all epochs."""
        epochs, rest = divmod(rounds, self.per_epoch)
        return epochs * self.steps_per_epoch + rest * self.local_steps

    def batches(self, samples: int) -> Iterator[PlannedBatch]:
        """The batches of a rank's share of so many samples, step by step. A step has `accumulate` batches, also where
        it has fewer samples than others, as long as there is one for each."""
        for first in range(0, samples, self._share):
            here = min(self._share, samples - first)
            # batches of full size where the step is full; else of sizes that differ by one at most
            count = min(self.accumulate, here)
            size, longer = divmod(here, count)
            begin = first
            for number in range(count):
                end = begin + size + (number < longer)
                yield PlannedBatch(begin, end, due=number == count - 1)
                begin = end

    @property
    def _share(self) -> int:
        """Samples of a step and rank."""
        return self.batch_size * self.accumulate


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The steps of a data set, or its rounds, from `first` on: `per_epoch` for each of `epochs`. Of a data set that was
    begun by data shards `begun_epochs` epochs have counted, and the first `begun` samples of the next one."""

    units: EpochPlan
    per_epoch: int
    epochs: int
    first: int
    begun_epochs: int = 0
    begun: int = 0

    @property
    def end(self) -> int:
        """The step after the last one."""
        return self.first + self._left + self.per_epoch * (self.epochs - self._whole_from)

    def span(self, step: int, rank: int) -> tuple[int, int, int]:
        """An epoch, and the positions [begin, end) of its permutation that a rank has at a step."""
        taken = step - self.first
        if taken < self._left:
            begin, end = self._rest.span(taken, rank)
            return self.begun_epochs, self.begun + begin, self.begun + end
        epochs, index = divmod(taken - self._left, self.per_epoch)
        return self._whole_from + epochs, *self.units.span(index, rank)

    def place(self, step: int) -> tuple[int, int]:
        """What has counted before a step: so many epochs, and so many samples of the next one's permutation, which are
        its first."""
        if step >= self.end:
            return self.epochs, 0
        epoch, begin, _ = self.span(max(step, self.first), 0)
        return epoch, begin

    def samples_before(self, step: int) -> int:
        """Samples that have counted before a step, over all epochs."""
        units, taken = self.units, max(0, min(step, self.end) - self.first)
        by_batches = units.samples - (units.samples % units.batch_size if units.drop_last else 0)
        before = self.begun_epochs * by_batches + self.begun
        if taken < self._left:
            return before + self._rest.samples_before(taken)
        in_rest = self._rest.samples_per_epoch if self.begun else 0
        return before + in_rest + units.samples_before(taken - self._left)

    @property
    def _whole_from(self) -> int:
        """The first epoch of which nothing had counted."""
        return self.begun_epochs + (1 if self.begun else 0)

    @property
    def _rest(self) -> EpochPlan:
        return replace(self.units, samples=self.units.samples - self.begun)

    @property
    def _left(self) -> int:
        """Steps of the epoch that was begun."""
        return self._rest.per_epoch if self.begun else 0
