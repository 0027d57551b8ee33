"""Clipping of a synchronous step: the same bits on any number of servers, and what torch makes of the mean."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.domain.consistency import Clipping, UpdateMode
from shardyard.domain.ids import Caller, Generation, Incarnation, JobId, PartitionId, Rank, Term, Token
from shardyard.domain.layout.layouts import Block, JobLayout, PartitionLayout, aligned_bytes
from shardyard.domain.optimizers import OptimizerSpec, make_group
from shardyard.domain.pulls import PullHeader
from shardyard.domain.push_names import PushName, RankSource, SourceKey
from shardyard.domain.pushes import PushHeader, PushKind, PushPart
from shardyard.domain.variables import DType, VariableSpec
from shardyard_ps_server.hosting import admission, orders, pulls, pushes
from shardyard_ps_server.hosting.hosted_job import CreateRequest
from shardyard_ps_server.hosting.store import Store
from shardyard_ps_server.partition.reads import hold_version
from shardyard_ps_server.partition.update_rules import UpdateRules
from shardyard_ps_server.values.versions import aligned_empty
from shardyard_worker.exchange.norm_sums import NormSums
from shardyard_worker.training.clipping import Clipper

JOB, GENERATION = JobId(1), Generation(1)
TORCH = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}
GROUPS = {
    "sgd": (make_group("sgd", {"lr": 0.1, "momentum": 0.9}),),
    "adam": (make_group("adam", {"lr": 0.1}),),
    "adagrad": (make_group("adagrad", {"lr": 0.1}),),
}
STEPS = 4


@dataclasses.dataclass(frozen=True)
class Work:
    """What a job does: variables of both dtypes cut into partitions, and each rank's gradients for each step; None
    where a rank has none for a variable."""

    layout: JobLayout
    clipping: Clipping
    weights: tuple[float, ...]
    firsts: tuple[np.ndarray, ...]
    gradients: tuple[tuple[tuple[np.ndarray | None, ...], ...], ...]

    def payload(self, step: int, rank: int, partition: PartitionId) -> tuple[np.ndarray, tuple[int, ...]]:
        """In full layout, and which blocks are absent."""
        part = self.layout.partitions[partition]
        payload = aligned_empty(part.payload_bytes)
        payload[:] = 0xEE  # what stands in the filling is nobody's
        absent = []
        for index, block in enumerate(part.blocks):
            given_ = self.gradients[step][rank][block.variable]
            if given_ is None:
                absent.append(index)
                continue
            _block_of(self.layout, payload, block)[:] = given_[block.offset : block.offset + block.length]
        return payload, tuple(absent)


def _block_of(layout: JobLayout, payload: np.ndarray, block: Block) -> np.ndarray:
    dtype = layout.variables[block.variable].dtype
    return payload[block.position : block.position + block.length * dtype.item_bytes].view(dtype.value)


def make_work(kind: str, clipping: Clipping, seed: int) -> Work:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    partitions, ranks = rng.randint(1, 6), rng.randint(1, 3)
    dtypes = [rng.choice((DType.FLOAT32, DType.FLOAT64)) for _ in range(rng.randint(1, 5))]
    variables = tuple(VariableSpec(f"v{i}", dtype, (rng.randint(1, 40),)) for i, dtype in enumerate(dtypes))
    held: list[list[Block]] = [[] for _ in range(partitions)]
    ends = [0] * partitions
    for index, spec in enumerate(variables):
        at = 0
        while at < spec.elements:
            length = min(rng.randint(1, 17), spec.elements - at)
            home = rng.randrange(partitions)
            held[home].append(Block(index, at, length, ends[home]))
            ends[home] += aligned_bytes(length * spec.dtype.item_bytes)
            at += length
    layout = JobLayout(
        variables,
        OptimizerSpec(kind, GROUPS[kind]),
        tuple(
            PartitionLayout(PartitionId(number), end, tuple(blocks))
            for number, (end, blocks) in enumerate(zip(ends, held, strict=True))
        ),
    )

    def drawn(spec: VariableSpec) -> np.ndarray:
        return numbers.standard_normal(spec.elements).astype(spec.dtype.value)

    return Work(
        layout,
        clipping,
        tuple(float(rng.randint(1, 9)) for _ in range(ranks)),
        tuple(drawn(spec) for spec in variables),
        tuple(
            tuple(tuple(None if rng.random() < 0.2 else drawn(spec) for spec in variables) for _ in range(ranks))
            for _ in range(STEPS)
        ),
    )


class Servers:
    """A job's partitions on so many servers, in private memory, and what its workers do."""

    def __init__(self, work: Work, count: int, *, seed: int) -> None:
        self.work = work
        self.rng = random.Random(seed)
        self.caller = Caller(JOB, Incarnation(99), Term(1))
        numbers = [part.partition for part in work.layout.partitions]
        self.owned = [numbers[index::count] for index in range(count)]
        self.stores = [Store(shareable=False) for _ in range(count)]
        for index, (store, owned) in enumerate(zip(self.stores, self.owned, strict=True)):
            store.become(Incarnation(index + 1), Term(1))
            orders.create(
                store,
                CreateRequest(
                    JOB,
                    GENERATION,
                    work.layout,
                    owned,
                    UpdateRules(UpdateMode.SYNC, len(work.weights), clipping=work.clipping),
                ),
            )
            for number in owned:
                firsts = aligned_empty(work.layout.partitions[number].payload_bytes)
                firsts[:] = 0
                for block in work.layout.partitions[number].blocks:
                    values = work.firsts[block.variable][block.offset : block.offset + block.length]
                    _block_of(work.layout, firsts, block)[:] = values
                store.hosted()[0].partitions[number].set_values(firsts, lambda: None)
            orders.open_partitions(store, JOB, GENERATION)
            ranks = [(SourceKey(RankSource(Rank(rank))), Token(1)) for rank in range(len(work.weights))]
            pushes.open_sources(store.hosted()[0], ranks)

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def _order(self, index: int, **more: object) -> PushHeader:
        name = PushName(SourceKey(RankSource(Rank(0))), Token(1), 0, 0)
        order = PushHeader(self.caller, Incarnation(index + 1), GENERATION, name, PushKind.NOTHING, (), 0.0, ())
        return dataclasses.replace(order, **more)  # type: ignore[arg-type]

    def push(self, step: int, rank: int, index: int) -> None:
        found = [self.work.payload(step, rank, number) for number in self.owned[index]]
        parts = tuple(
            PushPart(number, len(payload), absent)
            for number, (payload, absent) in zip(self.owned[index], found, strict=True)
        )
        order = self._order(
            index,
            kind=PushKind.GRADIENT,
            name=PushName(SourceKey(RankSource(Rank(rank))), Token(1), step, step),
            parts=parts,
            weight=self.work.weights[rank],
            groups=self.work.layout.optimizer.groups,
            shared_at=0,
        )
        payload = np.concatenate([payload for payload, _ in found] or [np.empty(0, np.uint8)])
        aligned = aligned_empty(len(payload))
        aligned[:] = payload
        store = self.stores[index]
        pushes.push(store, admission.admit_push(store, order), order, aligned)

    def take_step(self, step: int) -> float | None:
        """All ranks push, in any order; then somebody brings the verdict, where there is one. The gradient's norm."""
        pending = [(rank, index) for rank in range(len(self.work.weights)) for index in range(len(self.stores))]
        self.rng.shuffle(pending)
        for rank, index in pending:
            self.push(step, rank, index)
        if not self.work.clipping.norm:
            return None
        verdicts = NormSums(len(self.work.layout.partitions))
        for index in self.rng.sample(range(len(self.stores)), len(self.stores)):
            store, incarnation = self.stores[index], Incarnation(index + 1)
            wish = PullHeader(self.caller, incarnation, GENERATION, tuple(self.owned[index]), step + 1, exactly=True)
            result, held = pulls.hold(admission.admit_pull(store, wish), wish)
            held.release()
            assert verdicts.verdict(step) is None or not self.owned[index]  # nobody has it before all have told
            verdicts.add(result.gathered, self.owned[index])
        verdict = verdicts.verdict(step)
        assert verdict is not None
        for index in self.rng.choices(range(len(self.stores)), k=8):
            pushes.take_verdict(self.stores[index], self.stores[index].hosted()[0], self._order(index), verdict)
        for index, store in enumerate(self.stores):
            pushes.take_verdict(store, store.hosted()[0], self._order(index), verdict)
        return verdicts.norm(step)

    def values(self) -> list[np.ndarray]:
        found = [np.empty(spec.elements, spec.dtype.value) for spec in self.work.layout.variables]
        for store, owned in zip(self.stores, self.owned, strict=True):
            for number in owned:
                version, buffer = hold_version(store.hosted()[0].partitions[number], 0, False, 0.0)  # type: ignore[misc]
                assert version.number == STEPS
                for block in self.work.layout.partitions[number].blocks:
                    of = found[block.variable][block.offset : block.offset + block.length]
                    of[:] = _block_of(self.work.layout, buffer, block)
                store.hosted()[0].partitions[number].release(buffer)
        return found


