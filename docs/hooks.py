"""MkDocs hooks: add the pages of the repository root to the site, and keep links between them and docs/ working."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

#: Files outside of docs/ that are part of the site, and their names in it.
FILES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "models/python-stdlib/README.md": "python-stdlib.md",
    "models/python-stdlib/curves.png": "curves.png",
}
_NAMES = {name: path for path, name in FILES.items()}
_LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    for path, name in FILES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = (ROOT / _NAMES.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def renamed(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        path = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
        return f"]({FILES.get(path, path.removeprefix('docs/'))}" if path else match[0]

    return _LINK.sub(renamed, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Drop Sphinx roles of docstrings, such as ``:func:``, which Markdown shows as text."""
    return re.sub(r":(?:func|class|meth|mod|data|attr|obj):(?=<code>)", "", html)
