"""Results in coroutines: one thread wakes all that wait."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, TypeVar

import pytest

from machinery_py import Config, ResultTimeout, Server, TaskFailed, chain, chord, group
from machinery_py.backends.base import Listener
from machinery_py.results.waiter import AsyncWaiter, AsyncWaiters
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.apps import Bench, bench

__all__ = ["bench"]

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(HANG):
            return await coroutine

    return asyncio.run(limited())


def threads() -> int:
    return sum(thread.name == "machinery-results" for thread in threading.enumerate())


@pytest.fixture
def working() -> Iterator[Bench]:
    """With a worker in threads and real time."""
    bench = Bench()
    with bench.server.new_worker(concurrency=4):
        yield bench
    bench.server.close()


def test_a_hundred_wait_at_once_and_share_one_thread(working: Bench) -> None:
    gate = threading.Event()

    async def use() -> list[int]:
        results = [await working.add.send_async(i, i) for i in range(100)]
        held = working.server.register_task("held", lambda: gate.wait(HANG) and None)
        await working.server.send_async(held.signature())
        found = await asyncio.gather(*results)
        gate.set()
        assert threads() <= 1
        return list(found)

    assert run(use()) == [2 * i for i in range(100)]


def test_a_waiter_is_woken_when_the_task_ends(bench: Bench) -> None:
    async def use() -> tuple[int, int]:
        result = await bench.add.send_async(1, 2)
        waiting = asyncio.ensure_future(result.get_async(timeout=HANG))
        while not threads():
            await asyncio.sleep(0)
        ran = await asyncio.to_thread(bench.drain)
        return ran, await waiting

    assert run(use()) == (1, 3)


def test_failures_and_timeouts_are_raised_as_in_threads(bench: Bench) -> None:
    async def use() -> None:
        failing = await bench.fail.send_async("boom")
        await asyncio.to_thread(bench.drain)
        with pytest.raises(TaskFailed, match="boom"):
            await failing
        waiting = await bench.add.send_async(1, 2)
        with pytest.raises(ResultTimeout, match=r"after 0\.0 s; last state PENDING, no worker on"):
            await waiting.get_async(timeout=0)

    run(use())


def test_a_waiter_may_give_up(bench: Bench) -> None:
    async def use() -> None:
        result = await bench.add.send_async(1, 2)
        waiting = asyncio.ensure_future(result.get_async())
        while not threads():
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.to_thread(bench.drain)
        assert await result == 3

    run(use())


def test_everything_that_can_be_sent_has_an_async_twin(working: Bench) -> None:
    add, server = working.add, working.server
    two = group(add.signature(1, 1), add.signature(2, 2))

    async def use() -> list[Any]:
        sent = [
            await server.send_task_async(add.signature(1, 1)),
            await add.options(queue="machinery_tasks").send_async(1, 1),
            await add.signature(1, 1).send_async(),
            await server.send_chain_async(chain(add.signature(1, 1), add.partial(1))),
            await (add.signature(1, 1) | add.partial(1)).send_async(),
            await server.send_group_async(two),
            await two.send_async(),
            await server.send_chord_async(chord(two, add.partial())),
            await server.send_async(two | add.partial()),
        ]
        return [await one for one in sent]

    assert run(use()) == [2, 2, 2, 3, 3, [2, 4], [2, 4], 6, 6]


def test_one_result_may_be_awaited_by_several(working: Bench) -> None:
    async def use() -> list[int]:
        result = await working.add.send_async(1, 2)
        return list(await asyncio.gather(*(result.get_async(timeout=HANG) for _ in range(10))))

    assert run(use()) == [3] * 10


def test_each_loop_may_wait(working: Bench) -> None:
    async def use() -> int:
        return await (await working.add.send_async(1, 2))

    assert [run(use()) for _ in range(3)] == [3, 3, 3]


def test_sending_without_await_in_a_loop_works_and_says_so_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async def use() -> None:
        with caplog.at_level(logging.DEBUG, "machinery_py.server"):
            bench.add.send(1, 2)
            bench.add.send(1, 2)

    run(use())
    assert [r.levelname for r in caplog.records if "use send_async" in r.getMessage()] == ["DEBUG"]


def test_closing_the_server_ends_the_thread() -> None:
    server = Server(Config(broker="memory://"))
    add = server.register_task("add", lambda a, b: a + b)

    async def use() -> int:
        result: Any = await add.send_async(1, 2)
        with server.new_worker(concurrency=1):
            return int(await result)

    before = threads()
    assert run(use()) == 3
    server.close()
    server.close()
    assert threads() == before


def test_closing_before_the_thread_has_begun_is_no_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begin = threading.Event()
    run_thread, join = threading.Thread.run, threading.Thread.join

    def run_late(thread: threading.Thread) -> None:
        assert thread.name != "machinery-results" or begin.wait(HANG)
        run_thread(thread)

    def join_thread(thread: threading.Thread, timeout: float | None = None) -> None:
        begin.set()
        join(thread, timeout)

    waiters = AsyncWaiters(bench.server.backend.listener)
    monkeypatch.setattr(threading.Thread, "run", run_late)
    monkeypatch.setattr(threading.Thread, "join", join_thread)

    async def use() -> None:
        with AsyncWaiter(waiters) as waiter:
            waiters.watch(waiter, ["task_1"])

    before = threads()
    run(use())
    waiters.close()
    assert threads() == before
    assert "has died" not in caplog.text


class WrongListener(Listener):
    """One with a mistake in it."""

    def watch(self, uuids: Iterable[str]) -> None: ...
    def unwatch(self, uuids: Iterable[str]) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...

    def wait(self, timeout: float) -> None:
        raise TypeError("a mistake")


def test_mistake_of_a_listener_is_logged_and_waiters_look(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    waiters = AsyncWaiters(WrongListener)

    async def use() -> None:
        with AsyncWaiter(waiters) as waiter:
            await asyncio.to_thread(waiter.watch, ["task_1"])
            await waiter.wait(HANG)

    run(use())
    waiters.close()

    assert ("ERROR", "TypeError") in {
        (one.levelname, one.exc_info[0].__name__)
        for one in caplog.records
        if one.exc_info and one.exc_info[0]
    }


class SlowListener(Listener):
    """One whose store does not answer, until it does."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.answers = threading.Event()

    def watch(self, uuids: Iterable[str]) -> None:
        assert self.answers.wait(HANG), "the loop waited for the store"
        self._listener.watch(uuids)

    def unwatch(self, uuids: Iterable[str]) -> None:
        self._listener.unwatch(uuids)

    def wait(self, timeout: float) -> None:
        self._listener.wait(timeout)

    def wake(self) -> None:
        self._listener.wake()

    def close(self) -> None:
        self._listener.close()


