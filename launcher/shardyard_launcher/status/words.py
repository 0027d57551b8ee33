"""Parts of a status in words, for tables and for other commands. The caller gives the coordinator's wall clock."""

from __future__ import annotations

from shardyard.domain.ids import Incarnation
from shardyard.wire import lease_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.terminal.quantities import describe_duration, describe_size


def describe_consistency(consistency: wire.Consistency) -> str:
    """For example `bounded, 3 steps`."""
    return str(lease_messages.consistency_from_wire(consistency))


def describe_switch(switch: wire.SwitchStatus) -> str:
    """For example `to bounded, 3 steps; worker 1.4 has not changed yet`."""
    said = f"to {describe_consistency(switch.consistency)}"
    if switch.step:
        return f"{said} before step {switch.step:,}; its partitions have not changed yet"
    if switch.unfinished:
        return f"{said}; first must end: {switch.unfinished}"
    if switch.HasField("step"):
        return f"{said}; {len(switch.behind)} workers have not reported yet how far they are"
    if not switch.servers:
        return f"{said}; not all servers have changed yet"
    if not switch.behind:
        return said
    listed = ", ".join(str(Incarnation(worker)) for worker in switch.behind[:8])
    more = f" and {len(switch.behind) - 8} more" if len(switch.behind) > 8 else ""
    workers, have = ("workers", "have") if len(switch.behind) > 1 else ("worker", "has")
    return f"{said}; {workers} {listed}{more} {have} not changed yet"


def describe_stop(stop: wire.Stop) -> str:
    """For example `by worker 1.4: loss is nan; before step 120`."""
    by = f"by worker {Incarnation(stop.worker)}" if stop.worker else "by a person"
    said = f"{by}: {stop.reason}" if stop.reason else by
    return f"{said}; before step {stop.step:,}" if stop.settled and stop.step else said


def describe_drain(drain: wire.Drain) -> str:
    """For example `leaves in order, within 21 s`."""
    return f"leaves in order, within {describe_duration(drain.left_ms)}"


def describe_checkpoint(taken: wire.CheckpointStatus, now_ms: int) -> str:
    """For example `11 of step 4,950, 32.0 s old`. `now_ms`: the coordinator's wall clock."""
    age = f", {describe_duration(max(0, now_ms - 1_000 * taken.created_s))} old" if taken.created_s and now_ms else ""
    return f"{taken.number} of step {taken.step:,}{age}"


def describe_evaluation(evaluation: wire.EvaluationStatus, now_ms: int) -> str:
    """For example `accuracy 0.9722 at step 1,350, 4 s ago`. `now_ms`: the coordinator's wall clock."""
    metrics = ", ".join(f"{metric.name} {metric.value:.4g}" for metric in evaluation.metrics) or "no metrics"
    ago = f", {describe_duration(max(0, now_ms - 1_000 * evaluation.reported_s))} ago" if now_ms else ""
    return f"{metrics} at step {evaluation.step:,}{ago}"


def describe_best(best: wire.BestModel) -> str:
    """For example `accuracy 0.9722 (max) of step 1,350, in /data/digits/best`."""
    mode = "min" if best.lowest else "max"
    return f"{best.metric} {best.value:.4g} ({mode}) of step {best.step:,}, in {best.url}"


def describe_restored(restored: wire.RestoredStatus) -> str:
    """For example `8 partitions, 3 data shards leased anew`."""
    said = f"{restored.partitions} partition{'s'[: restored.partitions != 1]}"
    if restored.logs:
        return f"{said}, with what logs say after it; nothing is computed again"
    return f"{said}, {restored.leased_again:,} data shard{'s'[: restored.leased_again != 1]} leased anew"


def describe_open(address: str) -> str:
    """For a yard without TLS that listens on the network."""
    return f"the yard is open: whoever reaches {address} can train, stop jobs, and run programs (security.tls is false)"


def describe_full_disk(full: wire.FullDisk) -> str:
    """For example `the disk of the journal FILE is full: 0 B free, for 34 s; room for 3.9 MiB of decisions is left`."""
    left = f"room for {describe_size(full.room_bytes)} of decisions is left" if full.room_bytes else "decisions wait"
    said = f"{describe_size(full.free_bytes)} free, for {describe_duration(full.full_ms)}"
    return f"the disk of the journal {full.file} is full: {said}; {left}"
