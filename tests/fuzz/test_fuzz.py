"""A part of the byte fuzzer (tests/fuzz/fuzzing.py has it whole), and lengths that lie about what follows."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import zstandard

from shardyard.codecs.dense.decoding import decode
from shardyard.codecs.dense.encoding import encode
from shardyard.codecs.format.form import CodeId
from shardyard.codecs.rows.row_ids import decode_ids
from shardyard.codecs.rows.row_values import decode_rows
from shardyard.domain import limits
from shardyard.domain.compression import CodecSpec
from shardyard.domain.errors import LogDamaged, ShardyardError
from shardyard.storage import tensors
from shardyard.storage.storage import LocalStorage
from shardyard.wire import frames, push_messages
from shardyard.wire.v1 import parameter_server_pb2 as server
from tests.fuzz import decoders, fuzzing, mutations

FIRST_INPUTS, ALL_INPUTS = 5_000, 20_000
SEED = int(os.environ.get("SHARDYARD_FUZZ_SEED", fuzzing.SEED))
TAKES_ALL = {"message LeaseDataReply", "message JoinJobReply", "message ErrorDetail"}
"""Whose every value has a meaning."""
SELDOM_WRONG = {"message OpenSourcesRequest"}
"""Wrong only without a source, which may be none of the hundred or so inputs of one target."""
SELDOM_WRONG_AT_FIRST = SELDOM_WRONG | {"message OpenSourcesReply", "server, synchronous tables: DescribeServer"}
"""The same where a target has a quarter of the inputs. A request without a field is wrong only if it is no message."""
HUGE = 1 << 60
CLAIMED_BYTES_MAX = limits.MIB
BOMB_BYTES = 64 * limits.MIB
BOMB = zstandard.ZstdCompressor(level=1).compress(bytes(BOMB_BYTES))


@pytest.mark.long("first")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("inputs", "seldom_wrong"),
    [(FIRST_INPUTS, SELDOM_WRONG_AT_FIRST), (ALL_INPUTS, SELDOM_WRONG)],
    ids=["first", "all"],
)
def test_inputs_that_are_nearly_right_are_taken_or_refused_and_change_nothing_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: int, seldom_wrong: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # a URL for checkpoints that has changed may be a relative path
    report = fuzzing.fuzz(inputs, seed=SEED, folder=tmp_path)
    print(*report.lines(), sep="\n")
    assert report.inputs >= inputs
    assert {name for name, each in report.targets.items() if not each.refused} - seldom_wrong == TAKES_ALL
    taken = sum(each.taken for each in report.targets.values())
    assert inputs / 10 < taken < inputs * 9 / 10, "inputs are too wrong, or too right, to find anything"


def test_seed_gives_the_same_inputs_and_another_one_others() -> None:
    messages = [server.PushHeader(weight=2.0, server=3).SerializeToString() for _ in range(2)]

    def some(seed: str) -> list[bytes]:
        dice = Random(seed)
        return [mutations.mutate(dice, messages[0], messages) for _ in range(200)]

    assert some("a") == some("a")
    assert some("a") != some("b")
    assert len(set(some("a"))) > 100


def test_message_that_is_taken_apart_comes_together_again() -> None:
    header = server.PushHeader(weight=2.0, server=3, parts=[{"partition": 4, "payload_bytes": 1 << 40}])
    fields = mutations.parse(header.SerializeToString())
    assert fields is not None
    assert [number for number, _, _ in fields] == [2, 6, 7]
    assert mutations.build(fields) == header.SerializeToString()


@pytest.mark.parametrize("field", ["groups", "parts", "name"])
def test_push_in_a_log_that_no_server_can_have_admitted_is_damage(tmp_path: Path, field: str) -> None:
    (decoder,) = (each for each in decoders.decoders(tmp_path) if each.name == "a head in a log")
    header = server.PushHeader.FromString(decoder.seeds[0])
    decoder.read(header.SerializeToString())
    header.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(LogDamaged, match="does not fit"):
        decoder.read(header.SerializeToString())


# ---- lengths that lie


def claimed_frame(_: Path) -> object:
    return frames.decode(b"\x7a" + mutations.varint(HUGE) + bytes(64))


def claimed_message(_: Path) -> object:
    return push_messages.push_from_header(b"\x32" + mutations.varint(HUGE) + bytes(64))


def claimed_push(_: Path) -> object:
    header = server.PushHeader(kind=server.PUSH_KIND_GRADIENT, parts=[{"partition": 0, "payload_bytes": HUGE}])
    header.name.source.worker = 1
    return push_messages.push_from_header(header.SerializeToString())


def claimed_code(_: Path) -> object:
    code = bytes(encode(CodecSpec("qsgd", levels=3, bucket=16), np.ones(64, np.float32)))
    refusals = []
    for at in range(1, 12):
        try:
            decode(code[:at] + mutations.varint(HUGE) + code[at:], np.empty(64, np.float32))
        except ShardyardError as error:
            refusals.append(error)
    raise refusals[0]


def claimed_ids(_: Path) -> object:
    return decode_ids(b"\1" + mutations.varint(1 << 30) + bytes(64), 1 << 31)


def claimed_rows(_: Path) -> object:
    return decode_rows(bytes((CodeId.RAW, *mutations.varint(1 << 30))) + bytes(64), 1 << 20, 1 << 10)


def claimed_zstd(_: Path) -> object:
    head = bytes((CodeId.ZSTD, *mutations.varint(4_096)))
    return decode(head + mutations.varint(BOMB_BYTES) + BOMB, np.empty(4_096, np.float32))


def claimed_tensors(folder: Path) -> object:
    (folder / "file").write_bytes(struct.pack("<Q", HUGE) + b"{}" + bytes(64))
    return tensors.read_contents(LocalStorage(folder), "file")


CLAIMS: list[Callable[[Path], object]] = [
    claimed_frame,
    claimed_message,
    claimed_push,
    claimed_code,
    claimed_ids,
    claimed_rows,
    claimed_zstd,
    claimed_tensors,
]


@pytest.mark.parametrize("claim", CLAIMS)
def test_length_that_lies_is_refused_before_memory_is_asked_for(
    claim: Callable[[Path], object], tmp_path: Path
) -> None:
    def taken_bytes() -> int:
        tracemalloc.start(1)
        try:
            with pytest.raises(ShardyardError):
                claim(tmp_path)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    taken_bytes()  # what is imported and compiled at first
    assert taken_bytes() < CLAIMED_BYTES_MAX
