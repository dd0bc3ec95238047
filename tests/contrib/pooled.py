"""An app whose tasks run in processes, for the tests of spans.

Each process appends its spans to the file `spans` in the folder CONTRIB_FOLDER.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from machinery_py import Server
from machinery_py.contrib import opentelemetry

FOLDER = "CONTRIB_FOLDER"


def append(name: str, line: str) -> None:
    with (Path(os.environ[FOLDER]) / name).open("a") as file:
        file.write(f"{line}\n")


class ToFile(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            append("spans", span.to_json(indent=None))
        return SpanExportResult.SUCCESS


provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ToFile()))

server = Server("memory://")
opentelemetry.instrument(server, provider)


@server.task(pool="process", retries=1, backoff=[0])
def flaky() -> int:
    """Fail at the first try."""
    trace = Path(os.environ[FOLDER]) / "tried"
    if not trace.exists():
        trace.touch()
        raise ConnectionError("away")
    return os.getpid()


@server.task(pool="process", on_worker_lost="fail")
def lost() -> None:
    os._exit(3)


@server.task
def after(pid: int) -> int:
    return pid
