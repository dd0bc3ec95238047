"""`amqp://`, `amqps://`: RabbitMQ, or one of several URLs of it."""

from __future__ import annotations

from machinery_py.backends.rabbitmq.backend import AMQPBackend
from machinery_py.brokers.rabbitmq.broker import AMQPBroker
from machinery_py.brokers.rabbitmq.topology import Topology
from machinery_py.clock import Clock
from machinery_py.config.server_urls import BadUrl
from machinery_py.config.urls import redact, split_urls
from machinery_py.connections.failover import strategy_named
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.errors import ConfigError
from machinery_py.stores.open import Family, FamilyOptions


class AMQPFamily(Family):
    """A broker and a result backend, connected at the first use."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__(url, options)
        urls = split_urls(url, options.separator)
        try:
            self._driver = AmqpDriver(
                *urls,
                clock=options.clock,
                timeout=options.timeout,
                strategy=strategy_named(options.strategy),
            )
        except BadUrl as error:
            raise ConfigError(f"{', '.join(map(redact, urls))}: {error}") from None
        self._topology = Topology(options.amqp, options.default_queue)

    def broker(self) -> AMQPBroker:
        return AMQPBroker(
            self._driver, self._topology, consumer_timeout=self.options.amqp.consumer_timeout
        )

    def backend(self) -> AMQPBackend:
        return AMQPBackend(self._driver, expire_in=self.options.expire_in)

    def go_by(self, clock: Clock) -> None:
        self._driver.clock = clock

    def close(self) -> None:
        self._driver.close()
