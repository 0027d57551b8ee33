"""A model whose variables are cut over the members of a group, with its optimizer.

What computes is a copy of the script's model, made anew for each group, whose parameters are shards. The script's model
stays, so that a script can evaluate when the data ends; meanwhile its parameters that are cut take no memory.

Owns: which part of the variables this worker updates. Must not know: groups, steps.
"""

from __future__ import annotations

import copy
import logging
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardyard.config.settings import ShardedSettings, TensorSettings
from shardyard.domain.epochs import EpochPlan
from shardyard.domain.errors import InvalidRequest, UnsupportedModel, UnsupportedOptimizer
from shardyard.domain.optimizers import WHOLE_VARIABLES, OptimizerSpec
from shardyard.domain.replica_groups import Strategy
from shardyard_worker.collectives.default_group import DefaultGroup
from shardyard_worker.embedding.table import Table
from shardyard_worker.pipeline.schedules import check_loss
from shardyard_worker.replicas.spread_model import Loss, SpreadModel, nothing_like
from shardyard_worker.sharding import fully_sharded, tensor_parallel, tensor_plan
from shardyard_worker.sharding.output_check import check_outputs
from shardyard_worker.sharding.served_shares import ServedShares
from shardyard_worker.sharding.shards import Shard, ShardedReplica
from shardyard_worker.training.variables import BufferPlace, Variable

log = logging.getLogger("shardyard.worker")


