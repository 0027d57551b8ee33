"""Loss scaling, autocast, and gradients that are not finite, in a yard inside this process.

The oracle of most tests is the same training written with torch alone; elsewhere each sample adds 1 to its coordinate.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.domain import errors
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.commands import quarantine
from shardyard_launcher.yard.in_process import COORDINATOR
from tests.support.alone import SYNC, SYNC_2, Connect, Counted, status
from tests.support.mixed_precision import INF, STEPS, Noting, assert_close, data, mlp, twin, yard_of

pytestmark = pytest.mark.usefixtures("alone")

BOTH = pytest.mark.parametrize("settings", [{}, SYNC], ids=["async", "sync"])


# ---- loss scaling

OVERFLOWS = (3, 4, 11)


def take(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batch: tuple[torch.Tensor, torch.Tensor],
    *,
    overflow: bool,
    clip: bool = False,
) -> float:
    """A step, as any script has it; the scale that it had."""
    x, y = batch
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    loss = (out.float() - y).square().mean() * (INF if overflow else 1.0)
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    if clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    return scale


@BOTH
@pytest.mark.parametrize("clip", [False, True])
def test_training_with_the_jobs_scaler_equals_torchs(connect: Connect, settings: dict[str, Any], clip: bool) -> None:
    job = connect(settings=settings)
    scaler = job.scaler(init_scale=1024.0, growth_interval=5)
    model = mlp()
    plain = twin(model)
    model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    theirs, its = torch.optim.Adam(plain.parameters(), lr=0.01), torch.amp.GradScaler("cpu", 1024.0, growth_interval=5)
    for step, batch in enumerate(data()):
        overflow = step in OVERFLOWS
        mine = take(model, optimizer, scaler, batch, overflow=overflow, clip=clip)
        assert mine == take(plain, theirs, its, batch, overflow=overflow, clip=clip), step
    assert_close(model, plain)
    assert scaler.get_scale() == its.get_scale()
    assert job.step == STEPS, "a skipped step is a step of the job"


@BOTH
def test_torchs_own_scaler_works_unchanged_and_is_told_of_the_better_one(
    connect: Connect, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    job = connect(settings=settings)
    model = mlp()
    plain = twin(model)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    mine, its = (torch.amp.GradScaler("cpu", 1024.0, growth_interval=5) for _ in range(2))
    with caplog.at_level("WARNING"):
        for step, batch in enumerate(data()):
            overflow = step in OVERFLOWS
            assert take(model, optimizer, mine, batch, overflow=overflow) == take(
                plain, theirs, its, batch, overflow=overflow
            )
    assert_close(model, plain)
    (told,) = (record.message for record in caplog.records if "GradScaler" in record.message)
    assert "job.scaler() is one for all" in told


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"worker.same_host": "never"},
        {"worker.same_host": "never", "worker.exchange": "overlapped"},
        {"worker.exchange": "overlapped"},
    ],
    ids=["plain", "streams", "overlapped", "view"],
)
def test_overflow_in_one_rank_skips_the_step_for_all_and_the_scale_falls_once(
    connect: Connect, given: dict[str, Any]
) -> None:
    job = connect(settings=SYNC_2 | given)
    scaler = job.scaler(init_scale=8.0, growth_interval=100)
    model, optimizer = job.prepare(model := Noting(), torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5))
    found = []
    for at, (x,) in enumerate(job.batches(TensorDataset(torch.ones(8, 2)), batch_size=1, shuffle=False)):
        found.append((model.weight[0].item(), scaler.get_scale(), model.calls.item()))
        optimizer.zero_grad()
        scaler.scale(model(x) * (INF if at == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    # the ranks of a step see the same scale, whichever of them overflows
    assert found == [(0, 8, 0)] * 2 + [(1, 8, 1)] * 2 + [(1, 4, 2)] * 2 + [(2.5, 4, 3)] * 2
    assert (model.weight[0].item(), scaler.get_scale(), model.calls.item()) == (4.25, 4.0, 4.0)
    assert status_of(job).not_finite == 0


def status_of(job: sy.Job) -> wire.JobStatus:
    from shardyard.wire import methods

    peer = job._session.network.connect(COORDINATOR, name="coordinator")
    (found,) = peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=5_000).jobs
    return found


def test_worker_that_joins_late_has_the_scale_of_the_job() -> None:
    with yard_of() as join:
        scales = []
        for overflow in (True, False):
            job = join()
            scaler = job.scaler(init_scale=64.0)
            model, optimizer = job.prepare(model := Noting(), torch.optim.SGD(model.parameters(), lr=1.0))
            scales.append(scaler.get_scale())
            scaler.scale(model(torch.ones(2)) * (INF if overflow else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scales == [64.0, 32.0]


def test_scaler_is_asked_for_once_and_before_the_model(connect: Connect) -> None:
    job = connect()
    job.scaler()
    with pytest.raises(errors.InvalidRequest, match="a second time"):
        job.scaler()
    other = connect()
    other.prepare(model := mlp(), torch.optim.SGD(model.parameters()))
    with pytest.raises(errors.InvalidRequest, match=r"after job\.prepare"):
        other.scaler()


def test_gradients_that_are_sent_ahead_are_unscaled_when_they_count(connect: Connect) -> None:
    job = connect(settings={"worker.exchange": "overlapped", "worker.same_host": "never"})
    scaler = job.scaler(init_scale=256.0)
    model = torch.nn.Linear(64, 64)
    plain = torch.nn.Linear(64, 64)
    plain.load_state_dict(model.state_dict())
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(6):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * (INF if step == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 3:
            theirs.zero_grad()
            plain(x).square().mean().backward()
            theirs.step()
    assert_close(model, plain)


@BOTH
@pytest.mark.parametrize("codec", ["topk:0.5", "onebit", "bf16"])
def test_overflows_go_through_every_codec(connect: Connect, settings: dict[str, Any], codec: str) -> None:
    job = connect(settings=settings | {"job.compression.push": codec, "job.compression.whole_elements_max": 0})
    scaler = job.scaler(init_scale=1024.0, growth_interval=5)
    model, optimizer = job.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
    for step, batch in enumerate(data()):
        before = job.pull()
        take(model, optimizer, scaler, batch, overflow=step in OVERFLOWS)
        same = all(torch.equal(value, before[name]) for name, value in job.pull().items() if name != "loss_scaler")
        assert same is (step in OVERFLOWS)
    assert job.step == STEPS


# ---- gradients that are not finite


def train_with(counted: Counted, poison: set[int], *, batch_size: int = 4, epochs: int = 1) -> list[list[int]]:
    """One pass; batches that have a poisoned sample give NaN. Their samples."""
    left_out = []
    for (index,) in counted.job.batches(counted.data, batch_size=batch_size, epochs=epochs):
        bad = bool(poison & set(index.tolist()))
        if bad:
            left_out.append(sorted(index.tolist()))
        counted.step(index, float("nan") if bad else 1.0)
    return left_out


def listed(job: sy.Job) -> list[dict[str, object]]:
    ((name, reply),) = quarantine.ask(job._session.network, COORDINATOR, None)
    return quarantine.described(name, reply)


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("per_shard", [1, 3])
def test_promise_2_batches_that_are_not_finite_do_not_count_and_are_listed_by_index(
    connect: Connect, window: int, per_shard: int
) -> None:
    job = connect(
        settings={"job.data.batches_per_data_shard": per_shard, "worker.exchange": ("blocking", "delayed")[window]}
    )
    counted = Counted(job, 41)
    left_out = train_with(counted, {7, 23})
    assert 1 <= len(left_out) <= 2
    gone = {index for indices in left_out for index in indices}
    assert counted.counts == [0.0 if index in gone else 1.0 for index in range(41)]
    found = listed(job)
    assert sorted(sorted(each["indices"]) for each in found) == sorted(left_out)  # type: ignore[type-var]
    assert {str(each["not_finite"]) for each in found} == {
        str({"parameter": "0", "worker": int(job._session.caller.incarnation)})
    }
    shown = status_of(job)
    assert (shown.not_finite, shown.samples) == (len(left_out), 41 - len(gone))


@pytest.mark.parametrize("ranks", [1, 3])
def test_synchronous_steps_go_on_with_the_ranks_that_are_finite(connect: Connect, ranks: int) -> None:
    job = connect(settings=SYNC | {"job.consistency.logical_ranks": ranks})
    counted = Counted(job, 36)
    expected, steps = [0.0] * 36, []
    for (index,) in job.batches(counted.data, batch_size=4):
        if len(steps) == job.step:
            steps.append([])
        bad = 13 in index.tolist()
        steps[-1] += [] if bad else [index.tolist()]
        # each rank's mean gradient is 1 for its samples; that of the step is over the ranks that count
        counted.step(index, float("nan") if bad else 1.0)
    for step in steps:
        for indices in step:
            for sample in indices:
                expected[sample] += 1 / len(step)
    assert counted.counts == [round(value, 9) for value in expected]
    assert job.step == -(-36 // (4 * ranks))
    (batch,) = listed(job)
    assert 13 in batch["indices"]  # type: ignore[operator]


def test_accumulated_batches_do_not_count_together(connect: Connect) -> None:
    job = connect(settings={"job.data.batches_per_data_shard": 6})
    counted = Counted(job, 24)
    counted.optimizer.zero_grad()
    gone: list[int] = []
    pending: list[int] = []
    for at, (index,) in enumerate(job.batches(counted.data, batch_size=2)):
        pending += index.tolist()
        counted.compute(index, float("nan") if at == 4 else 1.0)
        if at % 3 == 2:
            if at == 5:
                gone = pending
            pending = []
            counted.optimizer.step()
            counted.optimizer.zero_grad()
    assert counted.counts == [0.0 if sample in gone else 1.0 for sample in range(24)]
    assert sorted(sample for each in listed(job) for sample in each["indices"]) == sorted(gone)  # type: ignore[attr-defined]


@pytest.mark.parametrize("settings", [{}, SYNC, {"job.compression.push": "topk:0.5"}], ids=["async", "sync", "coded"])
@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_work_without_leased_data_is_left_out_too(connect: Connect, settings: dict[str, Any], bad: float) -> None:
    job = connect(settings=settings | {"job.compression.whole_elements_max": 0})
    first = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    job.register({"a": first, "b": torch.zeros(3, dtype=torch.float64)}, lr=1.0)
    before = job.pull()
    for wrong in (
        {"a": torch.tensor([[0.0, bad], [0.0, 0.0]]), "b": torch.ones(3, dtype=torch.float64)},
        {"a": torch.ones(2, 2), "b": torch.tensor([0.0, 0.0, bad], dtype=torch.float64)},
    ):
        job.push(wrong)
        assert all(torch.equal(value, before[name]) for name, value in job.pull().items())
    job.push({"b": torch.ones(3, dtype=torch.float64)})
    assert job.pull()["b"].tolist() == [-1.0] * 3
    assert status_of(job).not_finite == 2


@BOTH
def test_what_is_not_finite_goes_through_where_it_is_allowed(connect: Connect, settings: dict[str, Any]) -> None:
    job = connect(settings=settings | {"job.nonfinite": "allow"})
    job.register({"a": torch.zeros(2)}, lr=1.0)
    job.push({"a": torch.tensor([1.0, float("nan")])})
    assert str(job.pull()["a"].tolist()) == "[-1.0, nan]"
    assert status_of(job).not_finite == 0


@BOTH
def test_fatal_by_policy_ends_the_job_naming_worker_step_and_parameter(
    connect: Connect, settings: dict[str, Any]
) -> None:
    job = connect(settings=settings | {"job.nonfinite": "fail"})
    job.register({"a": torch.zeros(2), "b": torch.zeros(1)}, lr=1.0)
    job.push({"a": torch.ones(2)})
    with pytest.raises(errors.NonFiniteGradient, match=r"step 1, .*: the gradient of 'b' is not finite") as caught:
        job.push({"a": torch.ones(2), "b": torch.full((1,), INF)})
    assert caught.value.facts["worker"] == str(job._session.caller.incarnation)
    assert status_of(job).state == wire.JOB_STATE_FAILED
    with pytest.raises(errors.NonFiniteGradient):
        job.push({"a": torch.ones(2)})


@BOTH
def test_job_whose_only_worker_keeps_sending_them_fails_and_does_not_wait(
    connect: Connect, settings: dict[str, Any]
) -> None:
    job = connect(settings=settings | {"job.nonfinite_max": 3})
    job.register({"a": torch.zeros(2)}, lr=1.0)
    for value in (INF, INF, 1.0, INF, INF):
        job.push({"a": torch.full((2,), value)})
    with pytest.raises(errors.NonFiniteGradient, match=r"3 gradients in a row .* the loss has diverged"):
        job.push({"a": torch.full((2,), INF)})


@pytest.mark.parametrize("mode", ["async", "bounded", "sync"])
def test_worker_that_keeps_sending_them_is_out_and_the_others_do_all_the_work(mode: str) -> None:
    """Each sample adds 1: those of the bad worker's three batches are missing, and listed; no others are."""
    given = {"job.consistency.mode": mode, "job.workers_expected": 2, "job.nonfinite_max": 3}
    given |= {"job.data.batches_per_data_shard": 4, "job.rank_grace_ms": 0, "membership.heartbeat_ms": 50}
    with yard_of(**given) as join:
        ends: dict[str, object] = {}
        both = threading.Barrier(2)

        def work(name: str, job: sy.Job, counted: Counted) -> None:
            try:
                both.wait(20)
                for (index,) in job.batches(counted.data, batch_size=2):
                    counted.step(index, float("nan") if name == "bad" else 1.0)
                ends[name] = counted.counts
            except errors.ShardyardError as error:
                ends[name] = error
                job.close(error.code)

        made = {name: join() for name in ("good", "bad")}
        threads = [threading.Thread(target=work, args=(name, job, Counted(job, 60))) for name, job in made.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert isinstance(ends["bad"], errors.WorkerQuarantined), ends
        assert "3 gradients in a row" in ends["bad"].what
        shown = status(join.yard)  # type: ignore[attr-defined]
        assert (shown.workers_quarantined, shown.not_finite) == (1, 3)
        found = [sample for each in listed(made["good"]) for sample in each["indices"]]  # type: ignore[attr-defined]
        assert len(found) == len(set(found)) == 6
        counts = ends["good"]
        assert isinstance(counts, list)
        assert [sample for sample, count in enumerate(counts) if count == 0] == sorted(found)
        if mode != "sync":
            assert set(counts) == {0.0, 1.0}
