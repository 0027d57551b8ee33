"""The measured processes, from the benchmark's side: it starts, asks, pauses and ends them.

Owns: their start, the deadline of each answer, their end. Invariants: only processes that were started here get a
signal, by the handle that started them; every wait has a deadline; an error contains what the process printed before
it failed. Must not know: what the programs do.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from harness.processes.answers import PARENT

BENCHMARKS = Path(__file__).resolve().parent.parent.parent
START_S_MAX = 90.0
ANSWER_S_MAX = 120.0
END_S_MAX = 10.0
LOG_LINES = 30


class ProgramFailed(Exception):
    """A measured process ended, or did not answer in time."""


class Program:
    """`python -m sides.ROOM.NAME ARGUMENTS`, behind `prefix`, which must replace itself by it. It must have a
    `Conversation`."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = " ".join((module, *arguments))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in stop()
        kept = {name: text for name, text in os.environ.items() if not name.startswith("SHARDYARD")}
        path = os.pathsep.join(filter(None, (str(BENCHMARKS), kept.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", f"sides.{module}", *arguments],
            env={**kept, "PYTHONPATH": path, PARENT: str(os.getpid()), **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
        )
        self._received = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_ready(self, timeout_s: float = START_S_MAX) -> None:
        self.receive(timeout_s)

    def ask(self, do: str, *, timeout_s: float = ANSWER_S_MAX, **arguments: Any) -> dict[str, Any]:
        self.send(do, **arguments)
        return self.receive(timeout_s)

    def send(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        except BrokenPipeError:
            raise self._failed("has ended") from None

    def receive(self, timeout_s: float = ANSWER_S_MAX) -> dict[str, Any]:
        """The next answer. Raises ProgramFailed."""
        assert self._process.stdout is not None
        until = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise self._failed(f"did not answer in {timeout_s:.0f} s")
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    raise self._failed("has ended")
                self._received += part
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Asks the process to end; `stop` waits for the end."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()

    def stop(self) -> None:
        """Ends the process, with SIGKILL if it does not end when asked."""
        self.end()
        self.resume()
        try:
            self._process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def _failed(self, what: str) -> ProgramFailed:
        self._log.seek(0)
        said = self._log.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]
        return ProgramFailed("\n  ".join([f"{self.name} (pid {self.pid}) {what}; it said:", *said]))


class Programs:
    """Processes that work together as one side. A context manager, which ends them all."""

    def __init__(self) -> None:
        self._all: list[Program] = []
        self._paused = False

    def start(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> Program:
        program = Program(module, *arguments, environment=environment, prefix=prefix)
        self._all.append(program)
        return program

    def await_ready(self) -> None:
        for program in self._all:
            program.await_ready()

    @property
    def pids(self) -> list[int]:
        return [program.pid for program in self._all]

    def pause(self) -> None:
        for program in self._all:
            program.pause()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The processes run inside the block, and use no processor outside of it."""
        for program in self._all:
            program.resume()
        try:
            yield
        finally:
            self.pause()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        for program in self._all:
            program.resume()
            program.end()
        for program in self._all:
            program.stop()


def ask_all(
    programs: Sequence[Program], do: str, *, timeout_s: float = ANSWER_S_MAX, **arguments: Any
) -> list[dict[str, Any]]:
    """Asks all at the same time."""
    for program in programs:
        program.send(do, **arguments)
    return [program.receive(timeout_s) for program in programs]
