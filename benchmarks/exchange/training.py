"""Training with two workers: steps a second of both together, asynchronous and synchronous.

    make bench BENCH=training            (with options: ARGS="--pairs 2 --seconds 2")
    make bench BENCH=training ARGS="--peers"            what the peers were tried with

A multilayer perceptron 784-128-10 and one of 25 million parameters; batches of 64 from memory, SGD, nn.Module on all
sides, every process with one thread. Asynchronous against a parameter server of torch.distributed.rpc, synchronous
against DistributedDataParallel over gloo, each in its fastest form. A step is one batch of one worker, on all sides.
The perceptron trains also with TCP alone: ours over streams, torch.rpc over TCP, gloo as before, which uses TCP anyway.
Each gradient is computed on parameters that were pulled after that worker's previous push. Checked on all sides: before
the measurements, that the parameters are what the gradients make of them; after them, that the loss has fallen.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from harness.measuring.pairs import Figures, column, measure_pairs, ratios, spread
from harness.measuring.report import Panel, options_of, report
from harness.processes.sides import Side, peer_side, shardyard_side
from harness.workloads.training import TASKS, check_falls, check_sum, read

WORKERS = 2
ONE_THREAD = "OMP_NUM_THREADS"
VERIFIED_STEPS = {"mlp": 20, "25m": 3}
WARM_STEPS = {"mlp": 200, "25m": 2}
PEERS: dict[tuple[str, str], tuple[str, str, int, list[str]]] = {
    ("mlp", "async"): ("torch.rpc", "torch_peers.training_rpc", 1, ["--update", "flat"]),
    ("25m", "async"): ("torch.rpc", "torch_peers.training_rpc", 1, ["--update", "live", "--transport", "tcp"]),
    ("mlp", "sync"): ("DDP gloo", "torch_peers.training_ddp", 0, ["--wrap", "static"]),
    ("mlp", "async_tcp"): ("torch.rpc", "torch_peers.training_rpc", 1, ["--update", "flat", "--transport", "tcp"]),
    ("mlp", "sync_tcp"): ("DDP gloo", "torch_peers.training_ddp", 0, ["--wrap", "static"]),
    ("25m", "sync"): ("DDP gloo", "torch_peers.training_ddp", 0, ["--wrap", "static"]),
}
"""Name, program, servers, arguments: the fastest of TRIED. Gloo uses TCP on one machine, too."""
TRIED: dict[str, list[tuple[str, int, list[str]]]] = {
    "async": [
        ("torch_peers.training_rpc", 1, ["--transport", transport, "--update", update])
        for transport in ("default", "tcp")
        for update in ("live", "clone", "foreach", "fused", "flat")
    ],
    "sync": [
        ("torch_peers.training_ddp", 0, ["--wrap", wrap, *fused])
        for wrap in ("plain", "view", "static")
        for fused in ([], ["--fused"])
    ],
}


class Trainers:
    """One side's workers, verified and warmed up."""

    def __init__(self, side: Side, task: str, mode: str, name: str, lossy: float = 0.0) -> None:
        """`lossy`: which part of a gradient compression may change."""
        self._side = side
        self._name = name
        self._lossy = lossy
        self._sync = mode.startswith("sync")
        self.losses: list[float] = []
        self._verify(task)
        warm = side.ask("train", steps=WARM_STEPS[task])
        self.losses.append(warm[0]["first_loss"])
        self._steps_per_s = min(answer["steps"] / answer["seconds"] for answer in warm)

    def measure(self, seconds: float) -> Figures:
        """Synchronous workers take the same number of steps, asynchronous ones as many as they can."""
        if self._sync:
            answers = self._side.ask("train", steps=max(2, round(self._steps_per_s * seconds)))
        else:
            answers = self._side.ask("train", seconds=seconds)
        rates = [answer["steps"] / answer["seconds"] for answer in answers]
        self._steps_per_s = min(rates)
        loss = sum(answer["loss"] for answer in answers) / len(answers)
        self.losses.append(loss)
        return {"steps_per_s": sum(rates), "loss": loss}

    def check_falls(self) -> None:
        check_falls(self._name, self.losses)

    def _verify(self, task: str) -> None:
        lr, steps = TASKS[task].lr, VERIFIED_STEPS[task]
        settle = not self._sync
        with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as name:
            folder = Path(name)
            if settle:
                self._side.ask("alone", workers=1, steps=steps, lr=lr)
            self._side.ask("save", workers=1, path=str(folder / "before.npy"), settle=settle)
            self._side.ask("verify", steps=steps, folder=name)
            self._side.ask("save", workers=1, path=str(folder / "after.npy"), settle=settle)
            gradients = [read(folder / f"gradients-{worker}.npy") for worker in range(len(self._side.workers))]
            before, after = read(folder / "before.npy"), read(folder / "after.npy")
            check_sum(before, after, gradients, lr=lr, mean=self._sync, steps=steps, lossy=self._lossy)


