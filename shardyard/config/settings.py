"""The settings of a yard: names, defaults, bounds and what each is for.

Owns: the models, and the catalogue that documents and checks each setting by its dotted path. Invariants: a model is
frozen, unknown names are refused, values are never coerced (no "3" for 3), every setting has a description, a default
and bounds, and a relation that cannot hold is refused with the names of the settings in it.
Must not know: where values come from (shardyard.config.configuration does), torch, sockets.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self, get_args, get_origin

import annotated_types
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from shardyard.domain import limits
from shardyard.domain.compression import (
    PULL_KINDS,
    PUSH_KINDS,
    WHOLE_ELEMENTS_MAX,
    Rules,
    parse_pull_rules,
    parse_push_rules,
)
from shardyard.domain.consistency import (
    NO_CLIPPING,
    BufferMode,
    Clipping,
    ConsistencyMode,
    Durability,
    NonFinite,
    StaleRule,
    UpdateMode,
)
from shardyard.domain.errors import ConfigurationError
from shardyard.domain.pulls import RowCode

PARTITIONS_AUTO: Final = 8
AUTO: Final = "auto"
CHECKPOINTS: Final = "checkpoints"
"""The folder in the coordinator's state folder that takes the checkpoints of jobs that leave it to it."""
WAL_FOLDER: Final = "wal"
COLD_FOLDER: Final = "cold"
NEVER: Final = "never"
PORT_MAX: Final = 65_535
HEARTBEATS_PER_LEASE_MIN: Final = 3
DURATION_MS_MAX: Final = 3_600_000
COORDINATOR_GRACE_MS: Final = 60_000
IDLE_MS_MAX: Final = 7 * 24 * 3_600_000
SEED_MAX: Final = (1 << 63) - 1
MEMORY_BYTES_MAX: Final = 1 << 50
IMPOSSIBLE_RELATION: Final = "impossible_relation"
EXPLAINED_VALUE: Final = "explained_value"
"""Error types: the first of values that are right one by one, the second of one that says itself what is wrong."""

_JOB_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{limits.JOB_NAME_CHARACTERS_MAX - 1}}}")
_DEVICE = re.compile(r"auto|cpu|cuda|cuda:(0|[1-9][0-9]{0,3})")
_PORT = re.compile(r"[0-9]{1,5}")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.%a-z]{2,64}\]")


@dataclass(frozen=True, slots=True)
class Expected:
    """Says in words what a text setting takes; error messages and documentation quote it."""

    words: str


def _matching(pattern: re.Pattern[str]) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError("not of the expected form")
        return text

    return AfterValidator(check)


def _check_address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text and not (_HOST.fullmatch(host) and _PORT.fullmatch(port) and 1 <= int(port) <= PORT_MAX):
        raise ValueError("not HOST:PORT")
    return text


def _parsed_by(parse: Callable[[str], Rules]) -> AfterValidator:
    def check(text: str) -> str:
        try:
            parse(text)
        except ConfigurationError as error:
            context = {"expected": error.facts["expected"], "got": error.facts["got"], "message": error.what}
            raise PydanticCustomError(EXPLAINED_VALUE, "{message}", context) from error
        return text

    return AfterValidator(check)


