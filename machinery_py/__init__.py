"""Background tasks for Python: functions that you call now and that run elsewhere, now or later."""

import logging

from machinery_py.config.config import Config
from machinery_py.errors import (
    ArgumentError,
    BackendUnavailable,
    BrokerUnavailable,
    ConfigError,
    DecodeError,
    DuplicateTask,
    LockLost,
    LockNotAcquired,
    MachineryError,
    NameRefused,
    NoRetry,
    PublishRefused,
    PublishUnknown,
    ResultExpired,
    ResultTimeout,
    Retry,
    RetryTaskLater,
    ScheduleError,
    ScheduleNotFound,
    StateNotFound,
    StoreUnusable,
    TaskAlreadyRegistered,
    TaskFailed,
    TaskNotRegistered,
    TimeLimitExceeded,
    Unsupported,
    WorkflowError,
)
from machinery_py.registry.task import Task
from machinery_py.results.async_results import AsyncResult, ChainResult, ChordResult, GroupResult
from machinery_py.server import Server
from machinery_py.tasks.backoff import exponential
from machinery_py.tasks.context import Context, current_task
from machinery_py.tasks.signature import Arg, Chain, Signature
from machinery_py.tasks.states import State, TaskState
from machinery_py.tasks.workflow import Group, chain, chord, group
from machinery_py.version import __version__
from machinery_py.worker.worker import Worker

__all__ = [
    "Arg",
    "ArgumentError",
    "AsyncResult",
    "BackendUnavailable",
    "BrokerUnavailable",
    "Chain",
    "ChainResult",
    "ChordResult",
    "Config",
    "ConfigError",
    "Context",
    "DecodeError",
    "DuplicateTask",
    "Group",
    "GroupResult",
    "LockLost",
    "LockNotAcquired",
    "MachineryError",
    "NameRefused",
    "NoRetry",
    "PublishRefused",
    "PublishUnknown",
    "ResultExpired",
    "ResultTimeout",
    "Retry",
    "RetryTaskLater",
    "ScheduleError",
    "ScheduleNotFound",
    "Server",
    "Signature",
    "State",
    "StateNotFound",
    "StoreUnusable",
    "Task",
    "TaskAlreadyRegistered",
    "TaskFailed",
    "TaskNotRegistered",
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

# Without this, a program that configures no logging would see our warnings on stderr.
logging.getLogger(__name__).addHandler(logging.NullHandler())
