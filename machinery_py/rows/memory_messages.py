"""Messages and holds of rows in memory."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import secrets
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from machinery_py.bounds import STEP_BYTES
from machinery_py.clock import Clock
from machinery_py.fences import Fence
from machinery_py.rows.contract import PAGE, page_of
from machinery_py.rows.messages import (
    REVOKED,
    Claimed,
    ClaimReceipt,
    Claims,
    Hold,
    HoldReport,
    MessageStep,
    Place,
    Push,
    QueueCount,
    StoredMessage,
    TopicListener,
    queue_topic,
)
from machinery_py.rows.steps import StepTarget
from machinery_py.rows.suspects import Suspects, is_silent

Order = tuple[int, int, int]  # priority, turn, number; the least is the next


class KeptMessage(msgspec.Struct, kw_only=True, gc=False):
    """A message, and where it is. One that is taken from its queue stays in the heap, as gone."""

    id: int
    queue: str
    body: bytes
    tenant: str | None
    due: int
    put_at: int
    order: Order
    count: int = 0
    strikes: int = 0
    claim: int = 0
    is_late: bool = False
    is_gone: bool = False
    runs: bool = False

    def __lt__(self, other: KeptMessage) -> bool:
        return self.is_gone  # of two at one place the other one has been pushed again since

    def stored(self) -> StoredMessage:
        return StoredMessage(
            id=self.id,
            queue=self.queue,
            body=self.body,
            put_at=self.put_at,
            place=(self.due, self.id) if self.is_late else self.order,
        )

    def claimed(self, hold: str, fence: Fence) -> Claimed:
        return Claimed(
            receipt=ClaimReceipt(hold, self.id, self.count),
            queue=self.queue,
            body=self.body,
            fence=fence,
            strikes=self.strikes,
            put_at=self.put_at,
        )


class KeptHold(msgspec.Struct):
    """A hold, and what it has claimed. Claims with a number below `oldest_claim` give nothing."""

    body: bytes
    lease: float
    beat_at: int
    is_ended: bool = False
    oldest_claim: int = 0
    messages: dict[int, KeptMessage] = {}


#: By priority: the turn that is served, the last one of each tenant.
Turns = dict[int, tuple[int, dict[str, int]]]


class MessageTables(msgspec.Struct):
    """All messages: those that wait or are late, and those in holds; and the turns of queues.

    `number`: the last that a message got.
    """

    number: int = 0
    waiting: dict[int, KeptMessage] = {}
    holds: dict[str, KeptHold] = {}
    turns: dict[str, Turns] = {}


class _Queue:
    """The messages that wait: those that have waited before, whose turn is below 0, and others."""

    def __init__(self) -> None:
        self.size = 0
        self._waited: list[tuple[Order, KeptMessage]] = []
        self._others: list[tuple[Order, KeptMessage]] = []
        self.turns: Turns = {}  # if it is fair

    def __iter__(self) -> Iterator[KeptMessage]:
        for _, message in itertools.chain(self._waited, self._others):
            if not message.is_gone:
                yield message

    def add(self, message: KeptMessage) -> None:
        self.size += 1
        heap = self._waited if message.order[1] < 0 else self._others
        heapq.heappush(heap, (message.order, message))

    def next_turn(self, priority: int, tenant: str) -> int:
        """Return the next turn of a tenant, which is not before the one now served."""
        served, last = self.turns.setdefault(priority, (1, {}))
        last[tenant] = turn = max(served, last.get(tenant, 0) + 1)
        return turn

    def take(self, items: int, size: int, claim: int, *, one: bool) -> Iterator[KeptMessage]:
        """Take the next ones. While others wait, half of them is theirs. `one`: of any size."""
        waited, others = self._waited, self._others
        room, left = (items + claim % 2) // 2, items
        while left > 0 and self.size:
            first = bool(waited) and (not others or (room > 0 and waited[0] < others[0]))
            heap = waited if first else others
            order, message = heap[0]
            size -= 0 if message.is_gone else len(message.body)
            if size < 0 and not (one and left == items):
                break
            heapq.heappop(heap)
            if message.is_gone:
                continue
            if message.tenant is not None:
                served, last = self.turns.get(-order[0], (1, {}))
                self.turns[-order[0]] = max(served, order[1]), last
            room -= first
            left -= 1
            self.size -= 1
            yield message
        self.end_turns()

    def drop(self, message: KeptMessage) -> None:
        """Let a message go that waits."""
        message.is_gone = True
        self.size -= 1
        self.end_turns()

    def end_turns(self) -> None:
        """Forget the tenants if nothing waits."""
        if not self.size:
            self._waited.clear()
            self._others.clear()
            if self.turns:
                self.turns = {one: (served, {}) for one, (served, _) in self.turns.items()}


class MemoryMessages(StepTarget):
    """Messages in heaps, by queue, and those that are late.

    Attributes:
        wall: µs by the clock on the wall, when the call of the store began.
    """

    clock: Clock
    lock: contextlib.AbstractContextManager[object]

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.wall = 0
        self._suspects = Suspects(clock)
        self._number = 0
        self._claims = itertools.count(1)
        self._waiting: dict[int, KeptMessage] = {}  # and late
        self._queues: dict[str, _Queue] = {}
        self._late: list[tuple[int, Order, KeptMessage]] = []
        self.all_holds: dict[str, MemoryHold] = {}
        self.listeners: set[MemoryTopicListener] = set()
        self._news: set[str] = set()  # topics to be told

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def next_fence(self) -> Fence: ...

    @abstractmethod
    def is_empty(self, kind: str) -> bool: ...

    @abstractmethod
    def is_closed(self, queue: str) -> bool: ...

    @abstractmethod
    def now(self) -> int: ...

    def dump_messages(self) -> MessageTables:
        """Return all that is kept, which goes on changing. Called with the lock held."""
        holds = {id: hold.kept for id, hold in self.all_holds.items()}
        turns = {name: queue.turns for name, queue in self._queues.items() if queue.turns}
        return MessageTables(self._number, self._waiting, holds, turns)

    def load_messages(self, tables: MessageTables) -> None:
        """Replace all that is kept by these tables. Called with the lock held."""
        self._number, self._waiting = tables.number, tables.waiting
        self._late, self._queues = [], {}
        for name, turns in tables.turns.items():
            self._queues[name] = queue = _Queue()
            queue.turns = turns
        for message in tables.waiting.values():
            if message.is_late:
                heapq.heappush(self._late, (message.due, message.order, message))
            else:
                self._queues.setdefault(message.queue, _Queue()).add(message)
        for id in self.all_holds.keys() - tables.holds:
            self.all_holds.pop(id).kept = KeptHold(b"", 0.0, 0, is_ended=True)
        for id, kept in tables.holds.items():
            if id in self.all_holds:
                self.all_holds[id].kept = kept
            else:
                self.all_holds[id] = self.hold_of(id, kept)

    def tell(self, topics: set[str]) -> None:
        """Wake those that listen. Called with the lock held."""
        for listener in tuple(self.listeners):
            listener.tell(topics)

    def tell_news(self) -> None:
        """Tell what was changed. Called with the lock held."""
        if self._news:
            news, self._news = self._news, set()
            self.tell(news)

    # Steps

    def are_there(self, receipts: Sequence[ClaimReceipt]) -> bool:
        for one in receipts:
            if not one.hold:
                if one.id not in self._waiting:
                    return False
                continue
            hold = self.all_holds.get(one.hold)
            kept = None if hold is None or hold.kept.is_ended else hold.kept
            message = None if kept is None else kept.messages.get(one.id)
            if message is None or message.count != one.count:
                return False
        return True

    def move(self, step: MessageStep) -> None:
        self._news.update(step.tell)
        taken: dict[int, KeptMessage] = {}
        for receipt in step.takes:
            if receipt.hold:
                taken[receipt.id] = self.all_holds[receipt.hold].kept.messages.pop(receipt.id)
            else:
                taken[receipt.id] = self._take(receipt.id)
        for push in step.pushes:
            self._push(push, None if push.id is None else taken[push.id])

    def _take(self, id: int) -> KeptMessage:
        """Take a message that waits, or is late."""
        message = self._waiting.pop(id)
        if message.is_late:
            message.is_gone = True
        else:
            self._queues[message.queue].drop(message)
        return message

    def _push(self, push: Push, old: KeptMessage | None) -> None:
        self._news.add(queue_topic(push.queue))  # a sleeper may have to wake earlier than planned
        number = 0 if old is None else old.order[2]
        if old is None or push.tenant is not None:
            self._number = number = self._number + 1
        message = KeptMessage(
            id=number if old is None else old.id,
            queue=push.queue,
            body=push.body if push.body is not None else b"" if old is None else old.body,
            tenant=push.tenant,
            due=push.due,
            put_at=self.wall,
            order=(-push.priority, 0, number),
        )
        if old is not None:
            message.put_at, message.count, message.strikes = old.put_at, old.count, old.strikes
            if push.place is Place.SAME:
                message.tenant, message.due, message.order = old.tenant, old.due, old.order
            elif push.place is Place.WAITED:
                message.order = message.order[0], push.due - 2**62, old.order[2]
        if push.place is not Place.SAME and push.due > self.wall:
            message.is_late = True
            self._waiting[message.id] = message
            heapq.heappush(self._late, (message.due, message.order, message))
        else:
            self._enqueue(message, keeps=push.place is Place.SAME)

    def _enqueue(self, message: KeptMessage, *, keeps: bool = False) -> None:
        queue = self._queues.get(message.queue)
        if queue is None:
            queue = self._queues[message.queue] = _Queue()
        message.is_late = False
        if message.tenant is not None and not keeps:
            priority, _, number = message.order
            message.order = priority, queue.next_turn(-priority, message.tenant), number
        self._waiting[message.id] = message
        queue.add(message)

    def promote(self) -> int | None:
        with self.lock:
            if not self._late:
                return None
            self.begin()
            while self._late and (self._late[0][0] <= self.wall or self._late[0][2].is_gone):
                _, _, message = heapq.heappop(self._late)
                if not message.is_gone:
                    self._enqueue(message)
                    self._news.add(queue_topic(message.queue))
            self.tell_news()
            return self._late[0][0] if self._late else None

    def claim(
        self,
        hold: MemoryHold,
        queues: Sequence[str],
        items: int,
        size: int,
        number: int,
        claimed: list[Claimed],
    ) -> None:
        """Add to what a hold has claimed. Called with the lock held."""
        held = hold.kept.messages
        turn = next(self._claims)
        for name in queues:
            queue = self._queues.get(name)
            if queue is None or not queue.size or self.is_closed(name):
                continue
            for message in queue.take(max(0, items - len(claimed)), size, turn, one=not claimed):
                size -= len(message.body)
                message.count += 1
                message.claim = number
                held[message.id] = self._waiting.pop(message.id)
                claimed.append(message.claimed(hold.id, self.next_fence()))

    # Looking

    def count_waiting(self, queue: str) -> int:
        with self.lock:
            self.promote()
            return self._queues[queue].size if queue in self._queues else 0

    def messages(
        self,
        queue: str | None,
        *,
        since: int = 0,
        after: StoredMessage | None = None,
        items: int = PAGE,
        size: int = STEP_BYTES,
    ) -> list[StoredMessage]:
        with self.lock:
            self.promote()
            if queue is None:
                found = [one.stored() for _, _, one in self._late if not one.is_gone]
            else:
                found = [one.stored() for one in self._queues.get(queue, ())]
        if since:
            found = [one for one in found if one.put_at >= since]
        if after is not None:
            found = [one for one in found if _place(one) > _place(after)]
        return page_of(heapq.nsmallest(items, found, key=_place), size)

    def newest_id(self) -> int:
        with self.lock:
            return self._number

    def count_messages(self) -> dict[str, QueueCount]:
        counts: dict[str, QueueCount] = {}
        with self.lock:
            self.promote()
            for hold in self.all_holds.values():
                for message in hold.kept.messages.values():
                    counts.setdefault(message.queue, QueueCount()).held += 1
            for message in self._waiting.values():
                count = counts.setdefault(message.queue, QueueCount())
                if message.is_late:
                    count.late += 1
                else:
                    count.waiting += 1
                    count.oldest_at = min(count.oldest_at or message.put_at, message.put_at)
        return counts

    # Holds

    def hold_of(self, id: str, kept: KeptHold) -> MemoryHold:
        """Return a hold that this process has opened, or found in its tables."""
        return MemoryHold(self, id, kept)

    def open_hold(self, body: bytes, *, lease: float) -> MemoryHold:
        with self.lock:
            kept = KeptHold(body, lease, self.now())
            hold = self.hold_of(secrets.token_hex(12), kept)
            self.all_holds[hold.id] = hold
            return hold

    def holds(self) -> list[HoldReport]:
        with self.lock:
            return [hold.report() for hold in self.all_holds.values() if not hold.kept.is_ended]

    def dead_holds(self) -> list[str]:
        with self.lock:
            self._suspects.look(
                (hold.id, hold.kept.beat_at, hold.kept.lease)
                for hold in self.all_holds.values()
                if is_silent(self.now() - hold.kept.beat_at, round(hold.kept.lease * 1e6))
            )
            return [hold.id for hold in self.all_holds.values() if self._is_dead(hold)]

    def _is_dead(self, hold: MemoryHold) -> bool:
        kept = hold.kept
        return kept.is_ended or self._suspects.dead.get(hold.id) == kept.beat_at

    def condemn(self, hold: str, items: int) -> int | None:
        with self.lock:
            there = self.all_holds.get(hold)
            if there is None:
                return 0
            return self.give_back(there, items) if self._is_dead(there) else None

    def give_back(self, hold: MemoryHold, items: int, *, struck: bool = True) -> int:
        """End a hold; return how many messages went back. Called with the lock held."""
        kept = hold.kept
        kept.is_ended = True
        back = list(itertools.islice(kept.messages.values(), items))
        for message in back:
            del kept.messages[message.id]
            message.strikes += struck and message.runs
            message.runs = False
            self._enqueue(message, keeps=True)
            self._news.add(queue_topic(message.queue))
        if not kept.messages:
            self.all_holds.pop(hold.id, None)
        self.tell_news()
        return len(back)


class MemoryHold(Hold):
    """A hold that lives while it beats."""

    def __init__(self, rows: MemoryMessages, id: str, kept: KeptHold) -> None:
        self.id = id
        self.kept = kept
        self.rows = rows

    def is_stalled(self) -> bool:
        return self.rows.now() - self.kept.beat_at > self.kept.lease * 1e6

    def claim(
        self,
        queues: Sequence[str],
        items: int,
        *,
        size: int = STEP_BYTES,
        number: int = 0,
        lost: int | None = None,
    ) -> Claims:
        rows = self.rows
        with rows.lock:
            rows.begin()
            next_due = rows.promote()
            if self.kept.is_ended or number < self.kept.oldest_claim:
                return Claims([], next_due)
            found: list[Claimed] = []
            if lost is not None:
                self.kept.oldest_claim = number
                for one in self.kept.messages.values():
                    if one.claim >= lost:
                        one.claim = number
                        found.append(one.claimed(self.id, rows.next_fence()))
                        size -= len(one.body)
            rows.claim(self, queues, items, size, number, found)
            return Claims(found, next_due, rows.is_empty(REVOKED))

    def has(self, receipts: Sequence[ClaimReceipt]) -> list[bool]:
        with self.rows.lock:
            return [one.hold == self.id and self.rows.are_there((one,)) for one in receipts]

    # Without the lock, which would cost each task two turns of it.

    def begin_run(self, receipt: ClaimReceipt) -> None:
        message = self.kept.messages.get(receipt.id)
        if message is not None and message.count == receipt.count:
            message.runs = True

    def end_run(self, receipt: ClaimReceipt) -> None:
        message = self.kept.messages.get(receipt.id)
        if message is not None and message.count == receipt.count:
            message.runs = False

    def write(self, body: bytes) -> None:
        with self.rows.lock:
            self.kept.body = body

    def beat(self) -> bool:
        with self.rows.lock:
            self.kept.beat_at = self.rows.now()
            return not self.kept.is_ended

    def end(self) -> None:
        with self.rows.lock:
            self.rows.give_back(self, len(self.kept.messages), struck=False)

    def report(self) -> HoldReport:
        """Return it as listings show it. Called with the lock held."""
        return HoldReport(
            id=self.id,
            body=self.kept.body,
            beat_at=self.kept.beat_at,
            holding=len(self.kept.messages),
            stalled=self.is_stalled(),
        )


class MemoryTopicListener(TopicListener):
    """An event that is set when a watched topic is told."""

    def __init__(self, rows: MemoryMessages) -> None:
        self.rows = rows
        self.event: Final = threading.Event()
        self._watched: set[str] = set()
        self._changing = threading.Lock()
        with rows.lock:
            rows.listeners.add(self)

    def watch(self, topics: Iterable[str]) -> None:
        with self._changing:
            self._watched.update(topics)

    def unwatch(self, topics: Iterable[str]) -> None:
        with self._changing:
            self._watched.difference_update(topics)

    def tell(self, topics: set[str]) -> None:
        """Wake the waiter if it watches one of these."""
        with self._changing:
            if not self._watched.isdisjoint(topics):
                self.event.set()

    def wait(self, timeout: float) -> None:
        self.event.wait(timeout)
        self.event.clear()

    def wake(self) -> None:
        self.event.set()

    def close(self) -> None:
        self.rows.listeners.discard(self)


def _place(message: StoredMessage) -> Any:
    """Return its place: a number in a queue, a pair of numbers among late messages."""
    return message.place
