"""A worker's file in a checkpoint: the residual of its error feedback, by the names in its `state_dict`.

    pushes                              int64, ()
    residual.NAME, momentum.NAME        the variable's dtype, (elements,)
    factor.NAME@OFFSET                  float32, (rank, columns), of the block at that element

Owns: reading and writing, and which arrays a layout allows. Invariants: what is read equals what was written; memory is
allocated only after every array was found to fit the layout. Must not know: manifests, what the arrays mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final, NoReturn

import numpy.typing as npt

from shardyard.domain.compression import FACTOR, MOMENTUM, PUSHES, RANK_MAX, RESIDUAL
from shardyard.domain.errors import CheckpointDamaged
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard.storage import tensors
from shardyard.storage.storage import Buffer, Storage, Written
from shardyard.storage.tensors import Contents, Tensor

FORMAT: Final = "shardyard-feedback"
FORMAT_VERSION: Final = "1"
_MATRIX: Final = 2

State = Mapping[str, npt.NDArray[Any]]


def pieces(worker: str, state: State) -> Iterator[Buffer]:
    """The bytes of a file. Raises TooLarge."""
    said = {"format": FORMAT, "version": FORMAT_VERSION, "worker": worker}
    return tensors.pieces(said, [tensors.source_of(name, array) for name, array in state.items()])


def read(
    storage: Storage, path: str, expected: Written, layout: JobLayout, worker: str, *, keep: bool = True
) -> dict[str, npt.NDArray[Any]]:
    """Reads a file, and checks every byte of it. Not `keep`: the arrays are checked, and not kept in memory.

    Raises CheckpointDamaged if the file is not as expected, or has an array that does not fit the layout;
    CheckpointNotFound, StorageUnavailable."""
    fits = partial(_check, storage.locate(path), layout, worker)
    return tensors.read_file(storage, path, expected, lambda _: keep, fits)[1]


def _check(where: str, layout: JobLayout, worker: str, contents: Contents) -> None:
    def damaged(what: str) -> NoReturn:
        raise CheckpointDamaged(f"{where} {what}")

    said = contents.metadata
    if (said.get("format"), said.get("version")) != (FORMAT, FORMAT_VERSION):
        damaged(
            f"says that it is {said.get('format', '')[:100]!r} of version {said.get('version', '')[:100]!r}; expected"
            f" {FORMAT!r} of version {FORMAT_VERSION!r}"
        )
    if said.get("worker") != worker:
        damaged(f"is of worker {said.get('worker', '')[:100]!r}; expected {worker!r}")
    indices = {spec.name: index for index, spec in enumerate(layout.variables)}
    lengths = {
        (block.variable, block.offset): block.length for partition in layout.partitions for block in partition.blocks
    }
    for tensor in contents.tensors.values():
        if not _is_known(tensor, layout.variables, indices, lengths):
            damaged(
                f"has {tensor.name[:100]!r} of dtype {tensor.dtype.value} and shape {tensor.shape}, which no variable"
                " of the job can have"
            )


def _is_known(
    tensor: Tensor,
    variables: tuple[VariableSpec, ...],
    indices: Mapping[str, int],
    lengths: Mapping[tuple[int, int], int],
) -> bool:
    if tensor.name == PUSHES:
        return tensor.dtype is DType.INT64 and tensor.shape == ()
    kind, _, name = tensor.name.partition(".")
    offset = ""
    if kind == FACTOR:
        name, _, offset = name.rpartition("@")
    index = indices.get(name)
    if index is None or variables[index].kind is not VariableKind.PARAMETER:
        return False
    spec = variables[index]
    if kind in (RESIDUAL, MOMENTUM):
        return tensor.dtype is spec.dtype and tensor.shape == (spec.elements,)
    if kind != FACTOR or not (offset.isascii() and offset.isdecimal() and len(offset) <= len(str(spec.elements))):
        return False
    length = lengths.get((index, int(offset)), 0)
    is_matrix = tensor.dtype is DType.FLOAT32 and len(tensor.shape) == _MATRIX
    return is_matrix and tensor.shape[0] <= RANK_MAX and tensor.shape[1] <= length
