"""Records of schedules and claims of unique tasks in memcached.

A change is one `cas` of its item. States and messages that go with it stand in the same item, as an
outbox, until the messages have been published; a later change keeps the open outboxes of those
before. A record is listed before it is written, and once more after it, so the list names too much
and never too little.

    crash after                     who goes on
    the index, or the list          nobody: nothing is true
    the item                        a worker that looks for unsent outboxes: it writes the states
                                    and publishes the messages
    the states                      the same; each may be written twice

The reader of a claim looks at its task next, and takes a task without a state for one that is over.
So the states of an open outbox are written before its claim is shown.

Limits: what memcached forgets is gone. A claim: another sender gets the key. A record: that
schedule sends nothing until code declares it again, which `Records.era` asks for. An outbox: nobody
sends its messages, if their sender has died.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from machinery_py.backends.base import Change, Records, Rider, claim_of, record_of
from machinery_py.backends.memcached.documents import CHORD_LIFE, Commit, Todo, key_of, pack
from machinery_py.backends.memcached.index import Index
from machinery_py.backends.memcached.transitions import todo_of
from machinery_py.clock import micros
from machinery_py.connections.memcached.client import (
    Item,
    LineCommand,
    MemcacheDriver,
    seconds,
    swap,
)
from machinery_py.connections.memcached.keys import CLAIM, LIST, RECORD
from machinery_py.texts import printable

MAKING = 30_000_000  # µs from listing a record to writing it; one that is not there by then is gone
REMOVED_LIFE = 86400 * 1_000_000  # µs that a removed record is remembered: no version comes twice
_FOREVER = b"0"


class RecordOutbox(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages of a change, until they are published. `key`: of its outbox."""

    key: str
    kept_at: int  # µs
    outbox: Sequence[bytes]
    todo: Todo


class StoredRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A record or a claim."""

    nonce: bytes  # of the writing: a writer that finds its own knows that the lost reply meant yes
    body: bytes | None
    at: int  # µs, of the last change
    until: int = 0  # µs; 0: a record
    outboxes: tuple[RecordOutbox, ...] = ()

    def holds(self, now: int) -> bytes | None:
        """Return the body, unless it is a claim whose time is over."""
        return None if 0 < self.until <= now else self.body


class _Names(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The list of records."""

    era: str  # another one each time that it had to be begun anew
    listed_at: dict[str, int]


_record = msgspec.msgpack.Decoder(StoredRecord).decode
_names = msgspec.msgpack.Decoder(_Names).decode

#: Return the record that is to be written in place of what there is; None: it stays.
RecordChange = Callable[[StoredRecord | None], StoredRecord | None]


