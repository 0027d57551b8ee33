"""Steps with a table: look-up and Adagrad push of 4,096 Zipf(1.1) ids in a million rows of dim 64, steps a second.

One worker, one server, one thread a process. The peer is torch's embedding and its sparse Adagrad in a process of
torch.distributed.rpc, in its fastest form, in which a push can also return the next rows. Before the measurement, the
rows of all sides after some steps equal those of a plain model. In a second measurement both sides compute a batch
during the push before it, on rows that lack that push. In a third, each call to a server takes 5 ms more, and
look-ahead is compared with none. A fourth compares a job of 8 partitions with one of 1, with asynchronous and with
synchronous steps. In a fifth two workers take steps on the same table at the same time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from claims import Found
from harness.measuring.pairs import Figures, column, measure_pairs, ratios, spread
from harness.measuring.report import Panel
from harness.processes.sides import Side, peer_side, shardyard_side
from harness.workloads.rows import Task, check
from shardyard.domain.consistency import UpdateMode
from sides.torch_peers.rows_rpc import FORMS

FIGURE = "tables-steps"
VERIFIED_STEPS = 5
WARM_S = 1.0
PEER_FORM = "one-distinct"
"""The fastest of FORMS, of those whose rows have all pushes."""
PEER_WINDOW = "window-distinct"
CALL_MS = 5
DELAYED = Task(ids=512)
"""The time of a step is then that of its calls, and little else."""
PARTITIONS = 8
WORKERS = 2
OURS, AHEAD, WINDOW = "shardyard, rows looked up", "shardyard, look_ahead", "shardyard, look_ahead, window 1"


@contextmanager
def verified(side: Side, task: Task, *, window: bool = False) -> Iterator[Side]:
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as folder:
        side.ask("verify", workers=1, steps=VERIFIED_STEPS, folder=folder)
        check(task, VERIFIED_STEPS, Path(folder), window=window)
    side.ask("train", seconds=WARM_S)
    yield side


def one_measurement(side: Side, seconds: float) -> Figures:
    done = side.measure("train", seconds=seconds)
    steps = done.total("steps")
    return {
        "steps_per_s": sum(answer["steps"] / answer["seconds"] for answer in done.answers),
        "worker_cpu_ms": 1e3 * done.total("cpu_s") / steps,
        "service_cpu_ms": 1e3 * done.service_cpu_s / steps,
    }


@contextmanager
def our_side(
    task: Task,
    *,
    ahead: bool,
    delay_ms: int = 0,
    partitions: int = 1,
    window: int = 0,
    workers: int = 1,
    mode: UpdateMode = UpdateMode.ASYNC,
) -> Iterator[Side]:
    arguments = [*task.arguments(), "--delay-ms", str(delay_ms), *(["--ahead"] if ahead else [])]
    settings = {"job.partitions": partitions, "worker.exchange": ("blocking", "delayed")[window]}
    settings["job.consistency.mode"] = mode.value
    with shardyard_side("shardyard.rows", *arguments, workers=workers, settings=settings) as side:
        yield side


@contextmanager
def their_side(task: Task, form: str, transport: str = "default", workers: int = 1) -> Iterator[Side]:
    arguments = [*task.arguments(), "--form", form, "--transport", transport]
    with peer_side("torch_peers.rows_rpc", *arguments, workers=workers) as side:
        yield side


def measure_all(
    sides: Mapping[str, AbstractContextManager[Side]], task: Task, pairs: int, seconds: float, *, window: bool = False
) -> dict[str, list[Figures]]:
    with ExitStack() as stack:
        ready = {
            name: stack.enter_context(verified(stack.enter_context(side), task, window=window))
            for name, side in sides.items()
        }
        return measure_pairs({name: partial(one_measurement, side, seconds) for name, side in ready.items()}, pairs)


def measure_steps(task: Task, pairs: int, seconds: float) -> dict[str, list[Figures]]:
    """Measures the peer, then Shardyard, last with look-ahead."""
    sides = {
        f"torch.rpc, {PEER_FORM}": their_side(task, PEER_FORM),
        OURS: our_side(task, ahead=False),
        AHEAD: our_side(task, ahead=True),
    }
    return measure_all(sides, task, pairs, seconds)


def measure_workers(task: Task, pairs: int, seconds: float) -> dict[str, list[Figures]]:
    """Measures the peer, then Shardyard, with two workers each."""
    sides = {
        f"torch.rpc, {PEER_FORM}": their_side(task, PEER_FORM, workers=WORKERS),
        AHEAD: our_side(task, ahead=True, workers=WORKERS),
    }
    return measure_all(sides, task, pairs, seconds)


def measure_window(task: Task, pairs: int, seconds: float) -> dict[str, list[Figures]]:
    """Measures the peer, then Shardyard. Both sides compute a batch during the push before it."""
    sides = {
        f"torch.rpc, {PEER_WINDOW}": their_side(task, PEER_WINDOW),
        WINDOW: our_side(task, ahead=True, window=1),
    }
    return measure_all(sides, task, pairs, seconds, window=True)


def measure_delayed(task: Task, pairs: int, seconds: float) -> dict[str, list[Figures]]:
    """Compares no look-ahead with look-ahead."""
    sides = {
        OURS: our_side(task, ahead=False, delay_ms=CALL_MS),
        AHEAD: our_side(task, ahead=True, delay_ms=CALL_MS),
    }
    return measure_all(sides, task, pairs, seconds)


def measure_partitions(
    task: Task, pairs: int, seconds: float, mode: UpdateMode = UpdateMode.ASYNC
) -> dict[str, list[Figures]]:
    """Compares one partition with several."""
    sides = {
        f"{mode.value}, 1 partition": our_side(task, ahead=False, mode=mode),
        f"{mode.value}, {PARTITIONS} partitions": our_side(task, ahead=False, partitions=PARTITIONS, mode=mode),
    }
    return measure_all(sides, task, pairs, seconds)


def show_peers(seconds: float, repeats: int = 3) -> None:
    task = Task()
    for form in FORMS:
        for transport in ("default", "tcp"):
            with (
                their_side(task, form, transport) as side,
                verified(side, task, window=form == PEER_WINDOW),
            ):
                rates = column([one_measurement(side, seconds) for _ in range(repeats)], "steps_per_s")
                print(f"torch.rpc, {form}, {transport}: {spread(rates)} steps/s", flush=True)


def measure(pairs: int, seconds: float) -> Found:
    steps = measure_steps(Task(), pairs, seconds)
    theirs, plain, ahead = steps.values()
    pair = measure_workers(Task(), pairs, seconds)
    theirs_pair, pair_ahead = pair.values()
    windows = measure_window(Task(), pairs, seconds)
    theirs_window, window = windows.values()
    delayed = measure_delayed(DELAYED, pairs, seconds)
    before, after = delayed.values()
    parted = measure_partitions(Task(), pairs, seconds)
    one, several = parted.values()
    parted_steps = measure_partitions(Task(), pairs, seconds, UpdateMode.SYNC)
    one_sync, several_sync = parted_steps.values()
    found = {
        "tables_steps": ratios(ahead, theirs, "steps_per_s"),
        "tables_steps_without": ratios(plain, theirs, "steps_per_s"),
        "tables_steps_2_workers": ratios(pair_ahead, theirs_pair, "steps_per_s"),
        "tables_steps_window": ratios(window, theirs_window, "steps_per_s"),
        "prefetch": ratios(after, before, "steps_per_s"),
        "partitions": ratios(several, one, "steps_per_s"),
        "partitions_sync": ratios(several_sync, one_sync, "steps_per_s"),
    }
    all_steps = steps | windows
    panels = [
        Panel(
            "A million rows of 64, 4,096 ids", "steps/s", {n: column(f, "steps_per_s") for n, f in all_steps.items()}
        ),
        Panel(f"{CALL_MS} ms a call, 512 ids", "steps/s", {n: column(f, "steps_per_s") for n, f in delayed.items()}),
    ]
    return Found(
        {"steps": steps, "workers": pair, "window": windows, "delayed": delayed, "partitions": parted | parted_steps},
        found,
        {FIGURE: panels},
    )
