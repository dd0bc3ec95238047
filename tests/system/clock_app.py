"""The app of test_clocks.py: a worker, or with `send` a sender; its clock is AHEAD seconds off."""

from __future__ import annotations

import datetime as dt
import os
import sys

from machinery_py import Config, RetryTaskLater, Server, clock, current_task

if ahead := float(os.environ.get("AHEAD", "0")):
    right = clock.SystemClock.now
    clock.SystemClock.now = staticmethod(lambda: right() + dt.timedelta(seconds=ahead))  # type: ignore[assignment]

server = Server(
    Config(broker=os.environ["CLOCK_BROKER"], result_backend=os.environ["CLOCK_BACKEND"])
)


@server.task
def echo(text: str) -> str:
    return text


@server.task(retries=2, backoff=[0.2])
def shaky(text: str) -> str:
    if current_task().attempt == 1:
        raise ValueError("once")
    return text


@server.task
def later(text: str) -> str:
    if current_task().signature.run == 0:
        raise RetryTaskLater("in a moment", 0.2)
    return text


@server.task
def sender(uuid: str) -> None:
    echo.options(uuid=uuid, delay=0.2, expires=60.0).send("sent by a task")


@server.periodic("@every 1s")
@server.task
def tick() -> None: ...


if __name__ == "__main__":
    if sys.argv[1] == "send":
        echo.options(uuid=sys.argv[2], delay=0.2, expires=60.0).send("sent by a process")
    else:
        server.new_worker(concurrency=2).launch()
