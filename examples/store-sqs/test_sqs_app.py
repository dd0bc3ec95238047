"""An app on SQS and DynamoDB, found by their schemes, with real workers."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from machinery_py import Config, Server, State, TaskFailed, chord, group
from machinery_py.testing.waiting import wait_until

HERE = Path(__file__).parent
HANG = 60.0  # seconds


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with what pip notes of this package, from its pyproject.toml."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    entry_points = project["entry-points"]["machinery_py.stores"].items()
    folder = tmp_path / "machinery_sqs_store-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {project['name']}\nVersion: 1.0\n")
    lines = ["[machinery_py.stores]", *(f"{scheme} = {target}" for scheme, target in entry_points)]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def server(
    endpoint: str, empty_table: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    monkeypatch.syspath_prepend(installed)
    prefix = f"t{secrets.token_hex(4)}-"
    server = Server(
        Config(
            broker=f"sqs://eu-west-1/{prefix}",
            result_backend=f"dynamodb://eu-west-1/{empty_table}",
            stores={"sqs": {"endpoint": endpoint}, "dynamodb": {"endpoint": endpoint}},
            lease=3.0,
        )
    )
    yield server
    server.close()


def test_chain_and_chord_run_to_their_ends(server: Server) -> None:
    @server.task
    def add(a: int, b: int) -> int:
        return a + b

    @server.task
    def total(values: list[int]) -> int:
        return sum(values)

    with server.new_worker(concurrency=2):
        chained = (add.signature(1, 2) | add.partial(3)).send()
        members = group(add.signature(1, 1), add.signature(2, 2))
        whole = server.send_chord(chord(members, total.partial(), collect=True))
        assert chained.get(timeout=HANG) == 6
        assert server.result(whole.uuid).get(timeout=HANG) == 6


def test_failed_task_with_gos_flag_is_in_the_dead_letter_queue(server: Server) -> None:
    @server.task
    def fail() -> None:
        raise ValueError("away")

    with server.new_worker(concurrency=1):
        result = server.send_task(fail.signature().replace(stop_task_deletion_on_error=True))
        with pytest.raises(TaskFailed, match="away"):
            result.get(timeout=HANG)
        wait_until(server.inspect.dead, what="a dead letter")

    [letter] = server.inspect.dead()
    assert (letter.reason, letter.uuid, letter.name) == ("failed", result.uuid, "fail")
    assert [line.dead for line in server.inspect.queues()] == [1]


WORKER = """
import json, os, sys, time
from machinery_py import Config, Server

server = Server(Config(**json.loads(sys.argv[1])))

@server.task
def slow():
    print("begun", flush=True)
    time.sleep(600)

server.new_worker("doomed", concurrency=1).launch()
"""


def test_task_of_a_killed_worker_runs_again(server: Server, endpoint: str, installed: Path) -> None:
    @server.task
    def slow() -> str:
        return "run again"

    config: dict[str, Any] = {
        name: getattr(server.config, name) for name in ("broker", "result_backend", "lease")
    }
    config["stores"] = {scheme: {"endpoint": endpoint} for scheme in ("sqs", "dynamodb")}
    result = slow.send()
    doomed = subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(config)],
        env={**os.environ, "PYTHONPATH": f"{installed}:{HERE}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert doomed.stdout is not None
        assert doomed.stdout.readline() == "begun\n"
    finally:
        doomed.kill()
        doomed.communicate()

    with server.new_worker(concurrency=1):
        assert result.get(timeout=HANG) == "run again"
    assert result.get_state().state is State.SUCCESS
