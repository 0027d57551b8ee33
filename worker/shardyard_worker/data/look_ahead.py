"""The ids that the next batches will look up, as the script announces them, and batches read before their turn.

Owns: the order of batches read ahead, and which of them the next exchange serves. Invariants: a batch is yielded once,
in its turn, and an error of reading it is raised then; a forward is right without any announcement. Must not know: how
rows arrive, names of pushes.
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
"""The inputs of look-up modules: the argument of each module's forward, or a tuple of its arguments."""
LookAhead = Callable[[Any], Features]
"""Returns the features of a batch."""


@dataclass(frozen=True, slots=True)
class Depth:
    """Which batches are computed on the values of the next exchange. `window`: exchanges in flight; `accumulate`:
    batches of a push."""

    window: int
    accumulate: int = 1

    @property
    def begin(self) -> int:
        """The number of batches between the current one, the last of its push, and the first of these."""
        return self.window * self.accumulate

    @property
    def end(self) -> int:
        return self.begin + self.accumulate


def announced(look_ahead: LookAhead, batches: Iterable[Any]) -> list[Announced]:
    """Raises InvalidRequest, and what a forward raises for invalid ids."""
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
        """The ids of the batches that are computed on the values of the next exchange. `ranks`: given for a synchronous
        step, the number of its logical ranks that this worker computes."""
        depth = self._depth if ranks is None else Depth(0, ranks * self._depth.accumulate)
        while len(self._next) < depth.end and self._read():
            pass
        return announced(self._look_ahead, list(self._next)[depth.begin : depth.end])

    def _read(self) -> bool:
        """Reads a batch. False at the end, or if it could not be read."""
        if self._ended:
            return False
        try:
            self._next.append(next(self._batches))
        except StopIteration:
            self._ended = True
        except Exception as error:  # noqa: BLE001 - raised in its turn
            self._ended, self._error = True, error
        return not self._ended
