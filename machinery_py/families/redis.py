"""`redis://`, `rediss://`, `redis+socket://`: a Redis, 6.2 or newer; the master of sentinels, or one of several URLs."""

from __future__ import annotations

import math

from machinery_py._drivers.redis import RedisDriver
from machinery_py._drivers.redis_pool import Limits
from machinery_py._drivers.redis_servers import Servers
from machinery_py._drivers.redis_url import BadRedisUrl
from machinery_py.backends.redis import RedisBackend
from machinery_py.brokers.redis import RedisBroker
from machinery_py.config_sections import RedisConfig
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
            limits=_limits(options.redis),
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


def _limits(redis: RedisConfig) -> Limits:
    """Go's 0 is no limit."""
    return Limits(
        max_idle=redis.max_idle, max_active=redis.max_active, wait=redis.wait, idle_timeout=redis.max_idle_timeout or math.inf,
        read=redis.read_timeout or math.inf, write=redis.write_timeout or math.inf,
        block=redis.normal_tasks_poll_period / 1000, delayed_key=redis.delayed_tasks_key,
    )


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
            urls, timeout=min(options.timeout, redis.connect_timeout or math.inf), strategy=strategy,
            client_name=redis.client_name or "machinery", master_name=redis.master_name,
        )
    except BadRedisUrl as error:
        raise ConfigError(f"{shown}: {error}") from None
