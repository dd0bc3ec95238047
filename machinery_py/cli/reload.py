"""`--reload`: the worker is started again when a .py file changes. For development.

The parent looks at all .py files below the app's folder, and at those that the worker says it has loaded from elsewhere. A module
that cannot be imported ends the worker, which shows why; the parent waits for the next change then.
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
from machinery_py.cli.processes import RUN, STOP, STOP_NOW, Child, Orders, ParentPipe, how_it_ended
from machinery_py.connections import descriptors
from machinery_py.texts import get_logger

logger = get_logger(__name__)

LOOK = 0.5  # seconds between two looks at the files
SETTLE = 0.1  # seconds without a further change before the worker is started again: editors write in steps
GRACE = (
    5.0  # seconds that running tasks get when a file has changed; they run again in the new worker
)
PATIENCE = 5.0  # seconds until a worker that does not end is killed
TELL = 1.0  # seconds between two looks for modules that were loaded later

_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})

Snapshot = dict[str, tuple[int, int]]


def run(args: argparse.Namespace, link: ParentPipe) -> int:
    """`machinery worker --reload`."""
    reloader = Reloader(args)
    Orders(link).follow(reloader.on_order)
    return reloader.run()


class Reloader:
    """Runs in the main thread of a process of its own, which imports none of the user's code."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._folder = os.path.abspath(args.app_dir or ".")
        self._told, self._tell = os.pipe()
        os.set_blocking(self._told, False)
        self._others: set[str] = set()
        self._unread = b""
        self._level = RUN
        self._ordered = threading.Event()

    def on_order(self, level: int) -> None:
        """Called in another thread."""
        self._level = max(self._level, level)
        self._ordered.set()

    def run(self) -> int:
        """Until it is told to stop, or the worker has ended in good order; the worker's exit code."""
        before = self._look()
        child: Child | None = self._start()
        while True:
            self._ordered.wait(LOOK if child is None or child.ended() is None else 0)
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
            for path, now in _stat(self._read_told()).items():
                before.setdefault(path, now)
            after = self._look()
            if after != before:
                before = self._settled(before, after)
                if child is not None:
                    self._stop(child, GRACE)
                child = None if self._level else self._start()

    def _start(self) -> Child:
        words = ["--reloaded", str(self._tell), *self._args.argv]
        return Child(words, label="reload", pass_on=[self._tell], is_at_terminal=True)

    def _stop(self, child: Child, grace: float | None) -> int:
        """Let the child end, and make it end; its exit code."""
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

    def _look(self) -> Snapshot:
        return _stat((*python_files(self._folder), *self._others))

    def _settled(self, before: Snapshot, after: Snapshot) -> Snapshot:
        """Wait until nothing changes any more, and say what did."""
        while True:
            changed = sorted(
                path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
            )
            if self._ordered.wait(SETTLE):
                return after
            latest = self._look()
            if latest == after:
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                logger.info(
                    "%s changed%s: starting again",
                    at_home(changed[0]) if changed else "a file",
                    more,
                )
                return after
            after = latest

    def _read_told(self) -> set[str]:
        """The files that the worker has told since the last time."""
        with contextlib.suppress(OSError):
            while chunk := os.read(self._told, 65536):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        new = {os.fsdecode(line) for line in lines} - self._others
        self._others |= new
        return new


def _stat(paths: Iterable[str]) -> Snapshot:
    """How the files are now, without those that are not there."""
    found: Snapshot = {}
    for path in paths:
        with contextlib.suppress(OSError):
            now = os.stat(path)
            found[path] = (now.st_mtime_ns, now.st_size)
    return found


def python_files(folder: str) -> Iterator[str]:
    """The .py files below the folder, without hidden folders, environments and installed packages."""
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
    """The files of the modules that were loaded and belong neither to Python nor to an installed package."""
    installed = {
        os.path.realpath(path) + os.sep
        for path in (
            sysconfig.get_path("stdlib"),
            sysconfig.get_path("platstdlib"),
            *site.getsitepackages(),
            site.getusersitepackages(),
        )
    }
    found: set[str] = set()
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if (
            isinstance(path, str)
            and path.endswith(".py")
            and not os.path.realpath(path).startswith(tuple(installed))
        ):
            found.add(os.path.abspath(path))
    return found


@contextlib.contextmanager
def telling_files(descriptor: int | None) -> Iterator[None]:
    """Tell the reloading parent which files are loaded: those of this block at its end, whatever it ends in; later ones later."""
    if descriptor is None:
        yield
        return
    os.set_inheritable(descriptor, False)
    descriptors.keep(descriptor)
    told: set[str] = set()
    try:
        yield
    finally:
        _tell(descriptor, told)
    threading.Thread(
        target=_go_on_telling, args=(descriptor, told), name="machinery-reload", daemon=True
    ).start()


def _go_on_telling(descriptor: int, told: set[str]) -> None:
    pause = threading.Event()
    while not pause.wait(TELL):
        if not _tell(descriptor, told):
            return


def _tell(descriptor: int, told: set[str]) -> bool:
    new = loaded_files() - told
    told |= new
    try:
        for path in sorted(new):
            os.write(descriptor, os.fsencode(path) + b"\n")
    except OSError:
        return False  # the parent is gone
    return True
