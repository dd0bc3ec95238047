"""`server.control`: orders to the workers of all processes, and their answers.

A call sends one order, and ends when all workers have answered that a fresh beat knows and that it
is for; or after `timeout` seconds. No order is sent twice.

    worker killed, frozen, deaf   listed in `Answers.missing`, until its beats are too old
    worker starts during the call may answer; is not waited for
    broker is away                BrokerUnavailable
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final, TypeVar, Unpack

import msgspec

from machinery_py.async_twins import twin
from machinery_py.bounds import in_steps
from machinery_py.brokers.base import Broker
from machinery_py.brokers.topics import MAX_RECORD, TOPIC_AGE
from machinery_py.clock import ABOVE_ZERO, Seconds, seconds_of
from machinery_py.control.answers import (
    ActiveTask,
    Answers,
    HeldTask,
    Pong,
    Revoked,
    ThreadStack,
    WorkerQueue,
    WorkerStats,
)
from machinery_py.control.lamport import LamportClock
from machinery_py.control.orders import (
    ANY,
    MOST_NAMES,
    ORDERS,
    Answer,
    ControlOrder,
    arguments,
    contains,
    decode_answer,
    decoded,
    matches,
)
from machinery_py.errors import ArgumentError, MachineryError, Unsupported
from machinery_py.limits.settings import LimitOptions
from machinery_py.names import check_encodable
from machinery_py.texts import get_logger

logger = get_logger(__name__)

TIMEOUT = 2.0  # seconds; more than a subscription takes to look for records, which is 1 s
MOST_LISTED = 100_000  # tasks of a queue, and delayed ones, that one call looks through
ROUNDS = 3  # looks at queues and workers

Place = tuple[str, str, int]  # name, host and pid of a worker
T = TypeVar("T")


class ChosenWorkers:
    """Workers that orders are for, chosen by name. Each call asks all that there are by then."""

    def __init__(
        self,
        broker: Callable[[], Broker],
        lamport: LamportClock,
        patterns: Sequence[str],
        *,
        timeout: Seconds,
    ) -> None:
        try:
            self._timeout = seconds_of("timeout", timeout, least=ABOVE_ZERO, most=TOPIC_AGE)
        except (TypeError, ValueError) as error:
            raise ArgumentError(str(error)) from None
        if len(patterns) > MOST_NAMES:
            raise ArgumentError(f"workers: found {len(patterns):,} names (at most {MOST_NAMES:,})")
        check_encodable("workers", patterns)
        self._broker = broker
        self._lamport = lamport
        self._patterns = list(patterns)

    def ping(self) -> Answers[Pong]:
        """Return which workers answer, and how soon."""
        return self._ask("ping", Pong)

    ping_async: Final = twin(ping)

    def stats(self) -> Answers[WorkerStats]:
        """Return facts of the workers and their processes."""
        return self._ask("stats", WorkerStats)

    stats_async: Final = twin(stats)

    def active(self) -> Answers[list[ActiveTask]]:
        """Return the tasks that run: since when, and in which thread or process."""
        return self._ask("active", list[ActiveTask])

    active_async: Final = twin(active)

    def reserved(self) -> Answers[list[HeldTask]]:
        """Return the tasks that are claimed and not begun."""
        return self._ask("reserved", list[HeldTask])

    reserved_async: Final = twin(reserved)

    def registered(self) -> Answers[list[str]]:
        """Return the names of the tasks that the workers know."""
        return self._ask("registered", list[str])

    registered_async: Final = twin(registered)

    def config(self) -> Answers[dict[str, Any]]:
        """Return all settings, without passwords."""
        return self._ask("config", dict[str, Any])

    config_async: Final = twin(config)

    def queues(self) -> Answers[list[WorkerQueue]]:
        """Return the queues that the workers serve, in their order."""
        return self._ask("queues", list[WorkerQueue])

    queues_async: Final = twin(queues)

    def stack(self) -> Answers[list[ThreadStack]]:
        """Return what each thread of the workers' processes does now."""
        return self._ask("stack", list[ThreadStack])

    stack_async: Final = twin(stack)

    # Orders that change something: all workers that there are do it, or it is an error

    def change(self, kind: str, /, **args: Any) -> Answers[object]:
        """Give one of the orders below by its name, and return which workers did it.

        Raises ArgumentError alone as the order's own method does: see `missing` and `errors`.
        """
        return self._ask(kind, object, **args)

    change_async: Final = twin(change)

    def set_concurrency(self, concurrency: int) -> None:
        """Run so many tasks at a time from now on; what runs goes on.

        Raises:
            ArgumentError: no worker was asked.
            MachineryError: some workers did not do it, or did not answer; the text names them. Done
                again, it changes nothing where it was done.
        """
        self._tell("set_concurrency", concurrency=concurrency)

    set_concurrency_async: Final = twin(set_concurrency)

    def add_queue(self, name: str) -> None:
        """Take tasks from this queue, too: after the others, or with weight 1.

        Raises as `set_concurrency`.
        """
        self._tell("add_queue", name=name)

    add_queue_async: Final = twin(add_queue)

    def cancel_queue(self, name: str) -> None:
        """Take no more tasks from this queue; those that are claimed are run.

        Raises as `set_concurrency`; a worker keeps its last queue.
        """
        self._tell("cancel_queue", name=name)

    cancel_queue_async: Final = twin(cancel_queue)

    def set_time_limit(self, task: str, seconds: Seconds | None) -> None:
        """Give a task this time limit, from its next run on; None: no limit.

        The limit of a single call goes before it. Raises as `set_concurrency`.
        """
        self._tell("set_time_limit", task=task, seconds=seconds)

    set_time_limit_async: Final = twin(set_time_limit)

    def enable_events(self) -> None:
        """Send the events of the workers' processes from now on. Raises as `set_concurrency`."""
        self._tell("enable_events")

    enable_events_async: Final = twin(enable_events)

    def disable_events(self) -> None:
        """Send no more events. Raises as `set_concurrency`."""
        self._tell("disable_events")

    disable_events_async: Final = twin(disable_events)

    def log_level(self, level: str) -> None:
        """Let our loggers log from this level on: "debug", "info", "warning", "error", "critical".

        Raises as `set_concurrency`.
        """
        self._tell("log_level", level=level.upper())

    log_level_async: Final = twin(log_level)

    def restart_pool(self) -> None:
        """Renew all task processes, each when its task is over; new ones import the app anew.

        The first one is started before any is ended: if it cannot import the app, the old
        ones stay. Raises as `set_concurrency`; a worker without task processes refuses.
        """
        self._tell("restart_pool")

    restart_pool_async: Final = twin(restart_pool)

    def shutdown(self) -> None:
        """End in order, as `Worker.quit`; a `machinery worker` starts no process in their place.

        Raises as `set_concurrency`. Returns before they have ended.
        """
        self._tell("shutdown")

    shutdown_async: Final = twin(shutdown)

    def terminate(self, *uuids: str) -> Answers[dict[str, str]]:
        """End the runs of tasks that are revoked; see `Control.revoke`, which revokes them first.

        Returns what each worker did with those that it runs: "killed", "asked" or "left".
        """
        return self._ask("terminate", dict[str, str], uuids=uuids)

    terminate_async: Final = twin(terminate)

    def find(self, headers: Mapping[str, Any]) -> Answers[list[str]]:
        """Return the UUIDs of claimed and running tasks whose headers contain all these pairs.

        A worker with some 2,500 such tasks cannot tell them: it is in `errors`.

        Raises:
            ArgumentError: no pair, more than 20, or a name or value that is not plain and short.
        """
        return self._ask("find", list[str], headers=headers)

    find_async: Final = twin(find)

    def _tell(self, kind: str, **args: Any) -> None:
        done = self.change(kind, **args)
        problems = [f"{name}: {error}" for name, error in done.errors.items()]
        problems += [f"{name}: no answer in {self._timeout:g} s" for name in done.missing]
        if not (problems or done):
            problems = ["there is no such worker"]
        if problems:
            said = f" (done by {', '.join(done)})" if done else ""
            raise MachineryError(f"order {kind!r}: {'; '.join(problems)}{said}")

    def _ask(self, kind: str, answer: type[T], **args: Any) -> Answers[T]:
        broker, order_id = self._broker(), uuid.uuid4().hex
        order = ControlOrder(
            id=order_id,
            kind=kind,
            to=self._patterns,
            args=msgspec.structs.asdict(arguments(kind, args)),
            clock=self._lamport.forward(),
            timeout=self._timeout,
        )
        # Before the order: its answers must find somebody.
        with contextlib.closing(broker.subscribe(order.replies)) as replies:
            expected = {
                (one.name, one.host, one.pid)
                for one in broker.workers()
                if matches(one.name, self._patterns)
            }
            gathered: dict[Place, tuple[Answer, float]] = {}
            if expected:
                begun = time.monotonic()
                broker.broadcast(ORDERS, [msgspec.json.encode(order)], ttl=self._timeout)
                left = self._timeout
                while left > 0 and not expected <= gathered.keys():
                    for record in replies.read(left):
                        _take(record, gathered, seconds=time.monotonic() - begun)
                    left = begun + self._timeout - time.monotonic()
        return self._answers(answer, expected, gathered)

    def _answers(
        self,
        answer: type[T],
        expected: set[Place],
        gathered: Mapping[Place, tuple[Answer, float]],
    ) -> Answers[T]:
        found: dict[str, T] = {}
        errors: dict[str, str] = {}
        places = sorted(expected | gathered.keys())
        names = Counter(name for name, _, _ in places)
        missing = [name for name in self._patterns if ANY not in name and not names[name]]
        for place in places:
            name, host, pid = place
            label = name if names[name] == 1 else f"{name}@{host}:{pid}"
            if place not in gathered:
                missing.append(label)
                continue
            one, seconds = gathered[place]
            self._lamport.adjust(one.clock)
            if one.error:
                errors[label] = one.error
                continue
            try:
                found[label] = _value(one, seconds, answer)
            except ValueError as error:  # of another version, or a stranger's
                errors[label] = f"its answer cannot be read: {error}"
        return Answers(found, missing=missing, errors=errors)


