"""Commands as a person types them, and what to type when nobody serves a queue."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator

from machinery_py.app import Application
from machinery_py.brokers.base import WorkerInfo
from machinery_py.errors import MachineryError

PAUSED, NO_WORKER = "paused", "no worker"


def problems(
    app: Application, queue: str, paused: Collection[str], workers: Iterable[WorkerInfo]
) -> Iterator[tuple[str, str, str]]:
    """Yield why nobody takes from a queue: a word for it, a text, and what to type."""
    if queue in paused:
        yield PAUSED, f"{queue!r} is paused", f"resume it: {typed(app, 'resume', queue)}"
    if not any(queue in one.queues for one in workers):
        other = "" if queue == app.config.default_queue else f"-Q {queue}"
        yield NO_WORKER, f"no worker on {queue!r}", f"start one: {typed(app, 'worker', other)}"


def worker_hint(app: Application, queue: str) -> tuple[str, str]:
    """Return why nobody runs the tasks of a queue, and what to type; empty if somebody does."""
    queue = queue or app.config.default_queue
    broker = app.store.broker
    try:
        found = next(problems(app, queue, broker.paused(), broker.workers()), ("", "", ""))
    except MachineryError:
        return "", ""
    return found[1:]


def typed(app: Application, command: str, words: str = "", *, module: str = "") -> str:
    """Return a command for this app as a person types it.

    Args:
        module: how the person named the app, if that is known.
    """
    start = app.program or "machinery"
    named = "" if app.program else module or _module(app)
    return " ".join(filter(None, (start, command, named, words)))


def _module(app: Application) -> str:
    """Return the application as the command line names it."""
    unknown = "<your module>"
    module = next((task.__module__ for task in app.registry), unknown)
    if module == "__main__":
        path = getattr(sys.modules["__main__"], "__file__", unknown)
        module = path.rpartition("/")[2].removesuffix(".py")
    return module
