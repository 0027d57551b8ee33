"""What it costs a mirrored job that its workers are killed and started again.

    make bench BENCH=replicas            (with options: ARGS="--parts goodput --seconds 60")

Four workers under one agent, which starts a killed one again. In each step a worker sleeps for 50 ms, as if an
accelerator computed. `replace`: a worker is killed (kill -9), again and again: from the kill to the survivors' next
step (`replace_s`). `join`: the same with 25 million parameters: from the moment at which the new process calls
job.prepare to its first step (`join_s`), and by how much longer than usual the others' longest step takes meanwhile
(`stop_s`). `goodput`: a kill every 20 seconds: steps that count, over those of the same time without kills. Beside it
stands DistributedDataParallel under torchrun, which starts all workers again from a checkpoint, taken every 10 seconds.

Each sample counts itself: the counts say how many were lost, and how many counted twice.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from harness.measuring.pairs import Figures, column, spread
from harness.measuring.report import Panel, options_of, report
from harness.processes.programs import BENCHMARKS
from harness.workloads.replaced import READY, Note, off, read_notes

WORKERS = 4
PAUSE_MS = 50
KILL_EVERY_S = 20.0
CHECKPOINT_S = 10.0
WARM_STEPS = 20
LOOK_S = 0.01
WAIT_S_MAX = 120.0
END_S_MAX = 30.0
PARTS = ("replace", "join", "goodput")
SIDES = ("shardyard", "torchrun")


class NotReplaced(Exception):
    """The workers do not train, or the counts are wrong."""


class Training:
    """A command whose worker processes note their steps in `out`."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, log: Path) -> None:
        self._process = process
        self.out = out
        self._log = log

    @property
    def notes(self) -> list[Note]:
        return read_notes(self.out)

    def await_true(self, is_so: Callable[[list[Note]], bool], what: str) -> list[Note]:
        until = time.monotonic() + WAIT_S_MAX
        while not is_so(notes := self.notes):
            if self._process.poll() is not None or time.monotonic() > until:
                raise NotReplaced(f"{what}: not in {WAIT_S_MAX:g} s\n{self._log.read_text()[-4000:]}")
            time.sleep(LOOK_S)
        return notes

    def await_whole(self) -> set[int]:
        """Returns the workers when all have taken some steps, and all are those that have taken the newest one."""
        found: set[int] = set()

        def is_whole(notes: list[Note]) -> bool:
            nonlocal found
            found = current(notes)
            each = {pid: sum(note.pid == pid and note.steps != READY for note in notes[-4000:]) for pid in found}
            return len(found) == WORKERS and min(each.values()) >= WARM_STEPS

        self.await_true(is_whole, f"{WORKERS} workers train")
        return found

    def kill(self, worker: int) -> float:
        at = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        return at

    def interrupt(self) -> None:
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S_MAX)

    def stop(self) -> None:
        """Lets the script end by itself."""
        (self.out / "stop").touch()
        self._process.wait(END_S_MAX)


def current(notes: list[Note]) -> set[int]:
    """The workers that have taken one of the two newest steps."""
    newest = max((note.steps for note in notes[-100:]), default=0)
    return {note.pid for note in notes[-100:] if note.steps >= max(1, newest - 1)}


@contextmanager
def training(side: str, task: str, pause_ms: float) -> Iterator[Training]:
    with tempfile.TemporaryDirectory(prefix="shardyard-bench-") as name:
        folder = Path(name)
        out, log = folder / "out", folder / "log"
        out.mkdir()
        options = [str(out), "--task", task, "--workers", str(WORKERS), "--pause-ms", str(pause_ms)]
        command, environment = COMMANDS[side](folder, options)
        path = os.pathsep.join(filter(None, (str(BENCHMARKS), os.environ.get("PYTHONPATH"))))
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        made = Training(process, out, log)
        try:
            yield made
        finally:
            made.interrupt()
            if process.poll() is None:
                process.kill()
                process.wait()


def _shardyard(folder: Path, options: list[str]) -> tuple[list[str], Mapping[str, str]]:
    script = str(BENCHMARKS / "sides" / "shardyard" / "replaced.py")
    settings = {
        "yard.servers": 1,
        "yard.workers": WORKERS,
        "yard.coordinator_port": 0,
        "yard.state": folder / "state",
        "yard.restarts_max": 1_000,
        "yard.restarts_window_ms": 1_000,
        "job.strategy": "multi_worker_mirrored",
        "job.checkpoint.url": folder / "checkpoints",
    }
    named = {f"SHARDYARD__{name.upper().replace('.', '__')}": str(value) for name, value in settings.items()}
    return ["shardyard_launcher.cli", "run", script, *options], named


def _torchrun(folder: Path, options: list[str]) -> tuple[list[str], Mapping[str, str]]:
    del folder
    script = str(BENCHMARKS / "sides" / "torch_peers" / "replaced.py")
    how = ["--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=1000"]
    return ["torch.distributed.run", *how, script, *options, "--checkpoint-s", str(CHECKPOINT_S)], {}


COMMANDS: Mapping[str, Callable[[Path, list[str]], tuple[list[str], Mapping[str, str]]]] = {
    "shardyard": _shardyard,
    "torchrun": _torchrun,
}


