"""Messages between the members of a replica group arrive whole, whatever they end with."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import FileStore, ProcessGroupGloo

from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.connection import Connection
from shardyard_worker.collectives.messages import Messages

TAG = 7
MOMENT_S = 60
Run = Callable[[Messages, Collectives], torch.Tensor]


class Members(Collectives):
    """Of two."""

    def __init__(self, store: Path, place: int) -> None:
        self.place, self.size = place, 2
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = datetime.timedelta(seconds=MOMENT_S)
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._connection = Connection(ProcessGroupGloo(FileStore(str(store), 2), place, 2, options))

    def check(self) -> None:
        pass


def between(folder: Path, *members: Run) -> list[torch.Tensor]:
    """What the two return, each in a process of its own."""
    started = []
    for place, member in enumerate(members):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                found = Members(folder / "store", place)
                torch.save(member(Messages(found), found), folder / str(place))
                code = 0
            finally:
                os._exit(code)
        started.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started] == [0, 0]
    return [torch.load(folder / str(place), weights_only=True) for place in range(2)]


@pytest.mark.parametrize(
    "sent",
    [
        torch.arange(6.0),
        torch.tensor([3, -1]),
        torch.tensor([2.0, float("-inf"), -float("nan")]),
        torch.full((5,), 255, dtype=torch.uint8),
        torch.empty(0),
        torch.from_numpy(np.arange(1 << 20)),  # torch itself would start threads, which a fork loses
    ],
    ids=["floats", "ones in all bits", "not finite", "bytes", "nothing", "large"],
)
def test_tensor_arrives_whole(tmp_path: Path, sent: torch.Tensor) -> None:
    def receive(messages: Messages, members: Collectives) -> torch.Tensor:
        whole = torch.zeros_like(sent)
        messages.receive(members.process_group, whole, 0, TAG).wait()
        return whole

    def send(messages: Messages, members: Collectives) -> torch.Tensor:
        messages.send(members.process_group, sent, 1, TAG)
        return torch.tensor(messages.sum_facts([1.0]))

    def receive_and_meet(messages: Messages, members: Collectives) -> torch.Tensor:
        found = receive(messages, members)
        messages.sum_facts([1.0])
        return found

    _, found = between(tmp_path, send, receive_and_meet)
    assert found.numpy().tobytes() == sent.numpy().tobytes()


def test_tensor_arrives_where_memory_has_gaps(tmp_path: Path) -> None:
    sent = torch.arange(6.0).view(2, 3)

    def send(messages: Messages, members: Collectives) -> torch.Tensor:
        messages.send(members.process_group, sent, 1, TAG)
        return torch.tensor(messages.sum_facts([0.0]))

    def receive(messages: Messages, members: Collectives) -> torch.Tensor:
        apart = torch.zeros(2, 6)
        messages.receive(members.process_group, apart[:, ::2], 0, TAG).wait()
        messages.sum_facts([0.0])
        return apart

    _, found = between(tmp_path, send, receive)
    assert torch.equal(found[:, ::2], sent)
    assert not found[:, 1::2].any()


def test_facts_of_all_are_summed(tmp_path: Path) -> None:
    """Also those that end with a number whose bits are all set."""
    ends = [float("nan"), -1.0, 2.5]

    def say(sign: float) -> Run:
        def run(messages: Messages, members: Collectives) -> torch.Tensor:
            messages.await_facts(2)
            return torch.tensor([messages.sum_facts([sign, end]) for end in ends])

        return run

    first, second = between(tmp_path, say(2.0), say(-1.0))
    wanted = torch.tensor([[1.0, 2.0 * end] for end in ends])
    for found in (first, second):
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0, equal_nan=True)


def test_what_one_tells_all_others_hear(tmp_path: Path) -> None:
    told = torch.tensor([4, -1])

    def tell(messages: Messages, members: Collectives) -> torch.Tensor:
        messages.tell(told)
        return torch.tensor(messages.sum_facts([0.0]))

    def hear(messages: Messages, members: Collectives) -> torch.Tensor:
        found = torch.zeros_like(told)
        messages.hear(found, 0)
        messages.sum_facts([0.0])
        return found

    _, heard = between(tmp_path, tell, hear)
    assert torch.equal(heard, told)
