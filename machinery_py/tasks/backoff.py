"""How long to wait before the next try: numbers in, seconds out."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from machinery_py.clock import ABOVE_ZERO, Seconds, seconds_of
from machinery_py.tasks.signature import AttemptNumber
from machinery_py.texts import get_logger

logger = get_logger(__name__)

MAX_DELAY = 86400.0  # seconds; no back-off of ours waits longer than a day

#: Pauses between the tries of a task: "fibonacci" (Go's), "exponential", a length for each try, or
#: a function, as `exponential(…)` returns.
Backoff = str | Sequence[Seconds] | Callable[[int], Seconds]


def next_fibonacci(after: int) -> int:
    """Return the smallest Fibonacci number above `after`, as Go does for the next RetryTimeout.

    From 0 on: 1, 2, 3, 5, 8 …
    """
    a, b = 1, 1
    while b <= after:
        a, b = b, a + b
    return b


def doubled(attempt: int, *, base: float = 1.0, cap: float = 600.0) -> float:
    """`base` doubled for each attempt after the first, at most `cap` seconds."""
    return min(cap, base * 2.0 ** min(attempt - 1, 60))


def full_jitter(delay: float, rng: random.Random | None = None) -> float:
    """A random time up to `delay`, so that many waiters do not come back together."""
    return (rng or random).uniform(0.0, delay)


Jitter = Literal["full", "half"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialBackoff:
    """Pauses that double. Made by `exponential`."""

    base: float
    cap: float
    jitter: Jitter | None

    def __call__(self, attempt: int) -> float:
        """Return the seconds to wait after the failed try with this number, 1 for the first."""
        delay = doubled(attempt, base=self.base, cap=self.cap)
        if self.jitter is None:
            return delay
        sure = delay / 2 if self.jitter == "half" else 0.0
        return sure + full_jitter(delay - sure)


def exponential(
    *, base: Seconds = 1.0, cap: Seconds = 600.0, jitter: Jitter | None = "full"
) -> ExponentialBackoff:
    """Return a back-off that waits `base`, then twice as long each time, at most `cap`.

    Args:
        base, cap: seconds, or timedeltas.
        jitter: how much of a pause is random, lest many tasks come back together: "full" (0 s up to
            the pause), "half" (from half of it), or None.

    Raises:
        TypeError, ValueError: a length is none, or not positive, or the jitter is unknown.
    """
    first = seconds_of("exponential: base", base, least=ABOVE_ZERO)
    most = seconds_of("exponential: cap", cap, least=ABOVE_ZERO)
    if jitter not in ("full", "half", None):
        raise ValueError(f"exponential(jitter={jitter!r}): expected 'full', 'half' or None")
    return ExponentialBackoff(base=first, cap=most, jitter=jitter)


_HALF = exponential(jitter="half")

#: Seconds between two attempts to connect, by the number of the attempt (1 for the first); see
#: `reconnect_delay`.
SCHEDULES: Mapping[str, Callable[[int], float]] = {
    "jitter": lambda attempt: full_jitter(doubled(attempt, base=0.1, cap=10.0)),
    "linear": lambda attempt: min(30.0, 2.0 * attempt),
    "fibonacci": lambda attempt: float(min(30, _fibonacci(min(attempt, 10)))),
}


def _fibonacci(attempt: int) -> int:
    delay = 0
    for _ in range(attempt):
        delay = next_fibonacci(delay)
    return delay


def reconnect_delay(schedule: str, attempt: int) -> float:
    """Return the seconds to wait before the next attempt to connect.

    `jitter`: up to 0.1 s, doubled to 10 s; `linear`: 2, 4 … 30; `fibonacci`: 1, 2, 3, 5 … 30.
    """
    return SCHEDULES[schedule](attempt)


def check_backoff(backoff: object) -> None:
    """Refuse a back-off that could never say how long to wait.

    Raises:
        ValueError: it is of no known form.
    """
    if isinstance(backoff, str) or not (isinstance(backoff, Sequence) or callable(backoff)):
        if backoff not in ("fibonacci", "exponential"):
            hint = f"; did you mean [{backoff!r}]?" if isinstance(backoff, (int, float)) else ""
            known = "'fibonacci', 'exponential', exponential(…), a list of seconds, a function"
            raise ValueError(f"backoff {backoff!r}: unknown (known: {known}{hint})")
    elif isinstance(backoff, Sequence):
        if not backoff:
            raise ValueError("backoff is empty (expected seconds for each try)")
        for length in backoff:
            try:
                seconds_of("backoff", length, most=MAX_DELAY)
            except (TypeError, ValueError):
                raise ValueError(
                    f"backoff {backoff!r}: found {length!r} "
                    "(expected seconds or a timedelta for each try, 0 to 86,400 s: a day)"
                ) from None


def delay_for(backoff: Backoff, attempt: AttemptNumber, previous: int) -> float:
    """Seconds to wait after the failed try number `attempt` (1 for the first).

    A function that fails, or gives no length, is logged, and Fibonacci's pause is taken.

    Args:
        backoff: as `check_backoff` lets it pass.
        previous: the signature's RetryTimeout, from which Go's Fibonacci goes on.
    """
    if isinstance(backoff, str):
        return _HALF(attempt) if backoff == "exponential" else float(next_fibonacci(previous))
    if isinstance(backoff, Sequence):
        pauses = cast("Sequence[Seconds]", backoff)
        return seconds_of("backoff", pauses[min(attempt, len(pauses)) - 1])
    try:
        delay = seconds_of("what it returned", backoff(attempt))
    except Exception:  # user code
        logger.exception("the back-off function failed after try %d; Fibonacci's is taken", attempt)
        return float(next_fibonacci(previous))
    return min(MAX_DELAY, delay)
