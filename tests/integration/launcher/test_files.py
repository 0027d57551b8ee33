"""Lists of files in jobs: each record counts once, and workers with other files are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardyard as sy
from shardyard.domain.errors import FeedConflict
from tests.support.alone import Counted, local_yard
from tests.support.yards import Script

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("alone")


def made(folder: Path, *, lines: int = 9) -> sy.TextLines:
    """Three files of numbers, counted through."""
    folder.mkdir()
    for file in range(3):
        (folder / f"part-{file}").write_text("".join(f"{3 * line + file}\n" for line in range(lines)))
    files = sorted(folder.iterdir())
    return sy.TextLines(files, decode=lambda line: torch.tensor(int(line)), index=folder.parent / "index")


def test_promise_2_each_record_of_each_file_counts_once_and_other_files_are_refused(tmp_path: Path) -> None:
    with (
        local_yard({"job.workers_expected": 2, "job.data.batches_per_data_shard": 2}) as (_, connect),
        connect() as first,
        connect() as second,
    ):
        counted, other = Counted(first, 27), Counted(second, 27)
        for index in first.batches(made(tmp_path / "a"), batch_size=4, epochs=2):
            counted.step(index)
        assert counted.counts == [2.0] * 27
        longer = made(tmp_path / "b", lines=10)
        with pytest.raises(FeedConflict, match="was opened before in another way"):
            other.job.batches(longer, batch_size=4, epochs=2)
        # the same files in another folder are the same data
        assert list(other.job.batches(made(tmp_path / "c"), batch_size=4, epochs=2)) == []


def test_example_finds_the_line(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    script = Script([str(ROOT / "examples" / "files" / "train.py"), "--folder", str(tmp_path / "points")], environment)
    assert script.wait() == 0, script.output
    (line,) = [each for each in script.lines if "points in 5 files" in each]
    said = line.split()
    assert said[0] == "1000"
    slope, height = float(said[said.index("=") + 1]), float(said[-1])
    assert (slope, height) == (pytest.approx(3, abs=0.1), pytest.approx(-1, abs=0.1))
