"""PushedTableRows of synchronous steps against a dictionary: whoever contributes what, in any order, late, twice or not
at all, cut into partitions in any way, rows have the bits of one process that computes the ranks one after the other;
and a look-up sees the version that it names, or is told that there is none."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.domain.consistency import NO_CLIPPING, Clipping, UpdateMode
from shardyard.domain.errors import NotFound, NotReady, SequenceGap
from shardyard.domain.ids import PartitionId, Rank, Token
from shardyard.domain.layout.layouts import JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.push_names import PushName, RankSource, SourceKey
from shardyard.domain.pushes import Outcome, StepVerdict
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_ids import partition_of
from shardyard.domain.tables.row_optimizers import make_group as make_row_group
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, TableSettings
from shardyard_ps_server.partition.contribution import Contribution
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.push import apply_push
from shardyard_ps_server.partition.reads import look_up_rows, read_table
from shardyard_ps_server.partition.step_gate import scale_of
from shardyard_ps_server.partition.sync_step import gathered_part, take_verdict
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows.partition_tables import RowsToRead
from shardyard_ps_server.rows.pushed_rows import PushedTableRows
from shardyard_ps_server.values.versions import aligned_empty
from tests.support.plain_table import PlainTable
from tests.unit.ps_server.tables.test_table_properties import RULES

F = np.float32
SGD = (make_group("sgd", {"lr": 1.0}),)
IDS = 40


class Work(NamedTuple):
    """Of a rank in a step; `rows`: of each table ids and gradients. No samples: it does not count."""

    samples: int
    rows: tuple[tuple[np.ndarray, np.ndarray], ...]


class Job(NamedTuple):
    tables: tuple[TableSettings, ...]
    ranks: int
    partitions: int
    clipping: Clipping
    backup_workers: int
    work: tuple[tuple[Work, ...], ...]
    """By step and rank."""
    members: tuple[tuple[Rank, ...], ...]
    """Of each step."""


def made(seed: int) -> Job:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    ranks, partitions = rng.randint(1, 4), rng.randint(1, 3)
    tables = []
    for name in ("users", "items")[: rng.randint(1, 2)]:
        kind, given_settings = rng.choice(RULES)
        threshold = rng.randint(1, 4)
        admission = rng.choice([AdmissionSettings(), AdmissionSettings(Admission.COUNT, threshold)])
        initial = InitialValues(rng.choice(list(InitialKind)), 0.5)
        group = make_row_group(kind, given_settings)
        tables.append(TableSettings(name, rng.choice([1, 3]), kind, group, 3, initial, 1 << 10, admission))
    clipping = rng.choice([NO_CLIPPING, Clipping(norm=1.0), Clipping(value=0.3), Clipping(norm=1.0, value=0.5)])
    backup_workers = rng.choice([0, 0, ranks - 1])

    def drawn() -> Work:
        rows = []
        for table in tables:
            ids = np.sort(numbers.choice(IDS, rng.randint(0, 12), replace=False)).astype(np.int64)
            rows.append((ids, numbers.standard_normal((ids.size, table.dim)).astype(F)))
        return Work(rng.choice([0, 1, 3, 7]), tuple(rows))

    work = tuple(tuple(drawn() for _ in range(ranks)) for _ in range(rng.randint(1, 5)))
    members = [tuple(map(Rank, sorted(rng.sample(range(ranks), ranks - rng.randint(0, backup_workers))))) for _ in work]
    return Job(tuple(tables), ranks, partitions, clipping, backup_workers, work, tuple(members))


# ---- one process, one rank after the other


def means(job: Job, step: int) -> list[dict[int, np.ndarray]]:
    counted = [job.work[step][rank] for rank in job.members[step] if job.work[step][rank].samples]
    total = float(sum(work.samples for work in counted))
    found: list[dict[int, np.ndarray]] = [{} for _ in job.tables]
    for work in counted:
        for mean, (ids, values) in zip(found, work.rows, strict=True):
            for number, value in zip(ids.tolist(), values, strict=True):
                part = value * F(work.samples / total)
                mean[number] = mean[number] + part if number in mean else part
    limit = job.clipping.value
    return [{number: np.clip(row, -limit, limit) if limit else row for number, row in each.items()} for each in found]


def counts(job: Job, step: int, table: int) -> dict[int, int]:
    counted = [job.work[step][rank] for rank in job.members[step] if job.work[step][rank].samples]
    found: dict[int, int] = {}
    for work in counted:
        for number in work.rows[table][0].tolist():
            found[number] = found.get(number, 0) + 1
    return found


def plain_steps(job: Job, square_norms: Sequence[float]) -> list[list[PlainTable]]:
    """The tables at each version."""
    tables = [PlainTable(table) for table in job.tables]
    found = [copy.deepcopy(tables)]
    for step in range(len(job.work)):
        scale = scale_of(square_norms[step], job.clipping.norm) if job.clipping.norm else 1.0
        for index, (table, mean) in enumerate(zip(tables, means(job, step), strict=True)):
            ids = sorted(mean)
            if ids:
                gradients = np.array([mean[number] * F(scale) if scale != 1.0 else mean[number] for number in ids])
                often = counts(job, step, index)
                table.push(ids, gradients, step + 1, [often[number] for number in ids])
        found.append(copy.deepcopy(tables))
    return found


def square_norm(job: Job, step: int) -> float:
    return sum(float((row.astype(np.float64) ** 2).sum()) for mean in means(job, step) for row in mean.values())


# ---- partitions


class Partitions:
    """All of a job, each with what it was told."""

    def __init__(self, job: Job) -> None:
        self.job = job
        parts = tuple(PartitionLayout(PartitionId(p), 0, ()) for p in range(job.partitions))
        layout = JobLayout((), OptimizerSpec("sgd", SGD), parts, job.tables)
        rules = UpdateRules(UpdateMode.SYNC, job.ranks, clipping=job.clipping, backup_workers=job.backup_workers)
        self.all = [Partition(layout, part.partition, rules) for part in parts]
        for partition in self.all:
            for rank in range(job.ranks):
                partition.open_source(SourceKey(RankSource(Rank(rank))), Token(1))
            partition.open()
        self.norms: dict[int, float] = {}

    def contribution(self, partition: Partition, rank: int, step: int) -> Contribution:
        work = self.job.work[step][rank]
        if not work.samples:
            return Contribution(0.0, None, aligned_empty(0), ())
        rows = []
        for table, (ids, values) in enumerate(work.rows):
            mine = partition_of(ids, self.job.partitions) == partition.id
            if mine.any():
                rows.append(PushedTableRows(table, ids[mine], values[mine]))
        groups = tuple(table.group for table in self.job.tables) if rows else ()
        return Contribution(float(work.samples), SGD, aligned_empty(0), (), rows=tuple(rows), table_groups=groups)

    def push(self, partition: Partition, rank: int, step: int) -> Outcome | None:
        name = PushName(SourceKey(RankSource(Rank(rank))), Token(1), step, step)
        try:
            return apply_push(partition, name, self.contribution(partition, rank, step), lambda: None).outcome
        except (NotReady, SequenceGap):
            return None

    def judge(self, partition: Partition) -> None:
        """Brings a verdict, if there can be one."""
        step = partition.describe()[0].number
        members = self.job.members[step] if self.job.backup_workers and step < len(self.job.members) else ()
        told = [gathered_part(each, step) for each in self.all]
        norm = None
        if self.job.clipping.norm and all(each is not None for each in told):
            norm = self.norms[step] = sum([each.square_norm for each in told if each is not None], 0.0)
        if members or norm is not None:
            take_verdict([partition], StepVerdict(step, norm, members), lambda: None)

    def read(self, partition: Partition, number: int | None) -> list[dict[int, bytes]]:
        ids = np.arange(IDS, dtype=np.int64)
        ids = ids[partition_of(ids, self.job.partitions) == partition.id]
        asked = [
            RowsToRead(table, ids, np.full((ids.size, settings_.dim), np.nan, F))
            for table, settings_ in enumerate(self.job.tables)
        ]
        look_up_rows([(partition, asked)], number)
        return [dict(zip(ids.tolist(), map(np.ndarray.tobytes, each.out), strict=True)) for each in asked]


def play(job: Job, seed: int) -> tuple[Partitions, list[tuple[int, int, list[dict[int, bytes]]]]]:
    """Everything comes in any order; what look-ups have seen, by partition and version."""
    rng = random.Random(seed)
    made_, seen = Partitions(job), []
    last = len(job.work)
    for _ in range(100_000):
        newest = {partition.id: partition.describe()[0].number for partition in made_.all}
        if min(newest.values()) == last:
            seen += [(each.id, number, made_.read(each, number)) for each in made_.all for number in (last - 1, last)]
            return made_, seen
        partition = rng.choice(made_.all)
        step = min(max(newest[partition.id] + rng.choice([0, 0, 0, -1]), 0), last - 1)
        made_.push(partition, rng.randrange(job.ranks), step)
        if newest[partition.id] < last:
            made_.judge(partition)
        reader = rng.choice(made_.all)
        now = reader.describe()[0].number
        wanted = max(0, now + rng.choice([-2, -1, 0, 1]))
        try:
            seen.append((reader.id, wanted, made_.read(reader, wanted)))
        except NotReady:
            assert wanted > now
        except NotFound:
            assert wanted < now - 1 or (wanted < now and now == 0)
        else:
            assert now - 1 <= wanted <= now
    raise AssertionError("it does not come to an end")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_rule_b1_rows_have_the_bits_of_one_process_and_a_look_up_those_of_its_version(seed: int) -> None:
    job = made(seed)
    partitions, seen = play(job, seed + 1)
    norms = [partitions.norms.get(step, 0.0) for step in range(len(job.work))]
    for step, norm in enumerate(norms):
        if job.clipping.norm:
            assert norm == pytest.approx(square_norm(job, step), rel=1e-9)
    history = plain_steps(job, norms)
    for partition, version, read in seen:
        for plain, rows in zip(history[version], read, strict=True):
            for number, row in rows.items():
                assert row == plain.look_up([number])[0].tobytes(), (partition, version, number)
    for partition in partitions.all:
        found = {
            (table, int(number)): (record.tobytes(), int(frequency))
            for table in range(len(job.tables))
            for chunk in read_table(partition, table)
            for number, record, frequency in zip(chunk.ids, chunk.records, chunk.frequencies, strict=False)
        }
        assert found == {
            (table, number): (entry.row.tobytes(), entry.frequency)
            for table, plain in enumerate(history[-1])
            for number, entry in plain.entries.items()
            if entry.row is not None and partition_of(np.array([number]), job.partitions)[0] == partition.id
        }


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_rule_b1_bits_of_rows_do_not_depend_on_the_number_of_partitions_or_who_came_first(seed: int) -> None:
    job = made(seed)._replace(clipping=NO_CLIPPING)
    found = set()
    for partitions in (1, 2, 5):
        for order in (1, 2):
            played, _ = play(job._replace(partitions=partitions), seed + order)
            rows: list[dict[int, bytes]] = [{} for _ in job.tables]
            for partition in played.all:
                for into, read in zip(rows, played.read(partition, None), strict=True):
                    into.update(read)
            found.add(tuple(tuple(sorted(each.items())) for each in rows))
    assert len(found) == 1
