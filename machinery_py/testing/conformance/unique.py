"""Promises of every pair of stores about unique tasks, with real workers.

    class TestMyStore(UniqueConformance):
        @pytest.fixture
        def server(self) -> Server:
            return Server("my://localhost")

A second Server in this process with the same URLs must open the same stores.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from machinery_py import (
    DuplicateTask,
    Ignore,
    Reject,
    RetryTaskLater,
    Signature,
    State,
    TaskFailed,
    WorkflowError,
    chain,
    current_task,
    group,
)
from machinery_py.tasks.signature import HEADER_UNIQUE, Arg
from machinery_py.testing.conformance.application import App, AppCase, waiting
from machinery_py.testing.waiting import HANG, together, wait_until

__all__ = ["App", "UniqueConformance"]

SENDERS = 200


class UniqueConformance(AppCase):
    """Of equal calls, one at a time is sent."""

    def test_equal_call_joins_until_the_first_is_over(self, idle: App) -> None:
        hold = waiting(idle, unique=True)
        first, second, other = hold.send("a"), hold.send("a"), hold.send("b")
        assert (first.duplicate, second.duplicate, other.duplicate) == (False, True, False)
        assert second.uuid == first.uuid != other.uuid

        idle.gate("b").set()
        with idle.running():
            wait_until(lambda: ("hold", "a") in idle.calls)
            third = hold.send("a")
            assert (third.duplicate, third.uuid) == (True, first.uuid)
            idle.gate("a").set()
            assert [one.get(timeout=HANG) for one in (first, second, third, other)] == [
                "a",
                "a",
                "a",
                "b",
            ]

            again = hold.send("a")
            assert not again.duplicate
            assert again.get(timeout=HANG) == "a"
        assert idle.calls.count(("hold", "a")) == 2

    def test_one_of_two_hundred_racing_senders_sends(self, idle: App) -> None:
        apps = [idle, *(idle.another() for _ in range(3))]
        tasks = [waiting(app, unique=True) for app in apps]

        results = together(SENDERS, lambda index: tasks[index % 4].send("a"), timeout=4 * HANG)

        assert [result.duplicate for result in results].count(False) == 1
        assert len({result.uuid for result in results}) == 1
        idle.gate("a").set()
        with idle.running():
            assert {result.get(timeout=HANG) for result in results} == {"a"}
            idle.wait_until_idle()
        assert idle.calls == [("hold", "a")]
        for app in apps[1:]:
            app.server.close()

    def test_racing_senders_and_a_worker_never_hold_two_calls(self, app: App) -> None:
        inside, most = [0], [0]
        lock = threading.Lock()

        def brief(number: int) -> int:
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            with lock:
                inside[0] -= 1
            return number

        task = app.server.task(unique=True)(brief)
        results = [result for _ in range(10) for result in together(8, lambda _: task.send(1))]
        for result in results:
            assert result.get(timeout=HANG) == 1
        sent = [result for result in results if not result.duplicate]
        assert (
            len(sent)
            == len({result.uuid for result in sent})
            == len({result.uuid for result in results})
        )
        assert most == [1]

    def test_equal_calls_are_recognised_however_written(self, idle: App) -> None:
        @idle.server.task(unique=True)
        def index(
            shop: int,
            reason: str = "cron",
            *,
            deep: bool = False,
            tags: dict[str, int] | None = None,
        ) -> None: ...

        first = index.send(7)
        for same in (
            index.send(shop=7),
            index.send(7, "cron"),
            index.send(7, reason="cron", deep=False),
            index.send(7, tags=None),
            idle.server.send_task(index.signature(7)),
            idle.server.send_task(Signature(name="index", args=[Arg(type="int64", value=7)])),
        ):
            assert (same.duplicate, same.uuid) == (True, first.uuid)
        for other in (
            index.send(8),
            index.send(7, "now"),
            index.send(7, deep=True),
            index.send(7, tags={"a": 1, "b": 2}),
        ):
            assert not other.duplicate
        assert index.send(7, tags={"b": 2, "a": 1}).duplicate

    def test_caller_can_give_the_key(self, idle: App) -> None:
        @idle.server.task(unique=lambda shop, reason: f"shop-{shop}")
        def sync(shop: int, reason: str) -> None: ...

        @idle.server.task(unique="shop-7")
        def other(number: int) -> None: ...

        assert not sync.send(7, "a").duplicate
        assert sync.send(7, "b").duplicate
        assert not sync.send(8, "a").duplicate
        assert not other.send(1).duplicate  # a key belongs to its task
        assert other.send(2).duplicate

    def test_single_call_can_be_unique_by_option(self, idle: App) -> None:
        hold = waiting(idle, unique=True)
        first = idle.add.options(unique="sum").send(1, 2)
        assert idle.add.options(unique="sum").send(3, 4).uuid == first.uuid
        assert not idle.add.options(unique="other").send(1, 2).duplicate
        assert not idle.add.options(unique=True).send(1, 2).duplicate
        assert idle.add.options(unique=True).send(1, 2).duplicate

        hold.send("a")
        assert not hold.options(unique=False).send("a").duplicate
        with pytest.raises(DuplicateTask):
            hold.options(on_duplicate="reject").send("a")

    def test_duplicate_raises_when_rejected(self, idle: App) -> None:
        hold = waiting(idle, unique=True, on_duplicate="reject")
        first = hold.send("a")

        with pytest.raises(
            DuplicateTask, match=f"hold was not sent: {first.uuid} is the same call, and is PENDING"
        ) as caught:
            hold.send("a")

        assert (caught.value.name, caught.value.uuid, caught.value.state) == (
            "hold",
            first.uuid,
            "PENDING",
        )

    @pytest.mark.parametrize(
        "end",
        [
            "success",
            "failure",
            "retries",
            "reject",
            "ignore",
            "revoke",
            "expiry",
            "arguments",
            "purge",
            "purged queue",
        ],
    )
    def test_key_is_free_however_a_task_ends(self, idle: App, end: str) -> None:
        ran: list[int] = []

        def work(number: int) -> None:
            ran.append(current_task().attempt)
            if end in ("failure", "retries"):
                raise ValueError("no")
            if end in ("reject", "ignore"):
                raise Reject if end == "reject" else Ignore

        task: Any = idle.server.task(
            unique="one", retries=1 if end == "retries" else 0, backoff=[0.01]
        )(work)
        if (
            end == "arguments"
        ):  # the sender's function takes any arguments, so only the worker refuses them
            first = idle.another().server.task("work", unique="one")(lambda number: None).send("x")
        else:
            first = task.options(expires=-1.0 if end == "expiry" else HANG).send(1)
        if end == "revoke":
            first.revoke()
            assert not task.send(1).duplicate
            return
        if end == "purged queue":
            assert idle.server.inspect.purge(idle.server.config.default_queue) == 1
            assert not task.send(1).duplicate
            return
        if end == "purge":
            idle.server.backend.purge_state(first.uuid)
            assert not task.send(1).duplicate
            return
        assert task.send(1).duplicate
        with idle.running():
            wait_until(first.is_finished)
            second = task.send(1)
            assert not second.duplicate
            wait_until(second.is_finished)
            idle.wait_until_idle()
        if end == "retries":
            assert ran == [1, 2, 1, 2]

    def test_retry_keeps_the_key(self, app: App) -> None:
        tries: list[str] = []

        def shaky(number: int) -> int:
            tries.append(current_task().uuid)
            if len(tries) == 1:
                raise RetryTaskLater("later", 0.2)
            return number

        task = app.server.task(unique=True)(shaky)
        first = task.send(1)
        app.wait_for_state(first.uuid, State.RETRY)

        assert task.send(1).uuid == first.uuid
        assert first.get(timeout=HANG) == 1
        assert tries == [first.uuid] * 2

    def test_key_is_free_after_its_window(self, idle: App) -> None:
        hold = waiting(idle, unique=True, unique_for=0.05)
        first = hold.send("a")
        wait_until(lambda: not hold.send("a").duplicate)
        assert first.get_state().state is State.PENDING

    def test_key_until_start_is_free_when_the_task_starts(self, app: App) -> None:
        hold = waiting(app, unique=True, unique_until="start")
        first = hold.send("a")
        wait_until(lambda: ("hold", "a") in app.calls)

        # The first call runs and may have read old data, so one more call may wait, and no third.
        second = hold.send("a")
        assert not second.duplicate
        app.gate("a").set()
        assert [first.get(timeout=HANG), second.get(timeout=HANG)] == ["a", "a"]

    def test_later_call_replaces_a_waiting_one(self, idle: App) -> None:
        last = idle.server.task(unique="k", on_duplicate="replace")(_named("last", idle))
        first, second, third = last.send(1), last.send(2), last.send(3)

        assert [one.duplicate for one in (first, second, third)] == [False] * 3
        for one in (first, second):
            with pytest.raises(TaskFailed, match="replaced by") as caught:
                one.get(timeout=HANG)
            assert caught.value.error_type == "Replaced"
        with idle.running():
            assert third.get(timeout=HANG) == 3
            idle.wait_until_idle()
        assert idle.calls == [("last", 3)]

    def test_debounced_calls_run_once_with_the_last_arguments(self, idle: App) -> None:
        late = idle.server.task(debounce=0.4, unique_key="number")(_named("late", idle))
        first, last, other = late.send(1), late.send(1), late.send(2)
        with idle.running():
            assert [last.get(timeout=HANG), other.get(timeout=HANG)] == [1, 2]
            again = late.send(1)
            idle.wait_until_idle()
            assert again.get(timeout=HANG) == 1
        assert sorted(idle.calls) == [("late", 1), ("late", 1), ("late", 2)]
        with pytest.raises(TaskFailed) as caught:
            first.get(timeout=HANG)
        assert caught.value.error_type == "Replaced"
        for state in (last.get_state(), other.get_state()):
            assert state.started_at is not None
            assert state.started_at - state.created_at > dt.timedelta(seconds=0.3)

    def test_running_call_is_not_replaced(self, app: App) -> None:
        hold = waiting(app, unique="k", on_duplicate="replace")
        first = hold.send("a")
        wait_until(lambda: ("hold", "a") in app.calls)

        with pytest.raises(DuplicateTask):
            hold.send("b")

        app.gate("a").set()
        assert first.get(timeout=HANG) == "a"
        app.gate("b").set()
        assert hold.send("b").get(timeout=HANG) == "b"

    def test_one_of_replacing_and_starting_wins(self, app: App) -> None:
        last = app.server.task(unique="k", on_duplicate="replace")(_named("last", app))
        ended: dict[int, str] = {}
        for number in range(60):
            try:
                ended[number] = last.send(number).uuid
            except DuplicateTask:
                pass
        app.wait_until_idle()
        states = app.server.backend.get_states(list(ended.values()))
        wait_until(
            lambda: all(
                one.is_finished
                for one in app.server.backend.get_states(list(ended.values())).values()
            )
        )
        states = app.server.backend.get_states(list(ended.values()))
        good = [number for number, uuid in ended.items() if states[uuid].state is State.SUCCESS]
        assert {call[1] for call in app.calls} == set(good)
        assert len(app.calls) == len(good)
        assert all(
            states[uuid].error_type == "Replaced"
            for number, uuid in ended.items()
            if number not in good
        )

    def test_unique_steps_of_a_workflow_are_always_sent(self, idle: App) -> None:
        double = idle.server.task(unique=True)(_named("double", idle))
        double.send(1)
        together_ = group(double.signature(1), double.signature(1)).send()
        after = chain(idle.add.signature(0, 1), double.partial()).send()
        with idle.running():
            assert together_.get(timeout=HANG) == [1, 1]
            assert after.get(timeout=HANG) == 1
        with pytest.raises(WorkflowError, match="options"):
            group(idle.add.options(unique="k").signature(1, 2)).send()

    def test_finished_call_leaves_no_claim(self, app: App) -> None:
        double = app.server.task(unique=True)(_named("double", app))
        keys: list[str] = []
        app.server.set_pre_publish_handler(lambda signature: None)
        app.server.around_task(_noting(keys))
        assert double.send(1).get(timeout=HANG) == 1
        wait_until(lambda: app.server.backend.claims(keys) == [None])
        assert len(keys) == 1


def _named(name: str, app: App) -> Callable[[int], int]:
    def function(number: int) -> int:
        app.calls.append((name, number))
        return number

    function.__name__ = name
    return function


def _noting(keys: list[str]) -> Callable[[Signature[object]], Iterator[None]]:
    def note(signature: Signature[object]) -> Iterator[None]:
        keys.append(str(signature.headers[HEADER_UNIQUE]))
        yield

    return note
