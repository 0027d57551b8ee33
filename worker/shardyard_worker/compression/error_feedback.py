"""What compression keeps in a worker between its pushes: what was not sent, momenta, factors.

Owns: the state of each block, named after its variable; warm-up, clipping and the keys of random numbers. Invariants:
over any pushes that count, what was decoded plus the residual is the sum of the gradients (up to rounding); a push that
does not count is undone to the bit, for any of its blocks, since encoding writes beside the state and not over it; what
is drawn depends on (seed, worker, variable, offset, number of the push) alone, so a run can be repeated.

Blocks may be encoded in several threads, each block in one at a time. Must not know: the form of a code, servers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from shardyard.codecs.dense import encoding, floats, powersgd, topk
from shardyard.config.settings import CompressionSettings
from shardyard.domain.compression import FACTOR, MOMENTUM, NONE, PUSHES, RESIDUAL, CodecSpec, sent_count
from shardyard.domain.errors import ConfigurationError, DTypeMismatch, ShapeMismatch, UnknownVariable
from shardyard.domain.layout.layouts import Block, JobLayout
from shardyard.domain.optimizers import KINDS, OptimizerSpec
from shardyard.domain.variables import VariableKind

Array = npt.NDArray[np.floating[Any]]

WARMUP_DENSITY: Final = 0.25
WARMUP_RATIO: Final = 4
"""The density of the first pushes of a warm-up, and what divides it from stage to stage (Lin et al., ICLR 2018)."""


def density_at(push: int, density: float, warmup_steps: int) -> float:
    """The density of push number `push` (from 0): 25%, 6.25%, ... as long as they are above `density`, each for an
    equal part of the warm-up; then `density`."""
    if push >= warmup_steps or density >= WARMUP_DENSITY:
        return density
    stages = math.ceil(math.log(WARMUP_DENSITY / density, WARMUP_RATIO) - 1e-9)
    return WARMUP_DENSITY / float(WARMUP_RATIO) ** (push * stages // warmup_steps)


class ResidualBlock(Protocol):
    """Numbers of state of one block, wherever they lie, and what they were before the last push."""

    def flip(self) -> None:
        """They are as they were before the last push. Once a push."""

    def read(self) -> Array:
        """Shape (elements,); to be copied at once."""

    def write(self, values: Array | None) -> None:
        """None: zeros."""

    def add(self, values: Array) -> None: ...

    def rebase(self, values: Array | None, *, add: bool) -> None:
        """They were `values` (None: zeros) before the last push, and are, `add`: with what it has added to them."""

    def squares(self) -> float:
        """Their sum."""


class _Kept:
    """An array of state and a spare one: what a push makes of the first is written into the second."""

    def __init__(self, elements: int, dtype: npt.DTypeLike) -> None:
        self.now: Array = np.zeros(elements, dtype)
        self._spare: Array | None = None

    @property
    def spare(self) -> Array:
        if self._spare is None:
            self._spare = np.empty_like(self.now)
        return self._spare

    def flip(self) -> None:
        """The spare one is the state; once more, and it is as it was."""
        self.now, self._spare = self.spare, self.now

    def read(self) -> Array:
        return self.now

    def write(self, values: Array | None) -> None:
        self.now[:] = 0 if values is None else values

    def add(self, values: Array) -> None:
        self.now += values

    def rebase(self, values: Array | None, *, add: bool) -> None:
        if add:
            self.now -= self.spare
        else:
            self.now[:] = 0
        self.spare[:] = 0 if values is None else values
        self.now += self.spare

    def squares(self) -> float:
        return float(np.dot(self.now, self.now))


@dataclass(frozen=True, slots=True)
class FeedbackPush:
    """Its number, by what gradients are multiplied, and 64 bits for what is drawn for a block."""

    number: int
    factor: float
    key: int


class BlockState:
    """The state of one block, wherever it lies."""

    factor_shape: tuple[int, int] | None = None
    """Of PowerSGD's factor, where there is one."""

    def __init__(self, codec: CodecSpec) -> None:
        self._codec = codec
        self.kept: dict[str, ResidualBlock] = {}
        self.factor: npt.NDArray[np.float32] | None = None

    def undo(self) -> None:
        """The state is as before the last push."""
        for kept in self.kept.values():
            kept.flip()


