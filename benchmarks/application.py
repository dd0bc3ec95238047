"""Application for the measurement `starting`."""

from __future__ import annotations

from machinery_py import Server

server = Server()


@server.task
def noop(number: int) -> int:
    return number
