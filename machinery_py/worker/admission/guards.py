"""Admission of a task to its run: its limits, its lock (exclusive) and its key (unique).

Called where the task is about to run, so that tasks waiting in a worker hold nothing. One that may
not run yet goes back to its queue until its turn; a line for each key keeps the order (limits/).
The lock and the slots are given back when the settlement has been committed: until then a crash
would bring the task back, and the next one must not run before it.
"""

from __future__ import annotations

import datetime as dt
import functools
import random
from collections.abc import Callable, Sequence

from machinery_py.brokers.base import WAITING, Fate, mark_of
from machinery_py.call_threads import CallThreads
from machinery_py.errors import (
    ArgumentError,
    BackendUnavailable,
    BrokerUnavailable,
    MachineryError,
    Unsupported,
)
from machinery_py.limits.base import Rule
from machinery_py.limits.keeper import SlotLease
from machinery_py.limits.settings import EXCLUSIVE, scope_of
from machinery_py.locks.named import LockLease
from machinery_py.registry.outcomes import Failed
from machinery_py.registry.unique_keys import lock_name, owner
from machinery_py.stores.base import Settlement
from machinery_py.tasks.signature import HEADER_REST, HEADER_UNIQUE_START
from machinery_py.texts import get_logger
from machinery_py.unique import start
from machinery_py.wire.long_chains import with_rest
from machinery_py.worker.admission.at_most_once import begin_once
from machinery_py.worker.admission.claim_order import ClaimOrder
from machinery_py.worker.running.execution import Execution

logger = get_logger(__name__)
_order = ClaimOrder()

# Seconds to the next try where the lock is another task's or `server.lock`'s, at first and at most.
WAITS = 0.05, 2.0
GUARDS = CallThreads("machinery-guards")  # apart: calls to a store that is away fill the others
STORE_PAUSE = 1.0  # seconds to the next try when the lock store does not answer


class ExecutionGuard:
    """Guard of one execution, made in the order of claims."""

    def __init__(self, execution: Execution) -> None:
        app, task = execution.app, execution.task
        assert task is not None
        self._app = app
        self._task = task
        self._owner = owner(app.config)
        self._scope = scope_of(task.name, owner=self._owner)
        self._lease: LockLease | None = None
        self._slots: SlotLease | None = None
        is_in_line = bool(task.rules) or execution.settings.exclusive == "wait"
        self._ticket = _order.ticket(task.name) if is_in_line else None

    def enter(self, one: Execution, on_lost: Callable[[], object]) -> bool:
        """Let the task run, in the thread that runs it, with all that follows it in its signature.

        False: it is settled. An early start (at_most_once.py) is committed here.

        Args:
            on_lost: called when its lock or a slot is lost while it runs.
        """
        stop = self._stop(one, on_lost)
        is_early = one.settings.ack == "early"
        if stop is None and not one.is_over and (not is_early or begin_once(one)):
            return True
        self.leave()
        if isinstance(stop, Settlement):
            one.settle(stop)
        elif stop is not None:
            one.finish(stop)
        return False

    def _stop(self, one: Execution, on_lost: Callable[[], object]) -> Failed | Settlement | None:
        """Take what it needs (None), or return what becomes of it instead."""
        settings = one.settings
        try:
            name = self._lock_name(one) if settings.exclusive else ""
            rules = self._task.rules_of(one.signature.args)
            stop = self._await_turn(one, rules, name, on_lost)
            if stop is None and settings.exclusive:
                stop = self._lock(one, rules, name, on_lost)
            headers = one.signature.headers or ()
            if stop is None and HEADER_UNIQUE_START in headers:
                stop = None if start(self._app, one.signature) else one.end_of_delivery()
            if stop is None and HEADER_REST in headers:
                stop = self._fetch_rest(one)
            return stop
        except (BackendUnavailable, BrokerUnavailable) as error:
            logger.warning("task %s cannot be run now: %s", one.signature.uuid, error)
            return _later(one, STORE_PAUSE * random.uniform(0.5, 1.0))
        except ArgumentError as error:
            return Failed(error=str(error), error_type="ArgumentError", retryable=False)
        except MachineryError as error:  # no lock store, or one that cannot be worked with
            what = "limits cannot be kept" if self._task.rules else "lock cannot be taken"
            return Failed(error=f"its {what}: {error}", error_type=type(error).__name__)

    def leave(self) -> None:
        """Give lock and slots back, without waiting for the store. Twice is fine, in any thread."""
        if self._ticket is not None:
            self._ticket.end()
        lease, self._lease = self._lease, None
        slots, self._slots = self._slots, None
        if slots is not None and lease is not None:
            # Whoever is let in next must find the lock free.
            lease.then = functools.partial(self._app.slots.give_back_soon, slots)
        elif slots is not None:
            self._app.slots.give_back_soon(slots)
        if lease is not None:
            self._app.locks.give_back_soon(lease)

    def _fetch_rest(self, one: Execution) -> Failed | None:
        """Take the steps behind it, in a long chain, from their record."""
        uuid = str(one.signature.headers[HEADER_REST])
        try:
            record = self._app.store.backend.get_group(uuid)
            if record is not None:
                one.signature = with_rest(one.signature, record)
                return None
            problem = "is not there any more"
        except BackendUnavailable:
            raise
        except MachineryError as error:
            problem = f"cannot be read: {error}"
        return Failed(
            error=f"the record {uuid} of the steps behind it {problem}",
            error_type="ChainLost",
            retryable=False,
        )

    def _lock_name(self, one: Execution) -> str:
        task, how = self._task, one.settings.exclusive_key
        return lock_name(task.name, task.call, one.signature.args, how, owner=self._owner)

    def _await_turn(
        self, one: Execution, rules: Sequence[Rule], lock: str, on_lost: Callable[[], object]
    ) -> Failed | Settlement | None:
        """Get in line for what holds it back; None: it is its turn.

        Args:
            lock: its name, of an exclusive task.
        """
        if self._ticket is None:
            return None
        if one.settings.exclusive == "wait":
            rules = [*rules, Rule(name=EXCLUSIVE, key=lock)]
        slots, scope = self._app.slots, self._scope
        try:
            with self._ticket.turn((scope, *[rule.key for rule in rules])):
                answer, self._slots = slots.enter(
                    scope,
                    one.signature.uuid,
                    mark_of(one.delivery),
                    rules,
                    again=one.delivery.redelivered,
                    order=one.delivery.order or one.delivery.fence,
                    together=True,
                    on_lost=on_lost,
                )
        except Unsupported:
            if self._task.rules:
                raise
            return None  # the store has locks alone: one at a time, in any order
        if not answer.wait:
            return None
        if answer.name != EXCLUSIVE:
            return _later(one, answer.wait)
        stop = _wait_for_lock(one, answer.key, lambda _: answer.wait)
        if isinstance(stop, Failed):
            slots.forget(answer.held)
        return stop

    def _lock(
        self, one: Execution, rules: Sequence[Rule], name: str, on_lost: Callable[[], object]
    ) -> Failed | Settlement | None:
        """Take its lock, or take back what was counted for it."""
        self._lease = self._app.locks.take(name, on_lost=on_lost)
        if self._lease is not None:
            return None
        stop: Failed | Settlement
        if one.settings.exclusive == "skip":
            stop = Failed(
                error=f"skipped: another run of it holds the lock {name!r}",
                error_type="Skipped",
                retryable=False,
            )
        else:
            stop = _wait_for_lock(one, name, _patience)
        slots = self._app.slots
        if self._slots is not None and not isinstance(stop, Failed):
            # Until its lease ends, the slot of EXCLUSIVE keeps it the first of those who wait.
            slots.drop([self._slots])
            self._slots = None
        if rules:
            slots.uncount(self._scope, one.signature.uuid, mark_of(one.delivery), rules)
        return stop


