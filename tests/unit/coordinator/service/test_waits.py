"""What a job waits for is said in the log and in `status`, by the machine and by the coordinator's threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain import limits
from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.ids import Caller, Incarnation, MemberRole, Term
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableSpec
from shardyard.runtime import waits
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.members.membership import Registration
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.service.journal import Journal
from shardyard_coordinator.service.status import describe
from shardyard_coordinator.storage.checkpoint_book import Committed
from tests.support.coordinator_yards import ASYNC, Yard, begin
from tests.support.waiting import wait_until

SETTINGS = JobSettings(partitions=4, idle_ms=60_000)
SYNC = SETTINGS.model_copy(
    update={
        "consistency": ConsistencySettings(mode=ConsistencyMode.SYNC),
        "workers_expected": 2,
        "rank_grace_ms": 30_000,
    }
)
VARIABLES = tuple(VariableSpec(name, DType.FLOAT32, (16,)) for name in "abcd")
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
FOR_EVER_MS = 1_000_000


class Books:
    """A machine, and what it says."""

    def __init__(self, servers: int = 2) -> None:
        self.now_ms = 0
        self.machine = Machine(term=Term(1), lease_ms=FOR_EVER_MS, now_ms=0, checkpoints="/checkpoints")
        self.servers = [self.register(MemberRole.SERVER, f"s:{index}") for index in range(servers)]

    def handle(self, event: events.Event) -> object:
        found = self.machine.handle(event, self.now_ms)
        return next((each.answer for each in found if isinstance(each, effects.Reply)), None)

    def register(self, role: MemberRole, address: str = "") -> Incarnation:
        answer = self.handle(events.MemberRegistered(Registration(role, address, 1, "0", "box", 1)))
        assert isinstance(answer, effects.Registered)
        return answer.incarnation

    def join(self, settings: JobSettings = SETTINGS) -> Caller:
        worker = self.register(MemberRole.WORKER)
        answer = self.handle(events.JobJoined(worker, settings.name, settings))
        assert isinstance(answer, effects.Joined)
        return Caller(answer.job, worker)

    def run(self, caller: Caller) -> None:
        self.handle(events.VariablesRegistered(caller, VARIABLES, SGD))
        self.handle(events.PartitionsCreated(caller.job))
        self.handle(events.VariablesCommitted(caller))
        self.handle(events.PartitionsOpened(caller.job))

    def pass_time(self, ms: int) -> list[str]:
        """Ticks; what is told of waits meanwhile."""
        told = []
        for _ in range(0, ms, 100):
            self.now_ms += 100
            for effect in self.machine.handle(events.Ticked(), self.now_ms):
                if isinstance(effect, effects.LogMessage) and "wait" in effect.text:
                    told.append(effect.text)
        return told

    @property
    def shown(self) -> tuple[str, ...]:
        (job,) = describe(self.machine, self.now_ms).jobs
        return tuple(job.waits)


def test_long_wait_is_told_every_five_seconds_and_its_end_once() -> None:
    books = Books()
    caller = books.join()
    assert books.pass_time(4_900) == []
    told = books.pass_time(10_000)
    assert [text.partition(" waits ")[2] for text in told] == [
        "for a worker to register its variables, for 5.0 s so far",
        "for a worker to register its variables, for 10.0 s so far",
    ]
    books.run(caller)
    assert len(books.pass_time(100)) == 1
    assert books.pass_time(20_000) == []


def test_wait_is_shown_from_one_second_on_until_it_ends() -> None:
    books = Books()
    caller = books.join()
    books.pass_time(900)
    assert books.shown == ()
    books.pass_time(1_000)
    assert books.shown == ("a worker to register its variables, for 1.8 s",)
    books.run(caller)
    books.pass_time(2_000)
    assert books.shown == ()


def test_first_values_name_the_worker_that_is_to_give_them() -> None:
    books = Books()
    caller = books.join()
    books.handle(events.VariablesRegistered(caller, VARIABLES, SGD))
    books.pass_time(2_000)
    assert books.shown[0].startswith(f"server {books.servers[0]}, {books.servers[1]} to take its partitions, for")
    books.handle(events.PartitionsCreated(caller.job))
    books.pass_time(2_000)
    assert books.shown[0].startswith(f"worker {caller.incarnation} to give first values, for")


def lose_a_server(books: Books) -> None:
    (job,) = books.machine.jobs
    job.book.committed = Committed(3, 0, {"entries": [], "closed": [], "token": 0})
    books.handle(events.MemberLeft(books.servers[1], ""))


def test_lost_partitions_name_themselves_while_no_server_is_there_for_them() -> None:
    books = Books(servers=2)
    caller = books.join()
    books.run(caller)
    (job,) = books.machine.jobs
    assert job.deployment.map is not None
    lost = sorted(o.partition for o in job.deployment.map.owners if o.server == books.servers[1])
    lose_a_server(books)
    books.pass_time(2_000)
    assert books.shown[0].startswith(f"a server for partition {', '.join(map(str, lost))}, for")
    # after the grace the other takes them
    books.pass_time(4_000)
    assert books.shown[0].startswith(f"partition {', '.join(map(str, lost))} to be restored on server")
    assert job.recovery.attempt is not None
    books.handle(events.PartitionsRestored(caller.job, job.recovery.attempt.map.generation))
    books.pass_time(2_000)
    assert books.shown == ()


def test_vacant_ranks_and_workers_that_are_not_fenced_yet_are_named() -> None:
    books = Books()
    first, second = books.join(SYNC), books.join(SYNC)
    books.run(first)
    books.handle(events.ExitReported(books.register(MemberRole.AGENT, "a:1"), 1, -9))
    books.pass_time(2_000)
    assert any(f"to refuse worker {first.incarnation}, {second.incarnation}, before" in text for text in books.shown)
    books.join(SYNC)
    books.handle(events.WorkersFenced(first.job, (first.incarnation, second.incarnation)))
    books.pass_time(2_000)
    assert [text.partition(", for")[0] for text in books.shown] == [
        "a worker for logical rank 1; the living take it after 30 s"
    ]


def test_job_without_workers_says_when_it_ends() -> None:
    books = Books()
    caller = books.join()
    books.run(caller)
    books.handle(events.ExitReported(books.register(MemberRole.AGENT, "a:1"), 1, -9))
    books.handle(events.WorkersFenced(caller.job, (caller.incarnation,)))
    books.pass_time(2_000)
    assert [text.partition(";")[0] for text in books.shown] == ["a worker"]
    books.pass_time(60_000)
    assert [text.partition(";")[0] for text in books.shown] == ["its last checkpoint"]
    books.pass_time(60_000)
    assert books.shown == (), "it has ended"


def test_what_any_member_says_that_it_waits_for_is_shown() -> None:
    books = Books()
    books.handle(events.HeartbeatReceived(books.servers[1], Report(waiting_for="the disk, for 7.0 s")))
    members = describe(books.machine, books.now_ms).members
    assert [member.waiting_for for member in members] == ["", "the disk, for 7.0 s"]


# ---- the coordinator's own threads


@pytest.fixture
def yard() -> Iterator[Yard]:
    found = begin(Journal(None))
    yield found
    found.coordinator.stop()
    found.journal.close()


def test_call_to_a_server_that_hangs_is_logged_and_shown(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "EXPLAIN_WAIT_MS", 50)
    monkeypatch.setattr(limits, "SHOW_WAIT_MS", 50)
    monkeypatch.setattr(waits, "_CHECK_MS", 10)
    server = yard.add_server("server:0")
    worker = yard.add_worker(ASYNC)
    answers = threading.Event()
    yard.servers[server].on_call["create"] = lambda: bool(answers.wait(10))
    thread = threading.Thread(target=worker.register_variables)
    thread.start()
    said = f"server {server} at server:0 to take partitions 0, 1, 2, 3 of job {worker.job}, for"
    try:
        wait_until(lambda: f"waiting for {said}" in caplog.text, "the log to say so")
        status = yard.peer().call(methods.STATUS, wire.StatusRequest(), timeout_ms=1)
        assert status.waiting_for.startswith(said)
    finally:
        answers.set()
        thread.join()
    status = yard.peer().call(methods.STATUS, wire.StatusRequest(), timeout_ms=1)
    assert status.waiting_for == ""
