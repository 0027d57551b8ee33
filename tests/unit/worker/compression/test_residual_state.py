"""A worker's side of checkpoints that have what its error feedback remembers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardyard.checkpoints.library import CheckpointLibrary
from shardyard.checkpoints.manifest import FileRef, ResidualFile, feedback_path
from shardyard.config import configuration
from shardyard.config.settings import JobSettings, Settings
from shardyard.domain.errors import NotFound
from shardyard.domain.ids import Caller, Incarnation, JobId
from shardyard.runtime.waits import WaitRegistry
from shardyard.storage.encryption import MAGIC, encrypted, keys_in
from shardyard.storage.storage import Written, open_storage
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.compression import residual_state
from shardyard_worker.compression.residual_state import ResidualCheckpointer, refuse
from shardyard_worker.session.session import Progress
from tests.support import feedback_states as feedbacks

DEADLINE_S = 10.0
READY, COPIED, ENDED = wire.FEEDBACK_STAGE_READY, wire.FEEDBACK_STAGE_COPIED, wire.FEEDBACK_STAGE_ENDED
ME, GONE = Incarnation((1 << 32) + 26), "100000007"
NAME = "10000001a"


@dataclass
class Coordinator:
    """What a session is to ResidualCheckpointer, with a coordinator that takes whatever comes, unless it is told
    otherwise."""

    caller: Caller = field(default_factory=lambda: Caller(JobId(1), ME))
    job_settings: JobSettings = field(default_factory=lambda: JobSettings(name="digits"))
    settings: Settings = field(default_factory=Settings)
    wait_registry: WaitRegistry = field(default_factory=WaitRegistry)
    progress: Progress = field(default_factory=Progress)
    asked: list[Any] = field(default_factory=list)
    taken: bool = True
    copy: bool = True
    refusal: Exception | None = None
    on_refresh: Callable[[], None] = lambda: None
    on_ask: Callable[[Any], None] = lambda request: None

    def ask(self, method: Any, request: Any, *, check: Callable[[], None] | None = None) -> Any:
        if check is not None:
            check()
        self.asked.append(type(request).FromString(request.SerializeToString()))
        self.on_ask(request)
        if self.refusal is not None:
            raise self.refusal
        if isinstance(request, wire.ReportResidualRequest):
            return wire.ReportResidualReply(copy=self.copy)
        return wire.TakeUpResidualReply(taken=self.taken)

    def check(self) -> None:
        """The job goes on."""

    def refresh(self) -> None:
        self.on_refresh()

    def of(self, kind: type) -> list[Any]:
        return [each for each in list(self.asked) if isinstance(each, kind)]

    @property
    def reports(self) -> list[wire.ReportResidualRequest]:
        return self.of(wire.ReportResidualRequest)


@dataclass
class Worker:
    folder: Path
    feedback: Any = field(default_factory=lambda: feedbacks.on_host("topk:0.01"))
    session: Any = field(default_factory=Coordinator)
    made: ResidualCheckpointer = field(init=False)

    def __post_init__(self) -> None:
        self.made = ResidualCheckpointer(self.session, self.feedback, feedbacks.layout())

    @property
    def library(self) -> CheckpointLibrary:
        keys = keys_in(self.session.settings.storage.key_file)
        return CheckpointLibrary(encrypted(open_storage(str(self.folder)), keys))

    def begin_push(self, seed: int) -> None:
        self.made.boundary.begin()
        feedbacks.push(self.feedback, feedbacks.gradients(seed))

    def end_push(self) -> None:
        self.feedback.commit()
        self.made.boundary.end()

    def push(self, seed: int) -> None:
        self.begin_push(seed)
        self.end_push()

    def save(self, number: int, **more: Any) -> None:
        self.made.on_heartbeat(
            wire.HeartbeatReply(save_residual=wire.SaveResidual(number=number, url=str(self.folder)), **more)
        )

    def saved(self, number: int) -> dict[str, np.ndarray]:
        """Once it is reported."""
        wait_until(lambda: any(each.number == number and each.stage == ENDED for each in self.session.reports))
        last = self.session.reports[-1]
        file = FileRef(feedback_path(number, NAME), Written(last.length, last.sha256.hex()))
        return dict(self.library.load_feedback("digits", ResidualFile(NAME, file), feedbacks.layout()))

    def handed(self, worker: str, state: dict[str, np.ndarray], *, generation: int = 2, own: bool = False) -> Any:
        file = self.library.write_feedback("digits", 3, worker, state).file
        return wire.CheckpointResidual(
            generation=generation,
            worker=worker,
            own=own,
            url=str(self.folder),
            path=file.path,
            length=file.written.nbytes,
            sha256=bytes.fromhex(file.written.sha256),
        )

    @property
    def files(self) -> list[str]:
        return sorted(str(each.relative_to(self.folder)) for each in self.folder.rglob("*") if each.is_file())

    def damage(self, handed: Any) -> None:
        path = self.folder / "digits" / handed.path
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    found = Worker(tmp_path)
    yield found
    found.made.close()
    found.session.wait_registry.close()


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def remembered(seeds: range, worker: int = 9) -> dict[str, np.ndarray]:
    other = feedbacks.on_host("topk:0.01", worker=worker)
    for seed in seeds:
        feedbacks.push(other, feedbacks.gradients(seed))
    other.commit()
    return other.state_dict()


# ---- saving


def test_what_is_saved_is_the_state_after_the_push_that_was_under_way(worker: Worker) -> None:
    worker.push(0)
    worker.begin_push(1)
    worker.save(4)
    wait_until(lambda: bool(worker.made.boundary._due))
    worker.end_push()
    after = worker.feedback.state_dict()
    worker.push(2)
    assert feedbacks.same(worker.saved(4), after)
    assert [(each.number, each.stage) for each in worker.session.reports] == [(4, READY), (4, COPIED), (4, ENDED)]


def test_what_is_saved_is_encrypted_where_a_key_is_set(worker: Worker, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("5f" * 32)
    worker.session.settings = configuration.load(None, {}, {"storage.key_file": str(key)}).settings
    worker.push(0)
    worker.save(4)
    assert worker.saved(4)
    assert (worker.folder / "digits" / feedback_path(4, NAME)).read_bytes().startswith(MAGIC)


def test_idle_worker_saves_at_once_and_once_a_checkpoint(worker: Worker) -> None:
    worker.push(0)
    for _ in range(3):
        worker.save(4)
        assert feedbacks.same(worker.saved(4), worker.feedback.state_dict())
    assert len(worker.session.reports) == 3
    worker.save(5)
    worker.saved(5)


def test_pushes_go_on_while_the_file_is_written(worker: Worker) -> None:
    worker.push(0)
    before, on = worker.feedback.state_dict(), threading.Event()
    worker.session.on_ask = lambda request: request.stage == COPIED and on.wait(DEADLINE_S)
    worker.save(4)
    wait_until(lambda: any(each.stage == COPIED for each in worker.session.reports))
    worker.push(1)
    on.set()
    assert feedbacks.same(worker.saved(4), before)


def test_worker_that_has_pushed_nothing_says_that_it_remembers_nothing(worker: Worker) -> None:
    worker.save(4)
    wait_until(lambda: len(worker.session.reports) == 2)
    report = worker.session.reports[-1]
    assert (report.number, report.stage, report.length, report.failure) == (4, ENDED, 0, "")
    assert not list(worker.folder.iterdir())


def test_storage_that_refuses_is_reported_and_training_goes_on(worker: Worker) -> None:
    worker.push(0)
    (worker.folder / "digits").write_text("in the way")
    worker.save(4)
    wait_until(lambda: len(worker.session.reports) == 3)
    assert "cannot write" in worker.session.reports[-1].failure
    assert worker.session.reports[-1].length == 0
    worker.push(1)


def test_checkpoint_that_was_given_up_is_no_error(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    worker.push(0)
    worker.session.refusal = NotFound("no checkpoint 4")
    worker.save(4)
    wait_until(lambda: not worker.made._busy)
    assert not [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    worker.session.refusal = None
    worker.save(5)
    worker.saved(5)


def test_nothing_is_saved_before_the_map_is_followed_with_which_the_job_went_back(worker: Worker) -> None:
    worker.push(0)
    worker.save(4, restored_generation=2)
    assert worker.made._thread is None
    worker.made.follow(wire.RegisterVariablesReply(restored_generation=2))
    worker.save(4, restored_generation=2)
    wait_until(lambda: len(worker.session.reports) == 2)
    assert (worker.session.reports[-1].stage, worker.session.reports[-1].length) == (ENDED, 0), "it has nothing"


def test_worker_copies_when_it_is_told_that_all_are_ready(worker: Worker) -> None:
    worker.push(0)
    worker.session.copy = False
    worker.save(4)
    wait_until(lambda: len(worker.session.reports) >= 3)
    worker.push(1)
    after = worker.feedback.state_dict()
    worker.session.copy = True
    assert feedbacks.same(worker.saved(4), after)
    assert [each.stage for each in worker.session.reports[-3:]] == [READY, COPIED, ENDED]


def test_worker_that_leaves_while_others_are_not_ready_saves_nothing(worker: Worker) -> None:
    worker.push(0)
    worker.session.copy = False
    worker.save(4)
    wait_until(lambda: bool(worker.session.reports))
    worker.made.wait_for_checkpoint()
    wait_until(lambda: not worker.made._busy)
    assert {each.stage for each in worker.session.reports} == {READY}


# ---- taking up


def test_job_that_goes_back_gives_a_worker_its_own_in_the_place_of_what_it_has(worker: Worker) -> None:
    then = remembered(range(2))
    worker.push(7)
    own = worker.handed(NAME, then, own=True)
    worker.made.follow(wire.RegisterVariablesReply(restored_generation=2, feedback=[own]))
    assert feedbacks.same(worker.feedback.state_dict(), then)
    (claim,) = worker.session.of(wire.TakeUpResidualRequest)
    assert (claim.generation, claim.worker, claim.failure) == (2, NAME, "")
    assert worker.session.progress.residual_norm == pytest.approx(worker.feedback.lost_norm)
    worker.push(8)
    now = worker.feedback.state_dict()
    worker.made.follow(wire.RegisterVariablesReply(restored_generation=2))
    assert feedbacks.same(worker.feedback.state_dict(), now), "once"


@pytest.mark.parametrize("why", ["damaged", "other settings", "none", "taken"])
def test_worker_without_its_own_forgets_what_it_has(worker: Worker, why: str) -> None:
    worker.push(7)
    momentum = {"momentum.fc1.weight": np.ones(4_800, np.float32)} if why == "other settings" else {}
    own = worker.handed(NAME, remembered(range(2)) | momentum, own=True)
    if why == "damaged":
        worker.damage(own)
    worker.session.taken = why != "taken"
    worker.made.follow(wire.RegisterVariablesReply(restored_generation=2, feedback=[] if why == "none" else [own]))
    assert worker.feedback.residuals() == {}
    claims = worker.session.of(wire.TakeUpResidualRequest)
    assert [bool(each.failure) for each in claims] == {
        "damaged": [True],
        "other settings": [True],
        "none": [],
        "taken": [False],
    }[why]


def test_what_a_worker_that_is_gone_had_not_sent_is_added_between_two_pushes(worker: Worker) -> None:
    worker.push(0)
    theirs = remembered(range(3))
    worker.made.follow(wire.RegisterVariablesReply(restored_generation=1))
    worker.push(0)
    reply = wire.HeartbeatReply(restored_generation=1, feedback=[worker.handed(GONE, theirs, generation=1)])
    worker.begin_push(1)
    worker.made.on_heartbeat(reply)
    wait_until(lambda: not worker.made._busy)
    mine = worker.feedback.residuals()
    worker.end_push()
    for index, left in worker.feedback.residuals().items():
        added = theirs[f"residual.{feedbacks.VARIABLES[index].name}"]
        np.testing.assert_allclose(left, mine[index] + added, rtol=1e-5)


def test_hand_over_of_a_map_that_is_not_followed_yet_waits_for_it(worker: Worker) -> None:
    handed = worker.handed(GONE, remembered(range(3)))
    worker.made.on_heartbeat(wire.HeartbeatReply(restored_generation=2, feedback=[handed]))
    assert worker.made._thread is None
    worker.made.follow(wire.RegisterVariablesReply(restored_generation=2, feedback=[handed]))
    assert worker.feedback.residuals().keys() == {0, 2}


@pytest.mark.parametrize("why", ["damaged", "taken"])
def test_what_cannot_be_taken_up_is_left_and_told(worker: Worker, why: str) -> None:
    handed = worker.handed(GONE, remembered(range(3)))
    if why == "damaged":
        worker.damage(handed)
    worker.session.taken = why != "taken"
    worker.made.follow(wire.RegisterVariablesReply(restored_generation=2, feedback=[handed]))
    assert worker.feedback.residuals() == {}
    (claim,) = worker.session.of(wire.TakeUpResidualRequest)
    assert ("SHA-256" in claim.failure) == (why == "damaged")


def test_job_without_error_feedback_says_that_it_cannot_take_up_any(worker: Worker) -> None:
    refuse(worker.session, wire.RegisterVariablesReply(feedback=[worker.handed(GONE, remembered(range(1)))]))
    (claim,) = worker.session.of(wire.TakeUpResidualRequest)
    assert "without error feedback" in claim.failure


# ---- leaving


def test_worker_that_leaves_waits_for_the_checkpoint_that_has_what_it_remembers(worker: Worker) -> None:
    worker.push(0)
    worker.save(4)
    worker.saved(4)
    heartbeats: list[int] = []

    def refresh() -> None:
        heartbeats.append(1)
        worker.save(4) if len(heartbeats) < 3 else worker.made.on_heartbeat(wire.HeartbeatReply())

    worker.session.on_refresh = refresh
    worker.made.wait_for_checkpoint()
    assert len(heartbeats) == 3
    worker.save(5)
    wait_until(lambda: not worker.made._busy)
    assert {each.number for each in worker.session.reports} == {4}, "nothing is saved any more"


def test_worker_that_leaves_does_not_wait_for_ever(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_state, "CHECKPOINT_WAIT_MS", 50)
    worker.push(0)
    worker.save(4)
    worker.saved(4)
    worker.made.wait_for_checkpoint()


def test_worker_that_leaves_in_the_midst_of_a_push_saves_nothing_of_it(worker: Worker) -> None:
    worker.begin_push(0)
    worker.save(4)
    wait_until(lambda: bool(worker.made.boundary._due))
    worker.made.close()
    worker.end_push()
    assert [each.stage for each in worker.session.reports] == [READY]


# ---- leaving a synchronous job


def test_worker_that_leaves_a_synchronous_job_reports_the_residual_it_did_not_send(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.push(0)
    worker.made.lose()
    assert not caplog.records, "the coordinator decides whether it is lost"
    assert worker.session.progress.residual_lost == pytest.approx(worker.feedback.lost_norm)
    worker.save(4)
    assert worker.session.asked == [], "it has settled"


def test_worker_that_has_sent_all_loses_nothing(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    worker.made.lose()
    assert worker.session.progress.residual_lost == 0.0
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_what_a_worker_was_taking_up_when_it_left_is_lost_with_it(worker: Worker) -> None:
    theirs = remembered(range(3))
    begun, on = threading.Event(), threading.Event()

    def wait(request: Any) -> None:
        if isinstance(request, wire.TakeUpResidualRequest):
            begun.set()
            on.wait(DEADLINE_S)

    worker.session.on_ask = wait
    worker.session.on_refresh = on.set
    worker.made.on_heartbeat(wire.HeartbeatReply(feedback=[worker.handed(GONE, theirs, generation=0)]))
    assert begun.wait(DEADLINE_S)
    worker.made.lose()
    assert worker.session.progress.residual_lost == pytest.approx(worker.feedback.lost_norm)
    assert worker.feedback.lost_norm > 0


def test_what_was_taken_up_is_not_taken_up_again_where_a_late_heartbeat_names_it(worker: Worker) -> None:
    theirs = remembered(range(3))
    reply = wire.HeartbeatReply(feedback=[worker.handed(GONE, theirs, generation=0)])
    for _ in range(2):
        worker.made.on_heartbeat(reply)
        wait_until(lambda: not worker.made._busy)
    assert len(worker.session.of(wire.TakeUpResidualRequest)) == 1
    for index, left in worker.feedback.residuals().items():
        assert np.array_equal(left, theirs[f"residual.{feedbacks.VARIABLES[index].name}"])
