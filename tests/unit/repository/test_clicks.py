"""The recommender's data: Criteo's format, synthetic clicks of known chances, and the AUC."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardyard as sy

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "recommender"
sys.path.insert(0, str(EXAMPLE))

import clicks  # noqa: E402

sys.path.remove(str(EXAMPLE))

World = clicks.World


# ---- the AUC

SCORES = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=40)


@settings(max_examples=300, deadline=None)
@given(SCORES)
def test_auc_counts_the_pairs_that_are_in_order_and_half_of_the_ties(samples: list[tuple[int, bool]]) -> None:
    ones = [score for score, label in samples if label]
    zeros = [score for score, label in samples if not label]
    wins = sum((one > zero) + (one == zero) / 2 for one in ones for zero in zeros)
    scores, labels = np.array([score for score, _ in samples], float), np.array([label for _, label in samples], float)
    found = clicks.auc(scores, labels)
    if ones and zeros:
        assert found == pytest.approx(wins / (len(ones) * len(zeros)), abs=1e-12)
    else:
        assert np.isnan(found)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 0.99), min_size=2, max_size=8))
def test_best_auc_is_the_expected_share_of_pairs_in_order(chances: list[float]) -> None:
    ordered = total = 0.0
    for i, one in enumerate(chances):
        for j, zero in enumerate(chances):
            if i != j:
                total += one * (1 - zero)
                ordered += one * (1 - zero) * ((one > zero) + (one == zero) / 2)
    assert clicks.best_auc(np.array(chances)) == pytest.approx(ordered / total, abs=1e-12)


def test_who_knows_the_chances_comes_to_the_best_auc_and_no_further() -> None:
    day = World(seed=1, items=1_000).day(0, 20_000)
    assert day.chances is not None
    best, random = clicks.best_auc(day.chances), np.random.default_rng(0)
    known = [clicks.auc(day.chances, random.random(len(day)) < day.chances) for _ in range(30)]
    assert np.mean(known) == pytest.approx(best, abs=0.003)
    noisy = clicks.auc(day.chances + 0.2 * random.standard_normal(len(day)), day.labels)
    assert noisy < best - 0.02


# ---- synthetic clicks


def test_day_is_the_same_whenever_it_is_asked_for() -> None:
    first, again = (World(seed=3).day(2, 500) for _ in range(2))
    for name in ("numbers", "ids", "labels", "chances"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    assert (World(seed=4).day(2, 500).ids != first.ids).any()
    assert first.numbers.shape == (500, clicks.NUMBERS)
    assert first.numbers.dtype == first.labels.dtype == np.float32
    assert first.ids.shape == (500, clicks.CATEGORIES)
    assert first.ids.dtype == np.int64


def test_labels_are_as_likely_as_they_are_said_to_be() -> None:
    day = World(seed=5, items=500).day(1, 40_000)
    assert day.chances is not None
    for low in np.arange(0.0, 0.8, 0.1):
        chosen = (day.chances >= low) & (day.chances < low + 0.1)
        expected, error = day.chances[chosen].mean(), 0.5 / np.sqrt(chosen.sum())
        assert abs(day.labels[chosen].mean() - expected) < 4 * error


def test_features_share_no_id_and_few_ids_are_most_of_a_day() -> None:
    ids = World(seed=6, items=10_000).day(0, 5_000).ids
    seen = [set(column.tolist()) for column in ids.T]
    assert len(set.union(*seen)) == sum(map(len, seen))
    _, counts = np.unique(ids[:, 0], return_counts=True)
    assert np.sort(counts)[-10:].sum() > 0.35 * len(ids)
    assert (ids < 0).any(), "ids are raw numbers of 64 bits"


def test_ids_arrive_and_go_from_day_to_day() -> None:
    world = World(seed=7, items=2_000, arriving=0.1)
    days = [set(world.day(day, 20_000).ids[:, 4].tolist()) for day in (0, 1, 10)]
    stayed = len(days[0] & days[1]) / len(days[0])
    assert 0.6 < stayed < 0.98
    assert not days[0] & days[2]
    still = World(seed=7, items=50, arriving=0.0)
    first, last = (set(still.day(day, 20_000).ids[:, 4].tolist()) for day in (0, 9))
    assert first == last


def test_table_of_this_process_learns_the_clicks_and_grows_old() -> None:
    """Weights of items and numbers alone: near the best AUC on the same day, and behind it ten days later."""
    torch.manual_seed(0)
    world = World(seed=8, items=200, arriving=0.0, pairs=0)
    items = sy.EmbeddingBag(1, "sum", optimizer=sy.tables.Adagrad(lr=0.1), initial=sy.tables.zeros())
    numbers = torch.nn.Linear(clicks.NUMBERS, 1)
    rows, dense = sy.tables.Optimizer(items), torch.optim.Adam(numbers.parameters(), lr=0.02)

    def scores(batch: clicks.Clicks) -> torch.Tensor:
        made: torch.Tensor = items(torch.from_numpy(batch.ids)) + numbers(torch.from_numpy(batch.numbers))
        return made[:, 0]

    whole = world.day(0, 30_000)
    for begin in range(0, 30_000, 500):
        part = slice(begin, begin + 500)
        batch = clicks.Clicks(whole.numbers[part], whole.ids[part], whole.labels[part])
        rows.zero_grad()
        dense.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(scores(batch), torch.from_numpy(batch.labels)).backward()
        rows.step()
        dense.step()
    lost = []
    for day in (0, 10):
        held_out = world.day(day, 10_000)
        assert held_out.chances is not None
        with torch.no_grad():
            found = clicks.auc(scores(held_out).numpy(), held_out.labels)
        lost.append(clicks.best_auc(held_out.chances) - found)
    assert lost[0] < 0.06
    assert lost[1] > lost[0] + 0.05


# ---- Criteo's files


def line(label: str = "1", numbers: list[str] | None = None, categories: list[str] | None = None) -> str:
    given_numbers = ["3", "-2", "", "0"] + ["1"] * 9 if numbers is None else numbers
    given_categories = ["68fd1e64", "", *["a9411994"] * 24] if categories is None else categories
    return "\t".join([label, *given_numbers, *given_categories]) + "\n"


def test_lines_of_criteo_become_batches(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(line() + line("0", categories=["68fd1e64"] * 26))
    with gzip.open(tmp_path / "b.tsv.gz", "wt") as file:
        file.write(line("0") * 2 + line("1").replace("\n", "\r\n"))
    batches = list(clicks.read_criteo([tmp_path / "a.tsv", tmp_path / "b.tsv.gz"], batch_size=3))
    assert [len(batch) for batch in batches] == [3, 2]
    first = batches[0]
    assert (first.numbers.dtype, first.ids.dtype, first.labels.dtype) == (np.float32, np.int64, np.float32)
    assert first.labels.tolist() == [1, 0, 0]
    np.testing.assert_allclose(first.numbers[0, :5], np.log1p([3, 0, 0, 0, 1]), rtol=1e-6)
    assert first.ids[0, 0] == first.ids[1, 0] == clicks.hashed(0, "68fd1e64")
    assert len(set(first.ids[1].tolist())) == 26, "the same text of two features is two categories"
    assert first.ids[0, 1] == clicks.hashed(1, "")
    assert batches[1].labels.tolist() == [0, 1]
    np.testing.assert_array_equal(batches[1].ids[1], first.ids[0])
    assert first.chances is None


def test_ids_of_categories_stay_as_they_are() -> None:
    assert [clicks.hashed(0, "68fd1e64"), clicks.hashed(25, "")] == [-2294098665169095407, -502891879513060000]


def test_lines_from_elsewhere_become_a_batch() -> None:
    lines = [line().rstrip("\n"), line("0").rstrip("\n")]
    found = clicks.parse_criteo(lines)
    assert found.labels.tolist() == [1, 0]
    np.testing.assert_array_equal(found.ids[0], found.ids[1])
    with pytest.raises(clicks.WrongLine, match=r"a line that begins with '1\\t2' has 2 columns; expected 40"):
        clicks.parse_criteo([*lines, "1\t2"])


def test_clicks_that_are_written_are_read_again(tmp_path: Path) -> None:
    day = World(seed=9, items=50).day(3, 400)
    clicks.write_criteo(tmp_path / "day.tsv", day)
    (found,) = clicks.read_criteo([tmp_path / "day.tsv"], batch_size=1_000)
    np.testing.assert_array_equal(found.labels, day.labels)
    np.testing.assert_allclose(found.numbers, day.numbers, rtol=1e-6)
    renamed = dict(zip(day.ids.ravel().tolist(), found.ids.ravel().tolist(), strict=True))
    assert len(set(renamed.values())) == len(renamed) == len(set(day.ids.ravel().tolist()))
    np.testing.assert_array_equal(np.vectorize(renamed.__getitem__)(day.ids), found.ids)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("1\t2\n", "2 columns; expected 40"),
        (line().replace("\n", "\tmore\n"), "41 columns"),
        ("\n", "1 columns"),
        (line("2"), "label '2'"),
        (line(""), "label ''"),
        (line(numbers=["x"] + ["1"] * 12), "invalid literal"),
        (line(numbers=["1.5"] + ["1"] * 12), "invalid literal"),
    ],
)
def test_line_of_something_else_is_refused_with_its_place(wrong: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(line() + wrong)
    with pytest.raises(clicks.WrongLine, match=rf"a\.tsv, line 2.*{said}"):
        list(clicks.read_criteo([tmp_path / "a.tsv"], batch_size=10))
