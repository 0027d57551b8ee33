"""Calls between processes: over gRPC, in process, and through shared memory on one machine.

In: a typed method of shardyard.wire.methods and a request. Out: its reply, or the error that the other side raised.

Read `interfaces` first: `Peer`, `Network`, `Service`. Over gRPC: `grpc_client`, `grpc_server`, `grpc_private` (faster
streams, for the versions of grpcio that were tried). On one machine: `local_socket`, `local_listener`. In process:
`in_process`. Shared: `dispatch` (from bytes to a handler), `error_codes` (errors and statuses), `membership_client`
(registration and heartbeats). Memory: `shared_memory`, `huge_pages`, `stream_copy`.

This file changes settings of grpc, which must be set before grpc is imported:

- grpc's fork handlers are switched off. A training script forks (DataLoader with num_workers) while channels are
  open; the children never use them, and the handlers can hang such a fork.
- grpc prints a line for each connection that is refused, which whoever reaches a port could repeat for ever. If the
  user sets GRPC_VERBOSITY, it stays as it is.
- With the versions that were tried, grpc polls in the threads that wait and not in threads of its own. That is faster
  for small exchanges. If the user sets GRPC_EXPERIMENTS, it stays as it is.
"""

import os
from importlib.metadata import version

TRIED_VERSIONS = frozenset({(1, 85)})
"""Versions of grpcio with which its private layer was tried: major, minor. constraints.txt pins one of them."""
TRIED = tuple(int(part) for part in version("grpcio").split(".")[:2]) in TRIED_VERSIONS
"""Whether this version of grpcio is one with which its private layer was tried (shardyard.transport.grpc_private)."""

_CIPHERS = "GRPC_SSL_CIPHER_SUITES"
_NONE_OF_TLS_12 = "ECDHE-PSK-AES128-CBC-SHA"


def refuse_tls_12() -> None:
    """From now on this process speaks TLS 1.3 only. grpc has no setting for it; but its list of cipher suites is for
    TLS 1.2 alone, so this names one that needs a shared password, which nobody has. grpc reads the list when it is
    imported, which this does; what this process starts does not inherit it."""
    given = os.environ.get(_CIPHERS)
    os.environ[_CIPHERS] = _NONE_OF_TLS_12
    import grpc  # noqa: F401

    if given is None:
        del os.environ[_CIPHERS]
    else:
        os.environ[_CIPHERS] = given


os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
if TRIED:
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
