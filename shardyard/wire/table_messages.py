"""Converts tables, their rows and look-ups between messages and domain types.

shardyard.domain.layout.checks decides whether the names of tables are unique; the server decides what fits a job.
Invariant: the numbers of a header are checked against the limits, and against the bytes that it announces, before
memory is allocated for them. Must not know: any state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

import numpy as np
import numpy.typing as npt

from shardyard.domain import limits
from shardyard.domain.errors import InvalidRequest, MalformedPayload, TooLarge
from shardyard.domain.ids import Generation, Incarnation, PartitionId
from shardyard.domain.layout.checks import check_tables
from shardyard.domain.pulls import LookupRequest, RequestedRows, RowCode
from shardyard.domain.pushes import PushedRows
from shardyard.domain.tables import row_optimizers
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_ids import Ids
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard.wire.common_messages import (
    EnumNumbers,
    caller_from_wire,
    caller_to_wire,
    check_unique,
    parsed,
    random_name,
    text,
)
from shardyard.wire.frames import Frame
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import parameter_server_pb2 as server

_INITIALS = EnumNumbers(InitialKind, common.InitialKind, "INITIAL_KIND_", "how rows begin, of table ")
_ADMISSIONS = EnumNumbers(Admission, common.AdmissionKind, "ADMISSION_KIND_", "the admission of table ")
_ROW_CODES = EnumNumbers(RowCode, server.RowCode, "ROW_CODE_", "the code of a look-up's answer", RowCode.FLOAT32)


# ---- tables


def table_to_wire(table: TableSettings) -> common.TableSpec:
    admission = table.admission
    return common.TableSpec(
        name=table.name,
        dim=table.dim,
        optimizer=table.optimizer,
        settings=[setting.name for setting in row_optimizers.settings_of(table.optimizer)],
        values=table.group,
        seed=table.seed,
        initial=_INITIALS.to_wire(table.initial.kind),
        scale=table.initial.scale,
        rows_max=table.rows_max,
        admission=common.Admission(**asdict(admission) | {"kind": _ADMISSIONS.to_wire(admission.kind)}),
        expiry=common.Expiry(**asdict(table.expiry)),
        path=table.path,
    )


def table_from_wire(message: common.TableSpec) -> TableSettings:
    """Raises MalformedPayload, TooLarge, InvalidRequest."""
    name = message.name
    if len(name) > limits.VARIABLE_NAME_CHARACTERS_MAX:
        raise TooLarge(
            f"the name of a table has {len(name)} characters; at most {limits.VARIABLE_NAME_CHARACTERS_MAX} are allowed"
        )
    names = tuple(setting.name for setting in row_optimizers.settings_of(message.optimizer))
    if tuple(message.settings) != names:
        raise InvalidRequest(
            f"table {name!r} has the settings {', '.join(message.settings)} of {message.optimizer!r}; expected "
            + ", ".join(names)
        )
    if len(message.values) != len(names):
        raise InvalidRequest(f"table {name!r} has {len(message.values)} values for its settings; expected {len(names)}")
    initial, expiry = _INITIALS.from_wire(message.initial, repr(name)), message.expiry
    return TableSettings(
        name,
        message.dim,
        message.optimizer,
        tuple(message.values),
        message.seed,
        InitialValues(initial, message.scale),
        message.rows_max or limits.TABLE_ROWS_MAX,
        _admission(message),
        ExpirySettings(*[getattr(expiry, each.name) for each in fields(ExpirySettings)]),
        text(message.path, f"the path of table {name!r}", limits.VARIABLE_NAME_CHARACTERS_MAX),
    )


def _admission(message: common.TableSpec) -> AdmissionSettings:
    given = message.admission
    if given.kind == common.ADMISSION_KIND_UNSPECIFIED:
        return AdmissionSettings()
    kind = _ADMISSIONS.from_wire(given.kind, repr(message.name))
    return AdmissionSettings(kind, given.threshold, given.chance, given.cells, given.zeros)


def tables_to_wire(tables: Iterable[TableSettings]) -> list[common.TableSpec]:
    return [table_to_wire(table) for table in tables]


def tables_from_wire(messages: Sequence[common.TableSpec]) -> tuple[TableSettings, ...]:
    """Raises what `table_from_wire` and shardyard.domain.layout.checks.check_tables raise."""
    if len(messages) > limits.TABLES_MAX:
        raise TooLarge(f"a job has {len(messages)} tables; at most {limits.TABLES_MAX} are allowed")
    tables = tuple(table_from_wire(message) for message in messages)
    check_tables(tables)
    return tables


# ---- rows


def pushed_to_wire(rows: Iterable[PushedRows]) -> list[server.PushedRows]:
    return [
        server.PushedRows(
            table=each.table,
            partitions=each.partitions,
            rows=each.rows,
            id_bytes=each.id_bytes,
            row_bytes=each.row_bytes,
            counted=each.counted,
            now_ms=each.now_ms,
        )
        for each in rows
    ]


def pushed_from_wire(messages: Sequence[server.PushedRows]) -> tuple[PushedRows, ...]:
    """Raises MalformedPayload, TooLarge."""
    found = []
    for each in messages:
        partitions, rows = _rows(each.table, each.partitions, each.rows, limits.ROWS_PER_PART_MAX)
        ids, lengths = tuple(each.id_bytes), tuple(each.row_bytes)
        if (len(ids), len(lengths)) not in ((0, 1), (len(partitions), len(partitions))):
            raise MalformedPayload(
                f"rows of {len(partitions)} partitions have {len(ids)} codes of ids and {len(lengths)} of gradients"
            )
        times = tuple(each.now_ms)
        if times and len(times) != len(partitions):
            raise MalformedPayload(f"rows of {len(partitions)} partitions have {len(times)} times")
        if times and max(times) > limits.TABLE_TIME_MS_MAX:
            raise MalformedPayload(f"rows came at {max(times)} ms; the largest time is {limits.TABLE_TIME_MS_MAX} ms")
        found.append(PushedRows(each.table, partitions, rows, ids, lengths, each.counted, times))
    check_unique([each.table for each in found], "a list of rows", "table")
    return tuple(found)


def requested_to_wire(requested: Iterable[RequestedRows]) -> list[server.RequestedRows]:
    return [server.RequestedRows(table=each.table, partitions=each.partitions, rows=each.rows) for each in requested]


def requested_from_wire(
    messages: Sequence[server.RequestedRows], rows_max: int = limits.LOOK_UP_IDS_MAX
) -> tuple[RequestedRows, ...]:
    """`rows_max`: of a table in one partition. Raises MalformedPayload, TooLarge."""
    found = tuple(
        [RequestedRows(each.table, *_rows(each.table, each.partitions, each.rows, rows_max)) for each in messages]
    )
    check_unique([each.table for each in found], "a list of rows", "table")
    return found


def look_up_to_header(asked: LookupRequest) -> bytes:
    return server.LookUpHeader(
        caller=caller_to_wire(asked.caller),
        server=asked.server,
        generation=asked.generation,
        requested=requested_to_wire(asked.requested),
        number=asked.number,
        wait_ms=asked.wait_ms,
        code=_ROW_CODES.to_wire(asked.code),
        pin=asked.pin,
    ).SerializeToString()


def look_up_from_header(header: bytes) -> LookupRequest:
    """Raises MalformedPayload, TooLarge, InvalidRequest."""
    message = parsed(server.LookUpHeader, header, "the header of a look-up")
    requested = requested_from_wire(message.requested)
    if message.wait_ms > limits.PULL_WAIT_MS_MAX:
        raise InvalidRequest(f"a look-up waits {message.wait_ms} ms; at most {limits.PULL_WAIT_MS_MAX} ms are allowed")
    if message.pin:
        random_name(message.pin)
        if message.HasField("number") or message.wait_ms:
            raise InvalidRequest(
                "a look-up of a pin also asks for a version", todo="leave it out; the pin has one version"
            )
    return LookupRequest(
        caller_from_wire(message.caller),
        Incarnation(message.server),
        Generation(message.generation),
        requested,
        message.number if message.HasField("number") else None,
        message.wait_ms,
        _ROW_CODES.from_wire(message.code),
        message.pin,
    )


def _rows(
    table: int, partitions: Sequence[int], rows: Sequence[int], rows_max: int
) -> tuple[tuple[PartitionId, ...], tuple[int, ...]]:
    """The partitions and their numbers of rows, checked."""
    if table >= limits.TABLES_MAX or len(partitions) > limits.PARTITIONS_MAX:
        raise TooLarge(f"rows of table {table} in {len(partitions)} partitions are more than a job can have")
    if not partitions or len(set(partitions)) != len(partitions):
        raise MalformedPayload(f"rows of table {table} name no partition, or one of them twice")
    if len(partitions) != len(rows):
        raise MalformedPayload(
            f"rows of table {table} in {len(partitions)} partitions have {len(rows)} numbers of rows"
        )
    if min(rows) < 1:
        raise MalformedPayload(f"table {table} has no rows in one of the partitions that are named")
    if max(rows) > rows_max:
        raise TooLarge(f"table {table} has {max(rows)} rows for one partition; at most {rows_max} are allowed")
    return tuple(map(PartitionId, partitions)), tuple(rows)


def rows_from_frames(frames: Iterable[Frame], dim: int, sender: str) -> list[tuple[Ids, npt.NDArray[np.float32]]]:
    """The pieces of an answer to ReadRows, copied: ids, shape (n,), and their rows, shape (n, dim)."""
    found = []
    before, width = 0, 8 + 4 * dim
    for frame in frames:
        rows, odd = divmod(len(frame.data), width)
        if odd or frame.offset != before:
            raise MalformedPayload(
                f"{sender} sent {len(frame.data)} bytes of rows of {width} bytes from row {frame.offset} on; expected"
                f" whole rows from row {before} on"
            )
        data = np.frombuffer(frame.data, np.uint8)
        ids = data[: 8 * rows].copy().view(np.int64)
        found.append((ids, data[8 * rows :].copy().view(np.float32).reshape(rows, dim)))
        before += rows
    return found
