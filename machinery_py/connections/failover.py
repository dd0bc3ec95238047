"""Failover: the broker URL to try next when one cannot be reached.

STRATEGIES["nearest"] = lambda urls, failed: urls[0]  # your own, before the Server is made
Config(
    broker="redis://a;redis://b",
    multiple_broker_separator=";",
    broker_failover_strategy="nearest",
)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, MutableMapping, Sequence

from machinery_py.config.urls import redact
from machinery_py.errors import ConfigError, StoreUnusable, nearest

#: All URLs as configured, and the one that has failed → the one to try next. From any thread.
Strategy = Callable[[Sequence[str], str], str]


def round_robin(urls: Sequence[str], failed: str) -> str:
    """Return the URL after the one that failed; the first after the last."""
    return urls[(urls.index(failed) + 1) % len(urls)]


def shuffle(urls: Sequence[str], failed: str) -> str:
    """Return any other URL."""
    return random.choice([url for url in urls if url != failed] or urls)


#: The values of the option `broker_failover_strategy`; add your own.
STRATEGIES: MutableMapping[str, Strategy] = {"round-robin": round_robin, "shuffle": shuffle}


def strategy_named(name: str) -> Strategy:
    """Return a strategy by its name in the configuration.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in STRATEGIES:
        known = ", ".join(sorted(STRATEGIES)) + nearest(name, STRATEGIES)
        raise ConfigError(f"broker_failover_strategy: found {name!r} (known: {known})")
    return STRATEGIES[name]


def following(strategy: Strategy, urls: Sequence[str], failed: str, known: Container[str]) -> str:
    """Return the URL to try after the one that failed.

    Raises:
        StoreUnusable: the strategy raised, or chose something else.
    """
    if len(urls) == 1:
        return failed
    try:
        chosen = strategy(urls, failed)
    except Exception as error:  # the user's function
        raise StoreUnusable(
            f"broker_failover_strategy raised {error!r} after {redact(failed)}"
        ) from error
    if chosen not in known:
        raise StoreUnusable(
            f"broker_failover_strategy chose {redact(str(chosen))!r} "
            "(expected one of the broker URLs)"
        )
    return chosen
