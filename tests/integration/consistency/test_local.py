"""Local SGD and DiLoCo: rounds of steps in each worker, held against the same written with torch alone."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import shardyard as sy
from shardyard.domain import errors
from shardyard.domain.compression import PUSH_KINDS, parse_codec
from shardyard.domain.epochs import EpochPlan, order
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.status.report import mode_of
from shardyard_worker.data.seeding import seed_everything
from tests.support.alone import Connect, Counted, local_yard, status
from tests.support.yards import Probes, RoleYard, finish

pytestmark = pytest.mark.usefixtures("alone")

LOCAL = {"job.consistency.mode": "local", "job.consistency.steps": 5}
MEAN = {"job.consistency.outer_lr": 1.0, "job.consistency.outer_momentum": 0.0}
SAMPLES, BATCH, EPOCHS = 52, 4, 3


def ranks(count: int) -> dict[str, Any]:
    return {"job.consistency.logical_ranks": count}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    return TensorDataset(torch.randn(SAMPLES, 6, generator=generator), torch.arange(SAMPLES) % 3)


def network() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 9, bias=False),
        torch.nn.BatchNorm1d(9),
        torch.nn.Tanh(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(9, 3),
    )


MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters(), lr=0.5),  # which servers do not know
}


def train(job: sy.Job, make: MakeOptimizer, *, accumulate: int = 1, epochs: int = EPOCHS) -> dict[str, torch.Tensor]:
    model = network()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.8)
    model, moved, _ = job.prepare(model, optimizer, schedule)
    moved.zero_grad()
    for x, y in job.batches(data(), batch_size=BATCH, epochs=epochs, accumulate=accumulate):
        (torch.nn.functional.cross_entropy(model(x), y) / accumulate).backward()
        if job.step_due:
            moved.step()
            moved.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def alone_with_torch(
    make: MakeOptimizer,
    *,
    count: int,
    steps: int,
    outer: tuple[float, float],
    accumulate: int = 1,
    epochs: int = EPOCHS,
) -> dict[str, torch.Tensor]:
    """The same in one process of torch: what the papers say, rank by rank."""
    rate, momentum = outer
    model = network()
    outer_parameters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    sgd = torch.optim.SGD(outer_parameters, lr=rate, momentum=momentum, nesterov=momentum > 0)
    inner = [make(model) for _ in range(count)]
    schedules = [torch.optim.lr_scheduler.StepLR(each, 4, gamma=0.8) for each in inner]
    units = EpochPlan(SAMPLES, BATCH, count, drop_last=False, accumulate=accumulate, local_steps=steps)
    x, y = data().tensors
    taken = 0
    for round_ in range(units.per_epoch * epochs):
        epoch, index = divmod(round_, units.per_epoch)
        chosen = order(seed=0, feed=0, epoch=epoch, samples=SAMPLES, shuffle=True)
        start = copy.deepcopy(model.state_dict())
        ways, buffers, weights = [], [], []
        for rank in range(count):
            model.load_state_dict(start)
            begin, end = units.span(index, rank)
            if begin == end:
                continue
            inner[rank].zero_grad()
            for number, batch in enumerate(units.batches(end - begin)):
                seed_everything(0, 0, rank, round_, *((number,) if number else ()))
                here = torch.from_numpy(chosen[begin + batch.begin : begin + batch.end])
                (torch.nn.functional.cross_entropy(model(x[here]), y[here]) / accumulate).backward()
                if batch.due:
                    inner[rank].step()
                    inner[rank].zero_grad()
                    schedules[rank].step()
            while schedules[rank].last_epoch < taken + units.steps_in(index):
                schedules[rank].step()
            ways.append(
                [old.detach() - new.detach() for old, new in zip(outer_parameters, model.parameters(), strict=True)]
            )
            buffers.append({name: value.clone() for name, value in model.named_buffers()})
            weights.append(end - begin)
        taken += units.steps_in(index)
        total = sum(weights)
        for at, parameter in enumerate(outer_parameters):
            parameter.grad = sum((way[at] * (weight / total) for way, weight in zip(ways, weights, strict=True)))
        sgd.step()
        after = copy.deepcopy(start)
        for parameter, (name, _) in zip(outer_parameters, model.named_parameters(), strict=True):
            after[name] = parameter.detach().clone()
        for name in buffers[0]:
            if buffers[0][name].is_floating_point():
                after[name] = sum(each[name] * (weight / total) for each, weight in zip(buffers, weights, strict=True))
            else:
                after[name] = torch.stack([each[name] for each in buffers]).amax(0)
        model.load_state_dict(after)
    return model.state_dict()


def assert_close(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_diloco_is_what_the_paper_says(connect: Connect, optimizer: str, count: int) -> None:
    make = OPTIMIZERS[optimizer]
    job = connect(settings=LOCAL | ranks(count))
    mine = train(job, make)
    assert_close(mine, alone_with_torch(make, count=count, steps=5, outer=(0.7, 0.9)))
    assert job.step == EPOCHS * math.ceil(SAMPLES / (BATCH * count))


def test_local_sgd_is_the_mean_of_what_ranks_have_come_to(connect: Connect) -> None:
    make = OPTIMIZERS["adamw"]
    mine = train(connect(settings=LOCAL | MEAN | ranks(2)), make)
    assert_close(mine, alone_with_torch(make, count=2, steps=5, outer=(1.0, 0.0)))


def test_gradients_are_accumulated_within_local_steps(connect: Connect) -> None:
    make = OPTIMIZERS["adamw"]
    mine = train(connect(settings=LOCAL | ranks(2) | {"job.consistency.steps": 2}), make, accumulate=2)
    assert_close(mine, alone_with_torch(make, count=2, steps=2, outer=(0.7, 0.9), accumulate=2))


@pytest.mark.parametrize("count", [1, 2])
def test_rounds_of_one_step_of_sgd_are_synchronous_sgd(connect: Connect, count: int) -> None:
    make = OPTIMIZERS["sgd"]
    local = train(connect(settings=LOCAL | MEAN | ranks(count) | {"job.consistency.steps": 1}), make)
    sync = train(connect(settings={"job.consistency.mode": "sync"} | ranks(count)), make)
    assert_close(local, sync)


def digest(values: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(values[name].numpy().tobytes() for name in sorted(values))).hexdigest()


def test_promise_6_bits_do_not_depend_on_servers_or_ways(connect: Connect) -> None:
    ways: list[dict[str, Any]] = [
        {"yard.servers": 1},
        {"yard.servers": 2},
        {"worker.same_host": "never"},
        {"worker.same_host": "never", "worker.exchange": "overlapped"},
        {"worker.exchange": "overlapped"},
        {"job.block_bytes": 64},
    ]
    found = [digest(train(connect(settings=LOCAL | ranks(2) | way), OPTIMIZERS["adamw"])) for way in ways]
    assert len(set(found)) == 1


# ---- samples


@pytest.mark.parametrize("samples", [1, 7, 40, 41, 47])
@pytest.mark.parametrize("steps", [1, 3, 100])
def test_promise_2_each_sample_counts_once(connect: Connect, samples: int, steps: int) -> None:
    job = connect(settings=LOCAL | MEAN | ranks(1) | {"job.consistency.steps": steps})
    counted = Counted(job, samples)
    numbers = []
    for (index,) in job.batches(counted.data, batch_size=4, epochs=2):
        counted.step(index)
        numbers.append(job.step)
    assert counted.counts == [2.0] * samples
    assert numbers == list(range(1, 2 * -(-samples // 4) + 1))


@pytest.mark.parametrize("samples", [7, 40, 41, 47])
def test_a_rank_weighs_as_much_as_its_samples(connect: Connect, samples: int) -> None:
    counted = Counted(connect(settings=LOCAL | MEAN | ranks(2) | {"job.consistency.steps": 2}), samples)
    for (index,) in counted.job.batches(counted.data, batch_size=4):
        counted.step(index)
    assert counted.counts == expected_counts(samples, count=2, steps=2, epochs=1)


def expected_counts(samples: int, *, count: int, steps: int, epochs: int, batch: int = 4) -> list[float]:
    units = EpochPlan(samples, batch, count, drop_last=False, local_steps=steps)
    expected = [0.0] * samples
    for epoch in range(epochs):
        chosen = order(seed=0, feed=0, epoch=epoch, samples=samples, shuffle=True).tolist()
        for index in range(units.per_epoch):
            shares = [chosen[slice(*units.span(index, rank))] for rank in range(count)]
            for share in shares:
                for sample in share:
                    expected[sample] += len(share) / sum(map(len, shares))
    return [round(value, 9) for value in expected]


def test_drop_last_leaves_whole_steps_not_whole_rounds(connect: Connect) -> None:
    counted = Counted(connect(settings=LOCAL | MEAN | ranks(1)), 30)
    for (index,) in counted.job.batches(counted.data, batch_size=4, drop_last=True):
        counted.step(index)
    assert sum(counted.counts) == 28
    assert counted.job.step == 7


def test_samples_are_reported_and_status_names_the_mode(alone: None) -> None:
    given = {"job.partitions": 2, "log.level": "error", **LOCAL, **ranks(2)}
    with local_yard(given) as (yard, connect):
        with connect() as job:
            train(job, OPTIMIZERS["sgd"], epochs=1)
            found = status(yard)
            assert (found.local_steps, found.logical_ranks) == (5, 2)
            assert mode_of(found) == "local"
            assert job.step == 7
        found = status(yard)
        assert (found.state, found.step, found.samples) == (wire.JOB_STATE_FINISHED, 2, SAMPLES)


def test_a_batch_without_a_step_takes_none_and_the_round_counts(connect: Connect) -> None:
    """As under loss scaling, where a step is left out."""
    counted = Counted(connect(settings=LOCAL | MEAN | ranks(1)), 28)
    left_out: list[int] = []
    for number, (index,) in enumerate(counted.job.batches(counted.data, batch_size=4)):
        if number in (2, 4, 6):  # 4 is the last of its round, 6 of the epoch
            left_out += index.tolist()
            continue
        counted.step(index)
    assert counted.counts == [0.0 if sample in left_out else 1.0 for sample in range(28)]
    assert counted.job.step == 7


def test_a_round_without_any_step_is_an_empty_push(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    counted = Counted(connect(settings=LOCAL | MEAN | ranks(1)), 40)
    with caplog.at_level("WARNING"):
        for number, (index,) in enumerate(counted.job.batches(counted.data, batch_size=4)):
            if number >= 5:
                counted.step(index)
    assert sum(counted.counts) == 20
    assert "no optimizer.step() in a round: logical rank 0 #0" in caplog.text


def test_two_steps_for_one_batch_are_refused(connect: Connect) -> None:
    counted = Counted(connect(settings=LOCAL | ranks(1)), 40)
    batches = counted.job.batches(counted.data, batch_size=4)
    for _ in range(5):
        (index,) = next(batches)
        counted.step(index)
        with pytest.raises(errors.InvalidRequest, match="twice for one batch"):
            counted.optimizer.step()


# ---- what counts


def test_frozen_parameters_have_no_outer_gradient(connect: Connect) -> None:
    """Nor one that had none in the round: the outer momentum leaves it alone."""
    job = connect(settings=LOCAL | ranks(1))
    first, second = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.ones(4))
    _, optimizer = job.prepare(torch.nn.ParameterList([first, second]), torch.optim.SGD([first, second], lr=1.0))
    for number, _ in enumerate(job.batches(TensorDataset(torch.zeros(60)), batch_size=4)):
        second.requires_grad_(number < 5)
        optimizer.zero_grad()
        (first.sum() + (second.sum() if number < 5 else 0)).backward()
        optimizer.step()
        if number == 4:
            kept = second.detach().clone()
    assert torch.equal(second, kept)
    assert kept[0] == pytest.approx(1 - 5 * 0.7 * 1.9)
    assert first[0] < -15


@pytest.mark.parametrize("bad", [(0,), (0, 1)])
def test_a_round_that_is_not_finite_does_not_count(
    connect: Connect, bad: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Of one rank: the round is that of the others. Of all: values stay."""
    job = connect(settings=LOCAL | MEAN | ranks(2) | {"job.consistency.steps": 2})
    value = torch.nn.Parameter(torch.zeros(4))
    _, optimizer = job.prepare(torch.nn.ParameterList([value]), torch.optim.Adam([value], lr=1.0))
    seen: list[float] = []
    with caplog.at_level("WARNING"):
        for number, _ in enumerate(job.batches(TensorDataset(torch.zeros(32)), batch_size=4)):
            rank = number // 2 % 2
            seen.append(float(value[0].detach()))
            optimizer.zero_grad()
            value.sum().backward()
            if number < 4 and rank in bad:
                value.grad[1] = float("nan")
            optimizer.step()
    assert seen[4] == pytest.approx(-2.0 if len(bad) == 1 else 0.0)
    assert torch.isfinite(value).all()
    assert float(value[0].detach()) == pytest.approx(seen[4] - 2.0)
    assert "logical rank 0, round 0: '0' is not finite after 2 steps" in caplog.text
    assert job._metrics.latest["rounds_dropped"] == len(bad)
    listed = job._session.ask(
        methods.LIST_QUARANTINED, wire.ListQuarantinedRequest(job=job._session.caller.job)
    ).batches
    assert len(listed) == len(bad)


