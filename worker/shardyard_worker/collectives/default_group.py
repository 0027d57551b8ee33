"""A replica group as torch.distributed's default group, for what torch runs over that: DTensor, FSDP2, pipelines.

torch waits without a bound, in code that is not ours. So what it waits for are works of this module, which wait as
`Collectives` does: a wait ends when the group lacks a member, whatever gloo does meanwhile.

Owns: torch.distributed's default group in this process while the replica group lasts. Must not know: what torch sends.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from shardyard.domain.errors import InvalidRequest
from shardyard_worker.collectives.collectives import Collectives

BACKEND: Final = "shardyard"
_NUMBERS = itertools.count()


def mesh_of(group: Any) -> DeviceMesh:
    """The members of torch's default group, for DTensor and FSDP2. Each mesh has a name of its own: torch keeps what it
    computes for a mesh, such as this member's place, for all meshes that are equal, and in a later group of as many
    members the place may be another."""
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"members_{next(_NUMBERS)}",))


class _Work(dist.Work):
    """Collectives under way. `then`: what follows when they have ended."""

    def __init__(self, collectives: Collectives, works: Sequence[Any], then: Callable[[], object]) -> None:
        super().__init__()
        self._collectives = collectives
        self._works = works
        self._then = then

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:  # noqa: ARG002 - the group ends a wait
        """Raises GroupLost."""
        works, self._works = self._works, ()
        for work in works:
            self._collectives.wait(work)
        if works:
            self._then()
        return True


class CollectiveGroup(dist.ProcessGroup):
    """What torch calls for collectives of at least two members. For the thread that trains."""

    def __init__(self, collectives: Collectives) -> None:
        super().__init__(collectives.place, collectives.size)  # type: ignore[call-arg]
        self._collectives = collectives
        self._name = ""
        self._carries_out = dist.ProcessGroup(HashStore(), collectives.place, collectives.size)
        gloo, kind = collectives.process_group, dist.ProcessGroup.BackendType.GLOO
        self._carries_out._register_backend(torch.device("cpu"), kind, gloo)

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def _begin(self, name: str, *given: Any) -> _Work:
        """Raises GroupLost."""
        collectives, begin = self._collectives, getattr(self._carries_out, name)
        return _Work(collectives, [collectives.begin(lambda: begin(*given))], lambda: None)

    def reduce_and_cut(self, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], kind: Any) -> _Work:
        """A reduce-scatter, which gloo does not have: each member gets its part from all others, and reduces it by
        itself. torch's own sums the whole tensors in each member, and waits for that without a bound. Raises
        GroupLost."""
        size = self._collectives.size
        reduce = next(reduce for op, reduce in _REDUCTIONS if kind == op)
        parts = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in given]

        def take() -> None:
            for output, each in zip(outputs, parts, strict=True):
                output.copy_(reduce(each.view(size, *output.shape), 0))

        sizes = [[each.numel() // size] * size for each in given]
        each_of = zip(parts, given, sizes, strict=True)
        works = [self._collectives.exchange(part.view(-1), own.reshape(-1), n, n) for part, own, n in each_of]
        return _Work(self._collectives, works, take)


_REDUCTIONS: Final[tuple[tuple[Any, Callable[[torch.Tensor, int], torch.Tensor]], ...]] = (
    (dist.ReduceOp.SUM, torch.sum),
    (dist.ReduceOp.AVG, torch.mean),
    (dist.ReduceOp.MAX, torch.amax),
    (dist.ReduceOp.MIN, torch.amin),
)


def _forwarded(name: str) -> Callable[..., _Work]:
    return lambda self, *given: self._begin(name, *given)


for _name in (
    *("allreduce", "broadcast", "scatter", "barrier"),
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single"),
    *("_allgather_base", "allgather_into_tensor_coalesced", "alltoall_base"),  # of these three, before torch 2.13
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(CollectiveGroup, _name, _forwarded(_name))
for _name in ("reduce_scatter_single", "_reduce_scatter_base"):
    setattr(CollectiveGroup, _name, lambda self, out, given, opts: self.reduce_and_cut([out], [given], opts.reduceOp))
for _name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
    setattr(CollectiveGroup, _name, lambda self, outs, given, opts: self.reduce_and_cut(outs, given, opts.reduceOp))


class DefaultGroup:
    """Of at least two members of a replica group, of which this is one. For the thread that trains."""

    def __init__(self, group: dist.ProcessGroup, *collectives: Collectives) -> None:
        """`group`: what torch calls, which is built on these. Raises InvalidRequest if the script uses
        torch.distributed itself."""
        self._gloo = {each: each.process_group for each in collectives}
        if dist.is_initialized():
            raise InvalidRequest(
                "torch.distributed.init_process_group in a job that forms torch's default group itself",
                why="the workers of the job are torch.distributed's default group in this process",
                todo="leave it out: the job connects its workers by itself",
            )
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, lambda _, group: group, extended_api=True, devices=["cpu"])
        store = HashStore()  # members are connected already
        dist.init_process_group(BACKEND, store=store, rank=group.rank(), world_size=group.size(), pg_options=group)
        self._world = dist.group.WORLD

    @property
    def world(self) -> Any:
        """torch's default group."""
        return self._world

    def end(self) -> None:
        """Closes this worker's connections, so that the others need not wait for it, and gives torch.distributed
        back."""
        for each, gloo in self._gloo.items():
            # gloo closes all connections of a group when a transfer is not there in time: this one never comes
            nobody = (each.place + 1) % each.size
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], nobody, _TAG_OF_NOTHING).wait(datetime.timedelta(milliseconds=1))
        if dist.is_initialized() and dist.group.WORLD is self._world:
            dist.destroy_process_group()


_TAG_OF_NOTHING: Final = 1 << 30
