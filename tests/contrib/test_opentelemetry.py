"""Spans and metrics over real workers, with the SDK's exporters in memory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from machinery_py import (
    Context,
    Retry,
    RetryTaskLater,
    Server,
    Signature,
    TaskFailed,
    chain,
    chord,
    current_task,
    group,
)
from machinery_py.brokers.base import Message
from machinery_py.contrib.opentelemetry import instrument
from machinery_py.schedules.scheduler import Scheduler
from machinery_py.stores.base import Submission
from machinery_py.tasks.signature import HEADER_TRIES
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.contrib import pooled

GO_TRACE = "0af7651916cd43dd8448eb211c80319c"
Tree = dict[str, Any]


class Traced:
    """A Server with spans, and what they were."""

    def __init__(self, url: str = "memory://", **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()
        self.provider = TracerProvider(sampler=options.pop("sampler", None))
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.server = Server(url, **options)
        instrument(self.server, self.provider, MeterProvider([self.reader]))

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    def of(self, operation: str, name: str) -> list[ReadableSpan]:
        """The spans of an operation on tasks of this name, in the order of their ends."""
        return [
            span
            for span in self.spans
            if attribute(span, "messaging.operation.name") == operation
            and attribute(span, "machinery.task.name") == name
        ]

    def tree(self) -> Tree:
        """All spans under their parents, as nested dicts; equal siblings are one."""
        found: dict[int | None, Tree] = {}
        for span in sorted(self.spans, key=lambda one: one.start_time or 0):
            name = f"{span.name.split()[0]} {attribute(span, 'machinery.task.name') or ''}".rstrip()
            siblings = found.setdefault(span.parent.span_id if span.parent else None, {})
            found[span.context.span_id] = siblings.setdefault(name, {})
        return found.get(None, {})

    def measured(self, name: str) -> dict[tuple[str, ...], float]:
        """The counts of a metric, by the task's name and what more is asked for."""
        found: dict[tuple[str, ...], float] = {}
        metrics = self.reader.get_metrics_data()
        assert metrics is not None
        for metric in metrics.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points if metric.name == name else ():
                labels = point.attributes or {}
                key = str(labels.get("machinery.task.name")), str(labels.get("error.type", ""))
                found[key] = getattr(point, "count", 0) or getattr(point, "value", 0)
        return found


def attribute(span: ReadableSpan, name: str) -> Any:
    return (span.attributes or {}).get(name)


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    yield traced
    traced.server.close()


@pytest.fixture
def work(traced: Traced) -> Iterator[None]:
    with traced.server.new_worker(concurrency=4):
        yield
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_one_trace_goes_through_all_that_follows_a_send(traced: Traced, work: None) -> None:
    server, done = traced.server, threading.Event()

    async def member(number: int) -> int:
        return await asyncio.to_thread(lambda: number)

    def fail(*_: object) -> None:
        raise ValueError("wrong")

    server.register_task("member", member)
    add = server.register_task("add", lambda *numbers: int(sum(numbers)))
    note = server.register_task("note", lambda *_: done.set())
    parent = server.register_task("parent", lambda *_: server.send(Signature.of("fail")) and None)
    server.register_task("fail", fail)
    first = add.signature(1, 2)
    members = [Signature.of("member", number) for number in (1, 2)]
    last = Signature.of("fail").catch(note.partial()).replace(immutable=True)

    with traced.provider.get_tracer("web").start_as_current_span("request"):
        server.send(chain(first, parent.partial()))
        server.send(chord(group(*members), add.partial().then(last)))
    wait_until(done.is_set)
    wait_until(lambda: len(traced.of("process", "fail")) == 2)
    wait_until(lambda: traced.of("process", "note"))

    assert len({span.context.trace_id for span in traced.spans}) == 1
    assert traced.tree() == {
        "request": {
            "send add": {
                "process add": {"process parent": {"send fail": {"process fail": {}}}},
            },
            "send member": {
                "process member": {"process add": {"process fail": {"process note": {}}}},
            },
        }
    }


