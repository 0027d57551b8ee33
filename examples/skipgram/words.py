"""Words to learn vectors of: the identifiers in the sources of Python's standard library, which every machine has.

A word is known by its hash, a number of 64 bits, so no vocabulary is made beforehand. What a batch is made of
depends on its passages and on numpy's seed alone, which job.batches sets: any worker makes the same of them. Pairs,
negative samples and the thinning out of frequent words are those of Mikolov et al., Distributed Representations of
Words and Phrases and their Compositionality (NeurIPS 2013), section 2, as word2vec computes them, with the counts of a
batch.
"""

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Int64s = npt.NDArray[np.int64]

_WORD = re.compile(r"\b[^\W\d]\w+")
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


def sources(folder: Path | None = None) -> list[Path]:
    """The files of a folder, by default of the standard library, without its tests, in an order that stays."""
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    return sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))


def words_of(text: str) -> list[str]:
    """Identifiers of two characters or more, in code, comments and strings alike."""
    return _WORD.findall(text)


@lru_cache(1 << 20)
def hashed(word: str) -> int:
    """The id of a word."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little", signed=True)


class Counts:
    """How often each word was seen so far, by its id."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.words: dict[int, str] = {}
        self.total = 0

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, words: list[str]) -> Int64s:
        """Counts a file's words. Their ids, in order."""
        ids = [hashed(word) for word in words]
        for id_, word in zip(ids, words, strict=True):
            if id_ not in self._counts:
                self.words[id_] = word
            self._counts[id_] = self._counts.get(id_, 0) + 1
        self.total += len(ids)
        return np.array(ids, np.int64)

    def of(self, ids: Int64s) -> Int64s:
        """Shape (n,): how often each was seen; 0 for one that was not."""
        return np.array([self._counts.get(id_, 0) for id_ in ids.tolist()], np.int64)

    def most(self, count: int) -> list[int]:
        """The ids of the most frequent words, the most frequent first."""
        return sorted(self._counts, key=lambda id_: (-self._counts[id_], id_))[:count]

    def negatives(self, power: float = 0.75) -> "Negatives":
        """Draws words by their counts of now."""
        ids = np.fromiter(self._counts, np.int64, len(self._counts))
        return Negatives(ids, np.fromiter(self._counts.values(), np.float64, len(ids)) ** power)


class Negatives:
    """Draws ids with a probability in proportion to their weights."""

    def __init__(self, ids: Int64s, weights: npt.NDArray[np.float64]) -> None:
        self._ids, self._ends = ids, np.cumsum(weights)

    def draw(self, shape: tuple[int, ...], random: np.random.Generator) -> Int64s:
        found = np.searchsorted(self._ends, random.random(shape) * self._ends[-1], side="right")
        return self._ids[np.minimum(found, len(self._ids) - 1)]


def thinned(ids: Int64s, counts: Counts, share: float, random: np.random.Generator) -> Int64s:
    """Without some of the occurrences of frequent words: one of frequency f stays with the probability
    sqrt(share / f) + share / f."""
    frequency = counts.of(ids) / counts.total
    return ids[random.random(ids.size) < np.sqrt(share / frequency) + share / frequency]


def pairs(ids: Int64s, window: int, random: np.random.Generator) -> tuple[Int64s, Int64s]:
    """Words, and for each a word near it: for every place of a text those at most `reach` places before and after it,
    where its reach is drawn from 1 to `window`. Both of shape (n,)."""
    reach = random.integers(1, window + 1, ids.size)
    centers, contexts = [], []
    for distance in range(1, min(window, ids.size - 1) + 1):
        far = reach >= distance
        before, after = far[distance:], far[:-distance]
        centers += [ids[distance:][before], ids[:-distance][after]]
        contexts += [ids[:-distance][before], ids[distance:][after]]
    if not centers:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate(centers), np.concatenate(contexts)


class Passages:
    """A data set for `job.batches`: pieces of files of about `nbytes` bytes, each of whole lines, as texts."""

    def __init__(self, paths: Iterable[Path], nbytes: int = 2_048) -> None:
        self._nbytes = nbytes
        self._begins = [(path, begin) for path in paths for begin in range(0, path.stat().st_size, nbytes)]

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> str:
        """The lines that begin within a piece of the file."""
        path, begin = self._begins[index]
        with path.open("rb") as file:
            file.seek(max(0, begin - 1))
            if begin:
                file.readline()  # of the piece before
            text = file.read(max(0, begin + self._nbytes - file.tell()))
            if text and not text.endswith(b"\n"):
                text += file.readline()
        return text.decode(errors="replace")


class Batch(NamedTuple):
    """`words`: shape (n,); `near`: shape (n,), a word near each; `drawn`: shape (n, negatives), words drawn by how
    often they come. `read`: the number of words in the passages."""

    words: torch.Tensor
    near: torch.Tensor
    drawn: torch.Tensor
    read: int


@dataclass(frozen=True)
class SkipGrams:
    """Makes batches of passages: a `collate_fn`."""

    window: int = 5
    negatives: int = 5
    share: float = 1e-3

    def __call__(self, passages: Sequence[str]) -> Batch:
        random = np.random.default_rng(np.random.randint(1 << 62, dtype=np.int64))
        counts = Counts()
        texts = [counts.add(words_of(passage)) for passage in passages]
        found = [pairs(thinned(text, counts, self.share, random), self.window, random) for text in texts]
        words, near = (np.concatenate(each) for each in zip(*found, strict=True))
        shape = (words.size, self.negatives)
        drawn = counts.negatives().draw(shape, random) if words.size else np.empty(shape, np.int64)
        return Batch(torch.from_numpy(words), torch.from_numpy(near), torch.from_numpy(drawn), counts.total)
