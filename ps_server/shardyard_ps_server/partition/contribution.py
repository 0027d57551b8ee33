"""One push's part for one partition: what it contains, and how its payload is checked and unpacked.

In: a part's header and its bytes as they were received. Absent blocks are left out, and present ones may be compressed.
Out: a `Contribution`, whose payload is in the partition's full layout. A length that a header claims is compared with
the layout before memory is allocated. Must not know: ledgers, versions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardyard.codecs.dense.decoding import decode
from shardyard.domain.errors import MalformedPayload, ShapeMismatch
from shardyard.domain.layout.layouts import JobLayout, PartitionLayout, aligned_bytes
from shardyard.domain.limits import CODE_HEAD_BYTES_MAX
from shardyard.domain.optimizers import check_update
from shardyard.domain.pushes import PushHeader, PushKind, PushPart
from shardyard_ps_server.partition.staleness import Base
from shardyard_ps_server.partition.step_gate import Groups
from shardyard_ps_server.rows.pushed_rows import ExpiredIds, PushedTableRows
from shardyard_ps_server.values.versions import Bytes, aligned_empty


class Contribution(NamedTuple):
    """`payload`: shape (payload_bytes,), dtype uint8, contiguous, at a multiple of 8 bytes; `present[i]`: block i has a
    gradient (or value). `groups`: settings of the optimizer; None: a named empty push, without payload. `base`: the
    version on which the gradient was computed, if the worker says it. `overflow`: loss scaling has found that the
    gradient is beyond its format. `rows`: gradients of tables, to be applied with `table_groups`; `gone`: ids that
    expire with them, if that was decided before.
    """

    weight: float
    groups: Groups | None
    payload: Bytes
    present: tuple[bool, ...]
    base: Base | None = None
    overflow: bool = False
    rows: Sequence[PushedTableRows] = ()
    table_groups: Groups = ()
    gone: Sequence[ExpiredIds] = ()

    def without_rows(self) -> Contribution:
        return self._replace(rows=(), table_groups=(), gone=())


def parts_of(header: PushHeader, payload: Bytes) -> Iterator[tuple[PushPart, Bytes, Base | None]]:
    """Yields each part of a push, with its piece of the payload, and the version that it was computed on, if the worker
    says it."""
    at, worker = 0, header.caller.incarnation
    for index, part in enumerate(header.parts):
        base = Base(worker, header.bases[index]) if header.bases else None
        yield part, payload[at : at + part.payload_bytes], base
        at += part.payload_bytes


class PayloadLayout:
    """The places of one partition's blocks in its payload. `spans[i]`: the first byte of block i, and the first byte
    after it and its padding."""

    def __init__(self, layout: JobLayout, part: PartitionLayout) -> None:
        self._partition = part.partition
        self._optimizer = layout.optimizer
        self.nbytes = part.payload_bytes
        self.blocks = part.blocks
        self.variables = [layout.variables[block.variable] for block in part.blocks]
        self.spans = [
            (block.position, block.position + aligned_bytes(block.length * spec.dtype.item_bytes))
            for block, spec in zip(part.blocks, self.variables, strict=True)
        ]
        self.all_present = (True,) * len(part.blocks)
        self.none_present = (False,) * len(part.blocks)

    def elements(self, index: int) -> tuple[int, int]:
        """Returns the first byte of block `index`, and the first one after it, without padding."""
        start = self.spans[index][0]
        return start, start + self.blocks[index].length * self.variables[index].dtype.item_bytes

    def expected_bytes(self, part: PushPart) -> int:
        """Returns the length that the payload of this part must have. Raises MalformedPayload for a block that does not
        exist."""
        absent = part.absent_blocks
        if not absent:
            return self.nbytes if part.payload_bytes else 0
        count = len(self.blocks)
        if any(index >= count for index in absent) or any(a >= b for a, b in itertools.pairwise(absent)):
            raise MalformedPayload(
                f"absent blocks {list(absent[:8])} of partition {part.partition}, which has {count}; expected ascending"
            )
        if part.payload_bytes == 0:
            return 0
        return self.nbytes - sum([self.spans[index][1] - self.spans[index][0] for index in absent])

    def check_codes(self, part: PushPart) -> None:
        """Raises MalformedPayload unless there is one code for each present block, none longer than the block."""
        self.expected_bytes(PushPart(part.partition, 1, part.absent_blocks))
        absent = set(part.absent_blocks)
        present = [index for index in range(len(self.blocks)) if index not in absent]
        if len(part.code_bytes) != len(present):
            raise MalformedPayload(
                f"{len(part.code_bytes)} codes for the {len(present)} present blocks of partition {part.partition}"
            )
        for index, nbytes in zip(present, part.code_bytes, strict=True):
            length = self.blocks[index].length
            if nbytes > length * self.variables[index].dtype.item_bytes + CODE_HEAD_BYTES_MAX:
                raise MalformedPayload(f"a code of {nbytes} bytes in partition {part.partition} for {length} elements")

    def check_recorded(self, part: PushPart, nbytes: int, groups: Sequence[Sequence[float]] | None) -> None:
        """Checks a part that was read from a log; its payload has `nbytes`, in full layout or without absent blocks.
        Raises InvalidRequest if no server of this job can have admitted it: the length does not fit, or the settings
        are of another optimizer."""
        if groups is not None:
            check_update(self._optimizer, groups)
        if part.code_bytes and nbytes:
            self.check_codes(part)
        elif nbytes not in (self.expected_bytes(part), self.nbytes if nbytes else 0):
            raise ShapeMismatch(
                f"partition {self._partition} with {nbytes} bytes; expected {self.expected_bytes(part)}"
            )

    def contribution(
        self,
        header: PushHeader,
        part: PushPart,
        piece: Bytes,
        base: Base | None,
        rows: Sequence[PushedTableRows],
        gone: Sequence[ExpiredIds] = (),
    ) -> Contribution:
        """Returns what a part of a push contributes. `piece`: its payload. Raises what `unpack` raises."""
        full, present = self.unpack(part, piece)
        groups = header.groups if header.kind is PushKind.GRADIENT else None
        return Contribution(
            header.weight, groups, full, present, base, header.overflow, rows, header.table_groups, gone
        )

    def unpack(self, part: PushPart, payload: Bytes) -> tuple[Bytes, tuple[bool, ...]]:
        """Returns a part's payload in the full layout, and which blocks are present. Copies only if blocks were left
        out or are compressed. Raises TooLarge, and MalformedPayload for bytes that are no code."""
        if part.payload_bytes == 0:
            return payload, self.none_present
        if not part.absent_blocks and not part.code_bytes:
            return payload, self.all_present
        absent = frozenset(part.absent_blocks)
        present = tuple([index not in absent for index in range(len(self.blocks))])
        if part.payload_bytes == self.nbytes and not part.code_bytes:
            return payload, present
        full = aligned_empty(self.nbytes)
        codes = iter(part.code_bytes)
        at = 0
        for index, (start, stop) in enumerate(self.spans):
            if not present[index]:
                full[start:stop] = 0
            elif part.code_bytes:
                nbytes, end = next(codes), self.elements(index)[1]
                full[end:stop] = 0
                decode(payload[at : at + nbytes].data, full[start:end].view(self.variables[index].dtype.value))
                at += nbytes
            else:
                full[start:stop] = payload[at : at + stop - start]
                at += stop - start
        return full, present
