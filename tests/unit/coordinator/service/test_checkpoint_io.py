"""Checkpoints of a job, taken and given back by the coordinator with several servers."""

from __future__ import annotations

import datetime
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import worker_name
from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain.consistency import ConsistencyMode, UpdateMode
from shardyard.domain.errors import CheckpointNotFound, NotFound, NotReady
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Rank, Term, Token
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout, PartitionMap, PartitionOwner
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import PullHeader
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, Source, SourceKey
from shardyard.domain.pushes import PushHeader, PushKind, PushPart
from shardyard.domain.variables import DType, VariableSpec
from shardyard.runtime.waits import WaitRegistry
from shardyard.storage.storage import Written, open_storage
from shardyard.transport.in_process import InProcessNetwork
from shardyard_coordinator.core.effects import Base, JobSpec, RestorePartitions, TakeCheckpoint
from shardyard_coordinator.records import Entry
from shardyard_coordinator.service import checkpoint_io as module
from shardyard_coordinator.service.checkpoint_io import CheckpointIO
from shardyard_coordinator.service.residual_collection import (
    ResidualCollections,
    ResidualReport,
    ResidualRequest,
    Stage,
)
from shardyard_coordinator.service.server_client import ServerClient
from shardyard_coordinator.storage.checkpoint_book import Draft
from shardyard_ps_server.hosting import admission, orders, pulls, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.service.servicer import Servicer
from shardyard_ps_server.values.versions import aligned_empty

JOB, FIRST, SECOND = JobId(1), Generation(1), Generation(2)
RATE = (make_group("adam", {"lr": 0.5}),)
SHARD = DataShardSource(0, 0, 0)
PARTITIONS = [PartitionId(number) for number in range(4)]
LAYOUT = JobLayout(
    tuple(VariableSpec(f"v{number}", DType.FLOAT64, (8,)) for number in range(8)),
    OptimizerSpec("adam", RATE),
    tuple(PartitionLayout(p, 128, (Block(2 * p, 0, 8, 0), Block(2 * p + 1, 0, 8, 64))) for p in PARTITIONS),
)
WORKERS = (Incarnation(11), Incarnation(12), Incarnation(13))
HEARTBEAT_MS = 2_000
READY, COPIED = ResidualReport(Stage.READY), ResidualReport(Stage.COPIED)
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


