"""Arg and Signature: Go Machinery's records of a call, in Python.

A Signature is a value: it never changes. `replace`, `then` and `catch` return new ones.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, NewType, Protocol, TypeVar, cast, overload

import msgspec
from msgspec.structs import force_setattr

from machinery_py.clock import Seconds
from machinery_py.errors import WorkflowError
from machinery_py.values.values import describe

R = TypeVar("R", covariant=True)
S = TypeVar("S")

# What we add to a message travels in Headers, as strings; Go keeps them.
HEADER_RUN = "machinery_run"  # how many runs ended before this one, retries of every kind
HEADER_ATTEMPT = "machinery_attempt"  # which try, 1 for the first; not counted by RetryTaskLater
HEADER_ATTEMPTS = "machinery_attempts"  # the tries before this one, see tasks/attempts.py
HEADER_POSTPONED = "machinery_postponed"  # how many runs ended in RetryTaskLater
HEADER_REJECTED = "machinery_rejected"  # how many runs ended in Reject(requeue=True)
HEADER_KEPT = "machinery_kept"  # checkpoints of the runs before, see tasks/checkpoints.py
HEADER_GENERATION = "machinery_generation"  # how often it was sent again from its start
HEADER_TIME_LIMIT = "machinery_time_limit"  # of this call, in seconds; "null": none
HEADER_KILL_AFTER = "machinery_kill_after"  # of this call, in seconds
HEADER_IGNORE_RESULT = "machinery_ignore_result"  # of this call: "true" or "false"
HEADER_RESULT_EXPIRES = "machinery_result_expires"  # of this call, in seconds; "null": the setting
HEADER_EXCLUSIVE = "machinery_exclusive"  # of this call: "wait" or "skip", in place of its task's
HEADER_EXCLUSIVE_KEY = "machinery_exclusive_key"  # of this call: as the option exclusive_key
HEADER_EXCLUSIVE_TIMEOUT = "machinery_exclusive_timeout"  # of this call, in seconds; "null": none
HEADER_EXPIRES = "machinery_expires"  # unix seconds; not started after that
HEADER_DELAY = "machinery_delay"  # of what is not sent yet: seconds from the sending to its ETA
HEADER_EXPIRES_IN = "machinery_expires_in"  # unsent: seconds from sending to expiry
HEADER_UNIQUE = "machinery_unique"  # hashed key of a unique task; "": none, whatever the task says
HEADER_UNIQUE_START = "machinery_unique_start"  # the key when the task starts: "free" or "keep"
HEADER_ON_DUPLICATE = "machinery_on_duplicate"  # for the sender: what to do when the key is held
HEADER_BLOCK = "machinery_block"  # unsent: seconds that its sender waits for room in the queue
HEADER_COLLECT = "machinery_collect"  # on a chord's callback: all results as one list
HEADER_REST = "machinery_rest"  # in a long chain: UUID of the record that has the steps behind it
HEADER_ROOT = "machinery_root"  # the workflow that it belongs to, or the task that began all of it
HEADER_PARENT = "machinery_parent"  # the task or group in front of it, which had it sent
HEADER_ORIGIN = "machinery_origin"  # the worker that sent it
HEADER_ON_FAILURE = "machinery_on_failure"  # on a chord's callback: of members; "skip", "collect"
HEADER_FIXED = "machinery_fixed"  # a step or callback that takes no results, and no error text
HEADER_CHUNK = "machinery_chunk"  # of many calls in one: how many arguments each has
HEADER_FAILED = "machinery_failed"  # on an error callback: name, UUID, error type of what failed
HEADER_LAST = "machinery_last"  # in a chain: the tasks that fail with this one, see `lasts_of`
HEADER_SCHEDULE = "machinery_schedule"  # the name of the schedule that sent it
HEADER_LOST = "machinery_lost"  # how many task processes were lost while they ran it
HEADER_LOST_HOW = "machinery_lost_how"  # what became of the last of them
HEADER_CLOCK = "machinery_clock"  # the logical clock of its sending, while events are on
HEADER_TICK = "machinery_tick"  # the time at which that was due
HEADER_TRIES = "machinery_tries"  # on a retry: trace contexts of the tries before, with blanks

# RetryCount of retries=None: until it works. Our workers do not count it down.
UNLIMITED = 2**31 - 1

RunNumber = NewType("RunNumber", int)  # of a task: how many of its runs ended before this one
FIRST_RUN = RunNumber(0)
AttemptNumber = NewType("AttemptNumber", int)  # of a task: which of its tries this is
FIRST_ATTEMPT = AttemptNumber(1)


class Arg(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One argument or result, under Go's type name.

    Attributes:
        type: one of Go's names (`int64`, `[]string`, …), or ours: `json` and `py` (see
            docs/reference/types.md).
        value: a JSON value; bytes for the byte types. From the wire it is unchecked until the task
            is called.
        name: ignored by Go; for us the name of a keyword-only parameter.
    """

    type: str
    value: Any
    name: str = ""

    @classmethod
    def of(cls, value: Any, *, name: str = "") -> Arg:
        """The value under the type that it has by nature.

        Raises:
            ArgumentError: it is nothing that can be sent.
        """
        type_name, wire_value = describe(value)
        return cls(type=type_name, value=wire_value, name=name)


