"""Switches off each rule of docs/internals/ledger.md in the shipped code. Without the rule, some seed must be red.

`mutation` says what a mutation is; the modules named `mutations_of_...` have them.
"""

from __future__ import annotations

from . import mutations_of_logs, mutations_of_names, mutations_of_rows, mutations_of_steps
from .mutation import MUTATIONS, Mutation, first_red

__all__ = ["MUTATIONS", "Mutation", "first_red"]

PARTS = (mutations_of_names, mutations_of_steps, mutations_of_logs, mutations_of_rows)
"""In the order of the ledger."""
ORDER = [part.__name__ for part in PARTS]
MUTATIONS.sort(key=lambda each: ORDER.index(each.apply.__module__))