def _wait_for_lock(
    one: Execution, name: str, pause: Callable[[float], float]
) -> Failed | Settlement:
    """Put it back, or fail it if it has waited for its `exclusive_timeout`.

    Args:
        pause: says how long, from the seconds that it has waited.
    """
    timeout, waited = one.settings.exclusive_timeout, 0.0
    if timeout is not None or pause is _patience:
        waited = _waited(one)
    if timeout is None:
        return _later(one, pause(waited))
    if waited >= timeout:
        return Failed(
            error=f"lock {name!r}: somebody else has it, and had it for {waited:.1f} s",
            error_type="LockNotAcquired",
            retryable=False,
        )
    return _later(one, min(pause(waited), timeout - waited))


def _waited(one: Execution) -> float:
    """Return the seconds since it could have run.

    Read from its state, since few brokers know when a message was sent.
    """
    signature = one.signature
    state = one.app.store.backend.get_states([signature.uuid]).get(signature.uuid)
    moments = (state.created_at if state is not None else None, signature.eta)
    known = [moment for moment in moments if moment is not None]
    return max(0.0, (one.app.now() - max(known)).total_seconds()) if known else 0.0


def _later(one: Execution, pause: float) -> Settlement:
    eta = one.app.now() + dt.timedelta(seconds=pause)
    return one.end_of_delivery(Fate.LATER, eta=eta, reason=WAITING)


def _patience(waited: float) -> float:
    """Return the seconds to the next try of one that has waited so long."""
    return min(WAITS[1], max(WAITS[0], waited / 4)) * random.uniform(0.5, 1.0)


async def pass_async(passing: Callable[[], bool], stop: Callable[[BaseException], object]) -> bool:
    """Pass a guard without blocking the loop.

    Args:
        stop: called if the coroutine was cancelled meanwhile, and had passed.
    """
    import asyncio  # loaded by now: we are in a coroutine

    attempt = asyncio.wrap_future(GUARDS.submit(passing))
    cancelled: BaseException | None = None
    while not attempt.done():
        try:
            await asyncio.wait([attempt])
        except asyncio.CancelledError as error:
            cancelled = error  # however often: the execution ends here, or nowhere
    passed = attempt.result()
    if passed and cancelled is not None:
        stop(cancelled)
    return passed and cancelled is None
