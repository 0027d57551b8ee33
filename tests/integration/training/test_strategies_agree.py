"""One script under every strategy and number of processes: the losses are those of plain torch on the same samples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from shardyard_launcher.yard.local_cluster import LocalCluster
from tests.support.scripts import equivalence
from tests.support.yards import SCRIPTS, Script, running_yard

RANKS: Mapping[str, object] = {"consistency__mode": "sync", "consistency__logical_ranks": 4}
ACCUMULATE = "accumulate"
OF_SEVERAL = {"pipeline": "pipeline__stages", "tensor": "tensor__size", "sharded": "sharded__size"}
"""What says how many workers have a part of the model each."""
PUSHED: Mapping[str, Mapping[str, object]] = {"pipeline": {"pipeline__microbatches": 4}, "sharded": {}, "tensor": {}}
STRATEGIES: Mapping[str, Mapping[str, object]] = {
    "parameter_server": RANKS,
    "central_storage": RANKS,
    "mirrored": RANKS,
    "multi_worker_mirrored": RANKS,
    "pipeline": {"pipeline__microbatches": 4},
    "sharded": RANKS,
    "tensor": {},
    # replicas side by side, of two processes each
    "two-pipelines": {
        "strategy": "pipeline",
        "pipeline__microbatches": 4,
        "pipeline__stages": 2,
        "consistency__logical_ranks": 2,
    },
    "two-sharded": {"strategy": "sharded", "sharded__size": 2, **RANKS},
    "two-tensor": {"strategy": "tensor", "tensor__size": 2, "consistency__logical_ranks": 2},
    # two batches a step
    **{
        f"accumulated-{name}": {"strategy": name, **settings, ACCUMULATE: 2}
        for name, settings in {
            "multi_worker_mirrored": RANKS,
            "pipeline": {"pipeline__microbatches": 4},
            "sharded": RANKS,
            "tensor": {},
        }.items()
    },
    # variables on the servers
    **{
        f"{prefix}pushed-{name}": {"strategy": name, "between": "parameter_server", **settings, **more}
        for name, settings in PUSHED.items()
        for prefix, more in {
            "": {},
            "two-": {OF_SEVERAL[name]: 2, "consistency__logical_ranks": 2},
            "accumulated-": {ACCUMULATE: 2},
        }.items()
    },
}
Taken = dict[int, list[tuple[float, list[int]]]]


def needs_several(strategy: str) -> bool:
    """Whether no worker has the whole model."""
    return "pushed" in strategy or strategy.removeprefix("accumulated-") in ("pipeline", "tensor")


CASES = [
    (model, strategy, processes)
    for model in equivalence.MODELS
    for strategy in STRATEGIES
    for processes in (1, 2, 4)
    if (processes > 1 or not needs_several(strategy)) and (processes == 4 or not strategy.startswith("two-"))
]


def plain(model: str, steps: list[list[int]]) -> list[float]:
    """The losses of one process that takes these samples in each step, without this library."""
    table = torch.nn.Embedding(equivalence.IDS, equivalence.DIM)
    torch.nn.init.zeros_(table.weight)
    module = equivalence.made(model, lambda: table)
    rows = {id(parameter) for parameter in table.parameters()}
    dense = equivalence.optimizer_of([each for each in module.parameters() if id(each) not in rows])
    sparse = torch.optim.SGD(table.parameters(), lr=0.5)
    *inputs, target = equivalence.data_of(model)
    losses = []
    for samples in steps:
        loss = equivalence.loss_of(model, module(*(each[samples] for each in inputs)), target[samples])
        loss.backward()
        for optimizer in (dense, sparse):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def taken(
    yard: LocalCluster, folder: Path, model: str, strategy: str, processes: int
) -> dict[int, list[tuple[float, list[int]]]]:
    """By step: the loss and the samples of each batch."""
    given = {"strategy": strategy, "workers_expected": processes, "checkpoint__url": "never", **STRATEGIES[strategy]}
    accumulate = int(str(given.pop(ACCUMULATE, 1)))
    if needs_several(strategy):
        given.setdefault(OF_SEVERAL[str(given["strategy"])], processes)
    environment = {
        "SHARDYARD_JOB": f"{model}-{strategy.replace('_', '-')}-{processes}",
        "SHARDYARD_COORDINATOR": yard.coordinator,
        "SHARDYARD__WORKER__THREADS": "1",
    } | {f"SHARDYARD__JOB__{name.upper()}": str(value) for name, value in given.items()}
    batch = equivalence.STEP_SAMPLES // int(str(given.get("consistency__logical_ranks", 1))) // accumulate
    outs = [folder / f"{number}.json" for number in range(processes)]
    command = [str(SCRIPTS / "equivalence.py"), model]
    often = ["--batch-size", str(batch), "--accumulate", str(accumulate)]
    scripts = [Script([*command, str(out), *often], environment) for out in outs]
    try:
        for script in scripts:
            assert script.wait() == 0, script.output
    finally:
        for script in scripts:
            script.kill()
    found: dict[int, list[tuple[float, list[int]]]] = {}
    for step, loss, samples in [each for out in outs for each in json.loads(out.read_text())["taken"]]:
        batches = found.setdefault(step, [])
        # workers that have a part of the model each take the same batches
        if all(samples != known for _, known in batches):
            batches.append((loss, samples))
    return found


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with running_yard(tmp_path_factory.mktemp("yard"), servers=1) as cluster:
        yield cluster


@pytest.mark.long(
    *("gpt-parameter_server-2", "recommender-multi_worker_mirrored-2", "recommender-sharded-2", "gpt-tensor-2"),
    *("digits-accumulated-pipeline-2", "recommender-pushed-pipeline-2", "gpt-accumulated-pushed-sharded-2"),
)
@pytest.mark.parametrize(("model", "strategy", "processes"), CASES)
def test_losses_are_those_of_plain_torch(
    yard: LocalCluster, tmp_path: Path, model: str, strategy: str, processes: int
) -> None:
    found = taken(yard, tmp_path, model, strategy, processes)
    steps = [[sample for _, samples in found[step] for sample in samples] for step in sorted(found)]
    assert len(steps) == equivalence.STEPS
    assert sorted(sample for step in steps for sample in step) == [*range(equivalence.STEPS * equivalence.STEP_SAMPLES)]
    losses = [sum(loss for loss, _ in found[step]) / len(found[step]) for step in sorted(found)]
    wanted = plain(model, steps)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert sum(wanted[-5:]) < 0.95 * sum(wanted[:5]), "something is learned"
