"""The Server: where tasks are registered and sent from. It opens nothing and starts no thread before it is needed."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, cast, overload

from machinery_py.app import Application
from machinery_py.async_twins import twin
from machinery_py.backends.base import Backend, Listener
from machinery_py.brokers.base import Broker
from machinery_py.clock import SYSTEM_CLOCK, Clock
from machinery_py.config.config import Config, resolve
from machinery_py.errors import MachineryError
from machinery_py.events import EventBus
from machinery_py.inspection import Inspector
from machinery_py.locks.named import NamedLock
from machinery_py.queues import Queues
from machinery_py.registry.task import (
    AsyncTask,
    SamenessOptions,
    Task,
    TaskSettings,
    check_settings,
)
from machinery_py.results.async_results import AsyncResult, ChainResult, ChordResult, GroupResult
from machinery_py.results.waiter import AsyncWaiters
from machinery_py.revocation import revoke
from machinery_py.schedules.api import Schedules
from machinery_py.schedules.declared import Anything, Declaring, TaskDecorator
from machinery_py.schedules.scheduler import Declared
from machinery_py.tasks.backoff import Backoff
from machinery_py.tasks.context import Context
from machinery_py.tasks.signature import Chain, Signature, Step
from machinery_py.tasks.workflow import Group, Plan, PlannedStep, link
from machinery_py.texts import get_logger
from machinery_py.unique import is_unique, send_unique
from machinery_py.worker.chords import settle_ready_groups
from machinery_py.worker.inline import Inline
from machinery_py.worker.worker import Worker

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
AroundTask = Callable[[Signature[object]], Iterator[None]]


class Server(Declaring):
    """One application: its tasks, and the stores that they go through. May be used from any thread.

    Args:
        config: a URL that is broker, result backend and lock at once, or a Config; without it MACHINERY_* variables and
            the file that MACHINERY_CONFIG names are asked, and last the embedded default, `sqlite:///machinery.db`.
        broker, result_backend, lock: URLs, each for itself.
        clock: where the time is taken from; tests have their own.

    Raises:
        ConfigError: a setting or URL cannot be used. Nothing is connected yet.
    """

    def __init__(
        self,
        config: Config | str | None = None,
        *,
        broker: str | None = None,
        result_backend: str | None = None,
        lock: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        resolved = resolve(
            config if isinstance(config, str) else None,
            config=config if isinstance(config, Config) else None,
            broker=broker,
            result_backend=result_backend,
            lock=lock,
        )
        self.app = Application(resolved, clock)
        self.inspect = Inspector(self.app)
        self.declared = Declared()
        self.schedules = Schedules(self.app, self.declared)
        self._waiters: AsyncWaiters | None = None
        self._inline = Inline(self.app, self._all_queues, name="eager")
        self._told_loop = self._is_warned = False
        self.app.attach(self._inline.drain)

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

    @property
    def events(self) -> EventBus:
        """Events of this process, for programs."""
        return self.app.events

    def now(self) -> dt.datetime:
        return self.app.clock.now()

    def close(self) -> None:
        """Give the stores' connections back. May be called twice; the next use opens them again."""
        waiters, self._waiters = self._waiters, None
        if waiters is not None:
            waiters.close()
        self.app.close()

    close_async = twin(close)

    # Registering

    @overload
    def task(
        self, function: Callable[Concatenate[Anything, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[..., R]: ...
    @overload
    def task(self, function: Callable[Concatenate[Anything, P], R], /) -> Task[..., R]: ...
    @overload
    def task(
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        name: str | None = None,
        /,
        *,
        queue: str = "",
        retries: int = 0,
        backoff: Backoff = "fibonacci",
        retry_on: type[BaseException] | Sequence[type[BaseException]] | None = None,
        time_limit: float | None = None,
        priority: int = 0,
        ignore_result: bool = False,
        **sameness: Unpack[SamenessOptions],
    ) -> TaskDecorator: ...
    def task(
        self,
        function: Any = None,
        /,
        *,
        queue: str = "",
        retries: int = 0,
        backoff: Backoff = "fibonacci",
        retry_on: Any = None,
        time_limit: float | None = None,
        priority: int = 0,
        ignore_result: bool = False,
        **sameness: Unpack[SamenessOptions],
    ) -> Any:
        """Register a function as a task; it can still be called as before.

        Its name is the function's, unless one is given: `@server.task("billing.charge")`.

        Args:
            queue: where its calls go; by default the configured queue.
            retries: tries after the first (Go's RetryCount).
            backoff: "fibonacci" (Go's: 1, 2, 3, 5 s …), "exponential", seconds for each try, or a function of the try.
            retry_on: only these exceptions are retried; by default all but NoRetry and wrong arguments.
            time_limit: seconds one run may take.
            priority: 0 to 255, the higher first.
            ignore_result: keep no results, only the state; callbacks, the next step and a chord's callback get them all the same.
            sameness: `unique`, `exclusive` and what belongs to them; see SamenessOptions.

        Raises:
            TaskAlreadyRegistered: the name belongs to another function.
            TypeError, ValueError: an option is unknown, or has a value that is none of its.
        """
        settings = TaskSettings(
            queue=queue,
            retries=retries,
            backoff=backoff,
            time_limit=time_limit,
            priority=priority,
            retry_on=_classes(retry_on),
            ignore_result=ignore_result,
        ).with_sameness(function if isinstance(function, str) else "task", sameness)
        if callable(function):
            return self._register(None, function, settings)
        return lambda decorated: self._register(function, decorated, settings)

    def _register(
        self, name: str | None, function: Callable[..., Any], settings: TaskSettings
    ) -> Task[..., Any]:
        if isinstance(function, Task):
            function = function.function
        if not callable(function):
            raise TypeError(f"{function!r} cannot be a task: Task must be a func type")
        name = name or getattr(function, "__name__", "")
        if not name or name == "<lambda>":
            raise TypeError(
                f"{function!r} has no name of its own: server.register_task(name, function)"
            )
        check_settings(name, settings)
        task: Task[..., Any] = Task(name, function, settings, self)
        if task.call.is_async:
            task = AsyncTask(name, function, settings, self)
        self.app.registry.add(task)
        return task

    def register_task(self, name: str, function: Callable[P, R]) -> Task[P, R]:
        """Register a function that you cannot or will not decorate.

        Raises:
            TaskAlreadyRegistered: the name belongs to another function.
        """
        return cast("Task[P, R]", self._register(name, function, TaskSettings()))

    def register_tasks(self, tasks: Mapping[str, Callable[..., Any]]) -> None:
        """Register several functions under their names."""
        for name, function in tasks.items():
            self.register_task(name, function)

    def get_registered_task_names(self) -> list[str]:
        return self.app.registry.names()

    def is_task_registered(self, name: str) -> bool:
        return self.app.registry.find(name) is not None

    def get_registered_task(self, name: str) -> Task[..., Any]:
        """The task.

        Raises:
            TaskNotRegistered: there is none of that name.
        """
        return self.app.registry.get(name)

    def set_pre_publish_handler(
        self, handler: Callable[[Signature[Any]], Signature[Any] | None]
    ) -> Callable[[Signature[Any]], Signature[Any] | None]:
        """Look at each signature before it is published, also callbacks and retries; return another one to change it.

        `current_task()` gives the task that sends it: the one that runs, or has ended. There is none outside of tasks, and at a
        chord's callback. Go calls this SetPreTaskHandler, and leaves out group members; here they pass, too.
        """
        self.app.pre_publish = handler
        return handler

    def around_task(self, function: AroundTask) -> AroundTask:
        """Run each task, in the worker, between the halves of this generator function."""
        self.app.around.append(function)
        return function

    # Sending

    def send_task(self, signature: Signature[R]) -> AsyncResult[R]:
        """Publish one call.

        Raises:
            ArgumentError: something in it cannot be sent, or its worker would refuse it.
            DuplicateTask: it is unique with on_duplicate="reject", and another call holds its key.
            PublishRefused (BrokerUnavailable): nothing was stored.
            PublishUnknown: it may have been stored.
        """
        self._note_loop()
        self.app.registry.check((signature,))
        signature = signature.with_uuid()
        task, uuid, duplicate = self.app.registry.find(signature.name), signature.uuid, False
        if is_unique(task, signature):
            uuid, duplicate = send_unique(self.app, task, signature)
        else:
            self.app.submit([signature])
        return AsyncResult(
            self, uuid, name=signature.name, queue=self._queue(signature), duplicate=duplicate
        )

    send_task_async = twin(send_task)

    def send_chain(self, chain: Chain[R]) -> ChainResult[R]:
        """Publish the first step; each step's worker publishes the next. Raises as `send_task`."""
        return self._send_workflow(chain)

    send_chain_async = twin(send_chain)

    def send_group(self, group: Group[R], send_concurrency: int = 0) -> GroupResult[R]:
        """Publish all members in one batch; `send_concurrency` is Go's and is not needed here. Raises as `send_task`."""
        del send_concurrency
        return cast("GroupResult[R]", self._send_workflow(Chain((group,))).steps[0])

    send_group_async = twin(send_group)

    def send_chord(self, chord: Chain[R], send_concurrency: int = 0) -> ChordResult[R]:
        """Publish a group whose callback is sent when all members have succeeded. Raises as `send_task`."""
        del send_concurrency
        return cast("ChordResult[R]", self._send_workflow(chord))

    send_chord_async = twin(send_chord)

    def send(self, step: Step[Any]) -> Any:
        """Publish whatever it is: a signature, chain, group or chord."""
        if isinstance(step, Signature):
            return self.send_task(step)
        if isinstance(step, Group):
            return self.send_group(step)
        return self.send_chain(cast("Chain[Any]", step))

    send_async = twin(send)

    def _send_workflow(self, chain: Chain[R]) -> ChainResult[R]:
        self._note_loop()
        plan = link(chain, now=self.now())
        self.app.registry.check(plan.first)
        if not self._is_warned and any(step.is_group for step in plan.steps[:-1]):
            self._warn_of_forgetting()
        self.app.submit(plan.first, plan.groups, plan.awaited)
        return self._results(plan)

    def _warn_of_forgetting(self) -> None:
        self._is_warned = True
        features = self.backend.features
        if features.keeps and not features.durable and not features.embedded:
            logger.warning(
                "a chord was sent whose members are counted in %s, which forgets when it restarts or is full: then "
                "its callback is never called (name another result backend for chords that matter)",
                features.name,
            )

    def _results(self, plan: Plan) -> ChainResult[Any]:
        steps = [self._step_result(step, plan) for step in plan.steps]
        is_chord = len(steps) == 2 and plan.steps[0].is_group and not plan.steps[1].is_group
        return (ChordResult if is_chord else ChainResult)(self, steps)

    def _step_result(self, step: PlannedStep, plan: Plan) -> AsyncResult[Any] | GroupResult[Any]:
        queue = self._queue(plan.first[0])
        if not step.is_group:
            return AsyncResult(self, step.uuids[0], name=step.names[0], queue=queue)
        uuid = next(
            (one.group_uuid for one in plan.groups if tuple(one.task_uuids) == tuple(step.uuids)),
            "",
        )
        return GroupResult(self, uuid, step.uuids, step.names, queue=queue, leading=step.leading)

    def _queue(self, signature: Signature[Any]) -> str:
        return signature.routing_key or self.config.default_queue

    def _note_loop(self) -> None:
        # Missing also while another thread is just loading it.
        running_loop = getattr(sys.modules.get("asyncio"), "get_running_loop", None)
        if self._told_loop or running_loop is None:
            return
        try:
            running_loop()
        except RuntimeError:
            return
        self._told_loop = True
        logger.debug(
            "send() was called in a running event loop; it blocks it for one write (use send_async)"
        )

    # Results

    def result(self, uuid: str) -> AsyncResult[Any]:
        """The result of a task that was sent some time, by any process."""
        return AsyncResult(self, uuid)

    @property
    def kept_for(self) -> float:
        """Seconds that results are kept."""
        return float(self.config.results_expire_in)

    @property
    def waiters(self) -> AsyncWaiters:
        """Waiters of the coroutines that wait for results."""
        if self._waiters is None or not self._waiters.is_ours:
            self._waiters = AsyncWaiters(self._listener)
        return self._waiters

    def _listener(self) -> Listener:
        return self.backend.listener()

    def convert(self, name: str, value: Any) -> Any:
        """A received result as the task's annotation says, if the task is known here."""
        task = self.app.registry.find(name)
        return task.call.result(value) if task is not None else value

    def worker_hint(self, queue: str) -> tuple[str, str]:
        """Why nobody runs the tasks of that queue, and what to type against it; empty if somebody does."""
        queue = queue or self.config.default_queue
        try:
            if queue in self.broker.paused():
                return (
                    f"{queue!r} is paused",
                    f"resume it: machinery resume {self._module()} {queue}",
                )
            served = any(queue in worker.queues for worker in self.broker.workers())
        except MachineryError:
            return "", ""
        other = "" if queue == self.config.default_queue else f" -Q {queue}"
        return (
            ("", "")
            if served
            else (f"no worker on {queue!r}", f"start one: machinery worker {self._module()}{other}")
        )

    def _module(self) -> str:
        """The application as the command line names it."""
        module = next((task.__module__ for task in self.app.registry), "<your module>")
        if module == "__main__":
            module = (
                getattr(sys.modules["__main__"], "__file__", "<your module>")
                .rpartition("/")[2]
                .removesuffix(".py")
            )
        return module

    def revoke(self, uuids: Sequence[str]) -> None:
        """Revoke tasks: those that wait are FAILURE, "revoked", from now on; those that run are asked to stop."""
        if revoke(self.app, list(uuids)):
            settle_ready_groups(self.app)

    revoke_async = twin(revoke)

    def lock(self, name: str, *, timeout: float | None = None, blocking: bool = True) -> NamedLock:
        """A lock across all processes with this lock store: `with server.lock("feed-7"):`, or `async with`.

        It is held while its holder lives, and free `lease` seconds after its holder was killed.

        Args:
            timeout: seconds to wait for it at most; then LockNotAcquired.
            blocking: False: do not wait at all.
        """
        return NamedLock(self.app.locks, name, timeout=timeout, blocking=blocking)

    # Workers

    def new_worker(
        self,
        name: str = "",
        concurrency: int = 0,
        *,
        queues: Queues = (),
        burst: bool = False,
        shutdown_timeout: float | None = None,
        scheduler: bool = True,
    ) -> Worker:
        """A worker in this process, not started yet: `worker.launch()`, or `with worker:`.

        Args:
            name: of the worker; by default host and process.
            concurrency: tasks at a time; 0 is two for each processor.
            queues: names in strict order, or a mapping of names to weights; by default the configured ones.
            burst: end when there is nothing left to do.
            shutdown_timeout: seconds that running tasks get at the end.
            scheduler: whether it sends what schedules say; a burst worker never does.
        """
        return Worker(
            self.app,
            name,
            concurrency=concurrency,
            queues=queues,
            burst=burst,
            shutdown_timeout=shutdown_timeout,
            declared=self.declared if scheduler and not burst else None,
        )

    def new_custom_queue_worker(self, name: str, concurrency: int, queue: str) -> Worker:
        """A worker on one other queue; Go's name."""
        return self.new_worker(name, concurrency, queues=(queue,))

    def _all_queues(self) -> list[str]:
        names = {stats.queue for stats in self.broker.stats()} | {self.config.default_queue}
        return sorted(names)


def _classes(retry_on: Any) -> tuple[type[BaseException], ...] | None:
    if retry_on is None or isinstance(retry_on, tuple):
        return retry_on
    return tuple(retry_on) if isinstance(retry_on, list) else (retry_on,)
