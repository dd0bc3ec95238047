"""Waits for other threads without a guess of how long they take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from machinery_py.clock import Seconds, seconds_of

T = TypeVar("T")

POLL = 0.005  # seconds between two polls
HANG = 60.0  # seconds after which a test is considered hung


def wait_until(
    predicate: Callable[[], object], timeout: Seconds = HANG, what: str = "the condition"
) -> None:
    """Return as soon as the predicate is true.

    Raises:
        AssertionError: the predicate was false for `timeout` seconds; the text names `what`.
    """
    length = seconds_of("timeout", timeout)
    deadline = time.monotonic() + length
    never = threading.Event()
    while not predicate():
        if time.monotonic() >= deadline:
            raise AssertionError(f"{what}: not true after {length:g} s")
        never.wait(POLL)


def together(count: int, function: Callable[[int], T], timeout: Seconds = HANG) -> list[T]:
    """Call `function(0)` … `function(count - 1)` at one moment; return their results in order.

    Each call has a thread of its own.

    The first exception of a call is raised here.
    """
    barrier, length = threading.Barrier(count), seconds_of("timeout", timeout)

    def run(index: int) -> T:
        barrier.wait(length)
        return function(index)

    with ThreadPoolExecutor(count, thread_name_prefix="together") as pool:
        return [
            future.result(length) for future in [pool.submit(run, index) for index in range(count)]
        ]
