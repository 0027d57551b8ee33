"""Gradients that were computed on an older version of a partition: how old they are, and how they are corrected.

The staleness of a gradient is the number of updates that the partition has applied since the version that the gradient
was computed on. (The bound of a `bounded` job is in steps: hosting/worker_clocks.py.) A job may ask for two corrections
(docs/guides/consistency.md):

- The rate of an update is divided by its staleness if that is more than 1 (Zhang et al., Staleness-aware Async-SGD for
  Distributed Deep Learning, IJCAI 2016).
- The change since that version is compensated (Zheng et al., Asynchronous Stochastic Gradient Descent with Delay
  Compensation, ICML 2017). For this, the values that each worker computes on are kept.

Owns: the rule, which versions are kept for which worker, counts. Invariants: at most GIVEN_KEPT versions are kept for a
worker, and none before the one that it named last; in a job with logs the staleness depends only on version numbers, so
that replay, in another life, computes the same (ledger.md, rule C1). Called under the partition's lock. Must not know:
arithmetic on values, threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from shardyard.domain.consistency import StaleRule
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.ids import Incarnation, PartitionId, Version
from shardyard.domain.optimizers import setting_names
from shardyard.domain.tables.row_optimizers import settings_of
from shardyard_ps_server.partition.step_gate import Groups
from shardyard_ps_server.values.versions import Bytes, Versions

GIVEN_KEPT: Final = 3
"""The version that a worker computes on; with a window, the one that it computes on next; and one whose reply it may
have lost."""


class Base(NamedTuple):
    """The version that a gradient was computed on, as its worker says."""

    worker: Incarnation
    version: Version


class Tally(NamedTuple):
    """Counts of the gradients whose base is known: how many, the sum and the maximum of their staleness, and how many
    of an older version could not be compensated."""

    gradients: int = 0
    total: int = 0
    most: int = 0
    uncompensated: int = 0


class Staleness:
    """The stale gradients of one partition. `kind`: of the optimizer; `row_kinds`: of each table's optimizer. `logged`:
    the job has logs. `compensated`: memory for a compensated payload; `squares`: the running mean of squared
    gradients."""

    def __init__(
        self,
        rule: StaleRule,
        partition: PartitionId,
        kind: str,
        buffers: Versions,
        *,
        logged: bool,
        row_kinds: Sequence[str] = (),
    ) -> None:
        self.rule = rule
        self.tally = Tally()
        self._partition = partition
        self._rate = setting_names(kind).index("lr")
        self._row_rates = [[setting.name for setting in settings_of(each)].index("lr") for each in row_kinds]
        self._buffers = buffers
        self._logged = logged
        self._began = 0
        self._kept: dict[Incarnation, deque[tuple[Version, Bytes]]] = {}
        self.compensated: Bytes | None = None
        self.squares: Bytes | None = None

    def restored(self, version: Version) -> None:
        """Notes that the partition went back to that version, in another life."""
        self._began = version.number
        self.squares = None  # checkpoints do not have it
        self.forget()

    def check(self, base: Base | None, newest: Version) -> None:
        """Raises InvalidRequest for a version that never existed."""
        if base is None or self._logged:
            return
        version = base.version
        if version.life > newest.life or (version.life == newest.life and version.number > newest.number):
            raise InvalidRequest(
                f"a gradient of version {version.number} of partition {self._partition} in life {version.life}; it is "
                f"at version {newest.number} in life {newest.life}"
            )

    # ---- how old

    def staleness(self, base: Base | None, newest: Version) -> int:
        """Returns how many updates the base lacked; 0 if the base is unknown. A base of an earlier life counts at most
        up to the version at which the present life began."""
        if base is None:
            return 0
        number = base.version.number
        if base.version.life != newest.life and not self._logged:
            number = min(number, self._began)
        return max(0, newest.number - number)

    def groups(self, groups: Groups, staleness: int) -> Groups:
        """Returns optimizer settings for an update of that staleness."""
        if staleness <= 1 or not self.rule.divides_rate:
            return groups
        return tuple([_slowed(values, self._rate, staleness) for values in groups])

    def row_groups(self, groups: Groups, staleness: int) -> Groups:
        """Returns table settings for an update of that staleness."""
        if staleness <= 1 or not self.rule.divides_rate or not groups:
            return groups
        return tuple([_slowed(values, at, staleness) for values, at in zip(groups, self._row_rates, strict=True)])

    def count(self, base: Base | None, staleness: int, *, compensated: bool) -> None:
        """Counts a gradient that was applied. `compensated`: it was, or was computed on the newest version."""
        if base is None:
            return
        tally = self.tally
        missed = self.rule.compensation > 0 and not compensated
        self.tally = Tally(
            tally.gradients + 1,
            tally.total + staleness,
            max(tally.most, staleness),
            tally.uncompensated + missed,
        )

    # ---- what is kept

    def keep(self, worker: Incarnation, version: Version, buffer: Bytes) -> None:
        """Keeps a version that a worker got and computes on next. The caller holds `buffer`."""
        if not self.rule.compensation:
            return
        kept = self._kept.setdefault(worker, deque())
        if kept and kept[-1][0] == version:
            return
        self._buffers.hold(buffer)
        kept.append((version, buffer))
        if len(kept) > GIVEN_KEPT:
            self._buffers.release(kept.popleft()[1])

    def find(self, base: Base | None) -> Bytes | None:
        """Returns the values that a gradient was computed on, if they are kept."""
        if base is not None:
            for version, buffer in self._kept.get(base.worker, ()):
                if version == base.version:
                    return buffer
        return None

    def passed(self, base: Base | None) -> None:
        """Drops earlier versions than the base: the worker pushes nothing more that was computed on them."""
        if base is None:
            return
        kept = self._kept.get(base.worker)
        while kept and kept[0][0] < base.version:
            self._buffers.release(kept.popleft()[1])

    def forget(self, worker: Incarnation | None = None) -> None:
        """Drops the versions of a worker; None: of all workers."""
        for each in list(self._kept) if worker is None else [worker]:
            for _, buffer in self._kept.pop(each, ()):
                self._buffers.release(buffer)


def _slowed(values: tuple[float, ...], at: int, staleness: int) -> tuple[float, ...]:
    return (*values[:at], values[at] / staleness, *values[at + 1 :])
