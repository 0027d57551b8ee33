"""That a running job goes on under another consistency mode, or another bound on staleness (docs/consistency.md).

Owns: what a job was switched to last, what it goes by until all servers have been told, which of its workers have gone
over. Invariants: servers go over first, so that no worker relies on a bound that some server does not know; a worker is
told of a switch once all servers of the job's map go by it, and again whenever the map is another one; of two switches
the one with the higher number counts, everywhere; what was asked for and is in force already changes nothing; there is
one at a time. Must not know: servers, messages, what time it is.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

from shardyard.ground import errors
from shardyard.ground.types import Consistency, ConsistencyMode, Generation, Incarnation, UpdateMode
from shardyard.runtime.configuration import parse_job_settings
from shardyard.runtime.settings import JobSettings
from shardyard_coordinator.records import Body, Entry, require

SWITCHES_MAX: Final = (1 << 32) - 1
RETRY_MS: Final = 500
"""Between two tries to tell servers."""
SETTING: Final = "job.consistency.mode"


class Switching:
    """Of one job that was started under a `mode` and a `bound` on staleness."""

    def __init__(self, mode: ConsistencyMode, bound: int | None) -> None:
        self.latest = Consistency(0, mode, bound)
        self._before = self.latest
        self._told: Generation | None = None
        self._asking = False
        self._retry_at_ms = 0
        self._gone_over: dict[Incarnation, int] = {}

    # ---- what is asked

    def ask(self, settings: JobSettings) -> list[Entry]:
        """The job is to go by these settings. Records; none where it does. Raises NotReady while a switch is under way,
        TooLarge."""
        consistency = settings.consistency
        if (consistency.mode, consistency.bound) == (self.latest.mode, self.latest.bound):
            return []
        if self.is_under_way:
            raise errors.NotReady(
                f"job {settings.name!r} is being switched to {self.latest}: not all servers have been told",
                why="one switch at a time",
                todo="see `shardyard status`; ask again when they have",
            )
        if self.latest.number == SWITCHES_MAX:
            raise errors.TooLarge(f"job {settings.name!r} was switched {SWITCHES_MAX} times; that is all it can be")
        self._switch(Consistency(self.latest.number + 1, consistency.mode, consistency.bound))
        return [self._switched]

    # ---- how far it is

    @property
    def is_under_way(self) -> bool:
        """Whether some server may not go by it."""
        return self.latest.number > 0 and self._told is None

    @property
    def in_force(self) -> Consistency:
        """What all servers go by, and workers shall."""
        return self._before if self.is_under_way else self.latest

    def begin(self, generation: Generation | None, now_ms: int) -> bool:
        """Whether the servers of the map of that generation are to be told now; then they are being told."""
        if not self.latest.number or self._told == generation or self._asking or now_ms < self._retry_at_ms:
            return False
        self._asking = True
        return True

    def end(self, generation: Generation | None, number: int) -> bool:
        """The servers of that map go by the switch of that number. Whether the workers hear of it now."""
        self._asking = False
        if number != self.latest.number:
            return False
        was_under_way, self._told = self.is_under_way, generation
        return was_under_way

    def fail(self, now_ms: int) -> None:
        """Some server did not answer."""
        self._asking, self._retry_at_ms = False, now_ms + RETRY_MS

    def hear(self, worker: Incarnation, number: int) -> list[Entry]:
        """A worker says by which switch it goes. Records."""
        if not self._gone_over.get(worker, 0) < number <= self.latest.number:
            return []
        self._gone_over[worker] = number
        return [_gone_over(worker, number)]

    def goes_by_latest(self, worker: Incarnation) -> bool:
        return self._gone_over.get(worker, 0) == self.latest.number

    def behind(self, workers: Collection[Incarnation]) -> tuple[Incarnation, ...]:
        """Those of the living that have not gone over yet."""
        return tuple(worker for worker in sorted(workers) if not self.goes_by_latest(worker))

    def forget(self, worker: Incarnation) -> None:
        """It is gone."""
        self._gone_over.pop(worker, None)

    def _switch(self, consistency: Consistency) -> None:
        self._before, self.latest = self.latest, consistency
        self._told, self._asking, self._retry_at_ms = None, False, 0

    # ---- records

    @property
    def _switched(self) -> Entry:
        return "consistency_switched", {
            "number": self.latest.number,
            **_said(self.latest),
            "before": _said(self._before),
        }

    def entries(self) -> list[Entry]:
        """After the job's settings, and its workers."""
        if not self.latest.number:
            return []
        return [self._switched, *(_gone_over(*each) for each in self._gone_over.items())]

    def restore(self, kind: str, body: Body) -> None:
        """Takes a record of `entries`. Raises DamagedRecord."""
        number = body.number("number", least=1, most=SWITCHES_MAX)
        if kind == "worker_gone_over":
            require(number <= self.latest.number, "a worker goes by a switch that was not")
            self._gone_over[Incarnation(body.number("worker", least=1))] = number
            return
        require(number > self.latest.number, f"switch {number} comes after switch {self.latest.number}")
        before = _read(body.part("before"), number - 1)
        self._switch(_read(body, number))
        self._before = before


