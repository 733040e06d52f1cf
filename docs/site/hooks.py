"""MkDocs hooks: README.md, which lies beside docs/, becomes the first page of the site.

There and on GitHub the same links work: one to a page is made relative to the site, one to any other file of the
repository must name a file that exists, and stands as plain text on the site, which does not hold the code.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = sorted(path.name for path in ROOT.glob("*.md"))
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages beside docs/."""
    for name in OUTSIDE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site; warn (strictly an error) of those to a file that does not exist."""
    folder = ROOT if page.file.src_uri in OUTSIDE else ROOT / "docs"

    def on_site(link: re.Match[str]) -> str:
        path = os.path.relpath(folder / link["target"], ROOT)
        if not (ROOT / path).exists():
            log.warning("%s: links to %s, which does not exist", page.file.src_uri, path)
        name = path.removeprefix("docs/")
        is_page = path in OUTSIDE or (path.startswith("docs/") and files.get_file_from_path(name))
        return f"[{link['text']}]({name}{link['anchor'] or ''})" if is_page else link["text"]

    return LINK.sub(on_site, markdown)