class Checked(tuple[Arg, ...]):
    """Arguments that were held against the parameters of their task, and need not be again."""

    __slots__ = ()


class Result(Protocol[R]):
    """Result of `Signature.send`: see results.AsyncResult."""

    @property
    def uuid(self) -> str: ...
    def get(self, timeout: Seconds | None = None) -> R: ...
    def touch(self) -> R | None: ...
    def is_finished(self) -> bool: ...
    async def get_async(self, timeout: Seconds | None = None) -> R: ...
    def touch_async(self) -> Coroutine[Any, Any, R | None]: ...
    def is_finished_async(self) -> Coroutine[Any, Any, bool]: ...
    def __await__(self) -> Generator[Any, None, R]: ...


class ChainedResult(Result[R], Protocol[R]):
    """Result of `Chain.send`: see results.ChainResult."""

    @property
    def steps(self) -> Sequence[Result[Any]]: ...
    @property
    def workflow(self) -> str: ...


class Sender(Protocol):
    """The part of a Server that sends a signature or workflow."""

    def send(self, step: Step[Any]) -> Result[Any]: ...
    def send_async(self, step: Step[Any]) -> Coroutine[Any, Any, Result[Any]]: ...


class Step(Generic[R]):
    """A step of a chain: a Signature, a Group, a Chain."""

    __slots__ = ()
    is_group: ClassVar[bool] = False

    def __or__(self, other: Step[S]) -> Chain[S]:
        return Chain((self, other))


class Chain(Step[R]):
    """Steps that run one after the other, each result going to the end of the next one's arguments.

    A step may be a group: each member gets the result of the step before, and the step behind it
    gets the results of all members; if that is a group too, each of its members gets them all.

    Raises:
        WorkflowError: it has no step.
    """

    __slots__ = ("steps",)

    def __init__(self, steps: Sequence[Step[Any]]) -> None:
        flat = [
            inner
            for step in steps_of(steps)
            for inner in (step.steps if isinstance(step, Chain) else (step,))
        ]
        if not flat:
            raise WorkflowError("a chain needs at least one step: this one is empty")
        self.steps: tuple[Step[Any], ...] = tuple(flat)

    def then(self, *callbacks: Step[Any] | Iterable[Step[Any]]) -> Chain[R]:
        """With further callbacks for its success; each gets the result as its last argument.

        Raises:
            WorkflowError: one is no signature, chain or group.
        """
        last = cast("Chain[Any]", self.steps[-1])
        return Chain((*self.steps[:-1], last.then(*callbacks)))

    def catch(self, *callbacks: Step[Any] | Iterable[Step[Any]]) -> Chain[R]:
        """With further callbacks for its failure, sent once, whichever step fails.

        Each gets the error text as its first argument. Raises as `then`.
        """
        steps = [cast("Chain[Any]", step) for step in self.steps]
        # What fails in front of a group fails the group, and that the step behind it: so the last
        # group and all behind it are enough, and any step before would send them twice.
        groups = [at for at, step in enumerate(steps) if step.is_group and step.steps]
        behind = groups[-1] + 1 if groups else 0
        told = {at for at in range(behind, len(steps)) if not steps[at].is_group} or groups[-1:]
        return Chain([one.catch(*callbacks) if at in told else one for at, one in enumerate(steps)])

    def send(self) -> ChainedResult[R]:
        """Publish it through the Server whose tasks it is made of."""
        return cast("ChainedResult[R]", sender_of(self.steps).send(self))

    async def send_async(self) -> ChainedResult[R]:
        """`send` for coroutines."""
        return cast("ChainedResult[R]", await sender_of(self.steps).send_async(self))

    def __repr__(self) -> str:
        return " | ".join(repr(step) for step in self.steps)


