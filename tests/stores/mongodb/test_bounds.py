"""A submission larger than a document of MongoDB, whose sender dies at each of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from machinery_py.backends.mongodb.backend import MongoBackend
from machinery_py.bounds import TOKEN_LIFE
from machinery_py.brokers.base import Message
from machinery_py.brokers.mongodb.broker import MongoBroker
from machinery_py.connections.mongodb.client import MongoDriver
from machinery_py.errors import MachineryError, PublishUnknown
from machinery_py.stores.base import Submission
from machinery_py.stores.mongodb import MongoStore
from machinery_py.tasks.states import State, TaskState
from machinery_py.testing.clocks import ManualClock
from tests.stores.mongodb.case import Drivers, clock, open_driver

__all__ = ["clock", "open_driver"]

COUNT = 20
UUIDS = [f"task_{number}" for number in range(COUNT)]
LARGE = Submission(
    token="t",
    messages=[Message(uuid=uuid, name="add", queue="q", body=b"x" * 900_000) for uuid in UUIDS],
    states=[TaskState(task_uuid=uuid, task_name="add") for uuid in UUIDS],
)


class Dying(MongoBroker):
    """Dies when it has written the token, and before it stores the messages."""

    def store(
        self, batches: Sequence[tuple[str, Sequence[Message]]], *, again: bool = True
    ) -> None:
        raise MachineryError("killed")


def parts_in(driver: MongoDriver) -> int:
    return driver.run(
        lambda store: store.machinery_parts.count_documents({}),
        doing="testing",
        away=PublishUnknown,
    )


def store_of(driver: MongoDriver, kind: type[MongoBroker] = MongoBroker) -> MongoStore:
    return MongoStore(kind(driver), MongoBackend(driver))


def test_parts_are_gone_when_all_is_stored(open_driver: Drivers) -> None:
    driver = open_driver()
    store = store_of(driver)
    store.submit(LARGE)
    store.submit(LARGE)

    assert [one.uuid for one in store.broker.pending("q", 99)] == UUIDS
    assert parts_in(driver) == 0


def test_large_submission_of_a_dead_sender_is_carried_out(
    open_driver: Drivers, clock: ManualClock
) -> None:
    driver = open_driver()
    with pytest.raises(PublishUnknown, match="killed"):
        store_of(driver, Dying).submit(LARGE)
    assert parts_in(driver) > 1
    store = store_of(driver)
    clock.advance(2 * driver.intent_age)

    store.tend()

    assert [one.uuid for one in store.broker.pending("q", 99)] == UUIDS
    states = store.backend.get_states(UUIDS).values()
    assert [one.state for one in states] == [State.PENDING] * COUNT
    assert parts_in(driver) == 0


def test_parts_without_a_token_are_swept(open_driver: Drivers, clock: ManualClock) -> None:
    driver = open_driver()
    parts = [
        {"_id": f"t/{place:012}", "at": driver.now(), "part": b"the sender died behind it"}
        for place in range(2)
    ]
    driver.run(
        lambda store: store.machinery_parts.insert_many(parts),
        doing="testing",
        away=PublishUnknown,
    )
    store = store_of(driver)
    store.tend()
    assert parts_in(driver) > 1

    clock.advance(TOKEN_LIFE + 100.0)
    store.tend()

    assert parts_in(driver) == 0
    assert store.broker.pending("q", 99) == []
