"""Combines settings from defaults, a file, the environment and flags. A later one wins.

Owns: the order of the layers, the names of environment variables, the origin of each value, the explanation of all
values. Invariants: each value is checked, also one that a later layer overrides. One ConfigurationError reports all
problems of all layers, one line each, with place, dotted name, what was expected and what was given. An empty
environment variable and a flag of None count as not given.
Must not know: os.environ and click (callers pass mappings), what a setting does.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardyard.config.assignments import Assignment, Layer, Origin, from_text, mismatch, nearest, problem_of, unknown
from shardyard.config.settings import IMPOSSIBLE_RELATION, Catalogue, JobSettings, Settings, catalogue
from shardyard.config.settings_file import read_settings_file
from shardyard.domain import limits
from shardyard.domain.errors import ConfigurationError

PREFIX: Final = "SHARDYARD_"
LONG_PREFIX: Final = "SHARDYARD__"
SHORT_NAMES: Final[Mapping[str, str]] = {
    "SHARDYARD_COORDINATOR": "coordinator",
    "SHARDYARD_JOB": "job.name",
    "SHARDYARD_WORKERS": "job.workers_expected",
}
"""Environment variables with a short name, and their settings."""
CONFIG_VARIABLE: Final = "SHARDYARD_CONFIG"
"""The variable with the path of the settings file. Callers read it and pass the path to `load`."""
RUN_ID_VARIABLE: Final = "SHARDYARD_RUN_ID"
"""Names the launch that a training process belongs to, over all its restarts."""
RUN_NUMBER_VARIABLE: Final = "SHARDYARD_RUN_NUMBER"
PID_VARIABLE: Final = "SHARDYARD_PID"
"""The process that an agent started, to tell it from those that its script starts."""
PROCESS_VARIABLES: Final = frozenset(
    {
        CONFIG_VARIABLE,
        "SHARDYARD_AGENT",
        "SHARDYARD_LOCAL_INDEX",
        "SHARDYARD_ERROR_FILE",
        PID_VARIABLE,
        RUN_ID_VARIABLE,
        RUN_NUMBER_VARIABLE,
        "SHARDYARD_FOLLOWS",
    }
)
"""Variables that tell a training process about itself. They are not settings. An agent sets them."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A value from the command line or a program, and where it was given (`--servers`, `the argument job`)."""

    value: object
    spelled: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, the origin of each value by dotted path, and warnings that the caller should log."""

    settings: Settings
    origins: Mapping[str, Origin]
    notices: tuple[str, ...] = ()


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Loaded:
    """Settings from all layers: default < file < environment < flag.

    `flags` maps a dotted path to a `Flag`, or to a plain value, which messages call --like-its-path. Text from the
    environment or a flag is read as a YAML scalar, unless the setting is text. Raises ConfigurationError.
    """
    known = catalogue()
    problems: list[str] = []
    assignments: list[Assignment] = []
    if file is not None:
        reading = read_settings_file(file, known)
        assignments += reading.assignments
        problems += reading.problems
    named, notices = _name_variables(environment or {}, known, problems)
    assignments += _checked(named, known, problems)
    assignments += _checked(_name_flags(flags or {}, known, problems), known, problems)
    if problems:
        raise _configuration_error(problems)
    winning = {assignment.path: assignment for assignment in assignments}
    origins = {path: winning[path].origin if path in winning else Origin(Layer.DEFAULT) for path in known.settings}
    return Loaded(_build(winning, origins), origins, tuple(notices))


def parse_set(text: str) -> tuple[str, Flag]:
    """Reads `--set job.seed=3` into a path and a value for `load`. Raises ConfigurationError."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path:
        raise _configuration_error([f'flag --set: expected NAME=VALUE, such as job.seed=3, got "{text}"'])
    return path, Flag(value.strip(), f"--set {path}")


def parse_job_settings(text: str) -> JobSettings:
    """Reads the job section that another process sent as JSON. Raises ConfigurationError."""
    if len(text.encode()) > limits.SETTINGS_BYTES_MAX:
        raise _configuration_error([f"job settings (JSON): expected at most {limits.SETTINGS_BYTES_MAX} bytes"])
    try:
        return JobSettings.model_validate_json(text)
    except ValidationError as error:
        known = catalogue()
        problems = [_json_problem(detail, known) for detail in error.errors(include_url=False)]
        raise _configuration_error(
            [f"job settings (JSON): {problem}" for problem in dict.fromkeys(problems)]
        ) from error


def environment_name(path: str) -> str:
    """The environment variable for a dotted path: SHARDYARD__JOB__SEED for job.seed."""
    return LONG_PREFIX + path.upper().replace(".", "__")


