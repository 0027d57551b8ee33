"""Which samples each step of a synchronous job has, and which steps are done (promise 2; rules A6, B6).

Owns: a job's feeds as consecutive ranges of steps; with backup workers, also the steps that make up for dropped
batches; the contributions in quarantine, which do not count. Invariants: a feed is done only when the servers'
watermarks say so, and stays done unless partitions go back. Memory does not grow with the number of epochs or samples,
but with that of dropped batches until they are made up for. Must not know: servers, members, time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardyard.domain import limits
from shardyard.domain.errors import FeedConflict, InvalidRequest, NotFound, NotReady
from shardyard.domain.ids import Rank, Token
from shardyard.domain.push_names import DataShardSource, LeasedSource, RankSource
from shardyard.domain.units import StepPlan
from shardyard_coordinator.records import SUM_MAX, Body, Entry, require
from shardyard_coordinator.work.feeds import (
    FeedCounts,
    FeedOpening,
    FeedSpec,
    QuarantinedBatch,
    check_opening,
    entries_of,
    feed_of,
    feed_opened,
)
from shardyard_coordinator.work.quarantine import Quarantine, QuarantinedWork
from shardyard_coordinator.work.step_range import StepRange
from shardyard_coordinator.work.straggler_verdicts import MakeupPlan, MissedBatch, StepVerdicts


class StepLedger:
    """The feeds of a synchronous job, each a range of steps after the one before. `local_steps`: how many steps a rank
    takes alone within each of these. With `backup_workers` a feed continues after its planned steps while there is
    something to make up for; `verdicts` says what."""

    def __init__(self, *, logical_ranks: int, local_steps: int = 1, backup_workers: int = 0) -> None:
        self._logical_ranks = logical_ranks
        self._local_steps = local_steps
        self._backup_workers = backup_workers
        self._feeds: list[StepRange] = []
        self.quarantine = Quarantine()
        self.verdicts = StepVerdicts(logical_ranks, backup_workers)

    def __len__(self) -> int:
        return len(self._feeds)

    def open(self, feed: int, spec: FeedSpec) -> FeedOpening:
        """The first worker that opens a feed decides its spec. Raises FeedConflict, InvalidRequest, TooLarge, and
        NotReady while the end of the feed before it is not known."""
        check_opening(feed, spec, [each.spec for each in self._feeds])
        units = spec.cut(self._logical_ranks, self._local_steps)
        if feed == len(self._feeds):
            spec.units(units.samples_per_step, f"step of {self._logical_ranks} logical ranks")
            first = self._feeds[-1].make_up.end if self._feeds else 0
            if first is None:
                raise NotReady(
                    f"data set {feed} begins when all samples of the one before have counted",
                    why="some came late, and are computed again (job.consistency.backup_workers)",
                    todo="go through each job.batches to its end",
                )
            self._add(spec, first, units.per_epoch)
        found = self._feeds[feed]
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
        if feed < len(self._feeds) or not self._feeds or self._feeds[-1].make_up.end is not None:
            return None
        spec.check()
        units = spec.cut(self._logical_ranks, self._local_steps)
        return FeedOpening(0, units.per_epoch, self._feeds[-1].make_up.reached, True)

    def is_closed(self, feed: int) -> bool:
        """Raises NotFound."""
        return self._require(feed).done

    def close(self, feed: int, *, next_sequence: int) -> bool:
        """`next_sequence`: the lowest next step over all logical ranks and partitions. Raises NotFound."""
        found = self._require(feed)
        end = found.make_up.end
        found.done = found.done or (end is not None and next_sequence >= end)
        return found.done

    def counts(self, last: int, *, step: int) -> tuple[FeedCounts, ...]:
        """The counts of the `last` feeds opened, in steps, when the job is at `step`."""
        first = max(0, len(self._feeds) - last)
        return tuple(
            each.counts(feed, step, sum(self._is_in(feed, left) for left in self.quarantine))
            for feed, each in enumerate(self._feeds[first:], first)
        )

    def place(self, feed: int, step: int) -> tuple[int, int]:
        """What counts of a feed when the job stands before `step`: whole epochs, and samples from the start of the next
        epoch's permutation. Raises NotFound."""
        found = self._require(feed)
        return (found.spec.epochs, 0) if found.done else found.course.place(step)

    def batches_per_data_shard(self, feed: int) -> int:
        """0 unless the feed was dealt by data shards before the job became synchronous. Raises NotFound."""
        return self._require(feed).batches_per_data_shard

    def samples_done(self, *, step: int) -> int:
        """The samples of the steps before `step`, at which the job is."""
        taken = sum(each.samples_before(step) for each in self._feeds)
        return taken - sum(
            each.end - each.begin
            for each in self.quarantined()
            if self._feeds[each.feed].done
            or isinstance(each.condemned.source, DataShardSource)
            or each.condemned.sequence < step
        )

    def check_begin(self, source: LeasedSource, step: int) -> None:
        """Raises NotFound unless the step belongs to a feed."""
        if not isinstance(source, RankSource) or source.rank >= self._logical_ranks or self._feed_of(step) is None:
            raise NotFound(f"step {step} of {source}: there is no such step", todo="open the feed first")

    def has_step(self, step: int) -> bool:
        """Whether the step belongs to a feed."""
        return self._feed_of(step) is not None

    def quarantined(self) -> Iterator[QuarantinedBatch]:
        """All contributions that do not count, in the order of the verdicts."""
        for condemned in self.quarantine:
            former = condemned.source
            if isinstance(former, DataShardSource):
                begin, end = self._feeds[former.feed].batch_span(former, condemned.sequence)
                yield QuarantinedBatch(former.feed, former.epoch, condemned, begin, end)
                continue
            feed = self._feed_of(condemned.sequence)
            assert isinstance(condemned.source, RankSource)
            batch = None
            if feed is not None:
                batch = self._feeds[feed].make_up.batch(condemned.sequence, condemned.source.rank)
            if feed is None or batch is None:  # the rank had nothing there
                continue
            epoch, begin, end = self._feeds[feed].span(batch.rank, batch.step)
            yield QuarantinedBatch(feed, epoch, condemned, begin, end)

    def spec(self, feed: int) -> FeedSpec:
        """Raises NotFound."""
        return self._require(feed).spec

    def continue_feed(self, spec: FeedSpec, step: int, counted: tuple[int, int], per_shard: int) -> None:
        """Adds a feed that was dealt by data shards before. Its first step is `step`. `counted`: whole epochs, and
        samples of the epoch after them. `per_shard`: batches of a data shard."""
        units = spec.cut(self._logical_ranks, self._local_steps)
        made = self._add(spec, step, units.per_epoch, counted, per_shard)
        made.done = counted[0] == spec.epochs

    def check_feed(self, spec: FeedSpec) -> None:
        """Raises InvalidRequest if the feed cannot be dealt in steps."""
        samples = spec.cut(self._logical_ranks, self._local_steps).samples_per_step
        spec.units(samples, f"step of {self._logical_ranks} logical ranks")

    # ---- backup workers

    def due(self, step: int) -> tuple[Rank, ...] | None:
        """The ranks that are left out if the step is decided now. None if it is decided already, or too few ranks have
        contributed."""
        return self.verdicts.due(step, self._working(step))

    def is_full(self, step: int) -> bool:
        """Whether all ranks have samples at the step. A step that is not full may need one particular rank."""
        return len(self._working(step)) == self._logical_ranks

    def _working(self, step: int) -> list[Rank]:
        found = self._feed_of(step)
        ranks = [Rank(rank) for rank in range(self._logical_ranks)]
        return ranks if found is None else [rank for rank in ranks if self._samples(found, step, rank)]

    def decide(self, step: int, left_out: Sequence[Rank]) -> list[Rank]:
        """Records the verdict on a step. Returns those of the left-out ranks that had samples there."""
        for each in self._feeds:
            each.make_up.reach(step)
        self.verdicts.decide(step, left_out)
        found = self._feed_of(step)
        late = list(left_out) if found is None else self._drop(found, step)
        for each in self._feeds:
            each.make_up.reach(step + 1)
        return late

    def made_up(self, feed: int, step: int) -> tuple[dict[Rank, MissedBatch], int | None]:
        """What each rank makes up for at a step after the planned ones, and the step after the feed's last, if that is
        known. Raises NotFound, InvalidRequest for a planned step, NotReady while it is not decided."""
        make_up = self._require(feed).make_up
        if step < make_up.planned_end:
            raise InvalidRequest(f"what step {step} makes up for; feed {feed} is planned to step {make_up.planned_end}")
        if make_up.end is None and step >= make_up.reached:
            raise NotReady(f"step {step} of feed {feed}: step {self.verdicts.decided} is not decided yet")
        found = {Rank(rank): make_up.batch(step, Rank(rank)) for rank in range(self._logical_ranks)}
        return {rank: batch for rank, batch in found.items() if batch is not None}, make_up.end

    def forget_made_up(self, kept: Mapping[str, object]) -> None:
        """The checkpoint with the ledger `kept` is now the newest: no partition goes back into a feed that is closed in
        it. Raises DamagedRecord."""
        if not self.verdicts.decided:
            return
        then = self._then(kept)
        condemned = [each.sequence for each in self.quarantine]
        for feed, each in enumerate(self._feeds):
            end = each.make_up.end
            if end is None or not (each.done and feed < len(then) and then.is_closed(feed)):
                break
            if any(each.planned_end <= step < end for step in condemned):  # samples not named yet
                break
            self.verdicts.forget_before(end)
            each.make_up.forget()

    # ---- records

    def entries(self) -> list[Entry]:
        """Records that rebuild this ledger."""
        return [*self._opened, *self.verdicts.entries(), *self._closed, *self.verdicts.counters()]

    @property
    def copied(self) -> list[Entry]:
        """The same records as `entries`, for a checkpoint that is begun. The verdicts on steps before the checkpoint's
        own are added once its step is known."""
        return [*self._opened, *self._closed]

    @property
    def _opened(self) -> list[Entry]:
        opened = [feed_opened(feed, each.spec, each.opening(done=False)) for feed, each in enumerate(self._feeds)]
        return [*opened, *self.quarantine.entries()]

    @property
    def _closed(self) -> list[Entry]:
        return [feed_closed(feed, self.end(feed)) for feed, each in enumerate(self._feeds) if each.done]

    @property
    def tokens(self) -> list[Token]:
        """No work here has a lease."""
        return []

    @property
    def closed(self) -> int:
        return sum(each.done for each in self._feeds)

    @property
    def finished(self) -> bool:
        """Whether there was data, and all of it is done."""
        return bool(self._feeds) and all(each.done for each in self._feeds)

    def end(self, feed: int) -> int:
        """The step after the feed's last; while that is not known, the step after the last one that is known. Raises
        NotFound."""
        return self._require(feed).make_up.reached

    def reopen(self, kept: Mapping[str, object]) -> list[DataShardSource]:
        """Reopens feeds that were done since a checkpoint was begun with the ledger `kept`: partitions that were
        restored from it may lack their last steps. Raises DamagedRecord."""
        then = self._then(kept)
        for feed, each in enumerate(self._feeds):
            each.done = each.done and feed < len(then) and then.is_closed(feed)
        return []

    def begin_with(self, kept: Mapping[str, object], step: int = 0) -> None:
        """Takes over the ledger of another run's checkpoint, which is of that step. Raises DamagedRecord."""
        assert not self._feeds
        entries = list(entries_of(kept))
        for kind, body in sorted(entries, key=lambda entry: entry[0] == "feed_closed"):  # after its make-up
            self.restore(kind, body)
        if self._backup_workers and step and not self.verdicts.decided:
            self._decided_before(step)
        decided = self.verdicts.decided
        require(not self._backup_workers or decided >= step, f"a checkpoint of step {step}, and verdicts on {decided}")

    def _then(self, kept: Mapping[str, object]) -> StepLedger:
        then = StepLedger(
            logical_ranks=self._logical_ranks, local_steps=self._local_steps, backup_workers=self._backup_workers
        )
        then.begin_with(kept)
        return then

    def loses_finished(self, kept: Mapping[str, object]) -> int | None:
        """The first feed that was done since a checkpoint was begun with the ledger `kept`."""
        then = self._then(kept)
        done = [feed for feed, each in enumerate(self._feeds) if each.done]
        return next((feed for feed in done if feed >= len(then) or not then.is_closed(feed)), None)

    def restore(self, kind: str, body: Body) -> None:
        """Applies a record of `entries`. Raises DamagedRecord."""
        if kind == "feed_opened":
            self._restore_feed(body)
            return
        if kind == "steps_decided":
            require(self._backup_workers > 0, "verdicts on the steps of a job without backup workers")
            first, steps, dropped = self.verdicts.read(body)
            if first > self.verdicts.decided:
                self._decided_before(first)
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
                known = former.feed < len(self._feeds)
                known = known and self._feeds[former.feed].has_batch(former, condemned.sequence)
                require(known, f"#{condemned.sequence} of {former} does not exist")
                return
            known = isinstance(condemned.source, RankSource) and condemned.source.rank < self._logical_ranks
            # in a job with backup workers, later records say at which step a batch is made up for
            found = known and (self._backup_workers > 0 or self._feed_of(condemned.sequence) is not None)
            require(found, f"#{condemned.sequence} of {condemned.source} does not exist")
            return
        require(kind == "feed_closed", "data shards in a synchronous job")
        closed = self._feeds[body.number("feed", most=len(self._feeds) - 1)]
        closed.done = True
        if body.has("end"):
            closed.make_up.end = body.number("end", least=closed.planned_end, most=SUM_MAX)

    # ---- within

    def _feed_of(self, step: int) -> int | None:
        return next((feed for feed, each in enumerate(self._feeds) if each.has(step)), None)

    def _is_in(self, feed: int, condemned: QuarantinedWork) -> bool:
        former = condemned.source
        return former.feed == feed if isinstance(former, DataShardSource) else self._feeds[feed].has(condemned.sequence)

    def _restore_feed(self, body: Body) -> None:
        _, spec = feed_of(body, len(self._feeds))
        first, steps = body.number("first_step", most=SUM_MAX), body.number("units", least=1)
        epochs = body.number("begun_epochs", most=spec.epochs) if body.has("begun_epochs") else 0
        samples = body.number("begun_samples", most=spec.samples - 1) if body.has("begun_samples") else 0
        require(not samples or epochs < spec.epochs, f"{samples} samples behind the last epoch")
        self._add(spec, first, steps, (epochs, samples), body.number("batches_per_data_shard"))

    def _add(
        self, spec: FeedSpec, first: int, steps: int, begun: tuple[int, int] = (0, 0), per_shard: int = 0
    ) -> StepRange:
        units = spec.cut(self._logical_ranks, self._local_steps)
        course = StepPlan(units, steps, spec.epochs, first, *begun)
        make_up = MakeupPlan(self._logical_ranks, course.end, None if self._backup_workers else course.end)
        feed = len(self._feeds)
        self._feeds.append(StepRange(spec, course, make_up, per_shard))
        # a run that began with a checkpoint may know more than when the feeds were copied
        for step in range(max(first, self.verdicts.known_from), self.verdicts.decided):
            make_up.reach(step)
            if make_up.end is None:
                self._drop(feed, step)
        make_up.reach(self.verdicts.decided)
        return self._feeds[feed]

    def _decided_before(self, step: int) -> None:
        self.verdicts.decided_before(step)
        for each in self._feeds:
            each.make_up.reach(step)

    def _drop(self, feed: int, step: int) -> list[Rank]:
        """Drops the batches of the ranks that were left out of a decided step. Returns the ranks that had samples."""
        late = []
        for rank in self.verdicts.left_out(step):
            samples = self._samples(feed, step, rank)
            batch = self._feeds[feed].make_up.batch(step, rank)
            if samples and batch is not None:
                self._feeds[feed].make_up.drop(step, batch, samples)
                late.append(rank)
        return late

    def _samples(self, feed: int, step: int, rank: Rank) -> int:
        """The samples that count if the rank's contribution to the step does."""
        found = self._feeds[feed]
        batch = found.make_up.batch(step, rank)
        if batch is None or self.quarantine.has(RankSource(rank), step):
            return 0
        _, begin, end = found.span(batch.rank, batch.step)
        return end - begin

    def _require(self, feed: int) -> StepRange:
        if feed >= len(self._feeds):
            raise NotFound(f"feed {feed} has not been opened; {len(self._feeds)} have", todo="open it first")
        return self._feeds[feed]


def feed_closed(feed: int, end: int) -> Entry:
    """`end`: the step after its last."""
    return "feed_closed", {"feed": feed, "end": end}


def stood_in(kept: Mapping[str, object]) -> int:
    """From the ledger in a checkpoint: the step before which all logical ranks stand, if the checkpoint was written
    when the job was asynchronous; else 0. Raises DamagedRecord."""
    body = Body(kept)
    return body.number("step", most=limits.SEQUENCE_MAX) if body.has("step") else 0
