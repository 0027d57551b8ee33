"""A table's settings as JSON, in manifests and in the coordinator's journal.

Owns: both ways. Invariants: what comes back equals what went in; each name comes once. Must not know: rows, files.
"""

from __future__ import annotations

import re
from typing import Final

from shardyard.domain import limits
from shardyard.domain.errors import CheckpointDamaged, InvalidRequest
from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard.domain.tables.row_optimizers import KINDS, settings_of
from shardyard.domain.tables.table_settings import Admission, AdmissionSettings, ExpirySettings, TableSettings
from shardyard.storage.json_reader import JsonNode

_NAME: Final = re.compile(rf".{{1,{limits.VARIABLE_NAME_CHARACTERS_MAX}}}", re.DOTALL)
_KIND: Final = re.compile("|".join(KINDS))
_ADMISSION: Final = {kind.name.lower(): kind for kind in Admission}
_INITIAL: Final = {kind.name.lower(): kind for kind in InitialKind}
_SEED_MAX: Final = (1 << 64) - 1


def to_document(table: TableSettings) -> dict[str, object]:
    admission, expiry = table.admission, table.expiry
    return {
        "name": table.name,
        "dim": table.dim,
        "optimizer": table.optimizer,
        "group": [float(value) for value in table.group],
        "seed": table.seed,
        "initial": {"kind": table.initial.kind.name.lower(), "scale": float(table.initial.scale)},
        "rows_max": table.rows_max,
        "admission": {
            "kind": admission.kind.name.lower(),
            "threshold": admission.threshold,
            "chance": float(admission.chance),
            "cells": admission.cells,
            "zeros": admission.zeros,
        },
        "expiry": {
            "age_steps": expiry.age_steps,
            "frequency_min": expiry.frequency_min,
            "norm_min": float(expiry.norm_min),
            "rows_kept": expiry.rows_kept,
            "grace_steps": expiry.grace_steps,
            "age_ms": expiry.age_ms,
            "grace_ms": expiry.grace_ms,
        },
    }


def from_documents(node: JsonNode) -> tuple[TableSettings, ...]:
    """At least one. Raises CheckpointDamaged."""
    found: dict[str, TableSettings] = {}
    for each in node.items(limits.TABLES_MAX):
        table = _table(each)
        if found.setdefault(table.name, table) is not table:
            each.refuse("a table of another name: this one comes twice")
    if not found:
        node.refuse("at least one table")
    return tuple(found.values())


def _table(node: JsonNode) -> TableSettings:
    fields = node.fields(("name", "dim", "optimizer", "group", "seed", "initial", "rows_max", "admission", "expiry"))
    kind = fields["optimizer"].text(_KIND, f"one of {', '.join(sorted(KINDS))}")
    settings = settings_of(kind)
    group = fields["group"].reals(len(settings))
    if len(group) != len(settings):
        fields["group"].refuse(f"{len(settings)} numbers")
    try:
        return TableSettings(
            fields["name"].text(_NAME, f"1 to {limits.VARIABLE_NAME_CHARACTERS_MAX} characters"),
            fields["dim"].number(limits.TABLE_DIM_MAX, least=1),
            kind,
            group,
            fields["seed"].number(_SEED_MAX, least=-_SEED_MAX),
            _initial(fields["initial"]),
            fields["rows_max"].number(limits.TABLE_ROWS_MAX, least=1),
            _admission(fields["admission"]),
            _expiry(fields["expiry"]),
        )
    except InvalidRequest as error:
        raise CheckpointDamaged(f"{node.file}: {node.place}: {error.what}") from error


def _initial(node: JsonNode) -> InitialValues:
    fields = node.fields(("kind", "scale"))
    return InitialValues(_INITIAL[_one_of(fields["kind"], _INITIAL)], _real(fields["scale"]))


def _admission(node: JsonNode) -> AdmissionSettings:
    fields = node.fields(("kind", "threshold", "chance", "cells", "zeros"))
    zeros = fields["zeros"].value
    if not isinstance(zeros, bool):
        fields["zeros"].refuse("true or false")
    return AdmissionSettings(
        _ADMISSION[_one_of(fields["kind"], _ADMISSION)],
        fields["threshold"].number(),
        _real(fields["chance"]),
        fields["cells"].number(),
        zeros,
    )


def _expiry(node: JsonNode) -> ExpirySettings:
    fields = node.fields(("age_steps", "frequency_min", "norm_min", "rows_kept", "grace_steps", "age_ms", "grace_ms"))
    return ExpirySettings(
        fields["age_steps"].number(),
        fields["frequency_min"].number(),
        _real(fields["norm_min"]),
        fields["rows_kept"].number(),
        fields["grace_steps"].number(),
        fields["age_ms"].number(),
        fields["grace_ms"].number(),
    )


def _one_of(node: JsonNode, names: dict[str, Admission] | dict[str, InitialKind]) -> str:
    return node.text(re.compile("|".join(names)), f"one of {', '.join(names)}")


def _real(node: JsonNode) -> float:
    (found,) = JsonNode([node.value], node.file, node.place).reals(1)
    return found
