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

from shardyard.ground import layouts, limits, optimizers
from shardyard.ground.errors import InvalidRequest, MalformedPayload, TooLarge
from shardyard.ground.types import (
    NO_NAME,
    Block,
    Caller,
    Clipping,
    Consistency,
    ConsistencyMode,
    DataLease,
    DataShardSource,
    DoneDataShards,
    DType,
    Durability,
    Gathered,
    Generation,
    Halt,
    Incarnation,
    JobId,
    JobLayout,
    MemberRole,
    Missing,
    OptimizerSpec,
    Outcome,
    Pace,
    PartitionId,
    PartitionLayout,
    PartitionMap,
    PartitionOwner,
    PartResult,
    PinWish,
    Place,
    PulledPart,
    PullResult,
    PullWish,
    PushedRows,
    PushKind,
    PushName,
    PushOrder,
    PushPart,
    Rank,
    RankLease,
    RankSource,
    Source,
    SourceKey,
    StaleRule,
    StepVerdict,
    Stop,
    Stride,
    Term,
    Ticket,
    Token,
    UpdateMode,
    VariableKind,
    VariableSpec,
    Version,
    WantedRows,
    Watermark,
    WorkerSource,
)
from shardyard.wire import tables
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
_CONSISTENCY_MODES: dict[ConsistencyMode, coordinator.ConsistencyMode] = {
    ConsistencyMode.SYNC: coordinator.CONSISTENCY_MODE_SYNC,
    ConsistencyMode.LOCAL: coordinator.CONSISTENCY_MODE_LOCAL,
    ConsistencyMode.BOUNDED: coordinator.CONSISTENCY_MODE_BOUNDED,
    ConsistencyMode.ASYNC: coordinator.CONSISTENCY_MODE_ASYNC,
    ConsistencyMode.HYBRID: coordinator.CONSISTENCY_MODE_HYBRID,
}
_DURABILITIES: dict[Durability, common.Durability] = {
    Durability.CHECKPOINT: common.DURABILITY_CHECKPOINT,
    Durability.WAL: common.DURABILITY_WAL,
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
    PushKind.NOTHING: server.PUSH_KIND_NOTHING,
}
_STRIDES: dict[Stride, server.Stride] = {
    Stride.JOINS: server.STRIDE_JOINS,
    Stride.STEPS: server.STRIDE_STEPS,
    Stride.RESTS: server.STRIDE_RESTS,
}
_OUTCOMES: dict[Outcome, server.Outcome] = {
    Outcome.APPLIED: server.OUTCOME_APPLIED,
    Outcome.RECORDED: server.OUTCOME_RECORDED,
    Outcome.DUPLICATE: server.OUTCOME_DUPLICATE,
    Outcome.DROPPED: server.OUTCOME_DROPPED,
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


def consistency_mode_to_wire(mode: ConsistencyMode) -> coordinator.ConsistencyMode:
    return _CONSISTENCY_MODES[mode]


def consistency_mode_from_wire(value: coordinator.ConsistencyMode) -> ConsistencyMode:
    return _known(_CONSISTENCY_MODES, value, "the consistency mode")


def stale_to_wire(rule: StaleRule | None) -> server.StaleRule | None:
    if rule is None:
        return None
    return server.StaleRule(divides_rate=rule.divides_rate, compensation=rule.compensation, decay=rule.decay)


def stale_from_wire(message: server.StaleRule) -> StaleRule:
    if not (math.isfinite(message.compensation) and message.compensation >= 0 and 0 <= message.decay < 1):
        raise InvalidRequest(
            f"stale gradients compensated with {message.compensation} and a decay of {message.decay}; expected a number"
            " from 0, and one from 0 to below 1"
        )
    return StaleRule(message.divides_rate, message.compensation, message.decay)


def durability_to_wire(durability: Durability) -> common.Durability:
    return _DURABILITIES[durability]


def durability_from_wire(value: common.Durability) -> Durability:
    if value == common.DURABILITY_UNSPECIFIED:
        return Durability.CHECKPOINT
    return _known(_DURABILITIES, value, "the durability")


def clipping_to_wire(clipping: Clipping) -> server.Clipping:
    return server.Clipping(norm=clipping.norm, value=clipping.value)


def clipping_from_wire(message: server.Clipping) -> Clipping:
    for name, limit in ("norm", message.norm), ("value", message.value):
        if not (math.isfinite(limit) and limit >= 0):
            raise InvalidRequest(f"clipping by {name} to {limit}; expected a number from 0")
    return Clipping(message.norm, message.value)


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
    name = text(message.name, "a variable's name", limits.VARIABLE_NAME_CHARACTERS_MAX)
    shape = tuple(_bounded(message.shape, limits.DIMENSIONS_MAX, f"dimensions of variable {name!r}"))
    dtype = _known(_DTYPES, message.dtype, f"the dtype of variable {name!r}")
    kind = _known(_VARIABLE_KINDS, message.kind, f"the kind of variable {name!r}")
    spec = VariableSpec(name, dtype, shape, kind, message.group)
    layouts.check_variable(spec)
    return spec


def variables_from_wire(messages: Sequence[common.VariableSpec], groups: int) -> tuple[VariableSpec, ...]:
    """Raises what shardyard.ground.layouts.check_variables raises."""
    specs = tuple(variable_from_wire(m) for m in _bounded(messages, limits.VARIABLES_MAX, "variables"))
    layouts.check_variables(specs, groups)
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
        tables=tables.tables_to_wire(layout.tables),
    )


