"""Calls to all servers of a job at once, with retries.

Owns: retries, and the meaning of errors. Invariants: a request that is sent again has the same name; every wait
explains itself; no call waits under an old map: `check` raises MapChanged. Must not know: what is asked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from shardyard.domain import errors
from shardyard.domain.ids import Incarnation
from shardyard.domain.layout.layouts import PartitionMap
from shardyard.domain.limits import KIB
from shardyard.domain.pushes import ExchangeReply, PushHeader
from shardyard_worker.exchange.buffers.flat_buffers import FlatBuffers
from shardyard_worker.exchange.request_builder import RequestBuilder, ServerRequest
from shardyard_worker.exchange.server_stream import ServerStream
from shardyard_worker.session.retry import RetryPolicy
from shardyard_worker.session.session import Session

log = logging.getLogger("shardyard.worker")

R = TypeVar("R")
Describe = Callable[[], str]
Make = Callable[[ServerStream], ServerRequest | None]
"""Makes the request for a server, if there is one, once its stream is open."""

_MOVED = (errors.StaleGeneration, errors.StaleIncarnation)
_EXPLAINED = (errors.NotFound, errors.Unavailable, *_MOVED)
"""Errors that the coordinator can explain."""
REFRESH_MS = 50
"""The pause between two refreshes when the map is about to change."""
RECOVERING = "its partitions wait to be restored (see `shardyard status`)"
"""The explanation of a wait when a job's server is lost."""
THREADS_BYTES_MIN = 256 * KIB
"""If streams to several servers carry more than this, each server has a thread."""
CALLS_MAX = 4
"""Concurrent calls to one server: an exchange, and row look-ups of other threads."""


class MapChanged(Exception):
    """Partitions have moved, or were restored. Ask again under the newest map."""


