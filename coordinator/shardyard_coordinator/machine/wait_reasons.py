"""What each job of the yard waits for, as far as the coordinator decides it (promise 7: never a mystery hang).

Owns: since when each job waits for what, and when that was logged. Invariant: reading a job changes nothing. Must not
know: waits of threads (the service's wait registry has them), waits of workers and servers (they report these
themselves), the clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from shardyard.domain import limits
from shardyard.domain.ids import JobId
from shardyard_coordinator.core.effects import JobPhase, LogMessage
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows.mode_switch import unfinished_shards
from shardyard_coordinator.placement.deployment import Deployment, Stage

NAMED_MAX = 8
"""So many partitions, ranks, members are named; more are counted."""


@dataclass(slots=True)
class _CurrentWait:
    job: str
    text: str
    since_ms: int
    told_ms: int


class WaitReasons:
    """The waits of all jobs. `look` must be called now and then."""

    def __init__(self) -> None:
        self._waits: dict[tuple[JobId, str], _CurrentWait] = {}

    def look(self, jobs: Iterable[JobState], now_ms: int) -> list[LogMessage]:
        """Notes what each job waits for now. Returns log messages: for each wait that has lasted for
        limits.EXPLAIN_WAIT_MS, again after each such time, and for its end."""
        messages: list[LogMessage] = []
        found: dict[tuple[JobId, str], _CurrentWait] = {}
        for job in jobs:
            for kind, text in _waits(job):
                wait = self._waits.pop((job.id, kind), None) or _CurrentWait(job.title, text, now_ms, now_ms)
                found[job.id, kind], wait.text = wait, text
                if now_ms - wait.told_ms >= limits.EXPLAIN_WAIT_MS:
                    wait.told_ms = now_ms
                    messages.append(LogMessage(f"{wait.job} waits for {_lasting(wait, now_ms)} so far", warning=True))
        ended = [
            LogMessage(f"{wait.job} has waited for {_lasting(wait, now_ms)}: the wait is over")
            for wait in self._waits.values()
            if wait.told_ms > wait.since_ms
        ]
        self._waits = found
        return [*ended, *messages]

    def of(self, job: JobId, now_ms: int) -> tuple[str, ...]:
        """What the job has waited for longer than limits.SHOW_WAIT_MS, the longest wait first."""
        lasting = [
            wait
            for (waiting, _), wait in self._waits.items()
            if waiting == job and now_ms - wait.since_ms >= limits.SHOW_WAIT_MS
        ]
        return tuple(_lasting(wait, now_ms) for wait in sorted(lasting, key=lambda wait: wait.since_ms))


def _lasting(wait: _CurrentWait, now_ms: int) -> str:
    return f"{wait.text}, for {(now_ms - wait.since_ms) / 1000:.1f} s"


def _waits(job: JobState) -> Iterator[tuple[str, str]]:
    """Each wait of a job: its kind, and what it waits for."""
    if job.phase.ended:
        return
    idle_s = job.settings.idle_ms / 1000
    if job.phase is JobPhase.FINISHING:
        yield (
            "last",
            f"its last checkpoint{job.last_checkpoint.failed_attempt}; it ends without after {idle_s:g} s",
        )
    elif not job.workers:
        yield "worker", f"a worker; it is ended {idle_s:g} s after its last one has gone"
    if job.roster.fencing:
        yield "fence", f"servers to refuse worker {_named(job.roster.fencing)}, before others have their work"
    if job.recovery.needed:
        yield "recovery", _recovery(job)
    elif job.deployment.stage is not Stage.OPEN and job.workers and not job.missing:
        yield "deployment", _deployment(job.deployment)
    if job.missing and not job.recovery.needed:
        yield "servers", f"{job.missing}, before its partitions are placed"
    if job.departing:
        yield "departure", job.departing
    unheard = job.stopping.missing(job.workers)
    if unheard:
        yield "stop", f"worker {_named(unheard)} to learn that the job stops"
    late = job.pending_switch.missing(job.workers)
    if late:
        yield (
            "switch",
            f"worker {_named(late)} to report how far it is, before the switch to {job.pending_switch.wanted}",
        )
    undone = unfinished_shards(job)
    if undone:
        yield "unfinished", f"{undone} to be done, before the switch to {job.pending_switch.wanted}"
    if job.ranks is not None and job.workers:
        vacant = [rank for rank in job.ranks.all if job.ranks.owner(rank) is None]
        if vacant:
            grace_s = job.settings.rank_grace_ms / 1000
            yield "ranks", f"a worker for logical rank {_named(vacant)}; the living take it after {grace_s:g} s"


def _recovery(job: JobState) -> str:
    recovery = job.recovery
    attempt = recovery.attempt
    if attempt is None and job.missing:
        return f"{job.missing}, before partition {_named(recovery.lost)} is restored"
    if attempt is None:
        return recovery.waits_for or f"a server for partition {_named(recovery.lost)}"
    servers = {owner.server for owner in attempt.map.owners if owner.partition in attempt.partitions}
    return f"partition {_named(attempt.partitions)} to be restored on server {_named(servers)}"


def _deployment(deployed: Deployment) -> str:
    servers = _named([server.incarnation for server in deployed.servers])
    match deployed.stage:
        case Stage.EMPTY:
            return "a worker to register its variables"
        case Stage.UNCREATED | Stage.CREATING:
            return f"server {servers} to take its partitions"
        case Stage.CREATED if deployed.initializer is None:
            return "a worker that gives first values"
        case Stage.CREATED:
            return f"worker {deployed.initializer} to give first values"
        case _:
            return f"server {servers} to open its partitions"


def _named(numbers: Collection[int]) -> str:
    found = sorted(numbers)
    rest = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    return ", ".join(map(str, found[:NAMED_MAX])) + rest
