"""Rows that come ahead, with the step before: they are those that the forward would have looked up, whatever was
announced, and whoever dies.

Rows double with each step, in whole numbers, so that a push that is lacking in what was read shows in all that follows.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import shardyard as sy
from shardyard.domain import errors
from shardyard.runtime.failpoints import armed
from shardyard_ps_server.service import stream_memory
from shardyard_worker.exchange.buffers import shm_rows
from shardyard_worker.exchange.buffers.shm_rows import ShmRows
from shardyard_worker.rows import row_prefetch
from shardyard_worker.rows.row_prefetch import RowQuery
from shardyard_worker.training.remote_rows import RemoteRows
from tests.support.alone import SYNC, Connect, local_yard
from tests.support.yards import RoleYard, assert_each_sample_counts_once_in_its_row

pytestmark = pytest.mark.usefixtures("alone")

NEVER = {"job.checkpoint.url": "never"}
STREAMS = {"worker.same_host": "never"}
DIM, STEPS = 3, 9
SPREAD = 0x1_0000_0001
DEADLINE_S = 60.0

Batch = tuple[torch.Tensor, torch.Tensor]


class Model(torch.nn.Module):
    """Two features that share a table, looked up one after the other, another table, and a layer beside."""

    def __init__(self) -> None:
        super().__init__()
        users = sy.tables.Table(DIM, name="users", optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
        words = sy.tables.Table(2, name="words", optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
        self.author = sy.Embedding(DIM, table=users)
        self.friends = sy.EmbeddingBag(DIM, "sum", table=users, padding_idx=0)
        self.both = sy.EmbeddingCollection({"words": sy.Embedding(2, table=words)})
        self.top = torch.nn.Linear(4, 4)

    def look_up(self, batch: Batch) -> list[torch.Tensor]:
        author, friends = batch
        return [self.author(author), self.friends(friends), self.both({"words": author})["words"]]

    def asked(self, batch: Batch) -> dict[torch.nn.Module, Any]:
        author, friends = batch
        return {self.author: author, self.friends: friends, self.both: {"words": author}}


def batches(count: int = STEPS) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        # each id once in a batch, so that its row is doubled once
        draw = torch.randperm(24, generator=generator)[:12].reshape(3, 4) * SPREAD
        yield draw[:, 0], draw[:, 1:]


def backward(rows: Sequence[torch.Tensor]) -> None:
    """Each row, or sum of rows, grows by itself and one."""
    torch.autograd.backward(list(rows), [-(each.detach() + 1) for each in rows])


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


def counter() -> sy.Embedding:
    return sy.Embedding(1, optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())


def begin(connect: Connect, settings: dict[str, Any], model: Any) -> tuple[sy.Job, Any, torch.optim.Optimizer]:
    job = connect(settings=settings)
    return job, *job.prepare(model, optimizer_of(model))


def double(job: sy.Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Trains on all batches, with look-ahead."""
    for batch in job.look_ahead(batches(), model.asked):
        optimizer.zero_grad()
        backward(model.look_up(batch))
        optimizer.step()


def count(model: sy.Embedding, optimizer: torch.optim.Optimizer, given: Iterator[Sequence[torch.Tensor]]) -> None:
    """One more for each id."""
    for ids, *_ in given:
        optimizer.zero_grad()
        (-model(ids)).sum().backward()
        optimizer.step()


def trained_alone() -> dict[str, torch.Tensor]:
    model = Model()
    optimizer = sy.tables.Optimizer(model)
    for batch in batches():
        optimizer.zero_grad()
        backward(model.look_up(batch))
        optimizer.step()
    return model.state_dict()


