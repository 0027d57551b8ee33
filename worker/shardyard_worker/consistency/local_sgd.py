"""Local SGD: the script's optimizer runs in this process, and the servers get the sum of its steps once a round.

Local SGD (Stich, ICLR 2019): each logical rank takes several steps by itself, starting from the same values; then all
continue from the mean of their results. DiLoCo (Douillard et al., 2023): the mean change is a gradient for an outer
optimizer, SGD with Nesterov momentum. To the servers a round is one step of a synchronous job.

Owns: the inner optimizer, its state for each logical rank, and the position in the current round. Invariants:
- A rank's round begins with the inner state at the end of the rank's last round, if this process computed that round.
  A round that is computed again begins with the same state.
- Only parameters that had a gradient in the round are sent.
- A step's number counts the rank's steps before it, whichever worker computed them.

Must not know: datasets, names of pushes.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from shardyard.config.settings import ConsistencySettings
from shardyard.domain.epochs import EpochPlan
from shardyard.domain.errors import InvalidRequest, UnsupportedOptimizer
from shardyard.domain.ids import Rank
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.optimizers.lr_schedule import JobScheduler
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput, Variable

log = logging.getLogger("shardyard.worker")

Closure = Callable[[], float]
State = defaultdict[torch.Tensor, Any]

OUTER = "sgd"


def outer_optimizer(consistency: ConsistencySettings) -> OptimizerSpec:
    """The optimizer that the servers run."""
    momentum = consistency.outer_momentum
    given = {"lr": consistency.outer_lr, "momentum": momentum, "nesterov": float(momentum > 0)}
    return OptimizerSpec(OUTER, (make_group(OUTER, given),))


# ---- the numbers of steps


@dataclass(frozen=True)
class _Range:
    """The rounds [first, end) of one data set. `steps`: the rank's steps before the first of them."""

    first: int
    end: int
    steps: int
    units: EpochPlan


class Rounds:
    """Counts a rank's steps before a round. The last round of an epoch of `job.batches` may be shorter. Rounds without
    a known data set count as full."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._known: list[_Range] = []

    def add(self, first: int, units: EpochPlan, epochs: int) -> None:
        """Adds a data set whose rounds begin at `first`, after those of earlier data sets."""
        if not any(each.first == first for each in self._known):
            end = first + units.per_epoch * epochs
            self._known.append(_Range(first, end, self.steps_before(first), units))

    def steps_before(self, round_: int) -> int:
        found = next((each for each in reversed(self._known) if each.first <= round_), None)
        if found is None:
            return round_ * self._steps
        within = min(round_, found.end) - found.first
        return found.steps + found.units.steps_before(within) + (round_ - found.first - within) * self._steps


# ---- the inner optimizer


@dataclass(frozen=True)
class _RankState:
    """A rank's inner state at the beginning of a round."""

    round: int
    state: State


class InnerOptimizer:
    """The script's optimizer, with a state for each logical rank."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Each rank begins with the optimizer's current state."""
        self.optimizer = optimizer
        self.lost = 0
        """Rounds that began without the state of the round before, because another process had it."""
        self._first = _copied(optimizer.state)
        self._before: dict[Rank | None, _RankState] = {}
        """The state at the beginning of each rank's latest round."""
        self._after: dict[Rank | None, _RankState] = {}
        """The state after it, for the round that follows."""
        self._at: tuple[Rank | None, int] | None = None
        self._fresh = False
        self.is_stepping = False
        """Whether the job takes a step with it now."""

    def step(self, closure: Closure | None) -> float | None:
        self.is_stepping = True
        try:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        finally:
            self.is_stepping = False

    def begin(self, rank: Rank | None, round_: int) -> None:
        after, before = self._after.get(rank), self._before.get(rank)
        self._fresh = False
        if after is not None and after.round == round_:
            state, start = after.state, _copied(after.state)
        elif before is not None and before.round == round_:
            state, start = _copied(before.state), before.state
        else:
            self._fresh = round_ > 0
            state, start = _copied(self._first), _copied(self._first)
        # drop the states of ranks that other workers have now
        self._after = {each: kept for each, kept in self._after.items() if kept.round >= round_}
        self._before = {each: kept for each, kept in self._before.items() if kept.round >= round_ - 1}
        self._after.pop(rank, None)
        self._before[rank] = _RankState(round_, start)
        self.optimizer.state = state
        self._at = rank, round_

    def end(self, *, keeps: bool) -> None:
        """Ends the round. If not `keeps`, the state goes back to the round's beginning."""
        assert self._at is not None
        (rank, round_), self._at = self._at, None
        state = self.optimizer.state
        if self._fresh and any(state.values()):
            self.lost += 1
            log.warning(
                "logical rank %s began round %d without the inner optimizer's state of the round before, which another"
                " process had",
                rank,
                round_,
            )
        if not keeps:
            self.optimizer.state = state = _copied(self._before[rank].state)
        self._after[rank] = _RankState(round_ + 1, state)


def _copied(state: Mapping[torch.Tensor, Any]) -> State:
    """A copy of the state, for the same parameters."""
    return defaultdict(dict, {parameter: copy.deepcopy(kept) for parameter, kept in state.items()})


# ---- a round


