"""Records of what lies on a server: one table per store, beside its connections.

    redis       connections/redis/keys.py            memcached   connections/memcached/keys.py
    rabbitmq    connections/rabbitmq/queues.py       sqlite      connections/sqlite/schema.py
    mongodb     connections/mongodb/collections.py   postgresql  connections/postgresql/schema.py

The tables of the documentation are drawn from them. Tests compare them with the items that a
workload leaves on real servers.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

REVOKED_LIFE = "a year after the ETA; three days once the message came"
CLAIM_LIFE = "until a worker sees that the task is over; at most `unique_for`, else a week"

_MADE = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # the random part of Go's UUIDs
_GROUP = "group(?:_flow|_rest|_retry)?"

_PLACEHOLDERS = {
    "<n>": r"\d+",
    "<level>": r"\d+",
    "<second>": r"\d+",
    "<task UUID>": rf"(?:task|chord)_{_MADE}",
    "<group UUID>": rf"{_GROUP}_{_MADE}",
    "<queue>": rf"(?!mpy:|machinery\.|amq\.|(?:task|chord|{_GROUP})_{_MADE})[^{{}}]+",
}


class StoredItem(NamedTuple):
    """One kind of thing that the library keeps on a server.

    Attributes:
        name: `<…>` stands for any text; `<task UUID>` and `<group UUID>` as Go makes them.
        kind: in the server's words: list, exchange, collection.
        holds: what is in it.
        lives: how long it is kept.
        writer: the part of the library that writes it.
        shared: whether Go Machinery has it, too.
    """

    name: str
    kind: str
    holds: str
    lives: str
    writer: str
    shared: bool = False

    def matches(self, name: str, kind: str) -> bool:
        """Say whether a thing on the server with this name and of this kind is one of these."""
        return kind == self.kind and _pattern(self.name).fullmatch(name) is not None


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"(<[^>]+>)", name)
    return re.compile(
        "".join(_PLACEHOLDERS.get(p, ".+") if p[:1] == "<" else re.escape(p) for p in parts),
        re.DOTALL,
    )
