"""A worker that trains jobs one after the other, each with its settings, slowed on purpose where requested.

`digits` and `characters` join a job and train. The job lasts until `leave`, so that others can read its servers. The
begin, the end of computing, and the end of each step are taken from the clock that all processes share
(CLOCK_MONOTONIC).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.data import TensorDataset

import shardyard as sy
from harness.machine.connections import moved_by_address
from harness.machine.delays import Delays
from harness.processes.answers import Conversation, worker_parser
from harness.workloads import characters, digits

NO_DELAYS = Delays(0.0, 1)


class Poison:
    """Makes the gradient of a round's last step not a number, in so many of a worker's rounds, by chance: what the
    round has come to is not finite then, and is dropped."""

    def __init__(self, seed: int, worker: int, share: float, steps: int) -> None:
        self._random = np.random.default_rng((seed, worker))
        self._share = share
        self._steps = steps
        self.count = 0

    def take(self, model: torch.nn.Module, step: int) -> None:
        if (step + 1) % self._steps == 0 and self._random.random() < self._share:
            self.count += 1
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(torch.nan)


class Worker:
    """At most one job at a time. `connect` joins it."""

    def __init__(self, number: int, settings: Mapping[str, object], connect: Callable[..., Any] = sy.connect) -> None:
        self._number = number
        self._settings = settings
        self._connect = connect
        self._job: Any = None

    def handlers(self) -> dict[str, Any]:
        return {"digits": self.digits, "characters": self.characters, "leave": self.leave}

    def digits(
        self,
        job: str,
        seed: int,
        lr: float,
        batch: int,
        epochs: int,
        settings: Mapping[str, object],
        momentum: float = 0.0,
        shuffle: bool = True,
        drop_last: bool = False,
        delays: Mapping[str, Any] | None = None,
        target_percent: float = 0.0,
        limit_s: float = 0.0,
    ) -> dict[str, Any]:
        """`target_percent`: worker 0 looks at what is held out after each of its steps, and stops the job once so much
        of it is right, or after `limit_s`. Looking is taken out of its times."""
        images, labels = digits.load()
        learned, held_out = digits.split(seed)
        unseen = images[held_out], labels[held_out]
        model = digits.make_small_network(seed)
        self._join(job, seed, settings)
        _, optimizer = self._job.prepare(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum))
        curve: list[tuple[float, float]] = []

        def look(at: float) -> None:
            curve.append((at, digits.accuracy_percent(model, *unseen)))
            reached = curve[-1][1] >= target_percent
            if reached or curve[-1][0] - curve[0][0] > limit_s:
                self._job.stop("the target is reached" if reached else "the target was not reached in time")

        data = TensorDataset(images[learned], labels[learned])
        found = self._job.batches(data, batch_size=batch, epochs=epochs, shuffle=shuffle, drop_last=drop_last)
        looks = look if target_percent and self._number == 0 else None
        steps = self._train(model, optimizer, found, seed, Delays(**delays) if delays else NO_DELAYS, looks)
        self._take_values(model)
        accuracy = digits.accuracy_percent(model, *unseen)
        return {"steps": steps, "curve": curve, "accuracy_percent": accuracy, "digest": digits.digest_of(model)}

    def characters(
        self,
        job: str,
        seed: int,
        lr: float,
        batch: int,
        steps: int,
        start: str,
        settings: Mapping[str, object],
        drop: float = 0.0,
    ) -> dict[str, Any]:
        """From the values in the file `start` on, `steps` steps of each logical rank with AdamW; each sample is seen
        once. `drop`: so many of this worker's rounds of local steps end in a NaN, and so do not count."""
        learned, held_out = characters.split()
        model = characters.make_network(seed)
        model.load_state_dict(torch.load(start, weights_only=True))
        self._join(job, seed, settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        model, optimizer = self._job.prepare(model, optimizer)
        chosen = characters.Chosen(learned, seed, steps * batch * int(settings["job.consistency.logical_ranks"]))
        before, begun = self._moved_bytes(), time.monotonic()
        rounds = int(settings.get("job.consistency.steps", 1))
        poisoned = Poison(seed, self._number, drop, rounds)
        found = self._train(
            model, optimizer, self._job.batches(chosen, batch_size=batch), seed, NO_DELAYS, poison=poisoned
        )
        seconds, after = time.monotonic() - begun, self._moved_bytes()
        self._take_values(model)
        return {
            "steps": found,
            "loss": characters.held_out_loss(model, held_out),
            "seconds": seconds,
            "dropped": poisoned.count,
            "digest": digits.digest_of(model),
            **{name: after[name] - before[name] for name in after},
        }

    def leave(self) -> dict[str, Any]:
        job, self._job = self._job, None
        job.close()
        return {}

    def _join(self, job: str, seed: int, settings: Mapping[str, object]) -> None:
        given = {"job.checkpoint.url": "never", "log.level": "error", **self._settings, "job.seed": seed, **settings}
        self._job = self._connect(job=job, settings=given)

    def _train(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        batches: Iterator[Any],
        seed: int,
        delays: Delays,
        look: Callable[[float], None] | None = None,
        poison: Poison | None = None,
    ) -> list[tuple[int, float, float, float]]:
        """Returns for each step its number, its begin, when its gradient was there, and its end."""
        found: list[tuple[int, float, float, float]] = []
        looked_s = 0.0
        for inputs, targets in batches:
            # a synchronous job's step says what is slow, whoever has taken part in the steps before
            number = self._job.step if self._job.mode.value == "sync" else len(found)
            begun = time.monotonic() - looked_s
            time.sleep(delays.sleep_s(seed, self._number, number))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            torch.autograd.backward(loss)
            if poison is not None:
                poison.take(model, number)
            computed = time.monotonic() - looked_s
            optimizer.step()
            over = time.monotonic()
            found.append((number, begun, computed, over - looked_s))
            if look is not None:
                look(over - looked_s)
                looked_s += time.monotonic() - over
        return found

    def _take_values(self, model: torch.nn.Module) -> None:
        """Takes the servers' values."""
        values = self._job.pull()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values[name])

    def _moved_bytes(self) -> dict[str, int]:
        """Bytes sent, with all headers, and received over this process's connections."""
        found = moved_by_address().values()
        return {"sent": sum(each.wire_bytes for each in found), "received": sum(each.received_bytes for each in found)}


def main() -> None:
    conversation = Conversation()
    options = worker_parser().parse_args()
    torch.set_num_threads(1)
    conversation.answer(Worker(options.worker, options.settings).handlers())


if __name__ == "__main__":
    main()
