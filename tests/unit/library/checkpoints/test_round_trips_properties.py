"""What holds for every layout: a checkpoint comes back bit by bit, whole or from the files of several."""

from __future__ import annotations

import contextlib
import hashlib
import math
import uuid

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.checkpoints import layout as layouts
from shardyard.checkpoints import partition_file
from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import Manifest, PartitionEntry, PartitionFile, decode, encode
from shardyard.checkpoints.partition_file import BlockState, PartitionState
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import CheckpointDamaged, ConfigurationError
from shardyard.domain.ids import Incarnation, JobId, PartitionId, Rank, Token, Version
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.limits import LOGICAL_RANKS_MAX, SEQUENCE_MAX
from shardyard.domain.optimizers import KINDS, WHOLE_VARIABLES, OptimizerSpec, make_group
from shardyard.domain.push_names import DataShardSource, RankSource, SourceKey, SourceMark, WorkerSource
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard.storage import tensors
from shardyard.storage.json_reader import JsonNode, canonical
from shardyard.storage.storage import RemoteStorage
from shardyard_coordinator.placement.placement import plan, whole_block_bytes
from tests.support.checkpoints import load_partition, state_pieces, write_state

NUMBERS = st.integers(0, SEQUENCE_MAX)
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
SLOTS = ("exp_avg", "momentum_buffer", "s2")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(st.text(), JSON, max_size=4)


@st.composite
def specs(draw: st.DrawFn, name: str) -> VariableSpec:
    kind = draw(st.sampled_from(VariableKind))
    dtypes = [dtype for dtype in DType if dtype.is_floating or kind is VariableKind.BUFFER]
    return VariableSpec(name, draw(st.sampled_from(dtypes)), draw(SHAPES), kind, 0)


@st.composite
def jobs(draw: st.DrawFn) -> JobLayout:
    names = draw(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=5, unique=True))
    kind = draw(st.sampled_from(sorted(KINDS)))
    optimizer = OptimizerSpec(kind, (make_group(kind, {"lr": draw(st.floats(0, 1e6, exclude_min=kind == "ftrl"))}),))
    variables = [draw(specs(name)) for name in names]
    block_bytes = whole_block_bytes(variables) if kind in WHOLE_VARIABLES else 64
    return plan(variables, optimizer, partitions=draw(st.integers(1, 4)), block_bytes=block_bytes)


def sources() -> st.SearchStrategy[SourceKey]:
    source = st.one_of(
        st.builds(DataShardSource, NUMBERS, NUMBERS, NUMBERS),
        st.builds(RankSource, st.integers(0, LOGICAL_RANKS_MAX - 1).map(Rank)),
        st.builds(WorkerSource, NUMBERS.map(Incarnation)),
    )
    return st.builds(SourceKey, source, NUMBERS)


@st.composite
def ledgers(draw: st.DrawFn) -> tuple[SourceMark, ...]:
    keys = draw(st.lists(sources(), max_size=6, unique=True))
    return tuple(SourceMark(key, Token(draw(NUMBERS)), draw(NUMBERS)) for key in keys)


def drawn_bits(rng: np.random.Generator, dtype: DType, length: int) -> npt.NDArray[np.generic]:
    """Any bits, NaNs with payloads too."""
    bits = rng.integers(0, 2 if dtype is DType.BOOL else 256, length * dtype.item_bytes, np.uint8)
    return bits.view(dtype.value)


def states(
    layout: JobLayout, index: int, seed: int, blocks: list[int], marks: tuple[SourceMark, ...]
) -> PartitionState:
    rng = np.random.default_rng(seed)
    found = []
    for each in blocks:
        block = layout.partitions[index].blocks[each]
        dtype = layout.variables[block.variable].dtype
        slots = {name: drawn_bits(rng, dtype, block.length) for name in SLOTS[: int(rng.integers(0, 4))]}
        values = drawn_bits(rng, dtype, block.length)
        found.append(BlockState(each, values, slots, int(rng.integers(0, SEQUENCE_MAX))))
    version = Version(int(rng.integers(0, SEQUENCE_MAX)), int(rng.integers(0, SEQUENCE_MAX)))
    return PartitionState(PartitionId(index), version, tuple(found), marks, Token(int(rng.integers(0, SEQUENCE_MAX))))


def bits(state: PartitionState) -> list[object]:
    """All of a state, as values that can be compared bit by bit."""
    blocks = [
        (b.index, b.count, b.values.dtype, b.values.tobytes(), {name: a.tobytes() for name, a in b.slots.items()})
        for b in state.blocks
    ]
    return [state.partition, state.version, set(state.marks), len(state.marks), state.floor, blocks]


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_layout_comes_back_as_it_was(layout: JobLayout) -> None:
    text = canonical(layouts.to_document(layout))
    found = layouts.from_document(JsonNode.parse(text, "it", at=0))
    assert found == layout
    assert canonical(layouts.to_document(found)) == text