def steps_of(given: Iterable[Any]) -> list[Step[Any]]:
    """The steps, each of which is one.

    Raises:
        WorkflowError: one is something else.
    """
    steps = list(given)
    for step in steps:
        if not isinstance(step, Step):
            name = getattr(step, "name", "")
            call = (
                f"; of a task: {name}.signature(…) or {name}.partial(…)"
                if name and hasattr(step, "signature")
                else ""
            )
            raise WorkflowError(
                f"{step!r} is no step of a workflow (expected a signature, chain or group{call})"
            )
    return steps


def callbacks_of(given: Iterable[Any]) -> Iterator[Step[Any]]:
    """Yield the callbacks, which may be given in lists. A chain or group is linked when it is sent.

    Raises:
        WorkflowError: one is no step.
    """
    for one in given:
        if isinstance(one, Iterable) and not isinstance(one, str | bytes):
            yield from callbacks_of(one)
        else:
            yield from steps_of([one])


def sender_of(steps: Sequence[Step[Any]]) -> Sender:
    """The Server of the first step that has one.

    Raises:
        WorkflowError: all were made by hand, or there is none.
    """
    waiting, is_empty = list(reversed(steps)), True
    while waiting:
        step = waiting.pop()
        sender: Sender | None = getattr(step, "sender", None)  # a Chain has none
        if sender is not None:
            return sender
        if isinstance(step, Signature):
            is_empty = False
        else:
            waiting.extend(reversed(cast("Chain[Any]", step).steps))  # or a Group's
    if is_empty:
        raise WorkflowError(
            "a group without members belongs to no Server (use server.send_group or send_chain)"
        )
    raise WorkflowError(
        "these signatures belong to no Server (use server.send_chain, send_group or send_chord)"
    )


class Lazy(Sequence["Signature[Any]"]):
    """Nested signatures from the wire, decoded when they are first looked at.

    A chain of 5,000 steps is nested 10,000 levels deep; a worker needs the first two.
    """

    __slots__ = ("_decode", "_items", "raw")

    def __init__(self, raw: bytes, decode: Any) -> None:
        self.raw: bytes = raw
        self._decode = decode
        self._items: tuple[Signature[Any], ...] | None = None

    def _load(self) -> tuple[Signature[Any], ...]:
        items = self._items
        if items is None:
            items = self._items = self._decode(self.raw)
        return items

    @overload
    def __getitem__(self, index: int) -> Signature[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Signature[Any]]: ...
    def __getitem__(self, index: int | slice) -> Signature[Any] | Sequence[Signature[Any]]:
        return self._load()[index]

    def __len__(self) -> int:
        return len(self._load())

    def __bool__(self) -> bool:
        # Asked often, and no Lazy from the wire is empty: do not unpack a chain of thousands.
        return self._items is None or bool(self._items)

    def __iter__(self) -> Iterator[Signature[Any]]:
        return iter(self._load())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(self.raw)

    def __repr__(self) -> str:
        return f"Lazy({len(self.raw)} bytes)"


