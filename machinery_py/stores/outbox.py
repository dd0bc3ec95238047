"""Settlement where the messages are in one store and the states in another.

The order of the steps is what makes it safe; each may be the last one before a crash:

    1  backend: the new state, the group arrivals and an outbox, if the epoch is still ours
    2  broker:  the messages of the outbox, with UUIDs that were fixed in step 1
    3  backend: the outbox is cleared, if it is still the one that was published
    4  broker:  the delivery is acknowledged

    crash after   what there is                who goes on
    1             final state, full outbox     the redelivery: `begin` says finished, steps 2 to 4;
                                               the task is not run again
    2             final state, full outbox     the same; the messages are published twice with the
                                               same UUIDs, and `begin` lets one of each be finished
    3             final state, empty outbox    the redelivery is acknowledged

A second message of a task is no redelivery: it is acknowledged; the outbox is left to the first.
An outbox whose delivery never comes back (its broker lost it) is sent by `tend` when it is old.
How tasks are sent is in sending.py.

In step 2 the broker may refuse a message. One refused for good (too large) fails in its place:

    2a  broker:  the message is a dead letter
    2b  backend: its task is FAILURE, with the error callbacks in an outbox of its own; members of
                 chords behind it are failed
    2c           steps 2 and 3 for that outbox; then the others go on

    crash after 2a or 2b: the outbox of step 1 is left; the next try does 2a again, 2b is ALREADY

A message that a full queue refuses is parked in the session: steps 3 and 4 of that settlement wait,
and its delivery stays unacknowledged. Claiming goes on, since a claim makes room in its queue, and
parked messages are tried right after each claim: a chain that fills its own queue still ends.

Limits: if a backend has no conditional changes (see its features), callbacks go out at least once.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from machinery_py.backends.base import (
    ALREADY,
    CONFLICT,
    FENCED,
    SETTLED,
    Backend,
    Begun,
    Change,
    Keeping,
    Verdict,
    outbox_of,
)
from machinery_py.brokers.base import (
    Broker,
    Consumer,
    Delivery,
    Disposal,
    Fate,
    Message,
    mark_of,
)
from machinery_py.clock import Clock
from machinery_py.connections.recent_tokens import RecentTokens
from machinery_py.errors import (
    DecodeError,
    MachineryError,
    NameRefused,
    PublishRefused,
    PublishUnknown,
)
from machinery_py.fences import Fence
from machinery_py.names import REASON, check_message
from machinery_py.receipts import Receipt
from machinery_py.stores.base import (
    AWAY,
    Firing,
    Mark,
    Session,
    Settlement,
    Store,
    Submission,
    change_by,
    change_in,
    change_of,
    disposal_of,
)
from machinery_py.stores.sending import Submitter
from machinery_py.tasks.signature import RunNumber
from machinery_py.texts import get_logger
from machinery_py.wire.signatures import decode_signature

logger = get_logger(__name__)

OUTBOX_AGE = 5.0  # seconds; by then its publisher is dead or in trouble; publishing twice is safe
SWEEP = 100  # old outboxes that are read at once
SWEEPS = 10  # times in one `tend`
WARN_EVERY = 60.0  # seconds between two warnings that a queue is full
MOST_PARKED = 1000  # settlements of a session that wait for room; then it claims one by one

_pack = msgspec.json.Encoder().encode
_unpack = msgspec.json.Decoder(Message).decode


class Outbox(NamedTuple):
    """Messages to be published for `key`. `home`: the queue of their sender's delivery."""

    key: str
    bodies: Sequence[bytes]
    home: str = ""


@dataclass(slots=True)
class Published:
    """Result of step 2: messages that found no room, by key; the last error, if one was refused."""

    left: dict[str, list[Message]] = field(default_factory=dict)
    refused: MachineryError | None = None


