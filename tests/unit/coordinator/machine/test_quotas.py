"""How much of a yard the jobs of one owner may take."""

from __future__ import annotations

import itertools

import pytest

from shardyard.config.settings import JobSettings, QuotaSettings
from shardyard.domain import errors
from shardyard.domain.ids import Caller, Incarnation, JobId, MemberRole, Term
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.domain.variables import DType, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.members.progress import Report
from tests.support.machine_yards import MachineYard

SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)),)
TABLES = (TableSettings("items", 4),)


class Yard(MachineYard):
    def __init__(self, **quotas: int) -> None:
        super().__init__()
        self.machine = Machine(term=Term(1), lease_ms=1_000, now_ms=0, quotas=QuotaSettings(**quotas))
        self.server = self.register(MemberRole.SERVER, "s:0")
        self._numbers = itertools.count()

    def join(self, name: str, owner: str = "", partitions: int = 2) -> Caller:
        worker = self.register(MemberRole.WORKER, f"w:{next(self._numbers)}")
        settings = JobSettings(name=name, partitions=partitions)
        answer = self.handle(events.JobJoined(worker, name, settings, owner=owner))
        assert isinstance(answer, effects.Joined)
        return Caller(answer.job, worker)

    def begin(self, name: str, owner: str = "", tables: tuple[TableSettings, ...] = ()) -> Caller:
        caller = self.join(name, owner)
        self.handle(events.VariablesRegistered(caller, VARIABLES, SGD, tables))
        self.handle(events.PartitionsCreated(caller.job))
        self.handle(events.VariablesCommitted(caller))
        self.handle(events.PartitionsOpened(caller.job))
        return caller

    def tell_rows(self, rows: dict[JobId, int]) -> None:
        said = tuple((job, (count,)) for job, count in rows.items())
        self.handle(events.HeartbeatReceived(self.server, Report(), rows=said))
        self.handle(events.Ticked())

    def stops(self) -> list[str]:
        return [job.settings.name for job in self.machine.jobs if job.stopping.stop is not None]


def test_an_owner_has_so_many_unfinished_jobs() -> None:
    yard = Yard(jobs_max=2)
    first = yard.join("one", "ada")
    yard.join("two", "ada")
    yard.join("two", "ada")  # not another job
    before = yard.machine.snapshot()
    with pytest.raises(errors.QuotaExceeded, match=r"jobs of ada have 2 unfinished ones; quotas\.jobs_max is 2"):
        yard.join("three", "ada")
    assert [each for each in yard.machine.snapshot() if each.kind != "member_registered"] == [
        each for each in before if each.kind != "member_registered"
    ]
    yard.join("four", "eve")
    yard.join("five")
    yard.handle(events.MemberLeft(first.incarnation, ""))
    assert [job.phase.ended for job in yard.machine.jobs] == [True, False, False, False]
    yard.join("three", "ada")


def test_a_worker_waits_while_its_owner_has_as_many_as_it_may() -> None:
    yard = Yard(workers_max=2)
    yard.join("one", "ada")
    second = yard.join("two", "ada")
    for name in ("one", "new"):
        with pytest.raises(errors.NotReady, match=r"jobs of ada have 2 workers; quotas\.workers_max is 2"):
            yard.join(name, "ada")
    yard.join("eves", "eve")
    yard.kill(second.incarnation)
    yard.join("one", "ada")
    with pytest.raises(errors.NotReady):
        yard.join("one")  # the yard's own worker in a job of ada


@pytest.mark.parametrize(
    ("quotas", "said"),
    [
        ({"bytes_max": 2 * 48 * 4}, r"576 bytes of variables with job 'three' .*bytes_max is 384"),
        ({"partitions_max": 5}, r"6 partitions with job 'three' .*partitions_max is 5"),
    ],
)
def test_an_owner_has_so_much_room_for_variables(quotas: dict[str, int], said: str) -> None:
    yard = Yard(**quotas)
    yard.begin("one", "ada")
    second = yard.begin("two", "ada")
    caller = yard.join("three", "ada")
    with pytest.raises(errors.QuotaExceeded, match=said):
        yard.handle(events.VariablesRegistered(caller, VARIABLES, SGD))
    assert yard.machine.jobs[-1].deployment.layout is None
    yard.handle(events.VariablesRegistered(second, VARIABLES, SGD))  # a job that has its variables is not asked again
    yard.begin("eves", "eve")


def test_the_latest_job_with_tables_stops_when_its_owner_has_too_many_rows() -> None:
    yard = Yard(rows_max=100)
    one, two = yard.begin("one", "ada", TABLES), yard.begin("two", "ada", TABLES)
    yard.begin("dense", "ada")
    eves = yard.begin("eves", "eve", TABLES)
    yard.tell_rows({one.job: 40, two.job: 60, eves.job: 100})
    assert yard.stops() == []
    yard.tell_rows({one.job: 41, two.job: 60, eves.job: 100})
    assert yard.stops() == ["two"]
    assert any(
        text.startswith("job 'two'") and "the coordinator decided: the jobs of ada have 101 rows in tables" in text
        for text in yard.told
    )
    yard.tell_rows({one.job: 141, two.job: 60, eves.job: 100})
    assert yard.stops() == ["two"]  # it stops already, and gives its rows back when it has ended
    assert [text for text in yard.told if "decided" in text] == [yard.told[-1]]


def test_without_quotas_nothing_is_bounded() -> None:
    yard = Yard()
    callers = [yard.begin(f"job-{number}", "ada", TABLES) for number in range(20)]
    yard.tell_rows({caller.job: 1_000_000 for caller in callers})
    assert yard.stops() == []
    assert callers[0].incarnation != Incarnation(0)
