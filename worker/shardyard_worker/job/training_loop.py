"""A worker's steps: from `optimizer.step()` to the strategy, in any mode of the job.

Owns: the trainer, the strategy of the current mode, the feed of batches, the rounds of local mode. Invariant: a
strategy is replaced only between two steps, after the job has changed its mode. Must not know: models, optimizers, what
a script sees.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from shardyard.domain.consistency import ConsistencyMode, NonFinite, UpdateMode
from shardyard.domain.errors import InvalidRequest, NotFound
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import VariableKind
from shardyard_worker.consistency.groups.computed_together import RunsTogether
from shardyard_worker.consistency.groups.group_strategy import GroupStrategy
from shardyard_worker.consistency.local_sgd import LocalRounds
from shardyard_worker.consistency.modes import strategy_for
from shardyard_worker.consistency.strategy import LostWork, ModeChanged, Strategy
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.data.feed import Feed
from shardyard_worker.data.own_data import ForwardSamples, OwnData
from shardyard_worker.data.seeding import seed_everything
from shardyard_worker.data.sync_feed import LocalFeed
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.job.callbacks import Callbacks
from shardyard_worker.optimizers.grad_scaler import JobScaler
from shardyard_worker.optimizers.script_steps import UnpreparedSteps
from shardyard_worker.optimizers.torch_state import VariableState
from shardyard_worker.replicas.replica import Replica
from shardyard_worker.replicas.spread_model import SpreadModel
from shardyard_worker.session.drain import Drained
from shardyard_worker.session.interrupts import INTERRUPTS
from shardyard_worker.session.metrics import MetricLog
from shardyard_worker.session.session import Session
from shardyard_worker.training.remote_rows import RemoteRows
from shardyard_worker.training.shares import Shares
from shardyard_worker.training.table_binding import TableBinding, Upcoming
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput, Variable

log = logging.getLogger("shardyard.worker")

Groups = tuple[tuple[float, ...], ...]

OWN_NUMBERS = 2
"""In the seed of a worker's own random numbers, where those of batches have 0 (synchronous) or 1."""
LOOK_AHEAD_METRIC = "look_ahead_hits"
"""The share of the rows that forwards needed that were already fetched, since look-ahead began."""


class Sampled(Protocol):
    """A pass over a DataLoader with `job.sampler`."""

    @property
    def is_left(self) -> bool:
        """Whether the script goes through it no more."""

    def takes_step(self) -> bool:
        """A step follows. Returns whether the batch at hand counts. Raises InvalidRequest."""

    def stepped(self) -> None:
        """The step was taken."""

    def close(self) -> None: ...