class LocalRounds:
    """The rounds of one worker in one job. For one thread."""

    def __init__(
        self,
        trainer: Trainer,
        strategy: SyncStrategy,
        inner: InnerOptimizer,
        schedule: JobScheduler | None,
        *,
        parameters: int,
        steps: int,
    ) -> None:
        """The first `parameters` variables are the optimizer's, the others are buffers."""
        self._trainer = trainer
        self._strategy = strategy
        self._inner = inner
        self._schedule = schedule
        self._parameters = trainer.variables[:parameters]
        self._buffers: Sequence[Variable] = trainer.variables[parameters:]
        self._at: tuple[Rank | None, int] | None = None
        self._moving: set[int] = set()
        self.steps = steps
        self.rounds = Rounds(steps)
        self.taken = 0
        """Steps taken in the current round."""
        self.finite = True
        """Whether the last round ended with finite values."""
        self.dropped = 0
        """Rounds of this worker that did not count, because they ended with values that are not finite."""

    @property
    def step(self) -> int:
        """The number of steps that a logical rank has taken, up to this worker's position."""
        return self.rounds.steps_before(self._strategy.step) + self.taken

    @property
    def lost(self) -> int:
        """Rounds of this worker that began without the inner state of the round before."""
        return self._inner.lost

    @property
    def owes(self) -> bool:
        """Whether a rank of this worker has steps that were not pushed."""
        return self.taken > 0 and self._at is not None and self._at[0] is not None

    def enter(self, rank: Rank | None, round_: int) -> None:
        """From now on steps belong to that rank's round. `rank` None: this worker is on standby; its steps count for no
        rank."""
        if self._at == (rank, round_):
            return
        self._trainer.values.complete()
        self._at, self.taken, self._moving = (rank, round_), 0, set()
        self._inner.begin(rank, round_)
        if self._schedule is not None:
            self._schedule.follow()
            self._schedule.keep()

    def enter_own(self) -> None:
        """As `enter`, for a script with its own data: enters the rank that is due."""
        round_ = self._strategy.step
        if self.taken == 0:
            # if it may not begin, it is computed anyway, and does not count
            self._trainer.session.step_barrier.may_begin(round_)
        self.enter(self._strategy.due(), round_)

    def run(self, closure: Closure | None) -> float | None:
        """Takes one step of the inner optimizer."""
        if self._schedule is not None:
            self._schedule.follow()
        self._note()
        loss = self._inner.step(closure)
        if closure is not None:
            self._note()
        self.taken += 1
        return loss

    def outer(self, groups: tuple[tuple[float, ...], ...]) -> StepInput:
        """This round's contribution. For each parameter that had a gradient: its value at the round's beginning minus
        its value now. For buffers: their values. Afterwards `finite` says whether the round counts."""
        moved = self._trainer.values.moved(sorted(self._moving))
        wrong = next((index for index, each in moved.items() if not bool(torch.isfinite(each).all())), None)
        self.finite = wrong is None
        if wrong is not None:
            assert self._at is not None
            self.dropped += 1
            log.warning(
                "logical rank %s, round %d: %r is not finite after %d steps of this worker; the round does not count",
                *self._at,
                self._parameters[wrong].spec.name,
                self.taken,
            )
        sent = [moved.get(index) for index in range(len(self._parameters))]
        return StepInput([*sent, *(buffer.found for buffer in self._buffers)], 1.0, groups)

    def leave(self, *, keeps: bool) -> None:
        """Ends the round, which was contributed, or is lost. If not `keeps`, the rank's inner state goes back to the
        round's beginning."""
        self._at, self.taken = None, 0
        self._inner.end(keeps=keeps)

    def abandon(self) -> None:
        """Discards the current round. The model holds the job's values again."""
        if self._at is not None:
            self.leave(keeps=False)
            self._trainer.values.load()

    def _note(self) -> None:
        for index, variable in enumerate(self._parameters):
            if variable.target.grad is not None:
                self._moving.add(index)


class LocalOptimizer(torch.optim.Optimizer):
    """The optimizer that `job.prepare` returns in local mode. `step()` takes one step of the script's own optimizer. At
    the end of a round it also pushes the sum of the round's steps, and pulls the mean over all ranks.

    It shares its parameter groups with that optimizer, so that learning-rate schedulers built on either work.
    """

    def __init__(self, inner: torch.optim.Optimizer, run: Callable[[Closure | None], float | None]) -> None:
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.param_groups = inner.param_groups
        self._inner = inner
        self._run = run

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Closure) -> float: ...
    def step(self, closure: Closure | None = None) -> float | None:
        """Takes one step of this logical rank. Raises JobFailed if the job has ended with an error, InvalidRequest."""
        return self._run(closure)

    # torch must not call hooks here: they are registered on the inner optimizer, whose own step calls them
    step.hooked = True  # type: ignore[attr-defined]

    def register_step_pre_hook(self, hook: Any) -> Any:
        return self._inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        return self._inner.register_step_post_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, of the logical rank that was computed last."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Raises an error: each logical rank has its own state."""
        raise UnsupportedOptimizer(
            "load_state_dict on the optimizer of a job",
            why="each logical rank has a state of its own, and begins with what the optimizer had in job.prepare",
            todo="load the state into the optimizer before job.prepare",
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_run"):
            raise UnsupportedOptimizer(
                "a parameter group added after job.prepare",
                todo="give all parameters to the optimizer before job.prepare; freeze them with requires_grad_(False)",
            )
        super().add_param_group(param_group)


def refuse_without_optimizer(what: str) -> None:
    """Raises InvalidRequest."""
    raise InvalidRequest(
        f"{what} in a job whose job.consistency.mode is local",
        why="a round is made of steps of an optimizer in this process, and there is none",
        todo="give a model and an optimizer to job.prepare, or set job.consistency.mode to sync",
    )
