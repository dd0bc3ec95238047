"""Messages in this process: for tests, and the reference that the other brokers are compared with.

Limits: nothing survives the process, and no other process sees it.
"""

from __future__ import annotations

import datetime as dt
import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from machinery_py.brokers.base import (
    WAITING,
    Broker,
    BrokerFeatures,
    Consumer,
    DeadLetter,
    Delivery,
    Disposal,
    Fate,
    Message,
    QueueStats,
    WorkerInfo,
)
from machinery_py.brokers.entries import (
    RETRY_MARK,
    SET_BACK,
    ClockWatch,
    Entry,
    new_letter,
    new_worker,
)
from machinery_py.brokers.queue_limits import QueueLimit
from machinery_py.brokers.topics import TOPIC_LENGTH, PushedSubscription
from machinery_py.clock import micros
from machinery_py.connections.memory import MemoryHub
from machinery_py.connections.recent_tokens import RecentTokens

LEASE = 10.0  # seconds without a beat until a consumer is given up


class _Entry(Entry, eq=False):
    """A message and its place in its queue, which it keeps until it is done."""

    # Priority, turn, number; the least is the next. A turn below 0: it has waited as WAITING.
    order: tuple[int, int, int] = (0, 0, 0)

    def __lt__(self, other: _Entry) -> bool:
        return self.order < other.order


class _Waiting:
    """The messages that wait in a queue: those that have waited as WAITING, and the others."""

    def __init__(self) -> None:
        self._turned: list[_Entry] = []
        self._others: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._turned) + len(self._others)

    def __iter__(self) -> Iterator[_Entry]:
        return itertools.chain(self._turned, self._others)

    def add(self, entry: _Entry) -> None:
        heapq.heappush(self._turned if entry.order[1] < 0 else self._others, entry)

    def take(self, limit: int, claim: int) -> list[_Entry]:
        """Take the next ones. While others wait, half of them is theirs."""
        turned, others, found = self._turned, self._others, list[_Entry]()
        room = (limit + claim % 2) // 2
        while len(found) < limit and (turned or others):
            is_turned = turned and (not others or (room > 0 and turned[0] < others[0]))
            room -= bool(is_turned)
            found.append(heapq.heappop(turned if is_turned else others))
        return found

    def keep(self, entries: Iterable[_Entry]) -> None:
        """Forget all but these."""
        self._turned.clear()
        self._others.clear()
        for entry in entries:
            self.add(entry)


@dataclass(slots=True)
class _Hold:
    """A registered consumer and the entries that it has, by receipt."""

    info: WorkerInfo
    beat: float
    beat_at: dt.datetime
    suspected: bool = False
    entries: dict[int, _Entry] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)

    def listed(self, *, stalled: bool) -> WorkerInfo:
        return msgspec.structs.replace(
            self.info, beat_at=self.beat_at, holding=len(self.entries), stalled=stalled
        )


class _Topic:
    """The newest records of a topic, and its subscriptions."""

    def __init__(self) -> None:
        #: Each with when it came and until when it counts, by the monotonic clock.
        self.records: deque[tuple[bytes, float, float]] = deque(maxlen=TOPIC_LENGTH)
        self.subscriptions: list[PushedSubscription] = []

    def is_over(self, now: float) -> bool:
        """Forget closed subscriptions; return whether nobody needs the topic."""
        self.subscriptions = [one for one in self.subscriptions if not one.is_closed]
        return not self.subscriptions and all(until <= now for _, _, until in self.records)


