"""All settings of a process, by section, with the small sections `metrics` and `log`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from shardyard.config.settings.job import JobSettings
from shardyard.config.settings.quotas import QuotaSettings
from shardyard.config.settings.readers import EvaluatorSettings, ServingSettings
from shardyard.config.settings.security import SecuritySettings
from shardyard.config.settings.values import (
    AUTO,
    Address,
    FileOrNone,
    FolderOrNone,
    Folders,
    Places,
    Section,
    VariableNames,
)
from shardyard.config.settings.worker import WorkerSettings
from shardyard.config.settings.yard import MembershipSettings, YardSettings
from shardyard.domain.replica_groups import Strategy


class MetricsSettings(Section):
    tensorboard: FolderOrNone = Field(
        default="",
        description="The folder for TensorBoard event files with the values of job.log. Each worker has a run of"
        " its own, in DIR/JOB. Empty: none.",
    )


class StorageSettings(Section):
    allowed: Places = Field(
        default="",
        description="The folders and URLs below which this coordinator or server reads and writes checkpoints, parted"
        " by spaces. A job that names another place is refused. Empty: any folder that its user can reach, and any"
        " bucket that its credentials open.",
    )
    key_file: FileOrNone = Field(
        default="",
        description="The file with the keys by which checkpoints are encrypted (AES-256-GCM), one in each line, as 64"
        " hexadecimal digits; the first one encrypts. All processes that read or write checkpoints need it:"
        " coordinator, servers, workers, evaluators, commands. Empty: checkpoints are not encrypted.",
    )


class AgentSettings(Section):
    allow: Folders = Field(
        default="",
        description="The folders below which this agent starts scripts, parted by spaces. Empty: it starts any script"
        " that an operator names.",
    )
    variables: VariableNames = Field(
        default=AUTO,
        description='The environment variables that a launch on this agent may set besides those of Shardyard. "*"'
        " stands for any characters. auto: all without agent.allow, none with it.",
    )


class LogSettings(Section):
    format: Literal["auto", "human", "json"] = Field(
        default="auto", description="human: lines for people. json: one object in each line. auto: human."
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The least severe level that is logged."
    )


class Settings(Section):
    """All settings of a process."""

    coordinator: Address = Field(
        default="", description="The coordinator's address. Without it, the script runs alone, in its own process."
    )
    yard: YardSettings = Field(default_factory=YardSettings, description="What the launcher starts, and where.")
    job: JobSettings = Field(default_factory=JobSettings, description="The training run.")
    worker: WorkerSettings = Field(default_factory=WorkerSettings, description="A training process.")
    membership: MembershipSettings = Field(
        default_factory=MembershipSettings, description="How members are known to be alive."
    )
    metrics: MetricsSettings = Field(default_factory=MetricsSettings, description="Where a script's metrics go.")
    evaluator: EvaluatorSettings = Field(default_factory=EvaluatorSettings, description="A script that follows a job.")
    serving: ServingSettings = Field(
        default_factory=ServingSettings, description="A process that answers requests with a job's rows."
    )
    storage: StorageSettings = Field(
        default_factory=StorageSettings, description="What a coordinator and servers may read and write."
    )
    quotas: QuotaSettings = Field(
        default_factory=QuotaSettings, description="How much of the yard an owner, or a job, may take."
    )
    agent: AgentSettings = Field(default_factory=AgentSettings, description="What an agent may be told to start.")
    security: SecuritySettings = Field(
        default_factory=SecuritySettings, description="Certificates, and who may reach the yard."
    )
    log: LogSettings = Field(default_factory=LogSettings, description="What is logged, and how.")

    @model_validator(mode="before")
    @classmethod
    def _one_machine_has_a_size(cls, given: Any) -> Any:
        """What the launcher starts for a strategy of one machine, where the settings do not say that."""
        if not isinstance(given, dict) or not all(isinstance(given.get(name) or {}, dict) for name in ("yard", "job")):
            return given
        yard, strategy, device = given.get("yard") or {}, (given.get("job") or {}).get("strategy"), ""
        if isinstance(given.get("worker"), dict):
            device = given["worker"].get("device", "")
        sizes: dict[str, int] = {}
        if strategy in (Strategy.CENTRAL_STORAGE, Strategy.CENTRAL_STORAGE.value):
            sizes["servers"] = 1
        if strategy in (Strategy.MIRRORED, Strategy.MIRRORED.value) and isinstance(device, str) and " " in device:
            sizes["workers"] = len(device.split())
        return {**given, "yard": {**sizes, **yard}} if sizes else given
