"""Settlement where broker and backend are one MongoDB, without transactions: one document is the word, the rest follows.

    1  message     held by this delivery → ending, with all that follows as its deed      lease, acknowledgement, fence
    2  state       of the task, with the mark of the delivery, if `advance` lets it         of two messages of a task one wins
    3  others      states, groups, arrivals, messages: each may be written twice
    4  message     deleted (or dead, or back)

A crash after 1 leaves a message that is ending; `tend` of any worker goes on from 2 when it is `MongoDriver.deed_age` old.
A message that 3 writes once more after it was run and deleted is seen at its claim: its task has ended, and it is dropped.

Submitting is the same with the token's document as the word, and firing with the group's. The crash points are listed in
docs/explanation/mongodb-protocol.md.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import threading
from collections.abc import Sequence

import msgspec
from pymongo import UpdateOne

from machinery_py.backends.base import ALREADY, FENCED, SETTLED, Amendment, Change, Verdict
from machinery_py.backends.mongodb.backend import MongoBackend
from machinery_py.backends.mongodb.records import Tick
from machinery_py.backends.transactional import is_over
from machinery_py.brokers.base import (
    Delivery,
    Disposal,
    Fate,
    Message,
    mark_of,
)
from machinery_py.brokers.mongodb.broker import MongoBroker
from machinery_py.brokers.mongodb.consumer import MongoConsumer, update_at_end
from machinery_py.brokers.mongodb.messages import Receipt, Status
from machinery_py.connections.mongodb.client import Document
from machinery_py.connections.mongodb.client import Store as Database
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    DecodeError,
    MachineryError,
    PublishUnknown,
    StoreUnusable,
)
from machinery_py.names import REASON
from machinery_py.stores.base import (
    Firing,
    Mark,
    Session,
    Settlement,
    Store,
    Submission,
    change_by,
    change_of,
    disposal_of,
)
from machinery_py.tasks.states import State, TaskState
from machinery_py.texts import get_logger
from machinery_py.wire.signatures import decode_signature

logger = get_logger(__name__)

BUSY = 32  # settlements and marks in a batch from which RECEIVED is not written
SUBMISSION = "submission"  # a deed of a token, with states and groups
BATCH = 500  # messages that are ended in one step

_pack = msgspec.msgpack.Encoder().encode
_submission = msgspec.msgpack.Decoder(Submission).decode
_message = msgspec.msgpack.Decoder(Message).decode
_messages = msgspec.msgpack.Decoder(list[Message]).decode


class _Deed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All that follows from the end of a delivery, and where its message goes then."""

    change: Change
    send: Sequence[Message] = ()
    fate: Fate = Fate.DONE
    eta: dt.datetime | None = None
    reason: str = ""
    error: str = ""
    uuid: str = ""
    name: str = ""


_deed = msgspec.msgpack.Decoder(_Deed).decode


class _Ending(msgspec.Struct, frozen=True):
    """A message whose delivery is over."""

    id: str
    lease: str
    deed: _Deed

    @property
    def name(self) -> tuple[str, str]:
        return self.id, self.lease

    @property
    def token(self) -> str:
        """Names what this end sends; not longer for the thousandth step of a chain."""
        return hashlib.blake2b(f"{self.id}/{self.lease}".encode(), digest_size=16).hexdigest()


