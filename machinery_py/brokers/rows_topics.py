"""Topics as rows: a ring of the newest records for each.

topic         name             how many records it has had
topic record  place and name   number, moment, body; until its `ttl` is over

Limits: those who send to one topic change one row, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from machinery_py.brokers.topics import (
    READ,
    TOPIC_AGE,
    TOPIC_LENGTH,
    KeptRecord,
    KeptSubscription,
)
from machinery_py.rows.contract import Key, StoredRow, Write, id_of
from machinery_py.rows.draft import Draft, carry_out
from machinery_py.rows.messages import MessageRows
from machinery_py.wire.bodies import encode

TOPIC, RECORD = "topic", "topic record"  # kinds
Numbered = tuple[int, int, bytes]  # number, when it was sent (µs), body

_decode = msgspec.msgpack.Decoder(Numbered).decode


def append_records(rows: MessageRows, topic: str, records: Sequence[bytes], ttl: float) -> None:
    """Write the records behind those that are there, and wake whoever waits for them."""
    head, life = _head(topic), round(ttl * 1e6)

    def plan(draft: Draft) -> None:
        count, now = _count(draft.row(head)), rows.now()
        for number, body in enumerate(records, count + 1):
            write = Write(body=encode((number, now, body)), expires_in=life)
            draft.write[_place(topic, number)] = write
        count += len(records)
        draft.write[head] = Write(body=b"%d" % count, expires_in=round(TOPIC_AGE * 1e6))
        draft.tell, draft.durable = (_told(topic),), False

    carry_out(rows, [head], plan)


class RowsSubscription(KeptSubscription):
    """The number of the last record that was read, and a listener."""

    def __init__(self, rows: MessageRows, topic: str, since: float) -> None:
        super().__init__()
        self._rows = rows
        self._topic = topic
        self._after = last = self._last()
        if since > 0:
            oldest = rows.now() - round(since * 1e6)
            found = self._read(max(0, last - TOPIC_LENGTH) + 1, last)
            self._after = min(
                (one[0] - 1 for one in found if one and one[1] >= oldest), default=last
            )
        self._next = self._after + 1
        self._listener = rows.listen()

    def _fetch(self, wait: float) -> list[KeptRecord]:
        told = [_told(self._topic)]
        if wait:
            self._listener.watch(told)
        try:
            if not (found := self._look()) and wait:
                self._listener.wait(wait)
            return found
        finally:
            self._listener.unwatch(told)

    def _look(self) -> list[KeptRecord]:
        if (last := self._last()) < self._after:
            self._after = 0  # the store has lost the topic
        first = max(self._after, last - TOPIC_LENGTH) + 1
        found = self._read(first, min(last, first + READ - 1))
        return [(number, number, one and one[2]) for number, one in enumerate(found, first)]

    def _last(self) -> int:
        [row] = self._rows.read([_head(self._topic)])
        return _count(row)

    def _read(self, first: int, last: int) -> list[Numbered | None]:
        """Return the records of these numbers, or None where one is over."""
        numbers = range(first, last + 1)
        rows = self._rows.read([_place(self._topic, number) for number in numbers])
        found = [None if row is None else _decode(row.body) for row in rows]
        return [
            one if one is not None and one[0] == number else None
            for number, one in zip(numbers, found, strict=True)
        ]

    def wake(self) -> None:
        super().wake()
        self._listener.wake()

    def close(self) -> None:
        super().close()
        self._listener.close()


def _head(topic: str) -> Key:
    return Key(TOPIC, id_of(topic))


def _told(topic: str) -> str:
    return f"records {topic}"


def _place(topic: str, number: int) -> Key:
    return Key(RECORD, id_of(f"{number % TOPIC_LENGTH} {topic}"))


def _count(head: StoredRow | None) -> int:
    return 0 if head is None else int(head.body)
