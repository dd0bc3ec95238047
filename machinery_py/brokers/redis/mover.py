"""Due messages: how they come from Go's delayed set to their queues.

A claim that leaves something due is followed by one with a move in front of it, in the same packet,
of as many messages as it may claim. So a hundred thousand that are due at once do not pile up
before a message that is sent now. House-keeping moves as well, to lists in which few wait; what has
been due for MOVE_PATIENCE does not wait for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from machinery_py.brokers.redis import scripts
from machinery_py.brokers.redis.messages import Packed, Queues, head_of, packed_go
from machinery_py.connections.redis.client import RedisDriver, raw
from machinery_py.connections.redis.keys import queue_keys
from machinery_py.connections.redis.scripts import pack
from machinery_py.errors import NameRefused
from machinery_py.names import REASON, check_queue
from machinery_py.texts import get_logger
from machinery_py.wire.decode import known_fields

logger = get_logger(__name__)

FIRST_QUEUE = "machinery_tasks"  # of messages that name none
MOVE = 500  # messages that are moved in one step
ANY = 2**31  # as `room`: a list takes more, however many wait in it


class DueMover:
    """Mover of the due messages. For all threads."""

    def __init__(self, driver: RedisDriver) -> None:
        self._driver = driver

    def packet(self, most: int) -> bytes:
        """Encode the call of a step, whose reply `finish` takes."""
        return self._driver.packed_script(scripts.DUE, pack((self._driver.now(), most, ANY)))

    def step(self, most: int = MOVE, *, room: int = ANY) -> int:
        """Look at the first `most` that are due, and move those whose list holds less than `room`.

        Returns how many have gone from Go's set.

        Raises:
            MachineryError: some may have been moved.
        """
        return self.finish(self._driver.run(scripts.DUE, self._driver.now(), most, room))

    def finish(self, reply: Any) -> int:
        """Read the reply of a step, and move what it has left to Python; returns as `step`."""
        to_wake, moved, others = reply
        self._driver.unblock(to_wake)
        if others:
            try:
                self._move(others)
            except NameRefused:
                for body in others:
                    try:
                        self._move([body])
                    except NameRefused as error:
                        self._bury(body, str(error))
        return int(moved) + len(others)

    def _move(self, bodies: Sequence[bytes]) -> None:
        queues = Queues()
        rows: list[Packed] = []
        for body in bodies:
            said = known_fields(body)
            # Bytes that name no queue come to one that workers look at, and are buried there.
            queue = (said.RoutingKey if said else "") or FIRST_QUEUE
            check_queue(queue)
            rows.append(packed_go(body, said, queues.place(queue)))
        values = (self._driver.now(), queues.keys, rows)
        self._driver.unblock(self._driver.run(scripts.MOVE, *values))

    def _bury(self, body: bytes, error: str) -> None:
        """Bring a message with an impossible queue to the dead letters of FIRST_QUEUE."""
        logger.error(
            "a delayed message goes to the dead letters of %r: %s: %s", FIRST_QUEUE, REASON, error
        )
        head = head_of("", "", REASON, error)
        keys = queue_keys(FIRST_QUEUE)
        self._driver.run(scripts.BURY_DELAYED, self._driver.now(), keys, raw(body), head)
