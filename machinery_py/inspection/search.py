"""Looking through the states of tasks, the last changed first.

It goes by steps of the backend, each of which holds up nobody; between two of them the time is
looked at. A task that changes meanwhile moves to the front, and is not met again.
"""

from __future__ import annotations

import base64
import datetime as dt
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from machinery_py.app import Application
from machinery_py.backends.listings import Listing, Place
from machinery_py.clock import LONGEST, Seconds, micros, moment_of, seconds_of
from machinery_py.errors import ArgumentError
from machinery_py.inspection.calls import kept_call
from machinery_py.inspection.reports import ErrorGroup, ErrorSummary, TaskPage
from machinery_py.tasks.states import State, TaskState, state_named
from machinery_py.texts import quoted

STEP = 500  # finds of a step that are to be looked at here
UNTIMED = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """The tasks that are looked for; an empty field stands for all."""

    states: Sequence[State] = ()
    name: str = ""
    queue: str = ""
    worker: str = ""
    text: str = ""
    since: dt.datetime | None = None
    until: dt.datetime | None = None

    @property
    def is_plain(self) -> bool:
        """Return whether the backend can tell all of it."""
        return not (self.queue or self.worker or self.text)

    def fits(self, state: TaskState) -> bool:
        """Return whether it fits a state in which the backend sees nothing amiss."""
        return (
            self.queue in ("", state.queue)
            and self.worker in ("", state.worker)
            and (not self.text or any(self.text in text.casefold() for text in _texts(state)))
        )


def _texts(state: TaskState) -> Iterator[str]:
    yield state.error
    yield state.error_type
    signature = kept_call(state)
    for arg in (*state.results, *(signature.args if signature is not None else ())):
        yield f"{arg.name} {arg.value}"


def states_of(given: str | State | Sequence[str | State] | None) -> Sequence[State]:
    """Return the states that a caller has named.

    Raises:
        ValueError: there is no such state.
    """
    words = [given] if isinstance(given, str) else given or ()
    return [one if isinstance(one, State) else state_named(one) for one in words]


def moment(app: Application, what: str, given: dt.datetime | Seconds | None) -> dt.datetime | None:
    """Return the moment that is meant by so many seconds ago.

    Args:
        what: the parameter, for the error.

    Raises:
        ArgumentError: it has no time zone, or is neither a moment nor a length.
    """
    if given is None:
        return None
    if isinstance(given, dt.datetime):
        if given.tzinfo is None:
            raise ArgumentError(f"{given!r} has no time zone (give an aware datetime, or seconds)")
        return given
    try:
        return app.now() - dt.timedelta(seconds=seconds_of(what, given, most=LONGEST))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{error}, or an aware datetime") from None


def search(
    app: Application, wanted: Filter, *, limit: int, cursor: str = "", within: float = UNTIMED
) -> TaskPage:
    """Return the first tasks behind the cursor, as many as are found in that time."""
    found: list[TaskState] = []
    looked, limit = 0, max(1, limit)
    place = _place_of(cursor) if cursor else None
    for listing in _walk(app, wanted, place, limit=limit, within=within):
        looked += listing.looked
        for index, (at, state) in enumerate(listing.found, 1):
            if wanted.fits(state):
                found.append(state)
            if len(found) >= limit:
                end = at if index < len(listing.found) else listing.end
                return TaskPage(tasks=found, cursor=_cursor_of(end), looked=looked)
        place = listing.end
    return TaskPage(tasks=found, cursor=_cursor_of(place), looked=looked)


def summary(app: Application, wanted: Filter, *, within: float) -> ErrorSummary:
    """Group the failures that are found in that time."""
    groups: dict[tuple[str, str], ErrorGroup] = {}
    count, place = 0, None
    for listing in _walk(app, wanted, None, limit=STEP, within=within):
        for (at, _), state in listing.found:
            if wanted.fits(state):
                count += 1
                key = state.task_name, state.error_type
                groups[key] = _grown(groups.get(key), state, state.finished_at or moment_of(at))
        place = listing.end
    ordered = sorted(groups.values(), key=lambda one: one.count, reverse=True)
    return ErrorSummary(groups=ordered, looked=count, complete=place is None)


def _grown(group: ErrorGroup | None, state: TaskState, failed_at: dt.datetime) -> ErrorGroup:
    """Return the group with one more failure; the latest comes first."""
    if group is not None:
        first = min(group.first, failed_at)
        return msgspec.structs.replace(group, count=group.count + 1, first=first)
    return ErrorGroup(
        name=state.task_name,
        error_type=state.error_type,
        count=1,
        first=failed_at,
        last=failed_at,
        uuid=state.task_uuid,
        error=state.error,
        queue=state.queue,
    )


def _walk(
    app: Application, wanted: Filter, place: Place | None, *, limit: int, within: float
) -> Iterator[Listing]:
    """Yield one stretch after the other, until the time is up."""
    backend, clock = app.store.backend, app.clock
    deadline = clock.monotonic() + within
    if place is None and wanted.until is not None:
        place = micros(wanted.until) + 1, ""
    while True:
        listing = backend.list_states(
            states=wanted.states,
            name=wanted.name,
            since=wanted.since,
            after=place,
            limit=limit if wanted.is_plain else max(limit, STEP),
        )
        yield listing
        place = listing.end
        if place is None or clock.monotonic() >= deadline:
            return


def _cursor_of(place: Place | None) -> str:
    if place is None:
        return ""
    return base64.urlsafe_b64encode(f"{place[0]} {place[1]}".encode()).decode()


def _place_of(cursor: str) -> Place:
    try:
        number, space, uuid = base64.urlsafe_b64decode(cursor).decode().partition(" ")
        if space and number.isdigit() and len(number) < 18:
            return int(number), uuid
    except ValueError:
        pass
    raise ArgumentError(f"no cursor: {quoted(cursor)} (give TaskPage.cursor as it came)")
