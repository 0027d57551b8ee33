"""The coordinator's calls to servers.

Owns: one peer per server's incarnation, closed when the server goes. Invariants: each call has a deadline, and a long
one is explained; a failed one is NotReady unless it can never succeed; no call is made under the coordinator's lock.
Must not know: why a call is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from shardyard.checkpoints.convert import entry_to_wire
from shardyard.checkpoints.manifest import PartitionEntry
from shardyard.domain.consistency import Clipping, Durability, StaleRule, UpdateMode
from shardyard.domain.errors import NotFound, NotReady, Refused, ServerUnavailable, Unavailable
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Term, Token
from shardyard.domain.layout.layouts import JobLayout, PartitionMap
from shardyard.domain.push_names import DataShardSource, SourceKey, WorkerSource
from shardyard.runtime.waits import WaitRegistry
from shardyard.transport.interfaces import Network, Peer
from shardyard.wire import common_messages, layout_messages, lease_messages, methods
from shardyard.wire.method import Method
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_coordinator.core import effects
from shardyard_coordinator.placement.placement import Server
from shardyard_coordinator.service import ledger_replies

CALL_MS: Final = 10_000
"""Deadline of a call that a worker waits for."""
SAVE_MS: Final = 600_000
"""Deadline of a call that writes or reads partitions: so long that only a dead storage reaches it."""
DROP_MS: Final = 2_000
FENCE_MS: Final = 1_500
"""Deadline of a Fence: a dead worker's work waits for it. Tokens keep the books right without it (rule A5)."""

Sent = TypeVar("Sent")
Answered = TypeVar("Answered")


