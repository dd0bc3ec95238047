"""Threads in which coroutines make calls: what is taken is given back; none is user code's."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest

from machinery_py import Config, Server
from machinery_py.call_threads import CallThreads, in_thread, taking
from machinery_py.testing.waiting import HANG, wait_until


class Slow:
    """Something that is taken slowly: `taken` when the store has it, though nobody knows yet."""

    def __init__(self) -> None:
        self.taken, self.answer, self.free = (threading.Event() for _ in range(3))

    def take(self) -> str:
        self.taken.set()
        assert self.answer.wait(HANG)
        return "it"

    def give_back(self, what: str) -> None:
        assert what == "it"
        self.free.set()


async def ticks(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_what_a_cancelled_coroutine_has_taken_is_given_back(times: int) -> None:
    slow = Slow()

    async def main() -> None:
        task = asyncio.create_task(taking(slow.take, slow.give_back))
        await asyncio.to_thread(slow.taken.wait, HANG)
        for _ in range(times):
            task.cancel()
            await ticks()
        assert task.done() == (times > 1)
        slow.answer.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert times > 1 or slow.free.is_set()

    asyncio.run(main())
    assert slow.free.wait(HANG)


def test_what_a_coroutine_of_a_closed_loop_has_taken_is_given_back() -> None:
    slow, loop = Slow(), asyncio.new_event_loop()
    call = taking(slow.take, slow.give_back)

    async def main() -> None:
        task = asyncio.create_task(call)
        await asyncio.to_thread(slow.taken.wait, HANG)
        del task

    loop.run_until_complete(main())
    loop.close()
    call.close()
    slow.answer.set()

    assert slow.free.wait(HANG)


def test_failed_call_of_a_cancelled_coroutine_gives_nothing_back() -> None:
    slow = Slow()

    def fail() -> str:
        slow.take()
        raise ValueError("it")

    async def main() -> None:
        task = asyncio.create_task(taking(fail, slow.give_back))
        await asyncio.to_thread(slow.taken.wait, HANG)
        task.cancel()
        await ticks()
        slow.answer.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not slow.free.is_set()


@pytest.mark.parametrize("goes_on", [True, False])
def test_call_cancelled_in_the_queue_is_made_if_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    monkeypatch.setattr("machinery_py.call_threads.CALLS", CallThreads("one", 1))
    slow, made = Slow(), threading.Event()

    async def main() -> None:
        first = asyncio.create_task(in_thread(slow.take))
        await asyncio.to_thread(slow.taken.wait, HANG)
        second = asyncio.create_task(in_thread(made.set, goes_on=goes_on))
        await ticks()
        second.cancel()
        await asyncio.wait([second])
        slow.answer.set()
        await first
        await in_thread(lambda: None)

    asyncio.run(main())
    assert made.is_set() == goes_on


def _send_in_child(server: Server, name: str) -> None:
    asyncio.run(server.get_registered_task(name).send_async("x"))


def test_forked_child_has_threads_of_its_own(tmp_path: object) -> None:
    server = Server(f"sqlite:///{tmp_path}/m.db")
    server.task("measure")(len)
    asyncio.run(server.get_registered_task("measure").send_async("x"))

    child = multiprocessing.get_context("fork").Process(
        target=_send_in_child, args=(server, "measure")
    )
    child.start()
    child.join(HANG)

    assert child.exitcode == 0
    server.close()


def test_user_code_in_asyncio_threads_is_in_nobodys_way() -> None:
    server, go_on = Server("memory://"), threading.Event()

    @server.task
    async def block() -> None:
        await asyncio.to_thread(go_on.wait, HANG)

    @server.task(exclusive="wait", max_running=1)
    async def guarded() -> str:
        async with server.lock("x"), server.limiter("y", max_running=1):
            await block.signature().replace(routing_key="elsewhere").send_async()
        return "done"

    threads = min(32, (os.cpu_count() or 1) + 4)
    with server.new_worker(concurrency=threads + 2, scheduler=False) as worker:
        for _ in range(threads + 1):
            block.send()
        wait_until(lambda: len(worker._live.executors.running()) == threads + 1)
        result = guarded.send()

        assert result.get(HANG) == "done"
        assert not go_on.is_set()
        go_on.set()
    server.close()


AT_EXIT = """
import asyncio, atexit, sys
from machinery_py import Server
server = Server(sys.argv[1])
add = server.task("measure")(len)
@atexit.register
def last():
    asyncio.run(add.send_async("xyz"))
    print("sent")
"""


def test_async_calls_work_while_the_interpreter_ends(tmp_path: object) -> None:
    url = f"sqlite:///{tmp_path}/m.db"
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, url],
        check=False,
        capture_output=True,
        text=True,
        timeout=HANG,
    )

    assert (done.stdout, done.stderr) == ("sent\n", "")
    server = Server(Config(broker=url))
    assert len(server.broker.get_pending_tasks("machinery_tasks")) == 1
    server.close()
