"""The members of the yard, and their leases.

Owns: members by incarnation, their leases, and why each former member was removed. Invariants: incarnations only grow.
No two runs of the coordinator give the same one, because each run begins at its term << 32. Two living members never
share both role and address. Only a heartbeat renews a lease. Must not know: jobs, the network, what time it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass
from typing import Final

from shardyard.domain import limits
from shardyard.domain.errors import (
    InvalidRequest,
    NotFound,
    NotReady,
    ProtocolMismatch,
    StaleIncarnation,
    TooLarge,
    WorkerQuarantined,
)
from shardyard.domain.ids import Incarnation, JobId, MemberRole, Term
from shardyard_coordinator.members.nonfinite import QUARANTINED
from shardyard_coordinator.records import Body, DamagedRecord, Entry, require

TERM_BITS: Final = 32
"""Numbers given in one life of the coordinator stay below 2 ** 32; its term stands above them."""
SERVERS_WAIT_MS: Final = 10_000
"""How long partitions wait for another of the expected servers after one has come."""
FORMER_MAX: Final = 1_024
"""The number of former members whose end is remembered, for messages."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What a process says about itself. `agent`: the incarnation of the agent that started it, if one did. `logs`: the
    folder of a server's logs. `principal`: the role and name in its certificate, which it does not say itself; empty
    without certificates."""

    role: MemberRole
    address: str
    protocol: int
    release: str
    host: str
    pid: int
    agent: Incarnation | None = None
    local_index: int = 0
    logs: str = ""
    principal: str = ""


@dataclass(slots=True)
class Member:
    incarnation: Incarnation
    registration: Registration
    last_seen_ms: int
    job: JobId | None = None
    waiting_for: str = ""
    """What its last heartbeat said."""
    drain_until_ms: int | None = None
    """When it counts as dead, since it is to leave in order; None: it stays."""

    @property
    def role(self) -> MemberRole:
        return self.registration.role

    @property
    def address(self) -> str:
        return self.registration.address

    @property
    def title(self) -> str:
        """How messages name it."""
        place = self.address or f"{self.registration.host} pid {self.registration.pid}"
        return f"{self.role.value} {self.incarnation} at {place}"


class Membership:
    """The living members. Iteration is in the order of registration."""

    def __init__(
        self,
        *,
        term: Term,
        lease_ms: int,
        drain_ms: int = 0,
        servers_expected: int = 1,
        members_max: int = limits.MEMBERS_MAX,
    ) -> None:
        self._lease_ms = lease_ms
        self._drain_ms = drain_ms
        self._servers_expected = servers_expected
        self._server_came_ms = 0
        self._members_max = members_max
        self._next = (term << TERM_BITS) + 1
        self._members: dict[Incarnation, Member] = {}
        self._servers: dict[Incarnation, Member] = {}
        """Those of them that are servers."""
        self._former: dict[Incarnation, str] = {}
        self._agents: dict[Incarnation, tuple[str, str]] = {}
        """The certificates and hosts of agents, of former ones as well."""

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def check(self, registration: Registration) -> None:
        """Raises ProtocolMismatch, InvalidRequest or TooLarge if the process cannot become a member, and NotReady while
        another one has its address."""
        if registration.protocol != limits.PROTOCOL:
            raise ProtocolMismatch(
                f"{registration.role.value} at {registration.address or registration.host or 'an unnamed host'}, of "
                f"release {registration.release or 'unknown'}, speaks protocol {registration.protocol}; "
                f"this coordinator speaks {limits.PROTOCOL}"
            )
        if registration.role is MemberRole.SERVER and not registration.address:
            raise InvalidRequest(
                f"a server on {registration.host} (pid {registration.pid}) registered without an address",
                why="workers could not reach it",
                todo="start it with an address that others can reach (--advertise HOST:PORT)",
            )
        replaced = self.replaced_by(registration)
        if replaced is not None and replaced.registration.principal != registration.principal:
            raise NotReady(
                f"{replaced.title} has this address, and another certificate",
                why="a process takes the place of itself only",
                todo="wait: if the other one has ended, its lease is over soon",
            )
        if len(self._members) >= self._members_max and replaced is None:
            raise TooLarge(
                f"the yard has {len(self._members)} members already; at most {self._members_max} are taken",
                todo="stop members that are not needed, or start a second coordinator",
            )

    def replaced_by(self, registration: Registration) -> Member | None:
        """The living member with the process's role and address, which the process replaces."""
        if not registration.address:
            return None
        for member in self._members.values():
            if member.role is registration.role and member.address == registration.address:
                return member
        return None

    def add(self, registration: Registration, now_ms: int) -> Member:
        """Adds a process that passed `check`. The member that it replaces must have been removed."""
        assert self.replaced_by(registration) is None, registration
        return self._add(Incarnation(self._next), registration, now_ms)

    def get(self, incarnation: Incarnation) -> Member | None:
        """The living member; None if there is none of this number."""
        return self._members.get(incarnation)

    def require(self, incarnation: Incarnation, role: MemberRole | None = None) -> Member:
        """The living member. Raises StaleIncarnation, WorkerQuarantined if the worker is excluded, or InvalidRequest if
        its role is another."""
        member = self._members.get(incarnation)
        if member is None:
            reason = self._former.get(incarnation, "")
            kind = WorkerQuarantined if reason.startswith(QUARANTINED) else StaleIncarnation
            raise kind(
                f"incarnation {incarnation} is no member of this yard"
                + (f": it {reason}" if reason else " (unknown to this coordinator)"),
                facts={"incarnation": str(incarnation)},
            )
        if role is not None and member.role is not role:
            raise InvalidRequest(f"{member.title} asked for what is for {role.value}s only")
        return member

    def renew(self, incarnation: Incarnation, now_ms: int) -> None:
        self._members[incarnation].last_seen_ms = now_ms

    def forgive(self, gap_ms: int) -> None:
        """Extends all leases and drains by `gap_ms`, during which the coordinator itself was not running and members
        could not reach it."""
        for member in self._members.values():
            member.last_seen_ms += gap_ms
            if member.drain_until_ms is not None:
                member.drain_until_ms += gap_ms

    def expired(self, now_ms: int) -> tuple[tuple[Member, str], ...]:
        """The members whose lease, or whose time to leave in order, has run out, each with how that was noticed."""
        found = []
        for member in self._members.values():
            silent_ms = now_ms - member.last_seen_ms
            if silent_ms >= self._lease_ms:
                how = f"was silent for {silent_ms / 1000:.1f} s (lease {self._lease_ms / 1000:g} s)"
                found.append((member, how))
            elif member.drain_until_ms is not None and now_ms >= member.drain_until_ms:
                found.append((member, f"did not leave within {self._drain_ms / 1000:g} s (membership.drain_s)"))
        return tuple(found)

    # ---- leaving in order

    def find(self, name: str) -> Member:
        """The living member with that number or address. Raises NotFound."""
        for member in self._members.values():
            if name in (str(member.incarnation), member.address) and name:
                return member
        raise NotFound(f"there is no member {name!r}", todo="`shardyard status` lists members, with id and address")

    def hurries(self, member: Member, now_ms: int) -> bool:
        """Whether half of the time is over in which the member may leave."""
        return member.drain_until_ms is not None and now_ms >= member.drain_until_ms - self._drain_ms // 2

    def drain(self, member: Member, now_ms: int) -> list[Entry]:
        """The member is to leave in order. Returns the record, unless it was told so before."""
        if member.drain_until_ms is not None:
            return []
        member.drain_until_ms = now_ms + self._drain_ms
        return [_draining(member)]

    def remove(self, incarnation: Incarnation, reason: str) -> None:
        """`reason` continues "it ...", for example "left"."""
        del self._members[incarnation]
        self._servers.pop(incarnation, None)
        self._remember(incarnation, reason)

    def servers(self) -> tuple[Member, ...]:
        return tuple(self._servers.values())

    def missing_servers(self, now_ms: int) -> str:
        """What partitions that have no server wait for, so that the first server to come does not get all of them.
        Empty if nothing is waited for."""
        there = sum(member.drain_until_ms is None for member in self.servers())
        left_ms = self._server_came_ms + SERVERS_WAIT_MS - now_ms
        if not 0 < there < self._servers_expected or left_ms <= 0:
            return ""
        return f"{self._servers_expected - there} more of {self._servers_expected} servers, for up to 10 s"

    def started_by(self, agent: Member, pid: int) -> tuple[Member, ...]:
        """The workers that ran in process `pid` and that this agent has started, in this membership or in an earlier
        one. What the agent says of its host does not make a worker its own."""
        return tuple(
            member
            for member in self._members.values()
            if member.role is MemberRole.WORKER
            and member.registration.pid == pid
            and self._has_started(agent, member.registration)
        )

    def _has_started(self, agent: Member, worker: Registration) -> bool:
        if worker.agent == agent.incarnation:
            return True
        if worker.agent in self._members:
            return False
        # an agent that has registered again since; where none is known, the host decides, but without certificates only
        before = self._agents.get(worker.agent or Incarnation(0), ("", worker.host))
        return before == (agent.registration.principal, agent.registration.host)

    # ---- records

    def entries(self, jobs_known: Container[JobId]) -> list[Entry]:
        """Records that rebuild these members. A member's job is included unless it is one of `jobs_known`, whose own
        records name their workers."""
        former = [("member_former", {"incarnation": each, "how": how}) for each, how in self._former.items()]
        found = [registered(each, 0 if each.job in jobs_known else each.job or 0) for each in self]
        return [*former, *found, *(_draining(each) for each in self if each.drain_until_ms is not None)]

    def restore(self, kind: str, body: Body, now_ms: int) -> None:
        """Applies a record of `entries`, or one of the same kinds. Raises DamagedRecord."""
        incarnation = Incarnation(body.number("incarnation", least=1))
        match kind:
            case "member_registered":
                require(incarnation not in self._members, f"member {incarnation} registers twice")
                member = self._add(incarnation, _registration_of(body), now_ms)
                member.job = JobId(body.number("job")) or None
            case "member_removed":
                require(incarnation in self._members, f"member {incarnation} goes and was not there")
                self.remove(incarnation, body.text("how"))
            case "member_draining":
                require(incarnation in self._members, f"member {incarnation} drains and was not there")
                self.drain(self._members[incarnation], now_ms)
            case _:
                self._remember(incarnation, body.text("how"))

    def put_into(self, worker: Incarnation, job: JobId) -> None:
        """Restores that the worker joined the job. Raises DamagedRecord."""
        require(worker in self._members, f"worker {worker} is no member")
        self._members[worker].job = job

    def _add(self, incarnation: Incarnation, registration: Registration, now_ms: int) -> Member:
        self._members[incarnation] = member = Member(incarnation, registration, now_ms)
        self._next = max(self._next, incarnation + 1)
        if member.role is MemberRole.SERVER:
            self._servers[incarnation] = member
            self._server_came_ms = now_ms
        elif member.role is MemberRole.AGENT:
            self._agents[incarnation] = (registration.principal, registration.host)
            while len(self._agents) > FORMER_MAX:
                del self._agents[next(iter(self._agents))]
        return member

    def _remember(self, incarnation: Incarnation, reason: str) -> None:
        self._former[incarnation] = reason
        self._next = max(self._next, incarnation + 1)
        while len(self._former) > FORMER_MAX:
            del self._former[next(iter(self._former))]


def registered(member: Member, job: int = 0) -> Entry:
    """The record of a registration."""
    said = member.registration
    body = {**asdict(said), "role": said.role.value, "agent": said.agent or 0}
    return "member_registered", {"incarnation": member.incarnation, **body, "job": job}


def removed(member: Member, how: str) -> Entry:
    """The record of a member's removal."""
    said = {"role": member.role.value, "address": member.address}
    return "member_removed", {"incarnation": member.incarnation, "how": how, **said}


def _draining(member: Member) -> Entry:
    return "member_draining", {"incarnation": member.incarnation}


def _registration_of(body: Body) -> Registration:
    role = body.text("role")
    try:
        known_role = MemberRole(role)
    except ValueError as error:
        raise DamagedRecord(f"role: expected one of server, worker, agent, got {role!r}") from error
    return Registration(
        role=known_role,
        address=body.text("address"),
        protocol=body.number("protocol"),
        release=body.text("release"),
        host=body.text("host"),
        pid=body.number("pid"),
        agent=Incarnation(body.number("agent")) or None,
        local_index=body.number("local_index"),
        logs=body.text("logs"),
        principal=body.text("principal"),
    )
