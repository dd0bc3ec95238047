"""The dashboard's own server over a Server under test, and a client that a test reads like a user.

Each answer of the API is held against the type that its schema is made of.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from machinery_py import Server
from machinery_py.cli.http import serve
from machinery_py.dashboard.records import Problem
from machinery_py.dashboard.routes import ROUTES
from machinery_py.testing.waiting import HANG

TOKEN = {"Cookie": "a=b; machinery_csrf=t0k3n", "X-CSRF-Token": "t0k3n"}


@dataclass(frozen=True)
class Reply:
    """An answer."""

    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(msgspec.convert(self.json, Problem).error)


class Site:
    """A client of one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        parts = urlsplit(address)
        self.host, self.port, self.prefix = str(parts.hostname), parts.port, parts.path
        self.headers: dict[str, str] = {}

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=HANG)

    def request(
        self, method: str, path: str, body: bytes | None = None, **headers: str | None
    ) -> Reply:
        """Headers: `X_CSRF_Token="a"`; None leaves one out."""
        given = {key.replace("_", "-"): value for key, value in headers.items()}
        wanted = {key: value for key, value in (self.headers | given).items() if value is not None}
        with contextlib.closing(self.connection()) as connection:
            connection.request(method, self.prefix + path, body, wanted)
            reply = connection.getresponse()
            return Reply(reply.status, reply.headers, reply.read())

    def get(self, path: str, **query: Any) -> Any:
        """Return the JSON of a route, which must be as its schema says."""
        reply = self.request("GET", f"api/{path}?{urlencode(query, doseq=True)}")
        return self._checked("GET", path, reply)

    def post(self, path: str, **body: Any) -> Any:
        return self._checked("POST", path, self.try_post(path, **body))

    def try_post(self, path: str, **body: Any) -> Reply:
        headers = {"Content-Type": "application/json", **TOKEN}
        return self.request("POST", f"api/{path}", json.dumps(body).encode(), **headers)

    def _checked(self, method: str, path: str, reply: Reply) -> Any:
        assert reply.status == 200, (path, reply.status, reply.body)
        route = ROUTES[path][method]
        content = reply.json[route.key] if route.key else reply.json
        msgspec.convert(content, route.gives)
        return content


@contextlib.contextmanager
def site_of(server: Server, **options: Any) -> Iterator[Site]:
    with serve(server.dashboard.wsgi(**options), "127.0.0.1", 0) as address:
        yield Site(address)
