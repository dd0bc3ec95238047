"""`redis://`, `rediss://`, `redis+socket://`: a Redis, 6.2 or newer; the master of sentinels, or one of several URLs."""

from __future__ import annotations

from machinery_py._drivers.redis import RedisDriver
from machinery_py._drivers.redis_servers import Servers
from machinery_py._drivers.redis_url import BadRedisUrl
from machinery_py.backends.redis import RedisBackend
from machinery_py.brokers.redis import RedisBroker
from machinery_py.errors import ConfigError, nearest
from machinery_py.failover import STRATEGIES
from machinery_py.families.base import Family, FamilyOptions
from machinery_py.locks.redis import RedisLock
from machinery_py.settlement.redis_store import RedisStore
from machinery_py.urls import redact, split_urls


class RedisFamily(Family):
    """Stores on one server, connected at the first use."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        self._driver = RedisDriver(
            clock=options.clock, timeout=options.timeout, servers=_servers(url, options), strict=options.strict_durability,
        )

    def broker(self) -> RedisBroker:
        return RedisBroker(self._driver, lease=self.options.lease)

    def backend(self) -> RedisBackend:
        return RedisBackend(self._driver, expire_in=self.options.expire_in)

    def lock(self) -> RedisLock:
        return RedisLock(self._driver)

    def together(self) -> RedisStore:
        return RedisStore(self.broker(), self.backend())

    def close(self) -> None:
        self._driver.close()


def _servers(text: str, options: FamilyOptions) -> Servers:
    """What the URLs and the options say.

    Raises:
        ConfigError: they make no sense, or ask for what is not in this release.
    """
    urls = split_urls(text, options.separator)
    shown = ", ".join(map(redact, urls))
    redis = options.redis
    if redis.cluster_mode:
        raise ConfigError(f"{shown}: redis.cluster_mode: Redis Cluster is not in this release")
    strategy = STRATEGIES.get(options.strategy)
    if strategy is None:
        known = ", ".join(sorted(STRATEGIES)) + nearest(options.strategy, STRATEGIES)
        raise ConfigError(f"broker_failover_strategy: found {options.strategy!r} (known: {known})")
    try:
        return Servers(
            urls, timeout=options.timeout, client_name=redis.client_name or "machinery", master_name=redis.master_name,
            strategy=strategy,
        )
    except BadRedisUrl as error:
        raise ConfigError(f"{shown}: {error}") from None
