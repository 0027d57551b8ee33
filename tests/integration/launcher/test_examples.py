"""The examples with tables and the GPT, run small: what a run has learned is asserted, against bounds that one which
does not learn misses."""

from __future__ import annotations

import random
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.yards import ROLE, RoleYard, Script

ROOT = Path(__file__).parents[3]
SKIPGRAM = str(ROOT / "examples" / "skipgram" / "train.py")
RECOMMENDER = str(ROOT / "examples" / "recommender" / "train.py")
GPT = str(ROOT / "examples" / "gpt" / "train.py")


@contextmanager
def begun(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Script]:
    script = Script(list(arguments), {"SHARDYARD__LOG__LEVEL": "error"} | dict(environment or {}))
    try:
        yield script
    finally:
        script.kill()


def run(*arguments: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """What a script that ends well has printed."""
    with begun(*arguments, environment=environment) as script:
        assert script.wait(timeout_s=110) == 0, script.output
        return script.lines


# ---- word vectors

GROUPS, MEMBERS, NEIGHBOURS = 6, 8, 5


def member(group: int, number: int) -> str:
    return f"word_{group}_{number}"


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Paragraphs, each of words of one group in any order."""
    drawn, found = random.Random(5), []
    for file in range(6):
        path = tmp_path / f"text-{file}.txt"
        with path.open("w") as out:
            for paragraph in range(60):
                words = [member((file + paragraph) % GROUPS, drawn.randrange(MEMBERS)) for _ in range(60)]
                out.write(" ".join(words) + "\n")
        found.append(str(path))
    return found


def in_their_group(lines: list[str]) -> float:
    """Of the words' printed neighbours the share that is of the same group."""
    found = {}
    for line in lines:
        if match := re.search(r"\bword_(\d)_\d:  (.*)", line):
            found[match[0].partition(":")[0]] = [name[5] == match[1] for name in match[2].split()[::2]]
    assert len(found) == GROUPS * MEMBERS
    assert all(len(each) == NEIGHBOURS for each in found.values())
    return sum(map(sum, found.values())) / (GROUPS * MEMBERS * NEIGHBOURS)


def asked(texts: list[str]) -> list[str]:
    words = [member(group, number) for group in range(GROUPS) for number in range(MEMBERS)]
    options = ["--dim", "8", "--batch-size", "4", "--epochs", "3", "--neighbours", str(NEIGHBOURS)]
    return [SKIPGRAM, *options, "--ask", *words, "--files", *texts]


@pytest.mark.long
def test_words_that_stand_together_become_neighbours(texts: list[str], tmp_path: Path) -> None:
    lines = run(*asked(texts), "--save", str(tmp_path / "vectors.txt"))
    assert in_their_group(lines) > 0.95
    said = next(line for line in lines if "vectors" in line)
    assert re.fullmatch(r"21,600 words in \d+ passages, 48 vectors", said), said
    head, *vectors = (tmp_path / "vectors.txt").read_text().splitlines()
    assert head == "48 8"
    assert {line.split()[0] for line in vectors} == {member(g, n) for g in range(GROUPS) for n in range(MEMBERS)}
    assert all(sum(float(number) ** 2 for number in line.split()[1:]) == pytest.approx(1, abs=1e-3) for line in vectors)


def test_words_of_a_table_that_does_not_learn_have_any_neighbours(texts: list[str]) -> None:
    assert in_their_group(run(*asked(texts), "--rate", "0")) < 0.4


@pytest.mark.long
def test_words_become_neighbours_in_a_yard_of_real_processes(texts: list[str]) -> None:
    """The command of the documentation: two servers, two workers."""
    lines = run(*ROLE, "run", "-c", str(ROOT / "configs" / "tables.yaml"), *asked(texts))
    assert in_their_group(lines) > 0.95


# ---- the recommender

SMALL = ["--days", "3", "--clicks", "12000", "--items", "200", "--batch-size", "128"]
AFTER = re.compile(r"AUC ([\d.]+) of ([\d,]+) clicks of the day after(?:; the best possible is ([\d.]+))?")


def day_after(lines: list[str]) -> tuple[float, float]:
    """The AUC, and the best possible one; nan where that is not known."""
    (found,) = [match for line in lines if (match := AFTER.search(line))]
    return float(found[1]), float(found[3] or "nan")


@pytest.mark.long("deepfm")
@pytest.mark.parametrize("model", ["dlrm", "deepfm"])
def test_clicks_of_the_day_after_are_foretold_and_a_test_makes_no_rows(model: str) -> None:
    lines = run(RECOMMENDER, *SMALL, "--model", model)
    found, best = day_after(lines)
    assert 0.66 < found < best
    rows = [line.split(" rows")[0] for line in lines if " rows after " in line]
    assert len(rows) == 2
    assert rows[0] == rows[1] != "0"
    days = [line for line in lines if "before they were learned from" in line]
    assert [line.partition(":")[0] for line in days] == ["day 0", "day 1"]


@pytest.mark.long
def test_clicks_are_not_foretold_by_a_table_that_does_not_learn() -> None:
    found, _ = day_after(run(RECOMMENDER, *SMALL, "--row-rate", "0"))
    assert found < 0.62


@pytest.mark.long
def test_clicks_are_foretold_in_a_yard_of_real_processes() -> None:
    """The command of the documentation: two servers, two workers, bounded staleness."""
    config = str(ROOT / "configs" / "recommender.yaml")
    found, best = day_after(run(*ROLE, "run", "-c", config, RECOMMENDER, *SMALL))
    assert 0.66 < found < best


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["sharded", "tensor"])
def test_clicks_are_foretold_by_layers_in_parts_and_rows_on_the_servers(strategy: str) -> None:
    given = ["--set", f"job.strategy={strategy}"] + (["--set", "job.tensor.size=2"] if strategy == "tensor" else [])
    config = str(ROOT / "configs" / "sharded-tables.yaml")
    found, best = day_after(run(*ROLE, "run", "-c", config, *given, RECOMMENDER, *SMALL))
    assert 0.66 < found < best


