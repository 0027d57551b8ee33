"""Calls between processes: over gRPC, in process, and through shared memory on one machine.

In: a typed method of shardyard.wire.methods and a request. Out: its reply, or the error that the other side raised.

Read `interfaces` first: `Peer`, `Network`, `Service`. Over gRPC: `grpc_client`, `grpc_server`, `grpc_private` (faster
streams, for the versions of grpcio that were tried). On one machine: `local_socket`, `local_listener`. In process:
`in_process`. Shared: `dispatch` (from bytes to a handler), `error_codes` (errors and statuses), `membership_client`
(registration and heartbeats). Memory: `shared_memory`, `huge_pages`, `stream_copy`.

This file changes two settings of grpc, which must be set before grpc is imported:

- grpc's fork handlers are switched off. A training script forks (DataLoader with num_workers) while channels are
  open; the children never use them, and the handlers can hang such a fork.
- With the versions that were tried, grpc polls in the threads that wait and not in threads of its own. That is faster
  for small exchanges. If the user sets GRPC_EXPERIMENTS, it stays as it is.
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
