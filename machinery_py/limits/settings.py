"""Limits as people write them, "5/s" and so on, and the rules that they make.

rate="10/s", burst=20   Rule "rate": a run each 0.1 s, up to 20 at once after a pause
max_running=3           Rule "running": three at a time
min_interval=60         Rule "interval": a minute from each begin to the next
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from machinery_py.clock import Seconds, seconds_of
from machinery_py.limits.base import Rule

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}  # seconds
FASTEST = 100_000.0  # runs a second; a store counts in microseconds
SLOWEST = 366 * UNITS["d"]  # seconds for one run
MOST = 2**31 - 1  # runs at once, or at a time
LONGEST = 100 * SLOWEST  # seconds that a burst takes at its rate: a store's numbers end

# Names of rules. The last is that of tasks of which one at a time runs: it keeps their order.
RATE, RUNNING, INTERVAL, EXCLUSIVE = "rate", "running", "interval", "exclusive"

_RATE = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)/([smhd])", re.ASCII)


class LimiterOptions(TypedDict, total=False):
    """Limits besides the rate.

    burst: how many may begin at once after a pause; by default one.
    max_running: runs at a time.
    min_interval: seconds (or a timedelta) from a begin to the next one, at least.
    """

    burst: int | str
    max_running: int
    min_interval: Seconds


class LimitOptions(LimiterOptions, total=False):
    """Limits of a task or a limiter. Those of LimiterOptions, and:

    rate: begins in a time, as "5/s", "100/m", "1000/h", "0.5/s" or "10/d".
    """

    rate: str


LIMIT_OPTIONS = frozenset(LimitOptions.__annotations__)


def interval_of(rate: object) -> float:
    """Return the seconds for each run at this rate.

    Raises:
        ValueError: it is no rate.
    """
    found = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    count = float(found[1]) if found else 0.0
    if found is None or not count or not 1 / FASTEST <= UNITS[found[2]] / count <= SLOWEST:
        raise ValueError(
            'expected a number and a unit (s, m, h, d), as "5/s", "100/m" or "0.5/s", '
            f"at most {FASTEST:,.0f}/s"
        )
    return UNITS[found[2]] / count


def rate_of(interval: float) -> str:
    """Return the rate at which a run takes these seconds, in the unit that reads best."""
    counts = {unit: round(length / interval, 6) for unit, length in UNITS.items()}
    whole = [unit for unit, count in counts.items() if count >= 1 and count == int(count)]
    unit = next((one for one in (*whole, *counts) if counts[one] >= 1), "d")
    return f"{counts[unit]:.12g}/{unit}"


def burst_of(burst: object) -> int:
    """Return how many may begin at once.

    Raises:
        ValueError: it is no such number.
    """
    number = int(burst) if isinstance(burst, str) and burst.isdecimal() else burst
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= MOST:
        raise ValueError("expected a whole number, 1 or more")
    return number


def least_interval(length: Any) -> float:
    """Return a least interval in seconds.

    Raises:
        ValueError: it is none.
    """
    try:
        return seconds_of("min_interval", length, least=1e-5, most=SLOWEST)
    except (TypeError, ValueError):
        raise ValueError("expected seconds or a timedelta, more than 0, at most 366 days") from None


_CHECKS = {
    "rate": interval_of,
    "burst": burst_of,
    "max_running": burst_of,
    "min_interval": least_interval,
}


def rules_of(options: Mapping[str, object]) -> tuple[Rule, ...]:
    """Return the rules of checked options (see `check_limits`), without keys."""
    rules: list[Rule] = []
    if rate := options.get("rate"):
        burst = burst_of(options.get("burst") or 1)
        rules.append(Rule(name=RATE, limit=burst, interval=interval_of(rate)))
    if least := options.get("min_interval"):
        rules.append(Rule(name=INTERVAL, interval=least_interval(least), strict=True))
    if most := options.get("max_running"):
        rules.append(Rule(name=RUNNING, limit=burst_of(most)))
    return tuple(rules)


def check_limits(name: str, options: Mapping[str, object]) -> None:
    """Check those options that are limits; None is not given.

    Args:
        name: of the task or limiter, for the error.

    Raises:
        ValueError: one makes no sense.
    """
    for option, check in _CHECKS.items():
        value = options.get(option)
        if value is None:
            continue
        try:
            check(value)
        except ValueError as error:
            raise ValueError(f"{name}: {option}={value!r} ({error})") from None
    if options.get("burst") is not None and not options.get("rate"):
        raise ValueError(f"{name}: burst={options['burst']!r} (it needs a rate)")
    if any(rule.limit * rule.interval > LONGEST for rule in rules_of(options)):
        raise ValueError(
            f"{name}: burst={options['burst']!r} (at rate={options['rate']!r} it takes more than "
            "100 years)"
        )


def options_of(rules: Iterable[Rule]) -> LimitOptions:
    """Return the options that make these rules."""
    options: LimitOptions = {}
    for rule in rules:
        if rule.name == RATE:
            options["rate"] = rate_of(rule.interval)
            if rule.limit > 1:
                options["burst"] = rule.limit
        elif rule.name == INTERVAL:
            options["min_interval"] = rule.interval
        elif rule.name == RUNNING:
            options["max_running"] = rule.limit
    return options


def scope_of(name: str, *, owner: str) -> str:
    """Return the scope of a task, or of "limiter:" and a name, in an application.

    Args:
        owner: see `registry.unique_keys.owner`.
    """
    return f"{owner}|{name}"


def named_by(scope: str, *, owner: str) -> str | None:
    """Return the name whose scope this is; None: another application's."""
    mine = scope_of("", owner=owner)
    return scope.removeprefix(mine) if scope.startswith(mine) else None
