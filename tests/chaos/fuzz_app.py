"""The tasks of a fuzz run, and its ledger: word, tab and UUID for each task that has ended."""

from __future__ import annotations

import os

from machinery_py import Config, Server
from machinery_py.events import TaskEvent, TaskFailed, TaskRetried, TaskSucceeded

LEDGER = os.environ.get("FUZZ_LEDGER", "")
LIMIT = 2**20  # bytes of a message
WORDS: dict[type[TaskEvent], str] = {
    TaskSucceeded: "SUCCESS",
    TaskFailed: "FAILURE",
    TaskRetried: "RETRY",
}
FUZZED = ("take", "strict", "verbose")  # the tasks that fuzzed messages name


def config_of(url: str) -> Config:
    """`url`: of the broker, and of the backend behind a space if that is another."""
    broker, _, backend = url.partition(" ")
    return Config(
        broker=broker, result_backend=backend, max_message_size=LIMIT, unregistered_timeout=0.0
    )


server = Server(config_of(os.environ.get("FUZZ_URL", "memory://")))
_ledger = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if LEDGER else -1


def _ended(event: TaskEvent) -> None:
    if _ledger >= 0 and event.signature.name in FUZZED:
        os.write(_ledger, f"{WORDS[type(event)]}\t{event.signature.uuid[:100]!a}\n".encode())


for kind in WORDS:
    server.events.subscribe(kind, _ended)


@server.task
def canary(number: int) -> int:
    return number


@server.task
def take(*values: object) -> int:
    return len(values)


@server.task
def strict(number: int, names: list[str], *, flag: bool = False) -> int:
    return number


@server.task
def verbose(*values: object) -> None:
    raise ValueError("é" * 100_000)


@server.task
def told(*values: object) -> None:
    """The callback."""
