"""Base of the suites of messages as rows: the store, its clock, and short steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from machinery_py.rows.contract import (
    Committed,
    Facts,
    Key,
    StepResult,
    Write,
)
from machinery_py.rows.messages import (
    Claimed,
    Hold,
    Join,
    MessageRows,
    MessageStep,
    Place,
    Push,
)
from machinery_py.testing.clocks import ManualClock

#: Each call returns a new handle on the same store.
OpenMessageRows = Callable[[], MessageRows]

LEASE = 10.0  # seconds
SECOND = 1_000_000  # µs
SET, READY, BESIDE = Key("set", "s"), Key("ready", "s"), Key("beside", "s")


def carry_out(rows: MessageRows, step: MessageStep) -> StepResult:
    [done] = rows.commit([step])
    return done


def put(rows: MessageRows, *bodies: bytes, **more: Any) -> None:
    puts = tuple(Push(queue="q", body=body, **more) for body in bodies)
    assert isinstance(carry_out(rows, MessageStep(pushes=puts)), Committed)


def back(claimed: Claimed) -> Push:
    """Return the push by which a message goes back to its place."""
    return Push(queue=claimed.queue, id=claimed.receipt.id, place=Place.SAME)


def claim(hold: Hold, items: int) -> list[Claimed]:
    return hold.claim(["q"], items).found


def bodies(claimed: Sequence[Claimed]) -> list[bytes]:
    return [one.body for one in claimed]


def join(member: str, *, whole: int = 2) -> MessageStep:
    ready = Write(body=member.encode(), facts=Facts(at=1))
    one = Join(
        set=SET, member=member, whole=whole, ready=READY, write=ready, beside={BESIDE: ready}
    )
    return MessageStep(joins=(one,))


class MessageCase:
    """Base of the tests of one store."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """Return the clock of the store."""
        return ManualClock()

    @pytest.fixture
    def open_rows(self, clock: ManualClock) -> OpenMessageRows:
        raise NotImplementedError(f"{type(self).__name__}: override the fixture open_rows")

    def let_die(self, hold: Hold) -> None:
        """Let the process of the hold end, as far as the store can see; by default it is silent."""

    def hide(self, rows: MessageRows, hold: Hold) -> None:
        """Let its beats be all that the store can see of the hold's life; by default they are."""

    @pytest.fixture
    def rows(self, open_rows: OpenMessageRows) -> MessageRows:
        return open_rows()

    @pytest.fixture
    def hold(self, rows: MessageRows) -> Hold:
        return rows.open_hold(b"one", lease=LEASE)
