"""JSON in files: written in one form, and read with every value checked.

`seal` and `unseal` put a SHA-256 around a document, so that a changed bit is found before any value is used; a
signature may follow it.
`document_of` turns a dataclass into JSON, field by field; `JsonNode.to` is the way back. An enum is its name in lower
case, a tuple is a list.

Invariant: each look-up in a `JsonNode` gives a value of the type and within the bounds that were asked for, or raises
CheckpointDamaged, which names the file and the place in it. Must not know: what the values mean.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import hashlib
import json
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

from shardyard.domain.errors import CheckpointDamaged, InvalidRequest
from shardyard.domain.limits import SEQUENCE_MAX, VARIABLE_NAME_CHARACTERS_MAX
from shardyard.storage.encryption import check_plain
from shardyard.storage.storage import Written
from shardyard.storage.tensors import unique

_TIME: Final = re.compile(r"[ -~]{1,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(rf".{{1,{VARIABLE_NAME_CHARACTERS_MAX}}}", re.DOTALL)
_SEAL: Final = re.compile(rb',"sha256":"([^"]{64})"(?:,"signature":"((?:[0-9a-f]{2}){1,100})")?\}\n\Z')
_SEAL_BYTES_MAX: Final = 300
_UINT64_MAX: Final = (1 << 64) - 1
_LIST_MAX: Final = 10_000_000

T = TypeVar("T")
Choice = TypeVar("Choice", bound=enum.Enum)


def canonical(document: object) -> bytes:
    """The one text of a JSON value: names sorted, no spaces, ASCII. NaN and infinity become what `parse` refuses."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")


@dataclass(frozen=True, slots=True)
class Sealed:
    """A text that `seal` wrote. Its digest is right; the document is not read yet. `digest`: the SHA-256 of the
    document's bytes, in hexadecimal. `signature`: empty if it is not signed; it is not checked here."""

    document: bytes
    where: str
    begin: int
    digest: str
    signature: bytes

    def read(self) -> JsonNode:
        """Raises CheckpointDamaged."""
        return JsonNode.parse(self.document, self.where, at=self.begin)


def seal(name: str, document: object, sign: Callable[[str], bytes] | None = None) -> bytes:
    """`{"NAME":document,"sha256":"..."}` and a line end. The digest is that of the document's bytes. `sign`: returns
    the signature of the digest, which follows it: `,"signature":"..."`."""
    inner = canonical(document)
    digest = hashlib.sha256(inner).hexdigest()
    signature = b"" if sign is None else b',"signature":"%b"' % sign(digest).hex().encode()
    return b'{"%b":%b,"sha256":"%b"%b}\n' % (name.encode(), inner, digest.encode(), signature)


def unseal(text: bytes, name: str, where: str) -> Sealed:
    """Checks a text that `seal` wrote. `where` is the file's name, for messages. Raises CheckpointDamaged, and
    ConfigurationError if it is encrypted."""
    check_plain(text, where)
    prefix = b'{"%b":' % name.encode()
    if not text.startswith(prefix):
        raise CheckpointDamaged(
            f"{where} ({len(text)} bytes) does not begin as a manifest; expected {prefix.decode()!r}"
        )
    end = _SEAL.search(text, max(len(prefix), len(text) - _SEAL_BYTES_MAX))
    if end is None:
        raise CheckpointDamaged(
            f"{where} does not end with a digest (at byte {len(text)}): it was cut off, or its end has changed"
        )
    inner = text[len(prefix) : end.start()]
    digest = hashlib.sha256(inner).hexdigest()
    if end[1] != digest.encode():
        raise CheckpointDamaged(
            f"{where} has the SHA-256 {digest} and says {end[1].decode('ascii', 'replace')}: some of its"
            f" {len(text)} bytes have changed"
        )
    return Sealed(inner, where, len(prefix), digest, bytes.fromhex((end[2] or b"").decode()))


