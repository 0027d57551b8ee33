"""The Python blocks of docs/guides/embeddings.md run as they stand, each by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "docs" / "guides" / "embeddings.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
PRINTS = ["3\n", "{'author': (2, 32), 'friends': (2, 32), 'topics': (2, 8)}\n", "2\n", "3\n", "", "", ""]


def test_every_block_is_run() -> None:
    assert len(BLOCKS) == len(PRINTS)


@pytest.mark.parametrize(("block", "printed"), list(zip(BLOCKS, PRINTS, strict=False)), ids=range(len(PRINTS)))
def test_block_prints_what_it_says(block: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, str(PAGE), "exec"), {"__name__": "block"})
    assert capsys.readouterr().out == printed
