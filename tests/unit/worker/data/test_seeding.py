"""Seeds of a batch are those that a machine with an accelerator gives it, too."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from shardyard_worker.data import seeding


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(1)), float(np.random.rand()), random.random()


@pytest.mark.parametrize("key", [(0,), (7, 1, 0, 3, 2**40), (2**63,)])
def test_numbers_do_not_depend_on_an_accelerator(monkeypatch: pytest.MonkeyPatch, key: tuple[int, ...]) -> None:
    found = []
    with seeding.undisturbed():
        for there in (False, True):
            monkeypatch.setattr(seeding, "_has_accelerator", lambda there=there: there)
            seeding.seed_everything(*key)
            found.append(drawn())
    assert found[0] == found[1]


def test_each_key_has_numbers_of_its_own() -> None:
    found = set()
    with seeding.undisturbed():
        for key in ((1, 2), (2, 1), (1, 2, 3), (1,)):
            seeding.seed_everything(*key)
            found.update(drawn())
    assert len(found) == 12


def test_generators_stand_where_they_stood() -> None:
    found = []
    for disturbing in (False, True):
        seeding.seed_everything(1)
        before = drawn()
        if disturbing:
            with seeding.undisturbed():
                seeding.seed_everything(2)
                assert drawn() != before
        found.append((before, drawn()))
    assert found[0] == found[1]
