"""What training asks of the servers and what they answer: one request and one result for all servers together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardyard.domain.consistency import SspReport
from shardyard.domain.ids import PartitionId, Version
from shardyard.domain.pulls import NotReadyPart
from shardyard.domain.push_names import PushName
from shardyard.domain.pushes import PartResult, PushKind
from shardyard_worker.exchange.buffers.flat_buffers import Codes
from shardyard_worker.rows.row_codec import EncodedRows
from shardyard_worker.rows.row_prefetch import RowPrefetch

Bases = Mapping[PartitionId, Version]
"""The versions of the values that gradients were computed on."""


@dataclass(slots=True)
class PushRequest:
    """A push. `absent`: indices of the variables that it does not carry."""

    name: PushName
    kind: PushKind
    weight: float
    groups: tuple[tuple[float, ...], ...] = ()
    absent: frozenset[int] = frozenset()
    codes: Codes | None = None
    """None: the gradients lie in the flat buffers."""
    slot: int = 0
    """The slot of the flat buffers that holds the gradients."""
    bases: Bases | None = None
    """The versions that its gradients were computed on, if servers scale by staleness."""
    overflow: bool = False
    rows: EncodedRows | None = None
    """Gradients of table rows."""
    ahead: RowPrefetch | None = None
    """Rows to look up with the pull that follows the push."""


@dataclass(frozen=True)
class PullSpec:
    """The version that a pull asks for, of every partition."""

    number: int
    exactly: bool
    wait_ms: int = 0
    prefetched: bool = False
    """The pull may return while values are still arriving; the model then waits for each value at its first use."""
    ssp_report: SspReport | None = None
    """How far this worker is, if staleness is bounded."""
    values: bool = True
    """False: only the rows that are requested with it."""


@dataclass(slots=True)
class ExchangeResult:
    """The servers' answers, all partitions together. `missing` is empty when the pulled values are current."""

    results: tuple[PartResult, ...] = ()
    missing: tuple[NotReadyPart, ...] = ()
    version_max: int = 0
    clock: int = 0
    """The number from which this worker counts its steps, if it has joined a bounded job."""
    foreign: frozenset[PartitionId] = frozenset()
    """Partitions that already had this work from another worker."""
    ahead: RowPrefetch | None = None
    """The rows that came with the answer."""
