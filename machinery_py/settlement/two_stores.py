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

In step 2 the broker may refuse a message. What it refuses for good (too large, a queue that it does not give) fails in its place:

    2a  broker:  the message is a dead letter
    2b  backend: its task is FAILURE, with the error callbacks in an outbox of its own; members of chords behind it are failed
    2c           steps 2 and 3 for that outbox; then the others go on

    crash after 2a or 2b: the outbox of step 1 is still there; whoever comes for it does 2a again, and 2b is ALREADY

What a full queue refuses waits: steps 3 and 4 of that settlement are parked, its delivery stays unacknowledged, and all others
go on. While something is parked the session goes on claiming: a claim makes room in the queue that it claims from, and what is
parked is tried right behind each claim. So a chain that fills its own queue comes to its end without anybody else.

Limits: with a backend that has no conditional changes (its features say so) callbacks are sent at least once.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from machinery_py._drivers.tokens import RecentTokens
from machinery_py.backends.base import (
    ALREADY,
    FENCED,
    SETTLED,
    Amendment,
    Backend,
    Begun,
    Change,
    Verdict,
)
from machinery_py.brokers.base import Broker, Consumer, Delivery, Disposal, Fate, Message
from machinery_py.clock import Clock
from machinery_py.errors import (
    DecodeError,
    MachineryError,
    NameRefused,
    PublishRefused,
    PublishUnknown,
)
from machinery_py.names import REASON, check_message
from machinery_py.settlement.base import (
    AWAY,
    ConsumerSession,
    Firing,
    Mark,
    Session,
    Settlement,
    Store,
    Submission,
    change_of,
)
from machinery_py.settlement.one_store import disposal_of, mark_of
from machinery_py.states import TaskState
from machinery_py.texts import get_logger
from machinery_py.wire import decode_signature

logger = get_logger(__name__)

OUTBOX_AGE = (
    5.0  # seconds; by then the one who is at it is dead, or in trouble (overtaking it does no harm)
)
TOLD_EVERY = 60.0  # seconds between two lines of the log that say that a queue is full
MOST_PARKED = 1000  # settlements of a session that wait for room; from then on it claims one by one

_pack = msgspec.json.Encoder().encode
_unpack = msgspec.json.Decoder(Message).decode


class Outbox(NamedTuple):
    """What is to be published for `key`. `home`: the queue of the delivery that sends it, if there is one."""

    key: str
    bodies: Sequence[bytes]
    home: str = ""


class Posted:
    """What became of messages that were published: those that found no room, by key; an error, if one was refused."""

    def __init__(self) -> None:
        self.left: dict[str, list[Message]] = {}
        self.refused: MachineryError | None = None


