"""The part of a variable that a worker has is read from a whole that comes in pieces."""

from __future__ import annotations

import doctest
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardyard_worker.exchange import variable_parts
from shardyard_worker.exchange.variable_parts import Region, VariablePart


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 125), max_size=6),
    data=st.data(),
)
def test_pieces_of_a_whole_make_its_part(shape: list[int], cuts: list[int], data: st.DataObject) -> None:
    dimension = data.draw(st.integers(0, len(shape) - 1))
    begin = data.draw(st.integers(0, shape[dimension]))
    end = data.draw(st.integers(begin, shape[dimension]))
    whole = np.arange(np.prod(shape)).reshape(shape)
    wanted = np.take(whole, range(begin, end), dimension).flatten()
    part = VariablePart(Region.along(shape, dimension, begin, end), {"values": torch.full((wanted.size,), -1)})
    ends = sorted({0, whole.size, *(min(each, whole.size) for each in cuts)})
    for first, last in pairwise(ends):
        part.put("values", first, whole.flatten()[first:last])
    assert part.arrays["values"].tolist() == wanted.tolist()


def test_arrays_that_a_part_does_not_have_are_left_out() -> None:
    part = VariablePart(Region.whole(2), {})
    part.put("exp_avg", 0, np.ones(2))


def test_examples_print_what_they_show() -> None:
    found = doctest.testmod(variable_parts)
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize("members", [2, 4])
def test_a_region_has_the_elements_of_one_member(members: int) -> None:
    regions = [Region.along((8, 3), 0, place * 8 // members, (place + 1) * 8 // members) for place in range(members)]
    runs = [run for each in regions for run in each.runs(0, 24)]
    assert [(begin, count) for begin, _, count in runs] == [
        (24 // members * at, 24 // members) for at in range(members)
    ]
