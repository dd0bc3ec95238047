"""All errors of this library, as one tree.

    MachineryError
    ├── ConfigError (ValueError)              a setting, URL or file cannot be used
    │   └── AppNotFound                       the command line cannot find or import the Server
    ├── TaskNotRegistered (LookupError)       a signature names a task that is not known here
    ├── TaskAlreadyRegistered (ValueError)    two functions want one name
    ├── ArgumentError (TypeError)             a value cannot be sent, or does not fit the task
    ├── ScheduleError (ValueError)            a schedule that cannot be read, or would never be due
    ├── ScheduleNotFound (LookupError)        no schedule has this name
    ├── QueueNotFound (LookupError)           this is no queue of ours
    ├── LockNotAcquired (TimeoutError)        somebody else has the lock
    ├── LockLost                              a lock is not held any more
    ├── LimitNotAcquired (TimeoutError)       the turn under a limit did not come in time
    ├── WorkflowError (ValueError)            a chain, group or chord that could never work
    ├── DecodeError (ValueError)              bytes that are no signature or no state
    ├── PublishRefused                        nothing was stored; sending again is safe
    │   ├── BrokerUnavailable (ConnectionError)
    │   ├── QueueFull                         a queue holds as many as queue_limits says
    │   └── NameRefused (ValueError)          a name is illegal, or belongs to somebody else's data
    ├── DuplicateTask                         a unique task was not sent: its key is held by another
    ├── PublishUnknown                        it may have been stored
    ├── BackendUnavailable (ConnectionError)  the result backend does not answer
    ├── StoreUnusable                         a store answers but is unusable (schema, disk, rights)
    ├── StateNotFound (LookupError)           the backend has no state under this UUID
    ├── Unsupported (NotImplementedError)     this store cannot do that, see its features
    ├── TaskFailed                            the task whose result is wanted ended in FAILURE
    ├── ResultTimeout (TimeoutError)          no result in time
    ├── ResultExpired (LookupError)           there is no state (any more)
    ├── Retry                                 raised by a task: this try has failed, make the next
    ├── RetryTaskLater                        raised by a task: run me again after a while
    ├── Replace                               raised by a task: a workflow takes my place
    ├── Reject                                raised by a task: back to the queue, or a dead letter
    ├── Ignore                                raised by a task: end without a result
    ├── NoRetry                               raised by a task: fail for good
    ├── StepFailed                            raised by Context.step: the step's function raised
    ├── StepRefused                           raised by Context.step: the task fails for good
    ├── StepLost                              raised by Context.step: another worker has the task
    ├── BatchFailed                           raised by a batch task: some of its calls failed
    ├── TimeLimitExceeded                     raised in a task that runs past its time limit
    └── WorkerLost                            the process that ran the task ended before the task

Each text says what failed, on which thing: what was found (what to do). No text holds a password or
is longer than texts.MAX_ERROR. Each error can be pickled, with its attributes.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from machinery_py.clock import LONGEST, Seconds, seconds_of
from machinery_py.texts import MAX_ERROR, cut

E = TypeVar("E", bound="MachineryError")


class MachineryError(Exception):
    """The base of every error of this library.

    Attributes:
        permanent: a store refused this message or result itself (its size, its queue, a right) and
            will refuse it however often it is tried. False: the trouble may pass, or nobody knows.
        blocked: nothing was done, because somebody else's transaction has locked what it changes.
            The store works: only this has to wait.
    """

    permanent = False
    blocked = False

    def __init__(self, *args: object) -> None:
        super().__init__(*[cut(one, MAX_ERROR) if isinstance(one, str) else one for one in args])

    def __reduce__(self) -> tuple[Any, ...]:
        # Most errors build their text of other arguments, and could not be made of the text again.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[E], args: tuple[object, ...], attributes: dict[str, object]) -> E:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


def for_good(error: E) -> E:
    """Mark the error as permanent, and return it."""
    error.permanent = True
    return error


class ConfigError(MachineryError, ValueError):
    """A setting, URL or configuration file cannot be used."""


class AppNotFound(ConfigError):
    """The module or Server that a command names cannot be found or imported."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the part of an error text that offers the most similar known name, or ""."""
    import difflib  # only those who mistyped pay for it

    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


