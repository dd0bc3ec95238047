"""Redis URLs in Go Machinery's forms. Pure: nothing is opened and no name is looked up.

    redis://host                          port 6379, database 0
    redis://secret@host:6379/1            a lone word is the password (redis-py takes it for the user's name)
    redis://user:secret@host, redis://:secret@host
    rediss://host                         with TLS (Go turns it on in code only)
    redis+socket://secret@/run/redis.sock:/1
    redis://secret@h1:26379,h2:26379/0?master_name=m    sentinels, and the master that they watch
    redis://secret@h1,h2,h3/0             nodes of a Redis Cluster; the others are found through them

Options, where Go ignores a query; values are percent-encoded:

    ca_file, cert_file, key_file          of rediss: whom to trust (else the system's authorities), and who we are
    verify=none                           of rediss: trust whatever answers, with a warning
    master_name                           the hosts are sentinels; with sentinel_username, sentinel_password of their own
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote

DEFAULT_PORT = 6379
DEFAULT_SENTINEL_PORT = 26379

_OF_TLS = ("ca_file", "cert_file", "key_file", "verify")
_OF_SENTINELS = ("master_name", "sentinel_username", "sentinel_password")
_OPTIONS = (*_OF_TLS, *_OF_SENTINELS)


class BadRedisUrl(ValueError):
    """Fault of a Redis URL, told without the URL and its secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUrl:
    """A Redis URL, read.

    Attributes:
        hosts: (name, port) of each; empty with a socket.
        path: of the Unix socket, or "".
        tls: whether the connection is encrypted; `verify`: and the server's certificate is checked.
        ca_file: of the authorities that are trusted, or "" for the system's. `cert_file`, `key_file`: our own.
        master_name: the hosts are sentinels, and this is the master that they watch; "" if they are not.
    """

    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    tls: bool = False
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    database: int = 0
    verify: bool = True
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    master_name: str = ""
    sentinel_username: str = ""
    sentinel_password: str = field(default="", repr=False)

    @property
    def is_cluster(self) -> bool:
        """Whether it lists nodes of a cluster. That a single host is one is said by `redis.cluster_mode`."""
        return len(self.hosts) > 1 and not self.master_name

    @property
    def place(self) -> str:
        """Host and port, or the socket: for texts."""
        return self.path or ",".join(f"{host}:{port}" for host, port in self.hosts)


def parse_redis_url(url: str, *, master_name: str = "") -> RedisUrl:
    """Read a URL; `master_name` is for one that names none itself.

    Raises:
        BadRedisUrl: it makes no sense.
    """
    scheme, _, rest = url.partition("://")
    credentials, _, address = rest.rpartition("@")
    username, password = _credentials(credentials)
    if re.search(rf"[?&]({'|'.join(_OPTIONS)})=", credentials):
        raise BadRedisUrl("found '@' in an option (encode it as %40)")
    if "#" in address:
        raise BadRedisUrl("found '#' after the host (encode it as %23)")
    address, _, query = address.partition("?")
    options = _read_options(query, tls=scheme.lower() == "rediss")
    if scheme.lower() == "redis+socket":
        path, colon, database = address.partition(":")
        if not path.startswith("/") or len(path) < 2:
            raise BadRedisUrl(
                "found no path of a socket (expected redis+socket:///path/to.sock:/0)"
            )
        if options:
            raise BadRedisUrl("found options (a socket has none)")
        number = _database(database.removeprefix("/")) if colon else 0
        return RedisUrl(path=unquote(path), username=username, password=password, database=number)
    places, _, database = address.partition("/")
    master = options.pop("master_name", "") or master_name
    hosts = tuple(
        _host(part, DEFAULT_SENTINEL_PORT if master else DEFAULT_PORT) for part in places.split(",")
    )
    if len(hosts) > 1 and not master and _database(database):
        raise BadRedisUrl(
            f"{len(hosts)} hosts are a cluster, which has database 0 only (sentinels: ?master_name=…)"
        )
    verify = options.pop("verify", "full") != "none"
    return RedisUrl(
        hosts=hosts,
        tls=scheme.lower() == "rediss",
        username=username,
        password=password,
        database=_database(database),
        master_name=master,
        verify=verify,
        **options,
    )


def _read_options(query: str, *, tls: bool) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if name not in _OPTIONS or not equals:
            raise BadRedisUrl(
                f"Redis URLs have no options besides {', '.join(_OPTIONS)} ('?' of a password: %3F)"
            )
        if name in options:
            raise BadRedisUrl(f"option {name!r} is given twice")
        if name in _OF_TLS and not tls:
            raise BadRedisUrl(f"option {name!r} needs TLS (expected rediss://)")
        if not value:
            raise BadRedisUrl(f"option {name!r} is empty")
        options[name] = unquote(value)
    if options.get("verify", "full") not in ("full", "none"):
        raise BadRedisUrl("option 'verify' is neither full nor none")
    if "key_file" in options and "cert_file" not in options:
        raise BadRedisUrl("option 'key_file' needs 'cert_file'")
    return options


def _credentials(text: str) -> tuple[str, str]:
    user, colon, password = text.partition(":")
    return (unquote(user), unquote(password)) if colon else ("", unquote(text))


def _database(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()):
        raise BadRedisUrl(
            "the database is no number (expected redis://host/0; Go takes such a one for 0)"
        )
    return int(text)


def _host(text: str, default: int) -> tuple[str, int]:
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        if not bracket:
            raise BadRedisUrl("an IPv6 address has no ']' (expected redis://[::1]:6379)")
        port = port.removeprefix(":")
    else:
        name, _, port = text.partition(":")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise BadRedisUrl("the port is no number from 1 to 65535")
    return unquote(name) or "localhost", int(port or default)
