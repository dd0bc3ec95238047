"""Messages in a SQLite file.

Tables: connections/sqlite/schema.py.

A consumer whose process has ended has lost its file lock: the next `tend` of any other finds it. A
live consumer is left alone however late it is, unless its process is stopped (SIGSTOP) and its
heartbeat is older than the lease.

Limits: one machine. Every message that arrives wakes all sleeping consumers, whatever their queues.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from machinery_py.bounds import TOKEN_LIFE, pieces
from machinery_py.brokers.base import (
    PURGE_STEP,
    Broker,
    BrokerFeatures,
    DeadLetter,
    Message,
    QueueStats,
    WorkerInfo,
)
from machinery_py.brokers.entries import RETRY_MARK, SET_BACK, ClockWatch, close_all
from machinery_py.brokers.liveness import is_suspended
from machinery_py.brokers.queue_limits import QueueLimit
from machinery_py.brokers.sqlite.consumer import PROMOTE, RELEASE, SQLiteConsumer, name_queues
from machinery_py.brokers.sqlite.topics import SQLiteSubscription, append_records
from machinery_py.brokers.sqlite.turns import forget_turns, give_turns
from machinery_py.clock import micros, moment_of
from machinery_py.connections import session_files
from machinery_py.connections.session_files import SessionState
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.connections.sqlite.rows import as_json, insert_rows
from machinery_py.texts import printable

LEASE = 10.0  # seconds without a beat until a consumer whose life cannot be seen is given up
LOOK = 0.5  # seconds between two looks for dead consumers
SWEEP = 60.0  # seconds between two looks for old tokens and for files of sessions that nobody knows
BATCH = 10_000  # tokens forgotten in one step

# In: the message. priority is stored as it is; the waiting index orders by it.
_PUT = "INSERT INTO messages (queue, uuid, name, priority, status, due_at, parks, sent_at, body)"
_PUT_FAIR = _PUT.replace(")", ", tenant)")

# Out: a row per queue: name, waiting, id of the oldest, running, delayed, dead, whether paused.
_STATS = """
SELECT name, coalesce(w.n, 0), w.oldest, coalesce(h.n, 0), coalesce(d.n, 0), coalesce(x.n, 0),
    name IN (SELECT queue FROM paused) FROM queues
LEFT JOIN (
    SELECT queue, count(*) AS n, min(id) AS oldest FROM messages WHERE status = 0 GROUP BY queue
) AS w ON w.queue = name
LEFT JOIN (SELECT queue, count(*) AS n FROM messages WHERE status = 2 GROUP BY queue) AS h
    ON h.queue = name
LEFT JOIN (SELECT queue, count(*) AS n FROM messages WHERE status = 1 GROUP BY queue) AS d
    ON d.queue = name
LEFT JOIN (SELECT queue, count(*) AS n FROM dead GROUP BY queue) AS x ON x.queue = name
ORDER BY name
"""

_WAITING = (
    "SELECT count(*) FROM messages INDEXED BY messages_waiting WHERE status = 0 AND queue = ?"
)
# In: queue. Out: whether anything is there, or any consumer, dead or alive, serves it.
_IN_USE = """
SELECT EXISTS (SELECT 1 FROM messages WHERE queue = ?1)
    OR EXISTS (SELECT 1 FROM dead WHERE queue = ?1)
    OR EXISTS (SELECT 1 FROM paused WHERE queue = ?1)
    OR EXISTS (SELECT 1 FROM sessions, json_each(sessions.queues) WHERE value = ?1)
