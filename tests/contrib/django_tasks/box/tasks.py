"""Tasks of the tests."""

import threading
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.tasks import TaskContext, task

gate = threading.Event()


@task
def echo(*args: Any, **kwargs: Any) -> Any:
    return [list(args), kwargs]


@task
async def echo_async(*args: Any, **kwargs: Any) -> Any:
    return [list(args), kwargs]


@task
def fail() -> None:
    raise ValueError("no stamp")


@task
def exit_all() -> None:
    raise SystemExit("not a worker's end")


@task
def give_object() -> Any:
    return object()


@task
def wait() -> None:
    gate.wait(30)


@task(takes_context=True)
def describe(context: TaskContext, word: str) -> dict[str, Any]:
    result = context.task_result
    return {
        "word": word,
        "id": result.id,
        "status": result.status,
        "attempt": context.attempt,
        "args": result.args,
        "priority": result.task.priority,
        "queue": result.task.queue_name,
        "errors": [one.exception_class_path for one in result.errors],
    }


@task(takes_context=True, backend="narrow", queue_name="narrow")
def second_time(context: TaskContext) -> int:
    if context.attempt < 2:
        raise OSError("busy")
    return int(context.attempt)


@task
def pass_on() -> None:
    with transaction.atomic():
        transaction.on_commit(echo.enqueue)


@task
async def name_users() -> list[str]:
    return [user.username async for user in User.objects.all()]


@task(backend="dummy", queue_name="elsewhere")
def elsewhere() -> str:
    return "ran"
