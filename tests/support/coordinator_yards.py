"""A coordinator on the in-process network, with servers that only record calls, and workers that only send requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from shardyard.config.settings import ConsistencySettings, JobSettings, MembershipSettings
from shardyard.domain import errors, limits
from shardyard.domain.ids import Caller, Incarnation, JobId, MemberRole, PartitionId, Version
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.push_names import SourceKey, Watermark, WorkerSource
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard.storage.access import StorageAccess
from shardyard.transport.in_process import InProcessNetwork
from shardyard.transport.interfaces import Context, Peer, Service
from shardyard.wire import common_messages, layout_messages, lease_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_coordinator.service.journal import Journal
from shardyard_coordinator.service.mailbox import REPAIR_MS
from shardyard_coordinator.service.service import Coordinator
from tests.support.waiting import wait_until

SGD = OptimizerSpec("sgd", (make_group("sgd", {"lr": 0.1}),))
VARIABLES = (
    VariableSpec("weight", DType.FLOAT32, (64, 16)),
    VariableSpec("bias", DType.FLOAT32, (64,)),
    VariableSpec("mean", DType.FLOAT32, (64,), VariableKind.BUFFER),
)


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
        """Waits until the ticker has handled the present time."""
        seen = self._ticks
        # a tick looks twice, and the first tick may be an old one; at the fifth look the second tick is over
        wait_until(lambda: self._ticks >= seen + 5, "the ticker")

    def advance(self, ms: int) -> None:
        with self._lock:
            self._now_ms += ms


@dataclass
class FakeServer:
    """A ParameterServer that records calls. It reports the watermarks `next_of` for all its partitions."""

    calls: list[tuple[str, object]] = field(default_factory=list)
    next_of: dict[SourceKey, int] = field(default_factory=dict)
    partitions: tuple[int, ...] = ()
    refuse: dict[str, errors.ShardyardError] = field(default_factory=dict)
    on_call: dict[str, Callable[[], None]] = field(default_factory=dict)

    def service(self) -> Service:
        service = Service("ParameterServer")
        service.on(methods.CREATE_PARTITIONS, self._create)
        service.on(
            methods.OPEN_PARTITIONS, lambda request, _: self._note("open", request, server_wire.OpenPartitionsReply())
        )
        service.on(methods.DROP_JOB, lambda request, _: self._note("drop", request, server_wire.DropJobReply()))
        service.on(methods.FENCE, lambda request, _: self._note("fence", request, server_wire.FenceReply()))
        service.on(
            methods.SET_STALENESS, lambda request, _: self._note("pace", request, server_wire.SetStalenessReply())
        )
        service.on(methods.READ_LEDGER, self._read)
        service.on(methods.PASS_OVER, self._pass_over)
        return service

    def named(self, kind: str) -> list[object]:
        return [request for each, request in list(self.calls) if each == kind]

    def _note(self, kind: str, request: object, reply: object) -> object:
        self.calls.append((kind, request))
        if kind in self.on_call:
            self.on_call[kind]()
        if kind in self.refuse:
            raise self.refuse[kind]
        return reply

    def _create(self, request: server_wire.CreatePartitionsRequest, _: Context) -> object:
        layout_messages.layout_from_wire(request.layout)
        reply = self._note("create", request, server_wire.CreatePartitionsReply())
        self.partitions = tuple(request.partitions)
        return reply

    def _pass_over(self, request: server_wire.PassOverRequest, _: Context) -> object:
        reply = self._note("pass over", request, server_wire.PassOverReply())
        key = SourceKey(WorkerSource(Incarnation(request.worker)))
        self.next_of[key] = max(self.next_of.get(key, 0), request.next)
        return reply

    def _read(self, request: server_wire.ReadLedgerRequest, _: Context) -> object:
        found = []
        for key, _token in lease_messages.sources_from_wire(request.sources):
            marks = [Watermark(PartitionId(each), self.next_of.get(key, 0), Version(0, 0)) for each in self.partitions]
            found.append((key, marks))
        reply = server_wire.ReadLedgerReply(sources=lease_messages.watermarks_to_wire(found))
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
            role=common_messages.ROLES.to_wire(role),
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
        request = wire.HeartbeatRequest(caller=common_messages.caller_to_wire(Caller(incarnation=member)))
        return self.peer().call(methods.HEARTBEAT, request, timeout_ms=1)

    def beat_servers(self) -> None:
        for server in self.servers:
            self.beat(server)

    def pass_lease(self, beat: Callable[[], object]) -> None:
        """Time passes until all leases have run out, except of the members for which `beat` sends heartbeats."""
        for _ in range(5):
            self.clock.advance(250)
            beat()
            self.clock.await_tick()

    def pass_repair(self) -> None:
        """Time passes until the coordinator has tried to write its journal again."""
        self.clock.advance(REPAIR_MS)
        self.clock.await_tick()
        self.clock.await_tick()

    def kill(self, worker: Worker, alive: list[Worker]) -> None:
        """The worker sends no heartbeats until it is declared dead."""
        self.pass_lease(lambda: [self.beat_servers(), *(each.beat() for each in alive)])
        with pytest.raises(errors.StaleIncarnation):
            worker.beat()

    def run_job(self, settings: JobSettings, workers: int = 1) -> list[Worker]:
        """Starts servers and workers, and registers variables: the job is RUNNING then."""
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
        return common_messages.caller_to_wire(Caller(self.job, self.incarnation))

    def join(self, settings: JobSettings) -> wire.JoinJobReply:
        request = wire.JoinJobRequest(caller=self.caller, name=settings.name, settings_json=settings.model_dump_json())
        return self.yard.peer().call(methods.JOIN_JOB, request, timeout_ms=1_000)

    def register_variables(self, variables: tuple[VariableSpec, ...] = VARIABLES) -> wire.RegisterVariablesReply:
        request = wire.RegisterVariablesRequest(
            caller=self.caller,
            variables=[layout_messages.variable_to_wire(spec) for spec in variables],
            optimizer=layout_messages.optimizer_to_wire(SGD),
        )
        return self.yard.peer().call(methods.REGISTER_VARIABLES, request, timeout_ms=1_000)

    def commit(self, generation: int = 1) -> None:
        request = wire.CommitVariablesRequest(caller=self.caller, generation=generation)
        self.yard.peer().call(methods.COMMIT_VARIABLES, request, timeout_ms=1)

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

    def rebase(self, next_sequence: int) -> list[tuple[int, int, int]]:
        request = wire.RebaseSourceRequest(caller=self.caller, next=next_sequence)
        reply = self.yard.peer().call(methods.REBASE_SOURCE, request, timeout_ms=1)
        return [(each.partition, each.first, each.last) for each in reply.lost]

    def beat(self, **report: object) -> wire.HeartbeatReply:
        request = wire.HeartbeatRequest(caller=self.caller, **report)  # type: ignore[arg-type]
        return self.yard.peer().call(methods.HEARTBEAT, request, timeout_ms=1)

    def leave(self, error: str = "") -> None:
        self.yard.peer().call(methods.LEAVE, wire.LeaveRequest(caller=self.caller, error=error), timeout_ms=1)


def sync_settings(ranks: int) -> JobSettings:
    return JobSettings(
        workers_expected=ranks, consistency=ConsistencySettings(mode="sync"), partitions=4, rank_grace_ms=0
    )


ASYNC = JobSettings(partitions=4)


def begin(journal: Journal, network: InProcessNetwork | None = None, access: StorageAccess | None = None) -> Yard:
    """Starts a coordinator. If a network is given, it takes the place of the coordinator that was there."""
    clock = ManualClock()
    on = InProcessNetwork() if network is None else network
    coordinator = Coordinator(
        network=on,
        journal=journal,
        clock=clock,
        membership=MembershipSettings(heartbeat_ms=100, lease_ms=1_000),
        access=access,
    )
    on.leave("coordinator:1")
    on.listen("coordinator:1", [coordinator.service])
    coordinator.start()
    return Yard(on, clock, coordinator, journal)
