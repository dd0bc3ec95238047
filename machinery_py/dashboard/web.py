"""The dashboard over HTTP: who may do what, static files, the JSON API. A WSGI application.

    any request     auth; without one, this machine alone is answered, under its own names (a page
                    of another site whose name was made to mean 127.0.0.1 has another Host)
    a change        the cookie machinery_csrf again as X-CSRF-Token, no foreign Origin, a JSON body
    any answer      no script, style or request of another origin, no frame, nothing kept

Paths are relative to where it is mounted; names of tasks and queues stand in queries and bodies.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.resources
import json
import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlsplit

import msgspec

from machinery_py.dashboard.api import Api, HoldsMore
from machinery_py.dashboard.fleet import Fleet
from machinery_py.dashboard.guesses import Guesses
from machinery_py.dashboard.live import PATIENCE, Live, StoreCalls, Stream
from machinery_py.dashboard.masking import Mask, Masking, mask_secrets
from machinery_py.dashboard.records import Overview, Problem
from machinery_py.dashboard.routes import ROUTES, Route
from machinery_py.errors import (
    ArgumentError,
    BackendUnavailable,
    ConfigError,
    MachineryError,
    NameRefused,
    PublishRefused,
    PublishUnknown,
    QueueNotFound,
    ScheduleNotFound,
    StateNotFound,
    StoreUnusable,
)
from machinery_py.texts import cut, get_logger, quoted

logger = get_logger(__name__)

Environ = dict[str, Any]
Authenticate = Callable[[Environ], str | None]

MAX_BODY = 1_000_000  # bytes
COOKIE = "machinery_csrf"
SECURITY = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

#: The first that fits; a MachineryError that is none of them is a 409.
_STATUS: tuple[tuple[int, tuple[type[MachineryError], ...]], ...] = (
    (400, (ArgumentError, NameRefused)),
    (404, (StateNotFound, ScheduleNotFound, QueueNotFound)),
    (503, (BackendUnavailable, PublishRefused, PublishUnknown, StoreUnusable)),
)
_BODILESS = (204, 304)
_KINDS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILE = re.compile(r"(\w[\w.-]*/)*\w[\w.-]*", re.ASCII)
_OWN_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
_OWN_ADDRESSES = ("", "127.0.0.1", "::1", "::ffff:127.0.0.1")  # "": a unix socket


@dataclass(slots=True)
class Response:
    """An answer. The server closes a stream when its reader has gone."""

    status: int
    body: bytes | Stream = b""
    headers: dict[str, str] = field(default_factory=dict)


class RefusedRequest(Exception):
    """A request that is answered with a status and a text."""

    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status = status
        self.headers: dict[str, str] = {
            key.replace("_", "-"): value for key, value in headers.items()
        }


class DashboardWSGI:
    """The WSGI application. Any thread may call it; `close` ends its streams.

    Raises:
        ConfigError: `auth` is no user:password.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        read_only: bool = False,
        auth: str | Authenticate | None = None,
        mask: Mask | None = None,
    ) -> None:
        self._calls = StoreCalls()
        self._live = Live(fleet, self._calls)
        masking = Masking(mask or mask_secrets, fleet.app.registry.parameters)
        self._api = Api(fleet, masking, self._live)
        self._read_only = read_only
        self._is_basic = isinstance(auth, str)
        self._auth = basic(auth) if isinstance(auth, str) else auth
        self.close: Final = self._live.close

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        response = self.answer(environ)
        status = f"{response.status} {HTTPStatus(response.status).phrase}"
        start_response(status, list(response.headers.items()))
        return [response.body] if isinstance(response.body, bytes) else response.body

    def answer(self, environ: Environ) -> Response:
        """Return the answer to a request; it raises nothing."""
        try:
            response = self._answer(environ)
        except RefusedRequest as error:
            response = _json(error.status, Problem(error=str(error)))
            response.headers |= error.headers
        except MachineryError as error:
            response = _problem(error)
        except Exception:  # ours or the user's, in `auth` and `mask`
            logger.exception("dashboard: %s failed", quoted(environ.get("PATH_INFO", "")))
            problem = Problem(error="the request failed (its log has the reason)")
            response = _json(500, problem)
        response.headers = {"Cache-Control": "no-store", **response.headers, **SECURITY}
        if isinstance(response.body, bytes) and response.status not in _BODILESS:
            response.headers["Content-Length"] = str(len(response.body))
            if environ["REQUEST_METHOD"] == "HEAD":
                response.body = b""
        return response

    def _answer(self, environ: Environ) -> Response:
        user = self._user(environ)
        method = environ["REQUEST_METHOD"]
        method = "GET" if method == "HEAD" else method
        prefix, path = environ.get("SCRIPT_NAME", ""), environ.get("PATH_INFO", "")
        if not path:  # relative links need the slash
            place = quote(prefix.strip("/").encode("latin-1"))
            place = f"/{place}/" if place else "/"
            return Response(308, headers={"Location": place})
        kind, _, rest = path.removeprefix("/").partition("/")
        if kind == "api":
            response = self._call(environ, method, rest, user)
        elif method == "GET":
            response = _static(path.removeprefix("/") or "index.html", environ)
        else:
            raise RefusedRequest(405, f"found {quoted(method)}", Allow="GET, HEAD")
        if method == "GET" and not _tokens(environ):
            secure = "; Secure" if environ.get("wsgi.url_scheme") == "https" else ""
            response.headers["Set-Cookie"] = (
                f"{COOKIE}={secrets.token_urlsafe(24)}; SameSite=Strict; "
                f"Path={quote(prefix.encode('latin-1'))}/{secure}"
            )
        return response

    def _user(self, environ: Environ) -> str:
        """Return the user's name.

        Raises:
            RefusedRequest: it is nobody who may use this.
        """
        if self._auth is None:
            host, address = environ.get("HTTP_HOST", ""), environ.get("REMOTE_ADDR", "")
            is_passed_on = "HTTP_X_FORWARDED_FOR" in environ or "HTTP_FORWARDED" in environ
            if _OWN_HOST.fullmatch(host) and address in _OWN_ADDRESSES and not is_passed_on:
                return ""
            raise RefusedRequest(
                403,
                f"found host {quoted(host)}, client {quoted(address)}{', a proxy' * is_passed_on} "
                "(without `auth`, the dashboard answers this machine alone, as localhost; give it "
                "`auth`)",
            )
        user = self._auth(dict(environ))  # which frameworks change
        if user is not None:
            return user
        if self._is_basic:
            raise RefusedRequest(
                401,
                "found no user and password, or wrong ones",
                WWW_Authenticate='Basic realm="machinery", charset="UTF-8"',
            )
        raise RefusedRequest(403, "this user may not see the dashboard")

    def _call(self, environ: Environ, method: str, path: str, user: str) -> Response:
        if path == "live":
            return self._stream(environ, method, user)
        methods = ROUTES.get(path, {})
        if not methods:
            raise RefusedRequest(404, f"no route {quoted(path)} (see api/schema)")
        if method not in methods:
            allowed = ", ".join(methods)
            raise RefusedRequest(405, f"{path}: expected {allowed}", Allow=allowed)
        route = methods[method]
        if route.method == "GET":
            return self._run(route, _query(environ), b"", user)
        _check_origin(environ)
        if route.changes and self._read_only:
            raise RefusedRequest(403, f"{path}: the dashboard is read-only here")
        body = _body(environ)
        if not route.changes:
            return self._run(route, {}, body, user)
        who = f"{user!r} at {environ.get('REMOTE_ADDR', '')}"
        given = repr(cut(body.decode("utf-8", "backslashreplace"), 300))
        try:
            response = self._run(route, {}, body, user)
        except MachineryError as error:
            logger.warning("dashboard: %s by %s: %s: %s", path, who, given, error)
            raise
        done = response.body.decode() if isinstance(response.body, bytes) else ""
        logger.info("dashboard: %s by %s: %s: %s", path, who, given, done)
        return response

    def _run(
        self, route: Route, query: Mapping[str, Sequence[str]], body: bytes, user: str
    ) -> Response:
        call = route.prepared(self._api, query, body)
        # The overview waits for no store itself.
        note = " (the change may still be made)" if route.changes else ""
        answer = call() if route.path == "overview" else self._calls.run(call, PATIENCE, note)
        return _json(200, self._for(user, answer))

    def _for(self, user: str, answer: Any) -> Any:
        if isinstance(answer, Overview):
            return msgspec.structs.replace(answer, user=user, read_only=self._read_only)
        return answer

    def _stream(self, environ: Environ, method: str, user: str) -> Response:
        if method != "GET":
            raise RefusedRequest(405, "live: expected GET", Allow="GET")
        if not environ.get("wsgi.multithread"):
            return Response(204)  # a stream would hold up all others
        headers = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        if environ["REQUEST_METHOD"] == "HEAD":
            return Response(200, headers=headers)
        stream = self._live.stream(lambda: _encoded(self._for(user, self._live.overview())))
        if stream is None:
            raise RefusedRequest(503, "too many streams (ask api/overview)")
        return Response(200, stream, headers)


