"""Being a member: registering with patience, heartbeats, being lost, leaving; and no thread afterwards."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from shardyard.config.settings import MembershipSettings
from shardyard.domain import errors, limits
from shardyard.domain.ids import Caller, Incarnation, JobId, MemberRole, Term
from shardyard.domain.limits import PROTOCOL
from shardyard.transport import membership_client
from shardyard.transport.in_process import InProcessNetwork
from shardyard.transport.interfaces import Context, Peer, Service
from shardyard.transport.membership_client import Membership, MembershipClient
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from tests.support.waiting import DEADLINE_S, wait_until

ADDRESS = "coordinator:1"


class FakeCoordinator:
    """Answers Register, Heartbeat and Leave; raises `refusals[method]` first, one after the other."""

    def __init__(self, network: InProcessNetwork) -> None:
        self._network = network
        self.registered: list[wire.RegisterRequest] = []
        self.beats: list[wire.HeartbeatRequest] = []
        self.left: list[wire.LeaveRequest] = []
        self.refusals: dict[str, list[errors.ShardyardError]] = {}
        self.term = 1
        self.undecided = ""
        self.heartbeat_ms, self.lease_ms = 2, 1_000

    def appear(self) -> None:
        service = Service("Coordinator")
        service.on(methods.REGISTER, self._register)
        service.on(methods.HEARTBEAT, self._heartbeat)
        service.on(methods.LEAVE, self._leave)
        self._network.listen(ADDRESS, [service])

    def vanish(self) -> None:
        self._network.leave(ADDRESS)

    def _refuse(self, method: str) -> None:
        if self.refusals.get(method):
            raise self.refusals[method].pop(0)

    def _register(self, request: wire.RegisterRequest, _: Context) -> wire.RegisterReply:
        self.registered.append(request)
        self._refuse("Register")
        return wire.RegisterReply(
            incarnation=41, term=self.term, heartbeat_ms=self.heartbeat_ms, lease_ms=self.lease_ms
        )

    def _heartbeat(self, request: wire.HeartbeatRequest, _: Context) -> wire.HeartbeatReply:
        self.beats.append(request)
        self._refuse("Heartbeat")
        return wire.HeartbeatReply(term=self.term, generation=len(self.beats), undecided=self.undecided)

    def _leave(self, request: wire.LeaveRequest, _: Context) -> wire.LeaveReply:
        self.left.append(request)
        self._refuse("Leave")
        return wire.LeaveReply(residual_lost=request.residual_lost > 0)


class Member:
    """An enrolment, and what it told."""

    def __init__(self, peer: Peer, **more: object) -> None:
        self.replies: list[wire.HeartbeatReply] = []
        self.lost: list[errors.ShardyardError] = []
        membership = Membership(MemberRole.WORKER, agent=Incarnation(5), local_index=3)
        self.enrolment = MembershipClient(
            peer,
            membership,
            on_reply=self.replies.append,
            on_lost=self.lost.append,
            **more,  # type: ignore[arg-type]
        )


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator(InProcessNetwork())


@pytest.fixture
def make(coordinator: FakeCoordinator) -> Iterator[Callable[..., Member]]:
    before = set(threading.enumerate())
    made: list[Member] = []

    def make_one(**more: object) -> Member:
        network = coordinator._network
        peer = network.connect(ADDRESS, name="coordinator", unavailable=errors.CoordinatorUnavailable)
        made.append(Member(peer, **more))
        return made[-1]

    yield make_one
    for member in made:
        member.enrolment.stop()
    assert [each for each in threading.enumerate() if each not in before] == []


def test_member_says_who_it_is_and_is_given_an_incarnation(
    coordinator: FakeCoordinator, make: Callable[..., Member]
) -> None:
    coordinator.appear()
    enrolment = make().enrolment
    assert enrolment.caller == Caller(JobId(0), Incarnation(0), Term(0))
    enrolment.register(patience_ms=0)
    (request,) = coordinator.registered
    assert (request.role, request.protocol, request.pid) == (wire.ROLE_WORKER, PROTOCOL, os.getpid())
    assert (request.agent, request.local_index) == (5, 3)
    assert request.release
    assert request.host
    enrolment.job = JobId(7)
    assert enrolment.caller == Caller(JobId(7), Incarnation(41), Term(1))


def test_registering_waits_for_a_coordinator_that_comes_late(
    coordinator: FakeCoordinator, make: Callable[..., Member]
) -> None:
    member = make()
    member.enrolment._stop = pause = CountedWait()
    thread = threading.Thread(target=member.enrolment.register, kwargs={"patience_ms": 60_000})
    thread.start()
    wait_until(lambda: pause.waits >= 2, "the second attempt")
    coordinator.refusals["Register"] = [errors.NotReady("not yet"), errors.DeadlineExceeded("slow")]
    coordinator.appear()
    thread.join(DEADLINE_S)
    assert member.enrolment.incarnation == 41
    assert len(coordinator.registered) == 3


class CountedWait(threading.Event):
    """Waits for a thousandth of the time, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        return super().wait(None if timeout is None else timeout / 1000)


