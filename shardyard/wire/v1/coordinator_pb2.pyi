from shardyard.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_SERVER: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_AGENT: _ClassVar[Role]

class ConsistencyMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONSISTENCY_MODE_UNSPECIFIED: _ClassVar[ConsistencyMode]
    CONSISTENCY_MODE_SYNC: _ClassVar[ConsistencyMode]
    CONSISTENCY_MODE_LOCAL: _ClassVar[ConsistencyMode]
    CONSISTENCY_MODE_BOUNDED: _ClassVar[ConsistencyMode]
    CONSISTENCY_MODE_ASYNC: _ClassVar[ConsistencyMode]
    CONSISTENCY_MODE_HYBRID: _ClassVar[ConsistencyMode]

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_STARTING: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_FINISHED: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_FINISHING: _ClassVar[JobState]

class FeedbackStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEEDBACK_STAGE_UNSPECIFIED: _ClassVar[FeedbackStage]
    FEEDBACK_STAGE_READY: _ClassVar[FeedbackStage]
    FEEDBACK_STAGE_COPIED: _ClassVar[FeedbackStage]
    FEEDBACK_STAGE_ENDED: _ClassVar[FeedbackStage]
ROLE_UNSPECIFIED: Role
ROLE_SERVER: Role
ROLE_WORKER: Role
ROLE_AGENT: Role
CONSISTENCY_MODE_UNSPECIFIED: ConsistencyMode
CONSISTENCY_MODE_SYNC: ConsistencyMode
CONSISTENCY_MODE_LOCAL: ConsistencyMode
CONSISTENCY_MODE_BOUNDED: ConsistencyMode
CONSISTENCY_MODE_ASYNC: ConsistencyMode
CONSISTENCY_MODE_HYBRID: ConsistencyMode
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_STARTING: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_FINISHED: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_FINISHING: JobState
FEEDBACK_STAGE_UNSPECIFIED: FeedbackStage
FEEDBACK_STAGE_READY: FeedbackStage
FEEDBACK_STAGE_COPIED: FeedbackStage
FEEDBACK_STAGE_ENDED: FeedbackStage

class EnrolRequest(_message.Message):
    __slots__ = ("request", "launch", "owner")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    launch: str
    owner: str
    def __init__(self, request: _Optional[bytes] = ..., launch: _Optional[str] = ..., owner: _Optional[str] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("certificate", "authorities", "role", "name")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    authorities: bytes
    role: str
    name: str
    def __init__(self, certificate: _Optional[bytes] = ..., authorities: _Optional[bytes] = ..., role: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class InviteRequest(_message.Message):
    __slots__ = ("role", "name", "key", "lifetime_s", "uses", "owner")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_S_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    key: bytes
    lifetime_s: int
    uses: int
    owner: str
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., key: _Optional[bytes] = ..., lifetime_s: _Optional[int] = ..., uses: _Optional[int] = ..., owner: _Optional[str] = ...) -> None: ...

class InviteReply(_message.Message):
    __slots__ = ("id", "yard", "authority")
    ID_FIELD_NUMBER: _ClassVar[int]
    YARD_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    id: str
    yard: str
    authority: bytes
    def __init__(self, id: _Optional[str] = ..., yard: _Optional[str] = ..., authority: _Optional[bytes] = ...) -> None: ...

class ListIdentitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class IssuedIdentity(_message.Message):
    __slots__ = ("holder", "serial", "issued_s", "until_s", "revoked")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    ISSUED_S_FIELD_NUMBER: _ClassVar[int]
    UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    holder: str
    serial: str
    issued_s: int
    until_s: int
    revoked: bool
    def __init__(self, holder: _Optional[str] = ..., serial: _Optional[str] = ..., issued_s: _Optional[int] = ..., until_s: _Optional[int] = ..., revoked: bool = ...) -> None: ...

class Rotation(_message.Message):
    __slots__ = ("phase", "since_s", "overlap_s", "waits_for")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_S_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    phase: str
    since_s: int
    overlap_s: int
    waits_for: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, phase: _Optional[str] = ..., since_s: _Optional[int] = ..., overlap_s: _Optional[int] = ..., waits_for: _Optional[_Iterable[str]] = ...) -> None: ...

class ListIdentitiesReply(_message.Message):
    __slots__ = ("identities", "rotation")
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    ROTATION_FIELD_NUMBER: _ClassVar[int]
    identities: _containers.RepeatedCompositeFieldContainer[IssuedIdentity]
    rotation: Rotation
    def __init__(self, identities: _Optional[_Iterable[_Union[IssuedIdentity, _Mapping]]] = ..., rotation: _Optional[_Union[Rotation, _Mapping]] = ...) -> None: ...

class RevokeIdentityRequest(_message.Message):
    __slots__ = ("holder", "allow")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FIELD_NUMBER: _ClassVar[int]
    holder: str
    allow: bool
    def __init__(self, holder: _Optional[str] = ..., allow: bool = ...) -> None: ...

class RevokeIdentityReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RotateAuthorityRequest(_message.Message):
    __slots__ = ("overlap_s", "next")
    OVERLAP_S_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    overlap_s: int
    next: bool
    def __init__(self, overlap_s: _Optional[int] = ..., next: bool = ...) -> None: ...