def render_explanation(loaded: Loaded) -> str:
    """All settings as a plain table of aligned columns."""
    rows = [("SETTING", "VALUE", "FROM", "WHAT IT IS")]
    rows += [
        (path, written(_value_at(loaded.settings, path)), str(loaded.origins[path]), setting.description)
        for path, setting in catalogue().settings.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3])) for row in rows
    ]
    return "\n".join(lines) + "\n"


def written(value: object) -> str:
    """The value of a setting as it is written in a file."""
    text = str(getattr(value, "value", value))
    return text or '""'


def _name_variables(
    environment: Mapping[str, str], known: Catalogue, problems: list[str]
) -> tuple[list[Assignment], list[str]]:
    """Assignments from the environment, and notices about variables that look like settings but are not."""
    long_names = {environment_name(path): path for path in known.settings}
    found: dict[str, Assignment] = {}
    notices: list[str] = []
    for name in sorted(environment):
        text = environment[name]
        if not name.startswith(PREFIX) or name in PROCESS_VARIABLES or not text:
            continue
        path = long_names.get(name) or SHORT_NAMES.get(name)
        if path is None:
            said = f"environment {name}: unknown variable; {_nearest_variable(name, known)}"
            (problems if name.startswith(LONG_PREFIX) else notices).append(said)
            continue
        assignment = Assignment(path, from_text(known.settings[path], text), Origin(Layer.ENVIRONMENT, name))
        other = found.setdefault(path, assignment)
        if other.value != assignment.value:
            problems.append(
                f"environment {name}: {path}: expected the value of {other.origin.place},"
                f' "{environment[other.origin.place]}", got "{text}"; unset one of the two'
            )
    return list(found.values()), notices


def _nearest_variable(name: str, known: Catalogue) -> str:
    if name.startswith(LONG_PREFIX):
        near = nearest(name.removeprefix(LONG_PREFIX).replace("__", ".").lower(), known)
        if near is not None and near in known.settings:
            return f"did you mean {environment_name(near)}?"
    names = {each.removeprefix(PREFIX): each for each in (*SHORT_NAMES, *sorted(PROCESS_VARIABLES))}
    close = difflib.get_close_matches(name.removeprefix(PREFIX).strip("_"), list(names), n=1)
    return f"did you mean {names[close[0]]}?" if close else "docs/reference/configuration.md lists all names"


def _name_flags(flags: Mapping[str, object], known: Catalogue, problems: list[str]) -> list[Assignment]:
    found: list[Assignment] = []
    for path, given in flags.items():
        flag = given if isinstance(given, Flag) else Flag(given, "--" + path.replace(".", "-").replace("_", "-"))
        origin = Origin(Layer.FLAG, flag.spelled)
        if flag.value is None:
            continue
        if path not in known.settings:
            problems.append(f"{origin}: {unknown(path, known)}")
            continue
        value = from_text(known.settings[path], flag.value) if isinstance(flag.value, str) else flag.value
        found.append(Assignment(path, value, origin))
    return found


def _checked(assignments: Iterable[Assignment], known: Catalogue, problems: list[str]) -> list[Assignment]:
    """The assignments with valid values. The others become problems."""
    right: list[Assignment] = []
    for assignment in assignments:
        problem = problem_of(known.settings[assignment.path], assignment)
        if problem is None:
            right.append(assignment)
        else:
            problems.append(problem)
    return right


def _build(winning: Mapping[str, Assignment], origins: Mapping[str, Origin]) -> Settings:
    """Builds settings from values that are valid one by one. They may still not fit together."""
    nested: dict[str, Any] = {}
    for path, assignment in winning.items():
        *sections, name = path.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = assignment.value
    try:
        return Settings.model_validate(nested)
    except ValidationError as error:
        problems = []
        for detail in error.errors(include_url=False):
            assert detail["type"] == IMPOSSIBLE_RELATION, detail
            section = ".".join(str(step) for step in detail["loc"])
            context = detail["ctx"]
            paths = [f"{section}.{name}" for name in context["names"]]
            named = " and ".join(f"{path} ({origins[path]})" for path in paths)
            problems.append(f"{named}: expected {context['expected']}, got {context['got']}")
        raise _configuration_error(problems) from error


def _json_problem(detail: ErrorDetails, known: Catalogue) -> str:
    steps = ["job", *(str(step) for step in detail["loc"])]
    path = ".".join(steps)
    if detail["type"] == "extra_forbidden":
        return unknown(path, known)
    # pydantic appends the member of a union that it tried
    setting = known.settings.get(path) or known.settings.get(".".join(steps[:-1]))
    return mismatch(setting, detail["input"], detail) if setting else f"{path}: {detail['msg']}"


def _value_at(settings: Settings, path: str) -> object:
    value: object = settings
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _configuration_error(problems: list[str]) -> ConfigurationError:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = "\n".join(f"  {problem}" for problem in problems)
    return ConfigurationError(
        f"{count} in the settings (docs/reference/configuration.md lists them all):\n{lines}", why=""
    )
