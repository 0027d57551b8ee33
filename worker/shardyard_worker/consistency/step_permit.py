"""Whether a synchronous step may be computed: a job that stops or changes its mode ends before one step, the same for
all workers (docs/internals/ledger.md, rules B8 and B9). While that step is being decided, workers wait."""

from __future__ import annotations

from collections.abc import Callable

from shardyard_worker.exchange.fan_out import MapChanged
from shardyard_worker.training.trainer import SLICE_MS, Trainer

STOP_SLICE_MS = 20
"""The pause between two checks whether the last step is decided, which takes a heartbeat of each worker."""


def await_last_step(trainer: Trainer, step: int, while_halted: Callable[[], None]) -> bool:
    """Waits until it is decided whether this step is computed, and returns that. `while_halted` is called regularly in
    the wait; what it raises ends it. Raises MapChanged: replicas ask no server about a step, so nothing else would tell
    them that the job has switched."""
    barrier, session = trainer.session.step_barrier, trainer.session

    def waiting_for() -> str:
        if barrier.switches:
            return f"partitions in the job's next mode, before step {step}"
        return (
            f"other workers to learn that the job {'stops' if barrier.stop else 'changes its mode'}, before step {step}"
        )

    permit = barrier.permits(step)
    if permit is not None:
        return permit
    with session.wait_registry.over(waiting_for):
        while permit is None:
            session.refresh()
            session.drain.check()
            while_halted()
            trainer.router.pause(SLICE_MS if barrier.switches else STOP_SLICE_MS)
            permit = barrier.permits(step)
            if trainer.is_behind:  # not before: if the switch is over, its map was announced first
                raise MapChanged
    return permit


def may_begin(trainer: Trainer, step: int, while_halted: Callable[[], None]) -> bool:
    """As `await_last_step`, for a contribution that follows at once: if it may, the job stops after this step."""
    while True:
        await_last_step(trainer, step, while_halted)
        may = trainer.session.step_barrier.may_begin(step)
        if may is not None:
            return may
