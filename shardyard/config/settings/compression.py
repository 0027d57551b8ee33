"""`job.compression`: how gradients and values are compressed on the way."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from shardyard.config.settings.values import Norm, Part, PullCoding, PushCoding, Section, impossible
from shardyard.domain import limits
from shardyard.domain.compression import WHOLE_ELEMENTS_MAX, Rules, parse_pull_rules, parse_push_rules
from shardyard.domain.pulls import RowCode


class CompressionSettings(Section):
    """How gradients and values are compressed. shardyard.domain.compression reads the rules."""

    push: PushCoding = Field(default="none", description="The codec of gradients, or rules by variable name.")
    pull: PullCoding = Field(default="none", description="The codec of values, or rules by variable name.")
    whole_elements_max: int = Field(
        default=WHOLE_ELEMENTS_MAX,
        ge=0,
        le=limits.BLOCK_ELEMENTS_MAX,
        description="Variables with at most this many elements, or with fewer than two dimensions, are not compressed.",
    )
    momentum: Part = Field(
        default=0.0, description="topk: momentum in the worker, in place of the optimizer's; 0: only error feedback."
    )
    clip: Norm = Field(
        default=0.0,
        description="topk: the largest 2-norm of a worker's gradient. A larger one is scaled down to it. 0: no limit.",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        le=1_000_000_000,
        description="topk: the number of a worker's first pushes over which the density falls from 25% to its"
        " final value, each time to a quarter.",
    )
    rows_push: RowCode = Field(
        default=RowCode.FLOAT32,
        strict=False,
        description="How gradients of table rows travel. bf16 and int8 (one scale for each row) round at random,"
        " without bias.",
    )
    rows_pull: RowCode = Field(
        default=RowCode.FLOAT32, strict=False, description="How looked-up rows of tables travel."
    )

    @property
    def push_rules(self) -> Rules:
        return parse_push_rules(self.push, self.whole_elements_max)

    @property
    def pull_rules(self) -> Rules:
        return parse_pull_rules(self.pull, self.whole_elements_max)

    @model_validator(mode="after")
    def _settings_of_topk_have_a_topk(self) -> Self:
        if "topk" not in self.push_rules.kinds:
            for name in ("momentum", "clip", "warmup_steps"):
                value = getattr(self, name)
                if value:
                    raise impossible((name, "push"), f"{name} 0, or topk in push", f"{name} {value} with {self.push!r}")
        return self
