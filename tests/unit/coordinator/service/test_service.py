"""The coordinator's service through the in-process network, with servers that only keep the books."""

from __future__ import annotations

import queue
import socket
import sqlite3
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from shardyard.config.settings import CheckpointSettings, SecuritySettings, Settings
from shardyard.domain import errors, limits
from shardyard.domain.ids import Caller, MemberRole, Rank
from shardyard.domain.push_names import DataShardSource, RankSource, SourceKey
from shardyard.storage.access import StorageAccess
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.wire import common_messages, layout_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.service import process
from shardyard_coordinator.service.disk_watch import LOOK_MS
from shardyard_coordinator.service.journal import Journal
from tests.support.coordinator_yards import ASYNC, Worker, Yard, begin, sync_settings
from tests.support.waiting import DEADLINE_S, wait_until


def test_job_runs_from_join_to_finish(yard: Yard) -> None:
    first, second = yard.run_job(ASYNC, workers=2)
    assert first.joined.started
    assert not second.joined.started
    assert first.joined.chief
    assert not second.joined.chief
    assert first.placed.initializer
    assert not second.placed.initializer
    layout = layout_messages.layout_from_wire(first.placed.layout)
    assert len(layout.partitions) == 4
    map_ = layout_messages.map_from_wire(first.placed.map)
    assert sorted(map_.by_server()) == sorted(yard.servers)
    for fake in yard.servers.values():
        assert [kind for kind, _ in fake.calls] == ["create", "open"]
    assert first.beat().job_state == wire.JOB_STATE_RUNNING
    first.leave()
    second.leave()
    status = yard.peer().call(methods.STATUS, wire.StatusRequest(), timeout_ms=1)
    assert [job.state for job in status.jobs] == [wire.JOB_STATE_FINISHED]
    for fake in yard.servers.values():
        wait_until(lambda fake=fake: len(fake.named("drop")) == 1, "the job to be dropped")  # type: ignore[misc]


def test_data_shard_is_done_when_the_servers_say_so(yard: Yard) -> None:
    (worker,) = yard.run_job(ASYNC)
    opened = worker.open_feed(samples=30, batch_size=10)
    assert (opened.batches_per_data_shard, opened.units_per_epoch) == (1, 3)
    lease = worker.lease().lease
    assert (lease.begin, lease.end, lease.data_shard.index) == (0, 10, 0)
    key = SourceKey(DataShardSource(0, 0, 0))
    one, other = yard.servers.values()
    one.next_of[key] = 1
    assert not worker.close(lease)
    again = worker.lease().lease
    assert again.data_shard == lease.data_shard
    assert again.token > lease.token
    with pytest.raises(errors.StaleToken):
        worker.close(lease)
    other.next_of[key] = 1
    assert worker.close(again)
    assert worker.close(again), "a retry of the close is answered alike"


def test_job_waits_for_a_server(yard: Yard) -> None:
    worker = yard.add_worker(ASYNC)
    with pytest.raises(errors.NotReady, match="no server has registered yet"):
        worker.register_variables()
    yard.add_server("server:0")
    assert worker.register_variables().initializer


@pytest.mark.parametrize("field", ["host", "release", "address", "logs"])
def test_names_that_would_act_in_a_terminal_are_refused(field: str, yard: Yard) -> None:
    request = wire.RegisterRequest(role=wire.ROLE_SERVER, protocol=limits.PROTOCOL, address="s:1", host="box")
    for text in ("\x1b]0;title\x07", "one\ntwo", "\u202eolleh", "\0"):
        setattr(request, field, text)
        with pytest.raises(errors.MalformedPayload, match="cannot be shown"):
            yard.peer().call(methods.REGISTER, request, timeout_ms=1_000)
    status = yard.peer().call(methods.STATUS, wire.StatusRequest(), timeout_ms=1_000)
    assert not status.members


def test_what_a_worker_says_is_shown_without_escape_sequences(yard: Yard) -> None:
    worker = yard.add_worker(ASYNC)
    request = wire.HeartbeatRequest(caller=worker.caller, waiting_for="a \x1b[31mred\x1b[0m\nline")
    yard.peer().call(methods.HEARTBEAT, request, timeout_ms=1_000)
    status = yard.peer().call(methods.STATUS, wire.StatusRequest(), timeout_ms=1_000)
    (said,) = [member.waiting_for for member in status.members]
    assert said == "a \ufffd[31mred\ufffd[0m\nline"


