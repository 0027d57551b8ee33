"""A version of a job that servers hold for a reader: one step of a synchronous job, or one version of each partition.

While it is held, look-ups give the rows as they were in it, whatever is pushed meanwhile. It is lost if servers die,
partitions move, a lease runs out, or more rows have changed since than servers keep.

Owns: look-ups under a pin, its renewal and its end. Invariants: a look-up answers from this version or raises
VersionPassed; once lost, it never answers again; its holder releases it, or its leases run out when this process dies.
Safe for several threads. Must not know: torch, how a version is chosen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from shardyard.domain import errors
from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import Caller, Incarnation, JobId, PartitionId, Term, Version
from shardyard.domain.layout.layouts import JobLayout, PartitionMap
from shardyard.domain.pulls import LookupRequest, NotReadyPart, PinRequest, PulledPart
from shardyard.runtime.waits import WaitRegistry
from shardyard.transport.interfaces import Peer
from shardyard.wire import common_messages, methods, pull_messages, table_messages
from shardyard.wire.frames import Frame
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_worker.rows.dedup import Float32s, Int64s
from shardyard_worker.rows.row_codec import questions
from shardyard_worker.rows.row_prefetch import RowQuery
from shardyard_worker.session.retry import RetryPolicy

LEASE_MS: Final = 30_000
"""The lease of a pin: a server holds a version for this long after its reader has died."""
RENEW_MS: Final = 7_500
CALL_TIMEOUT_MS: Final = 5_000
LOOK_UP_TIMEOUT_MS: Final = 30_000
READ_ROWS_TIMEOUT_MS: Final = 600_000
"""This may be longer than a lease, which is renewed meanwhile."""

GONE: Final = (errors.Refused, errors.NotFound, errors.NotReady)
"""The errors of a server that does not hold the version."""


@dataclass(frozen=True)
class View:
    """What a reader must know of a job. `ended`: its values no longer change."""

    job: JobId
    mode: UpdateMode
    map: PartitionMap
    layout: JobLayout
    ended: bool = False

    @property
    def reader(self) -> Caller:
        return Caller(self.job, Incarnation(0), Term(0))


@dataclass(frozen=True)
class ReadServer:
    incarnation: Incarnation
    peer: Peer
    partitions: tuple[PartitionId, ...]
    """Ascending."""


@dataclass(frozen=True)
class Pin:
    """Identifies a held version on servers. `number`: the step that was asked for; None: the newest. `rows`: rows of
    tables are held too."""

    name: bytes
    number: int | None
    rows: bool = False


@dataclass(frozen=True)
class ViewServers:
    """The servers of a view. `call_all` asks several of them at the same time."""

    view: View
    servers: tuple[ReadServer, ...]
    call_all: Callable[[Sequence[ReadServer], Callable[[ReadServer], Any]], list[Any]]
    wait_registry: WaitRegistry

    def pin(
        self, server: ReadServer, pin: Pin, *, wait_ms: int = 0
    ) -> tuple[tuple[PulledPart, ...], tuple[NotReadyPart, ...]]:
        """Takes or renews a pin on one server. Returns what the server holds and lacks."""
        generation = self.view.map.generation
        wanted = PinRequest(
            self.view.reader,
            server.incarnation,
            generation,
            pin.name,
            pin.number,
            lease_ms=LEASE_MS,
            wait_ms=wait_ms,
            rows=pin.rows,
        )
        with self.wait_registry.over(lambda: f"{server.peer.name} to hold a version of job {self.view.job}"):
            reply = server.peer.call(methods.PIN, pull_messages.pin_to_wire(wanted), timeout_ms=CALL_TIMEOUT_MS)
        return pull_messages.pinned_from_wire(reply, server.partitions)

    def unpin(self, pin: Pin) -> None:
        """Releases a pin. A server that cannot be reached drops it when the lease runs out."""
        request = wire.UnpinRequest(caller=common_messages.caller_to_wire(self.view.reader), pin=pin.name)

        def release(server: ReadServer) -> None:
            with suppress(errors.ShardyardError):
                server.peer.call(methods.UNPIN, request, timeout_ms=CALL_TIMEOUT_MS)

        with self.wait_registry.over(lambda: f"{len(self.servers)} servers to let a version of job {self.view.job} go"):
            self.call_all(self.servers, release)


class PinnedVersion:
    """`versions`: of all partitions. `as_of` (time.monotonic, seconds): nothing newer had been pushed before this
    moment. The version's age counts from here."""

    def __init__(self, servers: ViewServers, pin: Pin, versions: tuple[Version, ...], as_of: float) -> None:
        self.view = servers.view
        self.servers = servers
        self.pin = pin
        self.versions = versions
        self.as_of = as_of
        self._renewed = as_of
        self._lock = threading.Lock()
        self._renewing = threading.Lock()  # held while leases are renewed or ended
        self._lost: errors.VersionPassed | None = None

    @property
    def step(self) -> int:
        return min((version.number for version in self.versions), default=0)

    @property
    def is_lost(self) -> bool:
        with self._lock:
            return self._lost is not None

    def check(self) -> None:
        """Raises VersionPassed if the version is known to be lost."""
        with self._lock:
            if self._lost is not None:
                raise self._lost.anew()

    def look_up(self, asked: Sequence[RowQuery], timeout_ms: int = LOOK_UP_TIMEOUT_MS) -> list[Float32s]:
        """Returns the rows of each table's ids, shape (m, dim), in one round trip. Raises VersionPassed,
        MalformedPayload."""
        self.check()
        found = [np.empty((each.found.ids.size, each.dim), np.float32) for each in asked]
        by_server = {server.incarnation: questions(asked, server.partitions) for server in self.servers.servers}
        asks = [server for server in self.servers.servers if by_server[server.incarnation]]

        def ask(server: ReadServer) -> None:
            for question in by_server[server.incarnation]:
                self.check()  # it may have waited for a thread behind look-ups that failed
                header = table_messages.look_up_to_header(
                    LookupRequest(
                        self.view.reader,
                        server.incarnation,
                        self.view.map.generation,
                        question.requested,
                        pin=self.pin.name,
                    )
                )
                frame = Frame(header, 0, b"".join(question.ids))
                try:
                    answer = server.peer.call(methods.LOOK_UP, frame, timeout_ms=timeout_ms)
                except (*GONE, errors.Unavailable) as error:
                    raise self._lose(error) from None
                question.put(memoryview(answer.data), found)

        with self.servers.wait_registry.over(lambda: f"rows of job {self.view.job}, as of step {self.step}"):
            if len(asks) == 1:
                ask(asks[0])
            else:
                self.servers.call_all(asks, ask)
        return found

    def read_rows(self, table: int, dim: int, partition: PartitionId) -> list[tuple[Int64s, Float32s]]:
        """Reads all rows of a table in a partition, in pieces, each id once. Ids that have got a row since are
        included, with the values that they read as in this version. Waits while the server reads the table for another
        reader. Raises VersionPassed, MalformedPayload."""
        server = next(server for server in self.servers.servers if partition in server.partitions)
        what = f"{server.peer.name} to send all rows of table {table}, partition {partition} of job {self.view.job}"
        patience = RetryPolicy(0, self.check, what)
        with self.servers.wait_registry.over(lambda: patience.explanation):
            return patience.call(partial(self._read_rows, server, partition, table, dim))

    def _read_rows(
        self, server: ReadServer, partition: PartitionId, table: int, dim: int
    ) -> list[tuple[Int64s, Float32s]]:
        request = wire.ReadRowsRequest(
            caller=common_messages.caller_to_wire(self.view.reader),
            server=server.incarnation,
            generation=self.view.map.generation,
            partition=partition,
            table=table,
            pin=self.pin.name,
        )
        try:
            frames = server.peer.receive(methods.READ_ROWS, request, timeout_ms=READ_ROWS_TIMEOUT_MS)
            return _once(table_messages.rows_from_frames(frames, dim, server.peer.name))
        except errors.NotReady:
            raise  # the version is held; another reader or a checkpoint reads the table
        except (*GONE, errors.Unavailable) as error:
            raise self._lose(error) from None

    def renew(self) -> None:
        """Renews the leases from now on. A server that does not answer may still hold the version."""
        with self._renewing:
            if not self.is_lost:
                self._renew()

    def _renew(self) -> None:
        asked = time.monotonic()
        try:
            replies = self.servers.call_all(self.servers.servers, lambda server: self.servers.pin(server, self.pin))
        except errors.Unavailable:
            return
        except errors.ShardyardError as error:
            self._lose(error)
            return
        held = {part.partition: part.version for parts, _ in replies for part in parts}
        # the second: a new pin may have the same version, but rows of another moment (hybrid)
        is_another = any(held.get(PartitionId(number)) != version for number, version in enumerate(self.versions))
        if is_another or (time.monotonic() - self._renewed) * 1000 >= LEASE_MS:
            self._lose(errors.VersionPassed("its lease had run out when it was to be renewed"))
            self.servers.unpin(self.pin)
        self._renewed = asked

    def release(self) -> None:
        """From now on it answers no look-up."""
        with self._lock:
            self._lost = self._lost or errors.VersionPassed(f"step {self.step} of job {self.view.job}, which was left")
        with self._renewing:
            self.servers.unpin(self.pin)

    def _lose(self, error: errors.ShardyardError) -> errors.ShardyardError:
        with self._lock:
            if self._lost is None:
                self._lost = errors.VersionPassed(f"step {self.step} of job {self.view.job} is not held: {error.what}")
            return self._lost.anew()


