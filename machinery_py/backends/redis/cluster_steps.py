"""The steps of a change in a Redis Cluster, and its listings. A crash may come after any step.

The listings are in shards, so that no node has all of them. They are written after the states (a
crash in between leaves a finished task in `open`), but for the notes of records, which are written
before them.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from machinery_py.backends.redis import cluster_scripts as scripts
from machinery_py.backends.redis.cluster_documents import (
    SCHEDULES,
    SCRIPTS,
    Effect,
    Parts,
    claim_key,
    claim_prefix,
    prefix_of,
    record_key,
)
from machinery_py.backends.redis.scripts import CHORD_LIFE, LOOKS
from machinery_py.clock import micros
from machinery_py.connections.redis.client import raw
from machinery_py.connections.redis.cluster import RedisClusterDriver
from machinery_py.connections.redis.keys import GO_MUTEX, GROUPS, READY, document_key
from machinery_py.connections.redis.requests import Request, command_at, script_at
from machinery_py.connections.redis.scripts import Script, pack
from machinery_py.errors import NameRefused, StoreUnusable
from machinery_py.texts import get_logger

SHARDS = 8  # each is looked at every few seconds by each worker
PREFIXES = tuple(b"mpy:{list%d}:" % number for number in range(SHARDS))
PAGE = 200  # names that are read from a set of a shard at once

Finished = tuple[str, str]
"""Name, and state and queue in one word."""
TRIES = 3  # at a change; the first fails if we were suspended between a note and its record
NOTES = 10_000  # of our own that are remembered; `tend` looks at the others and drops them
STALE = 2 * scripts.NOTED_FOR  # µs after which a note without a record will never get one

logger = get_logger(__name__)


def shard_of(name: str) -> bytes:
    return PREFIXES[zlib.crc32(name.encode()) % SHARDS]


def by_shard(names: Iterable[str]) -> dict[bytes, list[str]]:
    found: dict[bytes, list[str]] = {}
    for name in names:
        found.setdefault(shard_of(name), []).append(name)
    return found


def list_requests(
    now: str, done: Sequence[Finished], open: Sequence[str], *, replayed: bool
) -> list[Request]:
    """Return the requests that list these tasks as finished, and those as changed."""
    ends = dict(done)
    requests: list[Request] = []
    finished, others = by_shard(ends), by_shard(dict.fromkeys(open))
    for prefix in finished.keys() | others.keys():
        names = finished.get(prefix, [])
        values = (now, names, [ends[name] for name in names], others.get(prefix, []), replayed)
        requests.append(script_at(prefix, scripts.LIST, pack(values)))
    return requests


class Steps:
    """Carries the steps out. May be used from any thread."""

    def __init__(self, cluster: RedisClusterDriver, seconds: int) -> None:
        """`seconds`: that finished states are kept."""
        self._cluster = cluster
        self._seconds = seconds
        self._stamps: dict[str, int] = {}  # notes of ours, until their record goes

    def at_names(self, script: Script, names: Iterable[str], *values: object) -> list[Any]:
        """Run a script in the slot of each name, with the name and these values."""
        return self._cluster.run(script, [(prefix_of(name), (name, *values)) for name in names])

    def in_shards(self, script: Script, *values: object) -> list[Any]:
        """Run a script in the slot of each shard of the listings."""
        return self._cluster.run(script, [(prefix, values) for prefix in PREFIXES])

    # 0

    def refused_by_go(self, names: Sequence[str]) -> set[str]:
        """Flag these groups, which are to be fired; return those that Go fires, or has fired.

        Go takes its mutex, reads the document, and writes it with its flag, if there was none. A
        group whose flag is ours while the mutex is free will not be settled by Go any more: whoever
        takes the mutex later reads our flag.
        """
        if not names:
            return set()
        doing = scripts.FLAG.doing
        standings = self.at_names(scripts.FLAG, names)
        gos = sorted({name for name, standing in zip(names, standings, strict=True) if standing})
        if not gos:
            return set()
        if self._cluster.command(b"EXISTS", GO_MUTEX, doing=doing):
            return set(gos)
        # Looked at once more: before the mutex was given back, Go may have written over our flag.
        standings = self.at_names(scripts.FLAG, gos)
        settled = {name for name, standing in zip(gos, standings, strict=True) if standing == 2}
        if settled:
            self._cluster.command(b"ZREM", READY, *map(str.encode, settled), doing=doing)
        return settled

    # 1 and 2

    def decide(
        self, parts: Sequence[Parts], *, again: bool, refused: Collection[str] = ()
    ) -> list[str]:
        """Write notes, states and listings; return verdicts. `refused`: groups not to fire."""
        letters = ["f" if part.fires and part.name in refused else "s" for part in parts]
        left = [
            index
            for index, part in enumerate(parts)
            if part.own is not None and letters[index] == "s"
        ]
        for _ in range(TRIES):
            if not left:
                return letters
            records = {index: parts[index].record for index in left}
            stamps = self._note(parts[index].name for index in left if records[index])
            now = self._cluster.now()
            calls: list[tuple[bytes, Sequence[object]]] = []
            for index in left:
                part, record = parts[index], records[index]
                own, stamp = part.own, stamps.get(part.name, 0)
                assert own is not None
                values = (own.changes, own.states, raw(record) if record else "", part.held, stamp)
                calls.append((prefix_of(part.name), (now, self._seconds, *values)))
            replies = self._cluster.run(scripts.CHANGE, calls, again=again)
            for index, reply in zip(left, replies, strict=True):
                letters[index] = reply[0].decode()
            self._list(
                [(reply, parts[index].force) for index, reply in zip(left, replies, strict=True)]
            )
            left = [index for index in left if letters[index] == "l"]
        if left:
            raise self._clocks_differ()
        return letters

    def _clocks_differ(self) -> StoreUnusable:
        return StoreUnusable(
            f"Redis {self._cluster.nodes.place}: writing states: the clocks of its nodes differ by "
            f"more than {scripts.NOTED_FOR // 1_000_000} s (set them by NTP)"
        )

    def amend(self, name: bytes, expected: bytes, body: bytes, part: Parts) -> bool:
        """Take steps 1 and 2 for the change of a schedule."""
        key = raw(record_key(part.name))
        values = (raw(name), raw(expected), raw(body), key, raw(part.record))
        return self._amend(scripts.AMEND, SCHEDULES, values, part)

    def amend_claim(self, claim: str, expected: bytes, body: bytes, life: int, part: Parts) -> bool:
        """Take steps 1 and 2 for the change of a claim."""
        key = raw(record_key(part.name) if part.record else b"")
        values = (raw(claim_key(claim)), raw(expected), raw(body), life, key, raw(part.record))
        return self._amend(scripts.AMEND_CLAIM, claim_prefix(claim), values, part)

    def _amend(self, script: Script, prefix: bytes, values: Sequence[object], part: Parts) -> bool:
        """Note the record and run the script.

        The note stays when the change is refused: another process that sends the same tick may have
        used it for its record, and so may an earlier try of ours whose reply was lost. It is
        dropped when it is old.
        """
        for _ in range(TRIES):
            stamp = self._note([part.name])[part.name] if part.record else 0
            call = (prefix, (self._cluster.now(), *values, stamp))
            (letter,) = self._cluster.run(script, [call], again=False)
            if letter != b"l":
                return bool(letter == b"s")
        raise self._clocks_differ()

    def _note(self, names: Iterable[str]) -> dict[str, int]:
        shards = by_shard(dict.fromkeys(names))
        now = self._cluster.now()
        stamps = self._cluster.run(
            scripts.NOTE, [(prefix, (now, wanted)) for prefix, wanted in shards.items()]
        )
        found = {
            name: int(stamp)
            for wanted, noted in zip(shards.values(), stamps, strict=True)
            for name, stamp in zip(wanted, noted, strict=True)
        }
        if len(self._stamps) > NOTES:
            self._stamps.clear()
        self._stamps.update(found)
        return found

    def _list(self, replies: Sequence[tuple[Any, bool]]) -> None:
        """List tasks as replies of CHANGE say; each with whether finished ones may begin anew."""
        requests: list[Request] = []
        for replay in (False, True):
            done: list[Finished] = []
            open: list[str] = []
            for reply, replayed in replies:
                if replayed is replay and reply[0] == b"s":
                    ended, others, names = reply[1]
                    done += [
                        (uuid.decode(), name.decode())
                        for uuid, name in zip(ended, names, strict=False)
                    ]
                    open += [uuid.decode() for uuid in others]
            requests += list_requests(self._cluster.now(), done, open, replayed=replay)
        self._cluster.ask(requests, doing="listing states")

    # 3

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Carry out the effects of changes; may be repeated."""
        if not effects:
            return
        if groups := [effect.name for effect in effects if effect.kind == "group"]:
            until = micros(self._cluster.clock.now()) + self._seconds * 1_000_000
            self._look_at_again(groups, until)
        requests = [
            script_at(prefix_of(effect.name), SCRIPTS[effect.kind], effect.argument)
            for effect in effects
        ]
        try:
            replies = self._cluster.ask(requests, doing="writing what follows")
        except NameRefused as error:
            if len(effects) == 1:
                # Its message is sent all the same.
                logger.error("what follows a task is left out: %s", error)
            for effect in effects if len(effects) > 1 else ():
                self.carry_out([effect])
            return
        pairs = list(zip(effects, replies, strict=True))
        self._list(
            [
                (reply, one.kind == "replay")
                for one, reply in pairs
                if one.kind in ("state", "replay")
            ]
        )
        self._arrived([(one, reply) for one, reply in pairs if one.kind == "arrival"])
        self._fired([(one.name, reply) for one, reply in pairs if one.kind == "fired"])

    def _arrived(self, arrivals: Sequence[tuple[Effect, int]]) -> None:
        ready = [effect.name.encode() for effect, standing in arrivals if standing == 1]
        if ready:
            rows = [word for name in dict.fromkeys(ready) for word in (b"0", name)]
            self._cluster.command(b"ZADD", READY, *rows, doing="completing groups")
        # Results are held for a callback; this one has been sent.
        self._loosen(effect.member for effect, standing in arrivals if standing == 2)

    def _fired(self, groups: Sequence[tuple[str, Any]]) -> None:
        if groups:
            self._loosen(
                member.decode()
                for _, (_, _, fired, members, _) in groups
                if fired
                for member in members
            )
            names = [name.encode() for name, _ in groups]
            self._cluster.command(b"ZREM", READY, *names, doing="settling groups")

    def _loosen(self, names: Iterable[str]) -> None:
        self.at_names(scripts.LOOSEN, dict.fromkeys(names), self._seconds)

    # 4

    def forget(self, sent: Sequence[tuple[str, bytes]], *, dropped: Sequence[str] = ()) -> None:
        """Forget the records with these outboxes, and the notes of both."""
        self._cluster.run(
            scripts.SENT,
            [(prefix_of(name), (raw(record_key(name)), raw(outbox))) for name, outbox in sent],
        )
        names = dict.fromkeys([*(name for name, _ in sent), *dropped])
        self.drop([(name, stamp) for name in names if (stamp := self._stamps.pop(name, 0))])

    def drop(self, notes: Sequence[tuple[str, int]]) -> None:
        """Forget these notes, unless they were made anew."""
        stamps = dict(notes)
        self._cluster.run(
            scripts.DROP,
            [
                (prefix, ([(name, str(stamps[name])) for name in names],))
                for prefix, names in by_shard(stamps).items()
            ],
        )

    def noted(self, limit: int, older_than: float) -> list[tuple[str, int, bool]]:
        """Return (name, stamp, whether its record would be there) of notes, the oldest first."""
        now_text, age = self._cluster.now(), int(older_than * 1e6)
        found: list[tuple[str, int, bool]] = []
        for now, rows in self.in_shards(scripts.RECORDS, now_text, limit, age):
            for name, score in zip(rows[::2], rows[1::2], strict=True):
                found.append((name.decode(), int(score), int(now) - int(score) > STALE))
        return sorted(found, key=lambda one: one[1])

    # Groups

    def due_groups(self, now: int) -> list[str]:
        """Return some whose expiry is to be looked at."""
        range_ = (b"-inf", b"%d" % now, b"LIMIT", b"0", b"%d" % LOOKS)
        rows = self._cluster.command(
            b"ZRANGEBYSCORE", GROUPS, *range_, doing="looking for what is over"
        )
        return [row.decode() for row in rows]

    def _look_at_again(self, names: Iterable[str], until: int) -> None:
        rows = [word for name in names for word in (b"%d" % until, name.encode())]
        self._cluster.command(b"ZADD", GROUPS, *rows, doing="keeping groups")

    def keep_groups(self, names: Sequence[str], until: int) -> None:
        """Look at these again at that moment, and keep their documents."""
        if names:
            self._look_at_again(names, until)
            life = b"%d" % CHORD_LIFE
            self._cluster.ask(
                [command_at(b"EXPIRE", document_key(name), life) for name in names],
                doing="keeping groups",
            )

    def forget_groups(self, names: Sequence[str]) -> None:
        if names:
            self.at_names(scripts.FORGET_GROUP, names)
            gone = [name.encode() for name in names]
            self._cluster.ask(
                [command_at(b"ZREM", READY, *gone), command_at(b"ZREM", GROUPS, *gone)],
                doing="forgetting groups",
            )
