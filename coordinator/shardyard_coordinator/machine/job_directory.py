"""The jobs of a yard: starts, finds and forgets them, and keeps the restores ordered for their next runs.

Invariants: job numbers only grow. Of the ended jobs, the latest JOBS_ENDED_MAX are kept. An order is forgotten when a
run has begun with it. Must not know: members, what happens in a job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from shardyard.config.configuration import parse_job_settings
from shardyard.config.settings import JobSettings
from shardyard.domain import errors, limits
from shardyard.domain.ids import Incarnation, JobId, RunName, Term
from shardyard_coordinator.core import events
from shardyard_coordinator.core.effects import DropJob, Effect, LogMessage, Persist, Reply, RestorePlanned
from shardyard_coordinator.core.job_state import JobState, new_job
from shardyard_coordinator.flows import checkpointing, recovery
from shardyard_coordinator.members.membership import TERM_BITS
from shardyard_coordinator.records import Body, DamagedRecord, require
from shardyard_coordinator.storage import restore_point
from shardyard_coordinator.storage.restore_point import RestorePoint

JOBS_ENDED_MAX: Final = 32
"""Ended jobs that `status` still shows."""


class JobDirectory:
    """`checkpoints`: the URL for jobs that leave the place of their checkpoints to the coordinator; None: these have
    none."""

    def __init__(self, term: Term, checkpoints: str | None) -> None:
        self._checkpoints = checkpoints
        self._jobs: dict[JobId, JobState] = {}
        self._origins: dict[tuple[str, str], RestorePoint] = {}
        """By owner and name of the job."""
        self._next_job = (term << TERM_BITS) + 1

    def __iter__(self) -> Iterator[JobState]:
        """Unfinished jobs and the latest ended ones, in the order in which they began."""
        return iter([*self._jobs.values()])

    def get(self, number: JobId | None) -> JobState | None:
        return None if number is None else self._jobs.get(number)

    # ---- finding a job

    def unfinished(self, name: str) -> JobState | None:
        return next((job for job in self if job.settings.name == name and not job.phase.ended), None)

    def to_join(self, name: str, run: RunName | None) -> JobState | None:
        """The unfinished job of that name that a process of the run joins; None: it starts one. Raises RunFinished or
        the job's failure if the run's job has ended, NotReady while the launch's former run goes on."""
        unfinished = self.unfinished(name)
        if run is None:
            return unfinished
        known = [(job, number) for job in self if (number := job.runs.number_of(run.id)) and job.settings.name == name]
        for job, number in known:
            if number == run.number:
                job.require_in_run(run)
                return job
            if number > run.number:
                raise errors.RunFinished(f"run {run} of job {name!r} ended before run {number} of its launch began")
        if unfinished is not None and unfinished in [job for job, _ in known]:
            raise errors.NotReady(
                f"{unfinished.title} is the former run of this launch, and is not finished",
                why="other processes of the launch train it",
                todo="join when it is finished",
            )
        return unfinished

    def find(self, name: str) -> JobState:
        """The latest job of that name; if `name` is empty, the only unfinished job. Raises NotFound, InvalidRequest."""
        found = [job for job in self if (job.settings.name == name if name else not job.phase.ended)]
        names = ", ".join(sorted({repr(job.settings.name) for job in self if not job.phase.ended}))
        if not found:
            what = f"there is no job {name!r}" if name else "no job runs"
            todo = "`shardyard status` lists the jobs"
            raise errors.NotFound(what, why=f"jobs that run: {names}" if names else "", todo=todo)
        if not name and len(found) > 1:
            raise errors.InvalidRequest(f"{len(found)} jobs run: {names}", why="", todo="say which")
        return found[-1]

    def find_for_reader(self, heard: events.ReaderHeard) -> JobState:
        """The job by its number, even if it has ended; or the unfinished job by its name. Raises NotFound,
        InvalidRequest."""
        if heard.job is not None:
            return self.require(heard.job)
        found = self.find(heard.job_name)
        if found.phase.ended:
            raise errors.NotFound(f"{found.title} has ended", why="", todo="wait for its next run")
        return found

    def require(self, number: JobId) -> JobState:
        """Raises NotFound."""
        job = self._jobs.get(number)
        if job is None:
            raise errors.NotFound(f"job {number} is unknown to this coordinator", todo="see `shardyard status`")
        return job

    # ---- servers

    def note_server(self, event: events.HeartbeatReceived) -> None:
        """Notes how large a server's logs are, and how many rows it has of each table."""
        for number, nbytes in event.logs:
            writing = self.get(number)
            if writing is not None:
                checkpointing.note_log_bytes(writing, nbytes)
        for number, rows in event.rows:
            having = self.get(number)
            layout = None if having is None else having.deployment.layout
            if having is not None and layout is not None and len(rows) == len(layout.tables):
                having.rows_seen[event.incarnation] = rows

    def uses(self, server: Incarnation) -> bool:
        """Whether an unfinished job has, or is about to have, a partition there."""
        return any(recovery.owned_by(job, server) for job in self if not job.phase.ended)

    def fenced_on(self, server: Incarnation) -> tuple[Incarnation, ...]:
        """The workers that the server must refuse, over all its jobs. Each heartbeat names them again, because a Fence
        may not have reached the server."""
        return tuple(
            worker
            for job in self
            if not job.phase.ended and server in job.deployment.owners
            for worker in job.roster.fenced
        )

    # ---- starting and forgetting jobs

    def start(self, settings: JobSettings, by: str, now_ms: int, owner: str = "") -> tuple[JobState, list[Effect]]:
        """`by`: the worker that starts it, and whose it is. Raises TooLarge, ConfigurationError."""
        unfinished = sum(not job.phase.ended for job in self)
        if unfinished >= limits.JOBS_MAX:
            raise errors.TooLarge(f"{unfinished} jobs are unfinished; at most {limits.JOBS_MAX} are taken")
        origin = self._ordered_for(owner, settings.name)
        if origin is not None:
            settings = origin.agree(settings)
            # a number that members of a former run do not know, in case this coordinator knows nothing of that run
            self._next_job = max(self._next_job, origin.job + 1)
        job = self._add(JobId(self._next_job), settings, now_ms)
        job.owner = owner
        record = Persist("job_started", {"job": job.id, "settings": settings.model_dump(mode="json"), "owner": owner})
        resumed = [] if origin is None else recovery.begin_with(job, origin)
        return job, [record, *resumed, LogMessage(f"{job.title} was started by {by}")]

    def forget_old(self) -> list[Effect]:
        ended = [job for job in self if job.phase.ended]
        forgotten = ended[: max(0, len(ended) - JOBS_ENDED_MAX)]
        for job in forgotten:
            del self._jobs[job.id]
        return [
            *(Persist("job_forgotten", {"job": job.id}) for job in forgotten),
            *(DropJob(job.id, server) for job in forgotten for server in job.readers.release()),
        ]

    def _add(self, number: JobId, settings: JobSettings, now_ms: int) -> JobState:
        self._jobs[number] = job = new_job(number, settings, now_ms, self._checkpoints)
        self._next_job = max(self._next_job, number + 1)
        return job

    # ---- orders to restore

    def order_restore(self, origin: RestorePoint, now_ms: int) -> list[Effect]:
        """A running job goes back now. Otherwise the next run of that name begins with the checkpoint."""
        running = self.unfinished(origin.name)
        if running is not None and origin.owner in ("", running.owner):
            return [*recovery.go_back(running, origin, now_ms), Reply(RestorePlanned(running=True))]
        self._origins[origin.owner, origin.name] = origin
        message = f"the next run of job {origin.name!r} begins with {origin}, in {origin.url}"
        return [Persist(*origin.entry), LogMessage(message), Reply(RestorePlanned(running=False))]

    def cancel_restore(self, name: str, owner: str) -> list[Effect]:
        """`owner`: whose orders are cancelled; empty: everybody's."""
        running = self.unfinished(name)
        if running is not None and running.origin is not None:
            raise errors.NotReady(f"job {name!r} begins with a checkpoint at this moment")
        ordered = [each for each in self._origins if each[1] == name and owner in ("", each[0])]
        if not ordered:
            raise errors.NotFound(f"no restore was ordered for the next run of job {name!r}", todo="")
        return [*(self._forget_order(*each) for each in ordered), Reply(RestorePlanned(running=False))]

    def forget_order(self, job: JobState, began_with: RestorePoint | None) -> list[Effect]:
        """Forgets the order to begin with that checkpoint if the job has begun and no longer needs it."""
        if began_with is None or job.origin is not None:
            return []
        return [self._forget_order(began_with.owner, job.settings.name)]

    def _ordered_for(self, owner: str, name: str) -> RestorePoint | None:
        return self._origins.get((owner, name)) or self._origins.get(("", name))

    def _forget_order(self, owner: str, name: str) -> Persist:
        del self._origins[owner, name]
        return Persist("restore_forgotten", {"name": name, "owner": owner})

    # ---- records

    def order_entries(self) -> list[Persist]:
        return [Persist(*origin.entry) for origin in self._origins.values()]

    def restore(self, kind: str, body: Body, now_ms: int) -> None:
        """Applies a record of a job's start or end in this directory, or of an order. Raises DamagedRecord."""
        match kind:
            case "job_started":
                number = JobId(body.number("job", least=1))
                require(number not in self._jobs, f"job {number} is started twice")
                job = self._add(number, _settings_of(body), now_ms)
                job.owner = body.text("owner")
                job.readers.forget(now_ms)
            case "restore_ordered":
                origin = restore_point.of_record(body)
                self._origins[origin.owner, origin.name] = origin
            case "restore_forgotten":
                ordered = body.text("owner"), body.text("name")
                require(self._origins.pop(ordered, None) is not None, "nothing was ordered")
            case "job_resumed":
                job = self.restored(body)
                job.origin = self._ordered_for(job.owner, job.settings.name)
                require(job.origin is not None, "a job resumes that was not told to")
            case _:
                del self._jobs[self.restored(body).id]

    def restored(self, body: Body) -> JobState:
        """The job that a record names. Raises DamagedRecord."""
        number = JobId(body.number("job"))
        require(number in self._jobs, f"job {number} is unknown")
        return self._jobs[number]


def _settings_of(body: Body) -> JobSettings:
    try:
        return parse_job_settings(json.dumps(body.values("settings"), ensure_ascii=False, separators=(",", ":")))
    except errors.ConfigurationError as error:
        raise DamagedRecord(error.what) from error
