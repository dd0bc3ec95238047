"""What a MongoDB is asked when it is first connected to: would it lose what it is given?

Most of it is about servers that cannot be started here: their words are put into replies, or
checked alone.
"""

from __future__ import annotations

import logging
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import bson
import pytest

from machinery_py import Config, Server, Signature
from machinery_py.connections.mongodb.client import MongoDriver
from machinery_py.connections.mongodb.durability import Told, concerns, version_of
from machinery_py.errors import StoreUnusable
from tests.support import private_mongo
from tests.support.proxy import Proxy

ALONE = {"ismaster": True, "maxWireVersion": 21}
PRIMARY = {**ALONE, "setName": "rs0", "hosts": ["a:1", "b:1", "c:1"], "primary": "a:1"}
KEEPS = {"storageEngine": {"name": "wiredTiger", "persistent": True}}
MAJORITY = {"w": "majority", "wtimeout": 5000}


def found(**said: Any) -> list[tuple[str, bool]]:
    good = {
        "hello": PRIMARY,
        "build": {"version": "7.0.2"},
        "status": KEEPS,
        "options": None,
        "concern": MAJORITY,
    }
    return [(one.text, one.is_certain) for one in concerns(Told(**{**good, **said}))]


def test_a_server_that_keeps_everything_is_not_talked_about() -> None:
    assert found() == []
    assert found(hello=ALONE) == []
    assert found(concern={**MAJORITY, "j": True}) == []
    assert found(concern={"w": 2}) == []  # of three


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            {"hello": {**PRIMARY, "ismaster": False}},
            "it is a secondary of the replica set rs0, whose primary is a:1: no task can be",
        ),
        (
            {"hello": {"ismaster": False, "setName": "rs0"}},
            "it is a secondary of the replica set rs0: no task can be stored",
        ),
        ({"concern": {"w": 1}}, "w=1 in its URL waits for no majority"),
        ({"concern": {}}, "w=1 in its URL waits for no majority"),
        (
            {"concern": {"w": 2}, "hello": {**PRIMARY, "hosts": list("abcde")}},
            "w=2 in its URL waits for no majority",
        ),
        (
            {"concern": {"w": 1}, "hello": {"ismaster": True, "msg": "isdbgrid"}, "status": None},
            "w=1 in its URL",
        ),
        (
            {"concern": {**MAJORITY, "j": False}},
            "journal=false in its URL confirms what is in no journal yet",
        ),
        (
            {"status": {"storageEngine": {"name": "inMemory", "persistent": False}}},
            "its storage engine is inMemory: a restart loses",
        ),
        (
            {
                "build": {"version": "4.4.29"},
                "hello": ALONE,
                "options": {"parsed": {"storage": {"journal": {"enabled": False}}}},
            },
            "it has no journal: a crash loses what came in the last minute",
        ),
    ],
)
def test_setting_that_can_lose_tasks_is_named(said: Mapping[str, Any], text: str) -> None:
    [(told, is_certain)] = found(**said)
    assert text in told
    assert is_certain


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            {"status": None},
            "it does not tell whether it keeps what it stores "
            "(give this user the role clusterMonitor)",
        ),
        ({"status": {}}, "it does not tell whether it keeps what it stores"),
        ({"build": {"version": "4.4.29"}}, "it does not tell whether it has a journal"),
        ({"build": {}}, "it does not tell whether it has a journal"),
    ],
)
def test_missing_setting_is_reported_as_uncertain(said: Mapping[str, Any], text: str) -> None:
    [(told, is_certain)] = found(**said)
    assert text in told
    assert not is_certain


def test_only_old_servers_are_asked_for_their_journal() -> None:
    for parsed in ({}, {"storage": {}}, {"storage": {"journal": {"enabled": True}}}):
        assert found(build={"version": "4.4.29"}, options={"parsed": parsed}) == []
    assert found(hello={"ismaster": True, "msg": "isdbgrid"}, status=None) == []


def test_versions_are_read() -> None:
    assert [version_of({"version": text}) for text in ("4.4.29", "8.0", "7.1.0-rc2")] == [
        (4, 4),
        (8, 0),
        (7, 1),
    ]
    assert version_of({"version": "x"}) is version_of({"version": "a.b"}) is None
    assert version_of({}) is None


# Through the wire


def saying(**fields: Any) -> Callable[[bytes], bytes]:
    """A reply with these fields, for `Proxy.answer_next`."""

    def answer(request: bytes) -> bytes:
        (number,) = struct.unpack_from("<i", request, 4)
        body = b"\0\0\0\0\0" + bson.encode({**fields, "ok": 1.0})
        return struct.pack("<iiii", 16 + len(body), 1, number, private_mongo.OP_MSG) + body

    return answer


