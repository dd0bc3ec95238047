"""The URLs of memcached, as Go Machinery writes them: `memcache://h1:p1,h2:p2`. Pure: no name is looked up."""

from __future__ import annotations

import re

PORT = 11211

_HOST = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%a-z]+\])(?::(?P<port>\d{1,5}))?", re.ASCII
)

Address = tuple[str, int]


class BadMemcacheUrl(ValueError):
    """Why the URL cannot be used; the text has no secret."""


def parse_memcache_url(url: str) -> tuple[Address, ...]:
    """The servers, in the order of the URL, which decides where each key lies.

    Raises:
        BadMemcacheUrl: a part of it makes no sense.
    """
    rest = url.partition("://")[2]
    if "@" in rest:
        raise BadMemcacheUrl(
            "found a user or password (memcached's plain protocol has none; protect its port instead)"
        )
    hosts, mark, more = rest.removesuffix("/").partition("/")
    if mark or "?" in rest or "#" in rest:
        raise BadMemcacheUrl(
            f"found {'a path' if more and '?' not in more else 'options'} (expected memcache://host:port,host:port)"
        )
    if not hosts:
        raise BadMemcacheUrl("found no host (expected memcache://host:port,host:port)")
    return tuple(_address(part.strip()) for part in hosts.split(","))


def _address(text: str) -> Address:
    found = _HOST.fullmatch(text)
    port = int(found["port"] or PORT) if found else 0
    if found is None or not 0 < port < 65536:
        raise BadMemcacheUrl(
            "one of its servers is no host:port (expected memcache://host:port,host:port)"
        )
    return found["name"].strip("[]"), port
