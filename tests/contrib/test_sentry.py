"""Events and check-ins over real workers, with a transport in memory."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.integrations.logging import EventHandler
from sentry_sdk.transport import Transport

from machinery_py import Context, Retry, RetryTaskLater, Server, Signature, current_task
from machinery_py.contrib.sentry import install
from machinery_py.testing.waiting import HANG, wait_until
from tests.contrib import pooled


class Events(Transport):
    """Keeps what is sent to Sentry."""

    def __init__(self) -> None:
        super().__init__({"dsn": "http://key@localhost/1"})
        self.all: list[dict[str, Any]] = []

    def capture_envelope(self, envelope: Any) -> None:
        self.all += [item.payload.json for item in envelope.items]

    @property
    def failures(self) -> list[dict[str, Any]]:
        return [one for one in self.all if "exception" in one or "logentry" in one]

    @property
    def check_ins(self) -> list[dict[str, Any]]:
        return [one for one in self.all if one.get("type") == "check_in"]


@pytest.fixture
def events() -> Iterator[Events]:
    events = Events()
    sentry_sdk.init("http://key@localhost/1", transport=events, release="1")  # does not ask git
    yield events
    sentry_sdk.get_global_scope().set_client(None)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("memory://")
    yield server
    server.close()


def crash(word: str) -> None:
    """Leave a breadcrumb, and raise."""
    sentry_sdk.set_tag("own", word[-1])
    sentry_sdk.add_breadcrumb(message=f"before {word[-1]}")
    raise ValueError("crashed")


def note(word: str) -> None:
    """Raise inside of this library, which has the argument in its variables."""
    current_task().note(fact={word: object()})


def run(server: Server, *signatures: Signature[Any], concurrency: int = 4) -> None:
    """Run them all in a worker, until their handlers have been called."""
    for signature in signatures:
        server.app.submit([signature.with_uuid()])
    server.new_worker(concurrency=concurrency, burst=True).launch(signals=False)


def test_failure_is_one_event_with_its_task(events: Events, server: Server) -> None:
    """Also with a handler of Sentry's on our loggers."""
    install(server)
    server.register_task("crash", crash)
    handler = EventHandler(level=logging.ERROR)
    logging.getLogger("machinery_py").addHandler(handler)
    try:
        run(server, Signature.of("crash", "geheim-7"))
    finally:
        logging.getLogger("machinery_py").removeHandler(handler)

    [event] = events.failures
    [exception] = event["exception"]["values"]
    frames = exception["stacktrace"]["frames"]
    assert (exception["type"], exception["value"]) == ("ValueError", "crashed")
    assert [frame["function"] for frame in frames] == ["crash"]
    assert event["transaction"] == "crash"
    assert event["tags"] == {
        "machinery.task": "crash",
        "machinery.queue": "machinery_tasks",
        "own": "7",
    }
    assert event["contexts"]["machinery"]["attempt"] == 1


@pytest.mark.parametrize("function", [crash, note])
def test_event_has_arguments_only_in_variables_of_the_task(
    events: Events, server: Server, function: Callable[[str], None]
) -> None:
    install(server)
    server.register_task("task", function)

    run(server, Signature.of("task", "geheim-7"))

    [event] = events.failures
    own = event["exception"]["values"][-1]["stacktrace"]["frames"][0]
    assert own["function"] == function.__name__
    assert "geheim" in json.dumps(own.pop("vars"))  # see Sentry's include_local_variables
    assert "geheim" not in json.dumps(event)


def test_process_without_sentry_leaves_the_report_to_its_worker(server: Server) -> None:
    install(server)
    server.register_task("crash", crash)
    handed_on: list[object] = []
    server.on_failure(lambda ctx, _: handed_on.append(dict(ctx.handed_on)))

    run(server, Signature.of("crash", "1"))

    assert handed_on == [{}]


def test_run_has_nothing_of_the_one_before_it(events: Events, server: Server) -> None:
    install(server)
    server.register_task("crash", crash)

    sentry_sdk.add_breadcrumb(message="of the program")
    run(server, Signature.of("crash", "1"), Signature.of("crash", "2"), concurrency=1)

    left = [[one["message"] for one in event["breadcrumbs"]["values"]] for event in events.failures]
    assert left == [["before 1"], ["before 2"]]


def test_arguments_are_in_the_event_if_they_are_asked_for(events: Events, server: Server) -> None:
    install(server, arguments=True)
    server.register_task("crash", crash)

    run(server, Signature.of("crash", "x" * 1_000))

    [event] = events.failures
    [argument] = event["contexts"]["machinery"]["arguments"]
    assert argument.startswith("'xxx")
    assert len(argument) < 50


def flaky() -> None:
    """Fail at each try, in another way."""
    errors: list[Exception] = [RetryTaskLater("later", delay=0), OSError("away"), Retry("wrong")]
    if current_task().signature.run < 2:
        raise errors[current_task().signature.run]
    try:
        raise KeyError("cause")
    except KeyError as error:
        raise errors[2] from error


@pytest.mark.parametrize("retries", [False, True])
def test_tries_before_the_last_are_reported_only_if_asked_for(
    events: Events, server: Server, retries: bool
) -> None:
    install(server, retries=retries)
    server.task("flaky", retries=1, backoff=[0])(flaky)

    run(server, Signature.of("flaky").replace(retry_count=1))

    seen = [(one["level"], one["exception"]["values"][-1]["type"]) for one in events.failures]
    assert seen == [*([("warning", "OSError")] if retries else []), ("error", "KeyError")]


