"""Steps of a run: each is made once, and its end is read ever after.

    step ──► kept? ──yes──► what was kept
               │ no
               ▼
        the function ──raises──► StepFailed, kept with a later step if the task goes on
               │
               ▼
        kept, if the delivery is still ours ──► what was kept

docs/explanation/durable-functions.md has the crash points. Which of several steps of one name is
which is said by the order of their calls, so all of them must come from one thread or asyncio task.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, NoReturn, cast
from uuid import NAMESPACE_OID, uuid5

from machinery_py.bounds import CHECKPOINT_BYTES, CHECKPOINTS
from machinery_py.call_threads import in_thread
from machinery_py.clock import LONGEST, UTC, Seconds, micros, seconds_of
from machinery_py.errors import (
    ArgumentError,
    Ignore,
    MachineryError,
    NameRefused,
    NoRetry,
    Reject,
    Replace,
    Retry,
    RetryTaskLater,
    SignalTimeout,
    StepFailed,
    StepLost,
    StepRefused,
    Suspended,
    TaskFailed,
    TimeLimitExceeded,
    Unsupported,
    WorkflowError,
    for_good,
)
from machinery_py.names import check_step, is_made
from machinery_py.registry.task import Task
from machinery_py.tasks.checkpoints import Checkpoint, digest_of, generation_of
from machinery_py.tasks.context import STEP, Context
from machinery_py.tasks.mailboxes import (
    CHILD,
    DEADLINE,
    WAIT,
    Wanted,
    read_in,
    result_signal,
    waits_for,
)
from machinery_py.tasks.plans import group_label
from machinery_py.tasks.signature import Step
from machinery_py.tasks.workflow import result_value
from machinery_py.texts import cut, get_logger
from machinery_py.wire.states import decode_results, encode_results
from machinery_py.wire.steps import pack_step, task_names
from machinery_py.worker.running.hooks import text_of, type_name_of
from machinery_py.worker.running.keeping import StepKeeper, StoreKeeper
from machinery_py.worker.running.step_calls import (
    SendCall,
    StepCall,
    WorkflowCall,
    arguments_of,
    call_of,
    problem_of,
)
from machinery_py.worker.running.step_transactions import StepRaced, StepTransaction

logger = get_logger(__name__)

INTERRUPTIBLE = True  # calls user code and takes no lock, see worker/running/executors.py

#: What a step's function raises to end the run in its own way; it comes as it is.
_OF_THE_RUN = (
    Ignore,
    NoRetry,
    Reject,
    Replace,
    Retry,
    RetryTaskLater,
    StepLost,
    StepRefused,
    TimeLimitExceeded,
)


SLEEP = "sleep"  # name of the steps that sleep
TIMED_OUT = "(timeout)"  # in place of an error type: what it waited for did not come
MAX_LABEL = 150  # bytes of the tasks' names in the name of a step that waits for them
NO_ARGS: Mapping[str, Any] = {}


class _StepCall:
    """One call of `step`. `caller`: the thread or asyncio task that made it."""

    __slots__ = ("args", "caller", "digest", "function", "kwargs", "name", "value_of")

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        caller: object,
    ) -> None:
        self.name = name
        self.function = function
        self.args, self.kwargs = args, kwargs
        self.caller = caller
        self.digest = digest_of(args, kwargs)
        self.value_of: StepCall = call_of(function)


class _Wait(NamedTuple):
    """One call of `wait_for`.

    Attributes:
        name: of the signal.
        end: returns its deadline; None: it has none.
        workflow: whose result it is; None: of none.
        child: UUID of its last task.
    """

    name: str
    step: _StepCall
    end: Callable[[], dt.datetime] | None
    workflow: Step[Any] | None = None
    child: str = ""

    @property
    def deadline(self) -> str:
        """Name of the step that keeps when it ends."""
        return f"{DEADLINE}{self.name if self.workflow is None else self.step.name.split('#')[0]}"


def _any() -> Any: ...


class Checkpoints:
    """The steps of one run of a task. Any thread of the task may call any method.

    Attributes:
        broken: why no further step is made, and the run cannot succeed.
    """

    def __init__(
        self,
        context: Context,
        keeper: StepKeeper,
        *,
        now: Callable[[], dt.datetime],
        find: Callable[[str], Task[..., Any] | None],
    ) -> None:
        self._context = context
        self._keeper = keeper
        self._now = now
        self._find = find  # a task by its name
        self._kept: dict[str, Checkpoint] | None = None  # read at the first step
        self._counts: dict[str, itertools.count[int]] = {}
        self._callers: dict[str, object] = {}
        # Steps that have raised: by name, with their callers; and those of which the task went on.
        self._failed: dict[str, tuple[Checkpoint, object]] = {}
        self._waits_for: str = ""  # a signal; "": it does not
        self._caught: dict[str, Checkpoint] = {}
        self.broken: MachineryError | Suspended | None = None

    def call(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        within: bool = False,
    ) -> Any:
        """Make a step; `within` a transaction, which keeps its checkpoint as well."""
        self._check_own(name)
        return self._call(name, function, args, kwargs, within=within)

    def _call(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = NO_ARGS,
        *,
        within: bool = False,
    ) -> Any:
        step = self._begin(name, function, args, kwargs)
        if step.value_of.is_async:
            raise self._break(
                f"step {name!r}: {step.value_of.name} is a coroutine function (await step_async)"
            )
        kept = self._found(step, self._read())
        if kept is None:
            self._check_room(step)
            kept = self._make_within(step) if within else self._make(step)
        return self._value(step, kept)

    def _make(self, step: _StepCall, transaction: StepTransaction | None = None) -> Checkpoint:
        """Call the function, and keep what it returned."""
        token = STEP.set(self._key(step))
        try:
            with contextlib.nullcontext() if transaction is None else transaction.entered():
                value = step.function(*step.args, **step.kwargs)
        except Exception as error:
            if transaction is not None:
                transaction.check_race(error)
            self._raise_failed(step, error)
        finally:
            STEP.reset(token)
        new = self._checkpoint(step, value)
        if transaction is None:
            return self._keep(step, new, self._keeper)
        try:
            return self._keep(step, new, transaction)
        except (MachineryError, StepRaced):
            raise
        except Exception as error:  # the server refuses the commit
            self._raise_failed(step, error)

    def _make_within(self, step: _StepCall) -> Checkpoint:
        """Make it in a transaction; once more if that was rolled back through no fault of it."""
        for tries in itertools.count():
            self._context.check_time()
            with contextlib.closing(self._begin_transaction(step, tries)) as transaction:
                try:
                    return self._make(step, transaction)
                except StepRaced:
                    continue
        raise AssertionError

    def _begin_transaction(self, step: _StepCall, tries: int) -> StepTransaction:
        try:
            if not isinstance(self._keeper, StoreKeeper):
                raise Unsupported("the task runs in a process, and its worker has the delivery")
            return StepTransaction(self._keeper, tries=tries)
        except Unsupported as error:
            text = (
                f"step {step.name!r} with transaction=True needs broker and results in one "
                f"postgresql:// URL, and a thread: {error}"
            )
            self.broken = refused = for_good(Unsupported(text))
            raise refused from None

    def call_async(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Coroutine[Any, Any, Any]:
        self._check_own(name)
        return self._call_async(name, function, args, kwargs)

    def _call_async(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = NO_ARGS,
    ) -> Coroutine[Any, Any, Any]:
        step = self._begin(name, function, args, kwargs)
        if isinstance(function, FunctionType) and not step.value_of.is_async:
            raise self._break(
                f"step {name!r}: {step.value_of.name} is no coroutine function (call step)"
            )
        return self._made(step)

    async def _made(self, step: _StepCall) -> Any:
        rows = self._kept
        kept = self._found(step, await in_thread(self._read) if rows is None else rows)
        if kept is None:
            self._check_room(step)
            token = STEP.set(self._key(step))
            try:
                value = await step.function(*step.args, **step.kwargs)
            except Exception as error:
                self._raise_failed(step, error)
            finally:
                STEP.reset(token)
            new = self._checkpoint(step, value)
            keep = functools.partial(self._keep, step, new, self._keeper)
            kept = await in_thread(keep, goes_on=True)
        return self._value(step, kept)

    # Sleep: a step that returns when it ends, and the end of the run if that is later

    def sleep(self, length: Seconds | dt.datetime) -> None:
        self._suspend_until(self._call(SLEEP, self._end_of(length)))

    def sleep_async(self, length: Seconds | dt.datetime) -> Coroutine[Any, Any, None]:
        moment = self._end_of(length)

        async def until() -> dt.datetime:
            return moment()

        return self._sleep_async(self._call_async(SLEEP, until))

    async def _sleep_async(self, step: Coroutine[Any, Any, dt.datetime]) -> None:
        self._suspend_until(await step)

    def _end_of(self, length: Seconds | dt.datetime) -> Callable[[], dt.datetime]:
        """Return a step's function that returns the end of such a sleep, which is set by now."""
        now = self._now().astimezone(UTC)
        latest = now + dt.timedelta(seconds=LONGEST)
        if not isinstance(length, dt.datetime):
            seconds = min(LONGEST, seconds_of("length", length))
            moment = now + dt.timedelta(seconds=seconds)
        elif length.tzinfo is None:
            raise ValueError(f"length: found {length!r} (expected a moment with a time zone)")
        else:
            moment = min(max(length, now), latest).astimezone(UTC)

        def until() -> dt.datetime:
            return moment

        return until

    # Waiting: a step whose result is the signal, or that it did not come

    def wait_for(self, what: str | Step[Any], timeout: Seconds | None) -> Any:
        wait = self._begin_wait(what, timeout)
        try:
            until = None if wait.end is None else self._call(wait.deadline, wait.end)
            kept = self._found(wait.step, self._read())
            if kept is None:
                kept = self._keep(wait.step, self._received(wait, until), self._keeper)
        finally:
            self._waits_for = ""
        return self._signal(wait, kept)

    def wait_for_async(
        self, what: str | Step[Any], timeout: Seconds | None
    ) -> Coroutine[Any, Any, Any]:
        wait, deadline = self._begin_wait(what, timeout), None
        if (moment := wait.end) is not None:

            async def end() -> dt.datetime:
                return moment()

            deadline = self._call_async(wait.deadline, end)
        return self._wait_for_async(wait, deadline)

    async def _wait_for_async(
        self, wait: _Wait, deadline: Coroutine[Any, Any, dt.datetime] | None
    ) -> Any:
        try:
            until = None if deadline is None else await deadline
            rows = self._kept
            kept = self._found(wait.step, await in_thread(self._read) if rows is None else rows)
            if kept is None:
                new = await in_thread(functools.partial(self._received, wait, until))
                kept = await in_thread(
                    functools.partial(self._keep, wait.step, new, self._keeper), goes_on=True
                )
        finally:
            self._waits_for = ""
        return self._signal(wait, kept)

    def _begin_wait(self, what: str | Step[Any], timeout: Seconds | None) -> _Wait:
        if isinstance(what, str):
            try:
                check_step(what)
            except NameRefused as error:
                raise self._break(str(error)) from None
        if self._waits_for:
            raise self._break(
                f"wait_for({what!r}) beside wait_for({self._waits_for}): a task waits for one "
                "thing at a time (wait for one signal, and say in its value which one it is; for "
                "the results of several tasks wait for a group of them)"
            )
        end = None if timeout is None else self._end_of(timeout)
        if isinstance(what, str):
            wait = _Wait(what, self._begin(f"{WAIT}{what}", _any, (), {}), end)
        else:
            wait = self._begin_result(what, end)
        self._waits_for = repr(what)
        return wait

    def _begin_result(self, workflow: Step[Any], end: Callable[[], dt.datetime] | None) -> _Wait:
        name = group_label(task_names(workflow))
        if text := problem_of(workflow):
            raise self._break(f"wait_for({name!r}): {text}")
        label = cut(name.replace("#", "-"), MAX_LABEL)
        step = self._begin(f"{CHILD}{label}", _any, arguments_of(workflow), {})
        step.value_of = WorkflowCall(workflow, self._find)
        generation = generation_of(self._context.signature)
        child = f"task_{uuid5(NAMESPACE_OID, self._key(step))}"
        return _Wait(result_signal(generation, step.name), step, end, workflow, child)

    def _received(self, wait: _Wait, until: dt.datetime | None) -> Checkpoint:
        """Return the checkpoint of a wait that is over.

        Raises:
            Suspended: it is not.
        """
        self._check_room(wait.step)
        try:
            workflow = b"" if wait.workflow is None else bytes(pack_step(wait.workflow))
        except (ArgumentError, WorkflowError) as unsent:
            raise self._break(f"{wait.step.name} cannot be had: {unsent}") from None
        wanted = Wanted(
            name=wait.name,
            read=read_in(self._kept or {}, generation_of(self._context.signature)),
            until=0 if until is None else micros(until),
            waits=until is None or not self._has_ended(wait, until),
            child=wait.child,
            workflow=workflow,
        )
        received = self._keeper.receive(wanted)
        if received.waits:
            self.broken = error = Suspended(waits_for(wait.name, until), until, waits=True)
            raise error
        if received.failed is not None:
            text, kind = received.failed
            return Checkpoint(digest=wait.step.digest, failed=True, error=text, error_type=kind)
        if received.results is None:
            what = f"the {wait.step.name}" if wait.child else f"signal {wait.name!r}"
            text = f"{what} did not come in time"
            return Checkpoint(
                digest=wait.step.digest, failed=True, error=text, error_type=TIMED_OUT
            )
        self._check_size(wait.step, received.results)
        return Checkpoint(digest=wait.step.digest, results=received.results)

    def _signal(self, wait: _Wait, kept: Checkpoint) -> Any:
        if kept.failed and wait.child and kept.error_type != TIMED_OUT:
            # Kept is kept: a further try of this task would read the same.
            raise for_good(
                TaskFailed(
                    wait.child,
                    wait.step.name.removeprefix(CHILD),
                    kept.error,
                    error_type=kept.error_type,
                )
            )
        if kept.failed:
            raise SignalTimeout(kept.error)
        return self._value(wait.step, kept)

    def _has_come(self, moment: dt.datetime) -> bool:
        """Return whether it is past, or the task was delivered for it."""
        eta = self._context.eta
        return moment <= self._now() or (eta is not None and eta >= moment)

    def _has_ended(self, wait: _Wait, until: dt.datetime) -> bool:
        """Return whether the time of a wait is up; not before what it waits for was sent."""
        eta = self._context.eta
        return self._has_come(until) if not wait.child else eta is not None and eta >= until

    def _suspend_until(self, moment: dt.datetime) -> None:
        """End the run, unless the moment has come, or the task was delivered for it."""
        if not self._has_come(moment):
            self.broken = error = Suspended(f"sleeps until {moment:%Y-%m-%d %H:%M:%S} UTC", moment)
            raise error

    # Before the call

    def _check_own(self, name: str) -> None:
        if name == SLEEP or name.startswith((WAIT, DEADLINE, CHILD)):
            raise self._break(
                f"step {name!r} is named like those of sleep and wait_for (choose another name)"
            )

    def _begin(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> _StepCall:
        """Number a step, in the order of the calls."""
        if self.broken is not None:
            raise self.broken
        self._context.check_time()
        if STEP.get():
            raise self._break(f"step {name!r} inside of another step (make one after the other)")
        try:
            check_step(name)
        except NameRefused as error:
            raise self._break(str(error)) from None
        caller = _caller()
        number = next(self._counts.setdefault(name, itertools.count(1)))
        if self._callers.setdefault(name, caller) is not caller:
            raise self._break(
                f"step {name!r} is made by several threads or asyncio tasks, so that which of them "
                "is the first is not sure (give each a name of its own, or call step_async for all "
                "of them before you await one)"
            )
        for failed, (row, its_caller) in list(self._failed.items()):
            if its_caller is caller:  # which has caught it, and goes on
                self._caught[failed] = row
                del self._failed[failed]
        step = _StepCall(
            name if number == 1 else f"{name}#{number}", function, args, kwargs, caller
        )
        if isinstance(step.value_of, SendCall):
            if not step.value_of.is_known:
                raise self._break(
                    f"step {name!r}: what {step.value_of.name} returns cannot be kept (send it in "
                    "a function that returns its UUID, or wait_for it)"
                )
            # A UUID that its user has chosen may be that of several tasks.
            if is_made(self._context.uuid):
                step.function = step.value_of.once(self._key(step))
        return step

    def _read(self) -> dict[str, Checkpoint]:
        rows = self._kept
        if rows is None:
            rows = self._keeper.read()
            if self._kept is not None:  # another step beside this one was faster
                return self._kept
            self._kept = rows
        return rows

    def _found(self, step: _StepCall, rows: Mapping[str, Checkpoint]) -> Checkpoint | None:
        """Return what was kept of the step; its arguments must be the same."""
        kept = rows.get(step.name)
        if kept is None or kept.digest == step.digest:
            return kept
        if "#" in step.name:
            raise self._break(
                f"step {step.name!r} has other arguments than in the run before: its place among "
                "the steps of this name has changed (give each of them a name of its own)"
            )
        logger.warning(
            "step %r of task %s has other arguments than in the run before; what it returned then "
            "is used",
            step.name,
            self._context.uuid,
            extra={"task_uuid": self._context.uuid},
        )
        return kept

    def _check_room(self, step: _StepCall) -> None:
        if len(self._kept or ()) + len(self._caught) >= CHECKPOINTS:
            raise self._break(
                f"step {step.name!r}: the task has {CHECKPOINTS:,} checkpoints, the most that one "
                "may have (raise Replace with its next part)"
            )

    def _key(self, step: _StepCall) -> str:
        return f"{self._context.uuid}:{generation_of(self._context.signature)}:{step.name}"

    # After it

    def _raise_failed(self, step: _StepCall, error: Exception) -> NoReturn:
        if isinstance(error, _OF_THE_RUN):
            raise error
        text, kind = text_of(error), type_name_of(error)
        if _caller() is step.caller:  # else nobody knows who catches it
            row = Checkpoint(digest=step.digest, failed=True, error=text, error_type=kind)
            self._failed[step.name] = row, step.caller
        raise StepFailed(step.name, text, kind) from error

    def _checkpoint(self, step: _StepCall, value: Any) -> Checkpoint:
        try:
            results = encode_results(step.value_of.results(value))
        except ArgumentError as error:
            raise self._break(
                f"step {step.name!r}: what it returned cannot be kept: {error}"
            ) from None
        self._check_size(step, results)
        return Checkpoint(digest=step.digest, results=results)

    def _check_size(self, step: _StepCall, results: bytes) -> None:
        rows = (*(self._kept or {}).values(), *self._caught.values())
        size = len(results) + sum(len(row.results) + len(row.error) for row in rows)
        if size > CHECKPOINT_BYTES:
            raise self._break(
                f"step {step.name!r}: it returned {len(results):,} bytes, and all checkpoints of "
                f"the task would have {size:,}, more than {CHECKPOINT_BYTES:,} (store it elsewhere "
                "and return where)"
            )

    def _keep(
        self, step: _StepCall, new: Checkpoint, keeper: StepKeeper | StepTransaction
    ) -> Checkpoint:
        """Keep a checkpoint, with failures that were caught; return what is stored of it then."""
        rows = self._kept if self._kept is not None else {}
        while True:
            more = {name: row for name, row in self._caught.items() if name not in rows}
            wanted = {**more, step.name: new}
            try:
                there = keeper.keep(wanted)
            except MachineryError as error:
                self.broken = error  # it may have been kept: no later step without it
                raise
            rows.update(there or wanted)
            if step.name in rows:
                return rows[step.name]

    def _value(self, step: _StepCall, kept: Checkpoint) -> Any:
        if kept.failed:
            raise StepFailed(step.name, kept.error, kept.error_type)
        try:
            return step.value_of.result(result_value(decode_results(kept.results)))
        except (ArgumentError, MachineryError) as error:
            raise self._break(
                f"step {step.name!r}: what was kept is not what it returns now: {error}"
            ) from None

    def _break(self, text: str) -> StepRefused:
        self.broken = error = StepRefused(text)
        return error


def _caller() -> object:
    """Return the asyncio task that runs here, or the thread."""
    # Another thread may import it at this moment.
    current_task = getattr(sys.modules.get("asyncio"), "current_task", None)
    if current_task is not None:
        with contextlib.suppress(RuntimeError):  # no loop runs here
            if (task := current_task()) is not None:
                return cast(object, task)
    return threading.current_thread()
