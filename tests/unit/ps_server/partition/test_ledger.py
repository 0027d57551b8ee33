"""The push ledger of one partition: the rules of docs/internals/ledger.md by number, and a deliberately dumb second
ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.domain.errors import InvalidRequest, SequenceGap, ShardyardError, StaleToken, StraddlingRange
from shardyard.domain.ids import Incarnation, PartitionId, Rank, Token
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, SourceKey, WorkerSource
from shardyard_ps_server.partition.ledger import Ledger

SHARD = SourceKey(DataShardSource(0, 2, 5))
WORKER = SourceKey(WorkerSource(Incarnation(7)))
PARTITION = PartitionId(3)
TOKEN = Token(4)


def name(first: int, last: int | None = None, *, key: SourceKey = SHARD, token: int = TOKEN) -> PushName:
    return PushName(key, Token(token), first, first if last is None else last)


def ledger_with(next_sequence: int) -> Ledger:
    """A ledger in which SHARD is open under TOKEN and stands at `next_sequence`."""
    ledger = Ledger(PARTITION)
    ledger.open(SHARD, TOKEN)
    for sequence in range(next_sequence):
        ledger.advance(name(sequence))
    return ledger


def test_rule_a2_gap_is_refused_and_says_where_to_go_on() -> None:
    ledger = ledger_with(3)
    with pytest.raises(SequenceGap, match=r"data shard 0\.2\.5 #4 in partition 3, whose next is #3") as refused:
        ledger.is_duplicate(name(4))
    assert refused.value.facts == {"partition": "3", "next": "3"}
    assert ledger.next(SHARD) == 3


@pytest.mark.parametrize(("first", "last"), [(2, 3), (0, 3), (2, 9)])
def test_rule_a12_range_that_straddles_the_watermark_is_refused(first: int, last: int) -> None:
    ledger = ledger_with(3)
    with pytest.raises(StraddlingRange, match=rf"#{first}-{last} in partition 3, whose next is #3") as refused:
        ledger.is_duplicate(name(first, last))
    assert refused.value.facts == {"partition": "3", "next": "3"}
    assert ledger.next(SHARD) == 3


def test_rule_a5_lower_token_is_refused_whatever_the_sequence() -> None:
    ledger = ledger_with(3)
    ledger.open(SHARD, Token(9))
    for sequence in (2, 3, 4):
        with pytest.raises(
            StaleToken, match=r"token 4 of data shard 0\.2\.5 in partition 3, which has seen 9"
        ) as refused:
            ledger.is_duplicate(name(sequence))
        assert refused.value.facts == {"token": "9"}
    assert ledger.next(SHARD) == 3
    assert not ledger.is_duplicate(name(3, token=9))


def test_rule_a5_higher_token_that_was_not_opened_is_refused() -> None:
    ledger = ledger_with(3)
    for sequence in (2, 3, 4):
        with pytest.raises(InvalidRequest, match="token 5, which was not opened in partition 3") as refused:
            ledger.is_duplicate(name(sequence, token=5))
        assert "OpenSources" in refused.value.todo_text
    assert not ledger.is_duplicate(name(3))


@pytest.mark.parametrize("token", [0, 1])
def test_rule_a5_source_that_was_never_opened_is_refused_under_any_token(token: int) -> None:
    ledger = Ledger(PARTITION)
    for source in (DataShardSource(0, 0, 0), RankSource(Rank(0))):
        with pytest.raises(InvalidRequest, match="was not opened"):
            ledger.is_duplicate(name(0, key=SourceKey(source), token=token))
    assert len(ledger) == 0


def test_rule_a1_worker_is_its_own_fence_and_needs_no_token() -> None:
    ledger = Ledger(PARTITION)
    for sequence, token in enumerate((0, 5, 2)):
        assert not ledger.is_duplicate(name(sequence, key=WORKER, token=token))
        ledger.advance(name(sequence, key=WORKER, token=token))
    assert ledger.is_duplicate(name(2, key=WORKER, token=0))
    with pytest.raises(SequenceGap, match="worker 7 #4"):
        ledger.is_duplicate(name(4, key=WORKER))


def test_asking_does_not_make_an_entry() -> None:
    ledger = Ledger(PARTITION)
    ledger.next(SHARD)
    ledger.is_duplicate(name(0, key=WORKER))
    with pytest.raises(SequenceGap):
        ledger.is_duplicate(name(1, key=WORKER))
    assert len(ledger) == 0


def test_rule_a11_what_is_lost_is_passed_over_and_a_watermark_never_falls() -> None:
    ledger = Ledger(PARTITION)
    ledger.pass_over(WORKER, 5)
    assert not ledger.is_duplicate(name(5, key=WORKER))
    ledger.advance(name(5, key=WORKER))
    ledger.pass_over(WORKER, 3)
    assert ledger.next(WORKER) == 6
    assert not ledger.is_duplicate(name(6, key=WORKER))
    ledger.pass_over(WORKER, 7)
    assert ledger.is_duplicate(name(6, key=WORKER))


@dataclass
class DumbLedger:
    """What was counted, as sets of sequences; tokens as the set of all that were opened."""

    counted: dict[SourceKey, set[int]] = field(default_factory=dict)
    tokens: dict[SourceKey, set[int]] = field(default_factory=dict)

    def answer(self, name: PushName) -> str:
        wanted = set(range(name.first, name.last + 1))
        counted = self.counted.get(name.key, set())
        if not isinstance(name.key.source, WorkerSource):
            tokens = self.tokens.get(name.key, set())
            if any(token > name.token for token in tokens):
                return "StaleToken"
            if name.token not in tokens:
                return "InvalidRequest"
        if wanted <= counted:
            return "duplicate"
        if set(range(name.first)) - counted:
            return "SequenceGap"
        if wanted & counted:
            return "StraddlingRange"
        return "next"

    def open(self, key: SourceKey, token: int) -> str:
        if any(seen > token for seen in self.tokens.get(key, set())):
            return "StaleToken"
        self.tokens.setdefault(key, set()).add(token)
        return str(len(self.counted.get(key, set())))


KEYS = st.sampled_from(
    [SHARD, SourceKey(SHARD.source, 1), SourceKey(DataShardSource(0, 2, 6)), SourceKey(RankSource(Rank(1))), WORKER]
)
OPENINGS = st.tuples(st.just("open"), KEYS, st.integers(0, 4), st.just(0), st.just(0))
PUSHES = st.tuples(st.just("push"), KEYS, st.integers(0, 4), st.integers(0, 6), st.integers(0, 3))


@settings(max_examples=300, deadline=None)
@given(st.lists(OPENINGS | PUSHES, max_size=60))
def test_rules_a1_a2_a5_and_a12_ledger_answers_as_a_dict_of_sets_would(
    actions: list[tuple[str, SourceKey, int, int, int]],
) -> None:
    ledger, dumb = Ledger(PARTITION), DumbLedger()
    for action, key, token, first, more in actions:
        push = PushName(key, Token(token), first, first + more)
        try:
            if action == "open":
                said = str(ledger.open(key, Token(token)))
            else:
                said = "duplicate" if ledger.is_duplicate(push) else "next"
        except ShardyardError as refused:
            said = refused.code
        assert said == (dumb.open(key, token) if action == "open" else dumb.answer(push))
        if said == "next":
            ledger.advance(push)
            dumb.counted.setdefault(key, set()).update(range(push.first, push.last + 1))
        for each, counted in dumb.counted.items():
            assert ledger.next(each) == len(counted)


def test_same_push_is_judged_anew_after_every_change() -> None:
    ledger, push, other = ledger_with(3), name(3), SourceKey(DataShardSource(0, 2, 6))
    assert not ledger.is_duplicate(push)
    assert not ledger.is_duplicate(push)
    ledger.open(other, TOKEN)
    assert not ledger.is_duplicate(push)
    ledger.advance(push)
    assert ledger.is_duplicate(push)
    ahead = name(4)
    assert not ledger.is_duplicate(ahead)
    ledger.open(SHARD, Token(TOKEN + 1))
    with pytest.raises(StaleToken):
        ledger.is_duplicate(ahead)


def test_source_that_was_asked_for_before_it_was_opened_is_found_after() -> None:
    ledger = Ledger(PARTITION)
    assert ledger.next(WORKER) == 0
    ledger.advance(name(0, key=WORKER))
    assert ledger.next(WORKER) == 1
    assert ledger.open(WORKER, TOKEN) == 1
    assert ledger.next(WORKER) == 1