class MemoryBroker(Broker):
    """Queues as heaps under the hub's lock."""

    features = BrokerFeatures(
        name="memory",
        durable=False,
        shared=False,
        embedded=True,
        topics=True,
        keeps_topics=True,
        exact_limits=True,
        fair=True,
        forgets_queues=True,
    )

    def __init__(self, hub: MemoryHub, *, lease: float = LEASE) -> None:
        self.hub = hub
        self.lease = lease
        self._tokens = RecentTokens(hub.clock)
        self._sequence = itertools.count(1)
        self._queues: dict[str, _Waiting] = {}
        self._claims = itertools.count(1)
        self._delayed: list[tuple[dt.datetime, _Entry]] = []
        self._holds: dict[str, _Hold] = {}
        self._dead: dict[str, DeadLetter] = {}
        self._paused: set[str] = set()
        #: Of fair queues, by name and priority: the turn that is served, the last of each tenant.
        self._turns: dict[tuple[str, int], tuple[int, dict[str, int]]] = {}
        self._topics: dict[str, _Topic] = {}
        self._watch = ClockWatch(hub.clock)

    def is_entered(self) -> bool:
        return self.hub.is_entered()

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        with self.hub.lock:
            if not self._tokens.add(token):
                return False
            now = self.hub.clock.now()
            for message in messages:
                entry = _Entry(message, now, order=(-message.priority, 0, next(self._sequence)))
                self._place(entry, message.eta, now)
            self.hub.notify()
            return True

    def put_within(
        self, messages: Sequence[Message], limits: Sequence[QueueLimit], *, token: str
    ) -> bool:
        with self.hub.lock:
            return super().put_within(messages, limits, token=token)

    def was_put(self, token: str) -> bool:
        return token in self._tokens

    def waiting(self, queue: str) -> int:
        with self.hub.lock:
            self._promote()
            return len(self._queues.get(queue, ()))

    def _place(self, entry: _Entry, eta: dt.datetime | None, now: dt.datetime) -> None:
        queue = self._queues.setdefault(entry.message.queue, _Waiting())
        if eta is not None and eta > now:
            heapq.heappush(self._delayed, (eta, entry))
        else:
            queue.add(self._seated(entry))

    def _seated(self, entry: _Entry) -> _Entry:
        """Return it with the next turn of its tenant, which is not before the one now served."""
        message = entry.message
        if message.tenant is not None:
            key = message.queue, message.priority
            served, last = self._turns.setdefault(key, (1, {}))
            last[message.tenant] = turn = max(served, last.get(message.tenant, 0) + 1)
            entry.order = -message.priority, turn, next(self._sequence)
        return entry

    def consume(self, queues: Sequence[str], *, worker: str) -> MemoryConsumer:
        return MemoryConsumer(self, tuple(queues), worker)

    def tend(self) -> float:
        with self.hub.lock:
            if self._watch.was_set_back():
                self._count_again()
            promoted = self._promote()
            if self._reap() or promoted:
                self.hub.notify()
            return self.next_due()

    def _count_again(self) -> None:
        """Let delays of retries that began in the future, by a clock that was ahead, begin now."""
        now, delayed = self.hub.clock.now(), list[tuple[dt.datetime, _Entry]]()
        for eta, entry in self._delayed:
            ahead = entry.sent_at - now
            if ahead.total_seconds() > SET_BACK and RETRY_MARK in entry.message.body:
                entry.sent_at = now
                delayed.append((eta - ahead, entry))
            else:
                delayed.append((eta, entry))
        heapq.heapify(delayed)
        self._delayed = delayed

    def _promote(self) -> bool:
        now = self.hub.clock.now()
        found = False
        while self._delayed and self._delayed[0][0] <= now:
            _, entry = heapq.heappop(self._delayed)
            self._queues[entry.message.queue].add(self._seated(entry))
            found = True
        return found

    def _reap(self) -> bool:
        """Give up consumers that have missed their beats, at the second look."""
        now = self.hub.clock.monotonic()
        found = False
        for session, hold in list(self._holds.items()):
            if now - hold.beat <= self.lease:
                hold.suspected = False
            elif not hold.suspected:
                hold.suspected = True
            else:
                del self._holds[session]
                for receipt, entry in hold.entries.items():
                    entry.strikes += receipt in hold.running
                    self._queues[entry.message.queue].add(entry)
                    found = True
        return found

    def next_due(self) -> float:
        quarter = self.lease / 4
        if not self._delayed:
            return quarter
        until = (self._delayed[0][0] - self.hub.clock.now()).total_seconds()
        return min(quarter, max(0.0, until))

    def claim(self, hold: _Hold, queues: Sequence[str], limit: int) -> list[Delivery]:
        """Claim what `receive` finds without waiting. Called with the lock held."""
        self._promote()
        deliveries: list[Delivery] = []
        number = next(self._claims)
        for name in queues:
            queue = self._queues.get(name) if name not in self._paused else None
            for entry in queue.take(limit - len(deliveries), number) if queue else ():
                if entry.message.tenant is not None:
                    key = name, entry.message.priority
                    served, last = self._turns.get(key, (1, {}))
                    self._turns[key] = max(served, entry.order[1]), last if queue else {}
                receipt = next(self._sequence)
                hold.entries[receipt] = entry
                deliveries.append(entry.deliver(receipt, self.hub.fences.next()))
        return deliveries

    def dispose(self, hold: _Hold, disposal: Disposal) -> bool:
        """End one delivery. Called with the lock held."""
        entry = hold.entries.pop(disposal.delivery.receipt, None)
        if entry is None:
            return False
        match disposal.fate:
            case Fate.DONE:
                pass
            case Fate.BACK:
                self._queues[entry.message.queue].add(entry)
            case Fate.LATER:
                entry.put_off(disposal)
                now = self.hub.clock.now()
                due_at = micros(disposal.eta or now)
                turn = due_at - 2**62 if disposal.reason == WAITING else 0
                entry.order = entry.order[0], turn, entry.order[2]
                self._place(entry, disposal.eta, now)
            case Fate.DEAD:
                letter = entry.letter(disposal, self.hub.clock.now())
                self._dead[letter.id] = letter
        return True

    def register(self, info: WorkerInfo) -> _Hold:
        hold = _Hold(info, self.hub.clock.monotonic(), info.beat_at)
        self._holds[info.session] = hold
        self.enroll(hold, tuple(info.queues))
        return hold

    def enroll(self, hold: _Hold, queues: tuple[str, ...]) -> None:
        """Note the queues of a consumer. Called with the lock held."""
        hold.info = msgspec.structs.replace(hold.info, queues=queues)
        for queue in queues:
            self._queues.setdefault(queue, _Waiting())

    def hold(self, session: str) -> _Hold | None:
        return self._holds.get(session)

    def give_up(self, session: str) -> None:
        """Unregister a consumer that ends in good order; what it held goes back."""
        hold = self._holds.pop(session, None)
        if hold is not None:
            for entry in hold.entries.values():
                self._queues[entry.message.queue].add(entry)
            self.hub.notify()

    def pending(self, queue: str, limit: int) -> list[Message]:
        with self.hub.lock:
            self._promote()
            return [entry.message for entry in heapq.nsmallest(limit, self._queues.get(queue, ()))]

    def delayed(self, limit: int) -> list[Message]:
        with self.hub.lock:
            due = heapq.nsmallest(limit, self._delayed, key=lambda item: (item[0], item[1].order))
            return [entry.message for _, entry in due]

    def stats(self) -> list[QueueStats]:
        with self.hub.lock:
            self._promote()
            return [self._stats(queue) for queue in sorted(self._queues)]

    def _stats(self, queue: str) -> QueueStats:
        waiting = self._queues[queue]
        return QueueStats(
            queue=queue,
            waiting=len(waiting),
            running=sum(entry.message.queue == queue for entry in self._held()),
            delayed=sum(entry.message.queue == queue for _, entry in self._delayed),
            dead=sum(letter.queue == queue for letter in self._dead.values()),
            oldest_at=min((entry.sent_at for entry in waiting), default=None),
            paused=queue in self._paused,
        )

    def _held(self) -> Iterator[_Entry]:
        for hold in self._holds.values():
            yield from hold.entries.values()

    def workers(self) -> list[WorkerInfo]:
        with self.hub.lock:
            late = self.hub.clock.monotonic() - self.lease
            return [hold.listed(stalled=hold.beat < late) for hold in self._holds.values()]

    def purge(self, queue: str) -> int:
        with self.hub.lock:
            waiting = self._queues.get(queue, _Waiting())
            kept = [item for item in self._delayed if item[1].message.queue != queue]
            count = len(waiting) + len(self._delayed) - len(kept)
            waiting.keep(())
            self._forget_turns(queue)
            heapq.heapify(kept)
            self._delayed = kept
            return count

    def _forget_turns(self, queue: str) -> None:
        for key in [key for key in self._turns if key[0] == queue]:
            self._turns[key] = self._turns[key][0], {}

    def purge_each(
        self, queue: str, before: Callable[[Sequence[Message]], object]
    ) -> Iterator[Sequence[Message]]:
        with self.hub.lock:
            entries = [*sorted(self._queues.get(queue, ()))]
            entries += (entry for _, entry in self._delayed if entry.message.queue == queue)
            messages = [entry.message for entry in entries]
            before(messages)
            # What that has sent to this queue, for instance error callbacks, stays.
            gone = set(map(id, entries))
            waiting = [entry for entry in self._queues.get(queue, ()) if id(entry) not in gone]
            self._delayed = [item for item in self._delayed if id(item[1]) not in gone]
            heapq.heapify(self._delayed)
            if not waiting:
                self._forget_turns(queue)
            self._queues.get(queue, _Waiting()).keep(waiting)
        yield messages

    def forget_queue(self, queue: str) -> bool:
        with self.hub.lock:
            there = self._stats(queue) if queue in self._queues else None
            if there and (there.waiting or there.running or there.delayed or there.dead):
                return False
            served = (hold.info.queues for hold in self._holds.values())
            if queue in self._paused or any(queue in queues for queues in served):
                return False
            self._queues.pop(queue, None)
            for key in [key for key in self._turns if key[0] == queue]:
                del self._turns[key]
            return True

    def pause(self, queue: str) -> None:
        with self.hub.lock:
            self._queues.setdefault(queue, _Waiting())
            self._paused.add(queue)

    def resume(self, queue: str) -> None:
        with self.hub.lock:
            self._paused.discard(queue)
            self.hub.notify()

    def dead_letters(self, *, limit: int, queue: str = "") -> list[DeadLetter]:
        with self.hub.lock:
            letters = [
                letter for letter in reversed(self._dead.values()) if queue in ("", letter.queue)
            ]
            return letters[:limit]

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        now = self.hub.clock.now()
        letter = new_letter(message, now, reason=reason, error=error, queue=queue)
        with self.hub.lock:
            self._queues.setdefault(queue, _Waiting())
            self._dead[letter.id] = letter

    def take_dead(self, ids: Sequence[str]) -> list[DeadLetter]:
        with self.hub.lock:
            return [self._dead.pop(id) for id in ids if id in self._dead]

    def append_records(self, topic: str, records: Sequence[bytes], ttl: float) -> None:
        with self.hub.lock:
            now = self.hub.clock.monotonic()
            for name in [name for name, other in self._topics.items() if other.is_over(now)]:
                del self._topics[name]
            there = self._topics.setdefault(topic, _Topic())
            there.records.extend((record, now, now + ttl) for record in records)
            for subscription in there.subscriptions:
                subscription.add((record, now + ttl) for record in records)

    def subscribe(self, topic: str, *, since: float = 0.0) -> PushedSubscription:
        with self.hub.lock:
            there = self._topics.setdefault(topic, _Topic())
            subscription = PushedSubscription(self.hub.clock)
            there.subscriptions.append(subscription)
            oldest = self.hub.clock.monotonic() - since
            if since > 0:
                subscription.add((body, until) for body, at, until in there.records if at >= oldest)
            return subscription

    def close(self) -> None:
        pass  # the hub belongs to whoever made it


