"""What tests of the agent share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an agent makes its state folder."""
    monkeypatch.chdir(tmp_path)
