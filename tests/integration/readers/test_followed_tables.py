"""A job with tables, followed: an evaluator reads the rows of the version that it evaluates, whoever trains or dies."""

from __future__ import annotations

import dataclasses
import errno
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardyard as sy
from shardyard.checkpoints.best import BestFolder
from shardyard.domain import errors
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import PartitionId
from shardyard.domain.tables.row_ids import partition_of
from shardyard.storage.storage import open_storage
from shardyard_ps_server.partition import partition as partitions
from shardyard_ps_server.partition import reads
from shardyard_worker.reader import pinned_version
from shardyard_worker.reader.pinned_version import PinnedVersion
from shardyard_worker.reader.snapshots import Snapshots
from tests.support.alone import SYNC
from tests.support.readers import TrainingThread, Yard, eventually
from tests.support.yards import Probes, RoleYard

pytestmark = pytest.mark.usefixtures("alone")

NEVER = {"job.checkpoint.url": "never"}
HYBRID = SYNC | {"job.consistency.mode": "hybrid"}
MODES = pytest.mark.parametrize(
    "mode",
    [SYNC, HYBRID, {}, {"job.consistency.mode": "bounded"}],
    ids=["sync", "hybrid", "async", "bounded"],
)
IDS = torch.arange(-20, 20) * 0x1_0000_0001


@contextmanager
def yard(**given: object) -> Iterator[Yard]:
    made = Yard(**(NEVER | given))
    try:
        yield made
    finally:
        made.close()


class Model(torch.nn.Module):
    """Each step takes one from each row of both tables, and from each weight."""

    def __init__(self, dim: int = 2) -> None:
        super().__init__()
        given: dict[str, Any] = {"optimizer": sy.tables.SGD(lr=1.0), "initial": sy.tables.zeros()}
        self.words = sy.Embedding(dim, table=sy.tables.Table(dim, name="words", seed=1, **given))
        self.users = sy.EmbeddingBag(1, "sum", table=sy.tables.Table(1, name="users", seed=2, **given))
        self.top = torch.nn.Parameter(torch.zeros(4))

    def forward(self, ids: torch.Tensor = IDS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.words(ids), self.users(ids[:, None]), self.top


class Training(TrainingThread):
    """A job that trains it, in a thread from `begin` to `end`, or step by step."""

    def __init__(self, job: sy.Job) -> None:
        super().__init__()
        self.job = job
        model = Model()
        self.model, self.optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.optimizer.zero_grad()
            with torch.enable_grad():
                sum(each.sum() for each in self.model()).backward()
            self.optimizer.step()


@contextmanager
def training(there: Yard) -> Iterator[Training]:
    found = Training(there.connect())
    found.step()
    found.begin()
    try:
        yield found
    finally:
        found.end()
        found.job.close()  # or another one, whose staleness is bounded, may wait for its next step


def partitions_of() -> torch.Tensor:
    return torch.from_numpy(partition_of(IDS.numpy(), 4).astype("int64"))


# ---- rows of the version


def test_rows_of_a_synchronous_snapshot_are_those_of_its_step_however_far_training_goes() -> None:
    with yard(**SYNC) as there, training(there) as trained, torch.no_grad():
        model = Model()
        run = there.follow()
        for count, snapshot in enumerate(run.snapshots(model, every_s=0)):
            for _ in range(3):
                before = trained.job.step
                words, users, top = model()
                for found in (words, users, top):
                    assert (found == -float(snapshot.step)).all()
                eventually(lambda before=before: trained.job.step > before + 10)  # type: ignore[misc]
            if count == 4:
                break
        run.close()
        eventually(lambda: there.pins == 0)


@pytest.mark.parametrize("mode", [{}, {"job.consistency.mode": "bounded"}], ids=["async", "bounded"])
def test_rows_of_an_asynchronous_snapshot_are_those_of_each_partitions_version(mode: dict[str, object]) -> None:
    """Also beside another trainer, and after the parameters were read."""
    with yard(**mode) as there, training(there) as trained, training(there), torch.no_grad():
        model = Model()
        run = there.follow()
        for count, snapshot in enumerate(run.snapshots(model, every_s=0)):
            numbers = torch.tensor([-float(version.number) for version in snapshot.versions])
            expected = numbers[partitions_of()]
            for _ in range(2):
                before = trained.job.step
                words, users, _ = model()
                assert torch.equal(words, expected[:, None].expand(-1, 2))
                assert torch.equal(users, expected[:, None])
                eventually(lambda before=before: trained.job.step > before + 5)  # type: ignore[misc]
            if count == 4:
                break


@pytest.mark.long("hybrid")
@MODES
def test_the_last_snapshot_has_the_last_rows(mode: dict[str, object]) -> None:
    with yard(**mode) as there, torch.no_grad():
        job = there.connect()
        trained = Training(job)
        trained.step(3)
        model, seen = Model(), []
        for _snapshot in there.follow().snapshots(model, every_s=0):
            seen.append(float(model.words(IDS[:1])[0, 0]))
            if len(seen) == 1:
                trained.step(4)
                job.close()
        assert seen[-1] == -7.0


def test_a_model_that_was_copied_reads_the_same_rows() -> None:
    import copy
    import pickle

    with yard() as there, torch.no_grad():
        trained = Training(there.connect())
        trained.step(2)
        model = Model()
        for _snapshot in there.follow().snapshots(model, every_s=0):
            assert torch.equal(copy.deepcopy(model)()[0], model()[0])
            with pytest.raises(errors.InvalidRequest, match="to be pickled"):
                pickle.dumps(model)
            break


# ---- all rows of the version


@MODES
def test_state_dict_has_all_rows_of_the_version_however_far_training_goes(mode: dict[str, object]) -> None:
    with yard(**mode) as there, training(there) as trained, torch.no_grad():
        model = Model()
        for count, snapshot in enumerate(there.follow().snapshots(model, every_s=0)):
            before = trained.job.step
            eventually(lambda before=before: trained.job.step > before + 5)  # type: ignore[misc]
            words, users, _ = model()
            state = model.state_dict()
            assert torch.equal(state["words.table.ids"], IDS)
            assert torch.equal(state["words.table.rows"], words)
            assert torch.equal(state["users.table.rows"], users)
            alone = Model()
            alone.load_state_dict(state)
            assert torch.equal(alone()[0], words)
            if mode is SYNC:
                assert (words == -float(snapshot.step)).all()
            if count == 3:
                break


Pieces = list[tuple[np.ndarray, np.ndarray]]


@contextmanager
def reading(
    before: Callable[[PinnedVersion, PartitionId], None], found: list[weakref.ref[np.ndarray]] | None = None
) -> Iterator[list[PartitionId]]:
    """Calls it when a partition is about to be read; which were. `found`: the rows."""
    asked: list[PartitionId] = []
    real = PinnedVersion.read_rows

    def read(self: PinnedVersion, table: int, dim: int, partition: PartitionId) -> Pieces:
        before(self, partition)
        asked.append(partition)
        pieces = real(self, table, dim, partition)
        if found is not None:
            found.extend(weakref.ref(rows) for _, rows in pieces)
        return pieces

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PinnedVersion, "read_rows", read)
        yield asked


