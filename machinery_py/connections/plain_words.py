"""Reasons why a server cannot be reached, in words that say what to do.

They are found by the texts of libraries and systems, since most libraries hand on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

# Parts of texts of servers, libraries and systems, separated by " | " → our reason. The first that
# fits counts.
_REASONS: Mapping[str, str] = {
    "certificate verify failed | CERTIFICATE_VERIFY_FAILED": (
        "its certificate cannot be trusted "
        "(name the authority's file in the URL: ca_file, with MongoDB tlsCAFile)"
    ),
    "Connection refused | Errno 111 | Error 111 | Errno 61] | WinError 10061": (
        "connection refused (is it running? check host and port)"
    ),
    "Name or service not known | name resolution | nodename nor servname | Name does not resolve | "
    "getaddrinfo failed | No address associated | gaierror": (
        "the host's name is not known (check its spelling, and the name server)"
    ),
    "No route to host | Network is unreachable | Host is unreachable": (
        "there is no way to it (check host and network)"
    ),
    "WRONG_VERSION_NUMBER | UNEXPECTED_EOF | SSL handshake failed | [SSL | SSLError | "
    "SSLEOFError": ("the TLS handshake failed (does this port speak TLS? check scheme and port)"),
    "IncompatibleProtocolError": (
        "it ended the connection at once (is this RabbitMQ's port, and does it want amqps://?)"
    ),
    "No servers found yet | No replica set | No primary": (
        "no server answered in time (check hosts and ports, and replicaSet in the URL)"
    ),
    "timed out | Timeout  | TimeoutError | no answer within | Errno 110 | StackTimeout | "
    "SocketTimeout": ("no answer in time (check host, port and firewall; is it overloaded?)"),
    "Connection reset | Connection closed | connection closed | closed the connection | "
    "Broken pipe | Errno 104 | Errno 32] | Transport indicated EOF": (
        "the connection was closed (did it stop or restart? does this port want TLS?)"
    ),
}


def plain(text: str) -> str:
    """Return the reason for this text; the text itself if it has a reason already or none fits."""
    if any(reason in text for reason in _REASONS.values()):
        return text
    for parts, reason in _REASONS.items():
        if any(part in text for part in parts.split(" | ")):
            return reason
    return text


def words_of(error: BaseException) -> str:
    """Return the types and texts of an error and of its causes."""
    return " ".join(f"{type(one).__name__} {one}" for one in _tree(error))


def _tree(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            inner = [*one.args, one.__cause__, getattr(one, "exception", None)]
            inner += getattr(one, "exceptions", None) or ()
            waiting.extend(more for more in inner if isinstance(more, BaseException))
