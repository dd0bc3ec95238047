"""Messages and holds of rows in memory."""

from __future__ import annotations

import heapq
import itertools
import secrets
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from machinery_py.bounds import STEP_BYTES
from machinery_py.clock import Clock, micros
from machinery_py.fences import Fence
from machinery_py.rows.contract import PAGE, page_of
from machinery_py.rows.messages import (
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

Order = tuple[int, int, int]  # priority, turn, number; the least is the next


class _KeptMessage(msgspec.Struct, kw_only=True, gc=False):
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

    def stored(self) -> StoredMessage:
        return StoredMessage(
            id=self.id,
            queue=self.queue,
            body=self.body,
            put_at=self.put_at,
            due=self.due,
            place=(self.due, self.order) if self.is_late else self.order,
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


class _Queue:
    """The messages that wait: those that have waited before, whose turn is below 0, and others."""

    def __init__(self) -> None:
        self.size = 0
        self._waited: list[tuple[Order, _KeptMessage]] = []
        self._others: list[tuple[Order, _KeptMessage]] = []
        #: By priority, if it is fair: the turn that is served, the last one of each tenant.
        self.turns: dict[int, tuple[int, dict[str, int]]] = {}

    def __iter__(self) -> Iterator[_KeptMessage]:
        for _, message in itertools.chain(self._waited, self._others):
            if not message.is_gone:
                yield message

    def add(self, message: _KeptMessage) -> None:
        self.size += 1
        heap = self._waited if message.order[1] < 0 else self._others
        heapq.heappush(heap, (message.order, message))

    def next_turn(self, priority: int, tenant: str) -> int:
        """Return the next turn of a tenant, which is not before the one now served."""
        served, last = self.turns.setdefault(priority, (1, {}))
        last[tenant] = turn = max(served, last.get(tenant, 0) + 1)
        return turn

    def take(self, items: int, size: int, claim: int, *, one: bool) -> Iterator[_KeptMessage]:
        """Take the next ones. While others wait, half of them is theirs. `one`: of any size."""
        waited, others = self._waited, self._others
        room, left = (items + claim % 2) // 2, items
        while left and self.size:
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

    def drop(self, message: _KeptMessage) -> None:
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


class MemoryMessages:
    """Messages in heaps, by queue, and those that are late. `move` is called with the lock held.

    Attributes:
        wall: µs by the clock on the wall, when the call of the store began.
    """

    clock: Clock
    lock: threading.RLock

    def __init__(self) -> None:
        self.wall = 0
        self._numbers = itertools.count(1)
        self._claims = itertools.count(1)
        self._waiting: dict[int, _KeptMessage] = {}  # and late
        self._queues: dict[str, _Queue] = {}
        self._late: list[tuple[int, Order, _KeptMessage]] = []
        self.all_holds: dict[str, MemoryHold] = {}
        self.listeners: set[MemoryTopicListener] = set()

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def next_fence(self) -> Fence: ...

    @abstractmethod
    def is_closed(self, queue: str) -> bool: ...

    def tell(self, topics: set[str]) -> None:
        """Wake those that listen. Called with the lock held."""
        if topics:
            for listener in tuple(self.listeners):
                listener.tell(topics)

    # Steps

    def are_there(self, receipts: Sequence[ClaimReceipt]) -> bool:
        """Return whether the messages are where these say."""
        for one in receipts:
            if not one.hold:
                if one.id not in self._waiting:
                    return False
                continue
            hold = self.all_holds.get(one.hold)
            message = None if hold is None or hold.is_ended else hold.messages.get(one.id)
            if message is None or message.count != one.count:
                return False
        return True

    def move(self, step: MessageStep, told: set[str]) -> None:
        """Take and push what the step says."""
        taken: dict[int, _KeptMessage] = {}
        for receipt in step.takes:
            if receipt.hold:
                taken[receipt.id] = self.all_holds[receipt.hold].messages.pop(receipt.id)
            else:
                taken[receipt.id] = self._take(receipt.id)
        for push in step.pushes:
            if push.id is None:
                self._push(push, None, told)
            else:
                self._push(push, taken[push.id], told)

    def _take(self, id: int) -> _KeptMessage:
        """Take a message that waits, or is late."""
        message = self._waiting.pop(id)
        if message.is_late:
            message.is_gone = True
        else:
            self._queues[message.queue].drop(message)
        return message

    def _push(self, push: Push, old: _KeptMessage | None, told: set[str]) -> None:
        told.add(queue_topic(push.queue))  # a sleeper may have to wake earlier than planned
        number = next(self._numbers) if old is None or push.tenant is not None else old.order[2]
        message = _KeptMessage(
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

    def _enqueue(self, message: _KeptMessage, *, keeps: bool = False) -> None:
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
            told: set[str] = set()
            while self._late and (self._late[0][0] <= self.wall or self._late[0][2].is_gone):
                _, _, message = heapq.heappop(self._late)
                if not message.is_gone:
                    self._enqueue(message)
                    told.add(queue_topic(message.queue))
            self.tell(told)
            return self._late[0][0] if self._late else None

    def claim(
        self, hold: MemoryHold, queues: Sequence[str], items: int, size: int, claimed: list[Claimed]
    ) -> None:
        """Add to what a hold has claimed. Called with the lock held."""
        turn = next(self._claims)
        for name in queues:
            queue = self._queues.get(name)
            if queue is None or not queue.size or self.is_closed(name):
                continue
            for message in queue.take(max(0, items - len(claimed)), size, turn, one=not claimed):
                size -= len(message.body)
                message.count += 1
                hold.messages[message.id] = self._waiting.pop(message.id)
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
            found = [one for one in found if one.place > after.place]  # type: ignore[operator]  # tuples
        return page_of(heapq.nsmallest(items, found, key=lambda one: one.place), size)  # type: ignore[arg-type,return-value]

    def newest_id(self) -> int:
        return next(self._numbers)

    def count_messages(self) -> dict[str, QueueCount]:
        counts: dict[str, QueueCount] = {}
        with self.lock:
            self.promote()
            for hold in self.all_holds.values():
                for message in hold.messages.values():
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

    def holds(self) -> list[HoldReport]:
        with self.lock:
            return [hold.report() for hold in self.all_holds.values() if not hold.is_ended]

    def dead_holds(self) -> list[str]:
        """Return holds that have missed their beats, at the second look."""
        with self.lock:
            return [hold.id for hold in self.all_holds.values() if hold.looks_dead()]

    def condemn(self, hold: str, items: int) -> int | None:
        with self.lock:
            there = self.all_holds.get(hold)
            if there is None:
                return 0
            if not there.is_ended and not there.is_dead:
                return None
            return self.give_back(there, items)

    def give_back(self, hold: MemoryHold, items: int, *, struck: bool = True) -> int:
        """End a hold; return how many messages went back. Called with the lock held."""
        hold.is_ended = True
        told: set[str] = set()
        back = list(itertools.islice(hold.messages.values(), items))
        for message in back:
            del hold.messages[message.id]
            message.strikes += struck and message.runs
            message.runs = False
            self._enqueue(message, keeps=True)
            told.add(queue_topic(message.queue))
        if not hold.messages:
            self.all_holds.pop(hold.id, None)
        self.tell(told)
        return len(back)


class MemoryHold(Hold):
    """A hold that lives while it beats."""

    def __init__(self, rows: MemoryMessages, body: bytes, lease: float) -> None:
        self.id = secrets.token_hex(12)
        self.messages: dict[int, _KeptMessage] = {}
        self.is_ended = self.is_dead = self._is_suspected = False
        self._rows = rows
        self._lease = lease
        self._body = body
        with rows.lock:
            self._note_beat()
            rows.all_holds[self.id] = self

    def _note_beat(self) -> None:
        self._last_beat = self._rows.clock.monotonic()
        self._beat_at = micros(self._rows.clock.now())
        self._is_suspected = self.is_dead = False

    def _is_stalled(self) -> bool:
        return self._rows.clock.monotonic() - self._last_beat > self._lease

    def looks_dead(self) -> bool:
        """Look whether it has missed its beats, a second time. Called with the lock held."""
        stalled = self._is_stalled()
        self.is_dead = stalled and self._is_suspected
        self._is_suspected = stalled
        return self.is_dead or self.is_ended

    def claim(
        self,
        queues: Sequence[str],
        items: int,
        *,
        size: int = STEP_BYTES,
        number: int = 0,
        lost: int | None = None,
    ) -> Claims:
        rows = self._rows
        with rows.lock:
            rows.begin()
            next_due = rows.promote()
            if self.is_ended:
                return Claims([], next_due)
            found: list[Claimed] = []
            if lost is not None:
                again = (one for one in self.messages.values() if one.claim >= lost)
                found = [one.claimed(self.id, rows.next_fence()) for one in again]
                size -= sum(len(one.body) for one in found)
            rows.claim(self, queues, items, size, found)
            for one in found:
                self.messages[one.receipt.id].claim = number
            return Claims(found, next_due)

    def has(self, receipts: Sequence[ClaimReceipt]) -> list[bool]:
        with self._rows.lock:
            return [one.hold == self.id and self._rows.are_there((one,)) for one in receipts]

    # Without the lock, which would cost each task two turns of it.

    def begin_run(self, receipt: ClaimReceipt) -> None:
        message = self.messages.get(receipt.id)
        if message is not None and message.count == receipt.count:
            message.runs = True

    def end_run(self, receipt: ClaimReceipt) -> None:
        message = self.messages.get(receipt.id)
        if message is not None and message.count == receipt.count:
            message.runs = False

    def write(self, body: bytes) -> None:
        self._body = body

    def beat(self) -> bool:
        with self._rows.lock:
            self._note_beat()
            return not self.is_ended

    def end(self) -> None:
        with self._rows.lock:
            self._rows.give_back(self, len(self.messages), struck=False)

    def report(self) -> HoldReport:
        """Return it as listings show it. Called with the lock held."""
        return HoldReport(
            id=self.id,
            body=self._body,
            beat_at=self._beat_at,
            holding=len(self.messages),
            stalled=self._is_stalled(),
        )


class MemoryTopicListener(TopicListener):
    """An event that is set when a watched topic is told."""

    def __init__(self, rows: MemoryMessages) -> None:
        self._rows = rows
        self._event = threading.Event()
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
                self._event.set()

    def wait(self, timeout: float) -> None:
        self._event.wait(timeout)
        self._event.clear()

    def wake(self) -> None:
        self._event.set()

    def close(self) -> None:
        self._rows.listeners.discard(self)
