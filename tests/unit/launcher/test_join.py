"""`shardyard join`: where the invitation comes from."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from shardyard.transport import enrolment
from shardyard_launcher.commands.identities import join


@pytest.mark.parametrize(("argument", "given"), [("yard.secret", ""), ("-", "yard.secret\n"), ("-", " yard.secret")])
def test_invitation_is_an_argument_or_a_line_of_standard_input(
    argument: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def enrol(address: str, text: str) -> None:
        asked.append((address, text))
        raise KeyboardInterrupt

    monkeypatch.setattr(enrolment, "join", enrol)
    CliRunner().invoke(join, ["alpha:7070", argument], input=given)
    assert asked == [("alpha:7070", "yard.secret")]
