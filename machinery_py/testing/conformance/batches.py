"""Promises of every pair of stores about batches, with real workers.

    class TestMyStore(BatchConformance):
        @pytest.fixture
        def server(self) -> Server:
            return Server("my://localhost")

A second Server in this process with the same URLs must open the same stores.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from machinery_py import BatchFailed, State, TaskFailed, current_task
from machinery_py.testing.conformance.application import App, AppCase
from machinery_py.testing.waiting import HANG, wait_until

__all__ = ["App", "BatchConformance"]

CALLS, BATCH = 40, 10


class BatchConformance(AppCase):
    """Calls of a batch task are run together, and each ends by itself."""

    def test_calls_run_together_and_each_gets_its_own_result(self, idle: App) -> None:
        runs: list[int] = []

        @idle.server.task(batch=BATCH, batch_within=1.0)
        def double(rows: list[int]) -> list[int]:
            runs.append(len(rows))
            assert len(current_task().calls) == len(rows)
            return [2 * row for row in rows]

        results = [double.send(number) for number in range(CALLS)]
        with idle.running(concurrency=1):
            assert [one.get(timeout=HANG) for one in results] == [2 * one for one in range(CALLS)]
            idle.wait_until_idle()
        assert sum(runs) == CALLS
        assert runs.count(BATCH) >= 2  # the claims grow; the last calls may be alone
        assert len(runs) <= 6

    def test_one_call_of_a_batch_fails_and_is_retried_alone(self, idle: App) -> None:
        runs: list[list[int]] = []

        @idle.server.task(batch=3, batch_within=0.2, retries=1, backoff=[0.01])
        def store(rows: list[int]) -> None:
            runs.append(sorted(rows))
            if 2 in rows:
                raise BatchFailed({rows.index(2): ValueError("two")})

        results = [store.send(number) for number in (1, 2, 3)]
        with idle.running(concurrency=1):
            assert [results[place].get(timeout=HANG) for place in (0, 2)] == [None, None]
            with pytest.raises(TaskFailed, match="ValueError: two"):
                results[1].get(timeout=HANG)
            idle.wait_until_idle()
        assert sorted(row for run in runs for row in run) == [1, 2, 2, 3]
        assert runs[-1] == [2]

    def test_half_full_batch_holds_up_nothing_and_is_given_back(self, idle: App) -> None:
        runs: list[list[int]] = []

        def store(rows: list[int]) -> None:
            runs.append(sorted(rows))

        task: Any = idle.server.task(batch=3, batch_within=HANG)(store)
        first = [task.send(number) for number in (1, 2)]
        with idle.running(concurrency=1):
            for one in first:
                idle.wait_for_state(one.uuid, State.RECEIVED)
            assert idle.add.send(1, 2).get(timeout=HANG) == 3  # though there is one slot
        assert runs == []

        last = task.send(3)
        with idle.running(concurrency=1):
            for one in (*first, last):
                one.get(timeout=HANG)
        assert runs == [[1, 2, 3]]

    def test_plain_and_batch_tasks_of_a_queue_share_a_worker(self, idle: App) -> None:
        rows_seen: list[int] = []
        lock = threading.Lock()

        @idle.server.task(batch=7, batch_within=0.05)
        def store(rows: list[int]) -> None:
            with lock:
                rows_seen.extend(rows)

        results = [
            result
            for number in range(60)
            for result in (store.send(number), idle.add.send(number, 1))
        ]
        with idle.running():
            for result in results:
                result.get(timeout=HANG)
        wait_until(lambda: sorted(rows_seen) == list(range(60)))
