"""Transactional read-modify-write of RabbitMQ queues, serialised by lock queues.

    transactions = QueueTransactions(driver, declare)
    with transactions.transaction(["lock.3"], "storing a state") as transaction:
        transaction.read([place])
        transaction.put(place, b"new")
        transaction.drop(transaction.held(place))

What makes that safe:

- **A lock** is a queue with a single active consumer and a token in it. The consumer that is handed the token has the lock;
  the others are handed it in turn when it is given back, or when the holder's connection ends. A spare token does no harm:
  it goes to the one consumer that is active. Locks are taken in the order of their names.
- **A read** takes all messages of a queue and holds them. The end of the transaction, or of the connection, puts back what
  was not dropped, in its place.
- **The end** of a transaction is one AMQP transaction: all that was put and all that was dropped, or nothing. It is on the
  channel that holds the locks, so a process that lost its connection, and with it the lock, can write nothing.

A queue that is not there is not made by a read: a message that lives for no time at all is sent to it first, and comes back
if there is none. Where others may have a queue of that name, it is declared instead: the server refuses that if it was made with
other arguments, and ends the transaction before anything is read of it or written to it.

Limits: a transaction that spans queues is not one step for a server that dies in the middle of it. In a cluster a lock is gone
while the node is down that its queue lives on. What is committed in the very moment in which a lock's queue crashes stays.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import pika
from pika.exceptions import AMQPError

from machinery_py.connections.forks import ForkLock
from machinery_py.connections.rabbitmq.client import AmqpDriver, largest_of
from machinery_py.connections.rabbitmq.io_thread import (
    AmqpConnection,
    AmqpConnectionLost,
    Channel,
    ChannelLost,
    settle,
)
from machinery_py.connections.rabbitmq.reader import EACH, QueueReader, UnsettledMessage
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    NameRefused,
    StoreUnusable,
    for_good,
)
from machinery_py.names import is_made

PATIENCE = 15.0  # seconds to wait for a lock
NOT_FOUND, OTHER_ARGUMENTS = 404, 406
REFUSALS = (403, 405, OTHER_ARGUMENTS)  # no right to it; somebody has it alone; made in another way
_QUEUE = re.compile(r"queue '(.*)' in vhost")

#: Of a queue that is a lock: its consumers come one after the other, and spare tokens do not pile up.
LOCK_ARGUMENTS = {"x-queue-type": "classic", "x-single-active-consumer": True, "x-max-length": 1}
#: Of our queues that stay. The server's default may be another type, which knows no messages that live for no time.
OURS = {"x-queue-type": "classic"}

_tags = itertools.count(1)
_PROPERTIES = pika.BasicProperties(content_type="application/json", delivery_mode=2)
_PROBE = pika.BasicProperties(expiration="0")


class Queue(NamedTuple):
    """A queue, and how it is declared. `is_ours`: nobody else has a queue of this name."""

    queue: str
    arguments: Mapping[str, object]
    durable: bool = True
    auto_delete: bool = False
    is_ours: bool = True


class QueueMoved(Exception):
    """A queue went away between two looks; nothing was written."""


class QueueTransactionLost(BackendUnavailable):
    """The connection ended in the middle of a transaction, which may have been carried out."""


class LockTaken(Exception):
    """Others have held a lock for too long."""

    def __init__(self, lock: str) -> None:
        self.lock = lock
        super().__init__(lock)


class TxChannel:
    """A channel that transactions take place on, one after the other."""

    def __init__(self, link: AmqpConnection, timeout: float) -> None:
        self.channel = link.channel(timeout)
        self.reader = QueueReader(self.channel)
        self.returned: set[str] = set()
        self.on_cancel: Callable[[str], object] = (
            _nothing  # by the server, of a subscription with this tag
        )
        raw = self.channel.raw
        raw.add_on_cancel_callback(lambda frame: self.on_cancel(frame.method.consumer_tag))
        raw.add_on_return_callback(lambda _, method, __, ___: self.returned.add(method.routing_key))
        self.channel.rpc("basic_qos", prefetch_count=1, timeout=timeout)  # one token for each lock
        self.channel.rpc("tx_select", timeout=timeout)


class QueueTransaction:
    """Reads and writes of one thread under its locks. Ended by `QueueTransactions.transaction`."""

    def __init__(self, tx: TxChannel, timeout: float) -> None:
        self._tx_channel = tx
        self._channel = tx.channel
        self._timeout = timeout
        self._locks: dict[str, tuple[str, int]] = {}  # → the tags of the consumer and of the token
        self._tags: set[str] = (
            set()
        )  # of the consumers that hold; touched in the link's thread alone
        self._held: dict[str, list[UnsettledMessage]] = {}
        self._known: set[str] = set()  # these queues are there
        self._absent: set[str] = set()
        self._dropped: set[int] = set()
        self._made: dict[str, Queue] = {}
        self._messages: list[tuple[str, str, bytes, bool]] = []
        self._over: list[str] = []
        self._asking = ""  # with this tag
        self._ask_again: Callable[[], object] = _nothing
        tx.on_cancel = self._cancelled

    def take(self, locks: Iterable[str]) -> None:
        """Hold these locks until the end. All of them come after those that are held already, by name.

        Raises:
            LockTaken: somebody else has one of them for too long.
        """
        for lock in sorted(set(locks) - self._locks.keys()):
            token = self._channel.ask(
                functools.partial(self._ask_for, lock), PATIENCE + self._timeout
            )
            if token is None:
                raise LockTaken(lock)
            self._locks[lock] = token

    def _ask_for(self, lock: str, future: Future[Any]) -> None:
        raw = self._channel.raw
        timer = raw.connection.ioloop.call_later(PATIENCE, lambda: settle(future, None))

        def ask() -> None:
            tag = self._asking = f"machinery.transaction.{next(_tags)}"

            def handed(_: object, method: Any, __: object, ___: object) -> None:
                raw.connection.ioloop.remove_timeout(timer)
                self._asking = ""
                self._tags.add(tag)
                settle(future, (tag, method.delivery_tag))

            raw.basic_consume(lock, handed, consumer_tag=tag, callback=_nothing)

        self._ask_again = ask
        ask()

    def _cancelled(self, tag: str) -> None:
        """The server has ended a subscription by itself, since the queue's process has ended: who waits, asks again.

        Who had the lock has it no more; its channel is closed, so that it writes nothing.
        """
        if tag in self._tags and self._channel.raw.is_open:
            self._channel.raw.close()
        elif tag == self._asking:
            self._ask_again()

    # Reading

    def read(self, places: Iterable[Queue]) -> None:
        """Take what lies in these queues, if they are there."""
        wanted = {place.queue: place for place in places}
        queues = wanted.keys() - self._held.keys() - self._absent
        unknown = queues - self._known
        if unknown:
            self._tx_channel.returned.clear()
            looked_for = [wanted[queue] for queue in unknown]
            self._channel.ask(
                lambda future: self._probe(looked_for, future), self._timeout + EACH * len(unknown)
            )
            self._absent |= self._tx_channel.returned & unknown
        self._held |= self._tx_channel.reader.all(sorted(queues - self._absent), self._timeout)

    def _probe(self, places: Iterable[Queue], future: Future[Any]) -> None:
        raw = self._channel.raw
        for place in places:
            if place.is_ours:
                raw.basic_publish("", place.queue, b"", _PROBE, mandatory=True)
            else:
                raw.queue_declare(**_declaration(place))  # without a callback nothing is waited for
        raw.tx_commit(lambda _: settle(future, None))

    def held(self, place: Queue) -> Sequence[UnsettledMessage]:
        """Return the messages that were read of a queue."""
        return self._held.get(place.queue, ())

    def count(self, place: Queue) -> int:
        """How many messages are in a queue that was not read. It is made if it is not there."""
        frame = self._channel.rpc("queue_declare", timeout=self._timeout, **_declaration(place))
        self._known.add(place.queue)
        return int(frame.method.message_count)

    # Writing: true when the transaction ends

    def put(self, place: Queue, body: bytes) -> None:
        """Append a message. The queue is made if it is not there."""
        self.make(place)
        self._messages.append(("", place.queue, body, True))

    def make(self, place: Queue) -> None:
        """Let the queue be there."""
        if place.queue not in self._held and place.queue not in self._known:
            self._made[place.queue] = place

    def tell(self, exchange: str, key: str, body: bytes) -> None:
        """Send a message to whoever listens."""
        self._messages.append((exchange, key, body, False))

    def drop(self, held: Iterable[UnsettledMessage]) -> None:
        """Drop messages: they do not go back."""
        self._dropped.update(one.tag for one in held)

    def delete(self, place: Queue) -> None:
        """The queue is not needed any more, once all the rest is true."""
        if not place.is_ours:
            self.count(place)
        self._over.append(place.queue)

    def end(self, then: Callable[[], object]) -> None:
        """Write all of it, and give the locks back; `then` is called in the link's thread when the channel is free."""
        self._tx_channel.returned.clear()
        wait = self._timeout + EACH * (len(self._messages) + len(self._made) + len(self._held))
        self._channel.ask(lambda future: self._write(future, then), wait)
        gone = self._tx_channel.returned & {queue for _, queue, _, must in self._messages if must}
        if gone:
            raise BackendUnavailable(
                f"RabbitMQ: queue {min(gone)!r} was deleted while it was written to"
            )

    def _write(self, future: Future[Any], then: Callable[[], object]) -> None:
        raw = self._channel.raw
        for place in self._made.values():
            raw.queue_declare(**_declaration(place))  # without a callback nothing is waited for
        for exchange, key, body, must in self._messages:
            raw.basic_publish(exchange, key, body, _PROPERTIES, mandatory=must)
        tags = [one.tag for held in self._held.values() for one in held]
        for tag in tags:
            if tag in self._dropped:
                raw.basic_ack(tag)
            else:
                raw.basic_nack(tag, requeue=True)

        def written(_: object = None) -> None:
            for queue in self._over:
                raw.queue_delete(queue)
            self._release(then)
            settle(future, None)

        if self._messages or tags:
            raw.tx_commit(written)
        else:
            written()

    def _release(self, then: Callable[[], object]) -> None:
        """Unsubscribe first: else the tokens would come to us again."""
        raw = self._channel.raw
        self._tags.clear()
        if not self._locks:
            then()
            return
        for tag, _ in self._locks.values():
            raw.basic_cancel(tag, callback=_nothing)
        for _, token in self._locks.values():
            raw.basic_nack(token, requeue=True)
        raw.tx_commit(lambda _: then())


