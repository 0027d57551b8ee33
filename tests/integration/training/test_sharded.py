"""A model whose variables are cut over processes (job.strategy sharded, tensor)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard_launcher.cli import main
from shardyard_launcher.yard.local_cluster import LocalCluster
from tests.support import spread_jobs
from tests.support.spread_jobs import STEPS, alone, counts_mode, options, start
from tests.support.yards import Probes, finish, running_yard, wait_for_any

COUNTED = ("--samples", "48", "--epochs", "4", "--pause-ms", "20")
Counts = list[list[float]]
WITH_ROWS = pytest.mark.parametrize(
    ("more", "counts"),
    [((), [[4.0] * 48] * 2), (("--with-rows",), [[4.0] * 48] * 3)],
    ids=["variables", "rows of tables"],
)
"""Scripts that count each sample, and what they return."""


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    given = {"membership.lease_ms": 1_500, "membership.heartbeat_ms": 100}
    with running_yard(tmp_path_factory.mktemp("yard"), servers=1, settings=given) as cluster:
        yield cluster


def settings(yard: LocalCluster, job: str, strategy: str, workers: int, **more: object) -> dict[str, object]:
    """A replica over all workers."""
    common = spread_jobs.settings(yard, job, strategy, workers, size=workers)
    if strategy == "sharded":
        common["job__sharded__size"] = "auto"
    return common | more


def ranks_of(strategy: str, workers: int) -> int:
    return workers if strategy == "sharded" else 1


@pytest.fixture(scope="module")
def wanted(yard: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    """The losses of one process, by the number of logical ranks, which it computes one after the other."""
    found = {}
    with Probes(tmp_path_factory.mktemp("alone")) as probes:
        for ranks in (1, 2, 4):
            losses = probes.run("stages", *options(ranks), **alone(yard, f"alone-{ranks}", ranks))["losses"]
            assert len(losses) == STEPS * ranks
            found[ranks] = [float(each) for each in losses]
    return found


@pytest.mark.long("sharded-2")
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("strategy", ["sharded", "tensor"])
def test_losses_are_those_of_one_process(
    yard: LocalCluster, probes: Probes, wanted: dict[int, list[float]], strategy: str, workers: int
) -> None:
    common, ranks = settings(yard, f"as-{strategy}-{workers}", strategy, workers), ranks_of(strategy, workers)
    started = start(probes, workers, "stages", *options(ranks), **common)
    results = [finish(script, out) for script, out in started]
    for (script, _), result in zip(started, results, strict=True):
        place = next(at for at in range(workers) if any(f"has place {at} of" in line for line in script.lines))
        of_rank = wanted[ranks][place % ranks :: ranks]
        assert result["losses"] == pytest.approx(of_rank, rel=1e-5)
    assert len({result["digest"] for result in results}) == 1, "all have the whole model at the end"


@pytest.mark.long("modules")
@pytest.mark.parametrize(
    "more",
    [{"job__sharded__reshard_after_forward": "false"}, {"job__sharded__modules": "0 [24]"}, {"job__clip__norm": 0.05}],
    ids=["kept", "modules", "clipped"],
)
def test_settings_of_shards_change_no_loss(yard: LocalCluster, probes: Probes, more: dict[str, object]) -> None:
    job = "-".join(next(iter(more)).split("__")[1:]).replace("_", "-")
    given = ("stages", "--samples", "160", "--epochs", "1")
    clip = {name: value for name, value in more.items() if "clip" in name}
    losses = probes.run(*given, **alone(yard, f"{job}-alone", 2), **clip)["losses"]
    started = start(probes, 2, *given, **settings(yard, job, "sharded", 2, **more))
    found = sorted(finish(script, out)["losses"] for script, out in started)
    assert found == [pytest.approx(each, rel=1e-5) for each in sorted([losses[::2], losses[1::2]])]


@pytest.mark.long("sharded")
@pytest.mark.parametrize("strategy", ["sharded", "tensor"])
def test_buffers_are_the_mean_over_ranks(yard: LocalCluster, probes: Probes, strategy: str) -> None:
    """The script's model has them when the data ends."""
    ranks, job = ranks_of(strategy, 2), f"buffers-{strategy}"
    given = ("stages", "--samples", str(160 * ranks), "--epochs", "1", "--batch-norm")
    wanted = probes.run(*given, **alone(yard, f"{job}-alone", ranks))["evaluated"]
    started = start(probes, 2, *given, **settings(yard, job, strategy, 2))
    assert [finish(script, out)["evaluated"] for script, out in started] == [pytest.approx(wanted, rel=1e-5)] * 2


