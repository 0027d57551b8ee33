"""Flat buffers between the model's tensors and the payloads of partitions.

Owns: per server the memory that gradients are laid out in as its payload lies on the wire, the views that a model's
`.grad`s may be, and which bytes are the values of the current version. Invariants: a pull is put together beside the
current version, and becomes current as a whole, over all servers; so the values of the current version can be put back
into the model at any time (rule B5), once those of them that are still on their way have come. Must not know: servers'
addresses, names of pushes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shardyard.codecs import apply
from shardyard.domain.errors import NotShareable
from shardyard.domain.ids import Incarnation, PartitionId
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout, PartitionMap, aligned_bytes
from shardyard.domain.limits import MIB
from shardyard.domain.pulls import ShmHandle
from shardyard.domain.pushes import PushPart
from shardyard.domain.variables import DType, VariableKind
from shardyard.transport.shared_memory import AttachedMemory, SharedMemory, attach
from shardyard.transport.stream_copy import copy_past_cache
from shardyard_worker.exchange.device_copies import DeviceCopies, DeviceCopy, tensor_of
from shardyard_worker.exchange.partial_reply import PartialReply
from shardyard_worker.exchange.tensor_types import TORCH_DTYPES, check_tensor, fits_dtype

Bytes = npt.NDArray[np.uint8]
Codes = Mapping[PartitionId, tuple[memoryview, ...]]
Encode = Callable[[Sequence[tuple[Block, torch.Tensor]]], Sequence[memoryview]]
Key = tuple[int, int]
"""Where a partition's values lie: (region, byte) of its server's memory; (-1 or -2, 0): came over a stream."""

COPY_BYTES_EACH = 4 * MIB
"""DeviceCopies are cut into pieces of this size, so that two threads can share them."""


@dataclass(frozen=True)
class _Piece:
    """Adjacent blocks of one variable in one partition: elements [offset, offset + length) of the variable, at byte
    `start` of the partition's payload."""

    variable: int
    offset: int
    length: int
    start: int
    dtype: DType

    @property
    def stop(self) -> int:
        return self.start + self.length * self.dtype.item_bytes

    def of(self, payload: Bytes) -> torch.Tensor:
        return tensor_of(payload[self.start : self.stop]).view(TORCH_DTYPES[self.dtype])


def _pieces(layout: JobLayout, part: PartitionLayout) -> tuple[_Piece, ...]:
    found: list[_Piece] = []
    for block in part.blocks:
        dtype = layout.variables[block.variable].dtype
        last = found[-1] if found else None
        if last is not None and (last.variable, last.offset + last.length, last.stop) == (
            block.variable,
            block.offset,
            block.position,
        ):
            found[-1] = _Piece(last.variable, last.offset, last.length + block.length, last.start, dtype)
        else:
            found.append(_Piece(block.variable, block.offset, block.length, block.position, dtype))
    return tuple(found)


@dataclass
class _Values:
    """A partition's payload of one version, and a tensor for each of its pieces."""

    key: Key
    tensors: tuple[torch.Tensor, ...]


Version = Mapping[Incarnation, Sequence[_Values]]
"""The values of all servers at one time. They stay where they are until as many pulls later as there are landings."""


class Late(NamedTuple):
    """Bytes [begin, end) of what a server sends, which have not come."""

    arrival: PartialReply
    begin: int
    end: int


class Span(NamedTuple):
    """Bytes [begin, end) of a server's payload, multiples of 64."""

    server: Incarnation
    begin: int
    end: int