class _Memory(BlockState):
    """In arrays. Without feedback there is none."""

    def encode(self, gradient: Array, push: FeedbackPush) -> memoryview:
        """The code of the gradient, clipped, and what was kept."""
        return encoding.encode(self._codec, _times(gradient, push.factor), push.key)


class _Residual(_Memory):
    def __init__(self, codec: CodecSpec, elements: int, dtype: npt.DTypeLike) -> None:
        super().__init__(codec)
        self.kept[RESIDUAL] = self._residual = _Kept(elements, dtype)

    def encode(self, gradient: Array, push: FeedbackPush) -> memoryview:
        now, spare = self._residual.now, self._residual.spare
        code = encoding.encode_feedback(self._codec, _times(gradient, push.factor), now, spare, push.key)
        self._residual.flip()
        return code


class _Largest(_Memory):
    """Deep Gradient Compression: the residual is the paper's velocity."""

    def __init__(
        self, codec: CodecSpec, elements: int, dtype: npt.DTypeLike, *, momentum: float, warmup_steps: int
    ) -> None:
        super().__init__(codec)
        self._momentum = momentum
        self._warmup_steps = warmup_steps
        self._u = _Kept(elements if momentum else 0, dtype)
        self.kept[RESIDUAL] = self._v = _Kept(elements, dtype)
        if momentum:
            self.kept[MOMENTUM] = self._u

    def encode(self, gradient: Array, push: FeedbackPush) -> memoryview:
        count = sent_count(gradient.size, density_at(push.number, self._codec.density, self._warmup_steps))
        before, after = (self._u.now, self._v.now), (self._u.spare, self._v.spare)
        code = topk.encode_momentum(
            gradient, before, after, count, push.key, self._codec.values, push.factor, self._momentum
        )
        if code is None:
            code = floats.encode_raw(self._v.spare)
            self._u.spare[:] = 0
            self._v.spare[:] = 0
        for kept in self.kept.values():
            kept.flip()
        return code.data


class _LowRank(_Memory):
    """PowerSGD, warm-started with the last right factor."""

    def __init__(self, codec: CodecSpec, elements: int, dtype: npt.DTypeLike, grid: powersgd.Grid) -> None:
        super().__init__(codec)
        self._grid = grid
        self.kept[RESIDUAL] = self._residual = _Kept(elements, dtype)
        self._factor_before: npt.NDArray[np.float32] | None = None
        self.factor_shape = codec.rank, grid.columns

    def encode(self, gradient: Array, push: FeedbackPush) -> memoryview:
        start = first_or(self.factor, (self._codec.rank, self._grid.columns), push.key)
        now, spare = self._residual.now, self._residual.spare
        code, after = encoding.encode_low_rank(_times(gradient, push.factor), now, spare, self._grid, start)
        self._residual.flip()
        self._factor_before, self.factor = self.factor, after
        return code

    def undo(self) -> None:
        super().undo()
        self.factor = self._factor_before


def first_or(factor: npt.NDArray[np.float32] | None, shape: tuple[int, int], key: int) -> npt.NDArray[np.float32]:
    """PowerSGD's last right factor; what a gradient of lower rank has made zeros of is drawn anew."""
    if factor is None:
        return encoding.first_factor(*shape, key)
    lost = np.abs(factor).max(axis=1, keepdims=True) == 0
    return np.where(lost, encoding.first_factor(*shape, key), factor) if lost.any() else factor


