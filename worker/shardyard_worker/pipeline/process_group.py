"""Sends and receives between the stages of a pipeline, as torch.distributed.pipelining makes them.

torch's schedules use the process group of torch.distributed and wait for each transfer without a bound. `StageGroup` is
such a group over the collectives of this worker's replica group. A member that has died closes its connections, so the
others fail at once. One that is frozen does not: then the coordinator declares it dead, and a thread here closes this
worker's connections. So no wait outlives its group.

After the schedule the members tell each other a few facts. A member receives them in memory that it has offered before
the schedule, so that the last member to finish need not wait for the others.

Owns: torch.distributed's default group in this process while the replica group lasts. Must not know: stages, schedules.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shardyard.domain.errors import InvalidRequest, ShardyardError
from shardyard_worker.replicas.collectives import SLICE, Collectives
from shardyard_worker.replicas.group_store import GroupLost

BACKEND: Final = "shardyard"
FOREVER: Final = datetime.timedelta(days=365)
"""A stage may compute for as long as it likes."""


class _Transfer:
    """A transfer under way. `into`: where a received tensor goes, if gloo cannot write it there."""

    def __init__(self, group: StageGroup, work: Any, tensor: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self._group = group
        self._work = work
        self._tensor = tensor  # gloo reads or writes it until the transfer has ended
        self._into = into

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:  # noqa: ARG002 - the group ends a wait
        try:
            self._work.wait(FOREVER)
        except RuntimeError as error:
            raise self._group.lost(error) from error
        if self._into is not None:
            self._into.copy_(self._tensor)
        return True


class StageGroup(dist.ProcessGroup):
    """Of the member at this place of a replica group of at least two. For the thread that trains."""

    def __init__(self, collectives: Collectives) -> None:
        """Raises InvalidRequest if the script uses torch.distributed itself."""
        super().__init__(collectives.place, collectives.size)  # type: ignore[call-arg]
        self._collectives = collectives
        self._gloo = collectives.process_group
        self._has_ended = threading.Event()
        self._facts = torch.zeros(0)
        """What each member says of the step at hand."""
        self._receiving: list[_Transfer] = []
        self._sending: list[_Transfer] = []
        if dist.is_initialized():
            raise InvalidRequest(
                "torch.distributed.init_process_group in a job whose job.strategy is pipeline",
                why="the pipeline is torch.distributed's default group in this process",
                todo="leave it out: the job connects its workers by itself",
            )
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, lambda _, group: group, extended_api=True, devices=["cpu"])
        store = HashStore()  # members are connected already
        dist.init_process_group(BACKEND, store=store, rank=self.rank(), world_size=self.size(), pg_options=self)
        threading.Thread(target=self._watch, name="pipeline-watch", daemon=True).start()

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        sent = tensors[0].detach().contiguous()
        return self._begun(lambda: self._gloo.send([sent], dst, tag), sent)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Any:
        into = tensors[0].detach()
        if into.is_contiguous():
            return self._begun(lambda: self._gloo.recv([into], src, tag), into)
        received = torch.empty(into.shape, dtype=into.dtype)
        return self._begun(lambda: self._gloo.recv([received], src, tag), received, into)

    def _begun(self, begin: Any, tensor: torch.Tensor, into: torch.Tensor | None = None) -> _Transfer:
        try:
            return _Transfer(self, begin(), tensor, into)
        except RuntimeError as error:
            raise self.lost(error) from error

    def receive_facts(self, count: int) -> None:
        """Begins to receive so many facts of the step at hand from each other member."""
        if self._receiving:
            return
        for each in self._sending:
            each.wait()
        self._facts = torch.zeros(self.size(), count, dtype=torch.float64)
        self._receiving = [self.recv([self._facts[at]], at, _TAG_OF_FACTS) for at in self._others]

    def sum_facts(self, said: list[float]) -> list[float]:
        """The sum over all members, of the same bits in each. Returns when all have called this."""
        self.receive_facts(len(said))
        own = torch.tensor(said, dtype=torch.float64)
        self._sending = [self.send([own], at, _TAG_OF_FACTS) for at in self._others]
        self._facts[self.rank()] = own
        for each in self._receiving:
            each.wait()
        self._receiving = []
        found: list[float] = self._facts.sum(0).tolist()
        return found

    @property
    def _others(self) -> list[int]:
        return [at for at in range(self.size()) if at != self.rank()]

    def lost(self, error: RuntimeError) -> GroupLost:
        return GroupLost(f"a stage of the pipeline is gone: {str(error).splitlines()[0][:200]}")

    def end(self) -> None:
        """Ends all transfers, and gives torch.distributed back."""
        self._has_ended.set()
        self._close_connections()
        if dist.is_initialized() and dist.group.WORLD is self:
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
        nobody = (self.rank() + 1) % self.size()
        with contextlib.suppress(RuntimeError):
            self._gloo.recv([torch.empty(1)], nobody, _TAG_OF_NOTHING).wait(datetime.timedelta(milliseconds=1))


_TAG_OF_FACTS: Final = 1 << 29
_TAG_OF_NOTHING: Final = 1 << 30
