"""Notices that a machine is about to be taken away, as clouds give them: a file that appears, or a URL that is polled.

Owns: what counts as a notice. Invariants: a request waits at most TIMEOUT_S for an answer, reads at most BODY_BYTES_MAX
of it, and follows no redirect; whatever goes wrong with it is no notice. Must not know: what a process does when it is
told.
"""

from __future__ import annotations

import http.client
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
TIMEOUT_S: Final = 1.0
BODY_BYTES_MAX: Final = 4_096
NOTHING: Final = (b"", b"FALSE", b"NONE")
"""What Google's metadata server answers while nothing is planned."""
HEADERS: Final = {"Metadata-Flavor": "Google"}
"""Without this Google's metadata server refuses a request."""
TOKEN_PATH: Final = "/latest/api/token"  # noqa: S105 - a path
TOKEN_LIFE: Final = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
TOKEN_HEADER: Final = "X-aws-ec2-metadata-token"  # noqa: S105 - a name


def _opener() -> urllib.request.OpenerDirector:
    """It follows no redirect, and asks no proxy, which could not reach a metadata server."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    return opener


class PreemptionNotice:
    """The notice at `place`: an absolute path, or an http or https URL. A file that exists is a notice. So is an answer
    with status 200 and a body, unless it is FALSE or NONE."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._is_url = place.startswith(("http://", "https://"))
        self._headers: dict[str, str] = dict(HEADERS)
        self._opener = _opener()

    def is_given(self) -> bool:
        """Asks once."""
        if not self._is_url:
            return Path(self.place).exists()
        try:
            return self._ask("GET", self.place, self._headers).strip().upper() not in NOTHING
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == http.HTTPStatus.UNAUTHORIZED:
                self._take_token()
        except (OSError, http.client.HTTPException, ValueError) as error:
            log.debug("%s was not asked for a notice of preemption: %s", self.place, error)
        return False

    def _take_token(self) -> None:
        """Amazon's metadata server wants a token with each request."""
        host = urlsplit(self.place)
        self._headers.pop(TOKEN_HEADER, None)
        try:
            token = self._ask("PUT", f"{host.scheme}://{host.netloc}{TOKEN_PATH}", TOKEN_LIFE)
            self._headers[TOKEN_HEADER] = token.decode("ascii")
        except (OSError, http.client.HTTPException, ValueError) as error:
            log.debug("no token for %s: %s", self.place, error)

    def _ask(self, method: str, url: str, headers: Mapping[str, str]) -> bytes:
        # the setting takes http and https only
        request = urllib.request.Request(url, method=method, headers=dict(headers))  # noqa: S310
        with self._opener.open(request, timeout=TIMEOUT_S) as answer:
            return bytes(answer.read1(BODY_BYTES_MAX)) if answer.status == http.HTTPStatus.OK else b""


class PreemptionWatch:
    """Calls `on_notice` once, from a thread of its own, when the notice at `place` is given. None: never. A context
    manager; `close` ends the thread."""

    def __init__(self, place: str | None, on_notice: Callable[[str], object]) -> None:
        self._on_notice = on_notice
        self._closed = threading.Event()
        self._notice = None if place is None else PreemptionNotice(place)
        self._thread = threading.Thread(target=self._run, name="preemption", daemon=True)
        if self._notice is not None:
            self._thread.start()

    def _run(self) -> None:
        assert self._notice is not None
        while not self._notice.is_given():
            if self._closed.wait(POLL_S):
                return
        self._on_notice(f"a preemption notice at {self._notice.place}")

    def close(self) -> None:
        self._closed.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