class QueueTransactions:
    """A connection for transactions, made when it is needed. May be used from any thread."""

    def __init__(self, driver: AmqpDriver, declare: Callable[[Channel], object]) -> None:
        """`declare` is called for each new connection, with a channel that is closed then."""
        self.driver = driver
        self._declare = declare
        self._lock = ForkLock()
        self._link: AmqpConnection | None = None
        self._free: deque[TxChannel] = deque()
        self._pid = os.getpid()

    @contextmanager
    def transaction(self, locks: Iterable[str], doing: str) -> Iterator[QueueTransaction]:
        """A transaction, whose writes are true when the `with` has ended without an error.

        Raises:
            QueueTransactionLost: it may have been carried out.
            BackendUnavailable, StoreUnusable, QueueMoved: it was not.
        """
        with self.translated(doing):
            tx = self._tx_channel(doing)
            transaction = QueueTransaction(tx, self.driver.timeout)
            try:
                self._take(transaction, locks)
                yield transaction
                transaction.end(lambda: self._free.append(tx))
            except LockTaken as error:
                tx.channel.close()
                with self.visit() as channel:
                    # It may have no token: somebody has purged it.
                    declare_lock(channel, error.lock, self.driver.timeout, is_stuck=True)
                raise BackendUnavailable(
                    f"RabbitMQ at {self.driver.place}: {doing}: others have held {error.lock!r} for {PATIENCE:g} s"
                ) from error
            except BaseException:
                tx.channel.close()  # all that it has in its hands goes back
                raise

    def _take(self, transaction: QueueTransaction, locks: Iterable[str]) -> None:
        wanted = list(locks)
        try:
            transaction.take(wanted)
        except ChannelLost as error:
            if error.code == NOT_FOUND:  # somebody has deleted one
                with self.visit() as channel:
                    for lock in wanted:
                        declare_lock(channel, lock, self.driver.timeout)
            raise

    @contextmanager
    def visit(self) -> Iterator[Channel]:
        """A channel for something else than a transaction. Raises as `link`."""
        channel = self.link().channel(self.driver.timeout)
        yield channel
        channel.close()

    def _tx_channel(self, doing: str) -> TxChannel:
        link = self.link()
        if not link.wait_unblocked(self.driver.timeout):
            raise BackendUnavailable(
                f"RabbitMQ at {self.driver.place}: {doing}: it takes no messages now: {link.blocked}"
            )
        while True:
            try:
                tx = self._free.pop()
            except IndexError:
                return TxChannel(link, self.driver.timeout)
            if tx.channel.is_open:
                return tx

    def link(self) -> AmqpConnection:
        """The connection, with all that transactions need declared on its server.

        Raises:
            BackendUnavailable, StoreUnusable, and what `translated` translates.
        """
        with self._lock:
            if self._link is None or not self._link.is_open:
                if self._link is not None and self._pid == os.getpid():
                    self._link.close()
                self._free.clear()
                self._link, self._pid = None, os.getpid()
                link = self.driver.connect("results")
                try:
                    channel = link.channel(self.driver.timeout)
                    self._declare(channel)
                    channel.close()
                except BaseException:
                    link.close()
                    raise
                self._link = link
            return self._link

    @contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        """QueueTransaction the errors of links and of pika into ours."""
        where = f"RabbitMQ at {self.driver.place}: {doing}"
        try:
            yield
        except BrokerUnavailable as error:
            raise BackendUnavailable(str(error)) from error
        except ChannelLost as error:
            if error.code == NOT_FOUND:
                raise QueueMoved(error.text) from error
            if theirs := queue_of_others(error):
                hint = "it is not ours, and was left as it is (choose another UUID)"
                raise NameRefused(
                    f"{where}: queue {theirs!r}: {hint}: {error.text}", theirs
                ) from error
            if largest_of(error) is not None:
                raise for_good(
                    StoreUnusable(
                        f"{where}: {error.text} (return less, or keep large results elsewhere)"
                    )
                ) from error
            hint = (
                " (results_expire_in must be the same in every program that stores results here, in Go and in Python)"
                if error.code == OTHER_ARGUMENTS
                else ""
            )
            raise StoreUnusable(f"{where}: {error.text}{hint}") from error
        except (AmqpConnectionLost, AMQPError) as error:
            raise QueueTransactionLost(f"{where}: {error}") from error

    def close(self) -> None:
        """May be called twice; the next use connects again."""
        with self._lock:
            link, self._link = self._link, None
            self._free.clear()
        if link is not None:
            link.close()


