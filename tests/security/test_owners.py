"""Jobs are apart: who starts a job owns it, and members of another owner reach nothing of it: promise S4."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardyard.domain import errors
from shardyard.security.credentials import Credentials, write_credentials
from shardyard.security.identity import Role
from shardyard.transport.enrolment import invite, join
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.wire import methods
from shardyard.wire.v1 import agent_pb2 as agent_wire
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.reader.reader_session import ReaderSession
from tests.support.owners import OwnersYard

CALL_MS = 10_000


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnersYard]:
    begun = OwnersYard(tmp_path_factory.mktemp("yard") / "state")
    yield begun
    begun.cluster.stop()


@pytest.fixture(scope="module")
def of_ada(yard: OwnersYard) -> Iterator[Any]:
    """A job of ada."""
    job = yard.join("ada", "ranking")
    yield job
    job.close()


def test_worker_of_another_owner_does_not_join(yard: OwnersYard, of_ada: Any) -> None:
    with pytest.raises(errors.NotPermitted, match=r"job 'ranking' \(1\.1\) is of ada, and worker .* is of eve"):
        yard.join("eve", "ranking")
    again = yard.join("ada", "ranking")
    again.close()
    own = yard.join("eve", "other")
    own.push({"w": torch.ones(20)})
    own.close()


def test_yards_own_worker_may_join_every_job(yard: OwnersYard, of_ada: Any) -> None:
    yard.join("", "ranking").close()


def test_reader_of_another_owner_follows_nothing(yard: OwnersYard, of_ada: Any) -> None:
    for owner, allowed in (("ada", True), ("", True), ("eve", False)):
        session = ReaderSession(
            yard.network(Role.READER, owner),
            yard.coordinator,
            job=of_ada._session.caller.job,
            name="ranking",
            grace_ms=1_000,
        )
        try:
            if allowed:
                session.begin()
            else:
                with pytest.raises(errors.NotPermitted, match="which is another's"):
                    session.begin()
        finally:
            session.close()


def test_worker_of_another_owner_does_not_follow(yard: OwnersYard, of_ada: Any) -> None:
    """A worker that follows a job without being its member gets a pass to read it."""
    peer = yard.network(Role.WORKER, "eve").connect(yard.coordinator, name="coordinator")
    number = of_ada._session.caller.job
    requests: list[tuple[Any, Any]] = [
        (methods.FOLLOW_JOB, wire.FollowJobRequest(job=number, reader=b"r" * 16)),
        (methods.FOLLOW_JOB, wire.FollowJobRequest(job_name="ranking", reader=b"r" * 16)),
        (methods.REPORT_EVALUATION, wire.ReportEvaluationRequest(job=number)),
    ]
    try:
        for method, request in requests:
            with pytest.raises(errors.NotPermitted, match="which is another's"):
                peer.call(method, request, timeout_ms=CALL_MS)
    finally:
        peer.close()


def test_operator_decides_about_jobs_of_its_owner_only(yard: OwnersYard, of_ada: Any) -> None:
    number = of_ada._session.caller.job
    requests: list[tuple[Any, Any]] = [
        (methods.STOP_JOB, wire.StopJobRequest(job_name="ranking")),
        (methods.STOP_JOB, wire.StopJobRequest()),  # the only job that runs
        (methods.TAKE_CHECKPOINT, wire.TakeCheckpointRequest(job_name="ranking")),
        (
            methods.SWITCH_CONSISTENCY,
            wire.SwitchConsistencyRequest(job_name="ranking"),
        ),
        (methods.RESTORE_CHECKPOINT, wire.RestoreCheckpointRequest(job_name="ranking")),
        (methods.LIST_QUARANTINED, wire.ListQuarantinedRequest(job=number)),
        (methods.READ_AUDIT, wire.ReadAuditRequest(job="ranking")),
        (methods.READ_AUDIT, wire.ReadAuditRequest(job=str(number))),
    ]
    eve, ada = yard.operator("eve"), yard.operator("ada")
    try:
        for method, request in requests:
            with pytest.raises(errors.NotPermitted, match="which is another's"):
                eve.call(method, request, timeout_ms=CALL_MS)
        assert ada.call(methods.READ_AUDIT, wire.ReadAuditRequest(job="ranking"), timeout_ms=CALL_MS).entries
        assert ada.call(
            methods.TAKE_CHECKPOINT, wire.TakeCheckpointRequest(job_name="ranking"), timeout_ms=CALL_MS
        ).ticket
    finally:
        eve.close()
        ada.close()


def test_operator_of_an_owner_decides_nothing_about_the_yard(yard: OwnersYard) -> None:
    eve = yard.operator("eve")
    try:
        with pytest.raises(errors.NotPermitted, match="decides nothing about the yard"):
            eve.call(methods.DRAIN, wire.DrainRequest(member="server-0"), timeout_ms=CALL_MS)
        for role, owner in (("server", ""), ("agent", "eve"), ("worker", "ada")):
            with pytest.raises(errors.NotPermitted, match="invites nobody as"):
                invite(eve, role=role, name="", lifetime_s=60, uses=1, owner=owner)
        for holder in ("server/server-0", "worker/ada/worker", "operator/operator"):
            with pytest.raises(errors.NotPermitted, match="decides nothing about"):
                eve.call(methods.REVOKE_IDENTITY, wire.RevokeIdentityRequest(holder=holder), timeout_ms=CALL_MS)
        listed = eve.call(methods.LIST_IDENTITIES, wire.ListIdentitiesRequest(), timeout_ms=CALL_MS).identities
        assert listed
        assert {each.holder.split("/")[1] for each in listed} == {"eve"}
    finally:
        eve.close()


def test_who_is_invited_belongs_to_the_owner_of_the_inviter(yard: OwnersYard, tmp_path: Path) -> None:
    eve = yard.operator("eve")
    try:
        text = invite(eve, role="worker", name="", lifetime_s=60, uses=1)
    finally:
        eve.close()
    pem, role, _ = join(yard.coordinator, text)
    write_credentials(tmp_path / "w", pem)
    assert role == "worker"
    peer = GrpcNetwork(Credentials(tmp_path / "w")).connect(yard.coordinator, name="coordinator")
    try:
        with pytest.raises(errors.NotPermitted, match="worker eve/worker-"):
            peer.call(methods.SWITCH_CONSISTENCY, wire.SwitchConsistencyRequest(), timeout_ms=CALL_MS)
    finally:
        peer.close()


def test_server_has_no_owner(yard: OwnersYard) -> None:
    yards = yard.operator("")
    try:
        with pytest.raises(errors.InvalidRequest, match="it serves all jobs"):
            invite(yards, role="server", name="", lifetime_s=60, uses=1, owner="ada")
    finally:
        yards.close()


SCRIPT = """
import os, pathlib
from cryptography import x509
folder = pathlib.Path(os.environ["SHARDYARD__SECURITY__IDENTITY"])
found = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
print("I am", names.get_values_for_type(x509.UniformResourceIdentifier)[0], flush=True)
"""


def test_launch_belongs_to_who_has_asked_for_it(yard: OwnersYard, tmp_path: Path) -> None:
    script = tmp_path / "who.py"
    script.write_text(SCRIPT)
    agent = yard.cluster.state.agent
    ada = yard.network(Role.OPERATOR, "ada").connect(agent, name="agent")
    eve = yard.network(Role.OPERATOR, "eve").connect(agent, name="agent")
    try:
        # what a person says about the owner does not count
        request = agent_wire.LaunchRequest(script=str(script), working_directory=str(tmp_path), workers=1, owner="eve")
        launch = ada.call(methods.LAUNCH, request, timeout_ms=CALL_MS).launch
        watch = agent_wire.WatchRequest(launch=launch)
        events = list(ada.receive(methods.WATCH, watch, timeout_ms=30_000))
        said = [event.output.line for event in events if event.HasField("output")]
        assert [line for line in said if "/worker/ada/agent." in line], said
        for method, asked in (
            (methods.WATCH, watch),
            (methods.READ_OUTPUT, agent_wire.ReadOutputRequest(launch=launch)),
        ):
            with pytest.raises(errors.NotPermitted, match=f"launch {launch} is another's"):
                list(eve.receive(method, asked, timeout_ms=CALL_MS))  # type: ignore[arg-type]
        with pytest.raises(errors.NotPermitted):
            eve.call(methods.STOP, agent_wire.StopRequest(launch=launch), timeout_ms=CALL_MS)
        shown = eve.call(methods.DESCRIBE_AGENT, agent_wire.DescribeAgentRequest(), timeout_ms=CALL_MS)
        assert launch not in [each.launch for each in shown.launches]
    finally:
        ada.close()
        eve.close()
