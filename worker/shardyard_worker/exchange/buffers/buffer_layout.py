"""Where each variable lies in the payloads of the servers, and the memory of one server's payloads.

Owns: the pieces of variables in a partition, and the state of one server: gradients, values, what is arriving. Must
not know: what is copied when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shardyard.domain.errors import NotShareable
from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.layout.layouts import JobLayout, PartitionLayout
from shardyard.domain.pushes import PushPart
from shardyard.domain.variables import DType
from shardyard.transport.shared_memory import AttachedMemory, SharedMemory
from shardyard_worker.exchange.buffers.device_copies import DeviceCopies, tensor_of
from shardyard_worker.exchange.buffers.partial_reply import PartialReply
from shardyard_worker.exchange.buffers.tensor_types import TORCH_DTYPES

Bytes = npt.NDArray[np.uint8]
Key = tuple[int, int]
"""Where a partition's values lie: (region, byte) of the server's shared memory; (-1, 0) and (-2, 0) are the two buffers
for values that come over a stream."""


@dataclass(frozen=True)
class Piece:
    """Adjacent blocks of one variable in one partition: elements [offset, offset + length) of the variable, at byte
    `start` of the partition's payload."""

    variable: int
    offset: int
    length: int
    start: int
    dtype: DType

    @property
    def stop(self) -> int:
        return self.start + self.length * self.dtype.item_bytes

    def of(self, payload: Bytes) -> torch.Tensor:
        return tensor_of(payload[self.start : self.stop]).view(TORCH_DTYPES[self.dtype])


def pieces_of(layout: JobLayout, part: PartitionLayout) -> tuple[Piece, ...]:
    found: list[Piece] = []
    for block in part.blocks:
        dtype = layout.variables[block.variable].dtype
        last = found[-1] if found else None
        if last is not None and (last.variable, last.offset + last.length, last.stop) == (
            block.variable,
            block.offset,
            block.position,
        ):
            found[-1] = Piece(last.variable, last.offset, last.length + block.length, last.start, dtype)
        else:
            found.append(Piece(block.variable, block.offset, block.length, block.position, dtype))
    return tuple(found)


@dataclass
class PartValues:
    """A partition's payload of one version, and a tensor for each of its pieces."""

    key: Key
    tensors: tuple[torch.Tensor, ...]


Version = Mapping[Incarnation, Sequence[PartValues]]
"""The values of all servers at one time. Two pulls later their memory is reused."""


class Late(NamedTuple):
    """Bytes [begin, end) of a server's answer that have not arrived."""

    arrival: PartialReply
    begin: int
    end: int


class Span(NamedTuple):
    """Bytes [begin, end) of a server's payload, multiples of 64."""

    server: Incarnation
    begin: int
    end: int


@dataclass
class ServerBuffers:
    """The buffers of one server: its partitions in order, where each begins in the payload, and their pieces.

    `whole`, `empty`: a push of all, and of nothing. `shadow`: the values that coded differences are added to.
    `current`, `arrival`: the version that is used, and the rest of it, if it is still arriving; `incoming`, `arriving`:
    the next version. `known`: all tensors made so far. `attached`: pinned memory of the server."""

    server: Incarnation
    partitions: tuple[PartitionId, ...]
    begins: tuple[int, ...]
    nbytes: int
    pieces: tuple[tuple[Piece, ...], ...]
    whole: tuple[PushPart, ...]
    empty: tuple[PushPart, ...]
    memory: SharedMemory | None
    gradients: Bytes
    stream_buffers: list[Bytes] = field(default_factory=list)
    attached: list[AttachedMemory] = field(default_factory=list)
    shadow: Bytes | None = None
    current: list[PartValues] = field(default_factory=list)
    incoming: list[PartValues] = field(default_factory=list)
    arrival: PartialReply | None = None
    arriving: PartialReply | None = None
    known: dict[tuple[int, Key], PartValues] = field(default_factory=dict)

    def values(self, index: int, key: Key, payload: Bytes) -> PartValues:
        """The tensors of partition `index` at a place. They are cached, since servers reuse places."""
        found = self.known.get((index, key))
        if found is None:
            found = PartValues(key, tuple(piece.of(payload) for piece in self.pieces[index]))
            self.known[index, key] = found
        return found


@dataclass(frozen=True)
class Where:
    """Where a piece of a variable lies: server, index of the partition there, index of the piece in the partition."""

    buffers: ServerBuffers
    part: int
    number: int
    piece: Piece


def free_stream_buffer(buffers: ServerBuffers) -> int:
    """The index of the stream buffer that does not hold the current version."""
    return 1 if buffers.current and buffers.current[0].key == (-1, 0) else 0


def gradient_memory(
    nbytes: int, shareable: bool, copies: DeviceCopies | None, *, at_once: bool
) -> tuple[SharedMemory | None, Bytes]:
    """`at_once`: allocates all pages now."""
    if shareable and nbytes:
        try:
            memory = SharedMemory(nbytes, read_only=True)
            if at_once:
                memory.populate(0, nbytes)
        except NotShareable:
            return None, zeros(nbytes, copies)
        if copies is not None:
            copies.pin(memory.bytes)
        return memory, memory.bytes
    return None, zeros(nbytes, copies)


def zeros(nbytes: int, copies: DeviceCopies | None) -> Bytes:
    return np.zeros(nbytes, np.uint8) if copies is None else copies.memory(nbytes)


def absent_blocks(part: PartitionLayout, absent: frozenset[int]) -> tuple[int, ...]:
    return tuple(index for index, block in enumerate(part.blocks) if block.variable in absent)
