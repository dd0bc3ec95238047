"""A program with an outbox in a database, for the tests of the outbox."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from machinery_py import Config, Server
from machinery_py.contrib.sqlalchemy import Outbox
from machinery_py.testing.waiting import wait_until


class Shop:
    """A program with a database, a store and an outbox; `again` is the same in another process."""

    def __init__(self, database: str, store: str, **config: Any) -> None:
        self.database, self.store, self.config = database, store, config
        self.ran: list[int] = []
        self.server = Server(Config(broker=store, **config))
        self.engine = sa.create_engine(database, poolclass=NullPool)
        self.outbox = Outbox(self.server, self.engine)
        self.outbox.create()

        @self.server.task
        def note(number: int) -> int:
            self.ran.append(number)
            return number

        @self.server.task
        def total(*numbers: int) -> int:
            return sum(numbers)

        @self.server.task(unique=True)
        def alone(number: int) -> int:
            self.ran.append(number)
            return number

        self.note, self.total, self.alone = note, total, alone

    def again(self) -> Shop:
        return Shop(self.database, self.store, **self.config)

    def send(self, *numbers: int) -> list[str]:
        with Session(self.engine) as session, session.begin():
            return [
                self.outbox.send(session, self.note.signature(number)).uuid for number in numbers
            ]

    def rows(self) -> Sequence[Any]:
        with self.engine.connect() as connection:
            return connection.execute(sa.select(self.outbox.table)).all()

    def publish(self) -> None:
        """Let a relay publish all that is there."""
        with self.outbox.relay():
            wait_until(lambda: not self.rows(), what="an empty outbox")

    def run(self) -> list[int]:
        """Run what was published, and return what ran."""
        self.server.new_worker(concurrency=1, burst=True).launch()
        return self.ran

    def close(self) -> None:
        self.server.close()
        self.engine.dispose()


@pytest.fixture(name="database", params=["postgresql", "sqlite"])
def database_of_a_shop(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shop.db"
    return str(request.getfixturevalue("postgresql_url"))


@pytest.fixture(name="shop")
def open_shop(database: str, redis_url: str) -> Iterator[Shop]:
    shop = Shop(database, redis_url)
    yield shop
    shop.close()


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_by(work: Callable[[], object]) -> None:
    """Do the work in a forked child, which kills itself in it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
