"""Replicas whose variables are on the servers (job.between parameter_server): each worker pushes the gradients of its
stage, or its share of all gradients."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard_launcher.cli import main
from shardyard_launcher.yard.local_cluster import LocalCluster
from tests.support import spread_jobs
from tests.support.spread_jobs import BATCH, STRATEGIES, alone, counts_mode, options, start
from tests.support.yards import Probes, finish, running_yard, wait_for_any

REFUSED = "has variables of 2 workers of a replica"


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    given = {"membership.lease_ms": 1_500, "membership.heartbeat_ms": 100}
    with running_yard(tmp_path_factory.mktemp("yard"), servers=2, settings=given) as cluster:
        yield cluster


def settings(
    yard: LocalCluster, job: str, workers: int = 2, *, strategy: str = "pipeline", **more: object
) -> dict[str, object]:
    return spread_jobs.settings(yard, job, strategy, workers, job__between="parameter_server") | more


@pytest.mark.long("2-pipeline", "1-sharded", "2-tensor")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_losses_are_those_of_one_process(yard: LocalCluster, probes: Probes, replicas: int, strategy: str) -> None:
    wanted = probes.run("stages", *options(replicas), **alone(yard, f"alone-{replicas}-{strategy}", replicas))
    workers = 2 * replicas
    common = settings(yard, f"pushed-{replicas}-{strategy}", workers, strategy=strategy)
    started = start(probes, workers, "stages", *options(replicas), **common)
    results = [finish(script, out) for script, out in started]
    for (script, _), result in zip(started, results, strict=True):
        place = next(
            at for at in range(workers) if any(f"has place {at} of {workers}" in line for line in script.lines)
        )
        assert result["losses"] == pytest.approx(wanted["losses"][place // 2 :: replicas], rel=1e-5)
    assert len({result["digest"] for result in results}) == 1, "all have the whole model at the end"


@pytest.mark.long("sharded")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_compressed(yard: LocalCluster, probes: Probes, strategy: str) -> None:
    """And values too."""
    wanted = probes.run("stages", *options(1), **alone(yard, f"whole-{strategy}", 1))["losses"]
    common = settings(yard, f"compressed-{strategy}", strategy=strategy, job__compression__whole_elements_max=0)
    common |= {"job__compression__push": "bf16", "job__compression__pull": "bf16"}
    for script, out in start(probes, 2, "stages", *options(1), **common):
        losses = finish(script, out)["losses"]
        assert losses == pytest.approx(wanted, rel=0.05)
        assert losses[5:] != pytest.approx(wanted[5:], rel=1e-5)


@pytest.mark.long("tensor-2", "sharded-1")
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_is_clipped_by_the_norm_over_all_parts(
    yard: LocalCluster, probes: Probes, strategy: str, replicas: int
) -> None:
    """Buffers are a step's mean too. Each worker of a sharded replica normalizes its part of a batch by itself, as two
    ranks with half of the batch do."""
    ranks, batch = (2 * replicas, BATCH // 2) if strategy == "sharded" else (replicas, BATCH)
    norm = () if strategy == "pipeline" else ("--batch-norm",)  # a pipeline's sees micro-batches
    given, clip = ("stages", "--samples", str(160 * replicas), "--epochs", "1", *norm), {"job__clip__norm": 0.05}
    job = f"clipped-{strategy}-{replicas}"
    wanted = probes.run(*given, "--batch", str(batch), **alone(yard, f"{job}-alone", ranks) | clip)["evaluated"]
    common = settings(yard, job, 2 * replicas, strategy=strategy) | clip
    started = start(probes, 2 * replicas, *given, **common)
    assert [finish(script, out)["evaluated"] for script, out in started] == [pytest.approx(wanted, rel=1e-5)] * len(
        started
    )


@pytest.mark.long("sharded")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_norm_that_clips_is_that_of_variables_and_rows(yard: LocalCluster, probes: Probes, strategy: str) -> None:
    """A step of rows is 1 whatever their gradients, which are part of the norm."""
    clip = {"job__clip__norm": 0.3}
    given = (counts_mode(strategy), "--with-rows", "--samples", "96", "--epochs", "2")
    wanted = probes.run(*given, **alone(yard, f"clipped-rows-{strategy}-alone", 1) | clip)["counts"]
    common = settings(yard, f"clipped-rows-{strategy}", strategy=strategy) | clip
    if strategy == "pipeline":
        common["job__pipeline__cut"] = "counts.second"
    for script, out in start(probes, 2, *given, **common):
        counts = finish(script, out)["counts"]
        assert counts == [pytest.approx(each, rel=1e-5) for each in wanted]
        assert 0.0 < max(counts[0]) < 1.0, "without clipping it is 2"


@pytest.mark.long("pipeline-1-frozen", "pipeline-0-rows", "sharded-rows", "tensor-1-frozen")
@pytest.mark.parametrize(
    ("strategy", "place", "how", "with_rows"),
    [
        pytest.param("pipeline", 0, signal.SIGKILL, False, id="pipeline-0-killed"),
        pytest.param("pipeline", 0, signal.SIGSTOP, False, id="pipeline-0-frozen"),
        pytest.param("pipeline", 1, signal.SIGKILL, False, id="pipeline-1-killed"),
        pytest.param("pipeline", 1, signal.SIGSTOP, False, id="pipeline-1-frozen"),
        pytest.param("pipeline", 0, signal.SIGKILL, True, id="pipeline-0-rows"),
        pytest.param("pipeline", 1, signal.SIGSTOP, True, id="pipeline-1-rows"),
        pytest.param("sharded", 0, signal.SIGSTOP, False, id="sharded-0-frozen"),
        pytest.param("sharded", 1, signal.SIGKILL, False, id="sharded-1-killed"),
        pytest.param("sharded", 1, signal.SIGKILL, True, id="sharded-rows"),
        pytest.param("tensor", 0, signal.SIGKILL, False, id="tensor-0-killed"),
        pytest.param("tensor", 1, signal.SIGSTOP, False, id="tensor-1-frozen"),
        pytest.param("tensor", 0, signal.SIGSTOP, True, id="tensor-rows"),
    ],
)
def test_promise_2_a_lost_part_costs_no_step(
    yard: LocalCluster, probes: Probes, strategy: str, place: int, how: signal.Signals, with_rows: bool
) -> None:
    """It is lost before it pushes a step, which the other one pushes. A worker in reserve takes its place, and goes on
    from that step. There is no checkpoint to go back to. Without rows each step waits for the norm over all
    parts, which clips nothing. Rows are looked up in the second stage, when all have the step."""
    more = {"job__checkpoint__url": "never", "job__clip__norm": 0.0 if with_rows else 1e9}
    if with_rows and strategy == "pipeline":
        more["job__pipeline__cut"] = "counts.second"
    common = settings(yard, f"lost-{how.name}-{place}-{strategy}-{with_rows}".lower(), strategy=strategy, **more)
    accumulate = "2" if how is signal.SIGSTOP else "1"
    given = [counts_mode(strategy), "--samples", "48", "--epochs", "4", "--pause-ms", "20", "--accumulate", accumulate]
    given += ["--lose", str(place), "8", str(int(how))]
    if with_rows:
        given += ["--with-rows", *(["--look-ahead"] if how is signal.SIGKILL else [])]
    started = start(probes, 3, *given, **common)
    wait_for_any([script for script, _ in started], "is lost")
    started.remove(next(each for each in started if any("is lost" in line for line in each[0].lines)))
    for script, out in started:
        assert finish(script, out)["counts"] == [[4.0] * 48] * (2 + with_rows)


@pytest.mark.long("tensor")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_are_those_of_one_process_after_a_loss(
    yard: LocalCluster, probes: Probes, tmp_path: Path, strategy: str
) -> None:
    """The others have trained before it. A newcomer's model is compared with the whole one again, if it is cut."""
    given = ("stages", "--samples", "200", "--epochs", "2")
    wanted = probes.run(*given, **alone(yard, f"replaced-{strategy}-alone", 1))["losses"]
    common = settings(yard, f"replaced-{strategy}", strategy=strategy, job__checkpoint__url="never")
    started = start(probes, 3, *given, "--hold-at", "13", "--hold", str(tmp_path / "go"), **common)
    wait_for_any([script for script, _ in started], "computed 13")
    in_place = [any("has place 0 of 2" in line for line in script.lines) for script, _ in started]
    victim, _ = started.pop(in_place.index(True))
    victim.process.send_signal(signal.SIGKILL)
    (tmp_path / "go").touch()
    for script, out in started:
        assert finish(script, out)["losses"][-30:] == pytest.approx(wanted[-30:], rel=1e-5)


