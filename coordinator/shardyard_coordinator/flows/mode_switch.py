"""Switches a running job to another consistency mode, bound on staleness, or strategy.

The job's `mode` and `pending_switch` hold the decisions. A switch between asynchronous and synchronous updates, or to
another strategy, takes three steps: workers pause, a checkpoint is taken that has all counted work and nothing else,
and one record puts the job into the other mode (docs/internals/ledger.md, rules B8, B10, D9). Any other switch is told
to the servers, then to the workers.
Invariants: a switch that is refused has changed nothing. Until the record of the other mode is written, the switch may
be cancelled, unless replicas publish for it. Must not know: how servers are called, the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardyard.config.settings import JobSettings
from shardyard.domain import errors, limits
from shardyard.domain.consistency import Consistency, ConsistencyMode, Durability, UpdateMode
from shardyard.domain.ids import Generation, Incarnation, Token
from shardyard.domain.push_names import DataShardSource
from shardyard.domain.replica_groups import Strategy
from shardyard_coordinator.core.effects import Effect, JobPhase, LogMessage, PaceServers, Reply, SwitchTaken
from shardyard_coordinator.core.job_state import JobState, new_data_ledger, new_ranks, new_replicas, new_step_ledger
from shardyard_coordinator.modes.mode_setting import (
    SETTING,
    STRATEGY_SETTING,
    consistency_body,
    consistency_of,
    settings_of,
    switched,
)
from shardyard_coordinator.placement import table_specs
from shardyard_coordinator.records import Body, DamagedRecord, Entry, require
from shardyard_coordinator.storage.checkpoint_book import Committed
from shardyard_coordinator.work import checkpoint_copy, ledger_conversion
from shardyard_coordinator.work.data_ledger import DataLedger
from shardyard_coordinator.work.feeds import LeaseWait
from shardyard_coordinator.work.ranks import RankBook
from shardyard_coordinator.work.step_ledger import StepLedger


def switch(
    job: JobState, mode: ConsistencyMode | None, staleness: int | None, strategy: Strategy | None, now_ms: int
) -> list[Effect]:
    """A person asks for another mode, bound or strategy. Raises InvalidRequest, NotReady, ConfigurationError, and the
    failure of a failed job."""
    job.require_unfinished()
    job.require_joinable()
    settings = switched(job.settings, mode, staleness, strategy)
    if settings.strategy is not job.settings.strategy or _updates(settings) is not _updates(job.settings):
        return _ask_switch(job, settings)
    if may_cancel(job):
        _check_cancel(job, settings)
        reply = Reply(SwitchTaken(job.id, job.settings.name, job.mode.latest, first=True))
        return [*_cancel(job, "as requested"), reply]
    asked = job.mode.ask(settings)
    latest = job.mode.latest
    reply = Reply(SwitchTaken(job.id, job.settings.name, latest, first=bool(asked)))
    if not asked:
        return [reply]
    job.apply_mode()
    message = LogMessage(f"{job.title} switches to {latest}, as requested")
    return [*job.records(asked), message, *_pace(job, now_ms), reply]


def _updates(settings: JobSettings) -> UpdateMode:
    return settings.consistency.mode.updates


def may_cancel(job: JobState) -> bool:
    """Whether a switch by way of a checkpoint is under way, and the job is not in the other mode."""
    return job.pending_switch.wanted is not None and not _has_switched(job)


def _has_switched(job: JobState) -> bool:
    """Whether the job is in the mode to which it switches. Its partitions may still be being restored."""
    wanted = job.pending_switch.wanted
    return wanted is not None and job.mode.latest.number >= wanted.number


def on_reached(job: JobState, worker: Incarnation, number: int, reached: int) -> list[Effect]:
    """A worker waits for the switch of that number. `reached`: the first step to which it has not contributed; if the
    job switches to steps, how many pushes of its own it has begun. Returns effects only if this cancels the switch."""
    point = job.pending_switch.switch_point
    if point is not None and point.to_steps and point.number == number and reached and may_cancel(job):
        return _cancel(job, f"because worker {worker} takes steps outside of job.batches")
    job.pending_switch.on_reached(worker, number, reached)
    return []


def may_fix_step(job: JobState) -> bool:
    """Whether the servers have all work that was begun, after all workers wait for the switch."""
    if not job.pending_switch.to_steps:
        return True
    lost = job.departed is not None and job.departed.is_due
    return isinstance(job.feeds, DataLedger) and job.feeds.is_drained and not lost


def fix_step(job: JobState, step: int) -> list[Effect]:
    """All workers wait for the switch. `step`: the first to which no partition has any contribution; if the job has no
    steps yet, the highest version of any partition."""
    if job.pending_switch.to_steps:
        records = job.pending_switch.fix_step(max(step, job.progress.step), job.book.ask())
        job.progress.reach(job.pending_switch.step or 0)
        message = f"{job.title} switches to {job.pending_switch.wanted}: all data shards that were begun are done"
        return [*job.records(records), LogMessage(message)]
    records = job.pending_switch.fix_step(step)
    message = f"{job.title} switches to {job.pending_switch.wanted} before step {job.pending_switch.step or 0:,}"
    return [*job.records(records), LogMessage(message)]


def tick(job: JobState, now_ms: int) -> list[Effect]:
    return [*_switch_partitions(job, now_ms), *_pace(job, now_ms)]


def note_map(job: JobState, *, restored: bool) -> None:
    """The partitions may have another map. `restored`: some of them have gone back to a checkpoint."""
    if _has_switched(job) and not job.mode.is_former_map(job.deployment.generation):
        job.pending_switch.end()
    elif restored and not _has_switched(job):
        job.pending_switch.reopen()


def awaits_work(job: JobState) -> LeaseWait | None:
    """What a worker waits for if it asks for a data shard during the switch; None: no data shard is held back."""
    if job.ranks is not None and job.mode.has_switched_partitions:
        return LeaseWait(f"partitions of {job.title} in mode {job.settings.consistency.mode.value}")
    if not job.pending_switch.to_steps:
        return None
    return LeaseWait(f"{job.title} to switch to {job.pending_switch.wanted}; until then no new data shard is leased")


def unfinished_shards(job: JobState) -> str:
    """For people: the data shards that must be done before the job changes to steps, with their workers."""
    return job.feeds.holders if job.pending_switch.to_steps and isinstance(job.feeds, DataLedger) else ""


# ---- by way of a checkpoint


def _cancel(job: JobState, why: str) -> list[Effect]:
    cancelled = job.records(job.pending_switch.cancel())
    return [*cancelled, LogMessage(f"{job.title} stays {job.mode.latest}, {why}")]


def _check_cancel(job: JobState, settings: JobSettings) -> None:
    """Raises NotReady unless the request is for what the job has. If one member of a replica group learned that the
    switch is cancelled, and began the next step, while another publishes, they would take part in different
    collectives."""
    asked, latest = settings.consistency, job.mode.latest
    if (asked.mode, asked.bound) != (latest.mode, latest.bound):
        raise _switches_already(job)
    if job.replicas is not None and job.pending_switch.step is not None:
        raise errors.NotReady(
            f"job {job.settings.name!r} is switching to {job.pending_switch.wanted}, and its step is fixed",
            why="its workers give the servers their state now",
            todo="wait until it has switched, and switch it back; or stop it (`shardyard stop`)",
        )


def _switches_already(job: JobState) -> errors.NotReady:
    return errors.NotReady(
        f"job {job.settings.name!r} is switching to {job.pending_switch.wanted}",
        why="one switch at a time",
        todo=f"see `shardyard status`; or cancel it: shardyard set {_present(job)}",
    )


def _present(job: JobState) -> str:
    """The setting that the switch under way changes, as the job has it."""
    wanted, latest = job.pending_switch.wanted, job.mode.latest
    if wanted is not None and wanted.strategy is not latest.strategy:
        return f"{STRATEGY_SETTING}={job.settings.strategy.value}"
    return f"{SETTING}={latest.mode.value}"


def _ask_switch(job: JobState, settings: JobSettings) -> list[Effect]:
    """Asks for a switch by way of a checkpoint. Raises InvalidRequest, NotReady, ConfigurationError, TooLarge."""
    strategy = None if settings.strategy is job.settings.strategy else settings.strategy
    wanted, before = job.mode.next_switch(settings, strategy), job.pending_switch.wanted
    if before is not None:
        if before == wanted:
            return [Reply(SwitchTaken(job.id, job.settings.name, before, first=False))]
        raise _switches_already(job)
    to_steps = strategy is None and _updates(settings) is UpdateMode.SYNC
    _check_switch(job, settings, settings.consistency.mode.value if strategy is None else strategy.value, to_steps)
    message = LogMessage(f"{job.title} will switch to {wanted}, as requested, once its workers report how far they are")
    asked = job.records(job.pending_switch.ask(wanted, to_steps=to_steps))
    return [*asked, message, Reply(SwitchTaken(job.id, job.settings.name, wanted, first=True))]


def _check_switch(job: JobState, settings: JobSettings, wanted: str, to_steps: bool) -> None:
    """`wanted`: the other mode or strategy. Raises InvalidRequest, NotReady, ConfigurationError."""
    layout = job.deployment.layout
    if job.phase is not JobPhase.RUNNING or layout is None or not len(job.feeds):
        raise errors.NotReady(
            f"{job.title} has not begun job.batches",
            why="only work of job.batches has names that the other mode knows, too",
            todo="switch it while it runs through job.batches",
        )
    refusals = {
        "keeps logs (job.durability wal)": job.settings.durability is Durability.WAL,
        "has no checkpoints (job.checkpoint.url)": job.book.url is None,
        "has residuals of compression (error feedback)": job.has_error_feedback,
        "is stopping": job.stopping.stop is not None,
        # a script with a loop for each epoch may be between two loops
        "has gone through its data": not to_steps and job.feeds.finished,
        "takes steps outside of job.batches": to_steps and any(job.progress.of(each).pushed for each in job.workers),
    }
    found = next((what for what, refused in refusals.items() if refused), None)
    if found is not None:
        raise errors.InvalidRequest(
            f"{job.title} {found}, and cannot switch to {wanted} while it runs",
            why="the switch goes through a checkpoint, which must contain all work that has counted",
            todo=f"stop it, and start a {wanted} job with its model (`shardyard checkpoint export`)",
        )
    if settings.strategy.uses_groups:
        _check_replicas(job, settings)
    table_specs.check_settings(layout.tables, settings)
    if isinstance(job.feeds, DataLedger):
        ledger_conversion.check(new_step_ledger(settings), job.feeds)


def _check_replicas(job: JobState, settings: JobSettings) -> None:
    """Raises InvalidRequest if the job's variables cannot be in its workers."""
    found = next((each for each in map(job.needs_servers, job.workers) if each), "")
    if job.has_tables and settings.clip.norm:
        found = "embedding tables with job.clip.norm"
    if found:
        raise errors.InvalidRequest(
            f"{job.title} has {found}, and cannot switch to {settings.strategy.value}",
            why="that needs variables on the servers",
            todo="leave it as it is",
        )


