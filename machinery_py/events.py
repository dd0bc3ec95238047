"""Events of this process as records, and their bus. The log is for people, events are for programs.

`control/publisher.py` sends them to other processes, when that is switched on.

Handlers run in the thread in which the event happens, and must be quick. An exception of a handler
is logged, and the handler stays subscribed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from machinery_py.tasks.signature import Signature
from machinery_py.texts import get_logger

logger = get_logger(__name__)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """The base of all events."""


class TaskEvent(Event, frozen=True, kw_only=True):
    """The base of all events of a task."""

    signature: Signature[Any]


class TaskSent(TaskEvent, frozen=True, kw_only=True):
    """A task was published: by a sender, or by a worker as a callback."""


class TaskReceived(TaskEvent, frozen=True, kw_only=True):
    """A worker has claimed a task, and is going to run it.

    Attributes:
        wait: seconds since it was sent, or since its ETA; None if the broker does not tell.
    """

    worker: str
    wait: float | None = None


class TaskStarted(TaskEvent, frozen=True, kw_only=True):
    """A worker is about to call the function."""

    worker: str


class TaskSucceeded(TaskEvent, frozen=True, kw_only=True):
    """SUCCESS was stored.

    Attributes:
        runtime: seconds in the function.
        result: as text, its beginning.
    """

    worker: str
    runtime: float
    result: str = ""


class TaskRetried(TaskEvent, frozen=True, kw_only=True):
    """A try failed or asked for another, which was published. `delay`: seconds until it is due."""

    worker: str
    error: str
    delay: float


class TaskFailed(TaskEvent, frozen=True, kw_only=True):
    """FAILURE was stored."""

    worker: str
    error: str
    error_type: str
    traceback: str = ""


class TaskRevoked(TaskEvent, frozen=True, kw_only=True):
    """A task ended because it was revoked. TaskFailed follows.

    Attributes:
        worker: "" when it was waiting, and the process that revoked it has ended it.
    """

    worker: str


class TaskRejected(TaskEvent, frozen=True, kw_only=True):
    """A worker has received a task, and did not run it. TaskFailed or MessageDead may follow.

    Attributes:
        reason: "unregistered", "poison", or an error type as "Expired".
    """

    worker: str
    reason: str


class TaskFenced(TaskEvent, frozen=True, kw_only=True):
    """A run ended, but its lease was lost or the task had finished: nothing was written."""

    worker: str


class MessageDead(Event, frozen=True, kw_only=True):
    """A message became a dead letter."""

    uuid: str
    name: str
    queue: str
    reason: str
    error: str
    worker: str = ""


class WorkerEvent(Event, frozen=True, kw_only=True):
    """The base of all events of a worker.

    Attributes:
        active: tasks that run.
        processed: tasks that have ended in it so far.
    """

    worker: str
    active: int = 0
    processed: int = 0


class WorkerOnline(WorkerEvent, frozen=True, kw_only=True):
    """A worker has registered, and is about to claim its first task."""


class WorkerHeartbeat(WorkerEvent, frozen=True, kw_only=True):
    """A worker has renewed its registration in its store.

    Attributes:
        interval: seconds to the next one.
        load: load averages of the host over 1, 5 and 15 minutes, where it has them.
        version: of this library.
        platform: as "linux".
        lost: events of this process that did not reach the stream.
    """

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
        todo = [kind for kind, handlers in self._handlers.items() if handlers]
        wanted: set[type[Event]] = set()
        while todo:
            wanted.add(kind := todo.pop())
            todo += kind.__subclasses__()
        self.wanted = frozenset(wanted)

    def emit(self, event: Event) -> None:
        """Call the handlers; an exception of theirs is logged."""
        for base in type(event).__mro__:
            for handler in self._handlers.get(base, ()):
                try:
                    handler(event)
                except (Exception, SystemExit):  # user code; sys.exit() must end no worker
                    logger.exception("event handler %r failed on %s", handler, type(event).__name__)
