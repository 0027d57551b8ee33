"""Clipping by global norm and by value: training equals torch's, on any number of servers, whoever dies meanwhile."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import shardyard as sy
from shardyard.domain.ids import Rank
from shardyard.domain.pushes import StepVerdict
from shardyard_ps_server.hosting import pulls
from shardyard_ps_server.hosting.hosted_job import HostedJob
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.exchange.request_builder import ServerRequest
from shardyard_worker.exchange.requests import PullSpec, PushRequest
from shardyard_worker.exchange.server_stream import ServerStream
from shardyard_worker.training.variables import StepInput
from tests.integration.training.test_in_process import (
    OPTIMIZERS,
    Mixed,
    assert_same_models,
    batches_of,
    clone_of,
    compute,
    default_dtype,
    mlp,
)
from tests.support.alone import SYNC, SYNC_2, Connect, local_yard
from tests.support.yards import Probes, RoleYard, Script, computed, finish

pytestmark = pytest.mark.usefixtures("alone")

NORM, VALUE = 0.3, 0.05
BY_NORM, BY_VALUE = {"job.clip.norm": NORM}, {"job.clip.value": VALUE}
CLIP = BY_NORM | BY_VALUE
DEADLINE_S = 60.0


def clip(parameters: Any, norm: float = NORM, value: float = VALUE) -> float:
    """torch's, in the order of docs/guides/gradients.md; the norm."""
    found = [parameter for parameter in parameters if parameter.grad is not None]
    if value:
        torch.nn.utils.clip_grad_value_(found, value)
    return float(torch.nn.utils.clip_grad_norm_(found, norm)) if norm else math.nan


@pytest.mark.long("async-norm", "sync-both")
@pytest.mark.parametrize("given", [BY_NORM, BY_VALUE, CLIP], ids=["norm", "value", "both"])
@pytest.mark.parametrize("mode", [{}, SYNC], ids=["async", "sync"])
def test_training_equals_torch_with_its_clipping(
    connect: Connect, mode: dict[str, Any], given: dict[str, float]
) -> None:
    job = connect(settings={"job.block_bytes": 64, "job.partitions": 5} | mode | given)
    model, plain = Mixed().double(), Mixed().double()
    plain.load_state_dict(model.state_dict())
    model, optimizer = job.prepare(model, OPTIMIZERS["adam"](model.groups()))
    theirs = OPTIMIZERS["adam"](plain.groups())
    norm, value = given.get("job.clip.norm", 0.0), given.get("job.clip.value", 0.0)
    assert job.gradient_norm is None
    clipped = 0
    for step, x, y in batches_of(torch.float64):
        compute(plain, theirs, step, x, y)
        total = clip(plain.parameters(), norm, value)
        clipped += total > norm
        theirs.step()
        compute(model, optimizer, step, x, y)
        with default_dtype(torch.float64):
            optimizer.step()
        assert job.gradient_norm == (pytest.approx(total, rel=1e-9) if norm else None)
    assert_same_models(model, plain)
    assert not norm or clipped > 20


@pytest.mark.parametrize(
    "more", [{"job.consistency.mode": "bounded"}, {"worker.exchange": "delayed"}, {"worker.exchange": "overlapped"}]
)
def test_each_push_is_clipped_by_itself_where_it_is_an_update(connect: Connect, more: dict[str, Any]) -> None:
    job = connect(settings=CLIP | {"worker.same_host": "never"} | more)
    model = mlp()
    plain = clone_of(model)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 4, generator=generator), 3 * torch.randn(8, 2, generator=generator)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        given = [parameter.grad.clone() for parameter in model.parameters()]  # what a window makes of them is stale
        optimizer.step()
        for parameter, gradient in zip(plain.parameters(), given, strict=True):
            parameter.grad = gradient
        assert job.gradient_norm == pytest.approx(clip(plain.parameters()), rel=1e-5)
        theirs.step()
    expected = plain.state_dict()
    for name, tensor in job.pull().items():
        assert torch.allclose(tensor, expected[name], rtol=1e-5, atol=1e-7), name


def test_what_is_clipped_in_a_synchronous_job_is_the_mean_of_its_ranks(connect: Connect) -> None:
    job = connect(settings=SYNC_2 | CLIP)
    model = mlp()
    plain = clone_of(model)
    model, optimizer = job.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    theirs = torch.optim.Adam(plain.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(48, 4), 3 * torch.randn(48, 2))
    seen, norms = [], []
    for x, y in job.batches(data, batch_size=4, epochs=3):
        seen.append((x, y))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        norms.append(job.gradient_norm)
    for (x0, y0), (x1, y1), norm in zip(seen[::2], seen[1::2], norms[1::2], strict=True):
        theirs.zero_grad()
        ((plain(x0) - y0).square().mean() / 2 + (plain(x1) - y1).square().mean() / 2).backward()
        assert norm == pytest.approx(clip(plain.parameters()), rel=1e-4)
        theirs.step()
    assert job.step == 18
    assert_same_models(model, plain)


