"""A job's variables in this process, and this worker's connection to the servers that hold them.

Values only. `ServerLink` is the state that `trainer`, `pushes` and `loading` share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from shardyard.domain import errors
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.variables import VariableSpec
from shardyard_worker.exchange.buffers.flat_buffers import FlatBuffers
from shardyard_worker.exchange.requests import Bases
from shardyard_worker.exchange.server_group import ServerGroup
from shardyard_worker.rows.dedup import Float32s
from shardyard_worker.session.session import Session
from shardyard_worker.training.table_binding import TableBinding, TakenRows


@dataclass(frozen=True)
class BufferPlace:
    """The module that has a buffer. A module may update it in place (BatchNorm) or put a new tensor there."""

    module: torch.nn.Module
    key: str


@dataclass(frozen=True)
class Variable:
    """A variable and the tensor that holds its value in this process."""

    spec: VariableSpec
    target: torch.Tensor
    place: BufferPlace | None = None

    def in_group(self, group: int) -> Variable:
        """The same variable in another parameter group."""
        return replace(self, spec=replace(self.spec, group=group))

    @property
    def found(self) -> torch.Tensor | None:
        """The tensor that the model has now: the target, or one that a module has put in its place."""
        return self.target if self.place is None else self.place.module._buffers[self.place.key]

    def put_back(self) -> None:
        """Puts the target back into the model."""
        if self.place is not None:
            self.place.module._buffers[self.place.key] = self.target


@dataclass
class ServerLink:
    """A job's variables and tables, and the connection to their servers under the newest map."""

    session: Session
    layout: JobLayout
    variables: tuple[Variable, ...]
    tables: TableBinding | None
    buffers: FlatBuffers = field(init=False)
    router: ServerGroup = field(init=False)


@dataclass(slots=True)
class StepInput:
    """What one push carries: for each variable a gradient (of a buffer: its value) or None, the push's weight, and the
    optimizer settings in force. `bases` and `samples` are filled in on its way."""

    tensors: Sequence[torch.Tensor | None]
    weight: float
    groups: tuple[tuple[float, ...], ...]
    coded: bool = True
    """False: sent uncompressed, whatever job.compression says."""
    bases: Bases | None = None
    """The versions that the gradients were computed on, if the job scales by staleness."""
    overflow: bool = False
    """Loss scaling has found an overflow. The push carries no gradients then."""
    rows: TakenRows | None = None
    """Gradients of table rows."""
    highest: int = 0
    """The highest next sequence of its data shard over all partitions, when it was leased. Earlier batches have been
    counted."""
    samples: int | None = None
    """How many samples it counts as, for people. None: its weight."""

    @property
    def table_rows(self) -> list[tuple[int, Float32s]]:
        """The gradients of rows, by the tables' numbers."""
        return [] if self.rows is None else [(each.table, each.values) for each in self.rows.tables]


@dataclass(frozen=True)
class Residual:
    """What compression has not sent: its 2-norm, and the push that would send it."""

    norm: float
    sending: StepInput


class StepContext(Protocol):
    """What the job's current strategy knows of the step. After a change of the mode there is another strategy."""

    def reload(self) -> None:
        """Loads values again that were arriving and were lost with a server."""

    def follow_map(self) -> None:
        """Follows the newest map, even while a push is in flight. The targets stay as they are."""

    def rows_version(self) -> int | None:
        """The version whose rows are looked up; None: the newest."""

    def on_rows_version_passed(self, error: errors.NotFound) -> None:
        """The servers no longer have rows of that version."""
