"""Kinds of values that settings take, their bounds, and the base of all sections.

An annotated type checks a value and says in words what it expects (`Expected`). `impossible` is the error for values
that are valid one by one but exclude each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from shardyard.domain import limits
from shardyard.domain.compression import PULL_KINDS, PUSH_KINDS, Rules, parse_pull_rules, parse_push_rules
from shardyard.domain.errors import ConfigurationError

AUTO: Final = "auto"
NEVER: Final = "never"
PORT_MAX: Final = 65_535
DURATION_MS_MAX: Final = 3_600_000
IMPOSSIBLE_RELATION: Final = "impossible_relation"
EXPLAINED_VALUE: Final = "explained_value"
"""Types of errors: values that exclude each other, and a value whose check says itself what is wrong."""

_JOB_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{limits.JOB_NAME_CHARACTERS_MAX - 1}}}")
_FOLDERS = re.compile(r"(/\S*( +/\S*)*)?")
_VARIABLES = re.compile(r"[A-Za-z0-9_* ]*")
_ONE_DEVICE = r"(cpu|cuda|cuda:(0|[1-9][0-9]{0,3}))"
_DEVICE = re.compile(rf"auto|{_ONE_DEVICE}( {_ONE_DEVICE})*")
_PORT = re.compile(r"[0-9]{1,5}")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.%a-z]{2,64}\]")

_NOTICE_PLACE = re.compile(r"never|https?://[^\s/][^\s]{0,2047}|/[^\0]{1,2047}")


@dataclass(frozen=True, slots=True)
class Expected:
    """What a text setting takes, in words. Error messages and the documentation quote it."""

    words: str


def _matching(pattern: re.Pattern[str]) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError("not of the expected form")
        return text

    return AfterValidator(check)


def _check_address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text and not (_HOST.fullmatch(host) and _PORT.fullmatch(port) and 1 <= int(port) <= PORT_MAX):
        raise ValueError("not HOST:PORT")
    return text


def _parsed_by(parse: Callable[[str], Rules]) -> AfterValidator:
    def check(text: str) -> str:
        try:
            parse(text)
        except ConfigurationError as error:
            context = {"expected": error.facts["expected"], "got": error.facts["got"], "message": error.what}
            raise PydanticCustomError(EXPLAINED_VALUE, "{message}", context) from error
        return text

    return AfterValidator(check)


Address = Annotated[
    str,
    AfterValidator(_check_address),
    Expected(f'HOST:PORT with a port from 1 to {PORT_MAX}, or "" for none'),
]
Host = Annotated[str, _matching(_HOST), Expected("a host name or IP address, without a port (IPv6 in brackets)")]
Folder = Annotated[str, Field(min_length=1, max_length=limits.TEXT_CHARACTERS_MAX), Expected("the path of a folder")]
FolderOrNone = Annotated[
    str, Field(max_length=limits.TEXT_CHARACTERS_MAX), Expected('the path of a folder, or "" for none')
]
FileOrNone = Annotated[
    str, Field(max_length=limits.TEXT_CHARACTERS_MAX), Expected('the path of a file, or "" for none')
]
Places = Annotated[
    str,
    Field(max_length=limits.TEXT_CHARACTERS_MAX),
    Expected('folders and URLs, parted by spaces, or "" for no restriction'),
]
Folders = Annotated[
    str,
    _matching(_FOLDERS),
    Field(max_length=limits.TEXT_CHARACTERS_MAX),
    Expected('absolute paths of folders, parted by spaces, or "" for no restriction'),
]
ModuleNames = Annotated[
    str, Field(max_length=limits.TEXT_CHARACTERS_MAX), Expected('names of modules, parted by spaces, or "" for auto')
]
VariableNames = Annotated[
    str,
    _matching(_VARIABLES),
    Field(max_length=limits.TEXT_CHARACTERS_MAX),
    Expected('auto, or names of environment variables, parted by spaces, in which "*" stands for any characters'),
]
CheckpointUrl = Annotated[
    str,
    Field(min_length=1, max_length=limits.TEXT_CHARACTERS_MAX),
    Expected("auto, never, the path of a folder, or a URL"),
]
BestUrl = Annotated[
    str, Field(min_length=1, max_length=limits.TEXT_CHARACTERS_MAX), Expected("auto, the path of a folder, or a URL")
]
Backend = Annotated[str, Field(min_length=1, max_length=64), Expected("the name of a backend of torch.distributed")]
JobName = Annotated[
    str,
    _matching(_JOB_NAME),
    Expected(
        f'1 to {limits.JOB_NAME_CHARACTERS_MAX} letters, digits, ".", "_" or "-", beginning with a letter or digit'
    ),
]
NoticePlace = Annotated[
    str, _matching(_NOTICE_PLACE), Expected("never, an absolute path, or an http:// or https:// URL")
]
Device = Annotated[str, _matching(_DEVICE), Expected("auto, or devices parted by spaces: cpu, cuda, cuda:N")]
_CODING = "{}, or rules PATTERN=CODEC parted by spaces (docs/guides/compression.md)"
PushCoding = Annotated[str, _parsed_by(parse_push_rules), Expected(_CODING.format(", ".join(PUSH_KINDS)))]
PullCoding = Annotated[str, _parsed_by(parse_pull_rules), Expected(_CODING.format(", ".join(PULL_KINDS)))]
Part = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), Expected("a number from 0 to below 1")]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), Expected("a number from 0 to 1")]
Norm = Annotated[float, Field(ge=0, allow_inf_nan=False), Expected("a number from 0")]
Strength = Annotated[float, Field(ge=0, allow_inf_nan=False), Expected("a number from 0")]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False), Expected("a number above 0")]
DEATHS_MAX = 1_000
Auto = Literal["auto"]


def _check_deaths(number: int) -> int:
    if number == 1:
        raise ValueError("a worker dies for many reasons; one death proves nothing")
    return number


Deaths = Annotated[
    int,
    Field(ge=0, le=DEATHS_MAX),
    AfterValidator(_check_deaths),
    Expected(f"0, or a whole number from 2 to {DEATHS_MAX}"),
]


class Section(BaseModel):
    """The base of all sections: frozen, strict, without unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def impossible(names: tuple[str, ...], expected: str, got: str) -> PydanticCustomError:
    """The error for values that exclude each other. `names`: fields of the section that raises it."""
    message = f"{' and '.join(names)}: expected {expected}, got {got}"
    context = {"names": names, "expected": expected, "got": got, "message": message}
    return PydanticCustomError(IMPOSSIBLE_RELATION, "{message}", context)
