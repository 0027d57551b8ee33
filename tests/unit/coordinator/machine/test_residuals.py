"""What compression has not sent yet, and is lost with its worker, is counted, told and remembered."""

from __future__ import annotations

import math
import sys

import pytest

from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain.errors import MalformedPayload
from shardyard.domain.ids import Incarnation, MemberRole, Term, Token
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.records import Body
from shardyard_coordinator.service import status
from shardyard_coordinator.service.rpcs import members
from shardyard_coordinator.work.losses import LostResiduals
from tests.simulation.restoring import numbered, renew, state_of
from tests.support.machine_yards import MachineYard
from tests.support.transcript_commands import FEED, SGD, VARIABLES

SETTINGS = JobSettings(workers_expected=3)


class Yard(MachineYard):
    def hire(self, residual: float) -> Incarnation:
        worker = self.join_as(self.register(MemberRole.WORKER), SETTINGS).incarnation
        self.beat(worker, Report(residual_norm=residual))
        return worker

    def lost(self) -> tuple[int, float]:
        (job,) = status.describe(self.machine, 0).jobs
        return job.residuals_lost, job.residual_lost_norm


def test_residuals_of_the_killed_are_counted_and_those_of_who_leaves_well_are_not() -> None:
    yard = Yard()
    for norm in (3.0, 4.0):
        yard.kill(yard.hire(norm))
    yard.kill(yard.hire(0.0))
    yard.hire(1.0)
    yard.handle(events.MemberLeft(yard.hire(12.0), ""))
    assert yard.lost() == (2, 5.0)
    assert sum("is lost, of 2-norm" in told for told in yard.told) == 2
    yard.handle(events.MemberLeft(yard.hire(12.0), "ValueError: no"))
    assert yard.lost() == (3, 13.0)


def test_residual_that_a_worker_says_to_be_lost_when_it_leaves_is_counted() -> None:
    yard = Yard()
    yard.hire(1.0)
    yard.handle(events.MemberLeft(yard.hire(12.0), "", residual_lost=3.0))
    assert [each.body["residual"] for each in yard.persisted if each.kind == "worker_gone"] == [3.0]
    assert yard.lost() == (1, 3.0)
    assert any("is lost, of 2-norm 3" in told for told in yard.told)


SYNC = JobSettings(consistency=ConsistencySettings(mode="sync"), workers_expected=1, partitions=2, idle_ms=5_000)


@pytest.mark.parametrize("end", ["data", "stop", "neither"])
def test_residual_is_not_lost_where_a_synchronous_job_takes_no_more_steps(end: str) -> None:
    yard = Yard()
    yard.register(MemberRole.SERVER, "s:0")
    caller = yard.join_as(yard.register(MemberRole.WORKER), SYNC)
    yard.open_job(caller, VARIABLES, SGD)
    yard.handle(events.FeedOpened(caller, 0, FEED))
    generation = yard.machine.jobs[-1].deployment.generation
    assert generation is not None
    if end == "data":
        returned = events.LeaseReturned(caller, 0, None, Token(0))
        yard.handle(events.LedgerRead(returned, 10, generation))
    elif end == "stop":
        yard.handle(events.StopRequested(caller, "", "loss is low"))
        yard.beat(caller.incarnation, Report(step=4, stop_reached=4))
        yard.handle(events.StepsRead(caller.job, generation, 4))
    is_lost = end == "neither"
    left = yard.handle(events.MemberLeft(caller.incarnation, "", residual_lost=3.0))
    assert left == effects.Left(residual_lost=is_lost)
    assert [each.body["residual"] for each in yard.persisted if each.kind == "worker_gone"] == [3.0 * is_lost]
    assert yard.lost() == ((1, 3.0) if is_lost else (0, 0.0))


def test_records_bring_back_what_is_lost() -> None:
    yard = Yard()
    yard.kill(yard.hire(3.0))
    yard.handle(events.MemberLeft(yard.hire(4.0), "", residual_lost=0.1))
    renew(yard.machine, 0)
    for persisted in (yard.persisted, yard.machine.snapshot()):
        again = Machine(term=Term(1), lease_ms=1_000, now_ms=0).restored(numbered(persisted))
        assert state_of(again) == state_of(yard.machine)
        assert again.jobs[0].lost_residuals.norm == math.hypot(3.0, 0.1)


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
def test_norm_that_is_none_is_refused(norm: float) -> None:
    with pytest.raises(MalformedPayload, match="residual of 2-norm"):
        members.heartbeat_event(wire.HeartbeatRequest(residual_norm=norm))
    assert members.heartbeat_event(wire.HeartbeatRequest(residual_norm=2.5)).report.residual_norm == 2.5
    with pytest.raises(MalformedPayload, match="residual of 2-norm"):
        members.leave_event(wire.LeaveRequest(residual_lost=norm))
    assert members.leave_event(wire.LeaveRequest(residual_lost=2.5)).residual_lost == 2.5


def test_sum_stays_a_number() -> None:
    lost = LostResiduals()
    for _ in range(5):
        lost.add(sys.float_info.max)
    assert lost.norm == sys.float_info.max
    ((kind, body),) = lost.entries()
    again = LostResiduals()
    again.restore(Body(body))
    assert (kind, again.count, again.norm) == ("residuals_lost_before", 5, lost.norm)
