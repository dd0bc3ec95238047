"""Whatever user code does in a worker, its task ends and the worker keeps all of its slots."""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from machinery_py import (
    ArgumentError,
    Config,
    Context,
    RetryTaskLater,
    Server,
    Signature,
    State,
    TaskFailed,
    current_task,
    group,
)
from machinery_py.brokers.base import Message
from machinery_py.events import TaskStarted
from machinery_py.tasks.context import RUNNING
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.worker import Worker
from tests.support.fixtures import url_of

SLOTS = 2


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(Config(broker="memory://"))
    yield server
    server.close()


@pytest.fixture
def worker(server: Server) -> Iterator[Worker]:
    """It must end in good order, with all that was given to it settled."""
    worker = server.new_worker(concurrency=SLOTS, shutdown_timeout=HANG)
    with worker:
        yield worker
        wait_until(lambda: worker.active == 0, what="nothing runs any more")
    assert not any(stats.running or stats.waiting for stats in server.broker.stats())


def has_all_slots(server: Server) -> None:
    """As many tasks as there are slots run at the same time."""
    barrier = threading.Barrier(SLOTS)
    meet = server.register_task("meet", lambda: barrier.wait(HANG) >= 0)
    for result in [meet.send() for _ in range(2 * SLOTS)]:
        assert result.get(timeout=HANG)


def leave(_: object) -> None:
    sys.exit("enough")


async def nothing() -> str:
    return "done"


async def wrong() -> None:
    raise ValueError("wrong")


def test_a_handler_after_the_task_may_call_exit(server: Server, worker: Worker) -> None:
    plain, coroutine = (
        server.register_task("plain", lambda: "done"),
        server.register_task("coroutine", nothing),
    )
    worker.set_post_task_handler(leave)

    for _ in range(2 * SLOTS):
        assert plain.send().get(timeout=HANG) == "done"
        assert coroutine.send().get(timeout=HANG) == "done"
    has_all_slots(server)


def test_no_task_is_current_in_the_handler_after_it(server: Server, worker: Worker) -> None:
    plain = server.register_task("plain", lambda: current_task().name)
    coroutine = server.register_task("coroutine", nothing)
    current: list[Context | None] = []
    worker.set_post_task_handler(lambda _: current.append(RUNNING.get()))

    plain.send().get(timeout=HANG)
    coroutine.send().get(timeout=HANG)

    wait_until(lambda: len(current) == 2, HANG, "both handlers")
    assert current == [None, None]


def test_an_error_handler_may_call_exit(server: Server, worker: Worker) -> None:
    plain, coroutine = (
        server.register_task("plain", lambda: int("x")),
        server.register_task("coroutine", wrong),
    )
    worker.set_error_handler(leave)

    for task in (plain, coroutine) * SLOTS:
        with pytest.raises(TaskFailed):
            task.send().get(timeout=HANG)
    has_all_slots(server)


