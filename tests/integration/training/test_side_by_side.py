"""Several spread replicas side by side (job.strategy pipeline, tensor, sharded): each by two workers, which compute a
logical rank together, or have shards of one replica."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from shardyard_launcher.yard.local_cluster import LocalCluster
from tests.support.spread_jobs import STEPS, STRATEGIES, alone, counts_mode, options, settings, start
from tests.support.yards import Probes, Script, finish, running_yard, wait_for_any


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    given = {"membership.lease_ms": 2_500, "membership.heartbeat_ms": 100}
    with running_yard(tmp_path_factory.mktemp("yard"), servers=1, settings=given) as cluster:
        yield cluster


def ranks_of(strategy: str, workers: int) -> int:
    return workers if strategy == "sharded" else workers // 2


@pytest.fixture(scope="module")
def wanted(yard: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    """The losses of one process, by the number of logical ranks, which it computes one after the other."""
    found = {}
    with Probes(tmp_path_factory.mktemp("alone")) as probes:
        for ranks in (2, 4):
            losses = probes.run("stages", *options(ranks), **alone(yard, f"alone-{ranks}", ranks))["losses"]
            assert len(losses) == STEPS * ranks
            found[ranks] = [float(each) for each in losses]
    return found


def place_in(script: Script, members: int) -> int:
    """The last place that the worker has had in a group of so many."""
    places = [at for line in script.lines for at in range(members) if f"has place {at} of {members}" in line]
    return places[-1]


@pytest.mark.long("one machine-pipeline", "aabb-sharded", "abab-tensor")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("machines", ["", "aabb", "abab"], ids=["one machine", "aabb", "abab"])
def test_losses_are_those_of_one_process(
    yard: LocalCluster, probes: Probes, wanted: dict[int, list[float]], strategy: str, machines: str
) -> None:
    """`machines`: the names of those that the workers are on."""
    ranks = ranks_of(strategy, 4)
    common = settings(yard, f"as-{strategy}-{machines}", strategy, 4)
    given = ("stages", *options(ranks))
    if machines:
        common["worker__same_host"] = "auto"
        started = [probes.start(*given, "--machine", machine, **common) for machine in machines]
    else:
        started = start(probes, 4, *given, **common)
    results = [finish(script, out) for script, out in started]
    for (script, _), result in zip(started, results, strict=True):
        rank = place_in(script, 4) * ranks // 4
        assert result["losses"] == pytest.approx(wanted[ranks][rank::ranks], rel=1e-5)
    assert len({result["digest"] for result in results}) == 1, "all have the whole model at the end"


@pytest.mark.long("pipeline")
@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
def test_one_replica_computes_the_ranks_of_two(
    yard: LocalCluster, probes: Probes, wanted: dict[int, list[float]], strategy: str
) -> None:
    common = settings(yard, f"both-{strategy}", strategy, 2, job__consistency__logical_ranks=2)
    for script, out in start(probes, 2, "stages", *options(2), **common):
        assert finish(script, out)["losses"] == pytest.approx(wanted[2], rel=1e-5)


@pytest.mark.long("tensor")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buffers_and_a_clipped_gradient_are_of_all_replicas(yard: LocalCluster, probes: Probes, strategy: str) -> None:
    """The script's model has them when the data ends. One of two ranks has half of a batch in the last step."""
    ranks, job, more = ranks_of(strategy, 4), f"buffers-{strategy}", {"job__clip__norm": 0.05}
    norm = () if strategy == "pipeline" else ("--batch-norm",)  # a pipeline's sees micro-batches
    given = ("stages", "--samples", str(160 * ranks), "--epochs", "1", *norm)
    common = settings(yard, f"{job}-alone", "parameter_server", 1, job__consistency__mode="sync", **more)
    common["job__consistency__logical_ranks"] = ranks
    wanted = probes.run(*given, **common)["evaluated"]
    started = start(probes, 4, *given, **settings(yard, job, strategy, 4, **more))
    assert [finish(script, out)["evaluated"] for script, out in started] == [pytest.approx(wanted, rel=1e-5)] * 4


