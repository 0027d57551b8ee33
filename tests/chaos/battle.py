"""A schedule, played against a yard of real processes that trains the digits.

Owns: the yard's places, links and disks, when each fault begins and ends. Invariants: a fault begins when so much of
the job is done as the schedule says; whoever dies is started again; every wait is bounded; nothing is left. Must not
know: what a right end is.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardyard.domain import errors
from shardyard.domain.limits import MIB
from shardyard.domain.replica_groups import Strategy
from shardyard.security.authority import Authority
from shardyard.security.issuing import issue_local
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from tests.chaos.places import SCRIPTS, Place, SmallDisk, tail
from tests.chaos.proxy import Proxy, Way
from tests.chaos.schedules import (
    AGENT,
    COORDINATOR,
    LEASE_S,
    Crash,
    Cut,
    Fault,
    Full,
    Hold,
    Kill,
    Leave,
    Plan,
    Schedule,
    Sever,
    Slow,
    Stop,
)
from tests.support.identities import coordinator_at

SAMPLES = 640
BATCH = 16
EPOCHS = 3
BATCHES = EPOCHS * SAMPLES // BATCH
BLOCK_BYTES = 1_024
PAUSE_MS = 30
JOB = "digits"
CUTS = {2: "between", 3: "between last", 4: "between judge.0 last"}
"""Where the stages of a pipeline begin, so that each has a count of the samples; where it can."""
LOOK_S = 0.02
ASK_S = 0.3
BEGIN_S = 90.0
PLAY_S = 120.0
FINISH_S = 30.0
DISKS = {"checkpoints": 4 * MIB, "journal": 2 * MIB, "wal": 32 * MIB}
PORTS = range(18_000, 28_000)
"""Below those that the system gives to callers, so that a dead process's port is still free for the next."""


def job_settings(plan: Plan) -> dict[str, object]:
    """In force wherever this plan's job is run."""
    parts: dict[str, object] = {}
    if plan.strategy is Strategy.PIPELINE:
        stages = plan.parts * (2 if plan.schedule.is_looped else 1)
        parts = {"job.pipeline.stages": plan.parts, "job.pipeline.cut": CUTS[stages]}
        parts["job.pipeline.schedule"] = plan.schedule.value
    elif plan.strategy is Strategy.TENSOR:
        parts = {"job.tensor.size": plan.parts}
    elif plan.strategy is Strategy.SHARDED and plan.parts > 1:
        parts = {"job.sharded.size": plan.parts}
    if plan.strategy.is_spread:
        parts["job.between"] = "parameter_server" if plan.pushes else "all_reduce"
    return {
        "job.strategy": plan.strategy.value,
        "job.durability": "wal" if plan.wal else "checkpoint",
        "job.partitions": plan.partitions,
        "job.block_bytes": BLOCK_BYTES,
        "job.consistency.mode": "hybrid" if plan.hybrid else "sync" if plan.sync else "async",
        "job.consistency.logical_ranks": plan.logical_ranks,
        "job.data.batches_per_data_shard": plan.batches_per_data_shard,
        "job.checkpoint.every_steps": plan.every_steps,
        "job.rank_grace_ms": 500,
        **parts,
    }


def script_arguments(plan: Plan, out: Path) -> list[str]:
    parts = plan.logical_ranks if plan.sync else 1
    numbers = {"samples": SAMPLES, "batch-size": BATCH, "epochs": EPOCHS, "parts": parts}
    options = [text for name, number in numbers.items() for text in (f"--{name}", str(number))]
    chosen = {"tables": plan.tables, "forgetful": plan.forgetful, "look-ahead": plan.looks_ahead}
    chosen |= {"train-step": plan.strategy.is_spread, "two-machines": plan.two_machines}
    chosen |= {"double": plan.strategy.uses_groups, "plain": plan.is_plain}
    options += [f"--{name}" for name in chosen if chosen[name]]
    return [str(SCRIPTS / "digits.py"), str(out), *options]


def as_environment(settings: Mapping[str, object]) -> dict[str, str]:
    return {"SHARDYARD__" + path.upper().replace(".", "__"): str(value) for path, value in settings.items()}


@dataclass(frozen=True)
class Outcome:
    """What is there when all workers are done. `results`: of the scripts that ended well. `computed`: how often each
    sample was, by whomever."""

    results: list[dict[str, object]]
    computed: Counter[int]
    batches_computed: int
    checkpoints: str
    job_state: int
    codes: dict[str, int | None]
    begun: list[str]
    """Faults that took place, with the time in seconds since the beginning."""
    endings: list[str]
    """How processes ended that nobody killed."""
    seconds: float


