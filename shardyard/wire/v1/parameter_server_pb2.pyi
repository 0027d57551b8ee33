from shardyard.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUSH_KIND_UNSPECIFIED: _ClassVar[PushKind]
    PUSH_KIND_GRADIENT: _ClassVar[PushKind]
    PUSH_KIND_EMPTY: _ClassVar[PushKind]
    PUSH_KIND_VALUES: _ClassVar[PushKind]
    PUSH_KIND_NOTHING: _ClassVar[PushKind]

class SspPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SSP_PHASE_UNSPECIFIED: _ClassVar[SspPhase]
    SSP_PHASE_JOINS: _ClassVar[SspPhase]
    SSP_PHASE_STEPS: _ClassVar[SspPhase]
    SSP_PHASE_RESTS: _ClassVar[SspPhase]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_APPLIED: _ClassVar[Outcome]
    OUTCOME_RECORDED: _ClassVar[Outcome]
    OUTCOME_DUPLICATE: _ClassVar[Outcome]
    OUTCOME_DROPPED: _ClassVar[Outcome]

class RowCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_CODE_UNSPECIFIED: _ClassVar[RowCode]
    ROW_CODE_BF16: _ClassVar[RowCode]
    ROW_CODE_INT8: _ClassVar[RowCode]
PUSH_KIND_UNSPECIFIED: PushKind
PUSH_KIND_GRADIENT: PushKind
PUSH_KIND_EMPTY: PushKind
PUSH_KIND_VALUES: PushKind
PUSH_KIND_NOTHING: PushKind
SSP_PHASE_UNSPECIFIED: SspPhase
SSP_PHASE_JOINS: SspPhase
SSP_PHASE_STEPS: SspPhase
SSP_PHASE_RESTS: SspPhase
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_APPLIED: Outcome
OUTCOME_RECORDED: Outcome
OUTCOME_DUPLICATE: Outcome
OUTCOME_DROPPED: Outcome
ROW_CODE_UNSPECIFIED: RowCode
ROW_CODE_BF16: RowCode
ROW_CODE_INT8: RowCode

class CreatePartitionsRequest(_message.Message):
    __slots__ = ("caller", "generation", "layout", "partitions", "mode", "logical_ranks", "server", "restore", "durability", "staleness", "working", "stale", "clipping", "backup_workers", "switches", "rows_at_once", "mirrored")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_RANKS_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WORKING_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    CLIPPING_FIELD_NUMBER: _ClassVar[int]
    BACKUP_WORKERS_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    ROWS_AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    MIRRORED_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    generation: int
    layout: _common_pb2.JobLayout
    partitions: _containers.RepeatedScalarFieldContainer[int]
    mode: _common_pb2.UpdateMode
    logical_ranks: int
    server: int
    restore: Restore
    durability: _common_pb2.Durability
    staleness: int
    working: _containers.RepeatedScalarFieldContainer[int]
    stale: StaleRule
    clipping: Clipping
    backup_workers: int
    switches: int
    rows_at_once: bool
    mirrored: bool
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., generation: _Optional[int] = ..., layout: _Optional[_Union[_common_pb2.JobLayout, _Mapping]] = ..., partitions: _Optional[_Iterable[int]] = ..., mode: _Optional[_Union[_common_pb2.UpdateMode, str]] = ..., logical_ranks: _Optional[int] = ..., server: _Optional[int] = ..., restore: _Optional[_Union[Restore, _Mapping]] = ..., durability: _Optional[_Union[_common_pb2.Durability, str]] = ..., staleness: _Optional[int] = ..., working: _Optional[_Iterable[int]] = ..., stale: _Optional[_Union[StaleRule, _Mapping]] = ..., clipping: _Optional[_Union[Clipping, _Mapping]] = ..., backup_workers: _Optional[int] = ..., switches: _Optional[int] = ..., rows_at_once: bool = ..., mirrored: bool = ...) -> None: ...

