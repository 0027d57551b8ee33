"""One replica: the variables of a job in this worker, and the state of the optimizer that updates them here.

Owns: the conversion between torch's state and arrays, by which a replica is copied from the servers, to them, and to
another worker. Invariant: what is copied is everything that the next step depends on. Must not know: groups, gradients'
way, when a copy is made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from shardyard.checkpoints.partition_file import VALUES
from shardyard.domain.optimizers import OptimizerSpec, Slot, slots_of
from shardyard_worker.exchange.buffers.tensor_types import TORCH_DTYPES, widened
from shardyard_worker.exchange.optimizer_exchange import GivenPart
from shardyard_worker.exchange.variable_parts import Parts, Region, VariablePart
from shardyard_worker.optimizers.step_hooks import take_step
from shardyard_worker.optimizers.torch_state import PRODUCT, STEP, VariableState, from_torch, to_torch
from shardyard_worker.training.variables import Variable

_FUSED: Final = ("adam", "adamw")
_NO_STATE: Final = VariableState(0, {})


class Replica:
    """`optimizer`: the script's own. `places`: of `parameters`, and then of `buffers`, among the job's variables; None:
    these are all of them."""

    def __init__(
        self,
        parameters: Sequence[Variable],
        buffers: Sequence[Variable],
        optimizer: torch.optim.Optimizer,
        spec: OptimizerSpec,
        places: Sequence[int] | None = None,
    ) -> None:
        self.parameters = parameters
        self.buffers = buffers
        self.places = range(len(parameters) + len(buffers)) if places is None else places
        self.targets = [parameter.target for parameter in parameters]
        self._optimizer = optimizer
        self._spec = spec
        self._has_chosen = False
        self._kept: list[torch.Tensor] = []
        self._counts = [0] * (len(parameters) + len(buffers))
        """The updates of each variable, as servers count them: torch does not count those of every optimizer."""
        self.is_stepping = False
        """Whether the job takes a step with the script's optimizer now."""

    def _choose_fused(self) -> None:
        """On a CPU torch fuses Adam's update, which then takes half of the time, only if it is told to."""
        self._has_chosen = True
        on_cpu = all(target.device.type == "cpu" for target in self.targets)
        for group in self._optimizer.param_groups:
            if on_cpu and self._spec.kind in _FUSED and group.get("fused") is None and group.get("foreach") is None:
                group["fused"] = True

    @property
    def optimizer_state(self) -> Mapping[torch.Tensor, Any]:
        return self._optimizer.state

    # ---- a step

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Updates the parameters with these gradients. The script keeps its own: a step may follow a batch of another
        rank, or of another worker."""
        if not self._has_chosen:
            self._choose_fused()
        own = [target.grad for target in self.targets]
        for at, (target, gradient) in enumerate(zip(self.targets, gradients, strict=True)):
            target.grad = gradient
            self._counts[at] += gradient is not None
        self.is_stepping = True
        try:
            take_step(self._optimizer)
        finally:
            self.is_stepping = False
            for target, gradient in zip(self.targets, own, strict=True):
                target.grad = gradient

    def keep_buffers(self, found: Sequence[torch.Tensor] | None = None) -> None:
        """Notes the buffers of the version at hand, which a forward may change. `found`: their new values."""
        if not self.buffers:
            return
        with torch.no_grad():
            if found is not None:
                for at, (buffer, value) in enumerate(zip(self.buffers, found, strict=True), len(self.parameters)):
                    buffer.target.copy_(value)
                    self._counts[at] += 1
            for buffer in self.buffers:
                buffer.put_back()
            self._kept = [buffer.target.clone() for buffer in self.buffers]

    def put_back_buffers(self) -> None:
        """The buffers are again those of the version at hand."""
        if not self.buffers:
            return
        with torch.no_grad():
            for buffer, kept in zip(self.buffers, self._kept, strict=True):
                buffer.put_back()
                buffer.target.copy_(kept)

    # ---- copies

    def set_state(self, states: Mapping[int, VariableState]) -> None:
        """Replaces the optimizer's state. Variables that are left out were not updated."""
        self._counts = [states[at].count if at in states else 0 for at in range(len(self._counts))]
        self._optimizer.state.clear()
        for at, state in states.items():
            if at >= len(self.parameters):
                continue
            target = self.targets[at]
            as_torch = to_torch(self._spec.kind, self._group(at), state, tuple(target.shape))
            if as_torch:
                self._optimizer.state[target] = {
                    # torch keeps a count on the CPU, and slots beside their parameter
                    name: value if name in (STEP, PRODUCT) else value.to(target.device, target.dtype)
                    for name, value in as_torch.items()
                }

    def region(self, at: int) -> Region:
        """Of which elements of a variable this replica has the values and the state."""
        return Region.whole((*self.parameters, *self.buffers)[at].spec.elements)

    def load(self, read: Callable[[Parts], Mapping[int, int]]) -> None:
        """Replaces everything. `read` fills the parts, and returns how often each variable was updated."""
        variables = (*self.parameters, *self.buffers)
        with loaded_values(variables) as values:
            slots: dict[int, dict[str, torch.Tensor]] = {at: {} for at in range(len(variables))}
            for at, name, _ in self._slots():
                slots[at][name] = torch.empty(values[at].numel(), dtype=TORCH_DTYPES[variables[at].spec.dtype])
            arrays = [{VALUES: each, **slots[at]} for at, each in enumerate(values)]
            parts = {self.places[at]: VariablePart(self.region(at), each) for at, each in enumerate(arrays)}
            counts = read(parts)
        states = {
            at: VariableState(counts[place], {name: each.numpy() for name, each in slots[at].items()})
            for at, place in enumerate(self.places)
        }
        self.set_state(states)

    def given(self) -> dict[int, GivenPart]:
        """What this replica gives the servers, by the variables' places in the layout. Its arrays share memory with the
        replica where they can."""
        states, found = self._own_state(), {}
        for at, values in enumerate(self._own_values()):
            state = states.get(at, _NO_STATE)
            arrays = {VALUES: values.numpy(), **state.slots}
            found[self.places[at]] = GivenPart(0, values.numel(), state.count, arrays)
        return found

    def _own_state(self) -> dict[int, VariableState]:
        found = {}
        for at, count in enumerate(self._counts):
            slots: Mapping[str, Any] = {}
            if at < len(self.parameters) and count:
                parameter = self.parameters[at]
                state = self._optimizer.state.get(parameter.target, {})
                given = from_torch(self._spec.kind, self._group(at), state, parameter.target, parameter.spec.name)
                slots = {} if given is None else given.slots
            found.update({at: VariableState(count, slots)} if count else {})
        return found

    def _own_values(self) -> list[torch.Tensor]:
        return [widened(each.target).detach().cpu().reshape(-1) for each in (*self.parameters, *self.buffers)]

    @torch.no_grad()
    def packed(self) -> list[torch.Tensor]:
        """Everything in a few flat tensors on the CPU, one for each dtype, of the same sizes in all replicas."""
        states = self._own_state()
        found: dict[torch.dtype, list[torch.Tensor]] = {}
        found[torch.int64] = [torch.tensor(self._counts)]
        for value in self._own_values():
            found.setdefault(value.dtype, []).append(value)
        for at, name, initial in self._slots():
            if at in states and name in states[at].slots:
                array = torch.from_numpy(states[at].slots[name])
            else:
                dtype = TORCH_DTYPES[self.parameters[at].spec.dtype]
                array = torch.full((self.targets[at].numel(),), initial, dtype=dtype)
            found.setdefault(array.dtype, []).append(array)
        return [torch.cat(each) for _, each in sorted(found.items(), key=lambda item: str(item[0]))]

    def nothing_packed(self) -> list[torch.Tensor]:
        """An empty tensor in the place of each of `packed`."""
        dtypes = {torch.int64, *(TORCH_DTYPES[each.spec.dtype] for each in (*self.parameters, *self.buffers))}
        return [torch.empty(0, dtype=dtype) for dtype in sorted(dtypes, key=str)]

    @torch.no_grad()
    def unpack(self, packed: Sequence[torch.Tensor]) -> None:
        """Takes what another replica's `packed` was."""
        whole, ends = {each.dtype: each for each in packed}, dict[torch.dtype, int]()

        def take(dtype: torch.dtype, elements: int) -> torch.Tensor:
            begin = ends.get(dtype, 0)
            ends[dtype] = begin + elements
            return whole[dtype][begin : begin + elements]

        counts = take(torch.int64, len(self._counts)).tolist()
        for variable in (*self.parameters, *self.buffers):
            values = take(TORCH_DTYPES[variable.spec.dtype], variable.target.numel())
            variable.target.copy_(values.view(variable.target.shape))
        slots: dict[int, dict[str, Any]] = {at: {} for at in range(len(counts))}
        for at, name, _ in self._slots():
            dtype = TORCH_DTYPES[self.parameters[at].spec.dtype]
            slots[at][name] = take(dtype, self.targets[at].numel()).numpy()
        self.set_state({at: VariableState(count, slots[at]) for at, count in enumerate(counts) if count})

    def _slots(self) -> Iterator[tuple[int, str, float]]:
        """The place of each parameter, with the name and the first value of each of its state arrays."""
        for at in range(len(self.parameters)):
            for slot in self._slots_of(at):
                yield at, slot.name, slot.initial

    def _slots_of(self, at: int) -> tuple[Slot, ...]:
        return slots_of(self._spec.kind, self._group(at))

    def _group(self, at: int) -> Sequence[float]:
        return self._spec.groups[self.parameters[at].spec.group]


@contextlib.contextmanager
def loaded_values(variables: Sequence[Variable]) -> Iterator[list[torch.Tensor]]:
    """Flat tensors for the values of these variables, which have them at the end: where possible, the targets' own
    memory."""
    found, copies = [], []
    for each in variables:
        each.put_back()
        target = each.target.detach()
        if target.is_contiguous():
            found.append(target.view(-1))
        else:
            found.append(target.new_empty(target.numel()))
            copies.append((target, found[-1]))
    yield found
    for target, values in copies:
        target.copy_(values.view(target.shape))
