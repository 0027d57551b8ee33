"""One RPC of the coordinator as a row: its method, and how a request becomes a reply.

Most RPCs are decided by the machine. Their row (`decided`) names the function that turns the request into an event,
the type of the machine's answer, and the function that turns the answer into the reply. The others (`served`) have a
function of their own, because they read a journal or a storage, or because their reply has more than the answer.

Invariant: a function that makes an event checks every value that a peer sent, so that the event is well-formed and
bounded (shardyard.domain.limits). It raises MalformedPayload, TooLarge, InvalidRequest or ConfigurationError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from shardyard.config.settings import MembershipSettings
from shardyard.domain.errors import Internal, NotPermitted, NotTrusted, ShardyardError
from shardyard.domain.ids import Incarnation, JobId
from shardyard.runtime.waits import WaitRegistry
from shardyard.security.audit_log import AuditLog
from shardyard.security.identity import Identity, Role
from shardyard.security.issuing import PEOPLE
from shardyard.security.passes import PassSigner, holder_of
from shardyard.security.roles import ALLOWED, MEMBERS
from shardyard.storage.access import StorageAccess
from shardyard.transport.interfaces import Context, Handler
from shardyard.wire import methods
from shardyard.wire.method import Method
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.service.checkpoint_io import CheckpointIO
from shardyard_coordinator.service.group_keys import GroupKeys
from shardyard_coordinator.service.identities import YardIdentities
from shardyard_coordinator.service.mailbox import Mailbox
from shardyard_coordinator.service.residual_collection import ResidualCollections
from shardyard_coordinator.service.server_calls import ServerCalls
from shardyard_coordinator.service.server_client import ServerClient

log = logging.getLogger("shardyard.coordinator")

OF_A_JOB: Final = frozenset(
    method.path
    for method in (
        *(methods.STOP_JOB, methods.TAKE_CHECKPOINT, methods.SWITCH_CONSISTENCY, methods.RESTORE_CHECKPOINT),
        *(methods.LIST_QUARANTINED, methods.READ_AUDIT, methods.FOLLOW_JOB, methods.REPORT_EVALUATION),
    )
)
"""What a person or a reader asks about one job, by its number or its name."""
OF_THE_YARD: Final = frozenset((methods.DRAIN.path,))
"""What concerns the jobs of everybody."""
_SAID: Final = ("job_name", "name", "role", "owner", "holder", "member", "launch", "url", "reason", "address")
"""What the audit has of a request."""
ROUNDS_MAX: Final = 4
"""How often one request is given to the machine. It is given again after its partitions were created or opened; once
more is enough."""

A = TypeVar("A")
Request = TypeVar("Request")
Response = TypeVar("Response")


@dataclass(frozen=True)
class Backend:
    """The parts of the coordinator that answer requests. `checkpoints`: as in `Mailbox`; `access`: where a job's may
    be; `release`: of shardyard; `identities`: None if this yard signs no certificates;
    `signer`: of passes, None without TLS; `audit_log`: of the yard, None without TLS;
    `open_to`: where it listens on the network without TLS."""

    mailbox: Mailbox
    calls: ServerCalls
    servers: ServerClient
    checkpoint_io: CheckpointIO
    access: StorageAccess
    residuals: ResidualCollections
    group_keys: GroupKeys
    wait_registry: WaitRegistry
    membership: MembershipSettings
    checkpoints: str | None
    release: str
    identities: YardIdentities | None
    signer: PassSigner | None
    audit_log: AuditLog | None
    open_to: str

    @property
    def authorities(self) -> bytes:
        """What callers are to trust, as a digest; empty if this yard signs no certificates."""
        return b"" if self.identities is None else self.identities.authority.digest

    def audit(self, method: Method[Any, Any], request: Any, caller: Identity, where: str, outcome: str) -> None:
        """Writes down who did what. If the file cannot be written, the log has it."""
        if self.audit_log is None:
            return
        said = {name: getattr(request, name) for name in _SAID if name in request.DESCRIPTOR.fields_by_name}
        more = {name: value[:128] for name, value in said.items() if isinstance(value, str) and value}
        try:
            self.audit_log.add(method.name, who=holder_of(caller), where=where, outcome=outcome, **more)
        except OSError as error:
            log.error("the audit cannot be written (%s): %s of %s, %s", error, method.name, caller, outcome)

    def check_caller(self, request: Any, caller: Identity) -> None:
        """Raises NotPermitted if a member speaks for another one, or for a job that it is not in. `caller`: by its
        certificate."""
        said = request.caller if "caller" in request.DESCRIPTOR.fields_by_name else None
        if said is None or caller.role not in MEMBERS:
            return
        with self.mailbox.machine() as machine:
            member = machine.find_member(Incarnation(said.incarnation))
            known = None if member is None else member.registration.principal
        # of one that is no member any more, the machine says what is to be said
        if not said.incarnation or (known is not None and known != holder_of(caller)):
            raise NotPermitted(
                f"{caller} speaks for member {Incarnation(said.incarnation)}, which is {known or 'nobody'}",
                why="a process speaks for its own membership",
                todo="register; members do so by themselves",
            )
        if member is not None and said.job not in (0, member.job):
            raise NotPermitted(
                f"{caller} speaks for job {JobId(said.job)}, and is in {member.job or 'none'}",
                why="a process speaks for the job that it has joined",
                todo="join the job; workers do so by themselves",
            )

    def check_owner(self, method: Method[Any, Any], request: Any, caller: Identity) -> None:
        """Raises NotPermitted if the caller belongs to an owner, and asks for what is another's."""
        is_of_member = caller.role in MEMBERS and "caller" in request.DESCRIPTOR.fields_by_name
        if not caller.owner or is_of_member:
            return  # what a member asks as a member is about the job that it has joined
        if method.path in OF_THE_YARD:
            raise NotPermitted(f"{caller} decides nothing about the yard, only about jobs of {caller.owner}")
        if method.path not in OF_A_JOB:
            return
        fields = request.DESCRIPTOR.fields_by_name
        about = [str(getattr(request, name)) for name in ("job", "job_name") if name in fields]
        wanted = next((each for each in about if each not in ("", "0")), "")
        with self.mailbox.machine() as machine:
            meant = [
                job
                for job in machine.jobs
                if (wanted in (job.settings.name, str(job.id), str(int(job.id))) if wanted else not job.phase.ended)
            ]
            others = [job.title for job in meant if not caller.may_touch(job.owner)]
        if others:
            raise NotPermitted(
                f"{caller} asks about {others[0]}, which is another's",
                why="jobs belong to the owner whose worker has started them",
                todo="name a job of your own",
            )

    def sign_pass(self, job: JobId, incarnation: Incarnation, caller: Identity | None) -> bytes:
        """What a worker or a reader shows to servers; empty without TLS."""
        if self.signer is None or caller is None:
            return b""
        return self.signer.sign(job, incarnation, caller)

    def ask(self, event: events.Event, answer: type[A]) -> A:
        """Gives a request to the machine, carries out what its answer waits for, and returns the answer. Raises what
        the machine refuses."""
        asked = event
        for _ in range(ROUNDS_MAX):
            found = self.calls.handle(asked)
            for effect in found:
                if isinstance(effect, effects.Reply):
                    assert isinstance(effect.answer, answer), effect
                    return effect.answer
            asked = self._carry_out(event, found)
        raise Internal(f"{type(event).__name__} was given to the machine {ROUNDS_MAX} times and has no answer")

    def _carry_out(self, event: events.Event, found: Sequence[effects.Effect]) -> events.Event:
        """Carries out the effects that the answer waits for. Returns the event that brings the answer."""
        for effect in found:
            match effect:
                case effects.CreatePartitions():
                    self.calls.create([each for each in found if isinstance(each, effects.CreatePartitions)])
                    return event
                case effects.OpenPartitions():
                    self.calls.open([each for each in found if isinstance(each, effects.OpenPartitions)])
                    return event
                case effects.ReadLedger():
                    assert isinstance(event, events.LeaseReturned), event
                    return events.LedgerRead(event, self.servers.lowest_next(effect), effect.map.generation)
                case effects.ReadWatermarks():
                    assert isinstance(event, events.RebaseRequested), event
                    nexts = self.servers.watermarks(effect.job, effect.map, effect.worker)
                    return events.WatermarksRead(event, effect.map.generation, nexts)
                case effects.SkipLostPushes():
                    assert isinstance(event, events.RebaseRequested), event
                    self.servers.pass_over(effect)
                    return events.LostPushesSkipped(event, effect.lost)
                case _:
                    continue
        raise Internal(f"{type(event).__name__} has no answer")