def _switch_partitions(job: JobState, now_ms: int) -> list[Effect]:
    """Puts the job into the other mode or strategy once a checkpoint has everything that was counted before the fixed
    step. From this record on the switch holds, whichever process dies."""
    step, wanted, committed = job.pending_switch.step, job.pending_switch.wanted, job.book.committed
    if step is None or wanted is None or _has_switched(job) or not _may_switch(job):
        return []
    if committed is None or not _has_all(job, committed, step):
        if job.progress.step >= step:
            job.book.want()
        return []
    assert job.deployment.map is not None
    generation = job.deployment.map.generation
    record: Entry = (
        "job_switched",
        {"step": step, "left": generation, "number": wanted.number, **consistency_body(wanted)},
    )
    message = f"{job.title} is {wanted} from step {step:,} on: partitions continue from checkpoint {committed.number}"
    begun: Sequence[tuple[DataShardSource, int]] = ()
    if wanted.strategy is not job.mode.latest.strategy:
        _take_strategy(job, wanted, generation, step, now_ms)
    elif isinstance(job.feeds, StepLedger):
        begun = _lease_data(job, wanted, generation, step)
    else:
        try:
            _take_steps(job, wanted, generation, step, now_ms)
        except errors.InvalidRequest as error:  # a data set was opened meanwhile
            return _cancel(job, f"because {error.what}")
    restored = _restore_all(job, begun, step if job.pending_switch.to_steps else 0, now_ms)
    given = [] if job.ranks is None else job.ranks.assign_vacant(now_ms)
    return [*job.records([record, *restored, *(each.entry for each in given)]), LogMessage(message)]


