"""Hooks of MkDocs: the site gets the files that pages link to, and an API page from docstrings.

Pages are written to be read in the repository as well: they link to `../../examples/…`, where it is
there. In the site these files are under `project/`.
"""

from __future__ import annotations

import os
import pathlib
import re
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
OUTSIDE = "project/"
API = "reference/python.md"
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Add the API page, and every file outside of docs/ that a page leads to."""
    from machinery_py import __all__ as names

    shown = "".join(f"::: machinery_py.{name}\n\n" for name in names if name != "__version__")
    files.append(File.generated(config, API, content=f"# Python API\n\n{shown}"))
    pages, added = list(DOCS.rglob("*.md")), set()
    while pages:
        page = pages.pop()
        for link in _LINK.findall(page.read_text()):
            found = _file_of(link, page)
            if found is not None and found not in added and DOCS not in found.parents:
                added.add(found)
                files.append(File.generated(config, _place_of(found), abs_src_path=str(found)))
                pages += [found] if found.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let the links lead to where the files are in the site."""
    place = page.file.src_uri
    source = ROOT / place.removeprefix(OUTSIDE) if place.startswith(OUTSIDE) else DOCS / place

    def led(link: re.Match[str]) -> str:
        found = _file_of(link[0], source)
        return os.path.relpath(_place_of(found), os.path.dirname(place)) if found else link[0]

    return _LINK.sub(led, markdown)


def _file_of(link: str, page: pathlib.Path) -> pathlib.Path | None:
    """Return the file of the project that is linked to; of a folder its README."""
    found = (page.parent / link).resolve()
    if found.is_dir():
        found /= "README.md"
    return found if found.is_file() and ROOT in found.parents else None


def _place_of(file: pathlib.Path) -> str:
    """Return its path in the site."""
    if DOCS in file.parents:
        return file.relative_to(DOCS).as_posix()
    return OUTSIDE + file.relative_to(ROOT).as_posix()
