"""Roles with a job under way, and what may be said to them: one call of each method of each service, and streams.

A world is called as a listener calls it (shardyard.transport.dispatch), without a network. What is refused must leave
its state as it was; what it answers may change it, so it is made anew now and then.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from shardyard.checkpoints.manifest import partition_path
from shardyard.codecs.rows.row_ids import encode_ids
from shardyard.codecs.rows.row_values import RowCode, encode_rows
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import Internal, ShardyardError
from shardyard.domain.ids import Incarnation, MemberRole, PartitionId, Term
from shardyard.domain.replica_groups import Strategy
from shardyard.domain.tables.row_ids import partition_of
from shardyard.transport.dispatch import serve, serve_at_once
from shardyard.transport.interfaces import AtOnce, Context, Service
from shardyard.wire.method import Method
from shardyard.wire.v1 import agent_pb2 as agent
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server
from shardyard_coordinator.service.journal import Journal
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.checkpoint_cuts import block_arrays, take_cut
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.service.servicer import Servicer
from shardyard_worker.agent.launch import RunningLaunch
from shardyard_worker.agent.service import AgentPlan, AgentService
from tests.simulation.restoring import state_of
from tests.support import shop
from tests.support.coordinator_yards import ASYNC, Worker, Yard, begin, sync_settings

Sent = tuple[bytes, ...]
"""The messages of one call: one, or those of a stream."""


class World(Protocol):
    service: Service
    calls: dict[str, list[Sent]]
    """By a method's name, calls that are answered, or nearly."""

    def state(self) -> object:
        """All that a refused call must not have changed."""

    def settle(self) -> bool:
        """Does what a call has begun, and makes the world ready for the next. Whether its state may be another now."""

    def close(self) -> None: ...


@dataclass
class Answered:
    """What became of a call. `answers`: how many came, before it was refused if it was."""

    answers: int = 0
    refused: ShardyardError | None = None


def call(service: Service, name: str, sent: Sequence[bytes]) -> Answered:
    """Raises AssertionError where something else happens than an answer or a refusal."""
    method, handler = next(each for each in service.handlers.items() if each[0].name == name)
    noise = _Noise()
    logging.getLogger("shardyard.serving").addHandler(noise)
    found = Answered()
    offered: list[AtOnce] = []
    context = Context(peer="ipv4:127.0.0.1:1", is_active=lambda: True, offer=offered.append)
    given: bytes | Iterator[bytes] = sent[0] if sent else b""
    if method.streams_in:
        given = _stream(method, sent, offered, found)
    try:
        for _ in serve(method, handler, given, context, "1"):
            found.answers += 1
    except ShardyardError as error:
        found.refused = error
    finally:
        logging.getLogger("shardyard.serving").removeHandler(noise)
    assert not isinstance(found.refused, Internal), found.refused
    assert type(found.refused) is not ShardyardError, found.refused
    assert not noise.records, noise.records
    return found


def _stream(method: Method[Any, Any], sent: Sequence[bytes], offered: list[AtOnce], found: Answered) -> Iterator[bytes]:
    """As they come in: every second one is tried at once first, where the handler has offered that."""
    for at, message in enumerate(sent):
        if at % 2 and offered and serve_at_once(method, offered[-1], message) is not None:
            found.answers += 1
            continue
        yield message