def layout_from_wire(message: common.JobLayout) -> JobLayout:
    """Raises what shardyard.ground.layouts.check_layout raises."""
    optimizer = optimizer_from_wire(message.optimizer)
    variables = variables_from_wire(message.variables, len(optimizer.groups))
    partitions = []
    _bounded([block for part in message.partitions for block in part.blocks], limits.BLOCKS_MAX, "blocks")
    for index, part in enumerate(_bounded(message.partitions, limits.PARTITIONS_MAX, "partitions")):
        if part.partition != index:
            raise MalformedPayload(f"partition {part.partition} at place {index} of a layout")
        blocks = tuple(Block(b.variable, b.offset, b.length, b.position) for b in part.blocks)
        partitions.append(PartitionLayout(PartitionId(index), part.payload_bytes, blocks))
    layout = JobLayout(variables, optimizer, tuple(partitions), tables.tables_from_wire(message.tables))
    layouts.check_layout(layout)
    return layout


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


def push_to_wire(order: PushOrder, before: PushOrder | None = None, *, named: bool = True) -> server.PushHeader:
    """`before`: the order of the exchange before on the same stream; what is as there is left out. `named`: with its
    name, its bases, its rows and those that it wants."""
    again = (
        before is not None
        and (order.caller, order.server, order.generation) == (before.caller, before.server, before.generation)
        and bool(order.parts or order.kind is PushKind.NOTHING or not before.parts)
        and bool(_wished(order) or order.pull is None or not _wished(before))
    )
    header = server.PushHeader(kind=_PUSH_KINDS[order.kind], weight=order.weight, again=again, detach=order.detach)
    if not again:
        header.caller.CopyFrom(caller_to_wire(order.caller))
        header.server = order.server
        header.generation = order.generation
    if order.kind is not PushKind.NOTHING:
        if named:
            header.name.CopyFrom(name_to_wire(order.name))
        if not (again and before is not None and before.parts == order.parts):
            header.parts.extend(_part_to_wire(part) for part in order.parts)
    if order.groups:
        header.groups.extend(groups_to_wire(order.groups))
    if order.pull is not None:
        wished = _wished(before) if again and before is not None else ()
        header.pull.CopyFrom(_wish_to_wire(order.pull, wished))
    if order.shared_at is not None:
        header.shared_at = order.shared_at
    if order.rest is not None:
        header.rest = order.rest
    if order.attach is not None:
        header.attach.CopyFrom(ticket_to_wire(order.attach))
    if order.pace is not None:
        pace = order.pace
        header.pace.CopyFrom(
            server.Pace(stride=_STRIDES[pace.stride], turn=pace.turn, clock=pace.clock, ahead=pace.ahead)
        )
    if named and order.bases:
        header.bases.CopyFrom(bases_to_wire(order.bases))
    if order.verdict is not None:
        header.verdict.CopyFrom(verdict_to_wire(order.verdict))
    if order.overflow:
        header.overflow = True
    if order.rows:
        header.table_groups.extend(groups_to_wire(order.table_groups))
    if named:
        header.rows.extend(tables.pushed_to_wire(order.rows))
        header.wanted.extend(tables.wanted_to_wire(order.wanted))
    if order.expired:
        header.expired.extend(tables.wanted_to_wire(order.expired))
    if order.attach_rows is not None:
        header.attach_rows.CopyFrom(ticket_to_wire(order.attach_rows))
    if order.rows_at is not None:
        header.rows_at = order.rows_at
    if order.wanted_at is not None:
        header.wanted_at = order.wanted_at
    return header


