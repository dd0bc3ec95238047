"""Groups and chords with members in both languages, in any order: each chord fires exactly once."""

from __future__ import annotations

import collections
import random

import pytest

from machinery_py import Group, Server, Signature, State, TaskFailed
from machinery_py.testing.waiting import HANG, wait_until
from tests.interop.conftest import FULL, Fleet
from tests.interop.fleet import call, message
from tests.interop.golang import Peer

QUEUES = ("of_go", "of_python")
Both = tuple[Server, Peer, Fleet]
CHORDS = 500
FEW = 60  # where it takes longer; `MACHINERY_TEST_FULL=1` tries them all
MEMBERS = 4


@pytest.fixture
def both(fleet: Fleet) -> Both:
    server = fleet.python()
    go = fleet.go_worker("of_go", concurrency=8)
    fleet.python_worker(server, "of_python", concurrency=8)
    return server, go, fleet


def members(
    source: random.Random, count: int, *, start: int = 0, one_in_go: bool = False
) -> list[Signature[int]]:
    queues = [source.choice(QUEUES) for _ in range(count)]
    if one_in_go:
        queues = ["of_python"] * count
        queues[source.randrange(count)] = "of_go"
    return [
        call("add", ("int64", start + number), ("int64", 0), routing_key=queue)
        for number, queue in enumerate(queues)
    ]


def send_chords(both: Both, sender: str, count: int) -> dict[str, list[int]]:
    """Chords whose callbacks go to a queue without a worker; what each is to get, by its UUID."""
    server, go, fleet = both
    source = random.Random(sender)
    wanted = {}
    for number in range(count):
        parts = members(source, MEMBERS, start=number, one_in_go=not fleet.go_fires_once)
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
    return wanted


@pytest.mark.parametrize("sender", ["go", "python"])
def test_a_chord_that_is_split_over_both_fires_exactly_once(both: Both, sender: str) -> None:
    server, go, fleet = both
    count = CHORDS if FULL or fleet.is_quick else FEW
    wanted = send_chords(both, sender, count)

    def fired() -> collections.Counter[str]:
        return collections.Counter(
            one.uuid for one in server.broker.pending("counted", 10 * CHORDS)
        )

    wait_until(lambda: len(fired()) >= count, timeout=4 * HANG, what="every chord has fired")
    go.ask("quit")  # when it has ended what it was at
    wait_until(lambda: not server.backend.ready_groups(count), what="there is nothing left to fire")
    assert fired() == collections.Counter(dict.fromkeys(wanted, 1))
    for one in server.broker.get_pending_tasks("counted"):
        values = [arg.value for arg in one.args]
        assert (values if fleet.keeps_order else sorted(values)) == wanted[one.uuid]


@pytest.mark.parametrize("sender", ["go", "python"])
def test_chord_whose_member_failed_in_go_is_ended_by_python(both: Both, sender: str) -> None:
    server, go, _ = both
    parts = [call("fail", ("string", "no"), routing_key="of_go"), *members(random.Random(1), 3)]
    parts.append(call("add", ("int64", 1), ("int64", 1), routing_key="of_python"))
    last = call("total", routing_key="of_python")
    if sender == "go":
        sent = go.ask(
            "chord",
            messages=[message(part) for part in parts],
            callback=message(last),
            concurrency=2,
        )
        result = server.result(sent["callback"])
    else:
        result = server.send_chord(Group(parts) | last)

    wait_until(lambda: _state(server, result.uuid) is State.FAILURE, what="the chord has failed")
    with pytest.raises(TaskFailed, match="no"):
        result.get(timeout=HANG)


def _state(server: Server, uuid: str) -> State | None:
    found = server.backend.get_states([uuid]).get(uuid)
    return found.state if found else None


def test_a_group_is_read_by_both(both: Both) -> None:
    server, go, fleet = both
    fleet.needs_types()
    parts = members(random.Random(5), 10)
    of_python = server.send_group(Group(parts))
    of_go = go.ask("group", messages=[message(part) for part in parts], concurrency=2)

    assert of_python.get(timeout=HANG) == list(range(10))
    assert [go.result(one.uuid) for one in of_python.results] == [[number] for number in range(10)]
    assert [server.result(uuid).get(timeout=HANG) for uuid in of_go["members"]] == list(range(10))
    states = go.ask("group_states", group=of_go["group"], count=10)
    assert [state["State"] for state in states] == ["SUCCESS"] * 10
