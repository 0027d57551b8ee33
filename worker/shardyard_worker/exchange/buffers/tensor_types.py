"""Which tensors can be a job's variables, and which tensors fit a variable.

Servers hold float32 and float64 parameters, and a few more dtypes of buffers. Pure. Must not know: where tensors go.
"""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from shardyard.domain.errors import DTypeMismatch, ShapeMismatch, UnsupportedModel
from shardyard.domain.variables import DType, VariableKind, VariableSpec

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT64: torch.float64,
    DType.INT64: torch.int64,
    DType.INT32: torch.int32,
    DType.UINT8: torch.uint8,
    DType.BOOL: torch.bool,
}

NARROW_DTYPES = (torch.bfloat16, torch.float16)
"""Tensors of these dtypes are float32 variables. They are widened, exactly, when they are sent, and narrowed, to
nearest, halves to even, when values are loaded."""


def spec_of(name: str, tensor: torch.Tensor, kind: VariableKind, group: int = 0) -> VariableSpec:
    """The variable that a tensor becomes. Raises UnsupportedModel for what servers cannot hold."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedModel(f"{kind.value} {name!r} is {_kind_of(tensor)}", todo="give a torch.Tensor")
    if is_lazy(tensor) or tensor.is_meta:
        raise UnsupportedModel(
            f"{kind.value} {name!r} has no values yet ({type(tensor).__name__} on {tensor.device})",
            todo="before job.prepare, call the model once on a batch (lazy modules), or model.to_empty(device=...) and"
            " initialise it (meta)",
        )
    wide = torch.float32 if tensor.dtype in NARROW_DTYPES else tensor.dtype
    dtype = next((ours for ours, theirs in TORCH_DTYPES.items() if theirs is wide), None)
    if dtype is None or (kind is VariableKind.PARAMETER and not dtype.is_floating):
        raise UnsupportedModel(
            f"{kind.value} {name!r} is of dtype {tensor.dtype}",
            todo="servers hold float32 and float64 parameters, also of models in bfloat16 and float16",
        )
    if tensor.layout is not torch.strided:
        raise UnsupportedModel(f"{kind.value} {name!r} has the layout {tensor.layout}", todo="use a dense tensor")
    return VariableSpec(name, dtype, tuple(tensor.shape), kind, group)


def check_tensor(spec: VariableSpec, tensor: torch.Tensor) -> None:
    """Raises ShapeMismatch, DTypeMismatch or UnsupportedModel unless the tensor fits its variable."""
    if not isinstance(tensor, torch.Tensor):
        raise DTypeMismatch(f"{spec.name!r} given as {_kind_of(tensor)}; expected a torch.Tensor")
    if tensor.layout is not torch.strided:
        raise UnsupportedModel(
            f"the gradient of {spec.name!r} has the layout {tensor.layout}",
            todo="use dense gradients, for example nn.Embedding(..., sparse=False)",
        )
    if tuple(tensor.shape) != spec.shape:
        raise ShapeMismatch(f"{spec.name!r} of shape {tuple(tensor.shape)}; expected {spec.shape}")
    if not fits_dtype(spec, tensor):
        raise DTypeMismatch(f"{spec.name!r} of dtype {tensor.dtype}; expected {TORCH_DTYPES[spec.dtype]}")


def fits_dtype(spec: VariableSpec, tensor: torch.Tensor) -> bool:
    """Whether the tensor has its variable's dtype, or one that is widened to it."""
    return tensor.dtype is TORCH_DTYPES[spec.dtype] or (spec.dtype is DType.FLOAT32 and tensor.dtype in NARROW_DTYPES)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float() if tensor.dtype in NARROW_DTYPES else tensor


def _kind_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
