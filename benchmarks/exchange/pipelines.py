"""A pipeline of two workers against torch.distributed.pipelining used bare, with the same cut, schedule and
micro-batches; and one whose variables are on servers against one whose variables are in the workers.

Part of `strategies`. Checked on both sides: that the losses fall, and that they are the same after as many steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from exchange.training import VERIFIED_STEPS, WARM_STEPS
from harness.measuring.pairs import Figures, measure_pairs
from harness.processes.sides import Side, peer_side, shardyard_side
from harness.workloads.pipeline import CUT, MICROBATCHES, SCHEDULE
from harness.workloads.training import NumbersDiffer, check_falls

STAGES = 2
PEER, OURS, PUSHED = "torch pipelining", "pipeline", "pipeline to servers"


class _Stages:
    """One side's workers, warmed up. `first`: the losses of the first steps."""

    def __init__(self, side: Side, task: str) -> None:
        self._side = side
        self.first = self._take(VERIFIED_STEPS[task])
        self.last = self._take(WARM_STEPS[task])
        self._rate = self._present_rate()

    def _take(self, steps: int) -> list[float]:
        """The losses, of the process that knows them."""
        self._answers = self._side.ask("train", steps=steps)
        return [min(both, key=math.isnan) for both in zip(*(each["losses"] for each in self._answers), strict=True)]

    def measure(self, seconds: float) -> Figures:
        self.last = self._take(max(2, round(self._rate * seconds)))
        self._rate = self._present_rate()
        return {"steps_per_s": self._rate}

    def _present_rate(self) -> float:
        return min(float(answer["steps"] / answer["seconds"]) for answer in self._answers)


def run(task: str, pairs: int, seconds: float, same_host: str) -> dict[str, list[Figures]]:
    """Raises NumbersDiffer."""
    peer = peer_side("torch_peers.training_pipeline", "--task", task, workers=STAGES, servers=0)
    return _compare({PEER: peer, OURS: _ours(task, "all_reduce", same_host)}, task, pairs, seconds)


def run_pushed(task: str, pairs: int, seconds: float, same_host: str) -> dict[str, list[Figures]]:
    """With the variables on servers, against those in the workers. Raises NumbersDiffer."""
    ours = {OURS: "all_reduce", PUSHED: "parameter_server"}
    return _compare({name: _ours(task, between, same_host) for name, between in ours.items()}, task, pairs, seconds)


def _ours(task: str, between: str, same_host: str) -> AbstractContextManager[Side]:
    settings = {
        "job.strategy": "pipeline",
        "job.between": between,
        "worker.same_host": same_host,
        "job.pipeline.stages": STAGES,
        "job.pipeline.schedule": SCHEDULE,
        "job.pipeline.microbatches": MICROBATCHES,
        "job.pipeline.cut": str(CUT),
    }
    return shardyard_side("shardyard.pipeline", "--task", task, workers=STAGES, settings=settings, tls=True)


def _compare(
    sides: Mapping[str, AbstractContextManager[Side]], task: str, pairs: int, seconds: float
) -> dict[str, list[Figures]]:
    with ExitStack() as stack:
        both = {f"{name}, {task}": _Stages(stack.enter_context(side), task) for name, side in sides.items()}
        one, other = (each.first for each in both.values())
        if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(one, other, strict=True)):
            raise NumbersDiffer(f"the losses of the pipelines differ: {one} and {other}")
        results = measure_pairs({name: partial(each.measure, seconds) for name, each in both.items()}, pairs)
        for name, each in both.items():
            check_falls(name, [each.first[0], sum(each.last) / len(each.last)])
        return results
