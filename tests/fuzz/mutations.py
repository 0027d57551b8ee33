"""Inputs that are nearly right: valid ones with something about them changed.

Random bytes die at the first check. So most mutations know what they change: a protobuf message is taken apart, one
field of it, however deep, is made extreme, doubled, dropped or retyped, and all lengths around it are made to fit
again; JSON likewise. The rest are blind: bits, cuts, splices, lengths that lie. All follow from the generator that is
given, so a seed gives the same inputs on every machine.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from random import Random
from typing import Final

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

_WHOLE: Final = (0, 1, 2, 63, 64, 65, 127, 128, 255, 256, 4_095, 4_096, 4_097, 65_536)
_EDGES: Final = tuple(
    n for bits in (31, 32, 46, 47, 53, 60, 62, 63, 64) for n in ((1 << bits) - 1, (1 << bits) % (1 << 64))
)
NUMBERS: Final = (*_WHOLE, *_EDGES)
REALS: Final = (0.0, -0.0, -1.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS: Final = ("", "a", "\0", "ü", "💥", "../x", "x" * 5_000, "\udc80", "{}", "0", "NaN")
VALUES: Final[tuple[object, ...]] = (None, True, False, -1, 0.5, 1 << 64, 1 << 63, "", "x", [], {}, [[]], [0] * 300)

Field = tuple[int, int, "int | bytes"]
"""Number, wire type, value."""


def mutate(dice: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """`others`: inputs of the same kind, to be spliced with."""
    for _ in range(1 if dice.random() < 0.6 else dice.randrange(2, 5)):
        data = _mutate_once(dice, data, others)
    return data


def mutate_stream(dice: Random, messages: Sequence[bytes], others: Sequence[Sequence[bytes]]) -> list[bytes]:
    """One or more of a stream's messages are changed; or messages are dropped, doubled, exchanged, borrowed."""
    found = list(messages)
    kind = dice.random()
    if kind < 0.15 and found:
        at = dice.randrange(len(found))
        match dice.randrange(4):
            case 0:
                del found[at]
            case 1:
                found.insert(at, found[at])
            case 2:
                other = dice.randrange(len(found))
                found[at], found[other] = found[other], found[at]
            case _:
                found[at:at] = dice.choice(others)
        return found
    if not found:
        return [dice.randbytes(dice.randrange(40))]
    at = dice.randrange(len(found))
    found[at] = mutate(dice, found[at], [each for other in others for each in other])
    return found


def mutate_json(dice: Random, text: bytes) -> bytes:
    """One value of a JSON text, however deep, is another, or is not there, or there twice. A text that is none is
    changed blindly."""
    try:
        document = json.loads(text)
    except ValueError:
        return _blind(dice, text, [text])
    return json.dumps(_change(dice, document), allow_nan=True).encode("utf-8", "surrogatepass")


# ---- protobuf


def parse(data: bytes) -> list[Field] | None:
    """The fields of a message; None where it is none."""
    found: list[Field] = []
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if at < 0 or number == 0:
            return None
        if kind == VARINT:
            value, at = _read_varint(data, at)
            if at < 0:
                return None
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
            value, at = data[at : at + length], at + length
        elif kind == BYTES:
            length, at = _read_varint(data, at)
            if at < 0 or at + length > len(data):
                return None
            value, at = data[at : at + length], at + length
        else:
            return None
        if at > len(data):
            return None
        found.append((number, kind, value))
    return found


def build(fields: Sequence[Field]) -> bytes:
    out = bytearray()
    for number, kind, value in fields:
        out += varint(number << 3 | kind)
        if isinstance(value, int):
            out += varint(value)
        else:
            out += varint(len(value)) + value if kind == BYTES else value
    return bytes(out)


def varint(number: int) -> bytes:
    out = bytearray()
    while True:
        out.append(number & 0x7F | (0x80 if number > 0x7F else 0))
        number >>= 7
        if not number:
            return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number and the place behind it; a negative place where there is none."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            return 0, -1
        number |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return number, at
    return 0, -1


