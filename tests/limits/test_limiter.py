"""Limits by hand, their reports and changes, in memory."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from machinery_py import ArgumentError, LimitNotAcquired, Server, TaskFailed
from machinery_py.cli.limits import limits, limits_reset, limits_set
from machinery_py.testing.conformance.exclusive import Overlap
from machinery_py.testing.harness import Harness
from machinery_py.testing.waiting import HANG, wait_until


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("memory://limiter")
    yield server
    server.close()


def test_rate_of_a_limiter_is_kept_and_a_timeout_gives_the_place_back(server: Server) -> None:
    start = time.monotonic()
    for _ in range(3):
        with server.limiter("smtp", "20/s"):
            pass
    assert time.monotonic() - start >= 0.09

    slow = server.limiter("slow", "1/h", timeout=0.02)
    with slow:
        pass
    with pytest.raises(LimitNotAcquired, match="limiter:slow.: its turn did not come in 0.02 s"):
        slow.__enter__()
    [report] = [one for one in server.inspect.limits() if one.name == "limiter:slow"]
    assert report.usage[0].waiting == 0


def test_threads_and_coroutines_share_the_slots_of_a_limiter(server: Server) -> None:
    limiter, inside, most = server.limiter("db", max_running=2), 0, 0
    lock, gate = threading.Lock(), threading.Event()

    def count(change: int) -> None:
        nonlocal inside, most
        with lock:
            inside += change
            most = max(most, inside)

    def work() -> None:
        with limiter:
            count(1)
            gate.wait(HANG)
            count(-1)

    async def work_async() -> None:
        async with limiter:
            count(1)
            await asyncio.sleep(0)
            count(-1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: inside == 2)
    gate.set()
    asyncio.run(work_async())
    for thread in threads:
        thread.join(HANG)
    assert most == 2
    assert sum(one.running for report in server.inspect.limits() for one in report.usage) == 0


def test_cancelled_coroutine_holds_nothing(server: Server) -> None:
    limiter = server.limiter("db", max_running=1)

    async def waiting() -> None:
        async with limiter:
            pytest.fail("somebody else has the slot")

    async def main() -> None:
        task = asyncio.create_task(waiting())
        while not any(one.waiting for r in server.inspect.limits() for one in r.usage):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with limiter:
        asyncio.run(main())
    assert limiter.acquire(timeout=HANG)
    limiter.release()
    assert not any(one.waiting for r in server.inspect.limits() for one in r.usage)


def waiting(server: Server) -> int:
    return sum(one.waiting for report in server.inspect.limits() for one in report.usage)


@pytest.mark.parametrize("kind", ["thread", "coroutine"])
def test_task_whose_time_ends_while_it_waits_leaves_the_line(server: Server, kind: str) -> None:
    limiter = server.limiter("smtp", "1/h")
    assert limiter.acquire()

    def wait() -> None:
        limiter.acquire()

    async def wait_async() -> None:
        await limiter.acquire_async()

    task: Any = server.task("wait", time_limit=0.5)(wait_async if kind == "coroutine" else wait)
    with server.new_worker(concurrency=1, scheduler=False):
        result = task.send()
        wait_until(lambda: waiting(server) == 1, HANG)
        with pytest.raises(TaskFailed, match="time limit"):
            result.get(timeout=HANG)
        wait_until(lambda: waiting(server) == 0, HANG)  # much earlier than the place would lapse


@pytest.fixture
def interruptible() -> Iterator[None]:
    """In the background of a shell SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_waiting_that_is_interrupted_leaves_the_line(server: Server) -> None:
    limiter = server.limiter("smtp", "1/h")
    assert limiter.acquire()

    def interrupt() -> None:
        wait_until(lambda: waiting(server) == 1, HANG)
        signal.raise_signal(signal.SIGINT)  # its handler runs in the main thread

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        limiter.acquire()
    thread.join(HANG)
    assert waiting(server) == 0


