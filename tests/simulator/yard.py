"""One run of the simulator: a seed makes a yard, which trains while faults happen. Then no more faults happen, the job
must end in time, and the result is judged.

The processes are those that ship: `serve` of the coordinator and of the server, and a training script over
`shardyard.connect`'s job. gRPC's network and listener are replaced by simulated ones. A process that dies is started
again at its place, as the launcher and the agents do."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardyard.domain.ids import RunName
from shardyard.security.identity import Identity
from shardyard.security.passes import PassSigner
from shardyard.transport.tls import ServerSecurity
from shardyard_coordinator.service import identities as identities_of_yard
from shardyard_coordinator.service.journal import Journal

from . import identities
from .disk import SimulatedOs
from .faults import schedule
from .hand_overs import watch_hand_overs
from .judge import judge
from .network import SimulatedNetwork
from .paces import watch_paces
from .parallel import SHM, folder_name
from .plan import Plan, make_plan
from .processes import come_again, start
from .state import Ending, Yard, current_yard, running
from .substitutes import installed
from .watches import SimulatedJournal, Watch, watch_ledgers, watch_logs
from .world import MS, SECOND, Process, Stuck, current

PATIENCE = 90 * SECOND
"""How long a yard in which nothing fails any more may take to end."""
ROWS_IN_MEMORY = 2
"""Rows of each table that servers keep in memory if they have no memory for rows. A table has a few dozen rows."""


@contextlib.contextmanager
def simulation(level: int = logging.ERROR) -> Iterator[None]:
    """Simulates clock, threads, network and disk within the block. `run_plan` runs in it. Not reentrant. `level`: which
    log messages a trace has."""
    from shardyard.runtime.malloc import tune_malloc
    from shardyard.security.local import forget_yard, remember_yard
    from shardyard.transport.enrolment import own_credentials
    from shardyard.transport.grpc_client import GrpcNetwork
    from shardyard.transport.grpc_server import GrpcServer
    from shardyard.transport.local_listener import LocalListener
    from shardyard_ps_server.jit import optimizer_warmup
    from shardyard_ps_server.rows import partition_tables
    from shardyard_ps_server.tables import disk_tier
    from shardyard_worker.session.run_name import end_run, run_of

    optimizer_warmup.warm(optimizer_warmup.every_loop(("float64",)))
    partition_tables.warm()
    os_ = SimulatedOs()
    more = {
        id(GrpcNetwork): _network,
        id(GrpcServer): _Listener,
        id(LocalListener): _NoLocalSocket,
        id(own_credentials): identities.own_identity,
        id(identities_of_yard.security_of): identities.security_of,
        id(PassSigner): identities.Signer,
        id(remember_yard): lambda *_: None,
        id(forget_yard): lambda *_: None,
        id(Journal): SimulatedJournal,
        id(tune_malloc): lambda *_: True,
        id(run_of): lambda _: RunName(f"launch {current_yard().jobs_failed}"),
        id(end_run): lambda _: None,
    }
    watch, root = Watch(level), logging.getLogger("shardyard")
    former, propagates = root.level, root.propagate
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    undo = (
        watch_ledgers(),
        watch_logs(),
        watch_paces(lambda: current_yard().paces),
        watch_hand_overs(lambda: current_yard().hand_overs),
    )
    rows_least, disk_tier.ROWS_LEAST = disk_tier.ROWS_LEAST, ROWS_IN_MEMORY  # type: ignore[misc]
    root.addHandler(watch)
    root.setLevel(level)
    root.propagate = False
    _os.append(os_)
    gc.collect()
    gc.freeze()  # so that a collection looks only at what a run leaves
    try:
        with installed(os_, more):
            yield
    finally:
        _os.pop()
        gc.unfreeze()
        root.setLevel(former)
        root.propagate = propagates
        root.removeHandler(watch)
        for each in undo:
            each()
        disk_tier.ROWS_LEAST = rows_least  # type: ignore[misc]
        torch.set_num_threads(threads)


class _NoLocalSocket:
    """Processes of a simulation have none: their workers use the simulated network."""

    address = ""

    def __init__(self, *_: object, **__: object) -> None: ...

    def start(self) -> None: ...

    def revoke(self, holders: frozenset[str]) -> None: ...

    def stop(self) -> None: ...


_os: list[SimulatedOs] = []
PREFIX = folder_name(os.getpid())


def run_plan(plan: Plan, *, trace: Callable[[str], None] | None = None, judged: bool = True) -> Ending:
    """One run, within `simulation`."""
    os_ = _os[-1]
    undisturbed = prepare(plan) if judged else None
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHM if SHM.is_dir() else None))
    was = gc.isenabled()
    gc.disable()  # finalizers would run in whichever task is running
    yard = Yard(plan, folder, undisturbed, trace)
    running.append(yard)
    former, os_.disk = os_.disk, yard.disk
    try:
        with yard.disk.in_place():
            found = _run(yard, judged=judged)
            yard.world.close()
        return found
    finally:
        os_.disk = former
        running.pop()
        shutil.rmtree(folder, ignore_errors=True)
        del yard
        gc.collect()
        if was:
            gc.enable()


def run_seed(seed: int, kind: str, *, trace: Callable[[str], None] | None = None) -> dict[str, Any]:
    """The result of a seed, in this process and within `simulation`."""
    begun = time.process_time()
    told = dataclasses.asdict(run_plan(make_plan(seed, kind), trace=trace))
    plan = told.pop("plan")
    del told["values"], told["versions"], told["pushes"]
    mode = f"{plan['mode']}-{plan['durability']}"
    return {"seed": seed, "kind": kind, "mode": mode, "cpu_ms": round(1_000 * (time.process_time() - begun)), **told}


def _run(yard: Yard, *, judged: bool) -> Ending:
    world = yard.world
    standing = ""
    try:
        for place in yard.hosts:
            world.call(world.rng.randrange(300 * MS), functools.partial(start, yard, place))
        schedule(yard)
        world.run(functools.partial(_is_done, yard), limit=yard.plan.calm_at + PATIENCE)
    except Stuck as stuck:
        standing = world.standing()
        world.violations.append(f"{stuck}: the yard is not done")
    if judged and not world.violations:
        judge(yard)
        _judge_the_end(yard)
    outcome = Ending(
        yard.plan,
        list(world.violations),
        world.digest,
        world.now / SECOND,
        world.switches,
        yard.wires.calls,
        yard.starts,
        next(iter(yard.finished.values()), {}),
        yard.versions,
        yard.pushes,
        standing,
        yard.happened,
    )
    _end(yard.places.values())
    _end(yard.strangers)
    return outcome


def _end(processes: Iterable[Process]) -> None:
    for process in processes:
        if process.alive:
            process.kill("the end")


def _judge_the_end(yard: Yard) -> None:
    """Checks that a worker that comes again finds its run finished, and begins no other."""
    _end(yard.strangers)
    world, again = yard.world, come_again(yard)
    try:
        world.run(lambda: not again.alive or bool(yard.unfinished), limit=world.now + PATIENCE)
    except Stuck as stuck:
        world.violations.append(f"{stuck}: a worker that came again after the end of its run")
    if yard.unfinished:
        world.violations.append("a worker that came again has begun a run that was finished")


def _is_done(yard: Yard) -> bool:
    if yard.world.violations:
        return True
    if not yard.jobs_finished or yard.unfinished:
        return False
    return all(not p.alive for place, p in yard.places.items() if place.startswith("worker"))


@functools.cache
def _undisturbed(plan: Plan) -> Ending:
    found = run_plan(plan, judged=False)
    assert not found.red, found.violations
    return found


def prepare(plan: Plan) -> Ending | None:
    """Does the work without faults with which a run is compared, if that is needed and was not done before."""
    return None if plan.counts else _undisturbed(plan.undisturbed)


class _Listener:
    def __init__(
        self,
        bind: str,
        services: Any,
        security: ServerSecurity | None,
        *,
        threads: int = 64,
        vital: Collection[str] = (),
    ) -> None:
        self.address = bind
        self.port = int(bind.rpartition(":")[2])
        self._services = services
        self._door = None if security is None else security.door
        self._vital = vital

    def start(self) -> None:
        current_yard().wires.listen(self.address, self._services, self._door, self._vital)

    def set_ready(self, *, ready: bool) -> None:
        """Does nothing: readiness is not simulated."""

    def revoke(self, holders: frozenset[str]) -> None:
        listener = current_yard().wires.at(self.address)
        if listener is not None:
            listener.revoke(holders)

    def stop(self, grace_ms: int = 500) -> None:
        current_yard().wires.leave(self.address)


def _network(identity: Identity | None) -> SimulatedNetwork:
    """The credentials of a simulated process are its identity."""
    return SimulatedNetwork(current_yard().wires, current().process, identity)
