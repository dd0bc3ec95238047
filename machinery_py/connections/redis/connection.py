"""One connection to Redis: commands are written to its socket, and replies read, in RESP2.

redis-py opens it. It reads any protocol, through several layers: that costs more than the reply of
a script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from ssl import SSLWantReadError
from typing import Any

LIFE = 12  # characters of the server's random `run_id`
CHUNK = 65536  # bytes that are asked for at once
CLOSED = "Connection closed by server."  # redis-py's words

_LIFE = re.compile(rb"^run_id:(\S+)", re.MULTILINE)
_ARRAY, _BYTES, _NUMBER, _TEXT, _ERROR = b"*$:+-"


class RedisConnection:
    """One connection, for one thread at a time."""

    def __init__(
        self,
        connection: Any,
        server: int,
        *,
        write_timeout: float = 0.0,
        on_close: Callable[[], object] = int,
    ) -> None:
        self._connection = connection  # redis-py has no types for it
        self._socket = connection._sock
        self._reader = ReplyReader(self._socket, connection._parser.parse_error)
        self._write_timeout = write_timeout  # 0: that of replies
        self._timeout = self._socket.gettimeout()  # of replies
        self._on_close: Callable[[], object] | None = on_close
        self.server = server  # as the driver's `servers` counted when it was opened
        self.number = b""  # as CLIENT ID says, where it was asked for
        self._life: bytes | None = None
        self.used_at: float = 0.0

    def ask(self, *parts: bytes) -> Any:
        """Send one command and return its reply. Any exception of redis-py, or OSError."""
        return self.exchange(command(*parts))

    def exchange(self, packet: bytes) -> Any:
        """Send one encoded command and return its reply. Raises as `ask`."""
        self.send(packet)
        return self.read()

    def ask_all(self, packets: Sequence[bytes]) -> list[Any]:
        """Send encoded commands in one packet, and return their replies; raise the first error."""
        self.send(b"".join(packets))
        replies: list[Any] = []
        failed: Exception | None = None
        for _ in packets:
            try:
                replies.append(self.read())
            except Exception as error:  # redis-py's; the connection is closed if it is not a reply
                failed = failed or error
        if failed is not None:
            raise failed
        return replies

    def life(self) -> bytes:
        """Return what names the server's process, in whose life numbers of clients are given once.

        Asked for at the first call. Empty if the server does not tell.
        """
        if self._life is None:
            self._life = self._ask_life()
        return self._life

    def _ask_life(self) -> bytes:
        from redis.exceptions import ResponseError

        try:
            text = self.ask(b"INFO", b"server")
        except ResponseError:  # forbidden
            return b""
        found = _LIFE.search(text)
        return found[1][:LIFE] if found else b""

    def send(self, packet: bytes) -> None:
        try:
            if not self._write_timeout:
                self._socket.sendall(packet)
                return
            self._socket.settimeout(self._write_timeout)
            self._socket.sendall(packet)
            self._socket.settimeout(self._timeout)
        except BaseException as error:  # a part of it may have been sent
            refusal = self._last_words() if isinstance(error, ConnectionError) else None
            self.close()
            if refusal is not None:
                raise refusal from error
            raise

    def _last_words(self) -> Exception | None:
        """Return the error reply in front of the end of the connection.

        Redis hangs up in the middle of a command that is too large for it.
        """
        try:
            reply = self._reader.read()
        except Exception:  # there is none
            return None
        return reply if isinstance(reply, Exception) else None

    def read(self) -> Any:
        try:
            reply = self._reader.read()
        except BaseException:  # a part of it may have been read
            self.close()
            raise
        if not isinstance(reply, Exception):
            return reply
        try:
            raise reply
        finally:
            del reply  # which has this frame

    def has_news(self, timeout: float = 0.0) -> bool:
        """Whether something can be read: a reply, a message, or the end of the connection."""
        return self._reader.has_news(timeout)

    @property
    def has_more(self) -> bool:
        """Whether a reply, or a part of one, has been received and not been read."""
        return self._reader.has_more

    def is_broken(self) -> bool:
        """Close it if the server has; for a connection on which no reply is awaited."""
        try:
            if not self.has_news():
                return False
        except Exception:  # redis-py's: it is gone
            pass
        self.close()
        return True

    def close(self) -> None:
        self._connection.disconnect()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


def command(*parts: bytes) -> bytes:
    """Encode a command as it goes over the wire."""
    pieces = [b"*%d\r\n" % len(parts)]
    for part in parts:
        pieces.append(b"$%d\r\n" % len(part))
        pieces.append(part)
        pieces.append(b"\r\n")
    return b"".join(pieces)


class ReplyReader:
    """Reader of one connection. After an exception nothing more can be read from it.

    Args:
        socket: connected, with a timeout; perhaps of TLS.
        error_of: makes the exception of an error reply.
    """

    def __init__(self, socket: Any, error_of: Callable[[str], Exception]) -> None:
        self._socket = socket
        self._timeout = socket.gettimeout()
        self._error_of = error_of
        self._data = b""  # what was received, and is read up to `_at`
        self._at = 0

    @property
    def has_more(self) -> bool:
        """Whether a reply, or a part of one, has been received and not been read."""
        return self._at < len(self._data)

    def has_news(self, timeout: float) -> bool:
        """Wait for something to read, or the end of the connection, so many seconds at most.

        Raises:
            OSError, redis.ConnectionError: the connection is gone.
        """
        if self.has_more:
            return True
        self._socket.settimeout(timeout)
        try:
            self._receive(1)
        except (TimeoutError, BlockingIOError, SSLWantReadError) as error:
            if isinstance(error, TimeoutError) and error.errno:  # TCP has given up
                raise
            return False
        finally:
            self._socket.settimeout(self._timeout)
        return True

    def read(self) -> Any:
        """Return the next reply. An error reply is returned, too, not raised.

        Raises:
            OSError, redis.ConnectionError: the connection is gone, or the time is over.
            redis.InvalidResponse: this is no reply.
        """
        if self._at == len(self._data):
            self._receive(1)
        reply = self._next()
        if self._at == len(self._data):
            self._data, self._at = b"", 0
        return reply

    def _next(self) -> Any:
        while (end := self._data.find(b"\r\n", self._at)) < 0:
            self._receive(1)
        data, at = self._data, self._at
        kind, line = data[at], data[at + 1 : end]
        self._at = end + 2
        if kind == _ARRAY:
            count = int(line)
            return None if count < 0 else [self._next() for _ in range(count)]
        if kind == _BYTES:
            size = int(line)
            return None if size < 0 else self._take(size)
        if kind == _NUMBER:
            return int(line)
        if kind == _TEXT:
            return line
        if kind == _ERROR:
            return self._error_of(line.decode(errors="replace"))
        from redis import InvalidResponse

        raise InvalidResponse(f"Protocol Error: {data[at:end]!r}")

    def _take(self, size: int) -> bytes:
        missing = self._at + size + 2 - len(self._data)
        if missing > 0:
            self._receive(missing)
        begin = self._at
        self._at = begin + size + 2
        return self._data[begin : begin + size]

    def _receive(self, least: int) -> None:
        """Receive at least so many bytes more."""
        chunks = [self._data[self._at :]]
        while least > 0:
            chunk = self._socket.recv(max(CHUNK, least))
            if not chunk:
                from redis import ConnectionError

                raise ConnectionError(CLOSED)
            chunks.append(chunk)
            least -= len(chunk)
        self._data, self._at = b"".join(chunks), 0
