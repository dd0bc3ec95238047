"""Tasks in the context of a Flask app."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from machinery_py import Config, Server, TaskFailed
from machinery_py.testing import Harness
from machinery_py.testing.waiting import wait_until
from tests.docs.pages import environment

flask = pytest.importorskip("flask")

from flask import Flask, current_app, g, has_app_context  # noqa: E402

from machinery_py.contrib.flask import init_app  # noqa: E402

HANG = 60.0  # seconds; a guard


class Shop:
    """A Flask app, and a Server whose tasks use it."""

    def __init__(self) -> None:
        self.app = Flask("shop")
        self.server = Server(Config(broker="memory://"))
        self.ended: list[BaseException | None] = []
        self.left: list[bool] = []
        self.app.teardown_appcontext(self.ended.append)
        self.server.around_task(self._look)  # registered before: it sees what is left afterwards
        init_app(self.server, self.app)
        self.threaded = self.server.register_task("threaded", threaded)
        self.coroutine = self.server.register_task("coroutine", coroutine)
        self.broken = self.server.register_task("broken", broken)
        self.endless = self.server.task("endless", time_limit=0.2)(endless)
        self.endless_coroutine = self.server.task("endless_coroutine", time_limit=0.2)(
            endless_coroutine
        )

    def _look(self, _: object) -> Iterator[None]:
        try:
            yield
        finally:
            self.left.append(has_app_context())


def threaded() -> tuple[str, bool]:
    return current_app.name, "seen" in g or bool(setattr(g, "seen", 1))


async def coroutine(text: str) -> str:
    g.text = text
    await asyncio.sleep(0)  # others of the same loop come in between
    return f"{current_app.name} {g.text}"


def broken() -> None:
    raise LookupError(current_app.name)


def endless() -> None:
    while current_app.name:
        time.sleep(0.01)


async def endless_coroutine() -> None:
    while current_app.name:
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    shop = Shop()
    with shop.server.new_worker(concurrency=2):
        yield shop
    shop.server.close()


@pytest.fixture(autouse=True)
def fresh(shop: Shop) -> None:
    shop.ended.clear()
    shop.left.clear()


def test_each_run_has_a_context_of_its_own(shop: Shop) -> None:
    results = [shop.threaded.send().get(timeout=HANG) for _ in range(4)]

    assert results == [("shop", False)] * 4
    assert (shop.ended, shop.left) == ([None] * 4, [False] * 4)


def test_coroutines_of_one_loop_do_not_share_a_context(shop: Shop) -> None:
    sent = [shop.coroutine.send(str(number)) for number in range(10)]

    assert [one.get(timeout=HANG) for one in sent] == [f"shop {number}" for number in range(10)]
    assert shop.left == [False] * 10


def test_context_of_a_failed_task_ends_with_its_exception(shop: Shop) -> None:
    with pytest.raises(TaskFailed, match="shop"):
        shop.broken.send().get(timeout=HANG)

    assert [type(error) for error in shop.ended] == [LookupError]
    assert shop.left == [False]


@pytest.mark.parametrize("name", ["endless", "endless_coroutine"])
def test_context_ends_when_the_time_of_the_task_is_up(shop: Shop, name: str) -> None:
    with pytest.raises(TaskFailed) as failed:
        getattr(shop, name).send().get(timeout=HANG)

    assert failed.value.error_type == "machinery_py.errors.TimeLimitExceeded"
    wait_until(lambda: shop.left == [False], timeout=HANG)
    assert len(shop.ended) == 1


def test_new_app_replaces_the_one_before(shop: Shop) -> None:
    server = Server(Config(broker="memory://"))
    init_app(server, shop.app)
    named = server.register_task("threaded", threaded)

    init_app(server, other := Flask("other"))

    with Harness(server) as harness:
        result = named.send()
        harness.drain()
        assert result.touch() == ("other", False)
    assert other.extensions["machinery"] is server
    assert shop.ended == []


def test_send_needs_no_context_and_leaves_that_of_a_request_alone(shop: Shop) -> None:
    assert not has_app_context()
    shop.threaded.send().get(timeout=HANG)

    with shop.app.test_request_context("/"):
        g.mine = 1
        assert shop.threaded.send().get(timeout=HANG) == ("shop", False)
        assert g.mine == 1


PROCESSES = """
from flask import Flask, current_app
from machinery_py import Server
from machinery_py.contrib.flask import init_app

app = Flask("in a process")
server = Server()
init_app(server, app)

@server.task(pool="process")
def named() -> str:
    return current_app.name
"""


def test_task_processes_have_the_context(tmp_path: Path) -> None:
    (tmp_path / "shopping.py").write_text(PROCESSES)
    words = ["-m", "machinery_py", "send", "shopping", "named"]
    env = environment(tmp_path)

    subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, check=True, timeout=HANG)
    words = ["-m", "machinery_py", "worker", "shopping", "--burst", "--no-banner", "-c", "1"]
    subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, check=True, timeout=HANG)

    (state,) = Server(f"sqlite:///{tmp_path}/machinery.db").inspect.tasks()
    assert (state.state, [one.value for one in state.results]) == ("SUCCESS", ["in a process"])