def test_one_worker_computes_all_ranks(yard: LocalCluster, probes: Probes, wanted: dict[int, list[float]]) -> None:
    common = settings(yard, "one-shard", "sharded", 1, job__consistency__logical_ranks=2)
    assert probes.run("stages", *options(2), **common)["losses"] == pytest.approx(wanted[2], rel=1e-5)


@pytest.mark.long
def test_members_with_fewer_ranks_compute_as_often(
    yard: LocalCluster, probes: Probes, wanted: dict[int, list[float]]
) -> None:
    """Three members have four ranks."""
    common = settings(yard, "uneven", "sharded", 3, job__consistency__logical_ranks=4)
    started = start(probes, 3, "stages", *options(4), **common)
    losses = sorted(loss for script, out in started for loss in finish(script, out)["losses"])
    assert losses == pytest.approx(sorted(wanted[4]), rel=1e-5)


def test_members_with_fewer_ranks_accumulate_as_often(yard: LocalCluster, probes: Probes) -> None:
    common = settings(yard, "uneven-batches", "sharded", 3, job__consistency__logical_ranks=4)
    given = ("stage-counts", "--samples", "64", "--epochs", "2", "--ranks", "4", "--accumulate", "2")
    for script, out in start(probes, 3, *given, **common):
        assert finish(script, out)["counts"] == [[2.0] * 64] * 2


@pytest.mark.long("variables-sharded-killed", "rows of tables-tensor-frozen")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("strategy", ["sharded", "tensor"])
@WITH_ROWS
def test_promise_2_each_sample_counts_once_when_a_member_is_lost(
    yard: LocalCluster,
    probes: Probes,
    tmp_path: Path,
    how: signal.Signals,
    strategy: str,
    more: tuple[str, ...],
    counts: Counts,
) -> None:
    """The others go back to the newest checkpoint: of tensor with a worker in reserve, of sharded without it. One that
    freezes does that between the two batches of a step. With tables there is a checkpoint of each step, so that of
    sharded the others may go on with what the servers have."""
    common = settings(yard, f"lost-{how.name}-{strategy}-{len(more)}", strategy, 2) | {
        "job__checkpoint__url": tmp_path,
        "job__checkpoint__every_steps": 1 if more else 5,
    }
    accumulate = "2" if how is signal.SIGSTOP else "1"
    given = (counts_mode(strategy), *COUNTED, *more, "--ranks", str(ranks_of(strategy, 2)), "--accumulate", accumulate)
    started = start(probes, 2 if strategy == "sharded" else 3, *given, **common)
    wait_for_any([script for script, _ in started], "computed 7")
    in_place = [any("has place 1 of 2" in line for line in script.lines) for script, _ in started]
    victim, _ = started.pop(in_place.index(True))
    victim.process.send_signal(how)
    for script, out in started:
        assert finish(script, out)["counts"] == counts


@pytest.mark.long("rows of tables")
@WITH_ROWS
def test_a_worker_comes_and_another_leaves_without_a_step_back(
    yard: LocalCluster, probes: Probes, tmp_path: Path, more: tuple[str, ...], counts: Counts
) -> None:
    """The members publish, and the next group cuts the variables anew."""
    common = settings(yard, f"comes-{len(more)}", "sharded", 2) | {"job__consistency__logical_ranks": 4}
    given = ("stage-counts", *more, "--samples", "96", "--epochs", "8", "--pause-ms", "20", "--ranks", "4")
    started = start(probes, 2, *given, **common, job__checkpoint__url=tmp_path)
    wait_for_any([script for script, _ in started], "computed 7")
    newcomer = probes.start(*given, **common, job__checkpoint__url=tmp_path)
    newcomer[0].wait_for("has place 2 of 3")
    newcomer[0].wait_for("computed 3")
    leaver = started.pop(0)
    leaver[0].process.send_signal(signal.SIGTERM)
    for script, out in (*started, newcomer):
        assert finish(script, out)["counts"] == [[8.0] * 96] * len(counts)
        assert not any("goes back to checkpoint" in line for line in script.lines)
    assert any("has place 1 of 2" in line for line in newcomer[0].lines)