def train(work: Work, servers: int, *, seed: int) -> tuple[list[np.ndarray], list[float | None]]:
    made = Servers(work, servers, seed=seed)
    try:
        norms = [made.take_step(step) for step in range(STEPS)]
        return made.values(), norms
    finally:
        made.close()


def train_torch(work: Work, kind: str) -> tuple[list[np.ndarray], list[float]]:
    parameters = [torch.nn.Parameter(torch.from_numpy(first.copy())) for first in work.firsts]
    optimizer = TORCH[kind](parameters)
    norms = []
    for gradients in work.gradients:
        for index, parameter in enumerate(parameters):
            found = [
                (weight, torch.from_numpy(mine[index]))
                for weight, mine in zip(work.weights, gradients, strict=True)
                if mine[index] is not None
            ]
            total = sum(work.weights)
            parameter.grad = (
                torch.stack([weight / total * gradient for weight, gradient in found]).sum(0) if found else None
            )
        if work.clipping.value and any(parameter.grad is not None for parameter in parameters):
            torch.nn.utils.clip_grad_value_(parameters, work.clipping.value)
        if work.clipping.norm:
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, work.clipping.norm)))
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters], norms


clippings = st.builds(Clipping, st.sampled_from([0.0, 0.1, 1.0, 3.0, 100.0]), st.sampled_from([0.0, 0.3, 10.0]))


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(sorted(GROUPS)), clipping=clippings, seed=st.integers(0, 2**32))
def test_clipped_step_has_the_same_bits_on_any_number_of_servers_and_is_torchs(
    kind: str, clipping: Clipping, seed: int
) -> None:
    work = make_work(kind, clipping, seed)
    values, norms = train(work, 1, seed=seed)
    for servers in (2, 3, 4):
        others, again = train(work, servers, seed=seed + servers)
        assert [value.tobytes() for value in others] == [value.tobytes() for value in values]
        assert again == norms
    expected, their_norms = train_torch(work, kind)
    for mine, theirs, spec in zip(values, expected, work.layout.variables, strict=True):
        bound = 1e-12 if spec.dtype is DType.FLOAT64 and _all_double(work) else 2e-5
        assert float(np.abs(mine - theirs).max()) <= bound * max(1.0, float(np.abs(theirs).max()))
    if clipping.norm:
        assert norms == pytest.approx(their_norms, rel=1e-5)