class TaskNotRegistered(MachineryError, LookupError):
    """A signature names a task that this server does not know."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known: list[str] = sorted(known)
        listing = ", ".join(self.known) or "none"
        super().__init__(
            f"task {name!r} is not registered (registered: {listing}{nearest(name, self.known)})"
        )


class TaskAlreadyRegistered(MachineryError, ValueError):
    """Two different functions were registered under one name."""

    def __init__(self, name: str, *, where: str, suggestion: str) -> None:
        self.name = name
        super().__init__(
            f"task {name!r} is already registered ({where}; "
            f'give this one a name of its own: @server.task("{suggestion}"))'
        )


class ArgumentError(MachineryError, TypeError):
    """An argument cannot be sent, or the arguments do not fit the task's parameters."""


class ScheduleError(MachineryError, ValueError):
    """A schedule cannot be read, or would never be due; raised where it is made."""


class ScheduleNotFound(MachineryError, LookupError):
    """No schedule has this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        known = sorted(known)
        super().__init__(
            f"no schedule {name!r} (there are: {', '.join(known) or 'none'}{nearest(name, known)})"
        )


class QueueNotFound(MachineryError, LookupError):
    """No task was sent to this queue and no worker has served it; it may be another program's."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        known = sorted(known)
        super().__init__(
            f"no queue {name!r} (there is: {', '.join(known) or 'none'}{nearest(name, known)})"
        )


class LockNotAcquired(MachineryError, TimeoutError):
    """Somebody else has the lock."""

    def __init__(self, name: str, waited: float | None) -> None:
        self.name = name
        still = f", and had it for {waited:g} s" if waited else ""
        super().__init__(f"lock {name!r}: somebody else has it{still}")


