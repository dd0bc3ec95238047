"""Connections to one Redis, shared by broker, backend and lock of a URL.

redis-py opens and authenticates. We decide what is repeated, since its own retries would
publish twice: a call is repeated once, at once, when its connection was lost and its script may be
carried out twice. A connection on which anything went wrong is closed. After a fork the child opens
its own.

`discovery.Servers` decides which server a connection leads to.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec

from machinery_py.clock import SYSTEM_CLOCK, Clock, micros, moment_of
from machinery_py.config.urls import without_secrets
from machinery_py.connections.durability import Concern
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.plain_words import plain
from machinery_py.connections.redis.connection import RedisConnection, command
from machinery_py.connections.redis.discovery import Servers
from machinery_py.connections.redis.durability import (
    ASKED,
    concerns,
    read_config,
    read_info,
    version_of,
)
from machinery_py.connections.redis.errors import (
    TRANSIENT,
    ErrorKind,
    as_ours,
    kind_of,
    spoilt,
)
from machinery_py.connections.redis.keys import DELAYED, companion_key
from machinery_py.connections.redis.pool import NO_LIMITS, PoolLimits, Quota
from machinery_py.connections.redis.scripts import (
    Script,
    naming,
    pack,
    with_delayed_key,
)
from machinery_py.connections.server_clock import ServerClock
from machinery_py.errors import (
    BackendUnavailable,
    MachineryError,
    NameRefused,
    PublishUnknown,
    StoreUnusable,
)
from machinery_py.texts import get_logger

logger = get_logger(__name__)

TIMEOUT = 5.0  # seconds for a reply, and for a connection
OLDEST = (6, 2)  # LPOP with a count, BLMOVE, ZMSCORE
HASTE = 0.2  # seconds in which a call is repeated that may as well fail
SKEW = 5.0  # seconds between this clock and the server's that are worth a warning
WAKE_TRIES = 20  # a wake may come before the sleep it is to end
FRESH = 0.01  # seconds; a connection that was used since then is not looked at before its next use


def raw(data: bytes) -> msgspec.Raw:
    """Wrap bytes for `pack`: Redis' unpacker knows msgpack's `str` of any bytes, and no `bin`."""
    return msgspec.Raw(b"\xdb" + len(data).to_bytes(4, "big") + data)


class RedisDriver:
    """Opens connections when they are needed, and keeps them. May be used from any thread."""

    def __init__(
        self,
        url: str = "",
        *,
        clock: Clock = SYSTEM_CLOCK,
        timeout: float = TIMEOUT,
        servers: Servers | None = None,
        strict: bool = False,
        limits: PoolLimits = NO_LIMITS,
    ) -> None:
        """`servers`: in place of the URL's. `strict`: refuse one that may lose what it stores."""
        self.servers: Servers = servers or Servers([url], timeout=timeout)
        self.clock: ServerClock = (
            clock if isinstance(clock, ServerClock) else ServerClock(clock, self._ping)
        )
        self.limits = limits
        self._timeout = min(timeout, limits.read)
        self._write_timeout = limits.write if limits.write < self._timeout else 0.0
        self._quota = Quota(limits)
        self._idle: list[RedisConnection] = []
        self._subscribers: list[RedisConnection] = []
        self._pid = os.getpid()
        self._strict = strict
        self._checked = -1  # the server whose settings were checked
        self._reporting = ForkLock(reentrant=True)
        self._guards: tuple[bytes, ...] = ()  # keys that scripts name, in a cluster

    def now(self) -> str:
        """Return the time as scripts take it: "" is the server's own clock."""
        return "" if self.clock.is_system else str(micros(self.clock.now()))

    def _ping(self) -> None:
        self.ask(b"PING", doing="looking at its clock")

    # Connections

    def open(self, *, timeout: float | None = None) -> RedisConnection:
        """Open a new connection. Any exception of redis-py."""
        while (spare := self._enter()) is not None:
            spare.close()
        return self._open(timeout or self._timeout)

    def _enter(self) -> RedisConnection | None:
        return self._quota.enter(self._timeout, self._spare)

    def _spare(self) -> RedisConnection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _open(self, timeout: float) -> RedisConnection:
        """Open a connection that the quota has counted already."""
        leave = self._quota.leave
        try:
            connection, number = self.servers.connect(timeout)
        except BaseException:
            leave()
            raise
        link = RedisConnection(
            connection, number, write_timeout=self._write_timeout, on_close=leave
        )
        if self._checked != link.server:
            try:
                self._check(link)
            except BaseException:
                link.close()
                raise
        return link

    def is_stale(self, link: RedisConnection) -> bool:
        """Whether it leads to a server that is not used any more."""
        return link.server != self.servers.number

    def _take(self) -> RedisConnection:
        link = self._take_any()
        if self.clock.is_due:
            try:
                self._measure(link)
            except BaseException:
                link.close()
                raise
        return link

    def _measure(self, link: RedisConnection) -> None:
        """Compare the clocks."""

        def read() -> dt.datetime | None:
            told = _ask_if_allowed(link, b"TIME")
            return None if told is None else moment_of(int(told[0]) * 1_000_000 + int(told[1]))

        self.clock.measure(read)

    def _take_any(self) -> RedisConnection:
        if os.getpid() != self._pid:
            self._idle, self._subscribers = [], []
            self._quota, self._pid = Quota(self.limits), os.getpid()
        if self.servers.may_move:
            self.servers.look()
        while True:
            link = self._spare() or self._enter()
            if link is None:
                return self._open(self._timeout)
            idle = time.monotonic() - link.used_at
            if self.is_stale(link) or idle > self.limits.idle_timeout:
                link.close()
            elif idle < FRESH or not link.is_broken():
                return link

    def _give(self, link: RedisConnection) -> None:
        link.used_at = time.monotonic()
        if len(self._idle) < self.limits.max_idle and os.getpid() == self._pid:
            self._idle.append(link)
            if self.limits.max_active:
                self._quota.came_back()
        else:
            link.close()

    def take_subscriber(self) -> RedisConnection:
        """Take a connection that may be subscribed to something."""
        while os.getpid() == self._pid and self._subscribers:
            link = self._subscribers.pop()
            if not self.is_stale(link):
                return link
            link.close()
        return self.open()

    def give_subscriber(self, link: RedisConnection) -> None:
        is_kept = len(self._subscribers) < self.limits.max_idle and not self.limits.max_active
        if is_kept and os.getpid() == self._pid:
            self._subscribers.append(link)
        else:
            link.close()

    # Settings of the server

    def _check(self, link: RedisConnection) -> None:
        """Once for each server: refuse what cannot be worked with, and log what may be lost."""
        found = self._look_at(link)
        place = self.servers.place
        if self._strict and found:
            reasons = "; ".join(one.text for one in found)
            raise StoreUnusable(f"Redis at {place}: refused by strict_durability: {reasons}")
        if not self._is_news(link):
            return
        for one in found:
            level = logging.WARNING if one.is_certain else logging.INFO
            logger.log(level, "Redis at %s: %s", place, one.text)
        if self.clock.is_system:
            self._measure(link)
        behind = self.clock.ahead.total_seconds()
        if abs(behind) > SKEW:
            logger.warning(
                "Redis at %s: this host's clock is %.0f s %s: ours goes by the server's, but an "
                "`eta` that programs compute here comes at the wrong time (is NTP running?)",
                place,
                abs(behind),
                "behind" if behind > 0 else "ahead",
            )

    def _is_news(self, link: RedisConnection) -> bool:
        """Whether no thread of this process has reported on this server yet."""
        with self._reporting:
            is_news, self._checked = self._checked != link.server, link.server
            return is_news

    def _look_at(self, link: RedisConnection) -> list[Concern]:
        text = _ask_if_allowed(link, b"INFO")
        info = read_info(text.decode(errors="replace")) if text is not None else {}
        version = version_of(info)
        if version is not None and version < OLDEST:
            raise StoreUnusable(
                f"Redis at {self.servers.place} is version {info['redis_version']} "
                f"(needed: {OLDEST[0]}.{OLDEST[1]} or newer)"
            )
        # One name a question: Redis 6 takes no more.
        config: dict[str, str] = {}
        for name in ASKED:
            reply = _ask_if_allowed(link, b"CONFIG", b"GET", name.encode())
            if reply is None:
                return concerns(info, None)
            config.update(read_config(reply))
        return concerns(info, config)

    def concerns(self) -> list[Concern]:
        """Return what is wrong with the server now, or cannot be known.

        Raises:
            BackendUnavailable, StoreUnusable: it cannot be asked.
        """
        found: list[Concern] = self._attempt(
            self._look_at, doing="looking at its settings", away=BackendUnavailable
        )
        return found

    # Calls

    def run(
        self,
        script: Script,
        *values: object,
        more: Sequence[bytes] = (),
        again: bool = True,
        lost: type[MachineryError] | None = None,
        patient: bool = True,
    ) -> Any:
        """Run a script with these values.

        Args:
            more: arguments behind that of the values.
            again: it may be carried out twice, so it is repeated once if the connection is lost.
            lost: raised when it may have been carried out; `script.away`, if not given, which is
                raised when nothing was written.
            patient: in a cluster it is repeated until the timeout while its slot has no master.
        """
        return self.run_packed(
            script, pack(values), more=more, again=again, lost=lost, patient=patient
        )

    def run_packed(
        self,
        script: Script,
        argument: bytes,
        *,
        more: Sequence[bytes] = (),
        again: bool = True,
        lost: type[MachineryError] | None = None,
        patient: bool = True,
    ) -> Any:
        """Run a script as `run`, with values that are packed."""
        adapted, guards = self.adapted(script), self._guards
        arguments = (b"%d" % len(guards), *guards, argument, *more)
        packet = command(b"EVALSHA", adapted.sha, *arguments)

        def ask(link: RedisConnection) -> Any:
            link.send(packet)
            return _read_script(link, adapted, arguments)

        doing, away = script.doing, script.away
        try:
            return self._attempt(
                ask, doing=doing, away=away, again=again, lost=lost, patient=patient
            )
        except NameRefused as error:
            named = naming(script)
            if error.name or not again or named == script:
                raise
        return self.run_packed(named, argument, more=more, again=False, patient=patient)

    def adapted(self, script: Script) -> Script:
        """Return the script with the names of its keys as the server has them."""
        key = self.limits.delayed_key
        return script if key == DELAYED else with_delayed_key(script, key)

    def command(self, *parts: bytes) -> bytes:
        """Encode a command, with the names of its keys as the server has them."""
        return command(*parts)

    def channel(self, uuid: str) -> bytes:
        """Return the channel on which the end of a task is announced."""
        return companion_key(uuid)

    def ask(
        self,
        *parts: bytes,
        doing: str,
        away: type[MachineryError] = BackendUnavailable,
        patient: bool = True,
    ) -> Any:
        """Send a command that may be carried out twice."""
        try:
            packet = self.command(*parts)
            return self._attempt(
                lambda link: link.exchange(packet), doing=doing, away=away, patient=patient
            )
        except NameRefused as error:
            if error.name or len(parts) < 2:
                raise
        packet = self.command(b"TYPE", parts[1])
        kind = self._attempt(lambda link: link.exchange(packet), doing=doing, away=away)
        key, found = parts[1].decode(errors="replace"), kind.decode()
        text = f"WRONGTYPE {key} holds a {found}, not what is kept there"
        raise spoilt(text, f"Redis at {self.servers.place}: {doing}")

    def _attempt(
        self,
        ask: Callable[[RedisConnection], Any],
        *,
        doing: str,
        away: type[MachineryError],
        again: bool = True,
        lost: type[MachineryError] | None = None,
        patient: bool = True,
    ) -> Any:
        unknown = False
        begin = time.monotonic()
        last = not again
        while True:
            link: RedisConnection | None = None
            try:
                link = self._take()
                reply = ask(link)
            except MachineryError:
                raise
            except Exception as error:  # redis-py's, sorted by `fail`
                # After a call that may have been carried out, a refusal of its repeat proves
                # nothing.
                unknown = self.after(error, link) or unknown
                # A server that was silent for the whole timeout is not asked again: no time is
                # left.
                if unknown and not last and time.monotonic() - begin < self._timeout / 2:
                    last = True
                    continue
                until = begin + (self._timeout if patient else min(HASTE, self._timeout))
                if (again or not unknown) and self._tries_again(error, until):
                    continue
                self.fail(error, doing=doing, away=(lost or away) if unknown else away)
            self._give(link)
            return reply

    def _tries_again(self, error: Exception, until: float) -> bool:
        """Return, after a pause, whether a call is repeated that has time until then."""
        return False

    def waits(self, error: Exception, since: float) -> bool:
        """Return, after a pause, whether what is refused since then will pass."""
        return False

    def passes(self, error: Exception) -> bool:
        """Whether a refusal is of a moment, or of this server: nothing is wrong with the call."""
        return kind_of(str(error)) in TRANSIENT

    def after(self, error: Exception, link: RedisConnection | None) -> bool:
        """Put the connection away; whether the command may have been carried out."""
        import redis

        is_reply = isinstance(error, redis.ResponseError)
        kind = kind_of(str(error))
        is_final = kind is not ErrorKind.FATAL and not self.passes(error)
        if is_reply and link is not None and is_final:
            if "Protocol error" in str(error):  # behind which the server closes the connection
                link.close()
            else:
                self._give(link)
            return False
        if link is not None:
            link.close()
            # Idle ones lead there as well: the server was restarted, went away, or is the old one.
            stale, self._idle = self._idle, []
            for one in stale:
                one.close()
        return link is not None and not is_reply and kind is ErrorKind.OTHER

    def sorts(self, error: Exception) -> bool:
        """Return whether `fail` has a word for it: it is of the connection, or the server's."""
        import redis

        return isinstance(error, redis.RedisError | OSError)

    def fail(self, error: Exception, *, doing: str, away: type[MachineryError]) -> NoReturn:
        """Raise our error for one of redis-py's."""
        import redis

        if not self.sorts(error):
            raise error
        said = str(error) or type(error).__name__
        text = without_secrets(said, *self.servers.urls)
        cause = error if text == said else None  # a server that does not know AUTH repeats it
        kind = kind_of(said)
        is_reply = isinstance(error, redis.ResponseError | redis.AuthenticationError)
        if kind is ErrorKind.OTHER and not is_reply:
            kind, text = ErrorKind.AWAY, plain(text)
            if away is PublishUnknown:
                text = f"no reply: {text}"
        self.servers.refused(text)
        raise as_ours(kind, text, place=self.servers.place, doing=doing, away=away) from cause

    def packed_script(self, script: Script, argument: bytes) -> bytes:
        """Encode a call of a script, whose reply `read_script` reads."""
        return evalsha(self.adapted(script), argument, *self._guards)

    def read_script(self, link: RedisConnection, script: Script, argument: bytes) -> Any:
        return read_script(link, self.adapted(script), argument, *self._guards)

    def numbered(self, link: RedisConnection | None, *, timeout: float) -> RedisConnection:
        """Return a connection that knows its number, if it may: this one, or else a new one.

        A new one is opened if there is none, or if it leads to a server that is not used any more.
        """
        if self.servers.may_move:
            self.servers.look()
        if link is not None and self.is_stale(link):
            link.close()
            link = None
        if link is None:
            link = self.open(timeout=timeout)
            number = _ask_if_allowed(link, b"CLIENT", b"ID")
            link.number = b"" if number is None else b"%d" % number
        return link

    def unblock_while(self, asleep: Callable[[], bytes], *, doing: str) -> None:
        """Wake a connection of this process; `asleep` returns its number while it blocks."""
        for _ in range(WAKE_TRIES):
            number = asleep()
            if not number:
                return
            try:
                if self.ask(b"CLIENT", b"UNBLOCK", number, doing=doing, patient=False):
                    return
            except MachineryError:
                return  # then it wakes by itself

    def unblock(self, clients: Sequence[bytes]) -> None:
        """Wake clients, `number.life` each, in one round trip.

        Failing does no harm: none blocks longer than a second. One of another life of the server is
        left out: its number may be another program's by now.
        """

        def ask(link: RedisConnection) -> None:
            life = link.life()
            named = (client.partition(b".") for client in clients)
            link.ask_all([_unblock(number) for number, _, its in named if life and its == life])

        if clients:
            with contextlib.suppress(MachineryError):
                self._attempt(ask, doing="waking a worker", away=BackendUnavailable, patient=False)

    def end_block(self, link: RedisConnection) -> None:
        """Wake a connection of this thread, as far as that is possible."""
        if link.number:
            with contextlib.suppress(MachineryError):
                self.ask(b"CLIENT", b"UNBLOCK", link.number, doing="waking a worker", patient=False)

    def close(self) -> None:
        """Close what is idle. May be called twice; the next use opens anew."""
        links, self._idle = self._idle + self._subscribers, []
        self._subscribers = []
        for link in links:
            link.close()


