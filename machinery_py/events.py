"""Events of this process as records, and their bus. The log is for people, events are for programs.

`control/publisher.py` sends them to other processes, when that is switched on.

Handlers run in the thread in which the event happens, and must be quick. An exception of a handler
is logged, and the handler stays subscribed.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Self, TypeVar

import msgspec

from machinery_py.clock import UTC
from machinery_py.tasks.signature import Signature
from machinery_py.texts import cut, get_logger

logger = get_logger(__name__)

MAX_TEXT = 1_000  # bytes of an error or a result in another process
MAX_TRACEBACK = 4_000  # characters, the last ones


class Event(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The base of all events.

    Attributes:
        worker: its name; "" of an event that no worker sent. In the stream, host and process then.
        at: the time by the clock of that host. This and the next three are set in the stream of
            all processes alone.
        host, pid: the process.
        clock: the logical clock; see `stamp`.
    """

    worker: str = ""
    at: Annotated[dt.datetime, msgspec.Meta(tz=True)] = dt.datetime.min.replace(tzinfo=UTC)
    host: str = ""
    pid: int = 0
    clock: int = 0

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self).__name__

    @property
    def stamp(self) -> tuple[int, str]:
        """The place in the order of all events: `sorted(events, key=lambda one: one.stamp)`."""
        return self.clock, self.worker

    @property
    def event(self) -> Self:
        """Itself."""
        return self

    def as_json(self) -> dict[str, Any]:
        """Return it as one flat mapping, with the beginning of long texts.

        Of a task's event nothing in it grows with the arguments.
        """
        record = msgspec.structs.asdict(self)
        record["kind"] = type(self).__name__
        for key in ("error", "result"):
            if record.get(key):
                record[key] = cut(record[key], MAX_TEXT)
        if len(record.get("traceback", "")) > MAX_TRACEBACK:
            record["traceback"] = "…" + record["traceback"][-MAX_TRACEBACK:]
        return record


class TaskEvent(Event, frozen=True, kw_only=True):
    """The base of all events of a task.

    Attributes:
        signature: in the stream of all processes it has uuid, name, routing_key and attempt alone.
    """

    signature: Signature[Any]

    @property
    def uuid(self) -> str:
        return self.signature.uuid

    @property
    def name(self) -> str:
        return self.signature.name

    @property
    def queue(self) -> str:
        return self.signature.routing_key

    @property
    def attempt(self) -> int:
        return self.signature.attempt

    def as_json(self) -> dict[str, Any]:
        record = super().as_json()
        signature = record.pop("signature")
        record["uuid"], record["name"] = signature.uuid, signature.name
        record["queue"], record["attempt"] = signature.routing_key, signature.attempt
        return record


class TaskSent(TaskEvent, frozen=True, kw_only=True):
    """A task was published: by a sender, or by a worker as a callback."""


class TaskReceived(TaskEvent, frozen=True, kw_only=True):
    """A worker has claimed a task, and is going to run it.

    Attributes:
        wait: seconds since it was sent, or since its ETA; None if the broker does not tell.
    """

    wait: float | None = None


class TaskStarted(TaskEvent, frozen=True, kw_only=True):
    """A worker is about to call the function."""


class TaskEnded(TaskEvent, frozen=True, kw_only=True):
    """The base of the next three: a run ended, and its outcome was stored.

    Attributes:
        notes: what the task noted with `Context.note`.
    """

    notes: dict[str, Any] = msgspec.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        record = super().as_json()
        if not self.notes:
            del record["notes"]
        return record


class TaskSucceeded(TaskEnded, frozen=True, kw_only=True):
    """SUCCESS was stored.

    Attributes:
        runtime: seconds in the function.
        result: as text, its beginning.
    """

    runtime: float
    result: str = ""


class TaskRetried(TaskEnded, frozen=True, kw_only=True):
    """A try failed or asked for another, which was published.

    Attributes:
        delay: seconds until it is due.
        runtime: seconds in the function; 0: it was not called, or was lost with its process.
    """

    error: str
    delay: float
    error_type: str = ""
    traceback: str = ""
    runtime: float = 0.0


class TaskSuspended(TaskEnded, frozen=True, kw_only=True):
    """A task sleeps, and goes on later: its next run begins behind its checkpoints.

    Attributes:
        delay: seconds until it is due.
        reason: for what it waits.
        runtime: seconds in the function.
    """

    reason: str
    delay: float
    runtime: float = 0.0


