"""An app whose tasks run in processes, for the tests of spans and of Sentry's events.

Each process appends what it exports to a file, `spans` or `events`, in the folder CONTRIB_FOLDER.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentry_sdk
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from sentry_sdk.transport import Transport

from machinery_py import Server
from machinery_py.contrib import opentelemetry, sentry

FOLDER = "CONTRIB_FOLDER"


def append(name: str, line: str) -> None:
    with (Path(os.environ[FOLDER]) / name).open("a") as file:
        file.write(f"{line}\n")


class ToFile(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            append("spans", span.to_json(indent=None))
        return SpanExportResult.SUCCESS


class EventsToFile(Transport):
    def capture_envelope(self, envelope: Any) -> None:
        for item in envelope.items:
            append("events", item.payload.get_bytes().decode())


provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ToFile()))

server = Server("memory://")
opentelemetry.instrument(server, provider)
if FOLDER in os.environ:  # a task process
    sentry_sdk.init("http://key@localhost/1", transport=EventsToFile)
sentry.install(server)


@server.task(pool="process", retries=1, backoff=[0])
def flaky() -> int:
    """Fail at the first try."""
    trace = Path(os.environ[FOLDER]) / "tried"
    if not trace.exists():
        trace.touch()
        raise ConnectionError("away")
    return os.getpid()


@server.task(pool="process")
def crash(secret: str) -> None:
    sentry_sdk.add_breadcrumb(message=f"in {os.getpid()}")
    raise ValueError("crashed")


@server.task(pool="process", on_worker_lost="fail")
def lost() -> None:
    os._exit(3)


@server.task
def after(pid: int) -> int:
    return pid
