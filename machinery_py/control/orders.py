"""Orders to workers and their answers, as records of topics.

    orders           an ControlOrder as JSON
    replies.<id>     answers for the caller of one order: AnswerHead as a line of JSON, then a piece
                     of the value's JSON

Workers carry out the orders of KINDS and no others: an order names no code, and its arguments are
checked before anything is done. What cannot be read is ignored: everybody who can write to the
store can write to a topic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from machinery_py.clock import LONGEST
from machinery_py.control.lamport import MOST

ORDERS = "orders"  # the topic
ANY = "*"  # in a name: any text
PIECE = 60_000  # bytes of a value in one record
MOST_PIECES = 64
MOST_NAMES = 1000
MOST_CONCURRENCY = 10_000

Clock = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}\\Z")]

_LINE_END = b"\n"


class NoArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of an order that has none."""


class SetConcurrency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Run so many tasks at a time."""

    concurrency: Annotated[int, msgspec.Meta(ge=1, le=MOST_CONCURRENCY)]


class AddQueue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Take tasks from this queue, too: after the others, or with weight 1."""

    name: Annotated[str, msgspec.Meta(min_length=1)]


class CancelQueue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Take no more tasks from this queue."""

    name: str


class SetTimeLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Give a task this time limit, from its next run on; None: no limit."""

    task: str
    seconds: Annotated[float, msgspec.Meta(gt=0, le=LONGEST)] | None


class LogLevel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log from this level on."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


#: All orders, and what their arguments have to be.
KINDS: Mapping[str, type[msgspec.Struct]] = {
    "ping": NoArguments,
    "stats": NoArguments,
    "active": NoArguments,
    "reserved": NoArguments,
    "registered": NoArguments,
    "config": NoArguments,
    "queues": NoArguments,
    "stack": NoArguments,
    "set_concurrency": SetConcurrency,
    "add_queue": AddQueue,
    "cancel_queue": CancelQueue,
    "set_time_limit": SetTimeLimit,
    "enable_events": NoArguments,
    "disable_events": NoArguments,
    "log_level": LogLevel,
}


class ControlOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order on its way.

    Attributes:
        id: unique; the answers are sent to `replies`.
        to: names of workers, with `*` for any text; empty: all.
        clock: the sender's logical clock.
    """

    id: Id
    kind: Annotated[str, msgspec.Meta(max_length=64)]
    to: Annotated[list[str], msgspec.Meta(max_length=MOST_NAMES)] = []
    args: dict[str, Any] = {}
    clock: Clock = 0

    @property
    def replies(self) -> str:
        """The topic of the answers."""
        return f"replies.{self.id}"


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of an answer, in each of its records.

    Attributes:
        error: why the order was not carried out; "": it was.
        clock: the worker's logical clock.
        piece, pieces: the number of this record, and of all; from 0.
    """

    worker: str
    host: str
    pid: int
    clock: Clock = 0
    error: str = ""
    piece: Annotated[int, msgspec.Meta(ge=0, lt=MOST_PIECES)] = 0
    pieces: Annotated[int, msgspec.Meta(ge=1, le=MOST_PIECES)] = 1


_order = msgspec.json.Decoder(ControlOrder)
_head = msgspec.json.Decoder(AnswerHead)


def decode_order(record: bytes) -> ControlOrder:
    """Return the order of a record.

    Raises:
        ValueError: it is none.
    """
    return _order.decode(record)


def answer_records(head: AnswerHead, value: object) -> list[bytes]:
    """Return the records of an answer; in place of too large a value, an error says so."""
    body = msgspec.json.encode(value)
    pieces = [body[place : place + PIECE] for place in range(0, len(body), PIECE)]
    if len(pieces) > MOST_PIECES:
        error = f"the answer has {len(body):,} bytes (at most {PIECE * MOST_PIECES:,})"
        return answer_records(msgspec.structs.replace(head, error=error), None)
    return [
        msgspec.json.encode(msgspec.structs.replace(head, piece=number, pieces=len(pieces)))
        + _LINE_END
        + piece
        for number, piece in enumerate(pieces)
    ]


def decode_answer(record: bytes) -> tuple[AnswerHead, bytes]:
    """Return the facts of a record, and its piece of the value.

    Raises:
        ValueError: it is no part of an answer.
    """
    head, _, piece = record.partition(_LINE_END)
    return _head.decode(head), piece


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns fits the name; no pattern at all fits every name."""
    return not patterns or any(_fits(name, pattern) for pattern in patterns)


def _fits(name: str, pattern: str) -> bool:
    first, *rest = re.sub(r"\*+", ANY, pattern).split(ANY)
    if not rest:
        return name == first
    *middle, last = rest
    if len(name) < len(first) + len(last) or not (name.startswith(first) and name.endswith(last)):
        return False
    # The leftmost place of each part leaves most room for the next: no way back is needed.
    place, end = len(first), len(name) - len(last)
    for part in middle:
        place = name.find(part, place, end)
        if place < 0:
            return False
        place += len(part)
    return True
