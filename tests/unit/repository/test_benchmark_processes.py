"""The processes of benchmarks, and the benchmarks of consistency modes."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardyard_ps_server.partition.staleness import Staleness

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from claims import Found, backup, bits, bounded, cost, diloco, stale  # noqa: E402
from claims.yard import Trained, timeline  # noqa: E402
from harness.machine.delays import Delays  # noqa: E402
from harness.measuring import report  # noqa: E402
from harness.processes.programs import ProgramFailed, Programs  # noqa: E402
from harness.workloads import characters, digits, replaced  # noqa: E402
from jobs import consistency, replicas  # noqa: E402
from sides.shardyard.consistency import Worker  # noqa: E402
from tables import table_ids  # noqa: E402

sys.path.remove(str(BENCHMARKS))


# ---- processes


@contextmanager
def running(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A measured program of that source."""
    (folder / "sides").mkdir()
    (folder / "sides" / "__init__.py").touch()
    (folder / "sides" / "made.py").write_text(source)
    monkeypatch.setattr("harness.processes.programs.BENCHMARKS", folder)
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    with Programs() as programs:
        yield programs.start("made"), programs


ECHO = """
from harness.processes.answers import Conversation
conversation = Conversation()
print("not a part of the conversation")
def fail():
    raise ValueError("this went wrong")
conversation.answer({"echo": lambda value: {"value": value}, "fail": fail})
"""


def test_a_program_answers_also_after_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, ECHO, monkeypatch) as (program, programs):
        programs.await_ready()
        programs.pause()
        with programs.running():
            assert program.ask("echo", value=[1, "two"]) == {"value": [1, "two"]}


def test_what_a_program_said_before_it_failed_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, ECHO, monkeypatch) as (program, _):
        program.await_ready()
        with pytest.raises(ProgramFailed, match="this went wrong"):
            program.ask("fail")


def test_a_program_without_an_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, "import sys; sys.stdin.read()", monkeypatch) as (program, _):
        with pytest.raises(ProgramFailed, match="did not answer in 0 s"):
            program.await_ready(timeout_s=0.05)


# ---- consistency


@pytest.mark.parametrize(("lost", "found", "share"), [(90.0, 93.0, 0.75), (90.0, 89.0, -0.25), (92.5, 94.0, 0.0)])
def test_share_that_comes_back_is_of_what_was_lost_and_nothing_where_little_was(
    lost: float, found: float, share: float
) -> None:
    given = {stale.ALONE: 94.0, stale.STALE: lost, "delay_compensation": found}
    results = {name: [{"accuracy_percent": mean - 1}, {"accuracy_percent": mean + 1}] for name, mean in given.items()}
    assert stale.share(results, "delay_compensation") == pytest.approx(share)


def test_workers_that_take_turns_are_as_late_as_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale, "STEPS", 8)
    counted: Counter[tuple[int, bool]] = Counter()
    real = Staleness.count

    def count(lateness: Staleness, base: Any, staleness: int, *, compensated: bool) -> None:
        counted[staleness, compensated] += 1
        real(lateness, base, staleness, compensated=compensated)

    monkeypatch.setattr(Staleness, "count", count)
    found = stale.train(0, 3, stale.SETTINGS["delay_compensation"])
    assert 0 <= found["accuracy_percent"] <= 100
    partitions = counted[0, True]
    assert partitions > 0
    assert counted == {(0, True): partitions, (1, True): partitions, (2, True): 6 * partitions}


def test_every_side_sums_gradients_by_id_and_a_wrong_sum_is_found() -> None:
    random = np.random.default_rng(3)
    ids, gradients = random.integers(-20, 20, 300), random.standard_normal((300, 5)).astype(np.float32)
    for name, side in table_ids.SIDES.items():
        found, sums = side(ids, gradients)
        table_ids.check(name, ids, gradients, (found, sums))
        sums[3, 2] += 0.01
        with pytest.raises(table_ids.WrongSums, match=name):
            table_ids.check(name, ids, gradients, (found, sums))
        with pytest.raises(table_ids.WrongSums, match=name):
            table_ids.check(name, ids, gradients, (found[1:], sums[1:]))
    assert table_ids.measure_codes(ids)["distinct"] == 40