"""
_FORGET = "DELETE FROM tokens WHERE token IN (SELECT token FROM tokens WHERE used_at < ? LIMIT ?)"
_NEXT_DUE = "SELECT min(due_at) FROM messages INDEXED BY messages_delayed WHERE status = 1"
_MESSAGE = "uuid, name, queue, body, due_at, priority, parks, tenant"
_LETTER = ("id", "uuid", "name", "queue", "body", "reason", "error", "strikes", "died_at")
_DEAD = f"SELECT {', '.join(_LETTER)} FROM dead"
_SESSIONS = "SELECT id, key, pid, place, beat_at, worker, host, queues, started_at FROM sessions"

_names = msgspec.json.Decoder(tuple[str, ...]).decode


class SQLiteBroker(Broker):
    """Queues in the driver's file. The driver belongs to whoever made it."""

    features = BrokerFeatures(
        name="sqlite",
        embedded=True,
        topics=True,
        keeps_topics=True,
        exact_limits=True,
        fair=True,
        forgets_queues=True,
    )

    def is_entered(self) -> bool:
        return self.driver.is_entered()

    def __init__(self, driver: SQLiteDriver, *, lease: float = LEASE) -> None:
        self.driver = driver
        self.lease = lease
        self._suspects: set[int] = set()
        self._consumers: weakref.WeakSet[SQLiteConsumer] = weakref.WeakSet()
        self._next_sweep = 0.0
        self._watch = ClockWatch(driver.clock)

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        driver = self.driver
        now = driver.now()
        rows = [_row(message, now) for message in messages]
        with driver.transaction() as connection:
            if (
                token
                and connection.execute(
                    "INSERT OR IGNORE INTO tokens VALUES (?, ?)", (token, now)
                ).rowcount
                == 0
            ):
                return False
            name_queues(connection, {message.queue for message in messages})
            if rows:
                tenants = [message.tenant for message in messages]
                if tenants.count(None) == len(tenants):
                    insert_rows(connection, _PUT, rows)
                else:
                    pairs = zip(rows, tenants, strict=True)
                    insert_rows(connection, _PUT_FAIR, [(*row, _text(one)) for row, one in pairs])
                    give_turns(connection)
                # Also for the delayed ones: a sleeper may have to wake earlier than it had planned.
                driver.notify("q")
            return True

    def put_within(
        self, messages: Sequence[Message], limits: Sequence[QueueLimit], *, token: str
    ) -> bool:
        with self.driver.transaction():
            return super().put_within(messages, limits, token=token)

    def was_put(self, token: str) -> bool:
        with self.driver.reading() as connection:
            known = connection.execute("SELECT 1 FROM tokens WHERE token = ?", (token,))
            return known.fetchone() is not None

    def waiting(self, queue: str) -> int:
        with self.driver.reading() as connection:
            return int(connection.execute(_WAITING, (queue,)).fetchone()[0])

    def consume(self, queues: Sequence[str], *, worker: str) -> SQLiteConsumer:
        consumer = SQLiteConsumer(self.driver, tuple(queues), worker=worker, lease=self.lease)
        self._consumers.add(consumer)
        return consumer

    def tend(self) -> float:
        self.driver.check()
        self.reap()
        if self._watch.was_set_back():
            self._count_again()
        due = self._promote_due()
        monotonic = self.driver.clock.monotonic()
        if monotonic >= self._next_sweep:
            self._next_sweep = monotonic + SWEEP
            if self._sweep():
                self._next_sweep = monotonic
        with self.driver.reading() as connection:
            others = any(
                not session_files.is_own(key)
                for (key,) in connection.execute("SELECT key FROM sessions")
            )
        interval = LOOK if others else self.lease / 4
        if due is None:
            return interval
        return min(interval, max(0.0, (due - self.driver.now()) / 1e6))

    def _promote_due(self) -> int | None:
        """Move delayed messages that are due to their queues; return when the next one is due."""
        with self.driver.reading() as connection:
            due: int | None = connection.execute(_NEXT_DUE).fetchone()[0]
        now = self.driver.now()
        if due is None or due > now:
            return due
        with self.driver.claiming() as connection:
            connection.execute(PROMOTE, (now,))
            give_turns(connection)
            self.driver.notify("q")
            due = connection.execute(_NEXT_DUE).fetchone()[0]
        return due

    def _count_again(self) -> None:
        """Let delays of retries that began in the future, by a clock that was ahead, begin now."""
        now = self.driver.now()
        begun = "status = 1 AND sent_at > ? AND instr(body, ?)"
        ahead = now + int(SET_BACK * 1e6)
        with self.driver.reading() as connection:
            found = connection.execute(
                f"SELECT 1 FROM messages INDEXED BY messages_delayed WHERE {begun} LIMIT 1",
                (ahead, RETRY_MARK),
            ).fetchone()
        if found:
            with self.driver.claiming() as connection:
                connection.execute(
                    f"UPDATE messages SET due_at = due_at - sent_at + ?, sent_at = ? WHERE {begun}",
                    (now, now, ahead, RETRY_MARK),
                )

    def reap(self) -> int:
        """Give back what dead consumers held; return how many were dead. `tend` does it too."""
        with self.driver.reading() as connection:
            rows = connection.execute(_SESSIONS).fetchall()
        dead = [
            (number, key)
            for number, key, pid, place, beat_at, *_ in rows
            if self._is_dead(number, key, pid, place, beat_at)
        ]
        if not dead:
            return 0
        reaped = 0
        folder = self.driver.sessions_folder
        with self.driver.claiming() as connection:
            for number, key in dead:
                # Only the one that deletes the row gives back: another reaper, or the consumer's
                # own close, may have been faster.
                if connection.execute("DELETE FROM sessions WHERE id = ?", (number,)).rowcount:
                    ran = session_files.ran(folder, key)
                    ids = None if ran is None else as_json(sorted(id for id, _ in ran))
                    connection.execute(RELEASE, (ids, number))
                    reaped += 1
            self.driver.notify("q")
        for number, key in dead:
            self._suspects.discard(number)
            session_files.remove(folder, key)
        return reaped

    def _is_dead(self, number: int, key: str, pid: int, place: str, beat_at: int) -> bool:
        life = session_files.look(self.driver.sessions_folder, key)
        if life is SessionState.DEAD:
            return True
        if self.driver.now() - beat_at <= self.lease * 1e6 or not (
            life is SessionState.UNKNOWN or is_suspended(pid, place)
        ):
            self._suspects.discard(number)
            return False
        if number in self._suspects:
            return True
        self._suspects.add(number)
        return False

    def _sweep(self) -> bool:
        """Delete old tokens and files; return True if there are more tokens."""
        before = self.driver.now() - TOKEN_LIFE * 1_000_000
        with self.driver.reading() as connection:
            old = connection.execute(
                "SELECT 1 FROM tokens WHERE used_at < ? LIMIT 1", (before,)
            ).fetchone()
            keys = {key for (key,) in connection.execute("SELECT key FROM sessions").fetchall()}
        session_files.sweep(self.driver.sessions_folder, keys)
        if old is None:
            return False
        with self.driver.claiming() as connection:
            return connection.execute(_FORGET, (before, BATCH)).rowcount == BATCH

    def pending(self, queue: str, limit: int) -> list[Message]:
        self._promote_due()
        return self._messages(
            "messages_waiting",
            "status = 0 AND queue = ? ORDER BY priority DESC, turn, id LIMIT ?",
            (queue, limit),
        )

    def delayed(self, limit: int) -> list[Message]:
        return self._messages(
            "messages_delayed", "status = 1 ORDER BY due_at, id LIMIT ?", (limit,)
        )

    def _messages(self, index: str, where: str, parameters: Sequence[object]) -> list[Message]:
        query = f"SELECT {_MESSAGE} FROM messages INDEXED BY {index} WHERE {where}"
        with self.driver.reading() as connection:
            return [_message(row) for row in connection.execute(query, parameters)]

    def stats(self) -> list[QueueStats]:
        self._promote_due()
        with self.driver.reading() as connection:
            rows = connection.execute(_STATS).fetchall()
            ids = as_json([row[2] for row in rows if row[2] is not None])
            sent_at = dict(
                connection.execute(
                    "SELECT id, sent_at FROM messages WHERE id IN (SELECT value FROM json_each(?))",
                    (ids,),
                ).fetchall()
            )
        return [
            QueueStats(
                queue=queue,
                waiting=waiting,
                running=running,
                delayed=delayed,
                dead=dead,
                oldest_at=moment_of(sent_at[oldest]) if oldest in sent_at else None,
                paused=bool(paused),
            )
            for queue, waiting, oldest, running, delayed, dead, paused in rows
        ]

    def workers(self) -> list[WorkerInfo]:
        now = self.driver.now()
        with self.driver.reading() as connection:
            rows = connection.execute(_SESSIONS).fetchall()
            holding = dict(
                connection.execute(
                    "SELECT session, count(*) FROM messages INDEXED BY messages_held"
                    " WHERE status = 2 GROUP BY session"
                ).fetchall()
            )
        return [
            WorkerInfo(
                session=key,
                name=worker,
                host=host,
                pid=pid,
                queues=_names(queues),
                started_at=moment_of(started_at),
                beat_at=moment_of(beat_at),
                holding=holding.get(number, 0),
                stalled=now - beat_at > self.lease * 1e6,
            )
            for number, key, pid, _, beat_at, worker, host, queues, started_at in rows
            if session_files.look(self.driver.sessions_folder, key) is not SessionState.DEAD
        ]

    def purge(self, queue: str) -> int:
        with self.driver.transaction() as connection:
            forget_turns(connection, queue)
            return sum(
                connection.execute(
                    f"DELETE FROM messages WHERE status = {status} AND queue = ?", (queue,)
                ).rowcount
                for status in (0, 1)
            )

    def purge_each(
        self, queue: str, before: Callable[[Sequence[Message]], object]
    ) -> Iterator[Sequence[Message]]:
        with self.driver.reading() as connection:
            rows = connection.execute(
                "SELECT id, length(body) FROM messages WHERE status IN (0, 1) AND queue = ?"
                " ORDER BY id",
                (queue,),
            ).fetchall()
        where = "WHERE status IN (0, 1) AND id IN (SELECT value FROM json_each(?))"
        for step in pieces(rows, lambda row: int(row[1]), most=PURGE_STEP):
            ids = [id for id, _ in step]
            with self.driver.reading() as connection:
                found = connection.execute(
                    f"SELECT {_MESSAGE} FROM messages {where}", (as_json(ids),)
                ).fetchall()
            before([_message(row) for row in found])
            with self.driver.transaction() as connection:
                found = connection.execute(
                    f"DELETE FROM messages {where} RETURNING {_MESSAGE}", (as_json(ids),)
                ).fetchall()
            yield [_message(row) for row in found]
        with self.driver.transaction() as connection:
            if not connection.execute(_WAITING, (queue,)).fetchone()[0]:
                forget_turns(connection, queue)

    def forget_queue(self, queue: str) -> bool:
        with self.driver.transaction() as connection:
            if connection.execute(_IN_USE, (queue,)).fetchone()[0]:
                return False
            connection.execute("DELETE FROM turns WHERE queue = ?", (queue,))
            connection.execute("DELETE FROM queues WHERE name = ?", (queue,))
            return True

    def pause(self, queue: str) -> None:
        with self.driver.transaction() as connection:
            name_queues(connection, {queue})
            connection.execute("INSERT OR IGNORE INTO paused VALUES (?)", (queue,))

    def resume(self, queue: str) -> None:
        with self.driver.transaction() as connection:
            connection.execute("DELETE FROM paused WHERE queue = ?", (queue,))
            self.driver.notify("q")

    def dead_letters(self, *, limit: int, queue: str = "") -> list[DeadLetter]:
        where, parameters = ("WHERE queue = ?", (queue, limit)) if queue else ("", (limit,))
        with self.driver.reading() as connection:
            rows = connection.execute(
                f"{_DEAD} {where} ORDER BY id DESC LIMIT ?", parameters
            ).fetchall()
        return [_letter(row) for row in rows]

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        row = (
            printable(message.uuid),
            printable(message.name),
            queue,
            message.body,
            reason,
            printable(error),
            self.driver.now(),
        )
        with self.driver.transaction() as connection:
            name_queues(connection, {queue})
            connection.execute(
                "INSERT INTO dead (uuid, name, queue, body, reason, error, strikes, died_at)"
                " VALUES (?, ?, ?, ?, ?, ?, 0, ?)",
                row,
            )

    def take_dead(self, ids: Sequence[str]) -> list[DeadLetter]:
        wanted = as_json([int(id) for id in ids if id.isascii() and id.isdigit() and len(id) < 19])
        with self.driver.transaction() as connection:
            rows = connection.execute(
                f"{_DEAD} WHERE id IN (SELECT value FROM json_each(?))", (wanted,)
            ).fetchall()
            connection.execute(
                "DELETE FROM dead WHERE id IN (SELECT value FROM json_each(?))", (wanted,)
            )
        letters = {str(row[0]): _letter(row) for row in rows}
        return [letters[id] for id in dict.fromkeys(ids) if id in letters]

    def append_records(self, topic: str, records: Sequence[bytes], ttl: float) -> None:
        append_records(self.driver, topic, records, ttl)

    def subscribe(self, topic: str, *, since: float = 0.0) -> SQLiteSubscription:
        return SQLiteSubscription(self.driver, topic, since)

    def close(self) -> None:
        """Close the consumers that are still open."""
        close_all(self._consumers)


def _row(message: Message, now: int) -> tuple[object, ...]:
    due_at = None if message.eta is None else micros(message.eta)
    return (
        message.queue,
        message.uuid,
        message.name,
        message.priority,
        int(due_at is not None and due_at > now),
        due_at,
        message.parks,
        now,
        message.body,
    )


def _message(row: Sequence[Any]) -> Message:
    uuid, name, queue, body, due_at, priority, parks, tenant = row
    return Message(
        uuid=uuid,
        name=name,
        queue=queue,
        body=body,
        eta=None if due_at is None else moment_of(due_at),
        priority=priority,
        parks=parks,
        tenant=tenant,
    )


def _text(tenant: str | None) -> str | None:
    return None if tenant is None else printable(tenant)


def _letter(row: Sequence[Any]) -> DeadLetter:
    fields = dict(zip(_LETTER, row, strict=True))
    return DeadLetter(**fields | {"id": str(fields["id"]), "died_at": moment_of(fields["died_at"])})