@pytest.mark.long
@pytest.mark.parametrize("model", ["dlrm", "deepfm"])
def test_clicks_are_foretold_by_layers_in_step_and_rows_that_are_not(model: str) -> None:
    """Hybrid mode, as configs/hybrid.yaml and the command of the documentation have it."""
    config = str(ROOT / "configs" / "recommender.yaml")
    hybrid = ["--set", "job.consistency.mode=hybrid"]
    found, best = day_after(run(*ROLE, "run", "-c", config, *hybrid, RECOMMENDER, *SMALL, "--model", model))
    assert 0.66 < found < best


@pytest.mark.long
def test_clicks_are_foretold_although_a_server_dies(tmp_path: Path) -> None:
    yard = RoleYard(tmp_path)
    given = {"COORDINATOR": yard.address, "_JOB__CHECKPOINT__EVERY_STEPS": "20"}
    environment = {f"SHARDYARD_{name}": value for name, value in given.items()}
    try:
        with begun(RECOMMENDER, *SMALL, environment=environment) as script:
            yard.coordinator.wait_for("checkpoint 2 of step")
            yard.kill_server(0)
            yard.restart_server(0)
            assert script.wait(timeout_s=110) == 0, script.output
        assert "are restored, of step" in yard.coordinator.output
        found, best = day_after(script.lines)
        assert 0.66 < found < best
    finally:
        yard.stop()


