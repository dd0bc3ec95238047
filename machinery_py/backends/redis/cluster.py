"""States and groups in a Redis Cluster: Go Machinery's documents, each in the slot of its name.

The order in which a change becomes true, and what a crash between two steps leaves: docs/explanation/redis-cluster.md.

    1  a note that there will be a record (only if something follows in other slots)
    2  in the slot of the key: the verdict, its states, and the record of what follows
    3  the effects: states of others, groups, arrivals
    4  the listings; the record goes, unless it has messages to be published

Limits: what only Go programs wrote is not listed. `find` reads the names of all tasks.
"""

from __future__ import annotations

import datetime as dt
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from machinery_py.backends.base import (
    REVOKED_LIFE,
    Amendment,
    Backend,
    BackendFeatures,
    Begun,
    Change,
    OutboxBackend,
    ReadyGroup,
    Records,
    Verdict,
)
from machinery_py.backends.redis import cluster_scripts as scripts
from machinery_py.backends.redis import scripts as redis_scripts
from machinery_py.backends.redis.backend import EXPIRE_IN, SWEEP, VERDICTS
from machinery_py.backends.redis.cluster_documents import (
    SCHEDULES,
    claim_key,
    claim_prefix,
    companion_key,
    document_key,
    framed,
    key_of,
    name_of,
    names_of,
    parts_of,
    parts_of_tick,
    prefix_of,
    read_record,
    record_key,
)
from machinery_py.backends.redis.cluster_lists import PAGE, PREFIXES, Newest, shard_of
from machinery_py.backends.redis.cluster_steps import Steps
from machinery_py.backends.redis.documents import state_of
from machinery_py.backends.redis.listener import RedisListener
from machinery_py.backends.redis.scripts import CHORD_LIFE
from machinery_py.clock import micros, moment_of
from machinery_py.connections.durability import Concern
from machinery_py.connections.redis.client import raw
from machinery_py.connections.redis.cluster import RedisClusterDriver
from machinery_py.connections.redis.errors import tell_spoilt
from machinery_py.connections.redis.keys import READY, REVOKED
from machinery_py.connections.redis.requests import Request, command_at, script_at
from machinery_py.connections.redis.scripts import Script, pack
from machinery_py.connections.redis.slots import unquoted
from machinery_py.errors import DecodeError
from machinery_py.tasks.states import GroupMeta, State, TaskState
from machinery_py.wire.states import decode_group

_REVOKED = b"{" + REVOKED + b"}:"  # names its slot


