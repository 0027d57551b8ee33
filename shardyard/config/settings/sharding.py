"""`job.sharded` and `job.tensor`: how the variables of a model are cut over workers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardyard.config.settings.values import Auto, ModuleNames, Section

TENSOR_SIZE = 2
SIZE_MAX = 1_024


class ShardedSettings(Section):
    """How job.strategy sharded cuts a model. See docs/guides/sharding.md."""

    size: Annotated[int, Field(ge=2, le=SIZE_MAX)] | Auto = Field(
        default="auto",
        description="The number of workers over which parameters are cut. With more workers, so many of them have"
        " one replica together, beside others (hybrid sharding). auto: all workers of the job.",
    )
    modules: ModuleNames = Field(
        default="",
        description="The modules whose parameters are gathered one by one, as by fully_shard(module); in each part"
        " of a name `*` stands for any characters. Empty: the members of each torch.nn.ModuleList and"
        " torch.nn.Sequential.",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="Whether a module's parameters are given back after its forward, and gathered again for its"
        " backward. false: they are kept between, which takes memory and saves a transfer.",
    )

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(self.modules.split())


class TensorSettings(Section):
    """How job.strategy tensor cuts a model. See docs/guides/sharding.md."""

    size: int = Field(
        default=TENSOR_SIZE,
        ge=2,
        le=SIZE_MAX,
        description="The number of workers over which layers are cut.",
    )
    colwise: ModuleNames = Field(
        default="",
        description="The torch.nn.Linear layers of which each worker computes some outputs (ColwiseParallel); in"
        " each part of a name `*` stands for any characters. If this and rowwise are empty, layers are found"
        " in the model's forward.",
    )
    rowwise: ModuleNames = Field(
        default="",
        description="The torch.nn.Linear layers of which each worker reads some inputs (RowwiseParallel).",
    )

    @property
    def colwise_patterns(self) -> tuple[str, ...]:
        return tuple(self.colwise.split())

    @property
    def rowwise_patterns(self) -> tuple[str, ...]:
        return tuple(self.rowwise.split())
