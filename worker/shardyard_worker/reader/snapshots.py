"""One consistent version of a job's values, read from its servers while training goes on.

Owns: the pins under which it reads, and the memory that it reads into. Invariants: a snapshot of a synchronous job is
one step on all partitions; of any other job it is the newest version of each partition, each whole, pinned on all
servers at one moment. A pin is released if it cannot be completed; otherwise its holder releases it; if this process
dies, its leases run out. Must not know: torch, what values are for, when they are wanted.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from shardyard.domain import errors
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import PartitionId, Version
from shardyard.domain.layout.layouts import JobLayout, PartitionMap
from shardyard.domain.pulls import NotReadyPart, PulledPart, PullHeader
from shardyard.runtime.waits import WaitRegistry
from shardyard.transport.interfaces import Network, Peer
from shardyard.wire import methods, pull_messages, push_messages
from shardyard.wire.frames import Assembler
from shardyard_worker.reader.pinned_version import Pin, PinnedVersion, ReadServer, View, ViewServers

R = TypeVar("R")
Array = npt.NDArray[Any]

PULL_TIMEOUT_MS: Final = 600_000
SLICE_MS: Final = 250
"""How long a server holds the call that asks whether a step has come."""
STEP_WAIT_MS: Final = 2_000
"""How long to wait for a step that was named ahead, before the current one is taken instead."""
STEPS_AHEAD: Final = 2
STEPS_AHEAD_MAX: Final = 1 << 20
TRIES: Final = 12
CALLERS_MAX: Final = 16

AGAIN: Final = (errors.Refused, errors.NotFound, errors.NotReady, errors.Unavailable, errors.TooLarge)
"""Errors after which the caller tries again with newer knowledge of the job: partitions move, servers die and come
back, steps pass, and pins of other readers run out."""


class Snapshots:
    """For one thread, except `close`. Other threads may read a version that it holds."""

    def __init__(self, network: Network, wait_registry: WaitRegistry) -> None:
        self._network = network
        self._wait_registry = wait_registry
        self._peers: dict[str, Peer] = {}
        self._threads = ThreadPoolExecutor(CALLERS_MAX, thread_name_prefix="read-snapshot")
        self._received: dict[tuple[PartitionId, ...], npt.NDArray[np.uint8]] = {}
        self._arrays: tuple[JobLayout, tuple[Array, ...]] | None = None

    def close(self) -> None:
        self._threads.shutdown()
        for peer in self._peers.values():
            peer.close()

    def hold(self, view: View, *, rows: bool = True, step_wait_ms: int = STEP_WAIT_MS) -> PinnedVersion:
        """Holds a version until it is released. `rows`: its tables' rows can be looked up. Raises InvalidRequest,
        MalformedPayload, and the errors in AGAIN: then try again with a newer view."""
        servers = ViewServers(view, self._servers(view.map), self._call_all, self._wait_registry)
        return self._pin(servers, rows=rows, step_wait_ms=step_wait_ms)

    def values(self, held: PinnedVersion) -> tuple[Array, ...]:
        """Reads the values of a held version: an array for each variable of the layout, in its shape. They belong to
        the reader until its next snapshot. Raises as `hold`."""
        view, versions, servers = held.view, held.versions, held.servers.servers
        arrays = self._memory(view.layout)

        def pull(server: ReadServer) -> None:
            self._pull(view, server, held.pin.name, versions, arrays)

        try:
            with self._wait_registry.over(lambda: f"{len(servers)} servers to send a snapshot of job {view.job}"):
                self._call_all(servers, pull)
        except BaseException:
            self._received, self._arrays = {}, None  # a pull that was given up may still write there
            raise
        return arrays

    # ---- pins

    def _pin(self, servers: ViewServers, *, rows: bool, step_wait_ms: int) -> PinnedVersion:
        view = servers.view
        if view.mode is UpdateMode.ASYNC:
            pin, as_of = Pin(secrets.token_bytes(16), None, rows), time.monotonic()
            try:
                return PinnedVersion(servers, pin, self._complete(servers, pin, step_wait_ms), as_of)
            except errors.InvalidRequest as refused:
                if "newest" not in refused.facts:
                    raise
                raise _of_another_kind(view) from None
        number: int | None = None  # servers answer with their current step
        ahead = STEPS_AHEAD
        for _ in range(TRIES):
            # nothing newer exists at this moment, or the step does not exist yet
            pin, as_of = Pin(secrets.token_bytes(16), number, rows), time.monotonic()
            try:
                versions = self._complete(servers, pin, step_wait_ms)
                if number is None:  # no server of a synchronous job accepts that
                    servers.unpin(pin)
                    raise _of_another_kind(view)
                return PinnedVersion(servers, pin, versions, as_of)
            except _NotReached as current:  # training has paused, or its steps are long
                number = current.step
            except errors.InvalidRequest as passed:
                if "newest" not in passed.facts:
                    raise
                number = int(passed.facts["newest"]) + (0 if view.ended else ahead)
                ahead = min(2 * ahead, STEPS_AHEAD_MAX)
        raise errors.NotReady(f"a step of job {view.job} to be read: steps pass faster than they can be named")

    def _complete(self, servers: ViewServers, pin: Pin, step_wait_ms: int) -> tuple[Version, ...]:
        """Pins on all servers, then waits for the version. Leaves no pin behind if it raises."""
        view, until = servers.view, time.monotonic() + step_wait_ms / 1000
        try:
            # first named on all servers, then waited for on each
            replies = self._call_all(servers.servers, lambda server: servers.pin(server, pin))
            with self._wait_registry.over(lambda: f"step {pin.number} of job {view.job}, to be read"):
                while any(missing for _, missing in replies):
                    if time.monotonic() >= until:
                        raise _NotReached(_current_step(replies))
                    replies = self._call_all(servers.servers, lambda server: servers.pin(server, pin, wait_ms=SLICE_MS))
        except BaseException:
            servers.unpin(pin)
            raise
        found = {part.partition: part.version for parts, _ in replies for part in parts}
        return tuple(found[PartitionId(partition)] for partition in range(len(view.layout.partitions)))

    # ---- values

    def _pull(
        self, view: View, server: ReadServer, pin: bytes, versions: Sequence[Version], arrays: Sequence[Array]
    ) -> None:
        layout = view.layout
        payload = self._buffer(server.partitions, layout)
        wanted = PullHeader(
            view.reader, server.incarnation, view.map.generation, server.partitions, 0, exactly=False, pin=pin
        )
        assembler = Assembler(payload.data)
        frames = server.peer.receive(methods.PULL, pull_messages.pull_to_wire(wanted), timeout_ms=PULL_TIMEOUT_MS)
        for count, frame in enumerate(frames):
            if count == 0:
                pulled = push_messages.pulled_from_header(frame.header, server.partitions)
                if [part.version for part in pulled.parts] != [versions[number] for number in server.partitions]:
                    raise errors.MalformedPayload(f"{server.peer.name} sends other versions than it has pinned")
            assembler.add(frame)
        assembler.finish()
        begin = 0
        for number in server.partitions:
            part = layout.partitions[number]
            for block in part.blocks:
                flat = arrays[block.variable].reshape(-1)
                nbytes = block.length * flat.itemsize
                found = payload[begin + block.position : begin + block.position + nbytes]
                flat[block.offset : block.offset + block.length] = found.view(flat.dtype)
            begin += part.payload_bytes

    def _buffer(self, partitions: tuple[PartitionId, ...], layout: JobLayout) -> npt.NDArray[np.uint8]:
        nbytes = sum(layout.partitions[number].payload_bytes for number in partitions)
        kept = self._received.get(partitions)
        if kept is None or len(kept) != nbytes:
            kept = self._received[partitions] = np.empty(nbytes, np.uint8)
        return kept

    def _memory(self, layout: JobLayout) -> tuple[Array, ...]:
        if self._arrays is None or self._arrays[0] is not layout:
            self._arrays = layout, tuple(np.zeros(spec.shape, spec.dtype.value) for spec in layout.variables)
        return self._arrays[1]

    # ---- servers

    def _servers(self, map_: PartitionMap) -> tuple[ReadServer, ...]:
        found = []
        for incarnation, owned in map_.by_server().items():
            address = owned[0].address
            if address not in self._peers:
                self._peers[address] = self._network.connect(address, name=f"server {incarnation} at {address}")
            partitions = tuple(sorted(owner.partition for owner in owned))
            found.append(ReadServer(incarnation, self._peers[address], partitions))
        held = {server.partitions for server in found}
        self._received = {partitions: kept for partitions, kept in self._received.items() if partitions in held}
        return tuple(found)

    def _call_all(self, servers: Sequence[ReadServer], work: Callable[[ReadServer], R]) -> list[R]:
        """Runs `work` for all servers at the same time. Once all have answered, raises the first server's error; of
        steps that have passed, the one with the highest step."""
        calls = [self._threads.submit(work, server) for server in servers]
        failed = [error for error in (call.exception() for call in calls) if error is not None]
        if failed:
            raise max(failed, key=_newest)
        return [call.result() for call in calls]


def _of_another_kind(view: View) -> errors.NotReady:
    return errors.NotReady(f"a version of job {view.job}, which takes pushes in another way by now")


class _NotReached(Exception):
    """A named step has not come in time. `step`: the one at which the partitions are, or that they are computing."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


def _current_step(replies: Iterable[tuple[Sequence[PulledPart], Sequence[NotReadyPart]]]) -> int:
    return max(
        [part.version.number for parts, _ in replies for part in parts]
        + [each.have.number for _, missing in replies for each in missing]
    )


def _newest(error: BaseException) -> int:
    return int(error.facts.get("newest", -1)) if isinstance(error, errors.InvalidRequest) else -1
