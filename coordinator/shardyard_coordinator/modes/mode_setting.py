"""The consistency mode of a running job, its bound on staleness, and its strategy (docs/guides/switching.md).

Owns: the latest switch, the mode in force until all servers know the switch, and which workers follow it. Invariants:
servers are told first, so that no worker relies on a bound that some server does not know. Workers are told once all
servers of the job's map follow the switch, and again under each new map. Of two switches, the one with the higher
number counts everywhere. A request for what is in force changes nothing. There is one switch at a time. Must not know:
servers, messages, what time it is.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Final

from shardyard.config.configuration import parse_job_settings
from shardyard.config.settings import JobSettings
from shardyard.domain import errors
from shardyard.domain.consistency import Consistency, ConsistencyMode, UpdateMode
from shardyard.domain.ids import Generation, Incarnation
from shardyard.domain.replica_groups import Strategy
from shardyard_coordinator.records import Body, Entry, require

SWITCHES_MAX: Final = (1 << 32) - 1
RETRY_MS: Final = 500
"""Between two tries to tell servers."""
SETTING: Final = "job.consistency.mode"
STRATEGY_SETTING: Final = "job.strategy"


class ModeSetting:
    """`mode` and `bound`: the mode and the staleness bound with which the job was started."""

    def __init__(self, mode: ConsistencyMode, bound: int | None) -> None:
        self.latest = Consistency(0, mode, bound)
        self._before = self.latest
        self._told: Generation | None = None
        self._asking = False
        self._retry_at_ms = 0
        self._left: Generation | None = None
        """The last map before the partitions were restored for another kind of updates, or another strategy."""
        self._by = 0
        """The checkpoint by way of which it did."""
        self._acknowledged: dict[Incarnation, int] = {}

    # ---- requests

    def ask(self, settings: JobSettings) -> list[Entry]:
        """Asks for these settings. Returns the records, none if the job follows them already. Raises NotReady while a
        switch is under way, TooLarge."""
        consistency = settings.consistency
        if (consistency.mode, consistency.bound) == (self.latest.mode, self.latest.bound):
            return []
        if self.is_under_way:
            raise errors.NotReady(
                f"job {settings.name!r} is being switched to {self.latest}: not all servers have been told",
                why="one switch at a time",
                todo="see `shardyard status`; ask again when they have",
            )
        self._switch(self.next_switch(settings))
        return [self._switched]

    def next_switch(self, settings: JobSettings, strategy: Strategy | None = None) -> Consistency:
        """The mode and bound of these settings, under the number of the next switch. `strategy`: the one to which the
        job switches; None: it keeps its own. Raises TooLarge."""
        if self.latest.number == SWITCHES_MAX:
            raise errors.TooLarge(f"job {settings.name!r} was switched {SWITCHES_MAX} times; no more are possible")
        consistency, kept = settings.consistency, strategy or self.latest.strategy
        return Consistency(self.latest.number + 1, consistency.mode, consistency.bound, kept)

    def switch_partitions(self, consistency: Consistency, generation: Generation, checkpoint: int) -> None:
        """Changes the kind of updates or the strategy, by way of that checkpoint. `generation`: of the last map of the
        former partitions."""
        self._switch(consistency)
        self._left, self._by = generation, checkpoint

    @property
    def has_switched_partitions(self) -> bool:
        """Whether the job has changed its kind of updates, or its strategy."""
        return self._left is not None

    def is_former_checkpoint(self, number: int) -> bool:
        """Whether the checkpoint is from before the last such change. Its data ledger may then mean something else,
        even if the mode is the same again."""
        return self._left is not None and number <= self._by

    def is_former_map(self, generation: Generation | None) -> bool:
        """Whether the map is from before the last such change."""
        return self._left is not None and generation is not None and generation <= self._left

    # ---- how far it is

    @property
    def is_under_way(self) -> bool:
        """Whether some server may not follow the latest switch yet."""
        return self.latest.number > 0 and self._told is None

    @property
    def in_force(self) -> Consistency:
        """What all servers follow, and workers shall follow. A change by way of a checkpoint is in force before anyone
        sees the new map."""
        restores = needs_checkpoint(self._before, self.latest)
        return self._before if self.is_under_way and not restores else self.latest

    def begin(self, generation: Generation | None, now_ms: int) -> bool:
        """Whether the servers of the map of that generation are to be told now. If so, the call counts as under way."""
        if not self.latest.number or self._told == generation or self._asking or now_ms < self._retry_at_ms:
            return False
        self._asking = True
        return True

    def end(self, generation: Generation | None, number: int) -> bool:
        """The servers of that map follow the switch of that number. Returns whether the workers are told now."""
        self._asking = False
        if number != self.latest.number:
            return False
        was_under_way, self._told = self.is_under_way, generation
        return was_under_way

    def fail(self, now_ms: int) -> None:
        """Some server did not answer."""
        self._asking, self._retry_at_ms = False, now_ms + RETRY_MS

    def acknowledge(self, worker: Incarnation, number: int) -> list[Entry]:
        """A worker reports which switch it follows. Returns the records."""
        if not self._acknowledged.get(worker, 0) < number <= self.latest.number:
            return []
        self._acknowledged[worker] = number
        return [_acknowledged(worker, number)]

    def follows_latest(self, worker: Incarnation) -> bool:
        return self._acknowledged.get(worker, 0) == self.latest.number

    def behind(self, workers: Collection[Incarnation]) -> tuple[Incarnation, ...]:
        """The living workers that do not follow the latest switch yet."""
        return tuple(worker for worker in sorted(workers) if not self.follows_latest(worker))

    def forget(self, worker: Incarnation) -> None:
        """The worker departed."""
        self._acknowledged.pop(worker, None)

    def _switch(self, consistency: Consistency) -> None:
        self._before, self.latest = self.latest, consistency
        self._told, self._asking, self._retry_at_ms = None, False, 0

    # ---- records

    @property
    def _switched(self) -> Entry:
        return "consistency_switched", {
            "number": self.latest.number,
            **consistency_body(self.latest),
            "before": consistency_body(self._before),
            "left": self._left,
            "by": self._by,
        }

    def entries(self) -> list[Entry]:
        """Records to read after the job's settings and its workers."""
        if not self.latest.number:
            return []
        return [self._switched, *(_acknowledged(*each) for each in self._acknowledged.items())]

    def restore(self, kind: str, body: Body) -> None:
        """Applies a record of `entries`. Raises DamagedRecord."""
        number = body.number("number", least=1, most=SWITCHES_MAX)
        if kind == "worker_switched":
            require(number <= self.latest.number, "a worker follows a switch that was not made")
            self._acknowledged[Incarnation(body.number("worker", least=1))] = number
            return
        require(number > self.latest.number, f"switch {number} comes after switch {self.latest.number}")
        before = consistency_of(body.part("before"), number - 1)
        self._switch(consistency_of(body, number))
        self._before = before
        if body.has("left") and not body.is_null("left"):
            self._left = Generation(body.number("left", least=1))
            self._by = body.number("by") if body.has("by") else 0


