"""What a person sees of a script that runs: its progress, its output, its first error."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.scripts.progress import FirstStep, JobChoice, LiveDisplay, PlainDisplay, progress_line
from shardyard_worker.agent.error_report import ShownOutput
from tests.support.launcher_replies import yard_status

LINE = "job mine: step 1,200 | epoch 2 of 2, 100% | 15,360 samples | 812 samples/s | loss 0.1235 | 1 worker, 1 server"


def test_progress_is_that_of_the_job_which_the_script_joined() -> None:
    status, choice = yard_status(), JobChoice()
    assert choice.choose(status, frozenset({99})) is None
    job = choice.choose(status, frozenset({4}))
    assert job is not None
    line = progress_line(status, job)
    assert line == LINE
    del status.members[3]
    assert choice.choose(status, frozenset({4})) == job


def test_progress_before_the_script_has_joined_says_so() -> None:
    assert progress_line(yard_status(), None) == "waiting for the script to join a job | 1 server, 1 agent"


@pytest.mark.parametrize(
    ("waits", "server", "worker", "said"),
    [
        ([], "", "", "computes its first step"),
        ([], "", "first values, for 3.1 s", "worker 4 waits for first values"),
        ([], "loops of job 9 to be compiled: adam, for 12.0 s; x, for 3.0 s", "first values, for 3.1 s", "SERVER"),
        (["a worker for logical rank 2; the living take it after 3 s, for 1.2 s"], "x, for 9.0 s", "", "JOB"),
    ],
    ids=["nothing", "worker", "server", "job"],
)
def test_before_the_first_step_the_line_says_what_is_done(
    waits: list[str], server: str, worker: str, said: str
) -> None:
    status = yard_status()
    job = status.jobs[1]
    job.step = job.samples = 0
    job.ClearField("samples_per_s")
    del job.metrics[:]
    job.waits.extend(waits)
    status.members[0].waiting_for, status.members[3].waiting_for = server, worker
    said = {
        "SERVER": "server 1 waits for loops of job 9 to be compiled: adam",
        "JOB": "waits for a worker for logical rank 2; the living take it after 3 s",
    }.get(said, said)
    assert progress_line(status, job) == f"job mine: {said} | 1 worker, 1 server"


def test_a_job_that_is_being_set_up_is_starting() -> None:
    status = yard_status(wire.JOB_STATE_STARTING)
    job = status.jobs[1]
    job.step = job.samples = 0
    job.ClearField("samples_per_s")
    del job.metrics[:], status.members[3]
    assert progress_line(status, job) == "job mine: starting | 0 workers, 1 server"


def test_samples_without_a_reported_step_are_shown_without_a_step() -> None:
    status = yard_status()
    job = status.jobs[1]
    job.step = 0
    assert progress_line(status, job).startswith("job mine: epoch 2 of 2, 100% | 15,360 samples | ")


def test_a_rate_that_nobody_knows_yet_is_not_shown() -> None:
    status = yard_status()
    job = status.jobs[1]
    job.ClearField("samples_per_s")
    job.feeds[0].free = job.feeds[0].leased = 3
    line = progress_line(status, job)
    assert line == "job mine: step 1,200 | epoch 2 of 2, 66% | 15,360 samples | loss 0.1235 | 1 worker, 1 server"


def test_progress_of_an_ended_job_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(lambda: 1)
    display.progress(yard_status(), frozenset({4}))
    display.progress(yard_status(), frozenset({4}))
    display.progress(yard_status(wire.JOB_STATE_FINISHED), frozenset(), last=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("| finished")


def test_the_first_step_of_the_script_is_said_once_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    display = FirstStep(PlainDisplay(lambda: 1), began=int(time.time()) - 90)
    before = yard_status()
    before.jobs[1].step = before.jobs[1].samples = 0
    display.progress(before, frozenset({4}))
    assert "first training step" not in capsys.readouterr().out
    display.progress(yard_status(), frozenset({4}))
    said = capsys.readouterr().out.splitlines()[0]
    assert re.fullmatch(r"first training step after [\d.]+ s; with the installation, after 9\d s", said)
    display.progress(yard_status(), frozenset({4}))
    assert "first training step" not in capsys.readouterr().out


def test_output_names_its_process_where_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    PlainDisplay(lambda: 1).output(0, False, "alone")
    PlainDisplay(lambda: 2).output(1, True, "one of two")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("alone\n", "[1] one of two\n")


def test_terminal_shows_output_above_a_line_of_progress() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with LiveDisplay(lambda: 2, console) as display:
        display.output(1, False, "[bold]not markup[/bold] \x1b[31mred\x1b[0m")
        display.progress(yard_status(), frozenset({4}))
    shown = plain(stream)
    assert "[1] [bold]not markup[/bold] red\n" in shown
    assert shown.rstrip().endswith(LINE)


def test_progress_on_a_narrow_terminal_is_one_row_and_stays_once() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=40)
    whole = LINE
    with LiveDisplay(lambda: 1, console) as display:
        for _ in range(3):
            display.progress(yard_status(), frozenset({4}))
        display.output(0, False, "printed")
        display.progress(yard_status(), frozenset({4}), last=True)
        rows = re.split(r"[\r\n]+", plain(stream))
        assert max(map(len, rows)) <= 40
        assert sum(row.startswith("job mine") for row in rows) == 2  # when it came, and below the output
    assert plain(stream).count(LINE) == 1
    assert plain(stream).endswith(f"{whole}\n")


def plain(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "a.py", line 1, in <module>',
    "    f()",
    "ValueError: one",
    "two",
]


def test_traceback_that_was_shown_is_pointed_at() -> None:
    shown = ShownOutput()
    for line in ["before", *TRACEBACK, "after"]:
        shown.note(1, True, line)
    where = "  its traceback is above, in the lines that begin with [1]"
    assert shown.tell(1, "\n".join(TRACEBACK), several=True).splitlines() == ["  ValueError: one", "  two", where]
    assert shown.tell(1, "\n".join(TRACEBACK), several=False).endswith("\n  its traceback is above")


def test_traceback_that_was_not_shown_is_told_whole() -> None:
    shown = ShownOutput()
    for line in TRACEBACK:
        shown.note(0, True, line)
        shown.note(1, False, line)
        shown.note(2, True, line + " ")
    for index in (1, 2, 3):
        assert shown.tell(index, "\n".join(TRACEBACK), several=True) == "\n".join(TRACEBACK)
    assert shown.tell(0, "", several=True) == ""
