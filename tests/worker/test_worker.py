"""Beginning and ending a worker that runs in the background, and the numbers that it takes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest

from machinery_py import Config, Server
from machinery_py.errors import ConfigError, MachineryError
from machinery_py.events import WorkerOffline, WorkerOnline
from machinery_py.testing.flaky import Faults, FlakyStore
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.worker import Worker
from tests.support.apps import Bench, bench

__all__ = ["bench"]

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

T = TypeVar("T")


def offline(server: Server) -> list[WorkerOffline]:
    """The workers that end from now on."""
    found: list[WorkerOffline] = []
    server.app.events.subscribe(WorkerOffline, found.append)
    return found


def test_quit_ends_a_started_worker_after_its_tasks(bench: Bench) -> None:
    gate, ended = threading.Event(), offline(bench.server)
    wait = bench.server.register_task("wait", lambda: gate.wait(HANG))
    worker = bench.server.new_worker(concurrency=1)
    worker.start()
    result = wait.send()
    wait_until(lambda: worker.active == 1)

    worker.quit()
    gate.set()

    wait_until(lambda: ended)
    assert result.get(timeout=0) is True


def test_abort_ends_a_worker_that_was_started_at_once(bench: Bench) -> None:
    gate, ended = threading.Event(), offline(bench.server)
    wait = bench.server.register_task("wait", lambda: gate.wait(HANG))
    worker = bench.server.new_worker(concurrency=1)
    worker.start()
    wait.send()
    wait_until(lambda: worker.active == 1)

    worker.abort()

    wait_until(lambda: ended)
    assert not gate.is_set()
    assert bench.server.broker.stats()[0].waiting == 1
    assert worker.stop() is False
    gate.set()


@pytest.mark.parametrize("end", [Worker.quit, Worker.abort])
def test_task_can_end_its_worker(bench: Bench, end: Callable[[Worker], None]) -> None:
    ended = offline(bench.server)
    worker = bench.server.new_worker(concurrency=1)
    finish = bench.server.register_task("finish", lambda: end(worker))

    with worker:
        finish.send()
        wait_until(lambda: ended)


def test_a_burst_that_was_started_ends_by_itself(bench: Bench) -> None:
    ended = offline(bench.server)
    result = bench.add.send(1, 2)

    bench.server.new_worker(concurrency=1, burst=True).start()

    wait_until(lambda: ended)
    assert result.get(timeout=0) == 3


def test_a_worker_that_has_ended_may_be_started_again(bench: Bench) -> None:
    worker = bench.server.new_worker(concurrency=1)
    for _ in range(2):
        worker.start()
        worker.quit()
        worker.stop()

    with worker:
        assert bench.add.send(1, 2).get(timeout=HANG) == 3


@pytest.mark.parametrize("is_inside", [True, False], ids=["in its thread", "in another"])
def test_stop_during_a_start_ends_the_worker(bench: Bench, is_inside: bool) -> None:
    worker, told = bench.server.new_worker(concurrency=1), offline(bench.server)
    stopping = threading.Thread(target=worker.stop)

    def stop(_: WorkerOnline) -> None:
        if is_inside:
            worker.stop()
        else:
            stopping.start()
            wait_until(lambda: not stopping.is_alive() or worker._stop_request.is_made, HANG)

    unsubscribe = bench.server.events.subscribe(WorkerOnline, stop)
    thread = worker.launch_async()
    thread.join(HANG)

    assert (thread.is_alive(), len(told)) == (False, 1)
    unsubscribe()
    with worker:  # the request was for that run
        assert bench.add.send(1, 2).get(timeout=HANG) == 3


def test_late_stop_of_a_run_that_is_over_leaves_the_next(bench: Bench) -> None:
    worker = bench.server.new_worker(concurrency=1)
    late, has_restarted = threading.Thread(target=worker.stop, daemon=True), threading.Event()

    class UnfairLock:
        """The worker's lock, which the late thread gets when the next run has started."""

        def __init__(self, lock: Any) -> None:
            self.lock = lock

        def __enter__(self) -> None:
            assert threading.current_thread() is not late or has_restarted.wait(HANG)
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    worker._stopped = UnfairLock(worker._stopped)  # type: ignore[assignment]  # its part in `with`
    worker.start()
    late.start()
    wait_until(lambda: worker._stop_request.is_made, HANG)
    worker.stop()
    worker.start()
    has_restarted.set()
    late.join(HANG)

    assert bench.add.send(1, 2).get(timeout=HANG) == 3
    worker.stop()