def test_event_handler_that_calls_exit_changes_nothing(
    server: Server, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    plain, coroutine = (
        server.register_task("plain", lambda: "done"),
        server.register_task("coroutine", nothing),
    )
    end = server.events.subscribe(TaskStarted, leave)

    for task in (plain, coroutine) * SLOTS:
        task.send().get(timeout=HANG)
    end()
    assert caplog.text.count("failed on TaskStarted") == 2 * SLOTS
    has_all_slots(server)


@dataclass
class Fragile:
    """Raises what nobody expects when it is made."""

    number: int

    def __post_init__(self) -> None:
        raise KeyError("no such number")


def test_an_argument_that_cannot_be_made_fails_its_task(server: Server, worker: Worker) -> None:
    def look(value: Fragile) -> None: ...

    server.register_task("look", look)

    for _ in range(2 * SLOTS):
        sent = Signature.of("look", {"number": 1}).with_uuid()
        with pytest.raises(ArgumentError, match="is no Fragile: KeyError"):
            server.send_task(sent)
        server.app.submit([sent])  # as a program would that does not know the task
        with pytest.raises(TaskFailed, match="is no Fragile: KeyError") as caught:
            server.result(sent.uuid).get(timeout=HANG)
        assert caught.value.error_type == "ArgumentError"
    has_all_slots(server)


class NoText(RetryTaskLater):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoDelay(RetryTaskLater):
    def __init__(self) -> None:
        pass


def test_broken_retry_request_fails_only_its_task(server: Server, worker: Worker) -> None:
    tries: list[int] = []

    def no_text() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise NoText("later", 0.0)
        return "done"

    def no_delay() -> None:
        raise NoDelay

    assert server.register_task("no_text", no_text).send().get(timeout=HANG) == "done"
    with pytest.raises(TaskFailed, match="delay"):
        server.register_task("no_delay", no_delay).send().get(timeout=HANG)
    has_all_slots(server)


def test_tasks_left_by_a_coroutine_cannot_end_the_loop(server: Server, worker: Worker) -> None:
    left: list[asyncio.Task[None]] = []

    async def exits() -> None:
        leave(None)

    async def leaves_behind() -> str:
        left.append(asyncio.ensure_future(exits()))
        return "done"

    async def stops() -> str:
        asyncio.get_running_loop().stop()
        return "done"

    for name, function in (
        ("leaves_behind", leaves_behind),
        ("stops", stops),
        ("nothing", nothing),
    ):
        task = server.register_task(name, function)
        for _ in range(SLOTS):
            assert task.send().get(timeout=HANG) == "done"
    has_all_slots(server)


# Time limits


def test_threads_that_are_stuck_are_replaced_one_for_one(server: Server, worker: Worker) -> None:
    gate = threading.Event()
    stuck = server.task("stuck", time_limit=0.05)(lambda: gate.wait(HANG) and None)

    for _ in range(2 * SLOTS):
        with pytest.raises(TaskFailed, match="time limit"):
            stuck.send().get(timeout=HANG)
    has_all_slots(server)
    gate.set()


@pytest.mark.parametrize("store", ["memory", "sqlite", "redis"])
def test_task_timed_out_while_sending_leaves_no_lock(
    store: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    server = Server(Config(broker=url_of(store, tmp_path / "m.db", request)))
    ended: list[int] = []

    @server.task(time_limit=0.1)
    def sends() -> None:
        try:
            while True:
                small.options(queue="nobody").send()
        finally:
            ended.append(1)

    @server.task(time_limit=0.1)
    def waits() -> None:
        try:
            small.options(queue="nobody").send().get()
        finally:
            ended.append(1)

    @server.task(time_limit=0.1)
    def locks() -> None:
        try:
            server.lock("held").acquire()
        finally:
            ended.append(1)

    small = server.register_task("small", lambda: None)
    with server.lock("held"), server.new_worker(concurrency=SLOTS):
        results = [task.send() for task in (sends, waits, locks, sends) * 2]
        for result in results:
            with pytest.raises(TaskFailed, match="time limit"):
                result.get(timeout=HANG)
        wait_until(lambda: len(ended) == len(results), what="all of them were told")
        has_all_slots(server)
    server.close()


def test_a_thread_that_waits_for_a_lock_is_not_interrupted_there(tmp_path: pathlib.Path) -> None:
    server = Server(Config(broker=f"sqlite:///{tmp_path}/m.db"))
    begun = threading.Event()

    @server.task(time_limit=0.5)
    def sends() -> None:
        begun.wait(HANG)
        small.options(queue="nobody").send()

    small = server.register_task("small", lambda: None)
    broker: Any = server.broker
    with server.new_worker(concurrency=SLOTS) as worker:
        result = sends.send()
        wait_until(lambda: worker.active == 1, what="it runs")
        with broker.driver.transaction():
            begun.set()
            wait_until(lambda: worker.active == 0, what="its time is up, and it waits for the lock")
        with pytest.raises(TaskFailed, match="time limit"):
            result.get(timeout=HANG)
        has_all_slots(server)


def test_a_task_is_interrupted_in_code_that_another_task_calls(
    server: Server, worker: Worker
) -> None:
    ended = threading.Event()

    @server.task
    def inner() -> None:
        try:
            while True:
                pass
        finally:
            ended.set()

    @server.task(time_limit=0.05)
    def outer() -> None:
        inner()

    with pytest.raises(TaskFailed, match="time limit"):
        outer.send().get(timeout=HANG)
    assert ended.wait(HANG)
    has_all_slots(server)


# Chords


def test_failing_publish_handler_ends_only_its_chord(
    server: Server,
) -> None:
    @server.set_pre_publish_handler
    def broken(signature: Signature[Any]) -> None:
        if signature.name == "bad":
            raise RuntimeError("my handler")

    add = server.register_task("add", lambda *numbers: sum(numbers))
    bad = server.register_task("bad", lambda *numbers: None)
    failing = [(group(add.signature(1), add.signature(2)) | bad.partial()).send() for _ in range(3)]

    for _ in range(2):  # a second worker can start, too
        with server.new_worker(concurrency=SLOTS):
            good = (group(add.signature(1), add.signature(2)) | add.partial()).send()
            assert good.get(timeout=HANG) == 3
            for result in failing:
                with pytest.raises(TaskFailed, match="callback cannot be sent: my handler"):
                    result.get(timeout=HANG)
    assert server.app.store.ready_groups() == []


def test_chord_ends_when_its_error_callback_cannot_be_sent(server: Server) -> None:
    @server.set_pre_publish_handler
    def broken(signature: Signature[Any]) -> None:
        if signature.name == "bad":
            raise RuntimeError("my handler")

    add = server.register_task("add", lambda *numbers: sum(numbers))
    fail = server.register_task("fail", lambda: int("x"))
    bad = server.register_task("bad", lambda *texts: None)
    result = (group(add.signature(1), fail.signature()) | add.partial().catch(bad.partial())).send()

    with server.new_worker(concurrency=SLOTS), pytest.raises(TaskFailed):
        result.callback.get(timeout=HANG)
    assert server.app.store.ready_groups() == []


def test_chord_whose_foreign_error_callback_is_none_ends(server: Server) -> None:
    server.register_task("fail", lambda: int("x"))
    callback = {"UUID": "task_callback", "Name": "fail", "OnError": [{"Name": 7}]}
    member = {
        "UUID": "task_member",
        "Name": "fail",
        "GroupUUID": "group_g",
        "GroupTaskCount": 1,
        "ChordCallback": callback,
    }
    body = json.dumps(member).encode()
    server.broker.put([Message(uuid="", name="", queue="machinery_tasks", body=body)], token="")

    with server.new_worker(concurrency=SLOTS):
        wait_until(
            lambda: "task_callback" in server.backend.get_states(["task_callback"]),
            what="an end of the chord",
        )
        assert server.register_task("good", lambda: 1).send().get(timeout=HANG) == 1
    assert server.app.store.ready_groups() == []
    assert server.result("task_callback").get_state().state is State.FAILURE
