"""Tables in synchronous jobs: the same bits wherever ranks are computed and partitions lie, each sample once, and a
rank that is computed again reads rows as they were."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.config import configuration
from shardyard.domain.pushes import PushKind
from shardyard_launcher.yard.in_process import COORDINATOR, LocalYard
from shardyard_ps_server.hosting import lookups
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.rows.row_overlay import RowDiff
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.exchange.requests import PullSpec
from shardyard_worker.exchange.row_reads import RowReads
from shardyard_worker.job import connect as worker
from tests.support.alone import SYNC, SYNC_2, Connect

pytestmark = pytest.mark.usefixtures("alone")

NEVER = {"job.checkpoint.url": "never"}
DEADLINE_S = 90.0
RANKS, BATCH, SAMPLES, EPOCHS = 4, 3, 50, 2
LR = 0.5
"""A power of two: a product with it is exact, so torch's fused operations have no other last bit."""
SETTINGS: dict[str, Any] = {
    "job.consistency.mode": "sync",
    "job.consistency.logical_ranks": RANKS,
    "job.partitions": 5,
    "job.block_bytes": 64,
    "log.level": "error",
    **NEVER,
}


class Model(torch.nn.Module):
    """What it learns of words depends on rows that other steps have changed. `age`: of more steps users expire."""

    def __init__(self, optimizer: sy.tables.RowOptimizer | None = None, age: int = 0) -> None:
        super().__init__()
        optimizer = optimizer or sy.tables.SGD(lr=LR)
        words = sy.tables.Table(4, name="words", seed=3, optimizer=optimizer)
        self.words = sy.EmbeddingBag(4, "mean", table=words)
        expiry = sy.tables.Expiry(age_steps=age) if age else None
        self.user = sy.Embedding(2, table=sy.tables.Table(2, name="users", seed=4, optimizer=optimizer, expiry=expiry))
        self.top = torch.nn.Linear(6, 1)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            for parameter in self.top.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.words(ids[:, 1:]), self.user(ids[:, 0])], 1)).tanh()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(-9, 9, (SAMPLES, 4), generator=generator) * 0x1_0000_0001
    return TensorDataset(ids, torch.randn(SAMPLES, 1, generator=generator))


