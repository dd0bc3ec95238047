"""Messages and holds in a SQLite file.

Tables: connections/sqlite/schema.py.

A hold whose process has ended has lost its file lock: the next look of any other process finds it.
One that lives is left alone however late it is, unless its process is stopped (SIGSTOP) and its
beat is older than the lease.

Limits: each message wakes all sleeping consumers of the file for a moment; those that do not serve
its queue sleep on without a look at the file.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from machinery_py.bounds import STEP_BYTES
from machinery_py.connections import session_files
from machinery_py.connections.proc import is_suspended, place
from machinery_py.connections.session_files import ALL, SessionFile, SessionState
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.connections.sqlite.fences import next_fence
from machinery_py.connections.sqlite.rows import as_json, insert_rows
from machinery_py.connections.sqlite.wakeup import ANY, Kind
from machinery_py.errors import MachineryError
from machinery_py.fences import Fence
from machinery_py.rows.contract import PAGE
from machinery_py.rows.file_holds import FileHold
from machinery_py.rows.messages import (
    CLOSED,
    REVOKED,
    Claimed,
    ClaimReceipt,
    Claims,
    HoldKeeper,
    HoldReport,
    MessageQueues,
    MessageStep,
    Place,
    Push,
    QueueCount,
    StoredMessage,
    TopicListener,
    queue_topic,
)
from machinery_py.rows.sqlite_turns import forget_turns, give_turns, serve_turns
from machinery_py.rows.steps import StepTarget
from machinery_py.rows.suspects import Suspects
from machinery_py.texts import printable

WAITING, LATE = 0, 1  # states; held: 2
FIRST = -(2**63)  # of all turns
BIG = 65536  # bytes
BEATS = 8  # a beat is written down this often in a lease
PROMOTED = 10_000  # messages in one step: a million would keep all others from writing
SWEEP = 60.0  # seconds between two looks for files of holds that nobody knows
QUEUES = queue_topic("")  # begins the topics of queues


class Next(msgspec.Struct, array_like=True, gc=False):
    """A message that a claim takes."""

    id: int
    queue: str
    count: int
    strikes: int
    put_at: int
    size: int
    priority: int
    turn: int
    tenant: str | None
    body: str
    is_big: int


_PUT = "INSERT INTO items (queue, state, priority, turn, due, put_at, tenant, body)"

# In: queue, state, priority, turn, due, tenant, body or NULL, id.
_PUSH = """
UPDATE items SET queue = ?, state = ?, priority = ?, turn = ?, due = ?, tenant = ?,
    body = coalesce(?, body), hold = NULL, claim = NULL, runs = 0 WHERE id = ?
"""
# The same, at its place. In: queue, body or NULL, id.
_BACK = """
UPDATE items SET queue = ?, state = 0, body = coalesce(?, body), hold = NULL, claim = NULL, runs = 0
WHERE id = ?
"""
_IDS = "IN (SELECT value FROM json_each(?1))"
_TAKE = f"DELETE FROM items WHERE id {_IDS}"
# Out: [[id, the hold that has it or '', count, queue], …] of those that no ended hold has. JSON, so
# that it is one step.
_WHERE = f"""
SELECT json_group_array(json_array(id, coalesce(hold, ''), count, queue)) FROM items NOT INDEXED
WHERE id {_IDS} AND (hold IS NULL OR EXISTS (
    SELECT 1 FROM holds WHERE holds.id = items.hold AND NOT ended))
"""
_COUNT_WAITING = "SELECT count(*) FROM items INDEXED BY items_waiting WHERE state = 0 AND queue = ?"

# In: now. The oldest first.
_DUE = f"""
SELECT id, queue FROM items INDEXED BY items_late WHERE state = 1 AND due <= ?
ORDER BY due LIMIT {PROMOTED}
"""
_PROMOTE = f"UPDATE items SET state = 0 WHERE id IN (SELECT id FROM ({_DUE}))"
_NEXT_DUE = "SELECT min(due) FROM items INDEXED BY items_late WHERE state = 1"

_OPEN = f"NOT EXISTS (SELECT 1 FROM rows WHERE kind = '{CLOSED}' AND rows.id = queue)"
# In: queues (JSON). Out: whether a message there may be claimed; when the next one anywhere is due.
_PEEK = f"""
SELECT EXISTS (SELECT 1 FROM (SELECT value AS queue FROM json_each(?)) AS q WHERE EXISTS (
    SELECT 1 FROM items INDEXED BY items_waiting WHERE state = 0 AND items.queue = q.queue)
    AND {_OPEN}), ({_NEXT_DUE})
