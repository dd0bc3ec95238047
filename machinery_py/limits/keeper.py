"""Keeper of the slots that the runs of this Server hold: renewed, and given back, in one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from machinery_py.clock import boottime
from machinery_py.connections.shared_calls import SharedCalls
from machinery_py.errors import MachineryError
from machinery_py.limits.base import Admission, Entrant, Limits, Rule, Slot, slots_of
from machinery_py.locks.keeper import Lease, LeaseKeeper

SlotLease = Lease[Limits, tuple[Slot, ...]]


class SlotKeeper(LeaseKeeper[Limits, tuple[Slot, ...]]):
    """Asks for runs under limits, and renews the slots of those that run.

    Args:
        open_limits: asked for at each use, since a Server may be given other stores.
        lease: seconds; so long is a slot held after the death of its holder.
    """

    def __init__(self, open_limits: Callable[[], Limits], lease: Callable[[], float]) -> None:
        super().__init__("slot", lease)
        self._open_limits = open_limits
        self._shared: tuple[Limits, SharedCalls[Entrant, Admission]] | None = None

    def enter(
        self,
        scope: str,
        who: str,
        token: str,
        rules: Sequence[Rule],
        *,
        again: bool = False,
        order: int = 0,
        together: bool = False,
        on_lost: Callable[[], object] | None = None,
    ) -> tuple[Admission, SlotLease | None]:
        """Ask as `Limits.enter`, and hold what a run holds, if it is let in.

        Args:
            order: see `Entrant`.
            together: share a call of the store with threads that ask at the same moment, where that
                costs less. Not in code of users: they may hold a lock that the other thread's call
                waits for, or be called by it (a log handler, a signal's).
            on_lost: called in the keeper's thread when a slot of the run is lost.
        """
        limits, length, asked_at = self._open_limits(), self._length(), boottime()
        one = Entrant(
            scope=scope, who=who, token=token, rules=rules, ttl=length, again=again, order=order
        )
        if together and limits.asks_together:
            answer = self._asking(limits)(one)
        else:
            [answer] = limits.enter_all([one])
        if answer.wait or not answer.held:
            return answer, None
        ends = asked_at + length
        lease = Lease(limits, answer.held, ends, name=f"{scope} {who}", on_lost=on_lost)
        self.keep(lease)
        return answer, lease

    def _asking(self, limits: Limits) -> Callable[[Entrant], Admission]:
        """Return what asks for one; threads that ask a store at the same time share the call."""
        asking = self._shared
        if asking is None or asking[0] is not limits:
            asking = self._shared = limits, SharedCalls(limits.enter_all)
        return asking[1].ask

    def forget(self, held: Sequence[Slot]) -> None:
        """Give back the places in line of one that waits no more; left alone, they lapse."""
        try:
            self._open_limits().leave(held)
        except MachineryError as error:
            self.log_unreleased(f"of {held[0].who}", error)

    def uncount(self, scope: str, who: str, token: str, rules: Sequence[Rule]) -> None:
        """Take back what these rules have counted for one that was let in and does not run."""
        self._open_limits().leave(slots_of(scope, who, token, rules))

    def _batches(self, leases: Iterable[SlotLease]) -> Iterable[list[SlotLease]]:
        by_store: dict[int, list[SlotLease]] = {}
        for lease in leases:
            by_store.setdefault(id(lease.store), []).append(lease)
        return by_store.values()

    def _renew(self, leases: Sequence[SlotLease], ttl: float) -> list[bool | None]:
        slots = [slot for lease in leases for slot in lease.held]
        are_ours = iter(leases[0].store.renew(slots, ttl=ttl))
        each = [list(itertools.islice(are_ours, len(lease.held))) for lease in leases]
        return [None if None in some else all(some) for some in each]

    def _release(self, leases: Sequence[SlotLease]) -> bool:
        leases[0].store.leave([slot for lease in leases for slot in lease.held])
        return True
