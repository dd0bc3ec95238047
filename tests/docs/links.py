"""README.md's links: a package index shows it without the repository, so they must be absolute.

python -m tests.docs.links https://host/owner/name   write the repository's address into setup.cfg
                                                     and README.md
python -m tests.docs.links                           make new links in README.md absolute
"""

from __future__ import annotations

import configparser
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]
BRANCH = "main"

#: [text](target), but not in a fenced block.
_LINK = re.compile(r"(?P<block>^```.*?^```$)|\]\((?P<target>[^)\s]+)\)", re.DOTALL | re.MULTILINE)


def repository() -> str:
    """Return the address of the repository that setup.cfg names, or "" as long as it names none."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    urls = config.get("metadata", "project_urls", fallback="")
    return dict(re.findall(r"^(\w+) = (\S+)$", urls, re.MULTILINE)).get("Source", "")


def project_urls(base: str) -> str:
    """Return the lines of setup.cfg for a repository at this address."""
    return (
        "project_urls =\n"
        f"    Source = {base}\n"
        f"    Documentation = {base}/blob/{BRANCH}/docs/index.md\n"
        f"    Changelog = {base}/blob/{BRANCH}/CHANGELOG.md\n"
        f"    Issues = {base}/issues\n"
        "    Machinery = https://github.com/RichardKnop/machinery\n"
    )


def targets(text: str) -> list[str]:
    """Return the targets of all links of a page."""
    return [found["target"] for found in _LINK.finditer(text) if found["target"]]


def is_outside(target: str) -> bool:
    """Say whether the target is a whole address."""
    return target.startswith(("https://", "http://"))


def local(target: str, base: str) -> str:
    """Return the repository path that an absolute link leads to; other targets as they are."""
    prefix = rf"{re.escape(base)}/(?:blob|raw|tree)/{BRANCH}/"
    return re.sub(f"^{prefix}", "", target) if base else target


def absolute(text: str, base: str) -> str:
    """Return the page, at the root of the repository, with all its links absolute."""

    def written(found: re.Match[str]) -> str:
        target = found["target"]
        if target is None or is_outside(target) or target.startswith("#"):
            return found[0]
        kind = "tree" if (ROOT / target.partition("#")[0]).is_dir() else "blob"
        if target.endswith((".png", ".svg")):
            kind = "raw"  # the picture itself, not the page that shows it
        return f"]({base}/{kind}/{BRANCH}/{target})"

    return _LINK.sub(written, text)


def main(base: str) -> None:
    """Write the repository's address, if given, and make all links of README.md absolute."""
    before, setup = repository(), ROOT / "setup.cfg"
    base = base.rstrip("/") or before
    if not is_outside(base):
        sys.exit("setup.cfg names no repository; give its address: https://host/owner/name")
    text = setup.read_text(encoding="utf-8")
    text = re.sub(r"^project_urls =\n(    .*\n)+", "", text, flags=re.MULTILINE)
    text = text.replace("license_expression =", project_urls(base) + "license_expression =", 1)
    setup.write_text(text, encoding="utf-8")
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    if before:
        text = text.replace(f"]({before}/", f"]({base}/")
    readme.write_text(absolute(text, base), encoding="utf-8")


if __name__ == "__main__":
    main("".join(sys.argv[1:2]))