def train(connect: Callable[[], sy.Job], workers: int) -> tuple[dict[str, bytes], list[float | None]]:
    """A synchronous job of two ranks; its values, and the norms that the first worker saw."""
    data = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(3)))
    joined = threading.Barrier(workers)

    def work() -> tuple[dict[str, bytes], list[float | None]]:
        with connect() as job:
            torch.manual_seed(1)
            values = {f"v{index}": torch.zeros(9 + index) for index in range(5)}
            job.register(values, optimizer="adam", lr=0.1)
            joined.wait(DEADLINE_S)
            norms = []
            for (x,) in job.batches(data, batch_size=4):
                total = float(x.sum())
                now = job.pull()
                job.push({name: torch.sin(total + value + torch.arange(len(value))) for name, value in now.items()})
                norms.append(job.gradient_norm)
            return {name: value.numpy().tobytes() for name, value in job.pull().items()}, norms

    with ThreadPoolExecutor(workers) as threads:
        found = [run.result(DEADLINE_S) for run in [threads.submit(work) for _ in range(workers)]]
    assert len({tuple(sorted(values.items())) for values, _ in found}) == 1
    return found[0]


@pytest.mark.parametrize(
    "more",
    [{}, {"worker.same_host": "never"}, {"worker.same_host": "never", "worker.exchange": "overlapped"}],
    ids=["shared", "streams", "prefetch"],
)
def test_promise_6_clipped_bits_are_the_same_on_any_number_of_servers_and_workers(more: dict[str, Any]) -> None:
    found = set()
    for servers, workers in ((1, 1), (2, 2), (3, 1), (4, 2)):
        given = {"yard.servers": servers, "job.partitions": 5, "job.block_bytes": 64, "log.level": "error"}
        given |= {"job.workers_expected": workers} | SYNC_2 | CLIP | more
        with local_yard(given) as (_, connect):
            values, norms = train(connect, workers)
        assert all(norm is not None and norm > 0 for norm in norms[1:])
        found.add(tuple(sorted(values.items())))
    assert len(found) == 1


@pytest.mark.parametrize("brought_to", [0, 1, 2])
def test_verdict_whose_workers_are_gone_is_brought_by_the_next(brought_to: int) -> None:
    """The last contribution is made, and so many servers have the verdict, when the worker that has the rank goes."""
    given = {"yard.servers": 2, "job.partitions": 4, "job.block_bytes": 64, "log.level": "error"}
    with local_yard(given | {"job.workers_expected": 2} | SYNC | BY_NORM) as (_, connect):
        first, second = (connect() for _ in range(2))
        for job in (first, second):
            job.register({f"v{index}": torch.zeros(8) for index in range(4)}, lr=1.0)
        training, strategy = first._loop.trainer, first._loop.strategy
        assert training is not None
        assert isinstance(strategy, SyncStrategy)
        router = training.router
        sending = StepInput([torch.ones(8)] * 4, 1.0, first._loop.settings())
        router.push(training.pushes.build(strategy.ranks.name_of(Rank(0)), sending))
        assert len(router.pull(PullSpec(1, exactly=True)).missing) == 4
        verdict = router._verdict_for(PullSpec(1, exactly=True))
        assert verdict == StepVerdict(0, 32.0)
        streams = list(router._streams.values())[:brought_to]

        def bring(stream: ServerStream) -> ServerRequest | None:
            header = replace(router._requests.header(stream.server), verdict=verdict)
            return ServerRequest(header) if stream in streams else None

        router._exchange(bring, "a verdict to be brought")
        first.close()
        second.push({f"v{index}": torch.ones(8) for index in range(4)})  # on standby: it does not count
        assert (second.step, second.gradient_norm) == (1, None)
        expected = torch.full((8,), -NORM / (math.sqrt(32.0) + 1e-6))
        assert all(torch.allclose(value, expected, rtol=1e-6) for value in second.pull().values())
        second.push({f"v{index}": torch.ones(8) for index in range(4)})
        assert (second.step, second.gradient_norm) == (2, math.sqrt(32.0))
        second.close()


def test_gradients_of_the_script_are_left_as_they_are(connect: Connect) -> None:
    job = connect(settings=CLIP)
    job.register({"a": torch.zeros(4)}, lr=1.0)
    given = torch.tensor([3.0, -4.0, 0.0, 0.01])
    job.push({"a": given})
    assert given.tolist() == torch.tensor([3.0, -4.0, 0.0, 0.01]).tolist()
    assert job.pull()["a"].tolist() == pytest.approx([-VALUE, VALUE, 0.0, -0.01])
    with pytest.raises(sy.errors.DTypeMismatch):
        job.push({"a": torch.zeros(4, dtype=torch.int64)})


