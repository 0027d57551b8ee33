"""A coordinator that dies anywhere, and another that goes on from its journal while servers and workers stay.

A kill is a copy of the state folder at that moment: the next coordinator gets what a dead one would have left.
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.domain import errors
from shardyard.domain.ids import MemberRole
from shardyard.domain.push_names import DataShardSource, SourceKey
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_coordinator.core import effects
from shardyard_coordinator.service import mailbox
from shardyard_coordinator.service.journal import Journal
from tests.support.coordinator_yards import ASYNC, Worker, Yard, begin, sync_settings
from tests.support.waiting import wait_until


class Lives:
    """One coordinator after the other, in one yard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._left: Path | None = None
        self.yard = begin(Journal(folder / "0"))

    def kill(self) -> None:
        """Now; what this coordinator still says and writes is lost."""
        if self._left is None:
            self._left = self._folder / f"{self._count + 1}"
            shutil.copytree(self._folder / f"{self._count}", self._left)

    def die(self) -> None:
        """As `kill`, in a call to a server: the coordinator does not come to the next one."""
        self.kill()
        raise errors.NotReady("nobody waits for the answer")

    def begin_next(self) -> None:
        assert self._left is not None, "nobody was killed"
        self.end()
        self._count += 1
        following, self._left = begin(Journal(self._left), self.yard.network), None
        self.yard.coordinator, self.yard.journal = following.coordinator, following.journal
        self.yard.clock = following.clock

    def restart(self) -> None:
        self.kill()
        self.begin_next()

    def end(self) -> None:
        self.yard.coordinator.stop()
        self.yard.journal.close()


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    before = set(threading.enumerate())
    found = Lives(tmp_path)
    yield found
    found.end()
    assert [each.name for each in threading.enumerate() if each not in before] == []


def status_of(yard: Yard) -> wire.StatusReply:
    return yard.peer().call(methods.STATUS, wire.StatusRequest(), timeout_ms=1)


def done_everywhere(yard: Yard, source: DataShardSource, batches: int) -> None:
    for fake in yard.servers.values():
        fake.next_of[SourceKey(source)] = batches


def terms_of(requests: list[object]) -> list[int]:
    return [request.caller.term for request in requests]  # type: ignore[attr-defined]


def test_workers_and_servers_go_on_with_the_next_coordinator(lives: Lives) -> None:
    yard = lives.yard
    first, second = yard.run_job(ASYNC, workers=2)
    opened = first.open_feed(samples=30)
    lease = first.lease().lease
    before = status_of(yard)
    lives.restart()
    after = status_of(yard)
    assert (before.term, after.term) == (1, 2)
    assert [member.incarnation for member in after.members] == [member.incarnation for member in before.members]
    assert after.jobs[0].map == before.jobs[0].map
    yard.beat_servers()
    for worker in (first, second):
        reply = worker.beat()
        assert (reply.term, reply.job_state) == (2, wire.JOB_STATE_RUNNING)
    assert second.open_feed(samples=30) == opened
    assert first.lease().lease == lease
    done_everywhere(yard, DataShardSource(0, 0, 0), 1)
    assert first.close(lease)
    assert second.lease().lease.token == lease.token + 1
    for fake in yard.servers.values():
        assert [kind for kind, _ in fake.calls] == ["create", "open", "read"], "no server is asked for it again"
        assert terms_of(fake.named("read")) == [2]


def test_third_coordinator_goes_on_from_the_second_ones_snapshot(lives: Lives) -> None:
    yard = lives.yard
    (worker,) = yard.run_job(ASYNC)
    worker.open_feed(samples=30)
    lease = worker.lease().lease
    for _ in range(3):
        lives.restart()
        assert worker.lease().lease == lease
    assert worker.beat().term == 4


@pytest.mark.parametrize("at", [0, 1])
def test_coordinator_killed_while_partitions_are_created(lives: Lives, at: int) -> None:
    yard = lives.yard
    servers = [yard.add_server(f"server:{index}") for index in range(2)]
    worker = yard.add_worker(ASYNC)
    yard.servers[servers[at]].on_call["create"] = lives.die
    with pytest.raises(errors.NotReady):
        worker.register_variables()
    yard.servers[servers[at]].on_call.clear()
    lives.begin_next()
    placed = worker.register_variables()
    assert placed.initializer
    worker.commit()
    assert worker.beat().job_state == wire.JOB_STATE_RUNNING
    made = [yard.servers[server].named("create") for server in servers]
    assert [terms_of(each) for each in made] == ([[1, 2], [2]] if at == 0 else [[1, 2], [1, 2]])
    for first, *others in made:
        for other in others:
            other.caller.term = first.caller.term  # type: ignore[attr-defined]
            assert other == first, "the same partitions, to the same server"


@pytest.mark.parametrize("at", [0, 1])
def test_coordinator_killed_while_partitions_are_opened(lives: Lives, at: int) -> None:
    yard = lives.yard
    servers = [yard.add_server(f"server:{index}") for index in range(2)]
    worker = yard.add_worker(ASYNC)
    worker.register_variables()
    yard.servers[servers[at]].on_call["open"] = lives.die
    with pytest.raises(errors.NotReady):
        worker.commit()
    yard.servers[servers[at]].on_call.clear()
    lives.begin_next()
    # nobody asks for it: the first values are committed, and the coordinator sees to the rest
    wait_until(lambda: worker.beat().job_state == wire.JOB_STATE_RUNNING, "the partitions to be opened")
    assert [terms_of(yard.servers[server].named("open"))[-1] for server in servers] == [2, 2]


