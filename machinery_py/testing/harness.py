"""A Server under test: memory stores, a manual clock, and tasks that run when the test says so.

with Harness(server) as machinery:          the pytest fixture `machinery` does this
    signup("ada@example.com")
    machinery.assert_sent("send_welcome", "ada@example.com")
    machinery.drain()
"""

from __future__ import annotations

import contextlib
import datetime as dt
import inspect
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

import msgspec

from machinery_py.clock import SYSTEM_CLOCK, UTC, Clock, Seconds, seconds_of
from machinery_py.config.config import Config
from machinery_py.errors import ArgumentError, TaskFailed, nearest
from machinery_py.events import TaskSent
from machinery_py.registry.outcomes import IGNORED
from machinery_py.registry.task import Task
from machinery_py.results.async_results import AsyncResult
from machinery_py.results.waiter import AsyncWaiters
from machinery_py.schedules.scheduler import Scheduler
from machinery_py.server import Server
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.tasks.states import State, TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.values.values import to_python
from machinery_py.wire.signatures import decode_signature, encode_signature
from machinery_py.worker.inline import Inline
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.worker import Worker

LEAD = dt.timedelta(seconds=1)  # lead of the harness's clock over the machine's at its start
WORKER_THREADS = 4
WORKER_PATIENCE = 5.0  # seconds that running tasks get at the end of a test
SHOWN = 20  # calls that an error text lists

_numbers = itertools.count(1)


class _Clock(ManualClock):
    """Clock whose date stands still.

    Its monotonic time also runs: a `get(timeout=5)` without a result ends after 5 s.
    """

    def __init__(self) -> None:
        # The code under test may compute an ETA from datetime.now(): with the lead, that ETA is due
        # after `advance` by the same length.
        super().__init__(dt.datetime.now(UTC) + LEAD)
        self._made = time.monotonic()

    def monotonic(self) -> float:
        return super().monotonic() + time.monotonic() - self._made


