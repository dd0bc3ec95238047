"""Scripts and models in a Redis Cluster: each step stays in one slot and names its guard."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from machinery_py.connections.redis.scripts import Script
from machinery_py.connections.redis.slots import clustered, guard, local_key, slot_of
from tests.models.beside import DUMP, Beside, Reading
from tests.models.machine import ScriptMachine
from tests.models.redis import Redis

# Before Redis 7 scripts have no flags, and may read all slots of a node.
ALLOW = b"#!lua flags=no-writes,allow-cross-slot-keys"


class ClusterBeside(Beside):
    """A node that has all slots, and the model of it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.prefix = b""  # names the slot of the next step
        if "redis_version:6" not in self.ask("INFO", "server"):
            self.dumping = ALLOW + DUMP

    def evaluate(self, script: Script, argument: bytes) -> Any:
        return self.link.ask(b"EVAL", script.body, b"1", guard(self.prefix), argument)

    def run(
        self,
        script: Script,
        model: Callable[..., Any],
        *values: Any,
        reading: Reading = lambda reply: reply,
    ) -> Any:
        before = self.model.saved()[0]
        reply = super().run(script, model, *values, reading=reading)
        for key in before.keys() | self.model.keys.keys():
            if before.get(key) != self.model.keys.get(key):
                assert slot_of(key.encode("latin-1")) == slot_of(self.prefix), (
                    f"{key} is in another slot than {self.prefix!r}"
                )
        return reply


class LocalKeys(MutableMapping[str, Any]):
    """The keys as a script of `clustered` names them."""

    def __init__(self, keys: MutableMapping[str, Any], prefix: bytes) -> None:
        self._keys = keys
        self._prefix = prefix

    def _of(self, key: str) -> str:
        return local_key(self._prefix, key.encode("latin-1")).decode("latin-1")

    def __getitem__(self, key: str) -> Any:
        return self._keys[self._of(key)]

    def __setitem__(self, key: str, value: Any) -> None:
        self._keys[self._of(key)] = value

    def __delitem__(self, key: str) -> None:
        del self._keys[self._of(key)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def local(redis: Redis, prefix: bytes) -> Redis:
    """The same Redis, as a script of `clustered` sees it."""
    view = Redis()
    view.keys, view.expires = LocalKeys(redis.keys, prefix), LocalKeys(redis.expires, prefix)
    view.published, view.woken, view.choose = redis.published, redis.woken, redis.choose
    return view


class ClusterMachine(ScriptMachine):
    beside: ClusterBeside

    def open(self) -> Beside:
        return ClusterBeside(self.url)

    def run_at(
        self,
        prefix: bytes,
        script: Script,
        model: Any,
        *values: Any,
        reading: Reading = lambda reply: reply,
    ) -> Any:
        """In the slot of this prefix."""
        self.beside.prefix = prefix
        return self.beside.run(script, model, *values, reading=reading)

    def run_local(
        self,
        prefix: bytes,
        script: Script,
        model: Any,
        *values: Any,
        reading: Reading = lambda reply: reply,
    ) -> Any:
        """A script of one Redis, as a driver of this slot runs it."""

        @functools.wraps(model)
        def there(redis: Redis, *more: Any) -> Any:
            return model(local(redis, prefix), *more)

        return self.run_at(prefix, clustered(script), there, *values, reading=reading)
