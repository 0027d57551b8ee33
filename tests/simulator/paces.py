"""Checks bounded staleness: which workers got values while another active worker was too far behind
(docs/internals/ledger.md, rule C3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardyard.domain.ids import Caller, Incarnation, JobId
from shardyard_ps_server.hosting import orders
from shardyard_worker.consistency.asynchronous import AsyncStrategy
from shardyard_worker.data.async_feed import AsyncFeed


class Paces:
    """The steps of each worker in one run. They are noted when a call has returned; the servers may have one more."""

    def __init__(self, violate: Callable[[str], None]) -> None:
        self._violate = violate
        self._steps: dict[Incarnation, tuple[JobId, int]] = {}
        self._gone: set[Incarnation] = set()
        self._switches: dict[JobId, int] = {}

    def switched(self, job: JobId, number: int) -> None:
        """The job was switched to another bound. Its workers follow it one after the other."""
        self._switches[job] = number
        self._steps = {worker: each for worker, each in self._steps.items() if each[0] != job}

    def given(self, caller: Caller, steps: int, bound: int, number: int) -> None:
        """A worker that has taken `steps` steps got values for the next one, under the bound of its job's switch
        `number`."""
        worker = caller.incarnation
        if worker in self._gone or number != self._switches.get(caller.job, 0):
            return
        self._steps[worker] = caller.job, steps
        for other, (job, theirs) in self._steps.items():
            if job == caller.job and steps - bound > theirs + 1:
                self._violate(f"worker {worker} goes on after {steps} steps, worker {other} has taken {theirs}")

    def rests(self, worker: Incarnation) -> None:
        self._steps.pop(worker, None)

    def goes(self, worker: Incarnation) -> None:
        """Some server refuses the worker."""
        self._gone.add(worker)
        self._steps.pop(worker, None)


def watch_paces(paces_now: Callable[[], Paces]) -> Callable[[], None]:
    """Patches the worker, so that its steps are noted. Returns a function that undoes it."""
    real_resume, real_rest = AsyncStrategy.resume, AsyncStrategy.rest
    real_contribute, real_fence = AsyncStrategy.contribute, orders.fence
    real_lease, real_close = AsyncFeed._lease, AsyncFeed._close

    def note(strategy: Any) -> None:
        clock = strategy.clock
        if not clock.resting and clock.bound is not None:
            paces_now().given(strategy._session.caller, clock.steps, clock.bound, clock.consistency.number)

    def resume(self: Any) -> None:
        real_resume(self)
        note(self)

    def lease(self: Any) -> Any:
        paces_now().rests(self._session.caller.incarnation)
        return real_lease(self)

    def close(self: Any, lease: Any) -> None:
        # servers that start after the lease is closed do not expect this worker; the worker may learn that much later
        paces_now().rests(self._session.caller.incarnation)
        real_close(self, lease)

    def rest(self: Any) -> None:
        paces_now().rests(self._session.caller.incarnation)
        real_rest(self)

    def contribute(self: Any, *given: Any) -> None:
        real_contribute(self, *given)
        note(self)

    def fence(store: Any, incarnations: Any) -> None:
        for each in incarnations:
            paces_now().goes(Incarnation(each))
        real_fence(store, incarnations)

    AsyncStrategy.resume, AsyncStrategy.rest = resume, rest  # type: ignore[method-assign]
    AsyncStrategy.contribute, orders.fence = contribute, fence  # type: ignore[method-assign]
    AsyncFeed._lease = lease  # type: ignore[method-assign]
    AsyncFeed._close = close  # type: ignore[method-assign]

    def undo() -> None:
        AsyncStrategy.resume, AsyncStrategy.rest = real_resume, real_rest  # type: ignore[method-assign]
        AsyncStrategy.contribute, orders.fence = real_contribute, real_fence  # type: ignore[method-assign]
        AsyncFeed._lease, AsyncFeed._close = real_lease, real_close  # type: ignore[method-assign]

    return undo