class Battlefield:
    """The yard of a plan: processes, links and disks, in `folder`. `more`: settings of the job beside the plan's."""

    def __init__(self, plan: Plan, folder: Path, stack: ExitStack, more: dict[str, object] | None = None) -> None:
        self.plan = plan
        self.out = folder / "out"
        self.out.mkdir(parents=True)
        self._gate = folder / "gate"
        self._logs = folder / "logs"
        self._logs.mkdir()
        self._more = more or {}
        self._state: int = wire.JOB_STATE_UNSPECIFIED
        self._asked_s = 0.0
        self.disks = {name: SmallDisk(folder / name, size) for name, size in DISKS.items()}
        self._identities = folder / "identity"
        issue_local(Authority(self._identities / "authority"), self._identities)
        for disk in self.disks.values():
            stack.callback(disk.close)
        ports = free_ports(1 + plan.servers)
        self._address = f"127.0.0.1:{ports[0]}"
        self._bound = dict(zip(plan.server_names, (f"127.0.0.1:{port}" for port in ports[1:]), strict=True))
        targets = {**self._bound, **{f"up-{member}": self._address for member in plan.members}}
        self.links = {name: stack.enter_context(Proxy(target)) for name, target in targets.items()}
        addresses = (self._address, *self._bound.values(), *(link.address for link in self.links.values()))
        self._ports = {int(address.rpartition(":")[2]) for address in addresses}
        self.places = {name: self._place(name) for name in (COORDINATOR, *plan.members)}
        stack.callback(self._end_all)

    # ---- the course of it

    def begin(self) -> None:
        """Returns when the job may be joined."""
        for place in self.places.values():
            place.start()
        until = time.monotonic() + BEGIN_S
        while not all(self.places[name].is_ready for name in (COORDINATOR, *self.plan.server_names)):
            self.tend()
            assert time.monotonic() < until, f"the yard is not ready\n{self.tails()}"
            time.sleep(LOOK_S)
        self._gate.touch()

    def tend(self) -> None:
        for place in self.places.values():
            place.tend()

    @property
    def is_done(self) -> bool:
        """All workers are. Once the job is finished nobody waits for the others: who joins then begins another run."""
        workers = [self.places[name] for name in (AGENT, *self.plan.worker_names)]
        if any(worker.is_done for worker in workers) and self.job_state() == wire.JOB_STATE_FINISHED:
            for worker in workers:
                worker.give_up()
        return all(worker.is_done for worker in workers)

    def job_state(self) -> int:
        """Of the job, not of a later run of its name; unspecified where nobody can say. Asked now and then."""
        if time.monotonic() >= self._asked_s + ASK_S:
            self._asked_s = time.monotonic()
            self._state = self._ask_state()
        return self._state

    def _ask_state(self) -> int:
        peer = coordinator_at(self._address)
        try:
            jobs = peer.call(methods.STATUS, wire.StatusRequest(), timeout_ms=1_000).jobs
        except (errors.Unavailable, errors.NotReady):
            return wire.JOB_STATE_UNSPECIFIED
        finally:
            peer.close()
        return jobs[0].state if jobs else wire.JOB_STATE_UNSPECIFIED

    @property
    def batches_computed(self) -> int:
        return len(self._computed())

    def await_finished(self) -> int:
        """The job's state when it has ended, or is not about to."""
        until = time.monotonic() + FINISH_S
        while self.job_state() != wire.JOB_STATE_FINISHED and time.monotonic() < until:
            self.tend()
            time.sleep(LOOK_S)
        return self.job_state()

    def collect(self) -> tuple[list[dict[str, object]], Counter[int]]:
        results = [json.loads(path.read_text()) for path in sorted(self.out.glob("*.json"))]
        return results, Counter(sample for _, samples in self._computed() for sample in samples)

    def stop(self) -> dict[str, int | None]:
        """Ends all services in good order; their exit codes."""
        names = (AGENT, *self.plan.server_names, COORDINATOR)
        return {name: self.places[name].end() for name in names}

    def tails(self) -> str:
        """The end of every log."""
        logs = [log for place in self.places.values() for log in place.logs]
        return "\n".join(f"---- {log.name}\n{tail(log)}" for log in logs)

    def texts(self) -> Iterator[tuple[str, str]]:
        """Every log by name."""
        for place in self.places.values():
            for log in place.logs:
                yield log.name, log.read_text("utf-8", "replace")

    # ---- faults

    def inflict(self, fault: Fault) -> list[tuple[float, Callable[[], None]]]:
        """Begins it; gives what is to be done after so many seconds."""
        match fault:
            case Kill(places, down_s):
                for name in places:
                    self.places[name].kill(down_s)
            case Stop(name, for_s):
                self.places[name].pause()
                return [(for_s, self.places[name].resume)]
            case Leave(name, back_s):
                self.places[name].leave(back_s)
            case Crash(name, failpoint, passing):
                self.places[name].kill(0.0, f"{failpoint}=exit@{passing}")
            case Cut(link, replies, nbytes):
                self.links[link].cut_after(Way.REPLIES if replies else Way.REQUESTS, nbytes)
            case Sever(name):
                self.places[name].cut_connections(self._ports)
            case Hold(link, requests, replies, for_s, resets):
                proxy = self.links[link]
                proxy.hold(*(way for way, held in ((Way.REQUESTS, requests), (Way.REPLIES, replies)) if held))
                return [(for_s, proxy.cut_now if resets else proxy.let_go), (for_s, proxy.let_go)]
            case Slow(link, delay_ms, for_s):
                self.links[link].slow(delay_ms)
                return [(for_s, self.links[link].let_go)]
            case Full(name, for_s):
                writers = {"journal": (COORDINATOR,), "wal": self.plan.server_names}.get(
                    name, (COORDINATOR, *self.plan.server_names)
                )
                self.disks[name].fill(pid for writer in writers if (pid := self.places[writer].pid) is not None)
                return [(for_s, self.disks[name].free)]
        return []

    # ---- inside

    def _computed(self) -> list[tuple[int, list[int]]]:
        try:
            lines = (self.out / "computed").read_bytes().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def _place(self, name: str) -> Place:
        plan = self.plan
        common = {
            "membership.heartbeat_ms": 250,
            "membership.lease_ms": round(LEASE_S * 1_000),
            "worker.rpc_deadline_ms": 2_000,
            "worker.same_host": "auto" if plan.same_host else "never",
            "worker.exchange": "delayed" if plan.window else "overlapped" if plan.overlap else "blocking",
            "yard.restarts_max": 20,
            "yard.wal": self.disks["wal"].folder,
            "job.checkpoint.url": self.disks["checkpoints"].folder,
            "job.workers_expected": plan.workers_expected,
            **job_settings(plan),
            **self._more,
        }
        environment = as_environment(common) | {"SHARDYARD_JOB": JOB}
        script = [*script_arguments(plan, self.out), "--pause-ms", str(PAUSE_MS), "--gate", str(self._gate)]
        tied = ["--ends-with", str(os.getpid())]
        if name == COORDINATOR:
            arguments = [name, *tied, "--bind", self._address, "--state", str(self.disks["journal"].folder)]
            environment = as_environment({key: common[key] for key in common if not key.startswith("job.")})
        elif name in self._bound:
            arguments = ["server", *tied, "--bind", self._bound[name], "--advertise", self.links[name].address]
        elif name == AGENT:
            arguments = [name, *tied, "--bind", "127.0.0.1:0", "--workers", "1", "--", *script]
        else:
            arguments = script
        role = COORDINATOR if name == COORDINATOR else AGENT if name == AGENT else "worker"
        if name in self._bound:
            role = "server"
        security = {"security.identity": self._identities / role}
        if name == COORDINATOR:
            security["security.authority"] = self._identities / "authority"
        else:
            environment["SHARDYARD_COORDINATOR"] = self.links[f"up-{name}"].address
        environment |= as_environment(security)
        return Place(name, arguments, folder=self._logs, environment=environment, jumping=name in plan.jumping)

    def _end_all(self) -> None:
        for place in reversed(self.places.values()):
            place.give_up()


