"""What is left in a database when all is done and has expired: nothing that grows with use."""

from __future__ import annotations

import contextlib
import datetime as dt
from typing import Any

import pymongo

from machinery_py import Server
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import HANG, wait_until
from tests.stores.redis.test_leftovers import work

MONTH = dt.timedelta(days=30)
#: A document of each queue, until it is forgotten; a number.
LASTING = {"machinery_queues", "machinery_fences"}


def contents(url: str) -> dict[str, list[str]]:
    """Return the names of what lies in each collection."""
    with contextlib.closing(pymongo.MongoClient[Any](url)) as client:
        database = client.get_default_database()
        names = database.list_collection_names()
        found = {name: [str(one["_id"]) for one in database[name].find()] for name in names}
    return {name: ids for name, ids in found.items() if ids}


def test_name_that_an_older_program_released_is_kept_for_a_day(mongodb_url: str) -> None:
    clock = ManualClock()
    with (
        contextlib.closing(Server(mongodb_url, clock=clock)) as server,
        contextlib.closing(pymongo.MongoClient[Any](mongodb_url)) as client,
    ):
        locks = client.get_default_database()["machinery_locks"]
        locks.insert_one({"_id": "old", "token": "", "expires_at": 0, "fence": 7})

        with server.lock("other"):
            pass
        clock.advance(hours=23)
        with server.lock("other"):
            pass
        assert locks.count_documents({"_id": "old"}) == 1

        clock.advance(hours=2)
        with server.lock("other"):
            pass
        assert locks.count_documents({"_id": "old"}) == 0


def test_nothing_stays_that_grows_with_use(mongodb_url: str) -> None:
    server = Server(mongodb_url)
    for name in ("a", "b"):
        work(server, name)
    server.close()
    before = contents(mongodb_url)
    assert len(before["tasks"]) > 20
    assert before["machinery_locks"] == ["a", "b"]

    clock = ManualClock(dt.datetime.now(dt.timezone.utc) + MONTH)
    later = Server(mongodb_url, clock=clock)

    def is_clean() -> bool:
        # What is over of locks and limits is looked for now and then by those who ask for others.
        with later.lock("other"):
            pass
        for _ in range(50):
            clock.advance(1)
            with later.limiter("other", "100000/s"):
                pass
        clock.advance(minutes=2)
        later.app.store.tend()
        left = contents(mongodb_url)
        if left.pop("machinery_locks", []) != ["other"]:
            return False
        limits = left.pop("machinery_limits", [])
        return all("other" in one for one in limits) and left.keys() <= LASTING

    with contextlib.closing(later):
        wait_until(is_clean, HANG, "nothing is left")
