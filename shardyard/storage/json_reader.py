"""JSON that was read from a file, taken apart with every value checked.

Owns: `JsonNode`, a value with the place where it stands. Invariant: each look-up gives a value of the type and within
the bounds that were asked for, or raises CheckpointDamaged naming the file and the place. Must not know: what is
described.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from shardyard.domain.errors import CheckpointDamaged
from shardyard.domain.limits import SEQUENCE_MAX
from shardyard.storage.tensors import unique


def canonical(document: object) -> bytes:
    """The one text of a JSON value: names sorted, no spaces, ASCII. NaN and infinity become what `parse` refuses."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")


@dataclass(frozen=True, slots=True)
class JsonNode:
    """A value, and where it stands: `file` for messages, `place` as "partitions[3].files"."""

    value: object
    file: str
    place: str = ""

    @classmethod
    def parse(cls, text: bytes, file: str, *, at: int) -> JsonNode:
        """`at`: the byte of the file with which the text begins."""
        try:
            return cls(json.loads(text, object_pairs_hook=unique, parse_constant=_refuse), file)
        except json.JSONDecodeError as error:
            raise CheckpointDamaged(f"{file} is no JSON at byte {at + error.pos}: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointDamaged(f"{file} is no JSON that was written so: {str(error)[:200]}") from error

    def refuse(self, expected: str) -> NoReturn:
        raise CheckpointDamaged(f"{self.file}: {self.place or 'it'} is {str(self.value)[:200]!r}; expected {expected}")

    def fields(self, names: Collection[str]) -> dict[str, JsonNode]:
        """An object's values; it must have these names and no other."""
        found = self.mapping()
        if set(found) != set(names):
            differing = sorted(set(found) ^ set(names))
            raise CheckpointDamaged(
                f"{self.file}: {self.place or 'it'} has the names {sorted(found)[:20]}; expected {sorted(names)}, which"
                f" differ in {differing[:20]}"
            )
        return {name: JsonNode(value, self.file, f"{self.place}.{name}".lstrip(".")) for name, value in found.items()}

    def mapping(self) -> Mapping[str, object]:
        if not isinstance(self.value, dict):
            self.refuse("an object")
        return self.value

    def items(self, length_max: int) -> Iterator[JsonNode]:
        if not isinstance(self.value, list) or len(self.value) > length_max:
            self.refuse(f"a list of at most {length_max}")
        for index, value in enumerate(self.value):
            yield JsonNode(value, self.file, f"{self.place}[{index}]")

    def number(self, highest: int = SEQUENCE_MAX, *, least: int = 0) -> int:
        if type(self.value) is not int or not least <= self.value <= highest:
            self.refuse(f"a whole number from {least} to {highest}")
        return self.value

    def numbers(self, length_max: int, highest: int = SEQUENCE_MAX) -> tuple[int, ...]:
        """A list of whole numbers."""
        found = self.value
        if not isinstance(found, list) or len(found) > length_max:
            self.refuse(f"a list of at most {length_max}")
        if not all(type(each) is int and 0 <= each <= highest for each in found):
            self.refuse(f"whole numbers from 0 to {highest}")
        return tuple(found)

    def reals(self, length_max: int) -> tuple[float, ...]:
        found = self.value
        if not isinstance(found, list) or len(found) > length_max:
            self.refuse(f"a list of at most {length_max}")
        if not all(type(each) is float for each in found):
            self.refuse("numbers with a point")
        return tuple(found)

    def text(self, pattern: re.Pattern[str], expected: str) -> str:
        if not isinstance(self.value, str) or not pattern.fullmatch(self.value):
            self.refuse(expected)
        return self.value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