def play(schedule: Schedule, folder: Path, *, tell: Callable[[str], None] = print) -> Outcome:
    """Plays it, and ends everything. Raises AssertionError where the job does not come to its end in time."""
    begun_s = time.monotonic()
    begun: list[str] = []

    def note(what: str) -> None:
        begun.append(f"{time.monotonic() - begun_s:5.1f} s  {what}")
        tell(begun[-1])

    with battlefield(schedule.plan, folder) as field:
        field.begin()
        note("the job begins")
        due = list(schedule.faults)
        ends: list[tuple[float, str, Callable[[], None]]] = []
        until = time.monotonic() + PLAY_S
        while not field.is_done:
            field.tend()
            now = time.monotonic()
            for end in [each for each in ends if each[0] <= now]:
                ends.remove(end)
                note(f"ends: {end[1]}")
                end[2]()
            if due and field.batches_computed >= due[0].at * BATCHES * schedule.plan.parts:
                timed = due.pop(0)
                note(f"{timed}")
                ends += [(now + after_s, str(timed.fault), act) for after_s, act in field.inflict(timed.fault)]
            assert now < until, f"the job does not end\n{field.tails()}"
            time.sleep(LOOK_S)
        note("all workers are done")
        for _, _, act in ends:
            act()
        state = field.await_finished()
        note("the job is finished")
        codes = field.stop()
        results, computed = field.collect()
        kept = folder / "kept"  # the small disk goes with the yard
        shutil.copytree(field.disks["checkpoints"].folder, kept)
        endings = [ending for place in field.places.values() for ending in place.endings]
        return Outcome(
            results,
            computed,
            field.batches_computed,
            str(kept),
            state,
            codes,
            begun,
            endings,
            time.monotonic() - begun_s,
        )


@contextmanager
def battlefield(plan: Plan, folder: Path, more: dict[str, object] | None = None) -> Iterator[Battlefield]:
    with ExitStack() as stack:
        yield Battlefield(plan, folder, stack, more)


def free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")
