"""The settings of a yard: names, defaults, bounds and descriptions. There is a file for each section.

Owns: which settings there are, which values each takes, and which values exclude each other. Invariants: models are
frozen; unknown names are refused; values are not converted ("3" is not 3); every setting has a description, a default
and bounds; values that exclude each other are refused with the names of their settings. Must not know: where values
come from (shardyard.config.configuration does), torch, sockets.

Read `values` (kinds of values), then one section, such as `worker`, then `job`, then `process` (all sections) and
`by_path` (the catalogue).
"""

from __future__ import annotations

from shardyard.config.settings.by_path import Catalogue, Setting, catalogue
from shardyard.config.settings.checkpoint import CHECKPOINTS, CheckpointSettings
from shardyard.config.settings.compression import CompressionSettings
from shardyard.config.settings.consistency import ConsistencySettings
from shardyard.config.settings.job import PARTITIONS_AUTO, ClipSettings, DataSettings, JobSettings
from shardyard.config.settings.pipeline import PipelineSettings
from shardyard.config.settings.process import AgentSettings, LogSettings, MetricsSettings, Settings, StorageSettings
from shardyard.config.settings.quotas import QuotaSettings
from shardyard.config.settings.readers import EvaluatorSettings, ServingSettings
from shardyard.config.settings.security import SecuritySettings
from shardyard.config.settings.sharding import ShardedSettings, TensorSettings
from shardyard.config.settings.values import AUTO, EXPLAINED_VALUE, IMPOSSIBLE_RELATION, NEVER
from shardyard.config.settings.worker import WorkerSettings
from shardyard.config.settings.yard import (
    COLD_FOLDER,
    COORDINATOR_GRACE_MS,
    DRAIN_S,
    WAL_FOLDER,
    MembershipSettings,
    YardSettings,
)

__all__ = [
    "AUTO",
    "AgentSettings",
    "CHECKPOINTS",
    "COLD_FOLDER",
    "COORDINATOR_GRACE_MS",
    "Catalogue",
    "CheckpointSettings",
    "ClipSettings",
    "CompressionSettings",
    "ConsistencySettings",
    "DRAIN_S",
    "DataSettings",
    "EXPLAINED_VALUE",
    "EvaluatorSettings",
    "IMPOSSIBLE_RELATION",
    "JobSettings",
    "LogSettings",
    "MembershipSettings",
    "MetricsSettings",
    "NEVER",
    "PARTITIONS_AUTO",
    "PipelineSettings",
    "QuotaSettings",
    "SecuritySettings",
    "ServingSettings",
    "ShardedSettings",
    "TensorSettings",
    "Setting",
    "Settings",
    "StorageSettings",
    "WAL_FOLDER",
    "WorkerSettings",
    "YardSettings",
    "catalogue",
]
