"""The collective operations of one replica group, in the way in which its members are connected (`connection`).

Owns: the operations under way. Invariants: a collective that a member cannot complete is given up, and so is the group:
its members wait for each other no more, whatever state they are in. Memory that an abandoned collective may still write
is not used again. Must not know: what is reduced, how a group is formed.

A member that has died closes its connections, so that the others fail at once. One that is frozen does not; then the
coordinator declares it dead, and says so in a heartbeat.
"""

from __future__ import annotations

import datetime
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.distributed import AllreduceOptions, ReduceOp

from shardyard.domain.replica_groups import ReplicaGroup
from shardyard_worker.collectives.connection import ALONE, Connecting
from shardyard_worker.collectives.group_store import GroupLost, no_place
from shardyard_worker.collectives.hooked_sum import Hook, HookBucket, HookedSum
from shardyard_worker.collectives.shared_members import LARGEST_BYTES
from shardyard_worker.collectives.shared_messages import MEMBERS_MAX, RING_BYTES, SharedMessages
from shardyard_worker.collectives.shared_sums import SUMS_BYTES, Between, SharedSum, SharedSums
from shardyard_worker.session.session import Session

log = logging.getLogger("shardyard.worker")

SLICE: Final = datetime.timedelta(milliseconds=100)
"""How long a wait for a collective lasts before the worker looks whether its group still is."""


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
        self._connection = ALONE
        self._sums: SharedSums | None = None
        self._first_bytes = 0.0
        """Of tensors that are summed inside this machine first: at most."""
        self.shared_messages: SharedMessages | None = None
        """Between these members, if all share memory."""
        if self.size > 1:
            self._connect(Connecting(session, group, self._among, self.place, self.check))

    def among(self, places: range) -> Collectives:
        """Those of some of these members, which all call this. This if they are all."""
        if places == self._among:
            return self
        return Collectives(self._session, self.group, self._among[self.place], self._fingerprint, places)

    def _connect(self, connecting: Connecting) -> None:
        fingerprint = f"torch {torch.__version__}, {self._fingerprint}"
        self._connection = connection = connecting.connect(fingerprint, SUMS_BYTES + self.size * RING_BYTES)
        if connection.machines:
            self._first_bytes = LARGEST_BYTES if connection.is_of_one_machine else math.inf
        if connection.members is not None:
            between = Between(self._sum_between, self.wait) if connection.is_of_machines else None
            self._sums = SharedSums(connection.members, between)
            if connection.is_of_one_machine and self.size <= MEMBERS_MAX:
                self.shared_messages = SharedMessages(connection.members, SUMS_BYTES)

    @property
    def backend(self) -> str:
        """The name of torch's backend."""
        return self._session.job_settings.collectives

    def way_of(self, tensors: Sequence[torch.Tensor], narrow: str = "") -> str:
        """How these are summed, in words. `narrow`: how they are compressed between machines, for example `in bf16`."""
        rest = f"over {self.backend}"
        if narrow and not self.shares_memory:
            rest = f"{narrow} {rest}"
        way = self._connection.way(rest)
        if all(SharedSums.fits(each) for each in tensors):
            return way
        return rest if not any(SharedSums.fits(each) for each in tensors) else f"{way}; some {rest}"

    def show(self, way: str) -> None:
        """The log and the status of the yard say that gradients are summed in that way."""
        log.info("sums gradients with %d other workers %s", self.size - 1, way)
        self._session.progress.sums = way

    def check(self) -> None:
        """Raises GroupLost once the group lacks a member, and what ends this worker."""
        self._session.check()
        if self._session.lost_replica_generation >= self.group.generation:
            raise GroupLost(f"replica group {self.group.generation} lacks a member")

    @property
    def process_group(self) -> Any:
        """torch's; None for a group of one member."""
        return self._connection.everyone

    @property
    def shares_memory(self) -> bool:
        """Whether all members are on this machine and share memory."""
        return self._connection.is_of_one_machine

    # ---- operations

    def sum(self, tensor: torch.Tensor, hook: Hook | None = None) -> Any:
        """Begins to sum a tensor over all members, in place. `wait` must follow. The sums are the same bits in each.
        `hook`: compresses what goes over torch's backend, unless all members are on this machine."""
        if self.process_group is None:
            return None
        if self.shares_memory:
            hook = None
        if tensor.nbytes > self._first_bytes or not SharedSums.fits(tensor):
            return self._sum_over(self.process_group, tensor, hook)
        begin = self._sum_between if self._sums is None else self._sums.begin
        if tensor.nbytes <= LARGEST_BYTES:
            return begin(tensor, hook)
        pieces = torch.split(tensor.detach().view(-1), LARGEST_BYTES // tensor.element_size())
        return [begin(piece, hook) for piece in pieces]

    def _sum_between(self, tensor: torch.Tensor, hook: Hook | None) -> Any:
        """The same over the first members of all machines, of which this is one."""
        return self._sum_over(self._connection.firsts, tensor, hook)

    def _sum_over(self, group: Any, tensor: torch.Tensor, hook: Hook | None) -> Any:
        if hook is None:
            return self.begin(lambda: group.allreduce([tensor]))
        return self.begin(lambda: HookedSum(hook, group, HookBucket(tensor)))

    def most(self, tensor: torch.Tensor) -> Any:
        """The same for the largest of all members' elements."""
        if self.process_group is None or not tensor.numel():
            return None
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.MAX  # type: ignore[assignment]
        return self.begin(lambda: self.process_group.allreduce([tensor], options))

    def give(self, tensor: torch.Tensor, donor: int, takers: Sequence[int]) -> Any:
        """Begins to copy a flat tensor from the member at place `donor` to those at `takers`. All members take part,
        the others with an empty one."""
        if self.process_group is None:
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
        return self.begin(lambda: self.process_group.alltoall_base(received, own, sizes, parts))

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> Any:
        """Begins to put the members' own tensors into `whole`, one after another."""
        if self.process_group is None:
            return None
        return self.begin(lambda: self.process_group._allgather_base(whole, own))

    def wait(self, work: Any) -> None:
        """Waits until an operation has ended."""
        if work is None:
            return
        if isinstance(work, list):
            for each in work:
                self.wait(each)
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
        self._session.progress.sums = ""
        connection, self._connection = self._connection, ALONE
        groups = [each for each in (connection.everyone, connection.firsts) if each is not None]
        self._sums = self.shared_messages = None
        if connection.members is not None:
            connection.members.leave()
        unfinished = [work for work in self._pending if not work.is_completed()]
        self._pending = []
        if not groups:
            return False
        # gloo waits for what is under way when a group is freed: in another thread, which ends with gloo's timeout
        threading.Thread(target=_free, args=(groups, unfinished), name="replica-group-end", daemon=True).start()
        return bool(unfinished)


def _free(groups: list[Any], unfinished: Sequence[Any]) -> None:
    while not all(work.is_completed() for work in unfinished):
        time.sleep(SLICE.total_seconds())
    groups.clear()