# ---- what is measured


def replaced(task: str, kills: int, pause_ms: float) -> list[Figures]:
    """Kills workers one after the other."""
    found: list[Figures] = []
    with training("shardyard", task, pause_ms) as made:
        for number in range(kills):
            workers = made.await_whole()
            victim = sorted(workers)[number % WORKERS]
            at = made.kill(victim)
            known = {note.pid for note in made.notes}
            notes = made.await_true(
                lambda notes, known=known: any(note.pid not in known and note.steps != READY for note in notes),  # type: ignore[misc]
                "the worker was started again",
            )
            newcomer = next(note.pid for note in notes if note.pid not in known)
            found.append(figures_of(notes, at, workers - {victim}, newcomer))
            shown = ", ".join(f"{name} {value:.2f}" for name, value in found[-1].items())
            print(f"kill {number + 1}/{kills}, {task}: {shown}", flush=True)
        check_counts(made, settled=True)
    return found


def figures_of(notes: list[Note], at: float, survivors: set[int], newcomer: int) -> Figures:
    """`at`: when the worker was killed."""
    one = [note.at for note in notes if note.pid == min(survivors) and note.steps != READY]
    steps = [(end - begin, end) for begin, end in pairwise(one)]
    usual = statistics.median(each for each, _ in steps)
    ready = next(note.at for note in notes if note.pid == newcomer)
    first = next(note.at for note in notes if note.pid == newcomer and note.steps != READY)
    # a step whose gradients the dead worker had sent may still end at once
    _, replaced_at = max(each for each in steps if at < each[1] < ready)
    longest = max(each for each, end in steps if end >= ready and end - each <= first)
    return {"replace_s": replaced_at - at, "join_s": first - ready, "stop_s": longest - usual, "step_s": usual}


def goodput(side: str, seconds: float, kill_every_s: float | None) -> Figures:
    """Steps of the workers in so many seconds, those that were taken back not counted; from the first one with all
    workers on."""
    kills = 0
    with training(side, "mlp", PAUSE_MS) as made:
        made.await_whole()
        begin, first = time.monotonic(), max(note.steps for note in made.notes)
        while (passed := time.monotonic() - begin) < seconds:
            if kill_every_s and passed >= (kills + 0.5) * kill_every_s:
                kills += 1
                alive = [pid for pid in sorted(current(made.notes)) if Path(f"/proc/{pid}").exists()]
                if alive:
                    made.kill(alive[kills % len(alive)])
            time.sleep(LOOK_S)
        # steps that were taken again after a checkpoint count once
        last = made.notes[-1].steps
        lost, doubled = check_counts(made, settled=side == "shardyard")
    return {"steps": last - first, "kills": kills, "lost": lost, "doubled": doubled}


def check_counts(made: Training, *, settled: bool) -> tuple[float, float]:
    """How many samples were lost, and how many counted twice. `settled`: the script writes the counts at its end."""
    if settled:
        made.stop()
    else:
        made.interrupt()
    files = sorted(made.out.glob("*.json"))
    if not files:
        raise NotReplaced("no worker has written its counts")
    found = json.loads(files[0].read_text())
    return off(found["counts"], found["steps"], WORKERS)


def main() -> None:
    parser = options_of(__doc__, pairs=1)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured (all)")
    parser.add_argument("--kills", type=int, default=20, help="of workers (20)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="of goodput (both)")
    parser.add_argument("--seconds", type=float, default=180.0, help="length of a measurement of goodput (180)")
    options = parser.parse_args()
    raw: dict[str, list[Figures]] = {}
    found: dict[str, list[float]] = {}
    panels = []
    if "replace" in options.parts:
        raw["replace"] = replaced("mlp", options.kills, PAUSE_MS)
        found["replace_s"] = column(raw["replace"], "replace_s")
    if "join" in options.parts:
        raw["join"] = replaced("25m", options.kills, PAUSE_MS)
        found |= {f"{name}_25m": column(raw["join"], name) for name in ("replace_s", "join_s", "stop_s", "step_s")}
    if "goodput" in options.parts:
        for side in options.sides:
            calm = goodput(side, options.seconds / 3, None)
            fire = goodput(side, options.seconds, KILL_EVERY_S)
            raw[f"goodput, {side}"] = [calm, fire]
            found[f"goodput_{side}"] = [fire["steps"] / (3 * calm["steps"])]
            print(f"goodput, {side}: {found[f'goodput_{side}'][0]:.3f}: {calm}, {fire}", flush=True)
    for name, values in found.items():
        print(f"{name}: {spread(values)}")
    times = {name: values for name, values in found.items() if not name.startswith("goodput")}
    if times:
        bars = {f"shardyard, {name}": values for name, values in times.items()}
        panels.append(Panel("a worker is killed, and started again", "s", bars=bars))
    shares = {name.removeprefix("goodput_"): values for name, values in found.items() if name.startswith("goodput")}
    if shares:
        panels.append(Panel("steps with a kill every 20 s, over those without", "", bars=shares))
    report("replicas", raw, found, panels=panels, folder=options.figures)


if __name__ == "__main__":
    main()
