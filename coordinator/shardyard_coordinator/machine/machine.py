"""The whole coordinator as a state machine: members, and the jobs that they work on.

Owns: all state of a yard that is decided in one place. `handle` is its only mutator; an event that is refused raises a
typed error and has changed nothing. Invariants: a request counts only if it comes from a living incarnation, and about
the job that this member is in; a member's end reaches its job in the same step; records come before all other effects;
the records of all effects, in order, and those of `snapshot` make the same machine (but for records.NOT_RECORDED).
Must not know: the clock (`now_ms` is an argument), threads, messages, the network, the disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, Self, TypeVar

from shardyard.config.configuration import parse_job_settings
from shardyard.config.settings import JobSettings
from shardyard.domain import errors, limits
from shardyard.domain.ids import Caller, Incarnation, JobId, MemberRole, Term
from shardyard_coordinator.core import events
from shardyard_coordinator.core.effects import (
    Acknowledged,
    Effect,
    ForgetServer,
    HeartbeatReply,
    Joined,
    LogMessage,
    NotFiniteVerdict,
    Persist,
    Rebased,
    Registered,
    Reply,
    RestorePlanned,
)
from shardyard_coordinator.machine.job import Job
from shardyard_coordinator.machine.wait_reasons import WaitReasons
from shardyard_coordinator.members import membership
from shardyard_coordinator.members.membership import TERM_BITS, Member, Membership
from shardyard_coordinator.members.nonfinite import QUARANTINED
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.records import Body, DamagedRecord, Record, require
from shardyard_coordinator.storage import restore_point
from shardyard_coordinator.storage.restore_point import RestorePoint

JOBS_ENDED_MAX: Final = 32
"""Ended jobs that `status` still shows."""


class Machine:
    """`checkpoints`: the URL of checkpoints of jobs that leave it to the coordinator; None: they have none."""

    def __init__(self, *, term: Term, lease_ms: int, now_ms: int, checkpoints: str | None = None) -> None:
        self._checkpoints = checkpoints
        self._lease_ms = lease_ms
        self._members = Membership(term=term, lease_ms=lease_ms)
        self._jobs: dict[JobId, Job] = {}
        self._origins: dict[str, RestorePoint] = {}
        self._next_job = (term << TERM_BITS) + 1
        self._ticked_ms = now_ms
        self._begun_ms = now_ms
        self.waits = WaitReasons()
        self.term = term

    @classmethod
    def restore(
        cls, records: Iterable[Record], *, term: Term, lease_ms: int, now_ms: int, checkpoints: str | None = None
    ) -> Self:
        """The machine that wrote the records, in a new term: every lease counts as just renewed (rule C4), and calls
        to servers that were under way are due again; see `resume`. Raises ConfigurationError for a record that cannot
        be read or does not fit those before it."""
        machine = cls(term=term, lease_ms=lease_ms, now_ms=now_ms, checkpoints=checkpoints)
        for record in records:
            try:
                machine._restore(record.kind, Body(record.body), now_ms)
            except DamagedRecord as error:
                raise errors.ConfigurationError(
                    f"record {record.number} ({record.kind!r}) cannot be taken: {error}",
                    why="a machine from half of its records would decide against what was decided",
                    todo="start the release that wrote it, or move the journal away: its jobs are lost then",
                    facts={"record": str(record.number)},
                ) from error
        return machine

    def snapshot(self) -> list[Persist]:
        """The shortest list of records that makes this machine."""
        found = [Persist(*entry) for entry in self._members.entries(self._jobs)]
        found += [Persist(*origin.entry) for origin in self._origins.values()]
        for number, job in self._jobs.items():
            found += [Persist(kind, {"job": number, **body}) for kind, body in job.entries()]
        return found

    def resume(self) -> list[Effect]:
        """After `restore`: effects of the former life that may not have been carried out. The rest follows from
        requests and ticks."""
        servers = [member.incarnation for member in self._members.servers()]
        return [effect for job in self.jobs for effect in job.resume(servers)]

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._members)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Unfinished ones and the latest of those that ended, in the order of their beginning."""
        return tuple(self._jobs.values())

    def uptime_ms(self, now_ms: int) -> int:
        return now_ms - self._begun_ms

    def handle(self, event: events.Event, now_ms: int) -> list[Effect]:
        """Takes one event. Raises ShardyardError, without a change, for a request that is refused."""
        effects = [*_DISPATCH[type(event)](self, event, now_ms), *self._forget_old_jobs()]
        records = [effect for effect in effects if isinstance(effect, Persist)]
        return [*records, *(effect for effect in effects if not isinstance(effect, Persist))]

    # ---- members

    def _register(self, event: events.MemberRegistered, now_ms: int) -> list[Effect]:
        registration = event.registration
        self._members.check(registration)
        former = self._members.replaced_by(registration)
        effects: list[Effect] = []
        if former is not None:
            effects += self._lose(former, "was replaced by a new process at its address", now_ms)
        member = self._members.add(registration, now_ms)
        record = Persist(*membership.registered(member))
        return [*effects, record, LogMessage(f"{member.title} has registered"), Reply(Registered(member.incarnation))]

    def _heartbeat(self, event: events.HeartbeatReceived, now_ms: int) -> list[Effect]:
        member = self._members.require(event.incarnation)
        self._members.renew(member.incarnation, now_ms)
        member.waiting_for = event.report.waiting_for
        if member.role is MemberRole.SERVER:
            for number, nbytes in event.logs:
                writing = self._jobs.get(number)
                if writing is not None:
                    writing.keeping.note_log(nbytes)
            for number, rows in event.rows:
                having = self._jobs.get(number)
                if having is not None:
                    having.note_rows(member.incarnation, rows)
            return [Reply(HeartbeatReply(fenced=self._fenced_on(member.incarnation)))]
        job = self._jobs.get(member.job) if member.job is not None else None
        if job is None:
            return [Reply(HeartbeatReply())]
        job.report(member.incarnation, event.report, now_ms)
        stopped = job.hear_of_stop(member.incarnation, event.report.reached)
        halted = job.going_over.hear(member.incarnation, event.report.halted)
        gone_over = job.hear_of_switch(member.incarnation, event.report.switches)
        return [*stopped, *halted, *gone_over, Reply(job.standing(member.incarnation))]

    def _leave(self, event: events.MemberLeft, now_ms: int) -> list[Effect]:
        member = self._members.require(event.incarnation)
        job = self._jobs.get(member.job) if member.job is not None else None
        if member.role is not MemberRole.WORKER or job is None:
            return [*self._lose(member, "left", now_ms), Reply(Acknowledged())]
        how = f"left ({event.error})" if event.error else "left"
        effects = self._remove(member, how)
        return [*effects, *job.leave(event, now_ms), Reply(Acknowledged())]

    def _report_exit(self, event: events.ExitReported, now_ms: int) -> list[Effect]:
        agent = self._members.require(event.agent, MemberRole.AGENT)
        effects: list[Effect] = []
        for worker in self._members.started_by(agent, event.pid):
            ended = f"was ended by signal {-event.exit_code}" if event.exit_code < 0 else f"exited ({event.exit_code})"
            effects += self._lose(worker, f"{ended}, says agent {agent.incarnation}", now_ms)
        return [*effects, Reply(Acknowledged())]

    def _report_not_finite(self, said: events.NotFiniteReported, now_ms: int) -> list[Effect]:
        job = self._require_job(said.caller)
        effects = job.counting.report_not_finite(said)
        reply = effects[-1]
        assert isinstance(reply, Reply)
        assert isinstance(reply.answer, NotFiniteVerdict)
        failure = reply.answer.failure
        if not isinstance(failure, errors.WorkerQuarantined):
            return effects
        member = self._members.require(said.caller.incarnation, MemberRole.WORKER)
        how = f"{QUARANTINED}: {failure.what}"
        return [*effects, *self._remove(member, how), *job.lose(member.incarnation, how, now_ms, died=False)]

    def _end_rebase(self, event: events.LostPushesSkipped, _: int) -> list[Effect]:
        self._require_job(event.asked.caller)
        return [Reply(Rebased(event.lost))]

    def _tick(self, now_ms: int) -> list[Effect]:
        gap_ms = now_ms - self._ticked_ms
        self._ticked_ms = now_ms
        effects: list[Effect] = []
        if gap_ms > self._lease_ms // 2:
            # this process was stopped; nobody could renew a lease meanwhile
            self._members.forgive(gap_ms)
            effects.append(
                LogMessage(f"nothing was decided for {gap_ms / 1000:.1f} s; all leases are longer by that", True)
            )
        for member, how in self._members.expired(now_ms):
            effects += self._lose(member, how, now_ms)
        servers = self._servers()
        for job in self.jobs:
            effects += job.tick(now_ms, servers)
        return [*effects, *self.waits.look(self.jobs, now_ms)]

    def _lose(self, member: Member, how: str, now_ms: int) -> list[Effect]:
        """A member is gone without a word to its job."""
        effects = self._remove(member, how)
        if member.role is MemberRole.SERVER:
            for job in self.jobs:
                effects += job.lose_server(_server(member), how, now_ms)
            effects.append(ForgetServer(member.incarnation))
        job_of_worker = self._jobs.get(member.job) if member.job is not None else None
        if job_of_worker is not None:
            effects += job_of_worker.lose(member.incarnation, how, now_ms)
        return effects

    def _remove(self, member: Member, how: str) -> list[Effect]:
        self._members.remove(member.incarnation, how)
        return [
            Persist(*membership.removed(member, how)),
            LogMessage(f"{member.title} {how}", warning=how != "left"),
        ]

    def _servers(self) -> list[Server]:
        return [_server(member) for member in self._members.servers()]

    def _fenced_on(self, server: Incarnation) -> tuple[Incarnation, ...]:
        """Workers that the server must refuse, of all its jobs. Named again with each heartbeat, since a Fence may not
        have reached it."""
        return tuple(
            worker
            for job in self.jobs
            if not job.state.ended and any(each.incarnation == server for each in job.deployment.servers)
            for worker in job.attendance.fenced
        )

    # ---- jobs

    def _join(self, event: events.JobJoined, now_ms: int) -> list[Effect]:
        worker = self._members.require(event.incarnation, MemberRole.WORKER)
        if event.settings.name != event.name:
            raise errors.InvalidRequest(
                f"worker {worker.incarnation} joins job {event.name!r} with the settings of {event.settings.name!r}"
            )
        if worker.job is not None:
            return [Reply(self._joined(self._again(worker, event.name), worker, started=False))]
        found = [job for job in self.jobs if job.settings.name == event.name and not job.state.ended]
        if found:
            found[0].require_joinable()
            job, effects, started = found[0], [], False
        else:
            job, effects, started = *self._start(event.settings, worker, now_ms), True
        worker.job = job.id
        effects += job.join(worker.incarnation, now_ms)
        return [*effects, Reply(self._joined(job, worker, started=started))]

    def _again(self, worker: Member, name: str) -> Job:
        """The job of a worker that asks to join once more."""
        job = self._jobs.get(worker.job) if worker.job is not None else None
        if job is None or job.settings.name != name:
            there = "one that has ended" if job is None else repr(job.settings.name)
            raise errors.InvalidRequest(
                f"worker {worker.incarnation} joins job {name!r} and is in another one, {there}",
                todo="register again for another job",
            )
        job.require_unfinished()
        return job

    def _start(self, settings: JobSettings, worker: Member, now_ms: int) -> tuple[Job, list[Effect]]:
        unfinished = sum(not job.state.ended for job in self.jobs)
        if unfinished >= limits.JOBS_MAX:
            raise errors.TooLarge(f"{unfinished} jobs are unfinished; at most {limits.JOBS_MAX} are taken")
        origin = self._origins.get(settings.name)
        if origin is not None:
            settings = origin.agree(settings)
            # no number that anybody of the former run knows, should this coordinator know nothing of that
            self._next_job = max(self._next_job, origin.job + 1)
        job = self._add_job(JobId(self._next_job), settings, now_ms)
        record = Persist("job_started", {"job": job.id, "settings": settings.model_dump(mode="json")})
        resumed = [] if origin is None else job.begin_with(origin)
        return job, [record, *resumed, LogMessage(f"{job.title} was started by {worker.title}")]

    def _add_job(self, number: JobId, settings: JobSettings, now_ms: int) -> Job:
        self._jobs[number] = job = Job(number, settings, now_ms, self._checkpoints)
        self._next_job = max(self._next_job, number + 1)
        return job

    def _order_restore(self, origin: RestorePoint, now_ms: int) -> list[Effect]:
        running = [job for job in self.jobs if job.settings.name == origin.name and not job.state.ended]
        if running:
            return [*running[0].go_back(origin, now_ms), Reply(RestorePlanned(running=True))]
        self._origins[origin.name] = origin
        kind, body = origin.entry
        told = f"the next run of job {origin.name!r} begins with {origin}, in {origin.url}"
        return [Persist(kind, body), LogMessage(told), Reply(RestorePlanned(running=False))]

    def _cancel_restore(self, name: str) -> list[Effect]:
        if any(job.keeping.origin and job.settings.name == name and not job.state.ended for job in self.jobs):
            raise errors.NotReady(f"job {name!r} begins with a checkpoint at this moment")
        if self._origins.pop(name, None) is None:
            raise errors.NotFound(f"nothing was ordered for the next run of job {name!r}", todo="")
        return [Persist("restore_forgotten", {"name": name}), Reply(RestorePlanned(running=False))]

    def _end_checkpoint(self, event: events.CheckpointTaken, _: int) -> list[Effect]:
        job = self._jobs.get(event.job)
        if job is None:
            return []
        began_with = job.keeping.origin
        return [*job.end_checkpoint(event), *self._forget_order(job, began_with)]

    def _end_recovery(self, event: events.PartitionsRestored, now_ms: int) -> list[Effect]:
        job = self._jobs.get(event.job)
        if job is None:
            return []
        began_with = job.keeping.origin
        return [*job.end_recovery(event.generation, now_ms), *self._forget_order(job, began_with)]

    def _forget_order(self, job: Job, began_with: RestorePoint | None) -> list[Effect]:
        """The order to begin with that checkpoint, if the job has begun now, and needs it no more."""
        if began_with is None or job.keeping.origin is not None:
            return []
        del self._origins[job.settings.name]
        return [Persist("restore_forgotten", {"name": job.settings.name})]

    def _joined(self, job: Job, worker: Member, *, started: bool) -> Joined:
        return Joined(
            job=job.id,
            settings=job.settings,
            started=started,
            ranks=job.ranks_of(worker.incarnation),
            logical_ranks=0 if job.ranks is None else len(job.ranks.all),
            chief=job.attendance.chief == worker.incarnation,
            stop=job.stopping.stop,
            checkpoint=job.keeping.book.committed,
            consistency=job.consistency,
            halt=job.halting.halt,
        )

    def _asked(self, caller: Caller | None, job_name: str) -> Job:
        """The caller's job; without a caller, a person's, by its name."""
        return self._find_job(job_name) if caller is None else self._require_job(caller)

    def _require_job(self, caller: Caller) -> Job:
        """The unfinished job of a living worker that asks about it."""
        worker = self._members.require(caller.incarnation, MemberRole.WORKER)
        if worker.job is None or caller.job != worker.job:
            raise errors.NotFound(
                f"worker {worker.incarnation} asks about job {caller.job} and is in "
                + ("none" if worker.job is None else f"job {worker.job}"),
                todo="join the job first",
            )
        job = self._jobs.get(worker.job)
        if job is None:
            raise errors.NotFound(f"job {worker.job} ended long ago", todo="start the script again for a new run")
        job.require_unfinished()
        return job

    def _find_job(self, name: str) -> Job:
        """The latest job of that name, or the one unfinished job that there is. Raises NotFound, InvalidRequest."""
        found = [job for job in self.jobs if (job.settings.name == name if name else not job.state.ended)]
        names = ", ".join(sorted({repr(job.settings.name) for job in self.jobs if not job.state.ended})) or "no job"
        if not found:
            raise errors.NotFound(f"no job {name!r}" if name else "no job runs", why="", todo=f"running: {names}")
        if not name and len(found) > 1:
            raise errors.InvalidRequest(f"{len(found)} jobs run: {names}", why="", todo="say which")
        return found[-1]

    def _find_followed(self, heard: events.ReaderHeard) -> Job:
        """By its number, whatever became of it; by its name, if it has not ended. Raises NotFound, InvalidRequest."""
        if heard.job is not None:
            return self._find_by_number(heard.job)
        found = self._find_job(heard.job_name)
        if found.state.ended:
            raise errors.NotFound(f"{found.title} has ended", why="", todo="wait for its next run")
        return found

    def _find_by_number(self, number: JobId) -> Job:
        job = self._jobs.get(number)
        if job is None:
            raise errors.NotFound(f"job {number} is unknown to this coordinator", todo="see `shardyard status`")
        return job

    def _forget_old_jobs(self) -> list[Effect]:
        ended = [job.id for job in self.jobs if job.state.ended]
        forgotten = ended[: max(0, len(ended) - JOBS_ENDED_MAX)]
        drops = [drop for job in forgotten for drop in self._jobs[job].readers.drop()]
        for job in forgotten:
            del self._jobs[job]
        return [*(Persist("job_forgotten", {"job": job}) for job in forgotten), *drops]

    # ---- records

    def _restore(self, kind: str, body: Body, now_ms: int) -> None:
        match kind:
            case "member_registered" | "member_removed" | "member_former":
                self._members.restore(kind, body, now_ms)
            case "job_started":
                number = JobId(body.number("job", least=1))
                require(number not in self._jobs, f"job {number} is started twice")
                self._add_job(number, _settings_of(body), now_ms)
                self._jobs[number].readers.forget(now_ms)
            case "restore_ordered":
                origin = restore_point.of_record(body)
                self._origins[origin.name] = origin
            case "restore_forgotten":
                require(self._origins.pop(body.text("name"), None) is not None, "nothing was ordered")
            case "job_resumed":
                job = self._jobs[self._restored_job(body)]
                require(job.settings.name in self._origins, "a job resumes that was not told to")
                job.keeping.origin = self._origins[job.settings.name]
            case "job_forgotten":
                del self._jobs[self._restored_job(body)]
            case _:
                number = self._restored_job(body)
                self._jobs[number].restore(kind, body, now_ms)
                if kind == "worker_joined":
                    self._members.put_into(Incarnation(body.number("worker")), number)

    def _restored_job(self, body: Body) -> JobId:
        number = JobId(body.number("job"))
        require(number in self._jobs, f"job {number} is unknown")
        return number


