"""What all consistency modes have in common: a strategy turns a worker's work into named pushes.

A strategy decides three things: the name of the next push, the version that the model must hold meanwhile, and when a
step is over. Asynchronous: any version, over at once. Synchronous: exactly version t for step t, over when all logical
ranks have contributed, or when this worker has another rank of the step to compute (docs/internals/ledger.md, rules B1
to B5).

Invariant: when `contribute` returns, the targets hold the version for the next gradient, or will hold it when they are
used (ForwardPrefetch). Must not know: datasets, optimizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from shardyard.domain import errors
from shardyard.domain.push_names import PushName
from shardyard.domain.pushes import Outcome
from shardyard_worker.exchange.requests import ExchangeResult
from shardyard_worker.session.session import Session
from shardyard_worker.training.table_binding import Upcoming
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput


class LostWork(Exception):
    """Another worker has this work now, or its partitions have moved. The model holds a current version."""


class ModeChanged(LostWork):
    """The job's kind of updates, or its strategy, has changed. Logical ranks' work that did not count as a step is
    computed under the other strategy, or leased as data shards; the rest of open data shards becomes steps. The targets
    stay as they are until another strategy begins."""


class Strategy(ABC):
    """One worker's strategy in one job. For one thread."""

    is_synchronous: ClassVar[bool] = False
    """Whether its pushes are named by logical ranks and steps."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._session = trainer.session
        self._regime = trainer.session.regime

    @property
    def is_current(self) -> bool:
        """Whether the job has not changed its kind of updates or its strategy since this was made."""
        return self._session.regime == self._regime

    @property
    @abstractmethod
    def step(self) -> int:
        """The number of updates applied, as far as this worker has seen."""

    @abstractmethod
    def begin(self) -> None:
        """If this worker has work, loads a version to compute it on into the targets."""

    @abstractmethod
    def contribute(self, name: PushName | None, sending: StepInput | None, upcoming: Upcoming | None = None) -> None:
        """Pushes work under its name, or under one of this worker's own. `sending` None: it does not count. `upcoming`:
        rows that arrive with the values.

        Raises LostWork if another worker has taken the work over.
        """

    @abstractmethod
    def leave(self, groups: tuple[tuple[float, ...], ...]) -> None:
        """Before this worker leaves without an error: waits for the push in flight, and pushes or reports the residual
        that compression has kept. `groups`: the settings for that push. Raises LostWork."""

    def drop(self) -> None:  # noqa: B027
        """A batch was computed that is no work of this worker, and is not pushed."""

    # ---- where a push stays in flight, or servers wait for workers that have work

    def resume(self) -> None:  # noqa: B027 - by default there is nothing to do
        """This worker has work. Afterwards the targets hold a version to compute it on."""

    def rest(self) -> None:  # noqa: B027
        """This worker has no work, for now or for good."""

    def finish_pushes(self) -> None:  # noqa: B027
        """Waits for the push in flight. Raises LostWork if its work belongs to another worker."""

    def close(self) -> None:  # noqa: B027
        """Ends threads. No contribution may follow."""

    # ---- the step at hand (StepContext)

    @abstractmethod
    def reload(self) -> None: ...

    @abstractmethod
    def follow_map(self) -> None: ...

    def rows_version(self) -> int | None:
        return None

    def on_rows_version_passed(self, error: errors.NotFound) -> None:
        raise error


def note_progress(session: Session, answer: ExchangeResult, sending: StepInput | None, step: int) -> None:
    """Reports a push's samples, and the step, in the next heartbeat."""
    if sending is not None and sending.coded:
        for result in answer.results:
            if result.outcome is not Outcome.DUPLICATE:
                session.progress.samples += round(sending.weight) if sending.samples is None else sending.samples
                break
    session.reached(step)
