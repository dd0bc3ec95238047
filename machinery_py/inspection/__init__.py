"""`server.inspect`: reports on queues, workers, tasks and dead letters, and actions on them."""

from machinery_py.backends.listings import Count
from machinery_py.inspection.inspector import Inspector, worker_hint
from machinery_py.inspection.limits import LimitReport
from machinery_py.inspection.reports import (
    ChildTask,
    ErrorGroup,
    ErrorSummary,
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
    "LimitReport",
    "QueueReport",
    "TaskPage",
    "TaskReport",
    "worker_hint",
]
