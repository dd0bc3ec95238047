"""Lines of the log for each task: their texts, levels, fields, and where they go."""

from __future__ import annotations

import datetime as dt
import io
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from machinery_py import (
    Config,
    RetryTaskLater,
    Server,
    Signature,
    State,
    TaskFailed,
    current_task,
)
from machinery_py.brokers.base import Delivery
from machinery_py.cli.logs import (
    JSONFormatter,
    LinesHandler,
    TaskRecord,
    TextFormatter,
    configure_short,
)
from machinery_py.clock import UTC, SystemClock
from machinery_py.receipts import NO_RECEIPT
from machinery_py.tasks.signature import HEADER_EXPIRES
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.loops import task_log
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.hooks import WorkerHooks

LENGTH = r"(\d+ ms|\d+\.\d s)"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("memory://")
    yield server
    server.close()


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Records of the tasks, from INFO on."""
    caplog.set_level("INFO", task_log.NAME)
    return caplog


def run_all(server: Server) -> None:
    server.new_worker("w", concurrency=1, burst=True).launch(signals=False)


def texts(records: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [
        (one.levelname, re.sub(r"task_[0-9a-f-]{36}", "UUID", one.getMessage()))
        for one in records.records
        if one.name == task_log.NAME
    ]


def _return() -> int:
    return 1


def _raise() -> None:
    raise ConnectionError("refused")


def _later() -> None:
    raise RetryTaskLater("busy", delay=3600.0)


def _hang() -> None:
    while True:
        time.sleep(0.005)


STARTED = ("INFO", rf"task t UUID started \(attempt 1, waited {LENGTH}\)")


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        (_return, {}, [STARTED, ("INFO", f"task t UUID succeeded in {LENGTH}")]),
        (
            _raise,
            {"retries": 8, "backoff": [4.1]},
            [
                STARTED,
                (
                    "WARNING",
                    r"task t UUID failed \(try 1 of 9\), again in 4.1 s: ConnectionError: refused",
                ),
            ],
        ),
        (
            _raise,
            {"retries": None, "backoff": [4.1]},
            [STARTED, ("WARNING", r"task t UUID failed \(try 1\), again in 4.1 s: Connection.*")],
        ),
        (_later, {}, [STARTED, ("WARNING", "task t UUID postponed, again in 1 h: busy .*")]),
        (
            _raise,
            {},
            [
                STARTED,
                ("ERROR", "task t UUID failed for good after 1 try: ConnectionError: refused"),
            ],
        ),
        (
            _raise,
            {"on_failure": "dead_letter"},
            [STARTED, ("ERROR", "task t UUID failed .* refused; its message is a dead letter")],
        ),
        (
            _hang,
            {"time_limit": 0.02},
            [
                STARTED,
                (
                    "ERROR",
                    "task t UUID failed for good after 1 try: "
                    "TimeLimitExceeded: ran longer than its time limit of 0.02 s",
                ),
            ],
        ),
    ],
)
def test_a_task_has_these_lines(
    server: Server,
    records: pytest.LogCaptureFixture,
    function: Any,
    options: Any,
    expected: list[tuple[str, str]],
) -> None:
    server.task("t", **options)(function).send()

    run_all(server)

    found = texts(records)
    assert len(found) == len(expected), found
    for (level, text), (wanted, pattern) in zip(found, expected, strict=True):
        assert level == wanted
        assert re.fullmatch(pattern, text), text


def test_task_that_never_ran_failed_without_a_try(
    server: Server, records: pytest.LogCaptureFixture
) -> None:
    server.task("t")(_return)
    server.send_task(Signature(name="t", headers={HEADER_EXPIRES: "1"}))

    run_all(server)

    expired = "task t UUID failed for good: Expired: expired before it was started"
    assert texts(records) == [("WARNING", expired)]


@pytest.mark.parametrize(("level", "lines"), [("INFO", 2), ("WARNING", 0)])
def test_revoked_task_has_a_line_at_info_alone(
    server: Server, records: pytest.LogCaptureFixture, level: str, lines: int
) -> None:
    records.set_level(level, task_log.NAME)
    records.handler.setLevel(0)

    @server.task
    def t() -> None:
        result = server.result(current_task().uuid)
        wait_until(lambda: result.get_state().state is State.STARTED, what="its state")
        result.revoke()
        wait_until(lambda: current_task().cancelled, what="the revocation")
        raise RetryTaskLater("busy", delay=3600.0)

    t.send()
    run_all(server)

    assert len(texts(records)) == lines


def test_record_has_the_facts_and_the_exception(
    server: Server, records: pytest.LogCaptureFixture
) -> None:
    result = server.task("t", queue="machinery_tasks")(_raise).send()

    run_all(server)

    error = [one for one in records.records if one.name == task_log.NAME][-1]
    fields = vars(error)
    assert {name: fields[name] for name in ("task_uuid", "task_name", "attempt", "queue")} == {
        "task_uuid": result.uuid,
        "task_name": "t",
        "attempt": 1,
        "queue": "machinery_tasks",
    }
    assert fields["worker"] == "w"
    assert 0 < fields["runtime"] < HANG
    assert error.exc_info is not None
    assert error.exc_info[0] is ConnectionError
    assert error.exc_info[2] is not None


def test_long_task_has_its_line_while_it_runs(
    server: Server, records: pytest.LogCaptureFixture
) -> None:
    gate: list[int] = []

    @server.task
    def t() -> None:
        wait_until(lambda: bool(gate), HANG)

    with server.new_worker(concurrency=1):
        result = t.send()
        wait_until(lambda: len(texts(records)) == 1, HANG, what="the line of its start")
        gate.append(1)
        result.get(timeout=HANG)

    assert [text.split()[3] for _, text in texts(records)] == ["started", "succeeded"]


@pytest.mark.parametrize(
    ("sent", "eta", "wait"),
    [(None, None, None), (10, None, 90.0), (10, 40, 60.0), (40, 10, 90.0), (None, 40, 60.0)],
)
def test_wait_counts_from_its_eta_or_from_sending(
    server: Server, sent: int | None, eta: int | None, wait: float | None
) -> None:
    def at(second: int | None) -> dt.datetime | None:
        return None if second is None else dt.datetime.fromtimestamp(second, UTC)

    delivery = Delivery(body=b"", queue="q", receipt=NO_RECEIPT, sent_at=at(sent))
    signature = Signature(name="t", eta=at(eta))
    execution = Execution(server.app, WorkerHooks(), delivery, "w", signature)

    assert execution.waited(dt.datetime.fromtimestamp(100, UTC)) == wait


class SlowStart(SystemClock):
    """A clock that tells the moment of a start only when the run's first mark is committed."""

    def __init__(self, is_marked: Callable[[], bool]) -> None:
        self._is_marked = is_marked

    def now(self) -> dt.datetime:
        if sys._getframe(1).f_code.co_name == "_has_started":
            wait_until(self._is_marked, HANG, what="the mark")
        return super().now()


