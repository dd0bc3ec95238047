"""Workers die of poison tasks or `kill -9`: only the poison is given up, all else is done."""

from __future__ import annotations

import collections
import os
import pathlib
from collections.abc import Callable, Iterator

import pytest

from machinery_py import Server, State
from machinery_py.testing.waiting import wait_until
from tests.support.supervised import kill_all
from tests.system.test_kills import FULL, Fleet, _mongodb, done

POISON = int(
    os.environ.get("CHAOS_POISON", "2")
)  # tasks that kill their worker; `make chaos` asks for more
EACH_POISON = 100  # good tasks for each of them
KILLS = int(os.environ.get("CHAOS_HELD_KILLS", "4"))
EACH_KILL = 150  # tasks; so few that what a worker holds is held by the next victim, too
STRIKES = 3
HANG = max(150.0, 12.0 * POISON, 12.0 * KILLS)  # seconds; a guard, nothing is measured with it


@pytest.fixture(params=["sqlite", "postgresql", "redis", "amqp and redis", *["mongodb"] * FULL])
def fleet(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Fleet]:
    match request.param:
        case "sqlite":
            fleet = Fleet(tmp_path, f"sqlite:///{tmp_path}/poison.db")
        case "postgresql":
            fleet = Fleet(tmp_path, request.getfixturevalue("postgres_url"))
        case "mongodb":
            fleet = Fleet(tmp_path, _mongodb(request))
        case "redis":
            fleet = Fleet(tmp_path, request.getfixturevalue("empty_redis").url)
        case _:
            fleet = Fleet(
                tmp_path,
                request.getfixturevalue("amqp_url"),
                request.getfixturevalue("empty_redis").url,
            )
    yield fleet
    fleet.stop()


@pytest.fixture
def server(fleet: Fleet) -> Iterator[Server]:
    server = Server(fleet.url, result_backend=fleet.backend)
    yield server
    server.close()


def keep_two(fleet: Fleet, until: Callable[[], bool], what: str) -> None:
    """Keep two workers running, and start another one for each that has ended."""
    workers = [fleet.start(), fleet.start()]

    def looked_after() -> bool:
        for index, worker in enumerate(workers):
            if worker.poll() is not None:
                workers[index] = fleet.start()
        return until()

    wait_until(looked_after, timeout=HANG, what=what)


def send(server: Server, signatures: list[object]) -> list[str]:
    """In one submission; the UUIDs."""
    named = [one.with_uuid() for one in signatures]  # type: ignore[attr-defined]  # of any task
    server.app.submit(named)
    return [one.uuid for one in named]


def all_ended(server: Server) -> bool:
    return done(server) and not any(
        server.inspect.tasks(state=state, limit=1)
        for state in (State.PENDING, State.RECEIVED, State.STARTED)
    )


@pytest.mark.timeout(2 * HANG)
def test_only_tasks_that_kill_workers_are_given_up(fleet: Fleet, server: Server) -> None:
    deadly, work = server.register_task("deadly", lambda: None), server.register_task("work", int)
    poison, good = set[str](), set[str]()
    for start in range(POISON):
        good.update(
            send(
                server,
                [work.signature(start * EACH_POISON + number) for number in range(EACH_POISON)],
            )
        )
        poison.update(send(server, [deadly.signature()]))

    keep_two(
        fleet,
        lambda: all_ended(server) and len(server.inspect.dead(limit=10 * POISON)) == POISON,
        "all tasks have ended",
    )

    letters = server.inspect.dead(limit=10 * POISON)
    assert {letter.uuid for letter in letters} == poison
    assert {(letter.reason, letter.strikes) for letter in letters} == {("poison", STRIKES)}
    states = {state.task_uuid: state.state for state in server.inspect.tasks(limit=2 * len(good))}
    assert {uuid for uuid, state in states.items() if state is State.SUCCESS} == good
    runs = fleet.runs()
    # One less: its neighbour killed the worker when the task was noted as begun and not yet called
    # (K4 of the delivery guarantees).
    # One more: on RabbitMQ the next worker may get the message before this host sees the death.
    counts = collections.Counter(runs[uuid] for uuid in poison)
    most = STRIKES + fleet.url.startswith("amqp")
    assert all(STRIKES - 1 <= count <= most for count in counts), counts


@pytest.mark.timeout(2 * HANG)
def test_tasks_held_by_killed_workers_are_never_given_up(fleet: Fleet, server: Server) -> None:
    kills = KILLS // 2 if "mongodb" in fleet.url else KILLS
    rest = server.register_task("rest", float)
    sent: set[str] = set()
    for _ in range(kills):
        sent.update(send(server, [rest.signature(0.002) for _ in range(EACH_KILL)]))
    workers = [fleet.start(), fleet.start()]

    for number in range(kills):
        goal = number * EACH_KILL * 3 // 4 + 1
        wait_until(
            lambda goal=goal: sum(fleet.runs().values()) >= goal or done(server),
            timeout=HANG,
            what=f"{goal} runs",
        )
        victim = workers[number % 2]
        kill_all(victim)
        workers[number % 2] = fleet.start()

    wait_until(lambda: all_ended(server), timeout=HANG, what="all tasks have ended")
    assert not server.inspect.dead()
    states = server.inspect.tasks(limit=2 * len(sent))
    assert collections.Counter(state.state for state in states) == {State.SUCCESS: len(sent)}
    assert {state.task_uuid for state in states} == sent
