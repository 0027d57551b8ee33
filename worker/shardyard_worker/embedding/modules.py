"""Modules that look up rows by id: `sy.Embedding`, `sy.EmbeddingBag`, `sy.EmbeddingCollection`.

Owns: what a forward takes and how it is checked, padding, and which rows become which output. Results are those of
`torch.nn.Embedding` and `torch.nn.EmbeddingBag` on the same rows. Invariant: invalid input is rejected before any
look-up. Must not know: where rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor

from shardyard.domain.errors import DTypeMismatch, InvalidRequest, ShapeMismatch, TooLarge
from shardyard.domain.limits import LOOK_UP_IDS_MAX
from shardyard.domain.tables.initial_values import InitialValues
from shardyard_worker.embedding.config import Admission, Expiry
from shardyard_worker.embedding.pooling import Mode, gather, pool
from shardyard_worker.embedding.row_optimizers import RowOptimizer
from shardyard_worker.embedding.table import ID_DTYPES, Table, fetch
from shardyard_worker.rows.dedup import Int64s

Features = torch.Tensor | Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class _CheckedLookup:
    """A checked look-up: flat ids without padding, and how their rows become the output."""

    ids: Int64s
    shape: tuple[int, ...] = ()
    """The shape of the ids, for an embedding."""
    kept: Int64s | None = None
    """The places of the ids in that shape; None: everywhere."""
    starts: Int64s | None = None
    """For bags: bag b has ids[starts[b]:starts[b + 1]]."""
    weights: torch.Tensor | None = None


class _LookupModule(torch.nn.Module):
    """What Embedding and EmbeddingBag share."""

    table: Table

    def __init__(
        self,
        dim: int,
        *,
        table: Table | str | None = None,
        padding_idx: int | None = None,
        initial: InitialValues | None = None,
        optimizer: RowOptimizer | None = None,
        admission: Admission | None = None,
        expiry: Expiry | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(table, Table):
            if table.dim != dim:
                raise ShapeMismatch(
                    f"{type(self).__name__} of dim {dim} on a table {table.name!r} of dim {table.dim}",
                    why="all modules that share a table look up rows of one dim",
                    todo=f"give dim={table.dim}, or another table",
                )
            if any(each is not None for each in (initial, optimizer, admission, expiry, dtype, device)):
                raise InvalidRequest(
                    f"initial, optimizer, admission, expiry, dtype or device of a {type(self).__name__} on a table that"
                    " is there already",
                    todo="give them to the sy.tables.Table",
                )
            self.table = table
        else:
            self.table = Table(
                dim,
                name=table or "",
                initial=initial,
                optimizer=optimizer,
                admission=admission,
                expiry=expiry,
                dtype=dtype,
                device=device,
            )
        if padding_idx is not None and not -(1 << 63) <= padding_idx < 1 << 63:
            raise InvalidRequest(f"padding_idx is {padding_idx}; an id is a number of 64 bits")
        self.padding_idx = padding_idx

    @property
    def dim(self) -> int:
        return self.table.dim

    def extra_repr(self) -> str:
        return f"{self.dim}" + ("" if self.padding_idx is None else f", padding_idx={self.padding_idx}")

    def checked(self, features: Features) -> _CheckedLookup:
        """The look-up for an input of `forward`. Raises what `forward` raises."""
        raise NotImplementedError

    def output(self, asked: _CheckedLookup, rows: torch.Tensor, places: Int64s) -> torch.Tensor:
        """The output of `forward`: `rows[places]` are the rows of the looked-up ids."""
        raise NotImplementedError

    def output_shape(self, features: Features) -> tuple[int, ...]:
        """The shape of the output of `forward`, without looking at ids."""
        raise NotImplementedError

    def _forward(self, features: Features) -> torch.Tensor:
        (found,) = _look_up([(self, features)])
        return found

    def like_output(self, features: Features) -> torch.Tensor:
        """A tensor without data in the place of the output."""
        weight = self.table.weight
        made = torch.empty(self.output_shape(features), dtype=weight.dtype, device=weight.device)
        return made.requires_grad_(weight.requires_grad and torch.is_grad_enabled())

    def as_model(self, made: torch.Tensor) -> torch.Tensor:
        """On the device and in the dtype of the model."""
        return made.to(self.table.weight.device, self.table.weight.dtype)


class Embedding(_LookupModule):
    """`torch.nn.Embedding` without a size: any int64 id has a row of `dim` numbers.

    `table`: a `sy.tables.Table` that several modules share, or a name for this module's own table. `padding_idx`: an id
    whose row is zeros and has no gradient. `initial`, `optimizer`: how rows begin and are updated. `admission`,
    `expiry`: which ids get a row, and which rows are removed. `dtype`, `device`: of the output. Raises InvalidRequest,
    ShapeMismatch, DTypeMismatch, TooLarge.

    >>> embedding = sy.Embedding(16, table="users")
    >>> embedding(torch.tensor([[17, -4, 9_000_000_000_000]])).shape
    torch.Size([1, 3, 16])
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns shape (*ids.shape, dim), for ids of any shape, int64 or int32. Raises DTypeMismatch, TooLarge,
        InvalidRequest."""
        return self._forward(ids)

    def checked(self, features: Features) -> _CheckedLookup:
        ids = _only(features)
        flat = flat_ids(ids)
        if self.padding_idx is not None:
            kept = np.flatnonzero(flat != self.padding_idx)
            if kept.size < flat.size:
                return _CheckedLookup(flat[kept], tuple(ids.shape), kept)
        return _CheckedLookup(flat, tuple(ids.shape))

    def output_shape(self, features: Features) -> tuple[int, ...]:
        return (*_only(features).shape, self.dim)

    def output(self, asked: _CheckedLookup, rows: torch.Tensor, places: Int64s) -> torch.Tensor:
        made = gather(rows, places)
        if asked.kept is not None:
            count = int(np.prod(asked.shape))
            made = made.new_zeros(count, self.dim).index_copy(0, torch.from_numpy(asked.kept), made)
        return made.view(*asked.shape, self.dim)


class EmbeddingBag(_LookupModule):
    """`torch.nn.EmbeddingBag` without a size: for each bag of ids the sum, mean or maximum of their rows, or zeros for
    an empty bag.

    `include_last_offset`: the last offset is where the last bag ends. Ids equal to `padding_idx` are left out of their
    bags. Everything else is as in `Embedding`.

    >>> bag = sy.EmbeddingBag(8, mode="sum")
    >>> bag(torch.tensor([5, 6, 7]), offsets=torch.tensor([0, 1])).shape  # the bags (5) and (6, 7)
    torch.Size([2, 8])
    """

    def __init__(
        self,
        dim: int,
        mode: str = "mean",
        *,
        table: Table | str | None = None,
        padding_idx: int | None = None,
        include_last_offset: bool = False,
        initial: InitialValues | None = None,
        optimizer: RowOptimizer | None = None,
        admission: Admission | None = None,
        expiry: Expiry | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            dim,
            table=table,
            padding_idx=padding_idx,
            initial=initial,
            optimizer=optimizer,
            admission=admission,
            expiry=expiry,
            dtype=dtype,
            device=device,
        )
        if mode not in list(Mode):
            raise InvalidRequest(f"mode is {mode!r}; expected one of {', '.join(Mode)}")
        self.mode = Mode(mode)
        self.include_last_offset = include_last_offset

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode.value!r}"

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns shape (bags, dim). `ids`, int64 or int32: shape (bags, n), or (n,) with `offsets`, shape (bags,):
        where each bag begins. `per_sample_weights`: factors of the rows, in the shape of `ids`; for mode "sum".

        Raises DTypeMismatch, ShapeMismatch, InvalidRequest, TooLarge.
        """
        return self._forward((ids, offsets, per_sample_weights))

    def checked(self, features: Features) -> _CheckedLookup:
        ids, offsets, weights = _three(features)
        flat = flat_ids(ids)
        asked = _CheckedLookup(flat, starts=self._starts(ids, offsets), weights=self._weights(ids, weights))
        if self.padding_idx is None:
            return asked
        kept = flat != self.padding_idx
        if kept.all():
            return asked
        before = np.concatenate(([0], np.cumsum(kept)))
        left = None if asked.weights is None else asked.weights[torch.from_numpy(kept)]
        return replace(asked, ids=flat[kept], starts=before[asked.starts], weights=left)

    def output_shape(self, features: Features) -> tuple[int, ...]:
        ids, offsets, _ = _three(features)
        bags = len(ids) if offsets is None else len(offsets) - self.include_last_offset
        return bags, self.dim

    def output(self, asked: _CheckedLookup, rows: torch.Tensor, places: Int64s) -> torch.Tensor:
        assert asked.starts is not None
        return pool(rows, places, asked.starts, self.mode, asked.weights)

    def _starts(self, ids: torch.Tensor, offsets: torch.Tensor | None) -> Int64s:
        if ids.dim() == 2:
            if offsets is not None:
                raise InvalidRequest(
                    "offsets for ids of shape (bags, n), whose rows are the bags", todo="leave them out"
                )
            return np.arange(ids.shape[0] + 1, dtype=np.int64) * ids.shape[1]
        if ids.dim() != 1:
            raise ShapeMismatch(
                f"ids of shape {tuple(ids.shape)} for bags; expected (bags, n), or (n,) with offsets", why="", todo=""
            )
        if offsets is None:
            raise InvalidRequest("ids of shape (n,) without offsets", why="", todo="say where each bag begins")
        if offsets.dtype not in ID_DTYPES or offsets.dim() != 1:
            raise DTypeMismatch(
                f"offsets of {offsets.dtype}, shape {tuple(offsets.shape)}; expected int64 or int32, shape (bags,)",
                why="an offset is a number of ids",
                todo="",
            )
        given = offsets.detach().cpu().to(torch.int64).numpy()
        if self.include_last_offset and not given.size:
            raise InvalidRequest("no offsets, where the last one is the end of the last bag; expected at least one")
        starts = given if self.include_last_offset else np.append(given, ids.numel())
        if starts[0] != 0 or starts[-1] != ids.numel() or (starts[1:] < starts[:-1]).any():
            shown = f"{given[:8].tolist()}{'...' if given.size > 8 else ''}"
            if given.size or ids.numel():
                raise InvalidRequest(
                    f"offsets {shown} for {ids.numel()} ids; expected to begin with 0, not to fall"
                    + (f", and to end with {ids.numel()}" if self.include_last_offset else f", at most {ids.numel()}")
                )
        return np.array(starts, np.int64)

    def _weights(self, ids: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor | None:
        if weights is None:
            return None
        if self.mode is not Mode.SUM:
            raise InvalidRequest(f"per_sample_weights with mode {self.mode.value!r}", todo='use mode "sum"')
        if weights.shape != ids.shape:
            raise ShapeMismatch(
                f"per_sample_weights of shape {tuple(weights.shape)} for ids of shape {tuple(ids.shape)}",
                why="each id has a weight",
                todo="",
            )
        if not weights.is_floating_point():
            raise DTypeMismatch(f"per_sample_weights of {weights.dtype}", why="a row is multiplied by them", todo="")
        return weights.reshape(-1).to("cpu", torch.float32)


class EmbeddingCollection(torch.nn.Module):
    """Looks up several features together: one look-up for all features of a table, and one round trip for all tables of
    a job.

    `features`: for each name an Embedding, an EmbeddingBag, or a dim, which means EmbeddingBag(dim, "sum"). Raises
    InvalidRequest.

    >>> features = sy.EmbeddingCollection({"user": sy.Embedding(16), "topics": 8})
    >>> found = features({"user": torch.tensor([3]), "topics": torch.tensor([[1, 2]])})
    >>> {name: tuple(rows.shape) for name, rows in found.items()}
    {'user': (1, 16), 'topics': (1, 8)}
    """

    def __init__(self, features: Mapping[str, Embedding | EmbeddingBag | int]) -> None:
        super().__init__()
        self.features = torch.nn.Module()
        for name, feature in features.items():
            if not isinstance(name, str) or not name or "." in name:
                raise InvalidRequest(f"a feature called {name!r}; expected a text without dots")
            module = EmbeddingBag(feature, "sum") if isinstance(feature, int) else feature
            if not isinstance(module, _LookupModule):
                raise InvalidRequest(
                    f"feature {name!r} is {type(module).__name__}; expected sy.Embedding, sy.EmbeddingBag or a dim"
                )
            # not add_module, which refuses names such as "type"
            self.features._modules[name] = module

    def forward(self, features: Mapping[str, Features]) -> dict[str, torch.Tensor]:
        """Returns each feature's output by name. An input is ids, (ids, offsets), or (ids, offsets,
        per_sample_weights). Features may be left out. Raises InvalidRequest for an unknown one, and what the modules
        raise."""
        found = _look_up([(self.module(name), given) for name, given in features.items()])
        return dict(zip(features, found, strict=True))

    def module(self, name: str) -> _LookupModule:
        """The module of a feature. Raises InvalidRequest."""
        known: dict[str, Any] = self.features._modules
        if name not in known:
            raise InvalidRequest(f"there is no feature {name!r}; there are {', '.join(known)}")
        found: _LookupModule = known[name]
        return found


def ids_of(module: torch.nn.Module, features: Any) -> list[tuple[Table, Int64s]]:
    """What `module`, or a table, would look up for these inputs. Raises InvalidRequest, and what a forward raises."""
    if isinstance(module, Table):
        return [(module, flat_ids(_only(features)))]
    if isinstance(module, EmbeddingCollection):
        if not isinstance(features, Mapping):
            raise InvalidRequest(f"features are {type(features).__name__}; expected ids by feature")
        return [each for name, given in features.items() for each in ids_of(module.module(name), given)]
    if not isinstance(module, _LookupModule):
        raise InvalidRequest(
            f"ids for {type(module).__name__}; expected a sy.Embedding, EmbeddingBag, EmbeddingCollection, or a table"
        )
    return [(module.table, module.checked(features).ids)]


_Request = tuple[_LookupModule, Features]


def _look_up(requests: Sequence[_Request]) -> list[torch.Tensor]:
    """The output of each module. Compiled models leave their graphs for this call."""
    return _look_up_uncompiled(requests) if torch.compiler.is_compiling() else _look_up_now(requests)


def _look_up_now(requests: Sequence[_Request]) -> list[torch.Tensor]:
    if any(isinstance(_three(features)[0], FakeTensor) for _, features in requests):  # without data, for its shapes
        return [module.like_output(features) for module, features in requests]
    asked = [module.checked(features) for module, features in requests]
    found = fetch([(module.table, each.ids) for (module, _), each in zip(requests, asked, strict=True)])
    return [
        module.as_model(module.output(each, rows, places))
        for (module, _), each, (rows, places) in zip(requests, asked, found, strict=True)
    ]


# torch.compiler.disable would import the compiler at once
_look_up_uncompiled: Callable[[Sequence[_Request]], list[torch.Tensor]] = _disable_dynamo(_look_up_now)


def _only(features: Features) -> torch.Tensor:
    ids, offsets, weights = _three(features)
    if offsets is not None or weights is not None:
        raise InvalidRequest("offsets or weights for an Embedding, which has no bags", todo="use an EmbeddingBag")
    return ids


def _three(features: Features) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    given = (features,) if isinstance(features, torch.Tensor) else tuple(features)
    if not 1 <= len(given) <= 3 or not all(isinstance(each, torch.Tensor | None) for each in given):
        raise InvalidRequest(
            f"ids are {type(features).__name__}; expected a tensor, (ids, offsets), or (ids, offsets, weights)"
        )
    ids, offsets, weights = (*given, None, None)[:3]
    if ids is None:
        raise InvalidRequest("no ids; expected a tensor")
    return ids, offsets, weights


def flat_ids(ids: torch.Tensor) -> Int64s:
    if ids.dtype not in ID_DTYPES or ids.layout is not torch.strided:
        raise DTypeMismatch(
            f"ids of {ids.dtype}, {ids.layout}; expected int64 or int32, strided",
            why="an id is a whole number, and rounding it would look up another row",
            todo="give ids.to(torch.int64), or for ragged ids their values and offsets",
        )
    if ids.numel() > LOOK_UP_IDS_MAX:
        raise TooLarge(f"{ids.numel()} ids in one look-up; at most {LOOK_UP_IDS_MAX}")
    if ids.dtype is not torch.int64 or ids.device.type != "cpu":
        ids = ids.cpu().to(torch.int64)
    found: Int64s = ids.reshape(-1).numpy()
    return found
