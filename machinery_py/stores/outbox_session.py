"""A worker's session on two stores: what it claims is begun in the backend, what it settles goes through the outbox.

The steps are those of outbox.py. What a full queue refuses is parked: steps 3 and 4 of that settlement wait, its delivery
stays unacknowledged, and all others go on. While something is parked the session goes on claiming: a claim makes room in the
queue that it claims from, and what is parked is tried right behind each claim. So a chain that fills its own queue comes to its
end without anybody else.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from machinery_py.backends.base import (
    ALREADY,
    FENCED,
    SETTLED,
    Backend,
    Begun,
    Change,
    OutboxBackend,
    Verdict,
)
from machinery_py.brokers.base import Consumer, Delivery, Disposal, Fate, Message
from machinery_py.clock import Clock
from machinery_py.errors import DecodeError, MachineryError, NameRefused
from machinery_py.names import REASON, check_message
from machinery_py.stores.base import ConsumerSession, Mark, Settlement
from machinery_py.stores.transactional import disposal_of, mark_of
from machinery_py.texts import get_logger
from machinery_py.wire.signatures import decode_signature

logger = get_logger(__name__)

TOLD_EVERY = 60.0  # seconds between two lines of the log that say that a queue is full
MOST_PARKED = 1000  # settlements of a session that wait for room; from then on it claims one by one

_pack = msgspec.json.Encoder().encode


class Outbox(NamedTuple):
    """Messages to be published for `key`. `home`: the queue of the delivery that sends them, if there is one."""

    key: str
    bodies: Sequence[bytes]
    home: str = ""


class Posted:
    """Result of publishing: messages that found no room, by key; an error, if one was refused."""

    def __init__(self) -> None:
        self.left: dict[str, list[Message]] = {}
        self.refused: MachineryError | None = None


class OutboxStore(Protocol):
    """The part of a store that a session needs."""

    backend: Backend
    outbox: OutboxBackend
    clock: Clock
    parked: set[str]

    def publish(self, outboxes: Sequence[Outbox]) -> Posted: ...
    def post(self, messages: Sequence[tuple[str, str, Message]]) -> Posted: ...


@dataclass(slots=True)
class _Parked:
    """A settlement of which something found no room: its delivery, its outbox, and what is left of that to publish."""

    disposal: Disposal
    outbox: Outbox
    left: Sequence[Message]


class TwoSession(ConsumerSession):
    """A consumer whose deliveries are begun in the backend before they are handed out."""

    def __init__(self, store: OutboxStore, consumer: Consumer) -> None:
        self._store = store
        super().__init__(consumer)
        self._owed: list[Delivery] = []  # claimed, and neither handed out nor given back yet
        self._settling = threading.Lock()  # a repeat must see what the first try has left undone
        self._parked: list[_Parked] = []
        self._told_at = -math.inf
        features = store.backend.features
        self._knows_outboxes = features.keeps and not features.forgets

    def _give_back(self) -> None:
        if self._owed:
            self._consumer.dispose([Disposal(delivery=one, fate=Fate.BACK) for one in self._owed])
            self._owed = []

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        self._give_back()
        self._resume()
        room = limit if len(self._parked) < MOST_PARKED else 1
        deliveries = self._consumer.receive(room, timeout, order)
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
                fresh.append(delivery)  # the app knows what to do with it
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
            found = self._store.outbox.outboxes([uuid for uuid, _ in ended])
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
            self._consumer.dispose([letter])
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
            kept = self._store.outbox.outboxes([settlement.uuid for settlement in again])
            outboxes |= {
                one.uuid: Outbox(one.uuid, bodies, one.delivery.queue)
                for one, bodies in zip(again, kept, strict=True)
            }
        left = self._store.publish(list(outboxes.values())).left if outboxes else {}
        over: list[Settlement] = []
        for one in settlements:
            if one.uuid in left and verdicts.get(id(one), FENCED) is not FENCED:
                self._park(disposal_of(one), outboxes[one.uuid], left)
            else:
                over.append(one)
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
            outboxes = self._store.outbox.outboxes([one.outbox.key for one in held])
            for one, kept in zip(held, outboxes, strict=True):
                one.left = one.left if kept else ()
        waiting = [
            (one.outbox.key, one.outbox.home, message) for one in held for message in one.left
        ]
        posted = self._store.post(waiting) if waiting else Posted()
        for one in held:
            one.left = posted.left.get(one.outbox.key, ())
        done = [one for one in held if not one.left]
        self._store.outbox.clear_outbox([(one.outbox.key, one.outbox.bodies) for one in done])
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
        changes = [
            Change(key=one.state.task_uuid, states=(one.state,), epoch=one.delivery.epoch)
            for one in marks
        ]
        self._store.backend.apply(changes)
