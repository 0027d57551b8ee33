"""The launches of a yard's agents: which there are, which one a person means, what it has printed.

Must not know: what is shown of a launch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation
from shardyard.runtime.waits import WaitRegistry
from shardyard.transport.interfaces import Network
from shardyard.wire import methods
from shardyard.wire.v1 import agent_pb2 as agent_wire
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_launcher.terminal.coordinator_client import CoordinatorClient
from shardyard_launcher.terminal.member_answers import describe_members
from shardyard_worker.agent.launch_folders import LaunchFolders
from shardyard_worker.agent.output_files import read_output
from shardyard_worker.agent.service import describe, output_of, processes_meant

ASK_TIMEOUT_MS: Final = 1_500
READ_TIMEOUT_MS: Final = 60_000
FOLLOW_TIMEOUT_MS: Final = 30 * 24 * 3_600_000
END_GRACE_MS: Final = 5_000
LATE_MS: Final = 10_000
MOMENT_S_MAX: Final = 1e11
NAMED_MAX: Final = 8
"""Launches that an error names."""

Described = agent_wire.DescribeAgentReply | errors.ShardyardError


@dataclass(frozen=True)
class FoundLaunch:
    """A launch, and the agent that knows it."""

    agent: wire.MemberStatus
    described: agent_wire.DescribedLaunch

    @property
    def number(self) -> int:
        return self.described.launch

    @property
    def runs(self) -> bool:
        return not self.described.ended

    @property
    def started_s(self) -> float:
        """In seconds since 1970; 0 if that is not known."""
        return moment_of(self.described.started_s)

    @property
    def ended_s(self) -> float:
        return moment_of(self.described.ended_s)

    @property
    def title(self) -> str:
        """For example `launch 482913 of train.py on gamma`."""
        return f"launch {self.number} of {Path(self.described.script).name} on {self.agent.host}"


def moment_of(time_s: float) -> float:
    """What a peer says is a time, if it can be one."""
    return time_s if 0.0 <= time_s <= MOMENT_S_MAX else 0.0


def end_launch(network: Network, found: FoundLaunch) -> bool:
    """Ends the processes of a launch: SIGTERM, then SIGKILL after END_GRACE_MS. Returns whether they are gone. Raises
    what the agent answers."""
    peer = network.connect(found.agent.address, name="agent")
    wait_registry = WaitRegistry()
    try:
        with wait_registry.over(lambda: f"the {peer.name} to stop launch {found.number}"):
            order = agent_wire.StopRequest(launch=found.number, grace_ms=END_GRACE_MS)
            peer.call(methods.STOP, order, timeout_ms=ASK_TIMEOUT_MS)
            watch = agent_wire.WatchRequest(launch=found.number, next_event=found.described.next_event)
            events = peer.receive(methods.WATCH, watch, timeout_ms=END_GRACE_MS + LATE_MS)
            return any(event.HasField("ended") for event in events)
    except errors.DeadlineExceeded:
        return False
    finally:
        wait_registry.close()
        peer.close()


def read_output_of(
    network: Network, found: FoundLaunch, *, process: int | None, tail: int | None, follow: bool
) -> Iterator[Sequence[agent_wire.ProcessOutput]]:
    """What a launch has printed, in batches; with `follow` also what it prints until it has ended. Raises what the
    agent answers."""
    request = agent_wire.ReadOutputRequest(launch=found.number, process=process, tail=tail, follow=follow)
    peer = network.connect(found.agent.address, name="agent")
    wait_registry = WaitRegistry()
    try:
        batches = peer.receive(
            methods.READ_OUTPUT, request, timeout_ms=FOLLOW_TIMEOUT_MS if follow else READ_TIMEOUT_MS
        )
        while True:
            # one that is followed may be silent
            with nullcontext() if follow else wait_registry.over(lambda: f"the {peer.name} to read its files"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch.lines
    finally:
        wait_registry.close()
        peer.close()


# ---- a folder whose agent is gone


def has_launches(state: Path) -> bool:
    return bool(LaunchFolders(state).records())


def find_launch_in(state: Path, wanted: str | None) -> FoundLaunch:
    """As `find_launch`, among those that an agent has left in its state folder."""
    here = wire.MemberStatus(role=wire.ROLE_AGENT, host=os.uname().nodename)
    records = LaunchFolders(state).records()
    return choose([FoundLaunch(here, describe(record, None)) for _, record in records], wanted)


def read_kept(
    state: Path, found: FoundLaunch, *, process: int | None, tail: int | None
) -> Iterator[Sequence[agent_wire.ProcessOutput]]:
    """As `read_output_of`, from an agent's state folder. Raises InvalidRequest."""
    folder = LaunchFolders(state).find(found.number)
    processes = processes_meant(found.number, found.described.workers, process)
    if folder is not None:
        for batch in read_output(folder.path, processes, tail=tail, running=None, pause_s=0.0):
            yield [output_of(line) for line in batch]


