"""The collective operations of one replica group, by torch.distributed's gloo or another backend of its kind. Members
on one machine sum what is not large by `shared_sums`.

Owns: the process group. Invariants: a collective that a member cannot complete is given up, and so is the group: its
members wait for each other no more, whatever state they are in. Memory that an abandoned collective may still write is
not used again. Must not know: what is reduced, how a group is formed.

A member that has died closes its connections, so that the others fail at once. One that is frozen does not; then the
coordinator declares it dead, and says so in a heartbeat.
"""

from __future__ import annotations

import datetime
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.distributed import AllreduceOptions, Backend, ProcessGroupGloo, ReduceOp
from torch.distributed.distributed_c10d import _DistributedBackendOptions  # type: ignore[attr-defined]

from shardyard.domain.errors import ConfigurationError, NotShareable, TooLarge
from shardyard.domain.replica_groups import GLOO, ReplicaGroup
from shardyard_worker.collectives.group_store import GroupLost, GroupStore, no_place
from shardyard_worker.collectives.shared_members import LARGEST_BYTES, Offer, OfferedMemory, SharedMembers
from shardyard_worker.collectives.shared_messages import MEMBERS_MAX, RING_BYTES, SharedMessages
from shardyard_worker.collectives.shared_sums import SUMS_BYTES, SharedSum, SharedSums
from shardyard_worker.session.session import Session

log = logging.getLogger("shardyard.worker")

SLICE: Final = datetime.timedelta(milliseconds=100)
"""How long a wait for a collective lasts before the worker looks whether its group still is."""
TIMEOUT: Final = datetime.timedelta(seconds=60)
"""After which gloo gives up a collective. The coordinator knows earlier that a member is gone."""


