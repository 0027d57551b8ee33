"""Clicks to learn from: files in Criteo's format, or synthetic ones that drift from day to day and whose best AUC is
known; and the AUC itself.

A batch has 13 numbers, 26 categories as ids, which no two categories share but by a chance of 2**-64, and a label. Of
synthetic clicks the true probability is known too, so the AUC of whoever knows it is what no model can pass.

python examples/recommender/clicks.py FOLDER --days 4        writes synthetic clicks in Criteo's format
"""

import argparse
import gzip
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TextIO, cast

import numpy as np
import numpy.typing as npt

from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_values import initial_rows, row_key

NUMBERS = 13
CATEGORIES = 26
COLUMNS = 1 + NUMBERS + CATEGORIES

Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Clicks:
    """n of them. `numbers`: shape (n, 13), float32, the logarithm of 1 + a count, 0 where there is none. `ids`: shape
    (n, 26). `labels`: shape (n,), float32, 1 for a click. `chances`: shape (n,), of a click, where it is known."""

    numbers: npt.NDArray[np.float32]
    ids: Int64s
    labels: npt.NDArray[np.float32]
    chances: Float64s | None = None

    def __len__(self) -> int:
        return len(self.labels)


# ---- Criteo's files


class WrongLine(ValueError):
    """A line is not in Criteo's format."""


def read_criteo(paths: Sequence[Path], batch_size: int) -> Iterator[Clicks]:
    """Batches of a list of files, one after the other; those that end with .gz are unpacked. The last batch may be
    smaller.

    A line has a label, 13 numbers and 26 categories, with tabs between; numbers and categories may be missing.
    https://www.kaggle.com/c/criteo-display-ad-challenge. Raises WrongLine, OSError.
    """
    lines = (line for path in paths for line in _lines(path))
    while batch := list(itertools.islice(lines, batch_size)):
        yield _read(batch)


def parse_criteo(lines: Sequence[str]) -> Clicks:
    """A batch of lines from anywhere. Raises WrongLine."""
    return _read([(f"a line that begins with {line[:40]!r}", line) for line in lines])


def write_criteo(path: Path, clicks: Clicks) -> None:
    """A file that `read_criteo` reads. Numbers are written as counts, of 0 nothing, categories as 16 hexadecimal
    digits."""
    counts = np.rint(np.expm1(clicks.numbers)).astype(np.int64)
    with path.open("w") as file:
        for label, numbers, ids in zip(
            clicks.labels.tolist(), counts.tolist(), clicks.ids.view(np.uint64).tolist(), strict=True
        ):
            fields = [f"{label:.0f}", *(str(number or "") for number in numbers), *(f"{id_:016x}" for id_ in ids)]
            file.write("\t".join(fields) + "\n")


def _read(lines: Sequence[tuple[str, str]]) -> Clicks:
    """Of lines, each with its place."""
    rows = [_parsed(place, line) for place, line in lines]
    return Clicks(
        np.log1p(np.array([numbers for _, numbers, _ in rows], np.float32)),
        np.array([ids for _, _, ids in rows], np.int64),
        np.array([label for label, _, _ in rows], np.float32),
    )


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else open(path)  # noqa: SIM115
    with cast(TextIO, opened) as file:
        for number, line in enumerate(file, 1):
            yield f"{path}, line {number}", line.rstrip("\r\n")


def _parsed(place: str, line: str) -> tuple[int, list[float], list[int]]:
    fields = line.split("\t")
    if len(fields) != COLUMNS:
        raise WrongLine(f"{place} has {len(fields)} columns; expected {COLUMNS}")
    if fields[0] not in ("0", "1"):
        raise WrongLine(f"{place} has the label {fields[0][:20]!r}; expected 0 or 1")
    try:
        numbers = [max(0.0, float(int(text))) if text else 0.0 for text in fields[1 : 1 + NUMBERS]]
    except ValueError as error:
        raise WrongLine(f"{place}: {error}") from error
    return int(fields[0]), numbers, [hashed(feature, text) for feature, text in enumerate(fields[1 + NUMBERS :])]