class TwoStores(Store):
    """A broker and a backend that know nothing of each other."""

    def __init__(self, broker: Broker, backend: Backend, clock: Clock) -> None:
        self.broker = broker
        self.backend = backend
        self.outbox: Final = outbox_of(backend)
        self.clock = clock
        self._swept = clock.monotonic()
        self._submitter = Submitter(broker, backend, self.outbox, clock)
        self._buried = RecentTokens(clock)  # by step 2a, and their outbox is not cleared yet
        self._waiting = 0  # old outboxes, the first ones, that found no room in this round
        self.parked: set[str] = set()  # outboxes that a session of this process waits to publish

    def submit(self, submission: Submission) -> bool:
        if not submission.riders:
            self._submitter.submit(submission)
            return True
        self.broker.check_limits(submission.limits)
        # A crash before step 2 or 3 leaves the outbox; `tend` publishes it with the same UUIDs.
        change = change_in(submission, [_pack(message) for message in submission.messages])
        if self.backend.apply([change]) != [SETTLED]:
            return False
        self._publish_all(Outbox(change.key, change.outbox))
        return True

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return TwoSession(self, self.broker.consume(queues, worker=worker))

    def fire(self, firing: Firing) -> bool:
        change = change_of(firing, [_pack(message) for message in firing.send])
        if self.backend.apply([change]) != [SETTLED]:
            return False
        self.publish([Outbox(change.key, change.outbox)])  # `tend` publishes what finds no room
        return True

    def publish_left(self, key: str) -> None:
        self._publish_all(Outbox(key, self.outbox.outboxes([key])[0]))

    def _publish_all(self, outbox: Outbox) -> None:
        if (refused := self.publish([outbox]).refused) is not None:
            raise refused

    def publish(self, outboxes: Sequence[Outbox]) -> Published:
        """Steps 2 and 3. An outbox of which a message found no room is kept.

        Raises:
            BrokerUnavailable, BackendUnavailable, PublishUnknown: some of it may be done.
        """
        filled = [one for one in outboxes if one.bodies]
        if not filled:
            return Published()
        sent = [(one.key, one.home, _unpack(body)) for one in filled for body in one.bodies]
        published = self.post(sent)
        self.clear([one for one in filled if one.key not in published.left])
        return published

    def clear(self, outboxes: Sequence[Outbox]) -> None:
        """Step 3."""
        self.outbox.clear_outbox([(one.key, one.bodies) for one in outboxes])
        if self._buried:
            for body in [body for one in outboxes for body in one.bodies]:
                self._buried.forget(str(hash(body)))

    def post(self, messages: Sequence[tuple[str, str, Message]]) -> Published:
        """Step 2, for messages with the key of their outbox and their home."""
        published = Published()
        try:
            self.put([message for _, _, message in messages])
        except (PublishRefused, PublishUnknown) as error:
            if not error.permanent and error.left is None:
                raise
            published.refused = error
            places = range(len(messages)) if error.left is None else sorted(error.left)
            for key, home, message in [messages[place] for place in places]:
                left = self._post_alone(message, home, published) if error.permanent else [message]
                if left:
                    published.left.setdefault(key, []).extend(left)
        return published

    def put(self, messages: Sequence[Message]) -> None:
        """Put messages of outboxes. A repeat may put them twice, unless a store overrides this."""
        self.broker.put(messages, token="")

    def _post_alone(self, message: Message, home: str, published: Published) -> Sequence[Message]:
        """Publish one message; return what finds no room: it, or what follows its failure."""
        try:
            self.put([message])
        except (PublishRefused, PublishUnknown) as error:
            if error.permanent:
                published.refused = error
                return self._fail(message, error, home)
            if error.left is None:
                raise
            return [message]
        return ()

    def _fail(self, message: Message, error: Exception, home: str) -> Sequence[Message]:
        """Steps 2a to 2c; return the messages that find no room."""
        if self.refusal is None:
            raise error
        refusal, name = self.refusal(message, error), str(hash(_pack(message)))
        if self._buried.add(name):  # a repeat of the outbox writes no second dead letter
            try:
                self.give_up(message, error, home or refusal.queue)
            except MachineryError:
                self._buried.forget(name)
                raise
        change = Change(
            key=message.uuid,
            mark=f"refused {refusal.states[0].run}",
            states=refusal.states,
            groups=refusal.groups,
            arrivals=refusal.arrivals,
            outbox=[_pack(one) for one in refusal.send],
        )
        verdict = self._apply_failure(change)
        outbox = change.outbox if verdict is SETTLED else ()
        if verdict is ALREADY:
            [outbox] = self.outbox.outboxes([change.key])
        return self.publish([Outbox(change.key, outbox, home)]).left.get(change.key, ())

    def _apply_failure(self, change: Change) -> Verdict:
        """Store the failure of a task; without its message if the backend refuses that, too."""
        state, *others = change.states
        bare = msgspec.structs.replace(
            change, states=(msgspec.structs.replace(state, message=b""), *others)
        )
        for attempt in (change, bare):
            try:
                return self.backend.apply([attempt])[0]
            except MachineryError as error:
                if not error.permanent and isinstance(error, AWAY):
                    raise
                logger.debug("the failure of task %s cannot be stored: %s", change.key, error)
        logger.error(
            "task %s has failed, and that cannot be stored",
            change.key,
            extra={"task_uuid": change.key},
        )
        return FENCED

    def tend(self) -> float:
        if self.clock.monotonic() - self._swept >= OUTBOX_AGE:
            self._swept = self.clock.monotonic()
            self._sweep()
        return min(self.broker.tend(), self.backend.tend(), OUTBOX_AGE)

    def _sweep(self) -> None:
        """Publish old outboxes; skip those that wait for room until the last one was tried."""
        for _ in range(SWEEPS):
            old = self.outbox.unsent(SWEEP, older_than=OUTBOX_AGE, skip=self._waiting)
            ours = [Outbox(key, bodies) for key, bodies in old if key not in self.parked]
            left = self.publish(ours).left
            self._waiting += len(old) - len(ours) + len(left)
            if len(old) < SWEEP:
                self._waiting = 0
                return