def bases_to_wire(bases: Sequence[Version]) -> server.Bases:
    """Those that are alike stand once, in the place of the first of them."""
    message = server.Bases()
    last: server.Base | None = None
    said: Version | None = None
    for base in bases:
        if last is not None and base == said:
            last.alike += 1
            continue
        said = base
        last = message.parts.add()
        last.version.life = base.life
        last.version.number = base.number
    return message


def bases_from_wire(message: server.Bases, count: int) -> tuple[Version, ...]:
    """`count`: the parts of the push. Raises MalformedPayload where there are not as many."""
    found: list[Version] = []
    for base in message.parts:
        if len(found) + 1 + base.alike > count:
            raise MalformedPayload(f"a push of {count} parts that says of more what they were computed on")
        found += [version_from_wire(base.version)] * (1 + base.alike)
    if len(found) != count:
        raise MalformedPayload(f"a push of {count} parts that says of {len(found)} what they were computed on")
    return tuple(found)


def _part_to_wire(part: PushPart) -> server.PushPart:
    return server.PushPart(
        partition=part.partition,
        payload_bytes=part.payload_bytes,
        absent_blocks=part.absent_blocks,
        code_bytes=part.code_bytes,
    )


def push_from_header(header: bytes, before: PushOrder | None = None, *, recorded: bool = False) -> PushOrder:
    """Reads and checks the header of a push. The payload it announces is bounded. `before`: the order of the exchange
    before on the same stream, for what this one leaves out. `recorded`: it comes from a log."""
    if not header:
        raise MalformedPayload("a push whose first frame has no header")
    try:
        message = server.PushHeader.FromString(header)
    except DecodeError as error:
        raise MalformedPayload(f"the header of a push: {error}") from error
    if message.again and before is None:
        raise MalformedPayload("the header of a push that begins with 'again'")
    if not math.isfinite(message.weight) or message.weight < 0:
        raise InvalidRequest(f"a push of weight {message.weight}; expected the number of samples behind it")
    last = before if message.again else None
    kind = _known(_PUSH_KINDS, message.kind, "the kind of a push")
    order = PushOrder(
        caller=caller_from_wire(message.caller) if last is None else last.caller,
        server=Incarnation(message.server) if last is None else last.server,
        generation=Generation(message.generation) if last is None else last.generation,
        name=NO_NAME if kind is PushKind.NOTHING else name_from_wire(message.name),
        kind=kind,
        parts=_parts_from_wire(message) if last is None or message.parts else last.parts,
        weight=message.weight,
        groups=groups_from_wire(message.groups),
        pull=_wish_from_wire(message, last) if message.HasField("pull") else None,
        shared_at=message.shared_at if message.HasField("shared_at") else None,
        attach=ticket_from_wire(message.attach) if message.HasField("attach") else None,
        detach=message.detach,
        rest=message.rest if message.HasField("rest") else None,
        pace=_pace_from_wire(message.pace) if message.HasField("pace") else None,
        verdict=verdict_from_wire(message.verdict) if message.HasField("verdict") else None,
        overflow=message.overflow,
        rows=tables.pushed_from_wire(message.rows) if message.rows else (),
        table_groups=groups_from_wire(message.table_groups) if message.table_groups else (),
        wanted=tables.wanted_from_wire(message.wanted) if message.wanted else (),
        expired=tables.expired_from_wire(message.expired) if message.expired else (),
        attach_rows=ticket_from_wire(message.attach_rows) if message.HasField("attach_rows") else None,
        rows_at=message.rows_at if message.HasField("rows_at") else None,
        wanted_at=message.wanted_at if message.HasField("wanted_at") else None,
    )
    if order.expired and not recorded:
        raise InvalidRequest(
            "a push that says which rows expire", why="what expires is the server's to decide", todo="leave them out"
        )
    if not recorded and any(each.now_ms for each in order.rows):
        raise InvalidRequest(
            "a push that says when it came", why="clocks of tables are the server's", todo="leave the times out"
        )
    check_rows(order)
    if order.overflow and kind is not PushKind.GRADIENT:
        raise InvalidRequest(f"an overflow of a push of kind {kind.value}; only gradients are scaled")
    if message.HasField("bases"):
        if kind is not PushKind.GRADIENT:
            raise MalformedPayload(f"a push of kind {kind.value} that says what it was computed on")
        order = order.renamed(order.name, bases_from_wire(message.bases, len(order.parts)))
    if last is None or message.parts:
        _check_sizes(order)
    if kind in (PushKind.EMPTY, PushKind.NOTHING) and message.parts and order.payload_bytes:
        raise MalformedPayload(f"an empty push with {order.payload_bytes} bytes of payload")
    return order


