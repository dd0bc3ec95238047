"""Retries, delays, chains and callbacks whose parts are run by different languages."""

from __future__ import annotations

import collections
import datetime as dt
import itertools
import logging
import time

import pytest

from machinery_py import Chain, Server, Signature, State, TaskFailed
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.admission.intake import FIRST_PAUSE
from tests.interop.conftest import Fleet
from tests.interop.fleet import call, message
from tests.interop.golang import GoError, Peer

QUEUES = ("of_go", "of_python")
SENDERS = ("go", "python")
OTHER = {"of_go": "of_python", "of_python": "of_go"}
Both = tuple[Server, Peer]


@pytest.fixture
def both(fleet: Fleet) -> Both:
    """A worker of each language, each with a queue of its own."""
    server = fleet.python()
    go = fleet.go_worker("of_go")
    fleet.python_worker(server, "of_python")
    return server, go


def step_result(server: Server, uuid: str) -> object:
    """Return the result of a step of Go's chain, which has no state before it is sent."""
    wait_until(lambda: server.backend.get_states([uuid]), what="the step before it")
    return server.result(uuid).get(timeout=HANG)


def add(queue: str, *numbers: int, **fields: object) -> Signature[int]:
    return call("add", *(("int64", number) for number in numbers), routing_key=queue, **fields)


# Errors and retries


@pytest.mark.parametrize("queue", QUEUES)
def test_a_failure_is_read_by_both(both: Both, queue: str) -> None:
    server, go = both
    for sender in SENDERS:
        failed = server.result(
            _send(both, sender, call("fail", ("string", "Größe 中"), routing_key=queue))
        )
        crashed = server.result(
            _send(both, sender, call("crash", ("string", "badly"), routing_key=queue))
        )

        with pytest.raises(TaskFailed, match="Größe 中"):
            failed.get(timeout=HANG)
        with pytest.raises(TaskFailed, match="badly"):
            crashed.get(timeout=HANG)
        with pytest.raises(GoError, match="Größe 中"):
            go.result(failed.uuid)
        assert go.ask("state", uuid=failed.uuid)["State"] == "FAILURE"


def test_task_is_tried_as_often_as_its_retry_count_says(both: Both) -> None:
    server, _go = both
    enough, too_few = [], []
    for sender, queue in itertools.product(SENDERS, QUEUES):  # all at once: they wait side by side
        key = f"{sender}-{queue}"
        two = call("flaky", ("string", key), ("int64", 2), routing_key=queue, retry_count=2)
        nine = call("flaky", ("string", key + "!"), ("int64", 9), routing_key=queue, retry_count=1)
        enough.append(_send(both, sender, two))
        too_few.append(_send(both, sender, nine))

    assert [server.result(uuid).get(timeout=HANG) for uuid in enough] == [3] * len(enough)
    for uuid in too_few:
        with pytest.raises(TaskFailed, match="failure 2"):
            server.result(uuid).get(timeout=HANG)


@pytest.mark.parametrize("queue", QUEUES)
def test_a_task_may_ask_to_be_run_later(both: Both, fleet: Fleet, queue: str) -> None:
    fleet.needs_types()
    server, go = both
    messages = [
        call("later", ("string", f"{sender}-{queue}"), ("int64", 300), routing_key=queue)
        for sender in SENDERS
    ]
    uuids = [_send(both, sender, one) for sender, one in zip(SENDERS, messages, strict=True)]

    for uuid in uuids:
        value = server.result(uuid).get(timeout=HANG)
        assert value == ("go at last" if queue == "of_go" else "python at last")
        assert go.result(uuid) == [value]


def test_a_delayed_task_waits_for_its_time(both: Both) -> None:
    server, _ = both
    eta = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=1)
    ways = itertools.product(SENDERS, QUEUES)

    uuids = [_send(both, sender, add(queue, 1, 2, eta=eta)) for sender, queue in ways]

    early: set[str] = set()

    def all_ended() -> bool:
        states = server.backend.get_states(uuids)
        ended = {uuid for uuid, state in states.items() if state.is_finished}
        if dt.datetime.now(dt.timezone.utc) < eta:
            early.update(ended)
        return len(ended) == len(uuids)

    wait_until(all_ended, HANG, "the tasks")
    assert not early
    assert [server.result(uuid).get(timeout=HANG) for uuid in uuids] == [3] * len(uuids)


def _send(both: Both, sender: str, signature: Signature[object]) -> str:
    server, go = both
    if sender == "go":
        return str(go.ask("send", message=message(signature)))
    return server.send_task(signature).uuid


# Chains and callbacks


@pytest.mark.parametrize("first", QUEUES)
def test_a_chain_of_python_goes_through_both(both: Both, fleet: Fleet, first: str) -> None:
    fleet.needs_types()
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


