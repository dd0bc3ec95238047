"""Promises of every pair of stores about several queues: strict order, weights, paused queues."""

from __future__ import annotations

import pytest

from machinery_py import Server, State, Unsupported
from machinery_py.testing.conformance.application import App
from machinery_py.testing.conformance.messages import MessageConformance
from machinery_py.testing.waiting import HANG, wait_until

MANY = 20  # messages of a queue that is never empty; more than a worker takes at once


class QueueConformance(MessageConformance):
    """Workers on several queues, or on a paused one."""

    def test_pausing_a_queue_lets_running_tasks_go_on(self, idle: App) -> None:
        inspect, queue = idle.server.inspect, idle.server.config.default_queue
        if not idle.server.broker.features.pausing:
            with pytest.raises(Unsupported):
                inspect.pause(queue)
            return
        with idle.running(queues=[queue, "other"]):
            runs = idle.wait.send("gate")
            wait_until(lambda: ("wait", "gate") in idle.calls, what="a running task")
            inspect.pause(queue)
            waits, later = idle.add.send(1, 2), idle.add.options(delay=0.05).send(3, 4)
            assert idle.echo.options(queue="other").send("through").get(timeout=HANG) == "through"
            idle.gate("gate").set()
            assert runs.get(timeout=HANG) == "gate"
            wait_until(
                lambda: {one.queue: one.waiting for one in inspect.queues()}[queue] == 2,
                what="both waiting",
            )
            assert {one.queue: one.paused for one in inspect.queues()} == {
                queue: True,
                "other": False,
            }
            assert waits.get_state().state is State.PENDING

            inspect.resume(queue)

            assert (waits.get(timeout=HANG), later.get(timeout=HANG)) == (3, 7)
        assert not any(one.paused for one in inspect.queues())

    def test_later_worker_obeys_a_pause_and_a_burst_ends(self, idle: App) -> None:
        if not idle.server.broker.features.pausing:
            return  # refused, as the test before shows
        queue = idle.server.config.default_queue
        idle.server.inspect.pause(queue)
        waits, goes = idle.add.send(1, 2), idle.echo.options(queue="other").send("through")

        after = idle.another()  # a second process would see the same
        assert after.running(burst=True, queues=[queue, "other"]).launch(signals=False) == 0

        assert goes.get(timeout=HANG) == "through"
        assert waits.get_state().state is State.PENDING
        after.server.inspect.resume(queue)
        assert after.running(burst=True).launch(signals=False) == 0
        assert waits.get(timeout=HANG) == 3
        after.close()

    def test_weighted_queue_does_not_starve_behind_a_full_one(self, idle: App) -> None:
        app = App(Server(idle.server.config.replace(prefetch=0)), idle)
        ran = {"high": 0, "low": 0}
        over = app.gate("over")

        @app.server.task
        def high() -> None:
            ran["high"] += 1
            if not over.is_set():
                high.options(queue="high").send()

        @app.server.task
        def low() -> None:
            ran["low"] += 1

        for _ in range(MANY):
            high.options(queue="high").send()
            low.options(queue="low").send()
        with app.running(concurrency=1, queues=["high", "low"]):
            wait_until(lambda: ran["high"] > 3 * MANY, what="high tasks")
            assert ran["low"] == 0  # strict order
        with app.running(concurrency=1, queues={"high": 3, "low": 1}) as worker:
            assert worker.queues == ("high", "low")
            wait_until(lambda: ran["low"] == MANY, what="all of the low queue")
            assert {one.queue: one.waiting > 0 for one in app.server.inspect.queues()}["high"]
            over.set()
            app.wait_until_idle()
        app.server.close()