class MemcachedRecords:
    """Records and claims. May be used from any thread.

    Args:
        carry_out: writes the states and groups of a Todo; may be called twice.
    """

    def __init__(
        self, driver: MemcacheDriver, index: Index, carry_out: Callable[[Sequence[Todo]], None]
    ) -> None:
        self._driver = driver
        self._index = index
        self._carry_out = carry_out

    def _now(self) -> int:
        return micros(self._driver.clock.now())

    def amend(self, rider: Rider, change: Change) -> bool:
        """Change a record, with what becomes true with it; return whether it held what it must."""
        name, is_claim = printable(rider.name), rider.life > 0
        key = key_of(name, CLAIM if is_claim else RECORD)
        if rider.expected is not None and not self._fetch([key], "reading a record"):
            return False
        outbox = self._outbox(change)
        if outbox:
            self._index.note(outboxes=[outbox.key])
        if not is_claim:
            self._enlist([name])
        if not self._edit({key: functools.partial(_amended, rider, outbox, self._now())})[key]:
            return False  # the index keeps its note: an earlier try may have been carried out
        if not is_claim and rider.expected is None:
            self._enlist([name])
        if outbox:
            self._carry_out([outbox.todo])
            if not outbox.outbox:
                self.clear([(outbox.key, ())])
                self._index.drop(outboxes=[outbox.key])
        return True

    def _outbox(self, change: Change) -> RecordOutbox | None:
        if not (change.states or change.groups or change.outbox):
            return None
        todo = todo_of(change, change.states)
        return RecordOutbox(printable(change.key), self._now(), tuple(change.outbox), todo)

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        keys = [key_of(printable(name), CLAIM) for name in names]
        found = self._fetch(keys, "reading claims")
        self._carry_out([outbox.todo for record in found.values() for outbox in record.outboxes])
        now = self._now()
        return [found[key].holds(now) if key in found else None for key in keys]

    def release(self, claims: Sequence[tuple[str, bytes]]) -> None:
        now = self._now()
        self._edit(
            {
                key_of(printable(name), CLAIM): functools.partial(_released, body, now)
                for name, body in claims
            }
        )

    def records(self, known: str, now: dt.datetime) -> Records:
        names, items = self._all()
        before = self._now() - MAKING
        missing = sorted(
            name for name, at in names.listed_at.items() if name not in items and at < before
        )
        era = f"{names.era}.{_digest(missing)}" if names.era else ""
        nonces = (f"{name} {record.nonce.hex()}" for name, record in sorted(items.items()))
        version = _digest([era, *nonces])
        if version == known:
            return Records(now=now, version=version, era=era)
        bodies = {name: one.body for name, one in items.items() if one.body is not None}
        return Records(now=now, version=version, bodies=bodies, era=era)

    # Outboxes

    def commits(self, keys: Iterable[str]) -> dict[str, list[Commit]]:
        """Return the commits that are open under these keys."""
        wanted = {key: item for key in keys if (item := _item_of(key)) is not None}
        records = self._fetch(wanted.values(), "reading outboxes")
        return {
            key: [
                Commit(b"", one.kept_at, one.outbox, (one.todo,) if one.todo else ())
                for one in records[item].outboxes
                if one.key == printable(key)
            ]
            for key, item in wanted.items()
            if item in records
        }

    def clear(self, sent: Iterable[tuple[str, Iterable[bytes]]]) -> None:
        """Clear the outboxes under these keys, unless they hold more than these messages."""
        bodies_of: dict[bytes, dict[str, set[bytes]]] = {}
        for key, bodies in sent:
            if (item := _item_of(key)) is not None:
                known = bodies_of.setdefault(item, {}).setdefault(printable(key), set())
                known.update(bodies)
        self._edit(
            {item: functools.partial(_cleared, bodies) for item, bodies in bodies_of.items()}
        )

    # Items

    def _fetch(self, keys: Iterable[bytes], doing: str) -> dict[bytes, StoredRecord]:
        found = self._driver.fetch(keys, doing=doing)
        return {key: _record(item.value) for key, item in found.items()}

    def _edit(self, changes: Mapping[bytes, RecordChange]) -> dict[bytes, bool]:
        """Change each item; return whether it was. A change may be called several times."""
        nonce = secrets.token_bytes(8)
        done: dict[bytes, bool] = {}

        def change(key: bytes, item: Item | None) -> LineCommand | None:
            before = _record(item.value) if item is not None else None
            if before is not None and before.nonce == nonce:
                return None  # it was written, and the reply was lost
            after = changes[key](before)
            done[key] = after is not None
            if after is None:
                return None
            life = self._life(key, after)
            return swap(key, pack(msgspec.structs.replace(after, nonce=nonce)), life, item)

        self._driver.edit(changes, change, doing="writing records")
        return done

    def _life(self, key: bytes, record: StoredRecord) -> bytes:
        if not key.startswith(CLAIM):
            return _FOREVER
        left = (record.until - self._now()) / 1e6 if record.body is not None else 0.0
        return seconds(max(left, CHORD_LIFE) if record.outboxes else left)

    # The list

    def _all(self) -> tuple[_Names, dict[str, StoredRecord]]:
        """Return the list, and the records that there are."""
        item = self._driver.fetch([LIST], doing="reading schedules").get(LIST)
        names = _names(item.value) if item is not None else _Names("", {})
        keys = {name: key_of(name, RECORD) for name in names.listed_at}
        items = self._fetch(keys.values(), "reading schedules")
        return names, {name: items[key] for name, key in keys.items() if key in items}

    def _enlist(self, names: Sequence[str]) -> None:
        now = self._now()
        self._relist(lambda listed_at: {**dict.fromkeys(names, now), **listed_at})

    def _relist(self, relist: Callable[[dict[str, int]], dict[str, int]]) -> None:
        def change(key: bytes, item: Item | None) -> LineCommand | None:
            before = _names(item.value) if item is not None else _Names(secrets.token_hex(8), {})
            listed_at = relist(before.listed_at)
            if listed_at == before.listed_at:
                return None
            return swap(key, pack(_Names(before.era, listed_at)), _FOREVER, item)

        self._driver.edit([LIST], change, doing="listing schedules")

    def tend(self) -> None:
        """Forget the names of records that were removed, or are gone, for long."""
        names, items = self._all()
        before = self._now() - REMOVED_LIFE
        over = {
            name
            for name, at in names.listed_at.items()
            if at < before and _is_over(items.get(name), before)
        }
        if not over:
            return
        self._relist(
            lambda listed_at: {name: at for name, at in listed_at.items() if name not in over}
        )
        # Whoever writes a record anew lists it after that, or is seen here.
        again: list[str] = []
        removed: list[LineCommand] = []
        keys = {key_of(name, RECORD): name for name in over}
        for key, item in self._driver.fetch(keys, doing="reading schedules").items():
            record = _record(item.value)
            if record.body is None and not record.outboxes:
                removed.append(swap(key, item.value, seconds(1.0), item))
            else:
                again.append(keys[key])
        self._driver.send(removed, doing="forgetting schedules")
        if again:
            self._enlist(again)


def _amended(
    rider: Rider, outbox: RecordOutbox | None, now: int, record: StoredRecord | None
) -> StoredRecord | None:
    """Change a record that holds what was expected."""
    if (record.holds(now) if record is not None else None) != rider.expected:
        return None
    until = now + int(rider.life * 1e6) if rider.life else 0
    outboxes = (*(record.outboxes if record is not None else ()), *((outbox,) if outbox else ()))
    return StoredRecord(b"", rider.body, now, until, outboxes)


def _released(body: bytes, now: int, record: StoredRecord | None) -> StoredRecord | None:
    """Empty a claim that holds just this."""
    if record is None or record.body != body:
        return None
    return msgspec.structs.replace(record, body=None, at=now)


def _cleared(sent: Mapping[str, set[bytes]], record: StoredRecord | None) -> StoredRecord | None:
    """Take out the outboxes under some keys of which all was sent."""
    if record is None:
        return None
    left = tuple(
        one
        for one in record.outboxes
        if one.key not in sent or not sent[one.key].issuperset(one.outbox)
    )
    return (
        msgspec.structs.replace(record, outboxes=left) if len(left) < len(record.outboxes) else None
    )


def _is_over(record: StoredRecord | None, before: int) -> bool:
    """Return whether the record is gone, or was removed before that moment with no outbox open."""
    if record is None:
        return True
    return record.body is None and not record.outboxes and record.at < before


def _item_of(key: str) -> bytes | None:
    """Return the key of the item in which there may be an outbox under this key."""
    if (claim := claim_of(key)) is not None:
        return key_of(printable(claim), CLAIM)
    return key_of(printable(record), RECORD) if (record := record_of(key)) is not None else None


def _digest(parts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()
