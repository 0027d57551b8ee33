"""The ids that the next batches will look up, as the script announces them, and batches read before their turn.

Owns: the order of batches read ahead, and which of them the next exchange serves. Invariants: a batch is yielded once,
in its turn, and an error of reading it is raised then; a forward is right without any announcement. Must not know: how
rows arrive, names of pushes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def due_batches(window: int, accumulate: int) -> range:
    """Which of the batches after the current one, the last of its push, are computed on the values of the next
    exchange. `window`: exchanges in flight; `accumulate`: batches of a push."""
    return range(window * accumulate, (window + 1) * accumulate)


def announced(look_ahead: LookAhead, batches: Iterable[Any]) -> list[Announced]:
    """Raises InvalidRequest, and what a forward raises for invalid ids."""
    found: list[Announced] = []
    for batch in batches:
        features = look_ahead(batch)
        if not isinstance(features, Mapping):
            raise InvalidRequest(
                f"look_ahead gave {type(features).__name__}; expected what modules will be given, by module",
                todo="for example: look_ahead=lambda batch: {model.words: batch[0]}",
            )
        found += [each for module, given in features.items() for each in ids_of(module, given)]
    return found


class ReadAhead(Generic[B]):
    """A script's own batches."""

    def __init__(self, batches: Iterable[B], look_ahead: LookAhead, *, window: int, accumulate: int) -> None:
        self._batches = iter(batches)
        self._look_ahead = look_ahead
        self._window, self._accumulate = window, accumulate
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
        due = due_batches(self._window, self._accumulate) if ranks is None else range(ranks * self._accumulate)
        while len(self._next) < due.stop and self._read():
            pass
        return announced(self._look_ahead, list(self._next)[due.start : due.stop])

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
