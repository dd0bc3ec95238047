"""Records of schedules and claims of unique tasks in memcached.

    mpy:s:<name>     a record: what it holds (nothing: it was removed), and what is still owed of its changes
    mpy:u:<name>     a claim: the same, and until when it holds
    mpy:schedules    the names of all records, with the moment at which each was listed

A change is one `cas` of its item. States and messages that go with it stand in the same item, as owed, until the messages have
been published; a later change keeps what is owed by those before. A record is listed before it is written, and once more after
it, so the list names too much and never too little.

    crash after                     who goes on
    the index, or the list          nobody: nothing is true
    the item                        whoever looks for what is unsent: the states are written, the messages published
    the states                      the same; each may be written twice

Who reads a claim looks at its task next, and takes a task without a state for one that is over. So the states that are owed
are written before a claim is shown.

Limits: what memcached forgets is gone. A claim: another sender gets the key. A record: nothing is sent by that schedule until
code declares it again, which `Records.era` asks for. Messages that are owed: they are sent by nobody, if their sender has died.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from machinery_py.backends.base import Amendment, Change, Records, claim_of, record_of
from machinery_py.backends.memcached.documents import CHORD_LIFE, Commit, Todo, key_of, pack
from machinery_py.backends.memcached.index import Index, rounds
from machinery_py.backends.memcached.transitions import todo_of
from machinery_py.clock import micros
from machinery_py.connections.memcached.client import (
    STORED,
    Item,
    LineCommand,
    MemcacheDriver,
    seconds,
    swap,
)
from machinery_py.connections.memcached.keys import CLAIM, LIST, RECORD

MAKING = 30_000_000  # µs from listing a record to writing it; one that is not there by then is gone
REMOVED_LIFE = (
    86400 * 1_000_000
)  # µs that a removed record is remembered: a version never comes again
_FOREVER = b"0"


class Owed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages of a change, until they are published. `key`: of its outbox."""

    key: str
    kept_at: int  # µs
    outbox: Sequence[bytes]
    todo: Todo


class StoredRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A record or a claim."""

    nonce: bytes  # of the writing; whoever finds his own knows that a lost reply meant yes
    body: bytes | None
    at: int  # µs, of the last change
    until: int = 0  # µs; 0: a record
    owed: tuple[Owed, ...] = ()

    def holds(self, now: int) -> bytes | None:
        return None if 0 < self.until <= now else self.body


class _Names(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The list of records."""

    era: str  # another one each time that it had to be begun anew
    listed_at: dict[str, int]


_kept = msgspec.msgpack.Decoder(StoredRecord).decode
_names = msgspec.msgpack.Decoder(_Names).decode

#: What becomes of an item that is there or not; None: it stays.
Job = Callable[[StoredRecord | None], StoredRecord | None]


