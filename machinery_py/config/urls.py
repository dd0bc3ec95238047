"""Store URLs: the roles of each scheme, the check of a URL, and redaction of secrets.

    eager, eager://                    tasks run inside `send`
    memory://, memory://name           one store inside this process; equal names share it
    sqlite:///relative.db              a file, seen from the working directory
    sqlite:////absolute/path.db        the same with a fourth slash
    null, null://                      a result backend that keeps nothing
    redis://secret@host:6379/0         one Redis; rediss:// with TLS, redis+socket:///path.sock:/0
    redis://s1,s2/0?master_name=m      the master of these sentinels; else nodes of a cluster
    amqp://user:secret@host:5672/vhost  RabbitMQ; amqps:// with TLS
    mongodb://user:secret@h1,h2/db     a MongoDB; mongodb+srv://name/db by its name server
    postgresql://user:secret@h1,h2/db  a PostgreSQL; or postgres://
    memcache://h1:11211,h2:11211       memcached servers; each key lies on one of them

Nothing is opened and no name is looked up. Other schemes are those of store plug-ins (plugins.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from machinery_py.config.plugins import plugin_of, plugin_schemes
from machinery_py.config.server_urls import (
    AMQP_OPTIONS,
    MASK,
    REDIS_OPTIONS,
    BadUrl,
    UrlOption,
    check_mongo_url,
    check_postgres_url,
    choice,
    is_plain,
    number,
    parse_amqp_url,
    parse_memcache_url,
    parse_redis_url,
    read_options,
)
from machinery_py.errors import ConfigError, nearest

Role = Literal["broker", "result backend", "lock"]

#: Name of the setting → the role of its URL.
ROLES: Mapping[str, Role] = {"broker": "broker", "result_backend": "result backend", "lock": "lock"}

_EVERYTHING: frozenset[Role] = frozenset({"broker", "result backend", "lock"})
_MESSAGES: frozenset[Role] = frozenset({"broker", "result backend"})
_RESULTS: frozenset[Role] = frozenset({"result backend"})

SCHEMES: dict[str, frozenset[Role]] = {
    "amqp": _MESSAGES,
    "amqps": _MESSAGES,
    "eager": _EVERYTHING,
    "memcache": _RESULTS,
    "memory": _EVERYTHING,
    "mongodb": _EVERYTHING,
    "mongodb+srv": _EVERYTHING,
    "null": _RESULTS,
    "postgres": _EVERYTHING,
    "postgresql": _EVERYTHING,
    "redis": _EVERYTHING,
    "redis+socket": _EVERYTHING,
    "rediss": _EVERYTHING,
    "sqlite": _EVERYTHING,
}
"""Roles of each scheme. A new store adds its line here."""

EMBEDDED: frozenset[str] = frozenset({"eager", "memory", "sqlite"})
"""Stores that need no server, and therefore serve one machine or one process only."""

_BARE = frozenset({"eager", "null"})  # Go writes these without "://"
_NOT_PORTED = {
    "gcppubsub": "Google Pub/Sub",
    "http": "Amazon SQS or DynamoDB",
    "https": "Amazon SQS or DynamoDB",
}

SQLITE_OPTIONS: Mapping[str, UrlOption] = {
    "busy_timeout": UrlOption(  # after an hour nobody gives the file back any more
        "how long a writer waits for the one before it", 5.0, number(0, 3600, "seconds")
    ),
    "synchronous": UrlOption(
        "`full` survives a power cut, `normal` only the end of the process",
        "full",
        choice(full="full", normal="normal"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrl:
    """The URL of a store without a server, read. `SQLITE_OPTIONS` says what the options mean.

    Attributes:
        scheme: "sqlite", "memory", "eager" or "null".
        path: of the SQLite file, absolute or seen from the working directory; else "".
        name: of the memory store, "" for the unnamed one.
    """

    scheme: str
    path: str = ""
    name: str = ""
    synchronous: str = "full"
    busy_timeout: float = 5.0

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        """Read the URL of an embedded store or of `null`, percent-decoded.

        Raises:
            ConfigError: the scheme needs a server, or the rest of the URL makes no sense for it.
        """
        try:
            return _parse_embedded(url)
        except BadUrl as error:
            raise _refused(url, "store", str(error)) from None


def _parse_embedded(url: str) -> StoreUrl:
    scheme = scheme_of(url)
    rest = url.partition("://")[2]
    location, _, query = rest.partition("?")
    location = unquote(location)
    match scheme:
        case "sqlite":
            return StoreUrl(
                scheme=scheme, path=_sqlite_path(location), **read_options(query, SQLITE_OPTIONS)
            )
        case "memory":
            read_options(query, {})
            if not is_plain(location):
                raise BadUrl("the name of a memory store is letters, digits, '.', '_' and '-'")
            return StoreUrl(scheme=scheme, name=location)
        case "eager" | "null":
            if rest:
                raise BadUrl(f"found something after '{scheme}://' (expected only {scheme!r})")
            return StoreUrl(scheme=scheme)
        case _:
            raise BadUrl(f"{scheme!r} is no embedded store (embedded: {_listed(EMBEDDED)})")


def _sqlite_path(location: str) -> str:
    if location in {"", "/"} or location.lower().lstrip("/") == ":memory:":
        raise BadUrl("found no file (for a store inside this process: memory://)")
    if not location.startswith("/"):
        raise BadUrl("found a host (expected sqlite:///relative.db or sqlite:////absolute/path.db)")
    if location.endswith("/") or "\0" in location:
        raise BadUrl("found a folder or a NUL (expected the name of a file)")
    return location[1:]


def scheme_of(url: str) -> str:
    """Return the scheme in lower case, or "" if the text is no URL; bare `eager` and `null` are."""
    scheme, mark, _ = url.partition("://")
    if mark and _is_scheme(scheme):
        return scheme.lower()
    return url.lower() if url.lower() in _BARE else ""


class ObjectUrl(str):
    """URL that stands for a ready-made broker, result backend or lock, and carries it."""

    __slots__ = ("roles", "store")

    roles: frozenset[Role]
    store: object

    @classmethod
    def of(cls, store: object, roles: Iterable[Role]) -> ObjectUrl:
        """Return the URL of this object; equal ones carry the same."""
        url = cls(f"object://{type(store).__name__}-{id(store):x}")
        url.roles, url.store = frozenset(roles), store
        return url


def serves(url: str, role: Role) -> bool:
    """Whether a URL of this scheme can be the broker, result backend or lock."""
    return role in _roles_of(url)


def _roles_of(url: str) -> frozenset[str]:
    """Return the roles of a URL's scheme; none if it is unknown."""
    if isinstance(url, ObjectUrl):
        return url.roles
    scheme = scheme_of(url)
    if scheme in SCHEMES:
        return SCHEMES[scheme]
    plugin = plugin_of(scheme)
    return frozenset(plugin.roles) if plugin is not None else frozenset()


