"""Values as text: what is masked, and what is cut."""

from __future__ import annotations

import json
import time

import pytest

from machinery_py import Signature
from machinery_py.dashboard.masking import LONGEST, Masking, mask_secrets, python_call
from machinery_py.tasks.signature import Arg
from machinery_py.wire.signatures import encode_signature

PLACES = {"login": ("user", "password")}


@pytest.fixture
def masking() -> Masking:
    return Masking(mask_secrets, lambda task: PLACES.get(task, ()))


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "DB_PASSWD",
        "access_token",
        "client-secret",
        "Authorization",
        "api_key",
        "apikey",
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert mask_secrets(name, 1) == "•••"


@pytest.mark.parametrize("name", ["", "user", "key", "keyboard", "author", "private"])
def test_other_names_are_not_masked(name: str) -> None:
    assert mask_secrets(name, 1) == 1


def test_message_is_masked_in_its_callbacks_too(masking: Masking) -> None:
    login = Signature(
        name="login", args=[Arg(type="string", value="ada"), Arg(type="string", value="s3cret")]
    )
    body = encode_signature(
        login.then(login.catch(login)).replace(
            chord_callback=login, headers={"Name": "x", "token": "s3cret", "tenant": "a"}
        )
    )

    shown = masking.body(body)

    assert "s3cret" not in shown
    assert shown.count("•••") == 5
    assert shown.count('"ada"') == 4
    assert json.loads(shown)["Headers"]["tenant"] == "a"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"OnSuccess": ' * 700 + b"1" + b"}" * 700,
        b'{"Headers": ' + b"[" * 700 + b"]" * 700 + b"}",
        b'{"Name": 7, "Args": {"a": 1}, "OnSuccess": 3, "OnError": [null, "x"]}',
        b'{"Name": [], "Args": [1, null, {"Name": {}}, [2]]}',
        b'"\\ud800"',
        b'{"a": "' + b"x" * 1_000_000 + b'"}',
    ],
)
def test_every_body_is_shown_as_text(masking: Masking, body: bytes) -> None:
    shown = masking.body(body)

    assert len(shown) <= LONGEST


@pytest.mark.parametrize("value", ["a" * 10**7, [1] * 10**6, {str(n): n for n in range(10**6)}])
def test_large_values_cost_no_more_than_what_is_shown(masking: Masking, value: object) -> None:
    begun = time.process_time()
    shown = masking.text(value, limit=300)

    assert len(shown) == 300 and shown.endswith("…")
    assert time.process_time() - begun < 0.05


@pytest.mark.parametrize(
    ("task", "args", "shown"),
    [
        ("shop.add", [Arg(type="int64", value=1)], "add.send(1)"),
        ("greet", [Arg(type="string", value="a'b", name="lang")], 'greet.send(lang="a\'b")'),
        ("greet", [Arg(type="[]byte", value="AAE=")], "greet.send(b'\\x00\\x01')"),
        ("greet", [Arg(type="Struct", value={"a": [None]})], "greet.send({'a': [None]})"),
        ("a-b", [Arg(type="bool", value=True)], "server.send_task(Signature.of('a-b', True))"),
        ("x'); y(", [], 'server.send_task(Signature.of("x\'); y("))'),
        ("a", [Arg(type="bool", value=True, name="x=1,")], "a.send(True)"),
    ],
)
def test_call_is_told_as_python(task: str, args: list[Arg], shown: str) -> None:
    assert python_call(task, [("", arg) for arg in args], "") == shown


def test_python_names_another_queue_than_the_default() -> None:
    assert python_call("add", [], "mail") == "add.options(queue='mail').send()"


def test_what_was_a_secret_is_masked_under_any_name(masking: Masking) -> None:
    value = {"who": "ann", "pin": {"$": "secret", "v": "hunter2"}}

    [(_, arg)] = masking.args("login", [Arg(type="py", value=value)])

    assert arg.value == {"who": "ann", "pin": "•••"}
    assert "hunter2" not in python_call("login", [("", Arg(type="py", value=value))], "")


def test_moment_is_shown_as_text(masking: Masking) -> None:
    moment = {"$": "datetime", "v": "2026-11-29T15:00:00+00:00"}
    assert masking.text([moment, 1]) == '["2026-11-29T15:00:00+00:00", 1]'
    assert masking.text({"$": "set", "v": [1]}) == '{"$": "set", "v": [1]}'


def test_pairs_of_a_dict_are_masked_by_their_keys(masking: Masking) -> None:
    value = {"$": "dict", "v": [["password", "hunter2"], [1, {"api_key": "k"}], "odd"]}
    assert masking.masked(value) == {
        "$": "dict",
        "v": [["password", "•••"], [1, {"api_key": "•••"}], "odd"],
    }
