"""A consumer of a SQLite file: it claims, disposes, beats and sleeps.

The tables are listed in connections/sqlite/schema.py.

Claims and beats are committed without fsync (`SQLiteDriver.claiming`), disposals with it.

Limits: each message wakes all sleeping consumers of the file; those that find nothing sleep again.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence

import msgspec

from machinery_py.bounds import ClaimLimit
from machinery_py.brokers.base import WAITING, Consumer, Delivery, Disposal, Fate
from machinery_py.brokers.liveness import place
from machinery_py.brokers.sqlite.turns import give_turns, serve_turns
from machinery_py.clock import micros, moment_of
from machinery_py.connections.session_files import ALL, SessionFile
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.connections.sqlite.fences import next_fence
from machinery_py.connections.sqlite.rows import as_json
from machinery_py.errors import MachineryError
from machinery_py.fences import Fence
from machinery_py.texts import printable

BIG = 65536  # bytes
BEATS = 8  # a beat is written down this often in a lease

#: Remembers the names of queues, inside a transaction.

# In: now. Out: how many. Due messages become waiting, the oldest first, at most 10,000 at once: a
# million would keep all others from writing.
PROMOTE = """
UPDATE messages SET status = 0 WHERE id IN (
    SELECT id FROM messages INDEXED BY messages_delayed WHERE status = 1 AND due_at <= ?
    ORDER BY due_at LIMIT 10000)
