"""`--json` of the commands that read: the keys of docs/reference/cli-json.md; and exit codes."""

from __future__ import annotations

import json
import logging
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from machinery_py import Server
from machinery_py.brokers.base import Message
from machinery_py.cli import main as entry
from machinery_py.cli.commands import COMMANDS
from machinery_py.cli.main import main

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
ROW = re.compile(
    r"^\| `(?P<command>[a-z ]+)` \| (?P<shape>[a-z ]+) \| (?P<keys>.*) \|$", re.MULTILINE
)
CODE = re.compile(r"^\| (\d+) \| ", re.MULTILINE)

#: Commands that change something, or serve; each may have --json, which tells what was done.
CHANGING = {
    *(
        "worker",
        "dashboard",
        "exporter",
        "relay",
        "completion",
        "send",
        "retry",
        "revoke",
        "signal",
        "purge",
        "declare",
        "migrate",
    ),
    *(
        "pause",
        "resume",
        "forget",
        "limits set",
        "limits reset",
        "control",
        "dead replay",
        "dead delete",
    ),
    *("periodic pause", "periodic resume", "periodic run", "periodic change", "periodic remove"),
}
#: What follows the app.
WORDS = {
    "result": "{failed}",
    "show": "{failed}",
    "why": "{failed}",
    "flow": "{flow}",
    "dead show": "{letter}",
}
WORDS |= {"top": "--once --every 100ms", "events": "--since 1h --limit 1"}

APP = """
from machinery_py import Config, Server
server = Server(Config(broker={url!r}, events=True))

@server.task(rate="100/s")
def add(a, b):
    return a + b

@server.task(retries=1, backoff=[0.01])
def fail(text):
    raise ValueError(text)

server.register_periodic_task("@daily", "nightly", add.signature(1, 1))
"""


class Shop:
    """An app that has something for each command to tell; `name`: its module."""

    def __init__(self, folder: Path) -> None:
        self.name, self.folder = f"shop_{uuid.uuid4().hex}", folder
        (folder / f"{self.name}.py").write_text(APP.format(url=f"sqlite:///{folder}/shop.db"))

    def call(self, command: str, *words: str) -> int:
        root = logging.getLogger()
        handlers, level = list(root.handlers), root.level
        try:
            return main([*command.split(), self.name, *words, "--app-dir", str(self.folder)])
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)

    @property
    def server(self) -> Server:
        server = sys.modules[self.name].server
        assert isinstance(server, Server)
        return server

    def fill(self) -> dict[str, str]:
        """Run tasks, with a worker that goes on; return the words that commands want."""
        server = self.server
        garbage = Message(uuid="", name="", queue="machinery_tasks", body=b"no json")
        server.broker.put([garbage], token="")
        tasks = sys.modules[self.name]
        flow = (tasks.add.signature(1, 1) | tasks.add.partial(2)).send()
        failed = tasks.fail.send("no")
        server.new_worker(burst=True).launch(signals=False)
        tasks.add.send(20, 22)
        letter = server.inspect.dead()[0]
        return {"flow": flow.steps[0].uuid, "failed": failed.uuid, "letter": letter.id}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("shop"))
    path, root = list(sys.path), logging.getLogger()
    level = root.level
    assert shop.call("declare") == 0  # imports it
    yield shop
    shop.server.close()
    del sys.modules[shop.name]
    sys.path[:] = path
    root.setLevel(level)
    for handler in [one for one in root.handlers if hasattr(one, "of_machinery")]:
        root.removeHandler(handler)


@pytest.fixture(scope="module")
def words(shop: Shop) -> dict[str, str]:
    return shop.fill()


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return the shape and the keys of each command's answer on the page."""
    text = (REFERENCE / "cli-json.md").read_text()
    found = {row["command"]: (row["shape"], row["keys"]) for row in ROW.finditer(text)}
    return {
        name: (shape, set(re.findall(r"`(\w+)`", keys))) for name, (shape, keys) in found.items()
    }


def test_page_has_every_command_that_reads() -> None:
    assert documented().keys() == COMMANDS.keys() - CHANGING


@pytest.mark.parametrize("command", sorted(documented()))
def test_json_of_a_command_has_the_keys_of_the_page(
    command: str, shop: Shop, words: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    shape, keys = documented()[command]
    worker = shop.server.new_worker("here", concurrency=1, queues=["other"])
    worker.start()
    try:
        code = shop.call(command, *WORDS.get(command, "").format_map(words).split(), "--json")
    finally:
        worker.stop()

    answer: Any = json.loads(capsys.readouterr().out)
    assert code in (0, 1)
    assert isinstance(answer, list) is (shape == "array of")
    record = answer[0] if isinstance(answer, list) else answer
    assert keys <= record.keys() if command == "events" else keys == record.keys()


# Exit codes


def test_exit_codes_are_those_of_the_table(
    shop: Shop,
    words: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    found = {
        0: shop.call("queues"),
        1: shop.call("result", words["failed"]),
        2: shop.call("show", "task_of_nobody"),
    }
    broken = Shop(tmp_path)
    (tmp_path / "shop.db").write_text("Dear Sir or Madam, " * 100)
    found[3] = broken.call("queues")
    monkeypatch.setattr(entry, "_call", interrupt)
    found[130] = shop.call("queues")

    table = (REFERENCE / "cli.md").read_text().partition("## Exit codes")[2].partition("##")[0]
    assert found == {int(code): int(code) for code in CODE.findall(table)}
