"""The machine of a launch: restarts, stops, and which error is told."""

from __future__ import annotations

import signal

import pytest

from shardyard_worker.agent.supervision import (
    RESTART_BACKOFF_MS,
    RESTART_BACKOFF_MS_MAX,
    STOP_GRACE_MS,
    Effect,
    EmitEvent,
    Ended,
    LaunchBegan,
    LaunchEnded,
    LinePrinted,
    ProcessExited,
    ProcessOutput,
    ProcessPlace,
    ProcessStarted,
    RecordedError,
    ReportExit,
    SendSignal,
    Spawn,
    Spawned,
    SpawnFailed,
    StopAsked,
    Supervision,
    TimePassed,
    environment_block,
    gpus_to_give,
    is_local_caller,
)

TERM, KILL = signal.SIGTERM, signal.SIGKILL


def begun(workers: int = 2, restarts_max: int = 0) -> Supervision:
    core = Supervision(workers=workers, restarts_max=restarts_max)
    assert core.handle(LaunchBegan(), 0) == [Spawn(index, 0) for index in range(workers)]
    for index in range(workers):
        assert core.handle(Spawned(index, 100 + index), 0) == [EmitEvent(ProcessStarted(index, 100 + index, 0))]
    return core


def ended(index: int, exit_code: int, *, error: RecordedError | None = None, time_s: float = 50.0) -> Ended:
    return Ended(index, exit_code, error, time_s)


def told(effects: list[Effect]) -> LaunchEnded:
    last = effects[-1]
    assert isinstance(last, EmitEvent)
    assert isinstance(last.happening, LaunchEnded)
    return last.happening


def failure(text: str, time_s: float) -> RecordedError:
    return RecordedError(time_s, "ValueError", text, f"Traceback: {text}\n")


def test_launch_ends_well_when_all_processes_have() -> None:
    core = begun()
    assert core.handle(ended(0, 0), 5) == [ReportExit(100, 0), EmitEvent(ProcessExited(0, 100, 0, False))]
    assert core.running == 1
    assert told(core.handle(ended(1, 0), 6)) == LaunchEnded(0)
    assert core.ended == LaunchEnded(0)
    assert core.next_due_ms() is None


def test_failed_process_stops_the_others() -> None:
    core = begun(3)
    core.handle(ended(2, 0), 5)
    effects = core.handle(ended(0, 3), 10)
    assert effects == [ReportExit(100, 3), EmitEvent(ProcessExited(0, 100, 3, False)), SendSignal(1, TERM)]
    assert core.next_due_ms() == 10 + STOP_GRACE_MS
    assert core.handle(TimePassed(), 10 + STOP_GRACE_MS - 1) == []
    assert core.handle(TimePassed(), 10 + STOP_GRACE_MS) == [SendSignal(1, KILL)]
    assert core.handle(TimePassed(), 10 + 2 * STOP_GRACE_MS) == []
    end = told(core.handle(ended(1, -9), 9_000))
    assert (end.exit_code, end.first_error_index) == (3, 0)


@pytest.mark.parametrize("first", [0, 1])
def test_first_error_by_time_is_told_though_noticed_last(first: int) -> None:
    core = begun()
    core.handle(ended(1 - first, 1, error=failure("second", 20.0), time_s=21.0), 5)
    end = told(core.handle(ended(first, 7, error=failure("first", 19.0), time_s=30.0), 6))
    assert end == LaunchEnded(7, first, "Traceback: first")


@pytest.mark.parametrize("number", [TERM, KILL])
def test_process_that_raised_and_was_stopped_at_its_end_has_raised(number: signal.Signals) -> None:
    core = begun()
    core.handle(ended(1, 1, error=failure("second", 20.0), time_s=21.0), 5)
    end = told(core.handle(ended(0, -number, error=failure("first", 19.0), time_s=30.0), 6))
    assert end == LaunchEnded(1, 0, "Traceback: first")


def test_signal_from_elsewhere_is_what_a_process_ended_with() -> None:
    core = begun(1)
    assert told(core.handle(ended(0, -15, error=failure("first", 19.0)), 6)).exit_code == -15


def test_error_before_one_without_a_traceback_is_told() -> None:
    core = begun()
    core.handle(ended(1, 1, time_s=20.0), 5)
    assert told(core.handle(ended(0, 1, error=failure("cause", 19.9), time_s=21.0), 6)).first_error_index == 0


def put_out(index: int) -> Ended:
    said = RecordedError(40.0 + index, "WorkerQuarantined", "10 in a row", "Traceback: 10 in a row\n")
    return ended(index, 1, error=said)


