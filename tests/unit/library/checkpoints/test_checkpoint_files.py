"""What a checkpoint's files say, and what is refused of them: safetensors files, partitions' files, manifests."""

from __future__ import annotations

import hashlib
import json
import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch

from shardyard.checkpoints import manifest as manifests
from shardyard.checkpoints import partition_file
from shardyard.checkpoints.manifest import FileRef, Manifest, PartitionEntry, PartitionFile
from shardyard.checkpoints.partition_file import BlockSource, BlockState, PartitionHead, PartitionState
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.errors import CheckpointDamaged, InvalidRequest, TooLarge
from shardyard.domain.ids import Incarnation, JobId, PartitionId, Rank, Token, Version
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.push_names import DataShardSource, RankSource, SourceKey, SourceMark, WorkerSource
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard.storage import tensors
from shardyard.storage.json_reader import canonical
from shardyard.storage.storage import LocalStorage, Written
from tests.support.checkpoints import state_pieces

LAYOUT = JobLayout(
    (
        VariableSpec("w", DType.FLOAT32, (5,)),
        VariableSpec("b", DType.FLOAT64, (3,)),
        VariableSpec("n", DType.INT64, (), VariableKind.BUFFER),
    ),
    OptimizerSpec("sgd", (make_group("sgd", {"lr": 0.1, "momentum": 0.9}),)),
    (
        PartitionLayout(PartitionId(0), 192, (Block(0, 0, 3, 0), Block(1, 0, 3, 64), Block(2, 0, 1, 128))),
        PartitionLayout(PartitionId(1), 64, (Block(0, 3, 2, 0),)),
    ),
)
MARKS = (
    SourceMark(SourceKey(DataShardSource(1, 2, 3)), Token(5), 8),
    SourceMark(SourceKey(RankSource(Rank(2)), 1), Token(6), 9),
    SourceMark(SourceKey(WorkerSource(Incarnation((4 << 32) + 7))), Token(0), (1 << 63) - 1),
)
STATE = PartitionState(
    PartitionId(0),
    Version(2, 31),
    (
        BlockState(0, np.array([1, 2, 3], np.float32), {"momentum_buffer": np.array([4, 5, 6], np.float32)}, 31),
        BlockState(1, np.array([1, 2, 3], np.float64), {"momentum_buffer": np.array([4, 5, np.nan])}, 30),
        BlockState(2, np.array([17]), {}, 31),
    ),
    MARKS,
    Token(3),
)
FILE = "job/file"


def put(storage: LocalStorage, header: object, data: bytes, *, length: int | None = None) -> Written:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = (len(text) if length is None else length).to_bytes(8, "little")
    return storage.write(FILE, [head, text, data])


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


# ---- safetensors


def test_safetensors_library_reads_a_partitions_file(storage: LocalStorage, tmp_path: Path) -> None:
    storage.write(FILE, state_pieces(STATE))
    for load in (safetensors.numpy.load_file, safetensors.torch.load_file):
        found = {name: np.asarray(array) for name, array in load(tmp_path / FILE).items()}
        assert sorted(found) == [
            "counts",
            "ledger",
            "momentum_buffer/0",
            "momentum_buffer/1",
            "values/0",
            "values/1",
            "values/2",
        ]
        assert found["values/0"].tolist() == [1, 2, 3]
        assert found["values/0"].dtype == np.float32
        assert found["values/2"].tolist() == [17]
        np.testing.assert_array_equal(found["momentum_buffer/1"], [4, 5, np.nan])
        assert found["counts"].tolist() == [31, 30, 31]
        assert found["ledger"].tolist() == [
            [0, 1, 2, 3, 0, 5, 8],
            [1, 2, 0, 0, 1, 6, 9],
            [2, (4 << 32) + 7, 0, 0, 0, 0, (1 << 63) - 1],
        ]
    with safetensors.safe_open(tmp_path / FILE, "np") as file:
        assert file.metadata() == {
            "format": "shardyard-partition",
            "version": "1",
            "partition": "0",
            "life": "2",
            "number": "31",
            "floor": "3",
        }