class Signature(msgspec.Struct, Step[R], frozen=True, kw_only=True, gc=False):
    """One call that is to be made, with the fields of Go's Signature.

    For the fields on the wire see docs/reference/wire-format.md.

    Attributes:
        name: the task's name.
        uuid: of the task; empty until it is sent, unless you choose it.
        routing_key: the queue; empty is the default queue.
        eta: aware; not run before.
        headers: strings, kept by every worker on the way.
        immutable: on a step of a chain, its result is not passed on; on a chord's callback, no
            results are added.
        retry_count: tries left after the first; UNLIMITED: until it works.
        retry_timeout: seconds waited before this try; Go's Fibonacci goes on from it.
        on_success: sent when the task succeeds, its results as their last arguments. Until it is
            sent, chains and groups may be among them (and in `on_error`), see `then`.
        on_error: sent when the task fails for good, the error text as their first argument.
        chord_callback: sent when every member of this task's group has succeeded.
        extra: keys that a newer or other program put into the message, kept as they came.
    """

    name: str
    args: Sequence[Arg] = ()
    uuid: str = ""
    routing_key: str = ""
    eta: dt.datetime | None = None
    group_uuid: str = ""
    group_task_count: int = 0
    headers: Mapping[str, Any] = {}
    priority: int = 0
    immutable: bool = False
    retry_count: int = 0
    retry_timeout: int = 0
    on_success: Sequence[Signature[Any]] = ()
    on_error: Sequence[Signature[Any]] = ()
    chord_callback: Signature[Any] | None = None
    broker_message_group_id: str = ""
    sqs_receipt_handle: str = ""
    stop_task_deletion_on_error: bool = False
    ignore_when_task_not_registered: bool = False
    extra: Mapping[str, Any] = {}
    sender: Sender | None = None

    def __post_init__(self) -> None:
        # A list would let a value change after it was made.
        if type(self.args) is list:
            force_setattr(self, "args", tuple(self.args))
        if type(self.on_success) is list:
            force_setattr(self, "on_success", tuple(self.on_success))
        if type(self.on_error) is list:
            force_setattr(self, "on_error", tuple(self.on_error))

    @staticmethod
    def of(name: str, /, *args: Any, **kwargs: Any) -> Signature[Any]:
        """Return a call of a task that only another service has; its arguments are not checked.

        Keywords travel as named args; a Python worker gives them to keyword-only parameters.

        Raises:
            ArgumentError: a value cannot be sent.
        """
        positional = tuple(Arg.of(value) for value in args)
        named = tuple(Arg.of(value, name=key) for key, value in kwargs.items())
        return Signature(name=name, args=positional + named)

    def replace(self, **changes: Any) -> Signature[R]:
        """The same signature with other values in the named fields."""
        return msgspec.structs.replace(self, **changes)

    def then(self, *callbacks: Step[Any] | Iterable[Step[Any]]) -> Signature[R]:
        """With further callbacks for success; each gets the results as its last arguments.

        Raises:
            WorkflowError: one is no signature, chain or group.
        """
        return self.replace(on_success=(*self.on_success, *callbacks_of(callbacks)))

    def catch(self, *callbacks: Step[Any] | Iterable[Step[Any]]) -> Signature[R]:
        """Return the signature with further callbacks for the final failure. Raises as `then`.

        Each gets the error text as its first argument; `current_task().failed` names the task.
        """
        return self.replace(on_error=(*self.on_error, *callbacks_of(callbacks)))

    def fixed(self) -> Signature[R]:
        """As a step or callback that gets nothing: neither results nor an error text."""
        return self.with_headers(**{HEADER_FIXED: "1"})

    def with_args(self, *, before: Sequence[Arg] = (), after: Sequence[Arg] = ()) -> Signature[R]:
        """With more arguments around those it has."""
        return self.replace(args=(*before, *self.args, *after))

    def with_uuid(self, prefix: str = "task_") -> Signature[R]:
        """With a UUID, if it has none yet."""
        return self if self.uuid else self.replace(uuid=new_uuid(prefix))

    def with_headers(self, **headers: str) -> Signature[R]:
        return self.replace(headers={**self.headers, **headers})

    def send(self) -> Result[R]:
        """Publish it through the Server whose task made it.

        Raises:
            WorkflowError: it was made by hand; use `server.send_task(signature)`.
            PublishRefused, PublishUnknown: as Server.send_task.
        """
        return sender_of((self,)).send(self)

    async def send_async(self) -> Result[R]:
        """`send` for coroutines."""
        return await sender_of((self,)).send_async(self)

    @property
    def is_fixed(self) -> bool:
        return HEADER_FIXED in self.headers

    @property
    def attempt(self) -> AttemptNumber:
        """Number of this try: 1 for the first. Go workers do not count: they leave it as it was."""
        if not self.headers:
            return FIRST_ATTEMPT
        return AttemptNumber(_number(self.headers, HEADER_ATTEMPT, FIRST_ATTEMPT))

    @property
    def postponed(self) -> int:
        """How many runs of this task ended in RetryTaskLater."""
        return _number(self.headers, HEADER_POSTPONED, 0) if self.headers else 0

    @property
    def rejected(self) -> int:
        """How many runs of this task ended in Reject(requeue=True)."""
        return _number(self.headers, HEADER_REJECTED, 0) if self.headers else 0

    @property
    def run(self) -> RunNumber:
        """How many runs of this task ended in RETRY before this one."""
        return RunNumber(_number(self.headers, HEADER_RUN, 0)) if self.headers else FIRST_RUN

    @property
    def strikes(self) -> int:
        """How many task processes were lost while they ran it."""
        return _number(self.headers, HEADER_LOST, 0) if self.headers else 0

    @property
    def root(self) -> str:
        """UUID of the workflow that it belongs to, or of the task that began all of it; or ""."""
        return _text(self.headers, HEADER_ROOT)

    @property
    def parent(self) -> str:
        """UUID of the task or group in front of it, which had it sent; or ""."""
        return _text(self.headers, HEADER_PARENT)


