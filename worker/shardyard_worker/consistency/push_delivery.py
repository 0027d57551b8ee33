"""Delivers an asynchronous push: sends it until all servers have answered, whatever happens to partitions meanwhile.

Partitions that were restored do not know leases of a later time, so a data shard is opened again after each change of
the map (docs/internals/ledger.md, rule A5). Pushes of this worker's own cannot be computed again: if partitions were
restored to a point before them, the coordinator lets the partitions skip them, and they are lost (rule A11).

Owns: whether the map has changed since the source was opened. Must not know: values, what a lost push means for the
worker.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass

from shardyard.domain import errors
from shardyard.domain.push_names import PushName, WorkerSource
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.exchange.requests import ExchangeResult, PullSpec, PushRequest
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput

log = logging.getLogger("shardyard.worker")


@dataclass(frozen=True)
class Flight:
    """A push that another thread sends."""

    name: PushName
    sending: StepInput | None
    request: PushRequest
    pull: PullSpec
    answer: Future[ExchangeResult]


class PushDelivery:
    """For the thread that trains. All methods but `open_again` may raise SequenceGap, for leased work, and StaleToken,
    which means that another worker has it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.map_changed = False
        """Whether the map has changed since the last push."""

    def open_again(self, name: PushName) -> None:
        """Opens the source on the servers of a map that has changed since the last push. Raises StaleToken."""
        self.map_changed = False
        self._open(name)

    def push(self, request: PushRequest, pull: PullSpec, gap: errors.SequenceGap | None = None) -> ExchangeResult:
        """`gap`: the gap that an earlier attempt met."""
        in_vain = False
        while True:
            if gap is not None:  # outside the handlers below: a gap that cannot be closed is raised
                # a rebase may succeed and its answer be lost; then the next one has nothing to report
                in_vain, gap = not self._rebase(request.name, gap, in_vain=in_vain), None
            try:
                return self._trainer.link.router.push_pull(request, pull)
            except MapChanged:
                self._follow_map(request.name)
            except errors.SequenceGap as error:
                gap = error

    def finish(self, flight: Flight) -> ExchangeResult:
        try:
            return flight.answer.result()
        except MapChanged:
            # this thread follows the map, since it fills the buffers
            self._follow_map(flight.name)
            return self.push(flight.request, flight.pull)
        except errors.SequenceGap as gap:
            return self.push(flight.request, flight.pull, gap)

    def _rebase(self, name: PushName, gap: errors.SequenceGap, *, in_vain: bool) -> bool:
        """Makes restored partitions skip this worker's own pushes before `name`. Returns whether they lacked any.
        Raises the gap if the work is leased, or if a rebase `in_vain` did not close it."""
        if in_vain or not isinstance(name.key.source, WorkerSource):
            raise gap
        lost = self._trainer.rebase(name.first)
        if lost:
            log.warning("pushes of this worker are lost, since partitions were restored: %s", lost)
        return bool(lost)

    def _follow_map(self, name: PushName) -> None:
        self._trainer.follow_map()
        self._open(name)

    def _open(self, name: PushName) -> None:
        """A worker's own pushes need no lease."""
        if not isinstance(name.key.source, WorkerSource):
            self._trainer.reach(lambda router: router.open_sources([(name.key, name.token)]))
