"""Context of a running task: what it can ask and say about itself."""

from __future__ import annotations

import contextlib
import contextvars
import datetime as dt
import math
import numbers
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from decimal import Decimal
from typing import Any, Final, ParamSpec, Protocol, TypeVar, overload

import msgspec

from machinery_py.clock import Seconds, seconds_of, timeout_of
from machinery_py.errors import ArgumentError, MachineryError, TimeLimitExceeded, Unsupported
from machinery_py.fences import Fence, local_fence
from machinery_py.tasks.signature import HEADER_FAILED, Signature, Step
from machinery_py.texts import quoted
from machinery_py.values.json_values import Failure, NeedsTags, pack, shown
from machinery_py.values.malformed import MALFORMED

INTERRUPTIBLE = True  # calls user code and takes no lock, see worker/running/executors.py

T = TypeVar("T")
P = ParamSpec("P")

PROGRESS_INTERVAL = 0.1  # seconds; more frequent progress is held back, except the last
MAX_NOTES = 4_096  # bytes of JSON, names and values

#: Called with what the task has reported: its progress, or None when it has noted something.
Report = Callable[[tuple[float, float] | None], None]

NO_STATE: Mapping[str, Any] = {}


class StepCaller(Protocol):
    """Steps of a run, see worker/running/checkpoints.py."""

    def call(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        /,
        *,
        within: bool = False,
    ) -> Any: ...
    def call_async(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        /,
    ) -> Coroutine[Any, Any, Any]: ...
    def sleep(self, length: Seconds | dt.datetime, /) -> None: ...
    def sleep_async(self, length: Seconds | dt.datetime, /) -> Coroutine[Any, Any, None]: ...
    def wait_for(self, what: str | Step[Any], timeout: Seconds | None, /) -> Any: ...
    def wait_for_async(
        self, what: str | Step[Any], timeout: Seconds | None, /
    ) -> Coroutine[Any, Any, Any]: ...


class StepWithOptions(Protocol):
    """A step whose options are given; it takes the function and its arguments."""

    def __call__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...


class SlotHolder(Protocol):
    """Run of a task, which lends its slot while it waits for other tasks."""

    @property
    def steps(self) -> StepCaller:
        """Return its steps. Raises Unsupported if this task can have none."""
        ...

    def wait_begins(self) -> bool:
        """Lend the slot. False: this thread has none; no `wait_ends` follows."""
        ...

    def wait_ends(self, *, at_once: bool) -> None:
        """Take a slot again. `at_once`: or go on without."""
        ...

    async def wait_ends_async(self, *, at_once: bool) -> None: ...


_encode = msgspec.json.Encoder().encode
_read_failed = msgspec.json.Decoder(tuple[str, str, str]).decode


