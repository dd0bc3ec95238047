"""The news of a task's end on Redis: what comes along with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from redis import Redis

from machinery_py import Server
from machinery_py.backends.redis.listener import RedisListener
from machinery_py.backends.redis.scripts import NEWS
from machinery_py.connections.redis.keys import companion_key
from machinery_py.testing.waiting import HANG
from tests.support.servers import RedisServer

gate = threading.Event()


def echo(text: str) -> str:
    assert gate.wait(HANG)
    return text


def fail(text: str) -> None:
    assert gate.wait(HANG)
    raise ValueError(text)


@pytest.fixture
def server(empty_redis: RedisServer) -> Iterator[Server]:
    gate.clear()
    server = Server(empty_redis.url)
    server.register_tasks({"echo": echo, "fail": fail})
    with server.new_worker(concurrency=2):
        yield server
    server.close()


def listening(server: Server, *uuids: str) -> RedisListener:
    listener = server.backend.listener()
    assert isinstance(listener, RedisListener)
    listener.watch(uuids)
    return listener


@pytest.mark.parametrize("name", ["echo", "fail"])
def test_end_of_a_plain_task_is_told_with_its_state(server: Server, name: str) -> None:
    uuid = server.get_registered_task(name).send('"\n \u2028').uuid
    listener = listening(server, uuid)

    gate.set()
    listener.wait(HANG)

    [told] = listener.told()
    assert told == server.backend.get_state(uuid)
    assert (told.is_finished, told.worker != "", listener.told()) == (True, True, [])
    listener.close()


def test_end_with_a_long_result_is_told_without_its_state(server: Server) -> None:
    result = server.get_registered_task("echo").send("x" * NEWS)
    listener = listening(server, result.uuid)

    gate.set()
    listener.wait(HANG)

    assert listener.told() == []
    assert result.get(timeout=HANG) == "x" * NEWS
    listener.close()


OTHER = (
    b'{"TaskUUID":"task_2","TaskName":"","State":"SUCCESS","Results":[],"Error":"",'
    b'"CreatedAt":"2026-01-01T00:00:00Z","TTL":0}'
)


@pytest.mark.parametrize(
    "news",
    [
        b"x",
        b"{}",
        b"{}\n",
        OTHER,
        OTHER + b"\n1\n",
        OTHER + b"\n0\n0\n\n\n\n\n\n",
        b"\xff\n\xff",
        b"[" * 3000,
    ],
)
def test_news_of_others_is_not_believed(
    server: Server, empty_redis: RedisServer, news: bytes
) -> None:
    result = server.get_registered_task("echo").send("x")
    listener = listening(server, result.uuid)

    with Redis(port=empty_redis.port) as somebody:
        somebody.publish(companion_key(result.uuid), news)
    listener.wait(HANG)

    assert listener.told() == []
    gate.set()
    assert result.get(timeout=HANG) == "x"
    listener.close()


def test_mistake_in_reading_the_news_is_logged_and_the_result_found(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    result = server.get_registered_task("echo").send("x")
    listener = listening(server, result.uuid)
    link = listener._link
    assert link is not None
    with monkeypatch.context() as patch:
        patch.setattr(link, "has_news", lambda _: [].pop())

        gate.set()
        listener.wait(HANG)

    assert "IndexError: pop from empty list" in caplog.text
    assert result.get(timeout=HANG) == "x"
    listener.close()
