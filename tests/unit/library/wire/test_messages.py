"""Every check at the door: what a peer may not send, and which error it is told."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from shardyard.domain import limits, optimizers
from shardyard.domain.consistency import Durability, StaleRule, UpdateMode
from shardyard.domain.errors import InvalidRequest, MalformedPayload, ShardyardError, TooLarge
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, MemberRole, PartitionId, Rank, Term, Token
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.push_names import PushName, RankSource, SourceKey
from shardyard.domain.pushes import PushHeader, PushKind, PushPart
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard.wire import common_messages, layout_messages, lease_messages, pull_messages, push_messages
from shardyard.wire.headers import HeaderReader, HeaderWriter
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard.wire.v1 import parameter_server_pb2 as server

SGD = OptimizerSpec("sgd", (optimizers.make_group("sgd", {"lr": 0.5}),))
ORDER = PushHeader(
    caller=Caller(JobId(7), Incarnation(9), Term(1)),
    server=Incarnation(2),
    generation=Generation(1),
    name=PushName(SourceKey(RankSource(Rank(0))), Token(3), 41, 41),
    kind=PushKind.GRADIENT,
    parts=(PushPart(PartitionId(0), 64), PushPart(PartitionId(2), 0)),
    weight=64.0,
    groups=SGD.groups,
)


def variable(**changes: object) -> common.VariableSpec:
    given: dict[str, object] = {
        "name": "w",
        "dtype": common.DTYPE_FLOAT32,
        "shape": [4, 5],
        "kind": common.VARIABLE_KIND_PARAMETER,
    }
    return common.VariableSpec(**{**given, **changes})  # type: ignore[arg-type]


def layout(*partitions: tuple[int, list[tuple[int, int, int, int]]]) -> common.JobLayout:
    """Of "w", 20 float32, and "mean", 3 float64. Partitions as (payload_bytes, blocks)."""
    return common.JobLayout(
        variables=[
            variable(),
            variable(name="mean", dtype=common.DTYPE_FLOAT64, shape=[3], kind=common.VARIABLE_KIND_BUFFER),
            variable(name="void", shape=[0, 4]),
        ],
        optimizer=layout_messages.optimizer_to_wire(SGD),
        partitions=[
            common.PartitionLayout(
                partition=index,
                payload_bytes=nbytes,
                blocks=[common.Block(variable=v, offset=o, length=n, position=p) for v, o, n, p in blocks],
            )
            for index, (nbytes, blocks) in enumerate(partitions)
        ],
    )


GOOD = ((64, [(0, 0, 16, 0)]), (128, [(1, 0, 3, 0), (0, 16, 4, 64)]))


def test_good_layout_is_taken() -> None:
    taken = layout_messages.layout_from_wire(layout(*GOOD))
    assert isinstance(taken, JobLayout)
    assert taken.variables[0] == VariableSpec("w", DType.FLOAT32, (4, 5))
    assert taken.variables[1].kind is VariableKind.BUFFER
    assert taken.partitions[1] == PartitionLayout(PartitionId(1), 128, (Block(1, 0, 3, 0), Block(0, 16, 4, 64)))
    assert layout_messages.layout_to_wire(taken) == layout(*GOOD)


FIRST, SECOND = GOOD
BAD_LAYOUTS = {
    "partition out of order": lambda m: m.partitions.reverse(),
    "partition missing": lambda m: m.partitions.pop(0),
    "payload too long": lambda m: setattr(m.partitions[0], "payload_bytes", 128),
    "payload too short": lambda m: setattr(m.partitions[1], "payload_bytes", 64),
    "payload not filled up": lambda m: setattr(m.partitions[0], "payload_bytes", 60),
    "no such variable": lambda m: setattr(m.partitions[0].blocks[0], "variable", 3),
    "beyond the variable's end": lambda m: setattr(m.partitions[1].blocks[1], "length", 5),
    "offset beyond the end": lambda m: setattr(m.partitions[1].blocks[1], "offset", (1 << 64) - 2),
    "misaligned": lambda m: setattr(m.partitions[1].blocks[1], "position", 24),
    "misaligned before a good one": lambda m: setattr(m.partitions[1].blocks[0], "position", 8),
    "gap in the payload": lambda m: setattr(m.partitions[1].blocks[1], "position", 128),
    "blocks on top of each other in the payload": lambda m: setattr(m.partitions[1].blocks[1], "position", 0),
    "elements in two blocks": lambda m: setattr(m.partitions[1].blocks[1], "offset", 12),
    "elements in no block": lambda m: setattr(m.partitions[1].blocks[1], "length", 3),
    "variable without blocks": lambda m: (
        m.partitions[0].ClearField("blocks"),
        m.partitions[0].ClearField("payload_bytes"),
    ),
    "block without elements": lambda m: m.partitions[0].blocks.add(variable=0, offset=0, length=0, position=64),
    "block of nothing": lambda m: m.partitions[0].blocks.add(variable=2, offset=0, length=0, position=64),
}


@pytest.mark.parametrize("spoil", BAD_LAYOUTS.values(), ids=BAD_LAYOUTS.keys())
def test_bad_layout_is_malformed(spoil: Callable[[common.JobLayout], object]) -> None:
    message = layout(*GOOD)
    spoil(message)
    with pytest.raises(MalformedPayload):
        layout_messages.layout_from_wire(message)


def test_optimizer_that_needs_whole_variables_gets_no_cut_ones() -> None:
    def of_lamb(*partitions: tuple[int, list[tuple[int, int, int, int]]]) -> common.JobLayout:
        message = layout(*partitions)
        lamb = OptimizerSpec("lamb", (optimizers.make_group("lamb", {}),))
        message.optimizer.CopyFrom(layout_messages.optimizer_to_wire(lamb))
        return message

    with pytest.raises(MalformedPayload, match="16 elements of variable 'w', which has 20; 'lamb' needs it whole"):
        layout_messages.layout_from_wire(of_lamb(*GOOD))
    # a buffer may be cut, since no optimizer changes it
    taken = layout_messages.layout_from_wire(of_lamb((192, [(0, 0, 20, 0), (1, 0, 2, 128)]), (64, [(1, 2, 1, 0)])))
    assert [len(part.blocks) for part in taken.partitions] == [2, 1]


def test_layout_beyond_the_limits_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCKS_MAX", 2)
    with pytest.raises(TooLarge, match="3 blocks"):
        layout_messages.layout_from_wire(layout(*GOOD))
    with pytest.raises(TooLarge, match="4097 partitions"):
        layout_messages.layout_from_wire(layout(*[(0, [])] * (limits.PARTITIONS_MAX + 1)))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": ""}, InvalidRequest),
        ({"name": "w" * (limits.VARIABLE_NAME_CHARACTERS_MAX + 1)}, TooLarge),
        ({"dtype": 0}, MalformedPayload),
        ({"dtype": 99}, MalformedPayload),
        ({"kind": 0}, MalformedPayload),
        ({"kind": 7}, MalformedPayload),
        ({"shape": [1] * (limits.DIMENSIONS_MAX + 1)}, TooLarge),
        ({"shape": [limits.VARIABLE_BYTES_MAX // 4 + 1]}, TooLarge),
        ({"shape": [(1 << 64) - 1] * limits.DIMENSIONS_MAX}, TooLarge),
        ({"dtype": common.DTYPE_INT64}, InvalidRequest),
    ],
)
def test_bad_variable_is_refused(changes: dict[str, object], expected: type[ShardyardError]) -> None:
    layout_messages.variable_from_wire(variable())
    with pytest.raises(expected) as raised:
        layout_messages.variable_from_wire(variable(**changes))
    assert type(raised.value) is expected


def test_variables_are_checked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = variable(name="b", kind=common.VARIABLE_KIND_BUFFER, group=5)
    assert len(layout_messages.variables_from_wire([variable(), buffer], 1)) == 2
    with pytest.raises(InvalidRequest, match="comes twice"):
        layout_messages.variables_from_wire([variable(), variable()], 1)
    with pytest.raises(InvalidRequest, match="parameter group 1"):
        layout_messages.variables_from_wire([variable(group=1)], 1)
    monkeypatch.setattr(limits, "JOB_BYTES_MAX", 100)
    with pytest.raises(TooLarge, match="160 bytes"):
        layout_messages.variables_from_wire([variable(), variable(name="v")], 1)
    monkeypatch.setattr(limits, "VARIABLES_MAX", 1)
    with pytest.raises(TooLarge, match="2 variables"):
        layout_messages.variables_from_wire([variable(), variable(name="v")], 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: setattr(m, "kind", "lion"),
        lambda m: setattr(m, "kind", ""),
        lambda m: m.settings.pop(),
        lambda m: m.settings.reverse(),
        lambda m: m.settings.append("lr"),
        lambda m: m.groups[0].values.pop(),
        lambda m: m.groups[0].values.append(0.0),
        lambda m: m.groups[0].values.__setitem__(0, math.nan),
        lambda m: m.groups[0].values.__setitem__(0, math.inf),
        lambda m: m.groups[0].values.__setitem__(0, -1.0),
        lambda m: m.groups[0].values.__setitem__(5, 0.5),
    ],
)
def test_bad_optimizer_is_refused(spoil: Callable[[common.OptimizerSpec], object]) -> None:
    message = layout_messages.optimizer_to_wire(SGD)
    assert layout_messages.optimizer_from_wire(message) == SGD
    spoil(message)
    with pytest.raises(InvalidRequest):
        layout_messages.optimizer_from_wire(message)


def test_too_many_parameter_groups_are_too_large() -> None:
    with pytest.raises(TooLarge):
        layout_messages.groups_from_wire([common.ParameterGroup()] * (limits.GROUPS_MAX + 1))


def spoiled_header(spoil: Callable[[server.PushHeader], object]) -> bytes:
    message = push_messages.push_to_wire(ORDER)
    spoil(message)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda m: m.ClearField("kind"), MalformedPayload),
        (lambda m: setattr(m, "kind", 99), MalformedPayload),
        (lambda m: m.ClearField("name"), MalformedPayload),
        (lambda m: m.name.ClearField("source"), MalformedPayload),
        (lambda m: setattr(m.name, "first", 42), MalformedPayload),
        (lambda m: setattr(m.name, "last", limits.SEQUENCE_MAX + 1), TooLarge),
        (lambda m: setattr(m.name, "last", (1 << 64) - 1), TooLarge),
        (lambda m: setattr(m, "weight", math.nan), InvalidRequest),
        (lambda m: setattr(m, "weight", math.inf), InvalidRequest),
        (lambda m: setattr(m, "weight", -1.0), InvalidRequest),
        (lambda m: m.parts.add(partition=2), MalformedPayload),
        (lambda m: m.parts.extend([server.PushPart()] * (limits.PARTITIONS_MAX + 1)), TooLarge),
        (lambda m: setattr(m.parts[0], "payload_bytes", limits.PUSH_BYTES_MAX + 1), TooLarge),
        (lambda m: [setattr(p, "payload_bytes", limits.PUSH_BYTES_MAX) for p in m.parts], TooLarge),
        (lambda m: [setattr(p, "payload_bytes", (1 << 64) - 1) for p in m.parts], TooLarge),
        (lambda m: [p.absent_blocks.extend(range(limits.BLOCKS_MAX // 2 + 1)) for p in m.parts], TooLarge),
        (lambda m: setattr(m, "kind", server.PUSH_KIND_EMPTY), MalformedPayload),
        (lambda m: m.groups.extend([common.ParameterGroup()] * (limits.GROUPS_MAX + 1)), TooLarge),
        (lambda m: setattr(m.pull, "wait_ms", limits.PULL_WAIT_MS_MAX + 1), InvalidRequest),
        (lambda m: m.pull.partitions.extend([0, 0]), MalformedPayload),
        (lambda m: m.bases.parts.add(), MalformedPayload),
        (lambda m: m.bases.parts.add(alike=2), MalformedPayload),
        (lambda m: m.bases.parts.add(alike=(1 << 32) - 1), MalformedPayload),
        (lambda m: m.bases.parts.extend([server.Base()] * 3), MalformedPayload),
        (lambda m: m.bases.SetInParent(), MalformedPayload),
        (lambda m: [m.bases.parts.add(alike=1), setattr(m, "kind", server.PUSH_KIND_VALUES)], MalformedPayload),
        (lambda m: [m.bases.parts.add(alike=1), setattr(m, "kind", server.PUSH_KIND_NOTHING)], MalformedPayload),
    ],
)
def test_bad_push_header_is_refused(
    spoil: Callable[[server.PushHeader], object], expected: type[ShardyardError]
) -> None:
    assert push_messages.push_from_header(spoiled_header(lambda m: None)) == ORDER
    with pytest.raises(expected) as raised:
        push_messages.push_from_header(spoiled_header(spoil))
    assert type(raised.value) is expected


@pytest.mark.parametrize("header", [b"", b"\xff", b"\x0a\x05", b"\x0a\xff\xff\xff\xff\x0f", b"\x00" * 9])
def test_bytes_that_are_no_header_are_malformed(header: bytes) -> None:
    with pytest.raises(MalformedPayload):
        push_messages.push_from_header(header)
    if header:
        with pytest.raises(MalformedPayload):
            push_messages.pulled_from_header(header, ())


def test_bad_pull_is_refused() -> None:
    good = server.PullRequest(partitions=[0, 1], wait_ms=limits.PULL_WAIT_MS_MAX)
    assert len(pull_messages.pull_from_wire(good).partitions) == 2
    with pytest.raises(MalformedPayload, match="twice"):
        pull_messages.pull_from_wire(server.PullRequest(partitions=[1, 1]))
    with pytest.raises(TooLarge):
        pull_messages.pull_from_wire(server.PullRequest(partitions=range(limits.PARTITIONS_MAX + 1)))
    with pytest.raises(InvalidRequest, match="1001 ms"):
        pull_messages.pull_from_wire(server.PullRequest(wait_ms=limits.PULL_WAIT_MS_MAX + 1))


@pytest.mark.parametrize(
    ("compensation", "decay"), [(-0.5, 0), (math.nan, 0), (math.inf, 0), (1, 1), (1, -0.1), (1, math.nan)]
)
def test_bad_rule_for_stale_gradients_is_refused(compensation: float, decay: float) -> None:
    rule = StaleRule(divides_rate=True, compensation=0.5, decay=0.95)
    message = common_messages.stale_to_wire(rule)
    assert message is not None
    assert common_messages.stale_from_wire(message) == rule
    assert common_messages.stale_to_wire(None) is None
    message.compensation, message.decay = compensation, decay
    with pytest.raises(InvalidRequest, match="expected a number from 0"):
        common_messages.stale_from_wire(message)


def test_bad_answers_are_refused() -> None:
    with pytest.raises(MalformedPayload, match="outcome"):
        push_messages.results_from_wire(server.PushReply(parts=[{"outcome": 9}]), [PartitionId(0)])
    with pytest.raises(MalformedPayload, match="no source"):
        lease_messages.watermarks_from_wire([server.SourceWatermarks()])


def test_partition_map_is_in_order_and_bounded() -> None:
    with pytest.raises(MalformedPayload):
        layout_messages.map_from_wire(common.PartitionMap(owners=[{"partition": 1}]))
    with pytest.raises(TooLarge):
        layout_messages.map_from_wire(common.PartitionMap(owners=[{"partition": 0, "address": "a" * 513}]))
    with pytest.raises(TooLarge):
        layout_messages.map_from_wire(
            common.PartitionMap(owners=[common.PartitionOwner()] * (limits.PARTITIONS_MAX + 1))
        )


def test_too_many_sources_are_too_large() -> None:
    one = server.SourceToken(source={"logical_rank": 1})
    assert lease_messages.sources_from_wire([one] * 2)[1][0] == SourceKey(RankSource(Rank(1)))
    with pytest.raises(TooLarge):
        lease_messages.sources_from_wire([one] * (limits.SOURCES_PER_REQUEST_MAX + 1))


def test_numbers_that_a_checkpoint_has_no_room_for_are_too_large() -> None:
    last = limits.SEQUENCE_MAX
    source = {"data_shard": {"feed": 0}}
    assert lease_messages.sources_from_wire([server.SourceToken(source=source, token=last)])
    with pytest.raises(TooLarge, match=f"the token {last + 1}"):
        lease_messages.sources_from_wire([server.SourceToken(source=source, token=last + 1)])
    name = common.PushName(source=source, last=last - 1)
    assert common_messages.name_from_wire(name).last == last - 1
    name.last = last
    with pytest.raises(TooLarge, match=f"the sequence {last}"):
        common_messages.name_from_wire(name)


def test_unknown_roles_and_modes_are_malformed() -> None:
    for role in MemberRole:
        assert common_messages.ROLES.from_wire(common_messages.ROLES.to_wire(role)) is role
    for mode in UpdateMode:
        assert common_messages.UPDATE_MODES.from_wire(common_messages.UPDATE_MODES.to_wire(mode)) is mode
    for number in (0, 99):
        with pytest.raises(MalformedPayload):
            common_messages.ROLES.from_wire(number)  # type: ignore[arg-type]
        with pytest.raises(MalformedPayload):
            common_messages.UPDATE_MODES.from_wire(number)  # type: ignore[arg-type]


def test_long_text_is_too_large() -> None:
    assert common_messages.text("abc", "a word", 3) == "abc"
    with pytest.raises(TooLarge, match="a word has 4"):
        common_messages.text("abcd", "a word", 3)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (DType, common.DType),
        (VariableKind, common.VariableKind),
        (UpdateMode, common.UpdateMode),
        (MemberRole, coordinator.Role),
        (PushKind, server.PushKind),
    ],
)
def test_every_value_of_a_wire_enum_is_known(ours: type, theirs: object) -> None:
    suffixes = {name.rpartition("_")[2].lower() for name in theirs.keys()}  # type: ignore[attr-defined]  # noqa: SIM118
    assert suffixes - {"unspecified"} == {member.value for member in ours}  # type: ignore[attr-defined]


def test_overflow_is_said_and_heard_where_headers_differ_in_nothing_else() -> None:
    writer, reader = HeaderWriter(), HeaderReader()
    said = []
    for sequence, overflow in enumerate((False, False, False, True, True, True, False, False)):
        name = dataclasses.replace(ORDER.name, first=sequence, last=sequence)
        said.append(dataclasses.replace(ORDER, name=name, overflow=overflow))
        found, _ = reader.read(writer.write(said[-1]))
        assert (found.name, found.overflow) == (name, overflow), sequence
    assert [each.overflow for each in said] == [False] * 3 + [True] * 3 + [False] * 2


@pytest.mark.parametrize("kind", [PushKind.EMPTY, PushKind.VALUES, PushKind.NOTHING])
def test_only_gradients_overflow(kind: PushKind) -> None:
    header = push_messages.push_to_wire(
        dataclasses.replace(ORDER, kind=kind, parts=(), overflow=True)
    ).SerializeToString()
    with pytest.raises(InvalidRequest, match="overflow"):
        push_messages.push_from_header(header)


def test_durability_has_its_number_and_is_a_checkpoint_where_none_is_given() -> None:
    numbers = {each: common_messages.DURABILITIES.to_wire(each) for each in Durability}
    assert numbers == {Durability.CHECKPOINT: common.DURABILITY_CHECKPOINT, Durability.WAL: common.DURABILITY_WAL}
    for number in (common.DURABILITY_UNSPECIFIED, common.DURABILITY_CHECKPOINT):
        assert common_messages.DURABILITIES.from_wire(number) is Durability.CHECKPOINT