class Context:
    """A running task, from the inside. Belongs to one run; may be used from any thread of it.

    Attributes:
        signature: as it came.
        queue: that it came from.
        worker: the name of the worker that runs it.
        fence: a number that grows with every run and every delivery of the task. Pass it to systems
            that can refuse an older one.
        state: what the app's lifespans have yielded in this process.
        noted: what `note` was given: names and values, each as JSON.
        handed_on: what `hand_on` was given.
        calls: of a batch, in the order of its list; else empty.
    """

    __slots__ = (
        "_cancelled",
        "_connection",
        "_delivery",
        "_last_report",
        "_report",
        "_run",
        "_time_is_up",
        "calls",
        "fence",
        "handed_on",
        "noted",
        "queue",
        "signature",
        "state",
        "worker",
    )

    def __init__(
        self,
        signature: Signature[Any],
        *,
        queue: str,
        delivery: int,
        worker: str,
        report: Report | None,
        fence: Fence | None = None,
        state: Mapping[str, Any] = NO_STATE,
        noted: dict[str, str] | None = None,
        handed_on: Mapping[str, str] = NO_STATE,
        run: SlotHolder | None = None,
        connection: object = None,
    ) -> None:
        self.signature: Signature[Any] = signature
        self._connection = connection
        self._run = run
        self.state: Mapping[str, Any] = state
        self.handed_on: Mapping[str, str] = handed_on
        self.queue: str = queue
        self._delivery = delivery
        self.fence: Fence = local_fence() if fence is None else fence
        self.worker: str = worker
        self._report = report
        self._cancelled = False
        self._time_is_up = False
        self._last_report = 0.0
        self.noted: dict[str, str] = {} if noted is None else noted
        self.calls: Sequence[Signature[Any]] = ()

    @property
    def uuid(self) -> str:
        """The same on every attempt: an idempotency key for what the task does outside."""
        return self.signature.uuid

    @property
    def name(self) -> str:
        return self.signature.name

    @property
    def attempt(self) -> int:
        """Number of this try: 1 for the first."""
        return self.signature.attempt

    @property
    def retries_left(self) -> int:
        return self.signature.retry_count

    @property
    def headers(self) -> Mapping[str, Any]:
        return self.signature.headers

    @property
    def eta(self) -> dt.datetime | None:
        return self.signature.eta

    @property
    def failed(self) -> Failure | None:
        """Return the task that failed, in an error callback; else None.

        Of a chord it is the member. None also where a Go worker sent the callback.
        """
        text = self.signature.headers.get(HEADER_FAILED)
        if text is None:
            return None
        try:
            name, uuid, error_type = _read_failed(text)
        except MALFORMED:  # no worker of ours has written it
            return None
        has_text = self.signature.args and not self.signature.is_fixed
        error = str(self.signature.args[0].value) if has_text else ""
        return Failure(task=name, uuid=uuid, error=error, error_type=error_type)

    @property
    def connection(self) -> Any:
        """The connection of psycopg in whose transaction the task, or this step of it, runs.

        Raises:
            Unsupported: neither has `transaction=True`, or the run is over.
        """
        connection = STEP_CONNECTION.get() or self._connection
        if connection is None:
            raise Unsupported(
                f"{self.name} runs in no transaction (@server.task(transaction=True), or "
                "task.step(name, transaction=True)(function, …))"
            )
        return connection

    @property
    def is_redelivery(self) -> bool:
        """Say whether this run may be a repeat: an earlier delivery ended without a verdict."""
        return self._delivery > 1

    @property
    def cancelled(self) -> bool:
        """Say whether the task must stop: it was revoked, lost its lease, or its time is up."""
        return self._cancelled

    def cancel(self, *, time_is_up: bool = False) -> None:
        """Ask the task to stop. It has to look at `cancelled`."""
        self._cancelled = True
        self._time_is_up = self._time_is_up or time_is_up

    def end(self) -> None:
        """Report nothing any more: the run is over."""
        self._report = self._run = self._connection = None

    def check_time(self) -> None:
        """
        Raises:
            TimeLimitExceeded: the time of the task is up.
        """
        if self._time_is_up:
            raise TimeLimitExceeded(f"task {self.name} {self.uuid}: its time limit is over")

    def progress(self, done: float, total: float) -> None:
        """Publish the progress as `result.get_state().progress`. Cheap enough for a loop.

        Raises:
            TypeError: one of them is no number.
            ValueError: one is NaN or infinite.
        """
        if type(done) is not float or type(total) is not float:
            done, total = _number("done", done), _number("total", total)
        if not (math.isfinite(done) and math.isfinite(total)):
            raise ValueError(f"progress of {done} of {total}: expected finite numbers")
        if self._report is None:
            return
        now = time.monotonic()
        if now - self._last_report >= PROGRESS_INTERVAL or done >= total:
            self._last_report = now
            self._report((done, total))

    @overload
    def step(self, name: str, /, *, transaction: bool) -> StepWithOptions: ...
    @overload
    def step(
        self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    def step(
        self, name: str, function: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call the function once, and return what it returned, now and in every later run.

        The result is stored before this returns: a checkpoint. If the worker is killed before that,
        the next run makes the step again: at least once, with the same `step_key`.

        Args:
            name: of the step. Steps of one name are counted in the order of their calls.
            transaction: an option, given before the function: `step("book", transaction=True)(book,
                7)`. On PostgreSQL: what the function writes on `current_task().connection` and
                sends is committed with the checkpoint, exactly once. It may be called again if
                that was rolled back.

        Raises:
            StepFailed: from what the function raised. Nothing is kept, and the task's retries
                decide. If the task catches it and makes another step, it is raised in later runs.
            StepRefused: there is no such step, or its result cannot be kept: the task fails.
            StepLost: this run is not the task's any more.
            Unsupported: neither these stores nor such a task can have steps.
        """
        if function is None:
            return self._step_with(name, **kwargs)
        return self._steps().call(name, function, args, kwargs)

    def _step_with(self, name: str, *, transaction: bool) -> StepWithOptions:
        def step(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            return self._steps().call(name, function, args, kwargs, within=transaction)

        return step

    def step_async(
        self,
        name: str,
        function: Callable[P, Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, T]:
        """`step` for coroutine functions. It is counted when it is called, not when awaited."""
        return self._steps().call_async(name, function, args, kwargs)

    def sleep(self, length: Seconds | dt.datetime) -> None:
        """Suspend the task for so long: it holds no slot, and its next run goes on behind this.

        The moment is set the first time, and kept as a checkpoint: the task sleeps as long as was
        said, however often workers restart meanwhile. What stands between steps runs again.

        Args:
            length: seconds, a timedelta, or an aware moment. One that is over is none, more than
                100 years are 100 years.

        Raises:
            Suspended: always, unless the time is up. Let it pass; `finally` and `with` blocks run.
            StepRefused, StepLost, Unsupported: as `step`.
        """
        length = _checked(length)
        self._steps().sleep(length)

    def sleep_async(self, length: Seconds | dt.datetime) -> Coroutine[Any, Any, None]:
        """`sleep` for coroutines."""
        length = _checked(length)
        return self._steps().sleep_async(length)

    @overload
    def wait_for(self, what: str, *, timeout: Seconds | None = None) -> Any: ...
    @overload
    def wait_for(self, what: Step[T], *, timeout: Seconds | None = None) -> T: ...
    def wait_for(self, what: str | Step[Any], *, timeout: Seconds | None = None) -> Any:
        """Return the next signal of this name, or the result of another task or workflow.

        Until that comes the task is suspended. It is kept as a checkpoint. Signals are kept in the
        order in which they come, also before the task waits for them; each `wait_for` gets the next
        one of its name.

        Args:
            what: the name of a signal; or a signature, chain or group, which is sent in the same
                step in which the task is suspended: once, in whatever run.
            timeout: seconds or a timedelta, from the first time on that this is reached; None: it
                waits without end. A task that was sent goes on.

        Raises:
            SignalTimeout: it did not come in time; so it is in every later run.
            TaskFailed: the other task has failed for good; the same.
            Suspended: it has not come yet. As `sleep`.
            StepRefused, StepLost, Unsupported: as `step`.
        """
        timeout, what = timeout_of(timeout), _awaitable(what)
        return self._steps().wait_for(what, timeout)

    @overload
    def wait_for_async(
        self, what: str, *, timeout: Seconds | None = None
    ) -> Coroutine[Any, Any, Any]: ...
    @overload
    def wait_for_async(
        self, what: Step[T], *, timeout: Seconds | None = None
    ) -> Coroutine[Any, Any, T]: ...
    def wait_for_async(
        self, what: str | Step[Any], *, timeout: Seconds | None = None
    ) -> Coroutine[Any, Any, Any]:
        """`wait_for` for coroutines."""
        timeout, what = timeout_of(timeout), _awaitable(what)
        return self._steps().wait_for_async(what, timeout)

    @property
    def step_key(self) -> str:
        """An idempotency key for what the step does outside: the same in every try of it.

        Raises:
            MachineryError: called outside of a step.
        """
        key = STEP.get()
        if not key:
            raise MachineryError("step_key was asked for outside of a step")
        return key

    def _steps(self) -> StepCaller:
        if self._run is None:
            raise MachineryError(f"{self.name} {self.uuid} makes no steps: no worker runs it")
        return self._run.steps

    def note(self, **facts: Any) -> None:
        """Publish facts of the task's own as `result.get_state().notes`, now and when it has ended.

        No checkpoint: what must be there in the next run is the result of a `step`.

        A fact replaces an earlier one of its name. A retry, or a new delivery after a crash, begins
        without any; the state shows those of the run before until this one notes something, or
        ends.

        Raises:
            ArgumentError: a value is not JSON; nothing was noted.
            ValueError: all facts together would take more than 4,096 bytes of JSON; the same.
        """
        new = {_as_json(name, name): _as_json(name, value) for name, value in facts.items()}
        size = _size({**self.noted, **new})
        if size > MAX_NOTES:
            raise ValueError(
                f"task {self.name} {self.uuid}: its notes would take {size:,} bytes of JSON, more "
                f"than {MAX_NOTES:,} (note an id or a place, and keep the rest elsewhere)"
            )
        self.noted.update(new)  # in one step: other threads of the task may note, too
        if new and self._report is not None:
            self._report(None)

    def hand_on(self, headers: Mapping[str, str]) -> None:
        """Let what follows this run have these headers. For handlers of `around_task`.

        What the task sends, and its callbacks, inherit them as they do those of the message, which
        these replace. Those that begin with `machinery_` go to a retry of the task alone. They
        reach `on_success`, `on_retry` and `on_failure`, also from a task process.
        """
        self.handed_on = {**self.handed_on, **{name: str(headers[name]) for name in headers}}

    def track(self, items: Iterable[T], total: float | None = None) -> Iterator[T]:
        """The items, one by one, with progress reported after each.

        Args:
            total: how many there are, if the items do not know it themselves.
        """
        if total is None:
            total = len(items) if isinstance(items, Sized) else 0
        for done, item in enumerate(items, 1):
            yield item
            self.progress(done, max(done, total))


def notes_json(noted: Mapping[str, str]) -> str:
    """Return what was noted as TaskState keeps it; other threads may note meanwhile."""
    if not noted:
        return ""
    return "{" + ",".join([f"{name}:{value}" for name, value in dict(noted).items()]) + "}"


def _checked(length: Seconds | dt.datetime) -> Seconds | dt.datetime:
    return length if isinstance(length, dt.datetime) else seconds_of("length", length)


def _awaitable(what: str | Step[T]) -> str | Step[T]:
    if isinstance(what, (str, Step)):
        return what
    raise TypeError(
        f"wait_for: found {what!r} (expected the name of a signal; or, for the result of another "
        "task, its signature, which this sends: wait_for(render.signature(7)))"
    )


def _number(what: str, value: object) -> float:
    """Return a number of any kind, as numpy's or a Fraction, as a float."""
    if isinstance(value, (numbers.Real, Decimal)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    raise TypeError(f"progress: {what} is {value!r} (expected a number)")


def _as_json(name: str, value: Any) -> str:
    try:
        return _encode(pack(value, 1, tags=False)).decode()
    except NeedsTags:
        text = f"{shown(value)} is not JSON (note its text, or a number)"
    except ArgumentError as error:
        text = str(error).removeprefix("cannot send ")
    raise ArgumentError(f"cannot note {quoted(name)}: {text}")


def _size(noted: Mapping[str, str]) -> int:
    return 1 + sum(len(f"{name}:{value},".encode()) for name, value in noted.items())


#: The task that runs here.
RUNNING: contextvars.ContextVar[Context | None] = contextvars.ContextVar(
    "machinery_task", default=None
)


#: The key of the step that runs here; "" outside of one.
STEP: contextvars.ContextVar[str] = contextvars.ContextVar("machinery_step", default="")

#: The connection of the step that runs here, if it has a transaction.
STEP_CONNECTION: contextvars.ContextVar[object] = contextvars.ContextVar(
    "machinery_step_connection", default=None
)

enter: Final = RUNNING.set
leave: Final = RUNNING.reset


@contextlib.contextmanager
def on_behalf_of(
    signature: Signature[Any],
    *,
    queue: str,
    worker: str = "",
    handed_on: Mapping[str, str] = NO_STATE,
) -> Iterator[None]:
    """Make the ended task current while its follow-ups are made and pass the pre-publish hook.

    It gets a context of its own: the time of the run may be up, and that must not stop the hook.
    """
    context = Context(
        signature, queue=queue, delivery=1, worker=worker, report=None, handed_on=handed_on
    )
    token = enter(context)
    try:
        yield
    finally:
        leave(token)


def current_task() -> Context:
    """Return the task that runs here.

    In the pre-publish hook this may also be a task that has ended and sends its callbacks or its
    retry.

    Raises:
        MachineryError: none does.
    """
    task = RUNNING.get()
    if task is None:
        raise MachineryError("current_task() was called outside a running task")
    return task


@contextlib.contextmanager
def waiting_for_tasks() -> Iterator[None]:
    """Lend the slot of the task that runs here, if one does, as the block waits for other tasks."""
    run = _lending()
    if run is None:
        yield
        return
    try:
        yield
    except BaseException:
        run.wait_ends(at_once=True)  # the time that it was to wait is over
        raise
    run.wait_ends(at_once=False)


@contextlib.asynccontextmanager
async def waiting_for_tasks_async() -> AsyncIterator[None]:
    """`waiting_for_tasks` for coroutines."""
    run = _lending()
    if run is None:
        yield
        return
    try:
        yield
    except BaseException:
        run.wait_ends(at_once=True)
        raise
    await run.wait_ends_async(at_once=False)


def _lending() -> SlotHolder | None:
    task = RUNNING.get()
    run = None if task is None else task._run
    return run if run is not None and run.wait_begins() else None


def check_time() -> None:
    """Raise if the time of the task is up. Called where this library may wait or take locks.

    There the worker does not interrupt a task from outside (worker/running/executors.py).

    Raises:
        TimeLimitExceeded: a task runs here, and its time is up.
    """
    task = RUNNING.get()
    if task is not None:
        task.check_time()
