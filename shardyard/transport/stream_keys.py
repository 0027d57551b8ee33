"""Keys by which a connection to a local socket is known to be of a caller that has asked for it over TLS.

Invariants: a key opens one connection, within a minute; there are at most so many at a time.
"""

from __future__ import annotations

import secrets
import threading
import time
from typing import Final

from shardyard.domain.errors import NotPermitted
from shardyard.security.passes import Speaker

KEY_BYTES: Final = 16
LIFETIME_S: Final = 60.0
KEYS_MAX: Final = 4_096


class StreamKeys:
    """Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._issued: dict[bytes, tuple[Speaker, float]] = {}

    def issue(self, speaker: Speaker) -> bytes:
        """A key for one connection of the caller."""
        key, now = secrets.token_bytes(KEY_BYTES), time.monotonic()
        with self._lock:
            if len(self._issued) >= KEYS_MAX:
                self._issued = {each: held for each, held in self._issued.items() if held[1] > now}
                if len(self._issued) >= KEYS_MAX:
                    self._issued.pop(next(iter(self._issued)))
            self._issued[key] = speaker, now + LIFETIME_S
        return key

    def take(self, key: bytes) -> Speaker:
        """The caller that has got a key. Raises NotPermitted if it is none, was used, or is too old."""
        with self._lock:
            found = self._issued.pop(key, None)
        if found is None or found[1] <= time.monotonic():
            raise NotPermitted(
                "a connection to a local socket without a key of this server",
                todo="ask for one with Attach; workers do so by themselves",
            )
        return found[0]
