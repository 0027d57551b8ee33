"""The state of optimizers, partition by partition: InitializeOptimizer and ReadOptimizer.

Invariants: what was given is checked against the partition before memory is allocated for it; a stream that breaks off
changes nothing. Must not know: what the arrays mean.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardyard.domain.errors import InvalidRequest, MalformedPayload, NotFound
from shardyard.domain.ids import Generation, Incarnation, PartitionId
from shardyard.transport.interfaces import Context
from shardyard.wire import common_messages, optimizer_messages
from shardyard.wire.frames import Assembler, Frame, cut
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_ps_server.hosting.admission import admit
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.reads import read_optimizer
from shardyard_ps_server.values.versions import aligned_empty


class OptimizerFrames:
    """The two methods, over a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def initialize(self, stream: Iterator[Frame], _: Context) -> wire.InitializeReply:
        first = next(stream, None)
        if first is None:
            raise MalformedPayload("an optimizer's state without a frame")
        caller, server, generation, given = optimizer_messages.given_from_header(first.header)
        hosted = admit(self._store, caller, server, generation)
        if hosted.open:
            raise InvalidRequest(f"the optimizer's first state for job {hosted.job}, which is open")
        partition = hosted.find(given.partition)
        partition.dense.slots.check(given.counts, given.slots)
        with self._store.receiving.reserved(hosted.job, len(given.slots) * partition.payload.nbytes):
            arrays = {name: aligned_empty(partition.payload.nbytes) for name in given.slots}
            assembler = Assembler(*[array.data for array in arrays.values()])
            assembler.add(first)
            for frame in stream:
                assembler.add(frame)
            assembler.finish()

        def check_current() -> None:
            if admit(self._store, caller, server, generation) is not hosted:
                raise NotFound(f"job {hosted.job} was dropped while its optimizer's first state was on its way")

        partition.set_optimizer_state(given.counts, arrays, check_current)
        return wire.InitializeReply()

    def read(self, request: wire.ReadOptimizerRequest, _: Context) -> Iterator[Frame]:
        caller, generation = common_messages.caller_from_wire(request.caller), Generation(request.generation)
        hosted = admit(self._store, caller, Incarnation(request.server), generation, reads=True)
        hosted.check_open()
        number = request.number if request.HasField("number") else None
        slots, arrays = read_optimizer(hosted.find(PartitionId(request.partition)), number)
        hosted.check_generation(generation)  # meanwhile partitions may have been restored or moved
        self._store.count_sent(sum([len(array) for array in arrays.values()]))
        yield from cut(optimizer_messages.read_to_header(slots), [array.data for array in arrays.values()])