def _settings_of(body: Body) -> JobSettings:
    try:
        return parse_job_settings(json.dumps(body.values("settings"), ensure_ascii=False, separators=(",", ":")))
    except errors.ConfigurationError as error:
        raise DamagedRecord(error.what) from error


def _server(member: Member) -> Server:
    return Server(member.incarnation, member.address, member.registration.logs)


# ---- dispatch: which function decides each type of event

Decide = Callable[[Machine, Any, int], list[Effect]]
E = TypeVar("E")


class _FromWorker(Protocol):
    @property
    def caller(self) -> Caller: ...


class _OfJob(Protocol):
    @property
    def job(self) -> JobId: ...


FromWorker = TypeVar("FromWorker", bound=_FromWorker)
OfJob = TypeVar("OfJob", bound=_OfJob)


def _on(event: type[E], decide: Callable[[Machine, E, int], list[Effect]]) -> tuple[type, Decide]:
    return event, decide


def _on_worker(event: type[FromWorker], decide: Callable[[Job, FromWorker, int], list[Effect]]) -> tuple[type, Decide]:
    """A living worker asks about its unfinished job."""
    return event, lambda machine, asked, now_ms: decide(machine._require_job(asked.caller), asked, now_ms)


def _on_effect(event: type[OfJob], decide: Callable[[Job, OfJob, int], list[Effect]]) -> tuple[type, Decide]:
    """An effect of a job has ended. Nothing happens if the job was forgotten."""

    def handle(machine: Machine, ended: OfJob, now_ms: int) -> list[Effect]:
        job = machine._jobs.get(ended.job)
        return [] if job is None else decide(job, ended, now_ms)

    return event, handle


