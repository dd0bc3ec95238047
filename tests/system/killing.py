"""The app of test_kills.py: its task notes each run and completion where no store can lose them."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid

from machinery_py import Config, Server, current_task
from machinery_py.testing.waiting import wait_until

server = Server(
    Config(
        broker=os.environ.get("KILL_URL", "memory://"),
        result_backend=os.environ.get("KILL_BACKEND", ""),
        max_strikes=int(os.environ.get("KILL_STRIKES", "3")),
    )
)

STEPS = 20


def note(word: str) -> None:
    ledger = os.open(os.environ["KILL_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        # A kill may cut a write at the end of a page: the next one begins a line of its own.
        os.write(ledger, f"\n{word} {current_task().uuid} {os.getpid()}\n".encode())
    finally:
        os.close(ledger)


@server.task
def work(number: int) -> int:
    note("ran")
    return number


@server.task
def deadly() -> None:
    note("deadly")
    os.kill(os.getpid(), 9)


@server.task
def halt() -> None:
    """Stop the whole process, as SIGSTOP from outside would; not so when it is run again."""
    note("halt")
    if not current_task().is_redelivery:
        # To this thread: else it may run on until another one has got the signal.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


@server.task
def rest(seconds: float) -> None:
    note("ran")
    time.sleep(seconds)


@server.task(rate="10/s", burst=2)
def polite(number: int) -> int:
    return number


@server.task
def flow() -> list[str]:
    """Make steps with a sleep and a wait between them; note what each run has seen of them."""
    task = current_task()
    values: list[str] = []

    def saw(value: str) -> None:
        values.append(value)
        note(f"saw_{len(values)}_{value}")

    for number in range(STEPS):
        saw(task.step(f"step-{number}", _made))
        if number == STEPS // 3:
            task.sleep(0.3)
        if number == STEPS // 2:
            saw(task.wait_for("go", timeout=600))
        if number == 2 * STEPS // 3:
            saw(task.wait_for(drawn.signature()))
    return values


@server.task
def drawn() -> str:
    return uuid.uuid4().hex


def _made() -> str:
    note("made")
    time.sleep(0.02)
    return uuid.uuid4().hex


@server.task
def nap(seconds: float) -> str:
    import threading

    note("nap")
    threading.Event().wait(seconds)
    return "rested"


@server.task(max_running=2, rate="1000/s")
def hold_two(gate: str) -> str:
    note("hold_two")
    wait_until(lambda: os.path.exists(gate), timeout=600.0, what="the gate is open")
    return "let go"


@server.task
def hold(gate: str) -> str:
    note("hold")
    wait_until(lambda: os.path.exists(gate), timeout=600.0, what="the gate is open")
    return "let go"
