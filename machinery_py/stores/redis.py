"""`redis://`, `rediss://`, `redis+socket://`: a Redis, 6.2 or newer; a sentinels' master, one of several URLs, a cluster."""

from __future__ import annotations

import math

import redis as _redis  # noqa: F401 – the drivers load it when they connect, and a fork may come in between there

from machinery_py.backends.redis.backend import RedisBackend
from machinery_py.backends.redis.cluster import ClusterBackend
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.brokers.redis.cluster import ClusterBroker, is_usable
from machinery_py.config.sections import RedisConfig
from machinery_py.config.server_urls import BadUrl, parse_redis_url
from machinery_py.config.urls import redact, split_urls
from machinery_py.connections.failover import STRATEGIES
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.cluster import RedisClusterDriver
from machinery_py.connections.redis.discovery import Servers
from machinery_py.connections.redis.pool import Limits
from machinery_py.errors import ConfigError, nearest
from machinery_py.locks.redis import ClusterLock, RedisLock
from machinery_py.stores import network as _network  # noqa: F401 – for what it loads
from machinery_py.stores.family import Family, FamilyOptions
from machinery_py.stores.redis_store import ClusterStore, RedisStore


def open_redis(url: str, options: FamilyOptions) -> Family:
    """The stores of a cluster, if the URL lists several nodes or the configuration says so, else of one server.

    Raises:
        ConfigError: URL and options make no sense, alone or together.
    """
    urls = split_urls(url, options.separator)
    shown = ", ".join(map(redact, urls))
    try:
        parsed = [parse_redis_url(one, master_name=options.redis.master_name) for one in urls]
    except BadUrl as error:
        raise ConfigError(f"{shown}: {error}") from None
    if not options.redis.cluster_mode and not any(one.is_cluster for one in parsed):
        return RedisFamily(url, options)
    if len(parsed) > 1:
        raise ConfigError(
            f"{shown}: found several URLs (a cluster is one URL that lists some of its nodes: redis://h1,h2,h3)"
        )
    if parsed[0].master_name or parsed[0].path or parsed[0].database:
        raise ConfigError(
            f"{shown}: redis.cluster_mode: a cluster has no sentinels, no socket, and database 0 only"
        )
    key = options.redis.delayed_tasks_key
    if not is_usable(key):
        raise ConfigError(
            f"redis.delayed_tasks_key: {key!r} cannot be used in a cluster (expected a name without braces, or "
            "with one {…} in it)"
        )
    return RedisClusterFamily(url, options)


class RedisFamily(Family):
    """Stores on one server, connected at the first use."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        self._driver = RedisDriver(
            clock=options.clock,
            timeout=options.timeout,
            servers=_servers(url, options),
            strict=options.strict_durability,
            limits=_limits_of(options.redis),
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


class RedisClusterFamily(Family):
    """Stores in one cluster, connected at the first use."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        redis = options.redis
        self._cluster = RedisClusterDriver(
            url,
            clock=options.clock,
            timeout=options.timeout,
            connect_timeout=redis.connect_timeout or math.inf,
            client_name=redis.client_name or "machinery",
            strict=options.strict_durability,
            limits=_limits_of(redis),
        )

    def broker(self) -> ClusterBroker:
        return ClusterBroker(self._cluster, lease=self.options.lease)

    def backend(self) -> ClusterBackend:
        return ClusterBackend(self._cluster, expire_in=self.options.expire_in)

    def lock(self) -> ClusterLock:
        return ClusterLock(self._cluster)

    def together(self) -> ClusterStore:
        return ClusterStore(self.broker(), self.backend(), self.options.clock)

    def close(self) -> None:
        self._cluster.close()


def _limits_of(redis: RedisConfig) -> Limits:
    """Go's 0 is no limit."""
    return Limits(
        max_idle=redis.max_idle,
        max_active=redis.max_active,
        wait=redis.wait,
        idle_timeout=redis.max_idle_timeout or math.inf,
        read=redis.read_timeout or math.inf,
        write=redis.write_timeout or math.inf,
        block=redis.normal_tasks_poll_period / 1000,
        delayed_key=redis.delayed_tasks_key,
    )


def _servers(text: str, options: FamilyOptions) -> Servers:
    """Return the servers that the URLs and the options name.

    Raises:
        ConfigError: they make no sense.
    """
    urls = split_urls(text, options.separator)
    shown = ", ".join(map(redact, urls))
    redis = options.redis
    strategy = STRATEGIES.get(options.strategy)
    if strategy is None:
        known = ", ".join(sorted(STRATEGIES)) + nearest(options.strategy, STRATEGIES)
        raise ConfigError(f"broker_failover_strategy: found {options.strategy!r} (known: {known})")
    try:
        return Servers(
            urls,
            timeout=min(options.timeout, redis.connect_timeout or math.inf),
            strategy=strategy,
            client_name=redis.client_name or "machinery",
            master_name=redis.master_name,
        )
    except BadUrl as error:
        raise ConfigError(f"{shown}: {error}") from None