class LockLost(MachineryError):
    """A lock is not held (any more): its lease was not renewed in time, or it was released."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"lock {name!r} is not held (any more); "
            "somebody else may have done the same work beside this"
        )


class LimitNotAcquired(MachineryError, TimeoutError):
    """The turn under a limiter did not come in time."""

    def __init__(self, name: str, waited: float | None) -> None:
        self.name = name
        super().__init__(f"limiter {name!r}: its turn did not come in {waited or 0.0:g} s")


class WorkflowError(MachineryError, ValueError):
    """A chain, group or chord could never work; raised where it is made."""


class DecodeError(MachineryError, ValueError):
    """Bytes are no signature, task state or group record."""


class PublishRefused(MachineryError):
    """The message was not stored. Sending it again is safe; useless if the refusal is `permanent`.

    Attributes:
        left: of several messages, the positions of those that were refused, if the store knows that
            the others are stored.
    """

    left: frozenset[int] | None = None


class BrokerUnavailable(PublishRefused, ConnectionError):
    """The broker could not be reached in time; nothing was stored."""


class QueueFull(PublishRefused):
    """A queue has as many waiting tasks as the setting `queue_limits` says; nothing was stored.

    Permanent if what was sent at once is more than the limit: there will never be room for it.

    Attributes:
        queue: its name.
        waiting: tasks that wait in it now.
        limit: of the setting.
    """

    def __init__(self, queue: str, *, waiting: int, limit: int, adds: int) -> None:
        self.queue = queue
        self.waiting = waiting
        self.limit = limit
        self.permanent: bool = adds > limit
        if self.permanent:
            found = f"{adds:,} tasks at once are more than queue_limits = {limit:,} (send fewer)"
        else:
            found = (
                f"{waiting:,} tasks wait in it, {adds:,} more would pass queue_limits = {limit:,} "
                "(send later, or let it wait for room: options(block=5.0))"
            )
        super().__init__(f"queue {queue!r} is full: {found}")


class NameRefused(PublishRefused, ValueError):
    """A name cannot be used, or somebody else's data lies under it. Permanent.

    Attributes:
        name: of a task, queue, group or lock, or a UUID.
    """

    permanent = True

    def __init__(self, text: str, name: str = "") -> None:
        self.name = name
        super().__init__(text)


class DuplicateTask(MachineryError):
    """A unique task was not sent: another call of it holds the key.

    Attributes:
        name: of the task.
        uuid: of the call that holds the key.
        state: of that call.
    """

    def __init__(self, name: str, uuid: str, state: str) -> None:
        self.name = name
        self.uuid = uuid
        self.state = state
        super().__init__(
            f"{name} was not sent: {uuid} is the same call, and is {state} (see on_duplicate)"
        )


class PublishUnknown(MachineryError):
    """The reply was lost: the message may or may not have been stored.

    `send` has repeated it for `publish_timeout`, which cannot double it. Sending it once more makes
    a second task.

    Attributes:
        left: as in PublishRefused; some of the others are stored.
    """

    left: frozenset[int] | None = None


class BackendUnavailable(MachineryError, ConnectionError):
    """The result backend could not be reached in time."""


class StoreUnusable(MachineryError):
    """The store answers but cannot be used: a newer schema, a read-only file, a full disk."""


class StateNotFound(MachineryError, LookupError):
    """The backend keeps no state under this UUID: it expired, or there never was one."""

    def __init__(self, uuid: str, text: str = "") -> None:
        self.uuid = uuid
        super().__init__(text or f"no state of {uuid}: it expired, or it was never sent")


class Unsupported(MachineryError, NotImplementedError):
    """A store was asked for something that it cannot do; see its `features`."""


class TaskFailed(MachineryError):
    """The task ended in FAILURE.

    Attributes:
        uuid: of the task that failed; in a chain or chord, of the member that broke it.
        error: the error text, as Go's `Error`.
        error_type: the qualified name of the exception's class, or "" if a Go worker ran the task.
        traceback: as text, or "" if a Go worker ran the task.
    """

    def __init__(
        self, uuid: str, name: str, error: str, *, error_type: str = "", traceback: str = ""
    ) -> None:
        self.uuid = uuid
        self.name = name
        self.error = error
        self.error_type = error_type
        self.traceback = traceback
        kind = f"{error_type}: " if error_type else ""
        super().__init__(f"task {name or '?'} {uuid} failed: {kind}{error}")


class ResultTimeout(MachineryError, TimeoutError):
    """There was no result in time. The task goes on; ask again later."""


class ResultExpired(MachineryError, LookupError):
    """The backend has no state (any more) under this UUID."""

    def __init__(self, uuid: str, *, kept_for: float) -> None:
        self.uuid = uuid
        super().__init__(
            f"no state of {uuid}: it expired (results are kept {kept_for:g} s, "
            "see results_expire_in and result_expires), was purged, or was never sent"
        )


class RetryTaskLater(MachineryError):
    """Raised by a task to run again after a delay; not counted as a try (Go: `ErrRetryTaskLater`).

    Args:
        message: why; shown while the task waits.
        delay: seconds, or a timedelta. A negative one is none, more than 100 years are 100 years.
        limit: how often this task may be postponed in all; the next time it fails. None: no limit.
    """

    limit: int | None = None

    def __init__(self, message: str, delay: Seconds, *, limit: int | None = None) -> None:
        self.message = message
        self.delay: float = _pause("delay of RetryTaskLater", delay)
        self.limit = _number("limit of RetryTaskLater", limit)
        super().__init__(f"{message} (to be retried in {self.delay:g} s)")


class Retry(MachineryError):
    """Raised by a task to end this try as failed, and to say how the next one is to be made.

    It counts as one of the tries. When none is left, the task fails: with the text of the error
    that it was raised from (`raise Retry(…) from error`), else with its own.

    Args:
        message: why.
        delay: as in RetryTaskLater. By default what the task's back-off says.
        eta: an aware moment, in place of a delay.
        queue: of all further tries.
        args, kwargs: arguments of all further tries; with one of them the other is empty.
        retries: tries after the first in all, in place of the task's own.

    Raises:
        TypeError, ValueError: one of these makes no sense. A queue that cannot be one is refused
            when the task has ended: it fails.
    """

    def __init__(
        self,
        message: str = "the task asked for a retry",
        *,
        delay: Seconds | None = None,
        eta: dt.datetime | None = None,
        queue: str = "",
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        retries: int | None = None,
    ) -> None:
        if delay is not None and eta is not None:
            raise ValueError(f"Retry: delay={delay!r} and eta={eta!r} (expected one of them)")
        if eta is not None and eta.utcoffset() is None:
            raise ValueError(f"Retry: eta {eta!r} has no time zone")
        self.message = message
        self.delay: float | None = None if delay is None else _pause("delay of Retry", delay)
        self.eta: dt.datetime | None = None if eta is None else _in_utc("eta of Retry", eta)
        self.queue = queue
        self.args_of_task: tuple[Any, ...] | None = None if args is None else tuple(args)
        self.kwargs_of_task: dict[str, Any] | None = None if kwargs is None else dict(kwargs)
        self.retries: int | None = _number("retries of Retry", retries)
        super().__init__(message)


class Replace(MachineryError):
    """Raised by a task to be replaced by a workflow, whose end is then its own.

    The workflow's last task takes over the UUID, the callbacks and the place in a chain or group;
    when one of its tasks fails, the replaced one fails.

    Args:
        workflow: a signature, chain, group or chord.
    """

    def __init__(self, workflow: Any) -> None:
        self.workflow = workflow
        super().__init__(f"replaced by {workflow!r}")


def _pause(what: str, delay: Seconds) -> float:
    return min(LONGEST, max(0.0, seconds_of(what, delay, least=-math.inf)))


def _in_utc(what: str, moment: dt.datetime) -> dt.datetime:
    try:
        return moment.astimezone(dt.timezone.utc)
    except OverflowError:
        raise ValueError(f"{what}: {moment} (expected a moment before the year 10000)") from None


def _number(what: str, count: int | None) -> int | None:
    if count is not None and not (isinstance(count, int) and 0 <= count < 2**31):
        raise ValueError(f"{what}: {count!r} (expected a whole number, 0 to 2147483647)")
    return count


class NoRetry(MachineryError):
    """Raised by a task to fail for good, whatever its retries."""


class Reject(MachineryError):
    """Raised by a task to give its message away: there is no result, and no try is used up.

    The message becomes a dead letter, and the task fails. Or it goes back to its queue, in the
    state RETRY: at once the first time, then after 1, 2, 4 … seconds, 60 at most. That has no end
    unless the call has one (`expires`).

    Args:
        reason: text or exception; kept with the state and the dead letter.
        requeue: back to its queue.
    """

    def __init__(self, reason: object = "", requeue: bool = False) -> None:
        self.reason = reason
        self.requeue = requeue
        kind = f"{type(reason).__name__}: " if isinstance(reason, BaseException) else ""
        super().__init__(f"rejected: {kind}{reason}" if kind or reason else "rejected")


class Ignore(MachineryError):
    """Raised by a task to end without a result: nobody is to look at it.

    Whoever waits for it, or runs after it, is told as if it was revoked: its state is FAILURE with
    the type "Ignored", `get()` raises TaskFailed, and chains and chords end.

    Args:
        reason: kept with the state.
    """

    def __init__(self, reason: object = "") -> None:
        self.reason = reason
        super().__init__(f"ignored: {reason}" if str(reason) else "ignored")


class BatchFailed(MachineryError):
    """Raised by a batch task: these calls have failed, and the others have succeeded.

    Attributes:
        errors: by the place of the call in the list. It fails, or is retried, as if it was alone
            and had raised this.
        results: as the function would return them; those of failed calls are ignored.
    """

    def __init__(
        self, errors: Mapping[int, BaseException], results: Sequence[Any] | None = None
    ) -> None:
        self.errors: dict[int, BaseException] = dict(errors)
        self.results = results
        told = "; ".join(f"{place}: {type(one).__name__}" for place, one in self.errors.items())
        super().__init__(f"{len(self.errors)} calls of the batch failed: {told or 'none'}")


class StepFailed(MachineryError):
    """A step of the task raised, in this run (then that is its `__cause__`) or in an earlier one.

    Attributes:
        step: its name; the second one of a name ends in "#2".
        error, error_type: text of what it raised, and the qualified name of that class.
    """

    def __init__(self, step: str, error: str, error_type: str = "") -> None:
        self.step = step
        self.error = error
        self.error_type = error_type
        kind = f"{error_type}: " if error_type else ""
        super().__init__(f"step {step!r} failed: {kind}{error}")


class StepRefused(MachineryError):
    """A step cannot be made, or its result not be kept: the task fails for good.

    It fails also if it catches this: run again, it would repeat what the step has done.
    """


class StepLost(MachineryError):
    """The delivery of this run is another worker's by now, or is over: nothing of it is kept."""


class SignalRefused(MachineryError):
    """A signal was not given to its task: that has ended, is not known, or has too many."""

    permanent = True


class SignalTimeout(MachineryError):
    """`Context.wait_for`: the signal did not come in time."""


class Suspended(BaseException):
    """Ends the run of a task that sleeps or waits. The next goes on behind its checkpoints.

    Let it pass: a run that catches it ends all the same, and makes no further step.

    Attributes:
        until: when the task goes on, at the latest; None: not before the signal comes.
        waits: for a signal.
    """

    def __init__(self, text: str, until: dt.datetime | None, *, waits: bool = False) -> None:
        self.until = until
        self.waits = waits
        super().__init__(text)


class TimeLimitExceeded(MachineryError):
    """The task ran past its time limit; also raised inside it, so that it can clean up."""


class WorkerLost(MachineryError):
    """The process that ran the task ended before the task did; the text says how."""
