"""Promise 6 where it is made: however variables are cut into blocks, and blocks into partitions, training gives the
bits that it gives variable by variable. Of an optimizer that needs whole variables none is cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.domain.ids import PartitionId
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout, aligned_bytes
from shardyard.domain.optimizers import WHOLE_VARIABLES, OptimizerSpec, make_group
from shardyard.domain.pushes import PushPart
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard_ps_server.partition.contribution import PayloadLayout
from shardyard_ps_server.partition.dense_state import Contribution, DenseState
from shardyard_ps_server.values import optimizers
from shardyard_ps_server.values.versions import Bytes, aligned_empty
from tests.support.dense_rules import take_step

Values = Mapping[int, np.ndarray]
"""By the variable's index; a variable without a gradient is not there."""

GROUPS = {
    "sgd": ({"lr": 0.1}, {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": ({"lr": 0.01}, {"lr": 0.03, "amsgrad": 1.0}),
    "adamw": ({"lr": 0.01}, {"lr": 0.03, "beta1": 0.5}),
    "adagrad": ({"lr": 0.1}, {"lr": 0.1, "initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    "rmsprop": ({"lr": 0.01}, {"lr": 0.02, "centered": 1.0, "momentum": 0.5}),
    "adamax": ({"lr": 0.01}, {"lr": 0.02, "beta2": 0.9, "weight_decay": 0.1}),
    "nadam": ({"lr": 0.01}, {"lr": 0.02, "momentum_decay": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": 1.0}),
    "radam": ({"lr": 0.01}, {"lr": 0.02, "beta2": 0.9, "weight_decay": 0.1}),
    "lamb": ({"lr": 0.01}, {"lr": 0.02, "weight_decay": 0.1}),
    "lion": ({"lr": 0.01}, {"lr": 0.02, "weight_decay": 0.1}),
    "ftrl": ({"lr": 0.1}, {"lr": 0.2, "l1": 0.1, "l2": 0.1}),
}


@dataclass(frozen=True)
class Step:
    """What the members of one update push, and their weights."""

    pushed: tuple[Values, ...]
    weights: tuple[float, ...]

    @property
    def shares(self) -> list[float]:
        return [weight / sum(self.weights) for weight in self.weights]


@dataclass
class Whole:
    """The dumb second implementation: variable by variable, in plain numpy up to the update rule."""

    variables: Sequence[VariableSpec]
    spec: OptimizerSpec
    values: list[np.ndarray]
    counts: dict[int, int] = field(default_factory=dict)
    state: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def update(self, step: Step) -> None:
        for index, variable in enumerate(self.variables):
            having = [(p[index], s) for p, s in zip(step.pushed, step.shares, strict=True) if index in p]
            if not having:
                continue
            if variable.kind is VariableKind.PARAMETER:
                self._descend(index, variable.group, _sum(having) if len(step.pushed) > 1 else having[0][0])
            elif len(having) == 1:
                self.values[index] = having[0][0].copy()
            elif variable.dtype.is_floating:
                total = sum(share for _, share in having)
                self.values[index] = _sum([(value, share / total) for value, share in having])
            else:
                self.values[index] = np.maximum.reduce([value for value, _ in having])

    def _descend(self, index: int, group: int, gradient: np.ndarray) -> None:
        rule, group_settings = optimizers.make(self.spec.kind), self.spec.groups[group]
        old = self.values[index]
        state = self.state.setdefault(index, [np.full_like(old, slot.initial) for slot in rule.slots(group_settings)])
        self.counts[index] = self.counts.get(index, 0) + 1
        new = np.empty_like(old)
        take_step(rule, group_settings, self.counts[index], old, gradient, new, state)
        self.values[index] = new


def _sum(having: Sequence[tuple[np.ndarray, float]]) -> np.ndarray:
    total = having[0][0] * having[0][0].dtype.type(having[0][1])
    for value, share in having[1:]:
        total = total + value * value.dtype.type(share)
    return total


class Cut:
    """The same job under DenseState, cut into the given pieces (variable, offset, length) by partition."""

    def __init__(
        self, variables: Sequence[VariableSpec], spec: OptimizerSpec, pieces: Sequence[Sequence[tuple[int, int, int]]]
    ) -> None:
        self.variables = variables
        partitions = [_lay_out(number, held, variables) for number, held in enumerate(pieces)]
        layout = JobLayout(tuple(variables), spec, tuple(partitions))
        self.payloads = [PayloadLayout(layout, part) for part in partitions]
        self.parts = [
            (part, DenseState(layout, payload)) for part, payload in zip(partitions, self.payloads, strict=True)
        ]
        self.values = [aligned_empty(part.payload_bytes) for part, _ in self.parts]
        self.groups = spec.groups

    def start(self, values: Sequence[np.ndarray]) -> None:
        for (part, _), payload in zip(self.parts, self.values, strict=True):
            payload[:] = 0
            for block in part.blocks:
                self._of(block, payload)[:] = values[block.variable][block.offset : block.offset + block.length]

    def update(self, step: Step, rng: random.Random) -> None:
        for number, (part, blocks) in enumerate(self.parts):
            members = [
                self._contribution(part, self.payloads[number], values, weight, rng)
                for values, weight in zip(step.pushed, step.weights, strict=True)
            ]
            new = aligned_empty(part.payload_bytes)
            blocks.update(members, step.shares, self.values[number], new)
            self.values[number] = new

    def read(self) -> list[np.ndarray]:
        found = [np.empty(spec.elements, spec.dtype.value) for spec in self.variables]
        for (part, _), payload in zip(self.parts, self.values, strict=True):
            for block in part.blocks:
                found[block.variable][block.offset : block.offset + block.length] = self._of(block, payload)
        return found

    def _of(self, block: Block, payload: Bytes) -> np.ndarray:
        spec = self.variables[block.variable]
        return payload[block.position : block.position + block.length * spec.dtype.item_bytes].view(spec.dtype.value)

    def _contribution(
        self, part: PartitionLayout, layout: PayloadLayout, values: Values, weight: float, rng: random.Random
    ) -> Contribution:
        absent = tuple(index for index, block in enumerate(part.blocks) if block.variable not in values)
        full = np.frombuffer(rng.randbytes(part.payload_bytes), np.uint8).copy()  # filling is rubbish
        keep = np.ones(part.payload_bytes, bool)
        for index, block in enumerate(part.blocks):
            room = slice(block.position, block.position + aligned_bytes(block.length * self._item_bytes(block)))
            if index in absent:
                keep[room] = False
            else:
                wanted = values[block.variable][block.offset : block.offset + block.length]
                full[block.position : block.position + wanted.nbytes] = wanted.view(np.uint8)
        payload = aligned_empty(int(keep.sum()))
        payload[:] = full[keep]
        push = PushPart(part.partition, payload.size, absent)
        assert layout.expected_bytes(push) == payload.size
        unpacked, present = layout.unpack(push, payload)
        return Contribution(weight, self.groups, unpacked, present)

    def _item_bytes(self, block: Block) -> int:
        return self.variables[block.variable].dtype.item_bytes


def _lay_out(number: int, pieces: Sequence[tuple[int, int, int]], variables: Sequence[VariableSpec]) -> PartitionLayout:
    position, blocks = 0, []
    for variable, offset, length in pieces:
        blocks.append(Block(variable, offset, length, position))
        position += aligned_bytes(length * variables[variable].dtype.item_bytes)
    return PartitionLayout(PartitionId(number), position, tuple(blocks))


def _some_variables(rng: random.Random) -> list[VariableSpec]:
    found = []
    for index in range(rng.randint(1, 5)):
        parameter = rng.random() < 0.7
        dtype = rng.choice([DType.FLOAT32, DType.FLOAT64] if parameter else list(DType))
        kind = VariableKind.PARAMETER if parameter else VariableKind.BUFFER
        group = rng.randint(0, 1) if parameter else 0
        found.append(VariableSpec(f"v{index}", dtype, (rng.randint(0, 40),), kind, group))
    return found


def _some_cut(
    rng: random.Random, variables: Sequence[VariableSpec], *, whole: bool
) -> list[list[tuple[int, int, int]]]:
    partitions: list[list[tuple[int, int, int]]] = [[] for _ in range(rng.randint(1, 4))]
    for index, spec in enumerate(variables):
        within = [] if whole else [rng.randint(0, spec.elements) for _ in range(rng.randint(0, 4))]
        edges = sorted({0, spec.elements, *within})
        for begin, end in itertools.pairwise(edges):
            rng.choice(partitions).append((index, begin, end - begin))
    for held in partitions:
        rng.shuffle(held)
    return partitions


def _numbers(rng: np.random.Generator, spec: VariableSpec) -> np.ndarray:
    if spec.dtype.is_floating:
        return (rng.standard_normal(spec.elements) * 10.0 ** rng.integers(-3, 4)).astype(spec.dtype.value)
    return rng.integers(0, 2 if spec.dtype is DType.BOOL else 100, spec.elements).astype(spec.dtype.value)


def _some_step(rng: random.Random, numbers: np.random.Generator, variables: Sequence[VariableSpec]) -> Step:
    members = rng.randint(1, 4)
    presence = rng.choice([1.0, 1.0, 0.6])
    pushed = tuple(
        {index: _numbers(numbers, spec) for index, spec in enumerate(variables) if rng.random() < presence}
        for _ in range(members)
    )
    return Step(pushed, tuple(float(rng.randint(1, 9)) for _ in range(members)))


@settings(max_examples=250, deadline=None)
@given(kind=st.sampled_from(sorted(GROUPS)), seed=st.integers(0, 2**32))
def test_rules_b2_and_b5_variables_cut_anywhere_train_to_the_bits_of_whole_ones(kind: str, seed: int) -> None:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    variables = _some_variables(rng)
    spec = OptimizerSpec(kind, tuple(make_group(kind, given) for given in GROUPS[kind]))
    first = [_numbers(numbers, variable) for variable in variables]
    whole = Whole(variables, spec, [values.copy() for values in first])
    cuts = [Cut(variables, spec, _some_cut(rng, variables, whole=kind in WHOLE_VARIABLES)) for _ in range(2)]
    for cut in cuts:
        cut.start(first)
    for number in range(6):
        step = _some_step(rng, numbers, variables)
        whole.update(step)
        for cut in cuts:
            cut.update(step, rng)
            for variable, ours, plain in zip(variables, cut.read(), whole.values, strict=True):
                assert ours.tobytes() == plain.tobytes(), f"{variable} after update {number + 1}"
