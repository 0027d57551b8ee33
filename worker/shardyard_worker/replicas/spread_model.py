"""A model whose replica is spread over the members of a group: each updates its own part of the variables.

Every worker has the whole model. While the group trains, the values of the script's model are those that were loaded
from the servers last; when the data ends, they are loaded again, so that the script can evaluate.

Owns: whether the script's model has the values of one step. Must not know: groups, steps, how variables are parted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from shardyard.domain.epochs import EpochPlan
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.replica_groups import Strategy
from shardyard_worker.replicas.replica import Replica

Loss = Callable[[Any, Any], torch.Tensor]
"""`loss(model(*inputs), target)`: the mean over a batch's samples, a tensor of one element."""


class SpreadModel(ABC):
    """`replica`: the variables that this worker updates; none before it has a place."""

    kind: ClassVar[str] = "group"
    """What the members are together, in words."""
    replica: Replica

    def __init__(self, model: torch.nn.Module, strategy: Strategy, loss: Loss) -> None:
        self.strategy = strategy
        self.loss = loss
        self.is_whole = False
        """Whether all values of the script's model are of one step."""
        self._guard = model.register_forward_pre_hook(self._check_whole)

    @property
    @abstractmethod
    def gradients(self) -> list[torch.Tensor | None]:
        """Of this worker's parameters, in their order, as far as they were computed."""

    @abstractmethod
    def drop_gradients(self) -> None: ...

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """What all members must have alike."""

    @abstractmethod
    def check_batches(self, plan: EpochPlan) -> None:
        """Raises InvalidRequest if the group cannot compute a batch of an epoch."""

    def about_to_load(self) -> None:  # noqa: B027 - most have memory for all values at any time
        """All values of the script's model are loaded next."""

    def loaded(self) -> None:  # noqa: B027 - most have nothing to do
        """All members have loaded all values, with which the group begins."""

    @property
    def optimizer_state(self) -> Mapping[torch.Tensor, Any]:
        """Raises InvalidRequest."""
        raise InvalidRequest(
            f"optimizer.state_dict() in a job whose job.strategy is {self.strategy.value}",
            why="each worker has the state of its own variables only",
            todo="take a checkpoint (job.checkpoint.every_s), which has the state of all variables",
        )

    @property
    def is_stepping(self) -> bool:
        return self.replica.is_stepping

    def close(self) -> None:
        self._guard.remove()

    def _check_whole(self, *_: object) -> None:
        if not self.is_whole:
            raise InvalidRequest(
                f"the forward of the whole model while its {self.kind} trains",
                why="each worker has the newest values of its own variables only",
                todo="call job.train_step(x, y) to train; evaluate after job.batches has ended, or with an evaluator"
                " (docs/guides/evaluation.md)",
            )
