"""The training script of a simulated worker, over `shardyard.connect`'s job."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from shardyard.config.settings import (
    Settings,
)
from shardyard.domain.push_names import DataShardSource, PushName
from shardyard_worker.job import connect as worker_job
from shardyard_worker.training.variables import StepInput
from tests.support.pulling import delivered

from .rows import NAME as ROWS
from .rows import SHARED, SHARED_COUNTED, Rows
from .state import Yard
from .world import current

STOP_CHANCE = 0.1
"""That a worker stops the job after a batch, in jobs that are to be stopped."""
SYNC_ELEMENTS = 5
"""Elements of each variable of a synchronous job."""


def train(yard: Yard, settings: Settings) -> None:
    plan = yard.plan
    names = [f"v{p}" for p in range(plan.partitions)]
    size = plan.coordinates if plan.counts else SYNC_ELEMENTS
    with worker_job.connect(settings, owns_process=plan.drains_workers) as job:
        if plan.drains_workers:
            yard.told_to_leave[current().process] = functools.partial(job._session.drain.begin, "SIGTERM")
            yard.members[current().process] = job._session.caller.incarnation
        firsts = torch.zeros(size, dtype=torch.float64)
        rows = Rows(plan.rows, plan.row_coordinates, plan.partitions, plan.lives) if plan.rows else None
        if rows is not None:  # job.prepare does this for the tables of a model
            job._loop.begin = functools.partial(job._loop.begin, tables=rows.tables)  # type: ignore[method-assign]
        model, optimizer = torch.nn.ParameterDict(), None
        if plan.local_steps:
            model.update({name: torch.nn.Parameter(firsts.clone()) for name in names})
            _, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        else:
            job.register(dict.fromkeys(names, firsts), **_optimizer(yard))
        dataset = TensorDataset(torch.arange(plan.samples))
        ahead = functools.partial(_ahead, yard, rows) if rows is not None and plan.looks_ahead else None
        if plan.pulls_ahead is not None:
            _train_sampled(yard, job, names, size, dataset)
        for _ in range(plan.feeds if plan.pulls_ahead is None else 0):
            batches = job.batches(dataset, batch_size=plan.batch, epochs=plan.epochs, look_ahead=ahead)
            # otherwise a loop that ends by an error is closed when its traceback is collected
            with contextlib.closing(batches):
                if plan.local_steps:
                    _train_locally(yard, model, optimizer, batches)
                elif plan.mode == "async" and not plan.takes_steps:
                    _train_async(yard, job, names, size, rows, batches)
                elif plan.counts:
                    _train_counting(yard, job, names, size, rows, batches)
                else:
                    _train_sync(yard, job, names, rows, batches)
        values = {name: value.numpy().tobytes() for name, value in job.pull().items()}
        if rows is not None:
            values[ROWS] = rows.everything()
        yard.finished[current().process.host] = values
        yard.world.say(f"{current().process} has finished")


def _optimizer(yard: Yard) -> dict[str, Any]:
    match yard.plan.optimizer:
        case "momentum":
            return {"optimizer": "sgd", "lr": 0.1, "momentum": 0.5}
        case "adam":
            return {"optimizer": "adam", "lr": 0.1}
        case "lion":  # each step adds 1 where a sample counts, whatever its share of the mean
            return {"optimizer": "lion", "lr": 1.0, "beta1": 0.0, "beta2": 0.0}
        case _ if yard.plan.mode == "sync":
            return {"optimizer": "sgd", "lr": 0.1}
    return {"optimizer": "sgd", "lr": 1.0}


def _ahead(yard: Yard, rows: Rows, batch: Any) -> dict[torch.nn.Module, torch.Tensor]:
    """The rows of a later batch. Its epoch is not known, so the rows of all epochs."""
    (chosen,), plan = batch, yard.plan
    places = torch.arange(0, plan.coordinates, plan.samples)
    ids = _row_ids(yard, rows, (chosen[:, None] + places).flatten())
    return rows.announced(np.concatenate([ids, rows.last]) if plan.hybrid else ids)


def _row_ids(yard: Yard, rows: Rows, coordinates: torch.Tensor) -> Any:
    """The ids that the samples at these coordinates look up, if rows count."""
    if yard.plan.shares_rows:
        return np.concatenate([rows.ids(coordinates % SHARED_COUNTED), rows.last])
    return rows.ids(coordinates)


def _count_in_rows(yard: Yard, rows: Rows, coordinates: torch.Tensor) -> None:
    ids = _row_ids(yard, rows, coordinates)
    _check_counts(yard, rows.look_up(ids))
    rows.add(ids, -1.0)


def _check_counts(yard: Yard, found: Any) -> None:
    """Checks that no row has counted twice."""
    most = yard.plan.coordinates if yard.plan.shares_rows else 1
    if not np.isin(found, np.arange(most + 1)).all():
        yard.world.violations.append(f"{current().process} has looked up {found.tolist()}")


def _judge_pushes(yard: Yard, step: int, pushes: int) -> None:
    """Checks a step of a hybrid job that has counted. `pushes`: how many pushes are in the rows on which it was
    computed, in the partition that has fewest. All pushes of the steps before must be there."""
    least = 0 if yard.undisturbed is None else yard.undisturbed.pushes.get(step, 0)
    if pushes < least:
        yard.world.violations.append(
            f"{current().process} has computed step {step} on rows with {pushes} pushes, and not {least}"
        )


def _train_async(yard: Yard, job: Any, names: list[str], size: int, rows: Rows | None, batches: Iterable[Any]) -> None:
    plan, world = yard.plan, yard.world
    gradient = torch.zeros(size, dtype=torch.float64)
    for (chosen,) in batches:
        name = job._loop.feed.work.name
        source = name.key.source
        coordinates = chosen + yard.plan.first_coordinate(source.feed, source.epoch)
        if name.first == name.last:
            gradient = torch.zeros(size, dtype=torch.float64)
        gradient[coordinates] -= 1.0
        if rows is not None:
            if name.first == name.last:
                rows.clear()
            _count_in_rows(yard, rows, coordinates)
        if plan.wrong == "nan" and yard.plan.is_wrong(source, name.last):
            gradient[chosen[0]] = float("nan")
        if plan.compute:
            world.pause(world.rng.randrange(plan.compute))
        if plan.lag and current().process.host == "worker-0":
            world.pause(world.rng.randrange(plan.lag))
        batches_there = yard.plan.batches_of(source)
        left = batches_there - 1 - name.last
        dropped = yard.plan.drops_last_of(source)
        if left == 0 and dropped:
            continue
        overflows = plan.wrong == "overflow" and name.first == name.last and yard.plan.is_wrong(source, name.last)
        alone = overflows or (plan.wrong == "overflow" and yard.plan.is_wrong(source, name.last + 1))
        # what is accumulated before a data shard's last batches does not count if all of those are in quarantine
        alone = alone or plan.shares_rows or _are_left_out(yard, source, range(name.last + 1, batches_there - dropped))
        if left == 0 or (left == 1 and dropped) or alone or world.rng.random() > 0.2:
            _push(yard, job, dict.fromkeys(names, gradient), rows, overflow=overflows)
            gradient = torch.zeros(size, dtype=torch.float64)
        _stop_by_chance(yard, job)


def _are_left_out(yard: Yard, source: DataShardSource, batches: range) -> bool:
    """Whether all of them are in quarantine."""
    left_out = next(reversed(yard.left_out.values()), set())
    return all(left_out.issuperset(yard.plan.coordinates_of(source, batch)) for batch in batches)


def _train_sync(yard: Yard, job: Any, names: list[str], rows: Rows | None, batches: Iterable[Any]) -> None:
    world = yard.world
    for (chosen,) in batches:
        coordinates = _planned(yard, job, chosen)
        # from torch's own generator, which the feed has seeded (rule B5). All simulated processes share it, so this
        # task draws before it pauses
        noise = {key: torch.randn(SYNC_ELEMENTS, dtype=torch.float64) for key in names}
        generation = job._loop.trainer.router.generation
        values = job.pull()
        yard.versions[job.step] = {name: value.numpy().tobytes() for name, value in values.items()}
        total = float(torch.cat([values[key] for key in names]).sum()) + float(chosen.sum())
        step, pushes = job._loop.feed.work.name.first, None
        if rows is not None and yard.plan.hybrid:
            pushes = _count_pushes(yard, rows, coordinates)
            yard.pushes[step] = min(pushes, yard.pushes.get(step, pushes))
        elif rows is not None:
            total += _look_at_rows(yard, rows, coordinates, total)
        sent = {key: torch.sin(total + values[key]) + noise[key] for key in names}
        if yard.plan.compute:
            world.pause(world.rng.randrange(yard.plan.compute))
        wrong = (job.step + int(chosen[0])) % 4 == 1 and yard.plan.wrong
        if wrong == "nan":
            sent[names[-1]][0] = float("nan")
        _push(yard, job, sent, rows, overflow=wrong == "overflow")
        if (
            pushes is not None and job._loop.trainer.router.generation == generation
        ):  # otherwise the step may not have counted
            _judge_pushes(yard, step, pushes)
        _stop_by_chance(yard, job)


def _train_locally(yard: Yard, model: torch.nn.ParameterDict, optimizer: Any, batches: Iterable[Any]) -> None:
    """Steps of this process's own optimizer, which keeps no state: any process continues a rank with the same bits."""
    world = yard.world
    for (chosen,) in batches:
        noise = {name: torch.randn(SYNC_ELEMENTS, dtype=torch.float64) for name in model}
        total = sum(float(value.detach().sum()) for value in model.values()) + float(chosen.sum())
        if yard.plan.compute:
            world.pause(world.rng.randrange(yard.plan.compute))
        for name, value in model.items():
            value.grad = torch.sin(total + value.detach()) + noise[name]
        optimizer.step()


