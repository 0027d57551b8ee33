"""Rows on disk: look-ups of 4,096 hot ids of 50M rows of dim 16, with Adagrad, while another thread reads cold rows.

The process has a memory cgroup of 2 GiB, page cache included. It needs root, and a folder on a disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from claims import Found
from harness.machine.memory_cgroup import memory_cgroup
from harness.measuring.pairs import Figures

ON_DISK = Path(__file__).resolve().parent.parent / "sides" / "shardyard" / "rows_on_disk.py"


def measure(rows: int, cgroup_mib: int, memory_mib: int, folder: str) -> Found:
    """Measures in a separate process, in a cgroup. Raises NoCgroup."""
    with memory_cgroup(cgroup_mib << 20) as cgroup:
        command = [sys.executable, str(ON_DISK), "--rows", str(rows), "--memory-mib", str(memory_mib)]
        command += ["--folder", folder, "--cgroup", str(cgroup)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    print("rows on disk: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()), flush=True)
    return Found(found, {"disk_tier_p99_ms": [found["p99_ms"]]})
