"""Chooses the class for a job's mode and strategy."""

from __future__ import annotations

from shardyard.domain.consistency import UpdateMode
from shardyard_worker.consistency.asynchronous import AsyncStrategy
from shardyard_worker.consistency.backup_workers import BackupVersions
from shardyard_worker.consistency.groups.mirrored import MirroredStrategy
from shardyard_worker.consistency.groups.pipelined import PipelineStrategy
from shardyard_worker.consistency.groups.pushed_async import PushedAsync
from shardyard_worker.consistency.groups.pushed_shares import PushedShards, PushedTensors
from shardyard_worker.consistency.groups.pushed_stages import PushedStages
from shardyard_worker.consistency.groups.sharded import ShardedStrategy, TensorStrategy
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
    has_replicas = session.job_settings.has_replicas
    if session.job_settings.strategy.uses_groups:
        match replica:
            case Pipeline():
                if has_replicas:
                    return PipelineStrategy(trainer, replica)
                pushes_at_once = session.mode is UpdateMode.ASYNC
                return PushedAsync(trainer, replica) if pushes_at_once else PushedStages(trainer, replica)
            case FullyShardedModel():
                return ShardedStrategy(trainer, replica) if has_replicas else PushedShards(trainer, replica)
            case TensorParallelModel():
                return TensorStrategy(trainer, replica) if has_replicas else PushedTensors(trainer, replica)
            case Replica():
                return MirroredStrategy(trainer, replica)
    if session.mode is UpdateMode.ASYNC:  # async, bounded
        return AsyncStrategy(trainer)
    consistency = session.job_settings.consistency
    if consistency.rows_at_once:
        return HybridStrategy(trainer)
    return SyncStrategy(trainer, BackupVersions) if consistency.backup_workers else SyncStrategy(trainer)
