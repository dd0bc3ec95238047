"""HTTP servers of the command line: the dashboard, pages for probes and for Prometheus.

One thread for each connection, of the standard library. A request has TIMEOUT as a whole, an answer
ANSWER_TIMEOUT. When all places are taken, a new connection gets that of the client that is waited
for longest, of those from the address that holds most: slow clients, however many, keep nobody out.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from http import HTTPStatus
from typing import IO, Any, Protocol, cast
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

from machinery_py.connections import descriptors
from machinery_py.errors import ConfigError
from machinery_py.texts import get_logger

logger = get_logger(__name__)

MOST_CONNECTIONS = 64  # one more takes the place of a client that is waited for, or is refused
MOST_SCRAPES = 8  # of /metrics at a time; probes need the other places
BACKLOG = 512  # connections that the kernel keeps until they are accepted
TIMEOUT = 10.0  # seconds for a request, head and body, and for each piece of an answer
ANSWER_TIMEOUT = 30.0  # seconds for an answer; a stream ends before
MOST_HEAD = 131_072  # bytes of a request's head, about
MOST_LEFT = 4_000_000  # bytes of a refused body that are read, so that its sender gets the answer
REST_TIMEOUT = 2.0  # seconds for them
REST_PAUSE = 0.2  # seconds without any of them: there are no more

Page = tuple[int, str, bytes]  # status, content type, body


class WebApplication(Protocol):
    """A WSGI application. Any thread may call it; `close` ends its streams."""

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any], /
    ) -> Iterable[bytes]: ...
    def close(self) -> None: ...


class Pages:
    """GET /live and /ready, answered with 200 or 503, and /metrics.

    Args:
        metrics: returns the page for an Accept header.
    """

    def __init__(
        self,
        is_ready: Callable[[], bool],
        metrics: Callable[[str], Page],
        is_live: Callable[[], bool] = lambda: True,
    ) -> None:
        self._pages = {
            "/live": _probe(is_live),
            "/ready": _probe(is_ready),
            "/metrics": _few_at_a_time(metrics),
        }

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        method, make = environ["REQUEST_METHOD"], self._pages.get(environ["PATH_INFO"])
        if method not in ("GET", "HEAD"):
            status, kind, body = _said(405, "expected GET")
        elif make is None:
            status, kind, body = _said(404, "not found")
        else:
            try:
                status, kind, body = make(environ.get("HTTP_ACCEPT", ""))
            except Exception:  # user code, or a full disk: it must be seen, and the others go on
                logger.exception("GET %s failed", environ["PATH_INFO"])
                status, kind, body = _said(500, "the log of this process says why")
        headers = [("Content-Type", kind), ("Content-Length", str(len(body)))]
        start_response(f"{status} {HTTPStatus(status).phrase}", headers)
        return [b"" if method == "HEAD" else body]

    def close(self) -> None:
        """Do nothing: there are no streams."""


def _said(status: int, text: str) -> Page:
    return status, "application/json", json.dumps({"status": text}).encode()


def _probe(is_so: Callable[[], bool]) -> Callable[[str], Page]:
    return lambda _: _said(200, "ok") if is_so() else _said(503, "no")


def _few_at_a_time(make: Callable[[str], Page]) -> Callable[[str], Page]:
    free = threading.BoundedSemaphore(MOST_SCRAPES)

    def page(accepted: str) -> Page:
        if not free.acquire(blocking=False):
            return _said(503, f"{MOST_SCRAPES} others are being answered")
        try:
            return make(accepted)
        finally:
            free.release()

    return page


class _Places:
    """Places for connections, and whose clients are waited for: their places may be taken."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._taken: dict[socket.socket, str] = {}  # → address, oldest first
        self._waited_for: set[socket.socket] = set()
        self._cut_off: set[socket.socket] = set()  # until their threads have ended

    def take(self, connection: socket.socket, address: str) -> bool:
        """Give it a place, as one that is waited for. False: there is none."""
        with self._lock:
            if len(self._taken) >= self._most and not self._cut_off_one():
                return False
            self._taken[connection] = address
            self._waited_for.add(connection)
            return True

    def leave(self, connection: socket.socket) -> None:
        """Give its place back. May be called twice."""
        with self._lock:
            self._taken.pop(connection, None)
            self._waited_for.discard(connection)
            self._cut_off.discard(connection)

    @contextlib.contextmanager
    def waiting(self, connection: socket.socket) -> Iterator[None]:
        """Let its place be taken while the block waits for the client.

        Raises:
            ConnectionAbortedError: it was taken before.
        """
        with self._lock:
            if connection not in self._taken:
                raise ConnectionAbortedError("another connection has taken the place")
            self._waited_for.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._waited_for.discard(connection)

    def _cut_off_one(self) -> bool:
        """End one connection that is waited for. False: there is none, or too many are ending."""
        counts = Counter(self._taken[one] for one in self._waited_for)
        if not counts or len(self._cut_off) >= self._most:
            return False
        address, _ = counts.most_common(1)[0]
        oldest = next(
            one
            for one, whose in self._taken.items()
            if whose == address and one in self._waited_for
        )
        del self._taken[oldest]
        self._waited_for.discard(oldest)
        self._cut_off.add(oldest)
        with contextlib.suppress(OSError):  # it has gone
            oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread
        return True


