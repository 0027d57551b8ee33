"""Chooses the class for a job's mode and strategy."""

from __future__ import annotations

from shardyard.domain.consistency import UpdateMode
from shardyard_worker.consistency.asynchronous import AsyncStrategy
from shardyard_worker.consistency.backup_workers import BackupVersions
from shardyard_worker.consistency.groups.mirrored import MirroredStrategy
from shardyard_worker.consistency.groups.pipelined import PipelineStrategy
from shardyard_worker.consistency.groups.pushed_async import PushedAsync
from shardyard_worker.consistency.groups.pushed_sync import PushedSync
from shardyard_worker.consistency.groups.sharded import ShardedStrategy, TensorStrategy
from shardyard_worker.consistency.groups.share_parts import ShardPart, TensorPart
from shardyard_worker.consistency.groups.stage_part import StagePart
from shardyard_worker.consistency.hybrid import HybridStrategy
from shardyard_worker.consistency.strategy import Strategy
from shardyard_worker.consistency.synchronous import SyncStrategy
from shardyard_worker.pipeline.pipeline import Pipeline
from shardyard_worker.replicas.replica import Replica
from shardyard_worker.replicas.spread_model import SpreadModel
from shardyard_worker.sharding.sharded_model import FullyShardedModel, TensorParallelModel
from shardyard_worker.training.trainer import Trainer


def strategy_for(trainer: Trainer, replica: Replica | SpreadModel | None) -> Strategy:
    """The strategy of the partitions' current mode. Mode `local` is a synchronous job whose steps are rounds.
    `replica`: what this worker can train with variables of its own."""
    session = trainer.session
    if session.job_settings.has_replicas:
        match replica:
            case Pipeline():
                return PipelineStrategy(trainer, replica)
            case FullyShardedModel():
                return ShardedStrategy(trainer, replica)
            case TensorParallelModel():
                return TensorStrategy(trainer, replica)
            case Replica():
                return MirroredStrategy(trainer, replica)
    elif session.job_settings.strategy.uses_groups:
        pushed = PushedAsync if session.mode is UpdateMode.ASYNC else PushedSync
        match replica:
            case Pipeline():
                return pushed(trainer, StagePart(trainer, replica))
            case FullyShardedModel():
                return pushed(trainer, ShardPart(trainer, replica))
            case TensorParallelModel():
                return pushed(trainer, TensorPart(trainer, replica))
    if session.mode is UpdateMode.ASYNC:  # async, bounded
        return AsyncStrategy(trainer)
    consistency = session.job_settings.consistency
    if consistency.rows_at_once:
        return HybridStrategy(trainer)
    return SyncStrategy(trainer, BackupVersions) if consistency.backup_workers else SyncStrategy(trainer)