@pytest.mark.long("words.safetensors-sync", "words.parquet-async")
@MODES
@pytest.mark.parametrize("name", ["words.safetensors", "words.parquet"])
def test_an_export_of_the_version_reads_a_partition_at_a_time(
    tmp_path: Path, mode: dict[str, object], name: str
) -> None:
    """A table may be larger than the machine that evaluates it."""
    with yard(**mode) as there, training(there) as trained, torch.no_grad():

        def train(_held: PinnedVersion, _partition: PartitionId) -> None:
            before = trained.job.step
            eventually(lambda: trained.job.step > before + 2)

        with reading(train) as asked:
            model = Model()
            snapshot = next(there.follow().snapshots(model, every_s=0))
            expected = model.words(IDS)
            model.words.table.export(tmp_path / name)
        assert asked == [0, 1, 2, 3]
        again = sy.tables.Table(2)
        again.load(tmp_path / name)
        every = again.everything()
        assert every.ids.tolist() == IDS.tolist()
        assert torch.equal(torch.from_numpy(every.rows), expected)
        if mode is SYNC:
            assert (expected == -float(snapshot.step)).all()


@pytest.mark.parametrize("mode", [SYNC, {}], ids=["sync", "async"])
def test_an_export_whose_version_is_lost_has_partitions_of_newer_ones_or_is_not_there(
    tmp_path: Path, mode: dict[str, object]
) -> None:
    """As forwards have: a step of a synchronous job is one moment."""
    path = tmp_path / "words.safetensors"
    with yard(**mode) as there, torch.no_grad():
        trained, model = Training(there.connect()), Model()
        trained.step()

        def lose(held: PinnedVersion, partition: PartitionId) -> None:
            if asked == [0, 1] and partition == 2:
                trained.step()
                held._lose(errors.ServerUnavailable("a server is lost"))

        with reading(lose) as asked:
            next(there.follow().snapshots(model, every_s=0))
            if mode is SYNC:
                with pytest.raises(errors.VersionPassed, match="a server is lost"):
                    model.words.table.export(path)
                assert list(tmp_path.iterdir()) == []
                return
            model.words.table.export(path)
        assert asked == [0, 1, 2, 2, 3]
        again = sy.tables.Table(2)
        again.load(path)
        expected = torch.where(partitions_of() >= 2, -2.0, -1.0)[:, None].expand(-1, 2)
        assert torch.equal(torch.from_numpy(again.everything().rows), expected)