def test_tries_are_siblings_that_link_to_those_before(traced: Traced, work: None) -> None:
    errors = iter([ConnectionError("1"), Retry("2", delay=0), RetryTaskLater("3", delay=0)])

    def flaky() -> int:
        for error in errors:
            raise error
        return 1

    traced.server.register_task("next", lambda _: None)
    task = traced.server.task("flaky", retries=2, backoff=[0])(flaky)
    task.signature().then(Signature.of("next")).send()
    wait_until(lambda: traced.of("process", "next"))

    tries, [sent], [following] = (
        traced.of("process", "flaky"),
        traced.of("send", "flaky"),
        traced.of("process", "next"),
    )
    assert [span.parent.span_id for span in tries if span.parent] == [sent.context.span_id] * 4
    for number, span in enumerate(tries):
        before = [one.context.span_id for one in tries[:number]]
        assert [link.context.span_id for link in span.links] == before
    assert following.parent is not None
    assert following.parent.span_id == tries[-1].context.span_id
    assert [attribute(span, "error.type") for span in tries] == [
        "ConnectionError",
        "machinery_py.errors.Retry",
        None,
        None,
    ]
    assert [attribute(span, "machinery.task.attempt") for span in tries] == [1, 2, 3, 3]


def test_task_that_a_handler_of_an_end_sends_is_below_the_run(traced: Traced, work: None) -> None:
    def told(ctx: Context, *_: object) -> None:
        if ctx.name != "told":
            traced.server.send(Signature.of("told"))

    traced.server.on_success(told)
    traced.server.on_failure(told)
    for name in ("first", "told"):
        traced.server.register_task(name, lambda: None)
    refused = Signature.of("first", "x").with_uuid()

    traced.server.send(Signature.of("first"))
    traced.server.app.submit([refused])
    wait_until(lambda: len(traced.of("process", "told")) == 2)

    below = {"send told": {"process told": {}}}
    assert traced.tree() == {"send first": {"process first": below, **below}}


@pytest.mark.parametrize("span_names", ["queue", "task"])
def test_spans_and_metrics_follow_the_conventions(span_names: Any) -> None:
    traced = Traced()
    server = Server("memory://")
    instrument(server, traced.provider, span_names=span_names)
    task = server.task("charge", queue="mail")(lambda: None)

    with server.new_worker("w", concurrency=1, queues=["mail"]):
        result = task.send()
        wait_until(lambda: len(traced.spans) == 2)
    server.close()

    what = {"queue": "mail", "task": "charge"}[span_names]
    sent, processed = sorted(traced.spans, key=lambda span: span.start_time or 0)
    common = {
        "messaging.system": "memory",
        "messaging.destination.name": "mail",
        "messaging.message.id": result.uuid,
        "machinery.task.name": "charge",
    }
    assert (sent.name, sent.kind) == (f"send {what}", trace.SpanKind.PRODUCER)
    assert sent.attributes == {
        **common,
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
    }
    assert (processed.name, processed.kind) == (f"process {what}", trace.SpanKind.CONSUMER)
    assert processed.attributes == {
        **common,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.client.id": "w",
        "machinery.task.attempt": 1,
    }


def test_group_is_sent_in_one_span(traced: Traced, work: None) -> None:
    traced.server.register_task("member", lambda: None)

    sent = traced.server.send(group(*(Signature.of("member") for _ in range(20))))
    wait_until(lambda: len(traced.of("process", "member")) == 20)

    [span] = traced.of("send", "member")
    assert attribute(span, "messaging.batch.message_count") == 20
    assert attribute(span, "messaging.message.conversation_id") == sent.uuid
    assert traced.tree() == {"send member": {"process member": {}}}
    assert traced.measured("messaging.client.sent.messages") == {("member", ""): 20}
    assert traced.measured("messaging.client.operation.duration") == {("member", ""): 1}
    wait_until(
        lambda: traced.measured("messaging.process.duration") == {("member", ""): 20},
    )
    assert traced.measured("messaging.client.consumed.messages") == {("member", ""): 20}


