"""The door of a service: who calls, and whether its role may call this method.

Invariant: a caller is what its certificate says and the yard's authority has signed; nothing in a request changes that.
TLS has verified before that the certificate leads to an authority that this process trusts. A coordinator trusts the
keys of open invitations as well, so it looks at the signature itself (`verify`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from shardyard.domain.errors import NotPermitted, NotTrusted, ServerUnavailable, TooLarge
from shardyard.security.identity import SCHEME, Identity
from shardyard.security.passes import PassVerifier, Speaker, holder_of
from shardyard.security.request_rates import RequestRates
from shardyard.security.roles import ALLOWED
from shardyard.wire.method import Method

Verify = Callable[[bytes], Identity | None]
"""Who a certificate (PEM) is for; None if it is of no one."""

_CERTIFICATE: Final = "x509_pem_cert"
_NAMES: Final = "x509_subject_alternative_name"
_KNOWN_MAX: Final = 4_096
CALLS_MAX: Final = 1_024
"""Calls of one caller that are open at a time."""


class Door:
    """Safe for several threads. `verify`: None where TLS trusts the yard's authority only. `checks_passes`: callers
    show passes, which `passes` checks, once it is set."""

    def __init__(
        self, verify: Verify | None = None, *, checks_passes: bool = False, rates: RequestRates | None = None
    ) -> None:
        self.rates = rates
        """How many requests a second a caller may make; None: no bound."""
        self._verify = verify
        self._checks_passes = checks_passes
        self.passes: PassVerifier | None = None
        self.revoked: frozenset[str] = frozenset()
        """Whose certificates are refused, as role/name."""
        self.on_refused: Callable[[str, str, str], None] = lambda *_: None
        """Gets the path of a method, the caller's address, and why the caller was refused."""
        self._lock = threading.Lock()
        self._known: dict[bytes, Identity] = {}
        self._open: Counter[tuple[str, int]] = Counter()
        """How many calls each caller has open, by its certificate and its incarnation."""

    def admit(self, method: Method[Any, Any], connection: Mapping[str, Iterable[bytes]], shown: bytes = b"") -> Speaker:
        """The caller. `connection`: gRPC's auth context. `shown`: its pass. Raises NotTrusted, NotPermitted, and
        ServerUnavailable while passes cannot be checked yet."""
        certificate = next(iter(connection.get(_CERTIFICATE, ())), b"")
        caller = self._known.get(certificate) or self._identify(certificate, connection)
        if self.revoked and holder_of(caller) in self.revoked:
            raise NotTrusted(f"the certificate of {caller} was revoked", todo="ask an operator of the yard for another")
        allowed = ALLOWED.get(method.path, frozenset())
        if caller.role not in allowed:
            roles = ", ".join(sorted(role.value for role in allowed)) or "nobody"
            raise NotPermitted(f"{caller} may not call {method.path}; {roles} may")
        if not shown or not self._checks_passes:
            return Speaker(caller, None)
        if self.passes is None:
            raise ServerUnavailable("this server has not registered yet, so it cannot check passes")
        return Speaker(caller, self.passes.verify(shown, caller))

    @contextlib.contextmanager
    def call_of(self, caller: Speaker) -> Iterator[None]:
        """Counts a call of a caller that was admitted, while it is open. Raises NotReady if the caller has made too
        many in a second, TooLarge if too many are open."""
        held = caller.job_pass
        if self.rates is not None:
            self.rates.check(f"job {held.job}" if held is not None else str(caller.identity))
        by = caller.identity.holder, 0 if held is None else held.incarnation
        with self._lock:
            if self._open[by] >= CALLS_MAX:
                raise TooLarge(
                    f"{caller.identity} has {CALLS_MAX} open calls",
                    why="each may keep a message's memory",
                    todo="end some of them, or use several certificates",
                )
            self._open[by] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[by] -= 1
                if not self._open[by]:
                    del self._open[by]

    def _identify(self, certificate: bytes, connection: Mapping[str, Iterable[bytes]]) -> Identity:
        found = _named(connection) if self._verify is None else self._verify(certificate)
        if not certificate or found is None:
            raise NotTrusted("the caller's certificate does not say which member of the yard it is for")
        with self._lock:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[certificate] = found
        return found

    def forget(self) -> None:
        """Certificates are looked at again from now on."""
        with self._lock:
            self._known.clear()


def _named(connection: Mapping[str, Iterable[bytes]]) -> Identity | None:
    for name in connection.get(_NAMES, ()):
        text = name.decode(errors="replace")
        if text.startswith(SCHEME):
            try:
                return Identity.parse(text)
            except ValueError:
                return None
    return None