class SetStalenessRequest(_message.Message):
    __slots__ = ("caller", "server", "generation", "staleness", "switches")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    server: int
    generation: int
    staleness: int
    switches: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., server: _Optional[int] = ..., generation: _Optional[int] = ..., staleness: _Optional[int] = ..., switches: _Optional[int] = ...) -> None: ...

class SetStalenessReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StaleRule(_message.Message):
    __slots__ = ("divides_rate", "compensation", "decay")
    DIVIDES_RATE_FIELD_NUMBER: _ClassVar[int]
    COMPENSATION_FIELD_NUMBER: _ClassVar[int]
    DECAY_FIELD_NUMBER: _ClassVar[int]
    divides_rate: bool
    compensation: float
    decay: float
    def __init__(self, divides_rate: bool = ..., compensation: _Optional[float] = ..., decay: _Optional[float] = ...) -> None: ...

class Clipping(_message.Message):
    __slots__ = ("norm", "value")
    NORM_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    norm: float
    value: float
    def __init__(self, norm: _Optional[float] = ..., value: _Optional[float] = ...) -> None: ...

class CreatePartitionsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointFile(_message.Message):
    __slots__ = ("path", "length", "sha256", "blocks")
    PATH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    path: str
    length: int
    sha256: bytes
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, path: _Optional[str] = ..., length: _Optional[int] = ..., sha256: _Optional[bytes] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class TableFiles(_message.Message):
    __slots__ = ("updates", "rows", "ids", "base", "increments", "now_ms")
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    INCREMENTS_FIELD_NUMBER: _ClassVar[int]
    NOW_MS_FIELD_NUMBER: _ClassVar[int]
    updates: int
    rows: int
    ids: int
    base: _containers.RepeatedCompositeFieldContainer[CheckpointFile]
    increments: _containers.RepeatedCompositeFieldContainer[CheckpointFile]
    now_ms: int
    def __init__(self, updates: _Optional[int] = ..., rows: _Optional[int] = ..., ids: _Optional[int] = ..., base: _Optional[_Iterable[_Union[CheckpointFile, _Mapping]]] = ..., increments: _Optional[_Iterable[_Union[CheckpointFile, _Mapping]]] = ..., now_ms: _Optional[int] = ...) -> None: ...

class RestoredPartition(_message.Message):
    __slots__ = ("partition", "version", "files", "logs", "tables")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    partition: int
    version: _common_pb2.Version
    files: _containers.RepeatedCompositeFieldContainer[CheckpointFile]
    logs: _containers.RepeatedScalarFieldContainer[int]
    tables: _containers.RepeatedCompositeFieldContainer[TableFiles]
    def __init__(self, partition: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., files: _Optional[_Iterable[_Union[CheckpointFile, _Mapping]]] = ..., logs: _Optional[_Iterable[int]] = ..., tables: _Optional[_Iterable[_Union[TableFiles, _Mapping]]] = ...) -> None: ...

class Restore(_message.Message):
    __slots__ = ("url", "partitions", "number", "job", "begun", "step")
    URL_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    url: str
    partitions: _containers.RepeatedCompositeFieldContainer[RestoredPartition]
    number: int
    job: int
    begun: _containers.RepeatedCompositeFieldContainer[BegunDataShard]
    step: int
    def __init__(self, url: _Optional[str] = ..., partitions: _Optional[_Iterable[_Union[RestoredPartition, _Mapping]]] = ..., number: _Optional[int] = ..., job: _Optional[int] = ..., begun: _Optional[_Iterable[_Union[BegunDataShard, _Mapping]]] = ..., step: _Optional[int] = ...) -> None: ...

