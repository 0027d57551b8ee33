"""Flat buffers between the model's tensors and the payloads of partitions.

Owns: per server one buffer of gradients and two of values, laid out as its payloads lie on the wire, and a view for
each block. Invariants: a pull lands in the buffer that is not current, and becomes current as a whole, over all
servers; so the values of the current version can be put back into the model at any time (rule B5). Must not know:
servers' addresses, names of pushes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy

from shardyard.ground.errors import DTypeMismatch, ShapeMismatch, UnsupportedModel
from shardyard.ground.types import (
    Block,
    DType,
    Incarnation,
    JobLayout,
    PartitionId,
    PartitionMap,
    PushPart,
    VariableKind,
    VariableSpec,
)

Bytes = npt.NDArray[np.uint8]

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT64: torch.float64,
    DType.INT64: torch.int64,
    DType.INT32: torch.int32,
    DType.UINT8: torch.uint8,
    DType.BOOL: torch.bool,
}


def spec_of(name: str, tensor: torch.Tensor, kind: VariableKind, group: int = 0) -> VariableSpec:
    """The variable that a tensor becomes. Raises UnsupportedModel for what servers cannot hold."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedModel(f"{kind.value} {name!r} is {_kind_of(tensor)}", todo="give a torch.Tensor")
    if is_lazy(tensor) or tensor.is_meta:
        raise UnsupportedModel(
            f"{kind.value} {name!r} has no values yet ({type(tensor).__name__} on {tensor.device})",
            todo="before job.prepare, call the model once on a batch (lazy modules), or model.to_empty(device=...) and"
            " initialise it (meta)",
        )
    dtype = next((ours for ours, theirs in TORCH_DTYPES.items() if theirs is tensor.dtype), None)
    if dtype is None or (kind is VariableKind.PARAMETER and not dtype.is_floating):
        raise UnsupportedModel(
            f"{kind.value} {name!r} is of dtype {tensor.dtype}",
            todo="servers hold float32 and float64 parameters; convert with model.float(), and use autocast for speed",
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedModel(f"{kind.value} {name!r} has the layout {tensor.layout}", todo="use a dense tensor")
    return VariableSpec(name, dtype, tuple(tensor.shape), kind, group)


@dataclass
class _Piece:
    """A block in the buffers of its server: gradient, and both values."""

    block: Block
    gradient: torch.Tensor
    values: tuple[torch.Tensor, torch.Tensor]


@dataclass
class _Home:
    """The buffers of one server, its partitions in order."""

    partitions: tuple[PartitionId, ...]
    gradient: Bytes
    values: tuple[Bytes, Bytes]


class Buckets:
    """The buffers of a job's variables under one partition map."""

    def __init__(self, layout: JobLayout, map_: PartitionMap) -> None:
        self._layout = layout
        self._current = 0
        self._homes: dict[Incarnation, _Home] = {}
        self._pieces: list[list[_Piece]] = [[] for _ in layout.variables]
        self._place: dict[tuple[PartitionId, int], tuple[int, int]] = {}
        for server, owners in map_.by_server().items():
            self._make_home(server, tuple(owner.partition for owner in owners))

    def _make_home(self, server: Incarnation, partitions: tuple[PartitionId, ...]) -> None:
        total = sum(self._layout.partitions[p].payload_bytes for p in partitions)
        home = _Home(partitions, _zeros(total), (_zeros(total), _zeros(total)))
        self._homes[server] = home
        at = 0
        for partition in partitions:
            part = self._layout.partitions[partition]
            for index, block in enumerate(part.blocks):
                dtype = self._layout.variables[block.variable].dtype
                start = at + block.position
                stop = start + block.length * dtype.item_bytes
                views = [
                    torch.from_numpy(buffer[start:stop]).view(TORCH_DTYPES[dtype])
                    for buffer in (home.gradient, *home.values)
                ]
                self._pieces[block.variable].append(_Piece(block, views[0], (views[1], views[2])))
                end = part.blocks[index + 1].position if index + 1 < len(part.blocks) else part.payload_bytes
                self._place[partition, index] = (start, at + end)
            at += part.payload_bytes

    @property
    def servers(self) -> tuple[Incarnation, ...]:
        return tuple(self._homes)

    # ---- towards the servers

    def fill(self, sent: Sequence[torch.Tensor | None]) -> None:
        """Copies what a push carries into the flat buffers: for each variable, in order, a gradient (parameter) or a
        new value (buffer), or None. Raises ShapeMismatch, DTypeMismatch, UnsupportedModel, having sent nothing."""
        for index, tensor in enumerate(sent):
            if tensor is None:
                continue
            spec = self._layout.variables[index]
            check_tensor(spec, tensor)
            flat = tensor.detach().reshape(-1)
            for piece in self._pieces[index]:
                piece.gradient.copy_(flat[piece.block.offset : piece.block.offset + piece.block.length])

    def parts(self, server: Incarnation, absent: frozenset[int]) -> tuple[tuple[PushPart, ...], list[memoryview]]:
        """A server's part of a push, without the variables in `absent` (indices), and its payload in pieces."""
        home = self._homes[server]
        if not absent:
            sizes = [self._layout.partitions[p].payload_bytes for p in home.partitions]
            parts = tuple(PushPart(p, size) for p, size in zip(home.partitions, sizes, strict=True))
            return parts, [home.gradient.data]
        parts_: list[PushPart] = []
        pieces: list[memoryview] = []
        for partition in home.partitions:
            blocks = self._layout.partitions[partition].blocks
            missing = tuple(index for index, block in enumerate(blocks) if block.variable in absent)
            if len(missing) == len(blocks):
                parts_.append(PushPart(partition, 0))
                continue
            spans = [self._place[partition, i] for i in range(len(blocks)) if blocks[i].variable not in absent]
            pieces += [home.gradient[start:stop].data for start, stop in spans]
            parts_.append(PushPart(partition, sum(stop - start for start, stop in spans), missing))
        return tuple(parts_), pieces

    def empty_parts(self, server: Incarnation) -> tuple[PushPart, ...]:
        """A server's part of a push that touches nothing: it lists every partition (rule A3)."""
        return tuple(PushPart(partition, 0) for partition in self._homes[server].partitions)

    # ---- from the servers

    def landing(self, server: Incarnation) -> memoryview:
        """Where the next version of a server's values is put together."""
        return self._homes[server].values[1 - self._current].data

    def flip(self) -> None:
        """What has landed, from all servers, is the current version."""
        self._current = 1 - self._current

    def load(self, targets: Mapping[int, torch.Tensor]) -> None:
        """Copies the current values into tensors, by index of the variable."""
        with torch.no_grad():
            for index, target in targets.items():
                if target.is_contiguous():
                    self._copy(index, target.view(-1))
                    continue
                flat = torch.empty(target.numel(), dtype=target.dtype, device=target.device)
                self._copy(index, flat)
                target.copy_(flat.view(target.shape))

    def _copy(self, index: int, flat: torch.Tensor) -> None:
        for piece in self._pieces[index]:
            flat[piece.block.offset : piece.block.offset + piece.block.length].copy_(piece.values[self._current])


def check_tensor(spec: VariableSpec, tensor: torch.Tensor) -> None:
    """Raises ShapeMismatch, DTypeMismatch or UnsupportedModel unless the tensor fits its variable."""
    if not isinstance(tensor, torch.Tensor):
        raise DTypeMismatch(f"{spec.name!r} given as {_kind_of(tensor)}; expected a torch.Tensor")
    if tensor.layout is not torch.strided:
        raise UnsupportedModel(
            f"the gradient of {spec.name!r} has the layout {tensor.layout}",
            todo="use dense gradients, for example nn.Embedding(..., sparse=False)",
        )
    if tuple(tensor.shape) != spec.shape:
        raise ShapeMismatch(f"{spec.name!r} of shape {tuple(tensor.shape)}; expected {spec.shape}")
    if tensor.dtype is not TORCH_DTYPES[spec.dtype]:
        raise DTypeMismatch(f"{spec.name!r} of dtype {tensor.dtype}; expected {TORCH_DTYPES[spec.dtype]}")


def _kind_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _zeros(nbytes: int) -> Bytes:
    return np.zeros(nbytes, dtype=np.uint8)