def _has_all(job: JobState, committed: Committed, step: int) -> bool:
    """Whether a checkpoint has what was counted before that step, and nothing else."""
    if committed.url:
        return False
    to_steps, ticket = job.pending_switch.to_steps, job.pending_switch.ticket
    return committed.draft >= ticket if to_steps else committed.step == step


def _may_switch(job: JobState) -> bool:
    running = job.phase is JobPhase.RUNNING and job.is_whole and not job.roster.fencing
    return running and not job.book.is_writing and job.stopping.stop is None


def _lease_data(
    job: JobState, consistency: Consistency, generation: Generation, step: int
) -> list[tuple[DataShardSource, int]]:
    """Deals data shards from now on, in a job that was synchronous. `generation`: of its last map. `step`: the step
    before which it stands. Returns the data shards that are partly counted, each with the number of its batches that
    are."""
    assert isinstance(job.feeds, StepLedger)
    _set_mode(job, consistency, generation)
    feeds = new_data_ledger(job.settings, job.tokens)
    begun = ledger_conversion.take_over_steps(feeds, job.feeds, step)
    job.deal_by(feeds, None, step)
    return begun


def _take_steps(job: JobState, consistency: Consistency, generation: Generation, step: int, now_ms: int) -> None:
    """Deals steps from now on, in a job that was asynchronous. `generation`: of its last map. `step`: the first one.
    Raises InvalidRequest, having changed nothing."""
    assert isinstance(job.feeds, DataLedger)
    steps = new_step_ledger(settings_of(job.settings, consistency))
    ledger_conversion.take_over_data(steps, job.feeds, step)
    _set_mode(job, consistency, generation)
    job.deal_by(steps, _unowned_ranks(job, now_ms), step)


