"""Messages, workers and dead letters as rows: written once for stores of rows with messages.

messages       each with its `Message` as msgpack
hold           of each consumer, with its `WorkerInfo`
queue, name    a queue that ever had a message or a consumer
closed, name   a queue that is paused
token          of a put that was carried out, for TOKEN_LIFE
dead           a dead letter; listed by its queue
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import ClassVar, NoReturn

import msgspec

from machinery_py.bounds import PURGE_STEP, TOKEN_LIFE
from machinery_py.brokers.base import (
    RACED,
    UNLIMITED,
    WAITING,
    Broker,
    BrokerFeatures,
    Consumer,
    DeadLetter,
    Delivery,
    DeliveryEnd,
    Disposal,
    Fate,
    Message,
    QueueStats,
    WorkerInfo,
)
from machinery_py.brokers.entries import RETRY_MARK, SET_BACK, ClockWatch, new_letter, new_worker
from machinery_py.brokers.queue_limits import QueueLimit
from machinery_py.brokers.rows_topics import RowsSubscription, append_records
from machinery_py.brokers.topics import Subscription
from machinery_py.clock import micros, moment_of
from machinery_py.fences import FenceSequence
from machinery_py.rows.contract import PAGE, Committed, Facts, Key, NoRoom, Write
from machinery_py.rows.draft import read
from machinery_py.rows.messages import (
    CLOSED,
    Claimed,
    ClaimReceipt,
    Claims,
    Hold,
    MessageRows,
    MessageStep,
    Place,
    Push,
    QueueCount,
    Room,
    StoredMessage,
    queue_topic,
    waiting_at,
)
from machinery_py.values.malformed import MALFORMED
from machinery_py.wire.bodies import MSGPACK, Bodies, encode

LEASE = 10.0  # seconds without a beat until a consumer is given up
QUEUE, TOKEN, DEAD = "queue", "token", "dead"  # kinds

_TOKEN = Write(body=b"", expires_in=round(TOKEN_LIFE * 1e6))
NOTHING = Claims([], None)

_decode_message = msgspec.msgpack.Decoder(Message).decode
_decode_worker = msgspec.msgpack.Decoder(WorkerInfo).decode


class RowsBroker(Broker):
    """Rows of a store, which belongs to whoever made it."""

    features: BrokerFeatures = BrokerFeatures(
        name="rows",
        topics=True,
        keeps_topics=True,
        exact_limits=True,
        fair=True,
        forgets_queues=True,
    )
    bodies: ClassVar[Bodies] = MSGPACK  # of dead letters

    def __init__(self, rows: MessageRows, *, lease: float = LEASE) -> None:
        self.rows = rows
        self.lease = lease
        self._queues: set[str] = set()  # known to be there
        self._moments = FenceSequence(lambda: micros(rows.clock.now()))
        self._watch = ClockWatch(rows.clock)
        self._decode_letter: Callable[[bytes], DeadLetter] = self.bodies.decoder(DeadLetter)

    def is_entered(self) -> bool:
        return self.rows.is_entered()

    # Sending

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        return self.put_within(messages, (), token=token)

    def put_within(
        self, messages: Sequence[Message], limits: Sequence[QueueLimit], *, token: str
    ) -> bool:
        self.name_queues(message.queue for message in messages)
        step = MessageStep()
        self.plan_put(messages, step, limits=limits, token=token)
        [done] = self.rows.commit([step])
        if isinstance(done, NoRoom):
            raise_full(limits, done)
        return isinstance(done, Committed)

    def plan_put(
        self,
        messages: Iterable[Message],
        step: MessageStep,
        *,
        limits: Sequence[QueueLimit] = (),
        token: str = "",
    ) -> None:
        """Add messages to a step, which is Repeated if the token was used.

        `name_queues` comes first.
        """
        if token:
            step.once = Key(TOKEN, token)
            step.write[step.once] = _TOKEN
        if limits:
            step.room = tuple(map(_room, limits))
        step.pushes += tuple(map(push_of, messages))

    def was_put(self, token: str) -> bool:
        return bool(token) and self.rows.read([Key(TOKEN, token)]) != [None]

    def name_queues(self, queues: Iterable[str]) -> None:
        """Remember queues, before they get a message or a consumer."""
        new = [queue for queue in queues if queue not in self._queues]
        if new:
            create = {Key(QUEUE, queue): Write(body=b"") for queue in new}
            self.rows.commit([MessageStep(create=create)])
            self._queues.update(new)

    def waiting(self, queue: str) -> int:
        return self.rows.count_waiting(queue)

    # Consuming

    def consume(self, queues: Sequence[str], *, worker: str) -> RowsConsumer:
        return RowsConsumer(self, tuple(queues), worker)

    def plan_hold(self, delivery: Delivery, session: str, step: MessageStep) -> None:
        """Let the step be Gone unless this consumer holds the delivery."""
        receipt = receipt_of(delivery)
        step.held = (msgspec.structs.replace(receipt, hold=session),)

    def plan_end(
        self, disposal: DeliveryEnd, delivery: Delivery, session: str, step: MessageStep
    ) -> None:
        """Add the end of a delivery, as `plan_hold`."""
        receipt = receipt_of(delivery)
        if receipt.hold != session:
            self.plan_hold(delivery, session, step)
        step.takes = (receipt,)
        match disposal.fate:
            case Fate.DONE:
                pass
            case Fate.BACK:
                back = Push(queue=held_in(delivery).queue, id=receipt.id, place=Place.SAME)
                step.pushes = (back,)
            case Fate.LATER:
                message = held_in(delivery)
                waited, raced = disposal.reason in (WAITING, RACED), disposal.reason == RACED
                message = msgspec.structs.replace(
                    message,
                    eta=disposal.eta,
                    parks=message.parks + (not waited),
                    races=message.races + raced,
                )
                place = Place.WAITED if waited else Place.LAST
                step.pushes = (push_of(message, id=receipt.id, place=place),)
            case Fate.DEAD:
                letter = new_letter(
                    held_in(delivery),
                    self.rows.clock.now(),
                    reason=disposal.reason,
                    error=disposal.error,
                    uuid=disposal.uuid,
                    name=disposal.name,
                    strikes=delivery.strikes,
                )
                self._keep_dead(letter, step)

    # House-keeping

    def tend(self) -> float:
        if self._watch.was_set_back():
            self._count_again()
        self.rows.reap()
        return self.next_due()

    def next_due(self) -> float:
        """Queue what is due; return the seconds until there is more to do."""
        return self.seconds_until(self.rows.promote())

    def seconds_until(self, due: int | None) -> float:
        """Return how long to sleep if the next message is due then."""
        quarter = self.lease / 4
        if due is None:
            return quarter
        return min(quarter, max(0.0, (due - micros(self.rows.clock.now())) / 1e6))

    def _count_again(self) -> None:
        """Let delays of retries that began in the future, by a clock that was ahead, begin now."""
        now = micros(self.rows.clock.now())
        steps: list[MessageStep] = []
        since = now + round(SET_BACK * 1e6)
        for one in self._all(None, since=since):
            ahead = one.put_at - now
            message = _message_in(one)
            if RETRY_MARK in message.body and message.eta is not None:
                eta = message.eta - dt.timedelta(microseconds=ahead)
                put = push_of(msgspec.structs.replace(message, eta=eta))
                steps.append(MessageStep(takes=(waiting_at(one.id),), pushes=(put,)))
        self.rows.commit(steps)

    # Looking

    def pending(self, queue: str, limit: int) -> list[Message]:
        return [_message_in(one) for one in self._all(queue, limit)]

    def delayed(self, limit: int) -> list[Message]:
        return [_message_in(one) for one in self._all(None, limit)]

    def _all(
        self, queue: str | None, limit: int = UNLIMITED, *, since: int = 0
    ) -> Iterator[StoredMessage]:
        """Yield what waits in a queue, or all that is late, page by page."""
        pages = self._pages(queue, min(limit, PAGE), since=since)
        return islice(chain.from_iterable(pages), limit)

    def _pages(
        self, queue: str | None, items: int, *, since: int = 0
    ) -> Iterator[list[StoredMessage]]:
        after: StoredMessage | None = None
        while page := self.rows.messages(queue, since=since, after=after, items=items):
            yield page
            after = page[-1]

    def stats(self) -> list[QueueStats]:
        counts = self.rows.count_messages()
        dead = {queue: number for (queue, _), number in self.rows.count(DEAD).items()}
        paused = set(self.rows.ids(CLOSED, items=UNLIMITED))
        # A process that knew a queue when another one forgot it does not name it again.
        served = {queue for worker in self.workers() for queue in worker.queues}
        names = {*self.rows.ids(QUEUE, items=UNLIMITED), *counts, *dead, *paused, *served}
        found: list[QueueStats] = []
        for queue in sorted(names):
            count = counts.get(queue, QueueCount())
            found.append(
                QueueStats(
                    queue=queue,
                    waiting=count.waiting,
                    running=count.held,
                    delayed=count.late,
                    dead=dead.get(queue, 0),
                    oldest_at=None if count.oldest_at is None else moment_of(count.oldest_at),
                    paused=queue in paused,
                )
            )
        return found

    def paused(self) -> frozenset[str]:
        return frozenset(self.rows.ids(CLOSED, items=UNLIMITED))

    def workers(self) -> list[WorkerInfo]:
        return [
            msgspec.structs.replace(
                _decode_worker(one.body),
                session=one.id,
                beat_at=moment_of(one.beat_at),
                holding=one.holding,
                stalled=one.stalled,
            )
            for one in self.rows.holds()
        ]

    # Changing queues

    def purge(self, queue: str) -> int:
        return sum(map(len, self.purge_each(queue, lambda _: None)))

    def purge_each(
        self, queue: str, before: Callable[[Sequence[Message]], object]
    ) -> Iterator[Sequence[Message]]:
        newest = self.rows.newest_id()  # what `before` sends, error callbacks perhaps, is newer
        for source in (None, queue):  # what is late first: if it gets due meanwhile it is found yet
            for page in self._pages(source, PURGE_STEP):
                some = [one for one in page if one.queue == queue and one.id <= newest]
                messages = [_message_in(one) for one in some]
                if not messages:
                    continue
                before(messages)
                done = self.rows.commit([MessageStep(takes=(waiting_at(one.id),)) for one in some])
                yield [
                    message
                    for message, one in zip(messages, done, strict=True)
                    if isinstance(one, Committed)
                ]

    def pause(self, queue: str) -> None:
        self.name_queues([queue])
        self.rows.commit([MessageStep(create={Key(CLOSED, queue): Write(body=b"")})])

    def resume(self, queue: str) -> None:
        self.rows.commit(
            [MessageStep(write={Key(CLOSED, queue): None}, tell=(queue_topic(queue),))]
        )

    def forget_queue(self, queue: str) -> bool:
        for one in self.stats():
            if one.queue == queue and (
                one.waiting or one.running or one.delayed or one.dead or one.paused
            ):
                return False
        if any(queue in worker.queues for worker in self.workers()):
            return False
        # The name is all that goes: what was sent meanwhile shows it again.
        self.rows.commit([MessageStep(write={Key(QUEUE, queue): None})])
        self._queues.discard(queue)
        return True

    # Topics

    def append_records(self, topic: str, records: Sequence[bytes], ttl: float) -> None:
        append_records(self.rows, topic, records, ttl)

    def subscribe(self, topic: str, *, since: float = 0.0) -> Subscription:
        return RowsSubscription(self.rows, topic, since)

    # Dead letters

    def _keep_dead(self, letter: DeadLetter, step: MessageStep) -> None:
        facts = Facts(at=self._moments.next(), name=letter.queue)
        step.write[Key(DEAD, letter.id)] = Write(body=self.bodies.encode(letter), facts=facts)

    def dead_letters(self, *, limit: int, queue: str = "") -> list[DeadLetter]:
        found: list[DeadLetter] = []
        after = None
        while len(found) < limit and (
            page := self.rows.list(
                DEAD, name=queue or None, after=after, items=min(PAGE, limit - len(found))
            )
        ):
            found += [self._decode_letter(row.body) for row in page]
            after = page[-1]
        return found

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        now = self.rows.clock.now()
        letter = new_letter(message, now, reason=reason, error=error, queue=queue)
        step = MessageStep()
        self.name_queues([queue])
        self._keep_dead(letter, step)
        self.rows.commit([step])

    def take_dead(self, ids: Sequence[str]) -> list[DeadLetter]:
        found = read(self.rows, [Key(DEAD, id) for id in ids])
        there = [row for row in found.values() if row is not None]
        steps = [MessageStep(expect={row.key: row.version}, write={row.key: None}) for row in there]
        done = self.rows.commit(steps)
        return [
            self._decode_letter(row.body)
            for row, one in zip(there, done, strict=True)
            if isinstance(one, Committed)
        ]


class RowsConsumer(Consumer):
    """A hold, and a listener that ends its waiting."""

    _lost: int | None

    def __init__(self, broker: RowsBroker, queues: tuple[str, ...], worker: str) -> None:
        self._broker = broker
        self._queues = queues
        self._worker = worker
        self._listener = broker.rows.listen()
        self._woken = self._closed = False
        # Not begun anew by a session that a beat begins beside a claim: its reply may be lost, too.
        self._claims, self._lost = 0, None
        self._start_session()

    def _start_session(self) -> None:
        broker = self._broker
        broker.name_queues(self._queues)
        self._info = new_worker(self._worker, self._queues, broker.rows.clock.now())
        self._hold: Hold = broker.rows.open_hold(encode(self._info), lease=broker.lease)
        self.session: str = self._hold.id

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        claims = self._claim(limit, order)
        if not claims.found and timeout > 0 and not self._woken and not self._closed:
            topics = list(map(queue_topic, self._queues))
            self._listener.watch(topics)
            try:
                claims = self._claim(limit, order)  # what came before has not been told
                deadline = time.monotonic() + timeout
                while not claims.found and not self._woken and not self._closed:
                    if (left := deadline - time.monotonic()) <= 0:
                        break
                    self._listener.wait(min(left, self._broker.seconds_until(claims.next_due)))
                    claims = self._claim(limit, order)
            finally:
                self._listener.unwatch(topics)
        self._woken = False
        self.none_revoked: bool = claims.none_revoked
        return [self._delivery(one) for one in claims.found]

    def _delivery(self, claimed: Claimed) -> RowsDelivery:
        message = _message_in(claimed)
        return RowsDelivery(
            body=message.body,
            queue=claimed.queue,
            receipt=claimed.receipt,
            count=claimed.receipt.count,
            fence=claimed.fence,
            strikes=claimed.strikes,
            parks=message.parks,
            races=message.races,
            priority=message.priority,
            sent_at=moment_of(claimed.put_at) if self.is_timed else None,
            message=message,
        )

    def _claim(self, limit: int, order: Sequence[str]) -> Claims:
        if self._closed:
            return NOTHING
        served = self._queues
        queues = [queue for queue in order if queue in served] or served
        self._claims += 1
        if self._lost is None:
            self._lost = self._claims  # until the reply is here
            claims = self._hold.claim(queues, limit, number=self._claims)
        else:
            claims = self._hold.claim(queues, limit, number=self._claims, lost=self._lost)
        self._lost = None
        return claims

    def serve(self, queues: Sequence[str]) -> None:
        self._broker.name_queues(queues)
        self._queues = tuple(queues)
        self._info = msgspec.structs.replace(self._info, queues=self._queues)
        self._hold.write(encode(self._info))
        self.wake()

    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        steps: list[MessageStep] = []
        for disposal in disposals:
            step = MessageStep()
            self._broker.plan_end(disposal, disposal.delivery, self.session, step)
            steps.append(step)
        return [isinstance(one, Committed) for one in self._broker.rows.commit(steps)]

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        return self._hold.has(list(map(receipt_of, deliveries)))

    def run_begins(self, delivery: Delivery) -> None:
        if isinstance(receipt := delivery.receipt, ClaimReceipt):
            self._hold.begin_run(receipt)

    def run_ends(self, delivery: Delivery) -> None:
        if isinstance(receipt := delivery.receipt, ClaimReceipt):
            self._hold.end_run(receipt)

    def beat(self) -> bool:
        if self._closed or self._hold.beat():
            return True
        self._start_session()
        return False

    def wake(self) -> None:
        self._woken = True
        self._listener.wake()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._listener.wake()
        try:
            self._hold.end()
        finally:
            self._listener.close()


def _message_in(stored: StoredMessage | Claimed) -> Message:
    """Return the message; bytes that no broker of ours has put become the body of one.

    So a worker makes a dead letter of them. An error here would end each worker that claims them.
    """
    try:
        return _decode_message(stored.body)
    except MALFORMED:
        return Message(uuid="", name="", queue=stored.queue, body=stored.body)


def push_of(message: Message, *, id: int | None = None, place: Place = Place.LAST) -> Push:
    """Return a message as the store keeps it."""
    return Push(
        queue=message.queue,
        id=id,
        place=place,
        body=encode(message),
        priority=message.priority,
        tenant=message.tenant,
        due=0 if message.eta is None else micros(message.eta),
    )


def raise_full(limits: Sequence[QueueLimit], found: NoRoom) -> NoReturn:
    """Raise QueueFull: there was no room for a put."""
    limit = next(one for one in limits if one.queue == found.queue)
    raise limit.passed(found.waiting)


class RowsDelivery(Delivery, frozen=True, kw_only=True, gc=False):
    """A delivery with the message as it was put, for the end that it may come to."""

    message: Message


def held_in(delivery: Delivery) -> Message:
    """Return the message of a delivery of this broker."""
    assert isinstance(delivery, RowsDelivery)
    return delivery.message


def receipt_of(delivery: Delivery) -> ClaimReceipt:
    """Return the delivery's receipt; one of another store gives a receipt that finds nothing."""
    receipt = delivery.receipt
    return receipt if isinstance(receipt, ClaimReceipt) else ClaimReceipt("", 0, 0)


def _room(limit: QueueLimit) -> Room:
    return Room(queue=limit.queue, limit=limit.limit, adds=limit.adds)
