"""The compression state of one block, and the encoders that update it.

Owns: the arrays of one block (residual, momentum, PowerSGD's factor), as flat tensors on the variable's device.
Invariant: a push writes its result into other memory than the value before it, so `undo` restores that value to the
bit. Two encoders do the same arithmetic: compiled loops (shardyard.codecs) in host memory, torch operations
(device_codecs) on a device. Must not know: the order of pushes, other blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from shardyard.codecs.dense import encoding, floats, topk
from shardyard.codecs.dense.powersgd import Grid, grid_of
from shardyard.config.settings import CompressionSettings
from shardyard.domain.compression import MOMENTUM, RESIDUAL, CodecSpec, sent_count
from shardyard.domain.layout.layouts import Block
from shardyard.domain.variables import VariableSpec
from shardyard_worker.compression import device_codecs
from shardyard_worker.compression.device_codecs import Encoding
from shardyard_worker.exchange.buffers.tensor_types import TORCH_DTYPES

Tensor = torch.Tensor
Array = npt.NDArray[np.floating[Any]]
Factor = npt.NDArray[np.float32]
T = TypeVar("T", torch.Tensor, npt.NDArray[Any])


WARMUP_DENSITY: Final = 0.25
WARMUP_RATIO: Final = 4
"""A warm-up begins with this density, and each stage divides it by this ratio (Lin et al., ICLR 2018)."""


def density_at(push: int, density: float, warmup_steps: int) -> float:
    """The density of push number `push` (from 0). The warm-up has stages of equal length, with densities of 25%, 6.25%
    and so on, as long as these are above `density`. All later pushes have `density`."""
    if push >= warmup_steps or density >= WARMUP_DENSITY:
        return density
    stages = math.ceil(math.log(WARMUP_DENSITY / density, WARMUP_RATIO) - 1e-9)
    return WARMUP_DENSITY / float(WARMUP_RATIO) ** (push * stages // warmup_steps)


class StateArray:
    """A flat tensor of state. Until a push is committed, the value before it is kept as well."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.now = torch.zeros(elements, dtype=dtype, device=device)
        self._other: Tensor | None = None
        self._keeps_spare = device.type == "cpu"  # a device has little memory, and allocates it quickly

    @property
    def spare(self) -> Tensor:
        """Memory into which the next value is written."""
        if self._other is None:
            self._other = torch.empty_like(self.now)
        return self._other

    def advance(self, after: Tensor) -> None:
        """Sets the value after a push."""
        self._other, self.now = self.now, after

    def undo(self) -> None:
        """Restores the value before the last push. At most once a push."""
        assert self._other is not None
        self._other, self.now = self.now, self._other
        self.commit()

    def commit(self) -> None:
        """Forgets the value before the last push."""
        if not self._keeps_spare:
            self._other = None

    def write(self, values: Array | None) -> None:
        """Sets the value; None sets zeros."""
        _write(self.now, values)

    def add(self, values: Array) -> None:
        self.now += _tensor(values).to(self.now.device)

    def rebase(self, values: Array | None, *, add: bool) -> None:
        """Replaces the value before the last push by `values` (None: zeros). With `add` the push's own change is added
        to it; otherwise the present value becomes `values` too."""
        assert self._other is not None
        if add:
            self.now -= self._other
        else:
            self.now.zero_()
        _write(self._other, values)
        self.now += self._other

    def read(self) -> Array:
        """The value on the host, shape (elements,). It may be a view, so copy it."""
        return self.now.cpu().numpy()

    def square_norm(self) -> float:
        return float(torch.dot(self.now, self.now))


def _tensor(values: Array) -> Tensor:
    return torch.from_numpy(np.array(values))


def _write(into: Tensor, values: Array | None) -> None:
    if values is None:
        into.zero_()
    else:
        into.copy_(_tensor(values))


@dataclass(frozen=True, slots=True)
class BlockPush:
    """How one push encodes a block. `number`: the push's, from 0. `factor`: multiplies the gradient, to clip it. `key`:
    64 bits, the seed of random numbers."""

    number: int
    factor: float
    key: int