class MongoStore(Store):
    """A broker and a backend in one database."""

    def __init__(self, broker: MongoBroker, backend: MongoBackend) -> None:
        if broker.driver is not backend.driver:
            raise ValueError("a MongoStore needs a broker and a backend of one driver")
        self.broker = broker
        self.backend = backend
        self.messages = broker
        self.states = backend
        self.driver = broker.driver
        self._looked = self.driver.clock.monotonic()

    def submit(self, submission: Submission) -> None:
        # First, since what has begun is carried out in any case.
        for error in self.states.refusals(state.task_uuid for state in submission.states).values():
            raise error
        if submission.token:
            self.messages.once(
                submission.token,
                SUBMISSION,
                _pack(submission),
                lambda: self._carry_out(submission, again=False),
            )
        else:
            self._carry_out(submission, again=False)

    def _carry_out(self, submission: Submission, *, again: bool) -> None:
        """States and groups before the messages, which are there to be taken at once."""
        change = Change(
            key=f"submit {submission.token}",
            states=submission.states,
            groups=submission.groups,
            force=submission.replay,
        )
        self.states.follow([change], again=again)
        self.messages.store([(submission.token, submission.messages)], again=bool(submission.token))

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return MongoSession(self, self.messages.consume(queues, worker=worker))

    def fire(self, firing: Firing) -> bool:
        if firing.task_uuid:
            return self._end_unheld(firing)
        change = change_of(firing)
        if not self.states.fire(change, _pack(firing.send)):
            return False
        self._after_firing(change, firing.send, again=False)
        return True

    def _after_firing(self, change: Change, send: Sequence[Message], *, again: bool) -> None:
        self.states.follow([change], again=again)
        self.messages.store([(_token(f"fire {change.fires}"), send)])
        self.states.clear_deeds([change])

    def _end_unheld(self, firing: Firing) -> bool:
        """The task's document is the word, with an outbox; as outbox.py."""
        change = change_of(firing, [_pack(message) for message in firing.send])
        if self.states.apply([change]) != [SETTLED]:
            return False
        self._publish([(change.key, change.outbox)])
        return True

    def _publish(self, outboxes: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        filled = [(key, bodies) for key, bodies in outboxes if bodies]
        if filled:
            self.messages.store(
                [
                    (_token(f"task {key}"), [_message(body) for body in bodies])
                    for key, bodies in filled
                ]
            )
            self.states.clear_outbox(filled)

    def amend(self, amendment: Amendment, send: Sequence[Message] = ()) -> bool:
        return self.states.schedules.amend(
            amendment, _pack(send) if send else b"", self._finish_tick
        )

    def _finish_tick(self, tick: Tick, again: bool) -> None:
        self.states.follow_tick(tick, again=again)
        if tick.send:
            self.messages.store([(_token(tick.token), _messages(tick.send))])
        self.states.schedules.clear(tick)

    # Ending deliveries

    def end(self, endings: Sequence[_Ending], *, again: bool) -> list[Verdict]:
        """Steps 2 to 4, for messages that are ending. May be repeated, with `again`."""
        verdicts = self.states.commit([one.deed.change for one in endings], with_deeds=False)
        new = [one for one, verdict in zip(endings, verdicts, strict=True) if verdict is SETTLED]
        old = [one for one, verdict in zip(endings, verdicts, strict=True) if verdict is ALREADY]
        self.states.follow([one.deed.change for one in new], again=again)
        self.states.follow([one.deed.change for one in old], again=True)
        self.messages.store([(one.token, one.deed.send) for one in (*new, *old)])
        self._put_away(endings)
        return verdicts

    def _put_away(self, endings: Sequence[_Ending]) -> None:
        now = self.driver.now()
        done = [one.id for one in endings if one.deed.fate is Fate.DONE]
        others = [one for one in endings if one.deed.fate is not Fate.DONE]
        writes = [
            UpdateOne(
                {"_id": one.id, "lease": one.lease, "status": int(Status.ENDING)},
                _last_update(one.deed, now),
            )
            for one in others
        ]

        def write(store: Database) -> None:
            if len(done) == 1:
                store.machinery_messages.delete_one({"_id": done[0], "status": int(Status.ENDING)})
            elif done:
                store.machinery_messages.delete_many(
                    {"_id": {"$in": done}, "status": int(Status.ENDING)}
                )
            if writes:
                store.machinery_messages.bulk_write(writes, ordered=False)

        self.driver.run(write, doing="settling", away=BrokerUnavailable)
        if others:
            self.driver.notify("messages")

    # House-keeping

    def tend(self) -> float:
        self.messages.look_at_sessions()
        now = self.driver.clock.monotonic()
        pause = self.driver.deed_age
        if now - self._looked >= self.driver.deed_age:
            self._looked = now
            self.finish_deeds()
            pause = self.states.tend_tasks()
        return min(pause, self.messages.tend_messages())

    def finish_deeds(self) -> None:
        """Do what others have begun and not finished."""
        for token, kind, deed in self.messages.old_deeds():
            if kind == SUBMISSION:
                self._carry_out(_submission(deed), again=True)
                self.messages.forget_deed(token)
            else:
                self.messages.finish_put(token, deed)
        before = self.driver.now() - int(self.driver.deed_age * 1e6)
        query: Document = {"status": int(Status.ENDING), "deed_at": {"$gt": 0, "$lt": before}}
        old = self.driver.run(
            lambda store: list(
                store.machinery_messages.find(query, {"lease": 1, "deed": 1}).limit(BATCH)
            ),
            doing="looking for what is unfinished",
            away=BrokerUnavailable,
        )
        for (
            one
        ) in old:  # each by itself: one that can never be stored must not keep the others from it
            ending = _Ending(one["_id"], one["lease"], _deed(bytes(one["deed"])))
            try:
                self.end([ending], again=True)
            except (BrokerUnavailable, PublishUnknown, BackendUnavailable, StoreUnusable):
                raise
            except MachineryError:
                logger.exception(
                    "the end of task %s cannot be finished; its message stays as it is",
                    ending.deed.uuid,
                )
        for change, send in self.states.old_firings():
            self._after_firing(change, _messages(send) if send else (), again=True)
        self._publish(self.states.unsent(BATCH, older_than=self.driver.deed_age))
        for tick in self.states.schedules.old_ticks():
            self._finish_tick(tick, again=True)


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
            deliveries = self._bury(deliveries)
            rows = self._store.states.load_ended(delivery.receipt.uuid for delivery in deliveries)
            over = [
                one
                for one in deliveries
                if (row := rows.get(one.receipt.uuid)) and row.state and _is_over(one, row.state)
            ]
            if over:
                self.consumer.dispose([Disposal(delivery=delivery) for delivery in over])
        except MachineryError:
            self._give_back(deliveries)
            raise
        gone = {delivery.receipt for delivery in over}
        return [delivery for delivery in deliveries if delivery.receipt not in gone]

    def _bury(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Return the deliveries that can be run; the others, with a foreign document under their UUID, go to the dead letters."""
        refused = self._store.states.refusals(delivery.receipt.uuid for delivery in deliveries)
        dead = [
            Disposal(
                delivery=delivery,
                fate=Fate.DEAD,
                reason=REASON,
                error=str(refused[uuid]),
                uuid=uuid,
            )
            for delivery in deliveries
            if (uuid := delivery.receipt.uuid) in refused
        ]
        if not dead:
            return deliveries
        for one in dead:
            logger.error(
                "message on %r goes to the dead letters: %s: %s",
                one.delivery.queue,
                one.reason,
                one.error,
            )
        self.consumer.dispose(dead)
        return [delivery for delivery in deliveries if delivery.receipt.uuid not in refused]

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        with self._settling:
            if marks:
                self._mark(marks, is_busy=len(settlements) + len(marks) >= BUSY)
            return self._settle(settlements) if settlements else []

    def _settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        heavy = [
            (index, one)
            for index, one in enumerate(settlements)
            if one.states or one.send or one.groups or one.arrivals
        ]
        light = [
            (index, one)
            for index, one in enumerate(settlements)
            if not (one.states or one.send or one.groups or one.arrivals)
        ]
        if heavy:
            endings = [_ending(one) for _, one in heavy]
            ours, again = self._begin_to_end(endings)
            ended = [
                (index, ending)
                for (index, _), ending in zip(heavy, endings, strict=True)
                if ending.name in ours
            ]
            found = self._store.end([ending for _, ending in ended], again=again) if ended else []
            verdicts |= {index: verdict for (index, _), verdict in zip(ended, found, strict=True)}
            lost = [(index, one) for index, one in heavy if index not in verdicts]
            late = self._not_ours([one for _, one in lost]) if lost else []
            verdicts |= {index: verdict for (index, _), verdict in zip(lost, late, strict=True)}
        if light:
            mine = self.consumer.dispose([disposal_of(one) for _, one in light])
            verdicts |= {
                index: SETTLED if ok else FENCED for (index, _), ok in zip(light, mine, strict=True)
            }
        return [verdicts[index] for index in range(len(settlements))]

    def _begin_to_end(self, endings: Sequence[_Ending]) -> tuple[set[tuple[str, str]], bool]:
        """Step 1. Which of them are ending now, by this try or an earlier one; whether some may be of an earlier one."""
        now = self._store.driver.now()
        writes = [
            UpdateOne(
                {"_id": one.id, "lease": one.lease, "status": int(Status.HELD)},
                {"$set": {"status": int(Status.ENDING), "deed": _pack(one.deed), "deed_at": now}},
            )
            for one in endings
        ]
        names = {one.name for one in endings}

        def write(store: Database) -> tuple[set[tuple[str, str]], bool]:
            if store.machinery_messages.bulk_write(writes, ordered=False).matched_count == len(
                writes
            ):
                return names, False
            query: Document = {
                "_id": {"$in": [one.id for one in endings]},
                "status": int(Status.ENDING),
            }
            found = store.machinery_messages.find(query, {"lease": 1})
            return names & {(one["_id"], one["lease"]) for one in found}, True

        return self._store.driver.run(write, doing="settling", away=BrokerUnavailable)

    def _not_ours(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        marks = self._store.states.settled_by([one.uuid for one in settlements])
        return [
            ALREADY if one.states and mark == mark_of(one.delivery) else FENCED
            for one, mark in zip(settlements, marks, strict=True)
        ]

    def _mark(self, marks: Sequence[Mark], *, is_busy: bool) -> None:
        # Who holds this much in advance has short tasks: STARTED or the end follows soon.
        wanted = [mark for mark in marks if not is_busy or mark.state.state is not State.RECEIVED]
        ours = self.consumer.holds([mark.delivery for mark in wanted])
        self._store.states.apply(
            [
                Change(key=mark.state.task_uuid, states=(mark.state,))
                for mark, mine in zip(wanted, ours, strict=True)
                if mine
            ]
        )


def _ending(settlement: Settlement) -> _Ending:
    receipt = settlement.delivery.receipt
    id, lease = (receipt.id, receipt.lease) if isinstance(receipt, Receipt) else ("", "none")
    return _Ending(
        id,
        lease,
        _Deed(
            change=change_by(settlement),
            send=settlement.send,
            fate=settlement.fate,
            eta=settlement.eta,
            reason=settlement.reason,
            error=settlement.error,
            uuid=settlement.uuid,
            name=settlement.name,
        ),
    )


def _last_update(deed: _Deed, now: int) -> Document:
    disposal = Disposal(
        delivery=Delivery(body=b"", queue="", receipt=None),
        fate=deed.fate,
        eta=deed.eta,
        reason=deed.reason,
        error=deed.error,
        uuid=deed.uuid,
        name=deed.name,
    )
    return update_at_end(disposal, now, deed=b"", deed_at=0)


def _token(text: str) -> str:
    """Names what is sent with a firing, or with a tick."""
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _is_over(delivery: Delivery, state: TaskState) -> bool:
    """Whether the message's run has ended: it is a second message of its task."""
    if not (state.is_finished or state.run or state.state is State.RETRY):
        return False
    try:
        return is_over(state, decode_signature(delivery.body).run)
    except DecodeError:
        return False
