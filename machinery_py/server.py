"""Server: the face of the library. It opens nothing and starts no thread before that is needed."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, Unpack, cast

from machinery_py.app import Application
from machinery_py.async_twins import twin
from machinery_py.backends.base import Backend
from machinery_py.brokers.base import Broker
from machinery_py.call_threads import in_thread
from machinery_py.clock import SYSTEM_CLOCK, Clock, Seconds
from machinery_py.config.config import Config, resolve
from machinery_py.control.client import Control
from machinery_py.dashboard.dashboard import Dashboard
from machinery_py.dashboard.fleet import Fleet
from machinery_py.errors import ConfigError
from machinery_py.inspection import Inspector, worker_hint
from machinery_py.inspection.limits import change_limit, limiter_of
from machinery_py.limits.limiter import Limiter
from machinery_py.limits.settings import LimiterOptions
from machinery_py.locks.base import Lock
from machinery_py.locks.named import NamedLock
from machinery_py.queues import Queues
from machinery_py.registry.calls import needs_check
from machinery_py.registry.options import TaskOptions
from machinery_py.registry.task import PeriodicDecorator, Task, is_unique
from machinery_py.registry.task_set import TaskRegistrar, TaskSet
from machinery_py.results.async_results import AsyncResult, Waitable
from machinery_py.results.waiter import AsyncWaiters
from machinery_py.results.workflow_results import (
    ChainResult,
    ChordResult,
    GroupResult,
    group_result,
    result_of,
)
from machinery_py.revocation import revoke
from machinery_py.schedules.api import PeriodicOptions, Schedules, definition_of
from machinery_py.schedules.scheduler import Declared
from machinery_py.signals import signal
from machinery_py.stores.open import split_config, url_of
from machinery_py.tasks.reasons import Why
from machinery_py.tasks.signature import Chain, Signature, Step
from machinery_py.tasks.states import GroupMeta, State
from machinery_py.tasks.workflow import Group, chain, chord, group
from machinery_py.transactions import Block, current, entered
from machinery_py.unique import send_unique
from machinery_py.usage_warnings import UsageWarnings
from machinery_py.wire.long_chains import link_any
from machinery_py.worker.loops.chords import settle_ready_groups
from machinery_py.workflows.workflow import Workflow, find_workflow

if TYPE_CHECKING:
    from machinery_py.worker.inline import Inline
    from machinery_py.worker.worker import Worker

P = ParamSpec("P")
R = TypeVar("R")


class Server(TaskRegistrar):
    """One application: its tasks, and the stores that they go through. May be used from any thread.

    Args:
        config: a URL that is broker, result backend and lock at once, or a Config. By default the
            variables MACHINERY_*, then the file that MACHINERY_CONFIG names, then the embedded
            `sqlite:///machinery.db`.
        broker, result_backend, lock: one URL each, in place of that of `config`; or a ready-made
            object, which `close` closes for good.
        clock: source of the time, for tests.

    Attributes:
        inspect: queues, workers and tasks, to look at and to act on.
        schedules: schedules at run time: list, add, change, pause, remove.
        events: events of this process, and of all processes.
        control: orders to the workers of all processes.
        dashboard: the dashboard, to be mounted in a WSGI or ASGI application.
        around_send, around_task, before_task, after_task, on_success, on_retry, on_failure,
            lifespan: decorators of handlers, see `registry.hooks.Hooks`.

    Raises:
        ConfigError: a setting or URL cannot be used. Nothing is connected yet.
    """

    def __init__(
        self,
        config: Config | str | None = None,
        *,
        broker: str | Broker | None = None,
        result_backend: str | Backend | None = None,
        lock: str | Lock | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        url, given = split_config(config)
        urls = url_of(broker, "broker"), url_of(result_backend, "result backend")
        resolved = resolve(
            url, config=given, broker=urls[0], result_backend=urls[1], lock=url_of(lock, "lock")
        )
        self.app: Final = Application(resolved, clock)
        hooks = self.app.hooks
        self.around_task: Final = hooks.around_task
        self.lifespan: Final = hooks.lifespan
        self.around_send: Final = hooks.around_send
        self.before_task: Final = hooks.before_task
        self.after_task: Final = hooks.after_task
        self.on_success: Final = hooks.on_success
        self.on_retry: Final = hooks.on_retry
        self.on_failure: Final = hooks.on_failure
        self.worker_part: Final = hooks.worker_part
        self.events: Final = self.app.events
        limit = functools.partial(change_limit, self.app)
        self.control: Final = Control(lambda: self.broker, self.app.lamport, self.revoke, limit)
        self.inspect: Final = Inspector(self.app, settle_ready_groups, self.control.workers)
        self.declared: Final = Declared()
        self.schedules: Final = Schedules(self.app, self.declared)
        self.dashboard: Final = Dashboard(
            Fleet(self.app, self.inspect, self.schedules, self.control)
        )
        self._waiters: AsyncWaiters | None = None
        self._usage = UsageWarnings()
        self._inline: Inline | None = None
        self._inline_lock = threading.Lock()
        self.app.attach(self._drain)

    def __repr__(self) -> str:
        urls = self.config.redacted()
        shown = [
            f"{key}={urls[key]!r}"
            for key in ("broker", "result_backend", "lock")
            if key == "broker" or urls[key] not in ("", urls["broker"])
        ]
        return f"<Server {' '.join(shown)}, {len(self.get_registered_task_names())} tasks>"

    # What it consists of

    @property
    def config(self) -> Config:
        return self.app.config

    @property
    def broker(self) -> Broker:
        return self.app.store.broker

    @property
    def backend(self) -> Backend:
        return self.app.store.backend

    @property
    def clock(self) -> Clock:
        return self.app.clock

    def now(self) -> dt.datetime:
        """Return the moment by the store's clock, from which an `eta` is best counted."""
        return self.app.moment()

    def close(self) -> None:
        """Give the stores' connections back. May be called twice; the next use opens them again."""
        waiters, self._waiters = self._waiters, None
        if waiters is not None:
            waiters.close()
        self.events.close()
        self.app.close()

    close_async: Final = twin(close, goes_on=True)

    # Registering

    def _register(
        self, name: str, function: Callable[..., Any], options: TaskOptions
    ) -> Task[..., Any]:
        return self.app.registry.register(name, function, options, self)

    def include(
        self, task_set: TaskSet, *, prefix: str = "", **defaults: Unpack[TaskOptions]
    ) -> None:
        """Register the tasks of a TaskSet, also those that it gets later.

        They are sent through this Server from now on.

        Args:
            prefix: in front of the names of the tasks: `prefix="mail."`.
            defaults: options in place of those of the TaskSet; a task's own win. See TaskOptions.

        Raises:
            TaskAlreadyRegistered, TypeError, ValueError, NameRefused: as `task`.
        """
        task_set.included(self._register, prefix, defaults)

    def register_task(self, name: str, function: Callable[P, R]) -> Task[P, R]:
        """Register a function that you cannot or will not decorate.

        Raises:
            TaskAlreadyRegistered: the name belongs to another function.
        """
        return cast("Task[P, R]", self._register(name, function, {}))

    def register_tasks(self, tasks: Mapping[str, Callable[..., Any]]) -> None:
        """Register several functions under their names."""
        for name, function in tasks.items():
            self.register_task(name, function)

    def get_registered_task_names(self) -> list[str]:
        return self.app.registry.names()

    def is_task_registered(self, name: str) -> bool:
        return self.app.registry.find(name) is not None

    def get_registered_task(self, name: str) -> Task[..., Any]:
        """Return the task.

        Raises:
            TaskNotRegistered: there is none of that name.
        """
        return self.app.registry.get(name)

    def set_pre_publish_handler(
        self, handler: Callable[[Signature[Any]], Signature[Any] | None]
    ) -> Callable[[Signature[Any]], Signature[Any] | None]:
        """Set what looks at each signature before it is published; it may return another one.

        Callbacks, retries and group members pass it too (Go's SetPreTaskHandler leaves these out).
        In it `current_task()` is the task that sends: the one that runs, or has just ended. There
        is none outside of tasks, and for a chord's callback.
        """
        self.app.pre_publish = handler
        return handler

    # Sending

    def send_task(self, signature: Signature[R]) -> AsyncResult[R]:
        """Publish one call.

        Raises:
            ArgumentError: something in it cannot be sent, or its worker would refuse it.
            Unsupported: the result backend cannot keep its result for as long as it says.
            DuplicateTask: it is unique with on_duplicate="reject", and another call holds its key.
            PublishRefused (BrokerUnavailable): nothing was stored.
            PublishUnknown: it may have been stored.
        """
        self._note_loop()
        groups: Sequence[GroupMeta] = ()
        if needs_check(signature):
            signature, groups = self.app.registry.linked(signature, self.now())
        signature = signature.with_uuid()
        task = self.app.registry.find(signature.name)
        uuid, duplicate = signature.uuid, False
        if is_unique(task, signature):
            uuid, duplicate = send_unique(self.app, task, signature, groups)
        else:
            self.app.submit((signature,), groups)
        queue = signature.routing_key or self.config.default_queue
        result: AsyncResult[R] = AsyncResult(
            self, uuid, name=signature.name, queue=queue, duplicate=duplicate
        )
        return result.just_sent()

    send_task_async: Final = twin(send_task)

    def send_once(self, signature: Signature[R]) -> AsyncResult[R]:
        """Publish a call that has a UUID, unless that is a repeat. Raises as `send_task`.

        A repeat is known for 10 minutes, and as soon as a worker has had the first. Until then its
        PENDING state says nothing: between two stores it may be there without a message.
        """
        uuid, state = signature.uuid, None
        if needs_check(signature):
            signature, groups = self.app.registry.linked(signature, self.now())
        else:
            groups = ()
        if self.backend.features.keeps:
            state = self.app.patiently(lambda: self.backend.get_states([uuid])).get(uuid)
        if state is None or state.state is State.PENDING:
            self.app.submit((signature,), groups, token=uuid)
        queue = signature.routing_key or self.config.default_queue
        return AsyncResult(self, uuid, name=signature.name, queue=queue)

    send_once_async: Final = twin(send_once)

    def send_chain(self, chain: Chain[R]) -> ChainResult[R]:
        """Publish the first step; each step's worker publishes the next. Raises as `send_task`."""
        return self._send_workflow(chain)

    send_chain_async: Final = twin(send_chain)

    def send_group(self, group: Group[R], send_concurrency: int = 0) -> GroupResult[R]:
        """Publish all members in one batch. Raises as `send_task`.

        Args:
            send_concurrency: Go's; not needed here.
        """
        del send_concurrency
        return cast("GroupResult[R]", self._send_workflow(Chain((group,))).steps[0])

    send_group_async: Final = twin(send_group)

    def send_chord(self, chord: Chain[R], send_concurrency: int = 0) -> ChordResult[R]:
        """Publish a group, and its callback when all have succeeded; else as `send_group`."""
        del send_concurrency
        return cast("ChordResult[R]", self._send_workflow(chord))

    send_chord_async: Final = twin(send_chord)

    def send(self, step: Step[Any]) -> Any:
        """Publish a signature, chain, group or chord."""
        if isinstance(step, Signature):
            return self.send_task(step)
        if isinstance(step, Group):
            return self.send_group(step)
        return self.send_chain(cast("Chain[Any]", step))

    async def send_async(self, step: Step[Any]) -> Any:
        """`send` for coroutines."""
        return await in_thread(functools.partial(self.send, step))

    def _send_workflow(self, chain: Chain[R]) -> ChainResult[R]:
        self._note_loop()
        queue, keeps = self.config.default_queue, self.backend.features.keeps
        plan = link_any(chain, now=self.now(), are_kept=keeps, queue=queue)
        self.app.registry.check(plan.first)
        if any(step.is_group for step in plan.steps[:-1]):
            self._usage.sent_chord(self.backend.features)
        self.app.submit(plan.first, plan.groups, plan.awaited)
        return result_of(plan, self, queue)

    @contextlib.contextmanager
    def transaction(self, connection: object = None) -> Iterator[None]:
        """Send in a transaction of yours: `with server.transaction(connection):`.

        What this thread sends in the block is there when you commit, and never if you roll back. A
        block in a block of the same connection is one with it. It neither begins nor commits.

        Args:
            connection: to the database that is broker and result backend: of psycopg 3; a Session
                or Connection of SQLAlchemy over it, of an asynchronous one in `run_sync`; by
                default Django's.

        Raises:
            ConfigError: there is no connection, and no Django.
            Unsupported: by `send`, in words, if it cannot be part of the transaction.
        """
        if connection is None:
            connection = getattr(sys.modules.get("django.db"), "connection", None)
            if connection is None:
                raise ConfigError(
                    "server.transaction(): Django is not loaded (expected a connection of psycopg "
                    "3, or of SQLAlchemy)"
                )
        block = current(self.app)
        if block is not None and block.source is connection:
            yield
            return
        with entered(Block(self.app, connection, lambda: self.app.store.within(connection))):
            yield

    def check_wait(self, result: Waitable[Any]) -> None:
        """Raise Unsupported if the result is of a transaction that is open here."""
        if (block := current(self.app)) is not None:
            block.check_wait(result._tasks())

    def _note_loop(self) -> None:
        loop = getattr(sys.modules.get("asyncio"), "_get_running_loop", None)  # as far as loaded
        if loop is not None and loop() is not None:
            self._usage.sent_in_loop()

    # Results

    def result(self, uuid: str) -> AsyncResult[Any]:
        """Return the result of a task that any process sent."""
        return AsyncResult(self, uuid)

    @property
    def kept_for(self) -> float:
        """Seconds that results are kept."""
        return float(self.config.results_expire_in)

    @property
    def waiters(self) -> AsyncWaiters:
        """Waiters of the coroutines that wait for results."""
        if self._waiters is None or not self._waiters.is_ours:
            self._waiters = AsyncWaiters(lambda: self.backend.listener())  # noqa: PLW0108
        return self._waiters

    def group_result(self, uuid: str) -> GroupResult[Any]:
        """Return the result of a group that any process sent.

        Raises:
            StateNotFound: the backend does not know the group (any more).
        """
        return group_result(self, uuid)

    group_result_async: Final = twin(group_result)

    def workflow(self, uuid: str) -> Workflow:
        """Return a workflow that any process sent, as it is now.

        Args:
            uuid: of the workflow, or of a task or group of it.

        Raises:
            StateNotFound: nothing is known of it (any more).
        """
        return find_workflow(self.app, uuid)

    workflow_async: Final = twin(workflow)

    def convert(self, name: str, value: Any) -> Any:
        """Convert a received result as the task's annotation says, if the task is known here."""
        task = self.app.registry.find(name)
        return task.call.result(value) if task is not None else value

    def worker_hint(self, queue: str) -> tuple[str, str]:
        """Return why nobody runs the tasks of a queue, and what to type; empty if somebody does."""
        return worker_hint(self.app, queue)

    def why(self, uuid: str, *, ask: bool) -> Why:
        """Return what holds a task; see `inspect.why`."""
        return self.inspect.why(uuid, ask=ask)

    def revoke(self, uuids: str | Sequence[str]) -> None:
        """Revoke one or many: those that wait fail as "revoked", running ones are asked to stop."""
        if revoke(self.app, [uuids] if isinstance(uuids, str) else list(uuids)):
            settle_ready_groups(self.app)

    revoke_async: Final = twin(revoke)

    def signal(self, uuid: str, name: str, value: Any = None, *, key: str = "") -> bool:
        """Give a task a signal, which its `Context.wait_for` returns, now or later.

        Args:
            uuid: of a task that has not ended. Whoever knows it may signal.
            value: as an argument that is sent.
            key: of two signals of a task with the same key the second is dropped: of a webhook
                that is delivered twice, of two clicks.

        Returns:
            False: it was dropped.

        Raises:
            SignalRefused: the task is not known, has ended, or has too many unread signals.
            ArgumentError: the value cannot be sent. NameRefused: the name is none.
            Unsupported: the result backend keeps no signals.
            PublishUnknown, BackendUnavailable: it may have been given; with a key it may be
                repeated.
        """
        return signal(self.app, uuid, name, value, key)

    signal_async: Final = twin(signal)

    def lock(
        self, name: str, *, timeout: Seconds | None = None, blocking: bool = True
    ) -> NamedLock:
        """Return a lock across processes: `with server.lock("feed-7"):`, or `async with`.

        It is free `lease` seconds after its holder was killed.

        Args:
            timeout: seconds (or a timedelta) to wait at most; then LockNotAcquired.
            blocking: False: do not wait at all.
        """
        outage = self.config.publish_timeout
        return NamedLock(self.app.locks, name, timeout=timeout, blocking=blocking, outage=outage)

    def limiter(
        self,
        name: str,
        rate: str = "",
        *,
        key: str = "",
        timeout: Seconds | None = None,
        **limits: Unpack[LimiterOptions],
    ) -> Limiter:
        """Return a limit across processes: `with server.limiter("smtp", "20/s"):`."""
        return limiter_of(self.app, name, {"rate": rate, **limits}, key=key, timeout=timeout)

    # Schedules

    def periodic(
        self, spec: str, *, name: str = "", **options: Unpack[PeriodicOptions]
    ) -> PeriodicDecorator:
        """Declare a schedule of a task, as a decorator above `@server.task` or a function.

        @server.periodic("0 6 * * MON-FRI", tz="Europe/Berlin")

        Args:
            spec: five cron fields, six with the seconds first, `@daily`, `@every 30s`; see
                docs/how-to/periodic.md.
            name: of the schedule; by default the task's.
            options: see PeriodicOptions.

        Raises:
            ScheduleError: the spec cannot be read or can never be due, or the name is taken.
            ArgumentError: the task cannot be called without arguments.
        """

        def decorate(function: Any) -> Any:
            task = function if isinstance(function, Task) else self.task(function)
            step = task.signature()
            self.declared.add(name or task.name, definition_of(spec, step, options))
            return task

        return decorate

    def register_periodic_task(
        self, spec: str, name: str, signature: Signature[Any], **options: Unpack[PeriodicOptions]
    ) -> None:
        """Declare a schedule that sends one task; workers send it. (Go: RegisterPeriodicTask.)

        Raises:
            ScheduleError, ArgumentError: as `periodic`.
        """
        self.declared.add(name, definition_of(spec, signature, options))

    def register_periodic_chain(
        self, spec: str, name: str, *signatures: Step[Any], **options: Unpack[PeriodicOptions]
    ) -> None:
        """Declare a schedule that sends a chain; else as `register_periodic_task`."""
        self.declared.add(name, definition_of(spec, chain(*signatures), options))

    def register_periodic_group(
        self,
        spec: str,
        name: str,
        send_concurrency: int,
        *signatures: Step[Any],
        **options: Unpack[PeriodicOptions],
    ) -> None:
        """Declare a schedule that sends a group; else as `register_periodic_task`, `send_group`."""
        del send_concurrency
        self.declared.add(name, definition_of(spec, group(*signatures), options))

    def register_periodic_chord(
        self,
        spec: str,
        name: str,
        send_concurrency: int,
        callback: Signature[Any],
        *signatures: Step[Any],
        **options: Unpack[PeriodicOptions],
    ) -> None:
        """Declare a schedule that sends a chord; else as `register_periodic_task`, `send_chord`."""
        del send_concurrency
        self.declared.add(name, definition_of(spec, chord(group(*signatures), callback), options))

    # Workers

    def new_worker(
        self,
        name: str = "",
        concurrency: int = 0,
        *,
        queues: Queues = (),
        burst: bool = False,
        shutdown_timeout: Seconds | None = None,
        scheduler: bool = True,
        pool: str = "",
        max_tasks_per_child: int = 0,
        max_memory_per_child: int = 0,
        autoscale: tuple[int, int] | None = None,
    ) -> Worker:
        """Return a worker in this process, not started yet: `worker.launch()`, or `with worker:`.

        Args:
            name: of the worker; by default host and process.
            concurrency: tasks at a time; 0 is two for each processor.
            queues: names in strict order, or a mapping of names to weights; by default those of
                the configuration.
            burst: end when there is nothing left to do.
            shutdown_timeout: seconds (or a timedelta) that running tasks get at the end.
            scheduler: whether it sends what is due by a schedule; a burst worker never does.
            pool: "thread" or "process", for tasks that do not say; by default the setting `pool`.
            max_tasks_per_child: runs after which a task process is renewed; 0: any number. After
                about as many runs in threads the worker itself ends in order.
            max_memory_per_child: bytes in memory after which it is renewed, or ends; 0: any.
            autoscale: in place of `concurrency`, the least and the most tasks at a time.
        """
        from machinery_py.worker.processes.frames import (
            setup_of,  # a program that only sends needs neither
        )
        from machinery_py.worker.worker import Worker

        return Worker(
            self.app,
            name,
            concurrency=concurrency,
            queues=queues,
            burst=burst,
            shutdown_timeout=shutdown_timeout,
            pool=pool,
            max_tasks_per_child=max_tasks_per_child,
            max_memory_per_child=max_memory_per_child,
            autoscale=autoscale,
            child_app=lambda: setup_of(self),
            declared=self.declared if scheduler and not burst else None,
        )

    def new_custom_queue_worker(self, name: str, concurrency: int, queue: str) -> Worker:
        """Return a worker on one other queue; Go's name."""
        return self.new_worker(name, concurrency, queues=(queue,))

    def _drain(self) -> None:
        """Run what the eager store was given, in this thread."""
        with self._inline_lock:
            if self._inline is None:
                from machinery_py.worker.inline import Inline

                self._inline = Inline(self.app, name="eager")
        self._inline.drain()
