"""Which ids the next batches will ask for, as a script says, and batches that are read before their turn.

Owns: the order of batches read ahead, and which of them the next exchange serves. Invariants: a batch is given in its
turn and once, and what reading it raised is raised then; what is announced is never needed for a forward to be right.
Must not know: how rows come, names of pushes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from shardyard.domain.errors import InvalidRequest
from shardyard_worker.embedding.modules import ids_of
from shardyard_worker.training.table_binding import Announced

B = TypeVar("B")
Features = Mapping[torch.nn.Module, Any]
"""What modules that look up will be given: the argument of their forward, or a tuple of its arguments."""
LookAhead = Callable[[Any], Features]
"""Of a batch."""


@dataclass(frozen=True, slots=True)
class Depth:
    """Which batches the values of the next exchange are computed on. `window`: exchanges under way; `accumulate`:
    batches of a push."""

    window: int
    accumulate: int = 1

    @property
    def begin(self) -> int:
        """Batches between the one at hand, the last of its push, and the first of these."""
        return self.window * self.accumulate

    @property
    def end(self) -> int:
        return self.begin + self.accumulate


def announced(look_ahead: LookAhead, batches: Iterable[Any]) -> list[Announced]:
    """Raises InvalidRequest, and what a forward raises for ids that cannot be."""
    found: list[Announced] = []
    for batch in batches:
        said = look_ahead(batch)
        if not isinstance(said, Mapping):
            raise InvalidRequest(
                f"look_ahead gave {type(said).__name__}; expected what modules will be given, by module",
                todo="for example: look_ahead=lambda batch: {model.words: batch[0]}",
            )
        found += [each for module, features in said.items() for each in ids_of(module, features)]
    return found


class ReadAhead(Generic[B]):
    """A script's own batches."""

    def __init__(self, batches: Iterable[B], look_ahead: LookAhead, depth: Depth) -> None:
        self._batches = iter(batches)
        self._look_ahead = look_ahead
        self._depth = depth
        self._next: deque[B] = deque()
        self._error: Exception | None = None
        self._ended = False

    def __iter__(self) -> Iterator[B]:
        while self._next or self._read():
            yield self._next.popleft()
        if self._error is not None:
            raise self._error

    def announced(self, ranks: int | None = None) -> Sequence[Announced]:
        """Of the batches that will be computed on what the next exchange brings. `ranks`: a step is synchronous, and
        this worker computes so many logical ranks of it."""
        depth = self._depth if ranks is None else Depth(0, ranks * self._depth.accumulate)
        while len(self._next) < depth.end and self._read():
            pass
        return announced(self._look_ahead, list(self._next)[depth.begin : depth.end])

    def _read(self) -> bool:
        """False at the end, or where it could not be read."""
        if self._ended:
            return False
        try:
            self._next.append(next(self._batches))
        except StopIteration:
            self._ended = True
        except Exception as error:  # noqa: BLE001 - raised in its turn
            self._ended, self._error = True, error
        return not self._ended
