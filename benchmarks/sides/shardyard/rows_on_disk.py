"""A table larger than the memory of its process: look-ups of hot rows while another thread reads cold ones.

    python benchmarks/sides/shardyard/rows_on_disk.py --rows N --memory-mib N --folder DIR [--cgroup DIR]

The last line is a JSON object. All answers are checked: row i has the value i % 1,000 in all elements.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.machine.memory_cgroup import join, most_bytes

DIM = 16
BATCH_IDS = 4_096
LOAD_IDS = 1 << 16
HOT_IDS = 100_000
WARM_UP = 50


class WrongAnswer(Exception):
    """The table returned other values than were put in."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--memory-mib", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cgroup", type=Path)
    parser.add_argument("--look-ups", type=int, default=5_000, help="hot batches (5,000)")
    return parser.parse_args()


def main() -> None:
    given = options()
    if given.cgroup is not None:
        join(given.cgroup)
    import numpy as np

    from shardyard.domain.tables.row_optimizers import make_group
    from shardyard.domain.tables.table_settings import TableSettings
    from shardyard_ps_server.tables.memory.budget import budget_in
    from shardyard_ps_server.tables.table import Table, warm

    def raw_ids(numbers: np.ndarray) -> np.ndarray:
        return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)

    def values(numbers: np.ndarray) -> np.ndarray:
        return np.repeat((numbers % 1_000).astype(np.float32)[:, None], DIM, axis=1)

    def check(numbers: np.ndarray, out: np.ndarray) -> None:
        if not (out == values(numbers)).all():
            raise WrongAnswer(f"{(out != values(numbers)).any(axis=1).sum()} rows of {numbers.size}")

    warm()
    settings = TableSettings("bench", DIM, "adagrad", make_group("adagrad", {"lr": 0.05}), rows_max=given.rows + 1_000)
    table = Table(settings, budget_in(given.folder, given.memory_mib << 20))
    begin = time.perf_counter()
    for at in range(0, given.rows, LOAD_IDS):
        numbers = np.arange(at, min(at + LOAD_IDS, given.rows))
        table.load(raw_ids(numbers), values(numbers))
    filled_s = time.perf_counter() - begin
    rng = np.random.default_rng(0)
    hot = rng.permutation(np.unique(rng.integers(0, given.rows, min(HOT_IDS, given.rows // 20))))
    for step in range(1, 4):  # without a gradient a row keeps its values
        for part in np.array_split(hot, max(1, hot.size // BATCH_IDS)):
            table.push(raw_ids(part), np.zeros((part.size, DIM), np.float32), step)

    stop = threading.Event()
    wrong: list[WrongAnswer] = []
    cold = [0]

    def read_cold() -> None:
        mine = np.random.default_rng(1)
        out = np.empty((BATCH_IDS, DIM), np.float32)
        try:
            while not stop.is_set():
                numbers = mine.integers(0, given.rows, BATCH_IDS)
                table.look_up(raw_ids(numbers), out)
                check(numbers, out)
                cold[0] += BATCH_IDS
        except WrongAnswer as error:
            wrong.append(error)

    reader = threading.Thread(target=read_cold)
    reader.start()
    times = []
    out = np.empty((BATCH_IDS, DIM), np.float32)
    measured = time.perf_counter()
    for number in range(given.look_ups + WARM_UP):
        numbers = rng.choice(hot, BATCH_IDS)
        ids = raw_ids(numbers)
        begin = time.perf_counter()
        table.look_up(ids, out)
        if number >= WARM_UP:
            times.append(time.perf_counter() - begin)
        check(numbers, out)
    measured = time.perf_counter() - measured
    stop.set()
    reader.join()
    if wrong:
        raise wrong[0]
    print(
        json.dumps(
            {
                "p50_ms": 1e3 * float(np.quantile(times, 0.5)),
                "p99_ms": 1e3 * float(np.quantile(times, 0.99)),
                "p99_9_ms": 1e3 * float(np.quantile(times, 0.999)),
                "max_ms": 1e3 * max(times),
                "cold_rows_per_s": cold[0] / measured,
                "filled_s": filled_s,
                "rows": table.rows,
                "rows_on_disk": table.use().cold_rows,
                "table_bytes": table.use().nbytes,
                "disk_bytes": table.use().disk_bytes,
                "cgroup_bytes_most": 0 if given.cgroup is None else most_bytes(given.cgroup),
            }
        )
    )


if __name__ == "__main__":
    main()
