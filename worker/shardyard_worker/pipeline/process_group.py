"""Sends and receives between the stages of a pipeline, as torch.distributed.pipelining makes them.

torch's schedules use torch.distributed's default group. `StageGroup` is that group, over the collectives of this
worker's replica group.

After the schedule the members tell each other a few facts. A member receives them in memory that it has offered before
the schedule, so that the last member to finish need not wait for the others.

When a connection closes, gloo ends a transfer that has not begun, but neither one of which a part was sent or received,
nor one that it meets the end of the connection with. So a thread waits for transfers, which is left alone with the one
that does not end.

Owns: the transfers under way. Must not know: stages, schedules.
"""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from shardyard_worker.replicas.collectives import SLICE, Collectives
from shardyard_worker.replicas.default_group import DefaultGroup
from shardyard_worker.replicas.group_store import GroupLost

FOREVER: Final = datetime.timedelta(days=365)
"""A stage may compute for as long as it likes."""


class _Waiter:
    """Waits for one transfer at a time. `check`: called in between; what it raises ends the wait. No other may
    follow then."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="transfers", daemon=True).start()

    def wait(self, work: Any) -> None:
        """Raises RuntimeError."""
        self._asked.put(work)
        while True:
            try:
                failure = self._answers.get(timeout=SLICE.total_seconds())
            except queue.Empty:
                self._check()
                continue
            if failure is not None:
                raise failure
            return

    def end(self) -> None:
        self._asked.put(None)

    def _run(self) -> None:
        while (work := self._asked.get()) is not None:
            try:
                work.wait(FOREVER)
            except RuntimeError as error:
                self._answers.put(error)
            else:
                self._answers.put(None)


class _Transfer:
    """A transfer under way. `into`: where a received tensor goes, if gloo cannot write it there."""

    def __init__(self, group: StageGroup, work: Any, tensor: torch.Tensor, into: torch.Tensor | None = None) -> None:
        self._group = group
        self._work = work
        self._tensor = tensor  # gloo reads or writes it until the transfer has ended
        self._into = into

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:  # noqa: ARG002 - the group ends a wait
        self._group.wait(self._work)
        if self._into is not None:
            self._into.copy_(self._tensor)
        return True


class StageGroup(dist.ProcessGroup):
    """Of a worker with a stage. For the thread that trains. `inside`: the workers of this pipeline, at least two.
    `everyone`: the members of the replica group, which may have other pipelines beside it."""

    def __init__(self, inside: Collectives, everyone: Collectives) -> None:
        """Raises InvalidRequest if the script uses torch.distributed itself."""
        super().__init__(inside.place, inside.size)  # type: ignore[call-arg]
        self._gloo = inside.process_group
        self._everyone = everyone
        self._default = DefaultGroup(self, inside, everyone)
        self._waiter = _Waiter(self._check)
        self._checks = 0
        self._facts = torch.zeros(0)
        """What each member says of the step at hand."""
        self._receiving: list[_Transfer] = []
        self._sending: list[_Transfer] = []

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> Any:
        return self._sent(self._gloo, tensors[0].detach().contiguous(), dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> Any:
        into = tensors[0].detach()
        if into.is_contiguous():
            return self._received(self._gloo, into, src, tag)
        return self._received(self._gloo, torch.empty(into.shape, dtype=into.dtype), src, tag, into)

    def _sent(self, gloo: Any, tensor: torch.Tensor, place: int, tag: int) -> _Transfer:
        return self._begun(lambda: gloo.send([tensor], place, tag), tensor)

    def _received(
        self, gloo: Any, tensor: torch.Tensor, place: int, tag: int, into: torch.Tensor | None = None
    ) -> _Transfer:
        return self._begun(lambda: gloo.recv([tensor], place, tag), tensor, into)

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
        self._facts = torch.zeros(self._everyone.size, count, dtype=torch.float64)
        gloo = self._everyone.process_group
        self._receiving = [self._received(gloo, self._facts[at], at, _TAG_OF_FACTS) for at in self._others]

    def sum_facts(self, said: list[float]) -> list[float]:
        """The sum over all members, of the same bits in each. Returns when all have called this."""
        self.receive_facts(len(said))
        own, gloo = torch.tensor(said, dtype=torch.float64), self._everyone.process_group
        self._sending = [self._sent(gloo, own, at, _TAG_OF_FACTS) for at in self._others]
        self._facts[self._everyone.place] = own
        for each in self._receiving:
            each.wait()
        self._receiving = []
        found: list[float] = self._facts.sum(0).tolist()
        return found

    @property
    def _others(self) -> list[int]:
        return [at for at in range(self._everyone.size) if at != self._everyone.place]

    def wait(self, work: Any) -> None:
        """Returns when the transfer has ended. Raises GroupLost."""
        try:
            self._waiter.wait(work)
        except RuntimeError as error:
            raise self.lost(error) from error

    def _check(self) -> None:
        """Raises GroupLost if the group lacks a member, RuntimeError if a connection is closed."""
        self._everyone.check()
        self._checks += 1
        if self._checks % _CHECKS_EACH == 0:
            for at in self._others:
                self._everyone.process_group.recv([torch.empty(1)], at, _TAG_OF_NOTHING)

    def lost(self, error: RuntimeError) -> GroupLost:
        return GroupLost(f"a member of the replica group is gone: {str(error).splitlines()[0][:200]}")

    def end(self) -> None:
        """Ends all transfers, and gives torch.distributed back."""
        self._default.end()
        self._waiter.end()


_TAG_OF_FACTS: Final = 1 << 29
_TAG_OF_NOTHING: Final = _TAG_OF_FACTS + 1
"""Of a tensor that nobody sends. gloo refuses to begin to receive it if the connection is closed."""
_CHECKS_EACH: Final = 10
"""Among so many, one looks at the connections."""