def check_rows(order: PushOrder) -> None:
    """What the header of a push says of rows. Raises MalformedPayload, InvalidRequest, TooLarge."""
    if order.rows or order.expired:
        _check_rows(order)
    if order.wanted:
        _check_wanted(order)
    if (order.rows_at is not None and not (order.rows or order.wanted)) or (
        order.wanted_at is not None and not order.wanted
    ):
        raise MalformedPayload("a place for rows in an exchange that has none, or wants none")


def _check_rows(order: PushOrder) -> None:
    if order.kind not in (PushKind.GRADIENT, PushKind.VALUES):
        raise MalformedPayload(f"a push of kind {order.kind.value} with rows")
    if order.overflow:
        raise InvalidRequest("rows of a gradient that is beyond its format", todo="leave them out")
    if order.rest is not None:
        raise InvalidRequest("rows of a push of which data came ahead of its header", todo="send the header first")
    listed = {part.partition for part in order.parts}
    said: list[PushedRows | WantedRows] = [*order.rows, *order.expired]
    for each in said:
        strange = [partition for partition in each.partitions if partition not in listed]
        if strange:
            raise MalformedPayload(
                f"rows of table {each.table} in partition {strange[0]}, which the push does not list"
            )
    if order.rows_bytes > limits.ROW_BYTES_MAX:
        raise TooLarge(f"rows of {order.rows_bytes} bytes in a push; at most {limits.ROW_BYTES_MAX} are taken")


def _check_wanted(order: PushOrder) -> None:
    if order.pull is None or order.pull.order or order.rest is not None:
        raise InvalidRequest(
            "rows wanted in an exchange that pulls nothing, or in an order, or whose data came ahead of its header",
            why="they follow the values of a pull, and their ids what is pushed",
            todo="ask for them with LookUp",
        )
    pulled = set(order.pull.partitions)
    for each in order.wanted:
        strange = [partition for partition in each.partitions if partition not in pulled]
        if strange:
            raise MalformedPayload(
                f"rows wanted of table {each.table} in partition {strange[0]}, which is not among those pulled"
            )


def _parts_from_wire(message: server.PushHeader) -> tuple[PushPart, ...]:
    absent = sum(len(p.absent_blocks) for p in message.parts)
    if absent > limits.BLOCKS_MAX:
        raise TooLarge(f"{absent} absent blocks of a push; at most {limits.BLOCKS_MAX} are taken")
    codes = sum(len(p.code_bytes) for p in message.parts)
    if codes > limits.BLOCKS_MAX:
        raise TooLarge(f"{codes} codes in a push; at most {limits.BLOCKS_MAX} are taken")
    parts = tuple(
        PushPart(PartitionId(p.partition), p.payload_bytes, tuple(p.absent_blocks), tuple(p.code_bytes))
        for p in _bounded(message.parts, limits.PARTITIONS_MAX, "parts of a push")
    )
    _check_unique([part.partition for part in parts], "a push")
    for part in parts:
        if part.code_bytes and sum(part.code_bytes) != part.payload_bytes:
            raise MalformedPayload(
                f"partition {part.partition} with codes of {sum(part.code_bytes)} bytes in all; announced "
                f"{part.payload_bytes}"
            )
    return parts


def _check_sizes(order: PushOrder) -> None:
    if order.payload_bytes > limits.PUSH_BYTES_MAX:
        raise TooLarge(f"a push of {order.payload_bytes} bytes; at most {limits.PUSH_BYTES_MAX} are taken")


def pull_to_wire(wish: PullWish) -> server.PullRequest:
    message = _wish_to_wire(wish, ())
    message.caller.CopyFrom(caller_to_wire(wish.caller))
    message.server = wish.server
    message.generation = wish.generation
    return message


def _pace_from_wire(message: server.Pace) -> Pace:
    if message.clock > limits.SEQUENCE_MAX or message.ahead > limits.STALENESS_MAX:
        raise InvalidRequest(f"a pace of {message.clock} steps, {message.ahead} ahead; more than can be counted")
    return Pace(_known(_STRIDES, message.stride, "the stride of a worker"), message.turn, message.clock, message.ahead)


def verdict_to_wire(verdict: StepVerdict) -> server.StepVerdict:
    return server.StepVerdict(step=verdict.step, square_norm=verdict.square_norm, members=verdict.members)


