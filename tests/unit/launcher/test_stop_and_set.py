"""`shardyard stop` and `shardyard set`: what they ask the coordinator, wait for and print."""

from __future__ import annotations

import pytest

from shardyard.transport.interfaces import Context
from shardyard.wire import methods
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.cli import main
from tests.support.launcher_replies import BOUNDED, serving

SYNC = wire.CONSISTENCY_MODE_SYNC


@pytest.mark.parametrize("state", [wire.JOB_STATE_FINISHED, wire.JOB_STATE_FAILED])
def test_stop_waits_until_the_job_has_ended(state: wire.JobState, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, str]] = []
    states = [wire.JOB_STATE_RUNNING, wire.JOB_STATE_FINISHING, state]

    def stop(request: wire.StopJobRequest, _: Context) -> wire.StopJobReply:
        asked.append((request.job_name, request.reason))
        return wire.StopJobReply(job_name="digits", job=7, stop=wire.Stop(reason=request.reason), first=True)

    def status(request: wire.StatusRequest, _: Context) -> wire.StatusReply:
        failure = common.ErrorDetail(what="no room") if state == wire.JOB_STATE_FAILED else None
        job = wire.JobStatus(job=7, name="digits", state=states[0], step=4_950, failure=failure)
        del states[: len(states) > 1]
        return wire.StatusReply(jobs=[wire.JobStatus(job=6, name="digits", state=wire.JOB_STATE_FAILED), job])

    with serving({methods.STOP_JOB: stop, methods.STATUS: status}) as address:
        code = main(["stop", "digits", "--reason", "tea", "--wait", "--coordinator", address])
    assert asked == [("digits", "tea")]
    captured = capsys.readouterr()
    told = "job digits is told to stop\n"
    if state == wire.JOB_STATE_FINISHED:
        assert (code, captured.out) == (0, f"{told}job digits is finished, at step 4,950\n")
    else:
        assert (code, captured.out, captured.err) == (1, told, "job digits has failed: no room\n")


def test_stop_of_a_job_that_stops_already_says_who_told_it(capsys: pytest.CaptureFixture[str]) -> None:
    reply = wire.StopJobReply(
        job_name="digits", job=7, stop=wire.Stop(reason="nan", worker=(1 << 32) + 4, settled=True, step=1_200)
    )
    with serving({methods.STOP_JOB: lambda request, _: reply}) as address:
        assert main(["stop", "--coordinator", address]) == 0
    said = "job digits was told to stop before, by worker 1.4: nan; before step 1,200\n"
    assert capsys.readouterr().out == said


def test_stop_of_what_does_not_run_is_refused(coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "digits", "--coordinator", coordinator]) == 1
    assert "no job 'digits'" in capsys.readouterr().err


def test_set_waits_no_longer_for_what_somebody_has_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    standings = [wire.SwitchStatus(consistency=BOUNDED, step=0), wire.SwitchStatus()]

    def switch(_: wire.SwitchConsistencyRequest, __: Context) -> wire.SwitchConsistencyReply:
        return wire.SwitchConsistencyReply(job_name="digits", job=7, consistency=BOUNDED, first=True)

    def status(_: wire.StatusRequest, __: Context) -> wire.StatusReply:
        job = wire.JobStatus(job=7, name="digits", state=wire.JOB_STATE_RUNNING, consistency=standings.pop(0))
        return wire.StatusReply(jobs=[job])

    with serving({methods.SWITCH_CONSISTENCY: switch, methods.STATUS: status}) as address:
        code = main(["set", "consistency.mode=bounded", "--wait", "--coordinator", address])
    assert (code, standings) == (1, [])
    assert "keeps its mode: the change was cancelled" in capsys.readouterr().err


