"""safetensors files: a JSON header, then named arrays. Written as a stream, and checked when read.

    8 bytes, little-endian: length of the header | the header, padded with spaces to a multiple of 8 | the arrays

(https://huggingface.co/docs/safetensors, format 1.0, which the `safetensors` library reads and writes.)

Invariants: all sizes are known before the first array is fetched, so that a file is never in memory as a whole; a
header must fit the size of the file exactly; arrays with larger items come first, so that each array is aligned. Must
not know: what the arrays mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from shardyard.domain.errors import CheckpointDamaged, TooLarge
from shardyard.domain.limits import BLOCKS_MAX, DIMENSIONS_MAX, VARIABLE_BYTES_MAX
from shardyard.domain.variables import DType
from shardyard.storage.storage import Buffer, Storage, Tally, Written

HEADER_BYTES_MAX: Final = 100_000_000
"""The largest header that the safetensors library reads."""
TENSORS_MAX: Final = 8 * BLOCKS_MAX
_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"

Array = npt.NDArray[Any]

_CODES: Final = {
    DType.FLOAT32: "F32",
    DType.FLOAT64: "F64",
    DType.INT64: "I64",
    DType.INT32: "I32",
    DType.UINT8: "U8",
    DType.BOOL: "BOOL",
}
_DTYPES: Final = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True, slots=True)
class TensorSource:
    """An array to be written. When its turn comes, `fetch` returns its bytes (little-endian, in C order), or `stream`
    yields them piece by piece."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    fetch: Callable[[], Buffer] | None = None
    stream: Callable[[], Iterator[Buffer]] | None = None

    def pieces(self) -> Iterator[Buffer]:
        if self.stream is not None:
            return self.stream()
        assert self.fetch is not None
        return iter([self.fetch()])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.item_bytes


def source_of(name: str, array: Array) -> TensorSource:
    """An array in memory, to be written under a name."""
    return TensorSource(name, DType(array.dtype.name), array.shape, lambda: bytes_of(array))


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array in a file: its bytes [begin, end)."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def of(self, data: bytes) -> Array:
        """A read-only array over these bytes."""
        return np.frombuffer(data, numpy_dtype(self.dtype)).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Contents:
    """The header of a file: its metadata, and its arrays in the order in which they lie."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, Tensor]


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The dtype as files have it: little-endian on any machine."""
    return np.dtype(dtype.value).newbyteorder("<")


