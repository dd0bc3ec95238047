"""Promises of every pair of stores about queues: strict order, weights, paused and full queues."""

from __future__ import annotations

import pytest

from machinery_py import (
    Arg,
    QueueFull,
    Server,
    Signature,
    State,
    TaskFailed,
    TaskState,
    Unsupported,
    chord,
    group,
)
from machinery_py.bounds import PURGE_STEP
from machinery_py.brokers.base import Delivery
from machinery_py.errors import QueueNotFound
from machinery_py.stores.base import Mark
from machinery_py.testing.conformance.application import App
from machinery_py.testing.conformance.messages import MessageConformance
from machinery_py.testing.waiting import HANG, together, wait_until
from machinery_py.wire.signatures import decode_signature

MANY = 20  # messages of a queue that is never empty; more than a worker takes at once


class QueueConformance(MessageConformance):
    """Workers on several queues, or on a paused one."""

    def test_call_is_kept_while_and_after_the_task_runs(self, app: App) -> None:
        if not app.server.backend.features.keeps:
            pytest.skip("this backend keeps no states")
        app.server.app.publisher.enable()
        result = app.wait.send("gate")
        app.wait_for_state(result.uuid, State.STARTED)
        running = result.get_state()
        app.gate("gate").set()
        assert result.get(timeout=HANG) == "gate"
        for state in (running, result.get_state()):
            assert [one.value for one in decode_signature(state.message).args] == ["gate"]

        large = app.note.send("x" * 2_048)
        assert large.get(timeout=HANG) is None
        app.server.app.publisher.disable()
        small = app.note.send("x")
        assert small.get(timeout=HANG) is None
        assert [one.get_state().message for one in (large, small)] == [b"", b""]

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

    def test_purge_refuses_a_queue_that_is_none_of_ours(self, app: App) -> None:
        queue = app.server.config.default_queue
        assert app.add.send(1, 2).get(timeout=HANG) == 3

        with pytest.raises(QueueNotFound, match="no queue 'jobs-of-others'"):
            app.server.inspect.purge("jobs-of-others")
        assert app.server.inspect.purge(queue) == 0

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

    def test_purged_tasks_fail_and_what_follows_happens(self, idle: App) -> None:
        _can_be_listed(idle)
        queue = idle.server.config.default_queue
        purged, late = idle.add.send(1, 2), idle.add.options(delay=3600.0).send(1, 2)
        steps = (idle.add.signature(1, 2) | idle.add.partial(3)).send()
        told = idle.server.send_task(
            idle.add.signature(1, 2).replace(on_error=(idle.note.signature("told"),))
        )
        other = idle.echo.options(queue="other").send("stays")
        joined = chord(
            [idle.add.options(queue="other").signature(1, 1), idle.add.signature(2, 2)],
            idle.total.partial(),
        ).send()
        seen: list[int] = []

        assert idle.server.inspect.purge(queue, progress=seen.append) == 5

        for result in (purged, late, steps, told, joined):
            with pytest.raises(TaskFailed, match="its message was deleted from its queue"):
                result.get(timeout=HANG)
        assert purged.get_state().error_type == "Revoked"
        assert seen[-1] == 5
        assert seen == sorted(seen)
        with idle.running(queues=[queue, "other"]):
            assert other.get(timeout=HANG) == "stays"
            assert ("told",) in [call[-1:] for call in idle.wait_for("told")]
        backend, uuids = idle.server.backend, [purged.uuid, late.uuid, told.uuid]
        if backend.features.revocations:
            wait_until(
                lambda: not backend.revoked(uuids), what="no revocation that is needed no more"
            )

    def test_purged_task_that_had_begun_fails(self, idle: App) -> None:
        _can_be_listed(idle)
        lost = idle.wait.send("lost")
        session = idle.server.app.store.open_session(
            [idle.server.config.default_queue], worker="dying"
        )
        deliveries: list[Delivery] = []

        def claimed() -> bool:
            deliveries.extend(session.receive(1, 0.1))
            return bool(deliveries)

        wait_until(claimed)
        begun = TaskState(task_uuid=lost.uuid, task_name="wait", state=State.STARTED)
        session.settle([], [Mark(delivery=deliveries[0], state=begun)])
        session.close()  # gives the message back
        wait_until(lambda: idle.server.inspect.queues()[0].waiting == 1)

        assert idle.server.inspect.purge(idle.server.config.default_queue) == 1

        with pytest.raises(TaskFailed, match="its message was deleted from its queue"):
            lost.get(timeout=HANG)

    def test_paused_queue_of_several_steps_is_purged(self, idle: App) -> None:
        _can_be_listed(idle)
        queue, inspect = idle.server.config.default_queue, idle.server.inspect
        if idle.server.broker.features.pausing:
            inspect.pause(queue)
        many = group(idle.add.signature(1, 1) for _ in range(PURGE_STEP + 30)).send()

        assert inspect.purge(queue) == len(many)

        states = idle.server.backend.get_states([one.uuid for one in many.results])
        assert {one.state for one in states.values()} == {State.FAILURE}
        assert inspect.purge(queue) == 0
        assert [one.waiting for one in inspect.queues() if one.queue == queue] == [0]

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

    # queue_limits

    def limited(self, idle: App, limit: int) -> App:
        queue = idle.server.config.default_queue
        return App(Server(idle.server.config.replace(queue_limits={queue: limit})), idle)

    def waiting(self, app: App) -> int:
        queue = app.server.config.default_queue
        return next(one.waiting for one in app.server.inspect.queues() if one.queue == queue)

    def test_full_queue_refuses_a_send_until_there_is_room(self, idle: App) -> None:
        app = self.limited(idle, 2)
        queue, add = app.server.config.default_queue, app.add
        first = [add.send(1, number) for number in range(2)]

        with pytest.raises(QueueFull) as caught:
            add.options(uuid="task_refused").send(1, 2)
        assert (caught.value.queue, caught.value.waiting, caught.value.limit) == (queue, 2, 2)
        assert "task_refused" not in app.server.backend.get_states(["task_refused"])
        with pytest.raises(QueueFull):
            add.options(block=0.1).send(1, 2)
        with pytest.raises(QueueFull) as caught:
            group(add.signature(1, number) for number in range(3)).send()
        assert caught.value.permanent
        assert self.waiting(app) == 2
        later = add.options(delay=0.1).send(3, 4)
        other = add.options(queue="other").send(5, 6)
        if idle.server.backend.features.claims:
            self._check_unique_call_of_a_full_queue(idle)

        with app.running(queues=[queue, "other"]):
            waited = add.options(block=HANG).send(7, 8)
            assert [one.get(timeout=HANG) for one in (*first, later, other, waited)] == [
                1,
                2,
                7,
                11,
                15,
            ]
        app.server.close()

    def _check_unique_call_of_a_full_queue(self, idle: App) -> None:
        solo = App(Server(idle.server.config.replace(queue_limits={"solo": 1})), idle)
        unique = solo.add.options(unique="key", queue="solo")
        assert not unique.send(1, 1).duplicate
        assert unique.send(1, 1).duplicate  # joins, and needs no room
        with pytest.raises(QueueFull):
            solo.add.options(unique="other", queue="solo").send(1, 1)
        solo.server.close()

    def test_full_queue_takes_what_a_worker_sends(self, idle: App) -> None:
        app = self.limited(idle, 1)

        @app.server.task(retries=1, backoff=[0])
        def again() -> int:
            if not app.calls:
                app.calls.append(("first",))
                app.add.send(1, 1)  # fills the queue, and this task comes back to it
                raise ValueError("once")
            return 1

        result = again.signature().then(app.note.signature("after")).send()
        assert app.running(burst=True, concurrency=1).launch(signals=False) == 0

        assert result.get(timeout=HANG) == 1
        assert ("after", 1) in app.calls
        app.server.close()

    def test_senders_pass_a_limit_only_where_that_is_said(self, idle: App) -> None:
        app = self.limited(idle, 4)

        def send(number: int) -> bool:
            try:
                app.add.send(1, number)
            except QueueFull:
                return False
            return True

        accepted = together(8, send)
        assert accepted.count(True) == self.waiting(app) >= 4
        assert accepted.count(True) == 4 or not app.server.broker.features.exact_limits
        app.server.close()

    # fair_queues

    def test_tenants_of_a_fair_queue_take_turns(self, idle: App) -> None:
        queue = idle.server.config.default_queue
        config = idle.server.config.replace(fair_queues={queue: "tenant"})
        app = App(Server(config), idle)
        if not idle.server.broker.features.fair:
            with pytest.raises(Unsupported, match="fair_queues"):
                app.add.send(1, 2)
            return

        @app.server.task(retries=1, backoff=[0])
        def visit(tenant: str, number: int) -> None:
            app.calls.append((tenant, number))
            if (tenant, number) == ("x", 0) and len(app.calls) == 1:
                raise ValueError("once")

        for number in range(5):
            visit.send("x", number)
        visit.send("y", 0)
        elsewhere = Server(config)  # does not know the task
        args = (Arg.of("z"), Arg.of(0))
        elsewhere.send_task(Signature(name="visit", args=args, headers={"tenant": "z"}))
        assert [one.tenant for one in app.server.broker.pending(queue, 3)] == ["x", "y", "z"]

        worker = app.running(burst=True, concurrency=1)
        assert worker.launch(signals=False) == 0
        assert app.calls[:3] == [("x", 0), ("y", 0), ("z", 0)]
        assert [call for call in app.calls if call[0] == "x"][1:5] == [
            ("x", 1), ("x", 2), ("x", 3), ("x", 4),
        ]  # fmt: skip
        assert app.calls.count(("x", 0)) == 2  # its retry took the next turn of its tenant
        elsewhere.close()
        app.server.close()


def _can_be_listed(app: App) -> None:
    if not app.server.broker.features.peeking:
        app.add.send(1, 2)
        assert app.server.inspect.purge(app.server.config.default_queue) == 1
        pytest.skip("messages that nobody can list are deleted, and not revoked")