class Harness:
    """Server under test. No task runs and no time passes by itself. Belongs to one thread.

    Use it in a `with` block: inside, the server uses memory stores and `clock`; after it, its own
    again, also after an exception. Calls go through the wire format, so a value that cannot be sent
    fails here, too.

    Attributes:
        server: the server under test.
        clock: the clock of `delay`, `eta`, `expires`, retries and the expiry of results; starts
            near the real time.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.clock: ManualClock = _Clock()
        self._sent: list[Signature[Any]] = []
        self._results: dict[str, Any] = {}
        self._inline = Inline(server.app, name="harness")
        self._scheduler = Scheduler(server.app, server.declared)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(swapped(self.server, self.clock))
        self._open.callback(self.server.events.subscribe(TaskSent, self._on_sent))
        self._scheduler = Scheduler(self.server.app, self.server.declared)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    # Running

    def drain(self, *, raise_failures: bool = True) -> int:
        """Run due tasks, and what follows from them, in this thread; return the number of runs.

        Retries and delayed tasks that are due later are not run: see `advance`.

        Raises:
            TaskFailed: of the first task that failed for good, from its original exception. All
                due tasks have run. A task that raised Ignore has not failed.
        """
        done: list[Execution] = []
        while ran := self._inline.drain():
            done.extend(ran)
        failed: list[tuple[TaskState, Exception | None]] = []
        for execution in done:
            state = _state_of(execution)
            if state is not None and state.error_type == IGNORED:
                continue  # it asked that nobody looks
            if state is not None and state.state is State.FAILURE:
                failed.append((state, execution.error))
            elif state is not None and state.state is State.SUCCESS:
                self._results[state.task_uuid] = self.server.result(state.task_uuid).touch()
        if failed and raise_failures:
            raise _failure([state for state, _ in failed]) from failed[0][1]
        return sum(execution.started_at is not None for execution in done)

    def advance(self, seconds: Seconds = 0.0, **more: float) -> None:
        """Move the clock: `advance(90)`, `advance(timedelta(hours=1))`, `advance(hours=1)`.

        Runs no task.

        Sends the ticks of schedules, each at its time.

        Raises:
            ValueError: the length is negative.
        """
        length = dt.timedelta(seconds=seconds_of("seconds", seconds, least=-math.inf), **more)
        end = self.clock.now() + length
        while (tick := self._next_tick()) is not None and tick <= end:
            self.clock.advance(max(0.0, (tick - self.clock.now()).total_seconds()))
            self._scheduler.refresh()
            self._scheduler.step()
        self.clock.advance((end - self.clock.now()).total_seconds())
        self.server.app.store.tend()

    def _next_tick(self) -> dt.datetime | None:
        self._scheduler.refresh()
        return self._scheduler.next_due

    # Inspection

    @property
    def sent(self) -> list[Signature[Any]]:
        """Signatures sent since the start, oldest first.

        These are sent by the test, by tasks, and as callbacks; no retries.

        Signatures are as a worker would get them; the value of each Arg is the Python value.
        """
        return [one.replace(args=tuple(map(_decoded, one.args))) for one in self._sent]

    @property
    def results(self) -> dict[str, Any]:
        """Results by UUID, of the tasks that `drain` ran and that succeeded, in order of ending."""
        return dict(self._results)

    def state(self, task: str | AsyncResult[Any]) -> TaskState:
        """Return the state of a task, by its UUID or result.

        Raises:
            StateNotFound: it expired, or was never sent.
        """
        return self.server.backend.get_state(task if isinstance(task, str) else task.uuid)

    def clear(self) -> None:
        """Forget the calls and results so far. Waiting tasks stay."""
        self._sent.clear()
        self._results.clear()

    def assert_sent(self, name: str | Task[..., Any], *args: Any, **kwargs: Any) -> Signature[Any]:
        """Check that a task was sent, and return the first such call.

        Without arguments any call of the task matches. With arguments they must equal those of the
        call, defaults included, by position or by name.

        Raises:
            AssertionError: it was not; the text lists what was sent.
        """
        name = _name_of(name)
        found = self._find(name, args, kwargs)
        if found:
            return found[0]
        hint = (
            ""
            if any(one.name == name for one in self._sent)
            else nearest(name, {one.name for one in self._sent})
        )
        raise AssertionError(f"{_shown(name, args, kwargs)} was not sent{hint}\n{self._listing()}")

    def assert_not_sent(self, name: str | Task[..., Any], *args: Any, **kwargs: Any) -> None:
        """Check that no matching call was sent; see `assert_sent`.

        Raises:
            AssertionError: one was; the text lists what was sent.
        """
        name = _name_of(name)
        found = self._find(name, args, kwargs)
        if found:
            raise AssertionError(
                f"{_shown(name, args, kwargs)} was sent, {len(found)} times\n{self._listing()}"
            )

    # Private

    def _on_sent(self, event: TaskSent) -> None:
        self._sent.append(_through_wire(event.signature))

    def _find(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Signature[Any]]:
        calls = [one for one in self._sent if one.name == name]
        if not args and not kwargs:
            return calls
        task = self.server.app.registry.find(name)
        try:
            known = task.call.arguments(args, kwargs) if task is not None else None
        except (
            ArgumentError
        ):  # a call that would fail can be sent as a signature made by hand, and asserted
            known = None
        arguments = Signature.of(name, *args, **kwargs).args if known is None else known
        wanted = _one_form(task, _through_wire(Signature(name=name, args=arguments)))
        return [one for one in calls if _one_form(task, one) == wanted]

    def _listing(self) -> str:
        if not self._sent:
            return "nothing was sent"
        lines = [f"  {_shown(one.name, *_call_of(one))}" for one in self._sent[:SHOWN]]
        more = len(self._sent) - SHOWN
        return "\n".join(["sent:", *lines, *([f"  and {more} more"] if more > 0 else [])])


@contextlib.contextmanager
def swapped(server: Server, clock: Clock = SYSTEM_CLOCK) -> Iterator[Server]:
    """Let the server use new memory stores and this clock; restore its own at the end.

    They are restored after an exception, too.

    `server.close()` inside does not restore the real stores.
    """
    app = server.app
    url = f"memory://testing-{next(_numbers)}"
    waiters = _exchange_waiters(server, None)  # its listener is the real backend's
    before = app.swap(_memory_config(app.config, url), clock)
    stores = app.stores  # kept open, so that opening this name again returns this store
    try:
        yield server
    finally:
        ours = _exchange_waiters(server, waiters)
        app.swap(*before)
        if ours is not None:
            ours.close()
        stores.close()


def _exchange_waiters(server: Server, waiters: AsyncWaiters | None) -> AsyncWaiters | None:
    before, server._waiters = server._waiters, waiters
    return before


def _memory_config(config: Config, url: str) -> Config:
    return config.replace(
        broker=url,
        result_backend="",
        lock="",
        multiple_broker_separator="",
        require_server=False,
        strict_durability=False,
    )


@contextlib.contextmanager
def running_worker(server: Server) -> Iterator[Worker]:
    """Start a worker on memory stores, in threads and real time: the fixture `machinery_worker`.

    It serves the configured queues and those of registered tasks.
    """
    with swapped(server):
        tasks = map(server.app.registry.get, server.get_registered_task_names())
        queues = dict.fromkeys(
            [
                server.config.default_queue,
                *server.config.worker_queues,
                *filter(None, (task.settings.queue for task in tasks)),
            ]
        )
        worker = server.new_worker(
            "testing", WORKER_THREADS, queues=tuple(queues), shutdown_timeout=WORKER_PATIENCE
        )
        with worker:
            yield worker


def _state_of(execution: Execution) -> TaskState | None:
    """Return the final state of the execution."""
    states = execution.settlement.states if execution.settlement is not None else ()
    return states[0] if states else None


def _failure(states: Sequence[TaskState]) -> TaskFailed:
    first = states[0]
    failure = TaskFailed(
        first.task_uuid,
        first.task_name,
        first.error,
        error_type=first.error_type,
        traceback=first.traceback,
    )
    for other in states[1:]:
        failure.add_note(f"task {other.task_name} {other.task_uuid} failed, too: {other.error}")
    return failure


def _name_of(task: str | Task[..., Any]) -> str:
    return task if isinstance(task, str) else task.name


def _through_wire(signature: Signature[Any]) -> Signature[Any]:
    return decode_signature(encode_signature(signature))


def _decoded(arg: Arg) -> Arg:
    try:
        return msgspec.structs.replace(arg, value=to_python(arg.type, arg.value))
    except ArgumentError:  # sent by hand, and wrong
        return arg


def _one_form(
    task: Task[..., Any] | None, signature: Signature[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments by position, with defaults, as the function gets them.

    The form is equal for equal calls.
    """
    if task is None:
        return _call_of(signature)
    try:
        values, named = task.call.values(signature.args)
        shape = inspect.signature(task.function)
        given = shape.replace(parameters=list(shape.parameters.values())[task.call.takes_context :])
        bound = given.bind(*values, **named)
    except (
        ArgumentError,
        TypeError,
        ValueError,
    ):  # arguments that do not fit, or a function in C without a signature
        return _call_of(signature)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _call_of(signature: Signature[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the decoded arguments of a signature as text of a call."""
    args = [_decoded(arg) for arg in signature.args]
    return tuple(arg.value for arg in args if not arg.name), {
        arg.name: arg.value for arg in args if arg.name
    }


def _shown(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    parts = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{name}({', '.join(parts)})"
