"""Health of workers: heartbeat files, and the probe that reads them.

    $TMPDIR/machinery-<uid>/<app>/<pid>.json    written anew every BEAT, removed at the end

While a task holds the interpreter of a worker process, its supervisor writes the file: that worker
is alive, stalled, and not ready.

The folders are this user's alone; <app> is a hash of the app's name and the working directory. A
file that the user has named may be in a folder of everybody: it is made anew and moved into its
place each time, with mode 0600, and neither side follows a link.

Alive asks the worker alone: a broker that is away must not get workers restarted. Ready asks about
the broker, too.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import hashlib
import json
import os
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from machinery_py.cli.output import answer, length, note
from machinery_py.connections import proc
from machinery_py.connections.session_files import is_private
from machinery_py.texts import get_logger

logger = get_logger(__name__)

BEAT = 2.5  # seconds
MAX_AGE = 15.0  # seconds

# No link, and no waiting for somebody to write into a named pipe.
_UNFOLLOWED = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

_DRAFT = "[0-9a-f]" * 16 + ".draft"  # as a pattern; the end of a draft's name


@dataclass(frozen=True, slots=True)
class HeartbeatPlace:
    """The folder of an app's heartbeats, or the file that the user has named."""

    folder: str
    file: str = ""

    def path(self, label: str, pid: int) -> str:
        """Return the file of a process. `label`: its number below a supervisor, or ""."""
        if not self.file:
            return os.path.join(self.folder, f"{pid}.json")
        return f"{self.file}.{label}" if label else self.file

    def files(self) -> list[str]:
        """Return the files that there are."""
        if self.file:
            found = [self.file] if os.path.exists(self.file) else []
            found += glob.glob(f"{glob.escape(self.file)}.*")
            return sorted(one for one in found if one == self.file or _number(one).isdigit())
        if not is_private(self.folder):
            return []
        return sorted(glob.glob(os.path.join(glob.escape(self.folder), "*.json")))

    def drafts(self) -> list[str]:
        """Return the drafts that killed processes have left.

        Other workers write in the folder: drafts there must be old.
        """
        if self.file:
            found = glob.glob(f"{glob.escape(self.file)}.*.{_DRAFT}")
            return _drafts(self.file) + [one for one in found if one.split(".")[-3].isdigit()]
        if not is_private(self.folder):
            return []
        found = glob.glob(os.path.join(glob.escape(self.folder), f"*.json.{_DRAFT}"))
        return [one for one in found if _age(one) > MAX_AGE]


def _number(path: str) -> str:
    return path.rpartition(".")[2]


def _drafts(path: str) -> list[str]:
    return glob.glob(f"{glob.escape(path)}.{_DRAFT}")


def _age(path: str) -> float:
    try:
        return time.time() - os.stat(path, follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def place_of(args: argparse.Namespace) -> HeartbeatPlace:
    """Return the place for these arguments, the same for `machinery worker` and `health`."""
    names = "\0".join([args.app, os.path.realpath(args.app_dir or "."), os.path.realpath(".")])
    key = hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return HeartbeatPlace(
        os.path.join(_base(), key),
        os.path.abspath(args.heartbeat_file) if args.heartbeat_file else "",
    )


def _base() -> str:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return os.path.join(tempfile.gettempdir(), f"machinery-{user}")


# Writing


class Pulse:
    """A thread that writes the heartbeat of one worker; a broker that hangs does not stop it.

    Args:
        is_ready: whether the broker answers.
    """

    def __init__(
        self,
        place: HeartbeatPlace,
        *,
        label: str,
        worker: str,
        is_ready: Callable[[], bool],
    ) -> None:
        self._place = place
        self._path = place.path(label, os.getpid())
        self._worker = worker
        self._is_ready = is_ready
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="machinery-heartbeat", daemon=True)
        self._has_failed = False

    def __enter__(self) -> Pulse:
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=BEAT)
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        if not self._place.file:
            with contextlib.suppress(OSError):  # others are still in it
                os.rmdir(self._place.folder)

    def _work(self) -> None:
        # Soon after the start, so that "ready" does not lag behind by a whole beat.
        pause = BEAT / 10
        while not self._stop.wait(pause):
            with contextlib.suppress(MemoryError):  # a task has it all, for now
                self._beat()
            pause = min(BEAT, pause * 2)

    def _beat(self) -> None:
        pid = os.getpid()
        is_ready = self._is_ready()
        started = proc.started_at(pid)
        beat = {"worker": self._worker, "pid": pid, "started": started, "ready": is_ready}
        try:
            _write(self._place, self._path, beat)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                why = error.strerror or error
                logger.warning("heartbeat file %r cannot be written: %s", self._path, why)
            self._has_failed = True


