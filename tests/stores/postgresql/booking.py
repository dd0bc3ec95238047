"""An app on PostgreSQL that task processes import; the database is that of BOOKING_URL."""

from __future__ import annotations

import os

from machinery_py import Server, current_task

server = Server(os.environ["BOOKING_URL"])


@server.task
def anywhere() -> int:
    """Return the process that it runs in."""
    return os.getpid()


@server.task(transaction=True)
def book(order: int) -> int:
    current_task().connection.execute("INSERT INTO orders VALUES (%s)", (order,))
    return os.getpid()


@server.task(pool="process")
def flow(order: int) -> None:
    current_task().step("book", transaction=True)(int, order)