def test_registering_gives_up_when_its_patience_ends(make: Callable[..., Member]) -> None:
    with pytest.raises(errors.CoordinatorUnavailable):
        make().enrolment.register(patience_ms=0)


def test_an_address_that_does_not_answer_is_named_after_a_second(
    make: Callable[..., Member], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(errors.CoordinatorUnavailable):
        make().enrolment.register(patience_ms=limits.SHOW_WAIT_MS + 200)
    (said, *_) = caplog.messages
    assert said.startswith(f"waiting for coordinator at {ADDRESS} to register this worker (")


def test_registering_gives_up_when_it_is_stopped(make: Callable[..., Member]) -> None:
    member = make()
    member.enrolment.stop()
    begin = time.monotonic()
    with pytest.raises(errors.CoordinatorUnavailable):
        member.enrolment.register(patience_ms=3_000)
    assert time.monotonic() - begin < 2.5


def test_registering_gives_up_when_the_process_is_told_to_stop(make: Callable[..., Member]) -> None:
    stop = threading.Event()
    stop.set()
    begin = time.monotonic()
    with pytest.raises(errors.CoordinatorUnavailable):
        make().enrolment.register(patience_ms=60_000, stop=stop)
    assert time.monotonic() - begin < DEADLINE_S


def test_registering_raises_what_refuses_it(coordinator: FakeCoordinator, make: Callable[..., Member]) -> None:
    coordinator.appear()
    coordinator.refusals["Register"] = [errors.ProtocolMismatch("protocol 9")]
    with pytest.raises(errors.ProtocolMismatch):
        make().enrolment.register(patience_ms=60_000)
    assert len(coordinator.registered) == 1


def test_heartbeats_go_on_until_the_member_leaves(coordinator: FakeCoordinator, make: Callable[..., Member]) -> None:
    coordinator.appear()

    def report(request: wire.HeartbeatRequest) -> None:
        request.step = 17

    member = make(report=report)
    member.enrolment.register(patience_ms=0)
    member.enrolment.start()
    wait_until(lambda: len(member.replies) >= 3, "three heartbeats")
    coordinator.term = 4
    wait_until(lambda: member.enrolment.term == 4, "the new term")
    coordinator.term = 2
    told = len(member.replies)
    wait_until(lambda: len(member.replies) > told + 1, "two more heartbeats")
    assert member.enrolment.term == 4, "a term only grows"
    member.enrolment.leave("it broke" * 1_000)
    told = len(member.replies)
    assert {(beat.caller.incarnation, beat.step) for beat in coordinator.beats} == {(41, 17)}
    (left,) = coordinator.left
    assert left.caller.incarnation == 41
    assert left.error.startswith("it broke")
    assert len(left.error) == 1_000
    assert len(member.replies) == told
    assert member.lost == []


def test_beat_is_a_heartbeat_now(coordinator: FakeCoordinator, make: Callable[..., Member]) -> None:
    coordinator.appear()
    member = make()
    member.enrolment.register(patience_ms=0)
    member.enrolment.beat()
    assert [reply.generation for reply in member.replies] == [1]
    coordinator.refusals["Heartbeat"] = [errors.StaleIncarnation("gone")]
    with pytest.raises(errors.StaleIncarnation):
        member.enrolment.beat()
    assert member.lost == []
    member.enrolment.stop()
    member.enrolment.beat()
    assert len(member.replies) == 1, "nothing is told after stop"


def test_fenced_member_is_told_once(coordinator: FakeCoordinator, make: Callable[..., Member]) -> None:
    coordinator.appear()
    member = make()
    member.enrolment.register(patience_ms=0)
    coordinator.refusals["Heartbeat"] = [errors.StaleIncarnation("declared dead")] * 3
    member.enrolment.start()
    wait_until(lambda: bool(member.lost), "the loss")
    member.enrolment.stop()
    assert [type(error) for error in member.lost] == [errors.StaleIncarnation]
    assert len(coordinator.beats) == 1


def test_short_silence_is_borne(coordinator: FakeCoordinator, make: Callable[..., Member]) -> None:
    coordinator.appear()
    member = make(grace_ms=60_000)
    member.enrolment.register(patience_ms=0)
    coordinator.refusals["Heartbeat"] = [
        errors.Unavailable("restarts"),
        errors.DeadlineExceeded("slow"),
        errors.NotReady("the coordinator is stopping"),
    ]
    member.enrolment.start()
    wait_until(lambda: len(member.replies) >= 2, "heartbeats after the silence")
    assert member.lost == []


def test_a_coordinator_that_answers_that_it_is_not_ready_is_not_lost(
    coordinator: FakeCoordinator, make: Callable[..., Member]
) -> None:
    coordinator.appear()
    grace_ms = 100
    coordinator.refusals["Register"] = [errors.NotReady("its disk is full")]
    member = make(grace_ms=grace_ms)
    member.enrolment._stop = CountedWait()
    member.enrolment.register(patience_ms=grace_ms)
    coordinator.refusals["Heartbeat"] = [errors.NotReady("its disk is full")] * 1_000_000
    began = time.monotonic()
    member.enrolment.start()
    wait_until(lambda: (time.monotonic() - began) * 1_000 > 3 * grace_ms, "the time to pass")
    coordinator.refusals.clear()
    wait_until(lambda: bool(member.replies), "a heartbeat that is answered")
    assert member.lost == []


def test_what_a_coordinator_waits_for_that_decides_nothing_is_logged_once(
    coordinator: FakeCoordinator, make: Callable[..., Member], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shardyard.enrolment")
    coordinator.appear()
    coordinator.undecided = "the journal /j to be written"
    member = make()
    member.enrolment.register(patience_ms=0)
    for _ in range(2):
        member.enrolment.beat()
    coordinator.undecided = ""
    for _ in range(2):
        member.enrolment.beat()
    assert [message for message in caplog.messages if "decides" in message] == [
        "coordinator at coordinator:1 decides nothing before it has waited for the journal /j to be written; worker 41 "
        "continues",
        "coordinator at coordinator:1 decides again",
    ]


def test_long_silence_is_the_loss_of_the_coordinator(coordinator: FakeCoordinator, make: Callable[..., Member]) -> None:
    coordinator.appear()
    member = make(grace_ms=20)
    member.enrolment.register(patience_ms=0)
    member.enrolment.start()
    wait_until(lambda: bool(member.replies), "a heartbeat")
    coordinator.vanish()
    wait_until(lambda: bool(member.lost), "the loss")
    (error,) = member.lost
    assert type(error) is errors.CoordinatorLost
    assert "coordinator at coordinator:1 has not answered" in error.what


def test_member_goes_on_with_a_coordinator_that_is_started_again(
    coordinator: FakeCoordinator, make: Callable[..., Member], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shardyard.enrolment")
    coordinator.appear()
    member = make(grace_ms=60_000)
    member.enrolment.register(patience_ms=0)
    member.enrolment.start()
    wait_until(lambda: bool(member.replies), "a heartbeat")
    coordinator.vanish()
    wait_until(lambda: "waits for the coordinator" in caplog.text, "the silence to be noticed")
    told, asked = len(member.replies), len(coordinator.beats)
    coordinator.term = 7
    coordinator.appear()
    wait_until(lambda: len(member.replies) >= told + 3, "heartbeats after the silence")
    assert member.enrolment.caller == Caller(JobId(0), Incarnation(41), Term(7))
    assert {beat.caller.incarnation for beat in coordinator.beats[asked:]} == {41}
    assert len(coordinator.registered) == 1
    assert member.lost == []
    assert caplog.text.count("worker 41 waits for the coordinator (coordinator at coordinator:1 does not answer") == 1
    assert caplog.text.count("continues without it for up to 60 s") == 1
    wait_until(lambda: "answers worker 41 again, in term 7" in caplog.text, "the end of the wait to be told")


def test_long_wait_for_the_coordinator_is_explained_again_and_again(
    coordinator: FakeCoordinator,
    make: Callable[..., Member],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "EXPLAIN_WAIT_MS", 5)
    coordinator.appear()
    member = make(grace_ms=60_000)
    member.enrolment.register(patience_ms=0)
    member.enrolment.start()
    coordinator.vanish()
    wait_until(
        lambda: caplog.text.count("waiting for coordinator at coordinator:1 to answer worker 41 (") >= 3,
        "the wait to be explained three times",
    )


def test_members_are_as_patient_as_the_settings_say(coordinator: FakeCoordinator, make: Callable[..., Member]) -> None:
    assert make().enrolment._grace_ms == MembershipSettings().coordinator_grace_ms == 60_000
    with pytest.raises(ValueError, match="coordinator_grace_ms"):
        MembershipSettings(coordinator_grace_ms=0)


def test_coordinator_that_comes_back_and_refuses_the_member_is_believed(
    coordinator: FakeCoordinator, make: Callable[..., Member]
) -> None:
    coordinator.appear()
    member = make(grace_ms=60_000)
    member.enrolment.register(patience_ms=0)
    coordinator.refusals["Heartbeat"] = [errors.Unavailable("restarts"), errors.StaleIncarnation("unknown")]
    member.enrolment.start()
    wait_until(lambda: bool(member.lost), "the loss")
    assert [type(error) for error in member.lost] == [errors.StaleIncarnation]


def test_leaving_a_silent_coordinator_is_no_error(coordinator: FakeCoordinator, make: Callable[..., Member]) -> None:
    coordinator.appear()
    member = make()
    member.enrolment.register(patience_ms=0)
    coordinator.refusals["Leave"] = [errors.StaleIncarnation("long gone")]
    member.enrolment.leave()
    coordinator.vanish()
    member.enrolment.leave()
    assert member.lost == []


@pytest.mark.parametrize("norm", [0.0, 2.5])
def test_leaving_returns_whether_the_residual_counts_as_lost(
    coordinator: FakeCoordinator, make: Callable[..., Member], norm: float
) -> None:
    coordinator.appear()
    member = make()
    member.enrolment.register(patience_ms=0)
    assert member.enrolment.leave(residual_lost=norm) is (norm > 0)
    coordinator.vanish()
    assert not member.enrolment.leave(residual_lost=norm), "a coordinator that does not answer counts nothing"


def test_goodbye_waits_for_as_long_as_the_coordinator_answers_that_it_is_not_ready(
    coordinator: FakeCoordinator, make: Callable[..., Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_client, "RETRY_MS", 20)
    coordinator.appear()
    member = make()
    member.enrolment.register(patience_ms=0)
    coordinator.refusals["Leave"] = [errors.NotReady("its disk is full")] * 10
    began = time.monotonic()
    member.enrolment.leave(patience_ms=50)
    assert time.monotonic() - began > 0.15
    assert len(coordinator.left) == 11
    coordinator.refusals["Leave"] = [errors.NotReady("its disk is full")] * 10
    member.enrolment.leave("it broke")
    assert len(coordinator.left) == 12, "a process that ends with an error does not wait"


def test_goodbye_waits_for_a_coordinator_that_is_started_again(
    coordinator: FakeCoordinator, make: Callable[..., Member]
) -> None:
    coordinator.appear()
    member = make()
    member.enrolment.register(patience_ms=0)
    coordinator.vanish()
    member.enrolment.leave()
    assert coordinator.left == []
    thread = threading.Thread(target=member.enrolment.leave, kwargs={"patience_ms": 60_000})
    thread.start()
    coordinator.refusals["Leave"] = [errors.NotReady("stopping"), errors.DeadlineExceeded("slow")]
    coordinator.appear()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert [each.caller.incarnation for each in coordinator.left] == [41] * 3
    coordinator.refusals["Leave"] = [errors.StaleIncarnation("it left")]
    member.enrolment.leave(patience_ms=60_000)
    assert len(coordinator.left) == 4, "what is answered is not asked again"


def test_member_may_stop_itself_when_it_is_lost(coordinator: FakeCoordinator, make: Callable[..., Member]) -> None:
    coordinator.appear()
    coordinator.refusals["Heartbeat"] = [errors.StaleIncarnation("declared dead")]
    stopped = threading.Event()
    member = make()

    def stop(error: errors.ShardyardError) -> None:
        member.enrolment.stop()
        stopped.set()

    member.enrolment._on_lost = stop
    member.enrolment.register(patience_ms=0)
    member.enrolment.start()
    assert stopped.wait(DEADLINE_S)


@pytest.mark.parametrize(("heartbeat_ms", "lease_ms", "expected_ms"), [(500, 4_000, 3_000), (100, 1_000, 800)])
def test_heartbeat_that_is_lost_leaves_time_for_another(
    coordinator: FakeCoordinator, make: Callable[..., Member], heartbeat_ms: int, lease_ms: int, expected_ms: int
) -> None:
    coordinator.appear()
    coordinator.heartbeat_ms, coordinator.lease_ms = heartbeat_ms, lease_ms
    enrolment = make().enrolment
    enrolment.register(patience_ms=0)
    assert enrolment._deadline_ms == expected_ms