class FanOut:
    """Under one partition map. Exchanges come from one thread at a time; calls may come from others meanwhile.

    `follows`: a request may have been sent under an earlier map already.
    """

    def __init__(
        self,
        session: Session,
        map_: PartitionMap,
        streams: Mapping[Incarnation, ServerStream],
        buffers: FlatBuffers,
        requests: RequestBuilder,
        *,
        follows: bool,
    ) -> None:
        self._session = session
        self._map = map_
        self._streams = tuple(streams.values())
        self._buffers = buffers
        self._requests = requests
        self._follows = follows
        self._wait_registry = session.wait_registry
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(CALLS_MAX * len(self._streams), "server")

    def close(self) -> None:
        """Ends every call in flight, and refuses new ones. Safe from any thread."""
        self._closed.set()
        self.cancel()
        self._pool.shutdown(wait=False)

    def cancel(self) -> None:
        """Ends every call in flight. Safe from any thread."""
        for stream in self._streams:
            stream.cancel()
            stream.peer.close()

    def pause(self, pause_ms: int) -> None:
        """Waits, unless the job fails meanwhile."""
        self._closed.wait(pause_ms / 1000)

    @property
    def is_behind(self) -> bool:
        """Whether there is a newer map."""
        return self._session.generation > self._map.generation

    def check(self) -> None:
        """Raises MapChanged if there is a newer map, and the error that the job failed with."""
        self._session.check()
        if self.is_behind:
            raise MapChanged

    # ---- calls

    def call(
        self, ask: Callable[[ServerStream], R], waiting_for: str, streams: Sequence[ServerStream] | None = None
    ) -> list[R]:
        """Calls these servers (None: all) at once, with retries. Once all are done, raises the first refusal."""
        self.check()
        try:
            return self._call(ask, waiting_for, self._streams if streams is None else streams)
        except _EXPLAINED as error:
            self._refresh_and_check(error)
            raise

    def _call(self, ask: Callable[[ServerStream], R], waiting_for: str, streams: Sequence[ServerStream]) -> list[R]:
        policies = [self._retry_policy(stream, waiting_for) for stream in streams]
        if len(streams) == 1:
            with self._wait_registry.over(lambda: policies[0].explanation):
                return [policies[0].call(partial(ask, streams[0]))]
        try:
            futures: list[Future[R]] = [
                self._pool.submit(policy.call, partial(ask, stream))
                for policy, stream in zip(policies, streams, strict=True)
            ]
        except RuntimeError:
            # another thread has met a failure and closed the pool
            self._session.check()
            raise

        def explanation() -> str:
            each = zip(futures, policies, strict=True)
            return "; ".join(policy.explanation for future, policy in each if not future.done())

        # explained here too: one call may take longer than a wait may go unexplained
        with self._wait_registry.over(explanation):
            wait(futures)
        return [future.result() for future in futures]

    def _retry_policy(self, stream: ServerStream, waiting_for: str) -> RetryPolicy:
        return RetryPolicy(
            self._session.settings.membership.coordinator_grace_ms,
            self.check,
            f"{waiting_for} on {stream.peer.name}",
            worthwhile=lambda: RECOVERING if self._session.recovering else "",
            refresh=self._session.refresh,
        )

    # ---- exchanges

    def exchange(self, make: Make, waiting_for: Describe) -> list[ExchangeReply]:
        """Exchanges with all servers at once for which `make` returns a request. Once all are done, raises the first
        refusal."""
        self.check()
        streams = self._streams
        try:
            if len(streams) > 1 and self._streamed_bytes() > THREADS_BYTES_MIN:
                found = self._call(partial(self._attempt, make), waiting_for(), streams)
                return [result for result in found if result is not None]
            return self._exchange_here(make, waiting_for)
        except _EXPLAINED as error:
            self._refresh_and_check(error)
            raise

    def _streamed_bytes(self) -> int:
        return sum([self._buffers.nbytes(stream.server) for stream in self._streams if not stream.shared])

    def _exchange_here(self, make: Make, waiting_for: Describe) -> list[ExchangeReply]:
        """The same in this thread: sends all requests, then reads all answers."""
        streams = self._streams
        begun: dict[Incarnation, PushHeader] = {}
        waits: list[ServerStream] = []
        results: list[ExchangeReply] = []
        refusals: list[errors.ShardyardError] = []
        try:
            with self._wait_registry.over(
                lambda: f"{waiting_for()} on {waits[-1].peer.name if waits else 'all servers'}"
            ):
                for stream in streams:
                    try:
                        header = self._begin(make, stream)
                        if header is not None:
                            begun[stream.server] = header
                    except errors.Unavailable:
                        log.debug("%s: asked again (%s)", stream.peer.name, waiting_for())
                for stream in streams:
                    waits.append(stream)
                    try:
                        result = self._finish(stream, make, begun.get(stream.server), waiting_for)
                    except errors.ShardyardError as error:
                        refusals.append(error)
                    else:
                        if result is not None:
                            results.append(result)
        except BaseException:
            # an unread answer would be read as the answer to the next request
            for stream in streams:
                stream.cancel()
            raise
        if refusals:
            raise next((each for each in refusals if isinstance(each, _MOVED)), refusals[0])
        return results

    def _begin(self, make: Make, stream: ServerStream) -> PushHeader | None:
        stream.await_answer()
        if not stream.is_open:
            stream.open(self._requests.header(stream.server))
        made = make(stream)
        if made is None:
            return None
        stream.begin(*made)
        return made.header

    def _attempt(self, make: Make, stream: ServerStream) -> ExchangeReply | None:
        """One whole exchange with one server. The answer may be that of an earlier attempt."""
        stream.retried = True
        header = self._begin(make, stream)
        return None if header is None else stream.finish(header)

    def _finish(
        self, stream: ServerStream, make: Make, header: PushHeader | None, waiting_for: Describe
    ) -> ExchangeReply | None:
        stream.retried = header is None or self._follows
        if header is not None:
            try:
                return stream.finish(header)
            except (errors.Unavailable, errors.NotReady):
                log.debug("%s: asked again (%s)", stream.peer.name, waiting_for())
        stream.retried = True
        return self._retry_policy(stream, waiting_for()).call(partial(self._attempt, make, stream))

    # ---- after an error

    def _refresh_and_check(self, error: errors.ShardyardError) -> None:
        """Asks the coordinator why a server does not answer: the job has failed, or its partitions have moved or will
        move soon."""
        if isinstance(error, errors.NotFound) and "newest" not in error.facts:
            # servers drop a job that has failed, and its workers may hear of the failure later
            self._session.learn()
        else:
            self._session.refresh()
        self.check()
        # a restarted server knows nothing of the job, and the coordinator may not know of the restart yet
        moved = isinstance(error, _MOVED)
        if moved or self._session.recovering:
            with self._wait_registry.over(lambda: f"a partition map after generation {self._map.generation}"):
                while True:
                    self.pause(REFRESH_MS)
                    self._session.refresh()
                    self.check()
                    if not moved and not self._session.recovering:
                        return
