"""The coordinator's calls to servers.

Owns: one peer per server's incarnation, closed when the server goes. Invariants: each call has a deadline, and
shows in the status while it lasts; a failed call raises NotReady unless it can never succeed; no call is made under the
coordinator's lock.
Must not know: why a call is made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeVar

from shardyard.checkpoints.convert import entry_to_wire
from shardyard.checkpoints.manifest import PartitionEntry
from shardyard.domain.errors import NotFound, NotReady, Refused, ServerUnavailable, Unavailable
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Term, Token
from shardyard.domain.layout.layouts import PartitionMap
from shardyard.domain.push_names import SourceKey, WorkerSource
from shardyard.runtime.waits import WaitRegistry
from shardyard.transport.interfaces import Network, Peer
from shardyard.wire import common_messages, layout_messages, lease_messages, methods
from shardyard.wire.method import Method
from shardyard.wire.v1 import common_pb2 as common
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_coordinator.core import effects
from shardyard_coordinator.placement.placement import Server, servers_of
from shardyard_coordinator.service import ledger_replies

CALL_MS: Final = 10_000
"""Deadline of a call that a worker waits for."""
SAVE_MS: Final = 600_000
"""Deadline of a call that writes or reads partitions: reached only if the storage does not answer at all."""
DROP_MS: Final = 2_000
FENCE_MS: Final = 1_500
"""Deadline of a Fence: a dead worker's work waits for it. The ledgers stay right without it, by tokens (rule A5)."""

Sent = TypeVar("Sent")
Answered = TypeVar("Answered")


