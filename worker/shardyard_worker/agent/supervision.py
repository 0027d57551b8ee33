"""Supervision of one launch: which processes to start, restart and stop, and which error came first.

Owns: the life of a launch's processes, the budget of restarts and their back-off, the choice of the first error by
time, the environment of a training process, who may launch. Invariants: only `Supervision.handle` changes the state; a
process is restarted only after a signal ended it, and while its budget lasts; after the first failure no process is
started; exactly one LaunchEnded is emitted, as the last event. Must not know: processes, pipes, clocks, gRPC (launch
runs the effects, service takes the calls), torch.
"""

from __future__ import annotations

import enum
import ipaddress
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

from shardyard.domain.errors import WorkerQuarantined

STOP_GRACE_MS: Final = 3_000
"""The time between SIGTERM and SIGKILL, if the request to stop names none."""
RESTART_BACKOFF_MS: Final = 200
RESTART_BACKOFF_MS_MAX: Final = 10_000
WORKERS_EXPECTED_VARIABLE: Final = "SHARDYARD__JOB__WORKERS_EXPECTED"
RAISED_EXIT_CODE: Final = 1
"""Python's exit code after an exception that was not caught."""
QUARANTINED: Final = WorkerQuarantined.__name__
TAIL_LINES_MAX: Final = 20
"""Output lines kept of each process, to show if it left no traceback."""


# ---- what happened, for those who watch


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    index: int
    pid: int
    restarts: int


@dataclass(frozen=True, slots=True)
class ProcessOutput:
    index: int
    standard_error: bool
    line: str


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """`exit_code` is negative if a signal ended the process."""

    index: int
    pid: int
    exit_code: int
    will_restart: bool


@dataclass(frozen=True, slots=True)
class LaunchEnded:
    """`exit_code` 0: every process ended well, except those that the job has quarantined. Otherwise `first_error` is
    that of the process that failed first."""

    exit_code: int
    first_error_index: int = 0
    first_error: str = ""


Happening = ProcessStarted | ProcessOutput | ProcessExited | LaunchEnded


# ---- events


@dataclass(frozen=True, slots=True)
class RecordedError:
    """The error that a process wrote into its error file. `time_s`: wall-clock time in seconds."""

    time_s: float
    kind: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True)
class LaunchBegan:
    pass


@dataclass(frozen=True, slots=True)
class Spawned:
    index: int
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    index: int
    reason: str
    time_s: float


@dataclass(frozen=True, slots=True)
class LinePrinted:
    index: int
    standard_error: bool
    line: str


@dataclass(frozen=True, slots=True)
class Ended:
    index: int
    exit_code: int
    error: RecordedError | None
    time_s: float


@dataclass(frozen=True, slots=True)
class StopAsked:
    grace_ms: int


@dataclass(frozen=True, slots=True)
class TimePassed:
    pass


Event = LaunchBegan | Spawned | SpawnFailed | LinePrinted | Ended | StopAsked | TimePassed


# ---- effects


@dataclass(frozen=True, slots=True)
class Spawn:
    index: int
    restarts: int


@dataclass(frozen=True, slots=True)
class SendSignal:
    index: int
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class ReportExit:
    pid: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class EmitEvent:
    happening: Happening


Effect = Spawn | SendSignal | ReportExit | EmitEvent


class Phase(enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    ENDED = "ended"


@dataclass(slots=True)
class _Process:
    index: int
    phase: Phase = Phase.STARTING
    pid: int = 0
    restarts: int = 0
    due_ms: int = 0
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES_MAX))


@dataclass(frozen=True, slots=True)
class _Failure:
    time_s: float
    index: int
    exit_code: int
    text: str


