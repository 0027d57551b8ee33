"""A partition in a safetensors file: blocks with optimizer state, and the ledger of the same version.

    counts           int64 (blocks,)      updates of each block of the file, by ascending index
    ledger           int64 (sources, 7)   kind, three numbers of the source, lane, token, next; ascending
    values/INDEX     (length,)            a block's values, in its variable's dtype
    SLOT/INDEX       (length,)            the same block's optimizer state, for each slot of it

A file has all blocks of its partition, or only those that changed since an earlier file. The ledger is always whole.
The kinds of sources: 0 is a data shard (numbers: feed, epoch, index), 1 a logical rank, 2 a worker's incarnation.

Owns: names, shapes and metadata of such a file. Invariants: what is read fits the layout of the partition; state and
ledger are of one version. Must not know: manifests, URLs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from shardyard.checkpoints.table_state import TableState
from shardyard.domain.errors import CheckpointDamaged
from shardyard.domain.ids import Incarnation, PartitionId, Rank, Token, Version
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.limits import LEDGER_SOURCES_MAX, LOGICAL_RANKS_MAX, SEQUENCE_MAX
from shardyard.domain.push_names import DataShardSource, RankSource, Source, SourceKey, SourceMark, WorkerSource
from shardyard.domain.variables import DType
from shardyard.storage import tensors
from shardyard.storage.storage import Buffer, Storage, Written
from shardyard.storage.tensors import Array, Contents, TensorSource

FORMAT: Final = "shardyard-partition"
FORMAT_VERSION: Final = "1"
VALUES: Final = "values"
COUNTS: Final = "counts"
LEDGER: Final = "ledger"

_DATA_SHARD, _RANK, _WORKER = 0, 1, 2
_MARK_NUMBERS: Final = 7
_BLOCK_TENSOR: Final = re.compile(r"([a-z][a-z0-9_]{0,63})/(0|[1-9][0-9]{0,8})")
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}")

Marks = npt.NDArray[np.int64]
"""A ledger as in the file, shape (sources, 7)."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockState:
    """Block `index` of a partition. `values` and each slot have shape (length,) and the variable's dtype. `count`: the
    number of its updates."""

    index: int
    values: Array
    slots: Mapping[str, Array]
    count: int