# ---- of agents


def ask_agents(network: Network, members: list[wire.MemberStatus]) -> dict[int, Described]:
    """What each agent among the members says of its launches, or why it says nothing, by incarnation."""
    agents = [member for member in members if member.role == wire.ROLE_AGENT and member.address]
    return describe_members(network, agents, "agent", methods.DESCRIBE_AGENT, agent_wire.DescribeAgentRequest())


def list_launches(members: list[wire.MemberStatus], said: Mapping[int, Described]) -> list[FoundLaunch]:
    """The launches of all agents, those that run first, then the newest first."""
    found: dict[int, FoundLaunch] = {}
    for member in sorted(members, key=lambda each: each.incarnation):
        described = said.get(member.incarnation)
        if isinstance(described, agent_wire.DescribeAgentReply):
            for launch in described.launches:
                # agents on one folder both know what has ended there
                found.setdefault(launch.launch, FoundLaunch(member, launch))
    return sorted(found.values(), key=lambda each: (not each.runs, -each.started_s, each.number))


def find_launch(network: Network, coordinator: str, wanted: str | None) -> FoundLaunch:
    """The launch of this number, or of a script of this name or path. Without either: the one that runs, or the newest
    if none does. Raises CoordinatorUnavailable, NotFound, and InvalidRequest if several run."""
    with CoordinatorClient(coordinator, network) as client:
        members = list(client.status().members)
    said = ask_agents(network, members)
    return choose(list_launches(members, said), wanted, silent=_silent(said))


def choose(launches: list[FoundLaunch], wanted: str | None, *, silent: str = "") -> FoundLaunch:
    """`launches`: the newest first. `silent`: which agents did not answer, in words."""
    meant = [each for each in launches if wanted is None or _is_meant(each, wanted)]
    running = [each for each in meant if each.runs]
    if len(running) > 1:
        raise errors.InvalidRequest(
            f"{len(running)} launches run: {_names(running)}", why="", todo="say which one, by its number"
        )
    if meant:
        return (running or meant)[0]
    what = "no launch" if wanted is None else f"no launch {wanted}"
    if silent:
        raise errors.NotFound(
            f"{what} on the agents that answer{silent}",
            why="an agent that was killed is away until it is started again",
            todo="try again in a few seconds",
        )
    known = f"; its agents know {_names(launches)}" if launches else "; its agents know no launch"
    raise errors.NotFound(
        f"{what} in this yard{known}",
        why="an agent keeps the latest launches only, in its own state folder",
        todo="`shardyard status` lists launches; the files of others are in the folder `launches` of their agent",
    )


def _is_meant(launch: FoundLaunch, wanted: str) -> bool:
    script = Path(launch.described.script)
    return wanted in (str(launch.number), script.name, script.stem) or Path(wanted).absolute() == script


def _names(launches: list[FoundLaunch]) -> str:
    named = ", ".join(f"{each.number} ({Path(each.described.script).name})" for each in launches[:NAMED_MAX])
    return f"{named} and {len(launches) - NAMED_MAX} more" if len(launches) > NAMED_MAX else named


def _silent(said: Mapping[int, Described]) -> str:
    silent = [f"{Incarnation(each)} ({what.what})" for each, what in said.items() if isinstance(what, Exception)]
    return f"; not asked: agent {', '.join(silent[:NAMED_MAX])}" if silent else ""
