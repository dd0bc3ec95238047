"""What can be a task, and what is refused when it is declared."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from machinery_py import Server
from machinery_py.errors import TaskAlreadyRegistered


class Mailer:
    """Object with methods of each kind."""

    def bound(self, to: str) -> str:
        return to

    @classmethod
    def of_class(cls, to: str) -> str:
        return to

    @staticmethod
    def of_nobody(to: str) -> str:
        return to

    def __call__(self, to: str) -> str:
        return to


class AsyncMailer:
    async def __call__(self, to: str) -> str:
        return to


def numbers() -> Iterator[int]:
    yield 1


async def async_numbers() -> AsyncIterator[int]:
    yield 1


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("memory://")
    yield server
    server.close()


@pytest.mark.parametrize(
    "function",
    [
        Mailer().bound,
        Mailer.of_class,
        Mailer.of_nobody,
        Mailer(),
        functools.partial(Mailer().bound),
        lambda to: to,
        str,
    ],
)
def test_what_can_be_called_without_an_object_can_be_a_task(
    server: Server, function: Callable[..., Any]
) -> None:
    task = server.register_task("mail", function)
    with server.new_worker(concurrency=1):
        assert task.send("a").get(timeout=30) == "a"


def test_function_in_a_class_that_takes_no_object_can_be_a_task(server: Server) -> None:
    class Mails:
        @staticmethod
        @server.task
        def first(to: str) -> str:
            return to

        @server.task
        @staticmethod
        def second(to: str) -> str:
            return to

    assert [Mails.first("a"), Mails.second("b")] == ["a", "b"]
    assert server.get_registered_task_names() == ["first", "second"]


@pytest.mark.parametrize("name", [None, "mail"])
@pytest.mark.parametrize("options", [{}, {"retries": 3}])
def test_method_is_refused_where_it_is_declared(
    server: Server, name: str | None, options: Any
) -> None:
    with pytest.raises(TypeError, match="it is a method, and its object cannot be sent"):

        class Mails:
            @server.task(name, **options)
            def send(self, to: str) -> None: ...


def test_class_method_is_refused_where_it_is_declared(server: Server) -> None:
    with pytest.raises(TypeError, match="it is a method"):

        class Mails:
            @server.task  # type: ignore[arg-type]
            @classmethod
            def send(cls, to: str) -> None: ...

    with pytest.raises(TypeError, match="it is a method"):

        class Others:
            @classmethod
            @server.task
            def send(cls, to: str) -> None: ...


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (Mailer, "there are no task classes"),
        (numbers, "it is a generator"),
        (async_numbers, "it is a generator"),
        (AsyncMailer(), "its __call__ is a coroutine function"),
        (5, "cannot be a task: Task must be a func type"),
    ],
)
def test_what_could_not_run_is_refused_where_it_is_declared(
    server: Server, function: Any, text: str
) -> None:
    with pytest.raises(TypeError, match=text):
        server.task(function)
    with pytest.raises(TypeError, match=text):
        server.task("mail", retries=1)(function)


def test_functions_of_one_name_from_two_calls_of_a_factory_are_told_apart(server: Server) -> None:
    def made(number: int) -> Callable[[], int]:
        def inner() -> int:
            return number

        return inner

    server.task(made(1))
    with pytest.raises(TaskAlreadyRegistered, match="give this one a name of its own"):
        server.task(made(2))