@dataclass(slots=True)
class _Parked:
    """A settlement that waits for room, with the messages still to publish."""

    disposal: Disposal
    outbox: Outbox
    left: Sequence[Message]


class TwoSession(Session):
    """A consumer whose deliveries are begun in the backend before they are handed out."""

    def __init__(self, store: TwoStores, consumer: Consumer) -> None:
        super().__init__(consumer)
        self._store = store
        self._settling = threading.Lock()  # a repeat must see what the first try has left undone
        self._parked: dict[Receipt, _Parked] = {}
        self._warned_at = -math.inf
        features = store.backend.features
        self._knows_outboxes = features.keeps and not features.forgets

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        self._give_back()
        self._resume()
        room = limit if len(self._parked) < MOST_PARKED else 1
        deliveries = self.consumer.receive(room, timeout, order)
        # Right behind the claim: it has made room, which others fill as well.
        if self._resume() and not deliveries:
            deliveries = self.consumer.receive(limit, timeout, order)
        try:
            return self._begin_all(deliveries) if deliveries else deliveries
        except MachineryError:
            self._give_back(deliveries)
            raise

    def _begin_all(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Begin deliveries in the backend; end those of finished tasks, and return the others."""
        known: list[tuple[Delivery, str, RunNumber]] = []
        fresh: list[Delivery] = []
        for delivery in deliveries:
            try:
                signature = decode_signature(delivery.body)
                check_message(
                    signature.routing_key,
                    delivery.queue,
                    name=signature.name,
                    uuid=signature.uuid,
                    group_uuid=signature.group_uuid,
                )
            except (DecodeError, NameRefused):
                fresh.append(delivery)  # the app knows what to do with it
            else:
                known.append((delivery, signature.uuid, signature.run))
        over: list[Disposal] = []
        unsent: list[tuple[str, Disposal]] = []
        for (delivery, uuid, _), start in zip(known, self._begin(known), strict=True):
            if start is None:
                continue
            if not start.finished:
                fresh.append(_begun(delivery, start.epoch))
            elif start.outbox and delivery.redelivered:
                unsent.append((uuid, Disposal(delivery=delivery)))
            else:
                # A second message of the task leaves the outbox to the worker of the first one:
                # that worker lives, or its own message comes back.
                over.append(Disposal(delivery=delivery))
        if over:
            self.consumer.dispose(over)
        if unsent:
            self._send_unsent(unsent)
        return fresh

    def _begin(self, known: Sequence[tuple[Delivery, str, RunNumber]]) -> Sequence[Begun | None]:
        """Begin deliveries; None for one that became a dead letter: its UUID is another's."""
        try:
            return self._store.outbox.begin([(uuid, run) for _, uuid, run in known])
        except NameRefused as error:
            if len(known) > 1:
                return [start for one in known for start in self._begin([one])]
            [(delivery, uuid, _)] = known
            logger.error(
                "message on %r goes to the dead letters: %s: %s", delivery.queue, REASON, error
            )
            letter = Disposal(
                delivery=delivery, fate=Fate.DEAD, reason=REASON, error=str(error), uuid=uuid
            )
            self.consumer.dispose([letter])
            return [None]

    def _send_unsent(self, ended: Sequence[tuple[str, Disposal]]) -> None:
        """Publish the outboxes that earlier settlements of these deliveries have left."""
        # Read again under the lock: no settlement of ours is half done then.
        with self._settling:
            found = self._store.outbox.outboxes([uuid for uuid, _ in ended])
            rows = [
                (disposal, Outbox(uuid, bodies, disposal.delivery.queue))
                for (uuid, disposal), bodies in zip(ended, found, strict=True)
            ]
            left = self._store.publish([outbox for _, outbox in rows]).left
            self.consumer.dispose([one for one, outbox in rows if outbox.key not in left])
            # Last: a failure above gives all of these back, and a parked delivery must stay.
            for disposal, outbox in rows:
                if outbox.key in left:
                    self._park(disposal, outbox, left)

    def keep(self, delivery: Delivery, keeping: Keeping) -> Verdict:
        keeping = msgspec.structs.replace(keeping, epoch=delivery.epoch, mark=mark_of(delivery))
        return self._store.backend.keep_checkpoints(keeping)

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        with self._settling:
            if marks:
                self._store.backend.apply(
                    [
                        Change(
                            key=one.state.task_uuid, states=(one.state,), epoch=one.delivery.epoch
                        )
                        for one in marks
                    ]
                )
            return self._settle(settlements)

    def _settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        stated = [one for one in settlements if one.states]
        changes = [change_by(one, [_pack(message) for message in one.send]) for one in stated]
        found = self._store.backend.apply(changes)
        verdicts = dict(zip(map(id, stated), found, strict=True))
        outboxes: dict[str, Outbox] = {}
        again: list[Settlement] = []
        for one, change, verdict in zip(stated, changes, found, strict=True):
            if one.delivery.receipt in self._parked:
                continue  # a repeat; `_resume` publishes the rest
            if verdict is ALREADY:
                again.append(one)
            elif verdict is SETTLED and change.outbox:
                outboxes[one.uuid] = Outbox(one.uuid, change.outbox, one.delivery.queue)
        # Our own repeat: what the first try left undone is done now, with the same UUIDs.
        if again:
            kept = self._store.outbox.outboxes([one.uuid for one in again])
            for one, bodies in zip(again, kept, strict=True):
                outboxes[one.uuid] = Outbox(one.uuid, bodies, one.delivery.queue)
        left = self._store.publish(list(outboxes.values())).left if outboxes else {}
        for one in stated:
            if one.uuid in left and verdicts[id(one)] is not FENCED:
                self._park(disposal_of(one), outboxes[one.uuid], left)
        over = [
            one
            for one in settlements
            if one.delivery.receipt not in self._parked and verdicts.get(id(one)) is not CONFLICT
        ]
        ours = self.consumer.dispose([disposal_of(one) for one in over])
        for one, is_ours in zip(over, ours, strict=True):
            verdicts.setdefault(id(one), SETTLED if is_ours else FENCED)
        return [verdicts[id(one)] for one in settlements]

    # Parked settlements

    def _park(
        self, disposal: Disposal, outbox: Outbox, left: Mapping[str, Sequence[Message]]
    ) -> None:
        now, level = self._store.clock.monotonic(), logging.DEBUG
        if now - self._warned_at > WARN_EVERY:
            self._warned_at, level = now, logging.WARNING
        logger.log(
            level,
            "a queue is full: what follows from task %s waits for room, and the worker goes on",
            outbox.key,
        )
        self._parked[disposal.delivery.receipt] = _Parked(disposal, outbox, left[outbox.key])
        self._store.parked.add(outbox.key)

    def _resume(self) -> bool:
        """Publish parked messages as far as there is room; return whether a settlement ended."""
        if not self._parked or not self._settling.acquire(blocking=False):
            return False
        try:
            before = len(self._parked)
            self._publish_parked()
            return len(self._parked) < before
        except MachineryError as error:
            logger.debug("what waits for room could not be published: %s", error)
            return False
        finally:
            self._settling.release()

    def _publish_parked(self) -> None:
        # A delivery lost with the connection is another worker's, which finds the outbox.
        held = {
            receipt: one
            for receipt, one in self._parked.items()
            if not self.consumer.is_lost(one.disposal.delivery)
        }
        waiting = list(held.values())
        if self._knows_outboxes and waiting:
            # `tend` of other processes publishes old ones as well.
            outboxes = self._store.outbox.outboxes([one.outbox.key for one in waiting])
            for one, kept in zip(waiting, outboxes, strict=True):
                one.left = one.left if kept else ()
        messages = [(one.outbox.key, one.outbox.home, m) for one in waiting for m in one.left]
        left = self._store.post(messages).left if messages else {}
        for one in waiting:
            one.left = left.get(one.outbox.key, ())
        done = [one for one in waiting if not one.left]
        self._store.clear([one.outbox for one in done])
        self.consumer.dispose([one.disposal for one in done])
        parked = {receipt: one for receipt, one in held.items() if one.left}
        gone = [one.outbox.key for receipt, one in self._parked.items() if receipt not in parked]
        self._store.parked.difference_update(gone)
        self._parked = parked

    def beat(self) -> bool:
        is_ours = super().beat()
        self._resume()
        return is_ours

    def close(self) -> None:
        self._resume()
        super().close()


def _begun(delivery: Delivery, epoch: Fence) -> Delivery:
    """Return the delivery as it was begun.

    Its epoch is its fence as well: of two that run one task at a time, the backend believes the one
    that began last.
    """
    if not epoch:
        return delivery
    return msgspec.structs.replace(delivery, epoch=epoch, fence=epoch)
