"""Secrets stand in the files that are meant for them, and nowhere else: neither in other files of a yard that has done
work, nor in what its commands print, nor in the arguments and the environment of its processes."""

from __future__ import annotations

import base64
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shardyard.security.credentials import Credentials
from shardyard.security.identity import Role
from shardyard.security.invitations import JoinLine
from shardyard.security.local import FOLDER
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.wire import methods
from shardyard.wire.v1 import parameter_server_pb2 as server_wire
from tests.support.shells import Shell, finish, read_until, shell

__all__ = ["shell"]

TRAINS = """
import sys, time
from pathlib import Path
import torch
import shardyard as sy

with sy.connect(job="secrets") as job:
    model = torch.nn.Linear(4, 1)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    print("trained", flush=True)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.05)
    raise ValueError("it fails")
"""
OWN_FILES = {"tls.key", "ca.key", "pass.key"}
"""The names of the files that hold keys."""


def forms_of(secret: bytes) -> set[bytes]:
    """How a secret number may stand in a file: as it is, in hexadecimal, in base64, as a decimal number."""
    number = str(int.from_bytes(secret, "big")).encode()
    encoded = {base64.b64encode(secret), base64.urlsafe_b64encode(secret)}
    texts = {secret.hex().encode(), secret.hex().upper().encode(), number, *(each.rstrip(b"=") for each in encoded)}
    return {secret, secret[::-1], *texts}


def forms_of_key(pem: bytes) -> set[bytes]:
    key = serialization.load_pem_private_key(pem, None)
    lines = {line for line in pem.splitlines() if len(line) > 40 and b"-----" not in line}
    if isinstance(key, Ed25519PrivateKey):
        return lines | forms_of(key.private_bytes_raw())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return lines | forms_of(key.private_numbers().private_value.to_bytes(32, "big"))


def found_in(content: bytes, secrets: dict[str, set[bytes]]) -> list[str]:
    return [name for name, forms in secrets.items() if any(form in content for form in forms)]


def files_of(shell: Shell) -> Iterator[Path]:
    return (path for path in sorted(shell.folder.rglob("*")) if path.is_file() and not path.is_symlink())


def secrets_of(shell: Shell, line: JoinLine, stream_key: bytes) -> dict[str, set[bytes]]:
    keys = {str(path): forms_of_key(path.read_bytes()) for path in files_of(shell) if path.name in OWN_FILES}
    invitation = line.key.private_numbers().private_value.to_bytes(32, "big")
    return {**keys, "the invitation": forms_of(invitation), "the key of a stream": forms_of(stream_key)}


def a_stream_key(shell: Shell, address: str) -> bytes:
    network = GrpcNetwork(Credentials(shell.state / FOLDER / Role.WORKER.value))
    peer = network.connect(address, name="server 1")
    try:
        return peer.call(methods.ATTACH, server_wire.AttachRequest(), timeout_ms=10_000).key
    finally:
        peer.close()


@pytest.mark.parametrize(
    "form", [bytes(range(32)), bytes(range(32)).hex().encode(), base64.b64encode(bytes(range(32))), b"AAECAwQF"]
)
def test_scan_finds_a_secret_in_each_of_its_forms(form: bytes) -> None:
    expected = ["it"] if len(form) > 8 else []
    assert found_in(b"before " + form + b" after", {"it": forms_of(bytes(range(32)))}) == expected


def test_secrets_stand_nowhere_but_in_their_own_files(shell: Shell) -> None:
    assert shell.up().returncode == 0
    status = shell.status()
    coordinator = status["coordinator"]
    said: dict[str, str] = {}

    def ask(*arguments: str) -> None:
        ended = shell.run(*arguments)
        assert ended.returncode == 0, ended.stderr
        said[" ".join(arguments[:2])] = ended.stdout + ended.stderr

    here = ("--state", str(shell.state), "--coordinator", coordinator)
    go_on = shell.folder / "go-on"
    script = shell.script(TRAINS)
    training = shell.start("run", "--coordinator", coordinator, "--workers", "1", script, str(go_on))
    read_until(training, "trained")

    line_text = shell.run("invite", "--role", "viewer", "--name", "guest", *here).stdout.split()[-1]
    line = JoinLine.parse(coordinator, line_text)
    ask("join", coordinator, line_text, "--state", str(shell.folder / "guest"))
    server = next(each["address"] for each in shell.status()["members"] if each["role"] == "server")
    secrets = secrets_of(shell, line, a_stream_key(shell, server))
    assert len(secrets) >= 9, secrets.keys()
    ran = shell.processes()
    assert len(ran) >= 5, ran
    for process in ran:
        for part in ("cmdline", "environ"):
            assert found_in(Path(f"/proc/{process.pid}/{part}").read_bytes(), secrets) == [], (process, part)
    ask("checkpoint", "take", "secrets", *here)
    ask("identities", "revoke", "viewer/guest", *here)
    ask("identities", "list", *here)
    ask("status", *here)
    ask("audit", "--yard", "--state", str(shell.state))
    go_on.touch()
    ended = finish(training)
    assert "it fails" in ended.stderr
    said["run"] = ended.stdout + ended.stderr
    assert shell.down().returncode == 0

    for command, text in said.items():
        assert found_in(text.encode(), secrets) == [], command
    scanned = 0
    for path in files_of(shell):
        if path.name in OWN_FILES:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
            assert found_in(path.read_bytes(), secrets) == [str(path)]
        else:
            scanned += 1
            assert found_in(path.read_bytes(), secrets) == [], path
    assert scanned > 15, list(files_of(shell))