@pytest.mark.long("to servers-sharded", "from servers-tensor")
@pytest.mark.parametrize("strategy", ["sharded", "tensor"])
@pytest.mark.parametrize("is_first", [True, False], ids=["to servers", "from servers"])
def test_checkpoint_is_restored_under_another_strategy(
    yard: LocalCluster,
    probes: Probes,
    tmp_path: Path,
    wanted: dict[int, list[float]],
    strategy: str,
    is_first: bool,
) -> None:
    """AdamW's state moves too: losses go on as those of a run that was not interrupted."""
    job, ranks, found = f"moved-{strategy}-{is_first}".lower(), ranks_of(strategy, 2), list[list[float]]()
    for number, is_cut in enumerate((is_first, not is_first)):
        common = settings(yard, job, strategy, 2) if is_cut else alone(yard, job, ranks)
        stop = ("--stop-at", "20" if is_cut else str(20 * ranks)) if number == 0 else ()
        started = start(
            probes, 1 + is_cut, "stages", *options(ranks), *stop, **common, job__checkpoint__url=str(tmp_path)
        )
        losses = [finish(script, out)["losses"] for script, out in started]
        found.append(sorted(loss for each in losses[: ranks if is_cut else 1] for loss in each))
        if number == 0:
            order = ["checkpoint", "restore", job, "--url", str(tmp_path), "--coordinator", yard.coordinator]
            assert main([*order, "--state", str(yard._folder)]) == 0
    stopped, went_on = found
    before, after = wanted[ranks][: len(stopped)], wanted[ranks][len(stopped) :]
    assert len(stopped) < 30 * ranks
    assert stopped == pytest.approx(sorted(before), rel=1e-5)
    assert went_on == pytest.approx(sorted(after), rel=1e-5)


@pytest.mark.parametrize("strategy", ["sharded", "tensor"])
def test_mistakes_of_a_script_are_told(yard: LocalCluster, probes: Probes, strategy: str) -> None:
    common = settings(yard, f"mistakes-{strategy}", strategy, 2)
    if strategy == "tensor":
        common |= {"job__tensor__colwise": "project", "job__tensor__rowwise": "out"}
    expected = {
        "step": f"optimizer.step() in a job whose job.strategy is {strategy}",
        "forward": "the forward of the whole model while its group trains",
        "state": f"optimizer.state_dict() in a job whose job.strategy is {strategy}",
        "accumulated": f"job.no_sync in a job whose job.strategy is {strategy}",
    }
    if strategy == "sharded":
        expected["own data"] = ""  # a step, after which a worker has its shards only
        expected["values"] = "model.state_dict() while the group trains with job.strategy sharded"
        expected["last"] = "14 samples in the last step of an epoch, for 2 logical ranks with batches of 14"
    else:
        del expected["step"]  # after it no data set may follow
        expected["own data"] = "job.train_step outside of job.batches in a job whose job.strategy is tensor"
        expected["plan"] = "a forward that computes something else with a part of its layers in each worker"
    for script, out in start(probes, 2, "cut-mistakes", "--mistakes", ",".join(expected), **common):
        assert finish(script, out)["errors"] == {name: what for name, what in expected.items() if what}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["sharded", "tensor"])
def test_a_gradient_that_is_not_finite_changes_nothing(yard: LocalCluster, probes: Probes, strategy: str) -> None:
    """As with replicas: one member says which work it was."""
    ranks = ranks_of(strategy, 2)
    given = ("stages", "--samples", str(80 * ranks), "--epochs", "1", "--nan-samples", "3")
    found = []
    for name, workers in (("multi_worker_mirrored", ranks), (strategy, 2)):
        started = start(probes, workers, *given, **settings(yard, f"nan-{strategy}-{name}", name, workers))
        losses = [finish(script, out)["losses"] for script, out in started]
        found.append(sorted(losses[:ranks], key=str))
        lines = [line for script, _ in started for line in script.lines]
        assert sum("is not finite; it does not count" in line for line in lines) == 1, lines
    assert found[1] == [pytest.approx(each, rel=1e-5, nan_ok=True) for each in found[0]]
    assert "nan" in str(found[0])


@pytest.mark.long("sharded")
@pytest.mark.parametrize("strategy", ["sharded", "tensor"])
def test_step_with_rows_that_are_not_finite_changes_neither_rows_nor_variables(
    yard: LocalCluster, probes: Probes, strategy: str
) -> None:
    """Of any rank: one member says which work it was."""
    ranks = ranks_of(strategy, 2)
    given = (
        counts_mode(strategy),
        "--with-rows",
        "--samples",
        "48",
        "--epochs",
        "2",
        "--nan-samples",
        "3",
        "--ranks",
        str(ranks),
    )
    started = start(probes, 2, *given, **settings(yard, f"nan-rows-{strategy}", strategy, 2))
    for script, out in started:
        first, second, rows = finish(script, out)["counts"]
        assert first == second == rows
        assert 2 * 48 - sum(rows) == 2 * 4 * ranks, "of one step in each epoch"
    lines = [line for script, _ in started for line in script.lines]
    assert sum("the gradient of 'counts' is not finite; it does not count" in line for line in lines) == 2, lines