class Supervision:
    """The state machine of one launch. Time is an argument: monotonic milliseconds for the timers, wall-clock seconds
    in the events for the order of errors, since processes write those into their error files."""

    def __init__(self, *, workers: int, restarts_max: int) -> None:
        self._restarts_max = restarts_max
        self._processes = [_Process(index) for index in range(workers)]
        self._failures: list[_Failure] = []
        self._quarantined: list[_Failure] = []
        """These count as failures only if no process ended well."""
        self._any_well = False
        self._stopping = False
        self._stop_asked = False
        self._kill_due_ms: int | None = None
        self.ended: LaunchEnded | None = None

    @property
    def running(self) -> int:
        return sum(process.phase is not Phase.ENDED for process in self._processes)

    def next_due_ms(self) -> int | None:
        """When the next TimePassed is due. None: nothing depends on time now."""
        due = [process.due_ms for process in self._processes if process.phase is Phase.RESTARTING]
        if self._kill_due_ms is not None:
            due.append(self._kill_due_ms)
        return min(due, default=None)

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        if self.ended is not None:
            return []
        match event:
            case LaunchBegan():
                return [Spawn(process.index, 0) for process in self._processes]
            case Spawned(index, pid):
                return self._spawned(self._processes[index], pid)
            case SpawnFailed(index, reason, time_s):
                self._processes[index].phase = Phase.ENDED
                self._failures.append(_Failure(time_s, index, 1, f"process {index} could not be started: {reason}"))
                return [*self._begin_stop(now_ms, STOP_GRACE_MS), *self._finish()]
            case LinePrinted(index, standard_error, line):
                self._processes[index].tail.append(line)
                return [EmitEvent(ProcessOutput(index, standard_error, line))]
            case Ended():
                return self._ended(self._processes[event.index], event, now_ms)
            case StopAsked(grace_ms):
                self._stop_asked = self._stop_asked or not self._stopping
                return [*self._begin_stop(now_ms, grace_ms), *self._finish()]
            case TimePassed():
                return self._time_passed(now_ms)

    def _spawned(self, process: _Process, pid: int) -> list[Effect]:
        process.phase, process.pid = Phase.RUNNING, pid
        told = EmitEvent(ProcessStarted(process.index, pid, process.restarts))
        # a launch may be stopped while its processes are being started
        return [told, SendSignal(process.index, signal.SIGTERM)] if self._stopping else [told]

    def _ended(self, process: _Process, event: Ended, now_ms: int) -> list[Effect]:
        code = event.exit_code
        restart = code < 0 and not self._stopping and process.restarts < self._restarts_max
        effects: list[Effect] = [
            ReportExit(process.pid, code),
            EmitEvent(ProcessExited(process.index, process.pid, code, restart)),
        ]
        if restart:
            process.phase = Phase.RESTARTING
            process.due_ms = now_ms + min(RESTART_BACKOFF_MS << process.restarts, RESTART_BACKOFF_MS_MAX)
            process.restarts += 1
            return effects
        process.phase = Phase.ENDED
        self._any_well = self._any_well or code == 0
        if event.error is not None and event.error.kind == QUARANTINED and not self._stopping:
            self._quarantined.append(self._failure(process, event))  # the job goes on without it
            return effects + self._finish()
        # a process that ends while it is being stopped has failed by itself only if it recorded an error
        if code != 0 and (not self._stopping or (event.error is not None and not self._stop_asked)):
            self._failures.append(self._failure(process, event))
        if code != 0:
            effects += self._begin_stop(now_ms, STOP_GRACE_MS)
        return effects + self._finish()

    def _failure(self, process: _Process, event: Ended) -> _Failure:
        if event.error is not None:
            # it raised an error, and the stop signal reached it while it was still ending
            stopped = self._stopping and -event.exit_code in (signal.SIGTERM, signal.SIGKILL)
            code = RAISED_EXIT_CODE if stopped else event.exit_code
            return _Failure(event.error.time_s, process.index, code, event.error.traceback.rstrip())
        said = describe_exit(event.exit_code)
        if event.exit_code < 0:
            said += f" after {process.restarts} restarts (yard.restarts_max is {self._restarts_max})"
        lines = [f"process {process.index} (pid {process.pid}) {said}; it left no traceback"]
        if process.tail:
            lines += ["the end of its output:", *(f"  {line}" for line in process.tail)]
        return _Failure(event.time_s, process.index, event.exit_code, "\n".join(lines))

    def _begin_stop(self, now_ms: int, grace_ms: int) -> list[Effect]:
        if self._stopping:
            if self._kill_due_ms is not None:
                self._kill_due_ms = min(self._kill_due_ms, now_ms + grace_ms)
            return []
        self._stopping = True
        self._kill_due_ms = now_ms + grace_ms
        for process in self._processes:
            if process.phase is Phase.RESTARTING:
                process.phase = Phase.ENDED
        return [SendSignal(p.index, signal.SIGTERM) for p in self._processes if p.phase is Phase.RUNNING]

    def _time_passed(self, now_ms: int) -> list[Effect]:
        effects: list[Effect] = []
        for process in self._processes:
            if process.phase is Phase.RESTARTING and now_ms >= process.due_ms:
                process.phase = Phase.STARTING
                effects.append(Spawn(process.index, process.restarts))
        if self._kill_due_ms is not None and now_ms >= self._kill_due_ms:
            self._kill_due_ms = None
            effects += [SendSignal(p.index, signal.SIGKILL) for p in self._processes if p.phase is Phase.RUNNING]
        return effects

    def _finish(self) -> list[Effect]:
        if self.running:
            return []
        failures = self._failures or ([] if self._any_well else self._quarantined)
        if failures:
            first = min(failures, key=lambda failure: (failure.time_s, failure.index))
            self.ended = LaunchEnded(first.exit_code, first.index, first.text)
        elif self._stop_asked:
            self.ended = LaunchEnded(-signal.SIGTERM, 0, "the launch was stopped")
        else:
            self.ended = LaunchEnded(0)
        return [EmitEvent(self.ended)]


