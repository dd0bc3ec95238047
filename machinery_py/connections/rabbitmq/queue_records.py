"""Transactional read-modify-write of RabbitMQ queues, serialised by lock queues.

    transactions = QueueTransactions(driver, declare)
    with transactions.transaction(["lock.3"], "storing a state") as transaction:
        transaction.read([queue])
        transaction.put(queue, b"new")
        transaction.drop(transaction.held(queue))

What makes that safe:

- **A lock** is a queue with a single active consumer and a token in it. The consumer that is
  handed the token has the lock; the others are handed it in turn when it is given back, or when
  the holder's connection ends. A spare token does no harm: it goes to the one consumer that is
  active. Locks are taken in the order of their names.
- **A read** takes all messages of a queue and holds them. The end of the transaction, or of the
  connection, puts back what was not dropped, in its place.
- **The commit** is one AMQP transaction: all that was put and all that was dropped, or nothing.
  It is on the channel that holds the locks, so a process that lost its connection, and with it
  the lock, can write nothing.

A read makes no queue: a message that lives for no time at all is sent to it first, and comes back
if there is none. Where others may have a queue of that name, it is declared instead: the server
refuses that if it was made with other arguments, and ends the transaction before anything is read
of it or written to it.

Limits: a transaction that spans queues is not one step for a server that dies in the middle of
it. In a cluster a lock is gone while the node is down that its queue lives on. What is committed
in the very moment in which a lock's queue crashes stays.
"""

from __future__ import annotations

