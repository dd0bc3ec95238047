"""Each fault of the proxy, seen by a client and by a tiny server that notes what reaches it."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from machinery_py.testing.waiting import HANG, together, wait_until
from tests.support.proxy import REPLIES, REQUESTS, Direction, Proxy

Dial = Callable[[], socket.socket]
QUIET = 0.2  # seconds in which nothing arrives, when nothing must


class Echo:
    """Answers each line with itself, and notes what it read and how each connection ended."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.pieces: list[bytes] = []
        self.ends: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept, name="echo", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(HANG)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(
                threading.Thread(target=self._answer, args=(connection,), name="echo", daemon=True)
            )
            self._threads[-1].start()

    def _answer(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = b""
        with connection:
            try:
                while read := connection.recv(65_536):
                    self.received += read
                    self.pieces.append(read)
                    line += read
                    if line.endswith(b"\n"):
                        connection.sendall(line)
                        line = b""
                self.ends.append("FIN")
            except ConnectionError:
                self.ends.append("RST")


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.port, seed=7) as proxy:
        yield proxy


@pytest.fixture
def dial(proxy: Proxy) -> Iterator[Dial]:
    """Opens a connection through the proxy, over which one line has gone to and fro."""
    opened: list[socket.socket] = []

    def connect() -> socket.socket:
        client = socket.create_connection(("127.0.0.1", proxy.url_port), HANG)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.append(client)
        assert ask(client, b"hello\n") == b"hello\n"
        return client

    yield connect
    for client in opened:
        client.close()


def ask(client: socket.socket, line: bytes) -> bytes:
    client.sendall(line)
    return read_line(client)


