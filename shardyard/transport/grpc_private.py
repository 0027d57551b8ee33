"""Calls with fewer changes of threads, for the caller and for the server.

gRPC's Python API passes each message from thread to thread, which is most of the cost of a small message. Here the
caller takes the events of its call itself, and a served stream needs one change of threads for each message. This uses
gRPC's private layer, so it is used only with the versions with which it was tried
(shardyard.transport.TRIED_VERSIONS). With all others, the public interface does the same.

Owns: the operations of one call. Invariants: each operation that was begun is waited for before a call is given up,
because gRPC's core writes to its memory until then; only one thread at a time takes events. Must not know: what
messages mean.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

import grpc
from grpc import _common, _server
from grpc._cython import cygrpc  # type: ignore[attr-defined]

_NO_FLAGS: Final = 0
STALL_S: Final = 60.0
_ALONG_BYTES_MAX: Final = 1 << 16
"""Of a last answer that no thread waits for. Of larger ones, a caller that does not read has as many as threads."""
_SEND, _EXCHANGE, _RECEIVE, _STATUS, _METADATA = "send", "exchange", "receive", "status", "metadata"


class Ended(Exception):
    """The stream has ended. `status`: gRPC's, OK included, with `code()`, `details()` and `trailing_metadata()`."""

    def __init__(self, status: Any) -> None:
        self.status = status
        super().__init__(status)


class PrivateStatus(grpc.RpcError):
    """How a call ended, under the names of grpc.Call."""

    def __init__(self, operation: Any) -> None:
        self._code = _common.CYGRPC_STATUS_CODE_TO_STATUS_CODE.get(operation.code(), grpc.StatusCode.UNKNOWN)
        self._details = _common.decode(operation.details())
        self._trailers = operation.trailing_metadata()

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailers


