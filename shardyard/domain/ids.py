"""Identifiers of processes, jobs, partitions and versions."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, NewType


class _TermedNumber(int):
    """A number that a coordinator gave out in one of its terms: term << 32 | n. It is shown as "term.n"."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self >> 32}.{self & 0xFFFFFFFF}" if self >> 32 else f"{self & 0xFFFFFFFF}"

    def __repr__(self) -> str:
        return str(self)


class JobId(_TermedNumber):
    """The number of a training run. It is unique over all terms of the coordinator."""

    __slots__ = ()


class Incarnation(_TermedNumber):
    """The number of a member's registration, unique over all terms of the coordinator. Servers refuse the requests of
    an incarnation that was declared dead (the fence)."""

    __slots__ = ()


Generation = NewType("Generation", int)


Term = NewType("Term", int)


Token = NewType("Token", int)


PartitionId = NewType("PartitionId", int)


Rank = NewType("Rank", int)


class MemberRole(enum.Enum):
    SERVER = "server"
    WORKER = "worker"
    AGENT = "agent"


@dataclass(frozen=True, slots=True)
class RunName:
    """The run of a launch: what was started together, with all restarts of its processes. `id`: of the launch.
    `number`: from 1, since a script may train several jobs, one after the other."""

    id: str
    number: int = 1

    def __str__(self) -> str:
        return repr(self.id) if self.number == 1 else f"{self.id!r} ({self.number})"


class Version(NamedTuple):
    """`number`: how many updates were applied. `life`: how often the partition was restored (rule A10)."""

    life: int
    number: int


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request that changes state."""

    job: JobId = JobId(0)
    incarnation: Incarnation = Incarnation(0)
    term: Term = Term(0)
