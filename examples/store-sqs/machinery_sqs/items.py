"""What a transaction of DynamoDB reads and writes: each item on condition that it is as it was."""

from __future__ import annotations

import datetime as dt
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)
Key = tuple[str, str]

NEVER = dt.datetime.max.replace(tzinfo=dt.timezone.utc)


def key_of(key: Key) -> dict[str, Any]:
    """Return the key as DynamoDB takes it."""
    return {"kind": {"S": key[0]}, "name": {"S": key[1]}}


class Faster(Exception):
    """Somebody else has written an item since it was read."""


class Items:
    """What a transaction has read, and what it will write."""

    def __init__(self, read: Callable[[Sequence[Key]], dict[Key, dict[str, Any]]]) -> None:
        self._read = read
        self._found: dict[Key, dict[str, Any] | None] = {}
        self.writes: dict[Key, tuple[bytes, float] | None] = {}
        self.chords: dict[str, str] = {}

    def load(self, keys: Iterable[Key]) -> None:
        missing = [key for key in dict.fromkeys(keys) if key not in self._found]
        found = self._read(missing) if missing else {}
        self._found.update({key: found.get(key) for key in missing})

    def get(self, key: Key, kind: type[S]) -> S | None:
        if key in self.writes:
            written = self.writes[key]
            return msgspec.msgpack.decode(written[0], type=kind) if written else None
        self.load([key])
        item = self._found[key]
        return None if item is None else msgspec.msgpack.decode(item["body"]["B"], type=kind)

    def put(self, key: Key, body: msgspec.Struct | None, ends_at: dt.datetime = NEVER) -> None:
        until = math.ceil(ends_at.timestamp()) if ends_at < NEVER else 0
        self.writes[key] = msgspec.msgpack.encode(body), until

    def delete(self, key: Key) -> None:
        self.writes[key] = None

    def requests(self, table: str) -> list[dict[str, Any]]:
        """Return the writes, each on condition that the item is as it was read."""
        return [self._request(table, key, write) for key, write in self.writes.items()]

    def _request(self, table: str, key: Key, write: tuple[bytes, float] | None) -> dict[str, Any]:
        request: dict[str, Any] = {"TableName": table}
        item = self._found.get(key)
        if item is not None:
            request["ConditionExpression"] = "version = :version"
            request["ExpressionAttributeValues"] = {":version": item["version"]}
        elif key in self._found:
            request["ConditionExpression"] = "attribute_not_exists(kind)"
        if write is None:
            return {"Delete": {**request, "Key": key_of(key)}}
        body, until = write
        # Random, and not counted on: an item that was deleted in between must not look unchanged.
        version = {"version": {"N": str(random.getrandbits(60))}}
        ttl = {"ttl": {"N": str(until)}} if until else {}
        return {"Put": {**request, "Item": {**key_of(key), "body": {"B": body}, **version, **ttl}}}