def add_scheme(scheme: str, roles: Iterable[Role]) -> None:
    """Accept URLs of this scheme in these roles; only the store that opens them reads the rest."""
    SCHEMES[scheme] = frozenset(roles)
    _READERS[scheme] = scheme_of


def split_urls(text: str, separator: str) -> tuple[str, ...]:
    """Return the URLs of a text that may hold several; an empty separator means that it holds one.

    A text whose parts are not all URLs is one URL: the separator is in its password.
    """
    if isinstance(text, ObjectUrl) or not separator:
        return (text,)
    parts = [part for part in map(str.strip, text.split(separator)) if part]
    return tuple(parts) if parts and all(map(scheme_of, parts)) else (text,)


def check_url(url: str, role: Role, *, master_name: str = "") -> None:
    """Refuse a URL that cannot be used in this role, without opening a connection.

    With a `master_name`, hosts of a Redis URL are sentinels.

    Raises:
        ConfigError: unknown scheme, a scheme for another role, or a malformed rest.
    """
    if not url.strip():
        raise ConfigError(
            f"{role} URL is empty (expected for instance 'sqlite:///machinery.db' or 'memory://')"
        )
    scheme = scheme_of(url)
    known = ", ".join(sorted(name for name, roles in SCHEMES.items() if role in roles))
    try:
        if not scheme:
            hint = nearest(url, SCHEMES)
            raise BadUrl(f"no scheme (expected scheme://…, known: {known}{hint})")
        roles = _roles_of(url)
        if not roles and scheme in _NOT_PORTED:
            raise BadUrl(f"{_NOT_PORTED[scheme]} is not supported (known: {known})")
        if not roles:
            raise BadUrl(f"unknown scheme {scheme!r} (known: {known}{_advice(scheme)})")
        if role not in roles:
            raise BadUrl(f"{scheme!r} works as {_listed(roles)} only (as {role}: {known})")
        if scheme in _REDIS:
            parse_redis_url(url, master_name=master_name)
        elif scheme in SCHEMES:
            _READERS.get(scheme, _parse_embedded)(url)
    except BadUrl as error:
        raise _refused(url, role, str(error) + _if_several(url)) from None


