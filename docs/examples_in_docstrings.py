"""A Griffe extension: `>>>` examples of docstrings are code blocks on the pages that `make docs` builds."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?m)^( *)>>> .*(?:\n(?! *$).*)*")


class Examples(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        mark(pkg)


def mark(found: griffe.Object) -> None:
    if found.docstring is not None and "```pycon" not in found.docstring.value:
        found.docstring.value = EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", found.docstring.value)
    for member in found.members.values():
        if isinstance(member, griffe.Object):
            mark(member)