COUNTED = frozenset({HEADER_DELAY, HEADER_EXPIRES_IN, HEADER_BLOCK})
LONGEST = 1e10  # seconds, 317 years; a longer delay or expiry is none


def counted(signature: Signature[Any], now: dt.datetime) -> Signature[Any]:
    """The signature with its delay and expiry counted from now on, since it is sent now.

    A moment that it has already stays: the caller's own, or that of a retry.
    """
    headers = {key: value for key, value in signature.headers.items() if key not in COUNTED}
    if len(headers) == len(signature.headers):
        return signature
    eta = signature.eta
    delay, expiry = _length(signature, HEADER_DELAY), _length(signature, HEADER_EXPIRES_IN)
    if eta is None and delay is not None:
        eta = now + dt.timedelta(seconds=delay)
    if expiry is not None:
        headers.setdefault(HEADER_EXPIRES, repr(now.timestamp() + expiry))
    return signature.replace(eta=eta, headers=headers)


def _length(signature: Signature[Any], key: str) -> float | None:
    """The seconds in a header; None for what no sender of ours has written."""
    try:
        seconds = float(signature.headers.get(key, "nan"))
    except (TypeError, ValueError):
        return None
    return seconds if abs(seconds) <= LONGEST else None


def _number(headers: Mapping[str, Any], key: str, default: int) -> int:
    text = headers.get(key)
    if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    return default


def _text(headers: Mapping[str, Any], key: str) -> str:
    text = headers.get(key)
    return text if isinstance(text, str) else ""


# By RFC 4122 a random UUID has 4 as its 13th digit, and one of these as its 17th.
_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


def new_uuid(prefix: str = "task_") -> str:
    """An id as Go makes it: the prefix (`task_`, `group_`, `chord_`) and a random UUID."""
    # uuid4() takes seven times as long.
    x = os.urandom(16).hex()
    return f"{prefix}{x[:8]}-{x[8:12]}-4{x[13:16]}-{_VARIANT[x[16]]}{x[17:20]}-{x[20:]}"
