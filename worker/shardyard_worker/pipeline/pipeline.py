"""A model that is cut into the stages of a pipeline, with its variables and its optimizer.

Every worker has the script's model and cuts it in the same way. A worker updates the variables of its own stages; the
parameters of the others take no memory.

Owns: which variables belong to which stages. Must not know: groups, steps.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch

from shardyard.config.settings import PipelineSettings
from shardyard.domain.epochs import EpochPlan
from shardyard.domain.errors import InvalidRequest, UnsupportedModel
from shardyard.domain.optimizers import OptimizerSpec
from shardyard.domain.replica_groups import Strategy
from shardyard.runtime.malloc import Kept
from shardyard_worker.embedding.table import Table
from shardyard_worker.pipeline.cut import Stage, cut_model, plan_of
from shardyard_worker.replicas.replica import Replica
from shardyard_worker.replicas.spread_model import Loss, SpreadModel
from shardyard_worker.training.variables import Variable

log = logging.getLogger("shardyard.worker")


class Pipeline(SpreadModel):
    """`parameters` come before `buffers` among the job's variables. Raises UnsupportedModel."""

    kind = "pipeline"
    kept = Kept.MESSAGES

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[Variable],
        buffers: Sequence[Variable],
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        settings: PipelineSettings,
        loss: Loss,
    ) -> None:
        super().__init__(parameters, buffers, Strategy.PIPELINE, loss)
        self.settings = settings
        self.stages: list[Stage] = cut_model(model, settings.stages_in_all, settings.begins)
        self.device = parameters[0].target.device
        self.replica = Replica([], [], optimizer, spec, ())
        self._optimizer = optimizer
        self._spec = spec
        self._check_owners()
        self.places = self._found_places()
        """For each variable, the place in a group of the worker that updates it."""
        self.place_of_tables = self._found_tables()
        """The place of the worker that looks up rows, and pushes their gradients."""
        log.info("the model is cut into %d stages:\n%s", len(self.stages), plan_of(self.stages))
        self.guard(model)

    @property
    def fingerprint(self) -> str:
        cuts = ", ".join(f"{stage.calls[0] if stage.calls else ''} {stage.elements}" for stage in self.stages)
        settings = self.settings
        return f"stages at {cuts}, {settings.schedule.value} with {settings.microbatches} micro-batches"

    def _found_places(self) -> list[int]:
        found = dict[torch.Tensor, int]()
        for place in range(self.settings.stages):
            for number in self.settings.schedule.stages_at(place, self.settings.stages, self.settings.stages_each):
                module = self.stages[number].module
                found |= dict.fromkeys([*module.parameters(), *module.buffers()], place)
        variables = [each.found for each in (*self._parameters, *self._buffers)]
        return [found[each] for each in variables if each is not None]

    def replica_at(self, place: int) -> Replica:
        """The variables of the stages at this place of a group."""
        variables = [*self._parameters, *self._buffers]
        places = [at for at, each in enumerate(self.places) if each == place]
        if tuple(places) != tuple(self.replica.places):
            parameters = [variables[at] for at in places if at < len(self._parameters)]
            buffers = [variables[at] for at in places if at >= len(self._parameters)]
            self._optimizer.state.clear()
            self.replica = Replica(parameters, buffers, self._optimizer, self._spec, places)
            self.make_room()
            self.free()
        return self.replica

    @property
    def _unused(self) -> Collection[int]:
        return {*range(len(self._parameters))} - {*self.replica.places}

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        return [target.grad for target in self.replica.targets]

    def drop_gradients(self) -> None:
        for target in self.replica.targets:
            target.grad = None

    def check_batches(self, plan: EpochPlan) -> None:
        """Raises InvalidRequest if a batch of an epoch cannot be cut into micro-batches."""
        count = self.settings.microbatches
        for size in plan.batch_sizes:
            if size % count:
                where = " (in the last step of an epoch)" if size != plan.batch_size else ""
                raise InvalidRequest(
                    f"a batch of {size} samples{where}, and {count} micro-batches",
                    why="the micro-batches of a pipeline have one shape",
                    todo="give a batch_size that is a multiple of job.pipeline.microbatches, and drop_last=True",
                )

    def _found_tables(self) -> int:
        """Raises UnsupportedModel if several workers would look up rows."""
        schedule, count, each = self.settings.schedule, self.settings.stages, self.settings.stages_each
        found = [
            number
            for number, stage in enumerate(self.stages)
            if any(isinstance(module, Table) for module in stage.module.modules())
        ]
        if any(found) and schedule.delays_weights:
            raise UnsupportedModel(
                f"embedding tables in stage {found[-1]}, and the schedule {schedule.value}",
                why="of later stages it computes gradients of inputs and of parameters apart, and rows are neither",
                todo="look rows up in the first stage, or use another job.pipeline.schedule",
            )
        places = [place for place in range(count) if {*found} & {*schedule.stages_at(place, count, each)}]
        if len(places) > 1:
            raise UnsupportedModel(
                f"embedding tables in the stages of {len(places)} workers",
                why="the gradients of all tables' rows are pushed by one worker, in one push",
                todo="look all rows up in one stage: cut the model elsewhere (job.pipeline.cut)",
            )
        return places[0] if places else 0

    def _check_owners(self) -> None:
        """Raises UnsupportedModel for a variable that no stage has."""
        owned = {each for stage in self.stages for each in (*stage.module.parameters(), *stage.module.buffers())}
        for variable in (*self._parameters, *self._buffers):
            if variable.found not in owned:
                raise UnsupportedModel(
                    f"variable {variable.spec.name!r}, which no stage of the pipeline uses",
                    why="each variable is updated by the stage that uses it",
                    todo="leave it out of the optimizer, or remove it from the model",
                )
