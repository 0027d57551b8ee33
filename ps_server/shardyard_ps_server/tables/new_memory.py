"""The memory of a new table, and of what changes while a cut is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from shardyard.domain.tables.row_optimizers import Slot
from shardyard.domain.tables.table_settings import TableSettings
from shardyard_ps_server.tables.memory.address_space import reserve
from shardyard_ps_server.tables.memory.layout import FIELDS, LIMIT, SHARED_WORDS, SLOTS, TableMemory

_HOT_ALIGN: Final = 1 << 14
"""This many rows end at the end of a page, whatever the size of a row or a page."""


def new_memory(settings: TableSettings, slots: Sequence[Slot], rows_max: int, key: int, *, tiered: bool) -> TableMemory:
    """`tiered`: rows may lie in a file. Raises TableError if the address space is refused."""
    stride = settings.dim + sum(slot.width(settings.dim) for slot in slots)
    hot = -(-rows_max // _HOT_ALIGN) * _HOT_ALIGN if tiered else rows_max
    cold = rows_max if tiered else 0
    slab = reserve(4 * stride * (hot + cold), np.float32).reshape(-1, stride)
    shared = np.zeros(SHARED_WORDS, np.int64)
    shared[LIMIT] = hot
    fresh = [np.full(slot.width(settings.dim), slot.initial, np.float32) for slot in slots]
    return TableMemory(
        seeds=np.frombuffer(bytearray(os.urandom(16)), np.uint64),
        directory=np.zeros(SLOTS, np.int16),
        stripes=reserve(8 * SLOTS * FIELDS, np.int64),
        shared=shared,
        slab=slab,
        links=slab.view(np.int32),
        cold=hot,
        slots=reserve(4 * cold, np.int32) if tiered else np.zeros(1, np.int32),
        fresh=np.concatenate([np.empty(0, np.float32), *fresh]),
        initial_kind=settings.initial.kind.value,
        initial_scale=np.float64(settings.initial.scale),
        initial_key=np.uint64(key),
        **no_log(stride),
    )


def with_log(memory: TableMemory, entries: int) -> TableMemory:
    """The same memory with a log that has room for all present entries: pushes copy entries to it while a cut is
    read."""
    stride = memory.slab.shape[1]
    return memory._replace(
        log_words=reserve(24 * max(entries, 1), np.uint64),
        log_rows=reserve(4 * stride * max(entries, 1), np.float32).reshape(-1, stride),
    )


def without_log(memory: TableMemory) -> TableMemory:
    return memory._replace(**no_log(memory.slab.shape[1]))


def no_log(stride: int) -> dict[str, Any]:
    return {"log_words": np.zeros(3, np.uint64), "log_rows": np.zeros((1, stride), np.float32)}
