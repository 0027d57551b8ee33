"""Channels and servers, the table of errors and statuses, shared memory, and the in-process network.

What must be settled before grpc is imported is settled here.

- grpc's fork handlers are switched off: a training script forks (DataLoader with num_workers) while channels are open,
  the children never use them, and the handlers can hang such a fork.
- With the versions that were tried, grpc polls in the threads that wait, not in threads of its own, which is faster for
  small exchanges. A GRPC_EXPERIMENTS of the user's own is left alone.
"""

import os
from importlib.metadata import version

TRIED_VERSIONS = frozenset({(1, 85)})
"""Versions of grpcio with which its private layer was tried: major, minor. constraints.txt pins one of them."""
TRIED = tuple(int(part) for part in version("grpcio").split(".")[:2]) in TRIED_VERSIONS
"""Whether this version of grpcio is one with which its private layer was tried (shardyard.transport.grpc_private)."""

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
if TRIED:
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
