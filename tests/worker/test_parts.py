"""Parts of a worker, added ones and its own: order, failures, drawing; functions on its timer."""

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from machinery_py import Context, Server, Signature
from machinery_py.errors import ConfigError, MachineryError
from machinery_py.events import WorkerOnline
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.parts import Part, in_order
from machinery_py.worker.running.event_loop import EventLoopThread
from machinery_py.worker.worker import Worker


@pytest.fixture
def server() -> Server:
    return Server("memory://")


class Noted:
    """A part that notes its ends."""

    def __init__(self, calls: list[str], name: str, fails: str = "") -> None:
        self._calls, self._name, self._fails = calls, name, fails

    def start(self, worker: Worker) -> None:
        assert worker.concurrency == 1
        self._calls.append(f"{self._name} begins")
        if self._fails == "start":
            raise OSError("no route")

    def stop(self, _: Worker) -> None:
        self._calls.append(f"{self._name} ends")
        if self._fails == "stop":
            raise SystemExit(3)


def names(parts: Sequence[Part]) -> list[str]:
    return [part.name for part in in_order(parts)]


# Order


def test_parts_come_behind_what_they_come_after() -> None:
    parts = [Part("c", ("b",)), Part("a"), Part("b", ("a",)), Part("d", ("a", "c"))]

    assert names(parts) == ["a", "b", "c", "d"]
    assert names(parts[::-1]) == ["a", "b", "c", "d"]