def verdict_from_wire(message: server.StepVerdict) -> StepVerdict:
    if message.step > limits.SEQUENCE_MAX:
        raise TooLarge(f"a verdict on step {message.step}; the last one is {limits.SEQUENCE_MAX}")
    members = ranks_from_wire(message.members, f"members of step {message.step}")
    if not message.HasField("square_norm"):
        return StepVerdict(message.step, members=members)
    if message.square_norm < 0:
        raise InvalidRequest(f"a verdict on step {message.step} with a square norm of {message.square_norm}")
    return StepVerdict(message.step, message.square_norm, members)


def ranks_from_wire(ranks: Sequence[int], what: str) -> tuple[Rank, ...]:
    """Logical ranks that a job can have, ascending. Raises TooLarge, MalformedPayload."""
    found = tuple([Rank(rank) for rank in _bounded(ranks, limits.LOGICAL_RANKS_MAX, what)])
    if found and (list(found) != sorted(set(found)) or found[-1] >= limits.LOGICAL_RANKS_MAX):
        raise MalformedPayload(f"{what}: {list(found[:8])}; expected logical ranks, ascending")
    return found


def given_to_wire(verdict: StepVerdict, partitions: Iterable[PartitionId]) -> server.VerdictGiven:
    return server.VerdictGiven(verdict=verdict_to_wire(verdict), partitions=partitions)


def given_from_wire(message: server.VerdictGiven) -> tuple[StepVerdict, tuple[PartitionId, ...]]:
    partitions = _bounded(message.partitions, limits.PARTITIONS_MAX, "partitions that were given a verdict")
    _check_unique(partitions, "a verdict")
    return verdict_from_wire(message.verdict), tuple(map(PartitionId, partitions))


def _wished(order: PushOrder) -> tuple[PartitionId, ...]:
    return () if order.pull is None else order.pull.partitions


def _wish_to_wire(wish: PullWish, before: tuple[PartitionId, ...]) -> server.PullRequest:
    """Without caller, server and generation, which stand in the header."""
    return server.PullRequest(
        partitions=None if wish.partitions == before else wish.partitions,
        number=wish.number,
        exactly=wish.exactly,
        wait_ms=wish.wait_ms,
        coding=wish.coding,
        shared=wish.shared,
        order=wish.order or None,
        pin=wish.pin,
    )


def pull_from_wire(message: server.PullRequest) -> PullWish:
    return _wish(
        message,
        caller_from_wire(message.caller),
        Incarnation(message.server),
        Generation(message.generation),
        _wished_from_wire(message),
    )


def _wish_from_wire(header: server.PushHeader, last: PushOrder | None) -> PullWish:
    """The pull of an exchange. It is asked by who pushes."""
    message = header.pull
    if message.pin:
        raise InvalidRequest("a pinned pull in an exchange", todo="use Pull")
    if last is not None and not message.partitions and last.pull is not None:
        return _wish(message, last.caller, last.server, last.generation, last.pull.partitions)
    if last is not None:
        return _wish(message, last.caller, last.server, last.generation, _wished_from_wire(message))
    return _wish(
        message,
        caller_from_wire(header.caller),
        Incarnation(header.server),
        Generation(header.generation),
        _wished_from_wire(message),
    )


def _wished_from_wire(message: server.PullRequest) -> tuple[PartitionId, ...]:
    partitions = _bounded(message.partitions, limits.PARTITIONS_MAX, "partitions of a pull")
    _check_unique(partitions, "a pull")
    return tuple(PartitionId(partition) for partition in partitions)


def _wish(
    message: server.PullRequest,
    caller: Caller,
    to: Incarnation,
    generation: Generation,
    partitions: tuple[PartitionId, ...],
) -> PullWish:
    if message.wait_ms > limits.PULL_WAIT_MS_MAX:
        raise InvalidRequest(f"a pull that waits {message.wait_ms} ms; at most {limits.PULL_WAIT_MS_MAX}")
    coding = text(message.coding, "the coding of a pull", limits.CODING_CHARACTERS_MAX) if message.coding else ""
    order = _order_from_wire(message) if message.order else ()
    if message.pin:
        random_name(message.pin)
        if message.number or message.exactly or message.wait_ms or message.coding or message.shared:
            raise InvalidRequest("a pinned pull that is coded, shared, or asks for a version", todo="ask for the pin")
    return PullWish(
        caller,
        to,
        generation,
        partitions,
        message.number,
        message.exactly,
        message.wait_ms,
        coding,
        message.shared,
        order,
        message.pin,
    )


def random_name(value: bytes) -> bytes:
    """Of a reader, or of its pin. Raises MalformedPayload."""
    if len(value) != limits.RANDOM_NAME_BYTES:
        raise MalformedPayload(f"a random name of {len(value)} bytes; not {limits.RANDOM_NAME_BYTES}")
    return value


