"""A job's rows and parameters for who answers requests: each answer of one version, young enough, whoever trains,
moves or dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import shardyard as sy
from shardyard.domain import errors
from shardyard.domain.ids import Version
from shardyard_ps_server.hosting import pulls
from shardyard_ps_server.partition import partition as partitions
from shardyard_worker.reader import pinned_version
from shardyard_worker.reader.serving import ServedModel, ServedRows, ServedVersion
from tests.integration.readers.test_followed_tables import (
    IDS,
    MODES,
    Model,
    Training,
    partitions_of,
    slow_values,
    training,
    yard,
)
from tests.support.alone import SYNC, SYNC_2
from tests.support.readers import DEADLINE_S, eventually
from tests.support.yards import Probes, RoleYard

pytestmark = pytest.mark.usefixtures("alone")

HYBRID_MODE = {"job.consistency.mode": "hybrid"}
BOTH = {"words": IDS, "users": IDS}
CACHES = pytest.mark.parametrize("cached_rows", [0, 7, 1_000])


@contextmanager
def served_by(there: Any, model: torch.nn.Module | None = None, **given: Any) -> Iterator[ServedModel]:
    with there.follow() as run, run.serve(model, **({"staleness_ms": 100, "wait_ms": 20_000} | given)) as served:
        yield served


def of_versions(versions: tuple[Version, ...]) -> torch.Tensor:
    """What each id's row is, of a job of which each push takes one from each row."""
    return torch.tensor([-float(version.number) for version in versions])[partitions_of()]


def ask_on(served: ServedModel, holds: Callable[[ServedRows], bool]) -> None:
    """Until it is refused."""
    while True:
        assert holds(served.look_up(BOTH))


# ---- one version


@pytest.mark.long("0-sync", "7-hybrid", "1000-bounded", "7-async")
@MODES
@CACHES
def test_every_answer_is_of_one_version_while_others_train(mode: dict[str, object], cached_rows: int) -> None:
    with yard(**mode) as there, training(there), served_by(there, cached_rows=cached_rows) as served:
        seen: set[tuple[Version, ...]] = set()
        failed: list[BaseException] = []

        def ask(number: int) -> None:
            draw = torch.Generator().manual_seed(number)
            try:
                while len(seen) < 8:
                    chosen = torch.randint(len(IDS), (11,), generator=draw)
                    answer = served.look_up({"words": IDS[chosen], "users": IDS[chosen]})
                    expected = of_versions(answer.versions)[chosen]
                    assert torch.equal(answer.rows["words"], expected[:, None].expand(-1, 2))
                    if mode is SYNC:
                        assert {version.number for version in answer.versions} == {answer.step}
                    seen.add(answer.versions)
            except BaseException as error:  # noqa: BLE001 - told below
                failed.append(error)
                seen.update((Version(0, n),) for n in range(9))

        with ThreadPoolExecutor(3) as threads:
            for each in [threads.submit(ask, number) for number in range(3)]:
                each.result(DEADLINE_S)
        assert not failed, failed
        if cached_rows == 1_000:
            assert served.counts.hits > 0
        assert served.counts.versions >= 8


@MODES
def test_a_block_reads_one_version_however_long_it_lasts(mode: dict[str, object]) -> None:
    with yard(**mode) as there, training(there), served_by(there, Model()) as served, torch.no_grad():
        for _ in range(3):
            before = served.counts.versions
            with served.version() as version:
                expected = of_versions(version.versions)[:, None]
                for _ in range(3):
                    assert torch.equal(version.look_up(BOTH)["users"], expected)
                    words, users, top = version.model()
                    assert torch.equal(words, expected.expand(-1, 2))
                    assert torch.equal(users, expected)
                    if mode is SYNC:
                        assert (top == -float(version.step)).all()
                    mine = served.counts.versions
                    eventually(lambda mine=mine: served.counts.versions > mine)  # type: ignore[misc]
            assert served.counts.versions >= before + 3


def test_versions_are_let_go_when_nobody_reads_them() -> None:
    with yard(**SYNC) as there, training(there):
        with served_by(there, Model()) as served:
            with served.version(), served.version():
                eventually(lambda: served.counts.versions >= 5)
            eventually(lambda: there.pins <= 4)  # the present one, and one on its way
            assert len(served._models) <= 2
        eventually(lambda: there.pins == 0)


def test_copies_of_the_model_are_not_kept_for_as_many_as_read_versions_once() -> None:
    with yard(**SYNC) as there, training(there), served_by(there, Model()) as served:
        with ExitStack() as reading:
            steps: list[int] = []
            for _ in range(5):
                eventually(lambda: served.look_up(BOTH).step > max(steps, default=-1))
                steps.append(reading.enter_context(served.version()).step)
            assert steps == sorted(set(steps))
        eventually(lambda: there.pins <= 4)
        assert len(served._models) <= 2


def test_who_has_left_a_job_does_not_serve_it() -> None:
    with yard() as there:
        Training(there.connect()).step()
        run = there.follow()
        run.close()
        with pytest.raises(errors.InvalidRequest, match="was closed"):
            run.serve()


