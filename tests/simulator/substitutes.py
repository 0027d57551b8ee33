"""What the shipped modules see instead of time, threading, concurrent.futures, queue, os, random and the like.

The shipped code waits in threads, with the standard library's primitives. A seam for each primitive would cost the hot
paths extra calls, so the simulator replaces the primitives in the modules' namespaces: any attribute of a module that
*is* the standard module (or class, or function) is replaced, in all modules of all packages. Code that is written later
is simulated too. `installed` puts everything back.

Invariants: the primitives mean what the standard ones mean. The world handles every wait. Must not know: networks,
disks.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import datetime
import os
import queue
import random
import secrets
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import greenlet

from .world import EPOCH_S, SECOND, Task, current, current_world

PACKAGES = ("shardyard", "shardyard_ps_server", "shardyard_worker", "shardyard_coordinator")


def _task() -> Task | None:
    found = greenlet.getcurrent()
    return found if isinstance(found, Task) else None


def _us(seconds: float | None) -> int | None:
    return None if seconds is None else max(0, int(seconds * SECOND))


class Lock:
    """threading.Lock; with `depth` also RLock. A task that is woken may find the lock taken again."""

    reentrant = False

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = _task()
        if task is None or task.world.over:
            return True
        world = task.world
        if self.reentrant and self._owner is task:
            self._depth += 1
            return True
        world.maybe_pause()
        until = None if timeout is None or timeout < 0 else world.now + int(timeout * SECOND)
        while self._owner is not None:
            if not blocking or (until is not None and world.now >= until):
                return False
            self._waiting.append(task)
            if not world.park(None if until is None else until - world.now):
                with contextlib.suppress(ValueError):
                    self._waiting.remove(task)
        self._owner, self._depth = task, 1
        return True

    def release(self) -> None:
        task = _task()
        if task is None or task.world.over:
            return
        if self._owner is None:
            raise RuntimeError("release of a lock that nobody has")
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            if self._waiting:
                task.world.wake(self._waiting.popleft())

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    reentrant = True


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: deque[Task] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        task = current()
        assert self._lock._owner is task, "waits without the lock"
        self._waiting.append(task)
        depth, self._lock._depth = self._lock._depth, 1
        self._lock.release()
        woken = task.world.park(_us(timeout))
        if not woken:
            with contextlib.suppress(ValueError):
                self._waiting.remove(task)
        self._lock.acquire()
        self._lock._depth = depth
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        world = current_world()
        until = None if timeout is None else world.now + int(timeout * SECOND)
        while not (found := predicate()):
            left = None if until is None else (until - world.now) / SECOND
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        while self._waiting and n > 0:
            waiter = self._waiting.popleft()
            waiter.world.wake(waiter)
            n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.world.wake(task)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            task = current()
            self._waiting.append(task)
            if not task.world.park(_us(timeout)):
                with contextlib.suppress(ValueError):
                    self._waiting.remove(task)
        return self._set


class Pipe:
    """A pipe between threads of one process."""

    def __init__(self) -> None:
        self._bytes = b""
        self.written = Event()

    def write(self, data: bytes) -> int:
        self._bytes += data
        self.written.set()
        return len(data)

    def read(self, most: int) -> bytes:
        found, self._bytes = self._bytes[:most], self._bytes[most:]
        if not self._bytes:
            self.written.clear()
        return found


def _select(
    pipes: list[Pipe], writable: list[Any], broken: list[Any], timeout: float | None = None
) -> tuple[list[Pipe], list[Any], list[Any]]:
    """select.select of one pipe that is read."""
    (pipe,) = pipes
    return (pipes if pipe.written.wait(timeout) else []), [], []


class Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str = "thread",
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, tuple(args), kwargs or {}
        self.name, self.daemon = name, daemon
        self._task: Task | None = None

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        self._task = current().process.spawn(self.run, self.name)
        self._task.thread = self

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.number

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None:
            _join(self._task, _us(timeout))


def _join(other: Task, timeout: int | None = None) -> None:
    task = current()
    if not other.ended:
        other.waiters.append(task)
        task.world.park(timeout)
        if task in other.waiters:
            other.waiters.remove(task)


class Future:
    """concurrent.futures.Future, as far as it is used."""

    def __init__(self) -> None:
        self._done = self._cancelled = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future], Any]] = []
        self._waiting: list[Task] = []

    def done(self) -> bool:
        return self._done

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> bool:
        if self._done:
            return False
        self._cancelled = True
        self._end(None, CancelledError())
        return True

    def set_result(self, result: Any) -> None:
        self._end(result, None)

    def set_exception(self, error: BaseException) -> None:
        self._end(None, error)

    def _end(self, result: Any, error: BaseException | None) -> None:
        self._done, self._result, self._error = True, result, error
        for task in self._waiting:
            task.world.wake(task)
        for callback in self._callbacks:
            callback(self)

    def _wait(self, timeout: float | None) -> None:
        task = current()
        until = None if timeout is None else task.world.now + int(timeout * SECOND)
        while not self._done:
            if until is not None and task.world.now >= until:
                raise concurrent.futures.TimeoutError
            self._waiting.append(task)
            task.world.park(None if until is None else until - task.world.now)
            if task in self._waiting:
                self._waiting.remove(task)

    def result(self, timeout: float | None = None) -> Any:
        self._wait(timeout)
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return self._error

    def add_done_callback(self, callback: Callable[[Future], Any]) -> None:
        if self._done:
            callback(self)
        else:
            self._callbacks.append(callback)


def wait(futures: Iterable[Future], timeout: float | None = None) -> None:
    """concurrent.futures.wait for all of them, without its answer, which is not used."""
    for future in futures:
        future._wait(timeout)


class ThreadPoolExecutor:
    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "pool") -> None:
        self._most = max_workers or 4
        self._name = thread_name_prefix
        self._works: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._tasks: list[Task] = []
        self._idle: list[Task] = []
        self._shut = False

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        if self._shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future()
        self._works.append((future, lambda: work(*args, **kwargs)))
        if self._idle:
            task = self._idle.pop()
            task.world.wake(task)
        elif len(self._tasks) < self._most:
            self._tasks.append(current().process.spawn(self._run, f"{self._name}-{len(self._tasks)}"))
        return future

    def _run(self) -> None:
        while True:
            while self._works:
                future, work = self._works.popleft()
                if future.cancelled():
                    continue
                try:
                    result = work()
                except greenlet.GreenletExit:
                    raise
                except BaseException as error:  # noqa: BLE001 (told to who waits, or to the judge)
                    future.set_exception(error)
                else:
                    future.set_result(result)
                del future, work
            if self._shut:
                return
            task = current()
            self._idle.append(task)
            task.world.park()
            if task in self._idle:
                self._idle.remove(task)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._shut = True
        if cancel_futures:
            while self._works:
                self._works.popleft()[0].cancel()
        for task in self._idle:
            task.world.wake(task)
        if wait:
            for task in list(self._tasks):
                _join(task)

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class SimpleQueue:
    """queue.SimpleQueue, and queue.Queue where it is bounded."""

    def __init__(self, maxsize: int = 0) -> None:
        self._items: deque[Any] = deque()
        self._most = maxsize
        self._changed = Condition()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        with self._changed:
            while self._most and len(self._items) >= self._most:
                if not block or not self._changed.wait(timeout):
                    raise queue.Full
            self._items.append(item)
            self._changed.notify_all()

    def put_nowait(self, item: Any) -> None:
        self.put(item, block=False)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._changed:
            while not self._items:
                if not block or not self._changed.wait(timeout):
                    raise queue.Empty
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class _Instead:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Datetime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(_wall_s(), tz)


def _now() -> int:
    task = _task()
    return 0 if task is None else task.world.now


def _wall_s() -> float:
    return EPOCH_S + _now() / SECOND


def _sleep(seconds: float) -> None:
    current_world().pause(int(seconds * SECOND))


def _random(*_: object) -> random.Random:
    return random.Random(current_world().rng.getrandbits(64))


def _current_thread() -> Any:
    task = current()
    return task.thread if task.thread is not None else task


def _pid() -> int:
    task = _task()
    return os.getpid() if task is None else task.process.pid


def substitutes(os_: Any) -> dict[int, Any]:
    """The substitutes, by the identity of what they replace. `os_`: the os module that the code sees."""
    found = [
        (
            threading,
            _Instead(
                threading,
                Lock=Lock,
                RLock=RLock,
                Condition=Condition,
                Event=Event,
                Thread=Thread,
                current_thread=_current_thread,
                get_ident=lambda: current().number,
            ),
        ),
        (
            time,
            _Instead(
                time,
                monotonic=lambda: _now() / SECOND,
                monotonic_ns=lambda: _now() * 1_000,
                perf_counter=lambda: _now() / SECOND,
                time=_wall_s,
                time_ns=lambda: int(_wall_s() * 1e9),
                sleep=_sleep,
            ),
        ),
        (time.time, _wall_s),
        (select, _Instead(select, select=_select)),
        (queue, _Instead(queue, SimpleQueue=SimpleQueue, Queue=SimpleQueue)),
        (random, _Instead(random, Random=_random)),
        (
            secrets,
            _Instead(
                secrets,
                token_hex=lambda n: f"{current_world().rng.getrandbits(8 * n):0{2 * n}x}",
                token_bytes=lambda n: current_world().rng.randbytes(n),
                randbits=lambda n: current_world().rng.getrandbits(n),
            ),
        ),
        (os, os_),
        (atexit, _Instead(atexit, register=lambda f, *_: f, unregister=lambda _: None)),
        (datetime, _Instead(datetime, datetime=_Datetime)),
        (datetime.datetime, _Datetime),
        (concurrent.futures, _Instead(concurrent.futures, ThreadPoolExecutor=ThreadPoolExecutor, wait=wait)),
        (concurrent.futures.ThreadPoolExecutor, ThreadPoolExecutor),
        (concurrent.futures.Future, Future),
        (concurrent.futures.wait, wait),
        (threading.Lock, Lock),
        (threading.Condition, Condition),
        (threading.Event, Event),
        (threading.Thread, Thread),
    ]
    return {id(real): instead for real, instead in found}


@contextlib.contextmanager
def installed(os_: Any, more: dict[int, Any]) -> Iterator[None]:
    """Within the block, the modules of the code have the substitutes, and those of `more`."""
    table = substitutes(os_) | more
    replaced: list[tuple[Any, str, Any]] = []
    modules = [m for n, m in sorted(sys.modules.items()) if n.partition(".")[0] in PACKAGES and ".wire.v1" not in n]
    try:
        for module in modules:
            for name, value in list(vars(module).items()):
                instead = table.get(id(value))
                if instead is not None:
                    replaced.append((module, name, value))
                    setattr(module, name, instead)
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)