import functools
import itertools
import math
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
from machinery_py.connections.rabbitmq.client import NOT_FOUND, AmqpDriver, largest_of
from machinery_py.connections.rabbitmq.io_thread import (
    AmqpConnection,
    AmqpConnectionLost,
    Channel,
    ChannelLost,
    resolve,
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
from machinery_py.threads import INSIDE

PATIENCE = 15.0  # seconds to wait for a lock
OTHER_ARGUMENTS = 406
REFUSALS = (403, 405, OTHER_ARGUMENTS)  # no right to it; another's alone; made in another way
_QUEUE = re.compile(r"queue '(.*)' in vhost")

#: Of a lock queue: consumers get it one after the other, and spare tokens do not pile up.
LOCK_ARGUMENTS: dict[str, Any] = {
    "x-queue-type": "classic",
    "x-single-active-consumer": True,
    "x-max-length": 1,
}
#: Of our queues that stay. The server's default type may know no messages of no lifetime.
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

    def declaration(self) -> dict[str, Any]:
        return {
            "queue": self.queue,
            "durable": self.durable,
            "auto_delete": self.auto_delete,
            "arguments": dict(self.arguments),
        }


class QueueMoved(Exception):
    """A queue was deleted during a transaction, which has written nothing."""


class QueueTransactionLost(BackendUnavailable):
    """The connection ended in the middle of a transaction, which may have been carried out."""


class LockTaken(Exception):
    """Others have held a lock for too long."""

    def __init__(self, lock: str) -> None:
        self.lock = lock
        super().__init__(lock)


class QueueTransaction:
    """Reads and writes of one thread under its locks. `QueueTransactions.transaction` ends it.

    Its channel serves many transactions, one after the other: `reset` begins the next one.
    """

    def __init__(self, link: AmqpConnection, timeout: float) -> None:
        self._channel = link.channel(timeout)
        self._reader = QueueReader(self._channel)
        self._timeout = timeout
        self._returned: set[str] = set()  # queues that are not there
        raw = self._channel.raw
        raw.add_on_cancel_callback(lambda frame: self._on_cancelled(frame.method.consumer_tag))
        raw.add_on_return_callback(
            lambda _, method, __, ___: self._returned.add(method.routing_key)
        )
        self._channel.rpc("basic_qos", prefetch_count=1, timeout=timeout)  # one token for each lock
        self._channel.rpc("tx_select", timeout=timeout)
        self.reset()

    def reset(self) -> None:
        self._locks: dict[str, tuple[str, int]] = {}  # → the tags of the consumer and of the token
        self._consumers: set[str] = set()  # that hold tokens; touched in the I/O thread alone
        self._waiting_tag = ""  # of the consumer that waits for a token
        self._wait_again: Callable[[], object] = _ignore
        self._held: dict[str, list[UnsettledMessage]] = {}
        self._known: set[str] = set()  # these queues are there
        self._absent: set[str] = set()
        self._dropped: set[int] = set()
        self._new_queues: dict[str, Queue] = {}
        self._messages: list[tuple[str, bytes, pika.BasicProperties]] = []  # queue, …
        self._deleted: list[str] = []

    @property
    def is_open(self) -> bool:
        return self._channel.is_open

    def close(self) -> None:
        """Put back all that it holds."""
        self._channel.close()

    # Locks

    def lock(self, locks: Iterable[str]) -> None:
        """Hold these locks until the end. Their names come after those of locks that are held.

        Raises:
            LockTaken: somebody else has one of them for too long.
        """
        for lock in sorted(set(locks) - self._locks.keys()):
            wait = functools.partial(self._wait_for_token, lock)
            token = self._channel.ask(wait, PATIENCE + self._timeout)
            if token is None:
                raise LockTaken(lock)
            self._locks[lock] = token

    def _wait_for_token(self, lock: str, future: Future[Any]) -> None:
        raw = self._channel.raw
        timer = raw.connection.ioloop.call_later(PATIENCE, lambda: resolve(future, None))

        def wait() -> None:
            tag = self._waiting_tag = f"machinery.transaction.{next(_tags)}"

            def handed(_: object, method: Any, __: object, ___: object) -> None:
                raw.connection.ioloop.remove_timeout(timer)
                self._waiting_tag = ""
                self._consumers.add(tag)
                resolve(future, (tag, method.delivery_tag))

            raw.basic_consume(lock, handed, consumer_tag=tag, callback=_ignore)

        self._wait_again = wait
        wait()

    def _on_cancelled(self, tag: str) -> None:
        """The server has ended a subscription by itself, since the queue's process has ended.

        A consumer that held the token has the lock no more; its channel is closed, so that it
        writes nothing. One that waits subscribes again.
        """
        if tag in self._consumers and self._channel.raw.is_open:
            self._channel.raw.close()
        elif tag == self._waiting_tag:
            self._wait_again()

    # Reading

    def read(self, queues: Iterable[Queue]) -> None:
        """Take the messages of these queues, if they are there."""
        wanted = {one.queue: one for one in queues}
        names = wanted.keys() - self._held.keys() - self._absent
        unknown = names - self._known
        if unknown:
            self._returned.clear()
            probe = functools.partial(self._probe, [wanted[name] for name in unknown])
            self._channel.ask(probe, self._timeout + EACH * len(unknown))
            self._absent |= self._returned & unknown
        self._held |= self._reader.all(sorted(names - self._absent), self._timeout)

    def _probe(self, queues: Iterable[Queue], future: Future[Any]) -> None:
        raw = self._channel.raw
        for one in queues:
            if one.is_ours:
                raw.basic_publish("", one.queue, b"", _PROBE, mandatory=True)
            else:
                raw.queue_declare(**one.declaration())  # no callback: not waited for
        raw.tx_commit(lambda _: resolve(future, None))

    def held(self, queue: Queue) -> Sequence[UnsettledMessage]:
        """Return the messages that were read of a queue."""
        return self._held.get(queue.queue, ())

    def count(self, queue: Queue) -> int:
        """Return how many messages are in a queue that was not read. It is declared."""
        frame = self._channel.rpc("queue_declare", timeout=self._timeout, **queue.declaration())
        self._known.add(queue.queue)
        return int(frame.method.message_count)

    # Writing: true when the transaction ends

    def put(self, queue: Queue, body: bytes, life: float | None = None) -> None:
        """Append a message. The queue is declared if it is not there.

        Args:
            life: seconds, less than the queue keeps all of its messages; None: as long.
        """
        properties = _PROPERTIES
        if life is not None:
            properties = pika.BasicProperties(
                content_type="application/json",
                delivery_mode=2,
                expiration=str(math.ceil(life * 1000)),
            )
        self.declare(queue)
        self._messages.append((queue.queue, body, properties))

    def replace(self, queue: Queue, body: bytes, life: float | None = None) -> None:
        """Put a message in place of those that were read. `life`: as for `put`."""
        self.drop(self.held(queue))
        self.put(queue, body, life)

    def declare(self, queue: Queue) -> None:
        if queue.queue not in self._held and queue.queue not in self._known:
            self._new_queues[queue.queue] = queue

    def drop(self, held: Iterable[UnsettledMessage]) -> None:
        """Drop messages: they do not go back."""
        self._dropped.update(one.tag for one in held)

    def delete(self, queue: Queue) -> None:
        """Delete a queue, once the transaction is committed."""
        if not queue.is_ours:
            self.count(queue)
        self._deleted.append(queue.queue)

    def commit(self, then: Callable[[], object]) -> None:
        """Write all of it, give the locks back, and then call `then` in the I/O thread."""
        commit = functools.partial(self._commit, then)
        size = len(self._messages) + len(self._new_queues) + len(self._held)
        gone = self._channel.ask(commit, self._timeout + EACH * size)
        if gone:
            raise BackendUnavailable(
                f"RabbitMQ: queue {min(gone)!r} was deleted while it was written to"
            )

    def _commit(self, then: Callable[[], object], future: Future[Any]) -> None:
        raw, messages = self._channel.raw, self._messages
        self._returned.clear()
        for one in self._new_queues.values():
            raw.queue_declare(**one.declaration())  # no callback: not waited for
        for queue, body, properties in messages:
            raw.basic_publish("", queue, body, properties, mandatory=True)
        tags = [one.tag for held in self._held.values() for one in held]
        for tag in tags:
            if tag in self._dropped:
                raw.basic_ack(tag)
            else:
                raw.basic_nack(tag, requeue=True)

        def committed(_: object = None) -> None:
            for queue in self._deleted:
                raw.queue_delete(queue)
            gone = self._returned & {queue for queue, _, _ in messages}
            self._unlock(then)  # after `then` another thread may use this transaction
            resolve(future, gone)

        if messages or tags:
            raw.tx_commit(committed)
        else:
            committed()

    def _unlock(self, then: Callable[[], object]) -> None:
        """Unsubscribe first: else the tokens would come to us again."""
        raw = self._channel.raw
        self._consumers.clear()
        if not self._locks:
            then()
            return
        for tag, _ in self._locks.values():
            raw.basic_cancel(tag, callback=_ignore)
        for _, token in self._locks.values():
            raw.basic_nack(token, requeue=True)
        raw.tx_commit(lambda _: then())


class QueueTransactions:
    """A connection for transactions, made when it is needed. May be used from any thread."""

    def __init__(self, driver: AmqpDriver, declare: Callable[[Channel], object]) -> None:
        """`declare` is called for each new connection, with a channel that is closed then."""
        self.driver = driver
        self._declare = declare
        self._lock = ForkLock(reentrant=True)
        self._link: AmqpConnection | None = None
        self._free: deque[QueueTransaction] = deque()
        self._pid = os.getpid()

    @contextmanager
    def transaction(self, locks: Iterable[str], doing: str) -> Iterator[QueueTransaction]:
        """A transaction, whose writes are true when the `with` has ended without an error.

        Raises:
            QueueTransactionLost: it may have been carried out.
            BackendUnavailable, StoreUnusable, QueueMoved: it was not.
        """
        with INSIDE, self.translated(doing):  # a second one would wait for what this one holds
            transaction = self._new(doing)
            wanted = list(locks)
            try:
                self._lock_all(transaction, wanted)
                yield transaction
                transaction.commit(lambda: self._free.append(transaction))
            except LockTaken as error:
                transaction.close()
                self._repair([error.lock], is_stuck=True)  # it may be purged: without a token
                raise BackendUnavailable(
                    f"RabbitMQ at {self.driver.place}: {doing}: others have held {error.lock!r}"
                    f" for {PATIENCE:g} s"
                ) from error
            except BaseException:
                transaction.close()
                raise

    def _lock_all(self, transaction: QueueTransaction, locks: Sequence[str]) -> None:
        try:
            transaction.lock(locks)
        except ChannelLost as error:
            if error.code == NOT_FOUND:  # one was deleted
                self._repair(locks)
            raise

    def _repair(self, locks: Iterable[str], *, is_stuck: bool = False) -> None:
        channel = self.link().channel(self.driver.timeout)
        for lock in locks:
            declare_lock(channel, lock, self.driver.timeout, is_stuck=is_stuck)
        channel.close()

    def _new(self, doing: str) -> QueueTransaction:
        link = self.link()
        if not link.wait_unblocked(self.driver.timeout):
            raise BackendUnavailable(
                f"RabbitMQ at {self.driver.place}: {doing}: it takes no messages now: "
                f"{link.blocked}"
            )
        while True:
            try:
                free = self._free.pop()
            except IndexError:
                return QueueTransaction(link, self.driver.timeout)
            if free.is_open:
                free.reset()
                return free

    def is_entered(self) -> bool:
        """Return whether this thread is opening or closing the connection."""
        return self._lock.is_mine()

    def link(self) -> AmqpConnection:
        """Return the connection, with all that transactions need declared on its server.

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
        """Turn the errors of connections and of pika into ours."""
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
                " (results_expire_in must be the same in every program that stores results here,"
                " in Go and in Python)"
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
    """Return the queue that the server refuses us, if it is another's or forbidden; else ""."""
    found = _QUEUE.search(error.text) if error.code in REFUSALS else None
    if found is None or found[1].startswith("machinery.") or is_made(found[1]):
        return ""
    # One with another expiry is a result's: `results_expire_in` differs.
    is_result = "inequivalent arg 'x-" in error.text and "but current is none" not in error.text
    return "" if is_result else found[1]


def declare_lock(channel: Channel, lock: str, timeout: float, *, is_stuck: bool = False) -> None:
    """Declare a lock, and put a token in it if it has no holder and no waiter, or `is_stuck`.

    A token that comes while consumers change can end the queue's process (RabbitMQ 3.10, a match of
    `BQ:is_empty`), so none is put beside consumers without need.
    """
    declaration = Queue(lock, LOCK_ARGUMENTS).declaration()
    found = channel.rpc("queue_declare", timeout=timeout, **declaration).method
    if not found.message_count and (is_stuck or not found.consumer_count):
        channel.link.tell(lambda: channel.raw.basic_publish("", lock, b"", _PROPERTIES))


def _ignore(*_: object) -> None:
    pass
