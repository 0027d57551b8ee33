"""Starts a role with the image's compiled kernels in a folder that can be written.

numba takes a cache folder only if it can write there, and the root file system may be read-only; where the processor is
not the one that the image was built on, it compiles anew and keeps the result there.
"""

import os
import shutil
import sys

KERNELS = "/opt/shardyard/kernels"

if os.path.isdir(KERNELS):
    folder = os.environ["NUMBA_CACHE_DIR"]
    try:
        shutil.copytree(KERNELS, folder, dirs_exist_ok=True)
    except OSError as error:
        sys.exit(
            f"error: cannot write to {folder}: {error}\n"
            "  why: compiled kernels are kept there, also where the root file system is read-only\n"
            "  what to do: give the container a writable /tmp (docker run --tmpfs /tmp)"
        )
os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - there is no shell
