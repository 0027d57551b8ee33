"""What the benchmarks share: statistics, the JSON object, and that wrong numbers are found. No timing."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from exchange import compression, push_pull  # noqa: E402
from harness.machine import connections, link  # noqa: E402
from harness.machine.facts import cpu_seconds, loopback_bytes, machine_facts  # noqa: E402
from harness.measuring import intervals, pairs, report  # noqa: E402
from harness.workloads import codecs, digits, numbers, rounds, training  # noqa: E402

sys.path.remove(str(BENCHMARKS))


def test_each_side_is_first_in_every_other_pair() -> None:
    measured: list[str] = []

    def measure(name: str) -> dict[str, float]:
        measured.append(name)
        return {"rate": float(len(measured))}

    sides = {"a": lambda: measure("a"), "b": lambda: measure("b")}
    results = pairs.measure_pairs(sides, 3, told=lambda line: None)
    assert measured == ["a", "b", "b", "a", "a", "b"]
    assert pairs.column(results["a"], "rate") == [1.0, 4.0, 5.0]
    assert pairs.ratios(results["b"], results["a"], "rate") == [2.0, 0.75, 1.2]


def test_spread_is_median_smallest_and_largest() -> None:
    assert pairs.spread([3, 1, 10]) == pairs.Spread(3, 1, 10)
    assert pairs.spread([3, 1]).median == 2
    with pytest.raises(ValueError, match="no values"):
        pairs.spread([])


def test_result_is_json_with_machine_raw_figures_and_ratios() -> None:
    made = report.result("some", {"ours": [{"rate": 1.23456789}]}, {"some_ratio": [2.0, 1.0, 4.0]})
    read = json.loads(json.dumps(made))
    assert list(read) == ["benchmark", "machine", "raw", "ratios"]
    assert read["ratios"] == {"some_ratio": {"median": 2.0, "min": 1.0, "max": 4.0}}
    assert read["raw"] == {"ours": [{"rate": 1.235}]}
    assert read["machine"] == machine_facts()
    assert {"cpu", "cores", "memory_gib", "kernel", "python", "torch", "grpcio"} <= read["machine"].keys()


REPORT = """
import sys
from pathlib import Path
from harness.measuring.report import Panel, report
panels = [
    Panel("bars", "steps/s", bars={"shardyard": [1.0, 2.0], "peer": [3.0]}),
    Panel("lines", "s", lines={"1 server": {1: 2.0, 2: 3.0}}, x="workers"),
    Panel("marks", "points", marks={"int8": (1000.0, -0.1, -0.3, 0.1), "float32": (4000.0, 0, 0, 0)}, x="bytes"),
]
report("some", {}, {"some_ratio": [1.0]}, panels=panels, folder=Path(sys.argv[1], "figures"))
"""


def test_report_ends_with_the_json_object_and_draws_the_figure(tmp_path: Path) -> None:
    # in a process of its own: matplotlib never closes the files of its fonts
    command = [sys.executable, "-c", REPORT, str(tmp_path)]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=60, check=True)
    assert (tmp_path / "figures" / "some.png").read_bytes().startswith(b"\x89PNG")
    *readable, last = done.stdout.splitlines()
    assert "some_ratio: 1 (1 to 1)" in readable
    assert json.loads(last)["benchmark"] == "some"


def test_machine_counters_do_not_run_backwards() -> None:
    first = cpu_seconds([os.getpid()]), loopback_bytes()
    assert cpu_seconds([os.getpid()]) >= first[0] > 0
    assert loopback_bytes() >= first[1]


# ---- rounds


class Store:
    """A server in this process, exact SGD; `gain` of 1 is right."""

    def __init__(self, model: torch.nn.ParameterList) -> None:
        self.parameters = list(model)
        self.gain = 1.0

    def exchange(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.sub_(parameter.grad, alpha=self.gain * numbers.LR)


def make_rounds(*, alone: bool) -> tuple[Store, rounds.Rounds]:
    model = rounds.make_model(3, 1000)
    rounds.run_backward(list(model))
    store = Store(model)
    return store, rounds.Rounds(model, store.exchange, alone=alone)


@pytest.mark.parametrize("alone", [True, False])
def test_rounds_with_right_numbers_pass(alone: bool) -> None:
    _, made = make_rounds(alone=alone)
    found = made.measure(rounds=50)
    assert found["rounds"] == len(found["each_s"]) == 50
    assert found["seconds"] > found["exchange_s"] > 0
    assert made.counted() == {"counts": [17, 17, 16]}
    made.check()
    made.check(counts=[17, 17, 16])


def test_a_wrong_update_is_found_in_its_round() -> None:
    store, made = make_rounds(alone=True)
    made.measure(rounds=4)
    store.gain = 0.99
    with pytest.raises(numbers.WrongNumbers, match="round 5"):
        made.measure(rounds=1)


def test_one_wrong_element_is_found_after_the_rounds() -> None:
    store, made = make_rounds(alone=True)
    made.measure(rounds=4)
    with torch.no_grad():
        store.parameters[1][7] += 2**-13
    with pytest.raises(numbers.WrongNumbers, match="tensor 1: 1 of 1000 values are wrong; element 7"):
        made.check()


@pytest.mark.parametrize("counts", [[16, 17, 16], [17, 17, 17]])
def test_a_lost_or_doubled_push_of_many_callers_is_found(counts: list[int]) -> None:
    _, made = make_rounds(alone=False)
    made.measure(rounds=50)
    with pytest.raises(numbers.WrongNumbers):
        made.check(counts=counts)


def test_gradients_are_exact_in_any_order() -> None:
    first, sources = numbers.first_values(1, 1000)[0], [source[0] for source in numbers.gradients(1, 1000)]
    counts = [300, 299, 301]
    values = first.copy()
    for number in np.random.default_rng(0).permutation(np.repeat(range(3), counts)):
        values = (values - np.float32(numbers.LR) * sources[number]).astype(np.float32)
    numbers.check("values", values, numbers.expected(first, sources, counts))
    assert not np.array_equal(sources[0], sources[1])
    with pytest.raises(ValueError, match="exact up to"):
        numbers.expected(first, sources, [numbers.CYCLES_MAX + 1, 0, 0])


@pytest.mark.parametrize(
    ("name", "share"), [("shardyard same host", 1.0), ("shardyard streams", 0.0), ("torch.rpc TCP", 0.0)]
)
def test_a_side_on_another_path_than_its_name_is_refused(name: str, share: float) -> None:
    push_pull.check_path(name, 1.0 - share)
    with pytest.raises(push_pull.WrongPath, match=name):
        push_pull.check_path(name, share)


# ---- training


TASK = training.Task((20, 16, 10), lr=0.1)


class Trainer:
    """Plain SGD in this process; every `skip`th update is lost."""

    def __init__(self, skip: int = 0) -> None:
        model = training.make_model(TASK)
        optimizer = torch.optim.SGD(model.parameters(), lr=TASK.lr)
        self.steps = 0

        def exchange() -> None:
            self.steps += 1
            if not skip or self.steps % skip:
                optimizer.step()

        data = training.make_data(TASK, 0, 1)
        self.loop = training.Loop(model, data, exchange=exchange, zero=optimizer.zero_grad, worker=0)

    def verify(self, folder: Path, *, settle: bool, steps: int = 20) -> None:
        self.loop.save(str(folder / "before.npy"), settle=settle)
        self.loop.verify(steps, str(folder))
        self.loop.save(str(folder / "after.npy"), settle=settle)
        before, after, sum_ = (training.read(folder / f"{name}.npy") for name in ("before", "after", "gradients-0"))
        training.check_sum(before, after, [sum_], lr=TASK.lr, mean=False, steps=steps)


@pytest.mark.parametrize("settle", [True, False])
def test_training_with_right_numbers_passes(tmp_path: Path, settle: bool) -> None:
    trainer = Trainer()
    trainer.verify(tmp_path, settle=settle)
    trainer.loop.alone(3, TASK.lr)
    found = trainer.loop.train(steps=300)
    assert found["steps"] == 300
    training.check_falls("some", [found["first_loss"], trainer.loop.train(steps=50)["loss"]])


def test_a_lost_gradient_is_found(tmp_path: Path) -> None:
    with pytest.raises(training.NumbersDiffer, match="a gradient was lost, or applied twice"):
        Trainer(skip=15).verify(tmp_path, settle=False)


def test_parameters_that_are_not_the_newest_are_found() -> None:
    with pytest.raises(training.NumbersDiffer, match="not the newest values"):
        Trainer(skip=2).loop.alone(2, TASK.lr)


def test_a_mean_is_not_a_sum() -> None:
    before = np.ones(4)
    gradients = [np.full(4, 0.25), np.full(4, 0.75)]
    training.check_sum(before, before - 0.1 * 0.5, gradients, lr=0.1, mean=True, steps=1)
    with pytest.raises(training.NumbersDiffer, match=r"off by 0\.05"):
        training.check_sum(before, before - 0.1 * 0.5, gradients, lr=0.1, mean=False, steps=1)


def test_compressed_gradients_may_differ_by_what_compression_changes() -> None:
    before, gradients = np.ones(4), [np.full(4, 0.5)]
    training.check_sum(before, before - 0.1 * 0.5004, gradients, lr=0.1, mean=True, steps=1, lossy=1e-3)
    with pytest.raises(training.NumbersDiffer, match="off by"):
        training.check_sum(before, before - 0.1 * 0.501, gradients, lr=0.1, mean=True, steps=1, lossy=1e-3)


def test_a_check_too_coarse_to_see_a_lost_gradient_is_refused() -> None:
    before = np.full(4, 1000.0)
    with pytest.raises(training.NumbersDiffer, match="would not show"):
        training.check_sum(before, before, [np.full(4, 1e-4)], lr=0.1, mean=False, steps=1)


@pytest.mark.parametrize("losses", [[2.3, 2.29], [2.3, float("nan")]])
def test_a_loss_that_does_not_fall_is_found(losses: list[float]) -> None:
    with pytest.raises(training.NumbersDiffer, match="does not fall"):
        training.check_falls("some", losses)


# ---- compression


def test_paired_interval_is_that_of_students_t() -> None:
    found = intervals.paired([1.0, 2.0, 6.0], [0.0, 0.0, 3.0])
    # differences 1, 2, 3: mean 2, deviation 1, t(0.975, 2) = 4.303
    assert (found.mean, found.low, found.high) == pytest.approx((2, 2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3)
    assert intervals.paired([5.0], [4.0]).low == -math.inf


@pytest.mark.parametrize(("lost", "ratio"), [(0.0, 250.0), (0.3, 250.0), (0.31, 0.0), (float("nan"), 0.0)])
def test_a_codec_that_loses_more_than_the_bound_has_ratio_0(lost: float, ratio: float) -> None:
    difference = intervals.Interval(-lost, -lost - 1, -lost + 1)
    assert compression.judged([250.0, 250.0], difference) == [ratio, ratio]


def made_bytes(push: float, interface: float) -> list[dict[str, float]]:
    return [{"push_bytes": push, "interface_bytes": interface}] * 2


def test_ratios_of_bytes_are_judged_by_accuracy() -> None:
    measured = {
        "float32": {"after": made_bytes(1000, 1200), "whole": made_bytes(1000, 1200)},
        "topk": {"after": made_bytes(4, 100), "whole": made_bytes(40, 120)},
    }
    bad = intervals.Interval(-0.5, -0.6, -0.4)
    expected = {"topk_unjudged": [250.0] * 2, "topk_whole_run": [25.0] * 2, "topk_interface": [12.0] * 2}
    assert compression.bytes_ratios(measured, {}) == expected
    assert compression.bytes_ratios(measured, {"topk": bad}) == expected | {"topk_bytes": [0.0] * 2}
    good = intervals.Interval(-0.1, -0.6, 0.4)
    assert compression.bytes_ratios(measured, {"topk": good}) == expected | {"topk_bytes": [250.0] * 2}


def test_bytes_of_a_push_are_all_packets_with_payload_and_their_headers() -> None:
    headers = connections.HEADERS_BYTES
    moved = connections.Moved(10_000, 10, 5, again_bytes=1_000, again_segments=1, received_bytes=70)
    figures = compression.Count(moved, connections.Moved(), 12_345, codes_bytes=9_000).per_step(10)
    assert figures["push_bytes"] == 1_000 + headers
    assert figures["push_bytes"] == sum(figures[f"{of}_bytes"] for of in ("codes", "messages", "packet_headers"))
    assert figures["acknowledgements_bytes"] == headers / 2
    assert moved.wire_bytes == 11_000 + 16 * headers
    assert moved - moved == connections.Moved()


def test_the_kernel_counts_what_a_connection_has_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with socket.create_connection(listening.getsockname()) as calling:
            accepted, _ = listening.accept()
            with accepted:
                before = connections.moved_by_address()[address]
                calling.sendall(bytes(1000))
                assert len(accepted.recv(1000, socket.MSG_WAITALL)) == 1000
                moved = connections.moved_by_address()[address] - before
                assert (moved.payload_bytes, moved.data_segments) == (1000, 1)
                accepted.sendall(bytes(500))
                assert len(calling.recv(500, socket.MSG_WAITALL)) == 500
                assert connections.moved_by_address()[address].received_bytes == before.received_bytes + 500


def test_an_interface_that_is_not_there_is_told() -> None:
    assert connections.interface_sent_bytes("lo") >= 0
    with pytest.raises(OSError, match="no interface named nowhere0"):
        connections.interface_sent_bytes("nowhere0")


def test_a_link_that_cannot_be_made_whole_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(command: str) -> None:
        ran.append(command)
        if "qdisc" in command:
            raise link.LinkUnavailable(f"{command}: not permitted")

    monkeypatch.setattr(link, "_run", run)
    with pytest.raises(link.LinkUnavailable, match="rate 50mbit"), link.link(50):
        pass
    name = ran[0].split()[-1]
    assert str(os.getpid()) in name
    assert len(name) <= 15
    assert ran[-2:] == [f"ip link delete {name}", f"ip netns delete {name}"]


def test_without_its_tools_a_link_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(link.LinkUnavailable, match="No such file"), link.link():
        pass


def test_each_image_is_held_out_once_in_a_group_of_seeds() -> None:
    for first in (0, digits.FOLDS):
        seeds = [digits.split(first + fold) for fold in range(digits.FOLDS)]
        assert sorted(torch.cat([held for _, held in seeds]).tolist()) == list(range(1_797))
        for learned, held in seeds:
            assert sorted(torch.cat([learned, held]).tolist()) == list(range(1_797))
    assert not torch.equal(digits.split(0)[1], digits.split(digits.FOLDS)[1])


def test_learning_rate_rises_and_falls_to_nothing() -> None:
    factors = [digits.lr_factor(step) for step in range(digits.STEPS + 1)]
    assert factors[0] == pytest.approx(1 / digits.LR_RISES_STEPS)
    assert max(factors) == factors[digits.LR_RISES_STEPS - 1] > 0.9
    assert factors[-1] == 0


def test_the_same_seed_trains_the_same_way() -> None:
    def train() -> dict[str, Any]:
        model = digits.make_network(3)
        assert sum(parameter.numel() for parameter in model.parameters()) > 1_000_000
        optimizer = torch.optim.SGD(model.parameters(), lr=digits.LR, momentum=digits.MOMENTUM)
        made = digits.Training(model, 3, step=optimizer.step, zero=optimizer.zero_grad, follow=lambda: None)
        made.train(40)
        return made.evaluate() | made.digest()

    first = train()
    assert first == train()
    assert first["accuracy_percent"] > 50


class Learner:
    """A program whose accuracy rises by so much with every step, in a second each."""

    def __init__(self, percent_per_step: float) -> None:
        self.percent_per_step = percent_per_step
        self.steps = 0

    def ask(self, do: str, *, steps: int = 0, **_: Any) -> dict[str, Any]:
        self.steps += steps
        return {"steps": steps, "seconds": float(steps), "accuracy_percent": self.steps * self.percent_per_step}


def test_seconds_are_those_until_the_target() -> None:
    whole, fast, never = (compression.reach(Learner(rate), {}) for rate in (1.0, 2.0, 0.01))  # type: ignore[arg-type]
    assert (whole["seconds"], whole["steps"]) == (100, 100)
    assert (fast["seconds"], fast["steps"], fast["step_ms"]) == (50, 50, 1000)
    assert never["steps"] == digits.STEPS
    assert compression.speedups({"float32": whole, "topk": fast, "onebit": never}) == {"topk": 2.0, "onebit": 0.0}


def test_over_a_link_only_float32_pulls_what_it_pushes() -> None:
    codings = compression.link_codings()
    assert codings["float32"] == {}
    assert all(coding["job.compression.pull"] == "delta" for name, coding in codings.items() if name != "float32")
    assert set(compression.CODINGS) < set(codings)


@pytest.mark.parametrize("text", compression.PUSH_CODECS)
def test_codecs_are_measured_with_their_numbers_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "SHAPE", (512, 640))
    found = codecs.measure_push(text, 2)
    assert len(found) == 2
    assert all(each["bytes"] * each["times_smaller"] == pytest.approx(4 * 512 * 640) for each in found)


@pytest.mark.parametrize("text", compression.PULL_CODECS)
def test_pulled_codecs_are_measured_with_their_numbers_checked(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "SHAPE", (512, 640))
    assert all(each["times_smaller"] > 1.9 for each in codecs.measure_pull(text, 2))


def test_a_decoder_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "SHAPE", (512, 640))

    def off(code: Any, out: np.ndarray) -> None:
        decode(code, out)
        out[7] += 0.1

    decode = codecs.decode
    monkeypatch.setattr(codecs, "decode", off)
    for text in ("none", "bf16", "qsgd", "int8", "topk:0.01", "powersgd:2"):
        with pytest.raises(codecs.WrongValues, match=text):
            codecs.measure_push(text, 1)
