"""What a mutation is, how the first red seed is found, and what several mutations need.

Each mutation is a function that patches while a `pytest.MonkeyPatch` lasts, and names the mode that shows its fault.
Its docstring completes the sentence "all seeds are green although ...".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from shardyard.domain.push_names import PushName
from shardyard_ps_server.hosting import admission, lookups, orders, pulls
from shardyard_ps_server.partition import checkpoint_cuts
from shardyard_ps_server.partition.ledger import Ledger

from .plan import Plan
from .state import Ending
from .yard import prepare, run_plan

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    rule: str
    what: str
    mode: str
    apply: Callable[[Patch], None]
    first: tuple[int, ...] = ()
    """Seeds that were red with this mutation. They are tried first, only to save time."""


MUTATIONS: list[Mutation] = []


def mutation(rule: str, mode: str, *first: int) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS.append(Mutation(rule, (apply.__doc__ or "").strip(), mode, apply, first))
        return apply

    return add


def first_red(plans: Iterable[Plan], switch_off: Callable[[Patch], object]) -> Ending | None:
    """The first run that is red under a mutation. The run that it is compared with uses the shipped code."""
    for plan in plans:
        prepare(plan)
        with Patch.context() as patch:
            switch_off(patch)
            found = run_plan(plan)
        if found.red:
            return found
    return None


def change_cuts(patch: Patch, change: Callable[[Any, Any], Any]) -> None:
    """Checkpoints' cuts have the marks that `change` returns for a partition and its cut's marks."""
    real = checkpoint_cuts._cut

    def cut(partition: Any, since: Any, **given: Any) -> Any:
        found = real(partition, since, **given)
        return dataclasses.replace(found, marks=change(partition, found.marks))

    patch.setattr(checkpoint_cuts, "_cut", cut)


def to_the_last(real: Callable[[Ledger, PushName], None]) -> Callable[[Ledger, PushName], None]:
    def advance(self: Ledger, name: PushName) -> None:
        entry = self._find(name.key)
        if entry is None or name.first == entry.next:
            real(self, name)
        else:
            entry.next = max(entry.next, name.last + 1)
            self._next_push = None

    return advance


def instead_of(patch: Patch, refusal: type[Exception]) -> None:
    """Counts the pushes that this error refuses."""
    real = Ledger.is_duplicate

    def is_duplicate(self: Ledger, name: PushName) -> bool:
        try:
            return real(self, name)
        except refusal:
            return False

    patch.setattr(Ledger, "is_duplicate", is_duplicate)
    patch.setattr(Ledger, "advance", to_the_last(Ledger.advance))


def nobody_is_fenced(patch: Patch) -> None:
    real = admission.admit

    def admit(store: Any, *given: Any, **more: Any) -> Any:
        fenced, store.identity.fenced = store.identity.fenced, set()
        try:
            return real(store, *given, **more)
        finally:
            store.identity.fenced = fenced

    for module in (admission, pulls, lookups, orders):
        patch.setattr(module, "admit", admit)


def whatever_its_token(real: Callable[[Ledger, PushName], bool]) -> Callable[[Ledger, PushName], bool]:
    def is_duplicate(self: Ledger, name: PushName) -> bool:
        entry = self._entries.get(name.key)
        if entry is None or name.token >= entry.token:
            return real(self, name)
        token, entry.token = entry.token, name.token
        try:
            return real(self, name)
        finally:
            entry.token = token

    return is_duplicate