class BegunDataShard(_message.Message):
    __slots__ = ("data_shard", "next")
    DATA_SHARD_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    data_shard: _common_pb2.DataShardName
    next: int
    def __init__(self, data_shard: _Optional[_Union[_common_pb2.DataShardName, _Mapping]] = ..., next: _Optional[int] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("caller", "server", "generation", "url", "number", "step", "base", "wait_ms", "oldest", "logs", "attempt", "seal")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    server: int
    generation: int
    url: str
    number: int
    step: int
    base: int
    wait_ms: int
    oldest: int
    logs: _containers.RepeatedScalarFieldContainer[int]
    attempt: int
    seal: bool
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., server: _Optional[int] = ..., generation: _Optional[int] = ..., url: _Optional[str] = ..., number: _Optional[int] = ..., step: _Optional[int] = ..., base: _Optional[int] = ..., wait_ms: _Optional[int] = ..., oldest: _Optional[int] = ..., logs: _Optional[_Iterable[int]] = ..., attempt: _Optional[int] = ..., seal: bool = ...) -> None: ...

class SavedPartition(_message.Message):
    __slots__ = ("partition", "version", "file", "token", "tables")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    partition: int
    version: _common_pb2.Version
    file: CheckpointFile
    token: int
    tables: _containers.RepeatedCompositeFieldContainer[TableFiles]
    def __init__(self, partition: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., file: _Optional[_Union[CheckpointFile, _Mapping]] = ..., token: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableFiles, _Mapping]]] = ...) -> None: ...

class SaveCheckpointReply(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[SavedPartition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[SavedPartition, _Mapping]]] = ...) -> None: ...

class ForgetSourcesRequest(_message.Message):
    __slots__ = ("caller", "server", "generation", "floor", "done", "workers")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    server: int
    generation: int
    floor: int
    done: _containers.RepeatedCompositeFieldContainer[DoneDataShards]
    workers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., server: _Optional[int] = ..., generation: _Optional[int] = ..., floor: _Optional[int] = ..., done: _Optional[_Iterable[_Union[DoneDataShards, _Mapping]]] = ..., workers: _Optional[_Iterable[int]] = ...) -> None: ...

class DoneDataShards(_message.Message):
    __slots__ = ("feed", "per_epoch", "begun", "open")
    FEED_FIELD_NUMBER: _ClassVar[int]
    PER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    feed: int
    per_epoch: int
    begun: int
    open: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, feed: _Optional[int] = ..., per_epoch: _Optional[int] = ..., begun: _Optional[int] = ..., open: _Optional[_Iterable[int]] = ...) -> None: ...

class ForgetSourcesReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PassOverRequest(_message.Message):
    __slots__ = ("caller", "server", "generation", "worker", "next")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    server: int
    generation: int
    worker: int
    next: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., server: _Optional[int] = ..., generation: _Optional[int] = ..., worker: _Optional[int] = ..., next: _Optional[int] = ...) -> None: ...

class PassOverReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InitializeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenPartitionsRequest(_message.Message):
    __slots__ = ("caller", "generation")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    generation: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., generation: _Optional[int] = ...) -> None: ...

class OpenPartitionsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DropJobRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ...) -> None: ...

class DropJobReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FenceRequest(_message.Message):
    __slots__ = ("caller", "incarnations")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., incarnations: _Optional[_Iterable[int]] = ...) -> None: ...

class FenceReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SourceToken(_message.Message):
    __slots__ = ("source", "lane", "token")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    source: _common_pb2.Source
    lane: int
    token: int
    def __init__(self, source: _Optional[_Union[_common_pb2.Source, _Mapping]] = ..., lane: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...

class OpenSourcesRequest(_message.Message):
    __slots__ = ("caller", "server", "generation", "sources")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    server: int
    generation: int
    sources: _containers.RepeatedCompositeFieldContainer[SourceToken]
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., server: _Optional[int] = ..., generation: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[SourceToken, _Mapping]]] = ...) -> None: ...

class Watermark(_message.Message):
    __slots__ = ("partition", "next", "version")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    partition: int
    next: int
    version: _common_pb2.Version
    def __init__(self, partition: _Optional[int] = ..., next: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ...) -> None: ...

