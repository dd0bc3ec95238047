"""Rows and messages in this process: for tests, and the reference for the other stores.

Limits: nothing survives the process, and no other process sees it.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import msgspec

from machinery_py.bounds import STEP_BYTES
from machinery_py.clock import SYSTEM_CLOCK, Clock, micros
from machinery_py.fences import Fence, fence_after
from machinery_py.rows.contract import (
    NO_ROW,
    PAGE,
    Decision,
    Key,
    RowStep,
    StepResult,
    StoredRow,
    Version,
    Write,
    check_writes,
    page_of,
)
from machinery_py.rows.memory_messages import MemoryMessages, MemoryTopicListener, MessageTables
from machinery_py.rows.messages import (
    CLOSED,
    EVER,
    MessageRows,
    MessageStep,
    checked,
)
from machinery_py.threads import is_owner

AGAIN = 60_000_000  # µs until a row that another one keeps is looked at again

T = TypeVar("T")


class KeptRow(msgspec.Struct, gc=False):
    """A row, when it expires, the moment that `_expiring` has for it, and the set that it is."""

    row: StoredRow
    ends: int | None
    noted_at: int | None = None
    members: dict[str, None] | None = None


class Tables(msgspec.Struct):
    """All that the store keeps, as a record that msgspec can encode.

    There are no sets: equal tables have equal bytes.

    Attributes:
        fence: the last one.
        rows: by kind and id.
        messages: all, their holds and the turns of their queues.
    """

    fence: Fence = Fence(0)
    rows: dict[str, dict[str, KeptRow]] = {}
    messages: MessageTables = msgspec.field(default_factory=MessageTables)


class MemoryRows(MemoryMessages, MessageRows):
    """Dicts under one lock, whose holder may enter it again.

    The time of rows goes at the pace of the monotonic clock. A store that keeps the tables in one
    record elsewhere replaces `lock` by one that loads and saves them: see examples/store.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(clock)
        self.lock: AbstractContextManager[object] = threading.RLock()
        self._last = self._next = 0
        self._began_at = micros(clock.now()) - round(clock.monotonic() * 1e6)
        self._kinds: dict[str, dict[str, KeptRow]] = {}  # by kind and id
        self._expiring: list[tuple[int, Key]] = []
        self._listed: dict[str, list[StoredRow]] = {}  # of a kind, rising, until it changes

    def is_entered(self) -> bool:
        return is_owner(self.lock)

    def now(self) -> int:
        return self._began_at + round(self.clock.monotonic() * 1e6)

    def begin(self) -> None:
        """Note the time, once for each call: fences, and moments of messages, go on from it."""
        wall = micros(self.clock.now())
        self.wall: int = wall
        self.moment: int = self._began_at + round(self.clock.monotonic() * 1e6)
        self._next = fence_after(self._last, wall)

    def next_fence(self, number: int = 1) -> Fence:
        """Return the first of so many fences. Called after `begin`."""
        fence = self._next
        self._last = fence + number - 1
        self._next = fence + number
        return Fence(fence)

    def fences(self, number: int) -> Fence:
        with self.lock:
            self.begin()
            return self.next_fence(number)

    def read(self, keys: Sequence[Key]) -> list[StoredRow | None]:
        with self.lock:
            now = self.now()
            return [self._read(key, now) for key in keys]

    def _read(self, key: Key, now: int) -> StoredRow | None:
        there = self._kinds.get(key.kind)
        if there is None or (kept := there.get(key.id)) is None:
            return None
        if kept.ends is None or kept.ends > now:
            return kept.row
        return kept.row if self._is_there(kept, now) else None

    def _is_there(self, kept: KeptRow, now: int) -> bool:
        if kept.ends is None or kept.ends > now:
            return True
        by = kept.row.kept_by
        return by is not None and self._read(by, now) is not None

    def is_empty(self, kind: str) -> bool:
        return not self._kinds.get(kind)

    def is_closed(self, queue: str) -> bool:
        """Return whether nothing is to be claimed from the queue."""
        there = self._kinds.get(CLOSED)
        return bool(there) and self._read(Key(CLOSED, queue), self.moment) is not None

    def commit(self, steps: Sequence[RowStep | MessageStep]) -> list[StepResult]:
        whole = list(map(checked, steps))
        with self.lock:
            self.begin()
            done = list(map(self.carry_out, whole))
            self.tell_news()
            return done

    def version_of(self, key: Key) -> Version:
        row = self._read(key, self.moment)
        return NO_ROW if row is None else row.version

    def change(self, keys: Sequence[Key], decide: Decision[T], *, durable: bool = True) -> T:
        """As the contract says, under the lock: nobody else writes meanwhile."""
        with self.lock:
            self.begin()
            now = self.moment
            write, result = decide([self._read(key, now) for key in keys], now)
            check_writes(write)
            self.carry_out(MessageStep(write=dict(write)))
            return result

    def put(self, key: Key, write: Write) -> Version:
        version = Version(Fence(self._next))
        self._last, self._next = version, version + 1
        row = StoredRow(
            key=key, body=write.body, version=version, facts=write.facts, kept_by=write.kept_by
        )
        ends = None if write.expires_in is None else self.moment + write.expires_in
        kind = self._kinds.setdefault(key.kind, {})
        kept = kind.get(key.id)
        if kept is None:
            kind[key.id] = kept = KeptRow(row, ends)
        else:
            kept.row, kept.ends = row, ends
        if self._listed:
            self._listed.pop(key.kind, None)
        if ends is not None:
            self._note(kept, ends)
            if self._expiring[0][0] <= self.moment:
                self.expire(2)  # faster than new rows come
        return version

    def _note(self, kept: KeptRow, ends: int) -> None:
        """Note when to look whether the row has expired: once, however often it is written."""
        if kept.noted_at is None or ends < kept.noted_at:
            kept.noted_at = ends
            heapq.heappush(self._expiring, (ends, kept.row.key))

    def delete(self, key: Key) -> None:
        self._kinds.get(key.kind, {}).pop(key.id, None)
        self._listed.pop(key.kind, None)

    def add_member(self, set: Key, member: str) -> int:
        if set.id not in self._kinds.get(set.kind, ()):
            self.put(set, Write(body=b""))
        kept = self._kinds[set.kind][set.id]
        if kept.members is None:
            kept.members = {}
        if member in kept.members:
            return 0
        kept.members[member] = None
        return len(kept.members)

    def ids(self, kind: str, *, prefix: str = "", items: int = PAGE) -> list[str]:
        with self.lock:
            now = self.now()
            found = [id for id in self._kinds.get(kind, ()) if id.startswith(prefix)]
            there = (id for id in sorted(found) if self._read(Key(kind, id), now) is not None)
            return list(itertools.islice(there, items))

    def count(self, kind: str, *, since: int = 0, step: int = EVER) -> dict[tuple[str, int], int]:
        counts: Counter[tuple[str, int]] = Counter()
        with self.lock:
            now = self.now()
            for kept in self._kinds.get(kind, {}).values():
                facts = kept.row.facts
                if facts is not None and facts.at >= since and self._is_there(kept, now):
                    counts[facts.name, facts.at - facts.at % step] += 1
        return counts

    def expire(self, items: int) -> bool:
        with self.lock:
            now = self.now()
            for _ in range(items):
                if not self._expiring or self._expiring[0][0] > now:
                    return False
                at, key = heapq.heappop(self._expiring)
                kept = self._kinds.get(key.kind, {}).get(key.id)
                if kept is None or kept.noted_at != at:
                    continue  # of a row that was deleted, or noted for earlier
                kept.noted_at = None
                if self._read(key, now) is None:
                    self.delete(key)
                elif kept.ends is not None:
                    self._note(kept, max(kept.ends, now + AGAIN if kept.ends <= now else 0))
            return bool(self._expiring) and self._expiring[0][0] <= now

    def listen(self) -> MemoryTopicListener:
        return MemoryTopicListener(self)

    def dump(self) -> Tables:
        """Return all that is kept, which goes on changing. Called with the lock held."""
        return Tables(Fence(self._last), self._kinds, self.dump_messages())

    def load(self, tables: Tables) -> None:
        """Replace all that is kept by these tables, which become ours. Called with the lock held.

        Holds that this process has opened live on in them, or are ended.
        """
        self._last, self._kinds = tables.fence, tables.rows
        self._listed.clear()
        kept = itertools.chain.from_iterable(map(dict.values, tables.rows.values()))
        self._expiring = [(one.noted_at, one.row.key) for one in kept if one.noted_at is not None]
        heapq.heapify(self._expiring)
        self.load_messages(tables.messages)

    def list(
        self,
        kind: str,
        *,
        name: str | None = None,
        after: StoredRow | None = None,
        items: int = PAGE,
        size: int = STEP_BYTES,
    ) -> list[StoredRow]:
        with self.lock:
            now = self.now()
            rows = self._listed.get(kind)
            if rows is None:
                there = (kept.row for kept in self._kinds.get(kind, {}).values())
                rows = sorted((row for row in there if row.facts is not None), key=_place)
                self._listed[kind] = rows
            end = len(rows)
            if after is not None:
                end = bisect.bisect_left(rows, _place(after), key=_place)
            found = (
                row
                for row in map(rows.__getitem__, range(end - 1, -1, -1))
                if name in (None, row.facts and row.facts.name) and self._read(row.key, now) is row
            )
            return page_of(list(itertools.islice(found, items)), size)


def _place(row: StoredRow) -> tuple[int, str]:
    return row.facts.at if row.facts is not None else 0, row.key.id
