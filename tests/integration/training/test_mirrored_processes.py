"""Replicas in processes of their own that are killed, frozen and started: each sample counts once, and nobody waits for
the dead (docs/internals/ledger.md, rules D1 to D6)."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard_launcher.cli import main
from shardyard_launcher.yard.local_cluster import LocalCluster
from tests.support.yards import Probes, finish, running_yard, wait_for_any

SAMPLES, EPOCHS, RANKS = 96, 4, 3
OPTIONS = ("--samples", str(SAMPLES), "--epochs", str(EPOCHS), "--ranks", str(RANKS), "--pause-ms", "20")
WANTED = [float(EPOCHS)] * SAMPLES
COUNTS = pytest.mark.parametrize(
    ("script", "counted"), [("count", "counts"), ("rows", "totals")], ids=["variables", "rows of tables"]
)
"""Scripts that count each sample, and what they return."""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    given = {"membership.lease_ms": 1_500, "membership.heartbeat_ms": 100}
    with running_yard(tmp_path_factory.mktemp("yard"), servers=1, settings=given) as cluster:
        yield cluster


def settings(yard: LocalCluster, job: str) -> dict[str, object]:
    return {
        "coordinator": yard.coordinator,
        "job": job,
        "job__strategy": "multi_worker_mirrored",
        "job__workers_expected": RANKS,
        "membership__coordinator_grace_ms": 10_000,
    }


@pytest.mark.long("killed-variables", "frozen-rows of tables")
@COUNTS
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_promise_2_each_sample_counts_once_when_members_go(
    yard: LocalCluster, probes: Probes, how: signal.Signals, script: str, counted: str
) -> None:
    common = settings(yard, f"went-{how.name}-{script}")
    started = [probes.start(script, *OPTIONS, **common) for _ in range(RANKS)]
    victim, _ = started.pop(1)
    victim.wait_for("computed 5")
    victim.process.send_signal(how)
    for each, out in started:
        assert finish(each, out)[counted] == WANTED


@pytest.mark.long("killed-0", "killed-3", "frozen-2")
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_promise_2_each_sample_counts_once_when_a_member_of_two_machines_goes(
    yard: LocalCluster, probes: Probes, how: signal.Signals, place: int
) -> None:
    """Two members of each machine sum first, then the first ones of both. The others go on as three members."""
    common = settings(yard, f"machines-{how.name}-{place}") | {"job__workers_expected": 4}
    given = [*OPTIONS[:-3], "4", *OPTIONS[-2:]]
    started = [probes.start("count", *given, "--machine", machine, **common) for machine in "abba"]
    wait_for_any([each for each, _ in started], "computed 5")
    for script, _ in started:
        script.wait_for("sums gradients with 3 other workers inside each of 2 machines, then between them over gloo")
    victim = next(each for each in started if any(f"has place {place} of 4" in line for line in each[0].lines))
    victim[0].process.send_signal(how)
    started.remove(victim)
    for each, out in started:
        assert finish(each, out)["counts"] == WANTED


def test_promise_6_bits_are_the_same_for_a_number_of_workers(yard: LocalCluster, probes: Probes) -> None:
    digests = []
    for run in range(2):
        common = settings(yard, f"bits-{run}") | {"job__seed": 9}
        started = [probes.start("model", **common) for _ in range(RANKS)]
        found = {finish(script, out)["digest"] for script, out in started}
        assert len(found) == 1, "replicas differ"
        digests += found
    assert digests[0] == digests[1]


@pytest.mark.long("variables")
@COUNTS
def test_another_worker_takes_the_place_of_one_that_was_killed(
    yard: LocalCluster, probes: Probes, script: str, counted: str
) -> None:
    common = settings(yard, f"replaced-{script}")
    started = [probes.start(script, *OPTIONS, **common) for _ in range(RANKS)]
    victim, _ = started.pop(0)
    victim.wait_for("computed 5")
    victim.kill()
    started.append(probes.start(script, *OPTIONS, **common))
    for each, out in started:
        assert finish(each, out)[counted] == WANTED
    assert any("took the replica of worker" in line for line in started[-1][0].lines)


def test_worker_without_a_rank_waits_and_ends_with_the_others(yard: LocalCluster, probes: Probes) -> None:
    common = settings(yard, "spare") | {"job__consistency__logical_ranks": RANKS}
    started = [probes.start("count", *OPTIONS, **common) for _ in range(RANKS + 1)]
    results = [finish(script, out) for script, out in started]
    assert [each["counts"] for each in results] == [WANTED] * (RANKS + 1)
    assert sorted(each["computed"] for each in results)[0] == 0
    said = (yard._folder / "logs" / "coordinator.log").read_text()
    assert not re.search(r"job 'spare'.*(lost all its replicas|goes back)", said), "the members had published the end"


@pytest.mark.long("rows of tables")
@COUNTS
def test_all_are_killed_and_others_go_on_from_the_newest_checkpoint(
    yard: LocalCluster, probes: Probes, tmp_path: Path, script: str, counted: str
) -> None:
    common = settings(yard, f"begun-again-{script}") | {
        "job__checkpoint__every_steps": 5,
        "job__checkpoint__url": tmp_path,
    }
    started = [probes.start(script, *OPTIONS, **common) for _ in range(RANKS)]
    wait_for_any([each for each, _ in started], "computed 14")
    for each, _ in started:
        each.kill()
    others = [probes.start(script, *OPTIONS, **common) for _ in range(RANKS)]
    results = [finish(each, out) for each, out in others]
    assert [each[counted] for each in results] == [WANTED] * RANKS
    assert max(each["computed"] for each in results) < SAMPLES * EPOCHS // (RANKS * 4), "it did not begin at step 0"


@pytest.mark.long("words-from servers")
@pytest.mark.parametrize(
    "strategies",
    [("multi_worker_mirrored", "parameter_server"), ("parameter_server", "multi_worker_mirrored")],
    ids=["to servers", "from servers"],
)
@pytest.mark.parametrize("script", ["model", "words"])
def test_checkpoint_of_one_strategy_is_restored_under_another(
    yard: LocalCluster, probes: Probes, tmp_path: Path, strategies: tuple[str, str], script: str
) -> None:
    """The state of AdamW, of rows and of their Adagrad moves too: the loss at the end is that of a run that was not
    interrupted."""
    job = f"moved-{script}-{strategies[0]}"
    common = settings(yard, job) | {"job__workers_expected": 1, "job__consistency__mode": "sync"}
    common |= {"job__checkpoint__url": tmp_path, "job__seed": 4}
    undisturbed = probes.run(script, **(common | {"job": f"{job}-whole", "job__strategy": strategies[1]}))
    stopped = probes.run(script, "--stop-at", "20", **(common | {"job__strategy": strategies[0]}))
    assert stopped["computed"] == 20
    order = ["checkpoint", "restore", job, "--url", str(tmp_path), "--coordinator", yard.coordinator]
    assert main([*order, "--state", str(yard._folder)]) == 0
    went_on = probes.run(script, **(common | {"job__strategy": strategies[1]}))
    assert went_on["computed"] == undisturbed["computed"] - 20
    assert went_on["loss"] == pytest.approx(undisturbed["loss"], rel=1e-4)
