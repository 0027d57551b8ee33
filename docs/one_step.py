"""Runs one step of a small job and prints what happened to it: the numbers of docs/internals/one-step.md.

    python docs/one_step.py

Two servers with one partition each, three variables, one worker, one batch of two samples. All of it runs in this
process. The bytes are those that would travel between machines.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Generator, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.transport.in_process import InProcessNetwork, InProcessPeer
from shardyard.wire import frames, methods
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_launcher.yard import in_process

SETTINGS = {
    "job.partitions": 2,
    "job.checkpoint.url": "never",
    "yard.servers": 2,
    "worker.same_host": "never",
    "log.level": "error",
}


class Model(torch.nn.Module):
    """y = scale * (weight x + bias), all parameters 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 2))
        self.bias = torch.nn.Parameter(torch.ones(2))
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (x @ self.weight.T + self.bias)


class Tap:
    """What passed between the worker, the coordinator and the servers."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any, bytes]] = []
        self.answers: list[tuple[str, Any, Any]] = []

    def network(self) -> InProcessNetwork:
        self.net = TappedNetwork()
        self.net.tap = self
        return self.net

    def exchanges(self, address: str) -> list[tuple[bytes, Any]]:
        sent = [data for at, method, data in self.requests if (at, method) == (address, methods.PUSH_PULL)]
        received = [answer for at, method, answer in self.answers if (at, method) == (address, methods.PUSH_PULL)]
        return list(zip(sent, received, strict=True))


class TappedPeer(InProcessPeer):
    tap: Tap

    def run(self, method: Any, sent: bytes | Iterable[bytes], descriptors: Any = None) -> Generator[Any, None, None]:
        def kept(messages: Iterable[bytes]) -> Iterator[bytes]:
            for message in messages:
                self.tap.requests.append((self._address, method, message))
                yield message

        if isinstance(sent, bytes):
            (sent,) = kept([sent])
            answers = super().run(method, sent, descriptors)
        else:
            answers = super().run(method, kept(sent), descriptors)
        for answer in answers:
            self.tap.answers.append((self._address, method, answer))
            yield answer


class TappedNetwork(InProcessNetwork):
    tap: Tap

    def connect(self, address: str, *, name: str, unavailable: Any = sy.errors.ServerUnavailable) -> InProcessPeer:
        peer = TappedPeer(self, address, name, unavailable)
        peer.tap = self.tap
        return peer


def one_step() -> Iterator[str]:
    tap = Tap()
    with mock.patch.object(in_process, "InProcessNetwork", tap.network), sy.connect(settings=SETTINGS) as job:
        model = Model()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        data = TensorDataset(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2, 2))
        for x, target in job.batches(data, batch_size=2):
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            gradients = {name: gradient.tolist() for name, gradient in gradients.items() if gradient is not None}
            optimizer.step()

            yield from partitions(tap)
            yield "gradients"
            yield from (f"  {name}: {gradient}" for name, gradient in gradients.items())
            for address in ("in-process:server-0", "in-process:server-1"):
                yield from exchange(address, *tap.exchanges(address)[-1])
            yield "parameters after the step"
            yield from (f"  {name}: {parameter.tolist()}" for name, parameter in model.named_parameters())
            yield from same_push_again(tap, "in-process:server-0")


def partitions(tap: Tap) -> Iterator[str]:
    request = next(data for _, method, data in tap.requests if method is methods.CREATE_PARTITIONS)
    layout = wire.CreatePartitionsRequest.FromString(request).layout
    for partition in layout.partitions:
        yield f"partition {partition.partition}: {partition.payload_bytes} bytes"
        for block in partition.blocks:
            variable = layout.variables[block.variable].name
            yield f"  {variable}: {block.length} elements from byte {block.position}"


def exchange(address: str, sent: bytes, answer: frames.Frame) -> Iterator[str]:
    frame = wire.PushFrame.FromString(sent)
    header, name, (part,) = frame.header, frame.header.name, frame.header.parts
    shard = name.source.data_shard
    yield f"to {address}: {len(sent)} bytes, of which header {header.ByteSize()}, payload {len(frame.data)}"
    yield f"  name: data shard {shard.feed}.{shard.epoch}.{shard.index} #{name.first}, token {name.token}"
    yield f"  part: partition {part.partition}; weight {header.weight:g}; lr {header.groups[0].values[0]:g}"
    yield f"  payload begins: {floats(frame.data)}"
    said = wire.PullHeader.FromString(answer.header)
    yield f"  answer: header {len(answer.header)} bytes, payload {len(answer.data)} bytes"
    yield f"  {outcome(said.push.parts[0])}"
    yield f"  values begin: {floats(answer.data)}"


def same_push_again(tap: Tap, address: str) -> Iterator[str]:
    latest, _ = tap.exchanges(address)[-1]
    frame = wire.PushFrame.FromString(latest)
    frame.header.ClearField("pull")
    frame.header.ClearField("plan")
    peer = tap.net.connect(address, name="server")
    push = frames.Frame(frame.header.SerializeToString(), 0, frame.data)
    reply = peer.send(methods.PUSH, [push], timeout_ms=1_000)
    yield f"the same push again, to {address}"
    yield f"  {outcome(reply.parts[0])}"


def outcome(part: wire.PartReply) -> str:
    said = wire.Outcome.Name(part.outcome).removeprefix("OUTCOME_")
    return f"{said}: next sequence {part.next}, version {part.version.number} of life {part.version.life}"


def floats(data: bytes | memoryview) -> list[float]:
    return list(struct.unpack_from("<4f", data))


if __name__ == "__main__":
    sys.stdout.write("\n".join(one_step()) + "\n")