class ServerClient:
    def __init__(self, network: Network, term: Term, wait_registry: WaitRegistry) -> None:
        self._network = network
        self._wait_registry = wait_registry
        self._term = term
        self._lock = threading.Lock()
        self._peers: dict[Incarnation, Peer] = {}

    def create(self, wanted: effects.CreatePartitions) -> None:
        request = self._creation(wanted.spec, wanted.server, wanted.generation, wanted.partitions)
        what = f"to take partitions {_listed(wanted.partitions)} of job {wanted.spec.job}"
        self._call(wanted.server, methods.CREATE_PARTITIONS, request, CALL_MS, what)

    def open(self, effect: effects.OpenPartitions) -> None:
        request = wire.OpenPartitionsRequest(caller=self._caller(effect.job), generation=effect.generation)
        self._call(effect.server, methods.OPEN_PARTITIONS, request, CALL_MS, f"to open job {effect.job}")

    def restore(
        self,
        wanted: effects.RestorePartitions,
        server: Server,
        partitions: Sequence[PartitionId],
        *,
        base: effects.Base,
        entries: Sequence[PartitionEntry],
        wrote: JobId,
    ) -> None:
        """Gives a server its partitions under a new map. `entries`: those that it restores from checkpoint `base`,
        which job `wrote` has written, and from logs."""
        folder = wanted.spec.folder(wanted.url)
        request = self._creation(wanted.spec, server, wanted.map.generation, partitions)
        request.working.extend(wanted.leasing)
        request.restore.CopyFrom(
            wire.Restore(
                url=folder,
                job=wrote,
                partitions=[entry_to_wire(entry, base.logs.get(entry.partition, ())) for entry in entries],
                number=base.number,
                begun=[
                    wire.BegunDataShard(data_shard=common_messages.source_to_wire(source).data_shard, next=batch)
                    for source, batch in wanted.begun_in_steps
                ],
                step=wanted.first_step,
            )
        )
        lost = _listed([entry.partition for entry in entries])
        what = f"to take partitions {_listed(partitions)} of job {wanted.spec.job}"
        what += f", and to restore {lost or 'none'} from {folder}"
        self._call(server, methods.CREATE_PARTITIONS, request, SAVE_MS, what)

    def save(
        self, wanted: effects.TakeCheckpoint, server: Server, *, step: int | None, wait_ms: int, attempt: int
    ) -> wire.SaveCheckpointReply:
        """Saves a server's partitions into a checkpoint. `step`: the step to wait for, at most `wait_ms`; None: save
        now."""
        number = wanted.draft.number
        request = wire.SaveCheckpointRequest(
            caller=self._caller(wanted.spec.job),
            server=server.incarnation,
            generation=wanted.map.generation,
            url=wanted.spec.folder(wanted.url),
            number=number,
            step=step,
            base=wanted.base,
            wait_ms=wait_ms,
            oldest=wanted.oldest,
            logs=sorted(wanted.logs),
            attempt=attempt,
            seal=server.incarnation in wanted.draft.sealed,
        )
        at = "" if step is None else f" at step {step}"
        what = f"to write its partitions of job {wanted.spec.job} into checkpoint {number}{at}"
        return self._call(server, methods.SAVE_CHECKPOINT, request, SAVE_MS, what)

    def fence(self, job: JobId, server: Server, workers: Iterable[Incarnation]) -> None:
        request = wire.FenceRequest(caller=self._caller(job), incarnations=workers)
        self._call(server, methods.FENCE, request, FENCE_MS, f"to refuse workers that job {job} has lost")

    def drop(self, effect: effects.DropJob) -> None:
        request = wire.DropJobRequest(caller=self._caller(effect.job))
        self._call(effect.server, methods.DROP_JOB, request, DROP_MS, f"to drop job {effect.job}")

    def lowest_next(self, effect: effects.ReadLedger) -> int:
        """The lowest next sequence of the sources over all partitions (rule A6). Raises if a server does not answer."""
        read = self._read_ledgers(effect.job, effect.map, effect.sources)
        return min(ledger_replies.lowest_next(*each) for each in read)

    def highest_next(self, effect: effects.ReadSteps) -> int:
        """The highest next sequence of the sources over all partitions (rule B9), or the highest version of any. Raises
        if a server does not answer."""
        look = ledger_replies.highest_version if effect.versions else ledger_replies.highest_next
        return max(look(*each) for each in self._read_ledgers(effect.job, effect.map, effect.sources))

    def watermarks(self, job: JobId, map_: PartitionMap, worker: Incarnation) -> tuple[tuple[PartitionId, int], ...]:
        """The next sequence of a worker's own source in each partition. Raises if a server does not answer."""
        read = self._read_ledgers(job, map_, (SourceKey(WorkerSource(worker)),))
        return tuple(sorted(each for answer in read for each in ledger_replies.nexts(*answer)))

    def pass_over(self, effect: effects.SkipLostPushes) -> None:
        """Skips the pushes on all servers of the map. Raises if one does not answer. Repeating the call is harmless."""
        for server, _ in servers_of(effect.map):
            request = wire.PassOverRequest(
                caller=self._caller(effect.job),
                server=server.incarnation,
                generation=effect.map.generation,
                worker=effect.worker,
                next=effect.next,
            )
            what = f"to skip lost pushes of worker {effect.worker} in job {effect.job}"
            self._call(server, methods.PASS_OVER, request, CALL_MS, what)

    def pace(self, effect: effects.PaceServers) -> None:
        """Calls all servers of the map. Raises if one does not answer. Repeating the call is harmless."""
        for server, _ in servers_of(effect.map):
            request = wire.SetStalenessRequest(
                caller=self._caller(effect.job),
                server=server.incarnation,
                generation=effect.map.generation,
                staleness=effect.consistency.bound,
                switches=effect.consistency.number,
            )
            what = f"to change job {effect.job} to {effect.consistency}"
            self._call(server, methods.SET_STALENESS, request, CALL_MS, what)

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

    def _creation(
        self, spec: effects.JobSpec, server: Server, generation: Generation, partitions: Sequence[PartitionId]
    ) -> wire.CreatePartitionsRequest:
        settings, consistency = spec.settings, spec.settings.consistency
        return wire.CreatePartitionsRequest(
            caller=self._caller(spec.job),
            generation=generation,
            layout=layout_messages.layout_to_wire(spec.layout),
            partitions=partitions,
            mode=common_messages.UPDATE_MODES.to_wire(spec.mode),
            logical_ranks=settings.logical_rank_count,
            server=server.incarnation,
            durability=common_messages.DURABILITIES.to_wire(settings.durability),
            staleness=consistency.bound,
            stale=common_messages.stale_to_wire(consistency.stale),
            clipping=common_messages.clipping_to_wire(settings.server_clipping),
            backup_workers=consistency.backup_workers,
            switches=spec.switches,
            rows_at_once=consistency.rows_at_once,
            mirrored=settings.has_replicas,
        )

    def _read_ledgers(
        self, job: JobId, map_: PartitionMap, sources: Sequence[SourceKey]
    ) -> Iterator[tuple[wire.ReadLedgerReply, Sequence[SourceKey], Sequence[PartitionId]]]:
        """The reply of each server, with the sources and partitions of its request."""
        for server, partitions in servers_of(map_):
            request = wire.ReadLedgerRequest(
                caller=self._caller(job),
                server=server.incarnation,
                generation=map_.generation,
                sources=lease_messages.sources_to_wire((key, Token(0)) for key in sources),
            )
            what = f"to say what partitions {_listed(partitions)} of job {job} have of {sources[0].source}"
            yield self._call(server, methods.READ_LEDGER, request, CALL_MS, what), sources, partitions

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
