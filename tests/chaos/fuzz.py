"""Messages that nobody should have sent, thousands of them, on a queue that good tasks share.

Each is made from the seed and its number alone. It ends as a dead letter, as a task that ran or
failed, or it waits for a distant moment. The worker decides which, but loses none and goes on.

    python -m tests.chaos.fuzz NUMBER [SEED]      shows one
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

from machinery_py import Signature
from machinery_py.tasks.signature import Arg
from machinery_py.wire.signatures import encode_signature
from tests.chaos.fuzz_app import FUZZED, LIMIT

Message = dict[str, Any]

INTEGERS = (
    -1,
    0,
    1,
    255,
    256,
    2**31,
    -(2**31) - 1,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63),
    -(2**63) - 1,
    2**64,
    10**40,
    10**400,
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    2**63,
    10**30,
    "",
    "x",
    "é\u2028\x00",
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"$": "set", "v": [[1]]},
    {"$": "dict", "v": [[[1], 2]]},
    {"$": "dict", "v": 1},
    {"$": "no such tag"},
    [1, "a", None, {"b": [True]}],
    "A" * 5_000,
)
TYPES = (
    "int64",
    "uint8",
    "string",
    "bool",
    "float64",
    "[]int64",
    "[]uint64",
    "[]string",
    "[]byte",
    "json",
    "py",
    "",
    "no such type",
    "[][]int64",
    "complex128",
    "T" * 3_000,
)
TOKENS = (
    "NaN",
    "Infinity",
    "-0",
    "-",
    "1e400",
    "1e3",
    "01",
    "0x1",
    "1.",
    ".5",
    "+1",
    "nul",
    "'x'",
    "9" * 5_000,
    '"\\ud800"',
    '"\\x"',
    "\ufeff1",
    '"\n"',
    "1_000",
    "{]",
    "[}",
    '"',
    "\\",
)
MOMENTS = (
    "2300-01-01T00:00:00Z",
    "9999-12-31T23:59:59Z",
    "0000-01-01T00:00:00Z",
    "0001-01-01T00:00:00Z",
    "2020-01-01T00:00:00+24:60",
    "soon",
    "",
    5,
    "2026-13-01T00:00:00Z",
    "9" * 3_000,
)
#: Names that mean something to a store.
RESERVED = (
    "delayed_tasks",
    "mpy:revoked",
    "mpy:workers",
    "mpy:{machinery_tasks}:z",
    "mpy:{machinery_tasks}:a",
    "mpy:{machinery_tasks}:l",
    "mpy:dead",
    "amq.direct",
    "amq.gen-x",
    "amq.rabbitmq.reply-to",
    "machinery.dead",
)
HOSTILE = (
    "a\r\nb",
    "\x00",
    "\x1b[31m",
    "../../etc/passwd",
    "a b\tc",
    "*",
    "?",
    "{}",
    "{x}y",
    "%s%n",
    "$where",
    "é" * 200,
    "\u202e",
    "Q" * 300,
    "Q" * 100_000,
    "\ud800",
    "'; DROP TABLE tasks; --",
    "[1]",
    " ",
    "\ufeff",
)


def base(source: random.Random, number: int) -> Message:
    """A good message, whose UUID has the number in it."""
    signature = Signature[Any](
        uuid=f"fuzz{number:06}",
        name=source.choice(FUZZED),
        routing_key="machinery_tasks",
        args=tuple(
            Arg.of(source.choice((1, "a", 1.5, [1], {"a": None})))
            for _ in range(source.randrange(3))
        ),
        on_success=(Signature(name="told"),) * source.randrange(2),
        on_error=(Signature(name="told"),) * source.randrange(2),
    )
    message: Message = json.loads(encode_signature(signature))
    return message


def written(message: Message, source: random.Random) -> bytes:
    return json.dumps(message, ensure_ascii=source.random() < 0.5).encode("utf-8", "surrogatepass")


def random_bytes(source: random.Random, number: int) -> bytes:
    return source.randbytes(source.randrange(200))


def truncated(source: random.Random, number: int) -> bytes:
    body = written(base(source, number), source)
    return body[: source.randrange(len(body))]


def damaged(source: random.Random, number: int) -> bytes:
    body = bytearray(written(base(source, number), source))
    for _ in range(source.randrange(1, 6)):
        at = source.randrange(30, len(body))  # behind the UUID
        token = source.choice(TOKENS).encode("utf-8", "replace")
        body[at : at + source.randrange(3)] = source.choice((source.randbytes(1), token, b""))
    return bytes(body)


def deep(source: random.Random, number: int) -> bytes:
    count = source.choice((*(100, 199, 201, 300, 500, 1_000) * 5, 9_000, 10_001, 100_000))
    start, end = source.choice(
        (
            ("[", "]"),
            ('{"a":', "}"),
            ('[{"OnSuccess":', "}]"),
            ('{"Name":"take","ChordCallback":', "}"),
            ("[", ""),
        )
    )
    message = base(source, number)
    hole = "@hole@"
    match source.randrange(4):
        case 0:
            message["Args"] = [{"Name": "", "Type": source.choice(TYPES), "Value": hole}]
        case 1:
            message[
                source.choice(("OnSuccess", "OnError", "ChordCallback", "Headers", "Name", "UUID"))
            ] = hole
        case 2:
            message["Other"] = hole
        case _:
            message["OnSuccess"] = [{"Name": "told", "Args": [{"Type": "json", "Value": hole}]}]
    return written(message, source).replace(
        f'"{hole}"'.encode(), (start * count + "1" + end * count).encode()
    )


def wrong_types(source: random.Random, number: int) -> bytes:
    message = base(source, number)
    keys = [
        key for key in message if key not in ("UUID", "IgnoreWhenTaskNotRegistered")
    ]  # ignored would be gone without a trace
    for key in source.sample(keys, source.randrange(1, 4)):
        message[key] = source.choice(VALUES)
    message["RetryCount"] = 0 if message["RetryCount"] in (2**63, 1) else message["RetryCount"]
    return written(message, source)


def wrong_arguments(source: random.Random, number: int) -> bytes:
    message = base(source, number)
    message["Args"] = [
        {
            "Name": source.choice(("", "flag", "number", "N" * 3_000)),
            "Type": source.choice(TYPES),
            "Value": source.choice(VALUES),
        }
        for _ in range(source.randrange(4))
    ]
    body = written(message, source)
    return (
        body
        if source.random() < 0.7
        else body.replace(b"null", source.choice(TOKENS).encode("utf-8", "replace"), 1)
    )


def numbers(source: random.Random, number: int) -> bytes:
    message = base(source, number)
    match source.randrange(4):
        case 0:
            message[source.choice(("Priority", "GroupTaskCount", "RetryTimeout", "RetryCount"))] = (
                source.choice(INTEGERS)
            )
            message["RetryTimeout"] = (
                message["RetryTimeout"] or 2**31
            )  # no retry of it comes in this run
        case 1:
            message |= {
                "Name": "verbose",
                "RetryCount": 2**63 - 1,
                "RetryTimeout": source.choice((2**31, 2**53, 2**63 - 1)),
            }
        case 2:
            message["ETA"] = source.choice(MOMENTS)
        case _:
            count = source.choice(INTEGERS)
            message |= {
                "GroupUUID": f"group{number}",
                "GroupTaskCount": count,
                "ChordCallback": {"Name": "told"},
            }
    body = written(message, source)
    return (
        body
        if source.random() < 0.7
        else body.replace(b": 0", source.choice((b": -0", b": 1e2", b": 25.0", b": 0e0")), 1)
    )


def headers(source: random.Random, number: int) -> bytes:
    names = (
        "machinery_run",
        "machinery_attempt",
        "machinery_expires",
        "machinery_unique",
        "machinery_unique_start",
        "machinery_on_duplicate",
        "machinery_collect",
        "machinery_schedule",
        "machinery_tick",
        "H" * 3_000,
        "",
        "\x00",
    )
    texts = ("", "-1", "9" * 30, "nan", "inf", "é" * 3_000, "\r\n", "0", "true")
    message = base(source, number)
    message["Headers"] = {
        source.choice(names): source.choice((*texts, *VALUES))
        for _ in range(source.randrange(1, 4))
    }
    return written(message, source)


def huge_texts(source: random.Random, number: int) -> bytes:
    message = base(source, number)
    text = source.choice(("x", "é", "\U0001f600", '"', "\\", "\x00")) * source.choice(
        (3_000, 3_000, 20_000, LIMIT // 8)
    )
    if source.random() < 0.05:
        text = "x" * (LIMIT + 1)
    match source.randrange(3):
        case 0:
            message["Args"] = [
                {"Type": source.choice(("string", "int64", "[]byte", "[]uint8")), "Value": text}
            ]
        case 1:
            message["Args"] = [{"Type": text, "Name": text, "Value": 1}]
        case _:
            message[
                source.choice(
                    ("Other", "ETA", "BrokerMessageGroupId", "SQSReceiptHandle", "Priority")
                )
            ] = text
    return written(message, source)


def hostile_names(source: random.Random, number: int) -> bytes:
    message = base(source, number)
    for key in source.sample(("Name", "UUID", "GroupUUID"), source.randrange(1, 3)):
        # Two messages with one UUID are one task, so only what is refused as one comes twice.
        name = source.choice((*RESERVED, *HOSTILE))
        message[key] = (
            name
            if key == "Name" or name.startswith(("mpy:", "delayed_tasks"))
            else f"{name}{key[0]}{number}"
        )
    if message["GroupUUID"]:
        message |= {"GroupTaskCount": 1, "ChordCallback": {"Name": "told"}}
    return written(message, source)


def impossible_queues(source: random.Random, number: int) -> bytes:
    message = base(source, number)
    queue = source.choice((*RESERVED, *HOSTILE))
    match source.randrange(3):
        case 0:
            message["OnSuccess"] = message["OnError"] = [{"Name": "told", "RoutingKey": queue}]
        case 1:
            callback = {"Name": "told", "RoutingKey": queue}
            message |= {
                "GroupUUID": f"group{number}",
                "GroupTaskCount": 1,
                "ChordCallback": callback,
            }
        case _:
            message |= {
                "RoutingKey": queue,
                "RetryCount": source.randrange(2),
                "RetryTimeout": 2**31,
            }
    return written(message, source)


Maker = Callable[[random.Random, int], bytes]
KINDS: tuple[Maker, ...] = (
    random_bytes,
    truncated,
    damaged,
    deep,
    wrong_types,
    wrong_arguments,
    numbers,
    headers,
    huge_texts,
    hostile_names,
    impossible_queues,
)


def fuzzed(seed: int, number: int, kinds: tuple[Maker, ...] = KINDS) -> tuple[str, bytes]:
    """The message of this number, and of which kind it is."""
    source = random.Random(f"{seed}:{number}")
    make = kinds[number % len(kinds)]
    return make.__name__, make(source, number)


if __name__ == "__main__":
    print(*fuzzed(int(sys.argv[2]) if len(sys.argv) > 2 else 1, int(sys.argv[1])))