class TwoStores(Store):
    """A broker and a backend that know nothing of each other."""

    def __init__(self, broker: Broker, backend: Backend, clock: Clock) -> None:
        self.broker = broker
        self.backend = backend
        self.clock = clock
        self._swept = clock.monotonic()
        self._replayed = RecentTokens(clock)
        self._buried: set[tuple[str, bytes]] = (
            set()
        )  # of what was refused for good and has not failed yet
        self.parked: set[str] = set()  # outboxes that a session of this process waits to publish

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
            self.backend.apply(
                [
                    Change(key=uuid, states=(before[uuid],), force=True)
                    for uuid in made
                    if uuid in before
                ]
            )
            self._replayed.forget(submission.token)
            raise

    def _finished(self, submission: Submission) -> dict[str, TaskState]:
        """For a replay: the states that it is to replace."""
        return (
            self.backend.get_states([state.task_uuid for state in submission.states])
            if submission.replay
            else {}
        )

    def _prepare(self, submission: Submission) -> list[str]:
        """Write states and groups, before a worker can see the messages; which states are ours alone."""
        if submission.replay and not self._replayed.add(submission.token):
            return []  # carried out before, and the task may have ended since
        changes = [
            Change(
                key=state.task_uuid,
                mark=f"submit {submission.token}",
                states=(state,),
                force=submission.replay,
            )
            for state in submission.states
        ]
        if submission.groups:
            changes.append(Change(key=f"submit {submission.token}", groups=submission.groups))
        verdicts = self.backend.apply(changes)
        return [
            change.key
            for change, verdict in zip(changes, verdicts, strict=True)
            if change.states and verdict is SETTLED
        ]

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return TwoSession(self, self.broker.consume(queues, worker=worker))

    def fire(self, firing: Firing) -> bool:
        change = change_of(firing, [_pack(message) for message in firing.send])
        if self.backend.apply([change]) != [SETTLED]:
            return False
        self.publish([Outbox(change.key, change.outbox)])  # what finds no room is left to `tend`
        return True

    def amend(self, amendment: Amendment, send: Sequence[Message] = ()) -> bool:
        """A death before step 2 or 3 leaves the outbox: `tend` publishes it, with the same UUIDs."""
        amendment = msgspec.structs.replace(amendment, outbox=[_pack(message) for message in send])
        if not self.backend.amend(amendment):
            return False
        self._publish_all(amendment.outbox_key, amendment.outbox)
        return True

    def publish_left(self, key: str) -> None:
        self._publish_all(key, self.backend.outboxes([key])[0])

    def _publish_all(self, key: str, bodies: Sequence[bytes]) -> None:
        if (refused := self.publish([Outbox(key, bodies)]).refused) is not None:
            raise refused

    def publish(self, outboxes: Sequence[Outbox]) -> Posted:
        """Steps 2 and 3. An outbox of which something found no room is kept.

        Raises:
            BrokerUnavailable, BackendUnavailable, PublishUnknown: some of it may be done.
        """
        filled = [one for one in outboxes if one.bodies]
        if not filled:
            return Posted()
        posted = self.post(
            [(one.key, one.home, _unpack(body)) for one in filled for body in one.bodies]
        )
        self.backend.clear_outbox(
            [(one.key, one.bodies) for one in filled if one.key not in posted.left]
        )
        return posted

    def put(self, messages: Sequence[Message]) -> None:
        self.broker.put(messages, token="")

    def post(self, messages: Sequence[tuple[str, str, Message]]) -> Posted:
        """Step 2, for messages with the key of their outbox and their home."""
        posted = Posted()
        try:
            self.put([message for _, _, message in messages])
        except (PublishRefused, PublishUnknown) as error:
            if not error.permanent and error.left is None:
                raise
            posted.refused = error
            rest = (
                messages
                if error.left is None
                else [messages[place] for place in sorted(error.left)]
            )
            for key, home, message in rest:
                found = self._post_alone(message, home, posted) if error.permanent else [message]
                if found:
                    posted.left.setdefault(key, []).extend(found)
        return posted

    def _post_alone(self, message: Message, home: str, posted: Posted) -> Sequence[Message]:
        """What of it finds no room: the message, or what follows from its failure."""
        try:
            self.put([message])
        except (PublishRefused, PublishUnknown) as error:
            if error.permanent:
                posted.refused = error
                return self._fail(message, error, home)
            if error.left is None:
                raise
            return [message]
        return ()

    def _fail(self, message: Message, error: Exception, home: str) -> Sequence[Message]:
        """Steps 2a to 2c; what of it finds no room."""
        if self.refusal is None:
            raise error
        refusal, name = self.refusal(message, error), (message.uuid, message.body)
        if name not in self._buried:
            self.give_up(message, error, home or refusal.queue)
            self._buried.add(name)  # a backend that is away must not make a letter of each try
        change = Change(
            key=message.uuid,
            mark=f"refused {refusal.states[0].run}",
            states=refusal.states,
            groups=refusal.groups,
            arrivals=refusal.arrivals,
            outbox=[_pack(one) for one in refusal.send],
        )
        verdict = self._apply_failure(change)
        self._buried.discard(name)
        outbox = change.outbox if verdict is SETTLED else ()
        if verdict is ALREADY:
            [outbox] = self.backend.outboxes([change.key])
        left = self.publish([Outbox(change.key, outbox, home)]).left
        return [one for some in left.values() for one in some]

    def _apply_failure(self, change: Change) -> Verdict:
        """Without the message, if that is what the backend refuses, too."""
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
            old = self.backend.unsent(100, older_than=OUTBOX_AGE)
            self.publish([Outbox(key, bodies) for key, bodies in old if key not in self.parked])
        return min(self.broker.tend(), self.backend.tend(), OUTBOX_AGE)


