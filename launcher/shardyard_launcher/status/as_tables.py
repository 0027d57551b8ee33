"""A yard's status as tables, for people."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation, JobId
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from shardyard_launcher.status import words
from shardyard_launcher.status.launches import launches_table
from shardyard_launcher.status.report import UNFINISHED, LocalReport, YardReport, enum_text, mode_of
from shardyard_launcher.terminal.data_progress import data_progress
from shardyard_launcher.terminal.quantities import describe_duration, describe_size
from shardyard_launcher.terminal.tables import new_table

RESTARTS_SHOWN_MAX: Final = 10
ENDED_SHOWN_MAX: Final = 3
"""Jobs that have ended; `--job` shows any."""
ENDED_NAMED_MAX: Final = 8
RED, YELLOW = "red", "yellow"


def as_tables(report: YardReport) -> RenderableType:
    status = report.status
    uptime = describe_duration(status.uptime_ms)
    parts: list[RenderableType] = [
        Text(f"coordinator {report.coordinator}, up {uptime}, term {status.term}"),
        *([_waiting(status.waiting_for)] if status.waiting_for else []),
        *([Text(f"  {words.describe_open(status.open_to)}", style=RED)] if status.open_to else []),
        *([Text(f"  {words.describe_full_disk(status.full_disk)}", style=RED)] if status.HasField("full_disk") else []),
        _title("members"),
        _members_table(report),
        *_local_tables(report.local),
        *_launches(report),
    ]
    if not status.jobs:
        parts.append(Text("no jobs yet"))
    shown = [job for job in report.jobs if job.state in UNFINISHED]
    ended = [job for job in report.jobs if job.state not in UNFINISHED]
    for job in [*shown, *ended[:ENDED_SHOWN_MAX]]:
        parts += _job_tables(report, job)
    older = sorted({job.name for job in ended[ENDED_SHOWN_MAX:]})
    if older:
        said = f"\n{len(ended) - ENDED_SHOWN_MAX} more jobs have ended ({', '.join(older[:ENDED_NAMED_MAX])}"
        parts.append(Text(said + ("" if len(older) <= ENDED_NAMED_MAX else ", ...") + "); --job NAME shows one"))
    return Group(*parts)


def _launches(report: YardReport) -> list[RenderableType]:
    table = launches_table(report.launches)
    return [] if table is None else [_title("launches"), table]


def _local_tables(local: LocalReport | None) -> list[RenderableType]:
    if local is None:
        return []
    found: list[RenderableType] = []
    if local.restarts:
        table = new_table("process", "pid", "ended", "restart", "when")
        for restart in local.restarts[-RESTARTS_SHOWN_MAX:]:
            of = f"{restart.number} of {restart.restarts_max} within {restart.window_ms / 1000:g} s"
            ago_ms = max(0, int((time.time() - restart.died_s) * 1000))
            cells = [restart.name, str(restart.pid), restart.ending, of, f"{describe_duration(ago_ms)} ago"]
            table.add_row(*map(Text, cells))
        found += [_title("restarted on this machine"), table]
    for name, why in sorted(local.given_up.items()):
        found.append(Text(f"{name} {why}", style=RED))
    for name in local.unready:
        found.append(Text(f"not ready yet: {name}", style=YELLOW))
    if not local.supervisor:
        said = (
            "this yard has no supervisor, so processes that die are not restarted; `shardyard up` starts a supervisor"
        )
        found.append(Text(said, style=RED))
    return found


def _waiting(what: str) -> Text:
    return Text(f"  waits for {what}", style=YELLOW)


def _title(text: str) -> Text:
    return Text("\n" + text, style="bold")


def _members_table(report: YardReport) -> Table:
    names = {job.job: job.name for job in report.status.jobs}
    table = new_table("role", "id", "address", "host", "pid", "seen", "job", "step", "says")
    for member in sorted(report.status.members, key=lambda m: (m.role, m.incarnation)):
        worker = member.role == wire.ROLE_WORKER
        said = report.servers.get(member.incarnation)
        asked = report.agents.get(member.incarnation) if said is None else said
        says = asked.what if isinstance(asked, errors.ShardyardError) else ""
        if isinstance(said, server_wire.DescribeServerReply):
            says = _of_server(said)
        if worker:
            says = f"ranks {', '.join(map(str, member.ranks))}" if member.ranks else ""
            late = f"{member.dropped:,} contributions came late" if member.dropped else ""
            sums = f"sums gradients {member.sums}" if member.sums else ""
            says = "; ".join(part for part in (says, sums, late) if part)
        waiting = f"waits for {member.waiting_for}" if member.waiting_for else ""
        leaving = words.describe_drain(member.drain) if member.HasField("drain") else ""
        says = "; ".join(part for part in (leaving, says, waiting) if part)
        cells = [
            enum_text(wire.Role, member.role),
            str(Incarnation(member.incarnation)),
            member.address or "-",
            member.host,
            str(member.pid),
            f"{member.last_seen_ms_ago / 1000:.1f} s ago",
            names.get(member.job, "-") if worker else "-",
            f"{member.step:,}" if worker else "-",
            says,
        ]
        table.add_row(*map(Text, cells))
    return table


def _of_server(said: server_wire.DescribeServerReply) -> str:
    count = len(said.partitions)
    parts = [f"{count} partition{'s'[: count != 1]}", f"{said.pushes_applied:,} pushes applied"]
    if said.workers_attached:
        parts.append(f"shares memory with {said.workers_attached} worker{'s'[: said.workers_attached != 1]}")
    if said.workers_streaming:
        parts.append(f"streams to {said.workers_streaming} worker{'s'[: said.workers_streaming != 1]}")
    if said.memory_bytes_max:
        held = sum(table.bytes for table in said.tables)
        parts.append(f"tables take {describe_size(held)} of {describe_size(said.memory_bytes_max)}")
    return ", ".join(parts)


def _job_tables(report: YardReport, job: wire.JobStatus) -> list[RenderableType]:
    name = f"{job.name} (id {JobId(job.job)})"
    found: list[RenderableType] = [_title(f"job {name}"), _progress_table(report, job), *_findings(report, job)]
    found += [_waiting(what) for what in job.waits]
    owners = _owners_shown(report, job)
    if owners:
        size = f"{job.parameters:,} parameters, {job.payload_bytes:,} bytes"
        found.append(_title(f"partitions of {name}, generation {job.map.generation}, {size}"))
        found.append(_partitions_table(report, job.job, owners))
    if job.tables:
        found += [_title(f"tables of {name}"), _rows_table(report, job)]
        for table in job.tables:
            for refused in report.table(job.job, table)["disk_refused"]:
                said = f"  colder rows of {table.name} stay in memory because the disk refuses them: {refused}"
                found.append(Text(said, style=YELLOW))
    if job.feeds:
        found += [_title(f"data of {name}"), _feeds_table(job)]
    return found


def _progress_table(report: YardReport, job: wire.JobStatus) -> Table:
    table = new_table("state", "mode", "workers", "step", "samples", "samples/s", "metrics")
    mode = mode_of(job)
    more = {
        "sync": f", {job.logical_ranks} ranks",
        "local": f", {job.logical_ranks} ranks, {job.local_steps} steps a round",
        "hybrid": f", {job.logical_ranks} ranks",
        "bounded": f", {report.staleness(job.job)} of {job.staleness} steps",
    }
    cells = [
        enum_text(wire.JobState, job.state),
        mode + more.get(mode, ""),
        str(job.workers),
        f"{job.step:,}",
        f"{job.samples:,}",
        f"{job.samples_per_s:,.0f}" if job.HasField("samples_per_s") else "-",
        ", ".join(f"{metric.name} {metric.value:.4g}" for metric in job.metrics) or "-",
    ]
    table.add_row(*map(Text, cells))
    return table


def _findings(report: YardReport, job: wire.JobStatus) -> Iterator[Text]:
    """Yields a line for each event and each property of the job that is worth a line."""
    progress = data_progress(job)
    if progress is not None:
        yield Text(f"  {progress}")
    if job.HasField("failure"):
        yield Text(f"  failed: {job.failure.code}: {job.failure.what}", style=RED)
    if job.HasField("stop"):
        yield Text(f"  told to stop {words.describe_stop(job.stop)}")
    if job.HasField("consistency"):
        yield Text(f"  switched {words.describe_switch(job.consistency)}")
    late = report.lateness(job.job)
    if late is not None:
        said = f"  gradients are {late['mean']:.2f} updates late, {late['most']:,.0f} at most"
        yield Text(said + (f"; {late['uncompensated']:,.0f} could not be compensated" if late["uncompensated"] else ""))
    if job.lost_pushes:
        said = f"  {job.lost_pushes:,} pushes without leased data are lost; the coordinator's log lists them"
        yield Text(said, style=RED)
    if job.not_finite:
        said = f"  {job.not_finite:,} gradients were not finite and do not count; the audit lists them"
        yield Text(said, style=RED)
    if job.workers_quarantined:
        said = f"  {job.workers_quarantined:,} workers are in quarantine because they kept sending such gradients"
        yield Text(said, style=RED)
    if job.dropped:
        said = f"  {job.dropped:,} contributions came late and were dropped; their samples count at steps of their own"
        yield Text(said)
    if job.residuals_lost:
        workers = f"{job.residuals_lost:,} worker{'s'[: job.residuals_lost != 1]}"
        said = (
            f"  {workers} left with gradients that compression had not sent yet (2-norm {job.residual_lost_norm:.3g})"
        )
        yield Text(said, style=RED)
    now_ms = report.status.time_ms
    if job.HasField("checkpoint"):
        yield Text(f"  newest checkpoint: {words.describe_checkpoint(job.checkpoint, now_ms)}")
    if job.HasField("evaluation"):
        yield Text(f"  evaluated: {words.describe_evaluation(job.evaluation, now_ms)}")
    if job.HasField("best"):
        yield Text(f"  best: {words.describe_best(job.best)}")
    if job.HasField("restored"):
        taken = words.describe_checkpoint(job.restored.checkpoint, 0)
        yield Text(f"  restored from checkpoint {taken}: {words.describe_restored(job.restored)}")


def _feeds_table(job: wire.JobStatus) -> Table:
    table = new_table("feed", "samples", "epochs", "free", "leased", "done", "quarantined", "finished")
    for feed in job.feeds:
        numbers = [feed.feed, feed.samples, feed.epochs, feed.free, feed.leased, feed.done, feed.quarantined]
        table.add_row(*(f"{number:,}" for number in numbers), "yes" if feed.finished else "no")
    return table


def _owners_shown(report: YardReport, job: wire.JobStatus) -> list[common.PartitionOwner]:
    """The owners of a job's partitions; of a job that has ended only those that still hold them."""
    if job.state not in (wire.JOB_STATE_FINISHED, wire.JOB_STATE_FAILED):
        return list(job.map.owners)
    held = {
        (server, part.partition)
        for server, said in report.servers.items()
        if not isinstance(said, errors.ShardyardError)
        for part in said.partitions
        if part.job == job.job
    }
    return [owner for owner in job.map.owners if (owner.server, owner.partition) in held]


