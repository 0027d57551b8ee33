"""The optimizer's state, and values, between this process and the servers, beside exchanges, partition by partition.

Owns: the cut of variables into the arrays of partitions, and back. What is read or published is copied frame by frame
between a worker's memory and the stream, without a copy of a partition in between. Invariants: a read changes nothing,
so it is repeated if no answer came; so is what is given, until the partitions are opened, and what is published. Must
not know: what the state means.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from shardyard.checkpoints.partition_file import VALUES
from shardyard.domain.errors import MalformedPayload
from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout, PartitionMap
from shardyard.domain.optimizers import PartitionSlots, Slot, slots_of
from shardyard.domain.replica_groups import NO_STEP, TakenStep
from shardyard.domain.variables import VariableKind
from shardyard.wire import common_messages, frames, methods, optimizer_messages
from shardyard.wire.frames import Frame
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_worker.exchange.fan_out import FanOut
from shardyard_worker.exchange.server_stream import ServerStream
from shardyard_worker.exchange.variable_parts import Parts, Region, Values, VariablePart
from shardyard_worker.optimizers.torch_state import VariableState
from shardyard_worker.session.session import Session

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GivenPart:
    """What a worker gives of a variable: elements [begin, begin + elements), flat. `count`: the variable's updates.
    `arrays`: the values, and the optimizer's state by name; what is left out is as at the beginning."""

    begin: int
    elements: int
    count: int
    arrays: Mapping[str, Values]


