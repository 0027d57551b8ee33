"""An embedding table as a part of a model: its name and settings, where its rows come from, and its rows' gradients.

Owns: `Table`, a module without a size that look-up modules share; the port to the source of rows; the row gradients
since the last step. Invariants: if a table has gradients, an optimizer takes them, or `backward` raises; gradients of
several forwards add up per id, in the order in which they came. Must not know: how rows are pooled, files, jobs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from shardyard.domain.errors import DTypeMismatch, InvalidRequest, ShapeMismatch, TooLarge, VariableConflict
from shardyard.domain.limits import TABLE_DIM_MAX, VARIABLE_NAME_CHARACTERS_MAX
from shardyard.domain.tables.initial_values import InitialValues
from shardyard.domain.tables.row_values import row_key
from shardyard.domain.tables.table_settings import AdmissionSettings, ExpirySettings
from shardyard_worker.embedding import table_io
from shardyard_worker.embedding.config import Admission, Expiry
from shardyard_worker.embedding.local_rows import LifetimeRules, LocalRows, RowSet
from shardyard_worker.embedding.row_optimizers import Adagrad, RowOptimizer
from shardyard_worker.rows.dedup import Float32s, Int64s, UniqueIds, sum_rows, unique_ids

ID_DTYPES = (torch.int64, torch.int32)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class RowsNeeded(NamedTuple):
    """A forward needs the rows of `found.ids`."""

    table: Table
    found: UniqueIds


class RowSource(Protocol):
    """Where rows of tables come from: this process, or a job's servers."""

    def once(self, table: Table, ids: Int64s) -> UniqueIds:
        """Returns the unique ids of `ids`, shape (n,), in the order in which they are fetched."""

    def fetch(self, wanted: Sequence[RowsNeeded]) -> Sequence[Float32s]:
        """Returns the rows of each entry's ids, shape (m, dim), in the order of the ids, in one round trip. It changes
        nothing. Do not change the arrays."""

    def count(self, table: Table) -> int:
        """How many rows the table has."""

    def pieces(self, table: Table) -> Iterator[tuple[Int64s, Float32s]]:
        """Yields all rows in parts: ids, shape (n,), and rows, shape (n, dim)."""

    def put(self, table: Table, ids: Int64s, rows: Float32s) -> None:
        """Sets the rows of `ids`, each once."""

    def replace(self, table: Table, ids: Int64s, rows: Float32s) -> None:
        """Replaces all rows by these. The table's seed may have changed too."""


class LocalRowSource:
    """Rows in this process, in the tables themselves."""

    def once(self, table: Table, ids: Int64s) -> UniqueIds:  # noqa: ARG002
        return unique_ids(ids)

    def fetch(self, wanted: Sequence[RowsNeeded]) -> Sequence[Float32s]:
        return [each.table.rows.look_up(each.found.ids) for each in wanted]

    def count(self, table: Table) -> int:
        return len(table.rows)

    def pieces(self, table: Table) -> Iterator[tuple[Int64s, Float32s]]:
        every = table.rows.everything()
        yield every.ids, every.rows

    def put(self, table: Table, ids: Int64s, rows: Float32s) -> None:
        table.rows.put(ids, rows)

    def replace(self, table: Table, ids: Int64s, rows: Float32s) -> None:
        table.rows = table.rows.with_rows(ids, rows, row_key(table.seed, table.name))