class Collectives:
    """Of the member at `place` of a group. For one thread. Raises GroupLost where the group cannot go on.
    `fingerprint`: of what members sum; all must have the same, since gloo ends a process that is sent another size.
    `among`: the places of the members that take part, of which this is one; None: all. `place` is that among them."""

    def __init__(
        self, session: Session, group: ReplicaGroup, place: int, fingerprint: str, among: range | None = None
    ) -> None:
        """Raises ConfigurationError if another member sums something else."""
        self._among = range(len(group.members)) if among is None else among
        self._session = session
        self._fingerprint = fingerprint
        self.group = group
        self.place = self._among.index(place)
        self.size = len(self._among)
        self._pending: list[Any] = []
        self._group: Any = None
        self._members: SharedMembers | None = None
        """Those with which this one shares memory: all or none."""
        self._sums: SharedSums | None = None
        self.shared_messages: SharedMessages | None = None
        """Between these members, if they share memory."""
        if self.size > 1:
            self._connect(f"torch {torch.__version__}, {fingerprint}")

    def among(self, places: range) -> Collectives:
        """Those of some of these members, which all call this. This if they are all."""
        if places == self._among:
            return self
        return Collectives(self._session, self.group, self._among[self.place], self._fingerprint, places)

    def _connect(self, fingerprint: str) -> None:
        among, memory = self._among, self._offered_memory()
        store = GroupStore(self._session, self.group, self.check, f"{among.start}:{among.stop}:{among.step}/")
        store.set(f"member/{self.place}", f"{'' if memory is None else memory.offer}\n{fingerprint}")
        members = store.multi_get([f"member/{each}" for each in range(self.size)])
        offers, found = zip(*(each.decode().split("\n", 1) for each in members), strict=True)
        if found[0] != fingerprint:
            first = self.group.members[among[0]]
            raise ConfigurationError(
                f"this worker has {fingerprint}; worker {first} of its replica group has {found[0]}",
                why="members of a group sum their gradients with each other",
                todo="start all workers with the same release of torch, the same script, and devices of one kind",
            )
        try:
            self._group = self._make(store)
        except RuntimeError as error:
            raise GroupLost(f"the members of replica group {self.group.generation} did not connect: {error}") from error
        if memory is not None:
            self._share(memory, [Offer.of(each) for each in offers])

    def _offered_memory(self) -> OfferedMemory | None:
        """What members on this machine may share with this one."""
        session = self._session
        if session.job_settings.collectives != GLOO or session.settings.worker.same_host != "auto":
            return None
        try:
            return OfferedMemory(SUMS_BYTES + self.size * RING_BYTES)
        except (NotShareable, TooLarge) as error:
            log.debug("shares no memory with other members: %s", error.what)
            return None

    def _share(self, memory: OfferedMemory, offers: Sequence[Offer | None]) -> None:
        """From now on members share memory, if all are on this machine and each can map that of the others."""
        made = [each for each in offers if each is not None and each.machine == memory.offer.machine]
        if len(made) < self.size:
            return
        shared, lacks = None, torch.zeros(1, dtype=torch.int64)
        try:
            shared = memory.join(made, self.check)
        except NotShareable as error:
            lacks[0] = 1
            log.info("shares no memory with the other members: %s", error.what)
        try:
            with self._session.wait_registry.over(
                lambda: f"members of replica group {self.group.generation} to share memory"
            ):
                self.wait(self.most(lacks))
        except BaseException:
            if shared is not None:
                shared.leave()
            raise
        if shared is not None and lacks[0]:
            shared.leave()
        elif shared is not None:
            self._members, self._sums = shared, SharedSums(shared)
            if self.size <= MEMBERS_MAX:
                self.shared_messages = SharedMessages(shared, SUMS_BYTES)
            log.info("shares memory with the other members, for tensors of up to %d MiB", LARGEST_BYTES >> 20)

    def _make(self, store: GroupStore) -> Any:
        """The process group of job.collectives. Raises ConfigurationError."""
        name = self._session.job_settings.collectives
        if name == GLOO:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = TIMEOUT
            options._devices = [ProcessGroupGloo.create_device(hostname=_address(self._session.settings.coordinator))]
            return ProcessGroupGloo(store, self.place, self.size, options)
        plugin = Backend._plugins.get(name.upper())
        if plugin is None:
            raise ConfigurationError(
                f"job.collectives is {name!r}, and this process has no such backend",
                why="backends other than gloo are plug-ins, which register themselves when they are imported",
                todo="import the plug-in before job.prepare; it calls torch.distributed.Backend.register_backend",
            )
        if not plugin.extended_api:
            return plugin.creator_fn(store, self.place, self.size, TIMEOUT)
        given = _DistributedBackendOptions()
        given.store, given.timeout = store, TIMEOUT
        given.group_rank, given.group_size = self.place, self.size
        given.group_id, given.global_ranks_in_group = str(self.group.generation), [*range(self.size)]
        return plugin.creator_fn(given, None)

    def check(self) -> None:
        """Raises GroupLost once the group lacks a member, and what ends this worker."""
        self._session.check()
        if self._session.lost_replica_generation >= self.group.generation:
            raise GroupLost(f"replica group {self.group.generation} lacks a member")

    @property
    def process_group(self) -> Any:
        """torch's; None for a group of one member."""
        return self._group

    @property
    def shares_memory(self) -> bool:
        """Whether what is not large is summed through memory of this machine."""
        return self._members is not None

    # ---- operations

    def sum(self, tensor: torch.Tensor) -> Any:
        """Begins to sum a tensor over all members, in place. `wait` must follow. The sums are the same bits in each."""
        if self._group is None:
            return None
        if self._sums is not None and self._sums.fits(tensor):
            return self._sums.begin(tensor)
        return self.begin(lambda: self._group.allreduce([tensor]))

    def most(self, tensor: torch.Tensor) -> Any:
        """The same for the largest of all members' elements."""
        if self._group is None or not tensor.numel():
            return None
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX  # type: ignore[assignment]
        return self.begin(lambda: self._group.allreduce([tensor], options))

    def give(self, tensor: torch.Tensor, donor: int, takers: Sequence[int]) -> Any:
        """Begins to copy a flat tensor from the member at place `donor` to those at `takers`. All members take part,
        the others with an empty one."""
        if self._group is None:
            return None
        empty, count, places = tensor.new_empty(0), tensor.numel(), range(self.size)
        gives, takes = self.place == donor, self.place in takers
        given = [tensor] * len(takers) if gives else [empty]
        sent = [count if gives and place in takers else 0 for place in places]
        received = [count if takes and place == donor else 0 for place in places]
        source, target = given[0] if len(given) == 1 else torch.cat(given), tensor if takes else empty
        return self.exchange(target, source, received, sent)

    def exchange(self, received: torch.Tensor, own: torch.Tensor, sizes: list[int], parts: list[int]) -> Any:
        """Begins to send part i of `own`, of so many elements, to the member at place i. What the members send to this
        one comes into `received`, one after another, of these sizes."""
        return self.begin(lambda: self._group.alltoall_base(received, own, sizes, parts))

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> Any:
        """Begins to put the members' own tensors into `whole`, one after another."""
        return None if self._group is None else self.begin(lambda: self._group._allgather_base(whole, own))

    def wait(self, work: Any) -> None:
        """Waits until an operation has ended."""
        if work is None:
            return
        if isinstance(work, SharedSum):
            if self._sums is None:
                raise no_place()
            self._sums.wait(work)
            return
        while not work.is_completed():
            try:
                work.wait(SLICE)
            except RuntimeError:  # the slice is over, or the operation has failed
                self.check()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        self._pending.remove(work)

    def check_begun(self) -> None:
        """As `check`; and raises GroupLost if an operation under way has failed."""
        self.check()
        if self._sums is not None:
            self._sums.check()
        for work in self._pending:
            if work.is_completed():
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self._lost(error) from error

    def meet(self, others: str) -> None:
        """Returns when all members have called this. `others`: who they are."""
        with self._session.wait_registry.over(lambda: others):
            self.wait(self.sum(torch.zeros(1)))

    def begin(self, begin: Callable[[], Any]) -> Any:
        """Begins an operation, which `wait` waits for."""
        try:
            work = begin()
        except RuntimeError as error:
            raise self._lost(error) from error
        self._pending.append(work)
        return work

    def _lost(self, error: RuntimeError) -> GroupLost:
        return GroupLost(f"replica group {self.group.generation}: {str(error).splitlines()[0][:200]}")

    def leave(self) -> bool:
        """Ends the group for this member. Returns whether memory of a collective may still be written."""
        group, self._group = self._group, None
        members, self._members, self._sums, self.shared_messages = self._members, None, None, None
        if members is not None:
            members.leave()
        unfinished = [work for work in self._pending if not work.is_completed()]
        self._pending = []
        if group is None:
            return False
        # gloo waits for what is under way when a group is freed: in another thread, which ends with gloo's timeout
        threading.Thread(target=_free, args=([group], unfinished), name="replica-group-end", daemon=True).start()
        return bool(unfinished)


def _free(group: list[Any], unfinished: Sequence[Any]) -> None:
    while not all(work.is_completed() for work in unfinished):
        time.sleep(SLICE.total_seconds())
    group.clear()


def _address(coordinator: str) -> str:
    """This machine's address on the way to the coordinator, by which other members reach it."""
    host, _, port = coordinator.rpartition(":")
    if not port.isdigit():  # of a yard in this process
        return "127.0.0.1"
    family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
