"""Tunes malloc at the start of every process that moves payloads.

Messages of a megabyte are allocated and freed all the time. With glibc's defaults, each one is mapped and unmapped
again, and fresh pages are a large part of the cost of moving it.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def tune_malloc() -> bool:
    """Keeps freed message buffers mapped. Returns False if the C library has no mallopt (musl, macOS)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(_M_TRIM_THRESHOLD, (1 << 30)))