def test_run_that_is_about_to_start_has_no_line_yet(records: pytest.LogCaptureFixture) -> None:
    server = Server("memory://", clock=SlowStart(lambda: result.get_state().state != "PENDING"))
    result = server.task("t")(_return).send()

    with server.new_worker(concurrency=1):
        assert result.get(timeout=HANG) == 1

    assert [text.split()[3] for _, text in texts(records)] == ["started", "succeeded"]


def test_without_log_tasks_only_final_failures_have_lines(
    records: pytest.LogCaptureFixture,
) -> None:
    server = Server(Config(broker="memory://", log_tasks=False))
    server.task("good")(_return).send()
    server.task("again", retries=1, backoff=[3600.0])(_raise).send()
    server.task("bad")(_raise).send()

    run_all(server)

    assert [(level, text.split()[1]) for level, text in texts(records)] == [("ERROR", "bad")]
    server.close()


def test_error_handler_replaces_the_line_of_a_failure(
    server: Server, records: pytest.LogCaptureFixture
) -> None:
    told: list[Exception] = []
    bad = server.task("bad")(_raise)
    worker = server.new_worker(concurrency=1)
    worker.set_error_handler(told.append)

    with worker, pytest.raises(TaskFailed):
        bad.send().get(timeout=HANG)

    assert len(told) == 1
    assert [level for level, _ in texts(records)] == ["INFO"]


# The handler of the command line


