"""Gradients and initial values of rows for servers, and the ids of look-ups; decodes the answers.

Owns: the cut by partition, and the codes. Ids and float32 rows of a table are packed: what is sent are views of its
arrays, and nothing is copied here. Invariants: a server gets all rows of its partitions and no others, under any map.
Each row is encoded once, however often it is sent. Must not know: servers' addresses, what rows are for.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardyard.codecs.rows.row_ids import encode_runs
from shardyard.codecs.rows.row_values import decode_rows, encode_gradients, first_code
from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.domain.ids import PartitionId
from shardyard.domain.limits import CODE_HEAD_BYTES_MAX, MIB, ROWS_ANSWERED_BYTES_MAX, ROWS_PER_PART_MAX
from shardyard.domain.pulls import RequestedRows, RowCode
from shardyard.domain.pushes import PushedRows
from shardyard_worker.rows.dedup import Float32s, Int64s, UniqueIds

PUSH_BYTES_EACH = 64 * MIB
"""Initial values of rows are pushed in pieces of about this size."""
ROW_COST_MIN = 16
"""A requested row counts as at least so many bytes, since its id travels too."""


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of one table: ids, shape (m,), by partition and ascending within each (UniqueIds), and values, shape
    (m, dim)."""

    table: int
    found: UniqueIds
    values: Float32s

    def cut(self) -> Iterator[TableRows]:
        """Yields the rows in pieces of a bounded size."""
        each = max(1, PUSH_BYTES_EACH // max(1, self.values[:1].nbytes + 8))
        for begin in range(0, self.found.ids.size, each):
            part = slice(begin, begin + each)
            starts = (self.found.starts - begin).clip(0, self.found.ids[part].size)
            yield TableRows(
                self.table, UniqueIds(self.found.ids[part], self.found.places[:0], starts), self.values[part]
            )


_Span = tuple[PartitionId, int, int]
"""A partition, and where its rows begin and end among those of a table."""


@dataclass(frozen=True, slots=True)
class _Part:
    rows: int
    ids: memoryview
    values: memoryview


@dataclass(frozen=True, slots=True)
class Rounding:
    """How gradients of rows are encoded. Random numbers depend on the job's `seed` and on `work`, the numbers that name
    the work, so repeated work gives the same bits."""

    code: RowCode
    seed: int = 0
    work: tuple[int, ...] = ()

    def key(self, table: int) -> int:
        numbers = " ".join(map(str, (self.seed, table, *self.work)))
        return int.from_bytes(hashlib.blake2b(numbers.encode(), digest_size=8).digest(), "little")


EXACT: Final = Rounding(RowCode.FLOAT32)


class EncodedRows:
    """The rows of a push: packed, or encoded if `rounding` says so. `groups`: the settings of each table's optimizer.
    Raises TooLarge."""

    def __init__(
        self, given: Sequence[TableRows], groups: tuple[tuple[float, ...], ...] = (), rounding: Rounding = EXACT
    ) -> None:
        self.groups = groups
        self._packed: list[tuple[TableRows, list[_Span]]] = []
        self._coded: list[tuple[int, dict[PartitionId, _Part]]] = []
        for each in given:
            spans = list(_spans(each.found, ROWS_PER_PART_MAX))
            if rounding.code is RowCode.FLOAT32:
                self._packed.append((each, spans))
                continue
            parts, key = {}, rounding.key(each.table)
            ids_of_all = each.found.ids
            codes = encode_runs(ids_of_all, [(begin, end) for _, begin, end in spans])
            for (partition, begin, end), ids in zip(spans, codes, strict=True):
                values = encode_gradients(each.values[begin:end], ids_of_all[begin:end], rounding.code, key)
                parts[partition] = _Part(end - begin, ids, values)
            self._coded.append((each.table, parts))

    def of(self, owned: Sequence[PartitionId]) -> tuple[tuple[PushedRows, ...], list[memoryview]]:
        """The headers of the rows of these partitions, and their bytes."""
        headers: list[PushedRows] = []
        pieces: list[memoryview] = []
        for each, spans in self._packed:
            owns = [span for span in spans if span[0] in owned]
            if owns:
                partitions, rows = [span[0] for span in owns], [end - begin for _, begin, end in owns]
                runs = _joined(owns)
                values = [_bytes_of(each.values[begin:end]) for begin, end in runs]
                nbytes = 4 * each.values.shape[1] * sum(rows)
                headers.append(PushedRows(each.table, tuple(partitions), tuple(rows), (), (nbytes,)))
                pieces += [_bytes_of(each.found.ids[begin:end]) for begin, end in runs]
                pieces += values
        for table, parts in self._coded:
            mine = [(partition, parts[partition]) for partition in owned if partition in parts]
            if not mine:
                continue
            headers.append(
                PushedRows(
                    table,
                    tuple([partition for partition, _ in mine]),
                    tuple([part.rows for _, part in mine]),
                    tuple([len(part.ids) for _, part in mine]),
                    tuple([len(part.values) for _, part in mine]),
                )
            )
            for _, part in mine:
                pieces += [part.ids, part.values]
        return tuple(headers), pieces


def _joined(spans: Sequence[_Span]) -> list[tuple[int, int]]:
    """Where the spans begin and end. Adjacent ones are merged."""
    runs: list[tuple[int, int]] = []
    for _, begin, end in spans:
        if runs and runs[-1][1] == begin:
            begin = runs.pop()[0]
        runs.append((begin, end))
    return runs


def _bytes_of(array: Float32s | Int64s) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _spans(found: UniqueIds, rows_max: int) -> Iterator[_Span]:
    starts = found.starts.tolist()
    for partition, (begin, end) in enumerate(itertools.pairwise(starts)):
        if end - begin > rows_max:
            raise TooLarge(
                f"gradients of {end - begin} rows of one table in partition {partition}; at most {rows_max} are taken",
                todo="use smaller batches, or more partitions (job.partitions)",
            )
        if begin < end:
            yield PartitionId(partition), begin, end


@dataclass(frozen=True, slots=True)
class RowLookup:
    """A look-up on one server. `ids`: their bytes, in pieces. `answers`: for each run of rows in the answer its
    look-up, and where the run begins and ends there."""

    requested: tuple[RequestedRows, ...]
    ids: tuple[memoryview, ...]
    answers: tuple[tuple[int, int, int], ...]

    def places(self, into: Sequence[Float32s]) -> list[memoryview]:
        """The memory for the rows, in the order in which they arrive. Adjacent runs are merged."""
        spans: list[tuple[int, int, int]] = []
        for look_up, begin, end in self.answers:
            if spans and spans[-1][0] == look_up and spans[-1][2] == begin:
                begin = spans.pop()[1]
            spans.append((look_up, begin, end))
        return [into[look_up][begin:end].reshape(-1).view("u1").data for look_up, begin, end in spans]

    def put(self, data: memoryview, into: Sequence[Float32s], code: RowCode = RowCode.FLOAT32) -> None:
        """Copies the rows of an answer to their places. Raises MalformedPayload if the size does not match."""
        if code is not RowCode.FLOAT32:
            self._put_coded(data, into)
            return
        if len(data) != self.nbytes(into):
            raise MalformedPayload(f"a look-up answered with {len(data)} bytes; expected {self.nbytes(into)}")
        at = 0
        for place in self.places(into):
            place[:] = data[at : at + len(place)]
            at += len(place)

    def _put_coded(self, data: memoryview, into: Sequence[Float32s]) -> None:
        for look_up, begin, end in self.answers:
            rows = into[look_up][begin:end]
            code = first_code(data, *rows.shape)
            rows[:] = decode_rows(code, *rows.shape)
            data = data[len(code) :]
        if len(data):
            raise MalformedPayload(f"a look-up answered with {len(data)} bytes more than its rows have")

    def nbytes(self, into: Sequence[Float32s]) -> int:
        """The bytes of an answer without codes."""
        return sum([len(place) for place in self.places(into)])


def questions(
    wanted: Sequence[tuple[int, UniqueIds, int]], owned: Sequence[PartitionId], bytes_max: int = ROWS_ANSWERED_BYTES_MAX
) -> list[RowLookup]:
    """The requests to one server for rows of its partitions; several, if one answer would exceed `bytes_max`. A look-up
    in `wanted` has a table's number, its ids and its dim. Each table appears once."""
    made: list[RowLookup] = []
    runs: dict[int, list[tuple[PartitionId, int, int]]] = {}
    left = bytes_max

    def end() -> None:
        nonlocal left
        if runs:
            made.append(_question(wanted, runs))
        runs.clear()
        left = bytes_max

    for look_up, (_, found, dim) in enumerate(wanted):
        starts = found.starts.tolist()
        for partition in owned:
            begin, last = starts[partition], starts[partition + 1]
            while begin < last:
                cost = max(4 * dim, ROW_COST_MIN)
                rows = min(last - begin, (left - CODE_HEAD_BYTES_MAX) // cost)
                if rows <= 0 or any(run[0] == partition for run in runs.get(look_up, ())):
                    end()
                    continue
                runs.setdefault(look_up, []).append((partition, begin, begin + rows))
                left -= cost * rows + CODE_HEAD_BYTES_MAX
                begin += rows
    end()
    return made


def _question(
    wanted: Sequence[tuple[int, UniqueIds, int]], runs: dict[int, list[tuple[PartitionId, int, int]]]
) -> RowLookup:
    asked: list[RequestedRows] = []
    ids: list[memoryview] = []
    for look_up, mine in runs.items():
        table, found, _ = wanted[look_up]
        partitions, rows = [partition for partition, _, _ in mine], [end - begin for _, begin, end in mine]
        asked.append(RequestedRows(table, tuple(partitions), tuple(rows)))
        ids += [_bytes_of(found.ids[begin:end]) for begin, end in _joined(mine)]
    answers = [(look_up, begin, end) for look_up, mine in runs.items() for _, begin, end in mine]
    return RowLookup(tuple(asked), tuple(ids), tuple(answers))
