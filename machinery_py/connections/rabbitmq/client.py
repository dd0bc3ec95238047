"""The connections to RabbitMQ: one to publish on, one for each consumer, and short ones to inspect.

They are apart because RabbitMQ stops reading from a connection that publishes when it is short of
memory or disk: consumers go on, and settle what they have. A connection is opened when it is
needed, to the server that was used last; with several URLs the others are tried in the order of
the strategy, one round.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pika
from pika.exceptions import AMQPError, ProbableAccessDeniedError, ProbableAuthenticationError

from machinery_py.clock import Clock, SystemClock
from machinery_py.config.server_urls import AmqpUrl, parse_amqp_url
from machinery_py.config.urls import redact
from machinery_py.connections.failover import Strategy, following, round_robin
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.rabbitmq.io_thread import (
    AmqpConnection,
    AmqpConnectionLost,
    Channel,
    ChannelLost,
)
from machinery_py.connections.rabbitmq.publisher import Publisher
from machinery_py.errors import BrokerUnavailable, MachineryError, StoreUnusable
from machinery_py.texts import get_logger

logger = get_logger(__name__)
if logging.getLogger("pika").level == logging.NOTSET:
    logging.getLogger("pika").setLevel(logging.CRITICAL)  # our own log says it, once

KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 15_000}
SHORTEST = 0.5  # seconds for one of several servers, however many there are
NOT_FOUND, LOCKED = 404, 405
_LARGER = re.compile(r"is larger than .*?(\d+)")


class AmqpDriver:
    """The servers behind one or several URLs, connected when needed. For any thread."""

    def __init__(
        self,
        *urls: str,
        clock: Clock | None = None,
        timeout: float = 5.0,
        strategy: Strategy = round_robin,
        name: str = "machinery",
    ) -> None:
        """`timeout` is for one round trip, and for one round of connecting.

        Raises:
            BadUrl: one of the URLs makes no sense.
        """
        self.urls = urls
        self.clock: Clock = clock or SystemClock()
        self.timeout = timeout
        self._name = name
        self._strategy = strategy
        self._parsed: dict[str, AmqpUrl] = {url: parse_amqp_url(url) for url in urls}
        self._current = urls[0]
        self._lock = ForkLock(reentrant=True)
        self._publisher: Publisher | None = None
        self._pid = os.getpid()

    @property
    def vhost(self) -> str:
        return self._parsed[self._current].vhost

    @property
    def place(self) -> str:
        """The server in use: for texts."""
        return self._parsed[self._current].place

    def connect(self, purpose: str, on_lost: Callable[[], object] | None = None) -> AmqpConnection:
        """A new connection.

        Raises:
            BrokerUnavailable: no server could be reached.
            StoreUnusable: one refuses us, or its certificate cannot be trusted.
        """
        current, failures = self._current, list[str]()
        patience = max(SHORTEST, self.timeout / len(self.urls))
        while True:
            parameters = self._parameters(current, purpose, patience)
            link = AmqpConnection(parameters, name=purpose, on_lost=on_lost)
            try:
                link.open(patience)
            except AmqpConnectionLost as error:
                shown = redact(current)
                if problem := _lasting_problem(error.__cause__):
                    raise StoreUnusable(f"{shown}: {problem}") from error
                failures.append(f"{shown}: {error}")
                if len(failures) == len(self.urls):
                    raise BrokerUnavailable(
                        f"no connection to RabbitMQ: {'; '.join(failures)}"
                    ) from error
                current = following(self._strategy, self.urls, current, self._parsed)
                logger.warning(
                    "broker %s does not answer: %s; trying %s", shown, error, redact(current)
                )
            else:
                self._current = current
                return link

    def _parameters(self, url: str, purpose: str, timeout: float) -> pika.ConnectionParameters:
        parsed = self._parsed[url]
        try:
            options = pika.SSLOptions(_context(parsed), parsed.host) if parsed.tls else None
        except (OSError, ssl.SSLError) as error:
            raise StoreUnusable(
                f"{redact(url)}: a certificate file cannot be used: {error}"
            ) from error
        return pika.ConnectionParameters(
            host=parsed.host,
            port=parsed.port,
            virtual_host=parsed.vhost,
            credentials=pika.PlainCredentials(
                parsed.username, parsed.password, erase_on_connect=True
            ),
            heartbeat=parsed.heartbeat,
            blocked_connection_timeout=None,
            socket_timeout=timeout,
            stack_timeout=timeout,
            connection_attempts=1,
            ssl_options=options,
            tcp_options=dict(KEEPALIVE),
            client_properties={"connection_name": f"{self._name} {purpose} {os.getpid()}"},
        )

    @property
    def publisher(self) -> Publisher:
        """The connection to publish on, made anew when it is lost.

        Raises:
            BrokerUnavailable, StoreUnusable: as `connect`.
        """
        with self._lock:
            if self._publisher is None or not self._publisher.is_open:
                if self._publisher is not None:
                    self._publisher.close()
                self._publisher = None
                link = self.connect("publish")
                try:
                    self._publisher = Publisher(link, self.timeout)
                except (AmqpConnectionLost, ChannelLost) as error:
                    link.close()
                    raise BrokerUnavailable(f"RabbitMQ at {self.place}: {error}") from error
            return self._publisher

    def renew_publisher(self, refused: Publisher) -> None:
        """Publish on another connection from now on.

        A channel that first publishes to a quorum queue while that has no leader asks the old
        leader, and is refused for ever (RabbitMQ 3.10).
        """
        with self._lock:
            if self._publisher is refused:
                self._publisher = None
        refused.retire()

    def open_publisher(self) -> Publisher | None:
        """Return the open publishing connection, if any. For I/O threads, which must not wait."""
        publisher = self._publisher
        return publisher if publisher is not None and publisher.is_open else None

    @contextmanager
    def visit(self, doing: str) -> Iterator[Channel]:
        """A channel on a connection of its own; unsettled messages go back after the `with`.

        Raises:
            BrokerUnavailable, StoreUnusable: also in place of pika's errors inside the `with`.
        """
        link = self.connect("look")
        try:
            with translated(self.place, doing):
                channel = link.channel(self.timeout)
                yield channel
                channel.close()
        finally:
            link.close()

    def close(self) -> None:
        """May be called twice; the next use connects again."""
        with self._lock:
            publisher, self._publisher = self._publisher, None
        if publisher is not None and self._pid == os.getpid():
            publisher.close()


def _lasting_problem(error: BaseException | None) -> str:
    """Return why no other try can succeed; "" if one may."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # pika guesses from how far it came; only a server that says so has refused us. Others were
        # going down or coming up.
        is_told = "ConnectionClosedByBroker" in str(error) and "is down" not in str(error)
        if is_told and isinstance(error, ProbableAuthenticationError):
            return (
                "the server refuses user or password (check both in the URL; guest may come "
                "from the server's own host only)"
            )
        if is_told and isinstance(error, ProbableAccessDeniedError):
            return (
                "the user may not use the vhost, or it does not exist "
                "(rabbitmqctl add_vhost, rabbitmqctl set_permissions)"
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the server's certificate cannot be trusted: {error.verify_message} "
                "(set ?ca_file=…)"
            )
        inner = [one for one in error.args if isinstance(one, BaseException)]
        error = inner[0] if inner else error.__cause__
    return ""