@dataclass(frozen=True, slots=True)
class PartitionState:
    """A partition, or its changed blocks: blocks by ascending index, the whole ledger, and the floor below which tokens
    are refused (rule A7). `tables`: in the order of the layout; their rows lie in other files."""

    partition: PartitionId
    version: Version
    blocks: tuple[BlockState, ...]
    marks: tuple[SourceMark, ...] = ()
    floor: Token = Token(0)
    tables: tuple[TableState, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockSource:
    """A block to be written. The bytes of its arrays are fetched when their turn comes."""

    index: int
    dtype: DType
    length: int
    count: int
    values: Callable[[], Buffer]
    slots: Mapping[str, Callable[[], Buffer]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PartitionHead:
    """The content of a partition's file, without its blocks."""

    partition: PartitionId
    version: Version
    marks: tuple[SourceMark, ...] = ()
    floor: Token = Token(0)


# ---- writing


def pieces(head: PartitionHead, blocks: Sequence[BlockSource]) -> Iterator[Buffer]:
    """The bytes of a file with these blocks, for Storage.write. Raises TooLarge."""
    assert all(a.index < b.index for a, b in itertools.pairwise(blocks)), "blocks must ascend"
    ledger = _rows(head.marks)
    counts = np.array([block.count for block in blocks], np.int64)
    sources = [tensors.source_of(COUNTS, counts), tensors.source_of(LEDGER, ledger)]
    for block in blocks:
        assert VALUES not in block.slots
        for name, fetch in ((VALUES, block.values), *block.slots.items()):
            sources.append(TensorSource(f"{name}/{block.index}", block.dtype, (block.length,), fetch))
    metadata = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "partition": str(head.partition),
        "life": str(head.version.life),
        "number": str(head.version.number),
        "floor": str(int(head.floor)),
    }
    return tensors.pieces(metadata, sources)


def _rows(marks: Sequence[SourceMark]) -> Marks:
    rows = sorted((*_numbers(mark.key.source), mark.key.lane, int(mark.token), mark.next) for mark in marks)
    return np.array(rows, np.int64).reshape(len(rows), _MARK_NUMBERS)


def _numbers(source: Source) -> tuple[int, int, int, int]:
    if isinstance(source, DataShardSource):
        return _DATA_SHARD, source.feed, source.epoch, source.index
    if isinstance(source, RankSource):
        return _RANK, source.rank, 0, 0
    return _WORKER, int(source.incarnation), 0, 0


# ---- reading


def read(
    storage: Storage,
    path: str,
    expected: Written,
    layout: JobLayout,
    partition: PartitionId,
    blocks: Collection[int] | None = None,
) -> PartitionState:
    """Reads the state in a file, or only `blocks` of it. Every byte of the file is checked first.

    Raises CheckpointDamaged, which names the file, CheckpointNotFound, StorageUnavailable.
    """
    wanted = None if blocks is None else frozenset(blocks)

    def is_wanted(name: str) -> bool:
        match = _BLOCK_TENSOR.fullmatch(name)
        return match is None or wanted is None or int(match[2]) in wanted

    contents, arrays = tensors.read_file(storage, path, expected, is_wanted)
    head, listed = _check(storage.locate(path), contents, arrays, layout, partition, wanted or ())
    taken = [index for index in listed if wanted is None or index in wanted]
    counts = dict(zip(listed, arrays[COUNTS].tolist(), strict=True))
    slots: dict[int, dict[str, Array]] = {index: {} for index in taken}
    for name, array in arrays.items():
        match = _BLOCK_TENSOR.fullmatch(name)
        if match is not None and match[1] != VALUES:
            slots[int(match[2])][match[1]] = array
    states = (BlockState(index, arrays[f"{VALUES}/{index}"], slots[index], counts[index]) for index in taken)
    return PartitionState(partition, head.version, tuple(states), head.marks, head.floor)


def check(
    storage: Storage,
    path: str,
    expected: Written,
    layout: JobLayout,
    partition: PartitionId,
    blocks: Collection[int],
) -> PartitionHead:
    """Checks what `read` checks, without keeping blocks in memory. Raises the same errors."""
    contents, arrays = tensors.read_file(storage, path, expected, lambda name: name in (COUNTS, LEDGER))
    return _check(storage.locate(path), contents, arrays, layout, partition, blocks)[0]


def _check(
    where: str,
    contents: Contents,
    arrays: Mapping[str, Array],
    layout: JobLayout,
    partition: PartitionId,
    needed: Collection[int],
) -> tuple[PartitionHead, list[int]]:
    """Checks a file. Returns its content without the blocks, and which blocks it has."""
    said = contents.metadata
    if (said.get("format"), said.get("version")) != (FORMAT, FORMAT_VERSION):
        raise CheckpointDamaged(
            f"{where} says that it is {said.get('format')!r} of version {said.get('version')!r}; expected {FORMAT!r} of"
            f" version {FORMAT_VERSION!r}"
        )
    numbers = {name: _NUMBER.fullmatch(said.get(name, "")) for name in ("partition", "life", "number", "floor")}
    for name, number in numbers.items():
        if number is None or int(number[0]) > SEQUENCE_MAX:
            raise CheckpointDamaged(f"{where} has the {name} {said.get(name)!r}; expected a number")
    found = {name: int(number[0]) for name, number in numbers.items() if number is not None}
    if found["partition"] != partition:
        raise CheckpointDamaged(f"{where} is of partition {found['partition']}; expected partition {partition}")
    listed = _check_blocks(where, contents, layout, partition)
    for index in sorted(needed):
        if f"{VALUES}/{index}" not in contents.tensors:
            raise CheckpointDamaged(f"{where} lacks block {index} of partition {partition}")
    if COUNTS not in arrays or arrays[COUNTS].dtype != np.int64 or arrays[COUNTS].shape != (len(listed),):
        raise CheckpointDamaged(f"{where} has no {COUNTS!r} of int64 for {len(listed)} blocks")
    if (arrays[COUNTS] < 0).any():
        raise CheckpointDamaged(f"{where} has a block with a negative count of updates")
    marks = _check_marks(where, arrays.get(LEDGER))
    version = Version(found["life"], found["number"])
    return PartitionHead(partition, version, marks, Token(found["floor"])), listed


def _check_blocks(where: str, contents: Contents, layout: JobLayout, partition: PartitionId) -> list[int]:
    blocks = layout.partitions[partition].blocks
    having: set[int] = set()
    values: list[int] = []
    for name, tensor in contents.tensors.items():
        if name in (COUNTS, LEDGER):
            continue
        match = _BLOCK_TENSOR.fullmatch(name)
        if match is None or int(match[2]) >= len(blocks):
            raise CheckpointDamaged(f"{where} has an array {name[:100]!r}, which partition {partition} does not have")
        index = int(match[2])
        spec = layout.variables[blocks[index].variable]
        if (tensor.dtype, tensor.shape) != (spec.dtype, (blocks[index].length,)):
            raise CheckpointDamaged(
                f"{where} has {name!r} of {tensor.dtype.value} {tensor.shape}; expected {spec.dtype.value}"
                f" {(blocks[index].length,)}, as variable {spec.name!r}"
            )
        having.add(index)
        if match[1] == VALUES:
            values.append(index)
    if len(values) != len(having):
        raise CheckpointDamaged(f"{where} has state of block {min(having - set(values))} without its values")
    return sorted(values)


def _check_marks(where: str, rows: Array | None) -> tuple[SourceMark, ...]:
    if rows is None or rows.dtype != np.int64 or rows.ndim != 2 or rows.shape[1] != _MARK_NUMBERS:
        raise CheckpointDamaged(f"{where} has no {LEDGER!r} of int64 with {_MARK_NUMBERS} numbers a source")
    if len(rows) > LEDGER_SOURCES_MAX:
        raise CheckpointDamaged(f"{where} has a ledger of {len(rows)} sources; at most {LEDGER_SOURCES_MAX}")
    marks = []
    before: list[int] = []
    for at, row in enumerate(rows.tolist()):
        kind, *numbers = row
        lone = kind != _DATA_SHARD
        if (
            min(row) < 0
            or kind > _WORKER
            or (lone and (row[2] or row[3]))
            or (kind == _RANK and row[1] >= LOGICAL_RANKS_MAX)
            or row[:5] <= before
        ):
            raise CheckpointDamaged(f"{where} has the ledger row {at} {row}, which is not a source, or not in order")
        before = row[:5]
        marks.append(SourceMark(SourceKey(_source(kind, numbers), row[4]), Token(row[5]), row[6]))
    return tuple(marks)


def _source(kind: int, numbers: Sequence[int]) -> Source:
    if kind == _DATA_SHARD:
        return DataShardSource(numbers[0], numbers[1], numbers[2])
    return RankSource(Rank(numbers[0])) if kind == _RANK else WorkerSource(Incarnation(numbers[0]))