@dataclass
class _Home:
    """What one server has: partitions in order, the byte at which each begins in the server's payload, their pieces."""

    server: Incarnation
    partitions: tuple[PartitionId, ...]
    begins: tuple[int, ...]
    nbytes: int
    pieces: tuple[tuple[_Piece, ...], ...]
    whole: tuple[PushPart, ...]
    empty: tuple[PushPart, ...]
    memory: SharedMemory | None
    gradients: Bytes
    landings: list[Bytes] = field(default_factory=list)
    attached: list[AttachedMemory] = field(default_factory=list)
    shadow: Bytes | None = None
    current: list[_Values] = field(default_factory=list)
    incoming: list[_Values] = field(default_factory=list)
    arrival: PartialReply | None = None
    arriving: PartialReply | None = None
    known: dict[tuple[int, Key], _Values] = field(default_factory=dict)

    def values(self, index: int, key: Key, payload: Bytes) -> _Values:
        """The tensors of partition `index` at a place; made once, since places come again and again."""
        found = self.known.get((index, key))
        if found is None:
            found = _Values(key, tuple(piece.of(payload) for piece in self.pieces[index]))
            self.known[index, key] = found
        return found


@dataclass(frozen=True)
class _Where:
    """A piece of a variable: home, index of the partition in it, index of the piece in that."""

    home: _Home
    part: int
    number: int
    piece: _Piece