def _ask_if_allowed(link: RedisConnection, *parts: bytes) -> Any:
    """Return the reply, or None where the server forbids the question, or does not know it."""
    from redis.exceptions import NoPermissionError, ResponseError

    try:
        return link.ask(*parts)
    except ResponseError as error:
        if isinstance(error, NoPermissionError) or "unknown" in str(error).lower():
            return None
        raise


def _unblock(number: bytes) -> bytes:
    return command(b"CLIENT", b"UNBLOCK", number)


def evalsha(script: Script, argument: bytes, *keys: bytes) -> bytes:
    if not keys:
        return b"".join((script.call, b"%d\r\n" % len(argument), argument, b"\r\n"))
    return command(b"EVALSHA", script.sha, b"%d" % len(keys), *keys, argument)


def read_script(link: RedisConnection, script: Script, argument: bytes, *keys: bytes) -> Any:
    """Read the reply of a script that was sent by its name; send it in full if it is not known."""
    return _read_script(link, script, (b"%d" % len(keys), *keys, argument))


def _read_script(link: RedisConnection, script: Script, arguments: Sequence[bytes]) -> Any:
    try:
        return link.read()
    except Exception as error:
        if kind_of(str(error)) is not ErrorKind.SCRIPT:
            raise
    return link.ask(b"EVAL", script.body, *arguments)