class SourceWatermarks(_message.Message):
    __slots__ = ("source", "lane", "watermarks")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    WATERMARKS_FIELD_NUMBER: _ClassVar[int]
    source: _common_pb2.Source
    lane: int
    watermarks: _containers.RepeatedCompositeFieldContainer[Watermark]
    def __init__(self, source: _Optional[_Union[_common_pb2.Source, _Mapping]] = ..., lane: _Optional[int] = ..., watermarks: _Optional[_Iterable[_Union[Watermark, _Mapping]]] = ...) -> None: ...

class OpenSourcesReply(_message.Message):
    __slots__ = ("sources",)
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[SourceWatermarks]
    def __init__(self, sources: _Optional[_Iterable[_Union[SourceWatermarks, _Mapping]]] = ...) -> None: ...

class ReadLedgerRequest(_message.Message):
    __slots__ = ("caller", "server", "generation", "sources")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    server: int
    generation: int
    sources: _containers.RepeatedCompositeFieldContainer[SourceToken]
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., server: _Optional[int] = ..., generation: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[SourceToken, _Mapping]]] = ...) -> None: ...

class ReadLedgerReply(_message.Message):
    __slots__ = ("sources",)
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[SourceWatermarks]
    def __init__(self, sources: _Optional[_Iterable[_Union[SourceWatermarks, _Mapping]]] = ...) -> None: ...

class PushPart(_message.Message):
    __slots__ = ("partition", "payload_bytes", "absent_blocks", "code_bytes")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ABSENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CODE_BYTES_FIELD_NUMBER: _ClassVar[int]
    partition: int
    payload_bytes: int
    absent_blocks: _containers.RepeatedScalarFieldContainer[int]
    code_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, partition: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., absent_blocks: _Optional[_Iterable[int]] = ..., code_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("bytes", "region")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    region: int
    def __init__(self, bytes: _Optional[int] = ..., region: _Optional[int] = ...) -> None: ...

