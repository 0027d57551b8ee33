"""Flat buffers between the model's tensors and the payloads of partitions.

Owns: for each server, memory with the gradients in their layout on the wire, and tensors over that memory, which a
model's `.grad`s can be. `pulled_values` has the values that come back. Must not know: servers' addresses, names of
pushes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionMap, aligned_bytes
from shardyard.domain.pushes import PushPart
from shardyard.domain.variables import VariableKind
from shardyard.transport.shared_memory import SharedMemory
from shardyard_worker.exchange.buffers.buffer_layout import (
    Bytes,
    ServerBuffers,
    Span,
    Where,
    absent_blocks,
    gradient_memory,
    pieces_of,
)
from shardyard_worker.exchange.buffers.device_copies import DeviceCopies, DeviceCopy
from shardyard_worker.exchange.buffers.pulled_values import PulledValues
from shardyard_worker.exchange.buffers.tensor_copy import TensorCopier
from shardyard_worker.exchange.buffers.tensor_types import TORCH_DTYPES, check_tensor, fits_dtype, widened

Codes = Mapping[PartitionId, Sequence[memoryview]]
Encode = Callable[[Sequence[tuple[Block, torch.Tensor]]], Sequence[memoryview]]


class FlatBuffers:
    """The buffers of a job's variables under one partition map.

    `shareable`: servers on this machine may open the gradients' memory. `pushes`: gradients are pushed; if not, their
    memory is not touched, so it takes no pages. `slots`: the number of copies of that memory,
    one for the push that is being filled and one for each push in flight. `copies`: copies tensors of a GPU, if any.
    `own`: the partitions that are pushed and pulled; None: all.
    """

    def __init__(
        self,
        layout: JobLayout,
        map_: PartitionMap,
        *,
        shareable: bool = False,
        pushes: bool = True,
        slots: int = 1,
        copies: DeviceCopies | None = None,
        own: Collection[PartitionId] | None = None,
    ) -> None:
        self.layout = layout
        self._copies = copies
        self._pushes = pushes
        self._slots = slots
        self.slot = 0
        """The slot that is filled now. Slots are used in turn."""
        self._expected = [(spec.shape, TORCH_DTYPES[spec.dtype]) for spec in layout.variables]
        self._by_server: dict[Incarnation, ServerBuffers] = {}
        self._where: list[list[Where]] = [[] for _ in layout.variables]
        for server, owners in map_.by_server().items():
            partitions = tuple(each.partition for each in owners if own is None or each.partition in own)
            self._allocate(server, partitions, shareable)
        self._gradients = [
            [self._gradient_pieces(index, slot) for index in range(len(layout.variables))] for slot in range(slots)
        ]
        self._views = [
            [self._view(index, pieces) for index, pieces in enumerate(self._gradients[slot])] for slot in range(slots)
        ]
        self._copier = TensorCopier(copies)
        self.values = PulledValues(layout, self._by_server, self._where, copies, self._copier)

    def close(self) -> None:
        """From now on servers cannot attach."""
        if self._copies is not None:
            self._copies.close()
        for buffers in self._by_server.values():
            if buffers.memory is not None:
                buffers.memory.close()
        self._copier.close()

    def _allocate(self, server: Incarnation, partitions: tuple[PartitionId, ...], shareable: bool) -> None:
        parts = [self.layout.partitions[partition] for partition in partitions]
        begins, total = [], 0
        for part in parts:
            begins.append(total)
            total += part.payload_bytes
        memory, gradients = gradient_memory(self._slots * total, shareable, self._copies, at_once=self._pushes)
        buffers = ServerBuffers(
            server,
            partitions,
            tuple(begins),
            total,
            tuple(pieces_of(self.layout, part) for part in parts),
            tuple(PushPart(part.partition, part.payload_bytes) for part in parts),
            tuple(PushPart(part.partition, 0) for part in parts),
            memory,
            gradients,
        )
        self._by_server[server] = buffers
        for index, pieces in enumerate(buffers.pieces):
            for number, piece in enumerate(pieces):
                self._where[piece.variable].append(Where(buffers, index, number, piece))

    def _gradient_pieces(self, index: int, slot: int) -> tuple[torch.Tensor, ...]:
        found = []
        for where in self._where[index]:
            begin = slot * where.buffers.nbytes + where.buffers.begins[where.part]
            found.append(where.piece.of(where.buffers.gradients[begin:]))
        return tuple(found)

    def _view(self, index: int, pieces: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        spec = self.layout.variables[index]
        return pieces[0].view(spec.shape) if len(pieces) == 1 and spec.kind is VariableKind.PARAMETER else None

    def take_over(self, old: FlatBuffers) -> None:
        """Copies the filled-in gradients, if any are, and the current values from the buffers of an earlier map of the
        same layout. Nothing refers to `old` afterwards."""
        assert old.layout is self.layout or old.layout == self.layout
        assert old._slots == self._slots
        self.slot = old.slot
        for index, places in enumerate(self._where):
            before = {(w.buffers.partitions[w.part], w.number): at for at, w in enumerate(old._where[index])}
            for slot in range(self._slots if self._pushes and old._pushes else 0):
                for into, where in zip(self._gradients[slot][index], places, strict=True):
                    into.copy_(old._gradients[slot][index][before[where.buffers.partitions[where.part], where.number]])
        current = {
            buffers.partitions[part]: values
            for buffers in old._by_server.values()
            for part, values in enumerate(buffers.current)
        }
        for server, buffers in self._by_server.items():
            if current and buffers.partitions:
                self.values.stream_buffer(server)
                for part, partition in enumerate(buffers.partitions):
                    kept = buffers.values(part, (-1, 0), buffers.stream_buffers[0][buffers.begins[part] :])
                    for into, values in zip(kept.tensors, current[partition].tensors, strict=True):
                        into.copy_(values)
                    buffers.current.append(kept)

    @property
    def servers(self) -> tuple[Incarnation, ...]:
        return tuple(self._by_server)

    def nbytes(self, server: Incarnation) -> int:
        """The size of a server's whole payload. The slots lie one after the other in its shared memory."""
        return self._by_server[server].nbytes

    def partitions(self, server: Incarnation) -> tuple[PartitionId, ...]:
        return self._by_server[server].partitions

    def payload_bytes(self, partition: PartitionId) -> int:
        return self.layout.partitions[partition].payload_bytes

    # ---- towards the servers

    def view(self, index: int) -> torch.Tensor | None:
        """Memory of the variable's shape that the next push sends: a gradient there need not be copied. None if the
        variable is cut into several pieces."""
        return self._views[self.slot][index]

    def fill(self, sent: Sequence[torch.Tensor | None]) -> None:
        """Copies what a push carries into the flat buffers: for each variable, in order, a gradient (parameter), a new
        value (buffer), or None. A gradient that is its own `view` is not copied. Raises ShapeMismatch, DTypeMismatch,
        UnsupportedModel."""
        views, pairs = self._views[self.slot], []
        wanted: list[DeviceCopy] = []
        for index, tensor in enumerate(sent):
            view = views[index]
            if tensor is None or tensor is view:
                continue
            shape, dtype = self._expected[index]
            plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
            if not plain or tensor.dtype is not dtype or tensor.shape != shape:
                check_tensor(self.layout.variables[index], tensor)
            if self._copies is not None:
                if self._copies.carries(tensor):
                    wanted.append(self._wanted(index, tensor))
                    continue
                self._copies.forget(index)
            tensor = tensor.detach()
            if view is not None:
                pairs.append((view, tensor))
                continue
            flat = tensor.reshape(-1)
            for where, into in zip(self._where[index], self._gradients[self.slot][index], strict=True):
                pairs.append((into, flat[where.piece.offset : where.piece.offset + where.piece.length]))
        self._copier.copy(pairs)
        if wanted and self._copies is not None:
            self._copies.fetch(wanted)

    def first_values(self, server: Incarnation, values: Sequence[torch.Tensor]) -> Iterator[memoryview]:
        """A server's whole payload with these values of all variables, piece by piece. Raises ShapeMismatch,
        DTypeMismatch, UnsupportedModel."""
        for partition in self._by_server[server].partitions:
            part, come = self.layout.partitions[partition], 0
            for block in part.blocks:
                tensor = values[block.variable]
                check_tensor(self.layout.variables[block.variable], tensor)
                flat = tensor.detach().reshape(-1)[block.offset : block.offset + block.length]
                piece = widened(flat).cpu().contiguous().view(torch.uint8).numpy()
                yield memoryview(bytes(block.position - come))
                yield piece.data
                come = block.position + piece.nbytes
            yield memoryview(bytes(part.payload_bytes - come))

    def carries(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on a GPU: its elements are copied, by `take` or `fill`."""
        return self._copies is not None and self._copies.carries(tensor)

    def take(self, index: int, gradient: torch.Tensor) -> Callable[[], None] | None:
        """Begins to copy a gradient that a GPU has just computed, so that `fill` need not copy it. Returns a function
        that waits for the end of the copy; None: `fill` will copy it."""
        spec = self.layout.variables[index]
        fits = tuple(gradient.shape) == spec.shape and fits_dtype(spec, gradient)
        if self._copies is None or not fits or gradient.layout is not torch.strided:
            return None
        begun = self._copies.take(self._wanted(index, gradient))
        return None if begun is None else begun.synchronize

    def _wanted(self, index: int, tensor: torch.Tensor) -> DeviceCopy:
        offsets = tuple(where.piece.offset for where in self._where[index])
        return DeviceCopy(index, tensor, self._gradients[self.slot][index], offsets)

    def next_slot(self) -> None:
        """The push of this slot is in flight, so the next one uses another."""
        self.slot = (self.slot + 1) % self._slots
        if self._copies is not None:
            self._copies.forget()

    def memory(self, server: Incarnation) -> SharedMemory | None:
        """The shared memory of a server's gradients, if they are in shared memory."""
        return self._by_server[server].memory

    def parts(
        self, server: Incarnation, absent: frozenset[int], slot: int = 0
    ) -> tuple[tuple[PushPart, ...], list[memoryview]]:
        """A server's part of a push over a stream, without the variables in `absent` (indices), and its payload in
        pieces."""
        buffers = self._by_server[server]
        payload = self.payload(server, slot)
        if not absent:
            return buffers.whole, [payload.data]
        parts: list[PushPart] = []
        pieces: list[memoryview] = []
        for index, partition in enumerate(buffers.partitions):
            part = self.layout.partitions[partition]
            ends = [*(block.position for block in part.blocks[1:]), part.payload_bytes]
            present = [
                (block.position, end)
                for block, end in zip(part.blocks, ends, strict=False)  # a partition without blocks has one end
                if block.variable not in absent
            ]
            if not present:
                parts.append(PushPart(partition, 0))
                continue
            begin = buffers.begins[index]
            pieces += [payload[begin + start : begin + stop].data for start, stop in present]
            nbytes = sum(stop - start for start, stop in present)
            parts.append(PushPart(partition, nbytes, absent_blocks(part, absent)))
        return tuple(parts), pieces

    def span(self, index: int) -> Span | None:
        """The bytes of a gradient whose variable is in one piece, padding included."""
        if len(self._where[index]) != 1:
            return None
        (where,) = self._where[index]
        begin = where.buffers.begins[where.part]
        return Span(where.buffers.server, begin + where.piece.start, begin + aligned_bytes(where.piece.stop))

    def payload(self, server: Incarnation, slot: int = 0) -> Bytes:
        """A server's whole payload in a slot."""
        buffers = self._by_server[server]
        return buffers.gradients[slot * buffers.nbytes :][: buffers.nbytes]

    def shared_parts(self, server: Incarnation, absent: frozenset[int]) -> tuple[PushPart, ...]:
        """A server's part of a push whose payload is the whole layout, even if variables are absent."""
        buffers = self._by_server[server]
        if not absent:
            return buffers.whole
        parts = [self.layout.partitions[partition] for partition in buffers.partitions]
        return tuple([PushPart(part.partition, part.payload_bytes, absent_blocks(part, absent)) for part in parts])

    def encode(self, sent: Sequence[torch.Tensor | None], encode: Encode) -> Codes:
        """Encodes what a push carries: for each partition one code a block. The tensors have been checked
        (`check_tensor`) and are encoded in place."""
        flat = [None if tensor is None else tensor.detach().reshape(-1) for tensor in sent]
        codes: dict[PartitionId, list[memoryview]] = {}
        places: list[list[memoryview]] = []
        blocks: list[tuple[Block, torch.Tensor]] = []
        for buffers in self._by_server.values():
            for partition in buffers.partitions:
                codes[partition] = []
                for block in self.layout.partitions[partition].blocks:
                    tensor = flat[block.variable]
                    if tensor is not None:
                        places.append(codes[partition])
                        blocks.append((block, tensor[block.offset : block.offset + block.length]))
        for place, code in zip(places, encode(blocks), strict=True):
            place.append(code)
        return codes

    def coded_parts(
        self, server: Incarnation, absent: frozenset[int], codes: Codes
    ) -> tuple[tuple[PushPart, ...], list[memoryview]]:
        """As `parts`, with codes as the payload."""
        parts: list[PushPart] = []
        pieces: list[memoryview] = []
        for partition in self._by_server[server].partitions:
            sizes = tuple(len(code) for code in codes[partition])
            missing = absent_blocks(self.layout.partitions[partition], absent) if sizes else ()
            parts.append(PushPart(partition, sum(sizes), missing, sizes))
            pieces += codes[partition]
        return tuple(parts), pieces

    def empty_parts(self, server: Incarnation) -> tuple[PushPart, ...]:
        """A server's part of a push that touches nothing: it lists every partition (rule A3)."""
        return self._by_server[server].empty