class PrivateCall:
    """A call of a method with streams in both directions. Raises ValueError if the channel is closed."""

    def __init__(self, channel: grpc.Channel, path: str, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        operations = (
            ((cygrpc.SendInitialMetadataOperation(metadata, _NO_FLAGS),), None),
            ((cygrpc.ReceiveStatusOnClientOperation(_NO_FLAGS),), _STATUS),
            ((cygrpc.ReceiveInitialMetadataOperation(_NO_FLAGS),), _METADATA),
        )
        self._taking = threading.Lock()
        self._due = len(operations)
        self._status: PrivateStatus | None = None
        self._answer: bytes | None = None
        self._begun = False
        self._is_cancelled = False
        inner: Any = channel
        self._call = inner._channel.segregated_call(
            _NO_FLAGS, path.encode(), None, None, metadata, None, operations, None, None
        )

    def send(self, messages: Iterable[bytes], *, answered: bool = True) -> None:
        """Sends messages in order, and waits until each is sent. If `answered`, does not wait for the last one. Raises
        Ended."""
        try:
            with self._taking:
                held: bytes | None = None
                for message in messages:
                    if held is not None:
                        self._do((cygrpc.SendMessageOperation(held, _NO_FLAGS),), _SEND)
                        self._until(_SEND)
                    held = message
                if held is not None and not answered:
                    self._do((cygrpc.SendMessageOperation(held, _NO_FLAGS),), _SEND)
                    self._until(_SEND)
                elif held is not None:
                    self._do(
                        (cygrpc.SendMessageOperation(held, _NO_FLAGS), cygrpc.ReceiveMessageOperation(_NO_FLAGS)),
                        _EXCHANGE,
                    )
                    self._begun = True
        finally:
            if self._is_cancelled:
                self._drain_if_free()

    def receive(self) -> bytes:
        """Returns the next answer. Raises Ended."""
        try:
            with self._taking:
                if self._begun:
                    self._begun = False
                    self._until(_EXCHANGE)
                else:
                    self._do((cygrpc.ReceiveMessageOperation(_NO_FLAGS),), _RECEIVE)
                    self._until(_RECEIVE)
                if self._answer is None:
                    self._end()
                answer, self._answer = self._answer, None
                assert answer is not None
                return answer
        finally:
            if self._is_cancelled:
                self._drain_if_free()

    def cancel(self) -> None:
        """Ends the call. Any thread may call this; a thread that waits for an answer is woken."""
        self._is_cancelled = True
        self._call.cancel(_common.STATUS_CODE_TO_CYGRPC_STATUS_CODE[grpc.StatusCode.CANCELLED], "cancelled here")
        self._drain_if_free()

    def _drain_if_free(self) -> None:
        """Takes the events of a call that was cancelled, without which its connection stays open. A thread that sends
        or receives meanwhile does this when it is done."""
        if self._taking.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._taking.release()

    # ---- for the thread that holds `_taking`

    def _do(self, operations: tuple[Any, ...], tag: str) -> None:
        if self._status is not None or not self._call.operate(operations, tag):
            self._end()
        self._due += 1

    def _until(self, tag: str) -> None:
        """Takes events until the one with this tag has come. Raises Ended if it failed."""
        while True:
            event = self._take()
            if event.tag == tag:
                if tag != _SEND:
                    self._answer = event.batch_operations[-1].message()
                if not event.success or (tag != _SEND and self._answer is None):
                    self._end()
                return

    def _take(self) -> Any:
        event = self._call.next_event()
        self._due -= 1
        if event.tag == _STATUS:
            self._status = PrivateStatus(event.batch_operations[0])
        return event

    def _drain(self) -> None:
        while self._due:
            self._take()
        self._begun = False

    def _end(self) -> None:
        """Waits for the end of the call, which has ended or soon will, and raises Ended."""
        self._drain()
        assert self._status is not None
        raise Ended(self._status)


class InThisThread(ThreadPoolExecutor):
    """Runs what it is given at once, in the thread that gives it: what a call does before its first message is whole
    takes no thread."""

    def __init__(self) -> None:
        super().__init__(1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """What it runs raises nothing, and returns nothing."""
        fn(*args, **kwargs)
        return _DONE


_DONE: Final[Future[Any]] = Future()
_DONE.set_result(None)


class CallThreads:
    """Threads for the handlers of calls, at most `most`. They start when they are needed, and stay. Each message of a
    stream may need one, so this makes no Future for it, as a ThreadPoolExecutor does.

    Of one caller, `most_of_one` of them run at a time (0: half), so that it does not take the threads of all others.
    The rest of what it has asked for waits, in its order.
    """

    def __init__(self, most: int, name: str = "serve-call", *, most_of_one: int = 0) -> None:
        self._most = most
        self._most_of_one = most_of_one or max(1, most // 2)
        self._name = name
        self._works: queue.SimpleQueue[tuple[Callable[[], None], str] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0
        self._threads: list[threading.Thread] = []
        self._running: dict[str, int] = {}
        """How many threads a caller has, or is about to have."""
        self._waiting: dict[str, deque[Callable[[], None]]] = {}

    def run(self, work: Callable[[], None], caller: str = "") -> None:
        """Runs `work` in a thread that is free, or in a new one; if there are `most`, in the next that becomes free.
        `caller`: whose it is; empty: of nobody in particular."""
        with self._lock:
            if caller:
                running = self._running.get(caller, 0)
                if running >= self._most_of_one:
                    self._waiting.setdefault(caller, deque()).append(work)
                    return
                self._running[caller] = running + 1
            self._begin(work, caller)

    def close(self) -> None:
        """Ends the threads after the works that were given."""
        for _ in self._threads:
            self._works.put(None)
        for thread in self._threads:
            thread.join()

    # ---- with the lock held

    def _begin(self, work: Callable[[], None], caller: str) -> None:
        self._works.put((work, caller))
        if self._free:
            self._free -= 1
        elif len(self._threads) < self._most:
            name = f"{self._name}-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
            self._threads[-1].start()

    def _end(self, caller: str) -> None:
        self._free += 1
        if not caller:
            return
        waiting = self._waiting.get(caller)
        if waiting:
            self._begin(waiting.popleft(), caller)
            if not waiting:
                del self._waiting[caller]
        elif self._running[caller] == 1:
            del self._running[caller]
        else:
            self._running[caller] -= 1

    # ---- in a thread

    def _serve(self) -> None:
        while (given := self._works.get()) is not None:
            work, caller = given
            work()
            with self._lock:
                self._end(caller)


class ServedCall:
    """A call, on the side that serves it. Whatever the method is to its caller, it is served as one with streams in
    both directions, which look the same on the wire.

    The handler decides how requests and answers alternate. Where it waits for the next request, it yields None: the
    answer that is held back is sent and the request is asked for in one operation, and the call has no thread until it
    is there. `at_once` may answer it in the thread that takes the server's events, without a thread for the
    handler. Where the handler needs more messages of a request that has begun, it asks `requests` and keeps its thread.
    The last answer is sent with the status if it is small, and no thread waits until it is read.

    A call that ends before its first message is whole, as one that is reset, never has a thread: its handler does not
    run, unless the method's requests are a stream that may be empty.

    A caller that sends or reads nothing for STALL_S, within a message or between the messages of one request, loses the
    call, so that it does not keep the thread; `cancel_if_stalled` does the same for one that does not read the last
    answer. `caller`: whose threads it takes, once that is known. `is_delayed`: the status
    is sent by `end_if_delayed`, not when the handler ends. `until_over`: closed at the end of the call, when all
    was sent. `holds_back`: an answer may wait for the handler's next word, with which it is sent. `may_be_empty`: the
    handler runs without a message too.
    """

    def __init__(self, context: Any, threads: CallThreads, *, holds_back: bool, may_be_empty: bool) -> None:
        self.caller = ""
        self.until_over = ExitStack()
        self._holds_back, self._may_be_empty = holds_back, may_be_empty
        self._context, self._state = context, context._state
        self._call = context._rpc_event.call
        self._threads = threads
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._held: bytes | None = None
        self._answers: Generator[bytes | None, None, None]
        self._lock = threading.Lock()
        self._is_waiting = self._has_begun = self._has_ended = False
        self._arrived: tuple[bytes | None] | None = None
        self._answered_s: float | None = None
        self.is_delayed = self._is_to_end = False
        self.at_once: Callable[[bytes], bytes | None] | None = None

    def cancel(self) -> None:
        """Ends the call. Any thread may call this."""
        self._context.cancel()

    def cancel_if_stalled(self) -> None:
        """Ends the call if its caller has not read the last answer for too long. Any thread may call this."""
        answered_s = None if self._has_ended else self._answered_s
        if answered_s is not None and time.monotonic() > answered_s + STALL_S:
            self._context.cancel()

    def end_if_delayed(self) -> None:
        """Sends the status that was not sent when the handler ended. For one thread."""
        if self._is_to_end and not self._has_ended:
            self._is_to_end = False
            self._end()

    def serve(self, answers: Generator[bytes | None, None, None]) -> None:
        """Runs the handler, whose answers these are, until it waits for a request for the first time, or ends."""
        self._answers = answers
        self._run_handler()
        if not self._context.add_callback(self._over):
            self._over()

    def requests(self) -> Iterator[bytes]:
        """Yields requests until the caller has ended the stream, with or without an error."""
        while True:
            if self._arrived is not None:
                (message,), self._arrived = self._arrived, None
            else:
                event = self._run(self._next_operations(), self._done)
                message = event.batch_operations[-1].message() if event is not None and event.success else None
            if message is None:
                return
            yield message

    # ---- for the thread that runs the handler

    def _run_handler(self) -> None:
        for message in self._answers:
            if message is not None:
                self._flush()
                self._held = message
                if not self._holds_back:
                    self._flush()
                if self._has_ended:  # nobody reads them, so the handler makes no more
                    self._answers.close()
                    break
            elif self._arrived is None and self._ask_for_request():
                return
        if self.is_delayed:
            self._is_to_end = True
        else:
            self._end()

    def _end(self) -> None:
        """Sends the status that the context has, with the answer that is held back."""
        if self._held is not None and len(self._held) > _ALONG_BYTES_MAX:
            self._flush()
        held, self._held = self._held, None
        self._answered_s = time.monotonic()
        _server._status(self._context._rpc_event, self._state, held)

    def _ask_for_request(self) -> bool:
        """Returns whether the handler goes on when the next request, or the end, is there; False: it is there."""
        with self._lock:
            self._is_waiting = not self._has_ended
            if not self._is_waiting:
                self._arrived = (None,)
                return False
        self._call.start_server_batch(self._next_operations(), self._came)
        return True

    def _next_operations(self) -> tuple[Any, ...]:
        held, self._held = self._held, None
        receive = cygrpc.ReceiveMessageOperation(_NO_FLAGS)
        return (receive,) if held is None else (*self._sending(held), receive)

    def _sending(self, message: bytes) -> tuple[Any, ...]:
        """The first answer is sent with the metadata that begin the answers of a call."""
        send = cygrpc.SendMessageOperation(message, _NO_FLAGS)
        if not self._state.initial_metadata_allowed:
            return (send,)
        self._state.initial_metadata_allowed = False
        return cygrpc.SendInitialMetadataOperation((), _NO_FLAGS), send

    def _flush(self) -> None:
        """Sends the answer that is held back."""
        held, self._held = self._held, None
        if held is not None:
            self._run(self._sending(held), self._done)

    def _run(self, operations: tuple[Any, ...], then: Callable[[Any], Any]) -> Any:
        """The event of these operations; None if the call has ended. After that the server may have ended too, and with
        it the thread that takes its events."""
        if not self._context.is_active():
            return None
        self._call.start_server_batch(operations, then)
        try:
            return self._events.get(timeout=STALL_S)
        except queue.Empty:
            self._context.cancel()
            return None

    # ---- for the thread that takes the server's events

    def _came(self, event: Any) -> tuple[None, tuple[()]]:
        """Handles the next request, or the end, where the handler waits for it."""
        message = event.batch_operations[-1].message() if event.success else None
        answer = self.at_once(message) if message is not None and self.at_once is not None else None
        if answer is None:
            self._go_on(message)
        else:
            self._held = answer
            self._call.start_server_batch(self._next_operations(), self._came)
        return None, ()

    def _over(self) -> None:
        """Called after the end of the call. No event may follow, if the server has ended too."""
        with self._lock:
            self._has_ended = True
        self._events.put(None)
        self._go_on(None)
        self.until_over.close()

    def _go_on(self, message: bytes | None) -> None:
        with self._lock:
            if not self._is_waiting:
                return
            self._is_waiting = False
        self._arrived = (message,)
        has_begun, self._has_begun = self._has_begun, True
        if has_begun or message is not None or self._may_be_empty:
            self._threads.run(self._run_handler, self.caller)
        else:
            self._answers.close()
            self._end()

    def _done(self, event: Any) -> tuple[None, tuple[()]]:
        self._events.put(event)
        return None, ()
