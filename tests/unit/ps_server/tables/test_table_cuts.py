"""Cuts: one moment of a table, while others push, expire and look up; and threads side by side."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from shardyard.domain.errors import NotReady, TableError
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_optimizers import make_group
from shardyard.domain.tables.table_settings import ExpirySettings, TableSettings
from shardyard_ps_server.tables import stripes
from shardyard_ps_server.tables.memory.epoch_reclaim import EpochReclaim
from shardyard_ps_server.tables.memory.layout import BOUND, ENTRIES, FIELDS
from shardyard_ps_server.tables.memory.shared_exclusive import SharedExclusiveLock
from shardyard_ps_server.tables.stripes import PARALLEL_STRIPES
from shardyard_ps_server.tables.table import Table

DIM = 8
IDS = np.unique(np.random.default_rng(9).integers(-(2**63), 2**63 - 1, 60_000))


def make(expiry: ExpirySettings | None = None, rows_max: int = 1 << 20) -> Table:
    return Table(
        TableSettings(
            "t",
            DIM,
            "sgd",
            make_group("sgd", {"lr": 1.0}),
            initial=InitialValues(InitialKind.ZEROS),
            rows_max=rows_max,
            expiry=expiry or ExpirySettings(),
        )
    )


def push(table: Table, ids: np.ndarray, step: int) -> None:
    """Each value of these rows is one more."""
    table.push(ids, -np.ones((ids.size, DIM), np.float32), step)


def contents(chunks: Iterator[object]) -> dict[int, float]:
    found: dict[int, float] = {}
    for chunk in chunks:
        assert (chunk.values == chunk.values[:, :1]).all()  # type: ignore[attr-defined]
        assert not set(found) & set(chunk.ids.tolist())  # type: ignore[attr-defined]
        found.update(zip(chunk.ids.tolist(), chunk.values[:, 0].tolist(), strict=True))  # type: ignore[attr-defined]
    return found


@contextmanager
def beside(*does: Callable[[int], None]) -> Iterator[None]:
    """Each is done again and again in a thread of its own, with a running number; what goes wrong there is raised."""
    stop, errors = threading.Event(), []

    def repeat(do: Callable[[int], None]) -> None:
        number = 0
        try:
            while not stop.is_set():
                do(number)
                number += 1
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(do,)) for do in does]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    for error in errors:
        raise error


# ---- cuts


def test_a_cut_shows_one_moment_between_pushes() -> None:
    """Every push adds one to all rows of the first half, so in any moment all of them are equal; the others are made,
    removed and made again meanwhile."""
    table = make()
    half = IDS[::2].copy()
    push(table, half, 1)
    rest = IDS[1::2].copy()

    def change(number: int) -> None:
        push(table, half, number + 2)
        push(table, rest[(number % 10) * 3_000 :][:3_000], number + 2)
        table.remove(rest[((number + 5) % 10) * 3_000 :][:3_000])

    seen = []
    with beside(change):
        for _ in range(12):
            found = contents(table.cuts.items())
            of_half = {found[number] for number in half.tolist()}
            assert len(of_half) == 1
            seen.append(of_half.pop())
            assert (len(found) - half.size) % 3_000 == 0
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


def test_incremental_cuts_have_what_changed_and_what_went() -> None:
    table, copy = make(), make()

    def follow(since: int | None, removed: list[int]) -> tuple[int, int]:
        size = 0
        with table.cuts.take(since) as cut:
            # after the moment: in the next one
            push(table, np.concatenate([IDS[:10], IDS[10_000:10_020]]), 90)
            assert sorted(cut.removed.tolist()) == sorted(removed)
            copy.remove(cut.removed)
            for chunk in cut:
                size += chunk.ids.size
                copy.load(chunk.ids, chunk.values.copy(), chunk.state.copy(), chunk.frequencies, chunk.steps)
        table.remove(IDS[:10])
        assert contents(copy.cuts.items()) == expected
        return cut.generation, size

    push(table, IDS[1_000:], 1)
    expected = contents(table.cuts.items())
    generation, size = follow(None, [])
    assert size == IDS.size - 1_000
    push(table, IDS[2_000:2_100], 2)
    push(table, IDS[20:30], 2)
    table.remove(IDS[5_000:5_050])
    table.remove(IDS[2_000:2_001])
    expected = contents(table.cuts.items())
    gone = [*IDS[:10].tolist(), *IDS[5_000:5_050].tolist(), int(IDS[2_000])]
    following, size = follow(generation, gone)
    assert (following, size) == (generation + 1, 109 + 20)
    expected = contents(table.cuts.items())
    assert follow(following, IDS[:10].tolist()) == (following + 1, 20)


def test_one_cut_at_a_time() -> None:
    table = make()
    push(table, IDS, 1)
    cut = table.cuts.take()
    with pytest.raises(NotReady, match="a cut"):
        table.cuts.take()
    with pytest.raises(NotReady, match="a cut"):
        next(table.cuts.items())
    assert len(contents(iter(cut))) == IDS.size
    assert len(contents(table.cuts.items())) == IDS.size


def test_a_cut_that_was_given_up_is_none_in_the_chain() -> None:
    table = make()
    push(table, IDS, 1)
    first = table.cuts.take()
    list(first)
    push(table, IDS[:500], 2)
    with table.cuts.take(first.generation) as second:
        next(iter(second))
        push(table, IDS, 3)
    for since in (first.generation, second.generation, 99):
        with pytest.raises(TableError, match="take a cut of all"):
            table.cuts.take(since)
    assert set(contents(table.cuts.items()).values()) == {2, 3}
    third = table.cuts.take()
    assert len(contents(iter(third))) == IDS.size
    with table.cuts.take(third.generation) as fourth:
        assert list(fourth) == []


def test_items_leave_the_chain_as_it_is() -> None:
    table = make()
    push(table, IDS, 1)
    first = table.cuts.take()
    list(first)
    push(table, IDS[:77], 2)
    list(table.cuts.items())
    assert next(table.cuts.items()).ids.size
    with table.cuts.take(first.generation) as second:
        assert len(contents(iter(second))) == 77


def test_removals_are_not_remembered_before_the_first_cut() -> None:
    table = make()
    push(table, IDS, 1)
    table.remove(IDS[:100])
    assert not table.cuts._changes.removed  # or the memory of a table without checkpoints would grow for ever
    first = table.cuts.take()
    list(first)
    assert first.removed.size == 0
    table.remove_expired(table.expiry.expiring(1, 1 << 40).ids)
    table.remove(IDS[:200])
    with table.cuts.take(first.generation) as second:
        assert sorted(second.removed.tolist()) == IDS[100:200].tolist()


def test_what_expires_is_in_the_cut_before_and_removed_in_the_next() -> None:
    table = make(ExpirySettings(age_steps=5))
    push(table, IDS, 1)
    push(table, IDS[:100], 9)
    first = table.cuts.take()
    gone = table.expiry.expiring(9, 1 << 40).ids
    table.remove_expired(gone)
    assert gone.size == IDS.size - 100
    assert len(contents(iter(first))) == IDS.size
    with table.cuts.take(first.generation) as second:
        assert sorted(second.removed.tolist()) == sorted(gone.tolist())


def test_an_id_that_was_removed_twice_since_is_told_once() -> None:
    """A checkpoint in which an id comes twice is damaged."""
    table = make()
    push(table, IDS, 1)
    first = table.cuts.take()
    list(first)
    for step in (2, 3):
        table.remove(IDS[:100])
        push(table, IDS[:100], step)
    table.remove(IDS[50:150])
    with table.cuts.take(first.generation) as second:
        assert second.removed.tolist() == IDS[:150].tolist()
        assert len(contents(iter(second))) == 50


# ---- threads


def test_two_threads_lose_nothing_and_readers_see_whole_rows() -> None:
    """Gradients are whole numbers, so sums do not depend on the order; a row of which a part is older shows."""
    table = make()
    pushes = 20
    rng = np.random.default_rng(0)
    batches = [[rng.permutation(IDS)[:20_000] for _ in range(pushes)] for _ in range(2)]
    outs = np.empty((20_000, DIM), np.float32)

    def read(number: int) -> None:
        table.look_up(batches[number % 2][number % pushes], outs)
        assert (outs == outs[:, :1]).all()
        assert outs.min() >= 0
        assert outs.max() <= 2 * pushes

    def write(of: int) -> None:
        for step, ids in enumerate(batches[of], start=1):
            push(table, ids, step)

    with beside(read):
        threads = [threading.Thread(target=write, args=(of,)) for of in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    counts = dict(zip(*np.unique(np.concatenate([*batches[0], *batches[1]]), return_counts=True), strict=True))
    assert contents(table.cuts.items()) == {int(number): float(count) for number, count in counts.items()}
    assert table.state.stripes.count >= PARALLEL_STRIPES


def test_who_finds_a_stripe_in_which_another_has_made_room_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads find it full; while the second one took memory, the first one would fill it again, and it would be
    doubled where it should split."""
    table = make()
    push(table, IDS, 1)
    fields = table.state.memory.stripes.reshape(-1, FIELDS)[: table.state.stripes.count]
    with_room = np.flatnonzero(fields[:, ENTRIES] < fields[:, BOUND])
    assert with_room.size > PARALLEL_STRIPES // 2
    before = table.use().homes, table.state.stripes.count

    def no_room(homes: int) -> object:
        raise AssertionError(f"memory for {homes} homes")

    monkeypatch.setattr(stripes, "_room", no_room)
    for stripe in with_room.tolist():
        table.state.stripes.make_room(stripe)
    assert (table.use().homes, table.state.stripes.count) == before


