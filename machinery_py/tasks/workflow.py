"""Chain, group and chord, as they are written and as their results come together.

How they are linked for sending: tasks/linking.py.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeVar, cast, get_args

from machinery_py.errors import WorkflowError
from machinery_py.tasks.signature import (
    HEADER_COLLECT,
    HEADER_ON_FAILURE,
    Arg,
    Chain,
    Result,
    Sender,
    Signature,
    Step,
    callbacks_of,
    sender_of,
    steps_of,
)
from machinery_py.tasks.states import State, TaskState
from machinery_py.values.json_values import Failure
from machinery_py.values.values import from_result

JOIN = "machinery.join"

OnFailure = Literal["abort", "skip", "collect"]
"""A failed member fails its chord, leaves its results out, or is a `Failure` among them."""

R = TypeVar("R", covariant=True)
S = TypeVar("S")


class GroupedResult(Result[R], Protocol[R]):
    """Result of `Group.send`: see results.GroupResult."""

    @property
    def results(self) -> Sequence[Result[Any]]: ...
    @property
    def workflow(self) -> str: ...
    def progress(self) -> tuple[int, int]: ...
    def progress_async(self) -> Coroutine[Any, Any, tuple[int, int]]: ...
    def __iter__(self) -> Iterator[Result[Any]]: ...
    def __len__(self) -> int: ...


class Group(Step[R]):
    """Calls that run beside each other. Its result is the list of theirs, in this order.

    `group | callback` is a chord: the callback gets the results as its last arguments. Without a
    member it is over at once: its callback gets no results.

    Raises:
        WorkflowError: a member is no step, or `on_failure` no OnFailure.
    """

    __slots__ = ("on_error", "on_failure", "on_success", "sender", "steps")
    is_group = True

    def __init__(
        self,
        members: Sequence[Step[Any]],
        *,
        on_failure: OnFailure = "abort",
        on_success: Sequence[Step[Any]] = (),
        on_error: Sequence[Step[Any]] = (),
        sender: Sender | None = None,
    ) -> None:
        if on_failure not in get_args(OnFailure):
            raise WorkflowError(f"on_failure={on_failure!r} (expected abort, skip or collect)")
        self.steps: tuple[Step[Any], ...] = tuple(steps_of(members))
        self.on_failure: OnFailure = on_failure
        self.on_success: tuple[Step[Any], ...] = tuple(on_success)
        self.on_error: tuple[Step[Any], ...] = tuple(on_error)
        self.sender: Sender | None = sender

    def replace(self, **changes: Any) -> Group[R]:
        """The same group with other members, callbacks or `on_failure`."""
        slots = {name: getattr(self, name) for name in self.__slots__}
        members = changes.pop("members", slots.pop("steps"))
        return Group(members, **{**slots, **changes})

    def then(self, *callbacks: Step[Any] | Iterable[Step[Any]]) -> Group[R]:
        """With further callbacks for the success of all; each gets the results as last arguments.

        They are chord callbacks: when a member fails, they fail, too.

        Raises:
            WorkflowError: one is no signature, chain or group.
        """
        return self.replace(on_success=(*self.on_success, *callbacks_of(callbacks)))

    def catch(self, *callbacks: Step[Any] | Iterable[Step[Any]]) -> Group[R]:
        """With further callbacks for the first member that fails for good. Raises as `then`.

        Each gets the error text as its first argument.
        """
        return self.replace(on_error=(*self.on_error, *callbacks_of(callbacks)))

    def send(self) -> GroupedResult[R]:
        """Publish it through the Server whose tasks it is made of."""
        return cast("GroupedResult[R]", sender_of((self,)).send(self))

    async def send_async(self) -> GroupedResult[R]:
        """`send` for coroutines."""
        return cast("GroupedResult[R]", await sender_of((self,)).send_async(self))

    def __repr__(self) -> str:
        return f"group({', '.join(map(repr, self.steps))})"


def chain(*steps: Step[Any], pass_results: bool = True) -> Chain[Any]:
    """Steps that run one after the other.

    Args:
        pass_results: False keeps each result from the next step's arguments (Go's `Immutable`).
    """
    if not pass_results:
        steps = tuple(_keep_results(step) for step in steps)
    return Chain(steps)


def _keep_results(step: Step[Any]) -> Step[Any]:
    match step:
        case Signature():
            return step.replace(immutable=True)
        case Group():
            return step.replace(members=[_keep_results(member) for member in step.steps])
        case Chain():
            return Chain([_keep_results(member) for member in step.steps])
        case _:
            return step


def group(*members: Step[S] | Iterable[Step[S]]) -> Group[list[S]]:
    """Calls that run beside each other; given one by one, or as one iterable."""
    flat: list[Step[Any]] = []
    for member in members:
        flat.extend(member if isinstance(member, Iterable) else [member])
    return Group(flat)


def chord(
    members: Group[Any] | Iterable[Step[Any]],
    callback: Step[S],
    *,
    collect: bool = False,
    on_failure: OnFailure | None = None,
) -> Chain[S]:
    """Return a group with a callback; its results, in order, are the callback's last arguments.

    Args:
        members: a group, or its members as one iterable.
        callback: a signature, a group, or a chain, whose first step it is.
        collect: pass one list instead of many arguments. Ours alone: a Go worker passes many.
        on_failure: of a member, see OnFailure; ours alone. By default the group's, "abort".

    Raises:
        WorkflowError: as `group` and `chain`.
    """
    if isinstance(members, Signature | Chain):
        raise WorkflowError(
            f"{members!r} cannot be the members of a chord (expected a group, or a list)"
        )
    grouped = members if isinstance(members, Group) else group(members)
    if on_failure is not None:
        grouped = grouped.replace(on_failure=on_failure)
    both: Chain[S] = Chain((grouped, callback))
    first = both.steps[1]
    if not collect or not isinstance(first, Signature):
        return both
    return Chain((both.steps[0], first.with_headers(**{HEADER_COLLECT: "1"}), *both.steps[2:]))


def is_tolerant(callback: Signature[Any]) -> bool:
    """Return whether the chord of this callback goes on without members that have failed."""
    return callback.headers.get(HEADER_ON_FAILURE) in ("skip", "collect")


def chord_results(callback: Signature[Any], states: Sequence[TaskState]) -> list[Sequence[Arg]]:
    """Return the results of a chord's members for its callback, as its OnFailure has it."""
    collects = callback.headers.get(HEADER_ON_FAILURE) == "collect"
    return [
        state.results if state.state is not State.FAILURE else (Arg.of(failure_of(state)),)
        for state in states
        if state.state is not State.FAILURE or collects
    ]


def failure_of(state: TaskState) -> Failure:
    """Return the Failure of a task that has failed."""
    return Failure(
        task=state.task_name, uuid=state.task_uuid, error=state.error, error_type=state.error_type
    )


def chord_callback(callback: Signature[Any], results: Sequence[Sequence[Arg]]) -> Signature[Any]:
    """The callback with its group's results, in order, behind its own arguments.

    Nothing is added when the *callback* is immutable, as in Go, or fixed. With HEADER_COLLECT the
    results come as one list: None for a member without a result, a list for a member with several.

    Raises:
        ArgumentError: a result cannot stand in a list.
    """
    if callback.immutable or callback.is_fixed:
        return callback
    if callback.headers.get(HEADER_COLLECT):
        return callback.with_args(after=(Arg.of([result_value(result) for result in results]),))
    return callback.with_args(after=tuple(arg for result in results for arg in result))


def result_value(results: Sequence[Arg]) -> Any:
    """Return a task's results as a value: None for none, the value for one, a tuple for several."""
    if len(results) == 1:
        return from_result(results[0].type, results[0].value)
    return tuple(from_result(arg.type, arg.value) for arg in results) if results else None
