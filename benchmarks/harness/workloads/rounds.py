"""Rounds of push and pull, the same for both sides: fresh gradients into `.grad`, the exchange, the new values checked.

Owns: what is timed and what is checked. Must not know: how a side exchanges.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from harness.workloads import numbers

SAMPLES = 64
"""Elements of each tensor that are looked at after every round; all of them after every measurement."""
COUNTED_ROUNDS = 100


def make_model(tensors: int, elements: int) -> torch.nn.ParameterList:
    values = numbers.first_values(tensors, elements)
    return torch.nn.ParameterList([torch.nn.Parameter(torch.from_numpy(each)) for each in values])


def run_backward(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Runs a backward pass, so that `.grad` has the memory that it has in training."""
    torch.autograd.backward([parameter.sum() for parameter in parameters])


def count_calls(run: Callable[[], None]) -> int:
    """How many Python functions this thread calls while it runs that."""
    count = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


class Rounds:
    """`exchange()` pushes all `.grad` and returns when the parameters hold the new values.

    `alone`: nobody else pushes, so what each round must give is known.
    """

    def __init__(self, model: torch.nn.ParameterList, exchange: Callable[[], None], *, alone: bool) -> None:
        self._parameters = list(model)
        self._exchange = exchange
        self._alone = alone
        tensors, elements = len(self._parameters), self._parameters[0].numel()
        self._first = numbers.first_values(tensors, elements)
        made = numbers.gradients(tensors, elements)
        self._sources = made
        self._fresh = [[torch.from_numpy(each) for each in source] for source in made]
        self._chosen = np.unique(np.linspace(0, elements - 1, min(SAMPLES, elements)).astype(np.int64))
        self._sampled_sources = [[each[self._chosen] for each in source] for source in made]
        self._sampled_first = [each[self._chosen] for each in self._first]
        self._index = torch.from_numpy(self._chosen)
        self._counts = [0] * numbers.SOURCES

    def handlers(self) -> dict[str, Callable[..., Mapping[str, Any]]]:
        return {"measure": self.measure, "check": self.check, "counted": self.counted, "calls": self.calls}

    def measure(self, rounds: int = 0, seconds: float = 0.0) -> dict[str, Any]:
        """So many rounds, or for so long. `seconds` are those of the rounds, without the checks in between;
        `exchange_s` and `cpu_s`, of this process, are without the writing of the gradients, too; `each_s` are the
        exchanges one by one."""
        write_s = cpu_s = 0.0
        each_s: list[float] = []
        until = time.perf_counter() + seconds
        while len(each_s) < rounds if rounds else time.perf_counter() < until:
            number = sum(self._counts) % numbers.SOURCES
            begin = time.perf_counter()
            self._write(number)
            written, cpu_written = time.perf_counter(), time.process_time()
            self._exchange()
            end, cpu_end = time.perf_counter(), time.process_time()
            self._counts[number] += 1
            write_s += written - begin
            cpu_s += cpu_end - cpu_written
            each_s.append(end - written)
            if self._alone:
                self._check_samples()
        exchange_s = sum(each_s)
        return {
            "rounds": len(each_s),
            "seconds": write_s + exchange_s,
            "exchange_s": exchange_s,
            "cpu_s": cpu_s,
            "each_s": each_s,
        }

    def check(self, counts: Sequence[int] | None = None) -> dict[str, Any]:
        """Checks all values after the pushes of all callers (`counts`; by default this side's own)."""
        if counts is not None:
            with torch.no_grad():
                for parameter in self._parameters:
                    assert parameter.grad is not None
                    parameter.grad.zero_()
            self._exchange()
        for index, (parameter, first) in enumerate(zip(self._parameters, self._first, strict=True)):
            sources = [source[index] for source in self._sources]
            wanted = numbers.expected(first, sources, self._counts if counts is None else counts)
            numbers.check(f"tensor {index}", parameter.detach().numpy(), wanted)
        return {}

    def counted(self) -> dict[str, Any]:
        """How many times this side has pushed each of its gradients."""
        return {"counts": self._counts}

    def calls(self) -> dict[str, Any]:
        """How many Python functions this thread calls in an exchange; the median of some."""
        counts: list[int] = []
        for each in range(COUNTED_ROUNDS):
            number = each % numbers.SOURCES
            self._write(number)
            counts.append(count_calls(self._exchange))
            self._counts[number] += 1
        return {"calls": statistics.median(counts)}

    def _write(self, number: int) -> None:
        with torch.no_grad():
            for parameter, source in zip(self._parameters, self._fresh[number], strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(source)

    def _check_samples(self) -> None:
        for index, parameter in enumerate(self._parameters):
            found = parameter.detach()[self._index].numpy()
            sources = [source[index] for source in self._sampled_sources]
            wanted = numbers.expected(self._sampled_first[index], sources, self._counts)
            numbers.check(f"tensor {index}, round {sum(self._counts)}", found, wanted)
