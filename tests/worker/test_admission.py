"""Tasks with a strike begin one at a time, with nothing beside them, and delay others briefly."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from machinery_py import Config, Server
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.loops import maintenance, receiver

SLOTS = 4


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(Config(broker="memory://"))
    yield server
    server.close()


class Watched:
    """A task that says who runs at each moment, and waits until it is let go."""

    def __init__(self, server: Server) -> None:
        self.takes = 0.0  # seconds of each run
        self.running: set[str] = set()
        self.together: list[set[str]] = []  # who ran when a run began
        self.gates: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self.task = server.register_task("watched", self._run)

    def _run(self, name: str) -> None:
        with self._lock:
            self.running.add(name)
            self.together.append(set(self.running))
        self.gates.get(name, _open()).wait(HANG)
        threading.Event().wait(self.takes)
        with self._lock:
            self.running.discard(name)

    def held(self, name: str) -> Any:
        """Send it, and let it run until `let_go`."""
        self.gates[name] = threading.Event()
        return self.task.send(name)

    def let_go(self, name: str) -> None:
        self.gates[name].set()


def _open() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@pytest.fixture
def watched(server: Server) -> Watched:
    return Watched(server)


def let_workers_die(server: Server, results: Sequence[Any], *, deaths: int) -> None:
    """So many, one after the other, while they ran these tasks."""
    broker: Any = server.broker
    uuids = {result.uuid for result in results}
    for _ in range(deaths):
        dying = broker.consume(["machinery_tasks"], worker="dies")
        for delivery in dying.receive(1000, 0):
            if delivery.message.uuid in uuids:
                dying.run_begins(delivery)
        with broker.rows.lock:
            broker.rows.give_back(broker.rows.all_holds[dying.session], 1000)
        dying.close()


def test_suspects_run_one_at_a_time_and_alone(server: Server, watched: Watched) -> None:
    watched.takes = 0.002  # so that two would meet, if they could
    results = [watched.task.send(f"good {number}") for number in range(100)]
    suspects = [watched.task.send(f"suspect {number}") for number in range(50)]
    results += suspects + [watched.task.send(f"later {number}") for number in range(100)]
    let_workers_die(server, suspects, deaths=1)

    with server.new_worker(concurrency=SLOTS):
        for result in results:
            result.get(timeout=HANG)

    beside = [
        names for names in watched.together if any(name.startswith("suspect") for name in names)
    ]
    assert len(beside) == 50
    assert all(len(names) == 1 for names in beside)
    assert not server.inspect.dead()


def test_task_has_not_begun_before_it_is_let_in(server: Server) -> None:
    broker: Any = server.broker
    begun: list[bool] = []

    def note() -> None:
        holds = list(broker.rows.all_holds.values())
        begun.append(any(one.runs for hold in holds for one in hold.kept.messages.values()))

    def key(number: int) -> str:
        note()
        return str(number)

    @server.task(exclusive="wait", exclusive_key=key)
    def guarded(number: int) -> None:
        note()

    with server.new_worker():
        guarded.send(1).get(timeout=HANG)

    assert begun[-2:] == [False, True]  # the key was asked for at the sender's, perhaps


def test_long_suspect_blocks_others_only_during_its_probation(
    server: Server, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "PROBATION", 0.1)
    suspects = [watched.held("one"), watched.held("two")]
    good = watched.task.send("good")
    let_workers_die(server, suspects, deaths=1)

    with server.new_worker(concurrency=SLOTS):
        good.get(timeout=HANG)
        wait_until(
            lambda: watched.running == {"one", "two"}, timeout=HANG, what="both suspects run"
        )
        for name in ("one", "two"):
            watched.let_go(name)
        for suspect in suspects:
            suspect.get(timeout=HANG)


def test_suspect_starts_beside_a_task_that_has_run_for_long(
    server: Server, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "PROBATION", 0.1)
    long = watched.held("long")
    with server.new_worker(concurrency=SLOTS):
        wait_until(lambda: watched.running == {"long"}, timeout=HANG, what="the long task runs")
        server.broker.pause("machinery_tasks")
        suspect = watched.task.send("suspect")
        let_workers_die(server, [suspect], deaths=1)
        server.broker.resume("machinery_tasks")

        suspect.get(timeout=HANG)

        assert {"long", "suspect"} in watched.together
        watched.let_go("long")
        long.get(timeout=HANG)


def test_suspect_before_its_last_strike_runs_alone_to_its_end(
    server: Server, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "PROBATION", 0.0)
    suspect = watched.held("suspect")
    let_workers_die(server, [suspect], deaths=2)

    with server.new_worker(concurrency=SLOTS) as worker:
        wait_until(lambda: watched.running == {"suspect"}, timeout=HANG, what="the suspect runs")
        good = watched.task.send("good")
        runs = worker._live.receiver.held()[0]
        wait_until(
            lambda: time.perf_counter() - runs.call_started > 1.0,
            timeout=HANG,
            what="it has run for a while",
        )
        assert worker._live.receiver.held() == [runs]
        assert not good.is_finished()
        watched.let_go("suspect")
        suspect.get(timeout=HANG)
        good.get(timeout=HANG)
    assert {"good", "suspect"} not in watched.together


def test_worker_is_changed_while_a_suspect_waits_or_runs_alone(
    server: Server, watched: Watched
) -> None:
    watched.gates["long"] = threading.Event()
    long = watched.task.options(queue="other").send("long")
    with server.new_worker(concurrency=SLOTS, queues=["other"]) as worker:
        wait_until(lambda: watched.running == {"long"}, timeout=HANG, what="the long task runs")
        suspect = watched.held("suspect")
        let_workers_die(server, [suspect], deaths=2)
        workers = server.control.workers(timeout=HANG)

        workers.add_queue("machinery_tasks")
        wait_until(lambda: bool(worker._live.receiver._suspects), timeout=HANG, what="it waits")
        workers.set_concurrency(2)
        watched.let_go("long")
        long.get(timeout=HANG)
        wait_until(lambda: watched.running == {"suspect"}, timeout=HANG, what="it runs alone")
        workers.set_concurrency(3)

        watched.let_go("suspect")
        suspect.get(timeout=HANG)


def test_waiting_suspects_are_left_to_other_workers(server: Server, watched: Watched) -> None:
    suspects = [watched.held(f"suspect {number}") for number in range(3)]
    let_workers_die(server, suspects, deaths=2)

    with (
        server.new_worker(concurrency=SLOTS),
        server.new_worker(concurrency=SLOTS),
        server.new_worker(concurrency=SLOTS),
    ):
        wait_until(lambda: len(watched.running) == 3, timeout=HANG, what="each worker runs one")
        for number in range(3):
            watched.let_go(f"suspect {number}")
        for suspect in suspects:
            suspect.get(timeout=HANG)


def test_suspects_that_were_given_back_do_not_stop_the_worker(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "STALE", 0.01)
    gate = threading.Event()
    add = server.register_task("add", lambda *numbers: sum(numbers))
    held = server.register_task("held", lambda: gate.wait(HANG) and None)
    long = held.send()
    suspects = [add.send(number) for number in range(2)]
    let_workers_die(server, suspects, deaths=2)
    broker: Any = server.broker
    broker.pause("machinery_tasks")

    with server.new_worker(concurrency=1) as worker:
        worker._live.receiver._mean = 1e-6  # it has learnt that tasks are short, and claims both
        broker.resume("machinery_tasks")
        queue = broker.rows._queues["machinery_tasks"]
        wait_until(
            lambda: sum(message.count > 2 for message in list(queue)) == 2,
            what="they were claimed, and given back",
        )
        gate.set()

        assert long.get(timeout=HANG) is None
        assert [suspect.get(timeout=HANG) for suspect in suspects] == [0, 1]
        assert add.send(2).get(timeout=HANG) == 2
        assert worker.ready