class MemcachedRecords:
    """Records and claims. May be used from any thread.

    Args:
        carry_out: writes the states and groups of a Todo; may be called twice.
    """

    def __init__(
        self, driver: MemcacheDriver, index: Index, carry_out: Callable[[Iterable[Todo]], None]
    ) -> None:
        self._driver = driver
        self._index = index
        self._carry_out = carry_out

    def _now(self) -> int:
        return micros(self._driver.clock.now())

    # What the contract of backends says of these

    def amend(self, amendment: Amendment) -> bool:
        name, is_claim = _printable(amendment.name), amendment.life > 0
        key = key_of(name, CLAIM if is_claim else RECORD)
        if amendment.expected is not None and not self._driver.fetch(
            [key], doing="reading a record"
        ):
            return False
        owed = self._owed(amendment)
        if owed:
            self._index.note(outboxes=[owed.key])
        if not is_claim:
            self._enlist([name])
        if not self._edit({key: _Swap(amendment, owed, self._now())})[key]:
            return False  # the index keeps its note: an earlier try may have been carried out
        if not is_claim and amendment.expected is None:
            self._enlist([name])
        if owed:
            self._carry_out([owed.todo])
            if not owed.outbox:
                self.clear([(owed.key, ())])
                self._index.drop(outboxes=[owed.key])
        return True

    def _owed(self, amendment: Amendment) -> Owed | None:
        change = Change(key="", states=amendment.states, groups=amendment.groups)
        todo = todo_of(change, change.states)
        if not (todo or amendment.outbox):
            return None
        return Owed(_printable(amendment.outbox_key), self._now(), tuple(amendment.outbox), todo)

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        keys = [key_of(_printable(name), CLAIM) for name in names]
        found = {
            key: _kept(item.value)
            for key, item in self._driver.fetch(keys, doing="reading claims").items()
        }
        self._carry_out([owed.todo for kept in found.values() for owed in kept.owed])
        now = self._now()
        return [found[key].holds(now) if key in found else None for key in keys]

    def release(self, claims: Sequence[tuple[str, bytes]]) -> None:
        now = self._now()
        self._edit({key_of(_printable(name), CLAIM): _Release(body, now) for name, body in claims})

    def records(self, known: str, now: dt.datetime) -> Records:
        names, items = self._all()
        before = self._now() - MAKING
        missing = sorted(
            name for name, at in names.listed_at.items() if name not in items and at < before
        )
        era = f"{names.era}.{_digest(missing)}" if names.era else ""
        version = _digest(
            [era, *(f"{name} {kept.nonce.hex()}" for name, kept in sorted(items.items()))]
        )
        if version == known:
            return Records(now=now, version=version, era=era)
        bodies = {name: kept.body for name, kept in items.items() if kept.body is not None}
        return Records(now=now, version=version, bodies=bodies, era=era)

    # Outboxes

    def commits(self, keys: Iterable[str]) -> dict[str, list[Commit]]:
        """Return the commits that are open under these keys."""
        wanted = {key: item for key in keys if (item := _item_of(key)) is not None}
        items = self._driver.fetch(wanted.values(), doing="reading outboxes") if wanted else {}
        kept = {item: _kept(found.value) for item, found in items.items()}
        return {
            key: [
                Commit(b"", owed.kept_at, owed.outbox, (owed.todo,) if owed.todo else ())
                for owed in kept[item].owed
                if owed.key == _printable(key)
            ]
            for key, item in wanted.items()
            if item in kept
        }

    def clear(self, sent: Iterable[tuple[str, Iterable[bytes]]]) -> None:
        """Clear these keys, if no more than these messages was owed under them."""
        jobs: dict[bytes, _Clear] = {}
        for key, bodies in sent:
            if (item := _item_of(key)) is not None:
                jobs.setdefault(item, _Clear()).sent.setdefault(_printable(key), set()).update(
                    bodies
                )
        if jobs:
            self._edit(jobs)

    # Items

    def _edit(self, jobs: Mapping[bytes, Job]) -> dict[bytes, bool]:
        """Let each job change its item; whether it did. A job may be called several times."""
        nonce = secrets.token_bytes(8)
        done: dict[bytes, bool] = {}
        if not jobs:
            return done
        waiting = list(jobs)
        for _ in rounds("a record"):
            items = self._driver.fetch(waiting, doing="reading records")
            writes: dict[bytes, LineCommand] = {}
            for key in waiting:
                item = items.get(key)
                before = _kept(item.value) if item is not None else None
                if before is not None and before.nonce == nonce:
                    done[key] = True  # it was written, and the reply was lost
                    continue
                after = jobs[key](before)
                if after is None:
                    done[key] = False
                else:
                    writes[key] = self._written(
                        key, msgspec.structs.replace(after, nonce=nonce), item
                    )
            replies = self._driver.send(list(writes.values()), doing="writing records")
            done |= {
                key: True for key, reply in zip(writes, replies, strict=True) if reply == STORED
            }
            waiting = [key for key in jobs if key not in done]
            if not waiting:
                break
        return done

    def _written(self, key: bytes, kept: StoredRecord, item: Item | None) -> LineCommand:
        life = _FOREVER
        if key.startswith(CLAIM):
            left = (kept.until - self._now()) / 1e6 if kept.body is not None else 0.0
            life = seconds(max(left, CHORD_LIFE) if kept.owed else left)
        return swap(key, pack(kept), life, item.cas if item is not None else None)

    # The list

    def _all(self) -> tuple[_Names, dict[str, StoredRecord]]:
        """The list, and the records that there are."""
        item = self._driver.fetch([LIST], doing="reading schedules").get(LIST)
        names = _names(item.value) if item is not None else _Names("", {})
        return names, self._of(names.listed_at)

    def _enlist(self, names: Sequence[str]) -> None:
        now = self._now()

        def add(listed_at: dict[str, int]) -> dict[str, int]:
            return {**dict.fromkeys(names, now), **listed_at}

        self._relist(add)

    def _relist(self, change: Callable[[dict[str, int]], dict[str, int]]) -> None:
        for _ in rounds("the list of schedules"):
            item = self._driver.fetch([LIST], doing="reading schedules").get(LIST)
            before = _names(item.value) if item is not None else _Names(secrets.token_hex(8), {})
            listed_at = change(before.listed_at)
            if listed_at == before.listed_at:
                return
            command = swap(
                LIST,
                pack(_Names(before.era, listed_at)),
                _FOREVER,
                item.cas if item is not None else None,
            )
            if self._driver.send([command], doing="listing schedules") == [STORED]:
                return

    def tend(self) -> None:
        """Forget the names of records that were removed, or are gone, for long."""
        names, items = self._all()
        before = self._now() - REMOVED_LIFE
        over = {
            name
            for name, at in names.listed_at.items()
            if at < before
            and (
                (kept := items.get(name)) is None
                or (kept.body is None and not kept.owed and kept.at < before)
            )
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
            kept = _kept(item.value)
            if kept.body is None and not kept.owed:
                removed.append(swap(key, item.value, seconds(1.0), item.cas))
            else:
                again.append(keys[key])
        self._driver.send(removed, doing="forgetting schedules")
        if again:
            self._enlist(again)

    def _of(self, names: Iterable[str]) -> dict[str, StoredRecord]:
        keys = {name: key_of(name, RECORD) for name in names}
        items = self._driver.fetch(keys.values(), doing="reading schedules") if keys else {}
        return {name: _kept(items[key].value) for name, key in keys.items() if key in items}


class _Swap:
    """Changes an item that holds what was expected."""

    def __init__(self, amendment: Amendment, owed: Owed | None, now: int) -> None:
        self._amendment = amendment
        self._owed = (owed,) if owed is not None else ()
        self._now = now

    def __call__(self, kept: StoredRecord | None) -> StoredRecord | None:
        wanted = self._amendment
        if (kept.holds(self._now) if kept is not None else None) != wanted.expected:
            return None
        until = self._now + int(wanted.life * 1e6) if wanted.life else 0
        return StoredRecord(
            b"",
            wanted.body,
            self._now,
            until,
            (*(kept.owed if kept is not None else ()), *self._owed),
        )


class _Release:
    """Empties a claim that holds just this."""

    def __init__(self, body: bytes, now: int) -> None:
        self._body = body
        self._now = now

    def __call__(self, kept: StoredRecord | None) -> StoredRecord | None:
        if kept is None or kept.body != self._body:
            return None
        return msgspec.structs.replace(kept, body=None, at=self._now)


class _Clear:
    """Takes out what is owed under some keys, if all of it was sent."""

    def __init__(self) -> None:
        self.sent: dict[str, set[bytes]] = {}

    def __call__(self, kept: StoredRecord | None) -> StoredRecord | None:
        if kept is None:
            return None
        owed = tuple(
            one
            for one in kept.owed
            if one.key not in self.sent or not self.sent[one.key].issuperset(one.outbox)
        )
        return msgspec.structs.replace(kept, owed=owed) if len(owed) < len(kept.owed) else None


def _item_of(key: str) -> bytes | None:
    """The item in which there may be something owed under this key."""
    if (claim := claim_of(key)) is not None:
        return key_of(_printable(claim), CLAIM)
    return key_of(_printable(record), RECORD) if (record := record_of(key)) is not None else None


def _digest(parts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
