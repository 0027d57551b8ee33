"""The logical ranks that this worker computes, and the next step of each (docs/internals/ledger.md, rules B1 and B4).

The coordinator leases ranks to workers with tokens. A worker opens a rank on all servers under its token, and the
servers' ledgers say which step comes next. A token that the servers have refused is not tried again.

Owns: ranks, tokens and next steps. Must not know: versions of values, gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from shardyard.domain import errors
from shardyard.domain.ids import Rank, Token
from shardyard.domain.push_names import PushName, RankLease, RankSource, SourceKey
from shardyard_worker.training.trainer import Trainer

log = logging.getLogger("shardyard.worker")


@dataclass
class RankPosition:
    """`next`: the rank's next step; `highest`: the highest next step over all partitions when the rank was opened."""

    token: Token
    next: int
    highest: int


class LogicalRanks:
    """`keys_of`: the keys of a rank in the servers' ledgers, first that of its steps."""

    def __init__(self, trainer: Trainer, keys_of: Callable[[Rank], list[SourceKey]]) -> None:
        self._trainer = trainer
        self._session = trainer.session
        self._keys_of = keys_of
        self._refused: dict[Rank, Token] = {}
        self.held: dict[Rank, RankPosition] = {}

    @property
    def lowest_step(self) -> int:
        return min(position.next for position in self.held.values())

    def due(self, step: int | None) -> Rank | None:
        """The lowest rank whose next step is this one."""
        return min((rank for rank, position in self.held.items() if position.next == step), default=None)

    def others_due(self, step: int, than: Rank) -> bool:
        return any(position.next == step for rank, position in self.held.items() if rank != than)

    def name_of(self, rank: Rank) -> PushName:
        """The name of the push of the rank's next step."""
        position = self.held[rank]
        return PushName(SourceKey(RankSource(rank)), position.token, position.next, position.next)

    def announce_until(self, rank: Rank) -> int:
        """Steps of the rank before this one are announced (rule A13)."""
        return max((lease.announce_until for lease in self._session.ranks if lease.rank == rank), default=0)

    def highest(self, rank: Rank) -> int:
        """The highest next step of the rank over all partitions."""
        position = self.held[rank]
        return max(position.highest, position.next)

    # ---- leases

    def is_offered(self) -> bool:
        """Whether the coordinator has given this worker a rank that it has not yet tried to open."""
        return any(self._refused.get(lease.rank) != lease.token for lease in self._session.ranks)

    def drop_taken(self) -> list[RankLease]:
        """Gives up the ranks that the coordinator has taken away. Returns newly given ranks, to be opened,
        ascending."""
        leases = {lease.rank: lease for lease in self._session.ranks}
        for rank in sorted(self.held):
            lease = leases.get(rank)
            if lease is None or lease.token != self.held[rank].token:
                del self.held[rank]
        return [
            leases[rank]
            for rank in sorted(leases)
            if rank not in self.held and self._refused.get(rank) != leases[rank].token
        ]

    def open(self, rank: Rank, token: Token) -> None:
        """Continues a rank at the servers' next step, unless another worker has it by now."""
        self._read_position(rank, token)
        if rank in self.held:
            log.info("computes logical rank %d from step %d on", rank, self.held[rank].next)

    def reopen(self) -> None:
        """Reads the next steps of all ranks from the servers."""
        for rank, position in sorted(self.held.items()):
            self._read_position(rank, position.token)

    def refuse(self, rank: Rank, token: Token) -> None:
        """Servers know a higher token, so another worker has the rank."""
        self._refused[rank] = token
        self.held.pop(rank, None)

    def _read_position(self, rank: Rank, token: Token) -> None:
        keys = self._keys_of(rank)
        try:
            marks = self._trainer.router.open_sources([(key, token) for key in keys])
        except errors.StaleToken:
            self.refuse(rank, token)
            return
        highest = max(mark.next for key in keys for mark in marks[key])
        self.held[rank] = RankPosition(token, min(mark.next for mark in marks[keys[0]]), highest)
