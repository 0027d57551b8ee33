"""The optimizer's state between this process and the servers, beside the exchanges: all of it, partition by partition.

Owns: the cut of whole variables into the arrays of partitions, and back. Invariants: a read changes nothing, so it is
repeated if no answer came; so is what is given, until the partitions are opened. Must not know: what the state means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardyard.checkpoints.partition_file import VALUES
from shardyard.domain.errors import MalformedPayload
from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionMap
from shardyard.domain.optimizers import PartitionSlots, Slot, slots_of
from shardyard.domain.replica_groups import NO_STEP, TakenStep
from shardyard.domain.variables import VariableKind
from shardyard.wire import common_messages, frames, methods, optimizer_messages
from shardyard.wire.method import Method
from shardyard.wire.v1 import parameter_server_pb2 as wire
from shardyard_worker.exchange.fan_out import FanOut
from shardyard_worker.exchange.server_stream import ServerStream
from shardyard_worker.optimizers.torch_state import VariableState
from shardyard_worker.session.session import Session

Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[Any]


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
                self._send(stream, partition, methods.INITIALIZE_OPTIMIZER, states)

        self._fan_out.call(send, "the optimizer's first state to arrive")

    def publish(
        self,
        taken: TakenStep,
        values: Mapping[int, Values],
        states: Mapping[int, VariableState],
        share: tuple[int, int],
    ) -> None:
        """Gives the servers the replicas' state after a step. `values`: of all variables, or of those of a pipeline's
        stage, flat, by their places in the layout. `share`: this worker's place among so many that have the same
        variables, each of which gives its share of the partitions."""
        place, size = share

        def send(stream: ServerStream) -> None:
            for partition in self._owned[stream.server]:
                blocks = self._layout.partitions[partition].blocks
                has_any = not blocks or any(block.variable in values for block in blocks)
                if has_any and partition % size == place:
                    self._send(stream, partition, methods.PUBLISH_STATE, states, taken=taken, values=values)

        self._fan_out.call(send, f"the replicas' state of step {taken.step} to arrive")

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

    def _send(
        self,
        stream: ServerStream,
        partition: PartitionId,
        method: Method[Any, Any],
        states: Mapping[int, VariableState],
        *,
        taken: TakenStep = NO_STEP,
        values: Mapping[int, Values] | None = None,
    ) -> None:
        part, names = self._layout.partitions[partition], self._names_in(partition)
        counts = tuple(states[block.variable].count if block.variable in states else 0 for block in part.blocks)
        if values is not None:
            names = (VALUES, *names)
        arrays = {name: np.zeros(part.payload_bytes, np.uint8) for name in names}
        for block in part.blocks:
            elements = slice(block.offset, block.offset + block.length)
            for name, first in self._first_values(block.variable, states).items():
                self._of(block, arrays[name])[:] = first if isinstance(first, float) else first[elements]
            if values is not None and block.variable in values:
                self._of(block, arrays[VALUES])[:] = values[block.variable][elements]
        given = tuple(at for at, block in enumerate(part.blocks) if values is not None and block.variable in values)
        blocks = given if len(given) < len(part.blocks) else ()
        slots = PartitionSlots(partition, counts, names, blocks=blocks)
        caller = self._session.caller
        header = optimizer_messages.given_to_header(caller, stream.server, self._generation, slots, taken)
        sent = frames.cut(header, [array.data for array in arrays.values()])
        stream.peer.send(method, sent, timeout_ms=self._deadline_ms)

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
        counts = dict.fromkeys(parameters, 0)

        def ask(stream: ServerStream) -> list[tuple[int, int]]:
            counted: list[tuple[int, int]] = []
            for partition in self._owned[stream.server]:
                slots, arrays = self._read(stream, partition, number)
                for block, count in zip(self._layout.partitions[partition].blocks, slots.counts, strict=True):
                    if block.variable in found:
                        counted.append((block.variable, count))
                        for name, into in found[block.variable].items():
                            into[block.offset : block.offset + block.length] = self._of(block, arrays[name])
            return counted

        for of_server in self._fan_out.call(ask, "the optimizer's state"):
            for index, count in of_server:
                counts[index] = max(counts[index], count)
        return {index: VariableState(counts[index], found[index]) for index in parameters}

    def _read(
        self, stream: ServerStream, partition: PartitionId, number: int | None
    ) -> tuple[PartitionSlots, dict[str, Bytes]]:
        request = wire.ReadOptimizerRequest(
            caller=common_messages.caller_to_wire(self._session.caller),
            server=stream.server,
            generation=self._generation,
            partition=partition,
            number=number,
        )
        answer = stream.peer.receive(methods.READ_OPTIMIZER, request, timeout_ms=self._deadline_ms)
        first = next(answer, None)
        if first is None:
            raise MalformedPayload(f"server {stream.server} sent no state of partition {partition}")
        slots, part = optimizer_messages.read_from_header(first.header), self._layout.partitions[partition]
        names = self._names_in(partition)
        if set(slots.slots) != set(names) or len(slots.counts) != len(part.blocks):
            raise MalformedPayload(
                f"server {stream.server} sent the optimizer's state of {len(slots.counts)} blocks of partition"
                f" {partition} with {slots.slots}; expected {len(part.blocks)} with {names}"
            )
        arrays = {name: np.empty(part.payload_bytes, np.uint8) for name in slots.slots}
        assembler = frames.Assembler(*[array.data for array in arrays.values()])
        assembler.add(first)
        for frame in answer:
            assembler.add(frame)
        assembler.finish()
        return slots, arrays

    def _of(self, block: Block, array: Bytes) -> Values:
        """The elements of a block in an array of its partition."""
        dtype = np.dtype(self._layout.variables[block.variable].dtype.value)
        return array[block.position : block.position + block.length * dtype.itemsize].view(dtype)