@pytest.mark.parametrize("mode", [SYNC, {}], ids=["sync", "async"])
def test_the_best_has_the_rows_that_were_evaluated(tmp_path: Path, mode: dict[str, object]) -> None:
    into = str(tmp_path)
    with yard(**mode) as there, training(there) as trained, torch.no_grad():
        model, expected = Model(), ()
        run = there.follow()
        for count, snapshot in enumerate(run.snapshots(model, every_s=0)):
            found = [each.clone() for each in model()]
            before = trained.job.step
            eventually(lambda before=before: trained.job.step > before + 5)  # type: ignore[misc]
            run.report(loss=float(abs(count - 2)))
            is_best = run.keep_best("loss", "min", into=into)
            assert is_best is (count <= 2)
            expected = (snapshot.step, *found) if is_best else expected
            if count == 4:
                break
    folder = BestFolder(open_storage(into), "default")
    best = folder.load()
    assert best is not None
    values = {name: torch.from_numpy(each.copy()) for name, each in folder.read(best).items()}
    alone = Model()
    alone.load_state_dict(values)
    step, words, users, top = expected
    assert best.step == step
    assert all(torch.equal(*each) for each in zip(alone(), (words, users, top), strict=True))


@pytest.mark.long("sync", "async")
@MODES
def test_the_best_is_written_with_the_rows_of_a_partition_in_memory(tmp_path: Path, mode: dict[str, object]) -> None:
    """While training goes on; a table may be larger than the machine that evaluates it."""
    living: list[weakref.ref[np.ndarray]] = []
    with yard(**mode) as there, training(there) as trained, torch.no_grad():

        def check(_held: PinnedVersion, _partition: PartitionId) -> None:
            before = trained.job.step
            eventually(lambda: trained.job.step > before + 2)
            assert sum(each() is not None for each in living) <= 1

        with reading(check, living) as asked:
            model, run = Model(), there.follow()
            next(run.snapshots(model, every_s=0))
            found = [each.clone() for each in model()]
            run.report(loss=1.0)
            assert run.keep_best("loss", "min", into=str(tmp_path))
        assert asked == [0, 1, 2, 3] * 2
    assert len(living) >= 4
    folder = BestFolder(open_storage(str(tmp_path)), "default")
    best = folder.load()
    assert best is not None
    alone = Model()
    alone.load_state_dict({name: torch.from_numpy(each.copy()) for name, each in folder.read(best).items()})
    assert all(torch.equal(*each) for each in zip(alone(), found, strict=True))


def test_a_best_whose_rows_cannot_be_kept_aside_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with yard() as there, torch.no_grad():
        Training(there.connect()).step(2)
        run = there.follow()
        next(run.snapshots(Model(), every_s=0))
        run.report(loss=1.0)
        monkeypatch.setattr("tempfile.TemporaryFile", full)
        with pytest.raises(errors.StorageUnavailable, match="No space left on device") as refused:
            run.keep_best("loss", "min", into=str(tmp_path))
        assert "TMPDIR" in refused.value.todo_text
    assert BestFolder(open_storage(str(tmp_path)), "default").load() is None


def test_the_best_without_rows_where_nobody_wants_them(tmp_path: Path) -> None:
    with yard() as there, torch.no_grad():
        Training(there.connect()).step(2)
        run = there.follow()
        next(run.snapshots(Model(), every_s=0))
        run.report(loss=1.0)
        assert run.keep_best("loss", "min", into=str(tmp_path), rows=False)
    folder = BestFolder(open_storage(str(tmp_path)), "default")
    best = folder.load()
    assert best is not None
    assert list(folder.read(best)) == ["top"]


