"""How much memory this process may use: the machine's, or its container's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, container_bytes() or machine)


def container_bytes() -> int | None:
    """The limit of the container; None: there is none."""
    try:
        text = _CGROUP.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
