"""The same inputs over TLS: each method of each service is called as each role, and without a certificate.

What must hold for each call: it is answered, or refused with a status and an error of ours; nothing is logged as a
defect. Afterwards the same process answers an honest call as it did before. Without a certificate nothing is answered.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final

import grpc

from shardyard.domain.consistency import UpdateMode
from shardyard.domain.ids import Incarnation, JobId
from shardyard.security.door import Door
from shardyard.security.identity import Role
from shardyard.security.passes import JobPass, Speaker
from shardyard.transport.error_codes import DETAIL_KEY
from shardyard.wire.method import Method
from tests.fuzz.fuzzing import Finding, in_quiet, short_waits
from tests.fuzz.mutations import mutate_stream
from tests.fuzz.worlds import AgentWorld, CoordinatorWorld, Sent, ServerWorld, World, _Noise
from tests.support import shop
from tests.support.identities import Identities, raw_channel

CALL_S: Final = 10.0
ANSWERS_MAX: Final = 100
"""Answers of one call that are read. Some calls go on for as long as their caller likes."""
ROLES: Final = [role for role in Role if role is not Role.INVITED]
REFUSED: Final = grpc.StatusCode.UNAVAILABLE


class PassedDoor(Door):
    """Whoever is admitted has a pass for the job of the worlds, so that requests get further than that."""

    def admit(self, method: Method[Any, Any], connection: Mapping[str, Iterable[bytes]], shown: bytes = b"") -> Speaker:
        found = super().admit(method, connection)
        held = JobPass(JobId(shop.JOB), Incarnation(shop.WORKER), found.identity.holder, 0)
        return replace(found, job_pass=held)


def fuzz_over_the_wire(inputs: int, *, seed: int, folder: Path) -> Counter[grpc.StatusCode]:
    """How many calls ended with each status. Raises Finding."""
    identities = Identities(folder / "identities")
    makers: dict[Role, Callable[[], World]] = {
        Role.SERVER: lambda: ServerWorld(UpdateMode.ASYNC, tables=True),
        Role.COORDINATOR: lambda: CoordinatorWorld(UpdateMode.ASYNC),
        Role.AGENT: lambda: AgentWorld(folder),
    }
    found: Counter[grpc.StatusCode] = Counter()
    with in_quiet():
        for serving, make in makers.items():
            world = make()
            try:
                with short_waits(), identities.serving(world.service, serving, PassedDoor()) as address:
                    share = inputs / len(makers)
                    found += _attack(world, address, serving, identities, share, seed)
            finally:
                world.close()
    return found


def _attack(
    world: World, address: str, serving: Role, identities: Identities, inputs: float, seed: int
) -> Counter[grpc.StatusCode]:
    found: Counter[grpc.StatusCode] = Counter()
    handled = sorted(world.service.handlers, key=lambda method: method.name)
    each = math.ceil(inputs / len(handled) / len(ROLES))
    noise = _Noise()
    logging.getLogger("shardyard.serving").addHandler(noise)
    try:
        for role in ROLES:
            with raw_channel(address, serving.value, identities.of(role)) as channel:
                for method in handled:
                    calls, dice = world.calls[method.name], Random(f"{seed} {role} {method.name}")
                    honest = partial(_say, channel, method, calls[0])
                    before = honest()
                    for _ in range(each):
                        sent = tuple(mutate_stream(dice, dice.choice(calls), calls))
                        found[_say(channel, method, sent)] += 1
                        world.settle()
                        if noise.records:
                            raise Finding(f"{method.path} as {role}: {noise.records}; input {_shown(sent)}")
                    if (before is grpc.StatusCode.PERMISSION_DENIED) != (honest() is grpc.StatusCode.PERMISSION_DENIED):
                        raise Finding(f"{method.path} as {role}: refused before or after, and not both times")
        authorities = identities.of(Role.WORKER).pem.authorities
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(authorities)) as channel:
            for method in handled:
                status = _say(channel, method, world.calls[method.name][0])
                if status is not REFUSED:
                    raise Finding(f"{method.path} without a certificate: {status}")
    finally:
        logging.getLogger("shardyard.serving").removeHandler(noise)
    return found


def _say(channel: grpc.Channel, method: Method[Any, Any], sent: Sent) -> grpc.StatusCode:
    """The status with which a call ends. Raises Finding if it is not one of ours."""
    given = sent if method.streams_in else sent[:1]
    try:
        answers: Iterator[bytes] = channel.stream_stream(method.path)(iter(given), timeout=CALL_S)
        list(islice(answers, ANSWERS_MAX))
    except grpc.RpcError as error:
        status: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
        ours = any(key == DETAIL_KEY for key, _ in error.trailing_metadata() or ())  # type: ignore[attr-defined]
        if status is grpc.StatusCode.INTERNAL or status is grpc.StatusCode.UNKNOWN or not (ours or status is REFUSED):
            raise Finding(f"{method.path}: {status}, {error.details()}; input {_shown(sent)}") from error  # type: ignore[attr-defined]
        return status
    return grpc.StatusCode.OK


def _shown(sent: Sent) -> list[str]:
    return [each.hex() for each in sent]
