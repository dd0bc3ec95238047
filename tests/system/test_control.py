"""Orders to workers over each broker: asked from another process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

from machinery_py import MachineryError, Server, TaskFailed
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.control.agent import READ_TIMEOUT, Agent
from tests.cli.app import App, app_in_a_folder
from tests.support.fixtures import OpenServer
from tests.support.freezing import freeze

app = app_in_a_folder


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

    def test_tasks_are_revoked_by_their_headers(self, open_server: OpenServer) -> None:
        """Waiting, delayed, held and running ones; those of others, and later ones, run."""
        own, asking, gate = open_server(), open_server(), threading.Event()
        wait = own.register_task("wait", lambda: gate.wait(HANG))
        asking.register_task("wait", lambda: None)
        acme = wait.options(headers={"tenant": "acme", "plan": "free"})
        with own.new_worker("ada", 1) as ada, own.new_worker("bob", 1, queues=["other"]) as bob:
            try:
                running = [acme.send(), acme.options(queue="other").send()]
                wait_until(lambda: (ada.active, bob.active) == (1, 1))
                unstarted = [acme.send() for _ in range(5)]
                unstarted += [acme.options(delay=3600).send(), acme.options(queue="idle").send()]
                others = [wait.options(headers={"tenant": "acme", "plan": "paid"}).send()]
                others += [wait.send()]

                wanted = {"tenant": "acme", "plan": "free"}
                done = asking.control.revoke(headers=wanted, terminate=True, timeout=HANG)

                assert set(done.uuids) == {one.uuid for one in (*running, *unstarted)}
                first, second = running
                assert done == {"ada": {first.uuid: "asked"}, "bob": {second.uuid: "asked"}}
                assert (done.missing, done.errors) == ((), {})
                others.append(acme.send())
            finally:
                gate.set()
            for one in unstarted:
                with pytest.raises(TaskFailed, match="revoked"):
                    one.get(timeout=HANG)
            assert [one.get(timeout=HANG) for one in others] == [True] * 3

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


def test_frozen_worker_is_named_and_a_stopping_one_answers(app: App, redis_url: str) -> None:
    """L32: the caller is told in time, and what it gave up is not done later."""
    app.env["MACHINERY_URL"] = redis_url
    frozen = app.worker("-n", "frozen", "-c", "1", "-Q", "other")
    stopping = app.worker("-n", "stopping", "-c", "1")
    uuid = app.send("hold", "a")
    wait_until(lambda: bool(app.notes))
    with contextlib.closing(Server(redis_url)) as asking:
        control, pid = asking.control, frozen.worker
        assert set(control.ping(timeout=HANG)) == {"frozen", "stopping"}
        stopping.signal(signal.SIGTERM)
        stopping.wait_for("stopping when the running tasks are done")

        freeze(pid, redis_url)
        with pytest.raises(MachineryError, match="frozen: no answer in 0.5 s"):
            control.workers("frozen", timeout=0.5).set_concurrency(7)
        answers = control.ping(timeout=READ_TIMEOUT + 0.5)
        assert (set(answers), answers.missing) == ({"stopping"}, ("frozen",))
        os.kill(pid, signal.SIGCONT)

        wait_until(lambda: "frozen" in control.ping(timeout=1.0))
        assert control.workers("frozen", timeout=HANG).stats()["frozen"].concurrency == 1
        [active] = control.workers("stopping", timeout=HANG).active()["stopping"]
        assert active.uuid == uuid
        app.go("a")
        assert stopping.wait() == 0
        assert set(control.ping(timeout=HANG)) == {"frozen"}


def test_hundred_workers_are_asked_at_once(redis_url: str) -> None:
    """Each has an agent and a session of its own."""
    large = {"text": "x" * 10_000}
    with contextlib.ExitStack() as stack:
        fleet, asking = (stack.enter_context(contextlib.closing(Server(redis_url))) for _ in "12")
        for number in range(100):
            agent = Agent(fleet.app, f"w{number}")
            agent.listen()
            agent.start({"ping": lambda _: None, "config": lambda _: large})
            stack.callback(agent.stop, HANG)
            consumer = fleet.broker.consume(["other"], worker=f"w{number}")
            stack.callback(consumer.close)

        workers = asking.control.workers(timeout=HANG)
        names = {f"w{number}" for number in range(100)}
        assert (set(workers.ping()), workers.ping().missing) == (names, ())
        assert workers.config() == dict.fromkeys(names, large)
        consumer.close()
        agent.stop(HANG)
        assert set(workers.ping()) == names - {"w99"}
