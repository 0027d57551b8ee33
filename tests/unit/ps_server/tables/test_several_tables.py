"""Pushes to several tables in one call, and look-ups in several: as one table after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from shardyard.domain.errors import TableFull
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard_ps_server.tables.memory.budget import Budget
from shardyard_ps_server.tables.table import Table, TableRead, TableUpdate, look_up_all, push_all

DIM = 4
TABLES = 5
ADMISSIONS = (
    AdmissionSettings(),
    AdmissionSettings(Admission.COUNT, threshold=2),
    AdmissionSettings(Admission.CHANCE, chance=0.5),
    AdmissionSettings(Admission.ESTIMATE, threshold=2, cells=1 << 12),
)


def settings(**more: object) -> TableSettings:
    return TableSettings("t", DIM, "adam", (), 1, rows_max=1 << 14, **more)  # type: ignore[arg-type]


def many(n: int, seed: int) -> np.ndarray:
    return np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, n))


def contents(table: Table) -> dict[int, tuple[bytes, int, int]]:
    return {
        number: (chunk.records[i].tobytes() if i < len(chunk.records) else b"", int(chunk.frequencies[i]), steps)
        for chunk in table.cuts.items()
        for i, (number, steps) in enumerate(zip(chunk.ids.tolist(), chunk.steps.tolist(), strict=True))
    }


def updates(tables: Sequence[Table], step: int) -> list[TableUpdate]:
    """Of different sizes, the second without ids, the third with counts; most ids come again in a later step."""
    found = []
    for number, table in enumerate(tables):
        ids = many((0 if number == 1 else 700) * (number + 1) + step, number)
        gradients = np.random.default_rng(step).standard_normal((ids.size, DIM)).astype(np.float32)
        counts = np.arange(1, ids.size + 1) if number == 2 else None
        found.append(table.update(ids, gradients, step, counts=counts, now_ms=100 * step + number))
    return found


@pytest.mark.parametrize("admission", ADMISSIONS, ids=lambda each: each.kind.name)
@pytest.mark.parametrize("is_tiered", [False, True])
def test_tables_that_are_pushed_to_in_one_call_are_as_those_pushed_to_one_by_one(
    admission: AdmissionSettings, is_tiered: bool
) -> None:
    of = settings(admission=admission, expiry=ExpirySettings(age_ms=10_000))
    budget: Callable[[], Budget | None] = lambda: Budget(1, lambda: os.memfd_create("rows")) if is_tiered else None  # noqa: E731
    together, alone = ([Table(of, budget()) for _ in range(TABLES)] for _ in range(2))
    for step in range(1, 4):
        push_all(updates(together, step))
        for each in updates(alone, step):
            push_all([each])
    assert all(contents(one) == contents(other) for one, other in zip(together, alone, strict=True))
    assert sum(each.rows for each in together) > 1_000
    assert max(each.state.stripes.count for each in together) > 1  # so stripes were full in the middle


def test_updates_with_other_numbers_or_settings_are_applied_as_such() -> None:
    others = TableSettings("other", 2, "sgd", (), 2, rows_max=1 << 12)
    tables, alone = ([Table(settings()), Table(settings()), Table(others)] for _ in range(2))
    ids = many(50, 0)
    for made, call in ((tables, push_all), (alone, lambda given: [push_all([each]) for each in given])):
        given = [
            table.update(ids, np.ones((ids.size, table.settings.dim), np.float32), step)
            for step, table in zip((1, 7, 7), made, strict=True)
        ]
        call(given)
    assert [contents(each) for each in tables] == [contents(each) for each in alone]
    assert [each.state.updates for each in tables] == [1, 7, 7]


def test_a_table_without_room_refuses_before_any_table_changes() -> None:
    small = Table(TableSettings("t", DIM, "sgd", (), 1, rows_max=8))
    tables = [Table(small.settings), small]
    few, more = many(8, 0), many(9, 1)
    with pytest.raises(TableFull):
        push_all(
            [
                table.update(ids, np.ones((ids.size, DIM), np.float32), 1)
                for table, ids in zip(tables, (few, more), strict=True)
            ]
        )
    assert [each.rows for each in tables] == [0, 0]
    for table in tables:  # all were left, and no row is promised any more
        table.push(few, np.ones((few.size, DIM), np.float32), 1)
        assert len(contents(table)) == few.size


def test_a_cut_has_a_table_as_it_was_before_a_push_to_several() -> None:
    tables = [Table(settings()) for _ in range(3)]
    push_all(updates(tables, 1))
    before = contents(tables[2])
    chunks = tables[2].cuts.items()
    first = next(chunks)
    push_all(updates(tables, 2))
    cut = {
        number: chunk.records[i].tobytes() for chunk in (first, *chunks) for i, number in enumerate(chunk.ids.tolist())
    }
    assert cut == {number: record for number, (record, _, _) in before.items()}


def test_look_ups_in_several_tables_are_those_in_each() -> None:
    tables = [Table(settings()) for _ in range(3)] + [Table(TableSettings("other", 2, "sgd", (), 2, rows_max=99))]
    push_all(updates(tables[:3], 1))
    asked = [np.concatenate([many(900, number)[::2], many(9, 77)]) for number in range(4)]
    asked[1] = asked[1][:0]
    outs = [
        np.full((ids.size, table.settings.dim), np.nan, np.float32) for ids, table in zip(asked, tables, strict=True)
    ]
    look_up_all([TableRead(*each) for each in zip(tables, asked, outs, strict=True)])
    for table, ids, out in zip(tables, asked, outs, strict=True):
        alone = np.full_like(out, np.nan)
        table.look_up(np.ascontiguousarray(ids), alone)
        assert (out == alone).all()
        assert np.isfinite(out).all()