def test_changed_limit_counts_from_the_next_run_on_until_it_is_reset(server: Server) -> None:
    ran: list[int] = []

    @server.task(rate="1/h", max_running=5)
    def call_api(user: int) -> None:
        ran.append(user)

    with Harness(server) as machinery:
        call_api.send(1)
        machinery.drain()
        server.control.limit("call_api", rate="1/s")
        server.control.limit("call_api", burst=3)
        [report] = server.inspect.limits()
        assert report.options == {"rate": "1/h", "max_running": 5}
        assert report.changed == {"rate": "1/s", "burst": 3}

        call_api.send(2)
        machinery.drain()
        machinery.advance(seconds=2)
        machinery.drain()
        assert ran == [1, 2]
        server.control.reset_limit("call_api")
        assert server.inspect.limits()[0].changed == {}


def test_task_without_limits_in_its_code_can_be_limited_while_it_runs(server: Server) -> None:
    overlap = Overlap()
    gate = threading.Event()

    @server.task
    def plain(number: int) -> None:
        with overlap:
            gate.wait(HANG)

    server.control.limit("plain", max_running=1)
    with server.new_worker(concurrency=4, scheduler=False):
        results = [plain.send(number) for number in range(4)]
        wait_until(lambda: overlap.inside)
        [report] = server.inspect.limits()
        assert (report.name, dict(report.options)) == ("plain", {})
        assert report.changed == {"max_running": 1}
        gate.set()
        for result in results:
            result.get(timeout=HANG)
        assert overlap.most == 1

        gate.clear()
        server.control.reset_limit("plain")
        wait_until(lambda: not plain.is_guarded)
        results = [plain.send(number) for number in range(3)]
        wait_until(lambda: overlap.inside == 3)
        server.control.limit("plain", rate="1/h")
        wait_until(lambda: plain.is_guarded)
        gate.set()
        for result in results:
            result.get(timeout=HANG)
        first, second = plain.send(8), plain.send(9)
        first.get(timeout=HANG)
        wait_until(lambda: any(one.delayed for one in server.inspect.queues()))
        assert not second.is_finished()


def test_limit_that_is_reset_between_two_workers_of_a_process_holds_no_more(
    server: Server,
) -> None:
    @server.task
    def plain() -> None: ...

    server.control.limit("plain", max_running=1)
    with server.new_worker(concurrency=1, scheduler=False):
        wait_until(lambda: plain.is_guarded)
    server.control.reset_limit("plain")

    with server.new_worker(concurrency=1, scheduler=False):
        wait_until(lambda: not plain.is_guarded)


@pytest.mark.parametrize(
    ("name", "limit", "error"),
    [
        ("call_ap", {"rate": "1/s"}, r"no task 'call_ap' is known here; did you mean 'call_api'"),
        ("call_api", {"max_running": 0}, r"call_api: max_running=0"),
        ("call_api", {"rate": "5"}, r"call_api: rate='5' \(expected a number and a unit"),
        ("call_api", {"rate": "1/d", "burst": 2**31 - 1}, r"it takes more than 100 years\)"),
        ("call_api", {"speed": 5}, r"no limit 'speed' \(known: burst, max_running"),
        ("call_api", {}, r"no limit is named"),
    ],
)
def test_limit_that_cannot_be_changed_is_refused_in_words(
    server: Server, name: str, limit: dict[str, object], error: str
) -> None:
    server.task("call_api", rate="1/s")(print)
    with pytest.raises(ArgumentError, match=error):
        server.control.limit(name, **limit)  # type: ignore[arg-type] - wrong on purpose


def test_commands_show_and_change_limits(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.task("call_api", rate="10/s", rate_key="tenant")(lambda tenant: None)
    args = Namespace(json=False, rest=["call_api", "rate=1/s", "burst=5"])

    assert limits_set(server, args) == 0
    assert capsys.readouterr().out == "call_api: rate=1/s, burst=5, from now on\n"
    server.get_registered_task("call_api").send("a")
    with server.new_worker(concurrency=1, burst=True, scheduler=False) as worker:
        wait_until(lambda: worker.processed)
    limits(server, args)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        ["call_api", "rate=1/s", "(changed)", "-", "-", "-", "-"],
        ["call_api", "burst=5", "(changed)", "-", "-", "-", "-"],
        ["call_api", "rate=1/s,", "burst=5", "tenant=a", "-", "0", "now"],
    ]
    limits_reset(server, Namespace(json=False, rest=["call_api"]))
    assert "the limits of the code count again for call_api" in capsys.readouterr().out
    with pytest.raises(ArgumentError, match="found no '='"):
        limits_set(server, Namespace(json=False, rest=["call_api", "rate"]))
