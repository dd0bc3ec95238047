"""The dashboard as an ASGI application: the WSGI one, answering in threads of its own."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from machinery_py.dashboard.live import STREAM_PAUSE, Stream
from machinery_py.dashboard.web import MAX_BODY, DashboardWSGI, Environ

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

THREADS = 32  # at most; the default ones of the loop are the application's


class DashboardASGI:
    """The ASGI application; `close` ends its streams."""

    def __init__(self, web: DashboardWSGI) -> None:
        self._web = web
        self._threads = ThreadPoolExecutor(THREADS, "machinery-dashboard")
        self.close: Final = web.close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live_on(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await send({"type": f"{scope['type']}.close"})

    async def _live_on(self, receive: Receive, send: Send) -> None:
        while (kind := (await receive())["type"]) != "lifespan.shutdown":
            await send({"type": f"{kind}.complete"})
        self.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        if body is None:
            return
        environ = _environ(scope, body)
        loop = asyncio.get_running_loop()
        response = await loop.run_in_executor(self._threads, self._web.answer, environ)
        headers = [
            (key.lower().encode(), value.encode()) for key, value in response.headers.items()
        ]
        start = {"type": "http.response.start", "status": response.status, "headers": headers}
        if isinstance(response.body, bytes):
            await send(start)
            await send({"type": "http.response.body", "body": response.body})
            return
        try:
            await send(start)
            await self._stream(response.body, receive, send)
        finally:
            response.body.close()

    async def _stream(self, stream: Stream, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            while not gone.done():
                chunk = await loop.run_in_executor(self._threads, stream.chunk)
                more = bool(chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": more})
                if not more:
                    return
                await asyncio.wait([gone], timeout=STREAM_PAUSE)
        finally:
            gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(receive: Receive) -> bytes | None:
    """Return the body, of one that is too large more than is allowed; None: the client has gone."""
    body = b""
    while len(body) <= MAX_BODY:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    return body


def _environ(scope: Scope, body: bytes) -> Environ:
    prefix, path = scope.get("root_path", "").rstrip("/"), scope["path"]
    if path == prefix or path.startswith(f"{prefix}/"):
        path = path[len(prefix) :]
    client = scope.get("client")
    environ: Environ = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": _as_wsgi(prefix),
        "PATH_INFO": _as_wsgi(path),
        "QUERY_STRING": scope["query_string"].decode("latin-1"),
        "REMOTE_ADDR": client[0] if client else "",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
        "wsgi.url_scheme": scope.get("scheme", "http"),
        "wsgi.multithread": True,
        "asgi.scope": scope,
    }
    for name, value in scope["headers"]:
        key = name.decode("latin-1").upper().replace("-", "_")
        if key == "CONTENT_TYPE":
            environ[key] = value.decode("latin-1")
        elif key != "CONTENT_LENGTH":
            key, joint = f"HTTP_{key}", "; " if key == "COOKIE" else ","
            before = f"{environ[key]}{joint}" if key in environ else ""
            environ[key] = before + value.decode("latin-1")
    return environ


def _as_wsgi(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("latin-1")
