"""The app of test_contained.py: tasks that harm the process in which they run."""

from __future__ import annotations

import ctypes
import os
import signal
import time

from machinery_py import Server, current_task

server = Server(
    os.environ.get("CONTAINED_URL", "memory://"),
    result_backend=os.environ.get("CONTAINED_BACKEND", ""),
)


def note() -> int:
    """Note a call where no store can lose it; return how many calls of the task there were."""
    uuid, path = current_task().uuid, os.environ["CONTAINED_LEDGER"]
    strikes = current_task().headers.get("machinery_lost", "0")
    ledger = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(ledger, f"{uuid} {os.getpid()} {os.getppid()} {strikes}\n".encode())
    os.close(ledger)
    with open(path, encoding="utf-8") as lines:
        return lines.read().count(uuid)


@server.task
def act(how: str, number: int) -> int:
    if note() > 1 or how == "return":
        return number
    match how:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return number
        case "fork":
            if os.fork() == 0:  # in its process group, so it is killed with it
                time.sleep(3600.0)
            os._exit(3)
        case "hold":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ctypes.PyDLL(None).sleep(3600)  # holds the interpreter's lock
        case "exit":
            os._exit(number)
        case _:
            os.kill(os.getpid(), signal.Signals[how])
    return -1


@server.task(time_limit=0.05, kill_after=0.02)
def just_in_time(number: int) -> int:
    note()
    time.sleep(0.05)
    return number
