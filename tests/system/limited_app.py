"""The app of test_limit_faults.py: its tasks note begin and end where no store can lose them."""

from __future__ import annotations

import datetime as dt
import os
import time
from collections.abc import Sequence

from machinery_py import Config, Server, current_task
from machinery_py.clock import SYSTEM_CLOCK
from machinery_py.limits import Admission, Entrant
from machinery_py.testing.waiting import wait_until

MOST = 3  # runs of `gated` at a time


class WrongClock:
    """The clock of this machine, so many seconds off."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, off: float) -> None:
        self._off = dt.timedelta(seconds=off)

    def now(self) -> dt.datetime:
        return SYSTEM_CLOCK.now() + self._off


server = Server(
    Config(
        broker=os.environ.get("LIMITED_BROKER", "memory://"),
        lock=os.environ.get("LIMITED_LOCK", ""),
        lease=float(os.environ.get("LIMITED_LEASE", "10")),
    ),
    clock=WrongClock(float(os.environ.get("LIMITED_OFF", "0"))),
)


def note(word: str, key: str) -> None:
    ledger = os.open(os.environ["LIMITED_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(ledger, f"{word} {key} {current_task().uuid} {os.getpid()}\n".encode())
    finally:
        os.close(ledger)


@server.task(max_running=1, running_key="key", rate="20/s", rate_key="key", burst=2)
def visit(key: str) -> None:
    note("begin", key)
    note("end", key)


@server.task(max_running=MOST, rate="1000/s")
def gated(gate: str) -> None:
    note("begin", "gate")
    wait_until(lambda: os.path.exists(gate), timeout=600.0, what="the gate is open")
    note("end", "gate")


@server.task(rate="20/s", max_running=2)
def metered() -> None:
    note("begin", "metered")
    note("end", "metered")


def in_turn(key: str, number: int, gate: str) -> None:
    wait_until(lambda: os.path.exists(gate), timeout=600.0, what="the gate is open")
    note("begin", f"{key}:{number}")


exclusive = server.task("exclusive", exclusive="wait", exclusive_key="key")(in_turn)
running = server.task("running", max_running=1, running_key="key")(in_turn)


if "LIMITED_OFF" in os.environ:
    before = server.app.stores.limits.enter_all

    def enter_all(entrants: Sequence[Entrant]) -> list[Admission]:
        with open(os.environ["LIMITED_LEDGER"] + "-asked", "a", encoding="utf-8") as asked:
            asked.write("x" * len(entrants))
        return before(entrants)

    server.app.stores.limits.enter_all = enter_all  # type: ignore[method-assign] - counted