class Yard:
    """ServerClient 1 to 3; the job's partitions lie on the first two, by turns."""

    def __init__(self, mode: UpdateMode) -> None:
        network = InProcessNetwork()
        self.mode = mode
        self.stores: dict[Incarnation, Store] = {}
        for number in (1, 2, 3):
            store = self.stores[Incarnation(number)] = Store()
            store.become(Incarnation(number), Term(5))
            network.listen(f"server:{number}", [Servicer(store).service()])
        self.map = self.map_of([1, 2, 1, 2], FIRST)
        self.generation = FIRST
        for server, owners in self.map.by_server().items():
            owned = [owner.partition for owner in owners]
            orders.create(self.stores[server], CreateRequest(JOB, FIRST, LAYOUT, owned, UpdateRules(mode, 2)))
            orders.open_partitions(self.stores[server], JOB, FIRST)
        self.lease()
        self.wait_registry = WaitRegistry()
        self.servers = ServerClient(network, Term(5), self.wait_registry)
        self.living = set(WORKERS)
        self.feedback = ResidualCollections(lambda _: self.living, self.wait_registry)
        self.archive = CheckpointIO(self.servers, feedback=self.feedback, heartbeat_ms=HEARTBEAT_MS, now=lambda: NOW)
        consistency = ConsistencySettings(mode=ConsistencyMode(mode.value), logical_ranks=2)
        self.spec = JobSpec(JOB, JobSettings(name="ads", seed=7, consistency=consistency), LAYOUT)

    @staticmethod
    def map_of(servers: list[int], generation: Generation) -> PartitionMap:
        owners = (PartitionOwner(p, Incarnation(s), f"server:{s}") for p, s in zip(PARTITIONS, servers, strict=True))
        return PartitionMap(generation, tuple(owners))

    @property
    def sources(self) -> list[Source]:
        return [SHARD] if self.mode is UpdateMode.ASYNC else [RankSource(Rank(rank)) for rank in range(2)]

    def lease(self) -> None:
        for server in self.map.by_server():
            hosted = self.stores[server].hosted()[0]
            pushes.open_sources(hosted, [(SourceKey(source), Token(1)) for source in self.sources])

    def push(self, sequence: int, *, only: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        """`only`: partitions with gradients."""
        for source in self.sources:
            for server, owners in self.map.by_server().items():
                parts = tuple(PushPart(o.partition, 128 if o.partition in only else 0) for o in owners)
                name = PushName(SourceKey(source), Token(1), sequence, sequence)
                caller = Caller(JOB, Incarnation(10))
                order = PushHeader(caller, server, self.map.generation, name, PushKind.GRADIENT, parts, 1.0, RATE)
                payload = aligned_empty(order.payload_bytes)
                payload.view(np.float64)[:] = np.random.default_rng(sequence).normal(size=len(payload) // 8)
                store = self.stores[server]
                pushes.push(store, admission.admit_push(store, order), order, payload)

    def values(self) -> dict[int, bytes]:
        found = {}
        for server, owners in self.map.by_server().items():
            owned = tuple(owner.partition for owner in owners)
            caller = Caller(JOB, Incarnation(10))
            wish = PullHeader(caller, server, self.map.generation, owned, 0, exactly=False)
            _, held = pulls.hold(admission.admit_pull(self.stores[server], wish), wish)
            found |= {partition.id: buffer.tobytes() for partition, buffer in held.buffers}
            held.release()
        return dict(sorted(found.items()))

    def take(
        self,
        folder: Path,
        number: int,
        *,
        step: int = 0,
        base: int = 0,
        keep: int = 3,
        keepers: Collection[Incarnation] = (),
    ) -> int:
        """The step that was written. The number is the one that was asked for."""
        draft = Draft(number, step, {"feeds": number}, Token(1))
        wanted = TakeCheckpoint(self.spec, self.map, draft, str(folder), base, keep, keepers=tuple(keepers))
        taken = self.archive.take(wanted)
        assert taken.number == number
        return taken.step

    def restore(self, folder: Path, number: int, servers: list[int], partitions: set[int], life: int = 2) -> None:
        self.map = self.map_of(servers, Generation(self.map.generation + 1))
        lost = frozenset(PartitionId(partition) for partition in partitions)
        wanted = RestorePartitions(self.spec, self.map, str(folder), (Base(number),), life, lost)
        for _ in range(2):  # the same again does nothing
            self.archive.restore(wanted)
        self.lease()


@pytest.fixture
def yard(request: pytest.FixtureRequest) -> Iterator[Yard]:
    found = Yard(getattr(request, "param", UpdateMode.ASYNC))
    yield found
    found.servers.close()
    found.wait_registry.close()
    for store in found.stores.values():
        store.close()


def test_checkpoint_has_all_partitions_and_what_the_job_is(yard: Yard, tmp_path: Path) -> None:
    yard.push(0)
    assert yard.take(tmp_path, 1, step=17) == 17
    library = CheckpointLibrary(open_storage(str(tmp_path)))
    manifest = library.load("ads")
    assert (manifest.number, manifest.step, manifest.seed, manifest.layout) == (1, 17, 7, LAYOUT)
    assert (manifest.created, manifest.settings, manifest.data_ledger) == (
        NOW.isoformat(),
        yard.spec.settings.model_dump(mode="json"),
        {"feeds": 1, "token": 1},
    )
    assert [entry.version.number for entry in manifest.partitions] == [1] * 4
    assert list(library.verify("ads")) == []


def test_later_checkpoints_have_what_has_changed_and_old_ones_go(yard: Yard, tmp_path: Path) -> None:
    for number in range(1, 6):
        yard.push(number - 1, only=(0,))
        yard.take(tmp_path, number, base=number - 1, keep=2)
    library = CheckpointLibrary(open_storage(str(tmp_path)))
    assert library.numbers("ads") == (4, 5)
    manifest = library.load("ads")
    assert [[file.file.number for file in entry.files if file.blocks] for entry in manifest.partitions] == [
        [5],
        [1],
        [1],
        [1],
    ]
    assert list(library.verify("ads")) == []
    before = yard.values()
    yard.restore(tmp_path, 5, [3, 3, 3, 3], {0, 1, 2, 3})
    assert yard.values() == before


def test_partitions_of_a_dead_server_go_to_the_living_and_a_new_one(yard: Yard, tmp_path: Path) -> None:
    yard.push(0)
    yard.take(tmp_path, 1)
    saved = yard.values()
    yard.push(1)
    later = yard.values()
    yard.restore(tmp_path, 1, [1, 3, 1, 1], {1, 3})
    assert yard.values() == {0: later[0], 1: saved[1], 2: later[2], 3: saved[3]}


@pytest.mark.parametrize("yard", [UpdateMode.SYNC], indirect=True)
def test_synchronous_checkpoint_is_of_one_step_while_steps_are_taken(yard: Yard, tmp_path: Path) -> None:
    done = threading.Event()
    seen: dict[int, dict[int, bytes]] = {}

    def train() -> None:
        for step in itertools.count():  # until the checkpoints are taken, however slow that is
            seen[step] = yard.values()
            if done.is_set():
                return
            yard.push(step)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        taken = [yard.take(tmp_path, number, step=0, base=number - 1) for number in (1, 2, 3)]
    finally:
        done.set()
        thread.join()
    assert taken == sorted(taken)
    for number, step in enumerate(taken, start=1):
        entries = CheckpointLibrary(open_storage(str(tmp_path))).load("ads", number).partitions
        assert {entry.version.number for entry in entries} == {step}
        yard.restore(tmp_path, number, [1, 2, 1, 2], {0, 1, 2, 3}, life=1 + number)
        assert yard.values() == seen[step]


@pytest.mark.parametrize("yard", [UpdateMode.SYNC], indirect=True)
def test_job_that_takes_no_steps_is_written_as_it_stands(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STEP_WAIT_MS", 20)
    yard.push(0)
    assert yard.take(tmp_path, 1, step=1) == 1


@pytest.mark.parametrize("yard", [UpdateMode.SYNC], indirect=True)
def test_checkpoint_has_the_verdicts_on_all_steps_before_its_own(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which were not all decided when the data ledger was copied."""
    monkeypatch.setattr(module, "STEP_WAIT_MS", 20)
    yard.push(0)
    asked: list[int] = []

    def verdicts(step: int) -> list[Entry]:
        asked.append(step)
        return [("steps_decided", {"first": 0, "left_out": [[1]], "dropped": []})]

    draft = Draft(1, 0, {"entries": [["feed_closed", {"feed": 0}]], "closed": 1}, Token(1))
    yard.archive.take(TakeCheckpoint(yard.spec, yard.map, draft, str(tmp_path), 0, 3), verdicts)
    kept = CheckpointLibrary(open_storage(str(tmp_path))).load("ads", 1).data_ledger
    decided = ["steps_decided", {"first": 0, "left_out": [[1]], "dropped": []}]
    assert (asked, kept["entries"]) == ([1], [["feed_closed", {"feed": 0}], decided])
    assert draft.data_ledger["entries"] == [["feed_closed", {"feed": 0}]]


@pytest.mark.parametrize("yard", [UpdateMode.SYNC], indirect=True)
def test_job_that_has_gone_back_to_before_the_step_that_was_named_is_written_as_it_stands(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STEP_WAIT_MS", 20)
    for step in range(3):
        yard.push(step)
    assert yard.take(tmp_path, 1, step=9) == 3


def test_nothing_is_committed_where_a_server_does_not_answer(yard: Yard, tmp_path: Path) -> None:
    yard.map = yard.map_of([1, 9, 1, 9], FIRST)
    with pytest.raises(NotReady, match="server 9"):
        yard.take(tmp_path, 1)
    assert CheckpointLibrary(open_storage(str(tmp_path))).numbers("ads") == ()
    with pytest.raises(CheckpointNotFound):
        yard.restore(tmp_path, 1, [1, 1, 1, 1], {1, 3})
    yard.map = yard.map_of([1, 2, 1, 2], FIRST)
    yard.take(tmp_path, 2)


def test_run_of_a_name_that_has_checkpoints_goes_on_after_them(yard: Yard, tmp_path: Path) -> None:
    yard.take(tmp_path, 1)
    yard.take(tmp_path, 2)
    draft = Draft(1, 0, {}, Token(1))
    assert yard.archive.take(TakeCheckpoint(yard.spec, yard.map, draft, str(tmp_path), 0, 2)).number == 3
    assert CheckpointLibrary(open_storage(str(tmp_path))).numbers("ads") == (2, 3)


def test_checkpoint_that_the_job_stands_on_is_kept_though_others_are_newer(yard: Yard, tmp_path: Path) -> None:
    """As where the job has not heard of those that were committed after it, since a server died meanwhile."""
    yard.take(tmp_path, 1)
    for number in (2, 3, 4):
        yard.take(tmp_path, number, base=1, keep=2)
    assert CheckpointLibrary(open_storage(str(tmp_path))).numbers("ads") == (1, 3, 4)


@pytest.mark.parametrize("yard", [UpdateMode.SYNC], indirect=True)
def test_sync_checkpoint_of_a_step_that_the_job_went_back_from_is_of_where_it_stands(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STEP_WAIT_MS", 50)
    yard.push(0)
    assert yard.take(tmp_path, 1, step=50) == 1


# ---- with what workers remember


class Worker:
    """Does what it is told by heartbeats, in a thread of its own: `act` is given what is wanted."""

    def __init__(self, yard: Yard, incarnation: Incarnation, act: Callable[[Worker, ResidualRequest], None]) -> None:
        self.yard, self.incarnation, self.act = yard, incarnation, act
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.002):
            wanted = self.yard.feedback.wanted(JOB, self.incarnation)
            if wanted is not None:
                self.act(self, wanted)
                return

    def say(self, wanted: ResidualRequest, said: ResidualReport) -> None:
        self.yard.feedback.report(JOB, self.incarnation, wanted.number, said)

    def write(self, wanted: ResidualRequest) -> Written:
        state = {"pushes": np.array(int(self.incarnation), np.int64)}
        library = CheckpointLibrary(open_storage(wanted.url))
        return library.write_feedback("ads", wanted.number, worker_name(self.incarnation), state).file.written

    def await_turn(self, wanted: ResidualRequest) -> None:
        while not self.yard.feedback.report(JOB, self.incarnation, wanted.number, READY):
            time.sleep(0.002)

    def save(self, wanted: ResidualRequest) -> None:
        self.await_turn(wanted)
        self.say(wanted, COPIED)
        self.say(wanted, ResidualReport(Stage.ENDED, written=self.write(wanted)))

    def end(self) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def workers(yard: Yard, *acts: Callable[[Worker, ResidualRequest], None]) -> Iterator[list[Worker]]:
    started = [Worker(yard, each, act) for each, act in zip(WORKERS, acts, strict=False)]
    try:
        yield started
    finally:
        for each in started:
            each.end()


def remembered(folder: Path, number: int) -> list[str]:
    library = CheckpointLibrary(open_storage(str(folder)))
    manifest = library.load("ads", number)
    for file in manifest.feedback:
        assert library.load_feedback("ads", file, LAYOUT)["pushes"] == int(file.worker, 16)
    return [file.worker for file in manifest.feedback]


def test_checkpoint_has_what_workers_remember_and_servers_cut_after_they_have_copied(
    yard: Yard, tmp_path: Path
) -> None:
    def push_copy_push(worker: Worker, wanted: ResidualRequest) -> None:
        worker.await_turn(wanted)
        yard.push(0)
        worker.say(wanted, COPIED)
        while len(list(tmp_path.rglob("partition-*.safetensors"))) < len(PARTITIONS):
            time.sleep(0.002)
        time.sleep(0.05)  # servers have ended, and this one has not
        worker.say(wanted, ResidualReport(Stage.ENDED, written=worker.write(wanted)))

    def remember_nothing(worker: Worker, wanted: ResidualRequest) -> None:
        worker.say(wanted, ResidualReport(Stage.ENDED))

    with workers(yard, push_copy_push, Worker.save, remember_nothing):
        assert yard.take(tmp_path, 1, keepers=WORKERS) == 0
    assert remembered(tmp_path, 1) == ["b", "c"]
    library = CheckpointLibrary(open_storage(str(tmp_path)))
    manifest = library.load("ads", 1)
    assert {entry.version.number for entry in manifest.partitions} == {1}, "the push before the copy is there"
    assert yard.feedback.wanted(JOB, WORKERS[0]) is None


def test_workers_copy_at_one_time_when_all_have_heard_of_it(yard: Yard, tmp_path: Path) -> None:
    order: list[str] = []
    late = threading.Event()

    def soon(worker: Worker, wanted: ResidualRequest) -> None:
        assert not yard.feedback.report(JOB, worker.incarnation, wanted.number, READY)
        order.append("heard")
        late.set()
        worker.await_turn(wanted)
        order.append("copied")
        worker.save(wanted)

    def hear_late(worker: Worker, wanted: ResidualRequest) -> None:
        assert late.wait(10)
        order.append("heard")
        worker.save(wanted)

    with workers(yard, soon, hear_late):
        yard.take(tmp_path, 1, keepers=WORKERS[:2])
    assert order == ["heard", "heard", "copied"]
    assert remembered(tmp_path, 1) == ["b", "c"]


def test_nobody_is_waited_for_who_leaves_meanwhile(yard: Yard, tmp_path: Path) -> None:
    begun = time.monotonic()

    def leave(worker: Worker, wanted: ResidualRequest) -> None:
        yard.living.discard(worker.incarnation)

    def copy_and_leave(worker: Worker, wanted: ResidualRequest) -> None:
        worker.say(wanted, COPIED)
        yard.living.discard(worker.incarnation)

    def write_and_leave(worker: Worker, wanted: ResidualRequest) -> None:
        worker.save(wanted)
        yard.living.discard(worker.incarnation)

    with workers(yard, leave, copy_and_leave, write_and_leave):
        yard.take(tmp_path, 1, keepers=WORKERS)
    assert remembered(tmp_path, 1) == ["d"], "what is written is right, whoever is gone"
    assert time.monotonic() - begun < HEARTBEAT_MS / 1000


def test_checkpoint_goes_on_without_what_does_not_come_in_time(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FEEDBACK_WAIT_MS", 50)
    monkeypatch.setattr(module, "HEARTBEATS_TO_HEAR", 0.02)
    monkeypatch.setattr(module, "COPY_WAIT_MS", 50)

    def elsewhere(worker: Worker, wanted: ResidualRequest) -> None:
        worker.save(ResidualRequest(wanted.number, str(tmp_path / "not the same")))

    def other_length(worker: Worker, wanted: ResidualRequest) -> None:
        written = worker.write(wanted)
        worker.say(wanted, ResidualReport(Stage.ENDED, written=Written(written.nbytes + 1, written.sha256)))

    with workers(yard, elsewhere, other_length, lambda worker, wanted: worker.say(wanted, COPIED)):
        yard.take(tmp_path, 1, keepers=WORKERS)
    assert remembered(tmp_path, 1) == []
    lacks = [each.getMessage() for each in caplog.records if "lacks the residual of worker" in each.getMessage()]
    assert [each.partition("worker ")[2].partition(":")[0] for each in lacks] == ["11", "12", "13"]
    assert "is missing, or has another length" in lacks[0]
    assert "it was not written in time" in lacks[2]
    with workers(
        yard, lambda worker, wanted: worker.say(wanted, ResidualReport(Stage.ENDED, failure="the disk is full"))
    ):
        yard.take(tmp_path, 2, keepers=WORKERS[:1])
    assert "the disk is full" in caplog.text


def test_what_is_said_of_another_checkpoint_or_by_another_worker_or_twice_is_not_taken(yard: Yard) -> None:
    collections, (one, other, third) = yard.feedback, WORKERS
    first = Written(1, "ab" * 32)
    with collections.open(JOB, ResidualRequest(3, "here"), [one, other]) as collecting:
        assert collections.wanted(JOB, one) == ResidualRequest(3, "here")
        assert collections.wanted(JOB, third) is None
        assert collections.wanted(JobId(2), one) is None
        with collections.open(JOB, ResidualRequest(4, "here"), [one]):
            assert collections.wanted(JOB, one) == ResidualRequest(4, "here"), "the newest, where one was given up"
        for job, worker, number in ((JOB, one, 4), (JOB, third, 3), (JobId(2), one, 3)):
            with pytest.raises(NotFound):
                collections.report(job, worker, number, COPIED)
        collections.report(JOB, one, 3, ResidualReport(Stage.ENDED, written=first))
        collections.report(JOB, one, 3, ResidualReport(Stage.ENDED, written=Written(2, "cd" * 32)))
        assert collecting.files == {one: first}
    with pytest.raises(NotFound):
        collections.report(JOB, one, 3, COPIED)


def test_coordinator_that_stops_waits_for_nobody(yard: Yard) -> None:
    with yard.feedback.open(JOB, ResidualRequest(3, "here"), WORKERS) as collecting:
        threading.Timer(0.05, yard.feedback.close).start()
        begun = time.monotonic()
        yard.feedback.await_copies(JOB, collecting, ready_ms=60_000, copied_ms=60_000)
        assert time.monotonic() - begun < 10


def test_workers_without_error_feedback_are_asked_for_nothing(yard: Yard, tmp_path: Path) -> None:
    with workers(yard, lambda *_: pytest.fail("it was told something")):
        yard.take(tmp_path, 1)
    assert CheckpointLibrary(open_storage(str(tmp_path))).load("ads", 1).feedback == ()
