"""Which samples each step of a synchronous job has, and which steps are done (promise 2; rules A6, B6).

Owns: a job's feeds as consecutive ranges of steps; with backup workers, also the steps that make up for dropped
batches; the contributions in quarantine, which do not count. Invariants: a feed is done only when the servers'
watermarks say so, and stays done unless partitions go back. Memory does not grow with the number of epochs or samples,
but with that of dropped batches until they are made up for. Must not know: servers, members, time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardyard.domain.epochs import StepPlan
from shardyard.domain.errors import FeedConflict, InvalidRequest, NotFound, NotReady
from shardyard.domain.ids import Rank
from shardyard.domain.push_names import DataShardSource, LeasedSource, RankSource
from shardyard_coordinator.records import SUM_MAX, Body, Entry, require
from shardyard_coordinator.work.feeds import (
    FeedCounts,
    FeedOpening,
    FeedSpec,
    QuarantinedBatch,
    check_opening,
    feed_of,
    feed_opened,
)
from shardyard_coordinator.work.quarantine import Quarantine
from shardyard_coordinator.work.straggler_verdicts import MakeupPlan, MissedBatch, StepVerdicts


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

    @property
    def end(self) -> int:
        """The step after the feed's last; while that is not known, the step after the last one that is known."""
        return self.make_up.reached

    def close(self, next_step: int) -> bool:
        """Returns whether the feed is done. `next_step`: the lowest next step over all logical ranks and partitions."""
        end = self.make_up.end
        self.done = self.done or (end is not None and next_step >= end)
        return self.done

    def place(self, step: int) -> tuple[int, int]:
        """What counts of the feed when the job stands before `step`: whole epochs, and samples from the start of the
        next epoch's permutation."""
        return (self.spec.epochs, 0) if self.done else self.course.place(step)

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
        return self.first_step <= step < self.end

    def span(self, rank: int, step: int) -> tuple[int, int, int]:
        """The samples of a planned step: an epoch, and [begin, end) of its permutation."""
        return self.course.span(step, rank)

    def samples_before(self, step: int) -> int:
        """This feed's samples in the steps before `step`."""
        taken = self.course.samples_before(self.planned_end if self.done else step)
        return taken - (0 if self.done else self.make_up.lacking(step))

    def counts(self, feed: int, step: int, quarantine: Quarantine) -> FeedCounts:
        """The counts in steps when the job is at `step`. `feed`: the number of this feed."""
        quarantined = sum(
            each.source.feed == feed if isinstance(each.source, DataShardSource) else self.has(each.sequence)
            for each in quarantine
        )
        total = self.end - self.first_step
        done = total if self.done else max(0, min(step - self.first_step, total))
        return FeedCounts(feed, self.spec.samples, self.spec.epochs, total - done, 0, done, self.done, quarantined)