def _partitions_table(report: YardReport, job: int, owners: list[common.PartitionOwner]) -> Table:
    versions = report.versions(job)
    table = new_table("server", "address", "numbers", "versions")
    owned: dict[tuple[int, str], list[int]] = {}
    for owner in owners:
        owned.setdefault((owner.server, owner.address), []).append(owner.partition)
    for (server, address), partitions in sorted(owned.items()):
        known = [versions[p].number for p in partitions if p in versions]
        low, high = min(known, default=None), max(known, default=None)
        span = "-" if low is None else str(low) if low == high else f"{low} to {high}"
        table.add_row(str(Incarnation(server)), address, ", ".join(map(str, partitions)), span)
    return table


def _rows_table(report: YardReport, job: wire.JobStatus) -> Table:
    table = new_table("table", "dim", "optimizer", "rows", "ids", "memory", "disk", "index", "admitted", "expired")
    for each in job.tables:
        held = report.table(job.job, each)
        cells = [each.name, str(each.dim), each.optimizer, f"{held['rows']:,}"]
        if held["servers"]:
            load = "-" if held["load"] is None else f"{held['load']:.0%} full"
            disk = describe_size(held["disk_bytes"]) if held["disk_bytes"] else "-"
            cells += [f"{held['ids']:,}", describe_size(held["bytes"]), disk, load]
            cells += [f"{held['admitted']:,}", f"{held['expired']:,}"]
        else:
            cells += ["-"] * 6
        table.add_row(*map(Text, cells))
    return table
