"""The form of the journal's records, and a reader that checks every value.

Owns: `Entry`, a record as a component writes it; `Body`, which reads one. Invariant: a value of another type, or out of
its bounds, raises a DamagedRecord that names it, and never leads to a wrong state. Must not know: what records mean,
where they are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Self

Entry = tuple[str, Mapping[str, object]]
"""A record's kind and body. The body is made of what JSON knows."""

NUMBER_MAX: Final = (1 << 64) - 1
SUM_MAX: Final = (1 << 128) - 1
"""Of sums over numbers that peers gave. What was taken from a peer must never make a journal that is refused."""


class DamagedRecord(Exception):
    """A record that cannot be what was written. The caller that knows the record's number adds it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A record in the journal. `term`: of the coordinator that wrote it. `time`: seconds since 1970."""

    number: int
    term: int
    time: float
    kind: str
    body: Mapping[str, object]


class Body:
    """Reads a record's values. Every method raises DamagedRecord."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def number(self, name: str, *, least: int = 0, most: int = NUMBER_MAX) -> int:
        return checked_number(self._get(name), name, least=least, most=most)

    def text(self, name: str) -> str:
        return checked_text(self._get(name), name)

    def flag(self, name: str) -> bool:
        value = self._get(name)
        if not isinstance(value, bool):
            raise _unexpected(name, "true or false", value)
        return value

    def real(self, name: str) -> float:
        return checked_float(self._get(name), name)

    def items(self, name: str) -> list[object]:
        return checked_items(self._get(name), name)

    def numbers(self, name: str, *, most: int = NUMBER_MAX) -> list[int]:
        return [checked_number(each, f"each of {name}", most=most) for each in self.items(name)]

    def texts(self, name: str) -> dict[str, str]:
        """An object whose values are texts."""
        return {key: checked_text(value, f"{name}.{key}") for key, value in self._mapping(name).items()}

    def part(self, name: str) -> Self:
        """A nested object."""
        return type(self)(self._mapping(name))

    def values(self, name: str) -> Mapping[str, object]:
        """An object that the caller reads itself."""
        return self._mapping(name)

    def has(self, name: str) -> bool:
        """Whether the record has that value. Raises nothing."""
        return name in self._values

    def is_null(self, name: str) -> bool:
        return self._get(name) is None

    def _get(self, name: str) -> object:
        if name not in self._values:
            raise DamagedRecord(f"{name} is missing")
        return self._values[name]

    def _mapping(self, name: str) -> dict[str, object]:
        value = self._get(name)
        if not isinstance(value, dict):
            raise _unexpected(name, "an object", value)
        return value


def require(condition: bool, what: str) -> None:
    """Raises DamagedRecord if a record does not fit those before it."""
    if not condition:
        raise DamagedRecord(what)


def checked_number(value: object, name: str, *, least: int = 0, most: int = NUMBER_MAX) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _unexpected(name, f"a whole number from {least} to {most}", value)
    return value


def checked_text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _unexpected(name, "a text", value)
    return value


def checked_items(value: object, name: str, *, count: int | None = None) -> list[object]:
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise _unexpected(name, "a list" if count is None else f"a list of {count}", value)
    return value


def checked_float(value: object, name: str) -> float:
    if not isinstance(value, float | int) or isinstance(value, bool):
        raise _unexpected(name, "a number", value)
    return float(value)


def _unexpected(name: str, expected: str, got: object) -> DamagedRecord:
    return DamagedRecord(f"{name}: expected {expected}, got {repr(got)[:80]}")