def basic(expected: str) -> Authenticate:
    """Return a check of HTTP Basic authentication against `user:password`.

    It raises RefusedRequest for an address that has guessed too often.
    """
    user, colon, password = expected.partition(":")
    if not (user and colon and password):
        raise ConfigError("auth: found no user or no password (expected user:password)")
    guesses = Guesses()

    def check(environ: Environ) -> str | None:
        if "HTTP_AUTHORIZATION" not in environ:
            return None
        address, cookies = environ.get("REMOTE_ADDR", ""), _tokens(environ)
        if pause := guesses.pause(address, cookies):
            raise RefusedRequest(
                429,
                f"too many wrong passwords from {quoted(address)}",
                Retry_After=str(math.ceil(pause)),
            )
        scheme, _, code = environ["HTTP_AUTHORIZATION"].partition(" ")
        try:
            given = base64.b64decode(code) if scheme.lower() == "basic" else b""
        except ValueError:
            given = b""
        if hmac.compare_digest(given, expected.encode()):
            guesses.was_right(address, cookies)
            return user
        guesses.was_wrong(address)
        return None

    return check


def _tokens(environ: Environ) -> list[str]:
    pairs = (one.strip().partition("=") for one in environ.get("HTTP_COOKIE", "").split(";"))
    return [value for name, _, value in pairs if name == COOKIE and value]


