"""How long a process tries to reach its coordinator."""

from __future__ import annotations

import pytest

from shardyard.config.settings import MembershipSettings, Settings
from shardyard.domain import errors
from shardyard.domain.ids import Incarnation, MemberRole, RunName
from shardyard.transport.in_process import InProcessNetwork
from shardyard.transport.membership_client import Membership
from shardyard_worker.session import session as sessions
from shardyard_worker.session.session import Session


@pytest.mark.parametrize(
    ("agent", "run", "expected_ms"),
    [
        (None, None, sessions.FIRST_CONNECT_MS),
        (Incarnation(3), None, 60_000),
        (None, RunName("x"), 60_000),
    ],
)
def test_only_a_process_of_a_launch_waits_as_long_as_members_do(
    agent: Incarnation | None, run: RunName | None, expected_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried_ms: list[int] = []
    settings = Settings(membership=MembershipSettings(coordinator_grace_ms=60_000))
    session = Session(
        InProcessNetwork(), "in-process:none", settings, Membership(MemberRole.WORKER, agent=agent), run=run
    )

    def register(*, patience_ms: int) -> None:
        tried_ms.append(patience_ms)
        raise errors.CoordinatorUnavailable("nothing listens there")

    monkeypatch.setattr(session._membership, "register", register)
    with pytest.raises(errors.CoordinatorUnavailable):
        session.join()
    session.leave("could not join", lost=True)
    assert tried_ms == [expected_ms]
