"""What a worker in a bounded job tells the servers of its clock: rests (docs/internals/ledger.md, rule C3), and steps
that it gives up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shardyard.domain.consistency import Consistency, ConsistencyMode
from shardyard.domain.errors import StaleToken
from shardyard.domain.ids import Caller, Incarnation, Token
from shardyard.domain.push_names import DataShardSource, PushName, SourceKey
from shardyard.domain.replica_groups import Strategy
from shardyard_worker.consistency.asynchronous import AsyncStrategy
from shardyard_worker.consistency.strategy import LostWork
from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.exchange.requests import PullSpec
from shardyard_worker.session.session import Regime


class Servers:
    """The servers of one map."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.generation = session.generation
        self.rested: list[int] = []
        self.clocks: list[int] = []
        """Of this worker, as its pulls report them."""

    @property
    def is_behind(self) -> bool:
        return self._session.generation > self.generation

    def report_rest(self, turn: int) -> None:
        if self.is_behind:
            raise MapChanged
        self.rested.append(turn)

    def abandon_pull(self) -> None:
        """Nothing was begun."""

    def pull(self, pull: PullSpec) -> Any:
        assert pull.ssp_report is not None
        self.clocks.append(pull.ssp_report.clock)
        return SimpleNamespace(clock=0, missing=(), ahead=None, version_max=0)


class Session:
    """A session with a bound, or none, and the number of the newest map."""

    def __init__(self, bound: int | None) -> None:
        self.caller = Caller(incarnation=Incarnation(7))
        self.generation = 1
        self.mode = ConsistencyMode.ASYNC if bound is None else ConsistencyMode.BOUNDED
        self.consistency = Consistency(0, self.mode, bound)
        self.regime = Regime(self.mode.updates, Strategy.PARAMETER_SERVER)
        self.settings = SimpleNamespace(worker=SimpleNamespace(window=0))
        self.wait_registry = SimpleNamespace(over=lambda _: self)

    def reached(self, _: int) -> None:
        """The next heartbeat reports it."""

    def acknowledge_mode(self, _: Consistency) -> None:
        """No mode change is pending."""

    def __enter__(self) -> None:
        """A wait, which is over at once."""

    def __exit__(self, *_: object) -> None:
        """It is over."""


class Training:
    """A trainer without a model."""

    def __init__(self, session: Session) -> None:
        self.session, self.cache = session, None
        self.router = Servers(session)
        self.maps = [self.router]
        self.values = SimpleNamespace(load=lambda *_: None, complete=lambda: None)

    @property
    def link(self) -> Training:
        return self

    def reach(self, ask: Callable[[Servers], Any]) -> Any:
        while True:
            try:
                return ask(self.router)
            except MapChanged:
                self.router = Servers(self.session)
                self.maps.append(self.router)


def strategy(bound: int | None = 3) -> tuple[AsyncStrategy, Training, Session]:
    session = Session(bound)
    training = Training(session)
    given: Any = training
    return AsyncStrategy(given), training, session


@pytest.mark.parametrize("worked", [False, True])
def test_rule_c3_a_resting_worker_tells_the_servers_of_a_newer_map(worked: bool) -> None:
    """They were told to expect it, since it had work when the map was made. Its first report went to others."""
    made, training, session = strategy()
    if worked:
        made.resume()
    for _ in range(3):
        made.rest()
    session.generation = 2
    for _ in range(3):
        made.rest()
    assert [servers.rested for servers in training.maps] == [[0], [1]]


def test_a_worker_reports_each_rest() -> None:
    made, training, _ = strategy()
    for _ in range(3):
        made.resume()
        made.rest()
    assert training.router.rested == [0, 1, 2]


def test_without_a_bound_no_rest_is_reported() -> None:
    made, training, session = strategy(None)
    made.resume()
    made.rest()
    session.generation = 2
    made.rest()
    assert training.maps == [training.router]
    assert not training.router.rested


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_step_that_is_given_up_leaves_the_clock_where_it_was(is_sent: bool) -> None:
    """Another worker has the lease: the servers refuse its source when it is opened again, or the push itself."""

    def refuse(*_: object) -> None:
        raise StaleToken("another worker has it")

    made, training, _ = strategy()
    made.resume()
    given: Any = training
    given.pushes = SimpleNamespace(feedback=None, not_counted=lambda: None, build=lambda *_: None)
    given.router.open_sources = given.router.push_pull = refuse
    given.follow_map = lambda: None
    for number in range(3):
        name = PushName(SourceKey(DataShardSource(0, 0, number)), Token(1), 0, 0)
        if not is_sent:
            made.follow_map()
        with pytest.raises(LostWork):
            made.contribute(name, None)
    assert set(training.router.clocks) == {0}
    assert made.clock.steps == 0
