"""Background tasks for Python: functions that you call now and that run elsewhere, now or later.

The public names are imported when they are first used: the supervisor and the keeper of a worker
need none of them, and stay small.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from machinery_py.config.config import Config
    from machinery_py.errors import (
        ArgumentError,
        BackendUnavailable,
        BatchFailed,
        BrokerUnavailable,
        ConfigError,
        DuplicateTask,
        Ignore,
        LimitNotAcquired,
        LockLost,
        LockNotAcquired,
        MachineryError,
        NoRetry,
        PublishRefused,
        PublishUnknown,
        QueueFull,
        Reject,
        Replace,
        ResultExpired,
        ResultTimeout,
        Retry,
        RetryTaskLater,
        StateNotFound,
        StoreUnusable,
        TaskFailed,
        TimeLimitExceeded,
        Unsupported,
        WorkflowError,
    )
    from machinery_py.registry.task import Task
    from machinery_py.registry.task_set import TaskSet
    from machinery_py.results.async_results import AsyncResult
    from machinery_py.results.workflow_results import ChainResult, ChordResult, GroupResult
    from machinery_py.server import Server
    from machinery_py.tasks.backoff import exponential
    from machinery_py.tasks.context import Context, current_task
    from machinery_py.tasks.signature import Arg, Chain, Signature
    from machinery_py.tasks.states import State, TaskState
    from machinery_py.tasks.workflow import Group, chain, chord, group
    from machinery_py.values.json_values import Failure
    from machinery_py.version import __version__
    from machinery_py.worker.worker import Worker

__all__ = [
    "Arg",
    "ArgumentError",
    "AsyncResult",
    "BackendUnavailable",
    "BatchFailed",
    "BrokerUnavailable",
    "Chain",
    "ChainResult",
    "ChordResult",
    "Config",
    "ConfigError",
    "Context",
    "DuplicateTask",
    "Failure",
    "Group",
    "GroupResult",
    "Ignore",
    "LimitNotAcquired",
    "LockLost",
    "LockNotAcquired",
    "MachineryError",
    "NoRetry",
    "PublishRefused",
    "PublishUnknown",
    "QueueFull",
    "Reject",
    "Replace",
    "ResultExpired",
    "ResultTimeout",
    "Retry",
    "RetryTaskLater",
    "Server",
    "Signature",
    "State",
    "StateNotFound",
    "StoreUnusable",
    "Task",
    "TaskFailed",
    "TaskSet",
    "TaskState",
    "TimeLimitExceeded",
    "Unsupported",
    "Worker",
    "WorkflowError",
    "__version__",
    "chain",
    "chord",
    "current_task",
    "exponential",
    "group",
]

#: Module → its public names. The others are errors.
_HOMES = {
    "machinery_py.config.config": "Config",
    "machinery_py.registry.task": "Task",
    "machinery_py.registry.task_set": "TaskSet",
    "machinery_py.results.async_results": "AsyncResult",
    "machinery_py.results.workflow_results": "ChainResult ChordResult GroupResult",
    "machinery_py.server": "Server",
    "machinery_py.tasks.backoff": "exponential",
    "machinery_py.tasks.context": "Context current_task",
    "machinery_py.tasks.signature": "Arg Chain Signature",
    "machinery_py.tasks.states": "State TaskState",
    "machinery_py.tasks.workflow": "Group chain chord group",
    "machinery_py.values.json_values": "Failure",
    "machinery_py.version": "__version__",
    "machinery_py.worker.worker": "Worker",
}
#: Old names of errors, which are looked for here until the next version.
_MOVED = frozenset(
    (
        "DecodeError",
        "NameRefused",
        "QueueNotFound",
        "ScheduleError",
        "ScheduleNotFound",
        "TaskAlreadyRegistered",
        "TaskNotRegistered",
        "WorkerLost",
    )
)
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name in __all__:
            module = importlib.import_module(_HOME_OF.get(name, "machinery_py.errors"))
            value = getattr(module, name)
        elif name in ("config", "errors", "events", "inspection", "names", "queues", "server"):
            value = importlib.import_module(f"{__name__}.{name}")
        elif name in _MOVED:
            text = f"machinery_py.{name} is now machinery_py.errors.{name}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return getattr(importlib.import_module("machinery_py.errors"), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


# Without this, a program that configures no logging would see our warnings on stderr.
logging.getLogger(__name__).addHandler(logging.NullHandler())
