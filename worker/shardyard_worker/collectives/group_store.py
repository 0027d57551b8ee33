"""The store by which members of a replica group find each other: torch.distributed's Store, over the coordinator.

torch's own TCPStore would open a port without TLS. Must not know: what the keys mean.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from torch.distributed import Store  # type: ignore[attr-defined]

from shardyard.domain.errors import StaleGeneration, StaleToken
from shardyard.domain.replica_groups import ReplicaGroup
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.session.session import Session

CONNECT_S: Final = 30.0
"""After which a group is given up whose members do not find each other: a coordinator that has restarted has no keys of
before."""


class GroupLost(MapChanged):
    """The group has lost a member, or this worker: the collective counts for nobody. The next group continues."""


def no_place() -> GroupLost:
    return GroupLost("this worker has left its replica group")


@contextlib.contextmanager
def while_newest() -> Iterator[None]:
    """Raises GroupLost if there is a later group, or if the job has groups no more."""
    try:
        yield
    except (StaleToken, StaleGeneration) as error:
        raise GroupLost(f"this worker's replica group is over: {error.what}") from error


class GroupStore(Store):
    """For one group. torch's backends call it while they connect. `check` is called in waits; what it raises ends
    them. `prefix`: of all keys."""

    def __init__(self, session: Session, group: ReplicaGroup, check: Callable[[], None], prefix: str) -> None:
        super().__init__()
        self._session = session
        self._group = group
        self._check = check
        self._prefix = prefix

    def under(self, prefix: str) -> GroupStore:
        """The same store, whose keys have one more prefix."""
        return GroupStore(self._session, self._group, self._check, self._prefix + prefix)

    def set(self, key: str, value: bytes | str) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        request = wire.PutGroupKeyRequest(
            caller=self._caller, generation=self._group.generation, key=self._prefix + key, value=content
        )
        with while_newest():
            self._session.ask(methods.PUT_GROUP_KEY, request, check=self._check)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = [self._prefix + key for key in keys]
        request = wire.GetGroupKeysRequest(caller=self._caller, generation=self._group.generation, keys=names)
        give_up = time.monotonic() + CONNECT_S
        with self._session.wait_registry.over(lambda: f"members of replica group {self._group.generation} to connect"):
            while True:
                with while_newest():
                    reply = self._session.ask(methods.GET_GROUP_KEYS, request, check=self._check)
                if not reply.retry_ms:
                    return list(reply.values)
                self._check()
                if time.monotonic() > give_up:
                    raise GroupLost(f"the members of replica group {self._group.generation} have not found each other")
                time.sleep(reply.retry_ms / 1000)

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        del timeout  # `check` ends the wait
        self.multi_get(keys)

    @property
    def _caller(self) -> Any:
        return common_messages.caller_to_wire(self._session.caller)