class RotateAuthorityReply(_message.Message):
    __slots__ = ("phase",)
    PHASE_FIELD_NUMBER: _ClassVar[int]
    phase: str
    def __init__(self, phase: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("role", "address", "protocol", "release", "host", "pid", "agent", "local_index", "logs")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    address: str
    protocol: int
    release: str
    host: str
    pid: int
    agent: int
    local_index: int
    logs: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., protocol: _Optional[int] = ..., release: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., agent: _Optional[int] = ..., local_index: _Optional[int] = ..., logs: _Optional[str] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("incarnation", "term", "heartbeat_ms", "lease_ms", "drain_ms", "pass_key", "authorities")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_MS_FIELD_NUMBER: _ClassVar[int]
    PASS_KEY_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    term: int
    heartbeat_ms: int
    lease_ms: int
    drain_ms: int
    pass_key: bytes
    authorities: bytes
    def __init__(self, incarnation: _Optional[int] = ..., term: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ..., drain_ms: _Optional[int] = ..., pass_key: _Optional[bytes] = ..., authorities: _Optional[bytes] = ...) -> None: ...

class Metric(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class LogLength(_message.Message):
    __slots__ = ("job", "length")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    job: int
    length: int
    def __init__(self, job: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason", "worker", "settled", "step")
    REASON_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    reason: str
    worker: int
    settled: bool
    step: int
    def __init__(self, reason: _Optional[str] = ..., worker: _Optional[int] = ..., settled: bool = ..., step: _Optional[int] = ...) -> None: ...

class StopReached(_message.Message):
    __slots__ = ("reached",)
    REACHED_FIELD_NUMBER: _ClassVar[int]
    reached: int
    def __init__(self, reached: _Optional[int] = ...) -> None: ...

class SwitchPoint(_message.Message):
    __slots__ = ("number", "settled", "step", "to_steps")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TO_STEPS_FIELD_NUMBER: _ClassVar[int]
    number: int
    settled: bool
    step: int
    to_steps: bool
    def __init__(self, number: _Optional[int] = ..., settled: bool = ..., step: _Optional[int] = ..., to_steps: bool = ...) -> None: ...

class SwitchReached(_message.Message):
    __slots__ = ("number", "reached")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    number: int
    reached: int
    def __init__(self, number: _Optional[int] = ..., reached: _Optional[int] = ...) -> None: ...

class Consistency(_message.Message):
    __slots__ = ("number", "mode", "staleness", "strategy")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    number: int
    mode: ConsistencyMode
    staleness: int
    strategy: str
    def __init__(self, number: _Optional[int] = ..., mode: _Optional[_Union[ConsistencyMode, str]] = ..., staleness: _Optional[int] = ..., strategy: _Optional[str] = ...) -> None: ...

class Revoked(_message.Message):
    __slots__ = ("version", "holders")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    holders: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[int] = ..., holders: _Optional[_Iterable[str]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("authorities", "revoked_version", "pass_until_s", "caller", "step", "samples", "metrics", "waiting_for", "logs", "residual_norm", "pushed", "stop_reached", "tables", "switches", "switch_reached", "needs_servers", "sums")
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    REVOKED_VERSION_FIELD_NUMBER: _ClassVar[int]
    PASS_UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_NORM_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    STOP_REACHED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    SWITCH_REACHED_FIELD_NUMBER: _ClassVar[int]
    NEEDS_SERVERS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    authorities: bytes
    revoked_version: int
    pass_until_s: int
    caller: _common_pb2.Caller
    step: int
    samples: int
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    waiting_for: str
    logs: _containers.RepeatedCompositeFieldContainer[LogLength]
    residual_norm: float
    pushed: int
    stop_reached: StopReached
    tables: _containers.RepeatedCompositeFieldContainer[TableRows]
    switches: int
    switch_reached: SwitchReached
    needs_servers: str
    sums: str
    def __init__(self, authorities: _Optional[bytes] = ..., revoked_version: _Optional[int] = ..., pass_until_s: _Optional[int] = ..., caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., step: _Optional[int] = ..., samples: _Optional[int] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., waiting_for: _Optional[str] = ..., logs: _Optional[_Iterable[_Union[LogLength, _Mapping]]] = ..., residual_norm: _Optional[float] = ..., pushed: _Optional[int] = ..., stop_reached: _Optional[_Union[StopReached, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[TableRows, _Mapping]]] = ..., switches: _Optional[int] = ..., switch_reached: _Optional[_Union[SwitchReached, _Mapping]] = ..., needs_servers: _Optional[str] = ..., sums: _Optional[str] = ...) -> None: ...

class TableRows(_message.Message):
    __slots__ = ("job", "rows")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    job: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class RankLease(_message.Message):
    __slots__ = ("rank", "token", "announce_until")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    rank: int
    token: int
    announce_until: int
    def __init__(self, rank: _Optional[int] = ..., token: _Optional[int] = ..., announce_until: _Optional[int] = ...) -> None: ...

class SaveResidual(_message.Message):
    __slots__ = ("number", "url")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    number: int
    url: str
    def __init__(self, number: _Optional[int] = ..., url: _Optional[str] = ...) -> None: ...

class CheckpointResidual(_message.Message):
    __slots__ = ("generation", "worker", "own", "url", "path", "length", "sha256")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    generation: int
    worker: str
    own: bool
    url: str
    path: str
    length: int
    sha256: bytes
    def __init__(self, generation: _Optional[int] = ..., worker: _Optional[str] = ..., own: bool = ..., url: _Optional[str] = ..., path: _Optional[str] = ..., length: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("authorities", "revoked", "job_pass", "term", "job_state", "failure", "generation", "ranks", "chief", "workers", "fenced", "drain", "initializer", "recovering", "save_residual", "feedback", "restored_generation", "world_size", "stop", "checkpoint", "consistency", "switch_point", "replica_generation", "publish", "lost_replica_generation", "undecided")
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    JOB_PASS_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    JOB_STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    CHIEF_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_FIELD_NUMBER: _ClassVar[int]
    SAVE_RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    FEEDBACK_FIELD_NUMBER: _ClassVar[int]
    RESTORED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    SWITCH_POINT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    LOST_REPLICA_GENERATION_FIELD_NUMBER: _ClassVar[int]
    UNDECIDED_FIELD_NUMBER: _ClassVar[int]
    authorities: bytes
    revoked: Revoked
    job_pass: bytes
    term: int
    job_state: JobState
    failure: _common_pb2.ErrorDetail
    generation: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankLease]
    chief: bool
    workers: int
    fenced: _containers.RepeatedScalarFieldContainer[int]
    drain: Drain
    initializer: bool
    recovering: bool
    save_residual: SaveResidual
    feedback: _containers.RepeatedCompositeFieldContainer[CheckpointResidual]
    restored_generation: int
    world_size: int
    stop: Stop
    checkpoint: CheckpointStatus
    consistency: Consistency
    switch_point: SwitchPoint
    replica_generation: int
    publish: bool
    lost_replica_generation: int
    undecided: str
    def __init__(self, authorities: _Optional[bytes] = ..., revoked: _Optional[_Union[Revoked, _Mapping]] = ..., job_pass: _Optional[bytes] = ..., term: _Optional[int] = ..., job_state: _Optional[_Union[JobState, str]] = ..., failure: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., generation: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankLease, _Mapping]]] = ..., chief: bool = ..., workers: _Optional[int] = ..., fenced: _Optional[_Iterable[int]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., initializer: bool = ..., recovering: bool = ..., save_residual: _Optional[_Union[SaveResidual, _Mapping]] = ..., feedback: _Optional[_Iterable[_Union[CheckpointResidual, _Mapping]]] = ..., restored_generation: _Optional[int] = ..., world_size: _Optional[int] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., checkpoint: _Optional[_Union[CheckpointStatus, _Mapping]] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., switch_point: _Optional[_Union[SwitchPoint, _Mapping]] = ..., replica_generation: _Optional[int] = ..., publish: bool = ..., lost_replica_generation: _Optional[int] = ..., undecided: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("left_ms", "empty")
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    left_ms: int
    empty: bool
    def __init__(self, left_ms: _Optional[int] = ..., empty: bool = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("caller", "member")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    member: str
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., member: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("incarnation", "title", "left_ms", "first", "empty")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    title: str
    left_ms: int
    first: bool
    empty: bool
    def __init__(self, incarnation: _Optional[int] = ..., title: _Optional[str] = ..., left_ms: _Optional[int] = ..., first: bool = ..., empty: bool = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("caller", "error", "pushed", "residual_lost", "drained")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_LOST_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    error: str
    pushed: int
    residual_lost: float
    drained: bool
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., error: _Optional[str] = ..., pushed: _Optional[int] = ..., residual_lost: _Optional[float] = ..., drained: bool = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ("residual_lost",)
    RESIDUAL_LOST_FIELD_NUMBER: _ClassVar[int]
    residual_lost: bool
    def __init__(self, residual_lost: bool = ...) -> None: ...

class ReportExitRequest(_message.Message):
    __slots__ = ("caller", "pid", "exit_code")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    pid: int
    exit_code: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., pid: _Optional[int] = ..., exit_code: _Optional[int] = ...) -> None: ...

class ReportExitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JoinJobRequest(_message.Message):
    __slots__ = ("caller", "name", "settings_json", "run_id", "run_number")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_NUMBER_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    name: str
    settings_json: str
    run_id: str
    run_number: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., name: _Optional[str] = ..., settings_json: _Optional[str] = ..., run_id: _Optional[str] = ..., run_number: _Optional[int] = ...) -> None: ...

class JoinJobReply(_message.Message):
    __slots__ = ("job_pass", "job", "settings_json", "started", "seed", "ranks", "logical_ranks", "chief", "number", "world_size", "stop", "checkpoint", "consistency", "switch_point")
    JOB_PASS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_JSON_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_RANKS_FIELD_NUMBER: _ClassVar[int]
    CHIEF_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    SWITCH_POINT_FIELD_NUMBER: _ClassVar[int]
    job_pass: bytes
    job: int
    settings_json: str
    started: bool
    seed: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankLease]
    logical_ranks: int
    chief: bool
    number: int
    world_size: int
    stop: Stop
    checkpoint: CheckpointStatus
    consistency: Consistency
    switch_point: SwitchPoint
    def __init__(self, job_pass: _Optional[bytes] = ..., job: _Optional[int] = ..., settings_json: _Optional[str] = ..., started: bool = ..., seed: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankLease, _Mapping]]] = ..., logical_ranks: _Optional[int] = ..., chief: bool = ..., number: _Optional[int] = ..., world_size: _Optional[int] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., checkpoint: _Optional[_Union[CheckpointStatus, _Mapping]] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., switch_point: _Optional[_Union[SwitchPoint, _Mapping]] = ...) -> None: ...

