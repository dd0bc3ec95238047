"""States and groups in Redis: Go's documents, and ours beside them.

Each change is one script. A finished state expires after `expire_in`, or its own `keep_for`, but
the results of a chord's members only when the chord was settled; a state that is not finished, a
week after its last change (Go: everything after `expire_in`).

Limits: what only Go programs wrote is not listed. A finished task is listed for `expire_in`,
also if its own state is kept for longer. `find` reads the names of all tasks.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import time
from collections.abc import Collection, Sequence

import msgspec

from machinery_py.backends.base import (
    ALREADY,
    CONFLICT,
    FENCED,
    REVOKED_LIFE,
    SETTLED,
    Backend,
    BackendFeatures,
    Begun,
    Change,
    Keeping,
    OutboxBackend,
    ReadyGroup,
    Records,
    Verdict,
    size_of_change,
)
from machinery_py.backends.listings import Count, Listing, Place, counts_of
from machinery_py.backends.redis import scripts
from machinery_py.backends.redis.documents import (
    Changes,
    counted,
    decode_rows,
    group_of,
    is_listed,
    merged,
    pattern_of,
    place_of,
    records_of,
    state_of,
)
from machinery_py.backends.redis.listener import RedisListener
from machinery_py.bounds import CHECKPOINT_LIFE, STEP_BYTES, STEP_ITEMS, in_steps, pieces
from machinery_py.clock import micros
from machinery_py.connections.durability import Concern
from machinery_py.connections.redis import keys as redis_keys
from machinery_py.connections.redis.client import RedisDriver, raw
from machinery_py.connections.redis.errors import log_spoilt
from machinery_py.connections.redis.keys import companion_key, document_key, encoded
from machinery_py.connections.redis.scripts import pack
from machinery_py.errors import DecodeError
from machinery_py.tasks.signature import RunNumber
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from machinery_py.texts import get_logger, printable

logger = get_logger(__name__)

EXPIRE_IN = 3600.0  # seconds that a finished task is kept
SWEEP = 60.0  # seconds between two looks for groups that are over
PATIENCE = 0.5  # seconds that one `tend` lets members of large groups expire
FEW = 4  # states that are read without a script
WRITE = 2000  # changes in one script

VERDICTS = dict(zip(b"safc", (SETTLED, ALREADY, FENCED, CONFLICT), strict=True))

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.:-]+", re.ASCII)  # looks the same in everybody's JSON

_pack_outbox = msgspec.msgpack.Encoder().encode
_outbox = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode


def packed_checkpoints(keeping: Keeping) -> tuple[object, int, list[object]]:
    """Return key, seconds and checkpoints as checkpoints.lua takes them."""
    fields: list[object] = [
        cell for name, body in keeping.rows.items() for cell in (name, raw(body))
    ]
    return raw(redis_keys.checkpoints_key(keeping.uuid)), CHECKPOINT_LIFE, fields


class RedisBackend(Backend, OutboxBackend):
    """Documents on the driver's server. The driver belongs to its creator."""

    features: BackendFeatures = BackendFeatures(
        name="redis", foreign=True, claims=True, checkpoints=True
    )

    def __init__(self, driver: RedisDriver, *, expire_in: float = EXPIRE_IN) -> None:
        self.driver = driver
        self.expire_in = expire_in
        self.seconds: int = max(1, math.ceil(expire_in))

    def now(self) -> dt.datetime:
        return self.driver.clock.now()

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        steps = pieces(changes, size_of_change, most=WRITE)
        return [verdict for step in steps for verdict in self._apply(step)]

    def _apply(self, changes: Sequence[Change]) -> list[Verdict]:
        rows = Changes(self.now(), self.seconds)
        again = True
        for one in changes:
            rows.add(
                key=one.key,
                mark=one.mark,
                epoch=one.epoch,
                force=one.force,
                fires=one.fires,
                states=one.states,
                groups=one.groups,
                arrivals=one.arrivals,
                outbox=_pack_outbox(tuple(one.outbox)) if one.outbox else b"",
                riders=one.riders,
            )
            again = again and bool(one.mark or one.riders) and not one.fires
        argument = pack((self.driver.now(), self.seconds, *rows.packed()))
        if len(argument) > STEP_BYTES and len(changes) > 1:  # what a state becomes is longer
            half = len(changes) // 2
            return [*self._apply(changes[:half]), *self._apply(changes[half:])]
        letters = self.driver.run_packed(scripts.APPLY, argument, again=again)
        return [VERDICTS[letter] for letter in letters]

    def begin(self, keys: Sequence[tuple[str, RunNumber]]) -> list[Begun]:
        if not keys:
            return []
        begun = self.driver.run(scripts.BEGIN, self.driver.now(), redis_keys.FENCE, keys)
        return [
            Begun(epoch=epoch, finished=bool(over), outbox=_outbox(box) if box else ())
            for epoch, over, box in begun
        ]

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        names = [raw(redis_keys.outbox_key(key)) for key in keys]
        boxes: list[Sequence[bytes]] = []
        for step in in_steps(names):
            boxes += [_outbox(box) if box else () for box in self.driver.run(scripts.BOXES, step)]
        return boxes

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        rows = [(key, raw(_pack_outbox(tuple(bodies)))) for key, bodies in sent]
        self.driver.run(scripts.CLEAR, rows)

    def unsent(
        self, limit: int, *, older_than: float, skip: int = 0
    ) -> list[tuple[str, Sequence[bytes]]]:
        values = (self.driver.now(), skip, limit, int(older_than * 1e6))
        found = self.driver.run(scripts.UNSENT, *values)
        return [(key.decode(), _outbox(box) if box else ()) for key, box in found]

    def records(self, known: str = "") -> Records:
        place = redis_keys.RECORDS, redis_keys.RECORDS_VERSION
        return records_of(*self.driver.run(scripts.RECORDS, self.driver.now(), known, *place))

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        keys = [redis_keys.CLAIM + name.encode() for name in names]
        return list(self.driver.ask(b"MGET", *keys, doing="reading claims")) if keys else []

    def release(self, claims: Sequence[tuple[str, bytes]]) -> None:
        if claims:
            self.driver.run(scripts.RELEASE, [(name, raw(body)) for name, body in claims])

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        marks = self.driver.run(scripts.MARKS, uuids) if uuids else []
        return [mark.decode() for mark in marks]

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        return self._read(uuids, bare=False)

    def member_results(self, group_uuid: str, uuids: Sequence[str]) -> dict[str, TaskState]:
        found = self._read(uuids, bare=True)
        failed = [uuid for uuid in uuids if uuid in found and found[uuid].state is State.FAILURE]
        return found | self.get_states(failed)

    def _read(self, uuids: Sequence[str], *, bare: bool) -> dict[str, TaskState]:
        """Read states; `bare`: Go's fields alone, which takes a third of the time."""
        found: dict[str, TaskState] = {}
        for some in in_steps(uuids):
            wanted = some
            while wanted:
                rows = self._documents(wanted, bare=bare)
                for uuid, (document, companion) in zip(wanted, rows, strict=False):
                    if document is not None:
                        found[uuid] = state_of(uuid, document, companion)
                wanted = wanted[len(rows) :]
        return found

    def _documents(
        self, uuids: Sequence[str], *, bare: bool
    ) -> Sequence[tuple[bytes | None, bytes | None]]:
        """Return the document and, unless `bare`, its companion, of as many as one step reads."""
        if bare or len(uuids) > FEW:
            return decode_rows(self.driver.run(scripts.STATES, uuids, bare))
        keys = [key for uuid in uuids for key in (document_key(uuid), companion_key(uuid))]
        found = self.driver.ask(b"MGET", *keys, doing="reading states")
        return list(zip(found[::2], found[1::2], strict=True))

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        document = self.driver.ask(b"GET", document_key(group_uuid), doing="reading a group")
        return group_of(group_uuid, document) if document else None

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        found, spoilt = self.driver.run(scripts.READY, limit)
        log_spoilt(spoilt, doing=scripts.READY.doing)
        groups: list[ReadyGroup] = []
        for uuid, callback, failed in found:
            try:
                one, member = uuid.decode(), failed.decode()
            except UnicodeDecodeError:
                logger.error("member %r of key 'mpy:ready' is no group, and is taken out", uuid)
                self.driver.ask(b"ZREM", redis_keys.READY, uuid, doing="looking for groups")
                continue
            groups.append(ReadyGroup(group_uuid=one, callback=callback, failed_member=member))
        return groups

    def partial_groups(self, limit: int) -> list[Arrival]:
        return [
            Arrival(group_uuid=uuid.decode(), task_uuid="", total=total, ok=True, callback=callback)
            for uuid, total, callback in self.driver.run(scripts.PARTIAL, self.driver.now(), limit)
        ]

    def drop_partial(self, group_uuids: Sequence[str]) -> None:
        names = map(encoded, group_uuids)
        self.driver.ask(b"ZREM", redis_keys.PARTIAL, *names, doing="forgetting incomplete groups")

    def list_states(
        self,
        *,
        states: Collection[State] = (),
        name: str = "",
        since: dt.datetime | None = None,
        after: Place | None = None,
        limit: int = 100,
    ) -> Listing:
        sets = [redis_keys.OPEN, redis_keys.DONE]
        if states:
            ended = {state.is_finished for state in states}
            sets = [key for key, over in zip(sets, (False, True), strict=True) if over in ended]
        at, uuid = ("", "") if after is None else (str(after[0]), after[1])
        low = 0 if since is None else micros(since)
        words = [state.value for state in states]
        quoted = f'"{name}"' if _PLAIN_NAME.fullmatch(name) else ""
        parts: list[tuple[list[tuple[Place, TaskState]], Place | None]] = []
        looked = 0
        for count, last, places, packed in self.driver.run(
            scripts.FIND, sets, at, uuid, low, STEP_ITEMS, limit, words, quoted
        ):
            looked += count
            read: list[tuple[Place, TaskState]] = []
            for place, (document, companion) in zip(places, decode_rows(packed), strict=True):
                if document is not None:
                    at_place = place_of(*place)
                    try:
                        read.append((at_place, state_of(at_place[1], document, companion)))
                    except DecodeError as error:  # the others are listed
                        logger.warning("left out of a listing: %s", error)
            rows = [row for row in read if is_listed(states, row[1], name)]
            parts.append((rows, place_of(*last) if last else None))
        found, end = merged(parts)
        if len(found) > limit:
            found, end = found[:limit], found[limit - 1][0]
        return Listing(found=found, end=end, looked=looked)

    def find(self, prefix: str, limit: int = 2) -> list[str]:
        match = (b"MATCH", pattern_of(encoded(prefix)), b"COUNT", b"5000")
        found: set[str] = set()
        for key in (redis_keys.OPEN.encode(), redis_keys.DONE.encode()):
            cursor = b"0"
            while True:
                cursor, rows = self.driver.ask(
                    b"ZSCAN", key, cursor, *match, doing="looking for a task"
                )
                found.update(self.get_states([uuid.decode() for uuid in rows[::2]]))
                if cursor == b"0" or len(found) >= limit:
                    break
        return sorted(found)[:limit]

    def finished_since(self, moment: dt.datetime, step: int = 3600) -> list[Count]:
        second = micros(moment) // 1_000_000
        rows = self.driver.run(scripts.RATES, self.driver.now(), second, step, redis_keys.RATE)
        return counts_of(counted(rows))

    def revoke(self, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        if uuids:
            self.driver.run(scripts.REVOKE, self.driver.now(), math.ceil(life), uuids)

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        if not uuids:
            return set()
        names = [printable(uuid) for uuid in uuids]
        return {uuid.decode() for uuid in self.driver.run(scripts.REVOKED, names)}

    def purge_state(self, task_uuid: str) -> None:
        self.driver.run(scripts.FORGET_TASK, [task_uuid], ())
        self.end_checkpoints(task_uuid, 0)

    # Checkpoints

    def checkpoints(self, uuid: str) -> dict[str, bytes]:
        key = redis_keys.checkpoints_key(uuid)
        found = self.driver.ask(b"HGETALL", key, doing="reading checkpoints")
        return {name.decode(): body for name, body in zip(found[::2], found[1::2], strict=True)}

    def keep_checkpoints(self, keeping: Keeping) -> Verdict:
        letters = self.driver.run(
            scripts.KEEP, keeping.uuid, keeping.mark, keeping.epoch, *packed_checkpoints(keeping)
        )
        return VERDICTS[letters[0]]

    def drop_checkpoints(self, uuid: str, names: Sequence[str]) -> None:
        fields = (name.encode() for name in names)
        key = redis_keys.checkpoints_key(uuid)
        self.driver.ask(b"HDEL", key, *fields, doing="forgetting checkpoints")

    def end_checkpoints(self, uuid: str, life: float) -> None:
        key, seconds = redis_keys.checkpoints_key(uuid), math.ceil(life)
        command = (b"EXPIRE", key, b"%d" % seconds) if seconds else (b"DEL", key)
        self.driver.ask(*command, doing="forgetting checkpoints")

    def _delete_finished(self, states: Sequence[TaskState]) -> None:
        rows = [(one.task_uuid, math.ceil(one.life(self.seconds))) for one in states]
        for some in in_steps(rows, WRITE):
            self.driver.run(scripts.DELETE, some, redis_keys.DONE)

    def purge_group_meta(self, group_uuid: str) -> None:
        self.driver.run(scripts.FORGET_GROUP, (), [group_uuid])

    def listener(self) -> RedisListener:
        return RedisListener(self.driver)

    def tend(self) -> float:
        looked, held = self.driver.run(scripts.TEND, self.driver.now(), self.seconds)
        end = time.monotonic() + PATIENCE
        while held and time.monotonic() < end:
            held = self.driver.run(scripts.LOOSEN, self.seconds)
        return 0.05 if held or looked >= scripts.LOOKS else SWEEP

    def concerns(self) -> list[Concern]:
        return self.driver.concerns()

    def close(self) -> None:
        pass  # the driver belongs to its creator
