"""Messages and holds in PostgreSQL.

A hold is a row that beats. Its file (connections/session_files.py) says to other processes of its
host whether its process lives, and which messages it ran.

Limits: what a hold ran that died on another host is known from the second run of a message on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from machinery_py.bounds import STEP_BYTES
from machinery_py.connections import session_files
from machinery_py.connections.postgresql.callers import Cells, Params
from machinery_py.connections.postgresql.client import PostgreSQLDriver
from machinery_py.connections.postgresql.listening import Ear
from machinery_py.connections.session_files import ALL, SessionState, host_file, host_folder
from machinery_py.errors import MachineryError
from machinery_py.fences import Fence
from machinery_py.rows.contract import PAGE
from machinery_py.rows.file_holds import FileHold
from machinery_py.rows.messages import (
    Claimed,
    ClaimReceipt,
    Claims,
    HoldKeeper,
    HoldReport,
    MessageQueues,
    QueueCount,
    StoredMessage,
    TopicListener,
)
from machinery_py.rows.suspects import Suspects, is_silent
from machinery_py.texts import get_logger

logger = get_logger(__name__)

FIRST = -(2**63)  # of all turns
TOUCH = 60.0  # seconds
KIND = "postgresql"  # of the files that say what consumers run

_PROMOTE = "SELECT machinery.promote(%s)"
_CLAIM = "SELECT * FROM machinery.claim(%s, %s, %b::bytea[], %s, %s, %s, %s)"
# In: queue, priority, turn and id of the place behind which they begin, since, how many, bytes.
_WAIT = """
SELECT id, queue, body, put_at, -priority, turn FROM (
    SELECT *, row_number() OVER place AS number, sum(octet_length(body)) OVER place AS bytes FROM (
        (SELECT * FROM machinery.items WHERE queue = %(queue)s AND state = 0 AND turn < 0
            AND priority <= -%(first)s AND (-priority, turn, id) > (%(first)s, %(second)s, %(id)s)
            AND put_at >= %(since)s ORDER BY priority DESC, turn, id LIMIT %(items)s)
        UNION ALL
        (SELECT * FROM machinery.items WHERE queue = %(queue)s AND state = 0 AND turn >= 0
            AND priority <= -%(first)s AND (-priority, turn, id) > (%(first)s, %(second)s, %(id)s)
            AND put_at >= %(since)s ORDER BY priority DESC, turn, id LIMIT %(items)s)
    ) AS found WINDOW place AS (ORDER BY priority DESC, turn, id)
) AS page WHERE number <= %(items)s AND (number = 1 OR bytes <= %(size)s) ORDER BY number
"""
_LATE = """
SELECT id, queue, body, put_at, due, 0 FROM (
    SELECT *, row_number() OVER place AS number, sum(octet_length(body)) OVER place AS bytes FROM (
        SELECT * FROM machinery.items WHERE state = 1 AND (due, id) > (%(first)s, %(id)s)
            AND put_at >= %(since)s ORDER BY due, id LIMIT %(items)s
    ) AS found WINDOW place AS (ORDER BY due, id)
) AS page WHERE number = 1 OR bytes <= %(size)s ORDER BY number
"""
_NEWEST = "SELECT nextval('machinery.numbers')"
_COUNTS = """
SELECT queue, state, count(*), min(put_at) FROM (
    SELECT queue, CASE state WHEN 3 THEN 0 ELSE state END AS state, put_at FROM machinery.items
) AS found GROUP BY queue, state
"""
_COUNT_WAITING = "SELECT machinery.count_waiting(%s)"

_OPEN = """
INSERT INTO machinery.holds (id, body, beat_at, lease) VALUES (%s, %s, machinery.moment(%s), %s)
"""
# Out: with whether it was silent for its lease.
_HOLDS = """
SELECT id, body, beat_at, lease, machinery.moment(%s) - beat_at, stalled, ended
FROM machinery.holds
"""
_HOLDING = "SELECT hold, count(*) FROM machinery.items WHERE state = 2 GROUP BY hold"
_BEAT = """
UPDATE machinery.holds SET beat_at = machinery.moment(%s), stalled = %s
WHERE id = %s AND NOT ended RETURNING 1
"""
_WRITE = "UPDATE machinery.holds SET body = %s WHERE id = %s"
_END = "SELECT back, is_over FROM machinery.end_hold(%s, %s, %s, %s::bigint[])"
_HAS = """
SELECT id, count, claim FROM machinery.items WHERE id = ANY(%s::bigint[]) AND hold = %s
    AND EXISTS (SELECT 1 FROM machinery.holds h WHERE h.id = hold AND NOT h.ended)
