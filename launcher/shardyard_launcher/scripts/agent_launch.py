"""A launch on one agent: asked for, watched over breaks, stopped.

Owns: the connection to the agent; the stream of the launch's events, which is resumed after a break; since when the
agent has not answered. Invariants: the agent is asked again until it answers, under the same key, so that it starts the
processes once; events come in order, each once. Must not know: how long a silence may last, what to do when the agent
does not know the launch (script).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass
from typing import Final

from shardyard.domain import errors
from shardyard.runtime.waits import ExplainedWait, WaitRegistry
from shardyard.transport.interfaces import Network
from shardyard.wire import methods
from shardyard.wire.v1 import agent_pb2 as agent_wire

LAUNCH_TIMEOUT_MS: Final = 2_000
STOP_TIMEOUT_MS: Final = 2_000
WATCH_TIMEOUT_MS: Final = 3_600_000
"""A stream, too, has a deadline; a longer launch is watched by several, one after the other."""
STOP_MS_MAX: Final = 12_000
EVENTS_QUEUED_MAX: Final = 10_000
SLICE_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Silence:
    """The agent has not answered since `since_s` (monotonic). `error`: what the latest attempt said."""

    since_s: float
    error: errors.ShardyardError


class AgentLaunch:
    """For one thread; a second thread, its own, reads the events. `address`: the agent's."""

    def __init__(self, network: Network, address: str) -> None:
        self.address = address
        self._peer = network.connect(address, name="agent", unavailable=errors.Unavailable)
        self._launch = 0
        self._events: queue.Queue[agent_wire.LaunchEvent | errors.ShardyardError] = queue.Queue(EVENTS_QUEUED_MAX)
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._wait_registry = WaitRegistry()
        self.silence: Silence | None = None
        """Not None while the agent does not answer."""

    @property
    def is_launched(self) -> bool:
        return bool(self._launch)

    @property
    def number(self) -> int:
        """The launch's number, by which commands name it; 0 before it is launched."""
        return self._launch

    @property
    def name(self) -> str:
        return self._peer.name

    def launch(self, request: agent_wire.LaunchRequest) -> agent_wire.LaunchReply | None:
        """Asks once. None if the agent does not answer, or cannot launch anything now; ask again later. Raises what it
        answers otherwise: InvalidRequest, TooLarge, NotPermitted."""
        try:
            with self._wait_registry.over(lambda: f"the {self.name} to launch {request.script}"):
                reply = self._peer.call(methods.LAUNCH, request, timeout_ms=LAUNCH_TIMEOUT_MS)
        except (errors.Unavailable, errors.NotReady) as error:
            self._note_silence(error)
            self._closing.wait(SLICE_S)
            return None
        self.silence = None
        self.watch(reply.launch, 0)
        return reply

    def watch(self, launch: int, next_event: int) -> None:
        """From now on this is the launch of that number. Its events come from `next_event` on."""
        self._launch = launch
        self._watcher = threading.Thread(target=self._watch, args=(next_event,), name="watch-launch", daemon=True)
        self._watcher.start()

    def take(self) -> agent_wire.LaunchEvent | None:
        """The next event; None if none comes within SLICE_S. Raises NotFound, after all events, if the agent does not
        know the launch."""
        try:
            event = self._events.get(timeout=SLICE_S)
        except queue.Empty:
            return None
        if isinstance(event, errors.ShardyardError):
            self._launch = 0
            raise event
        return event

    def stop(self, grace_ms: int) -> bool:
        """Orders the end. False if there is nothing to stop. Raises what the agent answers."""
        if not self._launch:
            return False
        request = agent_wire.StopRequest(launch=self._launch, grace_ms=grace_ms)
        self._peer.call(methods.STOP, request, timeout_ms=STOP_TIMEOUT_MS)
        return True

    def await_end(self) -> ExplainedWait:
        """Explains the wait for a launch that was stopped."""
        return ExplainedWait(lambda: f"the {self.name} to stop launch {self._launch}")

    def close(self) -> None:
        self._closing.set()
        self._wait_registry.close()
        self._peer.close()
        if self._watcher is not None:
            self._watcher.join(5)

    def _note_silence(self, error: errors.ShardyardError) -> None:
        since_s = time.monotonic() if self.silence is None else self.silence.since_s
        self.silence = Silence(since_s, error)

    def _watch(self, wanted: int) -> None:
        while not self._closing.is_set():
            request = agent_wire.WatchRequest(launch=self._launch, next_event=wanted)
            try:
                for event in self._peer.receive(methods.WATCH, request, timeout_ms=WATCH_TIMEOUT_MS):
                    wanted, self.silence = event.number + 1, None
                    self._put(event)
                    if event.HasField("ended"):
                        return
            except errors.DeadlineExceeded:
                continue
            except (errors.Unavailable, errors.NotReady) as error:
                self._note_silence(error)
                self._closing.wait(SLICE_S)
            except errors.ShardyardError as error:
                self.silence = None
                self._put(error)
                return

    def _put(self, event: agent_wire.LaunchEvent | errors.ShardyardError) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(queue.Full):
                self._events.put(event, timeout=SLICE_S)
                return
