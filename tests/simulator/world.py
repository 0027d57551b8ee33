"""Virtual time, and threads of which exactly one runs at a time.

Each thread of the shipped code is a greenlet (`Task`) of a simulated process. It runs until it waits: for a lock, an
answer, a moment. Then the world continues with whatever is due next in virtual time. Nothing else decides which task
runs, so a seed has one trace. Owns: the clock, the queue of what is due, the seed's random numbers, processes and their
ends.

Invariants: a process that was killed never runs again, not even its `finally` (its tasks are disposed of after the run,
and can reach nothing then). A frozen process runs again when it is thawed, with all that came meanwhile. Must not know:
what the tasks do.
"""

from __future__ import annotations

import heapq
import random
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import greenlet
import numpy as np

MS = 1_000
SECOND = 1_000_000
"""Times are whole microseconds."""
EPOCH_S = 1_700_000_000
SWITCHES_MAX = 60_000
"""Switches between tasks in one run. A few thousand are usual."""


class Stuck(AssertionError):
    """Nothing is due any more, or far too much happens."""


class Task(greenlet.greenlet):
    """A simulated thread. `woken` counts how often it was made to run. Wake-ups that were due before are ignored."""

    def __init__(self, world: World, process: Process, work: Callable[[], Any], name: str) -> None:
        super().__init__(self._main, world.hub)
        self.world = world
        self.process = process
        self.name = name
        self.number = next(world.numbers)
        self.woken = 0
        self.thread: Any = None
        self.ended = False
        self.waiters: list[Task] = []
        self._work = work

    def _main(self, _: object) -> None:
        world = self.world
        try:
            self._work()
        except greenlet.GreenletExit:
            pass
        except BaseException as error:  # noqa: BLE001 (told to who waits, or to the judge)
            if not world.over:
                self.process.broken(self, error)
        finally:
            self.ended = True
            self.process.tasks.pop(self, None)
            for waiter in self.waiters:
                world.wake(waiter)

    def where(self) -> str:
        """The innermost lines of the code in which it waits, to explain why nothing happens."""
        if self.gr_frame is None:
            return "not begun"
        frames = [f for f in traceback.extract_stack(self.gr_frame) if "/simulator/" not in f.filename]
        return " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}" for f in reversed(frames[-7:]))


class Process:
    """A simulated process: tasks that live and die together. `host`: the name of its place, which a process that is
    started again takes over."""

    def __init__(self, world: World, host: str, pid: int) -> None:
        self.world = world
        self.host = host
        self.pid = pid
        self.alive = True
        self.frozen = False
        self.tasks: dict[Task, None] = {}
        self.held: list[tuple[Task | None, int, Any]] = []
        self.at_end: dict[Callable[[], None], None] = {}
        """Called when the process has ended in any way. They close its sockets and descriptors."""
        self.descriptors: set[int] = set()
        self.exit: str | None = None

    def __repr__(self) -> str:
        return f"{self.host}({self.pid})"

    def spawn(self, work: Callable[[], Any], name: str) -> Task:
        task = Task(self.world, self, work, name)
        self.tasks[task] = None
        self.world.wake(task)
        return task

    def broken(self, task: Task, error: BaseException) -> None:
        """A task ended by an error that was not caught."""
        told = "".join(traceback.format_exception(error)).strip()
        self.world.violations.append(f"{self} task {task.name}: {told}")

    def kill(self, how: str) -> None:
        """Ends the process as kill -9 does."""
        if not self.alive:
            return
        self.alive = False
        self.exit = how
        self.held.clear()
        self.world.graves += self.tasks
        self.tasks.clear()
        for each in list(self.at_end):
            each()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        held, self.held = self.held, []
        for task, token, value in held:
            self.world.push(0, self, task, token, value)