def test_codes_are_decoded_before_the_mean_is_clipped(connect: Connect) -> None:
    job = connect(settings=SYNC | CLIP | {"job.compression.push": "bf16", "job.compression.whole_elements_max": 0})
    job.register({"a": torch.zeros(8, 8)}, lr=1.0)
    job.push({"a": torch.full((8, 8), 1.003)})
    assert job.gradient_norm == pytest.approx(VALUE * 8)
    assert job.pull()["a"].flatten().tolist() == pytest.approx([-VALUE * NORM / (VALUE * 8 + 1e-6)] * 64)


def test_a_step_that_needs_no_verdict_takes_one_exchange(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[HostedJob] = []
    real = pulls.hold

    def hold(hosted: HostedJob, *given: Any, **more: Any) -> Any:
        asked.append(hosted)
        return real(hosted, *given, **more)

    monkeypatch.setattr(pulls, "hold", hold)
    for given, exchanges in ((SYNC, 1), (SYNC | BY_VALUE, 1), (SYNC | CLIP, 2)):
        with connect(settings=given | {"job.block_bytes": 64}) as job:
            job.register({f"v{index}": torch.zeros(16) for index in range(4)}, lr=1.0)
            asked.clear()
            for _ in range(3):
                job.push({f"v{index}": torch.ones(16) for index in range(4)})
            assert job.step == 3
        assert (len(asked), len(set(map(id, asked)))) == (exchanges * 3 * 2, 2)  # of two servers


def test_promise_7_who_waits_for_a_verdict_says_whose_square_norms_are_missing(connect: Connect) -> None:
    job = connect(settings=SYNC_2 | BY_NORM | {"job.block_bytes": 64})
    job.register({f"v{index}": torch.zeros(16) for index in range(4)}, lr=1.0)
    training, strategy = job._loop.trainer, job._loop.strategy
    assert training is not None
    assert isinstance(strategy, SyncStrategy)
    router = training.router
    sending = StepInput([torch.ones(16)] * 4, 1.0, job._loop.settings())
    for rank in range(2):  # the other server has heard of none
        shipment = training.pushes.build(strategy.ranks.name_of(Rank(rank)), sending)

        def to_one(stream: ServerStream, shipment: PushRequest = shipment) -> Any:
            first = next(iter(router._streams.values()))
            return router._requests.push(shipment, None, None, stream) if stream is first else None

        router._fan_out.exchange(to_one, lambda: "a push")
    (one, other), answer = router._owned, router.pull(PullSpec(1, exactly=True))
    lacking = f"step 0: the square norms of partitions {', '.join(map(str, router._owned[other]))} (server {other})"
    expected = dict.fromkeys(router._owned[one], lacking)
    expected |= dict.fromkeys(router._owned[other], "logical rank 0, 1 of step 0")
    assert {missing.partition: missing.waiting_for for missing in answer.missing} == expected


# ---- real processes


def begin(yard: RoleYard, probes: Probes, **settings: Any) -> list[tuple[Script, Path]]:
    """Two workers of a synchronous job, with a checkpoint every few steps."""
    settings |= {
        "coordinator": yard.address,
        "job__workers_expected": 2,
        "job__checkpoint__every_steps": 7,
        "job__consistency__mode": "sync",
        "job__consistency__logical_ranks": 2,
        "job__clip__norm": 0.2,
        "job__clip__value": 0.05,
    }
    started = [probes.start("model", "--epochs", "3", "--pause-ms", "30", **settings) for _ in range(2)]
    for script, _ in started:
        script.wait_for("computed 4")
    return started


@pytest.mark.long
@pytest.mark.parametrize("durability", ["checkpoint", "wal"])
def test_promise_6_clipped_bits_are_the_same_when_a_server_and_a_worker_die(
    yard: RoleYard, probes: Probes, durability: str
) -> None:
    undisturbed = [finish(script, out) for script, out in begin(yard, probes, job="one")]
    started = begin(yard, probes, job="two", job__durability=durability)
    yard.coordinator.wait_for("job 'two' (1.2): checkpoint ")
    yard.kill_server(0)
    yard.restart_server(0)
    (victim, _), (survivor, out) = started
    survivor.wait_for(f"computed {computed(survivor) + 3}")
    victim.kill()
    disturbed = finish(survivor, out)
    assert {result["digest"] for result in undisturbed} == {disturbed["digest"]}
    assert disturbed["step"] == undisturbed[0]["step"]
