"""Handlers of the app: docs/how-to/hooks.md, row by row, and handlers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from machinery_py import Context, Ignore, Server, Signature, TaskFailed, current_task
from machinery_py.errors import MachineryError, RetryTaskLater, TimeLimitExceeded
from machinery_py.tasks.signature import HEADER_EXPIRES, Arg
from machinery_py.testing.harness import Harness
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker import engine
from machinery_py.worker.running import end_hooks

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "hooks.md"
ENDS = ("on_success", "on_retry", "on_failure")
LONG = 3600.0


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("memory://")
    yield server
    server.close()


@dataclass
class Even:
    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise ValueError("odd")


def note_calls(server: Server, calls: list[str]) -> None:
    for kind in ("before_task", "after_task"):
        getattr(server, kind)(lambda ctx, kind=kind: calls.append(kind))
    for kind in ENDS:
        getattr(server, kind)(lambda ctx, given, kind=kind: calls.append(kind))


# Each row of the second table


def _return() -> int:
    return 1


def _raise() -> None:
    raise ValueError("no")


def _later() -> None:
    raise RetryTaskLater("later", delay=LONG)


def _ignore() -> None:
    raise Ignore("of no use")


def _hang() -> None:
    while True:
        time.sleep(0.005)


def _finish_elsewhere(server: Server) -> None:
    """Write the end of a task while it runs, as another worker would."""

    def finished() -> None:
        signature = current_task().signature
        server.backend.set_state_failure(signature, "by another worker")

    server.task("t")(finished).send()


def _send(server: Server, signature: Signature[Any]) -> None:
    server.task("t")(_return)
    server.app.submit([signature.with_uuid()])


ROWS: dict[str, Callable[[Server], object]] = {
    "returns": lambda server: server.task("t")(_return).send(),
    "raises, and a try is left": lambda server: server.task("t", retries=1, backoff=[LONG])(
        _raise
    ).send(),
    "raises, and no try is left": lambda server: server.task("t")(_raise).send(),
    "raises `RetryTaskLater`, or `Reject(requeue=True)`": lambda server: server.task("t")(
        _later
    ).send(),
    "raises `Reject`, or `Ignore`": lambda server: server.task("t")(_ignore).send(),
    "runs longer than its time limit": lambda server: server.task("t", time_limit=0.02)(
        _hang
    ).send(),
    "gets arguments that it refuses": lambda server: _send(
        server, Signature(name="t", args=(Arg(type="string", value="x"),))
    ),
    "has expired": lambda server: _send(server, Signature(name="t", headers={HEADER_EXPIRES: "1"})),
    "is revoked while it waits": lambda server: server.task("t")(_return).send().revoke(),
    "was finished meanwhile by somebody else": _finish_elsewhere,
}


def table() -> dict[str, list[str]]:
    rows = PAGE.read_text().partition("## Which of them")[2].split("\n")
    cells = [row.strip("|").split("|") for row in rows if row.startswith("|")][2:]
    return {first.strip(): re.findall(r"`(\w+)`", called) for first, called in cells}


def test_the_page_has_exactly_these_rows() -> None:
    assert list(table()) == list(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_handlers_are_called_as_the_page_says(server: Server, row: str) -> None:
    calls: list[str] = []
    note_calls(server, calls)

    ROWS[row](server)
    server.new_worker(concurrency=1, burst=True).launch(signals=False)

    assert sorted(calls) == sorted(table()[row])


# Where, with what


def test_handlers_know_the_task_and_what_became_of_it(server: Server) -> None:
    seen: list[tuple[Any, ...]] = []
    threads: dict[str, str] = {}

    def note(kind: str, *given: object) -> None:
        threads[kind] = threading.current_thread().name
        seen.append((kind, current_task().name, *given))

    server.before_task(lambda ctx: note("before"))
    server.after_task(lambda ctx: note("after"))
    server.on_success(lambda ctx, result: note("success", ctx.queue, result))
    server.on_failure(lambda ctx, error: note("failure", error))

    @server.on_success
    async def on_loop(ctx: Context, result: object) -> None:
        await asyncio.sleep(0)
        threads["async"] = threading.current_thread().name

    good = server.task("good")(_return)
    error = ValueError("no")

    @server.task
    def bad() -> None:
        raise error

    with server.new_worker("w", concurrency=1):
        good.send().get(timeout=HANG)
        with pytest.raises(TaskFailed):
            bad.send().get(timeout=HANG)

    # The next task may begin before the handlers of an ended one are called.
    assert sorted(seen, key=lambda one: one[1], reverse=True) == [
        ("before", "good"),
        ("after", "good"),
        ("success", "good", "machinery_tasks", 1),
        ("before", "bad"),
        ("after", "bad"),
        ("failure", "bad", error),
    ]
    assert threads == {
        "before": "w-1",
        "after": "w-1",
        "success": "w-hooks",
        "failure": "w-hooks",
        "async": "w-loop",
    }


def test_failure_handler_of_a_task_that_ran_too_long_may_send(server: Server) -> None:
    told: list[BaseException] = []
    mail = server.task("mail")(_return)

    @server.on_failure
    def tell(ctx: Context, error: BaseException) -> None:
        mail.send()
        told.append(error)
        raise error

    slow = server.task("slow", time_limit=0.02)(_hang)
    with server.new_worker(concurrency=1) as one:
        for count in (2, 4):
            slow.send()
            wait_until(lambda count=count: one.processed == count, what="the mail")

    assert [type(error) for error in told] == [TimeLimitExceeded] * 2


def test_success_handler_is_not_called_with_a_result_that_no_caller_gets(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[object] = []
    server.on_success(lambda ctx, result: given.append(result))

    @server.task
    def make(number: int) -> Even:
        even = Even(0)
        even.number = number
        return even

    for number in (1, 2):
        make.send(number)
    server.new_worker(concurrency=1, burst=True).launch(signals=False)

    assert given == [Even(2)]
    assert "on_success handlers are not called: task make" in caplog.text


def test_eager_coroutines_may_send_without_blocking_the_loop() -> None:
    with contextlib.closing(Server("eager://")) as server:
        calls: list[str] = []

        @server.task
        def mail(text: str) -> None:
            calls.append(text)

        @server.on_success
        async def tell(ctx: Context, result: object) -> None:
            if ctx.name == "work":
                await mail.send_async("from the handler")

        @server.task
        async def work() -> None:
            await mail.send_async("from the task")

        work.send().get(timeout=HANG)

    assert sorted(calls) == ["from the handler", "from the task"]


def test_coroutine_task_has_its_handlers_on_its_loop(server: Server) -> None:
    calls: list[tuple[str, bool]] = []

    def note(kind: str) -> None:
        calls.append((kind, asyncio.get_running_loop() is not None))

    @server.before_task
    async def before(ctx: Context) -> None:
        note(f"before {current_task().name}")

    server.after_task(lambda ctx: note("after"))

    @server.task
    async def work() -> None:
        note("run")

    with server.new_worker(concurrency=1):
        work.send().get(timeout=HANG)

    assert calls == [("before work", True), ("run", True), ("after", True)]


# Handlers that misbehave


def test_coroutine_handler_that_meets_a_cancellation_of_its_own_changes_nothing(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    @server.before_task
    @server.after_task
    async def cancel(ctx: Context) -> None:
        inner = asyncio.ensure_future(asyncio.sleep(LONG))
        inner.cancel()
        await inner

    @server.task
    async def coroutine() -> int:
        return 7

    with server.new_worker(concurrency=1):
        assert coroutine.send().get(timeout=HANG) == 7

    assert caplog.text.count("handler") >= 2


def test_time_limit_ends_a_coroutine_handler(server: Server) -> None:
    @server.before_task
    async def hang(ctx: Context) -> None:
        await asyncio.sleep(LONG)

    @server.task(time_limit=0.05)
    async def coroutine() -> int:
        return 7

    with server.new_worker(concurrency=1), pytest.raises(TaskFailed, match="time limit"):
        coroutine.send().get(timeout=HANG)


def test_handlers_are_called_when_a_thread_can_be_had_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str] = []
    server.on_success(lambda ctx, result: called.append(ctx.uuid))
    task = server.task("t")(_return)
    start, failures = threading.Thread.start, iter([True])

    def start_or_not(self: threading.Thread) -> None:
        if self.name.endswith("-hooks") and next(failures, False):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    with server.new_worker(concurrency=1):
        uuids = []
        for _ in range(2):
            uuids.append(task.send().uuid)
            assert server.result(uuids[-1]).get(timeout=HANG) == 1

    assert called == uuids
    assert caplog.text.count("no thread for on_… handlers: can't start new thread") == 1


def test_stop_waits_once_for_a_handler_that_hangs(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "LOOP_WAIT", 0.05)
    gate, entered = threading.Event(), threading.Event()

    @server.on_success
    def hang(ctx: Context, result: object) -> None:
        entered.set()
        gate.wait(HANG)

    with server.new_worker(concurrency=1):
        server.task("t")(_return).send()
        assert entered.wait(HANG)
    gate.set()

    assert caplog.text.count("one did not return within 0.05 s") == 1


def _exit(*_: object) -> None:
    sys.exit("enough")


async def _exit_async(*_: object) -> None:
    sys.exit("enough")


@pytest.mark.parametrize("handler", [_exit, _exit_async])
def test_handler_that_exits_changes_nothing(
    server: Server, caplog: pytest.LogCaptureFixture, handler: Callable[..., Any]
) -> None:
    for kind in ("before_task", "after_task", *ENDS):
        getattr(server, kind)(handler)
    good = server.task("good")(_return)
    bad = server.task("bad")(_raise)

    @server.task
    async def coroutine() -> int:
        return 2

    with server.new_worker(concurrency=1):
        for _ in range(2):
            assert good.send().get(timeout=HANG) == 1
            assert coroutine.send().get(timeout=HANG) == 2
            with pytest.raises(TaskFailed):
                bad.send().get(timeout=HANG)

    failed = [one.getMessage() for one in caplog.records if " handler _exit" in one.getMessage()]
    assert len([text for text in failed if text.startswith("before_task")]) == 6
    assert len([text for text in failed if text.startswith("on_success")]) == 4
    assert len([text for text in failed if text.startswith("on_failure")]) == 2


def test_handler_that_blocks_keeps_back_new_tasks_but_no_result(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(end_hooks, "MOST_WAITING", 2)
    gate = threading.Event()
    called: list[str] = []

    @server.on_success
    def block(ctx: Context, result: object) -> None:
        gate.wait(HANG)
        called.append(ctx.uuid)

    task = server.task("t")(_return)
    with server.new_worker(concurrency=1):
        first = [task.send() for _ in range(3)]
        for result in first:
            assert result.get(timeout=HANG) == 1
        wait_until(lambda: "no new tasks are taken" in caplog.text, what="the warning")
        late = task.send()
        assert not called
        gate.set()
        assert late.get(timeout=HANG) == 1

    assert called == [result.uuid for result in (*first, late)]


# Lifespans


def test_lifespans_are_around_all_tasks_of_a_worker(server: Server) -> None:
    events: list[str] = []

    @server.lifespan
    def outer() -> Iterator[dict[str, object]]:
        thread = threading.current_thread()
        events.append("outer begins")
        yield {"outer": 1, "both": "outer"}
        assert threading.current_thread() is thread
        events.append("outer ends")

    @server.lifespan
    async def inner() -> AsyncIterator[dict[str, object]]:
        task = asyncio.current_task()
        events.append("inner begins")
        yield {"loop": asyncio.get_running_loop(), "both": "inner"}
        assert asyncio.current_task() is task
        events.append("inner ends")

    @server.lifespan
    def silent() -> Iterator[None]:
        yield

    @server.task
    def plain(ctx: Context) -> list[Any]:
        return [ctx.state["outer"], ctx.state["both"]]

    @server.task
    async def coroutine(ctx: Context) -> bool:
        events.append("runs")
        return ctx.state["loop"] is asyncio.get_running_loop()

    one = server.new_worker(concurrency=1)
    for _ in range(2):  # it may be started again
        events.clear()
        with one:
            assert plain.send().get(timeout=HANG) == [1, "inner"]
            assert coroutine.send().get(timeout=HANG) is True
        assert events == ["outer begins", "inner begins", "runs", "inner ends", "outer ends"]


def _yield_nothing() -> Iterator[None]:
    if not PAGE:
        yield


async def _yield_nothing_async() -> AsyncIterator[None]:
    if not PAGE:
        yield


def _yield_three() -> Iterator[Any]:
    yield 3


def _exit_at_once() -> Iterator[None]:
    sys.exit("enough")
    yield


@pytest.mark.parametrize(
    ("lifespan", "told"),
    [
        (_yield_nothing, "RuntimeError: generator didn't yield"),
        (_yield_nothing_async, "RuntimeError: generator didn't yield"),
        (_yield_three, "TypeError: it yielded 3"),
        (_exit_at_once, "SystemExit: enough"),
    ],
)
def test_worker_does_not_start_without_its_lifespan(
    server: Server, lifespan: Any, told: str
) -> None:
    events: list[str] = []

    @server.lifespan
    def first() -> Iterator[None]:
        yield
        events.append("left")

    server.lifespan(lifespan)
    one = server.new_worker(concurrency=1)

    with pytest.raises(MachineryError, match=f"lifespan {lifespan.__name__} cannot start: {told}"):
        one.start()
    with pytest.raises(MachineryError, match="cannot start"):
        one.launch(signals=False)

    assert events == ["left", "left"]
    assert not server.inspect.workers()
    assert not [thread for thread in threading.enumerate() if "-lifespan" in thread.name]


def test_lifespan_that_fails_at_its_end_is_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[str] = []

    @server.lifespan
    def first() -> Iterator[None]:
        yield
        events.append("left")

    @server.lifespan
    def fails() -> Iterator[None]:
        yield
        sys.exit("enough")

    with server.new_worker(concurrency=1):
        pass

    assert events == ["left"]
    assert "lifespan " in caplog.text
    assert "fails failed at its end" in caplog.text


def test_lifespan_that_does_not_end_is_left_behind(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "LOOP_WAIT", 0.05)
    gate = threading.Event()

    @server.lifespan
    def slow() -> Iterator[None]:
        yield
        gate.wait(HANG)

    with server.new_worker(concurrency=1):
        pass
    gate.set()

    assert "a lifespan did not end within 0.05 s" in caplog.text


def test_worker_may_be_stopped_while_its_lifespan_begins(server: Server) -> None:
    gate, begun = threading.Event(), threading.Event()

    @server.lifespan
    def slow() -> Iterator[None]:
        begun.set()
        gate.wait(HANG)
        yield

    one = server.new_worker(concurrency=1)
    thread = one.launch_async()
    assert begun.wait(HANG)
    one.quit()
    wait_until(lambda: gate.set() is None and not thread.is_alive(), what="the end of the worker")

    assert not server.inspect.workers()


def test_drained_tasks_have_handlers_and_lifespans(server: Server) -> None:
    calls: list[str] = []
    note_calls(server, calls)

    @server.lifespan
    async def resources() -> AsyncIterator[dict[str, object]]:
        yield {"loop": asyncio.get_running_loop()}
        calls.append("left")

    @server.task
    async def work(ctx: Context) -> bool:
        return ctx.state["loop"] is asyncio.get_running_loop()

    with Harness(server) as harness:
        result = work.send()
        harness.drain()
        assert result.touch() is True

    assert calls[:4] == ["before_task", "after_task", "on_success", "left"]