OUTER_CODECS = ("bf16", "fp16", "int8", "qsgd:4", "topk:0.3", "randomk:0.5", "onebit", "powersgd:1")


def test_every_codec_is_in_the_list() -> None:
    assert {parse_codec(text).kind for text in OUTER_CODECS} == {*PUSH_KINDS} - {"none"}


@pytest.mark.long("topk:0.3", "powersgd:1", "int8")
@pytest.mark.parametrize("codec", OUTER_CODECS)
def test_all_codecs_carry_outer_gradients(connect: Connect, codec: str) -> None:
    given = {"job.compression.push": codec, "job.compression.whole_elements_max": 0}
    job = connect(settings=LOCAL | MEAN | ranks(2) | given)
    torch.manual_seed(1)
    truth = torch.randn(8, 3)
    x = torch.randn(400, 8)
    model = torch.nn.Linear(8, 3, bias=False)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.02))
    for inputs, wanted in job.batches(TensorDataset(x, x @ truth), batch_size=5, epochs=6):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), wanted).backward()
        optimizer.step()
    start = float(truth.norm())
    assert float((model.weight.detach().T - truth).norm()) < 0.6 * start


def test_residuals_of_outer_gradients_are_remembered_exactly(connect: Connect) -> None:
    """What servers have and what was not sent are together all that was computed."""
    given = {"job.compression.push": "topk:0.2", "job.compression.whole_elements_max": 0}
    job = connect(settings=LOCAL | MEAN | ranks(1) | given)
    matrix = torch.nn.Parameter(torch.zeros(6, 10))
    _, optimizer = job.prepare(torch.nn.ParameterList([matrix]), torch.optim.SGD([matrix], lr=1.0))
    generator = torch.Generator().manual_seed(5)
    added = torch.randint(-8, 9, (50, 6, 10), generator=generator).float()
    for (each,) in job.batches(TensorDataset(added), batch_size=2):
        optimizer.zero_grad()
        (-(matrix * each).sum()).backward()
        optimizer.step()
    rest = job.compression_state()["residual.0"].view(6, 10)
    assert rest.abs().sum() > 0
    assert torch.equal(matrix.detach() - rest, added.sum(0))