class RegisterVariablesRequest(_message.Message):
    __slots__ = ("caller", "variables", "optimizer", "places", "tables")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    variables: _containers.RepeatedCompositeFieldContainer[_common_pb2.VariableSpec]
    optimizer: _common_pb2.OptimizerSpec
    places: _containers.RepeatedScalarFieldContainer[int]
    tables: _containers.RepeatedCompositeFieldContainer[_common_pb2.TableSpec]
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., variables: _Optional[_Iterable[_Union[_common_pb2.VariableSpec, _Mapping]]] = ..., optimizer: _Optional[_Union[_common_pb2.OptimizerSpec, _Mapping]] = ..., places: _Optional[_Iterable[int]] = ..., tables: _Optional[_Iterable[_Union[_common_pb2.TableSpec, _Mapping]]] = ...) -> None: ...

class RegisterVariablesReply(_message.Message):
    __slots__ = ("layout", "map", "initializer", "feedback", "restored_generation", "consistency")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    FEEDBACK_FIELD_NUMBER: _ClassVar[int]
    RESTORED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    layout: _common_pb2.JobLayout
    map: _common_pb2.PartitionMap
    initializer: bool
    feedback: _containers.RepeatedCompositeFieldContainer[CheckpointResidual]
    restored_generation: int
    consistency: Consistency
    def __init__(self, layout: _Optional[_Union[_common_pb2.JobLayout, _Mapping]] = ..., map: _Optional[_Union[_common_pb2.PartitionMap, _Mapping]] = ..., initializer: bool = ..., feedback: _Optional[_Iterable[_Union[CheckpointResidual, _Mapping]]] = ..., restored_generation: _Optional[int] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ...) -> None: ...

