"""Batches on memory stores: what is gathered, for how long, and how each call ends."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from machinery_py import (
    ArgumentError,
    BatchFailed,
    Config,
    Context,
    Ignore,
    Reject,
    Retry,
    Server,
    State,
    TaskFailed,
    TaskSet,
    chord,
    current_task,
    group,
)
from machinery_py.brokers.base import Delivery
from machinery_py.receipts import NO_RECEIPT
from machinery_py.tasks.signature import HEADER_ATTEMPT, Signature
from machinery_py.testing.harness import Harness
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.admission.batches import Batches, demand
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.hooks import WorkerHooks
from tests.worker.test_admission import let_workers_die

_numbers = itertools.count(1)


@pytest.fixture
def server() -> Iterator[Server]:
    # A name, so that a second Server finds the same store.
    server = Server(Config(broker=f"memory://batches-{next(_numbers)}"))
    yield server
    server.close()


class Row(msgspec.Struct):
    name: str
    size: int = 0


# Gathering


class Calls:
    """Deliveries of the batch task `store`, as a worker that has accepted them."""

    def __init__(self, server: Server) -> None:
        self.app = server.app
        self.task = server.task("store", batch=3, batch_within=2.0)(_store)

    def one(self, strikes: int = 0, **more: Any) -> Execution:
        delivery = Delivery(body=b"", queue="q", receipt=NO_RECEIPT, strikes=strikes)
        execution = Execution(self.app, WorkerHooks(), delivery, "w")
        execution.signature = Signature(name="store", **more).with_uuid()
        execution.take(self.task)
        return execution


def _store(rows: list[int]) -> None: ...


def test_batch_is_complete_when_full_or_when_its_first_call_has_waited(server: Server) -> None:
    calls, batches = Calls(server), Batches()
    assert batches.due_in(0.0) == float("inf")

    assert [batches.add(calls.one(), now) for now in (0.0, 1.0)] == [None, None]
    assert batches.due_in(1.5) == 0.5
    assert batches.due(1.9) == []
    full = batches.add(calls.one(), 1.9)
    assert full is not None
    assert len(full.calls) == 3
    assert batches.due(10.0) == []

    assert batches.add(calls.one(), 10.0) is None
    assert [len(batch.calls) for batch in batches.due(12.0)] == [1]


def test_suspect_and_last_try_are_batches_of_their_own(server: Server) -> None:
    calls, batches = Calls(server), Batches()
    batches.add(calls.one(), 0.0)
    for special in (
        calls.one(strikes=1),
        calls.one(headers={HEADER_ATTEMPT: "2"}),
    ):
        batch = batches.add(special, 0.0)
        assert batch is not None
        assert batch.calls == [special]
    # More tries are left: what it fails of may be another call's fault, and pass.
    assert batches.add(calls.one(headers={HEADER_ATTEMPT: "2"}, retry_count=1), 0.0) is None


def test_gathered_calls_need_no_slot_and_a_batch_needs_one(server: Server) -> None:
    calls, batches = Calls(server), Batches()
    executions = [calls.one() for _ in range(5)]
    held = {id(one): one for one in executions}
    for one in executions:
        batches.add(one, 0.0)
    assert batches.surplus(held) == 2 + 2  # a batch of three, and two that are gathered
    assert batches.surplus({}) == 2 - 2


def test_autoscaler_sees_a_batch_as_one(server: Server) -> None:
    calls, batches = Calls(server), Batches()
    executions = [calls.one() for _ in range(7)]
    held = {id(one): one for one in executions}
    for moment, one in enumerate(executions):
        one.received_at = float(moment)
        batches.add(one, 0.0)
    assert demand(held, batches) == (2, 0.0)  # two batches; what is gathered needs no slot
    executions[0].call_started = executions[1].call_started = 1.0
    assert demand(held, batches) == (2, 2.0)
    assert demand(held, None) == (7, 2.0)


def test_more_is_claimed_only_as_far_as_batches_come(server: Server) -> None:
    calls, batches = Calls(server), Batches()
    batches.claimed(4)
    assert batches.wanted(4) == 4  # no batch task has come yet
    batches.add(calls.one(), 0.0)
    batches.claimed(4)
    assert batches.wanted(4) == 4  # one call in four
    for _ in range(7):
        batches.add(calls.one(), 0.0)
        batches.claimed(1)
    assert batches.wanted(1) == 1 + 1  # what is missing in the open batch
    batches.add(calls.one(), 0.0)
    batches.claimed(1)
    assert batches.wanted(1) == 1 + 2  # a whole batch


# Ends


def test_wrong_arguments_fail_the_call_that_has_them(server: Server) -> None:
    @server.task(batch=3, batch_within=HANG)
    def store(ctx: Context, rows: list[Row]) -> list[str]:
        assert [call.uuid for call in ctx.calls] == [results[0].uuid, results[2].uuid]
        assert current_task() is ctx
        return [row.name for row in rows]

    with pytest.raises(ArgumentError):
        store.send("x")  # type: ignore[arg-type]
    other = Server(server.config)  # whose function takes anything
    foreign = other.task("store")(lambda row: None)
    results = [store.send(Row("a", 1)), foreign.send("x"), store.send(Row("b"))]
    with server.new_worker(concurrency=1):
        assert [results[0].get(timeout=HANG), results[2].get(timeout=HANG)] == ["a", "b"]
        with pytest.raises(TaskFailed) as caught:
            results[1].get(timeout=HANG)
    assert caught.value.error_type == "ArgumentError"
    other.close()


def _raise_for_two(rows: list[int]) -> list[int]:
    raise BatchFailed({rows.index(2): Retry(delay=0.0)}, [10 * row for row in rows])


def _short(rows: list[int]) -> list[int]:
    return rows[1:]


def _wrong_place(rows: list[int]) -> None:
    raise BatchFailed({7: ValueError("no such call")})


def _text(rows: list[int]) -> list[int]:
    return "abc"  # type: ignore[return-value]  # a text is no list of results


@pytest.mark.parametrize(
    ("function", "ends"),
    [
        (_raise_for_two, ["10", "machinery_py.errors.Retry: ", "30"]),
        (_short, ["ArgumentError: a batch of 3 calls returned a list of 2 (a list of 3"] * 3),
        (_text, ["ArgumentError: a batch of 3 calls returned a str (a list of 3 results"] * 3),
        (_wrong_place, ["ValueError: 1 calls of the batch failed: 7: ValueError, with 3 "] * 3),
    ],
)
def test_each_call_ends_by_what_the_run_says_of_it(
    server: Server, function: Any, ends: list[str]
) -> None:
    task = server.task(batch=3, batch_within=HANG)(function)
    results = [task.send(number) for number in (1, 2, 3)]
    with server.new_worker(concurrency=1):
        for result, end in zip(results, ends, strict=True):
            try:
                told = str(result.get(timeout=HANG))
            except TaskFailed as error:
                told = f"{error.error_type}: {error.error}"
            assert told.startswith(end)


def test_coroutines_and_time_limits(server: Server) -> None:
    tries: list[int] = []

    @server.task(batch=2, batch_within=HANG, time_limit=0.2, retries=1, backoff=[0.0])
    async def fetch(rows: list[int]) -> list[int]:
        tries.append(len(rows))
        if len(tries) == 1:
            await asyncio.sleep(HANG)
        return [row + 1 for row in rows]

    results = [fetch.send(1), fetch.send(2)]
    with server.new_worker(concurrency=1):
        assert [one.get(timeout=HANG) for one in results] == [2, 3]
    assert tries == [2, 1, 1]  # the last try of a call is alone


def test_gathered_call_that_is_revoked_is_left_out(server: Server) -> None:
    runs: list[list[int]] = []

    @server.task(batch=3, batch_within=HANG)
    def store(rows: list[int]) -> None:
        runs.append(rows)

    first, second = store.send(1), store.send(2)
    with server.new_worker(concurrency=1):
        wait_until(lambda: second.get_state().state is State.RECEIVED)
        first.revoke()
        wait_until(first.is_finished)
        store.send(3).get(timeout=HANG)
    assert runs == [[2, 3]]


def test_run_is_cancelled_when_all_its_calls_are_revoked(server: Server) -> None:
    begun = threading.Event()
    cancelled: list[bool] = []

    @server.task(batch=2, batch_within=HANG)
    def store(ctx: Context, rows: list[int]) -> None:
        begun.set()
        wait_until(lambda: ctx.cancelled, HANG, "the run to be cancelled")
        cancelled.append(True)

    results = [store.send(1), store.send(2)]
    with server.new_worker(concurrency=1):
        assert begun.wait(HANG)
        for one in results:
            one.revoke()
        wait_until(lambda: all(one.is_finished() for one in results), HANG, "the end")
    assert cancelled == [True]


def test_what_is_gathered_runs_before_a_suspect(server: Server) -> None:
    runs: list[list[int]] = []

    @server.task(batch=3, batch_within=HANG)
    def store(rows: list[int]) -> None:
        runs.append(rows)

    results = [store.send(number) for number in (1, 2, 3)]
    let_workers_die(server, results[2:], deaths=1)
    with server.new_worker(concurrency=1):
        for one in results:
            one.get(timeout=HANG)
    assert runs == [[1, 2], [3]]


def test_suspect_of_a_batch_may_wait_for_other_tasks(server: Server) -> None:
    """Before its last strike it runs alone; what it waits for begins all the same."""
    other = server.register_task("other", lambda: 1)

    @server.task(batch=2, batch_within=HANG)
    def store(rows: list[int]) -> None:
        other.send().get(timeout=HANG / 2)

    result = store.send(1)
    let_workers_die(server, [result], deaths=2)
    with server.new_worker(concurrency=1):
        result.get(timeout=HANG)


def test_run_that_is_cut_off_gives_each_call_back(server: Server) -> None:
    begun, end = threading.Event(), threading.Event()
    stopped: list[bool] = []

    @server.task(batch=2, batch_within=HANG)
    def store(rows: list[int]) -> None:
        begun.set()
        wait_until(lambda: end.is_set() or current_task().cancelled)
        stopped.append(current_task().cancelled)

    results = [store.send(1), store.send(2)]
    with server.new_worker(concurrency=1, shutdown_timeout=0.0):
        assert begun.wait(HANG)
    assert not any(one.is_finished() for one in results)
    wait_until(lambda: stopped == [True])

    end.set()
    with server.new_worker(concurrency=1):
        for one in results:
            one.get(timeout=HANG)
    assert stopped == [True, False]


def test_calls_of_one_key_do_not_share_a_run(server: Server) -> None:
    runs: list[list[str]] = []

    @server.task(batch=3, batch_within=0.1, exclusive="wait", exclusive_key="rows")
    def store(rows: list[str]) -> None:
        runs.append(sorted(rows))

    results = [store.send(row) for row in ("a", "a", "b")]
    with server.new_worker(concurrency=2):
        for one in results:
            one.get(timeout=HANG)
    assert runs == [["a", "b"], ["a"]]


def test_each_call_of_a_batch_may_be_rejected_or_ignored(server: Server) -> None:
    seen: list[list[str]] = []

    @server.task(batch=4, batch_within=0.1, retries=2)
    def store(rows: list[str]) -> list[str]:
        seen.append(sorted(rows))
        errors = {"bad": Reject("bad"), "none": Ignore(), "later": Reject(requeue=True)}
        if len(seen) > 1:
            return rows
        raise BatchFailed({at: errors[row] for at, row in enumerate(rows) if row in errors}, rows)

    results = {row: store.send(row) for row in ("bad", "good", "later", "none")}
    with server.new_worker(concurrency=1):
        assert results["later"].get(timeout=HANG) == "later"
        wait_until(server.inspect.dead)
    assert seen == [["bad", "good", "later", "none"], ["later"]]
    assert results["good"].get(timeout=HANG) == "good"
    types = [results[row].get_state().error_type for row in ("bad", "none")]
    assert types == ["Rejected", "Ignored"]
    assert [letter.uuid for letter in server.inspect.dead()] == [results["bad"].uuid]


def test_chord_of_batch_calls_in_a_worker_that_ends_when_idle(server: Server) -> None:
    runs: list[int] = []

    @server.task(batch=10, batch_within=HANG)
    def double(rows: list[int]) -> list[int]:
        runs.append(len(rows))
        return [2 * row for row in rows]

    @server.task
    def total(*numbers: int) -> int:
        return sum(numbers)

    members = group(double.signature(number) for number in range(12))
    result = chord(members, total.partial()).send()
    with server.new_worker(concurrency=1, burst=True):  # it does not wait for more calls
        assert result.get(timeout=HANG) == 132
    assert sum(runs) == 12


# Without a worker


def test_harness_runs_what_is_due_in_batches(server: Server) -> None:
    runs: list[list[int]] = []

    @server.task(batch=4)
    def store(rows: list[int]) -> None:
        runs.append(rows)

    with Harness(server) as harness:
        for number in range(6):
            store.send(number)
        assert harness.drain() == 6
    assert runs == [[0, 1, 2, 3], [4, 5]]


def test_eager_runs_each_call_as_a_batch_of_its_own() -> None:
    server = Server("eager")

    @server.task(batch=4)
    def double(rows: list[int]) -> list[int]:
        return [2 * row for row in rows]

    assert [double.send(number).get() for number in (1, 2)] == [2, 4]
    assert double([1, 2, 3]) == [2, 4, 6]
    server.close()


@pytest.mark.parametrize(
    ("options", "function", "text"),
    [
        ({"batch": 0}, _store, "batch=0.*1 to 1,000"),
        ({"batch_within": 2}, _store, "it needs batch"),
        ({"batch": 2}, lambda: None, "takes one list"),
        ({"batch": 2}, lambda rows, more: None, "takes one list"),
        ({"batch": 2}, lambda rows=(): None, "takes one list"),
    ],
)
def test_what_can_be_no_batch_is_refused(
    server: Server, options: Any, function: Any, text: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        server.task("work", **options)(function)


def test_batch_task_of_a_task_set_is_included(server: Server) -> None:
    rows = TaskSet()

    @rows.task(batch=2)
    def double(numbers: list[int]) -> list[int]:
        return [2 * one for one in numbers]

    server.include(rows)
    with Harness(server) as harness:
        result = double.send(2)
        harness.drain()
        assert result.get() == 4
