"""A job that has failed is dropped by its servers, maybe before its workers hear of it: they say why it failed."""

from __future__ import annotations

import pytest
import torch

from shardyard.domain import errors
from shardyard_ps_server.hosting import orders
from tests.support.alone import local_yard


@pytest.fixture(autouse=True)
def watched(alone: None) -> None:
    """Nothing is left behind."""


def test_promise_7_worker_whose_servers_dropped_the_job_says_why_though_a_heartbeat_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # no heartbeat of its own accord comes in between
    settings = {"membership.heartbeat_ms": 60_000, "membership.lease_ms": 400_000, "log.level": "error"}
    with local_yard(settings) as (yard, connect):
        job = connect()
        value = torch.nn.Parameter(torch.zeros(3))
        _, optimizer = job.prepare(torch.nn.ParameterList([value]), torch.optim.SGD([value], lr=1.0))
        asked: list[None] = []

        def beat() -> None:
            asked.append(None)
            if len(asked) < 3:
                raise errors.CoordinatorUnavailable("the coordinator does not answer")
            job._session.fail(errors.ServerLost("server 1.3 was silent"))

        monkeypatch.setattr(job._session._membership, "beat", beat)
        for server in yard._servers:
            orders.drop(server.store, job._session.caller.job)
        value.grad = torch.ones(3)
        with pytest.raises(errors.ServerLost, match=r"server 1\.3 was silent"):
            optimizer.step()
        assert len(asked) == 3
        job.close("it has failed")


def test_version_that_has_passed_waits_for_no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_yard({}) as (_, connect), connect() as job:
        value = torch.nn.Parameter(torch.zeros(3))
        job.prepare(torch.nn.ParameterList([value]), torch.optim.SGD([value], lr=1.0))
        asked: list[None] = []

        def beat() -> None:
            asked.append(None)
            if len(asked) > 1:
                raise AssertionError("asked again")
            raise errors.CoordinatorUnavailable("the coordinator does not answer")

        with monkeypatch.context() as patch:
            patch.setattr(job._session._membership, "beat", beat)
            assert job._loop.trainer is not None
            job._loop.trainer.router._fan_out._refresh_and_check(errors.NotFound("version 3", facts={"newest": "5"}))