class StepLedger:
    """The feeds of a synchronous job, each a range of steps after the one before. `local_steps`: how many steps a rank
    takes alone within each of these. With `backup_workers` a feed continues after its planned steps while there is
    something to make up for; `verdicts` says what."""

    def __init__(self, *, logical_ranks: int, local_steps: int = 1, backup_workers: int = 0) -> None:
        self.logical_ranks = logical_ranks
        self.local_steps = local_steps
        self.backup_workers = backup_workers
        self.opened: list[StepRange] = []
        self.quarantine = Quarantine()
        self.verdicts = StepVerdicts(logical_ranks, backup_workers)

    def __len__(self) -> int:
        return len(self.opened)

    def feed(self, number: int) -> StepRange:
        """Raises NotFound."""
        if number >= len(self.opened):
            raise NotFound(f"feed {number} has not been opened; {len(self.opened)} have", todo="open it first")
        return self.opened[number]

    def open(self, feed: int, spec: FeedSpec) -> FeedOpening:
        """The first worker that opens a feed decides its spec. Raises FeedConflict, InvalidRequest, TooLarge, and
        NotReady while the end of the feed before it is not known."""
        check_opening(feed, spec, [each.spec for each in self.opened])
        units = spec.cut(self.logical_ranks, self.local_steps)
        if feed == len(self.opened):
            self.check_feed(spec)
            first = self.opened[-1].make_up.end if self.opened else 0
            if first is None:
                raise NotReady(
                    f"data set {feed} begins when all samples of the one before have counted",
                    why="some came late, and are computed again (job.consistency.backup_workers)",
                    todo="go through each job.batches to its end",
                )
            self._add(spec, first, units.per_epoch)
        found = self.opened[feed]
        if found.course.per_epoch != units.per_epoch:
            raise FeedConflict(
                f"feed {feed} was opened before in another way (steps of the job in an epoch: expected "
                f"{found.course.per_epoch}, got {units.per_epoch})",
                why="the run that it was opened in had another number of local steps in a round",
                todo="set job.consistency.mode and job.consistency.steps to what they were in that run",
                facts={"differs": "steps"},
            )
        return found.opening(done=found.done)

    def never(self, feed: int, spec: FeedSpec) -> FeedOpening | None:
        """Answers with no steps if the job has stopped and the end of the feed before this one will never be known. The
        feed is not opened; the next run opens it. None for other feeds. Raises InvalidRequest, TooLarge."""
        if feed < len(self.opened) or not self.opened or self.opened[-1].make_up.end is not None:
            return None
        spec.check()
        units = spec.cut(self.logical_ranks, self.local_steps)
        return FeedOpening(0, units.per_epoch, self.opened[-1].end, True)

    def counts(self, last: int, *, step: int) -> tuple[FeedCounts, ...]:
        """The counts of the `last` feeds opened, in steps, when the job is at `step`."""
        first = max(0, len(self.opened) - last)
        return tuple(each.counts(feed, step, self.quarantine) for feed, each in enumerate(self.opened[first:], first))

    def samples_done(self, *, step: int) -> int:
        """The samples of the steps before `step`, at which the job is."""
        taken = sum(each.samples_before(step) for each in self.opened)
        return taken - sum(
            each.end - each.begin
            for each in self.quarantined()
            if self.opened[each.feed].done
            or isinstance(each.condemned.source, DataShardSource)
            or each.condemned.sequence < step
        )

    def feed_of(self, step: int) -> int | None:
        """The feed that has the step."""
        return next((feed for feed, each in enumerate(self.opened) if each.has(step)), None)

    def check_begin(self, source: LeasedSource, step: int) -> None:
        """Raises NotFound unless the step belongs to a feed."""
        if not isinstance(source, RankSource) or source.rank >= self.logical_ranks or self.feed_of(step) is None:
            raise NotFound(f"step {step} of {source}: there is no such step", todo="open the feed first")

    def quarantined(self) -> Iterator[QuarantinedBatch]:
        """All contributions that do not count, in the order of the verdicts."""
        for condemned in self.quarantine:
            former = condemned.source
            if isinstance(former, DataShardSource):
                begin, end = self.opened[former.feed].batch_span(former, condemned.sequence)
                yield QuarantinedBatch(former.feed, former.epoch, condemned, begin, end)
                continue
            feed = self.feed_of(condemned.sequence)
            assert isinstance(condemned.source, RankSource)
            batch = None
            if feed is not None:
                batch = self.opened[feed].make_up.batch(condemned.sequence, condemned.source.rank)
            if feed is None or batch is None:  # the rank had nothing there
                continue
            epoch, begin, end = self.opened[feed].span(batch.rank, batch.step)
            yield QuarantinedBatch(feed, epoch, condemned, begin, end)

    def continue_feed(self, spec: FeedSpec, step: int, counted: tuple[int, int], per_shard: int) -> None:
        """Adds a feed that was dealt by data shards before. Its first step is `step`. `counted`: whole epochs, and
        samples of the epoch after them. `per_shard`: batches of a data shard."""
        units = spec.cut(self.logical_ranks, self.local_steps)
        made = self._add(spec, step, units.per_epoch, counted, per_shard)
        made.done = counted[0] == spec.epochs

    def check_feed(self, spec: FeedSpec) -> None:
        """Raises InvalidRequest if the feed cannot be dealt in steps."""
        samples = spec.cut(self.logical_ranks, self.local_steps).samples_per_step
        spec.units(samples, f"step of {self.logical_ranks} logical ranks")

    # ---- backup workers

    def working(self, step: int) -> list[Rank]:
        """The ranks that have samples at the step."""
        found = self.feed_of(step)
        ranks = [Rank(rank) for rank in range(self.logical_ranks)]
        return ranks if found is None else [rank for rank in ranks if self._samples(found, step, rank)]

    def decide(self, step: int, left_out: Sequence[Rank]) -> list[Rank]:
        """Records the verdict on a step. Returns those of the left-out ranks that had samples there."""
        for each in self.opened:
            each.make_up.reach(step)
        self.verdicts.decide(step, left_out)
        found = self.feed_of(step)
        late = list(left_out) if found is None else self._drop(found, step)
        for each in self.opened:
            each.make_up.reach(step + 1)
        return late

    def made_up(self, feed: int, step: int) -> tuple[dict[Rank, MissedBatch], int | None]:
        """What each rank makes up for at a step after the planned ones, and the step after the feed's last, if that is
        known. Raises NotFound, InvalidRequest for a planned step, NotReady while it is not decided."""
        make_up = self.feed(feed).make_up
        if step < make_up.planned_end:
            raise InvalidRequest(f"what step {step} makes up for; feed {feed} is planned to step {make_up.planned_end}")
        if make_up.end is None and step >= make_up.reached:
            raise NotReady(f"step {step} of feed {feed}: step {self.verdicts.decided} is not decided yet")
        found = {Rank(rank): make_up.batch(step, Rank(rank)) for rank in range(self.logical_ranks)}
        return {rank: batch for rank, batch in found.items() if batch is not None}, make_up.end

    # ---- records

    def entries(self, *, verdicts: bool = True) -> list[Entry]:
        """Records that rebuild this ledger. Without `verdicts`, those for a checkpoint that is begun: the verdicts on
        steps before the checkpoint's own are added once its step is known."""
        opened = [feed_opened(feed, each.spec, each.opening(done=False)) for feed, each in enumerate(self.opened)]
        closed = [feed_closed(feed, each.end) for feed, each in enumerate(self.opened) if each.done]
        decided, counters = (self.verdicts.entries(), self.verdicts.counters()) if verdicts else ([], [])
        return [*opened, *self.quarantine.entries(), *decided, *closed, *counters]

    @property
    def closed(self) -> int:
        return sum(each.done for each in self.opened)

    @property
    def finished(self) -> bool:
        """Whether there was data, and all of it is done."""
        return bool(self.opened) and all(each.done for each in self.opened)

    def restore(self, kind: str, body: Body) -> None:
        """Applies a record of `entries`. Raises DamagedRecord."""
        if kind == "feed_opened":
            self._restore_feed(body)
            return
        if kind == "steps_decided":
            require(self.backup_workers > 0, "verdicts on the steps of a job without backup workers")
            first, steps, dropped = self.verdicts.read(body)
            if first > self.verdicts.decided:
                self.decided_before(first)
            for step, left_out in enumerate(steps, first):
                self.decide(step, left_out)
            self.verdicts.drop(dropped)
            return
        if kind == "contributions_dropped_before":
            self.verdicts.restore_counters(body)
            return
        if kind == "batch_quarantined":
            condemned = self.quarantine.restore(body)
            former = condemned.source
            if isinstance(former, DataShardSource):
                known = former.feed < len(self.opened)
                known = known and self.opened[former.feed].has_batch(former, condemned.sequence)
                require(known, f"#{condemned.sequence} of {former} does not exist")
                return
            known = isinstance(condemned.source, RankSource) and condemned.source.rank < self.logical_ranks
            # in a job with backup workers, later records say at which step a batch is made up for
            found = known and (self.backup_workers > 0 or self.feed_of(condemned.sequence) is not None)
            require(found, f"#{condemned.sequence} of {condemned.source} does not exist")
            return
        require(kind == "feed_closed", "data shards in a synchronous job")
        closed = self.opened[body.number("feed", most=len(self.opened) - 1)]
        closed.done = True
        if body.has("end"):
            closed.make_up.end = body.number("end", least=closed.planned_end, most=SUM_MAX)

    # ---- within

    def _restore_feed(self, body: Body) -> None:
        _, spec = feed_of(body, len(self.opened))
        first, steps = body.number("first_step", most=SUM_MAX), body.number("units", least=1)
        epochs = body.number("begun_epochs", most=spec.epochs) if body.has("begun_epochs") else 0
        samples = body.number("begun_samples", most=spec.samples - 1) if body.has("begun_samples") else 0
        require(not samples or epochs < spec.epochs, f"{samples} samples behind the last epoch")
        self._add(spec, first, steps, (epochs, samples), body.number("batches_per_data_shard"))

    def _add(
        self, spec: FeedSpec, first: int, steps: int, begun: tuple[int, int] = (0, 0), per_shard: int = 0
    ) -> StepRange:
        units = spec.cut(self.logical_ranks, self.local_steps)
        course = StepPlan(units, steps, spec.epochs, first, *begun)
        make_up = MakeupPlan(self.logical_ranks, course.end, None if self.backup_workers else course.end)
        feed = len(self.opened)
        self.opened.append(StepRange(spec, course, make_up, per_shard))
        # a run that began with a checkpoint may know more than when the feeds were copied
        for step in range(max(first, self.verdicts.known_from), self.verdicts.decided):
            make_up.reach(step)
            if make_up.end is None:
                self._drop(feed, step)
        make_up.reach(self.verdicts.decided)
        return self.opened[feed]

    def decided_before(self, step: int) -> None:
        self.verdicts.decided_before(step)
        for each in self.opened:
            each.make_up.reach(step)

    def _drop(self, feed: int, step: int) -> list[Rank]:
        """Drops the batches of the ranks that were left out of a decided step. Returns the ranks that had samples."""
        late = []
        for rank in self.verdicts.left_out(step):
            samples = self._samples(feed, step, rank)
            batch = self.opened[feed].make_up.batch(step, rank)
            if samples and batch is not None:
                self.opened[feed].make_up.drop(step, batch, samples)
                late.append(rank)
        return late

    def _samples(self, feed: int, step: int, rank: Rank) -> int:
        """The samples that count if the rank's contribution to the step does."""
        found = self.opened[feed]
        batch = found.make_up.batch(step, rank)
        if batch is None or self.quarantine.has(RankSource(rank), step):
            return 0
        _, begin, end = found.span(batch.rank, batch.step)
        return end - begin


def feed_closed(feed: int, end: int) -> Entry:
    """`end`: the step after its last."""
    return "feed_closed", {"feed": feed, "end": end}