def _write(place: HeartbeatPlace, path: str, beat: dict[str, Any]) -> None:
    if not place.file:
        for folder in (_base(), place.folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            if not is_private(folder):
                raise PermissionError(1, f"folder {folder!r} is not this user's alone")
    # Written beside it and moved, so that a probe never reads half of it; under a name that nobody
    # can foresee and put a link at.
    draft = f"{path}.{secrets.token_hex(8)}.draft"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(beat, file)
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def beat_for(place: HeartbeatPlace, *, label: str, pid: int) -> None:
    """Write the heartbeat of a process that lives and is stalled, if it has written one before."""
    path = place.path(label, pid)
    with contextlib.suppress(OSError, ValueError):
        with open(os.open(path, _UNFOLLOWED), encoding="utf-8") as file:
            beat = json.load(file)
        _write(place, path, {**beat, "ready": False, "stalled": True})


def forget(place: HeartbeatPlace, *, label: str, pid: int) -> None:
    """Remove the heartbeat of a process that was killed, perhaps while it wrote."""
    path = place.path(label, pid)
    for one in (path, *_drafts(path)):
        with contextlib.suppress(OSError):
            os.unlink(one)


def clear(place: HeartbeatPlace) -> None:
    """Remove drafts of killed workers, and their heartbeats from files that the user has named."""
    files = place.files() if place.file else []
    left = [path for path in files if _read(path, same_machine=False) is not None]
    for path in left + place.drafts():
        with contextlib.suppress(OSError):
            os.unlink(path)


# Reading


@dataclass(frozen=True, slots=True)
class Beat:
    """The last heartbeat of a worker. `age`: seconds since then."""

    worker: str
    pid: int
    age: float
    ready: bool
    stalled: bool


@dataclass(frozen=True, slots=True)
class Beats:
    """The heartbeats of an app. All workers must be well, so that one that hangs is seen."""

    found: tuple[Beat, ...]
    max_age: float

    @property
    def is_live(self) -> bool:
        return bool(self.found) and all(beat.age <= self.max_age for beat in self.found)

    @property
    def is_ready(self) -> bool:
        return self.is_live and all(beat.ready for beat in self.found)


def read_beats(place: HeartbeatPlace, *, max_age: float = MAX_AGE) -> Beats:
    """Read the heartbeats, without those of killed workers."""
    found = [_read(path, same_machine=not place.file) for path in place.files()]
    return Beats(tuple(one for one in found if one), max_age)


def _read(path: str, *, same_machine: bool) -> Beat | None:
    try:
        with open(os.open(path, _UNFOLLOWED), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if not (stat.S_ISREG(found.st_mode) and _is_trusted(found.st_uid)):
                return None
            content: dict[str, Any] = json.load(file)
            age = time.time() - found.st_mtime
        beat = Beat(
            worker=str(content["worker"]),
            pid=int(content["pid"]),
            age=abs(age),
            ready=content["ready"] is True,
            stalled=content.get("stalled") is True,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # A file that was named may be read from another container, where process numbers mean something
    # else.
    if (
        same_machine
        and os.path.isdir("/proc/self")
        and proc.started_at(beat.pid) != content.get("started")
    ):
        return None
    return beat


def _is_trusted(owner: int) -> bool:
    """Whether its heartbeat is believed: our own and root's; root believes all."""
    return not hasattr(os, "getuid") or os.getuid() == 0 or owner in (0, os.getuid())


def health(args: argparse.Namespace) -> int:
    """Run `machinery health`: 0 alive (and ready, if asked), 1 not."""
    beats = read_beats(place_of(args), max_age=args.max_age)
    workers = [asdict(beat) for beat in beats.found]
    lines = [
        f"worker {beat.worker} (pid {beat.pid}): last beat {length(beat.age)} ago, "
        f"{'' if beat.ready else 'not '}ready" + (" (stalled)" if beat.stalled else "")
        for beat in beats.found
    ]
    if lines or args.json:
        record = {"alive": beats.is_live, "ready": beats.is_ready, "workers": workers}
        answer(args, record, "\n".join(lines))
    else:
        note(
            f"no worker of {args.app!r} has a heartbeat here (it is looked for by app, --app-dir, "
            "working directory, user and TMPDIR)"
        )
    return 0 if (beats.is_ready if args.ready else beats.is_live) else 1