def test_ids_of_any_shape_are_looked_up_and_get_no_row() -> None:
    with yard() as there:
        trained = Training(there.connect())
        trained.step()
        with served_by(there) as served:
            ids = torch.tensor([[[5, -6]], [[5, int(IDS[3])]]], dtype=torch.int64)
            answer = served.look_up({"users": ids})
            assert answer.rows["users"].shape == (2, 1, 2, 1)
            assert answer.rows["users"].flatten().tolist() == [0.0, 0.0, 0.0, -1.0]
            assert served.look_up({"words": torch.empty(0, dtype=torch.int32)}).rows["words"].shape == (0, 2)
            assert served.look_up({}).rows == {}
            assert len(trained.model.users.table) == len(IDS)


def test_an_answer_keeps_what_it_had() -> None:
    """Though its memory is read by others, and the cache goes on."""
    with yard() as there, training(there), served_by(there, cached_rows=100) as served:
        answer = served.look_up(BOTH)
        answer.rows["words"].zero_()
        again = served.look_up(BOTH)
        if again.versions == answer.versions:
            assert (again.rows["words"] != 0).all()


def test_what_is_asked_wrongly_is_refused() -> None:
    with yard() as there:
        Training(there.connect()).step()
        with there.follow() as run:
            with pytest.raises(errors.InvalidRequest, match="staleness_ms"):
                run.serve(staleness_ms=0)
            with run.serve() as served:
                with pytest.raises(
                    errors.InvalidRequest, match="rows of table 'verbs'; the job's tables are words, users"
                ):
                    served.look_up({"verbs": IDS})
                with pytest.raises(errors.DTypeMismatch):
                    served.look_up({"words": IDS.float()})
                with served.version() as version, pytest.raises(errors.InvalidRequest, match="none was given"):
                    _ = version.model
            with pytest.raises(errors.InvalidRequest, match="not served any more"):
                served.look_up(BOTH)


def test_a_model_of_another_job_is_refused() -> None:
    with yard() as there:
        Training(there.connect()).step()
        with served_by(there, Model(dim=3)) as served, pytest.raises(errors.ShapeMismatch, match="of dim 3"):
            served.look_up(BOTH)


# ---- how old


def test_an_answer_is_as_young_as_was_asked_for_where_nothing_is_trained() -> None:
    with yard() as there:
        trained = Training(there.connect())
        trained.step(2)
        with served_by(there, staleness_ms=60) as served:
            first = served.look_up(BOTH)
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                answer = served.look_up(BOTH)
                assert answer.versions == first.versions
                assert answer.age_ms <= 60
            assert served.counts.versions == 1, "the same version is not taken twice"
            trained.step()
            eventually(lambda: served.look_up(BOTH).step == 3)


def test_what_was_trained_longer_ago_than_the_bound_is_in_every_answer() -> None:
    with yard() as there:
        trained = Training(there.connect())
        with served_by(there, staleness_ms=200) as served:
            for number in range(1, 4):
                trained.step()
                counted = time.monotonic()
                while (begun := time.monotonic()) < counted + 0.45:
                    answer = served.look_up(BOTH)
                    assert answer.step == number or begun < counted + 0.2


def test_rows_of_a_hybrid_job_are_as_young_as_was_asked_for_in_the_midst_of_a_step() -> None:
    """Its rows change as they come, whatever step its parameters are of."""
    with yard(**SYNC_2 | HYBRID_MODE) as there:
        trained = Training(there.connect())
        trained.step(2)  # both ranks
        with served_by(there, Model(), staleness_ms=200, cached_rows=100) as served, torch.no_grad():
            first = served.look_up(BOTH)
            assert first.step == 1
            trained.step()  # one of them: the step is not complete
            counted = time.monotonic()
            eventually(lambda: time.monotonic() > counted + 0.2)
            answer = served.look_up(BOTH)
            assert answer.versions == first.versions
            assert (answer.rows["users"] < first.rows["users"]).all()
            with served.version() as version:
                words, _, top = version.model()
                assert torch.equal(words, answer.rows["words"])
                assert torch.equal(top, torch.full((4,), -1.0))


