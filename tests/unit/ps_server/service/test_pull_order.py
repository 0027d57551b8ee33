"""The order in which values go out: what was asked for first comes first, and every byte comes once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout, aligned_bytes
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.variables import DType, VariableSpec
from shardyard_ps_server.service.pull_order import runs_in_order


def layout_of(blocks: list[list[tuple[int, int]]], variables: int) -> JobLayout:
    """`blocks`: for each partition (variable, elements)."""
    parts = []
    for number, each in enumerate(blocks):
        at, found = 0, []
        for variable, length in each:
            found.append(Block(variable, 0, length, at))
            at += aligned_bytes(4 * length)
        parts.append(PartitionLayout(PartitionId(number), at, tuple(found)))
    specs = tuple(VariableSpec(str(index), DType.FLOAT32, (64,)) for index in range(variables))
    return JobLayout(specs, OptimizerSpec("sgd", (make_group("sgd", {"lr": 1.0}),)), tuple(parts))


BLOCKS = st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=6), min_size=1, max_size=4)


@given(blocks=BLOCKS, order=st.permutations(range(6)), named=st.integers(0, 6))
def test_every_byte_goes_out_once_whatever_the_order(
    blocks: list[list[tuple[int, int]]], order: list[int], named: int
) -> None:
    layout = layout_of(blocks, 6)
    partitions = [PartitionId(number) for number in reversed(range(len(blocks)))]
    runs = runs_in_order(layout, partitions, order[:named])
    begins, total = [], 0
    for partition in partitions:
        begins.append(total)
        total += layout.partitions[partition].payload_bytes
    covered = sorted((run.offset, run.offset + run.end - run.begin) for run in runs)
    assert [begin for begin, _ in covered] == [0, *(end for _, end in covered[:-1])] if covered else total == 0
    assert sum(end - begin for begin, end in covered) == total
    assert all(run.offset == begins[run.part] + run.begin for run in runs)


def test_variables_go_out_in_the_order_asked_for_and_neighbours_together() -> None:
    layout = layout_of([[(0, 16), (1, 16), (2, 3)], [(3, 16), (1, 16)]], 4)
    runs = runs_in_order(layout, [PartitionId(0), PartitionId(1)], [1, 2])
    assert [tuple(run) for run in runs] == [
        (0, 64, 128, 64),
        (1, 64, 128, 256),
        (0, 128, 192, 128),
        (0, 0, 64, 0),
        (1, 0, 64, 192),
    ]
    alike = runs_in_order(layout, [PartitionId(0)], [0, 1, 2])
    assert [tuple(run) for run in alike] == [(0, 0, 192, 0)]


def test_variable_that_the_layout_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="variable 4"):
        runs_in_order(layout_of([[(0, 16)]], 4), [PartitionId(0)], [4])