def test_what_never_raised_is_reported_by_the_worker(events: Events, server: Server) -> None:
    """Also a thread that is stuck beyond its time limit; but nothing that was meant to end."""
    install(server)
    go = threading.Event()

    def stuck() -> None:
        sentry_sdk.add_breadcrumb(message="inside")
        go.wait(HANG)

    def busy() -> None:
        while True:
            threading.Event().wait(0.001)

    server.task("stuck", time_limit=0.05)(stuck)
    server.task("busy", time_limit=0.05)(busy)
    server.register_task("crash", crash)
    expired = server.get_registered_task("crash").options(expires=-1.0).signature("x")

    with server.new_worker(concurrency=4):
        for one in (Signature.of("stuck"), Signature.of("busy"), Signature.of("crash"), expired):
            server.app.submit([one.with_uuid()])
        wait_until(lambda: len(events.failures) == 3)
        go.set()
    found = {event["transaction"]: event for event in events.failures}

    assert len(events.failures) == 3
    assert found["stuck"]["fingerprint"] == ["stuck", "TimeLimitExceeded"]
    assert [one["message"] for one in found["stuck"]["breadcrumbs"]["values"]] == ["inside"]
    assert found["busy"]["exception"]["values"][-1]["type"] == "TimeLimitExceeded"
    assert found["crash"]["exception"]["values"] == [
        {**found["crash"]["exception"]["values"][0], "type": "ArgumentError"}
    ]


def test_run_that_a_stopping_worker_hands_back_is_no_failure(
    events: Events, server: Server
) -> None:
    install(server)
    threads: list[threading.Thread] = []

    def obey(ctx: Context) -> None:
        threads.append(threading.current_thread())
        while not ctx.cancelled:
            threading.Event().wait(0.001)
        raise RuntimeError("asked to stop")

    server.register_task("obey", obey)
    with server.new_worker(concurrency=1, shutdown_timeout=0.05):
        server.send(Signature.of("obey"))
        wait_until(lambda: threads)
    threads[0].join(HANG)

    assert server.broker.get_pending_tasks()
    assert not events.failures


def test_tasks_at_the_same_time_have_scopes_of_their_own(events: Events, server: Server) -> None:
    install(server)
    barrier = threading.Barrier(3)

    def meet(secret: str) -> None:
        sentry_sdk.add_breadcrumb(message=f"first {secret}")
        barrier.wait(HANG)
        crash(secret)

    async def meet_async(secret: str) -> None:
        sentry_sdk.add_breadcrumb(message=f"first {secret}")
        if secret == "2":
            await asyncio.to_thread(barrier.wait, HANG)
        else:
            await asyncio.sleep(0.01)
        crash(secret)

    server.register_task("meet", meet)
    server.register_task("meet_async", meet_async)
    names = ["meet", "meet", "meet_async", "meet_async"]
    run(server, *[Signature.of(name, str(number)) for number, name in enumerate(names)])

    for event in events.failures:
        own = event["tags"]["own"]
        messages = [one["message"] for one in event["breadcrumbs"]["values"]]
        assert messages == [f"first {own}", f"before {own}"]
    assert sorted(event["tags"]["own"] for event in events.failures) == ["0", "1", "2", "3"]


SPECS: dict[str, dict[str, Any] | None] = {
    "0 6 * * MON-FRI": {"schedule": {"type": "crontab", "value": "0 6 * * MON-FRI"}},
    "TZ=Europe/Berlin @daily": {
        "schedule": {"type": "crontab", "value": "@daily"},
        "timezone": "Europe/Berlin",
    },
    "@every 5m": {"schedule": {"type": "interval", "value": 5, "unit": "minute"}},
    "@every 90s": None,
    "*/10 * * * * *": None,
    "H 6 * * *": None,
}


@pytest.mark.parametrize("spec", SPECS)
def test_schedules_check_in(events: Events, server: Server, spec: str) -> None:
    install(server, check_ins=True)

    def flaky_once() -> None:
        if current_task().attempt == 1:
            raise OSError("away")

    good_task = server.task("good", retries=1, backoff=[0])(flaky_once)
    server.register_task("crash", crash)
    server.register_periodic_task(spec, "Nightly good!", good_task.signature())
    server.register_periodic_task("@hourly", "bad", Signature.of("crash", "x"))

    for name in ("Nightly good!", "bad"):
        server.schedules.run_now(name)
        run(server)
    run(server, Signature.of("good"))

    good = [one for one in events.check_ins if one["monitor_slug"] == "nightly-good-"]
    bad = [one for one in events.check_ins if one["monitor_slug"] == "bad"]
    assert [one["status"] for one in good][-1] == "ok"
    assert {one["status"] for one in good[:-1]} == {"in_progress"}
    assert [one["status"] for one in bad] == ["in_progress", "error"]
    assert (
        len({one["check_in_id"] for one in good}) == len({one["check_in_id"] for one in bad}) == 1
    )
    config = SPECS[spec]
    assert good[0].get("monitor_config") == (config and {"timezone": "UTC", **config})
    assert len(events.check_ins) == len(good) + len(bad)


def test_events_of_task_processes_have_their_stack(
    events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(pooled.FOLDER, str(tmp_path))

    with pooled.server.new_worker(concurrency=2):
        pooled.crash.send("geheim")
        pooled.lost.send()
        wait_until(lambda: events.failures)
        pooled.after.send(1).get(timeout=HANG)

    [event] = map(json.loads, (tmp_path / "events").read_text().splitlines())
    [exception] = event["exception"]["values"]
    assert [frame["function"] for frame in exception["stacktrace"]["frames"]] == ["crash"]
    assert len(event["breadcrumbs"]["values"]) == 1
    [lost] = events.failures
    assert lost["fingerprint"] == ["lost", "WorkerLost"]