@pytest.mark.long
def test_gradients_are_compressed_between_pipelines(
    yard: LocalCluster, probes: Probes, wanted: dict[int, list[float]]
) -> None:
    common = settings(yard, "bf16", "pipeline", 4, job__all_reduce="bf16")
    for script, out in start(probes, 4, "stages", *options(2), **common):
        losses = finish(script, out)["losses"]
        of_rank = wanted[2][place_in(script, 4) // 2 :: 2]
        assert losses == pytest.approx(of_rank, rel=0.05)
        assert losses[5:] != pytest.approx(of_rank[5:], rel=1e-5)


@pytest.mark.long("sharded-frozen")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_promise_2_others_go_on_with_the_replica_that_is_left(
    yard: LocalCluster, probes: Probes, how: signal.Signals, strategy: str
) -> None:
    """Nobody goes back to a checkpoint. One that comes takes its part from the worker that has it, which is lost then.
    Each sample counts once."""
    ranks = ranks_of(strategy, 4)
    common = settings(yard, f"lost-{how.name.lower()}-{strategy}", strategy, 4)
    given = (counts_mode(strategy), "--samples", "96", "--epochs", "10", "--pause-ms", "20", "--ranks", str(ranks))
    started = start(probes, 4, *given, **common)
    wait_for_any([script for script, _ in started], "computed 7")
    victim = next(each for each in started if place_in(each[0], 4) == 1)
    started.remove(victim)
    victim[0].process.send_signal(how)
    wait_for_any([script for script, _ in started], "has place 1 of 2")
    newcomer = probes.start(*given, **common)
    newcomer[0].wait_for("took its part of a replica")
    newcomer[0].wait_for("computed 3")
    same = (place_in(newcomer[0], 4) + 2) % 4
    giver = next(each for each in started if place_in(each[0], 4) == same)
    started.remove(giver)
    giver[0].process.send_signal(how)
    for script, out in (*started, newcomer):
        assert finish(script, out)["counts"] == [[10.0] * 96] * 2
        assert not any("goes back to checkpoint" in line for line in script.lines)


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_gradient_that_is_not_finite_changes_nothing(yard: LocalCluster, probes: Probes, strategy: str) -> None:
    """One member says so, of the replica whose loss was not finite."""
    ranks = ranks_of(strategy, 4)
    given = ("stages", "--samples", str(80 * ranks), "--epochs", "1", "--nan-samples", "3")
    found = []
    for name, workers in (("multi_worker_mirrored", ranks), (strategy, 4)):
        started = start(probes, workers, *given, **settings(yard, f"nan-{strategy}-{name}", name, workers))
        losses = [finish(script, out)["losses"] for script, out in started]
        found.append(sorted({str(each): each for each in losses}.values(), key=str))
        told = [script for script, _ in started if any("it does not count" in line for line in script.lines)]
        assert len(told) == 1
    assert found[1] == [pytest.approx(each, rel=1e-5, nan_ok=True) for each in found[0]]
    assert "nan" in str(losses[next(at for at, (script, _) in enumerate(started) if script is told[0])])


@pytest.mark.parametrize(
    ("mistake", "what"),
    [
        ("twice", "job.train_step twice for one batch"),
        ("sampler", "job.sampler in a job whose job.strategy is pipeline, with 2 ranks"),
    ],
)
def test_what_cannot_be_taken_out_of_a_sum_is_refused(
    yard: LocalCluster, probes: Probes, mistake: str, what: str
) -> None:
    common = settings(yard, f"mistake-{mistake}", "pipeline", 2, job__consistency__logical_ranks=2)
    for script, out in start(probes, 2, "cut-mistakes", "--mistakes", mistake, **common):
        assert finish(script, out)["errors"] == {mistake: what}
