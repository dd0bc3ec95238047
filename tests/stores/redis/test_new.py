"""A plain submission: the short script writes what the one for all cases would."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from machinery_py.backends.redis.backend import RedisBackend
from machinery_py.brokers.base import Message
from machinery_py.brokers.queue_limits import QueueLimit
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.pool import PoolLimits
from machinery_py.connections.redis.scripts import Script
from machinery_py.errors import PublishRefused
from machinery_py.stores import redis as stores
from machinery_py.stores.base import Submission
from machinery_py.stores.redis import RedisStore
from machinery_py.tasks.signature import Signature, new_uuid
from machinery_py.tasks.states import GroupMeta, State, TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.wire.signatures import encode_signature
from tests.models.beside import Beside
from tests.support.servers import RedisServer

UUIDS = [new_uuid("task_") for _ in range(3)]
GROUP = GroupMeta(group_uuid=new_uuid("group_"), task_uuids=UUIDS)
CLOCK = ManualClock()


def messages(queue: str = "mail", **more: Any) -> list[Message]:
    return [
        Message(
            uuid=uuid,
            name="add",
            queue=queue,
            body=encode_signature(Signature(name="add", uuid=uuid, routing_key=queue)),
            **more,
        )
        for uuid in UUIDS
    ]


def submission(**more: Any) -> Submission:
    values: dict[str, Any] = {
        "token": "t",
        "messages": messages(),
        "states": [TaskState(task_uuid=uuid, task_name="add", queue="mail") for uuid in UUIDS],
    }
    return Submission(**{**values, **more})


class Noting(RedisDriver):
    """Notes which scripts it runs."""

    def run(self, script: Script, *values: object, **more: Any) -> Any:
        self.scripts = [*getattr(self, "scripts", ()), script]
        return super().run(script, *values, **more)


@pytest.fixture
def driver(empty_redis: RedisServer) -> Iterator[Noting]:
    driver = Noting(empty_redis.url, clock=CLOCK)
    yield driver
    driver.ask(b"CONFIG", b"SET", b"maxmemory", b"0", doing="ending")
    driver.close()


@pytest.fixture
def store(driver: Noting) -> RedisStore:
    return RedisStore(RedisBroker(driver), RedisBackend(driver, expire_in=3600))


@pytest.fixture
def beside(empty_redis: RedisServer, store: RedisStore) -> Iterator[Beside]:
    beside = Beside(empty_redis.url)
    yield beside
    beside.close()


PLAIN = {
    "tasks": submission(),
    "one task": submission(messages=messages()[:1]),
    "group": submission(groups=[GROUP]),
    "chain": submission(messages=messages()[:1], groups=[GROUP]),
}


@pytest.mark.parametrize("sent", PLAIN.values(), ids=list(PLAIN))
def test_plain_submission_is_written_as_submit_would(
    store: RedisStore,
    driver: Noting,
    beside: Beside,
    monkeypatch: pytest.MonkeyPatch,
    sent: Submission,
) -> None:
    beside.ask("SADD", "mpy:{mail}:w", "999999")  # a client to be woken
    empty = beside.snapshot()
    store.submit(sent)
    short = beside.dump()
    assert driver.scripts == [stores.NEW]

    beside.restore(empty)
    monkeypatch.setattr(stores, "is_plain", lambda _: False)
    store.submit(sent)

    assert driver.scripts == [stores.NEW, stores.SUBMIT]
    keys, expires = beside.dump()
    assert short[0] == keys
    assert set(short[1]) == set(expires)
    assert all(abs(short[1][key] - expires[key]) < 60_000 for key in expires)


NOT_PLAIN = {
    "delayed": submission(messages=messages(eta=CLOCK.now() + dt.timedelta(hours=1))),
    "priority": submission(messages=messages(priority=3)),
    "labelled": submission(messages=[msgspec.structs.replace(messages()[0], body=b"other bytes")]),
    "two queues": submission(messages=[*messages(), *messages("other")]),
    "limited": submission(limits=[QueueLimit(queue="mail", limit=9, adds=3)]),
    "replay": submission(replay=True),
    "without a token": submission(token=""),
    "a given UUID": submission(states=[TaskState(task_uuid="mine", task_name="add")]),
    "ended": submission(states=[TaskState(task_uuid=UUIDS[0], state=State.FAILURE)]),
    "without states": submission(states=[]),
    "states alone": submission(messages=[]),
}


@pytest.mark.parametrize("sent", NOT_PLAIN.values(), ids=list(NOT_PLAIN))
def test_any_other_submission_is_not(store: RedisStore, driver: Noting, sent: Submission) -> None:
    store.submit(sent)

    assert stores.NEW not in driver.scripts


THERE = {
    "token": ("SET", "mpy:p:t", "1"),
    "state": ("SET", UUIDS[1], "{}"),
    "companion": ("SET", f"mpy:m:{{{UUIDS[1]}}}", "0"),
    "group": ("SET", GROUP.group_uuid, "{}"),
    "arrivals": ("HSET", f"mpy:g:{{{GROUP.group_uuid}}}", "total", "3"),
}


@pytest.mark.parametrize("there", THERE.values(), ids=list(THERE))
def test_where_something_is_new_writes_nothing(
    store: RedisStore, driver: Noting, beside: Beside, there: tuple[str, ...]
) -> None:
    beside.ask(*there)
    before = beside.dump()[0]

    assert store.submit_new(submission(groups=[GROUP])) is None

    assert beside.dump()[0] == before


def test_the_repeat_of_a_plain_submission_does_nothing(store: RedisStore, beside: Beside) -> None:
    store.submit(submission())
    before = beside.dump()[0]

    store.submit(submission())

    assert beside.dump()[0] == before


@pytest.mark.parametrize(
    "command", [("HSET", "mail", "somebody", "else's"), ("CONFIG", "SET", "maxmemory", "1")]
)
def test_refusal_of_a_plain_submission_is_the_usual_one(
    store: RedisStore, beside: Beside, command: tuple[str, ...]
) -> None:
    beside.ask(*command)
    before = beside.dump()[0]

    with pytest.raises(PublishRefused, match="mail|maxmemory"):
        store.submit(submission())

    assert beside.dump()[0] == before


def test_the_delayed_key_of_this_program_is_no_queue(
    empty_redis: RedisServer, beside: Beside
) -> None:
    driver = RedisDriver(empty_redis.url, clock=CLOCK, limits=PoolLimits(delayed_key="later"))
    store = RedisStore(RedisBroker(driver), RedisBackend(driver, expire_in=3600))

    with pytest.raises(PublishRefused, match="later"):
        store.submit(submission(messages=messages("later")))

    assert beside.dump()[0] == {}
    driver.close()
