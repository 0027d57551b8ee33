"""The values of the current version, and of the next one while it comes from the servers.

Invariant: the next version is assembled beside the current one, and replaces it as a whole, over all servers. So the
current values can be put back into the model at any time (rule B5), once those that are still arriving have come. Must
not know: servers' addresses, names of pushes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from shardyard.codecs.dense.decoding import apply
from shardyard.domain.ids import Incarnation
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.pulls import ShmHandle
from shardyard.domain.variables import VariableKind
from shardyard.transport.interfaces import Descriptors
from shardyard.transport.shared_memory import AttachedMemory, attach_received
from shardyard_worker.exchange.buffers.buffer_layout import (
    Bytes,
    Key,
    Late,
    PartValues,
    ServerBuffers,
    Version,
    Where,
    free_stream_buffer,
    zeros,
)
from shardyard_worker.exchange.buffers.device_copies import DeviceCopies
from shardyard_worker.exchange.buffers.partial_reply import PartialReply
from shardyard_worker.exchange.buffers.tensor_copy import TensorCopier
from shardyard_worker.exchange.buffers.tensor_types import TORCH_DTYPES


class PulledValues:
    """Over the buffers of all servers under one map."""

    def __init__(
        self,
        layout: JobLayout,
        by_server: Mapping[Incarnation, ServerBuffers],
        where: Sequence[Sequence[Where]],
        copies: DeviceCopies | None,
        copier: TensorCopier,
    ) -> None:
        self._layout = layout
        self._by_server = by_server
        self._where = where
        self._copies = copies
        self._copier = copier

    def stream_buffer(self, server: Incarnation) -> memoryview:
        """The memory for the next version of a server's values, if it comes over a stream."""
        buffers = self._by_server[server]
        if not buffers.stream_buffers:
            buffers.stream_buffers = [zeros(buffers.nbytes, self._copies) for _ in range(2)]
        return buffers.stream_buffers[free_stream_buffer(buffers)].data

    def decode(self, server: Incarnation, codes: Bytes, sizes: Sequence[int], *, to_shadow: bool) -> None:
        """Decodes the next version of a server's values: one code a block; `sizes`: their bytes. `to_shadow`: a code
        may be the difference to the values before. Raises MalformedPayload, TooLarge."""
        buffers = self._by_server[server]
        buffer = np.frombuffer(self.stream_buffer(server), np.uint8)
        if to_shadow and buffers.shadow is None:
            buffers.shadow = np.zeros(buffers.nbytes, np.uint8)
        into = buffer if not to_shadow or buffers.shadow is None else buffers.shadow
        left, at = iter(sizes), 0
        for partition, begin in zip(buffers.partitions, buffers.begins, strict=True):
            for block in self._layout.partitions[partition].blocks:
                dtype, nbytes = self._layout.variables[block.variable].dtype, next(left)
                start = begin + block.position
                values = into[start : start + block.length * dtype.item_bytes].view(dtype.value)
                apply(codes[at : at + nbytes].data, values)
                at += nbytes
        if to_shadow:
            buffer[:] = into
        self.note_streamed(server)

    def blocks(self, server: Incarnation) -> int:
        """The number of blocks in a server's payload."""
        return sum(len(self._layout.partitions[p].blocks) for p in self._by_server[server].partitions)

    def note_streamed(self, server: Incarnation, arrival: PartialReply | None = None) -> None:
        """The stream buffer is full, or will be when `arrival` is complete."""
        buffers = self._by_server[server]
        buffers.arriving = arrival
        number = free_stream_buffer(buffers)
        payload = buffers.stream_buffers[number]
        buffers.incoming = [
            buffers.values(index, (-1 - number, 0), payload[begin:]) for index, begin in enumerate(buffers.begins)
        ]

    def note_shared(self, server: Incarnation, payloads: Iterable[tuple[Key, Bytes]]) -> None:
        """The next version of a server's values lies in these payloads in shared memory, one for each partition."""
        buffers = self._by_server[server]
        buffers.arriving = None
        incoming: list[PartValues] = []
        for key, payload in payloads:
            index = len(incoming)
            incoming.append(buffers.known.get((index, key)) or buffers.values(index, key, payload))
        buffers.incoming = incoming

    def forget(self, server: Incarnation) -> None:
        """The server's memory has changed. The current values stay as they are."""
        buffers = self._by_server[server]
        buffers.known = {at: values for at, values in buffers.known.items() if values.key[0] < 0}
        if self._copies is not None and buffers.attached:
            self._copies.await_values()
            for memory in buffers.attached:
                self._copies.unpin(memory.bytes)
            buffers.attached = []

    def attach(self, server: Incarnation, ticket: ShmHandle, descriptors: Descriptors | None) -> AttachedMemory:
        """Maps a server's memory, so that values are read in place. Raises NotShareable."""
        if self._copies is None or not self._copies.alone:
            return attach_received(ticket, descriptors, private=True)
        memory = self._copies.attach(ticket, descriptors)
        self._by_server[server].attached.append(memory)
        return memory

    def await_copies(self) -> None:
        """Waits until no copy to a GPU reads current values. Call it before a server's next exchange."""
        if self._copies is not None:
            self._copies.await_values()

    def flip(self) -> None:
        """Makes the next version, complete on all servers, the current one."""
        for buffers in self._by_server.values():
            if buffers.incoming:
                buffers.current, buffers.incoming = buffers.incoming, []
                buffers.arrival, buffers.arriving = buffers.arriving, None

    @property
    def version(self) -> Version:
        """The current values, for a later `load`."""
        return {server: buffers.current for server, buffers in self._by_server.items()}

    def late(self, index: int) -> list[Late]:
        """The parts of a variable's current value that have not arrived."""
        found = []
        for where in self._where[index]:
            begin = where.buffers.begins[where.part]
            arrival, begin, end = where.buffers.arrival, begin + where.piece.start, begin + where.piece.stop
            if arrival is not None and not arrival.has(begin, end):
                found.append(Late(arrival, begin, end))
        return found

    def load(self, targets: Mapping[int, torch.Tensor], *, view: bool = False, version: Version | None = None) -> None:
        """Copies the current values, or those of `version`, into tensors, by index of the variable. `view`: parameters
        in one piece become views on the values instead, until the next call."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, target in targets.items():
            pieces = []
            for where in self._where[index]:
                parts = where.buffers.current if version is None else version[where.buffers.server]
                pieces.append((where, parts[where.part].tensors[where.number]))
            if view and len(pieces) == 1 and self._may_view(index, target):
                target.data = pieces[0][1].view(target.shape)
                continue
            contiguous = target.is_contiguous()
            if contiguous and len(pieces) == 1:
                pairs.append((target.detach().view(-1), pieces[0][1]))
                continue
            flat = target.detach().view(-1) if contiguous else torch.empty(target.numel(), dtype=target.dtype)
            mine = [(flat[w.piece.offset : w.piece.offset + w.piece.length], values) for w, values in pieces]
            if contiguous:
                pairs += mine
            else:
                self._copier.copy(mine)
                with torch.no_grad():
                    target.copy_(flat.view(target.shape))
        self._copier.copy(pairs)

    def _may_view(self, index: int, target: torch.Tensor) -> bool:
        spec = self._layout.variables[index]
        fits = spec.kind is VariableKind.PARAMETER and target.dtype is TORCH_DTYPES[spec.dtype]
        fits = fits and target.is_contiguous() and target.device.type == "cpu"
        return fits and not (self._copies is not None and self._copies.carries(target))
