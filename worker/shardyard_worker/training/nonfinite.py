"""Finds gradients that are not finite, and reports them before the push (rule A4).

Owns: the check of a push's gradients, and how many were found. Invariants: a report names the work; the coordinator
records it before the work is pushed, empty; nothing is checked if job.nonfinite is allow. Must not know: how a push
travels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from shardyard.codecs.format.finiteness import first_not_finite
from shardyard.domain.consistency import NonFinite
from shardyard.domain.layout.layouts import JobLayout
from shardyard.domain.push_names import PushName
from shardyard.domain.variables import VariableKind
from shardyard.transport.error_codes import from_detail
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.session.session import Session

log = logging.getLogger("shardyard.worker")

Rows = tuple[int, npt.NDArray[np.float32]]
"""A table's number, and the gradients of its rows, shape (m, dim)."""

PAUSE_MS_MAX = 1_000
_NAMES = {torch.float32: "float32", torch.float64: "float64"}


class NonFiniteCheck:
    """Checks one worker's pushes. `pause` waits for a number of milliseconds. `on_host`: gradients are in host
    memory."""

    def __init__(
        self, session: Session, layout: JobLayout, pause: Callable[[int], None], *, on_host: bool = True
    ) -> None:
        self._session = session
        variables, self._tables = layout.variables, [table.name for table in layout.tables]
        self._names = [spec.name for spec in variables]
        self._parameters = [i for i, spec in enumerate(variables) if spec.kind is VariableKind.PARAMETER]
        self._looks = session.job_settings.nonfinite is not NonFinite.ALLOW
        self._pause = pause
        self._count = 0
        self._in_a_row = 0
        # compiles now, while the servers compile their loops, and not in the first push; replicas look at a mean first
        if self._looks and on_host and not session.job_settings.has_replicas:
            for dtype in sorted({variables[i].dtype.value for i in self._parameters} & set(_NAMES.values())):
                first_not_finite([], [], dtype)

    def counts(
        self,
        name: PushName,
        tensors: Sequence[torch.Tensor | None],
        step: int,
        highest: int,
        rows: Sequence[Rows] = (),
    ) -> bool:
        """Whether work counts with these gradients, one for each variable, computed at `step`, and those of table rows.
        If not, the coordinator has recorded it. `highest`: see StepInput. Raises StaleToken, StraddlingRange, and what
        ends this worker or its job."""
        if not self._looks:
            return True
        found = self._first_not_finite(tensors)
        parameter = None if found is None else self._names[found]
        if parameter is None and rows:
            parameter = self._first_table_not_finite(rows)
        if parameter is None:
            self._in_a_row = 0
            return True
        self._report(name, parameter, step, highest)
        return False

    def first(self, tensors: Sequence[torch.Tensor | None], rows: Sequence[Rows] = ()) -> int | None:
        """The number of the first variable, or behind them table, whose gradient is not finite; None if there is none,
        or nothing is checked. For workers with a part of the gradients each: one of them then calls `counts_with`."""
        if not self._looks:
            return None
        found = self._first_not_finite(tensors)
        if found is None and rows:
            table = self._first_table_not_finite(rows)
            found = None if table is None else len(self._names) + self._tables.index(table)
        return found

    def counts_with(self, name: PushName, first: int | None, step: int, highest: int) -> bool:
        """As `counts`. `first`: what `first` has found, in any worker."""
        if first is None:
            self._in_a_row = 0
            return True
        self._report(name, [*self._names, *self._tables][first], step, highest)
        return False

    def _first_table_not_finite(self, rows: Sequence[Rows]) -> str | None:
        filled = [(table, values) for table, values in rows if values.size]
        arrays = [values for _, values in filled]
        first = first_not_finite([each.ctypes.data for each in arrays], [each.size for each in arrays], "float32")
        return None if first is None else self._tables[filled[first][0]]

    def _first_not_finite(self, tensors: Sequence[torch.Tensor | None]) -> int | None:
        """The index of the first parameter whose gradient has a NaN or an infinity."""
        here: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        away: list[tuple[int, torch.Tensor]] = []
        for index in self._parameters:
            tensor = tensors[index]
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                continue  # its push is refused
            if tensor.device.type == "cpu":
                here.setdefault(tensor.dtype, []).append((index, tensor))
            else:
                away.append((index, tensor.detach()))
        found = [first for dtype, each in here.items() if (first := _first_here(each, dtype)) is not None]
        if away:
            found += _first_away(away)
        return min(found, default=None)

    def _report(self, name: PushName, parameter: str, step: int, highest: int) -> None:
        session = self._session
        self._count += 1
        self._in_a_row += 1
        request = wire.ReportNotFiniteRequest(
            caller=common_messages.caller_to_wire(session.caller),
            source=common_messages.source_to_wire(name.key.source),
            token=name.token,
            first=name.first,
            last=name.last,
            parameter=parameter,
            count=self._count,
            in_a_row=self._in_a_row,
            step=step,
            highest=highest,
        )
        reply = session.ask(methods.REPORT_NOT_FINITE, request)
        with session.wait_registry.over(
            lambda: f"a verdict on {name}, whose gradient is not finite, once the checkpoint is taken"
        ):
            while reply.retry_ms:
                self._pause(min(reply.retry_ms, PAUSE_MS_MAX))
                session.check()
                reply = session.ask(methods.REPORT_NOT_FINITE, request)
        if reply.HasField("failure"):
            error = from_detail(reply.failure)
            session.fail(error)
            raise error
        log.warning("step %d, %s: the gradient of %r is not finite; it does not count", step, name, parameter)


def _first_here(gradients: Sequence[tuple[int, torch.Tensor]], dtype: torch.dtype) -> int | None:
    """The index of the first that is not finite, among gradients of one dtype on the CPU."""
    name = _NAMES.get(dtype)
    if name is None:
        return next((index for index, each in gradients if not each.isfinite().all()), None)
    addresses, lengths, kept = [], [], []
    for _, gradient in gradients:
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
            kept.append(gradient)
        addresses.append(gradient.data_ptr())
        lengths.append(gradient.numel())
    first = first_not_finite(addresses, lengths, name)
    return None if first is None else gradients[first][0]


def _first_away(gradients: Sequence[tuple[int, torch.Tensor]]) -> list[int]:
    """At most one index: the first that is not finite, on other devices. Checks all there at once, and waits once."""
    filled = [(index, each) for index, each in gradients if each.numel()]  # no elements have no largest one
    if not filled:
        return []
    norms = torch._foreach_norm([each for _, each in filled], float("inf"))
    place = filled[0][1].device
    finite = torch.stack([norm.isfinite().to(place) for norm in norms]).tolist()
    return [index for (index, _), each in zip(filled, finite, strict=True) if not each][:1]
