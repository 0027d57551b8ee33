"""The table of errors and statuses, over a real call and in process: what was raised is what arrives."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from shardyard.domain import errors, limits
from shardyard.domain.errors import ShardyardError
from shardyard.transport import error_codes
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.transport.grpc_server import GrpcServer
from shardyard.transport.in_process import InProcessNetwork
from shardyard.transport.interfaces import Context, Peer, Service, request_id
from shardyard.wire import methods
from shardyard.wire.method import Method
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as wire

PAGES = Path(__file__).parents[4] / "docs" / "reference"
TIMEOUT_MS = 10_000
INVALID, ABORTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED
UNAVAILABLE, CANCELLED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED
EXPECTED: dict[type[ShardyardError], grpc.StatusCode] = {
    errors.ShardyardError: grpc.StatusCode.UNKNOWN,
    errors.InvalidRequest: INVALID,
    errors.ConfigurationError: INVALID,
    errors.QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ShapeMismatch: INVALID,
    errors.DTypeMismatch: INVALID,
    errors.UnknownVariable: INVALID,
    errors.VariableConflict: INVALID,
    errors.RateMismatch: INVALID,
    errors.MalformedPayload: INVALID,
    errors.TooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TableError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.TableFull: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedOptimizer: INVALID,
    errors.UnsupportedModel: INVALID,
    errors.FeedConflict: INVALID,
    errors.UnseekableDataset: INVALID,
    errors.ProtocolMismatch: grpc.StatusCode.UNIMPLEMENTED,
    errors.NotPermitted: grpc.StatusCode.PERMISSION_DENIED,
    errors.AuditDamaged: grpc.StatusCode.DATA_LOSS,
    errors.NotTrusted: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotShareable: INVALID,
    errors.Refused: ABORTED,
    errors.StaleIncarnation: ABORTED,
    errors.WorkerQuarantined: ABORTED,
    errors.StaleToken: ABORTED,
    errors.StaleGeneration: ABORTED,
    errors.StaleTerm: ABORTED,
    errors.SequenceGap: grpc.StatusCode.OUT_OF_RANGE,
    errors.StraddlingRange: ABORTED,
    errors.RunFinished: ABORTED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.CheckpointNotFound: grpc.StatusCode.NOT_FOUND,
    errors.VersionPassed: grpc.StatusCode.NOT_FOUND,
    errors.NotReady: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unavailable: UNAVAILABLE,
    errors.CoordinatorUnavailable: UNAVAILABLE,
    errors.ServerUnavailable: UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.StorageUnavailable: UNAVAILABLE,
    errors.CheckpointDamaged: grpc.StatusCode.DATA_LOSS,
    errors.LogDamaged: grpc.StatusCode.DATA_LOSS,
    errors.JobFailed: CANCELLED,
    errors.ServerLost: CANCELLED,
    errors.CoordinatorLost: CANCELLED,
    errors.WorkerFailed: CANCELLED,
    errors.NonFiniteGradient: CANCELLED,
    errors.AddressInUse: grpc.StatusCode.ALREADY_EXISTS,
    errors.Internal: grpc.StatusCode.INTERNAL,
}


class Thrower:
    """A service that raises what it is given; two peers reach it, one over gRPC and one in process."""

    def __init__(self) -> None:
        self.raises: BaseException = errors.NotReady("nothing was set")
        service = Service("Coordinator")
        service.on(methods.STATUS, self._status)
        service.on(methods.LEAVE, lambda request, _: wire.LeaveReply())
        self.listener = GrpcServer("127.0.0.1:0", [service], None, threads=1)
        self.listener.start()
        network = InProcessNetwork()
        network.listen("here:1", [service])
        self.peers: dict[str, Peer] = {
            "grpc": GrpcNetwork(None).connect(self.listener.address, name="thrower"),
            "in process": network.connect("here:1", name="thrower"),
        }

    def _status(self, _request: wire.StatusRequest, _: Context) -> wire.StatusReply:
        raise self.raises

    def provoke(self, way: str, raises: Exception) -> ShardyardError:
        self.raises = raises
        with pytest.raises(ShardyardError) as raised:
            self.peers[way].call(methods.STATUS, wire.StatusRequest(), timeout_ms=TIMEOUT_MS)
        return raised.value

    def status_of(self, raises: Exception) -> grpc.Call:
        """What a plain gRPC client sees."""
        self.raises = raises
        with grpc.insecure_channel(self.listener.address) as channel:
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(methods.STATUS.path)(b"", timeout=TIMEOUT_MS / 1000)
        assert isinstance(raised.value, grpc.Call)
        return raised.value

    def is_up(self) -> bool:
        replies = [p.call(methods.LEAVE, wire.LeaveRequest(), timeout_ms=TIMEOUT_MS) for p in self.peers.values()]
        return replies == [wire.LeaveReply()] * len(self.peers)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self.listener.stop()


@pytest.fixture(scope="module")
def thrower() -> Iterator[Thrower]:
    found = Thrower()
    assert found.is_up()
    yield found
    found.close()


WAYS = ("grpc", "in process")


def test_every_error_has_a_row_here_and_in_the_protocol() -> None:
    assert set(EXPECTED) == set(errors.BY_CODE.values())
    listed = re.findall(r"^\| `([A-Z]\w+)` \| ([A-Z_]+) \|", (PAGES / "errors.md").read_text(), re.MULTILINE)
    assert dict(listed) == {kind.__name__: code.name for kind, code in EXPECTED.items()}
    assert len(listed) == len(EXPECTED)


def test_limits_of_the_protocol_are_those_of_the_code() -> None:
    listed = re.findall(r"^\| `([A-Z_]+)` \| (\d+) \|", (PAGES / "protocol.md").read_text(), re.MULTILINE)
    assert len(listed) > 20
    assert {name: int(value) for name, value in listed} == {name: getattr(limits, name) for name, _ in listed}


@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
def test_error_has_its_status_and_arrives_as_it_was_raised(kind: type[ShardyardError], thrower: Thrower) -> None:
    error = kind("it went wrong", facts={"partition": "3"})
    assert error_codes.status_of(error) is EXPECTED[kind]
    for way in WAYS:
        arrived = thrower.provoke(way, error)
        assert type(arrived) is kind
        assert vars(arrived) == vars(error)
    call = thrower.status_of(error)
    assert call.code() is EXPECTED[kind]
    assert call.details() == "it went wrong"
    trailers = dict(call.trailing_metadata())
    detail = common.ErrorDetail.FromString(trailers[error_codes.DETAIL_KEY])
    assert (detail.code, detail.what, dict(detail.facts)) == (kind.__name__, "it went wrong", {"partition": "3"})


@pytest.mark.parametrize("way", WAYS)
def test_texts_arrive_as_they_were(way: str, thrower: Thrower) -> None:
    raised = errors.SequenceGap("what: é, \n\x00, 日本", why="its own", todo="", facts={"next": "41", "": "日本"})
    arrived = thrower.provoke(way, raised)
    assert vars(arrived) == vars(raised)


@pytest.mark.parametrize("way", WAYS)
def test_texts_of_a_class_arrive(way: str, thrower: Thrower) -> None:
    raised = errors.StaleToken("token 3")
    arrived = thrower.provoke(way, raised)
    assert str(arrived) == str(raised)
    assert errors.StaleToken.why in str(arrived)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("letter", ["x", "é", "日", "😀", "\n", "%"])
def test_error_with_endless_texts_still_arrives(way: str, letter: str, thrower: Thrower) -> None:
    facts = {f"{number}{letter * 100}": letter * 10_000 for number in range(100)}
    raised = errors.ShapeMismatch(letter * 100_000, why=letter * 10_000, todo=letter * 10_000, facts=facts)
    for _ in range(4):  # between its soft and its hard limit, gRPC refuses trailers at random
        arrived = thrower.provoke(way, raised)
        assert type(arrived) is errors.ShapeMismatch
        assert raised.what.startswith(arrived.what)
        assert len(arrived.what.encode()) > error_codes.WHAT_BYTES_MAX - 4
        assert len(arrived.facts) == error_codes.FACTS_MAX
    assert len(error_codes.to_detail(raised).SerializeToString()) * 4 // 3 + 3 * error_codes.STATUS_BYTES_MAX < 8 * 1024


@pytest.mark.parametrize("way", WAYS)
def test_text_without_utf8_still_arrives(way: str, thrower: Thrower) -> None:
    arrived = thrower.provoke(way, errors.ConfigurationError("file \udcff.yaml", facts={"\udcff": "\udcff"}))
    assert type(arrived) is errors.ConfigurationError
    assert arrived.what == "file ?.yaml"


@pytest.mark.parametrize("way", WAYS)
def test_defect_arrives_as_internal_and_leaves_nothing_behind(
    way: str, thrower: Thrower, caplog: pytest.LogCaptureFixture
) -> None:
    secret = {"password": "hunter2"}

    def fail() -> Exception:
        try:
            return secret["name"]  # type: ignore[return-value]
        except KeyError as error:
            return error

    with caplog.at_level(logging.ERROR, "shardyard.serving"):
        arrived = thrower.provoke(way, fail())
    assert type(arrived) is errors.Internal
    assert "KeyError" in arrived.what
    assert "Traceback" not in str(arrived)
    assert "hunter2" not in str(arrived)
    assert any(record.exc_info for record in caplog.records), "the traceback is in the log"
    assert request_id.get() == ""
    assert thrower.is_up()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("defect", [AssertionError(), StopIteration(), grpc.RpcError("x"), OSError(2, "gone")])
def test_any_exception_arrives_as_internal(way: str, defect: Exception, thrower: Thrower) -> None:
    assert type(thrower.provoke(way, defect)) is errors.Internal
    assert thrower.is_up()


def test_refusals_are_no_lines_in_the_log(thrower: Thrower, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shardyard"):
        thrower.provoke("grpc", errors.NotReady("later"))
    assert not caplog.records


@pytest.mark.parametrize("method", [methods.REGISTER, methods.STATUS, methods.JOIN_JOB], ids=lambda method: method.name)
def test_method_that_is_not_there_is_a_mismatch(method: Method, thrower: Thrower) -> None:  # type: ignore[type-arg]
    if method is methods.STATUS:
        method = Method("shardyard.wire.v9.Coordinator", "Status", method.request, method.response)
    for peer in thrower.peers.values():
        with pytest.raises(errors.ProtocolMismatch, match=method.name):
            peer.call(method, method.request.decode(b""), timeout_ms=TIMEOUT_MS)


class FakeRpcError(grpc.RpcError, grpc.Call):
    """A failed call as a foreign server or a proxy answers it."""

    def __init__(self, code: grpc.StatusCode, trailers: tuple[tuple[str, str | bytes], ...] = ()) -> None:
        self._code = code
        self._trailers = trailers

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "said so"

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._trailers

    initial_metadata = trailing_metadata

    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> None:
        return None

    def cancel(self) -> None: ...

    def add_callback(self, callback: object) -> bool:
        return False


FOREIGN = {
    UNAVAILABLE: errors.ServerUnavailable,
    CANCELLED: errors.ServerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNIMPLEMENTED: errors.ProtocolMismatch,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.TooLarge,
}


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_status_without_our_detail_has_a_class_too(code: grpc.StatusCode) -> None:
    strange: list[tuple[tuple[str, str | bytes], ...]] = [
        (),
        ((error_codes.DETAIL_KEY, b"\xff\xff"),),
        ((error_codes.DETAIL_KEY, "text"),),
    ]
    for trailers in strange:
        error = error_codes.from_rpc_error(
            FakeRpcError(code, trailers), peer="server 3", path="/x/Push", unavailable=errors.ServerUnavailable
        )
        assert type(error) is FOREIGN.get(code, errors.Internal)
        assert "server 3" in error.what
        assert "said so" in error.what or "/x/Push" in error.what


def test_detail_of_a_newer_peer_becomes_the_base() -> None:
    trailer = common.ErrorDetail(code="FromTheFuture", what="x", facts={"a": "b"}).SerializeToString()
    rpc = FakeRpcError(UNAVAILABLE, (("other", "1"), (error_codes.DETAIL_KEY, trailer)))
    error = error_codes.from_rpc_error(rpc, peer="server 3", path="/x/Push", unavailable=errors.ServerUnavailable)
    assert type(error) is ShardyardError
    assert (error.what, error.facts) == ("x", {"a": "b"})
