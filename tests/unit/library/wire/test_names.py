"""Texts that a peer sent."""

from __future__ import annotations

import pytest

from shardyard.domain import limits
from shardyard.domain.errors import MalformedPayload, TooLarge
from shardyard.wire.common_messages import sentences, text


@pytest.mark.parametrize("value", ["\x1b[2J", "a\nb", "a\tb", "\0", "\x7f", "\u202e", "\u200b", "\ud800"])
def test_names_that_cannot_be_shown_are_refused(value: str) -> None:
    with pytest.raises(MalformedPayload, match="a host name has characters that cannot be shown") as raised:
        text(value, "a host name")
    assert str(raised.value).isascii()


def test_names_are_taken_as_they_are() -> None:
    for value in ("", "box-1", "Füße 42", "模型"):
        assert text(value, "a name") == sentences(value, "a name") == value


def test_of_sentences_what_cannot_be_shown_is_replaced() -> None:
    assert sentences("one\n\x1b[31mtwo\r\n", "an error") == "one\n\ufffd[31mtwo\ufffd\n"


def test_long_texts_are_refused() -> None:
    for taken in (text, sentences):
        with pytest.raises(TooLarge):
            taken("x" * (limits.TEXT_CHARACTERS_MAX + 1), "a text")
