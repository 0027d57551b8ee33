"""A machine that comes back from its records: what each of them brings back, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator

import pytest

from shardyard.checkpoints import layout as layouts
from shardyard.config.settings import ConsistencySettings, JobSettings
from shardyard.domain import limits
from shardyard.domain.consistency import ConsistencyMode, UpdateMode
from shardyard.domain.errors import ConfigurationError, NotReady, ServerLost, StaleIncarnation, StaleToken
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, MemberRole, Rank, Term, Token
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import DataLease, RankLease
from shardyard.domain.tables.table_settings import ExpirySettings, TableSettings
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard_coordinator.core import effects, events
from shardyard_coordinator.core.effects import JobPhase
from shardyard_coordinator.flows import job_end
from shardyard_coordinator.machine import job_views
from shardyard_coordinator.machine.job_directory import JOBS_ENDED_MAX
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.members.membership import Registration
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.members.roster import LATE_MS
from shardyard_coordinator.placement import layout_records, placement
from shardyard_coordinator.records import Body, Record
from shardyard_coordinator.service.status import describe
from shardyard_coordinator.work.feeds import FeedOpening, FeedSpec, LeaseWait
from tests.support.machine_yards import MachineYard

LEASE_MS = 1_000
VARIABLES = (VariableSpec("w", DType.FLOAT32, (48,)), VariableSpec("b", DType.FLOAT32, (3,)))
SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))
SETTINGS = JobSettings(partitions=3, idle_ms=5_000)
SYNC = JobSettings(
    partitions=3, consistency=ConsistencySettings(mode=ConsistencyMode.SYNC), workers_expected=2, rank_grace_ms=0
)

FEED = FeedSpec(samples=100, fingerprint="f", batch_size=10, epochs=1, shuffle=True, drop_last=False)


class Yard(MachineYard):
    def __init__(self, servers: int = 2) -> None:
        super().__init__(lease_ms=LEASE_MS)
        self.servers = [self.register(MemberRole.SERVER, f"s:{index}") for index in range(servers)]

    def restart(self, *, from_snapshot: bool = False) -> list[effects.Effect]:
        """A minute later."""
        self.now_ms += 60_000
        return super().restart(from_snapshot=from_snapshot)

    def join(self, settings: JobSettings = SETTINGS) -> Caller:
        return self.join_as(self.register(MemberRole.WORKER, agent=Incarnation(77), local_index=3), settings)

    def variables(self, caller: Caller) -> object:
        return self.handle(events.VariablesRegistered(caller, VARIABLES, SGD))

    def run(self, caller: Caller) -> None:
        """From joined to RUNNING."""
        self.open_job(caller, VARIABLES, SGD)

    def lease(self, caller: Caller) -> DataLease:
        answer = self.handle(events.LeaseRequested(caller, 0))
        assert isinstance(answer, DataLease)
        return answer

    def advance(self, ms: int, *alive: Incarnation) -> list[effects.Effect]:
        """Time passes in small steps while some members beat; gives all effects of the ticks."""
        found: list[effects.Effect] = []
        for _ in range(0, ms, 100):
            self.now_ms += 100
            for member in alive:
                self.beat(member)
            self.handle(events.Ticked())
            found += self.effects
        return found


def journaled(persisted: list[effects.Persist]) -> list[Record]:
    """As a journal gives them back."""
    return [
        Record(number, 1, 0.0, each.kind, json.loads(json.dumps(each.body)))
        for number, each in enumerate(persisted, 11)
    ]


def restored(written: list[Record], *, term: int = 2, now_ms: int = 0) -> Machine:
    return Machine(term=Term(term), lease_ms=LEASE_MS, now_ms=now_ms).restored(written)


@pytest.fixture
def yard() -> Yard:
    return Yard()


# ---- members


def test_members_are_what_they_were_in_a_higher_term(yard: Yard, short: bool) -> None:
    caller = yard.join()
    before = [(each.incarnation, each.registration, each.job) for each in yard.machine.members]
    yard.restart(from_snapshot=short)
    assert yard.machine.term == 2
    assert [(each.incarnation, each.registration, each.job) for each in yard.machine.members] == before
    assert yard.beat(caller.incarnation).job_state is JobPhase.STARTING
    fresh = yard.register(MemberRole.AGENT, "a:1")
    assert str(fresh) == "2.1"
    assert yard.join(SETTINGS.model_copy(update={"name": "other"})).job == JobId(2 << 32 | 1)


def test_numbers_never_go_back_even_within_a_term(yard: Yard, short: bool) -> None:
    caller = yard.join()
    yard.handle(events.MemberLeft(caller.incarnation, ""))
    written = yard.machine.snapshot() if short else yard.persisted
    yard.machine = restored(journaled(written), term=1)
    assert yard.register(MemberRole.WORKER) > caller.incarnation
    assert yard.join().job > caller.job


def test_removed_member_stays_refused_with_the_reason(yard: Yard, short: bool) -> None:
    caller, other = yard.join(), yard.join()
    yard.advance(LEASE_MS, other.incarnation, *yard.servers)
    yard.restart(from_snapshot=short)
    with pytest.raises(StaleIncarnation, match="it was silent for"):
        yard.beat(caller.incarnation)
    yard.beat(other.incarnation)


def test_every_lease_counts_as_just_renewed(yard: Yard, short: bool) -> None:
    caller = yard.join()
    yard.restart(from_snapshot=short)
    yard.advance(LEASE_MS - 100)
    assert len(yard.machine.members) == 3
    yard.beat(caller.incarnation)
    yard.advance(100)
    assert [each.incarnation for each in yard.machine.members] == [caller.incarnation]


# ---- jobs


def test_running_job_goes_on_with_the_map_that_everyone_has(yard: Yard, short: bool) -> None:
    caller = yard.join()
    yard.run(caller)
    before = yard.variables(caller)
    assert yard.restart(from_snapshot=short) == []
    assert yard.beat(caller.incarnation).job_state is JobPhase.RUNNING
    assert yard.variables(caller) == before
    assert yard.join().job == caller.job


def test_layout_is_never_planned_anew(yard: Yard) -> None:
    caller = yard.join()
    yard.run(caller)
    written = journaled(yard.persisted)
    (record,) = (each for each in written if each.kind == "variables_registered")
    record.body["layout"]["partitions"].reverse()  # type: ignore[index]
    record.body["map"]["owners"].reverse()  # type: ignore[index]
    placed = yard.variables(caller)
    assert isinstance(placed, effects.VariablesPlaced)
    yard.machine = restored(written)
    again = yard.variables(caller)
    assert isinstance(again, effects.VariablesPlaced)
    kept = [part.blocks for part in placed.layout.partitions]
    assert [part.blocks for part in again.layout.partitions] == kept[::-1]
    assert [owner.server for owner in again.map.owners] == [owner.server for owner in placed.map.owners][::-1]


def read_back(layout: JobLayout) -> JobLayout:
    written = json.dumps({"layout": layouts.to_document(layout)})
    return layout_records.layout_of_record(Body(json.loads(written)))


def test_layout_and_map_come_back_to_the_last_offset() -> None:
    variables = tuple(
        VariableSpec(f"v{number}", dtype, (number, 7), kind, number % 2)
        for number, (dtype, kind) in enumerate(itertools.product(DType, VariableKind))
        if dtype.is_floating or kind is VariableKind.BUFFER
    )
    groups = ((0.1, 1e-300, 0.0, 0.0, 0.0, 0.0), (3.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    layout = placement.plan(variables, OptimizerSpec("sgd", groups), partitions=3, block_bytes=128)
    assert max(block.position for part in layout.partitions for block in part.blocks) > 128
    assert max(block.offset for part in layout.partitions for block in part.blocks) > 0
    assert read_back(layout) == layout
    in_time = ExpirySettings(norm_min=0.5, age_ms=70_000, grace_ms=9)
    tables = (TableSettings("steps", 3, expiry=ExpirySettings(age_steps=4)), TableSettings("time", 3, expiry=in_time))
    with_tables = dataclasses.replace(layout, tables=tables)
    assert read_back(with_tables) == with_tables
    servers = [placement.Server(Incarnation(number << 32 | 1), f"s:{number}") for number in range(2)]
    map_ = placement.assign([part.payload_bytes for part in layout.partitions], servers, generation=Generation(4))
    written = json.dumps({"map": layout_records.map_to_record(map_)})
    assert layout_records.map_of_record(Body(json.loads(written)), 3) == map_


def test_block_beyond_its_variable_is_refused(yard: Yard) -> None:
    caller = yard.join()
    yard.run(caller)
    for block in ([0, 0, 49, 0], [0, 40, 9, 0], [2, 0, 1, 0]):
        written = journaled(yard.persisted)
        (record,) = (each for each in written if each.kind == "variables_registered")
        record.body["layout"]["partitions"][0] = {"payload_bytes": 192, "blocks": [block]}  # type: ignore[index]
        with pytest.raises(ConfigurationError, match=f"record {record.number} .*a block of"):
            restored(written)


def test_layout_that_is_not_whole_is_refused(yard: Yard) -> None:
    caller = yard.join()
    yard.run(caller)
    written = journaled(yard.persisted)
    (record,) = (each for each in written if each.kind == "variables_registered")
    record.body["layout"]["partitions"][0] = {"payload_bytes": 0, "blocks": []}  # type: ignore[index]
    with pytest.raises(ConfigurationError, match=f"record {record.number} .*the blocks of .* have 0 elements"):
        restored(written)


def test_partitions_that_were_being_created_are_created_again(yard: Yard, short: bool) -> None:
    caller = yard.join()
    yard.variables(caller)
    first = yard.wanted(effects.CreatePartitions)
    yard.restart(from_snapshot=short)
    assert yard.variables(caller) is None
    assert yard.wanted(effects.CreatePartitions) == first
    yard.handle(events.PartitionsCreated(caller.job))
    placed = yard.variables(caller)
    assert isinstance(placed, effects.VariablesPlaced)
    assert placed.initializer


def test_created_partitions_keep_their_initializer(yard: Yard, short: bool) -> None:
    first, second = yard.join(), yard.join()
    yard.variables(second)
    yard.handle(events.PartitionsCreated(first.job))
    yard.variables(first)
    yard.restart(from_snapshot=short)
    assert [yard.beat(each.incarnation).initializer for each in (first, second)] == [False, True]
    assert yard.variables(first) is not None
    assert yard.wanted(effects.CreatePartitions) == []
    yard.handle(events.VariablesCommitted(second))
    assert len(yard.wanted(effects.OpenPartitions)) == 2


def test_committed_values_are_opened_by_the_next_coordinator(yard: Yard, short: bool) -> None:
    caller = yard.join()
    yard.variables(caller)
    yard.handle(events.PartitionsCreated(caller.job))
    yard.handle(events.VariablesCommitted(caller))
    yard.restart(from_snapshot=short)
    yard.handle(events.Ticked())
    assert len(yard.wanted(effects.OpenPartitions)) == 2
    with pytest.raises(NotReady, match="opening"):
        yard.handle(events.VariablesCommitted(caller))
    yard.handle(events.PartitionsOpened(caller.job))
    assert yard.handle(events.VariablesCommitted(caller)) == effects.Acknowledged()
    assert yard.machine.jobs[-1].phase is JobPhase.RUNNING


def test_ended_jobs_stay_visible_and_are_dropped_again_where_servers_live(yard: Yard, short: bool) -> None:
    caller = yard.join()
    yard.run(caller)
    yard.beat(caller.incarnation, Report(step=7, samples=70, metrics=(("loss", 0.25),)))
    yard.advance(LEASE_MS, caller.incarnation, yard.servers[0])
    failed = yard.job()
    assert yard.machine.jobs[-1].phase is JobPhase.FAILED
    again = yard.restart(from_snapshot=short)
    assert [(type(each), each.server.incarnation) for each in again] == [(effects.DropJob, yard.servers[0])]  # type: ignore[union-attr]
    job = yard.job()
    assert yard.machine.jobs[-1].phase is JobPhase.FAILED
    assert (job.step, job.samples) == (7, 70)
    assert [(each.name, each.value) for each in job.metrics] == [("loss", 0.25)]
    assert (job.map, job.parameters, job.payload_bytes) == (failed.map, failed.parameters, failed.payload_bytes)
    with pytest.raises(ServerLost, match="at s:1 was silent") as caught:
        yard.handle(events.LeaseRequested(caller, 0))
    assert caught.value.facts == {"server": str(yard.servers[1]), "address": "s:1"}


def test_forgotten_jobs_stay_forgotten_and_their_workers_too(yard: Yard, short: bool) -> None:
    caller = yard.join(SETTINGS.model_copy(update={"workers_expected": 9}))
    job = yard.machine.jobs[0]
    yard.run(caller)
    yard.persisted += [each for each in job_end.fail(job, ServerLost("gone")) if isinstance(each, effects.Persist)]
    for _ in range(JOBS_ENDED_MAX + 1):
        yard.handle(events.MemberLeft(yard.join().incarnation, ""))
    shown = [each.job for each in describe(yard.machine, yard.now_ms).jobs]
    yard.restart(from_snapshot=short)
    assert [each.job for each in describe(yard.machine, yard.now_ms).jobs] == shown
    assert caller.job not in shown
    assert next(each.job for each in yard.machine.members if each.incarnation == caller.incarnation) == caller.job
    assert yard.beat(caller.incarnation) == effects.HeartbeatReply()


# ---- workers


def test_job_whose_workers_are_all_gone_waits_its_idle_time_anew(yard: Yard, short: bool) -> None:
    caller = yard.join()
    yard.run(caller)
    yard.advance(LEASE_MS + SETTINGS.idle_ms - 200, *yard.servers)
    yard.restart(from_snapshot=short)
    yard.advance(SETTINGS.idle_ms - 100, *yard.servers)
    assert yard.machine.jobs[-1].phase is JobPhase.RUNNING
    yard.advance(100, *yard.servers)
    job = yard.machine.jobs[-1]
    assert job.failure is not None
    assert f"worker {caller.incarnation}, was silent" in job.failure.what


def test_job_that_waits_for_late_workers_is_finished_anew_after_a_while(yard: Yard, short: bool) -> None:
    caller = yard.join(SETTINGS.model_copy(update={"workers_expected": 2, "idle_ms": 600_000}))
    yard.run(caller)
    yard.handle(events.MemberLeft(caller.incarnation, ""))
    yard.restart(from_snapshot=short)
    yard.advance(LATE_MS - 100, *yard.servers)
    assert yard.machine.jobs[-1].phase is JobPhase.RUNNING
    yard.advance(100, *yard.servers)
    assert yard.machine.jobs[-1].phase is JobPhase.FINISHED


def test_goodbyes_and_the_chief_that_is_done_are_remembered(yard: Yard, short: bool) -> None:
    settings = SETTINGS.model_copy(update={"workers_expected": 2})
    first, second = yard.join(settings), yard.join(settings)
    yard.run(first)
    yard.handle(events.MemberLeft(first.incarnation, ""))
    yard.restart(from_snapshot=short)
    assert not yard.beat(second.incarnation).chief
    yard.handle(events.MemberLeft(second.incarnation, ""))
    assert yard.machine.jobs[-1].phase is JobPhase.FINISHED


def test_fence_that_was_under_way_is_made_again_before_the_work_goes_on(yard: Yard, short: bool) -> None:
    first, second = yard.join(), yard.join()
    yard.run(first)
    yard.handle(events.FeedOpened(first, 0, dataclasses.replace(FEED, samples=10)))
    lease = yard.lease(first)
    yard.advance(LEASE_MS, second.incarnation, *yard.servers)
    (fence,) = yard.restart(from_snapshot=short)
    assert isinstance(fence, effects.FenceOnServers)
    assert fence.workers == (first.incarnation,)
    assert [server.incarnation for server in fence.servers] == yard.servers
    assert yard.beat(yard.servers[0]).fenced == (first.incarnation,)
    assert isinstance(yard.handle(events.LeaseRequested(second, 0)), LeaseWait)
    yard.handle(events.WorkersFenced(fence.job, fence.workers))
    again = yard.lease(second)
    assert (again.source, again.token > lease.token) == (lease.source, True)


# ---- work


def test_leases_tokens_and_closed_data_shards_are_remembered(yard: Yard, short: bool) -> None:
    caller = yard.join()
    yard.run(caller)
    opened = yard.handle(events.FeedOpened(caller, 0, FEED))
    done = yard.lease(caller)
    returned = events.LeaseReturned(caller, 0, done.source, done.token)
    yard.handle(events.LedgerRead(returned, 100))
    undone = yard.lease(caller)
    given_back = events.LeaseReturned(caller, 0, undone.source, undone.token)
    yard.handle(events.LedgerRead(given_back, 0))
    counts = yard.job().feeds
    yard.restart(from_snapshot=short)
    assert yard.job().feeds == counts
    assert yard.handle(events.FeedOpened(caller, 0, FEED)) == opened
    assert yard.handle(returned) == effects.LeaseClosed(done=True), "a retry is answered as before"
    with pytest.raises(StaleToken):
        yard.handle(given_back)
    held = yard.lease(caller)
    assert held.source == undone.source
    assert held.token == undone.token + 1
    yard.restart(from_snapshot=short)
    assert yard.lease(caller) == held, "a worker that holds a data shard is given that one"


def test_token_of_a_lease_that_left_no_trace_is_not_given_again(yard: Yard, short: bool) -> None:
    caller = yard.join()
    yard.run(caller)
    yard.handle(events.FeedOpened(caller, 0, FEED))
    lease = yard.lease(caller)
    yard.handle(events.LedgerRead(events.LeaseReturned(caller, 0, lease.source, lease.token), 0))
    yard.restart(from_snapshot=short)
    assert yard.lease(caller).token == lease.token + 1


def test_batches_of_a_data_shard_are_as_they_were_chosen(yard: Yard) -> None:
    caller = yard.join()
    yard.run(caller)
    opened = yard.handle(events.FeedOpened(caller, 0, FEED))
    assert isinstance(opened, FeedOpening)
    written = journaled(yard.persisted)
    written[-1].body.update(batches_per_data_shard=5, units=2)  # type: ignore[attr-defined]
    yard.machine = restored(written)
    assert (opened.batches_per_data_shard, opened.units_per_epoch) != (5, 2)
    again = yard.handle(events.FeedOpened(caller, 0, FEED))
    assert again == FeedOpening(5, 2, 0, False)


def test_ranks_keep_owners_and_tokens(yard: Yard, short: bool) -> None:
    first, second = yard.join(SYNC), yard.join(SYNC)
    yard.run(first)
    opened = yard.handle(events.FeedOpened(first, 0, FEED))
    returned = events.LeaseReturned(first, 0, None, Token(0))
    yard.handle(events.LedgerRead(returned, 5))
    ranks = [yard.beat(each.incarnation).ranks for each in (first, second)]
    assert ranks == [(RankLease(Rank(0), Token(1)),), (RankLease(Rank(1), Token(3)),)]
    yard.restart(from_snapshot=short)
    assert [yard.beat(each.incarnation).ranks for each in (first, second)] == ranks
    assert yard.handle(returned) == effects.LeaseClosed(done=True)
    reopened = yard.handle(events.FeedOpened(first, 0, FEED))
    assert isinstance(opened, FeedOpening)
    assert reopened == dataclasses.replace(opened, done=True)
    yard.handle(events.MemberLeft(first.incarnation, ""))
    assert yard.beat(second.incarnation).ranks == (RankLease(Rank(0), Token(4)), RankLease(Rank(1), Token(3)))


def test_what_a_record_says_twice_is_said_once_in_a_snapshot(yard: Yard) -> None:
    caller = yard.join()
    yard.run(caller)
    yard.handle(events.FeedOpened(caller, 0, FEED))
    for _ in range(10):
        lease = yard.lease(caller)
        yard.handle(events.LedgerRead(events.LeaseReturned(caller, 0, lease.source, lease.token), 0))
    kinds = [each.kind for each in yard.machine.snapshot()]
    assert kinds == [
        "member_registered",
        "member_registered",
        "member_registered",
        "job_started",
        "worker_joined",
        "variables_registered",
        "worker_admitted",
        "partitions_created",
        "variables_committed",
        "partitions_opened",
        "feed_opened",
        "feed_progress",
        "token_given",
    ]


# ---- nothing that a peer may say makes a journal that is refused


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_largest_numbers_that_peers_may_give_come_back(yard: Yard, mode: UpdateMode, short: bool) -> None:
    most = (1 << 64) - 1
    settings = SETTINGS.model_copy(update={"consistency": ConsistencySettings(mode=ConsistencyMode(mode.value))})
    first, second = yard.join(settings), yard.join(settings)
    yard.run(first)
    huge = FeedSpec(limits.SAMPLES_MAX, "\u2028\U0001f600", 1, limits.EPOCHS_MAX, shuffle=False, drop_last=False)
    for feed in range(2):
        yard.handle(events.FeedOpened(first, feed, huge))
    if mode is UpdateMode.ASYNC:
        yard.lease(first)
    registration = Registration(
        MemberRole.WORKER, "", 1, "x" * 512, "\u00e9", (1 << 32) - 1, Incarnation(most), 1 << 31
    )
    yard.handle(events.MemberRegistered(registration))
    yard.restart(from_snapshot=short)
    assert yard.machine.members[-1].registration == registration
    for caller in (first, second):
        yard.beat(caller.incarnation, Report(step=most, samples=most, metrics=(("loss", float("nan")),)))
        yard.handle(events.MemberLeft(caller.incarnation, "ValueError: \u00e9"))
    yard.restart(from_snapshot=short)
    job = yard.job()
    assert yard.machine.jobs[-1].phase is JobPhase.FAILED
    assert (job_views.samples(yard.machine.jobs[-1]), job.step, job.samples) == (2 * most, most, most)
    assert [(each.name, repr(each.value)) for each in job.metrics] == [("loss", "nan")]
    assert [feed.samples for feed in job.feeds] == [limits.SAMPLES_MAX] * 2


# ---- damage


def busy_yard() -> Yard:
    """One that has written records of most kinds."""
    yard = Yard()
    first, second, third = yard.join(), yard.join(), yard.join(SYNC.model_copy(update={"name": "sync"}))
    for caller in (first, third):
        yard.run(caller)
        yard.handle(events.FeedOpened(caller, 0, FEED))
    yard.variables(second)
    lease = yard.lease(first)
    yard.handle(events.LedgerRead(events.LeaseReturned(first, 0, lease.source, lease.token), 100))
    yard.lease(first)
    yard.handle(events.LedgerRead(events.LeaseReturned(third, 0, None, Token(0)), 100))
    yard.advance(LEASE_MS, second.incarnation, *yard.servers)
    yard.handle(events.WorkersFenced(first.job, (first.incarnation,)))
    yard.handle(events.MemberLeft(second.incarnation, "ValueError: x"))
    return yard


def spoilt(values: dict[str, object]) -> Iterator[dict[str, object]]:
    """Each field missing or of another kind, at every depth."""
    for key, value in values.items():
        yield {each: kept for each, kept in values.items() if each != key}
        for other in (None, "x", -1, 1.5, True, 1 << 70, [], [None], [[1]], {}, {"x": 1}):
            yield values | {key: other}
        if isinstance(value, dict):
            for inner in spoilt(value):
                yield values | {key: inner}
        if isinstance(value, list) and value and isinstance(value[0], list):
            for at, other in itertools.product(range(len(value[0])), (None, "x", -1, 1 << 70, [[]])):
                yield values | {key: [[*value[0][:at], other, *value[0][at + 1 :]], *value[1:]]}


@pytest.mark.long("True")
@pytest.mark.parametrize("short", [False, True])
def test_record_that_cannot_be_read_is_refused_with_its_number(short: bool) -> None:
    yard = busy_yard()
    written = journaled(yard.machine.snapshot() if short else yard.persisted)
    refused = 0
    for at, record in enumerate(written):
        for body in spoilt(dict(record.body)):
            damaged = [*written[:at], dataclasses.replace(record, body=body)]
            try:
                restored(damaged)
            except ConfigurationError as error:
                refused += 1
                named = (f"record {record.number} ({record.kind!r})" in error.what, error.facts["record"])
            else:
                continue
            assert named == (True, str(record.number))
    assert refused > 1_000


def test_record_of_an_unknown_kind_is_refused(yard: Yard) -> None:
    caller = yard.join()
    for body in ({"job": int(caller.job)}, {}):
        written = [*journaled(yard.persisted), Record(99, 1, 0.0, "worker_promoted", body)]
        with pytest.raises(ConfigurationError, match=r"record 99 \('worker_promoted'\) cannot be taken"):
            restored(written)


@pytest.mark.parametrize("missing", ["member_registered", "job_started", "worker_joined", "variables_registered"])
def test_record_that_does_not_fit_those_before_it_is_refused(missing: str) -> None:
    written = journaled(busy_yard().persisted)
    at = max(number for number, each in enumerate(written) if each.kind == missing)
    with pytest.raises(ConfigurationError, match="cannot be taken"):
        restored([*written[:at], *written[at + 1 :]])


@pytest.mark.parametrize(
    "twice",
    ["member_registered", "member_removed", "job_started", "worker_joined", "variables_registered", "data_leased"],
)
def test_record_that_is_there_twice_is_refused(twice: str) -> None:
    written = journaled(busy_yard().persisted)
    at = next(number for number, each in enumerate(written) if each.kind == twice)
    with pytest.raises(ConfigurationError, match="cannot be taken"):
        restored([*written[: at + 1], written[at]])
