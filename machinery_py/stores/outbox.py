"""Settlement where the messages are in one store and the states in another.

The order of the steps is what makes it safe; each may be the last one before a crash:

    1  backend: the new state, the group arrivals, and an outbox of what is to be published, if the epoch is still ours
    2  broker:  the messages of the outbox, with UUIDs that were fixed in step 1
    3  backend: the outbox is cleared, if it is still the one that was published
    4  broker:  the delivery is acknowledged

    crash after   what there is                    who goes on
    1             final state, full outbox         the redelivery: `begin` says finished, steps 2 to 4, the task is not run again
    2             final state, full outbox         the same; the messages are published twice with the same UUIDs, and `begin`
                                                   lets one of each be finished
    3             final state, empty outbox        the redelivery is acknowledged

A second message of a task is no redelivery: it is acknowledged, and the outbox is left to whoever settled the first.
An outbox whose delivery never comes back (its broker lost it) is sent by `tend` when it is old.

In step 2 the broker may refuse a message. What it refuses for good (too large, a queue that it does not give) fails in its place:

    2a  broker:  the message is a dead letter
    2b  backend: its task is FAILURE, with the error callbacks in an outbox of its own; members of chords behind it are failed
    2c           steps 2 and 3 for that outbox; then the others go on

    crash after 2a or 2b: the outbox of step 1 is still there; whoever comes for it does 2a again, and 2b is ALREADY

What a full queue refuses waits in the session: outbox_session.py.

Limits: with a backend that has no conditional changes (its features say so) callbacks are sent at least once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from machinery_py.backends.base import (
    ALREADY,
    FENCED,
    SETTLED,
    Amendment,
    Backend,
    Change,
    Verdict,
    outbox_of,
)
from machinery_py.brokers.base import Broker, Message
from machinery_py.clock import Clock
from machinery_py.connections.recent_tokens import RecentTokens
from machinery_py.errors import MachineryError, PublishRefused, PublishUnknown
from machinery_py.stores.base import AWAY, Firing, Session, Store, Submission, change_of
from machinery_py.stores.outbox_session import Outbox, Posted, TwoSession
from machinery_py.tasks.states import TaskState
from machinery_py.texts import get_logger

logger = get_logger(__name__)

OUTBOX_AGE = 5.0  # seconds; by then its publisher is dead or in trouble; overtaking it does no harm

_pack = msgspec.json.Encoder().encode
_unpack = msgspec.json.Decoder(Message).decode


class TwoStores(Store):
    """A broker and a backend that know nothing of each other."""

    def __init__(self, broker: Broker, backend: Backend, clock: Clock) -> None:
        self.broker = broker
        self.backend = backend
        self.outbox = outbox_of(backend)
        self.clock = clock
        self._swept = clock.monotonic()
        self._replayed = RecentTokens(clock)
        self._buried: set[tuple[str, bytes]] = set()  # refused for good, and not failed yet
        self.parked: set[str] = set()  # outboxes that a session of this process waits to publish

    def submit(self, submission: Submission) -> None:
        before = self._finished(submission)
        made = self._prepare(submission)
        try:
            self.broker.put(submission.messages, token=submission.token)
        except PublishRefused:
            # Only what this very call has made: after a lost reply the first call may have been carried out.
            for uuid in made:
                if uuid not in before:
                    self.backend.purge_state(uuid)
            self.backend.apply(
                [
                    Change(key=uuid, states=(before[uuid],), force=True)
                    for uuid in made
                    if uuid in before
                ]
            )
            self._replayed.forget(submission.token)
            raise

    def _finished(self, submission: Submission) -> dict[str, TaskState]:
        """For a replay: the states that it is to replace."""
        if not submission.replay:
            return {}
        return self.backend.get_states([state.task_uuid for state in submission.states])

    def _prepare(self, submission: Submission) -> list[str]:
        """Write states and groups, before a worker can see the messages; which states are ours alone."""
        if submission.replay and not self._replayed.add(submission.token):
            return []  # carried out before, and the task may have ended since
        changes = [
            Change(
                key=state.task_uuid,
                mark=f"submit {submission.token}",
                states=(state,),
                force=submission.replay,
            )
            for state in submission.states
        ]
        if submission.groups:
            changes.append(Change(key=f"submit {submission.token}", groups=submission.groups))
        verdicts = self.backend.apply(changes)
        return [
            change.key
            for change, verdict in zip(changes, verdicts, strict=True)
            if change.states and verdict is SETTLED
        ]

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return TwoSession(self, self.broker.consume(queues, worker=worker))

    def fire(self, firing: Firing) -> bool:
        change = change_of(firing, [_pack(message) for message in firing.send])
        if self.backend.apply([change]) != [SETTLED]:
            return False
        self.publish([Outbox(change.key, change.outbox)])  # what finds no room is left to `tend`
        return True

    def amend(self, amendment: Amendment, send: Sequence[Message] = ()) -> bool:
        """A death before step 2 or 3 leaves the outbox: `tend` publishes it, with the same UUIDs."""
        amendment = msgspec.structs.replace(amendment, outbox=[_pack(message) for message in send])
        if not self.backend.amend(amendment):
            return False
        self._publish_all(amendment.outbox_key, amendment.outbox)
        return True

    def publish_left(self, key: str) -> None:
        self._publish_all(key, self.outbox.outboxes([key])[0])

    def _publish_all(self, key: str, bodies: Sequence[bytes]) -> None:
        if (refused := self.publish([Outbox(key, bodies)]).refused) is not None:
            raise refused

    def publish(self, outboxes: Sequence[Outbox]) -> Posted:
        """Steps 2 and 3. An outbox of which something found no room is kept.

        Raises:
            BrokerUnavailable, BackendUnavailable, PublishUnknown: some of it may be done.
        """
        filled = [one for one in outboxes if one.bodies]
        if not filled:
            return Posted()
        sent = [(one.key, one.home, _unpack(body)) for one in filled for body in one.bodies]
        posted = self.post(sent)
        done = [(one.key, one.bodies) for one in filled if one.key not in posted.left]
        self.outbox.clear_outbox(done)
        return posted

    def put(self, messages: Sequence[Message]) -> None:
        self.broker.put(messages, token="")

    def post(self, messages: Sequence[tuple[str, str, Message]]) -> Posted:
        """Step 2, for messages with the key of their outbox and their home."""
        posted = Posted()
        try:
            self.put([message for _, _, message in messages])
        except (PublishRefused, PublishUnknown) as error:
            if not error.permanent and error.left is None:
                raise
            posted.refused = error
            places = range(len(messages)) if error.left is None else sorted(error.left)
            for key, home, message in [messages[place] for place in places]:
                found = self._post_alone(message, home, posted) if error.permanent else [message]
                if found:
                    posted.left.setdefault(key, []).extend(found)
        return posted

    def _post_alone(self, message: Message, home: str, posted: Posted) -> Sequence[Message]:
        """Publish one message; return what finds no room: the message, or what follows from its failure."""
        try:
            self.put([message])
        except (PublishRefused, PublishUnknown) as error:
            if error.permanent:
                posted.refused = error
                return self._fail(message, error, home)
            if error.left is None:
                raise
            return [message]
        return ()

    def _fail(self, message: Message, error: Exception, home: str) -> Sequence[Message]:
        """Steps 2a to 2c; what of it finds no room."""
        if self.refusal is None:
            raise error
        refusal, name = self.refusal(message, error), (message.uuid, message.body)
        if name not in self._buried:
            self.give_up(message, error, home or refusal.queue)
            self._buried.add(name)  # a backend that is away must not make a letter of each try
        change = Change(
            key=message.uuid,
            mark=f"refused {refusal.states[0].run}",
            states=refusal.states,
            groups=refusal.groups,
            arrivals=refusal.arrivals,
            outbox=[_pack(one) for one in refusal.send],
        )
        verdict = self._apply_failure(change)
        self._buried.discard(name)
        outbox = change.outbox if verdict is SETTLED else ()
        if verdict is ALREADY:
            [outbox] = self.outbox.outboxes([change.key])
        left = self.publish([Outbox(change.key, outbox, home)]).left
        return [one for some in left.values() for one in some]

    def _apply_failure(self, change: Change) -> Verdict:
        """Without the message, if that is what the backend refuses, too."""
        state, *others = change.states
        bare = msgspec.structs.replace(
            change, states=(msgspec.structs.replace(state, message=b""), *others)
        )
        for attempt in (change, bare):
            try:
                return self.backend.apply([attempt])[0]
            except MachineryError as error:
                if not error.permanent and isinstance(error, AWAY):
                    raise
                logger.debug("the failure of task %s cannot be stored: %s", change.key, error)
        logger.error(
            "task %s has failed, and that cannot be stored",
            change.key,
            extra={"task_uuid": change.key},
        )
        return FENCED

    def tend(self) -> float:
        if self.clock.monotonic() - self._swept >= OUTBOX_AGE:
            self._swept = self.clock.monotonic()
            old = self.outbox.unsent(100, older_than=OUTBOX_AGE)
            self.publish([Outbox(key, bodies) for key, bodies in old if key not in self.parked])
        return min(self.broker.tend(), self.backend.tend(), OUTBOX_AGE)
