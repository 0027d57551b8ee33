"""Who a certificate is for: a role in a yard, and a name."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

SCHEME: Final = "spiffe://"
NAME_CHARACTERS_MAX: Final = 128
DOMAIN: Final = "shardyard"
"""Certificates are for ROLE.shardyard, whatever the address of the process: the caller checks the peer's role by it."""
_YARD: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Role(enum.Enum):
    COORDINATOR = "coordinator"
    SERVER = "server"
    AGENT = "agent"
    WORKER = "worker"
    READER = "reader"
    """Reads a job's values: an evaluator, a process that serves rows."""
    OPERATOR = "operator"
    """A person who may do everything that the commands can."""
    VIEWER = "viewer"
    """A person who may look."""
    INVITED = "invited"
    """A process that has an invitation, and no certificate of the yard yet."""


@dataclass(frozen=True, slots=True)
class Identity:
    """`yard`: the id of the yard. `name` tells members of one role apart. `owner`: whose jobs it may touch; empty: all.

    >>> Identity.parse("spiffe://yard-1/worker/ada/w-0")
    Identity(yard='yard-1', role=<Role.WORKER: 'worker'>, name='w-0', owner='ada')
    """

    yard: str
    role: Role
    name: str
    owner: str = ""

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """Raises ValueError."""
        yard, _, path = uri.removeprefix(SCHEME).partition("/")
        role, _, rest = path.partition("/")
        owner, parted, name = rest.rpartition("/")
        if not uri.startswith(SCHEME) or not _YARD.fullmatch(yard):
            raise ValueError(f"{uri!r} is not of the form {SCHEME}YARD/ROLE/NAME or {SCHEME}YARD/ROLE/OWNER/NAME")
        return cls(yard, Role(role), checked_name(name), checked_name(owner) if parted else "")

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.yard}/{self.holder}"

    @property
    def holder(self) -> str:
        """Role, owner and name: what tells it from others of the yard."""
        return "/".join(filter(None, (self.role.value, self.owner, self.name)))

    def may_touch(self, owner: str) -> bool:
        """Whether what is this owner's is for this member too."""
        return self.owner in ("", owner)

    @property
    def host(self) -> str:
        """The name under which the certificate is for a server of TLS."""
        return host_of(self.role.value)

    def __str__(self) -> str:
        return f"{self.role.value} {self.owner}{'/' * bool(self.owner)}{self.name}"


def host_of(role: str) -> str:
    return f"{role}.{DOMAIN}"


def checked_name(name: str) -> str:
    """Raises ValueError for what cannot be the name of a member."""
    if not _NAME.fullmatch(name) or len(name) > NAME_CHARACTERS_MAX:
        raise ValueError(
            f"{name[:NAME_CHARACTERS_MAX]!r} is no name of a member; expected 1 to {NAME_CHARACTERS_MAX} letters, "
            "digits, '.', '_' or '-', beginning with a letter or digit"
        )
    return name