class World:
    """`preempt`: how often a thread that takes a lock is held up first."""

    def __init__(self, seed: int, *, preempt: float = 0.05, trace: Callable[[str], None] | None = None) -> None:
        self.rng = random.Random(f"world {seed}")
        self.now = 0
        self.hub = greenlet.getcurrent()
        self.over = False
        self.calm = False
        """Whether no more faults happen."""
        self.preempt = preempt
        self.digest = 0
        self.switches = 0
        self.violations: list[str] = []
        self.graves: list[Task] = []
        self.processes: list[Process] = []
        self.numbers = iter(range(1, 1 << 60))
        self.trace = trace
        self.unnoted = b""
        """Text that may differ between two runs of a seed: the name of a folder."""
        self._pids = iter(range(100, 1 << 30))
        self._due: list[tuple[int, int, Process | None, Task | None, int, Any]] = []
        self._order = iter(range(1 << 60))

    def process(self, host: str) -> Process:
        made = Process(self, host, next(self._pids))
        self.processes.append(made)
        return made

    # ---- what is due

    def push(self, after: int, process: Process | None, task: Task | None, token: int, value: Any) -> None:
        heapq.heappush(self._due, (self.now + after, next(self._order), process, task, token, value))

    def wake(self, task: Task, after: int = 0) -> None:
        """Makes the task run at that time, unless something else makes it run before."""
        self.push(after, task.process, task, task.woken, True)

    def call(self, after: int, function: Callable[[], None], process: Process | None = None) -> None:
        """Calls a function later, which must not wait. `process`: whose call it is; it may be frozen or dead then."""
        self.push(after, process, None, 0, function)

    def run(self, until: Callable[[], bool], *, limit: int) -> None:
        """Runs until `until` returns True. It is called whenever something has happened. Raises Stuck at the time
        `limit`, or if far too much happens."""
        due = self._due
        while not until():
            if not due:
                raise Stuck("nothing is due any more")
            at, _, process, task, token, value = heapq.heappop(due)
            if at > limit:
                raise Stuck(f"not done after {limit / SECOND:.0f} s")
            if process is not None:
                if not process.alive:
                    continue
                if process.frozen:
                    process.held.append((task, token, value))
                    continue
            if task is None:
                self.now = max(self.now, at)
                value()
            elif token == task.woken and not task.ended:
                self.now = max(self.now, at)
                task.woken += 1
                self.switches += 1
                if self.switches > SWITCHES_MAX:
                    raise Stuck(f"not done after {self.now / SECOND:.0f} s and {self.switches} switches")
                self.digest = zlib.crc32(b"%d %d" % (self.now, task.number), self.digest)
                task.switch(value)

    def note(self, data: bytes) -> None:
        """Adds data to the digest. The order of its bytes does not count, because protobuf's maps have no order."""
        if self.unnoted:
            data = data.replace(self.unnoted, b"")
        self.digest = zlib.crc32(np.sort(np.frombuffer(data, np.uint8)).data, self.digest)

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace(f"{self.now / SECOND:10.6f} {text}")

    # ---- for tasks

    def park(self, timeout: int | None = None) -> bool:
        """Waits until it is woken. Returns False after `timeout`."""
        task = greenlet.getcurrent()
        assert isinstance(task, Task), "only a task can wait"
        if self.over:
            raise greenlet.GreenletExit
        if timeout is not None and task.process.alive:
            self.push(max(0, timeout), task.process, task, task.woken, False)
        return bool(self.hub.switch())

    def pause(self, duration: int) -> None:
        """Lets time pass."""
        self.park(duration)

    def maybe_pause(self) -> None:
        """Called where a thread may be interrupted."""
        if self.preempt and not self.over and self.rng.random() < self.preempt:
            task = greenlet.getcurrent()
            if isinstance(task, Task):
                # mostly for a moment, at times for as long as a busy machine may
                self.pause(
                    int(self.rng.expovariate(1 / 300)) if self.rng.random() < 0.95 else self.rng.randrange(40_000)
                )

    def close(self) -> None:
        """Disposes of all tasks."""
        self.over = True
        self._due.clear()
        for process in self.processes:
            self.graves += process.tasks
            process.tasks = {}
        for task in self.graves:
            if task:
                task.throw(greenlet.GreenletExit)
        self.graves.clear()

    def standing(self) -> str:
        """Where each task waits, as text."""
        lines = []
        for process in self.processes:
            if process.alive:
                lines += [
                    f"{process}{' frozen' if process.frozen else ''} {t.name}: {t.where()}" for t in process.tasks
                ]
        return "\n".join(lines)


def current() -> Task:
    """The task that runs."""
    task = greenlet.getcurrent()
    assert isinstance(task, Task), "not in a simulated process"
    return task


def current_world() -> World:
    return current().world
