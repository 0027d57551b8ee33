"""Passages of text, as bytes: by default of the sources of Python's standard library, which every machine has."""

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

HELD_OUT_EVERY = 20
"""Of so many passages one is held out."""

# besides tests and applications: tables of character sets and of help texts, which are hardly code
_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"}


class Passages(NamedTuple):
    """Both of shape (n, block + 1), uint8."""

    train: torch.Tensor
    held_out: torch.Tensor


def sources(folder: Path | None = None) -> list[Path]:
    """The files of a folder, by default of the standard library, without its tests, in an order that stays."""
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    return sorted(path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))


def read(paths: Iterable[Path]) -> torch.Tensor:
    """The files' bytes, one file after the other, each with a zero byte at its end. uint8, of one dimension."""
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() + b"\0" for path in paths)), dtype=torch.uint8)


def cut(text: torch.Tensor, block: int, train: int | None = None, held_out: int | None = None) -> Passages:
    """Cuts a text into passages of `block` bytes and the byte after them, and holds some of them out.

    No byte is predicted in two passages. `train`, `held_out`: at most so many of each, spread evenly over the text.
    Raises ValueError if the text is too short for one passage of each.
    """
    whole = text.unfold(0, block + 1, block) if len(text) > block else text.new_empty(0, block + 1)
    if len(whole) < 2:
        raise ValueError(f"a text of {len(text):,} bytes has no two passages of {block + 1} bytes: give more text")
    out = torch.arange(len(whole)) % HELD_OUT_EVERY == 1
    return Passages(_spread(whole[~out], train), _spread(whole[out], held_out))


def _spread(passages: torch.Tensor, count: int | None) -> torch.Tensor:
    if count is None or count >= len(passages):
        return passages
    return passages[torch.arange(count) * len(passages) // count]