def test_threads_that_remove_and_make_rows_share_no_row() -> None:
    table = make(ExpirySettings(age_steps=1))
    parts = [IDS[of::3].copy() for of in range(3)]

    def churn(of: int) -> Callable[[int], None]:
        def do(number: int) -> None:
            push(table, parts[of], number + 1)
            out = np.empty((parts[of].size, DIM), np.float32)
            table.look_up(parts[of], out)
            assert (out == 1).all()
            assert table.remove(parts[of]).size == parts[of].size

        return do

    with beside(churn(0), churn(1)):
        for step in range(6):
            push(table, parts[2], 100 + step)
            assert len(contents(table.cuts.items())) >= parts[2].size
            table.remove(parts[2])
    assert table.rows == 0


def test_stripes_that_split_under_a_batch_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard_ps_server.tables.stripes.ENTRIES_MAX", 300)
    table = make()

    def write(of: int) -> Callable[[int], None]:
        return lambda number: push(table, IDS[(number % 6) * 10_000 + of :: 2][:5_000], 1)

    with beside(write(0), write(1)):
        while table.state.stripes.count <= 100:
            found = contents(table.cuts.items())
            assert len(found) <= IDS.size
    found = contents(table.cuts.items())
    out = np.empty((IDS.size, DIM), np.float32)
    table.look_up(IDS, out)
    assert out[:, 0].tolist() == [found.get(number, 0.0) for number in IDS.tolist()]
    assert set(found) <= set(IDS.tolist())