def test_an_optimizer_with_a_closure(connect: Connect) -> None:
    job = connect(settings=LOCAL | MEAN | ranks(1) | {"job.consistency.steps": 2})
    model = torch.nn.Linear(3, 1)
    model, optimizer = job.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.5))
    x = torch.randn(16, 3)
    losses = []
    for (inputs,) in job.batches(TensorDataset(x), batch_size=4, epochs=3):

        def closure(inputs: torch.Tensor = inputs) -> float:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return float(loss.detach())

        losses.append(optimizer.step(closure))
    assert losses[-1] < 0.1 * losses[0]
    assert job.step == 12


def test_loss_scaling_works_as_without_a_yard(connect: Connect) -> None:
    job = connect(settings=LOCAL | MEAN | ranks(1))
    counted = Counted(job, 40)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    for number, (index,) in enumerate(job.batches(counted.data, batch_size=4)):
        counted.optimizer.zero_grad()
        scaler.scale(-counted.values[index].sum()).backward()
        if number == 3:
            counted.values.grad[index] = float("inf")
            left_out = index.tolist()
        scaler.step(counted.optimizer)
        scaler.update()
    assert counted.counts == [0.0 if sample in left_out else 1.0 for sample in range(40)]
    assert scaler.get_scale() == 512.0


