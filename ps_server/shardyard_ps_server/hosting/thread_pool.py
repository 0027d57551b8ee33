"""Threads that apply the partitions of one large push side by side.

Owns: a fixed number of threads, which start when work first needs them. Invariants: a caller works on its own batch
too, so it never waits for work that no thread has begun, however many callers there are; partitions share no state, so
the number of threads does not change a single bit. Must not know: what the work is.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

THREADS_MAX = 4
"""Updates are limited by memory bandwidth, which a few cores use up."""


class _Batch(Generic[T]):
    """The work items of one call. Free threads take them in order, each once."""

    def __init__(self, works: Sequence[Callable[[], T]]) -> None:
        self._works = works
        self._lock = threading.Lock()
        self._taken = 0
        self._left = len(works)
        self._results: list[T | None] = [None] * len(works)
        self._errors: dict[int, BaseException] = {}
        self._ended = threading.Event()

    def help(self) -> None:
        """Runs work items until none is left to take."""
        while True:
            with self._lock:
                index = self._taken
                if index == len(self._works):
                    return
                self._taken += 1
            try:
                self._results[index] = self._works[index]()
            except BaseException as error:  # noqa: BLE001 (raised again by `finish`, in the caller's thread)
                self._errors[index] = error
            with self._lock:
                self._left -= 1
                if self._left == 0:
                    self._ended.set()

    def finish(self) -> list[T]:
        """Returns the results in order, once all work items have ended. Raises the first error in order."""
        self._ended.wait()
        if self._errors:
            raise self._errors[min(self._errors)]
        return self._results  # type: ignore[return-value]


class BatchPool:
    """`size` threads, including the caller's; with 1, the caller's thread does all work. Safe for several callers."""

    def __init__(self, size: int | None = None) -> None:
        self.size = min(len(os.sched_getaffinity(0)), THREADS_MAX) if size is None else size
        assert self.size >= 1, self.size
        self._changed = threading.Condition()
        self._calls: deque[_Batch[object]] = deque()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Runs all work items and returns their results in order. If some fail, the others still run; then the first
        error in order is raised. After `close`, the caller's thread runs them alone."""
        helpers = min(self.size, len(works)) - 1
        if not works:
            return []
        batch = _Batch(works)
        if helpers > 0:
            self._call(batch, helpers)  # type: ignore[arg-type]
        batch.help()
        return batch.finish()

    def close(self) -> None:
        """Ends the threads after their current work items. May be called again."""
        with self._changed:
            self._closed = True
            self._calls.clear()
            self._changed.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()

    def _call(self, batch: _Batch[object], helpers: int) -> None:
        with self._changed:
            if self._closed:
                return
            while len(self._threads) < self.size - 1:
                name = f"shardyard-crew-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
                self._threads[-1].start()
            self._calls.extend([batch] * helpers)
            self._changed.notify(helpers)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._calls)
                if self._closed:
                    return
                batch = self._calls.popleft()
            batch.help()
            del batch  # a waiting thread must not keep payloads in memory