# ---- who may be where


def test_who_is_alone_waits_for_those_inside_and_others_wait_for_it() -> None:
    gate, order, inside = SharedExclusiveLock(), [], threading.Event()

    def alone() -> None:
        with gate.alone():
            order.append("alone")

    def together() -> None:
        with gate.together:
            order.append("together")

    with gate.together:
        first = threading.Thread(target=alone)
        first.start()
        while not gate._alone:
            inside.wait(0.001)
        second = threading.Thread(target=together)
        second.start()
        order.append("left")
    first.join(10)
    second.join(10)
    assert order == ["left", "alone", "together"]


def test_memory_is_kept_until_all_who_read_then_have_left() -> None:
    class Memory:
        pass

    retirement, gone = EpochReclaim(), []

    def retire(name: str) -> None:
        memory = Memory()
        memory.__dict__["end"] = type("End", (), {"__del__": lambda _: gone.append(name)})()
        retirement.retire(memory)

    retire("nobody reads")
    assert gone == ["nobody reads"]
    with retirement.reading():
        retire("first")
        with retirement.reading():
            retire("second")
        assert gone == ["nobody reads"]
    with retirement.reading():
        gc.collect()
        assert retirement.kept == 0 or gone == ["nobody reads"]
    assert gone == ["nobody reads"]  # who reads waits for no memory to be unmapped
    retirement.free()
    assert sorted(gone) == ["first", "nobody reads", "second"]
    retire("last")
    assert sorted(gone) == ["first", "last", "nobody reads", "second"]


def test_readers_who_come_all_the_time_keep_nothing_for_ever() -> None:
    retirement = EpochReclaim()
    readers = [retirement.reading() for _ in range(8)]
    readers[0].__enter__()
    retirement.retire(object())
    for before, after in itertools.pairwise(readers):
        after.__enter__()
        before.__exit__(None, None, None)
    assert retirement.kept == 0
    readers[-1].__exit__(None, None, None)
