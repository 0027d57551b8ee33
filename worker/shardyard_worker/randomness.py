"""All randomness of a training process, from the job's seed and the name of the work (docs/ledger.md, rule B5)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_everything(*key: int) -> None:
    """Seeds torch (all devices), numpy's legacy generator and random with numbers drawn from the key."""
    words = np.random.SeedSequence(list(key)).generate_state(3, np.uint64)
    torch.manual_seed(int(words[0] >> np.uint64(1)))
    np.random.seed(int(words[1] & np.uint64(0xFFFFFFFF)))
    random.seed(int(words[2]))


@contextmanager
def undisturbed() -> Iterator[None]:
    """The generators of the CPU stand afterwards where they stood before."""
    torch_state, numpy_state, random_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(random_state)
