"""What is not finite is found wherever it stands, and nothing else is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.codecs.format import finiteness
from shardyard.codecs.format.finiteness import PIECE, first_not_finite, scale
from shardyard_worker.training import nonfinite

BAD = [math.nan, -math.nan, math.inf, -math.inf]
DTYPES = ["float32", "float64"]


def places(*arrays: np.ndarray) -> tuple[list[int], list[int]]:
    return [array.ctypes.data for array in arrays], [array.size for array in arrays]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("at", [0, 1, 7, 8, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 4])
def test_one_bad_number_is_found_at_any_place(dtype: str, bad: float, at: int) -> None:
    good, other = np.ones(3, dtype), np.full(2 * PIECE + 5, -2.5, dtype)
    assert first_not_finite(*places(good, other), dtype) is None
    other[at] = bad
    assert first_not_finite(*places(good, other), dtype) == 1
    assert first_not_finite(*places(other, good), dtype) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_at_the_ends_of_their_format_are_finite(dtype: str) -> None:
    info = np.finfo(dtype)
    extreme = np.array([info.max, info.max, -info.max, info.tiny, info.smallest_subnormal, -0.0] * 100, dtype)
    assert first_not_finite(*places(extreme, np.empty(0, dtype)), dtype) is None
    assert first_not_finite([], [], dtype) is None


def test_loops_can_be_compiled_ahead() -> None:
    finiteness.warm()
    assert len(finiteness._first.signatures) == len(DTYPES)  # type: ignore[attr-defined]
    assert len(finiteness._scale.signatures) == len(DTYPES)  # type: ignore[attr-defined]


def scaled(array: np.ndarray, factor: float) -> tuple[bool, np.ndarray]:
    found = np.empty_like(array)
    return scale(array.ctypes.data, found.ctypes.data, array.size, factor, str(array.dtype)), found


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32), max_size=40), st.floats(0.01, 100.0), st.sampled_from(DTYPES))
def test_scaled_numbers_are_those_of_torch(numbers: list[float], factor: float, dtype: str) -> None:
    array = np.array(numbers, dtype)
    _, found = scaled(array, factor)
    assert np.array_equal(found, (torch.from_numpy(array) * factor).numpy(), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [0, 7, 8, 36])
def test_number_whose_sum_may_not_be_finite_is_found_while_it_is_scaled(dtype: str, at: int) -> None:
    array = np.full(37, -2.5, dtype)
    assert not scaled(array, 0.5)[0]
    for bad in (*BAD, np.finfo(dtype).max / 2, -np.finfo(dtype).max / 2):
        array[at] = bad
        assert scaled(array, 0.5)[0]
    array[at] = np.finfo(dtype).max
    assert not scaled(array, 1e-9)[0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32), max_size=40), st.sampled_from(DTYPES))
def test_any_numbers_are_judged_as_by_numpy(numbers: list[float], dtype: str) -> None:
    array = np.array(numbers, dtype)
    assert (first_not_finite(*places(array), dtype) is None) == bool(np.isfinite(array).all())


def gradients(*tensors: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return [(10 + number, tensor) for number, tensor in enumerate(tensors)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("look", ["here", "away"])
def test_first_gradient_with_a_bad_number_is_named(dtype: torch.dtype, bad: float, look: str) -> None:
    """Those of other devices are looked at by what all devices have."""
    one, other = torch.ones(4, 6, dtype=dtype), torch.full((3, 2, 5, 5), torch.finfo(dtype).max, dtype=dtype)
    other = other.to(memory_format=torch.channels_last)

    def found(*tensors: torch.Tensor) -> object:
        given_ = gradients(*tensors)
        return (
            nonfinite._first_here(given_, dtype) if look == "here" else next(iter(nonfinite._first_away(given_)), None)
        )

    assert found(one, other, one.t()) is None
    other[1, 0, 2, 3] = bad
    assert found(one, other, one.t()) == 11
    one[3, 5] = bad
    assert found(one[:2], other, one.t()) == 11
    assert found(torch.zeros(0, dtype=dtype), one.t(), other) == 11