class Leases:
    """Renews held versions in a thread of its own, which starts with the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[PinnedVersion] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, held: PinnedVersion) -> None:
        """After `close`, releases the version at once."""
        with self._lock:
            is_closed = self._stop.is_set()
            if not is_closed:
                self._held.append(held)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
                    self._thread.start()
        if is_closed:
            held.release()

    def release(self, held: PinnedVersion) -> None:
        """A second call does nothing."""
        with self._lock:
            if held not in self._held:
                return
            self._held.remove(held)
        held.release()

    def close(self) -> None:
        """Releases all versions."""
        with self._lock:
            self._stop.set()
        if self._thread is not None:
            self._thread.join(CALL_TIMEOUT_MS / 1000 + 1)
        with self._lock:
            held = list(self._held)
        for each in held:
            self.release(each)

    def _run(self) -> None:
        while not self._stop.wait(RENEW_MS / 1000):
            with self._lock:
                held = list(self._held)
            for each in held:
                each.renew()


def numbers_of(layout: JobLayout) -> Mapping[str, int]:
    """Maps the names of a job's tables to their numbers."""
    return {table.name: number for number, table in enumerate(layout.tables)}


def _once(pieces: list[tuple[Int64s, Float32s]]) -> list[tuple[Int64s, Float32s]]:
    """Drops the rows of ids that came before."""
    ids = np.concatenate([np.empty(0, np.int64), *[ids for ids, _ in pieces]])
    first = np.unique(ids, return_index=True)[1]
    if first.size == ids.size:
        return pieces
    is_first = np.zeros(ids.size, np.bool_)
    is_first[first] = True
    kept = np.split(is_first, np.cumsum([ids.size for ids, _ in pieces])[:-1])
    return [(ids[keep], rows[keep]) for (ids, rows), keep in zip(pieces, kept, strict=True)]