class OptimizerExchange:
    """Under one partition map. For one thread."""

    def __init__(
        self,
        session: Session,
        map_: PartitionMap,
        owned: Mapping[Incarnation, tuple[PartitionId, ...]],
        fan_out: FanOut,
        layout: JobLayout,
    ) -> None:
        self._session = session
        self._generation = map_.generation
        self._owned = owned
        self._fan_out = fan_out
        self._layout = layout
        self._deadline_ms = session.settings.worker.rpc_deadline_ms

    def give(self, states: Mapping[int, VariableState]) -> None:
        """Gives every server the state that the optimizer begins with, by the variables' places in the layout. What is
        left out begins as for an optimizer that has taken no step."""

        def send(stream: ServerStream) -> None:
            for partition in self._owned[stream.server]:
                self._give(stream, partition, states)

        self._fan_out.call(send, "the optimizer's first state to arrive")

    def publish(self, taken: TakenStep, given: Mapping[int, GivenPart], share: tuple[int, int]) -> None:
        """Gives the servers the replicas' state after a step, as far as this worker has it, by the variables' places in
        the layout. `share`: this worker's place among so many that have the same, each of which gives its share of the
        partitions."""
        place, size = share

        def send(stream: ServerStream) -> None:
            for partition in self._owned[stream.server]:
                blocks = self._layout.partitions[partition].blocks
                has_any = not blocks or any(block.variable in given for block in blocks)
                if has_any and partition % size == place:
                    self._publish(stream, partition, taken, given)

        self._fan_out.call(send, f"the replicas' state of step {taken.step} to arrive")

    def _publish(
        self, stream: ServerStream, partition: PartitionId, taken: TakenStep, given: Mapping[int, GivenPart]
    ) -> None:
        part, names = self._layout.partitions[partition], (VALUES, *self._names_in(partition))
        counts = tuple(given[block.variable].count if block.variable in given else 0 for block in part.blocks)
        header = self._header(stream, PartitionSlots(partition, counts, names), taken)
        places = (
            (at * part.payload_bytes + where, array.view(np.uint8).data)
            for at, name in enumerate(names)
            for block in part.blocks
            if block.variable in given
            for where, array in self._elements(block, name, given[block.variable])
        )
        sent = frames.cut_places(header, places)
        stream.peer.send(methods.PUBLISH_STATE, sent, timeout_ms=self._deadline_ms)

    def _elements(self, block: Block, name: str, given: GivenPart) -> Iterator[tuple[int, Values]]:
        """The elements of a block that are given, of one array, with their place in the array's bytes. Arrays that a
        variable does not have are zeros."""
        begin = max(block.offset, given.begin)
        end = min(block.offset + block.length, given.begin + given.elements)
        if begin >= end:
            return
        dtype = np.dtype(self._layout.variables[block.variable].dtype.value)
        found = given.arrays.get(name)
        if found is None:
            initial = next((slot.initial for slot in self._slots_of(block.variable) if slot.name == name), 0.0)
            elements = np.full(end - begin, initial, dtype)
        else:
            elements = found[begin - given.begin : end - given.begin]
        yield block.position + (begin - block.offset) * dtype.itemsize, elements

    def is_cut(self, step: int) -> bool:
        """Whether a checkpoint has cut all partitions at that step."""

        def ask(stream: ServerStream) -> set[int]:
            reply = stream.peer.call(
                methods.DESCRIBE_SERVER, wire.DescribeServerRequest(), timeout_ms=self._deadline_ms
            )
            job = self._session.caller.job
            cut = [each for each in reply.partitions if each.job == job and each.HasField("newest_cut")]
            return {each.partition for each in cut if each.newest_cut == step}

        found = self._fan_out.call(ask, f"partitions to be cut at step {step}")
        return set().union(*found) >= {partition for owned in self._owned.values() for partition in owned}

    def _give(self, stream: ServerStream, partition: PartitionId, states: Mapping[int, VariableState]) -> None:
        part, names = self._layout.partitions[partition], self._names_in(partition)
        counts = tuple(states[block.variable].count if block.variable in states else 0 for block in part.blocks)
        arrays = {name: np.zeros(part.payload_bytes, np.uint8) for name in names}
        for block in part.blocks:
            elements = slice(block.offset, block.offset + block.length)
            for name, first in self._first_values(block.variable, states).items():
                self._of(block, arrays[name])[:] = first if isinstance(first, float) else first[elements]
        header = self._header(stream, PartitionSlots(partition, counts, names))
        sent = frames.cut(header, [array.data for array in arrays.values()])
        stream.peer.send(methods.INITIALIZE_OPTIMIZER, sent, timeout_ms=self._deadline_ms)

    def _header(self, stream: ServerStream, slots: PartitionSlots, taken: TakenStep = NO_STEP) -> bytes:
        caller = self._session.caller
        return optimizer_messages.given_to_header(caller, stream.server, self._generation, slots, taken)

    def _first_values(self, variable: int, states: Mapping[int, VariableState]) -> Mapping[str, Values | float]:
        given = states[variable].slots if variable in states else {}
        return {slot.name: given.get(slot.name, slot.initial) for slot in self._slots_of(variable)}

    def _slots_of(self, variable: int) -> tuple[Slot, ...]:
        spec, optimizer = self._layout.variables[variable], self._layout.optimizer
        return () if spec.kind is VariableKind.BUFFER else slots_of(optimizer.kind, optimizer.groups[spec.group])

    def _names_in(self, partition: PartitionId) -> tuple[str, ...]:
        """The arrays that a partition has: those that any of its blocks needs."""
        blocks = self._layout.partitions[partition].blocks
        return tuple(dict.fromkeys(slot.name for block in blocks for slot in self._slots_of(block.variable)))

    def read(self, parameters: Sequence[int], number: int | None) -> dict[int, VariableState]:
        """The state of these variables. `number`: the version that all partitions have; None: whichever each has.
        Raises NotFound (facts: newest) if one has another."""
        variables = self._layout.variables
        found = {
            index: {
                slot.name: np.zeros(variables[index].elements, variables[index].dtype.value)
                for slot in self._slots_of(index)
            }
            for index in parameters
        }
        parts = {
            index: VariablePart(
                Region.whole(variables[index].elements), {name: torch.from_numpy(each) for name, each in slots.items()}
            )
            for index, slots in found.items()
        }
        counts = self.read_parts([parts], number, values=False)
        return {index: VariableState(counts[index], found[index]) for index in parameters}

    def read_parts(self, wanted: Sequence[Parts], number: int | None, *, values: bool = True) -> dict[int, int]:
        """Puts the optimizer's state, and the values, of these parts of variables into their arrays, piece by piece.
        Returns how often each variable was updated. `number`: see `read`. Raises NotFound (facts: newest), with some
        arrays changed."""
        variables = set[int]().union(*wanted)

        def ask(stream: ServerStream) -> list[tuple[int, int]]:
            counted: list[tuple[int, int]] = []
            for partition in self._owned[stream.server]:
                blocks = self._layout.partitions[partition].blocks
                if any(block.variable in variables for block in blocks):
                    counts = self._read(stream, partition, number, wanted, values=values)
                    counted += [(block.variable, count) for block, count in zip(blocks, counts, strict=True)]
            return counted

        found = dict.fromkeys(variables, 0)
        for of_server in self._fan_out.call(ask, "the optimizer's state"):
            for index, count in of_server:
                if index in found:
                    found[index] = max(found[index], count)
        return found

    def _read(
        self,
        stream: ServerStream,
        partition: PartitionId,
        number: int | None,
        wanted: Sequence[Parts],
        *,
        values: bool,
    ) -> tuple[int, ...]:
        """Returns the updates of each block."""
        request = wire.ReadOptimizerRequest(
            caller=common_messages.caller_to_wire(self._session.caller),
            server=stream.server,
            generation=self._generation,
            partition=partition,
            number=number,
            values=values,
        )
        answer = stream.peer.receive(methods.READ_OPTIMIZER, request, timeout_ms=self._deadline_ms)
        first = next(answer, None)
        if first is None:
            raise MalformedPayload(f"server {stream.server} sent no state of partition {partition}")
        slots, part = optimizer_messages.read_from_header(first.header), self._layout.partitions[partition]
        names = ((VALUES,) if values else ()) + self._names_in(partition)
        if set(slots.slots) != set(names) or len(slots.counts) != len(part.blocks):
            raise MalformedPayload(
                f"server {stream.server} sent the optimizer's state of {len(slots.counts)} blocks of partition"
                f" {partition} with {slots.slots}; expected {len(part.blocks)} with {names}"
            )
        come = 0
        for frame in chain([first], answer):
            if frame.offset != come and len(frame.data):
                raise MalformedPayload(f"server {stream.server} sent a frame at byte {frame.offset} after byte {come}")
            come += len(frame.data)
            if come > len(names) * part.payload_bytes:
                break
            self._put(part, slots.slots, frame, wanted)
        if come != len(names) * part.payload_bytes:
            raise MalformedPayload(
                f"server {stream.server} sent {come} bytes of {len(names)} arrays of partition {partition}, which has"
                f" {part.payload_bytes}"
            )
        return slots.counts

    def _put(self, part: PartitionLayout, names: Sequence[str], frame: Frame, wanted: Sequence[Parts]) -> None:
        """Puts a frame's elements into the parts' arrays. Raises MalformedPayload for a part of an element."""
        data, nbytes = np.frombuffer(frame.data, np.uint8), part.payload_bytes
        for at, name in enumerate(names):
            # of this array's bytes, the frame has [begin, end)
            begin, end = max(0, frame.offset - at * nbytes), min(nbytes, frame.offset + len(data) - at * nbytes)
            after = bisect.bisect_right(part.blocks, begin, key=lambda block: block.position)
            for block in part.blocks[max(0, after - 1) :]:
                if block.position >= end:
                    break
                dtype = np.dtype(self._layout.variables[block.variable].dtype.value)
                first, last = max(begin, block.position), min(end, block.position + block.length * dtype.itemsize)
                if first >= last:
                    continue
                if (first - block.position) % dtype.itemsize or (last - first) % dtype.itemsize:
                    raise MalformedPayload(f"a frame at byte {frame.offset} that has a part of an element")
                where = at * nbytes - frame.offset
                elements = np.frombuffer(data[where + first : where + last], dtype)
                for parts in wanted:
                    if block.variable in parts:
                        offset = block.offset + (first - block.position) // dtype.itemsize
                        parts[block.variable].put(name, offset, elements)

    def _of(self, block: Block, array: Bytes) -> Values:
        """The elements of a block in an array of its partition."""
        dtype = np.dtype(self._layout.variables[block.variable].dtype.value)
        return array[block.position : block.position + block.length * dtype.itemsize].view(dtype)