@pytest.mark.parametrize("ends", [False, True])
def test_set_waits_until_all_servers_and_workers_go_by_it(ends: bool, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[wire.SwitchConsistencyRequest] = []
    former = wire.Consistency(number=1, mode=wire.CONSISTENCY_MODE_ASYNC)
    standings = [
        wire.SwitchStatus(consistency=former, servers=True),
        wire.SwitchStatus(consistency=BOUNDED),
        wire.SwitchStatus(consistency=BOUNDED, servers=True, behind=[7]),
        wire.SwitchStatus(consistency=BOUNDED, servers=True),
    ]
    seen = 0

    def switch(request: wire.SwitchConsistencyRequest, _: Context) -> wire.SwitchConsistencyReply:
        asked.append(request)
        return wire.SwitchConsistencyReply(job_name="digits", job=7, consistency=BOUNDED, first=True)

    def status(request: wire.StatusRequest, _: Context) -> wire.StatusReply:
        nonlocal seen
        state = wire.JOB_STATE_FINISHED if ends and seen == 2 else wire.JOB_STATE_RUNNING
        job = wire.JobStatus(job=7, name="digits", state=state, consistency=standings[seen])
        seen += 1
        return wire.StatusReply(jobs=[job])

    what = ["digits", "consistency.mode=bounded", "job.consistency.staleness=3"]
    with serving({methods.SWITCH_CONSISTENCY: switch, methods.STATUS: status}) as address:
        code = main(["set", *what, "--wait", "--coordinator", address])
    assert asked == [wire.SwitchConsistencyRequest(job_name="digits", mode=wire.CONSISTENCY_MODE_BOUNDED, staleness=3)]
    captured = capsys.readouterr()
    told = "job digits changes to bounded, 3 steps\n"
    if ends:
        assert (code, seen, captured.out, captured.err) == (1, 3, told, "job digits has ended\n")
    else:
        assert (code, seen) == (0, len(standings))
        assert captured.out == f"{told}all servers and workers of job digits have changed\n"


def test_set_says_what_is_in_force_already_and_asks_for_nothing_that_was_not_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[wire.SwitchConsistencyRequest] = []
    reply = wire.SwitchConsistencyReply(job_name="digits", job=7, consistency=BOUNDED)

    def switch(request: wire.SwitchConsistencyRequest, _: Context) -> wire.SwitchConsistencyReply:
        asked.append(request)
        return reply

    with serving({methods.SWITCH_CONSISTENCY: switch}) as address:
        assert main(["set", "consistency.staleness=3", "--coordinator", address]) == 0
        reply.consistency.CopyFrom(
            wire.Consistency(number=3, mode=wire.CONSISTENCY_MODE_SYNC, strategy="multi_worker_mirrored")
        )
        assert main(["set", "digits", "job.strategy=multi_worker_mirrored", "--coordinator", address]) == 0
    assert asked == [
        wire.SwitchConsistencyRequest(staleness=3),
        wire.SwitchConsistencyRequest(job_name="digits", strategy="multi_worker_mirrored"),
    ]
    assert capsys.readouterr().out == (
        "job digits already uses bounded, 3 steps\njob digits already uses sync, multi_worker_mirrored\n"
    )


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (["digits"], "nothing to set"),
        (["consistency.mode=async", "digits"], "'digits': expected NAME=VALUE"),
        (["a", "b", "consistency.mode=async"], "'b': expected NAME=VALUE"),
        (["consistency.steps=3"], "'consistency.steps' cannot be changed in a running job"),
        (["consistency.mode=hurried"], "shardyard set consistency.mode"),
        (["strategy=ring"], "shardyard set strategy"),
        (["consistency.staleness=-1"], "shardyard set consistency.staleness"),
    ],
)
def test_set_refuses_what_cannot_be_set_before_it_asks_anybody(
    what: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["set", *what, "--coordinator", "127.0.0.1:1"]) == 2
    assert expected in capsys.readouterr().err


def test_set_of_what_does_not_run_is_refused(coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["set", "digits", "consistency.mode=async", "--coordinator", coordinator]) == 1
    assert "no job 'digits'" in capsys.readouterr().err


def test_drain_names_the_member_and_waits_until_it_has_left(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []
    lists = [[wire.MemberStatus(incarnation=(1 << 32) + 2)], []]

    def drain(request: wire.DrainRequest, _: Context) -> wire.DrainReply:
        asked.append(request.member)
        return wire.DrainReply(incarnation=(1 << 32) + 2, title="server 1.2 at here:1", left_ms=25_000, first=True)

    with serving(
        {methods.DRAIN: drain, methods.STATUS: lambda _, __: wire.StatusReply(members=lists.pop(0))}
    ) as address:
        assert main(["drain", "here:1", "--wait", "--coordinator", address]) == 0
    assert asked == ["here:1"]
    told = "server 1.2 at here:1 leaves in order, within 25 s\nserver 1.2 at here:1 has left\n"
    assert capsys.readouterr().out == told


def test_drain_of_a_stranger_is_refused(coordinator: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "nowhere:1", "--coordinator", coordinator]) == 1
    assert "no member 'nowhere:1'" in capsys.readouterr().err
