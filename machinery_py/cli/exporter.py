"""`machinery exporter`: metrics of the stores, and with --events of the stream, for Prometheus."""

from __future__ import annotations

import argparse
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from machinery_py.cli import logs, metrics
from machinery_py.cli.http import Pages, serve
from machinery_py.cli.processes import until_stopped
from machinery_py.connections.streams import announce
from machinery_py.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from machinery_py.server import Server


def exporter(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery exporter` until SIGTERM or Ctrl+C."""
    try:
        from prometheus_client import CollectorRegistry

        from machinery_py.contrib.exporter import StoreCollector
    except ImportError as error:
        raise ConfigError(
            "machinery exporter needs prometheus-client: pip install 'machinery_py[metrics]'"
        ) from error
    logs.configure("", "text")
    registry, stores = CollectorRegistry(), StoreCollector(server)
    registry.register(stores)
    with until_stopped(), ExitStack() as stack:
        if args.events:
            _follow(server, registry, stack)
        pages = Pages(
            lambda: stores.is_up, lambda accepted: metrics.page(lambda: registry, accepted)
        )
        address = stack.enter_context(serve(pages, args.host, args.port))
        announce(f"Metrics of {args.app}: {address}metrics  Ctrl+C stops.")
        threading.Event().wait()
    server.close()
    return 0


def _follow(server: Server, registry: CollectorRegistry, stack: ExitStack) -> None:
    from machinery_py.contrib.prometheus import TaskMetrics

    counts, stream = TaskMetrics(registry), server.events.stream()

    def work() -> None:
        for event in stream:
            counts.count(event)

    thread = threading.Thread(target=work, name="machinery-exporter-events", daemon=True)
    thread.start()
    stack.callback(thread.join, 5.0)
    stack.callback(stream.close)
