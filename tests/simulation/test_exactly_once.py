"""Exactly once, under every fault that a seed can think of, with the servers' own stores and ledgers; and that each
rule is needed: with one switched off, some seed goes red."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import pytest

from shardyard.domain.errors import SequenceGap
from shardyard.domain.push_names import PushName
from shardyard.domain.pushes import PartResult, PushHeader
from shardyard_ps_server.hosting import orders, pushes
from shardyard_ps_server.hosting.hosted_job import HostedJob
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition import partition
from shardyard_ps_server.partition.ledger import Ledger
from shardyard_ps_server.partition.step_gate import StepGate, Weighted
from shardyard_ps_server.values.versions import Bytes
from tests.simulation.exactly_once import AsyncRun, Run, SyncRun, Violation

MODES: dict[str, type[Run]] = {"async": AsyncRun, "sync": SyncRun}
SEEDS = 300
SEEDS_AT_ONCE = 50
SEEDS_FOR_A_MUTATION = 150
RED_SEEDS = Path(__file__).with_name("red_seeds.txt")


def red_seeds() -> list[tuple[str, int]]:
    lines = (line.split("#")[0].split() for line in RED_SEEDS.read_text().splitlines())
    return [(words[0], int(words[1])) for words in lines if words]


def check(mode: str, seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            MODES[mode](seed).run()
        except Exception as error:
            error.add_note(f"{mode} seed {seed}; add it to {RED_SEEDS.name}")
            raise


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_AT_ONCE))
@pytest.mark.parametrize("mode", MODES)
def test_promise_1_each_piece_of_work_counts_once_in_each_partition(mode: str, first: int) -> None:
    check(mode, range(first, first + SEEDS_AT_ONCE))


def test_seeds_that_were_red_once_stay_green() -> None:
    for mode, seed in red_seeds():
        check(mode, [seed])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("async", {"applied", "duplicate", "SequenceGap", "StaleToken", "StaleIncarnation", "StaleGeneration"}),
        ("sync", {"applied", "recorded", "duplicate", "StaleToken", "StaleIncarnation", "StaleGeneration"}),
    ],
)
def test_seeds_meet_every_answer_that_a_server_gives(mode: str, expected: set[str]) -> None:
    answers: Counter[str] = Counter()
    for seed in range(20):
        run = MODES[mode](seed)
        run.run()
        answers += run.yard.answers
    assert set(answers) == expected
    assert min(answers.values()) >= 5


# ---- with a rule switched off


def first_red(mode: type[Run], make: Callable[[int], Run] | None = None) -> str | None:
    for seed in range(SEEDS_FOR_A_MUTATION):
        try:
            (make or mode)(seed).run()
        except Violation as violation:
            return str(violation)
    return None


class CountsAgain(Ledger):
    """Without the watermark's check (rule A2)."""

    def is_duplicate(self, name: PushName) -> bool:
        super().is_duplicate(name)
        return False

    def advance(self, name: PushName) -> None:
        if name.first == self.next(name.key):
            super().advance(name)


class LeavesGaps(Ledger):
    """Without the check that a sequence is the next (rule A2)."""

    def is_duplicate(self, name: PushName) -> bool:
        try:
            return super().is_duplicate(name)
        except SequenceGap:
            return False

    def advance(self, name: PushName) -> None:
        self._entries[name.key].next = name.last + 1
        self._next_push = None


class HearsAnyone(Ledger):
    """Without the fence of tokens (rule A5)."""

    def is_duplicate(self, name: PushName) -> bool:
        return super().is_duplicate(dataclasses.replace(name, token=self._entries[name.key].token))


T = TypeVar("T", bound=Weighted)


class TakesAsTheyCome(StepGate[T]):
    """Without the order of ranks (rule B2)."""

    def __init__(self, *given: object, **more: object) -> None:
        super().__init__(*given, **more)  # type: ignore[arg-type]
        self._came: list[T] = []

    def record(self, rank: object, contribution: T) -> None:
        super().record(rank, contribution)  # type: ignore[arg-type]
        self._came.append(contribution)

    def with_last(self, rank: object, contribution: T) -> tuple[T, ...]:
        came, self._came = self._came, []
        return (*came, contribution)


@pytest.mark.parametrize("mode", MODES)
def test_without_the_tokens_of_rule_a5_some_dead_worker_writes(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "Ledger", HearsAnyone)
    assert "counted under token" in str(first_red(MODES[mode]))


@pytest.mark.parametrize("mode", MODES)
def test_without_the_fence_of_incarnations_some_dead_worker_writes(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "fence", lambda *_: None)
    assert "counted, which was declared dead" in str(first_red(MODES[mode]))


def test_without_rule_a2_some_batch_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "Ledger", CountsAgain)
    assert re.search("counted [2-9] times", str(first_red(AsyncRun)))


def test_without_the_check_for_gaps_some_batch_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "Ledger", LeavesGaps)
    assert "counted 0 times" in str(first_red(AsyncRun))


def test_without_the_minimum_of_rule_a6_some_data_shard_is_closed_too_early() -> None:
    assert "is closed; watermarks" in str(first_red(AsyncRun, lambda seed: AsyncRun(seed, progress=max)))


def test_without_rule_a3_some_batch_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    push = pushes.push

    def advances_all(store: Store, hosted: HostedJob, order: PushHeader, payload: Bytes) -> tuple[PartResult, ...]:
        results = push(store, hosted, order, payload)
        for held in hosted.partitions.values():
            if held.ledger.next(order.name.key) == order.name.first:
                held.ledger.advance(order.name)
        return results

    monkeypatch.setattr(pushes, "push", advances_all)
    assert "counted 0 times" in str(first_red(AsyncRun))


def test_without_rank_order_some_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "StepGate", TakesAsTheyCome)
    assert "other bits" in str(first_red(SyncRun))
