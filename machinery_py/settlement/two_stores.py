"""Settlement where the messages are in one store and the states in another.

The order of the steps is what makes it safe; each may be the last one before a crash:

    1  backend: the new state, the group arrivals, and an outbox of what is to be published, if the epoch is still ours
    2  broker:  the messages of the outbox, with UUIDs that were fixed in step 1
    3  backend: the outbox is cleared, if it is still the one that was published
    4  broker:  the delivery is acknowledged

    crash after   what there is                    who goes on
    1             final state, full outbox         the redelivery: `begin` says finished, steps 2 to 4, the task is not run again
    2             final state, full outbox         the same; the messages are published twice with the same UUIDs, and `begin`
                                                   lets one of each be finished
    3             final state, empty outbox        the redelivery is acknowledged

A second message of a task is no redelivery: it is acknowledged, and the outbox is left to whoever settled the first.
An outbox whose delivery never comes back (its broker lost it) is sent by `tend` when it is old.

Limits: with a backend that has no conditional changes (its features say so) callbacks are sent at least once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec

from machinery_py._drivers.tokens import RecentTokens
from machinery_py.backends.base import ALREADY, FENCED, SETTLED, Amendment, Backend, Begun, Change, Verdict
from machinery_py.brokers.base import Broker, Consumer, Delivery, Disposal, Fate, Message
from machinery_py.clock import Clock
from machinery_py.errors import DecodeError, MachineryError, NameRefused, PublishRefused
from machinery_py.names import REASON, check_message
from machinery_py.settlement.base import ConsumerSession, Firing, Mark, Session, Settlement, Store, Submission, change_of
from machinery_py.settlement.one_store import disposal_of, mark_of
from machinery_py.states import TaskState
from machinery_py.texts import get_logger
from machinery_py.wire import decode_signature

logger = get_logger(__name__)

OUTBOX_AGE = 5.0  # seconds; by then the one who is at it is dead, or in trouble (overtaking it does no harm)

_pack = msgspec.json.Encoder().encode
_unpack = msgspec.json.Decoder(Message).decode


class TwoStores(Store):
    """A broker and a backend that know nothing of each other."""

    def __init__(self, broker: Broker, backend: Backend, clock: Clock) -> None:
        self.broker = broker
        self.backend = backend
        self._clock = clock
        self._swept = clock.monotonic()
        self._replayed = RecentTokens(clock)

    def submit(self, submission: Submission) -> None:
        before = self._finished(submission)
        made = self._prepare(submission)
        try:
            self.broker.put(submission.messages, token=submission.token)
        except PublishRefused:
            # Only what this very call has made: after a lost reply the first call may have been carried out.
            for uuid in made:
                if uuid not in before:
                    self.backend.purge_state(uuid)
            self.backend.apply([Change(key=uuid, states=(before[uuid],), force=True) for uuid in made if uuid in before])
            self._replayed.forget(submission.token)
            raise

    def _finished(self, submission: Submission) -> dict[str, TaskState]:
        """For a replay: the states that it is to replace."""
        return self.backend.get_states([state.task_uuid for state in submission.states]) if submission.replay else {}

    def _prepare(self, submission: Submission) -> list[str]:
        """Write states and groups, before a worker can see the messages; which states are ours alone."""
        if submission.replay and not self._replayed.add(submission.token):
            return []  # carried out before, and the task may have ended since
        changes = [
            Change(key=state.task_uuid, mark=f"submit {submission.token}", states=(state,), force=submission.replay)
            for state in submission.states
        ]
        if submission.groups:
            changes.append(Change(key=f"submit {submission.token}", groups=submission.groups))
        verdicts = self.backend.apply(changes)
        return [change.key for change, verdict in zip(changes, verdicts, strict=True) if change.states and verdict is SETTLED]

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return TwoSession(self, self.broker.consume(queues, worker=worker))

    def fire(self, firing: Firing) -> bool:
        change = change_of(firing, [_pack(message) for message in firing.send])
        if self.backend.apply([change]) != [SETTLED]:
            return False
        self.publish([(change.key, change.outbox)])
        return True

    def amend(self, amendment: Amendment, send: Sequence[Message] = ()) -> bool:
        """A death before step 2 or 3 leaves the outbox: `tend` publishes it, with the same UUIDs."""
        amendment = msgspec.structs.replace(amendment, outbox=[_pack(message) for message in send])
        if not self.backend.amend(amendment):
            return False
        self.publish([(amendment.outbox_key, amendment.outbox)])
        return True

    def publish_left(self, key: str) -> None:
        self.publish([(key, self.backend.outboxes([key])[0])])

    def publish(self, outboxes: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        """Steps 2 and 3."""
        filled = [(key, bodies) for key, bodies in outboxes if bodies]
        if filled:
            self.broker.put([_unpack(body) for _, bodies in filled for body in bodies], token="")
            self.backend.clear_outbox(filled)

    def tend(self) -> float:
        if self._clock.monotonic() - self._swept >= OUTBOX_AGE:
            self._swept = self._clock.monotonic()
            self.publish(self.backend.unsent(100, older_than=OUTBOX_AGE))
        return min(self.broker.tend(), self.backend.tend(), OUTBOX_AGE)


class TwoSession(ConsumerSession):
    """A consumer whose deliveries are begun in the backend before they are handed out."""

    def __init__(self, store: TwoStores, consumer: Consumer) -> None:
        self._store = store
        super().__init__(consumer)
        self._owed: list[Delivery] = []  # claimed, could not be begun, and could not be given back either
        self._settling = threading.Lock()  # a repeat must see what the first try has left undone

    def _give_back(self) -> None:
        if self._owed:
            self._consumer.dispose([Disposal(delivery=delivery, fate=Fate.BACK) for delivery in self._owed])
            self._owed = []

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        self._give_back()
        deliveries = self._consumer.receive(limit, timeout, order)
        if not deliveries:
            return deliveries
        known: list[tuple[Delivery, str, int]] = []
        fresh: list[Delivery] = []
        for delivery in deliveries:
            try:
                signature = decode_signature(delivery.body)
                check_message(signature.routing_key, delivery.queue, name=signature.name, uuid=signature.uuid,
                              group_uuid=signature.group_uuid)
            except (DecodeError, NameRefused):
                fresh.append(delivery)  # the engine knows what to do with it
            else:
                known.append((delivery, signature.uuid, signature.run))
        try:
            begun = self._begin(known)
        except MachineryError:
            # Claimed, and not to be begun: they go back, or they would be held by nobody who knows of them.
            self._owed += deliveries
            self._give_back()
            raise
        over: list[Delivery] = []
        unsent: list[str] = []
        for (delivery, uuid, _), start in zip(known, begun, strict=True):
            if start is None:
                continue
            if start.finished:
                over.append(delivery)
                # Another message of the task leaves the outbox to who is at it: it lives, or its own message comes back.
                if start.outbox and delivery.redelivered:
                    unsent.append(uuid)
            else:
                fresh.append(msgspec.structs.replace(delivery, epoch=start.epoch))
        if unsent:
            # Asked for again when no settlement of ours is between storing an outbox and clearing it.
            with self._settling:
                self._store.publish(list(zip(unsent, self._store.backend.outboxes(unsent), strict=True)))
        if over:
            self._consumer.dispose([Disposal(delivery=delivery) for delivery in over])
        return fresh

    def _begin(self, known: Sequence[tuple[Delivery, str, int]]) -> Sequence[Begun | None]:
        """Begin them; None for each under whose UUID something else lies: it has gone to the dead letters."""
        try:
            return self._store.backend.begin([(uuid, run) for _, uuid, run in known])
        except NameRefused as error:
            if len(known) > 1:
                return [start for one in known for start in self._begin([one])]
            [(delivery, uuid, _)] = known
            logger.error("message on %r goes to the dead letters: %s: %s", delivery.queue, REASON, error)
            self._consumer.dispose([Disposal(delivery=delivery, fate=Fate.DEAD, reason=REASON, error=str(error), uuid=uuid)])
            return [None]

    def settle(self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()) -> list[Verdict]:
        with self._settling:
            if marks:
                self._mark(marks)
            return self._settle(settlements)

    def _settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        stated = [settlement for settlement in settlements if settlement.states]
        changes = [self._change(settlement) for settlement in stated]
        verdicts = dict(zip((id(one) for one in stated), self._store.backend.apply(changes), strict=True))
        self._store.publish([
            (change.key, change.outbox)
            for settlement, change in zip(stated, changes, strict=True)
            if verdicts[id(settlement)] is SETTLED
        ])
        # Our own repeat: what the first try left undone is done now, with the same UUIDs.
        again = [settlement.uuid for settlement in stated if verdicts[id(settlement)] is ALREADY]
        if again:
            self._store.publish(list(zip(again, self._store.backend.outboxes(again), strict=True)))
        ours = self._consumer.dispose([disposal_of(settlement) for settlement in settlements])
        return [
            verdicts.get(id(settlement), SETTLED if mine else FENCED)
            for settlement, mine in zip(settlements, ours, strict=True)
        ]

    def _change(self, settlement: Settlement) -> Change:
        return Change(
            key=settlement.uuid, mark=mark_of(settlement.delivery), epoch=settlement.delivery.epoch,
            states=settlement.states, groups=settlement.groups, arrivals=settlement.arrivals,
            outbox=[_pack(message) for message in settlement.send],
        )

    def _mark(self, marks: Sequence[Mark]) -> None:
        self._store.backend.apply([
            Change(key=mark.state.task_uuid, states=(mark.state,), epoch=mark.delivery.epoch)
            for mark in marks
        ])