def _if_several(url: str) -> str:
    """Return the end of an error text for what may be several URLs; "" for one."""
    for mark in ";,":
        parts = [part.strip() for part in url.split(mark)]
        if len(parts) > 1 and (all(map(scheme_of, parts)) or not scheme_of(url)):
            return (
                "; several brokers in one text need "
                f"Config(multiple_broker_separator={mark!r}, …), "
                "and several hosts of one server are one URL: redis://h1,h2/0"
            )
    return ""


_READERS: dict[str, Callable[[str], object]] = {
    "amqp": parse_amqp_url,
    "amqps": parse_amqp_url,
    "memcache": parse_memcache_url,
    "mongodb": check_mongo_url,
    "mongodb+srv": check_mongo_url,
    "postgres": check_postgres_url,
    "postgresql": check_postgres_url,
}
_REDIS = frozenset({"redis", "redis+socket", "rediss"})


def _advice(scheme: str) -> str:
    """Return the end of an error text: plug-ins that are installed, and what to do."""
    plugins = plugin_schemes()
    installed = f"; from plug-ins: {', '.join(plugins)}" if plugins else ""
    near = nearest(scheme, [*SCHEMES, *plugins])
    return f"{installed}{near or '; no installed package brings it: is its plug-in missing?'}"


def _refused(url: str, role: str, text: str) -> ConfigError:
    return ConfigError(f"{role} URL {redact(url)!r}: {text}")


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))


def _is_scheme(text: str) -> bool:
    return text[:1].isalpha() and is_plain(text, besides="+.-")


# Redaction

_SHORTEST_SECRET = 3  # letters; a shorter one would be found everywhere

_USER_FIRST = frozenset({"amqp", "amqps", "mongodb", "mongodb+srv", "postgres", "postgresql"})
"""Schemes whose word before the colon is a user; with Redis it may be a part of the password."""

_OPTIONS = {**AMQP_OPTIONS, **REDIS_OPTIONS, **SQLITE_OPTIONS}
_HARMLESS = frozenset({
    "application_name", "authsource", "channel_binding", "compressors", "connect",
    "connect_timeout", "connecttimeoutms", "connection_attempts", "connection_timeout", "db",
    "directconnection", "gssencmode", "journal", "keepalives", "keepalives_count",
    "keepalives_idle", "keepalives_interval", "load_balance_hosts", "loadbalanced", "maxpoolsize",
    "protocol", "readpreference", "replicaset", "retry_delay", "retryreads", "retrywrites",
    "serverselectiontimeoutms", "socket_timeout", "sockettimeoutms", "ssl", "sslmode",
    "target_session_attrs", "tcp_user_timeout", "timeout", "tls", "w", "wtimeoutms",
    *(name for name, option in _OPTIONS.items() if not option.is_secret),
})  # fmt: skip
"""Options whose values may be shown: an incomplete list of secret ones would show a secret."""


