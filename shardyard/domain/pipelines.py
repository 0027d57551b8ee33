"""Schedules of a pipeline: in which order its stages compute micro-batches (job.strategy pipeline).

Values only. The names are those of torch.distributed.pipelining, which runs them.
"""

from __future__ import annotations

import enum


class PipelineSchedule(enum.Enum):
    GPIPE = "GPipe"
    """All forwards, then all backwards (Huang et al., 2019)."""
    ONE_F_ONE_B = "1F1B"
    """One forward, one backward: fewer activations at a time (Narayanan et al., PipeDream, 2019)."""
    LOOPED_BFS = "LoopedBFS"
    """Several stages in each worker, one after the other (Lamy-Poirier, 2022)."""
    INTERLEAVED = "Interleaved1F1B"
    """1F1B with several stages in each worker, so that workers wait less (Narayanan et al., Megatron-LM, 2021)."""
    INTERLEAVED_ZERO_BUBBLE = "InterleavedZeroBubble"
    """The same, with the gradients of parameters computed where workers would wait (Qi et al., 2023)."""
    ZBV = "ZBVZeroBubble"
    """The first worker has the first and the last stage (Qi et al., 2023)."""

    @property
    def is_looped(self) -> bool:
        """Whether a worker may have several stages."""
        return self not in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B)

    @property
    def delays_weights(self) -> bool:
        """Whether gradients of parameters are computed after those of inputs."""
        return self in (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV)

    def stages_at(self, place: int, workers: int, each: int) -> tuple[int, ...]:
        """The stages of the worker at this place among so many, `each` for each.

        >>> PipelineSchedule.INTERLEAVED.stages_at(1, workers=2, each=2), PipelineSchedule.ZBV.stages_at(1, 2, 2)
        ((1, 3), (1, 2))
        """
        if self is PipelineSchedule.ZBV:
            return place, 2 * workers - 1 - place
        return tuple(place + workers * turn for turn in range(each))
