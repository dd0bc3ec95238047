"""Tasks under limits, in memory: the rules themselves are in tests/limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from machinery_py import Server, State, current_task
from machinery_py.testing.harness import Harness
from machinery_py.testing.waiting import HANG, wait_until


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("memory://limits")
    yield server
    server.close()


def running(server: Server) -> int:
    return sum(one.running for scope in server.app.stores.limits.read() for one in scope.usage)


def run_all(machinery: Harness, ran: list[Any], count: int) -> float:
    """Let time pass until so many have run, and return the seconds that it took."""
    start = machinery.clock.monotonic()
    machinery.drain(raise_failures=False)
    while len(ran) < count:
        assert machinery.clock.monotonic() - start < 600
        machinery.advance(seconds=0.05)
        machinery.drain(raise_failures=False)
    return machinery.clock.monotonic() - start


def test_fifty_calls_at_five_a_second_take_ten_seconds(server: Server) -> None:
    ran: list[int] = []
    claims: list[str] = []

    @server.task(rate="5/s")
    def call_api(user: int) -> None:
        ran.append(user)

    with Harness(server) as machinery:
        for user in range(50):
            call_api.send(user)
        before = server.app.stores.limits.enter

        def enter(*args: Any, **kwargs: Any) -> Any:
            claims.append(args[1])
            return before(*args, **kwargs)

        server.app.stores.limits.enter = enter  # type: ignore[method-assign] - counted

        begun = time.monotonic()
        took = run_all(machinery, ran, 50)
        real = time.monotonic() - begun  # the harness adds it to what it is told to let pass

    assert ran == list(range(50))
    assert 9.8 <= took <= 10.5 + real
    assert len(claims) <= 110


def test_each_value_of_the_rate_key_has_its_own_turn(server: Server) -> None:
    ran: list[str] = []

    @server.task(rate="1/m", rate_key="tenant")
    def call_api(tenant: str) -> None:
        ran.append(tenant)

    with Harness(server) as machinery:
        for tenant in ("a", "a", "a", "b"):
            call_api.send(tenant)
        machinery.drain()
        assert ran == ["a", "b"]

        machinery.advance(seconds=61)
        machinery.drain()
        assert ran == ["a", "b", "a"]


def test_waiting_task_is_no_run_and_keeps_its_state(server: Server) -> None:
    attempts: list[int] = []

    @server.task(min_interval=60, running_key=lambda user, *_: f"user-{user}")
    def remind(user: int, text: str) -> None:
        attempts.append(current_task().attempt)

    with Harness(server) as machinery:
        remind.send(1, "a")
        waits = remind.send(1, "b")
        machinery.drain()
        state = machinery.state(waits)
        assert (state.state, state.attempt, attempts) == (State.RECEIVED, 1, [1])

        machinery.advance(seconds=60)
        machinery.drain()
        assert attempts == [1, 1]


def test_revoked_task_that_waits_holds_nobody_up(server: Server) -> None:
    ran: list[int] = []

    @server.task(rate="1/s")
    def call_api(user: int) -> None:
        ran.append(user)

    with Harness(server) as machinery:
        results = [call_api.send(user) for user in range(4)]
        machinery.drain()
        results[1].revoke()
        took = run_all(machinery, ran, 3)

    assert ran == [0, 2, 3]
    assert took < 15


@pytest.mark.parametrize("kind", ["thread", "coroutine"])
def test_at_most_two_run_at_a_time_and_others_go_on(server: Server, kind: str) -> None:
    inside, most, gate = 0, 0, threading.Event()
    lock = threading.Lock()

    def count(change: int) -> None:
        nonlocal inside, most
        with lock:
            inside += change
            most = max(most, inside)

    async def hold_async(tenant: str) -> None:
        import asyncio

        count(1)
        await asyncio.to_thread(gate.wait, HANG)
        count(-1)

    def hold(tenant: str) -> None:
        count(1)
        gate.wait(HANG)
        count(-1)

    task: Any = server.task("hold", max_running=2, running_key="tenant")(
        hold_async if kind == "coroutine" else hold
    )
    plain = server.task("plain")(lambda: 1)
    results = [task.send("a") for _ in range(6)]
    with server.new_worker(concurrency=4, scheduler=False):
        assert plain.send().get(timeout=HANG) == 1
        assert task.send("b") is not None
        wait_until(lambda: inside == 3)
        gate.set()
        for result in results:
            result.get(timeout=HANG)
        wait_until(lambda: running(server) == 0)
    assert most <= 3


@pytest.mark.parametrize("end", ["success", "failure", "retry", "time limit", "early"])
def test_slot_is_free_however_a_run_ends(server: Server, end: str) -> None:
    ran: list[int] = []

    def work(number: int) -> None:
        ran.append(number)
        if number == 1 and end in ("failure", "retry") and ran.count(1) == 1:
            raise ValueError("no")
        if number == 1 and end == "time limit":
            wait_until(lambda: current_task().cancelled)

    task = server.task(
        max_running=1,
        retries=int(end == "retry"),
        backoff=[0.01],
        time_limit=0.1 if end == "time limit" else None,
        ack="early" if end == "early" else "late",
    )(work)
    first, second = task.send(1), task.send(2)
    with server.new_worker(concurrency=2, scheduler=False):
        second.get(timeout=HANG)
        wait_until(first.is_finished)
        wait_until(lambda: running(server) == 0)


def test_eager_store_holds_nobody_back() -> None:
    server = Server("eager")
    task = server.task("work", rate="1/h", max_running=1)(lambda number: number)
    assert [task.send(number).get(timeout=HANG) for number in range(3)] == [0, 1, 2]
    server.close()
