"""A small push to several partitions of a server: their rows are copied, changed and read in one call each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shardyard.domain.consistency import Clipping, UpdateMode
from shardyard.domain.errors import Internal, NotFound, ShardyardError, TooLarge
from shardyard.domain.ids import Rank, Token
from shardyard.domain.push_names import PushName, RankSource, SourceKey
from shardyard.domain.pushes import Outcome, StepVerdict
from shardyard.runtime.failpoints import armed
from shardyard_ps_server.partition import next_version, reads
from shardyard_ps_server.partition.contribution import Contribution
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.push import apply_push, apply_to_all
from shardyard_ps_server.partition.reads import look_up_rows
from shardyard_ps_server.partition.sync_step import gathered_part, take_verdict
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows.partition_tables import RowsToRead, push_rows
from shardyard_ps_server.rows.pushed_rows import PushedTableRows
from shardyard_ps_server.tables.loops import push_loops
from shardyard_ps_server.values.versions import aligned_empty
from tests.support.rows_in_pushes import (
    DENSE,
    IDS,
    INITIAL,
    LAYOUT,
    OWNER,
    PACKED,
    PACKED_DATA,
    PARTS,
    RATE,
    closed,
    look_up,
    push,
    push_order,
    server,
    state,
)

__all__ = ["closed"]


def refuse(name: str) -> None:
    raise TooLarge(f"no memory at {name}")


def test_partitions_before_one_that_refuses_have_taken_the_push_and_skip_it_when_it_comes_again() -> None:
    store, other = server(), server()
    with armed("push.before_publish", refuse, at=2), pytest.raises(TooLarge):
        push(store, push_order(0, PACKED), DENSE + PACKED_DATA)
    moved = np.flatnonzero((look_up(store) != INITIAL).all(axis=1))
    assert moved.tolist() == np.flatnonzero(OWNER == 0).tolist()
    push(store, push_order(0, PACKED), DENSE + PACKED_DATA)
    push(other, push_order(0, PACKED), DENSE + PACKED_DATA)
    assert state(store) == state(other)
    assert (look_up(store) == look_up(other)).all()


def test_all_partitions_are_torn_if_their_rows_may_be_applied_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    store = server()
    calls = []

    def fail(pushes: object) -> None:
        calls.append(len(pushes))  # type: ignore[arg-type]
        raise MemoryError

    monkeypatch.setattr(next_version, "push_rows", fail)
    with pytest.raises(MemoryError):
        push(store, push_order(0, PACKED), DENSE + PACKED_DATA)
    assert calls == [2]
    monkeypatch.setattr(next_version, "push_rows", push_rows)
    (hosted,) = store.hosted()
    assert all(isinstance(each.torn, Internal) for each in hosted.partitions.values())
    with pytest.raises(ShardyardError, match="applied in part"):
        look_up(store, ids=IDS)


# ---- steps

CLIPPED = Clipping(norm=5.0)


def partitions_of(**rules: Any) -> list[Partition]:
    made = [Partition(LAYOUT, number, UpdateRules(UpdateMode.SYNC, 1, **rules)) for number in PARTS]
    for each in made:
        each.open_source(SourceKey(RankSource(Rank(0))), Token(1))
        each.open()
    return made


def name(step: int) -> PushName:
    return PushName(SourceKey(RankSource(Rank(0))), Token(1), step, step)


def work(partition: Partition, scale: float = 1.0) -> Contribution:
    payload = aligned_empty(64)
    payload.view(np.float32)[:] = scale
    ids = IDS[partition.id == OWNER]
    gradients = scale * np.linspace(0.1, 1.0, 3 * ids.size, dtype=np.float32).reshape(ids.size, 3)
    rows = (PushedTableRows(0, ids, gradients),)
    return Contribution(1.0, (RATE,), payload, (True,), rows=rows, table_groups=(RATE, RATE))


def take_step(partitions: Sequence[Partition], step: int, scale: float = 1.0) -> None:
    """In all partitions at once, with the verdict if they wait for one."""
    apply_to_all([(each, work(each, scale)) for each in partitions], name(step), lambda: None)
    told = [part for part in (gathered_part(each, step) for each in partitions) if part is not None]
    if told:
        verdict = StepVerdict(step, sum(part.square_norm for part in told))
        take_verdict(partitions, verdict, lambda: None)


def read(partitions: Sequence[Partition], number: int | None = None) -> np.ndarray:
    """The rows of all ids, in the order of partitions."""
    mine = [IDS[each.id == OWNER] for each in partitions]
    found = [np.full((ids.size, 3), np.nan, np.float32) for ids in mine]
    asked = [(each, [RowsToRead(0, *pair)]) for each, *pair in zip(partitions, mine, found, strict=True)]
    look_up_rows(asked, number)
    return np.concatenate(found)


@pytest.mark.parametrize("rules", [{}, {"rows_at_once": True}, {"clipping": CLIPPED}], ids=["sync", "hybrid", "norm"])
def test_a_step_copies_changes_and_reads_the_rows_of_all_partitions_in_one_call_each(
    monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any]
) -> None:
    together, alone = partitions_of(**rules), partitions_of(**rules)
    calls: Counter[str] = Counter()

    def count(loop: str, real: Any) -> None:
        def counted(*given: Any) -> Any:
            calls[loop] += 1
            return real(*given)

        monkeypatch.setattr(push_loops, loop, counted)

    count("push_in", push_loops.push_in)
    count("look_up_in", push_loops.look_up_in)
    for step in range(3):
        calls.clear()
        take_step(together, step, step + 1.0)
        assert calls == {"push_in": 1} | ({} if "rows_at_once" in rules else {"look_up_in": 1})
        for each in alone if "clipping" not in rules else ():
            apply_push(each, name(step), work(each, step + 1.0), lambda: None)
    calls.clear()
    found = read(together, None if "rows_at_once" in rules else 3)
    assert calls == {"look_up_in": 1}
    if "clipping" in rules:  # a partition alone does not know the norm
        return
    assert found.tobytes() == read(alone).tobytes()
    assert [bytes(each.versions.values) for each in together] == [bytes(each.versions.values) for each in alone]


def test_rule_b3_the_version_before_is_read_of_all_partitions() -> None:
    partitions = partitions_of()
    take_step(partitions, 0)
    before = read(partitions)
    take_step(partitions, 1)
    assert read(partitions, 1).tobytes() == before.tobytes()
    assert (read(partitions, 2) < before).all()
    with pytest.raises(NotFound, match="version 0 of partition 0"):
        read(partitions, 0)


def test_rows_of_one_version_are_read_while_a_step_reaches_some_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    partitions = partitions_of()
    take_step(partitions, 0)
    before, real, asked = read(partitions), reads.read_rows, []

    def overtaken(given: Any) -> None:
        real(given)
        asked.append(len(given))
        if len(asked) == 1:
            take_step(partitions[1:], 1)
            take_step(partitions[1:], 2)

    monkeypatch.setattr(reads, "read_rows", overtaken)
    found = read(partitions)
    assert asked == [2, 1]  # again of the one that two steps have overtaken
    kept = (OWNER == 0).sum()
    assert found[:kept].tobytes() == before[:kept].tobytes()
    assert found[kept:].tobytes() == read(partitions[1:], 3).tobytes()


@pytest.mark.parametrize("rules", [{}, {"rows_at_once": True}, {"clipping": CLIPPED}], ids=["sync", "hybrid", "norm"])
def test_a_step_that_one_partition_refuses_is_taken_by_those_before_it_and_once(rules: dict[str, Any]) -> None:
    partitions, others = partitions_of(**rules), partitions_of(**rules)
    with armed("push.before_publish", refuse, at=2), pytest.raises(TooLarge):
        take_step(partitions, 0)
    assert [each.describe()[0].number for each in partitions] == [1, 0]
    assert all(each.torn is None for each in partitions)
    take_step(partitions, 0)
    take_step(others, 0)
    assert [each.describe()[0].number for each in partitions] == [1, 1]
    assert read(partitions).tobytes() == read(others).tobytes()
    result = apply_to_all([(each, work(each)) for each in partitions], name(0), lambda: None)
    assert [each.outcome for each in result] == [Outcome.DUPLICATE] * 2
