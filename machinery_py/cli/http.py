"""HTTP servers of the command line: the dashboard, pages for probes and for Prometheus.

One thread for each connection, of the standard library.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from http import HTTPStatus
from typing import IO, Any, Protocol, cast
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

from machinery_py.connections import descriptors
from machinery_py.errors import ConfigError
from machinery_py.texts import get_logger

logger = get_logger(__name__)

MOST_CONNECTIONS = 64  # one more takes the place of who has not asked yet, or is refused
TIMEOUT = 10.0  # seconds for each piece of a request, and of an answer
PLACE_TIMEOUT = 0.5  # seconds until a connection that was cut off leaves its place
MOST_LEFT = 4_000_000  # bytes of a refused body that are read, so that its sender gets the answer

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
        self._pages = {"/live": _probe(is_live), "/ready": _probe(is_ready), "/metrics": metrics}

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


class _Answering(ServerHandler):
    server_software = "machinery"
    os_environ: MutableMapping[str, str] = {}  # noqa: RUF012 - theirs; ours is no request's

    def log_exception(self, exc_info: Any) -> None:
        logger.debug("a client was cut off", exc_info=exc_info)


class _Handler(WSGIRequestHandler):
    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(TIMEOUT)

    def handle(self) -> None:
        self.raw_requestline = self.rfile.readline(65_537)
        if len(self.raw_requestline) > 65_536:
            self.requestline = self.request_version = self.command = ""
            self.send_error(414)
        elif self.parse_request():
            cast("_Server", self.server).has_asked(self.connection)
            # WSGI takes X_A for X-A, and a proxy that sets the one may pass the other on.
            for name in [one for one in self.headers if "_" in one]:
                del self.headers[name]
            files = cast("IO[bytes]", self.rfile), cast("IO[bytes]", self.wfile)
            run = _Answering(*files, self.get_stderr(), self.get_environ(), multithread=True)
            run.request_handler = self  # type: ignore[attr-defined]  # as wsgiref does it
            run.run(self.server.get_app())  # type: ignore[attr-defined]  # a WSGIServer
            self._read_rest()

    def _read_rest(self) -> None:
        """Read what was not, or the kernel would cut the answer off."""
        self.connection.settimeout(0.2)
        left = MOST_LEFT
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while left > 0 and (found := self.rfile.read1(65_536)):
                left -= len(found)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._silent: dict[Any, None] = {}  # clients whose request has not come, oldest first
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer looks up the host's name, which may ask a name server and wait for it.
        socketserver.TCPServer.server_bind(self)
        name, port = self.server_address[:2]
        self.server_name, self.server_port = str(name), int(port)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not (self._free.acquire(blocking=False) or self._cut_off_oldest()):
            self.shutdown_request(request)
            return
        self._silent[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:  # the system allows no more threads
            self.has_asked(request)
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_asked(request)
            self._free.release()

    def has_asked(self, request: Any) -> None:
        """Keep the place of this connection: its request has come."""
        self._silent.pop(request, None)

    def _cut_off_oldest(self) -> bool:
        """Take the place of the client that has been silent for longest. False: all have asked."""
        for oldest in list(self._silent)[:1]:
            if self._silent.pop(oldest, self) is self:
                continue  # its request has come meanwhile
            with contextlib.suppress(OSError):  # it has gone
                oldest.shutdown(socket.SHUT_RDWR)
            return self._free.acquire(timeout=PLACE_TIMEOUT)
        return False

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
