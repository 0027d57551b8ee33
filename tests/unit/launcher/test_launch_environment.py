"""The environment that a training script inherits."""

from __future__ import annotations

import os
from pathlib import Path

from shardyard.config.configuration import Flag, load
from shardyard_launcher.scripts.script import launch_environment
from shardyard_launcher.terminal.options import load_given


def test_script_on_this_machine_inherits_the_environment() -> None:
    environment = {
        "HOME": "/h",
        "SHARDYARD_COORDINATOR": "other:1",
        "SHARDYARD_AGENT": "1",
        "SHARDYARD_JOB": "mine",
        "SHARDYARD__JOB__SEED": "1",
    }
    got = launch_environment(environment, load(), config=None, sets=[("job.seed", Flag("2", "--set"))], whole=True)
    assert got == {"HOME": "/h", "SHARDYARD_JOB": "mine", "SHARDYARD__JOB__SEED": "2"}


def test_script_on_another_machine_inherits_settings_alone() -> None:
    environment = {"HOME": "/h", "SHARDYARD_JOB": "mine"}
    sets = [("job.name", Flag("his", "--set"))]
    got = launch_environment(environment, load(), config="a.yaml", sets=sets, whole=False)
    assert got == {"SHARDYARD_CONFIG": os.path.abspath("a.yaml"), "SHARDYARD__JOB__NAME": "his"}


def test_expected_workers_of_a_file_win_over_those_of_one_agent(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("job:\n  workers_expected: 8\n")
    got = launch_environment({}, load(tmp_path / "a.yaml"), config="a.yaml", sets=[], whole=False)
    assert got["SHARDYARD__JOB__WORKERS_EXPECTED"] == "8"


def test_log_format_of_a_command_is_that_of_its_training_processes() -> None:
    given = load_given(None, ("log.format=human",), {"log.format": "json"})
    assert given.loaded.settings.log.format == "json"
    got = launch_environment({}, given.loaded, config=None, sets=given.sets, whole=False)
    assert got == {"SHARDYARD__LOG__FORMAT": "json"}
    given = load_given(None, (), {"log.format": None})
    assert launch_environment({}, given.loaded, config=None, sets=given.sets, whole=False) == {}
