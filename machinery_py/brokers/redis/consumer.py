"""A consumer of Redis queues. connections/redis/keys.py lists the keys.

It has a connection of its own for claims. When nothing is to be had, that blocks in BLMOVE at the
first queue that is not paused, with the next claim behind it in the same packet; `wake` unblocks
it. Where all queues are paused, it blocks at its own list of arrivals, where nothing comes.

A claim that finds nothing notes the client as idle. Who puts something that BLMOVE does not see
takes it out of the idle ones and wakes it, perhaps before the BLMOVE. So the packet begins with a
look whether the client is still noted; Redis does nothing for others in between. If it is not, the
client wakes itself. It does so, too, when something is due: Redis ends timed blocks at its next
tick, up to 0.1 s late.

Limits: a Go program's message on the second queue of a blocked client is noticed within BLOCK.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, cast

import msgspec

from machinery_py.bounds import AT_ONCE, in_steps, pieces
from machinery_py.brokers.base import WAITING, Consumer, Delivery, Disposal, Fate
from machinery_py.brokers.liveness import own_record, with_queues
from machinery_py.brokers.redis import scripts
from machinery_py.brokers.redis.messages import EMPTY, head_of
from machinery_py.brokers.redis.mover import MOVE, DueMover
from machinery_py.clock import micros
from machinery_py.connections.redis.client import RedisDriver, raw
from machinery_py.connections.redis.connection import RedisConnection
from machinery_py.connections.redis.errors import ErrorKind, kind_of, log_spoilt
from machinery_py.connections.redis.keys import FENCE, queue_keys
from machinery_py.connections.redis.scripts import pack
from machinery_py.connections.session_files import host_file, host_folder, ran
from machinery_py.errors import BrokerUnavailable, MachineryError
from machinery_py.fences import Fence
from machinery_py.receipts import Receipt
from machinery_py.texts import get_logger, printable

logger = get_logger(__name__)

BLOCK = 1.0  # seconds of one sleep; shorter than half a lease
LINK_TIMEOUT = 3.0  # seconds for the reply to a claim, beyond its sleep
REFUSED_PAUSE = 0.1  # seconds between claims where Redis lets nobody block: it is full
STILL_IDLE = (
    0.05  # seconds after a claim that noted the client, in which the next one may be left out
)
LOST_LIFE = 30.0  # seconds that a claim without a reply is asked for
KIND = "redis"  # of the files that say what consumers run

_rows = msgspec.msgpack.Decoder(list[tuple[int, int, int, int, int, int, int, int]]).decode


class RedisReceipt(msgspec.Struct, Receipt, frozen=True, gc=False):
    """`number`: each queue counts the messages that are claimed from it."""

    session: str
    number: int

    def __str__(self) -> str:
        return f"{self.session}.{self.number}"


class RedisConsumer(Consumer):
    """A session: its entries in the registries, and a connection."""

    def __init__(
        self,
        driver: RedisDriver,
        queues: tuple[str, ...],
        *,
        worker: str,
        mover: DueMover,
        own: dict[str, None],
    ) -> None:
        """`own` is told the queues, which this process looks after."""
        self._driver = driver
        self._own = own
        self._served = tuple(dict.fromkeys(queues))
        self._know(self._served)
        self.none_revoked = False  # whether the last claim saw no revoked task at all
        # The queue to block at, as the last claim said.
        self._blocking_queue: tuple[str, str] | None = None
        self._worker = printable(worker)
        self._mover = mover
        self._move_reply: Any = None  # of the move in front of the last claim
        self._refused = False  # whether the last blocking move was
        # What it has moved, and the fence that was counted before; others' may be in between.
        self._arrived: tuple[object, int] = b"", 0
        self._is_due = False  # whether the last claim left something due
        self._has_found = False  # whether it found something
        self._block = min(BLOCK, driver.limits.block)
        self._claims = itertools.count(1)
        self._lost: list[tuple[int, float]] = []
        self._highest: dict[str, int] = {}  # by queue, of the receipts that were reported
        self._before: dict[str, int] = {}  # the same, when the first claim was lost
        self._since: dict[str, list[int]] = {}  # those that were reported after it
        self._in_hand: dict[str, set[int]] = {}  # by queue, the receipts of what has not ended
        self._recount = False  # whether the server may have forgotten that others have
        self._link: RedisConnection | None = None
        self._woken = False
        self._asleep = b""  # the number of the connection while it blocks
        self._noted = False  # whether the last claim has noted it as idle
        self._noted_at = 0.0  # monotonic second of the last claim
        self._due_at = math.inf  # and when something is due, by that claim
        self._failing_since = math.inf  # monotonic second of the first claim that did
        self._closed = False
        self._pid = os.getpid()
        self._starting = threading.Lock()
        self._start_session()

    def _know(self, queues: tuple[str, ...]) -> None:
        """Remember these queues: those that it serves, or has served before."""
        self.keys: list[tuple[str, str]] = [queue_keys(queue) for queue in queues]
        self._series = {queue: series_of(queue) for queue in queues}
        self._places = {queue: index for index, queue in enumerate(queues)}
        self._queues = queues

    def _start_session(self) -> None:
        file = host_file(KIND)
        session = file.key  # its name is that of the file
        self._record = own_record(self._worker, (), self._driver.clock)
        try:
            self._register(session)
        except BaseException:
            file.end()
            raise
        self.session: str = session
        self._file = file

    def _register(self, session: str) -> None:
        """Write the session into the registries of its queues, with the queues that it shows."""
        self._own.update(dict.fromkeys(self._queues))
        left = [queue for queue in self._queues if queue not in self._served]
        record = raw(with_queues(self._record, self._served, left))
        self._driver.run(scripts.REGISTER, self._driver.now(), session, record, self.keys)

    def serve(self, queues: Sequence[str]) -> None:
        with self._starting:
            is_alive = self._beats()
            served = tuple(dict.fromkeys(queues))
            self._know(tuple(dict.fromkeys((*self._queues, *served))))  # the places stay the same
            before, self._served = self._served, served
            try:
                if is_alive:  # else the next beat starts a session, with these queues
                    self._register(self.session)
            except MachineryError:
                self._served = before
                raise
        self.wake()

    # Claiming

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        if self._closed:
            return []
        served = self._served
        queues = [queue for queue in order if queue in served] or served
        deliveries: list[Delivery] = []
        now = time.monotonic()
        deadline = now + timeout
        # Who still counts as idle has claimed just now, and would have been told of anything new.
        if not self._noted or timeout <= 0 or self._woken or now - self._noted_at > STILL_IDLE:
            deliveries, _ = self._claim(limit, queues, sleep=0.0, will_sleep=timeout > 0)
        while not deliveries and not self._woken and not self._closed:
            now = time.monotonic()
            left, due_in = deadline - now, max(0.0, self._due_at - now)
            if left <= 0:
                break
            sleep = min(left, due_in, self._block)
            deliveries, _ = self._claim(limit, queues, sleep=sleep, will_sleep=True)
        self._woken = False
        return deliveries

    def _claim(
        self, limit: int, queues: Sequence[str], *, sleep: float, will_sleep: bool
    ) -> tuple[list[Delivery], float]:
        """Block for `sleep` seconds and claim; return deliveries, and seconds until more is due.

        Where the last claim has left something due and this one does not block, a move precedes it.
        """
        claim = next(self._claims)
        self._refused, self._arrived = False, (b"", 0)
        move_of = 0 if sleep or not self._is_due else limit if self._has_found else MOVE
        now = time.monotonic()
        session = self.session  # a beat may start another one before the reply comes
        keys = list(map(queue_keys, queues))
        link: RedisConnection | None = None
        try:
            link = self._open_link()
            client = client_of(link)
            blocks = (client, will_sleep or bool(sleep), self._noted)
            argument = self._claim_argument(session, queues, keys, limit, claim, blocks)
            looks = self._looks(client, keys) if sleep else []
            self._noted = True  # until the reply says that it is not
            reply = self._ask(link, session, argument, sleep, move_of, looks)
        except MachineryError:
            raise
        except Exception as error:  # redis-py's, sorted by `fail`
            if link is not None:
                if not self._lost:
                    self._before, self._since = dict(self._highest), {}
                self._lost.append((claim, time.monotonic()))
                link.close()
            self._link = None
            self._failing_since = min(self._failing_since, time.monotonic())
            if self._driver.waits(error, self._failing_since):
                return [], self._block
            self._driver.fail(error, doing=scripts.CLAIM.doing, away=BrokerUnavailable)
        self._failing_since = math.inf
        alive, due_in, revoked, to_wake, rows, blocking_queue, problems, *claimed = reply
        bodies, fence, *left = claimed
        if problems:  # it cannot be noted at that queue, and what waits there ends its sleep
            log_spoilt(problems, doing=scripts.CLAIM.doing)
            self._refused = True
        self._blocking_queue = keys[blocking_queue - 1] if blocking_queue else None
        # Forgotten only after a claim that succeeded; they may fail for longer than that.
        self._lost = [
            (number, now if left else at) for number, at in self._lost if now - at < LOST_LIFE
        ]
        if to_wake:
            self._driver.unblock(to_wake)
        now = time.monotonic()
        if not alive:
            self._noted, self._due_at = False, math.inf
            return [], self._block  # the next beat starts a new session
        self.none_revoked: bool = not revoked
        deliveries = self._deliveries(session, queues, rows, bodies, fence)
        self._noted, self._noted_at = (will_sleep or bool(sleep)) and not deliveries, now
        if self._refused and not deliveries:
            time.sleep(min(sleep, REFUSED_PAUSE))
        self._is_due, self._has_found = due_in == 0, bool(deliveries)
        if move_of and not self._moved(move_of, deliveries) and due_in == 0:
            due_in = 10_000  # what is due still cannot be moved now, or another mover is at it
        self._due_at = math.inf if due_in < 0 else now + due_in / 1e6
        return deliveries, self._block if due_in < 0 else due_in / 1e6

    def _claim_argument(
        self,
        session: str,
        queues: Sequence[str],
        keys: Sequence[tuple[str, str]],
        limit: int,
        claim: int,
        blocks: Sequence[object],
    ) -> bytes:
        lost = [number for number, _ in self._lost]
        values = [self._driver.now(), session, keys, limit, claim, lost, *blocks]
        highest = [self._highest.get(one, 0) for one in queues]
        values += [self.is_timed, FENCE, highest]
        if lost:
            before, since = self._before, self._since
            values.append([(before.get(one, 0), since.get(one, ())) for one in queues])
        return pack(values)

    def _moved(self, count: int, deliveries: Sequence[Delivery]) -> int:
        """End the move of so many in front of the last claim; return how many were moved."""
        reply, self._move_reply = self._move_reply, None
        try:
            return self._mover.step(count) if reply is None else self._mover.finish(reply)
        except Exception as error:
            if not deliveries:
                raise
            if not isinstance(error, MachineryError):
                logger.exception("due messages could not be moved")
            return 0  # these deliveries are ours now; the next mover does its part

    def _looks(self, client: str, keys: Sequence[tuple[str, str]]) -> list[bytes]:
        """Return commands that tell whether the client is still noted; none if it was not."""
        if not self._noted or not client:
            return []
        member = client.partition(".")[0].encode()
        command = self._driver.command
        return [command(b"SISMEMBER", f"{prefix}v".encode(), member) for _, prefix in keys]

    def _ask(
        self,
        link: RedisConnection,
        session: str,
        argument: bytes,
        sleep: float,
        move_of: int,
        looks: Sequence[bytes],
    ) -> Any:
        packet = self._driver.packed_script(scripts.CLAIM, argument)
        if move_of:
            link.send(self._mover.packet(move_of) + packet)
            self._move_reply = _read_before(link)
        elif not sleep:
            link.send(packet)
        else:
            self._sleep(link, session, packet, sleep, looks)
        return self._driver.read_script(link, scripts.CLAIM, argument)

    def _sleep(
        self,
        link: RedisConnection,
        session: str,
        packet: bytes,
        seconds: float,
        looks: Sequence[bytes],
    ) -> None:
        """Send the claim with a blocking move in front of it, and wait for the end of that."""
        name, prefix = self._blocking_queue or self.keys[0]
        arrivals = f"{prefix}i:{session}".encode()
        source = name.encode() if self._blocking_queue else arrivals
        self._asleep = link.number
        try:
            if self._woken:
                link.send(packet)
            else:
                command, timeout = self._driver.command, b"%.3f" % max(seconds, 0.001)
                count = command(b"INCRBY", FENCE.encode(), b"1")
                move = command(b"BLMOVE", source, arrivals, b"LEFT", b"RIGHT", timeout)
                is_due = self._due_at <= time.monotonic() + seconds
                link.send(b"".join((*looks, count, move, packet)))
                noted = [_read_before(link) != 0 for _ in looks]
                order = _read_before(link, refused=0)
                if not all(noted) or (is_due and not link.has_news(seconds)):
                    self._driver.end_block(link)
                moved = _read_before(link, refused=_REFUSED)
                self._refused, self._arrived = moved is _REFUSED, (moved, order)
        finally:
            self._asleep = b""

    def _open_link(self) -> RedisConnection:
        timeout = self._block + min(LINK_TIMEOUT, self._driver.limits.read)
        before, self._link = self._link, None
        self._link = link = self._driver.numbered(before, timeout=timeout)
        self._recount = self._recount or (link is not before and bool(self._highest))
        return link

    def _deliveries(
        self,
        session: str,
        queues: Sequence[str],
        rows: bytes,
        bodies: Sequence[bytes],
        first_fence: int,
    ) -> list[Delivery]:
        if not bodies:
            return []
        rest = cast("Iterator[tuple[Fence, bytes]]", enumerate(bodies, first_fence))
        packed = _rows(rows)
        for index, first, _, _, _, _, _, count in packed:
            queue = queues[index]
            self._in_hand.setdefault(queue, set()).update(range(first, first + count))
            self._highest[queue] = max(self._highest.get(queue, 0), first + count - 1)
            if self._lost:
                self._since.setdefault(queue, []).extend(range(first, first + count))
        now = self._driver.clock.now() if self.is_timed else None
        arrived, order = self._arrived
        return [
            Delivery(
                body=body,
                queue=queues[index],
                receipt=RedisReceipt(session, number),
                count=deliveries,
                fence=fence,
                strikes=strikes,
                parks=parks,
                priority=priority,
                order=order if body == arrived else 0,
                sent_at=None if now is None or wait < 0 else now - timedelta(microseconds=wait),
            )
            for index, first, deliveries, strikes, parks, priority, wait, count in packed
            for number, (fence, body) in zip(range(first, first + count), rest, strict=False)
        ]

    # Ending deliveries

    def place_of(self, delivery: Delivery, session: str) -> tuple[int, str]:
        """Return (index of the queue, number in it); (0, "") if another session has it.

        `session`: read once for all that goes to the store with it; a beat in another thread may
        start the next session at any moment, and a number means something in its own alone.
        """
        receipt, index = delivery.receipt, self._places.get(delivery.queue)
        if index is None or not isinstance(receipt, RedisReceipt) or receipt.session != session:
            return 0, ""
        return index, str(receipt.number)

    @property
    def queues(self) -> Sequence[str]:
        """The queues in the order of `place_of`."""
        return self._queues

    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        now, session = self._driver.clock.now(), self.session
        ended: list[bool] = []
        for step in pieces(disposals, _size_of, most=max(1, len(disposals))):
            rows = [(*self.place_of(one.delivery, session), *end_of(one, now)) for one in step]
            letters, to_wake = self._driver.run(
                scripts.DISPOSE, self._driver.now(), session, self.keys, rows, again=False
            )
            self._driver.unblock(to_wake)
            ended += [letter == ord("s") for letter in letters]
            self.note_ended([one.delivery for one in step])
        return ended

    def note_ended(self, deliveries: Sequence[Delivery]) -> None:
        """Note that these have ended, or were not ours any more."""
        for delivery in deliveries:
            receipt, numbers = delivery.receipt, self._in_hand.get(delivery.queue)
            if numbers and isinstance(receipt, RedisReceipt):
                numbers.discard(receipt.number)

    def give_back_forgotten(self) -> None:
        """Give back what has ended and is in flight again: a crash or a failover undid its end.

        Looked for once the connection of claims was made anew, and no lost claim may come any more.
        """
        now = time.monotonic()
        if not self._recount or any(now - at < LOST_LIFE for _, at in self._lost):
            return
        self._recount = False
        session, highest = self.session, dict(self._highest)  # what is claimed now is above them
        try:
            for index, queue in enumerate(self._queues):
                flight = f"{self.keys[index][1]}f:{session}".encode()
                found = self._driver.ask(b"HKEYS", flight, doing=scripts.DISPOSE.doing)
                numbers, last = self._in_hand.get(queue, ()), highest.get(queue, 0)
                rows = [
                    (index, str(number), "back", 0, EMPTY)
                    for number in map(int, filter(bytes.isdigit, found))
                    if number <= last and number not in numbers
                ]
                for some in in_steps(rows, AT_ONCE):
                    values = (self._driver.now(), session, self.keys, some)
                    _, to_wake = self._driver.run(scripts.DISPOSE, *values, again=False)
                    self._driver.unblock(to_wake)
        except MachineryError as error:
            self._recount = True
            logger.debug("what a crash of Redis undid is looked for again: %s", error)

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        if not deliveries:
            return []
        session = self.session
        places = [self.place_of(delivery, session) for delivery in deliveries]
        rows = [(self.keys[index][1], number) for index, number in places]
        return [bool(one) for one in self._driver.run(scripts.HOLDS, session, rows)]

    def run_begins(self, delivery: Delivery) -> None:
        file = self._file
        index, number = self.place_of(delivery, file.key)
        if number:
            file.begins((int(number), self._series[delivery.queue]))
        if delivery.count == 1:
            return
        # The last worker may have died of it. Noted in Redis, the run counts wherever this one
        # dies.
        try:
            prefix = self.keys[index][1]
            self._driver.run(scripts.BEGIN, file.key, prefix, number, patient=False)
        except MachineryError:
            return  # if it kills this worker now, the next death counts

    def run_ends(self, delivery: Delivery) -> None:
        file = self._file
        _, number = self.place_of(delivery, file.key)
        if number:
            file.ends((int(number), self._series[delivery.queue]))

    # Living

    def beat(self) -> bool:
        if self._closed:
            return True
        with self._starting:
            self._file.touch()
            if self._beats():
                self.give_back_forgotten()
                return True
            self._give_up(scripts.TOMBSTONE)
            self._start_session()
            return False

    def _beats(self) -> bool:
        """Beat in all queues; return False if the session was given up."""
        now = self._driver.now()
        return bool(self._driver.run(scripts.BEAT, now, self.session, self.keys, False))

    def wake(self) -> None:
        self._woken = True
        self._driver.unblock_while(lambda: self._asleep, doing="waking a worker")

    def close(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self.wake()
        self._give_up(scripts.CLOSED, patient=False)
        link, self._link = self._link, None
        if link is not None and not self._asleep:
            link.close()

    def _give_up(self, tombstone: int, *, patient: bool = True) -> None:
        """Leave the registries; what is still held goes back."""
        no_strikes = [()] * len(self.keys)
        give_up(self._driver, self.session, self.keys, "", no_strikes, tombstone, patient=patient)
        self._file.end()


_REFUSED = object()


def _size_of(disposal: Disposal) -> int:
    return len(disposal.delivery.body)


def _read_before(link: RedisConnection, *, refused: object = None) -> Any:
    """Read the reply in front of a claim's. If it is a refusal, what the claim says tells more."""
    try:
        return link.read()
    except Exception as error:
        said = str(error)
        is_told = kind_of(said) in (ErrorKind.FULL, ErrorKind.TYPE, ErrorKind.SCRIPT)
        if not is_told and "not an integer" not in said:  # fences.lua puts such a counter right
            raise
        return refused


