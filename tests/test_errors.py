"""machinery_py.errors: what every error has in common."""

from __future__ import annotations

import copy
import pickle

import pytest

from machinery_py import errors
from machinery_py.errors import MachineryError

MADE: tuple[MachineryError, ...] = (
    errors.BackendUnavailable("no answer"),
    errors.BrokerUnavailable("no answer"),
    errors.DuplicateTask("add", "task_1", "STARTED"),
    errors.LockNotAcquired("stock", 2.5),
    errors.NameRefused("queue '' is empty", "mail"),
    errors.ResultExpired("task_1", kept_for=60.0),
    errors.RetryTaskLater("too early", 5.0),
    errors.QueueNotFound("mial", ["mail"]),
    errors.ScheduleNotFound("digest", ["report"]),
    errors.StateNotFound("task_1"),
    errors.TaskFailed("task_1", "add", "no", error_type="shop.Closed", traceback="…"),
    errors.TaskNotRegistered("ad", ["add"]),
    errors.for_good(errors.PublishRefused("too large")),
)


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_an_error_that_is_copied_keeps_text_and_attributes(error: MachineryError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))
        assert other.permanent is error.permanent