"""
# Out: messages as Next, as one JSON array, so that it is one step. JSON has no bytes: bodies are in
# hex. Those bigger than BIG are left out, to be fetched one by one.
_FOUND = f"""
SELECT json_group_array(json_array(id, queue, count, strikes, put_at, size, priority, turn, tenant,
    hex(body), size > {BIG})) FROM (
    SELECT id, queue, count, strikes, put_at, length(body) AS size, priority, turn, tenant,
        iif(length(body) > {BIG}, NULL, body) AS body FROM items
"""
# In: queue, least turn, how many.
_NEXT = f"""{_FOUND} INDEXED BY items_waiting
    WHERE state = 0 AND queue = ?1 AND turn >= ?2 AND {_OPEN.replace("= queue", "= ?1")}
    ORDER BY priority DESC, turn, id LIMIT ?3)
"""
# In: hold, number of a claim.
_LOST = f"""{_FOUND} INDEXED BY items_held WHERE state = 2 AND hold = ? AND claim >= ?
    ORDER BY queue, priority DESC, turn, id)
"""
_CLAIM = f"UPDATE items SET state = 2, hold = ?2, claim = ?3, count = count + ?4 WHERE id {_IDS}"
_RUNS = "UPDATE items SET runs = 1 WHERE id = ? AND state = 2 AND hold = ?"

# In: queue, the place behind which they begin, how many, since. In parts, or each page would look
# through all that is before it.
_WAIT = (
    "SELECT id, queue, body, put_at, -priority, turn FROM items INDEXED BY items_waiting "
    "WHERE state = 0 AND queue = ?1 AND put_at >= ?6 AND {} ORDER BY priority DESC, turn, id",
    "priority = -?2 AND turn = ?3 AND id > ?4",
    "priority = -?2 AND turn > ?3",
    "priority < -?2",
)
_LATE = (
    "SELECT id, queue, body, put_at, due, 0 FROM items INDEXED BY items_late "
    "WHERE state = 1 AND ?1 IS NULL AND put_at >= ?6 AND {} ORDER BY due, id",
    "due = ?2 AND id > ?4",
    "due > ?2",
)


def _page(sql: str, *parts: str) -> str:
    some = (f"SELECT * FROM ({sql.format(part)} LIMIT ?5)" for part in parts)
    return " UNION ALL ".join(some) + " LIMIT ?5"


_WAIT_PAGE, _LATE_PAGE = _page(*_WAIT), _page(*_LATE)
_NEWEST = "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'items'"
# From the indexes: bodies are in the pages of the table.
_COUNTS = " UNION ALL ".join(
    f"SELECT queue, state, count(*), min(id) FROM items INDEXED BY items_{index}"
    f" WHERE state = {state} GROUP BY queue"
    for state, index in enumerate(("waiting", "late", "held"))
)

_REGISTER = "INSERT INTO holds (id, body, pid, place, beat_at, lease) VALUES (?, ?, ?, ?, ?, ?)"
_HOLDS = "SELECT id, body, pid, place, beat_at, lease, ended FROM holds"
_ALIVE = "SELECT 1 FROM holds WHERE id = ? AND NOT ended"
# Out: whether no task is revoked; nothing if the hold was ended.
_CLAIMS = f"""
SELECT NOT EXISTS (SELECT 1 FROM rows WHERE kind = '{REVOKED}') FROM holds
WHERE id = ? AND NOT ended
"""
_END = "UPDATE holds SET ended = 1 WHERE id = ?"
_FORGET = """
DELETE FROM holds WHERE id = ?1 AND ended AND NOT EXISTS (
    SELECT 1 FROM items INDEXED BY items_held WHERE state = 2 AND hold = ?1)
"""
# In: ids that ran (JSON; NULL: those noted here), hold, how many. They go back to their places.
_RELEASE = f"""
UPDATE items SET state = 0, hold = NULL, claim = NULL, runs = 0,
    strikes = strikes + iif(?1 IS NULL, runs, id {_IDS})
