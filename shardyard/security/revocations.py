"""Whose certificates are refused although they have not ended.

By role and name, so that a renewed certificate is refused too. Owns: the file of the authority's folder. Invariants: a
revocation is on disk before it is reported; the version changes with each change, over restarts too.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Final

from shardyard.domain.errors import ConfigurationError, TooLarge
from shardyard.security.credentials import replace_file

FILE: Final = "revoked.json"
REVOKED_MAX: Final = 1_024


class Revocations:
    """Safe for several threads. Raises ConfigurationError if the file cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._lock = threading.Lock()
        self.version, self.holders = 0, frozenset[str]()
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self.version, self.holders = int(found["version"]), frozenset(map(str, found["holders"]))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{self._path} cannot be read: {error}", todo="restore it; without it revoked certificates are valid"
            ) from error

    def change(self, holder: str, *, revoked: bool) -> None:
        """`holder`: role/name. Raises TooLarge, OSError."""
        with self._lock:
            wanted = self.holders | {holder} if revoked else self.holders - {holder}
            if len(wanted) > REVOKED_MAX:
                raise TooLarge(
                    f"{len(wanted)} revoked identities; at most {REVOKED_MAX} are kept",
                    todo="take back those whose certificates have ended: `shardyard identities allow`",
                )
            version = max(self.version + 1, int(time.time()))
            content = {"version": version, "holders": sorted(wanted)}
            replace_file(self._path, json.dumps(content).encode())
            self.version, self.holders = version, wanted
