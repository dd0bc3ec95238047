"""Each store says in one plain line, to senders and workers, why its server cannot be used."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from machinery_py import Config, MachineryError, Server, StoreUnusable
from machinery_py.connections.plain_words import plain
from tests.support.servers import RedisServer

SCHEMES = ("redis", "rediss", "amqp", "amqps", "mongodb", "memcache")
REFUSED = "connection refused (is it running? check host and port)"
UNKNOWN = "the host's name is not known (check its spelling, and the name server)"
DRIVERS = re.compile(
    r"Errno|Error \d|Error -\d|Workflow|AMQPConn|StreamLost|\[SSL|configured|Topology|reading from"
)


@pytest.fixture
def listen() -> Iterator[Callable[[bool], int]]:
    """Opens a port where connections are closed at once, or held without a word."""
    listeners: list[socket.socket] = []
    held: list[socket.socket] = []

    def accept(listener: socket.socket, is_silent: bool) -> None:
        try:
            while True:
                connection, _ = listener.accept()
                if is_silent:
                    held.append(connection)
                else:
                    connection.close()
        except OSError:
            return  # the test is over

    def opened(is_silent: bool) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        threading.Thread(target=accept, args=(listener, is_silent), daemon=True).start()
        return int(listener.getsockname()[1])

    yield opened
    for one in [*listeners, *held]:
        one.shutdown(socket.SHUT_RDWR) if one in listeners else None
        one.close()


def failures(scheme: str, place: str) -> list[str]:
    """What a sender and a worker are told."""
    if scheme == "memcache":
        return told(broker="memory://", result_backend=f"memcache://{place}")
    return told(broker=f"{scheme}://user:secret@{place}")


def told(**urls: str) -> list[str]:
    server = Server(Config(publish_timeout=0.5, **urls))  # type: ignore[arg-type]

    @server.task
    def add(a: int, b: int) -> int:
        return a + b

    texts: list[str] = []
    for act in (lambda: add.send(1, 2), server.new_worker().start):
        with pytest.raises(MachineryError) as caught:
            act()
        texts.append(str(caught.value))
    server.close()
    return texts


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("place", "said"), [("127.0.0.1:1", REFUSED), ("no-such-host.invalid:1", UNKNOWN)]
)
def test_a_server_that_is_not_there_is_told_in_plain_words(
    scheme: str, place: str, said: str
) -> None:
    for text in failures(scheme, place):
        assert text.endswith(said), text
        assert place in text
        assert not DRIVERS.search(text), text
        assert "secret" not in text


SEVERAL = {
    "redis": {
        "broker": "redis://:secret@127.0.0.1:1;redis://:secret@127.0.0.1:2",
        "multiple_broker_separator": ";",
    },
    "amqp": {
        "broker": "amqp://u:secret@127.0.0.1:1;amqp://u:secret@127.0.0.1:2",
        "multiple_broker_separator": ";",
    },
    "sentinels": {"broker": "redis://:secret@127.0.0.1:1,127.0.0.1:2/0?master_name=m"},
}


@pytest.mark.parametrize("servers", SEVERAL)
def test_each_of_several_missing_servers_is_reported(servers: str) -> None:
    for text in told(**SEVERAL[servers]):
        assert text.count(REFUSED) == 2, text
        assert "127.0.0.1:1: connection refused" in text
        assert "127.0.0.1:2: connection refused" in text
        assert not DRIVERS.search(text), text
        assert "secret" not in text


def test_missing_cluster_nodes_are_reported_in_plain_words() -> None:
    for text in told(broker="redis://:secret@127.0.0.1:1,127.0.0.1:2/0"):
        assert "no node of the cluster 127.0.0.1:1,127.0.0.1:2 " in text
        assert text.endswith(REFUSED)
        assert not DRIVERS.search(text), text
        assert "secret" not in text


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("is_silent", [False, True], ids=["closing", "silent"])
def test_port_of_another_service_is_reported_in_plain_words(
    scheme: str, is_silent: bool, listen: Callable[[bool], int]
) -> None:
    for text in failures(scheme, f"127.0.0.1:{listen(is_silent)}"):
        assert re.search(r"\(.*(check|did it stop|is this RabbitMQ).*\)$", text), text
        assert not DRIVERS.search(text), text


def test_error_of_a_wrong_password_says_what_to_check() -> None:
    with RedisServer() as redis:
        server = Server(redis.url.replace("redis://", "redis://user:secret@"))
        with pytest.raises(
            StoreUnusable, match=r"invalid username-password pair.*\(check user, password"
        ) as caught:
            server.inspect.queues()
        server.close()

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Error 111 connecting to h:1. Connection refused.", REFUSED),
        ("h:1: [Errno -2] Name or service not known (configured timeouts: x)", UNKNOWN),
        (
            "none of 2 servers can be used: a: Timeout; b: " + REFUSED,
            "none of 2 servers can be used: a: Timeout; b: " + REFUSED,
        ),
        ("something else", "something else"),
    ],
)
def test_a_text_is_brought_into_plain_words_once(text: str, said: str) -> None:
    assert plain(text) == said
    assert plain(plain(text)) == said
