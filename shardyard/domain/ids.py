"""Identifiers: who a message is from, what it is about, and at which version."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType


class _TermedNumber(int):
    """A number that a coordinator gave in one of its terms: term << 32 | n, shown as "term.n"."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self >> 32}.{self & 0xFFFFFFFF}" if self >> 32 else f"{self & 0xFFFFFFFF}"

    def __repr__(self) -> str:
        return str(self)


class JobId(_TermedNumber):
    """A training run; unique over the coordinator's terms."""

    __slots__ = ()


class Incarnation(_TermedNumber):
    """A member's registration; unique over the coordinator's terms. The fence."""

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


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """(life, number of updates applied); each restore raises the life (rule A10)."""

    life: int
    number: int


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request that changes state."""

    job: JobId = JobId(0)
    incarnation: Incarnation = Incarnation(0)
    term: Term = Term(0)
