"""Large submissions to one Redis: one script for all of it would keep others waiting for seconds.

    1  stage   each step is kept on the server, checked as the one script checks it; it expires
    2  commit  one small script: from here on all of it will be true
    3  carry   the steps are carried out one by one, by the sender or else by any worker

docs/explanation/redis-protocol.md has the crash points.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from machinery_py.backends.redis.documents import Changes, new_state
from machinery_py.backends.redis.scripts import CONSTANTS as STATES
from machinery_py.bounds import STEP_BYTES, STEP_ITEMS, TOKEN_LIFE, pieces
from machinery_py.brokers.base import Message, size_of_message
from machinery_py.brokers.redis import scripts
from machinery_py.brokers.redis.messages import Queues, full, packed_batch, packed_limits
from machinery_py.brokers.redis.scripts import CONSTANTS as MESSAGES
from machinery_py.connections.redis.client import RedisDriver, raw
from machinery_py.connections.redis.errors import log_spoilt, spoilt
from machinery_py.connections.redis.keys import STAGED, TOKENS, queue_keys
from machinery_py.connections.redis.scripts import Folder, pack
from machinery_py.errors import BrokerUnavailable, MachineryError, PublishUnknown
from machinery_py.stores.base import Submission
from machinery_py.tasks.signature import new_uuid
from machinery_py.tasks.states import TaskState, size_of_state

STAGED_AGE = 5_000_000  # µs; by then the sender is dead or in trouble, and a worker goes on
PATIENCE = 0.5  # seconds that a worker carries out steps at once

_lua = Folder("stores/lua", MESSAGES | STATES, away=BrokerUnavailable)

STAGE = _lua.script("stage", "publishing", TOKEN_LIFE=TOKEN_LIFE)
COMMIT = _lua.script("commit", "publishing", TOKEN_LIFE=TOKEN_LIFE)
CARRY = _lua.script("carry", "carrying out a submission")


class StagedSteps:
    """The steps of a store's large submissions. May be used from any thread.

    Attributes:
        most: messages that are submitted without steps; bounds.py has how many bytes.
    """

    def __init__(self, driver: RedisDriver, seconds: int) -> None:
        self._driver = driver
        self._seconds = seconds  # that finished states are kept
        self.most = STEP_ITEMS
        self._left = ""  # the submission of another that `carry_left` goes on with

    def wants(self, messages: Sequence[Message]) -> bool:
        """Return whether so many, two at least, are to be submitted in steps."""
        return len(messages) > self.most or sum(map(size_of_message, messages)) > STEP_BYTES

    def submit(self, submission: Submission, *, plain: bool = False) -> bool:
        """Submit, as Store.submit. `plain`: plain.lua can take it."""
        # Riders know a repeat by their records, and their token may be any text.
        token = new_uuid("") if submission.riders else submission.token
        states = submission.states
        keys = Queues([one.queue for one in submission.limits]).keys
        limits = packed_limits(submission.limits, keys)
        if limits:
            self._check_room(submission, limits, keys)
        count = self.stage(
            token, submission.messages, states, replay=submission.replay, plain=plain
        )
        if count:
            change = Changes(self._driver.clock.now(), self._seconds)
            if submission.groups or submission.riders:
                change.add(
                    key=f"submit {token}", groups=submission.groups, riders=submission.riders
                )
            values = (self._driver.now(), self._seconds, token, count, limits, keys)
            with self._dropping_refused(token):
                answer = self._driver.run(COMMIT, *values, *change.packed(), lost=PublishUnknown)
                if isinstance(answer, bytes):
                    raise full(answer, submission.limits, keys)
            if answer is not None:
                self._drop(token)
                return False
        self.carry_out(token)
        return True

    def _check_room(
        self,
        submission: Submission,
        limits: Sequence[tuple[int, int]],
        keys: Sequence[tuple[str, str]],
    ) -> None:
        """Raise QueueFull before anything is staged: who waits for room asks many times."""
        if not self._driver.ask(
            b"EXISTS", TOKENS + submission.token.encode(), doing=scripts.PUT.doing
        ):
            answer = self._driver.run(scripts.PUT, self._driver.now(), "", limits, keys, ())
            if isinstance(answer, bytes):
                raise full(answer, submission.limits, keys)

    def stage(
        self,
        token: str,
        messages: Sequence[Message],
        states: Sequence[TaskState],
        *,
        replay: bool = False,
        plain: bool = False,
    ) -> int:
        """Keep all steps on the server, and return their number; 0 if they were committed before.

        Raises:
            PublishRefused: nothing is kept, or it expires.
        """
        count = 0
        with self._dropping_refused(token):
            for some_messages, some_states in _divided(messages, states):
                if plain and some_messages and some_states:
                    kept = self._stage_plain(token, str(count), some_messages, some_states)
                else:
                    change = Changes(self._driver.clock.now(), self._seconds)
                    if some_states:
                        change.add(key=f"submit {token}", states=some_states, force=replay)
                    step = (token, str(count), *packed_batch(some_messages), *change.packed())
                    kept = self._driver.run(STAGE, self._driver.now(), self._seconds, *step)
                if not kept:
                    return 0
                count += 1
        return count

    def _stage_plain(
        self, token: str, number: str, messages: Sequence[Message], states: Sequence[TaskState]
    ) -> bool:
        now, text = self._driver.clock.now(), self._driver.now()
        queue, uuids = queue_keys(messages[0].queue), [one.task_uuid for one in states]
        items = [raw(value) for one in states for value in new_state(one, now, self._seconds)]
        items += [raw(message.body) for message in messages]
        step = pack((text, self._seconds, token, number, queue, len(states), items))
        return bool(self._driver.run(STAGE, text, token, number, queue, uuids, more=[step]))

    @contextlib.contextmanager
    def _dropping_refused(self, token: str) -> Iterator[None]:
        """Make room if the server refuses a step, or all of them; not if a reply was lost."""
        try:
            yield
        except MachineryError as error:
            if not isinstance(error, (ConnectionError, PublishUnknown)):
                self._drop(token)
            raise

    def _drop(self, token: str) -> None:
        self._driver.ask(b"DEL", STAGED + token.encode(), doing="publishing")

    def carry_out(self, token: str) -> None:
        """Carry out all steps that are left of a committed submission.

        Raises:
            PublishUnknown: the next step is not possible now; a worker goes on when it is.
        """
        problem, failure = "", None
        try:
            while (step := self._carry(token)) is not None:
                if step[1]:
                    problem = str(spoilt(step[1], f"Redis: {CARRY.doing}"))
                    break
        except MachineryError as error:
            problem, failure = str(error), error
        if problem:
            raise PublishUnknown(
                f"it is accepted, and not all of it is on its queues: {problem} "
                "(a worker goes on as soon as it can)"
            ) from failure

    def carry_left(self) -> bool:
        """Go on with what others have left, for a moment; return whether more is left."""
        end = time.monotonic() + PATIENCE
        while (step := self._carry(self._left)) is not None:
            self._left, problem = step
            if problem:
                log_spoilt([problem.encode()], doing=CARRY.doing)
                break
            if time.monotonic() > end:
                return True
        self._left = ""
        return False

    def _carry(self, token: str) -> tuple[str, str] | None:
        """Carry out one step; return its token, and what keeps it from that; None: none is left."""
        reply = self._driver.run(CARRY, self._driver.now(), token, STAGED_AGE)
        if reply is None:
            return None
        to_wake, token_then, problem = reply
        self._driver.unblock(to_wake)
        return token_then.decode(), problem.decode(errors="replace")


def _divided(
    messages: Sequence[Message], states: Sequence[TaskState]
) -> Iterator[tuple[Sequence[Message], Sequence[TaskState]]]:
    """Yield the steps; a message and its state, which have the same place, are in the same one."""
    of_states = list(map(size_of_state, states))

    def size_at(place: int) -> int:
        size = len(messages[place].body)
        return size + of_states[place] if place < len(states) else size

    for places in pieces(range(len(messages)), size_at, most=STEP_ITEMS):
        part = slice(places[0], places[-1] + 1)
        yield messages[part], states[part]
    for places in pieces(range(len(messages), len(states)), of_states.__getitem__, most=STEP_ITEMS):
        yield (), states[places[0] : places[-1] + 1]
