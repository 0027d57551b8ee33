"""The byte fuzzer: `python -m tests.fuzz.fuzzing --inputs 100000` (`make fuzz`); tests/fuzz/test_fuzz.py runs a part. A
quarter more goes over TLS, as each role (tests/fuzz/over_the_wire.py).

Inputs are shared out evenly among all decoders and all methods of all services. What must hold for each: it is taken,
or refused by one of our errors; what is refused has changed nothing; it takes no more memory than MEMORY_BYTES_MAX. A
finding prints the seed, the target and the input in hexadecimal; `--seed N --only TARGET` goes the same way again.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Final
from unittest import mock

from shardyard.domain import limits
from shardyard.domain.consistency import UpdateMode
from shardyard.transport import grpc_server
from tests.fuzz.decoders import Decoder, decoders, feed
from tests.fuzz.mutations import mutate_stream
from tests.fuzz.worlds import AgentWorld, CoordinatorWorld, Sent, ServerWorld, World, call

SEED: Final = 20_261_121
MEMORY_BYTES_MAX: Final = 96 * limits.MIB
"""What one input may make this process ask for, whatever lengths it claims."""
ANSWERED_MAX: Final = 40
"""After so many calls that were answered a world is made anew: they have changed it."""
WAIT_MS: Final = 5
"""In place of the limits of what a caller may have a server wait for."""


class Finding(AssertionError):
    """An input that did what none may."""


@dataclass
class Counted:
    """Of one target."""

    taken: int = 0
    refused: int = 0
    memory_bytes: int = 0


@dataclass
class Report:
    seed: int
    targets: dict[str, Counted] = field(default_factory=dict)

    @property
    def inputs(self) -> int:
        return sum(each.taken + each.refused for each in self.targets.values())

    def lines(self) -> Iterator[str]:
        yield f"seed {self.seed}: {self.inputs} inputs"
        for name, each in self.targets.items():
            yield f"  {name:<52} taken {each.taken:>6}  refused {each.refused:>6}  memory {each.memory_bytes:>11,}"


Target = tuple[str, float, Callable[[Random, int, Counted], None]]
"""A name, its share of the inputs, and what gives it so many."""


@contextlib.contextmanager
def in_quiet() -> Iterator[None]:
    """What is refused is no news."""
    log = logging.getLogger("shardyard")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def short_waits() -> Iterator[None]:
    """Malformed messages are all refused at once, too."""
    with contextlib.ExitStack() as patched:
        for name in ("PULL_WAIT_MS_MAX", "CHECKPOINT_WAIT_MS_MAX"):
            patched.enter_context(mock.patch.object(limits, name, WAIT_MS))
        patched.enter_context(mock.patch.object(grpc_server, "MALFORMED_PER_S", 1 << 20))
        yield


def targets(folder: Path) -> Iterator[Target]:
    for decoder in decoders(folder):
        yield (
            decoder.name,
            decoder.share,
            lambda dice, inputs, counted, decoder=decoder: _decode(decoder, dice, inputs, counted),
        )
    makers: dict[str, Callable[[], World]] = {
        "server, asynchronous": lambda: ServerWorld(UpdateMode.ASYNC),
        "server, synchronous": lambda: ServerWorld(UpdateMode.SYNC),
        "server, tables": lambda: ServerWorld(UpdateMode.ASYNC, tables=True),
        "server, synchronous tables": lambda: ServerWorld(UpdateMode.SYNC, tables=True),
        "coordinator, asynchronous": lambda: CoordinatorWorld(UpdateMode.ASYNC),
        "coordinator, synchronous": lambda: CoordinatorWorld(UpdateMode.SYNC),
        "coordinator, replicas": lambda: CoordinatorWorld(UpdateMode.SYNC, mirrored=True),
        "agent": lambda: AgentWorld(folder),
    }
    for title, make in makers.items():
        world = make()
        names = sorted(method.name for method in world.service.handlers)
        world.close()
        for name in names:
            yield (
                f"{title}: {name}",
                1.0,
                partial(_say, make, name),
            )


def _decode(decoder: Decoder, dice: Random, inputs: int, counted: Counted) -> None:
    for _ in range(inputs):
        data = decoder.change(dice, dice.choice(decoder.seeds), decoder.seeds)
        with _watched(data, counted):
            taken = feed(decoder, data)
        counted.taken += taken
        counted.refused += not taken


def _say(make: Callable[[], World], name: str, dice: Random, inputs: int, counted: Counted) -> None:
    left = inputs
    while left > 0:
        world = make()
        try:
            left -= _say_to(world, name, dice, left, counted)
        finally:
            world.close()


def _say_to(world: World, name: str, dice: Random, inputs: int, counted: Counted) -> int:
    """Until it has answered often enough. How many inputs it had."""
    calls = world.calls[name]
    (streams,) = (method.streams_in for method in world.service.handlers if method.name == name)
    answered = 0
    before = world.state()
    for number in range(1, inputs + 1):
        sent: Sent = tuple(mutate_stream(dice, dice.choice(calls), calls))
        with _watched(sent, counted):
            found = call(world.service, name, sent if streams else sent[:1])
            changed = world.state()
            if found.refused is not None and not found.answers and changed != before:
                raise AssertionError(f"refused by {found.refused!r}, and has changed {before!r} to {changed!r}")
        counted.taken += found.refused is None
        counted.refused += found.refused is not None
        answered += changed != before
        before = world.state() if world.settle() else changed
        if answered >= ANSWERED_MAX:
            return number
    return inputs


@contextlib.contextmanager
def _watched(data: object, counted: Counted) -> Iterator[None]:
    """Names the input where it does what it may not; and holds the memory that it takes against the bound."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield
        asked = tracemalloc.get_traced_memory()[1] - before
        counted.memory_bytes = max(counted.memory_bytes, asked)
        assert asked <= MEMORY_BYTES_MAX, f"took {asked} bytes of memory; at most {MEMORY_BYTES_MAX}"
    except Exception as error:
        shown = data.hex() if isinstance(data, bytes) else [each.hex() for each in data]  # type: ignore[attr-defined]
        raise Finding(f"{type(error).__name__}: {error}; input {shown}") from error


def fuzz(inputs: int, *, seed: int, folder: Path, only: str = "", say: Callable[[str], object] = print) -> Report:
    """Raises Finding."""
    say(f"seed {seed}")
    report = Report(seed)
    with short_waits(), in_quiet():
        chosen = [target for target in targets(folder) if only in target[0]]
        assert chosen, f"no target is called {only!r}"
        shares = sum(share for _, share, _ in chosen)
        tracemalloc.start(1)
        try:
            for name, share, run in chosen:
                counted = report.targets[name] = Counted()
                try:
                    run(Random(f"{seed} {name}"), math.ceil(inputs * share / shares), counted)
                except Finding as finding:
                    raise Finding(f"seed {seed}, target {name!r}: {finding}") from finding.__cause__
        finally:
            tracemalloc.stop()
    return report


def main() -> int:
    from tests.fuzz.over_the_wire import fuzz_over_the_wire

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", default="", help="targets whose name has this in it")
    given = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardyard-fuzz-") as name:
        # a URL for checkpoints that has changed may be a relative path
        os.chdir(name)
        report = fuzz(given.inputs, seed=given.seed, folder=Path(name), only=given.only)
        statuses = {} if given.only else fuzz_over_the_wire(given.inputs // 4, seed=given.seed, folder=Path(name))
        os.chdir("/")
    for line in report.lines():
        print(line)
    print(f"over the wire: {statuses or 'nothing'}")
    print(f"nothing was found, in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
