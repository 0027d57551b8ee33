"""The machine of a launch: restarts, stops, and which error is told."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from shardyard.domain.ids import Incarnation
from shardyard.runtime.restart_policy import BACKOFF_MS, LEFT_IN_ORDER
from shardyard.wire.v1 import agent_pb2 as wire
from shardyard_worker.agent.environment import LaunchOrder, environment_block, gpus_to_give
from shardyard_worker.agent.supervision import (
    STOP_GRACE_MS,
    Effect,
    RecordedError,
    SendSignal,
    Spawn,
    Supervision,
    describe_end,
)
from shardyard_worker.job.connect import _membership

TERM, KILL = signal.SIGTERM, signal.SIGKILL
WINDOW_MS = 60_000


def started(index: int, pid: int, restarts: int = 0) -> wire.LaunchEvent:
    return wire.LaunchEvent(started=wire.ProcessStarted(local_index=index, pid=pid, restarts=restarts))


def exited(
    index: int, pid: int, exit_code: int, *, restarts: bool = False, error: RecordedError | None = None
) -> wire.LaunchEvent:
    ending = describe_end(exit_code, error)
    return wire.LaunchEvent(
        exited=wire.ProcessExited(local_index=index, pid=pid, exit_code=exit_code, will_restart=restarts, ending=ending)
    )


def begun(workers: int = 2, restarts_max: int = 0) -> Supervision:
    core = Supervision(workers=workers, restarts_max=restarts_max, restarts_window_ms=WINDOW_MS)
    assert core.begin() == [Spawn(index, 0) for index in range(workers)]
    for index in range(workers):
        assert core.spawned(index, 100 + index) == [started(index, 100 + index)]
    return core


def end(
    core: Supervision,
    index: int,
    exit_code: int,
    now_ms: int,
    *,
    error: RecordedError | None = None,
    time_s: float = 50.0,
) -> list[Effect]:
    return core.exited(index, exit_code, error, time_s, now_ms)


def told(effects: list[Effect]) -> tuple[int, int, str]:
    last = effects[-1]
    assert isinstance(last, wire.LaunchEvent)
    assert last.HasField("ended")
    return last.ended.exit_code, last.ended.first_error_index, last.ended.first_error


def failure(text: str, time_s: float) -> RecordedError:
    return RecordedError(time_s, "ValueError", text, f"Traceback: {text}\n")


def test_launch_ends_well_when_all_processes_have() -> None:
    core = begun()
    assert end(core, 0, 0, 5) == [exited(0, 100, 0)]
    assert core.running == 1
    assert told(end(core, 1, 0, 6)) == (0, 0, "")
    assert core.ended == wire.LaunchEnded()
    assert core.next_due_ms() is None


def test_failed_process_stops_the_others() -> None:
    core = begun(3)
    end(core, 2, 0, 5)
    effects = end(core, 0, 3, 10)
    assert effects == [exited(0, 100, 3), SendSignal(1, TERM)]
    assert core.next_due_ms() == 10 + STOP_GRACE_MS
    assert core.time_passed(10 + STOP_GRACE_MS - 1) == []
    assert core.time_passed(10 + STOP_GRACE_MS) == [SendSignal(1, KILL)]
    assert core.time_passed(10 + 2 * STOP_GRACE_MS) == []
    last = told(end(core, 1, -9, 9_000))
    assert last[:2] == (3, 0)


@pytest.mark.parametrize("first", [0, 1])
def test_first_error_by_time_is_told_though_noticed_last(first: int) -> None:
    core = begun()
    end(core, 1 - first, 1, 5, error=failure("second", 20.0), time_s=21.0)
    last = told(end(core, first, 7, 6, error=failure("first", 19.0), time_s=30.0))
    assert last == (7, first, "Traceback: first")


@pytest.mark.parametrize("number", [TERM, KILL])
def test_process_that_raised_and_was_stopped_at_its_end_has_raised(number: signal.Signals) -> None:
    core = begun()
    end(core, 1, 1, 5, error=failure("second", 20.0), time_s=21.0)
    last = told(end(core, 0, -number, 6, error=failure("first", 19.0), time_s=30.0))
    assert last == (1, 0, "Traceback: first")


def test_signal_from_elsewhere_is_what_a_process_ended_with() -> None:
    core = begun(1)
    assert told(end(core, 0, -15, 6, error=failure("first", 19.0)))[0] == -15


def test_error_before_one_without_a_traceback_is_told() -> None:
    core = begun()
    end(core, 1, 1, 5, time_s=20.0)
    assert told(end(core, 0, 1, 6, error=failure("cause", 19.9), time_s=21.0))[1] == 0


def put_out(core: Supervision, index: int, now_ms: int) -> list[Effect]:
    error = RecordedError(40.0 + index, "WorkerQuarantined", "10 in a row", "Traceback: 10 in a row\n")
    return end(core, index, 1, now_ms, error=error)


def test_process_that_the_job_has_put_out_does_not_end_the_launch() -> None:
    core = begun(3)
    (effect,) = put_out(core, 1, 5)
    assert isinstance(effect, wire.LaunchEvent)
    assert effect.exited.ending == "ended with WorkerQuarantined"
    assert not effect.exited.will_restart
    end(core, 0, 0, 6)
    assert told(end(core, 2, 0, 7)) == (0, 0, "")


def test_launch_whose_processes_were_all_put_out_has_failed() -> None:
    core = begun()
    put_out(core, 1, 5)
    assert told(put_out(core, 0, 6)) == (1, 0, "Traceback: 10 in a row")


def test_failure_beside_one_that_was_put_out_is_the_one_that_is_told() -> None:
    core = begun()
    put_out(core, 1, 5)
    assert told(end(core, 0, 1, 6, error=failure("no", 60.0))) == (1, 0, "Traceback: no")


def test_process_that_is_stopped_is_not_the_one_that_failed() -> None:
    core = begun()
    end(core, 1, 1, 5, error=failure("mine", 20.0))
    # it went by its own SIGTERM handler, with an older clock
    last = told(end(core, 0, 1, 6, time_s=1.0))
    assert last[1] == 1


def test_end_of_output_stands_in_for_a_traceback() -> None:
    core = begun(1)
    for number in range(50):
        given = 0, number % 2 == 0, f"line {number}"
        output = wire.ProcessOutput(local_index=given[0], standard_error=given[1], line=given[2])
        assert core.printed(*given) == [wire.LaunchEvent(output=output)]
    text = told(end(core, 0, 4, 2))[2]
    assert "process 0 (pid 100) ended with exit code 4" in text
    assert "line 49" in text
    assert "line 30" in text
    assert "line 29\n" not in text


def test_process_killed_by_a_signal_starts_again_after_a_pause() -> None:
    core = begun(2, restarts_max=1)
    assert end(core, 1, -9, 1_000) == [exited(1, 101, -9, restarts=True)]
    assert core.running == 2
    due = core.next_due_ms()
    assert due == 1_000 + BACKOFF_MS
    assert core.time_passed(due - 1) == []
    assert core.time_passed(due) == [Spawn(1, 1)]
    assert core.time_passed(due + 1) == []
    assert core.spawned(1, 200) == [started(1, 200, 1)]
    assert core.next_due_ms() is None


def test_each_process_has_a_budget_of_restarts() -> None:
    core = begun(2, restarts_max=1)
    for index in (0, 1):
        end(core, index, -9, 0)
    assert core.time_passed(10_000) == [Spawn(0, 1), Spawn(1, 1)]
    core.spawned(0, 200)
    core.spawned(1, 201)
    effects = end(core, 1, -11, 10_002)
    assert exited(1, 201, -11) in effects
    assert SendSignal(0, TERM) in effects
    last = told(end(core, 0, -15, 10_003))
    assert last[:2] == (-11, 1)
    assert "was killed by SIGSEGV" in last[2]
    assert "process 1 is not started again: it was restarted once within 60 s (yard.restarts_max)" in last[2]


def lost(kind: str = "StaleIncarnation") -> RecordedError:
    return RecordedError(40.0, kind, "silent", f"Traceback: {kind}", new_process_helps=True)


def test_process_that_lost_the_yard_starts_again() -> None:
    core = begun(2, restarts_max=1)
    assert end(core, 1, 1, 1_000, error=lost()) == [exited(1, 101, 1, restarts=True, error=lost())]
    assert core.time_passed(1_000 + BACKOFF_MS) == [Spawn(1, 1)]
    assert core.running == 2


def test_yard_that_is_lost_too_often_ends_the_launch_with_its_error() -> None:
    core = begun(1, restarts_max=1)
    end(core, 0, 1, 0, error=lost())
    core.time_passed(10_000)
    core.spawned(0, 200)
    code, _, text = told(end(core, 0, 1, 20_000, error=lost("CoordinatorLost")))
    assert code == 1
    assert text == (
        "Traceback: CoordinatorLost\n"
        "process 0 is not started again: it was restarted once within 60 s (yard.restarts_max)"
    )


def test_process_that_has_lived_long_has_its_restarts_again() -> None:
    core, now_ms = begun(1, restarts_max=1), 0
    for restart in range(1, 9):
        end(core, 0, -9, now_ms)
        assert core.time_passed(now_ms + BACKOFF_MS) == [Spawn(0, restart)]
        core.spawned(0, 200 + restart)
        now_ms += BACKOFF_MS + WINDOW_MS


def test_signal_at_the_end_of_a_script_that_raised_is_no_reason_to_run_it_again() -> None:
    core = begun(1, restarts_max=5)
    assert told(end(core, 0, -11, 6, error=failure("first", 19.0)))[2] == "Traceback: first"


def test_exit_code_is_never_restarted() -> None:
    core = begun(1, restarts_max=5)
    assert told(end(core, 0, 1, 0))[0] == 1


def test_nothing_starts_again_after_a_failure() -> None:
    core = begun(2, restarts_max=5)
    end(core, 0, -9, 0)
    last = told(end(core, 1, 1, 1, error=failure("real", 9.0)))
    assert last == (1, 1, "Traceback: real")
    assert core.time_passed(60_000) == []


def test_stop_asks_then_kills_after_the_grace_time() -> None:
    core = begun()
    assert core.stop(700, 1_000) == [SendSignal(0, TERM), SendSignal(1, TERM)]
    assert core.next_due_ms() == 1_700
    end(core, 0, -15, 1_100)
    assert core.time_passed(1_700) == [SendSignal(1, KILL)]
    last = told(end(core, 1, -9, 1_800))
    assert last == (-15, 0, "the launch was stopped")


def test_second_stop_can_only_shorten_the_grace_time() -> None:
    core = begun()
    core.stop(1_000, 0)
    assert core.stop(100, 10) == []
    assert core.next_due_ms() == 110
    core.stop(5_000, 20)
    assert core.next_due_ms() == 110


def test_stop_while_a_process_is_being_started_reaches_it() -> None:
    core = Supervision(workers=1, restarts_max=0, restarts_window_ms=WINDOW_MS)
    core.begin()
    assert core.stop(100, 1) == []
    assert core.spawned(0, 100) == [started(0, 100), SendSignal(0, TERM)]


def test_stop_while_a_process_waits_for_its_restart_ends_the_launch() -> None:
    core = begun(1, restarts_max=1)
    end(core, 0, -9, 0)
    assert told(core.stop(100, 1))[0] == -15


def test_process_that_cannot_be_started_fails_the_launch() -> None:
    core = Supervision(workers=2, restarts_max=3, restarts_window_ms=WINDOW_MS)
    core.begin()
    core.spawned(0, 100)
    assert core.spawn_failed(1, "no memory", 5.0, 1) == [SendSignal(0, TERM)]
    last = told(end(core, 0, -15, 2))
    assert last[1] == 1
    assert "no memory" in last[2]


def test_ended_launch_takes_no_more_events() -> None:
    core = begun(1)
    end(core, 0, 0, 0)
    assert core.stop(1, 1) == []
    assert core.time_passed(1) == []
    assert core.printed(0, False, "late") == []


# ---- leaving in order


def test_process_that_was_told_to_leave_ends_alone() -> None:
    core = begun(2, restarts_max=5)
    assert end(core, 0, LEFT_IN_ORDER, 0) == [exited(0, 100, LEFT_IN_ORDER)]
    assert core.time_passed(60_000) == []
    assert told(end(core, 1, 0, 1)) == (0, 0, "")


def test_launch_whose_processes_were_all_told_to_leave_is_not_done() -> None:
    core = begun(2)
    end(core, 0, LEFT_IN_ORDER, 0)
    code, _, what = told(end(core, 1, LEFT_IN_ORDER, 1))
    assert code == LEFT_IN_ORDER
    assert "told to leave" in what
    assert core.ended is not None
    assert (core.ended.stopped, core.ended.agent_leaves) == (True, False)


@pytest.mark.parametrize("codes", [(LEFT_IN_ORDER, LEFT_IN_ORDER), (0, LEFT_IN_ORDER), (-TERM, 0), (-KILL, -KILL)])
def test_launch_can_go_on_elsewhere_when_its_agent_leaves(codes: tuple[int, int]) -> None:
    core = begun(2, restarts_max=5)
    assert core.leave(700, 1_000) == [SendSignal(0, TERM), SendSignal(1, TERM)]
    assert core.next_due_ms() == 1_700
    end(core, 0, codes[0], 1_100)
    assert told(end(core, 1, codes[1], 1_200))[0] == LEFT_IN_ORDER
    assert core.ended is not None
    assert (core.ended.stopped, core.ended.agent_leaves) == (True, True)


def test_agent_that_leaves_in_a_hurry_kills_at_once_and_the_launch_can_go_on_elsewhere() -> None:
    core = begun(1)
    core.leave(25_000, 0)
    assert core.leave(0, 10) == []
    assert core.time_passed(10) == [SendSignal(0, KILL)]
    assert told(end(core, 0, -KILL, 11))[0] == LEFT_IN_ORDER
    assert core.ended is not None
    assert core.ended.agent_leaves


def test_launch_that_was_done_when_its_agent_left_ended_well() -> None:
    core = begun(2)
    core.leave(700, 0)
    end(core, 0, 0, 1)
    assert told(end(core, 1, 0, 2)) == (0, 0, "")


def test_error_of_the_script_while_the_agent_leaves_is_told() -> None:
    core = begun(2)
    core.leave(700, 0)
    end(core, 0, 1, 1, error=failure("real", 9.0))
    assert told(end(core, 1, LEFT_IN_ORDER, 2)) == (1, 0, "Traceback: real")


def test_agent_that_leaves_ends_a_launch_whose_process_waits_for_its_restart() -> None:
    core = begun(1, restarts_max=1)
    end(core, 0, -9, 0)
    assert told(core.leave(100, 1))[0] == LEFT_IN_ORDER
    assert core.ended is not None
    assert core.ended.agent_leaves


# ---- environment


AGENT = Incarnation((1 << 32) + 12)


def block(environment: dict[str, str], *, threads: int = 0, gpus: tuple[str, ...] = ()) -> dict[str, str]:
    """That of the second of four processes."""
    here = Path("/")
    order = LaunchOrder(here, (), here, environment, 4, 0, 1, threads, gpus, "10.0.0.1:7070", AGENT, "x")
    return environment_block(order, 1, "/tmp/error.json")


def test_block_tells_a_process_its_place() -> None:
    assert block({"HOME": "/h", "SHARDYARD_AGENT": "old", "SHARDYARD_RUN_NUMBER": "3"}) == {
        "HOME": "/h",
        "SHARDYARD_COORDINATOR": "10.0.0.1:7070",
        "SHARDYARD_AGENT": "4294967308",
        "SHARDYARD_LOCAL_INDEX": "1",
        "SHARDYARD_WORKERS": "4",
        "SHARDYARD_ERROR_FILE": "/tmp/error.json",
        "SHARDYARD_RUN_ID": "x",
    }


def test_process_registers_as_that_of_its_agent() -> None:
    """So the coordinator believes the agent when it reports the process's end."""
    registered = _membership(block({}))
    assert (registered.agent, registered.local_index) == (AGENT, 1)


def test_expected_workers_that_are_given_win_over_those_of_the_launch() -> None:
    made = block({"SHARDYARD__JOB__WORKERS_EXPECTED": "8", "SHARDYARD_WORKERS": "3"})
    assert made["SHARDYARD__JOB__WORKERS_EXPECTED"] == "8"
    assert "SHARDYARD_WORKERS" not in made


def test_threads_are_set_unless_the_environment_says() -> None:
    made = block({"OMP_NUM_THREADS": "7"}, threads=2, gpus=("2", "3"))
    assert (made["OMP_NUM_THREADS"], made["MKL_NUM_THREADS"]) == ("7", "2")
    assert made["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (None, "auto", ("0", "1")),
        (None, "cpu", ()),
        (None, "cuda:1", ()),
        ("2,GPU-ab", "auto", ("2", "GPU-ab")),
        ("", "auto", ()),
        ("-1", "auto", ()),
        ("1,-1,0", "auto", ("1",)),
    ],
)
def test_gpus_are_those_that_cuda_would_show(visible: str | None, device: str, expected: tuple[str, ...]) -> None:
    base = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus_to_give(base, device, ("0", "1")) == expected
