"""The peer's server: tensors in a process of torch.distributed.rpc, changed under a lock.

Its functions are called by name, on this module's state: the shortest way that torch.distributed.rpc has (an RRef would
cost a look-up a call more).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import rpc

SERVER = "server"
CALL_S_MAX = 60.0
_lock = threading.Lock()
_tensors: list[torch.Tensor] = []
_lr = 0.0


def join(name: str, rank: int, world: int, rendezvous: str, transport: str, threads: int) -> None:
    """`rendezvous`: a file in a new folder; no port is chosen here. `transport`: default (shared memory and
    cross-memory attach between processes of one host), or tcp."""
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    forced: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]} if transport == "tcp" else {}
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{rendezvous}", rpc_timeout=CALL_S_MAX, num_worker_threads=threads, **forced
    )
    init: Callable[..., None] = rpc.init_rpc
    init(name, rank=rank, world_size=world, rpc_backend_options=options)


def hold(tensors: Sequence[torch.Tensor], lr: float) -> None:
    """The server's first values."""
    global _lr
    _tensors[:] = [tensor.clone() for tensor in tensors]
    _lr = lr


def push_pull(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with _lock:
        for tensor, gradient in zip(_tensors, gradients, strict=True):
            tensor.sub_(gradient, alpha=_lr)
    return _tensors


def push_pull_one(index: int, gradient: torch.Tensor) -> torch.Tensor:
    with _lock:
        _tensors[index].sub_(gradient, alpha=_lr)
    return _tensors[index]