class TaskFailed(TaskEnded, frozen=True, kw_only=True):
    """FAILURE was stored. `runtime`: as in TaskRetried."""

    error: str
    error_type: str
    traceback: str = ""
    runtime: float = 0.0


class TaskRevoked(TaskEvent, frozen=True, kw_only=True):
    """A task ended because it was revoked. TaskFailed follows.

    Attributes:
        worker: "" when it was waiting, and the process that revoked it has ended it.
    """


class TaskRejected(TaskEvent, frozen=True, kw_only=True):
    """A worker has received a task, and did not run it. TaskFailed or MessageDead may follow.

    Attributes:
        reason: "unregistered", "poison", or an error type as "Expired".
    """

    reason: str


class TaskFenced(TaskEvent, frozen=True, kw_only=True):
    """A run ended, but its lease was lost or the task had finished: nothing was written."""


class MessageDead(Event, frozen=True, kw_only=True):
    """A message became a dead letter."""

    uuid: str
    name: str
    queue: str
    reason: str
    error: str


class WorkerEvent(Event, frozen=True, kw_only=True):
    """The base of all events of a worker.

    Attributes:
        active: tasks that run.
        processed: tasks that have ended in it so far.
    """

    active: int = 0
    processed: int = 0


class WorkerOnline(WorkerEvent, frozen=True, kw_only=True):
    """A worker has registered, and is about to claim its first task."""


class WorkerHeartbeat(WorkerEvent, frozen=True, kw_only=True):
    """A worker has renewed its registration in its store.

    Attributes:
        slots: tasks that may run at a time.
        interval: seconds to the next one.
        load: load averages of the host over 1, 5 and 15 minutes, where it has them.
        version: of this library.
        platform: as "linux".
        lost: events of this process that did not reach the stream.
    """

    slots: int = 0
    interval: float = 0.0
    load: tuple[float, float, float] | None = None
    version: str = ""
    platform: str = ""
    lost: int = 0


class ConnectionLost(WorkerEvent, frozen=True, kw_only=True):
    """A worker cannot reach its broker, and waits. Sent for each attempt.

    Attributes:
        attempt: 0 when the connection was lost, then counted.
        limit: attempts until the worker gives up; 0 is never.
        delay: seconds until the next attempt.
    """

    error: str
    attempt: int
    limit: int
    delay: float


class ConnectionRestored(WorkerEvent, frozen=True, kw_only=True):
    """The broker answers again, after an outage of so many seconds."""

    attempts: int
    seconds: float


class WorkerOffline(WorkerEvent, frozen=True, kw_only=True):
    """A worker has ended in good order. Sent once."""


E = TypeVar("E", bound=Event)
Handler = Callable[[E], object]


def kinds_of(base: type[Event]) -> Iterator[type[Event]]:
    """Yield an event class and all that derive from it."""
    yield base
    for each in base.__subclasses__():
        yield from kinds_of(each)


class EventBus:
    """Calls the handlers of an event's class and of its bases. Any thread may call it.

    Attributes:
        wanted: classes that have a handler. No event need be made of another: `if X in bus.wanted`.
    """

    def __init__(self) -> None:
        self._handlers: dict[type[Event], list[Callable[[Any], object]]] = {}
        self._changing = threading.RLock()  # a finalizer may unsubscribe at any step
        self.wanted: frozenset[type[Event]] = frozenset()

    def subscribe(self, kind: type[E], handler: Handler[E]) -> Callable[[], None]:
        """Call the handler for each event of this class; the returned function ends that."""
        with self._changing:
            self._handlers[kind] = [*self._handlers.get(kind, ()), handler]
            self._note_wanted()

        def end() -> None:
            with self._changing:
                self._handlers[kind] = [one for one in self._handlers[kind] if one is not handler]
                self._note_wanted()

        return end

    def _note_wanted(self) -> None:
        kinds = [kind for kind, handlers in self._handlers.items() if handlers]
        self.wanted = frozenset(each for kind in kinds for each in kinds_of(kind))

    def emit(self, event: Event) -> None:
        """Call the handlers; an exception of theirs is logged."""
        for base in type(event).__mro__:
            for handler in self._handlers.get(base, ()):
                try:
                    handler(event)
                except (Exception, SystemExit):  # user code; sys.exit() must end no worker
                    logger.exception("event handler %r failed on %s", handler, type(event).__name__)