class FlatBuffers:
    """The buffers of a job's variables under one partition map.

    `shareable`: gradients lie in memory that servers on this machine may open. `slots`: pushes that may be under way at
    a time, each with gradients of its own. `copies`: by which tensors on a GPU are copied, if there are any.
    """

    def __init__(
        self,
        layout: JobLayout,
        map_: PartitionMap,
        *,
        shareable: bool = False,
        slots: int = 1,
        copies: DeviceCopies | None = None,
    ) -> None:
        self._layout = layout
        self._copies = copies
        self._slots = slots
        self._slot = 0
        self._homes: dict[Incarnation, _Home] = {}
        self._where: list[list[_Where]] = [[] for _ in layout.variables]
        for server, owners in map_.by_server().items():
            self._make_home(server, tuple(owner.partition for owner in owners), shareable)
        self._gradients = [
            [self._gradient_pieces(index, slot) for index in range(len(layout.variables))] for slot in range(slots)
        ]
        self._views = [
            [self._view(index, pieces) for index, pieces in enumerate(self._gradients[slot])] for slot in range(slots)
        ]
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Servers cannot attach from now on, and copies are made by one thread."""
        if self._copies is not None:
            self._copies.close()
        for home in self._homes.values():
            if home.memory is not None:
                home.memory.close()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _make_home(self, server: Incarnation, partitions: tuple[PartitionId, ...], shareable: bool) -> None:
        parts = [self._layout.partitions[partition] for partition in partitions]
        begins, total = [], 0
        for part in parts:
            begins.append(total)
            total += part.payload_bytes
        memory, gradients = _gradient_memory(self._slots * total, shareable, self._copies)
        home = _Home(
            server,
            partitions,
            tuple(begins),
            total,
            tuple(_pieces(self._layout, part) for part in parts),
            tuple(PushPart(part.partition, part.payload_bytes) for part in parts),
            tuple(PushPart(part.partition, 0) for part in parts),
            memory,
            gradients,
        )
        self._homes[server] = home
        for index, pieces in enumerate(home.pieces):
            for number, piece in enumerate(pieces):
                self._where[piece.variable].append(_Where(home, index, number, piece))

    def _gradient_pieces(self, index: int, slot: int) -> tuple[torch.Tensor, ...]:
        found = []
        for where in self._where[index]:
            begin = slot * where.home.nbytes + where.home.begins[where.part]
            found.append(where.piece.of(where.home.gradients[begin:]))
        return tuple(found)

    def _view(self, index: int, pieces: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        spec = self._layout.variables[index]
        return pieces[0].view(spec.shape) if len(pieces) == 1 and spec.kind is VariableKind.PARAMETER else None

    def take_over(self, old: FlatBuffers) -> None:
        """Gradients that are filled in, and the current values, from the buckets of an earlier map of the same layout.
        What lies there is not referred to any more."""
        assert old._layout is self._layout or old._layout == self._layout
        assert old._slots == self._slots
        self._slot = old._slot
        for index, places in enumerate(self._where):
            before = {(w.home.partitions[w.part], w.number): at for at, w in enumerate(old._where[index])}
            for slot in range(self._slots):
                for into, where in zip(self._gradients[slot][index], places, strict=True):
                    into.copy_(old._gradients[slot][index][before[where.home.partitions[where.part], where.number]])
        current = {
            home.partitions[part]: values for home in old._homes.values() for part, values in enumerate(home.current)
        }
        for server, home in self._homes.items():
            if current and home.partitions:
                self.landing(server)
                for part, partition in enumerate(home.partitions):
                    kept = home.values(part, (-1, 0), home.landings[0][home.begins[part] :])
                    for into, values in zip(kept.tensors, current[partition].tensors, strict=True):
                        into.copy_(values)
                    home.current.append(kept)

    @property
    def servers(self) -> tuple[Incarnation, ...]:
        return tuple(self._homes)

    def nbytes(self, server: Incarnation) -> int:
        """A whole payload for a server."""
        return self._homes[server].nbytes

    def payload_bytes(self, partition: PartitionId) -> int:
        return self._layout.partitions[partition].payload_bytes

    # ---- towards the servers

    def view(self, index: int) -> torch.Tensor | None:
        """Memory of the variable's shape that the next push sends as it lies; None where the variable is cut into
        several pieces. A gradient that is put there need not be copied."""
        return self._views[self._slot][index]

    def fill(self, sent: Sequence[torch.Tensor | None]) -> None:
        """DeviceCopies what a push carries into the flat buffers: for each variable, in order, a gradient (parameter)
        or a new value (buffer), or None. What lies there already is left. Raises ShapeMismatch, DTypeMismatch,
        UnsupportedModel, having sent nothing."""
        views, pairs = self._views[self._slot], []
        wanted: list[DeviceCopy] = []
        for index, tensor in enumerate(sent):
            if tensor is None or tensor is views[index]:
                continue
            check_tensor(self._layout.variables[index], tensor)
            if self._copies is not None:
                if self._copies.carries(tensor):
                    wanted.append(self._wanted(index, tensor))
                    continue
                self._copies.forget(index)
            flat = tensor.detach().reshape(-1)
            for where, into in zip(self._where[index], self._gradients[self._slot][index], strict=True):
                pairs.append((into, flat[where.piece.offset : where.piece.offset + where.piece.length]))
        self._copy(pairs)
        if wanted and self._copies is not None:
            self._copies.fetch(wanted)

    def carries(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on a GPU: its elements are copied, by `take` or `fill`."""
        return self._copies is not None and self._copies.carries(tensor)

    def take(self, index: int, gradient: torch.Tensor) -> Callable[[], None] | None:
        """Begins to copy a gradient that a GPU has just made; `fill` of the same, unchanged, will not have to. What is
        given back returns when it lies in its view. None: it is left to `fill`."""
        spec = self._layout.variables[index]
        fits = tuple(gradient.shape) == spec.shape and fits_dtype(spec, gradient)
        if self._copies is None or not fits or gradient.layout is not torch.strided:
            return None
        begun = self._copies.take(self._wanted(index, gradient))
        return None if begun is None else begun.synchronize

    def _wanted(self, index: int, tensor: torch.Tensor) -> DeviceCopy:
        offsets = tuple(where.piece.offset for where in self._where[index])
        return DeviceCopy(index, tensor, self._gradients[self._slot][index], offsets)

    @property
    def slot(self) -> int:
        """Where what is filled in now lies; it stays there until as many pushes later as there are slots."""
        return self._slot

    def next_slot(self) -> None:
        """What was filled in belongs to a push that is under way; the next one is put elsewhere."""
        self._slot = (self._slot + 1) % self._slots
        if self._copies is not None:
            self._copies.forget()

    def memory(self, server: Incarnation) -> SharedMemory | None:
        """The memory that a server on this machine may open, if gradients lie in such."""
        return self._homes[server].memory

    def place(self, server: Incarnation, slot: int) -> int:
        """Where the payload for a server begins in its memory. `slot`: that of `slot` when the push was filled in."""
        return slot * self._homes[server].nbytes

    def parts(
        self, server: Incarnation, absent: frozenset[int], slot: int = 0
    ) -> tuple[tuple[PushPart, ...], list[memoryview]]:
        """A server's part of a push over a stream, without the variables in `absent` (indices), and its payload in
        pieces."""
        home = self._homes[server]
        payload = self.payload(server, slot)
        if not absent:
            return home.whole, [payload.data]
        parts: list[PushPart] = []
        pieces: list[memoryview] = []
        for index, partition in enumerate(home.partitions):
            part = self._layout.partitions[partition]
            ends = [*(block.position for block in part.blocks[1:]), part.payload_bytes]
            present = [
                (block.position, end)
                for block, end in zip(part.blocks, ends, strict=False)  # one end more where there is no block
                if block.variable not in absent
            ]
            if not present:
                parts.append(PushPart(partition, 0))
                continue
            begin = home.begins[index]
            pieces += [payload[begin + start : begin + stop].data for start, stop in present]
            nbytes = sum(stop - start for start, stop in present)
            parts.append(PushPart(partition, nbytes, _absent_blocks(part, absent)))
        return tuple(parts), pieces

    def span(self, index: int) -> Span | None:
        """Where a variable that lies in one piece has its gradient, with its filling."""
        if len(self._where[index]) != 1:
            return None
        (where,) = self._where[index]
        begin = where.home.begins[where.part]
        return Span(where.home.server, begin + where.piece.start, begin + aligned_bytes(where.piece.stop))

    def payload(self, server: Incarnation, slot: int = 0) -> Bytes:
        """The whole of what a push carries."""
        home = self._homes[server]
        return home.gradients[slot * home.nbytes :][: home.nbytes]

    def shared_parts(self, server: Incarnation, absent: frozenset[int]) -> tuple[PushPart, ...]:
        """A server's part of a push in the whole layout, whatever is absent."""
        home = self._homes[server]
        if not absent:
            return home.whole
        return tuple(
            PushPart(p, part.payload_bytes, _absent_blocks(part, absent))
            for p in home.partitions
            for part in (self._layout.partitions[p],)
        )

    def encode(self, sent: Sequence[torch.Tensor | None], encode: Encode) -> Codes:
        """The codes of what a push carries, for each partition one a block. The tensors have been checked
        (`check_tensor`); they are encoded where they lie."""
        flat = [None if tensor is None else tensor.detach().reshape(-1) for tensor in sent]
        places: list[PartitionId] = []
        blocks: list[tuple[Block, torch.Tensor]] = []
        for home in self._homes.values():
            for partition in home.partitions:
                for block in self._layout.partitions[partition].blocks:
                    tensor = flat[block.variable]
                    if tensor is not None:
                        places.append(partition)
                        blocks.append((block, tensor[block.offset : block.offset + block.length]))
        codes: dict[PartitionId, list[memoryview]] = {
            partition: [] for home in self._homes.values() for partition in home.partitions
        }
        for partition, code in zip(places, encode(blocks), strict=True):
            codes[partition].append(code)
        return {partition: tuple(found) for partition, found in codes.items()}

    def coded_parts(
        self, server: Incarnation, absent: frozenset[int], codes: Codes
    ) -> tuple[tuple[PushPart, ...], list[memoryview]]:
        """As `parts`, with codes for payload."""
        parts: list[PushPart] = []
        pieces: list[memoryview] = []
        for partition in self._homes[server].partitions:
            sizes = tuple(len(code) for code in codes[partition])
            missing = _absent_blocks(self._layout.partitions[partition], absent) if sizes else ()
            parts.append(PushPart(partition, sum(sizes), missing, sizes))
            pieces += codes[partition]
        return tuple(parts), pieces

    def _blocks(
        self, home: _Home, index: int, begin: int, memory: Bytes
    ) -> Iterator[tuple[Block, npt.NDArray[np.generic]]]:
        """The blocks of a partition, and their elements in memory that begins with a payload for the server."""
        begin += home.begins[index]
        for block in self._layout.partitions[home.partitions[index]].blocks:
            dtype = self._layout.variables[block.variable].dtype
            start = begin + block.position
            yield block, memory[start : start + block.length * dtype.item_bytes].view(dtype.value)

    def empty_parts(self, server: Incarnation) -> tuple[PushPart, ...]:
        """A server's part of a push that touches nothing: it lists every partition (rule A3)."""
        return self._homes[server].empty

    # ---- from the servers

    def landing(self, server: Incarnation) -> memoryview:
        """Where the next version of a server's values is put together, if it comes over a stream."""
        home = self._homes[server]
        if not home.landings:
            home.landings = [_zeros(home.nbytes, self._copies) for _ in range(2)]
        return home.landings[_free(home)].data

    def land_codes(self, server: Incarnation, codes: Bytes, sizes: Sequence[int], *, to_shadow: bool) -> None:
        """The next version of a server's values as one code a block, each of so many bytes. `to_shadow`: they may be
        of the difference to the values that came this way before. Raises MalformedPayload, TooLarge."""
        home = self._homes[server]
        landing = np.frombuffer(self.landing(server), np.uint8)
        if to_shadow and home.shadow is None:
            home.shadow = np.zeros(home.nbytes, np.uint8)
        into = landing if not to_shadow or home.shadow is None else home.shadow
        left = iter(sizes)
        at = 0
        for index in range(len(home.partitions)):
            for (_, values), nbytes in zip(self._blocks(home, index, 0, into), left, strict=False):
                apply(codes[at : at + nbytes].data, values)
                at += nbytes
        if to_shadow:
            landing[:] = into
        self.has_landed(server)

    def blocks(self, server: Incarnation) -> int:
        """How many there are in a payload for a server."""
        return sum(len(self._layout.partitions[p].blocks) for p in self._homes[server].partitions)

    def has_landed(self, server: Incarnation, arrival: PartialReply | None = None) -> None:
        """`landing` is full, or will be when the rest of it has arrived."""
        home = self._homes[server]
        home.arriving = arrival
        number = _free(home)
        payload = home.landings[number]
        home.incoming = [
            home.values(index, (-1 - number, 0), payload[begin:]) for index, begin in enumerate(home.begins)
        ]

    def has_come(self, server: Incarnation, payloads: Iterable[tuple[Key, Bytes]]) -> None:
        """The next version of a server's values lies in these payloads, one for each partition."""
        home = self._homes[server]
        home.arriving = None
        home.incoming = [home.values(index, key, payload) for index, (key, payload) in enumerate(payloads)]

    def forget(self, server: Incarnation) -> None:
        """Places in the server's memory mean something else from now on. The current values stay what they are."""
        home = self._homes[server]
        home.known = {at: values for at, values in home.known.items() if values.key[0] < 0}
        if self._copies is not None and home.attached:
            self._copies.settle()
            for memory in home.attached:
                self._copies.unpin(memory.bytes)
            home.attached = []

    def attach(self, server: Incarnation, ticket: ShmHandle) -> AttachedMemory:
        """Opens a server's memory, such that values can be where they lie. Raises NotShareable."""
        if self._copies is None or not self._copies.alone:
            return attach(ticket, private=True)
        memory = self._copies.attach(ticket)
        self._homes[server].attached.append(memory)
        return memory

    def settle(self) -> None:
        """Until current values are not read any more by copies to a GPU. Before a server's next exchange."""
        if self._copies is not None:
            self._copies.settle()

    def flip(self) -> None:
        """What has come, from all servers, is the current version."""
        for home in self._homes.values():
            if home.incoming:
                home.current, home.incoming = home.incoming, []
                home.arrival, home.arriving = home.arriving, None

    @property
    def version(self) -> Version:
        """The current values, for a later `load`."""
        return {server: home.current for server, home in self._homes.items()}

    def late(self, index: int) -> list[Late]:
        """What of a variable's current value is still on its way."""
        found = []
        for where in self._where[index]:
            begin = where.home.begins[where.part]
            arrival, begin, end = where.home.arrival, begin + where.piece.start, begin + where.piece.stop
            if arrival is not None and not arrival.has(begin, end):
                found.append(Late(arrival, begin, end))
        return found

    def load(self, targets: Mapping[int, torch.Tensor], *, view: bool = False, version: Version | None = None) -> None:
        """DeviceCopies the current values, or those of a version, into tensors, by index of the variable. `view`:
        parameters that lie in one piece become views on them instead, until the next call."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, target in targets.items():
            if version is None:
                pieces = [(where, where.home.current[where.part].tensors[where.number]) for where in self._where[index]]
            else:
                pieces = [(w, version[w.home.server][w.part].tensors[w.number]) for w in self._where[index]]
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
                self._copy(mine)
                with torch.no_grad():
                    target.copy_(flat.view(target.shape))
        self._copy(pairs)

    def _may_view(self, index: int, target: torch.Tensor) -> bool:
        spec = self._layout.variables[index]
        fits = spec.kind is VariableKind.PARAMETER and target.dtype is TORCH_DTYPES[spec.dtype]
        return fits and target.device.type == "cpu" and not self.carries(target)

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """DeviceCopies (into, from) pairs of flat tensors, all detached; much of it by two threads. Those into a GPU
        are only begun."""
        if self._copies is not None:
            away = [pair for pair in pairs if self._copies.carries(pair[0])]
            if away:
                self._copies.bring(away)
                pairs = [pair for pair in pairs if not self._copies.carries(pair[0])]
        if not pairs:
            return
        nbytes = sum([into.nbytes for into, _ in pairs])
        if nbytes < 2 * COPY_BYTES_EACH:
            _copy_in_order(pairs)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "copy")
        cut = [each for pair in pairs for each in _cut(*pair)]
        at, half = 0, nbytes // 2
        while half > 0:
            half -= cut[at][0].nbytes
            at += 1
        other = self._pool.submit(_copy_past_cache, cut[at:])
        _copy_past_cache(cut[:at])
        other.result()


def _free(home: _Home) -> int:
    """The landing that is not the current version."""
    return 1 if home.current and home.current[0].key == (-1, 0) else 0


def _gradient_memory(nbytes: int, shareable: bool, copies: DeviceCopies | None) -> tuple[SharedMemory | None, Bytes]:
    if shareable and nbytes:
        try:
            memory = SharedMemory(nbytes, read_only=True)
            memory.populate(0, nbytes)
        except NotShareable:
            return None, _zeros(nbytes, copies)
        if copies is not None:
            copies.pin(memory.bytes)
        return memory, memory.bytes
    return None, _zeros(nbytes, copies)


def _zeros(nbytes: int, copies: DeviceCopies | None) -> Bytes:
    return np.zeros(nbytes, np.uint8) if copies is None else copies.memory(nbytes)


def _absent_blocks(part: PartitionLayout, absent: frozenset[int]) -> tuple[int, ...]:
    return tuple(index for index, block in enumerate(part.blocks) if block.variable in absent)


def _cut(into: torch.Tensor, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    each = COPY_BYTES_EACH // into.element_size()
    for at in range(0, into.numel(), each):
        yield into[at : at + each], values[at : at + each]


def _copy_past_cache(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """As `_copy_in_order`, for what would not stay in the cache anyway."""
    for into, values in pairs:
        plain = into.device.type == values.device.type == "cpu" and into.dtype is values.dtype
        if plain and into.is_contiguous() and values.is_contiguous():
            copy_past_cache(into.detach().numpy().view(np.uint8), values.detach().numpy().view(np.uint8))
        else:
            _copy_in_order([(into, values)])


def _copy_in_order(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for into, values in pairs:
        into.copy_(values)