Address = Annotated[
    str,
    AfterValidator(_check_address),
    Expected(f'HOST:PORT with a port from 1 to {PORT_MAX}, or "" for none'),
]
Host = Annotated[str, _matching(_HOST), Expected("a host name or IP address, without a port (IPv6 in brackets)")]
Folder = Annotated[str, Field(min_length=1, max_length=limits.TEXT_CHARACTERS_MAX), Expected("the path of a folder")]
FolderOrNone = Annotated[
    str, Field(max_length=limits.TEXT_CHARACTERS_MAX), Expected('the path of a folder, or "" for none')
]
CheckpointUrl = Annotated[
    str,
    Field(min_length=1, max_length=limits.TEXT_CHARACTERS_MAX),
    Expected("auto, never, the path of a folder, or a URL"),
]
BestUrl = Annotated[
    str, Field(min_length=1, max_length=limits.TEXT_CHARACTERS_MAX), Expected("auto, the path of a folder, or a URL")
]
JobName = Annotated[
    str,
    _matching(_JOB_NAME),
    Expected(
        f'1 to {limits.JOB_NAME_CHARACTERS_MAX} letters, digits, ".", "_" or "-", beginning with a letter or digit'
    ),
]
Device = Annotated[str, _matching(_DEVICE), Expected("auto, cpu, cuda, or cuda:N")]
_CODING = "{}, or rules PATTERN=CODEC parted by spaces (docs/compression.md)"
PushCoding = Annotated[str, _parsed_by(parse_push_rules), Expected(_CODING.format(", ".join(PUSH_KINDS)))]
PullCoding = Annotated[str, _parsed_by(parse_pull_rules), Expected(_CODING.format(", ".join(PULL_KINDS)))]
Part = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), Expected("a number from 0 to below 1")]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), Expected("a number from 0 to 1")]
Norm = Annotated[float, Field(ge=0, allow_inf_nan=False), Expected("a number from 0")]
Strength = Annotated[float, Field(ge=0, allow_inf_nan=False), Expected("a number from 0")]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False), Expected("a number above 0")]
DEATHS_MAX = 1_000
Auto = Literal["auto"]


def _check_deaths(number: int) -> int:
    if number == 1:
        raise ValueError("a worker dies for many reasons; one death proves nothing")
    return number


Deaths = Annotated[
    int,
    Field(ge=0, le=DEATHS_MAX),
    AfterValidator(_check_deaths),
    Expected(f"0, or a whole number from 2 to {DEATHS_MAX}"),
]


