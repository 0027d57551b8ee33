"""Who is a member of the yard, and until when.

Owns: members by incarnation, their leases, why a former member is none any more. Invariants: incarnations only grow and
no two lives of the coordinator give the same (each begins at its term << 32); two living members never share a role and
an address; a lease is renewed by a heartbeat only. Must not know: jobs, the network, what time it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shardyard.ground import limits
from shardyard.ground.errors import InvalidRequest, ProtocolMismatch, StaleIncarnation, TooLarge
from shardyard.ground.types import Incarnation, JobId, MemberRole, Term

TERM_BITS: Final = 32
"""Numbers given in one life of the coordinator stay below 2 ** 32; its term stands above them."""
FORMER_MAX: Final = 1_024
"""Of so many former members the reason of their end is remembered, for messages."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What a process says of itself. `agent` is the incarnation of the agent that started it, if one did."""

    role: MemberRole
    address: str
    protocol: int
    release: str
    host: str
    pid: int
    agent: Incarnation | None = None
    local_index: int = 0


@dataclass(slots=True)
class Member:
    incarnation: Incarnation
    registration: Registration
    last_seen_ms: int
    job: JobId | None = None

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

    def __init__(self, *, term: Term, lease_ms: int, members_max: int = limits.MEMBERS_MAX) -> None:
        self._lease_ms = lease_ms
        self._members_max = members_max
        self._next = (term << TERM_BITS) + 1
        self._members: dict[Incarnation, Member] = {}
        self._former: dict[Incarnation, str] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def check(self, registration: Registration) -> None:
        """Raises ProtocolMismatch, InvalidRequest or TooLarge for a process that cannot become a member."""
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
        if len(self._members) >= self._members_max and self.replaced_by(registration) is None:
            raise TooLarge(
                f"the yard has {len(self._members)} members already; at most {self._members_max} are taken",
                todo="stop members that are not needed, or start a second coordinator",
            )

    def replaced_by(self, registration: Registration) -> Member | None:
        """The member whose place the process takes: one of its role at its address."""
        if not registration.address:
            return None
        for member in self._members.values():
            if member.role is registration.role and member.address == registration.address:
                return member
        return None

    def add(self, registration: Registration, now_ms: int) -> Member:
        """Takes in a process that `check` let pass, after the one that it replaces was removed."""
        assert self.replaced_by(registration) is None, registration
        member = Member(Incarnation(self._next), registration, now_ms)
        self._next += 1
        self._members[member.incarnation] = member
        return member

    def require(self, incarnation: Incarnation, role: MemberRole | None = None) -> Member:
        """The living member. Raises StaleIncarnation, or InvalidRequest where it has another role."""
        member = self._members.get(incarnation)
        if member is None:
            reason = self._former.get(incarnation)
            raise StaleIncarnation(
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
        """The coordinator itself was not awake for `gap_ms`; nobody could reach it, so this time does not count."""
        for member in self._members.values():
            member.last_seen_ms += gap_ms

    def expired(self, now_ms: int) -> tuple[tuple[Member, str], ...]:
        """Members whose lease has run out, and how that was noticed."""
        return tuple(
            (
                member,
                f"was silent for {(now_ms - member.last_seen_ms) / 1000:.1f} s (lease {self._lease_ms / 1000:g} s)",
            )
            for member in self._members.values()
            if now_ms - member.last_seen_ms >= self._lease_ms
        )

    def remove(self, incarnation: Incarnation, reason: str) -> None:
        """`reason` continues "it ...", for example "left"."""
        del self._members[incarnation]
        self._former[incarnation] = reason
        while len(self._former) > FORMER_MAX:
            del self._former[next(iter(self._former))]

    def servers(self) -> tuple[Member, ...]:
        return tuple(member for member in self._members.values() if member.role is MemberRole.SERVER)

    def started_by(self, agent: Member, pid: int) -> tuple[Member, ...]:
        """Workers that ran in process `pid` of the agent's machine."""
        return tuple(
            member
            for member in self._members.values()
            if member.role is MemberRole.WORKER
            and member.registration.pid == pid
            and (member.registration.agent == agent.incarnation or member.registration.host == agent.registration.host)
        )