def test_checkpoints_outside_of_what_is_allowed_are_refused(tmp_path: Path) -> None:
    journal = Journal(None)
    yard = begin(journal, access=StorageAccess(str(tmp_path / "allowed")))
    try:
        for url, refused in ((tmp_path / "allowed" / "mine", False), (tmp_path / "elsewhere", True), ("auto", False)):
            settings = ASYNC.model_copy(update={"checkpoint": CheckpointSettings(url=str(url))})
            with pytest.raises(errors.ConfigurationError, match="not below") if refused else nullcontext():
                yard.add_worker(settings).leave()
        request = wire.RestoreCheckpointRequest(job_name="default", url=str(tmp_path / "elsewhere"))
        with pytest.raises(errors.ConfigurationError, match="not below"):
            yard.peer().call(methods.RESTORE_CHECKPOINT, request, timeout_ms=1_000)
    finally:
        yard.coordinator.stop()
        journal.close()


def test_bad_settings_are_refused(yard: Yard) -> None:
    worker = Worker(yard, yard.register(MemberRole.WORKER))
    request = wire.JoinJobRequest(caller=worker.caller, name="default", settings_json='{"seeed": 3}')
    with pytest.raises(errors.ConfigurationError, match="seeed"):
        yard.peer().call(methods.JOIN_JOB, request, timeout_ms=1)


def test_server_that_does_not_take_its_partitions_is_asked_again(yard: Yard) -> None:
    server = yard.add_server("server:0")
    worker = yard.add_worker(ASYNC)
    # its refusal is about the coordinator's request; the worker must not take it for its own
    yard.servers[server].refuse["create"] = errors.StaleIncarnation("a request for server 9")
    with pytest.raises(errors.NotReady, match=r"CreatePartitions on server .* at server:0: a request for server 9"):
        worker.register_variables()
    yard.network.leave("server:0")
    with pytest.raises(errors.NotReady, match="does not answer"):
        worker.register_variables()
    yard.network.listen("server:0", [yard.servers[server].service()])
    del yard.servers[server].refuse["create"]
    assert worker.register_variables().initializer


def test_error_that_lasts_reaches_the_worker(yard: Yard) -> None:
    server = yard.add_server("server:0")
    worker = yard.add_worker(ASYNC)
    yard.servers[server].refuse["create"] = errors.TooLarge("no memory for its partitions")
    with pytest.raises(errors.TooLarge, match="no memory"):
        worker.register_variables()


def test_committed_values_are_opened_by_the_coordinator_itself(yard: Yard) -> None:
    server = yard.add_server("server:0")
    worker = yard.add_worker(ASYNC)
    worker.register_variables()
    yard.servers[server].refuse["open"] = errors.NotReady("busy")
    with pytest.raises(errors.NotReady, match="OpenPartitions on server"):
        worker.commit()
    yard.servers[server].refuse.clear()

    def runs() -> bool:
        yard.clock.advance(50)
        yard.beat_servers()
        return worker.beat().job_state == wire.JOB_STATE_RUNNING

    wait_until(runs, "the partitions to be opened")


def test_dead_worker_is_fenced_on_all_servers_before_its_work_goes_on(yard: Yard) -> None:
    first, second = yard.run_job(ASYNC, workers=2)
    first.open_feed(samples=10)
    lease = first.lease().lease
    assert second.lease().wait.waiting_for == f"data shard 0.0.0 (worker {first.incarnation})"
    yard.kill(first, alive=[second])
    wait_until(lambda: second.lease().HasField("lease"), "the dead worker's data shard")
    for fake in yard.servers.values():
        (fence,) = fake.named("fence")
        assert list(fence.incarnations) == [first.incarnation]
        assert fence.caller.job == first.job
    assert second.lease().lease.token > lease.token
    with pytest.raises(errors.StaleIncarnation):
        first.beat()


