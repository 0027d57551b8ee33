"""Everything that reads bytes which somebody else wrote: messages, frames, codes, checkpoints, records, settings.

A decoder gives a value or raises one of our errors. What else it does is a defect.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from shardyard.checkpoints import layout as layouts
from shardyard.checkpoints import manifest, partition_file, residual_file, rows_file
from shardyard.checkpoints.convert import entry_from_wire, file_from_wire, residual_from_wire
from shardyard.checkpoints.manifest import FileRef, Manifest, PartitionEntry, PartitionFile
from shardyard.checkpoints.partition_file import BlockState, PartitionState, SourceMark
from shardyard.codecs.dense.decoding import apply, decode
from shardyard.codecs.rows.row_ids import decode_ids, encode_ids
from shardyard.codecs.rows.row_values import decode_rows, encode_rows
from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain.compression import parse_pull_rules, parse_push_rules
from shardyard.domain.consistency import ConsistencyMode, Durability, UpdateMode
from shardyard.domain.errors import ShardyardError
from shardyard.domain.ids import (
    Caller,
    Generation,
    Incarnation,
    JobId,
    MemberRole,
    PartitionId,
    Rank,
    Term,
    Token,
    Version,
)
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import RowCode
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, SourceKey, WorkerSource
from shardyard.domain.pushes import PushedRows, PushHeader, PushKind, PushPart
from shardyard.domain.tables.row_ids import partition_of
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard.domain.variables import DType, VariableSpec
from shardyard.storage.json_reader import JsonNode, canonical
from shardyard.storage.storage import LocalStorage, Written
from shardyard.transport.error_codes import from_detail
from shardyard.wire import (
    common_messages,
    frames,
    layout_messages,
    lease_messages,
    pull_messages,
    push_messages,
)
from shardyard.wire.headers import HeaderReader, reply_from_header
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.members.membership import Registration
from shardyard_coordinator.records import Record
from shardyard_coordinator.service.journal import FILE as JOURNAL_FILE
from shardyard_coordinator.service.journal import Journal
from shardyard_coordinator.work.feeds import FeedSpec
from shardyard_ps_server.hosting import admission, orders, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.values.versions import aligned_empty
from shardyard_ps_server.wal.records import SEGMENT_HEADER_BYTES, Mark, decode_mark, encode_mark, record_header
from shardyard_ps_server.wal.replay import replay
from shardyard_ps_server.wal.segments import SYNCED, LogRoot
from shardyard_worker.embedding import table_io
from tests.fuzz.decoder import GOLDEN, Decoder, change_json
from tests.fuzz.settings_decoders import settings
from tests.support.checkpoints import state_pieces

TWO: Final = (PartitionId(0), PartitionId(2))


def decoders(folder: Path) -> Iterator[Decoder]:
    """All of them. `folder`: where they may put files."""
    golden = {name: bytes.fromhex(text) for name, text in json.loads((GOLDEN / "vectors.json").read_text()).items()}
    yield from _messages(golden)
    yield from _frames(golden)
    yield from _codes()
    yield from _checkpoints(folder)
    yield from _journals(folder)
    yield from _logs(folder)
    yield from settings(folder)


def _of(golden: dict[str, bytes], *names: str) -> tuple[bytes, ...]:
    """The vectors of messages of these names."""
    return tuple(data for name, data in golden.items() if name.partition(".")[0] in names)


# ---- the wire


def _messages(golden: dict[str, bytes]) -> Iterator[Decoder]:
    layout, restored = common.JobLayout.FromString(golden["JobLayout"]), _restored()
    name = server.PushHeader.FromString(golden["PushHeader.worker"]).name
    opening = server.OpenSourcesReply.FromString(golden["OpenSourcesReply"])
    ticket = server.PushHeader.FromString(golden["PushHeader.attach"]).attach
    doors: list[tuple[type[Any], list[Any], Callable[[Any], object]]] = [
        (common.JobLayout, [layout], layout_messages.layout_from_wire),
        (common.OptimizerSpec, [layout.optimizer], layout_messages.optimizer_from_wire),
        (common.VariableSpec, list(layout.variables), layout_messages.variable_from_wire),
        (common.PartitionMap, [common.PartitionMap.FromString(golden["PartitionMap"])], layout_messages.map_from_wire),
        (common.PushName, [name], common_messages.name_from_wire),
        (server.PullRequest, [server.PullRequest.FromString(golden["PullRequest"])], pull_messages.pull_from_wire),
        (server.PinRequest, [server.PinRequest(pin=bytes(16), number=3, lease_ms=100)], pull_messages.pin_from_wire),
        (
            server.PinReply,
            [server.PinReply(parts=[{"partition": 0}, {"partition": 1}]), server.PinReply(not_yet={"missing": [{}]})],
            lambda message: pull_messages.pinned_from_wire(message, TWO),
        ),
        (server.SharedMemory, [ticket], pull_messages.ticket_from_wire),
        (
            server.StaleRule,
            [server.StaleRule(divides_rate=True, compensation=2.0, decay=0.95)],
            common_messages.stale_from_wire,
        ),
        (
            server.Bases,
            [server.PushHeader.FromString(golden["PushHeader.bases"]).bases],
            lambda message: push_messages.bases_from_wire(message, len(TWO)),
        ),
        (
            server.PushReply,
            [server.PushReply.FromString(golden["PushReply"])],
            lambda message: push_messages.results_from_wire(message, TWO),
        ),
        (server.OpenSourcesReply, [opening], lambda message: lease_messages.watermarks_from_wire(message.sources)),
        (
            server.OpenSourcesRequest,
            [server.OpenSourcesRequest.FromString(golden["OpenSourcesRequest"])],
            lambda message: lease_messages.sources_from_wire(message.sources),
        ),
        (server.VerdictGiven, [server.VerdictGiven.FromString(golden["VerdictGiven"])], push_messages.given_from_wire),
        (server.Clipping, [server.Clipping(norm=1.0, value=0.5)], common_messages.clipping_from_wire),
        (server.RestoredPartition, [restored], entry_from_wire),
        (server.CheckpointFile, list(restored.files), file_from_wire),
        (coordinator.CheckpointResidual, [_handed()], residual_from_wire),
        (
            coordinator.LeaseDataReply,
            [coordinator.LeaseDataReply.FromString(golden["LeaseDataReply.lease"])],
            lambda message: lease_messages.data_lease_from_wire(message.lease),
        ),
        (
            coordinator.JoinJobReply,
            [coordinator.JoinJobReply.FromString(golden["JoinJobReply"])],
            lambda message: lease_messages.rank_leases_from_wire(message.ranks),
        ),
        (
            coordinator.Stop,
            [coordinator.Stop(reason="enough", worker=9, settled=True, step=7)],
            lease_messages.stop_from_wire,
        ),
        (common.ErrorDetail, [common.ErrorDetail.FromString(golden["ErrorDetail"])], from_detail),
    ]
    for kind, examples, door in doors:
        seeds = tuple(example.SerializeToString() for example in examples)
        yield Decoder(f"message {kind.DESCRIPTOR.name}", seeds, _through(kind, door))


def _through(kind: type[Any], door: Callable[[Any], object]) -> Callable[[bytes], object]:
    from google.protobuf.message import DecodeError

    def read(data: bytes) -> object:
        try:
            message = kind.FromString(data)
        except DecodeError:
            return None  # methods.py makes it a MalformedPayload
        return door(message)

    return read


def _restored() -> server.RestoredPartition:
    file = server.CheckpointFile(path="job/1/p-0.safetensors", length=512, sha256=bytes(32), blocks=[0, 1])
    return server.RestoredPartition(partition=1, version=common.Version(life=2, number=7), files=[file, file])


def _frames(golden: dict[str, bytes]) -> Iterator[Decoder]:
    pushes = _of(golden, "PushHeader")
    plan = golden["PushHeader.plan"]

    def read_stream(header: bytes) -> object:
        reader = HeaderReader()
        reader.read(plan)
        return reader.read(header)

    yield Decoder("frame", _of(golden, "PushFrame", "PullFrame"), frames.decode)
    yield Decoder("push header", pushes, push_messages.push_from_header)
    yield Decoder("push header, not the first", pushes, read_stream)
    yield Decoder(
        "pull header", _of(golden, "PullHeader"), lambda header: reply_from_header(header, TWO, TWO, shared=False)
    )


def _codes() -> Iterator[Decoder]:
    vectors = json.loads((GOLDEN / "codecs.json").read_text())
    codes = tuple(bytes.fromhex(vector["code"]) for vector in vectors.values())

    def read(code: bytes) -> None:
        for elements, dtype in ((10, np.float32), (300, np.float32), (33, np.float64)):
            guard = np.full(elements + 16, 7.0, dtype)
            try:
                decode(code, guard[8:-8])
                apply(code, guard[8:-8])
            finally:
                assert (guard[:8] == 7.0).all(), "written before the array"
                assert (guard[-8:] == 7.0).all(), "written behind the array"

    def read_ids(code: bytes) -> None:
        found = decode_ids(code, 1_000)
        assert found.size <= 1_000
        assert (found[1:] > found[:-1]).all(), "ids that do not ascend"

    yield Decoder("code", codes, read)
    ids = (np.arange(300), np.array([-(1 << 63), -1, 0, 1 << 40, (1 << 63) - 1]), np.arange(0))
    seeds = tuple(bytes(encode_ids(each)) for each in ids)
    yield Decoder("ids of rows", seeds, read_ids)
    rows = np.arange(60, dtype=np.float32).reshape(10, 6)
    seeds = tuple(bytes(encode_rows(rows, each)) for each in RowCode)
    yield Decoder("rows", seeds, lambda code: decode_rows(code, 10, 6))
    texts = ("int8:64", "topk:0.01:int8+zstd", "powersgd:2", "delta:64+zstd", "bf16", "none", "randomk:0.1:unbiased")
    seeds = tuple(text.encode() for text in texts)
    yield Decoder("compression of pushes", seeds, lambda text: parse_push_rules(text.decode("utf-8", "replace")))
    yield Decoder("compression of pulls", seeds, lambda text: parse_pull_rules(text.decode("utf-8", "replace")))


# ---- the disk


RATE: Final = (make_group("sgd", {"lr": 0.5, "momentum": 0.5}),)
LAYOUT: Final = JobLayout(
    (VariableSpec("w", DType.FLOAT32, (6,)), VariableSpec("v", DType.FLOAT64, (3,))),
    OptimizerSpec("sgd", RATE),
    (PartitionLayout(PartitionId(0), 128, (Block(0, 0, 6, 0), Block(1, 0, 3, 64))),),
)
STATE: Final = PartitionState(
    PartitionId(0),
    Version(2, 31),
    (
        BlockState(0, np.arange(6, dtype=np.float32), {"momentum_buffer": np.ones(6, np.float32)}, 31),
        BlockState(1, np.arange(3, dtype=np.float64), {"momentum_buffer": np.ones(3)}, 30),
    ),
    (
        SourceMark(SourceKey(DataShardSource(1, 2, 3)), Token(5), 8),
        SourceMark(SourceKey(RankSource(Rank(2)), 1), Token(6), 9),
        SourceMark(SourceKey(WorkerSource(Incarnation((4 << 32) + 7))), Token(0), (1 << 63) - 1),
    ),
    Token(3),
)


def _checkpoints(folder: Path) -> Iterator[Decoder]:
    digest = hashlib.sha256(b"").hexdigest()
    file = FileRef(manifest.partition_path(7, PartitionId(0), Incarnation(5)), Written(512, digest))
    written = Manifest(
        7,
        "job",
        JobId(1),
        3,
        {"name": "job"},
        UpdateMode.ASYNC,
        12,
        "2026-01-02T03:04:05+00:00",
        LAYOUT,
        (PartitionEntry(PartitionId(0), Version(1, 12), (PartitionFile(file, (0, 1)),)),),
        {"entries": [], "closed": []},
        Token(2),
    )
    whole = manifest.encode(written)
    yield Decoder("manifest", (whole,), lambda text: manifest.decode(text, "m"))
    begin, end = whole.index(b":") + 1, whole.rindex(b',"sha256"')
    yield Decoder(
        "manifest of a right digest",
        (whole[begin:end],),
        lambda inner: manifest.decode(
            whole[:begin] + inner + whole[end : end + 11] + hashlib.sha256(inner).hexdigest().encode() + b'"}', "m"
        ),
        change_json,
    )
    storage = LocalStorage(folder)
    storage.write("partition", state_pieces(STATE))
    state = (folder / "partition").read_bytes()
    head = 8 + int.from_bytes(state[:8], "little")

    def read(data: bytes) -> object:
        (folder / "partition").write_bytes(data)
        expected = Written(len(data), hashlib.sha256(data).hexdigest())
        return partition_file.read(storage, "partition", expected, LAYOUT, PartitionId(0))

    yield Decoder("partition's file", (state,), read)
    yield Decoder(
        "header of a partition's file",
        (state[8:head],),
        lambda header: read(len(header).to_bytes(8, "little") + header + state[head:]),
        change_json,
    )
    yield from _feedback_files(storage, folder)
    yield from _rows_files(storage, folder)
    exported = folder / "rows.safetensors"
    table_io.write(exported, 3, lambda: iter([(np.arange(4), np.zeros((4, 3), np.float32))]))

    def read_rows(data: bytes) -> object:
        exported.write_bytes(data)
        return table_io.read(exported)

    yield Decoder("a table's file", (exported.read_bytes(),), read_rows)


def _rows_files(storage: LocalStorage, folder: Path) -> Iterator[Decoder]:
    """Of a table in a checkpoint, and a manifest that names them."""
    admission = AdmissionSettings(Admission.ESTIMATE, cells=256)
    layout = replace(LAYOUT, tables=(TableSettings("words", 2, "adam", admission=admission),))
    place, n = rows_file.RowsFileKey(layout, PartitionId(0), 0, base=True), np.arange(3)
    rows, state = np.ones((2, 2), np.float32), np.ones((2, 4), np.float32)
    parts: tuple[rows_file.Part, ...] = (
        rows_file.Entries(n, rows, state, np.ones(3, np.int64), n),
        rows_file.Removed(n),
        rows_file.Cells(64, np.ones(64, np.uint8)),
    )
    written = []
    for part in parts:
        storage.write("rows", rows_file.pieces(place, part))
        written.append((folder / "rows").read_bytes())

    def read(data: bytes) -> object:
        (folder / "rows").write_bytes(data)
        return rows_file.read(storage, "rows", Written(len(data), hashlib.sha256(data).hexdigest()), place)

    yield Decoder("file with rows", tuple(written), read)
    head = 8 + int.from_bytes(written[0][:8], "little")
    yield Decoder(
        "header of a file with rows",
        (written[0][8:head],),
        lambda header: read(len(header).to_bytes(8, "little") + header + written[0][head:]),
        change_json,
    )
    yield Decoder(
        "settings of tables",
        (canonical(layouts.to_document(layout)),),
        lambda text: layouts.from_document(JsonNode.parse(text, "it", at=0)),
        change_json,
    )


def _feedback_files(storage: LocalStorage, folder: Path) -> Iterator[Decoder]:
    spec = LAYOUT.variables[0]
    remembered = {
        "pushes": np.array(3, np.int64),
        f"residual.{spec.name}": np.zeros(spec.elements, spec.dtype.value),
        f"factor.{spec.name}@0": np.zeros((2, 1), np.float32),
    }
    storage.write("worker", residual_file.pieces("7", remembered))
    state = (folder / "worker").read_bytes()
    head = 8 + int.from_bytes(state[:8], "little")

    def read(data: bytes) -> object:
        (folder / "worker").write_bytes(data)
        expected = Written(len(data), hashlib.sha256(data).hexdigest())
        return residual_file.read(storage, "worker", expected, LAYOUT, "7")

    assert read(state)
    yield Decoder("worker's file", (state,), read)
    yield Decoder(
        "header of a worker's file",
        (state[8:head],),
        lambda header: read(len(header).to_bytes(8, "little") + header + state[head:]),
        change_json,
    )


def _handed() -> coordinator.CheckpointResidual:
    path = manifest.feedback_path(7, "100000005")
    return coordinator.CheckpointResidual(
        generation=2, worker="100000005", url="u", path=path, length=9, sha256=bytes(32)
    )


def _journals(folder: Path) -> Iterator[Decoder]:
    """As a coordinator finds them when it starts again."""
    records = _records()

    def restore(text: bytes) -> object:
        entries = json.loads(text)
        pairs = (
            [each for each in entries if isinstance(each, list) and len(each) == 2] if isinstance(entries, list) else []
        )
        taken = [Record(at, 1, 0.0, kind, body) for at, (kind, body) in enumerate(pairs) if isinstance(body, dict)]
        return Machine(term=Term(2), lease_ms=1_000, now_ms=0).restored(taken)

    yield Decoder("a journal's records", (json.dumps(records).encode(),), restore, change_json)
    home = folder / "journal"
    written = Journal(home)
    written.append([(str(kind), body) for kind, body in records])  # type: ignore[arg-type]
    written.close()
    file = home / JOURNAL_FILE

    def read(data: bytes) -> object:
        for old in home.glob(f"{JOURNAL_FILE}*"):
            old.unlink()
        file.write_bytes(data)
        opened = Journal(home)
        try:
            return opened.records()
        finally:
            opened.close()

    yield Decoder("a journal's file", (file.read_bytes(),), read, _change_page, share=0.1)


def _logs(folder: Path) -> Iterator[Decoder]:
    """As the successors of a dead server find them."""
    table = TableSettings("words", 2, rows_max=1 << 12, expiry=ExpirySettings(age_steps=1))
    yield from _logs_of(folder / "logs", LAYOUT, "a log")
    yield from _logs_of(folder / "logs-of-rows", replace(LAYOUT, tables=(table,)), "a log with rows")


def _logs_of(folder: Path, layout: JobLayout, called: str) -> Iterator[Decoder]:
    """Three pushes; with a table each has a row, and the last one takes the row of the first along."""
    caller, owner = Caller(JobId(1), Incarnation(9)), Incarnation(3)
    store = Store(logs=LogRoot(folder))
    store.become(owner, Term(1))
    orders.create(
        store,
        CreateRequest(
            caller.job,
            Generation(1),
            layout,
            [PartitionId(0)],
            UpdateRules(UpdateMode.ASYNC, 0, durability=Durability.WAL),
        ),
    )
    orders.open_partitions(store, caller.job, Generation(1))
    mine = np.flatnonzero(partition_of(np.arange(99), len(layout.partitions)) == 0)
    for sequence in range(3):
        name = PushName(SourceKey(WorkerSource(caller.incarnation)), Token(0), sequence, sequence)
        parts = (PushPart(PartitionId(0), 128),)
        order, data = PushHeader(caller, owner, Generation(1), name, PushKind.GRADIENT, parts, 1.0, RATE), b""
        if layout.tables:
            ids = bytes(encode_ids(mine[sequence : sequence + 1]))
            row = bytes(encode_rows(np.ones((1, 2), np.float32), RowCode.FLOAT32))
            said = PushedRows(0, (PartitionId(0),), (1,), (len(ids),), (len(row),))
            order, data = replace(order, rows=(said,), table_groups=(layout.tables[0].group,)), ids + row
        pushes.push(store, admission.admit_push(store, order), order, aligned_empty(128), np.frombuffer(data, np.uint8))
    files = LogRoot(folder).log(caller.job, owner)
    (number,) = files.numbers()
    segment = files.segment(number)
    written, mark = segment.read_bytes(), (files.folder / SYNCED).read_bytes()
    found = files.records(number, decode_mark(mark, segment))
    records = [(record.kind, record.head, bytes(record.payload)) for record in found]
    store.close()

    def read(data: bytes, durable: bytes = mark) -> object:
        files.folder.mkdir(parents=True, exist_ok=True)
        for each in files.folder.iterdir():
            each.unlink()
        segment.write_bytes(data)
        (files.folder / SYNCED).write_bytes(durable)
        partition = Partition(layout, PartitionId(0), UpdateRules(UpdateMode.ASYNC, 0))
        return replay(files, Generation(2), number, layout, {PartitionId(0): partition})

    def read_sealed(head: bytes, payload: bytes) -> object:
        data = sealed(head, payload)
        return read(data, encode_mark(Mark(number, len(data))))

    def sealed(head: bytes, payload: bytes) -> bytes:
        """The log with another last push, in a record that is right."""
        data = bytearray(written[:SEGMENT_HEADER_BYTES])
        for kind, former, had in [*records[:-1], (records[-1][0], head, payload)]:
            data += record_header(kind, former, len(had), zlib.crc32(had), len(data)) + former + had
        return bytes(data)

    _, head, payload = records[-1]
    assert sealed(head, payload) == written
    assert bool(push_messages.push_from_header(head, recorded=True).expired) is bool(layout.tables)
    yield Decoder(f"{called}'s segment", (written,), read, _change_page, share=0.3)
    yield Decoder(f"a head in {called}", (head,), lambda head: read_sealed(head, payload), share=0.3)
    if layout.tables:
        rows = payload[128:]
        yield Decoder(f"rows in {called}", (rows,), lambda rows: read_sealed(head, payload[:128] + rows), share=0.3)


def _records() -> list[list[object]]:
    """Of a yard in which a bit of everything has happened."""
    found: list[list[object]] = []
    for mode in UpdateMode:
        machine = Machine(term=Term(1), lease_ms=1_000, now_ms=0, checkpoints="/c")
        entries: list[effects.Persist] = []

        def handle(event: events.Event, machine: Machine = machine, entries: list[effects.Persist] = entries) -> Any:
            wanted = machine.handle(event, 0)
            entries += [each for each in wanted if isinstance(each, effects.Persist)]
            return next((each.answer for each in wanted if isinstance(each, effects.Reply)), None)

        settings = JobSettings(consistency=ConsistencySettings(mode=ConsistencyMode(mode.value)), workers_expected=2)
        server = handle(events.MemberRegistered(Registration(MemberRole.SERVER, "s:1", 1, "0", "h", 1)))
        workers = [
            handle(events.MemberRegistered(Registration(MemberRole.WORKER, "", 1, "0", "h", pid))) for pid in (2, 3)
        ]
        joined = [handle(events.JobJoined(each.incarnation, settings.name, settings)) for each in workers]
        callers = [Caller(joined[0].job, each.incarnation) for each in workers]
        for event in (
            events.VariablesRegistered(callers[0], LAYOUT.variables, LAYOUT.optimizer),
            events.PartitionsCreated(joined[0].job),
            events.VariablesCommitted(callers[0]),
            events.PartitionsOpened(joined[0].job),
            events.FeedOpened(callers[0], 0, FeedSpec(100, "f", 10, 1, shuffle=True, drop_last=False)),
            events.Ticked(),
            events.CheckpointTaken(joined[0].job, 1, 1, 0),
            *([events.LeaseRequested(callers[0], 0)] if mode is UpdateMode.ASYNC else []),
            events.MemberLeft(callers[1].incarnation, "E: no"),
            events.WorkersFenced(joined[0].job, (callers[1].incarnation,)),
            events.MemberLeft(server.incarnation, ""),
        ):
            handle(event)
        found += [[each.kind, dict(each.body)] for each in (entries if mode is UpdateMode.ASYNC else [])]
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def _change_page(dice: Random, data: bytes, _: object) -> bytes:
    """Bits of a file that is mostly zeros, where it is not; or it is cut."""
    if dice.random() < 0.2:
        return data[: dice.randrange(len(data))]
    found = bytearray(data)
    for _time in range(dice.choice((1, 1, 4))):
        at = dice.randrange(len(found))
        while not found[at]:
            at = (at + 1) % len(found)
        found[at] ^= 1 << dice.randrange(8)
    return bytes(found)


def feed(decoder: Decoder, data: bytes) -> bool:
    """Whether it was taken. Raises what is no refusal."""
    try:
        decoder.read(data)
    except ShardyardError:
        return False
    return True