class _HeadTooLong(Exception):
    pass


class _Incoming(io.RawIOBase):
    """Request as bytes, until the moment by which all of it must have come."""

    def __init__(self, connection: socket.socket, places: _Places) -> None:
        self._connection = connection
        self._places = places
        self._end = time.monotonic() + TIMEOUT
        self._pause = TIMEOUT
        self._head_left = MOST_HEAD
        self.is_in_head = True

    def expect_rest(self) -> None:
        """Read what nobody asks for; it has a little time."""
        self._end, self._pause = time.monotonic() + REST_TIMEOUT, REST_PAUSE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes.

        Raises:
            TimeoutError: the request has not come in time.
            ConnectionAbortedError: its head has not come whole.
            _HeadTooLong: and does not end.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request has not come in time")
        self._connection.settimeout(min(left, self._pause))
        with self._places.waiting(self._connection):
            count = self._connection.recv_into(buffer)
        if self.is_in_head:
            self._head_left -= count
            if not count:
                raise ConnectionAbortedError("the request ends in its head")
            if self._head_left < 0:
                raise _HeadTooLong
        return count


class _Outgoing(io.BufferedIOBase):
    """Answer as bytes. Each piece is sent, or raises, in time."""

    def __init__(self, connection: socket.socket, places: _Places) -> None:
        self._connection = connection
        self._places = places
        self._end: float | None = None

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        now = time.monotonic()
        self._end = self._end or now + ANSWER_TIMEOUT
        if now >= self._end:
            raise TimeoutError("the client reads too slowly")
        self._connection.settimeout(min(TIMEOUT, self._end - now))
        with self._places.waiting(self._connection):
            self._connection.sendall(piece)
        return len(piece)


class _Answering(ServerHandler):
    server_software = "machinery"
    request_handler: object  # kept alive by it, as by wsgiref
    os_environ: MutableMapping[str, str] = {}  # noqa: RUF012 - theirs; ours is no request's

    def log_exception(self, exc_info: Any) -> None:
        logger.debug("a client was cut off", exc_info=exc_info)


class _Handler(WSGIRequestHandler):
    def setup(self) -> None:
        self.connection, places = self.request, cast("_Server", self.server).places
        self._incoming = _Incoming(self.connection, places)
        self.rfile = io.BufferedReader(self._incoming)
        self.wfile = _Outgoing(self.connection, places)

    def handle(self) -> None:
        self.requestline = self.request_version = self.command = ""
        try:
            self.raw_requestline = self.rfile.readline(65_537)
            if len(self.raw_requestline) > 65_536:
                self.send_error(414)
            elif self.parse_request():
                self._answer()
        except _HeadTooLong:
            self.send_error(431)
        self._read_rest()

    def _answer(self) -> None:
        self._incoming.is_in_head = False
        # WSGI takes X_A for X-A, and a proxy that sets the one may pass the other on.
        for name in [one for one in self.headers if "_" in one]:
            del self.headers[name]
        files = cast("IO[bytes]", self.rfile), cast("IO[bytes]", self.wfile)
        run = _Answering(*files, self.get_stderr(), self.get_environ(), multithread=True)
        run.request_handler = self
        run.run(cast(Any, self.server).get_app())  # it is a WSGIServer that has one

    def _read_rest(self) -> None:
        """Read what was not, or the kernel would cut the answer off."""
        left = MOST_LEFT
        self._incoming.is_in_head = False
        self._incoming.expect_rest()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while left > 0 and (found := self.rfile.read1(65_536)):
                left -= len(found)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.places = _Places(MOST_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer looks up the host's name, which may ask a name server and wait for it.
        socketserver.TCPServer.server_bind(self)
        name, port = self.server_address[:2]
        self.server_name, self.server_port = str(name), int(port)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.places.take(request, client_address[0]):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # the system allows no more threads
            self.places.leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a client was cut off", exc_info=True)


@contextlib.contextmanager
def serve(
    application: WebApplication, host: str, port: int, *, option: str = "--port"
) -> Iterator[str]:
    """Answer in the background. At the end open streams end, too.

    Args:
        option: that gave the port, for the error.

    Yields:
        The address.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        server = _Server(host, port)
    except (OSError, OverflowError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{option} {host}:{port}: {what.lower()} (choose another {option})"
        ) from error
    descriptors.keep(server.socket)
    server.set_app(application)
    thread = threading.Thread(
        target=server.serve_forever, args=(0.1,), name="machinery-http", daemon=True
    )
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/"
    finally:
        application.close()
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)
