"""Tasks that wait for others inside themselves: their slots are lent meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from machinery_py import ResultTimeout, Server, TaskFailed, group
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.worker import Worker
from tests.support.fixtures import OpenServer


class Nest:
    """Tasks that wait for one another. `most`: how many ran at once, those that wait left out."""

    def __init__(self, server: Server) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self.most = 0
        self.gate = threading.Event()
        self.server = server
        register = server.register_task
        self.inner = register("inner", self._inner)
        self.outer = register("outer", self._outer)
        self.outer_async = register("outer_async", self._outer_async)
        self.both_async = register("both_async", self._both_async)
        self.members = register("members", self._members)
        self.in_turn = register("in_turn", self._in_turn)
        self.blocked = register("blocked", lambda: self.gate.wait(HANG))
        self.impatient = register("impatient", self._impatient)
        self.limited = server.task("limited", time_limit=0.3)(self._endless)

    def _count(self, change: int) -> None:
        with self._lock:
            self._running += change
            self.most = max(self.most, self._running)

    def _inner(self, number: int) -> int:
        self._count(1)
        self._count(-1)
        return number + 1

    def _outer(self, depth: int) -> int:
        self._count(1)
        result = self.outer.send(depth - 1) if depth else self.inner.send(0)
        self._count(-1)
        value = result.get(timeout=HANG)
        self._count(1)
        self._count(-1)
        return value + 1

    async def _outer_async(self, depth: int) -> int:
        if depth:
            return await self.outer_async.send(depth - 1).get_async(timeout=HANG) + 1
        return await self.inner.send(0) + 1

    async def _both_async(self) -> list[int]:
        return await asyncio.gather(*[self.inner.send(n).get_async(HANG) for n in range(3)])

    def _members(self) -> int:
        sent = self.server.send_group(group([self.inner.signature(n) for n in range(5)]))
        return sum(sent.get(timeout=HANG))

    def _in_turn(self) -> int:
        sent = self.server.send_group(group([self.inner.signature(n) for n in range(5)]))
        return sum(one.get(timeout=HANG) for one in sent.as_completed(timeout=HANG))

    def _impatient(self) -> int:
        return self.inner.send(0).get(timeout=0.0)

    def _endless(self) -> bool:
        return self.blocked.send().get()


@pytest.fixture
def nest(open_server: OpenServer) -> Nest:
    return Nest(open_server())


@pytest.fixture
def worker(nest: Nest) -> Iterator[Worker]:
    with nest.server.new_worker("w", concurrency=1) as worker:
        yield worker
        nest.gate.set()


NESTS: list[tuple[Callable[[Nest], object], object]] = [
    (lambda nest: nest.outer.send(0).get(timeout=HANG), 2),
    (lambda nest: nest.outer.send(3).get(timeout=HANG), 5),
    (lambda nest: nest.outer_async.send(3).get(timeout=HANG), 5),
    (lambda nest: nest.both_async.send().get(timeout=HANG), [1, 2, 3]),
    (lambda nest: nest.members.send().get(timeout=HANG), 15),
    (lambda nest: nest.in_turn.send().get(timeout=HANG), 15),
]


@pytest.mark.parametrize(
    ("call", "value"), NESTS, ids=["get", "deep", "async", "gather", "group", "as-completed"]
)
def test_a_task_that_waits_for_another_one_lends_its_slot(
    nest: Nest,
    worker: Worker,
    call: Callable[[Nest], object],
    value: object,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert call(nest) == value
    assert call(nest) == value

    names = [one.getMessage().split()[1] for one in caplog.records if "its slot" in one.message]
    assert len(names) == len(set(names)) == 1, "one warning for each name"
    assert nest.most <= 1, "what waits does not run"


def test_all_slots_come_back_after_waits(nest: Nest, worker: Worker) -> None:
    sent = [nest.outer.send(1) for _ in range(20)]
    assert [one.get(timeout=HANG) for one in sent] == [3] * 20

    waiting = [nest.blocked.send() for _ in range(2)]
    wait_until(lambda: worker.active == 1, HANG, "one to run")
    assert nest.most <= 2, "at most one more, when a wait was over and no slot was free"
    assert worker.active == 1

    nest.gate.set()
    assert [one.get(timeout=HANG) for one in waiting] == [True, True]


def test_a_wait_that_times_out_needs_no_slot(nest: Nest, worker: Worker) -> None:
    with pytest.raises(TaskFailed, match=ResultTimeout.__name__):
        nest.impatient.send().get(timeout=HANG)

    assert nest.outer.send(0).get(timeout=HANG) == 2


def test_a_task_whose_time_is_up_in_a_wait_has_given_its_slot_once(
    nest: Nest, worker: Worker
) -> None:
    with pytest.raises(TaskFailed, match="TimeLimitExceeded"):
        nest.limited.send().get(timeout=HANG)
    nest.gate.set()

    assert nest.outer.send(3).get(timeout=HANG) == 5
    wait_until(lambda: worker._live.executors._slots.free.qsize() == 1, HANG, "one slot")


def test_a_task_in_a_process_lends_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WAITING_STORE", f"sqlite:///{tmp_path}/store.db")
    from tests.worker import waiting_app

    waiting_app = importlib.reload(waiting_app)
    with (
        contextlib.closing(waiting_app.server),
        waiting_app.server.new_worker("w", concurrency=1) as worker,
    ):
        assert waiting_app.outer.send(2).get(timeout=HANG) == 4
        assert waiting_app.outer_async.send(1).get(timeout=HANG) == 3

        wait_until(lambda: len(worker._processes._idle) == 1, HANG, "one process to be left")
    assert caplog.text.count("its slot is lent") == 2
