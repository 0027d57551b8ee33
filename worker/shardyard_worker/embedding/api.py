"""Embedding tables, as `shardyard.tables`: what several modules share, how rows begin, are updated, come and go.

Owns: the names that users import.
"""

from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard_worker.embedding.config import AdmitAfter, AdmitAll, AdmitByChance, Expiry
from shardyard_worker.embedding.local_optimizer import Optimizer
from shardyard_worker.embedding.row_rules import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    RowOptimizer,
    RowWiseAdagrad,
    SparseAdam,
)
from shardyard_worker.embedding.table import Table, tables_of

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdmitAfter",
    "AdmitAll",
    "AdmitByChance",
    "Expiry",
    "InitialValues",
    "Optimizer",
    "RowOptimizer",
    "RowWiseAdagrad",
    "SparseAdam",
    "Table",
    "normal",
    "tables_of",
    "uniform",
    "zeros",
]


def uniform(scale: float) -> InitialValues:
    """Rows begin with numbers in [-scale, scale), evenly."""
    return InitialValues(InitialKind.UNIFORM, scale)


def normal(std: float) -> InitialValues:
    """Rows begin with normal numbers of mean 0."""
    return InitialValues(InitialKind.NORMAL, std)


def zeros() -> InitialValues:
    """Rows begin with zeros."""
    return InitialValues(InitialKind.ZEROS, 0.0)
