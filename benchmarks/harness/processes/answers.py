"""The measured process's side of its conversation: it reads one JSON object a line and writes one."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[..., Mapping[str, Any]]
PARENT = "BENCHMARK_PID"
PR_SET_PDEATHSIG = 1


def worker_parser() -> argparse.ArgumentParser:
    """The options of a worker in a yard: its number, how many there are, and its settings as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--settings", type=json.loads, default={})
    return parser


def peer_parser() -> argparse.ArgumentParser:
    """The options of a process in a group of torch.distributed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--rendezvous", required=True)
    return parser


class Conversation:
    """With the benchmark that started this process. Make it first of all.

    Standard output belongs to it: what libraries print goes to standard error. The kernel kills this process when the
    benchmark ends, however it ends.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ[PARENT]):
            # it has ended before the kernel was told
            os._exit(1)
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def answer(self, handlers: Mapping[str, Handler]) -> None:
        """Reports that this process is ready, then answers requests until its standard input ends."""
        self._say({"ready": os.getpid()})
        for line in sys.stdin:
            request = json.loads(line)
            self._say(handlers[request.pop("do")](**request))

    def _say(self, message: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()
