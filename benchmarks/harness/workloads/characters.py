"""A small model of characters, over the sources of Python's standard library, which every machine has.

Owns: the text, its training and held-out parts, the network. The model sees CONTEXT characters and predicts the next
one. Must not know: how gradients become parameters.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.data import Dataset

CONTEXT = 16
SYMBOLS = 97
"""Printable ASCII, the end of a line, and one for all others."""
EMBEDDED = 16
HIDDEN = 128
TEXT_BYTES = 4 << 20
HELD_OUT_PART = 16
HELD_OUT_SAMPLES = 8192
STRIDE = 7
"""From one sample to the next: coprime to how sources are indented."""


def read_text() -> npt.NDArray[np.uint8]:
    """The first TEXT_BYTES of all modules, by name, as symbols."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    whole = bytearray()
    for path in sorted(folder.glob("*.py")):
        whole += path.read_bytes()
        if len(whole) >= TEXT_BYTES:
            break
    data = np.frombuffer(bytes(whole[:TEXT_BYTES]), np.uint8)
    symbols = np.full(256, SYMBOLS - 1, np.uint8)
    symbols[32:127] = np.arange(95)
    symbols[10] = 95
    return symbols[data]


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i: the characters from i * STRIDE on, and the one that follows."""

    def __init__(self, text: npt.NDArray[np.uint8]) -> None:
        self._text = torch.from_numpy(text.astype(np.int64))
        self._count = (len(text) - CONTEXT - 1) // STRIDE
        self._offsets = torch.arange(CONTEXT)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = index * STRIDE
        return self._text[at : at + CONTEXT], self._text[at + CONTEXT]

    def take(self, indices: npt.ArrayLike) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns shapes (samples, CONTEXT) and (samples,)."""
        at = torch.from_numpy(np.asarray(indices).astype(np.int64)) * STRIDE
        return self._text[at[:, None] + self._offsets], self._text[at + CONTEXT]


def split() -> tuple[Windows, Windows]:
    """The training part, and the held-out part: the text's end."""
    text = read_text()
    cut = len(text) - len(text) // HELD_OUT_PART
    return Windows(text[:cut]), Windows(text[cut:])


class Chosen(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Returns some of the windows, each once, in an order given by the seed."""

    def __init__(self, windows: Windows, seed: int, count: int) -> None:
        self._windows = windows
        self._order = np.random.default_rng(seed).choice(len(windows), count, replace=False)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._windows[int(self._order[index])]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        texts, nexts = self._windows.take(self._order[np.asarray(indices)])
        return list(zip(texts, nexts, strict=True))


def make_network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Embedding(SYMBOLS, EMBEDDED),
        torch.nn.Flatten(),
        torch.nn.Linear(CONTEXT * EMBEDDED, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, SYMBOLS),
    )


def held_out_loss(model: torch.nn.Module, held_out: Windows) -> float:
    """Mean cross entropy, in nats a character, over samples spread over the held-out part."""
    texts, nexts = held_out.take(np.linspace(0, len(held_out) - 1, HELD_OUT_SAMPLES))
    with torch.no_grad():
        return float(F.cross_entropy(model(texts), nexts))
