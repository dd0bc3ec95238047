"""The steps of a change in a Redis Cluster, each of which may be the last one before a crash (docs/explanation/redis-cluster.md).

mpy:ready     groups whose callback is to be settled; some may have been
mpy:groups    groups that are looked at for expiry; written before their documents
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn

from machinery_py.backends.redis import cluster_scripts as scripts
from machinery_py.backends.redis import scripts as redis_scripts
from machinery_py.backends.redis.cluster_documents import (
    SCHEDULES,
    SCRIPTS,
    Effect,
    Parts,
    claim_key,
    claim_prefix,
    document_key,
    prefix_of,
    record_key,
)
from machinery_py.backends.redis.cluster_lists import PREFIXES, Finished, by_shard, list_requests
from machinery_py.backends.redis.scripts import CHORD_LIFE
from machinery_py.clock import micros
from machinery_py.connections.redis.client import raw
from machinery_py.connections.redis.cluster import RedisClusterDriver
from machinery_py.connections.redis.keys import GO_MUTEX, GROUPS, READY
from machinery_py.connections.redis.requests import Request, command_at, script_at
from machinery_py.connections.redis.scripts import pack
from machinery_py.errors import NameRefused, StoreUnusable
from machinery_py.texts import get_logger

TRIES = (
    3  # at a change; more than one when this process was stopped between its note and its record
)
NOTES = (
    10_000  # of our own that are remembered; the others are looked at and dropped by whoever tends
)
STALE = 2 * scripts.NOTED_FOR  # µs after which a note without a record will never get one

logger = get_logger(__name__)


class Steps:
    """Carries them out. May be used from any thread."""

    def __init__(self, cluster: RedisClusterDriver, seconds: int) -> None:
        """`seconds`: that finished states are kept."""
        self._cluster = cluster
        self._seconds = seconds
        self._stamps: dict[str, int] = {}  # what was noted by us, until its record goes

    def _ask(self, requests: Sequence[Request], doing: str, *, again: bool = True) -> list[Any]:
        return self._cluster.ask(requests, doing=doing, again=again) if requests else []

    # 0

    def refused_by_go(self, names: Sequence[str]) -> set[str]:
        """Flag these groups, which are to be fired; those that Go is at, or was.

        Go takes its mutex, reads the document, and writes it with its flag, if there was none. A group whose flag is ours when
        nobody has the mutex will not be settled by Go any more: whoever takes the mutex later reads our flag.
        """
        if not names:
            return set()
        standings = self._ask(
            [script_at(prefix_of(name), scripts.FLAG, pack((name,))) for name in names],
            "settling groups",
        )
        theirs = {name for name, standing in zip(names, standings, strict=True) if standing}
        if not theirs:
            return set()
        (held,) = self._ask([command_at(b"EXISTS", GO_MUTEX)], "settling groups")
        if held:
            return theirs
        # Looked at once more: before the mutex was given back, Go may have written over our flag.
        again = sorted(theirs)
        standings = self._ask(
            [script_at(prefix_of(name), scripts.FLAG, pack((name,))) for name in again],
            "settling groups",
        )
        settled = {name for name, standing in zip(again, standings, strict=True) if standing == 2}
        if settled:
            self._ask([command_at(b"ZREM", READY, *map(str.encode, settled))], "settling groups")
        return settled

    # 1 and 2

    def decide(
        self, parts: Sequence[Parts], *, again: bool, refused: Collection[str] = ()
    ) -> list[str]:
        """Notes and verdicts; what is written is listed. `refused`: groups that are not fired."""
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
            replies = self._ask(
                [
                    script_at(
                        prefix_of(part.name),
                        scripts.CHANGE,
                        pack(
                            (
                                now,
                                self._seconds,
                                own.changes,
                                own.states,
                                raw(records[index]) if records[index] else "",
                                part.held,
                                stamps.get(part.name, 0),
                            )
                        ),
                    )
                    for index in left
                    if (own := (part := parts[index]).own) is not None
                ],
                "writing states",
                again=again,
            )
            for index, reply in zip(left, replies, strict=True):
                letters[index] = reply[0].decode()
            self._list(
                [(reply, parts[index].force) for index, reply in zip(left, replies, strict=True)]
            )
            left = [index for index in left if letters[index] == "l"]
        if left:
            self._refuse_clocks()
        return letters

    def _refuse_clocks(self) -> NoReturn:
        raise StoreUnusable(
            f"Redis {self._cluster.nodes.place}: writing states: the clocks of its nodes differ by more than "
            f"{scripts.NOTED_FOR // 1_000_000} s (set them by NTP)"
        )

    def amend(self, name: bytes, expected: bytes, body: bytes, part: Parts) -> bool:
        """Steps 1 and 2 for the change of a schedule.

        The note stays when it is refused: another one who sends the same tick may have used it for his record, and so may an
        earlier try of ours whose reply was lost. It is dropped when it is old.
        """
        record = part.record
        for _ in range(TRIES):
            stamp = self._note([part.name])[part.name] if record else 0
            argument = pack(
                (
                    self._cluster.now(),
                    raw(name),
                    raw(expected),
                    raw(body),
                    raw(record_key(part.name)),
                    raw(record),
                    stamp,
                )
            )
            (letter,) = self._ask(
                [script_at(SCHEDULES, scripts.AMEND, argument)], "changing a schedule", again=False
            )
            if letter != b"l":
                return bool(letter == b"s")
        self._refuse_clocks()

    def amend_claim(self, claim: str, expected: bytes, body: bytes, life: int, part: Parts) -> bool:
        """The same for a claim."""
        record = part.record
        for _ in range(TRIES):
            stamp = self._note([part.name])[part.name] if record else 0
            argument = pack(
                (
                    self._cluster.now(),
                    raw(claim_key(claim)),
                    raw(expected),
                    raw(body),
                    life,
                    raw(record_key(part.name) if record else b""),
                    raw(record),
                    stamp,
                )
            )
            request = script_at(claim_prefix(claim), scripts.AMEND_CLAIM, argument)
            (letter,) = self._ask([request], "changing a claim", again=False)
            if letter != b"l":
                return bool(letter == b"s")
        self._refuse_clocks()

    def _note(self, names: Iterable[str]) -> dict[str, int]:
        shards = by_shard(dict.fromkeys(names))
        now = self._cluster.now()
        stamps = self._ask(
            [
                script_at(prefix.encode(), scripts.NOTE, pack((now, wanted)))
                for prefix, wanted in shards.items()
            ],
            "noting what follows",
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
        """List tasks as these replies of CHANGE say; each with whether finished ones may have begun anew."""
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
        self._ask(requests, "listing states")

    # 3

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Carry out the follow-ups of changes; may be repeated."""
        if not effects:
            return
        groups = [effect.name for effect in effects if effect.kind == "group"]
        if groups:
            self.keep_groups(
                groups,
                micros(self._cluster.clock.now()) + self._seconds * 1_000_000,
                documents=False,
            )
        try:
            replies = self._ask(
                [
                    script_at(prefix_of(effect.name), SCRIPTS[effect.kind], effect.argument)
                    for effect in effects
                ],
                "writing what follows",
            )
        except NameRefused as error:
            if len(effects) == 1:
                logger.error(
                    "what follows a task is left out: %s", error
                )  # its message is sent all the same
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
            self._ask([command_at(b"ZADD", READY, *rows)], "completing groups")
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
            self._ask(
                [command_at(b"ZREM", READY, *(name.encode() for name, _ in groups))],
                "settling groups",
            )

    def _loosen(self, names: Iterable[str]) -> None:
        self._ask(
            [
                script_at(prefix_of(name), scripts.LOOSEN, pack((name, self._seconds)))
                for name in dict.fromkeys(names)
            ],
            "letting results expire",
        )

    # 4

    def forget(self, sent: Sequence[tuple[str, bytes]], *, dropped: Sequence[str] = ()) -> None:
        """The records of these, with this outbox, have been carried out; and those of `dropped` were never written."""
        self._ask(
            [
                script_at(prefix_of(name), scripts.SENT, pack((raw(record_key(name)), raw(outbox))))
                for name, outbox in sent
            ],
            "clearing outboxes",
        )
        names = dict.fromkeys([*(name for name, _ in sent), *dropped])
        self.drop([(name, stamp) for name in names if (stamp := self._stamps.pop(name, 0))])

    def drop(self, notes: Sequence[tuple[str, int]]) -> None:
        """Forget these notes, unless they were made anew."""
        stamps = dict(notes)
        self._ask(
            [
                script_at(
                    prefix.encode(),
                    scripts.DROP,
                    pack(([(name, str(stamps[name])) for name in names],)),
                )
                for prefix, names in by_shard(stamps).items()
            ],
            "clearing outboxes",
        )

    def noted(self, limit: int, older_than: float) -> list[tuple[str, int, bool]]:
        """(name, stamp, whether it is so old that a record would be there) of notes older than this, the oldest first."""
        argument = pack((self._cluster.now(), limit, int(older_than * 1e6)))
        found: list[tuple[str, int, bool]] = []
        for now, rows in self._ask(
            [script_at(prefix.encode(), scripts.RECORDS, argument) for prefix in PREFIXES],
            "looking for outboxes",
        ):
            for name, score in zip(rows[::2], rows[1::2], strict=True):
                found.append((name.decode(), int(score), int(now) - int(score) > STALE))
        return sorted(found, key=lambda one: one[1])

    # Groups

    def due_groups(self, now: int) -> list[str]:
        """Some whose expiry is to be looked at."""
        (rows,) = self._ask(
            [
                command_at(
                    b"ZRANGEBYSCORE",
                    GROUPS,
                    b"-inf",
                    b"%d" % now,
                    b"LIMIT",
                    b"0",
                    b"%d" % redis_scripts.LOOKS,
                )
            ],
            "looking for what is over",
        )
        return [row.decode() for row in rows]

    def keep_groups(self, names: Sequence[str], until: int, *, documents: bool = True) -> None:
        """Look at these again at that moment."""
        if names:
            rows = [word for name in names for word in (b"%d" % until, name.encode())]
            self._ask([command_at(b"ZADD", GROUPS, *rows)], "keeping groups")
            if documents:
                self._ask(
                    [
                        command_at(b"EXPIRE", document_key(name), b"%d" % CHORD_LIFE)
                        for name in names
                    ],
                    "keeping groups",
                )

    def forget_groups(self, names: Sequence[str]) -> None:
        if names:
            self._ask(
                [script_at(prefix_of(name), scripts.FORGET_GROUP, pack((name,))) for name in names],
                "forgetting groups",
            )
            gone = [name.encode() for name in names]
            self._ask(
                [command_at(b"ZREM", READY, *gone), command_at(b"ZREM", GROUPS, *gone)],
                "forgetting groups",
            )
