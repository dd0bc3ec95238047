"""One AMQP connection and its I/O thread, which runs pika's loop and no code of a user.

    link = AmqpConnection(parameters, name="publish")
    link.open(5.0)
    channel = link.channel(5.0)
    channel.rpc("queue_declare", queue="q", durable=True, timeout=5.0)

Other threads hand in work and wait for a future. When the server closes a connection or a channel,
every future that waits on it fails at that moment, and not at the next call. No call waits longer
than its timeout: an answer that does not come in time ends the connection, since it is unknown what
became of the requests on it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import pika
from pika import spec
from pika.exceptions import ChannelClosedByBroker

from machinery_py.connections.plain_words import plain, words_of
from machinery_py.connections.rabbitmq.connection import Connection
from machinery_py.connections.rabbitmq.frames import acks, nacks
from machinery_py.texts import get_logger
from machinery_py.threads import INSIDE

logger = get_logger(__name__)

OVER = 1.0  # seconds that closing in order may take


class AmqpConnectionLost(Exception):
    """The connection is gone, or was never there."""


class ChannelLost(Exception):
    """The server closed the channel.

    Attributes:
        code: AMQP's: 403 not allowed, 404 not found, 405 locked, 406 other arguments.
    """

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        self.text = text
        super().__init__(f"{text} ({code})")


class AmqpConnection:
    """A connection. `blocked` is the server's reason for taking no messages at present, or ""."""

    def __init__(
        self,
        parameters: pika.ConnectionParameters,
        *,
        name: str,
        on_lost: Callable[[], object] | None = None,
    ) -> None:
        """`on_lost` is called once, in the I/O thread, when the connection has ended."""
        self._parameters = parameters
        self._name = name
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self._channels: set[Channel] = set()  # that are open; touched in the I/O thread alone
        self._connection: Connection | None = None
        self._opened: Future[None] = Future()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.lost: Exception | None = None
        self.blocked: str = ""
        self._free = threading.Event()
        self._free.set()

    @property
    def is_open(self) -> bool:
        return self.lost is None and self._connection is not None and self._pid == os.getpid()

    def open(self, timeout: float) -> None:
        """Connect.

        Raises:
            AmqpConnectionLost: it could not be done.
        """
        self._thread = threading.Thread(
            target=self._run, name=f"machinery-amqp-{self._name}", daemon=True
        )
        self._thread.start()
        try:
            self._opened.result(timeout)
        except TimeoutError:
            self.abort()
            raise AmqpConnectionLost(
                f"no answer within {timeout:g} s (check host, port and firewall; is it overloaded?)"
            ) from None

    def _run(self) -> None:
        INSIDE.depth = 1
        ended: Exception | None = None
        try:
            self._connection = Connection(
                self._parameters,
                on_open_callback=lambda _: resolve(self._opened, None),
                on_open_error_callback=self._on_end,
                on_close_callback=self._on_end,
            )
            self._connection.add_on_connection_blocked_callback(self._on_blocked)
            self._connection.add_on_connection_unblocked_callback(self._on_unblocked)
            self._connection.ioloop.start()
        except Exception as error:  # ends the connection, and fails all that wait
            ended = error
        self._end(ended or AmqpConnectionLost("closed"))
        # pika closes none of them when its loop has failed, or the connection was dropped.
        for channel in list(self._channels):
            channel.end(AmqpConnectionLost(_text(self.lost)))
        if self._connection is not None:
            self._connection.ioloop.close()  # its poller and its pair of sockets

    def _on_end(self, connection: Any, error: Any) -> None:
        self._end(error if isinstance(error, Exception) else AmqpConnectionLost(str(error)))
        connection.ioloop.stop()

    def _on_blocked(self, _: object, frame: Any) -> None:
        self.blocked = str(frame.method.reason) or "no reason given"
        self._free.clear()

    def _on_unblocked(self, *_: object) -> None:
        self.blocked = ""
        self._free.set()

    def wait_unblocked(self, timeout: float) -> bool:
        """Whether the server takes messages, now or within the timeout."""
        return self._free.wait(timeout)

    def _end(self, error: Exception) -> None:
        with self._lock:
            if self.lost is not None:
                return
            self.lost = error
            waiting = list(self._waiting)
        lost = AmqpConnectionLost(_text(error))
        lost.__cause__ = error
        for future in [self._opened, *waiting]:
            _fail(future, lost)
        if self._on_lost is not None:
            self._on_lost()

    def tell(self, work: Callable[[], object]) -> None:
        """Let the I/O thread do something, without waiting; nothing if the connection is lost."""
        connection = self._connection
        if connection is not None and self.is_open:
            connection.ioloop.add_callback_threadsafe(lambda: self._try(work))

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:  # a channel that has closed meanwhile; nothing waits for this
            logger.debug("something was not done on a connection to RabbitMQ", exc_info=True)

    def ask(self, work: Callable[[Future[Any]], object], timeout: float) -> Any:
        """Let the I/O thread do something, and wait for the future that it fills.

        Raises:
            AmqpConnectionLost: the connection ended before, or no answer came; it is ended then.
        """
        with INSIDE:  # the lock cannot be taken twice by a thread
            return self._ask(work, timeout)

    def _ask(self, work: Callable[[Future[Any]], object], timeout: float) -> Any:
        future: Future[Any] = Future()
        with self._lock:
            if not self.is_open:
                raise AmqpConnectionLost(_text(self.lost) if self.lost else "not connected")
            self._waiting.add(future)
        assert self._connection is not None
        self._connection.ioloop.add_callback_threadsafe(lambda: _begin(work, future))
        try:
            return future.result(timeout)
        except TimeoutError:
            self.abort()
            raise AmqpConnectionLost(f"no answer within {timeout:g} s") from None
        finally:
            with self._lock:
                self._waiting.discard(future)

    def channel(self, timeout: float) -> Channel:
        connection = self._connection
        assert connection is not None

        def begin(future: Future[Any]) -> None:
            connection.channel(on_open_callback=lambda raw: resolve(future, opened(raw)))

        def opened(raw: Any) -> Channel:
            channel = Channel(self, raw)
            self._channels.add(channel)
            channel.raw.add_on_close_callback(lambda *_: self._channels.discard(channel))
            return channel

        channel: Channel = self.ask(begin, timeout)
        return channel

    def close(self) -> None:
        """Close in order, and end the thread. May be called twice, but not in the I/O thread."""
        if self._pid != os.getpid():
            return  # the parent's
        connection = self._connection
        if self.is_open and connection is not None:
            self.tell(connection.close)
            self._join()
        self.abort()

    def abort(self) -> None:
        """Drop the connection without closing it in order."""
        connection = self._connection
        self._end(AmqpConnectionLost("dropped"))
        if connection is None or self._pid != os.getpid():
            return

        def drop() -> None:
            # pika has no public way to end a connection whose peer does not answer.
            transport = getattr(connection, "_transport", None)
            if transport is None:
                connection.ioloop.stop()
            else:
                transport.abort()  # leads to _on_end

        if self._thread is not None and self._thread.is_alive():
            connection.ioloop.add_callback_threadsafe(lambda: self._try(drop))
            if threading.current_thread() is not self._thread:
                self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(OVER)


