"""MongoDB URLs, as far as they can be checked without a connection.

    mongodb://user:secret@h1:27017,h2/database?replicaSet=rs0&w=majority
    mongodb+srv://user:secret@name/database

Pure: the client library, which reads all of it, is not loaded, and no name is looked up.
"""

from __future__ import annotations

from urllib.parse import unquote

_FORBIDDEN = frozenset('/\\. "$*<>:|?')
_LONGEST = 63  # bytes of a database's name


class BadMongoUrl(ValueError):
    """The text says what is wrong; it holds no secret."""


def check_mongo_url(url: str) -> None:
    """Refuse what can never work.

    Raises:
        BadMongoUrl: no host, a bad port or database, or a write concern that confirms nothing.
    """
    scheme, _, rest = url.partition("://")
    address, _, query = rest.rpartition("@")[2].partition("?")
    hosts, _, database = address.partition("/")
    names = hosts.split(",")
    for host in names:
        _check_host(host)
    if scheme.lower() == "mongodb+srv" and (len(names) > 1 or ":" in names[0]):
        raise BadMongoUrl(
            "found several hosts or a port (expected mongodb+srv://name/database; the name server knows the rest)"
        )
    name = unquote(database)
    if (
        _FORBIDDEN & set(name)
        or "\0" in name
        or len(name.encode("utf-8", "backslashreplace")) > _LONGEST
    ):
        raise BadMongoUrl(
            "found a name that no database can have "
            f'(expected up to {_LONGEST} bytes without any of / \\ . " $ * < > : | ?)'
        )
    for option in query.split("&"):
        key, _, value = option.partition("=")
        if key.lower() == "w" and value == "0":
            raise BadMongoUrl(
                "found w=0 (expected a write concern that confirms; w=majority if you say nothing)"
            )


def _check_host(host: str) -> None:
    if not host:
        raise BadMongoUrl("found no host (expected mongodb://host:27017/database)")
    _, colon, port = host.rpartition("]")[2].partition(":")
    if colon and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise BadMongoUrl(
            "found a port that is none (expected 1 to 65535; '/', ':', '@' in a password are %2F, %3A, %40)"
        )
