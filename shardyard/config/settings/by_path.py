"""The catalogue of all settings by dotted path, for the documentation and for error messages."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

from shardyard.config.settings.process import Settings
from shardyard.config.settings.values import Expected, Section


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as the documentation and error messages show it. `adapter` checks a value strictly."""

    path: str
    description: str
    default: object
    expected: str
    is_text: bool
    adapter: TypeAdapter[object]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All settings by dotted path, in the order of the models. `sections`: the dotted paths of the sections."""

    settings: Mapping[str, Setting]
    sections: tuple[str, ...]


@functools.cache
def catalogue() -> Catalogue:
    """The catalogue. It is built once in a process."""
    settings: dict[str, Setting] = {}
    sections: list[str] = []
    _collect(Settings, "", settings, sections)
    return Catalogue(MappingProxyType(settings), tuple(sections))


def _collect(model: type[BaseModel], prefix: str, settings: dict[str, Setting], sections: list[str]) -> None:
    for name, info in model.model_fields.items():
        path = prefix + name
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            sections.append(path)
            _collect(info.annotation, path + ".", settings, sections)
        else:
            settings[path] = _setting(path, info)


def _setting(path: str, info: FieldInfo) -> Setting:
    kind: Any = info.annotation
    checked: Any = Annotated[(kind, *info.metadata)] if info.metadata else kind
    return Setting(
        path=path,
        description=info.description or "",
        default=info.get_default(call_default_factory=True),
        expected=_expected(kind, info.metadata),
        is_text=kind is str,
        adapter=TypeAdapter(checked, config=ConfigDict(strict=True)),
    )


def _expected(kind: Any, metadata: list[Any]) -> str:
    for item in metadata:
        if isinstance(item, Expected):
            return item.words
    if get_origin(kind) is Annotated:
        bare, *inner = get_args(kind)
        return _expected(bare, [each for info in inner for each in info.metadata])
    if get_origin(kind) is Literal:
        return _one_of([str(choice) for choice in get_args(kind)])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _one_of([choice.value for choice in kind])
    if kind is bool:
        return "true or false"
    if kind is int:
        return _whole_number(metadata)
    return " or ".join(_expected(choice, []) for choice in get_args(kind))


def _one_of(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)


def _whole_number(metadata: list[Any]) -> str:
    words = "a whole number"
    for item in metadata:
        match item:
            case annotated_types.Ge(ge=low):
                words += f" from {low}"
            case annotated_types.Le(le=high):
                words += f" to {high}"
            case annotated_types.MultipleOf(multiple_of=unit):
                words += f", a multiple of {unit}"
    return words
