"""Sends on top of a call of the store, as finalisers and signal handlers make them.

The traced thread is interrupted at each line of ours in turn, so at each lock that it may hold.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import machinery_py
from machinery_py import AsyncResult, Config, Server
from machinery_py.errors import BackendUnavailable, ConfigError, PublishRefused, Unsupported
from machinery_py.testing.waiting import wait_until

PACKAGE = machinery_py.__path__[0]
QUEUE = "machinery_tasks"
LINES = 3  # of which one is interrupted: each would take minutes
MOST = 900  # lines; some calls have more, with each message that is there
HANG = 10.0  # seconds


class Interrupted:
    """A thread that makes a call, and at its n-th line of ours another one, once."""

    def __init__(self, call: Callable[[], object], at: int, other: Callable[[], object]) -> None:
        self._call, self._other = call, other
        self._left = at
        self.was_interrupted = False
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._thread.join(HANG)
        if self._thread.is_alive():
            frame = sys._current_frames()[self._thread.ident or 0]
            pytest.fail(f"line {at} hangs:\n" + "".join(traceback.format_stack(frame)))

    def _run(self) -> None:
        sys.settrace(self._trace)
        try:
            self._call()
        except BaseException as error:
            self.errors.append(error)
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if self.was_interrupted or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0:
                self.was_interrupted = True
                # Nothing is traced in here; to end tracing here has crashed CPython 3.11.7 once.
                try:
                    self._other()
                except BaseException as error:
                    self.errors.append(error)
        return self._trace


def waiting(server: Server) -> int:
    return server.broker.waiting(QUEUE)


def _lock(server: Server) -> object:
    try:
        return server.lock("x").acquire(blocking=False)
    except ConfigError:  # neither broker nor results have locks
        return None


#: What is interrupted, by a Server that has a task "note" and the result of a call of it.
CALLS: dict[str, Callable[[Server, AsyncResult[Any]], object]] = {
    "the first send": lambda server, _: server.get_registered_task("note").send(1),
    "a send": lambda server, _: server.get_registered_task("note").send(1),
    "a state": lambda _, result: result.is_finished(),
    "a lock": lambda server, _: _lock(server),
    "queues": lambda server, _: server.inspect.queues(),
}


@pytest.mark.parametrize("name", CALLS)
def test_send_on_top_of_a_call_is_accepted(broker_url: str, name: str) -> None:
    other = Server(broker_url)  # which keeps what is in memory
    assert waiting(other) == 0
    server = Server(Config(broker=broker_url, events=True))
    note, sent = server.task("note")(abs), 1
    result = note.send(0)
    is_first, is_send = name == "the first send", name.endswith("send")
    is_slow = is_first or not (is_send or broker_url.startswith(("memory", "sqlite")))
    for at in range(0, MOST, 10 * LINES if is_slow else LINES):
        if is_first:
            server.close()
        call = Interrupted(lambda: CALLS[name](server, result), at, lambda: note.send(-1))
        assert [one for one in call.errors if not isinstance(one, Unsupported)] == []
        sent += is_send + call.was_interrupted
        if not call.was_interrupted:
            break

    server.app._late.flush(HANG)
    wait_until(lambda: waiting(other) == sent, what=f"{sent} messages")
    server.close()


def test_unique_send_on_top_of_a_send_is_made_or_refused(broker_url: str) -> None:
    server = Server(broker_url)
    note = server.task("note")(abs)
    if not server.backend.features.claims:
        pytest.skip("no unique tasks")
    once = server.task("once", unique=True, queue="once")(abs)
    note.send(0)
    for at in range(0, MOST, 4 * LINES):
        call = Interrupted(lambda: note.send(1), at, lambda at=at: once.send(at))  # type: ignore[misc]
        for error in call.errors:
            assert isinstance(error, PublishRefused) and "finaliser" in str(error)
        if not call.was_interrupted:
            break
    server.close()


@pytest.mark.parametrize("kind", ["lock", "limiter"])
def test_lock_on_top_of_a_send_is_taken_or_refused(broker_url: str, kind: str) -> None:
    other = Server(broker_url)  # which keeps what is in memory
    server, sent = Server(broker_url), 1
    note = server.task("note")(abs)
    note.send(0)
    guard = server.lock("x") if kind == "lock" else server.limiter("x", max_running=9)
    try:
        guard.acquire(timeout=0)
    except ConfigError:
        pytest.skip("no locks")
    guard.release()

    def take() -> None:
        assert guard.acquire(timeout=0)
        guard.release()

    is_slow = not broker_url.startswith(("memory", "sqlite"))
    for at in range(0, MOST, 10 * LINES if is_slow else 1):
        call = Interrupted(lambda: note.send(1), at, take)
        for error in call.errors:
            assert isinstance(error, BackendUnavailable) and "finaliser" in str(error)
        sent += 1
        if not call.was_interrupted:
            break

    assert waiting(other) == sent
    server.close()


AT_EXIT = """
import atexit, sys
from machinery_py import Server
server = Server(sys.argv[1])
note = server.task("note")(abs)
atexit.register(lambda: print("sent" if note.send(1) else ""))
"""


def test_first_send_of_a_program_may_be_at_its_exit(broker_url: str) -> None:
    command = [sys.executable, "-c", AT_EXIT, broker_url]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60.0)

    assert (done.stdout, "Error" in done.stderr) == ("sent\n", False), done.stderr
    server = Server(broker_url)
    assert server.broker.features.name == "memory" or waiting(server) == 1
    server.close()
