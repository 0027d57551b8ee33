"""The folders of an agent's launches: what was launched, how it ended, and what it printed.

    STATE/launches/482913/launch.json   the record of launch 482913
    STATE/launches/482913/lock          held by the agent while the launch runs
    STATE/launches/482913/0.log         see output_files

Owns: the numbers of launches, their records, and which folders are deleted. Invariants: a number is given once, as long
as its folder is there, to agents on the same folder too. A folder appears with its record and its lock. The folder of a
launch that runs is not deleted. All is readable by the agent's user only. Must not know: processes, gRPC.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from shardyard.domain import limits

log = logging.getLogger("shardyard.agent")

FOLDER: Final = "launches"
RECORD: Final = "launch.json"
LOCK: Final = "lock"
UNRECORDED: Final = "ended"
"""The name of the lock of a launch whose end could not be recorded."""
NEW: Final = ".new-"
NUMBER_MIN, NUMBER_MAX = 100_000, 999_999
"""Short enough to type. A random one, so that launches of several agents, and of an agent that has lost its folder,
have different numbers."""
ENDED_MAX: Final = 16
"""How many ended launches are kept."""
ENDED_BYTES_MAX: Final = 256 * limits.MIB
"""How much ended launches keep together. The newest of them is kept in any case."""
RECORD_BYTES_MAX: Final = 16 * limits.MIB
ABANDONED_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Ending:
    """`exit_code`: 0 if the launch ended well. `first_error`: of the process that failed first, `first_error_index`.
    `stopped`: somebody has ordered the end."""

    time_s: float
    exit_code: int
    first_error_index: int
    first_error: str
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """Times are in seconds since 1970. `ended`: None while it runs, and for ever if its agent was killed. `request`:
    what to launch again in that case, as base64; empty if its launcher does that. `resumed_s`: when that was done, as
    far back as it counts. `left`: its agent has left in order, and the script goes on. `owner`: whose it is; empty: of
    nobody in particular."""

    number: int
    script: str
    arguments: tuple[str, ...]
    workers: int
    started_s: float
    ended: Ending | None = None
    request: str = ""
    resumed_s: tuple[float, ...] = ()
    left: bool = False
    owner: str = ""


class LaunchFolder:
    """The folder of one launch. `lock`: the descriptor that holds its lock, in the agent that runs the launch."""

    def __init__(self, path: Path, lock: int | None = None) -> None:
        self.path = path
        self._lock = lock

    @property
    def runs(self) -> bool:
        """Whether an agent runs the launch."""
        try:
            descriptor = os.open(self.path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def record(self) -> LaunchRecord | None:
        """None if the record is gone or damaged."""
        try:
            with (self.path / RECORD).open("rb") as stream:
                entry = json.loads(stream.read(RECORD_BYTES_MAX))
            return LaunchRecord(
                number=int(entry["number"]),
                script=str(entry["script"]),
                arguments=tuple(map(str, entry["arguments"])),
                workers=int(entry["workers"]),
                started_s=float(entry["started_s"]),
                ended=None if entry["ended"] is None else _ending(entry["ended"]),
                request=str(entry["request"]),
                resumed_s=tuple(map(float, entry["resumed_s"])),
                left=entry.get("left") is True,
                owner=str(entry.get("owner", "")),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def take(self) -> bool:
        """Takes the lock of a launch that nobody runs. False if somebody runs it."""
        try:
            lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def write(self, record: LaunchRecord) -> None:
        """For the holder of the lock. Raises OSError."""
        part = self.path / (RECORD + ".part")
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as stream:
                json.dump(dataclasses.asdict(record), stream)
            os.replace(part, self.path / RECORD)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def end(self, record: LaunchRecord) -> None:
        """Writes the last record and gives up the lock. Raises OSError if the record could not be written; the launch
        is not launched again in that case either."""
        try:
            self.write(record)
        except OSError:
            with contextlib.suppress(OSError):
                os.rename(self.path / LOCK, self.path / UNRECORDED)  # a full disk has room for that
            raise
        finally:
            self.release()

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class LaunchFolders:
    """The folders of all launches in a state folder. Safe for several threads and processes."""

    def __init__(self, state: Path) -> None:
        self.path = state.absolute() / FOLDER

    def prepare(self) -> None:
        """Before `create`. Raises OSError if the folder cannot be written."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)
        with tempfile.TemporaryFile(dir=self.path):  # whether files can be made
            pass

    def create(self, describe: Callable[[int], LaunchRecord]) -> LaunchFolder:
        """A folder for a new launch, whose number `describe` gets. Deletes old ones. Raises OSError."""
        self._prune()
        begun = Path(tempfile.mkdtemp(prefix=NEW, dir=self.path))
        lock = os.open(begun / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            while True:
                number = NUMBER_MIN + secrets.randbelow(NUMBER_MAX - NUMBER_MIN + 1)
                LaunchFolder(begun).write(describe(number))
                try:
                    begun.rename(self.path / str(number))
                    return LaunchFolder(self.path / str(number), lock)
                except OSError as error:  # there is one of this number
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
        except BaseException:
            os.close(lock)
            shutil.rmtree(begun, ignore_errors=True)
            raise

    def find(self, number: int) -> LaunchFolder | None:
        folder = LaunchFolder(self.path / str(number))
        return folder if folder.path.is_dir() else None

    def records(self) -> list[tuple[LaunchFolder, LaunchRecord]]:
        """All launches that have a record, the newest first."""
        found = []
        for path in self._paths():
            record = LaunchFolder(path).record()
            if record is not None:
                found.append((LaunchFolder(path), record))
        return sorted(found, key=lambda each: -each[1].started_s)

    def take_lost(self) -> list[tuple[LaunchFolder, LaunchRecord]]:
        """Takes the launches that are to be launched again because their agent was killed or has left, the oldest
        first."""
        found = []
        for folder, record in reversed(self.records()):
            if record.request and record.ended is None and folder.take():
                latest = folder.record()
                if latest is not None and latest.ended is None:
                    found.append((folder, latest))
                else:  # it has ended since
                    folder.release()
        return found

    def forgo_lost(self) -> None:
        """From now on nobody launches again what an agent has left behind: somebody has stopped it."""
        for folder, record in self.take_lost():
            ended = Ending(time.time(), -signal.SIGTERM, 0, "its agent was stopped", stopped=True)
            with contextlib.suppress(OSError):
                folder.end(replace(record, ended=ended, request=""))

    def _paths(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return [path for path in self.path.iterdir() if path.name.isdecimal()]
        return []

    def _prune(self) -> None:
        """Deletes ended launches beyond the bounds, and what an agent that was killed has begun."""
        ended = [path for path in self._paths() if not LaunchFolder(path).runs]
        nbytes = 0
        for place, path in enumerate(sorted(ended, key=_changed_s, reverse=True)):
            nbytes += _bytes_in(path)
            if place >= ENDED_MAX - 1 or (place and nbytes > ENDED_BYTES_MAX):
                shutil.rmtree(path, ignore_errors=True)
        for path in self.path.glob(f"{NEW}*"):
            if not LaunchFolder(path).runs and time.time() - _changed_s(path) > ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


class AgentFolders:
    """The launches of one agent: in its state folder, and, if that cannot be written, in a temporary folder that lasts
    as long as the agent."""

    def __init__(self, state: Path) -> None:
        self._all = [LaunchFolders(state)]
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        try:
            self._all[0].prepare()
        except OSError as error:
            self._use_temporary(error)

    def create(self, describe: Callable[[int], LaunchRecord]) -> LaunchFolder:
        """As that of LaunchFolders. Raises OSError if no disk has room."""
        try:
            return self._all[0].create(describe)
        except OSError as error:
            self._use_temporary(error)
            return self._all[-1].create(describe)

    def find(self, number: int) -> LaunchFolder | None:
        found = (folders.find(number) for folders in list(self._all))
        return next((folder for folder in found if folder is not None), None)

    def records(self) -> list[tuple[LaunchFolder, LaunchRecord]]:
        return [each for folders in list(self._all) for each in folders.records()]

    def take_lost(self) -> list[tuple[LaunchFolder, LaunchRecord]]:
        return self._all[0].take_lost()

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    def _use_temporary(self, error: OSError) -> None:
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="shardyard-agent-", ignore_cleanup_errors=True)
            self._all.append(LaunchFolders(Path(self._temporary.name)))
        log.warning(
            "what launches print is kept in %s, until this agent ends, because %s cannot be written (%s); --state "
            "names another folder",
            *(self._temporary.name, self._all[0].path, error.strerror),
        )
        self._all[-1].prepare()


def _ending(entry: dict[str, Any]) -> Ending:
    return Ending(
        time_s=float(entry["time_s"]),
        exit_code=int(entry["exit_code"]),
        first_error_index=int(entry["first_error_index"]),
        first_error=str(entry["first_error"]),
        stopped=entry["stopped"] is True,
    )


def _bytes_in(path: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(each.stat().st_size for each in path.iterdir())
    return 0


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