class ClusterBackend(Backend, OutboxBackend):
    """Documents in a cluster, which belongs to whoever made it."""

    features = BackendFeatures(name="redis", foreign=True, claims=True)

    def __init__(self, cluster: RedisClusterDriver, *, expire_in: float = EXPIRE_IN) -> None:
        self.cluster = cluster
        self.expire_in = expire_in
        self.seconds = max(1, math.ceil(expire_in))
        self._steps = Steps(cluster, self.seconds)
        self._tend_at = cluster.clock.monotonic()

    def now(self) -> dt.datetime:
        return self.cluster.clock.now()

    def _ask(self, requests: Sequence[Request], doing: str) -> list[Any]:
        return self.cluster.ask(requests, doing=doing)

    def _each(self, script: Script, names: Iterable[str], doing: str, *more: object) -> list[Any]:
        """A script in the slot of each name, with this name and more for arguments."""
        return self._ask(
            [script_at(prefix_of(name), script, pack((name, *more))) for name in names], doing
        )

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        now, text = self.now(), self.cluster.now()
        parts = [parts_of(change, now, text, self.seconds) for change in changes]
        again = all(change.mark and not change.fires for change in changes)
        gone = self._steps.refused_by_go(
            [part.name for change, part in zip(changes, parts, strict=True) if change.fires]
        )
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

    def begin(self, keys: Sequence[tuple[str, int]]) -> list[Begun]:
        names = [(name_of(uuid), run) for uuid, run in keys]
        replies = self._ask(
            [
                script_at(prefix_of(name), redis_scripts.BEGIN, pack(([(name, run)],)))
                for name, run in names
            ],
            "beginning deliveries",
        )
        begun = [reply[0] for reply in replies]
        outboxes = self._finish(
            [(name, box) for (name, _), (_, _, box) in zip(names, begun, strict=True)]
        )
        return [
            Begun(epoch=epoch, finished=bool(over), outbox=outbox)
            for (epoch, over, _), outbox in zip(begun, outboxes, strict=True)
        ]

    def _finish(self, records: Sequence[tuple[str, bytes | None]]) -> list[tuple[bytes, ...]]:
        """Carry out what these records say that follows, and return their outboxes; a record without messages goes."""
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
        return self._ask(
            [command_at(b"GET", record_key(name)) for name in names], "reading outboxes"
        )

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        names = list(map(name_of, keys))
        return [*self._finish(list(zip(names, self._records(names), strict=True)))]

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        self._steps.forget(
            [(name, framed(bodies)) for key, bodies in sent for name in names_of(key)]
        )

    def unsent(self, limit: int, *, older_than: float) -> list[tuple[str, Sequence[bytes]]]:
        found = self._steps.noted(limit, older_than)
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
        unsent: list[tuple[str, Sequence[bytes]]] = []
        unsent += [
            (key_of(name), outbox)
            for (name, _), outbox in zip(names, outboxes, strict=True)
            if outbox
        ]
        return unsent[:limit]

    def records(self, known: str = "") -> Records:
        (found,) = self._ask(
            [script_at(SCHEDULES, scripts.SCHEDULES, pack((self.cluster.now(), known)))],
            "reading schedules",
        )
        bodies = (
            dict(zip(map(bytes.decode, found[2][::2]), found[2][1::2], strict=True))
            if len(found) > 2
            else None
        )
        return Records(now=moment_of(int(found[0])), version=found[1].decode(), bodies=bodies)

    def amend(self, amendment: Amendment) -> bool:
        part = parts_of_tick(amendment, self.now(), self.cluster.now(), self.seconds)
        expected, body = amendment.expected or b"", amendment.body or b""
        if amendment.life:
            done = self._steps.amend_claim(
                amendment.name, expected, body, math.ceil(amendment.life), part
            )
        else:
            done = self._steps.amend(
                amendment.name.encode("utf-8", "backslashreplace"), expected, body, part
            )
        if not done:
            return False
        self._steps.carry_out(part.effects)
        if part.record and not part.outbox:
            self._steps.forget([(part.name, framed(()))])
        return True

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        found = (
            self._ask(
                [
                    script_at(claim_prefix(name), scripts.CLAIM, pack((raw(claim_key(name)),)))
                    for name in names
                ],
                "reading claims",
            )
            if names
            else []
        )
        # Who reads a claim looks at its task next, and takes one without a state for one that is over.
        self._steps.carry_out(
            [effect for _, record in found if record for effect in read_record(record)[1]]
        )
        return [body for body, _ in found]

    def release(self, claims: Sequence[tuple[str, bytes]]) -> None:
        self._ask(
            [
                script_at(
                    claim_prefix(name), scripts.RELEASE, pack((raw(claim_key(name)), raw(body)))
                )
                for name, body in claims
            ],
            "releasing claims",
        )

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        replies = self._ask(
            [
                script_at(prefix_of(name), redis_scripts.MARKS, pack(([name],)))
                for name in map(name_of, uuids)
            ],
            "reading marks",
        )
        return [reply[0].decode() for reply in replies]

    # Reading

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        names = list(map(name_of, uuids))
        replies = self._ask(
            [command_at(b"MGET", document_key(name), companion_key(name)) for name in names],
            "reading states",
        )
        return {
            uuid: state_of(*reply)
            for uuid, reply in zip(uuids, replies, strict=True)
            if reply[0] is not None
        }

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        (document,) = self._ask(
            [command_at(b"GET", document_key(name_of(group_uuid)))], "reading a group"
        )
        return decode_group(document) if document else None

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        (rows,) = self._ask(
            [command_at(b"ZRANGE", READY, b"0", b"%d" % (limit - 1))], "looking for complete groups"
        )
        if not rows:
            return []
        names = [row.decode() for row in rows]
        found: list[ReadyGroup] = []
        over: list[str] = []
        for name, (callback, failed, fired, _, problems) in zip(
            names, self._each(scripts.LOOK_AT, names, "looking for complete groups"), strict=True
        ):
            if problems:
                tell_spoilt(problems, doing="looking for complete groups")
            elif fired or callback is None:
                over.append(name)
            else:
                member = unquoted(failed.decode()) if failed else ""
                found.append(
                    ReadyGroup(group_uuid=unquoted(name), callback=callback, failed_member=member)
                )
        if over:
            self._ask(
                [command_at(b"ZREM", READY, *map(str.encode, over))], "looking for complete groups"
            )
        return found

    def list_states(
        self,
        *,
        state: State | None = None,
        name: str = "",
        since: dt.datetime | None = None,
        limit: int = 100,
    ) -> list[TaskState]:
        # What has finished may still be in the set of what has not: the crash of a worker leaves it there.
        sets = ("open",) if state is not None and not state.is_finished else ("open", "done")
        newest = iter(Newest(self.cluster, sets, 0 if since is None else micros(since)))
        found: list[TaskState] = []
        while len(found) < limit and (names := list(itertools.islice(newest, PAGE))):
            states = self.get_states(list(map(unquoted, names)))
            found += [
                one
                for one in states.values()
                if state in (None, one.state) and name in ("", one.task_name)
            ]
        return found[:limit]

    def find(self, prefix: str, limit: int = 2) -> list[str]:
        wanted = name_of(prefix) if prefix else ""
        pattern = (
            b"".join(
                b"\\" + bytes((c,)) if c in b"*?[]\\^-" else bytes((c,)) for c in wanted.encode()
            )
            + b"*"
        )
        found: set[str] = set()
        for key in (f"{shard}{kind}".encode() for shard in PREFIXES for kind in ("open", "done")):
            cursor = b"0"
            while len(found) < limit:
                ((cursor, rows),) = self._ask(
                    [command_at(b"ZSCAN", key, cursor, b"MATCH", pattern, b"COUNT", b"5000")],
                    "looking for a task",
                )
                found.update(self.get_states([unquoted(row.decode()) for row in rows[::2]]))
                if cursor == b"0":
                    break
        return sorted(found)[:limit]

    def finished_since(self, moment: dt.datetime) -> dict[str, tuple[int, int]]:
        argument = pack((self.cluster.now(), micros(moment) // 1_000_000))
        counts: dict[str, tuple[int, int]] = {}
        for rows in self._ask(
            [script_at(shard.encode(), scripts.RATES, argument) for shard in PREFIXES],
            "counting what has finished",
        ):
            for name, count in rows:
                queue = name[7:].decode()  # behind SUCCESS or FAILURE
                good, bad = counts.get(queue, (0, 0))
                counts[queue] = (
                    (good + count, bad) if name.startswith(b"S") else (good, bad + count)
                )
        return counts

    # Revoking, forgetting

    def revoke(self, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        if uuids:
            argument = pack((self.cluster.now(), math.ceil(life), list(map(name_of, uuids))))
            self._ask([script_at(_REVOKED, redis_scripts.REVOKE, argument)], "revoking tasks")

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        if not uuids:
            return set()
        argument = pack((list(map(name_of, uuids)),))
        (found,) = self._ask(
            [script_at(_REVOKED, redis_scripts.REVOKED, argument)], "looking for revoked tasks"
        )
        return {unquoted(name.decode()) for name in found}

    def purge_state(self, task_uuid: str) -> None:
        name = name_of(task_uuid)
        shard = shard_of(name).encode()
        self._ask(
            [
                script_at(prefix_of(name), scripts.FORGET_TASK, pack((name,))),
                command_at(b"ZREM", shard + b"open", name.encode()),
                command_at(b"ZREM", shard + b"done", name.encode()),
            ],
            "forgetting a task",
        )

    def purge_group_meta(self, group_uuid: str) -> None:
        self._steps.forget_groups([name_of(group_uuid)])

    def listener(self) -> ClusterListener:
        return ClusterListener(self.cluster.at(b"{mpy:ears}:"))

    def tend(self) -> float:
        left = self._tend_at - self.cluster.clock.monotonic()
        if left > 0:
            return left  # the listings are in many slots: not with each look of the broker
        now = micros(self.now())
        argument = pack((self.cluster.now(), self.seconds, 2 * CHORD_LIFE))
        self._ask(
            [script_at(shard.encode(), scripts.EXPIRE, argument) for shard in PREFIXES],
            "looking for what is over",
        )
        self._ask(
            [command_at(b"ZREMRANGEBYSCORE", REVOKED, b"-inf", b"%d" % now)],
            "looking for what is over",
        )
        due = self._steps.due_groups(now)
        # MGET says of something else that it is missing.
        documents = self._ask(
            [command_at(b"MGET", document_key(name)) for name in due], "looking for what is over"
        )
        alive = [
            name
            for name, (document,) in zip(due, documents, strict=True)
            if self._is_wanted(name, document)
        ]
        self._steps.keep_groups(alive, now + self.seconds * 1_000_000)
        self._steps.forget_groups([name for name in due if name not in alive])
        pause = 0.05 if len(due) >= redis_scripts.LOOKS else SWEEP
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
        (score,) = self._ask(
            [command_at(b"ZSCORE", READY, name.encode())], "looking for what is over"
        )
        return score is not None or bool(self.get_states(group.task_uuids))

    def concerns(self) -> list[Concern]:
        return self.cluster.concerns()

    def close(self) -> None:
        pass  # the cluster belongs to whoever made it


class ClusterListener(RedisListener):
    """A listener at one node: what a script publishes is told by all."""

    def watch(self, uuids: Iterable[str]) -> None:
        super().watch(map(name_of, uuids))

    def unwatch(self, uuids: Iterable[str]) -> None:
        super().unwatch(map(name_of, uuids))
