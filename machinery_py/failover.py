"""Which of several broker URLs is tried when one cannot be reached.

    Config(broker="redis://a;redis://b", multiple_broker_separator=";", broker_failover_strategy="shuffle")

    STRATEGIES["nearest"] = lambda urls, failed: urls[0]     # a strategy of your own, before the Server is made
"""

from __future__ import annotations

import random
from collections.abc import Callable, MutableMapping, Sequence

#: All URLs as they were configured, and the one that has just failed → the one to try next. From any thread.
Strategy = Callable[[Sequence[str], str], str]


def round_robin(urls: Sequence[str], failed: str) -> str:
    """The one after that which failed; the first after the last."""
    return urls[(urls.index(failed) + 1) % len(urls)]


def shuffle(urls: Sequence[str], failed: str) -> str:
    """Any other one."""
    return random.choice([url for url in urls if url != failed] or urls)


#: What the option `broker_failover_strategy` may be; add your own.
STRATEGIES: MutableMapping[str, Strategy] = {"round-robin": round_robin, "shuffle": shuffle}
