"""The keys by which members of a replica group find each other: what a torch.distributed Store holds for others.

They travel over the coordinator's connections, so that only members of the group read and write them, and no port is
opened for them. Nothing is recorded: after a restart of the coordinator the members form the next group.

Invariant: only keys of the newest group of a job are kept. Must not know: what a key means.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

from shardyard.domain.errors import TooLarge
from shardyard.domain.ids import JobId

KEYS_MAX: Final = 65_536
GROUP_BYTES_MAX: Final = 64 << 20


@dataclass
class _Group:
    generation: int
    values: dict[str, bytes] = field(default_factory=dict)
    nbytes: int = 0


class GroupKeys:
    """Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[JobId, _Group] = {}

    def put(self, job: JobId, generation: int, key: str, value: bytes) -> None:
        """Raises TooLarge."""
        with self._lock:
            group = self._groups.get(job)
            if group is None or group.generation < generation:
                group = self._groups[job] = _Group(generation)
            nbytes = group.nbytes + len(value) - len(group.values.get(key, b""))
            if len(group.values) >= KEYS_MAX or nbytes > GROUP_BYTES_MAX:
                raise TooLarge(f"{len(group.values)} keys of replica group {generation}, of {nbytes} bytes")
            group.values[key], group.nbytes = value, nbytes

    def get(self, job: JobId, generation: int, keys: list[str]) -> list[bytes] | None:
        """None if some are missing."""
        with self._lock:
            group = self._groups.get(job)
            if group is None or group.generation != generation or any(key not in group.values for key in keys):
                return None
            return [group.values[key] for key in keys]

    def keep_only(self, jobs: frozenset[JobId]) -> None:
        with self._lock:
            self._groups = {job: group for job, group in self._groups.items() if job in jobs}