def test_a_best_whose_rows_are_not_held_any_more_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(partitions, "HELD_ROWS_BYTES_MAX", 2_000)
    with yard(**SYNC) as there, torch.no_grad():
        trained = Training(there.connect())
        trained.step()
        run = there.follow()
        for _snapshot in run.snapshots(Model(), every_s=0):
            run.report(loss=1.0)
            trained.step(50)
            with caplog.at_level("WARNING", "shardyard.evaluator"):
                assert not run.keep_best("loss", "min", into=str(tmp_path))
            break
        assert "is not kept: step 1 of job" in caplog.text
        assert BestFolder(open_storage(str(tmp_path)), "default").load() is None


def test_rows_that_a_checkpoint_reads_are_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused = []
    real = reads.read_table

    def busy(partition: partitions.Partition, table: int) -> Any:
        if len(refused) < 2:
            refused.append(table)
            raise errors.NotReady("a cut of this table is being taken")
        return real(partition, table)

    with yard(**SYNC) as there, torch.no_grad():
        Training(there.connect()).step(2)
        run = there.follow()
        next(run.snapshots(Model(), every_s=0))
        monkeypatch.setattr(reads, "read_table", busy)
        run.report(loss=1.0)
        assert run.keep_best("loss", "min", into=str(tmp_path))
    assert len(refused) == 2


# ---- what cannot be


@MODES
def test_who_follows_changes_nothing(mode: dict[str, object]) -> None:
    with yard(**mode) as there:
        Training(there.connect()).step(2)
        model = Model()
        for _snapshot in there.follow().snapshots(model, every_s=0):
            with pytest.raises(errors.InvalidRequest, match="which nobody would take"):
                model.words(IDS).sum().backward()
            with pytest.raises(errors.InvalidRequest, match="a reader changes nothing"):
                model.words.table.put(torch.tensor([1]), torch.zeros(1, 2))
            break


def test_tables_of_another_model_are_refused() -> None:
    with yard() as there:
        Training(there.connect()).step()
        with pytest.raises(errors.ShapeMismatch, match="'words' is of dim 3; the job's of dim 2"):
            next(there.follow().snapshots(Model(dim=3), every_s=0))
        other = Model()
        other.words.table.name = "verbs"
        with pytest.raises(errors.UnsupportedModel, match=r"no table of that name \(words, users\)"):
            next(there.follow().snapshots(other, every_s=0))
        assert float(other.top.detach().sum()) == 0.0


def test_rows_are_read_until_the_next_snapshot_is_asked_for() -> None:
    with yard() as there, torch.no_grad():
        trained = Training(there.connect())
        trained.step()
        model, run = Model(), there.follow()
        next(run.snapshots(model, every_s=0))
        assert float(model.words(IDS[:1])[0, 0]) == -1.0
        run.close()
        with pytest.raises(errors.VersionPassed, match="that was left"):
            model.words(IDS)


# ---- versions that are lost


@pytest.mark.long
def test_a_step_whose_rows_are_not_held_any_more_is_given_up_and_the_loop_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(partitions, "HELD_ROWS_BYTES_MAX", 2_000)
    with yard(**SYNC) as there, torch.no_grad():
        trained = Training(there.connect())
        trained.step()
        model, run = Model(), there.follow()
        evaluated = []
        for snapshot in run.snapshots(model, every_s=0):
            with snapshot:
                if len(evaluated) == 1 and evaluated[-1] is not None:
                    evaluated.append(None)
                    trained.step(50)
                assert float(model.words(IDS[:1])[0, 0]) == -float(snapshot.step)
                evaluated.append(snapshot.step)
            if len(evaluated) == 3:
                break
            trained.step()
        assert evaluated == [1, None, 53]


def test_a_step_whose_rows_are_not_held_any_more_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "HELD_ROWS_BYTES_MAX", 2_000)
    with yard(**SYNC) as there:
        trained = Training(there.connect())
        trained.step()
        model, run = Model(), there.follow()
        for _snapshot in run.snapshots(model, every_s=0):
            trained.step(50)
            with pytest.raises(errors.VersionPassed, match="more than the 500 bytes of rows that are kept") as found:
                model.words(IDS)
            break
        assert "with snapshot:" in str(found.value)


def test_where_versions_are_nobodys_a_newer_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "HELD_ROWS_BYTES_MAX", 2_000)
    with yard() as there:
        trained = Training(there.connect())
        trained.step()
        model = Model()
        for _snapshot in there.follow().snapshots(model, every_s=0):
            trained.step(50)
            with torch.no_grad():
                assert (model.words(IDS) == -51.0).all()
            break


