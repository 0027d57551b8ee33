"""The form of a job's layout and partition map in the journal.

A layout is the same document as in a checkpoint's manifest; `shardyard.checkpoints.layout` makes and checks it.
Invariant: what is read equals what was written, down to the last offset. Must not know: how layouts are planned.
"""

from __future__ import annotations

from shardyard.checkpoints import layout as layouts
from shardyard.domain.errors import CheckpointDamaged
from shardyard.domain.ids import Generation, Incarnation, PartitionId
from shardyard.domain.layout.layouts import JobLayout, PartitionMap, PartitionOwner
from shardyard.storage.json_reader import JsonNode
from shardyard_coordinator.records import Body, DamagedRecord, checked_items, checked_number, checked_text


def layout_of_record(body: Body) -> JobLayout:
    """The record's `layout`. Raises DamagedRecord."""
    try:
        return layouts.from_document(JsonNode(body.values("layout"), "the record", "layout"))
    except CheckpointDamaged as error:
        raise DamagedRecord(error.what) from error


def map_to_record(map_: PartitionMap) -> dict[str, object]:
    return {"generation": map_.generation, "owners": [[owner.server, owner.address] for owner in map_.owners]}


def map_of_record(body: Body, partitions: int) -> PartitionMap:
    """The record's `map`. Raises DamagedRecord."""
    map_ = body.part("map")
    owners = checked_items(map_.items("owners"), "owners", count=partitions)
    return PartitionMap(
        Generation(map_.number("generation", least=1)), tuple(_owner_of(at, each) for at, each in enumerate(owners))
    )


def _owner_of(partition: int, item: object) -> PartitionOwner:
    server, address = checked_items(item, "an owner", count=2)
    return PartitionOwner(
        PartitionId(partition),
        Incarnation(checked_number(server, "an owner's server", least=1)),
        checked_text(address, "an owner's address"),
    )