class CommitVariablesRequest(_message.Message):
    __slots__ = ("caller", "generation")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    generation: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., generation: _Optional[int] = ...) -> None: ...

class CommitVariablesReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenFeedRequest(_message.Message):
    __slots__ = ("caller", "feed", "samples", "fingerprint", "batch_size", "epochs", "shuffle", "drop_last", "accumulate")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    DROP_LAST_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATE_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    feed: int
    samples: int
    fingerprint: str
    batch_size: int
    epochs: int
    shuffle: bool
    drop_last: bool
    accumulate: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., feed: _Optional[int] = ..., samples: _Optional[int] = ..., fingerprint: _Optional[str] = ..., batch_size: _Optional[int] = ..., epochs: _Optional[int] = ..., shuffle: bool = ..., drop_last: bool = ..., accumulate: _Optional[int] = ...) -> None: ...

class OpenFeedReply(_message.Message):
    __slots__ = ("batches_per_data_shard", "units_per_epoch", "first_step", "done", "begun_epochs", "begun_samples", "has_later")
    BATCHES_PER_DATA_SHARD_FIELD_NUMBER: _ClassVar[int]
    UNITS_PER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    BEGUN_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    HAS_LATER_FIELD_NUMBER: _ClassVar[int]
    batches_per_data_shard: int
    units_per_epoch: int
    first_step: int
    done: bool
    begun_epochs: int
    begun_samples: int
    has_later: bool
    def __init__(self, batches_per_data_shard: _Optional[int] = ..., units_per_epoch: _Optional[int] = ..., first_step: _Optional[int] = ..., done: bool = ..., begun_epochs: _Optional[int] = ..., begun_samples: _Optional[int] = ..., has_later: bool = ...) -> None: ...

class LeaseDataRequest(_message.Message):
    __slots__ = ("caller", "feed", "known")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    feed: int
    known: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., feed: _Optional[int] = ..., known: _Optional[_Iterable[int]] = ...) -> None: ...

class DataLease(_message.Message):
    __slots__ = ("data_shard", "token", "begin", "end", "announce_until")
    DATA_SHARD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    data_shard: _common_pb2.DataShardName
    token: int
    begin: int
    end: int
    announce_until: int
    def __init__(self, data_shard: _Optional[_Union[_common_pb2.DataShardName, _Mapping]] = ..., token: _Optional[int] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., announce_until: _Optional[int] = ...) -> None: ...