@pytest.mark.long("pipeline")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_step_with_rows_that_are_not_finite_changes_neither_rows_nor_variables(
    yard: LocalCluster, probes: Probes, strategy: str
) -> None:
    given = (counts_mode(strategy), "--with-rows", "--samples", "48", "--epochs", "2", "--nan-samples", "3")
    more = {"job__pipeline__cut": "counts.second"} if strategy == "pipeline" else {}
    started = start(probes, 2, *given, **settings(yard, f"nan-rows-{strategy}", strategy=strategy, **more))
    for script, out in started:
        first, second, rows = finish(script, out)["counts"]
        assert first == second == rows
        assert 2 * 48 - sum(rows) == 2 * 4, "of one step in each epoch"
    told = [line for script, _ in started for line in script.lines if "it does not count" in line]
    assert len(told) == 2, "one worker says so, in each epoch"


def test_promise_2_one_pipeline_computes_the_ranks_of_two(yard: LocalCluster, probes: Probes) -> None:
    """A worker of each stage is lost, so that one pipeline can be made of the others."""
    common = settings(yard, "both-lost", 4)
    given = ("stage-counts", "--samples", "96", "--epochs", "10", "--pause-ms", "20", "--ranks", "2")
    started = start(probes, 4, *given, **common)
    wait_for_any([script for script, _ in started], "computed 7")
    for place in (0, 3):
        victim = next(each for each in started if any(f"has place {place} of 4" in line for line in each[0].lines))
        started.remove(victim)
        victim[0].process.send_signal(signal.SIGKILL)
    wait_for_any([script for script, _ in started], "has place 1 of 2")
    newcomers = start(probes, 2, *given, **common)
    wait_for_any([script for script, _ in newcomers], "has place 3 of 4")
    for script, out in (*started, *newcomers):
        assert finish(script, out)["counts"] == [[10.0] * 96] * 2
        assert not any("goes back to checkpoint" in line for line in script.lines)


