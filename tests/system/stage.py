"""Stores, and the processes over them that are killed: what the tests of crash points share."""

from __future__ import annotations

import collections
import copy
import functools
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest

from machinery_py import Config, Server, State
from machinery_py.brokers.base import QueueStats
from machinery_py.connections.mongodb.client import MongoDriver
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.stores import outbox, redis_steps
from machinery_py.testing.waiting import wait_until
from tests.support.fixtures import url_of
from tests.support.warm import WarmPython
from tests.system import crashing

HANG = 60.0  # seconds; a guard, nothing is measured with it

#: How often each function must complete, and what the kill may add in the ledger.
EXPECTED: dict[str, dict[str, int]] = {
    "task": {"plain": 1, "after": 1},
    "retry": {"shaky": 2, "after": 1},
    "failure": {"broken": 1, "on_error": 1},
    "chain": {"plain": 1, "after": 2},
    "group": {"plain": 5},
    "chord": {"plain": 5, "after": 1},
    "broken-chord": {"plain": 1, "broken": 1, "on_error": 1},
    "delayed": {"plain": 1, "after": 1},
    "barrier": {"plain": 2, "after": 2},
    "replaced": {"gives_way": 1, "plain": 2, "after": 2},
    "refused": {"plain": 1, "on_error": 1},
}
#: How many tasks exist in the end; a callback published twice would have another UUID.
TASKS = {
    "task": 2,
    "retry": 2,
    "failure": 2,
    "chain": 3,
    "group": 5,
    "chord": 6,
    "broken-chord": 4,
    "barrier": 4,
    "replaced": 4,
    "delayed": 2,
}


class Stage:
    """The files of one cell, and the processes that use them.

    Attributes:
        program: the module whose processes are killed.

    Args:
        stores: one store, or a broker and a result backend with a plus between.
    """

    program = "tests.system.crashing"

    def __init__(
        self, stores: str, folder: pathlib.Path, request: pytest.FixtureRequest, python: WarmPython
    ) -> None:
        broker, _, backend = stores.partition("+")
        self.ledger = folder / "ledger"
        self.broker = url_of(broker, folder / "first.db", request)
        second = folder / "second.db"
        self.backend = url_of(backend, second, request) if backend else self.broker
        self.lease = 2.0 if "mongodb" in stores else 30.0  # only it waits for a heartbeat
        self._python = python

    def run(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the program in a process of its own until it ends, or is killed."""
        return self._python.run(
            self.program,
            command,
            *words,
            environment={
                **os.environ,
                "CRASH_BROKER": self.broker,
                "CRASH_BACKEND": self.backend,
                "CRASH_LEDGER": str(self.ledger),
            },
            timeout=HANG,
        )

    def calls(self) -> collections.Counter[str]:
        """Return how often each function was called, and `killed`."""
        text = self.ledger.read_text() if self.ledger.exists() else ""
        return collections.Counter(line.split()[0] for line in text.splitlines())


@pytest.fixture(scope="session")
def python() -> Iterator[WarmPython]:
    with WarmPython() as python:
        yield python


@pytest.fixture
def stage(
    request: pytest.FixtureRequest,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    python: WarmPython,
) -> Stage:
    # What a dead process began is finished by others after half a second, not five.
    monkeypatch.setattr(MongoDriver, "intent_age", 0.3)
    monkeypatch.setattr(outbox, "OUTBOX_AGE", 0.5)
    monkeypatch.setattr(redis_steps, "STAGED_AGE", 0)
    return Stage(request.param, tmp_path, request, python)


@pytest.fixture
def survivor(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server in this process, with the same tasks, that is never killed."""
    monkeypatch.setenv("CRASH_LEDGER", str(stage.ledger))
    server = Server(Config(broker=stage.broker, result_backend=stage.backend, lease=stage.lease))
    for task in crashing.server.app.registry:
        copied = copy.copy(task)
        copied._sender = server
        server.app.registry.add(copied)
    yield server
    server.close()


MANY = 100  # records and groups; more than any of these tests makes


def finish(server: Server) -> None:
    """Run a worker until nothing is left to do."""
    with server.new_worker(concurrency=2):
        wait_until(functools.partial(is_done, server), timeout=HANG, what="all is settled")


def is_done(server: Server) -> bool:
    """Say whether nothing waits, runs or is half done, in either store."""

    def empty() -> bool:
        stats: list[QueueStats] = server.broker.stats()
        return not any(one.waiting or one.running or one.delayed for one in stats)

    def nothing_left() -> bool:
        # Twice: a callback may move from the ready groups to its queue between two looks. And of
        # each listing more than one: what the dead process has left may stand before what is there.
        return (
            empty()
            and not server.backend.ready_groups(MANY)
            and not server.backend.unsent(MANY, older_than=0.0)
            and not has_staged(server)
            and empty()
        )

    drivers = {getattr(one, "driver", None) for one in (server.broker, server.backend)}
    mongodb = [driver for driver in drivers if isinstance(driver, MongoDriver)]
    return nothing_left() and (
        not mongodb or (not any(map(has_unfinished_writes, mongodb)) and nothing_left())
    )


def has_staged(server: Server) -> bool:
    """Say whether a submission in steps to Redis is committed, and not carried out."""
    driver = getattr(server.broker, "driver", None)
    return isinstance(driver, RedisDriver) and driver.ask(
        b"EXISTS", b"mpy:committed", doing="looking"
    )


#: Between its first and last write to MongoDB, a step is visible nowhere else.
COLLECTIONS = (
    "machinery_tokens",
    "machinery_parts",
    "machinery_messages",
    "machinery_chords",
    "tasks",
    "machinery_claims",
)


def has_unfinished_writes(driver: MongoDriver) -> bool:
    return any(
        driver.run(
            lambda store, name=name: store[name].find_one({"deed_at": {"$gt": 0}}), doing="looking"
        )
        for name in COLLECTIONS
    )


def check_history(calls: collections.Counter[str], shape: str, point: str) -> None:
    """Only a run that was cut off, or whose result was not stored, is repeated after a kill."""
    expected = EXPECTED[shape]
    # Two slots, and what the second was doing. A chord is fired when all its members are settled,
    # but a broken one fails at once, while another member may be running.
    is_quiet = point in ("before-fire", "inside-fire") and shape != "broken-chord"
    slack = 4 if calls["killed"] and not is_quiet else 0
    for function, count in expected.items():
        assert count <= calls[function] <= count + slack, (function, calls)
    assert set(calls) <= {*expected, "killed"}


def check_states(server: Server, uuid: str, shape: str) -> None:
    """All tasks of the shape are finished, each once, as they must be."""
    if not server.backend.features.listing:
        # The members of a group; else the last task of the shape, which of a chord is the callback.
        states = (
            server.backend.group_task_states(uuid)
            if shape == "group"
            else [server.backend.get_state(uuid)]
        )
        assert {one.state for one in states} == {
            State.FAILURE if shape in ("broken-chord", "failure") else State.SUCCESS
        }
        return
    states = server.inspect.tasks(limit=100)
    assert all(state.is_finished for state in states), states
    assert len(states) == TASKS[shape], states
    if shape == "broken-chord":
        [callback] = [state for state in states if state.task_name == "after"]
        assert callback.state is State.FAILURE
        assert "broken" in callback.error
    elif shape == "failure":
        assert server.result(uuid).get_state().state is State.FAILURE
    else:
        assert {state.state for state in states} == {State.SUCCESS}
    assert not server.inspect.dead()
