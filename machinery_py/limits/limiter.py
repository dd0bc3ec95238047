"""`server.limiter(name, "20/s")`: a limit by hand, across processes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final

from machinery_py.async_twins import twin
from machinery_py.call_threads import in_thread, taking
from machinery_py.clock import Seconds, timeout_of
from machinery_py.errors import LimitNotAcquired, MachineryError
from machinery_py.limits.base import Rule, slots_of
from machinery_py.limits.keeper import SlotKeeper, SlotLease
from machinery_py.locks.waiting import AWAY, Acquiring
from machinery_py.tasks.context import check_time

SLICE = 0.5  # seconds of sleep, until it is looked again whether the time of the task is up


class Limiter:
    """A limit, made by `server.limiter`. Threads and coroutines may share it.

    with server.limiter("smtp", "20/s"):                 waits for its turn
    with server.limiter("smtp", "20/s", timeout=5):      LimitNotAcquired after 5 s
    async with server.limiter("db", max_running=3):      the same in a coroutine; at most three
    """

    def __init__(
        self,
        keeper: SlotKeeper,
        scope: str,
        name: str,
        rules: Sequence[Rule],
        *,
        timeout: Seconds | None,
        outage: float,
    ) -> None:
        """See `Acquiring` for `outage`."""
        self.name = name
        self._outage = outage
        self._keeper = keeper
        self._scope = scope
        self._rules = rules
        self._timeout = timeout_of(timeout)
        self._held: list[SlotLease] = []  # whoever leaves gives back one of them

    def acquire(self, *, timeout: Seconds | None = None) -> bool:
        """Wait for the turn of one. False: it did not come in time.

        Args:
            timeout: seconds to wait, or a timedelta, also for a store that is away; by default that
                of the limiter. Without any, a store may be away for `publish_timeout`.

        Raises:
            BackendUnavailable: the store was away when the time was up.
        """
        waiting = self._acquiring(timeout)
        asking = self._asking(waiting)
        try:
            while (wait := asking()) > 0:
                pause = waiting.pause(wait)
                if not pause:
                    asking(last=True)
                    return False
                _sleep(pause)
        except AWAY:
            raise  # the place could not be given back either, and lapses
        except BaseException:
            asking(last=True)
            raise
        return True

    async def acquire_async(self, *, timeout: Seconds | None = None) -> bool:
        """`acquire` for coroutines."""
        import asyncio  # loaded by now: we are in a coroutine

        waiting = self._acquiring(timeout)
        asking = self._asking(waiting)

        def give_back(wait: float) -> None:
            if wait > 0:
                asking(last=True)
            else:
                self._leave()

        while (wait := await taking(asking, give_back)) > 0:
            pause = waiting.pause(wait)
            try:
                if pause:
                    await asyncio.sleep(pause)
                    continue
            except asyncio.CancelledError:
                await in_thread(lambda: give_back(wait), goes_on=True)
                raise
            await in_thread(lambda: give_back(wait), goes_on=True)
            return False
        return True

    def release(self) -> bool:
        """Give back what a run of `max_running` holds. False: nothing was held."""
        try:
            lease = self._held.pop()
        except IndexError:
            return False
        return self._keeper.give_back(lease)

    release_async: Final = twin(release, goes_on=True)

    def _acquiring(self, timeout: Seconds | None) -> Acquiring:
        length = self._timeout if timeout is None else timeout_of(timeout)
        return Acquiring(f"limiter {self.name!r}", length, outage=self._outage)

    def _asking(self, waiting: Acquiring) -> Callable[..., float]:
        """Return a function that asks for one run, and says how long to wait; 0.0: it has it.

        `last`: it waits no more, and gives its place in line back.
        """
        who, again = secrets.token_hex(8), False

        def ask(*, last: bool = False) -> float:
            nonlocal again
            if last:
                self._keeper.forget(slots_of(self._scope, who, who, self._rules))
                return 0.0
            try:
                answer, lease = self._keeper.enter(self._scope, who, who, self._rules, again=again)
            except AWAY as error:
                return waiting.pause_of_outage(error)
            waiting.answered()
            if lease is not None:
                self._held.append(lease)
            again = answer.wait > 0
            return answer.wait

        return ask

    def __enter__(self) -> Limiter:
        """
        Raises:
            LimitNotAcquired: its turn did not come in time.
        """
        if not self.acquire():
            raise LimitNotAcquired(self.name, self._timeout)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    async def __aenter__(self) -> Limiter:
        if not await self.acquire_async():
            raise LimitNotAcquired(self.name, self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._held:
            await in_thread(self._leave, goes_on=True)

    def _leave(self) -> None:
        try:
            self.release()
        except MachineryError as error:
            # What the block did was done under the limit; the slot ends by itself.
            self._keeper.log_unreleased(repr(self.name), error)


def _sleep(seconds: float) -> None:
    """Sleep so long, unless the time of the task is up."""
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        check_time()
        time.sleep(min(left, SLICE))
    check_time()
