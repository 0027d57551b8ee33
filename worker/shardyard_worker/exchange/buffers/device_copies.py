"""Copies between tensors on a GPU and the host's flat buffers, on their own streams beside the computation.

Owns: the streams, the events that mark the end of a copy, the pinning of the buffers, and the calls of torch.cuda for
all this. Invariants:
- When `fetch` returns, the buffers hold the current gradients: an early copy (`take`) is used only if the gradient is
  still the same tensor with the same elements; otherwise it is copied again.
- Work launched on the computing stream after `bring` reads the new values. The memory that they come from may change
  only after `await_values`.
- If memory cannot be pinned, copies are slower, and have the same results.

How a changed gradient is noticed: torch counts changes in place, but not those that `.data` or `GradScaler.unscale_`
make. So each early copy also has a sum: the gradient's elements, read as integers, added up. The sum is computed before
the copy, and again before the push; if the two differ, the gradient is copied again. Scaling and clamping make all
these integers smaller, or all larger, so they always change the sum. Almost all other changes do.

Must not know: variables, servers, codecs.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.weak import TensorWeakRef

from shardyard.domain.limits import KIB
from shardyard.domain.pulls import ShmHandle
from shardyard.transport.interfaces import Descriptors
from shardyard.transport.shared_memory import AttachedMemory, attach_received

log = logging.getLogger("shardyard.worker")

Bytes = npt.NDArray[np.uint8]
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Flat tensors: (into, from)."""

EARLY_BYTES_MIN: Final = 256 * KIB
"""Smaller gradients are copied when they are pushed: launching a copy and its check costs more than it hides."""
# driver_types.h
_PORTABLE: Final = 0x01
_READ_ONLY: Final = 0x08


class Event(Protocol):
    def synchronize(self) -> None:
        """Returns when the work before this event is done. Safe from any thread."""


class CudaLane:
    """A stream of work on a device, in order, beside the computing stream, which is the current one of this thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Work launched from now on waits for the work that the computing stream has so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def launch(self, work: Callable[[], None]) -> None:
        """Runs `work`, now or later, in order. For tensors of the computing stream call `keep` too."""
        with self.inside():
            work()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside the block, torch's work goes to this lane."""
        with torch.cuda.stream(self._stream), torch.no_grad():
            yield

    def keep(self, tensor: torch.Tensor) -> None:
        """The tensor's memory, once freed, is not reused before the work launched so far is done."""
        tensor.record_stream(self._stream)

    def mark(self) -> Event:
        """An event after the work launched so far."""
        # blocking: a thread that waits leaves the processor to the sending threads
        event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._stream.record_event(event)  # type: ignore[arg-type]
        return event

    def lead(self, event: Event) -> None:
        """Work of the computing stream from now on waits for the event."""
        torch.cuda.current_stream(self._device).wait_event(event)  # type: ignore[arg-type]


class CudaEngine:
    """The engine of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lane(self) -> CudaLane:
        return CudaLane(self._device)

    def pin(self, address: int, nbytes: int, *, read_only: bool) -> str:
        """Pins memory. Returns why it could not be pinned, or ""."""
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        return self._called("cudaHostRegister", address, nbytes, flags)

    def unpin(self, address: int) -> None:
        said = self._called("cudaHostUnregister", address)
        if said:
            log.debug("%s", said)

    def host(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8 of shape (nbytes,), pinned if possible."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            log.debug("%d bytes of pinned memory: %s", nbytes, error)
            return torch.empty(nbytes, dtype=torch.uint8)

    def _called(self, name: str, *arguments: int) -> str:
        with torch.cuda.device(self._device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(getattr(runtime, name)(*arguments))
            if error == 0:
                return ""
            try:
                # CUDA reports the error again at the next kernel, so launch one here
                torch.ones(1, device=self._device)
            except RuntimeError as again:
                return f"{name}: error {error}: {str(again).splitlines()[0]}"
            return f"{name}: error {error}"


EngineOf = Callable[[torch.device], CudaEngine | None]


def engine_of(device: torch.device) -> CudaEngine | None:
    """None if plain copies do: on the CPU, and on devices other than CUDA's."""
    return CudaEngine(device) if device.type == "cuda" else None


@dataclass
class _Device:
    """The lanes of one device: one each for pushes, values and encoders."""

    engine: CudaEngine
    out: CudaLane
    back: CudaLane
    coding: CudaLane


@dataclass
class _Taken:
    """An early copy of a gradient. `words`: its sum (`_words`), once the lane has computed it."""

    gradient: TensorWeakRef
    version: int
    address: int
    words: torch.Tensor | None = None

    def is_of(self, tensor: torch.Tensor) -> bool:
        return (
            self.gradient() is tensor
            and self.version == tensor._version
            and self.address == tensor.data_ptr()
            and self.words is not None
        )


