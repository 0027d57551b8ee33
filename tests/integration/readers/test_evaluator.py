"""An evaluator beside a job, in yards inside this process: what it reads is one version, whoever trains, moves or dies;
training never waits for it; what was the best stays (docs/internals/ledger.md, rule C7)."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.checkpoints.best import BestFolder
from shardyard.domain import errors, limits
from shardyard.storage.storage import open_storage
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.reader import pinned_version, snapshots
from shardyard_worker.reader.evaluator import Snapshot
from tests.support.alone import SYNC, SYNC_2
from tests.support.readers import DEADLINE_S, TrainingThread, eventually, yard

pytestmark = pytest.mark.usefixtures("alone")


class Counting(TrainingThread):
    """A job whose every value is how often it was pushed; each push is one step. `begin` has a thread push on."""

    def __init__(self, job: sy.Job, *, variables: int = 8, elements: int = 16) -> None:
        super().__init__()
        self.job = job
        self.names = [f"v{index}" for index in range(variables)]
        job.register({name: torch.zeros(elements) for name in self.names}, optimizer="sgd", lr=1.0)
        self._gradients = {name: -torch.ones(elements) for name in self.names}

    def push(self, times: int = 1) -> None:
        for _ in range(times):
            self.job.push(self._gradients)

    def step(self) -> None:
        self.push()


def values_of(snapshot: Snapshot) -> set[float]:
    return {float(each) for values in snapshot.state_dict().values() for each in values.flatten()}


# ---- one version


def test_snapshot_of_a_synchronous_job_is_one_step_on_all_partitions() -> None:
    with yard(**SYNC) as there:
        counting = Counting(there.connect())
        counting.begin()
        try:
            run = there.follow()
            seen = list(itertools.islice(run.snapshots(every_s=0), 20))
        finally:
            counting.end()
        for snapshot in seen:
            assert {version.number for version in snapshot.versions} == {snapshot.step}
        assert len({snapshot.step for snapshot in seen}) == len(seen)


def test_values_of_a_synchronous_snapshot_are_those_of_its_step_exactly() -> None:
    with yard(**SYNC) as there:
        counting = Counting(there.connect())
        counting.begin()
        try:
            found = [
                (snapshot.step, values_of(snapshot))
                for snapshot in itertools.islice(there.follow().snapshots(every_s=0), 20)
            ]
        finally:
            counting.end()
    assert found == [(step, {float(step)}) for step, _ in found]


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 3)
    )


def test_model_of_a_snapshot_is_the_trained_one_of_that_step_to_the_bit_with_its_buffers() -> None:
    data = TensorDataset(torch.randn(96, 6, generator=torch.Generator().manual_seed(1)), torch.arange(96) % 3)
    trained: dict[int, dict[str, torch.Tensor]] = {}
    compared: list[int] = []
    with yard(**SYNC) as there:
        job = there.connect()
        mine = network()
        model, optimizer = job.prepare(mine, torch.optim.Adam(mine.parameters(), lr=1e-2))
        read: list[tuple[int, dict[str, torch.Tensor]]] = []

        def evaluate() -> None:
            theirs = network()
            for snapshot in there.follow().snapshots(theirs, every_s=0):
                read.append((snapshot.step, {k: v.clone() for k, v in theirs.state_dict().items()}))

        evaluating = threading.Thread(target=evaluate)
        evaluating.start()
        for x, y in job.batches(data, batch_size=8, epochs=20):
            trained[job.step] = {k: v.clone() for k, v in model.state_dict().items()}
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        trained[job.step] = {k: v.clone() for k, v in model.state_dict().items()}
        job.close()
        evaluating.join(DEADLINE_S)
        assert not evaluating.is_alive()
    for step, values in read:
        compared.append(step)
        for name, value in values.items():
            assert torch.equal(value, trained[step][name]), (step, name)
    assert len(compared) >= 2
    assert compared[-1] == max(trained)


def test_asynchronous_snapshot_has_each_partition_whole() -> None:
    with yard() as there:
        counting, second = Counting(there.connect()), Counting(there.connect())
        counting.begin()
        second.begin()
        try:
            run = there.follow()
            view = run._session.news.view
            assert view is not None
            for snapshot in itertools.islice(run.snapshots(every_s=0), 20):
                values = snapshot.state_dict()
                for part in view.layout.partitions:
                    number = snapshot.versions[part.partition].number
                    for block in part.blocks:
                        flat = values[snapshot.names[block.variable]].flatten()
                        assert set(flat[block.offset : block.offset + block.length].tolist()) == {float(number)}
        finally:
            counting.end()
            second.end()


def test_step_that_never_comes_is_not_waited_for() -> None:
    """The one that stands is read, though a later one was named."""
    with yard(**SYNC) as there:
        counting = Counting(there.connect())
        counting.push(3)
        run = there.follow()
        assert next(run.snapshots(every_s=0)).step == 3
        assert there.pins == 0


# ---- the job's end, its beginning


@pytest.mark.parametrize("mode", [SYNC, {}], ids=["sync", "async"])
def test_loop_ends_with_the_final_state_when_the_job_has_ended(mode: dict[str, object]) -> None:
    with yard(**mode) as there:
        job = there.connect()
        counting = Counting(job)
        run = there.follow()
        steps: list[int] = []
        for snapshot in run.snapshots(every_s=0):
            steps.append(snapshot.step)
            assert values_of(snapshot) == {float(snapshot.step)}
            if len(steps) == 1:
                counting.push(7)
                job.close()
                eventually(lambda: run._session.news.has_ended)
        assert steps[-1] == 7
        assert there.status().state == wire.JOB_STATE_FINISHED
        run.close()
        eventually(lambda: not any(server.partitions for server in there.servers()))


def test_finished_job_is_let_go_when_nobody_reads_it() -> None:
    with yard() as there:
        job = there.connect()
        Counting(job).push()
        job.close()
        eventually(lambda: not any(server.partitions for server in there.servers()))


def test_last_state_that_was_read_already_is_not_read_again() -> None:
    with yard() as there:
        job = there.connect()
        Counting(job).push(2)
        run = there.follow()
        found = run.snapshots(every_s=0)
        assert next(found).step == 2
        job.close()
        assert list(found) == []


def test_job_that_fails_ends_the_loop_with_its_error() -> None:
    with yard() as there:
        job = there.connect()
        Counting(job).push()
        run = there.follow()
        found = run.snapshots(every_s=0)
        next(found)
        job.close("ZeroDivisionError: by zero")
        with pytest.raises(errors.WorkerFailed, match="by zero"):
            next(found)


def test_evaluator_waits_for_the_job_to_begin() -> None:
    with yard() as there:
        steps: list[int] = []
        evaluating = threading.Thread(
            target=lambda: steps.extend(snapshot.step for snapshot in there.follow("default").snapshots(every_s=0))
        )
        evaluating.start()
        job = there.connect()
        assert job.name == "default"
        counting = Counting(job)
        counting.push()
        eventually(lambda: bool(steps))
        counting.push()
        job.close()
        evaluating.join(DEADLINE_S)
        assert not evaluating.is_alive()
        assert steps[-1] == 2


# ---- training goes on


def test_dead_evaluators_pins_go_with_their_lease_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_version, "LEASE_MS", 300)
    with yard(**SYNC) as there:
        counting = Counting(there.connect())
        counting.begin()
        try:
            run = there.follow()
            died = threading.Event()

            def die(*_: Any) -> None:
                died.set()
                raise KeyboardInterrupt

            monkeypatch.setattr(snapshots.Snapshots, "_pull", die)
            monkeypatch.setattr(pinned_version.PinnedVersion, "release", lambda *_: None)
            with pytest.raises(KeyboardInterrupt):
                next(run.snapshots(every_s=0))
            assert died.is_set()
            before = counting.job.step
            eventually(lambda: counting.job.step > before + 20)
            eventually(lambda: there.pins == 0)
        finally:
            counting.end()


def test_evaluator_takes_no_ranks_and_is_no_worker() -> None:
    with yard(**SYNC_2, **{"job.workers_expected": 2}) as there:
        first, second = there.connect(), there.connect()
        threads = [threading.Thread(target=lambda job=job: Counting(job).push(2)) for job in (first, second)]
        run = there.follow()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        next(run.snapshots(every_s=0))
        found = there.status()
        assert (found.workers, found.readers) == (2, 1)
        run.close()
        assert there.status().readers == 0


# ---- reports, and the best


def test_report_is_shown_by_the_status_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with yard() as there:
        job = there.connect()
        Counting(job).push(4)
        run = there.follow()
        next(run.snapshots(every_s=0))
        run.report(accuracy=torch.tensor(0.5), loss=float("nan"))
        assert capsys.readouterr().out == "step 4: accuracy 0.5, loss nan\n"
        eventually(lambda: there.status().HasField("evaluation"))
        found = there.status().evaluation
        assert (found.step, {metric.name: metric.value for metric in found.metrics}) == (4, {"accuracy": 0.5})


def test_best_version_is_kept_as_it_was_read(tmp_path: Path) -> None:
    folder = BestFolder(open_storage(str(tmp_path)), "default")
    with yard() as there:
        job = there.connect()
        counting = Counting(job)
        run = there.follow()
        kept = []
        for value in (0.2, 0.5, 0.4, 0.5, float("nan")):
            counting.push()
            snapshot = next(run.snapshots(every_s=0))
            run.report(accuracy=value)
            kept.append((snapshot.step, run.keep_best("accuracy", into=str(tmp_path))))
        assert kept == [(1, True), (2, True), (3, False), (4, False), (5, False)]
        eventually(lambda: there.status().HasField("best"))
        eventually(lambda: there.status().best.step == 2)
        best = there.status().best
        assert (best.metric, best.lowest, best.value, best.url) == ("accuracy", False, 0.5, folder.url)
    found = folder.load()
    assert found is not None
    assert (found.step, found.value, found.mode) == (2, 0.5, "max")
    assert {float(each) for values in folder.read(found).values() for each in values} == {2.0}
    assert len(list((tmp_path / "default" / "best").iterdir())) == 2


def test_evaluator_that_is_started_again_knows_what_was_the_best(tmp_path: Path) -> None:
    with yard() as there:
        counting = Counting(there.connect())
        for value, is_best in ((3.0, True), (4.0, False), (2.0, True)):
            counting.push()
            run = there.follow()
            next(run.snapshots(every_s=0))
            run.report(loss=value)
            assert run.keep_best("loss", "min", into=str(tmp_path)) is is_best
            run.close()


def test_best_without_a_place_says_where_to_give_one() -> None:
    with yard(**{"job.checkpoint.url": "never"}) as there:
        Counting(there.connect()).push()
        run = there.follow()
        next(run.snapshots(every_s=0))
        run.report(loss=1.0)
        with pytest.raises(errors.ConfigurationError, match="no place for its best"):
            run.keep_best("loss", "min")
        with pytest.raises(errors.InvalidRequest, match="to keep the best by 'accuracy'"):
            run.keep_best("accuracy")


def test_model_of_another_job_is_refused() -> None:
    with yard() as there:
        Counting(there.connect()).push()
        run = there.follow()
        with pytest.raises(errors.UnknownVariable, match="'v0'"):
            next(run.snapshots(network(), every_s=0))


@pytest.mark.long
def test_model_with_a_table_without_rows_is_refused() -> None:
    """It would be judged by rows that nobody has trained."""
    with yard() as there:
        Counting(there.connect(), variables=1).push()
        model = torch.nn.Module()
        model.words, model.v0 = sy.Embedding(2), torch.nn.Parameter(torch.zeros(16))
        run = there.follow()
        with pytest.raises(errors.UnsupportedModel, match=r"table 'words' has no rows"):
            next(run.snapshots(model, every_s=0))
        assert model.v0.tolist() == [0.0] * 16
        model.words.table.put(torch.tensor([5]), torch.ones(1, 2))
        run.close()
        next(there.follow().snapshots(model, every_s=0))
        assert model.v0.tolist() == [1.0] * 16
        assert model.words(torch.tensor([5])).tolist() == [[1.0, 1.0]]


def test_readers_that_are_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READERS_MAX", 1)
    with yard() as there:
        Counting(there.connect()).push()
        there.follow()
        with pytest.raises(errors.TooLarge, match="readers"):
            there.follow()
