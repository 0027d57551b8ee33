"""Metrics that a script logs, until the next heartbeat takes them.

Owns: the values of each name. Invariant: a tensor is read when a heartbeat is due, not when it is logged, so that a GPU
is not waited for. Must not know: callbacks, event files.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from shardyard.domain.errors import InvalidRequest
from shardyard.domain.limits import METRIC_NAME_CHARACTERS_MAX, METRICS_MAX

Metrics = Mapping[str, float | torch.Tensor]


class MetricLog:
    """Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, float | torch.Tensor] = {}
        self._latest: dict[str, float | torch.Tensor] = {}

    def log(self, metrics: Metrics) -> None:
        """Keeps the last value of each name. Names beyond METRICS_MAX are left out."""
        with self._lock:
            for kept in (self._waiting, self._latest):
                for name, value in metrics.items():
                    if len(kept) < METRICS_MAX or name in kept:
                        kept[name] = value

    def take(self) -> dict[str, float]:
        """Returns what was logged since the last call."""
        with self._lock:
            taken, self._waiting = self._waiting, {}
        return {name: float(value) for name, value in taken.items()}

    @property
    def latest(self) -> dict[str, float | torch.Tensor]:
        """The last value of each name."""
        with self._lock:
            return dict(self._latest)


def checked_metric(name: str, value: float | torch.Tensor) -> float | torch.Tensor:
    """Returns the value as it can be logged. Raises InvalidRequest."""
    if len(name) > METRIC_NAME_CHARACTERS_MAX:
        raise InvalidRequest(f"a metric's name of {len(name)} characters; at most {METRIC_NAME_CHARACTERS_MAX}")
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach()
    if isinstance(value, torch.Tensor):
        got = f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
        raise InvalidRequest(f"metric {name!r} is {got}; expected one real number", todo="log its mean, for example")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"metric {name!r} is {value!r:.100}; expected one real number") from error
