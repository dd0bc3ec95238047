"""Rows and messages in PostgreSQL.

Tables and the steps on them: connections/postgresql/tables.sql and functions.sql. A commit is one
statement, however many steps it has: they are compared together and written together. So the steps
of one statement touch different rows and messages; a batch whose steps meet is several statements.

Limits: of two processes that make one row at the same moment, while a third deletes it, the later
version may be the smaller one. A limit of a queue may be passed by what goes back to it.
"""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Final, NoReturn, TypeVar

import msgspec
import psycopg

from machinery_py.bounds import STEP_BYTES, pieces
from machinery_py.clock import Clock
from machinery_py.connections.postgresql.callers import (
    CallersConnection,
    Cells,
    Params,
    ask,
    connection_in,
)
from machinery_py.connections.postgresql.client import Link, PostgreSQLDriver
from machinery_py.connections.postgresql.errors import ENDED, OVERSTAYED, RACED, translate
from machinery_py.errors import BackendUnavailable, MachineryError, Unsupported
from machinery_py.fences import Fence
from machinery_py.rows.contract import (
    NO_ROW,
    PAGE,
    Committed,
    Conflict,
    Decision,
    Facts,
    Gone,
    Key,
    NoRoom,
    OwnTransaction,
    Repeated,
    Rows,
    RowStep,
    StepResult,
    StoredRow,
    Version,
    Write,
)
from machinery_py.rows.messages import (
    CLOSED,
    EVER,
    ClaimReceipt,
    Join,
    MessageRows,
    MessageStep,
    Place,
    Push,
    checked,
    queue_topic,
)
from machinery_py.rows.postgresql_messages import (
    PostgreSQLMessages,
    literal,
    note_ended,
    raw,
    text_of,
)

LAST = 2**63 - 1  # µs
MOST = 100  # steps in one statement
COMMIT = 3  # times the patience in a call: deferred constraints, replicas that are waited for
T = TypeVar("T")

_READ = "SELECT * FROM machinery.read(%s, %b::text[], %b::bytea[])"
_READ_SENT = _READ.replace("machinery.read(", "machinery.read_sent(")
_COMMIT = (
    "SELECT at, results, versions, waiting FROM machinery.commit(%s, %s, %s, %s, %s::json, "
    "%s::json, %s::json, %s::json, %s::json, %s::json, %b::bytea[])"
)
_COMMIT_NEW = _COMMIT.replace("machinery.commit(", "machinery.commit_new(")
_COMMIT_WITHIN = _COMMIT.replace("machinery.commit(", "machinery.commit_within(")
# The last step locks what others wait for: the server rolls back if no commit comes.
_COMMIT_LAST = _COMMIT_WITHIN.replace(
    " FROM", ", set_config('idle_in_transaction_session_timeout', '5s', true) FROM"
)
_FENCES = "SELECT max(nextval('machinery.numbers')) - %s + 1 FROM generate_series(1, %s)"
_SEND = _COMMIT.replace("machinery.commit(", "machinery.send(false, ")
_SEND_WITHIN = _COMMIT.replace("machinery.commit(", "machinery.send(true, ")
_FORGET = "SELECT machinery.forget(%b::text[], %b::bytea[], %s::bigint[])"
_EXPIRE = "SELECT machinery.expire(%s, %s)"

_THERE = "machinery.is_there(expires_at, kept_kind, kept_id, machinery.moment(%s))"
# In: kind, now, name or NULL twice, place behind which the rows begin, how many, how many bytes.
_LIST = f"""
SELECT id, version, body, at, name, kept_kind, kept_id FROM (
    SELECT *, row_number() OVER place AS number, sum(octet_length(body)) OVER place AS bytes
    FROM (
        SELECT * FROM machinery.rows
        WHERE kind = %s AND at IS NOT NULL AND {_THERE} AND (%s::bytea IS NULL OR name = %s)
            AND (at, id) < (%s, %s)
        ORDER BY at DESC, id DESC LIMIT %s
    ) AS found WINDOW place AS (ORDER BY at DESC, id DESC)
) AS page WHERE number = 1 OR bytes <= %s ORDER BY number
"""
_IDS = f"""
SELECT id FROM machinery.rows WHERE kind = %s AND id >= %s AND id < %s AND {_THERE}
ORDER BY id LIMIT %s
"""
# In: step, kind, since, now.
_COUNT = f"""
SELECT name, at - at %% %s AS step, count(*) FROM machinery.rows
WHERE kind = %s AND at IS NOT NULL AND at >= %s AND {_THERE} GROUP BY name, step
"""


