"""One feed of a synchronous job as a range of steps, including those that make up for dropped contributions."""

from __future__ import annotations

from dataclasses import dataclass

from shardyard.domain.push_names import DataShardSource
from shardyard.domain.units import StepPlan
from shardyard_coordinator.work.feeds import FeedCounts, FeedOpening, FeedSpec
from shardyard_coordinator.work.straggler_verdicts import MakeupPlan


@dataclass(slots=True)
class StepRange:
    """A feed as steps of the job; in local mode these are rounds. `batches_per_data_shard`: if the feed was dealt by
    data shards before, their size, to cut it in the same way if the mode changes back; else 0."""

    spec: FeedSpec
    course: StepPlan
    make_up: MakeupPlan
    batches_per_data_shard: int = 0
    done: bool = False

    @property
    def first_step(self) -> int:
        return self.course.first

    @property
    def planned_end(self) -> int:
        return self.make_up.planned_end

    def opening(self, *, done: bool) -> FeedOpening:
        begun = self.course.begun_epochs, self.course.begun
        return FeedOpening(self.batches_per_data_shard, self.course.per_epoch, self.first_step, done, begun)

    def batch_span(self, source: DataShardSource, batch: int) -> tuple[int, int]:
        """The samples of a batch that was part of a data shard."""
        begin = (source.index * self.batches_per_data_shard + batch) * self.spec.batch_size
        return begin, min(begin + self.spec.batch_size, self.spec.samples_by_batches)

    def has_batch(self, source: DataShardSource, batch: int) -> bool:
        known = source.epoch < self.spec.epochs and batch < self.batches_per_data_shard
        begin, end = self.batch_span(source, batch)
        return known and begin < end

    def has(self, step: int) -> bool:
        """Whether the feed is known to have the step."""
        return self.first_step <= step < self.make_up.reached

    def span(self, rank: int, step: int) -> tuple[int, int, int]:
        """The samples of a planned step: an epoch, and [begin, end) of its permutation."""
        return self.course.span(step, rank)

    def samples_before(self, step: int) -> int:
        """This feed's samples in the steps before `step`."""
        taken = self.course.samples_before(self.planned_end if self.done else step)
        return taken - (0 if self.done else self.make_up.lacking(step))

    def counts(self, feed: int, step: int, quarantined: int) -> FeedCounts:
        """The counts in steps when the job is at `step`. `quarantined`: contributions of the feed that do not count."""
        total = self.make_up.reached - self.first_step
        done = total if self.done else max(0, min(step - self.first_step, total))
        return FeedCounts(feed, self.spec.samples, self.spec.epochs, total - done, 0, done, self.done, quarantined)
