"""No error, log, repr, configuration or command shows a URL's password, even a malformed one's."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from machinery_py import Config, MachineryError, Server
from machinery_py.cli.main import main
from machinery_py.clock import SYSTEM_CLOCK
from machinery_py.config.server_urls import parse_amqp_url, parse_redis_url
from machinery_py.stores.open import Family, FamilyOptions
from machinery_py.testing.waiting import HANG
from tests.config.test_urls import PASSWORDS, SHAPES, WORDS, filled

OPTIONS = FamilyOptions(clock=SYSTEM_CLOCK, timeout=0.2)

Url = st.builds(
    lambda shape, password, is_encoded: filled(
        shape, quote(password, safe="") if is_encoded else password
    ),
    st.sampled_from(SHAPES),
    PASSWORDS,
    st.booleans(),
)


def said(act: Callable[[], object]) -> str:
    """Everything raised, with its causes, or the returned value as a program would print it."""
    try:
        found = act()
    except (MachineryError, ValueError, TypeError) as error:
        texts: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            texts.append(repr(cause) + str(cause))
            cause = cause.__cause__
        return "\n".join(texts)
    return repr(found) + str(found)


@contextlib.contextmanager
def written() -> Iterator[io.StringIO]:
    """What is written to the screen, logged and warned of."""
    screen, root = io.StringIO(), logging.getLogger()
    handlers, level = list(root.handlers), root.level
    root.addHandler(logging.StreamHandler(screen))
    try:
        with (
            contextlib.redirect_stdout(screen),
            contextlib.redirect_stderr(screen),
            warnings.catch_warnings(),
        ):
            warnings.showwarning = lambda message, *_: print(message, file=screen)  # type: ignore[assignment]  # one of its forms
            yield screen
    finally:
        root.handlers[:] = handlers  # the command line adds its own
        root.setLevel(level)


def assert_nothing_is_shown(text: str) -> None:
    assert not any(word in text for word in WORDS), text


@given(url=Url)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_error_repr_or_configuration_shows_a_secret(url: str) -> None:
    with written() as screen:
        texts = [
            said(lambda: Config(broker=url)),
            said(lambda: Config(broker="memory://", result_backend=url)),
            said(lambda: Config(broker="memory://", lock=url)),
            said(lambda: Config(broker=url).redacted()),
            said(
                lambda: Config(broker=f"{url};redis://h", multiple_broker_separator=";").redacted()
            ),
            said(lambda: Config(require_server=True, broker=url)),
            said(lambda: Server(url).config),
            said(lambda: Config.from_env(environ={"MACHINERY_URL": url})),
        ]
        if "://" in url or "@" in url:  # where a URL is not expected, other words are shown
            texts += [
                said(lambda: Config(default_queue=url).redacted()),
                said(lambda: Config.from_mapping({url: 1})),
                said(lambda: Config.from_mapping({"redis": {"max_idle": url}})),
            ]

    assert_nothing_is_shown("\n".join([*texts, screen.getvalue()]))


@given(url=Url)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_no_family_shows_a_secret(url: str) -> None:
    family = Family(url, OPTIONS)  # of a store that somebody else brings, and that can do nothing

    assert_nothing_is_shown("\n".join(map(said, (family.broker, family.backend, family.lock))))


@pytest.mark.parametrize(
    "parsed",
    [
        parse_redis_url("redis://KILO:LIMA@h?master_name=m&sentinel_password=MIKE"),
        parse_amqp_url("amqp://KILO:LIMA@h"),
    ],
    ids=["redis", "amqp"],
)
def test_a_url_that_was_read_is_printed_without_its_secrets(parsed: object) -> None:
    assert_nothing_is_shown(repr(parsed))


@given(url=Url)
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
    max_examples=50,
)
def test_no_command_shows_the_secret_of_a_misplaced_url(url: str, tmp_path: Path) -> None:
    with written() as screen:
        for words in (
            ["config", url],  # `worker` says the same, in a process of its own
            ["queues", "--app-dir", str(tmp_path), f"--broker={url}"],
            ["doctor", "app", url],
            ["tasks", "app", "--state", "failed", "--url", url],
            [url],
            ["worker", "app", "-c", url],
        ):
            if "://" in url or "@" in url:  # a lone word may be the name of a module
                assert main(words) == 2

    assert_nothing_is_shown(screen.getvalue())


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_worker_process_shows_no_secret_of_a_misplaced_url(shape: str) -> None:
    command = [sys.executable, "-m", "machinery_py", "worker", filled(shape, WORDS[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 2

    said = done.stdout + done.stderr
    assert "found a URL" in said
    assert_nothing_is_shown(said)


UNREACHABLE = (
    "redis://user:KILO@127.0.0.1:1/0",
    "redis://user:KILO@127.0.0.1:1,127.0.0.1:2/0",
    "redis://user:KILO@127.0.0.1:1/0?master_name=m&sentinel_password=LIMA",
    "rediss://KILO@127.0.0.1:1/0",
    "amqp://user:KI%4CO%4b@127.0.0.1:1//",
    "amqps://user:KILO@127.0.0.1:1/",
    "mongodb://user:KILO@127.0.0.1:1/db?authMechanismProperties=AWS_SESSION_TOKEN:LIMA",
    "mongodb://user:KILO@127.0.0.1:1/db?serverSelectionTimeoutMS=200",
)


@pytest.mark.parametrize("url", UNREACHABLE)
def test_no_command_shows_the_secret_of_an_unusable_server(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MACHINERY_URL", url)
    monkeypatch.setenv("MACHINERY_PUBLISH_TIMEOUT", "0.3")
    monkeypatch.setenv("MACHINERY_BROKER_CONNECTION_RETRY", "no")
    name = f"app_of_secrets_{UNREACHABLE.index(url)}"
    (tmp_path / f"{name}.py").write_text(
        "from machinery_py import Server\nserver = Server()\n"
        "@server.task\ndef add(a: int, b: int) -> int: return a + b\n"
    )

    with written() as screen:
        for words in (
            ["doctor"],
            ["config"],
            ["queues"],
            ["send", "add", "1", "2"],
            ["tasks"],
            ["worker"],
        ):
            main([*words[:1], name, *words[1:], "--app-dir", str(tmp_path)])

    shown = screen.getvalue()
    assert_nothing_is_shown(shown)
    assert "127.0.0.1:1" in shown
    assert logging.getLogger("machinery_py.connections").level == logging.NOTSET