def test_what_the_safetensors_library_writes_is_read(storage: LocalStorage, tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(True), "c": np.zeros((0, 4), np.int32)}
    (tmp_path / "job").mkdir()
    safetensors.numpy.save_file(arrays, tmp_path / FILE, {"who": "them"})
    contents = tensors.read_contents(storage, FILE)
    assert contents.metadata == {"who": "them"}
    for name, array in arrays.items():
        found = tensors.read_tensor(storage, FILE, contents.tensors[name])
        assert (found.dtype, found.shape, found.tolist()) == (array.dtype, array.shape, array.tolist())


def test_every_array_is_aligned_to_its_items(storage: LocalStorage) -> None:
    odd = replace(STATE.blocks[0], slots={})  # 12 bytes before arrays of 8-byte items
    storage.write(FILE, state_pieces(replace(STATE, blocks=(odd, *STATE.blocks[1:]))))
    for tensor in tensors.read_contents(storage, FILE).tensors.values():
        assert tensor.begin % tensor.dtype.item_bytes == 0, tensor


def test_arrays_are_fetched_one_after_the_other_as_they_are_written() -> None:
    fetched: list[str] = []

    def source(name: str) -> BlockSource:
        def fetch(what: str) -> bytes:
            fetched.append(what)
            return bytes(8)

        slots = {"momentum_buffer": lambda: fetch(f"slot {name}")}
        return BlockSource(int(name), DType.FLOAT64, 1, 1, lambda: fetch(f"values {name}"), slots)

    written = partition_file.pieces(PartitionHead(PartitionId(0), Version(1, 1)), [source("0"), source("1")])
    header, counts, ledger = (next(written) for _ in range(3))
    assert (len(header) % 8, len(counts), len(ledger)) == (0, 16, 0)
    assert fetched == []
    for expected in ("values 0", "slot 0", "values 1", "slot 1"):
        next(written)
        assert fetched.pop() == expected
    assert next(written, None) is None


def test_header_beyond_its_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "HEADER_BYTES_MAX", 100)
    with pytest.raises(TooLarge, match="at most 100"):
        list(state_pieces(STATE))


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (b"{", b"", "is not JSON"),
        (b"[" * 100_000, b"", "is not JSON"),
        (b"\xff\xfe", b"", "is not JSON"),
        (b"[]", b"", "is not an object"),
        (b'{"a":{},"a":{}}', b"", "a name comes twice"),
        ({"__metadata__": {"a": 1}}, b"", "not an object of texts"),
        ({"__metadata__": []}, b"", "not an object of texts"),
        ({"a": entry()}, bytes(9), "the arrays end at byte"),
        ({"a": entry()}, bytes(7), "the arrays end at byte"),
        ({"a": entry(dtype="F8")}, bytes(8), "'a' is"),
        ({"a": entry(dtype=None)}, bytes(8), "'a' is"),
        ({"a": entry(shape=[3])}, bytes(8), "'a' is"),
        ({"a": entry(shape=[-2])}, bytes(8), "'a' is"),
        ({"a": entry(shape=[2.0])}, bytes(8), "'a' is"),
        ({"a": entry(shape=[True, 2])}, bytes(8), "'a' is"),
        ({"a": entry(shape=[1] * 33)}, bytes(4), "'a' is"),
        ({"a": entry(shape=[1 << 80], offsets=[0, 1 << 82])}, b"", "'a' is"),
        ({"a": entry(offsets=[0, 8, 8])}, bytes(8), "'a' is"),
        ({"a": entry(offsets=[8, 0])}, bytes(8), "'a' is"),
        ({"a": entry() | {"more": 1}}, bytes(8), "'a' is"),
        ({"a": [1]}, bytes(8), "'a' is"),
        ({"a": entry(), "b": entry()}, bytes(16), "'b' begins at byte"),
        ({"a": entry(offsets=[8, 16])}, bytes(16), "'a' begins at byte"),
    ],
)
def test_header_that_is_wrong_is_refused(header: object, data: bytes, said: str, storage: LocalStorage) -> None:
    put(storage, header, data)
    with pytest.raises(CheckpointDamaged, match=said) as raised:
        tensors.read_contents(storage, FILE)
    assert storage.locate(FILE) in raised.value.what


