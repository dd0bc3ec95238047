"""`--reload`: start the worker again when a .py file changes. For development.

The parent watches all .py files below the app's folder, and those that the worker has loaded from
elsewhere and reported. A module that cannot be imported ends the worker, which shows why; the
parent waits for the next change then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Iterator

from machinery_py.cli.output import at_home
from machinery_py.cli.processes import (
    RUN,
    STOP,
    STOP_NOW,
    Child,
    Orders,
    ParentPipe,
    how_it_ended,
)
from machinery_py.connections import descriptors
from machinery_py.connections.lines import LineReader
from machinery_py.texts import get_logger

logger = get_logger(__name__)

INTERVAL = 0.5  # seconds between two scans of the files
SETTLE = 0.1  # seconds without a further change before the restart: editors write in steps
GRACE = 5.0  # seconds that running tasks get after a change; they run again in the new worker
PATIENCE = 10.0  # seconds until a worker that does not end is killed; its supervisor kills first
REPORT = 1.0  # seconds between two reports of modules that were loaded later

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})

Snapshot = dict[str, tuple[int, int]]


def run(args: argparse.Namespace, pipe: ParentPipe) -> int:
    """Run `machinery worker --reload`."""
    reloader = Reloader(args)
    Orders(pipe).follow(reloader.on_order)
    return reloader.run()


class Reloader:
    """The parent; it runs in the main thread and imports none of the user's code."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._folder = os.path.abspath(args.app_dir or ".")
        reports, self._reports_in = os.pipe()
        self._reports = LineReader(reports)
        self._others: set[str] = set()
        self._level = RUN
        self._ordered = threading.Event()

    def on_order(self, level: int) -> None:
        """Take an order to stop; called in another thread."""
        self._level = max(self._level, level)
        self._ordered.set()

    def run(self) -> int:
        """Run until an order to stop or a worker's end in good order; return its exit code."""
        before = self._scan()
        child: Child | None = self._start()
        while True:
            self._ordered.wait(INTERVAL if child is None or child.ended() is None else 0)
            if self._level:
                return 0 if child is None else self._stop(child, self._args.shutdown_timeout)
            if child is not None and (code := child.ended()) is not None:
                child.close()
                child = None
                if code == 0:
                    return 0
                logger.error(
                    "the worker has ended: %s; waiting until a file changes", how_it_ended(code)
                )
            for path, now in _stat(self._reported()).items():
                before.setdefault(path, now)
            after = self._scan()
            if after != before:
                before = self._settled(before, after)
                if child is not None:
                    self._stop(child, GRACE)
                child = None if self._level else self._start()

    def _start(self) -> Child:
        words = ["--reloaded", str(self._reports_in), *self._args.argv]
        return Child(words, label="reload", pass_on=[self._reports_in], is_at_terminal=True)

    def _stop(self, child: Child, grace: float | None) -> int:
        """Let the child end, then kill it; return its exit code."""
        grace = 30.0 if grace is None else grace
        deadline = time.monotonic() + grace
        child.order(max(STOP, self._level))
        while (code := child.ended()) is None:
            self._ordered.clear()
            if self._level == STOP_NOW or time.monotonic() >= deadline:
                child.order(STOP_NOW)
            if time.monotonic() >= deadline + PATIENCE:
                child.kill()
            self._ordered.wait(0.05)
        child.close()
        return code if code >= 0 else 1

    # Files

    def _scan(self) -> Snapshot:
        return _stat((*python_files(self._folder), *self._others))

    def _settled(self, before: Snapshot, after: Snapshot) -> Snapshot:
        """Wait until nothing changes any more, and log what did."""
        while True:
            changed = sorted(
                path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
            )
            if self._ordered.wait(SETTLE):
                return after
            latest = self._scan()
            if latest == after:
                first = at_home(changed[0]) if changed else "a file"
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                logger.info("%s changed%s: starting again", first, more)
                return after
            after = latest

    def _reported(self) -> set[str]:
        """Return the files that the worker has reported since the last time."""
        new = set(map(os.fsdecode, self._reports.read())) - self._others
        self._others |= new
        return new


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


@contextlib.contextmanager
def telling_files(descriptor: int | None) -> Iterator[None]:
    """Report the files that this block loads to the reloading parent, then those loaded later.

    Also if the block raises: its files may be the reason.
    """
    if descriptor is None:
        yield
        return
    os.set_inheritable(descriptor, False)
    descriptors.keep(descriptor)
    told: set[str] = set()

    def report() -> None:
        new = loaded_files() - told
        told.update(new)
        for path in sorted(new):
            os.write(descriptor, os.fsencode(path) + b"\n")

    def go_on() -> None:
        with contextlib.suppress(OSError):  # the parent is gone
            while True:
                time.sleep(REPORT)
                report()

    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            report()
    threading.Thread(target=go_on, name="machinery-reload", daemon=True).start()