class LeaseWait(_message.Message):
    __slots__ = ("retry_ms", "waiting_for")
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    retry_ms: int
    waiting_for: str
    def __init__(self, retry_ms: _Optional[int] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class FeedDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaseDataReply(_message.Message):
    __slots__ = ("lease", "wait", "done")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    lease: DataLease
    wait: LeaseWait
    done: FeedDone
    def __init__(self, lease: _Optional[_Union[DataLease, _Mapping]] = ..., wait: _Optional[_Union[LeaseWait, _Mapping]] = ..., done: _Optional[_Union[FeedDone, _Mapping]] = ...) -> None: ...

class CloseLeaseRequest(_message.Message):
    __slots__ = ("caller", "data_shard", "feed", "token")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    DATA_SHARD_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    data_shard: _common_pb2.DataShardName
    feed: int
    token: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., data_shard: _Optional[_Union[_common_pb2.DataShardName, _Mapping]] = ..., feed: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...

class CloseLeaseReply(_message.Message):
    __slots__ = ("done",)
    DONE_FIELD_NUMBER: _ClassVar[int]
    done: bool
    def __init__(self, done: bool = ...) -> None: ...

class JoinReplicaGroupRequest(_message.Message):
    __slots__ = ("caller", "left", "step")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    left: int
    step: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., left: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class JoinReplicaGroupReply(_message.Message):
    __slots__ = ("retry_ms", "group", "waiting_for")
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    retry_ms: int
    group: ReplicaGroup
    waiting_for: str
    def __init__(self, retry_ms: _Optional[int] = ..., group: _Optional[_Union[ReplicaGroup, _Mapping]] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class ReplicaGroup(_message.Message):
    __slots__ = ("generation", "members", "step", "donor", "void_until")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DONOR_FIELD_NUMBER: _ClassVar[int]
    VOID_UNTIL_FIELD_NUMBER: _ClassVar[int]
    generation: int
    members: _containers.RepeatedScalarFieldContainer[int]
    step: int
    donor: int
    void_until: int
    def __init__(self, generation: _Optional[int] = ..., members: _Optional[_Iterable[int]] = ..., step: _Optional[int] = ..., donor: _Optional[int] = ..., void_until: _Optional[int] = ...) -> None: ...

class PutGroupKeyRequest(_message.Message):
    __slots__ = ("caller", "generation", "key", "value")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    generation: int
    key: str
    value: bytes
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., generation: _Optional[int] = ..., key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class PutGroupKeyReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetGroupKeysRequest(_message.Message):
    __slots__ = ("caller", "generation", "keys")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    generation: int
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., generation: _Optional[int] = ..., keys: _Optional[_Iterable[str]] = ...) -> None: ...

class GetGroupKeysReply(_message.Message):
    __slots__ = ("retry_ms", "values")
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    retry_ms: int
    values: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, retry_ms: _Optional[int] = ..., values: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReportPublishedRequest(_message.Message):
    __slots__ = ("caller", "generation", "step")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    generation: int
    step: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class ReportPublishedReply(_message.Message):
    __slots__ = ("retry_ms",)
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    retry_ms: int
    def __init__(self, retry_ms: _Optional[int] = ...) -> None: ...

class DecideStepRequest(_message.Message):
    __slots__ = ("caller", "step", "ranks")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    step: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., step: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class DecideStepReply(_message.Message):
    __slots__ = ("decided", "members", "left_ms", "again_ms")
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    AGAIN_MS_FIELD_NUMBER: _ClassVar[int]
    decided: bool
    members: _containers.RepeatedScalarFieldContainer[int]
    left_ms: int
    again_ms: int
    def __init__(self, decided: bool = ..., members: _Optional[_Iterable[int]] = ..., left_ms: _Optional[int] = ..., again_ms: _Optional[int] = ...) -> None: ...

class ReadMakeUpRequest(_message.Message):
    __slots__ = ("caller", "feed", "step")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    feed: int
    step: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., feed: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class MadeUpBatch(_message.Message):
    __slots__ = ("rank", "dropped_rank", "dropped_step")
    RANK_FIELD_NUMBER: _ClassVar[int]
    DROPPED_RANK_FIELD_NUMBER: _ClassVar[int]
    DROPPED_STEP_FIELD_NUMBER: _ClassVar[int]
    rank: int
    dropped_rank: int
    dropped_step: int
    def __init__(self, rank: _Optional[int] = ..., dropped_rank: _Optional[int] = ..., dropped_step: _Optional[int] = ...) -> None: ...

class ReadMakeUpReply(_message.Message):
    __slots__ = ("end", "batches")
    END_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    end: int
    batches: _containers.RepeatedCompositeFieldContainer[MadeUpBatch]
    def __init__(self, end: _Optional[int] = ..., batches: _Optional[_Iterable[_Union[MadeUpBatch, _Mapping]]] = ...) -> None: ...

class BeginBatchRequest(_message.Message):
    __slots__ = ("caller", "source", "token", "sequence", "highest")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    source: _common_pb2.Source
    token: int
    sequence: int
    highest: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., source: _Optional[_Union[_common_pb2.Source, _Mapping]] = ..., token: _Optional[int] = ..., sequence: _Optional[int] = ..., highest: _Optional[int] = ...) -> None: ...

class BeginBatchReply(_message.Message):
    __slots__ = ("quarantined", "retry_ms", "announce_until")
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_UNTIL_FIELD_NUMBER: _ClassVar[int]
    quarantined: bool
    retry_ms: int
    announce_until: int
    def __init__(self, quarantined: bool = ..., retry_ms: _Optional[int] = ..., announce_until: _Optional[int] = ...) -> None: ...

class ReportNotFiniteRequest(_message.Message):
    __slots__ = ("caller", "source", "token", "first", "last", "parameter", "count", "in_a_row", "step", "highest")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    IN_A_ROW_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    source: _common_pb2.Source
    token: int
    first: int
    last: int
    parameter: str
    count: int
    in_a_row: int
    step: int
    highest: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., source: _Optional[_Union[_common_pb2.Source, _Mapping]] = ..., token: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., parameter: _Optional[str] = ..., count: _Optional[int] = ..., in_a_row: _Optional[int] = ..., step: _Optional[int] = ..., highest: _Optional[int] = ...) -> None: ...

class ReportNotFiniteReply(_message.Message):
    __slots__ = ("retry_ms", "failure")
    RETRY_MS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    retry_ms: int
    failure: _common_pb2.ErrorDetail
    def __init__(self, retry_ms: _Optional[int] = ..., failure: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class RebaseSourceRequest(_message.Message):
    __slots__ = ("caller", "next")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    next: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., next: _Optional[int] = ...) -> None: ...

class LostRange(_message.Message):
    __slots__ = ("partition", "first", "last")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    partition: int
    first: int
    last: int
    def __init__(self, partition: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class RebaseSourceReply(_message.Message):
    __slots__ = ("lost",)
    LOST_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedCompositeFieldContainer[LostRange]
    def __init__(self, lost: _Optional[_Iterable[_Union[LostRange, _Mapping]]] = ...) -> None: ...

class TakeCheckpointRequest(_message.Message):
    __slots__ = ("caller", "job_name", "ticket")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    job_name: str
    ticket: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., job_name: _Optional[str] = ..., ticket: _Optional[int] = ...) -> None: ...

