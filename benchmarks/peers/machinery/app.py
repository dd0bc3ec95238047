"""The application, as a user writes it. Its URL comes from MACHINERY_URL."""

from __future__ import annotations

from machinery_py import Server

server = Server()


@server.task
def noop(number: int, text: str = "") -> int:
    return number


@server.task
def increase(number: int) -> int:
    return number + 1


@server.task
def total(numbers: list[int]) -> int:
    return sum(numbers)
