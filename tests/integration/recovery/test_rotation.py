"""The authority is replaced while a job trains, and the coordinator is killed in both phases: promise S6."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509

from shardyard.config import configuration
from shardyard.domain import errors
from shardyard.domain.ids import MemberRole
from shardyard.security.authority import FORMER, Authority, make_credentials
from shardyard.security.credentials import AUTHORITIES, CERTIFICATE, Credentials, write_credentials
from shardyard.security.identity import Role
from shardyard.transport.enrolment import invite, join, renew_if_due
from shardyard.transport.grpc_client import GrpcNetwork, GrpcPeer
from shardyard.transport.membership_client import Membership, MembershipClient
from shardyard.wire import methods
from shardyard.wire.v1 import agent_pb2 as agent_wire
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.cli import main
from shardyard_launcher.yard.local_cluster import LocalCluster
from shardyard_worker.job import connect as worker
from tests.support.waiting import wait_until

LEASE_MS = 2_000
DEADLINE_S = 30.0


class Yard:
    """A coordinator, a server and an agent, as processes. Other machines have folders of their own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        given = {
            "yard.servers": 1,
            "yard.workers": 1,
            "yard.coordinator_port": 0,
            "membership.lease_ms": LEASE_MS,
            "membership.coordinator_grace_ms": 30_000,
        }
        self.folder, self._capsys = folder, capsys
        self.ending = contextlib.ExitStack()
        self.cluster = LocalCluster(configuration.load(None, {}, given).settings, folder / "state", tied=True)
        self.cluster.start(stop=threading.Event())
        self.identities = folder / "state" / "identity"

    @property
    def authority(self) -> Authority:
        return Authority(self.identities / "authority")

    def machine(self, role: Role, name: str) -> Credentials:
        """The credentials of another machine, which nobody but its own processes renews."""
        folder = self.folder / "machines" / name
        write_credentials(folder, make_credentials(self.authority, role, name, 3_600))
        return Credentials(folder)

    def copied(self, name: str, of: Credentials) -> Credentials:
        """Of a machine that is away from now on."""
        return Credentials(Path(shutil.copytree(of.folder, self.folder / "away" / name)))

    def ask(self, credentials: Credentials) -> wire.StatusReply:
        peer = GrpcNetwork(credentials).connect(self.cluster.coordinator, name="coordinator")
        try:
            return peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000)
        finally:
            peer.close()

    def command(self, *arguments: str) -> str:
        self._capsys.readouterr()
        code = main([*arguments, "--state", str(self.folder / "state"), "--coordinator", self.cluster.coordinator])
        shown = self._capsys.readouterr()
        assert code == 0, shown.err
        return shown.out

    @property
    def rotation(self) -> Any:
        return json.loads(self.command("identities", "list", "--json"))["rotation"]

    def wait_for_phase(self, phase: str | None) -> None:
        def is_there() -> bool:
            rotation = self.rotation
            return bool((None if rotation is None else rotation["phase"]) == phase)

        wait_until(is_there, f"phase {phase}", deadline_s=DEADLINE_S)

    def kill_coordinator(self) -> None:
        """And waits until another one serves."""
        role = next(each for each in self.cluster.state.roles if each.role == "coordinator")
        os.kill(role.pid, signal.SIGKILL)
        news: list[str] = []

        def is_ready() -> bool:
            news.extend(self.cluster.poll())
            return any("coordinator" in each and "is ready" in each for each in news)

        wait_until(is_ready, "the coordinator to serve again", deadline_s=DEADLINE_S)

    def join_job(self, network: GrpcNetwork, name: str) -> Any:
        given = {"coordinator": self.cluster.coordinator, "job.name": name, "log.level": "error"}
        given |= {"worker.same_host": "never"}
        job = worker.connect(configuration.load(None, {}, given).settings, network=network)
        job.register({"w": torch.zeros(20)}, lr=1.0)
        return job

    def train_a_little(self, credentials: Credentials, name: str) -> None:
        """A process that begins now, so all its connections do."""
        job = self.join_job(GrpcNetwork(credentials), name)
        try:
            job.push({"w": torch.ones(20)})
            assert torch.equal(job.pull()["w"], torch.full((20,), -1.0))
        finally:
            job.close()

    def describe_agent(self, credentials: Credentials) -> None:
        agent = GrpcNetwork(credentials).connect(self.cluster.state.address_of("agent"), name="agent")
        try:
            agent.call(methods.DESCRIBE_AGENT, agent_wire.DescribeAgentRequest(), timeout_ms=5_000)
        finally:
            agent.close()


