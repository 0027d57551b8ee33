"""docker/compose.yaml, built and run on a real engine: it trains, is confined, comes back, goes without a trace.

One yard for the whole file, under a project name and an image tag of its own; the last test takes it down. Only what
was made here is removed; the images stay as :test, so that the next build is quick.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "docker" / "compose.yaml"
GPU_FILE = ROOT / "docker" / "compose.gpu.yaml"
SERVICES = ("coordinator", "server", "worker")
TORCH_FREE = ("coordinator", "server")
UID = 10001
CALL_S = 60
BUILD_S = 800
UP_S = 300
TRAIN_S = 240
SETTLE_S = 90
KEPT_TAG = "test"
NO_ENGINE = """no Docker engine, or no docker compose, can be used here:
{reason}
Start the engine and install docker compose (on Debian: apt-get install docker.io docker-compose), see
docs/guides/containers.md. `make test-containers` runs these tests; `make test` leaves them out."""


def run(command: Sequence[str], *, timeout_s: float = CALL_S, environment: dict[str, str] | None = None) -> str:
    """Standard output of a command that must succeed."""
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **(environment or {})}
    )
    told = f"{ended.stdout[-4000:]}{ended.stderr[-4000:]}"
    assert ended.returncode == 0, f"{' '.join(command)}: exit status {ended.returncode}\n{told}"
    return ended.stdout


def refused(command: Sequence[str]) -> str:
    """All that a command prints that must fail."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=CALL_S)
    assert ended.returncode != 0, f"{' '.join(command)} succeeded:\n{ended.stdout[-4000:]}"
    return ended.stdout + ended.stderr