def redact(url: str) -> str:
    """Return the URL with everything masked that is, or might be, a secret.

    Credentials stand before the *last* '@', since passwords are often not encoded. Of a query,
    options known as harmless are shown up to the first that is not. If a URL is malformed, more is
    masked than needed. Masking twice changes nothing.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url if url.lower() in {"", *SCHEMES} else MASK
    if not _is_scheme(scheme):
        return MASK
    shown = scheme + mark
    if scheme.lower() == "sqlite" and (rest.startswith("/") or rest == ":memory:"):
        if ":" in (before := rest.rpartition("@")[0]) and "?" in before:
            return shown + MASK  # as below
        path, question, query = rest.partition("?")  # '@' or '#' may be in a file's name
        credentials, _, file = path.rpartition("@")
        path = f"/{MASK}@{file}" if ":" in credentials else path
        return shown + path + question + _redact_query(query)
    credentials, at, address = rest.rpartition("@")
    if "?" in credentials:
        return shown + MASK  # of a password or of the query, and its '@' likewise
    if at and rest.startswith("/") and scheme.lower() != "redis+socket":
        return shown + MASK  # no host: what stands behind the '@' may be a part of a password
    if at:
        shown += _redact_credentials(scheme.lower(), credentials) + at
    return shown + _redact_address(scheme.lower(), address)


def without_secrets(text: str, *urls: str) -> str:
    """Return the text of a server or a client library with the secrets of these URLs masked."""
    secrets = {secret for url in urls for secret in _secrets(url)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def redact_word(text: str) -> str:
    """Return a word that should be no URL, redacted if it looks like one or like a part of one."""
    return redact(text) if "://" in text or "@" in text else text


def redact_words(text: str) -> str:
    """Mask the user's words, behind the first ": " of a message, if one looks like a URL."""
    return f"{text.partition(': ')[0]}: {MASK}" if "://" in text or "@" in text else text


def _secrets(url: str) -> Iterator[str]:
    rest, _, query = url.partition("://")[2].partition("?")
    credentials = rest.rpartition("@")[0]
    options = [part.partition("=") for part in query.split("&")]
    values = [value for name, _, value in options if name.lower() not in _HARMLESS]
    for raw in (credentials, credentials.partition(":")[2], *values):
        yield from (secret for secret in (raw, unquote(raw)) if len(secret) >= _SHORTEST_SECRET)


def _redact_credentials(scheme: str, credentials: str) -> str:
    user, colon, _ = credentials.partition(":")
    if scheme in _USER_FIRST and colon and user and is_plain(user):
        return f"{user}:{MASK}"
    return MASK


def _redact_address(scheme: str, address: str) -> str:
    address, sharp, _ = address.partition("#")
    address, question, query = address.partition("?")
    hosts, slash, path = address.partition("/")
    if not all(map(_is_host, hosts.split(","))):
        return MASK  # perhaps credentials whose '@' was forgotten
    if not _is_path(scheme, hosts, path):
        path = MASK
    return hosts + slash + path + question + _redact_query(query) + (sharp + MASK if sharp else "")


def _is_path(scheme: str, hosts: str, path: str) -> bool:
    """Whether this is a database, vhost or socket, and no rest of a password or another URL."""
    if scheme == "redis+socket":
        return not hosts and re.fullmatch(r"[^:@]*(:/?[0-9]*)?", path) is not None
    if scheme in _REDIS:
        return not path or (path.isascii() and path.isdigit())
    return not path or (bool(hosts) and (path == "/" or is_plain(path, besides="._-%")))


def _is_host(text: str) -> bool:
    """Whether this is `name`, `name:port` or `[IPv6]:port`, and no credentials without '@'."""
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        return bool(bracket) and is_plain(name, besides=":.%") and _is_port(port.removeprefix(":"))
    name, _, port = text.partition(":")
    return is_plain(name) and _is_port(port)


def _is_port(text: str) -> bool:
    return not text or (text.isascii() and text.isdigit() and len(text) <= 5)


def _redact_query(query: str) -> str:
    shown: list[str] = []
    for part in query.split("&") if query else ():
        name, equals, value = part.partition("=")
        if name.lower() in _HARMLESS and is_plain(value):
            shown.append(part)
            continue
        # Whatever follows may be the rest of a secret with an '&' in it.
        shown.append(name + equals + MASK if equals and is_plain(name) else MASK)
        break
    return "&".join(shown)