class TakeCheckpointReply(_message.Message):
    __slots__ = ("ticket", "done", "number", "step", "url", "job_name", "failure")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    done: bool
    number: int
    step: int
    url: str
    job_name: str
    failure: _common_pb2.ErrorDetail
    def __init__(self, ticket: _Optional[int] = ..., done: bool = ..., number: _Optional[int] = ..., step: _Optional[int] = ..., url: _Optional[str] = ..., job_name: _Optional[str] = ..., failure: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class StopJobRequest(_message.Message):
    __slots__ = ("caller", "job_name", "reason")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    job_name: str
    reason: str
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., job_name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SwitchConsistencyRequest(_message.Message):
    __slots__ = ("job_name", "mode", "staleness", "strategy")
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    job_name: str
    mode: ConsistencyMode
    staleness: int
    strategy: str
    def __init__(self, job_name: _Optional[str] = ..., mode: _Optional[_Union[ConsistencyMode, str]] = ..., staleness: _Optional[int] = ..., strategy: _Optional[str] = ...) -> None: ...

class SwitchConsistencyReply(_message.Message):
    __slots__ = ("job_name", "job", "consistency", "first")
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    job_name: str
    job: int
    consistency: Consistency
    first: bool
    def __init__(self, job_name: _Optional[str] = ..., job: _Optional[int] = ..., consistency: _Optional[_Union[Consistency, _Mapping]] = ..., first: bool = ...) -> None: ...

class StopJobReply(_message.Message):
    __slots__ = ("job_name", "job", "stop", "first")
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    job_name: str
    job: int
    stop: Stop
    first: bool
    def __init__(self, job_name: _Optional[str] = ..., job: _Optional[int] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., first: bool = ...) -> None: ...

class ReportResidualRequest(_message.Message):
    __slots__ = ("caller", "number", "stage", "length", "sha256", "failure")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    number: int
    stage: FeedbackStage
    length: int
    sha256: bytes
    failure: str
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., number: _Optional[int] = ..., stage: _Optional[_Union[FeedbackStage, str]] = ..., length: _Optional[int] = ..., sha256: _Optional[bytes] = ..., failure: _Optional[str] = ...) -> None: ...

class ReportResidualReply(_message.Message):
    __slots__ = ("copy",)
    COPY_FIELD_NUMBER: _ClassVar[int]
    copy: bool
    def __init__(self, copy: bool = ...) -> None: ...

class TakeUpResidualRequest(_message.Message):
    __slots__ = ("caller", "generation", "worker", "failure")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    generation: int
    worker: str
    failure: str
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., generation: _Optional[int] = ..., worker: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...

class TakeUpResidualReply(_message.Message):
    __slots__ = ("taken",)
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    taken: bool
    def __init__(self, taken: bool = ...) -> None: ...

class RestoreCheckpointRequest(_message.Message):
    __slots__ = ("job_name", "number", "url", "cancel", "trust")
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    job_name: str
    number: int
    url: str
    cancel: bool
    trust: bool
    def __init__(self, job_name: _Optional[str] = ..., number: _Optional[int] = ..., url: _Optional[str] = ..., cancel: bool = ..., trust: bool = ...) -> None: ...

class RestoreCheckpointReply(_message.Message):
    __slots__ = ("number", "step", "url", "running", "damaged")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    number: int
    step: int
    url: str
    running: bool
    damaged: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., step: _Optional[int] = ..., url: _Optional[str] = ..., running: bool = ..., damaged: _Optional[_Iterable[int]] = ...) -> None: ...

class FollowJobRequest(_message.Message):
    __slots__ = ("job", "job_name", "reader", "leaves", "layout")
    JOB_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    job: int
    job_name: str
    reader: bytes
    leaves: bool
    layout: bool
    def __init__(self, job: _Optional[int] = ..., job_name: _Optional[str] = ..., reader: _Optional[bytes] = ..., leaves: bool = ..., layout: bool = ...) -> None: ...

class FollowJobReply(_message.Message):
    __slots__ = ("authorities", "job_pass", "job", "job_name", "state", "failure", "mode", "map", "layout", "url")
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    JOB_PASS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    authorities: bytes
    job_pass: bytes
    job: int
    job_name: str
    state: JobState
    failure: _common_pb2.ErrorDetail
    mode: _common_pb2.UpdateMode
    map: _common_pb2.PartitionMap
    layout: _common_pb2.JobLayout
    url: str
    def __init__(self, authorities: _Optional[bytes] = ..., job_pass: _Optional[bytes] = ..., job: _Optional[int] = ..., job_name: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., failure: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., mode: _Optional[_Union[_common_pb2.UpdateMode, str]] = ..., map: _Optional[_Union[_common_pb2.PartitionMap, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.JobLayout, _Mapping]] = ..., url: _Optional[str] = ...) -> None: ...

class BestModel(_message.Message):
    __slots__ = ("metric", "lowest", "value", "step", "url", "reported_s")
    METRIC_FIELD_NUMBER: _ClassVar[int]
    LOWEST_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    REPORTED_S_FIELD_NUMBER: _ClassVar[int]
    metric: str
    lowest: bool
    value: float
    step: int
    url: str
    reported_s: int
    def __init__(self, metric: _Optional[str] = ..., lowest: bool = ..., value: _Optional[float] = ..., step: _Optional[int] = ..., url: _Optional[str] = ..., reported_s: _Optional[int] = ...) -> None: ...

