"""The code of distinct ids: gaps between ascending ids. Each 64 gaps take as many bits each as the largest needs.

Lemire, Boytsov: *Decoding billions of integers per second through vectorization*, Software: Practice and Experience
2015 (binary packing, without the vectors). The Rice codes of `topk` would save another eighth, but a single far id
would undo it. An id takes at most 8 bytes and a bit, whatever the ids are.

    1 | varint n | the first id, 8 bytes | for each 64 gaps: a byte w, 0 to 64, and the gaps in w bits each

A gap is id - previous id - 1. Numbers are little-endian. Bits begin with the lowest of the first byte. The last byte of
each 64 gaps is padded with zeros, and nothing follows the last gap. A code of no ids ends after n.

Several codes in one array are written, and read, in one call, because a call costs more than a few hundred ids.

Invariants: decoded ids ascend strictly; memory is allocated after the number of ids was checked against the caller's
maximum and against the bytes; whatever the bytes are, only a ShardyardError is raised. Must not know: what the ids
mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from shardyard.codecs.format.compiled import Int64s, Uint8s, read_only
from shardyard.codecs.format.form import VARINT_BYTES_MAX, Buffer, varint
from shardyard.codecs.format.varints import read_varint
from shardyard.domain.compiling import compiled
from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.domain.tables.row_ids import writable

FORM: Final = 1
GAPS_EACH: Final = 64
"""How many gaps have the same width."""
_WIDTH_MAX: Final = 64
"""The largest width of a gap in bits."""
_ID_BYTES: Final = 8
_NOT_ASCENDING: Final = -1
_CUT_SHORT: Final = -1
_TOO_WIDE: Final = -2
_TOO_FAR: Final = -3
_FILLING: Final = -4
_FAULTS: Final = {
    _CUT_SHORT: "ends before its last gap",
    _TOO_WIDE: "has gaps of more than 64 bits",
    _TOO_FAR: "goes beyond the largest id",
    _FILLING: "is padded with other bits than zeros",
}


def encode_ids(ids: Int64s) -> memoryview:
    """The code of `ids`, shape (n,), which ascend strictly. Returns a view of bytes."""
    return encode_runs(ids, [(0, ids.size)])[0]


def encode_runs(ids: Int64s, runs: Sequence[tuple[int, int]]) -> list[memoryview]:
    """The code of each run [begin, end) of `ids`. The ids of a run ascend strictly. Returns views of bytes."""
    heads = [bytes((FORM,)) + varint(end - begin) for begin, end in runs]
    at = 0
    places: list[tuple[int, int, int]] = []
    for head, (begin, end) in zip(heads, runs, strict=True):
        places.append((begin, end, at + len(head)))
        at += len(head) + (_ID_BYTES + _body_bytes_max(end - begin) if end > begin else 0)
    made = np.empty(at, np.uint8)
    ends = np.empty(len(runs), np.int64)
    _pack_runs(writable(ids), np.array(places, np.int64).reshape(-1, 3), made, ends)
    codes = made.data
    found = []
    for head, (_, _, body), end in zip(heads, places, ends.tolist(), strict=True):
        assert end != _NOT_ASCENDING, "ids that do not ascend"
        begin = body - len(head)
        codes[begin:body] = head
        found.append(codes[begin:end])
    return found


def decode_ids(code: Buffer, maximum: int) -> Int64s:
    """The ids of a code, shape (n,), strictly ascending. Raises MalformedPayload for bytes that are not such a code,
    TooLarge for more than `maximum` ids."""
    given = np.frombuffer(code, np.uint8)
    count, at = _read_head(given)
    if count > maximum:
        raise TooLarge(f"a code has {count} ids; expected at most {maximum}")
    if not count:
        if given.size > at:
            raise MalformedPayload(f"a code of no ids has {given.size - at} bytes too many")
        return np.empty(0, np.int64)
    least = _ID_BYTES + -(-(count - 1) // GAPS_EACH)
    if given.size - at < least:
        raise MalformedPayload(f"a code of {count} ids has {given.size - at} bytes; expected {least} or more")
    first = given[at : at + _ID_BYTES].copy().view(np.int64)[0]
    ids = np.empty(count, np.int64)
    body = given[at + _ID_BYTES :]
    used = _unpack(first, body, ids)
    if used < 0:
        raise MalformedPayload(f"a code of {count} ids {_FAULTS[used]}")
    if used != body.size:
        raise MalformedPayload(f"a code of {count} ids has {body.size - used} bytes too many")
    return ids


def decode_runs(codes: Uint8s, begins: Int64s, ends: Int64s, counts: Int64s) -> Int64s | None:
    """The ids of several codes, one after the other. Code k is codes[begins[k]:ends[k]] and has counts[k] ids. None if
    one of them is not a code of so many ids; `decode_ids` for each says which one and why. The caller has checked the
    counts against its limits."""
    codes = read_only(codes)
    places = np.empty(begins.size, np.int64)
    if not _find_bodies(codes, begins, ends, counts, places):
        return None
    ids = np.empty(int(counts.sum()), np.int64)
    return ids if _unpack_runs(codes, places, ends, counts, ids) else None


def _read_head(given: Uint8s) -> tuple[int, int]:
    """The number of ids, and where the body begins."""
    if not given.size or given[0] != FORM:
        begin = f"begins with {given[0]}" if given.size else "has no bytes"
        raise MalformedPayload(f"a code of ids {begin}; expected {FORM}")
    count = 0
    for index, byte in enumerate(given[1 : 1 + VARINT_BYTES_MAX].tolist()):
        count |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return count, 2 + index
    raise MalformedPayload(f"the number of ids in a code has no end within {VARINT_BYTES_MAX} bytes")


def _body_bytes_max(ids: int) -> int:
    return -(-(ids - 1) // GAPS_EACH) + _ID_BYTES * (ids - 1)


@compiled
def _pack(ids: Int64s, body: Uint8s) -> int:
    """Returns how many bytes of `body` were filled; _NOT_ASCENDING if the ids do not ascend."""
    one = np.uint64(1)
    at = 0
    for begin in range(1, ids.size, GAPS_EACH):
        end = min(begin + GAPS_EACH, ids.size)
        every = np.uint64(0)
        for i in range(begin, end):
            if ids[i] <= ids[i - 1]:
                return _NOT_ASCENDING
            every |= np.uint64(ids[i]) - np.uint64(ids[i - 1]) - one
        width = 0
        while width < _WIDTH_MAX and every >> np.uint64(width):
            width += 1
        body[at] = width
        at += 1
        held, bits = np.uint64(0), 0
        for i in range(begin, end):
            gap = np.uint64(ids[i]) - np.uint64(ids[i - 1]) - one
            left = width
            while left > 0:
                taken = min(left, 8 - bits)
                held |= (gap & ((one << np.uint64(taken)) - one)) << np.uint64(bits)
                gap >>= np.uint64(taken)
                left -= taken
                bits += taken
                if bits == 8:
                    body[at] = held
                    at += 1
                    held, bits = np.uint64(0), 0
        if bits:
            body[at] = held
            at += 1
    return at


@compiled
def _pack_runs(ids: Int64s, places: Int64s, codes: Uint8s, ends: Int64s) -> None:
    """`places`: for each run, its begin and end, and where its body begins in `codes`. Fills `ends` with the end of
    each code, or with _NOT_ASCENDING if the ids of a run do not ascend."""
    for k in range(ends.size):
        begin, end, at = places[k]
        ends[k] = at
        if begin == end:
            continue
        word = np.uint64(ids[begin])
        for b in range(_ID_BYTES):
            codes[at + b] = (word >> np.uint64(8 * b)) & np.uint64(255)
        length = _pack(ids[begin:end], codes[at + _ID_BYTES :])
        ends[k] = _NOT_ASCENDING if length == _NOT_ASCENDING else at + _ID_BYTES + length


@compiled
def _find_bodies(codes: Uint8s, begins: Int64s, ends: Int64s, counts: Int64s, places: Int64s) -> bool:
    """Fills `places` with where each code's first id begins. Returns False if a code has another number of ids, or too
    few bytes."""
    for k in range(begins.size):
        if not (0 <= begins[k] < ends[k] <= codes.size) or codes[begins[k]] != FORM:
            return False
        count, at = read_varint(codes, begins[k] + 1, ends[k])
        if count != counts[k]:
            return False
        least = 0 if count == 0 else _ID_BYTES + (count + GAPS_EACH - 2) // GAPS_EACH
        if ends[k] - at < least or (count == 0 and ends[k] > at):
            return False
        places[k] = at
    return True


@compiled
def _unpack_runs(codes: Uint8s, places: Int64s, ends: Int64s, counts: Int64s, ids: Int64s) -> bool:
    to = 0
    for k in range(places.size):
        if counts[k] == 0:
            continue
        body = places[k] + _ID_BYTES
        first = np.uint64(0)
        for b in range(_ID_BYTES):
            first |= np.uint64(codes[places[k] + b]) << np.uint64(8 * b)
        if _unpack(np.int64(first), codes[body : ends[k]], ids[to : to + counts[k]]) != ends[k] - body:
            return False
        to += counts[k]
    return True


@compiled
def _unpack(first: np.int64, body: Uint8s, ids: Int64s) -> int:
    """Returns how many bytes of `body` were read, or what is wrong."""
    one, sign = np.uint64(1), np.uint64(1) << np.uint64(63)
    ids[0] = first
    # in this order unsigned numbers ascend as ids do
    former = np.uint64(first) ^ sign
    at = 0
    for begin in range(1, ids.size, GAPS_EACH):
        end = min(begin + GAPS_EACH, ids.size)
        if at == body.size:
            return _CUT_SHORT
        width = int(body[at])
        at += 1
        if width > _WIDTH_MAX:
            return _TOO_WIDE
        if ((end - begin) * width + 7) // 8 > body.size - at:
            return _CUT_SHORT
        held, bits = np.uint64(0), 0
        for i in range(begin, end):
            gap = np.uint64(0)
            got = 0
            while got < width:
                if bits == 0:
                    held, bits = np.uint64(body[at]), 8
                    at += 1
                taken = min(width - got, bits)
                gap |= (held & ((one << np.uint64(taken)) - one)) << np.uint64(got)
                held >>= np.uint64(taken)
                bits -= taken
                got += taken
            next_ = former + gap + one
            if next_ <= former:
                return _TOO_FAR
            former = next_
            ids[i] = np.int64(former ^ sign)
        if held:
            return _FILLING
    return at
