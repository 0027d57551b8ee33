"""Error feedback: what compression leaves out of a push stays in the worker, and is added to the next gradient.

Owns: the state of all blocks of a job, and a whole push: clipping, random keys, undo, save and restore. The state of a
variable is on the variable's device, and its code is made there.

Invariants: over all pushes that count, the decoded values plus the residual equal the sum of the gradients, up to
rounding. A push that does not count is undone to the bit, for all blocks or for some. Random numbers depend only on
(seed, worker, variable, offset, number of the push), or on the work's name instead of worker and number, so a run can
be repeated. Must not know: the format of a code, servers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardyard.config.settings import CompressionSettings
from shardyard.domain.compression import FACTOR, MOMENTUM, NONE, PUSHES, RESIDUAL
from shardyard.domain.errors import ConfigurationError, DTypeMismatch, ShapeMismatch, UnknownVariable
from shardyard.domain.layout.layouts import Block, JobLayout
from shardyard.domain.optimizers import KINDS, OptimizerSpec
from shardyard.domain.variables import VariableKind
from shardyard_worker.compression import device_codecs
from shardyard_worker.compression.block_state import Array, BlockPush, BlockState, Factor, StateArray
from shardyard_worker.compression.device_codecs import Encoding
from shardyard_worker.exchange.buffers.device_copies import DeviceCopies
from shardyard_worker.exchange.buffers.tensor_types import TORCH_DTYPES

Tensor = torch.Tensor
Key = tuple[int, int]
"""A block: its variable's index, and its offset in the variable."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Saved:
    """A state that fits this job. `totals`: by kind and variable; `factors`: by block."""

    pushes: int
    totals: dict[tuple[str, int], Array]
    factors: dict[Key, Factor]


