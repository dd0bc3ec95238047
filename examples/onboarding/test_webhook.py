"""The link approves once, and nobody can make one."""

from __future__ import annotations

import time
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest
import webhook
from onboarding import onboard

from machinery_py.testing import Harness


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "SECRET", b"known to this test")


def ask(method: str, token: str) -> tuple[str, str]:
    environ: dict[str, Any] = {"REQUEST_METHOD": method, "QUERY_STRING": f"token={token}"}
    setup_testing_defaults(environ)
    found: list[str] = []
    body = b"".join(webhook.app(environ, lambda status, headers: found.append(status)))
    return found[0], body.decode()


def test_link_approves_once(machinery: Harness) -> None:
    result = onboard.send("ada")
    machinery.drain()
    machinery.advance(days=3)
    machinery.drain()
    token = webhook.token_of(result.uuid)

    assert "<button>" in ask("GET", token)[1]
    machinery.drain()
    assert machinery.state(result).error.startswith("waits for signal 'approval'")
    assert [ask("POST", token)[0] for _ in range(2)] == ["200 OK", "200 OK"]
    machinery.drain()

    assert result.get(timeout=5) == "receipt-1"
    assert ask("POST", token)[0] == "410 Gone"


def test_link_that_is_forged_or_old_is_refused(machinery: Harness) -> None:
    good = webhook.token_of("task_1")
    old = webhook.token_of("task_1", until=int(time.time()) - 1)
    for token in ("", "x", "task_1", good.replace("task_1", "task_2"), good[:-1], old):
        assert ask("POST", token)[0] == "403 Forbidden"
