"""Replies of Redis, as they come in pieces."""

import socket
from collections import deque
from collections.abc import Iterator

import pytest
import redis

from machinery_py.connections.redis.connection import CHUNK, ReplyReader

REPLIES: list[tuple[bytes, object]] = [
    (b"+OK\r\n", b"OK"),
    (b":-12\r\n", -12),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"$0\r\n\r\n", b""),
    (b"*0\r\n", []),
    (b"$4\r\n\r\n\r\n\r\n", b"\r\n\r\n"),
    (b"*3\r\n:1\r\n*2\r\n$1\r\na\r\n$-1\r\n+b\r\n", [1, [b"a", None], b"b"]),
    (b"$%d\r\n%b\r\n" % (3 * CHUNK, b"x" * 3 * CHUNK), b"x" * 3 * CHUNK),
]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    server, client = socket.socketpair()
    client.settimeout(20)
    with server, client:
        yield server, client


def reader_of(client: socket.socket) -> ReplyReader:
    return ReplyReader(client, redis.ResponseError)


class Pieces:
    """A socket whose `recv` gives one piece at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        self.left = deque(data[at : at + step] for at in range(0, len(data), step))

    def gettimeout(self) -> float:
        return 5.0

    def recv(self, size: int) -> bytes:
        assert size >= len(self.left[0])
        return self.left.popleft()


@pytest.mark.parametrize("step", [1, 2, 3, 7, CHUNK])
def test_replies_in_pieces_of_any_size(step: int) -> None:
    pieces = Pieces(b"".join(sent for sent, _ in REPLIES), step)
    reader = ReplyReader(pieces, redis.ResponseError)
    assert [reader.read() for _ in REPLIES] == [reply for _, reply in REPLIES]
    assert not pieces.left


def test_error_reply_is_returned_and_the_next_reply_is_read(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    server, client = ends
    reader = reader_of(client)
    server.sendall(b"-WRONGTYPE a \xff key\r\n*2\r\n-ERR in it\r\n:1\r\n+OK\r\n")

    error = reader.read()
    assert isinstance(error, redis.ResponseError)
    assert str(error) == "WRONGTYPE a \N{REPLACEMENT CHARACTER} key"
    inner, one = reader.read()
    assert (str(inner), one) == ("ERR in it", 1)
    assert reader.has_news(0.0)
    assert reader.read() == b"OK"


def test_end_of_the_connection_is_news_that_raises(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    server, client = ends
    reader = reader_of(client)
    assert not reader.has_news(0.0)
    assert not reader.has_news(0.01)
    assert client.gettimeout() == 20
    server.sendall(b"*2\r\n:1\r\n")
    server.close()

    assert reader.has_news(20)
    with pytest.raises(redis.ConnectionError, match="closed"):
        reader.read()
    with pytest.raises(redis.ConnectionError, match="closed"):
        reader_of(client).has_news(0.0)


def test_reply_that_does_not_come_in_time(ends: tuple[socket.socket, socket.socket]) -> None:
    server, client = ends
    client.settimeout(0.01)
    server.sendall(b"$5\r\nab")
    with pytest.raises(TimeoutError):
        reader_of(client).read()


def test_other_protocol_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    server, client = ends
    server.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(redis.InvalidResponse, match="HTTP"):
        reader_of(client).read()
