"""URLs of servers, read into records. Pure: nothing is opened and no name is looked up.

    redis://host                          port 6379, database 0
    redis://secret@host:6379/1            a lone word is the password, as in Go (redis-py: the user)
    redis://user:secret@host, redis://:secret@host
    rediss://host                         with TLS (Go turns it on in code only)
    redis+socket://secret@/run/redis.sock:/1
    redis://secret@h1,h2/0?master_name=m  sentinels (port 26379), and the master that they watch
    redis://secret@h1,h2,h3/0?tag=shop    some nodes of a Redis Cluster, which name the others
    amqp://user:secret@host:5672/vhost    a missing part is Go's default: guest:guest, 5672, vhost /
    amqps://host/vhost                    with TLS, port 5671
    mongodb://user:secret@h1:27017,h2/database?replicaSet=rs0&w=majority
    mongodb+srv://user:secret@name/database
    postgresql://user:secret@h1,h2:5432/database?sslmode=verify-full     postgres:// is the same
    memcache://h1:11211,h2:11211          each key lies on one of the servers

A vhost with a slash is percent-encoded: /%2F is the vhost "/", as are //, which Celery writes, /
and nothing. What may stand behind '?' is declared in the tables of `UrlOption`; the client
libraries of MongoDB and PostgreSQL read their options themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote

from machinery_py.errors import nearest


class BadUrl(ValueError):
    """A URL makes no sense. The text does not repeat the URL, which may hold a password."""


# Options behind '?'


class OptionKind(NamedTuple):
    """The values of an option: `read` raises ValueError or KeyError for what is not `expected`."""

    read: Callable[[str], object]
    expected: str


def number(low: int, high: int, unit: str, of: Callable[[str], float] = float) -> OptionKind:
    """Return the kind of numbers in these limits."""

    def read(text: str) -> float:
        value = of(text)
        if not low <= value <= high:  # nan is in no limits
            raise ValueError(text)
        return value

    return OptionKind(read, f"{low} to {high} {unit}")


def choice(**values: object) -> OptionKind:
    """Return the kind of these words, in any case, each of which stands for a value."""
    return OptionKind(lambda text: values[text.lower()], " or ".join(values))


def _filled(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _tag(text: str) -> str:
    if not text or "{" in text or "}" in text:
        raise ValueError(text)
    return text


FILE, NAME, SECRET, TAG = (
    OptionKind(_filled, "a path"),
    OptionKind(_filled, "a name"),
    OptionKind(_filled, "a text"),
    OptionKind(_tag, "a name without { and }"),
)


class UrlOption(NamedTuple):
    """One option of a URL.

    Attributes:
        needs: another option that must be given as well; "tls" is a scheme with TLS.
        is_secret: the value is never shown.
    """

    meaning: str
    default: object
    kind: OptionKind
    needs: str = ""
    is_secret: bool = False


HEARTBEAT = 5  # seconds; a peer that misses two is gone: tasks of a dead host run again within 15 s

TLS_OPTIONS: Mapping[str, UrlOption] = {
    "ca_file": UrlOption("trusted authorities; default: the system's", "", FILE, "tls"),
    "cert_file": UrlOption("our own certificate", "", FILE, "tls"),
    "key_file": UrlOption("the key of our certificate", "", FILE, "cert_file"),
    "verify": UrlOption(
        "`none` trusts any server, with a warning", True, choice(full=True, none=False), "tls"
    ),
}
REDIS_OPTIONS: Mapping[str, UrlOption] = {
    **TLS_OPTIONS,
    "master_name": UrlOption("the hosts are sentinels that watch this master", "", NAME),
    "sentinel_username": UrlOption("user at the sentinels", "", NAME, is_secret=True),
    "sentinel_password": UrlOption("password at the sentinels", "", SECRET, is_secret=True),
    "tag": UrlOption("hash tag of all keys in a cluster; default: `machinery`", "", TAG),
}
AMQP_OPTIONS: Mapping[str, UrlOption] = {
    "heartbeat": UrlOption(
        "time between two signs of life", HEARTBEAT, number(1, 65535, "seconds", int)
    ),
    **TLS_OPTIONS,
}


def read_options(
    query: str, table: Mapping[str, UrlOption], *, tls: bool = False
) -> dict[str, Any]:
    """Return the value of each option of the table; names and texts are percent-decoded.

    Raises:
        BadUrl: an unknown option, one that is given twice or lacks what it needs, or a wrong value.
    """
    found: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        name, equals, text = map(unquote, part.partition("="))
        if name not in table:
            # A lone word may as well be a secret.
            shown = name if equals and is_plain(name) else MASK
            known = ", ".join(sorted(table)) or "none"
            raise BadUrl(f"unknown option {shown!r} (known: {known}{nearest(shown, table)})")
        if name in found:
            raise BadUrl(f"option {name!r} is given twice")
        option = table[name]
        try:
            found[name] = option.kind.read(text)
        except (ValueError, KeyError):
            shown = text if is_plain(text) else MASK
            expected = option.kind.expected
            raise BadUrl(f"option {name!r} is {shown!r} (expected {expected})") from None
    for name in found:
        needed = table[name].needs
        if needed == "tls" and not tls:
            raise BadUrl(f"option {name!r} needs TLS (expected rediss:// or amqps://)")
        if needed not in ("", "tls", *found):
            raise BadUrl(f"option {name!r} needs {needed!r}")
    return {name: found.get(name, option.default) for name, option in table.items()}


MASK = "***"


def is_plain(text: str, *, besides: str = "._-") -> bool:
    """Whether the text is ASCII letters, digits and these characters."""
    return text.isascii() and all(c.isalnum() or c in besides for c in text)


# Parts that several schemes have


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServerUrl:
    """The credentials and TLS settings of a URL.

    Attributes:
        tls: whether the connection is encrypted; `verify`: and the server's certificate is checked.
        ca_file: of the trusted authorities, or "" for the system's.
        cert_file, key_file: our own, or "".
    """

    username: str = field(repr=False)
    password: str = field(repr=False)
    tls: bool = False
    verify: bool = True
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


def _host(text: str, default_port: int) -> tuple[str, int]:
    """Read `name`, `name:port` or `[IPv6]:port`; no name is localhost."""
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        if not bracket:
            raise BadUrl("an IPv6 address has no ']' (expected for instance [::1]:6379)")
        port = port.removeprefix(":")
    else:
        name, _, port = text.partition(":")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise BadUrl(
            "the port is no number from 1 to 65535 ('/', ':', '@' in a password are %2F, %3A, %40)"
        )
    return unquote(name) or "localhost", int(port or default_port)


def _without_fragment(address: str) -> tuple[str, str]:
    """Split the address from its query."""
    if "#" in address:
        raise BadUrl("found '#' after the host (encode it as %23)")
    place, _, query = address.partition("?")
    return place, query


# Redis


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUrl(_ServerUrl):
    """A Redis URL, read.

    Attributes:
        hosts: (name, port) of each; empty with a socket.
        path: of the Unix socket, or "".
        master_name: the hosts are sentinels, and this is the master that they watch; else "".
        tag: the hash tag of all keys in a cluster, or "".
    """

    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    database: int = 0
    master_name: str = ""
    sentinel_username: str = ""
    sentinel_password: str = field(default="", repr=False)
    tag: str = ""

    @property
    def is_cluster(self) -> bool:
        """Whether it lists nodes of a cluster; `redis.cluster_mode` tells of a single node."""
        return len(self.hosts) > 1 and not self.master_name

    @property
    def place(self) -> str:
        """Host and port, or the socket: for texts."""
        return self.path or ",".join(f"{host}:{port}" for host, port in self.hosts)


def parse_redis_url(url: str, *, master_name: str = "") -> RedisUrl:
    """Read a URL; `master_name` is for one that names none itself.

    Raises:
        BadUrl: it makes no sense.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    credentials, _, address = rest.rpartition("@")
    if re.search(rf"[?&]({'|'.join(REDIS_OPTIONS)})=", credentials):
        raise BadUrl("found '@' in an option (encode it as %40)")
    username, colon, password = map(unquote, credentials.partition(":"))
    if not colon:
        username, password = "", username
    place, query = _without_fragment(address)
    if scheme == "redis+socket":
        path, colon, database = place.partition(":")
        if not path.startswith("/") or len(path) < 2:
            raise BadUrl("found no path of a socket (expected redis+socket:///path/to.sock:/0)")
        read_options(query, {})
        number = _database(database.removeprefix("/"))
        return RedisUrl(path=unquote(path), username=username, password=password, database=number)
    options = read_options(query, REDIS_OPTIONS, tls=scheme == "rediss")
    options["master_name"] = master = options["master_name"] or master_name
    places, _, database = place.partition("/")
    hosts = tuple(_host(part, 26379 if master else 6379) for part in places.split(","))
    if len(hosts) > 1 and not master and _database(database):
        raise BadUrl(
            f"{len(hosts)} hosts are a cluster, which has database 0 only "
            "(sentinels: ?master_name=…)"
        )
    return RedisUrl(
        hosts=hosts,
        tls=scheme == "rediss",
        username=username,
        password=password,
        database=_database(database),
        **options,
    )


