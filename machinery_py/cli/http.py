"""HTTP of a worker and of `machinery exporter`: a few pages for probes and for Prometheus."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from machinery_py.connections import descriptors
from machinery_py.errors import ConfigError
from machinery_py.texts import get_logger

logger = get_logger(__name__)

TIMEOUT = 5.0  # seconds a client may take

Page = tuple[int, str, bytes]  # status, content type, body


def _said(status: int, text: str) -> Page:
    return status, "application/json", json.dumps({"status": text}).encode()


def _probe(is_so: Callable[[], bool]) -> Callable[[str], Page]:
    return lambda _: _said(200, "ok") if is_so() else _said(503, "no")


class _PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""

    def server_bind(self) -> None:
        # HTTPServer looks up the host's name, which may ask a name server and wait for it.
        TCPServer.server_bind(self)
        name, port = self.server_address[:2]
        self.server_name, self.server_port = str(name), int(port)


class _PageHandler(BaseHTTPRequestHandler):
    timeout = TIMEOUT

    def __init__(self, pages: Mapping[str, Callable[[str], Page]], *args: Any) -> None:
        self._pages = pages
        super().__init__(*args)

    def do_GET(self) -> None:
        status, content_type, body = self._page()
        self.send_response_only(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def _page(self) -> Page:
        make = self._pages.get(self.path.partition("?")[0])
        if make is None:
            return _said(404, "not found")
        try:
            return make(self.headers.get("Accept", ""))
        except Exception:  # user code, or a full disk: it must be seen, and the others go on
            logger.exception("GET %s failed", self.path)
            return _said(500, "the log of this process says why")

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds: they are not worth a line."""


@contextlib.contextmanager
def serve(
    host: str,
    port: int,
    is_ready: Callable[[], bool],
    metrics: Callable[[str], Page],
    *,
    is_live: Callable[[], bool] = lambda: True,
    option: str = "--health-port",
) -> Iterator[int]:
    """Answer GET /live and /ready with 200 or 503, and /metrics, in the background.

    Args:
        metrics: returns the page for an Accept header.
        option: that gave the port, for the error.

    Yields:
        The port.

    Raises:
        ConfigError: the address cannot be used.
    """
    pages = {"/live": _probe(is_live), "/ready": _probe(is_ready), "/metrics": metrics}
    try:
        server = _PageServer((host, port), functools.partial(_PageHandler, pages))
    except (OSError, OverflowError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{option} {host}:{port}: {what.lower()} (choose another {option})"
        ) from error
    descriptors.keep(server.socket)
    thread = threading.Thread(
        target=server.serve_forever, args=(0.1,), name="machinery-http", daemon=True
    )
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)