def test_request_to_a_start_that_failed_is_not_for_the_next(bench: Bench) -> None:
    worker = bench.server.new_worker(concurrency=1)

    class Failing:
        has_failed = False

        def start(self, _: Worker) -> None:
            if not self.has_failed:
                self.has_failed = True
                worker.quit()
                raise OSError("no route")

        def stop(self, _: Worker) -> None: ...

    worker.add_part(Failing())
    with pytest.raises(MachineryError, match="no route"):
        worker.start()

    with worker:
        assert bench.add.send(1, 2).get(timeout=HANG) == 3


def test_a_burst_may_be_launched_again(bench: Bench) -> None:
    worker = bench.server.new_worker(concurrency=1, burst=True)
    for number in range(2):
        result = bench.add.send(number, 1)
        assert worker.launch(signals=False) == 0
        assert result.get(timeout=0) == number + 1


class Defect(Faults):
    """A store of a kind that answers a call with what no store raises."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call

    def around(
        self, call: str, function: Callable[[], T], *, refused: Exception, unknown: Exception
    ) -> T:
        if call == self.call:
            raise ZeroDivisionError("defect")
        return function()


def test_fatal_error_ends_a_started_worker_and_is_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    ended, stores = offline(bench.server), bench.server.app.stores
    stores.store = FlakyStore(stores.store, Defect("receive"))
    worker = bench.server.new_worker("w", 1)

    worker.start()

    wait_until(lambda: ended)
    assert "worker w cannot go on: ZeroDivisionError('defect')" in caplog.text
    assert worker.stop() is True


def test_launch_raises_errors_that_end_the_worker(bench: Bench) -> None:
    ended, stores = offline(bench.server), bench.server.app.stores
    stores.store = FlakyStore(stores.store, Defect("receive"))

    with pytest.raises(MachineryError, match="cannot go on") as caught:
        bench.server.new_worker("w", 1).launch(signals=False)

    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert ended


class Endless(Faults):
    """A store that never wants to be tended again."""

    calls = 0

    def around(
        self, call: str, function: Callable[[], T], *, refused: Exception, unknown: Exception
    ) -> T:
        found = function()
        if call != "tend":
            return found
        self.calls += 1
        return cast(T, math.inf)


def test_store_is_tended_again_whatever_pause_it_wants() -> None:
    server, faults = Server(Config(broker="memory://", lease=0.1)), Endless()
    server.app.stores.store = FlakyStore(server.app.stores.store, faults)

    with server.new_worker(concurrency=1):
        wait_until(lambda: faults.calls > 3, HANG, "the next call")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("concurrency", -1, "concurrency: found -1 (expected a whole number, 0 or more)"),
        ("concurrency", 1.5, "concurrency: found 1.5 (expected a whole number, 0 or more)"),
        ("concurrency", True, "concurrency: found True (expected a whole number, 0 or more)"),
        ("concurrency", "4", "concurrency: found '4' (expected a whole number, 0 or more)"),
        (
            "shutdown_timeout",
            -5,
            "shutdown_timeout: found -5 (expected a number, 0 to 3153600000 s)",
        ),
        (
            "shutdown_timeout",
            float("nan"),
            "shutdown_timeout: found nan (expected a number, 0 to 3153600000 s)",
        ),
    ],
)
def test_a_number_that_runs_nothing_is_refused(
    bench: Bench, name: str, value: Any, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        bench.server.new_worker(**{name: value})

    assert str(caught.value) == expected


def test_tasks_behind_a_blocked_one_are_run_by_another_worker() -> None:
    """F54, F56, F60: what a worker has claimed in advance goes back when it has to wait."""
    server = Server("memory://behind")
    blocked, released = threading.Event(), threading.Event()

    @server.task
    def block() -> None:
        blocked.set()
        released.wait(HANG)

    @server.task
    def pass_on() -> None: ...

    with server.new_worker("one", 1):
        for result in [pass_on.send() for _ in range(50)]:
            result.get(timeout=HANG)  # so that it claims in advance
        block.send()
        behind = [pass_on.send() for _ in range(20)]
        assert blocked.wait(HANG)
        with server.new_worker("two", 1):
            for result in behind:
                result.get(timeout=HANG)
            assert {result.get_state().worker for result in behind} == {"two"}
            released.set()


def test_ten_thousand_at_a_time_have_no_threads_before_there_is_work(bench: Bench) -> None:
    with bench.server.new_worker(concurrency=1) as worker:
        assert bench.add.send(1, 2).get(timeout=HANG) == 3
        before = threading.active_count()

        worker.resize(10_000)

        assert worker.concurrency == 10_000
        assert bench.add.send(3, 4).get(timeout=HANG) == 7
        assert threading.active_count() <= before + 1
