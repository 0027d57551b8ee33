"""Replica groups of a mirrored job, and when its replicas give the servers their state.

`work.replica_book` has the groups. Invariants: a group is recorded before a worker learns of it; a checkpoint of a
mirrored job is begun when the servers have the state of a step that all replicas have taken (docs/internals/ledger.md,
rule D4), and not before its workers have published since it became due. Must not know: what a replica is, how servers
are called.
"""

from __future__ import annotations

from shardyard.domain.errors import InvalidRequest, NotReady, StaleGeneration, WorkerFailed
from shardyard.domain.ids import Incarnation
from shardyard_coordinator.core.effects import Effect, LogMessage, PublishedAnswer, ReplicaGroupAnswer, Reply
from shardyard_coordinator.core.events import ReplicaGroupAsked, ReplicasPublished
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import job_end, recovery
from shardyard_coordinator.placement.deployment import Stage
from shardyard_coordinator.work.replica_book import ReplicaBook


def ask(job: JobState, asked: ReplicaGroupAsked, host: str, now_ms: int) -> list[Effect]:
    """A worker on this machine waits for the next group. Raises InvalidRequest, NotReady."""
    if job.replicas is None and job.mode.has_switched_partitions:
        return [Reply(ReplicaGroupAnswer(None, f"{job.title} to have its partitions in mode {job.mode.latest}"))]
    book, worker = book_of(job), asked.caller.incarnation
    if job.deployment.stage is not Stage.OPEN:
        raise NotReady(f"{job.title} has no variables on the servers yet", todo="call job.prepare first")
    book.ask(worker, asked.left, asked.step, now_ms, host)
    effects: list[Effect] = []
    is_over = _is_over(job, book)
    if book.has_lost_all(job.workers) and not is_over and not job.recovery.needed:
        effects += _go_back(job, now_ms)
    formed = book.form(job.workers, now_ms, is_over=is_over)
    if formed is not None:
        if job.has_tables:
            book.go_on()
        places = ", ".join(map(str, formed.members))
        begins = "from the servers' state" if formed.donor is None else f"at step {formed.step:,}"
        effects += job.records([book.entry])
        effects.append(LogMessage(f"{job.title}: replica group {formed.generation} of workers {places} {begins}"))
    group = book.group_of(worker)
    return [*effects, Reply(ReplicaGroupAnswer(group, "" if group is not None else book.waits_for(job.workers)))]


def _is_over(job: JobState, book: ReplicaBook) -> bool:
    """Whether workers that are gone have taken all steps, and the servers have the state after the last one. With
    tables they may have the rows of the last step without the variables, so they go back to the newest checkpoint
    first."""
    if not job.roster.goodbyes or any(each in job.workers for each in book.group.members):
        return False
    if job.has_tables and book.has_lost_all(job.workers):
        return False
    return job.feeds.finished or job.stopping.is_over(book.published)


def _go_back(job: JobState, now_ms: int) -> list[Effect]:
    try:
        return recovery.lose_replicas(job, now_ms)
    except WorkerFailed as error:
        return job_end.fail(job, error)


def published(job: JobState, said: ReplicasPublished, now_ms: int) -> list[Effect]:
    """All servers have the replicas' state of that step. In a job with tables the members take no step before the
    partitions are cut for the checkpoint that wants it, since its rows change with the next step. Raises
    InvalidRequest, StaleGeneration."""
    book = book_of(job)
    if not book.has_replicas:
        raise InvalidRequest(f"{job.title} has its variables on the servers: its workers publish nothing")
    check_member(book, said.caller.incarnation, said.generation)
    job.progress.reach(said.step)
    records: list[Effect] = []
    if said.step != book.published or book.is_to_publish:
        book.publish(said.step, now_ms)
        records = job.records([book.published_entry])
    draft = job.book.draft
    waits = book.is_for_checkpoint(now_ms) or (draft is not None and draft.step == said.step)
    if job.has_tables and not waits:
        book.go_on()
    return [*records, Reply(PublishedAnswer(waits and job.has_tables))]


def check_member(book: ReplicaBook, worker: Incarnation, generation: int) -> None:
    """Raises StaleGeneration unless this is the newest group, and the worker is in it."""
    if generation != book.group.generation or worker not in book.group.members or book.group.is_void:
        raise StaleGeneration(
            f"worker {worker} speaks for replica group {generation}; the newest is {book.group.generation}",
            why="the coordinator has formed another group since, without this worker or with it",
            todo="ask for the next group; workers do so by themselves",
        )


def book_of(job: JobState) -> ReplicaBook:
    """Raises InvalidRequest, and StaleGeneration for members of the groups that the job had."""
    if job.replicas is not None:
        return job.replicas
    what = f"{job.title} has no replica groups: its job.strategy is {job.settings.strategy.value}"
    raise (StaleGeneration if job.mode.has_switched_partitions else InvalidRequest)(what)