@pytest.mark.parametrize("length", [3, 1 << 40, (1 << 64) - 1])
def test_header_longer_than_the_file_costs_no_memory(length: int, storage: LocalStorage) -> None:
    put(storage, b"{}", b"", length=length)
    tracemalloc.start()
    with pytest.raises(CheckpointDamaged, match=f"a header of {length} bytes"):
        tensors.read_contents(storage, FILE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize("nbytes", [0, 7])
def test_file_too_short_for_a_header_is_refused(nbytes: int, storage: LocalStorage) -> None:
    storage.write(FILE, [bytes(nbytes)])
    with pytest.raises(CheckpointDamaged, match=f"{nbytes} bytes; a safetensors file has at least 8"):
        tensors.read_contents(storage, FILE)


# ---- a partition's file


def test_part_of_a_file_is_read_alone(storage: LocalStorage) -> None:
    written = storage.write(FILE, state_pieces(STATE))
    found = partition_file.read(storage, FILE, written, LAYOUT, PartitionId(0), blocks=[1])
    assert [(block.index, block.count, list(block.slots)) for block in found.blocks] == [(1, 30, ["momentum_buffer"])]
    assert (found.version, found.marks, found.floor) == (STATE.version, MARKS, Token(3))


def test_marks_are_written_in_one_order(storage: LocalStorage) -> None:
    head = PartitionHead(PartitionId(0), Version(1, 1), MARKS)
    turned = PartitionHead(PartitionId(0), Version(1, 1), MARKS[::-1])
    assert b"".join(partition_file.pieces(head, [])) == b"".join(partition_file.pieces(turned, []))


def ledger(*rows: tuple[int, ...]) -> dict[str, Any]:
    return {"ledger": np.array(rows, np.int64).reshape(len(rows), 7)}


GOOD: dict[str, Any] = {
    "values/0": np.zeros(3, np.float32),
    "momentum_buffer/0": np.zeros(3, np.float32),
    "counts": np.ones(1, np.int64),
    "ledger": np.zeros((0, 7), np.int64),
}
SAID = {"format": "shardyard-partition", "version": "1", "partition": "0", "life": "1", "number": "4", "floor": "0"}


@pytest.mark.parametrize(
    ("said", "arrays", "what"),
    [
        ({"format": "other"}, {}, "says that it is 'other'"),
        ({"version": "2"}, {}, "of version '2'"),
        ({"partition": "1"}, {}, "is of partition 1; expected partition 0"),
        ({"life": "-1"}, {}, "the life '-1'; expected a number"),
        ({"number": "99999999999999999999"}, {}, "expected a number"),
        ({"floor": "٣"}, {}, "expected a number"),
        ({}, {"values/0": None}, "block 0"),
        ({}, {"values/0": None, "momentum_buffer/0": None, "counts": np.ones(0, np.int64)}, "lacks block 0"),
        ({}, {"values/0": np.zeros(4, np.float32)}, r"expected float32 \(3,\), as variable 'w'"),
        ({}, {"values/0": np.zeros(3, np.float64)}, r"expected float32 \(3,\), as variable 'w'"),
        ({}, {"momentum_buffer/0": np.zeros((1, 3), np.float32)}, r"expected float32 \(3,\)"),
        ({}, {"values/3": np.zeros(3, np.float32)}, "'values/3', which partition 0 does not have"),
        ({}, {"values/00": np.zeros(3, np.float32)}, "does not have"),
        ({}, {"values": np.zeros(3, np.float32)}, "does not have"),
        ({}, {"momentum_buffer/1": np.zeros(3)}, "block 1 without its values"),
        ({}, {"counts": None}, "no 'counts' of int64 for 1 blocks"),
        ({}, {"counts": np.ones(2, np.int64)}, "no 'counts' of int64 for 1 blocks"),
        ({}, {"counts": np.ones(1, np.int32)}, "no 'counts' of int64"),
        ({}, {"counts": -np.ones(1, np.int64)}, "negative count"),
        ({}, {"ledger": None}, "no 'ledger' of int64"),
        ({}, {"ledger": np.zeros((1, 6), np.int64)}, "no 'ledger' of int64"),
        ({}, {"ledger": np.zeros((1, 7), np.float64)}, "no 'ledger' of int64"),
        ({}, ledger((3, 0, 0, 0, 0, 0, 0)), "row 0"),
        ({}, ledger((0, 0, 0, 0, 0, 0, -1)), "row 0"),
        ({}, ledger((1, 0, 1, 0, 0, 0, 0)), "row 0"),
        ({}, ledger((1, 4096, 0, 0, 0, 0, 0)), "row 0"),
        ({}, ledger((2, 7, 0, 1, 0, 0, 0)), "row 0"),
        ({}, ledger((0, 0, 0, 1, 0, 0, 0), (0, 0, 0, 0, 0, 0, 0)), "row 1"),
        ({}, ledger((0, 0, 0, 0, 0, 1, 0), (0, 0, 0, 0, 0, 2, 0)), "row 1"),
    ],
)
def test_file_that_is_no_partitions_is_refused(
    said: dict[str, str], arrays: dict[str, Any], what: str, storage: LocalStorage
) -> None:
    held = {name: array for name, array in (GOOD | arrays).items() if array is not None}
    written = storage.write(FILE, [safetensors.numpy.save(held, SAID | said)])
    for read in (
        lambda: partition_file.read(storage, FILE, written, LAYOUT, PartitionId(0), blocks=[0]),
        lambda: partition_file.check(storage, FILE, written, LAYOUT, PartitionId(0), [0]),
    ):
        with pytest.raises(CheckpointDamaged, match=what) as raised:
            read()
        assert storage.locate(FILE) in raised.value.what


def test_good_file_of_the_same_form_is_taken(storage: LocalStorage) -> None:
    written = storage.write(FILE, [safetensors.numpy.save(GOOD, SAID)])
    assert partition_file.read(storage, FILE, written, LAYOUT, PartitionId(0)).version == Version(1, 4)
    assert partition_file.check(storage, FILE, written, LAYOUT, PartitionId(0), [0]).marks == ()


# ---- manifests


def manifest(**changes: Any) -> Manifest:
    partitions = []
    for part in LAYOUT.partitions:
        file = FileRef(manifests.partition_path(7, part.partition), Written(100, "ab" * 32))
        taken = PartitionFile(file, tuple(range(len(part.blocks))))
        partitions.append(PartitionEntry(part.partition, Version(1, 5), (taken,)))
    given: dict[str, Any] = {
        "number": 7,
        "job_name": "digits",
        "job": JobId(1 << 32),
        "seed": 0,
        "settings": {},
        "mode": UpdateMode.SYNC,
        "step": 5,
        "created": "2026-11-21T06:00:00.5+01:00",
        "layout": LAYOUT,
        "partitions": tuple(partitions),
        "data_ledger": {"x": [1, 2.5, "é", None]},
    }
    return Manifest(**(given | changes))


def resealed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A manifest that was changed, with the digest that goes with it."""
    document = json.loads(manifests.encode(manifest()))["manifest"]
    change(document)
    inner = canonical(document)
    return b'{"manifest":' + inner + b',"sha256":"' + hashlib.sha256(inner).hexdigest().encode() + b'"}\n'


def test_manifest_comes_back_as_it_was() -> None:
    text = manifests.encode(manifest())
    assert manifests.decode(text, "it") == manifest()
    assert manifests.encode(manifests.decode(text, "it")) == text
    found = json.loads(text)
    assert found["sha256"] == hashlib.sha256(canonical(found["manifest"])).hexdigest()


def test_every_flipped_bit_and_every_cut_of_a_manifest_is_found() -> None:
    text = manifests.encode(manifest())
    for at in range(len(text)):
        flipped = bytearray(text)
        flipped[at] ^= 1 << at % 8
        for damaged in (bytes(flipped), text[:at]):
            with pytest.raises(CheckpointDamaged, match=r"^here"):
                manifests.decode(damaged, "here")
    with pytest.raises(CheckpointDamaged):
        manifests.decode(text + b"\n", "here")


FEEDBACK = {"worker": "a", "path": "000000000007/worker-a.safetensors", "nbytes": 1, "sha256": "ab" * 32}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(format="x"), "says that it is 'x'"),
        (lambda m: m.update(version=2), "of version 2"),
        (lambda m: m.pop("step"), "the names .* differ in .'step'"),
        (lambda m: m.update(more=1), "differ in .'more'"),
        (lambda m: m.update(number=-1), "number is '-1'; expected a whole number"),
        (lambda m: m.update(number=10**12), "expected a whole number"),
        (lambda m: m.update(number=True), "expected a whole number"),
        (lambda m: m.update(job_name="../x"), "job_name is"),
        (lambda m: m.update(seed=1 << 64), "seed is"),
        (lambda m: m.update(step=1.5), "step is '1.5'"),
        (lambda m: m.update(settings=[]), "settings is .* an object"),
        (lambda m: m.update(settings={"x": "y" * 70_000}), "settings is .* at most 65536 bytes"),
        (lambda m: m.update(data_ledger=None), "data_ledger is 'None'"),
        (lambda m: m.update(mode="other"), "mode is 'other'"),
        (lambda m: m.update(created="yesterday"), "created is 'yesterday'"),
        (lambda m: m.update(created="2026-11-21T06:00:00"), "created is"),
        (lambda m: m.update(token_floor=-1), "token_floor is"),
        (lambda m: m["layout"].update(more=1), "layout has the names"),
        (lambda m: m["layout"]["variables"][0].update(dtype="float16"), r"variables\[0\].dtype is 'float16'"),
        (
            lambda m: m["layout"]["variables"][0].update(dtype="int64"),
            "layout: parameter .* expected float32 or float64",
        ),
        (lambda m: m["layout"]["variables"][0].update(group=1), "in parameter group 1; there are 1"),
        (lambda m: m["layout"]["variables"][0].update(shape=[6]), "variable 'w' have 5 elements; it has 6"),
        (
            lambda m: m["layout"]["variables"][0].update(shape=[1 << 36, 1 << 36]),
            "variable .w. has [0-9]+ bytes; at most",
        ),
        (lambda m: m["layout"]["variables"][0].update(shape=[1] * 33), "variable .w. has 33 dimensions; at most 32"),
        (lambda m: m["layout"]["variables"][0].update(name="b"), "variable 'b' comes twice"),
        (lambda m: m["layout"]["variables"][0].update(name=""), "1 to 512 characters"),
        (lambda m: m["layout"]["optimizer"].update(kind="lars"), "layout: unknown optimizer 'lars'"),
        (lambda m: m["layout"]["optimizer"]["groups"][0].pop(), "parameter group 0 of .sgd. has 5 values; expected 6"),
        (lambda m: m["layout"]["optimizer"]["groups"][0].__setitem__(0, -1.0), "parameter group 0 of .sgd.: lr is -1"),
        (lambda m: m["layout"]["optimizer"]["groups"][0].__setitem__(0, 1), "numbers with a point"),
        (
            lambda m: m["layout"]["partitions"][0]["blocks"][0].__setitem__(0, 3),
            "a block of variable 3 in partition 0; it does not exist",
        ),
        (
            lambda m: m["layout"]["partitions"][0]["blocks"][0].__setitem__(2, 0),
            "at byte 64 of partition 0; expected 0",
        ),
        (
            lambda m: m["layout"]["partitions"][0]["blocks"][1].__setitem__(3, 128),
            "at byte 128 of partition 0; expected 64",
        ),
        (lambda m: m["layout"]["partitions"][0]["blocks"][0].append(1), "a list of at most 4"),
        (lambda m: m["layout"]["partitions"][0]["blocks"][0].pop(), "variable, offset, length and position"),
        (lambda m: m["layout"]["partitions"][0].update(payload_bytes=256), "partition 0 take 192 bytes; announced 256"),
        (
            lambda m: m["layout"]["partitions"][1]["blocks"][0].__setitem__(1, 2),
            "at element 2 of variable 'w'; expected one at 3",
        ),
        (lambda m: m["partitions"].pop(), "all 2 partitions"),
        (lambda m: m["partitions"].append(m["partitions"][0]), "partition 2 of 2"),
        (lambda m: m["partitions"][0].update(partition=1), "partition 0 of 2"),
        (lambda m: m["partitions"][0].update(life=-1), "life is '-1'"),
        (lambda m: m["partitions"][0].update(files=[]), "at least one file"),
        (lambda m: m["partitions"][0]["files"].append(m["partitions"][0]["files"][0]), "each once"),
        (lambda m: m["partitions"][0]["files"][0].update(blocks=[0, 1]), "each of 3 blocks from one file"),
        (lambda m: m["partitions"][0]["files"][0].update(blocks=[0, 2, 1]), "ascending"),
        (lambda m: m["partitions"][0]["files"][0].update(blocks=[0, 1, 2, 3]), "each of 3 blocks from one file"),
        (lambda m: m["partitions"][0]["files"][0].update(path="../x"), "a file of a checkpoint"),
        (lambda m: m["partitions"][0]["files"][0].update(path="000000000007/manifest.json"), "a file of a checkpoint"),
        (
            lambda m: m["partitions"][0]["files"][0].update(path="000000000007/partition-0001-0.safetensors"),
            "a file of partition 0",
        ),
        (
            lambda m: m["partitions"][0]["files"][0].update(path="000000000008/partition-0000-0.safetensors"),
            "checkpoint 7 or an earlier one",
        ),
        (lambda m: m["partitions"][0]["files"][0].update(nbytes=1 << 60), "nbytes is"),
        (lambda m: m["partitions"][0]["files"][0].update(sha256="AB" * 32), "64 hexadecimal digits"),
        (lambda m: m.update(feedback=[{"worker": "a"}]), r"feedback\[0\] has the names"),
        (lambda m: m.update(feedback=[{**FEEDBACK, "worker": "b"}]), "a file of worker b"),
        (lambda m: m.update(feedback=[FEEDBACK, {**FEEDBACK, "nbytes": 2}]), "each worker once"),
    ],
)
def test_manifest_that_is_sealed_but_wrong_is_refused(change: Callable[[dict[str, Any]], object], said: str) -> None:
    with pytest.raises(CheckpointDamaged, match=said) as raised:
        manifests.decode(resealed(change), "/place/manifest.json")
    assert raised.value.what.startswith("/place/manifest.json")


@pytest.mark.parametrize("inner", [b"{", b"[]", b'{"a":NaN}', b'{"a":1,"a":1}', b"[" * 100_000, b"1" * 5_000, b"\xff"])
def test_sealed_text_that_is_no_object_is_refused(inner: bytes) -> None:
    seal = hashlib.sha256(inner).hexdigest().encode()
    with pytest.raises(CheckpointDamaged, match=r"^here"):
        manifests.decode(b'{"manifest":' + inner + b',"sha256":"' + seal + b'"}\n', "here")


@pytest.mark.parametrize(
    "change",
    [
        {"created": "now"},
        {"partitions": ()},
        {"step": -1},
        {"job_name": "a b"},
        {"settings": {"rate": math.nan}},
        {"data_ledger": {"rate": [-math.inf]}},
    ],
)
def test_manifest_that_would_not_be_taken_back_is_not_written(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="it could not be restored from"):
        manifests.encode(manifest(**change))
