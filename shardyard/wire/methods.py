"""The methods of the services, as typed values: how each one's requests and answers become bytes and back.

Invariant: every method of protos/ is here, once (a test compares them). Must not know: channels, servers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from shardyard.domain.errors import MalformedPayload
from shardyard.wire import frames
from shardyard.wire.v1 import agent_pb2 as agent
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server

Request = TypeVar("Request")
Response = TypeVar("Response")
PACKAGE = "shardyard.wire.v1"


@dataclass(frozen=True)
class Wire(Generic[Request]):
    """How one kind of message becomes bytes and back. `decode` raises MalformedPayload or TooLarge."""

    encode: Callable[[Request], bytes]
    decode: Callable[[bytes], Request]


@dataclass(frozen=True)
class Method(Generic[Request, Response]):
    """A method of a service. `streams_in`, `streams_out`: whether the request, the answer is a stream."""

    service: str
    name: str
    request: Wire[Request]
    response: Wire[Response]
    streams_in: bool = False
    streams_out: bool = False

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    def __hash__(self) -> int:
        return hash(self.path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Method) and other.path == self.path


Generated = TypeVar("Generated", bound=Message)


def _message(kind: type[Generated]) -> Wire[Generated]:
    def decode(data: bytes) -> Generated:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            raise MalformedPayload(f"{len(data)} bytes that are no {kind.DESCRIPTOR.name}: {error}") from error

    def encode(message: Generated) -> bytes:
        return message.SerializeToString()

    return Wire(encode, decode)


_FRAME: Wire[frames.Frame] = Wire(frames.encode, frames.decode)
Sent = TypeVar("Sent", bound=Message)
Answered = TypeVar("Answered", bound=Message)


def _unary(service: str, name: str, request: type[Sent], response: type[Answered]) -> Method[Sent, Answered]:
    return Method(f"{PACKAGE}.{service}", name, _message(request), _message(response))


_C, _P, _A = "Coordinator", "ParameterServer", "Agent"

REGISTER = _unary(_C, "Register", coordinator.RegisterRequest, coordinator.RegisterReply)
HEARTBEAT = _unary(_C, "Heartbeat", coordinator.HeartbeatRequest, coordinator.HeartbeatReply)
LEAVE = _unary(_C, "Leave", coordinator.LeaveRequest, coordinator.LeaveReply)
REPORT_EXIT = _unary(_C, "ReportExit", coordinator.ReportExitRequest, coordinator.ReportExitReply)
JOIN_JOB = _unary(_C, "JoinJob", coordinator.JoinJobRequest, coordinator.JoinJobReply)
REGISTER_VARIABLES = _unary(
    _C, "RegisterVariables", coordinator.RegisterVariablesRequest, coordinator.RegisterVariablesReply
)
COMMIT_VARIABLES = _unary(_C, "CommitVariables", coordinator.CommitVariablesRequest, coordinator.CommitVariablesReply)
OPEN_FEED = _unary(_C, "OpenFeed", coordinator.OpenFeedRequest, coordinator.OpenFeedReply)
LEASE_DATA = _unary(_C, "LeaseData", coordinator.LeaseDataRequest, coordinator.LeaseDataReply)
CLOSE_LEASE = _unary(_C, "CloseLease", coordinator.CloseLeaseRequest, coordinator.CloseLeaseReply)
BEGIN_BATCH = _unary(_C, "BeginBatch", coordinator.BeginBatchRequest, coordinator.BeginBatchReply)
REPORT_NOT_FINITE = _unary(_C, "ReportNotFinite", coordinator.ReportNotFiniteRequest, coordinator.ReportNotFiniteReply)
DECIDE_STEP = _unary(_C, "DecideStep", coordinator.DecideStepRequest, coordinator.DecideStepReply)
READ_MAKE_UP = _unary(_C, "ReadMakeUp", coordinator.ReadMakeUpRequest, coordinator.ReadMakeUpReply)
REBASE_SOURCE = _unary(_C, "RebaseSource", coordinator.RebaseSourceRequest, coordinator.RebaseSourceReply)
TAKE_CHECKPOINT = _unary(_C, "TakeCheckpoint", coordinator.TakeCheckpointRequest, coordinator.TakeCheckpointReply)
STOP_JOB = _unary(_C, "StopJob", coordinator.StopJobRequest, coordinator.StopJobReply)
SWITCH_CONSISTENCY = _unary(
    _C, "SwitchConsistency", coordinator.SwitchConsistencyRequest, coordinator.SwitchConsistencyReply
)
REPORT_FEEDBACK = _unary(_C, "ReportFeedback", coordinator.ReportFeedbackRequest, coordinator.ReportFeedbackReply)
TAKE_UP_FEEDBACK = _unary(_C, "TakeUpFeedback", coordinator.TakeUpFeedbackRequest, coordinator.TakeUpFeedbackReply)
RESTORE_CHECKPOINT = _unary(
    _C, "RestoreCheckpoint", coordinator.RestoreCheckpointRequest, coordinator.RestoreCheckpointReply
)
FOLLOW_JOB = _unary(_C, "FollowJob", coordinator.FollowJobRequest, coordinator.FollowJobReply)
REPORT_EVALUATION = _unary(
    _C, "ReportEvaluation", coordinator.ReportEvaluationRequest, coordinator.ReportEvaluationReply
)
STATUS = _unary(_C, "Status", coordinator.StatusRequest, coordinator.StatusReply)
LIST_QUARANTINED = _unary(_C, "ListQuarantined", coordinator.ListQuarantinedRequest, coordinator.ListQuarantinedReply)
READ_AUDIT = _unary(_C, "ReadAudit", coordinator.ReadAuditRequest, coordinator.ReadAuditReply)

CREATE_PARTITIONS = _unary(_P, "CreatePartitions", server.CreatePartitionsRequest, server.CreatePartitionsReply)
OPEN_PARTITIONS = _unary(_P, "OpenPartitions", server.OpenPartitionsRequest, server.OpenPartitionsReply)
SAVE_CHECKPOINT = _unary(_P, "SaveCheckpoint", server.SaveCheckpointRequest, server.SaveCheckpointReply)
FORGET_SOURCES = _unary(_P, "ForgetSources", server.ForgetSourcesRequest, server.ForgetSourcesReply)
PASS_OVER = _unary(_P, "PassOver", server.PassOverRequest, server.PassOverReply)
SET_STALENESS = _unary(_P, "SetStaleness", server.SetStalenessRequest, server.SetStalenessReply)
DROP_JOB = _unary(_P, "DropJob", server.DropJobRequest, server.DropJobReply)
FENCE = _unary(_P, "Fence", server.FenceRequest, server.FenceReply)
OPEN_SOURCES = _unary(_P, "OpenSources", server.OpenSourcesRequest, server.OpenSourcesReply)
READ_LEDGER = _unary(_P, "ReadLedger", server.ReadLedgerRequest, server.ReadLedgerReply)
PIN = _unary(_P, "Pin", server.PinRequest, server.PinReply)
UNPIN = _unary(_P, "Unpin", server.UnpinRequest, server.UnpinReply)
DESCRIBE_SERVER = _unary(_P, "DescribeServer", server.DescribeServerRequest, server.DescribeServerReply)
INITIALIZE: Method[frames.Frame, server.InitializeReply] = Method(
    f"{PACKAGE}.{_P}", "Initialize", _FRAME, _message(server.InitializeReply), streams_in=True
)
PUSH: Method[frames.Frame, server.PushReply] = Method(
    f"{PACKAGE}.{_P}", "Push", _FRAME, _message(server.PushReply), streams_in=True
)
PULL: Method[server.PullRequest, frames.Frame] = Method(
    f"{PACKAGE}.{_P}", "Pull", _message(server.PullRequest), _FRAME, streams_out=True
)
PUSH_PULL: Method[frames.Frame, frames.Frame] = Method(
    f"{PACKAGE}.{_P}", "PushPull", _FRAME, _FRAME, streams_in=True, streams_out=True
)

LOOK_UP: Method[frames.Frame, frames.Frame] = Method(f"{PACKAGE}.{_P}", "LookUp", _FRAME, _FRAME)
READ_ROWS: Method[server.ReadRowsRequest, frames.Frame] = Method(
    f"{PACKAGE}.{_P}", "ReadRows", _message(server.ReadRowsRequest), _FRAME, streams_out=True
)

LAUNCH = _unary(_A, "Launch", agent.LaunchRequest, agent.LaunchReply)
STOP = _unary(_A, "Stop", agent.StopRequest, agent.StopReply)
DESCRIBE_AGENT = _unary(_A, "DescribeAgent", agent.DescribeAgentRequest, agent.DescribeAgentReply)
WATCH: Method[agent.WatchRequest, agent.LaunchEvent] = Method(
    f"{PACKAGE}.{_A}", "Watch", _message(agent.WatchRequest), _message(agent.LaunchEvent), streams_out=True
)
