"""The state of optimizers, partition by partition: InitializeOptimizer, PublishState and ReadOptimizer.

Invariants: what was given is checked against the partition before memory is allocated for it; a stream that breaks off
changes nothing but a draft (`partition.published_state`). Must not know: what the arrays mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from shardyard.checkpoints.partition_file import VALUES
from shardyard.domain.errors import InvalidRequest, MalformedPayload, NotFound
from shardyard.domain.ids import Generation, Incarnation, PartitionId
from shardyard.domain.optimizers import PartitionSlots
from shardyard.domain.replica_groups import TakenStep
from shardyard.transport.interfaces import Context
from shardyard.wire import common_messages, optimizer_messages
from shardyard.wire.frames import Assembler, Frame, cut
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_ps_server.hosting.admission import admit
from shardyard_ps_server.hosting.hosted_job import HostedJob
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.published_state import Publishing
from shardyard_ps_server.partition.reads import read_optimizer
from shardyard_ps_server.values.versions import Bytes, aligned_empty


@dataclass(frozen=True)
class _Received:
    """The header of a state, checked, and the frames. `nbytes`: of its arrays together."""

    hosted: HostedJob
    partition: Partition
    taken: TakenStep
    given: PartitionSlots
    frames: Iterable[Frame]
    check_current: Callable[[], None]

    @property
    def nbytes(self) -> int:
        return len(self.given.slots) * self.partition.payload.nbytes

    def arrays(self) -> dict[str, Bytes]:
        """Reads the arrays."""
        arrays = {name: aligned_empty(self.partition.payload.nbytes) for name in self.given.slots}
        assembler = Assembler(*[array.data for array in arrays.values()])
        for frame in self.frames:
            assembler.add(frame)
        assembler.finish()
        return arrays


class OptimizerFrames:
    """The methods, over a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def initialize(self, stream: Iterator[Frame], _: Context) -> wire.InitializeReply:
        received = self._received(stream)
        if received.hosted.open:
            raise InvalidRequest(f"the optimizer's first state for job {received.hosted.job}, which is open")
        with self._store.receiving.reserved(received.hosted.job, received.nbytes):
            arrays = received.arrays()
            received.partition.set_optimizer_state(received.given.counts, arrays, received.check_current)
        return wire.InitializeReply()

    def publish(self, stream: Iterator[Frame], _: Context) -> wire.PublishStateReply:
        received = self._received(stream)
        received.hosted.check_open()
        partition, given = received.partition, received.given
        # a worker that adds to a draft takes no memory for it
        nbytes = 0 if partition.draft is not None and partition.draft.taken == received.taken else received.nbytes
        with self._store.receiving.reserved(received.hosted.job, nbytes):
            publishing = Publishing(partition, received.taken, given.counts, given.slots, received.check_current)
            for frame in received.frames:
                publishing.add(frame)
            publishing.end()
        return wire.PublishStateReply()

    def _received(self, stream: Iterator[Frame]) -> _Received:
        """A state that a worker sends."""
        first = next(stream, None)
        if first is None:
            raise MalformedPayload("an optimizer's state without a frame")
        caller, server, generation, taken, given = optimizer_messages.given_from_header(first.header)
        hosted = admit(self._store, caller, server, generation)
        partition = hosted.find(given.partition)
        partition.dense.slots.check(given.counts, [name for name in given.slots if name != VALUES])

        def check_current() -> None:
            if admit(self._store, caller, server, generation) is not hosted:
                raise NotFound(f"job {hosted.job} was dropped while the state of its partitions was on its way")

        return _Received(hosted, partition, taken, given, chain([first], stream), check_current)

    def read(self, request: wire.ReadOptimizerRequest, _: Context) -> Iterator[Frame]:
        caller, generation = common_messages.caller_from_wire(request.caller), Generation(request.generation)
        hosted = admit(self._store, caller, Incarnation(request.server), generation, reads=True)
        hosted.check_open()
        number = request.number if request.HasField("number") else None
        partition = hosted.find(PartitionId(request.partition))
        slots, arrays = read_optimizer(partition, number, values=request.values)
        hosted.check_generation(generation)  # meanwhile partitions may have been restored or moved
        self._store.count_sent(sum([len(array) for array in arrays.values()]))
        yield from cut(optimizer_messages.read_to_header(slots), [array.data for array in arrays.values()])
