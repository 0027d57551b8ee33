"""Reads a settings file: from YAML to assignments, each with its line.

Owns: the limits and the form of the file. Invariants: only plain scalars are built from the file, whatever its tags
say; one reading finds all problems; each problem names file, line and dotted key. Must not know: the other layers, and
which of them wins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import yaml

from shardyard.config.assignments import Assignment, Layer, Origin, construct, is_plain, problem_of, unknown
from shardyard.config.settings import Catalogue
from shardyard.domain import limits


@dataclass(slots=True)
class FileReading:
    """The assignments of a file, and its problems, in the order of its lines."""

    assignments: list[Assignment] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_settings_file(file: Path, catalogue: Catalogue) -> FileReading:
    reading = FileReading()
    try:
        with file.open("rb") as stream:
            content = stream.read(limits.SETTINGS_BYTES_MAX + 1)
    except FileNotFoundError:
        reading.problems.append(f"{file}: no such file; expected a YAML file of settings")
        return reading
    except OSError as error:
        reading.problems.append(f"{file}: cannot be read: {error.strerror}; expected a YAML file of settings")
        return reading
    if len(content) > limits.SETTINGS_BYTES_MAX:
        reading.problems.append(f"{file}: too large; expected at most {limits.SETTINGS_BYTES_MAX} bytes of settings")
        return reading
    root = _compose(content, file, reading)
    if root is None:
        return reading
    if not isinstance(root, yaml.MappingNode):
        reading.problems.append(
            f"{file}:{_line(root)}: expected a mapping of settings (name: value), got {_node_kind(root)}"
        )
        return reading
    _walk(root, "", file, catalogue, reading)
    return reading


def _compose(content: bytes, file: Path, reading: FileReading) -> yaml.Node | None:
    try:
        text = content.decode("utf-8")
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        return node
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        reading.problems.append(f"{file}:{line}: expected UTF-8 text, got byte 0x{content[error.start]:02x}")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}" if mark else f"{file}"
        while_ = f" {error.context}:" if error.context else ""
        reading.problems.append(f"{place}: not YAML:{while_} {error.problem}")
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        reading.problems.append(f"{file}:{line}: not YAML: {error.reason} (#x{error.character:04x})")
    except RecursionError:
        reading.problems.append(f"{file}: nested too deeply; expected sections of settings")
    return None


def _walk(mapping: yaml.MappingNode, prefix: str, file: Path, catalogue: Catalogue, reading: FileReading) -> None:
    first_lines: dict[str, int] = {}
    for key, value in mapping.value:
        place = f"{file}:{_line(key)}"
        if not isinstance(key, yaml.ScalarNode):
            reading.problems.append(f"{place}: expected the name of a setting, got {_node_kind(key)}")
            continue
        path = prefix + key.value
        if key.value in first_lines:
            reading.problems.append(f"{place}: {path}: given twice, first on line {first_lines[key.value]}; keep one")
            continue
        first_lines[key.value] = _line(key)
        if path in catalogue.sections:
            _section(value, path, place, file, catalogue, reading)
        elif path in catalogue.settings:
            _leaf(value, path, place, catalogue, reading)
        else:
            reading.problems.append(f"{place}: {unknown(path, catalogue)}")


def _section(value: yaml.Node, path: str, place: str, file: Path, catalogue: Catalogue, reading: FileReading) -> None:
    if isinstance(value, yaml.MappingNode):
        _walk(value, path + ".", file, catalogue, reading)
    elif value.tag != "tag:yaml.org,2002:null":  # a section with only comments is empty, which is allowed
        reading.problems.append(f"{place}: {path}: expected a mapping of settings, got {_node_kind(value)}")


def _leaf(value: yaml.Node, path: str, place: str, catalogue: Catalogue, reading: FileReading) -> None:
    setting = catalogue.settings[path]
    if not isinstance(value, yaml.ScalarNode):
        reading.problems.append(f"{place}: {path}: expected {setting.expected}, got {_node_kind(value)}")
        return
    if not is_plain(value):
        reading.problems.append(f"{place}: {path}: expected {setting.expected}, got a value tagged {value.tag}")
        return
    assignment = Assignment(path, construct(value), Origin(Layer.FILE, place))
    problem = problem_of(setting, assignment)
    if problem is None:
        reading.assignments.append(assignment)
    else:
        reading.problems.append(problem)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _node_kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
