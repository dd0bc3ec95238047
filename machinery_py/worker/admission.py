"""Admission of a task to its run: the key of a unique task, the lock of an exclusive one.

Called where the task is about to run, so that tasks waiting in a worker hold no lock. The lock is
given back when the settlement has been committed: until then a crash would bring the task back,
and the next one must not run before it.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable
from typing import Any

from machinery_py.app import Application
from machinery_py.brokers.base import WAITING, Delivery, Fate
from machinery_py.errors import ArgumentError, BackendUnavailable, BrokerUnavailable, MachineryError
from machinery_py.locks.named import Lease
from machinery_py.registry.outcomes import Failed
from machinery_py.registry.task import Task
from machinery_py.registry.unique_keys import lock_name, owner
from machinery_py.stores.base import Settlement
from machinery_py.tasks.signature import HEADER_UNIQUE_START, Signature
from machinery_py.texts import get_logger
from machinery_py.unique import start

logger = get_logger(__name__)

WAITS = 0.05, 2.0  # seconds to the next try of an exclusive task, at first and at most
STORE_PAUSE = 1.0  # seconds to the next try when the lock store does not answer


class ExecutionGuard:
    """Guard of one execution. `enter` is called by the thread that is to run it, `leave` by any."""

    def __init__(
        self, app: Application, task: Task[..., Any], signature: Signature[Any], delivery: Delivery
    ) -> None:
        self._app = app
        self._task = task
        self._signature = signature
        self._delivery = delivery
        self._lease: Lease | None = None

    def enter(self, on_lost: Callable[[], object]) -> Failed | Settlement | None:
        """Let the task run (None), or return what becomes of it instead.

        Args:
            on_lost: called when its lock is lost while it runs.
        """
        try:
            stop = self._lock(on_lost) if self._task.settings.exclusive else None
            headers = self._signature.headers or ()
            if stop is None and HEADER_UNIQUE_START in headers:
                stop = None if start(self._app, self._signature) else self._settlement()
        except (BackendUnavailable, BrokerUnavailable) as error:
            logger.warning("task %s cannot be run now: %s", self._signature.uuid, error)
            stop = self._later(STORE_PAUSE)
        except ArgumentError as error:
            stop = Failed(error=str(error), error_type="ArgumentError", retryable=False)
        except MachineryError as error:  # no lock store, or one that cannot be worked with
            stop = Failed(
                error=f"its lock cannot be taken: {error}", error_type=type(error).__name__
            )
        if stop is not None:
            self.leave()
        return stop

    def leave(self) -> None:
        """Release the lock, without waiting for the store. May be called twice, from any thread."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._app.locks.give_back_soon(lease)

    def _lock(self, on_lost: Callable[[], object]) -> Failed | Settlement | None:
        task, settings = self._task, self._task.settings
        whose = owner(self._app.config)
        name = lock_name(
            task.name, task.call, self._signature.args, settings.exclusive_key, owner=whose
        )
        self._lease = self._app.locks.take(name, on_lost=on_lost)
        if self._lease is not None:
            return None
        if settings.exclusive == "skip":
            return Failed(
                error=f"skipped: another run of it holds the lock {name!r}",
                error_type="Skipped",
                retryable=False,
            )
        waited = self._waited()
        if settings.exclusive_timeout is not None and waited >= settings.exclusive_timeout:
            return Failed(
                error=f"lock {name!r}: somebody else has it, and had it for {waited:.1f} s",
                error_type="LockNotAcquired",
                retryable=False,
            )
        return self._later(min(WAITS[1], max(WAITS[0], waited / 4)))

    def _waited(self) -> float:
        """Return the seconds since it could have run.

        Read from its state, since few brokers know when a message was sent.
        """
        signature = self._signature
        state = self._app.store.backend.get_states([signature.uuid]).get(signature.uuid)
        moments = (state.created_at if state is not None else None, signature.eta)
        known = [moment for moment in moments if moment is not None]
        return max(0.0, (self._app.clock.now() - max(known)).total_seconds()) if known else 0.0

    def _later(self, pause: float) -> Settlement:
        eta = self._app.clock.now() + dt.timedelta(seconds=pause * random.uniform(0.5, 1.0))
        return self._settlement(fate=Fate.LATER, eta=eta, reason=WAITING)

    def _settlement(self, **more: Any) -> Settlement:
        """Return a settlement of the delivery alone."""
        return Settlement(
            delivery=self._delivery, uuid=self._signature.uuid, name=self._signature.name, **more
        )


async def in_thread(passing: Callable[[], bool], stop: Callable[[BaseException], object]) -> bool:
    """Pass a guard without blocking the loop.

    Args:
        stop: called if the coroutine was cancelled meanwhile, and had passed.
    """
    import asyncio  # loaded by now: we are in a coroutine

    attempt = asyncio.ensure_future(asyncio.to_thread(passing))
    try:
        return await asyncio.shield(attempt)
    except asyncio.CancelledError as error:
        if await attempt:
            stop(error)
        return False