@dataclass(frozen=True)
class DeviceCopy:
    """A copy into the buffers: a tensor, the index of its variable, and where its elements go."""

    index: int
    tensor: torch.Tensor
    into: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]

    def pairs(self) -> Pairs:
        """The copies to make. Call it on the lane: a tensor that is not contiguous is made so first."""
        flat = self.tensor.detach().reshape(-1)
        return [
            (into, flat[offset : offset + into.numel()]) for into, offset in zip(self.into, self.offsets, strict=True)
        ]


class DeviceCopies:
    """All copies between the devices of a model and its flat buffers.

    `alone`: every parameter is on such a device. Used by the thread that trains, except: `take` also by autograd's
    thread, `await_values` by any thread, `beside`, between two pushes, by the thread that saves compression state.
    """

    def __init__(self, find_engine: EngineOf = engine_of, *, alone: bool = True) -> None:
        self.alone = alone
        self._find_engine = find_engine
        self._devices: dict[torch.device, _Device | None] = {}
        self._taken: dict[int, _Taken] = {}
        self._brought: dict[torch.device, Event] = {}
        self._pinned: dict[int, tuple[Bytes, CudaEngine]] = {}
        self._pinning_failed = False

    def carries(self, tensor: torch.Tensor) -> bool:
        return self._device(tensor.device) is not None

    def _device(self, device: torch.device) -> _Device | None:
        if device not in self._devices:
            engine = self._find_engine(device)
            made = None if engine is None else _Device(engine, engine.lane(), engine.lane(), engine.lane())
            self._devices[device] = made
        return self._devices[device]

    def _known(self, device: torch.device) -> _Device:
        found = self._device(device)
        assert found is not None, device
        return found

    # ---- from the device

    def take(self, wanted: DeviceCopy) -> Event | None:
        """Begins to copy a new gradient, so that `fetch` finds it in place. None: too small to be worth it."""
        gradient = wanted.tensor
        if gradient.nbytes < EARLY_BYTES_MIN or gradient.is_inference():
            return None
        lane = self._known(gradient.device).out
        taken = _Taken(TensorWeakRef(gradient), gradient._version, gradient.data_ptr())

        def work() -> None:
            taken.words = _words(wanted.tensor)
            _copy_beside(wanted.pairs())

        lane.follow()
        lane.launch(work)
        lane.keep(gradient)
        self._taken[wanted.index] = taken
        return lane.mark()

    def forget(self, index: int | None = None) -> None:
        """Discards what `take` has copied (of this variable)."""
        if index is None:
            self._taken.clear()
        else:
            self._taken.pop(index, None)

    def fetch(self, wanted: Sequence[DeviceCopy]) -> None:
        """Copies what was not taken or has changed since. Returns when all is in the buffers."""
        by_device: dict[torch.device, list[DeviceCopy]] = {}
        for each in wanted:
            by_device.setdefault(each.tensor.device, []).append(each)
        checks = [self._fetch_from(self._known(device), group) for device, group in by_device.items()]
        again = [each for check in checks for each in check()]
        if again:
            self.fetch(again)

    def _fetch_from(self, device: _Device, wanted: Sequence[DeviceCopy]) -> Callable[[], list[DeviceCopy]]:
        """Launches copies and comparisons. The returned function waits for both, and returns what has changed."""
        lane, taken, before = device.out, [], []
        lane.follow()
        for each in wanted:
            found = self._taken.pop(each.index, None)
            if found is not None and found.is_of(each.tensor):
                taken.append(each)
                before.append(found)
            else:
                lane.launch(lambda each=each: _copy_beside(each.pairs()))  # type: ignore[misc]
                lane.keep(each.tensor)
        answer = device.engine.host(len(taken)).view(torch.bool) if taken else torch.empty(0, dtype=torch.bool)

        def compare() -> None:
            now = torch.stack([_words(each.tensor) for each in taken])
            then = torch.stack([found.words for found in before if found.words is not None])
            answer.copy_(now != then, non_blocking=True)

        if taken:
            lane.launch(compare)
            for each in taken:
                lane.keep(each.tensor)
        done = lane.mark()

        def changed() -> list[DeviceCopy]:
            done.synchronize()
            return [each for each, is_other in zip(taken, answer.tolist(), strict=True) if is_other]

        return changed

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
        """Copies tensors into arrays of shape (elements,) and the same dtype (bool: uint8). Call it inside `beside`."""
        flat = [_in_order(tensor).view(torch.uint8) for tensor in tensors]
        by_device: dict[torch.device, list[int]] = {}
        for number, each in enumerate(flat):
            by_device.setdefault(each.device, []).append(number)
        found: list[npt.NDArray[Any]] = [np.empty(0, np.uint8)] * len(flat)
        copied: list[tuple[Event | None, torch.Tensor, list[int]]] = []
        for where, numbers in by_device.items():
            together = torch.cat([flat[number] for number in numbers])
            device = self._device(where)
            if device is None:
                copied.append((None, together.cpu(), numbers))
                continue
            host = device.engine.host(together.numel())
            host.copy_(together, non_blocking=True)
            copied.append((device.coding.mark(), host, numbers))
        for event, host, numbers in copied:
            if event is not None:
                event.synchronize()
            at = 0
            for number in numbers:
                raw = host[at : at + flat[number].numel()].numpy()
                at += raw.size
                found[number] = raw if tensors[number].dtype is torch.bool else raw.view(_numpy_dtype(tensors[number]))
        return found

    @contextmanager
    def beside(self, devices: Iterable[torch.device], inputs: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Inside the block, torch's work on these devices goes to the encoders' lanes, which alone use the encoders'
        state. They wait for the computing streams, which wait for them in the end. `inputs`: tensors of the computing
        stream that are read."""
        known = [found for found in map(self._device, devices) if found is not None]
        with ExitStack() as stack:
            for device in known:
                device.coding.follow()
                stack.enter_context(device.coding.inside())
            stack.enter_context(torch.no_grad())
            yield
            for tensor in inputs:
                where = self._device(tensor.device)
                if where is not None:
                    where.coding.keep(tensor)
        for device in known:
            device.coding.lead(device.coding.mark())

    # ---- to the device

    def bring(self, pairs: Pairs) -> None:
        """Begins to copy values. The computing stream waits for them."""
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for into, values in pairs:
            by_device.setdefault(into.device, []).append((into, values))
        for device, group in by_device.items():
            lane = self._known(device).back
            lane.follow()
            lane.launch(lambda group=group: _copy_beside(group))  # type: ignore[misc]
            for into, _ in group:
                lane.keep(into)
            event = lane.mark()
            lane.lead(event)
            self._brought[device] = event

    def await_values(self) -> None:
        """Waits until all values have been copied."""
        for event in tuple(self._brought.values()):
            event.synchronize()

    # ---- memory of the host

    def memory(self, nbytes: int) -> Bytes:
        """Zeros of shape (nbytes,), pinned. The memory is shared with forked processes: copy-on-write would replace
        pages that the device still uses."""
        if not nbytes:
            return np.zeros(0, np.uint8)
        made: Bytes = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self.pin(made)
        return made

    def pin(self, memory: Bytes, *, read_only: bool = False) -> None:
        """Lets devices read and write (`read_only`: read) memory at full speed, if possible. It must be a mapping of
        its own, and shared: see `memory`."""
        if not memory.size or memory.ctypes.data in self._pinned:
            return
        engine = next((device.engine for device in self._devices.values() if device is not None), None)
        if engine is None:
            return
        why = engine.pin(memory.ctypes.data, memory.nbytes, read_only=read_only)
        if not why:
            self._pinned[memory.ctypes.data] = memory, engine
        elif not self._pinning_failed:
            self._pinning_failed = True
            log.info("copies to and from the GPU are slower: memory could not be pinned (%s)", why)

    def attach(self, ticket: ShmHandle, descriptors: Descriptors | None) -> AttachedMemory:
        """Maps memory that a server exports, for devices to read. Raises NotShareable."""
        # not private: pinning would then copy pages into this process, and the server's writes would not reach them
        memory = attach_received(ticket, descriptors, private=False)
        self.pin(memory.bytes, read_only=True)
        return memory

    def unpin(self, memory: Bytes) -> None:
        """Unpins memory that is going away. It is not copied from or to any more."""
        found = self._pinned.pop(memory.ctypes.data, None)
        if found is not None:
            found[1].unpin(memory.ctypes.data)

    def close(self) -> None:
        """Waits for copies in flight, and unpins all memory."""
        self.await_values()
        for device in self._devices.values():
            if device is not None:
                device.out.mark().synchronize()
        for memory, _ in tuple(self._pinned.values()):
            self.unpin(memory)
        self.forget()


def copies_for(parameters: Iterable[torch.Tensor], find_engine: EngineOf = engine_of) -> DeviceCopies | None:
    """The copies for a model with these parameters; None if plain copies do for all."""
    devices = list(dict.fromkeys(parameter.device for parameter in parameters))
    copies = DeviceCopies(find_engine)
    served = [copies._device(device) is not None for device in devices]
    copies.alone = all(served)
    return copies if any(served) else None


def tensor_of(memory: Bytes) -> torch.Tensor:
    """Memory as a tensor of uint8, read-only memory too; writing to that kills the process."""
    return torch.from_numpy(memory if memory.flags.writeable else np.asarray(_Readable(memory)))


class _Readable:
    """Marks a read-only array as writable, since torch has no read-only tensors."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.__array_interface__ = {**memory.__array_interface__, "data": (memory.ctypes.data, False)}


def _copy_beside(pairs: Pairs) -> None:
    with torch.no_grad():
        for into, values in pairs:
            into.copy_(values, non_blocking=True)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The exact sum of a tensor's 32-bit words (16-bit for 16-bit elements) as signed numbers, int64, shape ()."""
    word = torch.int16 if tensor.element_size() == 2 else torch.int32
    return _in_order(tensor).view(word).sum(dtype=torch.int64)


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order, shape (elements,). Tensors of at most one element are contiguous with any stride."""
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))


def _numpy_dtype(tensor: torch.Tensor) -> npt.DTypeLike:
    return torch.empty(0, dtype=tensor.dtype).numpy().dtype
