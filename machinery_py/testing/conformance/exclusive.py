"""Promises of every pair of stores about exclusive tasks, with real workers.

Same fixture as UniqueConformance.
"""

from __future__ import annotations

import threading

import pytest

from machinery_py import Ignore, Reject, Server, TaskFailed, current_task, group
from machinery_py.brokers.base import Delivery
from machinery_py.testing.conformance.application import App, AppCase, waiting
from machinery_py.testing.waiting import HANG, wait_until

__all__ = ["App", "ExclusiveConformance"]


BACK = ("put back", 1)  # only the first run is


class Overlap:
    """Counter of runs at one time."""

    def __init__(self) -> None:
        self.most: int = 0
        self.inside: int = 0
        self.runs: int = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.inside += 1
            self.runs += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1


class ExclusiveConformance(AppCase):
    """Of equal calls, one at a time runs."""

    def test_fifty_calls_on_three_workers_run_one_at_a_time(self, idle: App) -> None:
        overlap = Overlap()
        nap = threading.Event()

        def feed(number: int) -> int:
            with overlap:
                nap.wait(0.002)
            return number

        apps = [idle, idle.another(), idle.another()]
        tasks = [app.server.task(exclusive="wait")(feed) for app in apps]
        results = [tasks[0].send(1) for _ in range(50)]
        with apps[0].running(), apps[1].running(), apps[2].running():
            assert [result.get(timeout=4 * HANG) for result in results] == [1] * 50
        assert (overlap.most, overlap.runs) == (1, 50)
        for app in apps[1:]:
            app.server.close()

    def test_waiting_exclusive_calls_run_in_the_order_of_their_sending(self, idle: App) -> None:
        ran: list[int] = []
        gate = threading.Event()

        def feed(number: int) -> None:
            gate.wait(HANG)
            ran.append(number)

        task = idle.server.task(exclusive="wait", exclusive_key="feed")(feed)
        results = [task.send(number) for number in range(6)]
        with idle.running(concurrency=3):
            wait_until(lambda: sum(one.delayed for one in idle.server.inspect.queues()) == 5)
            gate.set()
            for result in results:
                result.get(timeout=HANG)
        assert ran == list(range(6))

    def test_exclusive_calls_with_other_arguments_run_together(self, app: App) -> None:
        hold = waiting(app, exclusive="wait")
        results = [hold.send(name) for name in "abc"]
        wait_until(lambda: len(app.calls) == 3)
        for name in "abc":
            app.gate(name).set()
        assert [result.get(timeout=HANG) for result in results] == ["a", "b", "c"]

    def test_waiting_exclusive_call_holds_no_slot(self, idle: App) -> None:
        with idle.server.lock("feed"), idle.running(concurrency=1):
            hold = waiting(idle, exclusive="wait", exclusive_key="feed")
            waits = hold.send("a")
            idle.gate("a").set()
            for number in range(5):
                assert idle.add.send(number, 1).get(timeout=HANG) == number + 1
            assert not waits.is_finished()
            assert idle.calls == []
            wait_until(lambda: sum(one.delayed for one in idle.server.inspect.queues()) == 1)
            idle.server.app.store.tend()

        with idle.running(concurrency=1):
            assert waits.get(timeout=HANG) == "a"

    def test_call_that_finds_its_lock_held_is_not_counted_by_its_rate(self, idle: App) -> None:
        hold = waiting(idle, exclusive="wait", exclusive_key="feed", rate="1/h", max_running=1)
        idle.gate("a").set()
        with idle.server.lock("feed"), idle.running(concurrency=1):
            waits = hold.send("a")
            wait_until(lambda: sum(one.delayed for one in idle.server.inspect.queues()) == 1)

        with idle.running(concurrency=1):
            assert waits.get(timeout=HANG) == "a"  # else in five minutes

    def test_exclusive_call_that_may_not_wait_is_skipped(self, app: App) -> None:
        hold = waiting(app, exclusive="skip", exclusive_key=lambda name, *rest: f"feed-{rest[0]}")
        first = hold.send("a", 7)
        wait_until(lambda: app.calls)

        with pytest.raises(
            TaskFailed, match="skipped: another run of it holds the lock 'feed-7'"
        ) as caught:
            hold.send("b", 7).get(timeout=HANG)

        assert caught.value.error_type == "Skipped"
        app.gate("a").set()
        app.gate("b").set()
        assert first.get(timeout=HANG) == "a"
        with app.server.lock("feed-7", timeout=HANG):
            pass  # it is released a moment after the result is visible
        assert hold.send("b", 7).get(timeout=HANG) == "b"

    def test_other_application_on_the_same_stores_has_own_locks(self, app: App) -> None:
        other = App(Server(app.server.config.replace(default_queue="other_application")), app)
        both = [waiting(one, exclusive="skip", unique=True) for one in (app, other)]
        with other.running():
            results = [hold.send("a") for hold in both]
            wait_until(lambda: len(app.calls) == 2)
            app.gate("a").set()

            assert [result.duplicate for result in results] == [False, False]
            assert [result.get(timeout=HANG) for result in results] == ["a", "a"]
        other.server.close()

    def test_waiting_exclusive_call_fails_after_its_timeout(self, idle: App) -> None:
        hold = waiting(idle, exclusive="wait", exclusive_key="feed", exclusive_timeout=0.2)
        with idle.server.lock("feed"), idle.running():
            with pytest.raises(TaskFailed, match="lock 'feed': somebody else has it") as caught:
                hold.send("a").get(timeout=HANG)
            assert caught.value.error_type == "LockNotAcquired"

    def test_each_call_says_whether_it_waits_or_is_skipped(self, app: App) -> None:
        hold = waiting(app)  # itself it is not exclusive, and takes no options
        skip = hold.options(exclusive="skip", exclusive_key="feed")
        wait = hold.options(exclusive="wait", exclusive_key="feed", exclusive_timeout=4 * HANG)
        first = skip.send("a")
        wait_until(lambda: app.calls)

        with pytest.raises(TaskFailed, match="skipped") as caught:
            skip.send("b").get(timeout=HANG)
        third, beside = wait.send("c"), hold.send("d")
        wait_until(lambda: sum(one.delayed for one in app.server.inspect.queues()) == 1)
        wait_until(lambda: ("hold", "d") in app.calls, what="the call that is not exclusive")
        assert caught.value.error_type == "Skipped"
        assert app.calls == [("hold", "a"), ("hold", "d")]

        for name in "acd":
            app.gate(name).set()
        got = [one.get(timeout=HANG) for one in (first, third, beside)]
        assert got == ["a", "c", "d"]

    def test_call_waits_no_longer_than_it_says(self, idle: App) -> None:
        hold = waiting(idle, exclusive="skip", exclusive_key="feed")
        wait = hold.options(exclusive="wait", exclusive_timeout=0.2)
        with idle.server.lock("feed"), idle.running():
            with pytest.raises(TaskFailed) as caught:
                wait.send("a").get(timeout=HANG)
            assert caught.value.error_type == "LockNotAcquired"

    def test_members_and_retries_of_exclusive_calls_are_exclusive(self, app: App) -> None:
        overlap, nap = Overlap(), threading.Event()

        def feed(number: int) -> int:
            with overlap:
                nap.wait(0.01)
                if current_task().attempt == 1:
                    raise ValueError("again")
            return number

        task = app.server.task(retries=1, backoff=[0.0])(feed)
        wait = task.options(exclusive="wait", exclusive_key="feed")
        fifth = wait.partial() | app.count.partial()
        results = [
            group(wait.signature(1), wait.signature(2), wait.signature(3)).send(),
            (app.add.signature(2, 2) | fifth).send(),
        ]

        assert [one.get(timeout=HANG) for one in results] == [[1, 2, 3], 1]
        assert (overlap.most, overlap.runs) == (1, 8)

    @pytest.mark.parametrize(
        "end",
        ["success", "failure", "retry", "reject", "put back", "ignore", "revoke", "time limit"],
    )
    def test_lock_is_free_however_a_run_ends(self, app: App, end: str) -> None:
        overlap = Overlap()

        def feed(number: int) -> int:
            with overlap:
                if end == "failure" and number == 1:
                    raise ValueError("no")
                if end == "retry" and current_task().attempt == 1:
                    raise ValueError("again")
                if number == 1 and (end in ("reject", "ignore") or (end, overlap.runs) == BACK):
                    raise Ignore if end == "ignore" else Reject(requeue=end == "put back")
                if number == 1 and end in ("revoke", "time limit"):
                    wait_until(lambda: current_task().cancelled, what="the order to stop")
                    raise ValueError("stopped")
            return number

        task = app.server.task(
            exclusive="wait",
            exclusive_key="feed",
            retries=int(end == "retry"),
            backoff=[0.01],
            time_limit=0.2 if end == "time limit" else None,
        )(feed)
        first, second = task.send(1), task.send(2)
        if end == "revoke":
            wait_until(lambda: overlap.runs)
            first.revoke()
        assert second.get(timeout=HANG) == 2
        wait_until(first.is_finished)
        # A function past its time limit may take a moment to notice; the worker does not wait.
        if end != "time limit":
            assert overlap.most == 1
        with app.server.lock("feed", timeout=HANG):
            pass

    def test_exclusive_coroutines_run_one_at_a_time(self, app: App) -> None:
        overlap = Overlap()

        async def feed(number: int) -> int:
            import asyncio

            with overlap:
                await asyncio.sleep(0)
            return number

        task = app.server.task(exclusive="wait", unique=str, unique_until="start")(feed)
        results = [task.send(1) for _ in range(10)]
        assert {result.get(timeout=HANG) for result in results} == {1}
        assert overlap.most == 1

    def test_waiting_for_a_lock_does_not_count_as_unregistered(self, idle: App) -> None:
        hold = waiting(idle, exclusive="wait", exclusive_key="feed")
        with idle.server.lock("feed"):
            hold.send("a")
            with idle.running():
                for _ in range(2):
                    wait_until(
                        lambda: sum(one.delayed for one in idle.server.inspect.queues()) == 1
                    )
                    wait_until(lambda: not sum(one.delayed for one in idle.server.inspect.queues()))
        session = idle.server.app.store.open_session(
            [idle.server.config.default_queue], worker="looking"
        )
        found: list[Delivery] = []

        def came() -> bool:
            idle.server.app.store.tend()
            found.extend(session.receive(1, 0.1))
            return bool(found)

        wait_until(came)
        assert (found[0].parks, found[0].strikes) == (0, 0)
        session.close()