class _RowOp(msgspec.Struct, omit_defaults=True, gc=False):
    """A change or a condition of a row; functions.sql says what each means."""

    s: int
    op: str
    kind: str
    id: str
    wants: int | None = None
    once: bool = False
    lives: int | None = None
    at: int | None = None
    name: str | None = None
    kept_kind: str | None = None
    kept_id: str | None = None
    b: int | None = None
    last: bool = False
    j: int = 0


class _ItemOp(msgspec.Struct, gc=False):
    s: int
    hold: str
    id: int
    count: int
    claim: int
    op: str


def _item_op(step: int, receipt: ClaimReceipt, op: str) -> _ItemOp:
    return _ItemOp(step, receipt.hold, receipt.id, receipt.count, receipt.claim, op)


class _PushOp(msgspec.Struct, gc=False):
    s: int
    id: int | None
    queue: str
    b: int | None
    priority: int
    turn: int
    due: int
    tenant: str | None
    same: bool


class _RoomOp(msgspec.Struct, gc=False):
    s: int
    queue: str
    most: int
    adds: int


class _JoinOp(msgspec.Struct, gc=False):
    s: int
    j: int
    kind: str
    id: str
    member: str
    whole: int
    ready_kind: str
    ready_id: str


class _Tell(msgspec.Struct, gc=False):
    s: int
    topic: str


_encode = msgspec.json.Encoder().encode


class _ReadRows(Rows):
    """The reading half: over the driver's connections, or over one that is given."""

    driver: PostgreSQLDriver

    @abstractmethod
    def ask(
        self, sql: str, arguments: Params, *, doing: str, sender: str = ""
    ) -> Sequence[Cells]: ...

    def now(self) -> int:
        return self.driver.now()

    def read(self, keys: Sequence[Key]) -> list[StoredRow | None]:
        found: list[StoredRow | None] = [None] * len(keys)
        if keys:
            kinds, ids = [key.kind for key in keys], [raw(key.id) for key in keys]
            arguments = (self.driver.given_now(), kinds, ids)
            rows = self.ask(_READ, arguments, doing="reading", sender=_READ_SENT)
            for number, *cells in rows:
                found[number - 1] = _row(keys[number - 1], *cells)
        return found

    def list(
        self,
        kind: str,
        *,
        name: str | None = None,
        after: StoredRow | None = None,
        items: int = PAGE,
        size: int = STEP_BYTES,
    ) -> list[StoredRow]:
        at, id = LAST, b""
        if after is not None and after.facts is not None:
            at, id = after.facts.at, raw(after.key.id)
        wanted = None if name is None else raw(name)
        now = self.driver.given_now()
        arguments = (kind, now, wanted, wanted, at, id, items, size)
        found = self.ask(_LIST, arguments, doing="listing")
        return [_row(Key(kind, text_of(cells[0])), *cells[1:]) for cells in found]


