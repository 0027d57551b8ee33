"""Launches under fire: `shardyard run SCRIPT` or `shardyard up SCRIPT`, while its processes are killed and stopped.

A seed draws the command, the job and the faults. A fault comes after some time, from the command's first moment on, or
when so much of the job is done. It strikes a process that the command has started: the coordinator, a server, the
agent, a training process or the supervisor of `up`, whether it is ready or not. If there is none at that moment,
because it is being restarted, it strikes the next one.

Owns: what is struck, when, and how the command is started and ended. Invariants: every wait is bounded; nothing is
left. Must not know: what a right end is (test_launches, with oracle).
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.battle import BATCHES, JOB, as_environment, job_settings, script_arguments
from tests.chaos.places import KEPT_ENVIRONMENT, tail
from tests.chaos.schedules import LEASE_S, Plan

COORDINATOR, SERVER, AGENT, TRAINING, SUPERVISOR = "coordinator", "server", "agent", "training process", "supervisor"
RUN = (COORDINATOR, COORDINATOR, SERVER, SERVER, SERVER, AGENT, AGENT, TRAINING, TRAINING, TRAINING)
ROLES = {"run": RUN, "up": (*RUN, SUPERVISOR)}
"""What a fault strikes under each command, each as often as it stands here."""
MARK = "LAUNCH_OF_TEST"
"""In the environment of all processes of a launch: its folder."""
LOOK_S = 0.03
START_S = 8.0
"""Faults of the start come within this time of the first moment."""
STRIKE_S = 15.0
"""How long a fault waits for a process of its role."""
PLAY_S = 200.0
DOWN_S = 60.0
PAUSE_MS = 60


@dataclass(frozen=True)
class Strike:
    """SIGKILL, or SIGSTOP for `stopped_s`. `after_s`: since the first moment; None: when `done` of the job is. `again`:
    one more of that role is killed at once, the one that takes its place if there is no other."""

    role: str
    choice: int
    stopped_s: float
    after_s: float | None
    done: float
    again: bool

    def __str__(self) -> str:
        when = f"at {self.done:.0%}" if self.after_s is None else f"after {self.after_s:.1f} s"
        twice = ", and of one more" if self.again else ""
        how = f"SIGSTOP for {self.stopped_s:.1f} s" if self.stopped_s else "kill -9"
        return f"{when}: {how} of {'an' if self.role == AGENT else 'a'} {self.role}{twice}"


@dataclass(frozen=True)
class LaunchSchedule:
    seed: int
    command: str
    plan: Plan
    strikes: tuple[Strike, ...]

    def __str__(self) -> str:
        logs = ", logs" if self.plan.wal else ""
        how = f"sync, {self.plan.logical_ranks} ranks" if self.plan.sync else "async"
        first = f"seed {self.seed}: shardyard {self.command}: {how}{logs}, {self.plan.servers} servers, 2 workers"
        return "\n  ".join([first, *map(str, self.strikes)])


def draw_launch(seed: int) -> LaunchSchedule:
    chance = random.Random(f"{seed} launch")
    plan = Plan(
        sync=bool(seed // 2 % 2),
        wal=chance.random() < 0.25,
        servers=chance.choice((2, 2, 3)),
        workers=2,
        partitions=8,
        logical_ranks=2,
        batches_per_data_shard=chance.choice((2, 3, 7)),
        every_steps=chance.choice((10, 1_000)),
        same_host=chance.random() < 0.5,
        window=0,
        overlap=False,
        jumping=(),
    )
    command = ("run", "up")[seed % 2]
    strikes = []
    for _ in range(chance.choice((2, 3, 3))):
        role = chance.choice(ROLES[command])
        stopped_s = chance.choice((0.0, 0.0, 0.0, chance.uniform(0.3, 1.0), LEASE_S * chance.uniform(1.3, 2.5)))
        # the supervisor starts the yard: if it dies before that is up, the start has failed
        starts = chance.random() < 0.45 and role != SUPERVISOR
        strikes.append(
            Strike(
                role,
                chance.randrange(1_000),
                stopped_s,
                chance.uniform(0.0, START_S) if starts else None,
                chance.uniform(0.0, 1.0),
                again=not stopped_s and chance.random() < 0.2,
            )
        )
    return LaunchSchedule(seed, command, plan, tuple(strikes))


@dataclass(frozen=True)
class LaunchOutcome:
    """`codes`: of the command, and of `down` after `up`. `left`: processes that were left. `struck`: what took place.
    `output`: what the commands and, after `up`, the yard have printed."""

    codes: tuple[int, ...]
    results: list[dict[str, object]]
    computed: Counter[int]
    checkpoints: str
    struck: list[str]
    left: list[str]
    output: str
    seconds: float


def play_launch(
    schedule: LaunchSchedule, folder: Path, *, tell: Callable[[str], None] = lambda _: None
) -> LaunchOutcome:
    """Plays it to the end of the command. Raises AssertionError if that does not come in time."""
    begun_s = time.monotonic()
    struck: list[str] = []

    def note(what: str) -> None:
        struck.append(f"{time.monotonic() - begun_s:5.1f} s  {what}")
        tell(struck[-1])

    with launch(schedule, folder) as field:
        due = list(schedule.strikes)
        seconds: list[Strike] = []
        ends: list[tuple[float, psutil.Process]] = []
        expired: dict[Strike, float] = {}
        while field.code is None:
            now_s = time.monotonic()
            for at_s, stopped in [each for each in ends if each[0] <= now_s]:
                ends.remove((at_s, stopped))
                with suppress(psutil.NoSuchProcess):
                    stopped.resume()
            for strike in [each for each in due if field.is_due(each, now_s - begun_s)] + seconds:
                victim = field.victim(strike)
                if victim is None:
                    if now_s > expired.setdefault(strike, now_s + STRIKE_S):
                        (seconds if strike in seconds else due).remove(strike)
                    continue
                with suppress(psutil.NoSuchProcess):
                    victim.send_signal(signal.SIGSTOP if strike.stopped_s else signal.SIGKILL)
                    note(f"{strike}: pid {victim.pid}, {field.done:.0%} of the work")
                if strike.stopped_s:
                    ends.append((now_s + strike.stopped_s, victim))
                field.struck.add(victim.pid)
                if strike in seconds:
                    seconds.remove(strike)
                else:
                    due.remove(strike)
                    seconds += [strike] if strike.again else []
            assert now_s - begun_s < PLAY_S, f"the command does not end\n{field.told()}"
            time.sleep(LOOK_S)
        note(f"the command ends with {field.code}")
        for _, stopped in ends:
            with suppress(psutil.NoSuchProcess):
                stopped.resume()
        codes = (field.code, *field.down())
        results = [json.loads(path.read_text()) for path in sorted(field.out.glob("*.json"))]
        computed = Counter(sample for _, samples in field.computed() for sample in samples)
        left = field.left()
        return LaunchOutcome(
            codes, results, computed, str(field.checkpoints), struck, left, field.told(), time.monotonic() - begun_s
        )


class Launch:
    """A command under fire, and all that it has started."""

    def __init__(self, schedule: LaunchSchedule, folder: Path) -> None:
        plan, self._command = schedule.plan, schedule.command
        self._folder, self.out, self.checkpoints = folder, folder / "out", folder / "checkpoints"
        self.out.mkdir(parents=True)
        self.struck: set[int] = set()
        settings = {
            "membership.heartbeat_ms": 250,
            "membership.lease_ms": round(LEASE_S * 1_000),
            "worker.same_host": "auto" if plan.same_host else "never",
            "yard.servers": plan.servers,
            "yard.workers": plan.workers,
            "yard.state": folder / "state",
            "yard.coordinator_port": 0,
            "job.checkpoint.url": self.checkpoints,
            **job_settings(plan),
        }
        (folder / "temporary").mkdir()
        self._environment = {
            **KEPT_ENVIRONMENT,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder / "temporary"),
            MARK: str(folder),
            "SHARDYARD_JOB": JOB,
            **as_environment(settings),
        }
        script = [*script_arguments(plan, self.out), "--pause-ms", str(PAUSE_MS)]
        self._output = (folder / "command.log").open("wb")
        self._process = self._start(self._command, *script)

    @property
    def code(self) -> int | None:
        return self._process.poll()

    @property
    def done(self) -> float:
        return len(self.computed()) / BATCHES

    def is_due(self, strike: Strike, passed_s: float) -> bool:
        return passed_s >= strike.after_s if strike.after_s is not None else self.done >= max(strike.done, 0.001)

    def victim(self, strike: Strike) -> psutil.Process | None:
        """A process of that role that was not struck before."""
        found = [each for each in self._processes() if each.pid not in self.struck and _role(each) == strike.role]
        found.sort(key=lambda each: each.pid)
        return found[strike.choice % len(found)] if found else None

    def computed(self) -> list[tuple[int, list[int]]]:
        try:
            lines = (self.out / "computed").read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def down(self) -> tuple[int, ...]:
        """Takes down what `up` has left running."""
        if self._command == "run":
            return ()
        return (self._start("down").wait(DOWN_S),)

    def left(self) -> list[str]:
        """The processes that were left, which are a moment about to end at most."""
        until = time.monotonic() + 5
        while (left := self._processes()) and time.monotonic() < until:
            time.sleep(LOOK_S)
        return [" ".join(_command_line(each)) for each in left]

    def told(self) -> str:
        """The end of all logs."""
        logs = [self._folder / "command.log", *sorted((self._folder / "state" / "logs").glob("*.log*"))]
        return "\n".join(f"---- {log.name}\n{tail(log)}" for log in logs)

    def end(self) -> None:
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(30)
        self._output.close()

    def _start(self, command: str, *arguments: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "shardyard_launcher.cli", command, *arguments]
        return subprocess.Popen(
            line,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                ours = process.environ().get(MARK) == str(self._folder)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def _role(process: psutil.Process) -> str:
    line = _command_line(process)
    if "shardyard_worker.agent.fork_server" in line:
        return TRAINING  # or what they were forked from, and end with
    module = line.index("shardyard_launcher.cli") if "shardyard_launcher.cli" in line else len(line)
    return line[module + 1] if module + 1 < len(line) else ""


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


@contextmanager
def launch(schedule: LaunchSchedule, folder: Path) -> Iterator[Launch]:
    begun = Launch(schedule, folder)
    try:
        yield begun
    finally:
        begun.end()
