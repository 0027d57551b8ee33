"""`job`: the settings of one training run, and the relations between its sections."""

from __future__ import annotations

from typing import Annotated, Any, Final, Self

from pydantic import Field, model_validator

from shardyard.config.settings.checkpoint import CheckpointSettings
from shardyard.config.settings.compression import CompressionSettings
from shardyard.config.settings.consistency import ConsistencySettings
from shardyard.config.settings.pipeline import STAGES, PipelineSettings
from shardyard.config.settings.sharding import TENSOR_SIZE, ShardedSettings, TensorSettings
from shardyard.config.settings.values import (
    DURATION_MS_MAX,
    NEVER,
    Auto,
    Backend,
    Deaths,
    JobName,
    Norm,
    Section,
    impossible,
)
from shardyard.domain import limits
from shardyard.domain.consistency import (
    NO_CLIPPING,
    BufferMode,
    Clipping,
    ConsistencyMode,
    Durability,
    NonFinite,
    UpdateMode,
)
from shardyard.domain.replica_groups import GLOO, AllReduce, Between, Strategy

PARTITIONS_AUTO: Final = 8
IDLE_MS_MAX: Final = 7 * 24 * 3_600_000
SEED_MAX: Final = (1 << 63) - 1


class DataSettings(Section):
    batches_per_data_shard: Annotated[int, Field(ge=1, le=1_000_000)] | Auto = Field(
        default="auto", description="How many batches a worker leases at a time; auto: the coordinator chooses."
    )
    poison_deaths: Deaths = Field(
        default=3,
        description="A batch at which this many workers have died does not count and is listed; 0: never.",
    )


class ClipSettings(Section):
    """How the gradient of an update is clipped: first by value, then by norm."""

    norm: Norm = Field(
        default=0.0,
        description="The largest 2-norm of a gradient, over all parameters on all servers. A larger gradient is"
        " scaled down to it. 0: no limit.",
    )
    value: Norm = Field(
        default=0.0,
        description="The largest absolute value of a gradient's element. Larger elements are set to it, with"
        " their sign. 0: no limit.",
    )

    @property
    def clipping(self) -> Clipping:
        return Clipping(self.norm, self.value)