def describe_exit(exit_code: int) -> str:
    """Describes an exit code in words."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


# ---- the environment of a training process


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """The place of a training process, as its environment tells it."""

    coordinator: str
    agent: int
    index: int
    workers: int
    error_file: str


def environment_block(base: Mapping[str, str], place: ProcessPlace, *, threads: int, gpu: str | None) -> dict[str, str]:
    """The environment of a training process: `base`, thread counts if it has none, one GPU if there is one for it, and
    the variables from which `shardyard.connect` learns its place."""
    block = dict(base)
    if threads:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            block.setdefault(name, str(threads))
    if gpu is not None:
        block["CUDA_VISIBLE_DEVICES"] = gpu
    # a job expects the workers of this launch, unless the user has set a number, as for several machines
    if WORKERS_EXPECTED_VARIABLE in block:
        block.pop("SHARDYARD_WORKERS", None)
    else:
        block["SHARDYARD_WORKERS"] = str(place.workers)
    return block | {
        "SHARDYARD_COORDINATOR": place.coordinator,
        "SHARDYARD_AGENT": str(int(place.agent)),
        "SHARDYARD_LOCAL_INDEX": str(place.index),
        "SHARDYARD_ERROR_FILE": place.error_file,
    }


def gpus_to_give(base: Mapping[str, str], device: str, present: Sequence[str]) -> tuple[str, ...]:
    """The GPUs that are given out, one to each process in turn. None unless `worker.device` is auto.
    CUDA_VISIBLE_DEVICES chooses them if it is set; otherwise they are `present`, those of the machine."""
    if device != "auto":
        return ()
    visible = base.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(present)
    named = [name.strip() for name in visible.split(",") if name.strip()]
    # CUDA itself stops at the first negative number
    hidden = next((place for place, name in enumerate(named) if name.startswith("-")), len(named))
    return tuple(named[:hidden])


def is_local_caller(peer: str) -> bool:
    """Whether a caller, as gRPC names it (`ipv4:127.0.0.1:5000`, `ipv6:%5B::1%5D:5000`, `unix:...`), is on this
    machine. Only loopback addresses and Unix sockets cannot be reached from outside."""
    kind, _, rest = unquote(peer).partition(":")
    if peer == "in-process" or kind in ("unix", "unix-abstract"):
        return True
    if kind not in ("ipv4", "ipv6"):
        return False
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
