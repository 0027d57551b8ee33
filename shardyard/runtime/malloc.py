"""Tunes malloc at the start of every process that moves payloads.

Messages of a megabyte and tensors of many are allocated and freed all the time. With glibc's defaults, each one is
mapped and unmapped again, and fresh pages are a large part of the cost of using it.
"""

from __future__ import annotations

import ctypes
import sys
from enum import Enum
from typing import Final

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MESSAGE_BYTES: Final = 32 << 20
"""Also the most that glibc before 2.35 takes as its threshold."""
_LARGEST_TENSOR_BYTES: Final = 1 << 30
_SMALL_BYTES: Final = 1 << 20
"""Frames of payloads are larger."""


class Kept(Enum):
    """What stays mapped when it is freed."""

    LITTLE = "little"
    """For a process whose memory is short."""
    MESSAGES = "messages"
    TENSORS = "tensors"
    """Also gradients and activations of up to 1 GiB, which each step allocates anew."""


_THRESHOLDS: Final = {
    Kept.LITTLE: (_SMALL_BYTES, 16 * _SMALL_BYTES),
    Kept.MESSAGES: (_LARGEST_MESSAGE_BYTES, 1 << 30),
    Kept.TENSORS: (_LARGEST_TENSOR_BYTES, 1 << 30),
}


def tune_malloc(kept: Kept = Kept.MESSAGES) -> bool:
    """Returns False if the C library has no mallopt (musl, macOS)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    threshold, trim = _THRESHOLDS[kept]
    if not mallopt(_M_MMAP_THRESHOLD, threshold):
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MESSAGE_BYTES)
    return bool(mallopt(_M_TRIM_THRESHOLD, trim))


def give_back_freed() -> None:
    """Gives the system what malloc keeps of freed memory, as far as there are whole pages."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
