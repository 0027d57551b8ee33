"""Clipping of gradients before the push, in a job that is not synchronous.

Owns: the arithmetic, that of torch.nn.utils.clip_grad_value_, then clip_grad_norm_, on the gradients' own devices.
Buffers are not clipped. Must not know: codecs, which clip the rest (job.compression.clip).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardyard.domain.consistency import Clipping
from shardyard.domain.variables import VariableKind, VariableSpec

NORM_EPS = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


class Clipper:
    """`variables`: only the gradients of parameters among them are clipped."""

    def __init__(self, clipping: Clipping, variables: Sequence[VariableSpec]) -> None:
        self._clipping = clipping
        self._are_parameters = [spec.kind is VariableKind.PARAMETER for spec in variables]
        self._norm: torch.Tensor | None = None

    @property
    def norm(self) -> float | None:
        """The 2-norm of the last gradient, before it was scaled down. None if norms are not computed. Waits for the
        device."""
        return None if self._norm is None else float(self._norm)

    @torch.no_grad()
    def clip(self, tensors: Sequence[torch.Tensor | None], rows: Sequence[torch.Tensor] = ()) -> None:
        """Clips in place. `rows`: gradients of table rows, which are part of the norm.

        NaN and infinity are treated as in torch: an infinite norm makes finite elements zero, and infinite ones NaN."""
        gradients = [
            tensor.detach()
            for tensor, is_parameter in zip(tensors, self._are_parameters, strict=True)
            if is_parameter and tensor is not None
        ]
        gradients += rows
        if self._clipping.value:
            for gradient in gradients:
                gradient.clamp_(min=-self._clipping.value, max=self._clipping.value)
        if not self._clipping.norm or not gradients:
            return
        device = gradients[0].device
        norms = [torch.linalg.vector_norm(gradient).to(device) for gradient in gradients]
        self._norm = torch.linalg.vector_norm(torch.stack(_of_one_dtype(norms)))
        scale = torch.clamp(self._clipping.norm / (self._norm + NORM_EPS), max=1.0)
        if device.type == "cpu" and float(scale) == 1.0:
            return
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.device))


def _of_one_dtype(norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As wide as the widest."""
    dtype = torch.float64 if any(norm.dtype is torch.float64 for norm in norms) else norms[0].dtype
    return [norm.to(dtype) for norm in norms]
