"""Tables in checkpoints: how much smaller increments are, how long a push waits for a cut, and where chains should end.

    make bench BENCH=table_checkpoints    (with options: ARGS="--rows 200000 --pairs 1")

A partition with a table of 1M rows of 16 values with Adagrad. Between two checkpoints come 50 pushes of 4,096 Zipf(1.1)
ids, and pushes go on while files are written. incremental: bytes of a whole table over those of an increment. pause_ms:
how long Partition.cut holds the partition when it has its turn, so how long a push may wait: elapsed, the longest of 99
in 100 and of all, and in processor time, which what else runs on the machine does not change. chain: by the share of a
base that increments may have before a table is written whole again, bytes written for a checkpoint as a share of the
table's, and bytes read to restore, on average. Restored tables are held against those that were cut. The last line is
one JSON object.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from harness.measuring.pairs import Figures, column
from harness.measuring.report import options_of, result
from shardyard.checkpoints.manifest import TableEntry
from shardyard.checkpoints.table_state import TableState
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.layout.layouts import JobLayout, PartitionLayout
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.tables.table_settings import TableSettings
from shardyard.storage.storage import LocalStorage
from shardyard_ps_server.checkpoint import table_saver
from shardyard_ps_server.partition.checkpoint_cuts import take_cut
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows.table_states import read_tables
from shardyard_ps_server.tables.table import Table, warm

DIM, IDS, PUSHES, EXPONENT = 16, 4_096, 50, 1.1
SHARES = (0.25, 0.5, 1.0, 2.0)
CHECKPOINTS = 24
CUTS = 200
HERE = PartitionId(0)


class WrongRows(Exception):
    """A restored table differs from the one that was cut."""


class Load:
    """A partition, and the pushes to it."""

    def __init__(self, rows: int) -> None:
        group = make_group("sgd", {"lr": 1.0})
        settings = TableSettings("clicks", DIM, "adagrad", rows_max=2 * rows)
        part = PartitionLayout(HERE, 0, ())
        self.layout = JobLayout((), OptimizerSpec("sgd", (group,)), (part,), (settings,))
        self.partition = Partition(self.layout, HERE, UpdateRules(UpdateMode.ASYNC, 1))
        self.ends = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT)
        self.rng = np.random.default_rng(0)
        self.step = 0
        self.turn = threading.Lock()
        for begin in range(0, rows, 1 << 16):
            self.push(np.arange(begin, min(begin + (1 << 16), rows)))

    @property
    def table(self) -> Table:
        return self.partition.tables["clicks"]

    def push(self, ids: npt.NDArray[np.int64]) -> None:
        self.step += 1
        self.table.push(ids, np.full((ids.size, DIM), 0.5, np.float32), self.step)

    def push_some(self) -> None:
        drawn = np.searchsorted(self.ends, self.rng.random(IDS) * self.ends[-1])
        ids = np.unique(drawn.astype(np.int64))
        with self.turn:
            self.push(ids)

    def save(
        self, saver: table_saver.TableSaver, storage: LocalStorage, number: int
    ) -> tuple[TableEntry, tuple[float, float]]:
        """Returns the manifest's entry, and how long the cut held the partition: elapsed and processor time."""
        since = saver.since(HERE, "clicks", self.table, number - 1)
        with self.turn:
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            cut = take_cut(self.partition, {} if since is None else {"clicks": since})
            pause = time.perf_counter() - begin, time.thread_time() - begin_cpu
        try:
            return saver.save(self.layout, HERE, 0, cut.tables["clicks"], number, storage), pause
        finally:
            cut.release()


def measure_chain(load: Load, share: float, folder: Path) -> Figures:
    """Takes CHECKPOINTS checkpoints, with chains that end at that share."""
    table_saver.CHAIN_SHARE = share  # type: ignore[misc]
    storage, saver = LocalStorage(folder), table_saver.TableSaver(Incarnation(1))
    written, read, whole, entry = [], [], 1, TableEntry(0, 0, 0)
    increments = []
    for number in range(1, CHECKPOINTS + 1):
        for _ in range(PUSHES):
            load.push_some()
        entry, _ = load.save(saver, storage, number)
        nbytes = sum(file.written.nbytes for file in entry.files if file.number == number)
        whole = sum(file.written.nbytes for file in entry.base)
        (increments if entry.increments else [0]).append(nbytes)
        written.append(nbytes / whole)
        read.append(entry.nbytes / whole)
    begin = time.perf_counter()
    (found,) = read_tables((TableState(storage, "", load.layout, HERE, 0, entry),)).values()
    restore_s = time.perf_counter() - begin
    ids = np.arange(found.rows, dtype=np.int64)
    mine, theirs = (np.empty((ids.size, DIM), np.float32) for _ in range(2))
    found.look_up(ids, mine)
    load.table.look_up(ids, theirs)
    if found.rows != load.table.rows or mine.tobytes() != theirs.tobytes():
        raise WrongRows(f"{found.rows} rows, of {load.table.rows}")
    return {
        "written": float(np.mean(written)),
        "read": float(np.mean(read)),
        "incremental": float(whole / np.mean(increments)),
        "restore_mib_s": entry.nbytes / restore_s / 2**20,
    }


def measure_pauses(load: Load) -> Figures:
    """Cuts a table repeatedly while another thread pushes to it."""
    over, pauses = threading.Event(), []

    def push() -> None:
        while not over.is_set():
            load.push_some()

    thread = threading.Thread(target=push)
    thread.start()
    with tempfile.TemporaryDirectory() as folder:
        saver = table_saver.TableSaver(Incarnation(1))
        for number in range(1, CUTS + 1):
            pauses.append(load.save(saver, LocalStorage(Path(folder)), number)[1])
    over.set()
    thread.join()
    elapsed, processor = (1000 * np.array(each) for each in zip(*pauses, strict=True))
    return {
        "pause_p99_ms": float(np.percentile(elapsed, 99)),
        "pause_max_ms": float(elapsed.max()),
        "pause_cpu_p99_ms": float(np.percentile(processor, 99)),
        "pause_cpu_max_ms": float(processor.max()),
    }


def main() -> None:
    parser = options_of(__doc__, pairs=3)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table (1,000,000)")
    given = parser.parse_args()
    warm()
    load = Load(given.rows)
    chains: dict[float, list[Figures]] = {share: [] for share in SHARES}
    for _ in range(given.pairs):
        for share in SHARES:
            with tempfile.TemporaryDirectory() as folder:
                chains[share].append(measure_chain(load, share, Path(folder)))
    pauses = [measure_pauses(load) for _ in range(given.pairs)]
    raw = {f"{name}_{share}": column(found, name) for share, found in chains.items() for name in found[0]}
    raw |= {name: column(pauses, name) for name in pauses[0]}
    ratios = {"incremental": column(chains[0.5], "incremental"), "pause_p99_ms": column(pauses, "pause_p99_ms")}
    print(json.dumps(result("table_checkpoints", raw, ratios)))


if __name__ == "__main__":
    main()
