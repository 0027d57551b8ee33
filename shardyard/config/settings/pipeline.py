"""`job.pipeline`: the stages of a pipeline, and their schedule."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from shardyard.config.settings.values import Auto, ModuleNames, Section, impossible
from shardyard.domain.pipelines import PipelineSchedule

STAGES = 2
STAGES_MAX = 1_024
MICROBATCHES_MAX = 65_536


class PipelineSettings(Section):
    """How job.strategy pipeline cuts a model and a batch. See docs/guides/pipelines.md."""

    stages: int = Field(
        default=STAGES,
        ge=2,
        le=STAGES_MAX,
        description="The number of workers of a pipeline, each with a part of the model.",
    )
    schedule: PipelineSchedule = Field(
        default=PipelineSchedule.ONE_F_ONE_B,
        strict=False,
        description="The order in which stages compute micro-batches, by torch's names: GPipe, 1F1B, LoopedBFS,"
        " Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble.",
    )
    microbatches: int = Field(
        default=4,
        ge=1,
        le=MICROBATCHES_MAX,
        description="Into how many equal parts a batch is cut. More of them, and workers wait less for each other.",
    )
    virtual_stages: Annotated[int, Field(ge=1, le=STAGES_MAX)] | Auto = Field(
        default="auto",
        description="The stages of each worker. auto: 1 with GPipe and 1F1B, which allow no other number, else 2.",
    )
    cut: ModuleNames = Field(
        default="",
        description="The modules of the model at which the second and later stages begin. Empty: the largest stage gets"
        " as few parameters as possible.",
    )

    @property
    def begins(self) -> tuple[str, ...]:
        """The modules at which stages begin, if they are named."""
        return tuple(self.cut.split())

    @property
    def stages_each(self) -> int:
        """The stages of each worker."""
        if self.virtual_stages == "auto":
            return 2 if self.schedule.is_looped else 1
        return self.virtual_stages

    @property
    def stages_in_all(self) -> int:
        return self.stages * self.stages_each

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        schedule, each = self.schedule, self.stages_each
        wanted = 2 if schedule is PipelineSchedule.ZBV else each if schedule.is_looped else 1
        if each != wanted:
            raise impossible(
                ("virtual_stages", "schedule"),
                f"virtual_stages {wanted} with schedule {schedule.value}",
                f"virtual_stages {each}",
            )
        rounds = max(1, self.microbatches // self.stages)
        if schedule.is_looped and self.microbatches % rounds:
            raise impossible(
                ("microbatches", "schedule"),
                f"a multiple of {self.stages} micro-batches, one for each stage, with schedule {schedule.value}",
                f"microbatches {self.microbatches}",
            )
        return self
