"""States and groups in a Redis Cluster: Go Machinery's documents, each in the slot of its name.

A change is made in steps; docs/explanation/redis-cluster.md says what a crash between two of them
leaves.

    1  a note that there will be a record (only if there are effects in other slots)
    2  in the slot of the key: the verdict, its states, and the record of the effects
    3  the effects: states of others, groups, arrivals
    4  the listings; the record goes, unless it has messages to be published

Limits: what only Go programs wrote is not listed. A finished task is listed for `expire_in`,
also if its own state is kept for longer. `find` reads the names of all tasks.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Collection, Iterable, Sequence

from machinery_py.backends.base import (
    CONFLICT,
    REVOKED_LIFE,
    SETTLED,
    Backend,
    BackendFeatures,
    Begun,
    Change,
    OutboxBackend,
    ReadyGroup,
    Records,
    Rider,
    Verdict,
    lone_rider,
    size_of_change,
)
from machinery_py.backends.listings import Count, Listing, Place, counts_of
from machinery_py.backends.redis import cluster_scripts as scripts
from machinery_py.backends.redis.backend import EXPIRE_IN, SWEEP, VERDICTS
from machinery_py.backends.redis.cluster_documents import (
    SCHEDULES,
    claim_key,
    claim_prefix,
    framed,
    key_of,
    name_of,
    names_of,
    parts_of,
    parts_with,
    prefix_of,
    read_record,
    record_key,
)
from machinery_py.backends.redis.cluster_steps import PAGE, PREFIXES, Steps, by_shard, shard_of
from machinery_py.backends.redis.documents import (
    counted,
    group_of,
    is_listed,
    merged,
    pattern_of,
    place_of,
    records_of,
    state_of,
)
from machinery_py.backends.redis.listener import RedisListener
from machinery_py.backends.redis.scripts import (
    BEGIN,
    CHORD_LIFE,
    DELETE,
    LOOKS,
    MARKS,
    NEWEST,
    RATES,
    RECORDS,
    REVOKE,
)
from machinery_py.backends.redis.scripts import REVOKED as LOOK_FOR_REVOKED
from machinery_py.bounds import pieces
from machinery_py.clock import micros
from machinery_py.connections.durability import Concern
from machinery_py.connections.redis.client import raw
from machinery_py.connections.redis.cluster import RedisClusterDriver
from machinery_py.connections.redis.errors import log_spoilt
from machinery_py.connections.redis.keys import READY, REVOKED, companion_key, document_key, encoded
from machinery_py.connections.redis.requests import command_at, script_at
from machinery_py.connections.redis.scripts import pack
from machinery_py.connections.redis.slots import unquoted
from machinery_py.errors import DecodeError
from machinery_py.tasks.signature import RunNumber
from machinery_py.tasks.states import GroupMeta, State, TaskState
from machinery_py.wire.states import decode_group

WRITE = 1000  # changes that are made together; each is a step of its own
_REVOKED = b"{" + REVOKED + b"}:"  # the prefix of its slot


class ClusterBackend(Backend, OutboxBackend):
    """Documents in a cluster, which belongs to its creator."""

    features: BackendFeatures = BackendFeatures(
        name="redis", foreign=True, claims=True, riders=False
    )

    def __init__(self, cluster: RedisClusterDriver, *, expire_in: float = EXPIRE_IN) -> None:
        self.cluster = cluster
        self.expire_in = expire_in
        self.seconds: int = max(1, math.ceil(expire_in))
        self._steps = Steps(cluster, self.seconds)
        self._tend_at = cluster.clock.monotonic()
        self._last_epoch = 0  # that this process was given

    def now(self) -> dt.datetime:
        return self.cluster.clock.now()

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        if rider := lone_rider(changes, self.features.name):
            return [SETTLED if self._ride(rider, changes[0]) else CONFLICT]
        steps = pieces(changes, size_of_change, most=WRITE)
        return [verdict for step in steps for verdict in self._apply(step)]

    def _apply(self, changes: Sequence[Change]) -> list[Verdict]:
        now, text = self.now(), self.cluster.now()
        parts = [parts_of(change, now, text, self.seconds) for change in changes]
        again = all(change.mark and not change.fires for change in changes)
        gone = self._steps.refused_by_go([part.name for part in parts if part.fires])
        letters = self._steps.decide(parts, again=again, refused=gone)
        done = [part for part, letter in zip(parts, letters, strict=True) if letter == "s"]
        self._steps.carry_out([effect for part in done for effect in part.effects])
        self._steps.forget(
            [(part.name, framed(())) for part in done if part.record and not part.outbox],
            dropped=[
                part.name
                for part, letter in zip(parts, letters, strict=True)
                if part.record and letter != "s"
            ],
        )
        return [VERDICTS[ord(letter)] for letter in letters]

    def begin(self, keys: Sequence[tuple[str, RunNumber]]) -> list[Begun]:
        names = [(name_of(uuid), run) for uuid, run in keys]
        now, least = self.cluster.now(), self._last_epoch + 1
        replies = self.cluster.run(
            BEGIN,
            [
                (prefix_of(name), (now, least, [(name, run)], index))
                for index, (name, run) in enumerate(names)
            ],
        )
        begun = [reply[0] for reply in replies]
        self._last_epoch = max([self._last_epoch, *(epoch for epoch, _, _ in begun)])
        outboxes = self._finish(
            [(name, box) for (name, _), (_, _, box) in zip(names, begun, strict=True)]
        )
        return [
            Begun(epoch=epoch, finished=bool(over), outbox=outbox)
            for (epoch, over, _), outbox in zip(begun, outboxes, strict=True)
        ]

    def _finish(self, records: Sequence[tuple[str, bytes | None]]) -> list[tuple[bytes, ...]]:
        """Carry out effects of records; return outboxes. A record without messages goes."""
        read = [
            (name, *read_record(record)) if record else (name, (), ()) for name, record in records
        ]
        self._steps.carry_out([effect for _, _, effects in read for effect in effects])
        self._steps.forget(
            [
                (name, framed(()))
                for (name, outbox, _), (_, record) in zip(read, records, strict=True)
                if record and not outbox
            ]
        )
        return [outbox for _, outbox, _ in read]

    def _records(self, names: Sequence[str]) -> list[bytes | None]:
        return self.cluster.ask(
            [command_at(b"GET", record_key(name)) for name in names], doing="reading outboxes"
        )

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        names = list(map(name_of, keys))
        return [*self._finish(list(zip(names, self._records(names), strict=True)))]

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        self._steps.forget(
            [(name, framed(bodies)) for key, bodies in sent for name in names_of(key)]
        )

    def unsent(
        self, limit: int, *, older_than: float, skip: int = 0
    ) -> list[tuple[str, Sequence[bytes]]]:
        found = self._steps.noted(skip + limit, older_than)
        records = self._records([name for name, _, _ in found])
        self._steps.drop(
            [
                (name, stamp)
                for (name, stamp, is_old), record in zip(found, records, strict=True)
                if record is None and is_old
            ]
        )
        names = [
            (name, record)
            for (name, _, _), record in zip(found, records, strict=True)
            if record is not None
        ]
        outboxes = self._finish(names)
        unsent: list[tuple[str, Sequence[bytes]]] = [
            (key_of(name), outbox)
            for (name, _), outbox in zip(names, outboxes, strict=True)
            if outbox
        ]
        return unsent[skip : skip + limit]

    def records(self, known: str = "") -> Records:
        slot = SCHEDULES.decode()
        values = (self.cluster.now(), known, f"{slot}all", f"{slot}n")
        return records_of(*self.cluster.run(RECORDS, [(SCHEDULES, values)])[0])

    def _ride(self, rider: Rider, change: Change) -> bool:
        part = parts_with(rider, change, self.now(), self.cluster.now(), self.seconds)
        expected, body = rider.expected or b"", rider.body or b""
        if rider.life:
            life = math.ceil(rider.life)
            done = self._steps.amend_claim(rider.name, expected, body, life, part)
        else:
            done = self._steps.amend(encoded(rider.name), expected, body, part)
        if not done:
            return False
        self._steps.carry_out(part.effects)
        if part.record and not part.outbox:
            self._steps.forget([(part.name, framed(()))])
        return True

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        found = self.cluster.run(
            scripts.CLAIM, [(claim_prefix(name), (raw(claim_key(name)),)) for name in names]
        )
        # The reader of a claim looks at its task next, and takes a task without a state for ended.
        self._steps.carry_out(
            [effect for _, record in found if record for effect in read_record(record)[1]]
        )
        return [body for body, _ in found]

    def release(self, claims: Sequence[tuple[str, bytes]]) -> None:
        self.cluster.run(
            scripts.RELEASE,
            [(claim_prefix(name), (raw(claim_key(name)), raw(body))) for name, body in claims],
        )

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        names = map(name_of, uuids)
        replies = self.cluster.run(MARKS, [(prefix_of(name), ([name],)) for name in names])
        return [reply[0].decode() for reply in replies]

    # Reading

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        names = list(map(name_of, uuids))
        replies = self.cluster.ask(
            [command_at(b"MGET", document_key(name), companion_key(name)) for name in names],
            doing="reading states",
        )
        return {
            uuid: state_of(uuid, *reply)
            for uuid, reply in zip(uuids, replies, strict=True)
            if reply[0] is not None
        }

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        key = document_key(name_of(group_uuid))
        document = self.cluster.command(b"GET", key, doing="reading a group")
        return group_of(group_uuid, document) if document else None

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        doing = scripts.LOOK_AT.doing
        rows = self.cluster.command(b"ZRANGE", READY, b"0", b"%d" % (limit - 1), doing=doing)
        names = [row.decode() for row in rows]
        found: list[ReadyGroup] = []
        over: list[str] = []
        for name, (callback, failed, fired, _, problems) in zip(
            names, self._steps.at_names(scripts.LOOK_AT, names), strict=True
        ):
            if problems:
                log_spoilt(problems, doing=doing)
            elif fired or callback is None:
                over.append(name)
            else:
                member = unquoted(failed.decode()) if failed else ""
                found.append(
                    ReadyGroup(group_uuid=unquoted(name), callback=callback, failed_member=member)
                )
        if over:
            self.cluster.command(b"ZREM", READY, *map(str.encode, over), doing=doing)
        return found

    def list_states(
        self,
        *,
        states: Collection[State] = (),
        name: str = "",
        since: dt.datetime | None = None,
        after: Place | None = None,
        limit: int = 100,
    ) -> Listing:
        # A finished task may still be in the set `open`: the crash of a worker leaves it there.
        is_open = bool(states) and not any(state.is_finished for state in states)
        sets = ("open",) if is_open else ("open", "done")
        at, last = ("", "") if after is None else (str(after[0]), after[1])
        low = 0 if since is None else micros(since)
        calls = [
            (shard, ([shard.decode() + one for one in sets], at, last, low, PAGE))
            for shard in PREFIXES
        ]
        parts: list[tuple[list[tuple[Place, None]], Place | None]] = []
        for rows in [rows for reply in self.cluster.run(NEWEST, calls) for rows in reply]:
            places = [place_of(*row) for row in zip(rows[::2], rows[1::2], strict=True)]
            end = places[-1] if len(places) == PAGE else None
            parts.append(([(place, None) for place in places], end))
        listed, end = merged(parts)
        found: list[tuple[Place, TaskState]] = []
        for start in range(0, len(listed), PAGE):
            places = [place for place, _ in listed[start : start + PAGE]]
            uuids = [unquoted(name) for _, name in places]
            read = self.get_states(uuids)
            found += [
                (place, read[uuid])
                for place, uuid in zip(places, uuids, strict=True)
                if uuid in read and is_listed(states, read[uuid], name)
            ]
            if len(found) >= limit:
                return Listing(found=found[:limit], end=found[limit - 1][0], looked=start + PAGE)
        return Listing(found=found, end=end, looked=len(listed))

    def find(self, prefix: str, limit: int = 2) -> list[str]:
        pattern = pattern_of(name_of(prefix).encode() if prefix else b"")
        match = (b"MATCH", pattern, b"COUNT", b"5000")
        found: set[str] = set()
        for key in (shard + kind for shard in PREFIXES for kind in (b"open", b"done")):
            cursor = b"0"
            while len(found) < limit:
                cursor, rows = self.cluster.command(
                    b"ZSCAN", key, cursor, *match, doing="looking for a task"
                )
                found.update(self.get_states([unquoted(row.decode()) for row in rows[::2]]))
                if cursor == b"0":
                    break
        return sorted(found)[:limit]

    def finished_since(self, moment: dt.datetime, step: int = 3600) -> list[Count]:
        second = micros(moment) // 1_000_000
        calls = [
            (shard, (self.cluster.now(), second, step, f"{shard.decode()}rate:"))
            for shard in PREFIXES
        ]
        return counts_of(row for rows in self.cluster.run(RATES, calls) for row in counted(rows))

    # Revoking, forgetting

    def revoke(self, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        if uuids:
            values = (self.cluster.now(), math.ceil(life), list(map(name_of, uuids)))
            self.cluster.run(REVOKE, [(_REVOKED, values)])

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        if not uuids:
            return set()
        values = (list(map(name_of, uuids)),)
        (found,) = self.cluster.run(LOOK_FOR_REVOKED, [(_REVOKED, values)])
        return {unquoted(name.decode()) for name in found}

    def purge_state(self, task_uuid: str) -> None:
        name = name_of(task_uuid)
        shard = shard_of(name)
        self.cluster.ask(
            [
                script_at(prefix_of(name), scripts.FORGET_TASK, pack((name,))),
                command_at(b"ZREM", shard + b"open", name.encode()),
                command_at(b"ZREM", shard + b"done", name.encode()),
            ],
            doing="forgetting a task",
        )

    def _delete_finished(self, states: Sequence[TaskState]) -> None:
        lives = [(name_of(one.task_uuid), math.ceil(one.life(self.seconds))) for one in states]
        replies = self.cluster.run(DELETE, [(prefix_of(row[0]), ([row], "")) for row in lives])
        gone = by_shard(name.decode() for reply in replies for name in reply)
        self.cluster.ask(
            [
                command_at(b"ZREM", shard + kind, *map(str.encode, names))
                for shard, names in gone.items()
                for kind in (b"open", b"done")
            ],
            doing=DELETE.doing,
        )

    def purge_group_meta(self, group_uuid: str) -> None:
        self._steps.forget_groups([name_of(group_uuid)])

    def listener(self) -> ClusterListener:
        return ClusterListener(self.cluster.at(b"{mpy:ears}:"))

    def tend(self) -> float:
        left = self._tend_at - self.cluster.clock.monotonic()
        if left > 0:
            return left  # the listings are in many slots: not with each look of the broker
        now, doing = micros(self.now()), scripts.EXPIRE.doing
        self._steps.in_shards(scripts.EXPIRE, self.cluster.now(), self.seconds, 2 * CHORD_LIFE)
        self.cluster.command(b"ZREMRANGEBYSCORE", REVOKED, b"-inf", b"%d" % now, doing=doing)
        due = self._steps.due_groups(now)
        # MGET says of a key of another type that it is missing.
        documents = self.cluster.ask(
            [command_at(b"MGET", document_key(name)) for name in due], doing=doing
        )
        alive = [
            name
            for name, (document,) in zip(due, documents, strict=True)
            if self._is_wanted(name, document)
        ]
        self._steps.keep_groups(alive, now + self.seconds * 1_000_000)
        self._steps.forget_groups([name for name in due if name not in alive])
        pause = 0.05 if len(due) >= LOOKS else SWEEP
        self._tend_at = self.cluster.clock.monotonic() + pause
        return pause

    def _is_wanted(self, name: str, document: bytes | None) -> bool:
        """Whether a member of the group is still known, or it waits to be fired."""
        try:
            group = decode_group(document) if document else None
        except DecodeError:
            group = None
        if group is None:
            return False
        score = self.cluster.command(b"ZSCORE", READY, name.encode(), doing=scripts.EXPIRE.doing)
        return score is not None or bool(self.get_states(group.task_uuids))

    def concerns(self) -> list[Concern]:
        return self.cluster.concerns()

    def close(self) -> None:
        pass  # the cluster belongs to its creator


class ClusterListener(RedisListener):
    """A listener at one node: each node passes on what a script publishes at another."""

    def watch(self, uuids: Iterable[str]) -> None:
        super().watch(map(name_of, uuids))

    def unwatch(self, uuids: Iterable[str]) -> None:
        super().unwatch(map(name_of, uuids))
