"""A replica group as torch.distributed's default group, for what torch runs over that: DTensor, FSDP2, pipelines.

torch waits without a bound, in code that is not ours. A member that has died closes its connections, so the others fail
at once. One that is frozen does not: then the coordinator declares it dead, and a thread here closes this worker's
connections. So no wait outlives its group.

Owns: torch.distributed's default group in this process while the replica group lasts. Must not know: what torch sends.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import threading
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from shardyard.domain.errors import InvalidRequest, ShardyardError
from shardyard_worker.replicas.collectives import SLICE, Collectives
from shardyard_worker.replicas.group_store import GroupLost

BACKEND: Final = "shardyard"
_OF_CONNECTIONS: Final = ("/gloo/", "Application timeout caused pair closure")
"""gloo has no class of its own for errors of connections. Their messages begin with its source file, but for one."""


def is_of_connections(error: RuntimeError) -> bool:
    """Whether gloo has raised it, since the group has lost a member."""
    return any(words in str(error) for words in _OF_CONNECTIONS)


_NUMBERS = itertools.count()


def mesh_of(group: Any) -> DeviceMesh:
    """The members of torch's default group, for DTensor and FSDP2. Each mesh has a name of its own: torch keeps what it
    computes for a mesh, such as this member's place, for all meshes that are equal, and in a later group of as many
    members the place may be another."""
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"members_{next(_NUMBERS)}",))


class DefaultGroup:
    """Of at least two members of a replica group, of which this is one. For the thread that trains."""

    def __init__(self, collectives: Collectives, group: Any, *others: Collectives) -> None:
        """`group`: what torch calls; the collectives' own process group, or one that is built on it. `others`: what is
        waited for in the same way. Raises InvalidRequest if the script uses torch.distributed itself."""
        self._collectives = collectives
        self._gloo = {each: each.process_group for each in (collectives, *others)}
        self._has_ended = threading.Event()
        if dist.is_initialized():
            raise InvalidRequest(
                "torch.distributed.init_process_group in a job that forms torch's default group itself",
                why="the workers of the job are torch.distributed's default group in this process",
                todo="leave it out: the job connects its workers by itself",
            )
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, lambda _, group: group, extended_api=True, devices=["cpu"])
        store = HashStore()  # members are connected already
        size = collectives.size
        dist.init_process_group(BACKEND, store=store, rank=collectives.place, world_size=size, pg_options=group)
        self._world = dist.group.WORLD
        threading.Thread(target=self._watch, name="default-group-watch", daemon=True).start()

    @property
    def world(self) -> Any:
        """torch's default group."""
        return self._world

    def lost(self, error: RuntimeError) -> GroupLost:
        return GroupLost(f"a member of the replica group is gone: {str(error).splitlines()[0][:200]}")

    def end(self) -> None:
        """Ends all transfers, and gives torch.distributed back."""
        self._has_ended.set()
        self._close_connections()
        if dist.is_initialized() and dist.group.WORLD is self._world:
            dist.destroy_process_group()

    def _watch(self) -> None:
        while not self._has_ended.wait(SLICE.total_seconds()):
            try:
                self._collectives.check()
            except (ShardyardError, GroupLost):
                self._close_connections()
                return

    def _close_connections(self) -> None:
        """gloo ends all transfers of a group when one is not there in time; so this waits for one that never comes."""
        for each, gloo in self._gloo.items():
            nobody = (each.place + 1) % each.size
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], nobody, _TAG_OF_NOTHING).wait(datetime.timedelta(milliseconds=1))


_TAG_OF_NOTHING: Final = 1 << 30
