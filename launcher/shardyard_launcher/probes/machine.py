"""What `shardyard doctor` checks on this machine: disk, shared memory, memory, limits, libraries.

Invariants: a probe changes nothing and leaves nothing behind, even after a kill. Another process imports
torch, because the import is slow and may crash. Must not know: the network, how findings are shown.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

import psutil

from shardyard.domain import errors
from shardyard.domain.limits import GIB, MIB
from shardyard.runtime.machine_memory import container_bytes
from shardyard.runtime.malloc import tune_malloc
from shardyard.transport import TRIED
from shardyard.transport import shared_memory as shm
from shardyard_launcher.probes.findings import Finding, Probe, failed, ok, warning

FREE_BYTES_MIN: Final = 1 * GIB
MEMORY_BYTES_MIN: Final = 1 * GIB
FSYNC_MS_MAX: Final = 20.0
FSYNCS: Final = 5
FSYNC_BYTES: Final = 4_096
FILES_MIN: Final = 1_024
"""The open files of a server of some hundred workers: a socket and some shared memory for each."""
SHARED_BYTES: Final = 1 * MIB
TORCH_MS_MAX: Final = 60_000
_ASK_TORCH: Final = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"version": torch.__version__, "built": torch.version.cuda, "devices": names}))
"""


def probes(state: Path) -> list[Probe]:
    return [
        Probe("disk", 20_000, lambda: disk(state)),
        Probe("shared memory", 5_000, shared_memory),
        Probe("memory", 5_000, memory),
        Probe("open files", 5_000, open_files),
        Probe("malloc", 5_000, malloc),
        Probe("grpcio", 5_000, grpcio),
        Probe("torch", TORCH_MS_MAX + 10_000, torch),
    ]


def disk(state: Path) -> Sequence[Finding]:
    """Whether the state folder (or the place where it would be made) is writable, its free space, and the time of an
    fsync."""
    folder = next(each for each in (state.absolute(), *state.absolute().parents) if each.exists())
    where = f"the state folder {state}" if folder == state.absolute() else f"{folder}, where {state} would be made,"
    elsewhere = "set yard.state to a folder that this user can write to"
    if not folder.is_dir():
        return [failed("disk", f"{folder} is not a folder", elsewhere)]
    times_ms = []
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(FSYNCS):
                file.write(bytes(FSYNC_BYTES))
                file.flush()
                begin = time.perf_counter()
                os.fsync(file.fileno())
                times_ms.append((time.perf_counter() - begin) * 1000)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        todo = "free some of it, or set yard.state to another disk" if full else elsewhere
        return [failed("disk", f"{where} cannot be written: {error.strerror}", todo)]
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    fsync_ms = statistics.median(times_ms)
    said = f"{where} can be written, {_size(free)} free, fsync of {FSYNC_BYTES // 1024} KiB in {fsync_ms:.2f} ms"
    if free < FREE_BYTES_MIN:
        return [warning("disk", said, f"logs soon fill less than {_size(FREE_BYTES_MIN)}: free some of the disk")]
    if fsync_ms > FSYNC_MS_MAX:
        return [warning("disk", said, f"over {FSYNC_MS_MAX:g} ms is slow, and each durable write waits for it")]
    return [ok("disk", said)]


def shared_memory() -> Sequence[Finding]:
    """Whether one process could read what another exports: a sealed memfd, by its descriptor."""
    slower = "processes on one machine use streams instead, which is slower; training works"
    if not shm.available():
        return [warning("shared memory", f"{sys.platform} with this Python has no memfd", slower)]
    try:
        exported = shm.SharedMemory(SHARED_BYTES, read_only=True)
        try:
            exported.bytes[-1] = 42
            seen = shm.attach(exported.ticket()).bytes[-1]
        finally:
            exported.close()
    except errors.ShardyardError as error:
        return [warning("shared memory", f"it does not work: {error.what}", slower)]
    if seen != 42:
        return [
            failed("shared memory", "what was written was not read", "please report it; set worker.same_host=never")
        ]
    return [ok("shared memory", "a sealed memfd was mapped twice and read")]


def memory() -> Sequence[Finding]:
    found = psutil.virtual_memory()
    limits = [f"{_size(limit)} for this {what}" for what, limit in _limits()]
    available = min([found.available, *(limit for _, limit in _limits())])
    said = f"{_size(found.available)} of {_size(found.total)} available"
    said += f", limited to {' and '.join(limits)}" if limits else ""
    if available < MEMORY_BYTES_MIN:
        todo = f"a worker with torch needs about {_size(MEMORY_BYTES_MIN)}: give it more, or use another machine"
        return [warning("memory", said, todo)]
    return [ok("memory", said)]


def _limits() -> list[tuple[str, int]]:
    """Memory limits that are below what the machine has."""
    found = []
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        found.append(("process (ulimit -v)", soft))
    container = container_bytes()
    if container is not None:
        found.append(("container", container))
    return found


def open_files() -> Sequence[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return [ok("open files", "any number may be open at once")]
    said = f"{soft:,} may be open at once"
    if soft < FILES_MIN:
        raised = "ulimit -n" if hard == resource.RLIM_INFINITY or hard >= FILES_MIN else "the machine's limit"
        return [warning("open files", said, f"a server of many workers needs more than {FILES_MIN:,}: raise {raised}")]
    return [ok("open files", said)]


def malloc() -> Sequence[Finding]:
    if tune_malloc():
        return [ok("malloc", "tuned: message buffers stay mapped")]
    return [warning("malloc", "this C library has no mallopt", "large messages cost about twice the time; use glibc")]


def grpcio() -> Sequence[Finding]:
    have = version("grpcio")
    if TRIED:
        return [ok("grpcio", f"{have}, which is tested")]
    said = f"{have} is not tested, so only its public interface is used"
    return [warning("grpcio", said, "small messages cost more; constraints.txt has a tested version")]


def torch() -> Sequence[Finding]:
    """Checks torch and CUDA in another process."""
    if importlib.util.find_spec("torch") is None:
        todo = "only workers need it: pip install 'shardyard[worker]'"
        return [warning("torch", "not installed", todo)]
    again = "install it again: pip install --force-reinstall torch"
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=TORCH_MS_MAX / 1000,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [
            failed("torch", f"`import torch` took over {TORCH_MS_MAX // 1000} s", "see what its driver or disk does")
        ]
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or ["no word"])[-1]
        return [failed("torch", f"cannot be imported: {last}", again)]
    told = json.loads(ended.stdout.strip().splitlines()[-1])
    found = [ok("torch", f"{told['version']}")]
    if told["devices"]:
        found.append(ok("CUDA", f"{told['built']}: {', '.join(told['devices'])}"))
    elif told["built"]:
        said = f"torch was built for CUDA {told['built']}, but finds no device"
        found.append(ok("CUDA", f"{said}; workers use the CPU"))
    else:
        found.append(ok("CUDA", "torch was built without CUDA; workers use the CPU"))
    return found


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"