def _take(record: bytes, gathered: dict[Place, tuple[Answer, float]], *, seconds: float) -> None:
    try:
        answer = decode_answer(record)
    except ValueError as error:
        logger.debug("a record among the answers of workers is none: %s", error)
    else:
        gathered.setdefault((answer.worker, answer.host, answer.pid), (answer, seconds))


def _value(one: Answer, seconds: float, answer: type[T]) -> T:
    if answer is Pong:
        return msgspec.convert({"clock": one.clock, "seconds": seconds}, answer)
    return decoded(msgspec.json.Decoder(answer), one.value)


class Control:
    """Orders to workers: `server.control`. Any thread may use it."""

    def __init__(
        self,
        broker: Callable[[], Broker],
        lamport: LamportClock,
        revoke: Callable[[Sequence[str]], None],
        limit: Callable[[str, LimitOptions], None],
    ) -> None:
        self._broker = broker
        self._lamport = lamport
        self._revoke = revoke
        self._limit = limit

    def workers(self, *names: str, timeout: Seconds = TIMEOUT) -> ChosenWorkers:
        """Return the workers with these names, to ask or to change them; without names: all.

        Args:
            names: `*` in one stands for any text: `web-*`.
            timeout: seconds (or a timedelta) to wait for answers at most, with each call.

        Raises:
            ArgumentError: the timeout is no length, not more than 0, or longer than an hour; more
                than 1,000 names, or half a surrogate pair in one.
        """
        return ChosenWorkers(self._broker, self._lamport, names, timeout=timeout)

    def ping(self, *, timeout: Seconds = TIMEOUT) -> Answers[Pong]:
        """Ask all workers for a sign of life.

        Raises:
            BrokerUnavailable: nobody was asked.
            PublishUnknown: nobody may have been asked.
            Unsupported: this broker has no topics.
        """
        return self.workers(timeout=timeout).ping()

    ping_async: Final = twin(ping)

    def revoke(
        self,
        *uuids: str,
        headers: Mapping[str, Any] | None = None,
        terminate: bool = False,
        timeout: Seconds = TIMEOUT,
    ) -> Revoked:
        """Revoke tasks, as `Server.revoke`, and with `terminate` end those that run.

        Args:
            headers: instead of UUIDs: the tasks whose headers contain all these pairs, as far as
                they have been sent: waiting, delayed, held by workers or running. Each is revoked
                by its UUID. Those that are sent during the call may be revoked, later ones are not.

        A task moves while it is looked for: a worker claims it, or gives it back for a retry. So
        queues and workers are looked through in turn until nothing new is found, 3 times at most.
        What a worker in `missing` or `errors` holds is not revoked, if it is in no queue either:
        repeat the call when the worker answers, or is gone.

        Returns what each worker did with those that it runs: "killed", a task process and all that
        the task has started, which ends it in FAILURE, "revoked"; "asked" to stop, a thread or a
        coroutine; or "left", a call in a batch with others. A worker in `missing` asks its tasks
        itself when it goes on: the revocation is stored before any worker is told.

        Raises as `Server.revoke`, and as `ping`: then the tasks are revoked. With `headers`: some
        are; repeat it. And:
            ArgumentError: UUIDs and headers, more than 1,000 UUIDs to terminate, or as `find`.
            Unsupported: more than 100,000 tasks wait in a queue, or are delayed.
        """
        workers = self.workers(timeout=timeout)
        if headers is not None:
            if uuids:
                raise ArgumentError("revoke: found UUIDs and headers (expected one of the two)")
            return self._revoke_by_headers(workers, headers, terminate=terminate)
        if terminate:
            arguments("terminate", {"uuids": uuids})
        self._revoke(uuids)
        return _ended(workers, uuids if terminate else (), uuids, [])

    revoke_async: Final = twin(revoke)

    def limit(self, name: str, **limits: Unpack[LimitOptions]) -> None:
        """Let these limits of a task or `limiter:NAME` win over those of the code.

        Counts for all processes from the next run on, until `reset_limit`; one that the code does
        not set, a second later. Limits that are not named stay as they were.

        Raises:
            ArgumentError: no limit is named, or a value makes no sense.
        """
        if not limits:
            raise ArgumentError(f"{name}: no limit is named")
        self._limit(name, limits)

    limit_async: Final = twin(limit)

    def reset_limit(self, name: str) -> None:
        """Let the limits of the code count again. Raises as `limit`."""
        self._limit(name, {})

    reset_limit_async: Final = twin(reset_limit)

    def _revoke_by_headers(
        self, workers: ChosenWorkers, headers: Mapping[str, Any], *, terminate: bool
    ) -> Revoked:
        arguments("find", {"headers": headers})
        broker = self._broker()
        revoked: set[str] = set()
        held: set[str] = set()
        heard: list[Answers[Any]] = []
        for number in range(ROUNDS):
            before = len(revoked)
            # Before the workers are asked: what is claimed from now on is not begun.
            self._revoke_others(_listed(broker, headers), revoked)
            found = workers.find(headers)
            heard.append(found)
            held.update(uuid for uuids in found.values() for uuid in uuids)
            self._revoke_others(held, revoked)
            # Twice at least: at the first look a task may have been on its way to a worker.
            if number and len(revoked) == before:
                break
        return _ended(workers, held if terminate else (), sorted(revoked), heard)

    def _revoke_others(self, uuids: Set[str], revoked: set[str]) -> None:
        for some in _batches(uuids - revoked):
            self._revoke(some)
            revoked.update(some)


