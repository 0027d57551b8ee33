"""The faults of a run, the end of all faults, and what comes from other machines: people, and a thief."""

from __future__ import annotations

import functools
from collections.abc import Callable

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as wire

from .identities import identity_of
from .network import SimulatedNetwork, SimulatedPeer
from .plan import TO_STEPS
from .processes import EXPECTED
from .state import COORDINATOR, JOB, Yard
from .thief import VICTIM, steal
from .world import MS, SECOND, current

SWITCH_TRIES = 20


def schedule(yard: Yard) -> None:
    if yard.plan.switches:
        _spawn(yard, "person-0", functools.partial(_switch, yard))
    if yard.plan.thief:
        _spawn(yard, "thief-0", functools.partial(steal, yard))
    for at, kind in yard.plan.faults:
        yard.world.call(at, functools.partial(_fault, yard, kind))
    yard.world.call(yard.plan.calm_at, functools.partial(_calm, yard))


def _spawn(yard: Yard, host: str, work: Callable[[], None]) -> None:
    process = yard.world.process(host)
    yard.strangers.append(process)
    process.spawn(work, "main")


def _fault(yard: Yard, kind: str) -> None:
    world, rng = yard.world, yard.world.rng
    what, _, role = kind.partition(" ")
    alive = [p for p in yard.places.values() if p.alive and p.host.startswith(role)]
    yard.happened.append(kind)
    match what:
        case "kill" if alive:
            victim = rng.choice(alive)
            world.say(f"FAULT kill {victim}")
            victim.kill("killed")
        case "leave" if alive:
            victim = rng.choice(alive)
            world.say(f"FAULT {victim} is told to leave")
            if victim in yard.told_to_leave:
                victim.spawn(yard.told_to_leave[victim], "signal")
        case "drain" if alive:
            victim = rng.choice(alive)
            world.say(f"FAULT a person drains {victim}")
            if victim in yard.members:
                drain = functools.partial(_drain, yard, yard.members[victim])
                world.process("person-1").spawn(drain, "main")
        case "freeze" if alive:
            victim = rng.choice(alive)
            span = rng.choice((rng.randrange(600 * MS), rng.randrange(8 * SECOND)))
            world.say(f"FAULT freeze {victim} for {span / SECOND:.3f} s")
            victim.freeze()
            world.call(span, victim.thaw)
        case "dead":
            hosts = yard.hosts
            one = rng.choice(hosts)
            ways = {(one, other) for other in hosts} | {(other, one) for other in hosts}
            if rng.random() < 0.5:
                other = rng.choice([host for host in hosts if host != one])
                ways = {(one, other)}
            world.say(f"FAULT dead links {sorted(ways)}")
            span = rng.randrange(4 * SECOND)
            for way in sorted(ways):
                yard.wires.kill_link(*way)
                world.call(span, functools.partial(yard.wires.mend_link, *way))
        case "bad":
            world.say("FAULT the disk refuses now and then")
            yard.disk.refusing = rng.choice((0.05, 0.5))
            world.call(rng.randrange(4 * SECOND), functools.partial(setattr, yard.disk, "refusing", 0.0))
        case "full":
            span = rng.randrange(6 * SECOND)
            world.say(f"FAULT the journal's disk is full for {span / SECOND:.3f} s")
            yard.journal_full_until = max(yard.journal_full_until, world.now + span)
        case "power":
            world.say("FAULT power failure")
            for process in [p for p in yard.places.values() if p.alive]:
                process.kill("power failure")
            yard.disk.fail_power()


def _coordinator(yard: Yard) -> SimulatedPeer:
    """The coordinator, for a person."""
    network = SimulatedNetwork(yard.wires, current().process, identity_of(yard, current().process.host))
    return network.connect(COORDINATOR, name="coordinator", unavailable=errors.CoordinatorUnavailable)


def _drain(yard: Yard, worker: Incarnation) -> None:
    """As `shardyard drain` does, once."""
    peer = _coordinator(yard)
    try:
        peer.call(methods.DRAIN, wire.DrainRequest(member=f"worker-{worker}"), timeout_ms=1_000)
    except (*EXPECTED, errors.NotFound) as error:
        yard.world.say(f"worker {worker} is not drained: {error.what}")
    finally:
        peer.close()


def _calm(yard: Yard) -> None:
    yard.world.say("CALM")
    yard.world.calm = True
    yard.disk.refusing = 0.0
    yard.journal_full_until = 0
    for way in sorted(yard.wires.dead_links):
        yard.wires.mend_link(*way)
    for process in yard.places.values():
        if process.alive and process.frozen:
            process.thaw()
    if yard.plan.thief and not yard.jobs_finished:
        _spawn(yard, "person-2", functools.partial(_revoke, yard))


def _revoke(yard: Yard) -> None:
    """A person gives the worker another certificate, starts it anew, and revokes the stolen one."""
    stolen = identity_of(yard, VICTIM)
    assert stolen is not None
    yard.certificates[VICTIM] = f"{VICTIM}.again"
    yard.places[VICTIM].kill("its certificate was stolen")
    peer = _coordinator(yard)
    while yard.revoked_at is None:
        try:
            peer.call(methods.REVOKE_IDENTITY, wire.RevokeIdentityRequest(holder=stolen.holder), timeout_ms=1_000)
            yard.revoked_at = yard.world.now
            yard.happened.append("revoked")
            yard.world.say(f"{stolen} is revoked")
        except EXPECTED as error:
            yard.world.say(f"{stolen} is not revoked yet: {error.what}")
            yard.world.pause(300 * MS)
    peer.close()


def _switch(yard: Yard) -> None:
    """A person on another machine asks for each switch, and asks again after each refusal, SWITCH_TRIES times."""
    for at, bound in yard.plan.switches:
        yard.world.pause(max(0, at - yard.world.now))
        if bound == TO_STEPS:
            request = wire.SwitchConsistencyRequest(job_name=JOB, mode=wire.CONSISTENCY_MODE_SYNC)
        else:
            mode = wire.CONSISTENCY_MODE_ASYNC if bound is None else wire.CONSISTENCY_MODE_BOUNDED
            request = wire.SwitchConsistencyRequest(job_name=JOB, mode=mode, staleness=bound)
        for _ in range(SWITCH_TRIES):
            peer = _coordinator(yard)
            try:
                peer.call(methods.SWITCH_CONSISTENCY, request, timeout_ms=1_000)
                break
            except (*EXPECTED, errors.NotFound, errors.InvalidRequest) as error:
                yard.world.say(f"no switch to {bound} now: {error.what}")
            finally:
                peer.close()
            yard.world.pause(300 * MS)