def test_leases_are_renewed_for_as_long_as_a_snapshot_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_version, "LEASE_MS", 400)
    monkeypatch.setattr(pinned_version, "RENEW_MS", 50)
    with yard(**SYNC) as there, training(there), torch.no_grad():
        model = Model()
        for snapshot in there.follow().snapshots(model, every_s=0):
            until = time.monotonic() + 1.2
            while time.monotonic() < until:
                assert float(model.words(IDS[:1])[0, 0]) == -float(snapshot.step)
            break


def slow_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer to come than a lease lasts."""
    monkeypatch.setattr(pinned_version, "LEASE_MS", 1_000)
    monkeypatch.setattr(pinned_version, "RENEW_MS", 100)
    real = Snapshots._pull

    def slow(self: Snapshots, *given: Any) -> None:
        real(self, *given)
        time.sleep(2.0)

    monkeypatch.setattr(Snapshots, "_pull", slow)


def test_leases_are_renewed_while_the_values_of_a_snapshot_come(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_values(monkeypatch)
    with yard(**SYNC) as there, training(there), torch.no_grad():
        model = Model()
        for snapshot in there.follow().snapshots(model, every_s=0):
            assert float(model.words(IDS[:1])[0, 0]) == -float(snapshot.step)
            break


def test_a_lease_that_has_run_out_is_not_mistaken_for_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin that is asked for again, when it is gone, is one of another version."""
    monkeypatch.setattr(pinned_version, "LEASE_MS", 100)
    monkeypatch.setattr(pinned_version, "RENEW_MS", 3_600_000)
    with yard() as there, training(there), torch.no_grad():
        model, run = Model(), there.follow()
        for _snapshot in run.snapshots(model, every_s=0):
            held = run._rows.held
            assert held is not None
            eventually(lambda: there.pins == 0)
            held.renew()
            assert held.is_lost
            assert there.pins == 0
            break


@pytest.mark.parametrize("mode", [SYNC, {}], ids=["sync", "async"])
def test_who_does_not_know_yet_how_a_job_takes_pushes_asks_again(mode: dict[str, object]) -> None:
    """As a reader that was told so a moment before: nothing is read as if it were of the other kind."""
    with yard(**mode) as there:
        Training(there.connect()).step()
        run = there.follow()
        view = run._session.news.view
        assert view is not None
        other = UpdateMode.ASYNC if view.mode is UpdateMode.SYNC else UpdateMode.SYNC
        with pytest.raises(errors.NotReady, match="takes pushes in another way"):
            run._snapshots.hold(dataclasses.replace(view, mode=other))
        assert there.pins == 0
        run._snapshots.hold(view).release()


# ---- over gRPC


@pytest.mark.long
def test_an_evaluator_goes_on_when_a_server_dies_and_comes_back(tmp_path: Path) -> None:
    samples, epochs = 203, 3
    told = RoleYard(tmp_path)
    try:
        with Probes(tmp_path) as probes, torch.no_grad():
            options = ("--samples", str(samples), "--epochs", str(epochs), "--pause-ms", "60")
            settings = {"job__consistency__mode": "sync", "job__consistency__logical_ranks": 1}
            settings |= {"job__checkpoint__every_steps": 7}
            script, _ = probes.start("rows", *options, coordinator=told.address, **settings)
            table = sy.tables.Table(1, name="counts")
            model = torch.nn.ModuleDict({"counts": sy.Embedding(1, table=table), "beside": torch.nn.Linear(3, 2)})
            ids = torch.arange(samples) * 1_000_003
            seen: list[tuple[int, float]] = []
            killed = False
            with sy.follow(told.address) as run:
                for snapshot in run.snapshots(model, every_s=0):
                    with snapshot:
                        found = model["counts"](ids)
                        seen.append((snapshot.step, float(found.sum())))
                        if not killed and snapshot.step > 12:
                            killed = True
                            told.kill_server(1)
                            told.restart_server(1)
                        assert torch.equal(model["counts"](ids), found)
            assert script.wait() == 0, script.output
            assert killed
            assert seen[-1] == (seen[-1][0], float(samples * epochs))
            # four samples a step, fewer at the end of an epoch
            assert all(total <= 4.0 * step for step, total in seen)
            assert all(total == 4.0 * step for step, total in seen if step <= samples // 4)
    finally:
        told.stop()