def loss_of(model: Model, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (model(ids) - wanted).square().mean()


def digest(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in model.state_dict().items()}


def learn(
    job: sy.Job, optimizer_of_rows: sy.tables.RowOptimizer | None = None, *, ahead: bool = False, age: int = 0
) -> dict[str, bytes]:
    model = Model(optimizer_of_rows, age)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    asked = (lambda batch: {model.words: batch[0][:, 1:], model.user: batch[0][:, 0]}) if ahead else None
    for ids, wanted in job.batches(data(), batch_size=BATCH, epochs=EPOCHS, shuffle=False, look_ahead=asked):
        optimizer.zero_grad()
        loss_of(model, ids, wanted).backward()
        optimizer.step()
    return digest(model)


def learned_by_one_process(age: int = 0) -> dict[str, bytes]:
    """Ranks one after the other; the mean in their order, weighted by samples; an update of each row. Users that were
    not updated for more than `age` steps begin anew."""
    model, updated, steps = Model(), dict[int, int](), 0
    _watched = sy.tables.Optimizer(model)
    tables = [model.words.table, model.user.table]
    ids, wanted = data().tensors
    for _ in range(EPOCHS):
        for step in torch.arange(SAMPLES).split(RANKS * BATCH):
            dense: list[torch.Tensor] = []
            rows: list[dict[int, torch.Tensor]] = [{}, {}]
            for rank in step.split(BATCH):
                model.zero_grad()
                loss_of(model, ids[rank], wanted[rank]).backward()
                share = len(rank) / len(step)
                parts = [parameter.grad * share for parameter in model.top.parameters()]
                dense = [a + b for a, b in zip(dense, parts, strict=True)] if dense else parts
                for table, mean in zip(tables, rows, strict=True):
                    found, sums = table.gradients.take() or (None, np.empty(0))
                    assert found is not None
                    for number, value in zip(found.ids.tolist(), torch.from_numpy(sums) * share, strict=True):
                        mean[number] = mean[number] + value if number in mean else value
            with torch.no_grad():
                for parameter, gradient in zip(model.top.parameters(), dense, strict=True):
                    parameter.sub_(LR * gradient)
            for table, mean in zip(tables, rows, strict=True):
                chosen = np.array(sorted(mean))
                values = torch.from_numpy(table.rows.look_up(chosen))
                table.put(torch.from_numpy(chosen), values - LR * torch.stack([mean[int(number)] for number in chosen]))
            steps += 1
            updated |= dict.fromkeys(rows[1], steps)
            gone = [number for number, last in updated.items() if age and steps - last > age]
            tables[1].rows.drop(np.array(gone, np.int64))
            for number in gone:
                del updated[number]
    return digest(model)


def together(
    given: dict[str, Any], workers: int, work: Any = learn, yard: LocalYard | None = None
) -> list[dict[str, bytes]]:
    """Each worker a thread, in a yard within this process."""
    loaded = configuration.load(None, {}, SETTINGS | {"job.workers_expected": workers} | given).settings
    inside = loaded.model_copy(update={"coordinator": COORDINATOR})
    yard = LocalYard(loaded)

    def run(number: int) -> Any:
        with worker.connect(inside, network=yard.network) as job:
            return work(job) if work is learn else work(job, number)

    try:
        with ThreadPoolExecutor(workers) as threads:
            return [each.result(DEADLINE_S) for each in [threads.submit(run, number) for number in range(workers)]]
    finally:
        yard.close()


# ---- the same bits


@pytest.mark.parametrize(
    ("servers", "workers", "given"),
    [
        (1, 1, {}),
        (2, 1, {}),
        (4, 1, {}),
        (2, 3, {}),
        (4, 2, {"worker.same_host": "never"}),
        (2, 2, {"worker.exchange": "overlapped", "worker.same_host": "never"}),
    ],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["looked-up", "ahead"])
def test_promise_6_rows_have_the_bits_of_one_process_that_computes_the_ranks_one_after_the_other(
    servers: int, workers: int, given: dict[str, Any], ahead: bool
) -> None:
    expected = learned_by_one_process()
    for found in together({"yard.servers": servers} | given, workers, lambda job, _: learn(job, ahead=ahead)):
        assert found.keys() == expected.keys()
        assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.parametrize(
    ("servers", "workers", "given"),
    [(1, 1, {}), (2, 3, {"worker.same_host": "never"}), (4, 2, {"job.clip.norm": 1e6})],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["looked-up", "ahead"])
def test_promise_6_the_same_rows_expire_wherever_they_are(
    servers: int, workers: int, given: dict[str, Any], ahead: bool
) -> None:
    expected = learned_by_one_process(age=1)
    assert expected != learned_by_one_process()
    for found in together({"yard.servers": servers} | given, workers, lambda job, _: learn(job, ahead=ahead, age=1)):
        assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.long("adam-norm", "adagrad-value")
@pytest.mark.parametrize("given", [{"job.clip.norm": 0.1}, {"job.clip.value": 0.02}], ids=["norm", "value"])
@pytest.mark.parametrize("optimizer", [sy.tables.Adagrad(lr=0.3), sy.tables.Adam(lr=0.1)], ids=["adagrad", "adam"])
def test_promise_6_clipped_rows_are_the_same_on_any_number_of_servers(
    given: dict[str, Any], optimizer: sy.tables.RowOptimizer
) -> None:
    def work(ahead: bool) -> Any:
        return lambda job, _: learn(job, optimizer, ahead=ahead)

    found = [
        each
        for servers, workers, ahead in ((1, 1, False), (2, 2, False), (4, 1, True), (2, 2, True))
        for each in together({"yard.servers": servers} | given, workers, work(ahead))
    ]
    assert all(each == found[0] for each in found)
    assert learned_by_one_process() != found[0]


def test_the_norm_is_that_of_parameters_and_rows(connect: Connect) -> None:
    job = connect(settings=NEVER | SYNC | {"job.clip.norm": 1.0})
    model = torch.nn.ModuleDict(
        {"a": sy.Embedding(4, optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros()), "b": torch.nn.Linear(1, 1)}
    )
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    (3.0 * model["a"](torch.tensor([1, 2, 3, 4])).sum() + 5.0 * model["b"].bias.sum()).backward()
    optimizer.step()
    assert job.gradient_norm == pytest.approx(13.0)
    torch.testing.assert_close(model["a"](torch.tensor([2])), torch.full((1, 4), -3.0 / 13.0), rtol=1e-4, atol=0)


# ---- rows come along


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ({}, 1),
        ({}, 3),
        ({"worker.same_host": "never"}, 1),
        ({"job.compression.pull": "bf16"}, 1),
        ({"job.clip.norm": 1_000.0}, 2),
        ({"yard.servers": 1}, 2),
    ],
)
def test_rows_of_the_next_step_come_with_its_version(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], ranks: int
) -> None:
    look_ups = 0
    look_up = RowReads.look_up

    def counted(reads: RowReads, *of: Any) -> None:
        nonlocal look_ups
        look_ups += 1
        look_up(reads, *of)

    monkeypatch.setattr(RowReads, "look_up", counted)
    job = connect(settings=NEVER | SYNC | {"job.consistency.logical_ranks": ranks} | given)
    optimizer = sy.tables.SGD(lr=1.0)
    model = sy.Embedding(1, optimizer=optimizer, initial=sy.tables.zeros())
    model, moved = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    ids = torch.tensor([5, 7])
    seen = []
    for each in job.look_ahead([ids] * 12, lambda ids: {model: ids}):
        rows = model(each)
        moved.zero_grad()
        (-rows).sum().backward()
        moved.step()
        seen.append(rows.detach().flatten().tolist())
    assert seen == [[step // ranks] * 2 for step in range(12)]
    assert look_ups == ranks  # for the first step
    assert job._metrics.latest["look_ahead_hits"] == pytest.approx((12 - ranks) / 12)


def test_nothing_comes_along_with_backup_workers_whose_steps_bring_no_values(connect: Connect) -> None:
    job = connect(settings=NEVER | SYNC_2 | {"job.consistency.backup_workers": 1})
    layer = torch.nn.Linear(1, 1)
    job.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    assert job._loop.trainer is not None
    for _ in job.look_ahead([1, 2], lambda _: {}):
        assert not job._loop.looks_ahead


# ---- versions


class _DiesError(Exception):
    """The worker does no more."""


def test_rule_b3_a_rank_is_computed_again_from_rows_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker reaches one of two servers with the last rank of a step, which takes the step, and dies."""
    put_back: Counter[bool] = Counter()
    real = RowDiff.put_back

    def watched(self: RowDiff, table: int, ids: np.ndarray, out: np.ndarray) -> None:
        before = out.copy()
        real(self, table, ids, out)
        put_back[bool((before != out).any())] += 1

    monkeypatch.setattr(RowDiff, "put_back", watched)
    left = threading.Event()

    def work(job: sy.Job, _: int) -> dict[str, bytes] | None:
        if job._session.ranks[0].rank == 0:
            return learn(job)
        reach_one_server(job, at=5)
        try:
            learn(job)
        except _DiesError:
            left.set()
            return None
        raise AssertionError("it lives on")

    given = {"yard.servers": 2, "job.consistency.logical_ranks": 2, "job.rank_grace_ms": 0}
    found = [each for each in together(given, 2, work) if each is not None]
    assert left.is_set()
    assert put_back[True] >= 1
    put_back.clear()
    assert found == together(given, 1)
    assert not put_back[True]


def reach_one_server(job: sy.Job, at: int) -> None:
    """The push of that step reaches the first server alone, once that lacks nothing else; then the worker dies."""
    real = job._loop.contribute

    def contribute(sending: Any) -> None:
        training, strategy = job._loop.trainer, job._loop.strategy
        assert training is not None
        assert isinstance(strategy, SyncStrategy)
        if strategy.step < at:
            real(sending)
            return
        router, rank = training.router, strategy.due()
        assert rank is not None
        assert job._loop.feed is not None
        weighted = replace(sending, weight=float(job._loop.feed.require_work().samples))
        shipment = training.pushes.build(strategy.ranks.name_of(rank), weighted)
        assert shipment.kind is PushKind.GRADIENT
        while True:
            missing = router.pull(PullSpec(strategy.step + 1, exactly=True, wait_ms=10)).missing
            if {each.waiting_for for each in missing} == {f"logical rank {rank} of step {strategy.step}"}:
                break
        router.abandon_pull()
        whole = router._fan_out._streams
        router._fan_out._streams = whole[:1]
        try:
            results = router.push(shipment).results
        finally:
            router._fan_out._streams = whole
        assert {result.version.number for result in results} == {strategy.step + 1}
        raise _DiesError

    job._loop.contribute = contribute  # type: ignore[method-assign]


def test_a_look_up_is_of_the_version_that_the_parameters_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int | None, int]] = []
    real = lookups.look_up_rows

    def watched(of_partitions: Sequence[tuple[Partition, Any]], number: int | None, until: float) -> None:
        asked.extend((number, partition.describe()[0].number) for partition, _ in of_partitions)
        real(of_partitions, number, until)

    monkeypatch.setattr(lookups, "look_up_rows", watched)
    together({"yard.servers": 2}, 2)
    assert asked
    assert all(wanted is not None and now - 1 <= wanted <= now for wanted, now in asked)


def test_work_that_was_overtaken_reads_on_and_does_not_count(connect: Connect) -> None:
    """As a paused worker whose ranks others have computed: rows of its version are there no more."""
    job = connect(settings=NEVER | SYNC)
    model = sy.Embedding(1, optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    one = torch.tensor([1])

    strategy = job._loop.strategy
    assert isinstance(strategy, SyncStrategy)

    def step(*, overtaken: bool = False) -> None:
        optimizer.zero_grad()
        model(one).sum().backward()
        assert strategy._mixed is overtaken
        optimizer.step()
        assert not strategy._mixed

    for _ in range(3):
        step()
    strategy.versions.current = 1  # what its parameters were, if it had been paused
    step(overtaken=True)
    assert model(one).item() == -3.0
    assert job.step == 3
    step()
    assert (model(one).item(), job.step) == (-4.0, 4)


# ---- counted once


def totals(job: sy.Job, samples: int, epochs: int, pause_s: float = 0.0) -> list[float]:
    """How often each sample has counted in a row of its own, whatever its share of the mean: an update moves by 1."""
    optimizer = sy.tables.Adam(lr=1.0, betas=(0.0, 0.0), eps=1e-30)
    table = sy.tables.Table(1, name="counts", optimizer=optimizer, initial=sy.tables.zeros())
    model = torch.nn.ModuleDict({"counts": sy.Embedding(1, table=table), "beside": torch.nn.Linear(3, 2)})
    model, moved = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    places = 64
    for (index,) in job.batches(TensorDataset(torch.arange(samples)), batch_size=4, epochs=epochs):
        threading.Event().wait(pause_s)
        moved.zero_grad()
        # one that is made up for may share its step with the same sample of another epoch
        (-model["counts"](index * places + torch.randint(places, ()))).sum().backward()
        moved.step()
    with torch.no_grad():
        return model["counts"](torch.arange(samples * places)).view(samples, places).sum(1).tolist()


def test_promise_2_each_sample_counts_once_in_its_row(connect: Connect) -> None:
    job = connect(settings=NEVER | SYNC_2)
    assert totals(job, 50, 3) == [3.0] * 50


@pytest.mark.parametrize("more", [{}, {"job.clip.norm": 1_000.0}, {"worker.exchange": "overlapped"}])
def test_promise_2_late_ranks_with_backup_workers_count_once_in_their_rows(more: dict[str, Any]) -> None:
    done = threading.Barrier(3)

    def work(job: sy.Job, number: int) -> list[float]:
        found = totals(job, 61, 2, pause_s=0.03 if number == 2 else 0.001)
        done.wait(DEADLINE_S)
        return found

    given = {"job.consistency.logical_ranks": 3, "job.consistency.backup_workers": 1, "yard.servers": 2}
    assert together(given | more, 3, work) == [[2.0] * 61] * 3


def test_work_that_is_not_finite_changes_no_row(connect: Connect) -> None:
    job = connect(settings=NEVER | SYNC_2)
    model = sy.Embedding(1, optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for factors in ((1.0, float("nan")), (float("inf"), float("nan")), (1.0, 1.0)):
        for factor in factors:
            optimizer.zero_grad()
            (model(torch.tensor([1])) * factor).sum().backward()
            optimizer.step()
    assert job.step == 3
    assert model(torch.tensor([1])).item() == -2.0  # a rank whose gradient is left out has no part in the mean


def test_gradients_of_several_batches_are_one_contribution(connect: Connect) -> None:
    found = []
    for batch_size, accumulate in ((4, 1), (2, 2)):
        with connect(settings=NEVER | SYNC_2) as job:
            model = Model(sy.tables.Adagrad(lr=0.5))
            model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
            generator = job.batches(
                TensorDataset(data().tensors[0][:48]), batch_size=batch_size, accumulate=accumulate, shuffle=False
            )
            for (ids,) in generator:
                model(ids).sum().backward()
                if job.step_due:
                    optimizer.step()
                    optimizer.zero_grad()
            assert job.step == 6
            found.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_who_stands_by_knows_the_step_of_what_it_ends_with() -> None:
    def work(job: sy.Job, _: int) -> Any:
        return learn(job), job.step

    # whoever has a rank keeps it
    found = together({"job.consistency.logical_ranks": 1, "job.rank_grace_ms": 60_000}, 3, work)
    assert [each for each in found if each != found[0]] == []
    assert found[0][1] == EPOCHS * -(-SAMPLES // BATCH)  # type: ignore[comparison-overlap]


def test_who_stands_by_evaluates_on_the_newest_rows(connect: Connect) -> None:
    loaded = configuration.load(None, {}, SETTINGS | SYNC | {"job.workers_expected": 1}).settings
    inside = loaded.model_copy(update={"coordinator": COORDINATOR})
    yard = LocalYard(loaded)
    try:
        with worker.connect(inside, network=yard.network) as job, worker.connect(inside, network=yard.network) as other:
            models = []
            for each in (job, other):
                model = sy.Embedding(
                    1, table=sy.tables.Table(1, name="t", optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
                )
                models.append(each.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0)))
            (model, optimizer), (beside, _) = models
            for step in range(4):
                optimizer.zero_grad()
                model(torch.tensor([7])).sum().backward()
                optimizer.step()
                with torch.no_grad():
                    assert beside(torch.tensor([7])).item() == -(step + 1)
            assert torch.equal(beside.state_dict()["table.rows"], torch.tensor([[-4.0]]))
    finally:
        yard.close()