def _check_origin(environ: Environ) -> None:
    """Raise a RefusedRequest for a change that a page of another site may have asked for."""
    origin = environ.get("HTTP_ORIGIN", "")
    site = environ.get("HTTP_SEC_FETCH_SITE", "none")
    token = environ.get("HTTP_X_CSRF_TOKEN", "").encode()
    try:
        is_ours = not origin or urlsplit(origin).netloc == environ.get("HTTP_HOST", "")
    except ValueError:
        is_ours = False
    if not is_ours or site not in ("same-origin", "none"):
        raise RefusedRequest(
            403,
            f"found origin {quoted(origin)} and host {quoted(environ.get('HTTP_HOST', ''))} "
            "(changes come from the dashboard's own pages; a proxy must pass the Host on)",
        )
    if not any(hmac.compare_digest(one.encode(), token) for one in _tokens(environ)):
        raise RefusedRequest(
            403,
            f"X-CSRF-Token: found none, or not that of the cookie {COOKIE} (load the page again)",
        )


def _query(environ: Environ) -> dict[str, list[str]]:
    try:
        return parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True, max_num_fields=100)
    except ValueError as error:
        raise RefusedRequest(400, f"the query cannot be read: {error}") from None


def _body(environ: Environ) -> bytes:
    if environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower() != "application/json":
        raise RefusedRequest(415, "expected a body of application/json")
    length = environ.get("CONTENT_LENGTH") or "0"
    if not (length.isascii() and length.isdigit()):
        raise RefusedRequest(400, f"Content-Length: found {quoted(length)}")
    if len(length) > 9 or int(length) > MAX_BODY:
        raise RefusedRequest(413, f"the body has more than {MAX_BODY:,} bytes")
    try:
        body: bytes = environ["wsgi.input"].read(int(length))
    except OSError as error:
        raise RefusedRequest(400, f"the body has not come: {error}") from None
    if len(body) < int(length):
        raise RefusedRequest(400, f"the body has not come whole: found {len(body):,} bytes")
    return body


def _static(path: str, environ: Environ) -> Response:
    found = importlib.resources.files("machinery_py.dashboard") / "static"
    try:
        is_there = _FILE.fullmatch(path) and (found := found.joinpath(path)).is_file()
    except OSError:  # a name that no file can have, such as one of 300 letters
        is_there = False
    if not is_there:
        raise RefusedRequest(404, f"no page {quoted(path)}")
    body = found.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    kind = _KINDS.get(path.rpartition(".")[2], "application/octet-stream")
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if tag in environ.get("HTTP_IF_NONE_MATCH", ""):
        return Response(304, headers=headers)
    return Response(200, body, {**headers, "Content-Type": kind})


def _problem(error: MachineryError) -> Response:
    status = next((status for status, kinds in _STATUS if isinstance(error, kinds)), 409)
    count = error.count if isinstance(error, HoldsMore) else None
    return _json(status, Problem(error=str(error), count=count))


def _json(status: int, answer: object) -> Response:
    return Response(status, _encoded(answer), {"Content-Type": "application/json"})


def _encoded(answer: object) -> bytes:
    try:
        return msgspec.json.encode(answer)
    except UnicodeEncodeError:  # halves of characters, which msgspec does not write
        return json.dumps(msgspec.to_builtins(answer)).encode()
