"""Strategies of a job, and the groups of workers that have its variables under some of them.

Values only. A group is formed by the coordinator, has a number that only grows, and never changes: if a member goes or
another worker comes, the next group is formed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple

from shardyard.domain.consistency import ConsistencyMode
from shardyard.domain.ids import Incarnation, Rank


class Strategy(enum.Enum):
    """Where a job's variables live, and how gradients are combined (docs/guides/strategies.md)."""

    PARAMETER_SERVER = "parameter_server"
    """On the servers, which get every gradient."""
    CENTRAL_STORAGE = "central_storage"
    """On one server, in the memory of the machine on which all workers are."""
    MIRRORED = "mirrored"
    """In every worker, as with multi_worker_mirrored; all workers are on one machine, each on a device of its own."""
    MULTI_WORKER_MIRRORED = "multi_worker_mirrored"
    """In every worker. Gradients are combined by an all-reduce; the servers hold what checkpoints and readers need."""
    PIPELINE = "pipeline"
    """In the workers, each of which has a stage of the model; the servers hold what checkpoints and readers need.
    Or on the servers (`Between`)."""
    SHARDED = "sharded"
    """In the workers, each of which has a shard of every parameter. Or on the servers."""
    TENSOR = "tensor"
    """In the workers, each of which has a part of the layers that are cut; all compute the same batches. Or on the
    servers."""

    @property
    def uses_groups(self) -> bool:
        """Whether workers compute a step together. They have the variables, unless `Between` says otherwise."""
        return self in (Strategy.MIRRORED, Strategy.MULTI_WORKER_MIRRORED) or self.is_spread

    @property
    def is_spread(self) -> bool:
        """Whether each worker of a group has a part of the variables."""
        return self in (Strategy.PIPELINE, Strategy.SHARDED, Strategy.TENSOR)

    @property
    def may_be_left(self) -> bool:
        """Whether a running job can switch from it to another one. Each worker must have the whole model."""
        return self is Strategy.CENTRAL_STORAGE or self is Strategy.MIRRORED or self.may_be_entered

    @property
    def may_be_entered(self) -> bool:
        """Whether a running job can switch to it, on whatever machines its workers are."""
        return self in (Strategy.PARAMETER_SERVER, Strategy.MULTI_WORKER_MIRRORED)

    @property
    def is_of_one_machine(self) -> bool:
        return self in (Strategy.CENTRAL_STORAGE, Strategy.MIRRORED)

    @property
    def mode(self) -> ConsistencyMode | None:
        """The mode in which it trains, unless `Between` says that servers have the variables; None: any mode."""
        return None if self is Strategy.PARAMETER_SERVER else ConsistencyMode.SYNC


class Between(enum.Enum):
    """How replicas that are spread over several workers combine their gradients."""

    ALL_REDUCE = "all_reduce"
    """Workers with the same variables add them up, and each takes the step."""
    PARAMETER_SERVER = "parameter_server"
    """Each worker pushes those of its variables to the servers, which take the step."""


GLOO: Final = "gloo"
"""The backend of torch.distributed that sums on CPUs."""


class AllReduce(enum.Enum):
    """How replicas send gradients to each other."""

    WHOLE = "whole"
    """In the dtype of the parameters."""
    BF16 = "bf16"
    FP16 = "fp16"
    POWERSGD = "powersgd"
    """As the product of two narrow matrices."""


class TakenStep(NamedTuple):
    """A state of replicas: after so many steps, the last of which was taken by the group of this generation. Two groups
    may take the same step, if the first has lost all members that took it; then the later one counts."""

    step: int
    group: int


NO_STEP: Final = TakenStep(0, 0)


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """`generation`: its number, from 1. `members`: in the order of their places. `step`: the step that all replicas
    continue from; None: that of the newest version on the servers, which have no rows of the next one. `donor`: the
    place of a member whose replica is of that step, from which members with another one get it; None if all load it
    from the servers. `void_until`: replicas of groups up to this generation do not count, since the servers have gone
    back from their steps with rows of tables."""

    generation: int
    members: tuple[Incarnation, ...]
    step: int | None = None
    donor: int | None = None
    void_until: int = 0

    @property
    def is_void(self) -> bool:
        """Whether the replicas of this group do not count any more."""
        return self.generation <= self.void_until

    def place_of(self, worker: Incarnation) -> int | None:
        return self.members.index(worker) if worker in self.members else None

    def ranks_at(self, place: int, ranks: int, workers_per_rank: int = 1) -> tuple[Rank, ...]:
        """The logical ranks that the member at this place computes: neighbours, evenly many.
        `workers_per_rank`: so many neighbours compute a rank together.

        >>> ReplicaGroup(1, (Incarnation(7), Incarnation(9))).ranks_at(1, ranks=5)
        (3, 4)
        >>> ReplicaGroup(1, (Incarnation(7), Incarnation(9))).ranks_at(1, ranks=2, workers_per_rank=2)
        (0, 1)
        """
        together = min(workers_per_rank, len(self.members))
        count, at = len(self.members) // together, place // together
        first, end = (-(-ranks * each // count) for each in (at, at + 1))
        return tuple(Rank(rank) for rank in range(first, end))
