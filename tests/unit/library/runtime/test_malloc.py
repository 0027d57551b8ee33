"""tune_malloc: memory that was freed is used again without new pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource
from shardyard.runtime.malloc import Kept, tune_malloc

libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def use(nbytes):
    memory = libc.malloc(nbytes)
    libc.memset(memory, 1, nbytes)
    libc.free(memory)

assert tune_malloc(Kept.KEPT)
use(NBYTES)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use(NBYTES)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def new_pages(nbytes: int, kept: str) -> int:
    program = PROGRAM.replace("KEPT", kept).replace("NBYTES", str(nbytes))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


@pytest.mark.parametrize(
    ("mib", "kept", "is_kept"),
    [
        (4, "LITTLE", False),
        (16, "MESSAGES", True),
        (64, "MESSAGES", False),
        (64, "TENSORS", True),
    ],
    ids=str,
)
def test_freed_memory_is_kept_up_to_the_size_that_comes_again(mib: int, kept: str, is_kept: bool) -> None:
    assert (new_pages(mib << 20, kept) <= 8) is is_kept
