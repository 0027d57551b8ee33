"""Tunes malloc at the start of every process that moves payloads.

Messages of a megabyte and tensors of many are allocated and freed all the time. With glibc's defaults, each one is
mapped and unmapped again, and fresh pages are a large part of the cost of using it.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MESSAGE_BYTES: Final = 32 << 20
"""Also the most that glibc before 2.35 takes as its threshold."""
_LARGEST_TENSOR_BYTES: Final = 1 << 30


def tune_malloc(*, tensors: bool = False) -> bool:
    """Keeps freed message buffers mapped, and with `tensors` also freed gradients and activations of up to 1 GiB, which
    each step allocates anew. Returns False if the C library has no mallopt (musl, macOS)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    if not (tensors and mallopt(_M_MMAP_THRESHOLD, _LARGEST_TENSOR_BYTES)):
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MESSAGE_BYTES)
    return bool(mallopt(_M_TRIM_THRESHOLD, 1 << 30))