@lru_cache(1 << 20)
def hashed(feature: int, text: str) -> int:
    """The id of a category: of one feature, whatever its text; a missing one ("") is a category too."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, salt=feature.to_bytes(16, "little"))
    return int.from_bytes(digest.digest(), "little", signed=True)


# ---- synthetic clicks


@dataclass(frozen=True)
class World:
    """Where synthetic clicks come from.

    Each feature has `items`, drawn with a probability in proportion to rank**-exponent. Each day the share `arriving`
    of them is replaced by new ones. A click's log-odds are `bias`, plus what each item and number add, plus a product
    of latent numbers for each of `pairs` pairs of features; what an item adds turns by `turn` radians a day, so what
    was learned grows old.
    """

    seed: int = 0
    items: int = 100_000
    exponent: float = 1.1
    arriving: float = 0.02
    turn: float = 0.15
    bias: float = -1.5
    item_weight: float = 0.3
    number_weight: float = 0.1
    pairs: int = 6
    pair_weight: float = 0.4

    def day(self, day: int, samples: int) -> Clicks:
        """The same for the same arguments. Items of a rank are others after a while, with ids of their own."""
        random = np.random.default_rng([self.seed, day])
        ends = np.cumsum(np.arange(1, self.items + 1, dtype=np.float64) ** -self.exponent)
        ranks = np.searchsorted(ends, random.random((samples, CATEGORIES)) * ends[-1])
        ids = self._ids(ranks, day)
        counts = np.floor(np.exp(random.standard_normal((samples, NUMBERS)) * 1.5))
        counts[random.random(counts.shape) < 0.2] = 0  # missing
        numbers = np.log1p(counts.astype(np.float32))
        chances = 1 / (1 + np.exp(-self._log_odds(numbers, ids, day)))
        labels = (random.random(samples) < chances).astype(np.float32)
        return Clicks(numbers, ids, labels, chances)

    def _ids(self, ranks: Int64s, day: int) -> Int64s:
        """An item has its rank for 1 / arriving days; ranks change theirs at different days."""
        ages = np.floor(day * self.arriving + _fractions(ranks)) if self.arriving else np.zeros(ranks.shape)
        items = ages.astype(np.int64) * self.items + ranks
        features = np.arange(CATEGORIES, dtype=np.int64)
        spread = (items * CATEGORIES + features).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return spread.view(np.int64)

    def _log_odds(self, numbers: npt.NDArray[np.float32], ids: Int64s, day: int) -> Float64s:
        angle = self.turn * day
        effects = self._drawn(ids, "effects", 2) @ np.array([np.cos(angle), np.sin(angle)])
        found = self.bias + self.item_weight * effects.sum(axis=1)
        weights = np.random.default_rng(self.seed).standard_normal(NUMBERS)
        found += self.number_weight * numbers @ weights
        for pair in range(self.pairs):
            left, right = (self._drawn(ids[:, [2 * pair + side]], "latent", 2)[:, 0] for side in (0, 1))
            found += self.pair_weight * (left * right).sum(axis=1)
        return found

    def _drawn(self, ids: Int64s, what: str, dim: int) -> Float64s:
        """Standard normal numbers, shape (*ids.shape, dim), the same for an id at any time."""
        normal = InitialValues(InitialKind.NORMAL, 1.0)
        rows = initial_rows(ids.reshape(-1), dim, normal, row_key(self.seed, what))
        return rows.astype(np.float64).reshape(*ids.shape, dim)


def _fractions(ranks: Int64s) -> Float64s:
    """In [0, 1), evenly: multiples of the golden ratio."""
    return np.modf(ranks * 0.6180339887498949)[0]


# ---- quality


def auc(scores: npt.NDArray[np.floating], labels: npt.NDArray[np.floating]) -> float:
    """The chance that a click has a higher score than what is none, ties counting one half. NaN without one of them."""
    ones = np.asarray(labels, np.float64)
    ordered, total = _ordered_pairs(np.asarray(scores), ones, 1 - ones)
    return ordered / total if total else float("nan")


def best_auc(chances: Float64s) -> float:
    """What scores that are the true chances come to: the expected number of pairs that are in order, over that of
    pairs."""
    ordered, total = _ordered_pairs(chances, chances, 1 - chances)
    alone = float((chances * (1 - chances)).sum())  # pairs of one sample with itself
    return (ordered - alone / 2) / (total - alone)


def _ordered_pairs(scores: npt.NDArray[np.floating], ones: Float64s, zeros: Float64s) -> tuple[float, float]:
    """Of all pairs of a one and a zero, by their weights, those in which the one has the higher score; and all."""
    order = np.argsort(scores, kind="stable")
    ranked, ones, zeros = scores[order], ones[order], zeros[order]
    starts = np.flatnonzero(np.concatenate(([True], ranked[1:] != ranked[:-1])))[: len(ranked)]
    tied_ones, tied_zeros = np.add.reduceat(ones, starts), np.add.reduceat(zeros, starts)
    below = np.cumsum(tied_zeros) - tied_zeros
    return float((tied_ones * (below + tied_zeros / 2)).sum()), float(ones.sum() * zeros.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes synthetic clicks, a file a day, in Criteo's format.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--days", type=int, default=4)
    parser.add_argument("--clicks", type=int, default=100_000, help="a day")
    parser.add_argument("--world", type=int, default=World.seed, help="the seed of all that is drawn")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for number in range(options.days):
        day = World(options.world).day(number, options.clicks)
        assert day.chances is not None
        path = options.folder / f"day-{number}.tsv"
        write_criteo(path, day)
        print(f"{path}: {len(day):,} clicks, the best possible AUC is {best_auc(day.chances):.4f}")


if __name__ == "__main__":
    main()
