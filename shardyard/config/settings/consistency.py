"""`job.consistency`: how workers wait for each other, and what happens to late gradients."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from shardyard.config.settings.values import NEVER, Auto, Part, Rate, Section, Share, Strength, impossible
from shardyard.domain import limits
from shardyard.domain.consistency import ConsistencyMode, StaleRule


class ConsistencySettings(Section):
    mode: ConsistencyMode = Field(
        default=ConsistencyMode.ASYNC,
        strict=False,
        description="async: each push is applied when it arrives. bounded: as async, but no worker is more than"
        " job.consistency.staleness steps ahead of another. sync: a step applies the mean over all"
        " logical ranks. local: as sync, but each rank takes job.consistency.steps steps of its own"
        " between two exchanges. hybrid: as sync, but rows of tables are updated when they arrive.",
    )
    steps: int = Field(
        default=100,
        ge=1,
        le=limits.LOCAL_STEPS_MAX,
        description="In local mode: how many steps each logical rank takes by itself in a round.",
    )
    outer_lr: Rate = Field(
        default=0.7,
        description="In local mode: the learning rate of the outer optimizer (SGD with Nesterov's momentum),"
        " whose gradient is the mean of the ranks' changes in a round. 1 without outer_momentum gives"
        " the mean of their parameters.",
    )
    outer_momentum: Part = Field(
        default=0.9, description="In local mode: the momentum of the outer optimizer; 0: none."
    )
    staleness: int = Field(
        default=3,
        ge=0,
        le=limits.STALENESS_MAX,
        description="In bounded mode: a gradient may be computed on values that lack at most this many steps of"
        " any other worker.",
    )
    logical_ranks: Annotated[int, Field(ge=1, le=limits.LOGICAL_RANKS_MAX)] | Auto = Field(
        default="auto",
        description="The number of equal parts of a sync step; auto: the number of workers expected at the job's"
        " start.",
    )
    backup_workers: int = Field(
        default=0,
        ge=0,
        le=limits.LOGICAL_RANKS_MAX - 1,
        description="In sync mode: a step does not wait for this many of its logical ranks, the latest. Their"
        " samples are computed again at the end of the data set. 0: wait for all.",
    )
    backup_patience: Share = Field(
        default=0.1,
        description="With backup workers: when enough ranks have arrived, how long to wait for the others, as a"
        " share of the time that recent steps took. 0: not at all.",
    )
    staleness_scaling: Literal["never", "inverse"] = Field(
        default="never",
        description="inverse: the learning rate of an update is divided by its staleness, if that is more than 1."
        " Staleness is the number of updates since the version on which the gradient was computed. Not"
        " in sync mode.",
    )
    delay_compensation: Strength = Field(
        default=0.0,
        description="The lambda of DC-ASGD: lambda * gradient^2 * (the parameter's change since the version on"
        " which the gradient was computed) is added to the gradient. 0: none. Not in sync mode.",
    )

    delay_compensation_decay: Part = Field(
        default=0.0,
        description="Not 0: lambda is divided, for each element, by the root of a running mean of squared"
        " gradients, in which the past has this weight (DC-ASGD-a). 0: lambda is constant (DC-ASGD-c).",
    )

    @property
    def bound(self) -> int | None:
        """The bound on staleness; None in other modes than bounded."""
        return self.staleness if self.mode is ConsistencyMode.BOUNDED else None

    @property
    def rows_at_once(self) -> bool:
        """Whether rows of tables are updated before the step that they came with is applied."""
        return self.mode is ConsistencyMode.HYBRID

    @property
    def local_steps(self) -> int | None:
        """Steps of a round; None in other modes than local."""
        return self.steps if self.mode is ConsistencyMode.LOCAL else None

    @property
    def stale(self) -> StaleRule | None:
        """What happens to gradients of older versions; None if they are applied as they are."""
        if self.staleness_scaling == NEVER and not self.delay_compensation:
            return None
        decay = float(self.delay_compensation_decay)
        return StaleRule(self.staleness_scaling == "inverse", float(self.delay_compensation), decay)

    @model_validator(mode="after")
    def _decay_is_that_of_a_compensation(self) -> Self:
        if self.delay_compensation_decay and not self.delay_compensation:
            raise impossible(
                ("delay_compensation_decay", "delay_compensation"),
                "delay_compensation_decay 0, or a delay_compensation that it changes",
                f"delay_compensation_decay {self.delay_compensation_decay:g} with delay_compensation 0",
            )
        return self

    @model_validator(mode="after")
    def _stale_gradients_are_asynchronous(self) -> Self:
        if self.stale is not None and self.mode not in (ConsistencyMode.ASYNC, ConsistencyMode.BOUNDED):
            name = "delay_compensation" if self.delay_compensation else "staleness_scaling"
            raise impossible(
                (name, "mode"),
                f"mode async or bounded with {name}, since no gradient of a step is older than another in other modes",
                f"{name} {getattr(self, name)} in mode {self.mode.value}",
            )
        return self
