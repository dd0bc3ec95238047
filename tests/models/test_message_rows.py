"""Each store of messages against messages in memory: the same moves, the same answers.

Without tenants: in memory a tenant's turns are forgotten when nothing waits, elsewhere when they
are over. Without `Place.WAITED`, whose share depends on how each store counts its claims.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from machinery_py.clock import micros
from machinery_py.connections.postgresql.client import PostgreSQLDriver
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.rows.contract import Facts, Key, StepResult, Write
from machinery_py.rows.memory import MemoryRows
from machinery_py.rows.messages import (
    CLOSED,
    Claimed,
    ClaimReceipt,
    Hold,
    Join,
    MessageRows,
    MessageStep,
    Place,
    Push,
    Room,
    waiting_at,
)
from machinery_py.rows.postgresql import PostgreSQLRows
from machinery_py.rows.postgresql_messages import PostgreSQLHold
from machinery_py.rows.sqlite import SQLiteRows
from machinery_py.rows.sqlite_messages import SQLiteHold
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import HANG
from tests.models.machine import EXAMPLES, SHRINK

LEASE = 10.0  # seconds
QUEUES, HOLDS = ("mail", "jobs"), 3
READY, SET, TOKEN = Key("ready", "s"), Key("set", "s"), Key("token", "t")

EMPTY = "TRUNCATE machinery.rows, machinery.members, machinery.items, machinery.holds"

PICK, HOLD, QUEUE = st.integers(0, 9), st.integers(0, HOLDS - 1), st.sampled_from(QUEUES)
DUE = st.sampled_from((0, 0, 0, 1, 5))  # seconds from now


@dataclasses.dataclass(frozen=True)
class Move:
    """A pause, and what is done then with one of those that there are."""

    pause: float
    what: str
    pick: int
    hold: int
    queue: str
    due: int
    flag: bool


MOVES = st.builds(
    Move,
    pause=st.sampled_from((0.0, 0.0, 0.5, 2.0)),
    what=st.sampled_from(
        3 * ("put", "claim", "claim", "die", "take")
        + ("back", "on", "drop", "held", "join", "close", "run", "end", "promote")
    ),
    pick=PICK,
    hold=HOLD,
    queue=QUEUE,
    due=DUE,
    flag=st.booleans(),
)


class Side:
    """A store, its holds, and the receipts that were ever given, by the order of their claims."""

    def __init__(self, rows: MessageRows) -> None:
        self.rows = rows
        self.holds: list[Hold] = [rows.open_hold(b"", lease=LEASE) for _ in range(HOLDS)]
        self.lost: list[int | None] = [None] * HOLDS
        self.given: list[Claimed] = []

    def step(self, step: MessageStep) -> StepResult:
        [done] = self.rows.commit([step])
        return done

    def receipt(self, pick: int) -> ClaimReceipt:
        return self.given[-1 - pick % len(self.given)].receipt if self.given else waiting_at(10**9)


class Both:
    """Messages of a store beside messages in memory."""

    def __init__(self, store: MessageRows, clock: ManualClock) -> None:
        self.clock = clock
        self.sides = Side(MemoryRows(clock)), Side(store)
        self.number = 0  # of moves: of bodies and claims, too

    def do(self, move: Move) -> None:
        self.number += 1
        for seconds in (LEASE + 1.0, LEASE) if move.what == "die" else (move.pause,):
            self.clock.advance(seconds)
            for side in self.sides:  # in memory a hold lives by its beats
                for number, hold in enumerate(side.holds):
                    if move.what != "die" or number != move.hold:
                        hold.beat()
                side.rows.dead_holds()
        model, store = (self._do(move, side) for side in self.sides)
        assert model == store, move
        self.compare()

    def _do(self, move: Move, side: Side) -> object:
        act: Callable[[Move, Side], object] = getattr(self, f"_{move.what}")
        return act(move, side)

    def _put(self, move: Move, side: Side) -> object:
        now = micros(self.clock.now())
        side.rows.promote()  # when what is due counts for a room is the store's
        pushes = tuple(
            Push(
                queue=move.queue,
                body=b"%d" % (3 * self.number + number),
                priority=move.pick // 5,
                due=now + move.due * 1_000_000 if move.due else 0,
            )
            for number in range(3)
        )
        step = MessageStep(pushes=pushes, room=(Room(queue=move.queue, limit=12, adds=3),))
        if move.flag and move.pick == 0:
            step.once, step.write = TOKEN, {TOKEN: Write(body=b"", expires_in=5_000_000)}
        return type(side.step(step))

    def _claim(self, move: Move, side: Side) -> object:
        hold, lost = side.holds[move.hold], side.lost[move.hold]
        queues = QUEUES if move.pick % 2 else (move.queue,)
        claims = hold.claim(queues, 1 + move.pick % 3, number=self.number, lost=lost)
        if lost is not None:  # and it is carried out late
            assert hold.claim(queues, 3, number=lost).found == []
        if move.flag and move.pick < 3:  # the reply is lost
            side.lost[move.hold] = self.number if lost is None else lost
        else:
            side.lost[move.hold] = None
            side.given += claims.found
            if move.flag:
                for one in claims.found:
                    hold.begin_run(one.receipt)
        found = [
            (one.body, one.queue, one.strikes, one.put_at, one.receipt.count)
            for one in claims.found
        ]
        # What is claimed again may come in any order.
        return (sorted(found) if lost is not None else found), claims.next_due

    def _take(self, move: Move, side: Side) -> object:
        return type(side.step(MessageStep(takes=(side.receipt(move.pick),))))

    def _held(self, move: Move, side: Side) -> object:
        step = MessageStep(held=(side.receipt(move.pick),), write={READY: None})
        return type(side.step(step))

    def _back(self, move: Move, side: Side) -> object:
        receipt = side.receipt(move.pick)
        queue = side.given[-1 - move.pick % len(side.given)].queue if side.given else "mail"
        back = Push(queue=queue, id=receipt.id, place=Place.SAME)
        return type(side.step(MessageStep(takes=(receipt,), pushes=(back,))))

    def _on(self, move: Move, side: Side) -> object:
        """Let a message go on: later, or in another queue, with another body perhaps."""
        receipt, now = side.receipt(move.pick), micros(self.clock.now())
        push = Push(
            queue=move.queue,
            id=receipt.id,
            body=b"%d" % (3 * self.number) if move.flag else None,
            due=now + move.due * 1_000_000 if move.due else 0,
        )
        return type(side.step(MessageStep(takes=(receipt,), pushes=(push,))))

    def _drop(self, move: Move, side: Side) -> object:
        found = side.rows.messages(None if move.flag else move.queue)
        found.sort(key=lambda one: int(one.body))
        if not found:
            return None
        return type(side.step(MessageStep(takes=(waiting_at(found[move.pick % len(found)].id),))))

    def _join(self, move: Move, side: Side) -> object:
        ready = Write(body=b"%d" % self.number, facts=Facts(at=1))
        join = Join(set=SET, member=str(move.pick), whole=3, ready=READY, write=ready)
        return type(side.step(MessageStep(joins=(join,))))

    def _close(self, move: Move, side: Side) -> object:
        key = Key(CLOSED, move.queue)
        return type(side.step(MessageStep(write={key: Write(body=b"") if move.pick < 2 else None})))

    def _run(self, move: Move, side: Side) -> object:
        receipt = side.receipt(move.pick)
        for hold in side.holds:
            if hold.id == receipt.hold:
                (hold.begin_run if move.flag else hold.end_run)(receipt)
        return None

    def _end(self, move: Move, side: Side) -> object:
        side.holds[move.hold].end()
        self._open(move, side)
        return None

    def _die(self, move: Move, side: Side) -> object:
        """Let a process die: its lock is free, or its beats are missed at two looks."""
        dying = side.holds[move.hold]
        if isinstance(dying, (SQLiteHold, PostgreSQLHold)):
            dying.abandon()
        else:
            assert side.rows.dead_holds() == [dying.id]
        back = [side.rows.condemn(dying.id, 2) for _ in range(9)]
        self._open(move, side)
        return back

    def _open(self, move: Move, side: Side) -> None:
        side.holds[move.hold] = side.rows.open_hold(b"", lease=LEASE)
        side.lost[move.hold] = None

    def _promote(self, move: Move, side: Side) -> object:
        return side.rows.promote()

    def compare(self) -> None:
        model, store = (self._seen(side.rows) for side in self.sides)
        assert model == store

    def _seen(self, rows: MessageRows) -> object:
        late = [(one.queue, one.body) for one in rows.messages(None)]
        waiting = {queue: [one.body for one in rows.messages(queue)] for queue in QUEUES}
        counts = {
            queue: (count.waiting, count.late, count.held)
            for queue, count in rows.count_messages().items()
        }
        ready = [row.body for row in rows.list("ready")]
        return late, waiting, counts, ready, sorted(one.holding for one in rows.holds())


def check(example: Callable[[list[Move]], None], examples: int) -> None:
    run = settings(
        max_examples=EXAMPLES or examples,
        deadline=None,
        derandomize=not EXAMPLES,
        database=None,
        phases=[Phase.generate, Phase.shrink] if SHRINK else [Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run(given(st.lists(MOVES, min_size=20, max_size=40))(example))()


@pytest.mark.slow
def test_sqlite_moves_messages_as_memory(tmp_path: Path) -> None:
    numbers = itertools.count()

    def example(moves: list[Move]) -> None:
        clock = ManualClock()
        path = tmp_path / f"{next(numbers)}.db"
        with closing(SQLiteDriver(path, clock=clock, synchronous="NORMAL")) as driver:
            both = Both(SQLiteRows(driver), clock)
            for move in moves:
                both.do(move)

    check(example, 100)


@pytest.mark.slow
def test_postgresql_moves_messages_as_memory(postgres_url: str) -> None:
    clock = ManualClock()

    with closing(PostgreSQLDriver(postgres_url, clock=clock, timeout=HANG)) as driver:

        def example(moves: list[Move]) -> None:
            driver.run(EMPTY, doing="emptying")
            both = Both(PostgreSQLRows(driver), clock)
            for move in moves:
                both.do(move)

        check(example, 30)