def pin_to_wire(wish: PinWish) -> server.PinRequest:
    return server.PinRequest(
        caller=caller_to_wire(wish.caller),
        server=wish.server,
        generation=wish.generation,
        pin=wish.pin,
        number=wish.number,
        lease_ms=wish.lease_ms,
        wait_ms=wish.wait_ms,
        rows=wish.rows,
    )


def pin_from_wire(message: server.PinRequest) -> PinWish:
    if not 1 <= message.lease_ms <= limits.PIN_LEASE_MS_MAX:
        raise InvalidRequest(f"a pin for {message.lease_ms} ms; expected 1 to {limits.PIN_LEASE_MS_MAX}")
    if message.wait_ms > limits.PULL_WAIT_MS_MAX:
        raise InvalidRequest(f"a pin that waits {message.wait_ms} ms; at most {limits.PULL_WAIT_MS_MAX}")
    if message.number > limits.SEQUENCE_MAX:
        raise TooLarge(f"a pin of version {message.number}; the last one is {limits.SEQUENCE_MAX}")
    return PinWish(
        caller_from_wire(message.caller),
        Incarnation(message.server),
        Generation(message.generation),
        random_name(message.pin),
        message.number if message.HasField("number") else None,
        message.lease_ms,
        message.wait_ms,
        message.rows,
    )


def pinned_to_wire(parts: Iterable[PulledPart], missing: Iterable[Missing]) -> server.PinReply:
    reply = server.PinReply(
        parts=[server.PulledPart(partition=part.partition, version=version_to_wire(part.version)) for part in parts]
    )
    for each in missing:
        reply.not_yet.missing.append(_missing_to_wire(each))
    return reply


def pinned_from_wire(
    message: server.PinReply, expected: Sequence[PartitionId]
) -> tuple[tuple[PulledPart, ...], tuple[Missing, ...]]:
    """`expected`: the server's partitions, ascending. Raises MalformedPayload where others are answered."""
    parts = tuple(PulledPart(PartitionId(part.partition), version_from_wire(part.version)) for part in message.parts)
    missing = tuple(_missing_from_wire(each) for each in message.not_yet.missing)
    if not missing and [part.partition for part in parts] != list(expected):
        raise MalformedPayload(f"a pin of {len(parts)} partitions; expected {len(expected)} others")
    return parts, missing


def _order_from_wire(message: server.PullRequest) -> tuple[int, ...]:
    order = tuple(_bounded(message.order, limits.VARIABLES_MAX, "variables in the order of a pull"))
    if len(set(order)) != len(order):
        raise MalformedPayload("the order of a pull that names a variable twice")
    if message.coding or message.shared:
        raise InvalidRequest(
            f"a pull in an order that is {'coded' if message.coding else 'shared'}", todo="ask for the one or the other"
        )
    return order


def ticket_to_wire(ticket: Ticket) -> server.SharedMemory:
    return server.SharedMemory(
        pid=ticket.pid, fd=ticket.fd, bytes=ticket.nbytes, nonce=ticket.nonce, region=ticket.region
    )


def ticket_from_wire(message: server.SharedMemory) -> Ticket:
    if len(message.nonce) != limits.NONCE_BYTES:
        raise MalformedPayload(f"shared memory with a nonce of {len(message.nonce)} bytes; not {limits.NONCE_BYTES}")
    if message.bytes > limits.SHARED_BYTES_MAX:
        raise TooLarge(f"shared memory of {message.bytes} bytes; at most {limits.SHARED_BYTES_MAX} are taken")
    return Ticket(message.pid, message.fd, message.bytes, message.nonce, message.region)


def _check_unique(partitions: Sequence[int], what: str) -> None:
    if len(set(partitions)) != len(partitions):
        raise MalformedPayload(f"{what} that names a partition twice")


def results_to_wire(results: Sequence[PartResult]) -> server.PushReply:
    """Results that are alike stand once, in the place of the first of them."""
    reply = server.PushReply()
    last: server.PartReply | None = None
    said: tuple[Outcome, int, Version] | None = None
    for result in results:
        saying = (result.outcome, result.next, result.version)
        if last is not None and saying == said:
            last.alike += 1
            continue
        said = saying
        last = reply.parts.add(partition=result.partition, outcome=_OUTCOMES[result.outcome], next=result.next)
        last.version.life = result.version.life
        last.version.number = result.version.number
    return reply


