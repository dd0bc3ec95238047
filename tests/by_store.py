"""The tests of one store: `pytest --store redis`, behind `make store STORE=redis`.

    python -m tests.by_store redis     say whether there is such a store, before any setup

A file whose path names a store belongs to that store. In the other files of `SHARED`, a test
belongs to each store named by its class, its name, its parameters or the names in its code,
and to each whose server it asks for. A test that belongs to none belongs to Redis in models/, and
to memory elsewhere. So every test of these files is in some store.
"""

from __future__ import annotations

import fnmatch
import pathlib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

TESTS = pathlib.Path(__file__).parent


@dataclass(frozen=True)
class Known:
    """How the tests of a store are known."""

    words: str  # a pattern, looked for in the path of a file, and in a test's names
    servers: frozenset[str] = frozenset()  # fixtures


#: The first entry with a word in the file's path wins: `stores/redis_cluster/` is the cluster's.
STORES: dict[str, Known] = {
    "rabbitmq": Known("amqp|rabbitmq", frozenset({"rabbitmq_server"})),
    "memcached": Known("memcache", frozenset({"memcached_server"})),
    "mongodb": Known("mongo", frozenset({"mongodb_server"})),
    "postgresql": Known("postgres", frozenset({"postgres_url"})),
    "sqlite": Known("sqlite"),
    "cluster": Known("cluster", frozenset({"redis_cluster"})),
    "redis": Known("redis(?!_?cluster)", frozenset({"redis_server", "redis_sentinels"})),
    "memory": Known("memory"),
}

#: Files with tests of several stores.
SHARED = (
    "backends/test_*.py",
    "brokers/test_*.py",
    "connections/test_*.py",
    "limits/test_*.py",
    "locks/test_*.py",
    "models/test_*.py",
    "stores/test_*.py",
    "system/test_control.py",
    "system/test_events.py",
    "system/test_limited.py",
    "system/test_pairs.py",
    "system/test_unique.py",
    "system/test_workflows.py",
)

#: Left to `make test`, even where the path names a store: whole fleets, killed processes, Go.
LEFT_OUT = ("chaos/*", "interop/*", "system/test_*crash*.py", "system/test_*faults.py")


def complaint(store: str) -> str:
    """Return what is wrong with the name of a store, or ""."""
    return (
        "" if store in STORES else f"unknown STORE {store!r} (known: {', '.join(sorted(STORES))})"
    )


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Say whether one of the patterns fits the path, below tests/."""
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def store_of_file(path: str) -> str | None:
    """Return the store that the path, below tests/, names."""
    return next((name for name, one in STORES.items() if re.search(one.words, path)), None)


def is_left_out(path: str) -> bool:
    """Say whether no loop of a store has the file."""
    return matches(path, LEFT_OUT)


def is_wanted(path: str, store: str) -> bool:
    """Say whether the file, by its path below tests/, may hold tests of the store."""
    if is_left_out(path):
        return False
    owner = store_of_file(path)
    return matches(path, SHARED) if owner is None else owner == store


def stores_of_test(path: str, names: str, fixtures: Iterable[str]) -> frozenset[str]:
    """Return the stores of a test, by its file below tests/, its names, and its fixtures."""
    if owner := store_of_file(path):
        return frozenset({owner})
    lowered, asked = names.lower(), frozenset(fixtures)
    found = {
        store
        for store, one in STORES.items()
        if re.search(one.words, lowered) or asked & one.servers
    }
    return frozenset(found or {"redis" if path.startswith("models/") else "memory"})


def _names(item: pytest.Item) -> str:
    """Return class, name and parameters of the test, and names in its code (`RedisServer`)."""
    code = getattr(getattr(item, "function", None), "__code__", None)
    return " ".join([item.nodeid.partition("::")[2], *(code.co_names if code else ())])


def _below(path: pathlib.Path) -> str:
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store", metavar="STORE", help=f"run one store's tests: {', '.join(STORES)}")


def pytest_configure(config: pytest.Config) -> None:
    store = config.getoption("--store")
    if store is not None and complaint(store):
        raise pytest.UsageError(complaint(store))


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    store = config.getoption("--store")
    path = _below(collection_path)
    if store is None or not re.search(r"(^|/)test_[^/]*\.py$", path) or is_wanted(path, store):
        return None
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    store = config.getoption("--store")
    if store is None:
        return
    kept, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        belongs = stores_of_test(_below(item.path), _names(item), getattr(item, "fixturenames", ()))
        (kept if store in belongs else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


if __name__ == "__main__":
    sys.exit(complaint(sys.argv[1]) or 0)
