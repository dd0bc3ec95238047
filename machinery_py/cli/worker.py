"""`machinery worker`: one worker, from its signals to its exit code."""

from __future__ import annotations

import argparse
import faulthandler
import os
import socket
import textwrap
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from machinery_py.cli import health, logs, orphans, reload
from machinery_py.cli.output import READY, clean, many, say, shown_url
from machinery_py.cli.processes import STACKS, STOP_NOW, Orders, ParentLink, label_of
from machinery_py.cli.watchdog import BROKEN, Watchdog, copy_of_stderr
from machinery_py.clock import boottime
from machinery_py.connections.streams import drop_unread
from machinery_py.errors import BackendUnavailable, BrokerUnavailable, ConfigError, MachineryError
from machinery_py.texts import get_logger
from machinery_py.version import __version__

if TYPE_CHECKING:
    from machinery_py.server import Server
    from machinery_py.worker.worker import Worker

logger = get_logger(__name__)

EMBEDDED = "   (embedded: one machine; set MACHINERY_URL for a server)"
WIDTH = 100  # columns of the banner
INDENT = 11  # columns in front of its values


def worker(args: argparse.Namespace) -> int:
    """Run `machinery worker`."""
    drop_unread()
    logs.configure(args.log_level or "", args.log_format)
    link = ParentLink(args.child)
    try:
        if args.parts:
            return _show_parts(args, link)
        if not link.is_child and os.name == "posix":
            from machinery_py.cli.supervisor import Supervisor

            return Supervisor(args, Orders(link)).run()
        if not link.is_child and (args.processes > 1 or args.reload):
            raise ConfigError("--processes and --reload are not possible on Windows")
        return _work(args, link)
    except KeyboardInterrupt:  # asked to stop before there was anything to stop
        return 0


def _work(args: argparse.Namespace, link: ParentLink) -> int:
    orders = Orders(link)
    orphans.hold_lifeline()
    stderr = copy_of_stderr()
    if link.is_child:
        faulthandler.register(STACKS, link.stacks)
    report = reload.FileReport(link.tell).send if args.reload else lambda: None
    try:
        # Loads the library; a signal may interrupt that from here on.
        from machinery_py.cli import apps
        from machinery_py.worker.control import signs

        server = apps.load(args.app, args.app_dir)
    finally:
        report()  # also the files of an app that is broken
    _apply_options(server, args)
    one = _new_worker(server, args, link)
    if not args.no_banner:
        say(args, banner(server, one, args.processes))
    place = health.place_of(args)
    if not link.is_child:
        health.clear(place)
    watchdog = Watchdog(stderr, one.blame)
    one.on_failure = watchdog.check

    def is_ready() -> bool:
        # Where a store hangs, beats stay away without an error; they come each quarter of a lease.
        return one.ready and boottime() - one.beat_at <= one.app.config.lease

    def give_sign(line: str) -> bool:
        watchdog.check()
        drop_unread()
        link.tell(f"answering {is_ready():d}", can_be_dropped=True)
        report()
        return not link.is_child or link.tell(line, can_be_dropped=True)

    signs.use(give_sign)
    with ExitStack() as stack:
        stack.callback(orphans.end_below, orphans.below())
        label = label_of(args, link.label)
        stack.enter_context(health.Pulse(place, label=label, worker=one.name, is_ready=is_ready))
        if args.health_port is not None:
            from machinery_py.cli import http, metrics  # only who asks for a port pays

            metrics.install(server)
            if not link.is_child:
                pages = http.Pages(is_ready, metrics.own_page)
                address = args.health_host, args.health_port
                stack.enter_context(http.serve(pages, *address, option="--health-port"))
        orders.grace = f" (at most {one.shutdown_timeout:g} s; once more to stop now)"
        orders.follow(
            lambda level: one.abort() if level == STOP_NOW else one.quit(),
            lambda: _read_again_soon(server, one),
        )
        try:
            code = _launch(args, link, one)
        finally:
            link.tell("worn" if one.is_worn else "over")
    server.close()
    return code


def _show_parts(args: argparse.Namespace, link: ParentLink) -> int:
    from machinery_py.cli import apps  # loads the library
    from machinery_py.worker.parts import drawn

    say(args, drawn(_new_worker(apps.load(args.app, args.app_dir), args, link).parts()))
    return 0


def _apply_options(server: Server, args: argparse.Namespace) -> None:
    """Put options in the place of the app's settings, also for `read_again`."""
    options = {
        "concurrency": args.concurrency,
        "events": args.events or None,
        "log_level": args.log_level,
        "log_tasks": False if args.no_log_tasks else None,
    }
    chosen: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    server.app.config = server.config.replace(**chosen)
    if server.config.log_level:  # else as it is: the app may have set one
        logs.set_level(server.config.log_level)
    if args.events:
        server.events.enable()


def _read_again_soon(server: Server, one: Worker) -> None:
    """Do it in a thread of its own: the order to stop must not wait for the end of a claim."""
    try:
        threading.Thread(target=_read_again, args=(server, one), daemon=True).start()
    except RuntimeError as error:  # no more threads; nor must it go unheard
        logger.error("the settings cannot be read again: %s", error)