def test_who_is_slow_is_a_function_of_seed_worker_and_step() -> None:
    def slow(delays: Delays, seed: int = 0, steps: int = 400) -> list[list[bool]]:
        return [[delays.sleep_s(seed, worker, step) > 0.01 for worker in range(4)] for step in range(steps)]

    assert not any(map(any, slow(Delays(0.01, 4))))
    assert slow(Delays(0.01, 4, "last", 4.0), steps=2) == [[False, False, False, True]] * 2
    assert [each.index(True) for each in slow(Delays(0.01, 4, "turns", 4.0), steps=6)] == [0, 1, 2, 3, 0, 1]
    chance = Delays(0.01, 4, "chance", 10.0, 0.25)
    assert 0.2 < np.mean(slow(chance)) < 0.3
    assert slow(chance) == slow(chance) != slow(chance, seed=1)
    assert chance.sleep_s(0, 0, 0) in (0.01, pytest.approx(0.1))


def test_synchronous_bits_are_those_of_plain_torch_for_any_number_of_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "EPOCHS", 1)
    monkeypatch.setitem(bits.TRAINING, "epochs", 1)
    wanted = bits.plain(3)
    assert wanted != bits.plain(4)
    assert [bits.inside(3, servers) for servers in (1, 4)] == [wanted] * 2


def test_bits_are_equal_for_a_seed_if_all_runs_have_them() -> None:
    assert bits.equal(["a", "b"], {"one": ["a", "b"], "two": ["a", "c"]}) == [1.0, 0.0]


def made_trained(
    *steps: list[tuple[int, float, float, float]], curve: list[tuple[float, float]] | None = None
) -> Trained:
    return Trained([{"steps": each, "curve": curve or []} for each in steps], 0)


def test_a_step_of_the_job_is_over_when_its_first_worker_has_the_values() -> None:
    first = [(0, 0.0, 0.5, 1.0), (1, 1.0, 1.5, 3.0), (2, 3.0, 3.5, 4.0)]
    late = [(0, 0.0, 3.4, 3.5), (2, 3.5, 3.6, 3.7)]
    assert backup.step_times_s(made_trained(first, late)) == pytest.approx([2.0, 0.7])


def test_time_to_the_target_is_from_the_first_step_of_anybody_to_the_first_look_that_sees_it() -> None:
    steps = [(0, 10.0, 10.1, 10.2)], [(0, 9.0, 10.1, 10.2)]
    found = made_trained(*steps, curve=[(10.2, 50.0), (12.0, 95.0), (13.0, 94.0)])
    assert bounded.time_to_target(found) == 3.0
    with pytest.raises(bounded.NotReached, match="not right"):
        bounded.time_to_target(made_trained(*steps, curve=[(10.2, 50.0)]))


def test_a_timeline_begins_with_the_step_that_is_shown_and_ends_in_time() -> None:
    steps = [(0, 0.0, 0.5, 2.0), (1, 2.0, 3.0, 5.0), (2, 5.0, 6.0, 7.0)]
    found = timeline(made_trained(steps), begin=1, seconds=2.0)
    assert found == {"worker 0": [("computes", 0.0, 1.0), ("exchanges, waits", 1.0, 2.0)]}


def test_the_text_is_the_same_for_all_and_what_is_held_out_is_not_learned_from() -> None:
    learned, held_out = characters.split()
    assert len(learned) > 10 * len(held_out) > characters.HELD_OUT_SAMPLES
    text, following = learned[5]
    assert torch.equal(learned.take([5])[0][0], text)
    assert learned.take([5])[1] == following < characters.SYMBOLS
    chosen = characters.Chosen(learned, seed=1, count=1_000)
    assert torch.equal(chosen[3][0], chosen.__getitems__([3])[0][0])
    assert len({int(index) for index in chosen._order}) == 1_000