def _count_pushes(yard: Yard, rows: Rows, coordinates: torch.Tensor) -> int:
    """Looks rows up and adds gradients, where rows are updated as they come. Returns how many pushes the rows have,
    in the partition that has fewest."""
    rows.clear()
    ids = np.concatenate([rows.ids(coordinates), rows.last])
    found = rows.look_up(ids)
    _check_counts(yard, found[: -yard.plan.partitions])
    rows.add(ids, float(-yard.plan.ranks))
    return int(found[-yard.plan.partitions :].min())


def _look_at_rows(yard: Yard, rows: Rows, coordinates: torch.Tensor, total: float) -> float:
    """Looks rows up and adds gradients. Returns a number on which the gradients of variables depend."""
    rows.clear()
    ids = rows.ids(coordinates % SHARED)
    found = rows.look_up(ids)
    rows.add(ids, np.sin(found + np.float32(total)))
    return float(found.sum(dtype=np.float64))


def _planned(yard: Yard, job: Any, chosen: torch.Tensor) -> torch.Tensor:
    """The coordinates of a batch, in a job that takes steps at some time. In a synchronous job a batch may make up
    for a dropped one."""
    feed, name = job._loop.feed, job._loop.feed.work.name
    if isinstance(name.key.source, DataShardSource):
        return chosen + yard.plan.first_coordinate(feed._number, name.key.source.epoch)
    planned = feed._makeup.batch(name.key.source.rank, name.first)
    epoch, _, _ = feed._plan.span(planned.step, planned.rank)
    return chosen + yard.plan.first_coordinate(feed._number, epoch)


