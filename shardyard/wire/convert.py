"""Messages to domain values and back. What a peer sent is checked here, at the door, against shardyard.ground.limits.

Invariant: a domain value that leaves this module is well-formed in itself (known enums, bounded counts and sizes,
unique names); whether it fits the state of a job is for the core that takes it. Raises MalformedPayload, TooLarge and
InvalidRequest. Must not know: any state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError

from shardyard.ground import limits, optimizers
from shardyard.ground.errors import InvalidRequest, MalformedPayload, TooLarge
from shardyard.ground.types import (
    Block,
    Caller,
    DataLease,
    DataShardSource,
    DType,
    Generation,
    Incarnation,
    JobId,
    JobLayout,
    MemberRole,
    Missing,
    OptimizerSpec,
    Outcome,
    PartitionId,
    PartitionLayout,
    PartitionMap,
    PartitionOwner,
    PartPull,
    PartResult,
    PulledPart,
    PullResult,
    PullWish,
    PushKind,
    PushName,
    PushOrder,
    PushPart,
    Rank,
    RankLease,
    RankSource,
    Source,
    SourceKey,
    Term,
    Token,
    UpdateMode,
    VariableKind,
    VariableSpec,
    Version,
    Watermark,
    WorkerSource,
    aligned_bytes,
)
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server

_DTYPES: dict[DType, common.DType] = {
    DType.FLOAT32: common.DTYPE_FLOAT32,
    DType.FLOAT64: common.DTYPE_FLOAT64,
    DType.INT64: common.DTYPE_INT64,
    DType.INT32: common.DTYPE_INT32,
    DType.UINT8: common.DTYPE_UINT8,
    DType.BOOL: common.DTYPE_BOOL,
}
_VARIABLE_KINDS: dict[VariableKind, common.VariableKind] = {
    VariableKind.PARAMETER: common.VARIABLE_KIND_PARAMETER,
    VariableKind.BUFFER: common.VARIABLE_KIND_BUFFER,
}
_MODES: dict[UpdateMode, common.UpdateMode] = {
    UpdateMode.SYNC: common.UPDATE_MODE_SYNC,
    UpdateMode.ASYNC: common.UPDATE_MODE_ASYNC,
}
_ROLES: dict[MemberRole, coordinator.Role] = {
    MemberRole.SERVER: coordinator.ROLE_SERVER,
    MemberRole.WORKER: coordinator.ROLE_WORKER,
    MemberRole.AGENT: coordinator.ROLE_AGENT,
}
_PUSH_KINDS: dict[PushKind, server.PushKind] = {
    PushKind.GRADIENT: server.PUSH_KIND_GRADIENT,
    PushKind.EMPTY: server.PUSH_KIND_EMPTY,
    PushKind.VALUES: server.PUSH_KIND_VALUES,
}
_OUTCOMES: dict[Outcome, server.Outcome] = {
    Outcome.APPLIED: server.OUTCOME_APPLIED,
    Outcome.RECORDED: server.OUTCOME_RECORDED,
    Outcome.DUPLICATE: server.OUTCOME_DUPLICATE,
}

K = TypeVar("K")
V = TypeVar("V")


def _known(table: dict[K, V], value: object, what: str) -> K:
    for key, number in table.items():
        if number == value:
            return key
    raise MalformedPayload(f"{what} is {value}, which this release does not know")


def _bounded(items: Sequence[V], count_max: int, what: str) -> Sequence[V]:
    if len(items) > count_max:
        raise TooLarge(f"{len(items)} {what}; at most {count_max} are taken")
    return items


def text(value: str, what: str, characters_max: int = limits.TEXT_CHARACTERS_MAX) -> str:
    """Raises TooLarge for a text beyond the limit."""
    if len(value) > characters_max:
        raise TooLarge(f"{what} has {len(value)} characters; at most {characters_max} are taken")
    return value


# ---- callers, names


def caller_to_wire(caller: Caller) -> common.Caller:
    return common.Caller(job=caller.job, incarnation=caller.incarnation, term=caller.term)


def caller_from_wire(message: common.Caller) -> Caller:
    return Caller(JobId(message.job), Incarnation(message.incarnation), Term(message.term))


def source_to_wire(source: Source) -> common.Source:
    match source:
        case DataShardSource(feed, epoch, index):
            return common.Source(data_shard=common.DataShardName(feed=feed, epoch=epoch, index=index))
        case RankSource(rank):
            return common.Source(logical_rank=rank)
        case WorkerSource(incarnation):
            return common.Source(worker=incarnation)


def data_shard_from_wire(message: common.DataShardName) -> DataShardSource:
    return DataShardSource(message.feed, message.epoch, message.index)


def source_from_wire(message: common.Source) -> Source:
    match message.WhichOneof("kind"):
        case "data_shard":
            return data_shard_from_wire(message.data_shard)
        case "logical_rank":
            return RankSource(Rank(message.logical_rank))
        case "worker":
            return WorkerSource(Incarnation(message.worker))
        case _:
            raise MalformedPayload("a push's name without a source")


def name_to_wire(name: PushName) -> common.PushName:
    return common.PushName(
        source=source_to_wire(name.key.source), lane=name.key.lane, token=name.token, first=name.first, last=name.last
    )


def name_from_wire(message: common.PushName) -> PushName:
    if message.last < message.first:
        raise MalformedPayload(f"a push of the sequences {message.first} to {message.last}")
    if message.last > limits.SEQUENCE_MAX:
        raise TooLarge(f"a push of sequence {message.last}; the last one is {limits.SEQUENCE_MAX}")
    key = SourceKey(source_from_wire(message.source), message.lane)
    return PushName(key, Token(message.token), message.first, message.last)


def version_to_wire(version: Version) -> common.Version:
    return common.Version(life=version.life, number=version.number)


def version_from_wire(message: common.Version) -> Version:
    return Version(message.life, message.number)


def mode_to_wire(mode: UpdateMode) -> common.UpdateMode:
    return _MODES[mode]


def mode_from_wire(value: common.UpdateMode) -> UpdateMode:
    return _known(_MODES, value, "the update mode")


def role_to_wire(role: MemberRole) -> coordinator.Role:
    return _ROLES[role]


def role_from_wire(value: coordinator.Role) -> MemberRole:
    return _known(_ROLES, value, "the role")


# ---- variables, optimizers, layouts


def variable_to_wire(spec: VariableSpec) -> common.VariableSpec:
    return common.VariableSpec(
        name=spec.name,
        dtype=_DTYPES[spec.dtype],
        shape=spec.shape,
        kind=_VARIABLE_KINDS[spec.kind],
        group=spec.group,
    )


def variable_from_wire(message: common.VariableSpec) -> VariableSpec:
    if not message.name:
        raise InvalidRequest("a variable without a name")
    name = text(message.name, "a variable's name", limits.VARIABLE_NAME_CHARACTERS_MAX)
    shape = tuple(_bounded(message.shape, limits.DIMENSIONS_MAX, f"dimensions of variable {name!r}"))
    dtype = _known(_DTYPES, message.dtype, f"the dtype of variable {name!r}")
    kind = _known(_VARIABLE_KINDS, message.kind, f"the kind of variable {name!r}")
    spec = VariableSpec(name, dtype, shape, kind, message.group)
    if spec.payload_bytes > limits.VARIABLE_BYTES_MAX:
        raise TooLarge(f"variable {name!r} has {spec.payload_bytes} bytes; at most {limits.VARIABLE_BYTES_MAX}")
    if kind is VariableKind.PARAMETER and not dtype.is_floating:
        raise InvalidRequest(f"parameter {name!r} is of dtype {dtype.value}; expected float32 or float64")
    return spec


def variables_from_wire(messages: Sequence[common.VariableSpec], groups: int) -> tuple[VariableSpec, ...]:
    """Raises InvalidRequest for a name that comes twice or a group that does not exist."""
    specs = tuple(variable_from_wire(m) for m in _bounded(messages, limits.VARIABLES_MAX, "variables"))
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise InvalidRequest(f"variable {spec.name!r} comes twice")
        seen.add(spec.name)
        if spec.kind is VariableKind.PARAMETER and spec.group >= groups:
            raise InvalidRequest(f"variable {spec.name!r} is in parameter group {spec.group}; there are {groups}")
    total = sum(spec.payload_bytes for spec in specs)
    if total > limits.JOB_BYTES_MAX:
        raise TooLarge(f"the variables have {total} bytes; at most {limits.JOB_BYTES_MAX}")
    return specs


def groups_to_wire(groups: Iterable[Sequence[float]]) -> list[common.ParameterGroup]:
    return [common.ParameterGroup(values=values) for values in groups]


def groups_from_wire(messages: Sequence[common.ParameterGroup]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(m.values) for m in _bounded(messages, limits.GROUPS_MAX, "parameter groups"))


def optimizer_to_wire(spec: OptimizerSpec) -> common.OptimizerSpec:
    return common.OptimizerSpec(
        kind=spec.kind, settings=optimizers.setting_names(spec.kind), groups=groups_to_wire(spec.groups)
    )


def optimizer_from_wire(message: common.OptimizerSpec) -> OptimizerSpec:
    spec = OptimizerSpec(message.kind, groups_from_wire(message.groups))
    optimizers.check_spec(spec)
    if tuple(message.settings) != optimizers.setting_names(spec.kind):
        raise InvalidRequest(
            f"optimizer {spec.kind!r} with the settings {', '.join(message.settings)}; expected "
            + ", ".join(optimizers.setting_names(spec.kind))
        )
    return spec


def layout_to_wire(layout: JobLayout) -> common.JobLayout:
    return common.JobLayout(
        variables=[variable_to_wire(spec) for spec in layout.variables],
        optimizer=optimizer_to_wire(layout.optimizer),
        partitions=[
            common.PartitionLayout(
                partition=part.partition,
                payload_bytes=part.payload_bytes,
                blocks=[
                    common.Block(variable=b.variable, offset=b.offset, length=b.length, position=b.position)
                    for b in part.blocks
                ],
            )
            for part in layout.partitions
        ],
    )


def layout_from_wire(message: common.JobLayout) -> JobLayout:
    """Checks that the blocks lie in their partitions' payloads as the protocol says, and that each element of each
    variable is in exactly one of them."""
    optimizer = optimizer_from_wire(message.optimizer)
    variables = variables_from_wire(message.variables, len(optimizer.groups))
    partitions = []
    _bounded([block for part in message.partitions for block in part.blocks], limits.BLOCKS_MAX, "blocks")
    for index, part in enumerate(_bounded(message.partitions, limits.PARTITIONS_MAX, "partitions")):
        if part.partition != index:
            raise MalformedPayload(f"partition {part.partition} at place {index} of a layout")
        blocks = tuple(Block(b.variable, b.offset, b.length, b.position) for b in part.blocks)
        _check_blocks(index, part.payload_bytes, blocks, variables)
        partitions.append(PartitionLayout(PartitionId(index), part.payload_bytes, blocks))
    _check_cover([block for partition in partitions for block in partition.blocks], variables)
    return JobLayout(variables, optimizer, tuple(partitions))


def _check_blocks(
    partition: int, payload_bytes: int, blocks: Sequence[Block], variables: Sequence[VariableSpec]
) -> None:
    end = 0
    for block in blocks:
        if block.variable >= len(variables):
            raise MalformedPayload(f"a block of variable {block.variable} in partition {partition}; it does not exist")
        spec = variables[block.variable]
        if block.offset + block.length > spec.elements:
            raise MalformedPayload(f"a block of partition {partition} beyond the end of variable {spec.name!r}")
        if block.position != end:
            raise MalformedPayload(
                f"a block of variable {spec.name!r} at byte {block.position} of partition {partition}; expected {end}"
            )
        end = block.position + aligned_bytes(block.length * spec.dtype.item_bytes)
    if end != payload_bytes:
        raise MalformedPayload(f"the blocks of partition {partition} take {end} bytes; announced {payload_bytes}")


def _check_cover(blocks: Iterable[Block], variables: Sequence[VariableSpec]) -> None:
    ends = [0] * len(variables)
    for block in sorted(blocks, key=lambda block: (block.variable, block.offset)):
        name = variables[block.variable].name
        if block.offset != ends[block.variable] or block.length == 0:
            raise MalformedPayload(
                f"a block of {block.length} elements at element {block.offset} of variable {name!r}; expected one at "
                f"{ends[block.variable]}, after the one before"
            )
        ends[block.variable] += block.length
    for spec, end in zip(variables, ends, strict=True):
        if end != spec.elements:
            raise MalformedPayload(f"the blocks of variable {spec.name!r} have {end} elements; it has {spec.elements}")


def map_to_wire(map_: PartitionMap) -> common.PartitionMap:
    return common.PartitionMap(
        generation=map_.generation,
        owners=[common.PartitionOwner(partition=o.partition, server=o.server, address=o.address) for o in map_.owners],
    )


def map_from_wire(message: common.PartitionMap) -> PartitionMap:
    owners = tuple(
        PartitionOwner(PartitionId(o.partition), Incarnation(o.server), text(o.address, "an address", 512))
        for o in _bounded(message.owners, limits.PARTITIONS_MAX, "partitions")
    )
    if any(owner.partition != index for index, owner in enumerate(owners)):
        raise MalformedPayload("a partition map out of order")
    return PartitionMap(Generation(message.generation), owners)


# ---- pushes and pulls


def push_to_wire(order: PushOrder) -> server.PushHeader:
    return server.PushHeader(
        caller=caller_to_wire(order.caller),
        server=order.server,
        generation=order.generation,
        name=name_to_wire(order.name),
        kind=_PUSH_KINDS[order.kind],
        parts=[
            server.PushPart(partition=p.partition, payload_bytes=p.payload_bytes, absent_blocks=p.absent_blocks)
            for p in order.parts
        ],
        weight=order.weight,
        groups=groups_to_wire(order.groups),
        pull=None if order.pull is None else pull_to_wire(order.pull),
    )


def push_from_header(header: bytes) -> PushOrder:
    """Reads and checks the header of a push. The payload it announces is bounded."""
    if not header:
        raise MalformedPayload("a push whose first frame has no header")
    try:
        message = server.PushHeader.FromString(header)
    except DecodeError as error:
        raise MalformedPayload(f"the header of a push: {error}") from error
    absent = sum(len(p.absent_blocks) for p in message.parts)
    if absent > limits.BLOCKS_MAX:
        raise TooLarge(f"{absent} absent blocks of a push; at most {limits.BLOCKS_MAX} are taken")
    parts = tuple(
        PushPart(PartitionId(p.partition), p.payload_bytes, tuple(p.absent_blocks))
        for p in _bounded(message.parts, limits.PARTITIONS_MAX, "parts of a push")
    )
    _check_unique([part.partition for part in parts], "a push")
    if not math.isfinite(message.weight) or message.weight < 0:
        raise InvalidRequest(f"a push of weight {message.weight}; expected the number of samples behind it")
    order = PushOrder(
        caller=caller_from_wire(message.caller),
        server=Incarnation(message.server),
        generation=Generation(message.generation),
        name=name_from_wire(message.name),
        kind=_known(_PUSH_KINDS, message.kind, "the kind of a push"),
        parts=parts,
        weight=message.weight,
        groups=groups_from_wire(message.groups),
        pull=pull_from_wire(message.pull) if message.HasField("pull") else None,
    )
    if order.payload_bytes > limits.PUSH_BYTES_MAX:
        raise TooLarge(f"a push of {order.payload_bytes} bytes; at most {limits.PUSH_BYTES_MAX} are taken")
    if order.kind is PushKind.EMPTY and order.payload_bytes:
        raise MalformedPayload(f"an empty push with {order.payload_bytes} bytes of payload")
    return order


def pull_to_wire(wish: PullWish) -> server.PullRequest:
    return server.PullRequest(
        caller=caller_to_wire(wish.caller),
        server=wish.server,
        generation=wish.generation,
        parts=[server.PartPull(partition=p.partition, number=p.number, exactly=p.exactly) for p in wish.parts],
        wait_ms=wish.wait_ms,
    )


def pull_from_wire(message: server.PullRequest) -> PullWish:
    parts = tuple(
        PartPull(PartitionId(p.partition), p.number, p.exactly)
        for p in _bounded(message.parts, limits.PARTITIONS_MAX, "parts of a pull")
    )
    _check_unique([part.partition for part in parts], "a pull")
    if message.wait_ms > limits.PULL_WAIT_MS_MAX:
        raise InvalidRequest(f"a pull that waits {message.wait_ms} ms; at most {limits.PULL_WAIT_MS_MAX}")
    return PullWish(
        caller_from_wire(message.caller),
        Incarnation(message.server),
        Generation(message.generation),
        parts,
        message.wait_ms,
    )


def _check_unique(partitions: Sequence[int], what: str) -> None:
    if len(set(partitions)) != len(partitions):
        raise MalformedPayload(f"{what} that names a partition twice")


def results_to_wire(results: Iterable[PartResult]) -> server.PushReply:
    return server.PushReply(
        parts=[
            server.PartReply(
                partition=r.partition, outcome=_OUTCOMES[r.outcome], next=r.next, version=version_to_wire(r.version)
            )
            for r in results
        ]
    )


def results_from_wire(message: server.PushReply) -> tuple[PartResult, ...]:
    return tuple(
        PartResult(
            PartitionId(p.partition),
            _known(_OUTCOMES, p.outcome, "the outcome of a push"),
            p.next,
            version_from_wire(p.version),
        )
        for p in message.parts
    )


def pulled_to_header(result: PullResult) -> bytes:
    return server.PullHeader(
        push=results_to_wire(result.push) if result.push else None,
        parts=[
            server.PulledPart(partition=p.partition, version=version_to_wire(p.version), payload_bytes=p.payload_bytes)
            for p in result.parts
        ],
        not_yet=server.NotYet(
            missing=[
                server.Missing(
                    partition=m.partition, have=version_to_wire(m.have), want=m.want, waiting_for=m.waiting_for
                )
                for m in result.missing
            ]
        )
        if result.missing
        else None,
    ).SerializeToString()


def pulled_from_header(header: bytes) -> PullResult:
    try:
        message = server.PullHeader.FromString(header)
    except DecodeError as error:
        raise MalformedPayload(f"the header of a pull's answer: {error}") from error
    return PullResult(
        parts=tuple(
            PulledPart(PartitionId(p.partition), version_from_wire(p.version), p.payload_bytes) for p in message.parts
        ),
        missing=tuple(
            Missing(PartitionId(m.partition), version_from_wire(m.have), m.want, m.waiting_for)
            for m in message.not_yet.missing
        ),
        push=results_from_wire(message.push),
    )


# ---- ledgers and leases


def sources_to_wire(keys: Iterable[tuple[SourceKey, Token]]) -> list[server.SourceToken]:
    return [server.SourceToken(source=source_to_wire(k.source), lane=k.lane, token=t) for k, t in keys]


def sources_from_wire(messages: Sequence[server.SourceToken]) -> tuple[tuple[SourceKey, Token], ...]:
    return tuple(
        (SourceKey(source_from_wire(m.source), m.lane), Token(m.token))
        for m in _bounded(messages, limits.SOURCES_PER_REQUEST_MAX, "sources")
    )


def watermarks_to_wire(found: Iterable[tuple[SourceKey, Sequence[Watermark]]]) -> list[server.SourceWatermarks]:
    return [
        server.SourceWatermarks(
            source=source_to_wire(key.source),
            lane=key.lane,
            watermarks=[
                server.Watermark(partition=w.partition, next=w.next, version=version_to_wire(w.version)) for w in marks
            ],
        )
        for key, marks in found
    ]


def watermarks_from_wire(
    messages: Sequence[server.SourceWatermarks],
) -> tuple[tuple[SourceKey, tuple[Watermark, ...]], ...]:
    return tuple(
        (
            SourceKey(source_from_wire(m.source), m.lane),
            tuple(Watermark(PartitionId(w.partition), w.next, version_from_wire(w.version)) for w in m.watermarks),
        )
        for m in messages
    )


def rank_leases_to_wire(leases: Iterable[RankLease]) -> list[coordinator.RankLease]:
    return [coordinator.RankLease(rank=lease.rank, token=lease.token) for lease in leases]


def rank_leases_from_wire(messages: Iterable[coordinator.RankLease]) -> tuple[RankLease, ...]:
    return tuple(RankLease(Rank(m.rank), Token(m.token)) for m in messages)


def data_lease_to_wire(lease: DataLease) -> coordinator.DataLease:
    name = common.DataShardName(feed=lease.source.feed, epoch=lease.source.epoch, index=lease.source.index)
    return coordinator.DataLease(data_shard=name, token=lease.token, begin=lease.begin, end=lease.end)


def data_lease_from_wire(message: coordinator.DataLease) -> DataLease:
    return DataLease(data_shard_from_wire(message.data_shard), Token(message.token), message.begin, message.end)
