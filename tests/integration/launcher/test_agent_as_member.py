"""The agent as a member of a yard: it registers, again after it was declared dead, reports ends, and leaves."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.settings import MembershipSettings, SecuritySettings, Settings
from shardyard.domain import errors
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.interfaces import Context, Service
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as coordinator_wire
from shardyard_worker.agent import process as agent_process
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")

DEADLINE_S = 30.0
await_true = partial(wait_until, deadline_s=DEADLINE_S)


class FakeCoordinator:
    """Takes an agent's registrations, heartbeats and reports. `fence` makes it declare the agent dead, once."""

    def __init__(self) -> None:
        self.registered: list[coordinator_wire.RegisterRequest] = []
        self.reports: list[tuple[int, int, int]] = []
        self.left: list[int] = []
        self.fence = threading.Event()
        service = Service("Coordinator")
        service.on(methods.REGISTER, self._register)
        service.on(methods.HEARTBEAT, self._heartbeat)
        service.on(methods.REPORT_EXIT, self._report)
        service.on(methods.LEAVE, self._leave)
        self.listener = GrpcServer("127.0.0.1:0", [service], None, threads=8)
        self.listener.start()

    def _register(self, request: coordinator_wire.RegisterRequest, context: Context) -> coordinator_wire.RegisterReply:
        self.registered.append(request)
        number = len(self.registered)
        return coordinator_wire.RegisterReply(incarnation=number, term=1, heartbeat_ms=20, lease_ms=4_000)

    def _heartbeat(
        self, request: coordinator_wire.HeartbeatRequest, context: Context
    ) -> coordinator_wire.HeartbeatReply:
        if self.fence.is_set():
            self.fence.clear()
            raise errors.StaleIncarnation(f"member {request.caller.incarnation} was declared dead")
        return coordinator_wire.HeartbeatReply(term=1)

    def _report(
        self, request: coordinator_wire.ReportExitRequest, context: Context
    ) -> coordinator_wire.ReportExitReply:
        self.reports.append((request.caller.incarnation, request.pid, request.exit_code))
        return coordinator_wire.ReportExitReply()

    def _leave(self, request: coordinator_wire.LeaveRequest, context: Context) -> coordinator_wire.LeaveReply:
        self.left.append(request.caller.incarnation)
        return coordinator_wire.LeaveReply()


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    made = FakeCoordinator()
    yield made
    made.listener.stop()


def serve(coordinator: str, **given: Any) -> int:
    """Serves an agent that starts no processes for others. By default it has one worker and any free port."""
    rest: dict[str, Any] = {
        "bind": "127.0.0.1:0",
        "workers": 1,
        "command": None,
        "stop": threading.Event(),
        "hurry": threading.Event(),
        "settings": Settings(security=SecuritySettings(tls=False)),
    } | given
    return agent_process.serve(
        coordinator=coordinator,
        advertise=None,
        state=Path("state"),
        **rest,
    )


@contextlib.contextmanager
def serving(coordinator: str, *, command: list[str] | None = None) -> Iterator[tuple[list[str], list[int]]]:
    """An agent in a thread: the addresses that it was ready at, the exit codes that it gave."""
    stop = threading.Event()
    addresses: list[str] = []
    codes: list[int] = []

    def run() -> None:
        codes.append(serve(coordinator, workers=2, command=command, stop=stop, ready=addresses.append))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield addresses, codes
    finally:
        stop.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_agent_registers_and_leaves(coordinator: FakeCoordinator) -> None:
    with serving(coordinator.listener.address) as (addresses, codes):
        await_true(lambda: bool(addresses), "the agent to be ready")
        request = coordinator.registered[0]
        assert (request.role, request.address, request.pid) == (
            coordinator_wire.ROLE_AGENT,
            addresses[0],
            os.getpid(),
        )
    assert codes == [0]
    assert coordinator.left == [1]


def test_agent_that_was_declared_dead_registers_again(coordinator: FakeCoordinator) -> None:
    with serving(coordinator.listener.address) as (addresses, _):
        await_true(lambda: bool(addresses), "the agent to be ready")
        coordinator.fence.set()
        await_true(lambda: len(coordinator.registered) == 2, "a second registration")
    assert coordinator.left == [2]


def test_agent_with_a_script_ends_with_it_and_reports_its_processes(
    coordinator: FakeCoordinator, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('argument', sys.argv[1])\nsys.exit(int(sys.argv[1]))\n")
    with serving(coordinator.listener.address, command=[str(script), "6"]) as (_, codes):
        await_true(lambda: bool(codes), "the agent to end")
    assert codes == [6]
    assert "] argument 6\n" in capfd.readouterr().out
    assert len(coordinator.reports) == 2
    assert {incarnation for incarnation, _, _ in coordinator.reports} == {1}
    assert 6 in {code for _, _, code in coordinator.reports}


def test_agent_without_a_coordinator_gives_up_after_the_grace_time() -> None:
    settings = Settings(membership=MembershipSettings(coordinator_grace_ms=300))
    with pytest.raises(errors.CoordinatorUnavailable, match="does not answer"):
        serve("127.0.0.1:1", settings=settings, ready=lambda address: pytest.fail("ready without a coordinator"))
    assert not [thread.name for thread in threading.enumerate() if thread.name == "exit-reports"]


def test_agent_on_a_port_in_use_says_so(coordinator: FakeCoordinator) -> None:
    address = coordinator.listener.address
    with pytest.raises(errors.AddressInUse):
        serve(address, bind=address, ready=lambda address: pytest.fail("ready on a port in use"))
    assert coordinator.registered == []
