"""A small Redis: typed keys, some with an expiry, and scripts that are done or refused whole."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any


class WrongType(Exception):
    """A key holds something else than is asked for."""


class Zset(dict[str, float]):
    """Member → score."""

    def in_order(self) -> list[tuple[str, float]]:
        return sorted(self.items(), key=lambda one: (one[1], one[0]))


class Hash(dict[str, str]):
    pass


class Bag(list[Any]):
    """A list in a reply whose order is Redis' affair."""


KINDS: dict[type, str] = {str: "string", list: "list", set: "set", Zset: "zset", Hash: "hash"}


Saved = tuple[dict[str, Any], dict[str, float], list[str], Bag]


class Redis:
    """What each key holds; reading one that is not there gives an empty value.

    Attributes:
        published: channels on which something was said during this step.
        woken: connections that this step wants to be woken.
        choose: which of a set's members the real server took, where a script leaves it the choice.
    """

    def __init__(self) -> None:
        self.keys: MutableMapping[str, Any] = {}
        self.expires: MutableMapping[str, float] = {}
        self._wanted: dict[str, type] = {}  # what this step takes keys for
        self.published: list[str] = []
        self.woken: Bag = Bag()
        self.choose: Callable[[str, set[str], int], Iterable[str]] = lambda key, members, count: (
            sorted(members)[:count]
        )

    def begin(self) -> None:
        self.published, self.woken = [], Bag()
        self._wanted = {}

    def saved(self) -> Saved:
        keys = {key: copy.copy(value) for key, value in self.keys.items()}
        return keys, dict(self.expires), list(self.published), Bag(self.woken)

    def restore(self, saved: Saved) -> None:
        self.keys, self.expires, self.published, self.woken = saved

    def expect(self, key: str, kind: type) -> None:
        """Refuse the script if the key holds another type, or should hold two at once."""
        found = type(self.keys[key]) if key in self.keys else self._wanted.get(key, kind)
        if found is not kind:
            raise WrongType(f"{key} holds a {KINDS[found]}, not a {KINDS[kind]}")
        self._wanted[key] = kind

    def _there(self, key: str, kind: type) -> Any:
        self.expect(key, kind)
        return self.keys.get(key, kind())

    def _made(self, key: str, kind: type) -> Any:
        self.expect(key, kind)
        return self.keys.setdefault(key, kind())

    def _tidy(self, key: str) -> None:
        if key in self.keys and not self.keys[key] and type(self.keys[key]) is not str:
            self.delete(key)

    # Keys

    def exists(self, key: str) -> bool:
        return key in self.keys

    def delete(self, *keys: str) -> None:
        for key in keys:
            self.keys.pop(key, None)
            self.expires.pop(key, None)

    def expire(self, key: str, seconds: float) -> None:
        if key in self.keys:
            self.expires[key] = time.time() + seconds

    def persist(self, key: str) -> None:
        self.expires.pop(key, None)

    def seconds_left(self, key: str) -> float:
        return self.expires[key] - time.time() if key in self.expires else -1.0

    # Strings

    def get(self, key: str) -> str | None:
        self.expect(key, str)
        return self.keys.get(key)

    def keep(
        self, key: str, value: str, *, seconds: float = 0.0, keep_expiry: bool = False
    ) -> None:
        self.keys[key] = value
        if seconds:
            self.expire(key, seconds)
        elif not keep_expiry:
            self.persist(key)

    def count(self, key: str, more: int = 1) -> int:
        """Raise a counter."""
        number = int(self.get(key) or 0) + more
        self.keys[key] = str(number)
        return number

    def fences(self, key: str, count: int, now: int) -> int:
        first = max(int(self.get(key) or 0) + 1, now)
        self.keep(key, str(first + count - 1))
        return first

    # Lists

    def items(self, key: str) -> list[str]:
        return list(self._there(key, list))

    def push(self, key: str, *items: str) -> None:
        self._made(key, list).extend(items)

    def push_first(self, key: str, item: str) -> None:
        self._made(key, list).insert(0, item)

    def take(self, key: str, most: int) -> list[str]:
        """Off the head."""
        items: list[str] = self._there(key, list)
        taken = items[:most]
        del items[:most]
        self._tidy(key)
        return taken

    # Sets

    def members(self, key: str) -> set[str]:
        return set(self._there(key, set))

    def add(self, key: str, member: str) -> bool:
        """False if it was in."""
        members = self._made(key, set)
        new = member not in members
        members.add(member)
        return new

    def remove(self, key: str, *gone: str) -> None:
        self._there(key, set).difference_update(gone)
        self._tidy(key)

    def take_any(self, key: str, most: int) -> list[str]:
        members = self.members(key)
        taken = list(members if most >= len(members) else self.choose(key, members, most))
        self.remove(key, *taken)
        return taken

    # Sorted sets

    def scores(self, key: str) -> Zset:
        return Zset(self._there(key, Zset))

    def score(self, key: str, member: str, score: float) -> None:
        self._made(key, Zset)[member] = float(score)

    def unscore(self, key: str, member: str) -> bool:
        there = self._there(key, Zset).pop(member, None) is not None
        self._tidy(key)
        return there

    def unscore_up_to(self, key: str, score: float) -> None:
        for member, value in self.scores(key).items():
            if value <= score:
                self.unscore(key, member)

    # Hashes

    def fields(self, key: str) -> Hash:
        return Hash(self._there(key, Hash))

    def write(self, key: str, fields: Mapping[str, str]) -> None:
        self._made(key, Hash).update(fields)

    def erase(self, key: str, field: str) -> str | None:
        value: str | None = self._there(key, Hash).pop(field, None)
        self._tidy(key)
        return value
