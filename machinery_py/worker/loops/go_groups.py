"""Polling of groups whose members are run by Go workers as well.

A Go worker writes the state of a member, and no arrival. The worker that ends the last member finds
the others by their states, and settles the group. When we ended the last one, or a member failed in
Go (which Go reports nowhere), nobody else settles it: so a worker remembers the groups of its
members and reads the states of the others, once no member has ended here for a moment. Each poll
goes on at the member that was not over in the poll before: a group costs one read a member, and one
more a poll.

A worker that dies forgets its groups. So the store lists the groups that stay incomplete, where it
can (`partial_groups`), and from time to time one of the workers polls each of them.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from machinery_py.backends.base import Backend, Change
from machinery_py.bounds import STEP_ITEMS, in_steps
from machinery_py.errors import DecodeError
from machinery_py.tasks.signature import HEADER_ON_FAILURE
from machinery_py.tasks.states import Arrival, State
from machinery_py.tasks.workflow import is_tolerant
from machinery_py.wire.signatures import decode_signature

SOON = 0.05  # seconds from a change of a group to its next poll, and as much for 5,000 members
AGAIN = 5.0  # seconds between two polls of a group that has not changed, and one for 1,000 members
AHEAD = 64  # states read at once
MOST = 10_000  # groups that are remembered
_ON_FAILURE = HEADER_ON_FAILURE.encode()
ADOPTED = 100  # groups of other workers that are polled together


@dataclass(slots=True, eq=False)
class _PolledGroup:
    arrival: Arrival  # of any member: what is known of the group
    at: float  # the next poll
    by: float  # and when it must be at the latest, though members end here all the time
    adopted: bool = False  # no member of it was run here: one poll is enough
    members: Sequence[str] = ()
    place: int = 0  # the members before it are over
    full_at: float = 0.0  # all were seen to be over; 0: not yet
    lacks: bool = False  # a member before `place` failed, which the chord tolerates

    @property
    def tolerant(self) -> bool:
        """Return whether its chord goes on without members that failed."""
        if _ON_FAILURE not in self.arrival.callback:
            return False  # as nearly always
        try:
            return is_tolerant(decode_signature(self.arrival.callback))
        except DecodeError:
            return False


class GoGroupPoller:
    """Poller of groups of which this worker has ended a member. `note` is safe in any thread.

    Attributes:
        settling: held while this worker settles groups, which reads all results of each.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.settling: Final = threading.Lock()
        self._foreign = backend.features.foreign
        self._lock = threading.Lock()
        self._groups: collections.OrderedDict[str, _PolledGroup] = collections.OrderedDict()

    def note(self, arrivals: Sequence[Arrival]) -> None:
        """Poll the groups of these members soon."""
        if not self._foreign:
            return
        now = time.monotonic()
        with self._lock:
            for arrival in arrivals:
                if not arrival.callback:
                    continue
                soon = now + SOON + _size(arrival) / 100_000
                group = self._groups.get(arrival.group_uuid)
                if group is None:
                    self._groups[arrival.group_uuid] = _PolledGroup(
                        arrival, soon, now + AGAIN + _size(arrival) / 1000
                    )
                    if len(self._groups) > MOST:
                        self._groups.popitem(last=False)
                else:
                    group.at, group.adopted = min(group.by, soon), False

    def adopt(self) -> None:
        """Poll also groups that other workers may have left behind."""
        found = self._backend.partial_groups(ADOPTED) if self._foreign else ()
        now = time.monotonic()
        with self._lock:
            for arrival in found:
                self._groups.setdefault(
                    arrival.group_uuid, _PolledGroup(arrival, now, now, adopted=True)
                )

    def due_in(self) -> float:
        """Return the seconds until the next poll; infinite without groups."""
        with self._lock:
            first = min((group.at for group in self._groups.values()), default=float("inf"))
        return max(0.0, first - time.monotonic())

    def poll(self) -> bool:
        """Poll the groups that are due. True: members run elsewhere were found that end a group."""
        now = time.monotonic()
        with self._lock:
            due = [group for group in self._groups.values() if group.at <= now]
            for group in due:
                group.at = now + AGAIN
                group.by = group.at + _size(group.arrival) / 1000
        changes = [change for group in due if (change := self._poll_group(group)) is not None]
        with self._lock:
            for group in due:
                if group.adopted and not group.full_at:
                    self._groups.pop(group.arrival.group_uuid, None)
        for change in changes:
            for some in in_steps(change.arrivals):
                self._backend.apply([msgspec.structs.replace(change, arrivals=some)])
        self.forget([change.key for change in changes])
        return bool(changes)

    def _poll_group(self, group: _PolledGroup) -> Change | None:
        uuid = group.arrival.group_uuid
        meta = self._backend.get_group(uuid)
        if meta is None:
            self.forget([uuid])
            self._backend.drop_partial([uuid])
            return None
        group.members = group.members or meta.task_uuids
        if not group.members:
            return None  # Go names the members to some stores only; others learn them as they end
        if len(group.members) > STEP_ITEMS and self._is_ready(uuid):
            return None  # somebody settles it right now, which takes a second
        found = self._arrived(group)
        if (
            found is not None
            and found.arrivals[0].ok
            and not meta.chord_triggered
            and self._is_left_to_go(group)
        ):
            return None
        if meta.chord_triggered and (found is None or found.arrivals[0].ok):
            # Go has settled it. With a failed member it would have set its flag, and sent nothing.
            self.forget([uuid])
            if group.adopted:
                self._backend.drop_partial([uuid])
            return None
        return found

    def _is_ready(self, uuid: str) -> bool:
        return any(one.group_uuid == uuid for one in self._backend.ready_groups(ADOPTED))

    def _is_left_to_go(self, group: _PolledGroup) -> bool:
        """Return whether Go still has time to settle it, where it would settle again after us."""
        now = time.monotonic()
        group.full_at = group.full_at or now
        until = group.full_at + self._backend.features.foreign_time
        if now >= until:
            return False
        with self._lock:
            group.at = until
        return True

    def _arrived(self, group: _PolledGroup) -> Change | None:
        """Return the arrival of all members, or of one that failed; None if neither is known."""
        count = AHEAD
        while group.place < len(group.members):
            ahead = group.members[group.place : group.place + count]
            count = STEP_ITEMS
            states = self._backend.member_results(group.arrival.group_uuid, ahead)
            for member in ahead:
                state = states.get(member)
                if state is None or not state.is_finished:
                    return None
                if state.state is State.FAILURE:
                    if not group.tolerant:
                        return _change(group, [member], ok=False)
                    group.lacks = True
                group.place += 1
        # With a failed member Go sets its flag, and sends nothing. A store settles such a group
        # only if a member arrives as failed; worker/loops/chords.py goes on all the same.
        return _change(group, group.members, ok=not group.lacks)

    def forget(self, group_uuids: Sequence[str]) -> None:
        """Poll these no more: they are settled, or gone."""
        with self._lock:
            for uuid in group_uuids:
                self._groups.pop(uuid, None)


def _size(arrival: Arrival) -> int:
    return min(max(0, arrival.total), 1_000_000)  # a message says it


def _change(group: _PolledGroup, members: Sequence[str], *, ok: bool) -> Change:
    known = group.arrival
    return Change(
        key=known.group_uuid,
        arrivals=[
            Arrival(
                group_uuid=known.group_uuid,
                task_uuid=member,
                total=len(group.members),
                ok=ok,
                callback=known.callback,
            )
            for member in members
        ],
    )
