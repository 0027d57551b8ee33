"""The command line with real processes: a yard that is started, used, broken and stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess

import pytest

from shardyard.domain.errors import CoordinatorUnavailable
from shardyard_launcher.status.report import ask
from shardyard_launcher.yard.role_process import RoleProcess
from shardyard_launcher.yard.state_file import YardState, read_state
from tests.support.identities import network_to
from tests.support.shells import DEADLINE_S, SLEEPS, Shell, await_true, finish, read_until, shell
from tests.support.waiting import is_gone

__all__ = ["shell"]


def read_error_until(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if wanted in line:
            return
    pytest.fail(f"standard error ended before {wanted!r}")


# ---- up, down


def test_yard_is_up_is_used_again_and_goes_down(shell: Shell) -> None:
    started = shell.up(shell.script("print('trained')\n"))
    assert started.returncode == 0, started.stderr
    assert "[0] trained" in started.stdout
    coordinator = shell.status()["coordinator"]
    last = started.stdout.splitlines()[-4:]
    assert coordinator in last[0]
    assert f"SHARDYARD_COORDINATOR={coordinator}" in last[1]
    assert f"shardyard down --state {shell.state}" in last[3]
    roles = sorted(member["role"] for member in shell.status()["members"])
    assert roles == ["agent", "server", "server"]

    pids = {process.pid for process in shell.processes()}
    again = shell.up(shell.script("raise ValueError('second')\n"))
    assert again.returncode == 1
    assert "is up already" in again.stdout
    assert "ValueError: second" in again.stderr
    assert {process.pid for process in shell.processes()} == pids

    stopped = shell.down()
    assert stopped.returncode == 0, stopped.stderr
    assert shell.processes() == []
    host, port = coordinator.split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
    assert (shell.state / "logs" / "coordinator.log").exists()
    assert "no yard is up" in shell.down("--purge").stdout
    assert not shell.state.exists()


TRAINS = """
    import time, torch, shardyard as sy

    with sy.connect() as job:
        model = torch.nn.Linear(2, 1)
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in job.batches(torch.utils.data.TensorDataset(torch.ones(64, 2)), batch_size=4, epochs=100_000):
            model(batch[0]).sum().backward()
            optimizer.step()
            print("stepped", flush=True)
            time.sleep(0.05)
"""


@pytest.mark.long
def test_yard_that_trains_is_saved_before_it_goes_down(shell: Shell) -> None:
    """And `down --purge` keeps what was saved."""
    running = shell.start(
        *("up", "--state", str(shell.state), "--set", "yard.coordinator_port=0", "--set", "job.name=digits"),
        *("--set", "job.checkpoint.every_s=0", "--set", "yard.workers=1", shell.script(TRAINS)),
    )
    read_until(running, "stepped")
    down = shell.down("--purge")
    assert down.returncode == 0, down.stderr
    saved = re.search(r"^job digits: checkpoint (\d+) of step (\d+) is in ", down.stdout, re.MULTILINE)
    assert saved is not None, down.stdout
    listed = json.loads(shell.run("checkpoint", "list", "--json", "--state", str(shell.state)).stdout)["checkpoints"]
    # servers that leave in order may have taken another one since
    assert tuple(map(int, saved.groups())) in [(each["number"], each["step"]) for each in listed]
    finish(running)
    assert shell.processes() == []


WAITS = """
    import os, pathlib, sys, time

    print("has", os.environ["GREETING"], flush=True)
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.02)
    print("went on", flush=True)
    sys.exit(5)