def assert_rows(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name in expected:
        if name.endswith(("ids", "rows")):
            assert torch.equal(found[name], expected[name]), name


@pytest.fixture
def look_ups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each call to the servers for rows alone, how many."""
    seen: list[int] = []
    look_up = RemoteRows._look_up

    def counted(rows: RemoteRows, asked: Sequence[RowQuery]) -> Sequence[np.ndarray]:
        seen.append(sum(each.found.ids.size for each in asked))
        return look_up(rows, asked)

    monkeypatch.setattr(RemoteRows, "_look_up", counted)
    return seen


# ---- a script's own batches


@pytest.mark.parametrize(
    ("given", "alone_calls"),
    [
        ({}, 3),
        (STREAMS, 3),
        ({"yard.servers": 1, "job.partitions": 1}, 3),
        ({"job.consistency.mode": "bounded"}, 3),
        ({"job.compression.pull": "bf16"}, 3),
        ({"worker.exchange": "overlapped"} | STREAMS, 3),
    ],
)
def test_rows_that_come_ahead_are_those_that_would_have_been_looked_up(
    connect: Connect, look_ups: list[int], given: dict[str, Any], alone_calls: int
) -> None:
    job, model, optimizer = begin(connect, NEVER | given, Model())
    double(job, model, optimizer)
    assert len(look_ups) == alone_calls  # those of the first batch
    assert_rows(model.state_dict(), trained_alone())


@pytest.mark.parametrize("given", [{}, STREAMS])
def test_with_a_window_rows_lack_the_push_under_way_and_no_other(
    connect: Connect, look_ups: list[int], given: dict[str, Any]
) -> None:
    job, model, optimizer = begin(connect, NEVER | {"worker.exchange": "delayed"} | given, counter())
    seen = []
    ids = torch.tensor([5])
    for each in job.look_ahead([ids] * STEPS, lambda batch: {model: batch}):
        rows = model(each)
        seen.append(int(rows))
        optimizer.zero_grad()
        (-rows).sum().backward()
        optimizer.step()
    assert seen[2:] == list(range(1, STEPS - 1))
    assert len(look_ups) == 2


def test_batches_of_one_push_come_ahead_together(connect: Connect, look_ups: list[int]) -> None:
    job, model, optimizer = begin(connect, NEVER, counter())
    given = [torch.tensor([index, 7]) for index in range(20, 32)]
    for step, ids in enumerate(job.look_ahead(given, lambda ids: {model.table: ids}, accumulate=3)):
        (-model(ids)).sum().backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert len(look_ups) == 3
    assert model(torch.tensor([7, 20, 31])).flatten().tolist() == [12, 1, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda model, batch: {},
        lambda model, batch: {model.author: batch[0][:2]},
        lambda model, batch: {model.author.table: torch.arange(24) * SPREAD},
        lambda model, batch: {model.both: {"words": batch[0] + 1}},
        lambda model, batch: {model.author: torch.empty(0, dtype=torch.int64)},
    ],
)
def test_a_forward_that_asks_for_other_ids_than_announced_gets_their_rows(connect: Connect, wrong: Any) -> None:
    job, model, optimizer = begin(connect, NEVER, Model())
    for batch in job.look_ahead(batches(), lambda batch: wrong(model, batch)):
        optimizer.zero_grad()
        backward(model.look_up(batch))
        optimizer.step()
    assert_rows(model.state_dict(), trained_alone())


def test_more_rows_than_come_at_a_time_are_looked_up(
    connect: Connect, look_ups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_prefetch, "ROWS_ALONG_BYTES_MAX", 200)
    job, model, optimizer = begin(connect, NEVER, Model())
    double(job, model, optimizer)
    assert len(look_ups) == 3 * STEPS
    assert_rows(model.state_dict(), trained_alone())


def test_a_push_whose_answer_is_lost_brings_the_rows_all_the_same(connect: Connect, look_ups: list[int]) -> None:
    job, model, optimizer = begin(connect, NEVER, Model())

    def lose(name: str) -> None:
        raise errors.ServerUnavailable("the answer is lost")

    with armed("push.before_reply", lose, at=3):
        double(job, model, optimizer)
    assert len(look_ups) == 3
    assert_rows(model.state_dict(), trained_alone())


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[ShmRows]:
    """Those that were made."""
    made: list[ShmRows] = []
    make = ShmRows.__init__

    def counted(room: ShmRows) -> None:
        make(room)
        made.append(room)

    monkeypatch.setattr(ShmRows, "__init__", counted)
    return made


@pytest.mark.parametrize("room_bytes", [1 << 20, 256, 16])
def test_rows_pass_through_shared_memory_as_far_as_they_fit(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, rooms: list[ShmRows], look_ups: list[int], room_bytes: int
) -> None:
    monkeypatch.setattr(shm_rows, "ROWS_ROOM_BYTES", room_bytes)
    monkeypatch.setattr(shm_rows, "_WANTED_AT", room_bytes)
    taken: list[int] = []
    take = ShmRows.take

    def counted(room: ShmRows, places: Sequence[memoryview]) -> None:
        taken.append(sum(map(len, places)))
        take(room, places)

    monkeypatch.setattr(ShmRows, "take", counted)
    job, model, optimizer = begin(connect, NEVER | {"yard.servers": 1}, Model())
    double(job, model, optimizer)
    assert len(rooms) == 1
    with pytest.raises(errors.NotShareable):
        rooms[0].descriptor()
    came_ahead = STEPS - 1
    assert len(taken) == (came_ahead + len(look_ups) if room_bytes > 256 else sum(each <= room_bytes for each in taken))
    assert bool(taken) is (room_bytes > 16)
    assert_rows(model.state_dict(), trained_alone())


def test_a_room_is_not_used_again_after_its_stream_broke_off(connect: Connect, rooms: list[ShmRows]) -> None:
    """Its server may still write there."""
    job, model, optimizer = begin(connect, NEVER | {"yard.servers": 1}, Model())

    def lose(name: str) -> None:
        rooms[0].take = scribbled  # type: ignore[method-assign]
        raise errors.ServerUnavailable("the answer is lost")

    def scribbled(places: Sequence[memoryview]) -> None:
        raise AssertionError("the old room is read")

    with armed("push.before_reply", lose, at=3):
        double(job, model, optimizer)
    assert len(rooms) == 2
    assert_rows(model.state_dict(), trained_alone())


def test_where_rows_cannot_be_shared_they_travel(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, rooms: list[ShmRows]
) -> None:
    def refuse(*_given: Any, **_more: Any) -> None:
        raise errors.NotShareable("for the test")

    monkeypatch.setattr(stream_memory, "attach_received", refuse)
    monkeypatch.setattr(ShmRows, "take", lambda *_: pytest.fail("rows that were not shared are read"))
    job, model, optimizer = begin(connect, NEVER | {"yard.servers": 1}, Model())
    double(job, model, optimizer)
    assert len(rooms) == 1
    assert_rows(model.state_dict(), trained_alone())


def test_rows_that_came_ahead_are_used_until_the_next_step_and_not_after(connect: Connect) -> None:
    job, model, optimizer = begin(connect, NEVER, counter())
    ids = torch.tensor([5])
    ahead = job.look_ahead([ids] * 3, lambda ids: {model: ids})
    for seen, each in enumerate(ahead):
        assert int(model(each)) == seen
        assert int(model(each)) == seen
        optimizer.zero_grad()
        (-model(each)).sum().backward()
        optimizer.step()
    assert int(model(ids)) == 3
    optimizer.zero_grad()
    (-model(ids)).sum().backward()
    optimizer.step()
    assert int(model(ids)) == 4


def test_what_the_scripts_batches_raise_is_raised_in_their_turn(connect: Connect) -> None:
    job, model, optimizer = begin(connect, NEVER, counter())
    ids = torch.tensor([5])

    def given() -> Iterator[torch.Tensor]:
        yield ids
        yield ids
        raise LookupError("no third batch")

    with pytest.raises(LookupError, match="no third batch"):
        count(model, optimizer, job.look_ahead(((ids,) for ids in given()), lambda batch: {model: batch[0]}))
    assert int(model(ids)) == 2


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (lambda model: [model], "gave list; expected what modules will be given"),
        (lambda model: {torch.nn.Linear(1, 1): 1}, "ids for Linear"),
        (lambda model: {sy.Embedding(1): torch.tensor([1])}, "not one of those that were given to job.prepare"),
        (lambda model: {model: torch.tensor([1.5])}, "ids of torch.float32"),
        (lambda model: {sy.EmbeddingCollection({"a": model}): 5}, "features are int"),
        (lambda model: {sy.EmbeddingCollection({"a": model}): {"b": 5}}, "there is no feature 'b'"),
    ],
)
def test_what_cannot_be_announced_is_refused_before_the_push(connect: Connect, said: Any, text: str) -> None:
    job, model, optimizer = begin(connect, NEVER, counter())
    ids = torch.tensor([5])
    for each in job.look_ahead([ids, ids], lambda ids: said(model)):
        (-model(each)).sum().backward()
        with pytest.raises(errors.InvalidRequest, match=text):
            optimizer.step()
        break
    assert int(model(ids)) == 0


def test_two_look_aheads_at_a_time_are_refused(connect: Connect) -> None:
    job, model, optimizer = begin(connect, NEVER, counter())

    def said(batch: Any) -> dict[torch.nn.Module, torch.Tensor]:
        return {model: batch[0]}

    data = TensorDataset(torch.arange(12))
    with pytest.raises(errors.InvalidRequest, match="accumulate 0"):
        job.look_ahead([], said, accumulate=0)
    for _ in job.look_ahead([(torch.tensor([1]),)] * 3, said):
        with pytest.raises(errors.InvalidRequest, match="together with"):
            next(iter(job.batches(data, batch_size=4, look_ahead=said)))
        with pytest.raises(errors.InvalidRequest, match="together with"):
            next(iter(job.look_ahead([], said)))
    with pytest.raises(errors.InvalidRequest, match="together with"):
        count(model, optimizer, job.look_ahead(job.batches(data, batch_size=4), said))


# ---- job.batches


class Drawn(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that are drawn at random, from all generators."""

    def __init__(self, samples: int, fails_at: int = -1) -> None:
        self._samples, self._fails_at = samples, fails_at

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self._fails_at:
            raise LookupError(f"no sample {index}")
        drawn = torch.rand(()) + random.random() + np.random.random()
        return torch.tensor(index * SPREAD), drawn


@pytest.mark.parametrize("given", [{}, {"worker.exchange": "delayed"}, {"job.consistency.mode": "bounded"}])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_batches_and_randomness_are_the_same_with_look_ahead_and_without(
    connect: Connect, look_ups: list[int], given: dict[str, Any], accumulate: int
) -> None:
    found = []
    for ahead in (False, True):
        job, model, optimizer = begin(connect, NEVER | {"job.data.batches_per_data_shard": 12} | given, counter())
        seen = []
        look_ups.clear()
        more: dict[str, Any] = {"look_ahead": lambda batch, model=model: {model: batch[0]}} if ahead else {}
        for index, drawn in job.batches(Drawn(50), batch_size=4, epochs=2, accumulate=accumulate, **more):
            (-model(index)).sum().backward()
            seen.append((index, drawn, torch.rand(2), random.random(), np.random.random()))
            if job.step_due:
                optimizer.step()
                optimizer.zero_grad()
        found.append(seen)
        calls = len(look_ups)
        assert calls == len(seen) if not ahead else calls < len(seen)
        assert (model(torch.arange(50) * SPREAD) == 2).all()
        job.close()
    assert len(found[0]) == len(found[1]) == 26
    for before, after in zip(*found, strict=True):
        for one, other in zip(before, after, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def test_a_sample_that_cannot_be_read_is_told_in_its_turn(connect: Connect) -> None:
    job, model, optimizer = begin(connect, NEVER, counter())
    data = Drawn(12, fails_at=8)
    given = job.batches(data, batch_size=4, shuffle=False, look_ahead=lambda batch: {model: batch[0]})
    with pytest.raises(LookupError, match="no sample 8"):
        count(model, optimizer, given)
    assert model(torch.arange(12) * SPREAD).flatten().tolist() == [1.0] * 8 + [0.0] * 4


def test_the_share_of_rows_that_came_ahead_is_shown(connect: Connect) -> None:
    job, model, optimizer = begin(connect, NEVER, counter())
    for ids in job.look_ahead([torch.arange(4)] * 8, lambda ids: {model: ids[:2]}):
        optimizer.zero_grad()
        (-model(ids)).sum().backward()
        optimizer.step()
    assert job._metrics.latest == {"look_ahead_hits": 2 * 7 / (4 * 8)}


def test_a_synchronous_script_goes_on_without_look_ahead(connect: Connect) -> None:
    job = connect(settings=NEVER | SYNC)
    layer = torch.nn.Linear(1, 1)
    layer, optimizer = job.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    data = TensorDataset(torch.ones(8, 1))
    seen = 0
    for (x,) in job.batches(data, batch_size=4, look_ahead=lambda batch: {}):
        layer(x).sum().backward()
        optimizer.step()
        seen += 1
    assert seen == 2
    assert [*job.look_ahead([1, 2], lambda batch: {})] == [1, 2]


# ---- bounded staleness


@contextmanager
def yard(**given: object) -> Iterator[Callable[[], sy.Job]]:
    """Gives jobs, all of the same name; they must be closed within."""
    with local_yard({"yard.servers": 2, "job.partitions": 4} | given) as (_, connect):
        yield connect


@pytest.mark.parametrize(("staleness", "window"), [(0, 0), (1, 1), (2, 0)])
def test_promise_5_holds_for_rows_that_come_ahead(staleness: int, window: int) -> None:
    """Each worker counts its steps in rows of its own, of all partitions, and looks at those of the others."""
    workers, samples, per_shard = 3, 120, 4
    places = torch.arange(workers * 8).reshape(workers, 8) * SPREAD
    joined = threading.Barrier(workers)
    lacks: list[tuple[int, int]] = []

    def train(place: int) -> int:
        with connect() as job:
            model = sy.Embedding(
                1, table=sy.tables.Table(1, name="t", optimizer=sy.tables.SGD(lr=1.0), initial=sy.tables.zeros())
            )
            model, optimizer = job.prepare(model, optimizer_of(model))
            steps = 0
            data = TensorDataset(torch.arange(samples))
            for _ in job.batches(data, batch_size=1, look_ahead=lambda _: {model: places}):
                if steps == 0:
                    joined.wait(DEADLINE_S)
                rows = model(places)
                there = rows.detach().amin(1).flatten()
                others = [other for other in range(workers) if other != place]
                lacks.append((int(there.sum()), max(steps - int(there[other]) for other in others)))
                optimizer.zero_grad()
                (-rows[place]).sum().backward()
                optimizer.step()
                steps += 1
            return steps

    bounded = {
        "job.consistency.mode": "bounded",
        "job.consistency.staleness": staleness,
        "worker.exchange": ("blocking", "delayed")[window],
    }
    given = bounded | {"job.data.batches_per_data_shard": per_shard} | NEVER
    with yard(**given) as connect, ThreadPoolExecutor(workers) as threads:
        runs = [threads.submit(train, place) for place in range(workers)]
        assert sum(run.result(DEADLINE_S) for run in runs) == samples
    busy = samples - workers * per_shard - workers * (staleness + 1)
    seen = [lack for total, lack in lacks if total < busy]
    assert len(seen) > samples / 2
    assert max(seen) <= staleness


# ---- processes


@pytest.mark.long
@pytest.mark.parametrize("died", ["nobody", "worker", "server"])
def test_promise_1_and_2_hold_for_rows_that_come_ahead_over_grpc(tmp_path: Path, died: str) -> None:
    begun = RoleYard(tmp_path)
    try:
        assert_each_sample_counts_once_in_its_row(tmp_path, begun, died, job__data__batches_per_data_shard=5)
    finally:
        begun.stop()
