"""The yard's audit: lines that follow each other, and what is found when one was changed."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardyard.domain import errors
from shardyard.security.audit_log import FILE, REFUSED_A_MINUTE, AuditLog, read, verify


def written(folder: Path, lines: int = 5) -> Path:
    audit = AuditLog(folder)
    for number in range(lines):
        audit.add("StopJob", who="operator/ada", where="ipv4:127.0.0.1:5", outcome="allowed", job_name=f"j{number}")
    return folder / FILE


def test_lines_say_who_did_what_from_where(tmp_path: Path) -> None:
    path = written(tmp_path, 2)
    first, second = read(path)
    assert {name: first[name] for name in ("number", "event", "who", "where", "outcome", "job_name")} == {
        "number": 1,
        "event": "StopJob",
        "who": "operator/ada",
        "where": "ipv4:127.0.0.1:5",
        "outcome": "allowed",
        "job_name": "j0",
    }
    assert abs(first["time"] - time.time()) < 60
    assert second["number"] == 2
    assert verify(path) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_audit_goes_on_over_a_restart_and_removes_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    with path.open("ab") as stream:
        stream.write(b'{"number": 4, "time')
    with pytest.raises(errors.AuditDamaged, match="line 4"):
        verify(path)
    written(tmp_path, 2)
    assert verify(path) == 5
    assert [entry["number"] for entry in read(path)] == [1, 2, 3, 4, 5]


def changed(lines: list[str]) -> list[str]:
    entry = json.loads(lines[2])
    return [*lines[:2], json.dumps({**entry, "outcome": "refused"}), *lines[3:]]


@pytest.mark.parametrize(
    ("damage", "at"),
    [
        (changed, 4),
        (lambda lines: [*lines[:2], *lines[3:]], 3),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], 2),
        (lambda lines: [*lines[:3], lines[2], *lines[3:]], 4),
        (lambda lines: ["?", *lines[1:]], 1),
        (lambda lines: lines[1:], 1),
    ],
    ids=["changed", "removed", "swapped", "twice", "no JSON", "begun later"],
)
def test_line_that_was_touched_is_found(tmp_path: Path, damage: Callable[[list[str]], list[str]], at: int) -> None:
    path = written(tmp_path)
    path.write_text("\n".join(damage(path.read_text().splitlines())) + "\n")
    with pytest.raises(errors.AuditDamaged, match=f"line {at} does not follow"):
        verify(path)


def test_refusals_are_limited_and_how_many_were_left_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit, now = AuditLog(tmp_path), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in range(REFUSED_A_MINUTE + 40):
        audit.add("Launch", who="", where="x", outcome="no certificate")
    audit.add("Invite", who="operator/ada", where="x", outcome="allowed")
    entries = list(read(tmp_path / FILE))
    assert [entry["event"] for entry in entries[-3:]] == ["Launch", "refusals left out", "Invite"]
    assert entries[-2]["number_of_them"] == 40
    assert len(entries) == REFUSED_A_MINUTE + 2
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    audit.add("Launch", who="", where="x", outcome="no certificate")
    assert verify(tmp_path / FILE) == REFUSED_A_MINUTE + 3


def test_file_whose_end_is_none_of_ours_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("something\n")
    with pytest.raises(errors.StorageUnavailable, match="its last line is damaged"):
        AuditLog(tmp_path)
