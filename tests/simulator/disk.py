"""The disk: real files in memory, and what of them a power failure leaves.

Shipped code writes through the os module; the simulator's stands between, and notes what was made durable: a file's
bytes by fsync of the file, a name by fsync of its folder. A process that is killed loses nothing that it has written. A
power failure leaves of each file what is durable, or, as it happens to be, anything up to what was there: a name
without its file, a file without its bytes, a file with half of them. Each write, sync and rename takes a moment, at
which its process may die, and may fail while the seed says so; those moments are the failpoints of the shipped code.

Invariant: what is durable is never lost. Must not know: what the files are. SQLite keeps its promise by itself; the
coordinator's journal is in a folder of its own, which no power failure touches.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import greenlet

from shardyard.runtime import failpoints

from .substitutes import Pipe
from .world import MS, Process, Task, World, current

MAY_FAIL = frozenset(
    {
        "storage.before_write",
        "storage.before_fsync",
        "storage.before_rename",
        "storage.before_delete",
        "storage.before_fsync_folder",
        "wal.before_write",
        "wal.before_sync",
        "wal.before_rotate",
        "wal.before_fence",
    }
)
"""Failpoints before operations that the disk may refuse."""


class Disk:
    """The folder `root` of a world."""

    def __init__(self, world: World, root: Path) -> None:
        self.world = world
        self.root = root
        self.refusing = 0.0
        """How often an operation fails."""
        self.has_refused = False
        root.mkdir()
        self._synced: dict[int, bytes] = {}
        """By inode: the content that a power failure leaves."""
        self._named: dict[str, int | None] = {str(root): None}
        """By path: the inode that durably has this name; None for a folder."""

    # ---- what the os module of shipped code does besides

    def fsync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not path.startswith(str(self.root)) or found.st_nlink == 0:
            return
        if stat.S_ISDIR(found.st_mode):
            self._sync_folder(path)
        else:
            with open(path, "rb") as file:
                self._synced[found.st_ino] = file.read()

    def made(self, descriptor: int) -> None:
        """A new file has an inode number that another file may have had before."""
        if os.fstat(descriptor).st_size == 0:
            self._synced.pop(os.fstat(descriptor).st_ino, None)

    def _sync_folder(self, folder: str) -> None:
        there = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                there[entry.path] = None if entry.is_dir() else entry.inode()
        gone = [p for p in self._named if os.path.dirname(p) == folder and p not in there]
        for path in gone:
            for below in [p for p in self._named if p == path or p.startswith(path + "/")]:
                del self._named[below]
        self._named.update(there)

    # ---- what happens to it

    def fail_power(self) -> None:
        """No process runs. The folder becomes what the disk durably has."""
        rng = self.world.rng
        for folder, _, files in sorted(os.walk(self.root)):
            for name in sorted(files):
                self._settle_file(Path(folder, name), rng.random())
        # names that were taken away, and not durably: they may be there again
        for path, inode in sorted(self._named.items()):
            if inode is not None and not os.path.exists(path) and inode in self._synced and rng.random() < 0.5:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_bytes(self._synced[inode])
        for folder, folders, files in sorted(os.walk(self.root), reverse=True):
            if folder not in self._named and not folders and not files and rng.random() < 0.5:
                os.rmdir(folder)
        self._forget_undurable()

    def _settle_file(self, path: Path, chance: float) -> None:
        inode = path.stat().st_ino
        kept = self._synced.get(inode)
        if self._named.get(str(path), -1) != inode and chance < 0.5:
            former = self._named.get(str(path))
            path.unlink()
            if former is not None and former in self._synced:
                path.write_bytes(self._synced[former])
        elif (content := path.read_bytes()) != kept:
            kept = kept or b""
            if not content.startswith(kept):  # overwritten in place
                path.write_bytes(self.world.rng.choice((kept, content)))
                return
            new = content[len(kept) :]
            torn = new[: int(len(new) * self.world.rng.random())]
            path.write_bytes(kept + (torn if self.world.rng.random() < 0.7 else bytes(len(torn))))

    def _forget_undurable(self) -> None:
        """Everything in the folder now is durable."""
        self._synced.clear()
        self._named = {str(self.root): None}
        for folder, folders, files in os.walk(self.root):
            for name in folders:
                self._named[os.path.join(folder, name)] = None
            for name in files:
                path = Path(folder, name)
                self._named[str(path)] = path.stat().st_ino
                self._synced[path.stat().st_ino] = path.read_bytes()

    def passing(self, place: str) -> None:
        """A failpoint of the code: its process may die here, or the disk may refuse."""
        task = greenlet.getcurrent()
        if not isinstance(task, Task) or self.world.over:
            return
        rng, calm = self.world.rng, self.world.calm
        if place.startswith("storage"):
            self.world.pause(rng.randrange(2 * MS) if calm or rng.random() < 0.9 else rng.randrange(300 * MS))
        elif place.startswith("wal"):
            self.world.pause(rng.randrange(300) if calm or rng.random() < 0.98 else rng.randrange(300 * MS))
        elif place == "push.after_partition" and not calm and rng.random() < 0.02:
            self.world.pause(rng.randrange(300 * MS))  # a stop between the updates of two partitions
        elif place == "rows.before_update" and not calm and rng.random() < 0.02:
            self.world.pause(rng.randrange(300 * MS))  # one between a push's values and its rows
        if self.refusing and not calm and place in MAY_FAIL and rng.random() < self.refusing:
            self.has_refused = True
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (simulated, {place})")

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        with failpoints.armed(failpoints.EVERY_PLACE, self.passing):
            yield


class SimulatedOs:
    """The os module, over the disk of the world whose task asks."""

    def __init__(self) -> None:
        self.disk: Disk | None = None
        self._pipes: dict[int, Pipe] = {}
        self._numbers = -1

    def pipe2(self, flags: int) -> tuple[int, int]:
        """Both ends have one number, which is no descriptor's."""
        pipe = Pipe()
        self._numbers -= 1
        number = self._numbers
        self._pipes[number] = pipe
        current().process.at_end[functools.partial(self._pipes.pop, number, None)] = None
        return number, number

    def fdopen(self, descriptor: int, *given: Any, **more: Any) -> Any:
        pipe = self._pipes.get(descriptor)
        if pipe is not None:
            return contextlib.nullcontext(pipe)
        current().process.descriptors.discard(descriptor)  # the file closes it
        return os.fdopen(descriptor, *given, **more)

    def write(self, descriptor: int, data: Any) -> int:
        pipe = self._pipes.get(descriptor)
        return os.write(descriptor, data) if pipe is None else pipe.write(data)

    def kill(self, pid: int, number: int) -> None:
        task = current()
        assert pid == task.process.pid, f"{task.process} ends process {pid}"
        task.process.kill(f"signal {number} to itself")
        task.world.park()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def getpid(self) -> int:
        task = greenlet.getcurrent()
        return task.process.pid if isinstance(task, Task) else os.getpid()

    def open(self, path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        descriptor = os.open(path, flags, mode, **more)
        task = greenlet.getcurrent()
        if isinstance(task, Task):
            if not task.process.descriptors:
                task.process.at_end[functools.partial(_close_all, task.process)] = None
            task.process.descriptors.add(descriptor)
        if flags & os.O_CREAT and self.disk is not None:
            self.disk.made(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        """Closes the descriptors of a process that has ended. What its tasks close afterwards has no effect."""
        task = greenlet.getcurrent()
        if isinstance(task, Task):
            if descriptor not in task.process.descriptors:
                return
            task.process.descriptors.remove(descriptor)
            os.close(descriptor)
        else:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def fsync(self, descriptor: int) -> None:
        if self.disk is not None:
            self.disk.fsync(descriptor)

    def fdatasync(self, descriptor: int) -> None:
        self.fsync(descriptor)

    def urandom(self, size: int) -> bytes:
        task = greenlet.getcurrent()
        return task.world.rng.randbytes(size) if isinstance(task, Task) else os.urandom(size)

    def sched_getaffinity(self, pid: int) -> set[int]:
        return {0}


def _close_all(process: Process) -> None:
    for descriptor in sorted(process.descriptors):
        os.close(descriptor)
    process.descriptors.clear()