class ShardedModel(SpreadModel):
    """The base of both. `parameters` come before `buffers` among the job's variables. Raises UnsupportedModel,
    UnsupportedOptimizer."""

    replica: ShardedReplica

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[Variable],
        buffers: Sequence[Variable],
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        strategy: Strategy,
        loss: Loss,
    ) -> None:
        if spec.kind in WHOLE_VARIABLES:
            raise UnsupportedOptimizer(
                f"{spec.kind} in a job with job.strategy {strategy.value}",
                why="its update of an element depends on the whole parameter, of which a worker has a shard",
                todo="use an optimizer that treats elements alike, as AdamW, or job.strategy multi_worker_mirrored",
            )
        super().__init__(parameters, buffers, strategy, loss)
        self._optimizer = optimizer
        self._spec = spec
        self._names = self._names_in(model)
        names = {id(buffer): name for name, buffer in model.named_buffers()}
        self._buffer_names = [names[id(each.target)] for each in buffers]
        self._model = model
        self._template = self._copy_of(model, [nothing_like(each.target) for each in parameters])
        self.computes = self._template
        """What computes, with this worker's shards for parameters."""
        self.replica = ShardedReplica([], [], [], optimizer, spec)
        self._at: tuple[int, int] | None = None
        """The place and the size of the group for which the model is cut."""
        self._group: DefaultGroup | None = None
        self.guard(model)

    def _names_in(self, model: torch.nn.Module) -> list[str]:
        """The names of the parameters in the model. Raises UnsupportedModel."""
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        for each in self._parameters:
            if each.target not in names:
                raise UnsupportedModel(
                    f"variable {each.spec.name!r}, which is in no module of the model",
                    why="the parameters of modules are cut",
                    todo="leave it out of the optimizer, or make it a parameter of a module",
                )
        return [names[each.target] for each in self._parameters]

    def _copy_of(self, model: torch.nn.Module, values: Sequence[torch.Tensor]) -> torch.nn.Module:
        """A copy of the modules, with the same buffers and tables. `values`: the memory of the parameters that the job
        trains; they have gradients of their own."""
        memory = dict(zip(self._names, values, strict=True))
        tables = [each for each in model.modules() if isinstance(each, Table)]
        shared: dict[int, Any] = {id(each): each for each in (*model.buffers(), *tables)}
        for name, each in model.named_parameters():
            shared[id(each)] = torch.nn.Parameter(memory.get(name, each).detach(), each.requires_grad)
        try:
            return copy.deepcopy(model, shared)
        except Exception as error:  # whatever the model's classes raise
            raise UnsupportedModel(
                f"a {type(model).__name__} that cannot be copied: {error}",
                why="the job trains a copy of the model whose parameters are shards",
                todo="leave what cannot be copied (locks, files) out of the model, or give it a __deepcopy__",
            ) from error

    def begin(self, place: int, size: int, group: DefaultGroup | None) -> None:
        """Cuts the model for this place. The shards' values are those of before if that was the place then."""
        self._group = group
        cut_names = set() if group is None else self._cut_names
        if group is None:
            self.make_room()
        # memory that nobody has touched takes none
        memory = [
            torch.empty_strided(*layout, dtype=each.target.dtype) if name in cut_names else each.target
            for name, each, layout in zip(self._names, self._parameters, self._layouts, strict=True)
        ]
        self.computes = self._copy_of(self._template, memory)
        del memory
        if group is not None:
            self._cut(self.computes, group)
        cut = dict(self.computes.named_parameters())
        shards = [Shard(cut[name]) for name in self._names]
        buffers = [self._in_copy(*each) for each in zip(self._buffer_names, self._buffers, strict=True)]
        if self._at == (place, size):
            self.replica.take_over(shards, buffers)
        else:
            self._optimizer.state.clear()
            self.replica = ShardedReplica(
                self._parameters,
                shards,
                buffers,
                self._optimizer,
                self._spec,
                place=place,
                size=size,
            )
        self.free()
        self._at = place, size

    def served_shares(self, place: int, size: int) -> ServedShares:
        """What this worker exchanges with servers, where they have the variables."""
        return ServedShares(self._parameters, self.replica.shards, self.replica.buffers, place, size)

    @property
    @abstractmethod
    def _cut_names(self) -> Collection[str]:
        """The parameters that `_cut` gives memory of their own."""

    def _in_copy(self, name: str, buffer: Variable) -> Variable:
        owner, _, key = name.rpartition(".")
        return replace(buffer, place=BufferPlace(self.computes.get_submodule(owner), key))

    @abstractmethod
    def _cut(self, model: torch.nn.Module, group: DefaultGroup) -> None:
        """Makes the parameters of this copy shards. All members do it alike."""

    def end(self) -> None:
        """This group computes nothing more."""
        self._group = None
        self.drop_gradients()

    @property
    def _unused(self) -> Collection[int]:
        return [at for at, each in enumerate(self.replica.shards) if each.is_cut]

    # ---- a batch

    def compute(self, inputs: Sequence[Any], target: Any, weight: float) -> float:
        """Adds the gradients of a batch, times `weight`, to those of the shards. All members call it together. Returns
        the loss. Raises InvalidRequest, UnsupportedModel, GroupLost."""
        for module, own in zip(self._model.modules(), self.computes.modules(), strict=True):
            own.training = module.training
        loss = self.loss(self.computes(*inputs), target)
        check_loss(loss)
        torch.clear_autocast_cache()  # it has parameters from before the step
        with torch.autocast(loss.device.type, enabled=False):  # a script's autocast is for the forward
            torch.autograd.backward(loss * weight)
        return float(loss.detach())

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """Of the shards, in the order of the parameters."""
        return [shard.gradient for shard in self.replica.shards]

    def drop_gradients(self) -> None:
        for shard in self.replica.shards:
            shard.cut.grad = None


