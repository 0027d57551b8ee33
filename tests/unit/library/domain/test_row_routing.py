"""Where ids go, and what their rows begin with: fixed for good, the same bits by numpy's operations, and uniform."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from shardyard.domain.errors import InvalidRequest
from shardyard.domain.tables import row_ids, row_routing
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_values import initial_rows, row_key

EDGES = np.array([0, 1, -1, 2**63 - 1, -(2**63), 42], np.int64)
RUNNING = np.arange(100_000, dtype=np.int64)
DIM = 7


def mixed(words: np.ndarray) -> np.ndarray:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def words_of(ids: np.ndarray, key: int) -> np.ndarray:
    """SplitMix64 by numpy, shape (n, DIM)."""
    start = mixed(ids.view(np.uint64) ^ np.uint64(key))[:, None]
    return mixed(start + np.arange(1, DIM + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


# ---- partitions


PartitionOf = Callable[[np.ndarray, int], np.ndarray]
both = pytest.mark.parametrize("partition_of", [row_ids.partition_of, row_routing.partition_of], ids=["plain", "loop"])


@both
def test_partitions_never_change(partition_of: PartitionOf) -> None:
    assert partition_of(EDGES, 1 << 30).tolist() == GOLDEN_PARTITIONS


@both
def test_partitions_are_the_upper_half_of_the_mixer(partition_of: PartitionOf) -> None:
    upper = [int(word) >> 32 for word in mixed(RUNNING.view(np.uint64))]
    assert partition_of(RUNNING, 1_000).tolist() == [each * 1_000 >> 32 for each in upper]


@both
@pytest.mark.parametrize("ids", [RUNNING, RUNNING << 40, RUNNING * 4_096, -RUNNING], ids=["0,1", "high", "4096s", "-"])
def test_partitions_have_equal_shares_of_ids_of_any_pattern(partition_of: PartitionOf, ids: np.ndarray) -> None:
    shares = np.bincount(partition_of(ids, 64), minlength=64)
    assert shares.size == 64
    expected = ids.size / 64
    assert np.abs(shares - expected).max() < 6 * math.sqrt(expected)


@both
def test_ids_may_lie_anywhere_and_be_read_only(partition_of: PartitionOf) -> None:
    frozen = RUNNING.copy()
    frozen.flags.writeable = False
    assert (partition_of(frozen[::3], 9) == partition_of(RUNNING, 9)[::3]).all()
    assert (initial_rows(frozen[::3], 2, InitialValues(), 5) == initial_rows(RUNNING, 2, InitialValues(), 5)[::3]).all()
    assert partition_of(RUNNING[:0], 3).shape == (0,)


# ---- initial values


def test_initial_values_never_change() -> None:
    key = row_key(7, "users")
    assert key == GOLDEN_KEY
    for kind, golden in GOLDEN_BITS.items():
        rows = initial_rows(EDGES[3:5], 2, InitialValues(InitialKind[kind], 0.25), key)
        assert rows.dtype == np.float32
        assert rows.view(np.uint32).ravel().tolist() == golden


def test_uniform_values_are_numpys() -> None:
    scale = np.float32(0.3)
    ids = np.concatenate([EDGES, RUNNING])
    made = initial_rows(ids, DIM, InitialValues(InitialKind.UNIFORM, float(scale)), 99)
    expected = ((words_of(ids, 99) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)) * scale
    assert made.tobytes() == expected.tobytes()
    assert made.min() >= -scale
    assert made.max() < scale
    assert abs(made.mean(dtype=np.float64)) < 4 * scale / math.sqrt(3 * made.size)


def polynomial(coefficients: tuple[float, ...], r: np.ndarray) -> np.ndarray:
    total = np.full_like(r, coefficients[0])
    for each in coefficients[1:]:
        total = total * r + each
    return total


def test_normal_values_are_numpys_bit_by_bit() -> None:
    """The middle of the distribution by the same operations of numpy, the tails to the last bits of a library's."""
    ids = np.concatenate([EDGES, RUNNING])
    shares = ((words_of(ids, 99) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    made = initial_rows(ids, DIM, InitialValues(InitialKind.NORMAL, 0.3), 99)
    q = shares - 0.5
    r = 0.180625 - q * q
    middle = np.abs(q) <= 0.425
    expected = (polynomial(ABOVE, r) * q / polynomial(BELOW, r) * 0.3).astype(np.float32)
    assert middle.mean() == pytest.approx(0.85, abs=0.01)
    assert (made[middle].view(np.uint32) == expected[middle].view(np.uint32)).all()
    normal = statistics.NormalDist()
    tails = np.flatnonzero(~middle.ravel())[:20_000]
    theirs = np.array([normal.inv_cdf(float(p)) * 0.3 for p in shares.ravel()[tails]])
    np.testing.assert_allclose(made.ravel()[tails], theirs, rtol=1.2e-7)


def test_normal_values_have_the_deviation() -> None:
    made = initial_rows(RUNNING, DIM, InitialValues(InitialKind.NORMAL, 2.0), 3).astype(np.float64)
    assert abs(made.mean()) < 4 * 2.0 / math.sqrt(made.size)
    assert made.std() == pytest.approx(2.0, rel=0.01)
    assert np.isfinite(made).all()
    neighbours = np.corrcoef(made[:-1, 0], made[1:, 0])[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(RUNNING.size)


def test_zeros_are_zeros() -> None:
    made = initial_rows(EDGES, DIM, InitialValues(InitialKind.ZEROS, 5.0), 3)
    assert made.shape == (EDGES.size, DIM)
    assert not made.any()


def test_a_row_does_not_depend_on_the_others_that_are_asked_for() -> None:
    initial = InitialValues(InitialKind.NORMAL, 1.0)
    together = initial_rows(RUNNING[:50], DIM, initial, 8)
    for number in (0, 17, 49):
        assert (initial_rows(RUNNING[number : number + 1], DIM, initial, 8)[0] == together[number]).all()


def test_seeds_tables_and_ids_have_rows_of_their_own() -> None:
    keys = {row_key(seed, table) for seed in range(20) for table in ("users", "items", "1 users", "")}
    assert len(keys) == 80
    rows = [initial_rows(EDGES, DIM, InitialValues(), key) for key in sorted(keys)]
    assert np.unique(np.concatenate(rows)[:, 0]).size > 470  # of 480, with 24 bits each


@pytest.mark.parametrize("scale", [-0.1, math.nan, math.inf, 1e39])
def test_scale_that_is_no_scale_is_refused(scale: float) -> None:
    with pytest.raises(InvalidRequest, match="scale"):
        InitialValues(InitialKind.UNIFORM, scale)


ABOVE = (
    2.50908092873012267270e3,
    3.34305755835881281050e4,
    6.72657709270087008530e4,
    4.59219539315498714570e4,
    1.37316937655094611250e4,
    1.97159095030655144270e3,
    1.33141667891784377450e2,
    3.38713287279636660800e0,
)
BELOW = (
    5.22649527885285456100e3,
    2.87290857357219426740e4,
    3.93078958000927106100e4,
    2.12137943015865958670e4,
    5.39419602142475110770e3,
    6.87187007492057908300e2,
    4.23133307016009112520e1,
    1.0,
)

GOLDEN_PARTITIONS = [0, 363103623, 758388095, 379194047, 158374825, 701921929]
GOLDEN_KEY = 4196129756916637600
GOLDEN_BITS = {
    "UNIFORM": [3180409848, 3194776996, 1038389144, 1015841856],
    "NORMAL": [3183083268, 3202532746, 1041737377, 1018188871],
}
