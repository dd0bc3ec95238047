"""Results in RabbitMQ, shared by Go and Python.

A read in Go removes the state, so each is read by one of the two first.
"""

from __future__ import annotations

import collections
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from machinery_py import Chain, Group, Server, Signature, State, StateNotFound, TaskFailed
from machinery_py.testing.waiting import HANG, wait_until
from tests.interop.conftest import Fleet
from tests.interop.fleet import call, message
from tests.interop.golang import VERSIONS, GoError, Peer
from tests.support.servers import RedisServer

QUEUES = ("of_go", "of_python")
OTHER = {"of_go": "of_python", "of_python": "of_go"}
FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
CHORDS = 200 if FULL else 12
MEMBERS = 4
Both = tuple[Server, Peer]


@pytest.fixture(params=VERSIONS if FULL else VERSIONS[-1:])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def shared(version: str, empty_redis: RedisServer, amqp_url: str) -> Iterator[Fleet]:
    """Messages in Redis, since the queues of RabbitMQ have tests of their own."""
    with ExitStack() as stack:
        yield Fleet(version, empty_redis.url, amqp_url, stack)


@pytest.fixture
def both(shared: Fleet) -> Both:
    server = shared.python()
    go = shared.go_worker("of_go")
    shared.python_worker(server, "of_python")
    return server, go


def add(queue: str, *numbers: int) -> Signature[int]:
    return call("add", *(("int64", number) for number in numbers), routing_key=queue)


@pytest.mark.parametrize("queue", QUEUES)
def test_result_stays_when_read_here_and_goes_when_read_by_go(both: Both, queue: str) -> None:
    server, go = both
    result = server.send_task(add(queue, 1, 2))

    assert result.get(timeout=HANG) == 3
    assert server.result(result.uuid).get(timeout=HANG) == 3
    assert go.result(result.uuid) == [3]
    with pytest.raises(StateNotFound):
        server.backend.get_state(result.uuid)


@pytest.mark.parametrize("queue", QUEUES)
def test_go_gets_the_results_of_its_tasks(both: Both, queue: str) -> None:
    _, go = both
    assert go.result(str(go.ask("send", message=message(add(queue, 20, 3))))) == [23]


@pytest.mark.parametrize("queue", QUEUES)
def test_a_failure_is_read_by_both(both: Both, queue: str) -> None:
    server, go = both
    failed = server.send_task(call("fail", ("string", "Größe 中"), routing_key=queue))

    with pytest.raises(TaskFailed, match="Größe 中"):
        failed.get(timeout=HANG)
    with pytest.raises(GoError, match="Größe 中"):
        go.result(failed.uuid)


@pytest.mark.parametrize("first", QUEUES)
def test_a_chain_goes_through_both(both: Both, first: str) -> None:
    server, go = both
    steps = (
        add(first, 1, 1),
        add(OTHER[first], 10),
        add(first, 100),
        call("mul", ("int64", 2), routing_key=OTHER[first]),
    )

    result = server.send_chain(Chain(steps))

    assert result.get(timeout=HANG) == 224
    assert [go.result(one.uuid) for one in result.steps] == [[2], [12], [112], [224]]


@pytest.mark.parametrize("sender", ["go", "python"])
def test_a_chord_that_is_split_over_both_fires_once(both: Both, sender: str) -> None:
    """With one member in Go: several that end together in Go would each send the callback."""
    server, go = both
    source = random.Random(sender)
    wanted: dict[str, list[int]] = {}
    for number in range(CHORDS):
        queues = ["of_python"] * MEMBERS
        queues[source.randrange(MEMBERS)] = "of_go"
        parts = [add(queue, number + place, 0) for place, queue in enumerate(queues)]
        last = call("total", routing_key="counted")
        if sender == "go":
            sent = go.ask(
                "chord",
                messages=[message(part) for part in parts],
                callback=message(last),
                concurrency=2,
            )
            uuid = sent["callback"]
        else:
            uuid = server.send_chord(Group(parts) | last).uuid
        wanted[uuid] = list(range(number, number + MEMBERS))

    def fired() -> collections.Counter[str]:
        return collections.Counter(
            one.uuid for one in server.broker.pending("counted", 10 * CHORDS)
        )

    wait_until(lambda: len(fired()) >= CHORDS, timeout=4 * HANG, what="every chord has fired")
    assert fired() == collections.Counter(dict.fromkeys(wanted, 1))
    for one in server.broker.get_pending_tasks("counted"):
        assert (
            sorted(arg.value for arg in one.args) == wanted[one.uuid]
        )  # Go sends them as they came


@pytest.mark.parametrize(
    ("sender", "failing"), [("python", "of_go"), ("go", "of_python"), ("python", "of_python")]
)
def test_a_chord_with_a_member_that_fails_is_ended_by_python(
    both: Both, sender: str, failing: str
) -> None:
    """Not a chord sent and broken in Go: Go lists no members, and removes their reports."""
    server, go = both
    parts = [
        call("fail", ("string", "no"), routing_key=failing),
        add("of_python", 1, 1),
        add("of_go", 1, 1),
    ]
    last = call("total", routing_key="of_python")
    if sender == "go":
        sent = go.ask(
            "chord",
            messages=[message(part) for part in parts],
            callback=message(last),
            concurrency=2,
        )
        uuid = sent["callback"]
    else:
        uuid = server.send_chord(Group(parts) | last).uuid

    def failed() -> bool:
        state = server.backend.get_states([uuid]).get(uuid)
        return state is not None and state.state is State.FAILURE

    wait_until(failed, timeout=2 * HANG, what="the chord has failed")