class TrainingLoop:
    """The steps of one job. Only the thread that trains uses it."""

    def __init__(self, session: Session, metrics: MetricLog, callbacks: Callbacks[Any]) -> None:
        self.session = session
        self._metrics = metrics
        self._callbacks = callbacks
        self.trainer: Trainer | None = None
        self.places: dict[str, int] = {}
        """The number of each variable, by name."""
        self.strategy: Strategy | None = None
        self.local: LocalRounds | None = None
        self.feed: Feed | None = None
        self.feeds_opened = 0
        self.upcoming: Upcoming | None = None
        """A script's own batches (`job.look_ahead`)."""
        self.rows: RemoteRows | None = None
        self.settings: Callable[[], Groups] = tuple
        """The optimizer's current settings."""
        self.own_steps = 0
        """Steps outside job.batches."""
        self.sampled: Sampled | None = None
        """The pass over a DataLoader with `job.sampler` that the script is in."""
        self.own_data = OwnData()
        self.samples: ForwardSamples | None = None
        """Counts the samples of steps outside job.batches."""
        self.scaler: JobScaler | None = None
        self.replica: Replica | SpreadModel | None = None
        self.unprepared = UnpreparedSteps()
        self.at_end = contextlib.ExitStack()
        """What is undone when this worker leaves."""
        self.at_end.callback(self.unprepared.close)
        self._last_step = 0
        """The last step after which callbacks were called."""
        self._may_end_loop = False
        """Whether a script with a loop of its own could have learned that this worker is to leave."""

    # ---- what is known

    @property
    def step(self) -> int:
        if self.local is not None:
            return self.local.step
        return 0 if self.strategy is None else self.strategy.step

    @property
    def should_stop(self) -> bool:
        """Whether the job takes no more steps."""
        if self.session.mode is UpdateMode.ASYNC or self.strategy is None:
            return self.session.step_barrier.stop is not None
        end = self.session.step_barrier.end
        return end is not None and self.strategy.step >= end

    @property
    def is_local(self) -> bool:
        """Whether the job's mode is local: steps are taken here, and their sum is pushed."""
        return self.session.job_settings.consistency.mode is ConsistencyMode.LOCAL

    @property
    def looks_ahead(self) -> bool:
        """Whether the script announces the ids of its next batches."""
        return self.upcoming is not None or (self.feed is not None and self.feed.upcoming is not None)

    def need_trainer(self) -> Trainer:
        self.session.check()
        if self.trainer is None:
            raise InvalidRequest("no variables yet", todo="call job.prepare or job.register first")
        return self.trainer

    def present_strategy(self) -> Strategy:
        assert self.strategy is not None
        return self.strategy

    # ---- the beginning

    def check_first(self) -> None:
        """Raises InvalidRequest if the job has its variables already."""
        self.session.check()
        if self.trainer is not None:
            raise InvalidRequest(
                "a second job.prepare or job.register in one job",
                why="a job has one model and one optimizer, those of the first call",
                todo="call it once, before the first batch; to train several models put them into one"
                " torch.nn.ModuleList, and their parameters into groups of one optimizer",
            )

    def begin(
        self,
        variables: Sequence[Variable],
        spec: OptimizerSpec,
        settings: Callable[[], Groups],
        *,
        model: torch.nn.Module | None = None,
        tables: TableBinding | None = None,
        state: Mapping[int, VariableState] | None = None,
        replica: Replica | SpreadModel | None = None,
        shares: Shares | None = None,
    ) -> Trainer:
        """Registers the variables and gets their initial values. `settings` returns the optimizer's current settings.
        `state`: what the optimizer begins with if this worker gives the initial values. `replica`: these variables, for
        a strategy under which they are in this worker; None: there is none for them. `shares`: see Trainer."""
        self.check_first()
        self.unprepared.close()
        if model is not None:
            self.samples = ForwardSamples(model)
            self.at_end.callback(self.samples.close)
        with INTERRUPTS:
            context = self.present_strategy
            trainer = Trainer(self.session, variables, spec, model, tables, context=context, state=state, shares=shares)
            self.trainer, self.settings, self.replica = trainer, settings, replica
            if replica is None:
                self.session.progress.needs_servers = "job.register" if self.scaler is None else "job.scaler"
                self.session.refresh()  # the coordinator refuses to switch the job to replicas from now on
            self.places = {variable.spec.name: place for place, variable in enumerate(trainer.variables)}
            if tables is not None:
                self.rows = RemoteRows(
                    trainer, tables, context=self.present_strategy, looks_ahead=lambda: self.looks_ahead
                )
                tables.begin(self.rows)
            self._last_step = self.follow_mode().step
        seed_everything(self.session.seed, OWN_NUMBERS, self.session.number)
        return trainer

    def begin_rounds(self, local: LocalRounds) -> None:
        """From now on steps are local."""
        self.local = local
        self._last_step = self.step

    def follow_mode(self) -> Strategy:
        """Starts and returns the strategy of the job's current mode."""
        strategy = self.strategy
        while strategy is None or not strategy.is_current:
            if strategy is not None:
                strategy.close()
                if isinstance(self.replica, Replica):
                    self.replica.set_state({})  # the servers have it
            if self.scaler is not None:
                self.scaler.follow(by_steps=self.session.mode is UpdateMode.SYNC)
            strategy = self.strategy = strategy_for(self.need_trainer(), self.replica)
            if isinstance(strategy, GroupStrategy):
                strategy.weight_of_work = self._weight_of_work
            if isinstance(strategy, GroupStrategy | RunsTogether):
                strategy.weight_of_batch = self._weight_of_batch
            # the strategy may already meet the map of the mode after its own
            with contextlib.suppress(ModeChanged):
                strategy.begin()
        return strategy

    # ---- steps

    def contribute(self, sending: StepInput) -> None:
        """`optimizer.step()` and `job.push`."""
        trainer = self.need_trainer()
        if self.sampled is not None and not self._takes_step(self.sampled):
            self.between_steps()
            return
        sending.bases = trainer.values.bases
        if self.rows is not None:
            self.report_rows(self.rows)
        strategy = self.strategy
        if self.feed is None and strategy is not None and strategy.is_synchronous:
            with INTERRUPTS:
                self.follow_mode()
        with INTERRUPTS:
            counted = self._count(sending)
            if self.sampled is not None:
                self.sampled.stepped()
        if counted and (self.session.mode is UpdateMode.ASYNC or self.step != self._last_step):
            self._last_step = self.step
            self._callbacks.after_step()
        self.between_steps()
        self._end_own_step()

    def _weight_of_work(self) -> float | None:
        """The samples of the step whose gradients are being computed; None: they are not known."""
        if self.feed is None:
            return 1.0
        work = self.feed.work
        return None if work is None or work.taken or not work.due else float(work.samples)

    def _weight_of_batch(self) -> float | None:
        """The share of the batch at hand in them."""
        if self.feed is None:
            return 1.0
        work = self.feed.work
        return None if work is None or work.taken else work.samples / work.batches

    def _takes_step(self, sampled: Sampled) -> bool:
        """Whether the batch at hand counts. One of `job.sampler` may not."""
        with INTERRUPTS:
            takes_step = sampled.takes_step()
            if not takes_step:
                self.present_strategy().drop()
        if not takes_step and self.samples is not None:
            self.samples.take()
        return takes_step

    def step_locally(self, closure: Callable[[], float] | None) -> float | None:
        """`optimizer.step()` in local mode."""
        local = self.local
        assert local is not None
        self.session.check()
        with INTERRUPTS:
            if isinstance(self.feed, LocalFeed):
                is_last = self.feed.enter()
                loss = local.run(closure)
            else:
                local.enter_own()
                loss = local.run(closure)
                is_last = local.taken == local.steps
            if is_last:
                self.end_round()
        if self.step > self._last_step:  # a worker with several ranks takes the same step once for each
            self._last_step = self.step
            self._callbacks.after_step()
        self.between_steps()
        self._end_own_step()
        return loss

    def end_round(self) -> None:
        """Contributes the sum of this worker's local steps."""
        local = self.local
        assert local is not None
        sending = local.outer(self.settings())
        looked_at = self.session.job_settings.nonfinite is not NonFinite.ALLOW  # checked on the way, and reported
        try:
            self._count(sending if local.finite or looked_at else None)
        finally:
            local.leave(keeps=local.finite)
        lost = {"rounds_dropped": local.dropped, "inner_states_lost": local.lost}
        self._metrics.log({name: count for name, count in lost.items() if count})

    def _count(self, sending: StepInput | None) -> bool:
        """Pushes a step. Returns whether the work is this worker's."""
        samples = None if self.samples is None else self.samples.take()
        if self.feed is not None:
            with contextlib.suppress(Drained):  # in a wait for others; job.batches then ends the script
                self.feed.push(sending)
            return self.feed.work is None or not self.feed.work.lost
        if self.samples is not None:
            self.own_data.look()
        if sending is not None and samples:
            sending.samples = samples
        self.own_steps += 1
        try:
            self.present_strategy().contribute(None, sending, self.upcoming)
        except ModeChanged:
            self.own_steps -= 1
            self.follow_mode()
            return False
        except LostWork:
            log.info("the last batch does not count: another worker has computed it as well, or the job has stopped")
            return False
        return True

    def between_steps(self) -> None:
        """Calls the script's callbacks for what is new."""
        stop = self.session.step_barrier.stop if self.should_stop else None
        self._callbacks.between_steps(self.session.checkpoint, stop)

    def _end_own_step(self) -> None:
        """After a step outside of job.batches. If this worker is to leave, the script can end its loop now
        (job.should_stop); if it takes another step instead, that step ends the script. Raises Drained."""
        if self.feed is None and self.session.drain.asked:
            if self._may_end_loop:
                self.session.drain.check()
            self._may_end_loop = True

    def report_rows(self, rows: RemoteRows) -> None:
        """Reports metrics of look-ahead and of the row cache."""
        if rows.looked_up:
            self._metrics.log({LOOK_AHEAD_METRIC: rows.came_ahead / rows.looked_up})
        cache = None if self.trainer is None else self.trainer.cache
        if cache is not None:
            counts = cache.counts
            found = {"hits": counts.hits, "misses": counts.misses, "age": counts.age}
            self._metrics.log({f"cached_rows_{name}": value for name, value in found.items()})

    def optimizer_state(self) -> dict[int, VariableState]:
        """The optimizer's state on the servers, by the places of the parameters among the variables: of the version
        that the model holds in a synchronous job, else the newest."""
        trainer = self.need_trainer()
        parameters = [at for at, each in enumerate(trainer.variables) if each.spec.kind is VariableKind.PARAMETER]
        with INTERRUPTS:
            self.finish_pushes()
            trainer.values.complete()
            while True:
                strategy, read = self.present_strategy(), trainer.router.optimizer.read
                try:
                    return read(parameters, strategy.rows_version())
                except MapChanged:
                    strategy.follow_map()
                except NotFound as error:
                    if "newest" not in error.facts:
                        raise
                    # other workers take steps without this one
                    with contextlib.suppress(MapChanged):
                        return read(parameters, None)

    # ---- the end

    def finish_pushes(self) -> None:
        """Waits for the push in flight."""
        try:
            self.present_strategy().finish_pushes()
        except LostWork:
            log.info("the last batch was computed by another worker as well; this one's does not count")

    def finish(self, error: str) -> None:
        """Ends the steps. A push in flight counts once it is acknowledged; an error that it meets is raised. Raises
        InvalidRequest if the script has trained without the job."""
        if self.strategy is None or self.trainer is None:
            ends = not error and self.session.step_barrier.stop is None and not self.session.drain.hands_over
            if self.trainer is None and ends:
                self.unprepared.check(self.session.settings.job.name)
            return
        if self.sampled is not None and not error:
            self.sampled.close()
        try:
            if error:
                self.trainer.router.close()
            else:
                if self.local is not None and self.local.owes:
                    self.end_round()  # the last round of a script's own data may be shorter
                if self.own_steps and isinstance(self.strategy, SyncStrategy) and not self.session.drain.hands_over:
                    self.strategy.warn_of_open_step()
                self.strategy.leave(self.settings())
                self.trainer.values.complete()
        except LostWork:
            log.info("the last batch was computed by another worker as well; this one's does not count")
        finally:
            self.strategy.close()
