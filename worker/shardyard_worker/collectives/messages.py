"""Messages between the members of a replica group, one member to another, as many and as late as they like.

After a batch the members tell each other a few facts: through memory, if they share some. Otherwise a member receives
them in memory that it offers where it first waits for another member, so that the last one to finish need not wait for
the others.

When a connection closes, gloo ends a transfer that has not begun, but neither one of which a part was sent or received,
nor one that it meets the end of the connection with. So this thread calls gloo's wait only for what has been received
as a whole: bytes come in order, so it looks at the last one for a moment. Then another thread waits, which is left
alone with a transfer that does not end.

Owns: the transfers under way. Must not know: what the messages say.
"""

from __future__ import annotations

import ctypes
import datetime
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from shardyard_worker.collectives.collectives import SLICE, Collectives
from shardyard_worker.collectives.group_store import GroupLost

FOREVER: Final = datetime.timedelta(days=365)
"""A member may compute for as long as it likes."""
SENDS_MAX: Final = 16
"""Sends at a time, whose tensors are kept."""
_TAG_OF_FACTS: Final = 1 << 29
_TAG_OF_NOTHING: Final = _TAG_OF_FACTS + 1
"""Of a tensor that nobody sends. gloo refuses to begin to receive it if the connection is closed."""
_TAG_OF_MESSAGES: Final = _TAG_OF_FACTS + 2
_CHECKS_EACH: Final = 10
"""Among so many, one looks at the connections."""
_NOT_COME: Final = 0xFF
"""A tensor's last byte until it has come: few numbers end so."""
_LOOKED_S: Final = 2e-3
"""How long the thread that trains looks at a tensor's last byte. To be woken by another thread takes longer."""
_LOOK_S: Final = 5e-5


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


class Receive:
    """A tensor under way to this worker."""

    def __init__(self, messages: Messages, gloo: Any, tensor: torch.Tensor, place: int, tag: int) -> None:
        """Raises RuntimeError."""
        self._messages = messages
        self._into = tensor
        self._tensor = tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype)
        nbytes = tensor.nbytes
        self._last = ctypes.c_ubyte.from_address(self._tensor.data_ptr() + nbytes - 1) if nbytes else None
        if self._last is not None:
            self._last.value = _NOT_COME
        self.work = gloo.recv([self._tensor], place, tag)

    @property
    def has_come(self) -> bool:
        """Whether all of it has been received. Of some tensors that is not known before `wait` returns."""
        return self._last is not None and self._last.value != _NOT_COME

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:  # noqa: ARG002 - the group ends a wait
        """Raises GroupLost."""
        self._messages.wait(self.work, self)
        if self._into is not self._tensor:
            self._into.copy_(self._tensor)
        return True


class Send:
    """A tensor under way to another worker. Nobody changes it, so nobody waits for it."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self.work = work
        self._tensor = tensor  # gloo reads it until it was sent

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:  # noqa: ARG002
        return True


class Messages:
    """Between the members of `everyone`, at least two. For the thread that trains. Raises GroupLost where the group
    cannot go on."""

    def __init__(self, everyone: Collectives) -> None:
        self._everyone = everyone
        self._others = [at for at in range(everyone.size) if at != everyone.place]
        self._waiter = _Waiter(self._check)
        self._checks = 0
        self._facts = np.zeros((0, 0))
        """What each member says of the step at hand."""
        self._count = 0
        """How many each says of it; 0: that is not known yet."""
        self._receiving: list[Receive] = []
        self._sending: deque[Send] = deque()
        """What may not be sent yet, from the oldest on."""

    # ---- transfers

    def send(self, gloo: Any, tensor: torch.Tensor, place: int, tag: int) -> Send:
        """Begins to send a contiguous tensor that nobody changes to the member at that place of `gloo`, a process group
        of these members or some of them."""
        while len(self._sending) >= SENDS_MAX:
            self.wait(self._sending.popleft().work)
        sent = self._sent(gloo, tensor, place, tag)
        self._sending.append(sent)
        return sent

    def _sent(self, gloo: Any, tensor: torch.Tensor, place: int, tag: int) -> Send:
        try:
            return Send(gloo.send([tensor], place, tag), tensor)
        except RuntimeError as error:
            raise _lost(error) from error

    def receive(self, gloo: Any, tensor: torch.Tensor, place: int, tag: int) -> Receive:
        """Begins to receive a tensor from the member at that place of `gloo`."""
        try:
            return Receive(self, gloo, tensor, place, tag)
        except RuntimeError as error:
            raise _lost(error) from error

    def wait(self, work: Any, receive: Receive | None = None) -> None:
        """Returns when the transfer has ended. `receive`: what is received by it."""
        if self._count and not self._receiving:  # here no other member waits for this one
            self._receive_facts()
        until = time.monotonic() + _LOOKED_S
        while receive is not None and not receive.has_come and time.monotonic() < until:
            time.sleep(_LOOK_S)
        try:
            work.wait() if receive is not None and receive.has_come else self._waiter.wait(work)
        except RuntimeError as error:
            raise _lost(error) from error

    def _check(self) -> None:
        """Raises GroupLost if the group lacks a member, RuntimeError if a connection is closed."""
        self._everyone.check()
        self._checks += 1
        if self._checks % _CHECKS_EACH == 0:
            for at in self._others:
                self._everyone.process_group.recv([torch.empty(1)], at, _TAG_OF_NOTHING)

    # ---- facts

    def await_facts(self, count: int) -> None:
        """Each other member will say so many facts of the step at hand."""
        self._count = 0 if self._everyone.shares_memory else count

    def _receive_facts(self) -> None:
        self._facts = np.zeros((self._everyone.size, self._count))
        gloo, rows = self._everyone.process_group, torch.from_numpy(self._facts)
        self._receiving = [self.receive(gloo, rows[at], at, _TAG_OF_FACTS) for at in self._others]

    def sum_facts(self, said: list[float]) -> list[float]:
        """The sum over all members, of the same bits in each. Returns when all have called this."""
        own, gloo = torch.tensor(said, dtype=torch.float64), self._everyone.process_group
        if self._everyone.shares_memory:
            self._everyone.wait(self._everyone.sum(own))
            self._sending.clear()
            of_all: list[float] = own.tolist()
            return of_all
        self._count = len(said)
        if not self._receiving:
            self._receive_facts()
        sent = [self._sent(gloo, own, at, _TAG_OF_FACTS) for at in self._others]
        self._facts[self._everyone.place] = said
        for each in self._receiving:
            each.wait()
        self._receiving, self._count = [], 0
        self._sending = deque(sent)  # a member that says its facts has received what was sent to it before
        found: list[float] = self._facts.sum(0).tolist()
        return found

    # ---- messages of one member to all others

    def tell(self, message: torch.Tensor) -> None:
        """Sends a tensor that nobody changes to all other members, which `hear` it."""
        for at in self._others:
            self.send(self._everyone.process_group, message, at, _TAG_OF_MESSAGES)

    def hear(self, message: torch.Tensor, place: int) -> None:
        """Waits for what the member at that place tells next."""
        self.receive(self._everyone.process_group, message, place, _TAG_OF_MESSAGES).wait()

    def end(self) -> None:
        """No transfer follows."""
        self._waiter.end()


def _lost(error: RuntimeError) -> GroupLost:
    return GroupLost(f"a member of the replica group is gone: {str(error).splitlines()[0][:200]}")
