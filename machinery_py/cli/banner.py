"""Text that `machinery worker` prints when it starts."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from machinery_py.cli.tables import clean, many
from machinery_py.config.urls import redact, split_urls
from machinery_py.texts import get_logger
from machinery_py.version import __version__

if TYPE_CHECKING:
    from machinery_py.server import Server
    from machinery_py.worker.worker import Worker

logger = get_logger(__name__)

READY = "Ready. Ctrl+C stops when the running tasks are done."
EMBEDDED = "   (embedded: one machine; set MACHINERY_URL for a server)"
WIDTH = 100  # columns
INDENT = 11  # columns in front of the values


def banner(server: Server, worker: Worker, processes: int) -> str:
    """Describe the worker: name, stores, queues, tasks."""
    config = server.config
    threads = many(worker.concurrency, "thread")
    much = threads if processes == 1 else f"{many(processes, 'process', 'processes')} of {threads}"
    broker = shown_url(config.broker, config.multiple_broker_separator)
    rows = [("broker", [broker + (EMBEDDED if server.broker.features.embedded else "")])]
    if config.backend_url != config.broker:
        rows.append(("results", [shown_url(config.backend_url, config.multiple_broker_separator)]))
    rows.append(("queue" if len(worker.queues) == 1 else "queues", _wrapped(worker.order.shown())))
    rows.append(
        (
            "tasks",
            _wrapped(server.get_registered_task_names()) or ["none (is their module imported?)"],
        )
    )
    lines = [f"machinery {__version__} · worker {clean(worker.name)} · {much}"]
    for name, values in rows:
        labels = [name, *[""] * (len(values) - 1)]
        lines += [
            f"  {label:<{INDENT - 2}}{value}" for label, value in zip(labels, values, strict=True)
        ]
    return "\n".join(lines)


def shown_url(url: str, separator: str) -> str:
    """One or several URLs, without their secrets."""
    return clean(separator.join(map(redact, split_urls(url, separator))))


def _wrapped(names: Sequence[str]) -> list[str]:
    text = ", ".join(clean(name) for name in names)
    return textwrap.wrap(text, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False)


def say(args: argparse.Namespace, text: str) -> None:
    """Print it at once; with JSON logs it is a record, so that programs find nothing else."""
    if args.log_format == "json":
        logger.info("%s", "; ".join(" ".join(line.split()) for line in text.splitlines()))
    else:
        print(text, flush=True)