"""
# In: hold, the last of its claims that has got a reply, and what is in hand.
_GIVE_BACK_UNDONE = """
WITH undone AS (
    UPDATE machinery.items i SET state = 0, hold = NULL, claim = NULL, runs = false
    WHERE i.state = 2 AND i.hold = %s AND i.claim <= %s AND NOT EXISTS (
        SELECT 1 FROM unnest(%s::bigint[], %s::int[], %s::bigint[]) AS k(id, count, claim)
        WHERE k.id = i.id AND k.count = i.count AND k.claim = i.claim)
    RETURNING i.queue
) SELECT count(*), machinery.tell(array_agg(DISTINCT machinery.topic_of(queue))) FROM undone
"""
_RUNS = """
UPDATE machinery.items SET runs = true WHERE id = %s AND hold = %s AND count = %s AND claim = %s
"""


def raw(text: str) -> bytes:
    """Return a name as it is stored."""
    return text.encode("utf-8", "surrogatepass")


def text_of(stored: bytes) -> str:
    """Return the name that is stored so; of other bytes one that can be shown."""
    try:
        return stored.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:  # a stranger's
        return stored.decode("utf-8", "backslashreplace")


def literal(text: str) -> str:
    """Return a name as a literal of type bytea."""
    if text.isascii() and "\\" not in text and "\0" not in text:
        return text
    return "\\x" + raw(text).hex()


def note_ended(driver: PostgreSQLDriver, receipts: Iterable[ClaimReceipt]) -> None:
    """Note that these messages are not in the hands of their consumers any more."""
    for receipt in receipts:
        if (in_hand := driver.in_hand.get(receipt.hold)) is not None:
            in_hand.discard(receipt)


class PostgreSQLMessages(MessageQueues, HoldKeeper):
    """Messages in the driver's database."""

    def __init__(self, driver: PostgreSQLDriver, unavailable: type[MachineryError]) -> None:
        self.driver = driver
        self.unavailable = unavailable
        self._suspects = Suspects(driver.clock)

    def ask(self, sql: str, arguments: Params, *, doing: str, sender: str = "") -> list[Cells]:
        """Run a statement that may be repeated. `sender`: as for the driver."""
        away = self.unavailable
        return self.driver.run(sql, arguments, doing=doing, away=away, sender=sender)

    def listen(self) -> PostgreSQLTopicListener:
        return PostgreSQLTopicListener(self.driver.ear)

    def promote(self) -> int | None:
        [(due,)] = self.ask(_PROMOTE, (self.driver.given_now(),), doing="queueing what is due")
        return None if due is None else int(due)

    def messages(
        self,
        queue: str | None,
        *,
        since: int = 0,
        after: StoredMessage | None = None,
        items: int = PAGE,
        size: int = STEP_BYTES,
    ) -> list[StoredMessage]:
        self.promote()
        behind = after.place if after is not None else (FIRST + 1, FIRST, 0)
        assert isinstance(behind, tuple)
        first, second, id = behind
        wanted = {
            "queue": None if queue is None else raw(queue),
            "first": first,
            "second": second,
            "id": id,
            "since": since,
            "items": items,
            "size": size,
        }
        found = self.ask(_LATE if queue is None else _WAIT, wanted, doing="listing messages")
        return [
            StoredMessage(
                id=number,
                queue=text_of(name),
                body=body,
                put_at=put_at,
                place=(*order, number),
            )
            for number, name, body, put_at, *order in found
        ]

    def newest_id(self) -> int:
        [(id,)] = self.ask(_NEWEST, (), doing="looking at messages")
        return int(id)

    def count_messages(self) -> dict[str, QueueCount]:
        self.promote()
        counts: dict[str, QueueCount] = {}
        for queue, state, number, oldest_at in self.ask(_COUNTS, (), doing="counting messages"):
            count = counts.setdefault(text_of(queue), QueueCount())
            match state:
                case 0:
                    count.waiting, count.oldest_at = number, oldest_at
                case 1:
                    count.late = number
                case _:
                    count.held = number
        return counts

    def count_waiting(self, queue: str) -> int:
        self.promote()
        [(number,)] = self.ask(_COUNT_WAITING, (raw(queue),), doing="counting messages")
        return int(number)

    # Holds

    def open_hold(self, body: bytes, *, lease: float) -> PostgreSQLHold:
        return PostgreSQLHold(self, body, lease)

    def holds(self) -> list[HoldReport]:
        found = self._holds()
        holding: dict[str, int] = dict(self.ask(_HOLDING, (), doing="listing consumers"))
        return [
            HoldReport(
                id=id,
                body=body,
                beat_at=beat_at,
                holding=holding.get(id, 0),
                stalled=stalled or silence > lease,
            )
            for id, body, beat_at, lease, silence, stalled, ended in found
            if not ended and _look(id) is not SessionState.DEAD
        ]

    def dead_holds(self) -> list[str]:
        holds = self._holds()
        self._suspects.look(
            (id, beat_at, lease / 1e6)
            for id, _, beat_at, lease, silence, *_ in holds
            if is_silent(silence, lease)
        )
        return [
            id
            for id, *_, ended in holds
            if ended or id in self._suspects.dead or _look(id) is SessionState.DEAD
        ]

    def _holds(self) -> list[Cells]:
        return self.ask(_HOLDS, (self.driver.given_now(),), doing="listing consumers")

    def beat(self, hold: str, *, stalled: bool) -> bool:
        """Let a hold live on for another lease; return False if it was ended."""
        arguments = (self.driver.given_now(), stalled, hold)
        return bool(self.ask(_BEAT, arguments, doing="beating"))

    def condemn(self, hold: str, items: int) -> int | None:
        folder = host_folder(KIND)
        beat_at = None if _look(hold) is SessionState.DEAD else self._suspects.dead.get(hold, -1)
        ran = session_files.ran(folder, hold)
        struck = None if ran is None else [id for id, _ in ran]
        back, is_over = self.end_hold(hold, beat_at, items, struck)
        if is_over:
            session_files.remove(folder, hold)
        return back

    def end_hold(
        self, hold: str, beat_at: int | None, items: int | None, struck: list[int] | None
    ) -> tuple[int | None, bool]:
        """End a hold as `condemn`, if its last beat is this one; None: in any case.

        Returns:
            How many went back, and whether none is left.
        """
        arguments = (hold, beat_at, items, struck)
        [(back, is_over)] = self.ask(_END, arguments, doing="giving back messages")
        return None if back is None else int(back), bool(is_over)


