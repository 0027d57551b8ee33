"""Parts of messages that several RPCs share: checked when they come in, built when they go out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from shardyard.domain import limits
from shardyard.domain.consistency import Consistency, Stop, SwitchPoint
from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.domain.ids import RunName
from shardyard.wire import common_messages, lease_messages
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_coordinator.core.effects import Draining, JobPhase
from shardyard_coordinator.storage.checkpoint_book import Committed
from shardyard_coordinator.storage.checkpoint_residuals import CheckpointResidual

NAME_CHARACTERS_MAX: Final = 512
"""Of addresses, host names, releases and fingerprints."""
RETRY_MS: Final = 100
"""After how long a worker asks again for a lease or a verdict."""

UINT32_MAX: Final = (1 << 32) - 1

STATES: Final[dict[JobPhase, wire.JobState]] = {
    JobPhase.STARTING: wire.JOB_STATE_STARTING,
    JobPhase.RUNNING: wire.JOB_STATE_RUNNING,
    JobPhase.FINISHING: wire.JOB_STATE_FINISHING,
    JobPhase.FINISHED: wire.JOB_STATE_FINISHED,
    JobPhase.FAILED: wire.JOB_STATE_FAILED,
}


# ---- checked


def job_name(name: str) -> str:
    return common_messages.text(name, "a job's name", limits.JOB_NAME_CHARACTERS_MAX)


def run_name(launch: str, number: int) -> RunName | None:
    common_messages.text(launch, "the id of a run", limits.RUN_ID_CHARACTERS_MAX)
    if not launch:
        return None
    if not 1 <= number <= limits.RUN_NUMBER_MAX:
        raise MalformedPayload(f"run number {number} of a launch; expected 1 to {limits.RUN_NUMBER_MAX}")
    return RunName(launch, number)


def metric_name(name: str) -> str:
    return common_messages.text(name, "a metric's name", limits.METRIC_NAME_CHARACTERS_MAX)


def sequence(number: int, what: str) -> int:
    """A step, or the number of a push."""
    if number > limits.SEQUENCE_MAX:
        raise TooLarge(f"{what} {number}; at most {limits.SEQUENCE_MAX} is taken")
    return number


def residual_norm(norm: float) -> float:
    if not 0 <= norm < math.inf:
        raise MalformedPayload(f"a residual of 2-norm {norm}; expected a finite number of at least 0")
    return norm


# ---- built


def stop(decided: Stop | None) -> wire.Stop | None:
    return None if decided is None else lease_messages.stop_to_wire(decided)


def switch_point(decided: SwitchPoint | None) -> wire.SwitchPoint | None:
    return None if decided is None else lease_messages.switch_point_to_wire(decided)


def consistency(decided: Consistency | None) -> wire.Consistency | None:
    return None if decided is None else lease_messages.consistency_to_wire(decided)


def drain(found: Draining | None) -> wire.Drain | None:
    return None if found is None else wire.Drain(left_ms=min(found.left_ms, UINT32_MAX), empty=found.empty)


def checkpoint(taken: Committed | None) -> wire.CheckpointStatus | None:
    if taken is None:
        return None
    return wire.CheckpointStatus(number=taken.number, step=taken.step, created_s=taken.created_s)


def metrics(found: Iterable[tuple[str, float]]) -> list[wire.Metric]:
    return [wire.Metric(name=name, value=value) for name, value in found]


def residual(handed: CheckpointResidual) -> wire.CheckpointResidual:
    file = handed.file.file
    return wire.CheckpointResidual(
        generation=handed.generation,
        worker=handed.file.worker,
        own=handed.own,
        url=handed.url,
        path=file.path,
        length=file.written.nbytes,
        sha256=bytes.fromhex(file.written.sha256),
    )
