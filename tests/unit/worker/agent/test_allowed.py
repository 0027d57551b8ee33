"""What an agent may be told to start: agent.allow and agent.variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardyard.config import configuration
from shardyard.config.settings import AgentSettings
from shardyard.domain import errors
from shardyard.transport.interfaces import Context
from shardyard.wire import methods
from shardyard.wire.v1 import agent_pb2 as wire
from shardyard_worker.agent.allowed import Allowed
from shardyard_worker.agent.service import AgentPlan, AgentService

CALLER = Context(peer="in-process", is_active=lambda: True)


def script(folder: Path, name: str = "train.py") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("print('ran')\n")
    return path


def test_only_scripts_below_the_folders_are_started(tmp_path: Path) -> None:
    one, two, other = (script(tmp_path / name) for name in ("one", "two", "other"))
    allowed = Allowed(AgentSettings(allow=f"{one.parent} {two.parent}"))
    allowed.check_script(one)
    allowed.check_script(two)
    for path in (other, one.parent / ".." / "other" / "train.py", script(tmp_path / "one-more")):
        with pytest.raises(errors.NotPermitted, match=r"starts scripts below .*one and .*two only"):
            allowed.check_script(path)


def test_link_out_of_a_folder_is_followed_before_it_is_judged(tmp_path: Path) -> None:
    outside = script(tmp_path / "outside")
    inside = script(tmp_path / "inside", "own.py")
    (inside.parent / "link.py").symlink_to(outside)
    (tmp_path / "same").symlink_to(inside.parent)
    allowed = Allowed(AgentSettings(allow=str(tmp_path / "same")))
    allowed.check_script(inside)
    with pytest.raises(errors.NotPermitted, match=r"link\.py"):
        allowed.check_script(inside.parent / "link.py")


def test_without_folders_any_script_and_variable_is_allowed(tmp_path: Path) -> None:
    allowed = Allowed(AgentSettings())
    allowed.check_script(script(tmp_path))
    allowed.check_variables({"PYTHONPATH": "/x", "LD_PRELOAD": "/x.so"})


def test_variables_are_allowed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    strict = Allowed(AgentSettings(allow=str(tmp_path)))
    strict.check_variables({"SHARDYARD__JOB__NAME": "a", "HOME": "/home/ada"})
    with pytest.raises(errors.NotPermitted, match=r"variables HOME LD_PRELOAD PYTHONPATH\."):
        strict.check_variables({"PYTHONPATH": "/x", "LD_PRELOAD": "/x.so", "HOME": "/tmp", "SHARDYARD_JOB": "a"})
    some = Allowed(AgentSettings(allow=str(tmp_path), variables="EPOCHS MODEL_*"))
    some.check_variables({"EPOCHS": "3", "MODEL_SIZE": "9", "MODEL_": ""})
    for name in ("EPOCHS_", "MODEL", "A_MODEL_A", "epochs"):
        with pytest.raises(errors.NotPermitted, match=name):
            some.check_variables({name: "1"})
    Allowed(AgentSettings(allow=str(tmp_path), variables="*")).check_variables({"LD_PRELOAD": "/x.so"})
    with pytest.raises(errors.NotPermitted):
        Allowed(AgentSettings(variables="EPOCHS")).check_variables({"LD_PRELOAD": "/x.so"})


def test_agent_starts_nothing_that_is_not_allowed(tmp_path: Path) -> None:
    inside, outside = script(tmp_path / "inside"), script(tmp_path / "outside")
    settings = configuration.load(None, {}, {"agent.allow": str(inside.parent)}).settings
    agent = AgentService(
        AgentPlan("127.0.0.1:1", 1, tmp_path / "state", allowed=Allowed(settings.agent)),
        incarnation=lambda: 3,
        report_exit=lambda pid, code: None,
    )
    launch = agent.service.handlers[methods.LAUNCH]
    try:
        with pytest.raises(errors.NotPermitted, match="outside"):
            launch(wire.LaunchRequest(script=str(outside), working_directory="/"), CALLER)
        with pytest.raises(errors.NotPermitted, match="PYTHONPATH"):
            launch(
                wire.LaunchRequest(script=str(inside), working_directory="/", environment={"PYTHONPATH": "/x"}), CALLER
            )
        request = wire.DescribeAgentRequest()
        assert not agent.service.handlers[methods.DESCRIBE_AGENT](request, CALLER).launches
        assert launch(wire.LaunchRequest(script=str(inside), working_directory="/"), CALLER).launch
    finally:
        agent.close(grace_ms=100)


@pytest.mark.parametrize(
    ("name", "value"),
    [("allow", "relative"), ("allow", "/a b"), ("allow", "/a\t/b"), ("variables", "A=B"), ("variables", "/a")],
)
def test_values_of_another_form_are_refused(name: str, value: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=rf"agent\.{name}"):
        configuration.load(None, {}, {f"agent.{name}": value})
