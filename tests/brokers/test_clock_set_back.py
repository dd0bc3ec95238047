"""Delays that a clock has counted that was a day ahead, and then is set back."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from machinery_py import RetryTaskLater, Server, State, current_task
from machinery_py.testing.clocks import ManualClock
from machinery_py.worker.inline import Inline

DAY = dt.timedelta(days=1)


@pytest.mark.parametrize("store", ["memory", "sqlite", "redis", "mongodb", "postgresql"])
@pytest.mark.parametrize("is_new", [False, True])
def test_retry_waits_no_day_when_the_clock_is_set_back(
    request: pytest.FixtureRequest, tmp_path: Path, store: str, is_new: bool
) -> None:
    clock = ManualClock()
    url = "memory://"
    if store == "sqlite":
        url = f"sqlite:///{tmp_path}/store.db"
    elif store == "redis":
        url = request.getfixturevalue("empty_redis").url
    elif store == "mongodb":
        url = request.getfixturevalue("mongodb_url")
    elif store == "postgresql":
        url = request.getfixturevalue("postgres_url")
    server = Server(url, clock=clock)

    @server.task
    def polite() -> str:
        if current_task().signature.run == 0:
            raise RetryTaskLater("in a moment", 30.0)
        return "done"

    result, inline = polite.send(), Inline(server.app)
    clock._start += DAY
    at_a_moment = polite.options(eta=clock.now() + dt.timedelta(hours=1)).send()
    server.app.store.tend()
    inline.drain()
    assert result.get_state().state is State.RETRY
    clock._start -= DAY
    if is_new and store != "memory":
        server.app.close()  # as when the machine was started again

    server.app.store.tend()
    clock.advance(29.0)
    inline.drain()
    assert result.get_state().state is State.RETRY
    clock.advance(2.0)
    server.app.store.tend()
    inline.drain()

    assert result.get_state().state is State.SUCCESS
    clock.advance(hours=4)
    server.app.store.tend()
    inline.drain()
    assert at_a_moment.get_state().state is State.PENDING  # not before its ETA
    server.close()