WHERE id IN (SELECT id FROM items INDEXED BY items_held WHERE state = 2 AND hold = ?2 LIMIT ?3)
"""
_HELD = "SELECT queue FROM items INDEXED BY items_held WHERE state = 2 AND hold = ?"
_HOLDING = "SELECT hold, count(*) FROM items INDEXED BY items_held WHERE state = 2 GROUP BY hold"

_decode_next = msgspec.json.Decoder(list[Next]).decode
_decode_where = msgspec.json.Decoder(list[tuple[int, str, int, str]]).decode
_HoldRow = tuple[str, bytes, int, str, int, int, int]


class _Beat(NamedTuple):
    """A beat of a hold. `since`: the monotonic second at which a look saw it first."""

    at: int
    since: float


def count_waiting(connection: sqlite3.Connection, queue: str) -> int:
    """Return how many messages wait in the queue."""
    return int(connection.execute(_COUNT_WAITING, (printable(queue),)).fetchone()[0])


def where(connection: sqlite3.Connection, ids: Sequence[int]) -> dict[int, tuple[str, int, str]]:
    """Return the hold or '', the count and the queue of those that no ended hold has."""
    found = _decode_where(connection.execute(_WHERE, (as_json(ids),)).fetchone()[0])
    return {id: (hold, count, queue) for id, hold, count, queue in found}


class Moves(StepTarget):
    """Messages that the steps of one transaction take and push: read and written at once."""

    def __init__(
        self, driver: SQLiteDriver, connection: sqlite3.Connection, steps: Sequence[MessageStep]
    ) -> None:
        self.moment: int = driver.now()
        self._driver = driver
        self._connection = connection
        ids = [one.id for step in steps for one in (*step.takes, *step.held)]
        self._where = where(connection, ids) if ids else {}
        self._taken: list[int] = []
        self._new: list[tuple[object, ...]] = []
        self._told: set[str] = set()
        self._fair = False
        self._emptied: set[str] = set()

    def are_there(self, receipts: Sequence[ClaimReceipt]) -> bool:
        for one in receipts:
            there = self._where.get(one.id)
            if there is None or one.hold != there[0] or (one.hold and one.count != there[1]):
                return False
        return True

    def count_waiting(self, queue: str) -> int:
        Moves.write(self)
        return count_waiting(self._connection, queue)

    def move(self, step: MessageStep) -> None:
        if step.takes:
            gone = {receipt.id: self._where.pop(receipt.id) for receipt in step.takes}
            self._emptied.update(queue for hold, _, queue in gone.values() if not hold)
            for push in step.pushes:
                if push.id is not None:
                    self._push(push, push.id, gone.pop(push.id)[1])
            self._taken += gone
        for push in step.pushes:
            self._fair |= push.tenant is not None
            # Of late ones, too: a sleeper may have to wake earlier.
            self._told.add(queue_topic(push.queue))
            if push.id is None:
                late = push.due > self.moment
                cells = (*_cells(push, late), self.moment, _text(push.tenant), push.body)
                self._new.append(cells)
        self._told.update(step.tell)

    def _push(self, push: Push, id: int, count: int) -> None:
        """Let one go on that was taken."""
        self._where[id] = "", count, printable(push.queue)
        if push.place is Place.SAME:
            self._connection.execute(_BACK, (printable(push.queue), push.body, id))
        else:
            late = push.due > self.moment
            cells = (*_cells(push, late), _text(push.tenant), push.body, id)
            self._connection.execute(_PUSH, cells)

    def write(self) -> None:
        """Write what is not written yet."""
        connection = self._connection
        if self._taken:
            connection.execute(_TAKE, (as_json(self._taken),))
        if self._new:
            insert_rows(connection, _PUT, self._new)
        if self._fair:
            give_turns(connection)
        for queue in self._emptied:
            forget_turns(connection, queue)
        if self._told:
            queues = {topic for topic in self._told if topic.startswith(QUEUES)}
            if queues:
                self._driver.notify("q", queues)
            if tasks := self._told - queues:
                self._driver.notify("r", tasks)
        self._taken, self._new, self._fair = [], [], False
        self._emptied, self._told = set(), set()


def _cells(push: Push, late: bool) -> tuple[object, ...]:
    waited = push.place is Place.WAITED and push.tenant is None
    turn = push.due - 2**62 if waited else 0
    return printable(push.queue), LATE if late else WAITING, push.priority, turn, push.due


def _text(tenant: str | None) -> str | None:
    return None if tenant is None else printable(tenant)


def _kind(topic: str) -> Kind:
    return "q" if topic.startswith(QUEUES) else "r"


class SQLiteMessages(MessageQueues, HoldKeeper):
    """Messages in the driver's file."""

    def __init__(self, driver: SQLiteDriver) -> None:
        self.driver = driver
        self._beats: dict[str, _Beat] = {}  # by hold, as the last look saw them
        self._suspects = Suspects(driver.clock)
        self._next_sweep = 0.0

    def listen(self) -> SQLiteTopicListener:
        return SQLiteTopicListener(self.driver)

    def promote(self) -> int | None:
        with self.driver.reading() as connection:
            due: int | None = connection.execute(_NEXT_DUE).fetchone()[0]
        if due is None or due > self.driver.now():
            return due
        with self.driver.claiming() as connection:
            self.promote_due(connection)
            due = connection.execute(_NEXT_DUE).fetchone()[0]
        return due

    def promote_due(self, connection: sqlite3.Connection) -> None:
        """Move a step of what is due, inside a transaction."""
        now = self.driver.now()
        if self._tell_queues(connection, _DUE, now):
            connection.execute(_PROMOTE, (now,))
            give_turns(connection)

    def _tell_queues(self, connection: sqlite3.Connection, sql: str, *cells: object) -> bool:
        """Wake the listeners to the queues of these messages; return whether there are any."""
        found = connection.execute(f"SELECT DISTINCT queue FROM ({sql})", cells).fetchall()
        if found:
            self.driver.notify("q", [queue_topic(queue) for (queue,) in found])
        return bool(found)

    def messages(
        self,
        queue: str | None,
        *,
        since: int = 0,
        after: StoredMessage | None = None,
        items: int = PAGE,
        size: int = STEP_BYTES,
    ) -> list[StoredMessage]:
        self.promote()
        behind = after.place if after is not None else (FIRST + 1, FIRST, 0)
        assert isinstance(behind, tuple)
        wanted = None if queue is None else printable(queue)
        found: list[StoredMessage] = []
        with self.driver.reading() as connection:
            rows = connection.execute(
                _LATE_PAGE if queue is None else _WAIT_PAGE, (wanted, *behind, items, since)
            )
            for id, name, body, put_at, *order in rows:
                size -= len(body)
                if found and size < 0:
                    rows.close()
                    break
                at = (*order, id)
                found.append(StoredMessage(id=id, queue=name, body=body, put_at=put_at, place=at))
        return found

    def newest_id(self) -> int:
        with self.driver.reading() as connection:
            return int(connection.execute(_NEWEST).fetchone()[0])

    def count_messages(self) -> dict[str, QueueCount]:
        self.promote()
        counts: dict[str, QueueCount] = {}
        with self.driver.reading() as connection:
            for queue, state, number, oldest in connection.execute(_COUNTS).fetchall():
                count = counts.setdefault(queue, QueueCount())
                if state == WAITING:
                    count.waiting = number
                    put = connection.execute("SELECT put_at FROM items WHERE id = ?", (oldest,))
                    count.oldest_at = (put.fetchone() or (None,))[0]
                elif state == LATE:
                    count.late = number
                else:
                    count.held = number
        return counts

    def count_waiting(self, queue: str) -> int:
        self.promote()
        with self.driver.reading() as connection:
            return count_waiting(connection, queue)

    # Holds

    def open_hold(self, body: bytes, *, lease: float) -> SQLiteHold:
        return SQLiteHold(self, body, lease)

    def holds(self) -> list[HoldReport]:
        now = self.driver.now()
        with self.driver.reading() as connection:
            rows: list[_HoldRow] = connection.execute(_HOLDS).fetchall()
            holding = dict(connection.execute(_HOLDING).fetchall())
        return [
            HoldReport(
                id=id,
                body=body,
                beat_at=beat_at,
                holding=holding.get(id, 0),
                stalled=now - beat_at > lease,
            )
            for id, body, _, _, beat_at, lease, ended in rows
            if not ended and self._look(id) is not SessionState.DEAD
        ]

    def dead_holds(self) -> list[str]:
        with self.driver.reading() as connection:
            rows: list[_HoldRow] = connection.execute(_HOLDS).fetchall()
        monotonic = self.driver.clock.monotonic()
        if monotonic >= self._next_sweep:
            self._next_sweep = monotonic + SWEEP
            session_files.sweep(self.driver.sessions_folder, {row[0] for row in rows})
        silent = [(row[0], row[4], row[5] / 1e6) for row in rows if self._is_silent(row)]
        self._suspects.look(silent)
        self._beats = {
            row[0]: self._last_look(row) or _Beat(at=row[4], since=monotonic) for row in rows
        }
        return [row[0] for row in rows if self._is_dead(row)]

    def _is_dead(self, row: _HoldRow) -> bool:
        """Return whether its process has ended, or was silent for long, and is still."""
        if row[6] or self._look(row[0]) is SessionState.DEAD:
            return True
        return self._suspects.dead.get(row[0]) == row[4] and self._is_silent(row)

    def _is_silent(self, row: _HoldRow) -> bool:
        id, _, pid, where, beat_at, lease, _ = row
        silence = self.driver.now() - beat_at
        if before := self._last_look(row):  # the clock may have been set back behind the beat
            silence = max(silence, round((self.driver.clock.monotonic() - before.since) * 1e6))
        return silence > lease and (
            self._look(id) is SessionState.UNKNOWN or is_suspended(pid, where)
        )

    def _last_look(self, row: _HoldRow) -> _Beat | None:
        """Return what the last look saw of the hold, if it has not beaten since."""
        before = self._beats.get(row[0])
        return before if before and before.at == row[4] else None

    def _look(self, hold: str) -> SessionState:
        return session_files.look(self.driver.sessions_folder, hold)

    def condemn(self, hold: str, items: int) -> int | None:
        folder = self.driver.sessions_folder
        with self.driver.claiming() as connection:
            row = connection.execute(f"{_HOLDS} WHERE id = ?", (hold,)).fetchone()
            if row is None:
                return 0
            if not self._is_dead(row):
                return None
            ran = session_files.ran(folder, hold)
            struck = None if ran is None else as_json(sorted(id for id, _ in ran))
            back, is_over = self.give_back(connection, hold, items, struck)
        if is_over:
            self._beats.pop(hold, None)
            session_files.remove(folder, hold)
        return back

    def give_back(
        self, connection: sqlite3.Connection, hold: str, items: int, struck: str | None
    ) -> tuple[int, bool]:
        """End a hold; return how many messages went back, and whether these were the last."""
        connection.execute(_END, (hold,))
        self._tell_queues(connection, _HELD, hold)
        back = connection.execute(_RELEASE, (struck, hold, items)).rowcount
        return back, connection.execute(_FORGET, (hold,)).rowcount > 0


