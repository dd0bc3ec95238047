"""Connections to one MongoDB, shared by broker, backend and lock of a URL.

pymongo keeps the connections. The caller of `run` says what may be repeated: a replica set tells a
repeated write (retryWrites) from a new one, a single server does not. After a fork the child opens
its own. What lies in the database: collections.py.
"""

from __future__ import annotations

import datetime as dt
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Concatenate, Final, ParamSpec, TypeVar

from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import BulkWriteError, DuplicateKeyError, OperationFailure

from machinery_py.bounds import STEP_ITEMS, in_steps
from machinery_py.clock import SYSTEM_CLOCK, Clock, micros, moment_of
from machinery_py.config.urls import redact
from machinery_py.connections.durability import Concern
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.mongodb.durability import Told, concerns, version_of
from machinery_py.connections.mongodb.errors import (
    DUPLICATE,
    as_ours,
    is_ours_to_sort,
    is_unknown,
    may_be_repeated,
)
from machinery_py.connections.server_clock import ServerClock
from machinery_py.errors import BackendUnavailable, MachineryError, StoreUnusable
from machinery_py.texts import get_logger, printable
from machinery_py.threads import INSIDE

logger = get_logger(__name__)

TIMEOUT = 5.0  # seconds for a server to be found, and for a reply
DATABASE = "machinery"  # Go's
OLDEST = (4, 0)  # version of the server
CLOCK_LIFE = 60.0  # seconds that the difference between the server's clock and ours is believed
T = TypeVar("T")
P = ParamSpec("P")
User = TypeVar("User", bound="DriverUser")
Document = dict[str, Any]
Store = Database[Document]

#: Made once, at the first use of a driver. Each is (collection, [(field, direction), …]).
_INDEXES: Sequence[tuple[str, Sequence[tuple[str, int]]]] = (
    ("machinery_messages", [("status", 1), ("queue", 1), ("priority", -1), ("order", 1)]),
    ("machinery_messages", [("status", 1), ("due_at", 1)]),
    ("machinery_messages", [("session", 1)]),
    ("machinery_messages", [("lease", 1)]),
    ("machinery_messages", [("deed_at", 1)]),
    ("machinery_tokens", [("at", 1)]),
    ("machinery_tokens", [("deed_at", 1)]),
    ("tasks", [("changed_at", 1)]),
    ("tasks", [("expires_at", 1)]),
    ("tasks", [("deed_at", 1)]),
    ("tasks", [("outbox_at", 1)]),
    ("machinery_chords", [("ready", 1)]),
    ("machinery_chords", [("expires_at", 1)]),
    ("machinery_chords", [("look_at", 1)]),
    ("machinery_chords", [("deed_at", 1)]),
    ("machinery_chords", [("outbox_at", 1)]),
    ("machinery_arrivals", [("group", 1)]),
    ("machinery_revoked", [("expires_at", 1)]),
    ("machinery_records", [("deed_at", 1)]),
    ("machinery_checkpoints", [("expires_at", 1)]),
    ("machinery_claims", [("deed_at", 1)]),
    ("machinery_claims", [("expires_at", 1)]),
    ("machinery_outboxes", [("outbox_at", 1)]),
    ("machinery_topics", [("topic", 1), ("place", 1)]),
    ("machinery_topics", [("until", 1)]),
    ("machinery_locks", [("expires_at", 1)]),
    ("machinery_limits", [("until", 1)]),
)
#: Of messages that have a tenant.
_TENANTS = [("status", 1), ("queue", 1), ("tenant", 1), ("priority", -1), ("order", 1)]

#: (URL, database, what for) → events of threads of this process that sleep until something comes.
_notifiers: dict[tuple[str, str, str], weakref.WeakSet[threading.Event]] = {}
_notifiers_lock = ForkLock()


