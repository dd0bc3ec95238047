"""Orders to workers over each broker: asked from another process."""

from __future__ import annotations

import threading
import time

import pytest

from machinery_py import MachineryError
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.fixtures import OpenServer


class TestControl:
    """Tests over each broker."""

    def test_workers_of_another_process_answer(self, open_server: OpenServer) -> None:
        """L14, L28: each that lives answers; one that does not is named."""
        own, asking, gate = open_server(), open_server(), threading.Event()
        wait = own.register_task("wait", lambda: gate.wait(HANG))
        with own.new_worker("ada", 1) as ada, own.new_worker("bob-1", 3, queues=["other"]):
            try:
                running, waiting = wait.send(), wait.send()
                wait_until(lambda: ada.active == 1)

                assert set(asking.control.ping(timeout=HANG)) == {"ada", "bob-1"}
                stats = asking.control.workers("b*", timeout=HANG).stats()
                assert [(name, one.concurrency) for name, one in stats.items()] == [("bob-1", 3)]
                workers = asking.control.workers("ada", timeout=HANG)
                [active] = workers.active()["ada"]
                assert {active.uuid, *(one.uuid for one in workers.reserved()["ada"])} <= {
                    running.uuid,
                    waiting.uuid,
                }
                assert [one.name for one in workers.queues()["ada"]] == ["machinery_tasks"]
                assert workers.registered() == {"ada": ["wait"]}
                [stack] = [one for one in workers.stack()["ada"] if one.task == active.uuid]
                assert (stack.thread, "gate.wait" in stack.stack) == (active.place, True)
            finally:
                gate.set()

    def test_worker_is_changed_while_it_runs(self, open_server: OpenServer) -> None:
        """Concurrency and queues, from another process."""
        own, asking, gate = open_server(), open_server(), threading.Event()
        wait = own.register_task("wait", lambda: gate.wait(HANG))
        with own.new_worker("ada", 1) as ada:
            workers = asking.control.workers("ada", timeout=HANG)
            try:
                wait.send()
                elsewhere = wait.options(queue="other").send()
                wait_until(lambda: ada.active == 1)
                workers.set_concurrency(2)
                workers.add_queue("other")
                wait_until(lambda: ada.active == 2)
                assert {one.uuid for one in workers.active()["ada"]} >= {elsewhere.uuid}

                workers.cancel_queue("machinery_tasks")
                assert [one.name for one in workers.queues()["ada"]] == ["other"]
                [info] = asking.broker.workers()
                assert list(info.queues) == ["other"]
                with pytest.raises(MachineryError, match="ada: .* is the only queue"):
                    workers.cancel_queue("other")
            finally:
                gate.set()

    def test_worker_that_does_not_answer_is_named_in_time(self, open_server: OpenServer) -> None:
        deaf, asking = open_server(), open_server()
        consumer = deaf.broker.consume(["other"], worker="deaf")
        try:
            began = time.monotonic()
            answers = asking.control.workers("de*", "nobody", timeout=0.2).ping()
            assert time.monotonic() - began < HANG
        finally:
            consumer.close()

        assert (answers, answers.missing) == ({}, ("nobody", "deaf"))
        assert asking.control.ping() == {}
