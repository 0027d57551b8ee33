"""Structured logging on top of the standard library's: each line has the role, id, job, step and request by itself.

Owns: the two formats, and the fields of each line. Fields come from three places, and a later one wins: the process
(`bind_process`, for all threads), the context (`bind` and `context`, for this thread or task), and `extra` of the call.
Invariants: a JSON line is one line of valid JSON, whatever is logged; a second setup leaves one handler. Must not know:
the models of settings, files, gRPC.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final, TextIO

FORMATS: Final = ("auto", "human", "json")
LEVELS: Final = ("debug", "info", "warning", "error")
CHATTY_LOGGERS: Final = ("numba", "asyncio", "grpc", "concurrent.futures")
"""Libraries with so many debug lines that ours would be lost among them."""
DEPTH_MAX: Final = 4
"""The deepest nesting of a logged value in JSON."""

Fields = Mapping[str, object]

_NONE: Final[Fields] = MappingProxyType({})
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_FIXED: Final = ("time", "level", "logger", "message", "exception", "stack")
_context_fields: ContextVar[Fields] = ContextVar("shardyard_log_fields", default=_NONE)


class ProcessFields:
    """The fields of all lines of a process. They are read without a lock, since the mapping is replaced, never
    changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fields: Fields = _NONE

    @property
    def fields(self) -> Fields:
        return self._fields

    def bind(self, fields: Fields) -> None:
        with self._lock:
            self._fields = _merged(self._fields, fields)

    def clear(self) -> None:
        with self._lock:
            self._fields = _NONE


PROCESS: Final = ProcessFields()
"""Module state, like the loggers of the standard library."""


def setup(format: str, level: str, stream: TextIO | None = None) -> logging.Handler:  # noqa: A002
    """Sends the process's log to `stream` (default: standard error) and returns the handler.

    `format`: one of FORMATS (auto means human). `level`: one of LEVELS. Replaces the handler of an earlier call, and
    does not touch the handlers of others.
    """
    if format not in FORMATS:
        raise ValueError(f"expected a log format of {', '.join(FORMATS)}, got {format!r}")
    if level not in LEVELS:
        raise ValueError(f"expected a log level of {', '.join(LEVELS)}, got {level!r}")
    handler = ShardyardHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if format == "json" else HumanFormatter())
    root = logging.getLogger()
    for earlier in list(root.handlers):
        if isinstance(earlier, ShardyardHandler):
            root.removeHandler(earlier)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    return handler


def bind_process(**fields: object) -> None:
    """Adds fields to every line of the process. None removes a field."""
    PROCESS.bind(fields)


def bind(**fields: object) -> None:
    """Adds fields to the lines of this thread or task, from now on. None removes a field."""
    _context_fields.set(_merged(_context_fields.get(), fields))


@contextlib.contextmanager
def context(**fields: object) -> Iterator[None]:
    """Adds fields to the lines of this thread or task within the block. None removes a field."""
    token = _context_fields.set(_merged(_context_fields.get(), fields))
    try:
        yield
    finally:
        _context_fields.reset(token)


def current_fields() -> dict[str, object]:
    """The fields of a line that is logged here and now."""
    fields = {**PROCESS.fields, **_context_fields.get()}
    return {name: value for name, value in fields.items() if value is not None}


class ShardyardHandler(logging.StreamHandler[TextIO]):
    """Marks the handler that `setup` installed."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, message, then all fields, then a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _fields_of(record).items():
            line[f"{name}_" if name in _FIXED else name] = _plain(value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, allow_nan=False)


class HumanFormatter(logging.Formatter):
    """`12:03:04.123 INFO    worker#2 message step=17`: local time, level, process, message, then the other fields."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = _fields_of(record)
        who = _who(fields, record.name)
        tail = "".join(f" {name}={_quoted(value)}" for name, value in fields.items() if name not in ("role", "id"))
        lines = [f"{time} {record.levelname:<7} {who} {record.getMessage()}{tail}"]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        if record.stack_info:
            lines.append(self.formatStack(record.stack_info))
        return "\n".join(lines)


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    extra = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
    return {**current_fields(), **extra}


def _who(fields: Fields, logger: str) -> str:
    if "role" not in fields:
        return logger if "id" not in fields else f"{logger}#{fields['id']}"
    return f"{fields['role']}#{fields['id']}" if "id" in fields else f"{fields['role']}"


def _quoted(value: object) -> str:
    text = str(value)
    plain = text and not any(character.isspace() or character in '="' for character in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def _plain(value: object, depth: int = 0) -> object:
    """The value as JSON. What JSON does not have, or what is nested too deeply, becomes text."""
    match value:
        case None | bool() | str():
            return value
        case int():
            # numbers with their own notation, such as an incarnation, are written in it
            return value if type(value) is int else str(value)
        case float() if math.isfinite(value):
            return value
        case Mapping() if depth < DEPTH_MAX:
            return {str(name): _plain(each, depth + 1) for name, each in value.items()}
        case list() | tuple() if depth < DEPTH_MAX:
            return [_plain(each, depth + 1) for each in value]
        case _:
            return str(value)


def _merged(old: Fields, new: Fields) -> Fields:
    return MappingProxyType({**old, **new})