"""


def test_script_outlives_the_terminals_of_those_who_started_and_followed_it(shell: Shell) -> None:
    """It is left running, attached to, left again by Ctrl-C. Another one loses its terminal. No output is lost."""
    assert shell.up("--set", "yard.servers=1", "--set", "yard.workers=1").returncode == 0
    coordinator = shell.status()["coordinator"]
    script, go = shell.script(WAITS), shell.folder / "go"
    shell.environment["GREETING"] = "hello"
    at = ("--coordinator", coordinator)
    detached = shell.run("run", *at, "--detach", "--env", "GREETING", script, str(go))
    assert detached.returncode == 0, detached.stderr
    number = re.match(r"launch (\d{6}) of .*/script.py has started, in 1 process\n", detached.stdout)
    assert number is not None, detached.stdout
    follower = shell.start("attach", *at, number[1])
    read_error_until(follower, "Ctrl-C detaches")
    follower.send_signal(signal.SIGINT)
    assert finish(follower).returncode == 0
    owner = shell.start("run", *at, "--env", "GREETING=bye", script, str(go))
    read_until(owner, "has bye")
    owner.send_signal(signal.SIGHUP)
    assert finish(owner).returncode == -signal.SIGHUP
    running = [each["launch"] for each in shell.status()["launches"] if each["running"]]
    assert len(running) == 2
    follower = shell.start("attach", *at, number[1])
    read_error_until(follower, "Ctrl-C detaches")
    go.touch()
    ended = finish(follower)
    assert (ended.returncode, "went on" in ended.stdout) == (5, True)
    for launch, printed in zip(sorted(running, key=lambda each: str(each) != number[1]), ("hello", "bye"), strict=True):
        shown = shell.run("logs", *at, "--follow", str(launch))
        assert shown.stdout.splitlines() == [f"has {printed}", "went on"]
        assert "[agent] the launch has failed" in shown.stderr
    log = (shell.state / "logs" / "agent.log").read_text()
    assert f"launch {number[1]} of {script} failed, after" in log
    assert shell.down("--now").returncode == 0


@pytest.mark.long
def test_script_that_was_left_running_goes_on_after_its_agent_was_killed(shell: Shell) -> None:
    """Under its number, so that those who follow it follow it still."""
    assert shell.up("--set", "yard.servers=1", "--set", "yard.workers=1").returncode == 0
    at = ("--coordinator", shell.status()["coordinator"])
    script, go = shell.script(WAITS), shell.folder / "go"
    assert shell.run("run", *at, "--detach", "--env", "GREETING=hello", script, str(go)).returncode == 0
    (launch,) = shell.status()["launches"]
    follower = shell.start("attach", *at)
    read_error_until(follower, "Ctrl-C detaches")
    os.kill(shell.pid_of("agent"), signal.SIGKILL)
    read_until(follower, "has hello")
    go.touch()
    assert finish(follower).returncode == 5
    (after,) = shell.status()["launches"]
    assert (after["launch"], after["started_s"], after["exit_code"]) == (launch["launch"], launch["started_s"], 5)
    assert shell.run("logs", *at).stdout.splitlines() == ["has hello", "has hello", "went on"]
    assert shell.down("--now").returncode == 0


@pytest.mark.long("coordinator")
@pytest.mark.parametrize("role", ["coordinator", "server", "agent"])
def test_killed_process_of_a_yard_is_back_in_its_place(shell: Shell, role: str) -> None:
    assert shell.up().returncode == 0
    before = read_state(shell.state)
    assert before is not None
    coordinator = before.coordinator
    victim = next(process for process in before.processes if process.role == role)
    os.kill(victim.pid, signal.SIGKILL)

    def back() -> RoleProcess | None:
        state = read_state(shell.state)
        assert state is not None
        same = [process for process in state.processes if process.name == victim.name and process.pid != victim.pid]
        return same[0] if same and same[0].ready else None

    await_true(lambda: back() is not None, "a new process in the place of the killed one")
    successor = back()
    assert successor is not None
    assert successor.address == victim.address

    # a yard that mends itself is waited for, and used
    again = shell.up(shell.script("print('trained')\n"))
    assert (again.returncode, "trained" in again.stdout) == (0, True), again.stderr
    status = shell.status()
    assert status["coordinator"] == coordinator
    assert sorted(member["role"] for member in status["members"]) == ["agent", "server", "server"]
    if role != "coordinator":
        assert successor.pid in {member["pid"] for member in status["members"]}
    (restart, *_) = status["local"]["restarts"]
    assert (restart["name"], restart["pid"]) == (victim.name, victim.pid)
    assert (restart["ending"], restart["number"]) == ("was killed by SIGKILL", 1)
    shown = shell.run("status", "--state", str(shell.state)).stdout
    assert re.search(rf"{victim.name} +{victim.pid} +was killed by SIGKILL +1 of 10 within 3600 s", shown)
    said = f"{victim.name} (pid {victim.pid}) was killed by SIGKILL; restart 1 of 10 within 3600 s, in 0.2 s"
    assert said in (shell.state / "logs" / "supervisor.log").read_text()
    assert (shell.state / "logs" / f"{victim.name}.log.former").exists()
    assert shell.down().returncode == 0
    assert shell.processes() == []


@pytest.mark.long
def test_yard_that_has_lost_a_server_for_good_is_not_used(shell: Shell) -> None:
    assert shell.up("--set", "yard.restarts_max=0").returncode == 0
    victim = shell.pid_of("server")
    os.kill(victim, signal.SIGKILL)
    await_true(lambda: bool(shell.status()["local"]["given_up"]), "the server is given up")
    again = shell.up(shell.script("print('trained')\n"))
    assert again.returncode == 1
    ending = "was killed by SIGKILL and is not restarted"
    assert re.search(rf"incomplete: server-\d \(pid {victim}\) {ending}", again.stderr)
    assert f"shardyard down --state {shell.state}" in again.stderr
    assert "trained" not in again.stdout
    shown = shell.run("status", "--state", str(shell.state)).stdout
    assert re.search(r"server-\d was killed by SIGKILL and is not restarted: .*yard\.restarts_max is 0", shown)
    assert shell.down().returncode == 0


@pytest.mark.long
def test_process_that_dies_again_and_again_is_given_up_in_the_end(shell: Shell) -> None:
    assert shell.up("--set", "yard.restarts_max=2").returncode == 0
    (shell.state / "settings.yaml").write_text('{"yard": {"servers": 0}}')  # from now on no role can start
    os.kill(shell.pid_of("server"), signal.SIGKILL)
    await_true(lambda: bool(shell.status()["local"]["given_up"]), "the server is given up")
    local = shell.status()["local"]
    assert [restart["number"] for restart in local["restarts"]] == [1, 2]
    assert [restart["ending"] for restart in local["restarts"]] == ["was killed by SIGKILL", "ended with exit code 2"]
    (why,) = local["given_up"].values()
    assert why.startswith("ended with exit code 2 and is not restarted: it was restarted 2 times within 3600 s")
    assert "yard.servers" in (shell.state / "logs" / "supervisor.log").read_text()
    assert shell.down().returncode == 0
    assert shell.processes() == []


@pytest.mark.long
def test_supervisor_that_died_harms_nobody_and_is_replaced_by_the_next_up(shell: Shell) -> None:
    assert shell.up().returncode == 0
    pids = {process.pid for process in shell.processes()}
    supervisor = shell.pid_of("supervisor")
    os.kill(supervisor, signal.SIGKILL)
    await_true(lambda: is_gone(supervisor), "the supervisor's end")
    shown = shell.run("status", "--state", str(shell.state)).stdout
    assert "this yard has no supervisor" in shown
    assert {process.pid for process in shell.processes()} == pids - {supervisor}

    again = shell.up()
    assert again.returncode == 0, again.stderr
    assert "a new supervisor" in again.stdout
    assert pids - {supervisor} < {process.pid for process in shell.processes()}
    victim = shell.pid_of("server")
    os.kill(victim, signal.SIGKILL)
    await_true(lambda: len(shell.status()["local"]["restarts"]) == 1, "the server is started again")
    assert shell.status()["local"]["restarts"][0]["ending"] == "has ended"
    assert shell.down().returncode == 0
    assert shell.processes() == []


@pytest.mark.long
def test_supervisor_that_dies_while_a_script_runs_is_replaced_at_once(shell: Shell) -> None:
    go = shell.folder / "go"
    script = (
        f"import os, time\nprint('begun', flush=True)\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.02)\n"
    )
    process = shell.start(
        "up",
        "--state",
        str(shell.state),
        "--set",
        "yard.coordinator_port=0",
        "--set",
        "yard.workers=1",
        shell.script(script),
    )
    read_until(process, "begun")
    supervisor, server = shell.pid_of("supervisor"), shell.pid_of("server")
    os.kill(supervisor, signal.SIGKILL)
    read_until(process, f"supervisor (pid {supervisor}) has ended; started supervisor")
    os.kill(server, signal.SIGKILL)
    read_until(process, f"(pid {server}) has ended; restart 1 of")
    go.touch()
    ended = finish(process)
    assert ended.returncode == 0, ended.stderr
    assert shell.down().returncode == 0
    assert shell.processes() == []


@pytest.mark.long
def test_run_starts_a_killed_server_again_and_says_so(shell: Shell) -> None:
    go = shell.folder / "go"
    script = (
        f"import os, time\nprint('ready', flush=True)\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.02)\n"
    )
    process = shell.start("run", "--workers", "1", shell.script(script))
    read_until(process, "ready")
    victim = shell.pid_of("server")
    os.kill(victim, signal.SIGKILL)
    await_true(lambda: is_gone(victim), "the server's end")
    await_true(lambda: len(shell.pids_of("server")) == 2, "two servers")
    go.touch()
    ended = finish(process)
    assert ended.returncode == 0, ended.stderr
    assert f"(pid {victim}) was killed by SIGKILL; restart 1 of 10 within 3600 s" in ended.stderr
    assert shell.processes() == []


@pytest.mark.long
def test_script_is_launched_again_when_its_agent_has_died(shell: Shell) -> None:
    go = shell.folder / "go"
    script = f"""
        import os, time
        print('begun', os.getpid(), flush=True)
        while not os.path.exists({str(go)!r}):
            time.sleep(0.02)
    """
    process = shell.start("run", "--workers", "1", shell.script(script))
    read_until(process, "begun")
    os.kill(shell.pid_of("agent"), signal.SIGKILL)
    read_until(process, "begun")
    go.touch()
    ended = finish(process)
    assert ended.returncode == 0, ended.stderr
    assert "died, and the script's processes with it; the script is launched again" in ended.stderr
    assert shell.processes() == []


def test_yard_that_cannot_start_says_so_as_its_process_did_and_leaves_nothing(shell: Shell) -> None:
    shell.environment["PYTHONPATH"] = str(shell.folder)
    (shell.folder / "shardyard_ps_server.py").write_text("raise RuntimeError('a broken installation')\n")
    ended = shell.up()
    assert ended.returncode == 1
    told = r"^error: server-\d \(pid \d+\) ended with exit code 1 before it was ready"
    assert re.search(told, ended.stderr, re.MULTILINE)  # a start that is slow has said before what it waits for
    assert "a broken installation" in ended.stderr
    assert shell.processes() == []
    assert "no yard is up" in shell.down().stdout


COUNTS = """
    import time
    import torch
    import shardyard as sy

    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(SAMPLES))

    with sy.connect() as job:
        model = Counts()
        model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for (indices,) in job.batches(torch.utils.data.TensorDataset(torch.arange(SAMPLES)), batch_size=2, epochs=1):
            optimizer.zero_grad()
            (-model.weight[indices]).sum().backward()  # adds 1 for each sample
            optimizer.step()
            time.sleep(0.02)
        print("counted", sorted(set(model.weight.tolist())), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("durability", ["checkpoint", "wal"])
def test_yard_that_has_died_goes_on_with_its_jobs_and_says_with_what(shell: Shell, durability: str) -> None:
    settings = {
        "job.durability": durability,
        "job.checkpoint.every_steps": 10,
        "job.data.batches_per_data_shard": 5,
        "membership.heartbeat_ms": 100,
        "membership.lease_ms": 1_500,
        "yard.workers": 1,
    }
    sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = ("--state", str(shell.state), "--set", "yard.coordinator_port=0", *sets)
    script = shell.script(COUNTS.replace("SAMPLES", "300"))
    first = shell.start("up", *command, script)

    def checkpoints() -> int:
        state = read_state(shell.state)
        if state is None or not any(process.role == "coordinator" and process.ready for process in state.roles):
            return 0
        try:
            report = ask(network_to(state.coordinator), state.coordinator)
        except CoordinatorUnavailable:  # busy; it is asked again
            return 0
        return max((job.checkpoint.number for job in report.status.jobs), default=0)

    await_true(lambda: checkpoints() >= 3, "three checkpoints")
    for process in shell.processes():
        process.kill()
    finish(first)
    ended = shell.run("up", *command, script)
    assert ended.returncode == 0, ended.stderr
    assert "is left; starting a new yard" in ended.stdout
    found = re.search(
        r"^job default goes on from checkpoint (\d+) of step (\d+), (\d+) s old: (.*)$", ended.stdout, re.M
    )
    assert found is not None, ended.stdout
    assert int(found[1]) >= 3
    assert int(found[2]) > 0
    assert int(found[3]) < DEADLINE_S
    again = "data shards? leased anew" if durability == "checkpoint" else "what logs say after it"
    assert re.search(again, found[4]), found[4]
    assert "counted [1.0]" in ended.stdout
    assert shell.down().returncode == 0


def test_up_that_is_killed_leaves_a_yard_that_down_can_stop(shell: Shell) -> None:
    process = shell.start("up", "--state", str(shell.state), "--set", "yard.coordinator_port=0")
    await_true(lambda: len(shell.processes()) >= 3, "some processes of the yard")
    process.kill()
    process.wait(DEADLINE_S)
    assert shell.processes() != []
    assert shell.down().returncode == 0
    await_true(lambda: shell.processes() == [], "the processes of a start that was killed")


def test_yard_whose_start_was_interrupted_is_started_anew(shell: Shell) -> None:
    """`up` and its supervisor are killed before the agent is started. No process of theirs stays."""
    arguments = ("--set", "yard.coordinator_port=0", "--set", "yard.servers=1", "--set", "yard.workers=1")
    process = shell.start("up", "--state", str(shell.state), *arguments)
    found: list[YardState] = []

    def has_a_coordinator() -> bool:
        found[:] = filter(None, [read_state(shell.state)])
        return bool(found and found[0].roles)

    await_true(has_a_coordinator, "the coordinator of a start")
    process.kill()
    process.wait(DEADLINE_S)
    supervisor = found[0].supervisor
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    former = [each.pid for each in shell.processes()]
    again = shell.up(*arguments)
    assert again.returncode == 0, again.stderr
    # a coordinator that the supervisor had not allowed to begin has ended by itself
    told = (
        "was interrupted, and what it had started is stopped",
        f"no process of the last yard in {shell.state} is left",
    )
    assert any(f"{each}; starting a new yard" in again.stdout for each in told), again.stdout
    assert not {each.pid for each in shell.processes()} & set(former)
    assert shell.down("--now").returncode == 0


def test_process_that_nobody_has_written_down_ends_by_itself(shell: Shell) -> None:
    ended = shell.run("coordinator", "--awaits-go", "--bind", "127.0.0.1:0")
    assert ended.returncode == 1
    assert "the process that started this one ended" in ended.stderr
    assert ended.stdout == ""


@pytest.mark.long
def test_interrupted_up_stops_what_it_started(shell: Shell) -> None:
    process = shell.start("up", "--state", str(shell.state), "--set", "yard.coordinator_port=0", shell.script(SLEEPS))
    read_until(process, "ready")
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr
    assert shell.processes() == []
    assert "no yard is up" in shell.down().stdout


def test_server_that_cannot_start_is_named_with_the_end_of_its_log(shell: Shell) -> None:
    shell.environment["PYTHONPATH"] = str(shell.folder)
    (shell.folder / "shardyard_ps_server.py").write_text("raise RuntimeError('a broken installation')\n")
    ended = shell.run("run", shell.script(SLEEPS))
    assert ended.returncode == 1
    assert re.search(r"error: server-\d \(pid \d+\) ended with exit code 1 before it was ready", ended.stderr)
    assert "a broken installation" in ended.stderr
    assert shell.processes() == []
