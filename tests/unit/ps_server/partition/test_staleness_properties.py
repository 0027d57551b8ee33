"""Stale gradients in a partition, against plain numpy: workers that pull and push in any order."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.checkpoints.partition_file import BlockState, PartitionState
from shardyard.domain.consistency import StaleRule, UpdateMode
from shardyard.domain.errors import TooLarge
from shardyard.domain.ids import Incarnation, PartitionId, Token, Version
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout, aligned_bytes
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import NotReadyPart
from shardyard.domain.push_names import PushName, SourceKey, WorkerSource
from shardyard.domain.variables import DType, VariableKind, VariableSpec
from shardyard_ps_server.partition import push
from shardyard_ps_server.partition.checkpoint_cuts import block_arrays, take_cut
from shardyard_ps_server.partition.contribution import Contribution
from shardyard_ps_server.partition.partition import Partition
from shardyard_ps_server.partition.push import apply_push
from shardyard_ps_server.partition.reads import hold_version
from shardyard_ps_server.partition.staleness import Base, Tally
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.values import kernels, pieces, versions
from shardyard_ps_server.values.versions import Bytes, aligned_empty

bounded = settings(max_examples=60, deadline=None)

LENGTHS = (5, 33, 3)
"""Of two parameters and a buffer."""
WORKERS = 3
Array = npt.NDArray[Any]


def layout(dtype: DType, kind: str, given_settings: dict[str, float]) -> JobLayout:
    kinds = (VariableKind.PARAMETER, VariableKind.PARAMETER, VariableKind.BUFFER)
    variables = tuple(
        VariableSpec(name, dtype, (length,), of, 0) for name, length, of in zip("abm", LENGTHS, kinds, strict=True)
    )
    blocks, at = [], 0
    for index, length in enumerate(LENGTHS):
        blocks.append(Block(index, 0, length, at))
        at += aligned_bytes(length * dtype.item_bytes)
    spec = OptimizerSpec(kind, (make_group(kind, given_settings),))
    return JobLayout(variables, spec, (PartitionLayout(PartitionId(0), at, tuple(blocks)),))


class Yard:
    """A partition, and workers that compute on what they have pulled."""

    def __init__(self, of: JobLayout, rule: StaleRule | None) -> None:
        self.layout = of
        self.dtype = of.variables[0].dtype.value
        self.partition = Partition(of, PartitionId(0), UpdateRules(UpdateMode.ASYNC, 0, stale=rule))
        self.part = of.partitions[0]
        self.base = [Version(1, 0)] * WORKERS
        self.sequence = [0] * WORKERS

    def pull(self, worker: int) -> None:
        found = hold_version(self.partition, 0, False, 0.0)
        assert not isinstance(found, NotReadyPart)
        version, buffer = found
        self.partition.remember_base(Incarnation(1 + worker), version, buffer)
        self.partition.release(buffer)
        self.base[worker] = version

    def payload(self, arrays: list[Array | None]) -> Bytes:
        found = aligned_empty(self.part.payload_bytes)
        found[:] = 0
        for block, array in zip(self.part.blocks, arrays, strict=True):
            if array is not None:
                self._view(found, block)[:] = array
        return found

    def _view(self, payload: Bytes, block: Block) -> Array:
        end = block.position + block.length * np.dtype(self.dtype).itemsize
        return payload[block.position : end].view(self.dtype)

    def push(self, worker: int, arrays: list[Array | None], *, says: bool = True) -> None:
        incarnation = Incarnation(1 + worker)
        number = self.sequence[worker]
        self.sequence[worker] += 1
        name = PushName(SourceKey(WorkerSource(incarnation)), Token(0), number, number)
        present = tuple(array is not None for array in arrays)
        base = Base(incarnation, self.base[worker]) if says else None
        groups = self.layout.optimizer.groups
        contribution = Contribution(1.0, groups, self.payload(arrays), present, base)
        apply_push(self.partition, name, contribution, lambda: None)

    @property
    def values(self) -> list[Array]:
        found = hold_version(self.partition, 0, False, 0.0)
        assert not isinstance(found, NotReadyPart)
        copies = [self._view(found[1], block).copy() for block in self.part.blocks]
        self.partition.release(found[1])
        return copies


moves = st.lists(
    st.tuples(
        st.integers(0, WORKERS - 1),
        st.sampled_from(["pull", "push", "push"]),
        st.tuples(*[st.booleans()] * len(LENGTHS)).filter(any) | st.just((True,) * len(LENGTHS)),
    ),
    max_size=20,
)


def gradients(step: int, present: tuple[bool, ...], dtype: str) -> list[Array | None]:
    random = np.random.default_rng(step)
    drawn = [random.normal(size=length).astype(dtype) for length in LENGTHS]
    return [array if there else None for array, there in zip(drawn, present, strict=True)]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64])
@pytest.mark.parametrize(
    "rule",
    [
        StaleRule(True, 0.0),
        StaleRule(False, 0.3),
        StaleRule(True, 0.3),
        StaleRule(False, 2.0, 0.75),
        StaleRule(True, 2.0, 0.75),
    ],
)
def test_sgd_on_stale_gradients_is_what_the_formulas_say(dtype: DType, rule: StaleRule) -> None:
    @bounded
    @given(moves)
    def run(given_moves: list[tuple[int, str, tuple[bool, ...]]]) -> None:
        yard = Yard(layout(dtype, "sgd", {"lr": 0.5}), rule)
        number = np.dtype(dtype.value).type
        history = [yard.values]
        squares = [np.zeros_like(each) for each in history[0]]
        tally = Tally()
        for worker in range(WORKERS):
            yard.pull(worker)
        for step, (worker, move, present) in enumerate(given_moves):
            if move == "pull":
                yard.pull(worker)
                continue
            arrays = gradients(step, present, dtype.value)
            then, now = history[yard.base[worker].number], history[-1]
            staleness = len(history) - 1 - yard.base[worker].number
            rate = number(0.5 / max(1, staleness) if rule.divides_rate else 0.5)
            after = []
            for index, g in enumerate(arrays):
                if g is None:
                    after.append(now[index])
                elif index == 2:
                    after.append(g)
                else:
                    strength: Any = number(rule.compensation)
                    if rule.decay:
                        squares[index] = number(rule.decay) * squares[index] + number(1 - rule.decay) * g * g
                        strength = strength / np.sqrt(squares[index] + number(1e-7))
                    if staleness and rule.compensation:
                        g = g + strength * g * g * (now[index] - then[index])
                    after.append(now[index] - rate * g)
            yard.push(worker, arrays)
            history.append(after)
            tally = Tally(tally.gradients + 1, tally.total + staleness, max(tally.most, staleness), 0)
            for mine, expected in zip(yard.values, after, strict=True):
                np.testing.assert_array_equal(mine, expected)
        assert yard.partition.tally == tally

    run()


@pytest.mark.parametrize("kind", ["sgd", "adam", "adagrad", "lamb"])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_gradient_that_nobody_has_overtaken_gives_the_bits_that_it_gives_without_a_rule(
    kind: str, decay: float
) -> None:
    """Also one that does not say what it was computed on, however late it is."""
    of = layout(DType.FLOAT32, kind, {"lr": 0.1} | ({"momentum": 0.9} if kind == "sgd" else {}))
    ruled, plain = Yard(of, StaleRule(True, 5.0, decay)), Yard(of, None)
    for step in range(6):
        for yard in (ruled, plain):
            if step < 4:
                yard.pull(0)
            yard.push(0, gradients(step, (True, step != 2, True), "float32"), says=step < 4)
        for mine, theirs in zip(ruled.values, plain.values, strict=True):
            assert mine.tobytes() == theirs.tobytes()
    assert ruled.partition.tally == Tally(gradients=4)
    assert plain.partition.tally is None


def test_momentum_takes_the_lower_rate_as_torch_takes_one_of_a_scheduler() -> None:
    import torch

    yard = Yard(layout(DType.FLOAT64, "sgd", {"lr": 0.5, "momentum": 0.9}), StaleRule(True, 0.0))
    parameter = torch.zeros(LENGTHS[0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    yard.pull(0)
    for step in range(5):
        arrays = gradients(step, (True, True, True), "float64")
        yard.push(0, arrays)  # all computed on version 0
        assert arrays[0] is not None
        parameter.grad = torch.from_numpy(arrays[0])
        optimizer.param_groups[0]["lr"] = 0.5 / max(1, step)
        optimizer.step()
        np.testing.assert_array_equal(yard.values[0], parameter.detach().numpy())


def test_version_that_is_gone_leaves_the_gradient_as_it_is_and_is_counted() -> None:
    rule = StaleRule(False, 5.0)
    yard, plain = (
        Yard(layout(DType.FLOAT64, "sgd", {"lr": 0.5}), rule),
        Yard(layout(DType.FLOAT64, "sgd", {"lr": 0.5}), None),
    )
    for each in (yard, plain):
        each.pull(0)
        each.pull(1)
        each.push(1, gradients(0, (True,) * 3, "float64"))
    yard.partition.forget_bases(Incarnation(1))
    for each in (yard, plain):
        each.push(0, gradients(1, (True,) * 3, "float64"))
    for mine, theirs in zip(yard.values, plain.values, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert yard.partition.tally == Tally(gradients=2, total=1, most=1, uncompensated=1)


@bounded
@given(st.integers(1, 200), st.integers(0, 200), st.sampled_from(["float32", "float64"]))
def test_compensation_does_not_depend_on_where_arrays_are_cut(length: int, cut: int, dtype: str) -> None:
    """So it does not depend on threads, nor on partitions."""
    random = np.random.default_rng(length)
    item = np.dtype(dtype).itemsize
    now, base, gradient, once, twice = (aligned_empty(length * item) for _ in range(5))
    for each in (now, base, gradient):
        each.view(dtype)[:] = random.normal(size=length)
    nothing = np.empty(0, dtype)
    scalars, shares = np.array([0.7, 0, 0, 0], dtype), np.empty(0)
    cut = min(cut, length)
    for into, edges in ((once, [0, length]), (twice, [0, cut, length])):
        sources = np.array([pieces.locate(now, into, each, 8) for each in (gradient, base)])
        for begin, end in itertools.pairwise(edges):
            task = (now, into, sources, shares, nothing, nothing, begin * item, end * item)
            kernels.compensate(task, None, scalars)
    w, b, g = (each.view(dtype) for each in (now, base, gradient))
    assert once.tobytes() == twice.tobytes()
    np.testing.assert_array_equal(once.view(dtype), g + np.dtype(dtype).type(0.7) * g * g * (w - b))


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_push_for_which_there_is_no_memory_changes_nothing(decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the mean of squares either: sent again, it counts once."""

    def pushed(yard: Yard) -> list[Array]:
        yard.push(0, gradients(2, (True,) * 3, "float64"))
        return yard.values

    def late() -> Yard:
        yard = Yard(layout(DType.FLOAT64, "sgd", {"lr": 0.5}), StaleRule(False, 2.0, decay))
        for worker in (0, 1):
            yard.pull(worker)
        yard.push(1, gradients(1, (True,) * 3, "float64"))
        return yard

    expected, yard = pushed(late()), late()
    real, left = versions.aligned_empty, 0

    def scarce(nbytes: int) -> Bytes:
        nonlocal left
        left -= 1
        if left < 0:
            raise TooLarge("no memory")
        return real(nbytes)

    refusals = 0
    monkeypatch.setattr(versions, "aligned_empty", scarce)
    monkeypatch.setattr(push, "aligned_empty", scarce)
    while refusals < 10:
        left = refusals
        before = yard.sequence[0]
        try:
            found = pushed(yard)
            break
        except TooLarge:
            refusals += 1
            yard.sequence[0] = before
    assert refusals == (1 if decay else 2), "the next version, and first the compensated gradient"
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_mean_of_squares_begins_anew_with_a_restored_partition() -> None:
    yard = Yard(layout(DType.FLOAT64, "sgd", {"lr": 0.5}), StaleRule(False, 2.0, 0.5))
    yard.pull(0)
    yard.push(0, gradients(0, (True,) * 3, "float64"))
    cut = take_cut(yard.partition)
    cut.complete()
    blocks = [
        BlockState(index, block_arrays(yard.partition, index, cut)["values"].copy(), {}, int(count))
        for index, count in enumerate(cut.counts)
    ]
    state = PartitionState(PartitionId(0), Version(2, 1), tuple(blocks), cut.marks, cut.floor)
    cut.release()
    yard.partition.restore(state)
    assert yard.partition.versions._readers == {}, "what was kept is of another life"
    fresh = Yard(yard.layout, StaleRule(False, 2.0, 0.5))
    fresh.partition.restore(state)
    fresh.sequence = list(yard.sequence)
    for each in (yard, fresh):
        for worker in (0, 1):
            each.pull(worker)
        for worker in (1, 0):
            each.push(worker, gradients(3 + worker, (True,) * 3, "float64"))
    for mine, theirs in zip(yard.values, fresh.values, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert yard.partition.tally == Tally(gradients=3, total=1, most=1)