def test_answer_says_the_age_by_which_its_version_was_young_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an age that is read later, which may be above the bound."""
    with yard() as there:
        Training(there.connect()).step()
        with served_by(there, staleness_ms=60_000) as served:
            served.look_up(BOTH)
            asks, ages = threading.current_thread(), iter((59_999.0, 60_001.0))

            def age_ms(_: ServedVersion) -> float:
                return next(ages) if threading.current_thread() is asks else 0.0

            monkeypatch.setattr(ServedVersion, "age_ms", property(age_ms))
            assert served.look_up(BOTH).age_ms == 59_999.0


def test_no_answer_is_older_than_the_bound_when_servers_are_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with yard() as there:
        Training(there.connect()).step()
        with served_by(there, staleness_ms=100, wait_ms=500, cached_rows=100) as served:
            served.look_up(BOTH)

            def away(*_: Any) -> None:
                raise errors.ServerUnavailable("server 1.1 does not answer")

            with monkeypatch.context() as cut:
                cut.setattr(pulls, "pin", away)
                with pytest.raises(errors.DeadlineExceeded, match=r"at most 100 ms old .* within 500 ms"):
                    ask_on(served, lambda answer: answer.age_ms <= 100)
            assert served.look_up(BOTH).step == 1


def test_a_version_that_servers_lose_costs_a_request_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "HELD_ROWS_BYTES_MAX", 2_000)
    with yard() as there:
        trained = Training(there.connect())
        trained.step()
        with served_by(there, staleness_ms=3_600_000) as served:
            assert served.look_up(BOTH).step == 1
            trained.step(50)
            assert served.look_up(BOTH).step == 51
            with served.version() as version:
                trained.step(50)
                with pytest.raises(errors.VersionPassed):
                    version.look_up(BOTH)
            assert served.look_up(BOTH).step == 101


# ---- ends


@MODES
def test_the_last_version_is_served_when_the_job_has_ended(mode: dict[str, object]) -> None:
    with yard(**mode) as there:
        job = there.connect()
        trained = Training(job)
        trained.step(2)
        with served_by(there) as served:
            served.look_up(BOTH)
            trained.step(3)
            job.close()
            eventually(lambda: is_last(served))
            taken = served.counts.versions
            until = time.monotonic() + 0.4
            while time.monotonic() < until:
                assert (served.look_up(BOTH).rows["words"] == -5.0).all()
            assert served.counts.versions == taken


def is_last(served: ServedModel) -> bool:
    with served.version() as version:
        return version.is_last


def test_a_job_that_fails_ends_serving_with_its_error() -> None:
    with yard() as there:
        job = there.connect()
        Training(job).step()
        with served_by(there) as served:
            served.look_up(BOTH)
            job.close("ZeroDivisionError: by zero")
            with pytest.raises(errors.WorkerFailed, match="by zero"):
                ask_on(served, lambda _: True)


def test_requests_that_wait_are_told_when_it_is_closed() -> None:
    with yard() as there:
        job = there.connect()
        with there.follow() as run, run.serve(wait_ms=60_000) as served:
            failed: list[BaseException] = []

            def ask() -> None:
                try:
                    served.look_up(BOTH)
                except errors.ShardyardError as error:
                    failed.append(error)

            asking = threading.Thread(target=ask)
            asking.start()
            eventually(lambda: served.counts.waits == 1)
            served.close()
            asking.join(DEADLINE_S)
            assert [type(error) for error in failed] == [errors.InvalidRequest]
        del job


def test_leases_of_a_version_are_renewed_while_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_version, "LEASE_MS", 400)
    monkeypatch.setattr(pinned_version, "RENEW_MS", 50)
    with yard() as there, training(there), served_by(there, staleness_ms=3_600_000) as served:
        with served.version() as version:
            expected = of_versions(version.versions)[:, None]
            until = time.monotonic() + 1.2
            while time.monotonic() < until:
                assert torch.equal(version.look_up({"users": IDS})["users"], expected)


def test_leases_of_a_version_are_renewed_while_the_values_of_its_model_come(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_values(monkeypatch)
    with yard() as there, training(there), served_by(there, Model(), staleness_ms=10_000) as served, torch.no_grad():
        with served.version() as version:
            expected = of_versions(version.versions)[:, None]
            assert torch.equal(version.look_up({"users": IDS})["users"], expected)


# ---- over gRPC


@pytest.mark.long
@pytest.mark.parametrize("killed", ["server", "coordinator", "both"])
def test_serving_goes_on_when_services_die_and_come_back(tmp_path: Path, killed: str) -> None:
    samples, epochs = 203, 3
    told = RoleYard(tmp_path)
    try:
        with Probes(tmp_path) as probes:
            options = ("--samples", str(samples), "--epochs", str(epochs), "--pause-ms", "60")
            settings = {"job__consistency__mode": "sync", "job__consistency__logical_ranks": 1}
            script, _ = probes.start(
                "rows", *options, coordinator=told.address, job__checkpoint__every_steps=7, **settings
            )
            ids = torch.arange(samples) * 1_000_003
            seen: list[tuple[int, float]] = []
            with sy.follow(told.address) as run, run.serve(staleness_ms=500, wait_ms=60_000, cached_rows=50) as served:
                has_died = False
                while not seen or seen[-1][1] < samples * epochs:
                    answer = served.look_up({"counts": ids})
                    assert answer.age_ms <= 500
                    seen.append((answer.step, float(answer.rows["counts"].sum())))
                    if not has_died and answer.step > 12:
                        has_died = True
                        if killed != "server":
                            told.kill_coordinator()
                        if killed != "coordinator":
                            told.kill_server(1)
                        if killed != "server":
                            told.restart_coordinator()
                        if killed != "coordinator":
                            told.restart_server(1)
            assert script.wait() == 0, script.output
            # four samples a step, fewer at the end of an epoch
            assert all(total == 4.0 * step for step, total in seen if step <= samples // 4)
            assert len({step for step, _ in seen}) > 5
            assert has_died
    finally:
        told.stop()