def test_server_that_cannot_be_fenced_hears_of_it_with_its_heartbeat(yard: Yard) -> None:
    first, second = yard.run_job(ASYNC, workers=2)
    first.open_feed(samples=10)
    first.lease()
    server = min(yard.servers)
    yard.servers[server].refuse["fence"] = errors.Internal("cannot")
    yard.kill(first, alive=[second])
    wait_until(lambda: second.lease().HasField("lease"), "the dead worker's data shard")
    reply = yard.beat(server)
    assert list(reply.fenced) == [first.incarnation]


def test_exit_reported_by_an_agent_frees_work_at_once(yard: Yard) -> None:
    first, second = yard.run_job(ASYNC, workers=2)
    agent = yard.register(MemberRole.AGENT, "agent:0")
    first.open_feed(samples=10)
    first.lease()
    request = wire.ReportExitRequest(
        caller=common_messages.caller_to_wire(Caller(incarnation=agent)), pid=1, exit_code=-9
    )
    yard.peer().call(methods.REPORT_EXIT, request, timeout_ms=1)
    wait_until(lambda: second.lease().HasField("lease"), "the dead worker's data shard")


def test_lost_server_fails_the_job_for_all_workers(yard: Yard) -> None:
    first, second = yard.run_job(ASYNC, workers=2)
    lost = max(yard.servers)
    yard.pass_lease(lambda: [first.beat(), second.beat(), yard.beat(min(yard.servers))])
    reply = second.beat()
    assert reply.job_state == wire.JOB_STATE_FAILED
    assert reply.failure.code == "ServerLost"
    assert dict(reply.failure.facts) == {"server": str(lost), "address": "server:1"}
    with pytest.raises(errors.ServerLost, match="server:1"):
        first.lease()
    wait_until(lambda: len(yard.servers[min(yard.servers)].named("drop")) == 1, "the job to be dropped")


def test_synchronous_job_gets_ranks_and_closes_its_feed(yard: Yard) -> None:
    first, second = yard.run_job(sync_settings(2), workers=2)
    assert [lease.rank for worker in (first, second) for lease in worker.beat().ranks] == [0, 1]
    assert first.joined.logical_ranks == 2
    opened = first.open_feed(samples=100, batch_size=10)
    assert (opened.units_per_epoch, opened.first_step) == (5, 0)
    for fake in yard.servers.values():
        fake.next_of = {SourceKey(RankSource(Rank(0))): 5, SourceKey(RankSource(Rank(1))): 4}
    assert not first.close()
    for fake in yard.servers.values():
        fake.next_of[SourceKey(RankSource(Rank(1)))] = 5
    assert second.close()
    assert first.open_feed(samples=100, batch_size=10).done


def test_partition_that_a_server_does_not_name_is_not_done(yard: Yard) -> None:
    (worker,) = yard.run_job(ASYNC)
    worker.open_feed(samples=10)
    lease = worker.lease().lease
    for fake in yard.servers.values():
        fake.next_of[SourceKey(DataShardSource(0, 0, 0))] = 1
    fake.partitions = fake.partitions[:-1]
    assert not worker.close(lease)


def test_status_shows_members_and_jobs(yard: Yard) -> None:
    (worker,) = yard.run_job(ASYNC)
    worker.open_feed(samples=30)
    worker.lease()
    worker.beat(step=3, samples=30, metrics=[wire.Metric(name="loss", value=0.5)], waiting_for="data")
    status = yard.peer().call(methods.STATUS, wire.StatusRequest(), timeout_ms=1)
    assert [member.role for member in status.members] == [wire.ROLE_SERVER, wire.ROLE_SERVER, wire.ROLE_WORKER]
    assert (status.members[2].step, status.members[2].waiting_for) == (3, "data")
    (job,) = status.jobs
    assert (job.state, job.step, job.samples, job.workers) == (wire.JOB_STATE_RUNNING, 3, 30, 1)
    assert (job.parameters, job.payload_bytes) == (64 * 16 + 64, 4 * (64 * 16 + 64 + 64))
    (feed,) = job.feeds
    assert (feed.free, feed.leased, feed.done, feed.finished) == (2, 1, 0, False)