@contextmanager
def translated(place: str, doing: str) -> Iterator[None]:
    """Turn the errors of connections and of pika into ours."""
    try:
        yield
    except MachineryError:
        raise
    except ChannelLost as error:
        kind = BrokerUnavailable if passes(error) else StoreUnusable
        raise kind(f"RabbitMQ at {place}: {doing}: {explained(error)}") from error
    except (AmqpConnectionLost, AMQPError) as error:
        raise BrokerUnavailable(f"RabbitMQ at {place}: {doing}: {error}") from error


def passes(error: ChannelLost) -> bool:
    """Whether the refusal ends by itself: a classic queue whose node is down, another's lock."""
    return error.code == LOCKED or (
        error.code == NOT_FOUND and "down or inaccessible" in error.text
    )


def largest_of(error: object) -> int | None:
    """Return RabbitMQ's max_message_size, if it refused a message for that."""
    found = _LARGER.search(error.text) if isinstance(error, ChannelLost) else None
    return int(found[1]) if found else None


def explained(error: ChannelLost) -> str:
    """Return the server's text, with what to do about it."""
    text = error.text
    if error.code == 406 and "inequivalent arg" in text:
        return (
            f"{text} (it was declared with other arguments: make amqp.queue_declare_args the same"
            " everywhere, or delete it and declare it anew)"
        )
    if error.code == 403:
        return (
            f"{text} (give the user the right to it, see rabbitmqctl set_permissions, or use"
            " another name; those that begin with 'amq.' are RabbitMQ's own)"
        )
    return text


@functools.lru_cache(maxsize=16)
def _context(url: AmqpUrl) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=url.ca_file or None)
    if not url.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if url.cert_file:
        context.load_cert_chain(url.cert_file, url.key_file or None)
    return context
