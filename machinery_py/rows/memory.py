"""Rows and messages in this process: for tests, and the reference for the other stores.

Limits: nothing survives the process, and no other process sees it.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from machinery_py.bounds import STEP_BYTES
from machinery_py.clock import SYSTEM_CLOCK, Clock, micros
from machinery_py.fences import Fence, fence_after
from machinery_py.rows.contract import (
    NO_ROW,
    PAGE,
    Committed,
    Conflict,
    Decision,
    Gone,
    Key,
    NoRoom,
    Repeated,
    RowStep,
    StepResult,
    StoredRow,
    Version,
    Write,
    check_keys,
    check_writes,
    page_of,
)
from machinery_py.rows.memory_messages import MemoryHold, MemoryMessages, MemoryTopicListener
from machinery_py.rows.messages import (
    CLOSED,
    EVER,
    Join,
    MessageRows,
    MessageStep,
    check_message_step,
    of_rows,
)

AGAIN = 60_000_000  # µs until a row that another one keeps is looked at again

T = TypeVar("T")


class _Kept(msgspec.Struct, gc=False):
    """A row, when it expires, and the moment that `_expiring` has for it."""

    row: StoredRow
    ends: int | None
    noted_at: int | None


class MemoryRows(MemoryMessages, MessageRows):
    """Dicts under one lock, whose holder may enter it again.

    The time of rows goes at the pace of the monotonic clock.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__()
        self.clock = clock
        self.lock = threading.RLock()
        self._last = Fence(0)
        self._began_at = micros(clock.now()) - round(clock.monotonic() * 1e6)
        self._kinds: dict[str, dict[str, _Kept]] = {}  # by kind and id
        self._expiring: list[tuple[int, Key]] = []
        self._listed: dict[str, list[StoredRow]] = {}  # of a kind, rising, until it changes
        self._sets: dict[Key, set[str]] = {}

    def is_entered(self) -> bool:
        return self.lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    def now(self) -> int:
        return self._began_at + round(self.clock.monotonic() * 1e6)

    def begin(self) -> None:
        """Note the time, once for each call: fences, and moments of messages, go on from it."""
        self.wall = micros(self.clock.now())
        self._last = fence_after(self._last, self.wall)

    def next_fence(self) -> Fence:
        """Return the next fence. Called after `begin`."""
        self._last = Fence(self._last + 1)
        return self._last

    def fences(self, number: int) -> Fence:
        with self.lock:
            self.begin()
            first = Fence(self._last + 1)
            self._last = Fence(self._last + number)
            return first

    def read(self, keys: Sequence[Key]) -> list[StoredRow | None]:
        check_keys(keys)
        with self.lock:
            now = self.now()
            return [self._read(key, now) for key in keys]

    def _read(self, key: Key, now: int) -> StoredRow | None:
        there = self._kinds.get(key.kind)
        kept = there.get(key.id) if there else None
        return kept.row if kept is not None and self._is_there(kept, now) else None

    def _is_there(self, kept: _Kept, now: int) -> bool:
        if kept.ends is None or kept.ends > now:
            return True
        by = kept.row.kept_by
        return by is not None and self._read(by, now) is not None

    def is_closed(self, queue: str) -> bool:
        """Return whether nothing is to be claimed from the queue."""
        there = self._kinds.get(CLOSED)
        return bool(there) and self._read(Key(CLOSED, queue), self.now()) is not None

    def commit(self, steps: Sequence[RowStep | MessageStep]) -> list[StepResult]:
        whole = [one if isinstance(one, MessageStep) else of_rows(one) for one in steps]
        for step in whole:
            check_message_step(step)
        with self.lock:
            self.begin()
            now = self.now()
            told: set[str] = set()
            done = [self._refusal(step, now) or self._carry_out(step, now, told) for step in whole]
            self.tell(told)
            return done

    def _refusal(self, step: MessageStep, now: int) -> StepResult | None:
        """Return why the step is not to be carried out."""
        if step.once is not None and self._read(step.once, now) is not None:
            return Repeated()
        for key, version in step.expect.items():
            row = self._read(key, now)
            if (NO_ROW if row is None else row.version) != version:
                return Conflict()
        if not self.are_there(step.takes) or (step.held and not self.are_there(step.held)):
            return Gone()
        for room in step.room:
            waiting = self.count_waiting(room.queue)
            if waiting + room.adds > room.limit:
                return NoRoom(room.queue, waiting)
        return None

    def _carry_out(self, step: MessageStep, now: int, told: set[str]) -> Committed:
        for key, new in step.create.items():
            if self._read(key, now) is None:
                self._write(key, new, now)
        given = self._write_all(step.write, now)
        for join in step.joins:
            self._join(join, now)
        if step.takes or step.pushes:
            self.move(step, told)
        if step.tell:
            told.update(step.tell)
        return Committed(given, now)

    def change(self, keys: Sequence[Key], decide: Decision[T], *, durable: bool = True) -> T:
        """As the contract says, under the lock: nobody else writes meanwhile."""
        check_keys(keys)
        with self.lock:
            self.begin()
            now = self.now()
            write, result = decide([self._read(key, now) for key in keys], now)
            check_writes(write)
            self._write_all(write, now)
            return result

    def _write_all(self, write: Mapping[Key, Write | None], now: int) -> Version:
        """Write the rows, and return the last version."""
        if self._expiring and self._expiring[0][0] <= now:
            self.expire(2 + len(write))  # faster than new rows come
        given = NO_ROW
        for key, one in write.items():
            if one is None:
                self._delete(key)
            else:
                given = self._write(key, one, now)
        return given

    def _write(self, key: Key, write: Write, now: int) -> Version:
        self._last = fence = Fence(self._last + 1)
        version = Version(fence)
        row = StoredRow(
            key=key, body=write.body, version=version, facts=write.facts, kept_by=write.kept_by
        )
        ends = None if write.expires_in is None else now + write.expires_in
        kind = self._kinds.setdefault(key.kind, {})
        before = kind.pop(key.id, None)  # so that the last written is the last, for the sorting
        kind[key.id] = kept = _Kept(row, ends, None if before is None else before.noted_at)
        self._listed.pop(key.kind, None)
        if ends is not None:
            self._note(kept, ends)
        return version

    def _note(self, kept: _Kept, ends: int) -> None:
        """Note when to look whether the row has expired: once, however often it is written."""
        if kept.noted_at is None or ends < kept.noted_at:
            kept.noted_at = ends
            heapq.heappush(self._expiring, (ends, kept.row.key))

    def _delete(self, key: Key) -> None:
        self._kinds.get(key.kind, {}).pop(key.id, None)
        self._listed.pop(key.kind, None)
        self._sets.pop(key, None)

    def _join(self, join: Join, now: int) -> None:
        if self._read(join.ready, now) is not None:
            return
        if self._read(join.set, now) is None:
            self._delete(join.set)
        members = self._sets.setdefault(join.set, set())
        if join.member not in members:
            members.add(join.member)
            self._write(join.set, Write(body=b""), now)
            for key, write in join.beside.items():
                self._write(key, write, now)
            if len(members) >= join.whole:
                self._write(join.ready, join.write, now)

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
                    self._delete(key)
                elif kept.ends is not None:
                    self._note(kept, max(kept.ends, now + AGAIN if kept.ends <= now else 0))
            return bool(self._expiring) and self._expiring[0][0] <= now

    def open_hold(self, body: bytes, *, lease: float) -> MemoryHold:
        return MemoryHold(self, body, lease)

    def listen(self) -> MemoryTopicListener:
        return MemoryTopicListener(self)

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
