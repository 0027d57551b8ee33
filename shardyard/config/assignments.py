"""A value for a setting, the place that it came from, and what is wrong with it.

Owns: origins, reading text as a YAML scalar, checking one value, finding the nearest known name. Invariants: a problem
is one line that begins with its place; a long value does not make a long message.
Must not know: files, the environment, command lines (settings_file and configuration do).
"""

from __future__ import annotations

import difflib
import enum
import re
from dataclasses import dataclass
from typing import Final

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardyard.config.settings import EXPLAINED_VALUE, Catalogue, Setting

VALUE_CHARACTERS_MAX: Final = 60

_TAGS = frozenset(tag for tag in yaml.constructor.SafeConstructor.yaml_constructors if tag is not None)
_INTEGER_TAG: Final = "tag:yaml.org,2002:int"
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*)")


class Layer(enum.IntEnum):
    """Where values come from. A higher layer wins."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    FLAG = 3


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was given. `place`: FILE:LINE, the name of a variable, a flag as it was typed, or another place
    in words."""

    layer: Layer
    place: str = ""

    def __str__(self) -> str:
        match self.layer:
            case Layer.DEFAULT:
                return "default"
            case Layer.FILE:
                return self.place
            case Layer.ENVIRONMENT:
                return f"environment {self.place}"
            case Layer.FLAG:
                return f"flag {self.place}" if self.place.startswith("-") else self.place


@dataclass(frozen=True, slots=True)
class Assignment:
    path: str
    value: object
    origin: Origin


def from_text(setting: Setting, text: str) -> object:
    """The value of `text` for `setting`: the text itself if the setting is text, otherwise the YAML scalar."""
    return text if setting.is_text else scalar(text)


def scalar(text: str) -> object:
    """The YAML scalar in `text`, or the text itself if it is not a scalar."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return text
    return construct(node) if isinstance(node, yaml.ScalarNode) else text


def is_plain(node: yaml.ScalarNode) -> bool:
    """Whether the node has one of YAML's own tags. Other tags name types of programs, which no setting has."""
    return node.tag in _TAGS


def construct(node: yaml.ScalarNode) -> object:
    """The value of a plain scalar node. Text that its tag cannot read (2020-13-01) stays text. So do whole numbers that
    are not decimal: YAML 1.1 reads 1:30 as 90 and 010 as 8, which users do not expect."""
    if not is_plain(node) or (node.tag == _INTEGER_TAG and not _INTEGER.fullmatch(node.value)):
        return node.value
    constructor = yaml.constructor.SafeConstructor()
    try:
        value: object = constructor.construct_object(node)
    except (ValueError, yaml.YAMLError):
        return node.value
    return value


def problem_of(setting: Setting, assignment: Assignment) -> str | None:
    """One line that says what is wrong with the value by itself, or None."""
    try:
        setting.adapter.validate_python(assignment.value)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        return f"{assignment.origin}: {mismatch(setting, assignment.value, detail)}"
    return None


def mismatch(setting: Setting, value: object, detail: ErrorDetails) -> str:
    if detail["type"] == EXPLAINED_VALUE:
        return f"{setting.path}: expected {detail['ctx']['expected']}, got {detail['ctx']['got']}"
    hint = "; put it in quotes" if setting.is_text and not isinstance(value, str) else ""
    return f"{setting.path}: expected {setting.expected}, got {shown(value)}{hint}"


def shown(value: object) -> str:
    """A value for a message, with its kind if that is not obvious."""
    match value:
        case None:
            return "nothing"
        case bool():
            return f"{str(value).lower()} (yes or no)"
        case str():
            text, kind = f'"{value}"', "text"
        case int():
            return f"{value}" if abs(value) < 10**VALUE_CHARACTERS_MAX else "a number too large"
        case _:
            text, kind = str(value), type(value).__name__
    if len(text) > VALUE_CHARACTERS_MAX:
        text = text[: VALUE_CHARACTERS_MAX - 3] + "..."
    return f"{text.encode('unicode_escape').decode('ascii')} ({kind})"


def unknown(path: str, catalogue: Catalogue) -> str:
    """The problem of a dotted path that is not a setting. Names the nearest known path, or those of the section."""
    near = nearest(path, catalogue)
    if near is not None:
        return f"{_cut(path)}: unknown setting; did you mean {near}?"
    section = path.rpartition(".")[0]
    return f"{_cut(path)}: unknown setting; expected one of {', '.join(_siblings(section, catalogue))}"


def nearest(path: str, catalogue: Catalogue) -> str | None:
    """The known path nearest to an unknown one: the same name in another section, or a similar spelling."""
    path = path[: 4 * VALUE_CHARACTERS_MAX]
    section, _, name = path.rpartition(".")
    known = (*catalogue.settings, *catalogue.sections)
    by_name = {each.rpartition(".")[2]: each for each in reversed(list(catalogue.settings))}
    if name in by_name:
        return by_name[name]
    siblings = {each.rpartition(".")[2]: each for each in _siblings(section, catalogue)}
    everywhere = {each: each for each in known}
    for wanted, candidates in ((name, siblings), (name, by_name), (path, everywhere)):
        close = difflib.get_close_matches(wanted, list(candidates), n=1)
        if close:
            return candidates[close[0]]
    return None


def _siblings(section: str, catalogue: Catalogue) -> list[str]:
    known = (*catalogue.settings, *catalogue.sections)
    return [each for each in known if each.rpartition(".")[0] == section] or list(known)


def _cut(path: str) -> str:
    text = path if len(path) <= 2 * VALUE_CHARACTERS_MAX else path[: 2 * VALUE_CHARACTERS_MAX] + "..."
    return text.encode("unicode_escape").decode("ascii")
