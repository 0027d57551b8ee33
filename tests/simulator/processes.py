"""The processes of a yard. Each runs what ships, and is started again at its place when it has ended."""

from __future__ import annotations

import functools

from shardyard.config.settings import (
    CheckpointSettings,
    ClipSettings,
    ConsistencySettings,
    DataSettings,
    JobSettings,
    MembershipSettings,
    SecuritySettings,
    Settings,
    WorkerSettings,
    YardSettings,
)
from shardyard.domain import errors
from shardyard.domain.consistency import ConsistencyMode, Durability
from shardyard_coordinator.service import process as coordinator_process
from shardyard_ps_server.service import process as server_process
from shardyard_worker.session.drain import Drained

from .script import train
from .state import COORDINATOR, JOB, Yard
from .substitutes import Event
from .world import MS, Process, current

STARTS_MAX = 60
EXPECTED = (
    errors.Unavailable,
    errors.StaleIncarnation,
    errors.CoordinatorLost,
    errors.ServerLost,
    errors.NotReady,
)
"""Errors by which a process may end while other processes die."""


def start(yard: Yard, place: str) -> None:
    process = yard.world.process(place)
    yard.places[place] = process
    yard.starts += 1
    if yard.starts > STARTS_MAX:
        yard.world.violations.append(f"processes were started {yard.starts} times")
    process.spawn(functools.partial(_main, yard, process, place), "main")
    yard.world.say(f"{process} starts")
    process.at_end[functools.partial(_ended, yard, process, place)] = None


def _main(yard: Yard, process: Process, place: str) -> None:
    how = "exited"
    try:
        match place.partition("-")[0]:
            case "coordinator":
                _coordinator(yard)
            case "server":
                _server(yard, f"{place}:7000")
            case _:
                train(yard, settings_of(yard))
    except Drained:
        how = "left in order"
        if not yard.plan.drains_workers:
            yard.world.violations.append(f"{process} has left, and nobody has told it to")
    except SystemExit as ended:  # `connect` ends a process that was started again after the end of its run
        if ended.code != 0 or not yard.jobs_finished:
            yard.world.violations.append(f"{process} ended with {ended.code} and had work to do")
    except EXPECTED as error:
        how = f"failed: {error.code}: {error.what}"
    except errors.StorageUnavailable as error:
        how = f"failed: {error.code}: {error.what}"
        if not yard.disk.has_refused:
            yard.world.violations.append(f"{process} ended by {how}")
    except errors.ShardyardError as error:
        how = f"failed: {error.code}: {error.what}"
        yard.world.violations.append(f"{process} ended by {how}")
    process.kill(how)
    yard.world.park()


def come_again(yard: Yard) -> Process:
    """Starts a worker once more, after the end of its run. The coordinator knows of the run from its records."""
    yard.places["coordinator"].kill("killed")
    process = yard.world.process("worker-0")

    def main() -> None:
        while True:
            try:
                train(yard, settings_of(yard))
                break
            except errors.StaleIncarnation as error:  # an agent would start it again
                yard.world.say(f"{process} begins anew: {error.what}")
            except (SystemExit, errors.JobFailed, errors.StorageUnavailable) as ended:
                yard.world.say(f"{process} has nothing left to do: {ended}")
                break
        process.kill("exited")
        yard.world.park()

    process.spawn(main, "main")
    yard.world.say(f"{process} starts")
    return process


def _ended(yard: Yard, process: Process, place: str) -> None:
    yard.world.say(f"{process} has ended: {process.exit}")
    if place in yard.finished or (place.startswith("worker") and yard.jobs_finished):
        return
    wait = yard.world.rng.randrange(50 * MS, 1_500 * MS)
    yard.world.call(wait, lambda: start(yard, place) if yard.places[place] is process else None)


def _coordinator(yard: Yard) -> None:
    stop = Event()
    coordinator_process.serve(
        bind=COORDINATOR,
        advertise=None,
        settings=settings_of(yard),
        state=yard.state,
        stop=stop,  # type: ignore[arg-type]
        ready=lambda _: None,
    )


def _server(yard: Yard, address: str) -> None:
    stop = Event()
    yard.told_to_leave[current().process] = stop.set
    server_process.serve(
        coordinator=COORDINATOR,
        bind=address,
        advertise=None,
        settings=settings_of(yard),
        stop=stop,  # type: ignore[arg-type]
        hurry=Event(),  # type: ignore[arg-type]
        ready=lambda _: None,
    )


def settings_of(yard: Yard) -> Settings:
    plan = yard.plan
    sync = plan.mode == "sync"
    return Settings(
        coordinator=COORDINATOR,
        yard=YardSettings(
            wal=str(yard.disk.root / "wal"),
            memory_bytes_max=int(plan.cold),
            cold=str(yard.disk.root.parent / "cold"),
        ),
        job=JobSettings(
            name=JOB,
            durability=Durability(plan.durability),
            seed=7,
            partitions=plan.partitions,
            consistency=ConsistencySettings(
                mode=_mode(yard),
                logical_ranks=plan.ranks if sync or plan.takes_steps else "auto",
                staleness=plan.staleness or 0,
                backup_workers=plan.backups,
                **({"steps": plan.local_steps} if plan.local_steps else {}),
            ),
            clip=ClipSettings(norm=plan.clipping.norm, value=plan.clipping.value),
            workers_expected=plan.workers,
            rank_grace_ms=500,
            idle_ms=15_000,
            data=DataSettings(batches_per_data_shard=plan.per_shard, poison_deaths=0),
            nonfinite_max=0,
            checkpoint=CheckpointSettings(url=str(yard.checkpoints), every_s=plan.every_s, keep=2),
        ),
        worker=WorkerSettings(
            device="cpu",
            threads=0,
            same_host="never",
            rpc_deadline_ms=1_500,
            exchange="delayed" if plan.window else "blocking",
        ),
        membership=MembershipSettings(heartbeat_ms=400, lease_ms=2_000, coordinator_grace_ms=20_000, drain_s=6),
        security=SecuritySettings(tls=plan.thief),
    )


def _mode(yard: Yard) -> ConsistencyMode:
    if yard.plan.hybrid:
        return ConsistencyMode.HYBRID
    if yard.plan.local_steps:
        return ConsistencyMode.LOCAL
    return ConsistencyMode(yard.plan.mode if yard.plan.staleness is None else "bounded")
