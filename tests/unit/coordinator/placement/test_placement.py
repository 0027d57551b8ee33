"""Cutting variables into blocks and partitions, and giving partitions to servers."""

from __future__ import annotations

import pytest

from shardyard.domain import limits
from shardyard.domain.errors import InvalidRequest, TooLarge
from shardyard.domain.ids import Generation, Incarnation
from shardyard.domain.layout.layouts import Block
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard_coordinator.placement.placement import (
    Server,
    assign,
    fitting_block_bytes,
    fitting_partitions,
    plan,
    whole_block_bytes,
)

SGD = OptimizerSpec("sgd", ((0.1, 0.0, 0.0, 0.0, 0.0, 0.0),))


def f32(name: str, *shape: int, kind: VariableKind = VariableKind.PARAMETER) -> VariableSpec:
    return VariableSpec(name, DType.FLOAT32, shape, kind)


def servers(count: int) -> list[Server]:
    return [Server(Incarnation(100 + index), f"s:{index}") for index in range(count)]


def test_large_variable_is_cut_and_a_small_one_is_whole() -> None:
    layout = plan((f32("big", 100), f32("small", 5)), SGD, partitions=1, block_bytes=128)
    assert layout.partitions[0].blocks == (
        Block(0, 0, 32, 0),
        Block(0, 32, 32, 128),
        Block(0, 64, 32, 256),
        Block(0, 96, 4, 384),
        Block(1, 0, 5, 448),
    )
    assert layout.partitions[0].payload_bytes == 512


def test_blocks_stand_by_kind_then_dtype_then_variable() -> None:
    variables = (
        f32("mean", 4, kind=VariableKind.BUFFER),
        VariableSpec("double", DType.FLOAT64, (4,)),
        f32("first", 4),
        f32("second", 4),
        VariableSpec("count", DType.INT64, (), VariableKind.BUFFER),
    )
    blocks = plan(variables, SGD, partitions=1, block_bytes=64).partitions[0].blocks
    assert [variables[block.variable].name for block in blocks] == ["first", "second", "double", "mean", "count"]


def test_place_with_more_bytes_has_more_partitions() -> None:
    """Each has one at least."""
    variables = [f32("small", 4), *(f32(f"v{index}", 64) for index in range(4))]
    layout = plan(variables, SGD, partitions=4, block_bytes=1 << 20, places=[0, 1, 1, 1, 2])
    held = [sorted(block.variable for block in part.blocks) for part in layout.partitions]
    assert sorted(held) == [[0], [1, 3], [2], [4]]
    with pytest.raises(InvalidRequest, match="2 partitions for the variables of 3 workers of a replica"):
        plan(variables, SGD, partitions=2, block_bytes=1 << 20, places=[0, 1, 1, 1, 2])


def test_bytes_are_balanced_over_partitions() -> None:
    layout = plan([f32(f"v{index}", 64) for index in range(8)], SGD, partitions=4, block_bytes=1 << 20)
    assert [part.payload_bytes for part in layout.partitions] == [512, 512, 512, 512]


def test_variable_without_elements_has_no_block() -> None:
    layout = plan((f32("empty", 0, 3), f32("w", 2)), SGD, partitions=2, block_bytes=64)
    assert [part.blocks for part in layout.partitions] == [(Block(1, 0, 2, 0),), ()]


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        ((0,), 1),
        ((1024,), 1),
        ((100_352, 128, 1280, 10), 1),
        ((65_536, 65_535), 1),
        ((65_536, 65_536), 2),
        ((131_072,), 1),
        (tuple([65_536] * 7), 7),
        (tuple([65_536] * 9), 8),
    ],
)
def test_fitting_partitions_have_something_to_hold(elements: tuple[int, ...], expected: int) -> None:
    variables = [f32(f"v{index}", count) for index, count in enumerate(elements)]
    assert fitting_partitions(variables, block_bytes=limits.MIB, partitions_max=8) == expected


def test_fitting_blocks_keep_variables_whole_where_that_costs_no_balance() -> None:
    variables = [f32(f"v{index}", 1024, 1024) for index in range(16)]
    block_bytes = fitting_block_bytes(variables, partitions=8)
    assert block_bytes == 4 << 20
    layout = plan(variables, SGD, partitions=8, block_bytes=block_bytes)
    assert [[block.length for block in part.blocks] for part in layout.partitions] == [[1 << 20] * 2] * 8


@pytest.mark.parametrize(
    ("elements", "partitions", "expected"),
    [
        ((0,), 8, 1 << 20),
        ((1024,), 8, 1 << 20),
        ((4 << 20,), 8, 1 << 20),
        (((4 << 20) + 1,), 8, (1 << 20) + 64),
        ((20 << 20, 5 << 20), 3, 17_476_288),
        ((1 << 40,), 8, 1 << 30),
    ],
)
def test_fitting_blocks_are_half_a_partition_within_bounds(
    elements: tuple[int, ...], partitions: int, expected: int
) -> None:
    variables = [f32(f"v{index}", count) for index, count in enumerate(elements)]
    assert fitting_block_bytes(variables, partitions=partitions) == expected


def test_whole_blocks_hold_the_largest_parameter() -> None:
    variables = [f32("w", 100), f32("b", 5), f32("centre", 4096, kind=VariableKind.BUFFER)]
    assert whole_block_bytes(variables) == 448
    assert whole_block_bytes([f32("nothing", 0)]) == 64
    with pytest.raises(TooLarge, match=r"'w' of 2147483648 elements.*norm of the whole variable.*AdamW"):
        whole_block_bytes([f32("w", 1 << 31)])


def test_blocks_of_one_variable_stand_side_by_side_in_their_order() -> None:
    layout = plan((f32("big", 100), f32("small", 5), f32("other", 90)), SGD, partitions=2, block_bytes=64)
    for part in layout.partitions:
        order = [(block.variable, block.offset) for block in part.blocks]
        assert order == sorted(order)


def test_job_without_variables_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="without variables"):
        plan((), SGD, partitions=1, block_bytes=64)


def test_layout_of_too_many_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCKS_MAX", 3)
    with pytest.raises(TooLarge, match=r"make 4 blocks of 64 bytes.*job\.block_bytes higher"):
        plan((f32("w", 64),), SGD, partitions=1, block_bytes=64)


def test_partitions_are_balanced_over_servers() -> None:
    map_ = assign([100, 60, 50, 10], servers(2), generation=Generation(1))
    assert [owner.server for owner in map_.owners] == [100, 101, 101, 100]
    assert [owner.partition for owner in map_.owners] == [0, 1, 2, 3]


def test_every_server_has_a_partition_even_an_empty_one() -> None:
    map_ = assign([1_000, 0, 0, 0], servers(4), generation=Generation(1))
    assert sorted(map_.by_server()) == [100, 101, 102, 103]


def test_more_servers_than_partitions_leaves_some_without() -> None:
    map_ = assign([5, 5], servers(3), generation=Generation(1))
    assert sorted(map_.by_server()) == [100, 101]


def test_order_in_which_servers_are_named_does_not_matter() -> None:
    sizes = [7, 3, 9, 9, 1]
    forward = assign(sizes, servers(3), generation=Generation(1))
    assert forward == assign(sizes, servers(3)[::-1], generation=Generation(1))
