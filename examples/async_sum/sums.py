"""The tasks of Go Machinery's example, under its names."""

from __future__ import annotations

import logging
import math
import os
import threading

from machinery_py import Context, RetryTaskLater, Server, current_task

server = Server()

PERIOD = float(
    os.environ.get("LONG_RUNNING_PERIOD", "1")
)  # seconds between two lines of long_running_task


@server.task
def add(*numbers: int) -> int:
    """Return the sum of any number of arguments: as a step of a chain, or a chord's callback."""
    return sum(numbers)


@server.task
def multiply(*numbers: int) -> int:
    return math.prod(numbers)


@server.task
def sum_ints(numbers: list[int]) -> int:
    return sum(numbers)


@server.task
def sum_floats(numbers: list[float]) -> float:
    return sum(numbers)


@server.task
def concat(words: list[str]) -> str:
    return "".join(words)


@server.task
def split(text: str) -> tuple[str, str]:
    """Return two results, like a Go function that returns `(string, string, error)`."""
    middle = len(text) // 2
    return text[:middle], text[middle:]


@server.task
def panic_task() -> None:
    """Fail for good; the worker goes on."""
    raise RuntimeError("oops")


@server.task(retries=3, backoff=[0.2, 0.5, 1.0])
def flaky() -> int:
    """Fail twice, then return the number of the try."""
    attempt = current_task().attempt
    if attempt < 3:
        raise ConnectionError(f"try {attempt} failed")
    return attempt


@server.task
def later(ctx: Context) -> str:
    """Postpone itself once; that does not count as a try."""
    if ctx.signature.run == 0:
        raise RetryTaskLater("not yet", 0.2)
    return f"came back, and this is still try {ctx.attempt}"


@server.task
def long_running_task(ctx: Context) -> None:
    """Work for ten periods and report progress. Stop early when revoked or when the worker ends."""
    pause = threading.Event()
    for _ in ctx.track(range(10)):
        if ctx.cancelled:
            return
        pause.wait(PERIOD)
        logging.getLogger(__name__).info("long running task is still working")
