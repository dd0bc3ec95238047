"""The app of test_endings.py: a task for each setting, which ends as its first argument says."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import signal

from machinery_py import (
    Ignore,
    NoRetry,
    Reject,
    Retry,
    RetryTaskLater,
    Server,
    TimeLimitExceeded,
    current_task,
)
from machinery_py.testing.waiting import wait_until
from tests.system.endings import SETTINGS

server = Server(
    os.environ.get("ENDING_URL", "memory://"), result_backend=os.environ.get("ENDING_BACKEND", "")
)


def note() -> int:
    """Note a call where no store can lose it; return how many calls of the task there were."""
    uuid, path = current_task().uuid, os.environ["ENDING_LEDGER"]
    ledger = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(ledger, f"{uuid}\n".encode())
    finally:
        os.close(ledger)
    with open(path, encoding="utf-8") as lines:
        return lines.read().count(uuid)


def act(play: str, word: str = "") -> str:
    call = note()
    match play:
        case "raise once" if call == 1:
            raise ValueError("once")
        case "raise":
            raise ValueError("always")
        case "give up":
            raise NoRetry("useless")
        case "retry" if call == 1:
            raise Retry(delay=0.0)
        case "retry eta" if call == 1:
            raise Retry(eta=dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=0.1))
        case "retry args" if word == "":
            raise Retry(delay=0.0, args=(play,), kwargs={"word": "other"})
        case "retry retries":
            raise Retry(delay=0.0, retries=1)
        case "retry cause":
            raise Retry(delay=0.0) from ValueError("cause")
        case "later" if call == 1:
            raise RetryTaskLater("busy", 0.0)
        case "later limit":
            raise RetryTaskLater("busy", 0.0, limit=1)
        case "reject":
            raise Reject("nobody can do this")
        case "put back" if call == 1:
            raise Reject("not here", requeue=True)
        case "disregard":
            raise Ignore("not wanted any more")
        case "wait":
            wait_until(lambda: False, timeout=600.0)
        case "ignore" | "terminate":
            while True:
                with contextlib.suppress(TimeLimitExceeded):
                    wait_until(lambda: False, timeout=600.0)
        case "stop" if call == 1:
            wait_until(lambda: False, timeout=600.0)
        case "die once" if call == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
    return "done"


for _setting, _options in SETTINGS.items():
    server.task(f"act_{_setting}", backoff=[0.0], **_options)(act)