def needs_checkpoint(before: Consistency, after: Consistency) -> bool:
    """Whether the partitions are restored from a checkpoint when a job changes so."""
    return before.mode.updates is not after.mode.updates or before.strategy is not after.strategy


def switched(
    settings: JobSettings, mode: ConsistencyMode | None, staleness: int | None, strategy: Strategy | None = None
) -> JobSettings:
    """The settings of a running job with another mode, bound or strategy; None: unchanged. Raises InvalidRequest for a
    switch that cannot be made while the job runs, ConfigurationError if settings do not fit each other."""
    before = settings.consistency
    if strategy is not None and strategy is not settings.strategy:
        _check_strategy(settings, strategy, mode)
    wanted = before.mode if mode is None else mode
    if staleness is not None and wanted is not ConsistencyMode.BOUNDED:
        raise errors.InvalidRequest(
            f"a staleness of {staleness} for job {settings.name!r}, whose mode is {wanted.value}",
            why="the staleness of other modes has no bound",
            todo=f"set {SETTING}=bounded with it",
        )
    crosses = UpdateMode.SYNC in (wanted.updates, before.mode.updates)
    plain = all(mode is ConsistencyMode.SYNC or mode.updates is UpdateMode.ASYNC for mode in (wanted, before.mode))
    if wanted is not before.mode and crosses and not plain:
        raise errors.InvalidRequest(
            f"job {settings.name!r} runs in mode {before.mode.value}, and cannot switch to {wanted.value}",
            why="updates and pieces of work mean something else in the other mode",
            todo="while a job runs, it switches between sync, async and bounded only. For another mode, stop it"
            " (`shardyard stop`), export its model from its last checkpoint (`shardyard checkpoint export`), and start"
            f" a job with the model and {SETTING}={wanted.value}. Optimizer state and the position in the data start"
            " anew",
        )
    if wanted is not before.mode and crosses and settings.strategy.uses_groups:
        raise errors.InvalidRequest(
            f"job {settings.name!r} runs in mode {before.mode.value} with strategy {settings.strategy.value},"
            f" and cannot switch to {wanted.value}",
            why="its workers compute together, in groups that are formed for one kind of updates",
            todo="stop it (`shardyard stop`), order its last checkpoint (`shardyard checkpoint restore`), and start it"
            f" with {SETTING}={wanted.value}",
        )
    consistency = before.model_dump(mode="json") | {"mode": wanted.value}
    if staleness is not None:
        consistency["staleness"] = staleness
    kept = (strategy or settings.strategy).value
    changed = settings.model_dump(mode="json") | {"consistency": consistency, "strategy": kept}
    return parse_job_settings(json.dumps(changed))


