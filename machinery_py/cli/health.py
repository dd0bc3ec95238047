"""Whether workers live: heartbeat files, the probe that reads them, and HTTP for those who cannot run a command.

    $TMPDIR/machinery-<uid>/<app>/<pid>.json    written anew every BEAT by each worker, and gone when it ends

The folders are this user's alone; <app> is a hash of the app's name and the working directory. A file that the user has named may
be in a folder of everybody: it is made anew and put in its place each time, with mode 0600, and neither side follows a link.

Alive is a question to the worker alone: a broker that is away must not get workers restarted. Ready asks about the broker, too.
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
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from machinery_py.cli.output import length, to_json
from machinery_py.connections import descriptors
from machinery_py.errors import ConfigError
from machinery_py.texts import get_logger

logger = get_logger(__name__)

BEAT = 2.5  # seconds
MAX_AGE = 15.0  # seconds
HTTP_TIMEOUT = 5.0  # seconds a client may take

# No link, and no waiting for somebody to write into a named pipe.
_UNFOLLOWED = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(frozen=True, slots=True)
class HeartbeatPlace:
    """Where the heartbeats of an app are: in a folder, or where the user wants them."""

    folder: str
    file: str = ""

    def path(self, label: str, pid: int) -> str:
        """The file of a process. `label`: its number below a supervisor, or ""."""
        if not self.file:
            return os.path.join(self.folder, f"{pid}.json")
        return f"{self.file}.{label}" if label else self.file

    def files(self) -> list[str]:
        if self.file:
            numbered = [
                name
                for name in glob.glob(f"{glob.escape(self.file)}.*")
                if name.rpartition(".")[2].isdigit()
            ]
            return sorted([*([self.file] if os.path.exists(self.file) else []), *numbered])
        return (
            sorted(glob.glob(os.path.join(glob.escape(self.folder), "*.json")))
            if is_private(self.folder)
            else []
        )


def place_of(args: argparse.Namespace) -> HeartbeatPlace:
    """The place for these arguments of `machinery worker` or `machinery health`; both must find the same."""
    names = "\0".join([args.app, os.path.realpath(args.app_dir or "."), os.path.realpath(".")])
    key = hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return HeartbeatPlace(
        os.path.join(_base(), key),
        os.path.abspath(args.heartbeat_file) if args.heartbeat_file else "",
    )


def _base() -> str:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return os.path.join(tempfile.gettempdir(), f"machinery-{user}")


def is_private(folder: str) -> bool:
    """Whether the folder is there, is no link, and is this user's alone."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    ours = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o077)
    return stat.S_ISDIR(found.st_mode) and ours


# Writing


class Pulse:
    """Writes the heartbeat of one worker, in a thread of its own: a broker that hangs does not stop it.

    Args:
        is_ready: whether the broker answers.
    """

    def __init__(
        self, place: HeartbeatPlace, *, label: str, worker: str, is_ready: Callable[[], bool]
    ) -> None:
        self._place = place
        self._path = place.path(label, os.getpid())
        self._worker = worker
        self._is_ready = is_ready
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="machinery-heartbeat", daemon=True)
        self._complained = False

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
            self._beat()
            pause = min(BEAT, pause * 2)

    def _beat(self) -> None:
        content = json.dumps(
            {
                "worker": self._worker,
                "pid": os.getpid(),
                "started": started_at(os.getpid()),
                "ready": self._is_ready(),
            }
        )
        try:
            self._write(content)
            self._complained = False
        except OSError as error:
            if not self._complained:
                logger.warning(
                    "heartbeat file %r cannot be written: %s", self._path, error.strerror or error
                )
            self._complained = True

    def _write(self, content: str) -> None:
        if not self._place.file:
            for folder in (_base(), self._place.folder):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, 0o700)
                if not is_private(folder):
                    raise PermissionError(1, f"folder {folder!r} is not this user's alone")
        # Written beside it and moved: a probe never reads half of it. Under a name that nobody can have laid a link under.
        draft = f"{self._path}.{secrets.token_hex(8)}.draft"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(content)
            os.replace(draft, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise


def forget(place: HeartbeatPlace, *, label: str, pid: int) -> None:
    """Remove the heartbeat of a process that was killed."""
    with contextlib.suppress(OSError):
        os.unlink(place.path(label, pid))


def clear(place: HeartbeatPlace) -> None:
    """Remove what workers have left under a name that was given: there may have been more of them, and all must be fresh."""
    for path in place.files() if place.file else ():
        if _read(path, same_machine=False) is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)