def test_the_loop_goes_on_while_the_store_does_not_answer(
    working: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowListener(working.server.backend.listener())
    monkeypatch.setattr(working.server.backend, "listener", lambda: slow)
    gate = threading.Event()
    held = working.server.register_task("held", lambda: gate.wait(HANG) and 1)

    async def use() -> list[int]:
        results = [await held.send_async() for _ in range(3)]
        waiting = [asyncio.ensure_future(result.get_async(timeout=HANG)) for result in results]
        while not threads():
            await asyncio.sleep(0)
        waiting.append(
            asyncio.ensure_future(results[0].get_async(timeout=HANG))
        )  # it joins while others ask
        waiting[1].cancel()  # and one leaves
        with pytest.raises(asyncio.CancelledError):
            await waiting.pop(1)
        slow.answers.set()
        gate.set()
        return list(await asyncio.gather(*waiting))

    assert run(use()) == [1, 1, 1]


def test_abandoned_result_is_not_watched(bench: Bench) -> None:
    async def use() -> None:
        result = await bench.add.send_async(1, 2)
        for _ in range(3):
            waiting = asyncio.ensure_future(result.get_async())
            while not bench.server.waiters._watched:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    run(use())
    wait_until(lambda: not bench.server.waiters._over)
    assert not bench.server.waiters._watched
    assert not bench.server.waiters._waiting


class ClosingLoop:
    """A loop that is closed just when somebody is about to be woken in it."""

    def call_soon_threadsafe(self, *_: object) -> None:
        raise RuntimeError("Event loop is closed")


def test_closing_event_loop_does_not_stop_other_wakeups(working: Bench) -> None:
    async def use() -> list[int]:
        waiters = working.server.waiters
        gone = waiters.waiter()
        gone._loop = ClosingLoop()  # type: ignore[assignment]
        with gone:
            return [await (await working.add.send_async(i, 1)) for i in range(20)]

    assert run(use()) == list(range(1, 21))
    assert threads()


def test_forked_child_gets_async_waiters_of_its_own(working: Bench) -> None:
    async def use() -> int:
        return await (await working.add.send_async(1, 2))

    assert run(use()) == 3
    waiters = working.server.waiters
    assert working.server.waiters is waiters
    waiters._pid += 1  # as a child would find it
    assert run(use()) == 3
    assert working.server.waiters is not waiters
    waiters._pid -= 1
    waiters.close()