class PostgreSQLRows(PostgreSQLMessages, _ReadRows, MessageRows):
    """Rows in the driver's database. The driver belongs to whoever made it.

    Args:
        unavailable: what is raised when nothing was done.
        unknown: what is raised when a step may have become true.
    """

    def __init__(
        self,
        driver: PostgreSQLDriver,
        *,
        unavailable: type[MachineryError] = BackendUnavailable,
        unknown: type[MachineryError] = BackendUnavailable,
    ) -> None:
        super().__init__(driver, unavailable)
        self.clock: Clock = driver.clock
        self._unknown = unknown

    def is_entered(self) -> bool:
        return False

    def fences(self, number: int) -> Fence:
        [(first,)] = self.ask(_FENCES, (number, number), doing="taking fences")
        return Fence(first)

    def commit(self, steps: Sequence[RowStep | MessageStep]) -> list[StepResult]:
        whole = list(map(checked, steps))
        done: list[StepResult] = []
        for some in _apart(whole):
            for piece in pieces(some, MessageStep.size, most=MOST):
                done += self._commit(piece)
        return done

    def _commit(self, steps: Sequence[MessageStep]) -> list[StepResult]:
        statement = _Statement(steps)
        [cells] = self.driver.run(
            _COMMIT_NEW if statement.makes_rows else _COMMIT,
            statement.arguments(self.driver.given_now()),
            doing="writing",
            away=self.unavailable,
            lost=self._unknown,
            sender=_SEND,
        )
        done = _results(steps, *cells)
        for step, result in zip(steps, done, strict=True):
            if step.takes and isinstance(result, (Committed, Repeated, Gone)):
                note_ended(self.driver, step.takes)
        return done

    def on(self, connection: object) -> RowsWithin:
        """As the contract says, for what callers.py takes for a connection.

        Messages of tasks that the caller rolls back, also to a savepoint, are not sent.

        Raises:
            Unsupported: it is none, one to another database, or in no transaction.
        """
        found = connection_in(connection)
        try:
            self.driver.places.check(found)
        except psycopg.Error as error:
            raise translate(
                error, self.driver.url, doing="joining your transaction", away=self.unavailable
            ) from error
        return RowsWithin(self.driver, found, self.unavailable)

    def open_transaction(self) -> PostgreSQLTransaction:
        return PostgreSQLTransaction(self.driver, self.unavailable)

    def ids(self, kind: str, *, prefix: str = "", items: int = PAGE) -> list[str]:
        begin = raw(prefix)
        # No byte of UTF-8 is 255. More than an integer's worth is all.
        arguments = (kind, begin, begin + b"\xff", self.driver.given_now(), min(items, 2**31))
        return [text_of(id) for (id,) in self.ask(_IDS, arguments, doing="listing ids")]

    def count(self, kind: str, *, since: int = 0, step: int = EVER) -> dict[tuple[str, int], int]:
        arguments = (step, kind, since, self.driver.given_now())
        found = self.ask(_COUNT, arguments, doing="counting")
        return {(text_of(name), begun_at): number for name, begun_at, number in found}

    def forget(self, rows: Sequence[StoredRow]) -> None:
        kinds, ids = [row.key.kind for row in rows], [raw(row.key.id) for row in rows]
        versions = [int(row.version) for row in rows]
        self.ask(_FORGET, (kinds, ids, versions), doing="deleting")

    def expire(self, items: int) -> bool:
        [(more,)] = self.ask(_EXPIRE, (self.driver.given_now(), items), doing="sweeping")
        return bool(more)


class RowsWithin(_ReadRows):
    """Rows inside a transaction of somebody else.

    Args:
        ends: the next step is the last one before the commit: it may let others wait.

    Attributes:
        takes: messages that end if the transaction commits.
    """

    def __init__(
        self,
        driver: PostgreSQLDriver,
        connection: CallersConnection,
        unavailable: type[MachineryError],
        *,
        ends: bool = False,
    ) -> None:
        self.driver = driver
        self.clock: Final = driver.clock
        self._connection = connection
        self._unavailable = unavailable
        self._ends = ends
        self.takes: tuple[ClaimReceipt, ...] = ()

    def ask(self, sql: str, arguments: Params, *, doing: str, sender: str = "") -> Sequence[Cells]:
        link = self._connection
        statement = sender or sql if self.driver.only_sends else sql
        try:
            with link.bounded() if isinstance(link, Link) else contextlib.nullcontext():
                return ask(link, statement, arguments)
        except psycopg.Error as error:
            doing = f"{doing} in your transaction"
            raise translate(error, self.driver.url, doing=doing, away=self._unavailable) from error

    def commit(self, steps: Sequence[RowStep | MessageStep]) -> list[StepResult]:
        [step] = map(checked, steps)
        waits = step.takes or step.held or step.joins
        if (
            (waits and not self._ends)
            or step.room
            or any(key.kind == CLOSED for key in _written(step))
        ):
            self._refuse("what takes messages, has conditions on queues or joins sets")
        arguments = _Statement([step]).arguments(self.driver.given_now())
        sql = _COMMIT_LAST if step.takes or step.held else _COMMIT_WITHIN
        [cells] = self.ask(sql, arguments, doing="writing", sender=_SEND_WITHIN)
        self.takes += step.takes
        return _results([step], *cells[:4])

    def change(self, keys: Sequence[Key], decide: Decision[T], *, durable: bool = True) -> T:
        self._refuse("a change that is decided anew until it holds")

    def expire(self, items: int) -> bool:
        self._refuse("a sweep")

    def _refuse(self, what: str) -> NoReturn:
        raise Unsupported(
            f"{what} cannot be part of your transaction: others would wait for its end"
        )


