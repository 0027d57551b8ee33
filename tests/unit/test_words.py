"""The words of the skip-gram example: what a word is, pairs, negative samples, and counts that grow."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "skipgram"
sys.path.insert(0, str(EXAMPLE))

import words  # noqa: E402

sys.path.remove(str(EXAMPLE))


def test_sources_are_those_of_the_standard_library_without_tests() -> None:
    found = words.sources()
    assert Path(json.__file__) in found
    assert len(found) > 300
    assert found == sorted(found)
    assert not any({"site-packages", "test"} & set(path.parts) for path in found)


def test_words_are_identifiers_wherever_they_stand() -> None:
    text = 'def read_all(self, n=10):  # reads "ALL" of x1\n    return größe + 1_000 + _x\n'
    assert words.words_of(text) == ["def", "read_all", "self", "reads", "ALL", "of", "x1", "return", "größe", "_x"]


def test_ids_of_words_stay_as_they_are() -> None:
    assert [words.hashed("self"), words.hashed("größe")] == [7184761924116163360, -1613921676148213516]


def test_counts_grow_with_what_is_read() -> None:
    counts = words.Counts()
    ids = counts.add(["self", "self", "return"])
    assert ids.tolist() == [words.hashed("self")] * 2 + [words.hashed("return")]
    counts.add(["return", "return", "def"])
    assert (len(counts), counts.total) == (3, 6)
    assert [counts.words[id_] for id_ in counts.most(2)] == ["return", "self"]
    assert counts.of(np.array([ids[2], 5])).tolist() == [3, 0]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 6), st.integers(0, 1 << 30))
def test_pairs_are_the_words_within_reach(text: list[int], window: int, seed: int) -> None:
    reach = np.random.default_rng(seed).integers(1, window + 1, len(text))
    expected = [
        (text[i], text[j]) for i in range(len(text)) for j in range(len(text)) if i != j and abs(i - j) <= reach[i]
    ]
    centers, contexts = words.pairs(np.array(text, np.int64), window, np.random.default_rng(seed))
    assert sorted(zip(centers.tolist(), contexts.tolist(), strict=True)) == sorted(expected)


def test_negatives_are_drawn_by_counts_to_three_quarters() -> None:
    counts = words.Counts()
    counts.add(["one"] + ["sixteen"] * 16 + ["many"] * 81)
    drawn = counts.negatives().draw((40_000, 3), np.random.default_rng(0))
    assert drawn.shape == (40_000, 3)
    shares = np.array([(drawn == words.hashed(word)).mean() for word in ("one", "sixteen", "many")])
    np.testing.assert_allclose(shares, np.array([1, 8, 27]) / 36, atol=0.006)


def test_frequent_words_are_thinned_out() -> None:
    counts = words.Counts()
    ids = counts.add(["often"] * 90_000 + ["seldom"] * 100)
    left = words.thinned(ids, counts, 1e-3, np.random.default_rng(0))
    often, frequency = (left == words.hashed("often")).sum(), 90_000 / 90_100
    expected = 90_000 * (np.sqrt(1e-3 / frequency) + 1e-3 / frequency)
    assert abs(often - expected) < 5 * np.sqrt(expected)
    assert (left == words.hashed("seldom")).sum() == 100


def test_batches_go_through_all_files_and_know_what_was_read_so_far(tmp_path: Path) -> None:
    texts = ["alpha beta gamma delta", "", "alpha epsilon zeta eta"]
    paths = [tmp_path / f"{number}.py" for number in range(3)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    counts = words.Counts()
    settings_ = {"window": 2, "negatives": 4, "batch_size": 3, "share": 1.0, "seed": 1}
    seen, known = set(), []
    for centers, contexts, negatives in words.batches(paths, counts=counts, **settings_):
        assert centers.shape == contexts.shape
        assert negatives.shape == (centers.size, 4)
        assert 1 <= centers.size <= 3
        assert set(negatives.ravel().tolist()) <= set(counts.words)
        seen |= set(centers.tolist())
        known.append(len(counts))
    assert seen == set(counts.words)
    assert sorted(set(known)) == [4, 7]
    again = words.batches(paths, counts=words.Counts(), **settings_)
    once_more = words.batches(paths, counts=words.Counts(), **settings_)
    for one, other in zip(again, once_more, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_pairs_do_not_reach_from_one_file_into_the_next(tmp_path: Path) -> None:
    paths = [tmp_path / "a.py", tmp_path / "b.py"]
    paths[0].write_text("aa bb")
    paths[1].write_text("cc dd")
    found = set()
    for centers, contexts, _ in words.batches(
        paths, counts=words.Counts(), window=5, negatives=1, batch_size=100, share=1.0, seed=0
    ):
        found |= set(zip(centers.tolist(), contexts.tolist(), strict=True))
    a, b, c, d = (words.hashed(word) for word in ("aa", "bb", "cc", "dd"))
    assert found == {(a, b), (b, a), (c, d), (d, c)}


@pytest.mark.parametrize("size", [0, 1])
def test_text_of_one_word_has_no_pairs(size: int) -> None:
    centers, contexts = words.pairs(np.arange(size), 3, np.random.default_rng(0))
    assert (centers.size, contexts.size) == (0, 0)