def started_at(pid: int) -> str:
    """When a process started, in the system's own unit; "" if there is none or the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


# Reading


@dataclass(frozen=True, slots=True)
class Beat:
    """The last heartbeat of a worker. `age`: seconds ago."""

    worker: str
    pid: int
    age: float
    ready: bool


@dataclass(frozen=True, slots=True)
class Vitals:
    """Health from the heartbeats. All workers must be well: one that hangs is to be seen."""

    beats: tuple[Beat, ...]
    max_age: float

    @property
    def is_live(self) -> bool:
        return bool(self.beats) and all(beat.age <= self.max_age for beat in self.beats)

    @property
    def is_ready(self) -> bool:
        return self.is_live and all(beat.ready for beat in self.beats)


def look(
    place: HeartbeatPlace, *, max_age: float = MAX_AGE, pids: Collection[int] | None = None
) -> Vitals:
    """Read the heartbeats, of these processes only if `pids` is given. What a killed worker left behind counts for nothing."""
    found = [
        beat
        for path in place.files()
        if (beat := _read(path, same_machine=not place.file)) is not None
    ]
    return Vitals(tuple(beat for beat in found if pids is None or beat.pid in pids), max_age)


def _read(path: str, *, same_machine: bool) -> Beat | None:
    try:
        with open(os.open(path, _UNFOLLOWED), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if not (stat.S_ISREG(found.st_mode) and _is_trusted(found.st_uid)):
                return None
            content: dict[str, Any] = json.load(file)
            age = time.time() - found.st_mtime
        beat = Beat(str(content["worker"]), int(content["pid"]), abs(age), content["ready"] is True)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # A file that was named may be read from another container, where process numbers mean something else.
    if (
        same_machine
        and os.path.isdir("/proc/self")
        and started_at(beat.pid) != content.get("started")
    ):
        return None
    return beat


def _is_trusted(owner: int) -> bool:
    """Whether its heartbeat is believed: our own and root's; root believes all."""
    return not hasattr(os, "getuid") or os.getuid() == 0 or owner in (0, os.getuid())


def health(args: argparse.Namespace) -> int:
    """`machinery health`: 0 alive (and ready, if asked), 1 not."""
    vitals = look(place_of(args), max_age=args.max_age)
    well = vitals.is_ready if args.ready else vitals.is_live
    if args.json:
        beats = [asdict(beat) for beat in vitals.beats]
        print(to_json({"alive": vitals.is_live, "ready": vitals.is_ready, "workers": beats}))
        return 0 if well else 1
    for beat in vitals.beats:
        print(
            f"worker {beat.worker} (pid {beat.pid}): last beat {length(beat.age)} ago, {'' if beat.ready else 'not '}ready"
        )
    if not vitals.beats:
        sys.stderr.write(
            f"machinery: no worker of {args.app!r} has a heartbeat here (it is looked for by app, --app-dir, "
            "working directory, user and TMPDIR)\n"
        )
    return 0 if well else 1


# HTTP


@contextlib.contextmanager
def serve(
    host: str, port: int, is_live: Callable[[], bool], is_ready: Callable[[], bool]
) -> Iterator[int]:
    """Answer GET /live and /ready with 200 or 503, in the background; gives the port.

    Raises:
        ConfigError: the address cannot be used.
    """
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from socketserver import TCPServer

    class Handler(BaseHTTPRequestHandler):
        timeout = HTTP_TIMEOUT

        def do_GET(self) -> None:
            asked = {"/live": is_live, "/ready": is_ready}.get(self.path.partition("?")[0])
            well = asked is not None and asked()
            status, text = (
                (404, "not found") if asked is None else (200, "ok") if well else (503, "no")
            )
            body = json.dumps({"status": text}).encode()
            self.send_response_only(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Probes come every few seconds: they are not worth a line."""

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that went away is no news."""

        def server_bind(self) -> None:
            # Without HTTPServer's own look-up of the host's name, which may ask a name server and wait for it.
            TCPServer.server_bind(self)
            self.server_name, self.server_port = (
                str(self.server_address[0]),
                int(self.server_address[1]),
            )

    try:
        server = Quiet((host, port), Handler)
    except (OSError, OverflowError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"health port {host}:{port}: {what.lower()} (choose another --health-port)"
        ) from error
    descriptors.keep(server.socket)
    thread = threading.Thread(
        target=server.serve_forever, args=(0.1,), name="machinery-health", daemon=True
    )
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)
