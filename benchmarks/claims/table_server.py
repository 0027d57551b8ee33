"""Tables in the server: look-ups and updates of raw ids, against torch with known row numbers; memory, pauses, floods.

lookup: 65,536 uniform ids in 10M rows, against torch.index_select. update: the same with Adagrad, against torch's
sparse Adagrad; update_d16_rows_known: the part that is not the index, on rows whose numbers are known. All in the
processor time of one thread, with compared answers. two_threads: look-ups and updates by two threads against one, in
elapsed time. row_overhead_bytes: resident memory for each row beyond its values and state. growth_pause_ms: the longest
look-up of 1,024 ids while another thread makes 20M rows. growth_beside_ms: the longest look-up of another table that
does not grow at the same time, which shows how long the machine suspends a thread. sweep_ms: the extra time of a
synchronous step in which a sixteenth of 10M rows expires; sweep_least_ms: of one in which none does. flood: look-ups
and pushes of 200,000 ids that would collide in one bucket if the index had a known seed, against random ids.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import psutil
import torch

from claims import Found
from harness.measuring.pairs import Figures, column, measure_pairs, ratios
from harness.measuring.report import Panel
from shardyard.domain.tables import row_rules
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_optimizers import make_group
from shardyard.domain.tables.table_settings import SWEEPS_PER_AGE, ExpirySettings, TableSettings
from shardyard_ps_server.tables.table import Table, warm

FIGURE = "tables"
BATCH_IDS = 65_536
BATCHES = 8
SMALL_IDS = 1_024
GROWTH_IDS = 4_096
GROWTHS = 3
BESIDE_ROWS = 1 << 20
FLOOD_IDS = 200_000
LOAD_IDS = 1 << 18
SWEEPS_OF_EACH = 5
LR, EPS = 0.05, 1e-8
KNOWN_SEEDS = (0x0123456789ABCDEF, 0x42)


class WrongAnswer(Exception):
    """A table gave other values than torch."""


def raw_ids(numbers: np.ndarray) -> np.ndarray:
    """Maps numbers to ids that are spread over all of int64."""
    return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def make_table(dim: int, optimizer: str, rows_max: int) -> Table:
    group = make_group(optimizer, {"lr": LR, "eps": EPS} if optimizer == "adagrad" else {"lr": LR})
    initial = InitialValues(InitialKind.ZEROS)
    return Table(TableSettings("bench", dim, optimizer, group, 1, initial, rows_max))


def filled(table: Table, weight: torch.Tensor) -> Table:
    rows = weight.shape[0]
    for begin in range(0, rows, LOAD_IDS):
        end = min(begin + LOAD_IDS, rows)
        table.load(raw_ids(np.arange(begin, end)), weight[begin:end].numpy())
    return table


def thread_seconds(do: Callable[[int], None]) -> float:
    begin = time.thread_time()
    for number in range(BATCHES):
        do(number)
    return time.thread_time() - begin


# ---- one thread


def measure_look_ups(dim: int, rows: int, pairs: int) -> dict[str, list[Figures]]:
    weight = torch.rand(rows, dim)
    table = filled(make_table(dim, "sgd", rows + BATCH_IDS), weight)
    rng = np.random.default_rng(0)
    numbers = [rng.integers(0, rows, BATCH_IDS) for _ in range(BATCHES)]
    ids, known = [raw_ids(each) for each in numbers], [torch.from_numpy(each) for each in numbers]
    out, theirs = np.empty((BATCH_IDS, dim), np.float32), torch.empty(BATCH_IDS, dim)

    def ours(number: int) -> None:
        table.look_up(ids[number], out)

    def select(number: int) -> None:
        torch.index_select(weight, 0, known[number], out=theirs)

    for number in range(BATCHES):
        ours(number)
        select(number)
        if not (out == theirs.numpy()).all():
            raise WrongAnswer(f"look-up of dim {dim}")
    million = BATCHES * BATCH_IDS / 1e6
    return measure_pairs(
        {
            f"look-up d{dim}, shardyard": lambda: {"m_ids_per_s": million / thread_seconds(ours)},
            f"look-up d{dim}, torch.index_select": lambda: {"m_ids_per_s": million / thread_seconds(select)},
        },
        pairs,
    )


def measure_updates(dim: int, rows: int, pairs: int) -> tuple[dict[str, list[Figures]], list[float], float]:
    """Also measures two threads, and the memory for a row."""
    weight = torch.zeros(rows, dim)
    rng = np.random.default_rng(0)
    numbers = [np.unique(rng.integers(0, rows, BATCH_IDS)) for _ in range(BATCHES)]
    ids = [raw_ids(each) for each in numbers]
    gradients = rng.standard_normal((BATCH_IDS, dim)).astype(np.float32)
    process = psutil.Process()
    warm()
    before = process.memory_info().rss
    table = make_table(dim, "adagrad", rows + BATCH_IDS)
    zeros = np.zeros((LOAD_IDS, dim), np.float32)
    for begin in range(0, rows, LOAD_IDS):
        chunk = raw_ids(np.arange(begin, min(begin + LOAD_IDS, rows)))
        table.push(chunk, zeros[: chunk.size], 1)
    overhead = (process.memory_info().rss - before) / rows - 2 * dim * 4
    parameter = torch.nn.Parameter(weight)
    adagrad = torch.optim.Adagrad([parameter], lr=LR, eps=EPS)
    sparse = [
        torch.sparse_coo_tensor(
            torch.from_numpy(each)[None], torch.from_numpy(gradients[: each.size]), (rows, dim), is_coalesced=True
        )
        for each in numbers
    ]

    def ours(number: int) -> None:
        table.push(ids[number], gradients[: ids[number].size], 2)

    def theirs(number: int) -> None:
        parameter.grad = sparse[number]
        adagrad.step()

    for number in range(BATCHES):
        ours(number)
        theirs(number)
    out = np.empty((ids[0].size, dim), np.float32)
    table.look_up(ids[0], out)
    if not np.allclose(out, parameter.detach()[torch.from_numpy(numbers[0])].numpy(), rtol=1e-4, atol=1e-6):
        raise WrongAnswer("Adagrad")
    million = sum(each.size for each in ids) / 1e6
    shuffled = [rng.permutation(each) for each in numbers]
    rule, places = row_rules.rule_of("adagrad", table.settings.group, 2), np.arange(BATCH_IDS, dtype=np.int32)

    def alone(number: int) -> None:
        row_rules.apply(rule.code, rule.scalars, table.state.memory.slab, shuffled[number], places, gradients, dim)

    found = measure_pairs(
        {
            f"update d{dim}, rows known": lambda: {"m_rows_per_s": million / thread_seconds(alone)},
            f"update d{dim}, shardyard": lambda: {"m_rows_per_s": million / thread_seconds(ours)},
            f"update d{dim}, torch's sparse Adagrad": lambda: {"m_rows_per_s": million / thread_seconds(theirs)},
        },
        pairs,
    )
    return found, measure_threads(table, ids, gradients, pairs), overhead


# ---- threads


def measure_threads(table: Table, ids: Sequence[np.ndarray], gradients: np.ndarray, pairs: int) -> list[float]:
    outs = [np.empty_like(gradients) for _ in range(2)]

    def work(of: int) -> None:
        for each in ids:
            table.look_up(each, outs[of][: each.size])
            table.push(each, gradients[: each.size], 2)

    found = []
    with ThreadPoolExecutor(2) as pool:
        for pair in range(pairs):
            begin = time.perf_counter()
            work(0)
            work(0)
            one = time.perf_counter() - begin
            begin = time.perf_counter()
            list(pool.map(work, range(2)))
            two = time.perf_counter() - begin
            found.append(one / two)
            print(f"pair {pair + 1}/{pairs} two threads: {one / two:.2f} times one", flush=True)
    return found


# ---- pauses


def measure_growth(rows: int, turns: int) -> dict[str, list[Figures]]:
    """Alternates look-ups in the growing table and in another one."""
    beside = make_table(16, "sgd", BESIDE_ROWS + GROWTH_IDS)
    _grow(beside, BESIDE_ROWS)
    found: dict[str, list[Figures]] = {"growing": [], "beside": []}
    for turn in range(turns):
        for name, into in found.items():
            growing = make_table(16, "sgd", rows + GROWTH_IDS)
            looked_up, ids = (growing, rows) if name == "growing" else (beside, BESIDE_ROWS)
            into.append(_look_up_while(partial(_grow, growing, rows), looked_up, ids))
            if growing.rows < rows:
                raise WrongAnswer(f"{growing.rows} rows of {rows}")
            told = ", ".join(f"{figure} {value:.4g}" for figure, value in into[-1].items())
            print(f"turn {turn + 1}/{turns} {name}: {told}", flush=True)
    return found


def _grow(table: Table, rows: int) -> None:
    gradients = np.zeros((GROWTH_IDS, 16), np.float32)
    for begin in range(0, rows, GROWTH_IDS):
        table.push(raw_ids(np.arange(begin, begin + GROWTH_IDS)), gradients, 1)


def _look_up_while(work: Callable[[], None], table: Table, ids_max: int) -> Figures:
    """Measures the elapsed time of look-ups, each of a batch, until `work` ends."""
    rng = np.random.default_rng(0)
    out = np.empty((SMALL_IDS, 16), np.float32)
    times = []
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(work)
        while not worker.done():
            ids = raw_ids(rng.integers(0, ids_max, SMALL_IDS))
            begin = time.perf_counter()
            table.look_up(ids, out)
            times.append(time.perf_counter() - begin)
        worker.result()
    return {
        "look_up_max_ms": 1e3 * max(times),
        "look_up_p99_9_ms": 1e3 * float(np.quantile(times, 0.999)),
        "look_ups": len(times),
    }


def measure_sweep(rows: int) -> dict[str, list[float]]:
    """Measures the elapsed time of what a partition does for the expiry around a push."""
    expiry = ExpirySettings(age_steps=SWEEPS_PER_AGE)
    table = Table(dataclasses.replace(make_table(16, "sgd", rows + GROWTH_IDS).settings, expiry=expiry))
    part = -(-rows // SWEEPS_PER_AGE)
    for step in range(1, SWEEPS_PER_AGE + 1):
        ids = raw_ids(np.arange((step - 1) * part, min(step * part, rows)))
        for begin in range(0, ids.size, LOAD_IDS):
            of = ids[begin : begin + LOAD_IDS]
            table.push(of, np.zeros((of.size, 16), np.float32), step)
    found: dict[str, list[float]] = {"sweep_ms": [], "sweep_least_ms": []}
    for step in range(1, 1 + SWEEPS_OF_EACH):
        for name, due in (("sweep_least_ms", step), ("sweep_ms", step + 1)):
            begin_s = time.perf_counter()
            gone = table.expiry.sweep(SWEEPS_PER_AGE + due, [])
            out = np.empty((gone.size, 16), np.float32)
            table.look_up(gone, out)
            table.remove_expired(gone)
            found[name].append(1e3 * (time.perf_counter() - begin_s))
            if gone.size != (part if name == "sweep_ms" else 0):
                raise WrongAnswer(f"{gone.size} rows expire, of {table.rows}")
    return found


# ---- floods


def ids_that_meet(count: int) -> np.ndarray:
    """Returns ids whose hashes are consecutive numbers under a known seed, by the inverse of tables.index's mixer."""
    first, second = (np.uint64(each) for each in KNOWN_SEEDS)
    word = np.arange(count, dtype=np.uint64) + np.uint64(0x0AAAAAAA00000000)
    for shift, factor, added in ((29, 0xC2B2AE3D27D4EB4F, 0), (32, 0xD6E8FEB86659FD93, int(second))):
        word ^= word >> np.uint64(32) if shift == 29 else word >> np.uint64(29) ^ word >> np.uint64(58)
        word -= np.uint64(added)
        word *= np.uint64(pow(factor, -1, 1 << 64))
    word ^= word >> np.uint64(32)
    return (word ^ first).view(np.int64)