def _all_double(work: Work) -> bool:
    """torch takes the norm in the widest dtype, of single norms in each one's own."""
    return all(spec.dtype is DType.FLOAT64 for spec in work.layout.variables)


@settings(max_examples=60, deadline=None)
@given(clipping=clippings, seed=st.integers(0, 2**32))
def test_worker_clips_as_torch_does(clipping: Clipping, seed: int) -> None:
    work = make_work("sgd", clipping, seed)
    clipper = Clipper(clipping, work.layout.variables)
    for gradients in (ranks[0] for ranks in work.gradients):
        mine = [None if gradient is None else torch.from_numpy(gradient.copy()) for gradient in gradients]
        clipper.clip(mine)
        parameters = _with_gradients(gradients)
        if clipping.value and parameters:
            torch.nn.utils.clip_grad_value_(parameters, clipping.value)
        norm = torch.nn.utils.clip_grad_norm_(parameters, clipping.norm) if clipping.norm else None
        theirs = [parameter.grad for parameter in parameters]
        for left, right in zip([each for each in mine if each is not None], theirs, strict=True):
            assert right is not None
            assert torch.allclose(left, right, rtol=1e-5, atol=0.0)
        if norm is not None and parameters:
            assert clipper.norm == pytest.approx(float(norm), rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(clipping=clippings, seed=st.integers(0, 2**32))
def test_workers_with_a_part_of_the_gradient_each_clip_as_one_with_all_of_it(clipping: Clipping, seed: int) -> None:
    work = make_work("sgd", clipping, seed)
    whole, *clippers = [Clipper(clipping, work.layout.variables) for _ in range(3)]
    for gradients in (ranks[0] for ranks in work.gradients):
        wanted = [None if gradient is None else torch.from_numpy(gradient.copy()) for gradient in gradients]
        whole.clip(wanted)
        parts = [
            [
                None if each is None or at % 2 != place else torch.from_numpy(each.copy())
                for at, each in enumerate(gradients)
            ]
            for place in range(2)
        ]
        square = sum(
            clipper.square_norm([each for each in part if each is not None])
            for clipper, part in zip(clippers, parts, strict=True)
        )
        for clipper, part in zip(clippers, parts, strict=True):
            clipper.square_norm_of_all = square
            clipper.clip(part)
        for at, each in enumerate(wanted):
            found = parts[at % 2][at]
            assert (found is None) == (each is None)
            assert found is None or each is None or torch.allclose(found, each, rtol=1e-5, atol=0.0)
        if clipping.norm and any(each is not None for each in parts[0]):
            assert clippers[0].norm == pytest.approx(whole.norm, rel=1e-5)


def _with_gradients(gradients: Sequence[np.ndarray | None]) -> list[torch.nn.Parameter]:
    found = []
    for gradient in gradients:
        if gradient is not None:
            parameter = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=torch.from_numpy(gradient).dtype))
            parameter.grad = torch.from_numpy(gradient.copy())
            found.append(parameter)
    return found
