"""Serves one call: bytes to a handler and back, the same over gRPC and in process.

Invariants: a handler runs in a context of its own, so that the id of one request never shows in another; a handler's
ShardyardError reaches the caller as it is; anything else is logged with its traceback and reaches the caller as
Internal; bytes that are no message are MalformedPayload. Serving has no `except Exception` elsewhere.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Iterable, Iterator
from typing import Any

from shardyard.domain import errors
from shardyard.domain.failpoints import failpoint
from shardyard.runtime.log import bind
from shardyard.transport.interfaces import AtOnce, Context, Handler, request_id
from shardyard.wire.method import Method

log = logging.getLogger("shardyard.serving")

_END = object()
REPLY = "reply"
"""Each method has a failpoint, for example `reply.push`: the work is done, and the reply is not sent."""


def serve(
    method: Method[Any, Any], handler: Handler, sent: bytes | Iterable[bytes], context: Context, id_: str
) -> Iterator[bytes]:
    """Runs one call. Yields the answers, one or many, as bytes. Raises only ShardyardError."""
    scope = contextvars.copy_context()
    scope.run(request_id.set, id_)
    scope.run(bind, request=id_)
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
            while (item := scope.run(next, answers, _END)) is not _END:
                failpoint(place)
                yield method.response.encode(item)
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
            log.debug("%s: the caller has gone", method.path)
            raise errors.Unavailable(f"the caller of {method.path} has gone") from error
        log.exception("%s failed", method.path)
        raise errors.Internal(f"{method.path} failed: {type(error).__name__}: {error}") from error


def serve_at_once(method: Method[Any, Any], at_once: AtOnce, message: bytes) -> bytes | None:
    """The answer of what a handler has offered (Context.offer), as bytes. Raises nothing: on None the request is
    served in the ordinary way, where its error reaches the caller."""
    try:
        answer = at_once(method.request.decode(message))
        return None if answer is None else method.response.encode(answer)
    except errors.ShardyardError:
        return None
    except Exception:
        log.exception("%s failed at once", method.path)
        return None