# ---- a script's own data


def test_a_loader_of_ones_own(connect: Connect) -> None:
    """Rounds of so many steps; the last one, when the job is left, is shorter."""
    job = connect(settings=LOCAL | MEAN | ranks(1) | {"job.checkpoint.url": "never"})
    value = torch.nn.Parameter(torch.zeros(2))
    _, optimizer = job.prepare(torch.nn.ParameterList([value]), torch.optim.SGD([value], lr=1.0))
    rounds = []
    for _ in DataLoader(TensorDataset(torch.zeros(13)), batch_size=1):
        optimizer.zero_grad()
        value.sum().backward()
        optimizer.step()
        rounds.append(job._loop.strategy.step)
    assert job.step == 13
    assert rounds == [0] * 4 + [1] * 5 + [2] * 4
    strategy = job._loop.strategy
    with pytest.raises(errors.InvalidRequest, match="after steps without it"):
        job.batches(TensorDataset(torch.zeros(4)))
    job.close()
    assert strategy.step == 3


@pytest.mark.parametrize("call", ["register", "push"])
def test_variables_without_an_optimizer_here_are_refused(connect: Connect, call: str) -> None:
    job = connect(settings=LOCAL)
    if call == "push":
        model = torch.nn.Linear(2, 2)
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(errors.InvalidRequest, match=f"job.{call} in a job whose job.consistency.mode is local"):
        job.register({"w": torch.zeros(2)}) if call == "register" else job.push({"weight": torch.zeros(2, 2)})


