"""The environment of a launch's training processes.

Owns: the variables from which `shardyard.connect` learns its place, thread counts, which GPU a process sees. Must not
know: how a process is started.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardyard.config.configuration import PID_VARIABLE, RUN_ID_VARIABLE, RUN_NUMBER_VARIABLE

WORKERS_EXPECTED_VARIABLE: Final = "SHARDYARD__JOB__WORKERS_EXPECTED"
IDENTITY_VARIABLE: Final = "SHARDYARD__SECURITY__IDENTITY"
_GPU_DEVICE: Final = re.compile(r"nvidia([0-9]+)")


@dataclass(frozen=True)
class LaunchOrder:
    """The request for a launch, checked."""

    script: Path
    arguments: tuple[str, ...]
    working_directory: Path
    environment: Mapping[str, str]
    """The whole environment, before each process's own variables are added."""
    workers: int
    restarts_max: int
    restarts_window_ms: int
    threads: int
    gpus: tuple[str, ...]
    """They are given out in turn, one to each process."""
    coordinator: str
    agent: int
    run_id: str
    """Names the launch, over all restarts of its processes."""
    identity: str = ""
    """The folder with the certificate of the processes; empty: the yard runs without TLS."""
    owner: str = ""
    key: int = 0
    """Names the request, which may be sent again; 0: it is not."""


def environment_block(order: LaunchOrder, index: int, error_file: str) -> dict[str, str]:
    """The environment of process `index`: the launch's, thread counts if that has none, one GPU if there are any, and
    the variables from which `shardyard.connect` learns its place."""
    block = dict(order.environment)
    block.pop(RUN_NUMBER_VARIABLE, None)  # of a script that started this agent
    if order.threads:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            block.setdefault(name, str(order.threads))
    if order.gpus:
        block["CUDA_VISIBLE_DEVICES"] = order.gpus[index % len(order.gpus)]
    # a job expects the workers of this launch, unless the user has set a number, as for several machines
    if WORKERS_EXPECTED_VARIABLE in block:
        block.pop("SHARDYARD_WORKERS", None)
    else:
        block["SHARDYARD_WORKERS"] = str(order.workers)
    if order.identity:
        block[IDENTITY_VARIABLE] = order.identity
    return block | {
        "SHARDYARD_COORDINATOR": order.coordinator,
        "SHARDYARD_AGENT": str(int(order.agent)),  # an incarnation prints as "term.number"
        "SHARDYARD_LOCAL_INDEX": str(index),
        "SHARDYARD_ERROR_FILE": error_file,
        RUN_ID_VARIABLE: order.run_id,
    }


def run_id_of(environment: Mapping[str, str]) -> str:
    """The id of a launch that a process with this environment orders: the one that is given there, or a new one. What
    a training script orders is not part of that script's launch."""
    given = "" if PID_VARIABLE in environment else environment.get(RUN_ID_VARIABLE, "")
    return given or secrets.token_hex(8)


def gpus_to_give(base: Mapping[str, str], device: str, present: Sequence[str]) -> tuple[str, ...]:
    """The GPUs that are given out, one to each process in turn. None unless `worker.device` is auto.
    CUDA_VISIBLE_DEVICES chooses them if it is set; otherwise they are `present`, those of the machine."""
    if device != "auto":
        return ()
    visible = base.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(present)
    named = [name.strip() for name in visible.split(",") if name.strip()]
    # CUDA itself stops at the first negative number
    hidden = next((place for place, name in enumerate(named) if name.startswith("-")), len(named))
    return tuple(named[:hidden])


def gpus_present() -> tuple[str, ...]:
    """The numbers of this machine's NVIDIA GPUs, found without the driver."""
    found = (_GPU_DEVICE.fullmatch(name) for name in os.listdir("/dev"))
    return tuple(str(number) for number in sorted(int(match[1]) for match in found if match))
