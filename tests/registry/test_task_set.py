"""Tasks without a Server, and what `Server.include` makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from machinery_py import Server, Signature, TaskSet
from machinery_py.errors import MachineryError, NameRefused, TaskAlreadyRegistered
from machinery_py.registry.options import TaskOptions
from machinery_py.registry.task import AsyncTask, Task
from machinery_py.testing.waiting import HANG


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("eager://")
    yield server
    server.close()


@pytest.fixture
def tasks() -> TaskSet:
    return TaskSet(retries=5, queue="mail", priority=1)


def double(number: int) -> int:
    return 2 * number


def test_included_task_is_sent_and_run_under_its_prefix(server: Server, tasks: TaskSet) -> None:
    one = tasks.task(double)

    @tasks.task("named", retries=0)
    async def other(number: int) -> int:
        return -number

    server.include(tasks, prefix="mail.")

    assert server.get_registered_task_names() == ["mail.double", "mail.named"]
    assert isinstance(other, AsyncTask)
    assert one.send(4).get(timeout=HANG) == 8
    assert other.send(4).get(timeout=HANG) == -4
    assert one.signature(4).name == "mail.double"
    assert (one.signature(4) | other.partial()).send().get(timeout=HANG) == -8


def test_second_function_of_a_name_is_refused_at_once(tasks: TaskSet) -> None:
    tasks.task(double)
    tasks.task(double)  # as when its module is imported twice
    with pytest.raises(TaskAlreadyRegistered, match="'double' is already registered"):
        tasks.task("double")(lambda: None)


def test_options_of_the_task_win_over_include_and_that_over_the_set(
    server: Server, tasks: TaskSet
) -> None:
    one = tasks.task(priority=3, ack="early")(double)
    other = Server("memory://")

    for each in (other, server):
        each.include(tasks, queue="bulk", priority=2)

    for task in (one, server.get_registered_task("double"), other.get_registered_task("double")):
        settings = task.settings
        assert (settings.retries, settings.queue, settings.priority) == (5, "bulk", 3)
        assert settings.ack == "early"
    other.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda task: task.send(1),
        lambda task: task.signature(1),
        lambda task: task.partial(),
        lambda task: task.options(delay=5).send(1),
    ],
)
def test_task_of_no_server_can_be_called_and_not_sent(
    tasks: TaskSet, call: Callable[[Task[[int], int]], object]
) -> None:
    task = tasks.task(double)

    assert task(4) == 8
    with pytest.raises(MachineryError, match=r"'double' cannot be sent.*server\.include"):
        call(task)


def test_task_that_is_declared_after_the_inclusion_is_registered(
    server: Server, tasks: TaskSet
) -> None:
    server.include(tasks, prefix="late.")

    task = tasks.task(double)

    assert server.is_task_registered("late.double")
    assert task.send(4).get(timeout=HANG) == 8


def test_tasks_are_sent_through_the_last_server_that_included_them(
    server: Server, tasks: TaskSet
) -> None:
    task = tasks.task(double)
    first = Server("memory://")
    first.include(tasks)

    server.include(tasks, prefix="x.")

    assert task.send(4).get(timeout=HANG) == 8
    assert first.get_registered_task("double").signature(4).name == "double"
    assert not first.inspect.tasks()
    first.close()


def test_set_may_be_included_twice_and_another_function_not(server: Server, tasks: TaskSet) -> None:
    tasks.task(double)
    server.include(tasks)
    server.include(tasks)
    others = TaskSet()
    others.task("double")(str)

    with pytest.raises(TaskAlreadyRegistered, match="'double'"):
        server.include(others)

    assert server.send(Signature.of("double", 4)).get(timeout=HANG) == 8


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"queu": "mail"}, r"TaskSet: no option 'queu' .*did you mean 'queue'"),
        ({"retries": -1}, r"TaskSet: retries=-1 \(expected"),
    ],
)
def test_wrong_defaults_are_refused_where_they_stand(
    server: Server, options: TaskOptions, told: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        TaskSet(**options)
    with pytest.raises((TypeError, ValueError), match=told.replace("TaskSet", "include")):
        server.include(TaskSet(), **options)


def test_prefix_that_makes_no_name_is_refused(server: Server, tasks: TaskSet) -> None:
    tasks.task(double)

    with pytest.raises(NameRefused):
        server.include(tasks, prefix="a\nb")
