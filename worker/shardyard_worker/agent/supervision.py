"""Supervision of one launch: which processes to start, restart and stop, and which error came first.

Owns: the life of a launch's processes, which of their ends are followed by a restart, the choice of the first error by
time. Each method of `Supervision` takes what has happened, and returns what to do. Invariants: a process is restarted
only if a signal ended it or it lost the yard, and while its budget lasts; one that was told to leave ends alone; an
error of the script ends the launch; after the first failure no process is started; exactly one LaunchEnded is emitted,
as the last event. Must not know:
processes, pipes, clocks (launch has them), torch.
"""

from __future__ import annotations

import enum
import signal
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from shardyard.domain.errors import WorkerQuarantined
from shardyard.runtime.restart_policy import LEFT_IN_ORDER, GivenUp, RestartAt, RestartPolicy
from shardyard.wire.v1 import agent_pb2 as wire

STOP_GRACE_MS: Final = 3_000
"""The time between SIGTERM and SIGKILL, if the request to stop names none."""
RAISED_EXIT_CODE: Final = 1
"""Python's exit code after an exception that was not caught."""
QUARANTINED: Final = WorkerQuarantined.__name__
TAIL_LINES_MAX: Final = 20
"""Output lines kept of each process, to show if it left no traceback."""


@dataclass(frozen=True, slots=True)
class RecordedError:
    """The error that a process wrote into its error file. `time_s`: wall-clock time in seconds. `new_process_helps`:
    the process has lost the yard, and its script did nothing wrong."""

    time_s: float
    kind: str
    message: str
    traceback: str
    new_process_helps: bool = False


@dataclass(frozen=True, slots=True)
class Spawn:
    index: int
    restarts: int


@dataclass(frozen=True, slots=True)
class SendSignal:
    index: int
    signal: signal.Signals


