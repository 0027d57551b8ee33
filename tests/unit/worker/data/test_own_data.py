"""Steps on data that a script reads by itself: samples of forwards, and loaders that all workers read alike."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from shardyard_worker.data.own_data import ForwardSamples, OwnData

DATA = TensorDataset(torch.arange(8))


class Takes(torch.nn.Module):
    def forward(self, *given: Any, **named: Any) -> None: ...


def counted(*given: Any, **named: Any) -> int:
    model = Takes()
    samples = ForwardSamples(model)
    model(*given, **named)
    return samples.take()


def test_samples_are_the_length_of_the_first_tensor() -> None:
    assert counted(torch.zeros(5, 2), torch.zeros(3)) == 5
    assert counted("text", {"ids": [torch.zeros(4, 7)]}) == 4
    assert counted(mask=None, ids=torch.zeros(6)) == 6
    assert counted(torch.tensor(2.0), torch.zeros(3)) == 3
    assert counted() == 0
    assert counted(7) == 0


def test_forwards_are_added_up_until_they_are_taken() -> None:
    model = Takes()
    samples = ForwardSamples(model)
    model(torch.zeros(5))
    model(torch.zeros(3))
    assert (samples.take(), samples.take()) == (8, 0)


def test_evaluation_counts_nothing() -> None:
    model = Takes()
    samples = ForwardSamples(model)
    with torch.no_grad():
        model(torch.zeros(5))
    model.eval()
    model(torch.zeros(5))
    assert samples.take() == 0
    model.train()
    samples.close()
    model(torch.zeros(5))
    assert samples.take() == 0


def test_compiled_model_is_traced_without_the_count() -> None:
    model = torch.nn.Linear(2, 1)
    samples = ForwardSamples(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in (3, 4):
        compiled(torch.zeros(length, 2))
    assert samples.take() == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_model_is_taken_without_the_count() -> None:
    model = torch.jit.script(torch.nn.Linear(2, 1))
    samples = ForwardSamples(model)
    model(torch.zeros(3, 2))
    assert samples.take() == 0
    samples.close()


def warned(caplog: pytest.LogCaptureFixture, data: OwnData | None = None) -> int:
    caplog.clear()
    (data or OwnData()).look()
    return sum("not leased" in record.getMessage() for record in caplog.records)


def test_loader_that_is_being_read_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    loader = DataLoader(DATA, batch_size=2, shuffle=True)
    assert warned(caplog) == 0  # not yet
    reading, data = iter(loader), OwnData()
    next(reading)
    assert warned(caplog, data) == 1
    assert "job.batches(loader)" in caplog.text
    assert warned(caplog, data) == 0
    divided = OwnData()
    divided.is_divided = True
    assert warned(caplog, divided) == 0
    del reading
    assert warned(caplog) == 0


def test_loader_with_a_part_for_each_worker_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    sampler: Any = DistributedSampler(DATA, num_replicas=2, rank=1)
    reading = iter(DataLoader(DATA, batch_size=2, sampler=sampler))
    next(reading)
    assert warned(caplog) == 0