def results_from_wire(message: server.PushReply, partitions: Sequence[PartitionId]) -> tuple[PartResult, ...]:
    """`partitions`: those of the push, in its order. Raises MalformedPayload where others are answered."""
    found: list[PartResult] = []
    for part in message.parts:
        at, end = len(found), len(found) + 1 + part.alike
        if end > len(partitions) or partitions[at] != part.partition:
            raise MalformedPayload(f"the answer to a push names partition {part.partition} in place {at}")
        outcome = _known(_OUTCOMES, part.outcome, "the outcome of a push")
        version = version_from_wire(part.version)
        found += [PartResult(partition, outcome, part.next, version) for partition in partitions[at:end]]
    if len(found) != len(partitions):
        raise MalformedPayload(f"the answer to a push of {len(partitions)} parts has {len(found)}")
    return tuple(found)


def pulled_to_header(result: PullResult) -> bytes:
    header = server.PullHeader(code_bytes=result.code_bytes)
    if result.push:
        header.push.CopyFrom(results_to_wire(result.push))
    last: server.PulledPart | None = None
    said: Version | None = None
    for part in result.parts:
        if last is not None and said == part.version:
            last.alike += 1
            continue
        said = part.version
        last = header.parts.add(partition=part.partition)
        last.version.life = said.life
        last.version.number = said.number
    if result.places:
        header.place_regions.extend([place.region for place in result.places])
        header.places.extend([place.at for place in result.places])
    for ticket in result.regions:
        header.regions.append(ticket_to_wire(ticket))
    for missing in result.missing:
        header.not_yet.missing.append(_missing_to_wire(missing))
    if result.clock is not None:
        header.clock = result.clock
    for partition, step, square_norm in result.gathered:
        header.gathered.add(partition=partition, step=step, square_norm=square_norm)
    if result.attached is not None:
        header.attached = result.attached
        header.not_attached = result.not_attached
    if result.rows_attached:
        header.rows_attached = True
    if result.rows_not_attached:
        header.rows_not_attached = result.rows_not_attached
    return header.SerializeToString()


def _missing_to_wire(missing: Missing) -> server.Missing:
    return server.Missing(
        partition=missing.partition,
        have=version_to_wire(missing.have),
        want=missing.want,
        waiting_for=missing.waiting_for,
    )


def _missing_from_wire(message: server.Missing) -> Missing:
    return Missing(PartitionId(message.partition), version_from_wire(message.have), message.want, message.waiting_for)


def pulled_from_header(header: bytes, pulled: Sequence[PartitionId], pushed: Sequence[PartitionId] = ()) -> PullResult:
    """`pulled`, `pushed`: the partitions that were asked for. Raises MalformedPayload where others are answered."""
    try:
        message = server.PullHeader.FromString(header)
    except DecodeError as error:
        raise MalformedPayload(f"the header of a pull's answer: {error}") from error
    parts: list[PulledPart] = []
    for part in message.parts:
        at, end = len(parts), len(parts) + 1 + part.alike
        if end > len(pulled) or pulled[at] != part.partition:
            raise MalformedPayload(f"the answer to a pull names partition {part.partition} in place {at}")
        version = version_from_wire(part.version)
        parts += [PulledPart(partition, version) for partition in pulled[at:end]]
    missing: tuple[Missing, ...] = ()
    if message.HasField("not_yet"):
        missing = tuple(_missing_from_wire(each) for each in message.not_yet.missing)
    if len(message.place_regions) != len(message.places):
        raise MalformedPayload(f"{len(message.places)} places in {len(message.place_regions)} regions")
    if not missing and len(parts) != len(pulled):
        raise MalformedPayload(f"the answer to a pull of {len(pulled)} partitions has {len(parts)}")
    return PullResult(
        parts=tuple(parts),
        missing=missing,
        push=results_from_wire(message.push, pushed),
        attached=message.attached,
        not_attached=message.not_attached,
        regions=tuple(ticket_from_wire(ticket) for ticket in message.regions) if message.regions else (),
        places=tuple(map(Place, message.place_regions, message.places)) if message.places else (),
        code_bytes=tuple(message.code_bytes) if message.code_bytes else (),
        clock=message.clock if message.HasField("clock") else None,
        gathered=_gathered_from_wire(message.gathered, pulled) if message.gathered else (),
        rows_attached=message.rows_attached,
        rows_not_attached=message.rows_not_attached,
    )


def _gathered_from_wire(messages: Sequence[server.Gathered], pulled: Sequence[PartitionId]) -> tuple[Gathered, ...]:
    _check_unique([each.partition for each in messages], "what was gathered")
    asked = frozenset(pulled)
    for each in messages:
        if each.partition not in asked or each.step > limits.SEQUENCE_MAX or each.square_norm < 0:
            raise MalformedPayload(
                f"the answer to a pull says that partition {each.partition} has gathered step {each.step}, of square "
                f"norm {each.square_norm}"
            )
    return tuple([Gathered(PartitionId(each.partition), each.step, each.square_norm) for each in messages])


