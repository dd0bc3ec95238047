"""Stores of a configuration: the table of families, each of which opens what a URL names.

Families are named as strings, and loaded when a URL needs them.
"""

from __future__ import annotations

import codecs
import importlib
from abc import ABC
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import msgspec

from machinery_py.backends.base import Backend
from machinery_py.brokers.base import Broker
from machinery_py.clock import Clock
from machinery_py.config.config import Config
from machinery_py.config.options import Section
from machinery_py.config.plugins import plugin_of
from machinery_py.config.sections import AMQPConfig, MongoDBConfig, RedisConfig
from machinery_py.config.store_options import section_of
from machinery_py.config.urls import ObjectUrl, Role, add_scheme, redact, scheme_of, split_urls
from machinery_py.connections.forks import not_forking
from machinery_py.errors import ConfigError, Unsupported
from machinery_py.limits.base import Limits
from machinery_py.locks.base import Lock
from machinery_py.stores.base import Store
from machinery_py.stores.outbox import TwoStores


class FamilyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a family needs, and the clock. Lengths are in seconds."""

    clock: Clock
    lease: float = 10.0
    expire_in: float = 3600.0
    timeout: float = 5.0
    separator: str = ""  # between several URLs
    strategy: str = "round-robin"  # in `failover.STRATEGIES`
    strict_durability: bool = False
    go_program: str = ""  # that shares schedules with this one
    redis: RedisConfig = RedisConfig()
    amqp: AMQPConfig = AMQPConfig()
    default_queue: str = "machinery_tasks"
    mongodb: MongoDBConfig = MongoDBConfig()
    stores: Mapping[str, object] = {}  # the setting
    own: Section | None = None  # of a plug-in: its `section`, made of `stores`


class Family(ABC):
    """The stores behind one URL, opened lazily; `close` closes what they share.

    Attributes:
        roles: of a plug-in: those that its URLs can be.
        section: of a plug-in: its own options.
        keeps_time: `clock` is that of the server, or of the one machine; else it is this
            machine's, and the stores go by the clock that `go_by` gives them.
    """

    keeps_time: ClassVar[bool] = False
    clock: Clock
    roles: ClassVar[Iterable[Role]] = ("broker", "result backend")
    section: ClassVar[type[Section] | None] = None

    def __init__(self, url: str, options: FamilyOptions) -> None:
        self.url = url
        self.options = options
        self.clock = options.clock

    def go_by(self, clock: Clock) -> None:  # noqa: B027 - most have no use for it
        """Take the moments of this clock from now on."""

    def broker(self) -> Broker:
        raise Unsupported(f"{redact(self.url)} is no broker")

    def backend(self) -> Backend:
        raise Unsupported(f"{redact(self.url)} is no result backend (set result_backend)")

    def lock(self) -> Lock:
        raise Unsupported(f"{redact(self.url)} gives no locks")

    def limits(self) -> Limits:
        raise Unsupported(f"{redact(self.url)} keeps no limits")

    def migration(self) -> str:
        """Return the SQL that brings its tables up to date; "" if they are, or it has none."""
        return ""

    def migrate(self) -> tuple[int, int]:
        """Carry `migration` out; return the version of its tables before it, and now."""
        return 0, 0

    def together(self) -> Store | None:
        """Return a store in which broker and backend settle as one, if they can."""
        return None

    def close(self) -> None:  # noqa: B027 - some share nothing
        """Give everything back. May be called twice."""


#: URL scheme → what opens it.
FAMILIES: dict[str, str] = {
    "memory": "machinery_py.stores.memory:MemoryFamily",
    "eager": "machinery_py.stores.memory:EagerFamily",
    "sqlite": "machinery_py.stores.sqlite:SQLiteFamily",
    "null": "machinery_py.stores.memory:NullFamily",
    "memcache": "machinery_py.stores.memcached:MemcacheFamily",
    "redis": "machinery_py.stores.redis:open_redis",
    "rediss": "machinery_py.stores.redis:open_redis",
    "redis+socket": "machinery_py.stores.redis:open_redis",
    "amqp": "machinery_py.stores.rabbitmq:AMQPFamily",
    "amqps": "machinery_py.stores.rabbitmq:AMQPFamily",
    "mongodb": "machinery_py.stores.mongodb:MongoDBFamily",
    "mongodb+srv": "machinery_py.stores.mongodb:MongoDBFamily",
    "postgres": "machinery_py.stores.postgresql:PostgreSQLFamily",
    "postgresql": "machinery_py.stores.postgresql:PostgreSQLFamily",
}


def add_family(
    scheme: str, target: str, roles: Iterable[Role] = ("broker", "result backend")
) -> None:
    """Let URLs of this scheme open a store of your own.

    Call it before the Config with such a URL is made. The keeper of a worker
    (worker/control/keeper.py) imports no code of yours, so it cannot open such a broker: its
    workers beat by themselves alone.

    Args:
        target: `module:name` of the `Family`, imported when a URL needs it.
    """
    add_scheme(scheme, roles)
    FAMILIES[scheme] = target


def is_built_in(url: str) -> bool:
    """Return whether a URL is opened by this package: by no plug-in, object or `add_family`."""
    return FAMILIES.get(scheme_of(url), "").startswith("machinery_py.")


_SEVERAL = {FAMILIES["redis"], FAMILIES["amqp"]}  # these know what to do with several URLs


def open_family(url: str, options: FamilyOptions) -> Family:
    """Return the family that a URL names; nothing is connected yet.

    Raises:
        ConfigError: the scheme is unknown, or there are several URLs of a store that takes one.
    """
    if isinstance(url, ObjectUrl):
        return ObjectFamily(url, options)
    parts = split_urls(url, options.separator)
    families = {FAMILIES.get(scheme_of(part), "") for part in parts}
    if len(parts) > 1 and not (len(families) == 1 and families <= _SEVERAL):
        shown = ", ".join(map(redact, parts))
        raise ConfigError(
            f"several URLs work with Redis or RabbitMQ only, all of one kind (found {shown})"
        )
    with not_forking():
        codecs.lookup("idna")  # every client of a server loads it when it first connects
        family = _opener(url)
    if (scheme := scheme_of(url)) not in FAMILIES:
        own = section_of(options.stores, scheme)
        options = msgspec.structs.replace(options, own=own)
    return cast(Family, family(url, options))


def _opener(url: str) -> Any:
    scheme = scheme_of(url)
    if target := FAMILIES.get(scheme):
        module, _, name = target.partition(":")
        return getattr(importlib.import_module(module), name)
    if plugin := plugin_of(scheme):
        return plugin
    raise ConfigError(f"URL {redact(url)!r}: unknown scheme (known: {', '.join(sorted(FAMILIES))})")


class ObjectFamily(Family):
    """A broker, result backend or lock that the program has made itself."""

    def __init__(self, url: ObjectUrl, options: FamilyOptions) -> None:
        super().__init__(url, options)
        self._store = url.store

    def broker(self) -> Broker:
        return self._store if isinstance(self._store, Broker) else super().broker()

    def backend(self) -> Backend:
        return self._store if isinstance(self._store, Backend) else super().backend()

    def lock(self) -> Lock:
        return self._store if isinstance(self._store, Lock) else super().lock()

    def close(self) -> None:
        if isinstance(self._store, Lock) and not isinstance(self._store, (Broker, Backend)):
            self._store.close()


_KINDS: dict[Role, type[Broker | Backend | Lock]] = {
    "broker": Broker,
    "result backend": Backend,
    "lock": Lock,
}


def url_of(store: object, role: Role) -> str | None:
    """Return a URL as it is, and for a ready-made object the URL that stands for it.

    Raises:
        ConfigError: the object cannot be used in this role.
    """
    if store is None or isinstance(store, str):
        return store
    if isinstance(store, (list, tuple)):
        raise ConfigError(
            f"{role}: found a {type(store).__name__} (expected one text: Config(broker='redis://a;"
            "redis://b', multiple_broker_separator=';'))"
        )
    if not isinstance(store, _KINDS[role]):
        raise ConfigError(
            f"{role}: found {type(store).__name__} (expected a URL or a {_KINDS[role].__name__})"
        )
    return ObjectUrl.of(store, [role for role, kind in _KINDS.items() if isinstance(store, kind)])


def split_config(config: object) -> tuple[str | None, Config | None]:
    """Return a Server's first argument as a URL, or as a Config.

    Raises:
        ConfigError: it is neither.
    """
    if config is None or isinstance(config, str):
        return config, None
    if isinstance(config, Config):
        return None, config
    raise ConfigError(
        f"Server(…): found {type(config).__name__} (expected a URL or a Config; ready-made stores "
        "are named: broker=…, result_backend=…, lock=…)"
    )


def _family_options(config: Config, clock: Clock) -> FamilyOptions:
    return FamilyOptions(
        clock=clock,
        lease=config.lease,
        expire_in=float(config.results_expire_in),
        timeout=config.publish_timeout,
        separator=config.multiple_broker_separator,
        strategy=config.broker_failover_strategy,
        strict_durability=config.strict_durability,
        go_program=config.go_program,
        redis=config.redis,
        amqp=config.amqp,
        mongodb=config.mongodb,
        default_queue=config.default_queue,
        stores=config.stores,
    )


def open_broker_family(config: Config, clock: Clock) -> Family:
    """Return the family of the broker alone; nothing is connected yet."""
    return open_family(config.broker, _family_options(config, clock))


class Stores:
    """The stores of one Server: its store, its lock and limits, and the families behind them."""

    def __init__(self, config: Config, clock: Clock) -> None:
        options = _family_options(config, clock)
        self._families: dict[str, Family] = {}
        for url in (config.broker, config.backend_url, config.lock_url):
            if url and url not in self._families:
                self._families[url] = open_family(url, options)
        broker = self._families[config.broker]
        backend = self._families[config.backend_url]
        timed = [family for family in (broker, backend) if family.keeps_time]
        #: Whose moments the application uses: for messages that the broker compares, if it can.
        self.clock: Clock = timed[0].clock if timed else clock
        for family in (broker, backend):
            if not family.keeps_time:
                family.go_by(self.clock)
        together = broker.together() if broker is backend else None
        self.store: Store = together or TwoStores(broker.broker(), backend.backend(), clock)
        features = self.store.broker.features
        if config.fair_queues and not features.fair:
            raise Unsupported(
                f"fair_queues: tenants cannot take turns in queues of the {features.name} broker "
                "(take another broker, or a queue for each tenant, and weights)"
            )
        self._lock_family = self._families.get(config.lock_url)
        self._lock: Lock | None = None
        self._limits: Limits | None = None

    @property
    def lock(self) -> Lock:
        """The lock.

        Raises:
            ConfigError: neither broker nor backend can lock, and no other store is named.
        """
        if self._lock is None:
            self._lock = self._family_of_locks("locks").lock()
        return self._lock

    @property
    def limits(self) -> Limits:
        """The store of limits, which is that of the locks.

        Raises:
            ConfigError: as `lock`.
        """
        if self._limits is None:
            self._limits = self._family_of_locks("limits").limits()
        return self._limits

    def _family_of_locks(self, what: str) -> Family:
        if self._lock_family is None:
            raise ConfigError(
                f"lock: neither the broker nor the result backend gives out {what} "
                "(set lock, for instance to redis://host)"
            )
        return self._lock_family

    @property
    def families(self) -> Iterable[Family]:
        return self._families.values()

    def close(self) -> None:
        """Give everything back. May be called twice."""
        self.store.close()
        for family in self.families:
            family.close()
