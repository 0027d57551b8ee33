"""The domain's values: how they count, compare and show themselves."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Rank, Token, Version
from shardyard.domain.layout.layouts import PartitionMap, PartitionOwner, aligned_bytes
from shardyard.domain.limits import BLOCK_ALIGN_BYTES
from shardyard.domain.push_names import DataShardSource, PushName, RankSource, SourceKey, WorkerSource
from shardyard.domain.pushes import PushHeader, PushKind, PushPart
from shardyard.domain.variables import DType, VariableSpec


@pytest.mark.parametrize(("nbytes", "room"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128), (1 << 40, 1 << 40)])
def test_blocks_take_whole_lines(nbytes: int, room: int) -> None:
    assert BLOCK_ALIGN_BYTES == 64
    assert aligned_bytes(nbytes) == room


@pytest.mark.parametrize("dtype", DType)
def test_dtype_is_numpys(dtype: DType) -> None:
    theirs = np.dtype(dtype.value)
    assert dtype.item_bytes == theirs.itemsize
    assert dtype.is_floating == (theirs.kind == "f")


@pytest.mark.parametrize(("shape", "elements"), [((), 1), ((3,), 3), ((3, 4), 12), ((3, 0), 0)])
def test_variable_counts_its_elements(shape: tuple[int, ...], elements: int) -> None:
    spec = VariableSpec("w", DType.FLOAT64, shape)
    assert (spec.elements, spec.payload_bytes) == (elements, 8 * elements)


def test_numbers_of_a_term_show_the_term() -> None:
    assert str(Incarnation((2 << 32) + 17)) == f"{JobId((2 << 32) + 17)}" == "2.17"
    assert str(Incarnation(5)) == "5"
    assert Incarnation((2 << 32) + 17) == (2 << 32) + 17
    assert hash(Incarnation(5)) == hash(5)
    assert Incarnation((1 << 32) + 9) < Incarnation(2 << 32)


def test_names_show_the_work() -> None:
    shard = SourceKey(DataShardSource(0, 2, 17))
    assert str(PushName(shard, Token(3), 41, 41)) == "data shard 0.2.17 #41"
    assert str(PushName(shard, Token(3), 41, 44)) == "data shard 0.2.17 #41-44"
    assert str(RankSource(Rank(3))) == "logical rank 3"
    assert str(WorkerSource(Incarnation((1 << 32) + 9))) == "worker 1.9"


def test_sources_of_different_kinds_are_different_keys() -> None:
    keys = {
        SourceKey(RankSource(Rank(1))),
        SourceKey(RankSource(Rank(1)), lane=1),
        SourceKey(WorkerSource(Incarnation(1))),
        SourceKey(DataShardSource(1, 0, 0)),
        SourceKey(DataShardSource(0, 1, 0)),
        SourceKey(DataShardSource(0, 0, 1)),
    }
    assert len(keys) == 6
    assert SourceKey(RankSource(Rank(1))) in keys


def test_life_comes_before_number() -> None:
    assert Version(1, 900) < Version(2, 0) < Version(2, 1)


def test_map_groups_partitions_by_server_in_order() -> None:
    owners = tuple(
        PartitionOwner(PartitionId(index), Incarnation(server), f"host:{server}")
        for index, server in enumerate((3, 2, 3))
    )
    grouped = PartitionMap(Generation(1), owners).by_server()
    assert list(grouped) == [2, 3]
    assert [owner.partition for owner in grouped[Incarnation(3)]] == [0, 2]


def test_push_has_the_bytes_of_its_parts() -> None:
    parts = (PushPart(PartitionId(0), 64), PushPart(PartitionId(1), 0), PushPart(PartitionId(2), 128))
    name = PushName(SourceKey(RankSource(Rank(0))), Token(0), 0, 0)
    order = PushHeader(Caller(), Incarnation(1), Generation(1), name, PushKind.GRADIENT, parts, 1.0, ())
    assert order.payload_bytes == 192


def test_nobody_can_choose_data_shards_that_collide_in_a_ledger() -> None:
    """The hash of a tuple of whole numbers has no key: its last number can be solved for (xxHash's steps, as in
    cpython's tupleobject.c)."""
    first, second, bits = 11400714785074694791, 14029467366897019727, 64
    whole, inverse = (1 << bits) - 1, pow(second, -1, 1 << bits)

    def added(state: int, number: int) -> int:
        state = (state + number * second) & whole
        return (state << 31 | state >> bits - 31) * first & whole

    target = (added(2870177450012600261, 0) + 12345) & whole
    chosen = []
    for epoch in range(1_000):
        index = (target - added(added(2870177450012600261, 0), epoch)) * inverse & whole
        if index < sys.hash_info.modulus:
            chosen.append((0, epoch, index))
    assert len(chosen) > 50
    assert len({hash(each) for each in chosen}) == 1
    assert len({hash(DataShardSource(*each)) for each in chosen}) == len(chosen)