"""

# In: key, worker, host, pid, place, queues (JSON), started_at, beat_at.
_REGISTER = """
INSERT INTO sessions (key, worker, host, pid, place, queues, started_at, beat_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""

_SERVE = "UPDATE sessions SET queues = ? WHERE id = ?"

# In: session, claim, queue, limit. Out: how many. A session that was given up claims nothing; a
# paused queue gives nothing.
_CLAIM = """
UPDATE messages SET status = 2, session = ?1, claim = ?2, fence = fence + 1 WHERE id IN (
    SELECT id FROM messages INDEXED BY messages_waiting WHERE status = 0 AND queue = ?3
    ORDER BY priority DESC, turn, id LIMIT ?4)
AND EXISTS (SELECT 1 FROM sessions WHERE id = ?1)
AND NOT EXISTS (SELECT 1 FROM paused WHERE paused.queue = ?3)
"""
# The same, of those that wait for no turn.
_CLAIM_OTHERS = _CLAIM.replace("queue = ?3\n", "queue = ?3 AND turn >= 0\n")

# In: queue, limit - 1. Out: turn of the last message that a claim would take; no row: all are few.
_LAST_TURN = """
SELECT turn FROM messages INDEXED BY messages_waiting WHERE status = 0 AND queue = ?
ORDER BY priority DESC, turn, id LIMIT 1 OFFSET ?
"""

# In: size, session, claim. Out: what was claimed, as one JSON array, so that it is one step. JSON
# has no bytes: bodies are in hex. Those bigger than size are null, to be fetched one by one.
_CLAIMED = """
SELECT json_group_array(json_array(
    id, queue, fence, strikes, parks, priority, sent_at, iif(length(body) <= ?, hex(body), NULL),
    turn))
FROM messages INDEXED BY messages_held WHERE status = 2 AND session = ? AND claim = ?
"""

# In: queues (JSON). Out: whether a message there may be claimed; when the next one anywhere is due.
_PEEK = """
SELECT EXISTS (SELECT 1 FROM json_each(?1) AS q WHERE EXISTS (
           SELECT 1 FROM messages INDEXED BY messages_waiting WHERE status = 0 AND queue = q.value)
           AND NOT EXISTS (SELECT 1 FROM paused WHERE paused.queue = q.value)),
       (SELECT min(due_at) FROM messages INDEXED BY messages_delayed WHERE status = 1)
"""

# In: ids (JSON), session. Out: [[id, count], …] of those that the session holds. JSON, so that it
# is one step.
_OURS = """
SELECT json_group_array(json_array(id, fence)) FROM messages NOT INDEXED
WHERE id IN (SELECT value FROM json_each(?)) AND status = 2 AND session = ?
"""

_DELETE = "DELETE FROM messages WHERE id IN (SELECT value FROM json_each(?))"
_BACK = (
    "UPDATE messages SET status = 0, session = NULL, claim = NULL"
    " WHERE id IN (SELECT value FROM json_each(?))"
)

# In: eta, 1 if that is to come, 1 if it counts as parked, id. One that does not has waited: it goes
# to the head, the first due first.
_LATER = f"""
UPDATE messages SET due_at = ?1, status = ?2, session = NULL, claim = NULL, parks = parks + ?3,
    turn = iif(?3 = 0 AND tenant IS NULL, coalesce(?1, 0) - {2**62}, 0) WHERE id = ?4
"""

# In: uuid, name, reason, error, now, id. What is empty is taken from the message.
_BURY = """
INSERT INTO dead (uuid, name, queue, body, reason, error, strikes, died_at)
SELECT coalesce(nullif(?, ''), uuid), coalesce(nullif(?, ''), name), queue, body, ?, ?, strikes, ?
FROM messages WHERE id = ?
"""

# In: id, session. Its run is noted here where there is no file to note it in: as claim -1.
_BEGIN = "UPDATE messages SET claim = -1 WHERE id = ? AND status = 2 AND session = ?"

# In: ids that get a strike (JSON; NULL: those noted here), session. What the session held goes back
# to its place.
RELEASE = """
UPDATE messages INDEXED BY messages_held SET status = 0, session = NULL, claim = NULL,
    strikes = strikes + iif(?1 IS NULL, claim IS -1, id IN (SELECT value FROM json_each(?1)))
WHERE status = 2 AND session = ?2
"""

_Claimed = tuple[int, str, int, int, int, int, int, str | None, int]
_claimed = msgspec.json.Decoder(list[_Claimed]).decode
_ours = msgspec.json.Decoder(list[tuple[int, int]]).decode


def name_queues(connection: sqlite3.Connection, names: set[str]) -> None:
    """Have the queues listed. Called inside each transaction that uses some.

    Nobody remembers that it was done: another process may forget a queue (`forget_queue`).
    """
    for name in names:
        connection.execute("INSERT OR IGNORE INTO queues VALUES (?)", (name,))


class SQLiteConsumer(Consumer):
    """A session: a row, a locked file, and a notifier."""

    session = ""

    def __init__(
        self,
        driver: SQLiteDriver,
        queues: tuple[str, ...],
        *,
        worker: str,
        lease: float,
    ) -> None:
        self._driver = driver
        self._queues = queues
        self._json = as_json(queues)
        self._worker = printable(worker)
        self._lease = lease
        self._notifier = driver.notifier("q")
        self._claims = itertools.count(1)
        self._unread: tuple[int, int, int] | None = None  # session, claim, limit
        self._limit = ClaimLimit()
        self._closed = False
        self._pid = os.getpid()
        self._starting = threading.Lock()
        self._start_session()

    def _start_session(self) -> None:
        driver = self._driver
        file = SessionFile(driver.sessions_folder)
        now = driver.now()
        row = (
            file.key,
            self._worker,
            socket.gethostname(),
            os.getpid(),
            place(),
            self._json,
            now,
            now,
        )
        try:
            with driver.claiming() as connection:
                name_queues(connection, set(self._queues))
                number = connection.execute(_REGISTER, row).lastrowid or 0
        except BaseException:
            file.end()
            raise
        self.session, self._number, self._beat_at = file.key, number, now
        self._file = file

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        if self._closed:
            return []
        served = self._queues
        order = [queue for queue in order if queue in served] or served
        found, _ = self._look()
        deliveries = self._claim(limit, order) if found else []
        if deliveries or timeout <= 0 or self._notifier.woken():
            return deliveries
        deadline = time.monotonic() + timeout
        with self._notifier:
            while not self._closed:
                # Once more now that the pipe exists: what came before has not notified it.
                found, due_in = self._look()
                if found and (deliveries := self._claim(limit, order)):
                    return deliveries
                left = deadline - time.monotonic()
                if left <= 0 or self._notifier.wait(min(left, due_in)):
                    break
        return []

    def _look(self) -> tuple[bool, float]:
        """Return whether a message may be claimed, and the seconds until the next one is due."""
        with self._driver.reading() as connection:
            waiting, due_at = connection.execute(_PEEK, (self._json,)).fetchone()
        due_in = math.inf if due_at is None else (due_at - self._driver.now()) / 1e6
        return bool(waiting) or due_in <= 0 or self._unread is not None, due_in

    def _claim(self, limit: int, order: Sequence[str]) -> list[Delivery]:
        if self._unread is not None:  # they may be ours, and then reading them failed
            number, claim, most = self._unread
            with self._driver.claiming() as connection:
                fence = next_fence(connection, self._driver.now(), most)
            if lost := self._read_claim(number, claim, order, fence):
                return lost
        number, claim = self._number, next(self._claims)
        left = limit = self._limit.of(limit)
        self._unread = number, claim, limit
        fence = Fence(0)
        with self._driver.claiming() as connection:
            if connection.execute(PROMOTE, (self._driver.now(),)).rowcount:
                give_turns(connection)
                self._driver.notify("q")  # some may be for others
            for queue in order:
                if left > 0:
                    left -= _claim_from(connection, (number, claim, queue), left)
            if left < limit:
                fence = next_fence(connection, self._driver.now(), limit - left)
                serve_turns(connection, number, claim)
        if left == limit:
            self._unread = None
            return []
        # After the commit: others may write while we fetch, and these are ours.
        return self._read_claim(number, claim, order, fence)

    def _read_claim(
        self, number: int, claim: int, order: Sequence[str], fence: Fence
    ) -> list[Delivery]:
        """Return what that claim has taken; its fences are this one and those that follow it."""
        with self._driver.reading() as connection:
            rows = _claimed(connection.execute(_CLAIMED, (BIG, number, claim)).fetchone()[0])
            bodies = [
                _big_body(connection, row[0]) if row[7] is None else bytes.fromhex(row[7])
                for row in rows
            ]
        place = {queue: index for index, queue in enumerate(order)}
        pairs = [(row, body) for row, body in zip(rows, bodies, strict=True) if body is not None]
        # By queue, priority, turn and id.
        pairs.sort(key=lambda pair: (place.get(pair[0][1], 0), -pair[0][5], pair[0][8], pair[0][0]))
        deliveries = [
            Delivery(
                body=body,
                queue=queue,
                receipt=f"{id}.{count}.{number}",
                count=count,
                fence=Fence(fence + index),
                strikes=strikes,
                parks=parks,
                priority=priority,
                sent_at=moment_of(sent_at),
            )
            for index, ((id, queue, count, strikes, parks, priority, sent_at, _, _), body) in (
                enumerate(pairs)
            )
        ]
        self._unread = None
        self._limit.took(len(one.body) for one in deliveries)
        return deliveries

    def serve(self, queues: Sequence[str]) -> None:
        queues = tuple(queues)
        with self._starting:
            with self._driver.claiming() as connection:
                name_queues(connection, set(queues))
                connection.execute(_SERVE, (as_json(queues), self._number))
            self._queues, self._json = queues, as_json(queues)
        self.wake()

    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        with self._driver.transaction() as connection:
            ours = self._ours(connection, [disposal.delivery for disposal in disposals])
            verdicts: list[bool] = []
            by_fate: dict[Fate, list[tuple[int, Disposal]]] = {}
            for disposal in disposals:
                id = _id(disposal.delivery)
                mine = ours.get(id) == disposal.delivery.count
                verdicts.append(mine)
                if mine:
                    del ours[id]  # a second disposal of it in this batch finds nothing
                    by_fate.setdefault(disposal.fate, []).append((id, disposal))
            for fate, ended in by_fate.items():
                self._end(connection, fate, ended)
            return verdicts

    def _end(
        self, connection: sqlite3.Connection, fate: Fate, ended: list[tuple[int, Disposal]]
    ) -> None:
        ids = as_json([id for id, _ in ended])
        now = self._driver.now()
        match fate:
            case Fate.DONE:
                connection.execute(_DELETE, (ids,))
            case Fate.BACK:
                connection.execute(_BACK, (ids,))
                self._driver.notify("q")
            case Fate.LATER:
                due = [
                    (None if one.eta is None else micros(one.eta), int(one.reason != WAITING), id)
                    for id, one in ended
                ]
                connection.executemany(
                    _LATER,
                    [(at, int(at is not None and at > now), parks, id) for at, parks, id in due],
                )
                give_turns(connection)
                self._driver.notify("q")
            case Fate.DEAD:
                for id, one in ended:
                    texts = map(printable, (one.uuid, one.name, one.reason, one.error))
                    connection.execute(_BURY, (*texts, now, id))
                connection.execute(_DELETE, (ids,))

    def _ours(
        self, connection: sqlite3.Connection, deliveries: Iterable[Delivery]
    ) -> dict[int, int]:
        """Return id → count of those that this session holds; receipts name their session."""
        session = self._number  # once: a beat in another thread may begin the next one
        ids = [_id(one) for one in deliveries if one.receipt.endswith(f".{session}")]
        if not ids:
            return {}
        return dict(_ours(connection.execute(_OURS, (as_json(ids), session)).fetchone()[0]))

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        with self._driver.reading() as connection:
            ours = self._ours(connection, deliveries)
        return [ours.get(_id(delivery)) == delivery.count for delivery in deliveries]

    def run_begins(self, delivery: Delivery) -> None:
        if self._file.notes_runs:
            self._file.begins((_id(delivery), ALL))
        elif delivery.redelivered:
            try:
                with self._driver.claiming() as connection:
                    connection.execute(_BEGIN, (_id(delivery), self._number))
            except MachineryError:
                return  # if it kills this worker now, the next death counts

    def run_ends(self, delivery: Delivery) -> None:
        self._file.ends((_id(delivery), ALL))

    def beat(self) -> bool:
        if self._closed:
            return True
        with self._starting:
            now = self._driver.now()
            with self._driver.reading() as connection:
                row = connection.execute(
                    "SELECT 1 FROM sessions WHERE id = ?", (self._number,)
                ).fetchone()
            alive = row is not None
            if alive and now - self._beat_at < self._lease * 1e6 / BEATS:
                return True
            if alive:
                update = "UPDATE sessions SET beat_at = ? WHERE id = ?"
                with self._driver.claiming() as connection:
                    alive = connection.execute(update, (now, self._number)).rowcount > 0
                self._beat_at = now
            if not alive:
                self._file.end()
                self._start_session()
            return alive

    def wake(self) -> None:
        self._notifier.wake()

    def close(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._notifier.wake()
        try:
            with self._driver.claiming() as connection:
                if connection.execute(
                    "DELETE FROM sessions WHERE id = ?", (self._number,)
                ).rowcount:
                    connection.execute(RELEASE, ("[]", self._number))
                    self._driver.notify("q")
        except BaseException:
            self.abandon()  # then others find us dead
            raise
        self._file.end()

    def abandon(self) -> None:
        """Release only the lock that proves this consumer alive, as a dying process does."""
        self._file.abandon()

    def __del__(self) -> None:
        # Nobody can dispose of its messages any more: others must find it dead, and not alive for
        # as long as this process.
        if self.session:
            self.abandon()


def _claim_from(connection: sqlite3.Connection, which: tuple[int, int, str], limit: int) -> int:
    """Claim at most so many messages of a queue, and return how many.

    While others wait, half of them are not such that have waited for their turn: more of these may
    come back than can ever be asked.
    """
    _, claim, queue = which
    others = 0
    last = connection.execute(_LAST_TURN, (queue, limit - 1)).fetchone()
    if last is not None and last[0] < 0:
        share = limit - (limit + claim % 2) // 2
        others = connection.execute(_CLAIM_OTHERS, (*which, share)).rowcount
    return others + connection.execute(_CLAIM, (*which, limit - others)).rowcount


def _big_body(connection: sqlite3.Connection, id: int) -> bytes | None:
    """Return the body; None if we were given up meanwhile and another consumer has finished it."""
    row = connection.execute("SELECT body FROM messages WHERE id = ?", (id,)).fetchone()
    return bytes(row[0]) if row else None


def _id(delivery: Delivery) -> int:
    return int(delivery.receipt.partition(".")[0])
