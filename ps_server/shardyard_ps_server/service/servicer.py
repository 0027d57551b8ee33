"""The gRPC service ParameterServer: turns requests into domain values, and results into replies.

Invariant: a stream that breaks off leaves nothing behind. Must not know: how anything is stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from shardyard.checkpoints.convert import entry_from_wire, file_to_wire, tables_to_wire
from shardyard.checkpoints.manifest import CHECKPOINT_NUMBER_MAX
from shardyard.domain import limits
from shardyard.domain.errors import InvalidRequest, MalformedPayload, NotReady, TooLarge
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Token
from shardyard.domain.pushes import PushHeader, PushKind
from shardyard.domain.tables.row_ids import Ids
from shardyard.transport.interfaces import Context, Pause, Service
from shardyard.transport.stream_keys import StreamKeys
from shardyard.wire import (
    common_messages,
    layout_messages,
    lease_messages,
    methods,
    pull_messages,
    push_messages,
    table_messages,
)
from shardyard.wire.frames import Assembler, Frame
from shardyard.wire.v1 import common_pb2 as wire_common
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_ps_server.checkpoint.restore import Restore
from shardyard_ps_server.checkpoint.saver import SaveRequest
from shardyard_ps_server.hosting import admission, lookups, orders, pulls, pushes
from shardyard_ps_server.hosting.admission import Admitted
from shardyard_ps_server.hosting.hosted_job import CreateRequest, HostedJob
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.rows.pushed_rows import Floats
from shardyard_ps_server.service.exchange_stream import ExchangeStream, refuse_values, values_frames
from shardyard_ps_server.service.optimizer_frames import OptimizerFrames
from shardyard_ps_server.service.pull_order import runs_in_order
from shardyard_ps_server.values.versions import Bytes, aligned_empty

R = TypeVar("R")


class Servicer:
    """One method for each RPC of the protocol, over a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.socket = ""
        """The address of this server's local socket, if there is one."""
        self.keys = StreamKeys()
        """By which a connection to that socket is known to be of a caller of `attach`."""

    def service(self) -> Service:
        service = Service("ParameterServer")
        service.on(methods.CREATE_PARTITIONS, self.create_partitions)
        service.on(methods.INITIALIZE, self.initialize)
        optimizers = OptimizerFrames(self._store)
        service.on(methods.INITIALIZE_OPTIMIZER, optimizers.initialize)
        service.on(methods.PUBLISH_STATE, optimizers.publish)
        service.on(methods.OPEN_PARTITIONS, self.open_partitions)
        service.on(methods.SAVE_CHECKPOINT, self.save_checkpoint)
        service.on(methods.FORGET_SOURCES, self.forget_sources)
        service.on(methods.PASS_OVER, self.pass_over)
        service.on(methods.SET_STALENESS, self.set_staleness)
        service.on(methods.DROP_JOB, self.drop_job)
        service.on(methods.FENCE, self.fence)
        service.on(methods.OPEN_SOURCES, self.open_sources)
        service.on(methods.READ_LEDGER, self.read_ledger)
        service.on(methods.PUSH, self.push)
        service.on(methods.PULL, self.pull)
        service.on(methods.PIN, self.pin)
        service.on(methods.UNPIN, self.unpin)
        service.on(methods.PUSH_PULL, self.push_pull)
        service.on(methods.ATTACH, self.attach)
        service.on(methods.LOOK_UP, self.look_up)
        service.on(methods.READ_ROWS, self.read_rows)
        service.on(methods.READ_OPTIMIZER, optimizers.read)
        service.on(methods.DESCRIBE_SERVER, self.describe)
        return service

    # ---- for the coordinator

    def create_partitions(self, request: wire.CreatePartitionsRequest, _: Context) -> wire.CreatePartitionsReply:
        caller = self._coordinator(request.caller)
        if request.server != self._store.incarnation:
            # also between the server's registration and the moment when it learns of it
            raise NotReady(
                f"partitions for server {Incarnation(request.server)}; this is server {self._store.incarnation}"
            )
        layout = layout_messages.layout_from_wire(request.layout)
        if len(request.working) > limits.MEMBERS_MAX:
            raise TooLarge(f"{len(request.working)} workers; at most {limits.MEMBERS_MAX} are taken")
        create = CreateRequest(
            caller.job,
            Generation(request.generation),
            layout,
            [PartitionId(partition) for partition in request.partitions],
            _rules(request),
            _restore(request.restore, request.logical_ranks),
            staleness=request.staleness if request.HasField("staleness") else None,
            working=[Incarnation(worker) for worker in request.working],
            switches=request.switches,
        )
        orders.create(self._store, create)
        return wire.CreatePartitionsReply()

    def open_partitions(self, request: wire.OpenPartitionsRequest, _: Context) -> wire.OpenPartitionsReply:
        caller = self._coordinator(request.caller)
        orders.open_partitions(self._store, caller.job, Generation(request.generation))
        return wire.OpenPartitionsReply()

    def save_checkpoint(self, request: wire.SaveCheckpointRequest, _: Context) -> wire.SaveCheckpointReply:
        caller = self._coordinator(request.caller)
        if len(request.logs) > limits.MEMBERS_MAX:
            raise TooLarge(f"{len(request.logs)} logs; at most {limits.MEMBERS_MAX} are taken")
        save = SaveRequest(
            request.number,
            request.step if request.HasField("step") else None,
            request.base,
            request.wait_ms,
            request.oldest,
            frozenset(Incarnation(server) for server in request.logs),
            request.attempt,
            request.seal,
        )
        if save.number > CHECKPOINT_NUMBER_MAX or save.wait_ms > limits.CHECKPOINT_WAIT_MS_MAX:
            raise InvalidRequest(f"checkpoint {save.number}, with a wait of {save.wait_ms} ms")
        url = common_messages.text(request.url, "the URL of checkpoints")
        saved = orders.save(self._store, caller, Incarnation(request.server), Generation(request.generation), save, url)
        return wire.SaveCheckpointReply(
            partitions=[
                wire.SavedPartition(
                    partition=each.partition,
                    version=common_messages.version_to_wire(each.version),
                    file=file_to_wire(each.file),
                    token=each.token,
                    tables=tables_to_wire(each.tables),
                )
                for each in saved
            ]
        )

    def forget_sources(self, request: wire.ForgetSourcesRequest, _: Context) -> wire.ForgetSourcesReply:
        caller = self._coordinator(request.caller)
        if len(request.workers) > limits.MEMBERS_MAX:
            raise TooLarge(f"{len(request.workers)} workers that are gone; at most {limits.MEMBERS_MAX} are taken")
        orders.forget_sources(
            self._store,
            caller,
            Incarnation(request.server),
            Generation(request.generation),
            lease_messages.done_from_wire(request.done),
            [Incarnation(worker) for worker in request.workers],
            Token(request.floor),
        )
        return wire.ForgetSourcesReply()

    def pass_over(self, request: wire.PassOverRequest, _: Context) -> wire.PassOverReply:
        caller = self._coordinator(request.caller)
        if request.worker > limits.SEQUENCE_MAX:
            raise TooLarge(f"pushes of worker {request.worker} are passed over; the last is {limits.SEQUENCE_MAX}")
        orders.pass_over(
            self._store,
            caller,
            Incarnation(request.server),
            Generation(request.generation),
            Incarnation(request.worker),
            request.next,
        )
        return wire.PassOverReply()

    def set_staleness(self, request: wire.SetStalenessRequest, _: Context) -> wire.SetStalenessReply:
        caller = self._coordinator(request.caller)
        orders.set_staleness(
            self._store,
            caller,
            Incarnation(request.server),
            Generation(request.generation),
            request.staleness if request.HasField("staleness") else None,
            request.switches,
        )
        return wire.SetStalenessReply()

    def drop_job(self, request: wire.DropJobRequest, _: Context) -> wire.DropJobReply:
        caller = self._coordinator(request.caller)
        orders.drop(self._store, JobId(caller.job))
        return wire.DropJobReply()

    def fence(self, request: wire.FenceRequest, _: Context) -> wire.FenceReply:
        self._coordinator(request.caller)
        orders.fence(self._store, request.incarnations)
        return wire.FenceReply()

    # ---- for workers

    def open_sources(self, request: wire.OpenSourcesRequest, _: Context) -> wire.OpenSourcesReply:
        hosted = self._admit(request, reads=False)
        found = pushes.open_sources(hosted, lease_messages.sources_from_wire(request.sources))
        return wire.OpenSourcesReply(sources=lease_messages.watermarks_to_wire(found))

    def read_ledger(self, request: wire.ReadLedgerRequest, _: Context) -> wire.ReadLedgerReply:
        hosted = self._admit(request, reads=True)
        found = pushes.read_ledger(hosted, lease_messages.sources_from_wire(request.sources))
        return wire.ReadLedgerReply(sources=lease_messages.watermarks_to_wire(found))

    def initialize(self, stream: Iterator[Frame], _: Context) -> wire.InitializeReply:
        with self._taken(stream) as (admitted, header, payload, rows):
            if header.kind is not PushKind.VALUES:
                raise InvalidRequest(f"a push of kind {header.kind.value} to Initialize; expected values")
            pushes.initialize(self._store, admitted, header, payload, rows)
        return wire.InitializeReply()

    def push(self, stream: Iterator[Frame], _: Context) -> wire.PushReply:
        with self._taken(stream) as (admitted, header, payload, rows):
            refuse_values(header)
            return push_messages.results_to_wire(pushes.push(self._store, admitted, header, payload, rows))

    def pull(self, request: wire.PullRequest, _: Context) -> Iterator[Frame]:
        pull = pull_messages.pull_from_wire(request)
        if pull.coding or pull.shared:
            raise InvalidRequest("a coded or shared pull outside of an exchange", todo="use PushPull")
        hosted = admission.admit_pull(self._store, pull)
        runs = runs_in_order(hosted.layout, pull.partitions, pull.order) if pull.order else None
        result, held = pulls.hold(hosted, pull)
        try:
            self._store.count_sent(held.nbytes)
            yield from values_frames(push_messages.pulled_to_header(result), held, runs)
        finally:
            held.release()

    def pin(self, request: wire.PinRequest, _: Context) -> wire.PinReply:
        return pull_messages.pinned_to_wire(*pulls.pin(self._store, pull_messages.pin_from_wire(request)))

    def unpin(self, request: wire.UnpinRequest, _: Context) -> wire.UnpinReply:
        pulls.unpin(self._store, JobId(request.caller.job), common_messages.random_name(request.pin))
        return wire.UnpinReply()

    def push_pull(self, stream: Iterator[Frame], context: Context) -> Iterator[Frame | Pause | None]:
        exchanges = ExchangeStream(self._store, context.descriptors)
        context.offer(exchanges.answer_at_once)
        return exchanges.run(stream)

    def attach(self, _request: wire.AttachRequest, context: Context) -> wire.AttachReply:
        key = b"" if context.speaker is None or not self.socket else self.keys.issue(context.speaker)
        return wire.AttachReply(socket=self.socket, key=key)

    # ---- rows

    def look_up(self, frame: Frame, _: Context) -> Frame:
        if frame.offset:
            raise MalformedPayload(f"a look-up whose ids begin at byte {frame.offset}; they come in one message")
        asked = table_messages.look_up_from_header(frame.header)
        return Frame(b"", 0, lookups.look_up(self._store, asked, np.frombuffer(frame.data, np.uint8)).data)

    def read_rows(self, request: wire.ReadRowsRequest, _: Context) -> Iterator[Frame]:
        found = lookups.read_rows(
            self._store,
            common_messages.caller_from_wire(request.caller),
            Incarnation(request.server),
            Generation(request.generation),
            PartitionId(request.partition),
            request.table,
            request.pin,
        )
        before = 0
        for ids, values in gathered(found):
            data = b"".join([ids.data, np.ascontiguousarray(values).data])
            self._store.count_sent(len(data))
            yield Frame(b"", before, data)
            before += ids.size

    def describe(self, _request: wire.DescribeServerRequest, _: Context) -> wire.DescribeServerReply:
        counters = self._store.counters
        reply = wire.DescribeServerReply(
            server=self._store.incarnation,
            pushes_applied=counters.pushes_applied,
            pushes_duplicate=counters.pushes_duplicate,
            bytes_received=counters.bytes_received,
            bytes_sent=counters.bytes_sent,
            workers_attached=counters.streams_attached,
            workers_streaming=counters.streams - counters.streams_attached,
            memory_bytes_max=0 if self._store.budget is None else self._store.budget.bytes_max,
        )
        for hosted in self._store.hosted():
            reply.pins += len(hosted.pins)
            reply.tables.extend(hosted.describe_tables())
            if hosted.clocks is not None and hosted.clocks.bound is not None:
                reply.staleness.add(job=hosted.job, most=hosted.clocks.staleness_max)
            if hosted.rules.stale is not None:
                _describe_lateness(reply.lateness.add(job=hosted.job), hosted)
            for partition in hosted.in_order:
                version, sources = partition.describe()
                reply.partitions.add(
                    job=hosted.job,
                    partition=partition.id,
                    version=common_messages.version_to_wire(version),
                    payload_bytes=partition.payload.nbytes,
                    sources=sources,
                    open=hosted.open,
                    newest_cut=partition.newest_cut,
                )
        return reply

    def _coordinator(self, caller: wire_common.Caller) -> Caller:
        """Returns the caller of an order. Raises StaleTerm."""
        found = common_messages.caller_from_wire(caller)
        admission.check_coordinator(self._store, found)
        return found

    def _admit(self, request: wire.OpenSourcesRequest | wire.ReadLedgerRequest, *, reads: bool) -> HostedJob:
        return admission.admit(
            self._store,
            common_messages.caller_from_wire(request.caller),
            Incarnation(request.server),
            Generation(request.generation),
            reads=reads,
        )

    @contextlib.contextmanager
    def _taken(self, stream: Iterator[Frame]) -> Iterator[tuple[Admitted, PushHeader, Bytes, Bytes]]:
        """Receives a whole push and the bytes of its rows. Checks the push before it allocates memory."""
        first = next(stream, None)
        if first is None:
            raise MalformedPayload("a push without a frame")
        header = push_messages.push_from_header(first.header)
        admitted = admission.admit_push(self._store, header)
        if header.rows and header.shared_at is not None:
            raise InvalidRequest("rows beside a place in shared memory, outside of an exchange", todo="use PushPull")
        if header.requested:
            raise InvalidRequest("rows requested outside of an exchange", todo="use LookUp, or PushPull")
        if header.rows_at is not None:
            raise InvalidRequest("rows in shared memory, outside of an exchange", todo="use PushPull")
        nbytes = header.payload_bytes + header.rows_bytes
        with self._store.receiving.reserved(header.caller.job, nbytes):
            payload = aligned_empty(nbytes)
            assembler = Assembler(payload.data)
            assembler.add(first)
            for frame in stream:
                assembler.add(frame)
            assembler.finish()
            yield admitted, header, payload[: header.payload_bytes], payload[header.payload_bytes :]