class ServerClient:
    def __init__(self, network: Network, term: Term, wait_registry: WaitRegistry) -> None:
        self._network = network
        self._wait_registry = wait_registry
        self._term = term
        self._lock = threading.Lock()
        self._peers: dict[Incarnation, Peer] = {}

    def create(self, effect: effects.CreatePartitions) -> None:
        request = wire.CreatePartitionsRequest(
            caller=self._caller(effect.job),
            generation=effect.generation,
            layout=layout_messages.layout_to_wire(effect.layout),
            partitions=effect.partitions,
            mode=common_messages.mode_to_wire(effect.mode),
            logical_ranks=effect.logical_ranks,
            server=effect.server.incarnation,
            durability=common_messages.durability_to_wire(effect.durability),
            staleness=effect.staleness,
            stale=common_messages.stale_to_wire(effect.stale),
            clipping=common_messages.clipping_to_wire(effect.clipping),
            backup_workers=effect.backup_workers,
            switches=effect.switches,
            rows_at_once=effect.rows_at_once,
        )
        what = f"to take partitions {_listed(effect.partitions)} of job {effect.job}"
        self._call(effect.server, methods.CREATE_PARTITIONS, request, CALL_MS, what)

    def open(self, effect: effects.OpenPartitions) -> None:
        request = wire.OpenPartitionsRequest(caller=self._caller(effect.job), generation=effect.generation)
        self._call(effect.server, methods.OPEN_PARTITIONS, request, CALL_MS, f"to open job {effect.job}")

    def give(
        self,
        job: JobId,
        server: Server,
        *,
        generation: Generation,
        layout: JobLayout,
        partitions: Sequence[PartitionId],
        mode: UpdateMode,
        logical_ranks: int,
        durability: Durability,
        staleness: int | None,
        stale: StaleRule | None,
        clipping: Clipping,
        backup_workers: int,
        switches: int,
        rows_at_once: bool,
        working: Sequence[Incarnation],
        folder: str,
        base: effects.Base,
        restored: Sequence[PartitionEntry],
        wrote: JobId,
        begun: Sequence[tuple[DataShardSource, int]] = (),
        step: int = 0,
    ) -> None:
        """Gives a server its partitions under a map, some of them restored from a checkpoint in `folder` and from
        logs."""
        request = wire.CreatePartitionsRequest(
            caller=self._caller(job),
            generation=generation,
            layout=layout_messages.layout_to_wire(layout),
            partitions=partitions,
            mode=common_messages.mode_to_wire(mode),
            logical_ranks=logical_ranks,
            server=server.incarnation,
            durability=common_messages.durability_to_wire(durability),
            staleness=staleness,
            stale=common_messages.stale_to_wire(stale),
            clipping=common_messages.clipping_to_wire(clipping),
            backup_workers=backup_workers,
            switches=switches,
            rows_at_once=rows_at_once,
            working=working,
            restore=wire.Restore(
                url=folder,
                job=wrote,
                partitions=[entry_to_wire(entry, base.logs.get(entry.partition, ())) for entry in restored],
                number=base.number,
                begun=[
                    wire.BegunDataShard(data_shard=common_messages.source_to_wire(source).data_shard, next=batch)
                    for source, batch in begun
                ],
                step=step,
            ),
        )
        lost = _listed([entry.partition for entry in restored])
        what = f"to take partitions {_listed(partitions)} of job {job}, and to restore {lost or 'none'} from {folder}"
        self._call(server, methods.CREATE_PARTITIONS, request, SAVE_MS, what)

    def save(
        self,
        job: JobId,
        server: Server,
        *,
        generation: Generation,
        folder: str,
        number: int,
        step: int | None,
        base: int,
        wait_ms: int,
        oldest: int,
        logs: Iterable[Incarnation],
        attempt: int,
    ) -> wire.SaveCheckpointReply:
        """Saves a server's partitions into a checkpoint."""
        request = wire.SaveCheckpointRequest(
            caller=self._caller(job),
            server=server.incarnation,
            generation=generation,
            url=folder,
            number=number,
            step=step,
            base=base,
            wait_ms=wait_ms,
            oldest=oldest,
            logs=sorted(logs),
            attempt=attempt,
        )
        at = "" if step is None else f" at step {step}"
        what = f"to write its partitions of job {job} into checkpoint {number}{at}"
        return self._call(server, methods.SAVE_CHECKPOINT, request, SAVE_MS, what)

    def fence(self, job: JobId, server: Server, workers: Iterable[Incarnation]) -> None:
        request = wire.FenceRequest(caller=self._caller(job), incarnations=workers)
        self._call(server, methods.FENCE, request, FENCE_MS, f"to refuse workers that job {job} has lost")

    def drop(self, effect: effects.DropJob) -> None:
        request = wire.DropJobRequest(caller=self._caller(effect.job))
        self._call(effect.server, methods.DROP_JOB, request, DROP_MS, f"to drop job {effect.job}")

    def lowest_next(self, effect: effects.ReadLedger) -> int:
        """The lowest next sequence of the sources over all partitions (rule A6). Raises if a server does not answer."""
        return min(self._read_everywhere(effect, ledger_replies.lowest_next))

    def highest_next(self, effect: effects.ReadSteps) -> int:
        """The highest next sequence of the sources over all partitions (rule B9), or the highest version of any. Raises
        if a server does not answer."""
        return max(
            self._read_everywhere(
                effect, ledger_replies.highest_version if effect.versions else ledger_replies.highest_next
            )
        )

    def watermarks(self, job: JobId, map_: PartitionMap, worker: Incarnation) -> tuple[tuple[PartitionId, int], ...]:
        """The next sequence of a worker's own source in each partition. Raises if a server does not answer."""
        found: list[tuple[PartitionId, int]] = []
        for server, owned in map_.by_server().items():
            request = wire.ReadLedgerRequest(
                caller=self._caller(job),
                server=server,
                generation=map_.generation,
                sources=lease_messages.sources_to_wire([(SourceKey(WorkerSource(worker)), Token(0))]),
            )
            what = f"to say what it has of worker {worker}'s pushes in job {job}"
            reply = self._call(Server(server, owned[0].address), methods.READ_LEDGER, request, CALL_MS, what)
            found += ledger_replies.nexts(reply, [owner.partition for owner in owned])
        return tuple(sorted(found))

    def pass_over(self, effect: effects.SkipLostPushes) -> None:
        """Skips the pushes on all servers of the map. Raises if one does not answer. Repeating the call is harmless."""
        for server, owned in effect.map.by_server().items():
            request = wire.PassOverRequest(
                caller=self._caller(effect.job),
                server=server,
                generation=effect.map.generation,
                worker=effect.worker,
                next=effect.next,
            )
            what = f"to pass over lost pushes of worker {effect.worker} in job {effect.job}"
            self._call(Server(server, owned[0].address), methods.PASS_OVER, request, CALL_MS, what)

    def pace(self, effect: effects.PaceServers) -> None:
        """Calls all servers of the map. Raises if one does not answer. Repeating the call is harmless."""
        for server, owned in effect.map.by_server().items():
            request = wire.SetStalenessRequest(
                caller=self._caller(effect.job),
                server=server,
                generation=effect.map.generation,
                staleness=effect.consistency.bound,
                switches=effect.consistency.number,
            )
            what = f"to go over to {effect.consistency} in job {effect.job}"
            self._call(Server(server, owned[0].address), methods.SET_STALENESS, request, CALL_MS, what)

    def forget_sources(self, effect: effects.ForgetSources, server: Server) -> None:
        request = wire.ForgetSourcesRequest(
            caller=self._caller(effect.job),
            server=server.incarnation,
            generation=effect.map.generation,
            floor=effect.floor,
            done=lease_messages.done_to_wire(effect.done),
            workers=effect.workers,
        )
        what = f"to forget what is in the last checkpoint of job {effect.job}"
        self._call(server, methods.FORGET_SOURCES, request, CALL_MS, what)

    def forget(self, server: Incarnation) -> None:
        with self._lock:
            peer = self._peers.pop(server, None)
        if peer is not None:
            peer.close()

    def close(self) -> None:
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.close()

    def _read_everywhere(
        self,
        effect: effects.ReadLedger | effects.ReadSteps,
        look: Callable[[wire.ReadLedgerReply, Sequence[SourceKey], Sequence[PartitionId]], int],
    ) -> list[int]:
        """What each server's answer comes to."""
        found = []
        for incarnation, owned in effect.map.by_server().items():
            partitions = [owner.partition for owner in owned]
            request = wire.ReadLedgerRequest(
                caller=self._caller(effect.job),
                server=incarnation,
                generation=effect.map.generation,
                sources=lease_messages.sources_to_wire((key, Token(0)) for key in effect.sources),
            )
            what = (
                f"to say what partitions {_listed(partitions)} of job {effect.job} have of {effect.sources[0].source}"
            )
            server = Server(incarnation, owned[0].address)
            reply = self._call(server, methods.READ_LEDGER, request, CALL_MS, what)
            found.append(look(reply, effect.sources, partitions))
        return found

    def _call(
        self, server: Server, method: Method[Sent, Answered], request: Sent, timeout_ms: int, what: str
    ) -> Answered:
        """Raises NotReady for everything that a server does not do now. A StaleIncarnation of the server, for example,
        must not reach a worker as if the worker were stale."""
        try:
            with self._wait_registry.over(lambda: f"server {server.incarnation} at {server.address} {what}"):
                return self._peer(server).call(method, request, timeout_ms=timeout_ms)
        except (Unavailable, Refused, NotFound, NotReady) as error:
            raise NotReady(
                f"{method.name} on server {server.incarnation} at {server.address}: {error.what}",
                why=error.why_text,
                facts={"server": str(server.incarnation), "address": server.address},
            ) from error

    def _caller(self, job: JobId) -> common.Caller:
        return common_messages.caller_to_wire(Caller(job=job, term=self._term))

    def _peer(self, server: Server) -> Peer:
        with self._lock:
            peer = self._peers.get(server.incarnation)
            if peer is None:
                peer = self._network.connect(
                    server.address, name=f"server {server.incarnation}", unavailable=ServerUnavailable
                )
                self._peers[server.incarnation] = peer
            return peer


def _listed(numbers: Iterable[int]) -> str:
    """The first of the numbers, for messages."""
    found = sorted(numbers)
    return ", ".join(map(str, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
