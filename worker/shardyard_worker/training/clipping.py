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
        self.square_norm_of_all: float | None = None
        """That of the next gradient over all workers, where each has a part of it; None: this worker has all of it."""

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
        self._clamp(gradients)
        if not self._clipping.norm or not gradients:
            return
        device = gradients[0].device
        if self.square_norm_of_all is None:
            self._norm = _norm_of(gradients)
        else:
            self._norm = torch.tensor(self.square_norm_of_all, dtype=torch.float64, device=device).sqrt()
        scale = torch.clamp(self._clipping.norm / (self._norm + NORM_EPS), max=1.0)
        if device.type == "cpu" and float(scale) == 1.0:
            return
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.device))

    @torch.no_grad()
    def square_norm(self, tensors: Sequence[torch.Tensor]) -> float:
        """Clips a part of a gradient by value, in place. Returns its square norm; 0 if norms are not computed."""
        self._clamp(tensors)
        if not self._clipping.norm or not tensors:
            return 0.0
        return float(_norm_of(tensors).double().square())

    def _clamp(self, gradients: Sequence[torch.Tensor]) -> None:
        if self._clipping.value:
            for gradient in gradients:
                gradient.clamp_(min=-self._clipping.value, max=self._clipping.value)


def _norm_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    device = gradients[0].device
    norms = [torch.linalg.vector_norm(gradient).to(device) for gradient in gradients]
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(_of_one_dtype(norms)))
    return whole


def _of_one_dtype(norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As wide as the widest."""
    dtype = torch.float64 if any(norm.dtype is torch.float64 for norm in norms) else norms[0].dtype
    return [norm.to(dtype) for norm in norms]
