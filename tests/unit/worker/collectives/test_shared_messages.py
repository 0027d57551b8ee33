"""Tensors arrive whole and in order through memory that members on one machine share, and a loss ends the wait."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shardyard_worker.collectives.shared_members import LARGEST_BYTES, SharedMembers
from shardyard_worker.collectives.shared_messages import RING_BYTES, SharedMessages
from tests.support.shared_members import Processes, processes

Run = Callable[[SharedMessages], object]
SIZES = [1, 7, 100_003, LARGEST_BYTES // 4, 3, LARGEST_BYTES // 4 - 1, LARGEST_BYTES // 4, *[50_001] * 90]
MANY = [LARGEST_BYTES // 4] * 5
assert 4 * sum(MANY) > 2 * RING_BYTES, "more than there is room for"


@pytest.fixture
def members() -> Iterator[Callable[..., Processes]]:
    def messaging(run: Run) -> Callable[[SharedMembers], object]:
        return lambda shared: run(SharedMessages(shared, 0))

    with processes() as start:
        yield lambda *runs, **more: start(*map(messaging, runs), nbytes=len(runs) * RING_BYTES, **more)


def tensor_of(sender: int, number: int, size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([sender, number]).standard_normal(size).astype(np.float32))


def receive_all(messages: SharedMessages, sender: int, sizes: list[int]) -> list[bool]:
    found = []
    for number, size in enumerate(sizes):
        into = torch.from_numpy(np.zeros(size, np.float32))
        messages.receive(into, sender).wait()
        found.append(np.array_equal(into.numpy(), tensor_of(sender, number, size).numpy()))
    return found


def send_all(messages: SharedMessages, receiver: int, sender: int, sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        messages.send(tensor_of(sender, number, size), receiver)


def test_tensors_arrive_in_their_order(members: Callable[..., Processes]) -> None:
    """From two senders, which have no room for all at once."""

    def send(place: int) -> Run:
        def run(messages: SharedMessages) -> None:
            send_all(messages, 2, place, SIZES)
            messages.flush()

        return run

    def receive(messages: SharedMessages) -> list[list[bool]]:
        return [receive_all(messages, place, SIZES) for place in (1, 0)]

    assert members(send(0), send(1), receive).result(2) == [[True] * len(SIZES)] * 2


def test_members_that_both_lack_room_go_on(members: Callable[..., Processes]) -> None:
    """Each sends more than there is room for before it receives. What is left is written while it waits."""

    def run(place: int) -> Run:
        def both(messages: SharedMessages) -> list[bool]:
            send_all(messages, 1 - place, place, MANY)
            found = receive_all(messages, 1 - place, MANY)
            messages.flush()
            return found

        return both

    assert members(run(0), run(1)).results() == [[True] * len(MANY)] * 2


def test_tensors_are_waited_for_in_any_order(members: Callable[..., Processes]) -> None:
    sizes = [5, 100_003, 8]

    def send(messages: SharedMessages) -> None:
        send_all(messages, 1, 0, sizes)

    def receive(messages: SharedMessages) -> list[bool]:
        into = [torch.from_numpy(np.zeros(size, np.float32)) for size in sizes]
        begun = [messages.receive(each, 0) for each in into]
        for each in reversed(begun):
            each.wait()
        return [bool(each.equal(tensor_of(0, at, each.numel()))) for at, each in enumerate(into)]

    assert members(send, receive).result(1) == [True] * 3


@pytest.mark.parametrize(
    "sent",
    [
        torch.tensor(3.0, dtype=torch.bfloat16),
        torch.arange(6).view(2, 3),
        torch.arange(12.0).view(3, 4).t(),
        torch.tensor([True, False]),
    ],
    ids=["one", "whole numbers", "transposed", "booleans"],
)
def test_tensor_of_any_kind_arrives(members: Callable[..., Processes], sent: torch.Tensor) -> None:
    """Also where memory has gaps."""

    def receive(messages: SharedMessages) -> bool:
        apart = torch.zeros(*sent.shape, 2, dtype=sent.dtype)[..., 0]
        messages.receive(apart, 0).wait()
        return bool(apart.equal(sent))

    assert members(lambda messages: messages.send(sent, 1), receive).result(1) is True


@pytest.mark.parametrize(("tensor", "fits"), [(torch.zeros(0), False), (torch.zeros(3), True)])
def test_what_goes_through_memory(tensor: torch.Tensor, fits: bool) -> None:
    assert SharedMessages.fits(tensor) is fits
    assert not SharedMessages.fits(torch.empty(LARGEST_BYTES // 4 + 1))


@pytest.mark.parametrize("waits", ["for a tensor", "for room"])
def test_member_that_dies_ends_the_wait(members: Callable[..., Processes], waits: str) -> None:
    def receive(messages: SharedMessages) -> Any:
        messages.receive(torch.zeros(2), 1).wait()
        if waits == "for room":
            send_all(messages, 1, 0, MANY)
            messages.flush()
        messages.receive(torch.zeros(2), 1).wait()

    def die(messages: SharedMessages) -> None:
        messages.send(torch.ones(2), 0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert "is gone" in members(receive, die).result(0)
