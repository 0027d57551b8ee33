"""Runs a role, or a script, whose wall clock jumps: by up to a day, to and fro, several times a second.

    python jumping.py server --coordinator ...      as `shardyard server --coordinator ...`
    python jumping.py SCRIPT.py ARGUMENTS...

Shardyard's own modules read a clock that jumps; gRPC's keep theirs, with the one that hands it times of day, since its
core, in C, reads the system's: the two would disagree for ever, where after a real jump they agree again at once. So do
certificates and passes (shardyard.security, shardyard.transport.tls), whose times TLS compares with the system's clock.
"""

import builtins
import datetime
import random
import runpy
import sys
import time
import types
from collections.abc import Callable
from typing import Any

HANDS_TIMES_TO_GRPC = "shardyard.transport.grpc_client"
COMPARED_BY_TLS = ("shardyard.security.", "shardyard.transport.tls")
JUMP_S = 86_400
EVERY_S = 0.2
JUMPS = random.Random()


def jump() -> float:
    """By how much the clock is wrong now."""
    JUMPS.seed(int(time.monotonic() / EVERY_S))
    return JUMPS.uniform(-JUMP_S, JUMP_S)


class JumpingDatetime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "JumpingDatetime":
        return cls.fromtimestamp(time.time() + jump(), tz)


def jumping(module: types.ModuleType, **replaced: object) -> types.ModuleType:
    copy = types.ModuleType(module.__name__)
    copy.__dict__.update({**module.__dict__, **replaced})
    return copy


JUMPING = {
    "time": jumping(time, time=lambda: time.time() + jump(), time_ns=lambda: time.time_ns() + int(jump() * 1e9)),
    "datetime": jumping(datetime, datetime=JumpingDatetime),
}


def patched(plain: Callable[..., Any]) -> Callable[..., Any]:
    def import_(name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        asking = str((globals_ or {}).get("__name__", ""))
        keeps = asking == HANDS_TIMES_TO_GRPC or asking.startswith(COMPARED_BY_TLS)
        if asking.startswith("shardyard") and not keeps and level == 0 and name in JUMPING:
            return JUMPING[name]
        return plain(name, globals_, locals_, fromlist, level)

    return import_


if __name__ == "__main__":
    builtins.__import__ = patched(builtins.__import__)
    if sys.argv[1].endswith(".py"):
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        from shardyard_launcher.cli import main

        sys.argv[0] = "shardyard"
        main()