@pytest.mark.parametrize("formatter", [TextFormatter(colours=False), JSONFormatter()])
def test_lines_are_written_as_records_would_be(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    records: pytest.LogCaptureFixture,
    formatter: Any,
) -> None:
    monkeypatch.setattr(logging, "_logRecordFactory", TaskRecord)
    lines: list[task_log.TaskLine] = []
    monkeypatch.setattr(task_log, "write", lines.extend)
    server.task("t")(_return).send()
    server.task("t")(_return).send()
    records.set_level("INFO", task_log.NAME)
    run_all(server)
    assert len(lines) == 4
    # Most milliseconds are no binary fraction: 0.346 is a little less.
    lines += [replace(lines[0], at=1_800_000_000 + number / 1000) for number in range(1000)]
    out = io.StringIO()
    handler = LinesHandler(out)
    handler.setFormatter(formatter)

    handler.write_lines(lines)
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)

    quick, out = out.getvalue(), io.StringIO()
    handler.setStream(out)
    for line in lines:
        handler.handle(line.record())
    if isinstance(formatter, JSONFormatter):
        assert [json.loads(one) for one in quick.split("\n")[:-1]] == [
            json.loads(one) for one in out.getvalue().split("\n")[:-1]
        ]
    else:
        assert quick == out.getvalue()


def test_handler_that_wants_errors_alone_writes_nothing_of_successes(server: Server) -> None:
    out = io.StringIO()
    handler = LinesHandler(out)
    handler.setFormatter(TextFormatter(colours=False))
    handler.setLevel("ERROR")
    logger = logging.getLogger(task_log.NAME)
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel("INFO")
    try:
        server.task("t")(_return).send()
        run_all(server)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)

    assert out.getvalue() == ""


def test_block_of_a_pipe_has_whole_lines_only(server: Server) -> None:
    writes: list[str] = []

    class Pipe(io.StringIO):
        def write(self, text: str, /) -> int:
            writes.append(text)
            return len(text)

    handler = LinesHandler(Pipe())
    handler.setFormatter(TextFormatter(colours=False))
    logger = logging.getLogger(task_log.NAME)
    logger.addHandler(handler)
    level, logger.propagate = logger.level, False
    logger.setLevel("INFO")
    try:
        task = server.task("t")(_return)
        for _ in range(200):
            task.send()
        run_all(server)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True

    assert sum(text.count("\n") for text in writes) == 400
    assert all(text.endswith("\n") and len(text) <= 4_096 for text in writes)
    assert len(writes) < 200


def test_handler_that_fails_ends_nothing(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = LinesHandler(io.StringIO())
    handler.setFormatter(TextFormatter(colours=False))
    handler.stream.close()
    logger = logging.getLogger(task_log.NAME)
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        result = server.task("t")(_return).send()
        run_all(server)
    finally:
        logger.removeHandler(handler)
        logger.setLevel("NOTSET")

    assert result.touch() == 1
    assert "Logging error" in capsys.readouterr().err


def test_worker_of_an_app_in_a_short_command_has_lines(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `machinery tasks APP`, if APP runs a worker when it is imported."""
    root, level = logging.getLogger(), logging.getLogger().level
    before = list(root.handlers)
    configure_short()
    try:
        server.task("fails")(_raise).send()
        run_all(server)
    finally:
        root.handlers[:] = before
        root.setLevel(level)

    [line] = [line for line in capsys.readouterr().err.splitlines() if "task fails" in line]
    assert line.startswith("machinery: task fails task_")


@pytest.mark.parametrize("where", ["filter", "emit", "factory"])
def test_filter_or_handler_of_the_user_that_raises_ends_nothing(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    def fail(*_: object) -> bool:
        raise RuntimeError("no log today")

    def make(*args: Any) -> logging.LogRecord:
        return logging.LogRecord(*args) if args[0] != task_log.NAME else fail()  # type: ignore[return-value]

    factory = logging.getLogRecordFactory()
    handler = logging.StreamHandler(io.StringIO())
    if where == "filter":
        handler.addFilter(fail)
    elif where == "factory":
        logging.setLogRecordFactory(make)
    else:
        handler.emit = fail  # type: ignore[assignment, method-assign]
    logger = logging.getLogger(task_log.NAME)
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        results = [server.task(name)(_return).send() for name in ("t", "u")]
        run_all(server)
    finally:
        logging.setLogRecordFactory(factory)
        logger.removeHandler(handler)
        logger.setLevel("NOTSET")

    assert [result.touch() for result in results] == [1, 1]
    assert "no log today" in capsys.readouterr().err + caplog.text


def test_error_that_is_no_utf8_can_be_written(
    server: Server, records: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("a lone surrogate: \ud800")

    server.task("t")(fail).send()

    run_all(server)

    [record] = [one for one in records.records if one.exc_info]
    for formatter in (logging.Formatter(), TextFormatter(colours=False), JSONFormatter()):
        assert "a lone surrogate: ?" in formatter.format(record).encode().decode()