def _listed(broker: Broker, headers: Mapping[str, Any]) -> set[str]:
    """Return the UUIDs of the waiting and delayed tasks that have these headers."""
    broker.tend()  # what dead workers held is in no queue yet, if no other worker lives
    queues = broker.stats()
    counts = {f"in queue {one.queue!r}": one.waiting for one in queues}
    counts["delayed"] = sum(one.delayed for one in queues)
    for where, count in counts.items():
        if count > MOST_LISTED:
            raise Unsupported(
                f"tasks cannot be revoked by headers: found {count:,} {where} (at most "
                f"{MOST_LISTED:,}); revoke them by UUID"
            )
    found = set[str]()
    places = [one.queue for one in queues if one.waiting or one.delayed]
    for queue in ("", *places):  # "": delayed ones, first, since some may be queued meanwhile
        some = (
            broker.get_pending_tasks(queue, MOST_LISTED)
            if queue
            else broker.get_delayed_tasks(MOST_LISTED)
        )
        found |= {one.uuid for one in some if contains(one.headers, headers)}
    return found


def _ended(
    workers: ChosenWorkers, uuids: Iterable[str], revoked: Sequence[str], heard: list[Answers[Any]]
) -> Revoked:
    """End the runs of these tasks, and tell what became of them, and of orders before."""
    done: dict[str, dict[str, str]] = {}
    for some in _batches(uuids):
        ended = workers.terminate(*some)
        heard.append(ended)
        for name, fates in ended.items():
            done.setdefault(name, {}).update(fates)
    missing = dict.fromkeys(name for one in heard for name in one.missing)
    errors = {name: text for one in heard for name, text in one.errors.items()}
    return Revoked(done, uuids=revoked, missing=list(missing), errors=errors)


def _batches(uuids: Iterable[str]) -> list[Sequence[str]]:
    """Return them in parts that fit into an order each."""
    every = sorted(uuids)
    longest = max((len(msgspec.json.encode(one)) for one in every), default=0)
    most = max(1, min(MOST_NAMES, (MAX_RECORD - 1000) // (longest + 1)))
    return list(in_steps(every, most))
