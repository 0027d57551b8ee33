"""Which samples of an epoch are those of a logical rank's step, or round of local steps.

Owns: the cut of an epoch. An epoch is cut into steps, each of `accumulate` batches for each logical rank; so many steps
make a round (one, unless the mode is local), the last of an epoch has what is left. Within a round each rank has
adjacent samples. Invariant: the same on workers and coordinator, for ever: names of work, audits and checkpoints are
built on it; with one batch a step and one step a round a rank's samples are those of one batch. Must not know:
datasets, permutations, who computes what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Batch(NamedTuple):
    """Samples [begin, end) of a rank's share. `due`: it is the last of a step."""

    begin: int
    end: int
    due: bool


@dataclass(frozen=True, slots=True)
class Units:
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

    def batches(self, samples: int) -> Iterator[Batch]:
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
                yield Batch(begin, end, due=number == count - 1)
                begin = end

    @property
    def _share(self) -> int:
        """Samples of a step and rank."""
        return self.batch_size * self.accumulate