class Gradients:
    """The gradients of one table since the last step: for each backward the ids and their sums."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._came: list[tuple[UniqueIds, Float32s]] = []

    def add(self, found: UniqueIds, sums: Float32s) -> None:
        """Adds the sums of unique ids, shape (m, dim). The caller must not use the array afterwards."""
        with self._lock:
            self._came.append((found, sums))

    def tensors(self) -> list[torch.Tensor]:
        """The gradients so far, as tensors on the same memory."""
        with self._lock:
            return [torch.from_numpy(sums) for _, sums in self._came]

    def take(self, partitions: int = 1) -> tuple[UniqueIds, Float32s] | None:
        """Takes all gradients: the unique ids, and the sums, shape (m, dim). None if there are none."""
        with self._lock:
            came, self._came = self._came, []
        if not came:
            return None
        if len(came) == 1 and came[0][0].starts.size == partitions + 1:
            return came[0]
        found = unique_ids(np.concatenate([each.ids for each, _ in came]), partitions)
        return found, sum_rows(np.concatenate([sums for _, sums in came]), found.places, found.ids.size)

    def clear(self) -> None:
        with self._lock:
            self._came = []


class Table(torch.nn.Module):
    """Rows of `dim` numbers, one for each int64 id. A row is made when it is first trained. Several modules can share
    one table.

    `name`: the table's name in a job; by default the path of the first module that has it. `initial`: the first values
    of a row, a function of the table's seed, its name and the id. `optimizer`: how rows are updated. `admission`: which
    ids get a row, by default all. `expiry`: which rows are removed, by default none. `seed`: by default drawn from
    torch's generator.

    `weight` has no elements. It carries `requires_grad`, and the device and dtype of rows in the model. Raises
    InvalidRequest, TooLarge, DTypeMismatch.

    >>> words = sy.tables.Table(16, name="words")
    >>> one, several = sy.Embedding(16, table=words), sy.EmbeddingBag(16, table=words)
    >>> one(torch.tensor([7])).shape, len(words)  # looking up makes no row
    (torch.Size([1, 16]), 0)
    """

    def __init__(
        self,
        dim: int,
        *,
        name: str = "",
        initial: InitialValues | None = None,
        optimizer: RowOptimizer | None = None,
        admission: Admission | None = None,
        expiry: Expiry | None = None,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
            raise InvalidRequest(f"a table of dim {dim!r}; expected a whole number, at least 1")
        if dim > TABLE_DIM_MAX:
            raise TooLarge(f"a table of dim {dim}; at most {TABLE_DIM_MAX}")
        if len(name) > VARIABLE_NAME_CHARACTERS_MAX:
            raise TooLarge(f"a table's name of {len(name)} characters; at most {VARIABLE_NAME_CHARACTERS_MAX}")
        dtype = dtype or torch.get_default_dtype()
        if dtype not in FLOAT_DTYPES:
            raise DTypeMismatch(f"a table of {dtype}", why="rows are real numbers", todo="use torch.float32")
        self.dim, self.name = dim, name
        self.initial = InitialValues(scale=dim**-0.5) if initial is None else initial
        self.optimizer = Adagrad() if optimizer is None else optimizer
        self.lifetime = _lifetime(admission, expiry)
        self.seed = int(torch.randint(1 << 62, ())) if seed is None else seed
        self.weight = torch.nn.Parameter(torch.empty(0, dim, dtype=dtype, device=device))
        self.source: RowSource = LocalRowSource()
        self.rows = self.no_rows()
        self.gradients = Gradients()
        self.is_trained = False

    def no_rows(self) -> LocalRows:
        """A store without rows, with this table's settings."""
        return LocalRows(self.dim, self.initial, row_key(self.seed, self.name), self.lifetime)

    def __len__(self) -> int:
        """How many rows there are."""
        return self.source.count(self)

    def extra_repr(self) -> str:
        where = f"{len(self)} rows" if isinstance(self.source, LocalRowSource) else "rows on servers"
        return f"{self.dim}, {where}, name={self.name!r}, {self.initial}, {self.optimizer}" + (
            f", {self.lifetime.admission}, {self.lifetime.expiry}" if self.lifetime != LifetimeRules() else ""
        )

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the rows, or reads those of the job; no optimizer trains it yet."""
        return self.__dict__ | {"gradients": None, "is_trained": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.gradients = Gradients()

    # ---- looking up

    def leaf(self, found: UniqueIds, rows: Float32s) -> torch.Tensor:
        """`rows` as a tensor of autograd, whose gradient is collected here."""
        tensor = torch.from_numpy(rows)
        if torch.is_grad_enabled() and self.weight.requires_grad:
            tensor.requires_grad_()

            def receive(leaf: torch.Tensor) -> None:
                sums, leaf.grad = leaf.grad, None
                if not self.is_trained:
                    raise _nobody_trains(self)
                assert sums is not None
                self.gradients.add(found, np.ascontiguousarray(sums.numpy()))

            tensor.register_post_accumulate_grad_hook(receive)  # type: ignore[no-untyped-call]
        return tensor

    # ---- all rows

    def put(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Sets the rows of `ids`, shape (n,), int64 or int32, to `rows`, shape (n, dim). Other rows stay.

        Raises DTypeMismatch, ShapeMismatch, InvalidRequest for rows that are not finite and for repeated ids; then
        nothing has changed.
        """
        if ids.dtype not in ID_DTYPES or rows.dtype not in FLOAT_DTYPES:
            raise DTypeMismatch(
                f"ids of {ids.dtype} and rows of {rows.dtype}", why="", todo="give int64 ids and rows of float32"
            )
        self._put(ids.detach().cpu().to(torch.int64).numpy(), rows.detach().cpu().float().numpy())

    def export(self, path: str | os.PathLike[str]) -> None:
        """Writes ids and rows to a file that ends with .parquet (with the extra "tables") or .safetensors. Rows of a
        job are read a partition at a time. Raises InvalidRequest, ConfigurationError without pyarrow,
        StorageUnavailable."""
        table_io.write(Path(path), self.dim, lambda: self.source.pieces(self))

    def everything(self) -> RowSet:
        """All rows, ids ascending."""
        pieces = list(self.source.pieces(self))
        if len(pieces) == 1 and (pieces[0][0][1:] > pieces[0][0][:-1]).all():
            return RowSet(*pieces[0])
        ids = np.concatenate([np.empty(0, np.int64), *[ids for ids, _ in pieces]])
        order = np.argsort(ids)
        rows = np.empty((ids.size, self.dim), np.float32)
        places, at = np.empty_like(order), 0
        places[order] = np.arange(ids.size)
        for part, values in pieces:
            rows[places[at : at + part.size]] = values
            at += part.size
        return RowSet(ids[order], rows)

    def load(self, source: str | os.PathLike[str] | torch.nn.Embedding | torch.nn.EmbeddingBag | torch.Tensor) -> None:
        """Puts the rows of a file that `export` wrote, or of an ordinary embedding or its weight, shape (n, dim), whose
        ids are 0 to n - 1. Other rows stay.

        Raises what `put` raises, CheckpointNotFound, CheckpointDamaged, ConfigurationError; then nothing has changed.
        """
        if isinstance(source, torch.nn.Embedding | torch.nn.EmbeddingBag):
            source = source.weight
        if isinstance(source, torch.Tensor):
            self.put(torch.arange(len(source)), source)
        else:
            found = table_io.read(Path(source))
            self._put(found.ids, found.rows)

    def _put(self, ids: Int64s, rows: Float32s) -> None:
        self.check_rows(ids, rows)
        self.source.put(self, ids, rows)

    def check_rows(self, ids: Int64s, rows: Float32s) -> None:
        """Raises InvalidRequest, ShapeMismatch unless `rows`, shape (n, dim), can be those of `ids`, shape (n,)."""
        if ids.ndim != 1 or rows.shape != (ids.size, self.dim):
            raise ShapeMismatch(
                f"ids of shape {ids.shape} and rows of shape {rows.shape} for {_called(self)}; expected (n,) and"
                f" (n, {self.dim})",
                why="each id has one row, of the table's dim",
                todo="give the rows of a table of the same dim",
            )
        if not np.isfinite(rows).all():
            wrong = ids[~np.isfinite(rows).all(axis=1)]
            raise InvalidRequest(
                f"{wrong.size} rows for {_called(self)} are not finite, the first of them that of id {wrong[0]}"
            )
        met = np.sort(ids)
        again = met[1:][met[1:] == met[:-1]]
        if again.size:
            raise InvalidRequest(f"two rows for id {again[0]} of {_called(self)}; each id has one")

    def _save_to_state_dict(self, destination: Any, prefix: str, _keep_vars: bool) -> None:
        """Saves ids ascending, their rows, and the seed, so that ids without a row read the same again."""
        every = self.everything()
        destination[prefix + "ids"] = torch.from_numpy(every.ids)
        destination[prefix + "rows"] = torch.from_numpy(every.rows)
        destination[prefix + "seed"] = torch.tensor(self.seed)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        _local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = {name: prefix + name for name in ("ids", "rows", "seed")}
        unexpected_keys += [
            key for key in state_dict if strict and key.startswith(prefix) and key not in names.values()
        ]
        lacking = [key for key in names.values() if key not in state_dict]
        missing_keys += lacking
        if lacking:
            return
        given = {name: torch.as_tensor(state_dict[key]).detach().cpu() for name, key in names.items()}
        if (
            given["ids"].dtype is not torch.int64
            or given["rows"].dtype not in FLOAT_DTYPES
            or given["seed"].numel() != 1
        ):
            error_msgs.append(
                f"{prefix}: no ids, rows and seed of a table, but {[each.dtype for each in given.values()]}"
            )
            return
        ids, rows = given["ids"].numpy(), given["rows"].float().numpy()
        try:
            self.check_rows(ids, rows)
        except InvalidRequest as error:
            error_msgs.append(f"{prefix}: {error}")
            return
        before, self.seed = self.seed, int(given["seed"])
        try:
            self.source.replace(self, ids, rows)
        except InvalidRequest as error:
            self.seed = before
            error_msgs.append(f"{prefix}: {error}")


