"""The tables of stored items list exactly what a workload leaves on a real server."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psycopg

from machinery_py.bounds import STEP_BYTES
from machinery_py.brokers.mongodb.broker import MongoBroker
from machinery_py.connections.memcached import keys as memcached_keys
from machinery_py.connections.mongodb import collections as mongodb_collections
from machinery_py.connections.mongodb.client import MongoDriver
from machinery_py.connections.postgresql import schema as postgresql_schema
from machinery_py.connections.rabbitmq import queues as rabbitmq_queues
from machinery_py.connections.redis import keys as redis_keys
from machinery_py.connections.sqlite import schema as sqlite_schema
from machinery_py.connections.stored_items import StoredItem
from tests.connections.stored_workload import run
from tests.support.servers import MemcachedServer, RabbitMQServer, RedisCluster, RedisServer

Seen = set[tuple[str, str]]  # name, kind

_memories = itertools.count()


def memory() -> str:
    return f"memory://stored-{next(_memories)}"


def compare(items: Sequence[StoredItem], seen: Seen, absent: Mapping[str, str] = {}) -> None:
    """Fail unless each thing seen is in one row, and each row but the `absent` ones was seen."""
    rows = {one: [item.name for item in items if item.matches(*one)] for one in seen}
    assert {one: found for one, found in rows.items() if len(found) != 1} == {}
    found = {name for names in rows.values() for name in names}
    assert {item.name for item in items} - found == set(absent)


# Redis

_KINDS = {
    "l": "list",
    "r": "list",
    "z": "zset",
    "h": "hash",
    "s": "set",
    "x": "stream",
}  # of an event's first letter
_STRINGS = {"set", "incrby", "incr", "getset", "append", "setrange"}
_ANY_KIND = {
    "del",
    "expire",
    "expired",
    "persist",
    "new",
    "evicted",
    "rename_from",
    "rename_to",
    "restore",
}


def kind_of(event: str) -> str:
    """Return the type of the key that the event was about, or ""."""
    if event in _ANY_KIND:
        return ""
    return "string" if event in _STRINGS else _KINDS[event[0]]


@contextmanager
def noted(nodes: Iterable[RedisServer]) -> Iterator[Seen]:
    """Note each key touched, even if gone at once; complete when the block has ended."""
    import redis

    seen: Seen = set()
    threads: list[Any] = []
    clients = [redis.Redis(port=node.port) for node in nodes]
    for client in clients:
        client.config_set("notify-keyspace-events", "KA")

        def note(message: dict[str, Any]) -> None:
            key = message["channel"].decode().partition("__:")[2]
            if kind := kind_of(message["data"].decode()):
                seen.add((key, kind))

        listening = client.pubsub()
        listening.psubscribe(**{"__keyspace@*__:*": note})
        threads.append(listening.run_in_thread(sleep_time=0.05, daemon=True))
    try:
        yield seen
    finally:
        for thread in threads:
            thread.stop()
            thread.join()
        for client in clients:
            client.config_set("notify-keyspace-events", "")
            client.close()


REDIS_ABSENT = {
    "TriggerChordMutex": "only Go writes it",
}


def test_every_redis_key_is_in_the_table(empty_redis: RedisServer) -> None:
    with noted([empty_redis]) as seen:
        run(empty_redis.url)
        run(memory(), empty_redis.url)

    compare(redis_keys.ITEMS, seen, REDIS_ABSENT)


def test_every_key_in_a_redis_cluster_is_in_the_table(empty_cluster: RedisCluster) -> None:
    with noted(empty_cluster.masters) as seen:
        run(empty_cluster.url)
        run(memory(), empty_cluster.url)

    tag = "{machinery}"
    assert {key for key, _ in seen if not key.startswith(tag)} == set()
    bare = {(key.removeprefix(tag), kind) for key, kind in seen}
    compare(redis_keys.ITEMS, bare, REDIS_ABSENT)


# RabbitMQ

RABBITMQ_ABSENT = {
    "machinery.lock.looking": "lives as long as a look at waiting messages",
}


def test_every_queue_of_rabbitmq_is_in_the_table(
    rabbitmq_server: RabbitMQServer, amqp_url: str
) -> None:
    seen: Seen = set()
    vhost = amqp_url.rpartition("/")[2]

    def look() -> None:
        for kind in ("queue", "exchange"):
            names = rabbitmq_server.ctl(f"list_{kind}s", "-p", vhost, "name").splitlines()
            seen.update((name, kind) for name in names if name not in ("", "name"))
        builtin = {one for one in seen if one[1] == "exchange" and one[0].startswith("amq.")}
        seen.difference_update(builtin)

    run(amqp_url, uuid="machinery.odd", look=look)

    compare((*rabbitmq_queues.BROKER, *rabbitmq_queues.RESULT_BACKEND), seen, RABBITMQ_ABSENT)


# MongoDB


def test_every_collection_is_in_the_table(mongodb_url: str) -> None:
    from pymongo import MongoClient

    run(mongodb_url)
    run(memory(), mongodb_url)
    driver = MongoDriver(mongodb_url)
    MongoBroker(driver).once("large", "put", bytes(STEP_BYTES + 1), lambda: None)
    driver.close()

    with MongoClient[dict[str, Any]](mongodb_url) as client:
        names = client.get_default_database().list_collection_names()
    compare(mongodb_collections.ITEMS, {(name, "collection") for name in names})


# memcached


@contextmanager
def watched(server: MemcachedServer) -> Iterator[Seen]:
    """Note every item that is written. Full when the block has ended."""
    seen: Seen = set()
    watcher = socket.create_connection(("127.0.0.1", server.port))
    watcher.sendall(b"watch mutations\r\n")

    def note() -> None:
        for line in watcher.makefile("r"):
            if found := re.search(r" key=(\S+) ", line):
                seen.add((unquote(found[1]), "item"))

    thread = threading.Thread(target=note)
    thread.start()
    try:
        yield seen
    finally:
        watcher.shutdown(socket.SHUT_RDWR)
        thread.join()
        watcher.close()


def test_every_key_of_memcached_is_in_the_table(empty_memcached: MemcachedServer) -> None:
    with watched(empty_memcached) as seen:
        run(memory(), f"memcache://127.0.0.1:{empty_memcached.port}", uuid="")

    compare(memcached_keys.ITEMS, seen)


# SQLite


def test_every_table_of_sqlite_is_in_the_table(tmp_path: Path) -> None:
    run(f"sqlite:///{tmp_path}/store.db")

    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as file:
        rows = file.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    seen = {(name, "table") for (name,) in rows if not name.startswith("sqlite_")}
    compare(sqlite_schema.ITEMS, seen)


# PostgreSQL


def test_every_table_of_postgresql_is_in_the_table(postgres_url: str) -> None:
    run(postgres_url)

    with psycopg.connect(postgres_url) as connection:
        rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'machinery'")
        seen = {(name, "table") for (name,) in rows.fetchall()}
    compare(postgresql_schema.ITEMS, seen)
