"""Switches off each rule of docs/internals/ledger.md, and what promise S2 of docs/guides/security.md rests on, in the
shipped code. Without it, some seed must be red.

`mutation` says what a mutation is; the modules named `mutations_of_...` have them.
"""

from __future__ import annotations

from . import mutations_of_identities, mutations_of_logs, mutations_of_names, mutations_of_rows, mutations_of_steps
from .mutation import MUTATIONS, Mutation, first_red

__all__ = ["MUTATIONS", "Mutation", "first_red"]

PARTS = (mutations_of_names, mutations_of_steps, mutations_of_logs, mutations_of_rows, mutations_of_identities)
"""In the order of the ledger, then of the promises."""
ORDER = [part.__name__ for part in PARTS]
MUTATIONS.sort(key=lambda each: ORDER.index(each.apply.__module__))
