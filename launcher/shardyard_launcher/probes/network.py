"""What `shardyard doctor` checks between this machine and a yard: name, TCP, TLS, gRPC, releases, clock, members.

Owns: the order, from the lowest layer up; after a failed step, the steps that depend on it are skipped. Invariants:
each connection has a deadline. What the other side sends is bounded and never trusted. Must not know: how findings are
shown.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation
from shardyard.domain.limits import PROTOCOL
from shardyard.transport.grpc_client import OPTIONS, GrpcNetwork
from shardyard.transport.grpc_server import split_address
from shardyard.transport.tls import open_channel
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.probes.findings import Finding, Probe, Verdict, carry_out, failed, ok, warning

CONNECT_S: Final = 3.0
CALL_MS: Final = 3_000
ADDRESSES_MAX: Final = 4
"""Addresses of one name that are tried."""
MEMBERS_MAX: Final = 256
MEMBERS_AT_ONCE: Final = 32
MEMBERS_SHOWN_MAX: Final = 20
MARGIN_MS: Final = 2_000
MEMBER_MS: Final = int(ADDRESSES_MAX * CONNECT_S * 1000) + MARGIN_MS
"""The time for one member's address; MEMBERS_MS: for all."""
MEMBERS_MS: Final = -(-MEMBERS_MAX // MEMBERS_AT_ONCE) * MEMBER_MS + MARGIN_MS
SKEW_MS_MAX: Final = 1_000
"""The difference between two wall clocks above which there is a warning."""

COORDINATOR: Final = f"{methods.PACKAGE}.Coordinator"
OTHERS: Final = {f"{methods.PACKAGE}.ParameterServer": "server", f"{methods.PACKAGE}.Agent": "agent"}
ROLES: Final = {wire.ROLE_SERVER: "server", wire.ROLE_WORKER: "worker", wire.ROLE_AGENT: "agent"}
PROXIES: Final = ("grpc_proxy", "https_proxy", "http_proxy")
SPARED: Final = ("no_grpc_proxy", "no_proxy")
"""Variables that gRPC reads: a proxy, and hosts to reach without it."""

_HTTP2_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The preface and an empty SETTINGS frame (RFC 9113, 3.4)."""
_SETTINGS: Final = 4
_ANSWER_BYTES: Final = 9


def probe(address: str, network: GrpcNetwork | errors.NotTrusted) -> Iterator[Finding]:
    """All findings about the coordinator at HOST:PORT and its members, as they are made. `network`: how this process
    reaches the yard, or why it has no certificate for it."""
    try:
        host, port = split_address(address)
    except errors.ConfigurationError as error:
        yield failed("name", error.what, "give --coordinator HOST:PORT")
        return
    known: list[tuple[str, int]] = []
    status: list[_Answer] = []
    in_all_ms = int(ADDRESSES_MAX * CONNECT_S * 1000) + MARGIN_MS
    calls_ms = 2 * CALL_MS + MARGIN_MS
    steps = [
        Probe("name", 10_000, lambda: _name(host, port, known)),
        Probe("tcp", in_all_ms, lambda: _tcp(address, known)),
        Probe("tls", int(5 * CONNECT_S * 1000) + MARGIN_MS, lambda: _tls(address, network, known[0])),
        Probe("grpc", calls_ms + len(OTHERS) * CALL_MS, lambda: _grpc(address, _trusted(network))),
        Probe("status", calls_ms, lambda: _status(address, _trusted(network), status)),
        Probe("release", 5_000, lambda: _releases(status[0].status)),
        Probe("clock", 5_000, lambda: _clock(status[0])),
        Probe("members", MEMBERS_MS, lambda: _members(status[0].status)),
    ]
    for step in steps:
        found = carry_out(step)
        yield from found
        if any(finding.verdict is Verdict.FAILED for finding in found):
            return


def _name(host: str, port: int, known: list[tuple[str, int]]) -> Sequence[Finding]:
    try:
        known.extend(_resolve(host, port))
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        todo = (
            "check the spelling, and that this machine's name service (or /etc/hosts) knows it; or give its IP address"
        )
        return [failed("name", f"{host} does not resolve ({why})", todo)]
    return [ok("name", f"{host} is {', '.join(ip for ip, _ in known)}"), *_proxy(host)]


def _resolve(host: str, port: int) -> list[tuple[str, int]]:
    """The addresses of a name. Raises OSError, UnicodeError."""
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys((str(where[0]), int(where[1])) for *_, where in found))


def _proxy(host: str) -> Sequence[Finding]:
    """gRPC takes a proxy from the environment, even for addresses on this machine."""
    name = next((each for each in PROXIES if os.environ.get(each)), None)
    spared = next((os.environ[each] for each in SPARED if os.environ.get(each)), "").split(",")
    if name is None or any(host.endswith(each.strip()) for each in spared if each.strip()):
        return []
    todo = f"add {host} to no_proxy, unless that proxy passes on gRPC"
    return [warning("proxy", f"calls go through the proxy that ${name} names", todo)]


def _tcp(address: str, known: list[tuple[str, int]]) -> Sequence[Finding]:
    """Moves the address that answers to the front."""
    refusals = []
    for where in known[:ADDRESSES_MAX]:
        begin = time.perf_counter()
        refusal = connect(where)
        if refusal is None:
            taken_ms = (time.perf_counter() - begin) * 1000
            known.insert(0, where)
            return [ok("tcp", f"{where[0]} port {where[1]} accepts connections, after {taken_ms:.1f} ms")]
        refusals.append(refusal)
    said, todo = refusals[0]
    return [failed("tcp", f"{address} {said}", todo)]


def connect(where: tuple[str, int]) -> tuple[str, str] | None:
    """Returns None if a process listens, otherwise what happened and what to do."""
    try:
        socket.create_connection(where, timeout=CONNECT_S).close()
    except TimeoutError:
        return (
            f"did not answer within {CONNECT_S:g} s (timed out)",
            "the machine is off, has another address, or a firewall drops what is sent to that port",
        )
    except ConnectionRefusedError:
        return (
            "refuses connections: no process listens there",
            "start `shardyard coordinator` (or `shardyard up`) there, or check the port and where it binds",
        )
    except OSError as error:
        return f"cannot be reached: {error.strerror or error}", "check the network between the two machines"
    return None


def _trusted(network: GrpcNetwork | errors.NotTrusted) -> GrpcNetwork:
    assert isinstance(network, GrpcNetwork)  # `_tls` has failed otherwise, and this is not asked
    return network


def _tls(address: str, network: GrpcNetwork | errors.NotTrusted, where: tuple[str, int]) -> Sequence[Finding]:
    spoken = _language(where)
    own_port = "give the port of the coordinator itself (7070 unless it was set)"
    has_tls = isinstance(network, errors.NotTrusted) or network.credentials is not None
    if spoken in ("h2", "tls") and has_tls is not (spoken == "tls"):
        said = f"{address} {'uses' if spoken == 'tls' else 'does not use'} TLS, and security.tls is {has_tls} here"
        return [
            failed("tls", said.replace("True", "true").replace("False", "false"), "set it to the same value everywhere")
        ]
    if spoken == "h2":
        said = "plain HTTP/2: nothing is encrypted, and callers are not identified (security.tls is false)"
        if ipaddress.ip_address(where[0].partition("%")[0]).is_loopback:
            return [ok("tls", f"{said}; it stays on this machine")]
        return [warning("tls", said, "remove security.tls from the settings of all processes")]
    if spoken == "tls":
        if isinstance(network, errors.NotTrusted):
            return [failed("tls", network.what, network.todo_text)]
        return [ok("tls", f"{address} speaks TLS; the certificate of this process is in {_folder(network)}")]
    if spoken == "http1":
        return [failed("tls", f"{address} is an HTTP/1 web server, not a gRPC server", own_port)]
    if spoken == "silent":
        said = f"{address} accepts connections but says nothing within {CONNECT_S:g} s"
        todo = f"the process may be stopped (SIGSTOP) or stuck, or be another program: {own_port}"
        return [failed("tls", said, todo)]
    return [failed("tls", f"{address} does not speak HTTP/2, and closes the connection", own_port)]


def _folder(network: GrpcNetwork) -> str:
    return "" if network.credentials is None else str(network.credentials.folder)


def _language(where: tuple[str, int]) -> str:
    """What the port speaks: h2, tls, http1, silent (nothing at all), other."""
    try:
        with socket.create_connection(where, timeout=CONNECT_S) as stream:
            stream.sendall(_HTTP2_HELLO)
            answer = _read(stream)
    except TimeoutError:
        return "tls" if _takes_tls(where) else "silent"
    except OSError:
        answer = b""
    if answer.startswith(b"HTTP/1"):
        return "http1"
    if len(answer) == _ANSWER_BYTES and answer[3] == _SETTINGS:
        return "h2"
    return "tls" if _takes_tls(where) else "other"


def _read(stream: socket.socket) -> bytes:
    """The first bytes of an answer; fewer if the other side closes the connection."""
    until = time.monotonic() + CONNECT_S
    answer = b""
    while len(answer) < _ANSWER_BYTES:
        stream.settimeout(max(0.001, until - time.monotonic()))
        got = stream.recv(_ANSWER_BYTES - len(answer))
        if not got:
            break
        answer += got
    return answer


def _takes_tls(where: tuple[str, int]) -> bool:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # only whether it speaks TLS matters, not its identity
    try:
        with socket.create_connection(where, timeout=CONNECT_S) as stream, context.wrap_socket(stream):
            return True
    except ssl.SSLError as error:
        # an alert means that the other side speaks TLS
        return "ALERT" in (error.reason or "")
    except OSError:
        return False


def _grpc(address: str, network: GrpcNetwork) -> Sequence[Finding]:
    """The coordinator's own health service."""
    with open_channel(address, "coordinator", network.credentials, OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def ask(service: str) -> str:
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=CALL_MS / 1000)
            except grpc.RpcError as error:
                return str(error.code().name)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

        said = ask(COORDINATOR)
        if said == "NOT_FOUND":
            return [_not_the_coordinator(address, ask)]
    if said == "SERVING":
        return [ok("grpc", f"the coordinator at {address} reports that it serves")]
    if said == "NOT_SERVING":
        return [
            failed(
                "grpc",
                f"the coordinator at {address} reports that it does not serve",
                "it is starting or stopping: try again",
            )
        ]
    if said == "UNIMPLEMENTED":
        todo = "check the port, which belongs to another program"
        return [failed("grpc", f"{address} speaks gRPC, but is not a service of shardyard", todo)]
    if said == "DEADLINE_EXCEEDED":
        todo = "the process is stopped (SIGSTOP) or stuck: look at it there, or restart it"
        return [failed("grpc", f"{address} did not answer within {CALL_MS / 1000:g} s", todo)]
    return [failed("grpc", f"{address} answered {said}", "see the coordinator's log")]


def _not_the_coordinator(address: str, ask: Callable[[str], str]) -> Finding:
    role = next((role for service, role in OTHERS.items() if ask(service) != "NOT_FOUND"), None)
    if role is not None:
        todo = "give the coordinator's address, not that of one of its members"
        return failed("grpc", f"{address} is a shardyard {role}", todo)
    said = f"{address} speaks gRPC, but has no {COORDINATOR}"
    return failed("grpc", said, "check the port; if it is a coordinator, install one release on all machines")


@dataclass(frozen=True, slots=True)
class _Answer:
    """A status, and the two moments of this machine's wall clock between which it was given, in ms since 1970."""

    status: wire.StatusReply
    asked_ms: int
    came_ms: int


def _status(address: str, network: GrpcNetwork, status: list[_Answer]) -> Sequence[Finding]:
    peer = network.connect(address, name="coordinator", unavailable=errors.CoordinatorUnavailable)
    try:
        asked_ms = time.time_ns() // 1_000_000
        found = peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=CALL_MS)
    except errors.ShardyardError as error:
        return [failed("status", error.what, error.todo_text or "see the coordinator's log")]
    finally:
        peer.close()
    status.append(_Answer(found, asked_ms, time.time_ns() // 1_000_000))
    count = Counter(ROLES.get(member.role, "unknown") for member in found.members)
    members = ", ".join(f"{count[role]} {role}{'s'[: count[role] != 1]}" for role in ROLES.values())
    said = f"term {found.term}, up for {found.uptime_ms / 1000:.0f} s, {members}"
    if not count["server"]:
        return [warning("status", said, "no job can start without a server: start one (`shardyard server`)")]
    return [ok("status", said)]


def _releases(status: wire.StatusReply) -> Sequence[Finding]:
    """A coordinator of an earlier release reports neither its protocol, which is in its service's name, nor its
    release."""
    ours = version("shardyard")
    install = "install one release on all machines"
    if status.protocol not in (0, PROTOCOL):
        said = f"the coordinator speaks protocol {status.protocol}, and this release speaks {PROTOCOL}"
        return [failed("release", said, install)]
    said = f"protocol {PROTOCOL} on both ends; release {ours} here"
    theirs = [_shown(status.release) + " on the coordinator"] if status.release not in ("", ours) else []
    others = Counter(member.release for member in status.members if member.release != ours)
    theirs += [f"{_shown(release)} on {number} of its members" for release, number in sorted(others.items())]
    if theirs:
        return [warning("release", f"{said}, but {', '.join(theirs)}", install)]
    return [ok("release", f"{said}, on the coordinator{' and on all members' if status.members else ''}")]


def _clock(answer: _Answer) -> Sequence[Finding]:
    """The coordinator's wall clock against this machine's. Leases use clocks that cannot be set. The wall clock matters
    to people who read logs of several machines, and for the times of checkpoints."""
    theirs = answer.status.time_ms
    if not theirs:
        return [ok("clock", "the coordinator's release does not report its time")]
    # the status was given at some moment between the question and its answer
    ahead_ms = max(0, theirs - answer.came_ms) - max(0, answer.asked_ms - theirs)
    if abs(ahead_ms) <= SKEW_MS_MAX:
        return [ok("clock", f"the coordinator's is within {SKEW_MS_MAX / 1000:g} s of this machine's")]
    way = "ahead of" if ahead_ms > 0 else "behind"
    said = f"the coordinator's is {abs(ahead_ms) / 1000:.1f} s {way} this machine's"
    return [warning("clock", said, "set both by a time service (NTP); until then their logs show different times")]


def _members(status: wire.StatusReply) -> Sequence[Finding]:
    """Whether a worker on this machine could reach each member's address."""
    reachable = [member for member in status.members if member.address][:MEMBERS_MAX]
    if not reachable:
        return []
    probes = [Probe("members", MEMBER_MS, partial(_member, member)) for member in reachable]
    with ThreadPoolExecutor(MEMBERS_AT_ONCE) as pool:  # each probe ends at its deadline
        found = [finding for findings in pool.map(carry_out, probes) for finding in findings]
    left_out = len(found) - MEMBERS_SHOWN_MAX
    if left_out > 0:
        return [*found[:MEMBERS_SHOWN_MAX], failed("members", f"and {left_out} others", "")]
    number = f"{len(reachable)} addresses" if len(reachable) > 1 else "the one address"
    return found or [ok("members", f"{number} can be reached from here")]


def _member(member: wire.MemberStatus) -> Sequence[Finding]:
    refusal = _reach(member.address)
    if not refusal:
        return []
    who = f"{ROLES.get(member.role, 'member')} {Incarnation(member.incarnation)} {_shown(member.address)}"
    return [
        failed("members", f"{who} {refusal}", "workers here could not use it: check its --advertise and the network")
    ]


def _reach(address: str) -> str:
    """Empty if a process listens, else what is wrong."""
    try:
        known = _resolve(*split_address(address))
    except errors.ConfigurationError as error:
        return error.what
    except (OSError, UnicodeError) as error:
        return f"does not resolve from here ({error})"
    refusals = []
    for where in known[:ADDRESSES_MAX]:
        refusal = connect(where)
        if refusal is None:
            return ""
        refusals.append(refusal[0])
    return refusals[0]


def _shown(text: str) -> str:
    """What a peer says about itself, made safe for a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text[:128]) or "unknown"
