"""The hash tag before each key of an application in a Redis Cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ResponseError

import machinery_py
from machinery_py.brokers.redis.scripts import PUT
from machinery_py.connections.redis.cluster import described
from machinery_py.connections.redis.tags import GUARD, slot_of, tagged_command, tagged_script

TAG = b"{t}"


@pytest.mark.parametrize(
    ("key", "slot"),
    [
        ("123456789", 12739),
        ("foo", 12182),
        ("", 0),
        ("{}foo", slot_of(b"{}foo")),
        ("a{foo}b", 12182),
        ("{foo}{bar}", 12182),
    ],
)
def test_a_key_is_in_the_slot_of_its_tag(key: str, slot: int) -> None:
    assert slot_of(key.encode()) == slot


@given(st.text(alphabet="a{}%"))
def test_a_key_with_the_tag_is_in_its_slot(name: str) -> None:
    assert slot_of(TAG + name.encode()) == slot_of(TAG) == slot_of(TAG + GUARD)


@pytest.mark.parametrize(
    ("words", "tagged"),
    [
        ("PING", "PING"),
        ("CLIENT UNBLOCK 7", "CLIENT UNBLOCK 7"),
        ("SET k v", "SET {t}k v"),
        ("ZADD k 1 {m}", "ZADD {t}k 1 {m}"),
        ("MGET a b c", "MGET {t}a {t}b {t}c"),
        ("BLMOVE a b LEFT RIGHT 1", "BLMOVE {t}a {t}b LEFT RIGHT 1"),
        ("XREAD BLOCK 5 STREAMS a b 1-0 2-0", "XREAD BLOCK 5 STREAMS {t}a {t}b 1-0 2-0"),
    ],
)
def test_keys_of_a_command_get_the_tag(words: str, tagged: str) -> None:
    assert b" ".join(tagged_command(TAG, words.encode().split())) == tagged.encode()


def test_unknown_command_is_refused() -> None:
    with pytest.raises(ValueError, match="SUNIONSTORE"):
        tagged_command(TAG, [b"SUNIONSTORE", b"a", b"b"])


def test_each_command_of_the_package_is_in_the_table() -> None:
    package = Path(machinery_py.__file__).parent
    folders = ("backends/redis", "brokers/redis", "connections/redis", "limits", "locks", "stores")
    files = [path for folder in folders for path in (package / folder).glob("*.py")]
    asked = {
        (match[1] or match[2]).encode()
        for path in files
        for match in re.finditer(
            r'(?:ask|command)\(\s*b"([A-Z]+)"|return b"([A-Z]+)",', path.read_text()
        )
    }

    for name in asked - {b"EVAL", b"EVALSHA", b"SUBSCRIBE", b"UNSUBSCRIBE"}:  # see ClusterDriver
        tagged_command(TAG, [name, b"STREAMS", b"a", b"0"])
    assert {b"BLMOVE", b"GET", b"INCRBY", b"XREAD", b"XREVRANGE"} <= asked


def test_script_is_unchanged_behind_the_tag() -> None:
    script = tagged_script(PUT, "{it's}")

    assert script.text.endswith(PUT.text)
    assert "it's" not in script.text
    assert (script.path, script.doing, script.away) == (PUT.path, PUT.doing, PUT.away)
    assert script.sha != PUT.sha


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("ASK 11958 127.0.0.1:7000", "slot 11958 is on its way to 127.0.0.1:7000"),
        ("MOVED 5 [::1]:7001", "slot 5 has moved to [::1]:7001"),
        ("BUSY a script runs", "BUSY a script runs"),
    ],
)
def test_redirection_without_a_class_is_described(said: str, text: str) -> None:
    assert described(ResponseError(said)) == text


#: Commands that name several keys, or others than the first word: they need a row in tagged.lua.
_SEVERAL = """BITOP BLMOVE COPY EVAL GEOSEARCHSTORE KEYS LCS LMOVE LMPOP MSET MSETNX OBJECT PFCOUNT
PFMERGE RENAME RENAMENX RPOPLPUSH SCAN SDIFF SDIFFSTORE SINTER SINTERCARD SINTERSTORE SMOVE SORT
SUNION SUNIONSTORE TOUCH UNLINK XREAD XREADGROUP ZDIFF ZDIFFSTORE ZINTER ZINTERSTORE ZMPOP
ZRANGESTORE ZUNION ZUNIONSTORE"""


def test_scripts_use_what_the_tag_is_made_for() -> None:
    package = Path(machinery_py.__file__).parent
    texts = [path.read_text() for path in package.rglob("*.lua") if path.name != "tagged.lua"]
    code = re.sub(r"^\s*--.*$", "", "\n".join(texts), flags=re.MULTILINE)

    assert set(re.findall(r"\bredis\.(\w+)", code)) == {"call", "sha1hex"}
    words = set(re.findall(r"'([A-Z]{3,})'", code))
    assert {"DEL", "EXISTS", "MGET"} <= words
    assert words & set(_SEVERAL.split()) == set()
