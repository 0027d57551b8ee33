"""`shardyard logs`, `attach`, `stop --launch`, `run --detach` and `--env`, and launches in `status`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.domain import errors
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.interfaces import Context
from shardyard.wire import methods
from shardyard.wire.v1 import agent_pb2 as agent_wire
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.cli import main
from shardyard_launcher.scripts.launches import FoundLaunch, choose, list_launches
from shardyard_launcher.status.launches import ENDED_SHOWN_MAX, describe_state
from shardyard_launcher.terminal.variables import given_variables
from shardyard_worker.agent.service import AgentPlan, AgentService
from tests.support.launcher_replies import serving
from tests.support.waiting import wait_until

AGENT = wire.MemberStatus(incarnation=2, role=wire.ROLE_AGENT, address="h:2", pid=2, host="gamma")


def found(number: int, *, script: str = "/jobs/train.py", runs: bool = True, **fields: Any) -> FoundLaunch:
    said = agent_wire.DescribedLaunch(launch=number, script=script, ended=not runs, workers=2, **fields)
    return FoundLaunch(AGENT, said)


# ---- which launch is meant


def test_launch_is_named_by_its_number_or_its_script() -> None:
    launches = [found(111_111), found(222_222, script="/jobs/other.py")]
    assert choose(launches, "222222").number == 222_222
    for name in ("other.py", "other", "/jobs/other.py"):
        assert choose(launches, name).number == 222_222


def test_launch_that_runs_is_meant_and_the_newest_if_none_runs() -> None:
    ended = [found(3, runs=False), found(2, runs=False)]
    assert choose(ended, None).number == 3
    assert choose([*ended, found(1)], None).number == 1
    assert choose([*ended, found(1)], "train.py").number == 1


def test_several_running_launches_are_not_guessed_between() -> None:
    with pytest.raises(errors.InvalidRequest, match=r"2 launches run: 1 \(train.py\), 2 \(train.py\)"):
        choose([found(1), found(2)], "train")


def test_unknown_launch_names_those_that_there_are() -> None:
    with pytest.raises(errors.NotFound, match=r"no launch 9 in this yard; its agents know 1 \(train.py\)"):
        choose([found(1)], "9")
    with pytest.raises(errors.NotFound, match="no launch in this yard; its agents know no launch"):
        choose([], None)


def test_launch_that_is_not_found_while_an_agent_is_silent_may_be_there() -> None:
    silent = "; not asked: agent 1.1 (it does not answer)"
    with pytest.raises(errors.NotFound, match=r"no launch on the agents that answer; not asked: agent 1\.1") as caught:
        choose([], None, silent=silent)
    assert caught.value.todo_text == "try again in a few seconds"


def test_launches_are_listed_once_and_running_ones_first() -> None:
    second = wire.MemberStatus(incarnation=5, role=wire.ROLE_AGENT, address="h:5")
    old = agent_wire.DescribedLaunch(launch=1, ended=True, started_s=1.0)
    new = agent_wire.DescribedLaunch(launch=2, ended=True, started_s=2.0)
    runs = agent_wire.DescribedLaunch(launch=3, started_s=0.5)
    said = {
        2: agent_wire.DescribeAgentReply(launches=[old, new, runs]),
        5: agent_wire.DescribeAgentReply(launches=[old]),
        7: errors.Unavailable("gone"),
    }
    listed = list_launches([second, AGENT], said)
    assert [(each.number, each.agent.incarnation) for each in listed] == [(3, 2), (2, 2), (1, 2)]


# ---- what is shown of one


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"runs": True}, "runs"),
        ({"runs": False}, "ended with its agent"),
        ({"runs": False, "ended_s": 95.0, "ending": agent_wire.LaunchEnded()}, "ended well 5 s ago"),
        (
            {"runs": False, "ended_s": 40.0, "ending": agent_wire.LaunchEnded(exit_code=3, first_error_index=1)},
            "process 1 ended with exit code 3 1 min 0 s ago",
        ),
        (
            {"runs": False, "ended_s": 95.0, "ending": agent_wire.LaunchEnded(exit_code=-9)},
            "process 0 was killed by SIGKILL 5 s ago",
        ),
        (
            {"runs": False, "ended_s": 95.0, "ending": agent_wire.LaunchEnded(exit_code=-15, stopped=True)},
            "was stopped 5 s ago",
        ),
    ],
)
def test_state_of_a_launch_in_words(fields: dict[str, Any], said: str) -> None:
    assert describe_state(found(1, **fields), 100.0) == said


def test_times_that_no_clock_can_have_are_not_shown() -> None:
    for time_s in (float("nan"), float("inf"), -1.0, 1e300):
        launch = found(1, runs=False, started_s=time_s, ended_s=time_s, ending=agent_wire.LaunchEnded())
        assert (launch.started_s, launch.ended_s) == (0.0, 0.0)
        assert describe_state(launch, 60.0) == "ended well 1 min 0 s ago"


# ---- variables


def test_variables_have_the_value_given_or_that_of_the_command() -> None:
    assert given_variables(["A=1=2", "EMPTY=", "HOME"], {"HOME": "/h"}) == {"A": "1=2", "EMPTY": "", "HOME": "/h"}


@pytest.mark.parametrize(
    ("text", "said"),
    [("=1", "expected NAME=VALUE"), ("GONE", "no variable GONE"), ("SHARDYARD_AGENT=1", "the agent sets")],
)
def test_bad_variable_is_refused(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").touch()
    assert main(["run", "--coordinator", "127.0.0.1:1", "--env", text, "train.py"]) == 2
    assert said in capsys.readouterr().err


def test_script_of_a_yard_of_its_own_cannot_be_left_running(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").touch()
    assert main(["run", "--detach", "train.py"]) == 2
    assert "--detach needs --coordinator" in capsys.readouterr().err


# ---- commands on an agent


class Yard:
    """A coordinator that knows one agent, and that agent."""

    def __init__(self, agent: AgentService, address: str, coordinator: str, folder: Path) -> None:
        self.agent = agent
        self.address = address
        self.coordinator = coordinator
        self.script = folder / "train.py"

    def launch(self, text: str, *, workers: int = 1, wait: bool = True) -> str:
        self.script.write_text(text)
        request = agent_wire.LaunchRequest(
            script=str(self.script), working_directory=str(self.script.parent), workers=workers
        )
        running = self.agent.launch(request)
        if wait:
            wait_until(lambda: running.is_over, "the end of the launch", deadline_s=20)
        return str(running.number)

    def run(self, *arguments: str) -> int:
        return main([*arguments[:1], "--coordinator", self.coordinator, *arguments[1:]])


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    plan = AgentPlan("127.0.0.1:1", 1, tmp_path)
    agent = AgentService(plan, incarnation=lambda: 2, report_exit=lambda pid, exit_code: None)
    listener = GrpcServer("127.0.0.1:0", [agent.service], None, threads=8)
    listener.start()
    member = wire.MemberStatus(incarnation=2, role=wire.ROLE_AGENT, address=listener.address, host="gamma", pid=2)
    status = wire.StatusReply(term=1, members=[member])
    try:
        with serving({methods.STATUS: lambda request, context: status}) as coordinator:
            yield Yard(agent, listener.address, coordinator, tmp_path)
    finally:
        agent.close(grace_ms=100)
        listener.stop()


def described(yard: Yard) -> list[agent_wire.DescribedLaunch]:
    context = Context(peer="in-process", is_active=lambda: True)
    reply = yard.agent.service.handlers[methods.DESCRIBE_AGENT](agent_wire.DescribeAgentRequest(), context)
    return list(reply.launches)


PRINTS = "import sys\nfor i in range(4):\n    print('line', i)\nprint('warned', file=sys.stderr)\n"


def test_logs_show_what_a_launch_has_printed_on_the_streams_that_it_used(
    yard: Yard, capsys: pytest.CaptureFixture[str]
) -> None:
    number = yard.launch(PRINTS)
    assert yard.run("logs", number) == 0
    captured = capsys.readouterr()
    assert captured.out == "line 0\nline 1\nline 2\nline 3\n"
    assert re.fullmatch(
        r"\[agent\] process 0 started with pid \d+\nwarned\n\[agent\] process 0 \(pid \d+\) ended with exit code 0\n"
        r"\[agent\] the launch has ended well\n",
        captured.err,
    )


def test_logs_show_the_last_lines_with_their_times(yard: Yard, capsys: pytest.CaptureFixture[str]) -> None:
    yard.launch(PRINTS)
    assert yard.run("logs", "--tail", "1", "--timestamps", "train.py") == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \[agent\] the launch has ended well\n", captured.err)


def test_logs_say_which_of_several_processes_has_printed(yard: Yard, capsys: pytest.CaptureFixture[str]) -> None:
    number = yard.launch("import os\nprint('I am', os.environ['SHARDYARD_LOCAL_INDEX'])\n", workers=2)
    assert yard.run("logs", number) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] I am 0", "[1] I am 1"]
    assert yard.run("logs", number, "--process", "1") == 0
    assert capsys.readouterr().out == "I am 1\n"
    assert yard.run("logs", number, "--process", "2") == 1
    assert "has no process 2" in capsys.readouterr().err


def test_logs_of_a_yard_that_is_down_are_read_from_its_folder(
    yard: Yard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = yard.launch(PRINTS)
    yard.agent.close()
    for named in ((), (number,), ("train",)):
        assert main(["logs", "--state", str(tmp_path), "--process", "0", *named]) == 0
        captured = capsys.readouterr()
        assert captured.out == "line 0\nline 1\nline 2\nline 3\n"
        assert captured.err.startswith(f"no yard is up in {tmp_path}; what follows is in its folder\n")
    assert main(["logs", "--state", str(tmp_path), "--process", "1"]) == 1
    assert "has no process 1" in capsys.readouterr().err
    assert main(["logs", "--state", str(tmp_path / "none")]) == 1
    assert "no yard is up" in capsys.readouterr().err


def test_attach_to_a_launch_that_has_ended_has_its_exit_code(yard: Yard, capsys: pytest.CaptureFixture[str]) -> None:
    number = yard.launch("raise SystemExit(3)\n")
    assert yard.run("attach") == 3
    captured = capsys.readouterr()
    assert f"launch {number} of train.py on gamma has ended" in captured.err
    assert f"{yard.script} failed" in captured.err


def test_attach_follows_a_launch_from_where_it_is(yard: Yard, capsys: pytest.CaptureFixture[str]) -> None:
    yard.launch(
        "import time\nprint('before', flush=True)\ntime.sleep(2)\nprint('after', flush=True)\nraise SystemExit(4)\n",
        wait=False,
    )
    wait_until(lambda: described(yard)[0].next_event >= 2, "the first line")
    assert yard.run("attach") == 4
    captured = capsys.readouterr()
    assert "Ctrl-C detaches, and the launch goes on" in captured.err.splitlines()[0]
    assert "after" in captured.out.splitlines()
    assert "before" not in captured.out


def test_stop_of_a_launch_ends_its_processes(yard: Yard, capsys: pytest.CaptureFixture[str]) -> None:
    number = yard.launch("import time\ntime.sleep(600)\n", wait=False)
    assert yard.run("stop", "--launch", number) == 0
    assert f"launch {number} of train.py on gamma has ended" in capsys.readouterr().out
    assert yard.run("stop", "--launch", number) == 0
    assert "has ended before" in capsys.readouterr().out
    assert yard.run("stop", "--launch", number, "digits") == 2


def test_status_lists_launches_that_run_and_the_latest_that_have_ended(
    yard: Yard, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = [yard.launch("pass\n") for _ in range(ENDED_SHOWN_MAX + 1)]
    running = yard.launch("import time\ntime.sleep(600)\n", wait=False)
    assert yard.run("status") == 0
    rows = re.findall(r"^(\d{6})  train.py +\S+ +gamma +(\S.*?) +\d+ s ago +(\S.*?) *$", capsys.readouterr().out, re.M)
    assert [(number, state.split(" ")[0]) for number, _, state in rows] == [
        (running, "runs"),
        *((number, "ended") for number in reversed(ended[1:])),
    ]
    assert yard.run("status", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["launches"]
    assert [str(each["launch"]) for each in listed] == [running, *reversed(ended)]
    assert (listed[0]["running"], listed[0]["exit_code"], listed[1]["exit_code"]) == (True, None, 0)