class ReportEvaluationRequest(_message.Message):
    __slots__ = ("job", "step", "metrics", "best")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    job: int
    step: int
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    best: BestModel
    def __init__(self, job: _Optional[int] = ..., step: _Optional[int] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., best: _Optional[_Union[BestModel, _Mapping]] = ...) -> None: ...

class ReportEvaluationReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EvaluationStatus(_message.Message):
    __slots__ = ("step", "metrics", "reported_s")
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    REPORTED_S_FIELD_NUMBER: _ClassVar[int]
    step: int
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    reported_s: int
    def __init__(self, step: _Optional[int] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., reported_s: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("incarnation", "role", "address", "host", "pid", "release", "last_seen_ms_ago", "job", "step", "samples", "waiting_for", "ranks", "not_finite", "dropped", "drain", "sums")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    role: Role
    address: str
    host: str
    pid: int
    release: str
    last_seen_ms_ago: int
    job: int
    step: int
    samples: int
    waiting_for: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    not_finite: int
    dropped: int
    drain: Drain
    sums: str
    def __init__(self, incarnation: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., release: _Optional[str] = ..., last_seen_ms_ago: _Optional[int] = ..., job: _Optional[int] = ..., step: _Optional[int] = ..., samples: _Optional[int] = ..., waiting_for: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., not_finite: _Optional[int] = ..., dropped: _Optional[int] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., sums: _Optional[str] = ...) -> None: ...

class FeedStatus(_message.Message):
    __slots__ = ("feed", "samples", "epochs", "free", "leased", "done", "finished", "quarantined")
    FEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    feed: int
    samples: int
    epochs: int
    free: int
    leased: int
    done: int
    finished: bool
    quarantined: int
    def __init__(self, feed: _Optional[int] = ..., samples: _Optional[int] = ..., epochs: _Optional[int] = ..., free: _Optional[int] = ..., leased: _Optional[int] = ..., done: _Optional[int] = ..., finished: bool = ..., quarantined: _Optional[int] = ...) -> None: ...

class CheckpointStatus(_message.Message):
    __slots__ = ("number", "step", "created_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    step: int
    created_s: int
    def __init__(self, number: _Optional[int] = ..., step: _Optional[int] = ..., created_s: _Optional[int] = ...) -> None: ...

class RestoredStatus(_message.Message):
    __slots__ = ("checkpoint", "partitions", "leased_again", "logs")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    LEASED_AGAIN_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    checkpoint: CheckpointStatus
    partitions: int
    leased_again: int
    logs: bool
    def __init__(self, checkpoint: _Optional[_Union[CheckpointStatus, _Mapping]] = ..., partitions: _Optional[int] = ..., leased_again: _Optional[int] = ..., logs: bool = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job", "name", "state", "failure", "mode", "logical_ranks", "workers", "step", "samples", "samples_per_s", "metrics", "map", "feeds", "parameters", "payload_bytes", "lost_pushes", "residuals_lost", "residual_lost_norm", "waits", "checkpoint", "restored", "recovering", "staleness", "not_finite", "workers_quarantined", "stop", "local_steps", "rows_at_once", "evaluation", "best", "readers", "dropped", "tables", "consistency", "runs")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_RANKS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    FEEDS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOST_PUSHES_FIELD_NUMBER: _ClassVar[int]
    RESIDUALS_LOST_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_LOST_NORM_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    ROWS_AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    job: int
    name: str
    state: JobState
    failure: _common_pb2.ErrorDetail
    mode: _common_pb2.UpdateMode
    logical_ranks: int
    workers: int
    step: int
    samples: int
    samples_per_s: float
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    map: _common_pb2.PartitionMap
    feeds: _containers.RepeatedCompositeFieldContainer[FeedStatus]
    parameters: int
    payload_bytes: int
    lost_pushes: int
    residuals_lost: int
    residual_lost_norm: float
    waits: _containers.RepeatedScalarFieldContainer[str]
    checkpoint: CheckpointStatus
    restored: RestoredStatus
    recovering: bool
    staleness: int
    not_finite: int
    workers_quarantined: int
    stop: Stop
    local_steps: int
    rows_at_once: bool
    evaluation: EvaluationStatus
    best: BestModel
    readers: int
    dropped: int
    tables: _containers.RepeatedCompositeFieldContainer[TableStatus]
    consistency: SwitchStatus
    runs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job: _Optional[int] = ..., name: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., failure: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., mode: _Optional[_Union[_common_pb2.UpdateMode, str]] = ..., logical_ranks: _Optional[int] = ..., workers: _Optional[int] = ..., step: _Optional[int] = ..., samples: _Optional[int] = ..., samples_per_s: _Optional[float] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., map: _Optional[_Union[_common_pb2.PartitionMap, _Mapping]] = ..., feeds: _Optional[_Iterable[_Union[FeedStatus, _Mapping]]] = ..., parameters: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., lost_pushes: _Optional[int] = ..., residuals_lost: _Optional[int] = ..., residual_lost_norm: _Optional[float] = ..., waits: _Optional[_Iterable[str]] = ..., checkpoint: _Optional[_Union[CheckpointStatus, _Mapping]] = ..., restored: _Optional[_Union[RestoredStatus, _Mapping]] = ..., recovering: bool = ..., staleness: _Optional[int] = ..., not_finite: _Optional[int] = ..., workers_quarantined: _Optional[int] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., local_steps: _Optional[int] = ..., rows_at_once: bool = ..., evaluation: _Optional[_Union[EvaluationStatus, _Mapping]] = ..., best: _Optional[_Union[BestModel, _Mapping]] = ..., readers: _Optional[int] = ..., dropped: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableStatus, _Mapping]]] = ..., consistency: _Optional[_Union[SwitchStatus, _Mapping]] = ..., runs: _Optional[_Iterable[str]] = ...) -> None: ...