def document_of(value: object) -> Any:
    """A dataclass as JSON; also a tuple of them, an enum, or a plain value."""
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, tuple):
        return [document_of(each) for each in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {name: _document(getattr(value, name), hint) for name, hint in _hints(type(value)).items()}


def _document(value: Any, hint: object) -> Any:
    """Numbers of a float field are written with a point, as `reals` reads them."""
    if hint is float:
        return float(value)
    return [float(each) for each in value] if hint == tuple[float, ...] else document_of(value)


_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


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
            raise CheckpointDamaged(f"{file} is not JSON at byte {at + error.pos}: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointDamaged(f"{file} is not the JSON that was written: {str(error)[:200]}") from error

    def refuse(self, expected: str) -> NoReturn:
        raise CheckpointDamaged(f"{self.file}: {self.place or 'it'} is {str(self.value)[:200]!r}; expected {expected}")

    def to(self, kind: type[T], *, signed: Collection[str] = ()) -> T:
        """The dataclass that such an object describes. Whole numbers are at least 0, but for the `signed` fields."""
        hints = _hints(kind)
        fields = self.fields(hints)
        values = {
            name: fields[name].number(_UINT64_MAX, least=-_UINT64_MAX)
            if name in signed
            else fields[name].value_of(hint)
            for name, hint in hints.items()
        }
        try:
            return kind(**values)
        except InvalidRequest as error:
            raise CheckpointDamaged(f"{self.file}: {self.place}: {error.what}") from error

    def value_of(self, hint: Any) -> Any:
        """The value of a field that is declared so."""
        if hint is int:
            return self.number()
        if hint is float:
            return self.real()
        if hint is bool:
            return self.flag()
        if hint is str:
            return self.text(_NAME, f"1 to {VARIABLE_NAME_CHARACTERS_MAX} characters")
        if hint == tuple[int, ...]:
            return self.numbers(_LIST_MAX)
        if hint == tuple[float, ...]:
            return self.reals(_LIST_MAX)
        if typing.get_origin(hint) is tuple:
            return tuple([each.value_of(typing.get_args(hint)[0]) for each in self.items(_LIST_MAX)])
        return self.choice(hint) if issubclass(hint, enum.Enum) else self.to(hint)

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
        for index, value in enumerate(self._list(length_max)):
            yield JsonNode(value, self.file, f"{self.place}[{index}]")

    def number(self, highest: int = SEQUENCE_MAX, *, least: int = 0) -> int:
        if type(self.value) is not int or not least <= self.value <= highest:
            self.refuse(f"a whole number from {least} to {highest}")
        return self.value

    def numbers(self, length_max: int) -> tuple[int, ...]:
        """A list of whole numbers."""
        found = self._list(length_max)
        if not all(type(each) is int and 0 <= each <= SEQUENCE_MAX for each in found):
            self.refuse(f"whole numbers from 0 to {SEQUENCE_MAX}")
        return tuple(found)

    def real(self) -> float:
        if type(self.value) is not float:
            self.refuse("a number with a point")
        return self.value

    def reals(self, length_max: int) -> tuple[float, ...]:
        found = self._list(length_max)
        if not all(type(each) is float for each in found):
            self.refuse("numbers with a point")
        return tuple(found)

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            self.refuse("true or false")
        return self.value

    def text(self, pattern: re.Pattern[str], expected: str) -> str:
        if not isinstance(self.value, str) or not pattern.fullmatch(self.value):
            self.refuse(expected)
        return self.value

    def choice(self, kind: type[Choice]) -> Choice:
        """The member of an enum with this name, in lower case."""
        members = {each.name.lower(): each for each in kind}
        if not isinstance(self.value, str) or self.value not in members:
            self.refuse(f"one of {', '.join(members)}")
        return members[self.value]

    def time(self) -> str:
        text = self.text(_TIME, "a time")
        try:
            zone = datetime.datetime.fromisoformat(text).tzinfo
        except ValueError:
            zone = None
        if zone is None:
            self.refuse("a time as 2026-01-31T12:00:00+00:00")
        return text

    def written(self, nbytes_max: int) -> Written:
        """The length `nbytes` and the digest `sha256` of a file, from an object."""
        nbytes, digest = (
            JsonNode(self.mapping().get(name), self.file, f"{self.place}.{name}".lstrip("."))
            for name in ("nbytes", "sha256")
        )
        return Written(nbytes.number(nbytes_max), digest.text(_DIGEST, "64 hexadecimal digits"))

    def _list(self, length_max: int) -> list[Any]:
        if not isinstance(self.value, list) or len(self.value) > length_max:
            self.refuse(f"a list of at most {length_max}")
        return self.value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