@pytest.fixture
def proxy(mongodb_url: str) -> Iterator[Proxy]:
    host = mongodb_url.partition("://")[2].partition("/")[0]
    if not host.startswith("127.0.0.1:"):
        pytest.skip(f"the MongoDB that was given is at {host}: no proxy can stand in front of it")
    with Proxy(int(host.rpartition(":")[2])) as proxy:
        yield proxy


def say(proxy: Proxy, command: str, *, times: int = 1, **fields: Any) -> None:
    proxy.answer_next(saying(**fields), matching=command.encode() + b"\0", times=times)


def test_a_server_that_forgets_is_warned_of_or_refused(
    proxy: Proxy, mongodb_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = proxy.through(mongodb_url)
    say(proxy, "serverStatus", storageEngine={"name": "inMemory", "persistent": False})
    server = Server(url)
    server.send_task(Signature(name="nobody_runs_this"))
    server.send_task(Signature(name="nobody_runs_this"))

    [warning] = [
        one.message
        for one in caplog.records
        if one.levelno >= logging.WARNING and "storage engine" in one.message
    ]
    assert f"127.0.0.1:{proxy.url_port}" in warning
    assert "its storage engine is inMemory: a restart loses everything" in warning

    say(proxy, "serverStatus", storageEngine={"name": "inMemory", "persistent": False})
    assert [one.text for one in server.broker.concerns()] == [warning.partition(": ")[2]]
    say(proxy, "serverStatus", storageEngine={"name": "inMemory", "persistent": False})
    assert len(server.backend.concerns()) == 1
    server.close()

    strict = Server(Config(broker=url, strict_durability=True))
    for _ in range(2):
        # Broker and backend ask.
        say(proxy, "serverStatus", times=2, storageEngine={"name": "inMemory", "persistent": False})
        with pytest.raises(
            StoreUnusable, match="refused by strict_durability: its storage engine is inMemory"
        ):
            strict.send_task(Signature(name="nobody_runs_this"))
    strict.close()


def test_user_without_server_status_works_with_a_note(
    proxy: Proxy, mongodb_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "machinery_py.connections.mongodb.client")
    proxy.answer_next(private_mongo.refusal(13, "not authorized"), matching=b"serverStatus\0")
    driver = MongoDriver(proxy.through(mongodb_url))
    driver.run(lambda store: store.tasks.find_one(), doing="trying")

    [record] = [one for one in caplog.records if one.name.endswith("connections.mongodb.client")]
    assert record.levelno == logging.INFO
    assert "does not tell whether it keeps what it stores" in record.message
    driver.close()


def test_a_server_that_is_too_old_is_refused(proxy: Proxy, mongodb_url: str) -> None:
    say(proxy, "buildInfo", version="3.6.23")
    driver = MongoDriver(proxy.through(mongodb_url))
    with pytest.raises(StoreUnusable, match=r"is version 3\.6\.23 \(needed: 4\.0 or newer\)"):
        driver.run(lambda store: store.tasks.find_one(), doing="trying")
    driver.close()


def test_a_lost_connection_is_no_answer(proxy: Proxy, mongodb_url: str) -> None:
    """It is asked again: that nobody answered is not that nobody may ask."""
    proxy.drop_next_reply(matching=b"serverStatus\0")
    driver = MongoDriver(proxy.through(mongodb_url))
    assert driver.run(lambda store: store.tasks.find_one(), doing="trying") is None
    assert proxy.counts["dropped"] == 1
    driver.close()


def test_doctor_warns_of_settings_that_lose_tasks(
    proxy: Proxy, mongodb_url: str, tmp_path: Path
) -> None:
    (tmp_path / "letters.py").write_text(
        "import os\nfrom machinery_py import Server\nserver = Server(os.environ['WHERE'])\n"
    )
    engine = {"name": "inMemory", "persistent": False}
    proxy.answer_next(saying(storageEngine=engine), matching=b"serverStatus\0", times=9)

    done = subprocess.run(
        [sys.executable, "-m", "machinery_py", "doctor", "letters"],
        cwd=tmp_path,
        text=True,
        check=False,
        capture_output=True,
        env={**os.environ, "WHERE": proxy.through(mongodb_url)},
        timeout=60.0,
    )

    assert done.returncode == 1, done.stdout
    assert (
        "WRONG  broker    its storage engine is inMemory: a restart loses everything" in done.stdout
    )