@pytest.mark.long("tensor")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_that_is_not_finite_changes_nothing(yard: LocalCluster, probes: Probes, strategy: str) -> None:
    given = ("stages", "--samples", "160", "--epochs", "1", "--nan-samples", "3")
    found, told = [], []
    pushed = settings(yard, f"nan-{strategy}", 4, strategy=strategy)
    for workers, common in ((1, alone(yard, f"nan-{strategy}-alone", 2)), (4, pushed)):
        started = start(probes, workers, *given, **common)
        found.append([finish(script, out)["losses"] for script, out in started])
        told.append([line for script, _ in started for line in script.lines if "it does not count" in line])
    (wanted,), ranks = found[0], sorted(found[1], key=str)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert [ranks[0], ranks[2]] == sorted(
        ([pytest.approx(each, rel=1e-5, nan_ok=True) for each in wanted[rank::2]] for rank in range(2)), key=str
    )
    assert list(map(len, told)) == [1, 1], told


@pytest.mark.long("pipeline")
@pytest.mark.parametrize("before", ["parameter_server", "pipeline"])
def test_partitions_of_another_strategy_are_refused(
    yard: LocalCluster, probes: Probes, tmp_path: Path, before: str
) -> None:
    """The error says what to do."""
    job, to_servers = f"moved-from-{before.replace('_', '-')}", {"job__checkpoint__url": tmp_path}
    common = alone(yard, job, 1) if before == "parameter_server" else settings(yard, job, job__between="all_reduce")
    workers = 1 if before == "parameter_server" else 2
    for script, out in start(probes, workers, "stages", *options(1), "--stop-at", "20", **common | to_servers):
        finish(script, out)
    order = ["checkpoint", "restore", job, "--url", str(tmp_path), "--coordinator", yard.coordinator]
    assert main([*order, "--state", str(yard._folder)]) == 0
    # when the first has been refused, and nobody else is there yet, the job ends, and the second worker begins it anew
    again = start(probes, 2, "stages", *options(1), **settings(yard, job) | to_servers)
    wait_for_any([script for script, _ in again], REFUSED)
    refused = next(script for script, _ in again if REFUSED in script.output)
    assert refused.process.wait(30) != 0


@pytest.mark.long("pipeline")
@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
def test_checkpoint_is_restored_under_the_other_setting(
    yard: LocalCluster, probes: Probes, tmp_path: Path, strategy: str
) -> None:
    """AdamW's state moves too: losses go on as those of a run that was not interrupted."""
    wanted = probes.run("stages", *options(1), **alone(yard, f"moved-alone-{strategy}", 1))["losses"]
    job, found = f"moved-to-workers-{strategy}", []
    for number, between in enumerate(("parameter_server", "all_reduce")):
        common = settings(yard, job, strategy=strategy, job__between=between, job__checkpoint__url=tmp_path)
        stop = ("--stop-at", "20") if number == 0 else ()
        started = start(probes, 2, "stages", *options(1), *stop, **common)
        found += [finish(script, out)["losses"] for script, out in started][:1]
        if number == 0:
            order = ["checkpoint", "restore", job, "--url", str(tmp_path), "--coordinator", yard.coordinator]
            assert main([*order, "--state", str(yard._folder)]) == 0
    assert [*found[0], *found[1]] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.long("tensor")
@pytest.mark.parametrize("strategy", ["sharded", "tensor"])
def test_batches_of_the_script_itself_are_refused(yard: LocalCluster, probes: Probes, strategy: str) -> None:
    """Each worker would bring another one, and compute a part of it."""
    layers = {"job__tensor__colwise": "project", "job__tensor__rowwise": "out"}
    common = settings(yard, f"own-{strategy}", strategy=strategy, **layers)
    for script, out in start(probes, 2, "cut-mistakes", "--mistakes", "own data", **common):
        assert finish(script, out)["errors"] == {
            "own data": f"job.train_step outside of job.batches in a job whose job.strategy is {strategy}"
        }
