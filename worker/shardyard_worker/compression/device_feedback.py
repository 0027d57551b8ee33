"""ErrorFeedback whose state lies on the device of each variable, where codes are made too.

Owns: that state, as tensors. The rest is ErrorFeedback's: what is saved by one can be loaded by the other. Invariant:
what a push makes of the state is put beside what it was, which is let go when the push counts. Must not know: the form
of a code (device_codecs), streams (device).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardyard.codecs import Grid, grid_of
from shardyard.config.settings import CompressionSettings
from shardyard.domain.compression import MOMENTUM, NONE, RESIDUAL, CodecSpec, sent_count
from shardyard.domain.layout.layouts import Block, JobLayout
from shardyard_worker.compression import device_codecs
from shardyard_worker.compression.device_codecs import Encoding
from shardyard_worker.compression.error_feedback import (
    Array,
    BlockState,
    ErrorFeedback,
    FeedbackPush,
    density_at,
    first_or,
)
from shardyard_worker.exchange.device_copies import DeviceCopies
from shardyard_worker.exchange.flat_buffers import TORCH_DTYPES

Tensor = torch.Tensor


class _Kept:
    """Numbers of state, and what they were before the last push until that counts."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.now = torch.zeros(elements, dtype=dtype, device=device)
        self._before: Tensor | None = None

    def go_on(self, after: Tensor) -> None:
        self._before, self.now = self.now, after

    def flip(self) -> None:
        assert self._before is not None
        self.now, self._before = self._before, None

    def settle(self) -> None:
        """There is no way back."""
        self._before = None

    def read(self) -> Array:
        return self.now.cpu().numpy()

    def write(self, values: Array | None) -> None:
        if values is None:
            self.now.zero_()
        else:
            self.now.copy_(torch.from_numpy(np.array(values)))

    def add(self, values: Array) -> None:
        self.now += torch.from_numpy(np.array(values)).to(self.now.device)

    def rebase(self, values: Array | None, *, add: bool) -> None:
        assert self._before is not None
        added = self.now - self._before
        self._before = torch.zeros_like(added)
        if values is not None:
            self._before.copy_(torch.from_numpy(np.array(values)))
        self.now = self._before + added if add else self._before.clone()

    def squares(self) -> float:
        return float((self.now * self.now).sum())


class _Memory(BlockState):
    """Without feedback there is none."""

    def __init__(self, codec: CodecSpec) -> None:
        super().__init__(codec)
        self.there: dict[str, _Kept] = {}

    def keep(self, kind: str, kept: _Kept) -> _Kept:
        self.kept[kind] = self.there[kind] = kept
        return kept

    def encode(self, gradient: Tensor, push: FeedbackPush) -> Encoding[memoryview]:
        """The code of the gradient, clipped, and what was kept."""
        return device_codecs.encode(self._codec, _times(gradient, push.factor), push.key)

    def settle(self) -> None:
        for kept in self.there.values():
            kept.settle()


class _Residual(_Memory):
    def __init__(self, codec: CodecSpec, residual: _Kept) -> None:
        super().__init__(codec)
        self._residual = self.keep(RESIDUAL, residual)

    def encode(self, gradient: Tensor, push: FeedbackPush) -> Encoding[memoryview]:
        code, after = yield from device_codecs.encode_feedback(
            self._codec, _times(gradient, push.factor), self._residual.now, push.key
        )
        self._residual.go_on(after)
        return code


class _Largest(_Memory):
    """Deep Gradient Compression: the residual is the paper's velocity."""

    def __init__(
        self, codec: CodecSpec, velocity: _Kept, momenta: _Kept | None, *, momentum: float, warmup_steps: int
    ) -> None:
        super().__init__(codec)
        self._momentum = momentum
        self._warmup_steps = warmup_steps
        self._v = self.keep(RESIDUAL, velocity)
        self._u = None if momenta is None else self.keep(MOMENTUM, momenta)

    def encode(self, gradient: Tensor, push: FeedbackPush) -> Encoding[memoryview]:
        count = sent_count(gradient.numel(), density_at(push.number, self._codec.density, self._warmup_steps))
        before = (None if self._u is None else self._u.now, self._v.now)
        code, (u, v) = yield from device_codecs.encode_largest(
            gradient, before, count, push.key, self._codec.values, push.factor, self._momentum
        )
        self._v.go_on(v)
        if self._u is not None and u is not None:
            self._u.go_on(u)
        return code


class _LowRank(_Memory):
    """PowerSGD, warm-started with the last right factor, of which there is a copy here: it was in the code."""

    def __init__(self, codec: CodecSpec, residual: _Kept, grid: Grid) -> None:
        super().__init__(codec)
        self._grid = grid
        self._residual = self.keep(RESIDUAL, residual)
        self._before: npt.NDArray[np.float32] | None = None
        self._made: tuple[npt.NDArray[np.float32], Tensor] | None = None
        self.factor_shape = codec.rank, grid.columns

    def encode(self, gradient: Tensor, push: FeedbackPush) -> Encoding[memoryview]:
        start = first_or(self.factor, (self._codec.rank, self._grid.columns), push.key)
        if self._made is not None and self._made[0] is self.factor and start is self.factor:
            factor = self._made[1]
        else:
            factor = torch.from_numpy(start.copy()).to(gradient.device)
        code, after, made, copied = yield from device_codecs.encode_low_rank(
            _times(gradient, push.factor), self._residual.now, self._grid, factor
        )
        self._residual.go_on(after)
        self._before, self.factor = self.factor, start if copied is None else copied
        self._made = self.factor, made
        return code

    def undo(self) -> None:
        super().undo()
        self.factor = self._before


