"""Reasons why a server cannot be reached, in words that say what to do; libraries and systems have many for each.

Pure: it is told by texts, since most libraries hand on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# What one of them says somewhere in its text → what we say. The first that fits counts.
_TABLE: Sequence[tuple[tuple[str, ...], str]] = (
    (
        ("certificate verify failed", "CERTIFICATE_VERIFY_FAILED"),
        "its certificate cannot be trusted (name the authority's file in the URL: ca_file, with MongoDB tlsCAFile)",
    ),
    (
        ("Connection refused", "Errno 111", "Error 111", "Errno 61]", "WinError 10061"),
        "connection refused (is it running? check host and port)",
    ),
    (
        (
            "Name or service not known",
            "name resolution",
            "nodename nor servname",
            "Name does not resolve",
            "getaddrinfo failed",
            "No address associated",
            "gaierror",
        ),
        "the host's name is not known (check its spelling, and the name server)",
    ),
    (
        ("No route to host", "Network is unreachable", "Host is unreachable"),
        "there is no way to it (check host and network)",
    ),
    (
        (
            "WRONG_VERSION_NUMBER",
            "UNEXPECTED_EOF",
            "SSL handshake failed",
            "[SSL",
            "SSLError",
            "SSLEOFError",
        ),
        "the TLS handshake failed (does this port speak TLS? check scheme and port)",
    ),
    (
        ("IncompatibleProtocolError",),
        "it ended the connection at once (is this RabbitMQ's port, and does it want amqps://?)",
    ),
    (
        ("No servers found yet", "No replica set", "No primary"),
        "no server answered in time (check hosts and ports, and replicaSet in the URL)",
    ),
    (
        (
            "timed out",
            "Timeout ",
            "TimeoutError",
            "no answer within",
            "Errno 110",
            "StackTimeout",
            "SocketTimeout",
        ),
        "no answer in time (check host, port and firewall; is it overloaded?)",
    ),
    (
        (
            "Connection reset",
            "Connection closed",
            "connection closed",
            "closed the connection",
            "Broken pipe",
            "Errno 104",
            "Errno 32]",
            "Transport indicated EOF",
        ),
        "the connection was closed (did it stop or restart? does this port want TLS?)",
    ),
)


def plain(text: str) -> str:
    """The text in plain words; as it is, if they are not known, or it has some already."""
    if any(said in text for _, said in _TABLE):
        return text
    return next((said for words, said in _TABLE if any(word in text for word in words)), text)


def words_of(error: BaseException) -> str:
    """All that an error says, and those that it was made of."""
    return " ".join(f"{type(one).__name__} {one}" for one in _tree(error))


def _tree(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            inner = [
                *one.args,
                one.__cause__,
                getattr(one, "exception", None),
                *(getattr(one, "exceptions", None) or ()),
            ]
            waiting.extend(more for more in inner if isinstance(more, BaseException))
