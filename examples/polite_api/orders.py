"""Orders that are told to an API which allows each tenant so many calls a second.

    rate, rate_key          each tenant has its own ten a second, for the whole fleet
    max_running             two calls of a tenant at a time
    429 Retry-After         that call comes again when the API says; no try is counted
    anything else           is tried again with growing pauses
    batch                   cancelled orders are told up to 50 in one call; those that the API does
                            not take yet come again by themselves

API_URL names the API; `api.py` is one to try it with.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from email.message import Message
from email.utils import parsedate_to_datetime

from machinery_py import BatchFailed, NoRetry, RetryTaskLater, Server

API_URL = os.environ.get("API_URL", "http://127.0.0.1:8099")
TIMEOUT = 5.0  # seconds for one call
PAUSE = 1.0  # seconds, if the API does not say how long

server = Server()


@server.task(
    rate="10/s",
    rate_key="tenant",
    max_running=2,
    running_key="tenant",
    retries=5,
    backoff="exponential",
)
def tell(tenant: str, order: int) -> str:
    """Tell the API of one order."""
    return call("PUT", f"{tenant}/orders/{order}").decode()


@server.task(batch=50, batch_within=0.5, retries=5, backoff="exponential")
def cancel(orders: list[tuple[str, int]]) -> None:
    """Tell the API of cancelled orders, each a tenant and a number."""
    late: dict[str, float] = json.loads(call("POST", "cancelled", json.dumps(orders).encode()))
    if late:
        raise BatchFailed(
            {int(place): RetryTaskLater("told to wait", pause) for place, pause in late.items()}
        )


def call(method: str, path: str, body: bytes | None = None) -> bytes:
    """Return what the API answers, or raise what becomes of the task."""
    request = urllib.request.Request(f"{API_URL}/{path}", body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        if error.code == 429:
            raise RetryTaskLater(f"{path}: told to wait", retry_after(error.headers)) from None
        if 400 <= error.code < 500:
            raise NoRetry(f"{path}: the API refuses it: {error}") from error
        raise


def retry_after(headers: Message) -> float:
    """Return the seconds that the API asks for: a number, or a date."""
    told = headers.get("Retry-After", "")
    try:
        return max(0.0, float(told))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(told) - server.now()).total_seconds())
    except (TypeError, ValueError):
        return PAUSE
