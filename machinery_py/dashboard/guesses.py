"""Wrong passwords: told in the log, and slowed for each address without holding up a thread."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from machinery_py.texts import get_logger, quoted

T = TypeVar("T")

logger = get_logger(__name__)

FREE = 20  # wrong passwords from one address before they are slowed
PAUSE = 1.0  # seconds between two that are tried, from then on
MOST_KEPT = 1_000  # addresses, and browsers that were let in
SAY_EVERY = 60.0  # seconds between two lines of the log about one address
SAY_PAUSE = 1.0  # seconds between two lines about any


@dataclass(slots=True)
class _Guesser:
    """An address, and how many wrong passwords are left to it."""

    left: float
    counted_at: float
    count: int = 0  # of wrong ones that were not told yet
    say_at: float = 0.0


class Guesses:
    """Wrong passwords by address. Any thread may call it.

    A browser that was let in once is not slowed, though another one of its address guesses: behind
    a proxy all have one. It is known by the dashboard's cookie, which nobody else can read.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._guessers: OrderedDict[str, _Guesser] = OrderedDict()  # the last one is the latest
        self._known: OrderedDict[str, None] = OrderedDict()
        self._say_at = 0.0

    def pause(self, address: str, cookies: Sequence[str]) -> float:
        """Return the seconds until a password from this address is tried again.

        0: now; `was_right` or `was_wrong` must follow. What is being tried counts as wrong until
        then, or many could be tried at one moment.
        """
        with self._lock:
            guesser = self._guesser(address)
            if guesser.left < 1.0 and not any(one in self._known for one in cookies):
                return (1.0 - guesser.left) * PAUSE
            guesser.left = max(0.0, guesser.left - 1.0)
            return 0.0

    def was_right(self, address: str, cookies: Sequence[str]) -> None:
        """Know the browser with these cookies from now on."""
        with self._lock:
            self._guesser(address).left += 1.0
            for one in cookies[:1]:
                _keep(self._known, one, None)

    def was_wrong(self, address: str) -> None:
        """Tell it, now and then."""
        with self._lock:
            guesser, now = self._guesser(address), self._now()
            guesser.count += 1
            if now < max(guesser.say_at, self._say_at):
                return
            guesser.say_at, self._say_at = now + SAY_EVERY, now + SAY_PAUSE
            count, guesser.count = guesser.count, 0
        what = "wrong password" + "s" * (count > 1)
        logger.warning("dashboard: %d %s from %s", count, what, quoted(address))

    def _guesser(self, address: str) -> _Guesser:
        now, place = self._now(), _place(address)
        guesser = self._guessers.get(place) or _Guesser(FREE, now)
        _keep(self._guessers, place, guesser)
        guesser.left = min(FREE, guesser.left + (now - guesser.counted_at) / PAUSE)
        guesser.counted_at = now
        return guesser


def _keep(kept: OrderedDict[str, T], key: str, value: T) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > MOST_KEPT:
        kept.popitem(last=False)


def _place(address: str) -> str:
    """Return the address, or the network of an IPv6 one: a household has 2^64 of those."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a unix socket has none
        return address
    if found.version == 4:
        return str(found)
    mapped = found.ipv4_mapped
    return str(mapped or ipaddress.ip_network((found.packed, 64), strict=False))