def _take_strategy(job: JobState, consistency: Consistency, generation: Generation, step: int, now_ms: int) -> None:
    """Takes steps under another strategy from now on. `generation`: of the job's last map. `step`: the first one. The
    tokens of leased ranks and of replica groups are in one ascending order (rule D6)."""
    if job.replicas is not None:
        job.tokens.seen(Token(job.replicas.group.generation))
    _set_mode(job, consistency, generation)
    job.replicas = new_replicas(job.settings)
    if job.replicas is not None:
        job.replicas.begin_after(job.tokens.latest, step)
    job.ranks = _unowned_ranks(job, now_ms)


def _unowned_ranks(job: JobState, now_ms: int) -> RankBook:
    ranks = new_ranks(job.settings, job.tokens, now_ms)
    for worker in job.workers:
        ranks.enter(worker)
    return ranks


def _restore_all(job: JobState, begun: Sequence[tuple[DataShardSource, int]], step: int, now_ms: int) -> list[Entry]:
    """Restores all partitions from the newest checkpoint in the job's new mode. Nothing is computed again. `begun`:
    data shards of which the checkpoint has batches as steps. `step`: the first step of a job that had none, otherwise
    0."""
    taken, layout, feeds = job.book.committed, job.deployment.layout, job.feeds
    assert taken is not None
    assert layout is not None
    listed = [[source.feed, source.epoch, source.index, batch] for source, batch in begun]
    ledger: dict[str, object] = {
        "entries": [[kind, body] for kind, body in checkpoint_copy.entries_for_copy(feeds)],
        "closed": feeds.closed,
        "token": job.tokens.latest,
        "begun": listed,
    }
    job.book.want()  # the newest one is from the former mode
    if step:
        ledger, taken = {**ledger, "step": step}, replace(taken, step=step)
    committed = job.book.go_back(replace(taken, data_ledger=ledger))
    return [committed, job.recovery.lose([part.partition for part in layout.partitions], now_ms)]


def _set_mode(job: JobState, consistency: Consistency, generation: Generation) -> None:
    assert job.book.committed is not None
    job.mode.switch_partitions(consistency, generation, job.book.committed.number)
    job.apply_mode()


def end_pacing(job: JobState, generation: Generation, number: int) -> list[Effect]:
    """The servers of that map follow the switch of that number."""
    if job.phase.ended or not job.mode.end(generation, number):
        return []
    return [LogMessage(f"{job.title}: all servers follow {job.mode.latest}; its workers follow from their next step")]


def _pace(job: JobState, now_ms: int) -> list[Effect]:
    """Tells servers the latest switch, if some may not know it."""
    map_ = job.deployment.map
    if map_ is None or not job.is_whole or not job.mode.begin(map_.generation, now_ms):
        return []
    if job.ranks is not None:  # servers were told when they got their partitions, and steps have no pace
        return end_pacing(job, map_.generation, job.mode.latest.number)
    return [PaceServers(job.id, map_, job.mode.latest)]


# ---- records


def restore(job: JobState, body: Body, now_ms: int) -> None:
    """Applies the record `job_switched`. Raises DamagedRecord."""
    whole = job.deployment.map is not None and job.book.committed is not None
    require(whole, "a job switches, and has no checkpoint to continue from")
    consistency = consistency_of(body, body.number("number", least=job.mode.latest.number + 1))
    is_strategy = consistency.strategy is not job.mode.latest.strategy
    crosses = consistency.mode.updates is not job.updates
    require(crosses is not is_strategy, f"a job switches to {consistency}")
    left = Generation(body.number("left", least=1))
    require(left == job.deployment.generation, f"partitions of generation {left} are left")
    step = body.number("step", most=limits.SEQUENCE_MAX)
    if is_strategy:
        require(job.ranks is not None, f"an asynchronous job switches to {consistency}")
        _take_strategy(job, consistency, left, step, now_ms)
        return
    if isinstance(job.feeds, StepLedger):
        _lease_data(job, consistency, left, step)
        return
    is_whole = consistency.mode is ConsistencyMode.SYNC and job.feeds.is_drained
    require(is_whole, f"a job switches to {consistency} before its data shards are done")
    try:
        _take_steps(job, consistency, left, step, now_ms)
    except errors.InvalidRequest as error:
        raise DamagedRecord(error.what) from error