@pytest.mark.parametrize("when", ["while the servers are asked", "before the answer"])
def test_coordinator_killed_while_a_lease_is_closed(lives: Lives, when: str) -> None:
    yard = lives.yard
    (worker,) = yard.run_job(ASYNC)
    worker.open_feed(samples=10)
    lease = worker.lease().lease
    done_everywhere(yard, DataShardSource(0, 0, 0), 1)
    if when == "while the servers are asked":
        yard.servers[max(yard.servers)].on_call["read"] = lives.die
        with pytest.raises(errors.NotReady):
            worker.close(lease)
        yard.servers[max(yard.servers)].on_call.clear()
    else:
        worker.close(lease)
        lives.kill()
    lives.begin_next()
    assert worker.close(lease), "asked again by the worker that has no answer"
    (feed,) = status_of(yard).jobs[0].feeds
    assert (feed.done, feed.leased, feed.free, feed.finished) == (1, 0, 0, True)
    assert worker.lease().HasField("done")


def test_fence_that_died_with_its_coordinator_is_made_again(lives: Lives) -> None:
    yard = lives.yard
    first, second = yard.run_job(ASYNC, workers=2)
    first.open_feed(samples=10)
    first.lease()
    for fake in yard.servers.values():
        fake.refuse["fence"] = errors.Internal("cannot")
    agent = yard.register(MemberRole.AGENT, "agent:0")
    lives.yard.coordinator._calls._background[effects.FenceOnServers] = lambda effect: lives.kill()
    request = wire.ReportExitRequest(pid=1, exit_code=-9)
    request.caller.incarnation = agent
    yard.peer().call(methods.REPORT_EXIT, request, timeout_ms=1)
    wait_until(lambda: lives._left is not None, "the fence to begin")
    assert second.lease().HasField("wait")
    for fake in yard.servers.values():
        fake.refuse.clear()
    lives.begin_next()
    wait_until(lambda: second.lease().HasField("lease"), "the dead worker's data shard")
    for fake in yard.servers.values():
        (fence,) = fake.named("fence")
        assert isinstance(fence, server_wire.FenceRequest)
        assert (list(fence.incarnations), fence.caller.term) == ([first.incarnation], 2)


def test_job_that_failed_is_dropped_by_the_next_coordinator(lives: Lives) -> None:
    yard = lives.yard
    (worker,) = yard.run_job(ASYNC)
    yard.coordinator._calls._background[effects.DropJob] = lambda effect: None
    worker.leave(error="ValueError: no")
    lives.restart()
    for fake in yard.servers.values():
        wait_until(lambda fake=fake: len(fake.named("drop")) == 1, "the job to be dropped")  # type: ignore[misc]
    assert [job.state for job in status_of(yard).jobs] == [wire.JOB_STATE_FAILED]


def test_member_that_was_declared_dead_before_the_restart_stays_refused(lives: Lives) -> None:
    yard = lives.yard
    first, second = yard.run_job(sync_settings(2), workers=2)
    yard.kill(first, alive=[second])
    lives.restart()
    with pytest.raises(errors.StaleIncarnation, match="was silent for"):
        first.beat()
    with pytest.raises(errors.StaleIncarnation):
        first.open_feed()
    assert [lease.rank for lease in second.beat().ranks] == [0, 1]


def test_time_without_a_coordinator_costs_no_lease(lives: Lives) -> None:
    yard = lives.yard
    (worker,) = yard.run_job(ASYNC)
    yard.clock.advance(900)
    lives.restart()
    yard.clock.advance(900)
    yard.clock.await_tick()
    assert worker.beat().job_state == wire.JOB_STATE_RUNNING


def test_journal_is_kept_short(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "COMPACT_RECORDS_MIN", 40)
    lives.restart()
    yard = lives.yard
    (worker,) = yard.run_job(ASYNC)
    worker.open_feed(samples=10)
    longest = 0
    for _ in range(150):
        lease = give_back(worker)
        longest = max(longest, len(yard.journal.records()))
    assert 40 <= longest <= 40 + 20
    lives.restart()
    assert worker.lease().lease.token == lease.token + 1


def give_back(worker: Worker) -> wire.DataLease:
    """Leases the data shard and gives it back undone."""
    lease = worker.lease().lease
    assert not worker.close(lease)
    return lease


def test_journal_that_cannot_be_made_shorter_grows(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_entries: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(mailbox, "COMPACT_RECORDS_MIN", 20)
    lives.restart()
    yard = lives.yard
    monkeypatch.setattr(yard.journal, "replace", fail)
    (worker,) = yard.run_job(ASYNC)
    worker.open_feed(samples=10)
    for _ in range(20):
        lease = give_back(worker)
    assert len(yard.journal.records()) > 40
    assert "could not be made shorter (database or disk is full)" in caplog.text
    lives.restart()
    assert worker.lease().lease.token == lease.token + 1


def test_journal_with_a_record_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append([("job_forgotten", {"job": 7})])
    with pytest.raises(errors.ConfigurationError, match=r"coordinator\.sqlite: record 1 \('job_forgotten'\)") as caught:
        begin(journal)
    assert caught.value.facts == {"file": str(tmp_path / "coordinator.sqlite"), "record": "1"}
    assert [record.kind for record in journal.records()] == ["job_forgotten"], "it is left as it was"
    journal.close()
