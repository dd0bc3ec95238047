"""The listings of a Redis Cluster's backend, in shards, so that no node has all of them.

Keys: connections/redis/keys.py.

They are written after the states (a crash in between leaves a finished task in `open`), but for the notes of
records, which are written before them.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterable, Iterator, Sequence

from machinery_py.backends.redis import cluster_scripts as scripts
from machinery_py.backends.redis.scripts import NEWEST
from machinery_py.connections.redis.cluster import RedisClusterDriver
from machinery_py.connections.redis.requests import Request, script_at
from machinery_py.connections.redis.scripts import pack

SHARDS = 8  # each is looked at every few seconds by each worker
PREFIXES = tuple(b"mpy:{list%d}:" % number for number in range(SHARDS))
PAGE = 500  # names that are read from a shard at once

Finished = tuple[str, str]
"""Name, and state and queue in one word."""


def shard_of(name: str) -> bytes:
    return PREFIXES[zlib.crc32(name.encode()) % SHARDS]


def by_shard(names: Iterable[str]) -> dict[bytes, list[str]]:
    found: dict[bytes, list[str]] = {}
    for name in names:
        found.setdefault(shard_of(name), []).append(name)
    return found


def list_requests(
    now: str, done: Sequence[Finished], open: Sequence[str], *, replayed: bool
) -> list[Request]:
    """Return the requests that list these tasks as finished, and those as changed."""
    ends = dict(done)
    requests: list[Request] = []
    finished, others = by_shard(ends), by_shard(dict.fromkeys(open))
    for prefix in finished.keys() | others.keys():
        names = finished.get(prefix, [])
        values = (now, names, [ends[name] for name in names], others.get(prefix, []), replayed)
        requests.append(script_at(prefix, scripts.LIST, pack(values)))
    return requests


class Newest:
    """The names in some of the sets, the newest first."""

    def __init__(self, cluster: RedisClusterDriver, sets: Sequence[str], since: int) -> None:
        self._cluster = cluster
        self._keys = [(prefix, prefix + name.encode()) for prefix in PREFIXES for name in sets]
        self._since = since

    def __iter__(self) -> Iterator[str]:
        first = self._read(self._keys, 0)
        seen: set[str] = set()
        for _, name in heapq.merge(*map(self._rows, self._keys, first)):
            if name not in seen:
                seen.add(name)
                yield name

    def _rows(
        self, key: tuple[bytes, bytes], rows: list[tuple[int, str]]
    ) -> Iterator[tuple[int, str]]:
        skipped = 0
        while rows:
            yield from rows
            if len(rows) < PAGE:
                return
            skipped += PAGE
            (rows,) = self._read([key], skipped)

    def _read(
        self, keys: Sequence[tuple[bytes, bytes]], skipped: int
    ) -> list[list[tuple[int, str]]]:
        replies = self._cluster.run(
            NEWEST,
            [(prefix, ([key.decode()], self._since, skipped, PAGE)) for prefix, key in keys],
        )
        return [sorted((-int(score), name.decode()) for name, score in rows) for rows in replies]