# ---- ledgers and leases


def sources_to_wire(keys: Iterable[tuple[SourceKey, Token]]) -> list[server.SourceToken]:
    return [server.SourceToken(source=source_to_wire(k.source), lane=k.lane, token=t) for k, t in keys]


def sources_from_wire(messages: Sequence[server.SourceToken]) -> tuple[tuple[SourceKey, Token], ...]:
    return tuple(
        (SourceKey(source_from_wire(m.source), m.lane), Token(m.token))
        for m in _bounded(messages, limits.SOURCES_PER_REQUEST_MAX, "sources")
    )


def done_to_wire(done: Iterable[DoneDataShards]) -> list[server.DoneDataShards]:
    return [
        server.DoneDataShards(feed=each.feed, per_epoch=each.per_epoch, begun=each.begun, open=sorted(each.open))
        for each in done
    ]


def done_from_wire(messages: Sequence[server.DoneDataShards]) -> tuple[DoneDataShards, ...]:
    _bounded(messages, limits.FEEDS_MAX, "feeds")
    if sum(len(message.open) for message in messages) > limits.SOURCES_PER_REQUEST_MAX:
        raise TooLarge(f"more than {limits.SOURCES_PER_REQUEST_MAX} data shards that are open")
    return tuple(DoneDataShards(m.feed, m.per_epoch, m.begun, frozenset(m.open)) for m in messages)


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
    return [
        coordinator.RankLease(rank=lease.rank, token=lease.token, careful_below=lease.careful_below) for lease in leases
    ]


def rank_leases_from_wire(messages: Iterable[coordinator.RankLease]) -> tuple[RankLease, ...]:
    return tuple(RankLease(Rank(m.rank), Token(m.token), m.careful_below) for m in messages)


def consistency_to_wire(consistency: Consistency) -> coordinator.Consistency:
    mode = consistency_mode_to_wire(consistency.mode)
    return coordinator.Consistency(number=consistency.number, mode=mode, staleness=consistency.bound)


def consistency_from_wire(message: coordinator.Consistency) -> Consistency:
    """Raises MalformedPayload, InvalidRequest, TooLarge."""
    mode = consistency_mode_from_wire(message.mode)
    bound = message.staleness if message.HasField("staleness") else None
    if (bound is None) is (mode is ConsistencyMode.BOUNDED):
        raise InvalidRequest(f"mode {mode.value} with {'no' if bound is None else 'a'} bound on staleness")
    if bound is not None and bound > limits.STALENESS_MAX:
        raise TooLarge(f"a staleness of {bound}; at most {limits.STALENESS_MAX} is taken")
    return Consistency(message.number, mode, bound)


def stop_to_wire(stop: Stop) -> coordinator.Stop:
    return coordinator.Stop(reason=stop.reason, worker=stop.worker or 0, settled=stop.settled, step=stop.step)


def stop_from_wire(message: coordinator.Stop) -> Stop:
    """Raises TooLarge."""
    if message.step > limits.SEQUENCE_MAX:
        raise TooLarge(f"a stop at step {message.step}; at most {limits.SEQUENCE_MAX} are taken")
    reason = text(message.reason, "the reason of a stop")
    return Stop(reason, Incarnation(message.worker) or None, message.settled, message.step)


def halt_to_wire(halt: Halt) -> coordinator.Halt:
    return coordinator.Halt(number=halt.number, settled=halt.settled, step=halt.step, drains=halt.drains)


def halt_from_wire(message: coordinator.Halt) -> Halt:
    """Raises TooLarge."""
    if message.step > limits.SEQUENCE_MAX:
        raise TooLarge(f"a halt at step {message.step}; at most {limits.SEQUENCE_MAX} are taken")
    return Halt(message.number, message.settled, message.step, message.drains)


def data_lease_to_wire(lease: DataLease) -> coordinator.DataLease:
    name = common.DataShardName(feed=lease.source.feed, epoch=lease.source.epoch, index=lease.source.index)
    return coordinator.DataLease(
        data_shard=name, token=lease.token, begin=lease.begin, end=lease.end, careful_below=lease.careful_below
    )


def data_lease_from_wire(message: coordinator.DataLease) -> DataLease:
    source, token = data_shard_from_wire(message.data_shard), Token(message.token)
    return DataLease(source, token, message.begin, message.end, message.careful_below)
