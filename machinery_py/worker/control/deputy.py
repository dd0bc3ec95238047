"""Deputy: answers the orders that a deaf worker cannot, from what its last sign has told.

    ping, stats, active     as they were at the sign, with the seconds since then added; a task that
                            began in the second before the silence may be missing
    stack                   written by the process itself, on a signal (supervised workers only)
    other orders            not answered: who cannot listen cannot obey

A keeper opens one for each broker while it has deaf workers there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from machinery_py.brokers.base import Broker
from machinery_py.connections import proc
from machinery_py.control.orders import ORDERS, Answer, decode_order, encode_answer, matches

MARGIN = 1.0  # seconds before the last sign in which an order came that is not answered yet
ANSWER_TTL = 60.0  # seconds

StacksOf = Callable[[int], str]
"""Returns the stacks of a process's threads, as faulthandler writes them; "": they are unknown."""

_THREAD = re.compile(
    r"^(?:Current t|T)hread (0x[0-9a-f]+)[^\n]*\(most recent call first\):\n", re.M
)


@dataclass(frozen=True, slots=True)
class DeafWorker:
    """A worker that cannot answer.

    Attributes:
        silence: seconds since its last sign.
        told: what that has told for the deputy: name, stats, running tasks.
    """

    pid: int
    silence: float
    told: Mapping[str, Any]


class Deputy:
    """Deputy of the workers of one broker. Belongs to one thread.

    Args:
        silence: seconds; orders of that time are answered, too.
    """

    def __init__(self, broker: Broker, stacks_of: StacksOf, *, silence: float) -> None:
        self._broker = broker
        self._stacks_of = stacks_of
        self._stacks: dict[int, list[dict[str, str]] | None] = {}  # of this call, by pid
        self._orders = broker.subscribe(ORDERS, since=silence + MARGIN)

    def answer(self, deaf: Sequence[DeafWorker]) -> None:
        """Answer the orders since the last call in place of these workers.

        Raises:
            MachineryError: the broker is away.
        """
        self._stacks = {}
        for record in self._orders.read(0.0):
            try:
                order = decode_order(record)
            except ValueError:
                continue  # live workers warn of it
            for one in deaf:
                name = str(one.told["worker"])
                if matches(name, order.to) and (value := self._value(order.kind, one)) is not None:
                    self._send(order.replies, name, one.pid, value)

    def _send(self, replies: str, name: str, pid: int, value: object) -> None:
        answer = Answer(
            worker=name,
            host=proc.hostname(),
            pid=pid,
            value=msgspec.Raw(msgspec.json.encode(value)),
        )
        self._broker.broadcast(replies, [encode_answer(answer)], ttl=ANSWER_TTL)

    def _value(self, kind: str, one: DeafWorker) -> object:
        """Return the answer to an order; None: there is none."""
        if kind == "ping":
            return {}
        if kind == "stats":
            return _later(one.told["stats"], one.silence, "uptime", "oldest")
        if kind == "active":
            return [_later(task, one.silence, "seconds") for task in one.told["active"]]
        if kind != "stack":
            return None
        if one.pid not in self._stacks:  # once: the keeper has beats to send, too
            self._stacks[one.pid] = stacks_in(self._stacks_of(one.pid))
        return self._stacks[one.pid]

    def close(self) -> None:
        self._orders.close()


def _later(facts: Mapping[str, Any], seconds: float, *keys: str) -> dict[str, Any]:
    return {**facts, **{key: facts[key] + seconds for key in keys}}


def stacks_in(text: str) -> list[dict[str, str]] | None:
    """Return the stacks that faulthandler has written, each the innermost call last; None: none."""
    _, *parts = _THREAD.split(text)
    return [
        {"thread": number, "stack": "\n".join(reversed(stack.rstrip().splitlines()))}
        for number, stack in zip(parts[::2], parts[1::2], strict=True)
    ] or None
