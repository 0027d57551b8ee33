"""The order in which the values of a pull are sent, as runs of bytes.

Pure. Invariant: the runs of a payload cover each of its bytes once, whatever the order. Must not know: versions,
streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import JobLayout


class PullRun(NamedTuple):
    """Bytes [begin, end) of the payload of partition number `part` of a pull; `offset`: their place in the concatenated
    payload of all partitions."""

    part: int
    begin: int
    end: int
    offset: int


def runs_in_order(layout: JobLayout, partitions: Sequence[PartitionId], order: Sequence[int]) -> tuple[PullRun, ...]:
    """Returns the blocks of the variables in `order` (indices, each once), then those of the others, with their
    padding. Neighbours share a run. Raises InvalidRequest for a variable that the layout does not have."""
    for index in order:
        if index >= len(layout.variables):
            raise InvalidRequest(
                f"variable {index} in the order of a pull; the job has {len(layout.variables)}",
                todo="name variables by their index in the layout",
            )
    ranks = {variable: rank for rank, variable in enumerate(order)}
    found: list[tuple[int, PullRun]] = []
    at = 0
    for part, partition in enumerate(partitions):
        of = layout.partitions[partition]
        ends = [*(block.position for block in of.blocks[1:]), of.payload_bytes]
        for block, end in zip(of.blocks, ends, strict=False):  # a partition without blocks has one end
            run = PullRun(part, block.position, end, at + block.position)
            found.append((ranks.get(block.variable, len(order) + block.variable), run))
        at += of.payload_bytes
    found.sort(key=lambda each: each[0])
    runs: list[PullRun] = []
    for _, run in found:
        last = runs[-1] if runs else None
        if last is not None and (last.part, last.end) == (run.part, run.begin):
            runs[-1] = PullRun(run.part, last.begin, run.end, last.offset)
        else:
            runs.append(run)
    return tuple(runs)
