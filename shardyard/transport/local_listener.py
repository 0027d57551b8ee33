"""The side of local sockets that serves: a listener, and a handler for each connection.

Each connection has a thread, which blocks until the next message is there. A handler that pauses is carried on by the
thread that ends its pause. Must not know: what messages mean.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from shardyard.domain import errors
from shardyard.runtime.waits import WaitRegistry
from shardyard.security.passes import Speaker, holder_of
from shardyard.transport.dispatch import serve_with_pauses
from shardyard.transport.error_codes import to_detail
from shardyard.transport.interfaces import Context, Handler, Pause
from shardyard.transport.local_socket import (
    END,
    ERROR,
    WHOLE,
    Connection,
    available,
    raw_address,
    user_of,
)
from shardyard.transport.stream_keys import StreamKeys
from shardyard.wire.method import Method

log = logging.getLogger("shardyard.serving")

_HELLO_MS: Final = 5_000
"""How long a connection may take to send its first packet."""
_RETRY_S: Final = 0.1
_FOLDER_MODE: Final = 0o700


class LocalListener:
    """Serves one method to the processes of this user on this machine.

    `folder`: where the socket gets its name, for processes that share a folder and not a network, such as containers.
    None: a name that the kernel forgets with the process, for all processes of this network namespace. `keys`: with one
    of them a connection must begin; None: the yard runs without TLS, and each process of this user may connect. Raises
    NotShareable if this system has no such sockets, or the folder cannot be used.
    """

    def __init__(
        self,
        method: Method[Any, Any],
        handler: Handler,
        *,
        connections_max: int,
        folder: Path | None = None,
        keys: StreamKeys | None = None,
    ) -> None:
        if not available():
            raise errors.NotShareable(f"{sys.platform} has no local sockets that name their user")
        self._method, self._handler = method, handler
        self._keys = keys
        self._connections_max = connections_max
        self._lock = threading.Lock()
        self._served: dict[Connection, threading.Thread] = {}
        self._callers: dict[Connection, str] = {}
        """Whose certificate has opened a connection, as role/name."""
        self._stopped = False
        name = f"shardyard-{os.getpid()}-{secrets.token_hex(8)}"
        self._path = None if folder is None else folder / f"{name}.sock"
        self.address = f"@{name}" if self._path is None else str(self._path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            if folder is not None:
                folder.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
                _delete_stale(folder)
            self._socket.bind(raw_address(self.address))
            self._socket.listen(connections_max)
        except OSError as error:
            self._socket.close()
            raise errors.NotShareable(f"no local socket at {self.address}: {error.strerror or error}") from error
        self._accepts = threading.Thread(target=self._accept, name="local-accept", daemon=True)

    def start(self) -> None:
        self._accepts.start()

    def revoke(self, holders: frozenset[str]) -> None:
        """Ends the connections of these members (role/name)."""
        with self._lock:
            served = [each for each, caller in self._callers.items() if caller in holders]
        for connection in served:
            connection.cancel()

    def stop(self) -> None:
        """Ends all connections, and waits for their threads."""
        with self._lock:
            self._stopped = True
            served = dict(self._served)
        wait_registry = WaitRegistry()
        try:
            with wait_registry.over(lambda: f"the streams of local socket {self.address} to end"):
                with contextlib.suppress(OSError):  # it does not listen yet
                    self._socket.shutdown(socket.SHUT_RDWR)
                if self._accepts.ident is not None:
                    self._accepts.join()
                self._socket.close()
                if self._path is not None:
                    self._path.unlink(missing_ok=True)
                for connection, thread in served.items():
                    connection.cancel()
                    thread.join()
        finally:
            wait_registry.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                if self._stopped:
                    return
                time.sleep(_RETRY_S)  # no descriptor is free, for example
                continue
            if user_of(connected) != os.geteuid():
                connected.close()
                continue
            connection = Connection(connected)
            thread = threading.Thread(target=self._serve, args=(connection,), name="serve-local", daemon=True)
            with self._lock:
                if self._stopped or len(self._served) >= self._connections_max:
                    connection.close()
                    continue
                self._served[connection] = thread
                thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            served = ServedConnection(connection, self._method, self._handler, self._keys)
            served.run(lambda speaker: self._note(connection, speaker))
        except (OSError, errors.ShardyardError) as error:
            log.debug("%s: a connection has ended (%s)", self._method.path, error)
        finally:
            connection.close()
            with self._lock:
                del self._served[connection]
                self._callers.pop(connection, None)

    def _note(self, connection: Connection, speaker: Speaker) -> None:
        with self._lock:
            self._callers[connection] = holder_of(speaker.identity)


class ServedConnection:
    """A connection, and the handler of its stream. The thread that calls `run` receives; it carries the handler on
    when a message has come, and another thread does when it has ended the handler's pause."""

    def __init__(
        self, connection: Connection, method: Method[Any, Any], handler: Handler, keys: StreamKeys | None
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._method, self._handler = method, handler
        self._handling = threading.Lock()
        """Held by the thread that carries the handler on. No circle of threads waits here: a thread takes the lock of
        another handler only while it runs its own, and the other handler was paused then."""
        self._answers: Generator[bytes | Pause | None, None, None]
        self._arrived: tuple[bytes, bytes] | None = None
        self._pause: Pause | None = None
        self._has_ended = False

    def run(self, known: Callable[[Speaker], None]) -> None:
        """Serves the stream until it ends. `known` gets the caller, if there are certificates. Raises OSError,
        ShardyardError."""
        connection = self._connection
        kind, hello = connection.receive(_HELLO_MS)
        if kind != WHOLE:
            return
        name, _, key = hello.partition(b" ")
        try:
            speaker = None if self._keys is None else self._keys.take(key)
        except errors.NotPermitted as error:
            connection.send(ERROR, to_detail(error).SerializeToString())
            return
        if speaker is not None:
            known(speaker)
        context = Context(peer="local", is_active=connection.is_alive, descriptors=connection, speaker=speaker)
        self._answers = serve_with_pauses(
            self._method, self._handler, self._requests(), context, name.decode(errors="replace")
        )
        try:
            with self._handling:
                self._carry_on()
            while not self._has_ended:
                arrived = self._receive()
                with self._handling:
                    if self._has_ended or (arrived is not None and self._pause is not None):
                        break  # during a pause, only the end can come
                    self._arrived = arrived
                    if arrived is not None or self._is_overdue():
                        self._carry_on()
        finally:
            with self._handling:
                self._end_pause()
                self._answers.close()
        # if the socket is closed while it has unread packets, the kernel drops the answer
        while connection.receive(_HELLO_MS)[0]:
            pass

    def _receive(self) -> tuple[bytes, bytes] | None:
        """Returns the next packet; None: the handler's pause is over. An empty kind: the caller is gone."""
        pause = self._pause
        left_ms = 0 if pause is None else max(1, math.ceil((pause.until - time.monotonic()) * 1000))
        try:
            return self._connection.receive(left_ms)
        except BlockingIOError:
            return None
        except OSError:
            return b"", b""

    def _requests(self) -> Iterator[bytes]:
        """Yields requests until the caller has ended the stream, in whatever way."""
        while True:
            arrived, self._arrived = self._arrived, None
            if arrived is None:
                try:
                    arrived = self._connection.receive()
                except OSError:
                    return
            kind, message = arrived
            if kind != WHOLE:
                return
            yield message

    # ---- with `_handling` held

    def _carry_on(self) -> None:
        """Runs the handler until it waits for a request, pauses, or ends."""
        self._end_pause()
        try:
            for answer in self._answers:
                if answer is None:
                    return
                if not isinstance(answer, Pause):
                    self._connection.send(WHOLE, answer)
                elif answer.begin(partial(self._go_on, answer)):
                    self._pause = answer
                    return
            self._connection.send(END, b"")
        except errors.ShardyardError as error:
            with contextlib.suppress(OSError):
                self._connection.send(ERROR, to_detail(error).SerializeToString())
        except OSError as error:
            log.debug("%s: a connection has ended (%s)", self._method.path, error)
        self._has_ended = True

    def _end_pause(self) -> None:
        pause, self._pause = self._pause, None
        if pause is not None:
            pause.end()

    def _is_overdue(self) -> bool:
        return self._pause is not None and time.monotonic() >= self._pause.until

    def _go_on(self, pause: Pause) -> None:
        """Called by the thread that has ended the pause."""
        with self._handling:
            if self._pause is pause:
                self._carry_on()


def _delete_stale(folder: Path) -> None:
    """Deletes the sockets of processes that were killed: nobody listens there."""
    for path in folder.glob("shardyard-*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue
