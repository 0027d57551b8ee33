"""A certificate of a member that was stolen speaks for that member and its own job, and for nobody else: promise S2.

A yard of real processes, with a job of worker `ada`. Worker `eve` has a certificate of the yard too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import zstandard

from shardyard.codecs.format.form import CodeId, varint, whole
from shardyard.config import configuration
from shardyard.domain import errors, limits
from shardyard.domain.ids import Incarnation, JobId
from shardyard.security.identity import Role
from shardyard.transport.grpc_client import GrpcNetwork, GrpcPeer
from shardyard.transport.interfaces import LocalAddress
from shardyard.wire import layout_messages, methods
from shardyard.wire.frames import Frame
from shardyard.wire.method import Method
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from tests.support.closed_yards import Job, Yard
from tests.support.shop import GROUPS, VALUES

CALL_MS = 10_000


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    begun = Yard(tmp_path_factory.mktemp("yard") / "state")
    yield begun
    begun.cluster.stop()


@pytest.fixture(scope="module")
def job(yard: Yard) -> Iterator[Job]:
    begun = Job(yard)
    yield begun
    begun.close()


@pytest.fixture
def eve(yard: Yard, job: Job) -> Iterator[GrpcNetwork]:
    """A worker of the yard, which is a member of its own, in a job of its own."""
    network = yard.network(Role.WORKER, "eve")
    yield network
    job.check()


@pytest.fixture
def coordinator(yard: Yard, eve: GrpcNetwork) -> Iterator[GrpcPeer]:
    peer = yard.coordinator(eve)
    yield peer
    peer.close()


@pytest.fixture
def server(yard: Yard, eve: GrpcNetwork) -> Iterator[GrpcPeer]:
    peer = eve.connect(yard.server, name="server 1")
    yield peer
    peer.close()


def register(coordinator: GrpcPeer, role: wire.Role = wire.ROLE_WORKER, **more: Any) -> wire.RegisterReply:
    request = wire.RegisterRequest(role=role, protocol=limits.PROTOCOL, host="box", pid=1, **more)
    return coordinator.call(methods.REGISTER, request, timeout_ms=CALL_MS)


def refused(peer: GrpcPeer, method: Method[Any, Any], request: Any, match: str) -> None:
    def ask() -> None:
        if method.streams_out:
            list(peer.receive(method, request, timeout_ms=CALL_MS))
        elif method.streams_in:
            peer.send(method, [request], timeout_ms=CALL_MS)
        else:
            peer.call(method, request, timeout_ms=CALL_MS)

    with pytest.raises(errors.NotPermitted, match=match):
        ask()


def test_member_cannot_speak_for_another_to_the_coordinator(coordinator: GrpcPeer, job: Job) -> None:
    own = register(coordinator).incarnation
    try:
        for method, request in (
            (methods.HEARTBEAT, wire.HeartbeatRequest(caller=job.caller, step=1 << 40)),
            (methods.LEAVE, wire.LeaveRequest(caller=job.caller, error="it left")),
            (methods.DRAIN, wire.DrainRequest(caller=job.caller)),
            (methods.STOP_JOB, wire.StopJobRequest(caller=job.caller)),
            (methods.TAKE_CHECKPOINT, wire.TakeCheckpointRequest(caller=job.caller)),
            (methods.LEASE_DATA, wire.LeaseDataRequest(caller=job.caller)),
            (methods.JOIN_JOB, wire.JoinJobRequest(caller=job.caller, name="ada")),
            # nor for nobody, as a person does
            (methods.STOP_JOB, wire.StopJobRequest(job_name="ada")),
            (methods.TAKE_CHECKPOINT, wire.TakeCheckpointRequest(job_name="ada")),
            (methods.DRAIN, wire.DrainRequest(member=str(Incarnation(job.member)))),
        ):
            refused(coordinator, method, request, "worker eve speaks for member")
    finally:
        coordinator.call(methods.LEAVE, wire.LeaveRequest(caller=common.Caller(incarnation=own)), timeout_ms=CALL_MS)


def test_member_registers_in_the_role_of_its_certificate(coordinator: GrpcPeer) -> None:
    for role in (wire.ROLE_SERVER, wire.ROLE_AGENT):
        with pytest.raises(errors.NotPermitted, match="worker eve registers as"):
            register(coordinator, role, address="127.0.0.1:9")


def test_server_cannot_take_the_place_of_another(yard: Yard, eve: GrpcNetwork) -> None:
    impostor = yard.coordinator(yard.network(Role.SERVER, "impostor"))
    try:
        with pytest.raises(errors.NotReady, match="has this address, and another certificate"):
            register(impostor, wire.ROLE_SERVER, address=yard.server)
    finally:
        impostor.close()


def push_of(job: Job, member: int, code: bytes = b"", server: int = 1) -> Frame:
    """`code`: compressed gradients."""
    header = server_wire.PushHeader(
        caller=common.Caller(job=job.id, incarnation=member),
        server=server,
        generation=1,
        name={"source": {"worker": member}, "first": 0, "last": 0},
        kind=server_wire.PUSH_KIND_GRADIENT,
        groups=layout_messages.groups_to_wire(GROUPS),
        parts=[{"partition": 0, "payload_bytes": len(code) or 80, "code_bytes": [len(code)] if code else []}],
        weight=1.0,
    )
    return Frame(header.SerializeToString(), 0, code or VALUES[:80])


@pytest.mark.parametrize("member", [0, 424_242, "ada"])
def test_worker_without_a_pass_neither_reads_nor_writes_on_servers(server: GrpcPeer, job: Job, member: Any) -> None:
    number = job.member if member == "ada" else member
    caller = common.Caller(job=job.id, incarnation=number)
    about: dict[str, Any] = {"caller": caller, "server": 1, "generation": 1}
    for method, request in (
        (methods.PULL, server_wire.PullRequest(**about, partitions=[0])),
        (methods.OPEN_SOURCES, server_wire.OpenSourcesRequest(**about, sources=[{"source": {"worker": number}}])),
        (methods.PIN, server_wire.PinRequest(**about, pin=b"p" * 16, lease_ms=1_000)),
        (methods.UNPIN, server_wire.UnpinRequest(caller=caller, pin=b"p" * 16)),
        (methods.READ_ROWS, server_wire.ReadRowsRequest(**about)),
        (methods.READ_OPTIMIZER, server_wire.ReadOptimizerRequest(**about)),
        (methods.PUSH, push_of(job, number)),
    ):
        refused(server, method, request, "and has no pass")


def test_worker_with_a_pass_for_its_own_job_does_not_reach_another(
    server: GrpcPeer, coordinator: GrpcPeer, eve: GrpcNetwork, job: Job
) -> None:
    own = register(coordinator).incarnation
    caller = common.Caller(incarnation=own)
    settings = configuration.load(None, {}, {"job.name": "eve"}).settings.job.model_dump_json()
    try:
        joined = coordinator.call(
            methods.JOIN_JOB, wire.JoinJobRequest(caller=caller, name="eve", settings_json=settings), timeout_ms=CALL_MS
        )
        assert joined.job_pass
        eve.job_pass = joined.job_pass
        about: dict[str, Any] = {"server": 1, "generation": 1, "partitions": [0]}
        theirs = server_wire.PullRequest(caller=job.caller, **about)
        refused(server, methods.PULL, theirs, "has a pass for job")
        refused(server, methods.PUSH, push_of(job, own), "has a pass for job")
    finally:
        coordinator.call(methods.LEAVE, wire.LeaveRequest(caller=caller), timeout_ms=CALL_MS)


def test_member_gets_no_pass_for_a_job_that_it_is_not_in(coordinator: GrpcPeer, job: Job) -> None:
    own = register(coordinator).incarnation
    caller = common.Caller(job=job.id, incarnation=own)
    try:
        # a heartbeat that says when its pass ends gets another in time
        request = wire.HeartbeatRequest(caller=caller, pass_until_s=1)
        refused(coordinator, methods.HEARTBEAT, request, f"worker eve speaks for job {JobId(job.id)}, and is in none")
    finally:
        coordinator.call(methods.LEAVE, wire.LeaveRequest(caller=common.Caller(incarnation=own)), timeout_ms=CALL_MS)


def test_pass_of_another_is_worth_nothing(server: GrpcPeer, eve: GrpcNetwork, job: Job) -> None:
    eve.job_pass = job.network.job_pass
    request = server_wire.PullRequest(caller=job.caller, server=1, generation=1, partitions=[0])
    refused(server, methods.PULL, request, "worker eve shows a pass of worker/ada")


def test_local_socket_is_opened_with_a_key_of_its_own(server: GrpcPeer, eve: GrpcNetwork, job: Job) -> None:
    """The socket can be seen by every process of the user. A key opens it once, for the caller that has got it."""
    attached = server.call(methods.ATTACH, server_wire.AttachRequest(), timeout_ms=CALL_MS)
    assert len(attached.key) == 16

    def opened(key: bytes) -> Any:
        return server.open(methods.PUSH_PULL, timeout_ms=CALL_MS, socket=LocalAddress(attached.socket, key))

    for key in (b"", b"x" * 16):
        with contextlib.closing(_Stream(opened(key))) as stream:
            with pytest.raises(errors.NotPermitted, match="without a key of this server"):
                stream.inner.receive(timeout_ms=CALL_MS)
    with contextlib.closing(_Stream(opened(attached.key))) as stream:
        stream.inner.send([push_of(job, job.member)])
        with pytest.raises(errors.NotPermitted, match="has no pass"):
            stream.inner.receive(timeout_ms=CALL_MS)
    with contextlib.closing(_Stream(opened(attached.key))) as stream:
        with pytest.raises(errors.NotPermitted, match="without a key of this server"):
            stream.inner.receive(timeout_ms=CALL_MS)


class _Stream:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def close(self) -> None:
        self.inner.cancel()


@pytest.mark.parametrize("becomes_bytes", [1 << 12, 1 << 30])
def test_compressed_gradients_that_become_more_than_their_variable_are_refused(
    yard: Yard, job: Job, becomes_bytes: int
) -> None:
    """ada's own certificate and pass were stolen. Her variable has 20 values."""
    process = next(psutil.Process(each.pid) for each in yard.cluster.state.processes if each.role == "server")
    with contextlib.closing(job.network.connect(yard.server, name="server 1")) as peer:
        server = peer.call(methods.DESCRIBE_SERVER, server_wire.DescribeServerRequest(), timeout_ms=CALL_MS).server
        for says_bytes in (80, becomes_bytes):
            code = whole(CodeId.ZSTD, 20, varint(says_bytes), np.frombuffer(zeros(becomes_bytes), np.uint8)).tobytes()
            before = process.memory_info().rss
            with pytest.raises(errors.MalformedPayload):
                peer.send(methods.PUSH, [push_of(job, job.member, code, server)], timeout_ms=CALL_MS)
            assert process.memory_info().rss < before + 64 * limits.MIB


def zeros(count: int) -> bytes:
    """So many zeros in a zstd frame."""
    frame = zstandard.ZstdCompressor().compressobj(size=count)
    pieces = [frame.compress(bytes(min(count, limits.MIB))) for _ in range(0, count, limits.MIB)]
    return b"".join((*pieces, frame.flush()))


def test_job_of_ada_goes_on(job: Job) -> None:
    job.inner.push({"w": torch.ones(20)})
    job.values = job.values - 0.5
    job.check()
    assert JobId(job.id)
