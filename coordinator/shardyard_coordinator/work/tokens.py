"""The tokens under which a job's work is leased (rules A5, A7).

Owns: the latest one. Invariant: they only grow. Must not know: which worker has which.
"""

from __future__ import annotations

from shardyard.domain.ids import Token


class Tokens:
    """`latest` is 0 before the first."""

    def __init__(self) -> None:
        self.latest = Token(0)

    def next(self) -> Token:
        self.latest = Token(self.latest + 1)
        return self.latest

    def seen(self, token: int) -> None:
        """Some record says that the token was given."""
        self.latest = Token(max(self.latest, token))