class SQLiteHold(FileHold):
    """A row, and a locked file."""

    def __init__(self, messages: SQLiteMessages, body: bytes, lease: float) -> None:
        self._driver = driver = messages.driver
        super().__init__(SessionFile(driver.sessions_folder))
        self._messages = messages
        self._lease = round(lease * 1e6)
        self._oldest_claim = 0  # that may still give anything
        self._beat_at = now = driver.now()
        try:
            with driver.claiming() as connection:
                row = (self.id, body, self._pid, place(), now, self._lease)
                connection.execute(_REGISTER, row)
        except BaseException:
            self._file.end()
            raise

    def claim(
        self,
        queues: Sequence[str],
        items: int,
        *,
        size: int = STEP_BYTES,
        number: int = 0,
        lost: int | None = None,
    ) -> Claims:
        driver = self._driver
        names = list(map(printable, queues))
        with driver.reading() as connection:
            waiting, due = connection.execute(_PEEK, (as_json(names),)).fetchone()
        if lost is None and not waiting and (due is None or due > driver.now()):
            return Claims([], due)
        found: list[Next] = []
        with driver.claiming() as connection:
            if due is not None and due <= driver.now():
                self._messages.promote_due(connection)
                due = connection.execute(_NEXT_DUE).fetchone()[0]
            claims = connection.execute(_CLAIMS, (self.id,)).fetchone()
            if claims is None or number < self._oldest_claim:
                return Claims([], due)
            if lost is not None:
                self._oldest_claim = number
                found = _decode_next(connection.execute(_LOST, (self.id, lost)).fetchone()[0])
                size -= sum(one.size for one in found)
            again = len(found)
            for name in names:
                some = _take(connection, name, items - len(found), number)
                for one in some:
                    size -= one.size
                    if size < 0 and found:
                        break
                    one.count += 1
                    found.append(one)
            if not found:
                return Claims([], due)
            new = found[again:]
            for count, some in enumerate((found[:again], new)):
                if some:
                    ids = as_json([one.id for one in some])
                    connection.execute(_CLAIM, (ids, self.id, number, count))
            serve_turns(connection, new)
            fence = next_fence(connection, driver.now(), len(found))
        return Claims(self._claimed(found, fence), due, bool(claims[0]))

    def _claimed(self, found: Sequence[Next], fence: Fence) -> list[Claimed]:
        """Return what was claimed, with fences from this one on."""
        claimed: list[Claimed] = []
        for number, one in enumerate(found):
            body = self._big_body(one.id) if one.is_big else bytes.fromhex(one.body)
            if body is not None:
                claimed.append(
                    Claimed(
                        receipt=ClaimReceipt(self.id, one.id, one.count),
                        queue=one.queue,
                        body=body,
                        fence=Fence(fence + number),
                        strikes=one.strikes,
                        put_at=one.put_at,
                    )
                )
        return claimed

    def _big_body(self, id: int) -> bytes | None:
        """Return the body; None if we were given up meanwhile, and another has finished it."""
        with self._driver.reading() as connection:
            row = connection.execute("SELECT body FROM items WHERE id = ?", (id,)).fetchone()
        return None if row is None else bytes(row[0])

    def has(self, receipts: Sequence[ClaimReceipt]) -> list[bool]:
        with self._driver.reading() as connection:
            there = where(connection, [one.id for one in receipts])
        ours = {
            ClaimReceipt(self.id, id, count)
            for id, (hold, count, _) in there.items()
            if hold == self.id
        }
        return [one in ours for one in receipts]

    def begin_run(self, receipt: ClaimReceipt) -> None:
        if self._file.notes_runs:
            self._file.begins((receipt.id, ALL))
        elif receipt.count > 1:
            try:
                with self._driver.claiming() as connection:
                    connection.execute(_RUNS, (receipt.id, self.id))
            except MachineryError:
                return  # if it kills this process now, the next death counts

    def write(self, body: bytes) -> None:
        with self._driver.claiming() as connection:
            connection.execute("UPDATE holds SET body = ? WHERE id = ?", (body, self.id))

    def beat(self) -> bool:
        now = self._driver.now()
        with self._driver.reading() as connection:
            if connection.execute(_ALIVE, (self.id,)).fetchone() is None:
                self.abandon()  # who gives its messages back reads the file first
                return False
        if abs(now - self._beat_at) >= self._lease / BEATS:  # also if the clock was set back
            with self._driver.claiming() as connection:
                connection.execute("UPDATE holds SET beat_at = ? WHERE id = ?", (now, self.id))
            self._beat_at = now
        return True

    def _give_back(self) -> None:
        with self._driver.claiming() as connection:
            self._messages.give_back(connection, self.id, -1, "[]")


