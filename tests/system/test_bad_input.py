"""Invalid messages put straight on the queue of a working worker.

Each gets a clear end, and nothing else suffers.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest

from machinery_py import ArgumentError, Config, Server, State
from machinery_py.brokers.base import Message
from machinery_py.testing.waiting import wait_until
from machinery_py.wire.signatures import decode_signature

GOLDEN = pathlib.Path(__file__).parents[1] / "wire" / "golden"
HANG = 60.0  # seconds; a guard, nothing is measured with it
MEBIBYTE = 2**20


def golden(name: str) -> Iterator[dict[str, object]]:
    with (GOLDEN / name).open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


@pytest.fixture(params=["memory://", "sqlite:///bad.db"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(Config(broker=request.param, max_message_size=8 * MEBIBYTE))
    server.register_task("one", len)
    server.register_task("add", add)
    yield server
    server.close()


def add(a: int, b: int) -> int:
    return a + b


def put(server: Server, *bodies: bytes) -> None:
    server.broker.put(
        [Message(uuid="", name="", queue="machinery_tasks", body=body) for body in bodies], token=""
    )


def quiet(server: Server) -> bool:
    return not any(one.waiting or one.running for one in server.broker.stats())


def call(**fields: object) -> bytes:
    return json.dumps({"UUID": "task_bad", "Name": "add", **fields}).encode()


UNDECODABLE = {
    "nothing": b"",
    "no text": b"\x00\xff\xfe",
    "no object": b"[1, 2]",
    "cut off": b'{"UUID": "u", "Name": "add", "Args": [',
    "wrong type of a field": b'{"UUID": 5, "Name": "add"}',
    "nan": b'{"UUID": "u", "Name": "add", "Args": [{"Type": "float64", "Value": NaN}]}',
    "nested 100,000 deep": b'{"UUID": "u", "Name": "add", "OnSuccess": '
    + b"[" * 100_000
    + b"]" * 100_000
    + b"}",
    "objects 100,000 deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "no name": b'{"UUID": "u"}',
    "a callback that is none": b'{"UUID": "u", "Name": "add", "OnSuccess": [{"Name": 7}]}',
}


@pytest.mark.parametrize("kind", UNDECODABLE)
def test_bytes_without_a_signature_become_a_dead_letter(server: Server, kind: str) -> None:
    with server.new_worker(concurrency=2) as worker:
        put(server, UNDECODABLE[kind])
        wait_until(lambda: server.inspect.dead() != [], timeout=HANG, what="a dead letter")
        good = server.get_registered_task("add").send(2, 3)

        assert good.get(timeout=HANG) == 5
        assert worker.ready
    [letter] = server.inspect.dead()
    assert letter.reason == "undecodable"
    assert letter.error
    assert letter.body == UNDECODABLE[kind]


def test_a_message_over_the_limit_becomes_a_dead_letter_unread(server: Server) -> None:
    with server.new_worker(concurrency=2):
        put(server, call(Args=[{"Type": "string", "Value": "x" * (10 * MEBIBYTE)}]))
        wait_until(lambda: server.inspect.dead() != [], timeout=HANG, what="a dead letter")

    [letter] = server.inspect.dead()
    assert letter.reason == "too-large"
    assert "max_message_size" in letter.error


def test_message_over_the_limit_is_refused_at_send(server: Server) -> None:
    with pytest.raises(ArgumentError, match="max_message_size"):
        server.register_task("text", str.upper).send("x" * (10 * MEBIBYTE))


WRONG_ARGUMENTS = {
    "a type that nobody knows": (
        [{"Type": "complex128", "Value": 1}, {"Type": "int64", "Value": 1}],
        "complex128",
    ),
    "a text for a number": (
        [{"Type": "int64", "Value": "1"}, {"Type": "int64", "Value": 1}],
        "1 is not int64",
    ),
    "a number out of range": (
        [{"Type": "int64", "Value": 2**63}, {"Type": "int64", "Value": 1}],
        "out of range",
    ),
    "too few": ([{"Type": "int64", "Value": 1}], "missing argument 'b'"),
    "too many": ([{"Type": "int64", "Value": 1}] * 3, "too many"),
}


@pytest.mark.parametrize("kind", WRONG_ARGUMENTS)
def test_wrong_arguments_fail_the_task_at_once(server: Server, kind: str) -> None:
    args, text = WRONG_ARGUMENTS[kind]
    with server.new_worker(concurrency=2):
        put(server, call(Args=args, RetryCount=5))
        wait_until(
            lambda: quiet(server) and bool(server.inspect.tasks()),
            timeout=HANG,
            what="the task has ended",
        )

    state = server.result("task_bad").get_state()
    assert state.state is State.FAILURE
    assert text in state.error


def test_message_that_kills_a_go_worker_is_harmless_here(server: Server) -> None:
    bodies = [
        str(line["payload"]).encode()
        for line in golden("poison.jsonl")
        if line["kind"] == "message"
    ]
    bodies += [
        json.dumps(
            {
                "UUID": f"task_poison_{number}",
                "Name": "one",
                "Args": [{"Type": line["type"], "Value": json.loads(str(line["value"]))}],
            }
        ).encode()
        for number, line in enumerate(golden("poison.jsonl"))
        if line["kind"] == "argument"
    ]
    bodies += [
        str(line["payload"]).encode()
        for line in golden("decode.jsonl")
        if not line["ok"] and "payload" in line
    ]
    assert len(bodies) > 100

    with server.new_worker(concurrency=2) as worker:
        put(server, *bodies)
        good = [server.get_registered_task("add").send(number, 1) for number in range(50)]

        assert [result.get(timeout=HANG) for result in good] == [number + 1 for number in range(50)]
        wait_until(lambda: quiet(server), timeout=HANG, what="every message has come to an end")
        assert worker.ready
    # Each is a dead letter, has a final state, or waits for a worker that knows its task.
    kept = {letter.body for letter in server.inspect.dead(limit=1000)}
    kept |= {message.body for message in server.broker.delayed(1000)}
    ended = {state.task_uuid for state in server.inspect.tasks(limit=1000) if state.is_finished}
    lost = [
        body for body in bodies if body not in kept and decode_signature(body).uuid not in ended
    ]
    assert lost == []
