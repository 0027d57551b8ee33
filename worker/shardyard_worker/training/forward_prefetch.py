"""A model's tensors while their values are arriving: each is waited for at its first use.

After "Priority-based Parameter Propagation for Distributed DNN Training" (Jayarajan et al., MLSys 2019) and
ByteScheduler (Peng et al., SOSP 2019): what the next forward needs first travels first, and the forward begins
meanwhile. Both cut tensors, let urgent pieces overtake others in a queue in both directions, and order by the layers'
places. Here an answer is written in the order that the worker asked for, that of first use in the first forward, and
nothing overtakes.

While a tensor is waited for it has another class, as torch's own lazy parameters do. Any torch function that gets the
tensor waits first, so it does not matter which module has it, how many share it, or whether a module uses it. Some
code takes tensors past torch's functions (custom kernels, scripted modules). A hook that all modules call covers these:
a module waits for its own parameters and buffers; a module that is scripted or in evaluation mode also for those of all
modules inside it.

Owns: which tensors are marked, the order of first use. Invariants: torch never reads a value before it is there; a
value that was read does not change before the next step. Must not know: where values come from.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

Bring = Callable[[Sequence[int]], None]

_TENSOR: Any = torch.Tensor
_NEEDS_NO_VALUE = frozenset(
    [
        *(
            getattr(_TENSOR, name).__get__
            for name in ("grad", "requires_grad", "is_leaf", "grad_fn", "shape", "dtype", "device", "layout", "ndim")
        ),
        _TENSOR.grad.__set__,
        _TENSOR.grad.__delete__,
        _TENSOR.size,
        _TENSOR.dim,
        _TENSOR.numel,
        _TENSOR.stride,
        _TENSOR.is_contiguous,
        _TENSOR.is_floating_point,
        _TENSOR.element_size,
    ]
)
"""Attributes that can be read from a tensor whose value is not there."""


class ForwardPrefetch:
    """The targets of one job, by index of their variable. One thread calls it; any thread may use the tensors."""

    def __init__(self, targets: Mapping[int, torch.Tensor], root: torch.nn.Module | None, bring: Bring) -> None:
        """`root`: the model, if there is one. `bring`: waits for values and puts them into targets."""
        self._targets = targets
        self._root = root
        self._bring = bring
        self._places = {id(target): index for index, target in targets.items()}
        self._classes = {kind: self._marked(kind) for kind in (torch.Tensor, torch.nn.Parameter)}
        self._marks: set[int] = set()
        self._awaited: set[int] = set()
        self._lock = threading.RLock()
        self._used: list[int] | None = []
        self._of: dict[torch.nn.Module, tuple[int, ...]] = {} if root is None else self._by_module(root)
        self._handle = register_module_forward_pre_hook(self._enter)
        self.order = tuple(range(len(targets)))

    def close(self) -> None:
        """Stops waiting: values that have not come are not brought."""
        self._handle.remove()
        with self._lock:
            self._unmark(tuple(self._marks))
            self._awaited.clear()

    @property
    def awaited(self) -> frozenset[int]:
        """Targets whose values have not been brought."""
        return frozenset(self._awaited)

    def can_await(self, index: int) -> bool:
        """Whether a target can be marked: not if it has its own class."""
        return index in self._marks or type(self._targets[index]) in self._classes

    def expect(self, indices: Iterable[int]) -> None:
        """These will be brought when they are used. All others have their values."""
        with self._lock:
            self._awaited = set(indices)
            self._mark(self._awaited if self._used is None else self._targets)

    def brought(self, indices: Iterable[int]) -> None:
        """These have their values."""
        with self._lock:
            found = tuple(indices)
            self._awaited.difference_update(found)
            self._unmark(found)

    def take(self, indices: Iterable[int]) -> None:
        """Brings the values of these that are missing. Raises what bringing them does."""
        with self._lock:
            touched = [index for index in indices if index in self._marks]
            if not touched:
                return
            if self._used is not None:
                self._used += touched
            due = [index for index in touched if index in self._awaited]
            if due:
                self._bring(due)
            self.brought(touched)

    def take_all(self) -> None:
        """Brings all missing values."""
        with self._lock:
            self.take(sorted(self._awaited))

    def settle_order(self) -> None:
        """Called when a gradient has been computed: the next forward will use values in the order of this one."""
        with self._lock:
            used, self._used = self._used, None
            if used:
                self.order = tuple(dict.fromkeys([*used, *self.order]))
            if used is not None:
                self._unmark(tuple(self._marks - self._awaited))

    # ---- inside

    def _mark(self, indices: Iterable[int]) -> None:
        for index in indices:
            kind = self._classes.get(type(self._targets[index]))
            if kind is not None:
                self._targets[index].__class__ = kind
                self._marks.add(index)

    def _unmark(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index in self._marks:
                self._marks.discard(index)
                target = self._targets[index]
                target.__class__ = type(target).__bases__[0]

    def _by_module(self, root: torch.nn.Module) -> dict[torch.nn.Module, tuple[int, ...]]:
        found = {}
        for module in root.modules():
            opaque = isinstance(module, torch.jit.ScriptModule | torch.nn.DataParallel)
            own = [*module.parameters(recurse=opaque), *module.buffers(recurse=opaque)]
            indices = tuple(self._places[id(tensor)] for tensor in own if id(tensor) in self._places)
            if indices:
                found[module] = indices
        return found

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        """Every module of the process calls this before its forward."""
        if module is self._root and self._used is not None:
            self._begin_anew(self._used)
        if not self._marks:
            return
        own = self._of.get(module)
        if own is not None:
            self.take(own)
        if not module.training:
            self.take(index for each in module.modules() for index in self._of.get(each, ()))

    def _begin_anew(self, used: list[int]) -> None:
        """Starts a new order: that of the last forward before the first gradient."""
        with self._lock:
            used.clear()
            self._mark(self._targets)

    def _marked(self, kind: type[torch.Tensor]) -> type[torch.Tensor]:
        """A subclass whose tensors are brought before they are used."""

        def arrive(tensor: torch.Tensor) -> None:
            self.take((self._places[id(tensor)],))

        def torch_function(_: type, func: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = kwargs or {}
            if func in _NEEDS_NO_VALUE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **given)
            found = [index for index in map(self._places.get, map(id, _leaves((args, given)))) if index is not None]
            self.take(found)
            return func(*args, **given)

        def reduce_ex(tensor: torch.Tensor, protocol: int) -> Any:
            arrive(tensor)
            return tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

        def deepcopy(tensor: torch.Tensor, memo: Any) -> Any:
            arrive(tensor)
            return tensor.__deepcopy__(memo)  # type: ignore[no-untyped-call]

        body = {
            "__torch_function__": classmethod(torch_function),
            "__reduce_ex__": reduce_ex,
            "__deepcopy__": deepcopy,
            "__module__": __name__,
        }
        return types.new_class(f"Awaited{kind.__name__}", (kind,), {}, lambda namespace: namespace.update(body))


def _leaves(given: Any) -> Iterable[Any]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, Mapping):
        for each in given.values():
            yield from _leaves(each)
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _leaves(each)
