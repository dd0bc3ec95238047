"""`memcache://h1:p1,h2:p2`: a result backend on memcached, one server or several."""

from __future__ import annotations

from machinery_py.backends.memcached.backend import MemcacheBackend
from machinery_py.clock import Clock
from machinery_py.config.server_urls import parse_memcache_url
from machinery_py.connections.memcached.client import TIMEOUT, MemcacheDriver
from machinery_py.stores.open import Family, FamilyOptions


class MemcacheFamily(Family):
    """A backend, connected at the first use. It is neither broker nor lock."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        self._driver = MemcacheDriver(
            parse_memcache_url(url), clock=options.clock, timeout=min(TIMEOUT, options.timeout)
        )

    def backend(self) -> MemcacheBackend:
        return MemcacheBackend(self._driver, expire_in=self.options.expire_in)

    def go_by(self, clock: Clock) -> None:
        self._driver.clock = clock

    def close(self) -> None:
        self._driver.close()