def bytes_of(array: Array) -> Buffer:
    """The bytes of an array as files have them. Copies only if the array is not contiguous and little-endian."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


# ---- writing


def pieces(metadata: Mapping[str, str], sources: Sequence[TensorSource]) -> Iterator[Buffer]:
    """The bytes of a file: the header, then the arrays. Each array is fetched after the one before was written.

    Raises TooLarge for a header of more than HEADER_BYTES_MAX bytes.
    """
    ordered = sorted(sources, key=lambda source: -source.dtype.item_bytes)
    yield _header(metadata, ordered)
    for source in ordered:
        left = source.nbytes
        for piece in source.pieces():
            data = memoryview(piece)
            left -= data.nbytes
            assert left >= 0, (source.name, left, source.nbytes)
            yield data
        assert left == 0, (source.name, left, source.nbytes)


def _header(metadata: Mapping[str, str], sources: Sequence[TensorSource]) -> bytes:
    entries: dict[str, object] = {_METADATA: dict(metadata)}
    end = 0
    for source in sources:
        assert source.name not in entries, source.name
        entries[source.name] = {
            "dtype": _CODES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [end, end + source.nbytes],
        }
        end += source.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    if len(text) > HEADER_BYTES_MAX:
        raise TooLarge(
            f"the header for {len(sources)} arrays has {len(text)} bytes; expected at most {HEADER_BYTES_MAX}"
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


# ---- reading


def read_contents(storage: Storage, path: str) -> Contents:
    """Reads the header of a file. Raises CheckpointDamaged, CheckpointNotFound, StorageUnavailable."""
    return _read_contents(storage, path, storage.size(path), Tally())


def read_tensor(storage: Storage, path: str, tensor: Tensor) -> Array:
    """Reads one array, read-only. The digest is not checked, since it is that of the whole file (`read_file`)."""
    return tensor.of(storage.read(path, tensor.begin, tensor.nbytes))


def read_file(
    storage: Storage,
    path: str,
    expected: Written,
    wanted: Callable[[str], bool],
    check: Callable[[Contents], None] = lambda _: None,
) -> tuple[Contents, dict[str, Array]]:
    """Reads the header and the wanted arrays in one pass over the file, and checks the digest over every byte. Memory
    is allocated only for the wanted arrays, after length and header were checked, also by `check`.

    Raises what `check` raises, CheckpointDamaged if length, digest or header are not as expected, CheckpointNotFound,
    StorageUnavailable.
    """
    size = storage.size(path)
    if size != expected.nbytes:
        raise CheckpointDamaged(f"{storage.locate(path)} has {size} bytes; expected {expected.nbytes}")
    tally = Tally()
    try:
        contents = _read_contents(storage, path, size, tally)
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{error.what}; no complete file has such a header") from error
    check(contents)
    found: dict[str, Array] = {}
    for tensor in contents.tensors.values():
        if wanted(tensor.name):
            data = storage.read(path, tensor.begin, tensor.nbytes)
            tally.add(data)
            found[tensor.name] = tensor.of(data)
        else:
            for piece in storage.read_pieces(path, tensor.begin, tensor.end):
                tally.add(piece)
    if tally.written != expected:
        raise CheckpointDamaged(
            f"{storage.locate(path)} has the SHA-256 {tally.written.sha256}; expected {expected.sha256}: some of its"
            f" {size} bytes have changed"
        )
    return contents, found


def _read_contents(storage: Storage, path: str, size: int, tally: Tally) -> Contents:
    def damaged(what: str) -> NoReturn:
        raise CheckpointDamaged(f"{storage.locate(path)}: {what}")

    if size < _LENGTH_BYTES:
        damaged(f"{size} bytes; a safetensors file has at least {_LENGTH_BYTES}")
    length = storage.read(path, 0, _LENGTH_BYTES)
    header_bytes = int.from_bytes(length, "little")
    begin = _LENGTH_BYTES + header_bytes
    if header_bytes > min(HEADER_BYTES_MAX, size - _LENGTH_BYTES):
        damaged(f"a header of {header_bytes} bytes (at byte 0) in a file of {size}; at most {HEADER_BYTES_MAX}")
    text = storage.read(path, _LENGTH_BYTES, header_bytes)
    tally.add(length)
    tally.add(text)
    try:
        entries = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        damaged(f"the header (at byte {_LENGTH_BYTES}) is not JSON: {str(error)[:200]}")
    if not isinstance(entries, dict) or len(entries) > TENSORS_MAX:
        damaged(f"the header (at byte {_LENGTH_BYTES}) is not an object of at most {TENSORS_MAX} entries")
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        damaged(f"{_METADATA} of the header is not an object of texts")
    tensors = []
    for name, entry in entries.items():
        tensor = _tensor(name, entry, begin)
        if tensor is None:
            damaged(f"the header's entry {name[:100]!r} is {str(entry)[:200]}, which does not describe an array")
        tensors.append(tensor)
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    end = begin
    for tensor in tensors:
        if tensor.begin != end:
            damaged(f"array {tensor.name[:100]!r} begins at byte {tensor.begin}; expected {end}, after the one before")
        end = tensor.end
    if end != size:
        damaged(f"the arrays end at byte {end} of {size}")
    return Contents(metadata, {tensor.name: tensor for tensor in tensors})


def _tensor(name: str, entry: object, data_begin: int) -> Tensor | None:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return None
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None or not _are_counts(shape, DIMENSIONS_MAX) or not _are_counts(offsets, 2) or len(offsets) != 2:
        return None
    begin, end = offsets
    if math.prod(shape) * dtype.item_bytes != end - begin:
        return None
    return Tensor(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _are_counts(found: object, length_max: int) -> bool:
    return (
        isinstance(found, list)
        and len(found) <= length_max
        and all(type(each) is int and 0 <= each <= VARIABLE_BYTES_MAX * BLOCKS_MAX for each in found)
    )


def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object as a dictionary. Raises ValueError if a name comes twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice in one object")
    return found