def give_up(
    driver: RedisDriver,
    session: str,
    keys: Sequence[tuple[str, str]],
    beat: str,
    strikes: Sequence[Sequence[str]] | bool,
    tombstone: int,
    *,
    patient: bool = True,
) -> bool:
    """Condemn a session, and give back what it held, as condemn.lua says.

    Returns False if it has beaten since, or another worker was faster. What an error or a crash
    leaves is given back by the next looks at its tombstone.
    """
    values = (driver.now(), session, keys, beat, strikes, tombstone)
    held, to_wake, *more = driver.run(scripts.CONDEMN, *values, patient=patient)
    driver.unblock(to_wake)
    while more:
        now = driver.now()
        given, left, to_wake = driver.run(scripts.GIVE_BACK, now, session, keys, patient=patient)
        driver.unblock(to_wake)
        if not given or not left:
            break
    return bool(held >= 0)


def client_of(link: RedisConnection) -> str:
    """Return the client to be woken, `number.life`; empty if the server does not tell both."""
    life = link.life() if link.number else b""
    return f"{link.number.decode()}.{life.decode()}" if life else ""


def series_of(queue: str) -> int:
    """Return the series of a queue's deliveries in the file: each queue counts its own."""
    digest = hashlib.blake2b(queue.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def began_by(
    session: str, queues: Collection[str], served: Collection[str]
) -> list[list[str]] | None:
    """Return by queue the receipts that a dead session ran; None if that cannot be known here.

    Args:
        served: all queues of the session. If it ran something of another queue than these, then
            its file is not understood, and says nothing.
    """
    runs = ran(host_folder(KIND), session)
    if runs is None or {series for _, series in runs} - set(map(series_of, served)):
        return None
    return [
        [str(number) for number, series in runs if series == wanted]
        for wanted in map(series_of, queues)
    ]


def end_of(disposal: Disposal, now: datetime) -> tuple[str, int, msgspec.Raw]:
    """Return (fate, µs until it is due, head of a dead letter) as the scripts take it.

    Args:
        now: by the clock of the ETA. The script counts from the server's: a worker whose clock is
            wrong would have its tasks back at once, again and again, or hours too late.
    """
    fate = disposal.fate._value_
    if fate == "done" or fate == "back":
        return fate, 0, EMPTY
    if disposal.fate is Fate.LATER and disposal.reason == WAITING:
        fate = "wait"
    left = 0 if disposal.eta is None else max(0, micros(disposal.eta) - micros(now))
    return fate, left, head_of(disposal.uuid, disposal.name, disposal.reason, disposal.error)
