"""The loops of dense optimizers, when a server starts: read from disk, or compiled, which is done once on a machine.

    python -m shardyard_ps_server.jit.optimizer_warmup     compiles them to disk, where they are not there yet

A compiler needs half a minute and more for all of them, so servers that start together leave it to one of them. Owns:
nothing. Must not know: what the loops do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from shardyard.runtime.waits import WaitRegistry
from shardyard_ps_server.jit import cache
from shardyard_ps_server.values import kernels, optimizers

log = logging.getLogger("shardyard.server")

KIND: Final = "optimizer_loops"
COMPILES: Final = "compiles loops of optimizers, once on a machine"
"""What a server does meanwhile, for after its name,"""
COMPILES_ALWAYS: Final = "compiles loops of optimizers, since no folder for them can be written (NUMBA_CACHE_DIR)"
"""and where it does so at each start."""


def load_optimizer_loops(wait_registry: WaitRegistry, tell: Callable[[str], None], stop: threading.Event) -> None:
    """All loops are there when it returns, unless `stop` is set meanwhile, which is heard of while another process
    compiles. `tell` hears why it takes long, if it does."""
    folder = cache.folder_of(kernels.mean)
    if folder is None:
        tell(COMPILES_ALWAYS)
    elif not cache.is_marked(folder, KIND):
        tell(COMPILES)
        with wait_registry.over(lambda: f"loops of optimizers to be compiled to {folder}, once on a machine"):
            try:
                cache.once(folder, KIND, _warm, stop)
            except OSError as error:
                log.warning("compiled loops cannot be kept in %s (%s)", folder, error)
    if not stop.is_set():
        _warm()


def _warm() -> None:
    optimizers.warm(("float32", "float64"))


def main() -> None:
    """Raises OSError."""
    folder = cache.folder_of(kernels.mean)
    if folder is None:
        raise SystemExit("no folder for compiled loops can be written")
    cache.once(folder, KIND, _warm, threading.Event())


if __name__ == "__main__":
    main()
