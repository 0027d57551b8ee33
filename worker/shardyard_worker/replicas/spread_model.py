"""A model whose replica is spread over the members of a group: each updates its own part of the variables.

Every worker has the script's model. From the first group on, its parameters that this worker does not update take no
memory; when the data ends, all are loaded, so that the script can evaluate.

Owns: the memory of the script's parameters, and whether they have the values of one step. Must not know: groups, steps,
how variables are parted.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.utils.hooks import RemovableHandle

from shardyard.checkpoints.partition_file import VALUES
from shardyard.domain.epochs import EpochPlan
from shardyard.domain.errors import InvalidRequest
from shardyard.domain.replica_groups import Strategy
from shardyard.runtime.malloc import Kept, tune_malloc
from shardyard_worker.exchange.variable_parts import Parts, Region, VariablePart
from shardyard_worker.replicas.replica import Replica, loaded_values
from shardyard_worker.training.variables import Variable

Loss = Callable[[Any, Any], torch.Tensor]
"""`loss(model(*inputs), target)`: the mean over a batch's samples, a tensor of one element."""


class SpreadModel(ABC):
    """`replica`: the variables that this worker updates; none before it has a place."""

    kind: ClassVar[str] = "group"
    """What the members are together, in words."""
    replica: Replica

    loads_whole: ClassVar[bool] = False
    """Whether a group that begins needs all values for a moment."""
    kept: ClassVar[Kept] = Kept.LITTLE
    """What of the memory that a step frees stays mapped for the next one. Where tensors of several layers come and go,
    more than a little leaves gaps that no tensor fits into."""

    def __init__(
        self,
        parameters: Sequence[Variable],
        buffers: Sequence[Variable],
        strategy: Strategy,
        loss: Loss,
    ) -> None:
        self.strategy = strategy
        self.loss = loss
        self.is_whole = False
        """Whether all values of the script's model are of one step."""
        self._parameters = parameters
        self._buffers = buffers
        self._layouts = [(each.target.shape, each.target.stride()) for each in parameters]
        self._freed = set[int]()
        """The places of the script's parameters that have no values."""
        self._is_training = False
        self._guards: list[RemovableHandle] = []

    def guard(self, model: torch.nn.Module) -> None:
        """From now on the script's model refuses what needs all values, unless they are there."""
        self._guards = [
            model.register_forward_pre_hook(self._check_whole),
            model.register_state_dict_pre_hook(self._check_state),  # type: ignore[no-untyped-call]
        ]

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

    # ---- the script's parameters

    @property
    @abstractmethod
    def _unused(self) -> Collection[int]:
        """The places of the script's parameters whose memory this worker does not use while it trains."""

    def free(self) -> None:
        """Gives back the memory of the script's parameters that is not used while the group trains. They read as NaN
        then."""
        self.is_whole = False
        if not self._is_training:
            self._is_training = True
            tune_malloc(self.kept)
        for at in {*self._unused} - self._freed:
            self._parameters[at].target.data = nothing_like(self._parameters[at].target)
            self._freed.add(at)

    def make_room(self) -> None:
        """All of the script's parameters have memory again."""
        self._is_training = False
        tune_malloc(Kept.LITTLE)
        for at in self._freed:
            target = self._parameters[at].target
            target.data = torch.empty_strided(*self._layouts[at], dtype=target.dtype)
        self._freed.clear()

    @contextlib.contextmanager
    def whole(self) -> Iterator[Parts]:
        """The values of the script's model, which are loaded within."""
        self.make_room()
        with loaded_values([*self._parameters, *self._buffers]) as values:
            yield {place: VariablePart(Region.whole(each.numel()), {VALUES: each}) for place, each in enumerate(values)}

    def loaded(self) -> None:  # noqa: B027 - most have nothing to do
        """All members have loaded what the group begins with."""

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
        for each in self._guards:
            each.remove()

    def _check_state(self, *_: object) -> None:
        if self._freed:
            raise InvalidRequest(
                f"model.state_dict() while the {self.kind} trains with job.strategy {self.strategy.value}",
                why="the values are in the workers, a part in each",
                todo="take a checkpoint (job.checkpoint.every_s), or call it after job.batches has ended",
            )

    def _check_whole(self, *_: object) -> None:
        if not self.is_whole:
            raise InvalidRequest(
                f"the forward of the whole model while its {self.kind} trains",
                why="each worker has the newest values of its own variables only",
                todo="call job.train_step(x, y) to train; evaluate after job.batches has ended, or with an evaluator"
                " (docs/guides/evaluation.md)",
            )


def nothing_like(tensor: torch.Tensor) -> torch.Tensor:
    """One element in the place of all."""
    return torch.full((), float("nan"), dtype=tensor.dtype).expand(tensor.shape)