def measure_flood(pairs: int) -> list[float]:
    rng = np.random.default_rng(0)
    flood, random = ids_that_meet(FLOOD_IDS), rng.integers(-(1 << 63), (1 << 63) - 1, FLOOD_IDS)
    gradients, out = np.zeros((FLOOD_IDS, 16), np.float32), np.empty((FLOOD_IDS, 16), np.float32)

    def seconds(ids: np.ndarray) -> float:
        table = make_table(16, "sgd", 2 * FLOOD_IDS)
        begin = time.thread_time()
        for _ in range(2):
            table.push(ids, gradients, 1)
            table.look_up(ids, out)
        return time.thread_time() - begin

    return [seconds(random) / seconds(flood) for _ in range(pairs)]


# ---- all of it


def measure(rows: int, grown: int, pairs: int) -> Found:
    torch.set_num_threads(1)
    raw: dict[str, object] = {}
    found: dict[str, list[float]] = {}
    updates, threads, overhead = measure_updates(16, rows, pairs)
    alone, ours, theirs = updates.values()
    found["update_d16"] = ratios(ours, theirs, "m_rows_per_s")
    found["update_d16_rows_known"] = ratios(alone, theirs, "m_rows_per_s")
    found["two_threads"] = threads
    found["row_overhead_bytes"] = [overhead]
    raw["updates"] = updates
    panels = [_panel("Adagrad, dim 16", "million rows/s", updates, "m_rows_per_s")]
    for dim in (16, 64):
        raw[f"look_ups_d{dim}"] = measured = measure_look_ups(dim, rows, pairs)
        ours, theirs = measured.values()
        found[f"lookup_d{dim}"] = ratios(ours, theirs, "m_ids_per_s")
        panels.append(_panel(f"Look-up, dim {dim}", "million ids/s", measured, "m_ids_per_s"))
    raw["growth"] = growth = measure_growth(grown, GROWTHS)
    found["growth_pause_ms"] = column(growth["growing"], "look_up_max_ms")
    found["growth_pause_p99_9_ms"] = column(growth["growing"], "look_up_p99_9_ms")
    found["growth_beside_ms"] = column(growth["beside"], "look_up_max_ms")
    found |= measure_sweep(rows)
    found["flood"] = measure_flood(pairs)
    return Found(raw, found, {FIGURE: panels})


def _panel(title: str, unit: str, measured: dict[str, list[Figures]], figure: str) -> Panel:
    bars = {name.partition(", ")[2]: column(results, figure) for name, results in measured.items()}
    return Panel(title, unit, bars=bars)
