"""Runs many seeds, in as many processes as there are cores. Invariant: no process is left, even after an error."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[2]
KINDS_OF_TEN = {6: "async-rows-lives", 7: "async-rows", 8: "sync-rows", 9: "hybrid"}
"""The kinds that `mixed` gives to seeds, by their last digit."""
SHM = Path("/dev/shm")
PID_MAX = 1 << 22


def folder_name(pid: int) -> str:
    """How the names of a process's folders begin. The process's number tells tests that run at the same time whose they
    are. The length is always the same: a trace leaves out the name of the folder, but depends on its length."""
    return f"shardyard-sim-{pid:0{len(str(PID_MAX))}}-"


def folders_of(pid: int) -> Iterator[Path]:
    return (SHM if SHM.is_dir() else Path(tempfile.gettempdir())).glob(f"{folder_name(pid)}*")


def mixed(seeds: Sequence[int]) -> dict[str, list[int]]:
    """Seeds by kind. Four of ten have jobs with a table, which no seed has without a kind."""
    found: dict[str, list[int]] = {"": []}
    for seed in seeds:
        found.setdefault(KINDS_OF_TEN.get(seed % 10, ""), []).append(seed)
    return found


def _lines_of(children: Sequence[subprocess.Popen[str]]) -> Iterator[str]:
    """The lines that the processes write, as they come. All pipes are read: a full one would block its process."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            assert child.stdout is not None
            selector.register(child.stdout, selectors.EVENT_READ, bytearray())
        while selector.get_map():
            for key, _ in selector.select():
                more = os.read(key.fd, 1 << 16)
                key.data.extend(more)
                *whole, rest = bytes(key.data).split(b"\n")
                key.data[:] = rest
                yield from (line.decode() for line in whole)
                if not more:
                    selector.unregister(key.fileobj)


class Run(Protocol):
    """Gives the result of each seed, in no order."""

    def __call__(self, seeds: Sequence[int], *, kind: str = "") -> Iterator[dict[str, Any]]: ...


def run_seeds(
    seeds: Sequence[int], *, kind: str = "", jobs: int = 0, environment: dict[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """The result of each seed, as `python -m tests.simulator --json` prints it, in no order. `jobs`: processes; 0: one
    for each core."""
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(seeds))
    children = []
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    try:
        for number in range(jobs):
            mine = ",".join(str(seed) for seed in seeds[number::jobs])
            command = [sys.executable, "-m", "tests.simulator", "--json", "--list", "-", "--kind", kind]
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **(environment or {}), "PYTHONPATH": path},
            )
            children.append(child)
            assert child.stdin is not None
            child.stdin.write(mine)
            child.stdin.close()
        yield from map(json.loads, _lines_of(children))
        for child in children:
            if child.wait() != 0:
                raise RuntimeError(f"a process of the simulator ended with {child.returncode}")
    finally:
        for child in children:
            child.kill()
            child.wait()
            for folder in folders_of(child.pid):  # of a yard that was under way
                shutil.rmtree(folder, ignore_errors=True)
            for pipe in (child.stdin, child.stdout):
                with contextlib.suppress(OSError, ValueError):
                    pipe.close()  # type: ignore[union-attr]
