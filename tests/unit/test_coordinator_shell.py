"""The coordinator's service through the in-process network, with servers that only keep the books."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
    SourceKey,
    VariableKind,
    VariableSpec,
    Version,
    Watermark,
)
from shardyard.runtime.settings import ConsistencySettings, JobSettings, MembershipSettings
from shardyard.transport.in_process import InProcessNetwork
from shardyard.transport.peers import Context, Peer, Service
from shardyard.wire import convert, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
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

    def now_ms(self) -> int:
        with self._lock:
            return self._now_ms

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
    yield Yard(network, clock, coordinator)
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
