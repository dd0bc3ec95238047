"""`--reload`: start the worker processes again when a .py file changes. For development.

The supervisor watches all .py files below the app's folder, and those that its processes have
loaded from elsewhere and reported.
"""

from __future__ import annotations

import contextlib
import os
import site
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator

from machinery_py.cli.output import at_home
from machinery_py.texts import get_logger

logger = get_logger(__name__)

INTERVAL = 0.5  # seconds between two scans of the files
SETTLE = 0.1  # seconds without a further change before the restart: editors write in steps
GRACE = 5.0  # seconds that running tasks get after a change; they run again in the new process

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})

Snapshot = dict[str, tuple[int, int]]


class Files:
    """The files that are watched. Belongs to one thread.

    Attributes:
        scan_at: the moment of the next scan.
    """

    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(folder)
        self._others: set[str] = set()
        self._before = self._latest = self._scan()
        self.scan_at: float = 0.0

    def add(self, path: str) -> None:
        """Watch this file, too."""
        self._others.add(path)
        for found, now in _stat([path]).items():
            self._before.setdefault(found, now)

    def have_changed(self) -> bool:
        """Scan if it is time to; return whether files have changed, and no more do."""
        now = time.monotonic()
        if now < self.scan_at:
            return False
        found = self._scan()
        is_settled, self._latest = found == self._latest, found
        if found == self._before or not is_settled:
            self.scan_at = now + (INTERVAL if found == self._before else SETTLE)
            return False
        self.scan_at = now + INTERVAL
        before, self._before = self._before, found
        changed = sorted(
            path for path in before.keys() | found.keys() if before.get(path) != found.get(path)
        )
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        logger.info("%s changed%s: starting again", at_home(changed[0]), more)
        return True

    def _scan(self) -> Snapshot:
        return _stat((*python_files(self._folder), *self._others))


def _stat(paths: Iterable[str]) -> Snapshot:
    """Return time and size of each file that exists."""
    found: Snapshot = {}
    for path in paths:
        with contextlib.suppress(OSError):
            now = os.stat(path)
            found[path] = (now.st_mtime_ns, now.st_size)
    return found


def python_files(folder: str) -> Iterator[str]:
    """Yield the .py files below the folder, without hidden folders, environments and packages."""
    for root, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED
            and not os.path.exists(os.path.join(root, name, "pyvenv.cfg"))
        ]
        for name in files:
            if name.endswith(".py"):
                yield os.path.join(root, name)


# In the worker


def loaded_files() -> set[str]:
    """Return the files of the loaded modules that belong neither to Python nor to a package."""
    folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    installed = tuple(os.path.realpath(folder) + os.sep for folder in folders)
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return {
        os.path.abspath(file)
        for file in files
        if isinstance(file, str) and file.endswith(".py")
        if not os.path.realpath(file).startswith(installed)
    }


class FileReport:
    """Tells the supervisor which files this process has loaded since the last time."""

    def __init__(self, tell: Callable[[str], bool]) -> None:
        self._tell = tell
        self._told: set[str] = set()

    def send(self) -> None:
        new = loaded_files() - self._told
        self._told |= new
        for path in sorted(new):
            self._tell(f"file {path}")
