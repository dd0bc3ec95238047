"""A consumer of SQS queues. What it holds is invisible to others while it beats.

SQS does not refuse the deletion of a message that somebody else has by now, so the end of a lease
is judged here, by a clock that starts before the request for the message does.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from machinery_py.brokers.base import WAITING, Consumer, DeadLetter, Delivery, Disposal, Fate
from machinery_py.brokers.entries import new_worker
from machinery_py.errors import MachineryError
from machinery_py.receipts import Receipt
from machinery_py.texts import get_logger

from .aws import LONGEST_POLL
from .queues import (
    LONGEST_HIDING,
    TEN,
    Extra,
    Queue,
    body_of,
    delay_of,
    extra_of,
    in_tens,
    receives_of,
    sent_at_of,
)

if TYPE_CHECKING:
    from .broker import SQSBroker

logger = get_logger(__name__)

# SQS counts receipts and not runs. A worker that stops gives back what it holds, and that counts,
# too: so the first receipts of a message are no strikes.
FREE = 5


class SQSReceipt(str, Receipt):
    """The receipt handle of SQS."""


class Held(msgspec.Struct):
    """A delivery in our hands, until the monotonic moment `until`. `copied`: its copy is sent."""

    delivery: Delivery
    queue: Queue
    extra: Extra
    until: float
    copied: bool = False


class SQSConsumer(Consumer):
    def __init__(self, broker: SQSBroker, queues: Sequence[str], worker: str) -> None:
        self._broker = broker
        self._clock = broker.clock
        self._held: dict[Receipt, Held] = {}
        self._ending = threading.RLock()  # a renewal after the end would hide what was given back
        self._woken = threading.Event()
        self._closed = False
        self._turn = 0
        self._worker = worker
        self._queues = [broker.queues.open(name) for name in queues]
        self._register()

    def _register(self) -> None:
        self.info = new_worker(self._worker, self.names, self._clock.now())
        self.session = self.info.session
        self._beaten = self._clock.monotonic()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(queue.name for queue in self._queues)

    @property
    def holding(self) -> int:
        now = self._clock.monotonic()
        return sum(one.until > now for one in list(self._held.values()))

    @property
    def is_alive(self) -> bool:
        lapsed = self._clock.monotonic() - self._beaten > self._broker.lease
        return not (self._closed or lapsed)

    def serve(self, queues: Sequence[str]) -> None:
        self._queues = [self._broker.queues.open(name) for name in queues]
        self.info = msgspec.structs.replace(self.info, queues=self.names)
        self.wake()

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        deadline = time.monotonic() + timeout
        while True:
            found = self._sweep(limit, order)
            left = deadline - time.monotonic()
            if found or left <= 0 or self._woken.is_set() or self._closed or not self._queues:
                self._woken.clear()
                return found
            if left < LONGEST_POLL:
                self._woken.wait(left)
                continue
            self._turn += 1
            queues = self._queues
            self._claim(queues[self._turn % len(queues)], limit, found, wait=LONGEST_POLL)
            if found:
                return found

    def _sweep(self, limit: int, order: Sequence[str]) -> list[Delivery]:
        """Claim what the queues have at once."""
        serving = {queue.name: queue for queue in self._queues}
        found: list[Delivery] = []
        for name in order or list(serving):
            if name in serving:
                self._claim(serving[name], limit, found, wait=0)
        return found

    def _claim(self, queue: Queue, limit: int, found: list[Delivery], *, wait: int) -> None:
        # Of a FIFO queue one by one: a reply may hold several messages of a group, which may not
        # run side by side.
        most = 1 if queue.is_fifo else limit
        hidden = math.ceil(self._broker.lease)
        while len(found) < limit and not self._closed:
            began, asked = self._clock.monotonic(), min(TEN, most, limit - len(found))
            try:
                raws = self._broker.queues.receive(queue, limit=asked, hidden=hidden, wait=wait)
                for raw in raws:
                    if (one := self._hold(queue, raw, began)) is not None:
                        found.append(one)
            except MachineryError:
                if not found:
                    raise
                # What was claimed would be stuck: its lease is renewed, and nobody runs it.
                logger.warning("receiving from queue %r failed", queue.name, exc_info=True)
                return
            if len(raws) < asked:
                return
            wait = 0

    def _hold(self, queue: Queue, raw: dict[str, Any], began: float) -> Delivery | None:
        extra, receives = extra_of(raw), receives_of(raw)
        delivery = Delivery(
            body=body_of(raw, extra),
            queue=queue.name,
            receipt=SQSReceipt(raw["ReceiptHandle"]),
            count=extra.fence + receives,
            strikes=0 if queue.is_fifo else max(0, receives - FREE),
            parks=extra.parks,
            sent_at=extra.sent_at or sent_at_of(raw),
        )
        held = Held(delivery, queue, extra, began + self._broker.lease)
        if delay_of(extra.eta, self._clock.now()):
            self._postpone(held)
            return None
        with self._ending:
            if not self._closed:
                self._held[delivery.receipt] = held
                return delivery
        self._broker.queues.hide(queue, [str(delivery.receipt)], 0)
        return None

    def _postpone(self, held: Held) -> None:
        """Let a message wait on, that was sent further ahead than SQS delays messages."""
        if held.queue.is_fifo:
            delay = delay_of(held.extra.eta, self._clock.now())
            self._broker.queues.hide(
                held.queue, [str(held.delivery.receipt)], min(delay, LONGEST_HIDING)
            )
            return
        extra = msgspec.structs.replace(held.extra, sent_at=held.delivery.sent_at)
        self._broker.resend(held.queue, held.delivery.body, extra)
        self._broker.queues.delete(held.queue, [str(held.delivery.receipt)])

    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        with self._ending:
            now = self._clock.monotonic()
            ours: dict[Receipt, tuple[int, Held]] = {}
            for place, one in enumerate(disposals):
                held = self._held.get(one.delivery.receipt)
                if held is not None and held.until > now:
                    ours.setdefault(one.delivery.receipt, (place, held))
            self._copy([(held, disposals[place]) for place, held in ours.values()])
            verdicts = [False] * len(disposals)
            ends: dict[tuple[str, int], list[tuple[int, Held]]] = defaultdict(list)
            for place, held in ours.values():
                ends[held.queue.name, self._hiding(held, disposals[place])].append((place, held))
            for (_, seconds), rows in ends.items():
                for part in in_tens(rows):
                    receipts = [str(held.delivery.receipt) for _, held in part]
                    queue = part[0][1].queue
                    ended = (
                        self._broker.queues.delete(queue, receipts)
                        if seconds < 0
                        else self._broker.queues.hide(queue, receipts, seconds)
                    )
                    for (place, held), verdict in zip(part, ended, strict=True):
                        verdicts[place] = verdict
                        self._held.pop(held.delivery.receipt, None)
            return verdicts

    def _hiding(self, held: Held, disposal: Disposal) -> int:
        """Return for how long the message is hidden now; -1: it is deleted."""
        if disposal.fate is Fate.BACK:
            return 0
        if disposal.fate is Fate.LATER and held.queue.is_fifo:
            return min(delay_of(disposal.eta, self._clock.now()), LONGEST_HIDING)
        return -1

    def _copy(self, ends: Sequence[tuple[Held, Disposal]]) -> None:
        """Send the copies that wait on, and the dead letters, before the originals are deleted."""
        for held, disposal in ends:
            one = held.delivery
            if held.copied or self._hiding(held, disposal) >= 0:
                continue
            if disposal.fate is Fate.LATER:
                parks = one.parks + (disposal.reason != WAITING)
                extra = Extra(eta=disposal.eta, parks=parks, fence=one.count, sent_at=one.sent_at)
                self._broker.resend(held.queue, one.body, extra)
            elif disposal.fate is Fate.DEAD:
                self._broker.keep_dead(held.queue, self._letter(held, disposal))
            held.copied = True

    def _letter(self, held: Held, disposal: Disposal) -> DeadLetter:
        return DeadLetter(
            id="",
            uuid=disposal.uuid,
            name=disposal.name,
            queue=held.queue.name,
            body=held.delivery.body,
            reason=disposal.reason,
            error=disposal.error,
            strikes=held.delivery.strikes,
            died_at=self._clock.now(),
        )

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        return [not self.is_lost(delivery) for delivery in deliveries]

    def is_lost(self, delivery: Delivery) -> bool:
        held = self._held.get(delivery.receipt)
        return held is None or held.until <= self._clock.monotonic()

    def beat(self) -> bool:
        with self._ending:
            began = self._clock.monotonic()
            if not self._closed and not self.is_alive:
                self._held.clear()
                self._register()
                return False
            by_queue: dict[str, list[Held]] = defaultdict(list)
            for held in self._held.values():
                by_queue[held.queue.name].append(held)
            for rows in by_queue.values():
                for part in in_tens(rows):
                    self._renew(part)
            self._beaten = began
            self.info = msgspec.structs.replace(self.info, beat_at=self._clock.now())
            return True

    def _renew(self, part: Sequence[Held]) -> None:
        began, seconds = self._clock.monotonic(), math.ceil(self._broker.lease)
        receipts = [str(held.delivery.receipt) for held in part]
        renewed = self._broker.queues.hide(part[0].queue, receipts, seconds)
        for held, is_ours in zip(part, renewed, strict=True):
            if is_ours and held.until > began:
                held.until = began + self._broker.lease
            else:
                self._held.pop(held.delivery.receipt, None)

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        with self._ending:
            self._closed = True
            held = [one.delivery for one in self._held.values()]
            try:
                self.dispose([Disposal(delivery=one, fate=Fate.BACK) for one in held])
            finally:
                self._held.clear()
                self._broker.forget(self)
                self.wake()