@settings(max_examples=150, deadline=None)
@given(jobs(), st.data())
def test_partition_comes_back_bit_by_bit(layout: JobLayout, data: st.DataObject) -> None:
    storage = RemoteStorage(f"memory://{uuid.uuid4().hex}")
    index = data.draw(st.integers(0, len(layout.partitions) - 1))
    count = len(layout.partitions[index].blocks)
    blocks = sorted(data.draw(st.sets(st.integers(0, count - 1)))) if count else []
    state = states(layout, index, data.draw(st.integers(0, 2**32)), blocks, data.draw(ledgers()))
    written = storage.write("file", state_pieces(state))
    assert bits(partition_file.read(storage, "file", written, layout, PartitionId(index))) == bits(state)
    head = partition_file.check(storage, "file", written, layout, PartitionId(index), blocks)
    assert (head.version, set(head.marks), head.floor) == (state.version, set(state.marks), state.floor)
    storage.delete_file("file")


@settings(max_examples=80, deadline=None)
@given(jobs(), st.lists(st.integers(0, 2**32), min_size=1, max_size=4), DOCUMENTS, DOCUMENTS, st.data())
def test_any_chain_of_checkpoints_comes_back_bit_by_bit(
    layout: JobLayout,
    seeds: list[int],
    given_settings: dict[str, object],
    books: dict[str, object],
    data: st.DataObject,
) -> None:
    library = CheckpointLibrary(RemoteStorage(f"memory://{uuid.uuid4().hex}"))
    marks = data.draw(ledgers())
    model: list[dict[int, BlockState]] = [{} for _ in layout.partitions]
    entries: list[PartitionEntry] = []
    newest: list[PartitionState] = []
    for number, seed in enumerate(seeds, 1):
        for index, part in enumerate(layout.partitions):
            every = range(len(part.blocks))
            changed = (
                list(every) if number == 1 else sorted(data.draw(st.sets(st.sampled_from(every or [0]))) & {*every})
            )
            if number > 1 and data.draw(st.booleans()):
                continue  # nothing has happened to it
            state = states(layout, index, seed + index, changed, marks)
            file = write_state(library, "job", number, state)
            model[index].update({block.index: block for block in state.blocks})
            if number == 1:
                newest.append(state)
                entries.append(PartitionEntry(part.partition, state.version, (PartitionFile(file, tuple(changed)),)))
            else:
                newest[index] = state
                entries[index] = entries[index].incremental(state.version, file, tuple(changed))
        manifest = Manifest(
            number, "job", JobId(7), 3, given_settings, UpdateMode.ASYNC, 9, "2026-11-21T06:00:00+00:00", layout,
            tuple(entries), books,
        )  # fmt: skip
        library.commit(manifest)
    found = library.load("job")
    assert found == manifest
    assert decode(encode(found), "it") == manifest
    assert library.verify("job") == ()
    library.prune("job", 2)
    assert library.verify("job") == ()
    for index, state in enumerate(newest):
        whole = tuple(model[index][each] for each in sorted(model[index]))
        expected = PartitionState(state.partition, state.version, whole, state.marks, state.floor)
        assert bits(load_partition(library, found, PartitionId(index))) == bits(expected)
    check_export(library, found, model)
    library.storage.delete_folder("job")


def check_export(library: CheckpointLibrary, manifest: Manifest, model: list[dict[int, BlockState]]) -> None:
    exported = dict(library.export_state(manifest))
    assert list(exported) == [spec.name for spec in manifest.layout.variables]
    elements = 0
    for index, part in enumerate(manifest.layout.partitions):
        for each, block in enumerate(part.blocks):
            flat = exported[manifest.layout.variables[block.variable].name].reshape(-1)
            assert flat[block.offset : block.offset + block.length].tobytes() == model[index][each].values.tobytes()
            elements += block.length
    assert elements == sum(math.prod(array.shape) for array in exported.values())


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300) | st.binary(max_size=200).map(lambda b: len(b).to_bytes(8, "little") + b + b))
def test_no_bytes_crash_a_reader(text: bytes) -> None:
    storage = RemoteStorage("memory://any")
    storage.write("file", [text])
    refused = CheckpointDamaged, ConfigurationError  # the latter where it looks encrypted
    with contextlib.suppress(*refused):
        tensors.read_contents(storage, "file")
    with pytest.raises(refused, match="file"):
        decode(text, "file")
    with pytest.raises(CheckpointDamaged, match="file"):
        decode(b'{"manifest":' + text + b',"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'"}\n', "file")