class BlockState:
    """The state of one block. It has no arrays if the codec has no feedback."""

    def __init__(
        self, codec: CodecSpec, spec: VariableSpec, block: Block, device: torch.device, settings: CompressionSettings
    ) -> None:
        self.codec = codec
        self.arrays: dict[str, StateArray] = {}
        self.grid: Grid | None = None
        self.factor: Factor | None = None
        """PowerSGD's right factor: the next push starts from it."""
        self._factor_before: Factor | None = None
        self._device_factor: tuple[Factor, Tensor] | None = None
        """A factor, and its copy on the device."""
        self._settings = settings
        if not codec.has_feedback:
            return
        place = (block.length, TORCH_DTYPES[spec.dtype], device)
        self.arrays[RESIDUAL] = StateArray(*place)
        if codec.kind == "topk" and settings.momentum:
            self.arrays[MOMENTUM] = StateArray(*place)
        if codec.kind == "powersgd":
            self.grid = grid_of(spec.shape, block.offset, block.length, codec.rank)

    def undo(self) -> None:
        """Restores the state before the last push."""
        for array in self.arrays.values():
            array.undo()
        self.factor = self._factor_before

    def commit(self) -> None:
        for array in self.arrays.values():
            array.commit()

    def set_factor(self, factor: Factor | None) -> None:
        """Sets a saved factor. If its shape does not fit, the next push starts from random numbers."""
        if self.grid is None:
            return
        fits = factor is not None and factor.shape == (self.codec.rank, self.grid.columns)
        self.factor = factor.copy() if factor is not None and fits and factor.dtype == np.float32 else None

    def _advance_factor(self, factor: Factor) -> None:
        self._factor_before, self.factor = self.factor, factor

    def _first_factor(self, key: int) -> Factor:
        """The factor to start from. A gradient of lower rank leaves rows of zeros; these are drawn again."""
        assert self.grid is not None
        drawn = encoding.first_factor(self.codec.rank, self.grid.columns, key)
        if self.factor is None:
            return drawn
        lost = np.abs(self.factor).max(axis=1, keepdims=True) == 0
        return np.where(lost, drawn, self.factor) if lost.any() else self.factor

    def _sent_count(self, elements: int, push: BlockPush) -> int:
        return sent_count(elements, density_at(push.number, self.codec.density, self._settings.warmup_steps))

    # ---- on the host

    def encode_on_host(self, gradient: Tensor, push: BlockPush) -> memoryview:
        """The code of the clipped gradient plus the residual. Shape (elements,), contiguous, on the CPU."""
        values: npt.NDArray[Any] = gradient.numpy()
        if not self.arrays:
            return encoding.encode(self.codec, _scaled(values, push.factor), push.key)
        residual = self.arrays[RESIDUAL]
        now, after = residual.now.numpy(), residual.spare.numpy()
        if self.codec.kind == "topk":
            code = self._encode_largest_on_host(values, now, after, push)
        elif self.grid is not None:
            start = self._first_factor(push.key)
            code, factor = encoding.encode_low_rank(_scaled(values, push.factor), now, after, self.grid, start)
            self._advance_factor(factor)
        else:
            code = encoding.encode_feedback(self.codec, _scaled(values, push.factor), now, after, push.key)
        for array in self.arrays.values():
            array.advance(array.spare)
        return code

    def _encode_largest_on_host(self, values: Array, now: Array, after: Array, push: BlockPush) -> memoryview:
        momentum = self.arrays.get(MOMENTUM)
        none = np.empty(0, values.dtype)
        u_now, u_after = (none, none) if momentum is None else (momentum.now.numpy(), momentum.spare.numpy())
        code = topk.encode_momentum(
            values,
            (u_now, now),
            (u_after, after),
            self._sent_count(values.size, push),
            push.key,
            self.codec.values,
            push.factor,
            self._settings.momentum,
        )
        if code is None:
            code = floats.encode_raw(after)
            u_after[:] = 0
            after[:] = 0
        return code.data

    # ---- on a device

    def encode_on_device(self, gradient: Tensor, push: BlockPush) -> Encoding[memoryview]:
        """As `encode_on_host`, as a generator for `device_codecs.run`."""
        if not self.arrays:
            return (yield from device_codecs.encode(self.codec, _scaled(gradient, push.factor), push.key))
        residual = self.arrays[RESIDUAL]
        if self.codec.kind == "topk":
            momentum = self.arrays.get(MOMENTUM)
            code, (u, after) = yield from device_codecs.encode_largest(
                gradient,
                (None if momentum is None else momentum.now, residual.now),
                self._sent_count(gradient.numel(), push),
                push.key,
                self.codec.values,
                push.factor,
                self._settings.momentum,
            )
            if momentum is not None and u is not None:
                momentum.advance(u)
        elif self.grid is not None:
            start = self._first_factor(push.key)
            code, after, on_device, factor = yield from device_codecs.encode_low_rank(
                _scaled(gradient, push.factor), residual.now, self.grid, self._factor_on(gradient.device, start)
            )
            factor = start if factor is None else factor
            self._advance_factor(factor)
            self._device_factor = factor, on_device
        else:
            code, after = yield from device_codecs.encode_feedback(
                self.codec, _scaled(gradient, push.factor), residual.now, push.key
            )
        residual.advance(after)
        return code

    def _factor_on(self, device: torch.device, start: Factor) -> Tensor:
        if self._device_factor is not None and self._device_factor[0] is start:
            return self._device_factor[1]
        return torch.from_numpy(start.copy()).to(device)


def _scaled(gradient: T, factor: float) -> T:
    return gradient if factor == 1.0 else gradient * factor
