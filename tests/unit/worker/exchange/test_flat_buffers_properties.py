"""Tensors to payloads and back, for any layout, with any variables absent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardyard.domain.errors import DTypeMismatch, ShapeMismatch, UnsupportedModel
from shardyard.domain.ids import Generation, Incarnation
from shardyard.domain.layout.layouts import JobLayout, PartitionMap
from shardyard.domain.limits import BLOCK_ALIGN_BYTES
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard.wire import frames
from shardyard_coordinator.placement.placement import Server, assign, plan
from shardyard_worker.exchange.buffers.flat_buffers import FlatBuffers
from shardyard_worker.exchange.buffers.tensor_types import TORCH_DTYPES

torch.set_num_threads(1)

SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))


@dataclass(frozen=True)
class Case:
    layout: JobLayout
    map: PartitionMap
    absent: frozenset[int]
    strided: frozenset[int]
    """Variables whose tensors do not lie in order in memory."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtypes = draw(st.lists(st.sampled_from(list(DType)), min_size=1, max_size=8))
    shape = st.lists(st.integers(0, 12), max_size=3).map(tuple)
    specs = tuple(
        VariableSpec(
            f"v{index}", dtype, draw(shape), VariableKind.PARAMETER if dtype.is_floating else VariableKind.BUFFER
        )
        for index, dtype in enumerate(dtypes)
    )
    block_bytes = draw(st.integers(1, 6)) * BLOCK_ALIGN_BYTES
    layout = plan(specs, SGD, partitions=draw(st.integers(1, 6)), block_bytes=block_bytes)
    servers = [Server(Incarnation(n), f"host:{n}") for n in range(1, draw(st.integers(1, 4)) + 1)]
    map_ = assign([part.payload_bytes for part in layout.partitions], servers, generation=Generation(1))
    some = st.frozensets(st.integers(0, len(specs) - 1))
    return Case(layout, map_, draw(some), draw(some))


def tensor_of(spec: VariableSpec, *, first: int, strided: bool) -> torch.Tensor:
    """Values 1, 2, ... so that none is the zero of an empty buffer."""
    numbers = torch.arange(first, first + spec.elements).remainder(250) + 1
    tensor = numbers.to(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)
    return tensor.clone(memory_format=torch.contiguous_format) if not strided else backwards(tensor)


