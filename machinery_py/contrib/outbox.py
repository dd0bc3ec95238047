"""Outbox in the user's database: calls are kept in its transactions, and published by a relay.

    user's transaction   the row is inserted: messages, states, groups; all UUIDs are in it
    relay, in turn       1  lock the oldest rows, for LOCK at most
                         2  store: a claim under the row's key, and in the same step the messages
                         3  delete the rows, and commit
                         4  a minute later, release the claims

    crash after          what there is               who goes on
    1                    rows that nobody locks      any relay
    2                    the same, and the claims    any relay: the store knows the claim, and does
                                                     nothing; steps 3 and 4
    3                    claims                      they expire

The claims are those of unique tasks. A relay whose lock is over begins no further row. It may be in
step 2 of one, so a claim outlives its row for a minute, also if its relay ends.

Between two stores, step 2 has parts of its own (stores/outbox.py). A relay that finds a call stored
and not sent leaves it, and those behind it, to the one that may be sending it, for LEFT seconds.

A row that the store refuses for good is set aside with the reason; those behind it go on. Any other
trouble passes: the relay waits, and keeps the order. Of several relays one is at work at a time.

Limits: with a result backend that keeps no claims (null, RabbitMQ, memcached) the broker knows a
row for ten minutes, RabbitMQ not at all: such a row may be published twice after a crash.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from machinery_py.backends.base import OutboxBackend, Rider, sending_key
from machinery_py.config.urls import StoreUrl, scheme_of
from machinery_py.connections.wakeup import Wakeup
from machinery_py.contrib.kept_calls import Kept, decode_kept
from machinery_py.errors import ConfigError, DuplicateTask, MachineryError
from machinery_py.events import TaskSent
from machinery_py.registry.hooks import added_part
from machinery_py.registry.unique_keys import KeyClaim, encode_claim
from machinery_py.stores.base import AWAY, Submission
from machinery_py.tasks.backoff import full_jitter
from machinery_py.texts import MAX_ERROR, cut, get_logger
from machinery_py.threads import LoopThread
from machinery_py.unique import UniqueSending
from machinery_py.wire.signatures import decode_signature

if TYPE_CHECKING:
    from machinery_py.server import Server

logger = get_logger(__name__)

FIRST_BATCH, BATCH = 8, 100  # rows that are locked at a time
HOLD = 0.5  # seconds after which no further row of a batch is begun
LOCK = 15.0  # seconds that rows are locked for a relay that is silent
LEFT = LOCK  # seconds after which a call that another relay has stored, and not sent, is sent
POLL = 1.0  # seconds between two looks at the table
FIRST_PAUSE, LAST_PAUSE = 0.05, 5.0  # seconds after trouble
WARN_EVERY = 60.0  # seconds between two warnings of the same trouble
CLAIM_LIFE = 7 * 86400.0  # seconds that a row which was published may stay in the table
CLAIM_REST = 60.0  # seconds that a claim outlives its row; more than LOCK and a store's timeouts
JOIN = 10.0  # seconds that a relay has to end


@dataclass(slots=True)
class LockedRows:
    """Rows that a relay has locked, the oldest first, and what became of them.

    Attributes:
        rows: their numbers, and their content.
        done: to be deleted.
        refused: to be set aside, with the error.
        claims: of rows that are done.
        at_once: calls of an eager store, which runs them when they are published.
        trouble: why the others are not published.
    """

    rows: Sequence[tuple[int, bytes]]
    done: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    claims: list[tuple[str, bytes]] = field(default_factory=list)
    at_once: list[Kept] = field(default_factory=list)
    trouble: Exception | None = None


class OutboxTable(ABC):
    """The table of an outbox, for its relay, whose thread alone calls it."""

    name: str

    @abstractmethod
    def is_waiting(self) -> bool:
        """Return whether there are rows to publish. Locks nothing."""

    @abstractmethod
    def take(self, limit: int, life: float) -> AbstractContextManager[LockedRows]:
        """Lock the oldest rows; none if another relay is at work.

        The end of the block deletes and sets aside what the batch says, and commits. A database
        that can give the rows to others if it hears nothing of us for `life` seconds does so.
        """

    @abstractmethod
    def listen(self) -> Sequence[int]:
        """Return file descriptors that become readable at a commit. May be called again."""

    @abstractmethod
    def heard(self) -> None:
        """Read what they have."""

    @abstractmethod
    def text_of(self, error: Exception) -> str:
        """Return the text of an error without the content of rows."""

    @abstractmethod
    def close(self) -> None:
        """Give back what `listen` took."""


class Relay:
    """Publishes the rows of one table in a thread: `with relay:`, or `start` and `stop`."""

    def __init__(self, server: Server, table: OutboxTable) -> None:
        self._app = server.app
        self._table = table
        self._wakeup: Wakeup | None = None
        self._thread = LoopThread("machinery-outbox", self._run, wake=self.wake)
        self._claims: deque[tuple[float, tuple[str, bytes]]] = deque()  # of rows that are deleted
        self._left = "", -math.inf  # key of a call that is stored and not sent; since when
        self._limit = FIRST_BATCH
        self._warned_at = -WARN_EVERY

    def start(self, worker: object = None) -> None:
        self._wakeup = Wakeup()
        self._thread.start()

    def wake(self) -> None:
        """Let it look at the table now. May be called from any thread."""
        if self._wakeup is not None:
            self._wakeup.wake()

    def stop(self, worker: object = None) -> None:
        """End after the row that is being published; the others stay for the next relay."""
        self._thread.stop()
        self._thread.join(JOIN)

    def __enter__(self) -> Relay:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        wakeup, pause = cast("Wakeup", self._wakeup), FIRST_PAUSE
        while not self._thread.is_stopping():
            try:
                sources = self._table.listen()
                is_more = self.step() > 0
                self._release()
                pause = FIRST_PAUSE
                if not is_more and not self._thread.is_stopping():
                    wakeup.wait(POLL, sources)
                    self._table.heard()
            except Exception as error:  # of any driver: the loop must live on
                self._warn(error)
                self._table.close()
                self._thread.pause(full_jitter(pause))
                pause = min(LAST_PAUSE, pause * 2)
        self._table.close()
        wakeup.close()

    def _warn(self, error: Exception) -> None:
        now = time.monotonic()
        level = logger.warning if now - self._warned_at >= WARN_EVERY else logger.debug
        if level == logger.warning:
            self._warned_at = now
        text = "outbox %s: nothing is published now, and it is tried again: %s"
        level(text, self._table.name, self._text_of(error))

    def _text_of(self, error: Exception) -> str:
        text = str(error) if isinstance(error, MachineryError) else self._table.text_of(error)
        return cut(text, MAX_ERROR)

    def step(self) -> int:
        """Publish one batch, and return how many rows are over.

        Raises:
            Exception: the store or the database is away; the rows that are left stay as they are.
        """
        if not self._table.is_waiting():
            return 0
        if self._app.store.backend.features.claims:
            # Before the lock: no row is locked while the store keeps us waiting.
            self._app.store.backend.claims(["outbox"])
        asked = time.monotonic()
        with self._table.take(self._limit, LOCK) as batch:
            self._publish_all(batch, until=min(time.monotonic() + HOLD, asked + LOCK))
        now = time.monotonic()  # committed: nobody will publish these again
        over = len(batch.done) + len(batch.refused)
        # Large rows are not read to be left: as many as HOLD is enough for.
        self._limit = min(BATCH, self._limit * 2) if over == len(batch.rows) else max(1, over)
        self._claims += [(now, claim) for claim in batch.claims]
        for kept in batch.at_once:
            self._publish(kept)
        if batch.trouble is not None:
            raise batch.trouble
        return over

    def _publish_all(self, batch: LockedRows, *, until: float) -> None:
        is_eager = scheme_of(self._app.config.broker) == "eager"
        for number, body in batch.rows:
            if time.monotonic() > until or self._thread.is_stopping():
                return
            try:
                kept = decode_kept(body)
                if is_eager:  # its tasks would run with the lock, which on SQLite is the file's
                    batch.at_once.append(kept)
                elif not self._publish(kept):
                    return
            except Exception as error:  # user's keys of unique tasks as well
                if _passes(error):
                    batch.trouble = error
                    return
                text = batch.refused[number] = self._text_of(error)
                logger.error("row %d of outbox %s is set aside: %s", number, self._table.name, text)
            else:
                batch.done.append(number)
                batch.claims.append(_claim(kept))

    def _publish(self, kept: Kept) -> bool:
        """Publish it, unless that was done before. False: it is not known yet whether it was."""
        app, messages = self._app, kept.messages
        if kept.is_unique:
            self._publish_unique(kept)
            return True
        limits = app.limits_of(messages) if app.config.queue_limits else ()
        name, body = _claim(kept)
        claims = app.store.backend.features.claims
        if claims and limits and app.store.backend.claims([name]) == [None]:
            app.store.broker.check_limits(limits)
        rider = Rider(name=name, expected=None, body=body, life=CLAIM_LIFE)
        submission = Submission(
            token=sending_key(name, kept.key) if claims else f"outbox {kept.key}",
            messages=messages,
            states=kept.states,
            groups=kept.groups,
            limits=() if claims else limits,
            riders=[rider] if claims else (),
        )
        try:
            is_new = app.store.submit(submission)
        except MachineryError:
            self._left = submission.token, -math.inf  # ours to finish
            raise
        if not is_new:
            return self._finish(submission.token)
        if TaskSent in app.events.wanted:
            app.report_sent([decode_signature(one.body) for one in messages])
        return True

    def _finish(self, key: str) -> bool:
        """Publish what is left of a call between two stores, unless another relay may be at it."""
        store, now = self._app.store, time.monotonic()
        if not isinstance(store.backend, OutboxBackend) or not any(store.backend.outboxes([key])):
            return True
        if key != self._left[0]:
            self._left = key, now
        if now - self._left[1] < LEFT:
            return False
        store.publish_left(key)
        return True

    def _publish_unique(self, kept: Kept) -> None:
        """Publish it unless another call has its key, or this one was published before."""
        app, [message] = self._app, kept.messages
        if app.store.backend.get_states([kept.uuid]):
            return
        signature = decode_signature(message.body)
        sending = UniqueSending(
            app, app.store, app.registry.find(kept.name), signature, kept.groups
        )
        try:
            is_duplicate, uuid = sending.attempt(), sending.holder
        except DuplicateTask as error:
            is_duplicate, uuid = True, error.uuid
        if not is_duplicate:
            app.report_sent([sending.signature])
        elif uuid != kept.uuid:
            logger.info("%s %s is not sent: %s is the same call", kept.name, kept.uuid, uuid)

    def _release(self) -> None:
        """Release the claims of rows that were deleted a while ago."""
        until = time.monotonic() - CLAIM_REST
        while self._claims and self._claims[0][0] <= until:
            over = [claim for at, claim in islice(self._claims, BATCH) if at <= until]
            if self._app.store.backend.features.claims:
                self._app.store.backend.release(over)
            for _ in over:
                self._claims.popleft()


def _claim(kept: Kept) -> tuple[str, bytes]:
    return f"outbox-{kept.key}", encode_claim(KeyClaim(uuid=kept.uuid, token=kept.key))


def _passes(error: Exception) -> bool:
    if isinstance(error, MachineryError):
        return isinstance(error, AWAY) and not error.permanent
    return isinstance(error, OSError | MemoryError)


class AnyOutbox(ABC):
    """An outbox of some database, and its relays in this process.

    Attributes:
        server: the Server that it sends through.
    """

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self._name = name
        self._relays: list[weakref.ref[Relay]] = []
        _outboxes.add(self)

    @abstractmethod
    def _open_table(self) -> OutboxTable:
        """Return the table for a relay.

        Raises:
            ConfigError: the database cannot be used so.
        """

    def relay(self) -> Relay:
        """Return a relay, not started yet: `with outbox.relay():`."""
        relay = Relay(self.server, self._open_table())
        self._relays.append(weakref.ref(relay, self._relays.remove))
        return relay

    def in_workers(self) -> None:
        """Run a relay in each worker of this Server; called once, where tasks are declared."""
        parts, name = self.server.app.hooks.parts, self._name
        others = sum(part.name.startswith(name) for part in parts)  # the same table elsewhere
        make = cast("Any", self._part)
        parts.append(added_part(make, f"{name} {others + 1}" if others else name, "broker"))

    def _part(self) -> object:
        return self.relay()

    def publish(self) -> None:
        """Publish in this thread what is there now; for tests and scripts.

        Raises:
            Exception: the store or the database is away; the rows that are left stay as they are.
        """
        relay = self.relay()
        while relay.step():
            pass

    def _wake(self) -> None:
        for known in list(self._relays):  # in one step: others may come and go meanwhile
            if (relay := known()) is not None:
                relay.wake()


_outboxes: weakref.WeakSet[AnyOutbox] = weakref.WeakSet()


def check_file(server: Server, database: str) -> None:
    """Raise ConfigError if this SQLite file is that of the Server's tasks, too."""
    config, file = server.config, os.path.realpath(database)
    urls = {config.broker, config.result_backend or config.broker}
    stores = [StoreUrl.parse(url) for url in urls if scheme_of(url) == "sqlite"]
    if any(os.path.realpath(store.path) == file for store in stores):
        raise ConfigError(
            f"{database} is the file of the outbox and of the tasks, and a relay locks it "
            "(give one of them a file of its own)"
        )


def ended_after(life: float) -> str:
    """Return SQL by which PostgreSQL ends this transaction if its client is silent for so long."""
    return f"SET LOCAL idle_in_transaction_session_timeout = {int(life * 1000)}"


def forget_notices(connection: Any) -> None:
    """Read what PostgreSQL has told this connection of psycopg 3 or 2."""
    if hasattr(connection, "pgconn"):
        connection.pgconn.consume_input()
        while connection.pgconn.notifies() is not None:
            pass
    else:
        connection.poll()
        connection.notifies.clear()


def outboxes_of(server: Server) -> list[AnyOutbox]:
    """Return the outboxes of a Server.

    Raises:
        ConfigError: it has none.
    """
    found = [one for one in list(_outboxes) if one.server is server]
    if not found:
        raise ConfigError("this Server has no outbox (make one: Outbox(server, engine))")
    return found
