"""Steps with a table, as they are measured: both sides take the same ones, and a lost push is found. No timing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from harness.machine import slow_network  # noqa: E402
from harness.workloads import rows  # noqa: E402
from sides.torch_peers import rows_rpc  # noqa: E402

sys.path.remove(str(BENCHMARKS))

import shardyard as sy  # noqa: E402
from shardyard.transport.interfaces import LocalAddress  # noqa: E402

TASK = rows.Task(rows=500, dim=4, ids=60)


def ours(lost: int = -1) -> rows.Loop:
    """Without a job. Step number `lost` is not taken."""
    model = sy.Embedding(TASK.dim, optimizer=sy.tables.Adagrad(lr=rows.LR, eps=rows.EPS))
    model.table.load(TASK.first_rows())
    optimizer = sy.tables.Optimizer(model)

    def run(batches: Iterator[torch.Tensor]) -> None:
        for number, ids in enumerate(batches):
            optimizer.zero_grad()
            found = model(ids)
            torch.autograd.backward(found, found.detach() - TASK.targets())
            if number != lost:
                optimizer.step()

    return rows.Loop(TASK, run, lambda ids: model(ids).detach())


def test_our_rows_are_those_of_the_plain_model_and_a_lost_push_is_found(tmp_path: Path) -> None:
    ours().verify(4, str(tmp_path))
    rows.check(TASK, 4, tmp_path)
    with pytest.raises(rows.RowsDiffer, match="of shape"):
        rows.check(TASK, 3, tmp_path)
    ours(lost=2).verify(4, str(tmp_path))
    with pytest.raises(rows.RowsDiffer, match="rows are off"):
        rows.check(TASK, 4, tmp_path)


def test_in_a_window_each_row_of_the_second_batch_may_lack_the_first_push_and_no_other(tmp_path: Path) -> None:
    """A look-up beside a push meets some of its rows before they change, and some after."""
    lack = rows.trained(TASK, 4, frozenset({1, 2, 3}))
    have = rows.trained(TASK, 4, frozenset({2, 3}))
    assert not np.allclose(lack, have, atol=1e-3)
    mixed = np.where(np.arange(len(lack))[:, None] % 3, lack, have)
    np.save(tmp_path / rows.FILE, mixed)
    rows.check(TASK, 4, tmp_path, window=True)
    mixed[7, 3] += 0.01
    np.save(tmp_path / rows.FILE, mixed)
    with pytest.raises(rows.RowsDiffer, match=f"1 of {len(mixed)} rows are off"):
        rows.check(TASK, 4, tmp_path, window=True)
    np.save(tmp_path / rows.FILE, mixed[1:])
    with pytest.raises(rows.RowsDiffer, match="of shape"):
        rows.check(TASK, 4, tmp_path, window=True)


@pytest.mark.parametrize("form", rows_rpc.FORMS)
def test_the_peers_rows_are_those_of_the_plain_model_in_each_form(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str
) -> None:
    def call(to: str, function: Any, arguments: tuple[Any, ...], options: dict[str, Any] | None = None) -> Any:
        return function(*arguments, **(options or {}))

    def begin(*given: Any) -> torch.futures.Future[Any]:
        flight: torch.futures.Future[Any] = torch.futures.Future()
        flight.set_result(call(*given))
        return flight

    monkeypatch.setattr(rows_rpc.rpc, "rpc_sync", call)
    monkeypatch.setattr(rows_rpc.rpc, "rpc_async", begin)
    rows_rpc.hold(TASK)
    worker = rows_rpc.Worker(TASK, form)
    loop = rows.Loop(TASK, worker.run, worker.read)
    loop.verify(4, str(tmp_path))
    lacks = form.startswith("window")
    rows.check(TASK, 4, tmp_path, window=lacks)
    with pytest.raises(rows.RowsDiffer, match="rows are off"):
        rows.check(TASK, 4, tmp_path, window=not lacks)
    assert loop.train(0.0)["steps"] == 0


def test_batches_are_frequent_rows_most_of_the_time() -> None:
    drawn = torch.cat(TASK.batches())
    counts = torch.bincount(drawn, minlength=TASK.rows).sort(descending=True).values
    assert counts.sum() == rows.BATCHES * TASK.ids
    # Zipf(1.1) over 500: the most frequent row has a share of 1 / sum(k**-1.1)
    share = 1 / float((np.arange(1, TASK.rows + 1) ** -1.1).sum())
    assert float(counts[0] / counts.sum()) == pytest.approx(share, rel=0.1)


def test_servers_alone_are_slow_and_answer_what_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(slow_network.time, "sleep", slept.append)

    class Inner:
        name = "inner"

        def call(self, method: Any, request: Any, *, timeout_ms: int) -> Any:
            return request + 1

        send = receive = exchange = call

        def open(self, method: Any, *, timeout_ms: int, socket: LocalAddress | None = None) -> Any:
            return type("Stream", (), {"receive": lambda self, *, timeout_ms: 7, "descriptors": socket})()

        def close(self) -> None:
            pass

    network = slow_network.SlowNetwork(type("N", (), {"connect": lambda *_, **__: Inner()})(), 0.005)
    slow, quick = network.connect("h:1", name="server 3"), network.connect("h:2", name="coordinator")
    assert [peer.call(None, 4, timeout_ms=1) for peer in (slow, quick)] == [5, 5]
    assert slept == [0.005]
    slow.send(None, 4, timeout_ms=1)
    stream = slow.open(None, timeout_ms=1, socket=LocalAddress("@there"))
    assert stream.receive(timeout_ms=1) == 7
    assert stream.descriptors == LocalAddress("@there")
    assert len(slept) == 3