_DISPATCH: Final[dict[type, Decide]] = dict(
    [
        # members
        _on(events.MemberRegistered, Machine._register),
        _on(events.HeartbeatReceived, Machine._heartbeat),
        _on(events.MemberLeft, Machine._leave),
        _on(events.ExitReported, Machine._report_exit),
        _on(events.Ticked, lambda machine, _, now: machine._tick(now)),
        # jobs
        _on(events.JobJoined, Machine._join),
        _on(
            events.VariablesRegistered,
            lambda machine, event, _: machine._require_job(event.caller).register_variables(event, machine._servers()),
        ),
        _on_worker(
            events.VariablesCommitted,
            lambda job, event, _: job.commit_variables(event.caller.incarnation, event.generation),
        ),
        _on(
            events.StopRequested,
            lambda machine, event, _: machine._asked(event.caller, event.job_name).stop(
                None if event.caller is None else event.caller.incarnation, event.reason
            ),
        ),
        _on(
            events.SwitchRequested,
            lambda machine, event, now: machine._find_job(event.job_name).going_over.switch(
                event.mode, event.staleness, now
            ),
        ),
        _on(events.ReaderHeard, lambda machine, event, now: machine._find_followed(event).hear_reader(event, now)),
        _on(
            events.EvaluationReported,
            lambda machine, event, _: machine._find_by_number(event.job).take_evaluation(event),
        ),
        # data, and what counts
        _on_worker(events.FeedOpened, lambda job, event, _: job.leasing.open_feed(event.feed, event.spec)),
        _on_worker(
            events.LeaseRequested, lambda job, event, _: job.leasing.lease(event.caller.incarnation, event.feed)
        ),
        _on_worker(events.LeaseReturned, lambda job, event, _: job.leasing.return_lease(event)),
        _on(
            events.LedgerRead,
            lambda machine, event, _: machine._require_job(event.returned.caller).leasing.close_lease(
                event.returned, event.next_sequence, event.generation
            ),
        ),
        _on_worker(events.BatchBegun, lambda job, event, _: job.counting.begin_batch(event)),
        _on(events.NotFiniteReported, Machine._report_not_finite),
        _on_worker(events.StepReported, lambda job, event, now: job.counting.decide_step(event.step, event.ranks, now)),
        _on_worker(events.MakeupRequested, lambda job, event, _: job.counting.read_make_up(event.feed, event.step)),
        _on_worker(events.RebaseRequested, lambda job, event, _: job.rebasing.rebase(event)),
        _on(
            events.WatermarksRead,
            lambda machine, event, _: machine._require_job(event.asked.caller).rebasing.declare_lost(event),
        ),
        _on(events.LostPushesSkipped, Machine._end_rebase),
        # checkpoints
        _on(
            events.CheckpointRequested,
            lambda machine, event, _: machine._asked(event.caller, event.job_name).ask_checkpoint(event.ticket),
        ),
        _on_worker(events.FeedbackRead, lambda job, event, _: job.handing_over.take(event)),
        _on(events.RestoreOrdered, lambda machine, event, now: machine._order_restore(event.origin, now)),
        _on(events.RestoreCancelled, lambda machine, event, _: machine._cancel_restore(event.job_name)),
        # what became of effects
        _on_effect(events.PartitionsCreated, lambda job, event, _: job.end_creation(event.generation, created=True)),
        _on_effect(events.PartitionsRefused, lambda job, event, _: job.end_creation(event.generation, created=False)),
        _on_effect(
            events.PartitionsOpened,
            lambda job, event, now: job.end_opening(event.generation, opened=True, now_ms=now),
        ),
        _on_effect(
            events.OpeningFailed,
            lambda job, event, now: job.end_opening(event.generation, opened=False, now_ms=now),
        ),
        _on(events.CheckpointTaken, Machine._end_checkpoint),
        _on_effect(
            events.CheckpointFailed, lambda job, event, now: job.fail_checkpoint(event.draft, event.failure, now)
        ),
        _on(events.PartitionsRestored, Machine._end_recovery),
        _on_effect(
            events.RestoreFailed, lambda job, event, now: job.fail_recovery(event.generation, event.failure, now)
        ),
        _on_effect(
            events.DepartedRead,
            lambda job, event, now: job.rebasing.declare_lost_of_departed(event.generation, dict(event.found), now),
        ),
        _on_effect(events.DepartedUnread, lambda job, _, now: job.rebasing.fail_departed(now)),
        _on_effect(events.StepsRead, lambda job, event, _: job.settle(event.generation, event.step)),
        _on_effect(events.StepsUnread, lambda job, *_: job.forget_steps()),
        _on_effect(events.ServersPaced, lambda job, event, _: job.end_pacing(event.generation, event.number)),
        _on_effect(events.ServersUnpaced, lambda job, _, now: job.fail_pacing(now)),
        _on_effect(events.WorkersFenced, lambda job, event, now: job.free(event.workers, now, dict(event.reached))),
    ]
)
