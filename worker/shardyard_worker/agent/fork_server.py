"""Imports once what the processes of a launch need, and forks each of them.

    python -u -P -m shardyard_worker.agent.fork_server AGENT_PID SOCKET SCRIPT [ARGUMENT...]

Importing torch and the library takes about six seconds of processor time. Forked processes do not repeat that: a
killed worker trains again after a fraction of a second. A child is a process of its own: it leads its own session, has
its own output pipes and environment, and runs the script by shardyard_worker.agent.bootstrap.

Owns: what is imported before the first fork, and the protocol on the socket, a SOCK_SEQPACKET of the agent. A request
is `{"fork": {VARIABLE: VALUE}}` with two descriptors, for standard output and standard error, or `{"reap": PID}`; each
is answered, in order, by `{"pid": PID}` or `{"exit_code": CODE}`. Invariants: it ends with the agent, and its children
end with it; a child that has ended keeps its process id until the agent asks to reap it; the random numbers of two
children differ as those of two started processes do. Must not know: supervision, gRPC, what a script does.
"""

from __future__ import annotations

import ast
import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from shardyard_worker.agent.bootstrap import die_with_parent, run

MESSAGE_BYTES_MAX: Final = 64 * 1024
TORCH: Final = ("torch", "torch._dynamo")
"""The first optimizer of torch imports torch._dynamo."""
LIBRARY: Final = (*TORCH, "shardyard_worker.job.connect")
IMPORTED_FIRST: Final = {"torch": TORCH, "shardyard": LIBRARY}
"""By the package that a script imports."""


def modules_to_import(script: Path) -> tuple[str, ...]:
    """What is imported before the first fork: nothing for a script that imports neither torch nor shardyard. A script
    that cannot be read says so itself when it runs."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    return max((IMPORTED_FIRST[name] for name in names if name in IMPORTED_FIRST), key=len, default=())


def prepare(modules: Sequence[str]) -> None:
    """Imports the modules as far as they can be: a script that needs the rest fails with its own error."""
    for name in modules:
        with suppress(Exception):
            importlib.import_module(name)
    if modules is LIBRARY:
        from shardyard.codecs.format import finiteness

        finiteness.warm()
    # a collection in a child that looked at these objects would copy their pages
    gc.collect()
    gc.freeze()


def serve(requests: socket.socket) -> dict[str, str]:
    """Answers requests. Returns only in each child, with its environment variables; ends when the agent has closed the
    socket."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MESSAGE_BYTES_MAX, 2)
        if not message:
            sys.exit()
        asked = json.loads(message)
        if "reap" in asked:
            _, status = os.waitpid(asked["reap"], 0)
            requests.send(json.dumps({"exit_code": os.waitstatus_to_exitcode(status)}).encode())
            continue
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            requests.close()
            _become_process(parent, descriptors)
            environment: dict[str, str] = asked["fork"]
            return environment
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(json.dumps({"pid": pid}).encode())


def _become_process(parent: int, output: Sequence[int]) -> None:
    """What starting a program would have done."""
    os.setsid()
    die_with_parent(parent, signal.SIGKILL)
    for standard, descriptor in enumerate(output, start=1):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    # `random` does this by itself
    if "numpy.random" in sys.modules:
        import numpy as np

        np.random.seed()


def main() -> None:
    agent, descriptor, script = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die_with_parent(agent, signal.SIGKILL)
    with socket.socket(fileno=descriptor) as requests:
        prepare(modules_to_import(Path(script)))
        environment = serve(requests)
    os.environ.update(environment)
    run(script, sys.argv[4:])


if __name__ == "__main__":
    main()