def _mutate_once(dice: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    fields = parse(data) if dice.random() < 0.85 else None
    return _blind(dice, data, others) if fields is None else build(_mutate_fields(dice, fields, others))


def _mutate_fields(dice: Random, fields: list[Field], others: Sequence[bytes]) -> list[Field]:
    if not fields or dice.random() < 0.05:
        return [*fields, _any_field(dice)]
    at = dice.randrange(len(fields))
    number, kind, value = fields[at]
    chance = dice.random()
    if chance < 0.08:
        return fields[:at] + fields[at + 1 :]
    if chance < 0.16:
        times = dice.choice((1, 1, 2, 300))
        return fields[:at] + [fields[at]] * times + fields[at:]
    if chance < 0.20:
        return [*fields[:at], (dice.choice((number + 1, 15, 16, 2047, (1 << 29) - 1)), kind, value), *fields[at + 1 :]]
    if chance < 0.24:
        return [*fields[:at], _any_field(dice, number), *fields[at + 1 :]]
    if chance < 0.28 and others:
        donor = parse(dice.choice(others))
        if donor:
            return [*fields[:at], dice.choice(donor), *fields[at:]]
    return [*fields[:at], (number, kind, _another(dice, kind, value, others)), *fields[at + 1 :]]


def _another(dice: Random, kind: int, value: int | bytes, others: Sequence[bytes]) -> int | bytes:
    if isinstance(value, int):
        return dice.choice((dice.choice(NUMBERS), value + 1, max(0, value - 1), dice.getrandbits(64))) % (1 << 64)
    if kind == FIXED64:
        if dice.random() < 0.3:
            return struct.pack("<d", dice.choice(REALS))
        near = int.from_bytes(value.ljust(8, b"\0"), "little") + dice.choice((-1, 1))
        return (dice.choice((dice.choice(NUMBERS), near, dice.getrandbits(64))) % (1 << 64)).to_bytes(8, "little")
    if kind == FIXED32:
        return dice.randbytes(4)
    inner = parse(value)
    if inner and dice.random() < 0.7:
        return build(_mutate_fields(dice, inner, others))
    if value.startswith(b"{") and dice.random() < 0.9:
        return mutate_json(dice, value)
    if dice.random() < 0.4:
        return dice.choice(TEXTS).encode("utf-8", "surrogatepass")
    return _blind(dice, value, [value])


def _any_field(dice: Random, number: int = 0) -> Field:
    number = number or dice.randrange(1, 20)
    match dice.randrange(4):
        case 0:
            return number, VARINT, dice.choice(NUMBERS)
        case 1:
            return number, FIXED64, dice.choice(NUMBERS).to_bytes(8, "little")
        case 2:
            return number, FIXED32, dice.randbytes(4)
        case _:
            return number, BYTES, dice.randbytes(dice.randrange(12))


# ---- JSON


def _change(dice: Random, value: object) -> object:
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(sorted(value))
        match dice.randrange(8):
            case 0:
                return {name: each for name, each in value.items() if name != key}
            case 1:
                return {**value, key + dice.choice(("x", "", "\0")): dice.choice(VALUES)}
            case _:
                return {**value, key: _change(dice, value[key])}
    if isinstance(value, list) and value and dice.random() < 0.9:
        at = dice.randrange(len(value))
        match dice.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + value[at:] * 2
            case _:
                return [*value[:at], _change(dice, value[at]), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and dice.random() < 0.7:
        return dice.choice((dice.choice(NUMBERS), value + 1, value - 1, -value, float(value)))
    if isinstance(value, float) and dice.random() < 0.7:
        return dice.choice(REALS)
    if isinstance(value, str) and dice.random() < 0.7:
        return dice.choice((dice.choice(TEXTS), value[1:], value + "0", value[::-1]))
    return dice.choice(VALUES)


# ---- anything


def _blind(dice: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    found = bytearray(data)
    at = dice.randrange(len(found) + 1)
    match dice.randrange(8):
        case 0 if found:
            for _ in range(dice.choice((1, 1, 2, 8))):
                found[dice.randrange(len(found))] ^= 1 << dice.randrange(8)
        case 1 if found:
            found[dice.randrange(len(found))] = dice.choice((0, 1, 0x7F, 0x80, 0xFF))
        case 2:
            del found[at:]
        case 3:
            del found[at : at + dice.randrange(1, 9)]
        case 4:
            found[at:at] = dice.randbytes(dice.randrange(1, 9))
        case 5:
            other = dice.choice(others) if others else b""
            found[at:] = other[dice.randrange(len(other) + 1) :]
        case 6:
            found[at:at] = varint(dice.choice(NUMBERS))
        case _:
            found = bytearray(dice.randbytes(dice.randrange(64)))
    return bytes(found)