@pytest.mark.parametrize(("drop", "learns"), [(0.0, True), (1.0, False)])
def test_outer_gradients_that_are_dropped_count_nowhere(tmp_path: Path, drop: float, learns: bool) -> None:
    start = tmp_path / "start.pt"
    torch.save(characters.make_network(7).state_dict(), start)
    worker = Worker(0, {"yard.servers": 1, "yard.workers": 1})
    settings = diloco.LOCAL | {"job.consistency.logical_ranks": 1, "job.consistency.steps": 5}
    found = worker.characters("rounds", 0, 1e-3, 8, 20, str(start), settings, drop=drop)
    worker.leave()
    assert found["dropped"] == (0 if learns else 4)
    assert len(found["steps"]) == 20
    model = characters.make_network(7)
    assert (found["digest"] != digits.digest_of(model)) == learns
    assert found["loss"] > 0


def test_backup_workers_cost_is_measured_in_a_yard_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "EPOCHS", 1)
    monkeypatch.setattr(cost, "BATCH", 32)
    with cost.inside() as train:
        found = cost.compare(train, [0])
    assert set(found) == {"without", "with"}
    assert all(figures["steps_per_s"] > 0 for each in found.values() for figures in each)


def test_only_chosen_claims_are_in_the_last_line_and_whole_figures_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    drawn: dict[str, list[str]] = {}

    def claim(name: str, *modes: str) -> consistency.Measure:
        def measure(seeds: Any) -> Found:
            measured.append(name)
            panels = {mode: [report.Panel(f"{name} {mode}", "s", bars={"a": [1.0]})] for mode in modes}
            return Found({"seeds": list(seeds)}, {f"{name}_ratio": [2.0]}, panels)

        return measure

    def draw(panels: Any, path: Path) -> Path:
        drawn[path.name] = [panel.title for panel in panels]
        return path

    one, two, three = claim("one", "sync"), claim("two", "sync", "async"), claim("three", "async")
    monkeypatch.setattr(consistency, "CLAIMS", {"a": one, "b": two, "also_b": two, "c": three})
    monkeypatch.setattr(consistency, "FIGURES", {"sync": (two, one), "async": (two, three)})
    monkeypatch.setattr(consistency, "draw", draw)
    monkeypatch.setattr(sys, "argv", ["consistency.py", "--claims", "b,also_b,a", "--pairs", "2"])
    monkeypatch.setattr(consistency.signal, "signal", lambda *_: None)
    consistency.main()
    assert measured == ["two", "one"]
    assert drawn == {"consistency-sync.png": ["two sync", "one sync"]}
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last["ratios"]) == {"two_ratio", "one_ratio"}
    with pytest.raises(argparse.ArgumentTypeError, match="nothing"):
        consistency.chosen("a,nothing")


# ---- replicas


def test_counts_say_which_samples_were_lost_and_which_counted_twice() -> None:
    workers, epoch = 4, replaced.SAMPLES // (replaced.BATCH * 4)
    counts = [1.0] * replaced.SAMPLES
    assert replaced.off(counts, epoch, workers) == (0, 0)
    assert replaced.off([0.0, *counts[1:]], epoch, workers) == (1, 0)
    assert replaced.off([3.0, *counts[1:]], epoch, workers) == (0, 2)
    assert replaced.off(counts, epoch + 1, workers) == (16, 0), "a step of the next epoch"


def test_times_of_a_worker_that_was_replaced() -> None:
    """Workers 1 and 2 survive; worker 3 was killed at 10.5 s; worker 4 takes its place."""
    taken = [(9.0, 8), (10.0, 9), (11.5, 10), (12.5, 11), (15.0, 12), (16.0, 13)]
    notes = [replaced.Note(pid, steps, at) for at, steps in taken for pid in (1, 2)]
    notes += [replaced.Note(4, replaced.READY, 13.0), replaced.Note(4, 12, 15.0)]
    assert replicas.figures_of(notes, 10.5, {1, 2}, 4) == {
        "replace_s": 1.0,
        "join_s": 2.0,
        "stop_s": 1.5,
        "step_s": 1.0,
    }
