"""`shardyard.tables`: tables that several modules share, and the settings of how rows begin, are updated, come and go.

Owns: the names that users import.
"""

from shardyard.domain.tables.initial_values import InitialKind, InitialValues
from shardyard_worker.embedding.config import AdmitAfter, AdmitAll, AdmitByChance, Expiry
from shardyard_worker.embedding.local_optimizer import Optimizer
from shardyard_worker.embedding.plain_embedding import to_embedding
from shardyard_worker.embedding.row_optimizers import (
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
    "to_embedding",
    "uniform",
    "zeros",
]


def uniform(scale: float) -> InitialValues:
    """Rows begin with float32 numbers drawn evenly from [-scale, scale).

    >>> table = sy.Embedding(8, initial=sy.tables.uniform(0.1))
    >>> bool(table(torch.tensor([17])).abs().max() <= 0.1)
    True
    """
    return InitialValues(InitialKind.UNIFORM, scale)


def normal(std: float) -> InitialValues:
    """Rows begin with normal numbers of mean 0 and standard deviation `std`.

    >>> embedding = sy.Embedding(8, initial=sy.tables.normal(0.02))
    """
    return InitialValues(InitialKind.NORMAL, std)


def zeros() -> InitialValues:
    """Rows begin with zeros.

    >>> embedding = sy.Embedding(2, initial=sy.tables.zeros())
    >>> embedding(torch.tensor([17])).tolist()
    [[0.0, 0.0]]
    """
    return InitialValues(InitialKind.ZEROS, 0.0)
