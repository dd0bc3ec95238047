"""Plain ends of tasks: the short way of settle.lua writes what the rest of the script would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from machinery_py.backends.redis.backend import RedisBackend
from machinery_py.backends.redis.scripts import CHORD_LIFE
from machinery_py.brokers.base import Delivery, Message
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.scripts import Script
from machinery_py.receipts import NO_RECEIPT
from machinery_py.stores import redis as stores
from machinery_py.stores.base import Session, Settlement, Submission
from machinery_py.stores.redis import RedisStore
from machinery_py.tasks.signature import Signature, new_uuid
from machinery_py.tasks.states import Arrival, State, TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.wire.signatures import encode_signature
from tests.models.beside import Beside
from tests.support.servers import RedisServer

UUIDS = [new_uuid("task_") for _ in range(3)]
ONE, OTHER = new_uuid("group_"), new_uuid("group_")


def without(script: Script, condition: str, instead: str) -> Script:
    assert condition in script.text
    return script.with_text(script.text.replace(condition, instead))


FULL = without(stores.SETTLE, "#places < 1000", "false")
SHORT = without(stores.SETTLE, "ends = rest", "error('a settlement is not plain')")


def arrival(uuid: str, group: str = ONE, **more: Any) -> Arrival:
    values: dict[str, Any] = {"total": 3, "ok": True, "callback": b'{"Name":"sum"}', **more}
    return Arrival(group_uuid=group, task_uuid=uuid, **values)


def ends(**more: Any) -> list[Settlement]:
    """All members of a chord succeed."""
    return [end(uuid, **more) for uuid in UUIDS]


def end(uuid: str, *arrivals: Arrival, **more: Any) -> Settlement:
    values: dict[str, Any] = {"state": State.SUCCESS, "task_name": "add", "worker": "w"} | more
    state = TaskState(task_uuid=uuid, queue="mail", started_at=ManualClock().now(), **values)
    return Settlement(
        delivery=Delivery(receipt=NO_RECEIPT, body=b"", queue="mail"),
        uuid=uuid,
        states=[state],
        arrivals=arrivals or [arrival(uuid)],
    )


def fail_or_not(uuid: str) -> Settlement:
    if uuid != UUIDS[1]:
        return end(uuid)
    return end(uuid, arrival(uuid, ok=False), state=State.FAILURE, error="no")


class Case(msgspec.Struct):
    ends: list[Settlement]
    is_plain: bool = True
    before: tuple[tuple[str, ...], ...] = ()  # commands
    lost: str = ""  # whose delivery is not held any more
    expire_in: int = 3600


CASES = {
    "all": Case(ends()),
    "some": Case(ends()[:2]),
    "kept for long": Case(ends(), expire_in=2 * CHORD_LIFE),
    "two chords": Case([end(UUIDS[0]), end(UUIDS[1], arrival(UUIDS[1], OTHER, total=1))]),
    "arrived before": Case(ends()[:1], before=(("SADD", f"mpy:h:{{{ONE}}}", UUIDS[0]),)),
    "one failed": Case([*map(fail_or_not, UUIDS)], is_plain=False),
    "a lost one failed": Case(
        [end(UUIDS[0], arrival(UUIDS[0], ok=False), state=State.FAILURE), *ends()[1:]],
        is_plain=False,
        lost=UUIDS[0],
    ),
    "failed before": Case(ends(), before=(("HSET", f"mpy:g:{{{ONE}}}", "failed", "x"),)),
    "settled": Case(ends(), is_plain=False, before=(("HSET", f"mpy:g:{{{ONE}}}", "fired", "1"),)),
    "kept for itself": Case(ends(keep_for=60.0), is_plain=False),
    "two groups": Case(
        [end(UUIDS[0], arrival(UUIDS[0]), arrival(UUIDS[0], OTHER))], is_plain=False
    ),
    "no callback": Case([end(UUIDS[0], arrival(UUIDS[0], callback=b""))], is_plain=False),
    "two callbacks": Case(
        [end(UUIDS[0]), end(UUIDS[1], arrival(UUIDS[1], callback=b"{}"))], is_plain=False
    ),
    "alien partial": Case(ends()[:1], is_plain=False, before=(("SET", "mpy:partial", "x"),)),
}


@pytest.fixture
def beside(empty_redis: RedisServer) -> Iterator[Beside]:
    beside = Beside(empty_redis.url)
    yield beside
    beside.close()


OpenStore = Callable[[int], RedisStore]


@pytest.fixture
def open_store(empty_redis: RedisServer) -> Iterator[OpenStore]:
    driver = RedisDriver(empty_redis.url, clock=ManualClock())
    yield lambda expire_in: RedisStore(
        RedisBroker(driver), RedisBackend(driver, expire_in=expire_in)
    )
    driver.close()


def received(store: RedisStore) -> tuple[Session, dict[str, Delivery]]:
    """Send a task for each UUID; return a session that holds them."""
    calls = [Signature(name="add", uuid=uuid, routing_key="mail") for uuid in UUIDS]
    messages = [
        Message(uuid=one.uuid, name="add", queue="mail", body=encode_signature(one))
        for one in calls
    ]
    states = [TaskState(task_uuid=uuid, task_name="add", queue="mail") for uuid in UUIDS]
    store.submit(Submission(token="t", messages=messages, states=states))
    session = store.open_session(["mail"], worker="w")
    deliveries = session.receive(len(UUIDS), 5.0)
    return session, dict(zip(UUIDS, deliveries, strict=True))


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_members_end_in_short_as_in_the_rest_of_the_script(
    open_store: OpenStore, beside: Beside, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    session, deliveries = received(open_store(case.expire_in))
    for command in case.before:
        beside.ask(*command)
    if case.lost:
        gone = deliveries[case.lost]
        deliveries[case.lost] = msgspec.structs.replace(gone, receipt=NO_RECEIPT)
    settlements = [msgspec.structs.replace(one, delivery=deliveries[one.uuid]) for one in case.ends]
    before = beside.snapshot()

    def left_by(script: Script) -> Any:
        beside.restore(before)
        monkeypatch.setattr(stores, "SETTLE", script)
        try:
            verdicts: Any = session.settle(settlements)
        except Exception as error:  # of the store, which both must raise
            verdicts = type(error)
        return verdicts, *beside.dump()

    short = left_by(SHORT if case.is_plain else stores.SETTLE)
    full = left_by(FULL)

    assert short[:2] == full[:2]
    assert set(short[2]) == set(full[2])
    assert all(abs(short[2][key] - full[2][key]) < 60 for key in full[2])