class Channel:
    """A channel. Methods may be called from any thread unless they say otherwise."""

    def __init__(self, link: AmqpConnection, raw: Any) -> None:
        self.link = link
        self.raw = raw
        self.lost: Exception | None = None
        self._waiting: set[Future[Any]] = set()
        self._on_lost: Callable[[Exception], object] | None = None
        # Tags of deliveries, the oldest first; touched in the I/O thread alone.
        self._unsettled: dict[int, None] = {}
        raw.add_on_close_callback(self._on_close)

    @property
    def is_open(self) -> bool:
        return self.lost is None and self.link.is_open

    def watch(self, on_lost: Callable[[Exception], object]) -> None:
        """Call this in the I/O thread when the channel has closed."""
        self._on_lost = on_lost

    def _on_close(self, _: object, reason: Exception) -> None:
        if isinstance(reason, ChannelClosedByBroker):
            self.end(ChannelLost(reason.reply_code, reason.reply_text))
        else:
            self.end(AmqpConnectionLost(_text(reason)))

    def end(self, lost: Exception) -> None:
        """Fail all that waits for the channel; in the I/O thread."""
        if self.lost is not None:
            return
        self.lost = lost
        for future in list(self._waiting):
            _fail(future, self.lost)
        if self._on_lost is not None:
            self._on_lost(self.lost)

    def ask(self, work: Callable[[Future[Any]], object], timeout: float) -> Any:
        """As AmqpConnection.ask; fails when the channel closes, too.

        Raises:
            AmqpConnectionLost, ChannelLost: nothing is known of what was asked for.
        """

        def begin(future: Future[Any]) -> None:
            if self.lost is not None:
                raise self.lost
            self._waiting.add(future)
            future.add_done_callback(self._waiting.discard)
            work(future)

        return self.link.ask(begin, timeout)

    def rpc(self, method: str, *, timeout: float, **arguments: Any) -> Any:
        """Call a method of pika's that has a `callback`, and return the frame that comes back."""
        return self.ask(
            lambda future: getattr(self.raw, method)(
                callback=lambda frame: resolve(future, frame), **arguments
            ),
            timeout,
        )

    def cancel(self, tag: str, then: Callable[[], object]) -> None:
        """End a subscription, in the I/O thread; `then` is called when nothing more can come.

        pika's own basic_cancel rejects what arrives between the request and the reply: messages
        that nobody has seen would count as delivered. A pika without `_rpc` is used as it is.
        """
        if not hasattr(self.raw, "_rpc"):
            self.raw.basic_cancel(tag, lambda _: then())
            return

        def cancelled(_: object) -> None:
            self.raw._consumers.pop(tag, None)
            then()

        self.raw._rpc(
            spec.Basic.Cancel(consumer_tag=tag),
            cancelled,
            [(spec.Basic.CancelOk, {"consumer_tag": tag})],
        )

    def unsubscribe(self, tag: str, timeout: float) -> None:
        """End a subscription, and wait until nothing more can come."""
        self.ask(lambda future: self.cancel(tag, lambda: resolve(future, None)), timeout)

    def write(self, pieces: Iterable[bytes]) -> None:
        """Send frames of this channel that are encoded already; from threads as Connection.write.

        Raises:
            Exception: nothing was sent, since the channel is closing or closed.
        """
        if not self.raw.is_open:
            raise self.lost or AmqpConnectionLost("closing")
        for piece in pieces:
            self.raw.connection.write(piece)

    def note(self, tag: int) -> None:
        """Note a delivery that `dispose` will get; in the I/O thread. All of a channel, or none."""
        self._unsettled[tag] = None

    def dispose(self, tags: Iterable[tuple[int, bool]]) -> None:
        """Acknowledge (True) or give back (False); in the I/O thread.

        All that is older than anything unsettled is acknowledged with one frame.
        """
        kept, done, back = list[int](), list[int](), list[int]()
        for tag, is_done in tags:
            noted = tag in self._unsettled
            self._unsettled.pop(tag, None)
            (back if not is_done else kept if noted else done).append(tag)
        oldest = next(iter(self._unsettled), None)
        head = [tag for tag in kept if oldest is None or tag < oldest]
        done += [tag for tag in kept if oldest is not None and tag > oldest]
        number = self.raw.channel_number
        # First what goes back: what is acknowledged up to a tag would take it along.
        frames = nacks(number, back) + acks(number, done, up_to=max(head, default=0))
        if frames:
            self.write([frames])

    def settle(self, tags: Sequence[tuple[int, bool]], timeout: float) -> None:
        """Dispose of deliveries, and wait until the server has seen it.

        Raises:
            AmqpConnectionLost, ChannelLost: it may not have.
        """

        def work(future: Future[Any]) -> None:
            self.dispose(tags)
            # An acknowledgement has no answer; the server reads a channel in order, and this has
            # one.
            self.raw.basic_qos(prefetch_count=0, callback=lambda _: resolve(future, None))

        if tags:
            self.ask(work, timeout)

    def close(self) -> None:
        """Close the channel: unsettled deliveries go back. Waits at most OVER * 5 seconds."""

        def closing(future: Future[Any]) -> None:
            if self.lost is not None:
                resolve(future, None)
                return
            self.raw.add_on_close_callback(lambda *_: resolve(future, None))
            self.raw.close()

        try:
            self.link.ask(closing, OVER * 5)
        except AmqpConnectionLost:
            pass  # then it is closed


def resolve(future: Future[Any], value: Any) -> None:
    """Set the result of a future that may be done."""
    if not future.done():
        future.set_result(value)


def _fail(future: Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _begin(work: Callable[[Future[Any]], object], future: Future[Any]) -> None:
    if not future.done():
        try:
            work(future)
        except Exception as error:  # belongs to the thread that asked
            _fail(future, error)


def _text(error: BaseException | None) -> str:
    """Return a text for one of pika's errors, which may wrap another or have no text of its own."""
    if error is None:
        return "closed"
    inner = error.args[0] if error.args and isinstance(error.args[0], BaseException) else None
    text = str(inner or error) or type(error).__name__
    if isinstance(error, AmqpConnectionLost):
        return text
    words = words_of(error)
    known = plain(words)
    return known if known != words else f"{type(inner or error).__name__}: {text}"