def read_line(client: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and (read := client.recv(65_536)):
        line += read
    return line


def hears_nothing(client: socket.socket) -> None:
    client.settimeout(QUIET)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(HANG)


def test_without_a_fault_bytes_pass_both_ways_and_are_counted(
    echo: Echo, proxy: Proxy, dial: Dial
) -> None:
    client = dial()
    line = b"x" * 1_000_000 + b"\n"

    sender = threading.Thread(target=client.sendall, args=(line,), name="sender")
    sender.start()
    answer = read_line(client)
    sender.join(HANG)

    assert answer == line
    wait_until(lambda: proxy.counts["reply_bytes"] == len(line) + 6)
    assert proxy.counts["request_bytes"] == len(line) + 6
    assert (proxy.counts["connections"], proxy.counts["resets"], proxy.open_connections) == (
        1,
        0,
        1,
    )


def test_the_end_of_a_connection_passes_too(echo: Echo, proxy: Proxy, dial: Dial) -> None:
    client = dial()

    client.shutdown(socket.SHUT_WR)

    assert client.recv(1) == b""
    wait_until(lambda: echo.ends == ["FIN"] and proxy.open_connections == 0)
    assert [event.what for event in proxy.events] == ["started", "connected", "closed"]


def test_many_clients_pass_at_once(proxy: Proxy, dial: Dial) -> None:
    clients = [dial() for _ in range(32)]

    assert together(32, lambda number: ask(clients[number], b"%d\n" % number)) == [
        b"%d\n" % number for number in range(32)
    ]
    assert proxy.open_connections == 32


def test_latency_is_waited_for(proxy: Proxy, dial: Dial) -> None:
    client = dial()
    proxy.slow(REPLIES, latency=0.2)

    began = time.monotonic()
    assert ask(client, b"slow\n") == b"slow\n"

    assert time.monotonic() - began >= 0.2


def test_jitter_follows_the_seed(proxy: Proxy, dial: Dial) -> None:
    client = dial()
    proxy.slow(REPLIES, latency=0.1, jitter=0.1)
    seeded = random.Random(7)

    for _ in range(4):
        began = time.monotonic()
        ask(client, b"x\n")
        assert time.monotonic() - began >= 0.1 + seeded.uniform(-0.1, 0.1)


def test_bandwidth_limits_the_bytes_per_second(echo: Echo, proxy: Proxy, dial: Dial) -> None:
    client = dial()
    proxy.slow(REQUESTS, bandwidth=20_000)

    began = time.monotonic()
    assert ask(client, b"x" * 10_000 + b"\n").endswith(b"x\n")

    assert time.monotonic() - began > 0.4


def test_chopped_bytes_arrive_one_by_one_and_whole(echo: Echo, proxy: Proxy, dial: Dial) -> None:
    client = dial()
    proxy.chop()
    before = len(echo.pieces)

    line = b"abcdefghijklmnop" * 200 + b"\n"  # a busy machine may give some bytes in one piece
    assert ask(client, line) == line

    assert len(echo.pieces) - before > 1


def test_black_hole_swallows_bytes_until_the_proxy_is_healed(
    echo: Echo, proxy: Proxy, dial: Dial
) -> None:
    client = dial()
    proxy.black_hole()

    client.sendall(b"lost\n")
    hears_nothing(client)
    assert b"lost" not in echo.received
    assert proxy.open_connections == 1

    proxy.heal()
    assert read_line(client) == b"lost\n"


def test_a_black_hole_of_replies_lets_the_request_be_executed(
    echo: Echo, proxy: Proxy, dial: Dial
) -> None:
    client = dial()
    proxy.black_hole(REPLIES)

    client.sendall(b"done\n")

    wait_until(lambda: b"done" in echo.received)
    hears_nothing(client)


def test_refusing_ends_with_healing_and_spares_open_connections(proxy: Proxy, dial: Dial) -> None:
    client = dial()
    proxy.refuse()

    with pytest.raises(ConnectionRefusedError):
        dial()
    assert ask(client, b"still\n") == b"still\n"

    proxy.heal()
    assert dial() is not client


def test_a_reset_reaches_both_ends(echo: Echo, proxy: Proxy, dial: Dial) -> None:
    clients = [dial(), dial()]

    proxy.reset()

    for client in clients:
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    wait_until(lambda: echo.ends == ["RST", "RST"])
    assert (proxy.counts["resets"], proxy.open_connections) == (2, 0)
    assert ask(dial(), b"anew\n") == b"anew\n"


@pytest.mark.parametrize("length", [0, 1, 5, 9])
def test_a_reset_in_the_middle_of_a_reply(
    echo: Echo, proxy: Proxy, dial: Dial, length: int
) -> None:
    client = dial()
    proxy.reset_after(length)

    client.sendall(b"0123456789\n")

    received = b""
    with pytest.raises(ConnectionResetError):
        while True:
            received += client.recv(100)
    assert received == b"0123456789"[:length]
    assert b"0123456789\n" in echo.received
    assert ask(dial(), b"once\n") == b"once\n"


def test_a_reset_in_the_middle_of_a_request(echo: Echo, proxy: Proxy, dial: Dial) -> None:
    client = dial()
    proxy.reset_after(3, REQUESTS)

    client.sendall(b"0123456789\n")

    with pytest.raises(ConnectionResetError):
        client.recv(1)
    wait_until(lambda: echo.ends == ["RST"])
    assert bytes(echo.received) == b"hello\n012"


def test_fin_ends_both_sides_in_order(echo: Echo, proxy: Proxy, dial: Dial) -> None:
    client = dial()

    proxy.finish()

    assert client.recv(1) == b""
    wait_until(lambda: echo.ends == ["FIN"])
    client.close()
    wait_until(lambda: proxy.open_connections == 0)
    assert proxy.counts["resets"] == 0


@pytest.mark.parametrize("direction", Direction)
def test_a_half_closed_connection_still_carries_the_other_half(
    echo: Echo, proxy: Proxy, dial: Dial, direction: Direction
) -> None:
    client = dial()
    proxy.half_close(direction)

    if direction is REPLIES:
        assert client.recv(1) == b""
        client.sendall(b"heard\n")
        wait_until(lambda: b"heard" in echo.received)
    else:
        wait_until(lambda: echo.ends == ["FIN"])
        assert client.recv(1) == b""  # the echo hung up, and that came through
    assert proxy.counts["resets"] == 0


def test_command_with_a_dropped_reply_ran_and_was_disconnected(
    echo: Echo, proxy: Proxy, dial: Dial
) -> None:
    client, other = dial(), dial()
    proxy.drop_next_reply(matching=b"push")

    assert ask(other, b"look\n") == b"look\n"
    client.sendall(b"push\n")

    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert echo.received.count(b"push\n") == 1
    assert proxy.counts["dropped"] == 1
    assert ask(other, b"push\n") == b"push\n"


def test_next_reply_can_be_dropped_while_its_request_waits(proxy: Proxy, dial: Dial) -> None:
    client = dial()
    proxy.slow(REQUESTS, latency=0.1)
    client.sendall(b"waiting\n")

    proxy.drop_next_reply()

    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_replies_drop_with_a_probability_and_a_seed(echo: Echo) -> None:
    def run() -> list[bool]:
        kept = []
        with Proxy(echo.port, seed=11) as proxy:
            proxy.drop_replies(0.5)
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", proxy.url_port), HANG) as client:
                    client.sendall(b"x\n")
                    try:
                        kept.append(client.recv(2) == b"x\n")
                    except ConnectionResetError:
                        kept.append(False)
            assert proxy.counts["dropped"] == kept.count(False)
        return kept

    first = run()

    assert 0 < first.count(False) < 20
    assert run() == first


def test_an_error_answers_instead_of_the_server(echo: Echo, proxy: Proxy, dial: Dial) -> None:
    client = dial()
    proxy.answer_next("-LOADING Redis is loading the dataset in memory", matching=b"GET")

    assert ask(client, b"PING\n") == b"PING\n"
    assert ask(client, b"GET a\n") == b"-LOADING Redis is loading the dataset in memory\r\n"
    assert ask(client, b"GET b\n") == b"GET b\n"

    assert b"GET a" not in echo.received
    assert proxy.counts["answered"] == 1


def test_each_command_of_a_pipeline_is_answered(proxy: Proxy, dial: Dial) -> None:
    client = dial()
    proxy.answer_next("BUSY")

    client.sendall(b"*1\r\n$4\r\nPING\r\n*2\r\n$3\r\nGET\r\n$1\r\na\r\n")

    received = b""
    while received.count(b"\n") < 2:
        received += client.recv(100)
    assert received == b"-BUSY\r\n-BUSY\r\n"


def test_a_server_that_is_not_there_resets_the_client(proxy: Proxy, echo: Echo) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        proxy.target_port = nobody.getsockname()[1]

        with (
            pytest.raises(ConnectionResetError),
            socket.create_connection(("127.0.0.1", proxy.url_port), HANG) as client,
        ):
            client.recv(1)

    assert proxy.counts["unreachable"] == 1


def test_a_closed_proxy_leaves_neither_thread_nor_connection(echo: Echo) -> None:
    with Proxy(echo.port) as proxy:
        client = socket.create_connection(("127.0.0.1", proxy.url_port), HANG)
        ask(client, b"x\n")

    with client, pytest.raises(ConnectionResetError):
        client.recv(1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("proxy to")]


def test_proxied_url_keeps_login_path_and_options(proxy: Proxy) -> None:
    assert (
        proxy.through("redis://:secret@db:6379/3?a=b")
        == f"redis://:secret@127.0.0.1:{proxy.url_port}/3?a=b"
    )
    assert proxy.through("amqp://127.0.0.1:5672/") == f"amqp://127.0.0.1:{proxy.url_port}/"
