"""What one worker has of a replica whose variables are on the servers (job.between parameter_server): the base of
`stage_part` and `share_parts`.

The workers of a replica compute each batch together. Then each has the gradients of its part, pushes them to the
partitions of this part, and pulls its values. Before anything of a push is sent, they tell each other whether all
gradients are there and finite.

Owns: the part of this worker's place in its group. Must not know: when a push is applied, what it is called.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch

from shardyard.domain.replica_groups import ReplicaGroup
from shardyard.domain.variables import VariableKind
from shardyard_worker.collectives.collectives import Collectives
from shardyard_worker.collectives.messages import Messages
from shardyard_worker.replicas.row_exchange import exchange_rows
from shardyard_worker.replicas.spread_model import SpreadModel
from shardyard_worker.training.table_binding import TakenRows
from shardyard_worker.training.trainer import Trainer
from shardyard_worker.training.variables import StepInput

LEAVE, REFUSED, LOSS, SQUARE_NORM = range(4)
FACTS: Final = 4
"""Behind them each member has a place: 1 + the number of what is not finite (NonFiniteCheck), or 0."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a member says of the batches at hand, or all of them together. `leaves`: a worker has come, or is gone;
    `is_refused`: an earlier push, or a report, was refused; `loss`: of the last batch; `square_norm`: of the gradients;
    `odd`: what is not finite, by the places of the members."""

    leaves: bool
    loss: float
    is_refused: bool = False
    square_norm: float = 0.0
    odd: Sequence[int | None] = ()


class ReplicaPart(ABC):
    """`model`: what this worker has a part of."""

    needs_feed: ClassVar[bool] = True
    """Whether batches must come from job.batches."""
    inside: Collectives | None = None
    """The members of this worker's replica. None: it has no place."""

    def __init__(self, trainer: Trainer, model: SpreadModel) -> None:
        self._trainer = trainer
        self._session = trainer.session
        self._size = trainer.session.job_settings.workers_per_rank
        self.model = model

    # ---- the group

    def join(self, group: ReplicaGroup) -> Collectives | None:
        """Takes the part of this worker's place in the group, and makes it ready to compute with the other members of
        its replica. Returns these; None if the group has no whole replica. Raises GroupLost."""
        place = group.place_of(self._session.caller.incarnation)
        assert place is not None, group
        if len(group.members) < self._size:
            return None
        first = place // self._size * self._size
        among = range(first, first + self._size)
        self.inside = inside = Collectives(self._session, group, place, self.model.fingerprint, among)
        self._begin(inside)
        return inside

    @abstractmethod
    def _begin(self, inside: Collectives) -> None:
        """As `join`, with these members."""

    def leave(self) -> None:
        """This worker computes nothing with these members any more."""
        inside, self.inside = self.inside, None
        self._end()
        if inside is not None:
            inside.leave()

    @abstractmethod
    def _end(self) -> None:
        """Ends what `_begin` has begun."""

    @contextlib.contextmanager
    def loading_all(self) -> Iterator[None]:
        """The values of all variables are pulled within, into the script's model."""
        self._trainer.use_place(None)
        self.model.make_room()
        yield
        self.model.is_whole = True

    # ---- a batch

    def put_values(self, version: int | None) -> None:  # noqa: B027 - most are pulled to where they are used
        """Before the first batch of each work. `version`: of the values that were pulled; None: not known. All members
        call it together. Raises GroupLost."""

    @abstractmethod
    def run(self, inputs: Sequence[Any], target: Any, weight: float) -> float:
        """Adds the gradients of a batch, times `weight`, to those of this worker's parameters. Returns what this member
        has computed of the batch's loss. All members call it together. Raises GroupLost."""

    @property
    @abstractmethod
    def messages(self) -> Messages:
        """Between the members. Raises GroupLost."""

    def tell_facts(self, own: Facts, odd: int | None = None) -> Facts:
        """Those of all members. `odd`: the number of what is not finite in this one. Returns when all have called this.
        Raises GroupLost."""
        said = [0.0] * (FACTS + self._size)
        said[LEAVE], said[REFUSED] = float(own.leaves), float(own.is_refused)
        said[LOSS], said[SQUARE_NORM] = own.loss, own.square_norm
        if odd is not None:
            assert self.inside is not None
            said[FACTS + self.inside.place] = 1.0 + odd
        found = self.messages.sum_facts(said)
        of_all = [int(each) - 1 if each else None for each in found[FACTS:]]
        return Facts(bool(found[LEAVE]), found[LOSS], bool(found[REFUSED]), found[SQUARE_NORM], of_all)

    # ---- a push

    @abstractmethod
    def _given(self, sending: StepInput) -> list[torch.Tensor | None]:
        """The gradients of this worker's part, times the weight of the work, and its buffers, in the order of the job's
        variables."""

    def own(self, sending: StepInput, weight: float, *, has_buffers: bool = True) -> StepInput:
        """What this worker pushes of work of that weight: the mean over its samples. One member reports the samples.
        `has_buffers`: whether buffers are pushed, too. All members call it together. Raises GroupLost."""
        assert self.inside is not None
        tensors = self._given(sending)
        for at, (tensor, variable) in enumerate(zip(tensors, self._trainer.variables, strict=True)):
            if tensor is None:
                continue
            if variable.spec.kind is VariableKind.BUFFER:
                tensors[at] = tensor if has_buffers else None
            elif weight != 1.0:
                tensor.mul_(1.0 / weight)
        rows = None if self._trainer.link.tables is None else self._given_rows(sending, self.inside)
        if rows is not None:
            rows = rows.unscaled(torch.tensor(weight, dtype=torch.float64))
        samples = sending.samples if self.inside.place == self._trainer.first_place else 0
        return replace(sending, tensors=tensors, rows=rows, samples=samples)

    def _given_rows(self, sending: StepInput, inside: Collectives) -> TakenRows | None:
        """The gradients of rows that belong to this worker's partitions, times the weight of the work. Members have
        computed gradients of different rows, or samples. Raises GroupLost."""
        tables, owned = self._trainer.link.tables, self._trainer.partitions_at
        assert tables is not None
        dims = [each.dim for each in tables.settings]
        return exchange_rows(sending.rows, tables.groups(), dims, inside, owned, tables.partitions)

    def gradients_in(self, own: StepInput) -> list[torch.Tensor]:
        """Those of variables and rows in what this worker pushes. No other member of its replica pushes any of them."""
        found = [] if own.rows is None else [*own.rows.tensors]
        for tensor, variable in zip(own.tensors, self._trainer.variables, strict=True):
            if tensor is not None and variable.spec.kind is not VariableKind.BUFFER:
                found.append(tensor)
        return found

    @property
    def looks_up_rows(self) -> bool:
        """Whether this worker looks up rows of tables while it computes."""
        return self._trainer.link.tables is not None
