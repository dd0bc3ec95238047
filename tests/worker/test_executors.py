"""Executors: each free slot gets the next task, however its threads are scheduled."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator

import pytest

from machinery_py import Server, current_task
from machinery_py.backends.memory import MemoryBackend
from machinery_py.brokers.base import Consumer, Delivery
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.rows import RowsSession, RowsStore
from machinery_py.testing.flaky import Faults, FlakyConsumer
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.admission.intake import accept, peek
from machinery_py.worker.lease import WorkerLease
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.executors import Executors
from machinery_py.worker.running.hooks import WorkerHooks
from machinery_py.worker.running.interrupts import may_interrupt
from machinery_py.worker.running.runner import Run


class Pausing(FlakyConsumer):
    """Stops a thread that has taken a delivery from the executors' queue and not yet run it."""

    def __init__(self, consumer: Consumer) -> None:
        super().__init__(consumer, Faults())
        self.pauses = False
        self.paused = threading.Event()
        self.go_on = threading.Event()

    def is_lost(self, delivery: Delivery) -> bool:
        if self.pauses:
            self.pauses = False
            self.paused.set()
            assert self.go_on.wait(HANG)
        return super().is_lost(delivery)


class Pool:
    """Executors over a memory store, and tasks for them; `runs`: the names of those begun."""

    def __init__(self, concurrency: int) -> None:
        hub = MemoryRows()
        self.server = Server("memory://")
        store = self.server.app.stores.store = RowsStore(MemoryBroker(hub), MemoryBackend(hub))
        self.consumer = Pausing(store.broker.consume(["machinery_tasks"], worker="w"))
        self.session = RowsSession(store, self.consumer)
        self.executors = Executors(
            concurrency,
            self.session,
            name="w",
            lease=WorkerLease(self.session, 10.0),
            on_done=lambda _: None,
            on_mark=lambda _: None,
        )
        self.runs: list[str] = []
        self.may_end = threading.Event()
        self.tasks = {
            "short": self.server.register_task("short", self.note),
            "long": self.server.register_task("long", self.wait),
            "coroutine": self.server.register_task("coroutine", self.wait_async),
        }

    def note(self) -> None:
        self.runs.append(current_task().name)

    def wait(self) -> None:
        self.note()
        assert self.may_end.wait(HANG)

    async def wait_async(self) -> None:
        self.note()
        while not self.may_end.is_set():
            await asyncio.sleep(0.01)

    def submit(self, name: str) -> Run:
        self.tasks[name].send()
        [delivery] = self.session.receive(1, HANG)
        execution = Execution(self.server.app, WorkerHooks(), delivery, "w")
        assert peek(execution)
        assert accept(execution, {})
        run = Run(execution)
        self.executors.submit(run)
        return run

    def wait_for(self, run: Run) -> None:
        wait_until(
            lambda: run.is_over and run not in self.executors.busy(),
            HANG,
            "the end of a task",
        )

    def run_to_its_end(self, name: str) -> None:
        self.wait_for(self.submit(name))

    def close(self) -> None:
        self.may_end.set()
        self.consumer.go_on.set()
        wait_until(lambda: not self.executors.busy(), HANG, "the end of all tasks")
        self.executors.close()
        self.session.close()
        self.server.close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(concurrency=2)
    yield pool
    pool.close()


def test_task_gets_a_slot_while_the_idle_thread_takes_another(pool: Pool) -> None:
    """The interleaving that Python 3.13 made common: taken from the queue, and not running yet."""
    pool.run_to_its_end("short")
    pool.consumer.pauses = True
    pool.submit("long")
    assert pool.consumer.paused.wait(HANG)

    pool.submit("short")

    wait_until(lambda: pool.runs == ["short", "short"], HANG, "the free slot to be used")
    pool.consumer.go_on.set()
    wait_until(lambda: pool.runs[2:] == ["long"], HANG, "the task that was paused")


def test_tasks_share_one_thread_when_each_ends_before_the_next(pool: Pool) -> None:
    for _ in range(5):
        pool.run_to_its_end("short")
        wait_until(lambda: pool.executors._idle.qsize() == 1, HANG, "the thread to be idle")

    assert len(pool.executors._threads) == 1


def test_coroutines_need_one_thread_to_be_started(pool: Pool) -> None:
    pool.submit("coroutine")
    wait_until(lambda: pool.executors._idle.qsize() == 1, HANG, "the thread to be idle")
    pool.submit("coroutine")
    wait_until(lambda: pool.runs == ["coroutine"] * 2, HANG, "both")

    assert len(pool.executors._threads) == 1


def test_slots_are_all_used_after_a_task_was_abandoned(pool: Pool) -> None:
    stuck = pool.submit("long")
    wait_until(lambda: pool.runs == ["long"], HANG, "the task")
    pool.executors.abandon(stuck)

    pool.submit("long")
    pool.submit("long")

    wait_until(lambda: pool.runs == ["long"] * 3, HANG, "both slots to be used")
    assert len(pool.executors._threads) == 2


def test_pool_that_gets_no_more_threads_runs_with_those_that_it_has(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if pool.executors._threads:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        pool.executors.resize(1000)
        pool.submit("long")
        pool.submit("long")
        pool.submit("short")
        wait_until(lambda: pool.runs == ["long"], HANG, "the one thread to run")
    assert "no more than 1 tasks run at a time: can't start new thread" in caplog.text

    pool.executors.resize(2)
    wait_until(lambda: pool.runs == ["long", "long"], HANG, "both slots to be used")


def test_larger_pool_makes_threads_when_there_is_work_for_them(pool: Pool) -> None:
    for _ in range(3):
        pool.submit("long")
    wait_until(lambda: pool.runs == ["long"] * 2, HANG, "both slots to be used")

    pool.executors.resize(10_000)

    wait_until(lambda: pool.runs == ["long"] * 3, HANG, "the one that was queued to run")
    assert len(pool.executors._threads) == 3
    pool.submit("long")
    wait_until(lambda: pool.runs == ["long"] * 4, HANG, "a new one to run")
    assert len(pool.executors._threads) == 4


def test_tokens_of_idle_threads_do_not_pile_up(pool: Pool) -> None:
    pool.submit("long")
    pool.submit("short")
    wait_until(lambda: sorted(pool.runs) == ["long", "short"], HANG, "two threads")

    for _ in range(50):
        pool.wait_for(pool.submit("short"))

    assert pool.executors._idle.qsize() <= 1


def test_tasks_that_cannot_be_interrupted_cost_one_retry(pool: Pool) -> None:
    """However many there are: they wait where locks are taken, here for one."""

    def wait_inside() -> None:
        pool.note()
        with pool.server.lock("held"):
            pass

    pool.tasks["inside"] = pool.server.register_task("inside", wait_inside)
    with pool.server.lock("held"):
        stuck = pool.submit("inside")
        wait_until(lambda: pool.runs == ["inside"], HANG, "the task")
        wait_until(
            lambda: not may_interrupt(sys._current_frames()[stuck.thread_id]),
            HANG,
            "the wait for the lock",
        )
        pool.executors.abandon(stuck)
        for _ in range(10):
            pool.executors._interrupt_stuck()

        assert sum(not one.is_cancelled for one in pool.executors.limits._entries) == 1
    wait_until(lambda: not pool.executors._stuck, HANG, "the end of the task")
