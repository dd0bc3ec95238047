"""Groups whose members are run by Go workers as well: those do not say that a member is in, they only write its state.

A Go worker that ends the last member finds all the others by their states, and settles the group. When the last one is ours,
or a member failed there (of which Go tells nobody), somebody has to look: so a worker remembers the groups of its members,
and reads the states of the others. Each look goes on where the one before met a member that is not over, so a group of any
length costs one state a member, and one more each time.

A worker that dies forgets them. So the store lists the groups that stay incomplete, where it can (`partial_groups`), and from
time to time one of the workers takes a look at each.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence

from machinery_py.backends.base import Backend, Change
from machinery_py.tasks.states import Arrival, State

SOON = 0.05  # seconds between two looks at a group that has changed
AGAIN = 5.0  # seconds between two looks at one that has not
AHEAD = 64  # states read at once
MOST = 10_000  # groups that are remembered
ADOPTED = 100  # groups of others that are looked at together


class _Group:
    __slots__ = ("adopted", "arrival", "at", "full_at", "members", "place")

    def __init__(self, arrival: Arrival, at: float, *, adopted: bool = False) -> None:
        self.arrival = arrival  # of any member: what is known of the group
        self.adopted = adopted  # no member of it was run here: one look is enough
        self.at = at  # the next look
        self.members: Sequence[str] = ()
        self.place = 0  # the members before it are over
        self.full_at = 0.0  # all were seen to be over; 0: not yet


class GroupWatch:
    """The groups of which this worker has ended a member. `note` may be called from any thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._foreign = backend.features.foreign
        self._lock = threading.Lock()
        self._groups: collections.OrderedDict[str, _Group] = collections.OrderedDict()

    def note(self, arrivals: Sequence[Arrival]) -> None:
        """These members are in."""
        if not self._foreign:
            return
        soon = time.monotonic() + SOON
        with self._lock:
            for arrival in arrivals:
                if not arrival.callback:
                    continue
                group = self._groups.get(arrival.group_uuid)
                if group is None:
                    self._groups[arrival.group_uuid] = _Group(arrival, soon)
                    if len(self._groups) > MOST:
                        self._groups.popitem(last=False)
                else:
                    group.at, group.adopted = min(group.at, soon), False

    def adopt(self) -> None:
        """Take a look at groups that others may have left behind."""
        found = self._backend.partial_groups(ADOPTED) if self._foreign else ()
        now = time.monotonic()
        with self._lock:
            for arrival in found:
                self._groups.setdefault(arrival.group_uuid, _Group(arrival, now, adopted=True))

    def due_in(self) -> float:
        """Seconds until the next look; infinite when nothing is watched."""
        with self._lock:
            first = min((group.at for group in self._groups.values()), default=float("inf"))
        return max(0.0, first - time.monotonic())

    def look(self) -> bool:
        """Look at the groups whose time has come. True: members of others were found that end a group."""
        now = time.monotonic()
        with self._lock:
            due = [group for group in self._groups.values() if group.at <= now]
            for group in due:
                group.at = now + AGAIN
        changes = [change for group in due if (change := self._look_at(group)) is not None]
        with self._lock:
            for group in due:
                if group.adopted and not group.full_at:
                    self._groups.pop(group.arrival.group_uuid, None)
        if changes:
            self._backend.apply(changes)
            for change in changes:
                self._forget(change.key)
        return bool(changes)

    def _look_at(self, group: _Group) -> Change | None:
        uuid = group.arrival.group_uuid
        meta = self._backend.get_group(uuid)
        if meta is None:
            self._forget(uuid)
            self._backend.drop_partial([uuid])
            return None
        group.members = group.members or meta.task_uuids
        if not group.members:
            return None  # Go names the members of a group to some stores only; they come to be known as they end
        found = self._arrived(group)
        if (
            found is not None
            and found.arrivals[0].ok
            and not meta.chord_triggered
            and self._is_left_to_go(group)
        ):
            return None
        if meta.chord_triggered and (found is None or found.arrivals[0].ok):
            self._forget(
                uuid
            )  # Go has settled it; with a failed member it would have set its flag, and told nobody
            if group.adopted:
                self._backend.drop_partial([uuid])
            return None
        return found

    def _is_left_to_go(self, group: _Group) -> bool:
        """Whether Go still has time to settle it, where it would do that a second time after us."""
        now = time.monotonic()
        group.full_at = group.full_at or now
        until = group.full_at + self._backend.features.foreign_time
        if now >= until:
            return False
        with self._lock:
            group.at = until
        return True

    def _arrived(self, group: _Group) -> Change | None:
        """What has come to be known: that all are over, or that one has failed."""
        while group.place < len(group.members):
            ahead = group.members[group.place : group.place + AHEAD]
            states = self._backend.member_states(group.arrival.group_uuid, ahead)
            for member in ahead:
                state = states.get(member)
                if state is None or not state.is_finished:
                    return None
                if state.state is State.FAILURE:
                    return _change(group, [member], ok=False)
                group.place += 1
        return _change(group, group.members, ok=True)

    def _forget(self, uuid: str) -> None:
        with self._lock:
            self._groups.pop(uuid, None)


def _change(group: _Group, members: Sequence[str], *, ok: bool) -> Change:
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