@pytest.mark.parametrize("first", QUEUES)
def test_a_chain_of_go_goes_through_both(both: Both, fleet: Fleet, first: str) -> None:
    fleet.needs_types()
    server, go = both
    steps = (
        add(first, 1, 1),
        add(OTHER[first], 10),
        add(first, 100),
        call("mul", ("int64", 2), routing_key=OTHER[first]),
    )

    uuids = go.ask("chain", messages=[message(step) for step in steps])

    assert go.result(uuids[-1]) == [224]
    assert [step_result(server, uuid) for uuid in uuids] == [2, 12, 112, 224]


@pytest.mark.parametrize("kind", ["int32", "float32", "[]int64", "[]byte", "uint8"])
def test_result_reaches_the_next_step_under_its_annotated_type(both: Both, kind: str) -> None:
    server, go = both
    value = {"int32": 5, "float32": 2.0, "[]int64": [], "[]byte": b"ab", "uint8": 200}[kind]
    steps = [call(f"echo_{kind}", (kind, value), routing_key="of_python")]
    steps += [call(f"echo_{kind}", routing_key=queue) for queue in ("of_go", "of_python", "of_go")]

    of_go = go.ask("chain", messages=[message(step) for step in steps])

    assert server.send_chain(Chain(steps)).get(timeout=HANG) == value
    assert step_result(server, of_go[-1]) == value


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("sender", ["go", "python"])
@pytest.mark.parametrize("immutable", [False, True])
def test_success_callbacks_follow_gos_rules(
    both: Both, queue: str, sender: str, immutable: bool
) -> None:
    server, _ = both
    after = [
        call(
            "total",
            ("int64", 1000),
            routing_key=OTHER[queue],
            uuid=f"{sender}-{queue}-{immutable}-{number}",
        )
        for number in range(2)
    ]
    parent = add(queue, 1, 2, immutable=immutable, on_success=after)

    _send(both, sender, parent)

    for one in after:
        wait_until(lambda: _state(server, one.uuid) is State.SUCCESS, what="the callback has run")  # noqa: B023
        assert server.result(one.uuid).get(timeout=HANG) == (1000 if immutable else 1003)


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("sender", ["go", "python"])
def test_error_callbacks_get_the_text_in_front(both: Both, queue: str, sender: str) -> None:
    server, _ = both
    other = OTHER[queue]
    caught = call("caught_with", ("string", "more"), routing_key=other, uuid=f"{sender}-{queue}")

    _send(both, sender, call("fail", ("string", "no"), routing_key=queue, on_error=[caught]))

    wait_until(lambda: _state(server, caught.uuid) is State.SUCCESS, what="the callback has run")
    assert (
        server.result(caught.uuid).get(timeout=HANG)
        == f"{other.removeprefix('of_')} caught no with more"
    )


def _state(server: Server, uuid: str) -> State | None:
    found = server.backend.get_states([uuid]).get(uuid)
    return found.state if found else None


# One queue for both


def test_tasks_known_only_to_the_other_side_reach_it(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "machinery_py.worker.admission.intake")
    server = fleet.python_worker()
    go = fleet.go_worker()
    began = time.monotonic()

    calls = [
        (sender, language, str(number))
        for number in range(5)
        for sender in SENDERS
        for language in SENDERS
    ]
    uuids = [
        _send((server, go), sender, call(f"{language}_only", ("string", text)))
        for sender, language, text in calls
    ]

    for uuid, (_, language, text) in zip(uuids, calls, strict=True):
        assert server.result(uuid).get(timeout=2 * HANG) == f"{language}:{text}"
    assert not server.inspect.dead()
    # No hot loop on our side: after its first return, a task waits for a pause that doubles.
    put_back = collections.Counter(
        vars(one).get("task_uuid") for one in caplog.records if "not registered" in one.getMessage()
    )
    most = max(put_back.values(), default=0)
    assert time.monotonic() - began >= FIRST_PAUSE * (2 ** max(0, most - 1) - 1)


def test_both_take_from_one_queue(fleet: Fleet) -> None:
    server = fleet.python_worker()
    go = fleet.go_worker()
    half = [server.send_task(call("where")).uuid for _ in range(100)]
    half += go.ask("send_many", messages=[message(call("where"))], count=100)

    places = [server.result(uuid).get(timeout=HANG) for uuid in half]

    assert set(places) <= {"go", "python"}
    assert len(places) == 200


def test_task_of_a_killed_go_worker_comes_back_on_rabbitmq_only(fleet: Fleet) -> None:
    server = fleet.python()
    go = fleet.go_worker("of_both")
    held = server.send_task(call("hold", routing_key="of_both"))  # for ever, in Go
    wait_until(lambda: _state(server, held.uuid) is State.STARTED, what="Go runs it")

    go.kill()
    fleet.python_worker(server, "of_both")

    if fleet.broker.startswith("amqp"):
        assert held.get(timeout=HANG) == "python"
    else:
        assert server.send_task(call("where", routing_key="of_both")).get(timeout=HANG) == "python"
        assert (
            _state(server, held.uuid) is State.STARTED
        )  # Go had popped it: nobody has it any more