class _Parked:
    """A settlement of which something found no room: its delivery, its outbox, and what is left of that to publish."""

    __slots__ = ("disposal", "left", "outbox")

    def __init__(self, disposal: Disposal, outbox: Outbox, left: Sequence[Message]) -> None:
        self.disposal = disposal
        self.outbox = outbox
        self.left = left


class TwoSession(ConsumerSession):
    """A consumer whose deliveries are begun in the backend before they are handed out."""

    def __init__(self, store: TwoStores, consumer: Consumer) -> None:
        self._store = store
        super().__init__(consumer)
        self._owed: list[
            Delivery
        ] = []  # claimed, could not be begun, and could not be given back either
        self._settling = threading.Lock()  # a repeat must see what the first try has left undone
        self._parked: list[_Parked] = []
        self._told_at = -math.inf
        features = store.backend.features
        self._knows_outboxes = features.keeps and not features.forgets

    def _give_back(self) -> None:
        if self._owed:
            self._consumer.dispose(
                [Disposal(delivery=delivery, fate=Fate.BACK) for delivery in self._owed]
            )
            self._owed = []

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        self._give_back()
        self._resume()
        deliveries = self._consumer.receive(
            limit if len(self._parked) < MOST_PARKED else 1, timeout, order
        )
        # Right behind the claim: it has made room, which others fill as well.
        if self._resume() and not deliveries:
            deliveries = self._consumer.receive(limit, timeout, order)
        try:
            return self._begin_all(deliveries) if deliveries else deliveries
        except MachineryError:
            # Claimed, and not handed out: they go back, or they would be held by nobody who knows of them.
            self._owed += deliveries
            self._give_back()
            raise

    def _begin_all(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Begin them in the backend; finish those of tasks that have ended, and return the others."""
        known: list[tuple[Delivery, str, int]] = []
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
                fresh.append(delivery)  # the engine knows what to do with it
            else:
                known.append((delivery, signature.uuid, signature.run))
        over: list[Disposal] = []
        unsent: list[tuple[str, Disposal]] = []
        for (delivery, uuid, _), start in zip(known, self._begin(known), strict=True):
            if start is None:
                continue
            if not start.finished:
                fresh.append(msgspec.structs.replace(delivery, epoch=start.epoch))
            elif start.outbox and delivery.redelivered:
                unsent.append((uuid, Disposal(delivery=delivery)))
            else:
                # Another message of the task leaves the outbox to who is at it: it lives, or its own message comes back.
                over.append(Disposal(delivery=delivery))
        if over:
            self._consumer.dispose(over)
        if unsent:
            self._send_unsent(unsent)
        return fresh

    def _send_unsent(self, ended: Sequence[tuple[str, Disposal]]) -> None:
        """Publish the outboxes that settlements before these deliveries have left. What finds no room is parked."""
        # Asked for again when no settlement of ours is between storing an outbox and clearing it.
        with self._settling:
            found = self._store.backend.outboxes([uuid for uuid, _ in ended])
            rows = [
                (disposal, Outbox(uuid, bodies, disposal.delivery.queue))
                for (uuid, disposal), bodies in zip(ended, found, strict=True)
            ]
            left = self._store.publish([outbox for _, outbox in rows]).left
            self._consumer.dispose([one for one, outbox in rows if outbox.key not in left])
            # Last: what is parked is not given back.
            for disposal, outbox in rows:
                if outbox.key in left:
                    self._park(disposal, outbox, left)

    def _begin(self, known: Sequence[tuple[Delivery, str, int]]) -> Sequence[Begun | None]:
        """Begin them; None for each under whose UUID something else lies: it has gone to the dead letters."""
        try:
            return self._store.backend.begin([(uuid, run) for _, uuid, run in known])
        except NameRefused as error:
            if len(known) > 1:
                return [start for one in known for start in self._begin([one])]
            [(delivery, uuid, _)] = known
            logger.error(
                "message on %r goes to the dead letters: %s: %s", delivery.queue, REASON, error
            )
            self._consumer.dispose(
                [
                    Disposal(
                        delivery=delivery,
                        fate=Fate.DEAD,
                        reason=REASON,
                        error=str(error),
                        uuid=uuid,
                    )
                ]
            )
            return [None]

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        with self._settling:
            if marks:
                self._mark(marks)
            return self._settle(settlements)

    def _settle(self, settlements: Sequence[Settlement]) -> list[Verdict]:
        stated = [settlement for settlement in settlements if settlement.states]
        changes = [self._change(settlement) for settlement in stated]
        found = self._store.backend.apply(changes)
        verdicts = dict(zip(map(id, stated), found, strict=True))
        outboxes = {
            settlement.uuid: Outbox(change.key, change.outbox, settlement.delivery.queue)
            for settlement, change, verdict in zip(stated, changes, found, strict=True)
            if verdict is SETTLED and change.outbox
        }
        # Our own repeat: what the first try left undone is done now, with the same UUIDs.
        again = [settlement for settlement in stated if verdicts[id(settlement)] is ALREADY]
        if again:
            kept = self._store.backend.outboxes([settlement.uuid for settlement in again])
            outboxes |= {
                one.uuid: Outbox(one.uuid, bodies, one.delivery.queue)
                for one, bodies in zip(again, kept, strict=True)
            }
        left = self._store.publish(list(outboxes.values())).left if outboxes else {}
        over = settlements
        if left:
            over = [
                one
                for one in settlements
                if one.uuid not in left or verdicts.get(id(one), FENCED) is FENCED
            ]
            there = set(map(id, over))
            for one in settlements:
                if id(one) not in there:
                    self._park(disposal_of(one), outboxes[one.uuid], left)
        ours = self._consumer.dispose([disposal_of(settlement) for settlement in over])
        for settlement, mine in zip(over, ours, strict=True):
            verdicts.setdefault(id(settlement), SETTLED if mine else FENCED)
        return [verdicts[id(settlement)] for settlement in settlements]

    # What waits for room

    def _park(
        self, disposal: Disposal, outbox: Outbox, left: Mapping[str, Sequence[Message]]
    ) -> None:
        now = self._store.clock.monotonic()
        is_news = now - self._told_at > TOLD_EVERY
        self._told_at = now if is_news else self._told_at
        logger.log(
            logging.WARNING if is_news else logging.DEBUG,
            "a queue is full: what follows from task %s waits for room, and the worker goes on",
            outbox.key,
        )
        self._parked.append(_Parked(disposal, outbox, left[outbox.key]))
        self._store.parked.add(outbox.key)

    def _resume(self) -> bool:
        """Publish what is parked, as far as there is room now; whether there was."""
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
        # What was lost with the connection is another's: its message comes back, and brings the outbox.
        held = [one for one in self._parked if not self._consumer.is_lost(one.disposal.delivery)]
        if self._knows_outboxes and held:
            # Old ones are published by others as well.
            for one, kept in zip(
                held, self._store.backend.outboxes([one.outbox.key for one in held]), strict=True
            ):
                one.left = one.left if kept else ()
        waiting = [
            (one.outbox.key, one.outbox.home, message) for one in held for message in one.left
        ]
        posted = self._store.post(waiting) if waiting else Posted()
        for one in held:
            one.left = posted.left.get(one.outbox.key, ())
        done = [one for one in held if not one.left]
        self._store.backend.clear_outbox([(one.outbox.key, one.outbox.bodies) for one in done])
        self._consumer.dispose([one.disposal for one in done])
        self._store.parked.difference_update(one.outbox.key for one in self._parked if not one.left)
        self._parked = [one for one in held if one.left]

    def beat(self) -> bool:
        is_ours = super().beat()
        self._resume()
        return is_ours

    def close(self) -> None:
        self._resume()
        super().close()

    def _change(self, settlement: Settlement) -> Change:
        return Change(
            key=settlement.uuid,
            mark=mark_of(settlement.delivery),
            epoch=settlement.delivery.epoch,
            states=settlement.states,
            groups=settlement.groups,
            arrivals=settlement.arrivals,
            outbox=[_pack(message) for message in settlement.send],
        )

    def _mark(self, marks: Sequence[Mark]) -> None:
        self._store.backend.apply(
            [
                Change(key=mark.state.task_uuid, states=(mark.state,), epoch=mark.delivery.epoch)
                for mark in marks
            ]
        )