@pytest.fixture
def yard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Yard]:
    begun = Yard(tmp_path, capsys)
    try:
        yield begun
    finally:
        begun.ending.close()
        begun.cluster.stop()


class CountingNetwork(GrpcNetwork):
    """Counts the streams that are opened."""

    opened = 0

    def connect(
        self, address: str, *, name: str, unavailable: type[errors.Unavailable] = errors.ServerUnavailable
    ) -> GrpcPeer:
        peer = super().connect(address, name=name, unavailable=unavailable)
        opens = peer.open

        def count(*given: Any, **more: Any) -> Any:
            self.opened += 1
            return opens(*given, **more)

        peer.open = count  # type: ignore[method-assign]
        return peer


class Trainer:
    """A worker of another machine that pushes ones, again and again."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.pushed = 0
        self.failures: list[BaseException] = []

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.01):
                self._job.push({"w": torch.ones(20)})
                self.pushed += 1
        except BaseException as error:  # noqa: BLE001 - the test says what it is
            self.failures.append(error)

    def __enter__(self) -> Trainer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check_goes_on(self) -> None:
        before = self.pushed
        wait_until(lambda: bool(self.failures) or self.pushed >= before + 5, "steps", deadline_s=DEADLINE_S)
        assert not self.failures, self.failures


class Straggler:
    """A member that sends heartbeats, and renews its certificate only when it is told to: it holds a phase open."""

    def __init__(self, yard: Yard) -> None:
        peer = GrpcNetwork(yard.machine(Role.AGENT, "straggler")).connect(
            yard.cluster.coordinator, name="coordinator", unavailable=errors.CoordinatorUnavailable
        )
        assert peer.credentials is not None
        self.peer, self.credentials, self._wanted = peer, peer.credentials, b""
        self._client = MembershipClient(
            peer,
            Membership(MemberRole.AGENT, "127.0.0.1:1"),
            on_reply=self._note,
            on_lost=lambda _: None,
            grace_ms=30_000,
        )
        self._client._renewal.look = lambda _: None  # type: ignore[method-assign]
        self._client.register(patience_ms=5_000)
        self._client.start()

    def _note(self, reply: wire.HeartbeatReply) -> None:
        self._wanted = reply.authorities

    def renew(self) -> None:
        """Once it reaches the coordinator, which may have begun again."""

        def is_renewed() -> bool:
            with contextlib.suppress(errors.CoordinatorUnavailable):
                return renew_if_due(self.peer, self.credentials, self._wanted)
            return False

        wait_until(is_renewed, "a renewal", deadline_s=DEADLINE_S)

    def leave(self) -> None:
        self._client.leave()
        self.peer.close()


def roots_in(folder: Path) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates((folder / AUTHORITIES).read_bytes())


def signer_of(folder: Path) -> x509.Certificate:
    """The root that has signed the certificate in a folder."""
    certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
    for root in roots_in(folder):
        try:
            certificate.verify_directly_issued_by(root)
        except Exception:  # noqa: BLE001 - it is the other one
            continue
        return root
    raise AssertionError(f"no root in {folder} has signed its certificate")


def refusal(ask: Callable[[], object]) -> str:
    with pytest.raises(errors.NotTrusted) as refused:
        ask()
    return str(refused.value)


def test_authority_is_replaced_while_a_job_trains(yard: Yard) -> None:
    numbers = itertools.count()
    (old,) = roots_in(yard.identities / "operator")
    resting = [yard.machine(Role.WORKER, f"resting-{phase}") for phase in ("spread", "sign", "away")]
    person = yard.machine(Role.OPERATOR, "person")
    operator = GrpcNetwork(Credentials(yard.identities / "operator")).connect(
        yard.cluster.coordinator, name="coordinator"
    )
    lines = [invite(operator, role="viewer", name="", lifetime_s=600, uses=1) for _ in range(2)]
    operator.close()
    network = CountingNetwork(yard.machine(Role.WORKER, "trainer"))
    job = yard.join_job(network, "long")
    yard.ending.callback(job.close)
    straggler = Straggler(yard)
    yard.ending.callback(straggler.leave)
    members = [yard.identities / "server-0", yard.folder / "machines" / "trainer", yard.identities / "agent"]

    with Trainer(job) as trainer:
        trainer.check_goes_on()
        streams = network.opened
        assert streams > 0
        assert yard.command("identities", "rotate", "--overlap", "0s") == "phase spread has begun\n"
        # all but one have both roots, so no certificate of the next one is given out
        wait_until(lambda: all(len(roots_in(each)) == 2 for each in members), "both roots", deadline_s=DEADLINE_S)
        wait_until(lambda: len(yard.rotation["waits_for"]) == 1, "the others", deadline_s=DEADLINE_S)
        assert "agent" in yard.rotation["waits_for"][0]
        assert "it waits for agent" in yard.command("identities", "list")
        yard.train_a_little(resting[0], f"short-{next(numbers)}")
        away_with_both = yard.copied("both", resting[0])
        yard.kill_coordinator()
        assert yard.rotation["phase"] == "spread"
        yard.describe_agent(person)
        assert {signer_of(each).serial_number for each in members} == {old.serial_number}
        trainer.check_goes_on()

        straggler.renew()
        yard.wait_for_phase("sign")
        wait_until(
            lambda: all(signer_of(each).serial_number != old.serial_number for each in members),
            "certificates of the next root",
            deadline_s=DEADLINE_S,
        )
        # who comes back, or joins, trusts the old root alone
        yard.train_a_little(resting[1], f"short-{next(numbers)}")
        assert join(yard.cluster.coordinator, lines[0])[1] == "viewer"
        yard.kill_coordinator()
        assert yard.rotation["phase"] == "sign"
        yard.command("status")
        yard.describe_agent(Credentials(yard.identities / "operator"))
        trainer.check_goes_on()

        straggler.leave()
        yard.wait_for_phase(None)
        new = yard.authority
        wait_until(lambda: all(len(roots_in(each)) == 1 for each in members), "one root", deadline_s=DEADLINE_S)
        assert {signer_of(each).serial_number for each in members} == {roots_in(members[0])[0].serial_number}
        assert roots_in(members[0])[0].serial_number != old.serial_number
        yard.train_a_little(resting[1], f"short-{next(numbers)}")
        trainer.check_goes_on()
        yard.kill_coordinator()
        assert yard.rotation is None
        trainer.check_goes_on()
    assert network.opened == streams, "no stream has ended"
    assert torch.equal(job.pull()["w"], torch.full((20,), -float(trainer.pushed)))

    assert [path.name for path in (new.folder / FORMER).iterdir()] == [f"{old.serial_number:x}.crt"]
    assert old.public_key() in new.keys.keys
    for away in (resting[2], person, away_with_both):
        said = refusal(lambda away=away: yard.ask(away))
        assert "of another authority of this yard" in said
        assert "shardyard invite" in said
    assert "of another authority of this yard" in refusal(lambda: join(yard.cluster.coordinator, lines[1]))
