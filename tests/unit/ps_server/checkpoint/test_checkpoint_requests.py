"""Checkpoints of a server, asked for over the wire, also again, too late, or while one is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardyard.checkpoints.convert import entry_from_wire, entry_to_wire, file_from_wire
from shardyard.checkpoints.manifest import PartitionEntry
from shardyard.domain import limits
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import (
    InvalidRequest,
    MalformedPayload,
    NotReady,
    ShardyardError,
    StaleTerm,
    StaleToken,
)
from shardyard.domain.ids import Caller, JobId, PartitionId, Term, Token, Version
from shardyard.domain.push_names import (
    SourceKey,
    WorkerSource,
)
from shardyard.runtime import failpoints
from shardyard.transport.in_process import InProcessNetwork
from shardyard.wire import common_messages, layout_messages, lease_messages, methods
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.hosting import pushes
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.service.servicer import Servicer
from tests.support.server_checkpoints import (
    COORDINATOR,
    DONE,
    GENERATION,
    HERE,
    JOB,
    LAYOUT,
    NEXT,
    OWNED,
    SHARD,
    WORKER,
    create,
    entries,
    leased,
    push,
    push_step,
    save,
    server,
    stores_end,
    trained,
    values,
)

__all__ = ["stores_end"]


def test_coordinator_saves_restores_and_forgets_by_messages(tmp_path: Path) -> None:
    network = InProcessNetwork()
    store = leased(server())
    network.listen("here:1", [Servicer(store).service()])
    peer = network.connect("here:1", name="server")
    caller = common_messages.caller_to_wire(COORDINATOR)
    push(store, 0)
    request = wire.SaveCheckpointRequest(caller=caller, server=HERE, generation=GENERATION, url=str(tmp_path), number=7)
    reply = peer.call(methods.SAVE_CHECKPOINT, request, timeout_ms=5_000)
    found = []
    for each in reply.partitions:
        file = file_from_wire(each.file)
        version = common_messages.version_from_wire(each.version)
        found.append(PartitionEntry(PartitionId(each.partition), Version(2, version.number), (file,)))
    assert [entry_from_wire(entry_to_wire(entry)) for entry in found] == found
    create = wire.CreatePartitionsRequest(
        caller=caller,
        generation=NEXT,
        layout=layout_messages.layout_to_wire(LAYOUT),
        partitions=OWNED,
        mode=common_messages.UPDATE_MODES.to_wire(UpdateMode.ASYNC),
        logical_ranks=2,
        server=HERE,
        restore=wire.Restore(url=str(tmp_path), partitions=[entry_to_wire(entry) for entry in found]),
    )
    before = values(store)
    push(store, 1)
    peer.call(methods.CREATE_PARTITIONS, create, timeout_ms=5_000)
    assert values(store, generation=NEXT) == before
    forget = wire.ForgetSourcesRequest(
        caller=caller,
        server=HERE,
        generation=NEXT,
        done=lease_messages.done_to_wire(DONE),
        floor=2,
    )
    peer.call(methods.FORGET_SOURCES, forget, timeout_ms=5_000)
    with pytest.raises(StaleToken):
        push(store, 1, generation=NEXT)
    stale = common_messages.caller_to_wire(Caller(JOB, term=Term(1)))
    for method, message in ((methods.SAVE_CHECKPOINT, request), (methods.FORGET_SOURCES, forget)):
        message.caller.CopyFrom(stale)
        with pytest.raises(StaleTerm):
            peer.call(method, message, timeout_ms=5_000)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "digest", "error"),
    [
        ("../../etc/passwd", bytes(32), InvalidRequest),
        ("/etc/passwd", bytes(32), InvalidRequest),
        ("a/../b", bytes(32), InvalidRequest),
        ("a/b", bytes(31), MalformedPayload),
        ("a" * (limits.TEXT_CHARACTERS_MAX + 1), bytes(32), ShardyardError),
    ],
)
def test_files_that_lead_elsewhere_are_refused(path: str, digest: bytes, error: type[ShardyardError]) -> None:
    with pytest.raises(error):
        file_from_wire(wire.CheckpointFile(path=path, length=1, sha256=digest))


def test_partition_is_restored_from_a_file_at_least() -> None:
    with pytest.raises(MalformedPayload, match="from 0 files"):
        entry_from_wire(wire.RestoredPartition(partition=1))


@pytest.mark.parametrize(("wrote", "next_sequence"), [(JOB, 1), (JobId(9), 0)])
def test_workers_own_sources_are_taken_over_by_their_own_job_alone(
    tmp_path: Path, wrote: JobId, next_sequence: int
) -> None:
    store = trained(1)
    push(store, 0, source=WorkerSource(WORKER))
    other = Store()
    other.become(HERE, Term(2))
    restore = Restore(str(tmp_path), entries(save(store, tmp_path, 1)), job=wrote)
    create(other, restore)
    found = pushes.read_ledger(
        other.hosted()[0], [(SourceKey(source), Token(0)) for source in (WorkerSource(WORKER), SHARD)]
    )
    assert [{mark.next for mark in marks} for _, marks in found] == [{next_sequence}, {1}]


def test_order_that_comes_again_writes_nothing(tmp_path: Path) -> None:
    """Its first answer may be in a manifest by then, and a file of a manifest never changes."""
    store = leased(server())
    saved = save(store, tmp_path, 1)
    push(store, 0)
    before = {each: each.read_bytes() for each in tmp_path.rglob("*.safetensors")}
    assert save(store, tmp_path, 1) == saved
    assert {each: each.read_bytes() for each in tmp_path.rglob("*.safetensors")} == before


def test_order_that_comes_after_a_later_one_is_refused(tmp_path: Path) -> None:
    store = leased(server())
    save(store, tmp_path, 2)
    with pytest.raises(InvalidRequest, match="checkpoint 1, attempt 0, after 2, attempt 0, was written"):
        save(store, tmp_path, 1)
    assert len(list(tmp_path.rglob("*.safetensors"))) == len(OWNED), "nothing is written"


def test_step_that_was_named_before_and_is_reached_after_another_was_written_is_not(tmp_path: Path) -> None:
    """The order for it may come, or be waited for, until workers are there; the manifest has the other step's files."""
    store = leased(server(UpdateMode.SYNC))
    save(store, tmp_path, 1, step=0, attempt=1)
    before = {each: each.read_bytes() for each in tmp_path.rglob("*.safetensors")}
    push_step(store, 0)
    with pytest.raises(InvalidRequest, match="attempt 0, after 1, attempt 1, was written"):
        save(store, tmp_path, 1, step=1)
    assert {each: each.read_bytes() for each in tmp_path.rglob("*.safetensors")} == before


def test_order_that_comes_while_another_is_carried_out_is_put_off(tmp_path: Path) -> None:
    store = leased(server())
    refused: list[str] = []

    def again(_: str) -> None:
        with pytest.raises(NotReady) as error:
            save(store, tmp_path, 1)
        refused.append(error.value.what)

    with failpoints.armed("storage.before_rename", again, at=1):
        save(store, tmp_path, 1)
    assert len(refused) == 1
    assert "writes another" in refused[0]