def _look(hold: str) -> SessionState:
    return session_files.look(host_folder(KIND), hold)


class PostgreSQLHold(FileHold):
    """A row that beats, and a locked file.

    The promotion of an asynchronous replica, or a crash with synchronous_commit off, may undo the
    end of a message: then it is held again, by a consumer that is done with it. So once a
    connection was lost, a beat compares what is held with what is in hand, and gives back the rest.
    """

    def __init__(self, messages: PostgreSQLMessages, body: bytes, lease: float) -> None:
        super().__init__(host_file(KIND))
        self._messages = messages
        self._driver = driver = messages.driver
        self._touch_at = time.monotonic() + TOUCH
        self._in_hand: set[ClaimReceipt] = set()
        self._answered, self._losses = 0, driver.losses
        try:
            arguments = (self.id, body, driver.given_now(), round(lease * 1e6))
            self._ask(_OPEN, arguments, doing="registering a consumer")
        except BaseException:
            self._file.end()
            raise
        driver.in_hand[self.id] = self._in_hand

    def _ask(self, sql: str, arguments: Params, *, doing: str) -> list[Cells]:
        return self._messages.ask(sql, arguments, doing=doing)

    def claim(
        self,
        queues: Sequence[str],
        items: int,
        *,
        size: int = STEP_BYTES,
        number: int = 0,
        lost: int | None = None,
    ) -> Claims:
        names = list(map(raw, queues))
        arguments = (self._driver.given_now(), self.id, names, items, size, number, lost)
        (due, *_), *found = self._ask(_CLAIM, arguments, doing="claiming")
        claimed = [
            Claimed(
                receipt=ClaimReceipt(self.id, id, count, claim),
                queue=text_of(queue),
                body=body,
                fence=Fence(fence),
                strikes=strikes,
                put_at=put_at,
            )
            for _, id, queue, body, count, claim, strikes, put_at, fence in found
        ]
        self._in_hand.update(one.receipt for one in claimed)
        self._answered = number
        return Claims(claimed, due)

    def has(self, receipts: Sequence[ClaimReceipt]) -> list[bool]:
        ids = [one.id for one in receipts]
        found = self._ask(_HAS, (ids, self.id), doing="looking for messages")
        ours = {ClaimReceipt(self.id, id, count, claim) for id, count, claim in found}
        return [one in ours for one in receipts]

    def begin_run(self, receipt: ClaimReceipt) -> None:
        if self._file.notes_runs:
            self._file.begins((receipt.id, ALL))
        if receipt.count > 1:  # for those who cannot read the file
            try:
                run = (receipt.id, self.id, receipt.count, receipt.claim)
                self._ask(_RUNS, run, doing="noting a run")
            except MachineryError:
                return  # if it kills this process now, the next death counts

    def write(self, body: bytes) -> None:
        self._ask(_WRITE, (body, self.id), doing="registering a consumer")

    def beat(self) -> bool:
        if time.monotonic() >= self._touch_at:
            self._file.touch()
            self._touch_at = time.monotonic() + TOUCH
        if self._messages.beat(self.id, stalled=False):
            self._give_back_undone()
            return True
        self.abandon()  # who gives its messages back reads the file first
        return False

    def abandon(self) -> None:
        self._driver.in_hand.pop(self.id, None)
        super().abandon()

    def _give_back_undone(self) -> None:
        losses = self._driver.losses
        if losses == self._losses and not self._driver.is_pooled:  # a pooler hides what it loses
            return
        answered = self._answered  # what is claimed from now on is above it
        in_hand = list(self._in_hand)  # what ends from now on is still among these
        kept = [[getattr(one, name) for one in in_hand] for name in ("id", "count", "claim")]
        try:
            arguments = (self.id, answered, *kept)
            [(back, _)] = self._ask(_GIVE_BACK_UNDONE, arguments, doing="giving back messages")
        except MachineryError as error:
            logger.debug("what PostgreSQL has undone is looked for again: %s", error)
            return
        self._losses = losses
        if back:
            logger.warning("PostgreSQL has undone the ends of %d messages: they come again", back)

    def _give_back(self) -> None:
        self._driver.in_hand.pop(self.id, None)
        self._messages.end_hold(self.id, None, None, [])


class PostgreSQLTopicListener(TopicListener):
    """A waiter of the process's listening connection."""

    def __init__(self, ear: Ear) -> None:
        self._waiter = ear.waiter()

    def watch(self, topics: Iterable[str]) -> None:
        self._waiter.watch(map(raw, topics))

    def unwatch(self, topics: Iterable[str]) -> None:
        self._waiter.unwatch(map(raw, topics))

    def wait(self, timeout: float) -> None:
        self._waiter.wait(timeout)

    def wake(self) -> None:
        self._waiter.wake()

    def close(self) -> None:
        self._waiter.close()
