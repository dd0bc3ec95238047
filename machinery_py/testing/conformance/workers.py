"""Promises of every pair of stores on threaded workers: time, intermediate states, two workers."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import math
import threading
import time
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from machinery_py import (
    Context,
    ResultExpired,
    ResultTimeout,
    RetryTaskLater,
    Signature,
    State,
    TaskFailed,
    TimeLimitExceeded,
    current_task,
)
from machinery_py.testing.conformance.application import App
from machinery_py.testing.conformance.endings import LossConformance
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.wire.decode import decode_signature

INTAKE = "machinery_py.worker.admission.intake.decode_signature"
LONG_AGO = dt.timedelta(days=1)
RETRIES = 80  # so many that one wake-up lost in ten is surely seen


class WorkerConformance(LossConformance):
    """Single tasks, observed while a worker in threads runs them."""

    # Intermediate states

    def test_task_is_pending_then_started_then_finished(self, idle: App) -> None:
        before = idle.server.now()
        result = idle.wait.send("gate")
        state = result.get_state()
        assert (state.state, state.task_name, state.queue) == (
            State.PENDING,
            "wait",
            idle.server.config.default_queue,
        )
        assert state.created_at >= before
        assert result.touch() is None
        assert not result.is_finished()

        with idle.running(name="ada") as worker:
            wait_until(lambda: result.get_state().state is State.STARTED, what="STARTED")
            wait_until(lambda: worker.active == 1)
            assert result.get_state().worker == "ada"
            idle.gate("gate").set()
            assert result.get(timeout=HANG) == "gate"

        over = result.get_state()
        assert over.state is State.SUCCESS
        assert over.created_at == state.created_at
        assert over.started_at is not None
        assert over.finished_at is not None
        assert state.created_at <= over.started_at <= over.finished_at

    def test_progress_is_readable_while_the_task_runs(self, app: App) -> None:
        @app.server.task
        def crunch(ctx: Context, rows: int) -> int:
            for row in ctx.track(range(rows)):
                if row == rows - 1:
                    ctx.progress(30, 100)
                    app.gate("last").wait(HANG)
            return rows

        result = crunch.send(5)
        wait_until(lambda: result.get_state().progress is not None, what="progress")
        assert result.get_state().state is State.STARTED
        app.gate("last").set()
        assert result.get(timeout=HANG) == 5
        assert result.get_state().progress == (5, 5)

    @pytest.mark.parametrize(
        ("number", "kept"),
        [(7, 7.0), (0.1, 0.1), (3e300, 3e300), (Decimal(3), 3.0), (Fraction(1, 4), 0.25)],
    )
    def test_progress_is_of_any_numbers(self, app: App, number: Any, kept: float) -> None:
        @app.server.task
        def crunch(ctx: Context) -> int:
            ctx.progress(number, number)
            return 1

        result = crunch.send()
        assert result.get(timeout=HANG) == 1
        assert result.get_state().progress == (kept, kept)

    @pytest.mark.parametrize("wrong", ["7", None, 1j, math.nan, math.inf, 10**400])
    def test_progress_of_what_is_no_number_fails_the_task(self, app: App, wrong: Any) -> None:
        @app.server.task
        def crunch(ctx: Context) -> None:
            ctx.progress(1, wrong)

        with pytest.raises(TaskFailed, match=r"expected (a|finite) number"):
            crunch.send().get(timeout=HANG)

    def test_notes_are_readable_while_the_task_runs_and_later(self, app: App) -> None:
        @app.server.task(retries=1, backoff=[0.0])
        def load(ctx: Context) -> None:
            if ctx.attempt == 1:
                ctx.note(step="first", of="another run")
                raise ValueError
            ctx.note(step="begin")
            ctx.note(step="download", url="http://ü\n", rows=[1, 2.5, None])
            app.gate("last").wait(HANG)
            ctx.note(step="done")

        result = load.send()
        wait_until(lambda: result.get_state().notes.get("step") == "download", what="notes")
        facts = {"step": "download", "url": "http://ü\n", "rows": [1, 2.5, None]}
        assert (result.get_state().state, result.get_state().notes) == (State.STARTED, facts)
        app.gate("last").set()
        result.get(timeout=HANG)
        assert result.get_state().notes == {**facts, "step": "done"}

    def test_retry_state_is_readable_while_it_waits(self, app: App) -> None:
        patient = app.server.task("patient", retries=2, backoff=[3600.0])(app._fail)
        result = patient.send("away")
        wait_until(lambda: app.server.inspect.queues()[0].delayed == 1, what="a delayed retry")

        state = result.get_state()
        assert (state.error, state.error_type, state.task_uuid) == (
            "away",
            "ValueError",
            result.uuid,
        )
        assert state.eta is not None
        assert (
            dt.timedelta(seconds=3590) < state.eta - state.created_at < dt.timedelta(seconds=3630)
        )
        assert state.state is State.RETRY
        assert not result.is_finished()
        with pytest.raises(ResultTimeout, match="last state RETRY"):
            result.get(timeout=0)

    def test_postponed_task_is_readable_while_it_waits(self, app: App) -> None:
        @app.server.task
        def busy() -> None:
            raise RetryTaskLater("server is busy", dt.timedelta(hours=4))

        result = busy.send()
        wait_until(lambda: result.get_state().state is State.RETRY, what="RETRY")
        assert "server is busy" in result.get_state().error

    def test_task_postponed_for_the_longest_time_waits(
        self, app: App, caplog: pytest.LogCaptureFixture
    ) -> None:
        @app.server.task
        def endless() -> None:
            raise RetryTaskLater("ask again", float("inf"))

        @app.server.task
        def fails() -> None:
            raise ValueError("away")

        results: list[Any] = [
            app.server.send_task(Signature(name="endless")),
            app.server.send_task(
                Signature(name="fails", retry_count=2**63 - 1, retry_timeout=2**63 - 1)
            ),
        ]
        wait_until(
            lambda: all(one.get_state().state is State.RETRY for one in results), what="RETRY"
        )
        for one in results:
            eta = one.get_state().eta
            assert eta is not None
            assert 99 < (eta - app.server.now()).days / 365 <= 100
        wait_until(lambda: app.server.inspect.queues()[0].delayed == 2, what="two delayed")
        assert "Traceback" not in caplog.text

    def test_message_that_a_worker_has_no_memory_for_runs_later(
        self, app: App, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refused: list[bytes] = []

        def decode_with_little_memory(body: bytes) -> Signature[Any]:
            if not refused:
                refused.append(body)
                raise MemoryError
            return decode_signature(body)

        with monkeypatch.context() as patch:
            patch.setattr(INTAKE, decode_with_little_memory)
            assert app.add.send(1, 2).get(timeout=HANG) == 3

        assert refused
        assert app.server.inspect.dead() == []

    @pytest.mark.parametrize("retries", [0, 1])
    def test_error_class_with_half_a_character_keeps_type_and_text(
        self, app: App, retries: int
    ) -> None:
        error_class = type("BadName", (Exception,), {"__qualname__": "Bad\ud800Name"})

        @app.server.task(retries=retries, backoff=[0.01])
        def breaks() -> None:
            raise error_class("why \udfff")

        with pytest.raises(TaskFailed) as failed:
            breaks.send().get(timeout=HANG)

        assert failed.value.error == "why ?"
        assert failed.value.error_type.endswith("Bad\\ud800Name")
        assert "why" in failed.value.traceback

    def test_error_text_of_megabytes_is_cut_for_its_callback(
        self, app: App, caplog: pytest.LogCaptureFixture
    ) -> None:
        @app.server.task
        def verbose() -> None:
            raise ValueError("é" * 4_500_000)

        @app.server.task
        def told(text: str) -> None:
            app.calls.append((text,))

        result = app.server.send_task(verbose.signature().catch(Signature(name="told")))
        wait_until(lambda: app.calls, what="the call of the callback")
        with pytest.raises(TaskFailed) as failed:
            result.get(timeout=HANG)

        text = failed.value.error
        assert app.calls == [(text,)]
        assert len(text.encode()) <= 8192
        assert text.startswith("éééé")
        assert text.endswith("… (4,500,000 characters)")
        assert "ValueError: ééé" in failed.value.traceback
        assert all(len(line.encode()) < 2000 for line in caplog.text.split("\n"))

    def test_first_retry_waits_a_second(self, app: App) -> None:
        @app.server.task(retries=1)
        def flaky() -> str:
            task = current_task()
            app.calls.append((task.attempt, app.server.now()))
            if task.attempt == 1:
                raise ConnectionError("away")
            return "ok"

        assert flaky.send().get(timeout=HANG) == "ok"
        (_, first), (_, second) = app.calls
        assert dt.timedelta(seconds=1) <= second - first < dt.timedelta(seconds=HANG)

    def test_short_retries_on_an_idle_worker_do_not_stall(self, app: App) -> None:
        calls: list[float] = []

        @app.server.task(retries=RETRIES, backoff=[0.05])
        def flaky() -> None:
            calls.append(time.monotonic())
            if len(calls) <= RETRIES:
                raise ConnectionError("away")

        flaky.send().get(timeout=2 * HANG)

        # A wake-up that is lost shows as the longest sleep of a worker: some twenty times the
        # usual pause. A busy machine makes all pauses long, and a few of them longer.
        pauses = sorted(after - before for before, after in itertools.pairwise(calls))
        usual = pauses[RETRIES // 2]
        stalled = [f"{one:.3f} s" for one in pauses if one > usual + max(0.5, 4 * usual)]
        assert len(stalled) <= RETRIES // 40, f"usually {usual:.3f} s; {stalled}"

    # Time

    def test_task_with_an_eta_runs_at_it(self, app: App) -> None:
        delayed = app.add.options(delay=0.4).send(1, 2)
        at = app.server.now() + dt.timedelta(seconds=0.3)
        exact = app.server.send_task(app.add.signature(2, 2).replace(eta=at))
        past = app.add.options(eta=app.server.now() - LONG_AGO).send(3, 3)

        assert past.get(timeout=HANG) == 6
        assert exact.get(timeout=HANG) == 4
        assert delayed.get(timeout=HANG) == 3
        started = exact.get_state().started_at
        assert started is not None
        assert started >= at

    def test_distant_eta_delays_no_other_task(self, app: App) -> None:
        far = app.add.options(delay=dt.timedelta(days=400)).send(1, 2)
        near = app.add.options(delay=0.1).send(2, 2)
        assert near.get(timeout=HANG) == 4
        assert far.get_state().state is State.PENDING

    def test_expired_task_is_not_started(self, idle: App) -> None:
        late = idle.note.options(expires=0.01).send("late")
        fine = idle.add.options(expires=dt.timedelta(hours=1)).send(1, 2)
        moment = idle.server.now() + dt.timedelta(seconds=0.02)
        wait_until(lambda: idle.server.now() > moment)

        with idle.running():
            with pytest.raises(TaskFailed, match="expired"):
                late.get(timeout=HANG)
            assert fine.get(timeout=HANG) == 3
        assert idle.calls == []

    def test_run_past_its_time_limit_is_always_retried(self, app: App) -> None:
        @app.server.task(time_limit=0.2, retries=1, backoff=[0.0], retry_on=(ConnectionError,))
        def slow() -> int:
            while current_task().attempt == 1:
                app.gate("never").wait(0.005)
            return current_task().attempt

        assert slow.send().get(timeout=HANG) == 2

    def test_run_ends_at_its_time_limit(self, app: App) -> None:
        @app.server.task(time_limit=0.2)
        def stuck() -> None:
            try:
                while True:
                    app.gate("never").wait(0.005)
            except TimeLimitExceeded:
                app.calls.append(("told",))
                raise

        @app.server.task(time_limit=0.2)
        async def astuck() -> None:
            await asyncio.sleep(HANG)

        for result in (stuck.send(), astuck.send()):
            with pytest.raises(TaskFailed, match=r"time limit of 0\.2 s"):
                result.get(timeout=HANG)
        wait_until(lambda: ("told",) in app.calls)
        assert app.add.send(1, 2).get(timeout=HANG) == 3

    def test_timeout_error_of_get_names_the_last_state(self, idle: App) -> None:
        result = idle.add.send(1, 2)
        text = r"no result of task_\S+ after 0\.1 s; last state PENDING, no worker on '"
        with pytest.raises(ResultTimeout, match=text):
            result.get(timeout=0.1)
        with idle.running():
            assert result.get(timeout=HANG) == 3

    # Workers

    def test_result_is_found_by_uuid_from_another_server(self, app: App) -> None:
        uuid = app.add.send(1, 2).uuid
        other = app.another()

        assert other.server.result(uuid).get(timeout=HANG) == 3
        with pytest.raises(ResultExpired):
            other.server.result("task_unheard-of").get(timeout=HANG)
        other.server.close()

    def test_functions_and_coroutines_run_in_one_worker(self, app: App) -> None:
        meeting = threading.Barrier(2)

        @app.server.task
        def here() -> int:
            return meeting.wait(HANG)

        @app.server.task
        async def there() -> int:
            return await asyncio.to_thread(meeting.wait, HANG)

        results = [here.send(), there.send()]
        assert sorted(result.get(timeout=HANG) for result in results) == [0, 1]

    def test_coroutine_can_fail_retry_and_use_its_context(self, app: App) -> None:
        @app.server.task(retries=1, backoff=[0.0])
        async def flaky(ctx: Context) -> list[Any]:
            await asyncio.sleep(0)
            if ctx.attempt == 1:
                raise ConnectionError("away")
            return [current_task() is ctx, ctx.attempt]

        @app.server.task
        async def broken() -> None:
            raise ValueError("async")

        assert flaky.send().get(timeout=HANG) == [True, 2]
        with pytest.raises(TaskFailed, match="async"):
            broken.send().get(timeout=HANG)

    def test_two_workers_run_no_task_twice(self, app: App) -> None:
        other = app.another()
        with other.running():
            results = [app.note.send(i) for i in range(200)]
            for result in results:
                result.get(timeout=HANG)
        other.server.close()
        assert sorted(app.calls) == [(i,) for i in range(200)]

    def test_two_workers_run_at_the_same_time(self, idle: App) -> None:
        meeting = threading.Barrier(2)
        other = idle.another()
        for app in (idle, other):
            app.server.register_task("meet", _meet(meeting))
        with idle.running(concurrency=1), other.running(concurrency=1):
            results = [idle.server.send_task(Signature.of("meet")) for _ in range(2)]
            workers = [(result.get(timeout=HANG), result.get_state().worker) for result in results]
        assert sorted(place for place, _ in workers) == [0, 1]
        other.server.close()

    def test_worker_serves_its_queues_only_and_in_order(self, idle: App) -> None:
        for number in range(3):
            idle.note.options(queue="low").send("low", number)
            idle.note.options(queue="high").send("high", number)
        other = idle.note.options(queue="other").send("other")

        with idle.running(queues=("high", "low"), concurrency=1, burst=True):
            wait_until(lambda: len(idle.calls) == 6)
        assert idle.calls == [
            ("high", 0),
            ("high", 1),
            ("high", 2),
            ("low", 0),
            ("low", 1),
            ("low", 2),
        ]
        assert other.get_state().state is State.PENDING
        with idle.server.new_custom_queue_worker("w", 1, "other"):
            other.get(timeout=HANG)

    def test_greater_priority_runs_first(self, idle: App) -> None:
        for priority in (0, 9, 5):
            idle.note.options(priority=priority).send(priority)
        with idle.running(concurrency=1):
            wait_until(lambda: len(idle.calls) == 3)
        assert idle.calls == [(9,), (5,), (0,)]

    def test_burst_worker_ends_when_its_queues_are_empty(self, idle: App) -> None:
        result = (idle.add.signature(1, 1) | idle.add.partial(1)).send()
        assert idle.running(burst=True).launch(signals=False) == 0
        assert result.get(timeout=0) == 3

    def test_stopping_worker_lets_running_tasks_finish(self, idle: App) -> None:
        worker = idle.running()
        worker.start()
        result = idle.wait.send("gate")
        wait_until(lambda: ("wait", "gate") in idle.calls)
        stopping = threading.Thread(target=worker.stop)
        stopping.start()
        idle.gate("gate").set()
        stopping.join(HANG)
        assert not stopping.is_alive()
        assert result.get(timeout=0) == "gate"

    def test_task_unfinished_at_shutdown_is_run_by_another_worker(self, idle: App) -> None:
        worker = idle.running(shutdown_timeout=0.0)
        worker.start()
        result = idle.wait.send("gate")
        wait_until(lambda: ("wait", "gate") in idle.calls)
        worker.stop()

        with idle.running():
            wait_until(lambda: idle.calls.count(("wait", "gate")) == 2, what="the second run")
            idle.gate("gate").set()
            assert result.get(timeout=HANG) == "gate"

    def test_running_worker_is_listed(self, idle: App) -> None:
        assert idle.server.inspect.workers() == []
        with idle.running(name="ada"):
            (found,) = idle.server.inspect.workers()
            assert (found.name, tuple(found.queues)) == ("ada", (idle.server.config.default_queue,))
        assert idle.server.inspect.workers() == []


def _meet(meeting: threading.Barrier) -> Any:
    def meet() -> int:
        return meeting.wait(HANG)

    return meet