class SspReport(_message.Message):
    __slots__ = ("phase", "clock", "ahead", "epoch")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    phase: SspPhase
    clock: int
    ahead: int
    epoch: int
    def __init__(self, phase: _Optional[_Union[SspPhase, str]] = ..., clock: _Optional[int] = ..., ahead: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Base(_message.Message):
    __slots__ = ("version", "alike")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ALIKE_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.Version
    alike: int
    def __init__(self, version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., alike: _Optional[int] = ...) -> None: ...

class Bases(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Base]
    def __init__(self, parts: _Optional[_Iterable[_Union[Base, _Mapping]]] = ...) -> None: ...

class StepVerdict(_message.Message):
    __slots__ = ("step", "members", "square_norm")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SQUARE_NORM_FIELD_NUMBER: _ClassVar[int]
    step: int
    members: _containers.RepeatedScalarFieldContainer[int]
    square_norm: float
    def __init__(self, step: _Optional[int] = ..., members: _Optional[_Iterable[int]] = ..., square_norm: _Optional[float] = ...) -> None: ...

class VerdictGiven(_message.Message):
    __slots__ = ("verdict", "partitions")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    verdict: StepVerdict
    partitions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, verdict: _Optional[_Union[StepVerdict, _Mapping]] = ..., partitions: _Optional[_Iterable[int]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("plan", "token", "first", "last", "source", "number", "weight", "groups", "table_groups", "ssp_report", "verdict", "bases", "rows", "requested")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TABLE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SSP_REPORT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    plan: int
    token: int
    first: int
    last: int
    source: _common_pb2.Source
    number: int
    weight: float
    groups: _containers.RepeatedCompositeFieldContainer[_common_pb2.ParameterGroup]
    table_groups: _containers.RepeatedCompositeFieldContainer[_common_pb2.ParameterGroup]
    ssp_report: SspReport
    verdict: StepVerdict
    bases: Bases
    rows: _containers.RepeatedCompositeFieldContainer[PushedRows]
    requested: _containers.RepeatedCompositeFieldContainer[RequestedRows]
    def __init__(self, plan: _Optional[int] = ..., token: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., source: _Optional[_Union[_common_pb2.Source, _Mapping]] = ..., number: _Optional[int] = ..., weight: _Optional[float] = ..., groups: _Optional[_Iterable[_Union[_common_pb2.ParameterGroup, _Mapping]]] = ..., table_groups: _Optional[_Iterable[_Union[_common_pb2.ParameterGroup, _Mapping]]] = ..., ssp_report: _Optional[_Union[SspReport, _Mapping]] = ..., verdict: _Optional[_Union[StepVerdict, _Mapping]] = ..., bases: _Optional[_Union[Bases, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[PushedRows, _Mapping]]] = ..., requested: _Optional[_Iterable[_Union[RequestedRows, _Mapping]]] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("caller", "server", "generation", "name", "kind", "parts", "weight", "groups", "pull", "plan", "step", "shared_at", "attach", "rest", "detach", "ssp_report", "bases", "verdict", "rows", "table_groups", "requested", "overflow", "attach_rows", "rows_at", "requested_at", "expired")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHARED_AT_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    SSP_REPORT_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TABLE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    ATTACH_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_AT_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    server: int
    generation: int
    name: _common_pb2.PushName
    kind: PushKind
    parts: _containers.RepeatedCompositeFieldContainer[PushPart]
    weight: float
    groups: _containers.RepeatedCompositeFieldContainer[_common_pb2.ParameterGroup]
    pull: PullRequest
    plan: int
    step: Step
    shared_at: int
    attach: SharedMemory
    rest: int
    detach: bool
    ssp_report: SspReport
    bases: Bases
    verdict: StepVerdict
    rows: _containers.RepeatedCompositeFieldContainer[PushedRows]
    table_groups: _containers.RepeatedCompositeFieldContainer[_common_pb2.ParameterGroup]
    requested: _containers.RepeatedCompositeFieldContainer[RequestedRows]
    overflow: bool
    attach_rows: SharedMemory
    rows_at: int
    requested_at: int
    expired: _containers.RepeatedCompositeFieldContainer[RequestedRows]
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., server: _Optional[int] = ..., generation: _Optional[int] = ..., name: _Optional[_Union[_common_pb2.PushName, _Mapping]] = ..., kind: _Optional[_Union[PushKind, str]] = ..., parts: _Optional[_Iterable[_Union[PushPart, _Mapping]]] = ..., weight: _Optional[float] = ..., groups: _Optional[_Iterable[_Union[_common_pb2.ParameterGroup, _Mapping]]] = ..., pull: _Optional[_Union[PullRequest, _Mapping]] = ..., plan: _Optional[int] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., shared_at: _Optional[int] = ..., attach: _Optional[_Union[SharedMemory, _Mapping]] = ..., rest: _Optional[int] = ..., detach: bool = ..., ssp_report: _Optional[_Union[SspReport, _Mapping]] = ..., bases: _Optional[_Union[Bases, _Mapping]] = ..., verdict: _Optional[_Union[StepVerdict, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[PushedRows, _Mapping]]] = ..., table_groups: _Optional[_Iterable[_Union[_common_pb2.ParameterGroup, _Mapping]]] = ..., requested: _Optional[_Iterable[_Union[RequestedRows, _Mapping]]] = ..., overflow: bool = ..., attach_rows: _Optional[_Union[SharedMemory, _Mapping]] = ..., rows_at: _Optional[int] = ..., requested_at: _Optional[int] = ..., expired: _Optional[_Iterable[_Union[RequestedRows, _Mapping]]] = ...) -> None: ...

class PushedRows(_message.Message):
    __slots__ = ("table", "partitions", "rows", "id_bytes", "row_bytes", "counted", "now_ms")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    NOW_MS_FIELD_NUMBER: _ClassVar[int]
    table: int
    partitions: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    id_bytes: _containers.RepeatedScalarFieldContainer[int]
    row_bytes: _containers.RepeatedScalarFieldContainer[int]
    counted: bool
    now_ms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[int] = ..., partitions: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., id_bytes: _Optional[_Iterable[int]] = ..., row_bytes: _Optional[_Iterable[int]] = ..., counted: bool = ..., now_ms: _Optional[_Iterable[int]] = ...) -> None: ...

class PushFrame(_message.Message):
    __slots__ = ("header", "offset", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    offset: int
    data: bytes
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PartReply(_message.Message):
    __slots__ = ("partition", "outcome", "next", "version", "alike")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ALIKE_FIELD_NUMBER: _ClassVar[int]
    partition: int
    outcome: Outcome
    next: int
    version: _common_pb2.Version
    alike: int
    def __init__(self, partition: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., next: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., alike: _Optional[int] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[PartReply]
    def __init__(self, parts: _Optional[_Iterable[_Union[PartReply, _Mapping]]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("caller", "server", "generation", "partitions", "number", "exactly", "wait_ms", "coding", "shared", "order", "pin")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EXACTLY_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    CODING_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    server: int
    generation: int
    partitions: _containers.RepeatedScalarFieldContainer[int]
    number: int
    exactly: bool
    wait_ms: int
    coding: str
    shared: bool
    order: _containers.RepeatedScalarFieldContainer[int]
    pin: bytes
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., server: _Optional[int] = ..., generation: _Optional[int] = ..., partitions: _Optional[_Iterable[int]] = ..., number: _Optional[int] = ..., exactly: bool = ..., wait_ms: _Optional[int] = ..., coding: _Optional[str] = ..., shared: bool = ..., order: _Optional[_Iterable[int]] = ..., pin: _Optional[bytes] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("caller", "server", "generation", "pin", "number", "lease_ms", "wait_ms", "rows")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    server: int
    generation: int
    pin: bytes
    number: int
    lease_ms: int
    wait_ms: int
    rows: bool
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., server: _Optional[int] = ..., generation: _Optional[int] = ..., pin: _Optional[bytes] = ..., number: _Optional[int] = ..., lease_ms: _Optional[int] = ..., wait_ms: _Optional[int] = ..., rows: bool = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("parts", "not_yet")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NOT_YET_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[PulledPart]
    not_yet: NotYet
    def __init__(self, parts: _Optional[_Iterable[_Union[PulledPart, _Mapping]]] = ..., not_yet: _Optional[_Union[NotYet, _Mapping]] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("caller", "pin")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    pin: bytes
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., pin: _Optional[bytes] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PulledPart(_message.Message):
    __slots__ = ("partition", "version", "alike")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ALIKE_FIELD_NUMBER: _ClassVar[int]
    partition: int
    version: _common_pb2.Version
    alike: int
    def __init__(self, partition: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., alike: _Optional[int] = ...) -> None: ...

class Missing(_message.Message):
    __slots__ = ("partition", "have", "want", "waiting_for")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    partition: int
    have: _common_pb2.Version
    want: int
    waiting_for: str
    def __init__(self, partition: _Optional[int] = ..., have: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., want: _Optional[int] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class NotYet(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedCompositeFieldContainer[Missing]
    def __init__(self, missing: _Optional[_Iterable[_Union[Missing, _Mapping]]] = ...) -> None: ...

class Gathered(_message.Message):
    __slots__ = ("partition", "step", "square_norm")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SQUARE_NORM_FIELD_NUMBER: _ClassVar[int]
    partition: int
    step: int
    square_norm: float
    def __init__(self, partition: _Optional[int] = ..., step: _Optional[int] = ..., square_norm: _Optional[float] = ...) -> None: ...

class PullHeader(_message.Message):
    __slots__ = ("words", "push", "parts", "not_yet", "attached", "not_attached", "regions", "place_regions", "places", "code_bytes", "clock", "gathered", "rows_attached", "rows_not_attached")
    WORDS_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NOT_YET_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    NOT_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    PLACE_REGIONS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    CODE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    GATHERED_FIELD_NUMBER: _ClassVar[int]
    ROWS_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    ROWS_NOT_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    words: _containers.RepeatedScalarFieldContainer[int]
    push: PushReply
    parts: _containers.RepeatedCompositeFieldContainer[PulledPart]
    not_yet: NotYet
    attached: bool
    not_attached: str
    regions: _containers.RepeatedCompositeFieldContainer[SharedMemory]
    place_regions: _containers.RepeatedScalarFieldContainer[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    code_bytes: _containers.RepeatedScalarFieldContainer[int]
    clock: int
    gathered: _containers.RepeatedCompositeFieldContainer[Gathered]
    rows_attached: bool
    rows_not_attached: str
    def __init__(self, words: _Optional[_Iterable[int]] = ..., push: _Optional[_Union[PushReply, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[PulledPart, _Mapping]]] = ..., not_yet: _Optional[_Union[NotYet, _Mapping]] = ..., attached: bool = ..., not_attached: _Optional[str] = ..., regions: _Optional[_Iterable[_Union[SharedMemory, _Mapping]]] = ..., place_regions: _Optional[_Iterable[int]] = ..., places: _Optional[_Iterable[int]] = ..., code_bytes: _Optional[_Iterable[int]] = ..., clock: _Optional[int] = ..., gathered: _Optional[_Iterable[_Union[Gathered, _Mapping]]] = ..., rows_attached: bool = ..., rows_not_attached: _Optional[str] = ...) -> None: ...

class PullFrame(_message.Message):
    __slots__ = ("header", "offset", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: PullHeader
    offset: int
    data: bytes
    def __init__(self, header: _Optional[_Union[PullHeader, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class RequestedRows(_message.Message):
    __slots__ = ("table", "partitions", "rows")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    table: int
    partitions: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, table: _Optional[int] = ..., partitions: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ...) -> None: ...

class LookUpHeader(_message.Message):
    __slots__ = ("caller", "server", "generation", "requested", "number", "wait_ms", "code", "pin")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    server: int
    generation: int
    requested: _containers.RepeatedCompositeFieldContainer[RequestedRows]
    number: int
    wait_ms: int
    code: RowCode
    pin: bytes
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., server: _Optional[int] = ..., generation: _Optional[int] = ..., requested: _Optional[_Iterable[_Union[RequestedRows, _Mapping]]] = ..., number: _Optional[int] = ..., wait_ms: _Optional[int] = ..., code: _Optional[_Union[RowCode, str]] = ..., pin: _Optional[bytes] = ...) -> None: ...

class LookUpFrame(_message.Message):
    __slots__ = ("header", "offset", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: LookUpHeader
    offset: int
    data: bytes
    def __init__(self, header: _Optional[_Union[LookUpHeader, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ReadRowsRequest(_message.Message):
    __slots__ = ("caller", "server", "generation", "partition", "table", "pin")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    server: int
    generation: int
    partition: int
    table: int
    pin: bytes
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., server: _Optional[int] = ..., generation: _Optional[int] = ..., partition: _Optional[int] = ..., table: _Optional[int] = ..., pin: _Optional[bytes] = ...) -> None: ...

class RowsFrame(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ReadOptimizerRequest(_message.Message):
    __slots__ = ("caller", "server", "generation", "partition", "number", "values")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    server: int
    generation: int
    partition: int
    number: int
    values: bool
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., server: _Optional[int] = ..., generation: _Optional[int] = ..., partition: _Optional[int] = ..., number: _Optional[int] = ..., values: bool = ...) -> None: ...

class OptimizerHeader(_message.Message):
    __slots__ = ("caller", "server", "generation", "partition", "version", "counts", "slots", "step", "group")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    server: int
    generation: int
    partition: int
    version: _common_pb2.Version
    counts: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[str]
    step: int
    group: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., server: _Optional[int] = ..., generation: _Optional[int] = ..., partition: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., counts: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[str]] = ..., step: _Optional[int] = ..., group: _Optional[int] = ...) -> None: ...

class PublishStateReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OptimizerFrame(_message.Message):
    __slots__ = ("header", "offset", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: OptimizerHeader
    offset: int
    data: bytes
    def __init__(self, header: _Optional[_Union[OptimizerHeader, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("socket", "key")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    socket: str
    key: bytes
    def __init__(self, socket: _Optional[str] = ..., key: _Optional[bytes] = ...) -> None: ...

class DescribeServerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribedPartition(_message.Message):
    __slots__ = ("job", "partition", "version", "payload_bytes", "sources", "open", "newest_cut")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    NEWEST_CUT_FIELD_NUMBER: _ClassVar[int]
    job: int
    partition: int
    version: _common_pb2.Version
    payload_bytes: int
    sources: int
    open: bool
    newest_cut: int
    def __init__(self, job: _Optional[int] = ..., partition: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.Version, _Mapping]] = ..., payload_bytes: _Optional[int] = ..., sources: _Optional[int] = ..., open: bool = ..., newest_cut: _Optional[int] = ...) -> None: ...

class DescribedStaleness(_message.Message):
    __slots__ = ("job", "most")
    JOB_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    job: int
    most: int
    def __init__(self, job: _Optional[int] = ..., most: _Optional[int] = ...) -> None: ...

class DescribedLateness(_message.Message):
    __slots__ = ("job", "gradients", "total", "most", "uncompensated")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    UNCOMPENSATED_FIELD_NUMBER: _ClassVar[int]
    job: int
    gradients: int
    total: int
    most: int
    uncompensated: int
    def __init__(self, job: _Optional[int] = ..., gradients: _Optional[int] = ..., total: _Optional[int] = ..., most: _Optional[int] = ..., uncompensated: _Optional[int] = ...) -> None: ...

class DescribeServerReply(_message.Message):
    __slots__ = ("server", "partitions", "pushes_applied", "pushes_duplicate", "bytes_received", "bytes_sent", "workers_attached", "workers_streaming", "staleness", "lateness", "pins", "memory_bytes_max", "tables")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_APPLIED_FIELD_NUMBER: _ClassVar[int]
    PUSHES_DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_STREAMING_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    LATENESS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    server: int
    partitions: _containers.RepeatedCompositeFieldContainer[DescribedPartition]
    pushes_applied: int
    pushes_duplicate: int
    bytes_received: int
    bytes_sent: int
    workers_attached: int
    workers_streaming: int
    staleness: _containers.RepeatedCompositeFieldContainer[DescribedStaleness]
    lateness: _containers.RepeatedCompositeFieldContainer[DescribedLateness]
    pins: int
    memory_bytes_max: int
    tables: _containers.RepeatedCompositeFieldContainer[DescribedTable]
    def __init__(self, server: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[DescribedPartition, _Mapping]]] = ..., pushes_applied: _Optional[int] = ..., pushes_duplicate: _Optional[int] = ..., bytes_received: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., workers_attached: _Optional[int] = ..., workers_streaming: _Optional[int] = ..., staleness: _Optional[_Iterable[_Union[DescribedStaleness, _Mapping]]] = ..., lateness: _Optional[_Iterable[_Union[DescribedLateness, _Mapping]]] = ..., pins: _Optional[int] = ..., memory_bytes_max: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[DescribedTable, _Mapping]]] = ...) -> None: ...

class DescribedTable(_message.Message):
    __slots__ = ("job", "name", "rows", "bytes", "ids", "homes", "admitted", "expired", "cold_rows", "disk_bytes", "disk_refused")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    HOMES_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    COLD_ROWS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_REFUSED_FIELD_NUMBER: _ClassVar[int]
    job: int
    name: str
    rows: int
    bytes: int
    ids: int
    homes: int
    admitted: int
    expired: int
    cold_rows: int
    disk_bytes: int
    disk_refused: str
    def __init__(self, job: _Optional[int] = ..., name: _Optional[str] = ..., rows: _Optional[int] = ..., bytes: _Optional[int] = ..., ids: _Optional[int] = ..., homes: _Optional[int] = ..., admitted: _Optional[int] = ..., expired: _Optional[int] = ..., cold_rows: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_refused: _Optional[str] = ...) -> None: ...