class Section(BaseModel):
    """Base of all sections: frozen, strict, closed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def impossible(names: tuple[str, ...], expected: str, got: str) -> PydanticCustomError:
    """The error for values that are right one by one but not together; `names` are fields of the raising section."""
    message = f"{' and '.join(names)}: expected {expected}, got {got}"
    context = {"names": names, "expected": expected, "got": got, "message": message}
    return PydanticCustomError(IMPOSSIBLE_RELATION, "{message}", context)


class YardSettings(Section):
    servers: int = Field(
        default=2, ge=1, le=limits.LAUNCH_WORKERS_MAX, description="How many servers the launcher starts."
    )
    workers: int = Field(
        default=2, ge=1, le=limits.LAUNCH_WORKERS_MAX, description="How many training processes the launcher starts."
    )
    bind: Host = Field(default="127.0.0.1", description="The host that the yard's services listen on.")
    coordinator_port: int = Field(
        default=7070, ge=0, le=PORT_MAX, description="The coordinator's port; 0 takes a free one."
    )
    state: Folder = Field(
        default=".shardyard", description="The folder for process id files, logs and the coordinator's journal."
    )
    wal: Folder = Field(
        default=AUTO,
        description="The folder for the logs of servers on this machine, which need them when one of them dies"
        " (job.durability wal); auto: wal, in yard.state.",
    )
    memory_bytes_max: int = Field(
        default=0,
        ge=0,
        le=MEMORY_BYTES_MAX,
        description="Memory that rows of embedding tables, with their index, take on each server, about; colder rows go"
        " to a file in yard.cold. 0: no bound, and no file.",
    )
    cold: Folder = Field(
        default=AUTO,
        description="The folder for these files, on a local disk; they have no names, and go with the server; auto:"
        " cold, in yard.state.",
    )
    restarts_max: int = Field(
        default=1, ge=0, le=1_000, description="How often the agent restarts a training process killed by a signal."
    )
    role_restarts_max: int = Field(
        default=5,
        ge=0,
        le=1_000,
        description="How often the launcher starts a dead coordinator, server or agent again, each, within "
        "yard.role_restarts_window_ms.",
    )
    role_restarts_window_ms: int = Field(
        default=60_000, ge=1_000, le=DURATION_MS_MAX, description="The time over which such restarts are counted."
    )

    @property
    def wal_folder(self) -> Path:
        return Path(self.state) / WAL_FOLDER if self.wal == AUTO else Path(self.wal)

    @property
    def cold_folder(self) -> Path:
        return Path(self.state) / COLD_FOLDER if self.cold == AUTO else Path(self.cold)


class ConsistencySettings(Section):
    mode: ConsistencyMode = Field(
        default=ConsistencyMode.ASYNC,
        strict=False,
        description="sync: a step is the mean over all logical ranks. local: as sync, of what each rank has come to in"
        " job.consistency.steps steps of its own. hybrid: as sync, but rows of tables are updated as they come. async:"
        " each push is applied as it comes. bounded: as async, and no worker is more than so many steps ahead of"
        " another (job.consistency.staleness).",
    )
    steps: int = Field(
        default=100,
        ge=1,
        le=limits.LOCAL_STEPS_MAX,
        description="In local mode: the steps that each logical rank takes by itself, a round.",
    )
    outer_lr: Rate = Field(
        default=0.7,
        description="In local mode: the rate of the outer optimizer, SGD with Nesterov's momentum, which takes the"
        " mean of the ranks' ways as a gradient; 1, without outer_momentum: the mean of their parameters.",
    )
    outer_momentum: Part = Field(default=0.9, description="In local mode: the outer optimizer's momentum; 0: none.")
    staleness: int = Field(
        default=3,
        ge=0,
        le=limits.STALENESS_MAX,
        description="In bounded mode: so many steps of any other worker may be missing in the values that a gradient is"
        " computed on.",
    )
    logical_ranks: Annotated[int, Field(ge=1, le=limits.LOGICAL_RANKS_MAX)] | Auto = Field(
        default="auto",
        description="Equal parts into which a sync step is cut; auto: the workers expected at the job's start.",
    )
    backup_workers: int = Field(
        default=0,
        ge=0,
        le=limits.LOGICAL_RANKS_MAX - 1,
        description="In sync mode: a step is taken without so many logical ranks, the latest; what they had is computed"
        " again when the data set ends. 0: all count.",
    )
    backup_patience: Share = Field(
        default=0.1,
        description="With backup workers: once as many ranks are there as a step needs, the others are waited for a"
        " little, as a share of the time that steps have taken lately. 0: not at all.",
    )
    rows_in_flight: int = Field(
        default=0,
        ge=0,
        le=limits.ROWS_IN_FLIGHT_MAX,
        description="In hybrid mode, with look-ahead: the rows that a step is computed on are looked up so many steps"
        " before, and lack as many steps at most. 0: they come with the parameters, and lack none.",
    )

    staleness_scaling: Literal["never", "inverse"] = Field(
        default="never",
        description="inverse: the rate of an update is divided by its staleness, the updates applied since the version"
        " that the gradient was computed on, where that is more than 1. Not in sync mode.",
    )
    delay_compensation: Strength = Field(
        default=0.0,
        description="DC-ASGD's lambda: so many times the gradient's square, times what the parameter has changed by"
        " since the version that it was computed on, is added to the gradient; 0: none. Not in sync mode.",
    )

    delay_compensation_decay: Part = Field(
        default=0.0,
        description="Not 0: lambda is divided, element by element, by the root of a running mean of the gradients'"
        " squares, in which the past has this weight (DC-ASGD-a); 0: lambda is constant (DC-ASGD-c).",
    )

    @property
    def bound(self) -> int | None:
        """The bound on staleness; None where there is none."""
        return self.staleness if self.mode is ConsistencyMode.BOUNDED else None

    @property
    def rows_lacking(self) -> int | None:
        """The steps that rows may lack; None where they are not asked for before their step."""
        return self.rows_in_flight if self.rows_at_once else None

    @property
    def rows_at_once(self) -> bool:
        """Whether rows of tables are updated before the step that they come with is taken."""
        return self.mode is ConsistencyMode.HYBRID

    @property
    def local_steps(self) -> int | None:
        """Steps of a round; None where steps are not local."""
        return self.steps if self.mode is ConsistencyMode.LOCAL else None

    @property
    def stale(self) -> StaleRule | None:
        """What becomes of gradients of older versions; None where they are taken as they are."""
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


class DataSettings(Section):
    batches_per_data_shard: Annotated[int, Field(ge=1, le=1_000_000)] | Auto = Field(
        default="auto", description="Batches leased to a worker at a time; auto: the coordinator chooses."
    )
    poison_deaths: Deaths = Field(
        default=3,
        description="A batch at which so many workers have died does not count any more, and is listed; 0: never.",
    )


class CheckpointSettings(Section):
    """When a job is written down, where, and how many of these are kept."""

    url: CheckpointUrl = Field(
        default="auto",
        description="Where checkpoints are kept: a folder that coordinator and servers share, or any URL that fsspec"
        " knows, such as s3://bucket/path; auto: in the coordinator's state folder; never: no checkpoints.",
    )
    every_s: int = Field(
        default=60, ge=0, le=DURATION_MS_MAX // 1_000, description="Seconds from one checkpoint to the next; 0: any."
    )
    every_steps: int = Field(
        default=0, ge=0, le=1_000_000_000, description="Steps from one checkpoint to the next; 0: any."
    )
    every_log_bytes: int = Field(
        default=limits.GIB,
        ge=0,
        le=limits.LOG_BYTES_MAX,
        description="With job.durability wal: bytes in one server's log from one checkpoint to the next, since they are"
        " read again when it dies; 0: any.",
    )
    keep: int = Field(default=3, ge=2, le=10_000, description="How many checkpoints are kept, at least two.")


class CompressionSettings(Section):
    """How gradients and values travel. The rules are shardyard.domain.compression's."""

    push: PushCoding = Field(default="none", description="The codec of gradients, or rules by variable name.")
    pull: PullCoding = Field(default="none", description="The codec of values, or rules by variable name.")
    whole_elements_max: int = Field(
        default=WHOLE_ELEMENTS_MAX,
        ge=0,
        le=limits.BLOCK_ELEMENTS_MAX,
        description="Variables of at most so many elements, or of fewer than two dimensions, are not compressed.",
    )
    momentum: Part = Field(
        default=0.0, description="topk: momentum in the worker, instead of the optimizer's; 0: error feedback alone."
    )
    clip: Norm = Field(
        default=0.0, description="topk: the largest 2-norm of a worker's gradient, which is scaled down to it; 0: any."
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        le=1_000_000_000,
        description="topk: a worker's first pushes, in which the density falls from 25% to its own by quarters.",
    )
    rows_push: RowCode = Field(
        default=RowCode.FLOAT32,
        strict=False,
        description="How gradients of tables' rows travel; in bf16 and int8 (one scale a row) they are rounded at"
        " random, without a bias.",
    )
    rows_pull: RowCode = Field(
        default=RowCode.FLOAT32, strict=False, description="How rows of tables travel that are looked up."
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


class ClipSettings(Section):
    """How the gradient that makes an update is clipped: first by value, then by norm."""

    norm: Norm = Field(
        default=0.0,
        description="The largest 2-norm of a gradient over all parameters, on all servers; a larger one is scaled down"
        " to it. 0: any.",
    )
    value: Norm = Field(
        default=0.0,
        description="The largest absolute value of a gradient's elements; others are brought to it. 0: any.",
    )

    @property
    def clipping(self) -> Clipping:
        return Clipping(self.norm, self.value)


class JobSettings(Section):
    """The settings of one job. They travel to the coordinator as JSON; those of the job's first worker are in force."""

    name: JobName = Field(default="default", description="The job's name; workers of one name train together.")
    seed: int = Field(
        default=0,
        ge=0,
        le=SEED_MAX,
        description="The seed of first values, of the order of samples, of all randomness.",
    )
    partitions: Annotated[int, Field(ge=1, le=limits.PARTITIONS_MAX)] | Auto = Field(
        default="auto",
        description=f"Partitions, fixed for the job's life; auto: one for each 256 KiB of values, at most"
        f" {PARTITIONS_AUTO}, and no more than there are blocks. A server without one has nothing to do.",
    )
    block_bytes: (
        Annotated[int, Field(ge=limits.BLOCK_ALIGN_BYTES, le=limits.GIB, multiple_of=limits.BLOCK_ALIGN_BYTES)] | Auto
    ) = Field(
        default="auto",
        description="A variable larger than this is cut into blocks of this size; auto: half of a partition's fair"
        " share of the job's bytes, at least 1 MiB, so that variables stay whole where that costs little balance."
        " Parameters under LAMB are not cut.",
    )
    consistency: ConsistencySettings = Field(
        default_factory=ConsistencySettings, description="How pushes become updates."
    )
    workers_expected: int = Field(
        default=1, ge=1, le=limits.MEMBERS_MAX, description="Workers at the job's start; the launcher sets it."
    )
    rank_grace_ms: int = Field(
        default=2_000,
        ge=0,
        le=DURATION_MS_MAX,
        description="How long a dead worker's logical ranks wait for a joining worker before the living take them.",
    )
    data: DataSettings = Field(default_factory=DataSettings, description="How samples are leased.")
    checkpoint: CheckpointSettings = Field(
        default_factory=CheckpointSettings, description="When and where a job is written down."
    )
    compression: CompressionSettings = Field(
        default_factory=CompressionSettings, description="How gradients and values travel."
    )
    clip: ClipSettings = Field(
        default_factory=ClipSettings,
        description="How the gradient that makes an update is clipped: in sync mode the mean over the ranks, else each"
        " push's own.",
    )
    durability: Durability = Field(
        default=Durability.CHECKPOINT,
        strict=False,
        description="What outlives a server. checkpoint: its partitions go back to the newest checkpoint, and what came"
        " since is computed again. wal: a push is acknowledged once it is in the server's log, and nothing goes back.",
    )
    buffers: BufferMode = Field(
        default=BufferMode.MEAN,
        strict=False,
        description="Buffers, such as BatchNorm's statistics, after a synchronous step. mean: the mean over the logical"
        " ranks (of whole numbers the maximum). first: those of logical rank 0.",
    )
    nonfinite: NonFinite = Field(
        default=NonFinite.SKIP,
        strict=False,
        description="What becomes of work whose gradient is NaN or infinite. skip: it does not count, and is listed."
        " fail: the job ends. allow: it counts, and nobody looks.",
    )
    nonfinite_max: int = Field(
        default=10,
        ge=0,
        le=1_000_000,
        description="A worker that sends so many of them one after the other is out of the job; 0: never.",
    )
    idle_ms: int = Field(
        default=600_000, ge=1_000, le=IDLE_MS_MAX, description="A job without a worker for so long is ended."
    )

    @property
    def server_clipping(self) -> Clipping:
        """What servers do; a gradient that is an update by itself is clipped by its worker."""
        return self.clip.clipping if self.consistency.mode.updates is UpdateMode.SYNC else NO_CLIPPING

    @property
    def partition_count(self) -> int:
        return PARTITIONS_AUTO if self.partitions == "auto" else self.partitions

    @property
    def logical_rank_count(self) -> int:
        ranks = self.consistency.logical_ranks
        return self.workers_expected if ranks == "auto" else ranks

    @model_validator(mode="after")
    def _a_log_follows_a_checkpoint(self) -> Self:
        if self.durability is Durability.WAL and self.checkpoint.url == NEVER:
            raise impossible(
                ("durability", "checkpoint.url"),
                "checkpoint.url other than never with durability wal, since a log begins where a checkpoint ends",
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
                " computed on, and replay would give other bits",
                f"consistency.delay_compensation {compensation:g} with durability {self.durability.value}",
            )
        return self

    @model_validator(mode="after")
    def _backup_workers_leave_a_rank(self) -> Self:
        backup, mode = self.consistency.backup_workers, self.consistency.mode
        if backup and mode is not ConsistencyMode.SYNC:
            raise impossible(
                ("consistency.backup_workers", "consistency.mode"),
                "backup workers in sync mode only, since no other waits for all",
                f"backup_workers {backup} with mode {mode.value}",
            )
        if backup and backup >= self.logical_rank_count:
            raise impossible(
                ("consistency.backup_workers", "consistency.logical_ranks"),
                "fewer backup workers than logical ranks, since some must count",
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


class WorkerSettings(Section):
    device: Device = Field(default="auto", description="Where the model is; auto: a GPU if there is one, else the CPU.")
    threads: int = Field(
        default=1, ge=0, le=1_024, description="torch's threads per training process; 0 leaves torch's own choice."
    )
    rpc_deadline_ms: int = Field(
        default=30_000, ge=100, le=DURATION_MS_MAX, description="The deadline of one call to a peer."
    )
    same_host: Literal["auto", "never"] = Field(
        default="auto",
        description="auto: payloads to and from servers on this machine lie in shared memory; never: streams.",
    )
    pull: Literal["copy", "view"] = Field(
        default="copy",
        description="copy: pulled values are copied into the parameters; view: parameters become views on them.",
    )
    overlap: Literal["never", "always"] = Field(
        default="never",
        description="always: gradients that travel are sent while backward computes others; never: with step().",
    )
    prefetch: Literal["never", "always"] = Field(
        default="never",
        description="always: step() returns while values that travel still arrive, those first that are used first.",
    )
    window: int = Field(
        default=0,
        ge=0,
        le=1,
        description="Pushes under way while the next gradient is computed (async); 0: step() waits for its push.",
    )
    cached_rows_bytes: int = Field(
        default=0,
        ge=0,
        le=limits.CACHED_ROWS_BYTES_MAX,
        description="About so much memory for rows of tables that a training process has read and keeps for its next"
        " steps, those that are asked for most; 0: none. Not in sync and local mode.",
    )
    cached_rows_steps: int = Field(
        default=2,
        ge=1,
        le=limits.CACHED_ROWS_STEPS_MAX,
        description="For so many steps after the one that it was read for a row is used from there. In bounded mode"
        " it is a part of job.consistency.staleness.",
    )
    cached_rows_own: Literal["included", "lacking"] = Field(
        default="included",
        description="included: a row from there has all that this worker has pushed, so that a row which it pushes is"
        " read anew, but of tables with plain SGD; lacking: it may lack own pushes as those of others.",
    )
    retry_budget_ms: int = Field(
        default=8_000,
        ge=0,
        le=DURATION_MS_MAX,
        description="How long a worker goes on trying a peer that does not answer before it is called lost.",
    )

    @model_validator(mode="after")
    def _one_overlap_at_a_time(self) -> Self:
        if self.window and self.overlap == "always":
            raise impossible(
                ("window", "overlap"),
                "overlap never with a window, since the stream is then busy with the push before",
                f"window {self.window} with overlap {self.overlap}",
            )
        return self


class MembershipSettings(Section):
    heartbeat_ms: int = Field(default=500, ge=10, le=60_000, description="The time between a member's signs of life.")
    lease_ms: int = Field(
        default=4_000, ge=30, le=DURATION_MS_MAX, description="A member silent for so long is declared dead."
    )
    coordinator_grace_ms: int = Field(
        default=COORDINATOR_GRACE_MS,
        ge=1,
        le=DURATION_MS_MAX,
        description="How long members go on without a coordinator, which may be started again; then it is lost.",
    )

    @model_validator(mode="after")
    def _lease_outlasts_heartbeats(self) -> Self:
        least_ms = HEARTBEATS_PER_LEASE_MIN * self.heartbeat_ms
        if self.lease_ms < least_ms:
            raise impossible(
                ("lease_ms", "heartbeat_ms"),
                f"lease_ms >= {HEARTBEATS_PER_LEASE_MIN} * heartbeat_ms = {least_ms}, so that one lost sign of life"
                " is no death",
                f"lease_ms {self.lease_ms} with heartbeat_ms {self.heartbeat_ms}",
            )
        return self


class MetricsSettings(Section):
    tensorboard: FolderOrNone = Field(
        default="",
        description="The folder for event files of what job.log is given, for TensorBoard: a run for each worker, in"
        " DIR/JOB.",
    )


class EvaluatorSettings(Section):
    """A script that follows a job (docs/evaluation.md)."""

    every_s: int = Field(
        default=10,
        ge=0,
        le=DURATION_MS_MAX // 1_000,
        description="Seconds from one snapshot to the next, at least; 0: each version, as fast as they are evaluated.",
    )
    into: BestUrl = Field(
        default="auto",
        description="Where the best version is kept: a folder, or any URL that fsspec knows; auto: beside the job's"
        " checkpoints.",
    )
    restarts_max: int = Field(
        default=3,
        ge=0,
        le=1_000,
        description="How often `shardyard eval` starts a script again that has died, within ten minutes.",
    )


class ServingSettings(Section):
    """A process that answers requests with a job's rows (docs/serving.md)."""

    staleness_ms: int = Field(
        default=1_000,
        ge=10,
        le=DURATION_MS_MAX,
        description="How old the version of an answer may be when the answer is begun.",
    )
    wait_ms: int = Field(
        default=10_000,
        ge=1,
        le=DURATION_MS_MAX,
        description="How long a request waits for a version that is young enough, before it is refused.",
    )
    cached_rows: int = Field(
        default=0,
        ge=0,
        le=limits.CACHED_ROWS_MAX,
        description="So many rows of each table, those asked for most, are kept in the process; 0: none.",
    )


class LogSettings(Section):
    format: Literal["auto", "human", "json"] = Field(
        default="auto", description="human: lines to read; json: one object a line; auto: human."
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least severe level that is logged."
    )


class Settings(Section):
    """All settings of a process."""

    coordinator: Address = Field(
        default="", description="The coordinator's address; without one the script runs alone, in its own process."
    )
    yard: YardSettings = Field(default_factory=YardSettings, description="What the launcher starts, and where.")
    job: JobSettings = Field(default_factory=JobSettings, description="The training run.")
    worker: WorkerSettings = Field(default_factory=WorkerSettings, description="A training process.")
    membership: MembershipSettings = Field(default_factory=MembershipSettings, description="Who is alive.")
    metrics: MetricsSettings = Field(default_factory=MetricsSettings, description="Where a script's metrics go.")
    evaluator: EvaluatorSettings = Field(default_factory=EvaluatorSettings, description="A script that follows a job.")
    serving: ServingSettings = Field(default_factory=ServingSettings, description="A process that answers requests.")
    log: LogSettings = Field(default_factory=LogSettings, description="What is logged, and how.")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as the documentation and the error messages show it. `adapter` checks a value, strictly."""

    path: str
    description: str
    default: object
    expected: str
    is_text: bool
    adapter: TypeAdapter[object]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All settings by dotted path, in the order of the models; `sections` holds the dotted paths of the groups."""

    settings: Mapping[str, Setting]
    sections: tuple[str, ...]


@functools.cache
def catalogue() -> Catalogue:
    """Made once in a process: each configuration that is read needs it."""
    settings: dict[str, Setting] = {}
    sections: list[str] = []
    _collect(Settings, "", settings, sections)
    return Catalogue(MappingProxyType(settings), tuple(sections))


def _collect(model: type[BaseModel], prefix: str, settings: dict[str, Setting], sections: list[str]) -> None:
    for name, info in model.model_fields.items():
        path = prefix + name
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            sections.append(path)
            _collect(info.annotation, path + ".", settings, sections)
        else:
            settings[path] = _setting(path, info)


def _setting(path: str, info: FieldInfo) -> Setting:
    kind: Any = info.annotation
    checked: Any = Annotated[(kind, *info.metadata)] if info.metadata else kind
    return Setting(
        path=path,
        description=info.description or "",
        default=info.get_default(call_default_factory=True),
        expected=_expected(kind, info.metadata),
        is_text=kind is str,
        adapter=TypeAdapter(checked, config=ConfigDict(strict=True)),
    )


def _expected(kind: Any, metadata: list[Any]) -> str:
    for item in metadata:
        if isinstance(item, Expected):
            return item.words
    if get_origin(kind) is Annotated:
        bare, *inner = get_args(kind)
        return _expected(bare, [each for info in inner for each in info.metadata])
    if get_origin(kind) is Literal:
        return _one_of([str(choice) for choice in get_args(kind)])
    if isinstance(kind, type) and issubclass(kind, BufferMode | ConsistencyMode | Durability | NonFinite | RowCode):
        return _one_of([choice.value for choice in kind])
    if kind is int:
        return _whole_number(metadata)
    return " or ".join(_expected(choice, []) for choice in get_args(kind))


def _one_of(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)


def _whole_number(metadata: list[Any]) -> str:
    words = "a whole number"
    for item in metadata:
        match item:
            case annotated_types.Ge(ge=low):
                words += f" from {low}"
            case annotated_types.Le(le=high):
                words += f" to {high}"
            case annotated_types.MultipleOf(multiple_of=unit):
                words += f", a multiple of {unit}"
    return words