class _Noise(logging.Handler):
    """What serving logs when something breaks."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self.format(record))


PIN: Final = bytes(range(16))


def encoded(*messages: Any) -> Sent:
    return tuple(message.SerializeToString() for message in messages)


# ---- a server


class ServerWorld:
    """One job of two partitions, open, with a push or two; of one mode. Checkpoints lie in memory. With `tables` the
    job has one, and pushes have rows of it."""

    def __init__(self, mode: UpdateMode, *, tables: bool = False) -> None:
        self.tables = tables
        self.store = Store()
        self.store.become(Incarnation(shop.SERVER), Term(shop.TERM))
        self.service = Servicer(self.store).service()
        self.mode = mode
        shop.stock(lambda name, *sent: call(self.service, name, encoded(*sent)), mode, tables=tables)
        self.calls = self._calls()
        for sequence in range(2):
            push = (self._push_rows, self._push_packed)[sequence % 2] if tables else self._push
            self._must("Push", *encoded(push(sequence)))
        self._must("SaveCheckpoint", *encoded(self._save(1)))
        self._must("Pin", *encoded(self._pin(PIN, rows=tables)))

    def state(self) -> object:
        jobs = []
        for hosted in self.store.hosted():
            found = []
            for number, partition in sorted(hosted.partitions.items()):
                cut = take_cut(partition)
                cut.complete()
                arrays = [block_arrays(partition, index, cut) for index in range(len(partition.payload.blocks))]
                digest = hashlib.sha256(b"".join(each[name].tobytes() for each in arrays for name in sorted(each)))
                steps = partition.steps
                waiting = None if steps is None else (steps.gate.step, steps.gate.missing())
                cut.release()  # which has the tables too
                found.append((number, cut.version, cut.marks, cut.floor, digest.hexdigest(), waiting, _rows(partition)))
            jobs.append((hosted.job, hosted.generation, hosted.open, tuple(hosted.partitions), found))
        standing, counters = self.store.identity, self.store.counters
        return standing.incarnation, frozenset(standing.fenced), jobs, counters.pushes_applied, counters.streams

    def settle(self) -> bool:
        # a term that was heard stays, as it shall; the next calls are of the first one again
        self.store.identity.term = Term(shop.TERM)
        return False

    def close(self) -> None:
        self.store.close()

    def _must(self, name: str, *sent: bytes) -> None:
        found = call(self.service, name, sent)
        assert found.refused is None, found.refused

    def _source(self) -> dict[str, Any]:
        return {"logical_rank": 0} if self.mode is UpdateMode.SYNC else {"worker": shop.WORKER}

    def _push(self, sequence: int, **changes: Any) -> server.PushFrame:
        header = shop.header(sequence, **changes)
        if self.mode is UpdateMode.SYNC:
            header.name.source.logical_rank = 0
            header.name.token = 1
        return server.PushFrame(header=header, data=shop.GRADIENT)

    def _push_rows(self, sequence: int) -> server.PushFrame:
        frame = self._push(sequence)
        codes = _codes()
        frame.header.rows.add(
            table=0,
            partitions=list(codes),
            rows=[1] * len(codes),
            id_bytes=[len(ids) for ids, _ in codes.values()],
            row_bytes=[len(rows) for _, rows in codes.values()],
        )
        frame.header.table_groups.add(values=shop.GROUPS[0])
        frame.data += b"".join(ids + rows for ids, rows in codes.values())
        return frame

    def _push_packed(self, sequence: int) -> server.PushFrame:
        frame = self._push(sequence)
        ids = _ids()
        gradients = np.ones((len(ids), shop.DIM), np.float32)
        frame.header.rows.add(table=0, partitions=list(ids), rows=[1] * len(ids), row_bytes=[gradients.nbytes])
        frame.header.table_groups.add(values=shop.GROUPS[0])
        frame.data += b"".join(number.tobytes() for number in ids.values()) + gradients.tobytes()
        return frame

    def _look_up(self, **more: Any) -> server.LookUpFrame:
        codes = _codes()
        header = server.LookUpHeader(caller=shop.CALLER, server=shop.SERVER, generation=1, **more)
        header.requested.add(table=0, partitions=list(codes), rows=[1] * len(codes))
        return server.LookUpFrame(header=header, data=b"".join(number.tobytes() for number in _ids().values()))

    def _save(self, number: int) -> server.SaveCheckpointRequest:
        step = {"step": 2} if self.mode is UpdateMode.SYNC else {}
        return server.SaveCheckpointRequest(
            caller=shop.ORDERS, server=shop.SERVER, generation=1, url="memory://fuzz/job", number=number, **step
        )

    def _pin(self, pin: bytes, **changes: Any) -> server.PinRequest:
        number = {"number": 2} if self.mode is UpdateMode.SYNC else {}
        caller = common.Caller(job=shop.CALLER.job)
        given = {"caller": caller, "server": shop.SERVER, "generation": 1, "lease_ms": 60_000, "pin": pin}
        return server.PinRequest(**{**given, **number, **changes})

    def _calls(self) -> dict[str, list[Sent]]:
        who = {"caller": shop.CALLER, "server": shop.SERVER, "generation": 1}
        orders = {"caller": shop.ORDERS, "generation": 1}
        shard = {"data_shard": {"feed": 0, "index": 3}}
        leased = {"logical_rank": 1} if self.mode is UpdateMode.SYNC else shard
        create = shop.creation(self.mode, tables=self.tables)
        read = {**who, "partition": 1}
        versions = [{"number": 1}, {"number": 2, "wait_ms": 1}] if self.mode is UpdateMode.SYNC else []
        versions += [{"pin": PIN}] if self.tables else []
        rows = [encoded(self._push_rows(1)), encoded(self._push_packed(2))] if self.tables else []
        given = server.PushFrame(header=shop.header(kind=server.PUSH_KIND_VALUES))
        if self.tables:
            made = self._push_rows(0)
            given.header.rows.extend(made.header.rows)
            given.data = made.data[len(shop.GRADIENT) :]
            for part in given.header.parts:
                part.payload_bytes = 0
        again = server.CreatePartitionsRequest()
        again.CopyFrom(create)
        again.generation = 2
        again.restore.url = "memory://fuzz/job"
        other = server.CreatePartitionsRequest()
        other.CopyFrom(create)
        other.caller.job = 8
        anew = server.CreatePartitionsRequest()
        anew.CopyFrom(other)
        anew.generation = 2
        restore = server.CreatePartitionsRequest()
        restore.CopyFrom(again)
        restore.restore.partitions.add(
            partition=0,
            version={"life": 2, "number": 2},
            files=[
                {
                    "path": partition_path(1, PartitionId(0), Incarnation(shop.SERVER)),
                    "length": 512,
                    "sha256": bytes(32),
                    "blocks": [0],
                }
            ],
        )
        nothing = server.PushHeader(**who, kind=server.PUSH_KIND_NOTHING)
        pulls = server.PushHeader(**who, kind=server.PUSH_KIND_NOTHING, pull={"partitions": [0, 1]})
        coded = server.PushHeader(
            **who, kind=server.PUSH_KIND_NOTHING, pull={"partitions": [0, 1], "coding": "delta:64+zstd"}
        )
        attach = server.PushHeader(**who, kind=server.PUSH_KIND_NOTHING, attach={"bytes": 4096})
        judges = server.PushHeader(
            **who,
            kind=server.PUSH_KIND_NOTHING,
            pull={"partitions": [0, 1], "number": 2, "exactly": True},
            verdict={"step": 1, "square_norm": 4.0},
        )
        plan = self._push(3).header
        plan.plan = 1
        alike = server.PushHeader(step={"plan": 1, "token": plan.name.token, "first": 4, "last": 4})
        ahead = self._push(4, rest=64)
        ahead.data = shop.GRADIENT[:64]
        values = server.PushFrame(header=shop.header(kind=server.PUSH_KIND_VALUES), data=shop.VALUES)
        halves = [
            server.PushFrame(header=self._push(2).header, data=shop.GRADIENT[:50]),
            server.PushFrame(offset=50, data=shop.GRADIENT[50:]),
        ]
        frame = server.PushFrame
        pinned = shop.wish()
        pinned.ClearField("number")
        pinned.ClearField("exactly")
        pinned.ClearField("wait_ms")
        pinned.pin = PIN
        return {
            "CreatePartitions": [encoded(each) for each in (create, again, other, anew, restore)],
            "Initialize": [encoded(values), *([encoded(given)] if self.tables else [])],
            "InitializeOptimizer": [encoded(server.OptimizerFrame(header={**read, "counts": [3]}))],
            "PublishState": [
                encoded(
                    server.OptimizerFrame(
                        header={**read, "counts": [3], "slots": ["values"], "step": step, "group": 1}, data=bytes(64)
                    )
                )
                for step in (2, 5)
            ],
            "OpenPartitions": [encoded(server.OpenPartitionsRequest(**orders))],
            "SaveCheckpoint": [encoded(self._save(2))],
            "ForgetSources": [
                encoded(
                    server.ForgetSourcesRequest(
                        caller=shop.ORDERS,
                        server=shop.SERVER,
                        generation=1,
                        floor=1,
                        done=[{"feed": 0, "per_epoch": 4, "begun": 2, "open": [1]}],
                        workers=[77],
                    )
                )
            ],
            "PassOver": [
                encoded(
                    server.PassOverRequest(
                        caller=shop.ORDERS, server=shop.SERVER, generation=1, worker=shop.WORKER, next=each
                    )
                )
                for each in (2, 5)
            ],
            "SetStaleness": [
                encoded(
                    server.SetStalenessRequest(
                        caller=shop.ORDERS, server=shop.SERVER, generation=1, staleness=bound, switches=number
                    )
                )
                for bound, number in ((3, 1), (None, 2))
            ],
            "DropJob": [encoded(server.DropJobRequest(caller=common.Caller(job=8, term=shop.TERM)))],
            "Fence": [encoded(server.FenceRequest(caller=shop.ORDERS, incarnations=[77, 78]))],
            "OpenSources": [encoded(server.OpenSourcesRequest(**who, sources=[{"source": leased, "token": 5}]))],
            "ReadLedger": [
                encoded(server.ReadLedgerRequest(**who, sources=[{"source": leased}, {"source": self._source()}]))
            ],
            "Push": [encoded(self._push(1)), encoded(self._push(2)), encoded(*halves), *rows],
            "Pull": [encoded(shop.wish()), encoded(shop.wish(1)), encoded(pinned)],
            "Pin": [
                encoded(self._pin(PIN)),
                encoded(self._pin(bytes(15) + b"2")),
                encoded(self._pin(PIN, wait_ms=1, rows=True)),
            ],
            "Unpin": [encoded(server.UnpinRequest(caller=shop.CALLER, pin=bytes(15) + b"2"))],
            "PushPull": [
                encoded(frame(header=plan, data=shop.GRADIENT), frame(header=alike, data=shop.GRADIENT)),
                encoded(frame(header=pulls), frame(header=pulls), self._push(2), frame(header=nothing)),
                encoded(frame(header=pulls), frame(offset=64, data=shop.GRADIENT[64:]), ahead),
                encoded(frame(header=coded), self._push(2), frame(header=coded)),
                encoded(frame(header=attach), frame(header=pulls)),
                encoded(frame(header=pulls), frame(header=judges)),
                *([encoded(self._push_rows(2), self._push_packed(3), frame(header=pulls))] if self.tables else []),
            ],
            "Attach": [encoded(server.AttachRequest())],
            "LookUp": [encoded(self._look_up()), *(encoded(self._look_up(**each)) for each in versions)],
            "ReadRows": [encoded(server.ReadRowsRequest(**read, table=0))],
            "ReadOptimizer": [
                encoded(server.ReadOptimizerRequest(**read)),
                encoded(server.ReadOptimizerRequest(**read, number=2)),
            ],
            "DescribeServer": [encoded(server.DescribeServerRequest())],
        }


def _codes() -> dict[int, tuple[bytes, bytes]]:
    """For each partition here the codes of an id of its own, and of a gradient for its row."""
    gradient = bytes(encode_rows(np.ones((1, shop.DIM), np.float32), RowCode.FLOAT32))
    return {number: (bytes(encode_ids(mine)), gradient) for number, mine in _ids().items()}


def _ids() -> dict[int, np.ndarray]:
    """For each partition here an id of its own."""
    ids = np.arange(100, dtype=np.int64)
    owners = partition_of(ids, 3)
    return {number: ids[owners == number][:1] for number in range(2)}


def _rows(partition: Partition) -> list[object]:
    return [
        (name, sorted(zip(chunk.ids.tolist(), map(bytes, chunk.records), chunk.frequencies.tolist(), strict=False)))
        for name, table in partition.tables.items()
        for chunk in table.cuts.items()
    ]


# ---- a coordinator


@dataclass
class CoordinatorWorld:
    """Two servers, a job with its variables open and a data set under way, two workers, an agent. `mirrored`: one
    of them is a replica group, with a key, and the other waits for the next one."""

    mode: UpdateMode
    mirrored: bool = False
    yard: Yard = field(init=False)
    calls: dict[str, list[Sent]] = field(init=False)
    later: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.yard = begin(Journal(None))
        calls: Any = self.yard.coordinator._calls
        # calls to servers are made between two inputs, by `settle`
        calls._later = lambda do, *given: self.later.append((do, given))
        settings = (
            sync_settings(2) if self.mode is UpdateMode.SYNC else ASYNC.model_copy(update={"workers_expected": 2})
        )
        if self.mirrored:
            settings = settings.model_copy(update={"strategy": Strategy.MULTI_WORKER_MIRRORED})
        workers = self.yard.run_job(settings, workers=2)
        workers[0].open_feed()
        self.settle()
        if self.mirrored:
            for worker in workers:
                self._must("JoinReplicaGroup", coordinator.JoinReplicaGroupRequest(caller=worker.caller))
            given = {"caller": workers[0].caller, "generation": 1, "key": "k", "value": b"v"}
            self._must("PutGroupKey", coordinator.PutGroupKeyRequest(**given))
        self.agent = self.yard.register(MemberRole.AGENT, "agent:1")
        self.calls = self._calls(workers)
        self.settle()

    @property
    def service(self) -> Service:
        return self.yard.coordinator.service

    def state(self) -> object:
        mailbox: Any = self.yard.coordinator._mailbox
        keys = repr(self.yard.coordinator._group_keys._groups)
        with mailbox.machine() as machine:
            return repr(state_of(machine)), mailbox._journal._latest(), keys

    def _must(self, name: str, *sent: Any) -> None:
        found = call(self.service, name, encoded(*sent))
        assert found.refused is None, found.refused

    def settle(self) -> bool:
        due = bool(self.later)
        while self.later:
            do, given = self.later.pop(0)
            do(*given)
        return due

    def close(self) -> None:
        self.later.clear()
        self.yard.coordinator.stop()
        self.yard.journal.close()

    def _calls(self, workers: list[Worker]) -> dict[str, list[Sent]]:
        wire = coordinator
        worker = workers[0]
        caller, variables = worker.caller, wire.RegisterVariablesRequest(caller=worker.caller)
        variables.variables.extend(worker.placed.layout.variables)
        variables.optimizer.CopyFrom(worker.placed.layout.optimizer)
        settings = worker.joined.settings_json
        lone = common.Caller(incarnation=self.yard.register(MemberRole.WORKER, pid=9))
        lease: dict[str, Any] = {"feed": 0}
        work: dict[str, Any]
        if self.mode is UpdateMode.ASYNC:
            given = worker.lease().lease
            lease = {"data_shard": given.data_shard, "token": given.token}
            work = {"source": {"data_shard": given.data_shard}, "token": given.token}
        else:
            (rank, *_) = worker.joined.ranks
            work = {"source": {"logical_rank": rank.rank}, "token": rank.token}
        metrics = [wire.Metric(name="loss", value=0.5)]
        register = {"protocol": 1, "release": "0.1.0", "host": "box", "pid": 12}
        return {
            "Register": [
                encoded(wire.RegisterRequest(role=wire.ROLE_WORKER, agent=self.agent, **register)),
                encoded(wire.RegisterRequest(role=wire.ROLE_SERVER, address="server:9", **register)),
            ],
            # in one process nobody has a certificate
            "Enrol": [encoded(wire.EnrolRequest(request=b"0", launch="4711"))],
            "ListIdentities": [encoded(wire.ListIdentitiesRequest())],
            "RevokeIdentity": [encoded(wire.RevokeIdentityRequest(holder="worker/w"))],
            "RotateAuthority": [encoded(wire.RotateAuthorityRequest(overlap_s=60))],
            "Invite": [encoded(wire.InviteRequest(role="worker", key=bytes(33), lifetime_s=60, uses=1))],
            "Heartbeat": [
                encoded(wire.HeartbeatRequest(caller=caller, step=3, samples=9, metrics=metrics, waiting_for="x")),
                encoded(wire.HeartbeatRequest(caller=caller, step=3, stop_reached={"reached": 4})),
            ],
            "Leave": [encoded(wire.LeaveRequest(caller=lone, error="E: no", residual_lost=0.5))],
            "Drain": [
                encoded(wire.DrainRequest(caller=common.Caller(incarnation=self.agent))),
                encoded(wire.DrainRequest(member="10.0.0.1:9")),
            ],
            "ReportExit": [
                encoded(wire.ReportExitRequest(caller=common.Caller(incarnation=self.agent), pid=77, exit_code=-9))
            ],
            "JoinJob": [
                encoded(wire.JoinJobRequest(caller=lone, name="default", settings_json=settings)),
                encoded(
                    wire.JoinJobRequest(caller=caller, name="default", settings_json=settings, run_id="x", run_number=1)
                ),
            ],
            "RegisterVariables": [encoded(variables)],
            "CommitVariables": [encoded(wire.CommitVariablesRequest(caller=caller, generation=1))],
            "OpenFeed": [
                encoded(
                    wire.OpenFeedRequest(caller=caller, feed=0, samples=100, fingerprint="f", batch_size=10, epochs=1)
                ),
                encoded(
                    wire.OpenFeedRequest(caller=caller, feed=1, samples=100, fingerprint="f", batch_size=10, epochs=2)
                ),
            ],
            "LeaseData": [encoded(wire.LeaseDataRequest(caller=caller, feed=0))],
            "CloseLease": [encoded(wire.CloseLeaseRequest(caller=caller, **lease))],
            "RebaseSource": [encoded(wire.RebaseSourceRequest(caller=caller, next=each)) for each in (0, 3)],
            "BeginBatch": [
                encoded(wire.BeginBatchRequest(caller=caller, **work)),
                encoded(wire.BeginBatchRequest(caller=caller, sequence=1, highest=1, **work)),
            ],
            "ReportNotFinite": [
                encoded(wire.ReportNotFiniteRequest(caller=caller, parameter="w", count=1, in_a_row=1, **work)),
                encoded(wire.ReportNotFiniteRequest(caller=caller, last=1, parameter="w", count=2, in_a_row=2, **work)),
            ],
            "DecideStep": [
                encoded(wire.DecideStepRequest(caller=caller, step=0, ranks=[0])),
                encoded(wire.DecideStepRequest(caller=caller, step=1)),
            ],
            "ReadMakeUp": [encoded(wire.ReadMakeUpRequest(caller=caller, feed=0, step=each)) for each in (0, 5)],
            "JoinReplicaGroup": [
                encoded(wire.JoinReplicaGroupRequest(caller=caller)),
                encoded(wire.JoinReplicaGroupRequest(caller=caller, left=1, step=3)),
            ],
            "PutGroupKey": [encoded(wire.PutGroupKeyRequest(caller=caller, generation=1, key="k", value=b"v"))],
            "GetGroupKeys": [encoded(wire.GetGroupKeysRequest(caller=caller, generation=1, keys=["k"]))],
            "ReportPublished": [encoded(wire.ReportPublishedRequest(caller=caller, generation=1, step=3))],
            "TakeCheckpoint": [
                encoded(wire.TakeCheckpointRequest(caller=caller)),
                encoded(wire.TakeCheckpointRequest(job_name="default")),
            ],
            "ReportResidual": [
                encoded(wire.ReportResidualRequest(caller=caller, number=1, stage=2)),
                encoded(wire.ReportResidualRequest(caller=caller, number=1, stage=3, length=9, sha256=bytes(32))),
                encoded(wire.ReportResidualRequest(caller=caller, number=1, stage=3, failure="no room")),
            ],
            "TakeUpResidual": [encoded(wire.TakeUpResidualRequest(caller=caller, generation=1, worker="10000002a"))],
            "RestoreCheckpoint": [
                encoded(wire.RestoreCheckpointRequest(job_name="default", number=1)),
                encoded(wire.RestoreCheckpointRequest(job_name="other")),
            ],
            "StopJob": [
                encoded(wire.StopJobRequest(caller=caller, reason="loss is nan")),
                encoded(wire.StopJobRequest(job_name="default")),
            ],
            "SwitchConsistency": [
                encoded(wire.SwitchConsistencyRequest(job_name="default", mode=3, staleness=2)),
                encoded(wire.SwitchConsistencyRequest(mode=4)),
                encoded(wire.SwitchConsistencyRequest(strategy="multi_worker_mirrored")),
            ],
            "FollowJob": [
                encoded(wire.FollowJobRequest(job=worker.job, reader=PIN)),
                encoded(wire.FollowJobRequest(job_name="default", reader=PIN, layout=True)),
                encoded(wire.FollowJobRequest(job=worker.job, reader=PIN, leaves=True)),
            ],
            "ReportEvaluation": [
                encoded(wire.ReportEvaluationRequest(job=worker.job, step=3, metrics=metrics)),
                encoded(
                    wire.ReportEvaluationRequest(
                        job=worker.job,
                        step=3,
                        best={"metric": "loss", "lowest": True, "value": 0.5, "url": "memory://b"},
                    )
                ),
            ],
            "ListQuarantined": [encoded(wire.ListQuarantinedRequest(job=worker.job))],
            "ReadAudit": [encoded(wire.ReadAuditRequest(job="default")), encoded(wire.ReadAuditRequest(after=3))],
            "Status": [encoded(wire.StatusRequest())],
        }


# ---- an agent


class AgentWorld:
    """An agent that is stopping, so that it starts nothing more, with a launch that has ended."""

    def __init__(self, folder: Path) -> None:
        script = folder / "script.py"
        script.write_text("print('done')\n")
        self._agent = AgentService(
            AgentPlan("127.0.0.1:1", 1, folder), incarnation=lambda: 3, report_exit=lambda pid, exit_code: None
        )
        launch = agent.LaunchRequest(
            script=str(script),
            arguments=["a", "b"],
            working_directory=str(folder),
            environment={"NAME": "value"},
            workers=1,
            restarts_max=1,
            restarts_window_ms=60_000,
        )
        self.launch: RunningLaunch = self._agent.launch(launch)
        self._agent.close()
        assert self.launch.events.ended
        self.service = self._agent.service
        number = self.launch.number
        self.calls = {
            "Launch": [encoded(launch)],
            "Watch": [
                encoded(agent.WatchRequest(launch=number)),
                encoded(agent.WatchRequest(launch=number, next_event=1)),
            ],
            "Stop": [encoded(agent.StopRequest(launch=number, grace_ms=100))],
            "ReadOutput": [
                encoded(agent.ReadOutputRequest(launch=number)),
                encoded(agent.ReadOutputRequest(launch=number, process=0, tail=3, follow=True)),
            ],
            "DescribeAgent": [encoded(agent.DescribeAgentRequest())],
        }

    def state(self) -> object:
        found = [(number, launch.events.ended, launch.running) for number, launch in self._agent._launches.items()]
        return found, threading.active_count()

    def settle(self) -> bool:
        return False

    def close(self) -> None:
        """It is closed."""
