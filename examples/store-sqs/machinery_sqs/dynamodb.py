"""States and groups in DynamoDB.

    dynamodb://eu-west-1/shop-      region, and how the name of the table begins; may be empty

    table <prefix>machinery, made if it is missing
      kind             name         body (MessagePack)
      task/<uuid>      -            `Stored`
      group/<uuid>     -            `GroupRow`
      revoked/<uuid>   -            nothing
      ready            group        `ReadyGroup`: its callback is to be settled
      outbox           key          `Outbox`: messages still to be published

Each item has a `version`, and is only written over the one that was read: all that a change writes
is one TransactWriteItems, tried anew if somebody was faster. `ttl` is for DynamoDB, which deletes
days later; what has expired is not there when it is read.

Limits: a change writes at most 100 items (a group has some 95 members), an item is at most 400 KB.
A group is forgotten a year after the last thing that happened to it. Go's tables are others.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import msgspec
from botocore.exceptions import ClientError

from machinery_py.backends.base import (
    REVOKED_LIFE,
    BackendFeatures,
    Begun,
    Change,
    Listener,
    ReadyGroup,
    Verdict,
)
from machinery_py.backends.polling import PollingListener
from machinery_py.backends.transactional import Row, TransactionalBackend
from machinery_py.clock import SYSTEM_CLOCK, Clock
from machinery_py.config.options import Section, option
from machinery_py.errors import BackendUnavailable, StoreUnusable, for_good
from machinery_py.stores.open import Family, FamilyOptions
from machinery_py.tasks.states import Arrival, GroupMeta, TaskState
from machinery_py.wire.states import encode_results, printable_state

from .aws import asking, code_of, connect, split
from .items import NEVER, Faster, Items, Key, key_of

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

MOST = 100  # items of a transaction, and of a read
TRIES = 40  # of a transaction in which somebody else was faster
TEND = 60.0  # seconds
PAUSE = 0.1  # seconds at most between two tries
GROUP_LIFE = dt.timedelta(days=366)
LONGEST_CHORD = dt.timedelta(days=7)  # without an arrival, until its results may expire


class Stored(msgspec.Struct):
    """A task. `chord`: the group at which it has arrived, and which may want its results."""

    row: Row
    changed_at: dt.datetime
    chord: str = ""


class GroupRow(msgspec.Struct):
    """A group and its members that have finished.

    `touched_at`: when the last one came in, or the callback was settled.
    """

    meta: GroupMeta
    touched_at: dt.datetime
    members: dict[str, None] = {}
    total: int = 0
    callback: bytes = b""
    failed_member: str = ""
    fired: bool = False

    @property
    def ready(self) -> bool:
        complete = bool(self.total) and len(self.members) >= self.total
        return bool(self.callback) and not self.fired and (complete or bool(self.failed_member))


class Outbox(msgspec.Struct):
    kept_at: dt.datetime
    bodies: tuple[bytes, ...]


class DynamoDBBackend(TransactionalBackend):
    """A backend over a client of boto3, which it does not close."""

    features = BackendFeatures(name="dynamodb", listing=False, schedules=False)

    def __init__(
        self,
        client: Any,
        *,
        prefix: str = "",
        expire_in: float = 3600.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.clock = clock
        self.expire_in = expire_in
        self._client = client
        self._table = f"{prefix}machinery"
        self._is_there = False
        self._local = threading.local()

    def now(self) -> dt.datetime:
        return self.clock.now()

    # Transactions

    @property
    def _items(self) -> Items:
        items: Items = self._local.items
        return items

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        if getattr(self._local, "items", None) is not None:
            yield
            return
        self._local.items = items = Items(self._read)
        try:
            yield
        finally:
            self._local.items = None
        if items.writes:
            self._commit(items)

    def _commit(self, items: Items) -> None:
        requests = items.requests(self._table)
        if len(requests) > MOST:
            raise for_good(
                StoreUnusable(
                    f"a change of {len(requests)} items: DynamoDB writes up to {MOST} as one (send "
                    "smaller groups, or name another result backend)"
                )
            )
        try:
            self._client.transact_write_items(TransactItems=requests)
        except ClientError as error:
            reasons = {one.get("Code") for one in error.response.get("CancellationReasons", [])}
            if reasons & {"ConditionalCheckFailed", "TransactionConflict"}:
                raise Faster from error
            if code_of(error) == "TransactionInProgressException":
                raise Faster from error
            if any("Thr" in str(reason) for reason in reasons):
                raise BackendUnavailable("DynamoDB: too much is written at once") from error
            if "ValidationError" in reasons or code_of(error) == "ValidationException":
                raise for_good(
                    StoreUnusable("DynamoDB refuses an item: one has at most 400 KB (return less)")
                ) from error
            raise

    def _tried(self, step: Callable[..., T], *arguments: Any) -> T:
        """Carry out a step that is one transaction, again while others are faster."""
        with asking("DynamoDB", BackendUnavailable):
            self._make_table()
            for attempt in range(TRIES):
                with contextlib.suppress(Faster):
                    return step(*arguments)
                time.sleep(random.uniform(0, min(PAUSE, 0.002 * 2**attempt)))
        raise BackendUnavailable(f"DynamoDB: others were faster {TRIES} times")

    def _make_table(self) -> None:
        if self._is_there:
            return
        with contextlib.suppress(self._client.exceptions.ResourceInUseException):
            try:
                self._client.describe_table(TableName=self._table)
            except self._client.exceptions.ResourceNotFoundException:
                keys = [("kind", "HASH"), ("name", "RANGE")]
                self._client.create_table(
                    TableName=self._table,
                    BillingMode="PAY_PER_REQUEST",
                    AttributeDefinitions=[
                        {"AttributeName": name, "AttributeType": "S"} for name, _ in keys
                    ],
                    KeySchema=[{"AttributeName": name, "KeyType": kind} for name, kind in keys],
                )
                self._client.get_waiter("table_exists").wait(
                    TableName=self._table, WaiterConfig={"Delay": 1, "MaxAttempts": 60}
                )
                ttl = {"Enabled": True, "AttributeName": "ttl"}
                self._client.update_time_to_live(TableName=self._table, TimeToLiveSpecification=ttl)
        self._is_there = True

    def _read(self, keys: Sequence[Key]) -> dict[Key, dict[str, Any]]:
        """Return those of these items that are there."""
        found: dict[Key, dict[str, Any]] = {}
        for start in range(0, len(keys), MOST):
            left: list[dict[str, Any]] = [key_of(key) for key in keys[start : start + MOST]]
            for attempt in range(TRIES):
                asked = {self._table: {"Keys": left, "ConsistentRead": True}}
                reply = self._client.batch_get_item(RequestItems=asked)
                for item in reply["Responses"].get(self._table, []):
                    found[item["kind"]["S"], item["name"]["S"]] = item
                left = reply.get("UnprocessedKeys", {}).get(self._table, {}).get("Keys", [])
                if not left:
                    break
                time.sleep(random.uniform(0, min(PAUSE, 0.002 * 2**attempt)))
            else:
                raise BackendUnavailable(f"DynamoDB left {len(left)} items unread")
        return found

    def _listed(self, kind: str, record: type[S]) -> Iterator[tuple[str, S]]:
        self._make_table()
        pages = self._client.get_paginator("query").paginate(
            TableName=self._table,
            ConsistentRead=True,
            KeyConditionExpression="kind = :kind",
            ExpressionAttributeValues={":kind": {"S": kind}},
        )
        for page in pages:
            for item in page["Items"]:
                yield item["name"]["S"], msgspec.msgpack.decode(item["body"]["B"], type=record)

    # Changes

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for part in _fitting(changes):
            verdicts += self._tried(super().apply, part)
        return verdicts

    def begin(self, keys: Sequence[tuple[str, int]]) -> list[Begun]:
        begun: list[Begun] = []
        for start in range(0, len(keys), MOST):
            part = keys[start : start + MOST]
            begun += self._tried(super().begin, part)
        return begun

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        return self._tried(super().outboxes, keys)

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        return self._tried(super().settled_by, uuids)

    def _load(self, uuids: Iterable[str]) -> dict[str, Row]:
        return {uuid: one.row for uuid, one in self._alive(list(uuids)).items()}

    def _alive(self, uuids: Sequence[str]) -> dict[str, Stored]:
        """Return the tasks that are there and have not expired."""
        self._items.load([_task(uuid) for uuid in uuids])
        stored = {uuid: self._items.get(_task(uuid), Stored) for uuid in uuids}
        found = {uuid: one for uuid, one in stored.items() if one is not None}
        lapsed = {uuid: one for uuid, one in found.items() if self._ends_at(one) <= self.now()}
        self._items.load([_group(one.chord) for one in lapsed.values() if one.chord])
        for uuid, one in lapsed.items():
            group = self._items.get(_group(one.chord), GroupRow) if one.chord else None
            if group is None or group.fired or group.touched_at + LONGEST_CHORD <= self.now():
                del found[uuid]
        return found

    def _ends_at(self, stored: Stored) -> dt.datetime:
        state = stored.row.state
        if state is None:
            return stored.changed_at + LONGEST_CHORD
        if not state.is_finished:
            return NEVER
        return stored.changed_at + dt.timedelta(seconds=state.life(self.expire_in))

    def _save(self, rows: Sequence[tuple[str, Row]]) -> None:
        for uuid, row in rows:
            before = self._items.get(_task(uuid), Stored)
            chord = self._items.chords.get(uuid) or (before.chord if before else "")
            row.changed = False
            stored = Stored(row, self.now(), chord)
            ends_at = self._ends_at(stored)
            if chord:
                ends_at = max(ends_at, self.now() + LONGEST_CHORD)
            try:
                self._items.put(_task(uuid), stored, ends_at)
            except (OverflowError, UnicodeEncodeError):
                assert row.state is not None
                encode_results(row.state.results)  # raises ArgumentError if it is one of these
                row.state = printable_state(row.state)
                self._items.put(_task(uuid), stored, ends_at)

    def _add_groups(self, groups: Sequence[GroupMeta]) -> None:
        self._items.load([_group(meta.group_uuid) for meta in groups])
        for meta in groups:
            group = self._living(meta.group_uuid)
            if group is None:
                self._put_group(GroupRow(meta, self.now()))
            elif not group.meta.task_uuids:
                group.meta = meta
                self._put_group(group)

    def _arrive(self, arrivals: Sequence[Arrival]) -> None:
        now = self.now()
        self._items.load([_group(one.group_uuid) for one in arrivals])
        for arrival in arrivals:
            uuid = arrival.group_uuid
            group = self._living(uuid) or GroupRow(GroupMeta(group_uuid=uuid, created_at=now), now)
            self._items.chords[arrival.task_uuid] = uuid
            if arrival.task_uuid in group.members:
                continue
            group.members[arrival.task_uuid] = None
            group.touched_at, group.total, group.callback = now, arrival.total, arrival.callback
            if not arrival.ok and not group.failed_member:
                group.failed_member = arrival.task_uuid
            self._put_group(group)

    def _living(self, group_uuid: str) -> GroupRow | None:
        """Return the group; None if its time is over, and that of all its members."""
        group = self._items.get(_group(group_uuid), GroupRow)
        life = dt.timedelta(seconds=self.expire_in)
        if group is None or group.ready or group.touched_at + life > self.now():
            return group
        members = [*dict.fromkeys((*group.meta.task_uuids, *group.members))]
        return group if self._alive(members) else None

    def _put_group(self, group: GroupRow) -> None:
        uuid = group.meta.group_uuid
        ends_at = NEVER if group.ready else group.touched_at + GROUP_LIFE
        self._items.put(_group(uuid), group, ends_at)
        if group.ready:
            ready = ReadyGroup(
                group_uuid=uuid, callback=group.callback, failed_member=group.failed_member
            )
            self._items.put(("ready", uuid), ready)

    def _fire(self, group_uuid: str) -> bool:
        group = self._living(group_uuid)
        if group is None or group.fired:
            return False
        group.fired, group.touched_at = True, self.now()
        group.meta = msgspec.structs.replace(group.meta, chord_triggered=True)
        self._put_group(group)
        self._items.delete(("ready", group_uuid))
        return True

    def _keep_outbox(self, key: str, bodies: Sequence[bytes]) -> None:
        self._items.put(("outbox", key), Outbox(self.now(), tuple(bodies)))

    def _outbox(self, key: str) -> Sequence[bytes]:
        outbox = self._items.get(("outbox", key), Outbox)
        return outbox.bodies if outbox else ()

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        for start in range(0, len(sent), MOST):
            part = sent[start : start + MOST]
            self._tried(self._clear, part)

    def _clear(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        with self._transaction():
            self._items.load([("outbox", key) for key, _ in sent])
            for key, bodies in sent:
                if bodies and self._outbox(key) == tuple(bodies):
                    self._items.delete(("outbox", key))

    def unsent(
        self, limit: int, *, older_than: float, skip: int = 0
    ) -> list[tuple[str, Sequence[bytes]]]:
        before = self.now() - dt.timedelta(seconds=older_than)
        found: list[tuple[str, Sequence[bytes]]] = []
        with asking("DynamoDB", BackendUnavailable):
            for key, outbox in self._listed("outbox", Outbox):
                if outbox.kept_at <= before and len(found) < skip + limit:
                    found.append((key, outbox.bodies))
        return found[skip:]

    # Reading

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        rows = self._tried(self._rows, uuids)
        return {uuid: row.state for uuid, row in rows.items() if row.state is not None}

    def _rows(self, uuids: Sequence[str]) -> dict[str, Row]:
        with self._transaction():
            return self._load(uuids)

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        group = self._tried(self._group, group_uuid)
        return group.meta if group else None

    def _group(self, group_uuid: str) -> GroupRow | None:
        with self._transaction():
            return self._living(group_uuid)

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        with asking("DynamoDB", BackendUnavailable):
            found = [ready for _, ready in self._listed("ready", ReadyGroup)]
        return found[:limit]

    def revoke(self, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        for start in range(0, len(uuids), MOST):
            part = uuids[start : start + MOST]
            self._tried(self._revoke, part, life)

    def _revoke(self, uuids: Sequence[str], life: float) -> None:
        with self._transaction():
            for uuid in uuids:
                until = self.now() + dt.timedelta(seconds=life)
                self._items.put((f"revoked/{uuid}", "-"), None, until)

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        keys = [(f"revoked/{uuid}", "-") for uuid in dict.fromkeys(uuids)]
        found = self._tried(self._read, keys)
        now = self.now().timestamp()
        return {
            kind.partition("/")[2]
            for (kind, _), item in found.items()
            if int(item["ttl"]["N"]) > now
        }

    def purge_state(self, task_uuid: str) -> None:
        self._tried(self._delete, [_task(task_uuid)])

    def purge_group_meta(self, group_uuid: str) -> None:
        self._tried(self._delete, [_group(group_uuid), ("ready", group_uuid)])

    def _delete(self, keys: Sequence[Key]) -> None:
        with self._transaction():
            for key in keys:
                self._items.delete(key)

    def listener(self) -> Listener:
        return PollingListener(self._finished_of, latest=0.5, rest=4.0)

    def _finished_of(self, uuids: Sequence[str]) -> list[str]:
        return [uuid for uuid, state in self.get_states(uuids).items() if state.is_finished]

    def tend(self) -> float:
        return TEND  # DynamoDB deletes by itself what has expired


def _task(uuid: str) -> Key:
    return f"task/{uuid}", "-"


def _group(uuid: str) -> Key:
    return f"group/{uuid}", "-"


def _fitting(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """The changes that go into one transaction each, whole."""
    part: list[Change] = []
    size = 0
    for change in changes:
        items = len(change.states) + len(change.groups) + 2 * len(change.arrivals) + 3
        if part and size + items > MOST:
            yield part
            part, size = [], 0
        part.append(change)
        size += items
    if part:
        yield part


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoDBOptions(Section):
    """Own options: `[stores.dynamodb]` in a TOML file."""

    PREFIX: ClassVar[str] = "stores.dynamodb."

    endpoint: str = option("", "the address of the service; empty: AWS, in the URL's region")


class DynamoDBFamily(Family):
    """What a URL opens: dynamodb://region/prefix."""

    roles = ("result backend",)
    section = DynamoDBOptions

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        own = options.own if isinstance(options.own, DynamoDBOptions) else DynamoDBOptions()
        region, self._prefix = split(url)
        self._client = connect("dynamodb", region, own.endpoint, options.timeout)

    def backend(self) -> DynamoDBBackend:
        options = self.options
        return DynamoDBBackend(
            self._client, prefix=self._prefix, expire_in=options.expire_in, clock=options.clock
        )

    def close(self) -> None:
        self._client.close()
