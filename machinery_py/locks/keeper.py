"""The frame of what holds leases of a store: locks, and the running slots of limits.

A holder has a lease. One thread of a Server for each kind, the keeper, renews all leases of that
kind; it starts with the first and ends with the last. A lease that was not renewed in time is lost.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from machinery_py.clock import boottime
from machinery_py.errors import MachineryError
from machinery_py.texts import get_logger
from machinery_py.threads import LoopThread

logger = get_logger(__name__)

RENEWALS = 3  # in one lease

S = TypeVar("S")  # the store
H = TypeVar("H")  # what is held there


class Lease(Generic[S, H]):
    """Something that is held in a store.

    Attributes:
        name: for the log.
        ends: the second of `boottime` until which it surely is ours.
        then: called when it has been given back; see `give_back_soon`.
    """

    def __init__(
        self,
        store: S,
        held: H,
        ends: float,
        *,
        name: str,
        on_lost: Callable[[], object] | None = None,
    ) -> None:
        self.store = store
        self.held = held
        self.name = name
        self.on_lost = on_lost
        self.ends = ends
        self.lost = False
        self.then: Callable[[], object] = lambda: None


class LeaseKeeper(ABC, Generic[S, H]):
    """Renews and gives back the leases of one Server. May be used from any thread.

    Args:
        kind: of what is held, for the log.
        length: of a lease in seconds; so long is it held after the death of its holder.
    """

    def __init__(self, kind: str, length: Callable[[], float]) -> None:
        self._kind = kind
        self._length = length
        self._leases: dict[int, Lease[S, H]] = {}
        self._over: list[Lease[S, H]] = []  # to be given back
        self._changed = threading.Condition()
        self._loop: LoopThread | None = None  # while there are leases
        _keepers.add(self)

    @abstractmethod
    def _renew(self, leases: Sequence[Lease[S, H]], ttl: float) -> Sequence[bool | None]:
        """Renew a batch, and return for each whether it is still ours; None: nobody could say."""

    @abstractmethod
    def _release(self, leases: Sequence[Lease[S, H]]) -> bool:
        """Release a batch. False: one was not ours any more."""

    def _batches(self, leases: Iterable[Lease[S, H]]) -> Iterable[Sequence[Lease[S, H]]]:
        """Return those that one call of the store can renew or release."""
        return [[lease] for lease in leases]

    def after_fork(self) -> None:
        """In a forked child: what the parent holds is not ours, and its thread is not here."""
        for lease in self._leases.values():
            lease.lost = True
        self._leases, self._over, self._loop = {}, [], None
        self._changed = threading.Condition()

    def keep(self, lease: Lease[S, H]) -> None:
        """Renew it from now on."""
        with self._changed:
            self._leases[id(lease)] = lease
            if self._loop is None:
                self._loop = LoopThread(f"machinery-{self._kind}-keeper", self._work, inside=True)
                self._loop.start()
            self._changed.notify_all()

    def give_back(self, lease: Lease[S, H]) -> bool:
        """Release it. False: it was lost."""
        return self.drop([lease]) == [lease] and self._release([lease])

    def drop(self, leases: Sequence[Lease[S, H]]) -> list[Lease[S, H]]:
        """Renew them no more, and return those that are held."""
        with self._changed:
            held = [one for one in leases if self._leases.pop(id(one), None) is not None]
            self._changed.notify_all()
        return [one for one in held if not one.lost]

    def give_back_soon(self, lease: Lease[S, H]) -> None:
        """Release it in the keeper's thread: a store that does not answer blocks nobody else."""
        with self._changed:
            if id(lease) in self._leases:
                self._over.append(lease)
                self._changed.notify_all()
                return
        lease.then()

    def flush(self) -> None:
        """Release now what `give_back_soon` was asked for."""
        with self._changed:
            over, self._over = self._over, []
        for batch in self._batches(self.drop(over)):
            try:
                self._release(batch)
            except Exception as error:  # the thread must live on for the others
                self.log_unreleased(_names(batch), error)
        for lease in over:
            lease.then()

    def close(self) -> None:
        """Stop renewing: leases still held expire. May be called twice; a lease starts it again."""
        self.flush()
        with self._changed:
            for lease in self._leases.values():
                lease.lost = True
            self._leases.clear()
            loop = self._loop
            self._changed.notify_all()
        if loop is not None:
            loop.join(10.0)

    def _work(self) -> None:
        due_at = boottime() + self._length() / RENEWALS
        while True:
            with self._changed:
                if not self._leases and not self._over:
                    self._loop = None
                    return
                while self._leases and not self._over and (left := due_at - boottime()) > 0:
                    self._changed.wait(left)
                leases = list(self._leases.values()) if boottime() >= due_at else []
            self.flush()
            if leases:
                due_at = boottime() + self._length() / RENEWALS
            for batch in self._batches(leases):
                self._renew_batch(batch)

    def _renew_batch(self, batch: Sequence[Lease[S, H]]) -> None:
        length, asked_at = self._length(), boottime()
        ours: Sequence[bool | None] = [None] * len(batch)
        try:
            ours = self._renew(batch, length)
        except Exception as error:  # the thread must live on for the others
            trace = not isinstance(error, MachineryError)
            text = "%s %s could not be renewed: %s"
            logger.warning(text, self._kind, _names(batch), error, exc_info=trace)
        for lease, is_ours in zip(batch, ours, strict=True):
            if is_ours:
                lease.ends = asked_at + length
            elif is_ours is False or boottime() >= lease.ends:
                self._lose(lease)

    def _lose(self, lease: Lease[S, H]) -> None:
        with self._changed:
            if self._leases.pop(id(lease), None) is None:
                return  # it was given back
            lease.lost = True
        text = "%s %r is lost: its lease could not be renewed in time"
        logger.error(text, self._kind, lease.name)
        if lease.on_lost is not None:
            lease.on_lost()

    def log_unreleased(self, names: str, error: Exception) -> None:
        trace = not isinstance(error, MachineryError)
        text = "%s %s could not be released, and ends by itself: %s"
        logger.warning(text, self._kind, names, error, exc_info=trace)


def _names(leases: Sequence[Lease[Any, Any]]) -> str:
    more = f" and {len(leases) - 1} more" if len(leases) > 1 else ""
    return f"{leases[0].name!r}{more}"


_keepers: weakref.WeakSet[LeaseKeeper[Any, Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for keeper in list(_keepers):
        keeper.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
