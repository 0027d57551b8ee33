"""Which folders and URLs a coordinator and its servers read and write.

A job says where its checkpoints are, so a worker that joins from elsewhere could name any place that a server's user
can write. Owns: the roots. Invariant: a URL outside of them is refused before anything is opened. Must not know: what
is stored.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from shardyard.domain.errors import ConfigurationError
from shardyard.storage.encryption import encrypted, keys_in
from shardyard.storage.storage import LOCAL_SCHEMES, Storage, check_url, open_storage


class StorageAccess:
    """`roots`: folders and URLs, parted by spaces; what lies below one of them is allowed, and below `own`, the folder
    for jobs that name none. Without roots, all folders of this machine and all kinds of stores that `open_storage`
    knows are allowed. `key_file`: the file with the keys by which everything is encrypted; empty: nothing is. Raises
    ConfigurationError for a root that is no URL, and for a file without keys.

        StorageAccess("/data/checkpoints s3://bucket/models").open("s3://bucket/models/ranking")
    """

    def __init__(self, roots: str = "", own: Path | None = None, key_file: str = "") -> None:
        self._text = roots
        self._keys = keys_in(key_file)
        self._roots = [_place(root) for root in roots.split()]
        if self._roots and own is not None:
            self._roots.append(_place(str(own)))

    def check(self, url: str) -> None:
        """Raises ConfigurationError for a URL that is not allowed, and for what is no URL."""
        scheme, parts = _place(url)
        if not self._roots:
            return
        for root_scheme, root in self._roots:
            if scheme == root_scheme and parts[: len(root)] == root:
                return
        raise ConfigurationError(
            f"{url[:200]!r} is not below storage.allowed ({self._text})",
            why="the coordinator and the servers read and write only there",
            todo="choose a place below it, or add this one to storage.allowed of coordinator and servers",
        )

    def open(self, url: str) -> Storage:
        """Raises what `check` and `open_storage` raise."""
        self.check(url)
        return encrypted(open_storage(url), self._keys)


def _place(url: str) -> tuple[str, tuple[str, ...]]:
    """A URL's scheme, and the parts of its place. Symbolic links of a local path are followed, so that it lies where
    it seems to. Raises ConfigurationError."""
    check_url(url)
    scheme, found, rest = url.partition("://")
    if not found or scheme in LOCAL_SCHEMES:
        path = Path(unquote(urlsplit(url).path)) if found else Path(url)
        return "", path.resolve().parts
    parts = tuple([part for part in unquote(rest).split("/") if part])
    if ".." in parts:
        raise ConfigurationError(f"{url[:200]!r} has the part '..'", why="it could lead anywhere", todo="leave it out")
    return scheme, parts
