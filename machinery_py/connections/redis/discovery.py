"""The Redis server to connect to: of one URL or of several, or the master that sentinels name.

One round tries the server that was used last, then, without waiting, the others in the order of the
strategy: as many attempts as URLs. The caller waits before the next round. Wrong passwords and
certificates are raised at once.

`number` counts the changes of server: a connection with an older one leads to a server that is not
used any more.

Limits: an old master takes writes until it hears of the new one, and loses them. Sentinels are
asked each second whether there is one.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any

from machinery_py.config.server_urls import RedisUrl, parse_redis_url
from machinery_py.config.urls import redact
from machinery_py.connections import descriptors
from machinery_py.connections.failover import Strategy, following, round_robin
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.plain_words import plain
from machinery_py.connections.redis.errors import ErrorKind, kind_of
from machinery_py.errors import MachineryError, StoreUnusable
from machinery_py.texts import get_logger

logger = get_logger(__name__)

_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
KEEPALIVE = {getattr(socket, name): n for name, n in _KEEPALIVE.items() if hasattr(socket, name)}
LOOK_EVERY = (
    1.0  # seconds between two questions to the sentinels; an old master takes writes for a while
)
LOOK_PAUSE = 5.0  # seconds, when none of them answered
SHORTEST = 0.2  # seconds for one of several servers, however many there are


class Servers:
    """The servers behind one or several URLs. May be used from any thread."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout: float,
        client_name: str = "machinery",
        master_name: str = "",
        strategy: Strategy = round_robin,
    ) -> None:
        """`timeout` is for one round, in seconds.

        Raises:
            BadUrl: one of the URLs makes no sense.
        """
        self.urls: tuple[str, ...] = tuple(urls)
        self.timeout = timeout
        self.client_name = client_name
        self.number: int = 0
        self.attempts: int = 0  # since a connection was made
        self._parsed: Mapping[str, RedisUrl] = {
            url: parse_redis_url(url, master_name=master_name) for url in self.urls
        }
        # Whether `look` may find that connections lead to a server that is not used any more.
        self.may_move: bool = any(url.master_name for url in self._parsed.values())
        self._strategy = strategy
        self._current = self.urls[0]
        self._address: tuple[str, int] | str = ""  # of the last connection
        self._changing = ForkLock()  # the number and the address that it stands for
        self._look_at = 0.0
        # For each URL; the one that answered last comes first.
        self._sentinels: dict[str, list[tuple[str, int]]] = {}
        for url, parsed in self._parsed.items():
            if parsed.tls and not parsed.verify:
                logger.warning(
                    "%s: verify=none: certificates are not checked, and anybody in between can "
                    "read and change all",
                    redact(url),
                )

    @property
    def place(self) -> str:
        """The server in use, for texts."""
        if isinstance(self._address, tuple):
            return "{}:{}".format(*self._address)
        return self._address or self._parsed[self._current].place

    def connect(self, timeout: float) -> tuple[Any, int]:
        """Return a new connection with `timeout` seconds for its replies, and its server's number.

        Raises:
            StoreUnusable: a certificate cannot be used, or the strategy.
            Exception: any of redis-py's; of the last server, if none could be reached.
        """
        current = self._current
        patience = max(SHORTEST, self.timeout / len(self.urls))
        failures: list[str] = []
        while True:
            self.attempts += 1
            try:
                address, connection = self._reach(self._parsed[current], patience)
            except MachineryError:
                raise
            except Exception as error:  # redis-py's, sorted by `fatal`
                if fatal(error):
                    raise
                failures.append(f"{redact(current)}: {said_by(error)}")
                following = self._after(current)
                self._report(current, error, following, len(failures))
                self._current = current = following
                if len(failures) < len(self.urls):
                    continue
                if len(self.urls) == 1:
                    raise
                import redis

                raise redis.ConnectionError(
                    f"none of {len(self.urls)} servers can be used: {'; '.join(failures)}"
                ) from error
            number = self._moved(current, address)
            set_timeout(connection, timeout)
            return connection, number

    def refused(self, text: str) -> None:
        """Begin the next connection with another server if this error says that it helps."""
        if len(self.urls) > 1 and kind_of(text) is ErrorKind.ROLE:
            before = self._current
            self._current = self._after(before)
            logger.warning(
                "broker %s: %s; switching to %s", redact(before), text, redact(self._current)
            )

    def look(self) -> None:
        """Ask the sentinels, if it is time; a new master makes older connections stale."""
        url = self._parsed[self._current]
        if not url.master_name or not self._address or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + LOOK_EVERY
        try:
            address = self._master(url, SHORTEST)
        except (
            Exception
        ) as error:  # redis-py's, or ours: while the master is there, sentinels may be away
            self._look_at = time.monotonic() + LOOK_PAUSE
            logger.debug("sentinels cannot be asked: %s", error)
            return
        with self._changing:
            if address != self._address:
                logger.warning(
                    "the sentinels name another master: %s:%d, before %s", *address, self.place
                )
                self._has_changed(address)

    def _has_changed(self, address: tuple[str, int]) -> None:
        """Note another server, under the lock: the connections before lead elsewhere."""
        self.number += 1
        self._address = address

    # One round

    def _after(self, failed: str) -> str:
        return following(self._strategy, self.urls, failed, self._parsed)

    def _report(self, failed: str, error: Exception, following: str, number: int) -> None:
        total = len(self.urls)
        if total == 1:
            return  # whoever called says it
        then = "all were tried, the next round comes after a pause"
        if number < total:
            then = f"switching to {redact(following)}"
        logger.log(
            logging.WARNING if self.attempts <= total else logging.INFO,
            "cannot connect to broker %s: %s (attempt %d of %d in this round, %d in all); %s",
            redact(failed),
            said_by(error),
            number,
            total,
            self.attempts,
            then,
        )

    def _moved(self, url: str, address: tuple[str, int] | str) -> int:
        """Note where a connection leads to; return the number of that server."""
        with self._changing:
            if address != self._address:
                if self._address:
                    self.number += 1
                    logger.warning("connected to another Redis server, before %s", self.place)
                self._address = address
            self._current = url
            self.attempts = 0
            return self.number

    # One server

    def _reach(self, url: RedisUrl, patience: float) -> tuple[tuple[str, int] | str, Any]:
        if url.path:
            return url.path, connected(self._connection(url, None, patience))
        if not url.master_name:
            address = url.hosts[0]
            connection = connected(self._connection(url, address, patience))
            if len(self.urls) > 1:
                must_be_master(connection, address)
            return address, connection
        deadline = time.monotonic() + patience
        address = self._master(url, patience / 2)
        left = max(SHORTEST, deadline - time.monotonic())
        connection = connected(self._connection(url, address, left))
        must_be_master(connection, address)
        return address, connection

    def _master(self, url: RedisUrl, patience: float) -> tuple[str, int]:
        """Ask one sentinel after the other."""
        import redis

        sentinels = self._sentinels.get(url.place) or list(url.hosts)
        each = max(SHORTEST, patience / len(sentinels))
        answers: list[str] = []
        for sentinel in sentinels:
            name = "{}:{}".format(*sentinel)
            connection: Any | None = None
            try:
                connection = connected(self._connection(url, sentinel, each, sentinel=True))
                reply = ask(connection, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", url.master_name)
            except (redis.RedisError, OSError) as error:
                if fatal(error):
                    hint = "see sentinel_username and sentinel_password, or ca_file, in the URL"
                    raise StoreUnusable(f"sentinel {name}: {error} ({hint})") from error
                answers.append(f"{name}: {said_by(error)}")
                continue
            finally:
                if connection is not None:
                    connection.disconnect()
            if isinstance(reply, list) and len(reply) == 2:
                others = [one for one in sentinels if one != sentinel]
                self._sentinels[url.place] = [sentinel, *others]
                return reply[0].decode(), int(reply[1])
            answers.append(f"{name}: knows no master {url.master_name!r}")
        raise redis.ConnectionError(
            f"no sentinel names a master {url.master_name!r}: {'; '.join(answers)}"
        )

    def _connection(
        self,
        url: RedisUrl,
        address: tuple[str, int] | None,
        patience: float,
        *,
        sentinel: bool = False,
    ) -> Any:
        """Make a connection, not opened yet, to this address or to the socket of the URL."""
        from redis import connection
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        library: Any = connection  # redis-py has no types for its connections
        user, password = url.username, url.password
        if sentinel:
            user, password = url.sentinel_username, url.sentinel_password
        options: dict[str, Any] = {
            "db": 0 if sentinel else url.database,
            "username": user or None,
            "password": password or None,
            "protocol": 2,
            "socket_timeout": patience,
            "retry": Retry(NoBackoff(), 0),
            "client_name": self.client_name or None,
        }
        if address is None:
            made = library.UnixDomainSocketConnection(path=url.path, **options)
        else:
            options |= {
                "host": address[0],
                "port": address[1],
                "socket_connect_timeout": patience,
                "socket_keepalive": True,
                "socket_keepalive_options": KEEPALIVE,
            }
            made = (
                library.SSLConnection(**options, **tls_options(url))
                if url.tls
                else library.Connection(**options)
            )
        # No CLIENT SETINFO: two commands that old servers do not know, and ACLs may forbid. These
        # are the names of redis-py 7.1, and of older ones.
        made.driver_info = made.lib_name = made.lib_version = None
        return made


def connected(connection: Any) -> Any:
    """Open the connection; it is closed again if that fails."""
    try:
        connection.connect()
    except BaseException:
        connection.disconnect()
        raise
    descriptors.keep(connection._sock)
    return connection


def set_timeout(connection: Any, timeout: float) -> None:
    """Let its replies take this long from now on."""
    connection.socket_timeout = timeout
    if hasattr(connection, "update_current_socket_timeout"):
        connection.update_current_socket_timeout(-1)
        return
    # redis-py 5 and 6: the parser remembers the timeout, too, and puts it back after each look.
    connection._sock.settimeout(timeout)
    parser = connection._parser
    buffer = getattr(parser, "_buffer", None)
    if buffer is not None:
        buffer.socket_timeout = timeout
    else:
        parser._socket_timeout = timeout


def ask(connection: Any, *words: str) -> Any:
    connection.send_command(*words)
    return connection.read_response(disable_decoding=True)


def must_be_master(connection: Any, address: tuple[str, int]) -> None:
    """Refuse a replica: it refuses writes, or was a master and forgets its last ones."""
    import redis
    from redis.exceptions import NoPermissionError

    try:
        role = ask(connection, "ROLE")[0]
    except NoPermissionError:
        return  # then the first write tells
    except BaseException:
        connection.disconnect()
        raise
    if role != b"master":
        connection.disconnect()
        raise redis.ConnectionError(
            "{}:{} is no master but a {} (READONLY)".format(*address, role.decode(errors="replace"))
        )


def tls_options(url: RedisUrl) -> dict[str, Any]:
    """Return the options of an SSLConnection.

    Raises:
        StoreUnusable: a file cannot be used.
    """
    for option in ("ca_file", "cert_file", "key_file"):
        path = getattr(url, option)
        try:
            if path:
                open(path, "rb").close()
        except OSError as error:
            raise StoreUnusable(
                f"Redis at {url.place}: certificate file {path!r} ({option}): {error.strerror}"
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if url.ca_file:
            context.load_verify_locations(url.ca_file)
        if url.cert_file:
            context.load_cert_chain(url.cert_file, url.key_file or None, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise StoreUnusable(
            f"Redis at {url.place}: certificate or key cannot be used: {error} "
            "(see ca_file, cert_file, key_file of the URL)"
        ) from error
    return {
        "ssl_cert_reqs": "required" if url.verify else "none",
        "ssl_check_hostname": url.verify,
        "ssl_ca_certs": os.path.abspath(url.ca_file) if url.ca_file else None,
        "ssl_certfile": url.cert_file or None,
        "ssl_keyfile": url.key_file or None,
    }


def _no_password() -> str:
    raise ValueError("the key is encrypted (expected one without a password)")


def said_by(error: Exception) -> str:
    """Return why no connection was made."""
    return plain(str(error) or type(error).__name__)


def fatal(error: Exception) -> bool:
    """Whether somebody must change a setting: nothing is won by trying again."""
    return kind_of(str(error)) is ErrorKind.FATAL
