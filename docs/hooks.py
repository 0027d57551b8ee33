"""What `make docs` does beyond MkDocs: parts of pages come from the code (generated.py), and links to files outside of
docs/ become pages that show the file.

On GitHub such a link opens the file. The site has no other host to send its readers to, so it contains each linked file
as a page below source/. A link to a file that does not exist is a warning, which --strict makes an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from generated import fresh  # MkDocs loads a hook with its folder on the path
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s#]+)(?=[)#])")
FENCES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".proto": "protobuf", ".sh": "sh", ".md": "markdown"}
log = logging.getLogger("mkdocs.hooks.shardyard")


def on_files(files: Files, config: Any) -> Files:
    for page in list(files.documentation_pages()):
        for target in LINK.findall(page.content_string):
            outside = _outside(page.src_uri, target)
            if outside and (ROOT / outside).exists() and not files.get_file_from_path(_page_of(outside)):
                files.append(File.generated(config, _page_of(outside), content=_shown(outside)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def redirect(match: re.Match[str]) -> str:
        outside = _outside(page.file.src_uri, match[1])
        if not outside:
            return match[1]
        if not (ROOT / outside).exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, outside)
        return posixpath.relpath(_page_of(outside), posixpath.dirname(page.file.src_uri))

    return LINK.sub(redirect, fresh(markdown))


def _outside(page: str, target: str) -> str:
    """The path from the repository's root that a link leads to, if that is outside of docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return "" if path == "docs" or path.startswith("docs/") else path


def _page_of(path: str) -> str:
    return f"source/{path}.md"


def _shown(path: str) -> str:
    where = ROOT / path
    lines = sorted(child.name for child in where.iterdir()) if where.is_dir() else where.read_text().splitlines()
    fence = "" if where.is_dir() else FENCES.get(where.suffix, "")
    return "\n".join(["---", "search:", "  exclude: true", "---", f"# {path}", "", f"~~~~{fence}", *lines, "~~~~", ""])
