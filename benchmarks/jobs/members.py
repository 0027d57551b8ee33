"""Thousands of members: whether the coordinator answers heartbeats, status and leases of all of them in time.

    make bench BENCH=members            (with options: ARGS="--seconds 10")

A coordinator with 2,000 members in one job, each on a connection of its own, with the default lease of 4 s and a
heartbeat every 0.5 s; a few processes send for all of them. No member may lose its lease. Then the machine of the
coordinator alone, in this process, with 10,000 members: `core_10000` is how much of one core their heartbeats, the
ticks of the machine and a status every two seconds need.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from harness.measuring.pairs import Figures, significant
from harness.measuring.report import Panel, options_of, report
from harness.processes.sides import Side, shardyard_side
from shardyard.config.settings import JobSettings, MembershipSettings
from shardyard.domain.ids import MemberRole, Term
from shardyard.transport.grpc_client import GrpcNetwork
from shardyard.wire import methods
from shardyard.wire.v1 import coordinator_pb2 as coordinator
from shardyard_coordinator.core import events
from shardyard_coordinator.machine.machine import Machine
from shardyard_coordinator.members.membership import Registration
from shardyard_coordinator.members.progress import Report
from shardyard_coordinator.service.service import TICK_MS
from shardyard_coordinator.service.status import describe

PROCESSES = 4
MEMBERS, SIMULATED = 2_000, 10_000
STATUS_EVERY_S = 2.0
CALL_MS = 30_000
ROUNDS = 3


class MembersLost(Exception):
    """Members were declared dead although they sent heartbeats."""


def measure_yard(seconds: float) -> Figures:
    arguments = ("--members", str(MEMBERS // PROCESSES))
    with shardyard_side("shardyard.members", *arguments, workers=PROCESSES, tls=False) as side:
        side.ask("enter")
        live(side, MembershipSettings().lease_ms / 1_000)
        return live(side, seconds)


def live(side: Side, seconds: float) -> Figures:
    """Lets the members live for so long. Raises MembersLost."""
    measured = side.measure("live", seconds=seconds)
    lost = [text for answer in measured.answers for text in answer["lost"]]
    if lost:
        raise MembersLost("\n".join(lost))
    peer = GrpcNetwork(None).connect(side.coordinator, name="the coordinator")
    begin = time.perf_counter()
    status = peer.call(methods.STATUS, coordinator.StatusRequest(), timeout_ms=CALL_MS)
    status_ms = 1e3 * (time.perf_counter() - begin)
    peer.close()
    workers = sum(member.role == coordinator.ROLE_WORKER for member in status.members)
    if workers != MEMBERS:
        raise MembersLost(f"{workers} of {MEMBERS} workers are members")
    each_ms = np.concatenate([answer["each_s"] for answer in measured.answers]) * 1e3
    p50, p99 = np.percentile(each_ms, [50, 99])
    return {
        "heartbeats_per_s": len(each_ms) / seconds,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "max_ms": float(each_ms.max()),
        "status_ms": status_ms,
        "service_cpu": measured.service_cpu_s / seconds,
    }


def measure_machine() -> Figures:
    """The machine's work for each kind of event, with all members in one job."""
    membership = MembershipSettings()
    machine = Machine(term=Term(1), lease_ms=membership.lease_ms, now_ms=0)
    settings = JobSettings(name="members")
    for number in range(SIMULATED):
        given = Registration(MemberRole.WORKER, "", 1, "", "host", number)
        machine.handle(events.MemberRegistered(given), 0)
    members = [member.incarnation for member in machine.members]

    def each(events_: list[events.Event]) -> float:
        begin = time.process_time()
        for event in events_:
            machine.handle(event, 0)
        return (time.process_time() - begin) / len(events_) * 1e6

    joined_us = each([events.JobJoined(member, settings.name, settings) for member in members])
    beats = [events.HeartbeatReceived(member, Report()) for member in members]
    beat_us = min(each(list(beats)) for _ in range(ROUNDS))
    tick_us = min(each([events.Ticked()] * 10) for _ in range(ROUNDS))
    begin = time.process_time()
    describe(machine, 0)
    status_us = (time.process_time() - begin) * 1e6
    per_s = {
        "beat": SIMULATED * 1_000 / membership.heartbeat_every_ms,
        "tick": 1_000 / TICK_MS,
        "status": 1 / STATUS_EVERY_S,
    }
    core = (per_s["beat"] * beat_us + per_s["tick"] * tick_us + per_s["status"] * status_us) / 1e6
    return {"join_us": joined_us, "beat_us": beat_us, "tick_us": tick_us, "status_us": status_us, "core": core}


def show(name: str, measure: Callable[[], Figures]) -> Figures:
    found = measure()
    print(f"{name}: " + ", ".join(f"{key} {significant(value):g}" for key, value in found.items()), flush=True)
    return found


def main() -> None:
    parser = options_of(__doc__, pairs=1)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long the members live (20)")
    options = parser.parse_args()
    machine = show(f"{SIMULATED} simulated members", measure_machine)
    yard = show(f"{MEMBERS} members", lambda: measure_yard(options.seconds))
    raw = {"machine": machine, "yard": yard}
    found = {
        "core_10000": [machine["core"]],
        "heartbeat_p99_ms_2000": [yard["p99_ms"]],
        "status_ms_2000": [yard["status_ms"]],
    }
    panels = [Panel("a heartbeat among 2,000 members", "ms", bars={key: [yard[key]] for key in ("p50_ms", "p99_ms")})]
    report("members", raw, found, panels=panels, folder=options.figures)


if __name__ == "__main__":
    main()
