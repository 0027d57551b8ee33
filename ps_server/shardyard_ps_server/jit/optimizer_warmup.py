"""The loops of dense variables: which ones a job needs, and how they are loaded before its first push.

    python -m shardyard_ps_server.jit.optimizer_warmup     compiles the loops of all optimizers to disk

One optimizer and dtype take about a second to compile, and a moment to load from disk. All of them take half a minute,
so only tests and images compile all of them.

Owns: the list of loops that a job needs. Invariants: a loop is called once, on one element, with arguments of the types
that an update has; numba then compiles it, or loads it. A loop that is missing here is compiled by the first push that
needs it. Must not know: jobs, what the loops do.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from shardyard.domain.consistency import Clipping, StaleRule, UpdateMode
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.optimizers import KINDS, make_group
from shardyard.domain.variables import VariableKind
from shardyard_ps_server.jit import cache
from shardyard_ps_server.values import kernels, optimizers, pieces

log = logging.getLogger("shardyard.server")

KIND: Final = "optimizer_loops"
MEAN: Final = "mean"
SQUARE_NORM: Final = "square norm"
COMPENSATION: Final = "compensation"
DTYPES: Final = ("float32", "float64")

_VARIANTS: Final[dict[str, tuple[dict[str, float], ...]]] = {
    "sgd": ({}, {"momentum": 0.9}),
    "adam": ({}, {"amsgrad": 1.0}),
    "adamw": ({}, {"amsgrad": 1.0}),
    "rmsprop": ({}, {"momentum": 0.9}, {"centered": 1.0}, {"momentum": 0.9, "centered": 1.0}),
}
"""Settings for which an optimizer is compiled anew, because it has other state. The other optimizers have one loop."""


@dataclass(frozen=True, slots=True)
class DenseLoop:
    """`name`: an optimizer's kind, MEAN, SQUARE_NORM or COMPENSATION. `slots`: the optimizer's state, which decides
    what is compiled. `settings`: one group of them, with which the loop can be called."""

    name: str
    dtype: str
    slots: tuple[str, ...] = ()
    settings: tuple[float, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype})"


_loaded: Final[set[DenseLoop]] = set()
"""Machine code belongs to a process, not to one of its servers."""


def needed(layout: JobLayout, mode: UpdateMode, stale: StaleRule | None, clipping: Clipping) -> frozenset[DenseLoop]:
    """Returns the loops that updates of a job's variables call. Tables have their own."""
    found: set[DenseLoop] = set()
    for variable in layout.variables:
        dtype = variable.dtype.value
        if dtype not in DTYPES:
            continue
        if variable.kind is not VariableKind.PARAMETER:
            if mode is UpdateMode.SYNC:  # an asynchronous push overwrites a buffer
                found.add(DenseLoop(MEAN, dtype))
            continue
        found.add(_step(layout.optimizer.kind, layout.optimizer.groups[variable.group], dtype))
        if clipping.norm or clipping.value:
            found.update((DenseLoop(MEAN, dtype), DenseLoop(SQUARE_NORM, dtype)))
        if stale is not None and stale.compensation:
            found.add(DenseLoop(COMPENSATION, dtype))
    return frozenset(found)


def every_loop(dtypes: Iterable[str] = DTYPES) -> frozenset[DenseLoop]:
    found: set[DenseLoop] = set()
    for dtype in dtypes:
        found.update(DenseLoop(name, dtype) for name in (MEAN, SQUARE_NORM, COMPENSATION))
        for kind in KINDS:
            found.update(_step(kind, make_group(kind, given), dtype) for given in _VARIANTS.get(kind, ({},)))
    return frozenset(found)


def missing(loops: Iterable[DenseLoop]) -> list[DenseLoop]:
    """Returns the loops that this process has not loaded yet."""
    return sorted(set(loops) - _loaded, key=str)


def load(loops: Collection[DenseLoop]) -> None:
    """Loads loops from disk, or compiles them to disk. If another process of this machine compiles, it waits."""
    folder = cache.folder_of(kernels.mean)
    if folder is None:
        log.warning("optimizer loops are compiled at each start: no folder for them can be written (NUMBA_CACHE_DIR)")
        warm(loops)
        return
    cache.start_compiler()
    try:
        with cache.compiler_lock(folder, KIND):
            warm(loops)
    except OSError as error:
        log.warning("compiled loops cannot be kept in %s (%s); each start compiles them", folder, error)
        warm(loops)


def warm(loops: Iterable[DenseLoop]) -> None:
    """Calls each loop once, which compiles it or loads it."""
    for loop in loops:
        try:
            _call(loop)
        except OSError as error:
            log.warning("the compiled loop of %s cannot be kept on disk (%s); each start compiles it", loop, error)
            _call(loop)
        _loaded.add(loop)


def _step(kind: str, settings: Sequence[float], dtype: str) -> DenseLoop:
    slots = tuple(slot.name for slot in optimizers.make(kind).slots(settings))
    return DenseLoop(kind, dtype, slots, tuple(settings))


def _call(loop: DenseLoop) -> None:
    """Calls a loop with a payload that may be written, and with one that may not: `locate` is compiled for each."""
    old, new, payload = (np.zeros(8, np.uint8) for _ in range(3))
    addresses = [pieces.locate(old, new, payload, 1)]
    payload.flags.writeable = False
    addresses.append(pieces.locate(old, new, payload, 1))
    sources, scratch = np.array(addresses), np.zeros(8, np.uint8).view(loop.dtype)
    nothing = scratch[:0]
    match loop.name:
        case "mean":
            kernels.mean((old, new, sources, np.ones(2), scratch, nothing, 0, 8), 0.0)
        case "square norm":
            kernels.square_norm(scratch)
        case "compensation":
            task = (old, new, sources, optimizers.LONE, nothing, nothing, 0, 8)
            for squares in (None, np.zeros(8, np.uint8)):
                kernels.compensate(task, squares, np.ones(4, loop.dtype))
        case kind:
            task = (old, new, sources[:1], optimizers.LONE, nothing, nothing, 0, 8)
            optimizers.make(kind).update(loop.settings, 1, task, [np.zeros(8, np.uint8) for _ in loop.slots])


def main() -> None:
    if cache.folder_of(kernels.mean) is None:
        raise SystemExit("no folder for compiled loops can be written (NUMBA_CACHE_DIR)")
    load(every_loop())


if __name__ == "__main__":
    main()
