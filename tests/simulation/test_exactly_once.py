"""Exactly once, under every fault that a seed can think of, with the servers' own stores and ledgers; and that rules A3
and A6 are needed: with one switched off, some seed goes red. What else these seeds could show, the simulated yard shows
(tests/simulator/mutations_of_names.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from shardyard.domain.pushes import PartResult, PushHeader
from shardyard_ps_server.hosting import pushes
from shardyard_ps_server.hosting.admission import Admitted
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.values.versions import Bytes
from tests.simulation.exactly_once import AsyncRun, Violation

SEEDS = 300
SEEDS_AT_ONCE = 50
SEEDS_FOR_A_MUTATION = 150
RED_SEEDS = Path(__file__).with_name("red_seeds.txt")


def red_seeds() -> list[int]:
    lines = (line.split("#")[0].split() for line in RED_SEEDS.read_text().splitlines())
    return [int(words[0]) for words in lines if words]


def check(seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            AsyncRun(seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}; add it to {RED_SEEDS.name}")
            raise


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_AT_ONCE))
def test_promise_1_each_piece_of_work_counts_once_in_each_partition(first: int) -> None:
    check(range(first, first + SEEDS_AT_ONCE))


def test_seeds_that_were_red_once_stay_green() -> None:
    check(red_seeds())


def test_seeds_meet_every_answer_that_a_server_gives() -> None:
    answers: Counter[str] = Counter()
    for seed in range(20):
        run = AsyncRun(seed)
        run.run()
        answers += run.yard.answers
    assert set(answers) == {"applied", "duplicate", "SequenceGap", "StaleToken", "StaleIncarnation", "StaleGeneration"}
    assert min(answers.values()) >= 5


# ---- with a rule switched off


def first_red(make: Callable[[int], AsyncRun]) -> str | None:
    for seed in range(SEEDS_FOR_A_MUTATION):
        try:
            make(seed).run()
        except Violation as violation:
            return str(violation)
    return None


def test_without_the_minimum_of_rule_a6_some_data_shard_is_closed_too_early() -> None:
    assert "is closed; watermarks" in str(first_red(lambda seed: AsyncRun(seed, progress=max)))


def test_without_rule_a3_some_batch_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    push = pushes.push

    def advances_all(store: Store, admitted: Admitted, order: PushHeader, payload: Bytes) -> tuple[PartResult, ...]:
        results = push(store, admitted, order, payload)
        for held in admitted.hosted.partitions.values():
            if held.ledger.next(order.name.key) == order.name.first:
                held.ledger.advance(order.name)
        return results

    monkeypatch.setattr(pushes, "push", advances_all)
    assert "counted 0 times" in str(first_red(AsyncRun))