@pytest.mark.long
def test_files_in_the_format_of_criteo_are_learned_from(tmp_path: Path) -> None:
    made = run(str(ROOT / "examples" / "recommender" / "clicks.py"), str(tmp_path), "--days", "2", "--clicks", "3000")
    assert [line.partition(": 3,000 clicks, the best possible AUC is 0.")[0] for line in made] == [
        str(tmp_path / f"day-{day}.tsv") for day in range(2)
    ]
    first, second = (str(tmp_path / f"day-{day}.tsv") for day in range(2))
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    lines = run(RECOMMENDER, "--train", first, "--test", second, "--epochs", "2", environment=cache)
    found, _ = day_after(lines)
    assert found > 0.52
    assert any(line.startswith("day-0.tsv: AUC 0.") and "of 3,000 clicks" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--train", "a.tsv"], "--train and --test go together"),
        (["--train", "a.tsv.gz", "--test", "b.tsv"], "gunzip it first"),
        (["--days", "1"], "at least 2"),
    ],
)
def test_wrong_options_are_told_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", [RECOMMENDER, *options])
    monkeypatch.syspath_prepend(str(Path(RECOMMENDER).parent))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(RECOMMENDER, run_name="__main__")
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


# ---- the GPT

WORDS = ["alpha", "bravo", "delta", "gamma", "kappa", "omega", "sigma", "theta"]
TINY = ["--layers", "2", "--heads", "2", "--width", "32", "--block", "32", "--passages", "1200", "--batch-size", "8"]
TINY += ["--lr", "0.01", "--prompt", "alpha ", "--sample", "60", "--seed", "3"]
HELD_OUT = re.compile(r"([\d.]+) bits per byte of ([\d,]+) held-out passages after ([\d,]+) steps")


@pytest.fixture
def story(tmp_path: Path) -> str:
    """A text of eight words in any order: half a bit per byte, if the words are known."""
    drawn, path = random.Random(5), tmp_path / "story.txt"
    path.write_text(" ".join(drawn.choice(WORDS) for _ in range(8_000)))
    return str(path)


def held_out(lines: list[str]) -> tuple[float, int]:
    """Bits per byte, and the job's step."""
    (found,) = [match for line in lines if (match := HELD_OUT.search(line))]
    return float(found[1]), int(found[3].replace(",", ""))


def sampled(lines: list[str]) -> str:
    (begin,) = [number for number, line in enumerate(lines) if "a sample of 60 bytes" in line]
    (text,) = [line for line in lines[begin + 1 :] if "alpha" in line]
    return text[text.index("alpha") :]


@pytest.mark.long("accumulated-bf16")
@pytest.mark.parametrize("options", [[], ["--accumulate", "2", "--bf16"]], ids=["float32", "accumulated-bf16"])
def test_gpt_learns_words_and_writes_them(story: str, options: list[str]) -> None:
    lines = run(GPT, *TINY, "--files", story, "--clip", "1", *options)
    bits, steps = held_out(lines)
    assert bits < 1.5  # 8 know nothing, 4 know how frequent each byte is
    assert steps == (75 if options else 150)
    text = sampled(lines)
    assert len(text) in (65, 66)  # with the blank at its end, if there is one
    words = text.split()[:-1]
    assert sum(word in WORDS for word in words) > 0.5 * len(words), text


def test_gpt_that_does_not_learn_knows_nothing(story: str) -> None:
    bits, _ = held_out(run(GPT, *TINY, "--files", story, "--lr", "0", "--passages", "80"))
    assert 7 < bits < 9


@pytest.mark.long
def test_gpt_learns_in_a_yard_of_real_processes_what_one_process_learns(story: str) -> None:
    """The command of the documentation: one server, two workers, synchronous steps."""
    config, options = str(ROOT / "configs" / "gpt.yaml"), [*TINY, "--files", story, "--epochs", "2"]
    together = run(*ROLE, "run", "-c", config, GPT, *options)
    bits, steps = held_out(together)
    assert bits < 1.5
    assert steps == 150
    alone = run(GPT, "--config", config, *options)
    assert held_out(alone) == (bits, steps)
    assert sampled(alone) == sampled(together)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--heads", "3"], "each head needs an even width"),
        (["--prompt", ""], "at least one character"),
        (["--temperature", "0"], "above 0"),
    ],
)
def test_wrong_options_of_gpt_are_told_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", [GPT, *options])
    monkeypatch.syspath_prepend(str(Path(GPT).parent))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(GPT, run_name="__main__")
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