def queue_of_others(error: ChannelLost) -> str:
    """The queue that the server does not let us have, since somebody else has made it, or may not be had; "" if it is our own."""
    found = _QUEUE.search(error.text) if error.code in REFUSALS else None
    if found is None or found[1].startswith("machinery.") or is_made(found[1]):
        return ""
    # One with another expiry is a result's: `results_expire_in` differs.
    is_result = "inequivalent arg 'x-" in error.text and "but current is none" not in error.text
    return "" if is_result else found[1]


def declare_lock(channel: Channel, lock: str, timeout: float, *, is_stuck: bool = False) -> None:
    """Let there be a lock of this name, with a token in it if nobody has or wants one; also then if it `is_stuck`.

    A token that comes while consumers change can end the queue's process (RabbitMQ 3.10, a match of `BQ:is_empty`), so none
    is put beside consumers without need.
    """
    found = channel.rpc(
        "queue_declare", queue=lock, durable=True, arguments=dict(LOCK_ARGUMENTS), timeout=timeout
    ).method
    if not found.message_count and (is_stuck or not found.consumer_count):
        channel.link.tell(lambda: put_token(channel, lock))


def put_token(channel: Channel, lock: str) -> None:
    """Lay a token into a lock. In the link's thread."""
    channel.raw.basic_publish("", lock, b"", _PROPERTIES)


def _declaration(place: Queue) -> dict[str, Any]:
    return {
        "queue": place.queue,
        "durable": place.durable,
        "auto_delete": place.auto_delete,
        "arguments": dict(place.arguments),
    }


def _nothing(*_: object) -> None:
    pass
