"""Hook of MkDocs: links from a page to files outside docs/, or to a folder, lead to the repository's address.

On GitHub and in an editor the same links work as they stand.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return a page's text with its links to the repository's other files made absolute; MkDocs calls it."""
    return absolute_links(markdown, str(page.file.src_uri), str(config.repo_url))


def absolute_links(markdown: str, page: str, repository: str) -> str:
    """Return a page's text with links that leave docs/, or that name a folder, made addresses of the repository."""

    def replaced(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link[1]))
        is_folder = (DOCS.parent / path).is_dir()
        if path.startswith("docs/") and not is_folder:
            return link[0]
        return f"]({repository.rstrip('/')}/{'tree' if is_folder else 'blob'}/main/{path}{link[2] or ''})"

    return _LINK.sub(replaced, markdown)
