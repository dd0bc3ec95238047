"""Redis as Go Machinery sees it: keys, commands, scores and bytes, against Go's recordings."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from machinery_py import Config, Group, Server, Signature, State
from machinery_py.backends.base import Change
from machinery_py.backends.redis.backend import RedisBackend
from machinery_py.backends.redis.scripts import CHORD_LIFE
from machinery_py.brokers.base import Message
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import TaskState
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.wire.signatures import decode_signature
from machinery_py.wire.states import decode_group, decode_state, encode_state
from machinery_py.worker.loops import maintenance

GOLDEN = Path(__file__).parents[2] / "wire" / "golden"


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GOLDEN / name).read_text("utf-8").splitlines()]


PUBLISHED = [line for line in lines("signatures.jsonl") if "redis" in line]
STATES = [
    line
    for line in lines("task_states.jsonl")
    if line["kind"] == "task_state"
    and line["key"]
    and decode_state(line["wire"].encode()).task_uuid == line["key"]
]
GROUPS = [line for line in lines("task_states.jsonl") if line["kind"] == "group_meta"]


@pytest.fixture
def driver(redis_url: str) -> Iterator[RedisDriver]:
    driver = RedisDriver(redis_url)
    yield driver
    driver.close()


def ask(driver: RedisDriver, *words: str | bytes) -> Any:
    return driver.ask(
        *(word if isinstance(word, bytes) else word.encode() for word in words), doing="testing"
    )


@pytest.mark.parametrize("line", PUBLISHED, ids=[line["name"] for line in PUBLISHED])
def test_message_goes_to_the_queue_that_go_uses(driver: RedisDriver, line: dict[str, Any]) -> None:
    body = line["wire"].encode()
    signature = decode_signature(body)
    told = line["redis"]
    now = dt.datetime(2000, 1, 1, tzinfo=dt.timezone.utc) if told["command"] == "ZADD" else None
    broker = RedisBroker(driver)
    if now is not None:
        driver.now = lambda: "946684800000000"  # type: ignore[method-assign]  # before all of the ETAs
    message = Message(
        uuid=signature.uuid,
        name=signature.name,
        queue=signature.routing_key,
        body=body,
        eta=signature.eta,
    )

    broker.put([message], token="")

    if told["command"] == "RPUSH":
        assert ask(driver, "LRANGE", told["key"], "0", "-1") == [body]
    else:
        ((member, score),) = zip(
            *[iter(ask(driver, "ZRANGE", told["key"], "0", "-1", "WITHSCORES"))] * 2, strict=True
        )
        assert member == body
        assert float(score) == pytest.approx(
            float(told["score"]), abs=1024
        )  # a double, and microseconds
    assert ask(driver, "EXISTS", "mpy:{" + signature.routing_key + "}:a") == 0


@pytest.mark.parametrize("line", STATES, ids=[line["name"] for line in STATES])
def test_a_state_is_written_as_go_writes_it(driver: RedisDriver, line: dict[str, Any]) -> None:
    state = decode_state(line["wire"].encode())
    RedisBackend(driver).apply([Change(key="x", states=(state,))])

    kept = ask(driver, "GET", line["key"])

    assert decode_state(kept) == state
    expected = 3600 if state.is_finished else CHORD_LIFE  # Go: 3600 for all
    assert expected - 5 <= ask(driver, "TTL", line["key"]) <= expected


@pytest.mark.parametrize("line", GROUPS, ids=[line["name"] for line in GROUPS])
def test_a_group_is_written_as_go_writes_it(driver: RedisDriver, line: dict[str, Any]) -> None:
    group = decode_group(line["wire"].encode())
    RedisBackend(driver).apply([Change(key="x", groups=(group,))])
    assert decode_group(ask(driver, "GET", line["key"])) == group


@pytest.mark.parametrize("line", STATES[:20], ids=[line["name"] for line in STATES[:20]])
def test_state_written_by_go_is_read_with_its_finality(
    driver: RedisDriver, line: dict[str, Any]
) -> None:
    state = decode_state(line["wire"].encode())
    ask(driver, "SET", line["key"], line["wire"])
    backend = RedisBackend(driver)
    assert backend.get_state(line["key"]) == state

    backend.apply([Change(key=line["key"], mark="m", states=(state_after(line["key"]),))])

    assert (backend.get_state(line["key"]).error == "late") is not state.is_finished


def state_after(uuid: str) -> Any:
    from machinery_py.tasks.states import TaskState

    return TaskState(task_uuid=uuid, state=State.FAILURE, error="late")


def test_message_pushed_by_go_runs(redis_url: str, driver: RedisDriver) -> None:
    server = Server(Config(broker=redis_url))
    calls: list[tuple[int, int]] = []

    @server.task
    def add(a: int, b: int) -> int:
        calls.append((a, b))
        return a + b

    body = next(line["wire"] for line in PUBLISHED if line["name"] == "send_add")
    uuid = decode_signature(body.encode()).uuid
    with server.new_worker(concurrency=2):
        for _ in range(2):
            ask(driver, "RPUSH", "machinery_tasks", body)  # the second time it is a duplicate
            wait_until(lambda: server.backend.get_states([uuid]))
            assert server.result(uuid).get(timeout=HANG) == 3
        assert json.loads(ask(driver, "GET", uuid))["State"] == "SUCCESS"
        later = body.replace(uuid, "task_later")
        ask(driver, "ZADD", "delayed_tasks", "1000000000", later)
        wait_until(lambda: server.backend.get_states(["task_later"]))
        assert server.result("task_later").get(timeout=HANG) == 3
        wait_until(lambda: not ask(driver, "EXISTS", "machinery_tasks", "delayed_tasks"))
    assert len(calls) in (2, 3)
    server.close()


def test_sent_message_has_gos_bytes_in_gos_keys(redis_url: str, driver: RedisDriver) -> None:
    server = Server(Config(broker=redis_url))
    result = server.send_task(Signature.of("add", 1, 2))
    (body,) = ask(driver, "LRANGE", "machinery_tasks", "0", "-1")
    assert list(json.loads(body))[:4] == ["UUID", "Name", "RoutingKey", "ETA"]
    assert json.loads(ask(driver, "GET", result.uuid))["State"] == "PENDING"
    server.close()


def test_a_worker_ends_a_chord_of_go_and_a_worker_that_is_gone(
    redis_url: str, driver: RedisDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "GROUPS_EVERY", 0.1)
    server = Server(Config(broker=redis_url))
    server.register_task("one", lambda: 1)
    server.register_task("total", lambda *parts: sum(parts))
    members = [Signature.of("one"), Signature.of("one").replace(routing_key="of_go")]
    result = server.send_chord(Group(members) | Signature.of("total"))
    ours, of_go = result.group.results
    with server.new_worker(concurrency=1):
        assert ours.get(timeout=HANG) == 1

    # A Go worker ends the other one, and dies before it looks at the group.
    ask(
        driver,
        "SET",
        of_go.uuid,
        encode_state(TaskState(task_uuid=of_go.uuid, state=State.SUCCESS, results=(Arg.of(2),))),
    )
    assert ask(driver, "ZRANGE", "mpy:partial", "0", "-1") == [result.group.uuid.encode()]
    ask(driver, "ZADD", "mpy:partial", "1", result.group.uuid)  # half a minute later

    with server.new_worker(concurrency=1):
        assert result.get(timeout=HANG) == 3
    assert ask(driver, "EXISTS", "mpy:partial") == 0
    server.close()


def test_early_task_without_results_leaves_no_key_of_it(
    driver: RedisDriver, redis_url: str
) -> None:
    server = Server(redis_url, result_backend="null")
    held: list[int] = []

    @server.task(ack="early")
    def ping(number: int) -> None:
        held.append(sum(one.waiting + one.running for one in server.broker.stats()))

    before = set(ask(driver, "KEYS", "*"))
    for number in range(3):
        ping.send(number)
    with server.new_worker(concurrency=1):
        wait_until(lambda: len(held) == 3)
    left = set(ask(driver, "KEYS", "*")) - before
    server.close()

    assert held[-1] == 0  # gone before the call
    assert [key for key in left if b"task_" in key or key == b"machinery_tasks"] == []
