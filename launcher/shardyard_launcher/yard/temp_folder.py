"""The folder of one `shardyard run`, and those that killed runs have left.

Owns: the temporary folder's name, the lock that its owner holds as long as it lives. Invariants: a folder is removed
only if it is the user's own and no process holds its lock, so never under a running command. A folder without a lock
file is left alone. Must not know: what is in the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PREFIX: Final = "shardyard-run-"
LOCK_FILE: Final = "run.lock"


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A new folder that is removed at the end of the block. Also removes those of killed runs."""
    remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        part = folder / (LOCK_FILE + ".part")
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # locked from the moment it has its name
            os.replace(part, folder / LOCK_FILE)
            yield folder
        finally:
            os.close(descriptor)


def remove_abandoned(where: Path) -> None:
    """Removes the folders of runs of this user whose process is gone. What cannot be removed stays."""
    for folder in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
