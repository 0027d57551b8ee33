"""Each method of each service is called with a certificate of each role, over TLS: what the table of roles forbids is
refused before the handler runs, and what it allows reaches the handler (promise S1 in docs/guides/security.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from shardyard.domain import errors
from shardyard.security.identity import Identity, Role
from shardyard.security.roles import ALLOWED
from shardyard.transport.error_codes import from_rpc_error
from shardyard.transport.interfaces import Context, Service
from shardyard.wire import methods
from shardyard.wire.method import Method
from shardyard_coordinator.service.identities import YardIdentities
from tests.support.identities import Identities, raw_channel

ALL: list[Method[Any, Any]] = [each for each in vars(methods).values() if isinstance(each, Method)]
REACHED = "the handler was reached"


def test_every_method_is_in_the_table_and_nothing_else_is() -> None:
    assert {method.path for method in ALL} == set(ALLOWED)


def test_each_method_is_for_somebody_and_none_is_for_all_but_enrolment() -> None:
    everybody = set(Role)
    assert [path for path, roles in ALLOWED.items() if not roles] == []
    assert [path for path, roles in ALLOWED.items() if roles == everybody] == [methods.ENROL.path]
    assert [path for path, roles in ALLOWED.items() if Role.INVITED in roles] == [methods.ENROL.path]


class Door:
    """All services behind one port. Their handlers note who calls, and refuse with REACHED."""

    def __init__(self, folder: Path) -> None:
        self.identities = Identities(folder)
        self.callers: list[Identity | None] = []
        self.services = []
        for name in ("Agent", "Coordinator", "ParameterServer"):
            service = Service(name)
            for method in ALL:
                if method.service.endswith("." + name):
                    service.on(method, self.handle)
            self.services.append(service)

    def handle(self, _: object, context: Context) -> None:
        self.callers.append(None if context.speaker is None else context.speaker.identity)
        raise errors.NotFound(REACHED)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Door:
    return Door(tmp_path_factory.mktemp("identities"))


@pytest.fixture(params=["Agent", "Coordinator", "ParameterServer"])
def served(request: pytest.FixtureRequest, door: Door) -> Iterator[tuple[str, str]]:
    """The name of a service, and where it listens."""
    role = {"Agent": Role.AGENT, "Coordinator": Role.COORDINATOR, "ParameterServer": Role.SERVER}[request.param]
    service = next(each for each in door.services if each.name == request.param)
    with door.identities.serving(service, role) as address:
        yield request.param, address


def call(channel: grpc.Channel, method: Method[Any, Any]) -> errors.ShardyardError:
    """What a call with an empty message ends with."""
    kind = ("stream" if method.streams_in else "unary") + "_" + ("stream" if method.streams_out else "unary")
    stub = getattr(channel, kind)(method.path)
    sent = iter([b""]) if method.streams_in else b""
    try:
        answer = stub(sent, timeout=10)
        if method.streams_out:
            list(answer)
    except grpc.RpcError as error:
        return from_rpc_error(error, peer="the server", path=method.path, unavailable=errors.ServerUnavailable)
    raise AssertionError(f"{method.path} was answered")


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.INVITED])
def test_role_may_call_what_the_table_says_and_nothing_else(door: Door, served: tuple[str, str], role: Role) -> None:
    name, address = served
    serving = {"Agent": "agent", "Coordinator": "coordinator", "ParameterServer": "server"}[name]
    with raw_channel(address, serving, door.identities.of(role)) as channel:
        for method in ALL:
            if not method.service.endswith("." + name):
                continue
            door.callers.clear()
            said = call(channel, method)
            if role in ALLOWED[method.path]:
                # an empty frame is no message, which is found after the door
                reached = REACHED in said.what or isinstance(said, errors.MalformedPayload)
                assert reached, (method.path, role, said)
                assert door.callers in ([], [Identity(door.identities.authority.yard, role, role.value)])
            else:
                assert isinstance(said, errors.NotPermitted), (method.path, role, said)
                assert door.callers == [], (method.path, role)


def test_invited_process_reaches_enrolment_only(door: Door, tmp_path: Path) -> None:
    """A coordinator trusts the keys of open invitations; whatever their certificates say, they are `invited`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    from shardyard.config.settings import SecuritySettings
    from shardyard.security.authority import certificate_of, key_to_pem, new_key
    from shardyard.security.invitations import X962, JoinLine, Point
    from shardyard.transport.grpc_server import GrpcServer

    identities = YardIdentities(SecuritySettings(), tmp_path / "identity" / "authority")
    key = new_key()
    point = key.public_key().public_bytes(X962, Point)
    made = identities.invitations.add(Role.VIEWER, "", point, 600, 1)
    line = JoinLine("", made.id, key, identities.authority.yard, identities.authority.public_key)
    coordinator = next(each for each in door.services if each.name == "Coordinator")
    listener = GrpcServer("127.0.0.1:0", [coordinator], identities.security, threads=4)
    listener.start()
    try:
        own = new_key()
        lying = (
            certificate_of("x", made.authority, own.public_key(), 3_600, is_authority=False)
            .add_extension(
                x509.SubjectAlternativeName(
                    [x509.UniformResourceIdentifier(f"spiffe://{identities.authority.yard}/operator/x")]
                ),
                critical=False,
            )
            .sign(key, hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
        )
        honest = line.credentials()
        for certificate, secret in ((honest.certificate, honest.key), (lying, key_to_pem(own))):
            shown = grpc.ssl_channel_credentials(honest.authorities, secret, certificate)
            options = [("grpc.ssl_target_name_override", "coordinator.shardyard")]
            with grpc.secure_channel(listener.address, shown, options) as channel:
                for method in ALL:
                    if method.service.endswith(".Coordinator"):
                        door.callers.clear()
                        said = call(channel, method)
                        if method is methods.ENROL:
                            assert REACHED in said.what
                            assert door.callers == [Identity(identities.authority.yard, Role.INVITED, made.id)]
                        else:
                            assert isinstance(said, errors.NotPermitted), (method.path, said)
                            assert "invited" in said.what
    finally:
        listener.stop()
