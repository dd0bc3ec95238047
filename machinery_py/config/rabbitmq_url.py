"""AMQP URLs, read. Pure: nothing is opened.

    amqp://user:password@host:5672/vhost        a missing part is Go's default: guest:guest, 5672, vhost /
    amqps://host/vhost?ca_file=/etc/ca.pem      TLS on port 5671; verify=none, cert_file, key_file

A vhost with a slash is percent-encoded: /%2F is the vhost "/", as are //, which Celery writes, / and nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote

_TLS_OPTIONS = ("ca_file", "cert_file", "key_file", "verify")
_OPTIONS = ("heartbeat", *_TLS_OPTIONS)

HEARTBEAT = 5  # seconds; a peer that is silent for two of them is gone: tasks of a dead host run again within 15 s


class BadAmqpUrl(ValueError):
    """The URL makes no sense; the text does not repeat it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AmqpUrl:
    """A server and how to sign on.

    Attributes:
        tls: whether the connection is encrypted; `verify`: and the server's certificate is checked.
        heartbeat: seconds between two signs of life.
        ca_file: of the authorities that are trusted, or "" for the system's. `cert_file`, `key_file`: our own.
    """

    host: str = "localhost"
    port: int = 5672
    username: str = field(default="guest", repr=False)
    password: str = field(default="guest", repr=False)
    vhost: str = "/"
    tls: bool = False
    heartbeat: int = HEARTBEAT
    verify: bool = True
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    @property
    def place(self) -> str:
        """Host and port: for texts."""
        return f"{self.host}:{self.port}"


def parse_amqp_url(url: str) -> AmqpUrl:
    """Read a URL.

    Raises:
        BadAmqpUrl: it makes no sense.
    """
    scheme, _, rest = url.partition("://")
    tls = scheme.lower() == "amqps"
    credentials, at, address = rest.rpartition("@")
    if "#" in address:
        raise BadAmqpUrl("found '#' after the host (encode it as %23)")
    address, _, query = address.partition("?")
    username, password = _credentials(credentials) if at else ("guest", "guest")
    place, _, vhost = address.partition("/")
    if "/" in vhost and vhost != "/":
        raise BadAmqpUrl("found a second '/' in the vhost (encode it as %2F)")
    host, port = _host(place, 5671 if tls else 5672)
    options = _read_options(query, tls=tls)
    verify = options.pop("verify", "full") != "none"
    return AmqpUrl(
        host=host,
        port=port,
        username=username,
        password=password,
        vhost=unquote(vhost) or "/",
        tls=tls,
        verify=verify,
        heartbeat=_heartbeat(options.pop("heartbeat", "")),
        **options,
    )


def _credentials(text: str) -> tuple[str, str]:
    user, colon, password = text.partition(":")
    if not user:
        raise BadAmqpUrl("found no user before the ':' (expected amqp://user:password@host)")
    return unquote(user), unquote(password) if colon else ""


def _host(text: str, default: int) -> tuple[str, int]:
    if "," in text:
        raise BadAmqpUrl(
            "found several hosts (expected one; for several URLs set multiple_broker_separator)"
        )
    if text.startswith("["):
        name, bracket, port = text[1:].partition("]")
        if not bracket:
            raise BadAmqpUrl("an IPv6 address has no ']' (expected amqp://[::1]:5672)")
        port = port.removeprefix(":")
    else:
        name, _, port = text.partition(":")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise BadAmqpUrl("the port is no number from 1 to 65535")
    return unquote(name) or "localhost", int(port or default)


def _read_options(query: str, *, tls: bool) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if name not in _OPTIONS or not equals:
            raise BadAmqpUrl(
                f"AMQP URLs have no options besides {', '.join(_OPTIONS)} ('?' of a password: %3F)"
            )
        if name in options:
            raise BadAmqpUrl(f"option {name!r} is given twice")
        if name in _TLS_OPTIONS and not tls:
            raise BadAmqpUrl(f"option {name!r} needs TLS (expected amqps://)")
        if not value:
            raise BadAmqpUrl(f"option {name!r} is empty")
        options[name] = unquote(value)
    if options.get("verify", "full") not in ("full", "none"):
        raise BadAmqpUrl("option 'verify' is neither full nor none")
    if "key_file" in options and "cert_file" not in options:
        raise BadAmqpUrl("option 'key_file' needs 'cert_file'")
    return options


def _heartbeat(text: str) -> int:
    if not text:
        return HEARTBEAT
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise BadAmqpUrl("option 'heartbeat' is no number of seconds from 1 to 65535")
    return int(text)