@pytest.mark.parametrize("method", ["append", "replace"])
def test_coordinator_goes_on_from_its_records_when_its_journal_can_be_written_again(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    (worker,) = yard.run_job(ASYNC)
    worker.open_feed(samples=30)
    written = len(yard.journal.records())
    with monkeypatch.context() as full:
        full.setattr(yard.journal, "append", fill)
        with pytest.raises(errors.NotReady, match=r"journal in memory cannot be written \(database or disk is full\)"):
            worker.lease()
        if method == "replace":  # half of the room that is needed is none
            full.undo()
            full.setattr(yard.journal, "replace", fill)
            yard.pass_repair()
            with pytest.raises(errors.NotReady, match="cannot be written"):
                worker.lease()
        assert len(yard.journal.records()) == written
    yard.pass_repair()
    assert worker.beat().job_state == wire.JOB_STATE_RUNNING
    assert worker.lease().lease.token == 1, "what was not written was not decided"


def fill(_entries: object) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def test_members_are_answered_for_longer_than_a_lease_while_the_journal_cannot_be_written(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = yard.run_job(ASYNC)
    worker.open_feed(samples=30)
    with monkeypatch.context() as full:
        full.setattr(yard.journal, "append", fill)
        full.setattr(yard.journal, "replace", fill)
        with pytest.raises(errors.NotReady):
            worker.lease()
        for step in range(1, 21):
            yard.clock.advance(500)
            yard.beat_servers()
            said = worker.beat(step=step, samples=10 * step)
        assert said.undecided == "the journal in memory to be written (database or disk is full)"
        assert said.job_state == wire.JOB_STATE_RUNNING
        status = yard.peer().call(methods.STATUS, wire.StatusRequest(), timeout_ms=1)
        assert (status.jobs[0].step, status.members[2].step) == (20, 20)
        assert len(status.members) == 3
    yard.pass_repair()
    assert worker.beat().undecided == ""
    up_ms = yard.peer().call(methods.STATUS, wire.StatusRequest(), timeout_ms=1).uptime_ms
    assert up_ms >= 20 * 500, "it was there all the time"
    assert worker.lease().lease.token == 1


def test_readers_are_answered_while_the_journal_cannot_be_written(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    (worker,) = yard.run_job(ASYNC)
    worker.open_feed(samples=30)
    with monkeypatch.context() as full:
        full.setattr(yard.journal, "append", fill)
        full.setattr(yard.journal, "replace", fill)
        with pytest.raises(errors.NotReady):
            worker.lease()
        followed = wire.FollowJobRequest(job_name="default", reader=bytes(16))
        reply = yard.peer().call(methods.FOLLOW_JOB, followed, timeout_ms=1)
        assert (reply.job, reply.state) == (worker.job, wire.JOB_STATE_RUNNING)
        reported = wire.ReportEvaluationRequest(job=worker.job, step=3)
        with pytest.raises(errors.NotReady):
            yard.peer().call(methods.REPORT_EVALUATION, reported, timeout_ms=1)


def test_status_and_log_say_in_time_that_the_disk_is_full(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def status() -> wire.StatusReply:
        return yard.peer().call(methods.STATUS, wire.StatusRequest(), timeout_ms=1)

    assert not status().HasField("full_disk")
    with monkeypatch.context() as full:
        full.setattr(yard.journal, "free_bytes", lambda: 512)
        for _ in range(4):
            yard.clock.advance(LOOK_MS)
            yard.clock.await_tick()
        said = status().full_disk
        assert (said.file, said.free_bytes) == ("in memory", 512)
        assert said.full_ms >= 2 * LOOK_MS
    assert caplog.text.count("the disk of the journal in memory is full (512 bytes free)") == 1
    yard.clock.advance(LOOK_MS)
    wait_until(lambda: not status().HasField("full_disk"), "the room to be seen")


def test_nothing_that_was_not_recorded_is_told_while_the_journal_cannot_be_written(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = yard.run_job(sync_settings(2), workers=2)
    ranks = [rank.rank for worker in (first, second) for rank in worker.beat().ranks]
    assert ranks == [0, 1]
    with monkeypatch.context() as full:
        full.setattr(yard.journal, "append", fill)
        full.setattr(yard.journal, "replace", fill)
        with pytest.raises(errors.NotReady):
            second.leave()
        assert [rank.rank for rank in first.beat().ranks] == [0], "its rank would go to the first"
        assert [rank.rank for rank in second.beat().ranks] == [1]
        stopped = wire.StopJobRequest(job_name="default", reason="enough")
        with pytest.raises(errors.NotReady):
            yard.peer().call(methods.STOP_JOB, stopped, timeout_ms=1)
        assert not first.beat().HasField("stop")


def test_stopping_coordinator_is_not_ready(yard: Yard) -> None:
    yard.coordinator.stop()
    with pytest.raises(errors.NotReady, match="stopping"):
        yard.register(MemberRole.WORKER)


def test_decisions_are_in_the_journal(yard: Yard) -> None:
    (worker,) = yard.run_job(ASYNC)
    worker.open_feed(samples=10)
    worker.lease()
    worker.leave()
    kinds = [record.kind for record in yard.journal.records()]
    assert kinds == [
        "member_registered",
        "member_registered",
        "member_registered",
        "job_started",
        "worker_joined",
        "variables_registered",
        "worker_admitted",
        "initializer_chosen",
        "partitions_created",
        "variables_committed",
        "partitions_opened",
        "feed_opened",
        "data_leased",
        "member_removed",
        "worker_gone",
        "job_ended",
    ]


def test_process_serves_over_grpc_until_it_is_stopped(tmp_path: Path) -> None:
    stop, addresses = threading.Event(), queue.Queue[str]()
    settings = Settings(security=SecuritySettings(tls=False))

    def run() -> None:
        process.serve(
            bind="127.0.0.1:0",
            advertise=None,
            settings=settings,
            state=tmp_path / "state",
            stop=stop,
            ready=addresses.put,
        )

    thread = threading.Thread(target=run)
    thread.start()
    peer = GrpcNetwork(None).connect(addresses.get(timeout=DEADLINE_S), name="coordinator")
    try:
        request = wire.RegisterRequest(role=wire.ROLE_WORKER, protocol=limits.PROTOCOL, host="box", pid=1)
        reply = peer.call(methods.REGISTER, request, timeout_ms=5_000)
        assert (reply.incarnation, reply.term) == ((1 << 32) + 1, 1)
        assert (reply.heartbeat_ms, reply.lease_ms) == (
            settings.membership.heartbeat_every_ms,
            settings.membership.lease_ms,
        )
        with pytest.raises(errors.ConfigurationError, match="in use by process"):
            Journal(tmp_path / "state")
    finally:
        peer.close()
        stop.set()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()
    Journal(tmp_path / "state").close()


def test_process_answers_that_it_is_not_ready_while_its_journal_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop, ready, has_room = threading.Event(), threading.Event(), threading.Event()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def open_journal(folder: Path | None) -> Journal:
        if not has_room.is_set():
            raise errors.StorageUnavailable("the journal j cannot be opened (disk I/O error; 0 bytes free on its disk)")
        return Journal(folder)

    def run() -> None:
        process.serve(
            bind=address,
            advertise=None,
            settings=Settings(security=SecuritySettings(tls=False)),
            state=tmp_path / "state",
            stop=stop,
            ready=lambda _: ready.set(),
        )

    monkeypatch.setattr(process, "Journal", open_journal)
    monkeypatch.setattr(process, "OPEN_AGAIN_S", 0.01)
    thread = threading.Thread(target=run)
    thread.start()
    peer = GrpcNetwork(None).connect(address, name="coordinator")

    def answer() -> str:
        try:
            peer.call(methods.HEARTBEAT, wire.HeartbeatRequest(), timeout_ms=1_000)
        except errors.ShardyardError as error:
            return error.what if isinstance(error, errors.NotReady) else ""
        return ""

    try:
        wait_until(lambda: "the coordinator cannot begin yet: the journal j cannot be opened" in answer(), "an answer")
        assert not ready.is_set()
        has_room.set()
        assert ready.wait(DEADLINE_S)
        request = wire.RegisterRequest(role=wire.ROLE_WORKER, protocol=limits.PROTOCOL, host="box", pid=1)
        assert peer.call(methods.REGISTER, request, timeout_ms=5_000).term == 1
    finally:
        peer.close()
        has_room.set()
        stop.set()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert "the journal j cannot be opened" in caplog.text