class MongoDriver:
    """Opens a client when it is needed. May be used from any thread.

    Attributes:
        intent_age: seconds after which others carry out an intent: its owner has died, or is slow,
            and doing it twice does no harm.
    """

    intent_age: float = 5.0

    def __init__(
        self,
        url: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        timeout: float = TIMEOUT,
        database: str = "",
        strict: bool = False,
    ) -> None:
        self.url = url
        self.clock: Final = ServerClock(
            clock, lambda: self.run(lambda _: None, doing="looking at its clock")
        )
        self.place: str = redact(url)
        self._timeout = timeout
        self._name = database
        self._strict = strict  # refuse a server that may lose what it is given
        self._opening = ForkLock()
        self._client: MongoClient[Document] | None = None
        self._store: Store | None = None
        self._pid = os.getpid()
        self._places, self._orders = _GrowingNumbers(), _GrowingNumbers()

    # Time

    def now(self) -> int:
        """Return µs since 1970, by the server's clock (by `clock`, if that is not the system's)."""
        return micros(self.clock.now())

    def moment(self) -> dt.datetime:
        return moment_of(self.now())

    def intents_before(self) -> int:
        """Return the moment (µs) before which an intent was written that others may carry out."""
        return self.now() - int(self.intent_age * 1e6)

    def next_place(self, count: int = 1) -> int:
        """Return the first of `count` numbers that grow with time, none of them given out twice."""
        return self._places.take(count, self.now())

    def next_order(self, count: int = 1) -> int:
        """Return places in a queue, as `next_place`, but by the true time in tests as well.

        The places of several drivers must not be the same.
        """
        return self._orders.take(count, micros(SYSTEM_CLOCK.now() + self.clock.ahead))

    def _look(self) -> None:
        self.run(lambda _: None, doing="looking at its clock")

    def _measure(self, store: Store) -> None:
        """Compare the clocks."""
        if not self.clock.is_due:
            return

        def read() -> dt.datetime | None:
            told = store.client.admin.command("ismaster").get("localTime")
            # A command's reply is decoded without the client's options.
            return told.replace(tzinfo=dt.timezone.utc) if isinstance(told, dt.datetime) else None

        self.clock.measure(read)

    # Asking

    def run(
        self,
        work: Callable[[Store], T],
        *,
        doing: str,
        away: type[MachineryError] = BackendUnavailable,
        again: bool = True,
        lost: type[MachineryError] | None = None,
        refused: type[MachineryError] = MachineryError,
    ) -> T:
        """Do some work on the database.

        Args:
            again: repeat it once if the connection is lost or the primary steps down; it may then
                have been carried out twice.
            away: raised when nothing was written.
            lost: raised when it may have been carried out (as `away`, if not given).
            refused: raised when it can never be stored, in no matter how many tries.
        """
        unknown = False
        for last in (False, True) if again else (True,):
            INSIDE.depth += 1  # the locks of pymongo cannot be taken twice by a thread
            try:
                return work(self._open())
            except MachineryError:
                raise
            except Exception as error:  # pymongo's, sorted by errors.py
                if not is_ours_to_sort(error):
                    raise
                unknown = is_unknown(error) or unknown
                if may_be_repeated(error) and not last:
                    continue
                raise as_ours(
                    error,
                    url=self.url,
                    doing=doing,
                    away=(lost or away) if unknown else away,
                    refused=refused,
                ) from error
            finally:
                INSIDE.depth -= 1
        raise AssertionError("unreachable")

    def _open(self) -> Store:
        if os.getpid() != self._pid:
            # A client that a fork copied must not be used or closed: the parent has its sockets.
            self._client, self._store, self._pid = None, None, os.getpid()
        store = self._store
        if store is None:
            with self._opening:
                store = self._connect() if self._store is None else self._store
        self._measure(store)
        return store

    def _connect(self) -> Store:
        said = self.url.partition("?")[2].lower()
        milliseconds = max(1, int(self._timeout * 1000))
        options: dict[str, Any] = {
            "serverSelectionTimeoutMS": milliseconds,
            "connectTimeoutMS": milliseconds,
            "socketTimeoutMS": milliseconds,
            "wtimeoutMS": milliseconds,
            "w": "majority",
            "appname": "machinery_py",
        }
        # What the URL says is the user's will.
        options = {
            name: value
            for name, value in options.items()
            if f"{name.lower()}=" not in f"&{said}".replace("?", "&")
        }
        client: MongoClient[Document] = MongoClient(
            self.url, tz_aware=True, tzinfo=dt.timezone.utc, **options
        )
        try:
            default = client.get_default_database(DATABASE).name
            store: Store = client[self._name or default]
            self._check(store)
            for collection, keys in _INDEXES:
                store[collection].create_index(list(keys))
            fair = {"tenant": {"$exists": True}}
            store.machinery_messages.create_index(_TENANTS, partialFilterExpression=fair)
        except BaseException:
            client.close()
            raise
        self._client, self._store = client, store
        return store

    def _check(self, store: Store) -> None:
        """Refuse what cannot be worked with, and tell what may be lost."""
        told = _told_by(store)
        version = version_of(told.build)
        if version is not None and version < OLDEST:
            raise StoreUnusable(
                f"MongoDB at {self.place} is version {told.build['version']} "
                f"(needed: {OLDEST[0]}.{OLDEST[1]} or newer)"
            )
        found = concerns(told)
        if self._strict and found:
            reasons = "; ".join(one.text for one in found)
            raise StoreUnusable(f"MongoDB at {self.place}: refused by strict_durability: {reasons}")
        for one in found:
            logger.log(
                logging.WARNING if one.is_certain else logging.INFO,
                "MongoDB at %s: %s",
                self.place,
                one.text,
            )

    def concerns(self) -> list[Concern]:
        """Return what is wrong with the server now, or cannot be known.

        Raises:
            BackendUnavailable, StoreUnusable: it cannot be asked.
        """
        return self.run(lambda store: concerns(_told_by(store)), doing="looking at its settings")

    def notifier(self, what: str) -> threading.Event:
        """Return an event that `notify` of any driver of this process with the same URL sets."""
        event = threading.Event()
        with _notifiers_lock:
            _notifiers.setdefault((self.url, self._name, what), weakref.WeakSet()).add(event)
        return event

    def notify(self, what: str) -> None:
        with _notifiers_lock:
            events = list(_notifiers.get((self.url, self._name, what), ()))
        for event in events:
            event.set()

    def close(self) -> None:
        """Close the connections. May be called twice; the next use opens anew."""
        with self._opening:
            client, self._client, self._store = self._client, None, None
        if client is not None and os.getpid() == self._pid:
            client.close()


