"""`mongodb://`, `mongodb+srv://`: one server, a replica set or a sharded cluster.

Broker and backend of one MongoDB settle without transactions: the message document is the commit
record.

    1  message     held by this delivery → ending, with all follow-ups as its intent:
                   lease, acknowledgement and fence at once
    2  state       of the task, with the mark of the delivery, if `advance` lets it: of two messages
                   of a task one wins
    3  others      states, groups, arrivals, messages: each may be written twice
    4  message     deleted (or dead, or back)

A crash after 1 leaves a message that is ending; `tend` of any worker goes on from 2 when it is
`MongoDriver.intent_age` old. A message that 3 writes once more after it was run and deleted is
found out at its claim: its task has ended, and it is dropped.

Submitting is the same with the token's document as the commit record, and firing with the group's.
docs/explanation/mongodb-protocol.md lists the crash points.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import ClassVar

import msgspec
from pymongo import UpdateOne

from machinery_py.backends.base import (
    ALREADY,
    FENCED,
    SETTLED,
    Backend,
    Change,
    Keeping,
    Verdict,
    lone_rider,
)
from machinery_py.backends.mongodb.backend import MongoBackend
from machinery_py.backends.mongodb.records import RecordIntent
from machinery_py.backends.transactional import is_over
from machinery_py.brokers.base import (
    Broker,
    Delivery,
    DeliveryEnd,
    Disposal,
    Fate,
    Message,
    mark_of,
)
from machinery_py.brokers.mongodb.broker import MongoBroker
from machinery_py.brokers.mongodb.consumer import MongoConsumer, update_at_end
from machinery_py.brokers.mongodb.messages import Status, held, receipt_of
from machinery_py.clock import Clock
from machinery_py.connections.mongodb.client import Document, DriverUser, MongoDriver, step
from machinery_py.connections.mongodb.client import Store as Database
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    DecodeError,
    MachineryError,
    PublishUnknown,
    StoreUnusable,
)
from machinery_py.limits.mongodb import MongoLimits
from machinery_py.locks.mongodb import MongoLock
from machinery_py.names import REASON
from machinery_py.stores.base import (
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
from machinery_py.stores.open import Family, FamilyOptions
from machinery_py.tasks.states import State, TaskState
from machinery_py.texts import get_logger
from machinery_py.wire.signatures import decode_signature

logger = get_logger(__name__)

SUBMISSION = "submission"  # kind of a token whose intent has states and groups
OLD_INTENTS = 500  # intents of dead workers that are carried out in one step

_pack = msgspec.msgpack.Encoder().encode
_submission = msgspec.msgpack.Decoder(Submission).decode
_message = msgspec.msgpack.Decoder(Message).decode
_messages = msgspec.msgpack.Decoder(list[Message]).decode


class MongoDBFamily(Family):
    """Stores in one database, connected at the first use."""

    keeps_time = True

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        self._driver = MongoDriver(
            url,
            clock=options.clock,
            timeout=options.timeout,
            database=options.mongodb.database,
            strict=options.strict_durability,
        )
        self.clock: Clock = self._driver.clock

    def broker(self) -> MongoBroker:
        return MongoBroker(self._driver, lease=self.options.lease)

    def backend(self) -> MongoBackend:
        return MongoBackend(self._driver, expire_in=self.options.expire_in)

    def lock(self) -> MongoLock:
        return MongoLock(self._driver)

    def limits(self) -> MongoLimits:
        return MongoLimits(self._driver)

    def together(self) -> MongoStore:
        return MongoStore(self.broker(), self.backend())

    def close(self) -> None:
        self._driver.close()


class _Intent(DeliveryEnd, frozen=True, kw_only=True, gc=False):
    """The end of a delivery, and its follow-ups."""

    change: Change
    send: Sequence[Message] = ()


_intent = msgspec.msgpack.Decoder(_Intent).decode


class _Ending(msgspec.Struct, frozen=True):
    """A message whose delivery is over."""

    id: str
    lease: str
    intent: _Intent

    @property
    def token(self) -> str:
        """Name of what this end sends; not longer for the thousandth step of a chain."""
        return _token(f"{self.id}/{self.lease}")


class MongoStore(DriverUser, Store):
    """A broker and a backend in one database."""

    unavailable: ClassVar[type[MachineryError]] = BrokerUnavailable

    def __init__(self, broker: MongoBroker, backend: MongoBackend) -> None:
        if broker.driver is not backend.driver:
            raise ValueError("a MongoStore needs a broker and a backend of one driver")
        super().__init__(broker.driver)
        self.broker: Broker = broker
        self.backend: Backend = backend
        self.messages = broker
        self.states = backend
        self._looked = self.driver.clock.monotonic()

    def submit(self, submission: Submission) -> bool:
        # First, since what has begun is carried out in any case.
        self.messages.check_limits(submission.limits, token=submission.token)
        change, messages = change_in(submission), submission.messages
        if rider := lone_rider([change], self.states.features.name):
            send = _pack(messages) if messages else b""
            return self.states.schedules.amend(rider, change, send, self._finish_amendment)
        uuids = (state.task_uuid for state in submission.states)
        for error in self.states.tasks.refusals(uuids).values():
            raise error
        self.messages.check_sizes(messages)
        if submission.token:
            self.messages.once(
                submission.token,
                SUBMISSION,
                _pack(submission),
                lambda: self._carry_out(submission, again=False),
            )
        else:
            self._carry_out(submission, again=False)
        return True

    def _carry_out(self, submission: Submission, *, again: bool) -> None:
        """Write states and groups, then the messages, which may be claimed at once."""
        self.states.changes.follow([change_in(submission)], again=again)
        self.messages.store([(submission.token, submission.messages)], again=bool(submission.token))

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return MongoSession(self, self.messages.consume(queues, worker=worker))

    def fire(self, firing: Firing) -> bool:
        if firing.task_uuid:
            return self._end_unheld(firing)
        change = change_of(firing)
        lone_rider([change], self.states.features.name)
        if not self.states.changes.fire(change, _pack(firing.send)):
            return False
        self._after_firing(change, firing.send, again=False)
        return True

    def _after_firing(self, change: Change, send: Sequence[Message], *, again: bool) -> None:
        self.states.changes.follow([change], again=again)
        # A retried workflow fires a group twice, and the first callbacks may wait still.
        sent = send[0].uuid if send else ""
        self.messages.store([(_token(f"fire {change.fires} {sent}"), send)])
        self.states.changes.clear_intents([change])

    def _end_unheld(self, firing: Firing) -> bool:
        """End a task that no worker holds, as outbox.py: its document is the commit record."""
        change = change_of(firing, [_pack(message) for message in firing.send])
        if self.states.apply([change]) != [SETTLED]:
            return False
        self._publish([(change.key, change.outbox)])
        return True

    def _publish(self, outboxes: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        filled = [(key, bodies) for key, bodies in outboxes if bodies]
        if filled:
            batches = [(_token(f"task {key}"), list(map(_message, box))) for key, box in filled]
            self.messages.store(batches)
            self.states.clear_outbox(filled)

    def _finish_amendment(self, intent: RecordIntent, again: bool) -> None:
        self.states.schedules.follow(intent, again=again)
        if intent.send:
            self.messages.store([(_token(intent.token), _messages(intent.send))])
        self.states.schedules.clear(intent)

    # Ending deliveries

    @step("settling")
    def begin_to_end(
        self, store: Database, endings: Sequence[_Ending], deliveries: Sequence[Delivery]
    ) -> tuple[list[bool], bool]:
        """Do step 1.

        Returns:
            For each whether it is ending now, by this try or an earlier one; and whether some may
            be of an earlier one.
        """
        now = self.driver.now()
        ending = {"status": Status.ENDING}
        writes = [
            UpdateOne(
                held(delivery), {"$set": {**ending, "deed": _pack(one.intent), "deed_at": now}}
            )
            for one, delivery in zip(endings, deliveries, strict=True)
        ]
        messages = store.machinery_messages
        if messages.bulk_write(writes, ordered=False).matched_count == len(writes):
            return [True] * len(endings), False
        query: Document = {"_id": {"$in": [one.id for one in endings]}, **ending}
        found = {(one["_id"], one["lease"]) for one in messages.find(query, {"lease": 1})}
        return [(one.id, one.lease) in found for one in endings], True

    def end(self, endings: Sequence[_Ending], *, again: bool) -> list[Verdict]:
        """Do steps 2 to 4, for messages that are ending. May be repeated, with `again`."""
        changes = self.states.changes
        verdicts = changes.commit([one.intent.change for one in endings], with_intents=False)
        new = [one for one, verdict in zip(endings, verdicts, strict=True) if verdict is SETTLED]
        old = [one for one, verdict in zip(endings, verdicts, strict=True) if verdict is ALREADY]
        changes.follow([one.intent.change for one in new], again=again)
        changes.follow([one.intent.change for one in old], again=True)
        self.messages.store([(one.token, one.intent.send) for one in (*new, *old)])
        self._put_away(endings)
        if any(one.intent.fate is not Fate.DONE for one in endings):
            self.driver.notify("messages")
        return verdicts

    @step("settling")
    def _put_away(self, store: Database, endings: Sequence[_Ending]) -> None:
        messages, now = store.machinery_messages, self.driver.now()
        ending = {"status": Status.ENDING}
        done = [one.id for one in endings if one.intent.fate is Fate.DONE]
        writes = [
            UpdateOne(
                {"_id": one.id, "lease": one.lease, **ending},
                update_at_end(one.intent, now, deed=b"", deed_at=0),
            )
            for one in endings
            if one.intent.fate is not Fate.DONE
        ]
        if len(done) == 1:
            messages.delete_one({"_id": done[0], **ending})
        elif done:
            messages.delete_many({"_id": {"$in": done}, **ending})
        if writes:
            messages.bulk_write(writes, ordered=False)

    # House-keeping

    def tend(self) -> float:
        self.messages.look_at_sessions()
        now = self.driver.clock.monotonic()
        pause = self.driver.intent_age
        if now - self._looked >= self.driver.intent_age:
            self._looked = now
            self.finish_intents()
            pause = self.states.tend_tasks()
        return min(pause, self.messages.tend_messages())

    def finish_intents(self) -> None:
        """Carry out what others have begun and not finished."""
        for token, kind, intent in self.messages.old_intents():
            if kind == SUBMISSION:
                self._carry_out(_submission(intent), again=True)
                self.messages.forget_intent(token)
            else:
                self.messages.finish_put(token, intent)
        for ending in self._old_endings():
            # Each by itself: one that can never be stored must not keep the others from it.
            try:
                self.end([ending], again=True)
            except (BrokerUnavailable, PublishUnknown, BackendUnavailable, StoreUnusable):
                raise
            except MachineryError:
                logger.exception(
                    "the end of task %s cannot be finished; its message stays as it is",
                    ending.intent.uuid,
                )
        for change, send in self.states.changes.old_firings():
            self._after_firing(change, _messages(send) if send else (), again=True)
        self._publish(self.states.unsent(OLD_INTENTS, older_than=self.driver.intent_age))
        for record in self.states.schedules.old_intents():
            self._finish_amendment(record, again=True)

    @step("looking for what is unfinished")
    def _old_endings(self, store: Database) -> list[_Ending]:
        old = {"$gt": 0, "$lt": self.driver.intents_before()}
        query: Document = {"status": Status.ENDING, "deed_at": old}
        found = store.machinery_messages.find(query, {"lease": 1, "deed": 1}).limit(OLD_INTENTS)
        return [_Ending(one["_id"], one["lease"], _intent(bytes(one["deed"]))) for one in found]


class MongoSession(Session):
    """A consumer of the one store."""

    def __init__(self, store: MongoStore, consumer: MongoConsumer) -> None:
        self._store = store
        super().__init__(consumer)
        self._settling = threading.Lock()  # a repeat must see what the first try has left undone

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        self._give_back()
        deliveries = self.consumer.receive(limit, timeout, order)
        if not deliveries:
            return deliveries
        try:
            return self._without_ended(self._without_refused(deliveries))
        except MachineryError:
            self._give_back(deliveries)
            raise

    def keep(self, delivery: Delivery, keeping: Keeping) -> Verdict:
        if not self.consumer.holds([delivery])[0]:
            return FENCED
        return self._store.states.kept.keep(keeping, delivery.fence)

    def _without_ended(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Return the deliveries whose run has not ended; second messages of a task are dropped."""
        rows = self._store.states.tasks.load_ended(receipt_of(one).uuid for one in deliveries)
        over = {
            one.receipt: Disposal(delivery=one)
            for one in deliveries
            if (row := rows.get(receipt_of(one).uuid)) and row.state and _is_over(one, row.state)
        }
        if not over:
            return deliveries
        self.consumer.dispose(list(over.values()))
        return [delivery for delivery in deliveries if delivery.receipt not in over]

    def _without_refused(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Return the deliveries that can be run; a foreign document makes a dead letter."""
        refused = self._store.states.tasks.refusals(receipt_of(one).uuid for one in deliveries)
        if not refused:
            return deliveries
        dead: list[Disposal] = []
        for delivery in deliveries:
            uuid = receipt_of(delivery).uuid
            if uuid in refused:
                error = str(refused[uuid])
                logger.error(
                    "message on %r goes to the dead letters: %s: %s", delivery.queue, REASON, error
                )
                dead.append(
                    Disposal(
                        delivery=delivery, fate=Fate.DEAD, reason=REASON, error=error, uuid=uuid
                    )
                )
        self.consumer.dispose(dead)
        return [delivery for delivery in deliveries if receipt_of(delivery).uuid not in refused]

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        with self._settling:
            if marks:
                self._write_marks(marks, self._store.states)
            return self._settle(settlements) if settlements else []

    def _settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        # Without follow-ups, the end of the delivery is one write.
        plain = [index for index, one in enumerate(settlements) if not _has_follow_ups(one)]
        others = [index for index, one in enumerate(settlements) if _has_follow_ups(one)]
        if others:
            endings = [_ending(settlements[index]) for index in others]
            deliveries = [settlements[index].delivery for index in others]
            ours, again = self._store.begin_to_end(endings, deliveries)
            ended = [index for index, mine in zip(others, ours, strict=True) if mine]
            if ended:
                mine = [one for one, is_ours in zip(endings, ours, strict=True) if is_ours]
                verdicts.update(zip(ended, self._store.end(mine, again=again), strict=True))
            lost = [index for index in others if index not in verdicts]
            if lost:
                late = self._not_ours([settlements[index] for index in lost])
                verdicts.update(zip(lost, late, strict=True))
        if plain:
            held = self.consumer.dispose([disposal_of(settlements[index]) for index in plain])
            done = [SETTLED if mine else FENCED for mine in held]
            verdicts.update(zip(plain, done, strict=True))
        return [verdicts[index] for index in range(len(settlements))]

    def _not_ours(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        marks = self._store.states.settled_by([one.uuid for one in settlements])
        return [
            ALREADY if one.states and mark == mark_of(one.delivery) else FENCED
            for one, mark in zip(settlements, marks, strict=True)
        ]


def _has_follow_ups(settlement: Settlement) -> bool:
    return bool(settlement.states or settlement.send or settlement.groups or settlement.arrivals)


def _ending(settlement: Settlement) -> _Ending:
    receipt, change = receipt_of(settlement.delivery), change_by(settlement)
    lone_rider([change], MongoBackend.features.name)
    intent = _Intent(
        change=change,
        send=settlement.send,
        fate=settlement.fate,
        eta=settlement.eta,
        reason=settlement.reason,
        error=settlement.error,
        uuid=settlement.uuid,
        name=settlement.name,
    )
    return _Ending(receipt.id, receipt.lease, intent)


def _token(text: str) -> str:
    """Return the name of messages that are sent with a commit record, from the name of that."""
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _is_over(delivery: Delivery, state: TaskState) -> bool:
    """Return whether the message's run has ended: it is a second message of its task."""
    if not (state.is_finished or state.run or state.state is State.RETRY):
        return False
    try:
        return is_over(state, decode_signature(delivery.body).run)
    except DecodeError:
        return False