def test_a_scale_for_all_workers_is_refused(connect: Connect) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"use torch\.amp\.GradScaler"):
        connect(settings=LOCAL).scaler()


@pytest.mark.parametrize("name", ["norm", "value"])
def test_clipping_of_outer_gradients_is_refused(connect: Connect, name: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=f"clip.{name} 0 in mode local"):
        connect(settings=LOCAL | {f"job.clip.{name}": 1.0})


# ---- following and stopping


def test_steps_are_told_one_by_one(connect: Connect) -> None:
    job = connect(settings=LOCAL | ranks(2))
    told: list[int] = []
    job.on_step(lambda job: told.append(job.step))
    train(job, OPTIMIZERS["sgd"], epochs=2)
    assert told == list(range(1, 15))


def test_a_job_stops_at_the_end_of_a_round(connect: Connect) -> None:
    job = connect(settings=LOCAL | MEAN | ranks(1))
    counted = Counted(job, 400)
    numbers = []
    for (index,) in job.batches(counted.data, batch_size=4):
        counted.step(index)
        numbers.append(job.step)
        if job.step == 7:
            job.stop("enough")
    assert job.should_stop
    assert numbers[-1] in (10, 15)
    assert sum(counted.counts) == 4 * numbers[-1]


def test_who_leaves_the_loop_in_a_round_has_the_jobs_values(connect: Connect) -> None:
    job = connect(settings=LOCAL | MEAN | ranks(1))
    counted = Counted(job, 40)
    for number, (index,) in enumerate(job.batches(counted.data, batch_size=4)):
        counted.step(index)
        if number == 6:
            break
    assert sum(counted.counts) == 20
    assert job.step == 5