def switched(settings: JobSettings, mode: ConsistencyMode | None, staleness: int | None) -> JobSettings:
    """The settings of a running job with another mode or bound; None: as it is. Raises InvalidRequest for a switch that
    cannot be made while it runs, ConfigurationError where settings do not fit each other."""
    before = settings.consistency
    wanted = before.mode if mode is None else mode
    if staleness is not None and wanted is not ConsistencyMode.BOUNDED:
        raise errors.InvalidRequest(
            f"a staleness of {staleness} for job {settings.name!r}, whose mode is {wanted.value}",
            why="the staleness of other modes has no bound",
            todo=f"set {SETTING}=bounded with it",
        )
    if wanted is not before.mode and UpdateMode.SYNC in (wanted.updates, before.mode.updates):
        raise errors.InvalidRequest(
            f"job {settings.name!r} runs in mode {before.mode.value}, and cannot go over to {wanted.value}",
            why="an update means something else there, and so does a piece of work",
            todo="a job that runs is switched between async and bounded. Else stop it (`shardyard stop`), take its"
            " model from its last checkpoint (`shardyard checkpoint export`), and start a job with that, whose"
            f" {SETTING} is {wanted.value}: state of optimizers and the place in the data begin anew",
        )
    consistency = before.model_dump(mode="json") | {"mode": wanted.value}
    if staleness is not None:
        consistency["staleness"] = staleness
    told = settings.model_dump(mode="json") | {"consistency": consistency}
    return parse_job_settings(json.dumps(told))


def settings_of(settings: JobSettings, latest: Consistency) -> JobSettings:
    """A job's settings as of its latest switch."""
    if not latest.number:
        return settings
    changed = {"mode": latest.mode} | ({} if latest.bound is None else {"staleness": latest.bound})
    return settings.model_copy(update={"consistency": settings.consistency.model_copy(update=changed)})


def _gone_over(worker: Incarnation, number: int) -> Entry:
    return "worker_gone_over", {"worker": worker, "number": number}


def _said(consistency: Consistency) -> dict[str, object]:
    return {"mode": consistency.mode.value, "staleness": consistency.bound}


def _read(body: Body, number: int) -> Consistency:
    modes = {mode.value: mode for mode in ConsistencyMode}
    require(body.text("mode") in modes, f"mode {body.text('mode')!r}")
    bound = None if body.is_null("staleness") else body.number("staleness")
    mode = modes[body.text("mode")]
    require((bound is None) is not (mode is ConsistencyMode.BOUNDED), f"mode {mode.value} with staleness {bound}")
    return Consistency(number, mode, bound)
