"""Everything that talks to a store has a coroutine twin with the same parameters.

The loop goes on while the twin waits.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from machinery_py import (
    AsyncResult,
    Chain,
    ChainResult,
    ChordResult,
    Group,
    GroupResult,
    Server,
    Signature,
    State,
    StateNotFound,
    Task,
    Worker,
    chain,
    chord,
    group,
)
from machinery_py.async_twins import twin
from machinery_py.control.client import ChosenWorkers, Control
from machinery_py.inspection import Inspector
from machinery_py.limits.limiter import Limiter
from machinery_py.locks.named import NamedLock
from machinery_py.schedules.api import Schedules
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.servers import RedisServer

CLASSES = (
    Server,
    Task,
    Signature,
    Chain,
    Group,
    AsyncResult,
    GroupResult,
    ChainResult,
    ChordResult,
    Inspector,
    Control,
    ChosenWorkers,
    Schedules,
    NamedLock,
    Limiter,
    Worker,
)

#: Methods without a store, or that no coroutine calls: a new method stands here, or has a twin.
OFFLINE: dict[type, set[str]] = {
    Server: {
        "check_wait",
        "convert",
        "get_registered_task",
        "get_registered_task_names",
        "include",
        "is_task_registered",
        "limiter",
        "lock",
        "new_custom_queue_worker",
        "new_worker",
        "now",
        "periodic",
        "register_periodic_chain",
        "register_periodic_chord",
        "register_periodic_group",
        "register_periodic_task",
        "register_task",
        "register_tasks",
        "result",
        "set_pre_publish_handler",
        "task",
        "transaction",
        "why",  # for results, which have twins of their own; so has `inspect.why`
        "worker_hint",  # for results, which ask in a thread
    },
    Task: {
        *("limit_also", "chunks", "map", "options", "partial", "result", "rules_of", "signature"),
        "starmap",
    },
    Chain: {"catch", "then"},
    Group: {"catch", "replace", "then"},
    Signature: {
        "catch",
        "fixed",
        "of",
        "replace",
        "then",
        "with_args",
        "with_headers",
        "with_uuid",
    },
    AsyncResult: {"just_sent"},
    GroupResult: {"as_completed", "just_sent"},  # the first is iterated by `async for` as well
    ChainResult: {"just_sent"},
    ChordResult: {"just_sent"},
    NamedLock: {"check"},
    Control: {"workers"},
    Worker: {
        "abort",
        "add_part",
        "after",
        "every",
        "parts",
        "quit",
        "resize",
        "launch",
        "launch_async",  # Go's: it has a thread of its own
        "blame",  # the worker process's own, before it ends
        "set_connection_error_handler",
        "set_error_handler",
        "set_post_task_handler",
        "set_pre_consume_handler",
        "set_pre_task_handler",
    },
}


def methods() -> Iterator[tuple[type, str]]:
    """The public methods that have to have a twin, each with the class that defines it."""
    for kind in CLASSES:
        for owner in kind.__mro__:
            if not owner.__module__.startswith("machinery_py"):
                continue
            for name, value in vars(owner).items():
                if (
                    name.startswith("_")
                    or name in OFFLINE.get(kind, set())
                    or not inspect.isfunction(value)
                ):
                    continue
                if not name.endswith("_async"):
                    yield kind, name


@pytest.mark.parametrize(
    ("kind", "name"), list(methods()), ids=lambda value: getattr(value, "__name__", value)
)
def test_store_calls_have_async_twins_with_equal_parameters(kind: type, name: str) -> None:
    found = getattr(kind, f"{name}_async", None)

    assert found is not None, f"{kind.__name__}.{name}_async = twin({name})"
    assert inspect.iscoroutinefunction(found)
    assert found.__name__ == f"{name}_async"
    assert f"`{name}` for coroutines" in found.__doc__ or found.__doc__.startswith("As ")
    assert (
        inspect.signature(found).parameters.keys()
        == inspect.signature(getattr(kind, name)).parameters.keys()
    )
    for parameter in inspect.signature(found).parameters.values():
        assert parameter == inspect.signature(getattr(kind, name)).parameters[parameter.name]


def test_no_method_is_offline_that_is_not_there() -> None:
    for kind, names in OFFLINE.items():
        assert {name for name in names if not hasattr(kind, name)} == set()


@pytest.fixture(params=["memory", "redis"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    url = "memory://" if request.param == "memory" else request.getfixturevalue("empty_redis").url
    server = Server(url)

    @server.task
    def add(a: int, b: int) -> int:
        return a + b

    @server.task(queue="failing")
    def fail() -> None:
        raise ValueError("no")

    @server.task(queue="sums")
    def total(*numbers: int) -> int:
        return sum(numbers)

    yield server
    server.close()


def test_async_twins_equal_their_methods(server: Server) -> None:
    asyncio.run(work(server))


async def work(server: Server) -> None:
    add, fail, total = map(server.get_registered_task, ("add", "fail", "total"))
    inspector = server.inspect

    one = await add.send_async(1, 2)
    two = await server.send_async(add.signature(3, 4))
    broken = await fail.options(headers={"x": "y"}).send_async()
    gone = await server.send_task_async(add.signature(5, 6))
    members = await server.send_group_async(group(add.signature(n, n) for n in range(3)))
    steps = await server.send_chain_async(chain(add.signature(1, 1), add.partial(5)))
    sums = await server.send_chord_async(
        chord(group(add.signature(n, 1) for n in range(3)), total.partial())
    )
    assert (await one.get_state_async()).state is State.PENDING
    assert (await one.touch_async(), await one.is_finished_async(), await steps.touch_async()) == (
        None,
        False,
        None,
    )
    assert await members.progress_async() == (0, 3)
    assert await inspector.find_async(one.uuid) == one.uuid
    assert (await inspector.task_async(one.uuid)).signature is not None
    assert {line.queue for line in await inspector.queues_async()} >= {"machinery_tasks", "failing"}
    assert await inspector.purge_async("machinery_tasks") >= 7
    await gone.revoke_async()
    await members.revoke_async()
    await steps.revoke_async()
    await sums.revoke_async()
    await server.revoke_async([two.uuid])

    again = await add.send_async(1, 2)
    await inspector.pause_async("sums")
    await inspector.resume_async("sums")
    worker = server.new_worker(concurrency=2, queues=["machinery_tasks", "failing", "sums"])
    await worker.start_async()
    assert [info.name for info in await inspector.workers_async()] == [worker.name]
    assert await again.get_async(timeout=HANG) == 3
    assert (
        await (
            await server.send_chord_async(
                chord(group(add.signature(n, 1) for n in range(3)), total.partial())
            )
        ).get_async(timeout=HANG)
        == 6
    )
    await asyncio.to_thread(wait_until, broken.is_finished)
    assert [
        state.task_uuid for state in await inspector.tasks_async(state="failed", name="fail")
    ] == [broken.uuid]
    assert await worker.stop_async()
    assert await inspector.retry_async([broken.uuid]) == [broken.uuid]

    assert await inspector.dead_async(limit=5) == []
    with pytest.raises(StateNotFound):
        await inspector.dead_letter_async("none")
    with pytest.raises(StateNotFound):
        await inspector.replay_dead_async(["none"])
    assert await inspector.delete_dead_async([]) == 0

    schedules = server.schedules
    await schedules.add_async("@daily", "nightly", add.signature(1, 2), catch_up="latest")
    await schedules.pause_async("nightly")
    assert (await schedules.get_async("nightly")).paused
    await schedules.resume_async("nightly")
    await schedules.change_async("nightly", spec="@hourly")
    await schedules.run_now_async("nightly")
    assert [one.spec for one in await schedules.list_async()] == ["@hourly"]
    await schedules.remove_async("nightly")
    assert await schedules.list_async() == []

    lock = server.lock("name")
    assert await lock.acquire_async(timeout=HANG)
    assert await lock.release_async()
    await server.close_async()


def test_event_loop_runs_while_async_twins_wait_for_a_store(
    empty_redis: RedisServer,
) -> None:
    server = Server(empty_redis.url)
    add = server.task(len)
    result = add.send("x")
    lock = server.lock("name")

    async def look() -> list[Any]:
        calls = [
            result.get_state_async(),
            result.touch_async(),
            result.is_finished_async(),
            server.inspect.queues_async(),
            server.inspect.tasks_async(),
            server.schedules.list_async(),
            lock.acquire_async(),
            server.send_async(add.signature("y")),
        ]
        empty_redis.freeze()
        try:
            tasks = [asyncio.ensure_future(call) for call in calls]
            for _ in range(200):
                await asyncio.sleep(0.001)
            assert not any(task.done() for task in tasks)
        finally:
            empty_redis.thaw()
        return await asyncio.gather(*tasks)

    state, touched, finished, queues, tasks, schedules, held, sent = asyncio.run(look())

    assert (state.state, touched, finished, held, schedules) == (
        State.PENDING,
        None,
        False,
        True,
        [],
    )
    assert (len(queues), bool(tasks), sent.uuid != result.uuid) == (1, True, True)


class Slow:
    def __init__(self) -> None:
        self.begun, self.go_on, self.over = threading.Event(), threading.Event(), threading.Event()

    def work(self, number: int) -> int:
        """Work."""
        self.begun.set()
        assert self.go_on.wait(HANG)
        self.over.set()
        return number

    work_async = twin(work)


class Other(Slow):
    def work(self, number: int) -> int:
        return number + 1


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "timeout"])
def test_cancelled_async_twin_returns_while_its_call_goes_on(is_cancelled: bool) -> None:
    slow = Slow()

    async def work() -> None:
        task = asyncio.ensure_future(slow.work_async(1))
        await asyncio.to_thread(slow.begun.wait, HANG)
        if is_cancelled:
            task.cancel()
        async with asyncio.timeout(None if is_cancelled else 0.01):
            await task

    async def given_up() -> None:
        with pytest.raises(asyncio.CancelledError if is_cancelled else TimeoutError):
            await work()
        assert not slow.over.is_set()
        slow.go_on.set()
        assert await asyncio.to_thread(slow.over.wait, HANG)

    asyncio.run(given_up())


def test_a_twin_calls_the_method_of_the_subclass() -> None:
    assert asyncio.run(Other().work_async(1)) == 2
