"""Asynchronous steps: each push is applied on arrival; the next gradient is computed on the servers' newest values.

With a bound on staleness (mode `bounded`) the worker also waits for values: see `bounded`. A running job's bound can
change, and the two modes differ in nothing else, so one strategy serves both.

Owns: the push in flight, and the numbers of pushes without leased data. Invariants: at most one push is in flight; the
servers of the newest map that this worker follows know whether it has work (docs/internals/ledger.md, rule C3). Must
not know: how a bound is kept, how a push reaches servers that change.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import NoReturn

from shardyard.domain import errors
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import Token
from shardyard.domain.push_names import PushName, SourceKey, WorkerSource
from shardyard_worker.consistency.bounded import NEWEST, SspClock, check_window
from shardyard_worker.consistency.push_delivery import Flight, PushDelivery
from shardyard_worker.consistency.strategy import LostWork, ModeChanged, Strategy, note_progress
from shardyard_worker.exchange.requests import ExchangeResult
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import SLICE_MS, Trainer
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")


class AsyncStrategy(Strategy):
    """Modes `async` and `bounded`.

    With worker.exchange delayed, `contribute` returns while its push is in flight. The next gradient is computed on the
    values that the push before brought back. A push's outcome is known at the next `contribute`, or at `finish_pushes`.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Raises ConfigurationError if worker.exchange is delayed, and the bound that the job was started with is 0."""
        check_window(trainer)
        super().__init__(trainer)
        self._step = 0
        self._flight: Flight | None = None
        self._pool = ThreadPoolExecutor(1, "flight") if self._session.settings.worker.window else None
        self._pushes = 0
        self._own_key = SourceKey(WorkerSource(self._session.caller.incarnation))
        self._uncertain: PushName | None = None
        """An own push that may have reached only some of the servers."""
        self._delivery = PushDelivery(trainer)
        self._leaves = False
        self.clock = SspClock(trainer)

    @property
    def step(self) -> int:
        return self._step

    # ---- work, and no work

    def begin(self) -> None:
        with contextlib.suppress(LostWork):  # already reported; here only the end of the push matters
            self.finish_pushes()
        self._take_newest()

    def resume(self) -> None:
        self._change_bound()
        if self.clock.is_known:
            return
        if self.clock.bound is not None:
            self._trainer.values.complete()
            self._note_step(partial(self.clock.join, anew=self.clock.resting))
        self.clock.resting = False

    def rest(self) -> None:
        with contextlib.suppress(LostWork):
            self._change_bound()
        self._rest()

    def _rest(self) -> None:
        if self.clock.must_say_rest:
            with contextlib.suppress(LostWork):
                self.finish_pushes()
        self.clock.rest()

    def leave(self, groups: tuple[tuple[float, ...], ...]) -> None:
        self._rest()
        self._leaves = True
        self.finish_pushes()
        residual = self._trainer.pushes.residual(groups)
        if residual is not None:
            log.info("pushes what compression has not sent yet (2-norm %.3g)", residual.norm)
            self.contribute(None, residual.sending)
            self.finish_pushes()
        self._session.progress.residual_norm = 0.0

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    # ---- a change of the mode

    @property
    def becomes_synchronous(self) -> bool:
        """Whether the job is changing to synchronous steps; its partitions may be moving."""
        return self._session.consistency.mode.updates is UpdateMode.SYNC

    def is_now_synchronous(self) -> bool:
        """Whether the job has changed to synchronous steps; then follows their map. Only while no push is in flight."""
        if self.becomes_synchronous and self._trainer.is_behind:
            self._trainer.follow_map()
        return self._session.mode is UpdateMode.SYNC

    def _await_mode_change(self) -> None:
        barrier = self._session.step_barrier
        with self._session.wait_registry.over(lambda: "the job to change to synchronous steps, or to stay as it is"):
            while True:
                if self.is_now_synchronous():
                    log.warning("a step outside of job.batches does not count: the job takes synchronous steps now")
                    raise ModeChanged
                if not self.becomes_synchronous and barrier.begin_own():
                    return
                self._session.refresh()
                self._trainer.router.pause(SLICE_MS)

    def _change_bound(self) -> None:
        """Applies a new bound if the job was switched to one. Between two steps. Raises LostWork."""
        latest = self._session.consistency
        if latest.number == self.clock.consistency.number or self.becomes_synchronous:
            return
        self.finish_pushes()
        self.clock.change(latest)
        if self.clock.bound is not None and not self.clock.resting:
            self._trainer.values.complete()
            self._note_step(partial(self.clock.join, anew=True))

    # ---- values

    def _take_newest(self) -> None:
        """Puts the newest values, once the bound allows it, into the targets."""
        if self.clock.resting or self.clock.bound is None:
            answer = self._note_step(self._trainer.pull_newest)
        else:
            self._trainer.router.abandon_pull()
            answer = self._note_step(self.clock.await_values)
        self._step = answer.version_max  # less than before if partitions were restored
        self._session.reached(self._step)

    def _note_step(self, pull: Callable[[], ExchangeResult]) -> ExchangeResult:
        router = self._trainer.router
        try:
            answer = pull()
        finally:
            self._delivery.map_changed |= router is not self._trainer.router
        self._step = max(self._step, answer.version_max)
        return answer

    def reload(self) -> None:
        self._await_flight()
        self._take_newest()

    def follow_map(self) -> None:
        self._await_flight()
        self._trainer.follow_map()
        self._delivery.map_changed = True

    def _await_flight(self) -> None:
        """Waits for the push in flight: one thread at a time may ask the servers."""
        flight = self._flight
        if flight is not None:
            with self._session.wait_registry.over(lambda: f"push {flight.name} to be answered"):
                wait([flight.answer])

    # ---- a push

    def contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None = None) -> None:
        name = name or self._own_name()  # first, since it may wait for a mode change
        if self.clock.bound is not None and self.clock.resting and not self._leaves:
            self.resume()  # the script pushes work of its own, which no lease has announced
        self._send(name, sending, upcoming)
        if self.clock.waits_at_once:
            self.finish_pushes()
        if self._session.consistency.number != self.clock.consistency.number and not self._leaves:
            self._change_bound()

    def _own_name(self) -> PushName:
        """Begins this worker's next push without leased data, and returns its name. Raises ModeChanged if the job takes
        synchronous steps."""
        if self._uncertain is not None:
            raise errors.InvalidRequest(
                f"a push after {self._uncertain}, which may have reached only some of the servers",
                why="another gradient under the same name would be applied by some servers and skipped by others",
                todo="let the error of that push end the script, and start it again",
            )
        switched = self._session.consistency.number > 0  # a job that never was stays asynchronous
        if (switched and self.becomes_synchronous) or not self._session.step_barrier.begin_own():
            self.finish_pushes()
            self._await_mode_change()
        return PushName(self._own_key, Token(0), self._pushes, self._pushes)

    def _send(self, name: PushName, sending: StepInput | None, upcoming: Upcoming | None) -> None:
        self._trainer.values.complete()
        if self._delivery.map_changed:
            self._open_again(name)
        sending = self._checked(name, sending)
        if self._trainer.pushes.feedback is not None:
            self.finish_pushes()  # only one push can be undone, so there is one at a time
        request = self._trainer.pushes.build(name, sending, upcoming)
        if self._pool is not None:
            self.finish_pushes()
            if self._delivery.map_changed:  # the last push has met another map
                self._open_again(name)
        pull = NEWEST if self._leaves else self.clock.next_pull()
        if self._pool is None:
            self._land(name, sending, partial(self._delivery.push, request, pull))
            return
        answer = self._pool.submit(self._trainer.router.push_pull, request, pull)
        self._flight = Flight(name, sending, request, pull, answer)
        self._trainer.pushes.release_gradients()
        if name.key is self._own_key:
            self._pushes += 1

    def _open_again(self, name: PushName) -> None:
        try:
            self._delivery.open_again(name)
        except errors.StaleToken as error:
            self._give_up(name, error)

    def _checked(self, name: PushName, sending: StepInput | None) -> StepInput | None:
        """Returns None if the gradients are not finite and must not count. Raises LostWork."""
        try:
            counts = sending is None or self._trainer.pushes.may_count(name, sending, self._step)
        except (errors.StaleToken, errors.StraddlingRange) as error:
            log.info("%s does not count: %s", name, error.what)
            self.finish_pushes()
            self._take_newest()
            raise LostWork from error
        return sending if counts else None

    def finish_pushes(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            self._land(flight.name, flight.sending, partial(self._delivery.finish, flight))

    def _land(self, name: PushName, sending: StepInput | None, answered: Callable[[], ExchangeResult]) -> None:
        """Waits for the answer to a push, and puts its values into the targets."""
        is_own = name.key is self._own_key
        try:
            answer = answered()
        except (errors.StaleToken, errors.SequenceGap, errors.StraddlingRange) as error:
            if is_own:
                # no other worker can have counted it: the servers were restored to a point before this worker's last
                # pushes
                raise
            self.clock.take_back()
            self._give_up(name, error)
        except (errors.Unavailable, KeyboardInterrupt):
            if is_own:
                self._uncertain = name
            raise
        if is_own:
            self._session.progress.pushed = name.last + 1
            if self._pool is None:
                self._pushes += 1
        self._trainer.pushes.counted(answer)
        if answer.missing:
            self._note_step(partial(self.clock.await_values, answer))
        else:
            self.clock.note_known()
            self._trainer.values.load(answer.ahead)
        self._step = max(self._step, answer.version_max)
        note_progress(self._session, answer, sending, self._step)

    def _give_up(self, name: PushName, error: errors.ShardyardError) -> NoReturn:
        """Another worker has this work now, or part of it was counted (rule A12): its lease is continued from there."""
        log.info("%s does not count: %s", name, error.what)
        self._trainer.pushes.not_counted()
        self._take_newest()
        raise LostWork from error
