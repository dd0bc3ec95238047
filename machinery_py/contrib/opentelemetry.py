"""Traces and metrics through the OpenTelemetry API; docs/how-to/tracing.md.

    send <queue>       PRODUCER   one for each sending, also of a group; current while it is made
    process <queue>    CONSUMER   one for each run, in the process that runs it; current meanwhile

The parent of a run is the context in its message's headers: of its sending, or of the run whose
callback it is. A retry has the parent of the first try, and links to the tries before. Names are
those of the messaging conventions (in development there).

Nothing that a sampler, processor or propagator raises reaches a task or a sender.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from machinery_py.errors import Ignore, Reject, Retry, RetryTaskLater, Suspended, TimeLimitExceeded
from machinery_py.registry.hooks import NothingSent
from machinery_py.server import Server
from machinery_py.tasks.context import RUNNING, Context, current_task
from machinery_py.tasks.signature import HEADER_SCHEDULE, HEADER_TRIES, Signature
from machinery_py.texts import get_logger
from machinery_py.version import __version__
from machinery_py.worker.running.hooks import text_of, type_name_of

try:
    from opentelemetry import context, metrics, propagate, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as _error:
    raise ImportError(
        "machinery_py.contrib.opentelemetry needs opentelemetry-api: "
        "pip install 'machinery_py[otel]'"
    ) from _error

logger = get_logger(__name__)

MOST_TRIES = 10  # that a retry has links to, the last ones
MOST_LABELS = 1_000  # kinds of sendings and runs whose attributes are kept
SYSTEMS = {"amqp": "rabbitmq"}  # where the conventions have another word than we
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)  # theirs

_RAN = "opentelemetry"  # in Context.handed_on: the run has a span of its own
_W3C = TraceContextTextMapPropagator()


def instrument(
    server: Server,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
    *,
    span_names: Literal["queue", "task"] = "queue",
) -> None:
    """Make spans and metrics of all that this Server sends and runs. Call it once.

    Call it in the module of the Server, so that workers and task processes do, too.

    Args:
        tracer_provider, meter_provider: by default the global ones, also if these are set later.
        span_names: what stands behind "send" and "process": the queue, as the conventions say, or
            the name of the task.
    """
    made = _Instruments(
        server,
        trace.get_tracer("machinery_py", __version__, tracer_provider),
        metrics.get_meter("machinery_py", __version__, meter_provider),
        by_task=span_names == "task",
    )
    server.around_send(made.send)
    server.around_task(made.process)
    server.on_retry(made.note_end)
    server.on_failure(made.note_end)


@dataclass(slots=True)
class _Operation:
    """A span that has begun, and what is measured with it. Ended once, by any thread."""

    span: trace.Span
    labels: Mapping[str, str]
    duration: metrics.Histogram
    began: float = field(default_factory=time.perf_counter)

    def end(self, error: BaseException | None) -> None:
        try:
            if error is not None:
                self._fail(error)
            self.span.end()
            self.duration.record(time.perf_counter() - self.began, self.labels)
        except Exception:  # of a processor
            logger.warning("a span could not be ended", exc_info=True)

    def _fail(self, error: BaseException) -> None:
        kind = str(getattr(error, "error_type", "")) or type_name_of(error)
        self.labels = {**self.labels, "error.type": kind}
        if self.span.is_recording():
            self.span.set_attribute("error.type", kind)
            self.span.set_status(trace.Status(trace.StatusCode.ERROR, text_of(error)))
            self.span.record_exception(error)


class _Instruments:
    """The handlers of one Server."""

    def __init__(
        self, server: Server, tracer: trace.Tracer, meter: metrics.Meter, *, by_task: bool
    ) -> None:
        self._server = server
        self._tracer = tracer
        self._by_task = by_task
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}")
        self._consumed = meter.create_counter("messaging.client.consumed.messages", "{message}")
        self._sending, self._processing = (
            meter.create_histogram(name, "s", explicit_bucket_boundaries_advisory=BUCKETS)
            for name in ("messaging.client.operation.duration", "messaging.process.duration")
        )
        self._labels = functools.lru_cache(MOST_LABELS)(self._new_labels)
        # Runs that go on, by UUID and fence. A run that is stuck beyond its time limit is ended by
        # `note_end`, and `process` finds it gone.
        self._open: dict[tuple[str, int], _Operation] = {}

    # Sending

    def send(self, signatures: Sequence[Signature[Any]]) -> Iterator[Mapping[str, str]]:
        """Make a span around a sending, and give its context to each message."""
        headers: dict[str, str] = {}
        operation, token = None, None
        try:
            parent = _context_of_sender()
            operation = self._begin_send(signatures, parent)
            token = context.attach(trace.set_span_in_context(operation.span, parent))
            propagate.inject(headers)
        except Exception:  # of a sampler, processor or propagator
            logger.warning("a sending is not traced", exc_info=True)
        failure: BaseException | None = None
        try:
            yield headers
        except NothingSent:  # a span that is not ended is not exported
            operation = None
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            if token is not None:
                context.detach(token)
            if operation is not None:
                operation.end(failure)

    def _begin_send(
        self, signatures: Sequence[Signature[Any]], parent: context.Context | None
    ) -> _Operation:
        default, first = self._server.config.default_queue, signatures[0]
        kinds = Counter([(one.routing_key or default, one.name) for one in signatures])
        for (queue, name), count in kinds.items():
            self._sent.add(count, self._labels("send", queue, name))
        queues, names = zip(*kinds, strict=True)
        labels = self._labels(
            "send",
            queues[0] if len(set(queues)) == 1 else "",
            names[0] if len(set(names)) == 1 else "",
        )
        attributes: dict[str, str | int] = {
            "messaging.message.id": first.uuid if len(signatures) == 1 else "",
            "messaging.message.conversation_id": first.group_uuid,
            "machinery.schedule.name": _text(first.headers.get(HEADER_SCHEDULE)),
        }
        if len(signatures) > 1:
            attributes["messaging.batch.message_count"] = len(signatures)
        span = self._span("send", trace.SpanKind.PRODUCER, labels, attributes, parent)
        return _Operation(span, labels, self._sending)

    # Running

    def process(self, _: Signature[Any]) -> Iterator[None]:
        """Make a span around a run, and hand its context on to what follows."""
        ctx = current_task()
        run = ctx.uuid, ctx.fence
        token = None
        try:
            parent = _context_of(ctx.headers)
            operation = self._begin_process(ctx, parent)
            self._open[run] = operation
            token = context.attach(trace.set_span_in_context(operation.span, parent))
            ctx.hand_on(_handed_on(ctx, operation.span))
        except Exception:
            logger.warning("task %s is not traced", ctx.uuid, exc_info=True)
        failure: BaseException | None = None
        try:
            yield
        except GeneratorExit:  # a coroutine that is given up, in another context than it ran in
            token = None
            raise
        except BaseException as error:
            failure = _failure(ctx, error)
            raise
        finally:
            if token is not None:
                context.detach(token)
            if (mine := self._open.pop(run, None)) is not None:
                mine.end(failure)

    def note_end(self, ctx: Context, error: BaseException) -> None:
        """End the span of a run that is stuck, and make one for a task that failed without a run.

        That was refused, expired or revoked, or its process was lost with its span.
        """
        operation = self._open.pop((ctx.uuid, ctx.fence), None)
        if operation is None and _RAN in ctx.handed_on:
            return
        if operation is None:
            operation = self._begin_process(ctx, _context_of(ctx.headers))
        operation.end(error)

    def _begin_process(self, ctx: Context, parent: context.Context) -> _Operation:
        labels = self._labels("process", ctx.queue, ctx.name)
        self._consumed.add(1, labels)
        attributes: dict[str, str | int] = {
            "messaging.message.id": ctx.uuid,
            "messaging.message.conversation_id": ctx.signature.group_uuid,
            "messaging.client.id": ctx.worker,
            "machinery.task.attempt": ctx.attempt,
            "machinery.schedule.name": _text(ctx.headers.get(HEADER_SCHEDULE)),
        }
        links = [trace.Link(one) for one in map(_span_context, _tries(ctx)) if one.is_valid]
        span = self._span("process", trace.SpanKind.CONSUMER, labels, attributes, parent, links)
        return _Operation(span, labels, self._processing)

    # Names

    def _new_labels(self, operation: str, queue: str, name: str) -> Mapping[str, str]:
        """Return the attributes that spans and metrics have in common."""
        system = self._server.broker.features.name
        labels = {
            "messaging.system": SYSTEMS.get(system, system),
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
            "messaging.destination.name": queue,
            "machinery.task.name": name,
        }
        return {key: value for key, value in labels.items() if value}

    def _span(
        self,
        operation: str,
        kind: trace.SpanKind,
        labels: Mapping[str, str],
        attributes: Mapping[str, str | int],
        parent: context.Context | None = None,
        links: Sequence[trace.Link] = (),
    ) -> trace.Span:
        key = "machinery.task.name" if self._by_task else "messaging.destination.name"
        given = {key: value for key, value in attributes.items() if value != ""}
        return self._tracer.start_span(
            f"{operation} {labels.get(key, '')}".rstrip(),
            parent,
            kind,
            {**labels, **given},
            links,
        )


def _context_of(headers: Mapping[str, Any]) -> context.Context:
    """Return the context in a message's headers, which may be anything."""
    return propagate.extract({key: one for key, one in headers.items() if isinstance(one, str)})


