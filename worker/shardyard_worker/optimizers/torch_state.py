"""The state of an optimizer as torch has it, and as the servers have it.

Owns: the translation of one parameter's state, in both directions: torch's `step` is the number of updates, and
nadam's `mu_product` follows from it; the other tensors are the servers' state arrays, under the same names. Invariant:
state that the servers cannot go on from exactly is refused. Must not know: which parameters there are, where state is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from shardyard.domain.errors import ShapeMismatch, UnsupportedOptimizer
from shardyard.domain.optimizers import setting_names, slots_of

STEP, PRODUCT = "step", "mu_product"
_WITHOUT_STEP: Final = frozenset(("sgd", "lion", "ftrl"))
_PRODUCT_ERROR_MAX: Final = 1e-3
"""torch multiplies the momenta up in float32."""

TorchState = dict[str, Any]


@dataclass(frozen=True)
class VariableState:
    """`count`: the number of a variable's updates. `slots`: arrays of shape (elements,), in the variable's dtype, by
    name."""

    count: int
    slots: Mapping[str, npt.NDArray[Any]]


def to_torch(kind: str, group: Sequence[float], state: VariableState, shape: tuple[int, ...]) -> TorchState:
    """The state of a parameter of that shape, on the CPU. Empty if torch would have none."""
    if state.count == 0 and kind != "adagrad":  # which has its sums from the start
        return {}
    found: TorchState = {}
    dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
    if kind not in _WITHOUT_STEP:
        found[STEP] = torch.tensor(float(state.count), dtype=dtype)
    if kind == "nadam":
        found[PRODUCT] = torch.tensor(_momentum_product(*_nadam(group), state.count), dtype=dtype)
    for slot in slots_of(kind, group):
        found[slot.name] = torch.from_numpy(state.slots[slot.name]).reshape(shape)
    return found


def from_torch(
    kind: str, group: Sequence[float], state: Mapping[str, Any], parameter: torch.Tensor, name: str
) -> VariableState | None:
    """The servers' state of a parameter; None if it has none. `name`: the parameter's, for errors. Raises
    UnsupportedOptimizer, ShapeMismatch."""
    slots = slots_of(kind, group)
    given = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    if not any(slot.name in given for slot in slots):
        return None
    count = 1 if kind in _WITHOUT_STEP else int(float(state.get(STEP, -1)))
    missing = [slot.name for slot in slots if slot.name not in given] + ([] if count >= 0 else [STEP])
    if missing:
        raise UnsupportedOptimizer(
            f"the optimizer's state of {name!r} without {', '.join(missing)}; it has {', '.join(sorted(state))}",
            why=f"{kind} with these settings cannot go on from it",
            todo="load the state of an optimizer of the same class and options, or none",
        )
    if count == 0 and all(bool((given[slot.name] == slot.initial).all()) for slot in slots):
        return None
    if kind == "nadam" and PRODUCT in state:
        product, expected = float(state[PRODUCT]), _momentum_product(*_nadam(group), count)
        if abs(product - expected) > _PRODUCT_ERROR_MAX * max(product, expected, 1e-6):
            raise UnsupportedOptimizer(
                f"the optimizer's state of {name!r}, whose {PRODUCT} is {product:g}; expected {expected:g} after"
                f" {count} steps with these settings",
                why="the servers compute it from the settings, which were others before",
                todo="go on with the betas and the momentum_decay that the state was made with",
            )
    found = {}
    for slot in slots:
        tensor = given[slot.name].detach()
        if tensor.shape != parameter.shape:
            raise ShapeMismatch(
                f"the optimizer's {slot.name} of {name!r} has shape {tuple(tensor.shape)}; expected"
                f" {tuple(parameter.shape)}",
                todo="load the state of an optimizer of the same model",
            )
        wide = torch.float64 if parameter.dtype is torch.float64 else torch.float32
        found[slot.name] = np.ascontiguousarray(tensor.to("cpu", wide).reshape(-1).numpy())
    return VariableState(count, found)


def _nadam(group: Sequence[float]) -> tuple[float, float]:
    settings = dict(zip(setting_names("nadam"), group, strict=True))
    return settings["beta1"], settings["momentum_decay"]


@lru_cache(maxsize=16)
def _momentum_product(beta1: float, momentum_decay: float, count: int) -> float:
    product = 1.0
    for t in range(1, count + 1):
        product *= beta1 * (1.0 - 0.5 * 0.96 ** (t * momentum_decay))
        if product < 1e-20:
            return 0.0
    return product
