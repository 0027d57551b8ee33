from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_UINT8: _ClassVar[DType]
    DTYPE_BOOL: _ClassVar[DType]

class VariableKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VARIABLE_KIND_UNSPECIFIED: _ClassVar[VariableKind]
    VARIABLE_KIND_PARAMETER: _ClassVar[VariableKind]
    VARIABLE_KIND_BUFFER: _ClassVar[VariableKind]

class InitialKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INITIAL_KIND_UNSPECIFIED: _ClassVar[InitialKind]
    INITIAL_KIND_ZEROS: _ClassVar[InitialKind]
    INITIAL_KIND_UNIFORM: _ClassVar[InitialKind]
    INITIAL_KIND_NORMAL: _ClassVar[InitialKind]

class AdmissionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADMISSION_KIND_UNSPECIFIED: _ClassVar[AdmissionKind]
    ADMISSION_KIND_ALL: _ClassVar[AdmissionKind]
    ADMISSION_KIND_COUNT: _ClassVar[AdmissionKind]
    ADMISSION_KIND_CHANCE: _ClassVar[AdmissionKind]
    ADMISSION_KIND_ESTIMATE: _ClassVar[AdmissionKind]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_CHECKPOINT: _ClassVar[Durability]
    DURABILITY_WAL: _ClassVar[Durability]

class UpdateMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPDATE_MODE_UNSPECIFIED: _ClassVar[UpdateMode]
    UPDATE_MODE_SYNC: _ClassVar[UpdateMode]
    UPDATE_MODE_ASYNC: _ClassVar[UpdateMode]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT64: DType
DTYPE_INT64: DType
DTYPE_INT32: DType
DTYPE_UINT8: DType
DTYPE_BOOL: DType
VARIABLE_KIND_UNSPECIFIED: VariableKind
VARIABLE_KIND_PARAMETER: VariableKind
VARIABLE_KIND_BUFFER: VariableKind
INITIAL_KIND_UNSPECIFIED: InitialKind
INITIAL_KIND_ZEROS: InitialKind
INITIAL_KIND_UNIFORM: InitialKind
INITIAL_KIND_NORMAL: InitialKind
ADMISSION_KIND_UNSPECIFIED: AdmissionKind
ADMISSION_KIND_ALL: AdmissionKind
ADMISSION_KIND_COUNT: AdmissionKind
ADMISSION_KIND_CHANCE: AdmissionKind
ADMISSION_KIND_ESTIMATE: AdmissionKind
DURABILITY_UNSPECIFIED: Durability
DURABILITY_CHECKPOINT: Durability
DURABILITY_WAL: Durability
UPDATE_MODE_UNSPECIFIED: UpdateMode
UPDATE_MODE_SYNC: UpdateMode
UPDATE_MODE_ASYNC: UpdateMode

class Caller(_message.Message):
    __slots__ = ("job", "incarnation", "term")
    JOB_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    job: int
    incarnation: int
    term: int
    def __init__(self, job: _Optional[int] = ..., incarnation: _Optional[int] = ..., term: _Optional[int] = ...) -> None: ...

