"""How what a step returns is stored and read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, Protocol

from machinery_py.registry.calls import Call
from machinery_py.registry.task import Task
from machinery_py.tasks.signature import Arg


class StepCall(Protocol):
    """The part of a Call that steps need."""

    name: str
    is_async: bool

    def results(self, value: Any) -> Sequence[Arg]: ...
    def result(self, value: Any) -> Any: ...


class SendCall:
    """`send` of a task, as the function of a step: kept is the UUID of the task that it sends."""

    def __init__(self, task: Task[..., Any], *, is_async: bool) -> None:
        self.name: str = f"{task.name}.send"
        self.is_async: bool = is_async
        self._task = task

    def results(self, value: Any) -> Sequence[Arg]:
        return (Arg(type="string", value=value.uuid),)

    def result(self, value: Any) -> Any:
        return self._task.result(str(value))


_SENDS: dict[Any, bool] = {Task.send: False, Task.send_async: True}
_calls: dict[CodeType, Call] = {}


def call_of(function: Callable[..., Any]) -> StepCall:
    """Return how the results of a function are stored and read: by its annotations."""
    if isinstance(function, Task):
        return function.call
    if isinstance(function, MethodType) and isinstance(function.__self__, Task):
        is_async = _SENDS.get(function.__func__)
        if is_async is not None:
            return SendCall(function.__self__, is_async=is_async)
    # Not of a closure: it would live on with all that it holds.
    lasts = isinstance(function, FunctionType) and function.__closure__ is None
    call = _calls.get(function.__code__) if lasts else None
    if call is None or call.function.__annotations__ != function.__annotations__:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        call = Call(str(name), function)
        if lasts:
            _calls[function.__code__] = call
    return call
