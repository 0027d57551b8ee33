"""Dense variables: element types, shapes and parameter groups."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class DType(enum.Enum):
    """The element types of variables. The value is the name in numpy and torch."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    INT64 = "int64"
    INT32 = "int32"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self]

    @property
    def is_floating(self) -> bool:
        return self in (DType.FLOAT32, DType.FLOAT64)


_ITEM_BYTES = {
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.UINT8: 1,
    DType.BOOL: 1,
}


class VariableKind(enum.Enum):
    PARAMETER = "parameter"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class VariableSpec:
    """A dense tensor. `group`: the index of its parameter group; 0 for buffers."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    kind: VariableKind = VariableKind.PARAMETER
    group: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def payload_bytes(self) -> int:
        return self.elements * self.dtype.item_bytes
