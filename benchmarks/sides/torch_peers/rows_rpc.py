"""An embedding table in a process of torch.distributed.rpc: rank 0 is the server, the other one the worker."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator

import torch
from torch.distributed import rpc

from harness.processes.answers import Conversation, peer_parser
from harness.workloads.rows import EPS, LR, Loop, Task
from sides.torch_peers import rpc_store

FORMS = ("two", "two-distinct", "one", "one-distinct", "window-distinct")
_lock = threading.Lock()
_held: list[tuple[torch.nn.Embedding, torch.optim.Adagrad]] = []


def hold(task: Task) -> None:
    """The server's state: torch's embedding and its sparse Adagrad."""
    embedding = torch.nn.Embedding.from_pretrained(task.first_rows(), freeze=False, sparse=True)
    _held[:] = [(embedding, torch.optim.Adagrad(embedding.parameters(), lr=LR, eps=EPS))]


def look_up(ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return _held[0][0](ids)


def push(ids: torch.Tensor, gradients: torch.Tensor, *, coalesced: bool) -> None:
    embedding, optimizer = _held[0]
    size = embedding.weight.shape
    with _lock:
        embedding.weight.grad = torch.sparse_coo_tensor(ids[None], gradients, size, is_coalesced=coalesced)
        optimizer.step()


def push_look_up(ids: torch.Tensor, gradients: torch.Tensor, wanted: torch.Tensor, *, coalesced: bool) -> torch.Tensor:
    push(ids, gradients, coalesced=coalesced)
    return look_up(wanted)


class Worker:
    """In one of several forms. two: a call for the look-up, and one for the push; one: the push brings the next rows.
    window: as one, of the batch after the next, while the next one is computed. distinct: each id is sent once, with
    the sum of its gradients."""

    def __init__(self, task: Task, form: str) -> None:
        self._targets = task.targets()
        self._one, self._distinct = form.startswith("one"), form.endswith("distinct")
        self._window = form.startswith("window")

    def run(self, batches: Iterator[torch.Tensor]) -> None:
        if self._window:
            self._run_in_window(batches)
        else:
            self._run(batches)

    def _run_in_window(self, batches: Iterator[torch.Tensor]) -> None:
        known = [self._sent(ids) for ids in itertools.islice(batches, 2)]
        rows = [rpc.rpc_sync(rpc_store.SERVER, look_up, (sent,)) for sent, _ in known]
        flight: torch.futures.Future[torch.Tensor] | None = None
        while known:
            (sent, places), had = known.pop(0), rows.pop(0)
            gradients = self._gradients(had, places)
            known += [self._sent(ids) for ids in itertools.islice(batches, 1)]
            if flight is not None:
                rows.append(flight.wait())
            wanted = known[-1][0] if len(known) == 2 else sent[:0]
            arguments = (sent, gradients, wanted)
            flight = rpc.rpc_async(rpc_store.SERVER, push_look_up, arguments, {"coalesced": self._distinct})
        if flight is not None:
            flight.wait()

    def _run(self, batches: Iterator[torch.Tensor]) -> None:
        ids = next(batches, None)
        sent, places = self._sent(ids)
        rows = rpc.rpc_sync(rpc_store.SERVER, look_up, (sent,)) if self._one and ids is not None else None
        options = {"coalesced": self._distinct}
        while ids is not None:
            if rows is None:
                rows = rpc.rpc_sync(rpc_store.SERVER, look_up, (sent,))
            gradients = self._gradients(rows, places)
            ids = next(batches, None)
            wanted, places = self._sent(ids)
            if self._one and ids is not None:
                rows = rpc.rpc_sync(rpc_store.SERVER, push_look_up, (sent, gradients, wanted), options)
            else:
                rpc.rpc_sync(rpc_store.SERVER, push, (sent, gradients), options)
                rows = None
            sent = wanted

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = rpc.rpc_sync(rpc_store.SERVER, look_up, (ids,))
        return found

    def _sent(self, ids: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if ids is None or not self._distinct:
            return ids, None
        return torch.unique(ids, return_inverse=True)

    def _gradients(self, rows: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        """The gradient of half the square distance to the targets, computed by hand instead of by autograd."""
        if places is None:
            return rows - self._targets
        return torch.zeros_like(rows).index_add_(0, places, rows.index_select(0, places) - self._targets)


def main() -> None:
    conversation = Conversation()
    parser = peer_parser()
    Task.add_options(parser)
    parser.add_argument("--transport", choices=["default", "tcp"], default="default")
    parser.add_argument("--form", choices=FORMS, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    name = rpc_store.SERVER if options.rank == 0 else f"worker{options.rank}"
    rpc_store.join(name, options.rank, options.world, options.rendezvous, options.transport, 1)
    task = Task.of(options)
    if options.rank == 0:
        hold(task)
        conversation.answer({})
        return
    worker = Worker(task, options.form)
    conversation.answer(Loop(task, worker.run, worker.read).handlers())


if __name__ == "__main__":
    main()
    # no graceful shutdown: all processes end at the same time
    os._exit(0)
