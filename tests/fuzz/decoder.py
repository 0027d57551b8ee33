"""One decoder under test: valid inputs, and how they are changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from tests.fuzz.mutations import mutate, mutate_json

GOLDEN: Final = Path(__file__).parents[1] / "golden"


@dataclass(frozen=True)
class Decoder:
    """`read` raises ShardyardErrors alone. `change` makes an input of a valid one. `share`: of the inputs, where one
    takes longer than those of others."""

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]
    change: Callable[[Random, bytes, tuple[bytes, ...]], bytes] = mutate
    share: float = 1.0


def change_json(dice: Random, text: bytes, _: object) -> bytes:
    return mutate_json(dice, text)
