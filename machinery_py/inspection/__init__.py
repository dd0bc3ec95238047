"""`server.inspect`: reports on queues, workers, tasks and dead letters, and actions on them."""

from machinery_py.backends.listings import Count
from machinery_py.inspection.hints import typed, worker_hint
from machinery_py.inspection.inspector import Inspector
from machinery_py.inspection.limits import LimitReport, LimitRow, limit_rows
from machinery_py.inspection.reports import (
    ChildTask,
    ErrorGroup,
    ErrorSummary,
    KeptStep,
    QueueReport,
    TaskPage,
    TaskReport,
)
from machinery_py.tasks.attempts import Attempt

__all__ = [
    "Attempt",
    "ChildTask",
    "Count",
    "ErrorGroup",
    "ErrorSummary",
    "Inspector",
    "KeptStep",
    "LimitReport",
    "LimitRow",
    "QueueReport",
    "TaskPage",
    "TaskReport",
    "limit_rows",
    "typed",
    "worker_hint",
]
