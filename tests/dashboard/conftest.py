"""A shop with a running worker, its dashboard, and one browser, for a module each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from machinery_py.cli.http import serve
from tests.dashboard.shop import Shop
from tests.support.browser import Browser
from tests.support.servers import RedisServer, require


@pytest.fixture(scope="module")
def shop() -> Iterator[Shop]:
    require(Browser)
    require(RedisServer)
    with RedisServer(appendonly=True) as redis:
        shop = Shop(redis)
        try:
            with shop.server.new_worker("ada", 4):
                shop.fill()
                yield shop
                shop.gate.set()
        finally:
            shop.server.close()


@pytest.fixture(scope="module")
def browser(shop: Shop) -> Iterator[Browser]:
    with serve(shop.server.dashboard.wsgi(), "127.0.0.1", 0) as address, Browser(address) as found:
        yield found


@pytest.fixture(autouse=True)
def _no_complaints(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let no test pass whose page breaks the Content-Security-Policy or throws."""
    yield
    if "browser" in request.fixturenames:
        browser: Browser = request.getfixturevalue("browser")
        problems = [one for one in browser.problems() if "status of 4" not in one]
        assert not problems, problems
        assert browser.run("return window.hacked") is None
