"""Copies between flat tensors. Large copies bypass the cache and use two threads; a GPU copies beside its
computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from shardyard.domain.limits import MIB
from shardyard.transport.stream_copy import copy_past_cache
from shardyard_worker.exchange.buffers.device_copies import DeviceCopies

COPY_BYTES_EACH = 4 * MIB
"""Copies are cut into pieces of this size, so that two threads can share them."""


class TensorCopier:
    """For one thread."""

    def __init__(self, copies: DeviceCopies | None) -> None:
        self._copies = copies
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies (into, from) pairs of tensors of the same shape, all detached. Copies into a GPU are only begun."""
        if self._copies is not None:
            away = [pair for pair in pairs if self._copies.carries(pair[0])]
            if away:
                self._copies.bring(away)
                pairs = [pair for pair in pairs if not self._copies.carries(pair[0])]
        if not pairs:
            return
        nbytes = 0
        for into, _ in pairs:
            nbytes += into.nbytes
        if nbytes < 2 * COPY_BYTES_EACH:
            for into, values in pairs:
                into.copy_(values)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "copy")
        cut = [each for pair in pairs for each in _cut(*pair)]
        at, half = 0, nbytes // 2
        while half > 0:
            half -= cut[at][0].nbytes
            at += 1
        other = self._pool.submit(_copy_past_cache, cut[at:])
        _copy_past_cache(cut[:at])
        other.result()


def _cut(into: torch.Tensor, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    each, into, values = COPY_BYTES_EACH // into.element_size(), into.view(-1), values.reshape(-1)
    for at in range(0, into.numel(), each):
        yield into[at : at + each], values[at : at + each]


def _copy_past_cache(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """As `copy_in_order`, for tensors too large for the cache."""
    for into, values in pairs:
        plain = into.device.type == values.device.type == "cpu" and into.dtype is values.dtype
        if plain and into.is_contiguous() and values.is_contiguous():
            copy_past_cache(into.detach().numpy().view(np.uint8), values.detach().numpy().view(np.uint8))
        else:
            copy_in_order([(into, values)])


def copy_in_order(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for into, values in pairs:
        into.copy_(values)