def test_process_that_the_job_has_put_out_does_not_end_the_launch() -> None:
    core = begun(3)
    assert core.handle(put_out(1), 5) == [ReportExit(101, 1), EmitEvent(ProcessExited(1, 101, 1, False))]
    core.handle(ended(0, 0), 6)
    assert told(core.handle(ended(2, 0), 7)) == LaunchEnded(0)


def test_launch_whose_processes_were_all_put_out_has_failed() -> None:
    core = begun()
    core.handle(put_out(1), 5)
    assert told(core.handle(put_out(0), 6)) == LaunchEnded(1, 0, "Traceback: 10 in a row")


def test_failure_beside_one_that_was_put_out_is_the_one_that_is_told() -> None:
    core = begun()
    core.handle(put_out(1), 5)
    assert told(core.handle(ended(0, 1, error=failure("no", 60.0)), 6)) == LaunchEnded(1, 0, "Traceback: no")


def test_process_that_is_stopped_is_not_the_one_that_failed() -> None:
    core = begun()
    core.handle(ended(1, 1, error=failure("mine", 20.0)), 5)
    # it went by its own SIGTERM handler, with an older clock
    end = told(core.handle(ended(0, 1, time_s=1.0), 6))
    assert end.first_error_index == 1


def test_end_of_output_stands_in_for_a_traceback() -> None:
    core = begun(1)
    for number in range(50):
        line = LinePrinted(0, number % 2 == 0, f"line {number}")
        assert core.handle(line, 1) == [EmitEvent(ProcessOutput(0, number % 2 == 0, f"line {number}"))]
    text = told(core.handle(ended(0, 4), 2)).first_error
    assert "process 0 (pid 100) ended with exit code 4" in text
    assert "line 49" in text
    assert "line 30" in text
    assert "line 29\n" not in text


def test_process_killed_by_a_signal_starts_again_after_a_pause() -> None:
    core = begun(2, restarts_max=1)
    assert core.handle(ended(1, -9), 1_000) == [ReportExit(101, -9), EmitEvent(ProcessExited(1, 101, -9, True))]
    assert core.running == 2
    due = core.next_due_ms()
    assert due == 1_000 + RESTART_BACKOFF_MS
    assert core.handle(TimePassed(), due - 1) == []
    assert core.handle(TimePassed(), due) == [Spawn(1, 1)]
    assert core.handle(TimePassed(), due + 1) == []
    assert core.handle(Spawned(1, 200), due + 1) == [EmitEvent(ProcessStarted(1, 200, 1))]
    assert core.next_due_ms() is None


def test_each_process_has_a_budget_of_restarts() -> None:
    core = begun(2, restarts_max=1)
    for index in (0, 1):
        core.handle(ended(index, -9), 0)
    assert core.handle(TimePassed(), 10_000) == [Spawn(0, 1), Spawn(1, 1)]
    core.handle(Spawned(0, 200), 10_001)
    core.handle(Spawned(1, 201), 10_001)
    effects = core.handle(ended(1, -11), 10_002)
    assert EmitEvent(ProcessExited(1, 201, -11, False)) in effects
    assert SendSignal(0, TERM) in effects
    end = told(core.handle(ended(0, -15), 10_003))
    assert (end.exit_code, end.first_error_index) == (-11, 1)
    assert "killed by SIGSEGV after 1 restarts" in end.first_error


def test_pause_before_a_restart_grows_up_to_a_bound() -> None:
    core = begun(1, restarts_max=20)
    now, pauses = 0, []
    for _ in range(20):
        core.handle(ended(0, -9), now)
        due = core.next_due_ms()
        assert due is not None
        pauses.append(due - now)
        now = due
        core.handle(TimePassed(), now)
        core.handle(Spawned(0, 5), now)
    assert pauses[:3] == [RESTART_BACKOFF_MS, 2 * RESTART_BACKOFF_MS, 4 * RESTART_BACKOFF_MS]
    assert pauses == sorted(pauses)
    assert pauses[-1] == RESTART_BACKOFF_MS_MAX


def test_exit_code_is_never_restarted() -> None:
    core = begun(1, restarts_max=5)
    assert told(core.handle(ended(0, 1), 0)).exit_code == 1


def test_nothing_starts_again_after_a_failure() -> None:
    core = begun(2, restarts_max=5)
    core.handle(ended(0, -9), 0)
    end = told(core.handle(ended(1, 1, error=failure("real", 9.0)), 1))
    assert end == LaunchEnded(1, 1, "Traceback: real")
    assert core.handle(TimePassed(), 60_000) == []


