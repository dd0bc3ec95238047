"""How what a step returns, or a workflow that a task waits for, is stored and read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, Protocol

from machinery_py.call_threads import in_thread
from machinery_py.registry.calls import Call
from machinery_py.registry.task import Task
from machinery_py.tasks.signature import HEADER_UNIQUE, Arg, Chain, Signature, Step
from machinery_py.tasks.workflow import Group
from machinery_py.values.json_values import Failure


class StepCall(Protocol):
    """The part of a Call that steps need."""

    name: str
    is_async: bool

    def results(self, value: Any) -> Sequence[Arg]: ...
    def result(self, value: Any) -> Any: ...


class WorkflowCall:
    """A workflow whose result is waited for: read as the annotations of its last tasks say."""

    is_async = False

    def __init__(self, workflow: Step[Any], find: Callable[[str], Task[..., Any] | None]) -> None:
        self.name: str = repr(workflow)
        self._workflow, self._find = workflow, find

    def results(self, value: Any) -> Sequence[Arg]:
        raise NotImplementedError("its tasks have written them")

    def result(self, value: Any) -> Any:
        return self._read(self._workflow, value)

    def _read(self, step: Step[Any], value: Any) -> Any:
        if isinstance(step, Chain):
            return self._read(step.steps[-1], value)
        if isinstance(step, Group):
            if not isinstance(value, list) or len(value) != len(step.steps):
                return value  # failed members are left out
            return [self._read(*pair) for pair in zip(step.steps, value, strict=True)]
        task = self._find(step.name) if isinstance(step, Signature) else None
        return value if task is None or isinstance(value, Failure) else task.call.result(value)


def arguments_of(step: Step[Any]) -> Sequence[Any]:
    """Return names and arguments of all tasks of a workflow, by which it is known again."""
    if isinstance(step, Signature):
        return step.name, [arg.value for arg in step.args]
    return [arguments_of(one) for one in steps_in(step)]


def problem_of(step: Step[Any]) -> str:
    """Return why a task cannot wait for this workflow; "" if it can."""
    if not isinstance(step, Signature):
        return next((text for one in steps_in(step) if (text := problem_of(one))), "")
    if step.uuid:
        return (
            f"{step.name} has a UUID, {step.uuid} (leave it out: it gets one that is the same in "
            "each run)"
        )
    if step.headers.get(HEADER_UNIQUE):
        return f"{step.name} has options(unique=…), and is sent in any case (leave it out)"
    return ""


def steps_in(step: Step[Any]) -> Sequence[Step[Any]]:
    """Return the steps of a chain, or the members of a group."""
    return step.steps if isinstance(step, (Chain, Group)) else ()


class SendCall:
    """A `send` as the function of a step: kept is the UUID of the task that it sends.

    Attributes:
        is_known: it is that of a task, whose results can be made of a UUID.
    """

    def __init__(self, name: str, task: Task[..., Any] | None, *, is_async: bool) -> None:
        self.name: str = name
        self.is_async: bool = is_async
        self.is_known: bool = task is not None
        self._task = task

    def once(self, key: str) -> Callable[..., Any]:
        """Return it as a function that sends nothing in a repeat with the same key."""
        assert self._task is not None
        send = functools.partial(self._task.send_once, key)
        if not self.is_async:
            return send

        async def send_async(*args: Any, **kwargs: Any) -> Any:
            return await in_thread(functools.partial(send, *args, **kwargs))

        return send_async

    def results(self, value: Any) -> Sequence[Arg]:
        return (Arg(type="string", value=value.uuid),)

    def result(self, value: Any) -> Any:
        assert self._task is not None
        return self._task.result(str(value))


_SENDS: dict[Any, bool] = {Task.send: False, Task.send_async: True}
_calls: dict[CodeType, Call] = {}


def call_of(function: Callable[..., Any]) -> StepCall:
    """Return how the results of a function are stored and read: by its annotations."""
    if isinstance(function, Task):
        return function.call
    if isinstance(function, MethodType):
        of, name = function.__self__, function.__name__
        if isinstance(of, Task) and (is_async := _SENDS.get(function.__func__)) is not None:
            return SendCall(f"{of.name}.{name}", of, is_async=is_async)
        if isinstance(of, Step) and name.startswith("send"):
            return SendCall(f"{of!r}.{name}", None, is_async=name.endswith("async"))
    # Not of a closure: it would live on with all that it holds.
    lasts = isinstance(function, FunctionType) and function.__closure__ is None
    call = _calls.get(function.__code__) if lasts else None
    if call is None or call.function.__annotations__ != function.__annotations__:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        call = Call(str(name), function)
        if lasts:
            _calls[function.__code__] = call
    return call
