"""The files that `shardyard checkpoint export` writes: a model, a table, or the version that an evaluator has kept.

Owns: the formats. Invariants: a file is complete, or does not exist. For safetensors, variables are read one at a time.
Must not know: the command's options.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardyard.checkpoints.library import CheckpointLibrary
    from shardyard.checkpoints.manifest import Manifest
    from shardyard.storage.storage import Buffer
    from shardyard.storage.tensors import Array


def export_model(library: CheckpointLibrary, job: str, number: int | None, form: str, out: Path) -> str:
    manifest = library.load(job, number)
    if form == "torch":
        _write_torch(library.export_state(manifest), out)
    else:
        _export_safetensors(library, manifest, out)
    variables, tables = len(manifest.layout.variables), len(manifest.layout.tables)
    what = f"{variables} variables" + (f" and {tables} tables" if tables else "")
    return f"{what} of checkpoint {manifest.number} of job {job}, step {manifest.step}"


def export_table(library: CheckpointLibrary, job: str, number: int | None, name: str, out: Path) -> str:
    """Raises InvalidRequest if the job has no such table or the file name's ending is another, ConfigurationError."""
    from shardyard.checkpoints import row_exports
    from shardyard.domain.errors import InvalidRequest
    from shardyard.storage.storage import write_file

    manifest = library.load(job, number)
    names = [table.name for table in manifest.layout.tables]
    if name not in names:
        had = f"it has {', '.join(names[:20])}" if names else "it has none"
        raise InvalidRequest(f"job {job!r} has no table {name!r}", why=had, todo="give the name of a table")
    if out.suffix not in (row_exports.PARQUET, row_exports.SAFETENSORS):
        raise InvalidRequest(
            f"cannot write rows to {str(out)!r}", why="", todo="use a name that ends with .parquet or .safetensors"
        )
    index = names.index(name)
    states = library.tables(manifest, index)
    rows, dim = sum(state.entry.rows for state in states), manifest.layout.tables[index].dim
    chunks = row_exports.chunks_of(states)
    if out.suffix == row_exports.PARQUET:
        row_exports.pyarrow()
        write_file(out, row_exports.parquet_pieces(dim, chunks))
    else:
        write_file(out, row_exports.safetensors_pieces(rows, dim, chunks))
    what = f"{rows:,} rows of {dim} values of table {name}"
    return f"{what} of checkpoint {manifest.number} of job {job}, step {manifest.step}"


def export_best(library: CheckpointLibrary, job: str, form: str, out: Path) -> str:
    """Raises CheckpointNotFound, CheckpointDamaged."""
    from shardyard.checkpoints.best import BestFolder
    from shardyard.domain.errors import CheckpointNotFound
    from shardyard.storage import tensors
    from shardyard.storage.storage import write_file

    folder = BestFolder(library.storage, job)
    found = folder.load()
    if found is None:
        raise CheckpointNotFound(
            f"no best version is kept in {folder.url}",
            todo="keep one with run.keep_best (docs/guides/evaluation.md), or name its place with --url",
        )
    contents = folder.check(found)
    if form == "torch":
        _write_torch(folder.stream(found, contents), out)
    else:
        write_file(out, tensors.pieces({"format": "pt"}, folder.sources(found, contents)))
    what = f"{len(contents.tensors)} variables of the best of job {job}"
    return f"{what}, step {found.step}: {found.metric} {found.value:.6g}"


def _write_torch(values: Iterable[tuple[str, Array]], out: Path) -> None:
    from shardyard.domain.errors import ConfigurationError, StorageUnavailable

    try:
        import torch
    except ImportError as error:
        raise ConfigurationError(
            "torch is not installed here",
            why="the file is written by torch.save",
            todo="pip install 'shardyard[worker]', or export with --format safetensors",
        ) from error
    state = {name: torch.from_numpy(array if array.flags.writeable else array.copy()) for name, array in values}
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, out)
    except (OSError, RuntimeError) as error:
        raise StorageUnavailable(
            f"cannot write {out}: {error}", todo="make room there, or give another place"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _export_safetensors(library: CheckpointLibrary, manifest: Manifest, out: Path) -> None:
    from shardyard.checkpoints.library import Variables
    from shardyard.domain.variables import DType
    from shardyard.storage import tensors
    from shardyard.storage.storage import write_file

    variables = Variables(library.storage, manifest)
    held: dict[int, dict[str, Array]] = {}

    def fetch_rows(index: int, name: str) -> Buffer:
        if index not in held:
            held.clear()  # one table at a time
            held[index] = library.export_table(manifest, index)
        return tensors.bytes_of(held[index][name])

    def fetch(index: int) -> Buffer:
        return tensors.bytes_of(variables.read(index))

    sources = [
        tensors.TensorSource(spec.name, spec.dtype, spec.shape, partial(fetch, index))
        for index, spec in enumerate(manifest.layout.variables)
    ]
    for index, table in enumerate(manifest.layout.tables):
        rows = sum(entry.tables[index].rows for entry in manifest.partitions)
        arrays: list[tuple[str, DType, tuple[int, ...]]]
        arrays = [("ids", DType.INT64, (rows,)), ("rows", DType.FLOAT32, (rows, table.dim)), ("seed", DType.INT64, ())]
        for kind, dtype, shape in arrays:
            name = f"{table.path}.{kind}"
            sources.append(tensors.TensorSource(name, dtype, shape, partial(fetch_rows, index, name)))
    write_file(out, tensors.pieces({"format": "pt"}, sources))
