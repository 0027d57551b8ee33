"""Puts the values of a version from the flat buffers into the model's tensors.

Owns: the targets, the tensors that hold the current values, and which of them are still arriving. Invariants: in a
synchronous job the targets hold one version of all partitions; in an asynchronous job a whole version of each
partition. With worker.exchange overlapped this holds for what a user of a target sees. Must not know: which version is
needed.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from shardyard.domain import errors
from shardyard.domain.variables import VariableKind
from shardyard_worker.exchange.buffers.buffer_layout import Late, Version
from shardyard_worker.exchange.requests import Bases
from shardyard_worker.rows.row_prefetch import RowPrefetch
from shardyard_worker.session.session import Session
from shardyard_worker.training.forward_prefetch import ForwardPrefetch
from shardyard_worker.training.variables import ServerLink, StepContext, Variable

log = logging.getLogger("shardyard.worker")

_CHANGES = operator.attrgetter("_version")
SAMPLED = 16
"""Parameters whose changes in place are counted at each step, spread over the model: 5 us. `load_state_dict` changes
all."""


class ValueLoader:
    """For the thread that trains; a value that is still arriving may be brought by any thread that uses it."""

    def __init__(self, link: ServerLink, model: torch.nn.Module | None, context: Callable[[], StepContext]) -> None:
        session = link.session
        self._link = link
        self._context = context
        self.targets: dict[int, torch.Tensor] = {}
        self.load_only(range(len(link.variables)))
        self._follow_mode()
        self._prefetch = ForwardPrefetch(self.targets, model, self._bring) if _prefetches(session, model) else None
        self._late: dict[int, list[Late]] = {}
        """The parts of values that were arriving when the version was loaded, by variable."""
        self._changes: int | None = None
        """How often some of the parameters had been changed in place when the version was loaded. None: unknown."""
        self._version: Version = {}
        self._stranded = False
        self._reloading = False
        self._notes_bases = session.job_settings.consistency.stale is not None
        self.bases: Bases | None = None
        """The versions that the targets hold, if the job scales by staleness."""

    def load_only(self, indices: Iterable[int]) -> None:
        """From now on the values of these variables are loaded, and of no others."""
        variables = {index: self._link.variables[index] for index in indices}
        self.targets.clear()
        self.targets.update({index: each.target for index, each in variables.items()})
        self._parameters = [
            (index, each.target) for index, each in variables.items() if each.spec.kind is VariableKind.PARAMETER
        ]
        self._buffers = [each for each in variables.values() if each.place is not None]
        self._sample = [target for _, target in self._parameters[:: max(1, len(self._parameters) // SAMPLED)]]
        self._changes = None

    def _follow_mode(self) -> None:
        # steps in this worker change the targets in place, and values may be needed as they came
        session = self._link.session
        self._takes_steps_here = session.job_settings.updates_in_workers
        self._view = session.settings.worker.exchange != "blocking" and not self._takes_steps_here

    def on_mode_change(self) -> None:
        """The job has another mode or strategy. Targets that may be views on values no more get memory of their own."""
        were_views = self._view
        self._follow_mode()
        if were_views and not self._view:
            with torch._C.DisableTorchFunctionSubclass():
                for _, target in self._parameters:
                    target.data = target.data.clone()

    def close(self) -> None:
        if self._prefetch is not None:
            self._prefetch.close()

    def order(self) -> tuple[int, ...]:
        """Indices of variables in the order in which the model needs their values; empty: all at once."""
        return () if self._prefetch is None else self._prefetch.order

    def on_gradient(self) -> None:
        """A gradient has been computed, so the order of first use is known."""
        if self._prefetch is not None:
            self._prefetch.settle_order()

    def on_map_change(self) -> None:
        """Values that are arriving under the old map will not arrive."""
        self._stranded = bool(self._late)

    def load(self, ahead: RowPrefetch | None = None) -> None:
        """Puts the current version into the targets, and the targets into the model. Values that are still arriving
        follow at their first use. `ahead`: the rows that came with the version."""
        link = self._link
        if link.tables is not None:
            link.tables.arrive(ahead)
        if self._notes_bases and not self._reloading:  # when reloading, the forward has used some older values
            self.bases = {part.partition: part.version for parts in link.router.current for part in parts}
        if self._prefetch is None:
            for variable in self._buffers:
                variable.put_back()
            link.buffers.values.load(self.targets, view=self._view)
            self._changes = None if self._view or self._takes_steps_here else self._count_changes()
            return
        # when reloading, the forward is under way, and what it has used must stay
        wanted: Iterable[int] = self._prefetch.awaited if self._reloading else self.targets
        late = {index: found for index in wanted if (found := link.buffers.values.late(index))}
        for index in wanted:
            link.variables[index].put_back()
        self._version, self._stranded = link.buffers.values.version, False
        self._put([index for index in wanted if index not in late])
        self._late = late
        self._prefetch.expect(late)
        unmarkable = [index for index in late if not self._prefetch.can_await(index)]
        if unmarkable:
            self._prefetch.take(unmarkable)

    def complete(self) -> None:
        """Waits until the targets hold the whole version. Call it before asking the servers anything else."""
        if self._late and self._prefetch is not None:
            self._prefetch.take_all()

    def changed_here(self) -> str:
        """The name of a parameter whose value is not that of the version, because the script has changed it. Empty if
        there is none, or if values are views of the version."""
        changes = self._changes
        if changes is None or changes == (now := self._count_changes()):
            return ""
        self._changes = now
        for index, target in self._parameters:
            value = torch.empty_like(target, requires_grad=False)
            self._link.buffers.values.load({index: value})
            if not torch.allclose(value, target.detach(), rtol=0, atol=0, equal_nan=True):
                return self._link.variables[index].spec.name
        return ""

    def _count_changes(self) -> int:
        return sum(map(_CHANGES, self._sample))

    def _bring(self, indices: Sequence[int]) -> None:
        """Waits for these values, and puts them into their targets."""
        try:
            if self._stranded:
                raise errors.ServerUnavailable("partitions have moved")
            for index in indices:
                for late in self._late.get(index, ()):
                    with self._link.session.wait_registry.over(partial(_awaited, self._link.variables[index], late)):
                        late.arrival.wait(late.begin, late.end)
        except errors.Unavailable as error:
            log.info("values that were on their way are asked for again (%s)", error.what)
            self._reloading = True
            try:
                self._context().reload()
            finally:
                self._reloading = False
            return
        self._put(indices)
        for index in indices:
            self._late.pop(index, None)

    def _put(self, indices: Sequence[int]) -> None:
        targets = {index: self.targets[index] for index in indices}
        with torch._C.DisableTorchFunctionSubclass():
            self._link.buffers.values.load(targets, view=self._view, version=self._version)

    def moved(self, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        """The current version's value minus the target, for each of these. If possible the result is in the memory that
        the next push sends."""
        buffers, found = self._link.buffers, dict[int, torch.Tensor]()
        for index in indices:
            target, view = self.targets[index], buffers.view(index)
            fits = view is not None and (view.device, view.dtype) == (target.device, target.dtype)
            found[index] = view if view is not None and fits else torch.empty_like(target)
        buffers.values.load(found)
        with torch.no_grad():
            for index, values in found.items():
                values.sub_(self.targets[index])
        return found


def _prefetches(session: Session, model: torch.nn.Module | None) -> bool:
    if session.settings.worker.exchange != "overlapped":
        return False
    if session.job_settings.compression.pull_rules.compresses:
        log.info("optimizer.step() waits for all values: job.compression.pull decodes them when all have come")
        return False
    if model is not None and any(_is_compiled(module) for module in model.modules()):
        log.info("optimizer.step() waits for all values, since the model is compiled")
        return False
    return True


def _is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _awaited(variable: Variable, late: Late) -> str:
    return f"the value of {variable.spec.name!r} from server {late.arrival.server}"
