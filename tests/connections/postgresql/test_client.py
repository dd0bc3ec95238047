"""Connections to PostgreSQL: none is lost to whoever was interrupted."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from machinery_py.connections.postgresql import client
from machinery_py.connections.postgresql.client import Link, PostgreSQLDriver
from machinery_py.rows.postgresql import PostgreSQLRows


@pytest.fixture
def driver(postgres_url: str) -> Iterator[PostgreSQLDriver]:
    with contextlib.closing(PostgreSQLDriver(postgres_url, timeout=30.0)) as driver:
        yield driver


def call(driver: PostgreSQLDriver) -> None:
    driver.run("SELECT 1", doing="testing")


def roll_back(driver: PostgreSQLDriver) -> None:
    transaction = PostgreSQLRows(driver).open_transaction()
    try:
        transaction.rows.now()
    finally:
        transaction.close()


def commit(driver: PostgreSQLDriver) -> None:
    transaction = PostgreSQLRows(driver).open_transaction()
    try:
        transaction.commit()
    finally:
        transaction.close()


@pytest.mark.parametrize("work", [call, roll_back, commit])
@pytest.mark.parametrize("idle", [True, False])
def test_interrupt_at_any_wait_loses_no_connection(
    driver: PostgreSQLDriver,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[PostgreSQLDriver], None],
    idle: bool,
) -> None:
    """Ctrl+C between taking a connection and giving it back."""
    work(driver)
    waits = itertools.count()
    first = -1

    def interrupted(method: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            if next(waits) == first:
                raise KeyboardInterrupt
            return method(*args, **kwargs)

        return wait

    for name in ("wait", "is_alive"):
        monkeypatch.setattr(Link, name, interrupted(getattr(Link, name)))
    monkeypatch.setattr(client, "AGE", 0.0 if idle else 30.0)
    for first in range(100):
        waits = itertools.count()
        try:
            work(driver)
            break
        except KeyboardInterrupt:
            pass
        for links in (driver._links, driver._own):
            assert links._number == len(links._idle), first
    assert 0 < first < 99


def test_connection_that_is_closed_is_replaced_by_one(driver: PostgreSQLDriver) -> None:
    call(driver)
    [link] = driver._links._idle
    link.close()
    link.used_at = 0.0

    call(driver)
    assert (len(driver._links._idle), driver._links._number) == (1, 1)
