"""The order of a worker's queues: strict, or by weights and drawn anew for each claim.

By weights, the first queue of a claim is drawn with a probability that is its weight's share, the
second from the rest in the same way, and so on. So each queue comes first now and then, and none
starves behind one that is never empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from machinery_py.errors import ConfigError
from machinery_py.names import queue_problem

#: Names in strict order, or names with their weights.
Queues = Sequence[str] | Mapping[str, float]

PLAIN = 1.0  # the weight of a queue that has none, among others that have


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """The queues of a worker. `weights`: one for each, or none at all, which is strict order."""

    names: tuple[str, ...]
    weights: tuple[float, ...] = ()

    @classmethod
    def of(cls, queues: Queues) -> QueueOrder:
        """Return the order of these queues.

        Raises:
            ConfigError: a text instead of a list, an illegal name, or a weight that is none.
        """
        if isinstance(queues, str):
            raise ConfigError(
                f"queues: found the text {queues!r} "
                "(expected a list of names, or a mapping of names to weights)"
            )
        for name in queues:
            if problem := queue_problem(name):
                raise ConfigError(f"queues: {problem}")
        if not isinstance(queues, Mapping):
            return cls(tuple(dict.fromkeys(queues)))
        for name, weight in queues.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not _fits(weight):
                raise ConfigError(
                    f"weight of queue {name!r}: found {weight!r} (expected a number greater than 0)"
                )
        return cls(tuple(queues), tuple(float(weight) for weight in queues.values()))

    def draw(self, random: Random) -> tuple[str, ...]:
        """Return the order of one claim; empty if it is always that of `names`."""
        if not self.weights:
            return ()
        # Of several exponential times, each is the shortest with the share of its rate in their
        # sum.
        pairs = zip(self.names, self.weights, strict=True)
        times = {name: random.expovariate(weight) for name, weight in pairs}
        return tuple(sorted(self.names, key=times.__getitem__))

    def shown(self) -> list[str]:
        """Return each queue with its weight, for people."""
        if not self.weights:
            return list(self.names)
        return [f"{name}:{weight:g}" for name, weight in zip(self.names, self.weights, strict=True)]


def parse_queues(text: str) -> tuple[str, ...] | dict[str, float]:
    """Read `A,B` (strict order) or `A:6,B:1` (weights; 1 for a queue without one).

    The weight stands behind the last colon. A name with a colon in it and no weight ends in a
    colon: `mail:high:`.

    Raises:
        ConfigError: no queue, no weight behind a colon, or a queue with two weights.
    """
    found: dict[str, float | None] = {}
    for part in (part.strip() for part in text.split(",")):
        if not part:
            continue
        name, weight = _split(part)
        if found.setdefault(name, weight) != weight:
            raise ConfigError(f"queue {name!r} is named twice, with different weights")
    if not found:
        raise ConfigError("no queue named (expected for instance high,low or high:6,low:1)")
    if all(weight is None for weight in found.values()):
        return tuple(found)
    return {name: PLAIN if weight is None else weight for name, weight in found.items()}


def problem_of(text: str) -> str:
    """Return what is wrong with such a text in a setting; "" if nothing or if it is empty."""
    try:
        names = parse_queues(text) if text else ()
    except ConfigError as error:
        return str(error)
    return next(filter(None, map(queue_problem, names)), "")


def limits_problem(limits: Mapping[str, object]) -> str:
    """Return what is wrong with such limits of queues in a setting; "" if nothing."""
    for queue, limit in limits.items():
        if problem := queue_problem(queue):
            return problem
        if type(limit) is not int or not 0 < limit < 2**53:
            return f"queue {queue!r}: found {limit!r} (expected a whole number, 1 or more)"
    return ""


def fair_problem(fields: Mapping[str, object]) -> str:
    """Return what is wrong with such names of tenants in a setting; "" if nothing."""
    for queue, field in fields.items():
        if problem := queue_problem(queue):
            return problem
        if not isinstance(field, str) or not field:
            return f"queue {queue!r}: found {field!r} (expected the name of an argument or header)"
    return ""


def _split(part: str) -> tuple[str, float | None]:
    name, colon, number = (piece.strip() for piece in part.rpartition(":"))
    if not colon:
        return part, None
    if not name:
        raise ConfigError(
            f"queue {part!r}: no name in front of the colon (expected NAME:WEIGHT, as critical:6)"
        )
    if not number:
        return name, None
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not _fits(weight):
        raise ConfigError(
            f"queue {part!r}: found the weight {number!r} (expected a number greater than 0, "
            f"as {name}:6; a name that has a colon in it ends in one: {part}:)"
        )
    return name, weight


def _fits(weight: float) -> bool:
    return 0 < weight < math.inf
