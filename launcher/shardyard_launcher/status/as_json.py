"""A yard's status as JSON. It is a promise to scripts: names stay, new ones may come."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from google.protobuf.message import Message

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.status.launches import launch_as_json
from shardyard_launcher.status.report import LocalReport, Server, YardReport, enum_text, mode_of
from shardyard_launcher.terminal.data_progress import DataProgress, data_progress


def to_json(report: YardReport) -> str:
    status = report.status
    return json.dumps(
        {
            "coordinator": report.coordinator,
            **_pick(status, "term", "uptime_ms", "waiting_for"),
            "open_to": status.open_to,
            "full_disk": _optional(status, "full_disk", _full_disk),
            "members": [_member(member) for member in status.members],
            "jobs": [_job(report, job) for job in report.jobs],
            "servers": [_server(incarnation, said) for incarnation, said in sorted(report.servers.items())],
            "launches": [launch_as_json(launch) for launch in report.launches],
            "local": None if report.local is None else _local(report.local),
        },
        indent=2,
    )


def _pick(message: Message, *names: str) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}


def _optional(message: Message, name: str, document: Callable[[Any], dict[str, object]]) -> dict[str, object] | None:
    return document(getattr(message, name)) if message.HasField(name) else None


def _member(member: wire.MemberStatus) -> dict[str, object]:
    entry = {
        "incarnation": member.incarnation,
        "id": str(Incarnation(member.incarnation)),
        "role": enum_text(wire.Role, member.role),
        **_pick(member, "address", "host", "pid", "release", "last_seen_ms_ago", "waiting_for"),
        "drain": _optional(member, "drain", lambda drain: _pick(drain, "left_ms")),
    }
    if member.role == wire.ROLE_WORKER:
        entry |= _pick(member, "job", "step", "samples", "not_finite", "dropped", "sums")
        entry["ranks"] = list(member.ranks)
    return entry


def _job(report: YardReport, job: wire.JobStatus) -> dict[str, object]:
    versions = report.versions(job.job)
    return {
        **_pick(job, "job", "name"),
        "state": enum_text(wire.JobState, job.state),
        "failure": _optional(job, "failure", lambda failure: _pick(failure, "code", "what")),
        "mode": mode_of(job),
        "logical_ranks": job.logical_ranks,
        "staleness": {"bound": job.staleness, "most": report.staleness(job.job)} if job.HasField("staleness") else None,
        "lateness": report.lateness(job.job),
        "local_steps": job.local_steps if job.HasField("local_steps") else None,
        **_pick(job, "workers", "step", "samples", "samples_per_s"),
        "progress": _progress(data_progress(job)),
        "metrics": {metric.name: metric.value for metric in job.metrics},
        "waits": list(job.waits),
        **_pick(job, "parameters", "payload_bytes", "lost_pushes"),
        "contributions_dropped": job.dropped,
        **_pick(job, "residuals_lost", "residual_lost_norm"),
        "checkpoint": _optional(job, "checkpoint", _checkpoint),
        "restored": _optional(job, "restored", _restored),
        **_pick(job, "recovering", "not_finite", "workers_quarantined"),
        "stop": _optional(job, "stop", _stop),
        "switch": _optional(job, "consistency", _switch),
        "evaluation": _optional(job, "evaluation", _evaluation),
        "best": _optional(job, "best", _best),
        "readers": job.readers,
        "runs": list(job.runs),
        "generation": job.map.generation,
        "tables": [report.table(job.job, table) for table in job.tables],
        "partitions": [
            {
                **_pick(owner, "partition", "server", "address"),
                "life": versions[owner.partition].life if owner.partition in versions else None,
                "version": versions[owner.partition].number if owner.partition in versions else None,
            }
            for owner in job.map.owners
        ],
        "feeds": [
            {
                **_pick(feed, "feed", "samples", "epochs"),
                "data_shards_free": feed.free,
                "data_shards_leased": feed.leased,
                "data_shards_done": feed.done,
                "batches_quarantined": feed.quarantined,
                "finished": feed.finished,
            }
            for feed in job.feeds
        ],
    }


def _full_disk(full: wire.FullDisk) -> dict[str, object]:
    return _pick(full, "file", "free_bytes", "room_bytes", "full_ms")


def _progress(found: DataProgress | None) -> dict[str, object] | None:
    if found is None:
        return None
    return {
        "feed": found.feed,
        "epoch": found.epoch,
        "epochs": found.epochs,
        "fraction": round(found.fraction, 4),
        "left_s": None if found.left_s is None else round(found.left_s, 1),
    }


def _checkpoint(taken: wire.CheckpointStatus) -> dict[str, object]:
    return _pick(taken, "number", "step", "created_s")


def _stop(stop: wire.Stop) -> dict[str, object]:
    return {
        "reason": stop.reason,
        "worker": stop.worker or None,
        "step": stop.step if stop.settled and stop.step else None,
    }


def _switch(switch: wire.SwitchStatus) -> dict[str, object]:
    said = switch.consistency
    return {
        "number": said.number,
        "mode": enum_text(wire.ConsistencyMode, said.mode),
        "staleness": said.staleness if said.HasField("staleness") else None,
        "strategy": said.strategy or None,
        "servers": switch.servers,
        "workers_behind": list(switch.behind),
        "before_step": switch.step or None,
        "unfinished": switch.unfinished or None,
    }


def _evaluation(evaluation: wire.EvaluationStatus) -> dict[str, object]:
    return {
        "step": evaluation.step,
        "metrics": {metric.name: metric.value for metric in evaluation.metrics},
        "reported_s": evaluation.reported_s,
    }


def _best(best: wire.BestModel) -> dict[str, object]:
    return {
        "metric": best.metric,
        "mode": "min" if best.lowest else "max",
        **_pick(best, "value", "step", "url", "reported_s"),
    }


def _restored(restored: wire.RestoredStatus) -> dict[str, object]:
    return {
        "checkpoint": _checkpoint(restored.checkpoint),
        "partitions": restored.partitions,
        "data_shards_leased_again": restored.leased_again,
        "logs": restored.logs,
    }


def _server(incarnation: int, said: Server) -> dict[str, object]:
    if isinstance(said, errors.ShardyardError):
        return {"server": incarnation, "error": said.what}
    return {
        "server": incarnation,
        "partitions": len(said.partitions),
        **_pick(said, "pushes_applied", "pushes_duplicate", "bytes_received", "bytes_sent"),
        **_pick(said, "workers_attached", "workers_streaming", "pins"),
        "memory_bytes_max": said.memory_bytes_max or None,
    }


def _local(local: LocalReport) -> dict[str, object]:
    return {
        "supervisor": local.supervisor or None,
        "restarts": [asdict(restart) for restart in local.restarts],
        "given_up": dict(local.given_up),
        "unready": list(local.unready),
    }
