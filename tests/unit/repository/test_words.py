"""The words of the skip-gram example: what a word is, passages, pairs, negative samples."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "skipgram"
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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.text("ab \n", max_size=12), max_size=8), max_size=3), st.integers(1, 9))
def test_passages_have_each_line_of_each_file_once(texts: list[list[str]], nbytes: int) -> None:
    with TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.py" for number in range(len(texts))]
        for path, lines in zip(paths, texts, strict=True):
            path.write_text("\n".join(lines))
        passages = words.Passages(paths, nbytes)
        assert len(passages) == sum(-(-path.stat().st_size // nbytes) for path in paths)
        assert "".join(passages) == "".join(path.read_text() for path in paths)


def test_text_that_is_not_utf_8_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"caf\xe9 = self\n")
    (passage,) = words.Passages([tmp_path / "a.py"])
    assert words.words_of(passage) == ["caf", "self"]


def made(passages: list[str], seed: int = 0, **given: float) -> words.Batch:
    np.random.seed(seed)
    return words.SkipGrams(**({"share": 1.0} | given))(passages)


def found_pairs(batch: words.Batch) -> set[tuple[int, int]]:
    return set(zip(batch.words.tolist(), batch.near.tolist(), strict=True))


def test_batch_has_the_pairs_of_its_passages_and_words_drawn_from_all_of_them() -> None:
    passages = ["aa bb cc", "", "bb dd"]
    a, b, c, d = (words.hashed(word) for word in ("aa", "bb", "cc", "dd"))
    batch = made(passages, window=1, negatives=4)
    assert found_pairs(batch) == {(a, b), (b, a), (b, c), (c, b), (b, d), (d, b)}
    assert batch.drawn.shape == (6, 4)
    assert batch.read == 5
    drawn = {id_ for seed in range(20) for id_ in made(passages, seed).drawn.ravel().tolist()}
    assert drawn == {a, b, c, d}


def test_batch_depends_on_passages_and_seed_alone() -> None:
    passages = ["aa bb cc dd ee ff " * 20, "aa gg " * 30]
    one, same, other = (made(passages, seed, share=1e-2) for seed in (5, 5, 6))
    for mine, theirs in zip(one, same, strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))
    assert one.drawn.shape != other.drawn.shape or not torch.equal(one.drawn, other.drawn)
    assert len(one.words) < len(made(passages, 5).words), "frequent words are thinned out"


@pytest.mark.parametrize("passages", [[""], ["", "one"], ["1 + 2"]])
def test_passages_without_pairs_are_a_batch_of_nothing(passages: list[str]) -> None:
    batch = made(passages, negatives=3)
    assert (batch.words.shape, batch.near.shape, batch.drawn.shape) == ((0,), (0,), (0, 3))
    assert batch.words.dtype == batch.near.dtype == batch.drawn.dtype == torch.int64


@pytest.mark.parametrize("size", [0, 1])
def test_text_of_one_word_has_no_pairs(size: int) -> None:
    centers, contexts = words.pairs(np.arange(size), 3, np.random.default_rng(0))
    assert (centers.size, contexts.size) == (0, 0)
