"""Promises of every pair of stores about messages: revoked, unregistered, repeated and broken.

Handlers are tested here, too.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from machinery_py import (
    Context,
    NoRetry,
    Server,
    Signature,
    State,
    TaskFailed,
    chord,
    current_task,
    group,
)
from machinery_py.brokers.base import Message
from machinery_py.testing.conformance.abilities import need_revocations
from machinery_py.testing.conformance.application import App
from machinery_py.testing.conformance.names import NameConformance
from machinery_py.testing.waiting import HANG, wait_until


class MessageConformance(NameConformance):
    """Revoked, unregistered, repeated and broken messages."""

    # Revoking

    def test_revoked_task_is_never_started(self, idle: App) -> None:
        need_revocations(idle.server.backend)
        revoked, kept = idle.note.send("revoked"), idle.note.send("kept")
        later = idle.note.options(delay=0.1).send("later")
        revoked.revoke()
        later.revoke()

        with idle.running():
            for result in (revoked, later):
                with pytest.raises(TaskFailed, match="revoked"):
                    result.get(timeout=HANG)
            kept.get(timeout=HANG)
        assert idle.calls == [("kept",)]

    def test_waiting_task_ends_at_once_when_revoked(self, idle: App) -> None:
        need_revocations(idle.server.backend)
        waits = idle.server.send_task(
            idle.note.signature("waits").catch(idle.note.partial("caught"))
        )
        delayed = idle.server.send_task(
            idle.note.options(delay=0.5).signature("delayed").catch(idle.note.partial("caught"))
        )
        for result in (waits, delayed):
            result.revoke()
            with pytest.raises(TaskFailed, match="revoked") as caught:
                result.get(timeout=HANG)
            assert caught.value.error_type == "Revoked"
        waits.revoke()

        with idle.running():
            idle.wait_for("caught")
            idle.add.options(delay=0.6).send(1, 2).get(timeout=HANG)
            idle.wait_until_idle()
        assert idle.calls == [("revoked", "caught")] * 2

    def test_waiting_retry_ends_at_once_when_revoked(self, app: App) -> None:
        need_revocations(app.server.backend)

        @app.server.task(retries=1, backoff=[3600.0])
        def shaky() -> None:
            app.calls.append(("shaky",))
            raise ValueError("once")

        result = app.server.send_task(shaky.signature().catch(app.note.partial("caught")))
        app.wait_for_state(result.uuid, State.RETRY)
        result.revoke()

        with pytest.raises(TaskFailed, match="revoked"):
            result.get(timeout=HANG)
        wait_until(lambda: ("revoked", "caught") in app.calls)

    def test_revoked_member_fails_its_chord_at_once(self, idle: App) -> None:
        need_revocations(idle.server.backend)
        members = group(idle.add.options(delay=3600.0).signature(1, 2), idle.add.signature(3, 4))
        result = idle.server.send_chord(
            chord(members, idle.total.partial().catch(idle.note.partial("caught")), collect=True)
        )
        result.group[0].revoke()

        with pytest.raises(TaskFailed, match="chord member add .* failed: revoked"):
            idle.server.result(result.uuid).get(timeout=HANG)
        with idle.running():
            wait_until(lambda: idle.calls, what="the callback's on_error")
            result.group[1].get(timeout=HANG)
        assert [call[-1] for call in idle.calls] == ["caught"]

    def test_revoked_callback_is_reported_once(self, app: App) -> None:
        need_revocations(app.server.backend)
        members = group(app.wait.signature("slow"), app.echo.signature(1))
        result = app.server.send_chord(
            chord(members, app.fail.partial("never").catch(app.note.partial("caught")))
        )
        result.callback.revoke()
        app.gate("slow").set()

        assert result.group.get(timeout=HANG) == ["slow", 1]
        wait_until(lambda: ("revoked", "caught") in app.calls)
        app.wait_until_idle()
        assert app.calls.count(("revoked", "caught")) == 1
        assert ("fail", "never") not in app.calls

    def test_one_of_revoking_and_beginning_wins(self, app: App) -> None:
        need_revocations(app.server.backend)
        results = [
            app.server.send_task(
                app.echo.signature(i).then(app.note.partial(i)).catch(app.note.partial(i))
            )
            for i in range(40)
        ]
        for result in results:
            result.revoke()
        wait_until(lambda: all(result.is_finished() for result in results), what="all to be over")
        app.wait_until_idle()

        good = [i for i, result in enumerate(results) if result.get_state().state is State.SUCCESS]
        assert sorted(app.calls, key=lambda call: int(call[-1])) == [
            (i if i in good else "revoked", i) for i in range(40)
        ]

    def test_revoked_coroutine_ends_as_revoked(self, app: App) -> None:
        need_revocations(app.server.backend)

        @app.server.task(retries=3)
        async def sleep() -> None:
            app.calls.append(("in",))
            await asyncio.sleep(HANG)

        result = sleep.send()
        wait_until(lambda: app.calls)
        result.revoke()
        with pytest.raises(TaskFailed, match="revoked") as caught:
            result.get(timeout=HANG)
        assert (caught.value.error, caught.value.error_type) == ("revoked", "Revoked")

    def test_running_task_is_asked_to_stop_when_revoked(self, app: App) -> None:
        need_revocations(app.server.backend)

        @app.server.task
        def loop(ctx: Context) -> str:
            app.calls.append(("in",))
            while not ctx.cancelled:
                app.gate("never").wait(0.005)
            return "stopped"

        result = loop.send()
        # Revoking a task that the store has as waiting would end it at once; see
        # test_one_of_revoking_and_beginning_wins.
        wait_until(lambda: result.get_state().state is State.STARTED)
        result.revoke()
        assert result.get(timeout=HANG) == "stopped"

    # Messages that no worker can run

    def test_bytes_that_are_no_signature_become_a_dead_letter(self, app: App) -> None:
        queue = app.server.config.default_queue
        bodies = [b"", b"\xff\xfe", b"{nonsense", b"[]", b'{"Name": 5}', b'{"UUID": "x"}']
        # A value that Go would skip, and not as JSON has it; and callbacks that are none.
        bodies += [b'{"x":{"a":[1,]}}', b'{"Name":"add","Args":{"a":[1,]}}']
        bodies += [
            b'{"Name":"add","OnSuccess":[{"x":{"a":[1,]}}]}',
            b'{"Name":"add","OnError":[5]}',
        ]
        app.server.broker.put(
            [Message(uuid="", name="", queue=queue, body=body) for body in bodies], token=""
        )

        wait_until(lambda: len(app.server.inspect.dead()) == len(bodies), what="dead letters")
        letters = app.server.inspect.dead()
        assert {letter.reason for letter in letters} == {"undecodable"}
        assert sorted(letter.body for letter in letters) == sorted(bodies)
        assert app.add.send(1, 2).get(timeout=HANG) == 3

    def test_unregistered_task_waits_for_a_worker_that_knows_it(self, idle: App) -> None:
        result = idle.server.send_task(Signature.of("rare", 20, 22))
        with idle.running():
            wait_until(lambda: idle.server.inspect.queues()[0].delayed == 1, what="parked")
            assert idle.add.send(1, 2).get(timeout=HANG) == 3
        assert result.get_state().state is State.PENDING

        other = Server(idle.server.config)
        other.register_task("rare", lambda a, b: a + b)
        with other.new_worker(concurrency=1):
            assert other.result(result.uuid).get(timeout=HANG) == 42
        other.close()

    def test_unregistered_task_is_dropped_when_it_may_be_ignored(self, app: App) -> None:
        app.server.send_task(Signature.of("rare").replace(ignore_when_task_not_registered=True))
        app.wait_until_idle()
        assert app.server.inspect.dead() == []

    def test_message_that_comes_twice_completes_once_in_a_worker(self, app: App) -> None:
        signature = app.add.signature(1, 2).then(app.note.partial("then")).with_uuid()
        message = app.server.app.message(app.server.app.completed(signature))
        result = app.server.send_task(signature)
        app.server.broker.put([message], token="")
        assert result.get(timeout=HANG) == 3
        app.server.broker.put([message, message], token="")
        app.wait_until_idle()

        assert app.calls == [("then", 3)]
        assert result.get_state().state is State.SUCCESS

    # Handlers

    def test_handlers_are_called_in_order(self, idle: App) -> None:
        calls = idle.calls
        worker = idle.running()

        @worker.set_pre_task_handler
        def before(signature: Signature[Any]) -> None:
            calls.append(("before", signature.name))

        @worker.set_post_task_handler
        def after(signature: Signature[Any]) -> None:
            calls.append(("after", signature.name))

        @worker.set_error_handler
        def on_error(error: Exception) -> None:
            calls.append(("error", type(error), str(error)))

        @idle.server.around_task
        def around(signature: Signature[object]) -> Any:
            calls.append(("in",))
            yield
            calls.append(("out",))

        with worker:
            idle.note.send("run").get(timeout=HANG)
            wait_until(lambda: calls[-1][0] == "after")
            assert calls == [("before", "note"), ("in",), ("run",), ("out",), ("after", "note")]
            calls.clear()
            with pytest.raises(TaskFailed):
                idle.fail.send("x").get(timeout=HANG)
            wait_until(lambda: calls[-1][0] == "after")
            assert calls == [
                ("before", "fail"),
                ("in",),
                ("fail", "x"),
                ("error", ValueError, "x"),
                ("after", "fail"),
            ]

    def test_error_handler_is_called_for_final_failures_only(self, idle: App) -> None:
        errors: list[Exception] = []
        worker = idle.running()
        worker.set_error_handler(errors.append)

        @idle.server.task(retries=1, backoff=[0.0])
        def flaky(good: int) -> None:
            if current_task().attempt < good:
                raise ConnectionError("away")

        @idle.server.task(retries=9)
        def hopeless() -> None:
            raise NoRetry("hopeless")

        with worker:
            flaky.send(2).get(timeout=HANG)
            for result in (flaky.send(3), hopeless.send()):
                with pytest.raises(TaskFailed):
                    result.get(timeout=HANG)
            wait_until(lambda: len(errors) == 2)
        assert sorted(map(str, errors)) == ["away", "hopeless"]

    def test_failing_handler_stops_nothing_but_the_pre_task_one(self, idle: App) -> None:
        def broken(*_: Any) -> None:
            raise RuntimeError("handler")

        worker = idle.running()
        worker.set_post_task_handler(broken)
        worker.set_error_handler(broken)
        with worker:
            assert idle.add.send(1, 2).get(timeout=HANG) == 3
            with pytest.raises(TaskFailed, match="own"):
                idle.fail.send("own").get(timeout=HANG)
            worker.set_pre_task_handler(broken)
            with pytest.raises(TaskFailed, match="handler"):
                idle.add.send(1, 2).get(timeout=HANG)