def test_stop_asks_then_kills_after_the_grace_time() -> None:
    core = begun()
    assert core.handle(StopAsked(700), 1_000) == [SendSignal(0, TERM), SendSignal(1, TERM)]
    assert core.next_due_ms() == 1_700
    core.handle(ended(0, -15), 1_100)
    assert core.handle(TimePassed(), 1_700) == [SendSignal(1, KILL)]
    end = told(core.handle(ended(1, -9), 1_800))
    assert end == LaunchEnded(-15, 0, "the launch was stopped")


def test_second_stop_can_only_shorten_the_grace_time() -> None:
    core = begun()
    core.handle(StopAsked(1_000), 0)
    assert core.handle(StopAsked(100), 10) == []
    assert core.next_due_ms() == 110
    core.handle(StopAsked(5_000), 20)
    assert core.next_due_ms() == 110


def test_stop_while_a_process_is_being_started_reaches_it() -> None:
    core = Supervision(workers=1, restarts_max=0)
    core.handle(LaunchBegan(), 0)
    assert core.handle(StopAsked(100), 1) == []
    assert core.handle(Spawned(0, 100), 2) == [EmitEvent(ProcessStarted(0, 100, 0)), SendSignal(0, TERM)]


def test_stop_while_a_process_waits_for_its_restart_ends_the_launch() -> None:
    core = begun(1, restarts_max=1)
    core.handle(ended(0, -9), 0)
    assert told(core.handle(StopAsked(100), 1)).exit_code == -15


def test_process_that_cannot_be_started_fails_the_launch() -> None:
    core = Supervision(workers=2, restarts_max=3)
    core.handle(LaunchBegan(), 0)
    core.handle(Spawned(0, 100), 0)
    assert core.handle(SpawnFailed(1, "no memory", 5.0), 1) == [SendSignal(0, TERM)]
    end = told(core.handle(ended(0, -15), 2))
    assert end.first_error_index == 1
    assert "no memory" in end.first_error


def test_ended_launch_takes_no_more_events() -> None:
    core = begun(1)
    core.handle(ended(0, 0), 0)
    assert core.handle(StopAsked(1), 1) == []
    assert core.handle(LinePrinted(0, False, "late"), 1) == []


# ---- environment


PLACE = ProcessPlace("10.0.0.1:7070", 12, 1, 4, "/tmp/error.json")


def test_block_tells_a_process_its_place() -> None:
    block = environment_block({"HOME": "/h", "SHARDYARD_AGENT": "old"}, PLACE, threads=0, gpu=None)
    assert block == {
        "HOME": "/h",
        "SHARDYARD_COORDINATOR": "10.0.0.1:7070",
        "SHARDYARD_AGENT": "12",
        "SHARDYARD_LOCAL_INDEX": "1",
        "SHARDYARD_WORKERS": "4",
        "SHARDYARD_ERROR_FILE": "/tmp/error.json",
    }


def test_expected_workers_that_are_given_win_over_those_of_the_launch() -> None:
    block = environment_block(
        {"SHARDYARD__JOB__WORKERS_EXPECTED": "8", "SHARDYARD_WORKERS": "3"}, PLACE, threads=0, gpu=None
    )
    assert block["SHARDYARD__JOB__WORKERS_EXPECTED"] == "8"
    assert "SHARDYARD_WORKERS" not in block


def test_threads_are_set_unless_the_environment_says() -> None:
    block = environment_block({"OMP_NUM_THREADS": "7"}, PLACE, threads=2, gpu="3")
    assert (block["OMP_NUM_THREADS"], block["MKL_NUM_THREADS"]) == ("7", "2")
    assert block["CUDA_VISIBLE_DEVICES"] == "3"


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


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:5000", True),
        ("ipv4:127.8.8.8:5000", True),
        ("ipv6:[::1]:5000", True),
        ("ipv6:%5B::1%5D:5000", True),
        ("ipv6:[::ffff:127.0.0.1]:5000", True),
        ("unix:", True),
        ("unix:/run/x.sock", True),
        ("in-process", True),
        ("ipv4:10.0.0.7:5000", False),
        ("ipv6:[::ffff:10.0.0.7]:5000", False),
        ("ipv6:[fe80::1%25lo]:5000", False),
        ("ipv6:[2001:db8::1]:1", False),
        ("ipv4:127.0.0.1.example.com:80", False),
        ("vsock:1:2", False),
        ("unixy:127.0.0.1:1", False),
        ("", False),
        ("127.0.0.1:5000", False),
    ],
)
def test_only_callers_over_loopback_are_local(peer: str, local: bool) -> None:
    assert is_local_caller(peer) is local
