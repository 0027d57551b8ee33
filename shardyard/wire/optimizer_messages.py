"""Converts the optimizer's state of a partition between headers of frames and domain types.

Invariant: a header that was read announces at most BLOCKS_MAX counts and SLOTS_MAX arrays. Must not know: which arrays
an optimizer has, what is in them.
"""

from __future__ import annotations

from shardyard.domain import limits
from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.domain.ids import Caller, Generation, Incarnation, PartitionId
from shardyard.domain.optimizers import PartitionSlots
from shardyard.domain.replica_groups import NO_STEP, TakenStep
from shardyard.wire import common_messages
from shardyard.wire.v1 import parameter_server_pb2 as wire


def given_to_header(
    caller: Caller, server: Incarnation, generation: Generation, slots: PartitionSlots, taken: TakenStep = NO_STEP
) -> bytes:
    """The header of InitializeOptimizer, and of PublishState after a step that replicas have taken."""
    return wire.OptimizerHeader(
        caller=common_messages.caller_to_wire(caller),
        server=server,
        generation=generation,
        partition=slots.partition,
        counts=slots.counts,
        slots=slots.slots,
        step=taken.step,
        group=taken.group,
    ).SerializeToString()


def read_to_header(slots: PartitionSlots) -> bytes:
    """The header of an answer to ReadOptimizer."""
    assert slots.version is not None
    return wire.OptimizerHeader(
        partition=slots.partition,
        version=common_messages.version_to_wire(slots.version),
        counts=slots.counts,
        slots=slots.slots,
    ).SerializeToString()


def given_from_header(header: bytes) -> tuple[Caller, Incarnation, Generation, TakenStep, PartitionSlots]:
    """Raises MalformedPayload, TooLarge."""
    message = _parsed(header)
    caller = common_messages.caller_from_wire(message.caller)
    if message.step > limits.SEQUENCE_MAX:
        raise MalformedPayload(f"a state of step {message.step}")
    taken = TakenStep(message.step, message.group)
    return caller, Incarnation(message.server), Generation(message.generation), taken, _slots(message)


def read_from_header(header: bytes) -> PartitionSlots:
    """Raises MalformedPayload, TooLarge."""
    return _slots(_parsed(header))


def _parsed(header: bytes) -> wire.OptimizerHeader:
    return common_messages.parsed(wire.OptimizerHeader, header, "the header of an optimizer's state")


def _slots(message: wire.OptimizerHeader) -> PartitionSlots:
    if len(message.counts) > limits.BLOCKS_MAX or len(message.slots) > limits.SLOTS_MAX:
        raise TooLarge(
            f"an optimizer's state of {len(message.counts)} blocks with {len(message.slots)} arrays; at most"
            f" {limits.BLOCKS_MAX} and {limits.SLOTS_MAX}"
        )
    if len(set(message.slots)) < len(message.slots) or any(count > limits.SEQUENCE_MAX for count in message.counts):
        raise MalformedPayload("an optimizer's state with an array twice, or with a count that no partition has")
    version = common_messages.version_from_wire(message.version) if message.HasField("version") else None
    return PartitionSlots(
        PartitionId(message.partition),
        tuple(message.counts),
        tuple(message.slots),
        version,
    )