Effect = Spawn | SendSignal | wire.LaunchEvent
"""An event is shown to those who watch the launch."""


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
    """The state machine of one launch. `now_ms` is monotonic, for the timers. `time_s` is wall-clock time, for the
    order of errors, since processes write that into their error files."""

    def __init__(self, *, workers: int, restarts_max: int, restarts_window_ms: int) -> None:
        self._restarts = RestartPolicy(
            restarts_max=restarts_max, window_ms=restarts_window_ms, setting="yard.restarts_max"
        )
        self._processes = [_Process(index) for index in range(workers)]
        self._failures: list[_Failure] = []
        self._quarantined: list[_Failure] = []
        """These count as failures only if no process ended well."""
        self._any_well = False
        self._any_undone = False
        """Whether a process has left before its work was done."""
        self._stopping = False
        self._stop_asked = False
        self._agent_leaves = False
        self._kill_due_ms: int | None = None
        self.ended: wire.LaunchEnded | None = None

    @property
    def running(self) -> int:
        return sum(process.phase is not Phase.ENDED for process in self._processes)

    def next_due_ms(self) -> int | None:
        """When `time_passed` is due next. None: nothing depends on time now."""
        due = [process.due_ms for process in self._processes if process.phase is Phase.RESTARTING]
        if self._kill_due_ms is not None:
            due.append(self._kill_due_ms)
        return min(due, default=None)

    def begin(self) -> list[Effect]:
        return [Spawn(process.index, 0) for process in self._processes]

    def spawned(self, index: int, pid: int) -> list[Effect]:
        process = self._processes[index]
        process.phase, process.pid = Phase.RUNNING, pid
        started = wire.ProcessStarted(local_index=index, pid=pid, restarts=process.restarts)
        event = wire.LaunchEvent(started=started)
        # a launch may be stopped while its processes are being started
        return [event, SendSignal(index, signal.SIGTERM)] if self._stopping else [event]

    def spawn_failed(self, index: int, reason: str, time_s: float, now_ms: int) -> list[Effect]:
        self._processes[index].phase = Phase.ENDED
        self._failures.append(_Failure(time_s, index, 1, f"process {index} could not be started: {reason}"))
        return [*self._begin_stop(now_ms, STOP_GRACE_MS), *self._finish()]

    def withdrawn(self, index: int) -> list[Effect]:
        """The launch was stopped before the process was started."""
        self._processes[index].phase = Phase.ENDED
        return self._finish()

    def printed(self, index: int, standard_error: bool, line: str) -> list[Effect]:
        if self.ended is not None:
            return []
        self._processes[index].tail.append(line)
        output = wire.ProcessOutput(local_index=index, standard_error=standard_error, line=line)
        return [wire.LaunchEvent(output=output)]

    def stop(self, grace_ms: int, now_ms: int) -> list[Effect]:
        if self.ended is not None:
            return []
        self._stop_asked = self._stop_asked or not self._stopping
        return [*self._begin_stop(now_ms, grace_ms), *self._finish()]

    def leave(self, grace_ms: int, now_ms: int) -> list[Effect]:
        """The agent leaves the yard: its processes leave in order."""
        self._agent_leaves = self._agent_leaves or not self._stopping
        not_running = (Phase.STARTING, Phase.RESTARTING)
        self._any_undone |= any(process.phase in not_running for process in self._processes)
        return [*self._begin_stop(now_ms, grace_ms), *self._finish()] if self.ended is None else []

    def exited(
        self, index: int, exit_code: int, error: RecordedError | None, time_s: float, now_ms: int
    ) -> list[Effect]:
        """`exit_code` is negative if a signal ended the process. `error`: what it wrote into its error file."""
        process = self._processes[index]
        decided = self._decide_restart(process, exit_code, error, now_ms)
        again = isinstance(decided, RestartAt)
        ending = describe_end(exit_code, error)
        exited = wire.ProcessExited(
            local_index=index, pid=process.pid, exit_code=exit_code, will_restart=again, ending=ending
        )
        effects: list[Effect] = [wire.LaunchEvent(exited=exited)]
        if isinstance(decided, RestartAt):
            process.phase, process.due_ms = Phase.RESTARTING, decided.at_ms
            process.restarts += 1
            return effects
        process.phase = Phase.ENDED
        self._any_well = self._any_well or exit_code == 0
        if self._is_undone(exit_code, error):
            self._any_undone = True  # the others go on
            return effects + self._finish()
        failure = self._failure(process, exit_code, error, time_s, decided)
        if error is not None and error.kind == QUARANTINED and not self._stopping:
            self._quarantined.append(failure)  # the job goes on without it
            return effects + self._finish()
        # a process that ends while it is being stopped has failed by itself only if it recorded an error
        if exit_code != 0 and (not self._stopping or (error is not None and not self._stop_asked)):
            self._failures.append(failure)
        if exit_code != 0:
            effects += self._begin_stop(now_ms, STOP_GRACE_MS)
        return effects + self._finish()

    def _is_undone(self, exit_code: int, error: RecordedError | None) -> bool:
        """Whether the process has left before its work was done, because it was told to."""
        if error is not None:
            return self._agent_leaves and error.new_process_helps
        return exit_code == LEFT_IN_ORDER or (self._agent_leaves and exit_code < 0)

    def _decide_restart(
        self, process: _Process, exit_code: int, error: RecordedError | None, now_ms: int
    ) -> RestartAt | GivenUp | None:
        """None: a process that ends like this is not started again."""
        is_due = exit_code < 0 if error is None else error.new_process_helps
        return self._restarts.died(str(process.index), now_ms) if is_due and not self._stopping else None

    def _failure(
        self,
        process: _Process,
        exit_code: int,
        error: RecordedError | None,
        time_s: float,
        decided: GivenUp | None,
    ) -> _Failure:
        given_up = "" if decided is None else f"process {process.index} is not started again: {decided.why}"
        if error is not None:
            # it raised an error, and the stop signal reached it while it was still ending
            stopped = self._stopping and -exit_code in (signal.SIGTERM, signal.SIGKILL)
            code = RAISED_EXIT_CODE if stopped else exit_code
            text = "\n".join(line for line in (error.traceback.rstrip(), given_up) if line)
            return _Failure(error.time_s, process.index, code, text)
        ending = describe_end(exit_code, None)
        lines = [f"process {process.index} (pid {process.pid}) {ending}; it left no traceback"]
        if process.tail:
            lines += ["the end of its output:", *(f"  {line}" for line in process.tail)]
        return _Failure(time_s, process.index, exit_code, "\n".join([*lines, *([given_up] if given_up else [])]))

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

    def time_passed(self, now_ms: int) -> list[Effect]:
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
            self.ended = wire.LaunchEnded(
                exit_code=first.exit_code, first_error_index=first.index, first_error=first.text
            )
        elif self._agent_leaves and self._any_undone:
            what = "the agent leaves the yard, and the script was not done"
            self.ended = wire.LaunchEnded(exit_code=LEFT_IN_ORDER, first_error=what, stopped=True, agent_leaves=True)
        elif self._stop_asked:
            what = "the launch was stopped"
            self.ended = wire.LaunchEnded(exit_code=-signal.SIGTERM, first_error=what, stopped=True)
        elif self._any_undone and not self._any_well:
            what = "its processes were told to leave (SIGTERM, shardyard drain) before the script was done"
            self.ended = wire.LaunchEnded(exit_code=LEFT_IN_ORDER, first_error=what, stopped=True)
        else:
            self.ended = wire.LaunchEnded()
        return [wire.LaunchEvent(ended=self.ended)]


def describe_end(exit_code: int, error: RecordedError | None) -> str:
    """For example "was killed by SIGKILL", "ended with StaleIncarnation", "ended with exit code 3"."""
    if error is not None:
        return f"ended with {error.kind}"
    if exit_code == LEFT_IN_ORDER:
        return f"left in order before its work was done (exit code {exit_code})"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
