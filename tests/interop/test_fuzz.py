"""Random messages: what one language makes means the same to the other."""

from __future__ import annotations

import datetime as dt
import json
import math
import random
import struct
from typing import Any

import pytest

from machinery_py import Signature
from machinery_py.tasks.signature import Arg
from machinery_py.values.values import to_python
from machinery_py.wire.signatures import decode_signature, encode_signature
from machinery_py.wire.times import parse_time
from tests.interop.fleet import TYPES
from tests.interop.golang import Peer
from tests.interop.test_values import equal

COUNT = 5000  # in each direction, for each version
EMPTY = ([], {}, None)


@pytest.fixture
def go(version: str) -> Any:
    with Peer(
        version, broker="eager", backend="redis://127.0.0.1:1"
    ) as peer:  # it only makes and reads messages
        yield peer


def normal(message: Any) -> Any:
    """Less what may differ: null and empty containers, and nanoseconds and zone of a moment."""
    if not isinstance(message, dict):
        return message
    found = {key: None if value in EMPTY else value for key, value in message.items()}
    found["ETA"] = None if found["ETA"] is None else parse_time(found["ETA"])
    for name in ("OnSuccess", "OnError"):
        found[name] = [normal(one) for one in found[name] or ()]
    found["ChordCallback"] = normal(found["ChordCallback"])
    found["Args"] = [
        {**one, "Value": None} for one in found["Args"] or ()
    ]  # values are compared as values, not as text
    return found


def as_go_shows(value: Any) -> Any:
    if isinstance(value, bytes):
        return list(value)
    return value


def same_args(signature: Signature[Any], seen: list[Any]) -> bool:
    values = [to_python(arg.type, arg.value) for arg in signature.args]
    return len(values) == len(seen) and all(
        equal(theirs["value"], as_go_shows(ours)) if theirs["value"] is not None else not ours
        for ours, theirs in zip(values, seen, strict=True)
    )


@pytest.mark.parametrize("seed", range(5))
def test_messages_of_go_mean_the_same_to_python(go: Peer, seed: int) -> None:
    made = go.ask("fuzz", seed=seed, count=COUNT // 5)
    again = []
    for one in made:
        signature = decode_signature(one["wire"].encode())
        assert same_args(signature, one["args"] or []), one
        again.append(json.loads(encode_signature(signature)))

    for before, after in zip(made, go.ask("decode", messages=again), strict=True):
        assert not after.get("error"), (before, after)
        assert normal(json.loads(after["wire"])) == normal(json.loads(before["wire"]))
        assert all(
            alike(one, other)
            for one, other in zip(after["args"] or [], before["args"] or [], strict=True)
        )


def alike(after: Any, before: Any) -> bool:
    """The same value; an empty slice is as good as none."""
    return bool(
        after["type"] == before["type"] and (after["value"] or None) == (before["value"] or None)
    )


@pytest.mark.parametrize("seed", range(5))
def test_messages_of_python_mean_the_same_to_go(go: Peer, seed: int) -> None:
    made = [Maker(random.Random(f"{seed}:{number}")).signature(2) for number in range(COUNT // 5)]

    told = go.ask("decode", messages=[json.loads(encode_signature(one)) for one in made])

    for signature, seen in zip(made, told, strict=True):
        assert not seen.get("error"), (signature, seen)
        assert same_args(signature, seen["args"] or []), (signature, seen)
        assert normal(json.loads(seen["wire"])) == normal(json.loads(encode_signature(signature)))


class Maker:
    """Makes signatures that may be sent to Go."""

    LETTERS = (
        "abcXYZ019 _-.:/\\\"'<>&\n\t\x00\x1f"
        "\u00e9\u00df\u4e2d\u2028\u2029\ufeff\U0001f600\U0010ffff"
    )

    def __init__(self, source: random.Random) -> None:
        self.source = source

    def text(self) -> str:
        return "".join(self.source.choices(self.LETTERS, k=self.source.randrange(6)))

    def signature(self, depth: int) -> Signature[Any]:
        source = self.source
        nested = [
            [self.signature(depth - 1) for _ in range(source.randrange(2))] if depth else []
            for _ in range(3)
        ]
        return Signature(
            uuid=self.text(),
            name=self.text(),
            routing_key=self.text(),
            eta=source.choice((None, self.moment())),
            group_uuid=self.text(),
            group_task_count=source.randrange(5),
            priority=source.randrange(256),
            immutable=source.random() < 0.5,
            retry_count=source.randrange(10),
            retry_timeout=source.randrange(100),
            headers={self.text(): self.text() for _ in range(source.randrange(3))},
            args=tuple(self.arg() for _ in range(source.randrange(5))),
            on_success=nested[0],
            on_error=nested[1],
            chord_callback=nested[2][0] if nested[2] else None,
        )

    def moment(self) -> dt.datetime:
        zone = dt.timezone(dt.timedelta(minutes=self.source.randrange(-720, 720)))
        return dt.datetime.fromtimestamp(self.source.randrange(4 * 10**15) / 1e6, zone)

    def arg(self) -> Arg:
        name = self.source.choice(TYPES)
        if name in ("[]byte", "[]uint8"):
            return Arg(
                type=name, value=self.source.randbytes(self.source.randrange(5)), name=self.text()
            )
        if name.startswith("[]"):
            return Arg(
                type=name, value=[self.scalar(name[2:]) for _ in range(self.source.randrange(4))]
            )
        return Arg(type=name, value=self.scalar(name), name=self.text())

    def scalar(self, name: str) -> Any:
        source = self.source
        if name == "bool":
            return source.random() < 0.5
        if name == "string":
            return self.text()
        if name.startswith("float"):
            value = source.choice(
                (
                    0.0,
                    source.gauss(0, 1),
                    float(source.randrange(-1000, 1000)),
                    source.gauss(0, 1) * 1e30,
                )
            )
            if name == "float32":
                value = struct.unpack("f", struct.pack("f", value))[0]
            assert math.isfinite(value)
            return value
        bits = int(name.lstrip("uint") or 64)
        value = source.getrandbits(source.randrange(bits) + 1)
        return (
            value
            if name.startswith("u")
            else value - 2 ** (bits - 1)
            if value >= 2 ** (bits - 1)
            else value
        )
