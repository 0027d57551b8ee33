"""How a model's linear layers are cut over the members of a tensor-parallel group (job.strategy tensor).

Of a `colwise` layer each member computes some outputs, of a `rowwise` layer it reads some inputs, and the members add
up what comes out (Shoeybi et al., Megatron-LM, arXiv:1909.08053). A colwise layer is followed by a rowwise one, with
functions of single elements between them, or attention, whose heads are parted.

The plan is what job.tensor names. If it names nothing, torch.fx traces each module's forward, and the plan has all
chains of linear layers with functions of single elements between them.

In: a model of one process. Out: names of layers. Must not know: groups.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch.nn import functional

from shardyard.domain.errors import UnsupportedModel
from shardyard_worker.pipeline.cut import traced
from shardyard_worker.sharding.module_names import matching

_NAMES_SHOWN = 8
_ELEMENTWISE_MODULES: Final = (
    torch.nn.ReLU,
    torch.nn.ReLU6,
    torch.nn.LeakyReLU,
    torch.nn.ELU,
    torch.nn.CELU,
    torch.nn.SELU,
    torch.nn.GELU,
    torch.nn.SiLU,
    torch.nn.Mish,
    torch.nn.Sigmoid,
    torch.nn.Tanh,
    torch.nn.Softplus,
    torch.nn.Hardtanh,
    torch.nn.Hardswish,
    torch.nn.Hardsigmoid,
    torch.nn.Identity,
    torch.nn.Dropout,
)
_ELEMENTWISE_FUNCTIONS: Final[frozenset[Callable[..., Any]]] = frozenset(
    (
        functional.relu,
        functional.relu6,
        functional.leaky_relu,
        functional.elu,
        functional.selu,
        functional.gelu,
        functional.silu,
        functional.mish,
        functional.sigmoid,
        functional.tanh,
        functional.softplus,
        functional.hardtanh,
        functional.dropout,
        torch.relu,
        torch.sigmoid,
        torch.tanh,
        torch.mul,
        torch.square,
        operator.mul,
    )
)
_ELEMENTWISE_METHODS: Final = frozenset(("relu", "sigmoid", "tanh", "mul", "square"))


@dataclass(frozen=True)
class TensorPlan:
    """Names of linear layers."""

    colwise: tuple[str, ...]
    rowwise: tuple[str, ...]

    def table(self, model: torch.nn.Module, size: int) -> str:
        """As text: each layer, how it is cut, and what a member has of it."""
        rows = [("layer", "cut", "shape", "in each worker")]
        for how, names in (("colwise", self.colwise), ("rowwise", self.rowwise)):
            for name in names:
                layer = _linear(model, name)
                outputs, inputs = layer.out_features, layer.in_features
                part = (outputs // size, inputs) if how == "colwise" else (outputs, inputs // size)
                rows.append((name, how, f"{outputs} x {inputs}", f"{part[0]} x {part[1]}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )


def plan_for(model: torch.nn.Module, size: int, colwise: Sequence[str], rowwise: Sequence[str]) -> TensorPlan:
    """`colwise`, `rowwise`: patterns of names; both empty: layers are found. Raises UnsupportedModel."""
    if colwise or rowwise:
        plan = TensorPlan(_named(model, colwise, "colwise"), _named(model, rowwise, "rowwise"))
        both = sorted({*plan.colwise} & {*plan.rowwise})
        if both:
            raise UnsupportedModel(
                f"layer {both[0]!r}, which is in job.tensor.colwise and in job.tensor.rowwise",
                todo="name each layer once",
            )
        _check_sizes(model, plan, size)
    else:
        plan = _found(model, size)
    _check_shared(model, plan)
    return plan


def _named(model: torch.nn.Module, patterns: Sequence[str], how: str) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for pattern in patterns:
        matched = matching((name for name, _ in model.named_modules()), pattern)
        if not matched:
            names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
            listed = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
            raise UnsupportedModel(
                f"{pattern!r} in job.tensor.{how}, and no module of the model has such a name",
                todo=f"name some of {listed}" if listed else "use another job.strategy: it has no torch.nn.Linear",
            )
        for name in matched:
            module = model.get_submodule(name)
            if not isinstance(module, torch.nn.Linear):
                raise UnsupportedModel(
                    f"module {name!r} in job.tensor.{how}, a {type(module).__name__}",
                    why="linear layers can be cut",
                    todo="name layers of torch.nn.Linear",
                )
            found[name] = None
    return tuple(found)


def _linear(model: torch.nn.Module, name: str) -> torch.nn.Linear:
    module = model.get_submodule(name)
    assert isinstance(module, torch.nn.Linear)
    return module


def _check_sizes(model: torch.nn.Module, plan: TensorPlan, size: int) -> None:
    for names, number, what in ((plan.colwise, "out_features", "outputs"), (plan.rowwise, "in_features", "inputs")):
        for name in names:
            features = getattr(_linear(model, name), number)
            if features % size:
                raise UnsupportedModel(
                    f"layer {name!r} with {features} {what} for {size} workers",
                    why="each worker computes equally many",
                    todo="set a job.tensor.size that divides them, or leave the layer out of job.tensor",
                )


def _check_shared(model: torch.nn.Module, plan: TensorPlan) -> None:
    """Raises UnsupportedModel for a layer whose parameters another module has too."""
    shared = _shared(model, (*plan.colwise, *plan.rowwise))
    if shared:
        raise UnsupportedModel(
            f"parameter {shared[0]!r} of a layer that is cut, which is {shared[1]!r} too",
            why="the other module would keep the whole of it",
            todo="leave the layer out of job.tensor, or give each module a parameter of its own",
        )


def _shared(model: torch.nn.Module, layers: Sequence[str]) -> list[str]:
    """The names of a parameter of these layers that is in several modules; empty if there is none."""
    owners: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    found = [owners[each] for layer in layers for each in model.get_submodule(layer).parameters()]
    return next((names for names in found if len(names) > 1), [])


# ---- found by the forward


def _found(model: torch.nn.Module, size: int) -> TensorPlan:
    """Each module's own forward is followed; one that cannot be is passed over."""
    colwise: dict[str, None] = {}
    rowwise: dict[str, None] = {}
    for path, module in model.named_modules():
        for before, last in _chains(module):
            names = [f"{path}.{name}".removeprefix(".") for name in (*before, last)]
            layers = [_linear(model, name) for name in names]
            is_free = not any(name in colwise or name in rowwise for name in names)
            if is_free and not any(layer.out_features % size for layer in layers[:-1]) and not _shared(model, names):
                colwise.update(dict.fromkeys(names[:-1]))
                rowwise[names[-1]] = None
    if not rowwise:
        raise UnsupportedModel(
            f"a model without two linear layers that can be cut for {size} workers",
            why="a layer is cut by its outputs if functions of single elements lead from it to another, and"
            " job.tensor.size divides the number of its outputs",
            todo="name layers in job.tensor.colwise and job.tensor.rowwise, or use another job.strategy",
        )
    return TensorPlan(tuple(colwise), tuple(rowwise))