@dataclass(frozen=True)
class Rpc:
    method: Method[Any, Any]
    serve: Callable[[Backend, Any, Identity | None], Any]

    def handler(self, backend: Backend) -> Handler:
        def handle(request: Any, context: Context) -> Any:
            caller = None if context.speaker is None else context.speaker.identity
            if caller is None:
                return self.serve(backend, request, None)
            try:
                backend.check_caller(request, caller)
                backend.check_owner(self.method, request, caller)
                answer = self.serve(backend, request, caller)
            except ShardyardError as error:
                if isinstance(error, NotPermitted | NotTrusted) or self._is_audited(caller):
                    backend.audit(self.method, request, caller, context.peer, error.what)
                raise
            if self._is_audited(caller):
                backend.audit(self.method, request, caller, context.peer, "allowed")
            return answer

        return handle

    def _is_audited(self, caller: Identity) -> bool:
        """Whether what the caller does here is written down: what people do, and who comes."""
        if caller.role in PEOPLE:
            return Role.VIEWER not in ALLOWED[self.method.path]
        return self.method.name in ("Enrol", "Register")


def decided(
    method: Method[Request, Response],
    to_event: Callable[[Request], events.Event],
    answer: type[A],
    to_reply: Callable[[A], Response],
) -> Rpc:
    """An RPC that the machine decides."""
    return Rpc(method, lambda backend, request, _: to_reply(backend.ask(to_event(request), answer)))


def acknowledged(
    method: Method[Request, Response], to_event: Callable[[Request], events.Event], reply: type[Response]
) -> Rpc:
    """An RPC that the machine decides and whose reply is empty."""
    return decided(method, to_event, effects.Acknowledged, lambda _: reply())


def served(method: Method[Request, Response], serve: Callable[[Backend, Request], Response]) -> Rpc:
    return Rpc(method, lambda backend, request, _: serve(backend, request))


def identified(
    method: Method[Request, Response], serve: Callable[[Backend, Request, Identity | None], Response]
) -> Rpc:
    """An RPC whose reply depends on who calls."""
    return Rpc(method, serve)
