"""Which worker computes which logical rank of a synchronous job (rules B1, B4).

Owns: each rank's owner and token. Invariants: a rank has at most one owner. Each change of owner takes a fresh token,
and tokens only grow. Only living workers get ranks. A rank leaves a living worker only to even out the ranks with a
worker that joins. Deterministic: lower ranks first, ties go to the lower incarnation. Must not know: steps, servers,
time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardyard.domain.ids import Incarnation, Rank, Token
from shardyard.domain.push_names import RankLease
from shardyard_coordinator.records import Body, Entry


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """A change of owner, for the journal. `worker` is None if no worker has the rank now."""

    rank: Rank
    worker: Incarnation | None
    token: Token

    @property
    def entry(self) -> Entry:
        return "rank_given", {"rank": self.rank, "worker": self.worker or 0, "token": self.token}


@dataclass(slots=True)
class _RankState:
    owner: Incarnation | None
    token: Token
    unowned_since_ms: int


class RankBook:
    """Ranks 0 to `ranks` - 1. `next_token` gives the job's next token.

    A worker joins. When it is lost it is first `suspend`ed: it gets no more ranks, and keeps those that it has. Once it
    is fenced it is `release`d. Unowned ranks go at once to workers without a rank, and to the others when
    `workers_expected` are alive or `grace_ms` have passed.
    """

    def __init__(
        self, *, ranks: int, grace_ms: int, workers_expected: int, next_token: Callable[[], Token], now_ms: int
    ) -> None:
        self._grace_ms = grace_ms
        self._workers_expected = workers_expected
        self._next_token = next_token
        self._ranks = [_RankState(None, Token(0), now_ms) for _ in range(ranks)]
        self._living: list[Incarnation] = []

    @property
    def all(self) -> tuple[Rank, ...]:
        return tuple(Rank(rank) for rank in range(len(self._ranks)))

    def join(self, worker: Incarnation, now_ms: int) -> list[RankAssignment]:
        self.enter(worker)
        return [*self.assign_vacant(now_ms), *self._even_out(worker)]

    def enter(self, worker: Incarnation) -> None:
        """The first half of `join`: the worker is there, but has no ranks yet."""
        assert worker not in self._living, worker
        self._living = sorted([*self._living, worker])

    def suspend(self, worker: Incarnation) -> None:
        self._living = [each for each in self._living if each != worker]

    def release(self, worker: Incarnation, now_ms: int, *, is_awaited: bool = True) -> list[RankAssignment]:
        """`is_awaited`: another worker may join in place of this one, so its ranks wait for the grace time."""
        self.vacate(worker, now_ms if is_awaited else now_ms - self._grace_ms)
        return self.assign_vacant(now_ms)

    def vacate(self, worker: Incarnation, now_ms: int) -> None:
        """The first half of `release`: the worker's ranks become unowned."""
        self.suspend(worker)
        for state in self._ranks:
            if state.owner == worker:
                state.owner, state.unowned_since_ms = None, now_ms

    def assign_vacant(self, now_ms: int) -> list[RankAssignment]:
        """Assigns the unowned ranks that need not wait any longer."""
        given: list[RankAssignment] = []
        at_once = len(self._living) >= self._workers_expected
        for rank, state in enumerate(self._ranks):
            if state.owner is not None or not self._living:
                continue
            worker = min(self._living, key=lambda each: (self._count(each), each))
            if at_once or self._count(worker) == 0 or now_ms - state.unowned_since_ms >= self._grace_ms:
                given.append(self._give(rank, worker))
        return given

    def of(self, worker: Incarnation) -> tuple[RankLease, ...]:
        return tuple(
            RankLease(Rank(rank), state.token) for rank, state in enumerate(self._ranks) if state.owner == worker
        )

    def owner(self, rank: int) -> Incarnation | None:
        return self._ranks[rank].owner

    # ---- records

    def entries(self) -> list[Entry]:
        """Records that give each rank to its present owner. Other records say which workers live."""
        return [
            RankAssignment(Rank(rank), state.owner, state.token).entry
            for rank, state in enumerate(self._ranks)
            if state.token
        ]

    def restore(self, body: Body, now_ms: int) -> None:
        """Applies a record of `entries`. Raises DamagedRecord."""
        rank = body.number("rank", most=len(self._ranks) - 1)
        owner = Incarnation(body.number("worker")) or None
        self._ranks[rank] = _RankState(owner, Token(body.number("token", least=1)), now_ms)

    # ---- within

    def _even_out(self, joiner: Incarnation) -> list[RankAssignment]:
        given: list[RankAssignment] = []
        while all(state.owner is not None for state in self._ranks):
            richest = min(self._living, key=lambda each: (-self._count(each), each))
            if self._count(richest) < self._count(joiner) + 2:
                break
            given.append(self._give(self.of(richest)[-1].rank, joiner))
        return given

    def _give(self, rank: int, worker: Incarnation) -> RankAssignment:
        state = self._ranks[rank]
        state.owner, state.token = worker, self._next_token()
        return RankAssignment(Rank(rank), worker, state.token)

    def _count(self, worker: Incarnation) -> int:
        return sum(state.owner == worker for state in self._ranks)
