"""The digits with Shardyard: one job after the other, each with its own seed and settings, in-process or in a yard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

import shardyard as sy
from harness.machine.connections import interface_sent_bytes, moved_by_address
from harness.processes.answers import Conversation, worker_parser
from harness.workloads import digits
from shardyard.domain.errors import ShardyardError


class Jobs:
    """At most one at a time."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self._settings = settings
        self._opened = 0
        self._job: Any = None
        self._training: digits.Training | None = None

    def handlers(self) -> dict[str, Any]:
        return {
            "open": self.open,
            "train": lambda steps: self._now.train(steps),
            "evaluate": lambda: self._now.evaluate(),
            "digest": lambda: self._now.digest(),
            "count": self.count,
            "close": self.close,
        }

    @property
    def _now(self) -> digits.Training:
        assert self._training is not None
        return self._training

    def open(self, seed: int, settings: Mapping[str, object]) -> dict[str, Any]:
        """Joins a new job. The momentum is in the workers if compression has one, otherwise in the servers."""
        given = {"job.consistency.mode": "sync", "log.level": "error", **self._settings, "job.seed": seed, **settings}
        momentum = 0.0 if given.get("job.compression.momentum") else digits.MOMENTUM
        self._opened += 1
        self._job = sy.connect(job=f"digits-{self._opened}", settings=given)
        try:
            model = digits.make_network(seed)
            optimizer = torch.optim.SGD(model.parameters(), lr=digits.LR, momentum=momentum)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, digits.lr_factor)
            model, moved, following = self._job.prepare(model, optimizer, schedule)
        except ShardyardError:
            self._job.close()
            raise
        self._training = digits.Training(model, seed, step=moved.step, zero=moved.zero_grad, follow=following.step)
        return {"parameters": sum(parameter.numel() for parameter in model.parameters())}

    def count(self, interface: str = "") -> dict[str, Any]:
        """Bytes that this process's connections have moved, and that an interface has sent."""
        return {
            "moved": {address: asdict(moved) for address, moved in moved_by_address().items()},
            "interface_bytes": interface_sent_bytes(interface) if interface else 0,
        }

    def close(self) -> dict[str, Any]:
        self._training = None
        self._job.close()
        return {}


def main() -> None:
    conversation = Conversation()
    conversation.answer(Jobs(worker_parser().parse_args().settings).handlers())


if __name__ == "__main__":
    main()
