"""The tree of errors: what its docstring draws, what a message says, and that errors survive a pickle."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from shardyard.domain import errors
from shardyard.domain.errors import ShardyardError

CLASSES = sorted(errors.BY_CODE.items())


def drawn() -> dict[str, str]:
    """Child to parent, as the module's docstring draws them."""
    parents: dict[str, str] = {}
    path: list[str] = ["ShardyardError"]
    for line in (errors.__doc__ or "").splitlines():
        stem = re.match(r"^    ((?:\|   )*)\|-- (.*)$", line)
        if stem is None:
            continue
        depth = len(stem[1]) // 4 + 1
        # names stand apart from what is said about them: one space between the words of a sentence, two between names
        names = [name for name in re.split(r"\s{2,}", stem[2].strip()) if re.fullmatch(r"[A-Z]\w+", name)]
        for name in names:
            parents[name] = path[depth - 1]
        path = [*path[:depth], names[-1]]
    return parents


def test_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    actual = {name: kind.__mro__[1].__name__ for name, kind in errors.BY_CODE.items() if kind is not ShardyardError}
    assert drawn() == actual


def test_every_error_of_the_module_has_a_code_of_its_own() -> None:
    defined = {
        name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, ShardyardError)
    }
    assert defined == errors.BY_CODE
    assert len({kind("x").code for kind in defined.values()}) == len(defined)


@pytest.mark.parametrize(("code", "kind"), CLASSES)
def test_message_says_what_why_and_what_to_do(code: str, kind: type[ShardyardError]) -> None:
    error = kind("partition 3 is gone")
    assert error.code == code
    assert str(error).startswith("partition 3 is gone.")
    if kind.why:
        assert f"Why: {kind.why}." in str(error)
    if kind.todo:
        assert f"What to do: {kind.todo}." in str(error)
    told = kind("what?", why="because!", todo="do so.", facts={"a": "b"})
    assert str(told) == "what? Why: because! What to do: do so."
    assert str(kind("what", why="", todo="")) == "what."


def test_every_error_says_why() -> None:
    assert [code for code, kind in CLASSES if not kind.why] == ["Refused", "ShardyardError"]


def test_every_error_but_the_widest_says_what_to_do() -> None:
    silent = ["ConfigurationError", "InvalidRequest", "Refused", "ShardyardError"]
    assert [code for code, kind in CLASSES if not kind.todo] == silent


@pytest.mark.parametrize(("code", "kind"), CLASSES)
def test_error_survives_a_pickle_a_copy_and_the_wire(code: str, kind: type[ShardyardError]) -> None:
    error = kind("what", why="its own why", todo="", facts={"partition": "3"})
    rebuilt = errors.rebuild(code, error.what, error.why_text, error.todo_text, error.facts)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), rebuilt):
        assert type(again) is kind
        assert vars(again) == vars(error)
        assert str(again) == str(error)


def test_unknown_code_is_rebuilt_as_the_base() -> None:
    again = errors.rebuild("FromTheFuture", "what", "why", "todo", {"a": "b"})
    assert type(again) is ShardyardError
    assert str(again) == "what. Why: why. What to do: todo."
    assert again.facts == {"a": "b"}


def test_facts_are_the_errors_own() -> None:
    facts = {"a": "b"}
    error = errors.NotFound("x", facts=facts)
    facts["a"] = "c"
    assert error.facts == {"a": "b"}


def test_new_process_helps_exactly_where_the_yard_is_lost() -> None:
    assert {code for code, kind in CLASSES if kind.new_process_helps} == {
        "StaleIncarnation",
        "CoordinatorLost",
        "NotReady",
        "Unavailable",
        "CoordinatorUnavailable",
        "ServerUnavailable",
        "DeadlineExceeded",
    }