def _take(connection: sqlite3.Connection, queue: str, limit: int, number: int) -> list[Next]:
    """Return the next messages of a queue. While others wait, half of them have not waited.

    More of those that have waited may come back than can ever be asked.
    """
    if limit <= 0:
        return []
    found = _next(connection, queue, FIRST, limit)
    waited = [one for one in found if one.turn < 0]
    if not waited or len(found) < limit:
        return found
    others = _next(connection, queue, 0, limit)
    waited = waited[: max((limit + number % 2) // 2, limit - len(others))]
    found = waited + others[: limit - len(waited)]
    return sorted(found, key=lambda one: (-one.priority, one.turn, one.id))


def _next(connection: sqlite3.Connection, queue: str, turn: int, limit: int) -> list[Next]:
    return _decode_next(connection.execute(_NEXT, (queue, turn, limit)).fetchone()[0])


class SQLiteTopicListener(TopicListener):
    """A notifier, whose pipe is there while something is watched."""

    def __init__(self, driver: SQLiteDriver) -> None:
        self._notifier = driver.notifier("r")
        self._watched: set[str] = set()
        self._changing = threading.Lock()
        self._waits = False

    def watch(self, topics: Iterable[str]) -> None:
        with self._changing:
            if topics := set(topics):
                if not self._watched:
                    self._notifier.kind = _kind(min(topics))
                    self._notifier.__enter__()
                    if self._waits:
                        self._notifier.wake()  # it sleeps without the pipe
                self._watched |= topics

    def unwatch(self, topics: Iterable[str]) -> None:
        with self._changing:
            if self._watched:
                self._watched.difference_update(topics)
                if not self._watched:
                    self._notifier.__exit__(None, None, None)

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        self._waits = True
        while (left := deadline - time.monotonic()) > 0 and not self._notifier.wait(left):
            heard = self._notifier.heard
            if ANY in heard or not heard.isdisjoint(self._watched):
                break
        self._waits = False

    def wake(self) -> None:
        self._notifier.wake()

    def close(self) -> None:
        self._notifier.close()