class DeviceFeedback(ErrorFeedback):
    """As ErrorFeedback, of tensors. `devices`: each variable's. Codes are made side by side on lanes of `copies`.

    State is as large as the variables, twice between a push and its answer.
    """

    def __init__(
        self,
        settings: CompressionSettings,
        layout: JobLayout,
        *,
        seed: int,
        worker: int,
        devices: Sequence[torch.device],
        copies: DeviceCopies,
    ) -> None:
        self._places = tuple(devices)
        self._copies = copies
        with self._beside():
            super().__init__(settings, layout, seed=seed, worker=worker)

    def use(self, copies: DeviceCopies) -> None:
        """Takes the lanes of these from now on."""
        self._copies = copies

    def _beside(self, inputs: Iterable[Tensor] = ()) -> contextlib.AbstractContextManager[None]:
        return self._copies.beside(dict.fromkeys(self._places), inputs)

    def _memory(self, block: Block) -> BlockState:
        spec, codec = self._variables[block.variable], self._codecs[block.variable]
        if not codec.has_feedback:
            return _Memory(codec)
        place = (block.length, TORCH_DTYPES[spec.dtype], self._places[block.variable])
        if codec.kind == "topk":
            momentum, warmup_steps = self._settings.momentum, self._settings.warmup_steps
            momenta = _Kept(*place) if momentum else None
            return _Largest(codec, _Kept(*place), momenta, momentum=momentum, warmup_steps=warmup_steps)
        if codec.kind == "powersgd":
            grid = grid_of(spec.shape, block.offset, block.length, codec.rank)
            return _LowRank(codec, _Kept(*place), grid)
        return _Residual(codec, _Kept(*place))

    # ---- a push

    def _norm(self, gradients: Iterable[Array | Tensor]) -> float:
        tensors = [each if isinstance(each, Tensor) else torch.from_numpy(each) for each in gradients]
        with self._beside(tensors):
            found = [torch.linalg.vector_norm(each.detach().double()).view(1) for each in tensors]
            return math.sqrt(sum(float(each[0]) ** 2 for each in self._copies.to_host(found)))

    def begin(self, gradients: Iterable[Array | Tensor] = (), *, work: Sequence[int] = ()) -> None:
        super().begin(gradients, work=work)  # type: ignore[arg-type]  # all that is asked of them is `_norm`

    def encode(self, block: Block, gradient: npt.NDArray[Any] | Tensor) -> memoryview:
        """As `encode_all`, of one."""
        return self.encode_all([(block, gradient)])[0]

    def encode_all(self, blocks: Sequence[tuple[Block, npt.NDArray[Any] | Tensor]]) -> list[memoryview]:
        """The codes of blocks' gradients (of buffers: values), each of shape (block.length,) and of the variable's
        dtype, on any device. Each block once a push."""
        given = [self._checked(block, gradient) for block, gradient in blocks]
        inputs = [gradient for _, gradient in given]
        with self._beside(inputs), contextlib.ExitStack() as stack:
            for kind in {device.type for device in self._places}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            encodings = [self._encoding(block, gradient) for block, gradient in given]
            return device_codecs.run(encodings, self._copies.to_host)

    def _checked(self, block: Block, gradient: npt.NDArray[Any] | Tensor) -> tuple[Block, Tensor]:
        found = gradient if isinstance(gradient, Tensor) else torch.from_numpy(gradient)
        assert found.dtype is TORCH_DTYPES[self._variables[block.variable].dtype]
        return block, found.detach().to(self._places[block.variable])

    def _encoding(self, block: Block, gradient: Tensor) -> Encoding[memoryview]:
        push = self._encodes(block, tuple(gradient.shape))
        if self._codecs[block.variable] == NONE:
            return device_codecs.raw(_times(gradient, push.factor))
        memory = self._memories[block.variable, block.offset]
        assert isinstance(memory, _Memory)
        return memory.encode(gradient, push)

    def commit(self) -> None:
        for key in self._encoded:
            memory = self._memories[key]
            assert isinstance(memory, _Memory)
            memory.settle()
        super().commit()

    # ---- state

    def residuals(self) -> dict[int, Array]:
        with self._beside():
            return super().residuals()

    def absorb(self, residuals: Mapping[int, Array]) -> None:
        with self._beside():
            super().absorb(residuals)

    @property
    def lost_norm(self) -> float:
        with self._beside():
            return super().lost_norm

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        with self._beside():
            return super().state_dict()

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        with self._beside():
            super().load_state_dict(state)

    def go_back(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        with self._beside():
            super().go_back(state)


def _times(gradient: Tensor, factor: float) -> Tensor:
    return gradient if factor == 1.0 else gradient * factor
