"""The part of a variable that a worker has: all of it, or some elements along one dimension.

In: elements of whole variables, as they come from servers, in pieces. Out: those that belong to the part, in its
memory. So a worker reads the variables of a job without memory for what it does not keep. Must not know: servers, what
the arrays mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Values = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Region:
    """Of a whole of shape (outer, size, inner): elements [begin, end) of the middle dimension."""

    outer: int
    size: int
    inner: int
    begin: int
    end: int

    @classmethod
    def whole(cls, elements: int) -> Region:
        return cls(1, elements, 1, 0, elements)

    @classmethod
    def along(cls, shape: Sequence[int], dimension: int, begin: int, end: int) -> Region:
        return cls(math.prod(shape[:dimension]), shape[dimension], math.prod(shape[dimension + 1 :]), begin, end)

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The parts of [begin, end) of the whole, flat, that lie in the region: where each begins in the whole and in
        the region, flat, and how many elements it has.

        >>> [*Region.along((2, 4), dimension=1, begin=1, end=3).runs(2, 8)]
        [(2, 1, 1), (5, 2, 2)]
        """
        each, kept = self.size * self.inner, (self.end - self.begin) * self.inner
        for number in range(begin // max(1, each), self.outer):
            start = number * each + self.begin * self.inner
            if start >= end:
                break
            first, last = max(begin, start), min(end, start + kept)
            if first < last:
                yield first, number * kept + first - start, last - first


@dataclass(frozen=True)
class VariablePart:
    """`arrays`: the values and the optimizer's state of the region, flat, by name."""

    region: Region
    arrays: Mapping[str, torch.Tensor]

    @torch.no_grad()
    def put(self, name: str, begin: int, values: Values) -> None:
        """Takes elements [begin, begin + len(values)) of an array of the whole variable."""
        into = self.arrays.get(name)
        if into is None:
            return
        for at, place, count in self.region.runs(begin, begin + len(values)):
            piece = values[at - begin : at - begin + count]
            into[place : place + count].copy_(torch.from_numpy(np.array(piece)))


Parts = Mapping[int, VariablePart]
"""By the variables' places in the layout."""