class _GrowingNumbers:
    """Numbers that follow the time, none of them given out twice. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._last = 0

    def take(self, count: int, now: int) -> int:
        with self._lock:
            first = max(now, self._last + 1)
            self._last = first + count - 1
            return first


class DriverUser:
    """Base of a class whose methods are steps on the database.

    Attributes:
        unavailable: raised when nothing was written.
    """

    unavailable: ClassVar[type[MachineryError]] = BackendUnavailable

    def __init__(self, driver: MongoDriver) -> None:
        self.driver = driver


def step(
    doing: str, *, again: bool = True
) -> Callable[[Callable[Concatenate[User, Store, P], T]], Callable[Concatenate[User, P], T]]:
    """Make a method one step on the database: `MongoDriver.run` passes the argument `store`.

    Args:
        doing, again: as in `MongoDriver.run`.
    """

    def decorate(
        work: Callable[Concatenate[User, Store, P], T],
    ) -> Callable[Concatenate[User, P], T]:
        @functools.wraps(work)
        def run(self: User, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return self.driver.run(
                lambda store: work(self, store, *args, **kwargs),
                doing=doing,
                away=self.unavailable,
                again=again,
            )

        return run

    return decorate


def _told_by(store: Store) -> Told:
    admin = store.client.admin

    def ask_if_allowed(command: str) -> Document | None:
        try:
            return admin.command(command)
        except OperationFailure:
            return None  # no right to ask, or no such command

    return Told(
        hello=admin.command("ismaster"),
        build=ask_if_allowed("buildInfo") or {},
        status=ask_if_allowed("serverStatus"),
        options=ask_if_allowed("getCmdLineOpts"),
        concern=store.write_concern.document,
    )


def find_by_id(
    collection: Collection[Document], ids: Sequence[str], fields: Document | None = None
) -> Iterator[Document]:
    """Find documents by their `_id`, each STEP_ITEMS of them in one round trip.

    Args:
        fields: those that are read, or (0) are not; None: all.
    """
    for some in in_steps(ids):
        these = {"_id": {"$in": [printable(one) for one in some]}}
        yield from collection.find(these, fields).batch_size(STEP_ITEMS + 1)


def insert_new(collection: Collection[Document], documents: Sequence[Document]) -> list[bool]:
    """Insert the documents that are not there, and return for each whether it was new.

    Safe to repeat, except that the answer is then another one.
    """
    if not documents:
        return []
    if len(documents) == 1:
        try:
            collection.insert_one(documents[0])
        except DuplicateKeyError:
            return [False]
        return [True]
    new = [True] * len(documents)
    for start in range(0, len(documents), STEP_ITEMS):
        try:
            collection.insert_many(documents[start : start + STEP_ITEMS], ordered=False)
        except BulkWriteError as error:
            problems = error.details.get("writeErrors", [])
            if any(problem.get("code") != DUPLICATE for problem in problems) or error.details.get(
                "writeConcernErrors"
            ):
                raise
            for problem in problems:
                new[start + problem["index"]] = False
    return new