def _database(text: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise BadUrl(
            "the database is no number (expected redis://host/0; Go takes such a one for 0)"
        )
    return int(text or 0)


# RabbitMQ


@dataclass(frozen=True, slots=True, kw_only=True)
class AmqpUrl(_ServerUrl):
    """The URL of a RabbitMQ, read. `heartbeat`: seconds between two signs of life."""

    host: str
    port: int
    vhost: str
    heartbeat: int

    @property
    def place(self) -> str:
        """Host and port: for texts."""
        return f"{self.host}:{self.port}"


def parse_amqp_url(url: str) -> AmqpUrl:
    """Read a URL.

    Raises:
        BadUrl: it makes no sense.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    credentials, at, address = rest.rpartition("@")
    user, _, password = map(unquote, credentials.partition(":"))
    if at and not user:
        raise BadUrl("found no user before the ':' (expected amqp://user:password@host)")
    place, query = _without_fragment(address)
    place, _, vhost = place.partition("/")
    if "/" in vhost and vhost != "/":
        raise BadUrl("found a second '/' in the vhost (encode it as %2F)")
    if "," in place:
        raise BadUrl(
            "found several hosts (expected one; for several URLs set multiple_broker_separator)"
        )
    host, port = _host(place, 5671 if scheme == "amqps" else 5672)
    return AmqpUrl(
        host=host,
        port=port,
        username=user if at else "guest",
        password=password if at else "guest",
        vhost=unquote(vhost) or "/",
        tls=scheme == "amqps",
        **read_options(query, AMQP_OPTIONS, tls=scheme == "amqps"),
    )


# MongoDB

_FORBIDDEN = frozenset('/\\. "$*<>:|?\0')
_LONGEST = 63  # bytes of a database's name


def check_mongo_url(url: str) -> None:
    """Refuse what can never work; the client library reads the rest.

    Raises:
        BadUrl: no host, a bad port or database, or a write concern that confirms nothing.
    """
    scheme, _, rest = url.partition("://")
    address, _, query = rest.rpartition("@")[2].partition("?")
    hosts, _, database = address.partition("/")
    names = hosts.split(",")
    for host in names:
        if not host:
            raise BadUrl("found no host (expected mongodb://host:27017/database)")
        if host.endswith(":"):  # the client library, unlike ours, refuses an empty port
            raise BadUrl("found no port after ':' (expected mongodb://host:27017/database)")
        _host(host, 27017)
    if scheme.lower() == "mongodb+srv" and (len(names) > 1 or ":" in names[0]):
        raise BadUrl(
            "found several hosts or a port "
            "(expected mongodb+srv://name/database; the name server knows the rest)"
        )
    name = unquote(database)
    if _FORBIDDEN & set(name) or len(name.encode("utf-8", "backslashreplace")) > _LONGEST:
        raise BadUrl(
            "found a name that no database can have "
            f'(expected up to {_LONGEST} bytes without any of / \\ . " $ * < > : | ?)'
        )
    if any(part.lower().startswith("w=") and part[2:] == "0" for part in query.split("&")):
        raise BadUrl(
            "found w=0 (expected a write concern that confirms; w=majority if you say nothing)"
        )


# PostgreSQL


def check_postgres_url(url: str) -> None:
    """Refuse what can never work; the client library reads the rest.

    Raises:
        BadUrl: a bad host or port, a '#', or a '%' that libpq refuses (it shows what is around).
    """
    if re.search("%(?![0-9A-Fa-f]{2})|%00", url):
        raise BadUrl("found a '%' that two hex digits of a character do not follow (write %25)")
    address, _ = _without_fragment(url.partition("://")[2].rpartition("@")[2])
    for host in address.partition("/")[0].split(","):
        _host(host, 5432)


# memcached

Address = tuple[str, int]

_MEMCACHED = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%a-z]+\])(?::(?P<port>\d{1,5}))?", re.ASCII
)


def parse_memcache_url(url: str) -> tuple[Address, ...]:
    """Return the servers, in the order of the URL, which decides where each key lies.

    Raises:
        BadUrl: a part of it makes no sense.
    """
    expected = "(expected memcache://host:port,host:port)"
    rest = url.partition("://")[2]
    if "@" in rest:
        raise BadUrl(
            "found a user or password "
            "(memcached's plain protocol has none; protect its port instead)"
        )
    hosts, mark, more = rest.removesuffix("/").partition("/")
    if mark or "?" in rest or "#" in rest:
        found = "a path" if more and "?" not in more else "options"
        raise BadUrl(f"found {found} {expected}")
    if not hosts:
        raise BadUrl(f"found no host {expected}")
    servers = [_MEMCACHED.fullmatch(part.strip()) for part in hosts.split(",")]
    addresses = tuple(
        (one["name"].strip("[]"), int(one["port"] or 11211)) for one in servers if one
    )
    if len(addresses) < len(servers) or not all(0 < port < 65536 for _, port in addresses):
        raise BadUrl(f"one of its servers is no host:port {expected}")
    return addresses
