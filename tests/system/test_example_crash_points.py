"""The examples under crash points: nothing is lost, and what comes twice is what they say."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from email.message import EmailMessage
from pathlib import Path
from types import ModuleType

import pytest

from machinery_py import chord, group
from machinery_py.testing import CrashPoints

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a module of an example anew; its files are in a folder of this test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTBOX", str(tmp_path / "outbox"))
    monkeypatch.setenv("REPORT_FOLDER", str(tmp_path))

    def load_file(path: str) -> ModuleType:
        name = f"example_{Path(path).stem}"
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load_file


class MailServer:
    """A connection to a mail server, which notes transactions, and mails by their Message-ID."""

    def __init__(self) -> None:
        self.transactions: list[str] = []
        self.mails: dict[str, str] = {}

    def send_message(self, message: EmailMessage) -> None:
        self.transactions.append(message["To"])
        self.mails[message["Message-ID"]] = message["To"]


def test_mails_keep_their_message_id(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, mail_server = load("email_sender/tasks.py"), MailServer()
    monkeypatch.setattr(tasks, "connection", lambda: mail_server)
    bulk = group(tasks.send_bulk_mail.signature(f"{name}@example.com", "", "") for name in "abc")
    noted = {
        "effects": {"mail": mail_server.mails},
        "at_least_once": {"transaction": mail_server.transactions},
    }

    one = CrashPoints(tasks.server).run(tasks.send_mail, "ada@example.com", "", "", **noted)
    many = CrashPoints(tasks.server).run(
        chord(bulk, tasks.report.partial("campaign"), collect=True), **noted
    )

    assert (one.lost, one.doubled, many.lost, many.doubled) == ([], [], [], [])
    assert (len(one.repeated), len(many.repeated)) == (1, 3)


def test_api_is_told_each_order(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = load("polite_api/orders.py")
    told: set[tuple[str, int]] = set()
    calls: list[str] = []

    def call(method: str, path: str, body: bytes | None = None) -> bytes:
        calls.append(method)
        tenant, _, rest = path.partition("/orders/")
        told.update(map(tuple, json.loads(body)) if body else [(tenant, int(rest))])
        return b"{}"

    monkeypatch.setattr(orders, "call", call)
    points = CrashPoints(orders.server)

    for task in (
        group(orders.tell.signature("acme", number) for number in range(3)),
        group(orders.cancel.signature(("acme", number)) for number in range(3)),
    ):
        report = points.run(task, effects={"order": told}, at_least_once={"call": calls})
        assert (report.lost, report.doubled) == ([], [])
        assert report.repeated  # the same order, as the page of the example says


def test_report_is_sent_once_a_night(load: Load, tmp_path: Path) -> None:
    example = load("nightly_report/report.py")
    (tmp_path / "orders.json").write_text(json.dumps({"ada": [1, 2], "grace": [3]}))

    report = CrashPoints(example.server).run(example.report)

    assert (report.lost, report.doubled) == ([], [])

    (tmp_path / "orders.json").write_text(json.dumps({"ada": [1, 2], "linus": ["seven"]}))

    report = CrashPoints(example.server).run(example.flow())

    assert (report.lost, report.doubled) == ([], [])


def test_digest_is_sent_once_a_day(load: Load) -> None:
    example = load("cron/digest.py")
    digest = example.digest.signature().with_headers(machinery_tick="2026-01-05T08:00:00+01:00")

    report = CrashPoints(example.server).run(digest)

    assert (report.lost, report.doubled) == ([], [])
