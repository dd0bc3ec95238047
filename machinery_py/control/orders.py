"""Orders to workers and their answers, as records of topics.

    orders           a ControlOrder as JSON
    replies.<id>     for the caller of one order, one Answer of each worker as JSON; compressed by
                     zlib if it is too large for a record

Workers carry out the orders of KINDS and no others: an order names no code, and its arguments are
checked before anything is done. What cannot be read is ignored: everybody who can write to the
store can write to a topic.
"""

from __future__ import annotations

import datetime as dt
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from machinery_py.brokers.topics import MAX_RECORD, TOPIC_AGE
from machinery_py.clock import LONGEST, seconds_of
from machinery_py.control.lamport import MOST
from machinery_py.errors import ArgumentError
from machinery_py.values.malformed import MALFORMED

ORDERS = "orders"  # the topic
ANY = "*"  # in a name: any text
MOST_BYTES = 2**22  # of an answer
MOST_NAMES = 1000  # of workers or tasks
MOST_CONCURRENCY = 10_000
MOST_HEADERS = 20  # pairs; with names and values of MOST_TEXT they always fit into a record
MOST_TEXT = 250  # characters

Clock = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}\\Z")]

Text = Annotated[str, msgspec.Meta(max_length=MOST_TEXT, pattern=r"^[^\ud800-\udfff]*\Z")]
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Number = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]

NOTHING = msgspec.Raw(b"null")

T = TypeVar("T")


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


class Terminate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """End the runs of these tasks, if they are revoked."""

    uuids: Annotated[list[str], msgspec.Meta(max_length=MOST_NAMES)]


class Find(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tell the UUIDs of held and running tasks whose headers contain all these pairs."""

    headers: Annotated[
        dict[Text, Text | Whole | Number | bool | None],
        msgspec.Meta(min_length=1, max_length=MOST_HEADERS),
    ]


class LogLevel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log from this level on."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


#: Orders that change something, and what their arguments have to be.
CHANGES: Mapping[str, type[msgspec.Struct]] = {
    "set_concurrency": SetConcurrency,
    "add_queue": AddQueue,
    "cancel_queue": CancelQueue,
    "set_time_limit": SetTimeLimit,
    "enable_events": NoArguments,
    "disable_events": NoArguments,
    "log_level": LogLevel,
    "restart_pool": NoArguments,
    "shutdown": NoArguments,
}

#: All orders.
KINDS: Mapping[str, type[msgspec.Struct]] = {
    "ping": NoArguments,
    "stats": NoArguments,
    "active": NoArguments,
    "reserved": NoArguments,
    "registered": NoArguments,
    "config": NoArguments,
    "queues": NoArguments,
    "stack": NoArguments,
    **CHANGES,
    "terminate": Terminate,
    "find": Find,
}


class ControlOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An order on its way.

    Attributes:
        id: unique; the answers are sent to `replies`.
        to: names of workers, with `*` for any text; empty: all.
        clock: the sender's logical clock.
        timeout: seconds that the sender waits for answers.
    """

    id: Id
    kind: Annotated[str, msgspec.Meta(max_length=64)]
    to: Annotated[list[str], msgspec.Meta(max_length=MOST_NAMES)] = []
    args: dict[str, Any] = {}
    clock: Clock = 0
    timeout: Annotated[float, msgspec.Meta(gt=0, le=TOPIC_AGE)] = TOPIC_AGE

    @property
    def replies(self) -> str:
        """The topic of the answers."""
        return f"replies.{self.id}"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer.

    Attributes:
        clock: the worker's logical clock.
        value: what the order has returned, as JSON.
        error: why it was not carried out; "": it was.
    """

    worker: str
    host: str
    pid: int
    clock: Clock = 0
    value: msgspec.Raw = NOTHING
    error: str = ""


_order = msgspec.json.Decoder(ControlOrder)
_answer = msgspec.json.Decoder(Answer)


def arguments(kind: str, given: Mapping[str, Any], *, strict: bool = True) -> msgspec.Struct:
    """Return the arguments of an order.

    Args:
        strict: False: text is read as the number that it may have to be.

    Raises:
        ArgumentError: they do not fit, or there is no such order.
    """
    try:
        if kind not in KINDS:
            raise ValueError("there is no such order")
        plain = {
            name: seconds_of(name, value) if isinstance(value, dt.timedelta) else value
            for name, value in given.items()
        }
        found = msgspec.convert(plain, KINDS[kind], strict=strict)
        msgspec.json.encode(found)  # half a surrogate pair cannot be
        return found
    except MALFORMED as error:
        raise ArgumentError(f"order {kind!r}: {error}") from error


def decode_order(record: bytes) -> ControlOrder:
    """Return the order of a record.

    Raises:
        ValueError: it is none.
    """
    return decoded(_order, record)


def encode_answer(answer: Answer) -> bytes:
    """Return the record of an answer; if it is too large, one whose error says so."""
    record = msgspec.json.encode(answer)
    if len(record) <= MAX_RECORD:
        return record
    packed = zlib.compress(record)
    if len(packed) <= MAX_RECORD and len(record) <= MOST_BYTES:
        return packed
    error = f"the answer has {len(record):,} bytes, {len(packed):,} compressed (at most "
    error += f"{MOST_BYTES:,}, {MAX_RECORD:,})"
    return msgspec.json.encode(msgspec.structs.replace(answer, value=NOTHING, error=error))


def decode_answer(record: bytes) -> Answer:
    """Return the answer of a record.

    Raises:
        ValueError: it is none.
    """
    if not record.startswith(b"{"):
        try:
            record = zlib.decompressobj().decompress(record, MOST_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from error
    return decoded(_answer, record)


def decoded(decoder: msgspec.json.Decoder[T], record: bytes | msgspec.Raw) -> T:
    """Return what a record holds.

    Raises:
        ValueError: it is something else.
    """
    try:
        return decoder.decode(record)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except MALFORMED as error:
        raise ValueError(str(error)) from error


def contains(headers: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether headers contain all the wanted pairs; 1 and 1.0 are equal, 1 and True not."""
    return all(
        name in headers
        and headers[name] == value
        and isinstance(headers[name], bool) == isinstance(value, bool)
        for name, value in wanted.items()
    )


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
