"""Announces work at which other workers have died, before it is computed (docs/internals/ledger.md, rule A13).

Owns: the question whether a batch counts, repeated until it is answered. Must not know: datasets, pushes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from shardyard.domain.ids import Token
from shardyard.domain.push_names import LeasedSource
from shardyard.wire import common_messages, methods
from shardyard.wire.v1 import coordinator_pb2 as wire
from shardyard_worker.training.trainer import Trainer

log = logging.getLogger("shardyard.worker")

PAUSE_MS_MAX = 1_000


@dataclass(frozen=True)
class Verdict:
    """`announce_until`: from now on sequences of the source before this one are announced."""

    counts: bool
    announce_until: int


def announce(training: Trainer, source: LeasedSource, token: Token, sequence: int, *, highest: int) -> Verdict:
    """Tells the coordinator which batch is computed next. `highest`: the highest next sequence of the source over all
    partitions, when it was opened under this token, and after this worker's pushes since. Raises StaleToken if another
    worker has the lease, and the job's failure."""
    session = training.session
    request = wire.BeginBatchRequest(
        caller=common_messages.caller_to_wire(session.caller),
        source=common_messages.source_to_wire(source),
        token=token,
        sequence=sequence,
        highest=highest,
    )
    reply = session.ask(methods.BEGIN_BATCH, request)
    with session.wait_registry.over(lambda: f"a verdict on #{sequence} of {source}, once the checkpoint is taken"):
        while reply.retry_ms:
            training.router.pause(min(reply.retry_ms, PAUSE_MS_MAX))
            session.check()
            reply = session.ask(methods.BEGIN_BATCH, request)
    if reply.quarantined:
        log.warning("#%d of %s is in quarantine; it does not count", sequence, source)
    return Verdict(not reply.quarantined, reply.careful_below)
