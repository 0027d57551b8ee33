"""The whole coordinator as a state machine: members, and the jobs that they work on.

Owns: all state of a yard that is decided in one place. `handle` and `hear` are its only mutators. An event that is
refused raises a typed error and has changed nothing. Invariants: a request counts only if it comes from a living
incarnation, and concerns the member's own job. A member's end reaches its job in the same step. Records come before all
other effects.
The records of all effects, in order, rebuild the machine, and so do those of `snapshot` (except for
what tests/simulation/not_recorded.py lists). Must not know: the clock (`now_ms` is an argument), threads, messages, the
network, the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

from shardyard.config.settings import DRAIN_S, QuotaSettings
from shardyard.domain import errors
from shardyard.domain.ids import Caller, Incarnation, MemberRole, Term
from shardyard_coordinator.core import events
from shardyard_coordinator.core.effects import (
    Acknowledged,
    Draining,
    DrainTaken,
    Effect,
    ForgetServer,
    Left,
    LogMessage,
    NotFiniteVerdict,
    Persist,
    Rebased,
    Registered,
    Reply,
)
from shardyard_coordinator.core.job_state import JobState
from shardyard_coordinator.flows import (
    checkpointing,
    deployment,
    last_step,
    leasing,
    lost_pushes,
    mode_switch,
    replication,
    residuals,
    work_verdicts,
)
from shardyard_coordinator.machine import (
    callers,
    effect_ends,
    heartbeats,
    hosts,
    job_records,
    job_views,
    quotas,
    readers,
)
from shardyard_coordinator.machine import job as life
from shardyard_coordinator.machine.job_directory import JobDirectory
from shardyard_coordinator.machine.wait_reasons import WaitReasons
from shardyard_coordinator.members import membership
from shardyard_coordinator.members.membership import Member, Membership
from shardyard_coordinator.members.nonfinite import QUARANTINED
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.records import Body, DamagedRecord, Record


class Machine:
    """`checkpoints`: the URL for jobs that leave the place of their checkpoints to the coordinator; None: these have
    none."""

    def __init__(
        self,
        *,
        term: Term,
        lease_ms: int,
        now_ms: int,
        checkpoints: str | None = None,
        drain_ms: int = 1000 * DRAIN_S,
        servers_expected: int = 1,
        quotas: QuotaSettings | None = None,
    ) -> None:
        self._lease_ms = lease_ms
        self._quotas = quotas or QuotaSettings()
        self._members = Membership(term=term, lease_ms=lease_ms, drain_ms=drain_ms, servers_expected=servers_expected)
        self._jobs = JobDirectory(term, checkpoints)
        self._ticked_ms = now_ms
        self.waits = WaitReasons()
        self.term = term

    def restored(self, records: Iterable[Record]) -> Self:
        """Makes this new machine the one that wrote the records, in a new term, and returns it. Every lease counts as
        just renewed (rule C4), and calls to servers that were under way are due again; see `resume`. Raises
        ConfigurationError for a record that cannot be read or does not fit those before it."""
        for record in records:
            try:
                self._restore(record.kind, Body(record.body), self._ticked_ms)
            except DamagedRecord as error:
                raise errors.ConfigurationError(
                    f"record {record.number} ({record.kind!r}) cannot be taken: {error}",
                    why="a machine from half of its records would decide against what was decided",
                    todo="start the release that wrote it, or move the journal away: its jobs are lost then",
                    facts={"record": str(record.number)},
                ) from error
        return self

    def snapshot(self) -> list[Persist]:
        """The shortest list of records that rebuilds this machine."""
        numbers = [job.id for job in self._jobs]
        found = [Persist(*entry) for entry in self._members.entries(numbers)]
        found += self._jobs.order_entries()
        for job in self._jobs:
            found += [Persist(kind, {"job": job.id, **body}) for kind, body in job_records.entries(job)]
        return found

    def resume(self) -> list[Effect]:
        """After `restored`: the effects that may not have been carried out before the restart. The rest follows from
        requests and ticks."""
        servers = [member.incarnation for member in self._members.servers()]
        return [effect for job in self._jobs for effect in life.resume(job, servers)]

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._members)

    def find_member(self, incarnation: Incarnation) -> Member | None:
        """The living member of this number."""
        return self._members.get(incarnation)

    @property
    def jobs(self) -> tuple[JobState, ...]:
        """Unfinished jobs and the latest ended ones, in the order in which they began."""
        return tuple(self._jobs)

    def handle(self, event: events.Event, now_ms: int) -> list[Effect]:
        """Handles one event. If the request is refused, raises ShardyardError and changes nothing."""
        effects = [*self._dispatch(event, now_ms), *self._jobs.forget_old()]
        records = [effect for effect in effects if isinstance(effect, Persist)]
        return [*records, *(effect for effect in effects if not isinstance(effect, Persist))]

    def hear(self, event: events.HeartbeatReceived | events.ReaderHeard, now_ms: int) -> list[Effect]:
        """Takes what a member or a reader reports, and replies how its job stands. Decides nothing, so nothing must be
        recorded (rule C8). Raises as `handle`."""
        if isinstance(event, events.ReaderHeard):
            return readers.on_reader(self._jobs.find_for_reader(event), event, now_ms)
        member, job = heartbeats.take(self._members, self._jobs, event, now_ms)
        return [heartbeats.reply(self._jobs, member, job, self.draining(member, now_ms))]

    def _dispatch(self, event: events.Event, now_ms: int) -> list[Effect]:
        match event:
            case events.MemberRegistered():
                return self._register(event, now_ms)
            case events.HeartbeatReceived():
                return self._heartbeat(event, now_ms)
            case events.MemberLeft():
                return self._leave(event, now_ms)
            case events.DrainRequested(caller, name):
                return self._drain(caller, name, now_ms)
            case events.ExitReported():
                return self._report_exit(event, now_ms)
            case events.Ticked():
                return self._tick(now_ms)
            case events.JobJoined():
                return self._join(event, now_ms)
            case events.NotFiniteReported():
                return self._report_not_finite(event, now_ms)
            case events.VariablesRegistered(caller):
                job = self.require_job(caller)
                quotas.check_variables(self._quotas, self._jobs, job, event)
                servers, missing = self._servers(now_ms), self._members.missing_servers(now_ms)
                servers, missing = hosts.servers_for(self._members, job, servers, missing)
                hosts.check_worker(self._members, job, caller.incarnation, servers)
                return deployment.register_variables(job, event, servers, missing)
            case events.LedgerRead(returned, next_sequence, generation):
                return leasing.close_lease(self.require_job(returned.caller), returned, next_sequence, generation)
            case events.WatermarksRead(asked):
                return lost_pushes.declare_lost(self.require_job(asked.caller), event)
            case events.LostPushesSkipped(asked, lost):
                self.require_job(asked.caller)
                return [Reply(Rebased(lost))]
            case events.CheckpointRequested(caller, job_name, ticket):
                return checkpointing.request(callers.asked_about(self._members, self._jobs, caller, job_name), ticket)
            case events.StopRequested(caller, job_name, reason):
                worker = None if caller is None else caller.incarnation
                job = callers.asked_about(self._members, self._jobs, caller, job_name)
                return last_step.stop(job, worker, reason)
            case events.SwitchRequested(job_name, mode, staleness, strategy):
                return mode_switch.switch(self._jobs.find(job_name), mode, staleness, strategy, now_ms)
            case events.ReaderHeard():
                return readers.on_reader(self._jobs.find_for_reader(event), event, now_ms)
            case events.EvaluationReported(number):
                return readers.on_evaluation(self._jobs.require(number), event)
            case events.RestoreOrdered(origin):
                return self._jobs.order_restore(origin, now_ms)
            case events.RestoreCancelled(job_name, owner):
                return self._jobs.cancel_restore(job_name, owner)
            case events.VariablesCommitted(caller, generation):
                return deployment.commit_variables(self.require_job(caller), caller.incarnation, generation)
            case events.FeedOpened(caller, feed, spec):
                return leasing.open_feed(self.require_job(caller), feed, spec)
            case events.LeaseRequested(caller, feed, known):
                return leasing.lease(self.require_job(caller), caller.incarnation, feed, known)
            case events.LeaseReturned(caller):
                return leasing.return_lease(self.require_job(caller), event)
            case events.BatchBegun(caller):
                return work_verdicts.begin_batch(self.require_job(caller), event)
            case events.StepReported(caller, step, ranks):
                return work_verdicts.decide_step(self.require_job(caller), step, ranks, now_ms)
            case events.MakeupRequested(caller, feed, step):
                return work_verdicts.read_make_up(self.require_job(caller), feed, step)
            case events.ReplicaGroupAsked(caller):
                host = self._members.require(caller.incarnation).registration.host
                return replication.ask(self.require_job(caller), event, host, now_ms)
            case events.ReplicasPublished(caller):
                return replication.published(self.require_job(caller), event, now_ms)
            case events.RebaseRequested(caller):
                return lost_pushes.rebase(self.require_job(caller), event)
            case events.FeedbackRead(caller):
                return residuals.take(self.require_job(caller), event)
            case _:
                return self._end_effect(event, now_ms)

    def _end_effect(self, event: Any, now_ms: int) -> list[Effect]:
        job = self._jobs.get(event.job)
        if job is None:
            return []
        began_with = job.origin
        effects = effect_ends.handle(job, event, now_ms)
        if isinstance(event, events.CheckpointTaken | events.PartitionsRestored):
            effects += self._jobs.forget_order(job, began_with)
        return effects

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
        member, job = heartbeats.take(self._members, self._jobs, event, now_ms)
        decided = [] if job is None else heartbeats.decide(job, member.incarnation, event.report)
        return [*decided, heartbeats.reply(self._jobs, member, job, self.draining(member, now_ms))]

    def _leave(self, event: events.MemberLeft, now_ms: int) -> list[Effect]:
        member = self._members.require(event.incarnation)
        job = self._jobs.get(member.job)
        if member.role is not MemberRole.WORKER or job is None:
            return [*self._lose(member, life.LEFT, now_ms), Reply(Left())]
        how = life.how_it_left(event)
        lost_before = job.lost_residuals.count
        effects = [*self._remove(member, how), *life.leave(job, event, now_ms)]
        return [*effects, Reply(Left(residual_lost=job.lost_residuals.count > lost_before))]

    def _drain(self, caller: Incarnation | None, name: str, now_ms: int) -> list[Effect]:
        member = self._members.find(name) if caller is None else self._members.require(caller)
        records = [Persist(*entry) for entry in self._members.drain(member, now_ms)]
        drain = self.draining(member, now_ms)
        assert drain is not None
        left_ms = drain.left_ms
        told = [LogMessage(f"{member.title} leaves in order, within {left_ms / 1000:g} s")] if records else []
        taken = DrainTaken(member.incarnation, member.title, left_ms, first=bool(records), empty=drain.empty)
        return [*records, *told, Reply(taken)]

    def draining(self, member: Member, now_ms: int) -> Draining | None:
        """Whether the member leaves in order, and what is left of that."""
        if member.drain_until_ms is None:
            return None
        empty = member.role is MemberRole.SERVER and not self._jobs.uses(member.incarnation)
        return Draining(max(0, member.drain_until_ms - now_ms), empty)

    def _report_exit(self, event: events.ExitReported, now_ms: int) -> list[Effect]:
        agent = self._members.require(event.agent, MemberRole.AGENT)
        effects: list[Effect] = []
        for worker in self._members.started_by(agent, event.pid):
            ended = f"was ended by signal {-event.exit_code}" if event.exit_code < 0 else f"exited ({event.exit_code})"
            effects += self._lose(worker, f"{ended}, says agent {agent.incarnation}", now_ms)
        return [*effects, Reply(Acknowledged())]

    def _report_not_finite(self, said: events.NotFiniteReported, now_ms: int) -> list[Effect]:
        job = self.require_job(said.caller)
        effects = work_verdicts.report_not_finite(job, said)
        reply = effects[-1]
        assert isinstance(reply, Reply)
        assert isinstance(reply.answer, NotFiniteVerdict)
        failure = reply.answer.failure
        if not isinstance(failure, errors.WorkerQuarantined):
            return effects
        member = self._members.require(said.caller.incarnation, MemberRole.WORKER)
        how = f"{QUARANTINED}: {failure.what}"
        return [*effects, *self._remove(member, how), *life.lose(job, member.incarnation, how, now_ms, died=False)]

    def _tick(self, now_ms: int) -> list[Effect]:
        gap_ms = now_ms - self._ticked_ms
        self._ticked_ms = now_ms
        effects: list[Effect] = []
        if gap_ms > self._lease_ms // 2:
            # this process was stopped, so no member could renew its lease meanwhile
            self._members.forgive(gap_ms)
            effects.append(
                LogMessage(f"nothing was decided for {gap_ms / 1000:.1f} s; all leases are longer by that", True)
            )
        for member, how in self._members.expired(now_ms):
            effects += self._lose(member, how, now_ms)
        servers, missing = self._servers(now_ms), self._members.missing_servers(now_ms)
        for job in self._jobs:
            effects += life.tick(job, now_ms, *hosts.servers_for(self._members, job, servers, missing))
        for job, why in quotas.beyond_rows(self._quotas, self.jobs):
            effects += last_step.begin_stop(job, None, "the coordinator decided", why)
        return [*effects, *self.waits.look(self.jobs, now_ms)]

    def _lose(self, member: Member, how: str, now_ms: int) -> list[Effect]:
        """A member departed without telling its job."""
        effects = self._remove(member, how)
        if member.role is MemberRole.SERVER:
            for job in self._jobs:
                effects += life.lose_server(job, _server(member), how, now_ms)
            effects.append(ForgetServer(member.incarnation))
        job_of_worker = self._jobs.get(member.job)
        if job_of_worker is not None:
            effects += life.lose(job_of_worker, member.incarnation, how, now_ms)
        return effects

    def _remove(self, member: Member, how: str) -> list[Effect]:
        self._members.remove(member.incarnation, how)
        return [
            Persist(*membership.removed(member, how)),
            LogMessage(f"{member.title} {how}", warning=how not in (life.LEFT, life.DRAINED)),
        ]

    def _servers(self, now_ms: int) -> Sequence[Server]:
        return [_server(member, self._members.hurries(member, now_ms)) for member in self._members.servers()]

    # ---- jobs

    def _join(self, event: events.JobJoined, now_ms: int) -> list[Effect]:
        worker = self._members.require(event.incarnation, MemberRole.WORKER)
        if event.settings.name != event.name:
            raise errors.InvalidRequest(
                f"worker {worker.incarnation} joins job {event.name!r} with the settings of {event.settings.name!r}"
            )
        if worker.job is not None:
            return [
                Reply(
                    job_views.joined(
                        callers.joined_before(self._jobs, worker, event.name), worker.incarnation, started=False
                    )
                )
            ]
        effects: list[Effect] = []
        found = self._jobs.to_join(event.name, event.run)
        if found is not None:
            if event.owner not in ("", found.owner):
                raise errors.NotPermitted(
                    f"{found.title} is of {found.owner or 'the yard'}, and {worker.title} is of {event.owner}",
                    why="the workers of an owner join the jobs of that owner",
                    todo="give the job another name (SHARDYARD_JOB)",
                )
            found.require_joinable()
        quotas.check_join(self._quotas, self._jobs, event.owner if found is None else found.owner)
        if found is not None:
            job = found
        else:
            quotas.check_start(self._quotas, self._jobs, event.owner)
            job, effects = self._jobs.start(event.settings, worker.title, now_ms, event.owner)
        worker.job = job.id
        effects += life.join(job, worker.incarnation, event.run, now_ms)
        return [*effects, Reply(job_views.joined(job, worker.incarnation, started=found is None))]

    def require_job(self, caller: Caller) -> JobState:
        """The unfinished job of a living worker that asks about it. Raises NotFound, StaleIncarnation, and its
        failure."""
        return callers.require_job(self._members, self._jobs, caller)

    def _restore(self, kind: str, body: Body, now_ms: int) -> None:
        match kind:
            case "member_registered" | "member_removed" | "member_former" | "member_draining":
                self._members.restore(kind, body, now_ms)
            case "job_started" | "job_resumed" | "job_forgotten" | "restore_ordered" | "restore_forgotten":
                self._jobs.restore(kind, body, now_ms)
            case _:
                job = self._jobs.restored(body)
                job_records.restore(job, kind, body, now_ms)
                if kind == "worker_joined":
                    self._members.put_into(Incarnation(body.number("worker")), job.id)


def _server(member: Member, hurries: bool = False) -> Server:
    leaves = member.drain_until_ms is not None
    said = member.registration
    return Server(member.incarnation, member.address, said.logs, leaves, hurries, said.host)