def _context_of_sender() -> context.Context | None:
    """Return the context of an ended task in whose handler this is; None: the current one."""
    task = RUNNING.get()
    if task is None or trace.get_current_span() is not trace.INVALID_SPAN:
        return None
    return _context_of({**task.headers, **task.handed_on})


def _handed_on(ctx: Context, span: trace.Span) -> Mapping[str, str]:
    headers = {_RAN: "yes"}
    propagate.inject(headers)
    own = span.get_span_context()
    if own.is_valid:
        this = f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"
        headers[HEADER_TRIES] = " ".join([*_tries(ctx)[1 - MOST_TRIES :], this])
    return headers


def _tries(ctx: Context) -> list[str]:
    return _text(ctx.headers.get(HEADER_TRIES)).split()[-MOST_TRIES:]


def _span_context(traceparent: str) -> trace.SpanContext:
    found = _W3C.extract({"traceparent": traceparent}, context.Context())
    return trace.get_current_span(found).get_span_context()


def _text(value: object) -> str:
    """Return a header that should be a text; "" if it is none."""
    return value if isinstance(value, str) else ""


def _failure(ctx: Context, error: BaseException) -> BaseException | None:
    """Return what has failed the try; None if it only asked to be run later, or ignored."""
    if isinstance(error, (RetryTaskLater, Ignore, Suspended)):
        return None
    if isinstance(error, Reject) and error.requeue:
        return None
    if isinstance(error, Retry):
        return error.__cause__ or error
    if type(error).__name__ == "CancelledError":
        try:
            ctx.check_time()
        except TimeLimitExceeded as late:
            return late
    return error
