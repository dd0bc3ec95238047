"""Approval by a link in a mail. Whoever has the link may approve one customer, for a week.

A UUID in a URL would be a right to signal without an end, so the link has a signed token. Opening
it changes nothing, as programs that check mails do so, too: only the button does.

    SECRET=… python webhook.py        serves http://127.0.0.1:8080/
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs
from wsgiref.simple_server import make_server

from onboarding import server

from machinery_py.errors import SignalRefused

SECRET = os.environ.get("SECRET", "").encode()
WEEK = 7 * 86400
PAGE = '<!doctype html><title>Approval</title><form method="post"><button>Approve</button></form>'


def token_of(uuid: str, *, until: int | None = None) -> str:
    """Return a token that lets its bearer approve this task, until that Unix second."""
    text = f"{uuid}.{int(time.time()) + WEEK if until is None else until}"
    return f"{text}.{_signed(text)}"


def task_of(token: str) -> str:
    """Return the UUID that the token is for; "": it is not ours, or its time is over."""
    text, _, signature = token.rpartition(".")
    if not hmac.compare_digest(signature.encode(), _signed(text).encode()):
        return ""
    uuid, _, until = text.rpartition(".")
    return uuid if int(until) > time.time() else ""


def _signed(text: str) -> str:
    if not SECRET:
        raise RuntimeError("SECRET is not set (a long random text that only this service knows)")
    return hmac.new(SECRET, text.encode(), hashlib.sha256).hexdigest()


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Show the button, or approve (WSGI)."""
    [token] = parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[:1]
    uuid = task_of(token)
    if not uuid:
        status, page = "403 Forbidden", "This link is not valid, or no longer."
    elif environ["REQUEST_METHOD"] != "POST":
        status, page = "200 OK", PAGE
    else:
        status, page = _approve(uuid)
    start_response(status, [("Content-Type", "text/html; charset=utf-8")])
    return [page.encode()]


def _approve(uuid: str) -> tuple[str, str]:
    try:
        # The key: of two clicks the second changes nothing.
        server.signal(uuid, "approval", {"by": "link", "yes": True}, key="link")
    except SignalRefused:
        return "410 Gone", "It is too late: this has been decided."
    return "200 OK", "Thank you."


if __name__ == "__main__":
    with make_server("127.0.0.1", 8080, app) as http:
        http.serve_forever()
