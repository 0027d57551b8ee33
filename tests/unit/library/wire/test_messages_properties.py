"""The wire layer under whatever comes: frames and their assembly, conversion there and back, arbitrary bytes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import string
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.domain import limits, optimizers
from shardyard.domain.consistency import Clipping, Stop
from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Rank, Term, Token, Version
from shardyard.domain.layout.layouts import (
    Block,
    JobLayout,
    PartitionLayout,
    PartitionMap,
    PartitionOwner,
    aligned_bytes,
)
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.pulls import (
    NotReadyPart,
    PinRequest,
    PulledPart,
    PullHeader,
    RequestedRows,
    ShmHandle,
    ShmLocation,
)
from shardyard.domain.push_names import (
    NO_NAME,
    DataLease,
    DataShardSource,
    PushName,
    RankLease,
    RankSource,
    SourceKey,
    Watermark,
    WorkerSource,
)
from shardyard.domain.pushes import (
    ExchangeReply,
    GatheredPart,
    Outcome,
    PartResult,
    PushHeader,
    PushKind,
    PushPart,
    StepVerdict,
)
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard.wire import (
    common_messages,
    frames,
    layout_messages,
    lease_messages,
    pull_messages,
    push_messages,
)
from shardyard.wire.frames import Assembler, Frame
from shardyard.wire.headers import HeaderReader, HeaderWriter, reply_from_header, reply_to_header
from shardyard.wire.v1 import parameter_server_pb2 as server

bounded = settings(max_examples=100, deadline=None)

u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
finite = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
texts = st.text(max_size=20).filter(str.isprintable)
"""What cannot be shown is refused (test_names.py)."""

callers = st.builds(Caller, u64.map(JobId), u64.map(Incarnation), u64.map(Term))
sources = st.one_of(
    st.builds(DataShardSource, u32, u32, u32), st.builds(RankSource, u32.map(Rank)), st.builds(WorkerSource, u64)
)
keys = st.builds(SourceKey, sources, u32)
versions = st.builds(Version, u64, u64)
few_versions = st.builds(Version, st.just(1), st.integers(0, 2))
spans = st.lists(st.integers(0, limits.SEQUENCE_MAX - 1), min_size=2, max_size=2).map(sorted)
names = st.builds(lambda key, token, span: PushName(key, Token(token), *span), keys, u64, spans)
partition_numbers = u32.map(PartitionId)
partition_lists = st.lists(partition_numbers, max_size=4, unique=True).map(tuple)
wishes = st.builds(
    PullHeader,
    callers,
    u64.map(Incarnation),
    u64.map(Generation),
    partition_lists,
    u64,
    st.booleans(),
    st.integers(0, limits.PULL_WAIT_MS_MAX),
    st.text(max_size=limits.CODING_CHARACTERS_MAX).filter(str.isprintable),
    st.booleans(),
)
random_names = st.binary(min_size=limits.RANDOM_NAME_BYTES, max_size=limits.RANDOM_NAME_BYTES)
pinned_wishes = st.builds(
    lambda caller, server, generation, partitions, order, pin: PullHeader(
        caller, server, generation, partitions, 0, False, order=order, pin=pin
    ),
    callers,
    u64.map(Incarnation),
    u64.map(Generation),
    partition_lists,
    st.lists(u32, max_size=3, unique=True).map(tuple),
    random_names,
)
pins = st.builds(
    PinRequest,
    callers,
    u64.map(Incarnation),
    u64.map(Generation),
    random_names,
    st.none() | st.integers(0, limits.SEQUENCE_MAX),
    st.integers(1, limits.PIN_LEASE_MS_MAX),
    st.integers(0, limits.PULL_WAIT_MS_MAX),
)
missing = st.builds(NotReadyPart, partition_numbers, versions, u64, texts)
pinned = st.tuples(
    st.lists(st.builds(PulledPart, partition_numbers, versions), max_size=4).map(tuple), st.just(())
) | st.tuples(st.just(()), st.lists(missing, min_size=1, max_size=4).map(tuple))
push_parts = st.builds(
    lambda partition, nbytes, absent, codes: PushPart(partition, sum(codes) if codes else nbytes, absent, codes),
    partition_numbers,
    st.integers(0, limits.GIB),
    st.lists(u32, max_size=4, unique=True).map(tuple),
    st.lists(st.integers(0, limits.MIB), max_size=3).map(tuple),
)
part_lists = st.lists(push_parts, max_size=4, unique_by=lambda part: part.partition).map(tuple)
groups = st.lists(st.lists(finite, max_size=6).map(tuple), max_size=3).map(tuple)
tickets = st.builds(
    ShmHandle,
    st.integers(0, limits.SHARED_BYTES_MAX),
    u32,
)


sums = finite | st.just(math.inf)
ranks = st.sets(st.integers(0, limits.LOGICAL_RANKS_MAX - 1), max_size=6)
verdicts = st.builds(
    StepVerdict, st.integers(0, limits.SEQUENCE_MAX), st.none() | sums, ranks.map(lambda found: tuple(sorted(found)))
)


@st.composite
def requested_rows(draw: st.DrawFn, table: int, pulled: tuple[PartitionId, ...]) -> RequestedRows:
    chosen = draw(st.lists(st.sampled_from(pulled), min_size=1, unique=True))
    rows = st.lists(st.integers(1, limits.LOOK_UP_IDS_MAX), min_size=len(chosen), max_size=len(chosen))
    return RequestedRows(table, tuple(chosen), tuple(draw(rows)))


@st.composite
def orders(draw: st.DrawFn, *, by: PushHeader | None = None) -> PushHeader:
    """`by`: who speaks, as in that order; its parts and partitions come again, or others that are not none."""
    caller, server, generation = draw(callers), Incarnation(draw(u64)), Generation(draw(u64))
    parts, wished = draw(part_lists), draw(st.none() | wishes)
    if by is not None:
        caller, server, generation = by.caller, by.server, by.generation
        parts = by.parts if draw(st.booleans()) else draw(part_lists.filter(bool))
    if wished is not None:
        wished = dataclasses.replace(wished, caller=caller, server=server, generation=generation)
    if wished is not None and by is not None and by.pull is not None:
        before = by.pull.partitions
        wished = dataclasses.replace(
            wished, partitions=before if draw(st.booleans()) else draw(partition_lists.filter(bool))
        )
    kind = draw(st.sampled_from([PushKind.GRADIENT, PushKind.VALUES, PushKind.EMPTY, PushKind.NOTHING]))
    if kind is PushKind.EMPTY:
        parts = tuple(PushPart(part.partition, 0, part.absent_blocks) for part in parts)
    has_bases = kind is PushKind.GRADIENT and draw(st.booleans())
    requested: tuple[RequestedRows, ...] = ()
    if wished is not None and wished.partitions and not wished.order:
        numbers = draw(st.lists(st.integers(0, limits.TABLES_MAX - 1), max_size=2, unique=True))
        requested = tuple(draw(requested_rows(number, wished.partitions)) for number in numbers)
    return PushHeader(
        caller=caller,
        server=server,
        generation=generation,
        name=NO_NAME if kind is PushKind.NOTHING else draw(names),
        kind=kind,
        parts=() if kind is PushKind.NOTHING else parts,
        weight=draw(finite),
        groups=draw(groups),
        pull=wished,
        shared_at=draw(st.none() | u64),
        attach=draw(st.none() | tickets),
        detach=draw(st.booleans()),
        bases=tuple(draw(st.lists(few_versions | versions, min_size=len(parts), max_size=len(parts))))
        if has_bases
        else (),
        verdict=draw(st.none() | verdicts),
        overflow=kind is PushKind.GRADIENT and draw(st.booleans()),
        requested=requested,
        attach_rows=draw(st.none() | tickets),
        rows_at=draw(st.none() | u64) if requested else None,
        requested_at=draw(st.none() | u64) if requested else None,
    )


results = st.builds(PartResult, partition_numbers, st.sampled_from(Outcome), u64, versions)


@st.composite
def alike_results(draw: st.DrawFn) -> tuple[PartResult, ...]:
    """Of which several, one after the other, are often alike."""
    outcomes = st.sampled_from([Outcome.APPLIED, Outcome.DUPLICATE])
    return tuple(
        PartResult(partition, draw(outcomes), draw(st.integers(4, 5)), draw(few_versions))
        for partition in draw(st.lists(partition_numbers, max_size=12, unique=True))
    )


@st.composite
def pull_results(draw: st.DrawFn) -> ExchangeReply:
    parts = tuple(
        PulledPart(partition, draw(few_versions | versions))
        for partition in draw(st.lists(partition_numbers, max_size=12, unique=True))
    )
    told = [part.partition for part in parts if draw(st.booleans())]
    missing = ()
    if not parts:
        missing = tuple(draw(st.lists(st.builds(NotReadyPart, partition_numbers, versions, u64, texts), max_size=3)))
    return ExchangeReply(
        parts=parts,
        missing=missing,
        push=draw(alike_results()),
        attached=draw(st.booleans()),
        not_attached=draw(texts),
        regions=tuple(draw(st.lists(tickets, max_size=2))),
        places=tuple(draw(st.lists(st.builds(ShmLocation, u32, u64), max_size=3))),
        code_bytes=tuple(draw(st.lists(u32, max_size=3))),
        gathered=tuple(GatheredPart(each, draw(st.integers(0, limits.SEQUENCE_MAX)), draw(sums)) for each in told),
    )


def answer_there_and_back(result: ExchangeReply) -> ExchangeReply:
    return push_messages.pulled_from_header(
        push_messages.pulled_to_header(result),
        [part.partition for part in result.parts],
        [part.partition for part in result.push],
    )


maps = st.builds(
    lambda generation, servers: PartitionMap(
        Generation(generation),
        tuple(PartitionOwner(PartitionId(i), Incarnation(s), f"10.0.0.{i}:1") for i, s in enumerate(servers)),
    ),
    u64,
    st.lists(u64, max_size=6),
)


@st.composite
def optimizer_specs(draw: st.DrawFn) -> OptimizerSpec:
    kind = draw(st.sampled_from(sorted(optimizers.KINDS)))
    rates = draw(st.lists(st.floats(0, 10, exclude_min=kind == "ftrl"), min_size=1, max_size=3))
    return OptimizerSpec(kind, tuple(optimizers.make_group(kind, {"lr": rate}) for rate in rates))


@st.composite
def variable_lists(draw: st.DrawFn, group_count: int) -> tuple[VariableSpec, ...]:
    names_ = draw(
        st.lists(st.text(string.printable.strip() + " ", min_size=1, max_size=8), min_size=1, max_size=4, unique=True)
    )
    specs = []
    for name in names_:
        kind = draw(st.sampled_from(VariableKind))
        dtype = draw(st.sampled_from([d for d in DType if d.is_floating or kind is VariableKind.BUFFER]))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        group = draw(st.integers(0, group_count - 1)) if kind is VariableKind.PARAMETER else 0
        specs.append(VariableSpec(name, dtype, shape, kind, group))
    return tuple(specs)


@st.composite
def layouts(draw: st.DrawFn) -> JobLayout:
    """Variables cut anywhere, where the optimizer takes that, the blocks dealt to the partitions in any order."""
    optimizer = draw(optimizer_specs())
    variables = draw(variable_lists(len(optimizer.groups)))
    pieces: list[tuple[int, int, int]] = []
    for index, spec in enumerate(variables):
        whole = optimizer.kind in optimizers.WHOLE_VARIABLES and spec.kind is VariableKind.PARAMETER
        may_be_cut = spec.elements > 1 and not whole
        cuts = draw(st.lists(st.integers(1, spec.elements - 1), max_size=3, unique=True)) if may_be_cut else []
        edges = [0, *sorted(cuts), spec.elements]
        pieces += [(index, a, b - a) for a, b in itertools.pairwise(edges) if b > a]
    count = draw(st.integers(1, 3))
    held: list[list[Block]] = [[] for _ in range(count)]
    ends = [0] * count
    for variable, offset, length in draw(st.permutations(pieces)):
        home = draw(st.integers(0, count - 1))
        held[home].append(Block(variable, offset, length, ends[home]))
        ends[home] += aligned_bytes(length * variables[variable].dtype.item_bytes)
    partitions = tuple(
        PartitionLayout(PartitionId(i), end, tuple(blocks))
        for i, (end, blocks) in enumerate(zip(ends, held, strict=True))
    )
    return JobLayout(variables, optimizer, partitions)


# ---- frames


@bounded
@given(
    st.sampled_from([server.PushFrame, server.PullFrame]), st.integers(1, (1 << 64) - 1) | st.just(0), st.binary(), u64
)
def test_frame_is_what_the_generated_classes_write(kind: Any, offset: int, data: bytes, number: int) -> None:
    theirs = kind(offset=offset, data=data)
    if kind is server.PushFrame:
        theirs.header.generation = number
    else:
        theirs.header.places.append(number)
    ours = Frame(theirs.header.SerializeToString(), offset, data)
    message = theirs.SerializeToString()
    if ours.header:
        assert frames.encode(ours) == message
    assert frames.decode(message) == ours
    assert kind.FromString(frames.encode(ours)).data == data


@bounded
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_frame_or_a_typed_error(message: bytes) -> None:
    _check_decoding(message)


def _tagged(field: int, kind: int, body: bytes) -> bytes:
    tag = field << 3 | kind
    return bytes((tag & 0x7F | 0x80, tag >> 7)) + body


fields = st.one_of(
    st.builds(lambda f, d: _tagged(f, 2, bytes((len(d),)) + d), st.integers(0, 20), st.binary(max_size=90)),
    st.builds(lambda f, d: _tagged(f, 1, d), st.integers(0, 20), st.binary(min_size=8, max_size=8)),
    st.builds(lambda f, d: _tagged(f, 5, d), st.integers(0, 20), st.binary(min_size=4, max_size=4)),
    st.builds(lambda f, n: _tagged(f, 0, bytes((n,))), st.integers(0, 20), st.integers(0, 127)),
    st.binary(max_size=4),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(fields, max_size=6).map(b"".join))
def test_bytes_that_are_nearly_a_frame_are_one_or_a_typed_error(message: bytes) -> None:
    _check_decoding(message)


def _check_decoding(message: bytes) -> None:
    """Ours either refuses, or reads what the generated class reads (which also looks into the header)."""
    try:
        ours = frames.decode(message)
    except (MalformedPayload, TooLarge):
        return
    assert len(ours.data) <= limits.FRAME_BYTES_MAX
    assert 0 <= ours.offset < 1 << 64
    try:
        theirs = server.PushFrame.FromString(message)
    except DecodeError:
        return
    assert (ours.offset, bytes(ours.data)) == (theirs.offset, theirs.data)
    assert server.PushHeader.FromString(ours.header) == theirs.header


@bounded
@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 50), st.binary(min_size=1, max_size=5))
def test_any_pieces_cut_anyhow_come_together_again(pieces: list[bytes], frame_bytes: int, header: bytes) -> None:
    whole = b"".join(pieces)
    found = list(frames.cut(header, pieces, frame_bytes))
    assert [frame.header for frame in found] == [header] + [b""] * (len(found) - 1)
    assert all(len(frame.data) <= frame_bytes for frame in found)
    memory = bytearray(len(whole))
    assembler = Assembler(memoryview(memory))
    for frame in found:
        assembler.add(frames.decode(frames.encode(frame)))
    assembler.finish()
    assert bytes(memory) == whole


@bounded
@given(
    st.binary(max_size=60),
    st.lists(st.tuples(st.integers(0, 70), st.binary(max_size=30)), max_size=8),
    st.lists(st.integers(0, 60), max_size=4),
)
def test_lying_stream_never_writes_beyond_its_room(
    whole: bytes, sent: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    """Whose memory is in one piece, or in several."""
    memory = bytearray(b"\xee" * (len(whole) + 16))
    ends = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    assembler = Assembler(*[memoryview(memory)[8 + begin : 8 + end] for begin, end in itertools.pairwise(ends)])
    taken = b""
    for offset, data in sent:
        good = offset == len(taken) and len(taken) + len(data) <= len(whole)
        if good or not data:
            assembler.add(Frame(b"", offset, data))
            taken += data
        else:
            with pytest.raises(MalformedPayload):
                assembler.add(Frame(b"", offset, data))
    assert assembler.complete == (len(taken) == len(whole))
    assert bytes(memory) == b"\xee" * 8 + taken + b"\xee" * (len(whole) - len(taken) + 8)


# ---- there and back


PAIRS: list[tuple[str, st.SearchStrategy[Any], Callable[[Any], Any]]] = [
    ("caller", callers, lambda v: common_messages.caller_from_wire(common_messages.caller_to_wire(v))),
    ("source", sources, lambda v: common_messages.source_from_wire(common_messages.source_to_wire(v))),
    ("name", names, lambda v: common_messages.name_from_wire(common_messages.name_to_wire(v))),
    ("version", versions, lambda v: common_messages.version_from_wire(common_messages.version_to_wire(v))),
    ("map", maps, lambda v: layout_messages.map_from_wire(layout_messages.map_to_wire(v))),
    (
        "optimizer",
        optimizer_specs(),
        lambda v: layout_messages.optimizer_from_wire(layout_messages.optimizer_to_wire(v)),
    ),
    (
        "variables",
        variable_lists(2),
        lambda v: layout_messages.variables_from_wire([layout_messages.variable_to_wire(s) for s in v], 2),
    ),
    ("groups", groups, lambda v: layout_messages.groups_from_wire(layout_messages.groups_to_wire(v))),
    ("layout", layouts(), lambda v: layout_messages.layout_from_wire(layout_messages.layout_to_wire(v))),
    ("push", orders(), lambda v: push_messages.push_from_header(push_messages.push_to_wire(v).SerializeToString())),
    ("pull", wishes | pinned_wishes, lambda v: pull_messages.pull_from_wire(pull_messages.pull_to_wire(v))),
    ("pin", pins, lambda v: pull_messages.pin_from_wire(pull_messages.pin_to_wire(v))),
    (
        "pinned",
        pinned,
        lambda v: pull_messages.pinned_from_wire(pull_messages.pinned_to_wire(*v), [part.partition for part in v[0]]),
    ),
    (
        "results",
        st.lists(results, max_size=4).map(tuple) | alike_results(),
        lambda v: push_messages.results_from_wire(push_messages.results_to_wire(v), [result.partition for result in v]),
    ),
    ("pulled", pull_results(), answer_there_and_back),
    ("verdict", verdicts, lambda v: push_messages.verdict_from_wire(push_messages.verdict_to_wire(v))),
    (
        "verdict that was given",
        st.tuples(verdicts, partition_lists),
        lambda v: push_messages.given_from_wire(push_messages.given_to_wire(*v)),
    ),
    (
        "clipping",
        st.builds(Clipping, finite, finite),
        lambda v: common_messages.clipping_from_wire(common_messages.clipping_to_wire(v)),
    ),
    ("ticket", tickets, lambda v: pull_messages.ticket_from_wire(pull_messages.ticket_to_wire(v))),
    (
        "sources",
        st.lists(st.tuples(keys, st.integers(0, limits.SEQUENCE_MAX).map(Token)), max_size=4).map(tuple),
        lambda v: lease_messages.sources_from_wire(lease_messages.sources_to_wire(v)),
    ),
    (
        "watermarks",
        st.lists(
            st.tuples(keys, st.lists(st.builds(Watermark, partition_numbers, u64, versions), max_size=3).map(tuple)),
            max_size=3,
        ).map(tuple),
        lambda v: lease_messages.watermarks_from_wire(lease_messages.watermarks_to_wire(v)),
    ),
    (
        "rank leases",
        st.lists(st.builds(RankLease, u32.map(Rank), u64.map(Token)), max_size=4).map(tuple),
        lambda v: lease_messages.rank_leases_from_wire(lease_messages.rank_leases_to_wire(v)),
    ),
    (
        "data lease",
        st.builds(DataLease, st.builds(DataShardSource, u32, u32, u32), u64.map(Token), u64, u64),
        lambda v: lease_messages.data_lease_from_wire(lease_messages.data_lease_to_wire(v)),
    ),
    (
        "stop",
        st.builds(
            Stop,
            texts,
            st.none() | st.integers(1, (1 << 64) - 1).map(Incarnation),
            st.booleans(),
            st.integers(0, limits.SEQUENCE_MAX),
        ),
        lambda v: lease_messages.stop_from_wire(lease_messages.stop_to_wire(v)),
    ),
]


@pytest.mark.parametrize(("values", "there_and_back"), [pair[1:] for pair in PAIRS], ids=[pair[0] for pair in PAIRS])
def test_value_comes_back_from_the_wire_as_it_was(
    values: st.SearchStrategy[Any], there_and_back: Callable[[Any], Any]
) -> None:
    @settings(max_examples=40, deadline=None)
    @given(values)
    def run(value: Any) -> None:
        assert there_and_back(value) == value

    run()


@bounded
@given(st.data())
def test_headers_of_a_stream_come_back_whatever_differs_between_them(data: st.DataObject) -> None:
    writer, reader = HeaderWriter(), HeaderReader()
    said = [data.draw(orders())]
    for _ in range(8):
        ours = said[-1]
        expected = ours if ours.kind is not PushKind.NOTHING else dataclasses.replace(ours, name=NO_NAME, parts=())
        theirs, plan = reader.read(writer.write(ours))
        assert theirs == expected
        if plan is not None:
            assert theirs.parts is plan.parts
        said.append(data.draw(st.sampled_from(said) | orders(by=ours) | changed_orders(ours)))


@st.composite
def changed_orders(draw: st.DrawFn, before: PushHeader) -> PushHeader:
    """A header that differs from another as those of two steps do."""
    changes: dict[str, Any] = {}
    if before.kind is not PushKind.NOTHING:
        changes["name"] = dataclasses.replace(
            before.name, key=draw(st.just(before.name.key) | keys), token=draw(st.integers(0, 9).map(Token))
        )
        changes["weight"] = draw(st.just(before.weight) | st.floats(0.5, 9))
        changes["groups"] = draw(st.just(before.groups) | groups)
    if before.pull is not None:
        changes["pull"] = dataclasses.replace(before.pull, number=draw(u64))
    changes["verdict"] = draw(st.none() | verdicts)
    return dataclasses.replace(before, **changes)


@bounded
@given(pull_results(), orders())
def test_answer_to_a_step_comes_back(result: ExchangeReply, plan: PushHeader) -> None:
    pulled, pushed = tuple(part.partition for part in result.parts), tuple(part.partition for part in result.push)
    pull = PullHeader(plan.caller, plan.server, plan.generation, pulled, 0, exactly=False, shared=bool(result.places))
    kind = PushKind.GRADIENT if pushed else PushKind.NOTHING
    plan = dataclasses.replace(plan, kind=kind, parts=tuple(PushPart(each, 8) for each in pushed), pull=pull)
    usual = dataclasses.replace(result, attached=None, not_attached="", code_bytes=(), gathered=())
    for answer in (result, usual, dataclasses.replace(usual, places=(ShmLocation(1, 64),) * len(pulled))):
        theirs = reply_from_header(reply_to_header(answer, plan), pulled, pushed, shared=bool(result.places))
        said = answer if answer.attached is not None else dataclasses.replace(answer, attached=theirs.attached)
        assert theirs == said


@bounded
@given(alike_results())
def test_answers_that_are_alike_stand_once(found: tuple[PartResult, ...]) -> None:
    said = push_messages.results_to_wire(found).parts
    runs = [list(run) for _, run in itertools.groupby(found, key=lambda r: (r.outcome, r.next, r.version))]
    assert [(part.partition, part.alike) for part in said] == [(run[0].partition, len(run) - 1) for run in runs]


@bounded
@given(alike_results(), st.data())
def test_answer_about_other_partitions_than_were_asked_for_is_malformed(
    found: tuple[PartResult, ...], data: st.DataObject
) -> None:
    message = push_messages.results_to_wire(found)
    asked = [result.partition for result in found]
    other = data.draw(st.permutations(asked) | st.lists(partition_numbers, max_size=12, unique=True))
    firsts = list(itertools.accumulate((part.alike + 1 for part in message.parts), initial=0))[:-1]
    told = len(other) == len(asked) and all(other[at] == asked[at] for at in firsts)
    if told:
        assert [result.partition for result in push_messages.results_from_wire(message, other)] == list(other)
        return
    with pytest.raises(MalformedPayload):
        push_messages.results_from_wire(message, other)