class MemoryConsumer(Consumer):
    """A registered hold, and the event that ends its waiting."""

    def __init__(self, broker: MemoryBroker, queues: tuple[str, ...], worker: str) -> None:
        self._broker = broker
        self._hub = broker.hub
        self._queues = queues
        self._worker = worker
        self._notifier = threading.Event()
        self._woken = False
        self._closed = False
        self._hub.add_notifier(self._notifier)
        self._start_session()

    def _start_session(self) -> None:
        info = new_worker(self._worker, self._queues, self._hub.clock.now())
        self.session = info.session
        with self._hub.lock:
            self._hold = self._broker.register(info)

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        deliveries = self._claim(limit, order)
        if not deliveries and timeout > 0 and not self._woken:
            self._notifier.wait(min(timeout, self._broker.next_due()))
            deliveries = self._claim(limit, order)
        self._woken = False
        return deliveries

    def _claim(self, limit: int, order: Sequence[str]) -> list[Delivery]:
        with self._hub.lock:
            self._notifier.clear()
            if self._closed or self._broker.hold(self.session) is not self._hold:
                return []
            queues = [queue for queue in order or self._queues if queue in self._queues]
            return self._broker.claim(self._hold, queues, limit)

    def serve(self, queues: Sequence[str]) -> None:
        with self._hub.lock:
            self._queues = tuple(queues)
            self._broker.enroll(self._hold, self._queues)
        self.wake()

    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        with self._hub.lock:
            if self._broker.hold(self.session) is not self._hold:
                return [False] * len(disposals)
            done = [self._broker.dispose(self._hold, disposal) for disposal in disposals]
            if any(disposal.fate in (Fate.BACK, Fate.LATER) for disposal in disposals):
                self._hub.notify()
            return done

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        with self._hub.lock:
            alive = self._broker.hold(self.session) is self._hold
            return [alive and delivery.receipt in self._hold.entries for delivery in deliveries]

    def run_begins(self, delivery: Delivery) -> None:
        self._hold.running.add(delivery.receipt)

    def run_ends(self, delivery: Delivery) -> None:
        self._hold.running.discard(delivery.receipt)

    def beat(self) -> bool:
        with self._hub.lock:
            if self._closed:
                return True
            if self._broker.hold(self.session) is not self._hold:
                self._start_session()
                return False
            self._hold.beat = self._hub.clock.monotonic()
            self._hold.beat_at = self._hub.clock.now()
            self._hold.suspected = False
            return True

    def wake(self) -> None:
        self._woken = True
        self._notifier.set()

    def close(self) -> None:
        self._closed = True
        self._hub.remove_notifier(self._notifier)
        with self._hub.lock:
            self._broker.give_up(self.session)
        self._notifier.set()