def backwards(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with the dimensions in reverse order in memory."""
    order = list(range(tensor.dim()))[::-1]
    return tensor.permute(order).contiguous().permute(order)


def tensors_of(case: Case, *, first: int) -> list[torch.Tensor]:
    return [
        tensor_of(spec, first=first + 7 * index, strided=index in case.strided)
        for index, spec in enumerate(case.layout.variables)
    ]


def as_sent(pieces: Sequence[memoryview]) -> bytes:
    """What a server gets of a payload: cut into frames, encoded, put together."""
    sent = list(frames.cut(b"", pieces, frame_bytes=100))
    into = bytearray(sum(len(frame.data) for frame in sent))
    assembler = frames.Assembler(memoryview(into))
    for frame in sent:
        assembler.add(frames.decode(frames.encode(frame)))
    assembler.finish()
    return bytes(into)


def read_payload(case: Case, server: Incarnation, buffers: FlatBuffers) -> dict[int, np.ndarray[Any, Any]]:
    """What a server reads from a push, by the layout alone: variable to values, NaN or -1 where nothing was sent."""
    parts, pieces = buffers.parts(server, case.absent)
    payload, at = as_sent(pieces), 0
    found: dict[int, np.ndarray[Any, Any]] = {}
    for part in parts:
        blocks = case.layout.partitions[part.partition].blocks
        missing = set(part.absent_blocks) if part.payload_bytes else set(range(len(blocks)))
        assert part.payload_bytes or not part.absent_blocks
        end = at + part.payload_bytes
        for index, block in enumerate(blocks):
            if index in missing:
                assert block.variable in case.absent
                continue
            assert block.variable not in case.absent
            spec = case.layout.variables[block.variable]
            values = np.frombuffer(payload, spec.dtype.value, block.length, at)
            into = found.setdefault(block.variable, np.zeros(spec.elements, spec.dtype.value))
            into[block.offset : block.offset + block.length] = values
            at += -(-values.nbytes // BLOCK_ALIGN_BYTES) * BLOCK_ALIGN_BYTES
        assert at == end
    assert at == len(payload)
    return found


@given(cases())
def test_servers_read_exactly_what_is_present(case: Case) -> None:
    buffers = FlatBuffers(case.layout, case.map)
    buffers.fill([torch.full_like(tensor, 99) for tensor in tensors_of(case, first=0)])
    tensors = tensors_of(case, first=1)
    buffers.fill([None if index in case.absent else tensor for index, tensor in enumerate(tensors)])
    found: dict[int, np.ndarray[Any, Any]] = {}
    for server in buffers.servers:
        for index, values in read_payload(case, server, buffers).items():
            into = found.setdefault(index, np.zeros_like(values))
            into += values
    for index, (spec, tensor) in enumerate(zip(case.layout.variables, tensors, strict=True)):
        if index in case.absent or not spec.elements:
            assert index not in found
        else:
            assert found[index].tolist() == tensor.reshape(-1).tolist()


@given(cases())
def test_a_push_lists_every_partition_of_the_server(case: Case) -> None:
    buffers = FlatBuffers(case.layout, case.map)
    for server, owners in case.map.by_server().items():
        expected = [owner.partition for owner in owners]
        assert [part.partition for part in buffers.parts(server, case.absent)[0]] == expected
        assert [part.partition for part in buffers.empty_parts(server)] == expected
        assert all(part.payload_bytes == 0 for part in buffers.empty_parts(server))


@given(cases())
def test_a_worker_of_one_place_has_memory_for_its_partitions_alone(case: Case) -> None:
    places = [index % 2 for index in range(len(case.layout.variables))]
    layout = plan(case.layout.variables, SGD, partitions=4, block_bytes=BLOCK_ALIGN_BYTES, places=places)
    own = {part.partition for part in layout.partitions if any(places[each.variable] for each in part.blocks)}
    servers = [Server(Incarnation(number), f"host:{number}") for number in range(1, 4)]
    map_ = assign([part.payload_bytes for part in layout.partitions], servers, generation=Generation(1))
    buffers = FlatBuffers(layout, map_, own=own)
    for server, owners in map_.by_server().items():
        expected = [owner.partition for owner in owners if owner.partition in own]
        assert [part.partition for part in buffers.parts(server, case.absent)[0]] == expected
        assert buffers.partitions(server) == tuple(expected)
        assert buffers.nbytes(server) == sum(layout.partitions[each].payload_bytes for each in expected)


@given(cases())
def test_values_come_back_as_they_were_sent(case: Case) -> None:
    buffers = FlatBuffers(case.layout, case.map)
    sent = tensors_of(case, first=1)
    buffers.fill(sent)
    for server in buffers.servers:
        buffers.values.stream_buffer(server)[:] = bytes(buffers.nbytes(server))
        buffers.values.note_streamed(server)
    buffers.values.flip()
    for server in buffers.servers:
        buffers.values.stream_buffer(server)[:] = as_sent(buffers.parts(server, frozenset())[1])
        buffers.values.note_streamed(server)
    targets = {index: torch.zeros_like(tensor) for index, tensor in enumerate(tensors_of(case, first=0))}
    buffers.values.load(targets)
    assert not any(target.any() for target in targets.values()), "what lands is not current before the flip"
    buffers.values.flip()
    buffers.values.load(targets)
    for index, tensor in enumerate(sent):
        assert targets[index].stride() == torch.zeros_like(tensor).stride()
        assert torch.equal(targets[index], tensor)


@given(cases())
def test_the_current_version_outlives_a_landing_that_is_not_complete(case: Case) -> None:
    buffers = FlatBuffers(case.layout, case.map)
    buffers.fill(tensors_of(case, first=1))
    for server in buffers.servers:
        buffers.values.stream_buffer(server)[:] = as_sent(buffers.parts(server, frozenset())[1])
        buffers.values.note_streamed(server)
    buffers.values.flip()
    for server in buffers.servers[:1]:
        landing = buffers.values.stream_buffer(server)
        landing[:] = bytes(len(landing))
    targets = {index: torch.zeros_like(tensor) for index, tensor in enumerate(tensors_of(case, first=0))}
    buffers.values.load(targets)
    for index, tensor in enumerate(tensors_of(case, first=1)):
        assert torch.equal(targets[index], tensor)


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (torch.ones(4), ShapeMismatch),
        (torch.ones(3, 1), ShapeMismatch),
        (torch.ones(3, dtype=torch.float64), DTypeMismatch),
        (torch.ones(3, dtype=torch.int16), DTypeMismatch),
        (torch.ones(3).numpy(), DTypeMismatch),
        (torch.ones(3).to_sparse(), UnsupportedModel),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(tensor: Any, error: type[Exception]) -> None:
    layout = plan([VariableSpec("fc.weight", DType.FLOAT32, (3,))], SGD, partitions=1, block_bytes=64)
    buffers = FlatBuffers(layout, assign([64], [Server(Incarnation(1), "host:1")], generation=Generation(1)))
    with pytest.raises(error, match=r"fc\.weight"):
        buffers.fill([tensor])