class ErrorFeedback:
    """The compression state of one worker in one job. For one push at a time, from one thread.

    A push is `encode`, then `commit` if servers have counted it, or `undo` if they have not.

    `seed`: the job's. `worker`: the worker's incarnation, or another number that differs between workers. `copies`:
    given if the model is on a GPU; `devices` then has the device of each variable. Raises ConfigurationError if both
    the settings and the optimizer have a momentum.
    """

    def __init__(
        self,
        settings: CompressionSettings,
        layout: JobLayout,
        *,
        seed: int,
        worker: int,
        copies: DeviceCopies | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        if settings.momentum:
            _check_momentum(layout.optimizer)
        self._clip = settings.clip
        self._variables = layout.variables
        self._seed = (seed, worker)
        self._copies = copies
        self._devices = tuple(devices) if copies is not None else (CPU,) * len(layout.variables)
        self._states: dict[Key, BlockState] = {}
        self._blocks: list[list[Block]] = [[] for _ in layout.variables]
        codecs = [settings.push_rules.codec_for(spec) for spec in layout.variables]
        with self._lanes():
            for block in sorted((b for part in layout.partitions for b in part.blocks), key=_key):
                index = block.variable
                state = BlockState(codecs[index], layout.variables[index], block, self._devices[index], settings)
                self._states[_key(block)] = state
                self._blocks[index].append(block)
        self._pushes = 0
        self._encoded: set[Key] = set()
        """The blocks of the last push, until they are committed or undone."""

    def use(self, copies: DeviceCopies) -> None:
        """Encodes on these lanes from now on."""
        self._copies = copies

    def _lanes(self, inputs: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
        """Work on devices goes to the encoders' lanes inside this context."""
        return nullcontext() if self._copies is None else self._copies.beside(dict.fromkeys(self._devices), inputs)

    # ---- a push

    def encode(self, blocks: Sequence[tuple[Block, Tensor]], *, work: Sequence[int] = ()) -> list[memoryview]:
        """Begins a push, and commits the one before. Returns the code of each block.

        `blocks`: each once, with its gradient (of a buffer: its value), shape (block.length,), contiguous, of the
        variable's dtype. `work`: the numbers that name the work, if any worker may compute it. The gradients of all
        parameters together are scaled down to a 2-norm of at most job.compression.clip.
        """
        self.commit()
        self._pushes += 1
        given = [gradient.detach().to(self._devices[block.variable]) for block, gradient in blocks]
        with ExitStack() as stack:
            stack.enter_context(self._lanes(given))
            for kind in {each.device.type for each in given} if self._copies is not None else ():
                stack.enter_context(torch.autocast(kind, enabled=False))
            factor = self._clip_factor([g for (block, _), g in zip(blocks, given, strict=True) if self._clips(block)])
            codes: list[memoryview] = [memoryview(b"")] * len(given)
            encodings: dict[int, Encoding[memoryview]] = {}
            for number, ((block, _), gradient) in enumerate(zip(blocks, given, strict=True)):
                assert gradient.dtype is TORCH_DTYPES[self._variables[block.variable].dtype]
                state, push = self._states[_key(block)], self._begin(block, gradient, factor, work)
                if self._is_away(gradient):
                    encodings[number] = state.encode_on_device(gradient, push)
                else:
                    codes[number] = state.encode_on_host(gradient, push)
            if encodings and self._copies is not None:
                made = device_codecs.run(list(encodings.values()), self._copies.to_host)
                for number, code in zip(encodings, made, strict=True):
                    codes[number] = code
        return codes

    def _is_away(self, tensor: Tensor) -> bool:
        return self._copies is not None and self._copies.carries(tensor)

    def _clips(self, block: Block) -> bool:
        return bool(self._clip) and self._variables[block.variable].kind is VariableKind.PARAMETER

    def _clip_factor(self, gradients: Sequence[Tensor]) -> float:
        """The factor that scales all gradients together down to a 2-norm of at most `clip`."""
        here = [each.numpy() for each in gradients if not self._is_away(each)]
        total = sum(float(np.dot(each, each)) for each in here)
        away = [torch.linalg.vector_norm(each.double()).view(1) for each in gradients if self._is_away(each)]
        if away and self._copies is not None:
            total += sum(float(each[0]) ** 2 for each in self._copies.to_host(away))
        norm = math.sqrt(total)
        return self._clip / norm if math.isfinite(norm) and norm > self._clip else 1.0

    def _begin(self, block: Block, gradient: Tensor, factor: float, work: Sequence[int]) -> BlockPush:
        key = _key(block)
        assert key not in self._encoded, f"block {key} twice in a push"
        assert gradient.shape == (block.length,)
        self._encoded.add(key)
        drawn = 0
        if self._states[key].codec != NONE:
            named = (self._seed[0], *work, *key) if work else (*self._seed, *key, self._pushes)
            drawn = int(np.random.SeedSequence(named).generate_state(1, np.uint64)[0])
        return BlockPush(self._pushes - 1, factor if self._clips(block) else 1.0, drawn)

    def commit(self) -> None:
        """The push counts. It can no longer be undone."""
        for key in self._encoded:
            self._states[key].commit()
        self._encoded.clear()

    def undo(self, blocks: Iterable[Block] | None = None) -> None:
        """The push does not count for these blocks (None: for all): restores their state before it. At most once for
        each block of a push."""
        if blocks is None:
            self._pushes -= 1 if self._encoded else 0
            undone = set(self._encoded)
        else:
            undone = {_key(block) for block in blocks} & self._encoded
        for key in undone:
            self._states[key].undo()
        self._encoded -= undone

    # ---- residuals

    def residuals(self) -> dict[int, Array]:
        """Copies of all residuals that are not zero, by index of the variable, each of shape (elements,). A worker that
        leaves pushes them as a last gradient, uncompressed."""
        with self._lanes():
            return {index: total for index, total in self._totals(RESIDUAL) if total.any()}

    def absorb(self, residuals: Mapping[int, Array]) -> None:
        """Adds another worker's `residuals`. Call it between pushes. Variables without feedback are left out. Raises
        ShapeMismatch."""
        self.commit()
        with self._lanes():
            for index, total in residuals.items():
                spec = self._variables[index]
                if total.shape != (spec.elements,):
                    raise ShapeMismatch(
                        f"a residual of {spec.name!r} of shape {total.shape}; expected ({spec.elements},)"
                    )
                for block, array in self._arrays(RESIDUAL, index):
                    array.add(total[block.offset : block.offset + block.length])

    @property
    def lost_norm(self) -> float:
        """The 2-norm of all residuals: what is lost if this process dies now."""
        with self._lanes():
            found = [state.arrays[RESIDUAL] for state in self._states.values() if RESIDUAL in state.arrays]
            return math.sqrt(sum(each.square_norm() for each in found))

    # ---- saved and restored

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of all state: "pushes"; "residual.NAME" and "momentum.NAME" of shape (elements,), in the variable's
        dtype; "factor.NAME@OFFSET" of shape (rank, columns), float32. Call it between pushes."""
        state: dict[str, npt.NDArray[Any]] = {PUSHES: np.array(self._pushes, np.int64)}
        with self._lanes():
            for kind in (RESIDUAL, MOMENTUM):
                for index, total in self._totals(kind):
                    state[f"{kind}.{self._variables[index].name}"] = total
        for (index, offset), block in self._states.items():
            if block.factor is not None:
                state[f"{FACTOR}.{self._variables[index].name}@{offset}"] = block.factor.copy()
        return state

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Loads what `state_dict` returned, also if the variables were cut into other blocks then. Missing state
        becomes zeros. Raises UnknownVariable for state that these settings do not keep, ShapeMismatch, DTypeMismatch;
        then nothing has changed."""
        saved = self._parse(state)
        self.commit()
        self._restore(saved)

    def checked(self, state: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, npt.NDArray[Any]]:
        """Returns the state. Raises what `load_state_dict` would raise."""
        self._parse(state)
        return state

    def go_back(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """As `load_state_dict`, after the servers went back to the time when this worker had `state` (empty: it had
        none). A push may be in flight: it counts on the restored servers or is undone, so its own residual is added to
        the restored one. Raises the same errors."""
        self._restore(self._parse(state))

    def residuals_in(self, state: Mapping[str, npt.NDArray[Any]]) -> dict[int, Array]:
        """The `residuals` in another worker's `state_dict`. Raises what `load_state_dict` raises."""
        found = self._parse({name: value for name, value in state.items() if name.startswith(f"{RESIDUAL}.")})
        return {index: total for (_, index), total in found.totals.items() if total.any()}

    def _parse(self, state: Mapping[str, npt.NDArray[Any]]) -> _Saved:
        """Raises UnknownVariable, ShapeMismatch, DTypeMismatch."""
        indices = {variable.name: index for index, variable in enumerate(self._variables)}
        saved = _Saved(int(state.get(PUSHES, 0)), {}, {})
        for name, value in state.items():
            kind, _, variable = name.partition(".")
            if kind == FACTOR:
                variable, _, offset = variable.rpartition("@")
            index = indices.get(variable)
            if kind in (RESIDUAL, MOMENTUM) and index is not None and any(True for _ in self._arrays(kind, index)):
                self._check(name, index, value)
                saved.totals[kind, index] = value
            elif kind == FACTOR and index is not None and offset.isdecimal():
                saved.factors[index, int(offset)] = value
            elif name != PUSHES:
                raise UnknownVariable(
                    f"compression state {name!r}",
                    why="the job's variables and job.compression do not keep such state",
                    todo="load the state into a job with the settings that it was saved under",
                )
        return saved

    def _check(self, name: str, index: int, value: npt.NDArray[Any]) -> None:
        spec = self._variables[index]
        if value.shape != (spec.elements,):
            raise ShapeMismatch(f"compression state {name!r} of shape {value.shape}; expected ({spec.elements},)")
        if value.dtype != spec.dtype.value:
            raise DTypeMismatch(f"compression state {name!r} of dtype {value.dtype}; expected {spec.dtype.value}")

    def _restore(self, saved: _Saved) -> None:
        self._pushes = saved.pushes + bool(self._encoded)
        with self._lanes():
            for block in (block for blocks in self._blocks for block in blocks):
                key = _key(block)
                state = self._states[key]
                for kind, array in state.arrays.items():
                    total = saved.totals.get((kind, block.variable))
                    values = None if total is None else total[block.offset : block.offset + block.length]
                    if key in self._encoded:
                        array.rebase(values, add=kind == RESIDUAL)
                    else:
                        array.write(values)
                state.set_factor(saved.factors.get(key))

    def _arrays(self, kind: str, index: int) -> Iterator[tuple[Block, StateArray]]:
        """The blocks of a variable that have an array of this kind."""
        for block in self._blocks[index]:
            array = self._states[_key(block)].arrays.get(kind)
            if array is not None:
                yield block, array

    def _totals(self, kind: str) -> Iterator[tuple[int, Array]]:
        """Copies of all arrays of this kind, whole variables, by index."""
        for index, spec in enumerate(self._variables):
            pieces = list(self._arrays(kind, index))
            if pieces:
                total = np.zeros(spec.elements, spec.dtype.value)
                for block, array in pieces:
                    total[block.offset : block.offset + block.length] = array.read()
                yield index, total


def _key(block: Block) -> Key:
    return block.variable, block.offset


def _check_momentum(optimizer: OptimizerSpec) -> None:
    names = [setting.name for setting in KINDS[optimizer.kind]]
    if "momentum" in names and any(group[names.index("momentum")] for group in optimizer.groups):
        raise ConfigurationError(
            f"job.compression.momentum with an {optimizer.kind} optimizer that has a momentum",
            why="momentum correction moves the momentum from the servers into the workers; both would square it",
            todo="set job.compression.momentum to the optimizer's momentum, and that to 0",
        )
