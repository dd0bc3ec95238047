"""The settings that one kind of store has. Names, units and defaults of what Go has are Go's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from machinery_py.config.options import Length, Section, WholeLength, length_option, option

#: Sections of Go's files that are refused, and the store that each is for.
NOT_PORTED = {
    "sqs": "Amazon SQS",
    "dynamodb": "Amazon DynamoDB",
    "gcppubsub": "Google Pub/Sub",
    "gcp_pub_sub": "Google Pub/Sub",
    "pubsub": "Google Pub/Sub",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig(Section):
    """Section `redis`: connections, polling and key names of the Redis stores. Mind Go's units."""

    PREFIX: ClassVar[str] = "redis."

    max_idle: int = option(64, "most unused connections that stay open (Go: 3)")
    max_active: int = option(0, "most connections; 0 = no limit")
    max_idle_timeout: WholeLength = length_option(
        240,
        "an unused connection is closed after this; 0 = never",
        "s",
        variable="REDIS_IDLE_TIMEOUT",
    )
    wait: bool = option(False, "at `max_active` wait for a connection instead of failing")
    read_timeout: Length = length_option(
        15.0, "longest wait for a reply; 0 = `publish_timeout`, which is the longest anyway", "s"
    )
    write_timeout: Length = length_option(
        15.0, "longest wait until a command is sent; 0 and limit as with `read_timeout`", "s"
    )
    connect_timeout: Length = length_option(
        15.0, "longest wait for a connection; 0 and limit as with `read_timeout`", "s"
    )
    normal_tasks_poll_period: WholeLength = length_option(
        1000,
        "longest pause between two polls of an empty queue; 0 = 1000",
        "ms",
        empty_is_default=True,
    )
    delayed_tasks_poll_period: WholeLength = length_option(
        500,
        "Go's; not used here: a worker wakes when the next task is due",
        "ms",
        empty_is_default=True,
    )
    delayed_tasks_key: str = option(
        "delayed_tasks", "key of the delayed tasks", empty_is_default=True
    )
    client_name: str = option("", "name of the connections in `CLIENT LIST`")
    master_name: str = option(
        "", "name of the master; the URL's hosts are the sentinels that watch it"
    )
    cluster_mode: bool = option(False, "the URL's only host belongs to a Redis Cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class AMQPConfig(Section):
    """Section `amqp`: exchange, binding and queue arguments of the RabbitMQ stores."""

    PREFIX: ClassVar[str] = "amqp."

    exchange: str = option("machinery_exchange", "exchange that tasks are published to", low=1)
    exchange_type: str = option(
        "direct", "type of the exchange: `direct`, `fanout`, `topic`, …", low=1
    )
    queue_declare_args: Mapping[str, object] = option(
        {}, "arguments of queue.declare, as `x-max-priority: 10`"
    )
    queue_binding_args: Mapping[str, object] = option(
        {}, "arguments of queue.bind, for exchanges of type `headers`"
    )
    binding_key: str = option(
        "machinery_task", "key that binds the queue; the route of a task on a direct exchange"
    )
    prefetch_count: int = option(3, "Go's; not used here, see `prefetch`")
    auto_delete: bool = option(False, "Go's, for its delay queues; not used here")
    delayed_queue: str = option("", "Go's, for its delay queues; not used here")
    consumer_timeout: Length = length_option(
        1800.0,
        "the server's `consumer_timeout`; longer tasks are held in another way",
        "s",
        low=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MongoDBConfig(Section):
    """Section `mongodb`. Go takes these from code only."""

    PREFIX: ClassVar[str] = "mongodb."

    database: str = option("", "name of the database; empty = the one in the URL, else `machinery`")
