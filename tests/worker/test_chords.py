"""Chords: what is ready is settled, whatever is in front of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from machinery_py import Server
from machinery_py.brokers.base import Message
from machinery_py.stores.base import Firing
from machinery_py.testing.waiting import wait_until
from machinery_py.worker.loops import chords


@pytest.fixture(params=["memory", "redis"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    is_redis = request.param == "redis"
    url = request.getfixturevalue("redis_url") if is_redis else "memory://chords"
    server = Server(broker=url)
    yield server
    server.close()


def test_groups_that_cannot_be_settled_block_none_behind_them(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chords, "BATCH", 5)
    server.register_task("one", lambda *_: 1)
    stuck = [f"group_{number}" for number in range(10)]
    groups = [*stuck, "group_last"]
    bodies = [json.dumps(member_of(group)).encode() for group in groups]
    messages = [Message(uuid="", name="", queue="machinery_tasks", body=body) for body in bodies]
    server.broker.put(messages, token="")
    store, fire = server.app.store, server.app.store.fire

    def fail_for_some(firing: Firing) -> bool:
        if firing.group_uuid in stuck:
            raise RuntimeError("it cannot be fired")
        return fire(firing)

    monkeypatch.setattr(store, "fire", fail_for_some)
    with server.new_worker(concurrency=4):
        wait_until(lambda: server.backend.get_states(["task_of_group_last"]), what="the last one")
        wait_until(
            lambda: sorted(one.group_uuid for one in store.ready_groups(99)) == sorted(stuck)
        )


def member_of(group: str) -> dict[str, object]:
    return {
        "UUID": f"member_{group}",
        "Name": "one",
        "GroupUUID": group,
        "GroupTaskCount": 1,
        "ChordCallback": {"UUID": f"task_of_{group}", "Name": "one"},
    }
