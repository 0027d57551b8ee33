"""Facts about the machine, and what processes and the loopback interface have used of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import psutil

PACKAGES = ("torch", "grpcio", "numpy", "numba")


def machine_facts() -> dict[str, object]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of the processes and their descendants since their start; in steps of 10 ms."""
    total = 0.0
    for pid in pids:
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            times = each.cpu_times()
            # of descendants that have ended and were waited for, too
            total += times.user + times.system + times.children_user + times.children_system
    return total


def resident_kib(pids: Iterable[int]) -> float:
    """Memory of the processes and their descendants that is in RAM now."""
    every = [each for pid in pids for each in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
    return sum(each.memory_info().rss for each in every) / 1024


def loopback_bytes() -> int:
    """Bytes over the loopback interface since boot, headers included, of all processes on this machine."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, counters = line.strip().partition(":")
        if name == "lo":
            return int(counters.split()[0])
    raise OSError("/proc/net/dev knows no interface named lo")