class SwitchStatus(_message.Message):
    __slots__ = ("consistency", "servers", "behind", "step", "unfinished")
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    consistency: Consistency
    servers: bool
    behind: _containers.RepeatedScalarFieldContainer[int]
    step: int
    unfinished: str
    def __init__(self, consistency: _Optional[_Union[Consistency, _Mapping]] = ..., servers: bool = ..., behind: _Optional[_Iterable[int]] = ..., step: _Optional[int] = ..., unfinished: _Optional[str] = ...) -> None: ...

class TableStatus(_message.Message):
    __slots__ = ("name", "dim", "optimizer", "rows")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dim: int
    optimizer: str
    rows: int
    def __init__(self, name: _Optional[str] = ..., dim: _Optional[int] = ..., optimizer: _Optional[str] = ..., rows: _Optional[int] = ...) -> None: ...

class FullDisk(_message.Message):
    __slots__ = ("file", "free_bytes", "room_bytes", "full_ms")
    FILE_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FULL_MS_FIELD_NUMBER: _ClassVar[int]
    file: str
    free_bytes: int
    room_bytes: int
    full_ms: int
    def __init__(self, file: _Optional[str] = ..., free_bytes: _Optional[int] = ..., room_bytes: _Optional[int] = ..., full_ms: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("term", "members", "jobs", "uptime_ms", "waiting_for", "time_ms", "protocol", "release", "full_disk", "open_to", "authorities")
    TERM_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    FULL_DISK_FIELD_NUMBER: _ClassVar[int]
    OPEN_TO_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    term: int
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    uptime_ms: int
    waiting_for: str
    time_ms: int
    protocol: int
    release: str
    full_disk: FullDisk
    open_to: str
    authorities: bytes
    def __init__(self, term: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ..., uptime_ms: _Optional[int] = ..., waiting_for: _Optional[str] = ..., time_ms: _Optional[int] = ..., protocol: _Optional[int] = ..., release: _Optional[str] = ..., full_disk: _Optional[_Union[FullDisk, _Mapping]] = ..., open_to: _Optional[str] = ..., authorities: _Optional[bytes] = ...) -> None: ...

class ListQuarantinedRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: int
    def __init__(self, job: _Optional[int] = ...) -> None: ...

class QuarantinedBatch(_message.Message):
    __slots__ = ("feed", "epoch", "source", "sequence", "begin", "end", "deaths", "parameter", "worker")
    FEED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    DEATHS_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    feed: int
    epoch: int
    source: _common_pb2.Source
    sequence: int
    begin: int
    end: int
    deaths: int
    parameter: str
    worker: int
    def __init__(self, feed: _Optional[int] = ..., epoch: _Optional[int] = ..., source: _Optional[_Union[_common_pb2.Source, _Mapping]] = ..., sequence: _Optional[int] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., deaths: _Optional[int] = ..., parameter: _Optional[str] = ..., worker: _Optional[int] = ...) -> None: ...

class FeedOrder(_message.Message):
    __slots__ = ("feed", "samples", "shuffle")
    FEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    feed: int
    samples: int
    shuffle: bool
    def __init__(self, feed: _Optional[int] = ..., samples: _Optional[int] = ..., shuffle: bool = ...) -> None: ...

class ListQuarantinedReply(_message.Message):
    __slots__ = ("batches", "seed", "feeds")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    FEEDS_FIELD_NUMBER: _ClassVar[int]
    batches: _containers.RepeatedCompositeFieldContainer[QuarantinedBatch]
    seed: int
    feeds: _containers.RepeatedCompositeFieldContainer[FeedOrder]
    def __init__(self, batches: _Optional[_Iterable[_Union[QuarantinedBatch, _Mapping]]] = ..., seed: _Optional[int] = ..., feeds: _Optional[_Iterable[_Union[FeedOrder, _Mapping]]] = ...) -> None: ...

class ReadAuditRequest(_message.Message):
    __slots__ = ("job", "after")
    JOB_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    job: str
    after: int
    def __init__(self, job: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class AuditEntry(_message.Message):
    __slots__ = ("number", "term", "time", "job", "event", "body_json")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    number: int
    term: int
    time: float
    job: int
    event: str
    body_json: str
    def __init__(self, number: _Optional[int] = ..., term: _Optional[int] = ..., time: _Optional[float] = ..., job: _Optional[int] = ..., event: _Optional[str] = ..., body_json: _Optional[str] = ...) -> None: ...

class ReadAuditReply(_message.Message):
    __slots__ = ("entries", "job", "reached", "more", "lost")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AuditEntry]
    job: int
    reached: int
    more: bool
    lost: int
    def __init__(self, entries: _Optional[_Iterable[_Union[AuditEntry, _Mapping]]] = ..., job: _Optional[int] = ..., reached: _Optional[int] = ..., more: bool = ..., lost: _Optional[int] = ...) -> None: ...