def test_a_checkpoint_in_the_midst_of_a_round_has_the_rounds_before(connect: Connect, tmp_path: Path) -> None:
    job = connect(settings=LOCAL | MEAN | ranks(1) | {"job.checkpoint.url": str(tmp_path)})
    counted = Counted(job, 40)
    for number, (index,) in enumerate(job.batches(counted.data, batch_size=4)):
        counted.step(index)
        if number == 6:
            assert job.checkpoint() == 2
            assert job._session.checkpoint.step == 1
    assert counted.counts == [1.0] * 40


# ---- real processes


SHELL_LOCAL = {"job__consistency__mode": "local", "job__consistency__logical_ranks": 2, "job__rank_grace_ms": 100}
SHELL_MEAN = {"job__consistency__outer_lr": 1.0, "job__consistency__outer_momentum": 0.0}


@pytest.mark.long
def test_promise_2_a_worker_that_is_killed_in_a_round(yard: RoleYard, probes: Probes) -> None:
    """Its rank's round is computed again, from where it began, by the other one."""
    settings = SHELL_LOCAL | SHELL_MEAN | {"coordinator": yard.address, "job__consistency__steps": 8}
    settings |= {"job__workers_expected": 2}
    started = [probes.start("count", "--epochs", "3", "--pause-ms", "20", **settings) for _ in range(2)]
    started[0][0].wait_for("computed 12")  # in the midst of the second round
    started[0][0].kill()
    result = finish(*started[1])
    assert [round(value, 9) for value in result["counts"]] == expected_counts(203, count=2, steps=8, epochs=3)
    (job,) = yard.ended().jobs
    assert (job.state, job.samples) == (wire.JOB_STATE_FINISHED, 3 * 203)


def test_promise_2_rounds_that_a_server_has_lost_are_computed_again(yard: RoleYard, probes: Probes) -> None:
    settings = SHELL_LOCAL | SHELL_MEAN | {"coordinator": yard.address, "job__consistency__steps": 3}
    settings |= {"job__workers_expected": 2, "job__checkpoint__every_steps": 2}
    started = [probes.start("count", "--epochs", "3", "--pause-ms", "20", **settings) for _ in range(2)]
    for script, _ in started:
        script.wait_for("computed 10")
    yard.coordinator.wait_for("checkpoint 1 of step")
    yard.kill_server(1)
    yard.restart_server(1)
    results = [finish(script, out) for script, out in started]
    assert "goes back to checkpoint" in yard.coordinator.output
    for result in results:
        assert [round(value, 9) for value in result["counts"]] == expected_counts(203, count=2, steps=3, epochs=3)


@pytest.mark.long
def test_promise_6_bits_are_the_same_for_one_worker_and_two_and_when_a_server_dies(
    yard: RoleYard, probes: Probes
) -> None:
    """AdamW in the workers: its state goes on where the work does."""
    settings = SHELL_LOCAL | {"coordinator": yard.address, "job__consistency__steps": 4, "job__durability": "wal"}
    options = ("--epochs", "3", "--pause-ms", "20")
    single = finish(*probes.start("model", *options, job="one", **settings))
    settings |= {"job__workers_expected": 2}
    started = [probes.start("model", *options, job="two", **settings) for _ in range(2)]
    for script, _ in started:
        script.wait_for("computed 10")
    yard.kill_server(0)
    yard.restart_server(0)
    results = [finish(script, out) for script, out in started]
    assert {result["digest"] for result in results} == {single["digest"]}
    assert {result["step"] for result in results} == {single["step"]}
