"""The examples in docstrings of public names run, and print what they show."""

from __future__ import annotations

import doctest
import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardyard as sy
from tests.support.readers import yard

MADE_BY_OTHERS = {"InitialValues", "RowOptimizer"}
"""Scripts name them in annotations alone."""


def public_names() -> Iterator[tuple[str, object]]:
    for name in sy.__all__:
        if name not in ("__version__", "errors", "optim", "tables"):
            yield name, getattr(sy, name)
    for module in ("optim", "tables"):
        found = getattr(sy, module)
        yield from ((f"{module}.{name}", getattr(found, name)) for name in found.__all__ if name not in MADE_BY_OTHERS)


def methods(name: str, found: object) -> Iterator[tuple[str, object]]:
    owners = inspect.getmro(found) if inspect.isclass(found) else ()
    ours = [vars(owner) for owner in reversed(owners) if owner.__module__.startswith("shardyard")]
    for member, value in [item for each in ours for item in each.items()]:
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not member.startswith("_") and inspect.isfunction(inner):
            yield f"{name}.{member}", inner


NAMES = dict(public_names())
EXAMPLES = {
    name: examples
    for name, found in [*NAMES.items(), *(each for item in NAMES.items() for each in methods(*item))]
    if (examples := doctest.DocTestParser().get_examples(inspect.getdoc(found) or ""))
}
READERS = {"Run", "Snapshot"}
"""Their examples read a job of a yard that runs elsewhere."""


@pytest.fixture
def trained_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job that has taken its only step, and ends when it is followed."""
    with yard() as there:
        job = there.connect()
        job.register({"bias": torch.zeros(1), "weight": torch.ones(1, 2)}, lr=0.5)
        job.push({"bias": torch.ones(1), "weight": torch.ones(1, 2)})

        def follow(_: str) -> sy.Run:
            run = there.follow()
            job.close()
            return run

        monkeypatch.setattr(sy, "follow", follow)
        yield


def test_every_public_name_has_an_example() -> None:
    assert set(NAMES) <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_prints_what_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for variable in [each for each in os.environ if each.startswith("SHARDYARD")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    if name in READERS:
        request.getfixturevalue("trained_job")
    example = doctest.DocTest(EXAMPLES[name], {"sy": sy, "torch": torch}, name, None, 0, None)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert not said, "".join(said)
