"""Shows a running script: its output, and a line of progress.

Owns: the choice of the job to show, the text of a progress line, two displays (a terminal, anything else). Invariants:
each output line is shown whole and in order; without a terminal, on the stream to which it was printed. A display
repeats no line of progress. On a terminal that line is one row, and its last state stays, in full. Must not know: where
the status comes from, what a launch is.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Final, Self, TextIO

import psutil
from rich.console import Console
from rich.live import Live
from rich.text import Text

from shardyard.domain.ids import Incarnation
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.terminal.data_progress import data_progress

METRICS_SHOWN_MAX = 6
_LASTING: Final = re.compile(r", for \d+\.\d s(?:; |$)")
"""How a wait of a job or member says how long it has lasted, at its end."""


class JobChoice:
    """Which of a yard's jobs is the script's: the one that its processes have joined, even after they have left."""

    def __init__(self) -> None:
        self._job = 0

    def choose(self, status: wire.StatusReply, pids: frozenset[int]) -> wire.JobStatus | None:
        joined = [m.job for m in status.members if m.role == wire.ROLE_WORKER and m.pid in pids and m.job]
        self._job = max(joined, default=self._job)
        return next((job for job in status.jobs if job.job == self._job), None)


def progress_line(status: wire.StatusReply, job: wire.JobStatus | None) -> str:
    """For example `step 120 | epoch 3 of 10, 27%, 40 s left | 15,360 samples | 812 samples/s | loss 0.1234 | 2 workers,
    2 servers`. Before the first step it says what is done, as `server 1.2 waits for loops to be compiled`."""
    servers = sum(member.role == wire.ROLE_SERVER for member in status.members)
    members = f"{_count(servers, 'server')}, {_count(sum(m.role == wire.ROLE_AGENT for m in status.members), 'agent')}"
    if job is None:
        return f"waiting for the script to join a job | {members}"
    workers = sum(member.role == wire.ROLE_WORKER and member.job == job.job for member in status.members)
    has_begun = bool(job.step or job.samples) or job.state not in (wire.JOB_STATE_STARTING, wire.JOB_STATE_RUNNING)
    if has_begun:
        progress = data_progress(job)
        # servers report samples before workers report their steps
        parts = [f"step {job.step:,}"] if job.step or not job.samples else []
        parts += [*([] if progress is None else [str(progress)]), f"{job.samples:,} samples"]
    else:
        parts = [_before_first_step(status, job)]
    if job.HasField("samples_per_s"):
        parts.append(f"{job.samples_per_s:,.0f} samples/s")
    parts += [f"{metric.name} {metric.value:.4g}" for metric in job.metrics[:METRICS_SHOWN_MAX]]
    if job.state in (wire.JOB_STATE_STARTING, wire.JOB_STATE_RUNNING):
        parts.append(f"{_count(workers, 'worker')}, {_count(servers, 'server')}")
    if job.state == wire.JOB_STATE_FINISHING:
        parts.append("writes its last checkpoint")
    elif job.state == wire.JOB_STATE_FINISHED:
        parts.append("finished")
    elif job.state == wire.JOB_STATE_FAILED:
        parts.append(f"failed: {job.failure.what}")
    return f"job {job.name}: " + " | ".join(parts)


def _before_first_step(status: wire.StatusReply, job: wire.JobStatus) -> str:
    """What is done until then. A wait without its time, so that the line changes only when another wait begins."""
    if job.waits:
        return f"waits for {_untimed(job.waits[0])}"
    # servers first: a worker that waits for them says less
    for role, name in ((wire.ROLE_SERVER, "server"), (wire.ROLE_WORKER, "worker")):
        for member in status.members:
            if member.role == role and member.waiting_for and member.job in (0, job.job):
                return f"{name} {Incarnation(member.incarnation)} waits for {_untimed(member.waiting_for)}"
    return "starting" if job.state == wire.JOB_STATE_STARTING else "computes its first step"


def _untimed(wait: str) -> str:
    """The first wait of a text, without how long it has lasted."""
    return _LASTING.split(wait, maxsplit=1)[0]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _prefix(index: int, workers: int) -> str:
    return f"[{index}] " if workers > 1 else ""


class PlainDisplay:
    """Prints lines, for a file or a pipe."""

    def __init__(self, workers: Callable[[], int], progress_to: TextIO | None = None) -> None:
        self._workers = workers
        self._progress_to = sys.stdout if progress_to is None else progress_to
        self._choice = JobChoice()
        self._shown = ""

    def output(self, index: int, standard_error: bool, line: str) -> None:
        _write(sys.stderr if standard_error else sys.stdout, _prefix(index, self._workers()) + line)

    def note(self, text: str) -> None:
        _write(self._progress_to, text)

    def progress(self, status: wire.StatusReply, pids: frozenset[int], *, last: bool = False) -> None:
        job = self._choice.choose(status, pids)
        line = progress_line(status, job)
        if line != self._shown and not (last and job is None):
            self._shown = line
            _write(self._progress_to, line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        pass


class LiveDisplay:
    """Prints the script's output, and below it a line of progress that is redrawn."""

    def __init__(self, workers: Callable[[], int], console: Console) -> None:
        self._workers = workers
        self._choice = JobChoice()
        self._console = console
        self._shown = "starting the script"
        self._last = ""
        # redrawn when it changes; the final one is printed, so that it may be longer than a row
        self._live = Live(_row(self._shown), console=console, auto_refresh=False, transient=True, redirect_stdout=False)

    def output(self, index: int, standard_error: bool, line: str) -> None:
        del standard_error
        text = Text(_prefix(index, self._workers()), style="dim")
        text.append_text(Text.from_ansi(line) if "\x1b" in line else Text(line))
        self._console.print(text, soft_wrap=True, highlight=False)

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"), soft_wrap=True)

    def progress(self, status: wire.StatusReply, pids: frozenset[int], *, last: bool = False) -> None:
        job = self._choice.choose(status, pids)
        line = progress_line(status, job)
        if job is not None:
            self._last = line
        if line != self._shown and not last:
            self._shown = line
            self._live.update(_row(line), refresh=True)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *ended: object) -> None:
        self._live.stop()
        if self._last:
            self._console.print(Text(self._last, style="bold"), soft_wrap=True, highlight=False)


