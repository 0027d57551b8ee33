"""The push ledger of one partition: which work it has counted (docs/internals/ledger.md, rules A1 to A5, A7, A11).

Example: the next sequence of a source is 5. A push #5, or a range #5 to #7, is the next; #4 is a duplicate; #6 is a
gap; a range #3 to #6 straddles the watermark.

    is_duplicate    rules A2 and A12: duplicate, next, gap, or straddling; rule A5: tokens that are too low
    advance         counts a push that was the next
    open            rule A5: the token of a new lease
    pass_over       rule A11: sequences that are lost
    forget          rule A7: sources that are closed

Owns: one watermark and one token per key (source, lane), and the floor below which no token is taken. Invariants: a
watermark only grows, by the next sequence, by a range that begins with it, or past what the coordinator has declared
lost; a token only grows. Pure: no clock, lock or I/O; called under the partition's lock. Must not know: gradients,
versions, workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shardyard.domain.errors import InvalidRequest, SequenceGap, StaleToken, StraddlingRange, TooLarge
from shardyard.domain.ids import Incarnation, PartitionId, Token
from shardyard.domain.limits import LEDGER_SOURCES_MAX
from shardyard.domain.push_names import DataShardSource, DoneDataShards, PushName, SourceKey, SourceMark, WorkerSource


@dataclass(slots=True)
class _Entry:
    next: int = 0
    token: int = 0


_UNSEEN: Final = _Entry()
_NONE: Final = DoneDataShards(0, 1, 0)


class Ledger:
    """Sequences begin at 0; `next` is one more than the watermark."""

    def __init__(self, partition: PartitionId) -> None:
        self._partition = partition
        self._floor = Token(0)
        self._entries: dict[SourceKey, _Entry] = {}
        # a push is checked, counted and answered under one key; hashing it takes longer than all of that
        self._latest: tuple[SourceKey, _Entry] | None = None
        # the push that was found to be the next; a server asks twice, and nothing has changed in between
        self._next_push: PushName | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def next(self, key: SourceKey) -> int:
        entry = self._find(key)
        return 0 if entry is None else entry.next

    def check_open(self, key: SourceKey, token: Token) -> None:
        """Raises what `open` raises: StaleToken for a lower token than one seen, TooLarge."""
        entry = self._entries.get(key)
        if token < self._floor:
            raise self._below_floor(key, token)
        if entry is None and len(self._entries) >= LEDGER_SOURCES_MAX:
            raise TooLarge(f"{len(self._entries)} sources in partition {self._partition}; at most {LEDGER_SOURCES_MAX}")
        if entry is not None and token < entry.token:
            raise self._stale(key, token, entry)

    def open(self, key: SourceKey, token: Token) -> int:
        """Rule A5: takes the token of a new lease. Returns the next sequence."""
        self.check_open(key, token)
        entry = self._entries.setdefault(key, _Entry())
        self._next_push = None
        entry.token = token
        return entry.next

    def is_duplicate(self, name: PushName) -> bool:
        """Rule A2: True if the work was counted before, False if it is the next.

        Raises StaleToken, InvalidRequest for a token that was not opened, SequenceGap (facts: partition, next),
        StraddlingRange.
        """
        if name is self._next_push:
            return False
        opened = self._find(name.key)
        entry = _UNSEEN if opened is None else opened
        if not isinstance(name.key.source, WorkerSource):
            if name.token < self._floor:
                raise self._below_floor(name.key, name.token)
            if name.token < entry.token:
                raise self._stale(name.key, name.token, entry)
            if opened is None or name.token > entry.token:
                raise InvalidRequest(
                    f"{name} under token {name.token}, which was not opened in partition {self._partition}",
                    todo="call OpenSources on every server before the first push of a lease",
                )
        if name.last < entry.next:
            return True
        if name.first == entry.next:
            self._next_push = name
            return False
        facts = {"partition": str(self._partition), "next": str(entry.next)}
        if name.first > entry.next:
            raise SequenceGap(f"{name} in partition {self._partition}, whose next is #{entry.next}", facts=facts)
        raise StraddlingRange(f"{name} in partition {self._partition}, whose next is #{entry.next}", facts=facts)

    def advance(self, name: PushName) -> None:
        """Counts the work. `is_duplicate` must have found the name new, under the same lock."""
        entry = self._find(name.key) or self._entries.setdefault(name.key, _Entry())
        assert name.first == entry.next, (name, entry)
        entry.next = name.last + 1
        self._next_push = None

    def counts_rows(self, name: PushName) -> bool:
        """Whether the rows of the next work must be counted. In a hybrid job rows count before their step is taken, so
        after a restore they may have counted already."""
        entry = self._entries.get(name.key.of_rows)
        return entry is None or name.first >= entry.next

    def advance_rows(self, name: PushName) -> None:
        """Counts the rows of the work."""
        self.pass_over(name.key.of_rows, name.last + 1)

    def pass_over(self, key: SourceKey, next_sequence: int) -> None:
        """Rule A11: sequences below `next_sequence` are lost, and not expected any more. A higher watermark stays."""
        entry = self._entries.setdefault(key, _Entry())
        entry.next = max(entry.next, next_sequence)
        self._next_push = None

    # ---- checkpoints

    @property
    def floor(self) -> Token:
        """Tokens below it are refused."""
        return self._floor

    def marks(self) -> tuple[SourceMark, ...]:
        return tuple([SourceMark(key, Token(entry.token), entry.next) for key, entry in self._entries.items()])

    def restore(self, marks: Iterable[SourceMark], floor: Token) -> None:
        """Replaces all entries by what `marks` returned, and the floor by that of the same time."""
        self._entries = {mark.key: _Entry(mark.next, mark.token) for mark in marks}
        self._latest = self._next_push = None
        self._floor = floor

    def forget(self, done: Iterable[DoneDataShards], workers: Iterable[Incarnation], floor: Token) -> None:
        """Rule A7: drops data shards that are closed and contained in a committed checkpoint, unless a token of theirs
        is at the floor or above; and sources of workers that are gone. Tokens below the floor are refused from now
        on."""
        closed = {each.feed: each for each in done}
        gone = [SourceKey(WorkerSource(worker)) for worker in workers]
        for key, entry in self._entries.items():
            source = key.source
            if isinstance(source, DataShardSource) and entry.token < floor and source in closed.get(source.feed, _NONE):
                gone.append(key)
        for key in gone:
            self._entries.pop(key, None)
        self._latest = self._next_push = None
        self._floor = Token(max(self._floor, floor))

    def _find(self, key: SourceKey) -> _Entry | None:
        if self._latest is not None and self._latest[0] is key:
            return self._latest[1]
        entry = self._entries.get(key)
        if entry is not None:
            self._latest = key, entry
        return entry

    def _below_floor(self, key: SourceKey, token: int) -> StaleToken:
        return StaleToken(
            f"token {token} of {key.source} in partition {self._partition}, where all below {self._floor} have ended",
            facts={"token": str(self._floor)},
        )

    def _stale(self, key: SourceKey, token: int, entry: _Entry) -> StaleToken:
        return StaleToken(
            f"token {token} of {key.source} in partition {self._partition}, which has seen {entry.token}",
            facts={"token": str(entry.token)},
        )