def find_compose() -> list[str]:
    """The command of docker compose, v2 or 1.29. Fails the test where nothing can be run."""
    try:
        run(["docker", "info"])
    except (OSError, AssertionError, subprocess.TimeoutExpired) as error:
        pytest.fail(NO_ENGINE.format(reason=error), pytrace=False)
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        pytest.fail(NO_ENGINE.format(reason="there is neither `docker compose` nor docker-compose"), pytrace=False)
    return ["docker-compose"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Yard:
    """A project of docker compose that is all this file's own."""

    command: list[str]
    project: str = field(default_factory=lambda: f"shardyard-test-{uuid.uuid4().hex[:8]}")
    port: int = field(default_factory=free_port)

    def compose(self, *arguments: str, timeout_s: float = CALL_S, files: Sequence[Path] = (COMPOSE_FILE,)) -> str:
        named = [part for file in files for part in ("-f", str(file))]
        return run(
            [*self.command, "-p", self.project, *named, *arguments],
            timeout_s=timeout_s,
            environment={"YARD_PORT": str(self.port), "YARD_TAG": self.project, "YARD_WORKERS": "2"},
        )

    def image(self, service: str) -> str:
        return f"shardyard-{service}:{self.project}"

    def containers(self, service: str) -> list[str]:
        """Ids of a service's containers, without those of `compose run`."""
        labels = (f"project={self.project}", f"service={service}", "oneoff=False")
        filters = [f"--filter=label=com.docker.compose.{label}" for label in labels]
        return run(["docker", "ps", "-aq", "--no-trunc", *filters]).split()

    def all_containers(self) -> list[str]:
        return [container for service in SERVICES for container in self.containers(service)]

    def left_behind(self) -> list[str]:
        """All that the engine has of this project, except images."""
        ours = f"--filter=label=com.docker.compose.project={self.project}"
        return [
            *(f"container {name}" for name in run(["docker", "ps", "-aq", ours]).split()),
            *(f"volume {name}" for name in run(["docker", "volume", "ls", "-q", ours]).split()),
            *(f"network {name}" for name in run(["docker", "network", "ls", "-q", ours]).split()),
        ]

    def status(self) -> dict[str, Any]:
        (coordinator,) = self.containers("coordinator")
        return dict(json.loads(run(["docker", "exec", coordinator, "shardyard", "status", "--json"])))

    def servers(self) -> dict[str, int]:
        """The incarnation of each server that the coordinator has, by the name of its container."""
        members = self.status()["members"]
        return {member["host"]: member["incarnation"] for member in members if member["role"] == "server"}

    def attached(self) -> dict[str, list[int]]:
        """How many workers share memory with each server, and how many do not."""
        servers = self.status()["servers"]
        return {how: [server[f"workers_{how}"] for server in servers] for how in ("attached", "streaming")}

    def job(self, name: str) -> dict[str, Any]:
        """The latest of that name; empty before it has begun."""
        return next((dict(job) for job in reversed(self.status()["jobs"]) if job["name"] == name), {})


def state(container: str) -> dict[str, Any]:
    (found,) = json.loads(run(["docker", "inspect", container]))
    return dict(found)


def logs(container: str) -> str:
    ended = subprocess.run(["docker", "logs", container], capture_output=True, text=True, timeout=CALL_S)
    return ended.stdout + ended.stderr


def wait_until(what: str, holds: Callable[[], bool], *, deadline_s: float, explain: Callable[[], str]) -> None:
    until = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < until, f"not within {deadline_s:.0f} s: {what}\n{explain()}"
        time.sleep(0.25)


def wait_until_healthy(container: str) -> None:
    wait_until(
        "the container is healthy",
        lambda: bool(state(container)["State"]["Health"]["Status"] == "healthy"),
        deadline_s=SETTLE_S,
        explain=lambda: logs(container)[-2000:],
    )


def accuracies(printed: str) -> list[float]:
    return [float(percent) for percent in re.findall(r"held-out accuracy ([0-9.]+)%", printed)]


def keep_images(yard: Yard) -> None:
    """Moves the images to the tag that stays, and removes those that had it."""
    for service in SERVICES:
        kept, made = f"shardyard-{service}:{KEPT_TAG}", yard.image(service)
        if not run(["docker", "images", "-q", made]).strip():
            continue
        before = run(["docker", "images", "-q", "--no-trunc", kept]).strip()
        run(["docker", "tag", made, kept])
        run(["docker", "image", "rm", made])
        if before and before != run(["docker", "images", "-q", "--no-trunc", kept]).strip():
            # refused where another tag or a container of somebody's has it
            subprocess.run(["docker", "image", "rm", before], capture_output=True, timeout=CALL_S)


@pytest.fixture(scope="module")
def built() -> Iterator[Yard]:
    """The images are built."""
    yard = Yard(find_compose())
    try:
        yard.compose("build", timeout_s=BUILD_S)
        yield yard
    finally:
        keep_images(yard)


@pytest.fixture(scope="module")
def yard(built: Yard) -> Iterator[Yard]:
    """The yard is up: coordinator and servers are healthy, the worker has been started."""
    try:
        try:
            built.compose("up", "-d", timeout_s=UP_S)
        except AssertionError as error:
            told = "\n".join(f"{state(each)['Name']}:\n{logs(each)[-2000:]}" for each in built.all_containers())
            pytest.fail(f"{error}\n{told}", pytrace=False)
        yield built
    finally:
        built.compose("down", "-v", timeout_s=CALL_S)


def test_worker_trains_the_digits_and_ends_well(yard: Yard) -> None:
    (worker,) = yard.containers("worker")
    wait_until(
        "the worker has ended",
        lambda: state(worker)["State"]["Status"] == "exited",
        deadline_s=TRAIN_S,
        explain=lambda: logs(worker),
    )
    printed = logs(worker)
    assert state(worker)["State"]["ExitCode"] == 0, printed
    assert accuracies(printed), printed
    assert min(accuracies(printed)) >= 97.0, printed
    assert state(worker)["RestartCount"] == 0


def test_coordinator_and_two_servers_stay_up_and_healthy(yard: Yard) -> None:
    coordinators, servers = yard.containers("coordinator"), yard.containers("server")
    assert (len(coordinators), len(servers)) == (1, 2)
    for container in (*coordinators, *servers):
        wait_until_healthy(container)
        assert state(container)["RestartCount"] == 0
    assert sorted(yard.servers()) == sorted(each[:12] for each in servers)


def test_health_check_fails_where_nothing_serves(yard: Yard) -> None:
    (coordinator,) = yard.containers("coordinator")
    check = state(coordinator)["Config"]["Healthcheck"]["Test"][1:]
    assert "SERVING" in run(["docker", "exec", coordinator, *check])
    assert "UNAVAILABLE" in refused(["docker", "exec", coordinator, *check[:-1], "127.0.0.1:7999"])


def test_no_process_is_root_and_the_root_cannot_be_written(yard: Yard) -> None:
    for container in (*yard.containers("coordinator"), *yard.containers("server")):
        assert run(["docker", "exec", container, "id", "-u"]).strip() == str(UID)
        users = {line.split()[0] for line in run(["docker", "top", container, "-eo", "uid,pid"]).splitlines()[1:]}
        assert users == {str(UID)}
        assert "Read-only file system" in refused(
            ["docker", "exec", "--user=0", container, "touch", "/opt/shardyard/x"]
        )
    for container in yard.all_containers():
        found = state(container)
        assert found["Config"]["User"] == f"{UID}:{UID}"
        assert found["HostConfig"]["ReadonlyRootfs"]
        assert found["HostConfig"]["CapDrop"] == ["ALL"]
        assert "no-new-privileges:true" in found["HostConfig"]["SecurityOpt"]


def test_coordinator_and_servers_have_no_torch(built: Yard) -> None:
    for service in TORCH_FREE:
        run_python = ["docker", "run", "--rm", "--entrypoint", "python", built.image(service), "-P", "-c"]
        assert "No module named 'torch'" in refused([*run_python, "import torch"])
        run([*run_python, "import shardyard, grpc"])


SHELLS = """
import os, shutil
names = "sh", "bash", "dash", "pip", "apt", "apt-get", "dpkg", "perl", "gcc", "cc"
print([name for name in names if shutil.which(name) or os.path.lexists(f"/bin/{name}")])
"""


def test_coordinator_and_servers_have_no_shell_and_install_nothing(built: Yard) -> None:
    for service in TORCH_FREE:
        image = built.image(service)
        assert run(["docker", "run", "--rm", "--entrypoint", "python", image, "-P", "-c", SHELLS]) == "[]\n"
        assert "No module named" in refused(["docker", "run", "--rm", "--entrypoint", "python", image, "-m", "pip"])


def test_coordinator_is_published_on_the_loopback_alone(yard: Yard) -> None:
    published = {
        service: [
            (binding["HostIp"], binding["HostPort"])
            for container in yard.containers(service)
            for bindings in state(container)["NetworkSettings"]["Ports"].values()
            for binding in bindings or ()
        ]
        for service in SERVICES
    }
    assert published == {"coordinator": [("127.0.0.1", str(yard.port))], "server": [], "worker": []}


KERNELS = """
import hashlib, json, pathlib, sys
def read(folder):
    files = (file for file in pathlib.Path(folder).rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
shipped, present = read("/opt/shardyard/kernels"), read("/tmp/shardyard-kernels")
new = sorted(present.keys() - shipped.keys())
json.dump({"shipped": len(shipped), "new": new, "same": shipped == present}, sys.stdout)
"""


def test_servers_use_the_kernels_of_the_image(yard: Yard) -> None:
    for server in yard.containers("server"):
        told = json.loads(run(["docker", "exec", server, "python", "-P", "-c", KERNELS]))
        assert told["shipped"] > 0
        assert told["same"], f"a server compiled at its start: {told}"


def test_another_processor_compiles_its_own_kernels_on_a_read_only_root(built: Yard) -> None:
    warm = "from shardyard_ps_server.jit import optimizer_warmup as jit; jit.warm(jit.every_loop(['float32']))\n"
    work = warm + KERNELS
    confined = ["--read-only", "--tmpfs=/tmp", "--env=NUMBA_CPU_NAME=generic", "--entrypoint=python"]
    python = ["-P", "/opt/shardyard/bin/entrypoint.py", "python", "-P", "-W", "error", "-c", work]
    told = json.loads(run(["docker", "run", "--rm", *confined, built.image("server"), *python], timeout_s=300))
    assert told["shipped"] > 0
    assert not told["same"]


def test_server_without_a_writable_folder_says_what_it_needs(built: Yard) -> None:
    printed = refused(["docker", "run", "--rm", "--read-only", built.image("server")])
    assert "docker run --tmpfs /tmp" in printed


def test_killed_server_is_restarted_and_registers_again(yard: Yard) -> None:
    killed, other = yard.containers("server")
    before = yard.servers()
    kill(yard, killed)
    wait_until(
        "the killed server is registered anew",
        lambda: yard.servers().get(killed[:12], 0) > before[killed[:12]],
        deadline_s=SETTLE_S,
        explain=lambda: logs(killed)[-2000:],
    )
    wait_until_healthy(killed)
    assert state(killed)["RestartCount"] == 1
    assert yard.servers()[other[:12]] == before[other[:12]]
    assert len(yard.servers()) == 2


def kill(yard: Yard, container: str) -> None:
    """From outside: the engine takes `docker kill` for a wish to stop, and no process can kill the first one of its own
    namespace."""
    pid = state(container)["State"]["Pid"]
    ends = f"import os; os.kill({pid}, 9)"
    run(["docker", "run", "--rm", "--pid=host", "--user=0", "--entrypoint=python", yard.image("server"), "-c", ends])


# as if nothing had happened. At this constant rate an asynchronous job's accuracy falls below 95% at some steps,
# whether a process died or not
SYNC = {"SHARDYARD__JOB__CONSISTENCY__MODE": "sync", "SHARDYARD__JOB__SEED": "1"}


def train_long(yard: Yard, folder: Path, name: str, **environment: str) -> str:
    """Begins to train again, for long enough that something can die meanwhile, with partitions on every server. The
    worker's container."""
    override = folder / "compose.yaml"
    script = ["--workers", "2", "--", "/opt/shardyard/examples/digits/train.py", "--job", name, "--epochs", "40"]
    worker = {"command": script, "environment": {"SHARDYARD__JOB__PARTITIONS": "4", **environment}}
    override.write_text(json.dumps({"services": {"worker": worker}}))
    yard.compose("up", "-d", "worker", files=(COMPOSE_FILE, override), timeout_s=UP_S)
    (container,) = yard.containers("worker")
    wait_until(
        "the job has taken steps",
        lambda: yard.job(name).get("step", 0) > 20,
        deadline_s=SETTLE_S,
        explain=lambda: logs(container)[-2000:],
    )
    return container


def ends_well(worker: str) -> str:
    """What it printed."""
    wait_until(
        "the worker has ended",
        lambda: state(worker)["State"]["Status"] == "exited",
        deadline_s=TRAIN_S,
        explain=lambda: logs(worker)[-4000:],
    )
    printed = logs(worker)
    assert state(worker)["State"]["ExitCode"] == 0, printed[-4000:]
    assert accuracies(printed), printed[-4000:]
    assert min(accuracies(printed)) >= 97.0, printed[-4000:]
    return printed


def test_job_goes_on_when_a_servers_container_is_killed(yard: Yard, tmp_path: Path) -> None:
    killed, _ = yard.containers("server")
    restarts, before = state(killed)["RestartCount"], yard.servers()
    worker = train_long(yard, tmp_path, "server-dies", **SYNC)
    assert yard.attached() == {"attached": [2, 2], "streaming": [0, 0]}, "through the sockets in the shared folder"
    kill(yard, killed)
    ends_well(worker)
    assert state(killed)["RestartCount"] == restarts + 1
    assert yard.servers()[killed[:12]] > before[killed[:12]]
    job = yard.job("server-dies")
    assert (job["state"], job["generation"] > 1) == ("finished", True), job
    assert state(worker)["RestartCount"] == 0, "the worker has waited for the server"


def test_job_goes_on_when_the_agents_container_is_killed(yard: Yard, tmp_path: Path) -> None:
    worker = train_long(yard, tmp_path, "agent-dies", **SYNC)
    kill(yard, worker)
    ends_well(worker)
    assert state(worker)["RestartCount"] == 1
    assert yard.job("agent-dies")["state"] == "finished"


def test_own_script_is_mounted_and_trains(yard: Yard, tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    source = (ROOT / "examples" / "digits" / "train.py").read_text()
    script.write_text(source.replace("held-out accuracy", "mine: held-out accuracy").replace('"digits"', '"mine"'))
    shutil.copy(ROOT / "examples" / "digits" / "digits.csv.gz", tmp_path)
    # readable for the container's user
    tmp_path.chmod(0o755)
    script.chmod(0o644)
    mount = f"{tmp_path}:/work:ro"
    arguments = ("--workers", "1", "/work/mine.py", "--epochs", "3")
    printed = yard.compose("run", "--rm", "-T", "-v", mount, "worker", *arguments, timeout_s=TRAIN_S)
    assert "mine: held-out accuracy" in printed
    assert min(accuracies(printed)) >= 80.0, printed


def test_gpu_override_gives_workers_gpus_and_the_same_release_of_torch() -> None:
    yard = Yard(find_compose())
    plain = yaml.safe_load(yard.compose("config"))["services"]
    services = yaml.safe_load(yard.compose("config", files=(COMPOSE_FILE, GPU_FILE)))["services"]
    (device,) = services["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert services["worker"]["build"]["args"]["TORCH"] == f"torch==={pinned}"
    assert services["worker"]["image"] != plain["worker"]["image"]
    assert {name: services[name] for name in TORCH_FREE} == {name: plain[name] for name in TORCH_FREE}


def test_stop_is_clean_and_down_leaves_nothing(yard: Yard) -> None:
    services = {name: yard.containers(name) for name in TORCH_FREE}
    yard.compose("stop")
    for container in (*services["coordinator"], *services["server"]):
        ended = state(container)["State"]
        assert (ended["Status"], ended["ExitCode"], ended["OOMKilled"]) == ("exited", 0, False), logs(container)[-2000:]
        assert "Traceback" not in logs(container)
    yard.compose("down", "-v")
    assert yard.left_behind() == []