class FullyShardedModel(ShardedModel):
    """For job.strategy sharded: FSDP2. A group of any size, of which each member computes its own batches; or with
    `shares` above 1, as many parts of the same batches."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[Variable],
        buffers: Sequence[Variable],
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        settings: ShardedSettings,
        loss: Loss,
        *,
        shares: int = 1,
    ) -> None:
        self._shares = shares
        self._units = fully_sharded.units_of(model, settings.patterns)
        self._settings = settings
        super().__init__(model, parameters, buffers, optimizer, spec, Strategy.SHARDED, loss)
        log.info("the model is sharded:\n%s", fully_sharded.plan_of(model, self._units))

    @property
    def fingerprint(self) -> str:
        elements = sum(each.spec.elements for each in self._parameters)
        units = ", ".join(self._units)
        how = f"reshard_after_forward {self._settings.reshard_after_forward}"
        return f"shards of {elements} elements, with units {units or 'none'}, {how}"

    def check_batches(self, plan: EpochPlan) -> None:
        if self._shares > 1:
            self._check_parts(plan)
            return
        rest = plan.samples_per_epoch % plan.samples_per_step
        begin, end = plan.span(plan.per_epoch - 1, plan.ranks - 1)
        if rest and begin == end:
            raise InvalidRequest(
                f"{rest} samples in the last step of an epoch, for {plan.ranks} logical ranks with batches of"
                f" {plan.batch_size}",
                why="all members gather the parameters for each other's batches, so each needs one in each step",
                todo="give drop_last=True, or another batch_size",
            )

    def _check_parts(self, plan: EpochPlan) -> None:
        smallest = min(plan.batch_sizes)
        if smallest < self._shares:
            where = " (in the last step of an epoch)" if smallest != plan.batch_size else ""
            raise InvalidRequest(
                f"a batch of {smallest} samples{where}, for {self._shares} workers",
                why="each worker of a replica computes some samples of the batch",
                todo=f"give a batch_size of {self._shares} at least, and drop_last=True",
            )

    @property
    def _cut_names(self) -> Collection[str]:
        return self._names

    def _cut(self, model: torch.nn.Module, group: DefaultGroup) -> None:
        reshard = self._settings.reshard_after_forward
        fully_sharded.cut(model, self._units, group.world, reshard_after_forward=reshard)


class TensorParallelModel(ShardedModel):
    """For job.strategy tensor: DTensor. A group of job.tensor.size members, which compute the same batches."""

    loads_whole = True

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[Variable],
        buffers: Sequence[Variable],
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        settings: TensorSettings,
        loss: Loss,
    ) -> None:
        self._plan = tensor_plan.plan_for(model, settings.size, settings.colwise_patterns, settings.rowwise_patterns)
        self.is_to_compare = False
        """Whether outputs are compared before the next step: at the first of a group that has loaded all values."""
        self.was_compared = False
        super().__init__(model, parameters, buffers, optimizer, spec, Strategy.TENSOR, loss)
        log.info("the model is cut over %d workers:\n%s", settings.size, self._plan.table(model, settings.size))

    @property
    def fingerprint(self) -> str:
        return f"layers {', '.join(self._plan.colwise)} cut by outputs, {', '.join(self._plan.rowwise)} by inputs"

    def check_batches(self, plan: EpochPlan) -> None:
        """Any batch."""

    def begin(self, place: int, size: int, group: DefaultGroup | None) -> None:
        super().begin(place, size, group)
        self.is_to_compare = False

    def loaded(self) -> None:
        self.compare_next()

    def compare_next(self) -> None:
        """The next batch compares the outputs of the cut model with those of the whole one. All members call it."""
        self.is_to_compare = True

    @torch.no_grad()
    def gather_whole(self) -> None:
        """Gives the script's model the values of all members' shards. All members call it together."""
        self.make_room()
        for each, shard in zip(self._parameters, self.replica.shards, strict=True):
            each.target.copy_(shard.cut.full_tensor() if shard.is_cut else shard.local)

    @property
    def _cut_names(self) -> Collection[str]:
        layers = (*self._plan.colwise, *self._plan.rowwise)
        return {name for name in self._names if name.rpartition(".")[0] in layers}

    def _cut(self, model: torch.nn.Module, group: DefaultGroup) -> None:
        tensor_parallel.cut(model, self._plan, group.world)

    @property
    def _unused(self) -> Collection[int]:
        return () if self.is_to_compare else super()._unused

    def compute(self, inputs: Sequence[Any], target: Any, weight: float) -> float:
        if self.is_to_compare:
            self._check(inputs)
            self.is_to_compare, self.was_compared = False, True
            self.free()
        return super().compute(inputs, target, weight)

    def _check(self, inputs: Sequence[Any]) -> None:
        if self._group is not None:
            whole = self._copy_of(self._template, [each.target for each in self._parameters])
            check_outputs(whole, self.computes, inputs)
