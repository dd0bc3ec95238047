"""Sending where the messages are in one store and the states in another.

In turn, with any broker:

    1  backend: PENDING, and groups
    2  broker:  the messages

At once, with a broker that stores messages while its caller goes on (`PutsAhead`): the message is
written to the broker, step 1 is made, and then its confirm is waited for. A send takes as long as
the slower store, not as long as both.

A worker may get such a message before its PENDING is stored. It does with it what it does with one
that a Go program has sent without a state. PENDING may follow no other state, so that `advance`
drops it when it comes late.

    the sender dies       in turn                        at once
    before 1 and 2        nothing                        nothing
    one of them is done   PENDING, which nobody runs     that, or a message without PENDING: it runs
    behind both           the task runs                  the task runs

    what fails            in turn                        at once
    1                     refused: no message            unknown: the message is stored. A repeat
                                                         with the token writes PENDING alone. If the
                                                         broker refuses, too: refused
    2 is refused          PENDING is taken back          the same: no worker has had the message
    2 is unknown          unknown: PENDING stays         the same

Invariants: a send that returns has left a message and a state. A refused one has left no message.

A backend that is away, or full, shall refuse sends, and not make them unknown. So what is at once
is limited to where step 1 is known to work: see `_may_overlap`.
"""

from __future__ import annotations

import math
from typing import Final

from machinery_py.backends.base import SETTLED, Backend, Change, OutboxBackend
from machinery_py.brokers.base import Broker
from machinery_py.brokers.putting import PutsAhead
from machinery_py.clock import Clock
from machinery_py.connections.recent_tokens import RecentTokens
from machinery_py.errors import BackendUnavailable, MachineryError, PublishRefused, PublishUnknown
from machinery_py.names import is_made
from machinery_py.stores.base import Submission
from machinery_py.stores.replays import outbox_of_replay, replace_states
from machinery_py.tasks.states import TaskState

FRESH = 1.0  # seconds that a backend is trusted for which has stored a state
SMALL = 65_536  # bytes that a state may carry; a backend may refuse larger ones


class Submitter:
    """Sends submissions to a broker and a backend. May be used from any thread."""

    def __init__(
        self, broker: Broker, backend: Backend, outbox: OutboxBackend, clock: Clock
    ) -> None:
        self._broker = broker
        self._backend = backend
        self._outbox = outbox
        self._clock = clock
        self._stored_at = -math.inf  # when the backend last took a state
        self.replayed: Final = RecentTokens(clock)

    def submit(self, submission: Submission) -> None:
        """Send, as Store.submit."""
        broker = self._broker
        if submission.replay:
            self._replay(submission)
        elif isinstance(broker, PutsAhead) and self._may_overlap(submission):
            self._send_at_once(submission, broker)
        else:
            made = self._store_states(submission)
            try:
                submission.put(broker)
            except PublishRefused:
                self._take_back(made)
                raise

    def _may_overlap(self, submission: Submission) -> bool:
        """Whether it is one message, and the backend will not refuse its states."""
        return (
            len(submission.messages) == 1
            and not submission.groups
            and not submission.limits
            and self._clock.monotonic() - self._stored_at < FRESH
            # A UUID that somebody chose may be the name of something else in the backend.
            and all(
                is_made(state.task_uuid) and len(state.message) <= SMALL
                for state in submission.states
            )
        )

    def _send_at_once(self, submission: Submission, broker: PutsAhead) -> None:
        failure: MachineryError | None = None
        made: set[str] = set()
        with broker.begin_put(submission.messages, token=submission.token) as putting:
            try:
                made = self._store_states(submission)
            except MachineryError as error:
                failure = error
            try:
                putting.wait()
            except PublishRefused:
                if failure is not None:
                    raise failure from None
                self._take_back(made)
                raise
        if failure is not None:
            unknown = PublishUnknown(f"the message is stored, and its state is not: {failure}")
            unknown.permanent = not isinstance(failure, BackendUnavailable)
            raise unknown from failure

    def _store_states(self, submission: Submission) -> set[str]:
        """Write states and groups; return the tasks whose states this call has written."""
        mark = f"submit {submission.token}"
        changes = [
            Change(key=state.task_uuid, mark=mark, states=(state,)) for state in submission.states
        ]
        groups = [Change(key=mark, groups=submission.groups)] if submission.groups else []
        now = self._clock.monotonic()
        try:
            verdicts = self._backend.apply([*changes, *groups])
        except BaseException:
            self._stored_at = -math.inf
            raise
        self._stored_at = now
        pairs = zip(changes, verdicts, strict=False)
        return {change.key for change, verdict in pairs if verdict is SETTLED}

    def _take_back(self, made: set[str]) -> None:
        """Undo only this call's writes: an earlier call may have been carried out."""
        for uuid in made:
            self._backend.purge_state(uuid)

    def _replay(self, submission: Submission) -> None:
        replaced = [one.task_uuid for one in submission.states]
        before = self._backend.get_states(replaced) if replaced else dict[str, TaskState]()
        boxes = [outbox_of_replay(submission)]
        made = set[str]()
        if self.replayed.add(submission.token):  # else the task may have ended since
            made = replace_states(self._backend, submission)
        try:
            submission.put(self._broker)
        except PublishRefused:
            self._outbox.clear_outbox(boxes)
            self._take_back(made - before.keys())
            undo = made & before.keys()
            self._backend.apply(
                [Change(key=one, states=(before[one],), force=True) for one in undo]
            )
            self.replayed.forget(submission.token)
            raise
        self._outbox.clear_outbox(boxes)