class DataShardName(_message.Message):
    __slots__ = ("feed", "epoch", "index")
    FEED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    feed: int
    epoch: int
    index: int
    def __init__(self, feed: _Optional[int] = ..., epoch: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("data_shard", "logical_rank", "worker")
    DATA_SHARD_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_RANK_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    data_shard: DataShardName
    logical_rank: int
    worker: int
    def __init__(self, data_shard: _Optional[_Union[DataShardName, _Mapping]] = ..., logical_rank: _Optional[int] = ..., worker: _Optional[int] = ...) -> None: ...

class PushName(_message.Message):
    __slots__ = ("source", "lane", "token", "first", "last")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    source: Source
    lane: int
    token: int
    first: int
    last: int
    def __init__(self, source: _Optional[_Union[Source, _Mapping]] = ..., lane: _Optional[int] = ..., token: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("life", "number")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    life: int
    number: int
    def __init__(self, life: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "what", "why", "todo", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    TODO_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    code: str
    what: str
    why: str
    todo: str
    facts: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[str] = ..., what: _Optional[str] = ..., why: _Optional[str] = ..., todo: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class VariableSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "kind", "group")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    kind: VariableKind
    group: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., kind: _Optional[_Union[VariableKind, str]] = ..., group: _Optional[int] = ...) -> None: ...

class ParameterGroup(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class OptimizerSpec(_message.Message):
    __slots__ = ("kind", "settings", "groups")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    settings: _containers.RepeatedScalarFieldContainer[str]
    groups: _containers.RepeatedCompositeFieldContainer[ParameterGroup]
    def __init__(self, kind: _Optional[str] = ..., settings: _Optional[_Iterable[str]] = ..., groups: _Optional[_Iterable[_Union[ParameterGroup, _Mapping]]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("variable", "offset", "length", "position")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    variable: int
    offset: int
    length: int
    position: int
    def __init__(self, variable: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class PartitionLayout(_message.Message):
    __slots__ = ("partition", "payload_bytes", "blocks")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    partition: int
    payload_bytes: int
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, partition: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("kind", "threshold", "chance", "cells", "zeros")
    KIND_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    CHANCE_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    ZEROS_FIELD_NUMBER: _ClassVar[int]
    kind: AdmissionKind
    threshold: int
    chance: float
    cells: int
    zeros: bool
    def __init__(self, kind: _Optional[_Union[AdmissionKind, str]] = ..., threshold: _Optional[int] = ..., chance: _Optional[float] = ..., cells: _Optional[int] = ..., zeros: bool = ...) -> None: ...

class Expiry(_message.Message):
    __slots__ = ("age_steps", "frequency_min", "norm_min", "rows_kept", "grace_steps", "age_ms", "grace_ms")
    AGE_STEPS_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_MIN_FIELD_NUMBER: _ClassVar[int]
    NORM_MIN_FIELD_NUMBER: _ClassVar[int]
    ROWS_KEPT_FIELD_NUMBER: _ClassVar[int]
    GRACE_STEPS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    age_steps: int
    frequency_min: int
    norm_min: float
    rows_kept: int
    grace_steps: int
    age_ms: int
    grace_ms: int
    def __init__(self, age_steps: _Optional[int] = ..., frequency_min: _Optional[int] = ..., norm_min: _Optional[float] = ..., rows_kept: _Optional[int] = ..., grace_steps: _Optional[int] = ..., age_ms: _Optional[int] = ..., grace_ms: _Optional[int] = ...) -> None: ...

class TableSpec(_message.Message):
    __slots__ = ("name", "dim", "optimizer", "settings", "values", "seed", "initial", "scale", "rows_max", "admission", "expiry", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    ROWS_MAX_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    dim: int
    optimizer: str
    settings: _containers.RepeatedScalarFieldContainer[str]
    values: _containers.RepeatedScalarFieldContainer[float]
    seed: int
    initial: InitialKind
    scale: float
    rows_max: int
    admission: Admission
    expiry: Expiry
    path: str
    def __init__(self, name: _Optional[str] = ..., dim: _Optional[int] = ..., optimizer: _Optional[str] = ..., settings: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[float]] = ..., seed: _Optional[int] = ..., initial: _Optional[_Union[InitialKind, str]] = ..., scale: _Optional[float] = ..., rows_max: _Optional[int] = ..., admission: _Optional[_Union[Admission, _Mapping]] = ..., expiry: _Optional[_Union[Expiry, _Mapping]] = ..., path: _Optional[str] = ...) -> None: ...

class JobLayout(_message.Message):
    __slots__ = ("variables", "optimizer", "partitions", "tables")
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    variables: _containers.RepeatedCompositeFieldContainer[VariableSpec]
    optimizer: OptimizerSpec
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionLayout]
    tables: _containers.RepeatedCompositeFieldContainer[TableSpec]
    def __init__(self, variables: _Optional[_Iterable[_Union[VariableSpec, _Mapping]]] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., partitions: _Optional[_Iterable[_Union[PartitionLayout, _Mapping]]] = ..., tables: _Optional[_Iterable[_Union[TableSpec, _Mapping]]] = ...) -> None: ...

class PartitionOwner(_message.Message):
    __slots__ = ("partition", "server", "address")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    partition: int
    server: int
    address: str
    def __init__(self, partition: _Optional[int] = ..., server: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class PartitionMap(_message.Message):
    __slots__ = ("generation", "owners")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    owners: _containers.RepeatedCompositeFieldContainer[PartitionOwner]
    def __init__(self, generation: _Optional[int] = ..., owners: _Optional[_Iterable[_Union[PartitionOwner, _Mapping]]] = ...) -> None: ...