HOSTILE: dict[str, dict[str, Any]] = {
    "no context": {"traceparent": "00-xyz"},
    "of zeros": {"traceparent": f"00-{'0' * 32}-{'0' * 16}-01"},
    "a number": {"traceparent": 7, "tracestate": 8, "baggage": 9, HEADER_TRIES: 10},
    "lists": {"traceparent": [GO_TRACE], "baggage": [["a=b"]], HEADER_TRIES: ["x"]},
    "long": {"traceparent": "0" * 100_000, "tracestate": "a=b," * 50_000, "baggage": "=;" * 50_000},
    "tries": {HEADER_TRIES: "x 00-1 \x00 " * 10_000},
    "surrogates": {"traceparent": "\ud800", "baggage": "a=%ED%A0%80", HEADER_TRIES: "\ud800"},
}


@pytest.mark.parametrize("kind", ["of Go", *HOSTILE])
def test_context_in_a_message_of_another_program(traced: Traced, work: None, kind: str) -> None:
    good = {"traceparent": f"00-{GO_TRACE}-b7ad6b7169203331-01"}
    traced.server.register_task("add", lambda number: number)
    traced.server.register_task("next", lambda _: None)
    signature = Signature.of("add", 1).then(Signature.of("next")).with_uuid()
    body = json.loads(traced.server.app.message(traced.server.app.completed(signature)).body)
    body["Headers"] = HOSTILE.get(kind, good)
    message = Message(
        uuid=signature.uuid, name="add", queue="machinery_tasks", body=json.dumps(body).encode()
    )

    traced.server.app.store.submit(Submission(token="go", messages=[message]))
    wait_until(lambda: traced.of("process", "next"))

    assert traced.tree() == {"process add": {"process next": {}}} or kind == "of Go"
    if kind == "of Go":
        assert {format(span.context.trace_id, "032x") for span in traced.spans} == {GO_TRACE}


def test_run_beyond_its_time_limit_ends_its_span_once(traced: Traced, work: None) -> None:
    """Also that of a thread that cannot be interrupted."""
    server, go = traced.server, threading.Event()

    async def sleep() -> None:
        await asyncio.sleep(HANG)

    server.task("stuck", time_limit=0.05)(lambda: bool(go.wait(HANG)))
    server.task("asleep", time_limit=0.05)(sleep)
    for name in ("stuck", "asleep"):
        server.send(Signature.of(name))

    wait_until(lambda: traced.of("process", "stuck") and traced.of("process", "asleep"))
    go.set()
    server.register_task("meet", lambda: None)
    server.send(Signature.of("meet"))
    wait_until(lambda: traced.of("process", "meet"))

    for name in ("stuck", "asleep"):
        [span] = traced.of("process", name)
        assert attribute(span, "error.type") == "machinery_py.errors.TimeLimitExceeded"
        assert not span.status.is_ok


def test_task_that_never_ran_has_a_span_that_says_why(traced: Traced, work: None) -> None:
    traced.server.register_task("add", lambda number: number)
    refused = Signature.of("add", "a", "b").with_uuid()
    expired = traced.server.get_registered_task("add").options(expires=-1.0).signature(1)

    with traced.provider.get_tracer("web").start_as_current_span("request"):
        traced.server.app.submit([refused])
        expired.send()
    wait_until(lambda: len(traced.of("process", "add")) == 2)

    assert traced.tree() == {"request": {"send add": {"process add": {}}}}
    kinds = {attribute(span, "error.type") for span in traced.of("process", "add")}
    assert kinds == {"ArgumentError", "Expired"}


def test_no_context_is_left_behind_a_run(traced: Traced) -> None:
    left: list[object] = []
    errors = {"value": ValueError("x"), "retry": Retry("x"), "later": RetryTaskLater("x", delay=0)}

    def leak(kind: str) -> None:
        context.attach(context.set_value("leaked", kind))
        if current_task().attempt == 1 and kind in errors:
            raise errors.pop(kind)

    task = traced.server.task("leak", retries=1, backoff=[0])(leak)
    worker = traced.server.new_worker(concurrency=1)
    worker.set_post_task_handler(lambda _: left.append(trace.get_current_span()))
    with worker:
        results = [task.send(kind) for kind in ("", "value", "retry", "later")]
        for result in results:
            result.get(timeout=HANG)
        traced.server.register_task("clean", lambda: context.get_value("leaked") or "nothing")
        assert traced.server.send(Signature.of("clean")).get(timeout=HANG) == "nothing"

    assert set(left) == {trace.INVALID_SPAN}


