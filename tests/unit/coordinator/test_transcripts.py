"""The coordinator's machine reacts as its transcripts say (tests/unit/coordinator/transcripts)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import transcript_commands, transcripts

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_machine_reacts_as_recorded(path: Path) -> None:
    transcript = transcripts.read(path)
    played = transcripts.Transcript(
        transcript.head, [transcript_commands.play(transcript, each) for each in transcript.scenarios]
    )
    if transcripts.RECORD:
        transcripts.write(path, played)
        return
    for expected, found in zip(transcript.scenarios, played.scenarios, strict=True):
        assert found == expected, expected.title


def test_a_reaction_that_differs_is_found() -> None:
    (path, *_) = FILES
    transcript = transcripts.read(path)
    (scenario, *_) = transcript.scenarios
    wrong = transcripts.Scenario(scenario.title, [(command, [*lines, "drop"]) for command, lines in scenario.steps])
    assert transcript_commands.play(transcript, wrong) != wrong
