"""Strategies of one machine. With central_storage all partitions are on one server of that machine."""

from __future__ import annotations

import pytest

from shardyard.config.settings import CheckpointSettings, JobSettings
from shardyard.domain import errors
from shardyard.domain.ids import Caller, Incarnation, MemberRole
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.replica_groups import Strategy
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import effects, events
from tests.support.machine_yards import MachineYard

VARIABLES = (VariableSpec("v", DType.FLOAT64, (400_000,)),)
SGD = OptimizerSpec("sgd", (make_group("sgd", {"lr": 1.0}),))


class Yard(MachineYard):
    """Servers on three machines, two of them on `here`, where the first worker is."""

    def __init__(self, servers_expected: int = 9) -> None:
        super().__init__(servers_expected=servers_expected)
        self.servers = {
            self.register(MemberRole.SERVER, f"s:{at}", host=host): host
            for at, host in enumerate(("there", "here", "here", "elsewhere"))
        }
        self.settings = JobSettings(
            strategy=Strategy.CENTRAL_STORAGE, checkpoint=CheckpointSettings(url="/checkpoints", every_s=0)
        )

    def hire(self, host: str) -> Caller:
        return self.join_as(self.register(MemberRole.WORKER, host=host), self.settings)

    def open(self, host: str = "here") -> Caller:
        """The job begins, with its first checkpoint."""
        self.first = self.hire(host)
        self.open_job(self.first, VARIABLES, SGD)
        self.handle(events.Ticked())
        self.complete_checkpoint(0)
        return self.first

    @property
    def owners(self) -> set[Incarnation]:
        found = self.machine.require_job(self.first).deployment.map
        assert found is not None
        assert len(found.owners) > 2
        return {each.server for each in found.owners}


def test_variables_are_on_one_server_of_the_workers_machine() -> None:
    yard = Yard()
    yard.open()
    (owner,) = yard.owners
    assert yard.servers[owner] == "here"


def test_a_worker_on_another_machine_is_refused() -> None:
    yard = Yard()
    yard.open()
    stranger = yard.hire("there")
    with pytest.raises(errors.ConfigurationError, match=r"a worker on there in .*, which is on here"):
        yard.handle(events.VariablesRegistered(stranger, VARIABLES, SGD))
    yard.handle(events.VariablesRegistered(yard.hire("here"), VARIABLES, SGD))


def test_a_job_without_a_server_on_its_machine_waits_for_one() -> None:
    yard = Yard()
    worker = yard.hire("far")
    with pytest.raises(errors.NotReady, match="waits for a server on far"):
        yard.handle(events.VariablesRegistered(worker, VARIABLES, SGD))
    server = yard.register(MemberRole.SERVER, "s:9", host="far")
    yard.open("far")
    assert yard.owners == {server}


def test_another_server_of_that_machine_takes_over() -> None:
    """Whatever other servers there are; and the partitions stay together."""
    yard = Yard()
    yard.open()
    (owner,) = yard.owners
    (other,) = {each for each, host in yard.servers.items() if host == "here"} - {owner}
    for _ in range(12):
        yard.now_ms += 200
        for each in (*yard.servers, yard.first.incarnation):
            if each != owner:
                yard.beat(each)
        yard.handle(events.Ticked())
    taken = yard.latest[effects.RestorePartitions]
    assert isinstance(taken, effects.RestorePartitions)
    assert {each.server for each in taken.map.owners} == {other}


def test_replicas_of_one_machine_are_on_one_machine() -> None:
    """Their servers may be anywhere: they hold what was published."""
    yard = Yard(servers_expected=4)
    yard.settings = yard.settings.model_copy(update={"strategy": Strategy.MIRRORED})
    yard.open("far")
    yard.handle(events.VariablesRegistered(yard.hire("far"), VARIABLES, SGD))
    with pytest.raises(errors.ConfigurationError, match=r"a worker on here in .*, which is on far"):
        yard.handle(events.VariablesRegistered(yard.hire("here"), VARIABLES, SGD))
