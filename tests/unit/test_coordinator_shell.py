"""The coordinator's service through the in-process network, with servers that only keep the books."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardyard.ground import errors, limits
from shardyard.ground.optimizers import make_group
from shardyard.ground.types import (
    Caller,
    DataShardSource,
    DType,
    Incarnation,
    JobId,
    MemberRole,
    OptimizerSpec,
    PartitionId,
    Rank,
    RankSource,
    SourceKey,
    VariableKind,
    VariableSpec,
    Version,
    Watermark,
)
from shardyard.runtime.settings import ConsistencySettings, JobSettings, MembershipSettings, Settings
from shardyard.transport.channel import GrpcNetwork
from shardyard.transport.in_process import InProcessNetwork
from shardyard.transport.peers import Context, Peer, Service
from shardyard.wire import convert, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_coordinator import process
from shardyard_coordinator.journal import Journal
from shardyard_coordinator.shell import Coordinator

DEADLINE_S = 10.0
SGD = OptimizerSpec("sgd", (make_group("sgd", {"lr": 0.1}),))
VARIABLES = (
    VariableSpec("weight", DType.FLOAT32, (64, 16)),
    VariableSpec("bias", DType.FLOAT32, (64,)),
    VariableSpec("mean", DType.FLOAT32, (64,), VariableKind.BUFFER),
)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    pause = threading.Event()
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {DEADLINE_S} s for {what}"
        pause.wait(0.005)


class ManualClock:
    def __init__(self) -> None:
        self._now_ms = 1_000
        self._lock = threading.Lock()
        self._ticks = 0

    def now_ms(self) -> int:
        with self._lock:
            self._ticks += threading.current_thread().name == "coordinator-ticker"
            return self._now_ms

    def await_tick(self) -> None:
        """Until the ticker has acted upon the time that it is now."""
        seen = self._ticks
        # its first look may be an old one; at its third the tick of the second is over
        wait_until(lambda: self._ticks >= seen + 3, "the ticker")

    def advance(self, ms: int) -> None:
        with self._lock:
            self._now_ms += ms


@dataclass
class FakeServer:
    """A ParameterServer that records calls; `next_of` are the watermarks that it reports for all its partitions."""

    calls: list[tuple[str, object]] = field(default_factory=list)
    next_of: dict[SourceKey, int] = field(default_factory=dict)
    partitions: tuple[int, ...] = ()
    refuse: dict[str, errors.ShardyardError] = field(default_factory=dict)

    def service(self) -> Service:
        service = Service("ParameterServer")
        service.on(methods.CREATE_PARTITIONS, self._create)
        service.on(
            methods.OPEN_PARTITIONS, lambda request, _: self._note("open", request, server_wire.OpenPartitionsReply())
        )
        service.on(methods.DROP_JOB, lambda request, _: self._note("drop", request, server_wire.DropJobReply()))
        service.on(methods.FENCE, lambda request, _: self._note("fence", request, server_wire.FenceReply()))
        service.on(methods.READ_LEDGER, self._read)
        return service

    def named(self, kind: str) -> list[object]:
        return [request for each, request in list(self.calls) if each == kind]

    def _note(self, kind: str, request: object, reply: object) -> object:
        self.calls.append((kind, request))
        if kind in self.refuse:
            raise self.refuse[kind]
        return reply

    def _create(self, request: server_wire.CreatePartitionsRequest, _: Context) -> object:
        convert.layout_from_wire(request.layout)
        reply = self._note("create", request, server_wire.CreatePartitionsReply())
        self.partitions = tuple(request.partitions)
        return reply

    def _read(self, request: server_wire.ReadLedgerRequest, _: Context) -> object:
        found = []
        for key, _token in convert.sources_from_wire(request.sources):
            marks = [Watermark(PartitionId(each), self.next_of.get(key, 0), Version(0, 0)) for each in self.partitions]
            found.append((key, marks))
        reply = server_wire.ReadLedgerReply(sources=convert.watermarks_to_wire(found))
        return self._note("read", request, reply)


@dataclass
class Yard:
    network: InProcessNetwork
    clock: ManualClock
    coordinator: Coordinator
    journal: Journal
    servers: dict[Incarnation, FakeServer] = field(default_factory=dict)

    def peer(self) -> Peer:
        return self.network.connect("coordinator:1", name="coordinator", unavailable=errors.CoordinatorUnavailable)

    def register(
        self, role: MemberRole, address: str = "", pid: int = 1, host: str = "box", agent: int = 0
    ) -> Incarnation:
        request = wire.RegisterRequest(
            role=convert.role_to_wire(role),
            address=address,
            protocol=limits.PROTOCOL,
            release="0.1.0",
            host=host,
            pid=pid,
            agent=agent,
        )
        return Incarnation(self.peer().call(methods.REGISTER, request, timeout_ms=1_000).incarnation)

    def add_server(self, address: str) -> Incarnation:
        fake = FakeServer()
        self.network.leave(address)
        self.network.listen(address, [fake.service()])
        incarnation = self.register(MemberRole.SERVER, address)
        self.servers[incarnation] = fake
        return incarnation

    def add_worker(self, settings: JobSettings, pid: int = 1, agent: int = 0) -> Worker:
        incarnation = self.register(MemberRole.WORKER, pid=pid, agent=agent)
        worker = Worker(self, incarnation)
        worker.joined = worker.join(settings)
        worker.job = JobId(worker.joined.job)
        return worker

    def beat(self, member: Incarnation) -> wire.HeartbeatReply:
        request = wire.HeartbeatRequest(caller=convert.caller_to_wire(Caller(incarnation=member)))
        return self.peer().call(methods.HEARTBEAT, request, timeout_ms=1)

    def beat_servers(self) -> None:
        for server in self.servers:
            self.beat(server)

    def pass_lease(self, beat: Callable[[], object]) -> None:
        """Lets the leases run out of all but those that `beat`."""
        for _ in range(5):
            self.clock.advance(250)
            beat()
            self.clock.await_tick()

    def kill(self, worker: Worker, alive: list[Worker]) -> None:
        """The worker falls silent until it is declared dead."""
        self.pass_lease(lambda: [self.beat_servers(), *(each.beat() for each in alive)])
        with pytest.raises(errors.StaleIncarnation):
            worker.beat()

    def run_job(self, settings: JobSettings, workers: int = 1) -> list[Worker]:
        """Servers, workers and variables, up to RUNNING."""
        for index in range(2):
            self.add_server(f"server:{index}")
        found = [self.add_worker(settings, pid=index + 1) for index in range(workers)]
        for worker in found:
            worker.placed = worker.register_variables()
        found[0].commit()
        return found


@dataclass
class Worker:
    yard: Yard
    incarnation: Incarnation
    job: JobId = JobId(0)
    joined: wire.JoinJobReply = field(default_factory=wire.JoinJobReply)
    placed: wire.RegisterVariablesReply = field(default_factory=wire.RegisterVariablesReply)

    @property
    def caller(self) -> object:
        return convert.caller_to_wire(Caller(self.job, self.incarnation))

    def join(self, settings: JobSettings) -> wire.JoinJobReply:
        request = wire.JoinJobRequest(caller=self.caller, name=settings.name, settings_json=settings.model_dump_json())
        return self.yard.peer().call(methods.JOIN_JOB, request, timeout_ms=1_000)

    def register_variables(self, variables: tuple[VariableSpec, ...] = VARIABLES) -> wire.RegisterVariablesReply:
        request = wire.RegisterVariablesRequest(
            caller=self.caller,
            variables=[convert.variable_to_wire(spec) for spec in variables],
            optimizer=convert.optimizer_to_wire(SGD),
        )
        return self.yard.peer().call(methods.REGISTER_VARIABLES, request, timeout_ms=1_000)

    def commit(self) -> None:
        self.yard.peer().call(methods.COMMIT_VARIABLES, wire.CommitVariablesRequest(caller=self.caller), timeout_ms=1)

    def open_feed(self, samples: int = 100, feed: int = 0, batch_size: int = 10) -> wire.OpenFeedReply:
        request = wire.OpenFeedRequest(
            caller=self.caller, feed=feed, samples=samples, fingerprint="f", batch_size=batch_size, epochs=1
        )
        return self.yard.peer().call(methods.OPEN_FEED, request, timeout_ms=1)

    def lease(self, feed: int = 0) -> wire.LeaseDataReply:
        request = wire.LeaseDataRequest(caller=self.caller, feed=feed)
        return self.yard.peer().call(methods.LEASE_DATA, request, timeout_ms=1)

    def close(self, lease: wire.DataLease | None = None, feed: int = 0) -> bool:
        request = wire.CloseLeaseRequest(caller=self.caller, feed=feed)
        if lease is not None:
            request.data_shard.CopyFrom(lease.data_shard)
            request.token = lease.token
        return self.yard.peer().call(methods.CLOSE_LEASE, request, timeout_ms=1).done

    def beat(self, **report: object) -> wire.HeartbeatReply:
        request = wire.HeartbeatRequest(caller=self.caller, **report)  # type: ignore[arg-type]
        return self.yard.peer().call(methods.HEARTBEAT, request, timeout_ms=1)

    def leave(self, error: str = "") -> None:
        self.yard.peer().call(methods.LEAVE, wire.LeaveRequest(caller=self.caller, error=error), timeout_ms=1)


@pytest.fixture
def yard() -> Iterator[Yard]:
    before = set(threading.enumerate())
    network, clock, journal = InProcessNetwork(), ManualClock(), Journal(None)
    coordinator = Coordinator(
        network=network, journal=journal, clock=clock, membership=MembershipSettings(heartbeat_ms=100, lease_ms=1_000)
    )
    network.listen("coordinator:1", [coordinator.service])
    coordinator.start()
    yield Yard(network, clock, coordinator, journal)
    coordinator.stop()
    journal.close()
    assert [each.name for each in threading.enumerate() if each not in before] == []


def sync_settings(ranks: int) -> JobSettings:
    return JobSettings(
        workers_expected=ranks, consistency=ConsistencySettings(mode="sync"), partitions=4, rank_grace_ms=0
    )


ASYNC = JobSettings(partitions=4)


def fail(yard: Yard, silent: list[Incarnation]) -> None:
    """Lets all leases run out but those that beat; in steps, so that the ticker sees time pass."""


def test_job_runs_from_join_to_finish(yard: Yard) -> None:
    first, second = yard.run_job(ASYNC, workers=2)
    assert first.joined.started
    assert not second.joined.started
    assert first.joined.chief
    assert not second.joined.chief
    assert first.placed.initializer
    assert not second.placed.initializer
    layout = convert.layout_from_wire(first.placed.layout)
    assert len(layout.partitions) == 4
    map_ = convert.map_from_wire(first.placed.map)
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
    request = wire.ReportExitRequest(caller=convert.caller_to_wire(Caller(incarnation=agent)), pid=1, exit_code=-9)
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


def test_coordinator_that_cannot_write_its_journal_decides_nothing_more(yard: Yard) -> None:
    yard.journal.close()
    for _ in range(2):
        with pytest.raises(errors.Internal, match="journal cannot be written"):
            yard.register(MemberRole.WORKER)


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
        "variables_committed",
        "feed_opened",
        "data_leased",
        "member_removed",
        "job_ended",
    ]


def test_process_serves_over_grpc_until_it_is_stopped(tmp_path: Path) -> None:
    stop, addresses = threading.Event(), queue.Queue[str]()
    settings = Settings()

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
    peer = GrpcNetwork().connect(addresses.get(timeout=DEADLINE_S), name="coordinator")
    try:
        request = wire.RegisterRequest(role=wire.ROLE_WORKER, protocol=limits.PROTOCOL, host="box", pid=1)
        reply = peer.call(methods.REGISTER, request, timeout_ms=5_000)
        assert (reply.incarnation, reply.term) == ((1 << 32) + 1, 1)
        assert (reply.heartbeat_ms, reply.lease_ms) == (settings.membership.heartbeat_ms, settings.membership.lease_ms)
        with pytest.raises(errors.ConfigurationError, match="in use by process"):
            Journal(tmp_path / "state")
    finally:
        peer.close()
        stop.set()
        thread.join(DEADLINE_S)
    assert not thread.is_alive()
    Journal(tmp_path / "state").close()