def _push(yard: Yard, job: Any, gradients: dict[str, torch.Tensor], rows: Rows | None, *, overflow: bool) -> None:
    """Pushes gradients. Those of an overflow are sent, too, so that it shows if they count."""
    if rows is None and not overflow:
        job.push(gradients)
        return
    settings = job._loop.settings()
    sent = [gradients[variable.spec.name] for variable in job._loop.trainer.variables]
    taken = None if rows is None else rows.take()
    job._loop.contribute(StepInput(sent, 1.0, settings, overflow=overflow, rows=None if overflow else taken))


def _train_counting(
    yard: Yard, job: Any, names: list[str], size: int, rows: Rows | None, batches: Iterable[Any]
) -> None:
    """Trains a job in which a sample always adds the same, whatever its share of a step."""
    world = yard.world
    gradient = torch.zeros(size, dtype=torch.float64)
    for (chosen,) in batches:
        name = job._loop.feed.work.name
        coordinates = _planned(yard, job, chosen)
        if name.first == name.last:
            gradient = torch.zeros(size, dtype=torch.float64)
        gradient[coordinates] = -1.0
        if rows is not None:
            rows.clear()
            _count_in_rows(yard, rows, coordinates)
        if yard.plan.compute:
            world.pause(world.rng.randrange(yard.plan.compute))
        if _accumulates(yard, name):
            continue
        _push(yard, job, dict.fromkeys(names, gradient), rows, overflow=False)
        _stop_by_chance(yard, job)


def _train_sampled(yard: Yard, job: Any, names: list[str], size: int, dataset: TensorDataset) -> None:
    plan, world = yard.plan, yard.world
    assert plan.pulls_ahead is not None
    sampler = job.sampler(dataset, batch_size=plan.batch)
    try:
        for feed in range(plan.feeds):
            for chosen in delivered(sampler, plan.pulls_ahead):
                gradient = torch.zeros(size, dtype=torch.float64)
                gradient[chosen + plan.first_coordinate(feed, 0)] = -1.0
                if plan.compute:
                    world.pause(world.rng.randrange(plan.compute))
                job.push(dict.fromkeys(names, gradient))
                _stop_by_chance(yard, job)
    finally:
        # otherwise a loop that ends by an error is closed when its traceback is collected
        if job._loop.sampled is not None:
            job._loop.sampled.close()


def _accumulates(yard: Yard, name: PushName) -> bool:
    """Whether a batch of a data shard is pushed together with the next one. Partitions that go back then count
    another number of updates than the others."""
    source = name.key.source
    if not (yard.plan.takes_steps and isinstance(source, DataShardSource)):
        return False
    return name.last < yard.plan.batches_of(source) - 1 and yard.world.rng.random() < 0.3


def _stop_by_chance(yard: Yard, job: Any) -> None:
    if yard.plan.stops and yard.world.rng.random() < STOP_CHANCE:
        job.stop("by chance")