class ErrorFeedback:
    """The compression state of one worker for one job.

    A push is `begin`, then `encode` once for each block that it carries, then `commit` when a server has counted it,
    or `undo` where none has: another worker's push of the same work counted.

    `seed` is the job's, `worker` the worker's incarnation (or what else tells workers apart). Raises
    ConfigurationError where the settings ask for momentum in the worker and the optimizer has its own.
    """

    def __init__(self, settings: CompressionSettings, layout: JobLayout, *, seed: int, worker: int) -> None:
        self._settings = settings
        self._variables = layout.variables
        self._seed = (seed, worker)
        rules = settings.push_rules
        self._codecs = tuple(rules.codec_for(variable) for variable in layout.variables)
        if settings.momentum:
            _check_momentum(layout.optimizer)
        self._memories: dict[tuple[int, int], BlockState] = {}
        self._blocks: dict[tuple[int, int], Block] = {}
        for partition in layout.partitions:
            for block in partition.blocks:
                self._memories[_key(block)] = self._memory(block)
                self._blocks[_key(block)] = block
        self._by_variable: list[list[tuple[int, int]]] = [[] for _ in layout.variables]
        for key in sorted(self._blocks):
            self._by_variable[key[0]].append(key)
        self._pushes = 0
        self._work: tuple[int, ...] = ()
        self._factor = 1.0
        self._encoded: set[tuple[int, int]] = set()

    def _memory(self, block: Block) -> BlockState:
        spec, codec = self._variables[block.variable], self._codecs[block.variable]
        dtype, n = spec.dtype.value, block.length
        if not codec.has_feedback:
            return _Memory(codec)
        if codec.kind == "topk":
            settings = self._settings
            return _Largest(codec, n, dtype, momentum=settings.momentum, warmup_steps=settings.warmup_steps)
        if codec.kind == "powersgd":
            return _LowRank(codec, n, dtype, powersgd.grid_of(spec.shape, block.offset, n, codec.rank))
        return _Residual(codec, n, dtype)

    @property
    def compresses(self) -> bool:
        """Whether any variable of the job is coded; if not, pushes need no codes."""
        return any(codec != NONE for codec in self._codecs)

    @property
    def clips(self) -> bool:
        """Whether `begin` needs the gradients."""
        return self._settings.clip > 0

    def codec(self, variable: int) -> CodecSpec:
        return self._codecs[variable]

    # ---- a push

    def begin(self, gradients: Iterable[Array] = (), *, work: Sequence[int] = ()) -> None:
        """A push begins; the one before counts. `work` are the numbers that name what is pushed, if any worker may
        compute it: what is drawn then depends on (seed, work, variable, offset) alone. With `clips`, `gradients` are
        those of all blocks of parameters that the push carries, in any pieces: their 2-norm together is held to
        `clip`."""
        self.commit()
        self._pushes += 1
        self._work = tuple(work)
        self._factor = 1.0
        if self.clips:
            norm = self._norm(gradients)
            if math.isfinite(norm) and norm > self._settings.clip:
                self._factor = self._settings.clip / norm

    def _norm(self, gradients: Iterable[Array]) -> float:
        return math.sqrt(sum(float(np.dot(each, each)) for each in map(np.ravel, gradients)))

    def encode(self, block: Block, gradient: npt.NDArray[Any]) -> memoryview:
        """The code of a block's gradient (of a buffer: its value), shape (block.length,), contiguous, of the variable's
        dtype. Once a push."""
        assert gradient.dtype == self._variables[block.variable].dtype.value
        push = self._encodes(block, gradient.shape)
        memory = self._memories[_key(block)]
        if self._codecs[block.variable] == NONE:
            return floats.encode_raw(_times(gradient, push.factor)).data
        assert isinstance(memory, _Memory)
        return memory.encode(gradient, push)

    def _encodes(self, block: Block, shape: tuple[int, ...]) -> FeedbackPush:
        """A gradient of this shape is encoded."""
        key = _key(block)
        assert key not in self._encoded, f"block {key} twice in a push"
        assert shape == (block.length,)
        self._encoded.add(key)
        factor = self._factor if self._variables[block.variable].kind is VariableKind.PARAMETER else 1.0
        drawn = 0 if self._codecs[block.variable] == NONE else self._draw(key)
        return FeedbackPush(self._pushes - 1, factor, drawn)

    def _draw(self, key: tuple[int, int]) -> int:
        named = [self._seed[0], *self._work, *key] if self._work else [*self._seed, *key, self._pushes]
        words = np.random.SeedSequence(named).generate_state(1, np.uint64)
        return int(words[0])

    def commit(self) -> None:
        """The push counts; it can no longer be undone."""
        self._encoded.clear()

    def undo(self, blocks: Iterable[Block] | None = None) -> None:
        """The push does not count, for these blocks or (None) for all: what it took from the state is there again, and
        its gradients never were. For each block at most once a push."""
        if blocks is None:
            self._pushes -= 1 if self._encoded else 0
            undone = set(self._encoded)
        else:
            undone = {_key(block) for block in blocks} & self._encoded
        for key in undone:
            if self._codecs[key[0]] != NONE:
                self._memories[key].undo()
        self._encoded -= undone

    # ---- what was never sent

    def residuals(self) -> dict[int, Array]:
        """What was never sent, by index of the variable, each of shape (elements,): a worker that leaves pushes it as
        a last gradient, uncompressed. Only variables that have some."""
        return {index: total for index, total in self._gather(RESIDUAL) if total.any()}

    def absorb(self, residuals: Mapping[int, Array]) -> None:
        """Takes over what another worker never sent, as its `residuals` gave it; between pushes. What belongs to a
        variable without feedback is left out. Raises ShapeMismatch."""
        self.commit()
        for index, total in residuals.items():
            spec = self._variables[index]
            if total.shape != (spec.elements,):
                raise ShapeMismatch(f"a residual of {spec.name!r} of shape {total.shape}; expected ({spec.elements},)")
            for block, kept in self._kept(RESIDUAL, index):
                kept.add(total[block.offset : block.offset + block.length])

    @property
    def lost_norm(self) -> float:
        """The 2-norm of all residuals: what would be lost if this process died now."""
        kept = [memory.kept[RESIDUAL] for memory in self._memories.values() if RESIDUAL in memory.kept]
        return math.sqrt(sum(each.squares() for each in kept))

    # ---- saved and restored

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of all state: "pushes"; "residual.NAME" and "momentum.NAME" of shape (elements,), in the variable's
        dtype; "factor.NAME@OFFSET" of shape (rank, columns), float32. For between two pushes."""
        state: dict[str, npt.NDArray[Any]] = {PUSHES: np.array(self._pushes, np.int64)}
        for kind in (RESIDUAL, MOMENTUM):
            for index, total in self._gather(kind):
                state[f"{kind}.{self._variables[index].name}"] = total
        for (index, offset), memory in self._memories.items():
            if memory.factor is not None:
                state[f"{FACTOR}.{self._variables[index].name}@{offset}"] = memory.factor.copy()
        return state

    def load_state_dict(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Takes over what `state_dict` gave, also where the variables were cut into other blocks then; what is missing
        is zeros. Raises UnknownVariable for state that these settings do not keep, ShapeMismatch and DTypeMismatch,
        having changed nothing."""
        saved = self._sorted(state)
        self.commit()
        self._take(saved)

    def check(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Raises what `load_state_dict` would raise."""
        self._sorted(state)

    def go_back(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """The servers have gone back to when `state` was this worker's; empty: it had none. As `load_state_dict`, also
        in the midst of a push: that counts for the servers as they are now, or is undone, so what it left out is added
        to the residuals. Raises the same."""
        self._take(self._sorted(state))

    def residuals_in(self, state: Mapping[str, npt.NDArray[Any]]) -> dict[int, Array]:
        """As `residuals`, of what `state_dict` gave in another worker. Raises as `load_state_dict`."""
        kept = {name: value for name, value in state.items() if name.startswith(f"{RESIDUAL}.")}
        return {index: total for (_, index), total in self._sorted(kept).totals.items() if total.any()}

    def _sorted(self, state: Mapping[str, npt.NDArray[Any]]) -> _Saved:
        """Raises UnknownVariable, ShapeMismatch, DTypeMismatch."""
        indices = {variable.name: index for index, variable in enumerate(self._variables)}
        saved = _Saved(int(state.get(PUSHES, 0)), {}, {})
        for name, value in state.items():
            kind, _, variable = name.partition(".")
            if kind == FACTOR:
                variable, _, offset = variable.rpartition("@")
            index = indices.get(variable)
            if kind in (RESIDUAL, MOMENTUM) and index is not None and any(True for _ in self._kept(kind, index)):
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

    def _take(self, saved: _Saved) -> None:
        self._pushes = saved.pushes + bool(self._encoded)
        for kind in (RESIDUAL, MOMENTUM):
            for index in range(len(self._variables)):
                for block, kept in self._kept(kind, index):
                    total = saved.totals.get((kind, index))
                    values = None if total is None else total[block.offset : block.offset + block.length]
                    if _key(block) in self._encoded:
                        kept.rebase(values, add=kind == RESIDUAL)
                    else:
                        kept.write(values)
        for key, memory in self._memories.items():
            if memory.factor_shape is not None:
                factor = saved.factors.get(key)  # of another cut it is worth nothing; a warm start is not needed
                fits = factor is not None and factor.shape == memory.factor_shape and factor.dtype == np.float32
                memory.factor = factor.copy() if factor is not None and fits else None

    def _check(self, name: str, index: int, value: npt.NDArray[Any]) -> None:
        spec = self._variables[index]
        if value.shape != (spec.elements,):
            raise ShapeMismatch(f"compression state {name!r} of shape {value.shape}; expected ({spec.elements},)")
        if value.dtype != spec.dtype.value:
            raise DTypeMismatch(f"compression state {name!r} of dtype {value.dtype}; expected {spec.dtype.value}")

    def _kept(self, kind: str, index: int) -> Iterator[tuple[Block, ResidualBlock]]:
        """The blocks of a variable that keep arrays of this kind."""
        for key in self._by_variable[index]:
            kept = self._memories[key].kept.get(kind)
            if kept is not None:
                yield self._blocks[key], kept

    def _gather(self, kind: str) -> Iterator[tuple[int, Array]]:
        """Copies of what is kept of this kind, by variable, blocks put together."""
        for index, spec in enumerate(self._variables):
            pieces = list(self._kept(kind, index))
            if pieces:
                total = np.zeros(spec.elements, spec.dtype.value)
                for block, kept in pieces:
                    total[block.offset : block.offset + block.length] = kept.read()
                yield index, total


@dataclass(frozen=True, slots=True)
class _Saved:
    """A state that fits. `totals`: by kind and variable; `factors`: by variable and offset."""

    pushes: int
    totals: dict[tuple[str, int], Array]
    factors: dict[tuple[int, int], npt.NDArray[np.float32]]


def _key(block: Block) -> tuple[int, int]:
    return block.variable, block.offset


def _times(gradient: npt.NDArray[Any], factor: float) -> npt.NDArray[Any]:
    if factor == 1.0:
        return gradient
    product: npt.NDArray[Any] = gradient * gradient.dtype.type(factor)
    return product


def _check_momentum(optimizer: OptimizerSpec) -> None:
    names = [setting.name for setting in KINDS[optimizer.kind]]
    if "momentum" in names and any(group[names.index("momentum")] for group in optimizer.groups):
        raise ConfigurationError(
            f"job.compression.momentum with an {optimizer.kind} optimizer that has a momentum",
            why="momentum correction moves the momentum from the servers into the workers; both would square it",
            todo="set job.compression.momentum to the optimizer's momentum, and that to 0",
        )
