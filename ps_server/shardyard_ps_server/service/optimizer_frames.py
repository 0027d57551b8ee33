"""The state of optimizers, partition by partition: InitializeOptimizer, PublishState and ReadOptimizer.

Invariants: what was given is checked against the partition before memory is allocated for it; a stream that breaks off
changes nothing. Must not know: what the arrays mean.
"""

from __future__ import annotations

import contextlib
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
from shardyard_ps_server.partition.published_state import take_published
from shardyard_ps_server.partition.reads import read_optimizer
from shardyard_ps_server.values.versions import Bytes, aligned_empty


@dataclass(frozen=True)
class _Received:
    """The header of a state, checked, and the frames."""

    hosted: HostedJob
    partition: Partition
    taken: TakenStep
    given: PartitionSlots
    frames: Iterable[Frame]
    check_current: Callable[[], None]

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
        with self._received(stream) as received:
            if received.hosted.open:
                raise InvalidRequest(f"the optimizer's first state for job {received.hosted.job}, which is open")
            arrays = received.arrays()
            received.partition.set_optimizer_state(received.given.counts, arrays, received.check_current)
        return wire.InitializeReply()

    def publish(self, stream: Iterator[Frame], _: Context) -> wire.PublishStateReply:
        with self._received(stream) as received:
            received.hosted.check_open()
            given = received.given
            if VALUES not in given.slots:
                raise InvalidRequest(f"a published state without values, of {list(given.slots)}")
            arrays = received.arrays()
            values, taken = arrays.pop(VALUES), received.taken
            check = received.check_current
            take_published(received.partition, taken, given.counts, values, arrays, check, given.blocks)
        return wire.PublishStateReply()

    @contextlib.contextmanager
    def _received(self, stream: Iterator[Frame]) -> Iterator[_Received]:
        """A state that a worker sends. Memory is kept for its arrays meanwhile."""
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

        with self._store.receiving.reserved(hosted.job, len(given.slots) * partition.payload.nbytes):
            yield _Received(hosted, partition, taken, given, chain([first], stream), check_current)

    def read(self, request: wire.ReadOptimizerRequest, _: Context) -> Iterator[Frame]:
        caller, generation = common_messages.caller_from_wire(request.caller), Generation(request.generation)
        hosted = admit(self._store, caller, Incarnation(request.server), generation, reads=True)
        hosted.check_open()
        number = request.number if request.HasField("number") else None
        slots, arrays = read_optimizer(hosted.find(PartitionId(request.partition)), number)
        hosted.check_generation(generation)  # meanwhile partitions may have been restored or moved
        self._store.count_sent(sum([len(array) for array in arrays.values()]))
        yield from cut(optimizer_messages.read_to_header(slots), [array.data for array in arrays.values()])