class PostgreSQLTransaction(OwnTransaction):
    """A transaction on a connection of the driver."""

    def __init__(self, driver: PostgreSQLDriver, unavailable: type[MachineryError]) -> None:
        self._driver = driver
        self._closing = threading.Lock()
        try:
            link = driver.begin()
            try:
                self._block = link.transaction()  # in it psycopg refuses the user's commit
                with link.bounded():
                    self._block.__enter__()
            except BaseException:  # Ctrl+C, or the server has closed it: the next one is another
                driver.end(link)
                raise
        except psycopg.Error as error:
            raise translate(
                error, driver.url, doing="beginning a transaction", away=unavailable
            ) from error
        self._link = link
        self.connection: Link = link
        self._within = RowsWithin(driver, self._link, unavailable, ends=True)
        self.rows: Rows = self._within
        self._is_over = self._is_closed = self._is_abandoned = False

    def commit(self) -> None:
        self._is_over = True
        with self._link.bounded(COMMIT):
            self._block.__exit__(None, None, None)
        note_ended(self._driver, self._within.takes)

    def is_raced(self, error: BaseException) -> bool:
        states = {one.sqlstate for one in _causes(error) if isinstance(one, psycopg.Error)}
        if not states.isdisjoint(OVERSTAYED):
            return False  # it would be so again
        # The server may have said that it ends another connection of the task's.
        ended = not states.isdisjoint(ENDED) and not self._link.is_alive()
        return ended or self._link.broken or not states.isdisjoint(RACED)

    def is_unknown(self, error: BaseException) -> bool:
        return not self._link.is_alive()

    def abandon(self) -> None:
        with self._closing:
            if self._is_closed:
                return  # the connection may be another task's by now
            self._is_abandoned = True
        with contextlib.suppress(psycopg.Error):
            self._link.cancel_safe(timeout=self._driver.timeout)

    def close(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            if self._is_abandoned:  # what was cancelled might hit the next task's statement
                self._link.close()
            elif not self._is_over:
                # If that fails, the connection is closed.
                with contextlib.suppress(psycopg.Error), self._link.bounded():
                    self._block.__exit__(psycopg.Rollback, psycopg.Rollback(), None)
        finally:
            self._driver.end(self._link)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and what led to it, also as libraries over psycopg keep it."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = getattr(error, "orig", None) or error.__cause__


def _results(
    steps: Sequence[MessageStep],
    at: int,
    results: Sequence[int],
    versions: Sequence[int] | None,
    waiting: Sequence[int] | None,
) -> list[StepResult]:
    """Return what machinery.commit answers."""
    done: list[StepResult] = []
    for number, (step, result) in enumerate(zip(steps, results, strict=True)):
        match result:
            case 0:
                version = versions[number] if versions else NO_ROW
                done.append(Committed(Version(Fence(version)), at))
            case 1:
                done.append(Conflict())
            case 2:
                done.append(Repeated())
            case 3:
                done.append(Gone())
            case _:
                done.append(NoRoom(step.room[0].queue, waiting[number] if waiting else 0))
    return done


def _row(
    key: Key,
    version: int,
    body: bytes,
    at: int | None,
    name: bytes | None,
    kept_kind: str | None,
    kept_id: bytes | None,
) -> StoredRow:
    return StoredRow(
        key=key,
        body=body,
        version=Version(Fence(version)),
        facts=None if at is None else Facts(at=at, name=text_of(name or b"")),
        kept_by=None if kept_kind is None else Key(kept_kind, text_of(kept_id or b"")),
    )


def _written(step: MessageStep) -> Iterator[Key]:
    yield from step.write
    yield from step.create


def _apart(steps: Sequence[MessageStep]) -> Iterator[list[MessageStep]]:
    """Divide steps, in their order, so that none touches what another one beside it writes.

    Conditions, creations and sets may meet each other. A step with conditions on queues is alone.
    """
    piece: list[MessageStep] = []
    seen: dict[object, str] = {}  # how rows and messages are touched
    for step in steps:
        touched = dict(_touched(step))
        if piece and (
            step.room
            or piece[-1].room
            or any(
                there != how or how == "w"
                for one, how in touched.items()
                if (there := seen.get(one)) is not None
            )
        ):
            yield piece
            piece, seen = [], {}
        piece.append(step)
        seen |= touched
    if piece:
        yield piece


def _touched(step: MessageStep) -> Iterator[tuple[object, str]]:
    if step.once is not None:
        yield step.once, "e"
    for key in step.expect:
        yield key, "e"
    for join in step.joins:
        for key in (join.set, join.ready, *join.beside):
            yield key, "j"
    for key in step.create:
        yield key, "w" if key in step.expect or key == step.once else "c"
    for key in step.write:
        yield key, "w"
    for receipt in step.held:
        yield receipt.id, "e"
    for receipt in step.takes:
        yield receipt.id, "w"


class _Statement:
    """The steps of one statement, as it takes them.

    Attributes:
        makes_rows: machinery.commit_new can carry them out: each makes rows that nobody should have
            made yet, and takes nothing. A row that another one keeps, as that of a unique task, is
            there as often as not.
    """

    def __init__(self, steps: Sequence[MessageStep]) -> None:
        self._lazy = not any(step.durable for step in steps)
        self._closing = any(key.kind == CLOSED for step in steps for key in _written(step))
        self._steps = 0
        self._rows: list[_RowOp] = []
        self._items: list[_ItemOp] = []
        self._pushes: list[_PushOp] = []
        self._rooms: list[_RoomOp] = []
        self._joins: list[_JoinOp] = []
        self._tell: list[_Tell] = []
        self._bodies: list[bytes] = []
        for step in steps:
            self._add(step)
        self.makes_rows = (
            sum(one.last for one in self._rows) == len(steps)
            and not (self._closing or self._items or self._rooms or self._joins)
            and all(
                one.op == "w" and one.kept_kind is None and (one.wants == NO_ROW or one.once)
                for one in self._rows
            )
        )
        if self.makes_rows:
            self._rows.sort(key=lambda one: not one.last)

    def arguments(self, now: int | None) -> Sequence[object]:
        """Return what machinery.commit takes: lists as JSON, None for an empty one, and bodies."""
        lists = self._rows, self._items, self._pushes, self._rooms, self._joins, self._tell
        texts = (_encode(one).decode() if one else None for one in lists)
        return (now, self._steps, self._lazy, self._closing, *texts, self._bodies)

    def _add(self, step: MessageStep) -> None:
        self._steps = s = self._steps + 1
        expect = dict(step.expect)
        last = None
        for key, one in step.write.items():
            wants, once = expect.pop(key, None), key == step.once
            if one is None:
                self._row("d", key, wants, once=once)
            else:
                last = self._write("w", key, one, wants, once=once)
        if last is not None:
            last.last = True
        for key, one in step.create.items():
            if key not in step.write:
                self._write("c", key, one, expect.pop(key, None), once=key == step.once)
        for key, version in expect.items():
            self._row("x" if version == NO_ROW else "k", key, version)
        if step.once is not None and step.once not in step.write:
            self._row("k", step.once, once=True)
        for join in step.joins:
            self._join(join)
        if step.takes or step.held:
            pushed = {push.id for push in step.pushes}
            for receipt in step.takes:
                op = "p" if receipt.id in pushed else "d"
                self._items.append(_item_op(s, receipt, op))
            for receipt in step.held:
                self._items.append(_item_op(s, receipt, "h"))
        for room in step.room:
            self._rooms.append(_RoomOp(s, literal(room.queue), room.limit, room.adds))
        for push in step.pushes:
            self._push(push)
        topics = dict.fromkeys((*(queue_topic(push.queue) for push in step.pushes), *step.tell))
        self._tell += [_Tell(s, literal(topic)) for topic in topics]

    def _row(self, op: str, key: Key, wants: int | None = None, *, once: bool = False) -> None:
        one = _RowOp(self._steps, op, key.kind, literal(key.id), wants=wants, once=once)
        self._rows.append(one)

    def _write(
        self,
        op: str,
        key: Key,
        write: Write,
        wants: int | None = None,
        *,
        once: bool = False,
        j: int = 0,
    ) -> _RowOp:
        facts, kept = write.facts, write.kept_by
        one = _RowOp(
            self._steps,
            op,
            key.kind,
            literal(key.id),
            wants=wants,
            once=once,
            lives=write.expires_in,
            at=None if facts is None else facts.at,
            name=None if facts is None else literal(facts.name),
            kept_kind=None if kept is None else kept.kind,
            kept_id=None if kept is None else literal(kept.id),
            b=self._body(write.body),
            j=j,
        )
        self._rows.append(one)
        return one

    def _body(self, body: bytes | None) -> int | None:
        if body is None:
            return None
        self._bodies.append(body)
        return len(self._bodies)

    def _push(self, push: Push) -> None:
        waited = push.place is Place.WAITED and push.tenant is None
        self._pushes.append(
            _PushOp(
                self._steps,
                push.id,
                literal(push.queue),
                self._body(push.body),
                push.priority,
                push.due - 2**62 if waited else 0,
                push.due,
                None if push.tenant is None else literal(push.tenant),
                push.place is Place.SAME,
            )
        )

    def _join(self, join: Join) -> None:
        j = len(self._joins) + 1
        self._row("s", join.set)
        self._write("y", join.ready, join.write, j=j)
        for key, write in join.beside.items():
            self._write("b", key, write, j=j)
        self._joins.append(
            _JoinOp(
                self._steps,
                j,
                join.set.kind,
                literal(join.set.id),
                literal(join.member),
                join.whole,
                join.ready.kind,
                literal(join.ready.id),
            )
        )