@contextmanager
def our_side(task: str, mode: str) -> Iterator[Side]:
    consistency, _, transport = mode.partition("_")
    settings = {"job.consistency.mode": consistency, "worker.same_host": "never" if transport else "auto"}
    tls = not transport  # the peers encrypt nothing
    with shardyard_side("shardyard.training", "--task", task, workers=WORKERS, settings=settings, tls=tls) as side:
        yield side


@contextmanager
def their_side(task: str, program: str, servers: int, arguments: Sequence[str]) -> Iterator[Side]:
    with peer_side(program, "--task", task, *arguments, workers=WORKERS, servers=servers) as side:
        yield side


def run(
    task: str,
    mode: str,
    pairs: int,
    seconds: float,
    ours: AbstractContextManager[Side] | None = None,
    name: str = "shardyard",
) -> dict[str, list[Figures]]:
    """`ours`: another side than `our_side`, to be shown as `name`."""
    peer, program, servers, arguments = PEERS[task, mode]
    with ExitStack() as stack:
        both = {
            peer: stack.enter_context(their_side(task, program, servers, arguments)),
            name: stack.enter_context(ours or our_side(task, mode)),
        }
        trainers = {f"{name}, {mode}, {task}": Trainers(side, task, mode, name) for name, side in both.items()}
        sides: dict[str, Callable[[], Figures]] = {
            name: partial(each.measure, seconds) for name, each in trainers.items()
        }
        results = measure_pairs(sides, pairs)
        for each in trainers.values():
            each.check_falls()
        return results


def show_peers(task: str, seconds: float, repeats: int = 3) -> None:
    for mode, variants in TRIED.items():
        for program, servers, arguments in variants:
            with their_side(task, program, servers, arguments) as side:
                trainers = Trainers(side, task, mode, program)
                rates = column([trainers.measure(seconds) for _ in range(repeats)], "steps_per_s")
                print(f"{task} {mode}, {program} {' '.join(arguments)}: {spread(rates)} steps/s", flush=True)


def main() -> None:
    parser = options_of(__doc__, pairs=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a measurement (4)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="the models (both)")
    parser.add_argument("--peers", action="store_true", help="measure what the peers were tried with, and no more")
    options = parser.parse_args()
    os.environ[ONE_THREAD] = "1"
    if options.peers:
        for task in options.tasks:
            show_peers(task, options.seconds)
        return
    raw: dict[str, list[Figures]] = {}
    found: dict[str, list[float]] = {}
    for task in options.tasks:
        # a step of the large model takes a third of a second: fewer pairs
        pairs = options.pairs if task == "mlp" else max(1, options.pairs // 2)
        for mode in [mode for each, mode in PEERS if each == task]:
            results = run(task, mode, pairs, options.seconds)
            raw |= results
            peer, ours = results.values()
            found["_".join(("training", *([task] if task != "mlp" else []), mode))] = ratios(ours, peer, "steps_per_s")
    show("training", options.tasks, raw, found, options.figures)


def show(
    title: str, tasks: Sequence[str], raw: dict[str, list[Figures]], found: dict[str, list[float]], folder: Path
) -> None:
    """Prints what was measured, and draws a panel for each task."""
    for name, results_of in raw.items():
        print(f"{name}: {spread(column(results_of, 'steps_per_s'))} steps/s")
    panels = [
        Panel(
            f"{task}, two workers", "steps/s", bars={n: column(r, "steps_per_s") for n, r in raw.items() if task in n}
        )
        for task in tasks
    ]
    report(title, raw, found, panels=panels, folder=folder)


if __name__ == "__main__":
    main()
