"""Names of modules by patterns, as torch's `parallelize_module` takes them: each part of a name by itself."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """
    >>> matching(["blocks", "blocks.0", "blocks.0.up", "head.0.up"], "blocks.*")
    ['blocks.0']
    """
    parts = pattern.split(".")
    return [
        name for name in names if len(found := name.split(".")) == len(parts) and all(map(fnmatchcase, found, parts))
    ]
