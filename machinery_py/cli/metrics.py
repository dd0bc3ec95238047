"""GET /metrics of a worker: what all its processes have counted, together.

    <folder>/<kind>_<pid>.db      counts of a process, in prometheus_client's multiprocess mode
    <folder>/<kind>_ended.db      counts of all processes that have ended

Files of ended processes are added up, for task processes may come and go by the thousand. A gauge
of an ended process is no more, unless it is the least, the most, the last or the sum of all.

The folder is in memory where the system has one, since a mapped file on a full disk kills whoever
writes into it. It is removed with the supervisor, or by the next one if that was killed. A folder
that the user has named stays, and nothing is added up in it: others may count there, too.
"""

from __future__ import annotations

import glob
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from machinery_py.errors import ConfigError
from machinery_py.texts import get_logger

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from machinery_py.cli.http import Page
    from machinery_py.server import Server

logger = get_logger(__name__)

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
IN_MEMORY = "/dev/shm"
NAME = "machinery-metrics-"
ROOM = 16 * 2**20  # bytes that must be free there, else TMPDIR is used
TIDY_EVERY = 60.0  # seconds
ENDED = "ended"

Count = tuple[float, float]  # value, unix time of a gauge that keeps its last


def install(server: Server) -> None:
    """Count what this process does, if prometheus-client is installed."""
    try:
        from machinery_py.contrib import prometheus
    except ImportError:
        return
    prometheus.install(server)


def page(registry: Callable[[], CollectorRegistry], accepted: str) -> Page:
    """Return the answer to GET /metrics for this Accept header."""
    try:
        from prometheus_client.exposition import choose_encoder
    except ImportError:
        text = "no metrics: prometheus-client is missing (pip install 'machinery_py[metrics]')"
        return 404, "text/plain; charset=utf-8", text.encode()
    encode, content_type = choose_encoder(accepted)
    return 200, content_type, encode(registry())


def own_page(accepted: str) -> Page:
    """Return what this process alone has counted."""

    def registry() -> CollectorRegistry:
        from prometheus_client import REGISTRY

        return REGISTRY

    return page(registry, accepted)


class ProcessCounts:
    """The folder and what is counted in it. Processes that are started from now on know of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[str, dict[str, Count]] = {}  # kind → key of prometheus_client → sum
        self._unwritten: set[str] = set()  # kinds whose sums are not in their file yet
        self._tidy_at = time.monotonic() + TIDY_EVERY
        self._hold = -1
        self._folder = os.environ.get(VARIABLE, "")
        self.is_ours: bool = not self._folder
        if self.is_ours:
            self._folder, self._hold = _new_folder()
            os.environ[VARIABLE] = self._folder
        elif not os.path.isdir(self._folder):
            raise ConfigError(f"{VARIABLE}: no folder {self._folder!r} (make it, or unset it)")

    def __enter__(self) -> ProcessCounts:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_ours:
            del os.environ[VARIABLE]
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._hold)

    def page(self, accepted: str) -> Page:
        """Return the answer to GET /metrics."""

        def registry() -> CollectorRegistry:
            from prometheus_client import CollectorRegistry
            from prometheus_client.multiprocess import MultiProcessCollector

            class Collector(MultiProcessCollector):
                """Leaves out the files that a process has just made: they are empty yet."""

                def collect(self) -> Any:
                    paths = glob.glob(os.path.join(glob.escape(folder), "*.db"))
                    written = list(filter(os.path.getsize, paths))
                    return self.merge(written)  # type: ignore[no-untyped-call]  # it has no types

            found, folder = CollectorRegistry(), self._folder
            Collector(found, folder)  # type: ignore[no-untyped-call]  # it has no types
            return found

        with self._lock:
            self._add_up()
            return page(registry, accepted)

    def tidy(self) -> None:
        """Add up files of ended processes, now and then, also if nobody asks for /metrics."""
        if time.monotonic() >= self._tidy_at and self._lock.acquire(blocking=False):
            try:
                self._tidy_at = time.monotonic() + TIDY_EVERY
                self._add_up()
            except Exception:  # no room, or somebody has removed the folder: the workers must go on
                logger.exception("files of metrics in %s cannot be added up", self._folder)
            finally:
                self._lock.release()

    def _add_up(self) -> None:
        for name in os.listdir(self._folder) if self.is_ours else ():
            kind, _, pid = name.removesuffix(".db").rpartition("_")
            if pid.isdigit() and not _is_alive(int(pid)):
                path = os.path.join(self._folder, name)
                if not kind.startswith("gauge_live") and kind != "gauge_all":
                    self._add(kind, path)
                os.unlink(path)
        while self._unwritten:
            kind = next(iter(self._unwritten))
            path = os.path.join(self._folder, f"{kind}_{ENDED}.db")
            with open(f"{path}.draft", "wb") as file:
                file.write(_packed(self._ended[kind]))
            os.replace(file.name, path)
            self._unwritten.discard(kind)

    def _add(self, kind: str, path: str) -> None:
        from prometheus_client.mmap_dict import MmapedDict

        with suppress(struct.error, RuntimeError, ValueError):  # it was killed as it wrote
            reading = MmapedDict.read_all_values_from_file(path)  # type: ignore[no-untyped-call]  # as above
            counts = list(reading)
            sums = self._ended.setdefault(kind, {})
            for key, value, at, _ in counts:
                sums[key] = _sum(kind, sums[key], (value, at)) if key in sums else (value, at)
            self._unwritten.add(kind)


def _packed(sums: Mapping[str, Count]) -> bytes:
    """Return the sums as a file of prometheus_client.

    Written by its own class, through a mapping, a full disk would kill the supervisor.
    """
    entries = []
    for key, count in sums.items():
        text = key.encode()
        padded = text + b" " * (8 - (len(text) + 4) % 8)
        entries.append(struct.pack(f"=i{len(padded)}sdd", len(text), padded, *count))
    body = b"".join(entries)
    return struct.pack("=ii", 8 + len(body), 0) + body


def _sum(kind: str, one: Count, other: Count) -> Count:
    match kind:
        case "gauge_min":
            return min(one, other)
        case "gauge_max":
            return max(one, other)
        case "gauge_mostrecent":
            return max(one, other, key=lambda count: count[1])
        case _:
            return one[0] + other[0], 0.0


def _is_alive(pid: int) -> bool:
    with suppress(OSError):  # gone, or another user's by now
        os.kill(pid, 0)
        return True
    return False


def _new_folder() -> tuple[str, int]:
    """Make a folder, and return it with the descriptor of its lock, which ends with this process.

    Raises:
        ConfigError: it cannot be made.
    """
    import fcntl  # Windows, which has no supervisor, lacks it

    bases, why = (IN_MEMORY, tempfile.gettempdir()), ""
    for base in bases:
        try:
            _remove_left(base)
            if base == IN_MEMORY and shutil.disk_usage(base).free < ROOM:
                continue
            # Under its name only when it is locked: another supervisor may be looking just now.
            draft = tempfile.mkdtemp(prefix=f".{NAME}", dir=base)
            lock = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = os.path.join(base, os.path.basename(draft).removeprefix("."))
            os.rename(draft, folder)
            return folder, lock
        except OSError as error:
            why = str(error)
    raise ConfigError(f"no folder for metrics can be made in {' or '.join(bases)}: {why}")


def _remove_left(base: str) -> None:
    """Remove folders whose lock is free: their supervisor was killed."""
    import fcntl

    for old in glob.glob(os.path.join(glob.escape(base), f"{NAME}*")):
        with suppress(OSError):  # another user's, or in use
            lock = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old, ignore_errors=True)
            finally:
                os.close(lock)