def _row(line: str) -> Text:
    return Text(" ".join(line.split()), style="bold", no_wrap=True, overflow="ellipsis")


class NotesOnly:
    """Prints notes, on standard error, and nothing else."""

    def output(self, index: int, standard_error: bool, line: str) -> None:
        pass

    def note(self, text: str) -> None:
        _write(sys.stderr, text)

    def progress(self, status: wire.StatusReply, pids: frozenset[int], *, last: bool = False) -> None:
        pass


class FirstStep:
    """A display that prints once how long the first step of the script's job took to come: since this command began,
    and since `began` (seconds since 1970), if an installation comes before this command."""

    def __init__(self, display: PlainDisplay | LiveDisplay, began: int | None = None) -> None:
        self._display = display
        self._choice = JobChoice()
        self._began = began
        self._said = False

    def output(self, index: int, standard_error: bool, line: str) -> None:
        self._display.output(index, standard_error, line)

    def note(self, text: str) -> None:
        self._display.note(text)

    def progress(self, status: wire.StatusReply, pids: frozenset[int], *, last: bool = False) -> None:
        job = self._choice.choose(status, pids)
        if not (self._said or last) and job is not None and (job.step or job.samples):
            self._said = True
            now_s = time.time()
            text = f"first training step after {now_s - psutil.Process().create_time():.1f} s"
            if self._began is not None:
                text += f"; with the installation, after {now_s - self._began:.0f} s"
            self._display.note(text)
        self._display.progress(status, pids, last=last)


def display_for(workers: Callable[[], int], progress_to: TextIO) -> PlainDisplay | LiveDisplay:
    """A live display if both streams are terminals, else a plain one. `workers`: returns the number of processes, once
    it is known."""
    if sys.stdout.isatty() and progress_to.isatty():
        return LiveDisplay(workers, Console(file=progress_to))
    return PlainDisplay(workers, progress_to)


def _write(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")
    stream.flush()
