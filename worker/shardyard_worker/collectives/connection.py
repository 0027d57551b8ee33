"""How the members of a replica group are connected: all by torch.distributed's gloo or another backend of its kind, and
those of one machine by memory that they share.

They find each other by the keys of a store: each says what it sums, on which machine it is, and where its memory is.
Members share memory if all can that are on a machine with others. So all members know in which way tensors are summed:

    on one machine         what is not large through memory, the rest over gloo
    each on its own        over gloo, around a ring of all members
    several on a machine   inside each machine through memory, then over gloo between one member of each

Must not know: what is summed, how a group is formed.
"""

from __future__ import annotations

import datetime
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from torch.distributed import Backend, ProcessGroupGloo
from torch.distributed.distributed_c10d import _DistributedBackendOptions  # type: ignore[attr-defined]

from shardyard.domain.errors import ConfigurationError, NotShareable, TooLarge
from shardyard.domain.replica_groups import GLOO, ReplicaGroup
from shardyard_worker.collectives.group_store import GroupLost, GroupStore
from shardyard_worker.collectives.shared_members import LARGEST_BYTES, Offer, OfferedMemory, SharedMembers
from shardyard_worker.session.session import Session

log = logging.getLogger("shardyard.worker")

TIMEOUT: Final = datetime.timedelta(seconds=60)
"""After which gloo gives up a collective. The coordinator knows earlier that a member is gone."""


@dataclass(frozen=True)
class Connection:
    """`everyone`: torch's process group of all members. `members`: those of this machine with which this one shares
    memory; None: with none. `firsts`: torch's process group of the first member of each machine, if tensors are summed
    inside machines first and this is such a member. `machines`: how many such machines there are; 0: nobody shares
    memory. A member that shares with nobody counts as a machine."""

    everyone: Any
    members: SharedMembers | None = None
    firsts: Any = None
    machines: int = 0

    @property
    def is_of_one_machine(self) -> bool:
        """Whether all members share memory."""
        return self.machines == 1

    @property
    def is_of_machines(self) -> bool:
        """Whether tensors are summed inside each machine first."""
        return self.machines > 1

    def way(self, over: str) -> str:
        """How tensors are summed, in words. `over`: how those are that go over torch's backend."""
        if self.is_of_one_machine:
            return f"through shared memory, {over} above {LARGEST_BYTES >> 20} MiB"
        if self.is_of_machines:
            return f"inside each of {self.machines} machines, then between them {over}"
        return over


ALONE: Final = Connection(None)
"""Of a group of one member, and of one that has left its group."""


class Connecting:
    """The member at `place` of `among`, which are places in `group`. `check` raises what ends a wait."""

    def __init__(
        self, session: Session, group: ReplicaGroup, among: range, place: int, check: Callable[[], None]
    ) -> None:
        self._session = session
        self._group = group
        self._among = among
        self._place = place
        self._check = check
        self._store = GroupStore(session, group, check, f"{among.start}:{among.stop}:{among.step}/")

    def connect(self, fingerprint: str, shared_bytes: int) -> Connection:
        """`fingerprint`: of what this member sums. `shared_bytes`: how much memory each shares. Raises GroupLost, and
        ConfigurationError if another member sums something else."""
        memory = self._offered_memory(shared_bytes)
        offer = "" if memory is None else str(memory.offer)
        self._tell("member", f"{offer}\n{fingerprint}")
        told = self._told("member")
        offers, found = zip(*(each.split("\n", 1) for each in told), strict=True)
        if found[0] != fingerprint:
            first = self._group.members[self._among[0]]
            raise ConfigurationError(
                f"this worker has {fingerprint}; worker {first} of its replica group has {found[0]}",
                why="members of a group sum their gradients with each other",
                todo="start all workers with the same release of torch, the same script, and devices of one kind",
            )
        return self._connect(memory, [Offer.of(each) for each in offers])

    def _tell(self, name: str, text: str) -> None:
        self._store.set(f"{name}/{self._place}", text)

    def _told(self, name: str) -> list[str]:
        """What all members tell, in their order."""
        return [each.decode() for each in self._store.multi_get([f"{name}/{at}" for at in range(len(self._among))])]

    def _offered_memory(self, nbytes: int) -> OfferedMemory | None:
        """What members on this machine may share with this one."""
        session = self._session
        if session.job_settings.collectives != GLOO or session.settings.worker.same_host != "auto":
            return None
        try:
            return OfferedMemory(nbytes)
        except (NotShareable, TooLarge) as error:
            log.debug("shares no memory with other members: %s", error.what)
            return None

    def _connect(self, memory: OfferedMemory | None, offers: Sequence[Offer | None]) -> Connection:
        machines = _machines(offers)
        if len(machines) == len(offers):
            return Connection(self._everyone())
        own = next(each for each in machines if self._place in each)
        with ExitStack() as undone:
            shares, members = True, None
            try:
                if memory is not None and len(own) > 1:
                    members = memory.join([each for at in own if (each := offers[at]) is not None], self._check)
                    undone.callback(members.leave)
            except NotShareable as error:
                shares = False
                log.info("shares no memory with other members of this machine: %s", error.what)
            self._tell("shares", str(shares))
            everyone = self._everyone()
            if str(False) in self._told("shares"):
                return Connection(everyone)
            firsts = self._firsts([each[0] for each in machines])
            undone.pop_all()
            return Connection(everyone, members, firsts, len(machines))

    def _everyone(self) -> Any:
        """The process group of job.collectives. Raises GroupLost, ConfigurationError."""
        name, size = self._session.job_settings.collectives, len(self._among)
        if name == GLOO:
            return self._gloo(self._store, self._place, size)
        plugin = Backend._plugins.get(name.upper())
        if plugin is None:
            raise ConfigurationError(
                f"job.collectives is {name!r}, and this process has no such backend",
                why="backends other than gloo are plug-ins, which register themselves when they are imported",
                todo="import the plug-in before job.prepare; it calls torch.distributed.Backend.register_backend",
            )
        with self._connecting():
            if not plugin.extended_api:
                return plugin.creator_fn(self._store, self._place, size, TIMEOUT)
            given = _DistributedBackendOptions()
            given.store, given.timeout = self._store, TIMEOUT
            given.group_rank, given.group_size = self._place, size
            given.group_id, given.global_ranks_in_group = str(self._group.generation), [*range(size)]
            return plugin.creator_fn(given, None)

    def _firsts(self, places: Sequence[int]) -> Any:
        """The process group of the first members of several machines, which are at these places, if this is one."""
        if len(places) == 1 or self._place not in places:
            return None
        return self._gloo(self._store.under("machines/"), places.index(self._place), len(places))

    def _gloo(self, store: GroupStore, place: int, size: int) -> Any:
        with self._connecting():
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = TIMEOUT
            address = _address(self._session.settings.coordinator)
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            return ProcessGroupGloo(store, place, size, options)

    @contextmanager
    def _connecting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            generation = self._group.generation
            raise GroupLost(f"the members of replica group {generation} did not connect: {error}") from error


def _machines(offers: Sequence[Offer | None]) -> list[list[int]]:
    """The places of the members of each machine, by what they offer. A member that offers nothing is by itself."""
    found: dict[object, list[int]] = {}
    for place, offer in enumerate(offers):
        found.setdefault(place if offer is None else offer.machine, []).append(place)
    return list(found.values())


def _address(coordinator: str) -> str:
    """This machine's address on the way to the coordinator, by which other members reach it."""
    host, _, port = coordinator.rpartition(":")
    if not port.isdigit():  # of a yard in this process
        return "127.0.0.1"
    family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
