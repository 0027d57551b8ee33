"""Cuts a model into the stages of a pipeline: neighbouring parts of its forward, which run one after the other.

torch.fx traces the model's own forward. Modules that it calls stay whole, except torch.nn.Sequential and those that
have to be opened to find enough of them. A stage begins at a module: at those that job.pipeline.cut names, else where
the largest stage has as few parameters as possible. What a later stage needs is handed on from stage to stage, so each
talks to its neighbours only.

In: a model of one process. Out: a module for each stage, which shares the model's parameters. Must not know: workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from shardyard.domain.errors import UnsupportedModel

_NAMES_SHOWN = 8
_STAY_WHOLE = ("torch.nn", "shardyard_worker.embedding")
"""Modules of these packages are not opened."""
_NAME_THEM = "name the modules at which stages begin in job.pipeline.cut, or set fewer job.pipeline.stages"


@dataclass(frozen=True)
class Stage:
    """`module`: takes what the stage before returns, and returns a tuple of tensors; the last one returns what the
    model returns. `calls`: the modules of the model that it calls, in their order."""

    module: fx.GraphModule
    calls: tuple[str, ...]
    elements: int
    nbytes: int


def cut_model(model: torch.nn.Module, count: int, begins: Sequence[str] = ()) -> list[Stage]:
    """`begins`: the modules at which the second and later stages begin; empty: they are chosen. Raises
    UnsupportedModel."""
    opened = {name for name, _ in model.named_modules() if any(each.startswith(f"{name}.") for each in begins)}
    while True:
        graph = traced(model, opened)
        calls = [node for node in graph.nodes if node.op == "call_module"]
        if begins or len(calls) >= count:
            break
        more = {str(node.target) for node in calls if not _stays_whole(model.get_submodule(str(node.target)))}
        if not more:
            raise UnsupportedModel(
                f"a model of {len(calls)} parts ({_listed(calls)}) for {count} stages",
                why="a stage begins where the model calls a module",
                todo="set fewer job.pipeline.stages, or build the model of more modules",
            )
        opened |= more
    places = _named_places(calls, begins, count) if begins else _even_places(model, calls, count)
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    firsts = [0, *(nodes.index(calls[place]) for place in places), len(nodes)]
    stages = _Cutter(model, graph).stages([nodes[first:end] for first, end in pairwise(firsts)])
    _check_shared(stages)
    return stages


def plan_of(stages: Sequence[Stage]) -> str:
    """The plan as a table."""
    rows = [("stage", "modules", "parameters", "bytes")]
    for number, stage in enumerate(stages):
        ends = f"{stage.calls[0]} .. {stage.calls[-1]}" if len(stage.calls) > 1 else "".join(stage.calls)
        rows.append((str(number), ends, f"{stage.elements:,}", f"{stage.nbytes:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


class _Tracer(fx.Tracer):
    def __init__(self, opened: set[str]) -> None:
        super().__init__()
        self._opened = opened

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened and not isinstance(m, torch.nn.Sequential)


def traced(model: torch.nn.Module, opened: set[str]) -> fx.Graph:
    """The calls of its forward, except those inside of modules that are not in `opened`. Raises UnsupportedModel."""
    # arguments that a script leaves out: those of job.train_step have no names
    arguments = inspect.signature(model.forward).parameters.values()
    defaults = {each.name: each.default for each in arguments if each.default is not each.empty}
    try:
        graph = _Tracer(opened).trace(model, defaults)
    except Exception as error:  # whatever the model's code raises when it meets values that are not there yet
        raise UnsupportedModel(
            f"a forward of {type(model).__name__} that cannot be traced: {error}",
            why="torch.fx follows the calls of its modules without data, so they must not depend on values",
            todo="put such code into a module of its own, which stays whole; or build the model as torch.nn.Sequential",
        ) from error
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output", "call_module"))
    for place, node in enumerate(graph.find_nodes(op="placeholder")):
        if place >= len(arguments) - len(defaults):
            graph.erase_node(node)
    return graph


def _stays_whole(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith(_STAY_WHOLE)


def _listed(calls: Sequence[fx.Node]) -> str:
    names = [str(node.target) for node in calls]
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")


# ---- where stages begin


def _named_places(calls: Sequence[fx.Node], begins: Sequence[str], count: int) -> list[int]:
    if len(begins) != count - 1:
        raise UnsupportedModel(
            f"{len(begins)} modules in job.pipeline.cut for {count} stages",
            todo="name one for each stage but the first",
        )
    places = []
    for name in begins:
        found = [at for at, node in enumerate(calls) if node.target == name or f"{node.target}.".startswith(f"{name}.")]
        if not found:
            raise UnsupportedModel(
                f"module {name!r} in job.pipeline.cut, which the model does not call",
                todo=f"name some of {_listed(calls)}",
            )
        places.append(found[0])
    if any(first >= second for first, second in pairwise([0, *places])):
        raise UnsupportedModel(
            f"job.pipeline.cut {', '.join(begins)}, which is not the order in which the model calls them",
            todo=f"the order is {_listed(calls)}",
        )
    return places


def _even_places(model: torch.nn.Module, calls: Sequence[fx.Node], count: int) -> list[int]:
    """The linear partition problem: neighbouring parts, of which the largest is as small as possible."""
    seen: set[torch.Tensor] = set()
    costs = []
    for node in calls:
        own = set(model.get_submodule(str(node.target)).parameters()) - seen
        seen |= own
        costs.append(sum(each.numel() for each in own))
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n][end]: the largest part of the first `end` calls in n parts, and where the last of these parts begins
    best = [[(sums[end], 0) for end in range(len(calls) + 1)]]
    for parts in range(2, count + 1):
        before = best[-1]
        best.append(
            [
                min(
                    ((max(before[begin][0], sums[end] - sums[begin]), begin) for begin in range(parts - 1, end)),
                    default=(sums[-1], 0),
                )
                for end in range(len(calls) + 1)
            ]
        )
    places, end = [], len(calls)
    for row in reversed(best[1:]):
        end = row[end][1]
        places.append(end)
    return places[::-1]


# ---- the stages' modules


class _Cutter:
    def __init__(self, model: torch.nn.Module, graph: fx.Graph) -> None:
        self._model = model
        self._inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._output = next(node for node in graph.nodes if node.op == "output")

    def stages(self, parts: Sequence[Sequence[fx.Node]]) -> list[Stage]:
        made, given = [], self._inputs
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            later = {user for each in parts[number + 1 :] for user in each} | {self._output}
            known = [*given, *part]
            handed = [] if is_last else [node for node in known if any(user in later for user in node.users)]
            made.append(self._stage(given, part, None if is_last else handed))
            given = handed
        return made

    def _stage(self, given: Sequence[fx.Node], part: Sequence[fx.Node], handed: Sequence[fx.Node] | None) -> Stage:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()

        def copy_of(node: fx.Node) -> fx.Node:
            if node not in copies and node.op == "get_attr":
                copies[node] = graph.node_copy(node)
            return copies[node]

        for node in given:
            copies[node] = graph.placeholder(node.name)
        for node in part:
            for each in node.all_input_nodes:
                copy_of(each)
            copies[node] = graph.node_copy(node, copy_of)
        if handed is None:
            for each in self._output.all_input_nodes:
                copy_of(each)
            graph.output(fx.map_arg(self._output.args[0], copy_of))
        else:
            graph.output(tuple(copy_of(node) for node in handed))
        module = fx.GraphModule(self._model, graph)
        calls = tuple(str(node.target) for node in part if node.op == "call_module")
        parameters = list(module.parameters())
        elements = sum(each.numel() for each in parameters)
        return Stage(module, calls, elements, sum(each.numel() * each.element_size() for each in parameters))


def _check_shared(stages: Sequence[Stage]) -> None:
    owner: dict[torch.Tensor, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.module.named_parameters():
            first, known_as = owner.setdefault(parameter, (number, name))
            if first != number:
                raise UnsupportedModel(
                    f"parameter {known_as!r} of stage {first}, which stage {number} uses too, as {name!r}",
                    why="each parameter is updated by one stage",
                    todo="give each stage its own, or cut the model so that one stage has both: " + _NAME_THEM,
                )