def _read_again(server: Server, one: Worker) -> None:
    """Let the worker go on with the settings as they are now."""
    from machinery_py.config.live import LIVE, read_again  # for SIGHUP only

    try:
        before, after = server.config, read_again(server.config)
        changed = [key for key in LIVE if getattr(after, key) != getattr(before, key)]
        shown = ", ".join(f"{key} = {getattr(after, key)!r}" for key in changed) or "none"
        logger.info("settings that have changed: %s (of %s)", shown, ", ".join(LIVE))
        if "log_level" in changed:
            logs.set_level(after.log_level)
        if "events" in changed:
            (server.events.enable if after.events else server.events.disable)()
        if "concurrency" in changed and one.autoscale is None:
            one.resize(after.concurrency)
        server.app.config = after  # last: what has failed is tried again with the next SIGHUP
    except Exception as error:  # a file that cannot be read, a claim that does not end
        logger.error("not all settings could be read again: %s", error)


def _new_worker(server: Server, args: argparse.Namespace, link: ParentLink) -> Worker:
    from machinery_py.worker.processes.frames import Setup  # loads the library, as `_work` does

    label = label_of(args, link.label)
    name = args.name and (f"{args.name}-{label}" if label else args.name)
    one = server.new_worker(
        name or f"{socket.gethostname()}-{os.getpid()}",
        queues=args.queues,
        burst=args.burst,
        shutdown_timeout=args.shutdown_timeout,
        scheduler=not args.no_scheduler,
        autoscale=args.autoscale,
        pool=args.pool or "",
        max_tasks_per_child=args.max_tasks_per_child or 0,
        max_memory_per_child=args.max_memory_per_child or 0,
    )
    one.on_retire = lambda: link.tell("retired")
    folder = os.path.abspath(args.app_dir or ".")
    one.child_app = lambda: Setup(
        app=args.app,
        folder=folder,
        log_level=server.config.log_level or "info",
        log_format=args.log_format,
        counts=args.health_port is not None,
    )
    return one


def _launch(args: argparse.Namespace, link: ParentLink, one: Worker) -> int:
    from machinery_py.events import WorkerOnline  # not for the supervisor, which is to be small

    has_started = False

    def on_online(_: WorkerOnline) -> None:
        # Before its first claim: what it claims may end the process.
        nonlocal has_started
        end()  # once; where nobody listens, no event is made
        has_started = True
        stall_timeout = args.stall_timeout or one.app.config.stall_timeout
        link.tell(f"ready {one.shutdown_timeout} {stall_timeout}")
        if not args.no_banner:
            _warn_of_unserved(one, args)
        if not args.no_banner and not link.is_child:
            say(args, READY)

    end = one.app.events.subscribe(WorkerOnline, on_online)
    try:
        return one.launch(signals=False)
    except MachineryError as error:
        if not has_started or isinstance(error, (BrokerUnavailable, BackendUnavailable)):
            raise  # it could not even start, or gave up waiting for its store: 2 or 3, see main
        logger.error("%s", error)
        return BROKEN


def _warn_of_unserved(one: Worker, args: argparse.Namespace) -> None:
    """Warn of queues that registered tasks are sent to and no living worker serves."""
    from machinery_py.inspection import typed  # not for the supervisor

    app = one.app
    tasks: dict[str, list[str]] = {}
    for task in app.registry:
        queue = task.settings.queue or app.config.default_queue
        tasks.setdefault(queue, []).append(task.name)
    if not tasks.keys() - set(one.queues):
        return
    try:
        served = {queue for worker in app.store.broker.workers() for queue in worker.queues}
    except MachineryError as error:
        logger.debug("the other workers are not known: %s", error)
        return
    for queue in sorted(tasks.keys() - served - set(one.queues)):
        names = ", ".join(map(clean, sorted(tasks[queue])))
        logger.warning(
            "no worker runs on queue %r now, and tasks are sent to it: %s (start one: %s)",
            *(queue, names, typed(app, "worker", f"-Q {queue}", module=args.app)),
        )


# The banner


def banner(server: Server, one: Worker, processes: int) -> str:
    """Describe the worker: name, stores, queues, tasks."""
    config = server.config
    words = ("thread",) if one.pool == "thread" else ("task process", "task processes")
    much = many(one.concurrency, *words)
    if one.autoscale is not None:
        much = f"{one.autoscale[0]:,} to {many(one.autoscale[1], *words)}"
    if processes > 1:
        much = f"{many(processes, 'process', 'processes')} of {much}"
    broker = shown_url(config.broker, config.multiple_broker_separator)
    rows = [("broker", [broker + (EMBEDDED if server.broker.features.embedded else "")])]
    if config.backend_url != config.broker:
        rows.append(("results", [shown_url(config.backend_url, config.multiple_broker_separator)]))
    names = _wrapped(server.get_registered_task_names())
    rows.append(("queue" if len(one.queues) == 1 else "queues", _wrapped(one.order.shown())))
    rows.append(("tasks", names or ["none (is their module imported?)"]))
    lines = [f"machinery {__version__} · worker {clean(one.name)} · {much}"]
    for name, values in rows:
        for at, value in enumerate(values):
            lines.append(f"  {'' if at else name:<{INDENT - 2}}{value}")
    return "\n".join(lines)


def _wrapped(names: Sequence[str]) -> list[str]:
    text = ", ".join(clean(name) for name in names)
    return textwrap.wrap(text, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False)