def test_added_parts_come_before_the_consumer_unless_they_are_to_come_after_it() -> None:
    own = [Part("broker"), Part("consumer", ("broker",))]
    given = [
        Part("second", ("late",), is_added=True),
        Part("late", ("consumer",), is_added=True),
        Part("tunnel", ("broker",), is_added=True),
        Part("free", (), is_added=True),
    ]

    assert names(own + given) == ["broker", "free", "tunnel", "consumer", "late", "second"]


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([Part("a"), Part("b"), Part("a")], "two parts named 'a'"),
        ([Part("a", ("bröker",))], "a comes after 'bröker', which is no part .*known: a"),
        ([Part("a", ("a",))], "a after a"),
        ([Part("a", ("b",)), Part("b", ("c",)), Part("c", ("a",))], "a after b after c after a"),
    ],
    ids=["twice", "unknown", "itself", "circle"],
)
def test_impossible_order_is_refused(parts: Sequence[Part], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        in_order(parts)


# In a worker


def test_parts_start_before_the_first_task_and_stop_after_the_last(server: Server) -> None:
    calls: list[str] = []

    @server.worker_part(after=("broker", "first"))
    class Second(Noted):
        def __init__(self) -> None:
            super().__init__(calls, "second")

    @server.worker_part(name="first")
    class First(Noted):
        def __init__(self) -> None:
            super().__init__(calls, "first")

    @server.task
    def work() -> None:
        calls.append("works")

    worker = server.new_worker(concurrency=1)
    worker.add_part(Noted(calls, "late"), name="late", after="consumer")
    for _ in range(2):  # it may be started again
        calls.clear()
        sent = work.send()
        with worker:
            sent.get(timeout=HANG)
        assert [one for one in calls if "late" not in one] == [
            "first begins",
            "second begins",
            "works",
            "second ends",
            "first ends",
        ]
        assert calls.index("late begins") > calls.index("second begins")
        assert calls.index("late ends") < calls.index("second ends")


def test_part_may_resize_the_worker_when_it_starts(server: Server) -> None:
    class Resizing:
        def start(self, worker: Worker) -> None:
            worker.resize(3)

        def stop(self, _: Worker) -> None: ...

    together = threading.Barrier(3)
    server.register_task("meet", lambda: together.wait(HANG) and None)
    worker = server.new_worker(concurrency=1)
    worker.add_part(Resizing())

    with worker:
        for result in [server.send(Signature(name="meet")) for _ in range(3)]:
            result.get(timeout=HANG)

    assert worker.concurrency == 3


def test_worker_does_not_start_without_its_part(server: Server) -> None:
    calls: list[str] = []
    server.events.subscribe(WorkerOnline, lambda _: calls.append("online"))
    worker = server.new_worker(concurrency=1)
    worker.add_part(Noted(calls, "good"), name="good")
    worker.add_part(Noted(calls, "bad", fails="start"), name="bad", after="good")

    for start in (worker.start, worker.launch):
        with pytest.raises(MachineryError, match=r"part bad .* cannot start: OSError: no route"):
            start()
        assert calls == ["good begins", "bad begins", "good ends"]
        calls.clear()

    assert not server.inspect.workers()
    assert not worker.ready


def test_handlers_of_ended_tasks_are_called_before_parts_stop(server: Server) -> None:
    calls: list[str] = []
    worker = server.new_worker(concurrency=1)
    worker.add_part(Noted(calls, "pool"), name="pool of connections")
    is_draining = threading.Event()

    @server.on_success
    def write(_: Context, __: object) -> None:
        assert is_draining.wait(HANG)
        calls.append("handled")

    @server.task
    def work() -> None: ...

    worker.start()
    work.send().get(timeout=HANG)
    ending = threading.Thread(target=worker.stop)
    ending.start()
    wait_until(lambda: not worker.ready, HANG, "the worker to claim no more")
    is_draining.set()
    ending.join(HANG)

    assert calls == ["pool begins", "handled", "pool ends"]


def test_part_that_fails_at_its_end_is_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    worker = server.new_worker(concurrency=1)
    worker.add_part(Noted(calls, "good"), name="good")
    worker.add_part(Noted(calls, "bad", fails="stop"), name="bad", after="good")

    with worker:
        pass

    assert calls[-2:] == ["bad ends", "good ends"]
    assert "part bad of the worker failed at its end" in caplog.text
    assert not server.inspect.workers()


def test_part_may_be_a_coroutine_on_the_loop_of_the_tasks(server: Server) -> None:
    import asyncio

    loops: list[Any] = []

    @server.worker_part()
    class Held:
        async def start(self, _: Worker) -> None:
            loops.append(asyncio.get_running_loop())

        async def stop(self, _: Worker) -> None:
            loops.append(asyncio.get_running_loop())

    @server.task
    async def work() -> None:
        loops.append(asyncio.get_running_loop())

    with server.new_worker(concurrency=1):
        work.send().get(timeout=HANG)

    assert len(loops) == 3
    assert len(set(map(id, loops))) == 1


def test_part_that_comes_after_nothing_has_the_event_loop(server: Server) -> None:
    calls: list[str] = []

    @server.worker_part(after=())
    class Free:
        async def start(self, _: Worker) -> None:
            calls.append("begins")

        async def stop(self, _: Worker) -> None:
            calls.append("ends")

    for _ in range(2):
        with server.new_worker(concurrency=1):
            pass

    assert calls == ["begins", "ends"] * 2


def test_coroutine_for_an_event_loop_that_has_ended_is_refused() -> None:
    async def work() -> None: ...

    loop = EventLoopThread("w")
    for _ in range(2):
        loop.close()
        with pytest.raises(MachineryError, match="the event loop of w has ended"):
            loop.run(work())


def test_interrupt_ends_all_parts_and_comes_out(server: Server) -> None:
    calls: list[str] = []

    class Interrupted(Noted):
        def stop(self, worker: Worker) -> None:
            super().stop(worker)
            raise KeyboardInterrupt

    worker = server.new_worker(concurrency=1)
    worker.add_part(Noted(calls, "good"), name="good")
    worker.add_part(Interrupted(calls, "bad"), name="bad", after="good")
    worker.start()

    with pytest.raises(KeyboardInterrupt):
        worker.stop()

    assert calls[-2:] == ["bad ends", "good ends"]
    assert not server.inspect.workers()


def test_tasks_go_back_when_an_interrupt_ends_the_wait_for_them(server: Server) -> None:
    gate = threading.Event()

    @server.task
    def work() -> None:
        gate.wait(HANG)

    worker = server.new_worker(concurrency=1)
    worker.start()
    work.send()
    wait_until(lambda: worker.active == 1, HANG, "the task")
    main = threading.get_ident()

    def interrupt() -> None:
        wait_until(lambda: not worker.ready, HANG, "the worker to claim no more")
        signal.pthread_kill(main, signal.SIGINT)

    # A shell lets its background jobs ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            worker.stop()
    finally:
        signal.signal(signal.SIGINT, before)

    assert server.broker.stats()[0].waiting == 1
    gate.set()


# Its timer


def test_functions_are_called_beside_the_tasks(server: Server) -> None:
    calls: list[str] = []
    done, thread = threading.Semaphore(0), threading.current_thread()

    def plain() -> None:
        assert threading.current_thread() is not thread
        calls.append("plain")
        done.release()

    async def coroutine() -> None:
        calls.append("coroutine")
        done.release()

    worker = server.new_worker(concurrency=1)
    worker.after(0.0, plain)
    worker.every(3_600.0, coroutine, first=0.0)
    cancelled = worker.every(0.001, lambda: calls.append("cancelled"))
    cancelled.cancel()
    assert not calls  # it does not run yet
    with worker:
        for _ in range(2):
            assert done.acquire(timeout=HANG)
        ticks = threading.Semaphore(0)
        entry = worker.every(0.001, ticks.release)
        for _ in range(3):
            assert ticks.acquire(timeout=HANG)

    assert sorted(calls) == ["coroutine", "plain"]
    assert entry.called_at is not None
    assert not [one for one in threading.enumerate() if one.name.endswith("-timer")]


def test_worker_whose_timer_breaks_ends_in_order(server: Server) -> None:
    def fail(error: BaseException) -> None:
        raise error

    worker = server.new_worker(concurrency=1)
    worker._timer._on_error = fail
    worker.after(0.0, lambda: fail(ValueError("no")))

    with pytest.raises(MachineryError, match="cannot go on: ValueError"):
        worker.launch()

    assert not server.inspect.workers()


def test_worker_that_cannot_carry_out_a_time_limit_ends(server: Server) -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    class Broken:
        def start(self, worker: Worker) -> None:
            worker._live.executors.limits.after(0.0, fail)

        def stop(self, _: Worker) -> None: ...

    worker = server.new_worker(concurrency=1)
    worker.add_part(Broken())

    with pytest.raises(MachineryError, match="cannot go on: RuntimeError"):
        worker.launch(signals=False)


def test_command_line_draws_the_parts(tmp_path: Path) -> None:
    (tmp_path / "drawn_app.py").write_text(
        "from machinery_py import Server\n"
        "server = Server('redis://nobody.invalid')\n"
        "@server.worker_part()\n"
        "class Tunnel: pass\n"
    )
    command = ["-m", "machinery_py", "worker", "drawn_app", "--parts", "--app-dir"]

    ended = subprocess.run(
        [sys.executable, *command, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=True,
    )

    rows = [line.split(maxsplit=2)[1:] for line in ended.stdout.splitlines()]
    assert rows[:3] == [["events"], ["lifespan", "after events"], ["broker", "after lifespan"]]
    assert ["Tunnel", "after broker"] in rows
    assert ["consumer", "after control, limits, settler, Tunnel"] in rows