def _check_strategy(settings: JobSettings, strategy: Strategy, mode: ConsistencyMode | None) -> None:
    """Raises InvalidRequest unless a running job can switch to this strategy."""
    what = f"job {settings.name!r} runs with strategy {settings.strategy.value}, and cannot switch to {strategy.value}"
    if not (settings.strategy.may_be_left and strategy.may_be_entered):
        raise errors.InvalidRequest(
            what,
            why="a running job switches from parameter_server, central_storage, mirrored or multi_worker_mirrored, to"
            " parameter_server or multi_worker_mirrored",
            todo="stop it (`shardyard stop`), order its last checkpoint (`shardyard checkpoint restore`), and start it"
            f" with {STRATEGY_SETTING}={strategy.value}",
        )
    if mode is not None and mode is not settings.consistency.mode:
        raise errors.InvalidRequest(
            f"{what} and to mode {mode.value} at once",
            why="each of both takes a checkpoint of its own",
            todo=f"set {SETTING} and {STRATEGY_SETTING} one after the other",
        )


def settings_of(settings: JobSettings, latest: Consistency) -> JobSettings:
    """The job's settings after its latest switch."""
    if not latest.number:
        return settings
    changed = {"mode": latest.mode} | ({} if latest.bound is None else {"staleness": latest.bound})
    strategy = {} if latest.strategy is None else {"strategy": latest.strategy}
    return settings.model_copy(update={"consistency": settings.consistency.model_copy(update=changed), **strategy})


def _acknowledged(worker: Incarnation, number: int) -> Entry:
    return "worker_switched", {"worker": worker, "number": number}


def consistency_body(consistency: Consistency) -> dict[str, object]:
    strategy = {} if consistency.strategy is None else {"strategy": consistency.strategy.value}
    return {"mode": consistency.mode.value, "staleness": consistency.bound, **strategy}


def consistency_of(body: Body, number: int) -> Consistency:
    """Raises DamagedRecord."""
    modes = {mode.value: mode for mode in ConsistencyMode}
    require(body.text("mode") in modes, f"mode {body.text('mode')!r}")
    bound = None if body.is_null("staleness") else body.number("staleness")
    mode = modes[body.text("mode")]
    require((bound is None) is not (mode is ConsistencyMode.BOUNDED), f"mode {mode.value} with staleness {bound}")
    if not body.has("strategy"):
        return Consistency(number, mode, bound)
    strategies = {strategy.value: strategy for strategy in Strategy}
    require(body.text("strategy") in strategies, f"strategy {body.text('strategy')!r}")
    return Consistency(number, mode, bound, strategies[body.text("strategy")])
