"""What the pages of docs/ quote exists, and the Python of Get started runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = {
    "shardyard": ROOT / "shardyard",
    "worker": ROOT / "worker/shardyard_worker",
    "ps_server": ROOT / "ps_server/shardyard_ps_server",
    "coordinator": ROOT / "coordinator/shardyard_coordinator",
    "launcher": ROOT / "launcher/shardyard_launcher",
}
"""A page may leave these folders out, or write three points for them: `worker/.../data/feed.py`."""
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+/?")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
SOURCES = (".py", ".proto", ".yaml", ".toml", ".md", ".sh", ".png", ".svg")
FOREIGN_NAMES = {"cudaHostRegisterReadOnly", "torchrun", "taskset", "greenlet", "wal_small", "wal_large"}


def spans(page: Path) -> list[str]:
    """Code spans, without those in fenced blocks."""
    return SPAN.findall(re.sub(r"^( *)```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE))


def exists(path: str, page: Path) -> bool:
    role, points, rest = path.partition("/.../")
    if points:
        return role in PACKAGES and (PACKAGES[role] / rest).exists()
    return any((folder / path).exists() for folder in (page.parent, ROOT, ROOT / "docs", *PACKAGES.values()))


@cache
def words_of_the_code() -> frozenset[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    code = [name for name in listed if name.endswith((".py", ".pyi", ".proto", ".yaml", ".toml", "Makefile"))]
    files = {Path(name).stem for name in listed}
    return frozenset(word for name in code for word in re.findall(r"\w+", (ROOT / name).read_text())) | files


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_a_page_quotes_exist(page: Path) -> None:
    quoted = [span for span in spans(page) if PATH.fullmatch(span) and span.endswith(SOURCES)]
    assert [path for path in quoted if not exists(path, page)] == []


@pytest.mark.parametrize(
    "page",
    [ROOT / "docs/glossary.md", *sorted((ROOT / "docs/internals").glob("*.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_names_that_a_page_on_the_code_quotes_exist(page: Path) -> None:
    words = words_of_the_code() | FOREIGN_NAMES
    quoted = [span.removesuffix("()") for span in spans(page) if NAME.fullmatch(span) and not span.endswith(SOURCES)]
    assert [name for name in quoted if not set(name.split(".")) <= words] == []


START = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted((ROOT / "docs/start").glob("*.md"))
    if page.stem != "alone"  # below
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize("block", START)
def test_python_of_get_started_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("SHARDYARD")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/start", "exec"), {"__name__": "__main__"})


def test_get_started_prints_what_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/start/alone.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (said,) = re.findall(r"^\$ python line.py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/start/alone.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == said
