"""The shares of variables that are cut over the workers of a replica, each of which pushes and pulls its own.

A variable is cut along its first dimension as torch.chunk cuts it: into pieces of equal size, of which the last ones
may have less, or nothing. So FSDP2 cuts parameters too, and DTensor those that it cuts along this dimension.
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardyard.domain.variables import VariableSpec


def share_of(spec: VariableSpec, place: int, count: int) -> tuple[int, int]:
    """The elements [begin, end) of the variable, flat, that are the share of the worker at this place of so many.

    >>> w = VariableSpec("w", DType.FLOAT32, (5, 3))
    >>> [share_of(w, place, 4) for place in range(4)]
    [(0, 6), (6, 12), (12, 15), (15, 15)]
    """
    rows = spec.shape[0] if spec.shape else 1
    each, inner = -(-rows // count), math.prod(spec.shape[1:])
    return min(place * each, rows) * inner, min((place + 1) * each, rows) * inner


def spec_of_share(spec: VariableSpec, place: int, count: int) -> VariableSpec:
    """The share as a variable of its own.

    >>> spec_of_share(VariableSpec("w", DType.FLOAT32, (5, 3)), 2, 4).shape
    (1, 3)
    """
    begin, end = share_of(spec, place, count)
    inner = math.prod(spec.shape[1:])
    return replace(spec, shape=((end - begin) // inner if inner else 0, *spec.shape[1:]))