class Broken(SpanProcessor):
    """Raises in every call."""

    def on_start(self, span: object, parent_context: object = None) -> None:
        raise OSError("no room")

    def on_end(self, span: object) -> None:
        raise OSError("no room")


def test_broken_processor_fails_no_task(traced: Traced, work: None) -> None:
    traced.provider.add_span_processor(Broken())
    task = traced.server.task("add")(lambda: 3)

    assert task.send().get(timeout=HANG) == 3
    with pytest.raises(TaskFailed):
        traced.server.send(chain(Signature.of("add"), Signature.of("add"))).get(timeout=HANG)


def test_what_is_not_sampled_is_still_propagated() -> None:
    traced = Traced(sampler=ALWAYS_OFF)
    task = traced.server.task("look")(lambda: str(current_task().headers["traceparent"]))

    with traced.server.new_worker(concurrency=1):
        parent = task.send().get(timeout=HANG)
    traced.server.close()

    assert int(parent.split("-")[3], 16) & trace.TraceFlags.SAMPLED == 0
    assert not traced.spans


def test_eager_task_is_below_its_sender() -> None:
    traced = Traced("eager")
    traced.server.register_task("after", lambda _: None)
    task = traced.server.register_task("first", lambda: 1)

    with traced.provider.get_tracer("web").start_as_current_span("request") as span:
        task.signature().then(Signature.of("after")).send()
        asyncio.run(task.send_async())
        assert trace.get_current_span() is span

    assert traced.tree() == {
        "request": {"send first": {"process first": {"process after": {}}}},
    }


def test_tick_is_one_trace_and_a_slower_scheduler_has_none() -> None:
    clock = ManualClock()
    traced = Traced(clock=clock)
    server = traced.server
    server.register_task("member", lambda: None)
    server.register_periodic_group("* * * * *", "s", 0, *[Signature.of("member")] * 2)
    slower, faster = (Scheduler(server.app, server.declared) for _ in range(2))
    slower.step()
    clock.advance(60)
    overtakes = [faster]

    @server.around_send
    def overtake(_: object) -> Iterator[None]:
        if overtakes:
            together(1, lambda _: overtakes.pop().step())  # in a thread, without our context
        yield

    slower.step()
    server.schedules.run_now("s")
    server.new_worker(concurrency=1, burst=True).launch(signals=False)

    tick, now = traced.of("send", "member")
    for span in (tick, now):
        assert attribute(span, "machinery.schedule.name") == "s"
        assert attribute(span, "messaging.batch.message_count") == 2
    parents = [span.parent.span_id for span in traced.of("process", "member") if span.parent]
    assert sorted(parents) == sorted([tick.context.span_id, now.context.span_id] * 2)


def test_spans_of_task_processes_join_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(pooled.FOLDER, str(tmp_path))
    seen = Lines(tmp_path / "spans")

    with pooled.server.new_worker(concurrency=2):
        pooled.flaky.signature().then(pooled.after.partial()).send()
        pooled.lost.send()
        wait_until(lambda: seen.of("process", "after") and seen.of("process", "lost"))

    [sent], tries, [after], [lost] = (
        seen.of("send", "flaky"),
        seen.of("process", "flaky"),
        seen.of("process", "after"),
        seen.of("process", "lost"),
    )
    assert [one["parent_id"] for one in (*tries, after)] == [
        sent["context"]["span_id"],
        sent["context"]["span_id"],
        tries[1]["context"]["span_id"],
    ]
    assert [link["context"] for link in tries[1]["links"]] == [tries[0]["context"]]
    assert lost["parent_id"] == seen.of("send", "lost")[0]["context"]["span_id"]
    assert lost["attributes"]["error.type"] == "machinery_py.errors.WorkerLost"


class Lines:
    """Spans in a file, one a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, operation: str, name: str) -> list[dict[str, Any]]:
        lines = self._path.read_text().splitlines() if self._path.exists() else ()
        return [
            span
            for span in map(json.loads, lines)
            if span["attributes"]["messaging.operation.name"] == operation
            and span["attributes"]["machinery.task.name"] == name
        ]
