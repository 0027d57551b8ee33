"""Serves one call: from bytes to a handler and back. It is the same over gRPC and in process.

Invariants: each handler runs in its own context, so that logs never show the id of another request; a ShardyardError of
a handler reaches the caller as it is; any other error is logged with its traceback and reaches the caller as Internal;
bytes that are not a message raise MalformedPayload. No other code that serves calls has an `except Exception`.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from shardyard.domain import errors
from shardyard.runtime.failpoints import failpoint
from shardyard.runtime.log import bind
from shardyard.security.passes import speaker
from shardyard.transport.interfaces import AtOnce, Context, Handler, Pause, request_id
from shardyard.wire.method import Method

log = logging.getLogger("shardyard.serving")

_END = object()
REPLY = "reply"
"""Each method has a failpoint, for example `reply.push`: the work is done, and the reply is not sent yet."""


def serve(
    method: Method[Any, Any], handler: Handler, sent: bytes | Iterable[bytes], context: Context, id_: str
) -> Iterator[bytes | None]:
    """Runs one call. Yields its answers as bytes, and None where the handler waits for a request. Pauses in this
    thread. Raises only ShardyardError."""
    for item in serve_with_pauses(method, handler, sent, context, id_):
        if isinstance(item, Pause):
            item.wait()
        else:
            yield item


def serve_with_pauses(
    method: Method[Any, Any], handler: Handler, sent: bytes | Iterable[bytes], context: Context, id_: str
) -> Generator[bytes | Pause | None, None, None]:
    """As `serve`, and yields the handler's pauses."""
    scope = contextvars.copy_context()
    scope.run(request_id.set, id_)
    scope.run(bind, request=id_)
    scope.run(speaker.set, context.speaker)
    place = f"{REPLY}.{method.name.lower()}"
    try:
        given: object
        if method.streams_in:
            assert not isinstance(sent, bytes)
            given = map(method.request.decode, sent)
        else:
            assert isinstance(sent, bytes)
            given = method.request.decode(sent)
        answer = scope.run(handler, given, context)
        if method.streams_out:
            answers = iter(answer)
            try:
                while (item := scope.run(next, answers, _END)) is not _END:
                    if item is None or isinstance(item, Pause):
                        yield item
                        continue
                    failpoint(place)
                    yield method.response.encode(item)
            finally:
                if isinstance(answers, Generator):  # what it holds is freed now, not when it is collected
                    scope.run(answers.close)
        else:
            failpoint(place)
            yield method.response.encode(answer)
    except errors.Internal:
        log.exception("%s failed", method.path)
        raise
    except errors.ShardyardError as error:
        log.debug("%s refused: %s", method.path, error)
        raise
    except Exception as error:
        if not context.is_active():
            log.debug("%s: the caller has disconnected", method.path)
            raise errors.Unavailable(f"the caller of {method.path} has disconnected") from error
        log.exception("%s failed", method.path)
        raise errors.Internal(f"{method.path} failed: {type(error).__name__}: {error}") from error


def serve_at_once(method: Method[Any, Any], at_once: AtOnce, message: bytes) -> bytes | None:
    """Asks the function that a handler has offered (Context.offer), and returns its answer as bytes. Raises nothing.
    None: the request must be served in the ordinary way, in which errors reach the caller."""
    try:
        answer = at_once(method.request.decode(message))
        return None if answer is None else method.response.encode(answer)
    except errors.ShardyardError:
        return None
    except Exception:
        log.exception("%s failed at once", method.path)
        return None
