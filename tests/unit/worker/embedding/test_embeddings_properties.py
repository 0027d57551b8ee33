"""Embeddings of tables against torch's on the same rows: outputs and gradients, whatever the batch; and what a table of
this process holds against a plain dictionary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_values import initial_rows, row_key
from shardyard_worker.embedding.local_optimizer import Optimizer
from shardyard_worker.embedding.modules import Embedding, EmbeddingBag, EmbeddingCollection
from shardyard_worker.embedding.row_optimizers import SGD
from shardyard_worker.embedding.table import Table

IDS = np.unique(np.random.default_rng(0).integers(-(1 << 63), (1 << 63) - 1, 30))
"""Row number i of torch's embedding is that of IDS[i] in ours."""
MODES = st.sampled_from(["sum", "mean", "max"])


@dataclass
class Pair:
    """A table and torch's embedding of the same rows."""

    table: Table
    weight: torch.nn.Parameter

    @classmethod
    def of(cls, dim: int, seed: int) -> Pair:
        rows = np.random.default_rng(seed).standard_normal((IDS.size, dim)).astype(np.float32)
        rows[::3] = rows[:1]  # equal rows, of which a maximum takes the first
        table = Table(dim)
        table.put(torch.from_numpy(IDS), torch.from_numpy(rows))
        table.is_trained = True
        return cls(table, torch.nn.Parameter(torch.from_numpy(rows.copy())))

    def same_gradients(self) -> None:
        """And forgets them."""
        ours = np.zeros(self.weight.shape, np.float32)
        taken = self.table.gradients.take()
        if taken is not None:
            found, sums = taken
            ours[np.searchsorted(IDS, found.ids)] = sums
        theirs = torch.zeros_like(self.weight) if self.weight.grad is None else self.weight.grad
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-5)
        self.weight.grad = None


@dataclass
class Ragged:
    """Rows' numbers by bag."""

    bags: list[list[int]]
    dim: int
    seed: int

    @property
    def numbers(self) -> torch.Tensor:
        return torch.tensor([number for bag in self.bags for number in bag], dtype=torch.int64)

    @property
    def ids(self) -> torch.Tensor:
        return torch.from_numpy(IDS[self.numbers.numpy()])

    def offsets(self, include_last: bool) -> torch.Tensor:
        ends = np.cumsum([0, *map(len, self.bags)])
        return torch.from_numpy(ends if include_last else ends[:-1])

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(self.seed + 1).standard_normal(shape).astype(np.float32))


BAGS = st.lists(st.lists(st.integers(0, IDS.size - 1), max_size=8), max_size=12)
RAGGED = st.builds(Ragged, BAGS, st.integers(1, 9), st.integers(0, 1 << 20))


@settings(max_examples=300, deadline=None)
@given(RAGGED, MODES, st.booleans(), st.none() | st.integers(0, IDS.size - 1), st.booleans(), st.booleans())
def test_bags_are_those_of_torch(
    batch: Ragged, mode: str, include_last: bool, padding: int | None, weighted: bool, narrow: bool
) -> None:
    pair = Pair.of(batch.dim, batch.seed)
    weights = torch.rand(batch.numbers.numel(), requires_grad=True) if weighted and mode == "sum" else None
    ours = EmbeddingBag(
        batch.dim,
        mode,
        table=pair.table,
        padding_idx=None if padding is None else int(IDS[padding]),
        include_last_offset=include_last,
    )
    offsets = batch.offsets(include_last)
    found = ours(batch.ids, offsets.to(torch.int32) if narrow else offsets, weights)
    if not batch.bags:
        assert found.shape == (0, batch.dim)
        return
    above = batch.noise(len(batch.bags), batch.dim)
    found.backward(above)
    to_weights = None if weights is None else weights.grad
    theirs = None if weights is None else weights.detach().clone().requires_grad_()
    expected = torch.nn.functional.embedding_bag(
        batch.numbers,
        pair.weight,
        offsets,
        mode=mode,
        per_sample_weights=theirs,
        include_last_offset=include_last,
        padding_idx=padding,
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    expected.backward(above)
    pair.same_gradients()
    if theirs is not None:
        torch.testing.assert_close(to_weights, theirs.grad, rtol=1e-5, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 5), st.integers(0, 99), MODES)
def test_bags_of_one_length_are_those_of_torch(bags: int, length: int, dim: int, seed: int, mode: str) -> None:
    pair = Pair.of(dim, seed)
    numbers = np.random.default_rng(seed).integers(0, IDS.size, (bags, length))
    found = EmbeddingBag(dim, mode, table=pair.table)(torch.from_numpy(IDS[numbers]))
    assert found.shape == (bags, dim)
    if bags and length:
        expected = torch.nn.functional.embedding_bag(torch.from_numpy(numbers), pair.weight, mode=mode)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert not found.any()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(1, 5),
    st.integers(0, 1 << 20),
    st.none() | st.integers(0, IDS.size - 1),
)
def test_embeddings_of_any_shape_are_those_of_torch(shape: list[int], dim: int, seed: int, padding: int | None) -> None:
    pair = Pair.of(dim, seed)
    numbers = torch.from_numpy(np.asarray(np.random.default_rng(seed).integers(0, IDS.size, shape)))
    ids = torch.from_numpy(np.asarray(IDS[numbers.numpy()]))
    ours = Embedding(dim, table=pair.table, padding_idx=None if padding is None else int(IDS[padding]))
    found = ours(ids)
    expected = torch.nn.functional.embedding(numbers, pair.weight, padding)
    if padding is not None:  # torch begins that row with zeros, and leaves it so
        expected = expected * (numbers != padding).unsqueeze(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    above = torch.from_numpy(np.random.default_rng(seed).standard_normal((*shape, dim)).astype(np.float32))
    found.backward(above)
    expected.backward(above)
    pair.same_gradients()


@settings(max_examples=60, deadline=None)
@given(st.lists(RAGGED.filter(lambda batch: batch.bags), min_size=1, max_size=4), MODES)
def test_forwards_of_one_step_add_up_and_a_collection_gives_what_its_modules_give(
    batches: list[Ragged], mode: str
) -> None:
    dim = batches[0].dim
    pair = Pair.of(dim, batches[0].seed)
    collection = EmbeddingCollection(
        {str(index): EmbeddingBag(dim, mode, table=pair.table) for index in range(len(batches))}
    )
    given_ = {str(index): (batch.ids, batch.offsets(False)) for index, batch in enumerate(batches)}
    expected = [
        torch.nn.functional.embedding_bag(batch.numbers, pair.weight, batch.offsets(False), mode=mode)
        for batch in batches
    ]
    noises = [batch.noise(len(batch.bags), dim) for batch in batches]
    sum((each * noise).sum() for each, noise in zip(expected, noises, strict=True)).backward()
    gradient = pair.weight.grad.clone()
    together = collection(given_)
    for each, wanted in zip(together.values(), expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-5, atol=1e-5)
    sum((each * noise).sum() for each, noise in zip(together.values(), noises, strict=True)).backward()
    pair.same_gradients()
    for (ids, offsets), module, noise in zip(given_.values(), collection.features.children(), noises, strict=True):
        module(ids, offsets).backward(noise)
    pair.weight.grad = gradient
    pair.same_gradients()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.lists(st.integers(-4, 4), min_size=1, max_size=6)),
        st.tuples(st.just("look up"), st.lists(st.integers(-6, 6), max_size=6)),
        st.tuples(st.just("put"), st.lists(st.integers(-4, 9), max_size=4, unique=True)),
        st.tuples(st.just("save and load"), st.just([])),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([InitialValues(), InitialValues(InitialKind.NORMAL, 2.0)]), st.integers(0, 1 << 40))
def test_table_is_a_dictionary_that_reads_as_initial_values(
    steps: list[tuple[str, list[int]]], initial: InitialValues, seed: int
) -> None:
    dim, lr = 3, np.float32(0.5)
    module = Embedding(dim, table=Table(dim, name="t", initial=initial, optimizer=SGD(lr=float(lr)), seed=seed))
    optimizer, plain = Optimizer(module), {}

    def row(id_: int) -> np.ndarray:
        first = initial_rows(np.array([id_]), dim, initial, row_key(seed, "t"))[0]
        return plain.get(id_, first)

    for number, (what, ids) in enumerate(steps):
        tensor = torch.tensor(ids, dtype=torch.int64)
        if what == "train":
            module(tensor).sum().backward()
            optimizer.step()
            trained = {id_: row(id_) - lr * np.float32(ids.count(id_)) for id_ in ids}
            plain |= trained
        elif what == "look up":
            with torch.no_grad():
                expected = np.array([row(id_) for id_ in ids], np.float32).reshape(-1, dim)
                np.testing.assert_array_equal(module(tensor).numpy(), expected)
        elif what == "put":
            rows = np.full((len(ids), dim), number, np.float32)
            module.table.put(tensor, torch.from_numpy(rows))
            plain |= dict(zip(ids, rows, strict=True))
        else:
            saved = module.state_dict()
            module = Embedding(dim, table=Table(dim, name="t", initial=initial, optimizer=SGD(lr=float(lr))))
            module.load_state_dict(saved)
            optimizer = Optimizer(module)
        every = module.table.rows.everything()
        assert every.ids.tolist() == sorted(plain)
        np.testing.assert_array_equal(every.rows, np.array([plain[id_] for id_ in sorted(plain)]).reshape(-1, dim))