def tables_of(model: torch.nn.Module) -> dict[str, Table]:
    """The tables of a model by name: the name that a table was given, or the path of the first module that has it.

    Raises VariableConflict for two tables of one name.

    >>> model = torch.nn.ModuleDict({"users": sy.Embedding(8), "topics": sy.EmbeddingBag(4, table="tags")})
    >>> sorted(sy.tables.tables_of(model))
    ['tags', 'users']
    """
    return {name: table for name, (_, table) in tables_by_path(model).items()}


def tables_by_path(model: torch.nn.Module) -> dict[str, tuple[str, Table]]:
    """As `tables_of`, with the path under which `model.state_dict()` has each table: the first, if several modules
    share it."""
    found: dict[str, tuple[str, Table]] = {}
    for compiled, module in model.named_modules():
        if isinstance(module, Table):
            path = compiled.replace("_orig_mod.", "")
            name = module.name or path.removesuffix(".table") or "table"
            _, other = found.setdefault(name, (path, module))
            if other is not module:
                raise VariableConflict(
                    f"two tables called {name!r}, of dims {other.dim} and {module.dim}",
                    why="a name is one table",
                    todo="make one sy.tables.Table and give it to all modules that share it (table=), or another name",
                )
    return found


def fetch(asked: Sequence[tuple[Table, Int64s]]) -> Iterator[tuple[torch.Tensor, Int64s]]:
    """For each table and its ids, shape (n,), gives rows, shape (m, dim), and the row of each id, shape (n,).

    The ids of one table are looked up together, and all tables of one source in one call.
    """
    by_table: dict[Table, list[int]] = {}
    for index, (table, _) in enumerate(asked):
        by_table.setdefault(table, []).append(index)
    wanted = [
        RowsNeeded(table, table.source.once(table, _joined([asked[index][1] for index in indices])))
        for table, indices in by_table.items()
    ]
    fetched: dict[Table, torch.Tensor] = {}
    for source in dict.fromkeys(each.table.source for each in wanted):
        ours = [each for each in wanted if each.table.source is source]
        for each, rows in zip(ours, source.fetch(ours), strict=True):
            fetched[each.table] = each.table.leaf(each.found, rows)
    places: dict[int, Int64s] = {}
    for each, indices in zip(wanted, by_table.values(), strict=True):
        begin = 0
        for index in indices:
            end = begin + asked[index][1].size
            places[index], begin = each.found.places[begin:end], end
    for index, (table, _) in enumerate(asked):
        yield fetched[table], places[index]


def _joined(parts: Sequence[Int64s]) -> Int64s:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _lifetime(admission: Admission | None, expiry: Expiry | None) -> LifetimeRules:
    for name, given, expected in ("admission", admission, Admission), ("expiry", expiry, Expiry):
        if given is not None and not isinstance(given, expected):
            raise InvalidRequest(
                f"{name} of a table is {given!r}",
                todo="give sy.tables.AdmitAll, AdmitAfter or AdmitByChance as admission, sy.tables.Expiry as expiry",
            )
    admits = AdmissionSettings() if admission is None else admission.settings
    return LifetimeRules(admits, ExpirySettings() if expiry is None else expiry.settings)


def _called(table: Table) -> str:
    return f"table {table.name!r}" if table.name else "a table"


def _nobody_trains(table: Table) -> InvalidRequest:
    return InvalidRequest(
        f"gradients for the rows of {_called(table)} of dim {table.dim}, which nobody would take",
        why="the optimizers of torch see parameters of a size, and a table has none",
        todo="make a sy.tables.Optimizer(model) before the first forward, and call its step() and zero_grad() beside"
        " those of the model's optimizer; where a table shall not learn: table.requires_grad_(False), torch.no_grad()",
    )