def _chains(module: torch.nn.Module) -> Iterator[tuple[list[str], str]]:
    """The linear layers that a module's forward calls, with those before each."""
    if type(module).__module__.startswith("torch.nn") and not isinstance(module, torch.nn.Sequential):
        return
    try:
        graph = traced(module, set())
    except UnsupportedModel:
        return
    linears = [node for node in graph.nodes if _is_linear(module, node)]
    calls = Counter(str(node.target) for node in linears)
    for node in linears:
        before = [str(each.target) for each in _linears_before(module, node)]
        if before and all(calls[name] == 1 for name in (*before, str(node.target))):
            yield before, str(node.target)


def _is_linear(model: torch.nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and type(model.get_submodule(str(node.target))) is torch.nn.Linear


def _linears_before(model: torch.nn.Module, last: fx.Node) -> list[fx.Node]:
    """The linear layers from which only functions of single elements lead to this one, and nowhere else. Empty if
    something else leads to it."""
    found: list[fx.Node] = []
    between, waiting = {last}, set(last.all_input_nodes)
    for node in reversed(last.graph.nodes):
        if node not in waiting:
            continue
        if not all(user in between for user in node.users):
            return []
        between.add(node)
        if _is_linear(model, node):
            found.append(node)
        elif _is_elementwise(model, node):
            waiting.update(node.all_input_nodes)
        else:
            return []
    widths = {_linear(model, str(each.target)).out_features for each in found}
    return found[::-1] if len(widths) == 1 else []


def _is_elementwise(model: torch.nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(model.get_submodule(str(node.target))) in _ELEMENTWISE_MODULES
    if node.op == "call_function":
        return node.target in _ELEMENTWISE_FUNCTIONS
    return node.op == "call_method" and node.target in _ELEMENTWISE_METHODS