def gathered(found: Iterator[tuple[Ids, Floats]]) -> Iterator[tuple[Ids, Floats]]:
    """Joins small pieces of rows until each is worth a frame. The last may be smaller."""
    ids: list[Ids] = []
    values: list[Floats] = []
    nbytes = 0
    for some, rows in found:
        each = max(1, limits.FRAME_BYTES // (some.itemsize + rows.itemsize * rows.shape[1]))
        for begin in range(0, some.size, each):
            part = slice(begin, begin + each)
            more = some[part].nbytes + rows[part].nbytes
            if nbytes and nbytes + more > limits.FRAME_BYTES:
                yield np.concatenate(ids), np.concatenate(values)
                ids, values, nbytes = [], [], 0
            ids.append(some[part])
            values.append(rows[part])
            nbytes += more
    if nbytes:
        yield np.concatenate(ids), np.concatenate(values)


def _describe_lateness(message: wire.DescribedLateness, hosted: HostedJob) -> None:
    """Adds up what the job's partitions have counted."""
    for partition in hosted.partitions.values():
        tally = partition.tally
        if tally is not None:
            message.gradients += tally.gradients
            message.total += tally.total
            message.most = max(message.most, tally.most)
            message.uncompensated += tally.uncompensated


def _rules(message: wire.CreatePartitionsRequest) -> UpdateRules:
    return UpdateRules(
        common_messages.UPDATE_MODES.from_wire(message.mode),
        message.logical_ranks,
        common_messages.DURABILITIES.from_wire(message.durability),
        common_messages.stale_from_wire(message.stale) if message.HasField("stale") else None,
        common_messages.clipping_from_wire(message.clipping),
        message.backup_workers,
        message.rows_at_once,
        message.mirrored,
    )


def _restore(message: wire.Restore, logical_ranks: int) -> Restore:
    if len(message.partitions) > limits.PARTITIONS_MAX:
        raise TooLarge(f"{len(message.partitions)} partitions to be restored; at most {limits.PARTITIONS_MAX}")
    if message.number > CHECKPOINT_NUMBER_MAX:
        raise InvalidRequest(f"checkpoint {message.number} to be restored")
    if any(len(entry.logs) > limits.MEMBERS_MAX for entry in message.partitions):
        raise TooLarge(f"logs of more than {limits.MEMBERS_MAX} servers for a partition")
    entries = tuple(entry_from_wire(entry) for entry in message.partitions)
    logs = {PartitionId(each.partition): tuple(map(Incarnation, each.logs)) for each in message.partitions if each.logs}
    if len(message.begun) > limits.FEEDS_MAX:
        raise TooLarge(f"{len(message.begun)} data shards that are begun; at most {limits.FEEDS_MAX} are taken")
    if any(not 0 < each.next <= limits.SEQUENCE_MAX for each in message.begun):
        raise InvalidRequest(f"a data shard that is begun, at a batch that is not from 1 to {limits.SEQUENCE_MAX}")
    if message.step > limits.SEQUENCE_MAX:
        raise TooLarge(f"partitions that stand before step {message.step}; at most {limits.SEQUENCE_MAX} are taken")
    return Restore(
        common_messages.text(message.url, "the URL of checkpoints"),
        entries,
        message.number,
        logs,
        JobId(message.job),
        tuple((common_messages.data_shard_from_wire(each.data_shard), each.next) for each in message.begun),
        message.step,
        logical_ranks,
    )