class JobSettings(Section):
    """The settings of one job. Workers send them to the coordinator as JSON. Those of the job's first worker apply."""

    name: JobName = Field(default="default", description="The job's name. Workers with the same name train together.")
    seed: int = Field(
        default=0,
        ge=0,
        le=SEED_MAX,
        description="The seed of initial values, of the order of samples, and of all other random numbers.",
    )
    partitions: Annotated[int, Field(ge=1, le=limits.PARTITIONS_MAX)] | Auto = Field(
        default="auto",
        description="The number of partitions, which cannot change later. auto: one for each 256 KiB of values, at most"
        f" {PARTITIONS_AUTO}, and at most one for each block. A server without a partition has nothing to do.",
    )
    block_bytes: (
        Annotated[int, Field(ge=limits.BLOCK_ALIGN_BYTES, le=limits.GIB, multiple_of=limits.BLOCK_ALIGN_BYTES)] | Auto
    ) = Field(
        default="auto",
        description="A larger variable is cut into blocks of this size. auto: half of a partition's fair share of"
        " the job's bytes, at least 1 MiB, so that a variable is cut only where that improves the"
        " balance. Parameters under LAMB are not cut.",
    )
    strategy: Strategy = Field(
        default=Strategy.PARAMETER_SERVER,
        strict=False,
        description="Where variables live. parameter_server: on the servers, which get every gradient."
        " central_storage: on one server of the workers' machine, which all of them reach through its memory; then"
        " job.consistency.mode is sync."
        " multi_worker_mirrored: in every worker, whose gradients are combined by an all-reduce; then"
        " job.consistency.mode is sync. mirrored: the same on one machine, with a worker for each device."
        " pipeline: a stage of the model in each worker (job.pipeline). sharded: a shard of each parameter in each"
        " worker (job.sharded). tensor: a part of each layer in each worker (job.tensor). See"
        " docs/guides/strategies.md.",
    )
    between: Between = Field(
        default=Between.ALL_REDUCE,
        strict=False,
        description="With strategy pipeline, sharded or tensor: how replicas combine gradients, and where variables"
        " live. all_reduce: in the workers; those with the same part of a replica add up their gradients, and each"
        " takes the step. parameter_server: on the servers, which take the step; each worker pushes the gradients of"
        " its part, and pulls its values. Replicas then take job.consistency.mode async, too.",
    )
    deterministic: bool = Field(
        default=False,
        description="With replicas: gradients are added in the order of the logical ranks, so"
        " that the bits do not depend on the number of workers. Each worker then keeps the gradients of all its ranks"
        " apart. On servers the bits of synchronous steps never depend on it.",
    )
    collectives: Backend = Field(
        default=GLOO,
        description="With replicas: the backend of torch.distributed that combines gradients. gloo, or the name of a"
        " plug-in that the script has imported (torch.distributed.Backend.register_backend).",
    )
    all_reduce: AllReduce = Field(
        default=AllReduce.WHOLE,
        strict=False,
        description="With replicas: how gradients are compressed in the all-reduce, by the communication hooks of"
        " DistributedDataParallel. whole: not at all. bf16, fp16: two bytes for each element that goes over the"
        " network. powersgd: two narrow matrices for each gradient; what they lack is added to the next gradient.",
    )
    powersgd_rank: int = Field(
        default=1, ge=1, le=1_024, description="With all_reduce powersgd: the width of the two matrices."
    )
    pipeline: PipelineSettings = Field(
        default_factory=PipelineSettings, description="The stages of a job whose strategy is pipeline."
    )
    sharded: ShardedSettings = Field(
        default_factory=ShardedSettings, description="The shards of a job whose strategy is sharded."
    )
    tensor: TensorSettings = Field(
        default_factory=TensorSettings, description="The layers that are cut in a job whose strategy is tensor."
    )
    consistency: ConsistencySettings = Field(
        default_factory=ConsistencySettings, description="How pushes become updates."
    )
    workers_expected: int = Field(
        default=1,
        ge=1,
        le=limits.MEMBERS_MAX,
        description="The number of workers at the job's start; the launcher sets it.",
    )
    rank_grace_ms: int = Field(
        default=2_000,
        ge=0,
        le=DURATION_MS_MAX,
        description="How long a dead worker's logical ranks wait for a joining worker before the living workers"
        " take them.",
    )
    data: DataSettings = Field(default_factory=DataSettings, description="How samples are leased to workers.")
    checkpoint: CheckpointSettings = Field(
        default_factory=CheckpointSettings, description="When and where checkpoints are written."
    )
    compression: CompressionSettings = Field(
        default_factory=CompressionSettings, description="How gradients and values are compressed on the way."
    )
    clip: ClipSettings = Field(
        default_factory=ClipSettings,
        description="How the gradient that makes an update is clipped: in sync mode the mean over the ranks,"
        " otherwise each push's own.",
    )
    durability: Durability = Field(
        default=Durability.CHECKPOINT,
        strict=False,
        description="What survives the death of a server. checkpoint: its partitions go back to the newest"
        " checkpoint, and later work is computed again. wal: a push is acknowledged when it is in the"
        " server's log, and nothing goes back.",
    )
    buffers: BufferMode = Field(
        default=BufferMode.MEAN,
        strict=False,
        description="How a synchronous step sets buffers, such as BatchNorm's statistics. mean: to the mean over"
        " the logical ranks (whole numbers: to the maximum). first: to those of logical rank 0.",
    )
    nonfinite: NonFinite = Field(
        default=NonFinite.SKIP,
        strict=False,
        description="What happens to work whose gradient is NaN or infinite. skip: it does not count, and is"
        " listed. fail: the job ends. allow: it counts; nothing is checked.",
    )
    nonfinite_max: int = Field(
        default=10,
        ge=0,
        le=1_000_000,
        description="A worker that sends this many such gradients in a row is removed from the job; 0: never.",
    )
    idle_ms: int = Field(
        default=600_000, ge=1_000, le=IDLE_MS_MAX, description="A job without a worker for this long is ended."
    )

    @property
    def server_clipping(self) -> Clipping:
        """How servers clip. In asynchronous modes, workers clip their own gradients instead."""
        return self.clip.clipping if self.consistency.mode.updates is UpdateMode.SYNC else NO_CLIPPING

    @property
    def updates_in_workers(self) -> bool:
        """Whether workers run the optimizer that changes their values."""
        return self.consistency.local_steps is not None or self.has_replicas

    @property
    def has_replicas(self) -> bool:
        """Whether variables are in the workers, and the servers have copies only."""
        return self.strategy.uses_groups and self.between is Between.ALL_REDUCE

    @property
    def partition_count(self) -> int:
        return PARTITIONS_AUTO if self.partitions == "auto" else self.partitions

    @property
    def logical_rank_count(self) -> int:
        ranks = self.consistency.logical_ranks
        if ranks != "auto":
            return ranks
        return self.workers_expected // self.workers_per_rank

    @property
    def workers_per_rank(self) -> int:
        """How many workers compute a logical rank together."""
        if self.strategy is Strategy.PIPELINE:
            return self.pipeline.stages
        if self.strategy is Strategy.SHARDED and self.between is Between.PARAMETER_SERVER:
            return 1 if self.sharded.size == "auto" else self.sharded.size
        return self.tensor.size if self.strategy is Strategy.TENSOR else 1

    @property
    def shares(self) -> int:
        """How many workers each push a share of every variable (shardyard.domain.layout.shares)."""
        return 1 if self.has_replicas or self.strategy is Strategy.PIPELINE else self.workers_per_rank

    @property
    def workers_per_replica(self) -> int | None:
        """How many workers have one replica of the variables together; None: all workers of the job."""
        if self.strategy is Strategy.SHARDED:
            return None if self.sharded.size == "auto" else self.sharded.size
        return self.workers_per_rank

    @model_validator(mode="before")
    @classmethod
    def _strategy_sets_the_mode(cls, given: Any) -> Any:
        """Where the settings do not set it."""
        if not isinstance(given, dict):
            return given
        strategy, consistency = given.get("strategy"), given.get("consistency") or {}
        for each, name, default in (
            (Strategy.PIPELINE, "stages", STAGES),
            (Strategy.TENSOR, "size", TENSOR_SIZE),
            (Strategy.SHARDED, "size", 1),
        ):
            if strategy in (each, each.value) and "workers_expected" not in given:
                section = given.get(each.value) or {}
                size = section.get(name) if isinstance(section, dict) else getattr(section, name, None)
                given = {**given, "workers_expected": default if size in (None, "auto") else size}
        mode = next((each.mode for each in Strategy if strategy in (each, each.value)), None)
        if mode is None or not isinstance(consistency, dict) or "mode" in consistency:
            return given
        return {**given, "consistency": {**consistency, "mode": mode.value}}

    @model_validator(mode="after")
    def _strategy_fits(self) -> Self:
        self._mode_fits()
        if self.deterministic and self.all_reduce is not AllReduce.WHOLE:
            raise impossible(
                ("deterministic", "all_reduce"),
                "all_reduce whole with deterministic true, which adds the gradients of the ranks one by one",
                f"all_reduce {self.all_reduce.value}",
            )
        if self.between is Between.PARAMETER_SERVER and not self.strategy.is_spread:
            raise impossible(
                ("between", "strategy"),
                "strategy pipeline, sharded or tensor with between parameter_server, whose workers push parts of a"
                " gradient",
                f"strategy {self.strategy.value}",
            )
        if not self.strategy.uses_groups:
            return self
        self._group_fits()
        if not self.has_replicas:
            self._pushes_fit()
            return self
        for name, found, wanted in (
            ("consistency.backup_workers", self.consistency.backup_workers, 0),
            ("durability", self.durability.value, Durability.CHECKPOINT.value),
            ("clip.value", self.clip.value, 0.0),
            ("compression.push", self.compression.push_rules.compresses, False),
        ):
            if found != wanted:
                raise impossible(
                    ("strategy", name),
                    f"{name} {wanted} with strategy {self.strategy.value}, whose gradients do not go to servers",
                    f"{name} {found}",
                )
        return self

    def _mode_fits(self) -> None:
        mode, strategy = self.strategy.mode, self.strategy.value
        if mode is None or self.consistency.mode is mode:
            return
        if self.between is not Between.PARAMETER_SERVER:
            raise impossible(
                ("strategy", "consistency.mode"),
                f"consistency.mode {mode.value} with strategy {strategy}, whose workers take steps together",
                f"consistency.mode {self.consistency.mode.value}",
            )
        if self.consistency.mode is not ConsistencyMode.ASYNC:
            raise impossible(
                ("between", "consistency.mode"),
                f"consistency.mode sync or async with strategy {strategy} and between {self.between.value}, where the"
                " workers of a replica push under one name",
                f"consistency.mode {self.consistency.mode.value}",
            )

    def _pushes_fit(self) -> None:
        """Of a strategy whose workers push the gradients of their parts."""
        if self.strategy is Strategy.SHARDED and self.sharded.size == "auto":
            raise impossible(
                ("between", "sharded.size"),
                "a number for sharded.size with between parameter_server, since so many workers compute a batch"
                " together",
                "sharded.size auto",
            )
        if self.compression.push_rules.has_feedback:
            raise impossible(
                ("between", "compression.push"),
                "compression.push bf16, fp16, qsgd or none with between parameter_server: other codecs keep a residual,"
                " and a worker's part of the variables changes",
                f"compression.push {self.compression.push}",
            )
        for name, found, wanted in (
            ("consistency.backup_workers", self.consistency.backup_workers, 0),
            ("all_reduce", self.all_reduce.value, AllReduce.WHOLE.value),
        ):
            if found != wanted:
                raise impossible(
                    ("between", name),
                    f"{name} {wanted} with between parameter_server, where each worker pushes a part of a gradient",
                    f"{name} {found}",
                )

    def _group_fits(self) -> None:
        """Of a strategy whose workers have parts of the variables."""
        strategy, size = self.strategy, self.workers_per_replica
        if not strategy.is_spread:
            return
        name = "pipeline.stages" if strategy is Strategy.PIPELINE else f"{strategy.value}.size"
        if size is not None and self.workers_expected % size:
            raise impossible(
                ("workers_expected", name),
                f"workers_expected {size} or a multiple, one worker for each part of a replica; others wait in reserve",
                f"workers_expected {self.workers_expected}",
            )
        if size is not None and size > self.logical_rank_count * self.workers_per_rank:
            raise impossible(
                ("consistency.logical_ranks", name),
                f"at least {size} logical ranks with {name} {size}, one for each worker",
                f"consistency.logical_ranks {self.logical_rank_count}",
            )
        for other, found, wanted, is_fixed in (
            ("collectives", self.collectives, GLOO, True),
            ("all_reduce", self.all_reduce.value, AllReduce.WHOLE.value, size is None),
            ("deterministic", str(self.deterministic).lower(), "false", not size or self.logical_rank_count > 1),
        ):
            if found != wanted and is_fixed:
                raise impossible(
                    (other, "strategy"),
                    f"{other} {wanted} with strategy {strategy.value}, whose workers have parts of the variables",
                    f"{other} {found}",
                )

    @model_validator(mode="after")
    def _pushes_that_do_not_wait_have_no_order(self) -> Self:
        if self.deterministic and self.consistency.mode.updates is not UpdateMode.SYNC:
            raise impossible(
                ("deterministic", "consistency.mode"),
                "a synchronous mode with deterministic true, since other updates depend on which push comes first",
                f"consistency.mode {self.consistency.mode.value}",
            )
        return self

    @model_validator(mode="after")
    def _a_log_follows_a_checkpoint(self) -> Self:
        if self.durability is Durability.WAL and self.checkpoint.url == NEVER:
            raise impossible(
                ("durability", "checkpoint.url"),
                "checkpoint.url other than never with durability wal, since a log starts at a checkpoint",
                f"durability {self.durability.value} with checkpoint.url {self.checkpoint.url}",
            )
        return self

    @model_validator(mode="after")
    def _local_steps_are_clipped_by_the_script(self) -> Self:
        for name in ("norm", "value"):
            limit = getattr(self.clip, name)
            if limit and self.consistency.mode is ConsistencyMode.LOCAL:
                raise impossible(
                    (f"clip.{name}", "consistency.mode"),
                    f"clip.{name} 0 in mode local, in which the script clips its gradients, as without a yard"
                    " (torch.nn.utils)",
                    f"clip.{name} {limit:g} in mode {self.consistency.mode.value}",
                )
        return self

    @model_validator(mode="after")
    def _compensation_is_not_replayed(self) -> Self:
        compensation = self.consistency.delay_compensation
        if self.durability is Durability.WAL and compensation:
            raise impossible(
                ("consistency.delay_compensation", "durability"),
                "delay_compensation 0 with durability wal, since a log does not have the values that a gradient was"
                " computed on, and replay would give other results",
                f"consistency.delay_compensation {compensation:g} with durability {self.durability.value}",
            )
        return self

    @model_validator(mode="after")
    def _backup_workers_leave_a_rank(self) -> Self:
        backup, mode = self.consistency.backup_workers, self.consistency.mode
        if backup and mode is not ConsistencyMode.SYNC:
            raise impossible(
                ("consistency.backup_workers", "consistency.mode"),
                "backup workers only in sync mode, since only this mode waits for all ranks",
                f"backup_workers {backup} with mode {mode.value}",
            )
        if backup and backup >= self.logical_rank_count:
            raise impossible(
                ("consistency.backup_workers", "consistency.logical_ranks"),
                "fewer backup workers than logical ranks, since at least one rank must count",
                f"backup_workers {backup} with {self.logical_rank_count} logical ranks",
            )
        return self

    @model_validator(mode="after")
    def _ranks_within_limit(self) -> Self:
        sync = self.consistency.mode.updates is UpdateMode.SYNC
        if sync and self.logical_rank_count > limits.LOGICAL_RANKS_MAX:
            raise impossible(
                ("workers_expected", "consistency.logical_ranks"),
                f"at most {limits.LOGICAL_RANKS_MAX} logical ranks in {self.consistency.mode.value} mode; set"
                " job.consistency.logical_ranks",
                f"{self.logical_rank_count} (auto: one for each expected worker)",
            )
        return self
