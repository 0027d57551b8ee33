"""What a worker does with the ids of a batch: each once, and the sum of its gradients; and what its ids cost to send.

    make bench BENCH=table_ids            (with options: ARGS="--pairs 9 --ids 65536")

Batches of Zipf(1.1) ids over ten million, dim 16 and 64, one thread. Sides: ours, torch (`unique` and `index_add_`),
numpy (`unique` and `add.at`). Sums are held against numpy's in double precision. The last line is one JSON object; its
ratios are torch's time over ours.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from harness.measuring.pairs import Figures, column, measure_pairs, ratios, spread
from harness.measuring.report import options_of, result
from shardyard.codecs.rows.row_ids import decode_ids, encode_ids
from shardyard_worker.rows.dedup import sum_rows, unique_ids

IDS = 10_000_000
DIMS = (16, 64)
EXPONENT = 1.1
PARTITIONS = 64
ROUNDS = 5
"""Of which a measurement is the fastest."""

Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Side = Callable[[Int64s, Float32s], tuple[Int64s, Float32s]]


class WrongSums(Exception):
    """Ids or sums are not those of the batch."""


def zipf_ids(count: int, seed: int) -> Int64s:
    """Number k of IDS with a probability in proportion to k**-EXPONENT."""
    ends = np.cumsum(np.arange(1, IDS + 1, dtype=np.float64) ** -EXPONENT)
    return np.searchsorted(ends, np.random.default_rng(seed).random(count) * ends[-1]).astype(np.int64)


def ours(ids: Int64s, gradients: Float32s) -> tuple[Int64s, Float32s]:
    found = unique_ids(ids, PARTITIONS)
    return found.ids, sum_rows(gradients, found.places, found.ids.size)


def by_torch(ids: Int64s, gradients: Float32s) -> tuple[Int64s, Float32s]:
    unique, places = torch.unique(torch.from_numpy(ids), return_inverse=True)
    sums = torch.zeros(len(unique), gradients.shape[1]).index_add_(0, places, torch.from_numpy(gradients))
    return unique.numpy(), sums.numpy()


def by_numpy(ids: Int64s, gradients: Float32s) -> tuple[Int64s, Float32s]:
    unique, places = np.unique(ids, return_inverse=True)
    sums = np.zeros((unique.size, gradients.shape[1]), np.float32)
    np.add.at(sums, places, gradients)
    return unique, sums


SIDES: Mapping[str, Side] = {"shardyard": ours, "torch": by_torch, "numpy": by_numpy}


def check(name: str, ids: Int64s, gradients: Float32s, found: tuple[Int64s, Float32s]) -> None:
    """Raises WrongSums."""
    unique, places = np.unique(ids, return_inverse=True)
    expected = np.zeros((unique.size, gradients.shape[1]))
    np.add.at(expected, places, gradients.astype(np.float64))
    order = np.argsort(found[0])
    bound = 1e-5 * max(1.0, float(np.abs(expected).max()))
    if not np.array_equal(found[0][order], unique) or np.abs(found[1][order] - expected).max() > bound:
        raise WrongSums(f"{name}: {found[0].size} ids, or their sums, are not those of the batch, of {unique.size} ids")


def measure(side: Side, ids: Int64s, gradients: Mapping[int, Float32s]) -> Figures:
    found = {}
    for dim, given in gradients.items():
        times = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            side(ids, given)
            times.append(time.perf_counter() - begin)
        found[f"d{dim}_ms"] = 1e3 * min(times)
    return found


def measure_codes(ids: Int64s) -> Figures:
    unique = unique_ids(ids).ids
    begin = time.perf_counter()
    code = bytes(encode_ids(unique))
    middle = time.perf_counter()
    back = decode_ids(code, unique.size)
    end = time.perf_counter()
    if not np.array_equal(back, unique):
        raise WrongSums("ids are not those that were sent")
    return {
        "distinct": float(unique.size),
        "bytes_each": len(code) / unique.size,
        "encode_ms": 1e3 * (middle - begin),
        "decode_ms": 1e3 * (end - middle),
    }


def main() -> None:
    parser = options_of(__doc__, pairs=9)
    parser.add_argument("--ids", type=int, default=65_536, help="ids of a batch (65536)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ids = zipf_ids(options.ids, seed=1)
    random = np.random.default_rng(2)
    gradients = {dim: random.standard_normal((ids.size, dim), np.float32) for dim in DIMS}
    for name, side in SIDES.items():
        for given in gradients.values():
            check(name, ids, given, side(ids, given))
    measure_codes(ids)
    sides = {name: lambda side=side: measure(side, ids, gradients) for name, side in SIDES.items()}
    raw = measure_pairs(sides, options.pairs)
    raw["codes"] = [measure_codes(ids) for _ in range(options.pairs)]
    for figure in raw["codes"][0]:
        print(f"codes of ids, {figure}: {spread(column(raw['codes'], figure))}")
    found = {f"dedup_d{dim}": ratios(raw["torch"], raw["shardyard"], f"d{dim}_ms") for dim in DIMS}
    for name, values in found.items():
        print(f"{name}: {spread(values)}")
    print(json.dumps(result("table_ids", raw, found)), flush=True)


if __name__ == "__main__":
    main()
